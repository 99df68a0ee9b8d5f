// Layer norm and RMS norm of long rows, each of which several blocks share: y = activate((x - mean) * rstd * weight +
// bias); RMS norm (not CENTERED) has no mean. With a residual, what is normalized is residual_out = x + residual, as it
// was rounded. Instance norm is layer norm with weights by channel (see row_channels.cuh), a row being one channel, and
// group norm, a row being several; so is batch norm, whose rows are the same channel of all samples, and which moves
// running statistics towards a row's.
//
// Moves x (and the residual) once in, and y (and residual_out) once out. How blocks share rows and tell each other what
// they have of them is in row_pipeline.cuh.
//
// The statistics are taken in one pass, as the row arrives, of the differences from a pivot: the mean of a share of
// what the warp has. Its squared deviation from the pivot exceeds that from its own mean by a factor of at most one
// over the share, so little cancels whatever the data are.
#include "types.cuh"
#include "grid_words.cuh"
#include "reduce.cuh"
#include "copy_async.cuh"
#include "cache_hints.cuh"
#include "activation.cuh"
#include "affine.cuh"
#include "reciprocal.cuh"
constexpr bool TAKES_TURNS = true;
#include "row_channels.cuh"
#include "statistics.cuh"
#include "channel_running.cuh"
#include "group_part.cuh"
#include "pipeline.cuh"
#include "collected.cuh"
#include "row_parts.cuh"
#include "row_pipeline.cuh"
#include "row_exchange.cuh"
#include "row_part_statistics.cuh"

struct Arguments {
  const X_TYPE* x;
  const X_TYPE* residual;
  const WEIGHT_TYPE* weight;
  const BIAS_TYPE* bias;
  X_TYPE* y;
  X_TYPE* residual_out;
  Compute* mean;  // null where the statistics are not asked for; so is rstd
  Compute* rstd;
  RUNNING_MEAN_TYPE* running_mean;
  RUNNING_VARIANCE_TYPE* running_var;
  long long* words;  // see Exchange
  long long word_pairs;
  long long rows;
  long long columns;            // a multiple of VECTOR, unless PEELED
  long long room;               // what blocks have parts of: the columns or, PEELED, all segments' room
  long long columns_per_block;  // a multiple of VECTOR, see RowParts
  long long blocks_per_row;     // divides gridDim.x; at most 32 * PARTS_PER_LANE
  long long x_stride;           // elements from one row to the next
  long long residual_stride;
  long long y_stride;
  long long residual_out_stride;
  long long segment_columns;  // see Places
  long long segment_room;
  long long segment_stride;
  double eps;
  double kept;
  double taken;
  double taken_variance;
#if CHANNEL_NUMBERS > 0
  long long channels[CHANNEL_NUMBERS];  // see row_channels.cuh
#endif
};

static_assert(!PEELED || (HAS_CHANNELS || !(HAS_WEIGHT || HAS_BIAS)) && !HAS_RESIDUAL);
static_assert(!PEELED || !KEPT_IN_L2, "a thread may have none of a vector, and no place of it");

// ---- Weights.

// Those of a thread's columns; or of the part's channel.
struct Affine {
  Kept<WEIGHT_TYPE, HAS_WEIGHT && !HAS_CHANNELS, WEIGHT_ACCESS> weights;
  Kept<BIAS_TYPE, HAS_BIAS && !HAS_CHANNELS, BIAS_ACCESS> biases;

  __device__ __forceinline__ Vector<X_TYPE, VECTOR> finish(const Vector<X_TYPE, VECTOR>& x, int i, const OfRow& row) {
    if constexpr (HAS_CHANNELS || PEELED) {
      return normalized_alike(x, row.mean, row.remainder, row.rstd, row.weight[0], row.bias[0]);
    }
    Compute weight[VECTOR], bias[VECTOR];
    weights.get(i, weight);
    biases.get(i, bias);
    add_weight_offset(weight);
    return normalized(x, row.mean, row.remainder, row.rstd, weight, bias);
  }
};

