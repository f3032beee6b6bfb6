"""Everything a run writes about itself, from one place. Rank 0 writes; on other ranks every call does nothing."""

import datetime
import json
import logging
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import methodcaller
from pathlib import Path
from typing import Any

import torch

from ..config.shared import OutputConfig
from ..data.media import frames_first, is_video, to_uint8
from ..errors import ConfigError
from ..experience.rollouts import Episode, Rollout
from ..runtime.collectives import all_gather_object, exchange_objects, is_rank_0, rank, world_size
from ..runtime.files import FolderLock, append_line, read_jsonl, remove_folder, to_json, write_atomic
from ..runtime.masking import mask_config
from ..runtime.seeding import derive_seed
from ..runtime.usercode.calls import what_happened
from . import environment
from .images import save_image, save_video, write_contact_sheet
from .metrics import EVAL_COLUMNS, CsvSink, JsonlSink, Sink, TensorBoardSink, WandbSink, column_name, cut_jsonl

logger = logging.getLogger(__name__)

ALARMS, GOLD, EVALUATIONS, ROLLOUTS = "alarms.jsonl", "gold.jsonl", "evaluations.jsonl", "rollouts"
MEDIA = ("images", "videos")  # of a record
STEP_FILE = re.compile(r"(?:eval_)?step_(\d+)\.jsonl$")
SHEET_FOLDER = re.compile(r"eval_epoch_(\d+)$")


