// How channel_split_* go over a chunk of points (see channel_tile.cuh): tile by tile, of which a thread has UNROLL
// vectors, all under way together.
//
// A run is what a channel has along the last dimension of its points: one after the other in memory. Where runs are
// PEELED, they begin anywhere, equally far from a multiple of 16 bytes in all tensors, and their vectors are aligned
// all the same. What is counted as points, along the last dimension, are then the places in as many vectors as a run
// can reach into, wherever it begins. A vector that has other numbers too is none of the run's: those of its numbers
// that the run has, the edges, go one to a thread.
constexpr int TILE_POINTS = POINT_LANES * POINT_VECTOR * UNROLL;
static_assert(PEELED == (EDGES > 0));

__device__ __forceinline__ Chunk chunk_of_block(unsigned block, long long channels, long long points, long long splits,
                                                long long points_per_split) {
  const unsigned tiles = static_cast<unsigned>((channels + TILE_CHANNELS - 1) / TILE_CHANNELS), rest = block / tiles;
  const unsigned split = rest % static_cast<unsigned>(splits), sample = rest / static_cast<unsigned>(splits);
  return chunk_at(sample * tiles + block % tiles, split, channels, points, points_per_split);
}

// Where a thread's vector lies in a tensor, from its channel on, and whether all of it is there.
struct Spot {
  long long offset;
  bool whole;
};

// Where a thread's edges lie in a tensor, from its channel on, and which are there.
struct Edges {
  long long offsets[EDGES > 0 ? EDGES : 1];
  bool there[EDGES > 0 ? EDGES : 1];

  // Calls use(i) for each that is there.
  template <typename Use>
  __device__ __forceinline__ void for_each(const Use& use) const {
#pragma unroll
    for (int i = 0; i < EDGES; ++i) {
      if (there[i]) use(i);
    }
  }
};

// The numbers of a thread's edges in a tensor. They are few, and had better be on their way before the vectors are.
struct EdgeValues {
  Vector<X_TYPE, 1> values[EDGES > 0 ? EDGES : 1];

  __device__ __forceinline__ EdgeValues(const Edges& edges, const X_TYPE* source) {
    edges.for_each([&](int i) { values[i] = load<X_TYPE, 1>(source + edges.offsets[i]); });
  }
  __device__ __forceinline__ const Vector<X_TYPE, 1>& operator[](int i) const { return values[i]; }
};

// The runs of one channel. Not PEELED, there is nothing to know of them.
struct Runs {
  unsigned phase;  // how far the channel begins behind a multiple of 16 bytes, in elements
  int points;      // of each

  // How far a run begins behind such a multiple that is so far from the channel's first number.
  __device__ __forceinline__ int shift(long long offset) const {
    return static_cast<int>((phase + static_cast<unsigned>(offset)) % VECTOR);
  }

  __device__ __forceinline__ Spot spot(const Walk& walk, const long long (&strides)[POINT_DIMS]) const {
    const long long offset = walk.offset(strides);
    if constexpr (!PEELED) return {offset, true};
    const int place = static_cast<int>(walk.digits[WALKED_DIMS - 1]), own_shift = shift(offset - place);
    const int first = place - own_shift;
    return {offset - own_shift, first >= 0 && first + VECTOR <= points};
  }

  // The thread's edges of those that lie in a chunk: EDGES, of which some may not be there.
  __device__ __forceinline__ Edges edges_of(const Chunk& chunk, const long long (&sizes)[POINT_DIMS],
                                            const long long (&strides)[POINT_DIMS]) const {
    Edges edges = {};
    if (!PEELED || !chunk.there) return edges;
    // A run has a vector at either end that may be cut: so many places.
    constexpr int EACH = 2 * VECTOR;
    const long long places = sizes[POINT_DIMS - 1];
    const long long first_run = WALKED_DIMS > 1 ? chunk.first_point / places : 0;
#pragma unroll
    for (int i = 0; i < EDGES; ++i) {
      const int edge = i * POINT_LANES + point_lane(), in_run = edge % EACH;
      const long long run = first_run + edge / EACH, run_place = run * places;
      long long offset = 0;
      if constexpr (WALKED_DIMS == 2) offset = run * strides[0];
      if constexpr (WALKED_DIMS > 2) {
        long long digits[WALKED_DIMS];
        to_digits(run_place, sizes, digits);
#pragma unroll
        for (int j = 0; j < WALKED_DIMS; ++j) offset += digits[j] * strides[j];
      }
      const int own_shift = shift(offset);
      const int first = in_run < VECTOR ? 0 : (own_shift + points) / VECTOR * VECTOR;
      const int place = first + in_run % VECTOR, point = place - own_shift;
      edges.offsets[i] = offset + point;
      edges.there[i] = point >= 0 && point < points && (first > 0 || own_shift > 0) &&
                       run_place + place >= chunk.first_point && run_place + place < chunk.end_point;
    }
    return edges;
  }
};

// Those of the thread's channel, of which `first` is the first number.
__device__ __forceinline__ Runs runs_of(const X_TYPE* first, long long points) {
  if constexpr (!PEELED) return {};
  return {static_cast<unsigned>(reinterpret_cast<size_t>(first) % 16 / sizeof(X_TYPE)), static_cast<int>(points)};
}

// Calls take(whole) for each UNROLL vectors of the way, along which it goes: whole but for the last, of which some may
// not be there.
template <typename Take>
__device__ __forceinline__ void take_tiles(const Walk& walk, const Take& take) {
  while (walk.left >= UNROLL) take(Known<true>());
  if (walk.left > 0) take(Known<false>());
}

// The sets of a thread's channels, counted over all samples: sets[j] is that of its j-th. They ascend from one channel
// to the next, so only the first is divided up.
struct OwnSets {
  long long sets[CHANNEL_VECTOR];

  __device__ __forceinline__ OwnSets(const Chunk& chunk, long long channels, long long channels_per_set) {
    const auto channel = static_cast<unsigned long long>(chunk.sample * channels + chunk.channel);
    const auto size = static_cast<unsigned long long>(channels_per_set);
    sets[0] = channel / size;
    unsigned long long place = channel - sets[0] * size;  // of the channel in its set
#pragma unroll
    for (int j = 1; j < CHANNEL_VECTOR; ++j) {
      place += channel_in_tile(j) - channel_in_tile(j - 1);
      const bool ends = place >= size;
      sets[j] = sets[j - 1] + ends;
      if (ends) place = 0;
    }
  }
  __device__ __forceinline__ long long operator[](int j) const { return sets[j]; }
};
