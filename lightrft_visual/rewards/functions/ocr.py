"""Does the image show the text that the prompt asks for? Read by RapidOCR (PP-OCR in ONNX) or by Tesseract."""

import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from PIL import Image
from rapidfuzz.distance import Levenshtein

from ...errors import ConfigError
from ...runtime.packages import needed
from ...runtime.usercode.calls import Failed
from .answers import references_in

_QUOTED = re.compile(r'"([^"]*)"|“([^”]*)”|«([^»]*)»')

MIN_CONTRAST = 16  # grey levels of 256 between the darkest and the brightest pixel


def quoted_text(prompt: str) -> str | None:
    """The text between double quotes in a prompt, several joined by a space; None without quotes."""
    found = [part for groups in _QUOTED.findall(prompt) for part in groups if part.strip()]
    return " ".join(found) if found else None


def plain(text: str) -> str:
    """Case and white space do not count (Flow-GRPO)."""
    return "".join(text.lower().split())


class RapidReader:
    """RapidOCR, whose package brings PP-OCR's detection and recognition models. threads: of each of them."""

    def __init__(self, threads: int) -> None:
        with needed("rapidocr"):
            import onnxruntime  # noqa: F401 - what it runs on, which it asks for at its first image
            from rapidocr import RapidOCR
        runtime = {"intra_op_num_threads": threads, "inter_op_num_threads": 1}
        params = {f"EngineConfig.onnxruntime.{name}": value for name, value in runtime.items()}
        self._engine = RapidOCR(params={"Global.log_level": "error", **params})

    def read(self, image: Image.Image) -> str:
        """The text of an RGB image, line by line."""
        found = self._engine(np.asarray(image)[:, :, ::-1])  # it expects the order of OpenCV's channels
        return "\n".join(found.txts or ())


class TesseractReader:
    """Tesseract, one process an image. mode: its page segmentation (6 = one block, 7 = one line, 11 = sparse)."""

    def __init__(self, language: str, mode: int, min_height: int, seconds: float) -> None:
        with needed("pytesseract"):
            import pytesseract
        if shutil.which(pytesseract.pytesseract.tesseract_cmd) is None:
            raise ConfigError("reader tesseract needs the program tesseract: apt-get install tesseract-ocr")
        if language not in pytesseract.get_languages():
            raise ConfigError(f"scorer ocr: Tesseract has no language {language!r}: apt-get install tesseract-ocr-...")
        os.environ.setdefault("OMP_THREAD_LIMIT", "1")  # several single-threaded readers beat one with four threads
        self._tesseract = pytesseract
        self.language, self.mode, self.min_height, self.seconds = language, mode, min_height, seconds

    def read(self, image: Image.Image) -> str | Failed:
        """The text of an RGB image, line by line. Small images are enlarged first, which it needs."""
        factor = -(-self.min_height // image.height) if image.height < self.min_height else 1
        if factor > 1:
            image = image.resize((image.width * factor, image.height * factor), Image.Resampling.LANCZOS)
        settings = {"lang": self.language, "config": f"--psm {self.mode}", "timeout": self.seconds}
        try:
            return self._tesseract.image_to_string(image, **settings)
        except self._tesseract.TesseractError as error:
            return Failed(f"Tesseract: exit status {error.status}")
        except RuntimeError:  # its time limit
            return Failed(f"Tesseract: no result within {self.seconds:g} s")


class OCR:
    """1 - edit distance / length of the wanted text, at least 0 (the rule of Flow-GRPO's OCR reward).

    The wanted text is the sample's reference where it has one, else what its prompt has in double quotes; None without
    either. Case and spaces do not count. extra_text false: further text in the image counts as errors; true: an image
    that holds the wanted text somewhere scores 1. A video's score is that of its best frame.

    reader: 'rapidocr' or 'tesseract'; default rapidocr, and tesseract where language, mode, min_height or seconds are
    given, which are its own. workers: images at once by Tesseract, threads of RapidOCR. Raises ConfigError where the
    reader is not installed.
    """

    def __init__(
        self,
        reader: str | None = None,
        extra_text: bool = True,
        workers: int = 4,
        language: str | None = None,
        mode: int | None = None,
        min_height: int | None = None,
        seconds: float | None = None,
    ) -> None:
        own = {"language": language, "mode": mode, "min_height": min_height, "seconds": seconds}
        own = {name: value for name, value in own.items() if value is not None}
        name = reader or ("tesseract" if own else "rapidocr")
        if name not in ("rapidocr", "tesseract"):
            raise ConfigError(f"scorer ocr: reader is {name!r}; it must be rapidocr or tesseract")
        if own and name == "rapidocr":
            raise ConfigError(f"scorer ocr: {', '.join(own)} belong to reader tesseract")
        usual = {"language": "eng", "mode": 6, "min_height": 64, "seconds": 20.0}
        self.reader: RapidReader | TesseractReader = (
            RapidReader(workers) if name == "rapidocr" else TesseractReader(**usual | own)
        )
        self.extra_text, self.workers = extra_text, workers if name == "tesseract" else 1

    def __call__(
        self, frames: list[list[Any]], prompts: list[str], references: list[Any]
    ) -> list[float | Failed | None]:
        quoted = ([quoted_text(prompt) or ""] for prompt in prompts)
        wanted = [own if r is None else references_in(r) for own, r in zip(quoted, references)]
        with ThreadPoolExecutor(self.workers) as pool:
            return list(pool.map(self._score, frames, wanted))

    def _score(self, images: list[Any], wanted: list[str]) -> float | Failed | None:
        targets = [each for each in wanted if plain(each)]
        if not targets or not images:
            return None
        read = [self.read(image) for image in images]
        failed = next((each for each in read if isinstance(each, Failed)), None)
        return failed or max(self.similarity(each, t) for each in read if isinstance(each, str) for t in targets)

    def similarity(self, read: str, wanted: str) -> float:
        """0..1, by the rule above."""
        target, found = plain(wanted), plain(read)
        if self.extra_text and target in found:
            return 1.0
        return max(0.0, 1.0 - Levenshtein.distance(found, target) / len(target))

    def read(self, image: Image.Image) -> str | Failed:
        """What the reader reads. Flat images are not shown to it: Tesseract reads letters into them."""
        darkest, brightest = image.convert("L").getextrema()
        return "" if brightest - darkest < MIN_CONTRAST else self.reader.read(image.convert("RGB"))
