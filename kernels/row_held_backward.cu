// Gradients of layer norm and RMS norm, without weights or with such by channel, of rows too long for a pipeline: as
// row_pipeline_backward computes them.
//
// Moves x and dy once in and dx once out; how is in row_held.cuh. Of instance norm a row is one channel, of group norm
// several: each row leaves the sums of its channels, which column_sums adds over samples.
#include "types.cuh"
#include "dependent_launch.cuh"
#include "grid_words.cuh"
#include "reduce.cuh"
#include "activation.cuh"
#include "affine.cuh"
#include "reciprocal.cuh"
constexpr bool TAKES_TURNS = true;
#include "row_channels.cuh"
#include "group_part.cuh"
#include "bulk_copy.cuh"
#include "handover.cuh"
#include "collected.cuh"
#include "row_held.cuh"
#include "row_parts.cuh"
#include "row_exchange.cuh"
#include "row_part_gradients.cuh"

struct Arguments {
  const X_TYPE* x;
  const X_TYPE* dy;
  const WEIGHT_TYPE* weight;
  const BIAS_TYPE* bias;
  const Compute* mean;
  const Compute* rstd;
  X_TYPE* dx;
  DWEIGHT_TYPE* dweight;  // [rows][channels_per_row]: partial sums, or finished ones where there is one sample
  DBIAS_TYPE* dbias;
  long long* words;  // see Exchange
  long long word_pairs;
  long long rows;
  long long columns;            // a multiple of VECTOR
  long long columns_per_block;  // a multiple of VECTOR, see RowParts
  long long blocks_per_row;     // gridDim.x; at most 32 * PARTS_PER_LANE
  long long x_stride;           // elements from one row to the next
  long long dy_stride;
  long long dx_stride;
#if CHANNEL_NUMBERS > 0
  long long channels[CHANNEL_NUMBERS];  // see row_channels.cuh
#endif
};

static_assert(HAS_CHANNELS || (!HAS_WEIGHT && !HAS_BIAS && !WANTS_DWEIGHT && !WANTS_DBIAS));

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 1) row_held_backward(const Arguments arguments) {
  let_next_launch_begin();
  clear_words(arguments.words, arguments.word_pairs);
  constexpr int TENSORS = 2;
  __shared__ Ring ring;
  __shared__ Meetings meetings;
  __shared__ OfWarps of_warps[2];
  __shared__ OfRow of_rows[2];
  extern __shared__ __align__(BULK_ALIGNMENT) X_TYPE staged[];  // [RING][x, dy][PIECE]
  using Values = Vector<X_TYPE, VECTOR>;

  const RowParts parts = row_parts_of(arguments, arguments.columns);
  const SharedPart part = row_part_of_block(arguments, parts);
  const long long rows = arguments.rows;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    ring.begin();
    meetings.begin();
  }
  __syncthreads();

  if (warp == MOVES) {
    const Source sources[TENSORS] = {{arguments.x + part.first, arguments.x_stride},
                                     {arguments.dy + part.first, arguments.dy_stride}};
    if (lane == 0) fetch_rows(ring, staged, sources, rows, part.count);
  } else if (warp == SHARES) {
    wait_for_words();
    const Exchange<2> exchange(arguments.words, part);
    for (int turn = 0; turn < rows; ++turn) {
      meetings.summed.wait_for(turn);
      const OfWarps& of = of_warps[turn % 2];
      Compute sums[2] = {lane < WARPS ? of.sums[0][lane] : 0, lane < WARPS ? of.sums[1][lane] : 0};
      warp_sum<32, 1>(sums);
      exchange.tell(sums, turn);
      const OfRow of_row = awaited_row(arguments, exchange, parts, part, turn, turn);
      if (lane == 0) of_rows[turn % 2] = of_row;
      meetings.known.arrive_in(turn);
    }
  } else {
    const auto load_given = [&](long long row) {
      return loaded_of_row(arguments, parts, part, row < rows ? row : rows - 1);
    };
    const auto has = [&](int i) { return i * PIECE + static_cast<int>(threadIdx.x) * VECTOR < part.count; };
    X_TYPE* const own_dx = arguments.dx + part.first + threadIdx.x * VECTOR;
    Values x[RESIDENT], dy[RESIDENT];  // of the row that is held
    Loaded next = load_given(0);
    Given given;   // of the row that is summed
    OfRow of_row;  // that is finished
    Compute sums[2];
    take_turns<TENSORS>(
        ring, staged, rows,
        [&](int turn, long long row) {
          given = next.widened();
          next = load_given(row + 1);
          sums[0] = sums[1] = 0;
          if (row < LAG) return;
          meetings.known.wait_for(turn - LAG);
          of_row = of_rows[turn % 2];
        },
        [&](int i, long long row) {
          if (!has(i)) return;
          forget_widened(x[i]);
          forget_widened(dy[i]);
          const Given& of = of_row.given;
          Compute results[VECTOR];
#pragma unroll
          for (int j = 0; j < VECTOR; ++j) {
            const Gradient gradient =
                gradient_of(widen(x[i], j), widen(dy[i], j), of.mean, of.rstd, of.weight[0], of.bias[0]);
            results[j] = gradient.g * of.rstd + (gradient.xhat * of_row.slope + of_row.offset);
          }
          store_global(own_dx + row * arguments.dx_stride + i * PIECE, rounded<X_TYPE>(results));
        },
        [&](int i, const X_TYPE* slots) {
          if (!has(i)) return 0u;
          x[i] = load<X_TYPE, VECTOR>(slots);
          dy[i] = load<X_TYPE, VECTOR>(slots + PIECE);
          return first_word(x[i]) | first_word(dy[i]);
        },
        [&](int i, const X_TYPE* slots) {
          if (!has(i)) return;
          const Values x = load<X_TYPE, VECTOR>(slots), dy = load<X_TYPE, VECTOR>(slots + PIECE);
          Compute of_vector[2] = {0, 0};
#pragma unroll
          for (int j = 0; j < VECTOR; ++j) {
            const Gradient gradient = gradient_of(widen(x, j), widen(dy, j), given.mean, given.rstd, given.weight[0],
                                                  given.bias[0]);
            const Compute summed = HAS_CHANNELS ? gradient.dz : gradient.g;
            of_vector[0] += summed;
            of_vector[1] += summed * gradient.xhat;
          }
          sums[0] += of_vector[0];
          sums[1] += of_vector[1];
        },
        [&](int turn) {
          warp_sum<32, 1>(sums);
          if (lane == 0) {
            of_warps[turn % 2].sums[0][warp] = sums[0];
            of_warps[turn % 2].sums[1][warp] = sums[1];
          }
          meetings.summed.arrive_in(turn);
        });
  }
}
