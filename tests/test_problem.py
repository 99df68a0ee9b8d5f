"""Canonical form: whatever the axes and strides, rows and columns walk a tensor's elements in the user's order."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cunorm.problem import (
    DTYPES,
    BackwardProblem,
    ForwardProblem,
    Matrix,
    Norm,
    Problem,
    Vector,
    View,
    contiguous_strides,
)

Array = np.ndarray[Any, Any]

DTYPE = "float32"
BASE_LIMIT = 100_000


class Layout(NamedTuple):
    """A view whose elements are their own places in memory, counted in elements from some base."""

    places: Array

    @property
    def view(self) -> View:
        strides = tuple(step // self.places.itemsize for step in self.places.strides)
        return View(4096, self.places.shape, strides, DTYPE, ("cuda", 0))

    def walked(self, axis: tuple[int, ...]) -> Array:
        """Where each row's columns lie, from the view's first element on: kept index by reduced index, in C order."""
        kept = [i for i in range(self.places.ndim) if i not in axis]
        rows = math.prod(self.places.shape[i] for i in kept)
        by_row = self.places.transpose([*kept, *axis]).reshape(rows, -1)
        return by_row - self.places[(0,) * self.places.ndim]


@st.composite
def layouts(draw: st.DrawFn, shape: tuple[int, ...]) -> Layout:
    """A view of ``shape``: slices with steps of either sign, in any order of dimensions, broadcast or not."""
    plain = draw(st.booleans())
    order = range(len(shape)) if plain else draw(st.permutations(range(len(shape))))
    base_shape, slices, broadcast = [], [], []
    room = BASE_LIMIT // max(1, math.prod(shape))
    for dim in order:
        size = shape[dim]
        if plain and draw(st.integers(0, 3)):
            base_shape.append(size)
            slices.append(slice(None))
            continue
        if draw(st.integers(0, 7)) == 0:
            base_shape.append(1)
            slices.append(slice(None))
            broadcast.append(dim)
            continue
        step = draw(st.sampled_from([1, 1, 1, 2, 3])) if room >= 3 * (size + 2) else 1
        room //= step
        before, after = draw(st.sampled_from([(0, 0), (0, 0), (1, 0), (0, 1), (2, 1)]))
        length = before + (size - 1) * step + 1 + after if size else before + after
        base_shape.append(length)
        taken = range(before, before + size * step, step)
        slices.append(slice(taken.start, taken.start + size * step, step))
        if draw(st.booleans()) and size and before:  # the same elements, last first
            slices[-1] = slice(taken[-1], taken[0] - 1, -step)
    base = np.arange(math.prod(base_shape), dtype=np.int32).reshape(base_shape)
    view = base[tuple(slices)].transpose(np.argsort(order))
    return Layout(np.broadcast_to(view, shape) if broadcast else view)


@st.composite
def calls(draw: st.DrawFn) -> tuple[list[Layout], tuple[int, ...]]:
    """The layouts of three tensors of one shape, and the axes to normalize over."""
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 1, 2, 3, 4, 5, 6, 2, 3, 4]), min_size=1, max_size=5)))
    axis = tuple(sorted(draw(st.sets(st.integers(0, len(shape) - 1), min_size=1))))
    # Tensors that lie alike merge more than tensors that lie apart.
    first = draw(layouts(shape))
    alike = draw(st.booleans())
    return [first, *(first if alike else draw(layouts(shape)) for _ in range(2))], axis


def forward(x: View, y: View, axis: tuple[int, ...]) -> ForwardProblem:
    return ForwardProblem.of(x, None, None, y, axis=axis, eps=0.0, stats=False)


def backward(dy: View, x: View, dx: View | None, axis: tuple[int, ...]) -> BackwardProblem:
    return BackwardProblem.of(dy, x, None, dx, axis=axis, dweight=None, dbias=None)


def offsets(sizes: tuple[int, ...], strides: tuple[int, ...]) -> Array:
    """What a kernel computes for each index: a mixed-radix number over the sizes, in C order."""
    digits = np.unravel_index(np.arange(math.prod(sizes)), sizes)
    return sum((digit * stride for digit, stride in zip(digits, strides)), start=np.zeros(math.prod(sizes), np.int64))


def assert_walks(problem: Problem, matrix: Matrix, layout: Layout, axis: tuple[int, ...]) -> None:
    rows = offsets(problem.row_sizes, matrix.row_strides)
    columns = offsets(problem.column_sizes, matrix.column_strides)
    np.testing.assert_array_equal(rows[:, None] + columns[None, :], layout.walked(axis))


def assert_merged(sizes: tuple[int, ...], strides: list[tuple[int, ...]]) -> None:
    """No neighbours are one run of memory in every tensor, and no dimension says nothing."""
    assert all(len(theirs) == len(sizes) for theirs in strides)
    assert 1 not in sizes or sizes == (1,)
    for i in range(len(sizes) - 1):
        assert any(theirs[i] != theirs[i + 1] * sizes[i + 1] for theirs in strides), (sizes, strides)


def assert_canonical(problem: Problem, layouts: list[Layout], axis: tuple[int, ...]) -> None:
    shape = layouts[0].places.shape
    assert problem.columns == math.prod(shape[i] for i in axis)
    assert problem.rows == math.prod(size for i, size in enumerate(shape) if i not in axis)
    assert_merged(problem.row_sizes, [matrix.row_strides for matrix in problem.matrices])
    assert_merged(problem.column_sizes, [matrix.column_strides for matrix in problem.matrices])
    if problem.rows * problem.columns:
        for matrix, layout in zip(problem.matrices, layouts, strict=True):
            assert_walks(problem, matrix, layout, axis)


@settings(max_examples=400, deadline=None)
@given(calls())
def test_rows_and_columns_walk_the_elements_in_order(call: tuple[list[Layout], tuple[int, ...]]) -> None:
    (x, y, other), axis = call
    assert_canonical(forward(x.view, y.view, axis), [x, y], axis)
    # matrices of the gradient: x, dy, dx
    assert_canonical(backward(y.view, x.view, other.view, axis), [x, y, other], axis)
    assert_canonical(backward(y.view, x.view, None, axis), [x, y], axis)
    # and with a residual: x, residual, y, residual_out; x, dy, dresidual_out, dx
    options: Any = {"residual": other.view, "residual_out": x.view}
    summed = ForwardProblem.of(x.view, None, None, y.view, axis=axis, eps=0.0, stats=False, **options)
    assert_canonical(summed, [x, other, y, x], axis)
    options = {"dweight": None, "dbias": None, "dresidual_out": other.view}
    summed_backward = BackwardProblem.of(y.view, x.view, None, x.view, axis=axis, **options)
    assert_canonical(summed_backward, [x, y, other, x], axis)


def test_the_views_drawn_are_of_every_kind() -> None:
    """What the test above is worth depends on it: merged and unmerged, backwards, broadcast, stepped, empty."""
    met: set[str] = set()

    @settings(max_examples=300, deadline=None, database=None, derandomize=True)
    @given(calls())
    def look(call: tuple[list[Layout], tuple[int, ...]]) -> None:
        (x, y, _), axis = call
        problem = forward(x.view, y.view, axis)
        strides = problem.x.row_strides + problem.x.column_strides
        size, dims = problem.rows * problem.columns, len(problem.row_sizes) + len(problem.column_sizes)
        kinds = {
            f"{len(problem.row_sizes)} row dims": True,
            f"{len(problem.column_sizes)} column dims": True,
            "backwards": size > 0 and min(strides) < 0,
            "broadcast": size > 0 and (0, 2) in zip(strides, problem.row_sizes + problem.column_sizes),
            "empty": size == 0,
            "merged": size > 0 and dims < sum(size > 1 for size in x.places.shape),
        }
        met.update(kind for kind, is_met in kinds.items() if is_met)

    look()
    assert met >= {"1 row dims", "2 row dims", "1 column dims", "2 column dims", "3 column dims"}
    assert met >= {"backwards", "broadcast", "empty", "merged"}


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.data())
def test_contiguous_tensors_and_trailing_axes_are_a_plain_matrix(sizes: list[int], data: st.DataObject) -> None:
    shape = tuple(sizes)
    axis = tuple(range(data.draw(st.integers(0, len(shape) - 1)), len(shape)))
    x = Layout(np.arange(math.prod(shape), dtype=np.int32).reshape(shape)).view
    problem = forward(x, x, axis)
    rows, columns = math.prod(shape[: axis[0]]), math.prod(shape[axis[0] :])
    assert problem.row_sizes == (rows,) and problem.column_sizes == (columns,)
    if rows > 1:
        assert problem.x.row_strides == problem.y.row_strides == (columns,)
    if columns > 1:
        assert problem.x.column_strides == problem.y.column_strides == (1,)


@pytest.mark.parametrize(
    ("shape", "axis", "row_sizes", "column_sizes"),
    [
        ((2, 3, 4), (2,), (6,), (4,)),
        ((2, 3, 4), (1, 2), (2,), (12,)),
        ((2, 3, 4), (0, 1, 2), (1,), (24,)),
        ((2, 3, 4), (1,), (2, 4), (3,)),
        ((2, 3, 4), (0, 2), (3,), (2, 4)),
        ((2, 1, 4), (0, 2), (1,), (8,)),
        ((2, 3, 4, 5), (0, 1), (20,), (6,)),
        ((2, 3, 2, 3, 2, 3), (1, 3, 5), (2, 2, 2), (3, 3, 3)),
        ((2, 1, 3, 1), (1, 3), (6,), (1,)),
        ((5,), (0,), (1,), (5,)),
    ],
)
def test_what_merges(shape: Any, axis: Any, row_sizes: Any, column_sizes: Any) -> None:
    x = View(0, shape, contiguous_strides(shape), DTYPE, ("cuda", 0))
    problem = forward(x, x, axis)
    assert (problem.row_sizes, problem.column_sizes) == (row_sizes, column_sizes)


def test_tensors_merge_only_where_all_of_them_do() -> None:
    plain = View(0, (2, 3, 4), (12, 4, 1), DTYPE, ("cuda", 0))
    spread = View(0, (2, 3, 4), (24, 4, 1), DTYPE, ("cuda", 0))
    assert forward(plain, plain, (2,)).row_sizes == (6,)
    assert forward(plain, spread, (2,)).row_sizes == (2, 3)
    assert backward(plain, plain, spread, (2,)).row_sizes == (2, 3)
    assert backward(plain, plain, None, (2,)).row_sizes == (6,)


def test_reshaped_calls_are_one_problem() -> None:
    """A plan is kept for each problem: batch dimensions, dimensions of one and addresses must not make new ones."""
    problems = set()
    for number, shape in enumerate([(24, 8), (2, 12, 8), (2, 3, 4, 8), (4, 1, 6, 8)]):
        x = View(4096 + 16 * number, shape, contiguous_strides(shape), DTYPE, ("cuda", 0))
        problems.add(forward(x, x, (len(shape) - 1,)))
    assert len(problems) == 1


def test_a_single_row_says_nothing_of_strides() -> None:
    """The stride of a dimension that is never walked must not narrow the access: 0, which every number divides."""
    for shape in [(64,), (1, 64), (1, 1, 64)]:
        x = View(0, shape, contiguous_strides(shape), DTYPE, ("cuda", 0))
        assert forward(x, x, (len(shape) - 1,)).x.row_strides == (0,)


@given(st.integers(1, 2**47), st.sampled_from(list(DTYPES)))
def test_alignment_is_the_largest_power_of_two_up_to_16(pointer: int, dtype: str) -> None:
    view = View(pointer, (2, 4), (4, 1), dtype, ("cuda", 0))
    vector = View(pointer, (4,), (1,), dtype, ("cuda", 0))
    problem = ForwardProblem.of(view, vector, vector, view, axis=(1,), eps=0.0, stats=True)
    alignment = problem.x.alignment
    assert alignment in (1, 2, 4, 8, 16) and pointer % alignment == 0
    assert alignment == 16 or pointer % (2 * alignment) != 0
    assert problem.y.alignment == alignment
    assert problem.weight == problem.bias == Vector(dtype, pointer % 16)
    assert problem.weight is not None and problem.weight.alignment == alignment
    gradient = BackwardProblem.of(view, view, vector, view, axis=(1,), dweight=None, dbias=None)
    assert gradient.weight == problem.weight and {matrix.alignment for matrix in gradient.matrices} == {alignment}


def test_a_tensor_yet_to_be_allocated_is_aligned() -> None:
    view = View(0, (2, 4), (4, 1), DTYPE, ("cuda", 0))
    assert forward(view, view, (1,)).y.alignment == 16


def test_each_tensor_keeps_its_own_alignment_and_dtype() -> None:
    x, dy, dx = (View(pointer, (2, 4), (4, 1), DTYPE, ("cuda", 0)) for pointer in (4, 8, 48))
    weight = View(2, (4,), (1,), "float16", ("cuda", 0))
    problem = BackwardProblem.of(dy, x, weight, dx, axis=(1,), dweight="float16", dbias="float64")
    assert [matrix.alignment for matrix in (problem.x, problem.dy, problem.matrices[2])] == [4, 8, 16]
    assert problem.weight == Vector("float16", 2)
    assert (problem.dweight, problem.dbias) == ("float16", "float64")


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_bytes_moved(dtype: str) -> None:
    x = View(0, (3, 5, 7), contiguous_strides((3, 5, 7)), dtype, ("cuda", 0))
    size = 3 * 5 * 7 * np.dtype(dtype.replace("bfloat", "float")).itemsize
    assert forward(x, x, (1,)).bytes_moved == 2 * size
    assert backward(x, x, x, (1,)).bytes_moved == 3 * size
    assert backward(x, x, None, (1,)).bytes_moved == 2 * size
    options: Any = {"residual": x, "residual_out": x}
    assert ForwardProblem.of(x, None, None, x, axis=(1,), eps=0.0, stats=False, **options).bytes_moved == 4 * size
    options = {"dweight": None, "dbias": None, "dresidual_out": x}
    assert BackwardProblem.of(x, x, None, x, axis=(1,), **options).bytes_moved == 4 * size


def test_what_a_gradient_does_not_need_is_no_part_of_its_problem() -> None:
    """Else there would be plans, and compiled kernels, that do the same."""
    x = View(0, (2, 4), (4, 1), DTYPE, ("cuda", 0))
    vector = View(0, (4,), (1,), DTYPE, ("cuda", 0))
    options: Any = {"axis": (1,), "dweight": DTYPE, "dbias": DTYPE}
    plain = BackwardProblem.of(x, x, vector, x, **options)
    assert BackwardProblem.of(x, x, vector, x, bias=vector, **options) == plain
    activated = BackwardProblem.of(x, x, vector, x, bias=vector, norm=Norm(activation="relu"), **options)
    assert activated.bias == Vector(DTYPE)
    without_dx = BackwardProblem.of(x, x, vector, None, **options)
    assert BackwardProblem.of(x, x, vector, None, dresidual_out=x, **options) == without_dx


@given(st.lists(st.integers(0, 9), max_size=5))
def test_contiguous_strides(shape: list[int]) -> None:
    if 0 not in shape:  # NumPy has strides of its own for what holds nothing
        expected = np.empty(shape, np.int8).strides
        assert contiguous_strides(shape) == expected
