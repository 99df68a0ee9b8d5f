// Layer norm and RMS norm of rows that only all the multiprocessors together can hold, few at a time: y = activate((x -
// mean) * rstd * weight + bias); RMS norm (not CENTERED) has no mean. With a residual, what is normalized is
// residual_out = x + residual, as it was rounded. Instance norm and group norm are layer norm with weights by channel
// (see row_channels.cuh).
//
// Moves x (and the residual) once in, and y (and residual_out) once out; the weight and the bias once a row, from the
// cache if they fit there. All blocks run at the same time, a group of blocks_per_row of them for every groups-th row.
// A block's part of a row lies in its shared memory, 16 bytes a slot, RESIDENT slots a thread; ROWS_AHEAD rows are
// there or on their way at any time. A slot belongs to one thread, which fills it again as soon as it has stored what
// became of it. HELD more vectors of the row lie in registers, likewise. What is left of the part (where STREAMED) is
// read twice; the second time it may come from the cache, so it is the last to be read for the statistics, and the
// first to be finished.
//
// The statistics are taken in one pass, as the row arrives, of the differences from a pivot: the mean of a share of the
// part. The part's squared deviation from it exceeds that from the part's own mean by a factor of at most one over the
// share, so little cancels whatever the data are. Then every block publishes its numbers, and merges those of its group
// in a fixed order. A word of them carries the number of the turn beside the bits, so it needs neither fence nor
// barrier (see grid_words.cuh).
//
// Where rows are PEELED, they lie alike in all tensors but the weights.
#include "types.cuh"
#include "grid_words.cuh"
#include "reduce.cuh"
#include "copy_async.cuh"
#include "row_cut.cuh"
#include "activation.cuh"
#include "affine.cuh"
#include "reciprocal.cuh"
constexpr bool TAKES_TURNS = true;
#include "row_channels.cuh"
#include "statistics.cuh"
#include "group_part.cuh"

struct Arguments {
  const X_TYPE* x;
  const X_TYPE* residual;
  const WEIGHT_TYPE* weight;
  const BIAS_TYPE* bias;
  X_TYPE* y;
  X_TYPE* residual_out;
  Compute* mean;  // null where the statistics are not asked for; so is rstd
  Compute* rstd;
  long long* words;  // [2][gridDim.x][3][WORDS]
  long long word_pairs;
  long long rows;
  long long columns;            // a multiple of VECTOR, or PEELED
  long long columns_per_block;  // a multiple of VECTOR; the last block of a row may have fewer, but has some
  long long blocks_per_row;     // divides gridDim.x
  long long x_stride;           // elements from one row to the next
  long long residual_stride;
  long long y_stride;
  long long residual_out_stride;
  double eps;
#if CHANNEL_NUMBERS > 0
  long long channels[CHANNEL_NUMBERS];  // see row_channels.cuh
#endif
};

// Of a thread. Each is filled in a group of its own, in order, so as many groups may be under way.
constexpr int SLOTS = ROWS_AHEAD * RESIDENT;
// Vectors that give the pivot.
constexpr int PIVOT_VECTORS = RESIDENT > 4 ? (RESIDENT + 3) / 4 : RESIDENT;
// Vectors that are finished together, so that their weights are all under way before the first is waited for.
constexpr int TOGETHER = VECTOR == 4 && (HELD == 0 || !PEELED) ? 2 : 1;
static_assert(!HAS_RESIDUAL || HELD == 0, "a vector in registers has no room for a residual on its way");

// ---- Where a thread is.

// Where a thread is in the block's part of one row, of which it has every THREADS-th vector; nothing of it, where there
// is no such row.
struct Place {
  Cut cut;
  int own_vectors;

  __device__ __forceinline__ bool has(int i) const { return i < own_vectors; }
  // Where the thread's i-th vector begins.
  __device__ __forceinline__ int column(int i) const {
    return cut.column(i * THREADS + static_cast<int>(threadIdx.x));
  }

  __device__ __forceinline__ bool has_edge() const { return cut.has_edge(threadIdx.x); }
  __device__ __forceinline__ int edge_column() const { return cut.edge_column(threadIdx.x); }
};

// A tensor, from the block's first column on.
template <typename T>
struct Rows {
  T* memory;
  long long stride;

  __device__ __forceinline__ T* at(long long row) const { return memory + row * stride; }
};

