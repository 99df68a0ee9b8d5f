// The last step of a norm by channels, which takes the statistics of the sets of a thread's channels: for
// channel_slab_forward, channel_grid_forward, channel_pipeline_forward and channel_split_forward.

// What y is made with: y = activate((x - mean) * scale + shift).
struct Finish {
  Compute means[CHANNEL_VECTOR];
  Compute scales[CHANNEL_VECTOR];
  Compute shifts[CHANNEL_VECTOR];

  Finish() = default;
  // statistics_of(j) are those of the set that the thread's j-th channel is of.
  template <typename StatisticsOf>
  __device__ __forceinline__ Finish(const StatisticsOf& statistics_of, const Compute (&weight)[CHANNEL_VECTOR],
                                    const Compute (&bias)[CHANNEL_VECTOR]) {
#pragma unroll
    for (int j = 0; j < CHANNEL_VECTOR; ++j) {
      const SetStatistics statistics = statistics_of(j);
      means[j] = statistics.mean;
      scales[j] = HAS_WEIGHT ? statistics.rstd * weight[j] : statistics.rstd;
      shifts[j] = (HAS_BIAS ? bias[j] : 0) - statistics.mean_remainder * scales[j];
    }
  }

  // Of a vector, or less of it.
  template <int COUNT>
  __device__ __forceinline__ Vector<X_TYPE, COUNT> of(const Vector<X_TYPE, COUNT>& values) const {
    Compute results[COUNT];
#pragma unroll
    for (int j = 0; j < COUNT; ++j) {
      const int channel = channel_of(j);
      results[j] = (widen(values, j) - means[channel]) * scales[channel] + shifts[channel];
    }
    activate_all(results);
    return rounded<X_TYPE>(results);
  }
};
