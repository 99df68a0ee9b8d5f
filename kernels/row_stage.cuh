// How the rows of row_block_* lie over threads, and how they come from memory.
//
// THREADS_PER_ROW threads hold VECTORS vectors each of a row, ROWS_PER_BLOCK rows a block; or BLOCKS_PER_ROW blocks a
// part each of one row. STAGE names the way to the registers:
// - direct: straight;
// - ahead: through shared memory that a thread alone uses, where its vectors of the next ROWS_AHEAD rows, each in its
//   slot, are on their way while it works on this one: the bytes in flight are what keeps the memory busy while a block
//   waits for its sums;
// - run: through shared memory where the block copies its rows as one run of memory, 16 bytes at a time; ahead
//   where blocks take turns. For short rows that lie directly behind each other. Results leave likewise.
//
// Where rows are SHIFTED, what is read begins so many elements behind a multiple of 16 bytes as the SHIFT of its tensor
// says, the same in every row, and the results at one. A vector then lies in two pieces of 16 bytes. The first row's
// begins before the tensor does, where there is memory too, since allocations begin at such multiples. Ahead, a thread
// copies the first piece of its vectors, and one thread the piece behind the last: what it has beside the row's is the
// next row's, or lies between the two, but behind the last row, of which nothing else is read.
//
// Memory gives sectors of 32 bytes, an asynchronous copy takes 16: where a row begins in the middle of a sector, and
// its place in shared memory at a multiple of 32 bytes, L2 is asked twice for most sectors. Rows ahead that are
// STAGGERED lie in a sector as they do in memory. What a thread copies may then go to where another of its warp has
// read the row before, but none of another warp: beside the vectors of each is room for a piece more, in a sector of
// its own.
enum class Stage { direct, ahead, run };
constexpr Stage stage = Stage::STAGE;
static_assert(!SEGMENTED || (!PEELED && !SHIFTED && stage != Stage::run));
static_assert(!SHIFTED || VECTOR * sizeof(X_TYPE) == 16);
static_assert(!STAGGERED || (stage == Stage::ahead && VECTOR * sizeof(X_TYPE) == 16 && !SHIFTED && !SEGMENTED));

constexpr int BLOCK_THREADS = THREADS_PER_ROW * ROWS_PER_BLOCK;
// A row ahead, in elements: one that is SHIFTED has a piece more, and room, so that the next begins where copies are
// fast.
constexpr int ROW_ELEMENTS = THREADS_PER_ROW * VECTORS * VECTOR + (SHIFTED ? COPY_ALIGNMENT / sizeof(X_TYPE) : 0);
// Threads of a warp that have the same row, and what there is beside their vectors.
constexpr int SECTOR = 32;
constexpr int LANES_OF_ROW = THREADS_PER_ROW < 32 ? THREADS_PER_ROW : 32;
constexpr int STAGGER_ELEMENTS = STAGGERED ? SECTOR / sizeof(X_TYPE) : 0;
// What one tensor takes in shared memory, in elements. A run lies as far behind a multiple of 16 bytes as in memory.
constexpr int SLOT_ELEMENTS = ROWS_PER_BLOCK * ROW_ELEMENTS +
                              BLOCK_THREADS / LANES_OF_ROW * VECTORS * STAGGER_ELEMENTS +
                              (stage == Stage::run ? 2 * PIECE : 0);
constexpr int STAGE_ELEMENTS = ROWS_AHEAD * SLOT_ELEMENTS;

__device__ __forceinline__ int slot_after(int slot) { return slot + 1 == ROWS_AHEAD ? 0 : slot + 1; }

// Which of the block's rows a thread has. The compiler does not know that a block of one row has but one threadIdx.y.
// Where blocks take turns they take as long, or longer, if it does: on an H100 instance norm of 16 x 64 x 75^2 float16
// numbers 1.10 of the time backward under silu.
__device__ __forceinline__ unsigned row_in_block() {
  return ROWS_PER_BLOCK == 1 && !TAKES_TURNS ? 0 : threadIdx.y;
}
__device__ __forceinline__ int thread_in_block() { return row_in_block() * THREADS_PER_ROW + threadIdx.x; }

// A block's part of every row it works on: `columns` of them, from `first_column` on.
struct Part : Segments {
  long long rows;
  long long row_columns;
  long long first_column;
  int columns;
};

template <typename KernelArguments>
__device__ __forceinline__ Part part_of_block(const KernelArguments& arguments) {
  const long long rows = arguments.rows, columns = arguments.columns, most = arguments.columns_per_block;
  const Segments segments = segments_of(arguments);
  if constexpr (BLOCKS_PER_ROW == 1) return {segments, rows, columns, 0, static_cast<int>(columns)};
  const long long first = rank_in_row() * most, left = columns - first;
  return {segments, rows, columns, first, static_cast<int>(left < most ? left : most)};
}

