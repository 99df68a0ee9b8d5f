// Layer norm and RMS norm of rows that fit in registers: y = activate((x - mean) * rstd * weight + bias); RMS norm (not
// CENTERED) has no mean. With a residual, what is normalized is residual_out = x + residual, as it was rounded.
// Instance norm and group norm are layer norm with weights by channel (see row_channels.cuh), and so is batch norm, a
// row of which is a channel of all samples (see row_segments.cuh), and moves running statistics towards its own.
//
// Moves x (and the residual) once in, and y (and residual_out) once out. The row stays in the registers as it came from
// memory, in X_TYPE: that halves their number for sixteen-bit data, and widening again is cheaper than occupancy.
//
// The mean comes first, then the variance of the differences. The rounding of the mean is itself measured (the mean of
// the differences, zero in exact arithmetic) and taken out again, so that rows far from zero come out right. For that
// the threads of a row wait for each other twice; with statistics of each warp, merged after waiting once, 34 problems
// took 0.97 to 1.07 of the time, most more than 1. A block takes one group of ROWS_PER_BLOCK rows or, where it
// TAKES_TURNS, every (gridDim.x / BLOCKS_PER_ROW)-th or, with CLAIMS, those that it claims.
#include "types.cuh"
#include "reduce.cuh"
#include "cluster.cuh"
#include "copy_async.cuh"
#include "cache_hints.cuh"
#include "row_cut.cuh"
#include "activation.cuh"
#include "reciprocal.cuh"
#include "row_segments.cuh"
#include "row_stage.cuh"
#include "affine.cuh"
#include "row_channels.cuh"
constexpr bool FORWARD = true;
#include "row_affine.cuh"
#include "statistics.cuh"
#include "channel_running.cuh"
#include "dependent_launch.cuh"

static_assert(!CLAIMS || (TAKES_TURNS && ROWS_PER_BLOCK == 1 && THREADS_PER_ROW > 32 && ROWS_AHEAD == 1));

// In the order of their use: each 64 bytes of arguments that a kernel reads are fetched first.
struct Arguments {
  const X_TYPE* x;
  const WEIGHT_TYPE* weight;
  const BIAS_TYPE* bias;
  X_TYPE* y;
  Compute* mean;  // null where the statistics are not asked for; so is rstd
  Compute* rstd;
#if HAS_RESIDUAL > 0
  const X_TYPE* residual;
  X_TYPE* residual_out;
#endif
#if CLAIMS > 0
  unsigned* claimed;  // counters of rows
#endif
#if RUNNING_NUMBERS > 0
  RUNNING_MEAN_TYPE* running_mean;
  RUNNING_VARIANCE_TYPE* running_var;
#endif
  long long rows;
  long long columns;   // a multiple of VECTOR
  long long x_stride;  // elements from one row to the next
  long long y_stride;
  double eps;
  long long columns_per_block;  // a multiple of VECTOR; columns, where a row is one block's
  long long residual_stride;
  long long residual_out_stride;
#if CHANNEL_NUMBERS > 0
  long long channels[CHANNEL_NUMBERS];  // see row_channels.cuh
#endif
#if SEGMENT_NUMBERS > 0
  long long segments[SEGMENT_NUMBERS];  // see row_segments.cuh
#endif
#if RUNNING_NUMBERS > 0
  double running[RUNNING_NUMBERS];  // kept, taken, taken of the variance: see channel_running.cuh
#endif
};

// The residual and what it becomes; null where there is none.
struct Residuals {
  const X_TYPE* in;
  X_TYPE* out;
};

__device__ __forceinline__ Residuals residuals_of(const Arguments& arguments) {
#if HAS_RESIDUAL > 0
  return {arguments.residual, arguments.residual_out};
#else
  return {};
#endif
}

// The running statistics that those of a row move, where there are any.
struct RunningOfRow {
#if RUNNING_NUMBERS > 0
  Running before;

