// Sets of channels: CHANNELS_PER_SET neighbours that are normalized together, of which a tile has TILE_SETS. They are
// the groups of group norm; a group, in these files, is one of blocks. A unit is UNIT neighbouring numbers of a thread
// that are surely of the same set: what is known of a set is known once for them.
constexpr int TILE_SETS = TILE_CHANNELS / CHANNELS_PER_SET;

constexpr int greatest_common_divisor(int a, int b) { return b == 0 ? a : greatest_common_divisor(b, a % b); }
constexpr int UNIT = greatest_common_divisor(CHANNEL_VECTOR, CHANNELS_PER_SET * PLANE);
constexpr int UNITS = CHANNEL_VECTOR / UNIT;

// Which of the tile's sets a thread's j-th channel is of.
__device__ __forceinline__ int set_in_tile(int j) { return channel_in_tile(j / UNIT * UNIT) / CHANNELS_PER_SET; }
