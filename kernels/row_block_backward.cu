// Gradients of layer norm and RMS norm for rows that fit in registers. With xhat = (x - mean) * rstd, dz = dy times the
// derivative of the activation and g = dz * weight:
//   dx = rstd * (g - mean(g) - xhat * mean(g * xhat)) + dresidual_out,
//   dweight = sum over rows of dz * xhat,  dbias = sum over rows of dz.
// RMS norm (not CENTERED) has no mean, neither of x nor of g.
//
// Moves x and dy (and dresidual_out) once in and dx once out. Blocks are persistent: each takes every
// (gridDim.x / BLOCKS_PER_ROW)-th group of ROWS_PER_BLOCK rows and keeps the sums of its columns in registers, so that
// dweight and dbias cost one row of partial sums a block, which column_sums adds up in a fixed order. Rows of several
// CLASSES are shared out otherwise (see Share).
//
// Instance norm and group norm are layer norm with weights by channel (see row_channels.cuh). No vector of theirs
// reaches from one channel into the next, and blocks have whole channels, or channels whole blocks: each row leaves the
// sums of its channels, which column_sums adds over samples.
#include "types.cuh"
#include "dependent_launch.cuh"
#include "reduce.cuh"
#include "cluster.cuh"
#include "copy_async.cuh"
#include "row_cut.cuh"
#include "activation.cuh"
#include "row_stage.cuh"
#include "affine.cuh"
#include "row_channels.cuh"
constexpr bool FORWARD = false, TAKES_TURNS = true;
#include "row_affine.cuh"

struct Arguments {
  const X_TYPE* x;
  const X_TYPE* dy;
  const X_TYPE* dresidual_out;
  const WEIGHT_TYPE* weight;
  const BIAS_TYPE* bias;
  const Compute* mean;
  const Compute* rstd;
  X_TYPE* dx;
  // [shares][columns]: partial sums, or finished ones where there is one share. Where weights are by channel,
  // [samples][parts of a channel][channels].
  DWEIGHT_TYPE* dweight;
  DBIAS_TYPE* dbias;
  long long rows;
  long long columns;            // a multiple of VECTOR
  long long columns_per_block;  // likewise; columns, where a row is one block's
  long long x_stride;           // elements from one row to the next
  long long dy_stride;
  long long dresidual_out_stride;
  long long dx_stride;
#if CHANNEL_NUMBERS > 0
  long long channels[CHANNEL_NUMBERS];  // see row_channels.cuh
#endif
};

// Where a sum over one of a row's channels goes, or over the block's part of one.
__device__ __forceinline__ long long place_of_sum(const Channels& channels, long long row, unsigned channel) {
  const long long place = row * channels.channels_per_row + channel;
  const unsigned parts = BLOCKS_PER_ROW / channels.channels_per_row;
  if (BLOCKS_PER_ROW == 1 || parts <= 1) return place;
  const unsigned sample = static_cast<unsigned>(row) / channels.rows_per_sample;
  const long long parts_before = sample * (parts - 1) + static_cast<unsigned>(rank_in_row()) % parts;
  return place + parts_before * channels.rows_per_sample * channels.channels_per_row;
}

// The sums of dz and of dz * xhat over each channel of the block's part of a row, where that has several. SEGMENT
// neighbouring threads and STEPS consecutive vectors of each lie in one channel: what they have is an entry in shared
// memory. The entries of a channel lie behind each other, and LANES threads add them up. A __syncthreads() must lie
// between what is added in one turn and what is added up; with one a turn, two sets of entries used in turn are enough.
struct ChannelSums {
  static constexpr int STEP_ENTRIES = THREADS_PER_ROW / SEGMENT;
  static constexpr int ENTRIES = VECTORS / STEPS * STEP_ENTRIES;  // of a row
  static constexpr int ENTRY_COLUMNS = SEGMENT * STEPS * VECTOR;

  Compute* entries;  // [2][2][ROWS_PER_BLOCK][ENTRIES]
  Compute sums[2];   // of the thread, since the last entry

  __device__ __forceinline__ Compute* entries_of(int turn, int which) const {
    return entries + ((turn % 2 * 2 + which) * ROWS_PER_BLOCK + threadIdx.y) * ENTRIES;
  }

  // Adds those of the thread's i-th vector: for i from zero up, in all threads.
  __device__ __forceinline__ void add(int turn, int i, const Compute (&own)[2]) {
    sums[0] += own[0];
    sums[1] += own[1];
    if ((i + 1) % STEPS > 0) return;
    warp_sum<SEGMENT, 1>(sums);
    if (threadIdx.x % SEGMENT == 0) {
      const int entry = i / STEPS * STEP_ENTRIES + static_cast<int>(threadIdx.x) / SEGMENT;
      entries_of(turn, 0)[entry] = sums[0];
      entries_of(turn, 1)[entry] = sums[1];
    }
    sums[0] = sums[1] = 0;
  }

