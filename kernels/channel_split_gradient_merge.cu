// Adds up the chunk sums of channel_split_gradient_sums, in double and in a fixed order: over the samples for dweight
// and dbias, and over the channels of each set, times their weights, for the two means that dx needs. ITEM_LANES
// threads take one channel or one set; the channels come first.
#include "types.cuh"
#include "dependent_launch.cuh"
#include "channel_merge.cuh"

struct Arguments {
  const Compute* sums;  // [samples][splits][2][channels]: of dz, of dz * xhat
  const WEIGHT_TYPE* weight;
  Compute* means;  // [2][sets]: of g = dz * weight, of g * xhat
  DWEIGHT_TYPE* dweight;
  DBIAS_TYPE* dbias;
  long long wanted_channels;  // channels, or 0 where neither dweight nor dbias is wanted
  long long sets;             // or 0 where the means are not
  long long channels;
  long long channels_per_set;
  long long samples;
  long long splits;
  long long points;
};

extern "C" __global__ void __launch_bounds__(ITEM_LANES * ITEMS_PER_BLOCK, 1)
    channel_split_gradient_merge(const Arguments arguments) {
  let_next_launch_begin();
  __shared__ double scratch[2 * ((ITEM_LANES + 31) / 32)];
  const long long item = static_cast<long long>(blockIdx.x) * ITEMS_PER_BLOCK + threadIdx.y;
  const long long set = item - arguments.wanted_channels;
  const bool is_set = set >= 0;
  const long long row = 2 * arguments.channels;  // of the sums, a chunk each
  // A channel has a part in every chunk of every sample; a set all of its channels' in those of one sample.
  const long long per_chunk = is_set ? arguments.channels_per_set : 1;
  long long parts = is_set ? arguments.splits * per_chunk : arguments.samples * arguments.splits, first = item;
  long long first_channel = 0;  // of a set, in its sample
  if (is_set) {
    const long long sample = set * per_chunk / arguments.channels;
    first_channel = set * per_chunk - sample * arguments.channels;
    first = sample * arguments.splits * row + first_channel;
    if (set >= arguments.sets) parts = 0;
  }
  wait_for_earlier_launches();

  double sums[2] = {0, 0};
  const auto add = [&](long long chunk, long long channel) {
    const long long place = first + chunk * row + channel;
    const double weight = HAS_WEIGHT && is_set ? widen(arguments.weight[first_channel + channel]) : 1;
    sums[0] += weight * arguments.sums[place];
    sums[1] += weight * arguments.sums[place + arguments.channels];
  };
  if (per_chunk == 1) {
#pragma unroll 4
    for (long long part = threadIdx.x; part < parts; part += ITEM_LANES) add(part, 0);
  } else {
    long long chunk = threadIdx.x / per_chunk, channel = threadIdx.x % per_chunk;
    for (long long part = threadIdx.x; part < parts; part += ITEM_LANES) {
      add(chunk, channel);
      channel += ITEM_LANES;
      while (channel >= per_chunk) {
        channel -= per_chunk;
        ++chunk;
      }
    }
  }
  total_over<ITEM_LANES>(sums, scratch);

  if (threadIdx.x > 0) return;
  if (!is_set) {
    if constexpr (WANTS_DWEIGHT) narrow(sums[1], arguments.dweight[item]);
    if constexpr (WANTS_DBIAS) narrow(sums[0], arguments.dbias[item]);
  } else if (set < arguments.sets) {
    const double count = static_cast<double>(arguments.points * per_chunk);
    arguments.means[set] = static_cast<Compute>(sums[0] / count);
    arguments.means[arguments.sets + set] = static_cast<Compute>(sums[1] / count);
  }
}
