// How row_split_* cut a problem into tiles, for rows too long for a block and for rows that are not contiguous.
//
// A block of THREADS threads holds ROW_LANES rows by COLUMN_LANES * VECTOR columns at a time. Neighbouring threads run
// along rows (ROW_LANES = 1) or across them, whichever is contiguous in memory. Where a number
// lies is the sum of the offsets of its row and of its column (see strides.cuh).
constexpr int COLUMN_LANES = THREADS / ROW_LANES;
constexpr int TILE_COLUMNS = COLUMN_LANES * VECTOR * UNROLL;

__device__ __forceinline__ int row_lane() { return threadIdx.x % ROW_LANES; }
__device__ __forceinline__ int column_lane() { return static_cast<int>(threadIdx.x) / ROW_LANES; }

// The first column of this thread's i-th vector in the tile that begins at `first`.
__device__ __forceinline__ long long tile_column(long long first, int i) {
  return first + (i * COLUMN_LANES + column_lane()) * VECTOR;
}

// Where a block works: block b takes the (b / row_blocks)-th split of the ROW_LANES rows that begin at b % row_blocks *
// ROW_LANES. Blocks that run together work on the same columns of many rows: weights as long as the rows may be more
// than the cache holds.
struct Chunk {
  long long row;           // of this thread; may be past the last row
  long long split;
  long long first_column;  // of the chunk
  int columns;
};

__device__ __forceinline__ Chunk chunk_of_block(unsigned block, long long splits, long long columns_per_split,
                                                long long columns) {
  const long long row_blocks = gridDim.x / splits;
  Chunk chunk;
  chunk.split = block / row_blocks;
  chunk.row = block % row_blocks * ROW_LANES + row_lane();
  chunk.first_column = chunk.split * columns_per_split;
  const long long left = columns - chunk.first_column;
  chunk.columns = static_cast<int>(left < columns_per_split ? left : columns_per_split);
  return chunk;
}

// A thread's vectors of a chunk, tile by tile, UNROLL of them in each; and where the rows are PEELED, its edge.
struct Way {
  Cut cut;

  __device__ __forceinline__ int vector(int tile, int i) const {
    return (tile * UNROLL + i) * COLUMN_LANES + column_lane();
  }
  __device__ __forceinline__ int tiles() const {
    return (cut.vectors + COLUMN_LANES * UNROLL - 1) / (COLUMN_LANES * UNROLL);
  }
  __device__ __forceinline__ bool has(int tile, int i) const { return vector(tile, i) < cut.vectors; }
  // From the first column of the chunk on.
  __device__ __forceinline__ int column(int tile, int i) const { return cut.column(vector(tile, i)); }
  __device__ __forceinline__ bool has_edge() const { return cut.has_edge(threadIdx.x); }
  __device__ __forceinline__ int edge_column() const { return cut.edge_column(threadIdx.x); }
};

// That over a chunk of a row, of which `first` is the first number. Threads past the last row have no part in it.
__device__ __forceinline__ Way way_over(const Chunk& chunk, const X_TYPE* first, bool in_rows) {
  static_assert(!PEELED || (ROW_LANES == 1 && MOST_EDGES <= THREADS));
  return {in_rows ? cut_of(first, chunk.columns) : Cut{}};
}
