"""The notebooks of the examples run from their first cell to their last, each in a kernel of its own."""

import json
import os
from pathlib import Path

import pytest
from forked import begin, end, server
from waiting import polls

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "notebooks"
SHOWN = {  # a word of the last output of each
    "vlm_grpo_own_data": "'red'",
    "flow_grpo_own_scorer": "redness",
    "reading_a_run": "outputs/reading.html",
}


def kernel(folder: str, environment: dict[str, str], log: str) -> None:
    """In a new process, which has made the imports that take longest."""
    from ipykernel.kernelapp import IPKernelApp

    begin(environment, log)
    os.chdir(folder)
    IPKernelApp.launch_instance(argv=["-f", f"{folder}/kernel.json"])


def text_of(message: dict) -> str:
    content = message["content"]
    return content.get("text", "") + content.get("data", {}).get("text/plain", "")


def run_cells(cells: list[str], folder: Path, environment: dict[str, str]) -> list[str]:
    """What each cell shows."""
    from jupyter_client import BlockingKernelClient

    where = folder / "kernel.json"  # written by the kernel
    client = BlockingKernelClient(connection_file=str(where))
    process = server().Process(target=kernel, args=(str(folder), environment, str(folder / "log.txt")))
    process.start()
    try:
        for _ in polls(120, 0.1):
            if where.exists() and where.read_text().endswith("}"):
                break
        client.load_connection_file()
        client.start_channels()
        client.wait_for_ready(timeout=60)
        shown = []
        for cell in cells:
            messages = []
            reply = client.execute_interactive(cell, timeout=300, output_hook=messages.append)["content"]
            assert reply["status"] == "ok", "\n".join(reply["traceback"])
            shown.append("".join(map(text_of, messages)))
        return shown
    finally:
        client.stop_channels()
        end([process])


@pytest.mark.parametrize("name", SHOWN)
def test_notebook_runs_to_its_end(name: str, tmp_path: Path, cache_root: Path) -> None:
    cells = [
        cell for cell in json.loads((FOLDER / f"{name}.ipynb").read_text())["cells"] if cell["cell_type"] == "code"
    ]
    assert not any(cell["outputs"] for cell in cells), "notebooks are kept without outputs"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "LIGHTRFT_CACHE": str(cache_root)}
    shown = run_cells(["".join(cell["source"]) for cell in cells], tmp_path, environment)
    assert SHOWN[name] in [each for each in shown if each][-1]


def test_every_notebook_is_run() -> None:
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == set(SHOWN)
