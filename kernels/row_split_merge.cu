// Merges the chunk statistics of row_split_statistics into the mean and rstd of each row: a warp a row, in double.
//
// Chan, Golub and LeVeque's rule for many parts at once: the squared deviation of the whole is that of the parts, plus
// the squared deviation of their means. A row of no columns has NaN for both, as np.mean has.
// For RMS norm the chunks' means are 0 and their deviations sums of squares, and the same rule gives the mean square.
#include "types.cuh"
#include "dependent_launch.cuh"
#include "split_statistics.cuh"

struct Arguments {
  const double* chunk_means;       // [rows][splits]
  const double* chunk_deviations;  // [rows][splits]
  Compute* mean;
  Compute* mean_remainder;
  Compute* rstd;
  long long rows;
  long long columns;
  long long splits;
  long long columns_per_split;
  double eps;
};

__device__ __forceinline__ double warp_total(double value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
  return value;
}

extern "C" __global__ void __launch_bounds__(32 * ROWS_PER_BLOCK, 1) row_split_merge(const Arguments arguments) {
  let_next_launch_begin();
  wait_for_earlier_launches();
  const long long row = static_cast<long long>(blockIdx.x) * ROWS_PER_BLOCK + threadIdx.y;
  if (row >= arguments.rows) return;  // a whole warp at a time
  const double* means = arguments.chunk_means + row * arguments.splits;
  const double* deviations = arguments.chunk_deviations + row * arguments.splits;
  const auto count_of = [&](long long split) {
    const long long left = arguments.columns - split * arguments.columns_per_split;
    return static_cast<double>(left < arguments.columns_per_split ? left : arguments.columns_per_split);
  };

  double sum = 0;
  for (long long split = threadIdx.x; split < arguments.splits; split += 32) sum += count_of(split) * means[split];
  const double mean = warp_total(sum) / static_cast<double>(arguments.columns);

  double deviation = 0;
  for (long long split = threadIdx.x; split < arguments.splits; split += 32) {
    const double difference = means[split] - mean;
    deviation += deviations[split] + count_of(split) * difference * difference;
  }
  const double variance = warp_total(deviation) / static_cast<double>(arguments.columns);

  if (threadIdx.x == 0) {
    const SplitStatistics statistics = split_statistics_of(mean, variance, arguments.eps);
    arguments.mean[row] = statistics.mean;
    arguments.mean_remainder[row] = statistics.mean_remainder;
    arguments.rstd[row] = statistics.rstd;
  }
}