template <typename T>
__device__ __forceinline__ Place place_of(const Rows<T>& rows, const SharedPart& part, long long row,
                                          long long row_count) {
  if (row >= row_count) return {};
  const Cut cut = cut_of(rows.at(row), part.count);
  return {cut, (cut.vectors + THREADS - 1 - static_cast<int>(threadIdx.x)) / THREADS};
}

// ---- Shared memory.

// Starts to bring `bytes` into the L2 cache: a multiple of 16, as the address is.
__device__ __forceinline__ void prefetch_to_cache(const X_TYPE* global, unsigned bytes) {
#if !defined(CUNORM_EMULATOR) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes) : "memory");
#endif
}

// ---- Statistics.

// What the blocks of a group tell each other: three numbers each, twice, so that a block may still read one turn's when
// another has gone on to the next. Further it cannot go, for it then needs this one's numbers.
struct Exchange {
  long long* words;  // of the group
  long long step;    // from the first of the two to the second
  int rank;
  int blocks;
  Compute* numbers;  // shared memory for those of all

  // Every thread of the block has the same statistics.
  __device__ __forceinline__ void publish(const Statistics& own, int turn) const {
    if (threadIdx.x == 0) {
      long long* target = words + turn % 2 * step + rank * 3 * WORDS;
      const Compute values[3] = {own.mean, own.remainder, own.variance};
#pragma unroll
      for (int i = 0; i < 3 * WORDS; ++i) store_word(target + i, turn + 1, bits_of(values[i / WORDS], i % WORDS));
    }
  }

  __device__ __forceinline__ void collect(int turn) const {
    for (int i = threadIdx.x; i < 3 * blocks; i += THREADS) {
      numbers[i] = await_number(words + turn % 2 * step + i * WORDS, turn + 1);
    }
    __syncthreads();
  }
};

// The statistics of a row from those of its parts, the same in every warp of every block.
__device__ __forceinline__ Statistics merge(const Compute* numbers, int blocks, long long columns,
                                            long long columns_per_block) {
  const Shares shares = shares_of_blocks(columns, columns_per_block, blocks);
  return merged_in_warp(numbers[0], [&](auto use) {
    for (int i = threadIdx.x % 32; i < blocks; i += 32) {
      use(shares.of(i), Statistics{numbers[3 * i], numbers[3 * i + 1], numbers[3 * i + 2]});
    }
  });
}

// ---- Weights.

// Weights and biases from the block's first column on.
struct Affine {
  const WEIGHT_TYPE* weights;
  const BIAS_TYPE* biases;
  ChannelAffine<false> by_channel;

