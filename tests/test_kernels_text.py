"""The text of the kernels: complete, readable to the package, and what the plans ask for."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
from plan_cases import plain_backward, plain_channel_norm, plain_forward, plain_gelu, plain_gelu_backward

from cunorm import kernels
from cunorm.plan import Device, plan

FOLDER = Path(kernels.__file__).parent
KERNELS = kernels.kernel_names()
HEADERS = sorted(path.name for path in FOLDER.glob("*.cuh"))
FILES = [f"{name}.cu" for name in KERNELS] + HEADERS


def text_of(file: str) -> str:
    return (FOLDER / file).read_text(encoding="utf-8")


def code_of(file: str) -> str:
    """The text without comments and strings, so that what is looked for is not found in prose."""
    return re.sub(r'//[^\n]*|/\*.*?\*/|"[^"\n]*"', "", text_of(file), flags=re.DOTALL)


def test_there_are_kernels() -> None:
    assert len(KERNELS) >= 8 and len(HEADERS) >= 3


# ---- Each file.


@pytest.mark.parametrize("file", FILES)
def test_opens_with_a_comment(file: str) -> None:
    """What it is for, in a sentence or more, before any code."""
    opening = []
    for line in text_of(file).splitlines():
        if not line.startswith("//"):
            break
        opening.append(line[2:].strip())
    assert len(opening) >= 2
    assert len(" ".join(opening)) > 100
    assert opening[0][0].isupper() and " ".join(opening).rstrip()[-1] in ".:)"


@pytest.mark.parametrize("file", FILES)
def test_plain_text(file: str) -> None:
    text = text_of(file)
    assert text.isascii() and text.endswith("\n") and "\t" not in text and "\r" not in text
    assert not re.findall(r"[ ]+$", text, re.MULTILINE)
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize("kernel", KERNELS)
def test_one_entry_point_of_the_same_name(kernel: str) -> None:
    code = code_of(f"{kernel}.cu")
    declared = re.findall(r"__global__\s+void\s+(?:CLUSTER_DIMS\s+)?__launch_bounds__\(.*?\)\s+(\w+)\(([^)]*)\)", code)
    assert declared == [(kernel, "const Arguments arguments")]
    assert code.count("__global__") == 1
    assert text_of(f"{kernel}.cu").count('extern "C"') == 1


@pytest.mark.parametrize("kernel", KERNELS)
def test_launch_bounds_name_how_many_blocks(kernel: str) -> None:
    """With no number of blocks there, ptxas spills registers to reach an occupancy of its own choosing."""
    bounds = r"__launch_bounds__\([^;{]*?, (?:1|MIN_BLOCKS|BLOCKS_PER_MULTIPROCESSOR)\)\s+"
    assert re.search(bounds + kernel + r"\(", code_of(f"{kernel}.cu"))


# Parts of a kernel that is long.
OF_ONE_KERNEL = dict.fromkeys(["row_channel_sums.cuh", "row_share.cuh", "row_kept.cuh"], "row_block_backward")


@pytest.mark.parametrize("header", HEADERS)
def test_headers_have_no_entry_point_and_serve_two_kernels(header: str) -> None:
    assert "__global__" not in code_of(header)
    users = [kernel for kernel in KERNELS if f'#include "{header}"' in text_of(f"{kernel}.cu")]
    assert users == [OF_ONE_KERNEL[header]] if header in OF_ONE_KERNEL else len(users) >= 2


@pytest.mark.parametrize("file", FILES)
def test_no_floating_point_atomics(file: str) -> None:
    """Their order, and with it the last bits of a sum, would differ from run to run. A counter's is of an integer."""
    found = re.findall(r"\b(?:atomic\w*|red\.\w+|atom\.\w+|__iAtomic\w*)", code_of(file)) + re.findall(
        r"\b(?:red|atom|multimem|cp\.reduce)\.[\w.:]*(?:f16|bf16|f32|f64)[\w.]*", text_of(file)
    )
    assert found == (["atomicAdd"] if file == "row_block_forward.cu" else [])
    assert not found or "unsigned asked;" in text_of(file)


PTX = {file: re.findall(r'asm(?: volatile)?\(\s*((?:"[^"]*"\s*)+)', text_of(file)) for file in FILES}
# What the condition around each instruction asks for, where sm_75 has it not. A cluster has more than one block a row,
# and no plan gives an older GPU one.
PTX_NEEDS = {
    "cp.async": "__CUDA_ARCH__",
    "griddepcontrol": "__CUDA_ARCH__ >= 900",
    "mbarrier": "BLOCKS_PER_ROW|__CUDA_ARCH__ >= [89]00",
    "fence.mbarrier_init": "BLOCKS_PER_ROW|__CUDA_ARCH__ >= 900",
    "cp.async.bulk": "__CUDA_ARCH__ >= 900",
    "fence.proxy": "__CUDA_ARCH__ >= 900",
} | dict.fromkeys(("barrier.cluster", "mapa", "st.async"), "BLOCKS_PER_ROW")