  __device__ __forceinline__ void fetch(const Arguments& arguments, long long row) {
    before = {arguments.running_mean[row], arguments.running_var[row]};
  }
  __device__ __forceinline__ void update(const Arguments& arguments, const Statistics& own, long long row) const {
    const struct {
      RUNNING_MEAN_TYPE* running_mean;
      RUNNING_VARIANCE_TYPE* running_var;
      double kept, taken, taken_variance;
    } update = {arguments.running_mean, arguments.running_var, arguments.running[0], arguments.running[1],
                arguments.running[2]};
    update_running(update, before, static_cast<double>(own.mean) + own.remainder, own.variance, row);
  }
#else
  __device__ __forceinline__ void fetch(const Arguments&, long long) {}
  __device__ __forceinline__ void update(const Arguments&, const Statistics&, long long) const {}
#endif
};

// Which row a block, or a cluster, takes next where rows are claimed.
//
// A fixed share, every so-many-th row, waits for the slowest multiprocessors. A copy has many more blocks than these,
// and whoever is done gets the next. So it is here: the first two rows of each are fixed, and a counter names the
// others. Who computes a row makes no difference to its results. Where rows are PEELED, those of a block begin in the
// same way, as every CLAIMS-th does, and there is a counter for each of these ways.
//
// A thread asks for a row two turns ahead of its use, so that nobody waits for the answer, and tells the others beside
// the sums of its row: those of its block through `told`, those of its cluster in what its blocks exchange.
struct Claims {
  long long step;       // from a block's first row to its second
  Compute* told;        // [2] in shared memory
  unsigned* counter;
  long long first;      // of the rows that are claimed
  long long following;  // the row of the next turn
  long long second;     // of the turn after that
  unsigned asked;       // in the thread that asks: the answer that was not told yet

  __device__ __forceinline__ void ask() {
    if (threadIdx.x == 0 && rank_in_row() == 0) asked = atomicAdd(counter, 1u);
  }

  // To be called when the first row is on its way: an earlier launch sets the counters.
  __device__ __forceinline__ void begin(const Arguments& arguments, long long first_row) {
#if CLAIMS > 0
    counter = arguments.claimed + first_row % CLAIMS;
    first = first_row % CLAIMS + 2 * step;
    following = first_row + step;
    asked = 0;
    wait_for_earlier_launches();
    ask();
#endif
  }

  // What goes where numbers do: an integer's bits, with which nothing is computed.
  __device__ __forceinline__ static Compute as_number(unsigned count) {
    if constexpr (sizeof(Compute) == sizeof(float)) return __uint_as_float(count);
    return count;
  }
  __device__ __forceinline__ static unsigned as_count(Compute number) {
    if constexpr (sizeof(Compute) == sizeof(float)) return __float_as_uint(static_cast<float>(number));
    return static_cast<unsigned>(number);
  }

  // To be called in every turn, before the last __syncthreads() that comes before `take`.
  __device__ __forceinline__ void tell_block(int turn) const {
    if constexpr (CLAIMS && BLOCKS_PER_ROW == 1) {
      if (threadIdx.x == 0) told[turn % 2] = as_number(asked);
    }
  }

  // What the first warp of a block tells its cluster, to which the first block's is of use.
  __device__ __forceinline__ Compute to_tell() const { return as_number(__shfl_sync(0xffffffffu, asked, 0)); }

  // To be called in every turn, with what was told.
  __device__ __forceinline__ void take(Compute number) {
    second = first + static_cast<long long>(CLAIMS) * as_count(number);
    ask();
  }

  // The row that comes after `row`, at the end of its turn.
  __device__ __forceinline__ long long after(long long row) {
    if constexpr (!CLAIMS) return row + step;
    row = following;
    following = second;
    return row;
  }
};

// What the blocks of a row tell each other: their statistics, and what the first has claimed.
constexpr int TOLD = CLAIMS && BLOCKS_PER_ROW > 1 ? 4 : 3;

