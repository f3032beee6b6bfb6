"""Encoded prompts are remembered, up to a number of bytes, and do not depend on their neighbours."""

import os
from contextlib import contextmanager

import pytest
import tiny_families
import torch
from peft import LoraConfig
from PIL import Image
from tiny_families import sd3_policy

from lightrft_visual.models.diffusion import policy as policy_module
from lightrft_visual.models.diffusion import prompt_cache
from lightrft_visual.models.diffusion.policy import DiffusionPolicy, family_of
from lightrft_visual.models.diffusion.prompt_cache import PromptCache, PromptFiles, encoder_digest
from lightrft_visual.models.tiny.diffusion import (
    TEXT_LENGTH,
    TinyDiffusionSettings,
    build_clip_encoder,
    build_clip_tokenizer,
    build_pipeline,
    build_t5_tokenizer,
)


def test_encoded_once_and_the_oldest_goes_first():
    cache, calls = PromptCache(limit=2 * 16), []

    def ask(key):
        return cache.get(key, lambda: calls.append(key) or {"context": torch.full((1, 4), float(ord(key)))})

    for key in "aba":
        assert ask(key)["context"][0, 0] == ord(key)
    assert calls == ["a", "b"]
    ask("c")  # b was unused for longest
    assert len(cache) == 2 and cache.size == 32
    ask("a"), ask("b")
    assert calls == ["a", "b", "c", "b"]
    cache.limit = 1
    assert ask("d")["context"].shape == (1, 4) and len(cache) == 1  # larger than the limit


def test_a_prompt_encodes_the_same_in_any_company():
    policy = sd3_policy()
    other = DiffusionPolicy(policy.family)
    together = policy.encode_prompts(["a red circle", "a blue cross", "a red circle"], "")
    alone = other.encode_prompts(["a red circle"], "")
    assert set(together) == {"context", "pooled", "negative_context", "negative_pooled"}
    for name, value in together.items():
        for same in (value[:1], value[2:]):
            torch.testing.assert_close(same, alone[name], rtol=1e-5, atol=1e-6)
    assert not torch.equal(together["context"][0], together["context"][1])


def test_prompts_and_the_negative_one_are_encoded_once_and_several_in_one_call(monkeypatch):
    policy, texts, calls = sd3_policy(), [], []
    pipeline, encode = policy.family.pipeline, policy.family.encode_prompts
    encode_prompt = pipeline.encode_prompt
    monkeypatch.setattr(policy.family, "encode_prompts", lambda prompts: texts.extend(prompts) or encode(prompts))
    monkeypatch.setattr(
        pipeline,
        "encode_prompt",
        lambda prompts, *a, **k: calls.append(len(prompts)) or encode_prompt(prompts, *a, **k),
    )
    given = [f"a {colour} {shape}" for colour in ("red", "blue", "green") for shape in ("circle", "cross", "ring")]
    conditions = policy.encode_prompts(given * 2, "a dog")  # 9 texts and the negative one
    assert calls == [8, 8] and len(conditions["context"]) == len(conditions["negative_context"]) == 18
    assert sorted(texts) == sorted([*given, "a dog"])
    assert torch.equal(conditions["negative_context"][:1], policy.encode_prompts(["a dog"])["context"])
    assert torch.equal(conditions["negative_context"][0], conditions["negative_context"][1]) and len(texts) == 10
    one = policy.remember_prompts(given)[given[3]]["context"]
    assert one.untyped_storage().nbytes() == one.nbytes  # and not that of all that were encoded beside it


def test_encoders_and_the_decoder_are_on_the_device_for_their_turns_only(monkeypatch):
    policy, turns = sd3_policy(), []
    names = {id(part): name for name, part in policy.family.pipeline.components.items()}

    @contextmanager
    def recorded(part, device, offload):
        turns.append((names[id(part)], offload))
        yield part

    monkeypatch.setattr(policy_module, "on_device", recorded)
    policy.encode_prompts(["a red circle"], "")
    assert turns == [(name, True) for name in ("text_encoder", "text_encoder_2", "text_encoder_3")]
    turns.clear()
    policy.encode_prompts(["a red circle"], "")  # known
    assert turns == []
    latents = torch.randn(1, *policy.latent_shape(32, 32))
    policy.decode(latents)
    assert turns == [("vae", True)]
    policy.decode(latents.requires_grad_())  # stays for the backward pass
    assert turns == [("vae", True)]


