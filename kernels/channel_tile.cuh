// How channel_* lay samples by channels by points over blocks and threads.
//
// A block takes TILE_CHANNELS channels of one sample and a chunk of their points. A vector lies along the channels
// (ALONG_CHANNELS) or along the points, whichever are contiguous in memory. In the first case neighbouring threads hold
// neighbouring channels of a point, CHANNEL_LANES of them; in the second neighbouring points of a channel, and
// threadIdx.y counts channels.
//
// Where each channel has PLANE > 1 points side by side, its plane, and those of the next lie right behind them, vectors
// may lie along all planes of the tile, from one into the next: for planes too short or odd for vectors of their own. A
// thread then goes on by whole planes. As few sizes of planes make lanes that fill warps, some threads hold nothing.
constexpr int CHANNEL_VECTOR = ALONG_CHANNELS ? VECTOR : 1;  // channels that a thread's numbers may belong to
constexpr int PER_CHANNEL = VECTOR / CHANNEL_VECTOR;         // numbers of a vector that surely belong to one
constexpr int POINT_VECTOR = ALONG_CHANNELS ? PLANE : VECTOR;
constexpr int POINT_LANES = THREADS / CHANNEL_LANES;
constexpr int HOLDERS = POINT_LANES * CHANNEL_LANES;  // threads that hold something
constexpr int TILE_CHANNELS = CHANNEL_LANES * CHANNEL_VECTOR / PLANE;

__device__ __forceinline__ int thread_in_block() {
  return ALONG_CHANNELS ? threadIdx.x : threadIdx.y * POINT_LANES + threadIdx.x;
}
__device__ __forceinline__ int channel_lane() { return ALONG_CHANNELS ? threadIdx.x % CHANNEL_LANES : threadIdx.y; }
__device__ __forceinline__ int point_lane() { return ALONG_CHANNELS ? threadIdx.x / CHANNEL_LANES : threadIdx.x; }
// Which of a thread's channels the j-th element of a vector belongs to.
__device__ __forceinline__ int channel_of(int j) { return ALONG_CHANNELS ? j : 0; }
// Which of the tile's channels a thread's j-th is.
__device__ __forceinline__ int channel_in_tile(int j) { return (channel_lane() * CHANNEL_VECTOR + j) / PLANE; }
// Whether this thread is the one that tells of its j-th channel.
__device__ __forceinline__ bool tells_of(int j) {
  return point_lane() == 0 && (channel_lane() * CHANNEL_VECTOR + j) % PLANE == 0;
}

// The sums of COUNT numbers over the threads that hold the same channels. Scratch: SUM_SCRATCH values for each number
// of a channel.
//
// Along the channels a thread has so many numbers that all threads share the work of adding them up: first each warp,
// where it has channels more than once, then a thread for each number, over SUM_ROWS rows of shared memory.
constexpr bool SUMS_BY_WARPS = CHANNEL_LANES < 32;
constexpr int SUM_ROWS = SUMS_BY_WARPS ? THREADS / 32 : POINT_LANES;
// Of planes, vectors have numbers of up to so many channels, and channels numbers in up to so many vectors.
constexpr int CHANNELS_PER_VECTOR = (VECTOR - 2) / PLANE + 2;
constexpr int VECTORS_PER_PLANE = (PLANE - 2) / VECTOR + 2;
constexpr int SUM_SCRATCH = PLANE > 1        ? CHANNELS_PER_VECTOR * HOLDERS + TILE_CHANNELS
                            : ALONG_CHANNELS ? CHANNEL_VECTOR * CHANNEL_LANES * SUM_ROWS
                                             : CHANNEL_LANES * ((POINT_LANES + 31) / 32);

