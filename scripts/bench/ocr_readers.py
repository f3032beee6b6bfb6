"""The readers of the scorer ocr on drawn texts: python scripts/bench/ocr_readers.py [--texts 200]

Draws words in several fonts, sizes, colours and slants on plain and textured grounds, and prints a markdown table for
each reader: how often the whole text is read, the mean score of the right text, of one with a letter exchanged and of
another text, and the time an image. Seeds are fixed.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path
from statistics import mean

import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from lightrft_visual.rewards.functions.ocr import OCR, plain

FONTS = ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSerif", "DejaVuSerif-Italic", "DejaVuSansMono", "STIXGeneral")
WORDS = (
    "open late coffee market river garden station welcome winter sale harbor museum library summer night train "
    "bakery north exit danger quiet please no parking today fresh bread the old bridge hotel rooms 24 1987 50 hello"
).split()
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def texts(count: int, make: random.Random) -> list[str]:
    """One to four words each, in small, capital or title letters."""
    cases = (str.lower, str.upper, str.title)
    return [make.choice(cases)(" ".join(make.sample(WORDS, make.randint(1, 4)))) for _ in range(count)]


def drawn(text: str, make: random.Random, noise: np.random.Generator) -> Image.Image:
    """The text on one or two lines somewhere in an image of 512 x 512, slanted by up to 8 degrees."""
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    font = ImageFont.truetype(str(folder / f"{make.choice(FONTS)}.ttf"), make.choice((20, 28, 40, 56)))
    dark, light = ([make.randint(low, low + 80) for _ in range(3)] for low in (0, 170))
    ground, ink = (light, dark) if make.random() < 0.5 else (dark, light)
    image = Image.new("RGB", (512, 512), tuple(ground))
    words = text.split()
    half = -(-len(words) // 2)
    lines = [" ".join(words[:half]), " ".join(words[half:])] if len(words) > 2 else [text]
    lines = [line for line in lines if line]
    x = make.randint(10, max(11, 500 - int(max(font.getlength(line) for line in lines))))
    y = make.randint(40, 330)
    ImageDraw.Draw(image).multiline_text((x, y), "\n".join(lines), fill=tuple(ink), font=font)
    image = image.rotate(make.uniform(-8, 8), fillcolor=tuple(ground), resample=Image.Resampling.BICUBIC)
    grain = noise.normal(0, make.choice((0, 8, 20)), (512, 512, 3))
    return Image.fromarray(np.clip(np.asarray(image) + grain, 0, 255).astype(np.uint8))


def exchanged(text: str, make: random.Random) -> str:
    """The text with one letter or digit replaced by another letter."""
    places = [index for index, letter in enumerate(text) if letter.isalnum()]
    place = make.choice(places)
    other = make.choice([letter for letter in LETTERS if letter != text[place].lower()])
    return text[:place] + other + text[place + 1 :]


def row(name: str, images: list[Image.Image], wanted: list[str], wrong: list[str]) -> str:
    """A reader's line of the table."""
    scorer = OCR(name, workers=1)
    scorer.read(images[0])
    started = time.perf_counter()
    read = [str(scorer.read(image)) for image in images]
    seconds = (time.perf_counter() - started) / len(images)
    others = wanted[1:] + wanted[:1]
    exact = mean(plain(found) == plain(text) for found, text in zip(read, wanted))
    scores = [mean(map(scorer.similarity, read, each)) for each in (wanted, wrong, others)]
    cells = [f"`{name}`", f"{exact:.1%}", *(f"{score:.3f}" for score in scores), f"{1000 * seconds:.0f} ms"]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=200)
    count = parser.parse_args().texts
    make, noise = random.Random(0), np.random.default_rng(0)
    wanted = texts(count, make)
    images = [drawn(text, make, noise) for text in wanted]
    wrong = [exchanged(text, make) for text in wanted]
    titles = ["reader", "text read whole", "score", "one letter exchanged", "another text", "an image"]
    print(f"| {' | '.join(titles)} |\n|{'---|' * len(titles)}")
    for name in ("rapidocr", "tesseract"):
        print(row(name, images, wanted, wrong), flush=True)


if __name__ == "__main__":
    main()