// The statistics of a row from those of its blocks' parts, in the same order in every block.
__device__ __forceinline__ Statistics merge_over_blocks(const Statistics& own, const Part& part,
                                                        long long columns_per_block,
                                                        Exchange<TOLD>& exchange, int turn, Claims& claims) {
  Compute numbers[TOLD] = {own.mean, own.remainder, own.variance};
  if constexpr (TOLD > 3) numbers[TOLD - 1] = claims.to_tell();
  const Compute(&everyones)[BLOCKS_PER_ROW][TOLD] = exchange_in_row(exchange, turn, numbers);
  if constexpr (TOLD > 3) claims.take(everyones[0][TOLD - 1]);
  const Shares shares = shares_of_blocks(part.row_columns, columns_per_block, BLOCKS_PER_ROW);
  Statistics row = {everyones[0][0], 0, 0};
#pragma unroll 4
  for (int i = 0; i < BLOCKS_PER_ROW; ++i) {
    if constexpr (CENTERED) row.remainder += shares.of(i) * (everyones[i][0] - row.mean + everyones[i][1]);
  }
#pragma unroll 4
  for (int i = 0; i < BLOCKS_PER_ROW; ++i) {
    const Compute difference = CENTERED ? everyones[i][0] - row.mean + everyones[i][1] - row.remainder : 0;
    row.variance += shares.of(i) * (everyones[i][2] + difference * difference);
  }
  return row;
}

