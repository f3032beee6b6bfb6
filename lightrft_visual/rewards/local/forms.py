"""Reward functions of other systems, called as they are there. docs/coming_from.md has them in tables.

A form says which inputs its functions know beside ours, whether they are called once or for each sample, and how what
they return is read. It is recognised by the parameters' names.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from ...errors import ConfigError, RewardError, did_you_mean
from ...runtime.usercode.calls import LOG_EXTRA, LOG_METRIC, ROWS
from ..batch import RewardBatch
from .results import SCORE_KEYS

AUTO = "auto"
Inputs = Mapping[str, Callable[[RewardBatch], Any]]


def _as_is(result: Any, name: str) -> Any:
    return result


@dataclass(frozen=True)
class Form:
    """told: what the line at the start of a run says. inputs: by parameter, each a list with one entry a sample (or
    one value for all, when not each). each: called for each sample, with its entry of every input. closed: **kwargs
    get settings only. read: turns a result into one of ours. media: only for media that the policy made."""

    told: str = ""
    inputs: Inputs = field(default_factory=dict)
    each: bool = False
    closed: bool = False
    media: bool = False
    read: Callable[[Any, str], Any] = _as_is

    def for_batch(self, batch: RewardBatch) -> Form:
        """This form, or ours where it is not meant for such a batch."""
        return NATIVE if self.media and not batch.generated else self

    def calls(self, arguments: dict[str, Any], fixed: Mapping[str, Any], size: int) -> dict[str, Any]:
        """The arguments of the one call, or ROWS of them; `fixed` ones are the same for every sample."""
        if not self.each:
            return arguments
        return {ROWS: [{k: v if k in fixed else v[i] for k, v in arguments.items()} for i in range(size)]}


def records(results: Any, name: str) -> Any:
    """A score and its metrics from one result a sample: a number, a mapping with a score, or ROLL's tuple
    (extracted answer, reward, format flag, correct flag). Texts beside a score are left out."""
    if not isinstance(results, (list, tuple)):
        return results
    rows = [_record(result, name) for result in results]
    names = dict.fromkeys(key for row in rows for key in row if key != "score")
    return [row["score"] for row in rows], {key: [row.get(key) for row in rows] for key in names}


def _record(result: Any, name: str) -> dict[str, Any]:
    if isinstance(result, tuple) and len(result) == 4:
        result = dict(zip(("score", "format", "correct"), result[1:]))
    if not isinstance(result, Mapping):
        return {"score": result}
    key = next((k for k in ("overall", *SCORE_KEYS) if k in result), None)
    if key is None:
        raise RewardError(f"reward function {name} returned a dict without a score: give it 'score' or 'overall'")
    numbers = {k: v for k, v in result.items() if k != key and isinstance(v, (bool, int, float, np.number))}
    return {**numbers, "score": result[key]}


def flow_grpo_result(result: Any, name: str) -> Any:
    """(scores, metadata), where scores may be {reward: list} with the total as `avg`; GenEval's five lists."""
    if isinstance(result, tuple) and len(result) == 5:
        return result[0], {"accuracy": result[1], "strict_accuracy": result[2]}
    scores = result[0] if isinstance(result, tuple) else result
    if isinstance(scores, Mapping) and "avg" in scores:
        return scores["avg"], {key: values for key, values in scores.items() if key != "avg"}
    return scores


def _pixels(batch: RewardBatch) -> Any:
    """(B, 3, H, W), or (B, F, 3, H, W) for videos, float32 in 0..1; a list of images where sizes differ."""
    frames = [batch.frames(i, count=10**9) for i in range(len(batch))]
    if len({(len(row), *(frame.size for frame in row)) for row in frames}) != 1 or not frames[0]:
        return [row[0] if row else None for row in frames]
    arrays = np.stack([np.stack([np.asarray(frame.convert("RGB")) for frame in row]) for row in frames])
    pixels = torch.from_numpy(arrays).permute(0, 1, 4, 2, 3).float() / 255
    return pixels if any(batch.videos) else pixels[:, 0]


def _column(*names: str) -> Callable[[RewardBatch], list[Any]]:
    return lambda batch: [next((row[n] for n in names if n in row), None) for row in batch.metadata]


def _data_source(batch: RewardBatch) -> list[Any]:
    return [row.get("data_source", label) for row, label in zip(batch.metadata, batch.labels)]


def _extra_info(batch: RewardBatch) -> list[Any]:
    return [row["extra_info"] if isinstance(row.get("extra_info"), dict) else row for row in batch.metadata]


def _reward_inputs(batch: RewardBatch) -> list[dict[str, Any]]:
    lengths = [len(tokens) for tokens in batch.completion_tokens] or [0] * len(batch)
    own = zip(batch.responses, lengths, batch.references, batch.images, batch.videos)
    names = ("response", "response_length", "ground_truth", "images", "videos")
    return [{**row, **dict(zip(names, values))} for row, values in zip(batch.metadata, own)]


def _messages(batch: RewardBatch) -> list[Any]:
    asked = _column("prompt", "messages")(batch)
    return [
        row if isinstance(row, list) else [{"role": "user", "content": prompt}]
        for row, prompt in zip(asked, batch.prompts)
    ]


def _replies(batch: RewardBatch) -> list[Any]:
    return [[{"role": "assistant", "content": response}] for response in batch.responses]


