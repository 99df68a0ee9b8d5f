"""What options of the commands must be, said in their own names before anything is done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cunorm.cli import UsageError
from cunorm.explanation import OPS, TAKEN_BY, explain

__all__ = ["check_op_options", "check_target"]


def check_op_options(op: str, **given: Any) -> None:
    """UsageError for an option of another op, and for a group norm without groups. Names are those of `explain`."""
    defaults = explain.__kwdefaults__ or {}
    for name, value in given.items():
        takes = TAKEN_BY.get(name, OPS)
        if op not in takes and value != defaults[name]:
            option = "--evaluation" if name == "training" else f"--{name.replace('_', '-')}"
            raise UsageError(f"{option} is for {', '.join(takes)}, not for {op}")
    if op == "group_norm" and given["num_groups"] is None:
        raise UsageError("--op group_norm needs --num-groups")


def check_target(option: str, path: Path | None) -> None:
    """UsageError for a path that no file can be written to, or whose file would replace what is none."""
    if path is None:
        return
    try:
        if not path.absolute().parent.is_dir():
            raise UsageError(f"{option} {path}: the folder {path.absolute().parent} does not exist")
        if path.is_dir():
            raise UsageError(f"{option} {path}: it is a folder")
        if path.exists() and not path.is_file():  # a device, say
            raise UsageError(f"{option} {path}: it is no regular file")
    except OSError as error:  # its name is too long, say
        raise UsageError(f"{option} {path}: {error.strerror}") from error