extern "C" __global__ void CLUSTER_DIMS __launch_bounds__(THREADS_PER_ROW * ROWS_PER_BLOCK, MIN_BLOCKS)
    row_block_forward(const Arguments arguments) {
  constexpr int SCRATCH = 2 * ((THREADS_PER_ROW + 31) / 32) * ROWS_PER_BLOCK;
  __shared__ Compute scratch[2][SCRATCH];
  __shared__ Exchange<TOLD> exchange;
  __shared__ Compute told[CLAIMS ? 2 : 1];
  // x, residual; y, residual_out where they are runs; weight, bias, or those of channels
  extern __shared__ __align__(COPY_ALIGNMENT) X_TYPE staged[];

  const Part part = part_of_block(arguments);
  X_TYPE* unused = staged;
  const auto take = [&](bool needed) {
    X_TYPE* taken = unused;
    unused += needed ? STAGE_ELEMENTS : 0;
    return taken;
  };
  static_assert(!KEPT_IN_L2 || stage != Stage::run);
  constexpr bool LOADS_KEPT = KEPT_IN_L2 && stage == Stage::direct;
  const Rows<const X_TYPE, X_SHIFT> x = {kept_in_l2<LOADS_KEPT>(arguments.x), arguments.x_stride,
                                         take(stage != Stage::direct)};
  const Residuals residuals = residuals_of(arguments);
  const Rows<const X_TYPE, RESIDUAL_SHIFT> residual = {kept_in_l2<LOADS_KEPT>(residuals.in), arguments.residual_stride,
                                                       take(stage != Stage::direct && HAS_RESIDUAL)};
  const Rows<X_TYPE> y = {arguments.y, arguments.y_stride, take(stage == Stage::run)};
  const Rows<X_TYPE> residual_out = {residuals.out, arguments.residual_out_stride,
                                     take(stage == Stage::run && HAS_RESIDUAL)};
  Affine affine = affine_of(arguments, part, unused);

  // Where a thread has much of a row, a division: its branches end a basic block, and without that ptxas keeps so much
  // of one pass for the next that it spills. Elsewhere a division would be a good part of the work, or of the time that
  // a row takes in turns: 50,257 columns of bfloat16 take 1.19 so, else 1.11. Rows that come ahead need
  // it only if they have most of the registers: 262,144 float16 numbers of a group, 16 vectors of 512 threads, take
  // 1.13 so, else 1.96. The exact gelu leaves fewer registers anyway: 12,288 columns take 1.30 so, else 1.24; but on an
  // H100 10,752 and 24,000, of which not all threads have as many vectors, 1.02 and 1.09, else 1.09 and 1.20.
  constexpr int HELD = VECTORS * VECTOR * sizeof(X_TYPE) / 4 * (HAS_RESIDUAL ? 2 : 1);
  constexpr bool IS_FULL = HELD * 5 / 2 >= 65536 / (BLOCK_THREADS * MIN_BLOCKS);
  constexpr bool IS_GELU = activation == Activation::gelu;
  constexpr bool DIRECTLY = stage == Stage::direct && !(IS_GELU && (PEELED || WHOLE_VECTORS == VECTORS));
  constexpr bool IS_LONG = VECTORS * VECTOR * sizeof(X_TYPE) > (IS_GELU ? 80 : 64);
  constexpr bool DIVIDES = IS_LONG && (DIRECTLY || (stage == Stage::ahead && IS_FULL));
  const Compute scale = reciprocal_of(static_cast<Compute>(part.columns));
  const auto mean_of = [&](Compute sum) { return DIVIDES ? sum / part.columns : sum * scale; };

  const long long step = static_cast<long long>(gridDim.x / BLOCKS_PER_ROW) * ROWS_PER_BLOCK;
  long long first_row = static_cast<long long>(blockIdx.x / BLOCKS_PER_ROW) * ROWS_PER_BLOCK;
  // Where rows are PEELED and a block takes turns, all of a thread's begin in the same way: the plan sees to it that
  // the step is whole vectors.
  const Place first_place = place_of(y, part, first_row);
  const auto place_at = [&](long long first) {
    // Beside rows that come ahead, there are no registers to keep how they begin.
    if constexpr (PEELED && stage == Stage::direct) return first_place.moved(part, first);
    return place_of(y, part, first);
  };
  // What is ahead: rows in shared memory, and the next edges in registers.
  struct {
    Edges x, residual;
  } edges, next_edges;
  const auto fetch_rows = [&](long long first, int slot) {
    fetch(x, part, first, slot);
    if constexpr (HAS_RESIDUAL) fetch(residual, part, first, slot);
    if constexpr (stage != Stage::direct) copy_async_commit();
  };
  const auto fetch_edges = [&](const Place& place) {
    get_edges(x, part, place, next_edges.x);
    if constexpr (HAS_RESIDUAL) get_edges(residual, part, place, next_edges.residual);
  };
  affine.stage(first_place);
#pragma unroll
  for (int i = 0; i < ROWS_AHEAD; ++i) fetch_rows(first_row + i * step, i);
  if constexpr (stage == Stage::ahead) fetch_edges(first_place);
  AffineEdges affine_edges;
  if constexpr (!HAS_CHANNELS) affine.get_edges(first_place, affine_edges);
  start_mbarriers(exchange);
  cluster_arrive();
  Claims claims = {step, told};
  claims.begin(arguments, first_row);
  // Weights that come early stay for all turns, where they are the same columns'.
  constexpr bool KEEPS_WEIGHTS = TAKES_TURNS && !PEELED;
  if constexpr (KEEPS_WEIGHTS) affine.fetch_early(first_place);
  int slot = 0;
  // Without turns, there is a block for each first row.
  for (int turn = 0; !TAKES_TURNS || first_row < arguments.rows;
       first_row = claims.after(first_row), ++turn, slot = slot_after(slot)) {
    const Place place = place_at(first_row);
    affine.go_to(place);
    if constexpr (stage != Stage::direct) affine.by_channel.fetch(part, place.row);

    // Load. Threads past the last column go along with nothing to add, those past the last row with anything: the sums
    // need every lane.
    wait_for_rows<ROWS_AHEAD - 1>();
    Vector<X_TYPE, VECTOR> values[VECTORS];
    if constexpr (stage == Stage::direct) fetch_edges(place);
    edges = next_edges;
    get_vectors(x, part, place, slot, values);
    // Else ptxas may add up what it has before it loads a last vector that not every thread has.
    if constexpr (stage == Stage::direct && !PEELED && WHOLE_VECTORS < VECTORS) __syncwarp();
    if constexpr (HAS_RESIDUAL) {
      // Else one directly after the other, so that sectors of memory go as a whole (see plan/row_short.py). Of PEELED
      // rows they go so anyway: 1023 columns of bfloat16 take 1.02 at once on an H100, else 1.03.
      constexpr bool PUTS_AT_ONCE = ROWS_PER_BLOCK == 1 || PEELED;
      Vector<X_TYPE, VECTOR> residual_values[VECTORS];
      get_vectors(residual, part, place, slot, residual_values);
#pragma unroll
      for (int i = 0; i < VECTORS; ++i) {
        if (!place.reads(i)) continue;
        values[i] = sum_of(values[i], residual_values[i]);
        const bool is_own = ROWS_PER_BLOCK == 1 || place.has(i);
        if (PUTS_AT_ONCE && is_own) put_anywhere(residual_out, part, place, i, values[i]);
      }
      if constexpr (!PUTS_AT_ONCE) {
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
          if (place.has(i)) put_anywhere(residual_out, part, place, i, values[i]);
        }
      }
#pragma unroll
      for (int i = 0; i < EDGES; ++i) {
        if (!place.has_edge(i)) continue;
        edges.x[i] = sum_of(edges.x[i], edges.residual[i]);
        put_edge(residual_out, part, place, i, edges.x[i]);
      }
    }
    release_rows();
    fetch_rows(CLAIMS ? claims.following : first_row + ROWS_AHEAD * step, slot);
    if constexpr (stage == Stage::ahead) fetch_edges(place_at(CLAIMS ? claims.following : first_row + step));
    if constexpr (!KEEPS_WEIGHTS) affine.fetch_early(place);
    if constexpr (stage == Stage::direct) affine.by_channel.fetch(part, place.row);
    // One of its last warp, in which threads may have fewer numbers, or none.
    constexpr int TELLING_THREAD = THREADS_PER_ROW > 32 ? THREADS_PER_ROW - 32 : 0;
    const auto tells_of_row = [&] {
      return threadIdx.x == TELLING_THREAD && part.first_column == 0 && place.there;
    };
    RunningOfRow running;
    if (tells_of_row()) running.fetch(arguments, place.row);
    // Weights that come early, and rows in segments. On an H200 RMS norm of 4096 x 1024 bfloat16 numbers takes 0.98 so,
    // else 1.06, and layer norm of 64 x 1000 5.2 us, else 5.7. Other layer norms, shorter rows of RMS norm, and those
    // with a residual take up to 1.06 of the time, 109 of 1 to 2048 of them 1.005 on average. On an H100 batch norm of
    // 4 x 32 x 28^2 float16 numbers 0.95.
    // Weights that are staged would set out when the row has come and is summed: on an H200 4096 x 3072 float16 numbers
    // take 17.2 us so, else 19.7; 4096 x 512 6.7 and 7.5; 104 problems 0.974 of the time on average.
    constexpr bool IS_LIGHT = !CENTERED && !HAS_RESIDUAL && BLOCKS_PER_ROW == 1;
    constexpr bool FETCHES_AT_ONCE = WHOLE_VECTORS < VECTORS || (IS_LIGHT && VECTORS >= 4);
    constexpr bool READS_DIRECTLY = stage == Stage::direct && !HAS_CHANNELS;
    constexpr bool FETCHES_EARLY = weights_come == Weights::early && READS_DIRECTLY && !KEEPS_WEIGHTS;
    constexpr bool STAGES = weights_come == Weights::staged && READS_DIRECTLY && !TAKES_TURNS;
    constexpr bool SETS_OUT_AT_ONCE = (FETCHES_EARLY && FETCHES_AT_ONCE) || STAGES || KEEPS_OFFSETS;
    if constexpr (SETS_OUT_AT_ONCE) end_basic_block(arguments.columns);

    // Reduce: the mean, then the differences from it.
    Statistics statistics = {0, 0, 0};
    if constexpr (CENTERED) {
      Compute sum[1] = {0};
#pragma unroll
      for (int i = 0; i < VECTORS; ++i) {
        if (place.reads(i)) add_values(values[i], sum);
      }
#pragma unroll
      for (int i = 0; i < EDGES; ++i) {
        if (place.has_edge(i)) add_values(edges.x[i], sum);
      }
      affine.by_channel.put(turn);
      row_sum<THREADS_PER_ROW>(sum, scratch[0], row_in_block());
      statistics.mean = mean_of(sum[0]);
#pragma unroll
      for (int i = 0; i < VECTORS; ++i) forget_widened(values[i]);
    }
    Compute sums[2] = {0, 0}, of_second_half[2] = {0, 0};
    // Numbers one by one in two halves: 32 squares one after the other would be rounded by up to 4e-7.
    constexpr bool HALVES = VECTOR == 1 && VECTORS > 1;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      const bool is_second = HALVES && i >= VECTORS / 2;
      if (place.reads(i)) add_differences(values[i], statistics.mean, is_second ? of_second_half : sums);
    }
    if constexpr (HALVES) {
      sums[0] += of_second_half[0];
      sums[1] += of_second_half[1];
    }
