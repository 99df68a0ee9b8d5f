// What row_pipeline_* keep of the columns of a block's part, for all rows.
//
// Where a thread has the same columns of every row, that is in its registers. Where rows begin anywhere, and parts are
// runs, its vectors are of other columns in each, so it lies in shared memory: what is kept of every VECTOR-th column
// behind each other. So threads whose vectors are neighbours read and write numbers that are neighbours, whichever
// columns their vectors begin at. There are places for columns beside the part, too, of which a vector may have some:
// nobody puts weights there, and what is read there is masked.

// Where what is kept of a thread's columns lies, in a row that begins `phase` behind a multiple of 16 bytes, in
// elements.
struct ColumnPlaces {
  // A vector may begin up to VECTOR - 1 columns before the part, and end as many behind it: of each VECTOR-th column
  // there is a place more, the first.
  static constexpr int PITCH = RESIDENT * THREADS + 1, COUNT = VECTOR * PITCH;
  static_assert(!PARTS_ARE_RUNS || COUNT * sizeof(Compute) % 16 == 0, "what lies behind sums is aligned");
  int of_first[PARTS_ARE_RUNS ? VECTOR : 1];  // of the thread's first vector

  __device__ __forceinline__ static int of_column(int column) {
    return column % VECTOR * PITCH + column / VECTOR + 1;
  }

  __device__ __forceinline__ explicit ColumnPlaces(unsigned phase) {
    if constexpr (!PARTS_ARE_RUNS) return;
    // The thread's first vector begins at column threadIdx.x * VECTOR - phase. To add VECTOR keeps a remainder from
    // being negative, and is a place too far.
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) {
      of_first[j] = of_column(j - static_cast<int>(phase) + VECTOR) - 1 + static_cast<int>(threadIdx.x);
    }
  }

  // Of the j-th number of the i-th vector.
  __device__ __forceinline__ int operator()(int i, int j) const { return of_first[j] + i * THREADS; }
};

// Weights or biases of a thread's columns, as they lie in memory: widened they would have no registers.
template <typename T, bool HAS, int ACCESS_BYTES>
struct Kept {
  Vector<T, VECTOR> vectors[HAS ? RESIDENT : 1];

  // Those of the i-th vector, if its columns are there; PARTS_ARE_RUNS, at the end of a row not all need be.
  __device__ __forceinline__ void fetch(const T* source, const OwnColumns& own, int i) {
    if constexpr (!HAS) return;
    const T* from = source + own.first + column_of(i);
    const int count = own.count - column_of(i);
    if (count >= VECTOR) {
      vectors[i] = load_in_pieces<VECTOR, ACCESS_BYTES>(from);
    } else if constexpr (PARTS_ARE_RUNS) {
#pragma unroll
      for (int j = 0; j < VECTOR; ++j) {
        if (j < count) vectors[i].lane[j] = from[j];
      }
    }
  }

  __device__ __forceinline__ void get(int i, Compute (&widened)[VECTOR]) {
    if constexpr (HAS) widen_all(vectors[i], widened);
    if constexpr (HAS && sizeof(T) < sizeof(Compute)) forget_widened(vectors[i]);
  }
};

// Weights and biases of the columns; none where they are by channel.
struct KeptAffine {
  static constexpr bool WEIGHT = HAS_WEIGHT && !HAS_CHANNELS, BIAS = HAS_BIAS && !HAS_CHANNELS;
  static constexpr int NUMBERS = WEIGHT + BIAS > 0 ? WEIGHT + BIAS : 1;
  using OfColumn = Vector<KEPT_TYPE, NUMBERS>;

  Kept<WEIGHT_TYPE, WEIGHT, WEIGHT_ACCESS> weights;
  Kept<BIAS_TYPE, BIAS, BIAS_ACCESS> biases;
  OfColumn* shared;  // ColumnPlaces::COUNT of them

  // With shared memory for them, where they lie there. A __syncthreads() must lie between this and the first `get`.
  __device__ __forceinline__ void fetch(const WEIGHT_TYPE* weight, const BIAS_TYPE* bias, const OwnColumns& own,
                                       void* memory) {
    // Those on their way have registers, wherever they are put.
    constexpr int AT_ONCE = !PARTS_ARE_RUNS ? RESIDENT : sizeof(WEIGHT_TYPE) + sizeof(BIAS_TYPE) > 8 ? 1 : 4;
    shared = static_cast<OfColumn*>(memory);
#pragma unroll
    for (int first = 0; first < RESIDENT; first += AT_ONCE) {
#pragma unroll
      for (int i = first; i < RESIDENT && i < first + AT_ONCE; ++i) {
        weights.fetch(weight, own, i);
        biases.fetch(bias, own, i);
      }
#pragma unroll
      for (int i = first; i < RESIDENT && i < first + AT_ONCE; ++i) put(own, i);
    }
  }