// A tensor of the problem, as its block sees it. `staged` are STAGE_ELEMENTS of shared memory, where they are needed.
template <typename T, int SHIFT = 0>
struct Rows {
  T* memory;
  long long stride;  // elements from one row to the next
  X_TYPE* staged;

  // Where the block's part of a row begins; SEGMENTED, where the row does.
  __device__ __forceinline__ T* at(const Part& part, long long row) const {
    return memory + row * stride + (SEGMENTED ? 0 : part.first_column);
  }
  // A thread's i-th vector of its row in shared memory, where the stage is ahead; or the piece that it begins in.
  __device__ __forceinline__ X_TYPE* own(const X_TYPE* row, int slot, int i) const {
    X_TYPE* place = staged + slot * SLOT_ELEMENTS;
    if constexpr (SHIFTED) return place + row_in_block() * ROW_ELEMENTS + (i * THREADS_PER_ROW + threadIdx.x) * VECTOR;
    const int vector = i * BLOCK_THREADS + thread_in_block();
    if constexpr (!STAGGERED) return place + vector * VECTOR;
    const int behind = static_cast<int>(reinterpret_cast<size_t>(row) % SECTOR / sizeof(X_TYPE));
    return place + vector * VECTOR + vector / LANES_OF_ROW * STAGGER_ELEMENTS + behind;
  }
  __device__ __forceinline__ int shift(const Part& part, long long row) const { return shift_of(at(part, row)); }
};

// Where the vectors of a row in segments lie takes some instructions to tell, which would come again behind its sums.
constexpr bool KEEPS_OFFSETS = SEGMENTED && !TAKES_TURNS && VECTORS <= 4;

// Where a thread is in one step: its row, and its vectors and its edges among the columns of the block's part.
//
// A thread past the last row goes along with one that it can read, and writes nothing. To look at every vector whether
// its row is there would be a branch each: layer norm of 1024 columns of bfloat16 takes 651 instructions so, else 523.
struct Place {
  long long first_row;  // of the block
  long long row;
  bool there;  // whether the row is the thread's own
  Cut cut;
  int offsets[KEEPS_OFFSETS ? VECTORS : 1];

  __device__ __forceinline__ int vector_index(int i) const {
    return i * THREADS_PER_ROW + static_cast<int>(threadIdx.x);
  }
  // Whether rows have columns for the thread's i-th vector: every row has for the first WHOLE_VECTORS of each thread.
  __device__ __forceinline__ bool reaches(int i) const { return i < WHOLE_VECTORS || vector_index(i) < cut.vectors; }
  // Whether it is the thread's own besides, and may be written.
  __device__ __forceinline__ bool has(int i) const { return (ROWS_PER_BLOCK == 1 || there) && reaches(i); }
  // Whether the thread goes along with it. The vectors of PEELED rows have a branch each anyway, which keeps ptxas from
  // loading too many at once: on an H100 257 columns of bfloat16 take 1.00 so, and 1.10 if all go along; 4097 under
  // silu 1.01 and 1.22. But 513, 4 vectors of a thread under silu, 1.08 and 1.04.
  __device__ __forceinline__ bool reads(int i) const {
    constexpr bool ALL_GO_ALONG = !PEELED || (activation != Activation::none && VECTORS == 4);
    return ALL_GO_ALONG ? reaches(i) : has(i);
  }
  __device__ __forceinline__ int column(int i) const { return cut.column(vector_index(i)); }
  // Where that lies, from where the block's part of the row begins; SEGMENTED, from where the row does. The part comes
  // as a copy: with a reference to it, of which nothing is used, backward has up to 13 % more instructions.
  __device__ __forceinline__ int offset(Part part, int i) const {
    if constexpr (KEEPS_OFFSETS) return offsets[i];
    return SEGMENTED ? part.offset_of(static_cast<int>(part.first_column) + column(i)) : column(i);
  }

  // Its i-th edge, of EDGES.
  __device__ __forceinline__ int edge_index(int i) const { return i * THREADS_PER_ROW + static_cast<int>(threadIdx.x); }
  __device__ __forceinline__ bool has_edge(int i) const { return cut.has_edge(edge_index(i)) && there; }
  __device__ __forceinline__ int edge_column(int i) const { return cut.edge_column(edge_index(i)); }

  // The place in the rows from another one on, which begin in the same way.
  __device__ __forceinline__ Place moved(const Part& part, long long first) const {
    const long long own = first + row_in_block();
    const bool is_there = own < part.rows;
    return {first, ROWS_PER_BLOCK == 1 || is_there ? own : row, is_there, cut};
  }
};

