// What row_pipeline_forward and row_pipeline_backward have in common: many long rows, each of which several blocks
// share, none of which waits for another.
//
// All blocks run at the same time, a group of blocks_per_row of them for every groups-th row, of which a block has a
// part (see pipeline.cuh).
//
// Between the turns in which a row is summed and finished, the last two warps of each block see to its sums. One tells
// the other blocks what its own has of the row; the other waits for what all have, and puts it together in a fixed
// order. What is told are parcels that carry the number of the turn beside the bits, so that it takes neither fence
// nor barrier (see grid_words.cuh). The other warps of a block sum a row, meet, and finish an older one.
constexpr int BLOCK_THREADS = THREADS + 64;
// Turns whose words are kept. A block that tells of a turn has what came LAG turns before from all, who may still be
// reading what came up to LAG - 1 turns before that.
constexpr int EXCHANGES = 2 * LAG;
// Where runs are PEELED, so many elements behind a multiple of 16 bytes each may begin; where they are long, behind a
// line, and as far behind one in shared memory. Else, in half of the rows, 16 bytes would go to another half of 32
// there than they come from, and all 32 come twice: instance norm of 2 x 32 x 91 x 109 x 91 float16 numbers takes 0.90
// of the time on an H200 so.
constexpr int PHASES = LONG_RUNS ? COPY_ALIGNMENT / sizeof(X_TYPE) : VECTOR;
static_assert(SEGMENTED || !PEELED, "rows that begin anywhere are runs, even if they are one each");
static_assert(!SEVERAL_CHANNELS || !SEGMENTED, "only a channel may be in segments");
static_assert(!LONG_RUNS || (PEELED && RESIDENT <= 32), "a bit for each of a thread's vectors");
static_assert(!SEGMENTED || HAS_CHANNELS || (!HAS_WEIGHT && !HAS_BIAS),
              "only `first` has the column of a weight");

// A thread has every THREADS-th vector of the part; where the i-th begins.
__device__ __forceinline__ int column_of(int i) { return i * STEP + static_cast<int>(threadIdx.x) * VECTOR; }

// Where a row has one of a thread's vectors, from Places::first on, if all of its numbers are the row's, or the part's.
struct Spot {
  int offset;

  // Copies them from where a row's `first` is, or writes them there.
  __device__ __forceinline__ void copy(X_TYPE* slot, const X_TYPE* source) const {
    copy_async<VECTOR>(slot, source + offset);
  }
  __device__ __forceinline__ void write(X_TYPE* target, const Vector<X_TYPE, VECTOR>& values) const {
    store_global(target + offset, values);
  }

  __device__ __forceinline__ int count() const { return VECTOR; }
  // Tells whether the i-th number is the row's.
  __device__ __forceinline__ All there() const { return {}; }
};

// The same, where not all of them need be.
struct CutSpot {
  static constexpr unsigned ALL = (1u << VECTOR) - 1;

  int offset;
  unsigned bits;  // one for each number

  // What lies before them is read too, and ends in the same 16 bytes.
  __device__ __forceinline__ void copy(X_TYPE* slot, const X_TYPE* source) const {
    if (bits != 0) copy_async_first<VECTOR>(slot, source + offset, 32 - __clz(static_cast<int>(bits)));
  }
  __device__ __forceinline__ void write(X_TYPE* target, const Vector<X_TYPE, VECTOR>& values) const {
    if (bits == ALL) return store_global(target + offset, values);
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
      if (bits >> i & 1) target[offset + i] = values.lane[i];
    }
  }

  __device__ __forceinline__ int count() const { return __popc(bits); }
  __device__ __forceinline__ auto there() const {
    return [bits = bits](int i) { return static_cast<bool>(bits >> i & 1); };
  }
};