  // To be called when a row begins.
  __device__ __forceinline__ void go_to(long long row) {
    if constexpr (HAS_CHANNELS) by_channel.go_to(row);
  }
  template <int COUNT>
  __device__ __forceinline__ void get(int column, Compute (&weight)[COUNT], Compute (&bias)[COUNT]) const {
    if constexpr (HAS_CHANNELS) return by_channel.get(column, weight, bias);
    load_affine_anywhere<PEELED>(weights + column, biases + column, weight, bias);
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) row_grid_forward(const Arguments arguments) {
  clear_words(arguments.words, arguments.word_pairs);
  __shared__ Compute scratch[2][2 * THREADS / 32];
  extern __shared__ __align__(COPY_ALIGNMENT) X_TYPE staged[];  // x, residual; then the numbers of an exchange
  using Values = Vector<X_TYPE, VECTOR>;
  constexpr int STAGED = SLOTS * THREADS * VECTOR;  // elements

  const SharedPart part = part_of_block(arguments.columns, arguments.columns_per_block, arguments.blocks_per_row);
  const int blocks = part.blocks;
  const Rows<const X_TYPE> x = {arguments.x + part.first, arguments.x_stride};
  const Rows<const X_TYPE> residual = {arguments.residual + part.first, arguments.residual_stride};
  const Rows<X_TYPE> y = {arguments.y + part.first, arguments.y_stride};
  const Rows<X_TYPE> residual_out = {arguments.residual_out + part.first, arguments.residual_out_stride};
  Affine affine = {arguments.weight + part.first, arguments.bias + part.first,
                   channel_affine_of<false>(arguments, part.first)};
  const Exchange exchange = {arguments.words + part.group * blocks * 3 * WORDS,
                             static_cast<long long>(gridDim.x) * 3 * WORDS, part.rank, blocks,
                             reinterpret_cast<Compute*>(staged + (1 + HAS_RESIDUAL) * STAGED)};

  // A thread's i-th slot of one of the rows that lie in shared memory.
  const auto slot = [&](int turn, int i) {
    return staged + ((turn % ROWS_AHEAD * RESIDENT + i) * THREADS + static_cast<int>(threadIdx.x)) * VECTOR;
  };
  const auto fill = [&](int turn, long long row, const Place& place, int i) {
    if (place.has(i)) {
      copy_async<VECTOR>(slot(turn, i), x.at(row) + place.column(i));
      if constexpr (HAS_RESIDUAL) copy_async<VECTOR>(slot(turn, i) + STAGED, residual.at(row) + place.column(i));
    }
    copy_async_commit();
  };

  // What is ahead: rows in shared memory; of the next one the vectors in registers, and the edges.
  Values held[HELD > 0 ? HELD : 1];
  Vector<X_TYPE, 1> next_edge, next_residual_edge;
  const auto fetch_held = [&](long long row, const Place& place, int i) {
    if (place.has(RESIDENT + i)) held[i] = load<X_TYPE, VECTOR>(x.at(row) + place.column(RESIDENT + i));
  };
  const auto fetch_edge = [&](long long row, const Place& place) {
    if (place.has_edge()) {
      next_edge = load<X_TYPE, 1>(x.at(row) + place.edge_column());
      if constexpr (HAS_RESIDUAL) next_residual_edge = load<X_TYPE, 1>(residual.at(row) + place.edge_column());
    }
  };

  long long row = part.group;
  Place place = place_of(y, part, row, arguments.rows);
  for (int ahead = 0; ahead < ROWS_AHEAD; ++ahead) {
    const long long row_ahead = row + ahead * part.groups;
    const Place place_ahead = place_of(y, part, row_ahead, arguments.rows);
#pragma unroll 4
    for (int i = 0; i < RESIDENT; ++i) fill(ahead, row_ahead, place_ahead, i);
  }
#pragma unroll
  for (int i = 0; i < HELD; ++i) fetch_held(row, place, i);
  fetch_edge(row, place);

  for (int turn = 0; row < arguments.rows; ++turn) {
    const long long next_row = row + part.groups;
    const Place next_place = place_of(y, part, next_row, arguments.rows);
    const int first_streamed = RESIDENT + HELD;
    affine.go_to(row);

    // Load. With a residual, the sum takes the place of x.
    const auto arrived = [&](int i) {
      Values values = load<X_TYPE, VECTOR>(slot(turn, i));
      if constexpr (HAS_RESIDUAL) {
        values = sum_of(values, load<X_TYPE, VECTOR>(slot(turn, i) + STAGED));
        store(slot(turn, i), values);
        store_global(residual_out.at(row) + place.column(i), values);
      }
      return values;
    };
    Vector<X_TYPE, 1> edge = next_edge;
    if constexpr (HAS_RESIDUAL) {
      if (place.has_edge()) {
        edge = sum_of(edge, next_residual_edge);
        store(residual_out.at(row) + place.edge_column(), edge);
      }
    }

    // Reduce: the pivot, then the differences from it.
    Statistics statistics = {0, 0, 0};
    Compute sums[2] = {0, 0};
    if constexpr (CENTERED) {
      Compute sum[1] = {0};
      as_they_arrive<SLOTS, 0, PIVOT_VECTORS>([&](int i) {
        if (place.has(i)) add_values(arrived(i), sum);
      });
      if (place.has_edge()) add_values(edge, sum);
      row_sum<THREADS>(sum, scratch[0], 0);
      statistics.mean = sum[0] / (min(PIVOT_VECTORS * THREADS, place.cut.vectors) * VECTOR + place.cut.edges());
#pragma unroll
      for (int i = 0; i < PIVOT_VECTORS; ++i) {
        if (place.has(i)) add_differences(load<X_TYPE, VECTOR>(slot(turn, i)), statistics.mean, sums);
      }
    }
    // The row is nearly there. While it is worked on, and no slot is free, the next one's beginning comes closer.
    if (static_cast<int>(threadIdx.x) < PREFETCHED) {
      const int first = threadIdx.x * THREADS, count = min(THREADS, next_place.cut.vectors - first);
      if (count > 0) prefetch_to_cache(x.at(next_row) + next_place.cut.head + first * VECTOR, count * 16);
    }
    as_they_arrive<SLOTS, CENTERED ? PIVOT_VECTORS : 0, RESIDENT>([&](int i) {
      if (place.has(i)) add_differences(arrived(i), statistics.mean, sums);
    });
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
      if (place.has(RESIDENT + i)) add_differences(held[i], statistics.mean, sums);
      forget_widened(held[i]);
    }
#pragma unroll 1
    for (int first = first_streamed; STREAMED && place.has(first); first += TOGETHER) {
      Values values[TOGETHER], added[HAS_RESIDUAL ? TOGETHER : 1];
#pragma unroll
      for (int i = 0; i < TOGETHER; ++i) {
        if (!place.has(first + i)) continue;
        values[i] = load<X_TYPE, VECTOR>(x.at(row) + place.column(first + i));
        if constexpr (HAS_RESIDUAL) added[i] = load<X_TYPE, VECTOR>(residual.at(row) + place.column(first + i));
      }
#pragma unroll
      for (int i = 0; i < TOGETHER; ++i) {
        if (!place.has(first + i)) continue;
        if constexpr (HAS_RESIDUAL) {
          values[i] = sum_of(values[i], added[i]);
          store_global(residual_out.at(row) + place.column(first + i), values[i]);
        }
        add_differences(values[i], statistics.mean, sums);
      }
    }
    if (place.has_edge()) add_differences(edge, statistics.mean, sums);
    row_sum<THREADS>(sums, scratch[1], 0);
    statistics.remainder = sums[0] / part.count;
    statistics.variance = not_negative(sums[1] / part.count - statistics.remainder * statistics.remainder);
    if (turn == 0) wait_for_words();
    exchange.publish(statistics, turn);
    exchange.collect(turn);
    statistics = merge(exchange.numbers, blocks, arguments.columns, arguments.columns_per_block);

    // Finish and store; and fill again what was stored.
    const Compute rstd = reciprocal_sqrt(statistics.variance + static_cast<Compute>(arguments.eps));
    if (threadIdx.x == 0 && part.rank == 0 && arguments.rstd != nullptr) {
      if constexpr (CENTERED) arguments.mean[row] = statistics.mean + statistics.remainder;
      arguments.rstd[row] = rstd;
    }
    const auto finish = [&](int i, const Values& values, const Compute(&weight)[VECTOR], const Compute(&bias)[VECTOR]) {
      store_global(y.at(row) + place.column(i),
                   normalized(values, statistics.mean, statistics.remainder, rstd, weight, bias));
    };
    const X_TYPE* streamed = HAS_RESIDUAL ? residual_out.at(row) : x.at(row);
#pragma unroll 1
    for (int first = first_streamed; STREAMED && place.has(first); first += TOGETHER) {
      Values values[TOGETHER];
      Compute weight[TOGETHER][VECTOR], bias[TOGETHER][VECTOR];
#pragma unroll
      for (int i = 0; i < TOGETHER; ++i) {
        if (!place.has(first + i)) continue;
        values[i] = load<X_TYPE, VECTOR>(streamed + place.column(first + i));
        affine.get(place.column(first + i), weight[i], bias[i]);
      }
#pragma unroll
      for (int i = 0; i < TOGETHER; ++i) {
        if (place.has(first + i)) finish(first + i, values[i], weight[i], bias[i]);
      }
    }
    const long long row_ahead = row + ROWS_AHEAD * part.groups;
    const Place place_ahead = place_of(y, part, row_ahead, arguments.rows);
#pragma unroll 1
    for (int first = 0; first < RESIDENT; first += TOGETHER) {
      Compute weight[TOGETHER][VECTOR], bias[TOGETHER][VECTOR];
#pragma unroll
      for (int i = 0; i < TOGETHER; ++i) {
        if (first + i < RESIDENT && place.has(first + i)) affine.get(place.column(first + i), weight[i], bias[i]);
      }
#pragma unroll
      for (int i = 0; i < TOGETHER; ++i) {
        if (first + i >= RESIDENT) continue;
        if (place.has(first + i)) finish(first + i, load<X_TYPE, VECTOR>(slot(turn, first + i)), weight[i], bias[i]);
        fill(turn, row_ahead, place_ahead, first + i);
      }
    }
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
      Compute weight[VECTOR], bias[VECTOR];
      if (place.has(RESIDENT + i)) {
        affine.get(place.column(RESIDENT + i), weight, bias);
        finish(RESIDENT + i, held[i], weight, bias);
      }
      fetch_held(next_row, next_place, i);
    }
    if (place.has_edge()) {
      Compute weight[1], bias[1];
      affine.get(place.edge_column(), weight, bias);
      store(y.at(row) + place.edge_column(),
            normalized(edge, statistics.mean, statistics.remainder, rstd, weight, bias));
    }
    fetch_edge(next_row, next_place);
    row = next_row;
    place = next_place;
  }
}