  // Calls use(channel, sum of dz, sum of dz * xhat) for each of so many channels, in one thread.
  template <typename Use>
  __device__ __forceinline__ void for_each(int turn, int channels, int positions, const Use& use) const {
    const int count = positions / ENTRY_COLUMNS, lane = threadIdx.x % LANES;
    for (int first = 0; first < channels; first += THREADS_PER_ROW / LANES) {
      const int channel = first + static_cast<int>(threadIdx.x) / LANES;
      Compute total[2] = {0, 0};
      for (int i = lane; channel < channels && i < count; i += LANES) {
        total[0] += entries_of(turn, 0)[channel * count + i];
        total[1] += entries_of(turn, 1)[channel * count + i];
      }
      warp_sum<LANES, 1>(total);
      if (channel < channels && lane == 0) use(channel, total[0], total[1]);
    }
  }
};

// Which rows a group of blocks takes, and adds up the sums of its columns over.
//
// Where rows are PEELED, all that a thread adds up must begin in the same way, or its sums would be of other columns
// from row to row. With one class the plan sees to it that the step from one row to the next is whole vectors: the
// number of groups is then a multiple of the number of ways to begin, and clusters, of which there are few, would leave
// multiprocessors idle. They take CLASSES: every CLASSES-th row begins alike. The rows of the first class come first,
// then those of the second and so on. Of this order each group has an equal part, and of each class in it a share,
// which leaves a row of sums. Where a class ends just where the part of a group does, that has an empty share of the
// next one too, and leaves zeros: so there are always as many rows of sums as groups and further classes.
struct Share {
  static_assert(CLASSES == 1 || ROWS_PER_BLOCK == 1);

  long long all_rows;
  int of_class;

  // The first row, one behind the last row, and how many rows lie between two.
  __device__ __forceinline__ long long first() const {
    if constexpr (CLASSES == 1) return group() * ROWS_PER_BLOCK;
    return of_class + (count() > 0 ? begin() - class_begins_at(of_class) : 0) * CLASSES;
  }
  __device__ __forceinline__ long long end() const {
    if constexpr (CLASSES == 1) return all_rows;
    return count() > 0 ? first() + (count() - 1) * CLASSES + 1 : first();
  }
  __device__ __forceinline__ long long step() const {
    return CLASSES > 1 ? CLASSES : static_cast<long long>(groups()) * ROWS_PER_BLOCK;
  }
  // Which of the rows of sums it leaves.
  __device__ __forceinline__ long long place() const { return group() + (CLASSES > 1 ? of_class : 0); }

  // Goes to the next share of the group; false where there is none.
  __device__ __forceinline__ bool advance() {
    const int next = of_class + 1;
    if (next >= CLASSES || class_begins_at(next) > part_begins_at(group() + 1)) return false;
    of_class = next;
    return true;
  }

  __device__ __forceinline__ static long long group() { return blockIdx.x / BLOCKS_PER_ROW; }
  __device__ __forceinline__ static unsigned groups() { return gridDim.x / BLOCKS_PER_ROW; }
  // Places in the order.
  __device__ __forceinline__ long long part_begins_at(long long which) const { return which * all_rows / groups(); }
  __device__ __forceinline__ long long class_begins_at(int which) const {
    const long long longer = all_rows % CLASSES;  // classes, which come first
    return which * (all_rows / CLASSES) + (which < longer ? which : longer);
  }
  __device__ __forceinline__ long long begin() const {
    return max(class_begins_at(of_class), part_begins_at(group()));
  }
  __device__ __forceinline__ long long count() const {
    return min(class_begins_at(of_class + 1), part_begins_at(group() + 1)) - begin();
  }
};

// The first share of this block's group.
__device__ __forceinline__ Share first_share_of(long long all_rows) {
  Share share = {all_rows, 0};
  while (share.of_class + 1 < CLASSES &&
         share.class_begins_at(share.of_class + 1) <= share.part_begins_at(share.group())) {
    ++share.of_class;
  }
  return share;
}

// The mean and rstd of rows. Where rows come ahead, those of TURNS turns come at once, one turn's to each of the
// threads that have the same row and warp, and those of the next TURNS are on their way. A load that is under way in
// every turn would share a scoreboard with others, and where ptxas waits for one of those, it would wait for memory:
// 4096 columns of float16 take 1.34 so, else 1.08.
struct StatisticsAhead {
  static constexpr int TURNS = THREADS_PER_ROW < 32 ? THREADS_PER_ROW : 32;