def _references(batch: RewardBatch) -> list[Any]:
    return batch.references


def _responses(batch: RewardBatch) -> list[Any]:
    return batch.responses


_TRL: Inputs = {
    "trainer_state": lambda batch: SimpleNamespace(global_step=batch.step),
    "log_extra": lambda batch: LOG_EXTRA,
    "log_metric": lambda batch: LOG_METRIC,
}
_VERL = {
    "data_source": _data_source,
    "solution_str": _responses,
    "ground_truth": _references,
    "extra_info": _extra_info,
}
NATIVE = Form(inputs=_TRL)
FORMS: dict[str, Form] = {
    "native": NATIVE,
    "trl": Form("TRL's form", _TRL),
    "trl_chat": Form(
        "TRL's form, completions as chat messages", {**_TRL, "prompts": _messages, "completions": _replies}
    ),
    "openrlhf": Form("OpenRLHF's form, labels are the references", {"labels": lambda b: b.labels_or_references}),
    "lightrft": Form("LightRFT's form"),
    "verl": Form("verl's form, called for each sample", _VERL, each=True, closed=True, read=records),
    "verl_batch": Form(
        "verl's form, called once", {f"{k}s": v for k, v in _VERL.items()}, closed=True, read=records
    ),
    "easyr1": Form(
        "EasyR1's form",
        {"reward_inputs": _reward_inputs, "predicts": _responses, "ground_truths": _references},
        closed=True,
        read=records,
    ),
    "easyr1_each": Form(
        "EasyR1's form, called for each sample",
        {
            "reward_input": _reward_inputs,
            **dict.fromkeys(("predict", "predict_str"), _responses),
            "ground_truth": _references,
        },
        each=True,
        closed=True,
        read=records,
    ),
    "roll": Form(
        "ROLL's form, called for each sample",
        {"response": _responses, **dict.fromkeys(("ground_truth", "answer", "reference"), _references)},
        each=True,
        closed=True,
        read=records,
    ),
    "flow_grpo": Form(
        "flow_grpo's form, images as one tensor",
        {
            "images": _pixels,
            "metadatas": lambda batch: batch.metadata,
            "only_strict": lambda batch: True,
            "ref_images": lambda batch: [row[0] if row else None for row in batch.source_images or [[]] * len(batch)],
        },
        media=True,
        read=flow_grpo_result,
    ),
}  # fmt: skip


def choose(form: str, function: Callable[..., Any], signature: Any) -> Form:
    """The form of that name, or the one that the signature shows. Raises ConfigError as `check` does."""
    check(form)
    return FORMS[recognise(signature.names, signature.takes_all, function) if form == AUTO else form]


def check(form: str) -> None:
    """Raise ConfigError with the nearest name for a form that does not exist."""
    if form not in (AUTO, *FORMS):
        raise ConfigError(f"there is no reward_form {form!r}{did_you_mean(form, [AUTO, *FORMS])}")


def recognise(names: Sequence[str], takes_all: bool, function: Callable[..., Any]) -> str:
    """The name in FORMS of a function with parameters of these names."""
    known = set(names)
    if "solution_str" in known or "solution_strs" in known:
        return "verl" if "solution_str" in known else "verl_batch"
    if "reward_inputs" in known or {"predicts", "ground_truths"} <= known:
        return "easyr1"
    if "reward_input" in known or ("ground_truth" in known and known & {"predict", "predict_str"}):
        return "easyr1_each"
    if list(names[:1]) == ["response"] and names[1:2] and names[1] in FORMS["roll"].inputs:
        return "roll"
    if list(names[:2]) == ["images", "prompts"] and list(names[2:3]) in (["metadata"], ["metadatas"]):
        if set(names[3:]) <= {"only_strict", "ref_images"}:  # with further names, such as ids, it was written for us
            return "flow_grpo"
    if list(names[:3]) == ["queries", "prompts", "labels"] and not known & {"refs", "references", "completions"}:
        return "openrlhf"
    if "model_reward_list" in known:
        return "lightrft"
    if "completions" in known and reads_messages(function):
        return "trl_chat"
    return "trl" if known & set(_TRL) or ("completions" in known and takes_all) else "native"


def reads_messages(function: Callable[..., Any]) -> bool:
    """Whether the function, or one of its file that it names, reads `something[0]["content"]`, a chat message."""
    function = inspect.unwrap(getattr(function, "function", function))
    home, seen = _module(function), set()
    waiting = [function if isinstance(function, FunctionType) else type(function).__call__]
    while waiting:
        part = waiting.pop()
        if not isinstance(part, FunctionType) or part in seen or part.__module__ != home:
            continue
        seen.add(part)
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(part)))
        except (OSError, TypeError, SyntaxError):  # made without a file, or a lambda in the middle of a line
            continue
        for node in ast.walk(tree):
            if _is_message_text(node):
                return True
            if isinstance(node, ast.Name):
                waiting.append(part.__globals__.get(node.id))
    return False


def _module(function: Callable[..., Any]) -> str:
    """The module of a function, or of the class of a callable object."""
    return function.__module__ if isinstance(function, FunctionType) else type(function).__module__


def _is_message_text(node: ast.AST) -> bool:
    match node:  # x[0]["content"], x[-1]["content"]
        case ast.Subscript(ast.Subscript(_, ast.Constant(int()) | ast.UnaryOp()), ast.Constant("content")):
            return True
    return False