def test_a_first_frame_is_encoded_once_however_often_it_is_asked_for(monkeypatch):
    policy, seen = DiffusionPolicy(family_of(tiny_families.wan_i2v(), 5)), []
    encode = policy.family.encode_first_frames
    monkeypatch.setattr(
        policy.family, "encode_first_frames", lambda images, *size: seen.extend(images) or encode(images, *size)
    )
    red, blue = Image.new("RGB", (32, 32), "red"), Image.new("RGB", (32, 32), "blue")
    both = policy.encode_first_frames([red, blue, red.copy()], 32, 32, 5)
    assert len(seen) == 2 and torch.equal(both["first_frame"][0], both["first_frame"][2])
    assert not torch.equal(both["first_frame"][0], both["first_frame"][1])
    later = policy.encode_first_frames([blue.copy()], 32, 32, 5)
    assert len(seen) == 2 and all(torch.equal(later[name], both[name][1:2]) for name in both)
    policy.encode_first_frames([blue], 32, 32, 9)
    assert len(seen) == 3  # of another length of video


def conditions_of(text, size=4):
    return {"context": torch.full((1, size), float(len(text)), dtype=torch.bfloat16), "pooled": torch.ones(1, 2)}


def test_a_later_run_reads_what_an_earlier_one_encoded(tmp_path):
    PromptCache(files=PromptFiles(tmp_path, "encoders", 2**20)).get(
        "a red circle", lambda: conditions_of("a red circle")
    )
    later = PromptCache(files=PromptFiles(tmp_path, "encoders", 2**20))
    found = later.get("a red circle", lambda: pytest.fail("encoded again"))
    assert set(found) == {"context", "pooled"} and found["context"].dtype == torch.bfloat16
    assert torch.equal(found["context"], conditions_of("a red circle")["context"]) and len(later.files) == 1
    assert later.find("a blue cross") is None
    assert PromptCache(files=PromptFiles(tmp_path, "others", 2**20)).find("a red circle") is None


def test_the_folder_stays_below_its_limit_and_the_oldest_files_go(tmp_path):
    size = 1000
    files = PromptFiles(tmp_path, "encoders", 10 * 2200)
    PromptFiles(tmp_path, "earlier", 2**20).keep("of other encoders", conditions_of("x", size))
    (tmp_path / "earlier" / f"unfinished.safetensors{prompt_cache.NEW}").write_bytes(b"x" * 2000)
    os.utime(tmp_path / "earlier" / f"unfinished.safetensors{prompt_cache.NEW}", (0, 0))
    for index in range(20):
        files.keep(str(index), conditions_of("x", size))
        if index:
            assert files.find("0") is not None  # used all the time
        held = sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
        assert held <= files.limit
    assert files.find("19") is not None and files.find("1") is None and 6 < len(files) < 11
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".safetensors"]
    assert not len(PromptFiles(tmp_path, "earlier", 2**20))


@pytest.mark.parametrize(
    "damage",
    [lambda whole: b"", lambda whole: b"\x00" * 40, lambda whole: whole[:-3], lambda whole: whole[:-1] + b"!"],
    ids=["empty", "zeros", "cut", "one byte"],
)
def test_a_damaged_file_is_said_and_encoded_again(tmp_path, caplog, damage):
    files = PromptFiles(tmp_path, "encoders", 2**20)
    files.keep("a", conditions_of("a"))
    (path,) = files.folder.glob("*.safetensors")
    path.write_bytes(damage(path.read_bytes()))
    calls = []
    given = PromptCache(files=files).get("a", lambda: calls.append("a") or conditions_of("a"))
    assert calls == ["a"] and torch.equal(given["pooled"], torch.ones(1, 2)) and str(path) in caplog.text
    assert torch.equal(files.find("a")["pooled"], torch.ones(1, 2))


def test_a_run_goes_on_where_files_can_be_neither_read_nor_written(tmp_path, caplog, monkeypatch):
    """As those of another user, and those of a disk that is full."""
    files = PromptFiles(tmp_path, "encoders", 2**20)
    files.keep("a", conditions_of("a"))

    def refuse(*arguments, **named):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(prompt_cache.os, "utime", refuse)
    assert torch.equal(files.find("a")["pooled"], torch.ones(1, 2))  # read, though not marked as used
    monkeypatch.setattr(prompt_cache.Path, "read_bytes", refuse)
    assert files.find("a") is None
    monkeypatch.setattr(prompt_cache.Path, "write_bytes", refuse)
    for text in "bcd":
        assert torch.equal(PromptCache(files=files).get(text, lambda: conditions_of("b"))["pooled"], torch.ones(1, 2))
    assert len(files) == len(list(files.folder.iterdir())) == 1
    assert len(caplog.records) == 3 and "cannot all be kept: [Errno 13]" in caplog.text