  // Those of the i-th vector.
  __device__ __forceinline__ void get(int i, const ColumnPlaces& places, Compute (&weight)[VECTOR],
                                      Compute (&bias)[VECTOR]) {
    if constexpr (PARTS_ARE_RUNS) {
#pragma unroll
      for (int j = 0; j < VECTOR; ++j) {
        if constexpr (!WEIGHT && !BIAS) break;
        const OfColumn numbers = load<KEPT_TYPE, NUMBERS>(shared[places(i, j)].lane);
        if constexpr (WEIGHT) weight[j] = widen(numbers, 0);
        if constexpr (BIAS) bias[j] = widen(numbers, NUMBERS - 1);
      }
    } else {
      weights.get(i, weight);
      biases.get(i, bias);
    }
    add_weight_offset(weight);
  }

 private:
  // Puts what was loaded where all threads find it.
  __device__ __forceinline__ void put(const OwnColumns& own, int i) const {
    if constexpr (!PARTS_ARE_RUNS || (!WEIGHT && !BIAS)) return;
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) {
      const int column = column_of(i) + j;
      if (column >= own.count) continue;
      OfColumn numbers;
      if constexpr (WEIGHT) narrow(widen(weights.vectors[i], j), numbers.lane[0]);
      if constexpr (BIAS) narrow(widen(biases.vectors[i], j), numbers.lane[NUMBERS - 1]);
      store(shared[ColumnPlaces::of_column(column)].lane, numbers);
    }
  }
};

// Sums over rows of NUMBERS numbers of each column.
template <int NUMBERS>
struct KeptSums {
  static constexpr int AT_LEAST_ONE = NUMBERS > 0 ? NUMBERS : 1;
  using OfColumn = Vector<Compute, AT_LEAST_ONE>;

  Compute sums[NUMBERS > 0 && !PARTS_ARE_RUNS ? RESIDENT : 1][VECTOR][AT_LEAST_ONE];  // zeros at first
  OfColumn* shared;  // ColumnPlaces::COUNT of them

  // With shared memory for them, where they lie there. A __syncthreads() must lie between this and the first `get`.
  __device__ __forceinline__ void clear(void* memory) {
    if constexpr (NUMBERS == 0 || !PARTS_ARE_RUNS) return;
    shared = static_cast<OfColumn*>(memory);
    for (int i = threadIdx.x; i < ColumnPlaces::COUNT; i += THREADS) shared[i] = {};
  }

  // Those of the i-th vector. Between two barriers, no other thread has one of its columns.
  __device__ __forceinline__ void get(int i, const ColumnPlaces& places, OfColumn (&values)[VECTOR]) const {
    if constexpr (NUMBERS == 0) return;
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) {
      if constexpr (PARTS_ARE_RUNS) {
        values[j] = load<Compute, AT_LEAST_ONE>(shared[places(i, j)].lane);
      } else {
#pragma unroll
        for (int k = 0; k < NUMBERS; ++k) values[j].lane[k] = sums[i][j][k];
      }
    }
  }
  __device__ __forceinline__ void put(int i, const ColumnPlaces& places, const OfColumn (&values)[VECTOR]) {
    if constexpr (NUMBERS == 0) return;
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) {
      if constexpr (PARTS_ARE_RUNS) {
        store(shared[places(i, j)].lane, values[j]);
      } else {
#pragma unroll
        for (int k = 0; k < NUMBERS; ++k) sums[i][j][k] = values[j].lane[k];
      }
    }
  }

  // Writes the k-th of each column to what begins with that of the row's first, when all are complete.
  template <typename T>
  __device__ __forceinline__ void write(int k, T* target, const OwnColumns& own) const {
    if constexpr (PARTS_ARE_RUNS) {
      for (int column = threadIdx.x; column < own.count; column += THREADS) {
        narrow(shared[ColumnPlaces::of_column(column)].lane[k], target[own.first + column]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < RESIDENT; ++i) {
        Compute values[VECTOR];
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) values[j] = sums[i][j][k];
        if (column_of(i) < own.count) store_rounded(target + own.first + column_of(i), values);
      }
    }
  }
};