  const Compute* means;
  const Compute* rstds;
  long long end;  // before which the last row is
  long long step;
  Compute mean, rstd, next_mean, next_rstd;

  // Starts to load those of the turn's row, the first of a share, and of those that follow it.
  __device__ __forceinline__ void begin(int turn, long long row) {
    fetch(row - turn % TURNS * step);
    if (CLASSES == 1 || turn % TURNS == 0) return;
    mean = next_mean;
    rstd = next_rstd;
    fetch(row + (TURNS - turn % TURNS) * step);
  }

  // Starts to load those of the row, and of the TURNS - 1 that follow it.
  __device__ __forceinline__ void fetch(long long row) {
    if constexpr (stage == Stage::direct) return;
    load(row + threadIdx.x % TURNS * step, next_mean, next_rstd);
  }

  // Those of the turn's row: for turns from zero up, in all threads.
  __device__ __forceinline__ void get(int turn, long long row, Compute& row_mean, Compute& row_rstd) {
    if constexpr (stage == Stage::direct) return load(row, row_mean, row_rstd);
    if (turn % TURNS == 0) {
      mean = next_mean;
      rstd = next_rstd;
      fetch(row + TURNS * step);
    }
    row_mean = CENTERED ? __shfl_sync(0xffffffff, mean, turn % TURNS, TURNS) : 0;
    row_rstd = __shfl_sync(0xffffffff, rstd, turn % TURNS, TURNS);
  }

  __device__ __forceinline__ bool has(long long row) const { return row < end && (CLASSES == 1 || row >= 0); }
  __device__ __forceinline__ void load(long long row, Compute& row_mean, Compute& row_rstd) const {
    row_mean = CENTERED && has(row) ? means[row] : 0;
    row_rstd = has(row) ? rstds[row] : 0;
  }
};

// What a thread has of dweight or dbias, since its share began.
struct ColumnSums {
  Compute vectors[VECTORS][VECTOR];
  OfEdges<Compute> edges;
};

// The registers of a thread, of 4 bytes, and those that it holds over a turn: x, dy, sums, and weights that came early.
constexpr int SHARING_THREADS = BLOCK_THREADS * MIN_BLOCKS;
constexpr int REGISTERS = 65536 / SHARING_THREADS < 255 ? 65536 / SHARING_THREADS : 255;
constexpr int EARLY_BYTES =
    weights_come == Weights::early ? HAS_WEIGHT * sizeof(WEIGHT_TYPE) + HAS_BIAS * sizeof(BIAS_TYPE) : 0;
constexpr int SUM_BYTES = (WANTS_DWEIGHT + WANTS_DBIAS) * sizeof(Compute);
constexpr int HELD = VECTORS * VECTOR * (SUM_BYTES + 2 * sizeof(X_TYPE) + EARLY_BYTES) / 4;

// Whether vectors that are not there are skipped, by a branch for each. Else they are zeros, and one instruction
// follows another: ptxas then keeps the derivative of an activation from one pass for the next, if it has registers.
// Under silu 256, 1024 and 4096 columns of bfloat16 take 1.10, 1.04 and 1.10 so, else 1.43, 1.33 and 1.49; but on
// an H100 10,752, of which not all threads have 3 vectors, take 1.21 and 1.10 (under the exact gelu 1.17 and 1.35), and
// 100 of float32, read directly, 1.31 and 1.14. Peeled rows are always skipped, and without an activation rows that
// come ahead, whose branches are few: 4097 columns take 1.12, else 1.51.
constexpr int IN_PART = VECTORS - WHOLE_VECTORS;  // vectors that not every thread has
constexpr int ROOM = 44 + (ROWS_PER_BLOCK == 1 && IN_PART > 0 && activation != Activation::gelu ? 12 : 0);
constexpr bool KEEPS_DERIVATIVE = activation != Activation::none && !PEELED && IN_PART < 2 &&
                                  HELD + VECTORS * VECTOR + ROOM <= REGISTERS;
constexpr bool ZEROS_DIRECTLY = activation == Activation::none || sizeof(X_TYPE) == 2;
constexpr bool SKIPS = HAS_CHANNELS || !(stage == Stage::direct && !PEELED ? ZEROS_DIRECTLY : KEEPS_DERIVATIVE);

