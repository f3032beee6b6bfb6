"""Settings that earlier versions had: what to use instead, and which values of them change nothing.

A file that a run of an earlier version has written, such as its config.resolved.yaml, names them all. There a value
that asked for nothing is passed over; any other one, and the name on the command line, is refused with the reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Removed:
    """instead: one line that stands behind 'is gone: '. harmless: values whose run is the same without the setting."""

    instead: str
    harmless: tuple[Any, ...] = ()


# By the setting's own name, or by its path where another setting has the same name.
REMOVED: dict[str, Removed] = {
    "train_while_scoring": Removed(
        "leave it out; training waits for all rewards, and remote scorers work beside generation and forward passes",
        harmless=(True, False),
    ),
    "ask_key": Removed("leave it out; score drawings by scorers of images, or by a judge", harmless=("",)),
    "redraw_key": Removed("leave it out; score answers by rules or by a judge", harmless=("",)),
    "embedded_tie_embeddings": Removed(
        "leave it out; the embedded models have embeddings of their own", harmless=(False,)
    ),
    "parity_samples": Removed(
        "leave it out; probes have 4 prompts, and --parity_every 0 turns the gate off", harmless=(4,)
    ),
    "noisy_rollout_decay": Removed("leave it out; the noise vanishes by the paper's schedule", harmless=(30, 30.0)),
    "noisy_rollout_midpoint": Removed("leave it out; the noise vanishes by the paper's schedule", harmless=(0.67,)),
    "selective_replay_alpha": Removed(
        "leave it out; samples are drawn in proportion to their advantage", harmless=(1, 1.0)
    ),
    "max_nonfinite_steps": Removed("leave it out; a run ends after 3 skipped steps in a row", harmless=(3,)),
    "learn_steps": Removed("leave it out; the guard learns its bands from 5 steps", harmless=(5,)),
    "band_width": Removed("leave it out; the guard's bands reach 6 standard deviations", harmless=(6, 6.0)),
    "reward_ray_actors": Removed("use --distributed.resources.reward_num_workers", harmless=(1,)),
    "reward_num_cpus": Removed("leave it out; Ray reserves no cores for rewards", harmless=(0, 0.0)),
    "weight_transfer": Removed(
        "leave it out; workers of this host read shared memory, others Ray's object store", harmless=("auto",)
    ),
    "worker_timeout": Removed(
        "leave it out; a worker that does not answer for an hour is started again", harmless=(3600, 3600.0)
    ),
    "prompt_cache_gib": Removed("leave it out; at most 2 GiB of encoded prompts are kept on disk", harmless=(2, 2.0)),
    "ema_warmup": Removed("leave it out; the average is warmed up, as in Flow-GRPO's code", harmless=(True,)),
    "pairs_per_prompt": Removed("leave it out; all samples of a prompt make pairs", harmless=(None,)),
}


def removed(name: str) -> Removed | None:
    """The entry of a setting that is gone, under any of its spellings; None for other names."""
    plain = name.replace("-", "_")
    own = plain.rpartition(".")[2]
    return next((REMOVED[each] for each in (plain, own, own.removeprefix("no_")) if each in REMOVED), None)
