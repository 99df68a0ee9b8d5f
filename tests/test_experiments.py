"""``cunorm.experiment``: the texts of kernels that may be given, and what they take of a GPU."""

from __future__ import annotations

import re
from typing import Any

import pytest
from experiment_cases import PUT, ROWS, SHIPPED, SUMS, edited

import cunorm
from cunorm import kernels, resources
from cunorm.experiments import examples
from cunorm.experiments.tables import Table
from cunorm.plan import Device, Plan, plan

pytestmark = pytest.mark.usefixtures("nothing_is_left")


# ---- The text.


@pytest.mark.parametrize(
    ("kernel", "error", "message"),
    [("row_block", ValueError, "must be one of .*row_block_forward"), (3, TypeError, "kernel is an int; it must be a")],
)
def test_kernels_that_there_are_not(kernel: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        cunorm.experiment(kernel)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        (b"", TypeError, "source is a bytes; it must be a str, the text of row_block_forward"),
        (" \n", ValueError, "source is empty"),
        ("// nothing but this\n", ValueError, "source is empty"),
        ("struct Arguments {\n};\n", ValueError, r"must have the entry point .* row_block_forward\(.*; it has none"),
        (SHIPPED[SUMS], ValueError, "must have the entry point .*; it has that of column_sums"),
        (
            SHIPPED[ROWS].replace("  double eps;\n", ""),
            ValueError,
            "must have the fields of the shipped .*: - double eps",
        ),
        (
            SHIPPED[ROWS].replace("double eps;", "double eps;\n  long long more[3];"),
            ValueError,
            r"fields of the shipped row_block_forward\.cu: \+ long long more\[3\]",
        ),
        (
            re.sub(r"(  const WEIGHT_TYPE\* weight;\n)(  const BIAS_TYPE\* bias;\n)", r"\2\1", SHIPPED[ROWS]),
            ValueError,
            "they are in another order",
        ),
        (SHIPPED[ROWS].replace("double eps;", "float eps;"), ValueError, "field eps is float; every field must be 8"),
    ],
    ids=range(9),
)
def test_texts_that_cannot_be_the_kernel_s(text: Any, error: type[Exception], message: str) -> None:
    experiment = cunorm.experiment(ROWS)
    with pytest.raises(error, match=message):
        experiment.source = text
    assert experiment.source == SHIPPED[ROWS]


@pytest.mark.parametrize("kernel", sorted(SHIPPED))
def test_a_complete_text_is_complete(kernel: str) -> None:
    assert kernels.complete(kernel, SHIPPED[kernel]) == SHIPPED[kernel]


def test_lines_are_counted_in_the_edited_files() -> None:
    """One line more at the top of every file, and one less in the middle of one."""
    marked = re.sub(r'(#line 1 "kernels/[\w.]+"\n)', r"\1// new\n", SHIPPED[ROWS])
    lost = "template <int FIRST, int LAST, int COUNT>\n"
    text = kernels.complete(ROWS, marked.replace(lost, ""))
    before, after = kernels.lines_of(SHIPPED[ROWS]), kernels.lines_of(text)
    assert {file for file, _ in before} == {file for file, _ in after}
    (place_lost,) = (number for (_, number), line in before.items() if f"{line}\n" == lost)
    for (file, number), line in before.items():
        here = file == "kernels/reduce.cuh" and number >= place_lost
        if not (here and number == place_lost):
            assert after[file, number + (0 if here else 1)] == line


def test_a_whole_new_text_includes_shipped_files() -> None:
    experiment = cunorm.experiment(SUMS)
    own = SHIPPED[SUMS][SHIPPED[SUMS].index("struct Arguments") :]
    experiment.source = f'#include "types.cuh"\n# include "dependent_launch.cuh"  // for nothing\n{own}'
    lines = kernels.lines_of(experiment.source)
    assert lines["kernels/column_sums.cu", 3] == "struct Arguments {"
    assert lines["kernels/types.cuh", 1].startswith("// How numbers are held")
    assert experiment.source.count('#line 1 "kernels/types.cuh"') == 1


