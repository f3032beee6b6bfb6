"""The documentation as a site: it builds strictly, so no link of it is broken."""

import os
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]


def test_the_site_builds_strictly_and_has_generated_pages(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "n_samples_per_prompt" in (tmp_path / "reference" / "settings_vl" / "index.html").read_text()
    api = (tmp_path / "reference" / "api" / "index.html").read_text()
    assert "lightrft_visual.api.GRPOTrainer" in api and "lightrft_visual.inference.sample" in api


def test_every_page_stands_in_the_navigation() -> None:
    class Loader(yaml.SafeLoader):
        """Passes over tags of Python."""

    Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)
    text = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)["nav"]
    pages = {page for part in text for group in part.values() for page in pages_of(group)}
    assert {path.name for path in (ROOT / "docs").glob("*.md")} <= pages


def pages_of(group: list) -> list[str]:
    return [each if isinstance(each, str) else next(iter(each.values())) for each in group]