// The sums where vectors lie along planes: a thread adds up what it has of each channel, and a warp what threads have.
template <int COUNT>
__device__ __forceinline__ void sum_over_planes(Compute (&values)[COUNT], Compute* scratch) {
  constexpr int NUMBERS = COUNT / VECTOR;
  Compute* sums = scratch + NUMBERS * CHANNELS_PER_VECTOR * HOLDERS;
  const auto part = [&](int number, int of_vector, int holder) -> Compute& {
    return scratch[(number * CHANNELS_PER_VECTOR + of_vector) * HOLDERS + holder];
  };
  if (threadIdx.x < HOLDERS) {
#pragma unroll
    for (int number = 0; number < NUMBERS; ++number) {
#pragma unroll
      for (int i = 0; i < CHANNELS_PER_VECTOR; ++i) {
        Compute sum = 0;
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) {
          sum += channel_in_tile(j) - channel_in_tile(0) == i ? values[number * VECTOR + j] : 0;
        }
        part(number, i, threadIdx.x) = sum;
      }
    }
  }
  __syncthreads();
  for (int i = threadIdx.x / 32; i < NUMBERS * TILE_CHANNELS; i += THREADS / 32) {
    const int number = i / TILE_CHANNELS, channel = i % TILE_CHANNELS, first_lane = channel * PLANE / VECTOR;
    Compute sum[1] = {0};
    for (int place = threadIdx.x % 32; place < POINT_LANES * VECTORS_PER_PLANE; place += 32) {
      const int lane = first_lane + place % VECTORS_PER_PLANE, of_vector = channel - lane * VECTOR / PLANE;
      // The last of the vectors may begin behind the plane.
      if (of_vector >= 0) sum[0] += part(number, of_vector, place / VECTORS_PER_PLANE * CHANNEL_LANES + lane);
    }
    warp_sum<32, 1>(sum);
    if (threadIdx.x % 32 == 0) sums[i] = sum[0];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < COUNT; ++i) values[i] = sums[i / VECTOR * TILE_CHANNELS + channel_in_tile(i % VECTOR)];
}

// Adds over the threads of a warp that are a multiple of LANES apart; the first LANES threads get the sums.
template <int LANES, int COUNT>
__device__ __forceinline__ void warp_sum_apart(Compute (&values)[COUNT]) {
  if constexpr (LANES < 32) {
    warp_sum_apart<2 * LANES>(values);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const Compute other = __shfl_down_sync(0xffffffffu, values[i], LANES);
      if (32 % LANES == 0 || threadIdx.x % 32 + LANES < 32) values[i] += other;
    }
  }
}

// Sums along the channels come in SUM_ROWS rows: of a warp or a point lane each. The thread's row, and whether it is
// one of those that have the row's sums.
__device__ __forceinline__ int row_of_sums() { return SUMS_BY_WARPS ? threadIdx.x / 32 : point_lane(); }
__device__ __forceinline__ bool has_row_of_sums() { return !SUMS_BY_WARPS || threadIdx.x % 32 < CHANNEL_LANES; }

// These rows in shared memory, of COUNT numbers for each channel lane.
template <int COUNT>
struct RowsOfSums {
  static constexpr int NUMBERS = COUNT * CHANNEL_LANES;
  Compute* scratch;

  // All threads see them after a barrier.
  __device__ __forceinline__ void put(Compute (&values)[COUNT]) const {
    if constexpr (SUMS_BY_WARPS) warp_sum_apart<CHANNEL_LANES>(values);
    if (!has_row_of_sums()) return;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) scratch[row_of_sums() * NUMBERS + i * CHANNEL_LANES + channel_lane()] = values[i];
  }
  __device__ __forceinline__ Compute total(int number) const {
    Compute sum = scratch[number];
#pragma unroll
    for (int row = 1; row < SUM_ROWS; ++row) sum += scratch[row * NUMBERS + number];
    return sum;
  }
};

template <int COUNT>
__device__ __forceinline__ void sum_over_points(Compute (&values)[COUNT], Compute* scratch) {
  if constexpr (!ALONG_CHANNELS) return row_sum<POINT_LANES>(values, scratch, threadIdx.y);
  if constexpr (PLANE > 1) return sum_over_planes(values, scratch);
  const RowsOfSums<COUNT> rows = {scratch};
  rows.put(values);
  __syncthreads();
#pragma unroll
  for (int first = 0; first < rows.NUMBERS; first += THREADS) {
    const int number = first + threadIdx.x;
    if (number >= rows.NUMBERS) break;
    scratch[number] = rows.total(number);
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < COUNT; ++i) values[i] = scratch[i * CHANNEL_LANES + channel_lane()];
}

