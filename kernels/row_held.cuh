// What row_held_forward and row_held_backward have in common: rows of which the shared memory of all blocks has room
// for one and a part of the next. A pipeline wants room for three, so that none waits for what blocks tell each other.
//
// All blocks run at the same time and share every row. A block's part of it comes in bulk, in pieces of one vector for
// each of the THREADS working threads, to a ring of as many places as there is room for. A thread sums its vector of a
// piece when that has come. In the next turn it takes the vector to registers, which have room for one row, so that the
// place is free for a piece of a row to come; and in the turn after that, when the row is known, it finishes the vector
// there. All this goes side by side: of three rows a vector each, and then the next. So results leave at the rate at
// which numbers come, and there is no time when all blocks do nothing but write, in which what they tell each other
// waits behind that.
//
// One more warp has pieces fetched. Another tells the other blocks what its own has of a row, and puts together what
// all have in a fixed order; what is told are parcels that carry the number of the turn beside the bits (see
// grid_words.cuh).
constexpr int WARPS = THREADS / 32;
constexpr int BLOCK_THREADS = THREADS + 64;
constexpr int MOVES = WARPS, SHARES = WARPS + 1;  // the other warps
constexpr int PIECE = THREADS * VECTOR;           // numbers of a tensor
constexpr int LAG = 2;                            // turns from the sums of a row to its finish
// Turns whose parcels are kept. Who tells of a turn has what came one turn before from all, who then had what came two
// turns before.
constexpr int EXCHANGES = 2;
static_assert(VECTOR * sizeof(X_TYPE) == 16 && RING > RESIDENT);

// Where pieces arrive, one row's after another's, of all tensors, and which places are free again.
struct Ring {
  BulkArrival arrived[RING];
  Mbarriers<THREADS, RING> emptied;

  // By one thread; all others see it after a __syncthreads().
  __device__ __forceinline__ void begin() {
    for (int i = 0; i < RING; ++i) arrived[i].begin();
    emptied.begin();
  }
};

// Who goes through the places of the ring, piece by piece.
struct Walk {
  int place = 0;
  int round = 0;

  __device__ __forceinline__ void go_on() {
    if (++place < RING) return;
    place = 0;
    ++round;
  }
};

// Where the block's part of a tensor's first row begins.
struct Source {
  const X_TYPE* memory;
  long long stride;  // elements from one row to the next
};

// Fetches the block's part of all rows, by one thread.
template <int TENSORS>
__device__ __forceinline__ void fetch_rows(Ring& ring, X_TYPE* staged, const Source (&sources)[TENSORS], long long rows,
                                           int count) {
  Walk walk;
  for (long long row = 0; row < rows; ++row) {
    for (int i = 0; i < RESIDENT; ++i, walk.go_on()) {
      const int numbers = max(0, min(PIECE, count - i * PIECE));
      const unsigned bytes = numbers * sizeof(X_TYPE);
      if (walk.round > 0) {
        ring.emptied.wait(walk.place, walk.round - 1);
        let_bulk_copies_see();  // that it was read: they are not in line behind loads
      }
      BulkArrival& arrival = ring.arrived[walk.place];
      arrival.expect(TENSORS * bytes);
      if (bytes == 0) continue;
#pragma unroll
      for (int j = 0; j < TENSORS; ++j) {
        const Source& source = sources[j];
        arrival.fetch(staged + (walk.place * TENSORS + j) * PIECE, source.memory + row * source.stride + i * PIECE,
                      bytes);
      }
    }
  }
}

// How warps wait for each other where a row is summed, and where it is known; of two turns.
struct Meetings {
  Mbarriers<THREADS> summed;
  Mbarriers<32> known;

  __device__ __forceinline__ void begin() {
    summed.begin();
    known.begin();
  }
};

// Whoever uses that has waited for all of the vector.
__device__ __forceinline__ unsigned first_word(const Vector<X_TYPE, VECTOR>& values) {
  return *reinterpret_cast<const unsigned*>(&values);
}

// The turns of a working warp. Calls of a turn begin(turn, row), with that of the row that is summed, which there may
// be no more; then, of its vectors one after the other, finish(i, row) LAG turns after sum(i, slots), and one turn
// after it take(i, slots), where slots are the thread's, of each tensor; and end(turn), when a row is summed. What take
// returns has bits of all that it has loaded, for which the place is kept.
template <int TENSORS, typename Begin, typename Finish, typename Take, typename Sum, typename End>
__device__ __forceinline__ void take_turns(Ring& ring, const X_TYPE* staged, long long rows, const Begin& begin,
                                           const Finish& finish, const Take& take, const Sum& sum, const End& end) {
  Walk summing, taking;
  const auto slots_at = [&](const Walk& walk) {
    return staged + walk.place * (TENSORS * PIECE) + static_cast<int>(threadIdx.x) * VECTOR;
  };
  long long row = 0;  // that is summed
  for (int turn = 0; row < rows + LAG; ++turn, ++row) {
    const bool sums_up = row < rows, takes = row > 0 && row <= rows, finishes = row >= LAG;
    begin(turn, row);
#pragma unroll
    for (int i = 0; i < RESIDENT; ++i) {
      if (finishes) finish(i, row - LAG);
      unsigned taken = 0;
      if (takes) taken = take(i, slots_at(taking));
      if (sums_up) {
        ring.arrived[summing.place].wait(summing.round);
        sum(i, slots_at(summing));
        summing.go_on();
      }
      if (takes) {
        ring.emptied.arrive_behind(taking.place, taken);
        taking.go_on();
      }
    }
    if (sums_up) end(turn);
  }
}
