// How pointwise_* lay tensors over threads: as rows by columns, of which only the columns, the last axis, have a bias.
//
// A block of COLUMN_LANES by ROW_LANES threads (threadIdx.x and y) takes one tile of columns, a vector a thread, and
// goes down the rows: STEPS * ROW_LANES of them in a turn, then those that lie `groups` turns further. Block b has tile
// b % tiles and begins with turn b / tiles. What is one RUN of memory in all tensors has no bias and one tile of
// columns; behind its rows there is a rest of less than a row, which may end within a vector.
constexpr int COLUMN_LANES = THREADS / ROW_LANES;
constexpr int TILE_COLUMNS = COLUMN_LANES * VECTOR;
constexpr int TURN_ROWS = STEPS * ROW_LANES;

struct Place {
  long long first_row;  // of this thread
  long long column;
  long long group;
};

__device__ __forceinline__ Place place_of_thread(long long tiles) {
  const unsigned count = RUN ? 1 : static_cast<unsigned>(tiles), group = blockIdx.x / count;
  const long long column = static_cast<long long>(blockIdx.x % count) * TILE_COLUMNS + threadIdx.x * VECTOR;
  return {static_cast<long long>(group) * TURN_ROWS + threadIdx.y, column, group};
}

// Whether a turn has nothing beside whole rows. All threads of a block agree, and need not look at each row.
__device__ __forceinline__ bool is_whole(long long first_row, long long rows) {
  return first_row - threadIdx.y + TURN_ROWS <= rows;
}

// How many numbers there are from a column on in a row, up to VECTOR.
__device__ __forceinline__ int count_at(long long row, long long column, long long rows, long long rest) {
  if (row < rows) return VECTOR;
  if (!RUN || row > rows || column >= rest) return 0;
  return rest - column < VECTOR ? static_cast<int>(rest - column) : VECTOR;
}

// How far columns lie from the first one. They lie apart only where VECTOR is 1.
__device__ __forceinline__ long long column_offset(long long column, long long stride) {
  return VECTOR > 1 ? column : column * stride;
}

__device__ __forceinline__ void load_some(const X_TYPE* source, int count, Vector<X_TYPE, VECTOR>& values) {
  if (count == VECTOR) {
    values = load<X_TYPE, VECTOR>(source);
  } else if (RUN) {
#pragma unroll
    for (int i = 0; i < VECTOR - 1; ++i) {
      if (i < count) values.lane[i] = source[i];
    }
  }
}

__device__ __forceinline__ void store_some(X_TYPE* target, int count, const Vector<X_TYPE, VECTOR>& values) {
  if (count == VECTOR) {
    store_global(target, values);
  } else if (RUN) {
#pragma unroll
    for (int i = 0; i < VECTOR - 1; ++i) {
      if (i < count) target[i] = values.lane[i];
    }
  }
}
