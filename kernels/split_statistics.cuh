// The statistics of a row of row_split_*, or a set of channel_split_*, from those that were worked out in double. The
// mean is kept as the sum of two numbers, mean + mean_remainder: its rounding alone would show in y where the data lie
// far from zero.
struct SplitStatistics {
  Compute mean;
  Compute mean_remainder;
  Compute rstd;
};

__device__ __forceinline__ SplitStatistics split_statistics_of(double mean, double variance, double eps) {
  const Compute rounded_mean = static_cast<Compute>(mean);
  return {rounded_mean, static_cast<Compute>(mean - rounded_mean), static_cast<Compute>(1.0 / sqrt(variance + eps))};
}