// Vectors that give the pivot.
constexpr int PIVOT_VECTORS = (RESIDENT + 3) / 4;

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, BLOCKS_PER_MULTIPROCESSOR)
    row_pipeline_forward(const Arguments arguments) {
  clear_words(arguments.words, arguments.word_pairs);
  // Of two turns: the next one's are written while these are read.
  __shared__ OfWarps of_warps[2];
  __shared__ OfRow of_row[2];
  extern __shared__ __align__(COPY_ALIGNMENT) X_TYPE staged[];  // x, residual
  using Values = Vector<X_TYPE, VECTOR>;

  const RowParts parts = row_parts_of(arguments, arguments.room);
  const SharedPart part = row_part_of_block(arguments, parts);
  const long long rows = arguments.rows, groups = part.groups;
  const int vectors = part.count / VECTOR, own_vectors = own_vectors_of(vectors);
  const auto has = [&](int i) { return i < own_vectors; };
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const bool works = warp < WARPS, tells = warp == WARPS, waits = warp == WARPS + 1;

  const Places places(arguments, part);
  const long long first = places.first;
  const auto sum_of_row = [&](long long row) {
    return arguments.residual_out + row * arguments.residual_out_stride + first;
  };
  struct Sources {
    const X_TYPE* x;
    const X_TYPE* residual;
    int vectors;
    unsigned phase;
  };
  const auto sources_of = [&](long long row) {
    Sources of = {arguments.x + row * arguments.x_stride + first, nullptr, row < rows ? own_vectors : 0,
                  phase_of(row, arguments.x_stride)};
    pin(of.x);
    if constexpr (HAS_RESIDUAL) {
      of.residual = arguments.residual + row * arguments.residual_stride + first;
      pin(of.residual);
    }
    return of;
  };
  const auto fill = [&](X_TYPE* slot, const Sources& of, int i) {
    if (i < of.vectors) {
      places.visit(i, of.phase, [&](const auto& spot) {
        spot.copy(slot, of.x);
        keep_in_l2<KEPT_IN_L2>(of.x + spot.offset);
        if constexpr (HAS_RESIDUAL) spot.copy(slot + STAGED, of.residual);
      });
    }
    copy_async_commit();
  };

  Affine affine = {};
  long long row = part.group;  // that is summed
  if (works) {
    for (int ahead = 0; ahead < AHEAD - LAG; ++ahead) {
      X_TYPE* const slots = slots_of(staged, ahead);
      const Sources sources = sources_of(row + ahead * groups);
#pragma unroll
      for (int i = 0; i < RESIDENT; ++i) fill(slots + i * STEP, sources, i);
    }
#pragma unroll
    for (int i = 0; i < RESIDENT; ++i) {
      if (!has(i)) continue;
      affine.weights.load(arguments.weight + first + i * STEP, i);
      affine.biases.load(arguments.bias + first + i * STEP, i);
    }
  }
  __syncthreads();
  if (!works) wait_for_words();

  // What the last two warps merge with.
  const Exchange<TOLD> exchange(arguments.words, part);
  const WarpMerge merge_warps = warp_merge_of(vectors);
  const Compute of_each = static_cast<Compute>(1) / arguments.columns;  // the share of a number
  Compute shares[PARTS_PER_LANE];  // of every 32nd block, each lane; PEELED, of each row others
  if constexpr (!PEELED) {
#pragma unroll
    for (int i = 0; i < PARTS_PER_LANE; ++i) {
      shares[i] = lane + 32 * i < part.blocks ? parts.count_of(lane + 32 * i) * of_each : 0;
    }
  }

  for (int turn = 0; row - LAG * groups < rows; ++turn, row += groups) {
    const int done_turn = turn - LAG;
    const long long done_row = row - LAG * groups;  // that is finished
    const bool sums_up = row < rows, finishes = done_turn >= 0;
    if (works) {
      // Load. With a residual, the sum takes the place of x.
      X_TYPE* const own = slots_of(staged, turn);
      const unsigned phase = phase_of(row, arguments.x_stride);
      const auto arrived = [&](int i, const auto& spot) {
        Values values = load<X_TYPE, VECTOR>(own + i * STEP);
        if constexpr (HAS_RESIDUAL) {
          values = sum_of(values, load<X_TYPE, VECTOR>(own + STAGED + i * STEP));
          store(own + i * STEP, values);
          spot.write(sum_of_row(row), values);
        }
        return values;
      };

      // Reduce: the pivot, then the differences from it.
      Compute pivot[1] = {0}, sums[2] = {0, 0}, count[1] = {0};
      const auto count_in = [&](const auto& spot) {
        if constexpr (PEELED) count[0] += static_cast<Compute>(spot.count());
      };
      const auto visit = [&](int i, const auto& use) {
        if (sums_up && has(i)) places.visit(i, phase, use);
      };
      if constexpr (CENTERED) {
        as_they_arrive<UNDER_WAY, 0, PIVOT_VECTORS>([&](int i) {
          visit(i, [&](const auto& spot) {
            add_values(arrived(i, spot), pivot, spot.there());
            count_in(spot);
          });
        });
        warp_sum<32, 1>(pivot);
        Compute pivot_count[1] = {count[0]};
        if constexpr (PEELED) {
          warp_sum<32, 1>(pivot_count);
        } else {
          int lanes = 0;
#pragma unroll
          for (int i = 0; i < PIVOT_VECTORS; ++i) lanes += lanes_with(vectors, warp, i);
          pivot_count[0] = static_cast<Compute>(lanes * VECTOR);
        }
        pivot[0] *= reciprocal_of(max(pivot_count[0], static_cast<Compute>(1)));
#pragma unroll
        for (int i = 0; i < PIVOT_VECTORS; ++i) {
          visit(i, [&](const auto& spot) {
            add_differences(load<X_TYPE, VECTOR>(own + i * STEP), pivot[0], sums, spot.there());
          });
        }
      }
      as_they_arrive<UNDER_WAY, CENTERED ? PIVOT_VECTORS : 0, RESIDENT>([&](int i) {
        visit(i, [&](const auto& spot) {
          add_differences(arrived(i, spot), pivot[0], sums, spot.there());
          count_in(spot);
        });
      });
      warp_sum<32, 1>(sums);
      if constexpr (PEELED) warp_sum<32, 1>(count);
      if (lane == 0) {
        OfWarps& target = of_warps[turn % 2];
        target.pivot[warp] = pivot[0];
        target.sums[0][warp] = sums[0];
        target.sums[1][warp] = sums[1];
        if constexpr (PEELED) target.counts[warp] = count[0];
      }
    } else if (waits && finishes) {
      const long long channel = channel_of_row(arguments, done_row) + parts.channel_of(part.rank);
      const OfChannel of_channel(arguments.weight, arguments.bias, channel);
      const bool updates = UPDATES_RUNNING && part.rank == 0;
      Running before = {};
      if (updates) before = {arguments.running_mean[done_row], arguments.running_var[done_row]};
      Compute told[PARTS_PER_LANE][TOLD];
      exchange.await(told, done_turn);
      if constexpr (PEELED) {
#pragma unroll
        for (int i = 0; i < PARTS_PER_LANE; ++i) shares[i] = told[i][TOLD - 1] * of_each;
      }
      const Statistics whole = merged_of_lanes(told, shares);
      const Compute rstd = reciprocal_sqrt(whole.variance + static_cast<Compute>(arguments.eps));
      if (lane == 0) {
        OfRow& target = of_row[turn % 2];
        target = {whole.mean, whole.remainder, rstd, {}, {}};
        of_channel.widened(target.weight, target.bias);
        if (part.rank == 0 && arguments.rstd != nullptr) {
          if constexpr (CENTERED) arguments.mean[done_row] = whole.mean + whole.remainder;
          arguments.rstd[done_row] = rstd;
        }
        if (updates) {
          const double mean = static_cast<double>(whole.mean) + whole.remainder;
          update_running(arguments, before, mean, whole.variance, done_row);
        }
      }
    }
    __syncthreads();
    if (tells && sums_up) merge_warps.tell(of_warps[turn % 2], exchange, turn);
    if (!works) continue;

    // Finish and store; and fill again what was stored.
    const OfRow statistics = of_row[turn % 2];
    X_TYPE* const own = slots_of(staged, done_turn + AHEAD);  // those of done_turn
    const unsigned done_phase = phase_of(done_row, arguments.y_stride);
    X_TYPE* y = arguments.y + done_row * arguments.y_stride + first;
    pin(y);
    const Sources next = sources_of(done_row + AHEAD * groups);
    const int done_vectors = finishes ? own_vectors : 0;
#pragma unroll
    for (int i = 0; i < RESIDENT; ++i) {
      X_TYPE* const slot = own + i * STEP;
      if (i < done_vectors) {
        const Values finished = affine.finish(load<X_TYPE, VECTOR>(slot), i, statistics);
        places.visit(i, done_phase, [&](const auto& spot) { spot.write(y, finished); });
      }
      fill(slot, next, i);
    }
  }
}
