// Rows that are shared by blocks of a group, all of which run at the same time: which part of them a block of
// row_grid_forward or row_pipeline_* has.

// A block's part of its rows: `columns` of them, from first_column on.
struct Part {
  long long group;
  long long groups;
  int rank;  // among the blocks of the row
  int blocks;
  long long first_column;
  int columns;
};

__device__ __forceinline__ Part part_of_block(long long columns, long long columns_per_block,
                                              long long blocks_per_row) {
  const int blocks = static_cast<int>(blocks_per_row), rank = blockIdx.x % blocks;
  const long long first = rank * columns_per_block, left = columns - first;
  return {static_cast<long long>(blockIdx.x / blocks), static_cast<long long>(gridDim.x / blocks), rank, blocks,
          first, static_cast<int>(left < columns_per_block ? left : columns_per_block)};
}
