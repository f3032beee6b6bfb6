"""Reward functions as other systems call them; each form is an entry of `reward_forms`."""

import dis
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from types import CodeType, FunctionType
from typing import Any

import numpy as np
import torch

from ...rewards.batch import RewardBatch
from ...rewards.local.callables import OWN_POSITIONS, as_list, at_own_positions, known_input, score_key
from ...rewards.local.forms import LOGGING, Form


def records(results: Any, name: str, own: str = "score") -> Any:
    """A score and its metrics from one result a sample: a number, a mapping with a score, or ROLL's tuple
    (extracted answer, reward, format flag, correct flag). Texts beside a score are left out.

    Args:
        results: what the function returned.
        name: of it.
        own: the key of a score in mappings of its system.
    """
    if not isinstance(results, (list, tuple)):
        return results
    pairs = [_record(result, name, own) for result in results]
    names = dict.fromkeys(key for _, numbers in pairs for key in numbers)
    return [score for score, _ in pairs], {key: [numbers.get(key) for _, numbers in pairs] for key in names}


def _record(result: Any, name: str, own: str) -> tuple[Any, dict[str, Any]]:
    if isinstance(result, tuple) and len(result) == 4:
        result = dict(zip((own, "format", "correct"), result[1:]))
    if not isinstance(result, Mapping):
        return result, {}
    key = own if own in result else score_key(result, f"reward function {name} returned a dict")
    numbers = {k: v for k, v in result.items() if k != key and isinstance(v, (bool, int, float, np.number))}
    return result[key], numbers


def flow_grpo_result(result: Any, name: str) -> Any:
    """(scores, metadata), where scores may be {reward: list} with the total as `avg`; GenEval's five lists. An accuracy
    of -10, of a tag, is that of a prompt with another tag."""
    if isinstance(result, tuple) and len(result) == 5:
        return result[0], {"accuracy": result[1], "strict_accuracy": result[2]}
    scores = result[0] if isinstance(result, tuple) else result
    if isinstance(scores, Mapping) and "avg" in scores:
        parts = {key: values for key, values in scores.items() if key != "avg"}
        for key in (key for key, each in parts.items() if key.endswith("accuracy") and np.ndim(each)):
            parts[key] = [None if value == -10 else value for value in as_list(parts[key], name)]
        return scores["avg"], parts
    return scores


def _pixels(batch: RewardBatch) -> Any:
    """(B, 3, H, W), or (B, F, 3, H, W) for videos, float32 in 0..1; a list of images where sizes differ."""
    frames = [batch.frames(i, count=10**9) for i in range(len(batch))]
    if len({(len(row), *(frame.size for frame in row)) for row in frames}) != 1 or not frames[0]:
        return [row[0] if row else None for row in frames]
    arrays = np.stack([np.stack([np.asarray(frame.convert("RGB")) for frame in row]) for row in frames])
    pixels = torch.from_numpy(arrays).permute(0, 1, 4, 2, 3).float() / 255
    return pixels if any(batch.videos) else pixels[:, 0]


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
    asked = [row.get("prompt", row.get("messages")) for row in batch.metadata]
    return [
        row if isinstance(row, list) else [{"role": "user", "content": prompt}]
        for row, prompt in zip(asked, batch.prompts)
    ]


def _replies(batch: RewardBatch) -> list[Any]:
    return [[{"role": "assistant", "content": response}] for response in batch.responses]


_references, _responses = attrgetter("references"), attrgetter("responses")
_easyr1_records = partial(records, own="overall")
_VERL = {
    "data_source": _data_source,
    "solution_str": _responses,
    "ground_truth": _references,
    "extra_info": _extra_info,
}
_ANSWERS = {"response": _responses, **dict.fromkeys(("ground_truth", "answer", "reference"), _references)}


def _is_flow_grpo(names: Sequence[str], takes_all: bool, function: Callable[..., Any]) -> bool:
    """With further names, such as ids, it was written for us."""
    first = list(names[:2]) == ["images", "prompts"] and list(names[2:3]) in (["metadata"], ["metadatas"])
    return first and set(names[3:]) <= {"only_strict", "ref_images"}


def _is_by_position(names: Sequence[str], takes_all: bool, function: Callable[..., Any]) -> bool:
    """Three parameters, some with names of their own, and those with known names where LightRFT has them."""
    if takes_all or len(names) != len(OWN_POSITIONS) or all(map(known_input, names)):
        return False
    return at_own_positions(names)


