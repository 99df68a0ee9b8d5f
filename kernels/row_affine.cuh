// The weight and bias of row_block_*: a thread gets those of its vectors (see row_stage.cuh for what a place is).
//
// WEIGHTS names when they come to the registers, from memory through the cache:
// - late: when the sums of the row are known, so that they take no registers before;
// - early: before that, so that their way from memory costs no time of its own;
// - staged: late, but from shared memory, where they come once for all rows of a block, beside the first of them and
//   without registers. A row that fills the cache drives them out of it, and each row would cost their bytes again.
// Those by channel (see row_channels.cuh) are few. They come late, or staged: for each row, one channel to a thread.
enum class Weights { late, early, staged };
constexpr Weights weights_come = Weights::WEIGHTS;

// FORWARD, rows share what is staged; backward the addresses that it takes to share weights, or to copy them
// asynchronously, would spill. Rows that are PEELED begin each in its own way: what comes for all of them lies as in
// memory, and a thread reads its vectors across two pieces. So it is with weights or biases that begin so many elements
// behind a multiple of 16 bytes as their SHIFT says. But where a block takes turns, all of a thread's rows begin in the
// same way, and what is staged is its own, put there once.
constexpr bool SHIFTED_WEIGHTS = WEIGHT_SHIFT > 0 || BIAS_SHIFT > 0;
constexpr bool STAGED_AS_IN_MEMORY =
    FORWARD && (PEELED || SHIFTED_WEIGHTS) && !TAKES_TURNS && weights_come == Weights::staged;
constexpr bool ROWS_SHARE_WEIGHTS = FORWARD && (!PEELED || STAGED_AS_IN_MEMORY);
constexpr int STAGED_ROWS = ROWS_SHARE_WEIGHTS ? 1 : ROWS_PER_BLOCK;
// In shared memory, a multiple of 16 bytes of any type; as in memory, with two pieces more.
constexpr int STAGED_ELEMENTS =
    (STAGED_ROWS * THREADS_PER_ROW * VECTORS + 7) / 8 * 8 * VECTOR + (STAGED_AS_IN_MEMORY ? 32 : 0);

template <int ACCESS_BYTES, int SHIFT, typename T>
struct Parameter {
  const T* memory;  // of the block's part of a row
  T* staged;        // STAGED_ELEMENTS of shared memory
  Vector<T, VECTOR> early[VECTORS];
  Anywhere<T, VECTOR> anywhere{nullptr};  // the thread's first vector, where it is read across pieces

  // Those of the thread's i-th vector in shared memory.
  __device__ __forceinline__ T* own(int i) const {
    const int thread = ROWS_SHARE_WEIGHTS ? threadIdx.x : thread_in_block();
    return staged + (i * STAGED_ROWS * THREADS_PER_ROW + thread) * VECTOR;
  }

  // How far the row begins behind a multiple of 16 bytes, in elements.
  __device__ __forceinline__ int shift() const {
    return SHIFT > 0 ? SHIFT : static_cast<int>(reinterpret_cast<size_t>(memory) % 16 / sizeof(T));
  }

  // Starts to take the row into shared memory, where it lies as in memory: whole pieces, and number by number what is
  // left at its ends.
  __device__ __forceinline__ void stage_as_in_memory(int columns) const {
    constexpr int STEP = 16 / sizeof(T);
    constexpr int COPIES = (THREADS_PER_ROW * VECTORS * VECTOR / STEP + BLOCK_THREADS) / BLOCK_THREADS;
    static_assert(BLOCK_THREADS >= 2 * STEP);
    const int thread = thread_in_block(), head = (STEP - shift()) % STEP, whole = (columns - head) / STEP;
    const T* source = memory + head;
    T* target = staged + shift() + head;
#pragma unroll
    for (int i = 0; i < COPIES; ++i) {
      const int piece = i * BLOCK_THREADS + thread;
      if (piece < whole) copy_async<STEP, true>(target + piece * STEP, source + piece * STEP);
    }
    const int column = thread < head ? thread : thread + whole * STEP;
    if (thread < head || (thread < 2 * STEP && column < columns)) staged[shift() + column] = memory[column];
  }

  // To be called when a row begins.
  __device__ __forceinline__ void go_to(const Place& place) {
    if constexpr (!PEELED || (weights_come == Weights::staged && !STAGED_AS_IN_MEMORY)) return;
    anywhere = Anywhere<T, VECTOR>((STAGED_AS_IN_MEMORY ? staged + shift() : memory) + place.column(0));
  }

