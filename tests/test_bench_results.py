"""Results of ``bench/``: their files, plots and tables."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import report
from bench_cases import ROOT, synthetic

from cunorm.bench.published import nv_norms_milliseconds
from cunorm.bench.results import by_row, load, merge
from cunorm.bench.suites import NV_INSTANCE_NORM, SUITES, suite
from cunorm.channel_norm import CHANNEL_NORMS


def test_results_come_back_from_their_file(tmp_path: Path) -> None:
    results = synthetic()
    path = tmp_path / "results.json"
    results.save(path)
    assert load(path) == results
    assert json.loads(path.read_text())["machine"] == {"device": "A GPU"}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rows": [{}]}', '{"rows": []}', '{"date": "", "rows": 3}'])
def test_a_file_that_has_no_results_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"results\.json has no results"):
        load(path)


@pytest.mark.parametrize(
    "name, value",
    [
        ("machine", None),
        ("machine", {"device": ["A GPU"]}),
        ("versions", [1]),
        ("absent", "liger"),
        ("missing", [[]]),
        ("seconds", "9"),
        ("rows", {}),
        ("shape", "x"),
        ("shape", ["x", 8]),
        ("shape", []),
        ("copy_seconds", "x"),
        ("providers", {"cunorm": {"seconds": "x"}}),
        ("providers", {"cunorm": []}),
    ],
)
def test_results_of_other_types_are_refused(name: str, value: object, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    synthetic().save(path)
    contents = json.loads(path.read_text())
    (contents if name in contents else contents["rows"][0])[name] = value
    path.write_text(json.dumps(contents))
    with pytest.raises(ValueError, match=r"results\.json has no results of a benchmark: "):
        load(path)


@pytest.mark.parametrize("name", ["nv-norms", "rows", "host"])
def test_results_of_before_there_were_layouts_are_read(name: str) -> None:
    measurements = load(ROOT / "bench" / "results" / "h200" / f"{name}.json").measurements
    assert {entry.row for entry in measurements} <= set(suite(name))


def test_parts_merge() -> None:
    whole = synthetic()
    first, second = (
        dataclasses.replace(whole, measurements=part) for part in (whole.measurements[:9], whole.measurements[5:])
    )
    first.missing = [whole.measurements[-1].row.label, "a row of no part"]
    merged = merge([first, second])
    assert sorted(map(repr, merged.measurements)) == sorted(map(repr, whole.measurements))
    assert merged.missing == ["a row of no part"]


def test_the_last_measurement_stands_and_both_days_are_named() -> None:
    first = dataclasses.replace(synthetic(), date="2026-01-02T03:04:05+00:00")
    again = dataclasses.replace(first.measurements[3], seconds=123.0)
    second = dataclasses.replace(first, date="2026-02-03T04:05:06+00:00", measurements=[again])
    merged = merge([merge([first, second]), second])
    assert merged.measurements == [*first.measurements[:3], again, *first.measurements[4:]]
    assert repr(merged).endswith("2026-01-02 to 2026-02-03>") and repr(merge([first, first])).endswith(", 2026-01-02>")


def test_devices_are_not_mixed() -> None:
    first = synthetic()
    second = dataclasses.replace(first, machine={"device": "Another GPU"})
    with pytest.raises(ValueError, match="the results are of different devices: A GPU, Another GPU"):
        merge([first, second])


def test_compiled_calls_have_lines_of_their_own() -> None:
    results = load(ROOT / "bench" / "results" / "h200" / "host.json")
    problems = [cells[0] for cells in results.table_rows()]
    assert "layer_norm 8x1024 float32 (host torch, calls compiled)" in problems
    assert len(problems) == sum(entry.provider.startswith("cunorm") for entry in results.measurements)


def test_a_frame() -> None:
    frame = synthetic().frame
    assert len(frame) == len(synthetic().measurements)
    expected = {"suite", "op", "shape", "rows", "columns", "dtype", "direction", "provider", "seconds", "GB/s", "r"}
    assert expected <= set(frame.columns)
    for line, entry in zip(frame.to_dict("records"), synthetic().measurements):
        assert (line["suite"], line["op"], line["shape"]) == (entry.suite, entry.op, entry.shape)
        assert line["rows"] * line["columns"] == math.prod(entry.shape)
        if entry.seconds and entry.copy_seconds:
            assert line["r"] == entry.seconds / entry.copy_seconds
            assert line["GB/s"] == pytest.approx(entry.moved_bytes / entry.seconds / 1e9)
            assert line["copy GB/s"] == pytest.approx(line["r"] * line["GB/s"])
    best = frame[frame.suite == "quack"].groupby(["op", "provider"]).r.min()
    assert best["layer_norm", "cunorm"] == pytest.approx(1.1)


def test_a_plot_of_results() -> None:
    """A figure with units on every axis, which a notebook shows by itself, and which leaves nothing open."""
    code = (
        "import sys, matplotlib; backend = matplotlib.rcParams._get_backend_or_none(); "
        "from cunorm import bench; figure = bench.load('h200/quack').plot('layer_norm !residual'); "
        "assert matplotlib.rcParams._get_backend_or_none() == backend; "
        "assert figure._repr_png_().startswith(b'\\x89PNG'); assert 'matplotlib.pyplot' not in sys.modules; "
        "assert len(figure.subfigs) == 2 and len(figure.axes) == 6; "
        "print(*{axis.get_ylabel() for axis in figure.axes}, *{axis.get_xlabel() for axis in figure.axes[1::2]})"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "GB/s" in done.stdout and "time / time of a copy" in done.stdout and "columns" in done.stdout
    with pytest.raises(ValueError, match="no rows that match 'conv'"):
        synthetic().plot("conv")


def test_results_show_themselves() -> None:
    results = dataclasses.replace(synthetic(), measurements=synthetic().measurements[:8])
    assert repr(results) == "<8 measurements of rows on A GPU, 2026-01-02>"
    assert str(results).splitlines()[1].split("  ")[0] == "problem" and "absent: liger (not installed)" in str(results)
    text = results._repr_html_()
    assert text.count("<tr>") == 1 + len(by_row(results.measurements)) and "layer_norm 524288x256 bfloat16" in text


def test_results_are_loaded_by_path_or_name() -> None:
    committed = load("h200/quack")
    assert committed == load(str(ROOT / "bench" / "results" / "h200" / "quack.json"))
    assert committed.machine["device"] == "NVIDIA H200"
    with pytest.raises(FileNotFoundError):
        load("h200/no-such-suite")


def test_plots(tmp_path: Path) -> None:
    from cunorm.bench.plots import draw

    chosen = [entry for entry in synthetic().measurements if entry.suite in ("nv-norms", "odd")]
    results = dataclasses.replace(synthetic(), measurements=chosen)
    names = {path.name for path in draw(results, tmp_path)}
    ops = ("nv-norms-layer-norm-float16", "nv-norms-layer-norm-float32", "odd-layer-norm-bfloat16")
    assert {f"{op}.{suffix}" for op in ops for suffix in ("png", "svg")} <= names
    assert (tmp_path / "odd-layer-norm-bfloat16.png").read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / "odd-layer-norm-bfloat16.svg").read_text()
    for words in ("cunorm", "GB/s", "copy of the same bytes", "time / time of a copy", "A GPU"):
        assert words in text


def test_plots_of_norms_of_channels(tmp_path: Path) -> None:
    from cunorm.bench.plots import _figures, draw

    suites = [op.replace("_", "-") for op in CHANNEL_NORMS]
    chosen = [entry for entry in synthetic().measurements if entry.suite in suites and entry.dtype == "float16"]
    figures = {name: (title, measurements) for name, title, measurements in _figures(chosen)}
    layouts = ("channels-first", "channels-last")
    assert set(figures) == {
        f"{figure}-float16-{layout}{rest}"
        for layout in layouts
        for figure, silu in (("instance-norm", [""]), ("group-norm", ["", "-silu"]), ("batch-norm", [""]))
        for activation in silu
        for rest in (activation, f"{activation}-tiny-shapes")
    }
    name = "group-norm-float16-channels-last-silu"
    draw(dataclasses.replace(synthetic(), measurements=figures[name][1]), tmp_path)
    text = (tmp_path / f"{name}.svg").read_text()
    for words in ("channels last, with silu", "samples × channels × positions", "8 × 320 × 64²"):
        assert words in text


def test_nv_norms_times_stand_beside_ours() -> None:
    published = [row for name in ("nv-norms", "instance-norm") for row in suite(name) if nv_norms_milliseconds(row)]
    assert {(row.dtype, row.direction) for row in published} == {("float16", "both")}
    assert len(published) == 9 + 2 * len(NV_INSTANCE_NORM)
    end = "<!-- bench end -->"
    text = f"<!-- bench: nv_norms instance-norm -->\n{end}\n<!-- bench: nv_norms nv-norms -->\n{end}\n"
    filled = report.fill(text, synthetic())
    assert "| samples × channels × positions | cunorm ms | nv_norms ms, H100 | nv_norms ms, A100 |" in filled
    # 268 MB of float16 five times over at 4 TB/s, and a tenth.
    assert "| 2 × 32 × 128³, NC... | 0.37 | 3.85 | 5.20 |" in filled
    assert "| 2 × 32 × 128³, N...C | 0.37 | 6.05 | 7.51 |" in filled
    assert "| 10,000,000 × 10 | 0.28 | 10.61 | 13.82 |" in filled
    assert filled.count("\n| ") == len(published) + 4


def test_tables_are_filled_in() -> None:
    end = "<!-- bench end -->"
    text = f"a\n<!-- bench: table triton-tutorial -->\nold\n{end}\nb\n<!-- bench: odd odd -->\n{end}\n"
    filled = report.fill(text, synthetic())
    assert "old" not in filled
    assert "| 4,096 × 1,024 | 1.10 | 1.50 quack | 1.10 | 1.50 quack |" in filled
    assert "| 4,097 beside 4,096 | bfloat16 | 1.45 | 1.45 |" in filled
    text = f"<!-- bench: table group-norm 8x320 -->\n{end}\n"
    assert "| 8 × 320 × 64², N...C, silu | 1.10 | 1.50 quack |" in report.fill(text, synthetic())
    assert report.fill(filled, synthetic()) == filled


@pytest.mark.parametrize("kind", [kind for kind in report.KINDS if kind != "models"])  # there are none among these
def test_every_kind_of_table_is_a_table(kind: str) -> None:
    name = kind if kind in SUITES else "nv-norms"
    chosen = [entry for entry in synthetic().measurements if entry.suite == name]
    lines = report.KINDS[kind](chosen).splitlines()
    assert len(lines) > 3
    assert len({line.count("|") for line in lines}) == 1


@pytest.mark.parametrize("marker", ["chart rows", "table nothing", "table rows no such words"])
def test_markers_that_ask_for_what_is_not_there(marker: str) -> None:
    with pytest.raises(ValueError, match="bench:"):
        report.fill(f"<!-- bench: {marker} -->\n<!-- bench end -->", synthetic())


def test_where_it_is_not_first() -> None:
    texts = report.not_first(synthetic().measurements)
    assert texts
    assert all("4097" in text and "quack takes 0.94" in text for text in texts)