// The same for who needs two sums of each of a thread's COUNT / 2 units (see channel_sets.cuh) only once: calls
// tell(i, first, second) for the i-th of them, in one of the threads that hold its channels.
template <int COUNT, typename Tell>
__device__ __forceinline__ void tell_sums_over_points(Compute (&values)[COUNT], Compute* scratch, const Tell& tell) {
  constexpr int OWN = COUNT / 2;
  static_assert(!ALONG_CHANNELS || PLANE > 1 || THREADS % CHANNEL_LANES == 0, "a thread tells of its own lane");
  if constexpr (!ALONG_CHANNELS || PLANE > 1) {
    sum_over_points(values, scratch);
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
      if (tells_of(i * (CHANNEL_VECTOR / OWN))) tell(i, values[i], values[OWN + i]);
    }
  } else {
    const RowsOfSums<COUNT> rows = {scratch};
    rows.put(values);
    __syncthreads();
#pragma unroll
    for (int first = 0; first < OWN * CHANNEL_LANES; first += THREADS) {
      const int number = first + threadIdx.x;
      if (number >= OWN * CHANNEL_LANES) break;
      tell(number / CHANNEL_LANES, rows.total(number), rows.total(OWN * CHANNEL_LANES + number));
    }
  }
}

// The i-th of a thread's numbers, which lie in registers.
template <int COUNT>
__device__ __forceinline__ Compute chosen(const Compute (&numbers)[COUNT], int i) {
  Compute number = numbers[0];
#pragma unroll
  for (int j = 1; j < COUNT; ++j) {
    if (i == j) number = numbers[j];
  }
  return number;
}