// Of so many of a thread's vectors dz is kept, in place of dy, where an activation's derivative would have to be made
// again for it (for silu two of the slow instructions of the special function unit, for each number): as many as there
// are registers for, beside what is held and others. With fewer, ptxas spills. Of channels, where 512 threads share a
// multiprocessor; else all or none. On an H100 4097 and 50,257 columns take 1.13 and 1.54 under silu so, else 1.18 and
// 1.82, and 1.18 and 1.71 under the exact gelu, else 1.58 and 2.48. Of float32, where it takes the registers of dy,
// all, where nothing spills so (500 columns take 1.43, else 1.17).
constexpr int OTHER_REGISTERS = activation == Activation::gelu  ? 72
                                : weights_of == WeightsOf::part ? 32
                                : HAS_CHANNELS                  ? 48
                                : PEELED                        ? 60
                                                                : 64;
constexpr int DZ_WORDS = sizeof(X_TYPE) == 2 ? VECTOR / 2 : 0;  // that dz takes more than dy
constexpr int registers_with(int kept) {
  return OTHER_REGISTERS + (HAS_CHANNELS ? VECTORS * VECTOR : HELD) + kept * DZ_WORDS;
}
constexpr int most_kept(int registers) {
  int kept = 0;
  while (kept < VECTORS && registers_with(kept + 1) <= registers) ++kept;
  return HAS_CHANNELS || kept == VECTORS ? kept : 0;
}
constexpr bool OF_FLOATS = sizeof(X_TYPE) == 4 && (PEELED ? !HAS_DRESIDUAL || VECTORS <= 5
                                                          : ROWS_PER_BLOCK == 1 || stage == Stage::direct);
constexpr bool KEEPS_DZ =
    activation != Activation::none && SKIPS && (sizeof(X_TYPE) == 2 || (OF_FLOATS && !HAS_CHANNELS));
constexpr int KEEPING_REGISTERS = HAS_CHANNELS ? 65536 / (SHARING_THREADS > 512 ? SHARING_THREADS : 512) : REGISTERS;
constexpr int KEPT = !KEEPS_DZ ? 0 : DZ_WORDS > 0 ? most_kept(KEEPING_REGISTERS) : VECTORS;

// Whether the means of the sums are divisions. Their branches keep ptxas from spilling where registers are few: 8192
// columns with a residual take 1.06 so, else 1.44. Elsewhere a product is as good, and less: 24,576, 3 vectors of a
// thread, take 1.07, else 1.13 (but 32,768, 4 vectors, 1.08 and 1.06). Under an activation they would part what ptxas
// keeps: 8192 columns take 1.09 under silu, else 1.49; on an H100 40,000 with a residual 1.08 and 1.15. But where dz is
// kept and fills the registers 20,000 take 1.12 so on an H100, else 1.20; and where x, dy and the sums fill them
// 262,144 1.94, else 2.55, since 368 bytes spill.
constexpr bool IS_LONG = !PEELED && VECTORS * VECTOR * sizeof(X_TYPE) > 48;
constexpr bool FILLS_REGISTERS = HELD * 5 / 4 + 40 + 12 * PEELED + 20 * HAS_DRESIDUAL > REGISTERS;
constexpr bool KEEPS_MOST = KEPT * DZ_WORDS > 0 && !PEELED && registers_with(KEPT) + 12 > REGISTERS;
constexpr bool IS_FULL = HELD + VECTORS * VECTOR >= REGISTERS;
constexpr bool DIVIDES = HAS_CHANNELS                     ? VECTORS > 5
                         : activation == Activation::none ? IS_LONG || FILLS_REGISTERS
                                                          : KEEPS_MOST || IS_FULL;

