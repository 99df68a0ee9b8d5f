// Layer norm and RMS norm of long rows that begin anywhere: as row_pipeline_forward computes them.
//
// Moves x (and the residual) once in, and y (and residual_out) once out; how is in row_stream.cuh.
//
// The statistics are taken in one pass of the differences from a pivot: the mean of a share of what the warp has (see
// row_pipeline_forward.cu).
#include "types.cuh"
#include "grid_words.cuh"
#include "reduce.cuh"
#include "activation.cuh"
#include "affine.cuh"
#include "statistics.cuh"
#include "group_part.cuh"
#include "bulk_copy.cuh"
#include "handover.cuh"
#include "collected.cuh"
constexpr bool ENDS_IN_ZEROS = false;
#include "row_stream.cuh"
#include "row_exchange.cuh"
constexpr bool KEEPS_WIDENED = false;
#include "part_columns.cuh"

struct Arguments {
  const X_TYPE* x;
  const X_TYPE* residual;
  const WEIGHT_TYPE* weight;
  const BIAS_TYPE* bias;
  X_TYPE* y;
  X_TYPE* residual_out;
  Compute* mean;  // null where the statistics are not asked for; so is rstd
  Compute* rstd;
  long long* words;  // see Exchange
  long long word_pairs;
  long long rows;
  long long columns;
  long long columns_per_block;  // whole lines
  long long blocks_per_row;     // divides gridDim.x; at most 32 * PARTS_PER_LANE
  long long stride;             // elements from one row of any tensor to the next
  double eps;
};

// Vectors that give the pivot.
constexpr int PIVOT_VECTORS = (RESIDENT + 3) / 4;

// Of a row, what each warp has of it: the pivot, and the sums of the differences from it and of their squares.
struct OfWarps {
  Compute pivot[WARPS];
  Compute sums[2][WARPS];
};

