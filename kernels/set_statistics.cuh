// The statistics of what is normalized together: a set of channels, or a row of row_split_*. The mean is kept as the
// sum of two numbers, mean + mean_remainder: its rounding alone would show in y where the data lie far from zero.
struct SetStatistics {
  Compute mean;
  Compute mean_remainder;
  Compute rstd;
};

// From those that were worked out in double, with an rstd that is rounded once.
__device__ __forceinline__ SetStatistics set_statistics_of(double mean, double variance, double eps) {
  const Compute rounded_mean = static_cast<Compute>(mean);
  return {rounded_mean, static_cast<Compute>(mean - rounded_mean), static_cast<Compute>(1.0 / sqrt(variance + eps))};
}
