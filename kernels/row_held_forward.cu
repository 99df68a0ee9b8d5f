// Layer norm and RMS norm, without weights or with such by channel, of rows too long for a pipeline: as
// row_pipeline_forward computes them.
//
// Moves x once in and y once out; how is in row_held.cuh. Of instance norm a row is one channel, of group norm several.
#include "types.cuh"
#include "grid_words.cuh"
#include "reduce.cuh"
#include "activation.cuh"
#include "affine.cuh"
#include "reciprocal.cuh"
constexpr bool TAKES_TURNS = true;
#include "row_channels.cuh"
#include "statistics.cuh"
#include "group_part.cuh"
#include "bulk_copy.cuh"
#include "handover.cuh"
#include "collected.cuh"
#include "row_held.cuh"
#include "row_parts.cuh"
#include "row_exchange.cuh"
#include "row_part_statistics.cuh"

struct Arguments {
  const X_TYPE* x;
  const WEIGHT_TYPE* weight;
  const BIAS_TYPE* bias;
  X_TYPE* y;
  Compute* mean;  // null where the statistics are not asked for; so is rstd
  Compute* rstd;
  long long* words;  // see Exchange
  long long word_pairs;
  long long rows;
  long long columns;            // a multiple of VECTOR
  long long columns_per_block;  // a multiple of VECTOR, see RowParts
  long long blocks_per_row;     // gridDim.x; at most 32 * PARTS_PER_LANE
  long long x_stride;           // elements from one row to the next
  long long y_stride;
  double eps;
#if CHANNEL_NUMBERS > 0
  long long channels[CHANNEL_NUMBERS];  // see row_channels.cuh
#endif
};

static_assert(HAS_CHANNELS || (!HAS_WEIGHT && !HAS_BIAS));

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 1) row_held_forward(const Arguments arguments) {
  clear_words(arguments.words, arguments.word_pairs);
  constexpr int TENSORS = 1;
  __shared__ Ring ring;
  __shared__ Meetings meetings;
  __shared__ OfWarps of_warps[2];
  __shared__ OfRow of_rows[2];
  extern __shared__ __align__(BULK_ALIGNMENT) X_TYPE staged[];  // [RING][PIECE]
  using Values = Vector<X_TYPE, VECTOR>;

  const RowParts parts = row_parts_of(arguments, arguments.columns);
  const SharedPart part = row_part_of_block(arguments, parts);
  const long long rows = arguments.rows;
  const int vectors = part.count / VECTOR, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    ring.begin();
    meetings.begin();
  }
  __syncthreads();

  if (warp == MOVES) {
    const Source sources[TENSORS] = {{arguments.x + part.first, arguments.x_stride}};
    if (lane == 0) fetch_rows(ring, staged, sources, rows, part.count);
  } else if (warp == SHARES) {
    wait_for_words();
    const Exchange<TOLD> exchange(arguments.words, part);
    const WarpMerge merge_warps = warp_merge_of(vectors);
    const Compute of_each = static_cast<Compute>(1) / arguments.columns;  // the share of a number
    Compute shares[PARTS_PER_LANE];                                       // of every 32nd block, each lane
#pragma unroll
    for (int i = 0; i < PARTS_PER_LANE; ++i) {
      shares[i] = lane + 32 * i < part.blocks ? parts.count_of(lane + 32 * i) * of_each : 0;
    }
    for (int turn = 0; turn < rows; ++turn) {
      const long long channel = channel_of_row(arguments, turn) + parts.channel_of(part.rank);
      const OfChannel of_channel(arguments.weight, arguments.bias, channel);
      meetings.summed.wait_for(turn);
      merge_warps.tell(of_warps[turn % 2], exchange, turn);
      Compute told[PARTS_PER_LANE][TOLD];
      exchange.await(told, turn);
      const Statistics whole = merged_of_lanes(told, shares);
      const Compute rstd = reciprocal_sqrt(whole.variance + static_cast<Compute>(arguments.eps));
      if (lane == 0) {
        OfRow& target = of_rows[turn % 2];
        target = {whole.mean, whole.remainder, rstd, {}, {}};
        of_channel.widened(target.weight, target.bias);
        if (part.rank == 0 && arguments.rstd != nullptr) {
          if constexpr (CENTERED) arguments.mean[turn] = whole.mean + whole.remainder;
          arguments.rstd[turn] = rstd;
        }
      }
      meetings.known.arrive_in(turn);
    }
  } else {
    const auto has = [&](int i) { return i * PIECE + static_cast<int>(threadIdx.x) * VECTOR < part.count; };
    // A warp's pivot is the mean of the first vector of each lane.
    const Compute pivot_scale = static_cast<Compute>(1) / max(1, lanes_with(vectors, warp, 0) * VECTOR);
    X_TYPE* const own_y = arguments.y + part.first + threadIdx.x * VECTOR;
    Values x[RESIDENT];  // of the row that is held
    OfRow of_row;        // that is finished
    Compute pivot[1], sums[2];
    take_turns<TENSORS>(
        ring, staged, rows,
        [&](int turn, long long row) {
          pivot[0] = sums[0] = sums[1] = 0;
          if (row < LAG) return;
          meetings.known.wait_for(turn - LAG);
          of_row = of_rows[turn % 2];
        },
        [&](int i, long long row) {
          if (!has(i)) return;
          forget_widened(x[i]);
          store_global(own_y + row * arguments.y_stride + i * PIECE,
                       normalized_alike(x[i], of_row.mean, of_row.remainder, of_row.rstd, of_row.weight[0],
                                        of_row.bias[0]));
        },
        [&](int i, const X_TYPE* slots) {
          if (!has(i)) return 0u;
          x[i] = load<X_TYPE, VECTOR>(slots);
          return first_word(x[i]);
        },
        [&](int i, const X_TYPE* slots) {
          Values values;
          if (has(i)) values = load<X_TYPE, VECTOR>(slots);
          if (CENTERED && i == 0) {
            if (has(i)) add_values(values, pivot);
            warp_sum<32, 1>(pivot);
            pivot[0] *= pivot_scale;
          }
          if (has(i)) add_differences(values, pivot[0], sums);
        },
        [&](int turn) {
          warp_sum<32, 1>(sums);
          if (lane == 0) {
            OfWarps& target = of_warps[turn % 2];
            target.pivot[warp] = pivot[0];
            target.sums[0][warp] = sums[0];
            target.sums[1][warp] = sums[1];
          }
          meetings.summed.arrive_in(turn);
        });
  }
}
