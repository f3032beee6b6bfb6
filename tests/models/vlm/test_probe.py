"""An adapter that no test has proven is compared with the model's own class: right ones pass, wrong ones are named."""

from types import SimpleNamespace

import pytest
import torch
from stock_families import Stock, stock
from tiny_models import perturb
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from lightrft_visual.config.registry import vlm_families
from lightrft_visual.errors import ConfigError
from lightrft_visual.models.loading import Checkpoint
from lightrft_visual.models.tiny.vlm import build_tokenizer
from lightrft_visual.models.vlm import probe
from lightrft_visual.models.vlm.actor import Actor
from lightrft_visual.models.vlm.families import VLMFamily, family_of, unregistered
from lightrft_visual.models.vlm.families.qwen import QwenVL
from lightrft_visual.models.vlm.families.text import TextOnly
from lightrft_visual.models.vlm.families.unregistered import Unregistered


class Gemma(VLMFamily):
    """Images attend to all of themselves."""

    def arguments(self, inputs, types):
        return inputs.vision.joined() | {"token_type_ids": (types == 1).long()}


def opened(built: Stock) -> Checkpoint:
    return Checkpoint("here", built.model.config, built.tokenizer, built.processor)


def proven(built: Stock, family: type[VLMFamily] | None = None, named: str = "") -> str | None:
    """family: registered for the model type, as a plug-in brings it."""
    if family is not None:
        facts = {"model_types": (built.model.config.model_type,), "processors": (type(built.processor).__name__,)}
        vlm_families.register("from outside", **facts)(family)
    try:
        actor = Actor(built.model, family_of(built.model.config).banned_ids(built.tokenizer), [1])
        return probe.prove_family(actor, opened(built), 64, {"pretrain": named or str(id(built))})
    finally:
        if family is not None:
            vlm_families.remove("from outside")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LIGHTRFT_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    "model_type,dtype",
    [
        *((kind, torch.float32) for kind in ("qwen3_vl_moe", "gemma3", "llava_onevision", "kimi_k25")),
        *((kind, torch.bfloat16) for kind in ("qwen3_5", "smolvlm")),
    ],
    ids=str,
)
def test_a_right_adapter_agrees_with_the_models_own_class(model_type, dtype):
    built = stock(model_type)
    built.model.to(dtype)
    right = type(family_of(built.model.config))
    line = proven(built, right)
    assert line.startswith(f"model type '{model_type}', run by {right.__name__}: its log-probs are")
    assert "text alone, one image, two images; padded" in line
    assert dtype == torch.bfloat16 or "1.0e-04 allowed" in line


# What each type's own class is given and the plain adapter leaves out.
LEFT_OUT = {
    "qwen3_vl_moe": "image_grid_thw",
    "qwen3_5": "image_grid_thw",
    "gemma3": "token_type_ids",
    "smolvlm": "pixel_attention_mask",
    "mistral3": "image_sizes",
}


@pytest.mark.parametrize("model_type", LEFT_OUT)
def test_an_adapter_that_leaves_an_input_out_is_refused_with_its_name_and_no_larger_difference_is_allowed(
    model_type, monkeypatch
):
    """Also where padding changes what the model's own class gives."""
    if model_type == "gemma3":
        own = probe._own_logits
        monkeypatch.setattr(probe, "_own_logits", lambda actor, sample, more=0: own(actor, sample, more) * (1 + more))
    built = stock(model_type, "eager" if model_type == "qwen3_vl_moe" else "sdpa")
    for _ in range(2):  # what differed is not kept
        with pytest.raises(ConfigError, match=f"^model type '{model_type}', run by the adapter VLMFamily: ") as refused:
            proven(built, VLMFamily, named="one")
    assert "1.0e-04 allowed" in str(refused.value) or model_type != "gemma3"
    for told in ("takes of the processor: ", LEFT_OUT[model_type], "subclass of VLMFamily"):
        assert told in str(refused.value)


def test_an_error_in_an_adapter_of_ones_own_is_told_with_its_place_and_without_hints():
    class Slips(VLMFamily):
        def arguments(self, inputs, types):
            return inputs.vision.joined() | {"token_type_ids": types.integers()}

    place = r"its forward raised AttributeError: .*\n  File .*test_probe.*\n .*types\.integers"
    with pytest.raises(ConfigError, match=f"by the adapter Slips: {place}") as told:
        proven(stock("gemma3"), Slips)
    assert told.value.__cause__.__traceback__ is not None
    assert "of its own" not in str(told.value) and "must " not in str(told.value)
    with pytest.raises(ConfigError, match="(?s)adapter Plain: .*must bring what its forward takes .*image_grid_thw"):
        proven(stock("qwen3_5"), type("Plain", (VLMFamily,), {}))  # an error in lines of transformers


@pytest.mark.parametrize(
    ("model_type", "dtype"), [("qwen3_vl_moe", torch.float32), ("qwen3_5", torch.bfloat16)], ids=str
)
def test_text_positions_in_the_place_of_mrope_are_refused(model_type, dtype):
    class FlatPositions(QwenVL):
        def positions(self, inputs, types):
            return super().positions(inputs, types)[:1].expand(4, -1, -1)

    built = stock(model_type)
    built.model.to(dtype)
    with pytest.raises(ConfigError, match=r"differ from those of Qwen3.*Generation's own forward by 0\.\d"):
        proven(built, FlatPositions)


