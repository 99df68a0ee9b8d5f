// Rows of row_bulk_*: they lie behind each other in memory, and a block's are a run of it, which comes to shared memory
// as a whole and leaves as a whole (see bulk_copy.cuh). So it makes no difference how a row begins: a thread has the
// same columns of all of its rows, every THREADS_PER_ROW-th vector, and their weights and biases in registers. A vector
// is as many numbers as divide a row, which is often one.
constexpr int BLOCK_THREADS = THREADS_PER_ROW * ROWS_AT_ONCE;
constexpr int PIECE = 16 / sizeof(X_TYPE);  // numbers of 16 bytes
static_assert(ROWS_PER_BLOCK % ROWS_AT_ONCE == 0 && BLOCK_THREADS >= 2 * PIECE && BLOCK_THREADS >= ROWS_PER_BLOCK);
// What sums begin with: minus zero, as the compiler leaves out what adds that. To add zero would be an instruction.
constexpr Compute NOTHING = -0.0;

__device__ __forceinline__ unsigned thread_in_block() { return threadIdx.y * THREADS_PER_ROW + threadIdx.x; }

// The block's rows: where they begin in every tensor, and how many numbers they are. Whole pieces of 16 bytes go in
// bulk; the numbers before and behind those, of which most runs have none, one by one.
struct Run {
  long long first;
  unsigned length;
  unsigned head;   // numbers before the first piece
  unsigned whole;  // numbers of all pieces

  // Where it comes to in shared memory: as far behind a line as in memory, for between two that lie otherwise copies
  // are slow.
  __device__ __forceinline__ X_TYPE* place(X_TYPE* shared, const X_TYPE* global) const {
    return shared + reinterpret_cast<size_t>(global + first) % BULK_ALIGNMENT / sizeof(X_TYPE);
  }
  __device__ __forceinline__ void fetch(BulkArrival& arrival, X_TYPE* shared, const X_TYPE* global) const {
    const X_TYPE* pieces = global + first + head;
    if (thread_in_block() == 0 && whole > 0) arrival.fetch(shared + head, pieces, whole * sizeof(X_TYPE));
    if (whole < length) copy_edges(shared, global + first);
  }
  __device__ __forceinline__ void send(X_TYPE* global, const X_TYPE* shared) const {
    if (thread_in_block() == 0 && whole > 0) send_bulk(global + first + head, shared + head, whole * sizeof(X_TYPE));
    if (whole < length) copy_edges(global + first, shared);
  }

 private:
  __device__ __forceinline__ void copy_edges(X_TYPE* target, const X_TYPE* source) const {
    const unsigned edge = thread_in_block(), number = edge < head ? edge : edge + whole;
    if (number < length) target[number] = source[number];
  }
};

__device__ __forceinline__ Run run_of(const X_TYPE* x, long long first, unsigned length) {
  const unsigned behind = reinterpret_cast<size_t>(x + first) % 16 / sizeof(X_TYPE);
  const unsigned head = min((PIECE - behind) % PIECE, length);
  return {first, length, head, (length - head) / PIECE * PIECE};
}

// What a run takes of shared memory: whole lines, and one more to begin anywhere in the first.
__device__ __forceinline__ unsigned room_of_run(unsigned length) {
  constexpr unsigned LINE = BULK_ALIGNMENT / sizeof(X_TYPE);
  return (length + LINE - 1) / LINE * LINE + LINE;
}

// The vectors of a row that a thread has.
struct Own {
  int vectors;  // of a row

  __device__ __forceinline__ bool has(int i) const {
    return i < VECTORS - 1 || i * THREADS_PER_ROW + static_cast<int>(threadIdx.x) < vectors;
  }
  __device__ __forceinline__ static int column(int i) { return (i * THREADS_PER_ROW + threadIdx.x) * VECTOR; }
};

template <typename A, typename B>
constexpr bool ARE_ALIKE = false;
template <typename A>
constexpr bool ARE_ALIKE<A, A> = true;

// The weights and biases of a thread's columns, as they come: those of a single column in one register, if they are of
// sixteen bits.
struct OwnAffine {
  static constexpr bool PAIRED =
      VECTOR == 1 && HAS_WEIGHT && HAS_BIAS && sizeof(WEIGHT_TYPE) == 2 && ARE_ALIKE<WEIGHT_TYPE, BIAS_TYPE>;
  using Pair = Vector<WEIGHT_TYPE, 2>;
  unsigned pairs[PAIRED ? VECTORS : 1];
  Vector<WEIGHT_TYPE, VECTOR> weights[PAIRED ? 1 : VECTORS];
  Vector<BIAS_TYPE, VECTOR> biases[PAIRED ? 1 : VECTORS];

  __device__ __forceinline__ void load(const WEIGHT_TYPE* weight, const BIAS_TYPE* bias, const Own& own) {
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      if (!own.has(i)) continue;
      const int column = own.column(i);
      if constexpr (PAIRED) {
        const Pair pair = {{weight[column], *reinterpret_cast<const WEIGHT_TYPE*>(bias + column)}};
        pairs[i] = *reinterpret_cast<const unsigned*>(&pair);
      } else {
        if constexpr (HAS_WEIGHT) weights[i] = load_in_pieces<VECTOR, WEIGHT_ACCESS>(weight + column);
        if constexpr (HAS_BIAS) biases[i] = load_in_pieces<VECTOR, BIAS_ACCESS>(bias + column);
      }
    }
  }

  // What is widened here had better not be kept for the next row: it would take twice the registers.
  __device__ __forceinline__ void get(int i, Compute (&weight)[VECTOR], Compute (&bias)[VECTOR]) {
    if constexpr (PAIRED) {
      pin(pairs[i]);
      const Pair pair = *reinterpret_cast<const Pair*>(&pairs[i]);
      weight[0] = widen(pair, 0);
      bias[0] = widen(pair, 1);
    } else {
      forget_widened(weights[i]);
      forget_widened(biases[i]);
      if constexpr (HAS_WEIGHT) widen_all(weights[i], weight);
      if constexpr (HAS_BIAS) widen_all(biases[i], bias);
    }
    add_weight_offset(weight);
  }
};
