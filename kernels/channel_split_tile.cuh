// How channel_split_* go over a chunk of points (see channel_tile.cuh): tile by tile, of which a thread has UNROLL
// vectors, all under way together.
//
// A run is what a channel has along the last dimension of its points: one after the other in memory. Where runs are
// PEELED, they begin anywhere, equally far from a multiple of 16 bytes in all tensors. Their vectors are aligned all the
// same: what is counted as points, along the last dimension, are the places of the vectors around a run, and one more
// of these, wherever it begins. A vector that only a part of the run lies in is no vector: its numbers, the edges of the
// run, go one to a thread.
constexpr int TILE_POINTS = POINT_LANES * POINT_VECTOR * UNROLL;

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

  // Calls use(offset) for the thread's share of the edges that lie in a chunk.
  template <typename Use>
  __device__ __forceinline__ void for_each_edge(const Chunk& chunk, const long long (&sizes)[POINT_DIMS],
                                                const long long (&strides)[POINT_DIMS], const Use& use) const {
    if (!PEELED || !chunk.there) return;
    // A run has a vector at either end that may be cut: so many places.
    constexpr int EDGES = 2 * VECTOR;
    const long long places = sizes[POINT_DIMS - 1], first_run = chunk.first_point / places;
    const int edges = static_cast<int>((chunk.end_point - 1) / places - first_run + 1) * EDGES;
    for (int edge = point_lane(); edge < edges; edge += POINT_LANES) {
      const long long run_place = (first_run + edge / EDGES) * places;
      long long digits[WALKED_DIMS], offset = 0;
      to_digits(run_place, sizes, digits);
#pragma unroll
      for (int i = 0; i < WALKED_DIMS; ++i) offset += digits[i] * strides[i];
      const int own_shift = shift(offset), in_vector = edge % VECTOR;
      const bool at_end = edge % EDGES >= VECTOR;
      const int place = (at_end ? (own_shift + points) / VECTOR * VECTOR : 0) + in_vector, point = place - own_shift;
      if (point < 0 || point >= points || (!at_end && own_shift == 0)) continue;
      if (run_place + place < chunk.first_point || run_place + place >= chunk.end_point) continue;
      use(offset + point);
    }
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