def test_packed_samples_are_compared_where_the_adapter_says_that_it_packs():
    moe = type("Moe", (QwenVL,), {"packed": ("qwen3_vl_moe",)})
    assert "; padded; packed; without images)" in proven(stock("qwen3_vl_moe"), moe)
    assert "; padded; packed; without images)" in proven(stock("qwen3_5"), QwenVL)
    both_ways = type("BothWays", (Gemma,), {"packed": ("gemma3",)})
    with pytest.raises(ConfigError, match="packed; 1.0e-04 allowed.*leave the model type out of its `packed`"):
        proven(stock("gemma3"), both_ways)


class WholeRows(VLMFamily):
    """Loses the windows of attention: each token sees all before it."""

    def arguments(self, inputs, types):
        real, length = inputs.attention_mask.bool()[:, None, None], inputs.sequences.shape[1]
        seen = torch.ones(length, length, dtype=torch.bool).tril() & real | torch.eye(length, dtype=torch.bool)
        return inputs.vision.joined() | {"attention_mask": seen}


def test_windows_that_samples_outgrow_are_proven_beyond_their_length():
    built = stock("vipllava", sliding_window=40)
    assert type(family_of(built.model.config)) is Unregistered
    text = probe.made_up_samples(opened(built), probe._length(built.model.config, 64))[0]
    assert len(text.ids) - text.actions > 40
    assert "run by Unregistered" in proven(built)
    with pytest.raises(ConfigError, match="run by the adapter WholeRows: its log-probs differ .*text alone, padded"):
        proven(built, WholeRows)
    assert probe._length(built.model.config, 40) == 0, "of no effect"


def test_what_agreed_is_kept_until_something_changes_and_what_the_tests_have_proven_is_not_tried(monkeypatch):
    built = stock("vipllava")
    first = proven(built, named="one")
    monkeypatch.setattr(probe, "compare", lambda *_: pytest.fail("compared again"))
    assert proven(built, named="one") == f"{first} (found at an earlier start)"
    for name, version in (("another", probe.__version__), ("one", "0.2")):
        monkeypatch.setattr(probe, "__version__", version)
        with pytest.raises(pytest.fail.Exception, match="compared again"):
            proven(built, named=name)
    built.model.config.model_type = "llava"
    assert proven(built) is None


def test_a_plugins_family_that_is_of_another_model_type_is_told_of(monkeypatch, caplog):
    monkeypatch.setattr(vlm_families, "_entries", dict(vlm_families._entries))
    vlm_families.register("mine", model_types=("lava", "lava2"))(VLMFamily)
    caplog.set_level("INFO")
    family = SimpleNamespace(config=SimpleNamespace(model_type="llava"))
    assert probe.prove_family(SimpleNamespace(backbone=SimpleNamespace(family=family)), None, 64, {}) is None
    assert caplog.messages == [
        "families of plug-ins are of other model types than this model's 'llava': mine (lava, lava2)"
    ]


def test_a_cache_that_cannot_be_read_or_written_costs_another_comparison(tmp_path, monkeypatch, caplog):
    built = stock("vipllava")
    proven(built, named="one")
    (kept,) = (tmp_path / "cache" / "families").iterdir()
    kept.write_text("{}")
    assert "earlier" not in proven(built, named="one")
    (tmp_path / "file").touch()
    monkeypatch.setenv("LIGHTRFT_CACHE", str(tmp_path / "file"))
    assert "run by VLMFamily" in proven(built, VLMFamily)
    assert "cannot be written" in caplog.text


def text_model(model_type: str, **settings) -> Stock:
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = CONFIG_MAPPING[model_type](vocab_size=len(tokenizer), pad_token_id=0, **sizes, **settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    perturb(model, 0, 0.1)
    return Stock(model, None, tokenizer)


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_the_adapter_of_text_models_agrees_with_their_own_class_packed_too(model_type):
    assert "; padded; packed)" in proven(text_model(model_type, num_key_value_heads=1), TextOnly)


def test_a_text_model_without_an_adapter_is_compared_too(monkeypatch):
    assert "(1.0e-04 allowed; text alone, longer text; padded)" in proven(text_model("llama"))
    assert "; padded)" in proven(text_model("gemma2", final_logit_softcapping=2.0, num_key_value_heads=1))
    monkeypatch.setattr(unregistered, "_FACTORS", ())  # as if nobody had heard of it
    with pytest.raises(ConfigError, match="'granite', run by the adapter TextOnly: its log-probs differ"):
        proven(text_model("granite", logits_scaling=2.0))


@pytest.mark.parametrize(
    ("model_type", "dtype", "told"),
    [
        ("bert-generation", torch.float32, "its tokens see those that come after them"),
        ("bert", torch.bfloat16, "its tokens see those that come after them"),
        ("llama", torch.float32, "the log-probs of its own class are NaN"),
    ],
    ids=str,
)
def test_a_model_whose_tokens_see_later_ones_and_weights_that_are_no_numbers_are_refused(model_type, dtype, told):
    built = text_model(model_type)
    built.model.to(dtype)
    if "NaN" in told:
        built.model.model.norm.weight.data.fill_(float("nan"))
    with pytest.raises(ConfigError, match=f"^model type '{model_type}': {told}"):
        proven(built)