extern "C" __global__ void SHARES_ROWS __launch_bounds__(THREADS_PER_ROW * ROWS_PER_BLOCK, MIN_BLOCKS)
    row_block_backward(const Arguments arguments) {
  let_next_launch_begin();
  constexpr int SCRATCH = 2 * ((THREADS_PER_ROW + 31) / 32) * ROWS_PER_BLOCK;
  __shared__ Compute scratch[2][SCRATCH];
  __shared__ Exchange<2> exchange;
  // x, dy, dresidual_out; dx where it is a run; weight, bias, or those of channels and entries of theirs
  extern __shared__ __align__(COPY_ALIGNMENT) X_TYPE staged[];

  Part part = part_of_block(arguments.rows, arguments.columns, arguments.columns_per_block);
  X_TYPE* unused = staged;
  const auto take = [&](bool needed) {
    X_TYPE* taken = unused;
    unused += needed ? STAGE_ELEMENTS : 0;
    return taken;
  };
  const Rows<const X_TYPE, X_SHIFT> x = {arguments.x, arguments.x_stride, take(stage != Stage::direct)};
  const Rows<const X_TYPE, DY_SHIFT> dy = {arguments.dy, arguments.dy_stride, take(stage != Stage::direct)};
  const Rows<const X_TYPE, DRESIDUAL_OUT_SHIFT> dresidual_out = {
      arguments.dresidual_out, arguments.dresidual_out_stride, take(stage != Stage::direct && HAS_DRESIDUAL)};
  const Rows<X_TYPE> dx = {arguments.dx, arguments.dx_stride, take(stage == Stage::run && WANTS_DX)};
  Affine affine = affine_of(arguments, part, unused);

  // Read only where a share begins or ends, so it has no register.
  __shared__ int class_of_share;
  const Share first_share = first_share_of(arguments.rows);
  if (CLASSES > 1 && thread_in_block() == 0) class_of_share = first_share.of_class;
  const long long step = first_share.step();
  long long first_row = 0;
  // Where rows are PEELED, all of a share begin in the same way. To keep how would take registers.
  const auto place_at = [&](long long first) {
    if constexpr (WANTS_DX) return place_of(dx, part, first);
    return place_of(x, part, first);
  };
  StatisticsAhead statistics = {arguments.mean, arguments.rstd, arguments.rows, step};
  const Compute scale = reciprocal_of(static_cast<Compute>(arguments.columns));
  const auto mean_of = [&](Compute sum) { return DIVIDES ? sum / arguments.columns : sum * scale; };
  // What is ahead: rows in shared memory, and the next edges in registers.
  const auto fetch_rows = [&](long long first, int slot) {
    fetch(x, part, first, slot);
    fetch(dy, part, first, slot);
    if constexpr (stage != Stage::direct) copy_async_commit();
  };
  const auto fetch_dresidual_out = [&](long long first, int slot) {
    if constexpr (!HAS_DRESIDUAL) return;
    fetch(dresidual_out, part, first, slot);
    if constexpr (stage != Stage::direct) copy_async_commit();
  };
  // What was committed behind the rows that are waited for, and behind the dresidual_out.
  constexpr int BEHIND = HAS_DRESIDUAL ? 2 * ROWS_AHEAD - 1 : ROWS_AHEAD - 1;
  struct {
    Edges x, dy;
  } edges, next_edges;
  const auto fetch_edges = [&](long long first) {
    get_edges(x, part, place_at(first), next_edges.x);
    get_edges(dy, part, place_at(first), next_edges.dy);
  };
  AffineEdges affine_edges;
  const auto begin_share = [&](const Share& share, int turn) {
    first_row = share.first();
    part.rows = statistics.end = share.end();
    const Place place = place_at(first_row);
    if constexpr (stage != Stage::direct) affine.by_channel.fetch(part, place.row);
#pragma unroll
    for (int i = 0; i < ROWS_AHEAD; ++i) {
      fetch_rows(first_row + i * step, i);
      fetch_dresidual_out(first_row + i * step, i);
    }
    if constexpr (stage == Stage::ahead) fetch_edges(first_row);
    statistics.begin(turn, place.row);
    affine.go_to(place);
    affine.stage(place);
    affine.fetch_early(place);
    if constexpr (!HAS_CHANNELS) affine.get_edges(place, affine_edges);
  };
  begin_share(first_share, 0);
  start_mbarriers(exchange);
  cluster_barrier();

  // Of weights by channel: what a channel of the block's part of a row has of dweight and dbias, and how it is written.
  constexpr bool SUMS_CHANNELS = weights_of == WeightsOf::vector && (WANTS_DWEIGHT || WANTS_DBIAS);
  ChannelSums channel_sums = {reinterpret_cast<Compute*>(unused) + STAGED_CHANNEL_ELEMENTS, {0, 0}};
  const Channels& channels = affine.by_channel.affine.channels;
  const auto write_channel = [&](long long row, unsigned channel, Compute sum, Compute product) {
    const long long place = place_of_sum(channels, row, channel);
    if constexpr (WANTS_DWEIGHT) narrow(product, arguments.dweight[place]);
    if constexpr (WANTS_DBIAS) narrow(sum, arguments.dbias[place]);
  };
  const auto write_channels = [&](const Place& place, int turn) {
    if constexpr (!WANTS_DX || THREADS_PER_ROW <= 32) __syncthreads();  // else row_sum had one
    const int first = channels.of_column(0), end = channels.of_column(part.columns);
    channel_sums.for_each(turn, end - first, channels.positions, [&](int channel, Compute sum, Compute product) {
      if (place.there) write_channel(place.row, first + channel, sum, product);
    });
  };

  // Adds over threadIdx.y, and writes the share's row of sums. The upper half of the rows gives its sums to the lower
  // one, by column, until there is one row: two rows may be peeled differently.
  const auto for_each_sum = [&](const Place& place, ColumnSums& own, auto use) {
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      if (place.has(i)) {
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) use(place.column(i) + j, own.vectors[i][j]);
      }
    }
