"""The notebooks of the examples run from their first cell to their last."""

import os
from pathlib import Path

import nbclient
import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "notebooks"
SHOWN = {  # a word of the last output of each
    "vlm_grpo_own_data": "'red'",
    "flow_grpo_own_scorer": "redness",
    "reading_a_run": "outputs/reading.html",
}


def texts(notebook: nbformat.NotebookNode) -> str:
    """All that the last cell with an output shows."""
    outputs = [cell.outputs for cell in notebook.cells if cell.cell_type == "code" and cell.outputs][-1]
    return "".join(each.get("text", "") + each.get("data", {}).get("text/plain", "") for each in outputs)


@pytest.mark.parametrize("name", SHOWN)
def test_notebook_runs_to_its_end(name: str, tmp_path: Path, cache_root: Path) -> None:
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells), "notebooks are kept without outputs"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "LIGHTRFT_CACHE": str(cache_root)}
    client = nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}})
    client.execute(env=environment)
    assert SHOWN[name] in texts(notebook)


def test_every_notebook_is_run() -> None:
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == set(SHOWN)