BY_POSITION = Form(
    "LightRFT's form of files, called as (queries, prompts, references or labels)",
    positions=(lambda batch: batch.queries, lambda batch: batch.prompts, lambda batch: batch.labels_or_references),
    closed=True, fits=_is_by_position,
)  # fmt: skip
TRL = Form(
    "TRL's form", LOGGING,
    fits=lambda names, takes_all, function: bool({*LOGGING} & {*names}) or ("completions" in names and takes_all),
)  # fmt: skip
TRL_CHAT = Form(
    "TRL's form, completions as chat messages",
    {**LOGGING, "prompts": _messages, "completions": _replies},
    fits=lambda names, takes_all, function: "completions" in names and reads_messages(function),
)
VERL = Form(
    "verl's form, called for each sample", _VERL, each=True, closed=True, by_name=True, read=records,
    fits=lambda names, takes_all, function: "solution_str" in names,
)  # fmt: skip
VERL_BATCH = Form(
    "verl's form, called once", {f"{name}s": read for name, read in _VERL.items()}, closed=True, by_name=True,
    read=records, fits=lambda names, takes_all, function: "solution_strs" in names,
)  # fmt: skip
EASYR1 = Form(
    "EasyR1's form",
    {"reward_inputs": _reward_inputs, "predicts": _responses, "ground_truths": _references},
    closed=True, read=_easyr1_records,
    fits=lambda names, takes_all, function: "reward_inputs" in names or {"predicts", "ground_truths"} <= {*names},
)  # fmt: skip
EASYR1_EACH = Form(
    "EasyR1's form, called for each sample",
    {
        "reward_input": _reward_inputs, **dict.fromkeys(("predict", "predict_str"), _responses),
        "ground_truth": _references,
    },
    each=True, closed=True, read=_easyr1_records,
    fits=lambda names, takes_all, function: "reward_input" in names
    or ("ground_truth" in names and bool({"predict", "predict_str"} & {*names})),
)  # fmt: skip
ROLL = Form(
    "ROLL's form, called for each sample", _ANSWERS, each=True, closed=True, read=records,
    fits=lambda names, takes_all, function: [*names[:1]] == ["response"] and bool({*names[1:2]} & _ANSWERS.keys()),
)  # fmt: skip
FLOW_GRPO = Form(
    "flow_grpo's form, images as one tensor",
    {
        "images": _pixels,
        "metadatas": lambda batch: batch.metadata,
        "only_strict": lambda batch: True,
        "ref_images": lambda batch: [row[0] if row else None for row in batch.source_images or [[]] * len(batch)],
    },
    media=True, read=flow_grpo_result, fits=_is_flow_grpo,
)  # fmt: skip


def reads_messages(function: Callable[..., Any]) -> bool:
    """Whether the function, or one of its file that it names, reads `something[0]["content"]`, a chat message."""
    function = getattr(function, "function", function)
    while isinstance(function, partial):
        function = function.func
    waiting: list[Any] = []  # wrappers first: a decorator may read them
    function = inspect.unwrap(getattr(function, "__func__", function), stop=waiting.append)
    plain, seen = isinstance(function, FunctionType), set()
    home = (function if plain else type(function)).__module__
    waiting.append(function if plain else type(function).__call__)
    while waiting:
        part = waiting.pop()
        if not isinstance(part, FunctionType) or part in seen or part.__module__ != home:
            continue
        seen.add(part)
        waiting += [*(part.__defaults__ or ()), *(part.__kwdefaults__ or {}).values(), vars(part).get("__wrapped__")]
        codes = [part.__code__]
        for code in codes:  # with those inside it
            codes += [each for each in code.co_consts if isinstance(each, CodeType)]
            steps = [(each.opname, each.argval) for each in dis.get_instructions(code) if each.opname != "EXTENDED_ARG"]
            waiting += [part.__globals__.get(name) for kind, name in steps if kind in ("LOAD_GLOBAL", "LOAD_NAME")]
            for four in zip(steps, steps[1:], steps[2:], steps[3:]):
                match four:  # x[0]["content"], x[-1]["content"]
                    case (
                        ("LOAD_CONST", int()) | ("UNARY_NEGATIVE", _), ("BINARY_SUBSCR", _),
                        ("LOAD_CONST", "content"), ("BINARY_SUBSCR", _),
                    ):  # fmt: skip
                        return True
    return False
