// How channel_* lay samples by channels by points over blocks and threads.
//
// A block takes TILE_CHANNELS channels of one sample and a chunk of their points. A vector lies along the channels
// (ALONG_CHANNELS) or along the points, whichever are contiguous in memory. In the first case neighbouring threads hold
// neighbouring channels of a point, CHANNEL_LANES of them; in the second neighbouring points of a channel, and
// threadIdx.y counts channels. What a tile's threads hold at a time, UNROLL vectors each, is TILE_POINTS long.
constexpr int CHANNEL_VECTOR = ALONG_CHANNELS ? VECTOR : 1;
constexpr int POINT_VECTOR = ALONG_CHANNELS ? 1 : VECTOR;
constexpr int POINT_LANES = THREADS / CHANNEL_LANES;
constexpr int TILE_CHANNELS = CHANNEL_LANES * CHANNEL_VECTOR;
constexpr int TILE_POINTS = POINT_LANES * POINT_VECTOR * UNROLL;

__device__ __forceinline__ int channel_lane() { return ALONG_CHANNELS ? threadIdx.x % CHANNEL_LANES : threadIdx.y; }
__device__ __forceinline__ int point_lane() { return ALONG_CHANNELS ? threadIdx.x / CHANNEL_LANES : threadIdx.x; }
// Which of a thread's channels the j-th element of a vector belongs to.
__device__ __forceinline__ int channel_of(int j) { return ALONG_CHANNELS ? j : 0; }

// The sums of COUNT numbers over the threads that hold the same channels. Scratch: SUM_SCRATCH * COUNT values.
constexpr int SUM_SCRATCH = ALONG_CHANNELS ? THREADS / 32 * CHANNEL_LANES : (POINT_LANES + 31) / 32 * CHANNEL_LANES;

template <int COUNT>
__device__ __forceinline__ void sum_over_points(Compute (&values)[COUNT], Compute* scratch) {
  if constexpr (!ALONG_CHANNELS) return row_sum<POINT_LANES>(values, scratch);
  // A thread has so many numbers that all threads share the work of adding up what the warps have.
  constexpr int NUMBERS = COUNT * CHANNEL_LANES;
  warp_sum<32, CHANNEL_LANES>(values);
  if (threadIdx.x % 32 < CHANNEL_LANES) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      scratch[threadIdx.x / 32 * NUMBERS + i * CHANNEL_LANES + channel_lane()] = values[i];
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < NUMBERS; i += THREADS) {
#pragma unroll
    for (int warp = 1; warp < THREADS / 32; ++warp) scratch[i] += scratch[warp * NUMBERS + i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < COUNT; ++i) values[i] = scratch[i * CHANNEL_LANES + channel_lane()];
}

// Adds what one vector has to a thread's sums: add(j, sums) does so for its j-th element. Along the points, a vector is
// summed by itself first: less rounding, shorter chains.
template <int COUNT, typename Add>
__device__ __forceinline__ void add_vector(Compute (&sums)[COUNT], const Add& add) {
  if constexpr (ALONG_CHANNELS) {
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) add(j, sums);
  } else {
    Compute parts[COUNT] = {};
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) add(j, parts);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) sums[i] += parts[i];
  }
}

// What a block works on: neighbouring blocks take neighbouring channels of the same points.
struct Chunk {
  long long sample;
  long long split;
  long long channel;  // the first of this thread
  bool there;         // whether it is
  long long first_point;
  long long end_point;  // one past the last

  __device__ __forceinline__ long long points() const { return end_point - first_point; }
};

__device__ __forceinline__ Chunk chunk_of_block(unsigned block, long long channels, long long points, long long splits,
                                                long long points_per_split) {
  const unsigned tiles = static_cast<unsigned>((channels + TILE_CHANNELS - 1) / TILE_CHANNELS);
  const unsigned rest = block / tiles, split = rest % static_cast<unsigned>(splits);
  Chunk chunk;
  chunk.sample = rest / static_cast<unsigned>(splits);
  chunk.split = split;
  chunk.channel = static_cast<long long>(block % tiles) * TILE_CHANNELS + channel_lane() * CHANNEL_VECTOR;
  chunk.there = chunk.channel < channels;
  chunk.first_point = split * points_per_split;
  chunk.end_point = min(chunk.first_point + points_per_split, points);
  return chunk;
}

// A thread's way over its points of a chunk. A point is a mixed-radix number over the sizes of the dimensions that could
// not be merged; from one vector to the next it grows by as much each time, so only the first is divided up.
struct Walk {
  long long point;
  long long digits[POINT_DIMS];
  long long steps[POINT_DIMS];

  __device__ __forceinline__ long long offset(const long long (&strides)[POINT_DIMS]) const {
    long long offset = 0;
#pragma unroll
    for (int i = 0; i < POINT_DIMS; ++i) offset += digits[i] * strides[i];
    return offset;
  }

  __device__ __forceinline__ void advance(const long long (&sizes)[POINT_DIMS]) {
    point += POINT_LANES * POINT_VECTOR;
#pragma unroll
    for (int i = POINT_DIMS - 1; i >= 0; --i) {
      digits[i] += steps[i];
      if (i > 0 && digits[i] >= sizes[i]) {
        digits[i] -= sizes[i];
        ++digits[i - 1];
      }
    }
  }
};

__device__ __forceinline__ void to_digits(long long number, const long long (&sizes)[POINT_DIMS],
                                          long long (&digits)[POINT_DIMS]) {
#pragma unroll
  for (int i = POINT_DIMS - 1; i > 0; --i) {
    digits[i] = number % sizes[i];
    number /= sizes[i];
  }
  digits[0] = number;
}

__device__ __forceinline__ Walk walk_over(const Chunk& chunk, const long long (&sizes)[POINT_DIMS]) {
  Walk walk;
  walk.point = chunk.first_point + point_lane() * POINT_VECTOR;
  to_digits(walk.point, sizes, walk.digits);
  to_digits(POINT_LANES * POINT_VECTOR, sizes, walk.steps);
  return walk;
}
