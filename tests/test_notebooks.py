"""The notebooks: they run from top to bottom, and what is saved of them is whole and says nothing of a machine."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import execute
import nbformat
import pytest

FOLDER = Path(execute.__file__).parent
NOTEBOOKS = execute.names()
SAVED = sorted(file.stem for file in (FOLDER / "saved").glob("*.json"))
# A folder or an account of somebody's, an address in memory, a colour of a terminal.
OF_A_MACHINE = re.compile(r"/(?:home|root|tmp|Users|work|opt|usr|mnt)/|\w@\w|\b0x[0-9a-f]{8,}|\x1b\[")


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def texts(outputs: list[Any]) -> list[str]:
    """All text of outputs; images are none, and hold any letters."""
    found = []
    for output in outputs:
        data = {"text/plain": output["text"]} if output["output_type"] == "stream" else output.get("data", {})
        found += [str(text) for kind, text in data.items() if not kind.startswith("image/") or "svg" in kind]
    return found


def test_there_are_notebooks() -> None:
    assert {"quickstart", "normalizations"} <= set(NOTEBOOKS)


# ---- As they are saved.


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_format(name: str) -> None:
    file = FOLDER / f"{name}.ipynb"
    notebook = json.loads(file.read_text(encoding="utf-8"))
    nbformat.validate(notebook)
    assert notebook["metadata"] == execute.METADATA
    assert notebook["cells"][0]["cell_type"] == "markdown" and "# " in notebook["cells"][0]["source"][0]
    assert all(cell["metadata"] == {} for cell in notebook["cells"])
    assert file.stat().st_size < 600_000


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_saved_after_a_run_from_top_to_bottom(name: str) -> None:
    cells = code_cells(execute.read(name))
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        assert all(output.output_type != "error" and output.get("name") != "stderr" for output in cell.outputs)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_says_nothing_of_a_machine(name: str) -> None:
    for cell in execute.read(name).cells:
        for text in [cell.source, *texts(cell.get("outputs", []))]:
            assert not OF_A_MACHINE.findall(text)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_cells_for_a_gpu_show_what_is_saved(name: str) -> None:
    for cell in code_cells(execute.read(name)):
        if target := execute.saved_name(cell):
            saved = json.loads((FOLDER / "saved" / f"{target}.json").read_text(encoding="utf-8"))
            assert saved["outputs"], f"nothing is saved as {target}"
            assert all(
                output["output_type"] != "error" and output.get("name") != "stderr" for output in saved["outputs"]
            )
            shown = "".join(texts(cell.outputs))
            assert f"Saved on an {saved['gpu']}:" in shown
            assert all(text in shown for text in texts(saved["outputs"]))


def test_all_that_is_saved_is_shown_once() -> None:
    used = [execute.saved_name(cell) for name in NOTEBOOKS for cell in execute.read(name).cells]
    assert sorted(filter(None, used)) == SAVED


# ---- When they run.


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_runs_from_top_to_bottom(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell that raises fails here; one that shows something has shown something before, and no other has.

    Nor does it matter what the machine's own settings are.
    """
    (tmp_path / "matplotlibrc").write_text("font.family: a font that nobody has\n")
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path))
    before, after = code_cells(execute.read(name)), code_cells(execute.executed(name))
    assert [bool(cell.outputs) for cell in after] == [bool(cell.outputs) for cell in before]
    for cell in after:
        assert not [output.text for output in cell.outputs if output.get("name") == "stderr"]


def test_a_cell_for_a_gpu_shows_its_saved_outputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import saved_outputs

    shown: list[Any] = []
    monkeypatch.setattr(saved_outputs, "_FOLDER", tmp_path)
    monkeypatch.setattr(saved_outputs, "display", lambda data, **options: shown.append((data, options)))
    monkeypatch.setattr(saved_outputs, "cuda_devices", lambda: ([], "none found"))
    outputs = [
        {"output_type": "stream", "name": "stdout", "text": "4.1 TB/s\n"},
        {"output_type": "display_data", "data": {"text/plain": "a plot", "image/png": "aGk="}, "metadata": {}},
    ]
    (tmp_path / "speed.json").write_text(json.dumps({"gpu": "NVIDIA H200", "outputs": outputs}))
    assert not saved_outputs.gpu_or_saved("speed")
    assert capsys.readouterr().out.endswith("Saved on an NVIDIA H200:\n4.1 TB/s\n")
    assert shown == [(outputs[1]["data"], {"raw": True, "metadata": {}})]
    assert not saved_outputs.gpu_or_saved("accuracy")
    assert "no output of it is saved as accuracy" in capsys.readouterr().out
    monkeypatch.setattr(saved_outputs, "cuda_devices", lambda: (["NVIDIA H200"], ""))
    assert saved_outputs.gpu_or_saved("speed") and capsys.readouterr().out == "" and len(shown) == 1
