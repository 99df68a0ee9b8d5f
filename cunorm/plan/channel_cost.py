"""The time that the ways to compute a channel norm are expected to take, in microseconds, to choose one of them.

What counts is which way comes out first. The constants were fitted, and some then rounded or changed by hand, to times
on an H200 of some fifty problems of the three norms, forward and backward, by up to a hundred ways each. Of the ways
that were timed, those that come out first took 1 % more than the best on average, of grids that stream and of slabs
along the channels; 8 % of the other slabs. Those of pipelines forward are of ten problems.

With the rate of its memory the same constants fit an H100, but for those of what moves numbers and computes at the same
time. Of 92 problems the ways that come out first take 3 % more than the best there (bench/tools/ways.py, and its times
in bench/results/h100/channel-ways.json); of 140 others with the channels last, before slabs became faster, 1.7 %, and
of 132 batch norms with the channels second, which slabs of one block and of 16 were corrected by, 0.4 %. How much
longer vectors of less than 16 bytes take was set by hand, to times on an H100 of 264 problems of planes and volumes of
which most are odd.

Slabs along the channels have become faster since, and may have shorter vectors; what they take was fitted anew, to 6000
times on an H100 of 473 problems with the channels last: it is off by 10 % on average, and the ways that come out first
take 1.8 % more than the best, before that 5.3 %. So was what those along the points take in whole vectors, to times of
169 problems with the channels second: 7 % and 2.0 %. Where memory is as fast as an H200's these have constants of their
own, fitted to 3850 times of 736 norms and to what comes first of them: off by 10 %, and 1.0 % more than the best. Of
406 norms the ways that come out first of those timed take 1.2 % more (bench/results/h200/channel-ways.json, which has
of each the best of these and those that came first; what is read twice was timed anew when it became faster).

Pipelines backward were fitted anew to 1136 times on an H200 of 65 norms, and to what comes first there: of those norms
ten go other ways since then, and take 0.94 of the time on average, from 0.86 to 1.00. Of all pipelines that were timed,
116 norms with those forward, what comes first takes 1.7 % more than the best (bench/results/h200/pipeline-ways.json,
without those that take 1.3 times the best and more).

Grids and pipelines clear their words themselves since, and take 1 to 3 us less: their constants were lessened by 0.5 to
1.1 us, so that what was chosen before for 20 us or more did not take longer.
"""

from __future__ import annotations

import math

from cunorm.plan.channel_grid import Grid
from cunorm.plan.channel_pipeline import ChannelPipeline, units
from cunorm.plan.channel_slab import Slab
from cunorm.plan.channel_split import Split, are_peeled, direction_of_passes
from cunorm.plan.channel_tiles import Tiles
from cunorm.plan.device import Device
from cunorm.problem import ChannelBackward, ChannelForward, ChannelProblem

__all__ = ["cost"]

# The memory rate (see `Device`) that the constants were fitted for.
_FITTED_RATE = 32e3
# What a multiprocessor could move in a microsecond if the others had nothing to move.
_ALONE_BYTES = 112e3
# What the L2 cache still has of what was read, when it is read again.
_CACHED_BYTES = 20e6
# What passes that read twice wait for grows with what they move, up to so many microseconds of that.
_LONG_STREAM = 80
_SECTOR_BYTES, _LINE_BYTES = 32, 128
# Of the channels of a tile, bytes that lie side by side, where several waves of slabs were timed with fast memory.
_LEAST_RUN_OF_WAVES = 64
# Registers that threads of slabs take, most of them fewer than they may have: along the points; along the channels
# forward, and backward of float32.
_REGISTERS_ALONG_POINTS, _REGISTERS_FORWARD, _REGISTERS_BACKWARD = 64, 72, 80


def cost(way: Slab | Grid | ChannelPipeline | Split, problem: ChannelProblem, device: Device) -> float:
    """That of a way of any family."""
    if isinstance(way, Slab):
        return _slab_cost(way, problem, device)
    if isinstance(way, Grid):
        return _grid_cost(way, problem, device)
    if isinstance(way, ChannelPipeline):
        return _pipeline_cost(way, problem, device)
    return _split_cost(problem, device)


def _time_to_move(nbytes: float, device: Device) -> float:
    """While all multiprocessors do."""
    return nbytes / (device.memory_rate * device.multiprocessors)


def _time_in_pipeline(nbytes: float, device: Device, waiting: float) -> float:
    """The time to move numbers and to compute with them, of which multiprocessors wait a share for the memory."""
    memory, fitted = _time_to_move(nbytes, device), nbytes / (_FITTED_RATE * device.multiprocessors)
    return max(waiting * memory + (1 - waiting) * fitted, 0.8 * memory)


