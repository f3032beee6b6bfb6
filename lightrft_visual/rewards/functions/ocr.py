"""Does the image show the text that the prompt asks for? Read by Tesseract."""

from __future__ import annotations

import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from PIL import Image
from rapidfuzz.distance import Levenshtein

from ...errors import ConfigError
from ...runtime.packages import needed
from ...runtime.usercode.calls import Failed

with needed("pytesseract"):
    import pytesseract

_QUOTED = re.compile(r'"([^"]+)"|“([^”]+)”|«([^»]+)»')

MIN_CONTRAST = 16  # grey levels of 256 between the darkest and the brightest pixel


def quoted_text(prompt: str) -> str | None:
    """The text between double quotes in a prompt, several joined by a space; None without quotes."""
    found = [next(part for part in groups if part) for groups in _QUOTED.findall(prompt)]
    return " ".join(found) if found else None


def plain(text: str) -> str:
    """Case and white space do not count (Flow-GRPO)."""
    return "".join(text.lower().split())


class OCR:
    """1 - edit distance / length of the wanted text, at least 0 (Flow-GRPO's OCR reward, with Tesseract as the reader).

    The wanted text is the sample's reference where it has one, else what its prompt has in double quotes; None without
    either. Case and spaces do not count. extra_text false: further text in the image counts as errors; true: a
    image that holds the wanted text somewhere scores 1. mode: Tesseract's page segmentation (6 = one block, 7 = one
    line, 11 = sparse). A video's score is that of its best frame. Raises ConfigError when Tesseract is not installed.
    """

    def __init__(
        self,
        language: str = "eng",
        mode: int = 6,
        extra_text: bool = True,
        min_height: int = 64,
        seconds: float = 20.0,
        workers: int = 4,
    ) -> None:
        if shutil.which(pytesseract.pytesseract.tesseract_cmd) is None:
            raise ConfigError("scorer ocr needs the program tesseract: apt-get install tesseract-ocr")
        if language not in pytesseract.get_languages():
            raise ConfigError(f"scorer ocr: Tesseract has no language {language!r}: apt-get install tesseract-ocr-...")
        os.environ.setdefault("OMP_THREAD_LIMIT", "1")  # several single-threaded readers beat one with four threads
        self.language, self.mode, self.extra_text = language, mode, extra_text
        self.min_height, self.seconds, self.workers = min_height, seconds, workers

    def __call__(
        self, frames: list[list[Any]], prompts: list[str], references: list[Any]
    ) -> list[float | Failed | None]:
        wanted = [quoted_text(p) if r is None else str(r) for p, r in zip(prompts, references)]
        with ThreadPoolExecutor(self.workers) as pool:
            return list(pool.map(self._score, frames, wanted))

    def _score(self, images: list[Any], wanted: str | None) -> float | Failed | None:
        if not wanted or not plain(wanted) or not images:
            return None
        try:
            return max(self.similarity(self.read(image), wanted) for image in images)
        except RuntimeError:  # pytesseract's time limit
            return Failed(f"Tesseract: no result within {self.seconds:g} s")
        except pytesseract.TesseractError as error:
            return Failed(f"Tesseract: exit status {error.status}")

    def similarity(self, read: str, wanted: str) -> float:
        """0..1, by the rule above."""
        target, found = plain(wanted), plain(read)
        if self.extra_text and target in found:
            return 1.0
        return max(0.0, 1.0 - Levenshtein.distance(found, target) / len(target))

    def read(self, image: Image.Image) -> str:
        """What Tesseract reads. Small images are enlarged first, which it needs; flat ones are not shown to it: it
        reads letters into them."""
        darkest, brightest = image.convert("L").getextrema()
        if brightest - darkest < MIN_CONTRAST:
            return ""
        image = image.convert("RGB")
        factor = -(-self.min_height // image.height) if image.height < self.min_height else 1
        if factor > 1:
            image = image.resize((image.width * factor, image.height * factor), Image.Resampling.LANCZOS)
        config = f"--psm {self.mode}"
        return pytesseract.image_to_string(image, lang=self.language, config=config, timeout=self.seconds)
