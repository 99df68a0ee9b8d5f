// Gradients of layer norm and RMS norm for rows that lie behind each other in memory, and begin anywhere in it: as
// row_block_backward computes them.
//
// Blocks take turns over runs of ROWS_PER_BLOCK rows (see row_bulk.cuh), each over every gridDim.x-th: STAGES of them
// are in shared memory, of which one is worked on, one is on its way out, and others are on their way in. dx takes the
// place of x. A thread keeps the sums of its columns in registers, and a block leaves one row of partial sums.
//
// Moves x and dy (and dresidual_out) once in and dx once out.
#include "types.cuh"
#include "dependent_launch.cuh"
#include "reduce.cuh"
#include "activation.cuh"
#include "affine.cuh"
#include "bulk_copy.cuh"
#include "row_bulk.cuh"

struct Arguments {
  const X_TYPE* x;
  const X_TYPE* dy;
  const X_TYPE* dresidual_out;
  const WEIGHT_TYPE* weight;
  const BIAS_TYPE* bias;
  const Compute* mean;
  const Compute* rstd;
  X_TYPE* dx;
  DWEIGHT_TYPE* dweight;  // [blocks][columns]: partial sums, or finished ones of one block
  DBIAS_TYPE* dbias;
  long long rows;
  long long columns;  // a multiple of VECTOR, and at least of THREADS_PER_ROW * (VECTORS - 1) vectors
};

static_assert(STAGES >= 2);
constexpr int TENSORS = 2 + HAS_DRESIDUAL;

// The mean and rstd of the rows of a turn, and of the next.
struct RowStatistics {
  Compute mean[2][ROWS_PER_BLOCK];
  Compute rstd[2][ROWS_PER_BLOCK];
};

