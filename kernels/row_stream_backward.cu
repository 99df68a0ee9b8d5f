// Gradients of layer norm and RMS norm of long rows that begin anywhere: as row_pipeline_backward computes them.
//
// Moves x and dy (and dresidual_out) once in and dx once out; how is in row_stream.cuh. Blocks keep the sums of
// their columns (see part_columns.cuh), so that dweight and dbias cost one row of partial sums a group of blocks, which
// column_sums adds up in a fixed order.
#include "types.cuh"
#include "dependent_launch.cuh"
#include "grid_words.cuh"
#include "reduce.cuh"
#include "activation.cuh"
#include "affine.cuh"
#include "group_part.cuh"
#include "bulk_copy.cuh"
#include "handover.cuh"
#include "collected.cuh"
constexpr bool ENDS_IN_ZEROS = true;
#include "row_stream.cuh"
#include "row_exchange.cuh"
constexpr bool KEEPS_WIDENED = true;
#include "part_columns.cuh"

struct Arguments {
  const X_TYPE* x;
  const X_TYPE* dy;
  const X_TYPE* dresidual_out;
  const WEIGHT_TYPE* weight;
  const BIAS_TYPE* bias;
  const Compute* mean;
  const Compute* rstd;
  X_TYPE* dx;
  DWEIGHT_TYPE* dweight;  // [groups][columns]: partial sums, or finished ones where there is one group
  DBIAS_TYPE* dbias;
  long long* words;  // see Exchange
  long long word_pairs;
  long long rows;
  long long columns;
  long long columns_per_block;  // whole lines
  long long blocks_per_row;     // divides gridDim.x; at most 32 * PARTS_PER_LANE
  long long stride;             // elements from one row of any tensor to the next
};

constexpr int TENSORS = 2 + HAS_DRESIDUAL;
constexpr int COLUMN_SUMS = WANTS_DWEIGHT + WANTS_DBIAS;  // of a column

// Of a row, what each warp has of the sums of g and of g * xhat.
struct OfWarps {
  Compute sums[2][WARPS];
};

// What it takes to sum a row.
struct Given {
  Compute mean;
  Compute rstd;
};

