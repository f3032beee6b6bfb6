"""Settings of other systems, which `systems/*.yaml` hold. A file has, each where the system needs it:

names      the same setting under another name, by kind of run: any, vl, sft, diffusion
words      settings whose values are words: the settings here that each word stands for. Those behind its first give
           way to what a command says itself.
           like: a setting here that takes the same kind of value, of the runs that have the word; without words every
           value asks for what is so anyway; told: what to write in place of other words
advice     what to write instead, as in config/spellings.py; by one name, or by several with commas
converts   what `convert` reads of a system: its own names where a file is known to be of it, what stands there where
           a file says nothing (for what a run learns, not sizes of micro-batches, memory, checkpoints and
           evaluations), also of one module (`defaults_of`), the estimators whose advantages it always whitens, what a
           setting with a value means in its files alone (`told`: what is said of it), and what it `scores` by where a
           file names no reward
"""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from ...config.spellings import ROOTS, Spoken, Translation, by_word

FOLDER = Path(__file__).parent / "systems"


def _read() -> tuple[Spoken, dict[str, dict[str, Any]]]:
    """(what users type, the entries of `converts`)."""
    names: dict[str, dict[str, str]] = {"any": {}, **{root.kind: {} for root in ROOTS}}
    words: dict[str, Translation] = {}
    advice: dict[str, str | tuple[str, ...]] = {}
    converts: dict[str, dict[str, Any]] = {}
    for file in sorted(FOLDER.glob("*.yaml")):
        system = yaml.load(file.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        for kinds, own in system.get("names", {}).items():
            for kind in kinds.split(", "):
                names[kind] |= own
        words |= {name: _translation(name, **entry) for name, entry in system.get("words", {}).items()}
        advice |= {name: told for several, told in system["advice"].items() for name in several.split(", ")}
        converts |= system.get("converts", {})
    aliases_of = {root.schema.__name__: names[root.kind] for root in ROOTS}
    translations = {
        root.schema.__name__: {name: each for name, each in words.items() if each.like in _settings_of(root.schema)}
        for root in ROOTS
    }
    return Spoken(names["any"], aliases_of, advice, translations), converts


def _settings_of(schema: type) -> set[str]:
    return {
        item.name for section in get_type_hints(schema).values() if is_dataclass(section) for item in fields(section)
    }


def _translation(
    name: str, like: str, about: str, words: Mapping[str, Mapping[str, Any]] | None = None, told: str | None = None
) -> Translation:
    if words is None:
        return Translation(like, lambda value: {}, about)
    told = told or f"of the values there, here are {', '.join(words)}"
    return Translation(like, by_word(words, f"{name} is {{0!r}}; {told}"), about)


SPOKEN, CONVERTS = _read()
