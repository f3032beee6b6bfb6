"""Hooks of mkdocs.yml: the first page, generated pages, and links that leave docs/.

README.md is the first page. A link to a file of the repository beside docs/ becomes its name: the site has no sources.
A file that is not there fails the build, as every broken link does.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

from lightrft_visual import __all__ as public
from lightrft_visual.config.leaves import names_of
from lightrft_visual.config.spellings import ROOTS

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
TITLES = {"vl": "vision-language", "diffusion": "diffusion", "sft": "supervised"}


def on_files(files: Files, config: Any) -> Files:
    """The pages that no file of docs/ holds."""
    pages = {"index.md": readme(), "reference/api.md": api(), "reference/changes.md": changes()}
    pages |= {f"reference/settings_{root.kind}.md": settings(root) for root in ROOTS}
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """A link that leaves docs/ as the name of the file."""

    def named(found: re.Match[str]) -> str:
        image, text, target = found.groups()
        if not target.startswith("../") or page.file.src_uri.startswith("reference/"):
            return found[0]
        path = target.removeprefix("../").partition("#")[0]
        if not (ROOT / path).exists():
            raise PluginError(f"{page.file.src_uri}: {target} is not there")
        if path == "README.md":
            return f"[{text}](index.md)"
        if image:
            raise PluginError(f"{page.file.src_uri}: the image {target} lies outside docs/")
        return text if path in text or text.startswith("`") else f"{text} (`{path}`)"

    return LINK.sub(named, markdown)


def readme() -> str:
    """README.md with its links as docs/ sees them."""
    text = (ROOT / "README.md").read_text()
    text = re.sub(r"\]\((?!docs/|https?:|#)([^)]+)\)", r"](../\1)", text)
    return text.replace("](docs/", "](")


def changes() -> str:
    """CHANGELOG.md, its links as names."""
    text = (ROOT / "CHANGELOG.md").read_text()
    return text.replace("](docs/", "](../")


def settings(root: Any) -> str:
    """Every setting of a kind of run, a table a section."""
    lines = [f"# Settings of {TITLES[root.kind]} runs", "", "Written from the configuration.", ""]
    sections: dict[str, list[str]] = {}
    for leaf in names_of(root.schema).leaves.values():
        default = "" if leaf.default in (None, "", [], {}) else f"`{leaf.default}`"
        cells = (f"`{leaf.name}`", f"`{leaf.type_name.replace(' | ', ' or ')}`", default, leaf.help)
        line = " | ".join(cell.replace("|", "\\|") for cell in cells)
        sections.setdefault(leaf.section or "run", []).append(f"| {line} |")
    for section, rows in sections.items():
        lines += [f"## {section}", "", "| setting | takes | default | |", "|---|---|---|---|", *rows, ""]
    return "\n".join(lines)


def api() -> str:
    """The public names, by their docstrings; what all trainers take and do comes first."""
    from lightrft_visual import _EXPORTS

    def shown(name: str, **options: str) -> list[str]:
        return [f"::: lightrft_visual.{name}", "    options:", *(f"      {k}: {v}" for k, v in options.items()), ""]

    lines = ["# Python API", "", "What `from lightrft_visual import …` has. [Python](../python.md) is the guide.", ""]
    lines += ["## Every trainer", ""]
    own = {"show_root_heading": "false", "show_root_toc_entry": "false", "merge_init_into_class": "true"}
    lines += shown("api._Trainer", show_bases="false", members="[fit, evaluate, save, close]", **own)
    for title, trainers in (("Trainers", True), ("What else is public", False)):
        lines += [f"## {title}", ""]
        for name in sorted(name for name in public if name.endswith("Trainer") == trainers):
            members = "true" if "api" == _EXPORTS.get(name, "api") and not trainers else "false"
            lines += shown(f"{_EXPORTS.get(name, 'api')}.{name}", show_bases="false", members=members)
    return "\n".join(lines)