// And to finish it: dx = g * rstd + (xhat * slope + offset) + dresidual_out, with what is the same along the row put
// together: but for the rstd in xhat, whose square could leave the range of float.
struct OfRow {
  Compute offset;
  Compute slope;
};

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 1)
    row_stream_backward(const Arguments arguments) {
  let_next_launch_begin();
  clear_words(arguments.words, arguments.word_pairs);
  __shared__ Stages<0> stages;
  __shared__ OfWarps of_warps[AHEAD];
  __shared__ Given givens[AHEAD];
  __shared__ OfRow of_rows[AHEAD];
  extern __shared__ __align__(BULK_ALIGNMENT) X_TYPE staged[];  // [AHEAD][x, dy, dresidual_out]
  using Values = Vector<X_TYPE, UNIT>;

  const SharedPart part = part_of_block(arguments.columns, arguments.columns_per_block, arguments.blocks_per_row);
  const long long rows = arguments.rows, groups = part.groups;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const auto placed_at = [&](long long row) { return placed(arguments, part, row); };
  const auto stage_of = [&](int turn) { return staged + turn % AHEAD * (TENSORS * ROOM); };
  const Units units(part, placed_at(part.group).begin);
  KeptAffine affine = {};
  KeptSums<COLUMN_SUMS> column_sums = {};

  // What goes from memory to shared memory by way of one thread.
  Tail tails[TENSORS];
  Given given;
  const auto load_few = [&](long long row, const Placed& of) {
    tails[0].load(arguments.x, of);
    tails[1].load(arguments.dy, of);
    if constexpr (HAS_DRESIDUAL) tails[2].load(arguments.dresidual_out, of);
    given = {CENTERED ? arguments.mean[row] : 0, arguments.rstd[row]};
  };
  const auto fetch = [&](int turn, const Placed& of) {
    BulkArrival& arrival = stages.arrived[turn % AHEAD];
    X_TYPE* const stage = stage_of(turn);
#pragma unroll
    for (int i = 0; i < TENSORS; ++i) tails[i].store(stage + i * ROOM, of);
    givens[turn % AHEAD] = given;
    arrival.expect(TENSORS * of.bytes_in_bulk());
    fetch_in_bulk(arrival, stage, arguments.x, of);
    fetch_in_bulk(arrival, stage + ROOM, arguments.dy, of);
    if constexpr (HAS_DRESIDUAL) fetch_in_bulk(arrival, stage + 2 * ROOM, arguments.dresidual_out, of);
  };
  if (warp == MOVES && lane == 0) {
    stages.begin();
    for (int turn = 0; turn < UNDER_WAY; ++turn) {
      const long long row = part.group + turn * groups;
      if (row >= rows) break;
      load_few(row, placed_at(row));
      fetch(turn, placed_at(row));
    }
  } else if (warp < WARPS) {
    affine.fetch(arguments.weight, arguments.bias, part, units);
  }
  __syncthreads();

  const Exchange<2> exchange(arguments.words, part);
  long long row = part.group;
  if (warp == MOVES) {
    for (int turn = 0; row - LAG * groups < rows; ++turn, row += groups) {
      const long long next_row = row + UNDER_WAY * groups;
      const Placed next = placed_at(next_row);
      if (lane == 0 && next_row < rows) load_few(next_row, next);
      if (row < rows) stages.summed.wait_for(turn);  // at first, so that no more rows are under way than later
      if (turn >= LAG) {
        stages.finished.wait_for(turn - LAG);
        send_part(arguments.dx, stage_of(turn - LAG), placed_at(row - LAG * groups));
      }
      if (lane == 0) wait_for_sent<0>();
      __syncwarp();
      if (lane == 0 && next_row < rows) fetch(turn + UNDER_WAY, next);
    }
  } else if (warp == TELLS) {
    wait_for_words();
    for (int turn = 0; row < rows; ++turn, row += groups) {
      stages.summed.wait_for(turn);
      const OfWarps& of = of_warps[turn % AHEAD];
      Compute sums[2] = {lane < WARPS ? of.sums[0][lane] : 0, lane < WARPS ? of.sums[1][lane] : 0};
      stages.known.arrive_in(turn);
      warp_sum<32, 1>(sums);
      exchange.tell(sums, turn);
    }
  } else if (warp == COLLECTS) {
    wait_for_words();
    const Compute scale = static_cast<Compute>(-1) / static_cast<Compute>(arguments.columns);
    for (int turn = 0; row < rows; ++turn, row += groups) {
      Compute told[PARTS_PER_LANE][2], sums[2];
      exchange.await(told, turn);
      sum_parts(told, sums);
      stages.wait_for_arrival(turn);  // what was told of the row that lay there has been read
      const Compute rstd = givens[turn % AHEAD].rstd;
      if (lane == 0) of_rows[turn % AHEAD] = {CENTERED ? sums[0] * scale * rstd : 0, sums[1] * scale * rstd};
      stages.known.arrive_in(turn);
    }
  } else {
    for (int turn = 0; row - LAG * groups < rows; ++turn, row += groups) {
      if (row < rows) {
        X_TYPE* const first_unit = units.first_in(stage_of(turn), placed_at(row).begin);
        Compute sums[2] = {0, 0};
        stages.wait_for_arrival(turn);
        const Given of = givens[turn % AHEAD];
        // Behind the part there are zeros of x and dy, and so of all sums, as long as mean * rstd is finite. To ask for
        // these columns, too, would spill.
        units.visit([&](int i) {
          const X_TYPE* const unit = first_unit + i * Units::APART;
          const Values x = load<X_TYPE, UNIT>(unit), dy = load<X_TYPE, UNIT>(unit + ROOM);
          Compute weight[UNIT], bias[UNIT], of_unit[2] = {0, 0};
          affine.get(i, weight, bias);
#pragma unroll
          for (int j = 0; j < UNIT; ++j) {
            Gradient gradient = gradient_of(widen(x, j), widen(dy, j), of.mean, of.rstd, weight[j], bias[j]);
            if (i == 0 && units.column(0) + j < 0) gradient = {0, 0, 0};
            if constexpr (WANTS_DWEIGHT) column_sums.sums[i][j][0] += gradient.dz * gradient.xhat;
            if constexpr (WANTS_DBIAS) column_sums.sums[i][j][COLUMN_SUMS - 1] += gradient.dz;
            of_unit[0] += gradient.g;
            of_unit[1] += gradient.g * gradient.xhat;
          }
          sums[0] += of_unit[0];
          sums[1] += of_unit[1];
        });
        warp_sum<32, 1>(sums);
        if (lane == 0) {
          of_warps[turn % AHEAD].sums[0][warp] = sums[0];
          of_warps[turn % AHEAD].sums[1][warp] = sums[1];
        }
        stages.summed.arrive_in(turn);
      }
      if (turn >= LAG) {
        const int done = turn - LAG;
        X_TYPE* const first_unit = units.first_in(stage_of(done), placed_at(row - LAG * groups).begin);
        stages.known.wait_for(done);
        const Given of = givens[done % AHEAD];
        const OfRow of_row = of_rows[done % AHEAD];
        units.visit([&](int i) {
          X_TYPE* const unit = first_unit + i * Units::APART;
          const Values x = load<X_TYPE, UNIT>(unit), dy = load<X_TYPE, UNIT>(unit + ROOM);
          Values added;
          if constexpr (HAS_DRESIDUAL) added = load<X_TYPE, UNIT>(unit + 2 * ROOM);
          Compute weight[UNIT], bias[UNIT], results[UNIT];
          affine.get(i, weight, bias);
#pragma unroll
          for (int j = 0; j < UNIT; ++j) {
            const Gradient gradient = gradient_of(widen(x, j), widen(dy, j), of.mean, of.rstd, weight[j], bias[j]);
            results[j] = gradient.g * of.rstd + (gradient.xhat * of_row.slope + of_row.offset);
            if constexpr (HAS_DRESIDUAL) results[j] += widen(added, j);
          }
          store(unit, rounded<X_TYPE>(results));
        });
        let_bulk_copies_see();
        stages.finished.arrive_in(done);
      }
    }
  }

  // Write the group's row of sums.
  const long long group_row = part.group * arguments.columns;
  Compute* const gathered = reinterpret_cast<Compute*>(staged);
  if constexpr (WANTS_DWEIGHT) column_sums.write(0, arguments.dweight + group_row, part, units, gathered);
  if constexpr (WANTS_DBIAS) {
    column_sums.write(COLUMN_SUMS - 1, arguments.dbias + group_row, part, units, gathered);
  }
}
