"""The teacher of on-policy distillation: a pipeline, or the LoRA weights that a run of the same model left."""

from types import SimpleNamespace

import pytest
import tiny_families
import torch

from lightrft_visual.config.diffusion import DiffusionRunConfig
from lightrft_visual.config.load import parse_run
from lightrft_visual.config.spellings import DIFFUSION_PRESET
from lightrft_visual.errors import ConfigError
from lightrft_visual.models.diffusion import policy as policy_module
from lightrft_visual.models.diffusion.policy import DiffusionPolicy, LoraSettings
from lightrft_visual.trainer.diffusion import build
from lightrft_visual.trainer.diffusion.build import load_teacher

STRATEGY = SimpleNamespace(dtype=torch.float32, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The folder of a tiny pipeline."""
    folder = tmp_path_factory.mktemp("base")
    tiny_families.flux().save_pretrained(folder)
    return folder


def teacher_of(base, teacher, policy):
    flags = f"--pretrain {base} --teacher_pretrain {teacher} --diffusion_algorithm diffusion_opd"
    return load_teacher(parse_run(DiffusionRunConfig, flags.split(), preset=DIFFUSION_PRESET).config, STRATEGY, policy)


def test_load_teacher_lora_weights_of_a_run_stay_beside_the_model_of_the_run(base, tmp_path):
    """Sums with its weights would lose small changes in half precision."""
    policy = DiffusionPolicy.from_pretrained(str(base), lora=LoraSettings(4, 8))
    torch.manual_seed(3)
    with torch.no_grad():
        for weight in policy.trainable_parameters():
            weight.normal_(std=0.1)
    latents, conditions = torch.randn(2, *policy.latent_shape(32, 32, 1)), policy.encode_prompts(["red circle", "a"])

    @torch.no_grad()
    def velocity(policy):
        return policy(latents, torch.tensor([700.0, 200.0]), conditions)

    policy.save_lora(tmp_path)
    teacher, wanted = teacher_of(base, tmp_path, policy), velocity(policy)
    torch.testing.assert_close(velocity(teacher), wanted, rtol=1e-4, atol=1e-5)
    assert (velocity(teacher_of(base, base, policy)) - wanted).abs().max() > 1e-3
    assert not any(weight.requires_grad for weight in teacher.parameters())
    own = dict(DiffusionPolicy.from_pretrained(str(base)).named_parameters())
    found = {name.replace(".base_layer.", "."): weight for name, weight in teacher.named_parameters()}
    assert all(torch.equal(found[name], weight) for name, weight in own.items())


def test_load_teacher_ranks_meet_behind_what_their_hosts_fetch(base, monkeypatch):
    told = []
    monkeypatch.setattr(build.collectives, "meet", lambda: told.append("meet"))
    monkeypatch.setattr(build.DiffusionPolicy, "from_pretrained", lambda *given, **named: told.append("loads"))
    with pytest.raises(AttributeError):  # it has not loaded
        teacher_of(base, base, None)
    assert told == ["loads", "meet"]


@pytest.mark.parametrize("divided", [False, True])
def test_policy_of_divided_weights_meets_between_fetching_and_loading(base, monkeypatch, divided):
    told = []
    monkeypatch.setattr(policy_module, "fetch_model", lambda path: told.append("fetch"))
    monkeypatch.setattr(policy_module.collectives, "meet", lambda: told.append("meet"))
    monkeypatch.setattr(policy_module, "pipeline_class", lambda path: told.append("loads") or "none")
    with pytest.raises(ConfigError):
        DiffusionPolicy.from_pretrained(str(base), divide=(lambda weights: None) if divided else None)
    assert told == ["fetch", *["meet"] * divided, "loads"]


def test_load_teacher_of_another_model_or_family_refused_by_folder_or_names(base, tmp_path):
    policy = DiffusionPolicy.from_pretrained(str(base), lora=LoraSettings(4, 8))
    (tmp_path / "pytorch_lora_weights.safetensors").write_bytes(b"no weights")
    with pytest.raises(ConfigError, match=f"the LoRA weights in {tmp_path} cannot be joined with their model"):
        teacher_of(base, tmp_path, policy)
    tiny_families.z_image().save_pretrained(tmp_path / "other")
    with pytest.raises(ConfigError, match="is of family ZImage, the model of Flux"):
        teacher_of(base, tmp_path / "other", policy)


def test_load_teacher_lora_weights_of_the_second_expert_alone_are_joined(tmp_path):
    base = tmp_path / "base"
    tiny_families.wan_two_experts().save_pretrained(base)
    policy = DiffusionPolicy.from_pretrained(str(base), lora=LoraSettings(4, 8), trainable=("transformer_2",))
    with torch.no_grad():
        for weight in policy.trainable_parameters():
            weight.normal_(std=0.1)
    policy.save_lora(tmp_path / "adapters")
    latents, conditions = torch.randn(2, *policy.latent_shape(32, 32, 5)), policy.encode_prompts(["red circle", "a"])
    with torch.no_grad():
        wanted, found = (
            each(latents, torch.tensor([700.0, 200.0]), conditions)
            for each in (policy, teacher_of(base, tmp_path / "adapters", policy))
        )
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
