// The statistics of a set of channels, and the last step of a norm, which takes those of a thread's channels: for
// channel_slab_forward, channel_grid_forward and channel_pipeline_forward.

// What the parts of a slab have of each channel: mean, its remainder, and the sum of squared deviations from it.
constexpr int NUMBERS = 3;

// A set's mean is the sum of two numbers: its rounding alone would show in y where a set lies far from zero.
struct SetStatistics {
  Compute mean;
  Compute mean_remainder;
  Compute rstd;
};

__device__ __forceinline__ SetStatistics set_statistics_of(const Moments& moments, double eps) {
  const Compute mean = static_cast<Compute>(moments.mean);
  return {mean, static_cast<Compute>(moments.mean - mean),
          reciprocal_sqrt(static_cast<Compute>(moments.variance + eps))};
}

// What y is made with: y = activate((x - mean) * scale + shift).
struct Finish {
  Compute means[CHANNEL_VECTOR];
  Compute scales[CHANNEL_VECTOR];
  Compute shifts[CHANNEL_VECTOR];

  Finish() = default;
  __device__ __forceinline__ Finish(const SetStatistics* sets, const Compute (&weight)[CHANNEL_VECTOR],
                                    const Compute (&bias)[CHANNEL_VECTOR]) {
#pragma unroll
    for (int j = 0; j < CHANNEL_VECTOR; ++j) {
      const SetStatistics statistics = sets[set_in_tile(j)];
      means[j] = statistics.mean;
      scales[j] = HAS_WEIGHT ? statistics.rstd * weight[j] : statistics.rstd;
      shifts[j] = (HAS_BIAS ? bias[j] : 0) - statistics.mean_remainder * scales[j];
    }
  }

  __device__ __forceinline__ Vector<X_TYPE, VECTOR> of(const Vector<X_TYPE, VECTOR>& values) const {
    Compute results[VECTOR];
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) {
      const int channel = channel_of(j);
      results[j] = (widen(values, j) - means[channel]) * scales[channel] + shifts[channel];
    }
    activate_all(results);
    return rounded<X_TYPE>(results);
  }
};