class RunRecorder:
    """Writes metrics.csv, metrics.jsonl, eval_metrics.csv, env.json, rollouts and contact sheets.

    Raises ConfigError at construction when an optional package is missing or the folder cannot be written.
    """

    def __init__(
        self,
        output_dir: str | Path,
        options: OutputConfig | None = None,
        *,
        config: Mapping[str, Any] | None = None,
        active: bool | None = None,
        locks: Sequence[FolderLock] = (),
    ):
        """`options`: which optional outputs there are; `config` is shown by W&B, masked; `active` overrides 'rank 0
        only'; `close` releases `locks` of folders."""
        self.folder = Path(output_dir)
        self.rollout_folder = self.folder / ROLLOUTS  # of records and their images
        self.options = options or OutputConfig()
        self.active = rank() == 0 if active is None else active
        self._locks = list(locks)
        self._sinks: list[Sink] = []
        self._eval_sinks: list[Sink] = []
        self._services: dict[Sink, str] = {}  # that have the metrics too, by the setting that asks for each
        if self.active:
            self._open(config)

    def _open(self, config: Mapping[str, Any] | None) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"output_dir {self.folder} cannot be written: {error}") from error
        self._identity = _identity(self.folder)
        self._sinks = [CsvSink(self.folder / "metrics.csv"), JsonlSink(self.folder / "metrics.jsonl")]
        self._eval_sinks = [CsvSink(self.folder / "eval_metrics.csv", EVAL_COLUMNS)]
        if self.options.use_tensorboard:
            self._services[TensorBoardSink(self.folder / "tensorboard")] = "use_tensorboard"
        if self.options.use_wandb:
            name = self.options.run_name or self.folder.name
            masked = mask_config(config or {})
            self._services[WandbSink(self.folder, name, masked)] = "use_wandb"

    def _tell(self, sinks: Sequence[Sink], call: str, *given: Any) -> None:
        """Call a method of sinks and of services. A service that fails is said and left: the run goes on without."""
        for sink in sinks:
            getattr(sink, call)(*given)
        for sink, setting in [*self._services.items()]:
            try:
                getattr(sink, call)(*given)
            except Exception as error:  # whatever its package raises
                del self._services[sink]
                logger.warning("%s: %s; the run goes on without, metrics.csv has all", setting, what_happened(error))

    def write_env(self) -> None:
        """env.json: versions, hardware, the command line with secrets masked. A resumed run keeps the first start."""
        if not self.active:
            return
        path = self.folder / "env.json"
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        content = environment.describe(world_size(), now)
        content["restarts"] = []
        if path.exists():
            earlier = read_object(path)
            restarts = earlier.get("restarts")
            content["restarts"] = [*(restarts if isinstance(restarts, list) else []), now]
            content["started"] = earlier.get("started", now)
        write_atomic(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")

    def _ready(self) -> bool:
        """Whether this process writes. A folder that was removed meanwhile is made again, and its loss is said.

        Raises FolderInUse where another run has taken its place.
        """
        if not self.active:
            return False
        if _identity(self.folder) != self._identity:
            told = "output_dir %s was removed or replaced during the run: what it held is lost, and a new one is begun"
            logger.warning(told, self.folder)
            for own in [each for each in self._locks if each.path.parent == self.folder]:
                own.forget()
                self._locks.remove(own)
                self._locks += filter(None, [FolderLock.take(self.folder)])
            self.folder.mkdir(parents=True, exist_ok=True)
            self._identity = _identity(self.folder)
        return True

    def log_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """One row of metrics.csv and metrics.jsonl. Values are numbers or 0-d tensors."""
        if self._ready():
            self._tell(self._sinks, "append", step, numbers(metrics))

    def log_eval(self, step: int, metrics: Mapping[str, Any]) -> None:
        """One row of eval_metrics.csv."""
        if self._ready():
            self._tell(self._eval_sinks, "append", step, numbers(metrics))

    def log_line(self, file: str, step: int, line: Mapping[str, Any]) -> None:
        """One line of a file of the run's folder.

        Args:
            file: ALARMS (whose images or texts are those of the step's rollouts), GOLD (reward and gold of each prompt,
                as the guard reads them) or EVALUATIONS (metrics, and what they were made with).
            step: that the line is of; it is written into it.
            line: what JSON holds, by name.
        """
        if self._ready():
            append_line(self.folder / file, to_json({**line, "step": step}) + "\n")

    def save_rollouts(self, step: int, records: Sequence[Mapping[str, Any]], kind: str = "step") -> Path | None:
        """rollouts/step_000012.jsonl; images become files beside it. The report takes its examples from it.

        Args:
            step: which made them, or at which they were evaluated.
            records: to be kept of all ranks, with `images` and `videos` as `save_image` and `save_video` take them.
            kind: "step", or "eval_step" of an evaluation; it begins the file's name.
        """
        if not self._ready():
            return None
        path = self.rollout_folder / f"{kind}_{step:06d}.jsonl"
        lines = []
        for record in records:
            stored = {"step": step, **record}
            for name, save in (("images", save_image), ("videos", save_video)):
                if stored.get(name):
                    stored[name] = [save(self.rollout_folder, each) for each in stored[name]]
            lines.append(to_json(stored))
        write_atomic(path, "".join(line + "\n" for line in lines))
        return path

    def save_contact_sheet(self, epoch: int, records: Sequence[Mapping[str, Any]]) -> Path | None:
        """eval_epoch_000012/contact_sheet.png of the records' images, and an mp4 of each video."""
        if not self.active:
            return None
        return write_contact_sheet(self.folder / f"eval_epoch_{epoch:06d}", records)

    def cut_back(self, step: int) -> None:
        """Forget everything after `step`, the step of the checkpoint that a run resumes from, and its end."""
        if not self.active:
            return
        (self.folder / environment.ENDED).unlink(missing_ok=True)
        self._tell([*self._sinks, *self._eval_sinks], "cut_back", step)
        for path in (self.folder / ALARMS, self.folder / GOLD, self.folder / EVALUATIONS):
            cut_jsonl(path, step)
        for number, path in numbered(self.rollout_folder.glob("*.jsonl"), STEP_FILE):
            if number > step:
                path.unlink()
        for number, path in numbered(self.folder.glob("eval_epoch_*"), SHEET_FOLDER):
            if number > step:
                remove_folder(path)
        remove_unused_images(self.rollout_folder)

    def log_end(self, how: str, text: str = "") -> None:
        """ended.json, as of `write_end`."""
        if self.active and _identity(self.folder) == self._identity:
            environment.write_end(self.folder, how, text)

    def close(self, failed: bool = False) -> None:
        """Close every sink, and let other runs have the folder. failed: whether an error ends the run."""
        if not self.active:
            return
        self._tell([*self._sinks, *self._eval_sinks], "close", failed)
        self.active = False
        for lock in self._locks:
            lock.release()


def _identity(folder: Path) -> tuple[int, int] | None:
    """Which folder this is, whatever its name; None for none."""
    try:
        found = folder.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics as Python numbers under names that every sink takes; `step` has its own place."""
    named = {name: float(value) for name, value in metrics.items() if name != "step"}
    return {name if name.isprintable() else column_name(name): value for name, value in named.items()}


def numbered(paths: Iterable[Path], pattern: re.Pattern[str]) -> list[tuple[int, Path]]:
    """(number, path) of the names that match, in numerical order."""
    matched = [(pattern.match(path.name), path) for path in paths]
    return sorted((int(match.group(1)), path) for match, path in matched if match)


def remove_unused_images(folder: Path) -> None:
    """Delete images that no remaining rollout file names; steps share images with equal content."""
    used = set()
    for path in folder.glob("*.jsonl"):
        for record in read_jsonl(path):
            named = [record.get(key) for key in ("images", "videos")]
            used |= {Path(each).name for names in named if isinstance(names, list) for each in map(str, names)}
    for path in (folder / "images").glob("*"):
        if path.name not in used:
            path.unlink()


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object from disk; an empty one where the file is damaged, as it only describes the run."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        logger.warning("%s cannot be read (%s)", path, error)
        return {}
    return content if isinstance(content, dict) else {}


Record = dict[str, Any]
SHOWN_INFO = 200  # characters of what an environment tells besides


def records_from_rollouts(rollouts: Sequence[Rollout]) -> list[Record]:
    """One record for each rollout, scored or not; its images by reference."""
    records = []
    for rollout in rollouts:
        prompt, drawn = rollout.prompt, rollout.prompt.draws
        record: Record = {
            "prompt": prompt.caption if drawn else prompt.text,
            "response": rollout.text,
            "reward": rollout.reward,
            "components": dict(rollout.components),
            "reference": prompt.reference,
            "label": prompt.label,
            "group_id": prompt.group_id,
            "sample_id": rollout.sample_id,
            "response_length": len(rollout.sampled_ids),
            "truncated": rollout.truncated,
            "valid": rollout.valid,
        }
        images = [*rollout.images, *([] if rollout.image is None else [rollout.image])]
        record |= {"images": images} if images else {}
        record |= {"videos": list(rollout.videos)} if rollout.videos else {}
        record |= {} if rollout.episode is None else _conversation(rollout.episode)
        record |= {"kind": "drawing"} if drawn else {}
        record |= {"distorted": True} if rollout.distorted else {}
        records.append(record)
    return records


def _conversation(episode: Episode) -> Record:
    """The turns of an episode. Its images are those of the record behind the prompt's, in the order of their parts."""
    turns = [
        {
            "text": turn.text,
            "reward": turn.reward,
            **({"calls": [list(call) for call in turn.calls]} if turn.calls else {}),
            **({"observation": turn.observation} if turn.observation else {}),
            **({"info": {str(name): _plain(value) for name, value in turn.info.items()}} if turn.info else {}),
        }
        for turn in episode.turns
    ]
    told: Record = {"turns": turns}
    return told | ({"failure": episode.reason} if episode.reason else {})


def _plain(value: Any) -> Any:
    """As JSON holds it: what is no number, text or truth is told in short."""
    if value is None or isinstance(value, bool | float | str):
        return value
    try:
        told = str(value)[:SHOWN_INFO]
        return value if isinstance(value, int) else told
    except Exception as error:  # of a user's class, and of a number with more digits than Python writes
        return f"a {type(value).__name__} whose text {what_happened(error)}"


def records_from_media(
    prompts: Sequence[str],
    media: Sequence[Any],
    rewards: torch.Tensor,
    components: Mapping[str, torch.Tensor] | None = None,
    *,
    valid: torch.Tensor | None = None,
    group_ids: torch.Tensor | None = None,
    sample_ids: torch.Tensor | None = None,
) -> list[Record]:
    """Records of generated images or videos.

    Args:
        prompts: of each of the B samples.
        media: of each: an image ([C, H, W] in 0..1, PIL) or a video ([C, T, H, W] in 0..1, a list of frames).
        rewards: (B).
        components: of the rewards, {name: (B)}; None: there are none.
        valid: bool (B), whether the reward could score it; None: all are.
        group_ids: (B), of each sample's prompt; None: records have none.
        sample_ids: (B), that no other sample of the batch has on any rank; None: from 0 on.
    """
    records = []
    for index, prompt in enumerate(prompts):
        kind = "videos" if is_video(media[index]) else "images"
        record: Record = {
            "prompt": prompt,
            "reward": float(rewards[index]),
            "components": {name: float(values[index]) for name, values in (components or {}).items()},
            "sample_id": index if sample_ids is None else int(sample_ids[index]),
            "valid": True if valid is None else bool(valid[index]),
            kind: [media[index]],
        }
        if group_ids is not None:
            record["group_id"] = int(group_ids[index])
        records.append(record)
    return records


def score(record: Mapping[str, Any]) -> float | None:
    """The record's reward, or None where it has none, is invalid or is not a number."""
    reward = record.get("reward")
    if not isinstance(reward, int | float) or reward != reward or not record.get("valid", True):
        return None
    return float(reward)


def best_and_worst(records: Sequence[Record], count: int) -> tuple[list[Record], list[Record]]:
    """The `count` records with the highest and with the lowest reward; ties keep their order.

    None is in both, and none of the worst has the highest reward: where all are equal there is no worst.
    """
    scored = sorted((record for record in records if score(record) is not None), key=lambda r: -score(r))
    best = scored[: min(count, (len(scored) + 1) // 2)]
    below = [record for record in scored[len(best) :] if score(record) < score(scored[0])]
    return best, below[::-1][:count]


def pick_random(records: Sequence[Record], count: int, seed: int = 0) -> list[Record]:
    """Some records, drawn without replacement, in their order.

    Args:
        records: to draw from.
        count: how many; all where there are fewer.
        seed: equal ones draw the same.
    """
    indices = sorted(random.Random(seed).sample(range(len(records)), min(count, len(records))))
    return [records[index] for index in indices]


def select(records: Sequence[Record], count: int, run_seed: int, step: int) -> list[Record]:
    """Records that show the range: a third best, a third worst (one of each at least), the rest at random; the same
    ones for the same scores.

    Args:
        records: to choose from.
        count: how many at most.
        run_seed: of the run; with `step` it decides what is drawn at random.
        step: that the records are shown for.
    """
    if len(records) <= count:
        return list(records)
    best, worst = best_and_worst(records, max(1, count // 3))
    shown = {id(record) for record in (*best, *worst)}
    others = [record for record in records if id(record) not in shown]
    seed = derive_seed(run_seed, step, "rollouts")
    drawn = pick_random(others, max(0, count - len(best) - len(worst)), seed)
    return [*best, *worst, *drawn][:count]


def gather_records(records: Sequence[Record], count: int, run_seed: int, step: int) -> list[Record]:
    """The records to keep of all ranks, as of `gather_all` (a collective).

    Args:
        records: of this rank.
        count: how many are kept at most, of all ranks together.
        run_seed: as of `select`.
        step: as of `select`.
    """
    own = select(records, count, run_seed, step)
    return gather_all(own, lambda everyone: select(everyone, count, run_seed, step))


def gather_all(records: Sequence[Record], choose: Callable[[list[Record]], list[Record]] = list) -> list[Record]:
    """The records of all ranks, by sample_id, that `choose` keeps of them, on every rank (a collective).

    Their images and videos, see `packed`, are on rank 0 alone, which writes them: a video is large, and eight ranks
    with eight of them each would hold gigabytes everywhere.
    """
    parts = all_gather_object([record | {kind: [] for kind in MEDIA if record.get(kind)} for record in records])
    chosen = choose(sorted((each for part in parts for each in part), key=methodcaller("get", "sample_id", 0)))
    kept = {id(record) for record in chosen}
    own = [packed(record) for record, told in zip(records, parts[rank()]) if id(told) in kept]
    received = exchange_objects([own, *([] for _ in parts[1:])])
    for part, media in zip(parts, received) if is_rank_0() else ():
        for record, shown in zip((each for each in part if id(each) in kept), media):
            record |= shown
    return chosen


def packed(record: Record) -> Record:
    """The record's images and videos, tensors as uint8 arrays, one byte a value: what is sent.

    An image of a batch is a view, and pickling a view takes the storage of the whole batch along. The floats of a
    video [C, T, H, W] become [T, C, H, W], the order that uint8 videos have.
    """
    return {
        kind: [
            to_uint8(frames_first(each) if is_video(each) else each).numpy() if isinstance(each, torch.Tensor) else each
            for each in record[kind]
        ]
        for kind in MEDIA
        if record.get(kind)
    }