def test_a_file_may_go_while_it_is_read(tmp_path, monkeypatch):
    """Another run keeps the folder below its limit. Files are read by one call: safetensors opens them twice."""
    files, read = PromptFiles(tmp_path, "encoders", 2**20), prompt_cache.Path.read_bytes
    files.keep("a", conditions_of("a"))

    def read_and_lose(path):
        content = read(path)
        path.unlink()
        return content

    monkeypatch.setattr(prompt_cache.Path, "read_bytes", read_and_lose)
    assert torch.equal(files.find("a")["pooled"], torch.ones(1, 2)) and files.find("a") is None


def test_the_encoders_name_changes_with_their_adapters():
    def digest(**settings):
        torch.manual_seed(0)
        encoder = build_clip_encoder(build_clip_tokenizer(), TinyDiffusionSettings())
        if settings:
            encoder.add_adapter(LoraConfig(r=2, target_modules=["q_proj"], **settings))
        return encoder, encoder_digest([encoder], [])

    (adapted, first), (_, other) = digest(lora_alpha=4), digest(lora_alpha=8)
    adapted.disable_adapters()
    assert len({digest()[1], first, other, encoder_digest([adapted], [])}) == 4


def test_the_encoders_name_changes_with_every_number_vocabulary_and_setting():
    def digest(change=lambda encoder: None, tokenizer=None, *settings):
        torch.manual_seed(0)
        encoder = build_clip_encoder(build_clip_tokenizer(), TinyDiffusionSettings())
        change(encoder)
        return encoder_digest([encoder], [tokenizer or build_clip_tokenizer()], *settings)

    @torch.no_grad()
    def one_number(encoder):
        list(encoder.parameters())[3].view(-1)[5] += 1e-3

    @torch.no_grad()
    def exchanged(encoder):
        weight = encoder.state_dict()["text_model.embeddings.token_embedding.weight"]
        weight[[2, 3]] = weight[[3, 2]].clone()

    others = [
        digest(one_number), digest(exchanged), digest(lambda encoder: encoder.to(torch.bfloat16)),
        digest(lambda encoder: None, build_t5_tokenizer()), digest(lambda encoder: None, None, "cuda"),
    ]  # fmt: skip
    assert digest() == digest() and len({digest(), *others}) == 6


def test_a_policy_leaves_its_encoders_alone_where_all_prompts_are_on_disk(tmp_path, monkeypatch):
    def policy(length=TEXT_LENGTH):
        made = DiffusionPolicy(family_of(build_pipeline(TinyDiffusionSettings(layers=1)), length))
        return made, made.keep_prompts_in(tmp_path, 2**20)

    first, found = policy()
    assert found == 0
    encoded = first.encode_prompts(["a red circle", "a blue cross"], "")
    second, found = policy()
    assert found == 3
    monkeypatch.setattr(second.family, "encode_prompts", lambda prompts: pytest.fail("encoded again"))
    monkeypatch.setattr(policy_module, "on_device", lambda *part, **how: pytest.fail("brought to the device"))
    again = second.encode_prompts(["a red circle", "a blue cross"], "")
    assert encoded.keys() == again.keys() and all(torch.equal(encoded[name], again[name]) for name in encoded)
    assert policy(TEXT_LENGTH + 1)[1] == 0


def test_connectors_behind_the_text_encoder_count_and_their_folder_does_not(tmp_path):
    def found(folder, change=0.0):
        torch.manual_seed(0)
        pipeline = tiny_families.ltx2()
        pipeline.connectors.register_to_config(_name_or_path=folder)
        with torch.no_grad():
            pipeline.connectors.text_proj_in.weight[0, 0] += change
        policy = DiffusionPolicy(family_of(pipeline, 16))
        count = policy.keep_prompts_in(tmp_path, 2**20)
        policy.encode_prompts(["a red circle"])
        return count

    assert [found("here"), found("there"), found("here", 1e-3)] == [0, 1, 0]


def test_a_processor_in_the_place_of_a_tokenizer_counts_with_its_template():
    made = DiffusionPolicy(family_of(tiny_families.flux2()))
    processor = made.family.pipeline.tokenizer

    def name():
        return encoder_digest([], [processor])

    before = name()
    processor.chat_template = "other"
    assert name() != before
    processor.tokenizer.add_tokens(["<|more|>"])
    assert name() not in (before, encoder_digest([], []))
