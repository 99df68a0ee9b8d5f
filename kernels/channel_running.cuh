// What a batch norm in training does to the running statistics: it moves them towards those of the batch, in double,
// and rounds them to their own type. Before that they are Compute's, also where their own type has more digits.

// Those of a channel, as they were, and as they lie in memory: who widens a number waits for it.
struct Running {
  RUNNING_MEAN_TYPE mean;
  RUNNING_VARIANCE_TYPE variance;
};

// running = kept * running + taken * new. `taken_variance` makes the batch's variance unbiased too, where that is asked
// for.
template <typename KernelArguments>
__device__ __forceinline__ void update_running(const KernelArguments& arguments, const Running& before,
                                               double batch_mean, double batch_variance, long long channel) {
  const double mean = widen(before.mean), variance = widen(before.variance);
  narrow(arguments.kept * mean + arguments.taken * batch_mean, arguments.running_mean[channel]);
  narrow(arguments.kept * variance + arguments.taken_variance * batch_variance, arguments.running_var[channel]);
}