#pragma unroll
    for (int i = 0; i < EDGES; ++i) {
      if (place.has_edge(i)) use(place.edge_column(i), own.edges[i]);
    }
  };
  const auto write_sums = [&](ColumnSums& own, auto* sums) {
    const Share share = {arguments.rows, CLASSES > 1 ? class_of_share : 0};
    Place place = place_at(share.first());
    if constexpr (CLASSES > 1) place.there = true;  // also where the share has no row
    // The columns of neighbouring threads lie side by side: no bank of shared memory is asked twice at once.
    const unsigned vectors = part.columns / VECTOR + 1;
    const auto shared = [&](unsigned row, unsigned column) -> Compute& {
      return reinterpret_cast<Compute*>(staged)[(row * VECTOR + column % VECTOR) * vectors + column / VECTOR];
    };
#pragma unroll 1
    for (int rows = ROWS_PER_BLOCK / 2; rows > 0; rows /= 2) {
      const int y = threadIdx.y;
      __syncthreads();
      if (y >= rows && y < 2 * rows) {
        for_each_sum(place, own, [&](int column, Compute& sum) { shared(y - rows, column) = sum; });
      }
      __syncthreads();
      // A row past the last has nothing to give.
      if (y < rows && share.first() + y + rows < arguments.rows) {
        for_each_sum(place, own, [&](int column, Compute& sum) { sum += shared(y, column); });
      }
    }
    sums += share.place() * arguments.columns + part.first_column;
    if constexpr (PEELED) {
      // In the order of the columns, which no thread has vectors of.
      __syncthreads();
      if (threadIdx.y == 0) for_each_sum(place, own, [&](int column, Compute& sum) { shared(0, column) = sum; });
      __syncthreads();
      for (int i = thread_in_block(); i < part.columns; i += BLOCK_THREADS) narrow(shared(0, i), sums[i]);
    } else if (threadIdx.y == 0) {
#pragma unroll
      for (int i = 0; i < VECTORS; ++i) {
        if (place.has(i)) store_rounded(sums + place.column(i), own.vectors[i]);
      }
    }
  };
  ColumnSums dweight_sums = {}, dbias_sums = {};
  const auto write_share = [&] {
    if constexpr (WANTS_DWEIGHT && !HAS_CHANNELS) write_sums(dweight_sums, arguments.dweight);
    if constexpr (WANTS_DBIAS && !HAS_CHANNELS) write_sums(dbias_sums, arguments.dbias);
  };
  int slot = 0;
  // Goes on to the next share that has rows, in all threads; false where there is none.
  const auto begin_next_share = [&](int turn) {
    for (;;) {
      Share share = {arguments.rows, class_of_share};
      if (!share.advance()) return false;
      write_share();
      __syncthreads();  // the sums went through the memory that rows come to
      if (thread_in_block() == 0) class_of_share = share.of_class;
      dweight_sums = dbias_sums = {};
      begin_share(share, turn);
      slot = 0;
      __syncthreads();
      if (first_row < part.rows) return true;
    }
  };
  for (int turn = 0; first_row < part.rows || (CLASSES > 1 && begin_next_share(turn));
       first_row += step, ++turn, slot = slot_after(slot)) {
    const Place place = place_at(first_row);
    affine.go_to(place);
    if constexpr (stage != Stage::direct) {
      affine.by_channel.put(turn);
      affine.by_channel.fetch(part, place.row + step);
    }

    // Load. Threads past the last row or column go along with nothing to add: the sums need every lane.
    Compute mean, rstd;
    statistics.get(turn, place.row, mean, rstd);
    wait_for_rows<BEHIND>();
    Vector<X_TYPE, VECTOR> x_values[VECTORS], dy_values[VECTORS];
    if constexpr (stage == Stage::direct) fetch_edges(first_row);
    edges = next_edges;
    get_vectors(x, part, place, slot, x_values);
    get_vectors(dy, part, place, slot, dy_values);
    if constexpr (!SKIPS) {
#pragma unroll
      for (int i = 0; i < VECTORS; ++i) {
        if (!place.has(i)) x_values[i] = dy_values[i] = {};
      }
    }
    const auto fetch_next = [&] {
      if constexpr (stage == Stage::direct) return;
      release_rows();
      fetch_rows(first_row + ROWS_AHEAD * step, slot);
      if constexpr (stage == Stage::ahead) fetch_edges(first_row + step);
    };
    // Many peeled vectors leave no registers for addresses now: 15,873 columns of bfloat16 take 1.22 so, else 1.25.
    constexpr bool FETCHES_LATE = PEELED && VECTORS > 4;
    if constexpr (!FETCHES_LATE) fetch_next();
    if constexpr (stage == Stage::direct) {
      affine.by_channel.fetch(part, place.row);
      affine.by_channel.put(turn);
    }
    if constexpr (STAGES_CHANNELS) __syncthreads();
    if constexpr (HAS_CHANNELS) affine.get_edges(place, affine_edges);

    // Reduce along the row, and add to the column sums on the way.
    Compute sums[2] = {0, 0};  // of g, and of g * xhat; or of dz, and of dz * xhat, where the part is of one channel
    const auto add = [&](Compute x, Compute dy, Compute weight, Compute bias, Compute& dweight, Compute& dbias,
                         Compute& sum, Compute& product) {
      const Gradient gradient = gradient_of(x, dy, mean, rstd, weight, bias);
      if constexpr (WANTS_DWEIGHT) dweight += gradient.dz * gradient.xhat;
      if constexpr (WANTS_DBIAS) dbias += gradient.dz;
      if constexpr (CENTERED) sum += gradient.g;
      product += gradient.g * gradient.xhat;
      return gradient.dz;
    };
    const auto add_by_channel = [&](Compute x, Compute dy, Compute weight, Compute bias, Compute (&own)[2]) {
      const Compute deviation = deviation_of(x, mean, rstd);
      const Compute dz = dz_of(dy, deviation * slope_of(weight, rstd), bias);
      own[0] += dz;
      own[1] += dz * deviation;
      return dz;
    };
    Compute kept_dz[KEPT > 0 ? KEPT : 1][VECTOR];
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      if constexpr (HAS_CHANNELS) {
        Compute weight[VECTOR], bias[VECTOR], own[2] = {0, 0};
        if (place.has(i)) {
          affine.get(place, i, weight, bias);
#pragma unroll
          for (int j = 0; j < VECTOR; ++j) {
            const Compute dz = add_by_channel(widen(x_values[i], j), widen(dy_values[i], j), weight[j], bias[j], own);
            if (i < KEPT) kept_dz[i][j] = dz;
          }
          own[1] *= missing_scale(rstd);
          const Compute factor = HAS_WEIGHT && weights_of == WeightsOf::vector ? weight[0] : 1;
          sums[0] += factor * own[0];
          sums[1] += factor * own[1];
        }
        if constexpr (SUMS_CHANNELS) channel_sums.add(turn, i, own);
      } else if (!SKIPS || place.has(i)) {
        Compute weight[VECTOR] = {}, bias[VECTOR] = {}, sum = 0, product = 0;
        if (SKIPS || place.reaches(i)) affine.get(place, i, weight, bias);
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) {
          const Compute dz = add(widen(x_values[i], j), widen(dy_values[i], j), weight[j], bias[j],
                                 dweight_sums.vectors[i][j], dbias_sums.vectors[i][j], sum, product);
          if (i < KEPT) kept_dz[i][j] = dz;
        }
        sums[0] += sum;
        sums[1] += product;
      }
    }
