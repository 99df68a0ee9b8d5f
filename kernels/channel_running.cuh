// What a batch norm in training does to the running statistics: it moves them towards those of the batch, in double,
// rounding once. The variance that they are moved towards is the UNBIASED one, or that which x was normalized with.

// running = kept * running + taken * new, for one channel of so many values.
struct RunningUpdate {
  double kept;
  double taken;

  template <typename M, typename V>
  __device__ __forceinline__ void apply(const Moments& batch, double count, M& mean, V& variance) const {
    const double unbiased = UNBIASED ? batch.variance * (count / (count - 1)) : batch.variance;
    narrow(kept * widen(mean) + taken * batch.mean, mean);
    narrow(kept * widen(variance) + taken * unbiased, variance);
  }
};