@pytest.mark.parametrize("file", [file for file in FILES if any(text.strip('" \n') for text in PTX[file])])
def test_the_emulator_and_older_gpus_are_spared_instructions_of_newer_ones(file: str) -> None:
    """Each stands behind a condition that leaves out the emulator, and whoever has a GPU without it."""
    conditions: list[str] = []
    for line in text_of(file).splitlines():
        words = line.split()
        if words and words[0] in ("#if", "#ifdef", "#ifndef"):
            conditions.append(" ".join(words))
        elif words and words[0] in ("#elif", "#else"):
            conditions[-1] += " else " + " ".join(words)
        elif words and words[0] == "#endif":
            conditions.pop()
        elif found := [name for name in PTX_NEEDS if re.search(rf'"[^"]*\b{re.escape(name)}\.', line)]:
            around = " ".join(conditions)
            assert "CUNORM_EMULATOR" in around, line
            for name in found:
                assert re.search(PTX_NEEDS[name], around), line
    assert not conditions


@pytest.mark.parametrize("file", FILES)
def test_includes_are_expanded_or_the_compiler_s(file: str) -> None:
    for included in re.findall(r"^\s*#\s*include\s*(.*)$", text_of(file), re.MULTILINE):
        assert included in ("<cuda_fp16.h>", "<cuda_bf16.h>") or included.strip('"') in HEADERS, included


# ---- struct Arguments.


@pytest.mark.parametrize("kernel", KERNELS)
def test_arguments_are_parsed_whole(kernel: str) -> None:
    """As many fields as the struct has semicolons, none twice, sizes in 64 bits."""
    match = re.search(r"struct Arguments \{(.*?)\n\};", code_of(f"{kernel}.cu"), re.DOTALL)
    assert match is not None
    fields = kernels.argument_fields(kernel)
    assert len(fields) == match[1].count(";") >= 2
    assert len({name for name, _, _ in fields}) == len(fields)
    assert {kind for _, kind, _ in fields} <= {"pointer", "long long", "double"}
    kinds = {name: kind for name, kind, _ in fields}
    sizes = ("channels", "points") if kernel.startswith(("channel_", "split_")) else ("rows", "columns")
    sizes = ("count",) if kernel == "zeros" else sizes
    assert {kinds[size] for size in sizes} == {"long long"}
    included = re.findall(r'#include "([\w.]+)"', text_of(f"{kernel}.cu"))
    code = "".join(map(code_of, [f"{kernel}.cu", *included]))
    for name, _, _ in fields:
        assert re.search(rf"\barguments\.{name}\b", code), f"{name} is not used"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("struct Arguments {\n  int rows;\n};\n", "field rows is int; every field must be 8 bytes"),
        (
            "struct Arguments {\n  long long rows;\n  float eps;\n};\n",
            "field eps is float; every field must be 8 bytes",
        ),
        ("struct Other {\n  long long rows;\n};\n", "has no struct Arguments"),
        ("struct Arguments {\n#ifdef A\n  double eps;\n#endif\n};\n", "has #ifdef A, and may have #if NAME > 0 alone"),
        ("struct Arguments {\n#if A > 0\n  double eps;\n#endif\n};\n", "field eps may not depend on A"),
    ],
)
def test_arguments_that_cannot_be_packed(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "example.cu").write_text(text, encoding="utf-8")
    monkeypatch.setattr(kernels, "_FOLDER", tmp_path)
    with pytest.raises(ValueError, match=r"kernels/example\.cu") as raised:
        kernels.argument_fields("example")
    assert message in str(raised.value)


def test_fields_of_every_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = (
        "  const X_TYPE* x;  // [rows]\n  double* sums;\n#if COUNTS > 0\n  unsigned* counts;\n#endif\n"
        "  long long rows;\n  double eps;\n  long long sizes[DIMS];\n"
    )
    (tmp_path / "example_of_fields.cu").write_text(f"struct Arguments {{\n{fields}}};\n", encoding="utf-8")
    monkeypatch.setattr(kernels, "_FOLDER", tmp_path)
    assert kernels.argument_fields("example_of_fields") == (
        ("x", "pointer", None),
        ("sums", "pointer", None),
        ("counts", "pointer", "COUNTS"),
        ("rows", "long long", None),
        ("eps", "double", None),
        ("sizes", "long long", "DIMS"),
    )


