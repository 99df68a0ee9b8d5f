"""The package: what the wheel holds, where it can be imported from, and that what is documented runs."""

from __future__ import annotations

import doctest
import importlib
import inspect
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cunorm

ROOT = Path(__file__).parents[1]
SOURCES = ("cunorm", "kernels", "adapters", "bench", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md")
SOURCES += ("MANIFEST.in",)
FRAMEWORKS = {"torch", "jax", "jaxlib", "tensorflow", "cupy", "cupy_backends", "tvm_ffi", "keras"}


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources, since a build leaves files beside them."""
    folder = tmp_path_factory.mktemp("checkout")
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=ignore)
        else:
            shutil.copy(source, folder / name)
    return folder


def build(checkout: Path, hook: str, target: Path) -> Path:
    """Build a wheel with the installed setuptools, by the hook that pip would call; so no network is needed."""
    code = f"import sys; from setuptools import build_meta; build_meta.{hook}(sys.argv[1])"
    command = [sys.executable, "-c", code, str(target)]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = target.glob("*.whl")
    return wheel


@pytest.fixture(scope="session")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(checkout, "build_wheel", tmp_path_factory.mktemp("wheel"))


def environment(folder: Path, wheel: Path | None) -> Path:
    """A virtual environment with only this wheel, and this interpreter's packages behind it. Returns its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    # A folder named in a .pth file is searched, but its own .pth files are not read: an editable cunorm stays out.
    # When this interpreter is the only one that has them, packages come from all of the folders that it searches.
    behind = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")} | {p for p in sys.path if "-packages" in p}
    (packages / "behind.pth").write_text("".join(f"{path}\n" for path in sorted(behind)))
    if wheel is not None:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(packages)
    return folder / "bin" / "python"


# ---- The wheel.


def test_wheel_holds_every_source(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {"cunorm/py.typed"}
    beside = (("kernels", "cunorm/kernels"), ("adapters", "cunorm/adapters"), ("bench", "cunorm/bench"))
    tools = set((ROOT / "bench" / "tools").iterdir())  # for whoever works on the repository
    for folder, target in (("cunorm", "cunorm"), *beside):
        for pattern in ("*.py", "*.cu", "*.cuh", "*.h", "*.cpp", "*.js"):
            for path in set((ROOT / folder).rglob(pattern)) - tools:
                expected.add(f"{target}/{path.relative_to(ROOT / folder).as_posix()}")
    assert {name for name in expected if name.endswith(".cu")}
    assert {name for name in expected if name.startswith("cunorm/emulator/include/")}
    assert expected <= names


def test_wheel_holds_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {re.sub(r"-.*", "-", name.split("/")[0]) for name in names} == {"cunorm", "cunorm-"}
    assert not [name for name in names if "__pycache__" in name or "test" in Path(name).name]


def test_wheel_is_small(wheel: Path) -> None:
    """Of 0.7 MB, as README says."""
    assert wheel.stat().st_size < 750_000


def test_wheel_is_for_every_python(wheel: Path) -> None:
    assert wheel.name == f"cunorm-{cunorm.__version__}-py3-none-any.whl"


def test_metadata(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    text = archive.read(name).decode()
    assert "License-Expression: Apache-2.0" in text
    assert "Requires-Python: >=3.10" in text
    for extra in ("cuda12x", "cuda13x", "torch", "jax", "tensorflow", "test"):
        assert f"Provides-Extra: {extra}" in text
    assert "[ctk]" not in text
    assert any(name.endswith("/LICENSE") for name in archive.namelist())


# ---- Where it can be imported from.

_IMPORT = """
import os, sys
import numpy as np
import cunorm, cunorm.kernels, cunorm.adapters
from cunorm import cli, emulator
assert cunorm.layer_norm(np.ones((2, 3), np.float32)).shape == (2, 3)
assert "__global__" in cunorm.kernels.kernel_source("row_block_forward", {})
print(os.path.realpath(cunorm.__file__))
print(os.path.realpath(cunorm.kernels.__file__))
try:
    import kernels
except ImportError:
    print("no bare kernels")
"""


@pytest.fixture(scope="session", params=["wheel", "editable", "PYTHONPATH"])
def installed(
    request: pytest.FixtureRequest, checkout: Path, wheel: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, dict[str, str]]:
    """How cunorm is installed, the Python that has it, and the environment variables."""
    mode = request.param
    folder = tmp_path_factory.mktemp(mode)
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    source = {"wheel": lambda: wheel, "editable": lambda: build(checkout, "build_editable", folder)}.get(mode)
    python = environment(folder / "venv", source() if source else None)
    if mode == "PYTHONPATH":
        variables["PYTHONPATH"] = str(checkout)
    return mode, python, variables


@pytest.mark.parametrize("place", ["root", "elsewhere"])
def test_import(installed: tuple[str, Path, dict[str, str]], place: str, checkout: Path, tmp_path: Path) -> None:
    mode, python, variables = installed
    done = subprocess.run(
        [str(python), "-c", _IMPORT],
        cwd=checkout if place == "root" else tmp_path,
        env=variables,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    package, kernels, *rest = done.stdout.splitlines()
    from_checkout = place == "root" or mode != "wheel"
    assert Path(package).is_relative_to(os.path.realpath(checkout)) == from_checkout
    # The kernels beside the package that was found, not those of another installation.
    expected = Path(package).parents[1] / "kernels" if from_checkout else Path(package).parent / "kernels"
    assert Path(kernels).parent == expected
    if place == "elsewhere" and mode != "PYTHONPATH":
        assert rest == ["no bare kernels"]


def test_import_takes_no_framework() -> None:
    code = (
        "import sys, time; start = time.perf_counter(); import cunorm; "
        "print(time.perf_counter() - start); print(*{name.partition('.')[0] for name in sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    seconds, modules = done.stdout.splitlines()
    print(f"import cunorm: {seconds} s")
    assert not FRAMEWORKS & set(modules.split())


def test_submodules_come_when_they_are_asked_for() -> None:
    """As the README writes them, after no more than ``import cunorm``."""
    code = (
        "import sys, cunorm; assert 'cunorm.adapters.dlpack' not in sys.modules; cunorm.adapters.dlpack.ADAPTER; "
        "assert 'cunorm.bench' not in sys.modules; cunorm.bench.load; import cunorm.adapters as adapters; "
        "print(hasattr(cunorm, 'nothing'), hasattr(adapters, 'nothing'))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


@pytest.mark.parametrize("name", ["torch", "keras"])
def test_adapters_that_the_readme_names(name: str) -> None:
    pytest.importorskip(name)
    function = {"torch": "replace_norms", "keras": "from_keras"}[name]
    assert callable(getattr(getattr(cunorm.adapters, name), function))


def test_version() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", cunorm.__version__)
    assert f"## [{cunorm.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


# ---- What is documented runs.


def module_names() -> list[str]:
    """All modules but the adapters, which import their frameworks, and the script."""
    importlib.import_module("cunorm.kernels")
    found = [module.name for module in pkgutil.walk_packages([str(ROOT / "cunorm")], "cunorm.")]
    return ["cunorm", "cunorm.kernels", *(name for name in found if name != "cunorm.__main__")]


@pytest.mark.parametrize("name", module_names())
def test_doctests(name: str) -> None:
    module = importlib.import_module(name)
    failed, _ = doctest.testmod(module, extraglobs={"cunorm": cunorm, "np": np}, optionflags=doctest.ELLIPSIS)
    assert not failed


@pytest.mark.parametrize("name", module_names())
def test_no_module_hides_what_its_package_exports(name: str) -> None:
    """Its import would put it in the place of the function of that name."""
    exported = getattr(importlib.import_module(name), "__all__", ())
    assert not {f"{name}.{item}" for item in exported} & set(module_names())


@pytest.mark.parametrize("name", [name for name in cunorm.__all__ if not name.startswith("__")])
def test_public_functions_are_documented_and_annotated(name: str) -> None:
    function = getattr(cunorm, name)
    for section in ("Parameters\n", "Returns\n", "Raises\n", "Examples\n", ">>> "):
        assert section in function.__doc__
    signature = inspect.signature(function)
    assert signature.return_annotation is not inspect.Signature.empty
    for parameter in signature.parameters.values():
        assert parameter.annotation is not inspect.Parameter.empty
        assert parameter.name in function.__doc__


def python_blocks(file: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", file.read_text(), re.DOTALL | re.MULTILINE)


def readme_examples() -> list[Any]:
    """The Python blocks of README.md, by the framework that each imports first."""
    named = [(re.search(r"import (\w+)", block), block) for block in python_blocks(ROOT / "README.md")]
    return [
        pytest.param(block, id=name[1], marks=pytest.mark.gpu if name[1] == "cupy" else ())
        for name, block in named
        if name
    ]


@pytest.mark.parametrize("block", readme_examples())
def test_readme_example(block: str) -> None:
    framework = re.search(r"import (\w+)", block)
    assert framework
    pytest.importorskip(framework[1])
    names: dict[str, Any] = {}
    exec(compile(block, "README.md", "exec"), names)
    if "model" in names:  # it asserts itself what it shows
        return
    results = [names[name] for name in ("y", "dx", "dweight", "dbias") if name in names]
    results += [names["x"].grad, names["weight"].grad] if framework[1] == "torch" else []
    assert results
    assert all(result.shape in (names["x"].shape, names["weight"].shape) for result in results)


# Pages without examples.
WITHOUT = {ROOT / f"docs/{name}.md" for name in ("speed", "h100", "lessons", "troubleshooting")}


@pytest.mark.parametrize("page", sorted({*(ROOT / "docs").glob("*.md")} - WITHOUT), ids=lambda page: page.name)
def test_examples_of_the_documentation(page: Path) -> None:
    """Those of a page run one after the other, in one process of their own, and assert what they show."""
    code = "\n".join(python_blocks(page))
    assert "assert " in code
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_readme_names_every_public_function_and_command() -> None:
    text = (ROOT / "README.md").read_text()
    for name in cunorm.__all__:
        assert name.startswith("__") or f"`{name}(" in text
    for command in ("demo", "info", "explain"):
        assert f"python -m cunorm {command}" in text


PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def anchors(page: Path) -> set[str]:
    """What GitHub makes of the headings of a page: lower case, without punctuation, a hyphen for each space."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of_the_documentation(page: Path) -> None:
    """Every link into the repository finds its file, and its heading."""
    links = re.findall(r"\]\(([^)]+)\)", page.read_text())
    for link in (link for link in links if not link.startswith("http")):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link
