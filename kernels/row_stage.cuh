// How the rows of row_block_* lie over threads, and how they come from memory: STAGE is the name of a way.
//
// THREADS_PER_ROW threads hold VECTORS vectors each of a row, ROWS_PER_BLOCK rows a block; or BLOCKS_PER_ROW blocks a
// part each of one row. A thread's vectors come
// - direct: straight into its registers;
// - ahead: through shared memory that it alone uses, where those of the next row are on their way while it works on
//   this one's: the bytes in flight are what keeps the memory busy while a block waits for its sums;
// - run: ahead too, but the block copies its rows as one run of memory, 16 bytes at a time, wherever they begin and
//   end, and every thread then picks its (short) vectors from it. Results leave in the same way. Where a block has more
//   than one row, they lie directly behind each other.
enum class Stage { direct, ahead, run };
constexpr Stage stage = Stage::STAGE;

constexpr int BLOCK_THREADS = THREADS_PER_ROW * ROWS_PER_BLOCK;
constexpr int PIECE = 16 / sizeof(X_TYPE);  // elements of a run that are copied at once
// What one tensor takes in shared memory, in elements. A run lies as far behind a multiple of 16 bytes as in memory.
constexpr int STAGE_ELEMENTS = BLOCK_THREADS * VECTORS * VECTOR + (stage == Stage::run ? 2 * PIECE : 0);

__device__ __forceinline__ int thread_in_block() { return threadIdx.y * THREADS_PER_ROW + threadIdx.x; }

// The first column of a thread's i-th vector, in its block's part of the row.
__device__ __forceinline__ int column_of(int i) {
  return (i * THREADS_PER_ROW + static_cast<int>(threadIdx.x)) * VECTOR;
}

// A block's part of every row it works on: `columns` of them, from `first_column` on.
struct Part {
  long long rows;
  long long row_columns;
  long long first_column;
  int columns;

  // Whether a thread's i-th vector of a row is there. Where FULL, the threads hold a row to the last column.
  __device__ __forceinline__ bool has(long long row, int i) const {
    return (ROWS_PER_BLOCK == 1 || row < rows) && (FULL || column_of(i) < columns);
  }
};

__device__ __forceinline__ Part part_of_block(long long rows, long long columns, long long columns_per_block) {
  if constexpr (BLOCKS_PER_ROW == 1) return {rows, columns, 0, static_cast<int>(columns)};
  const long long first = rank_in_row() * columns_per_block, left = columns - first;
  return {rows, columns, first, static_cast<int>(left < columns_per_block ? left : columns_per_block)};
}

// A tensor of the problem, as its block sees it. `staged` are STAGE_ELEMENTS of shared memory, where they are needed.
template <typename T>
struct Rows {
  T* memory;
  long long stride;  // elements from one row to the next
  X_TYPE* staged;

  __device__ __forceinline__ T* at(const Part& part, long long row) const {
    return memory + row * stride + part.first_column;
  }
  // A thread's i-th vector in shared memory, where the stage is ahead.
  __device__ __forceinline__ X_TYPE* own(int i) const {
    return staged + (i * BLOCK_THREADS + thread_in_block()) * VECTOR;
  }
  // How far a run begins behind a multiple of 16 bytes, in elements.
  __device__ __forceinline__ int shift(const Part& part, long long first_row) const {
    return static_cast<int>(reinterpret_cast<size_t>(at(part, first_row)) % 16 / sizeof(X_TYPE));
  }
  // A thread's i-th vector in shared memory, where the stage is a run.
  __device__ __forceinline__ X_TYPE* in_run(const Part& part, long long first_row, int i) const {
    return staged + shift(part, first_row) + static_cast<int>(threadIdx.y) * part.columns + column_of(i);
  }
};

__device__ __forceinline__ int run_length(const Part& part, long long first_row) {
  const long long left = part.rows - first_row;
  return static_cast<int>(left < ROWS_PER_BLOCK ? left : ROWS_PER_BLOCK) * part.columns;
}

// Starts to bring in the rows from first_row on, if there are any left.
__device__ __forceinline__ void fetch(const Rows<const X_TYPE>& rows, const Part& part, long long first_row) {
  if constexpr (stage == Stage::ahead) {
    const long long row = first_row + threadIdx.y;
    if (row >= part.rows) return;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      if (part.has(row, i)) copy_async<VECTOR>(rows.own(i), rows.at(part, row) + column_of(i));
    }
  }
  if constexpr (stage == Stage::run) {
    if (first_row >= part.rows) return;
    const X_TYPE* run = rows.at(part, first_row);
    const int shift = rows.shift(part, first_row), length = run_length(part, first_row);
    // A piece at an end of the run is copied whole too where what it has beside the run is still the tensor's.
    const long long before = first_row * rows.stride + part.first_column;
    const long long after = (part.rows - 1) * rows.stride + part.row_columns - before;
    for (int i = thread_in_block() * PIECE - shift; i < length; i += BLOCK_THREADS * PIECE) {
      if (i >= -before && i + PIECE <= after) {
        copy_async<PIECE>(rows.staged + shift + i, run + i);
      } else {
        for (int j = max(i, 0); j < min(i + PIECE, length); ++j) rows.staged[shift + j] = run[j];
      }
    }
  }
}

// Waits for what was fetched.
__device__ __forceinline__ void wait_for_rows() {
  if constexpr (stage != Stage::direct) copy_async_wait();
  if constexpr (stage == Stage::run) __syncthreads();
}

// A thread's i-th vector of its row among those from first_row on.
__device__ __forceinline__ Vector<X_TYPE, VECTOR> vector_of(const Rows<const X_TYPE>& rows, const Part& part,
                                                            long long first_row, int i) {
  if constexpr (stage == Stage::ahead) return load<X_TYPE, VECTOR>(rows.own(i));
  if constexpr (stage == Stage::run) return load<X_TYPE, VECTOR>(rows.in_run(part, first_row, i));
  return load<X_TYPE, VECTOR>(rows.at(part, first_row + threadIdx.y) + column_of(i));
}

// To be called between the last vector_of of a step and the fetch of the next rows into the same place.
__device__ __forceinline__ void release_rows() {
  if constexpr (stage == Stage::run) __syncthreads();
}

// Writes a thread's i-th vector of a result; a run is then in shared memory, until flush.
__device__ __forceinline__ void put(const Rows<X_TYPE>& rows, const Part& part, long long first_row, int i,
                                    const Vector<X_TYPE, VECTOR>& values) {
  if constexpr (stage == Stage::run) {
    store(rows.in_run(part, first_row, i), values);
  } else {
    store(rows.at(part, first_row + threadIdx.y) + column_of(i), values);
  }
}

// Copies a run that was put out. All threads must have put theirs: a __syncthreads lies between.
__device__ __forceinline__ void flush(const Rows<X_TYPE>& rows, const Part& part, long long first_row) {
  if constexpr (stage == Stage::run) {
    X_TYPE* run = rows.at(part, first_row);
    const int shift = rows.shift(part, first_row), length = run_length(part, first_row);
    for (int i = thread_in_block() * PIECE - shift; i < length; i += BLOCK_THREADS * PIECE) {
      if (i >= 0 && i + PIECE <= length) {
        store(run + i, load<X_TYPE, PIECE>(rows.staged + shift + i));
      } else {
        for (int j = max(i, 0); j < min(i + PIECE, length); ++j) run[j] = rows.staged[shift + j];
      }
    }
  }
}