# ---- How a text becomes complete.


@pytest.mark.parametrize("kernel", KERNELS)
def test_line_directives_are_right(kernel: str) -> None:
    """Wherever a line of the complete text says it comes from, that is the line there."""
    source = kernels.kernel_source(kernel, {"A": 1, "B": "float"})
    assert source.startswith(f'#define A 1\n#define B float\n#line 1 "kernels/{kernel}.cu"\n')
    file, number, seen = "", 0, set()
    for line in source.splitlines()[2:]:
        directive = re.fullmatch(r'#line (\d+) "kernels/([\w.]+)"', line)
        if directive:
            file, number = directive[2], int(directive[1])
            continue
        assert text_of(file).splitlines()[number - 1] == line, f"{file}:{number}"
        seen.add((file, number))
        number += 1
    # Nothing is lost but the include lines themselves.
    files = {file for file, _ in seen}
    expected = {
        (file, number)
        for file in files
        for number, line in enumerate(text_of(file).splitlines(), start=1)
        if not line.startswith('#include "')
    }
    assert seen == expected
    assert files == {f"{kernel}.cu", *re.findall(r'#include "([\w.]+)"', text_of(f"{kernel}.cu"))}


@pytest.fixture
def edited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of kernel text of one's own."""
    monkeypatch.setattr(kernels, "_FOLDER", tmp_path)
    monkeypatch.setattr(kernels, "_expanded", functools.cache(kernels._expanded.__wrapped__))
    files = {
        "one.cu": '#include "a.cuh"\n#include "b.cuh"\nint one;\n',
        "a.cuh": "int a;\n",
        "b.cuh": '#include "a.cuh"\nint b;\n',
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def test_a_header_is_included_once(edited: Path) -> None:
    assert kernels.kernel_names() == ["one"]
    assert kernels.kernel_source("one", {"N": 4}).splitlines() == [
        "#define N 4",
        '#line 1 "kernels/one.cu"',
        '#line 1 "kernels/a.cuh"',
        "int a;",
        '#line 2 "kernels/one.cu"',
        '#line 1 "kernels/b.cuh"',
        '#line 2 "kernels/b.cuh"',
        "int b;",
        '#line 3 "kernels/one.cu"',
        "int one;",
    ]


@pytest.mark.parametrize("header", ["a.cuh", "b.cuh"])
def test_an_edited_header_changes_the_text(edited: Path, header: str) -> None:
    """CuPy keeps binaries by the text it is given: a change that is not in it would run the old one."""
    before = kernels.kernel_source("one", {})
    (edited / header).write_text("int other;\n", encoding="utf-8")
    kernels._expanded.cache_clear()  # as a new process begins
    after = kernels.kernel_source("one", {})
    assert before != after and "int other;" in after


# ---- Who asks for them.


def test_every_kernel_is_used_by_some_plan() -> None:
    used = {launch.kernel for launch in plan(plain_forward(4, 4_000_000), Device()).launches}
    used |= {launch.kernel for launch in plan(plain_forward(9000, 8193, "float16"), Device()).launches}
    in_bulk = (100_000, 257), (1000, 50_257)
    for problem in [make(*shape) for make in (plain_forward, plain_backward) for shape in in_bulk]:
        used |= {launch.kernel for launch in plan(problem, Device()).launches}
    for columns in (768, 1_000_000, 3_000_001, 10_000_000, 100_000_000):
        norms = plain_forward(1000, columns), plain_backward(1000, columns)
        for problem in (*norms, plain_gelu(columns), plain_gelu_backward(columns)):
            used |= {launch.kernel for launch in plan(problem, Device()).launches}
    for points in (100, 30_000, 300_000_000):
        norms_of_channels = plain_channel_norm((8, 64, points), channels_per_set=None)
        for channel_problem in (*norms_of_channels, *plain_channel_norm((64, 64, points), last=True)):
            used |= {launch.kernel for launch in plan(channel_problem, Device()).launches}
    others = plain_channel_norm((8, 320, 128**2), "float16", 10, last=True)
    others += [*plain_channel_norm((2, 32, 128**3)), *plain_channel_norm((2, 32, 160**3))]
    for channel_problem in (*others, *plain_channel_norm((4, 64, 64**3), last=True)):
        used |= {launch.kernel for launch in plan(channel_problem, Device()).launches}
    assert used == set(KERNELS)
