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

// running = kept * running + taken * new. `taken_variance` makes the batch's variance unbiased too, where that is asked
// for.
template <typename KernelArguments>
__device__ __forceinline__ void update_running(const KernelArguments& arguments, const Running& before,
                                               const Moments& batch, long long channel) {
  narrow(arguments.kept * before.mean + arguments.taken * batch.mean, arguments.running_mean[channel]);
  narrow(arguments.kept * before.variance + arguments.taken_variance * batch.variance, arguments.running_var[channel]);
}