  // Takes this thread's share into shared memory, for all rows: where they are PEELED, they must all begin in the same
  // way. FORWARD it only starts to.
  __device__ __forceinline__ void stage(const Place& place) const {
    if constexpr (STAGED_AS_IN_MEMORY) return stage_as_in_memory(place.cut.columns);
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      if (STAGED_ROWS < ROWS_PER_BLOCK && i % ROWS_PER_BLOCK != row_in_block()) continue;
      if (!place.reaches(i)) continue;
      constexpr int STEP = PEELED ? 1 : ACCESS_BYTES / sizeof(T) < VECTOR ? ACCESS_BYTES / sizeof(T) : VECTOR;
#pragma unroll
      for (int j = 0; j < VECTOR; j += STEP) {
        const T* source = memory + place.column(i) + j;
        if constexpr (FORWARD && STEP * sizeof(T) >= 4) {
          copy_async<STEP, true>(own(i) + j, source);
        } else {
          store(own(i) + j, load<T, STEP>(source));
        }
      }
    }
  }

  // Those of the thread's i-th vector, from memory, or where they lie as in memory.
  __device__ __forceinline__ Vector<T, VECTOR> from(const T* first, const Place& place, int i) const {
    if constexpr (PEELED) return anywhere.load_from(i * THREADS_PER_ROW * VECTOR);
    if constexpr (SHIFT > 0) return load_shifted<SHIFT, VECTOR>(first + place.column(i));
    return load_in_pieces<VECTOR, ACCESS_BYTES>(first + place.column(i));
  }

  __device__ __forceinline__ void fetch_early(const Place& place) {
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      if (place.reaches(i)) early[i] = from(memory, place, i);
    }
  }

  // Those of the thread's i-th vector.
  __device__ __forceinline__ void get(const Place& place, int i, Compute (&values)[VECTOR]) const {
    constexpr int BYTES = sizeof(T) * VECTOR;
    if constexpr (::stage == Stage::run) return load_widened<VECTOR, ACCESS_BYTES>(memory + place.column(i), values);
    switch (weights_come) {
      case Weights::late: return widen_all(from(memory, place, i), values);
      case Weights::early: return widen_all(early[i], values);
      case Weights::staged:
        if constexpr (STAGED_AS_IN_MEMORY) return widen_all(from(staged + shift(), place, i), values);
        return widen_all(load_in_pieces<VECTOR, (BYTES < 16 ? BYTES : 16)>(own(i)), values);
    }
  }
};

static_assert(!HAS_CHANNELS || weights_come == Weights::late || weights_come == Weights::staged,
              "a channel has one weight, not one for each column");
constexpr bool STAGES_CHANNELS = HAS_CHANNELS && weights_come == Weights::staged;
static_assert(!STAGES_CHANNELS || !FORWARD || CENTERED, "forward they are put before the barrier of the mean");
static_assert(!STAGES_CHANNELS || (weights_of != WeightsOf::part && THREADS_PER_ROW > 32));
constexpr int STAGED_CHANNEL_ELEMENTS = STAGES_CHANNELS ? 2 * BLOCK_THREADS * STAGED_NUMBERS : 0;

// Weights by channel, of the rows that a block takes in turn. Where they are staged, a __syncthreads() must lie between
// `put` and the first `get` of a turn, and one between that and the `put` of the turn after the next.
struct ChannelTurns {
  ChannelAffine<STAGES_CHANNELS> affine;
  Compute* staged;  // STAGED_CHANNEL_ELEMENTS: [2][ROWS_PER_BLOCK][THREADS_PER_ROW][STAGED_NUMBERS]
  unsigned first;   // of the row's channels, in the block's part
  unsigned count;
  Compute next_weight[1];  // of the thread's channel
  Compute next_bias[1];

  // Starts to load those of a row. Read directly, its numbers had better be under way: `first_of` takes its time.
  // Ahead, those of the next row had better not be, or these come behind them.
  __device__ __forceinline__ void fetch(const Part& part, long long row) {
    if (!STAGES_CHANNELS || row >= part.rows || threadIdx.x >= count) return;
    const unsigned place = affine.channels.first_of(row) + first + threadIdx.x;
    load_affine<1>(affine.weights + place, affine.biases + place, next_weight, next_bias);
  }

  // Puts what was fetched where all threads find it.
  __device__ __forceinline__ void put(int turn) {
    if constexpr (!STAGES_CHANNELS) return;
    Compute* numbers = staged + (turn % 2 * ROWS_PER_BLOCK + row_in_block()) * THREADS_PER_ROW * STAGED_NUMBERS;
    if (threadIdx.x < count) {
      Compute* own = numbers + threadIdx.x * STAGED_NUMBERS;
      if constexpr (HAS_WEIGHT) own[0] = next_weight[0];
      if constexpr (HAS_BIAS) own[STAGED_NUMBERS - 1] = next_bias[0];
    }
    affine.staged = numbers - static_cast<int>(first) * STAGED_NUMBERS;
  }
};