#pragma unroll
    for (int i = 0; i < EDGES; ++i) {
      if (place.has_edge(i)) add_differences(edges.x[i], statistics.mean, sums);
    }
    claims.tell_block(turn);
    if constexpr (CENTERED) {
      row_sum<THREADS_PER_ROW>(sums, scratch[1], row_in_block());
      statistics.remainder = mean_of(sums[0]);
    } else {
      Compute squares[1] = {sums[1]};
      row_sum<THREADS_PER_ROW>(squares, scratch[turn % 2], row_in_block());
      sums[1] = squares[0];
    }
    statistics.variance = not_negative(mean_of(sums[1]) - statistics.remainder * statistics.remainder);
    if constexpr (BLOCKS_PER_ROW > 1) {
      if (turn == 0) cluster_wait();  // another block of the row may not have started
      statistics = merge_over_blocks(statistics, part, arguments.columns_per_block, exchange, turn, claims);
    } else if constexpr (CLAIMS) {
      claims.take(told[turn % 2]);
    }

    // Finish and store.
    affine.arrive(turn);
    const Compute rstd = reciprocal_sqrt(statistics.variance + static_cast<Compute>(arguments.eps));
    if (tells_of_row() && arguments.rstd != nullptr) {
      if constexpr (CENTERED) arguments.mean[place.row] = statistics.mean + statistics.remainder;
      arguments.rstd[place.row] = rstd;
    }
    // Else 7 vectors spill 16 bytes: what is known of the store above stays in registers over the loads below.
    if constexpr (STAGES && HELD > 24) end_basic_block(arguments.columns);
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) forget_widened(values[i]);
    // One branch for all vectors, but where each has one of its own.
    if (PEELED || ROWS_PER_BLOCK == 1 || place.there) {
#pragma unroll
      for (int i = 0; i < VECTORS; ++i) {
        if (!(PEELED ? place.has(i) : place.reaches(i))) continue;
        if constexpr (weights_of == WeightsOf::crossing) {
          const Crossing crossing = affine.by_channel.affine.crossing_of<VECTOR>(place.column(i));
          put(y, part, place, i,
              normalized_crossing(values[i], statistics.mean, statistics.remainder, rstd, crossing));
          continue;
        }
        Compute weight[VECTOR], bias[VECTOR];
        affine.get(place, i, weight, bias);
        if constexpr (weights_of == WeightsOf::part || weights_of == WeightsOf::vector) {
          put(y, part, place, i,
              normalized_alike(values[i], statistics.mean, statistics.remainder, rstd, weight[0], bias[0]));
        } else {
          put(y, part, place, i, normalized(values[i], statistics.mean, statistics.remainder, rstd, weight, bias));
        }
      }
    }
    if (tells_of_row()) running.update(arguments, statistics, place.row);
    if constexpr (HAS_CHANNELS) affine.get_edges(place, affine_edges);
#pragma unroll
    for (int i = 0; i < EDGES; ++i) {
      if (!place.has_edge(i)) continue;
      put_edge(y, part, place, i,
               normalized(edges.x[i], statistics.mean, statistics.remainder, rstd, affine_edges.weight[i],
                          affine_edges.bias[i]));
    }
    if constexpr (stage == Stage::run) {
      __syncthreads();
      flush(y, part, place);
      if constexpr (HAS_RESIDUAL) flush(residual_out, part, place);
    }
    if constexpr (!TAKES_TURNS) break;
  }
}
