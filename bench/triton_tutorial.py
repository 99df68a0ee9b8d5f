"""Layer norm in Triton by the method of Triton's layer-norm tutorial.

Forward: a program a row, which reads the row three times in blocks, for mean, variance and result. Backward: a program
a row holds the whole row and writes dx; it adds its share of dweight and dbias to one of a few groups of partial sums,
each behind a lock, and a second kernel adds up the groups. The sums have the dtype of the weight, as in the tutorial.
"""

# The parameters of Triton's functions have no types that Python knows.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

__all__ = ["backward", "forward"]

_LARGEST_ROW_BYTES = 65536
# Rows are spread over this many groups of partial sums, fewer for long rows: columns up to -> groups.
_GROUPS = ((1024, 256), (4096, 128), (8192, 96))
_FEWEST_GROUPS = 64


@triton.jit
def _forward(X, Y, W, B, Mean, Rstd, stride, columns, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    X += row * stride
    Y += row * stride
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, columns, BLOCK):
        index = start + tl.arange(0, BLOCK)
        total += tl.load(X + index, mask=index < columns, other=0.0).to(tl.float32)
    mean = tl.sum(total, axis=0) / columns
    squares = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, columns, BLOCK):
        index = start + tl.arange(0, BLOCK)
        x = tl.load(X + index, mask=index < columns, other=0.0).to(tl.float32)
        difference = tl.where(index < columns, x - mean, 0.0)
        squares += difference * difference
    rstd = 1 / tl.sqrt(tl.sum(squares, axis=0) / columns + eps)
    tl.store(Mean + row, mean)
    tl.store(Rstd + row, rstd)
    for start in range(0, columns, BLOCK):
        index = start + tl.arange(0, BLOCK)
        inside = index < columns
        weight = tl.load(W + index, mask=inside)
        bias = tl.load(B + index, mask=inside)
        x = tl.load(X + index, mask=inside, other=0.0).to(tl.float32)
        tl.store(Y + index, (x - mean) * rstd * weight + bias, mask=inside)


@triton.jit
def _backward_rows(DX, DY, DW, DB, X, W, Mean, Rstd, Locks, stride, columns, GROUPS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK)
    inside = index < columns
    x = tl.load(X + row * stride + index, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(DY + row * stride + index, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(W + index, mask=inside, other=0.0).to(tl.float32)
    mean = tl.load(Mean + row)
    rstd = tl.load(Rstd + row)
    xhat = tl.where(inside, (x - mean) * rstd, 0.0)
    g = tl.where(inside, weight * dy, 0.0)
    along_xhat = tl.sum(xhat * g, axis=0) / columns
    along_one = tl.sum(g, axis=0) / columns
    tl.store(DX + row * stride + index, (g - (xhat * along_xhat + along_one)) * rstd, mask=inside)

    dweight = (dy * xhat).to(weight.dtype)
    dbias = dy.to(weight.dtype)
    group = row % GROUPS
    lock = Locks + group
    used = Locks + GROUPS + group
    partial_weight = DW + group * columns + index
    partial_bias = DB + group * columns + index
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass
    if tl.load(used) == 0:
        tl.atomic_xchg(used, 1)
    else:
        dweight += tl.load(partial_weight, mask=inside, other=0.0)
        dbias += tl.load(partial_bias, mask=inside, other=0.0)
    tl.store(partial_weight, dweight, mask=inside)
    tl.store(partial_bias, dbias, mask=inside)
    tl.debug_barrier()  # all threads have stored before the lock is given up
    tl.atomic_xchg(lock, 0)


@triton.jit
def _backward_sums(DW, DB, Dweight, Dbias, groups, columns, GROUP_BLOCK: tl.constexpr, COLUMN_BLOCK: tl.constexpr):
    column = tl.program_id(0) * COLUMN_BLOCK + tl.arange(0, COLUMN_BLOCK)
    dweight = tl.zeros((GROUP_BLOCK, COLUMN_BLOCK), dtype=tl.float32)
    dbias = tl.zeros((GROUP_BLOCK, COLUMN_BLOCK), dtype=tl.float32)
    for start in range(0, groups, GROUP_BLOCK):
        group = start + tl.arange(0, GROUP_BLOCK)
        inside = (group[:, None] < groups) & (column[None, :] < columns)
        offset = group[:, None] * columns + column[None, :]
        dweight += tl.load(DW + offset, mask=inside, other=0.0)
        dbias += tl.load(DB + offset, mask=inside, other=0.0)
    tl.store(Dweight + column, tl.sum(dweight, axis=0), mask=column < columns)
    tl.store(Dbias + column, tl.sum(dbias, axis=0), mask=column < columns)


def _block(x: torch.Tensor) -> tuple[int, int]:
    """Columns of a block, and warps for it."""
    block = min(_LARGEST_ROW_BYTES // x.element_size(), int(triton.next_power_of_2(x.shape[1])))
    return block, min(max(block // 256, 1), 8)


def forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> tuple[Any, Any, Any]:
    """y, mean, rstd."""
    rows, columns = x.shape
    block, warps = _block(x)
    _check_length(columns, block)
    y = torch.empty_like(x)
    mean, rstd = (torch.empty(rows, dtype=torch.float32, device=x.device) for _ in range(2))
    _forward[(rows,)](x, y, weight, bias, mean, rstd, x.stride(0), columns, eps, BLOCK=block, num_warps=warps)
    return y, mean, rstd


def backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor
) -> tuple[Any, Any, Any]:
    """dx, dweight, dbias."""
    rows, columns = x.shape
    block, warps = _block(x)
    _check_length(columns, block)
    groups = next((groups for most, groups in _GROUPS if columns <= most), _FEWEST_GROUPS)
    locks = torch.zeros(2 * groups, dtype=torch.int32, device=x.device)
    partial_weight, partial_bias = (
        torch.zeros((groups, columns), dtype=weight.dtype, device=x.device) for _ in range(2)
    )
    dx, dweight, dbias = torch.empty_like(dy), torch.empty_like(weight), torch.empty_like(weight)
    _backward_rows[(rows,)](
        dx,
        dy,
        partial_weight,
        partial_bias,
        x,
        weight,
        mean,
        rstd,
        locks,
        x.stride(0),
        columns,
        GROUPS=groups,
        BLOCK=block,
        num_warps=warps,
    )
    _backward_sums[(triton.cdiv(columns, 128),)](
        partial_weight,
        partial_bias,
        dweight,
        dbias,
        min(groups, rows),
        columns,
        GROUP_BLOCK=32,
        COLUMN_BLOCK=128,
    )
    return dx, dweight, dbias


def _check_length(columns: int, block: int) -> None:
    if columns > block:
        raise RuntimeError(f"rows of at most {_LARGEST_ROW_BYTES} bytes, not {columns} elements")