struct OfRow {
  Compute mean;
  Compute remainder;
  Compute rstd;
};

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 1)
    row_stream_forward(const Arguments arguments) {
  clear_words(arguments.words, arguments.word_pairs);
  __shared__ Stages<HAS_RESIDUAL> stages;  // a row is known when its residual_out has been sent, too
  __shared__ OfWarps of_warps[AHEAD];
  __shared__ OfRow of_rows[AHEAD];
  extern __shared__ __align__(BULK_ALIGNMENT) X_TYPE staged[];  // [AHEAD] of x, [UNDER_WAY] of the residual
  using Values = Vector<X_TYPE, VECTOR>;

  const SharedPart part = part_of_block(arguments.columns, arguments.columns_per_block, arguments.blocks_per_row);
  const long long rows = arguments.rows, groups = part.groups;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const auto placed_at = [&](long long row) { return placed(arguments, part, row); };
  const auto stage_of = [&](int turn) { return staged + turn % AHEAD * ROOM; };
  const auto residual_stage_of = [&](int turn) { return staged + (AHEAD + turn % UNDER_WAY) * ROOM; };
  const Units units(part, placed_at(part.group).begin);
  KeptAffine affine = {};
  Tail tail, residual_tail;
  const auto fetch = [&](int turn, const Placed& of) {
    BulkArrival& arrival = stages.arrived[turn % AHEAD];
    tail.store(stage_of(turn), of);
    if constexpr (HAS_RESIDUAL) residual_tail.store(residual_stage_of(turn), of);
    arrival.expect((1 + HAS_RESIDUAL) * of.bytes_in_bulk());
    fetch_in_bulk(arrival, stage_of(turn), arguments.x, of);
    if constexpr (HAS_RESIDUAL) fetch_in_bulk(arrival, residual_stage_of(turn), arguments.residual, of);
  };
  const auto load_tails = [&](const Placed& of) {
    tail.load(arguments.x, of);
    if constexpr (HAS_RESIDUAL) residual_tail.load(arguments.residual, of);
  };
  if (warp == MOVES && lane == 0) {
    stages.begin();
    for (int turn = 0; turn < UNDER_WAY; ++turn) {
      const long long row = part.group + turn * groups;
      if (row >= rows) break;
      load_tails(placed_at(row));
      fetch(turn, placed_at(row));
    }
  } else if (warp < WARPS) {
    affine.fetch(arguments.weight, arguments.bias, part, units);
  }
  __syncthreads();

  const Exchange<3> exchange(arguments.words, part);
  long long row = part.group;
  if (warp == MOVES) {
    for (int turn = 0; row - LAG * groups < rows; ++turn, row += groups) {
      const long long next_row = row + UNDER_WAY * groups, done_row = row - LAG * groups;
      const Placed next = placed_at(next_row);
      if (lane == 0 && next_row < rows) load_tails(next);
      if (row < rows) {
        stages.summed.wait_for(turn);  // at first, too, so that no more rows are under way than later
        if constexpr (HAS_RESIDUAL) send_part(arguments.residual_out, stage_of(turn), placed_at(row));
      }
      if (turn >= LAG) {
        stages.finished.wait_for(turn - LAG);
        send_part(arguments.y, stage_of(turn - LAG), placed_at(done_row));
      }
      if (lane == 0) wait_for_sent<0>();
      __syncwarp();
      if (lane == 0) {
        if (HAS_RESIDUAL && row < rows) stages.known.arrive_in(turn);
        if (next_row < rows) fetch(turn + UNDER_WAY, next);
      }
    }
  } else if (warp == TELLS) {
    wait_for_words();
    for (int turn = 0; row < rows; ++turn, row += groups) {
      const Compute count = lane < WARPS ? numbers_of_warp<RESIDENT>(lane, placed_at(row)) : 0;
      const Compute scale = count > 0 ? reciprocal_of(count) : 0;
      Compute own[1][3] = {{0, 0, 0}}, shares[1] = {count * reciprocal_of(static_cast<Compute>(part.count))};
      stages.summed.wait_for(turn);
      const OfWarps& of = of_warps[turn % AHEAD];
      if (count > 0) {
        own[0][0] = CENTERED ? of.pivot[lane] : 0;
        own[0][1] = CENTERED ? of.sums[0][lane] * scale : 0;
        own[0][2] = not_negative(of.sums[1][lane] * scale - own[0][1] * own[0][1]);
      }
      const Statistics whole = merged_of_lanes(own, shares);
      stages.known.arrive_in(turn);
      exchange.tell({whole.mean, whole.remainder, whole.variance}, turn);
    }
  } else if (warp == COLLECTS) {
    wait_for_words();
    const Compute of_each = static_cast<Compute>(1) / arguments.columns;  // the share of a number
    Compute shares[PARTS_PER_LANE];                                       // of every 32nd block, each lane
#pragma unroll
    for (int i = 0; i < PARTS_PER_LANE; ++i) {
      const int rank = lane + 32 * i;
      const long long left = arguments.columns - rank * arguments.columns_per_block;
      shares[i] = left > 0 ? min(left, arguments.columns_per_block) * of_each : 0;
    }
    for (int turn = 0; row < rows; ++turn, row += groups) {
      Compute told[PARTS_PER_LANE][3];
      exchange.await(told, turn);
      stages.wait_for_arrival(turn);  // what was told of the row that lay there has been read
      const Statistics whole = merged_of_lanes(told, shares);
      const Compute rstd = reciprocal_sqrt(whole.variance + static_cast<Compute>(arguments.eps));
      if (lane == 0) {
        of_rows[turn % AHEAD] = {whole.mean, whole.remainder, rstd};
        if (part.rank == 0 && arguments.rstd != nullptr) {
          if constexpr (CENTERED) arguments.mean[row] = whole.mean + whole.remainder;
          arguments.rstd[row] = rstd;
        }
      }
      stages.known.arrive_in(turn);
    }
  } else {
    const OwnVectors own_vectors(part.count);
    for (int turn = 0; row - LAG * groups < rows; ++turn, row += groups) {
      if (row < rows) {
        const Placed of = placed_at(row);
        X_TYPE* const own = stage_of(turn) + threadIdx.x * VECTOR;
        stages.wait_for_arrival(turn);
        Values values[RESIDENT];
#pragma unroll
        for (int i = 0; i < RESIDENT; ++i) values[i] = load<X_TYPE, VECTOR>(own + i * STEP);
        if constexpr (HAS_RESIDUAL) {
          const X_TYPE* const residuals = residual_stage_of(turn) + threadIdx.x * VECTOR;
#pragma unroll
          for (int i = 0; i < RESIDENT; ++i) {
            values[i] = sum_of(values[i], load<X_TYPE, VECTOR>(residuals + i * STEP));
            store(own + i * STEP, values[i]);
          }
          let_bulk_copies_see();
        }
        Compute pivot[1] = {0}, sums[2] = {0, 0};
        if constexpr (CENTERED) {
#pragma unroll
          for (int i = 0; i < PIVOT_VECTORS; ++i) {
            own_vectors.visit(i, of, [&](const auto& there) { add_values(values[i], pivot, there); });
          }
          warp_sum<32, 1>(pivot);
          pivot[0] *= reciprocal_of(max(numbers_of_warp<PIVOT_VECTORS>(warp, of), static_cast<Compute>(1)));
        }
#pragma unroll
        for (int i = 0; i < RESIDENT; ++i) {
          own_vectors.visit(i, of, [&](const auto& there) { add_differences(values[i], pivot[0], sums, there); });
        }
        warp_sum<32, 1>(sums);
        if (lane == 0) {
          OfWarps& target = of_warps[turn % AHEAD];
          target.pivot[warp] = pivot[0];
          target.sums[0][warp] = sums[0];
          target.sums[1][warp] = sums[1];
        }
        stages.summed.arrive_in(turn);
      }
      if (turn >= LAG) {
        const int done = turn - LAG;
        X_TYPE* const first_unit = units.first_in(stage_of(done), placed_at(row - LAG * groups).begin);
        stages.known.wait_for(done);
        const OfRow of = of_rows[done % AHEAD];
        units.visit([&](int i) {
          X_TYPE* const unit = first_unit + i * Units::APART;
          Compute weight[UNIT], bias[UNIT];
          affine.get(i, weight, bias);
          store(unit, normalized(load<X_TYPE, UNIT>(unit), of.mean, of.remainder, of.rstd, weight, bias));
        });
        let_bulk_copies_see();
        stages.finished.arrive_in(done);
      }
    }
  }
}
