"""examples/tour.ipynb runs from top to bottom in a kernel of its own, and shows what it says."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_no_output_is_committed():
    notebook = json.loads((EXAMPLES / "tour.ipynb").read_text())
    assert not [cell for cell in notebook["cells"] if cell.get("outputs")]


@pytest.mark.slow
def test_the_tour(tmp_path, monkeypatch):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    pytest.importorskip("matplotlib")
    shutil.copytree(EXAMPLES / "models", tmp_path / "models")
    paths = [str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    monkeypatch.setenv("HOME", str(tmp_path))  # of the kernel's own files
    notebook = nbformat.read(EXAMPLES / "tour.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3",
                            resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    text = "".join(output.get("text", "") for output in outputs)
    assert "native\nlockstep\n" in text and "red-fox: 4821" in text and "calm-bear: 9182" in text
    shown = [output["data"] for output in outputs if "data" in output]
    assert any("KV blocks in use" in data.get("text/html", "") for data in shown)
    assert any("image/png" in data for data in shown)
    assert (tmp_path / "steps.json").stat().st_size > 1000
