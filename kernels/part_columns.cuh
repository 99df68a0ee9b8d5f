// What row_stream_* keep of the columns of a block's part, for all rows, in registers.
//
// A thread keeps it of every THREADS-th unit of the part: UNIT columns behind each other, so many that all rows of a
// block begin equally far behind a multiple of them. A part lies in a stage as in memory, so that a thread's units move
// with the row, by whole units. The first one may have columns before the part, and the last one columns behind it.
static_assert(VECTOR % UNIT == 0);

struct Units {
  static constexpr int COUNT = RESIDENT * VECTOR / UNIT;  // of a thread, at most
  static constexpr int APART = THREADS * UNIT;            // columns from a thread's unit to its next

  int before;  // columns before the part that its first unit has
  int own;     // of the thread

  // `begin` is where the part of some row begins in its stage.
  __device__ __forceinline__ Units(const SharedPart& part, int begin) : before(begin % UNIT), own(0) {
    const int units = (part.count + before + UNIT - 1) / UNIT, thread = threadIdx.x;
    if (thread < THREADS) own = (units + THREADS - 1 - thread) / THREADS;
  }

  // Where the i-th begins in the part.
  __device__ __forceinline__ int column(int i) const {
    return static_cast<int>(threadIdx.x) * UNIT - before + i * APART;
  }
  // Where the thread's first lies in a stage in which the part begins there.
  __device__ __forceinline__ X_TYPE* first_in(X_TYPE* stage, int begin) const {
    return pinned_shared(stage + begin + column(0));
  }

  // Calls use(i) for each; as many as a vector has with one branch, where they are all there.
  template <typename Use>
  __device__ __forceinline__ void visit(const Use& use) const {
    constexpr int AT_ONCE = VECTOR / UNIT;
#pragma unroll
    for (int first = 0; first < COUNT; first += AT_ONCE) {
      if (first + AT_ONCE <= own) {
#pragma unroll
        for (int i = first; i < first + AT_ONCE; ++i) use(i);
      } else if constexpr (AT_ONCE > 1) {
#pragma unroll
        for (int i = first; i < first + AT_ONCE - 1; ++i) {
          if (i < own) use(i);
        }
      }
    }
  }
};

// What a thread holds of numbers T: themselves or, where it KEEPS_WIDENED, what they are computed with.
template <typename T, bool WIDENED>
struct HeldAs {
  using Type = T;
};
template <typename T>
struct HeldAs<T, true> {
  using Type = Compute;
};

// Weights or biases of a thread's columns.
template <typename T, bool HAS>
struct Kept {
  using Held = typename HeldAs<T, KEEPS_WIDENED>::Type;
  Vector<Held, UNIT> units[HAS ? Units::COUNT : 1];

  // Those of the i-th unit, which begins in that column of the part, if its columns are there.
  __device__ __forceinline__ void fetch(const T* source, const SharedPart& part, int column, int i) {
    if constexpr (!HAS) return;
#pragma unroll
    for (int j = 0; j < UNIT; ++j) {
      const bool is_there = column + j >= 0 && column + j < part.count;
      if (is_there) narrow(widen(source[part.first + column + j]), units[i].lane[j]);
    }
  }

  __device__ __forceinline__ void get(int i, Compute (&widened)[UNIT]) {
    if constexpr (HAS) widen_all(units[i], widened);
    if constexpr (HAS && sizeof(Held) < sizeof(Compute)) forget_widened(units[i]);
  }
};

// Weights and biases of the columns; zeros at first.
struct KeptAffine {
  Kept<WEIGHT_TYPE, HAS_WEIGHT> weights;
  Kept<BIAS_TYPE, HAS_BIAS> biases;

  __device__ __forceinline__ void fetch(const WEIGHT_TYPE* weight, const BIAS_TYPE* bias, const SharedPart& part,
                                        const Units& own) {
#pragma unroll
    for (int i = 0; i < Units::COUNT; ++i) {
      weights.fetch(weight, part, own.column(i), i);
      biases.fetch(bias, part, own.column(i), i);
    }
  }

  // Those of the i-th unit.
  __device__ __forceinline__ void get(int i, Compute (&weight)[UNIT], Compute (&bias)[UNIT]) {
    weights.get(i, weight);
    biases.get(i, bias);
    add_weight_offset(weight);
  }
};

// Sums over rows of NUMBERS numbers of each column.
template <int NUMBERS>
struct KeptSums {
  Compute sums[NUMBERS > 0 ? Units::COUNT : 1][UNIT][NUMBERS > 0 ? NUMBERS : 1];  // zeros at first

  // Writes the k-th of each column to what begins with that of the row's first. To be called by the whole block:
  // through shared memory, of which nothing else is needed, since units do not begin where memory can be written at
  // once.
  template <typename T>
  __device__ __forceinline__ void write(int k, T* target, const SharedPart& part, const Units& own,
                                        Compute* shared) const {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < Units::COUNT; ++i) {
      if (i >= own.own) continue;
#pragma unroll
      for (int j = 0; j < UNIT; ++j) shared[own.column(i) + own.before + j] = sums[i][j][k];
    }
    __syncthreads();
    for (int column = threadIdx.x; column < part.count; column += BLOCK_THREADS) {
      narrow(shared[column + own.before], target[part.first + column]);
    }
  }
};