def _waste(problem: ChannelProblem, tiles: Tiles) -> float:
    """How much longer memory takes where a tile's channels are not whole and aligned lines of it."""
    if not tiles.along_channels:
        return float(1.06 ** math.log2(tiles.channel_lanes))
    run = tiles.channels * tiles.direction.plane * problem.itemsize
    if tiles.channels >= problem.channels:
        return 1.0
    if tiles.direction.plane > 1 and run >= 512:
        return 1.0 if run % 32 == 0 else 1 + 32 / run  # a sector of 32 bytes is shared with the next run
    aligned = 1.0 if run % 64 == 0 else 1.27 if run % 32 == 0 else 1.36
    return aligned if run >= 128 else aligned * (1.5 if run >= 64 else 96 / run)


def _narrow(problem: ChannelProblem, width: int) -> float:
    """How much longer vectors of less than 16 bytes take in grids and passes, the longer where runs are short."""
    nbytes, forward = width * problem.itemsize, isinstance(problem, ChannelForward)
    if nbytes >= 8:
        return 1.0 if nbytes >= 16 else 1.2
    longer = (1.6 if forward else 1.3) if nbytes == 4 else (5.2 if forward else 3.8)
    return longer * (1.2 if nbytes == 4 and len(problem.point_sizes) > 1 else 1.0)


def _narrow_slab(problem: ChannelProblem, slab: Slab) -> float:
    """The same in slabs along the points, of which those of few bytes are held as fast as others."""
    nbytes, in_runs = slab.tiles.width * problem.itemsize, len(problem.point_sizes) > 1
    longer_runs = in_runs and isinstance(problem, ChannelForward)
    if nbytes == 2:
        return (1.3 if slab.blocks_per_slab == 1 else 1.6) * (1.3 if longer_runs else 1.0)
    if nbytes == 4 and problem.itemsize == 4:
        return 1.15 if longer_runs else 1.1 if in_runs else 1.0 if slab.tiles.channel_lanes > 8 else 0.8
    return 1.0


def _work(problem: ChannelProblem, vectors: int, tiles: Tiles, by_points: float, by_channels: float) -> float:
    """The time in which a thread sums its vectors."""
    elements = vectors * 16 // problem.itemsize
    each = by_channels if tiles.along_channels else by_points
    return elements * each * (1 if isinstance(problem, ChannelForward) else 1.6)


def _activation(problem: ChannelProblem, device: Device, forward: float, backward: float) -> float:
    """How much longer the numbers take under an activation; less where they take longer to come."""
    if problem.activation is None:
        return 1.0
    longer = forward if isinstance(problem, ChannelForward) else backward
    return 1 + (longer - 1) * min(1.0, device.memory_rate / _FITTED_RATE)


def _slab_cost(slab: Slab, problem: ChannelProblem, device: Device) -> float:
    if slab.tiles.along_channels and slab.tiles.direction.plane == 1:
        return _cost_along_channels(slab, problem, device)
    if slab.tiles.direction.is_whole_along_points(problem):
        along_points = _cost_along_points_of_fast_memory if device.has_fast_memory else _cost_along_points
        return along_points(slab, problem, device)
    waves, grid = slab.waves(problem, device), slab.grid(problem)
    stream = _time_to_move(problem.bytes_moved, device) * _waste(problem, slab.tiles)
    stream /= min(1.0, 2.2 * grid / device.multiprocessors)
    if waves.number > 1:
        stream *= 1 + 0.6 * (waves.number * waves.room / grid - 1)
    work = _work(problem, slab.vectors, slab.tiles, 0.02, 0.04)
    latency = 1.8 + (0.95 + 0.06 * math.log2(slab.blocks_per_slab)) * (slab.blocks_per_slab > 1)
    latency += work * max(0.66, slab.tiles.threads * waves.resident / 512)
    cost = 4.2 + stream + latency * (1 + (waves.number - 1) / float(waves.resident**0.6))
    if not slab.tiles.along_channels:
        cost *= _narrow_slab(problem, slab)
    return cost * _by_blocks(problem, slab, device) * _activation(problem, device, 1.05, 1.15)


def _by_blocks(problem: ChannelProblem, slab: Slab, device: Device) -> float:
    """How much less slabs of one block take, and more those of 16: of 132 batch norms, on an H100."""
    if slab.blocks_per_slab > 1:
        return 1.05 if slab.blocks_per_slab == 16 and slab.tiles.along_channels else 1.0
    if slab.tiles.along_channels:  # along planes
        return 0.9
    return 0.94 if slab.grid(problem) >= device.multiprocessors else 1.0