template <typename KernelArguments>
__device__ __forceinline__ ChannelTurns channel_turns_of(const KernelArguments& arguments, const Part& part,
                                                         void* staged) {
  const auto affine = channel_affine_of<STAGES_CHANNELS>(arguments, part.first_column);
  ChannelTurns turns = {affine, static_cast<Compute*>(staged)};
  if constexpr (STAGES_CHANNELS) {
    turns.first = turns.affine.channels.of_column(0);
    turns.count = turns.affine.channels.of_column(part.columns - 1) - turns.first + 1;
  }
  return turns;
}

// Those of a thread's edges.
struct AffineEdges {
  OfEdges<Compute[1]> weight;
  OfEdges<Compute[1]> bias;
};

struct Affine {
  Parameter<WEIGHT_ACCESS, WEIGHT_SHIFT, WEIGHT_TYPE> weights;
  Parameter<BIAS_ACCESS, BIAS_SHIFT, BIAS_TYPE> biases;
  ChannelTurns by_channel;

  // To be called with the place of the first row; FORWARD before that is fetched: if it comes ahead, with its commit.
  __device__ __forceinline__ void stage(const Place& place) const {
    if constexpr (HAS_CHANNELS || weights_come != Weights::staged) return;
    if constexpr (HAS_WEIGHT) weights.stage(place);
    if constexpr (HAS_BIAS) biases.stage(place);
    if constexpr (FORWARD && ::stage == Stage::direct) copy_async_commit();
  }
  // To be called FORWARD by all threads in every step, when its row has arrived and before the first `get`.
  __device__ __forceinline__ void arrive(int turn) const {
    if constexpr (HAS_CHANNELS || weights_come != Weights::staged) return;
    if constexpr (::stage == Stage::direct) copy_async_wait<0>();
    if ((STAGED_AS_IN_MEMORY || STAGED_ROWS < ROWS_PER_BLOCK) && turn == 0) __syncthreads();
  }
  // To be called before the sums of a row; whoever calls it before the first keeps them for all.
  __device__ __forceinline__ void fetch_early(const Place& place) {
    if constexpr (HAS_WEIGHT && weights_come == Weights::early) weights.fetch_early(place);
    if constexpr (HAS_BIAS && weights_come == Weights::early) biases.fetch_early(place);
  }
  // To be called when a row begins.
  __device__ __forceinline__ void go_to(const Place& place) {
    if constexpr (HAS_CHANNELS) return by_channel.affine.go_to(place.row);
    if constexpr (HAS_WEIGHT) weights.go_to(place);
    if constexpr (HAS_BIAS) biases.go_to(place);
  }
  __device__ __forceinline__ void get(const Place& place, int i, Compute (&weight)[VECTOR],
                                      Compute (&bias)[VECTOR]) const {
    if constexpr (HAS_CHANNELS) return by_channel.affine.get(place.column(i), weight, bias);
    if constexpr (HAS_WEIGHT) weights.get(place, i, weight);
    if constexpr (HAS_BIAS) biases.get(place, i, bias);
    add_weight_offset(weight);
  }
  __device__ __forceinline__ void get_edges(const Place& place, AffineEdges& edges) const {
#pragma unroll
    for (int i = 0; i < EDGES; ++i) {
      if (!place.has_edge(i)) continue;
      const int column = place.edge_column(i);
      if constexpr (HAS_CHANNELS) {
        by_channel.affine.get(column, edges.weight[i], edges.bias[i]);
        continue;
      }
      if constexpr (HAS_WEIGHT) edges.weight[i][0] = widen(weights.memory[column]);
      if constexpr (HAS_BIAS) edges.bias[i][0] = widen(biases.memory[column]);
      add_weight_offset(edges.weight[i]);
    }
  }
};

// `staged` is shared memory for both, 16-byte aligned, or for those by channel.
template <typename KernelArguments>
__device__ __forceinline__ Affine affine_of(const KernelArguments& arguments, const Part& part, void* staged) {
  WEIGHT_TYPE* staged_weights = static_cast<WEIGHT_TYPE*>(staged);
  BIAS_TYPE* staged_biases =
      reinterpret_cast<BIAS_TYPE*>(staged_weights + (HAS_WEIGHT ? STAGED_ELEMENTS : 0));
  return {{arguments.weight + part.first_column, staged_weights, {}},
          {arguments.bias + part.first_column, staged_biases, {}},
          channel_turns_of(arguments, part, staged)};
}
