"""``%load_ext cunorm``: what the magics put into the next cell, make of a cell, and say of a wrong one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import RichOutput, capture_output

import cunorm
from cunorm import kernels

KERNEL = "row_block_forward"
SHIPPED = (Path(kernels.__file__).parent / f"{KERNEL}.cu").read_text()


@pytest.fixture
def shell() -> Iterator[InteractiveShell]:
    shell = InteractiveShell.instance()
    shell.run_line_magic("load_ext", "cunorm")
    yield shell
    InteractiveShell.clear_instance()


def run(shell: InteractiveShell, cell: str, *, fails: bool = False) -> tuple[str, str, list[RichOutput]]:
    """What a cell prints, on both streams, and what it displays."""
    with capture_output() as captured:
        result = shell.run_cell(cell)
    assert result.success is not fails, captured.stdout + captured.stderr
    return captured.stdout, captured.stderr, captured.outputs


class Recorded:
    """An experiment's methods, that answer at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, right: bool = True) -> None:
        self.calls: list[tuple[str, Any]] = []
        experiment = type(cunorm.experiment(KERNEL))
        report = "right" if right else ""
        monkeypatch.setattr(experiment, "check", lambda _, **options: self.calls.append(("check", options)) or report)
        monkeypatch.setattr(
            experiment, "bench", lambda _, shapes, **options: self.calls.append(("bench", (shapes, options)))
        )


# ---- %cunorm


def test_lists_the_kernels(shell: InteractiveShell) -> None:
    assert run(shell, "%cunorm")[0].split() == kernels.kernel_names()


def test_puts_a_kernel_into_the_next_cell(shell: InteractiveShell) -> None:
    run(shell, f"%cunorm {KERNEL}")
    magic, text = shell.rl_next_input.split("\n", 1)
    assert magic == f"%%cunorm {KERNEL} --check" and text == SHIPPED


def test_puts_the_headers_there_too(shell: InteractiveShell) -> None:
    run(shell, f"%cunorm {KERNEL} --whole")
    assert shell.rl_next_input.split("\n", 1)[1] == cunorm.experiment(KERNEL).source


def test_shows_a_kernel(shell: InteractiveShell) -> None:
    shell.rl_next_input = None
    (shown,) = run(shell, f"%cunorm {KERNEL} --show")[2]
    assert shown.data["text/plain"] == SHIPPED
    assert re.search(r'<span style="[^"]*color: #[^"]*">extern</span>', shown.data["text/html"])
    assert shell.rl_next_input is None


# ---- %%cunorm


def test_makes_an_experiment(shell: InteractiveShell) -> None:
    edited = SHIPPED.replace("// Reduce: the mean", "// Reduce: first the mean")
    _, _, (shown,) = run(shell, f"%%cunorm {KERNEL}\n{edited}")
    experiment = shell.user_ns["experiment"]
    assert experiment.kernel == KERNEL and experiment.changed.count("\n") == 2
    assert shown.data["text/plain"] == repr(experiment)


def test_the_text_as_it_came_is_the_shipped_one(shell: InteractiveShell) -> None:
    for option in ("", " --whole"):
        run(shell, f"%cunorm {KERNEL}{option}")
        run(shell, shell.rl_next_input.replace("--check", "--name mine"))
        assert not shell.user_ns["mine"].changed


def test_checks_and_times(shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = Recorded(monkeypatch)
    run(shell, f"%%cunorm {KERNEL} --check\n{SHIPPED}")
    run(shell, f"%%cunorm {KERNEL} --check 4x64,3x1000 --dtype float16 --bench 4096x4096\n{SHIPPED}")
    assert recorded.calls == [
        ("check", {"shapes": None, "dtypes": None}),
        ("check", {"shapes": [(4, 64), (3, 1000)], "dtypes": ["float16"]}),
        ("bench", ([(4096, 4096)], {"dtype": "float16"})),
    ]


def test_what_is_wrong_is_not_timed(shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = Recorded(monkeypatch, right=False)
    out, _, _ = run(shell, f"%%cunorm {KERNEL} --check --bench 8x64\n{SHIPPED}")
    assert [name for name, _ in recorded.calls] == ["check"] and "not timed" in out


@pytest.mark.parametrize("columns, right", [("(part.columns)", True), ("(part.columns + 1)", False)])
def test_a_right_and_a_wrong_text(shell: InteractiveShell, columns: str, right: bool) -> None:
    edited = SHIPPED.replace("<Compute>(part.columns)", f"<Compute>({columns})")
    assert edited != SHIPPED
    _, _, (report,) = run(shell, f"%%cunorm {KERNEL} --check 3x40 --dtype float32\n{edited}")
    assert ("wrong" not in report.data["text/plain"]) == right


# ---- What is wrong is said plainly.


@pytest.mark.parametrize(
    "cell, message",
    [
        ("%cunorm row_clock", "must be one of channel_grid_backward"),
        ("%%cunorm row_clock\nint a;", "must be one of channel_grid_backward"),
        (f"%%cunorm {KERNEL}\n// nothing", "entry point"),
        (f"%%cunorm {KERNEL}\n{SHIPPED.replace('long long rows;', 'long long lines;')}", "long long rows"),
        (f"%%cunorm {KERNEL} --bench 4096*4096\n{SHIPPED}", "'4096*4096' must be shapes"),
        (f"%%cunorm {KERNEL} --dtype int8\n{SHIPPED}", "--dtype"),
        (f"%%cunorm\n{SHIPPED}", "KERNEL"),
    ],
)
def test_refusals(shell: InteractiveShell, cell: str, message: str) -> None:
    out, err, _ = run(shell, cell, fails=True)
    assert message in out + err
    assert "Traceback" not in out + err and "notebook.py" not in out + err


def test_a_compiler_names_the_line_of_the_cell(shell: InteractiveShell) -> None:
    cell = f"%%cunorm {KERNEL} --check 3x40 --dtype float32\n{SHIPPED}"
    cell = cell.replace("Compute sum[1] = {0};", "Compute sum[1] = {zero};")
    (number,) = (i for i, line in enumerate(cell.splitlines(), start=1) if "{zero}" in line)
    out, err, _ = run(shell, cell, fails=True)
    assert f"kernels/{KERNEL}.cu:{number}: error:" in out + err
    assert "Compute sum[1] = {zero};\n" in out + err
    assert "Traceback" not in out + err and "notebook.py" not in out + err


# ---- Colours.


def test_a_notebook_gets_the_script_that_colours_cells(
    shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shell, "kernel", object(), raising=False)
    (shown,) = run(shell, "%reload_ext cunorm")[2]
    (script,) = shown.data.values()
    assert list(shown.data) == ["application/javascript"] and "%%cunorm" in script


def test_a_terminal_gets_none(shell: InteractiveShell) -> None:
    assert not run(shell, "%reload_ext cunorm")[2]