def _cost_along_channels(slab: Slab, problem: ChannelProblem, device: Device) -> float:
    """Of a slab whose sums over the points are warps' first: these times are newer and finer than the others."""
    forward, waves, tiles = isinstance(problem, ChannelForward), slab.waves(problem, device), slab.tiles
    if device.has_fast_memory and waves.number > 1 and tiles.channels * problem.itemsize >= _LEAST_RUN_OF_WAVES:
        return _cost_of_waves_along_channels(slab, problem, device)
    waste = _waste_of_slabs(problem, slab)
    stream = _time_to_move(problem.bytes_moved, device) * waste
    # What the busiest multiprocessor moves, by sectors of memory.
    own = waves.number * waves.busiest * slab.shared_bytes(problem) * (5.6 if forward else 3.0)
    own *= math.sqrt(waste) / _ALONE_BYTES
    own *= max(1.0, _SECTOR_BYTES / (tiles.channels * problem.itemsize)) ** 0.3
    memory = math.sqrt(math.hypot(stream**2, own**2))
    if waves.number > 1:
        memory *= 1 + 0.3 * (waves.number * waves.room / slab.grid(problem) - 1)

    later_waves = 1 + (waves.number - 1) / waves.resident
    busy = max(1.0, tiles.threads * waves.busiest / 512)
    of_vector, of_element = (0.138, 0.013) if forward else (0.3, 0.002)
    if problem.activation is not None:
        of_element += 0.046 if forward else 0.072
    work = slab.vectors * busy * (of_vector + of_element * tiles.width) * later_waves
    work -= (0.89 if forward else 0.52) * min(work, memory)  # what numbers that arrive leave time for
    # The sums of a thread, over its warp and then over all warps, by as many threads as there are.
    sums = tiles.width // tiles.summed(problem)
    halvings = max(0, math.ceil(math.log2(32 / tiles.channel_lanes)))
    latency = (0.0097 if forward else 0.025) * sums * (2 + halvings)
    rounds = math.ceil(sums * tiles.channel_lanes / tiles.threads)
    latency += (0.057 if forward else 0.098) * tiles.sum_rows * rounds
    if slab.blocks_per_slab > 1:
        # What a block tells the others.
        sent = (3 if forward else 2) * tiles.channels // tiles.summed(problem) * slab.blocks_per_slab
        latency += 0.45 + (5.5e-4 if forward else 3.2e-4) * sent * waves.busiest
    return 4.6 + memory + work + latency * later_waves


