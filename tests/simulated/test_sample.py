"""`sample` of a diffusion model computes on the accelerator, in the precision that is asked for."""

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
CHECKS = """
import os, sys; sys.path[:0] = sys.argv[1:3]
from simulated.accelerator import install
install()
import diffusers, numpy, tiny_families, torch
from lightrft_visual import sample
tiny_families.sd15().save_pretrained(sys.argv[3])
seen = set()
decode = diffusers.AutoencoderKL.decode
def watched(self, latents, *rest, **named):
    seen.add((latents.device.type, latents.dtype))
    return decode(self, latents, *rest, **named)
diffusers.AutoencoderKL.decode = watched
settings = dict(n=2, seed=3, num_inference_steps=2, height=32, width=32)
pixels = lambda **own: numpy.stack(sample(sys.argv[3], ["a red ball"], **settings, **own)[0]).astype(float)
full, half, usual = pixels(bf16=False), pixels(bf16=True), pixels()
assert seen == {("sim", torch.float32), ("sim", torch.bfloat16)}, seen
assert (usual == half).all() and 0 < abs(full - half).max() < 40 and abs(full[0] - full[1]).max() > 0
pipeline = diffusers.DiffusionPipeline.from_pretrained(sys.argv[3])
generators = [torch.Generator().manual_seed(3 + sample) for sample in range(2)]
host = pipeline("a red ball", num_images_per_prompt=2, generator=generators, num_inference_steps=2, height=32, width=32)
assert abs(full - numpy.stack(host.images)).max() <= 1
print("OK", flush=True)
os._exit(0)  # PyTorch's thread of the device may still give up a graph, and aborts if the interpreter ends meanwhile
"""


@pytest.mark.slow
def test_sample_diffusion_model_computes_on_the_accelerator_in_bf16_unless_told(tmp_path):
    families = next(TESTS.rglob("tiny_families.py")).parent
    command = [sys.executable, "-c", CHECKS, str(TESTS), str(families), str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0 and run.stdout.endswith("OK\n"), run.stderr[-3000:]
