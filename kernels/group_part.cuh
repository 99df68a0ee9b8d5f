// What a block has where all blocks run at the same time, in groups whose blocks share what they take turns over: rows
// of row_grid_forward, row_pipeline_* and row_stream_*, slabs of channel_pipeline_*.

// A block's part of each of them: `count` of its columns or points, from `first` on.
struct SharedPart {
  long long group;
  long long groups;
  int rank;  // among the blocks of the group
  int blocks;
  long long first;
  int count;
};

__device__ __forceinline__ SharedPart part_of_block(long long count, long long count_per_block,
                                                    long long blocks_per_group) {
  const int blocks = static_cast<int>(blocks_per_group), rank = blockIdx.x % blocks;
  const long long first = rank * count_per_block, left = count - first;
  return {static_cast<long long>(blockIdx.x / blocks), static_cast<long long>(gridDim.x / blocks), rank, blocks,
          first, static_cast<int>(left < count_per_block ? left : count_per_block)};
}