// What a thread has of dweight or dbias.
using ColumnSums = Compute[VECTORS][VECTOR];

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, MIN_BLOCKS) row_bulk_backward(const Arguments arguments) {
  let_next_launch_begin();
  constexpr int SCRATCH = 2 * ((THREADS_PER_ROW + 31) / 32) * ROWS_AT_ONCE;
  __shared__ Compute scratch[2][SCRATCH];
  __shared__ RowStatistics statistics;
  __shared__ BulkArrival arrivals[STAGES];
  extern __shared__ __align__(BULK_ALIGNMENT) X_TYPE runs[];  // [STAGES][x, dy, dresidual_out]; then sums of columns

  const int columns = static_cast<int>(arguments.columns);
  const unsigned room = room_of_run(ROWS_PER_BLOCK * columns), thread = thread_in_block();
  const long long step = static_cast<long long>(gridDim.x) * ROWS_PER_BLOCK;
  const auto rows_from = [&](long long first_row) {
    const long long left = arguments.rows - first_row;
    return static_cast<unsigned>(left < 0 ? 0 : left < ROWS_PER_BLOCK ? left : ROWS_PER_BLOCK);
  };
  const auto run_from = [&](long long first_row) {
    return run_of(arguments.x, first_row * columns, rows_from(first_row) * columns);
  };
  const auto place_of = [&](const Run& run, int stage, int tensor, const X_TYPE* global) {
    return run.place(runs + (stage * TENSORS + tensor) * room, global);
  };
  const auto clear_from = [&](X_TYPE* run, unsigned first) {
    for (unsigned i = first + thread; i < ROWS_PER_BLOCK * columns; i += BLOCK_THREADS) narrow(Compute{0}, run[i]);
  };
  // Brings in the rows from first_row on; zeros stand where the last run has no rows, which add nothing to the sums.
  const auto fetch = [&](long long first_row, int stage) {
    const Run run = run_from(first_row);
    if (run.length == 0) return;
    X_TYPE* x = place_of(run, stage, 0, arguments.x);
    X_TYPE* dy = place_of(run, stage, 1, arguments.dy);
    X_TYPE* dresidual_out = HAS_DRESIDUAL ? place_of(run, stage, 2, arguments.dresidual_out) : nullptr;
    if (thread == 0) arrivals[stage].expect(TENSORS * run.whole * sizeof(X_TYPE));
    const bool is_short = run.length < ROWS_PER_BLOCK * columns;
    if (is_short) {
      __syncthreads();  // what lay there has been sent, as the first thread knows
      clear_from(x, run.length);
      clear_from(dy, run.length);
      if constexpr (HAS_DRESIDUAL) clear_from(dresidual_out, run.length);
    }
    run.fetch(arrivals[stage], x, arguments.x);
    run.fetch(arrivals[stage], dy, arguments.dy);
    if constexpr (HAS_DRESIDUAL) run.fetch(arrivals[stage], dresidual_out, arguments.dresidual_out);
    if (is_short) __syncthreads();
  };
  long long first_row = static_cast<long long>(blockIdx.x) * ROWS_PER_BLOCK;
  if (thread == 0) {
    for (int i = 0; i < STAGES; ++i) arrivals[i].begin();
  }
#pragma unroll
  for (int i = 0; i < STAGES; ++i) fetch(first_row + i * step, i);
  // A thread has those of one row on their way for a turn.
  Compute next_mean = 0, next_rstd = 0;
  const auto fetch_statistics = [&](long long first) {
    const bool is_there = thread < rows_from(first);
    if constexpr (CENTERED) next_mean = is_there ? arguments.mean[first + thread] : 0;
    next_rstd = is_there ? arguments.rstd[first + thread] : 0;
  };
  const auto put_statistics = [&](int turn) {
    if (thread >= ROWS_PER_BLOCK) return;
    statistics.mean[turn % 2][thread] = next_mean;
    statistics.rstd[turn % 2][thread] = next_rstd;
  };
  fetch_statistics(first_row);
  const Own own = {columns / VECTOR};
  OwnAffine affine;
  affine.load(arguments.weight, arguments.bias, own);
  const Compute scale = reciprocal_of(static_cast<Compute>(columns));
  ColumnSums dweight = {};
  ColumnSums dbias = {};
  put_statistics(0);
  __syncthreads();

  int stage = 0, sums_turn = 0;
  unsigned phase = 0;
  for (int turn = 0; first_row < arguments.rows; first_row += step, ++turn) {
    const Run run = run_from(first_row);
    X_TYPE* x_run = place_of(run, stage, 0, arguments.x);
    const X_TYPE* dy_run = place_of(run, stage, 1, arguments.dy);
    fetch_statistics(first_row + step);
    arrivals[stage].wait(phase);
#pragma unroll 1
    for (int first = 0; first < ROWS_PER_BLOCK; first += ROWS_AT_ONCE, ++sums_turn) {
      const int row = first + static_cast<int>(threadIdx.y);
      const Compute mean = CENTERED ? statistics.mean[turn % 2][row] : 0, rstd = statistics.rstd[turn % 2][row];
      X_TYPE* x = x_run + row * columns;
      const X_TYPE* dy = dy_run + row * columns;
      Compute xhat[VECTORS][VECTOR], g[VECTORS][VECTOR];
      Compute sums[2] = {NOTHING, NOTHING};  // of g, and of g * xhat
#pragma unroll
      for (int i = 0; i < VECTORS; ++i) {
        if (!own.has(i)) continue;
        const Vector<X_TYPE, VECTOR> x_values = load<X_TYPE, VECTOR>(x + own.column(i));
        const Vector<X_TYPE, VECTOR> dy_values = load<X_TYPE, VECTOR>(dy + own.column(i));
        widen_all(x_values, xhat[i]);
        widen_all(dy_values, g[i]);
      }
#pragma unroll
      for (int i = 0; i < VECTORS; ++i) {
        if (!own.has(i)) continue;
        Compute weight[VECTOR] = {}, bias[VECTOR] = {};
        affine.get(i, weight, bias);
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) {
          const Gradient gradient = gradient_of(xhat[i][j], g[i][j], mean, rstd, weight[j], bias[j]);
          if constexpr (WANTS_DWEIGHT) dweight[i][j] += gradient.dz * gradient.xhat;
          if constexpr (WANTS_DBIAS) dbias[i][j] += gradient.dz;
          if constexpr (CENTERED) sums[0] += gradient.g;
          sums[1] += gradient.g * gradient.xhat;
          xhat[i][j] = gradient.xhat;
          g[i][j] = gradient.g;
        }
      }
      if constexpr (!WANTS_DX) continue;
      row_sum<THREADS_PER_ROW>(sums, scratch[sums_turn % 2], threadIdx.y);
      // dx = rstd * (g - mean(g) - xhat * mean(g * xhat)), with what is the same along the row put together.
      const Compute offset = CENTERED ? -sums[0] * scale * rstd : 0, slope = -sums[1] * scale * rstd;
#pragma unroll
      for (int i = 0; i < VECTORS; ++i) {
        if (!own.has(i)) continue;
        Compute results[VECTOR];
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) {
          results[j] = g[i][j] * rstd + (CENTERED ? xhat[i][j] * slope + offset : xhat[i][j] * slope);
        }
        if constexpr (HAS_DRESIDUAL) {
          const X_TYPE* added = place_of(run, stage, 2, arguments.dresidual_out) + row * columns;
          const Vector<X_TYPE, VECTOR> values = load<X_TYPE, VECTOR>(added + own.column(i));
#pragma unroll
          for (int j = 0; j < VECTOR; ++j) results[j] += widen(values, j);
        }
        store(x + own.column(i), rounded<X_TYPE>(results));
      }
    }
    put_statistics(turn + 1);
    let_bulk_copies_see();
    __syncthreads();
    if constexpr (WANTS_DX) run.send(arguments.dx, x_run);
    // The stage of the turn before is filled again: what was sent from there has been on its way for this turn.
    const int before = stage == 0 ? STAGES - 1 : stage - 1;
    if (turn > 0) {
      if (WANTS_DX && thread == 0) wait_for_sent<1>();
      fetch(first_row + (STAGES - 1) * step, before);
    }
    if (++stage == STAGES) {
      stage = 0;
      phase ^= 1;
    }
  }

  // Adds over the threads that have different rows, of which the upper half gives its sums to the lower one until there
  // is one row of them, and writes these.
  if (WANTS_DX && thread == 0) wait_for_sent<0>();
  const auto write_sums = [&](ColumnSums& sums, auto* target) {
    Compute* given = reinterpret_cast<Compute*>(runs);
#pragma unroll 1
    for (int half = ROWS_AT_ONCE / 2; half > 0; half /= 2) {
      const int row = threadIdx.y;
      __syncthreads();
      if (row >= half && row < 2 * half) {
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
#pragma unroll
          for (int j = 0; j < VECTOR; ++j) {
            if (own.has(i)) given[(row - half) * columns + own.column(i) + j] = sums[i][j];
          }
        }
      }
      __syncthreads();
      if (row < half) {
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
#pragma unroll
          for (int j = 0; j < VECTOR; ++j) {
            if (own.has(i)) sums[i][j] += given[row * columns + own.column(i) + j];
          }
        }
      }
    }
    if (threadIdx.y > 0) return;
    target += blockIdx.x * arguments.columns;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
#pragma unroll
      for (int j = 0; j < VECTOR; ++j) {
        if (own.has(i)) narrow(sums[i][j], target[own.column(i) + j]);
      }
    }
  };
  if constexpr (WANTS_DWEIGHT) write_sums(dweight, arguments.dweight);
  if constexpr (WANTS_DBIAS) write_sums(dbias, arguments.dbias);
}
