"""The transformers engine samples from the distribution that the trainer scores, one prompt at a time or many."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from engine_rig import Rig, check_ends, check_least_length, check_truncated_sampling, decided, enders, hf_rig
from forked import on_ranks
from peft import LoraConfig, get_peft_model
from tiny_models import (
    VIDEO,
    actor_of,
    checkpoint_of,
    clip,
    mixed_prompts,
    perturb,
    prompts_for,
    text_prompts,
)  # fmt: skip
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, GenerationMixin, Qwen2Config
from transformers.cache_utils import DynamicSlidingWindowLayer

from lightrft_visual.config.vl import DistributedConfig
from lightrft_visual.errors import ConfigError, NonFiniteError, RolloutError
from lightrft_visual.experience.rollouts import SamplingSettings
from lightrft_visual.experience.types import ModelInputs
from lightrft_visual.models.vlm.actor import Actor
from lightrft_visual.rollout.engine import RolloutEngine
from lightrft_visual.rollout.hf import Decoding, PromptLayer, TransformersEngine, draw, truncated
from lightrft_visual.runtime import collectives
from lightrft_visual.runtime.deepspeed import DeepspeedStrategy, OptimizerSettings

PLAIN = SamplingSettings(n=3, max_new_tokens=6)


@pytest.fixture(scope="module")
def rig(root) -> Rig:
    return hf_rig(checkpoint_of(root, "qwen2_5_vl"))


@pytest.fixture(scope="module")
def few(root) -> Rig:
    """Only three tokens can be drawn, the end token one of them."""
    checkpoint = checkpoint_of(root, "qwen2")
    return hf_rig(checkpoint, banned=enders(checkpoint))


@pytest.mark.parametrize("kind", ["qwen2", "qwen2_vl", "qwen2_5_vl+tied", "qwen3_vl", "internvl"])
def test_log_probs_are_the_trainers(root, kind):
    rig = hf_rig(checkpoint_of(root, kind))
    fire = SamplingSettings(n=2, temperature=0.7, max_new_tokens=5, min_new_tokens=3, first_token_temperature=4.0)
    for settings in (PLAIN, fire):
        assert rig.difference(prompts_for(rig.checkpoint), settings) <= 1e-5
    assert rig.gate().check(prompts_for(rig.checkpoint)) <= 1e-5


OTHER_LAYERS = {
    "gemma3_text": {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "qwen3_next": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "linear_num_value_heads": 4,
        "shared_expert_intermediate_size": 64, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
        "linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"],
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", OTHER_LAYERS)
def test_models_with_layers_of_other_kinds(root, kind):
    """They share no prompts and are not packed, but are sampled from, and trained padded."""
    base, sizes = checkpoint_of(root, "qwen2"), {"num_hidden_layers": 2, "head_dim": 32, "pad_token_id": 0}
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    sizes |= {name: getattr(base.config, name) for name in names}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **OTHER_LAYERS[kind]))
    perturb(model, 1, 0.05)
    actor = Actor(model, [], base.eos_ids)
    rig = Rig(base, actor, TransformersEngine(actor, base.tokenizer))
    assert rig.difference(text_prompts(), PLAIN) <= 1e-5
    assert "it is not proven" in actor.backbone.family.sharing_refused("auto")


def test_a_change_of_the_weights_is_seen_at_once(rig):
    before = rig.token_ids(text_prompts(), PLAIN)
    rig.move()
    rig.engine.update_weights(iter(()))
    assert rig.difference(mixed_prompts(), PLAIN) <= 1e-5
    assert rig.token_ids(text_prompts(), PLAIN) != before


@pytest.mark.parametrize("micro_batch_size", [1, 5])
def test_a_response_does_not_depend_on_its_company_nor_on_more_samples(rig, micro_batch_size):
    batch = mixed_prompts()
    together = rig.decided_token_ids(batch, PLAIN)
    rig.engine.micro_batch_size, size = micro_batch_size, rig.engine.micro_batch_size
    order = [4, 0, 6, 1]
    apart = rig.token_ids(batch.select(order), replace(PLAIN, n=5))
    rig.engine.micro_batch_size = size
    firsts = [apart[5 * i + copy] for i in range(4) for copy in range(3)]
    assert firsts == [together[3 * i + copy] for i in order for copy in range(3)]
    assert len({tuple(ids) for ids in together}) > 15


@pytest.mark.parametrize("dtype, apart", [(torch.float32, 2e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("prompts", [[0, 0, 1, 1, 2, 2], [2, 0, 1, 0, 0], [0, 1, 2]], ids=["even", "uneven", "single"])
def test_prompts_held_once_give_responses_what_rows_of_their_own_give(prompts, dtype, apart):
    torch.manual_seed(0)
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1], [0, 0, 0, 0, 1]])
    shown = [torch.randn(3, 2, 5, 7).to(dtype) for _ in range(2)]

    def prefill(inputs, cache):
        cache.update(*shown, 0)
        return torch.zeros(3, 4), torch.zeros(3, 1), mask

    count, backbone = len(prompts), SimpleNamespace(by_segments=True, config=Qwen2Config(num_hidden_layers=1))
    backbone.prefill = prefill
    _, decoding = Decoding.of(backbone, None, prompts, most=3)
    own, query = [torch.randn(count, 2, 3, 7).to(dtype) for _ in range(2)], torch.randn(count, 6, 3, 7).to(dtype)
    read = []
    for step in range(3):
        keys = decoding.cache.update(*(each[:, :, step : step + 1] for each in own), 0)
        read.append(decoding.attend(0, query[:, :, step : step + 1], *keys, 0.3))
    key, value = (torch.cat([each[prompts], new], dim=2).repeat_interleave(3, dim=1) for each, new in zip(shown, own))
    seen = torch.ones(3, 8).tril(5).bool() & F.pad(mask, (0, 3), value=1).bool()[prompts, None, None]
    wanted = F.scaled_dot_product_attention(query.float(), key.float(), value.float(), seen, scale=0.3)
    made = torch.cat(read, dim=1).transpose(1, 2)
    assert made.dtype is dtype and (made - wanted).abs().max() <= apart
    held = decoding.cache.layers[0]
    assert len(held.keys) == 3 and held.own[0].shape == (count, 2, 3, 7)


def decoding_of(rig: Rig) -> Decoding:
    """Two responses of one prompt."""
    inputs = ModelInputs(torch.tensor([[5, 6, 7]]), torch.ones(1, 3, dtype=torch.long), torch.zeros(1, 0).bool())
    with torch.no_grad():
        return Decoding.of(rig.actor.backbone, inputs, [0, 0], 2)[1]


@pytest.mark.parametrize("windows, kind", [(False, PromptLayer), (True, DynamicSlidingWindowLayer)])
def test_prompts_are_held_once_where_no_layer_has_windows(windows, kind, root):
    sizes = {"use_sliding_window": windows, "sliding_window": 4, "max_window_layers": 0, "layer_types": None}
    rig, base = hf_rig(checkpoint_of(root, "qwen2")), checkpoint_of(root, "qwen2").config
    rig.actor.backbone.config = type(base)(**base.to_dict() | sizes)
    layers = decoding_of(rig).cache.layers
    assert {type(layer) for layer in layers} == {kind} and len(layers[0].keys) == (2 if windows else 1)


def test_a_model_that_does_not_look_at_its_prompts_is_refused(root):
    rig = hf_rig(checkpoint_of(root, "qwen2"))
    decoding, base = decoding_of(rig), rig.actor.backbone.base
    rig.actor.backbone.base = lambda prompts, **given: base(**given)
    with torch.no_grad(), pytest.raises(ConfigError, match="takes no prompts apart"):
        decoding.next(torch.tensor([5, 6]))


def test_greedy_equals_transformers_own_generation(rig):
    greedy = SamplingSettings(n=1, temperature=0.0, max_new_tokens=6)
    batch = mixed_prompts().select([0, 1, 2, 2])
    # Two frames in time, on two positions, as many as in height: where transformers starts the text that follows right.
    batch.prompts[3], batch.videos[3] = batch.prompts[3] + VIDEO, [clip(0, 4, fps=4.0)]
    ours = decided(lambda seed: rig.stage.generate(batch, greedy), seeds=1)
    model, checkpoint = rig.actor.model, rig.checkpoint
    for rollout in ours:
        prompt = rollout.prompt
        ids = torch.tensor([prompt.token_ids])
        types = (ids == checkpoint.config.image_token_id).int() + 2 * (ids == checkpoint.config.video_token_id).int()
        theirs = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            mm_token_type_ids=types,
            **prompt.vision.joined(),
            max_new_tokens=6,
            do_sample=False,
            suppress_tokens=rig.actor.banned_ids.tolist(),
        )
        assert theirs[0, ids.shape[1] :].tolist() == rollout.token_ids


def test_responses_end_at_the_end_token_and_not_before_the_least_length(few):
    check_ends(few, SamplingSettings(n=40, temperature=3.0, max_new_tokens=4))
    check_least_length(few, temperature=3.0)


def test_truncated_sampling_has_no_log_probs_and_the_gate_works_all_the_same(rig):
    check_truncated_sampling(rig)


def test_adapters_count_and_neither_dropout_nor_checkpointing_reach_generation(root):
    def with_lora(model):
        torch.manual_seed(0)
        return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.5))

    rig = hf_rig(checkpoint_of(root, "qwen2_5_vl"), wrap=with_lora)
    plain = rig.token_ids(text_prompts(), PLAIN)
    with torch.no_grad():
        for name, parameter in rig.actor.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    rig.actor.model.gradient_checkpointing_enable({"use_reentrant": False})
    rig.actor.train()
    generated = rig.stage.generate(mixed_prompts(), PLAIN)
    assert rig.actor.training
    rig.actor.eval()
    assert [r.token_ids for r in generated] == rig.token_ids(mixed_prompts(), PLAIN)
    assert rig.difference(mixed_prompts(), PLAIN) <= 1e-5
    assert rig.token_ids(text_prompts(), PLAIN) != plain


def test_ranks_that_hold_divided_weights_generate_for_different_numbers_of_prompts(root):
    """Each in micro-batches of its own number and media, as one rank alone does with whole weights."""
    checkpoint = checkpoint_of(root, "qwen2_5_vl")
    alone = hf_rig(checkpoint, micro_batch_size=2)
    wanted = [alone.token_ids(batch, PLAIN) for batch in map(prompts_of_rank, range(2))]
    assert on_ranks(generated_by_ranks, checkpoint, limit=120) == wanted


def prompts_of_rank(rank: int):
    """A text; four prompts, of which some have images or videos."""
    return mixed_prompts().select([[0], [0, 1, 5, 2]][rank])


def generated_by_ranks(checkpoint) -> list[list[int]]:
    strategy = DeepspeedStrategy(DistributedConfig(zero_stage=3))
    strategy.setup_distributed()
    trained = strategy.prepare(actor_of(checkpoint), OptimizerSettings(1e-3, total_steps=1))
    rig = Rig(checkpoint, trained.module, TransformersEngine(trained, checkpoint.tokenizer, micro_batch_size=2))
    return rig.token_ids(prompts_of_rank(collectives.rank()), PLAIN)


def test_wrong_prompt_ids_are_refused(rig):
    class Longer(RolloutEngine):
        def generate(self, requests, settings):
            made = rig.engine.generate(requests, settings)
            for completion in made[1]:
                completion.prompt_token_ids.insert(3, 5)
            return made

    stage = rig.stage_with(rig.checkpoint.processor)
    stage.engine = Longer()
    with pytest.raises(RolloutError, match=r"prompt 1: .*differ from token 3 on.*expansion"):
        stage.generate(mixed_prompts(), PLAIN)


# --- the draw itself -----------------------------------------------------------------------------------------------


def test_draws_follow_the_distribution_and_never_touch_what_has_no_mass():
    probabilities = torch.tensor([0.0, 0.5, 0.0, 0.3, 0.2, 0.0])
    noise = torch.linspace(0, 1, 10_001, dtype=torch.float64)[:-1]
    logits = probabilities.log().expand(len(noise), -1)
    tokens, log_probs = draw(logits, noise, SamplingSettings())
    shares = torch.bincount(tokens, minlength=6) / len(noise)
    torch.testing.assert_close(shares, probabilities, atol=1e-3, rtol=0)
    torch.testing.assert_close(log_probs, probabilities[tokens].log())
    edge = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    assert draw(logits[:2], edge, SamplingSettings())[0].tolist() == [1, 4]


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [
        (-1, 1.0, [0, 1, 2, 3]),
        (-1, 0.69, [1, 3]),
        (-1, 0.71, [1, 2, 3]),
        (3, 0.75, [1, 3]),
    ],
)
def test_truncation_keeps_the_smallest_set(top_k, top_p, kept):
    logits = torch.tensor([[0.1, 0.3, 0.2, 0.4]]).log()
    assert truncated(logits, top_k, top_p).isfinite().nonzero()[:, 1].tolist() == kept


def test_a_response_goes_on_as_it_was_begun(rig):
    """Tokens drawn so far are given back with the prompt: what follows is what one call draws, with its log-probs."""
    prompts = rig.stage.data_processor.features(mixed_prompts())

    def generate(seed: int) -> list:
        for number, prompt in enumerate(prompts):
            prompt.seed = 100 * seed + number
        return rig.engine.generate(prompts, PLAIN)

    whole = decided(generate)
    begun = [
        replace(prompt, continued=each.token_ids[:2], copy=copy)
        for prompt, responses in zip(prompts, whole)
        for copy, each in enumerate(responses)
    ]
    rest = rig.engine.generate(begun, replace(PLAIN, n=1, max_new_tokens=4))
    wanted = [each for responses in whole for each in responses]
    assert len(rest) == len(wanted) and any(len(each.token_ids) > 2 for each in wanted)
    for (part,), each in zip(rest, wanted):
        if len(each.token_ids) > 2:
            assert part.token_ids == each.token_ids[2:] and part.truncated == each.truncated
            assert part.prompt_token_ids == each.prompt_token_ids
            assert torch.allclose(torch.tensor(part.log_probs), torch.tensor(each.log_probs[2:]), atol=1e-5)


@pytest.mark.parametrize("settings", [PLAIN, SamplingSettings(n=1, max_new_tokens=2, temperature=0.0)])
def test_a_policy_whose_weights_are_not_finite_is_named_with_the_weight(root, settings):
    rig = hf_rig(checkpoint_of(root, "qwen2"))
    with torch.no_grad():
        name, weight = next((n, w) for n, w in rig.actor.named_parameters() if "layers.1" in n and "down_proj" in n)
        weight[0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match=rf"samples from hold NaN .*{name} holds some.*--actor_learning_rate"):
        rig.stage.generate(text_prompts(), settings)


@pytest.mark.parametrize(
    "model_type,settings",
    [("mamba", {}), ("granitemoehybrid", {"layer_types": ["mamba", "mamba"], "mamba_n_heads": 4, "mamba_d_head": 16})],
)  # fmt: skip
def test_models_that_do_not_go_on_from_a_key_value_cache_are_refused(model_type, settings):
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    config = CONFIG_MAPPING[model_type](**sizes, num_attention_heads=2, **settings)
    actor = Actor(AutoModelForCausalLM.from_config(config), [], [1])
    with pytest.raises(ConfigError, match=f"engine hf .*'{model_type}' does not take: use engine vllm"):
        TransformersEngine(actor, None)


def test_a_class_from_outside_that_says_nothing_of_caches_is_taken(root, monkeypatch):
    monkeypatch.delattr(GenerationMixin, "_supports_default_dynamic_cache")
    assert hf_rig(checkpoint_of(root, "qwen2")).engine.actor.backbone
