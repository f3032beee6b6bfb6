"""What stands behind the name `embedded`: files and models."""

import json
from pathlib import Path

import pytest

from lightrft_visual.config import registry
from lightrft_visual.config.diffusion import DiffusionDataConfig, DiffusionRunConfig
from lightrft_visual.config.load import load_config
from lightrft_visual.config.spellings import DIFFUSION_PRESET
from lightrft_visual.config.vl import DataConfig, ModelConfig, RunConfig
from lightrft_visual.errors import ConfigError
from lightrft_visual.models.tiny.diffusion import WORDS
from lightrft_visual.models.tiny.vlm import TINY_FAMILIES
from lightrft_visual.models.tiny.vlm import VISION_FAMILIES as SEEING
from lightrft_visual.plugins.embedded.drawn_shapes import all_captions
from lightrft_visual.plugins.embedded.resolve import DRAWING_FAMILIES, VISION_FAMILIES, place_captions, place_questions
from lightrft_visual.plugins.embedded.warmup import embedded_task


def embedded_data(**settings) -> DataConfig:
    config = RunConfig(model=ModelConfig(pretrain="some/model"), data=DataConfig(**settings))
    place_questions(config)
    return config.data


@pytest.mark.slow
def test_the_embedded_task_reports_on_test_and_is_tuned_on_dev(cache_root):
    task = embedded_task(cache_root)
    assert embedded_data().prompt_data == str(task.train)
    assert embedded_data().eval_data == str(task.test)
    assert embedded_data(eval_split="dev").eval_data == str(task.dev)
    assert embedded_data(eval_split="dev", eval_data="mine.jsonl").eval_data == "mine.jsonl"
    with pytest.raises(ConfigError, match="eval_split is 'train'"):
        embedded_data(eval_split="train")


def test_a_model_of_text_alone_is_given_the_questions_without_images(cache_root):
    config = RunConfig(model=ModelConfig(embedded_family="qwen2"))
    place_questions(config)
    for path, whole in ((config.data.prompt_data, 4096), (config.data.eval_data, 256)):
        rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
        assert whole // 12 < len(rows) < whole // 8
        assert not any(row["images"] for row in rows) and {row["label"] for row in rows} == {"text"}


def test_families_and_words_are_those_of_the_builders():
    drawing = tuple(name for name, family in TINY_FAMILIES.items() if family.draws)
    assert (VISION_FAMILIES, DRAWING_FAMILIES) == (SEEING, drawing)
    assert sorted({word for caption in all_captions() for word in caption.text.split()}) == list(WORDS)


def test_the_name_is_a_task_and_a_model_of_both_kinds_of_run():
    assert all("embedded" in each for each in (registry.tasks, registry.drawing_tasks, registry.checkpoint_resolvers))
    assert registry.checkpoint_folder(ModelConfig(), "some/model", "embedded") == "some/model"
    assert registry.pipeline_folder("some/pipeline", "sd3") == "some/pipeline"


def resolved(*argv: str) -> DiffusionDataConfig:
    config = load_config(DiffusionRunConfig, list(argv), preset=DIFFUSION_PRESET)
    place_captions(config)
    return config.data


def captions(path: str) -> set[str]:
    return {json.loads(line)["prompt"] for line in Path(path).read_text().splitlines()}


@pytest.mark.parametrize("pairs", ([], ["--diffusion_algorithm", "diffusion_dpo", "--pair_data", "embedded"]))
def test_tuning_neither_trains_on_nor_evaluates_the_test_captions(
    pairs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGHTRFT_CACHE", str(tmp_path))
    reported, tuned = resolved(*pairs), resolved(*pairs, "--eval_split", "dev")
    test, dev, trained = captions(reported.eval_data), captions(tuned.eval_data), captions(tuned.prompt_data)
    assert (len(test), len(dev), len(trained)) == (6, 6, 12) and not test & (dev | trained) and not dev & trained
    assert captions(reported.prompt_data) == dev | trained
    with pytest.raises(ConfigError, match="eval_split is 'train'"):
        resolved(*pairs, "--eval_split", "train")


def test_a_file_of_ones_own_is_evaluated_with_any_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTRFT_CACHE", str(tmp_path))
    data = resolved("--eval_data", "mine.jsonl", "--eval_split", "train")
    assert data.eval_data == "mine.jsonl" and len(captions(data.prompt_data)) == 18
