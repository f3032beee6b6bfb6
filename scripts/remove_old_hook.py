"""Remove from an environment what earlier versions put into PyTorch: a module that every `import torch` loads.

    python scripts/remove_old_hook.py [SITE_PACKAGES]     default: those of the interpreter that runs it

scripts/setup.sh calls it. A reinstallation removes the files by itself where the old one still lists them.
"""

from __future__ import annotations

import configparser
import sys
import sysconfig
from pathlib import Path

MODULE, GROUP = "lightrft_visual_launchers", "torch.backends"


def remove_old_hook(site_packages: Path) -> list[str]:
    """Remove the module, its bytecode and its entry point; the names of the files that were changed or removed."""
    changed = []
    for path in (site_packages / f"{MODULE}.py", *site_packages.glob(f"__pycache__/{MODULE}.*.pyc")):
        if path.exists():
            path.unlink()
            changed.append(path.name)
    for path in site_packages.glob("lightrft_visual-*.dist-info/entry_points.txt"):
        points = configparser.ConfigParser(delimiters=["="], interpolation=None)
        points.optionxform = str  # names keep their case
        points.read(path, encoding="utf-8")
        if not points.remove_section(GROUP):
            continue
        changed.append(path.name)
        if points.sections():
            with open(path, "w", encoding="utf-8") as file:
                points.write(file)
        else:
            path.unlink()
    return changed


if __name__ == "__main__":
    found = remove_old_hook(Path(sys.argv[1] if len(sys.argv) > 1 else sysconfig.get_path("purelib")))
    if found:
        print(f"setup: removed the hook of an earlier version ({', '.join(found)})")
