"""The same rollouts through both trainers: `against_trl.sh --replay` shows whether TRL makes the same updates of them.

    python trl_replay.py ours FOLDER [SETTINGS OF examples/train_grpo_vl.py]   a run of ours; its rollouts and weights
    python trl_replay.py trl FOLDER MODEL                                      in TRL's environment: these rollouts
    python trl_replay.py table FOLDER                                          losses, gradient norms, weights

TRL gets the prompts, images and sampled tokens of our steps in their order, and makes its own chat template, image
inputs, rewards, advantages, loss, clip and optimizer steps of them. vLLM is not asked on its side: the weights for what
its engine's log-probs differ by are left out, as ours are by default.
"""

from __future__ import annotations

import csv
import json
import pickle
import sys
from pathlib import Path


class Recording:
    """A callback that keeps the rollouts of each step."""

    def __init__(self) -> None:
        self.steps: list[list[dict]] = []

    def on_experience(self, step):
        self.steps.append(
            [
                {"text": r.prompt.text, "prompt_ids": r.prompt.token_ids, "images": r.prompt.images,
                 "reference": r.prompt.reference, "token_ids": r.token_ids, "reward": r.reward}
                for r in step.rollouts
            ]
        )  # fmt: skip
        return step


def ours(folder: Path, settings: list[str]) -> None:
    from lightrft_visual.config.load import parse_run
    from lightrft_visual.config.vl import RunConfig
    from lightrft_visual.rollout.weight_sync import gathered_state_dict
    from lightrft_visual.trainer.vl.trainer import build_trainer

    config, told = parse_run(RunConfig, argv=[*settings, "--output_dir", str(folder / "ours")]).config, Recording()
    trainer = build_trainer(config, [told])
    before = {name: weight.clone() for name, weight in gathered_state_dict(trainer.actor, keep=True).items()}
    trainer.fit()
    weights = {"before": before, "after": gathered_state_dict(trainer.actor, keep=True)}
    (folder / "ours.pickle").write_bytes(pickle.dumps({"steps": told.steps, **weights}))
    trainer.close()


def trl(folder: Path, model: str) -> None:
    import trl_learn
    import trl_steps
    from datasets import Dataset
    from trl import GRPOTrainer

    steps = pickle.loads((folder / "ours.pickle").read_bytes())["steps"]
    firsts = [sample for step in steps for sample in step[:: trl_learn.SAMPLES]]
    questions = [sample["text"].split("<|vision_end|>")[1].split("<|im_end|>")[0] for sample in firsts]
    rows = Dataset.from_dict(
        {
            "prompt": [[{"role": "user", "content": question}] for question in questions],
            "images": [sample["images"] for sample in firsts],
            "reference": [sample["reference"] for sample in firsts],
        }
    )
    left = iter(steps)

    def sampled(self, prompt_ids, *_, **__):
        step = next(left)
        if [list(ids) for ids in prompt_ids] != [list(sample["prompt_ids"]) for sample in step]:
            raise SystemExit("TRL's prompt tokens are not ours")
        return [list(sample["token_ids"]) for sample in step], None

    GRPOTrainer._generate_single_turn = sampled
    settings = trl_learn.settings(folder / "trl", len(steps), seed=1, use_vllm=False, shuffle_dataset=False)
    trainer = GRPOTrainer(
        model=model, reward_funcs=trl_learn.exact, args=settings, train_dataset=rows,
        processing_class=trl_steps.left_padding(model),
    )  # fmt: skip
    trainer.train()
    logs = [log for log in trainer.state.log_history if "grad_norm" in log]
    trainer.model.save_pretrained(folder / "trl")  # under the names of checkpoints
    (folder / "trl.json").write_text(json.dumps(logs))


def table(folder: Path) -> None:
    from safetensors.torch import load_file

    own = pickle.loads((folder / "ours.pickle").read_bytes())
    logs, theirs = json.loads((folder / "trl.json").read_text()), load_file(folder / "trl" / "model.safetensors")
    with open(folder / "ours" / "metrics.csv", newline="") as file:
        metrics = list(csv.DictReader(file))
    print("| step | reward, ours, TRL | loss, ours, TRL | gradient norm, ours, TRL |\n|---|---|---|---|")
    for row, log in zip(metrics, logs, strict=True):
        pairs = [("reward_mean", "reward"), ("loss", "loss"), ("grad_norm", "grad_norm")]
        cells = [f"{float(row[name]):.6f}, {float(log[other]):.6f}" for name, other in pairs]
        print(f"| {row['step']} | {' | '.join(cells)} |")
    theirs = {_plain(name): weight for name, weight in theirs.items()}
    before, after = ({_plain(name): weight for name, weight in own[side].items()} for side in ("before", "after"))
    moved = sum((after[name] - before[name]).square().sum().item() for name in after) ** 0.5
    apart = sum((after[name] - theirs[name]).square().sum().item() for name in after) ** 0.5
    print(f"\nThe weights moved by {moved:.3f} and are {apart:.2g} apart at the end: {apart / moved:.1e} of it.")


def _plain(name: str) -> str:
    """Of a weight, without the parts that only some versions of transformers write."""
    return name.replace("language_model.", "").removeprefix("model.")


if __name__ == "__main__":
    kind, where = sys.argv[1], Path(sys.argv[2])
    where.mkdir(parents=True, exist_ok=True)
    if kind == "ours":
        ours(where, sys.argv[3:])
    elif kind == "trl":
        trl(where, sys.argv[3])
    else:
        table(where)
