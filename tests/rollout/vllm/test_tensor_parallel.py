"""Two gloo ranks as one vLLM engine: each gives its own prompts and gets its own responses."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from launched import run_ranks
from tiny_models import checkpoint_of

from lightrft_visual.experience.rollouts import PromptFeatures
from lightrft_visual.experience.vision import VisionTensors
from lightrft_visual.rollout.vllm.workers import PromptSharing
from lightrft_visual.runtime.host_memory import SHARED_MEMORY

SCRIPT = Path(__file__).parents[1] / "tensor_parallel_ranks.py"


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
    shared, own = PromptSharing(1).share([prompt])
    assert own == slice(0, 1) and shared == [PromptFeatures("a", [1], 0, images=["x"], seed=2)]
    assert prompt.vision is vision and prompt.reference == "b"


def test_two_ranks_are_one_engine_that_leaves_no_names_in_shared_memory(root, tmp_path):
    checkpoint = checkpoint_of(root, "qwen2_5_vl")
    with left_behind(SHARED_MEMORY):
        run_ranks(SCRIPT, checkpoint.path, str(tmp_path))
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert max(first["figures"] + second["figures"]) <= 1e-5
    assert bool(first["shared"]) == bool(second["shared"]) == first["sharing"]
    assert all(line.endswith("(deleted)") for line in first["shared"] + second["shared"])
    assert (len(first["tokens"][0]), first["rest"]) == (6, 6) and (len(second["tokens"][0]), second["rest"]) == (4, 0)


def test_an_engine_in_one_process_starts_ranks_of_its_own(root, tmp_path):
    """As in a rollout worker: both ranks get each version of the weights, and draw at them."""
    folder = checkpoint_of(root, "qwen2_5_vl").path
    run_ranks(SCRIPT, folder, str(tmp_path), "own", ranks=1, timeout=400)
    found = json.loads((tmp_path / "0.json").read_text())
    assert len(found["figures"]) == 4 and max(found["figures"]) <= 1e-5
    first, second = found["tokens"]
    assert len(first) == 6 and first != second
