// How row_split_* cut a problem into tiles, for rows too long for a block and for rows that are not contiguous.
//
// A block of THREADS threads holds ROW_LANES rows by COLUMN_LANES * VECTOR columns at a time. Neighbouring threads run
// along rows (ROW_LANES = 1) or across them, whichever is contiguous in memory. Where a number
// lies is the sum of the offsets of its row and of its column (see strides.cuh).
constexpr int COLUMN_LANES = THREADS / ROW_LANES;
constexpr int TILE_COLUMNS = COLUMN_LANES * VECTOR * UNROLL;

__device__ __forceinline__ int row_lane() { return threadIdx.x % ROW_LANES; }

// The first column of this thread's i-th vector in the tile that begins at `first`.
__device__ __forceinline__ long long tile_column(long long first, int i) {
  return first + (i * COLUMN_LANES + static_cast<int>(threadIdx.x) / ROW_LANES) * VECTOR;
}

// Where a block works: block b takes the (b / row_blocks)-th split of the ROW_LANES rows that begin at b % row_blocks *
// ROW_LANES. Blocks that run together work on the same columns of many rows: weights as long as the rows may be more
// than the cache holds.
struct Chunk {
  long long row;           // of this thread; may be past the last row
  long long split;
  long long first_column;  // of the chunk
  long long end_column;    // one past its last
};

__device__ __forceinline__ Chunk chunk_of_block(unsigned block, long long splits, long long columns_per_split,
                                                long long columns) {
  const long long row_blocks = gridDim.x / splits;
  Chunk chunk;
  chunk.split = block / row_blocks;
  chunk.row = block % row_blocks * ROW_LANES + row_lane();
  chunk.first_column = chunk.split * columns_per_split;
  const long long end = chunk.first_column + columns_per_split;
  chunk.end_column = end < columns ? end : columns;
  return chunk;
}
