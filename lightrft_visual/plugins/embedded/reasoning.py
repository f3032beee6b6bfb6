"""The embedded reasoning task: coloured shapes are counted one by one in a chain of tokens, then the answer is given.

    how many red and blue shapes?   <think> red 1 2 blue 3 </think> <answer> 3 </answer>

A scene has one shape or none in each quarter; one to three colours are asked for, and the count goes on from colour to
colour. So a right response is longer where there is more to count (16 to 24 tokens of the embedded model), each number
in it is a decision of its own, and the form (think, then answer) is to be kept. Labels: `one`, `two`, `three` colours.

Demonstrations are a cold start: the chain in them is right, but only a part (FORMS) has the form that the reward asks
for. The others leave out tags or the chain, or count again and again and are cut off. Splits: see `task`.
"""

import random

from .questions import COLOURS, Scene, draw_scenes
from .task import Question, TaskSource

VERSION = 1
KINDS = {"one": 1, "two": 2, "three": 3}  # label -> colours that are asked for
QUARTERS = ((0.25, 0.25), (0.75, 0.25), (0.25, 0.75), (0.75, 0.75))
# Forms of demonstrations and how many of twenty have each; {chain} and {answer} are right in all of them.
FORMS = {
    "<think> {chain} </think> <answer> {answer} </answer>": 3,
    "<think> {chain} <answer> {answer} </answer>": 4,
    "<think> {chain} </think> {answer}": 7,
    "{answer}": 2,
    "<think> {chain} {chain} {chain} {chain} </think>": 4,
}
_FORMS = tuple(form for form, share in FORMS.items() for _ in range(share))
REWARD = '{"*": [["rule", "exact", 0.8, {"tagged": true}], ["rule", "format", 0.2]]}'  # a recipe: answer, and form


def _draw_question(row: int, split: str, rng: random.Random, size: int) -> Question:
    """Of the kind whose turn it is, with a demonstration of any form."""
    kind = tuple(KINDS)[row % len(KINDS)]
    prompt, scenes, chain, answer = make_question(kind, rng)
    response = rng.choice(_FORMS).format(chain=chain, answer=answer)
    return Question(kind, prompt, [draw_scenes(scenes, size)], answer, demonstration=response)


def make_question(kind: str, rng: random.Random) -> tuple[str, list[Scene], str, str]:
    """A question, the scenes to draw over each other, the chain and the answer; answers are about equally likely."""
    asked = rng.sample(list(COLOURS), KINDS[kind])
    others = [colour for colour in COLOURS if colour not in asked]
    wanted = rng.randint(0 if kind == "one" else 1, len(QUARTERS))
    colours = [rng.choice(asked) for _ in range(wanted)]
    colours += [rng.choice(others) for _ in range(rng.randint(0, len(QUARTERS) - wanted))]
    centres = rng.sample(QUARTERS, len(colours))
    scenes = []
    for centre, colour in zip(centres, colours):
        x, y = (each + rng.uniform(-0.04, 0.04) for each in centre)
        scenes.append(Scene(((x, y),), rng.uniform(0.17, 0.2), colour, "square"))
    chain, counted = [], 0
    for colour in asked:
        chain.append(colour)
        for _ in range(colours.count(colour)):
            counted += 1
            chain.append(str(counted))
    return question_text(asked), scenes, " ".join(chain), str(counted)


def question_text(colours: list[str]) -> str:
    """The question for these colours."""
    return f"how many {' and '.join(colours)} shapes?"


def vocabulary_texts() -> list[str]:
    """Texts that together hold every word, digit and sign of the task; a tokenizer trained on them knows it all."""
    counts = " ".join(["", *COLOURS, *map(str, range(len(QUARTERS) + 1))])
    return [question_text(list(COLOURS)), counts, *(form.format(chain=counts, answer=counts) for form in FORMS)]


SOURCE = TaskSource(
    "reasoning",
    VERSION,
    _draw_question,
    "embedded reasoning",
    vocabulary_texts,
    {"until_loss": 0.24},
)
