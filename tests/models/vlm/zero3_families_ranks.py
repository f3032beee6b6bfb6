"""Run by two ranks that divide the weights: a family agrees with its own class, before and after a step in which
one rank has text alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from launched import leave
from probe_ranks import divided

from lightrft_visual.experience.rollouts import ScoringRule
from lightrft_visual.models.vlm import probe
from lightrft_visual.runtime import collectives


def main(folder: str) -> None:
    checkpoint, train = divided(folder, 1e-3)
    samples = probe.made_up_samples(checkpoint, 0)
    found = [probe._tried(train.module, checkpoint, 0).difference]
    own = samples[:1] if collectives.is_rank_0() else samples[1:]
    form = probe._padded if train.module.backbone.family.unproven else probe._packed
    output = train(form(own), ScoringRule())
    train.accumulate(-output.log_probs.sum() / 100, last=True)
    assert train.step().applied
    found.append(probe._tried(train.module, checkpoint, 0).difference)
    Path(folder, f"{collectives.rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
    leave()