// The place in the rows from first_row on; `aligned` is what the vectors are aligned to.
template <typename T, int SHIFT>
__device__ __forceinline__ Place place_of(const Rows<T, SHIFT>& aligned, const Part& part, long long first_row) {
  const long long own = first_row + row_in_block();
  const bool is_there = own < part.rows;
  const long long row = ROWS_PER_BLOCK == 1 || is_there ? own : part.rows - 1;
  Place place = {first_row, row, is_there, cut_of(aligned.at(part, row), part.columns), {}};
#pragma unroll
  for (int i = 0; KEEPS_OFFSETS && i < VECTORS; ++i) {
    place.offsets[i] = part.offset_of(static_cast<int>(part.first_column) + place.column(i));
    pin(place.offsets[i]);
  }
  return place;
}

// Edges of a thread, each as a vector of one.
constexpr int EDGES = (MOST_EDGES + THREADS_PER_ROW - 1) / THREADS_PER_ROW;
template <typename T>
using OfEdges = T[EDGES > 0 ? EDGES : 1];
using Edges = OfEdges<Vector<X_TYPE, 1>>;

// ---- Runs.

// A thread's i-th vector in shared memory, where the stage is a run.
template <typename T, int SHIFT>
__device__ __forceinline__ X_TYPE* in_run(const Rows<T, SHIFT>& rows, const Part& part, const Place& place, int i) {
  X_TYPE* run = rows.staged + rows.shift(part, place.first_row);
  return run + row_in_block() * part.columns + place.column(i);
}

__device__ __forceinline__ int run_length(const Part& part, long long first_row) {
  const long long left = part.rows - first_row;
  return static_cast<int>(left < ROWS_PER_BLOCK ? left : ROWS_PER_BLOCK) * part.columns;
}

__device__ __forceinline__ void fetch_run(const Rows<const X_TYPE>& rows, const Part& part, long long first_row) {
  const X_TYPE* run = rows.at(part, first_row);
  const int shift = rows.shift(part, first_row), length = run_length(part, first_row);
  // A piece at an end of the run is copied whole too where what it has beside the run is still the tensor's.
  const long long before = first_row * part.columns, after = (part.rows - first_row) * part.columns;
  for (int i = thread_in_block() * PIECE - shift; i < length; i += BLOCK_THREADS * PIECE) {
    if (i >= -before && i + PIECE <= after) {
      copy_async<PIECE>(rows.staged + shift + i, run + i);
    } else {
      for (int j = max(i, 0); j < min(i + PIECE, length); ++j) rows.staged[shift + j] = run[j];
    }
  }
}

// ---- In.

// Starts to bring in the rows from first_row on, if there are any left.
template <int SHIFT>
__device__ __forceinline__ void fetch(const Rows<const X_TYPE, SHIFT>& rows, const Part& part, long long first_row,
                                      int slot) {
  if constexpr (stage == Stage::ahead) {
    const Place place = place_of(rows, part, first_row);
    if (!place.there) return;
    const X_TYPE* row = rows.at(part, place.row) - SHIFT;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      if (!place.has(i)) continue;
      if constexpr (STAGGERED) lie_alike<SECTOR>(rows.own(row, slot, i), row + place.offset(part, i));
      copy_async<VECTOR>(rows.own(row, slot, i), row + place.offset(part, i));
      keep_in_l2<KEPT_IN_L2>(row + place.offset(part, i));
    }
    if (SHIFT > 0 && threadIdx.x == 0) {
      const int end = place.cut.vectors * VECTOR;
      if (place.row + 1 < part.rows) {
        copy_async<VECTOR>(rows.own(row, slot, 0) + end, row + end);
      } else {
        for (int i = end; i < end + SHIFT; ++i) rows.own(row, slot, 0)[i] = row[i];
      }
    }
  }
  if constexpr (stage == Stage::run) {
    if (first_row < part.rows) fetch_run(rows, part, first_row);
  }
}

// Lets threads read what others have copied, and copy to where others have read.
__device__ __forceinline__ void meet() {
  if constexpr (stage == Stage::run || (stage == Stage::ahead && SHIFTED && THREADS_PER_ROW > 32)) {
    __syncthreads();
  } else if constexpr (stage == Stage::ahead && (SHIFTED || STAGGERED)) {
    __syncwarp();
  }
}

// Waits for what was fetched, but for the last PENDING commits.
template <int PENDING>
__device__ __forceinline__ void wait_for_rows() {
  if constexpr (stage != Stage::direct) copy_async_wait<PENDING>();
  meet();
}

