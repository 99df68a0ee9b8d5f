// What a batch norm in training does to the running statistics: it moves them towards those of the batch, in double,
// and rounds them to their own type. Before that they are Compute's, also where their own type has more digits.

// Those of a channel, as they were.
struct Running {
  double mean;
  double variance;
};

template <typename M, typename V>
__device__ __forceinline__ Running load_running(const M* mean, const V* variance, long long channel) {
  return {static_cast<double>(widen(mean[channel])), static_cast<double>(widen(variance[channel]))};
}

// running = kept * running + taken * new.
struct RunningUpdate {
  double kept;
  double taken;
  double taken_variance;  // makes the batch's variance unbiased too, where that is asked for

  template <typename M, typename V>
  __device__ __forceinline__ void store(const Running& before, const Moments& batch, M* mean, V* variance,
                                        long long channel) const {
    narrow(kept * before.mean + taken * batch.mean, mean[channel]);
    narrow(kept * before.variance + taken_variance * batch.variance, variance[channel]);
  }
};