#pragma unroll
    for (int i = 0; i < EDGES; ++i) {
      if (!place.has_edge(i)) continue;
      const Compute x = widen(edges.x[i], 0), dy = widen(edges.dy[i], 0);
      const Compute weight = affine_edges.weight[i][0], bias = affine_edges.bias[i][0];
      if constexpr (HAS_CHANNELS) {
        Compute own[2] = {0, 0};
        add_by_channel(x, dy, weight, bias, own);
        sums[0] += own[0];
        sums[1] += own[1] * missing_scale(rstd);
      } else {
        add(x, dy, weight, bias, dweight_sums.edges[i], dbias_sums.edges[i], sums[0], sums[1]);
      }
    }
    if constexpr (FETCHES_LATE) fetch_next();
    if constexpr (!WANTS_DX && SUMS_CHANNELS) write_channels(place, turn);
    if constexpr (!WANTS_DX && weights_of != WeightsOf::part) continue;
    row_sum<THREADS_PER_ROW>(sums, scratch[turn % 2]);
    if constexpr (weights_of == WeightsOf::part) {
      if (threadIdx.x == 0 && place.there) write_channel(place.row, channels.of_column(0), sums[0], sums[1]);
      if constexpr (!WANTS_DX) continue;
      const Compute factor = HAS_WEIGHT ? affine.by_channel.affine.part_weight[0] : 1;
      sums[0] *= factor;
      sums[1] *= factor;
    }
    if constexpr (BLOCKS_PER_ROW > 1) {
      const Compute(&everyones)[BLOCKS_PER_ROW][2] = exchange_in_row(exchange, turn, sums);
      sums[0] = sums[1] = 0;
#pragma unroll
      for (int i = 0; i < BLOCKS_PER_ROW; ++i) {
        sums[0] += everyones[i][0];
        sums[1] += everyones[i][1];
      }
    }
    // dx = rstd * (g - mean(g) - xhat * mean(g * xhat)), with what is the same along the row put together: but for the
    // rstd in xhat, whose square could leave the range of float (see BY_DEVIATION in affine.cuh).
    const Compute offset = mean_of(-sums[0]) * rstd;
    const Compute slope = mean_of(-sums[1]) * rstd * (HAS_CHANNELS ? missing_scale(rstd) : 1);

    // Finish and store.
    const auto dz_at = [&](Compute x, Compute dy, Compute weight, Compute bias) {
      if constexpr (!HAS_CHANNELS) return gradient_of(x, dy, mean, rstd, weight, bias).dz;
      return dz_of(dy, deviation_of(x, mean, rstd) * slope_of(weight, rstd), bias);
    };
    const auto dx_of = [&](Compute x, Compute dz, Compute weight, Compute dresidual_out) {
      const Gradient gradient = gradient_with(x, dz, mean, rstd, weight);
      // A multiplication less: but where there is no activation, ptxas spills so.
      constexpr bool SCALES_ONCE = HAS_CHANNELS && activation != Activation::none;
      const Compute first = SCALES_ONCE ? dz * scale_of(weight, rstd) : gradient.g * rstd;
      const Compute second = (HAS_CHANNELS ? deviation_of(x, mean, rstd) : gradient.xhat) * slope;
      Compute value = first + (CENTERED ? second + offset : second);
      if constexpr (HAS_DRESIDUAL) value += dresidual_out;
      return value;
    };
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      forget_widened(x_values[i]);
      forget_widened(dy_values[i]);
    }
    if constexpr (HAS_DRESIDUAL) wait_for_rows<BEHIND>();
    Vector<X_TYPE, VECTOR> added[VECTORS];
    if constexpr (HAS_DRESIDUAL && stage == Stage::direct) get_vectors(dresidual_out, part, place, slot, added);
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      if (SKIPS && !place.has(i)) continue;
      Compute weight[VECTOR] = {}, bias[VECTOR] = {};
      if (SKIPS || place.reaches(i)) affine.get(place, i, weight, bias);
      Compute results[VECTOR];
      if constexpr (HAS_DRESIDUAL && stage != Stage::direct) {
        if (SKIPS || place.reaches(i)) added[i] = staged_vector(dresidual_out, part, place, slot, i);
      }