// A thread's i-th vector of its row in shared memory.
template <typename T, int SHIFT>
__device__ __forceinline__ Vector<X_TYPE, VECTOR> staged_vector(const Rows<T, SHIFT>& rows, const Part& part,
                                                                const Place& place, int slot, int i) {
  const X_TYPE* row = rows.at(part, place.row);
  if constexpr (stage == Stage::ahead) return load_shifted<SHIFT, VECTOR>(rows.own(row, slot, i) + SHIFT);
  return load<X_TYPE, VECTOR>(in_run(rows, part, place, i));
}

// A thread's vectors of its row; anything, where that is not there and does not come directly.
template <int SHIFT>
__device__ __forceinline__ void get_vectors(const Rows<const X_TYPE, SHIFT>& rows, const Part& part,
                                            const Place& place, int slot, Vector<X_TYPE, VECTOR> (&values)[VECTORS]) {
  const X_TYPE* row = rows.at(part, place.row);
  if constexpr (!ALIKE) {
    const Anywhere<X_TYPE, VECTOR> first(row + place.column(0));
    // Several at once, so that they are all under way before the first is waited for.
    constexpr int TOGETHER = 4;
#pragma unroll
    for (int group = 0; group < VECTORS; group += TOGETHER) {
      Straddling<X_TYPE, VECTOR> pieces[TOGETHER];
#pragma unroll
      for (int i = group; i < group + TOGETHER && i < VECTORS; ++i) {
        if (place.reads(i)) pieces[i - group].load_aligned(first.first + i * THREADS_PER_ROW * VECTOR);
      }
#pragma unroll
      for (int i = group; i < group + TOGETHER && i < VECTORS; ++i) {
        if (place.reads(i)) values[i] = pieces[i - group].at(first.shift);
      }
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    if (place.reads(i)) {
      values[i] = stage == Stage::direct ? load_shifted<SHIFT, VECTOR>(row + place.offset(part, i))
                                         : staged_vector(rows, part, place, slot, i);
    }
  }
}

// A thread's edges of its row.
template <int SHIFT>
__device__ __forceinline__ void get_edges(const Rows<const X_TYPE, SHIFT>& rows, const Part& part, const Place& place,
                                          Edges& edges) {
#pragma unroll
  for (int i = 0; i < EDGES; ++i) {
    if (place.has_edge(i)) edges[i] = load<X_TYPE, 1>(rows.at(part, place.row) + place.edge_column(i));
  }
}

// To be called between the last get_vectors of a step and the fetch of the next rows into the same place.
__device__ __forceinline__ void release_rows() { meet(); }

// ---- Out.

// Writes a thread's i-th vector of the result that rows are peeled for; a run is then in shared memory, until flush.
__device__ __forceinline__ void put(const Rows<X_TYPE>& rows, const Part& part, const Place& place, int i,
                                    const Vector<X_TYPE, VECTOR>& values) {
  if constexpr (stage == Stage::run) {
    store(in_run(rows, part, place, i), values);
  } else {
    store_global(rows.at(part, place.row) + place.offset(part, i), values);
  }
}

// The same for another result, which may lie otherwise.
__device__ __forceinline__ void put_anywhere(const Rows<X_TYPE>& rows, const Part& part, const Place& place, int i,
                                             const Vector<X_TYPE, VECTOR>& values) {
  if (!ALIKE && rows.shift(part, place.row) != (PIECE - place.cut.head % PIECE) % PIECE) {
    X_TYPE* target = rows.at(part, place.row) + place.column(i);
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) target[j] = values.lane[j];
  } else {
    put(rows, part, place, i, values);
  }
}

__device__ __forceinline__ void put_edge(const Rows<X_TYPE>& rows, const Part& part, const Place& place, int i,
                                         const Vector<X_TYPE, 1>& value) {
  store(rows.at(part, place.row) + place.edge_column(i), value);
}

// Copies out a run that was put. All threads must have put theirs: a __syncthreads lies between.
__device__ __forceinline__ void flush(const Rows<X_TYPE>& rows, const Part& part, const Place& place) {
  if constexpr (stage == Stage::run) {
    X_TYPE* run = rows.at(part, place.first_row);
    const int shift = rows.shift(part, place.first_row), length = run_length(part, place.first_row);
    for (int i = thread_in_block() * PIECE - shift; i < length; i += BLOCK_THREADS * PIECE) {
      if (i >= 0 && i + PIECE <= length) {
        store_global(run + i, load<X_TYPE, PIECE>(rows.staged + shift + i));
      } else {
        for (int j = max(i, 0); j < min(i + PIECE, length); ++j) run[j] = rows.staged[shift + j];
      }
    }
  }
}