// Where a row has a thread's vectors. It is one run of memory; or SEGMENTED, in as many runs as there are samples, of
// segment_columns columns each: a channel of batch norm. All rows and tensors have their segments equally far apart.
//
// PEELED, runs begin anywhere, but alike in all tensors. The vectors of a run are the pieces of 16 bytes that have some
// of its numbers; of the first and the last not all may be the run's. However it begins, there are no more of them than
// segment_room columns would be, so that a thread has the same vectors of every row, a few of which may be empty.
struct Places {
  long long first;                   // that of the first vector; 0, where SEGMENTED
  int offsets[SEGMENTED ? RESIDENT : 1];
  int left[PEELED ? RESIDENT : 1];  // how many numbers of its run there are from the offset on
  int run;                          // how many there are in all
  unsigned whole;                   // a bit for each vector that no lane of the warp ever has cut

  template <typename KernelArguments>
  __device__ __forceinline__ Places(const KernelArguments& arguments, const SharedPart& part)
      : first(SEGMENTED ? 0 : part.first + column_of(0)),
        run(static_cast<int>(arguments.segment_columns)),
        whole(0) {
    if constexpr (SEGMENTED) {
      const unsigned room = static_cast<unsigned>(arguments.segment_room);
      const unsigned stride = static_cast<unsigned>(arguments.segment_stride);
#pragma unroll
      for (int i = 0; i < RESIDENT; ++i) {
        const unsigned column = static_cast<unsigned>(part.first) + column_of(i), segment = column / room;
        const int place = static_cast<int>(column - segment * room);
        offsets[i] = static_cast<int>(segment * stride) + place;
        if constexpr (PEELED) left[i] = run - place;
        if constexpr (LONG_RUNS) {
          whole |= static_cast<unsigned>(__all_sync(0xffffffffu, place >= PHASES && run - place >= VECTOR)) << i;
        }
      }
    }
  }

  // Calls use(spot) with that of the i-th vector, of a row that begins at such a phase (see phase_of). Where runs are
  // short, vectors that are whole go the same way as those that are cut: forward, a branch for these takes 1.03 of the
  // time on an H100, and a vote of the warp, so that its lanes stay together, 1.05.
  template <typename Use>
  __device__ __forceinline__ void visit(int i, unsigned phase, const Use& use) const {
    if constexpr (!PEELED) {
      use(Spot{SEGMENTED ? offsets[i] : i * STEP});
    } else {
      const int place = run - left[i];  // in its run
      const unsigned begin = static_cast<unsigned>(offsets[i] - place);
      const int shift = static_cast<int>((phase + begin) % PHASES);
      if (LONG_RUNS && (whole >> i & 1)) return use(Spot{offsets[i] - shift});
      const int before = min(VECTOR, max(0, shift - place)), missing = min(VECTOR, max(0, VECTOR - shift - left[i]));
      use(CutSpot{offsets[i] - shift, (CutSpot::ALL >> missing) & (CutSpot::ALL << before)});
    }
  }
};

// How far a row begins behind a multiple of 16 bytes, or behind a line, in elements (see PHASES).
__device__ __forceinline__ unsigned phase_of(long long row, long long stride) {
  return PEELED ? static_cast<unsigned>(row * stride) % PHASES : 0;
}

// How many vectors of the part are a thread's.
__device__ __forceinline__ int own_vectors_of(int vectors) {
  const int thread = threadIdx.x;
  return thread < THREADS ? (vectors + THREADS - 1 - thread) / THREADS : 0;
}

// Weights or biases of a thread's columns, as they lie in memory, for all rows: widened they would have no registers.
template <typename T, bool HAS, int ACCESS_BYTES>
struct Kept {
  Vector<T, VECTOR> vectors[HAS ? RESIDENT : 1];

  __device__ __forceinline__ void load(const T* source, int i) {
    if constexpr (HAS) vectors[i] = load_in_pieces<VECTOR, ACCESS_BYTES>(source);
  }
  __device__ __forceinline__ void get(int i, Compute (&widened)[VECTOR]) {
    if constexpr (HAS) widen_all(vectors[i], widened);
    if constexpr (HAS && sizeof(T) < sizeof(Compute)) forget_widened(vectors[i]);
  }
};
