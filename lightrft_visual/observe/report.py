"""The command under its earlier name: python -m lightrft_visual.observe.report is python -m lightrft_visual.report."""

from __future__ import annotations

import runpy

if __name__ == "__main__":
    runpy.run_module("lightrft_visual.report", run_name="__main__")