#pragma unroll
      for (int j = 0; j < VECTOR; ++j) {
        const Compute x = widen(x_values[i], j);
        const Compute dz = i < KEPT ? kept_dz[i][j] : dz_at(x, widen(dy_values[i], j), weight[j], bias[j]);
        results[j] = dx_of(x, dz, weight[j], widen(added[i], j));
      }
      if (place.has(i)) put(dx, part, place, i, rounded<X_TYPE>(results));
    }
    Edges added_edges;
    if constexpr (HAS_DRESIDUAL) get_edges(dresidual_out, part, place, added_edges);
#pragma unroll
    for (int i = 0; i < EDGES; ++i) {
      if (!place.has_edge(i)) continue;
      const Compute x = widen(edges.x[i], 0), dy = widen(edges.dy[i], 0);
      const Compute weight = affine_edges.weight[i][0], bias = affine_edges.bias[i][0];
      const Compute result[1] = {dx_of(x, dz_at(x, dy, weight, bias), weight, widen(added_edges[i], 0))};
      put_edge(dx, part, place, i, rounded<X_TYPE>(result));
    }
    if constexpr (stage == Stage::run) {
      __syncthreads();
      flush(dx, part, place);
    }
    if constexpr (HAS_DRESIDUAL && stage == Stage::ahead) release_rows();
    fetch_dresidual_out(first_row + ROWS_AHEAD * step, slot);
    if constexpr (SUMS_CHANNELS) write_channels(place, turn);
  }

  write_share();
}