def test_a_text_may_begin_at_another_line() -> None:
    """As the cell of a notebook does, whose first line is not the text's."""
    experiment = cunorm.experiment(SUMS)
    own = SHIPPED[SUMS][SHIPPED[SUMS].index("struct Arguments") :]
    experiment.source = f'#line 2 "kernels/column_sums.cu"\n#include "types.cuh"\n{own}'
    assert kernels.lines_of(experiment.source)["kernels/column_sums.cu", 3] == "struct Arguments {"


def test_a_text_may_have_the_line_ends_of_windows() -> None:
    experiment = cunorm.experiment(ROWS)
    experiment.source = SHIPPED[ROWS].replace("\n", "\r\n")
    assert experiment.source == SHIPPED[ROWS] and experiment.changed == ""


def test_what_changed() -> None:
    experiment = edited(
        ROWS, (PUT, PUT.replace("rstd", "2 * rstd")), ("#pragma unroll\n  for (int offset", "  for (int offset")
    )
    assert (
        experiment.changed.splitlines()
        == [
            "kernels/row_block_forward.cu",
            f"-          put(y, part, place, i, {PUT});",
            f"+          put(y, part, place, i, {PUT.replace('rstd', '2 * rstd')});",
            "kernels/reduce.cuh",
            "-#pragma unroll",
        ]
        or experiment.changed.splitlines()[0] == "kernels/reduce.cuh"
    )
    assert repr(experiment) == "<experiment with row_block_forward: 3 lines differ>"
    experiment.source = SHIPPED[ROWS]
    assert experiment.changed == "" and "as shipped" in repr(experiment)


# ---- Tables.


def test_tables() -> None:
    table = Table("a <b>", ("name", "number"), [("x", 1.23456), ("<y>", None)], ["note"], bad=[1])
    assert not table and str(table).splitlines() == ["a <b>", "name  number", "x       1.23", "<y>", "note"]
    shown = table._repr_html_()
    assert "a &lt;b&gt;" in shown and "&lt;y&gt;" in shown and "<pre" in shown
    assert table.frame.shape == (2, 2) and list(table.frame.columns) == ["name", "number"]
    assert Table("fine", ("a",), [("b",)])


# ---- What a text takes.


def test_resources_side_by_side() -> None:
    experiment = edited(
        ROWS,
        (
            "__shared__ Exchange<TOLD> exchange;",
            "__shared__ Exchange<TOLD> exchange;\n  __shared__ volatile int more[999];\n  more[threadIdx.x] = clock();",
        ),
    )
    frame = experiment.resources("sm_80", shape=(64, 4096), dtype="float32").frame
    assert list(frame["text"]) == ["shipped", "edited"] * (len(frame) // 2)
    shipped, text = (frame[frame["text"] == name] for name in ("shipped", "edited"))
    assert (text["static shared"].to_numpy() >= shipped["static shared"].to_numpy() + 3996).all()
    assert (frame["registers"] > 0).all() and (frame["blocks per multiprocessor"] >= 1).all()


def test_resources_of_the_shipped_text() -> None:
    report = cunorm.experiment("split_merge").resources()
    assert set(report.frame["text"]) == {"shipped"} and "on sm_90" in report.headline
    with pytest.raises(ValueError, match="arch is 'hopper'"):
        cunorm.experiment(ROWS).resources("hopper")
    with pytest.raises(ValueError, match="arch is 90; it must be one of sm_75, sm_80"):
        cunorm.experiment(ROWS).resources(90)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"shape is \(4, 8\): no call of it launches row_grid_forward on sm_90"):
        cunorm.experiment("row_grid_forward").resources(shape=(4, 8))


def test_resources_of_an_edited_text_are_not_those_of_the_shipped() -> None:
    (item,) = plan_of(64, 4096).launches
    experiment = edited(ROWS, ("double eps;", "double eps;  // another text"), (PUT, PUT.replace("rstd", "rstd / 3")))
    before = resources.compile_resources(ROWS, dict(item.constants), "sm_90")
    with experiment.active():
        resources.compile_resources(ROWS, dict(item.constants), "sm_90")
    assert resources.compile_resources(ROWS, dict(item.constants), "sm_90") == before
    assert resources.compile_resources(ROWS, dict(item.constants), "sm_90", {ROWS: experiment.source})


def plan_of(*shape: int) -> Plan:
    example = examples.Example("layer_norm", shape)
    return plan(example.described(example.draw(blank=True)).problem, Device())
