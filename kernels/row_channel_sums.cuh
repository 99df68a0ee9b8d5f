// What row_block_backward adds up where weights are by channel (see row_channels.cuh): sums over each channel of a row,
// which column_sums then adds over samples.

// Where a sum over one of a row's channels goes, or over the block's part of one.
__device__ __forceinline__ long long place_of_sum(const Channels& channels, long long row, unsigned channel) {
  const long long place = row * channels.channels_per_row + channel;
  const unsigned parts = BLOCKS_PER_ROW / channels.channels_per_row;
  if (BLOCKS_PER_ROW == 1 || parts <= 1) return place;
  const long long parts_before = channels.sample_of(row) * (parts - 1) + static_cast<unsigned>(rank_in_row()) % parts;
  return place + parts_before * channels.rows_per_sample * channels.channels_per_row;
}

// The sums of dz and of dz * xhat over each channel of the block's part of a row, where that has several. SEGMENT
// neighbouring threads and STEPS consecutive vectors of each lie in one channel: what they have is an entry in shared
// memory. The entries of a channel lie behind each other, and LANES threads add them up. Where channels may begin
// within vectors, each vector has an entry, for the channel that it begins in, and each channel a head: what the vector
// before its first one has of it. A __syncthreads() must lie between what is added in one turn and what is added up;
// with one a turn, two sets of entries used in turn are enough.
struct ChannelSums {
  static constexpr int STEP_ENTRIES = THREADS_PER_ROW / SEGMENT;
  static constexpr int ENTRIES = VECTORS / STEPS * STEP_ENTRIES;  // of a row
  static constexpr int ENTRY_COLUMNS = SEGMENT * STEPS * VECTOR;

  Compute* entries;      // [2][2][ROWS_PER_BLOCK][ENTRIES]; behind them heads, [channels][2][2][ROWS_PER_BLOCK]
  Compute sums[2] = {};  // of the thread, since the last entry

  __device__ __forceinline__ Compute* entries_of(int turn, int which) const {
    return entries + ((turn % 2 * 2 + which) * ROWS_PER_BLOCK + row_in_block()) * ENTRIES;
  }

  __device__ __forceinline__ Compute& head_of(int channel, int turn, int which) const {
    const int place = ((channel * 2 + turn % 2) * 2 + which) * ROWS_PER_BLOCK + row_in_block();
    return entries[4 * ROWS_PER_BLOCK * ENTRIES + place];
  }

  // Adds those of the thread's i-th vector: `own` of the channel that it begins in, and where it is `crossed`, `next`
  // of the one that begins in it, which is so many channels into the block's part.
  __device__ __forceinline__ void add(int turn, int i, const Compute (&own)[2], const Compute (&next)[2], bool crossed,
                                      int next_channel) const {
    static_assert(weights_of != WeightsOf::crossing || (SEGMENT == 1 && STEPS == 1));
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      entries_of(turn, which)[i * THREADS_PER_ROW + static_cast<int>(threadIdx.x)] = own[which];
      if (crossed) head_of(next_channel, turn, which) = next[which];
    }
  }

  // Adds those of the thread's i-th vector: for i from zero up, in all threads.
  __device__ __forceinline__ void add(int turn, int i, const Compute (&own)[2]) {
    sums[0] += own[0];
    sums[1] += own[1];
    if ((i + 1) % STEPS > 0) return;
    warp_sum<SEGMENT, 1>(sums);
    if (threadIdx.x % SEGMENT == 0) {
      const int entry = i / STEPS * STEP_ENTRIES + static_cast<int>(threadIdx.x) / SEGMENT;
      entries_of(turn, 0)[entry] = sums[0];
      entries_of(turn, 1)[entry] = sums[1];
    }
    sums[0] = sums[1] = 0;
  }

  // Calls use(channel, sum of dz, sum of dz * xhat) for each of so many channels, in one thread.
  template <typename Use>
  __device__ __forceinline__ void for_each(int turn, int channels, int positions, const Use& use) const {
    const int lane = threadIdx.x % LANES;
    for (int first = 0; first < channels; first += THREADS_PER_ROW / LANES) {
      const int channel = first + static_cast<int>(threadIdx.x) / LANES;
      Compute total[2] = {0, 0};
      if constexpr (weights_of == WeightsOf::crossing) {
        const int begin = channel * positions, end = begin + positions;
        for (int i = (begin + VECTOR - 1) / VECTOR + lane; channel < channels && i * VECTOR < end; i += LANES) {
          total[0] += entries_of(turn, 0)[i];
          total[1] += entries_of(turn, 1)[i];
        }
        if (channel < channels && lane == 0 && begin % VECTOR > 0) {
          total[0] += head_of(channel, turn, 0);
          total[1] += head_of(channel, turn, 1);
        }
      } else {
        const int count = positions / ENTRY_COLUMNS;
        for (int i = lane; channel < channels && i < count; i += LANES) {
          total[0] += entries_of(turn, 0)[channel * count + i];
          total[1] += entries_of(turn, 1)[channel * count + i];
        }
      }
      warp_sum<LANES, 1>(total);
      if (channel < channels && lane == 0) use(channel, total[0], total[1]);
    }
  }
};
