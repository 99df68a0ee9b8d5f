// What a batch norm in training does to the running statistics: it moves them towards those of the batch, in double,
// and rounds them to their own type.

// Those of a channel, as they were, and as they lie in memory: who widens a number waits for it.
struct Running {
  RUNNING_MEAN_TYPE mean;
  RUNNING_VARIANCE_TYPE variance;
};

template <typename T>
__device__ __forceinline__ double in_double(T value) {
  return widen(value);
}
// Compute may have fewer digits.
__device__ __forceinline__ double in_double(double value) { return value; }

// running = kept * running + taken * new. `taken_variance` makes the batch's variance unbiased too, where that is asked
// for.
template <typename KernelArguments>
__device__ __forceinline__ void update_running(const KernelArguments& arguments, const Running& before,
                                               double batch_mean, double batch_variance, long long channel) {
  const double mean = in_double(before.mean), variance = in_double(before.variance);
  narrow(arguments.kept * mean + arguments.taken * batch_mean, arguments.running_mean[channel]);
  narrow(arguments.kept * variance + arguments.taken_variance * batch_variance, arguments.running_var[channel]);
}
