"""Images and videos drawn by workers in other processes, with the weights that the trainer hands them."""

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from ...config.diffusion import DiffusionRunConfig, rollout_noise, rollout_sampling
from ...config.given_files import whole, with_whole_paths
from ...errors import ConfigError
from ...models.diffusion.policy import DiffusionPolicy, LoraSettings
from ...models.weight_copies import gathered
from ...rollout.diffusion_sampler import DiffusionSampler
from ...rollout.weight_sync import BUCKET_BYTES, take_over, whole_bytes
from ...runtime.host_memory import in_buckets
from ...trainer.diffusion.maker import DiffusersEngine
from ...trainer.diffusion.stages import DiffusionSampling, DrawingBatch, Sampled, TrainedVelocity
from .rollout.device_weights import check_transfer
from .rollout.engine import Workers
from .rollout.ray_workers import check_cluster
from .rollout.worker import EngineSpec

T = torch.Tensor


@dataclass
class RemoteDrawing(DiffusersEngine):
    """The `diffusers` engine once in each worker. `sampling` is the trainer's own, for evaluations.

    ahead: batches that are begun before they are asked for.
    """

    workers: Workers | None = None
    ahead: int = 0
    waited: float = 0.0
    _policies: dict[int, int] = field(default_factory=dict)  # version of the weights -> policy version
    _begun: dict[int, list[Future]] = field(default_factory=dict)  # by step

    def generate(self, requests: DrawingBatch, step: int, graphs: None = None) -> list[Sampled]:
        """Rollouts by micro-batch, in the order of the rows, on the trainer's device.

        Args:
            requests: what is drawn, unless the step was begun.
            step: of the policy, for the noise; one that was begun is waited for.
            graphs: none, as they stay in the workers.
        """
        begun = self._begun.pop(step, None)
        if begun is None:
            return self._collect(self._begin(requests, step))
        asked = time.perf_counter()
        made = self._collect(begun)
        self.waited += time.perf_counter() - asked
        return made

    def close(self) -> None:
        """End the workers."""
        self.workers.close()

    def announce(self, step: int, requests: Callable[[], DrawingBatch]) -> None:
        """Begin on a step, unless that was done, with whatever weights are there until it is asked for."""
        if step not in self._begun:
            self._begun[step] = self._begin(requests(), step)

    def measured(self) -> dict[str, float]:
        """See `RemoteEngine.measured`."""
        waited, self.waited = self.waited, 0.0
        return self.workers.measured(waited, self._begun.values())

    def _begin(self, requests: DrawingBatch, step: int) -> list[Future]:
        """Hand the rows to the workers, in pieces of whole micro-batches."""
        pool, whole = self.workers.pool, self.sampling.settings.micro_rollout_batch_size
        return [pool.submit(requests.select(piece), step) for piece in pool.pieces(len(requests), whole)]

    def _collect(self, begun: list[Future]) -> list[Sampled]:
        device = self.sampling.model.policy.device
        made = []
        for future in begun:
            part, version = future.result()
            own = [_moved(each, device) for each in part]
            drawn_by = {"policy_version": self._policies.get(version, 0)} if self.ahead else {}
            made += [replace(each, **drawn_by) for each in own]
        return made

    def hand_over(self, policy_version: int) -> None:
        """The workers get the weights that rollouts are drawn with: the old policy's where there is one."""
        with self.old.swapped() if self.old is not None else nullcontext():
            self.workers.update(TrainedWeights(self.sampling.model.policy), at_once=not self.ahead)
        self._policies[self.workers.version] = policy_version


def remote_drawing(config: DiffusionRunConfig, local: DiffusersEngine, path: str) -> RemoteDrawing:
    """The engine of a run with placement split.

    Args:
        config: of the run, which the workers get too.
        local: the trainer's own engine, for its sampling and its old policy.
        path: of the pipeline, which the workers read too.
    """
    model = config.model.changed(tokenizer_path=config.model.tokenizer_path and whole(config.model.tokenizer_path))
    sent = config.changed(model=model, plugins=with_whole_paths(config.plugins))
    target, exact, ahead = f"{__name__}:WorkerDrawing", config.distributed.deterministic, config.asynchronous.ahead
    spec = EngineSpec(target, (sent, whole(path)), torch.get_num_threads(), sent.plugins, deterministic=exact)
    own = local.sampling, local.n_samples_per_prompt, local.old, local.algorithm
    return RemoteDrawing(*own, workers=Workers(config, spec), ahead=ahead)


def check_remote(config: DiffusionRunConfig) -> None:
    """Raise ConfigError for a run that has no rollouts of its own to be made elsewhere, or nowhere to make them."""
    if config.offline or config.algorithm.entry.trains_on == "reward":
        what = "pairs of a file" if config.offline else "images drawn while it learns"
        raise ConfigError(f"placement split: this run trains on {what}, without rollouts; use --placement colocated")
    check_transfer(config, 1)
    check_cluster(config.distributed.resources)


@dataclass(frozen=True)
class TrainedWeights:
    """(name, tensor) of every parameter that trains, whole. Each rank must read all of them, in each pass."""

    policy: DiffusionPolicy

    def __iter__(self) -> Iterator[tuple[str, T]]:
        trained = (each for each in self.policy.named_parameters() if each[1].requires_grad)
        for bucket in in_buckets(trained, BUCKET_BYTES, lambda named: whole_bytes([named[1]])):
            with gathered([parameter for _, parameter in bucket]):
                for name, parameter in bucket:
                    yield name, parameter.detach()


class WorkerDrawing:
    """What a worker holds: pipeline, policy and sampler, as the trainer has them, without an optimizer."""

    def __init__(self, config: DiffusionRunConfig, path: str) -> None:
        model = config.model
        policy = DiffusionPolicy.from_pretrained(
            path,
            lora=LoraSettings.from_config(model),
            dtype=torch.bfloat16 if model.bf16 else torch.float32,
            trainable=model.trained_denoisers,
            text_length=model.max_sequence_length,
            family=model.family,
            tokenizer=model.tokenizer_path,
        )
        policy.family.follow(config)
        if model.compile:
            policy.compile_blocks()
        if model.vae_tiling:
            policy.family.pipeline.vae.enable_tiling()
        device = torch.device(get_accelerator().current_device_name())
        policy.move_to(device)
        self.policy = policy.to(device).eval()
        self.parameters = {name: each for name, each in policy.named_parameters() if each.requires_grad}
        sampler = DiffusionSampler(rollout_sampling(config), rollout_noise(config))
        drawn_by = TrainedVelocity(policy, policy, config.sampling.cuda_graphs)
        self.sampling = DiffusionSampling(drawn_by, sampler, config.sampling, config.train.seed)

    def update_weights(self, named_tensors: Iterable[tuple[str, T]]) -> None:
        """What trains, into the policy; see `take_over`."""
        for name, tensor in named_tensors:
            take_over(self.parameters[name], tensor)

    def reset_caches(self) -> None:
        """Nothing to do: encoded prompts do not depend on what trains."""

    def generate(self, requests: DrawingBatch, step: int) -> list[Sampled]:
        """Rollouts by micro-batch, on the host."""
        return [_moved(each, torch.device("cpu")) for each in self.sampling.draw(requests, step)]


def _moved(value: Any, device: torch.device) -> Any:
    """A batch with its tensors on a device; media stay on the host."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {name: _moved(each, device) for name, each in value.items()}
    if is_dataclass(value):
        names = [item.name for item in fields(value) if item.name != "media"]
        return replace(value, **{name: _moved(getattr(value, name), device) for name in names})
    return value
