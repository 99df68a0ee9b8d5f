"""Runs the notebooks from top to bottom, each in a fresh kernel, and saves their outputs.

    python notebooks/execute.py [NAME ...]                  # writes the outputs into the notebooks
    python notebooks/execute.py [NAME ...] --saved FOLDER   # on a machine with a GPU: see saved_outputs.py

The notebooks in the repository hold what a machine without a GPU shows, so what needs one comes from ``saved/``: run
the second command on an H200 first, with ``notebooks/saved`` for the folder, and then the first one without a GPU.
It needs nbclient and ipykernel; the extra ``notebook`` brings them.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import re
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

FOLDER = Path(__file__).parent
_NEEDS_GPU = re.compile(r'^if gpu_or_saved\("([\w-]+)"\):', re.MULTILINE)
_SVG = re.compile(r"<svg .*?</svg>", re.DOTALL)
# All that is kept of a notebook's metadata: the rest says which machine, version and editor wrote it.
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def names() -> list[str]:
    """The notebooks, by name."""
    return sorted(file.stem for file in FOLDER.glob("*.ipynb"))


def read(name: str) -> NotebookNode:
    """A notebook as it is saved."""
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def saved_name(cell: NotebookNode) -> str | None:
    """Under which name the outputs of a cell that needs a GPU are saved; None for other cells."""
    found = _NEEDS_GPU.search(cell.source) if cell.cell_type == "code" else None
    return found[1] if found else None


def executed(name: str) -> NotebookNode:
    """A notebook as it comes out of a run with this checkout's cunorm, without the machine's settings and fonts.

    Raises nbclient's CellExecutionError where a cell raises.
    """
    notebook = read(name)
    path = os.pathsep.join(filter(None, (str(FOLDER.parent), os.environ.get("PYTHONPATH"))))
    client = NotebookClient(notebook, timeout=600, kernel_name="python3", record_timing=False)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as settings:
        # What somebody set for plots, and a list of fonts that were deleted since, would show in the outputs.
        own = {"MPLCONFIGDIR": settings, "MPL_IGNORE_SYSTEM_FONTS": "1", "IPYTHONDIR": settings}
        client.execute(env={**os.environ, **own, "PYTHONPATH": path}, cwd=str(FOLDER))
    notebook.metadata = NotebookNode(METADATA)
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if "text/html" in output.get("data", {}):
                output.data["text/html"] = _SVG.sub(_as_image, output.data["text/html"])
    return notebook


def _as_image(svg: re.Match[str]) -> str:
    """A drawing in HTML, on white, as an image: JupyterLab shows those in a notebook that was not run there, too."""
    paper = svg[0].replace(">", ' color="black"><rect width="100%" height="100%" fill="white"/>', 1)
    return f'<img alt="" src="data:image/svg+xml;base64,{base64.b64encode(paper.encode()).decode()}">'


def main() -> None:
    parser = argparse.ArgumentParser(description="Run notebooks and save their outputs.", allow_abbrev=False)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all, which are {', '.join(names())}")
    parser.add_argument(
        "--saved",
        type=Path,
        metavar="FOLDER",
        help="write the outputs of the cells that need a GPU there, and leave the notebooks",
    )
    options = parser.parse_args()
    for name in options.names:
        if name not in names():
            parser.error(f"there is no notebook {name!r}; the notebooks are {', '.join(names())}")
    gpu = _gpu() if options.saved else ""
    for name in options.names or names():
        begin = time.monotonic()
        notebook = executed(name)
        if options.saved:
            options.saved.mkdir(parents=True, exist_ok=True)
            for cell in notebook.cells:
                if target := saved_name(cell):
                    text = json.dumps({"gpu": gpu, "outputs": cell.outputs}, indent=1, ensure_ascii=False)
                    (options.saved / f"{target}.json").write_text(text + "\n", encoding="utf-8")
        else:
            nbformat.write(notebook, FOLDER / f"{name}.ipynb")
        print(f"{name}: {time.monotonic() - begin:.0f} s")


def _gpu() -> str:
    sys.path.insert(0, str(FOLDER.parent))
    from cunorm.gpus import cuda_devices

    found, reason = cuda_devices()
    if not found:
        sys.exit(f"--saved needs an NVIDIA GPU: {reason}")
    return found[0]


if __name__ == "__main__":
    main()
