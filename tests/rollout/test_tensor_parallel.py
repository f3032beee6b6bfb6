"""Two gloo ranks as one vLLM engine: each gives its own prompts and gets its own responses, in step."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import checkpoint_of

from lightrft_visual.rollout.engine import GenerationRequest
from lightrft_visual.rollout.records import PromptFeatures
from lightrft_visual.rollout.tensor_parallel import RequestSharing

HERE = Path(__file__).parent


def test_without_groups_requests_stay_as_they_are():
    request = GenerationRequest("a", [1], 2, images=["x"], features=PromptFeatures("a", [1], 0))
    shared, own = RequestSharing(1).share([request])
    assert own == slice(0, 1) and shared == [GenerationRequest("a", [1], 2, images=["x"])]


@pytest.mark.timeout(280)
def test_two_ranks_are_one_engine(tmp_path):
    checkpoint = checkpoint_of(tmp_path, "qwen2_5_vl")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    paths = [HERE, HERE.parent / "models", HERE.parents[1]]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(HERE / "tensor_parallel_ranks.py"), checkpoint.path, str(tmp_path)],
            env=environment
            | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
            | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=260)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0], "\n".join(text[-3000:] for text in outputs)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert max(first["figures"] + second["figures"]) <= 1e-5
    assert len(first["tokens"]) == 6 and len(second["tokens"]) == 4
    assert first["rest"] == first["tokens"] and second["rest"] == []
