"""Notebooks run from top to bottom at a small size, and stay thin."""

from pathlib import Path

import nbformat
import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


def small(path: Path, out: Path) -> nbformat.NotebookNode:
    """The notebook with its cell of parameters made small."""
    notebook = nbformat.read(path, as_version=4)
    cell = next(c for c in notebook.cells if "parameters" in c.metadata.get("tags", []))
    cell.source += f"\nDRAWS = 3\nTOKENS, WINDOW = 192, 64\nOUT = {str(out)!r}\n"
    return notebook


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_thin_and_without_pasted_output(path):
    notebook = nbformat.read(path, as_version=4)
    assert len(notebook.cells) < 15
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert not cell.outputs and cell.execution_count is None
            assert len(cell.source.splitlines()) <= 12


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_runs_from_top_to_bottom(path, tmp_path):
    nbclient = pytest.importorskip("nbclient")
    notebook = small(path, tmp_path / "out")
    nbclient.NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}
    ).execute()
    shown = [out for cell in notebook.cells if cell.cell_type == "code" for out in cell.outputs]
    tables = [o.data.get("text/markdown", "") for o in shown if "data" in o]
    assert any("top-error" in t and "bottom-error" in t for t in tables)
    assert any("image/png" in o.data for o in shown if "data" in o)
    assert (tmp_path / "out" / "figure.png").stat().st_size > 10_000