def _cost_of_waves_along_channels(slab: Slab, problem: ChannelProblem, device: Device) -> float:
    """Of such slabs that could not all run at once if threads took what they may have, where memory is fast.

    Fitted to 1194 times of 98 norms, and to what comes first of them: it takes 2 % more than the best of all families.
    """
    forward, tiles = isinstance(problem, ChannelForward), slab.tiles
    registers = _REGISTERS_FORWARD if forward else _REGISTERS_BACKWARD if problem.itemsize == 4 else None
    waves = slab.waves(problem, device, registers)
    of_vector, of_element = (0.034, 0.0093) if forward else (0.15, 0.0)
    if problem.activation is not None:
        of_element += 0.0134 if forward else 0.055
    busy = max(1.0, tiles.threads * waves.busiest / 512)
    wave = slab.vectors * busy * (of_vector + of_element * tiles.width)
    wave += (0.014 if forward else 0.015) * tiles.sum_rows * (tiles.width // tiles.summed(problem))
    if slab.blocks_per_slab > 1:
        sent = (3 if forward else 2) * tiles.channels // tiles.summed(problem) * slab.blocks_per_slab
        wave += (0.35 if forward else 0.95) + (2.3e-4 if forward else 2.0e-4) * sent * waves.busiest
    again = (waves.number - 1) / float(waves.resident ** (0.65 if forward else 0.95))
    stream = _time_to_move(problem.bytes_moved, device) * _waste_of_waves(problem, slab)
    return (1.06 if forward else 1.02) * ((6.2 if forward else 5.0) + stream + wave * (1 + again))


def _waste_of_waves(problem: ChannelProblem, slab: Slab) -> float:
    """As _waste: best are whole lines of 128 bytes, or all channels."""
    if slab.tiles.channels >= problem.channels:
        return 1.0
    run, forward = slab.tiles.channels * problem.itemsize, isinstance(problem, ChannelForward)
    of_alignment = {128: 0.0, 64: 0.04, 32: 0.16} if forward else {128: 0.0, 64: 0.08, 32: 0.1}
    waste = 1 + of_alignment.get(math.gcd(run, _LINE_BYTES), 0.35 if forward else 0.5)
    return waste + 0.11 * max(0.0, _LINE_BYTES / run - 1)


def _cost_along_points(slab: Slab, problem: ChannelProblem, device: Device) -> float:
    """Of a slab along the points of one dimension in whole vectors, of the same age or newer."""
    forward, waves = isinstance(problem, ChannelForward), slab.waves(problem, device)
    # Of a wave: what no block of it can hide, and what the busiest multiprocessor moves.
    own = (1.7 if forward else 1.5) * (1 if slab.blocks_per_slab > 1 else 0.45)
    own += waves.busiest * slab.shared_bytes(problem) * (2.35 if forward else 1.1) / _ALONE_BYTES
    memory = math.sqrt(math.hypot(_time_to_move(problem.bytes_moved, device) ** 2, (waves.number * own) ** 2))
    elements = slab.vectors * 16 // problem.itemsize
    work = 0.008 if forward else 0.014
    if problem.activation is not None:
        work += 0.009 if forward else 0.03
    latency = elements * work * max(0.83, slab.tiles.threads * waves.busiest / 512)
    if slab.blocks_per_slab > 1:
        sent = (3 if forward else 2) * slab.tiles.channels * slab.blocks_per_slab
        latency += 7e-4 * sent * waves.busiest
    return (4.7 if forward else 6.0) + memory + latency * (1 + (waves.number - 1) / waves.resident**3)


def _cost_along_points_of_fast_memory(slab: Slab, problem: ChannelProblem, device: Device) -> float:
    """The same where memory brings numbers so fast that the work on them is not hidden, nor what blocks wait for."""
    forward, waves = isinstance(problem, ChannelForward), slab.waves(problem, device, _REGISTERS_ALONG_POINTS)
    own, wave, work = (5.5, 0.24, 0.0122) if forward else (1.5, 0.15, 0.02)
    if problem.activation is not None:
        wave += 0.19 if forward else 0.65
        work += 0.007 if forward else 0.0143
    elements = slab.vectors * 16 // problem.itemsize
    wave += elements * work * max(1.6, slab.tiles.threads * waves.busiest / 512)
    if slab.blocks_per_slab > 1:
        own += 0.8 if forward else 2.1
        sent = (3 if forward else 2) * slab.tiles.channels * slab.blocks_per_slab
        wave += (9.7e-4 if forward else 6.1e-4) * sent * waves.busiest
    memory = float((_time_to_move(problem.bytes_moved, device) ** 4 + (waves.number * own) ** 4) ** 0.25)
    again = (waves.number - 1) / float(waves.resident ** (1.2 if forward else 0.93))
    return (2.0 if forward else 5.5) + memory + wave * (1 + again)


def _waste_of_slabs(problem: ChannelProblem, slab: Slab) -> float:
    """As _waste, of channels that are contiguous: of few bytes the cache puts together what blocks have of a line."""
    run = slab.tiles.channels * problem.itemsize
    if slab.tiles.channels >= problem.channels:
        return 1.0
    waste = 1.0 if run % 64 == 0 else 1.5 if run % 32 == 0 else 3.1
    if run < 128:
        waste *= 1.65 if run >= 64 else 96 / run
    return 1 + (waste - 1) * min(1.0, 0.11 + problem.bytes_moved / 380e6)


def _grid_cost(grid: Grid, problem: ChannelProblem, device: Device) -> float:
    turns, resident = grid.turns(problem), grid.tiles.min_blocks
    busy = min(1.0, grid.groups * grid.blocks_per_slab / (device.multiprocessors * resident))
    waste = _waste(problem, grid.tiles) * _narrow(problem, grid.tiles.width) / busy
    slabs = grid.tiles.count(problem)
    waste *= turns * grid.groups / slabs
    waste *= slabs * grid.tiles.channels / (problem.samples * problem.channels)  # the last may have fewer channels
    if grid.rereads:
        return _streaming_cost(grid, problem, device, waste)
    stream = _time_to_move(problem.bytes_moved, device) * waste
    stream *= _activation(problem, device, 1.08, 1.6)
    if isinstance(problem, ChannelForward):
        stream *= 1.08 if grid.tiles.along_channels else 1.0
    elif grid.groups <= 2:
        stream *= 1.15  # all blocks sum, wait, and store at the same time
    exchange = (3.2 if grid.tiles.along_channels else 1.2) + 4e-4 * grid.sets(problem) * grid.blocks_per_slab
    exposed = exchange + _work(problem, grid.vectors, grid.tiles, 0.012, 0.014)
    # What is on its way meanwhile.
    exposed *= 1 - 0.15 * min(1.0, (grid.slots - grid.vectors) / grid.vectors)
    return 7.4 + stream + turns * exposed


def _streaming_cost(grid: Grid, problem: ChannelProblem, device: Device, waste: float) -> float:
    """Of a grid whose slabs do not stay: ``waste`` is how much longer than a copy what must move takes."""
    forward = isinstance(problem, ChannelForward)
    stream = _time_in_pipeline(problem.bytes_moved * waste, device, 0.55 if forward else 0.85)
    turns, itemsize = grid.turns(problem), problem.itemsize
    # What the slabs that are worked on at a time read again.
    slab = problem.points * min(grid.tiles.channels, problem.channels) * itemsize * (1 if forward else 2)
    again = grid.groups * slab * grid.rereads / grid.vectors
    missed = turns * _time_to_move(max(0.0, again - _CACHED_BYTES), device) * waste
    stream *= _activation(problem, device, 1.06, 1.17)
    words = turns * 1e-3 * grid.sets(problem) * grid.blocks_per_slab
    held = turns * min(grid.vectors, grid.slots) * 16 / itemsize
    if forward:
        return 11.7 + 1.14 * stream + 1.09 * missed + 0.14 * words + 0.044 * held
    return 11.0 + 1.24 * stream + 0.66 * missed + 0.29 * words + 0.036 * held


def _pipeline_cost(way: ChannelPipeline, problem: ChannelProblem, device: Device) -> float:
    busy = min(1.0, way.groups * way.blocks_per_slab / (0.97 * device.multiprocessors))
    left_over = way.turns(problem) * way.groups / way.tiles.count(problem) / busy
    if isinstance(problem, ChannelBackward):
        return _pipeline_cost_backward(way, problem, device, left_over)
    waste = _waste(problem, way.tiles)
    # Whole samples lie behind each other in memory, tiles of them in pieces.
    in_memory, activated = (1.15, 1.2) if way.whole(problem) else (1.26, 1.15)
    waste *= in_memory * _activation(problem, device, activated, 1.0)
    # Eight sums to a vector instead of four or fewer.
    waste *= 1.2 if units(problem, way.tiles.direction) == 8 else 1.0
    return 9.1 + waste * _time_in_pipeline(problem.bytes_moved * left_over, device, 0.3) + 3e-5 * way.part_bytes


def _pipeline_cost_backward(way: ChannelPipeline, problem: ChannelProblem, device: Device, left_over: float) -> float:
    turns, run = way.turns(problem), way.tiles.channels * problem.itemsize
    waste = 1.11 * left_over * (1 + 2.62 * math.pow(16 / run, 1.69)) * (1.18 if run % _SECTOR_BYTES else 1.0)
    waste *= 0.99 if way.ahead >= 5 else 1.0
    waste *= 1.11 if way.groups == 1 else 1.0  # all blocks sum and store at the same time
    stream = waste * _time_in_pipeline(problem.bytes_moved, device, 0.75)
    # A slab waits for what its blocks tell each other, while others move: what takes longer hides the rest.
    telling = turns * 6.6 / way.lag
    longer, hidden = max(stream, telling), min(stream, telling)
    return 13.6 + longer + 0.02 * hidden + turns * (0.2 if problem.activation is None else 0.4)


def _split_cost(problem: ChannelProblem, device: Device) -> float:
    """Fitted to the times on an H200 of 406 norms, and to what comes first of all ways: off by 10 % on average."""
    along_channels, width, _ = direction_of_passes(problem)
    forward, sixteen_bits = isinstance(problem, ChannelForward), problem.itemsize == 2
    stream = _time_to_move(problem.bytes_moved, device) * (1.5 if forward else 1.69) * _narrow(problem, width)
    stream = 0.94 * stream + (0.26 if sixteen_bits else 0.09) * min(stream, _LONG_STREAM)  # and what it waits
    if along_channels:
        return (10.8 if forward else 11.8) + stream * _activation(problem, device, 1.12, 1.22)
    stream *= _activation(problem, device, 1.03, 1.12 if sixteen_bits else 1.06)
    return 11.0 + 1.1 * stream if are_peeled(problem) else 7.0 + stream
