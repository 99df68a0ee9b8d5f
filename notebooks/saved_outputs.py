"""Cells that need a GPU: they run where there is one, and elsewhere show what an H200 gave.

Such a cell is one ``if``::

    if gpu_or_saved("quickstart-speed"):
        display(frame_of_times())

The name is that of the file in ``saved/`` that ``execute.py --saved`` wrote on a machine with a GPU.
"""

from __future__ import annotations

import json
from pathlib import Path

from IPython.display import display

from cunorm.gpus import cuda_devices

__all__ = ["gpu_or_saved"]

_FOLDER = Path(__file__).parent / "saved"


def gpu_or_saved(name: str) -> bool:
    """Whether there is a GPU. Where there is none, show the outputs that are saved under this name."""
    if cuda_devices()[0]:
        return True
    file = _FOLDER / f"{name}.json"
    if not file.exists():
        print(f"This cell needs an NVIDIA GPU, and no output of it is saved as {name}.")
        return False
    saved = json.loads(file.read_text(encoding="utf-8"))
    print(f"This cell needs an NVIDIA GPU. Saved on an {saved['gpu']}:")
    for output in saved["outputs"]:
        if output["output_type"] == "stream":
            print(output["text"], end="")
        else:
            display(output["data"], raw=True, metadata=output["metadata"])
    return False
