// Merges the chunk statistics of channel_split_statistics into the mean and rstd of each set of channels: SET_LANES
// threads a set. Set s has the channels from s * channels_per_set on, counted over all samples. A set without points
// has NaN for both, as np.mean has. Where running statistics are to be updated, they are those of single channels.
//
// The rows of row_split_statistics are samples of one channel each. For RMS norm their chunks' means are 0 and their
// deviations sums of squares, and the same rule gives the mean square.
#include "types.cuh"
#include "dependent_launch.cuh"
#include "channel_merge.cuh"
#include "channel_running.cuh"
#include "set_statistics.cuh"

struct Arguments {
  const double* chunk_means;       // [samples][splits][channels]
  const double* chunk_deviations;  // likewise
  const double* chunk_counts;      // likewise, of points; null where all chunks have as many, but for the last
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
  double taken_variance;
};

extern "C" __global__ void __launch_bounds__(SET_LANES * SETS_PER_BLOCK, 1) split_merge(const Arguments arguments) {
  let_next_launch_begin();
  __shared__ double scratch[2 * ((SET_LANES + 31) / 32)];
  const long long set = static_cast<long long>(blockIdx.x) * SETS_PER_BLOCK + threadIdx.y;
  const long long parts = set < arguments.sets ? arguments.splits * arguments.channels_per_set : 0;
  const long long first_channel = set * arguments.channels_per_set;
  const long long sample = first_channel / arguments.channels;
  const long long first = sample * arguments.splits * arguments.channels + first_channel % arguments.channels;
  wait_for_earlier_launches();

  // The thread's parts are among the channels of the first chunk, then those of the next.
  const auto for_each_part = [&](auto use) {
    const auto use_part = [&](long long split, long long channel) {
      const long long left = arguments.points - split * arguments.points_per_split;
      const long long place = first + split * arguments.channels + channel;
      const double count = arguments.chunk_counts != nullptr
                               ? arguments.chunk_counts[place]
                               : static_cast<double>(min(left, arguments.points_per_split));
      use(count, arguments.chunk_means[place], arguments.chunk_deviations[place]);
    };
    if (arguments.channels_per_set == 1) {
#pragma unroll 4
      for (long long split = threadIdx.x; split < parts; split += SET_LANES) use_part(split, 0);
      return;
    }
    long long split = threadIdx.x / arguments.channels_per_set, channel = threadIdx.x % arguments.channels_per_set;
    for (long long part = threadIdx.x; part < parts; part += SET_LANES) {
      use_part(split, channel);
      channel += SET_LANES;
      while (channel >= arguments.channels_per_set) {
        channel -= arguments.channels_per_set;
        ++split;
      }
    }
  };
  const double count = static_cast<double>(arguments.points * arguments.channels_per_set);
  const double pivot = parts > 0 ? arguments.chunk_means[first] : 0;
  const Moments moments = merged<SET_LANES>(1 / count, pivot, scratch, for_each_part);

  if (threadIdx.x > 0 || set >= arguments.sets) return;
  const SetStatistics statistics = set_statistics_of(moments.mean, moments.variance, arguments.eps);
  arguments.mean[set] = statistics.mean;
  if constexpr (WANTS_VARIANCE) {
    arguments.rstd[set] = static_cast<Compute>(moments.variance);
  } else {
    arguments.mean_remainder[set] = statistics.mean_remainder;
    arguments.rstd[set] = statistics.rstd;
  }
  if constexpr (UPDATES_RUNNING) {
    const Running before = {arguments.running_mean[set], arguments.running_var[set]};
    update_running(arguments, before, moments.mean, moments.variance, set);
  }
}
