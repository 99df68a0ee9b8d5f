"""What is computed, in canonical form. Axes end here: from here on a tensor is a matrix of rows by columns,
or, for the norms of channels, of samples by channels by points.

The kept dimensions of a tensor are its rows, the normalized ones its columns, each in C order, so that row r is the
r-th element of the mean and column c the c-th of the weight. Dimensions that lie behind each other in memory in every
tensor of the call are merged; most problems come down to one row and one column dimension. Nothing is ever transposed
or copied: what cannot be merged is left as several sizes and strides, and the plan picks a kernel that can follow them.
"""

from __future__ import annotations

from cunorm.problem.base import ACTIVATIONS, GELUS, RunningStatistics
from cunorm.problem.channels import ChannelBackward, ChannelForward
from cunorm.problem.pointwise import PointwiseBackward, PointwiseForward
from cunorm.problem.rows import BackwardProblem, Channels, ForwardProblem, Norm
from cunorm.problem.tensors import DTYPES, ChannelTensor, Matrix, Vector, View, contiguous_strides

__all__ = [
    "ACTIVATIONS",
    "DTYPES",
    "GELUS",
    "AnyProblem",
    "BackwardProblem",
    "ChannelBackward",
    "ChannelForward",
    "ChannelProblem",
    "ChannelTensor",
    "Channels",
    "ForwardProblem",
    "Matrix",
    "Norm",
    "PointwiseBackward",
    "PointwiseForward",
    "PointwiseProblem",
    "Problem",
    "RunningStatistics",
    "Vector",
    "View",
    "contiguous_strides",
]

Problem = ForwardProblem | BackwardProblem
PointwiseProblem = PointwiseForward | PointwiseBackward
ChannelProblem = ChannelForward | ChannelBackward
AnyProblem = Problem | PointwiseProblem | ChannelProblem
