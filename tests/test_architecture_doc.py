"""What docs/architecture.md says of the rooms and of the walk of one sample is what the code does."""

import functools
import importlib
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_house import FLOORS

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def table(heading: str) -> list[list[str]]:
    """Cells of the table below a heading, its head left out."""
    section = TEXT.split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def named(cell: str) -> tuple[str, str]:
    """("module", "name") of a cell like: `data/rows.py` `PromptRow`."""
    path, name = re.findall(r"`([^`]+)`", cell)
    assert (ROOT / "lightrft_visual" / path).is_file(), path
    return f"lightrft_visual.{path.removesuffix('.py').replace('/', '.')}", name


def found(module: str, name: str):
    return functools.reduce(getattr, name.split("."), importlib.import_module(module))


WALK = [(named(type_cell), named(maker_cell)) for _, _, type_cell, maker_cell in table("The walk of one sample")]


def test_the_rooms_are_those_of_the_house():
    assert [cells[0].strip("`") for cells in table("The rooms")] == list(FLOORS)


def test_at_most_nine_types_each_in_its_file():
    assert len({type_name for type_name, _ in WALK}) == len(WALK) <= 9
    for (module, name), _ in WALK:
        assert found(module, name).__module__ == module


@pytest.fixture
def walked(monkeypatch) -> list[type]:
    """The types that the table's functions return, in the order of their first return."""
    seen: list[type] = []

    def spied(function):
        @functools.wraps(function)
        def call(*args, **kwargs):
            result = one = function(*args, **kwargs)
            while isinstance(one, list):
                one = one[0]
            if type(one) not in seen:
                seen.append(type(one))
            return result

        return call

    for _, (module, path) in WALK:
        function = found(module, path)
        *owner, name = path.split(".")
        if owner:
            plain = found(module, owner[0]).__dict__[name]
            spy = classmethod(spied(plain.__func__)) if isinstance(plain, classmethod) else spied(plain)
            monkeypatch.setattr(found(module, owner[0]), name, spy)
            continue
        spy = spied(function)
        for each in list(sys.modules.values()):  # wherever it was imported by name
            if each is not None and vars(each).get(name) is function:
                monkeypatch.setattr(each, name, spy)
    return seen


def test_a_sample_walks_as_the_table_says(tmp_path, walked):
    from tiny_models import IMAGE, PlainEngine, actor_of, checkpoint_of, picture

    from lightrft_visual.algorithms.kl import FixedKLController
    from lightrft_visual.config.vl import AlgorithmConfig, DataConfig
    from lightrft_visual.data import rows
    from lightrft_visual.experience.buffer import NaiveReplayBuffer
    from lightrft_visual.experience.rollouts import SamplingSettings
    from lightrft_visual.observe.metrics import MetricsAccumulator
    from lightrft_visual.trainer.fast_exp_maker import FastExperienceMaker, MakerSettings
    from lightrft_visual.trainer.vl import parts
    from lightrft_visual.trainer.vl.updates import PolicyUpdate, parts_of_loss, plan_batches

    picture(0).save(tmp_path / "image.png")
    checkpoint, data = checkpoint_of(tmp_path, "qwen2_5_vl"), DataConfig(apply_chat_template=False)
    row = {"prompt": f"{IMAGE} what?", "images": ["image.png"], "answer": "4"}
    prompts = parts.prompt_batch(
        [rows.parse_row(row, data, source="rows:0", root=tmp_path)], checkpoint, data, torch.arange(1)
    )
    actor = actor_of(checkpoint)
    maker = FastExperienceMaker(
        actor, None, None, None, checkpoint.tokenizer, 128, FixedKLController(0.0),
        SimpleNamespace(device=torch.device("cpu")), processor=checkpoint.processor,
        reward_fn=lambda completions: [float(place) for place in range(len(completions))],
        settings=MakerSettings(sampling=SamplingSettings(n=2, max_new_tokens=3)),
    )  # fmt: skip
    stages, buffer = maker.maker, NaiveReplayBuffer(2)
    for experience in stages.make_experience(stages.score(stages.generate(prompts))).batches:
        buffer.append(experience)
    ((micro_batch,),) = buffer.plan(0)
    config = AlgorithmConfig()
    (batch,) = plan_batches(buffer, [[micro_batch]], config, parts_of_loss(config, max_tokens=3))
    update = PolicyUpdate(PlainEngine(actor), config, stages.settings.sampling.scoring)
    update.step(buffer, batch, 0.0, MetricsAccumulator(), first=True)
    assert walked == [found(*type_name) for type_name, _ in WALK]
