// What row_stream_* have in common: many long rows, wherever each begins in memory, which several blocks share, none of
// which waits for another.
//
// All blocks run at the same time, a group of blocks_per_row of them for every groups-th row, of which a block has a
// part: the same columns of every row, a run of memory. It comes in bulk to a stage of shared memory, where it lies as
// in memory if the tensor begins with a line, is summed, waits LAG turns for what the other blocks have of its row, is
// finished in place, and leaves in bulk.
//
// The first WARPS warps sum a part, and finish an older one. Of three more, one has parts fetched and sent; one tells
// the other blocks what its own has of a row; and one collects what all have, and puts it together in a fixed order.
// They meet at no barrier of the block: each stage has mbarriers for what is to be waited for, so that some warps may
// sum while others finish. What is told are parcels that carry the number of the turn beside the bits (see
// grid_words.cuh).
constexpr int WARPS = THREADS / 32;
constexpr int BLOCK_THREADS = THREADS + 96;
constexpr int MOVES = WARPS, TELLS = WARPS + 1, COLLECTS = WARPS + 2;  // the other warps
constexpr int UNDER_WAY = AHEAD - LAG;                                 // parts on their way while one is summed
// Turns whose words are kept. A block that tells of a turn has what came LAG + 1 turns before from all, who had then
// told that turn and so have read what came LAG + 1 turns before that one.
constexpr int EXCHANGES = 2 * LAG + 2;
constexpr int STEP = THREADS * VECTOR;   // numbers from one of a thread's vectors to its next
constexpr int ROOM = RESIDENT * STEP;    // numbers that a stage has of a tensor
constexpr int LINE = BULK_ALIGNMENT / sizeof(X_TYPE);
static_assert(VECTOR * sizeof(X_TYPE) == 16 && ROOM % LINE == 0 && WARPS <= 32);
static_assert(LAG >= 1 && UNDER_WAY >= 1);

// Where a block's part of a row lies: in a stage, and in memory.
struct Placed {
  long long stage;  // the number of a tensor that the stage's first is
  int begin;        // the part's, in the stage
  int end;

  __device__ __forceinline__ static int whole(int numbers) { return numbers / VECTOR * VECTOR; }
  __device__ __forceinline__ unsigned bytes_in_bulk() const { return (whole(end) - whole(begin)) * sizeof(X_TYPE); }
};

// The block's part of a row.
template <typename KernelArguments>
__device__ __forceinline__ Placed placed(const KernelArguments& arguments, const SharedPart& part, long long row) {
  const long long first = row * arguments.stride;
  const int begin = static_cast<int>(static_cast<unsigned>(first) % LINE);
  return {first + part.first - begin, begin, begin + part.count};
}

// What is waited for at each stage, in turns. A row is known when who collects has its sums. Who knows it may write
// over what was summed: so who tells has read what the warps have of it, too, and so many more threads have arrived.
template <int MORE>
struct Stages {
  BulkArrival arrived[AHEAD];
  Mbarriers<THREADS, AHEAD> summed;
  Mbarriers<64 + MORE, AHEAD> known;
  Mbarriers<THREADS, AHEAD> finished;

  // By one thread, which may fetch at once; others may wait after a __syncthreads().
  __device__ __forceinline__ void begin() {
    for (int i = 0; i < AHEAD; ++i) arrived[i].begin();
    summed.begin();
    known.begin();
    finished.begin();
  }
  __device__ __forceinline__ void wait_for_arrival(int turn) { arrived[turn % AHEAD].wait(turn / AHEAD); }
};

// The numbers of the last 16 bytes of a part, if not all are the part's: to read further might leave the tensor. One
// thread has them in registers, on their way.
struct Tail {
  X_TYPE numbers[VECTOR - 1];

  __device__ __forceinline__ void load(const X_TYPE* tensor, const Placed& of) {
    const int from = Placed::whole(of.end);
#pragma unroll
    for (int i = 0; i < VECTOR - 1; ++i) {
      if (from + i < of.end) numbers[i] = tensor[of.stage + from + i];
    }
  }
  __device__ __forceinline__ void store(X_TYPE* stage, const Placed& of) const {
    const int from = Placed::whole(of.end);
#pragma unroll
    for (int i = 0; i < VECTOR - 1; ++i) {
      if (from + i < of.end) stage[from + i] = numbers[i];
    }
    if constexpr (ENDS_IN_ZEROS) {
#pragma unroll
      for (int i = 1; i < VECTOR; ++i) {
        if (from < of.end && from + i >= of.end) narrow(Compute{0}, stage[from + i]);
      }
    }
  }
};

// What comes before a part in its first 16 bytes is fetched with it: it is the row's, or one's before.
__device__ __forceinline__ void fetch_in_bulk(BulkArrival& arrival, X_TYPE* stage, const X_TYPE* tensor,
                                              const Placed& of) {
  const int from = Placed::whole(of.begin);
  if (of.bytes_in_bulk() > 0) arrival.fetch(stage + from, tensor + of.stage + from, of.bytes_in_bulk());
}

// By a warp; numbers that share 16 bytes with others go one by one.
__device__ __forceinline__ void send_part(X_TYPE* tensor, const X_TYPE* stage, const Placed& of) {
  X_TYPE* const to = tensor + of.stage;
  const int lane = threadIdx.x % 32;
  const int first = min(Placed::whole(of.begin + VECTOR - 1), of.end), last = max(first, Placed::whole(of.end));
  if (lane == 0 && first < last) send_bulk(to + first, stage + first, (last - first) * sizeof(X_TYPE));
  const int edge = of.begin + lane < first ? of.begin + lane : of.begin + lane + (last - first);
  if (edge < of.end) to[edge] = stage[edge];
}

// A thread's vectors of a part: every THREADS-th of the stage.
struct OwnVectors {
  static_assert(RESIDENT <= 32, "a bit for each");
  static constexpr unsigned ALL = (1u << VECTOR) - 1;
  unsigned whole;  // those that no lane of the warp has cut, wherever the part begins

  __device__ __forceinline__ explicit OwnVectors(int count) : whole(0) {
#pragma unroll
    for (int i = 0; i < RESIDENT; ++i) {
      const bool is_whole = place(i) >= LINE - 1 && place(i) + VECTOR <= count;
      whole |= static_cast<unsigned>(__all_sync(0xffffffffu, is_whole)) << i;
    }
  }

  __device__ __forceinline__ static int place(int i) { return i * STEP + static_cast<int>(threadIdx.x) * VECTOR; }

  // Calls use(there), where there(j) tells whether the j-th number of the i-th is the part's.
  template <typename Use>
  __device__ __forceinline__ void visit(int i, const Placed& of, const Use& use) const {
    if (whole >> i & 1) return use(All{});
    const int before = min(VECTOR, max(0, of.begin - place(i)));
    const int missing = min(VECTOR, max(0, place(i) + VECTOR - of.end));
    const unsigned bits = (ALL >> missing) & (ALL << before);
    use([bits](int j) { return static_cast<bool>(bits >> j & 1); });
  }
};

// How many numbers of a part a warp has in its first COUNT vectors.
template <int COUNT>
__device__ __forceinline__ Compute numbers_of_warp(int warp, const Placed& of) {
  const auto within = [&](int place) { return min(max(place, of.begin), of.end); };
  int numbers = 0;
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    const int place = i * STEP + warp * 32 * VECTOR;
    numbers += within(place + 32 * VECTOR) - within(place);
  }
  return static_cast<Compute>(numbers);
}
