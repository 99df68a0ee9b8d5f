// What row_pipeline_forward and row_pipeline_backward have in common: many long rows, each of which several blocks
// share, none of which waits for another.
//
// All blocks run at the same time, a group of blocks_per_row of them for every groups-th row. A block's part of
// ROWS_AHEAD rows lies in shared memory, or is on its way there: 16 bytes a slot, RESIDENT slots a thread for each row.
// A slot belongs to one thread, which fills it again as soon as it has stored what became of it. What a thread needs of
// the weights of its columns it has in registers, for all rows.
//
// A row is finished LAG turns after it was summed. Until then the last two warps of each block see to its sums. One
// tells the other blocks what its own has of the row; the other waits for what all have, and puts it together in a
// fixed order. What is told are words that carry the number of the turn beside the bits, so that it takes neither fence
// nor barrier. They must be zero at the start. The other warps of a block sum a row, meet, and finish an older one.
static_assert(LAG >= 1 && LAG < ROWS_AHEAD);
constexpr int WARPS = THREADS / 32;  // that sum and finish
constexpr int BLOCK_THREADS = THREADS + 64;
constexpr int STEP = THREADS * VECTOR;                // columns from one vector of a thread to the next
constexpr int STAGED = ROWS_AHEAD * RESIDENT * STEP;  // elements of a tensor in shared memory
// Turns whose words are kept. A block that tells of a turn has what came LAG turns before from all, who may still be
// reading what came up to LAG - 1 turns before that.
constexpr int EXCHANGES = 2 * LAG;

// A thread has every THREADS-th vector of the part; where the i-th begins.
__device__ __forceinline__ int column_of(int i) { return i * STEP + static_cast<int>(threadIdx.x) * VECTOR; }

// How many vectors of the part are a thread's.
__device__ __forceinline__ int own_vectors_of(int vectors) {
  const int thread = threadIdx.x;
  return thread < THREADS ? (vectors + THREADS - 1 - thread) / THREADS : 0;
}

// The first of a thread's slots of a turn's row, in the slots of a tensor.
__device__ __forceinline__ X_TYPE* slots_of(X_TYPE* staged, int turn) {
  return staged + turn % ROWS_AHEAD * RESIDENT * STEP + column_of(0);
}

// Calls visit(FIRST), ..., visit(END - 1), each when the thread's vectors in that slot of the turn's row have arrived.
// Each slot was filled in a group of its own, in order, and what is under way are LAG rows fewer than lie here.
template <int FIRST, int END, typename Visit>
__device__ __forceinline__ void as_they_arrive(const Visit& visit) {
  if constexpr (FIRST < END) {
    copy_async_wait<(ROWS_AHEAD - LAG) * RESIDENT - 1 - FIRST>();
    visit(FIRST);
    as_they_arrive<FIRST + 1, END>(visit);
  }
}

// What the blocks of a group tell each other of EXCHANGES turns: COUNT numbers each.
template <int COUNT>
struct Exchange {
  static constexpr int COUNT_WORDS = COUNT * WORDS;
  // Words for one of them: as many as lanes may read, so that every place is a constant distance from the lane's first.
  static constexpr int PITCH = 32 * PARTS_PER_LANE;

  long long* words;  // of the group: [EXCHANGES][COUNT_WORDS][PITCH]
  int rank;
  int blocks;

  __device__ __forceinline__ Exchange(long long* all, const Part& part)
      : words(all + part.group * EXCHANGES * COUNT_WORDS * PITCH), rank(part.rank), blocks(part.blocks) {}

  __device__ __forceinline__ long long* of_turn(int turn) const {
    return words + turn % EXCHANGES * COUNT_WORDS * PITCH;
  }

  // To be called by a warp whose lanes have the same numbers.
  __device__ __forceinline__ void tell(const Compute (&numbers)[COUNT], int turn) const {
    const int lane = threadIdx.x % 32;
    if (lane >= COUNT_WORDS) return;
    unsigned bits = 0;
#pragma unroll
    for (int i = 0; i < COUNT_WORDS; ++i) bits = lane == i ? bits_of(numbers[i / WORDS], i % WORDS) : bits;
    store_word(of_turn(turn) + lane * PITCH + rank, turn + 1, bits);
  }

  // What the blocks have of a row, every 32nd to a lane: of those that are not there, zeros. All words are asked for
  // together, until all have come: one after the other, each would take its way to the cache and back.
  __device__ __forceinline__ void await(Compute (&numbers)[PARTS_PER_LANE][COUNT], int turn) const {
    const int lane = threadIdx.x % 32;
    const auto there = [&](int i) { return lane + 32 * i < blocks; };
    const long long* from = of_turn(turn) + lane;
    // Else the address is made again for every word: instance norm of 2,097,152 float32 numbers takes 1.40 so, with it
    // 1.17 of a copy's time on an H200.
    asm volatile("" : "+l"(from));
    long long seen[PARTS_PER_LANE][COUNT_WORDS] = {};
    bool all;
    do {
      all = true;
#pragma unroll
      for (int i = 0; i < PARTS_PER_LANE; ++i) {
#pragma unroll
        for (int j = 0; j < COUNT_WORDS; ++j) {
          if (there(i) && !has_tag(seen[i][j], turn + 1)) seen[i][j] = load_word(from + j * PITCH + 32 * i);
        }
      }
#pragma unroll
      for (int i = 0; i < PARTS_PER_LANE; ++i) {
#pragma unroll
        for (int j = 0; j < COUNT_WORDS; ++j) all = all && (!there(i) || has_tag(seen[i][j], turn + 1));
      }
    } while (!all);
#pragma unroll
    for (int i = 0; i < PARTS_PER_LANE; ++i) {
#pragma unroll
      for (int j = 0; j < COUNT; ++j) {
        unsigned bits[WORDS];
#pragma unroll
        for (int k = 0; k < WORDS; ++k) bits[k] = bits_of_word(seen[i][j * WORDS + k]);
        numbers[i][j] = number_of(bits);
      }
    }
  }
};

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
