// How channel_split_* go over a chunk of points (see channel_tile.cuh): tile by tile, of which a thread has UNROLL
// vectors, all under way together.
constexpr int TILE_POINTS = POINT_LANES * POINT_VECTOR * UNROLL;

__device__ __forceinline__ Chunk chunk_of_block(unsigned block, long long channels, long long points, long long splits,
                                                long long points_per_split) {
  const unsigned tiles = static_cast<unsigned>((channels + TILE_CHANNELS - 1) / TILE_CHANNELS), rest = block / tiles;
  const unsigned split = rest % static_cast<unsigned>(splits), sample = rest / static_cast<unsigned>(splits);
  return chunk_at(sample * tiles + block % tiles, split, channels, points, points_per_split);
}

// Calls take(whole) for each UNROLL vectors of the way, along which it goes: whole but for the last, of which some may
// not be there.
template <typename Take>
__device__ __forceinline__ void take_tiles(const Walk& walk, const Take& take) {
  while (walk.left >= UNROLL) take(Known<true>());
  if (walk.left > 0) take(Known<false>());
}
