"""Two gloo ranks as one vLLM engine: each gives its own prompts and gets its own responses."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from engine_rig import vllm_rig
from forked import on_ranks
from tensor_parallel_ranks import SETTINGS, one_engine
from tiny_models import checkpoint_of, mixed_prompts

from lightrft_visual.experience.rollouts import PromptFeatures, Variant
from lightrft_visual.experience.vision import VisionTensors
from lightrft_visual.rollout.vllm.workers import PromptSharing
from lightrft_visual.rollout.weight_sync import WeightPost
from lightrft_visual.runtime.host_memory import SHARED_MEMORY


@contextmanager
def left_behind(folder: Path) -> Iterator[None]:
    """What a run that was killed while vLLM started leaves on the host."""
    names = [folder / f"-tp:0-[0-1]-cpushm_{rank}" for rank in range(2)]
    for name in names:
        name.write_bytes(b"")
    try:
        yield
    finally:
        for name in names:
            name.unlink(missing_ok=True)


def test_engines_are_sent_what_they_read_of_a_prompt():
    vision = VisionTensors.of(pixel_values=torch.zeros(4, 2))
    prompt = PromptFeatures("a", [1], 0, reference="b", metadata={"c": "d"}, images=["x"], vision=vision, seed=2)
    prompt.variants = [Variant(PromptFeatures("a", [1], 0), 1, True)]
    shared, own = PromptSharing(1).share([prompt])
    assert own == slice(0, 1) and shared == [PromptFeatures("a", [1], 0, images=["x"], seed=2)]
    assert prompt.vision is vision and prompt.reference == "b"


def test_two_ranks_are_one_engine_that_leaves_no_names_in_shared_memory(root):
    with left_behind(SHARED_MEMORY):
        first, second = on_ranks(one_engine, checkpoint_of(root, "qwen2_5_vl").path)
    assert max(first["differences"] + second["differences"]) <= 1e-5
    assert bool(first["shared"]) == bool(second["shared"]) == first["sharing"]
    assert all(line.endswith("(deleted)") for line in first["shared"] + second["shared"])
    assert (first["rest"], second["rest"]) == (6, 0)


def test_an_engine_in_one_process_starts_ranks_of_its_own(root):
    """As in a rollout worker, which also hands on what the trainer has posted: both ranks get each version."""
    mine = mixed_prompts().select([0, 1, 5])
    with vllm_rig(checkpoint_of(root, "qwen2_5_vl"), tensor_parallel_size=2, own_ranks=True) as rig:
        assert rig.difference(mine, SETTINGS) <= 1e-5
        rig.move()
        rig.sync()
        assert rig.difference(mine, SETTINGS) <= 1e-5
        rig.move()
        post = WeightPost()
        rig.engine.update_weights(iter(()), posted=post.post(rig.weights()))
        assert rig.difference(mine, SETTINGS) <= 1e-5