// Adds what one vector has to a thread's sums: add(j, sums) does so for its j-th element. Where PER_SUM > 1 elements go
// to a sum, a vector is summed by itself first: less rounding, shorter chains.
template <int PER_SUM, int COUNT, typename Add>
__device__ __forceinline__ void add_vector(Compute (&sums)[COUNT], const Add& add) {
  if constexpr (PER_SUM == 1) {
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
  long long first_channel;  // of the block
  long long channel;        // the first of this thread
  bool there;               // whether it is
  long long first_point;
  long long end_point;  // one past the last

  __device__ __forceinline__ long long points() const { return end_point - first_point; }
  // Where this thread's numbers of the first point lie in a tensor.
  __device__ __forceinline__ long long offset(long long sample_stride, long long channel_stride) const {
    return sample * sample_stride + channel * channel_stride + channel_lane() * CHANNEL_VECTOR % PLANE;
  }
};

// The split-th chunk of tile_of_sample, which counts the tiles of channels of all samples.
__device__ __forceinline__ Chunk chunk_at(unsigned tile_of_sample, unsigned split, long long channels,
                                          long long points, long long points_per_split) {
  const unsigned tiles = static_cast<unsigned>((channels + TILE_CHANNELS - 1) / TILE_CHANNELS);
  Chunk chunk;
  chunk.sample = tile_of_sample / tiles;
  chunk.split = split;
  chunk.first_channel = static_cast<long long>(tile_of_sample % tiles) * TILE_CHANNELS;
  chunk.channel = chunk.first_channel + channel_in_tile(0);
  chunk.there = chunk.channel < channels;
  chunk.first_point = split * points_per_split;
  chunk.end_point = min(chunk.first_point + points_per_split, points);
  return chunk;
}

// A thread's way over its points of a chunk. A point is a mixed-radix number over the sizes of the dimensions that
// could not be merged; from one vector to the next it grows by as much each time, so only the first is divided up.
// Planes are the last dimension, along which nobody walks.
constexpr int WALKED_DIMS = PLANE > 1 ? POINT_DIMS - 1 : POINT_DIMS;

struct Walk {
  int left;  // vectors that are still to come, this one too; not positive behind the last
  long long digits[WALKED_DIMS];
  long long steps[WALKED_DIMS];

  __device__ __forceinline__ long long offset(const long long (&strides)[POINT_DIMS]) const {
    long long offset = 0;
#pragma unroll
    for (int i = 0; i < WALKED_DIMS; ++i) offset += digits[i] * strides[i];
    return offset;
  }

  __device__ __forceinline__ void advance(const long long (&sizes)[POINT_DIMS]) {
    --left;
#pragma unroll
    for (int i = WALKED_DIMS - 1; i >= 0; --i) {
      digits[i] += steps[i];
      if (i > 0 && digits[i] >= sizes[i]) {
        digits[i] -= sizes[i];
        ++digits[i - 1];
      }
    }
  }

  __device__ __forceinline__ void retreat(const long long (&sizes)[POINT_DIMS]) {
    ++left;
#pragma unroll
    for (int i = WALKED_DIMS - 1; i >= 0; --i) {
      digits[i] -= steps[i];
      if (i > 0 && digits[i] < 0) {
        digits[i] += sizes[i];
        --digits[i - 1];
      }
    }
  }
};

__device__ __forceinline__ void to_digits(unsigned long long number, const long long (&sizes)[POINT_DIMS],
                                          long long (&digits)[WALKED_DIMS]) {
#pragma unroll
  for (int i = WALKED_DIMS - 1; i > 0; --i) {
    const unsigned long long size = sizes[i], quotient = number / size;
    digits[i] = number - quotient * size;
    number = quotient;
  }
  digits[0] = number;
}

// From a thread's i-th vector on, which need not be there.
__device__ __forceinline__ Walk walk_over(const Chunk& chunk, const long long (&sizes)[POINT_DIMS], int i = 0) {
  constexpr int STEP = POINT_LANES * POINT_VECTOR;
  const long long first = chunk.first_point + point_lane() * POINT_VECTOR, rest = chunk.end_point - first;
  Walk walk;
  // Threads that hold nothing have none, but go along: the sums need every lane.
  const bool holds = chunk.there && thread_in_block() < HOLDERS && rest > 0;
  walk.left = (holds ? static_cast<int>((rest + STEP - 1) / STEP) : 0) - i;
  to_digits((first + static_cast<long long>(i) * STEP) / PLANE, sizes, walk.digits);
  to_digits(STEP / PLANE, sizes, walk.steps);
  return walk;
}

// A thread's way over its vectors of a chunk in one tensor, up or down. Points of one dimension need no digits.
struct Path {
  long long place;  // in the tensor: of the vector, or where points have several dimensions of the chunk
  long long step;
  Walk walk;

  __device__ __forceinline__ long long offset(const long long (&strides)[POINT_DIMS]) const {
    return WALKED_DIMS == 1 ? place : place + walk.offset(strides);
  }
  __device__ __forceinline__ void advance(const long long (&sizes)[POINT_DIMS]) {
    if constexpr (WALKED_DIMS == 1) {
      place += step;
    } else {
      walk.advance(sizes);
    }
  }
  __device__ __forceinline__ void retreat(const long long (&sizes)[POINT_DIMS]) {
    if constexpr (WALKED_DIMS == 1) {
      place -= step;
    } else {
      walk.retreat(sizes);
    }
  }
};

// That of a walk, over the same points of a chunk in a tensor with these strides.
__device__ __forceinline__ Path path_of(const Walk& walk, const Chunk& chunk, long long sample_stride,
                                        long long channel_stride, const long long (&point_strides)[POINT_DIMS]) {
  Path path = {chunk.offset(sample_stride, channel_stride), 0, walk};
  if constexpr (WALKED_DIMS == 1) {
    path.place += walk.offset(point_strides);
    path.step = walk.steps[0] * point_strides[0];
  }
  return path;
}
