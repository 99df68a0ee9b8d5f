// Merges the chunk statistics of channel_statistics into the mean and rstd of each set of channels: SET_LANES threads a
// set, in double. Set s has the channels from s * channels_per_set on, counted over all samples.
//
// Chan, Golub and LeVeque's rule for many parts at once: the squared deviation of the whole is that of the parts, plus
// the squared deviation of their means. A set without points has NaN for both, as np.mean has. Where running statistics
// are to be updated, they are those of single channels: running = kept * running + taken * new.
#include "types.cuh"
#include "dependent_launch.cuh"
#include "split_statistics.cuh"

struct Arguments {
  const double* chunk_means;       // [samples][splits][channels]
  const double* chunk_deviations;  // likewise
  Compute* mean;                   // [sets]
  Compute* mean_remainder;
  Compute* rstd;  // the variance, where WANTS_VARIANCE
  RUNNING_MEAN_TYPE* running_mean;
  RUNNING_VARIANCE_TYPE* running_var;
  long long sets;
  long long channels;
  long long channels_per_set;
  long long points;
  long long splits;
  long long points_per_split;
  double eps;
  double kept;
  double taken;
};

// The sum over the threads of a set.
__device__ __forceinline__ double set_total(double value) {
#pragma unroll
  for (int offset = SET_LANES / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
  return value;
}

extern "C" __global__ void __launch_bounds__(SET_LANES * SETS_PER_BLOCK, 1) channel_merge(const Arguments arguments) {
  let_next_launch_begin();
  wait_for_earlier_launches();
  const long long set = static_cast<long long>(blockIdx.x) * SETS_PER_BLOCK + threadIdx.y;
  const long long parts = set < arguments.sets ? arguments.splits * arguments.channels_per_set : 0;
  const long long first_channel = set * arguments.channels_per_set;
  const long long sample = first_channel / arguments.channels;
  const long long first = sample * arguments.splits * arguments.channels + first_channel % arguments.channels;

  // Calls visit(place, points) for this thread's parts: the channels of the first chunk, then those of the next.
  const auto for_each_part = [&](auto visit) {
    long long split = threadIdx.x / arguments.channels_per_set, channel = threadIdx.x % arguments.channels_per_set;
#pragma unroll 4
    for (long long part = threadIdx.x; part < parts; part += SET_LANES) {
      const long long left = arguments.points - split * arguments.points_per_split;
      visit(first + split * arguments.channels + channel,
            static_cast<double>(min(left, arguments.points_per_split)));
      channel += SET_LANES;
      while (channel >= arguments.channels_per_set) {
        channel -= arguments.channels_per_set;
        ++split;
      }
    }
  };
  const double count = static_cast<double>(arguments.points * arguments.channels_per_set);
  double sum = 0;
  for_each_part([&](long long place, double points) { sum += points * arguments.chunk_means[place]; });
  const double mean = set_total(sum) / count;
  double deviation = 0;
  for_each_part([&](long long place, double points) {
    const double difference = arguments.chunk_means[place] - mean;
    deviation += arguments.chunk_deviations[place] + points * difference * difference;
  });
  const double variance = set_total(deviation) / count;

  if (threadIdx.x > 0 || set >= arguments.sets) return;
  const RowStatistics statistics = row_statistics_of(mean, variance, arguments.eps);
  arguments.mean[set] = statistics.mean;
  if constexpr (WANTS_VARIANCE) {
    arguments.rstd[set] = static_cast<Compute>(variance);
  } else {
    arguments.mean_remainder[set] = statistics.mean_remainder;
    arguments.rstd[set] = statistics.rstd;
  }
  if constexpr (UPDATES_RUNNING) {
    const double new_variance = UNBIASED ? variance * (count / (count - 1)) : variance;
    const double old_mean = widen(arguments.running_mean[set]), old_variance = widen(arguments.running_var[set]);
    narrow(arguments.kept * old_mean + arguments.taken * mean, arguments.running_mean[set]);
    narrow(arguments.kept * old_variance + arguments.taken * new_variance, arguments.running_var[set]);
  }
}
