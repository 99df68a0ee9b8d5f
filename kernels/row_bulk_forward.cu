// Layer norm and RMS norm of rows that lie behind each other in memory, and begin anywhere in it: as row_block_forward
// computes them.
//
// A block has ROWS_PER_BLOCK rows, and its results take the place of what came (see row_bulk.cuh).
//
// Moves x (and the residual) once in, and y (and residual_out) once out.
#include "types.cuh"
#include "reduce.cuh"
#include "activation.cuh"
#include "affine.cuh"
#include "statistics.cuh"
#include "bulk_copy.cuh"
#include "row_bulk.cuh"

struct Arguments {
  const X_TYPE* x;
  const X_TYPE* residual;
  const WEIGHT_TYPE* weight;
  const BIAS_TYPE* bias;
  X_TYPE* y;
  X_TYPE* residual_out;
  Compute* mean;  // null where the statistics are not asked for; so is rstd
  Compute* rstd;
  long long rows;
  long long columns;  // a multiple of VECTOR, and at least of THREADS_PER_ROW * (VECTORS - 1) vectors
  double eps;
};

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, MIN_BLOCKS) row_bulk_forward(const Arguments arguments) {
  constexpr int SCRATCH = 2 * ((THREADS_PER_ROW + 31) / 32) * ROWS_AT_ONCE;
  __shared__ Compute scratch[2][SCRATCH];
  __shared__ Compute means[HAS_STATISTICS ? ROWS_PER_BLOCK : 1];
  __shared__ Compute rstds[HAS_STATISTICS ? ROWS_PER_BLOCK : 1];
  __shared__ BulkArrival arrival;
  extern __shared__ __align__(BULK_ALIGNMENT) X_TYPE runs[];  // x's, then the residual's

  const int columns = static_cast<int>(arguments.columns);
  const long long first_row = static_cast<long long>(blockIdx.x) * ROWS_PER_BLOCK, left = arguments.rows - first_row;
  const unsigned rows = left < ROWS_PER_BLOCK ? static_cast<unsigned>(left) : ROWS_PER_BLOCK;
  const Run run = run_of(arguments.x, first_row * columns, rows * columns);
  // Results take the place of what came: y that of x, residual_out that of the residual.
  X_TYPE* x_run = run.place(runs, arguments.x);
  X_TYPE* residual_run = run.place(runs + room_of_run(ROWS_PER_BLOCK * columns), arguments.residual);
  if (thread_in_block() == 0) {
    arrival.begin();
    arrival.expect((1 + HAS_RESIDUAL) * run.whole * sizeof(X_TYPE));
  }
  run.fetch(arrival, x_run, arguments.x);
  if constexpr (HAS_RESIDUAL) run.fetch(arrival, residual_run, arguments.residual);
  const Own own = {columns / VECTOR};
  OwnAffine affine;
  affine.load(arguments.weight, arguments.bias, own);
  const Compute scale = reciprocal_of(static_cast<Compute>(columns));
  __syncthreads();
  arrival.wait(0);

#pragma unroll 1
  for (int turn = 0; turn < ROWS_PER_BLOCK / ROWS_AT_ONCE; ++turn) {
    // Past the last row there is room for others, and nothing in it that matters.
    const int row = turn * ROWS_AT_ONCE + static_cast<int>(threadIdx.y);
    X_TYPE* numbers = x_run + row * columns;
    Vector<X_TYPE, VECTOR> values[VECTORS];
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      if (own.has(i)) values[i] = load<X_TYPE, VECTOR>(numbers + own.column(i));
    }
    if constexpr (HAS_RESIDUAL) {
      X_TYPE* residuals = residual_run + row * columns;
#pragma unroll
      for (int i = 0; i < VECTORS; ++i) {
        if (!own.has(i)) continue;
        values[i] = sum_of(values[i], load<X_TYPE, VECTOR>(residuals + own.column(i)));
        store(residuals + own.column(i), values[i]);
      }
    }
    Statistics statistics = {0, 0, 0};
    if constexpr (CENTERED) {
      Compute sum[1] = {NOTHING};
#pragma unroll
      for (int i = 0; i < VECTORS; ++i) {
        if (own.has(i)) add_values(values[i], sum);
      }
      row_sum<THREADS_PER_ROW>(sum, scratch[0], threadIdx.y);
      statistics.mean = sum[0] * scale;
#pragma unroll
      for (int i = 0; i < VECTORS; ++i) forget_widened(values[i]);
    }
    // Numbers one by one in two halves: 32 squares one after the other would be rounded by up to 4e-7.
    Compute sums[2] = {NOTHING, NOTHING}, of_second_half[2] = {NOTHING, NOTHING};
    constexpr bool HALVES = VECTOR == 1 && VECTORS > 1;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      const bool is_second = HALVES && i >= VECTORS / 2;
      if (own.has(i)) add_differences(values[i], statistics.mean, is_second ? of_second_half : sums);
    }
    if constexpr (HALVES) {
      sums[0] += of_second_half[0];
      sums[1] += of_second_half[1];
    }
    if constexpr (CENTERED) {
      row_sum<THREADS_PER_ROW>(sums, scratch[1], threadIdx.y);
      statistics.remainder = sums[0] * scale;
    } else {
      Compute squares[1] = {sums[1]};
      row_sum<THREADS_PER_ROW>(squares, scratch[turn % 2], threadIdx.y);
      sums[1] = squares[0];
    }
    statistics.variance = not_negative(sums[1] * scale - statistics.remainder * statistics.remainder);
    const Compute rstd = reciprocal_sqrt(statistics.variance + static_cast<Compute>(arguments.eps));
    if (HAS_STATISTICS && threadIdx.x == 0) {
      means[row] = statistics.mean + statistics.remainder;
      rstds[row] = rstd;
    }
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) forget_widened(values[i]);
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      if (!own.has(i)) continue;
      Compute weight[VECTOR], bias[VECTOR];
      affine.get(i, weight, bias);
      store(numbers + own.column(i),
            normalized(values[i], statistics.mean, statistics.remainder, rstd, weight, bias));
    }
  }
  let_bulk_copies_see();
  __syncthreads();
  run.send(arguments.y, x_run);
  if constexpr (HAS_RESIDUAL) run.send(arguments.residual_out, residual_run);
  // Only now: that copies may see what is in shared memory waits for what was stored elsewhere too.
  if constexpr (HAS_STATISTICS) {
    const unsigned row = thread_in_block();
    if (row < rows) {
      if constexpr (CENTERED) arguments.mean[first_row + row] = means[row];
      arguments.rstd[first_row + row] = rstds[row];
    }
  }
  if (thread_in_block() == 0) wait_for_sent<0>();
}
