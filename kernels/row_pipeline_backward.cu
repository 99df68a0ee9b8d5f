// Gradients of layer norm and RMS norm of long rows, each of which several blocks share. With xhat = (x - mean) * rstd,
// dz = dy times the derivative of the activation and g = dz * weight:
//   dx = rstd * (g - mean(g) - xhat * mean(g * xhat)) + dresidual_out,
//   dweight = sum over rows of dz * xhat,  dbias = sum over rows of dz.
// RMS norm (not CENTERED) has no mean, neither of x nor of g.
//
// Moves x and dy (and dresidual_out) once in and dx once out. How blocks share rows and tell each other what they have
// of them is in row_pipeline.cuh. A thread keeps the sums of its columns in registers, so that dweight and dbias cost
// one row of partial sums a group of blocks, which column_sums adds up in a fixed order.
//
// Instance norm is layer norm with weights by channel (see row_channels.cuh), a row being one channel, and group norm,
// a row being several: each row leaves the sums of its channels, which column_sums adds over samples. Of batch norm a
// row is a channel of all samples.
#include "types.cuh"
#include "dependent_launch.cuh"
#include "grid_words.cuh"
#include "reduce.cuh"
#include "copy_async.cuh"
#include "activation.cuh"
#include "affine.cuh"
#include "reciprocal.cuh"
constexpr bool TAKES_TURNS = true;
#include "row_channels.cuh"
#include "group_part.cuh"
#include "pipeline.cuh"
#include "collected.cuh"
#include "row_parts.cuh"
#include "row_pipeline.cuh"
#include "row_exchange.cuh"
#include "row_part_gradients.cuh"

struct Arguments {
  const X_TYPE* x;
  const X_TYPE* dy;
  const X_TYPE* dresidual_out;
  const WEIGHT_TYPE* weight;
  const BIAS_TYPE* bias;
  const Compute* mean;
  const Compute* rstd;
  X_TYPE* dx;
  // [groups][columns]: partial sums, or finished ones where there is one group. Where weights are by channel,
  // [rows][channels_per_row].
  DWEIGHT_TYPE* dweight;
  DBIAS_TYPE* dbias;
  long long* words;  // see Exchange
  long long word_pairs;
  long long rows;
  long long columns;            // a multiple of VECTOR, unless PEELED
  long long room;               // what blocks have parts of: the columns or, PEELED, all segments' room
  long long columns_per_block;  // a multiple of VECTOR, see RowParts
  long long blocks_per_row;     // divides gridDim.x; at most 32 * PARTS_PER_LANE
  long long x_stride;           // elements from one row to the next
  long long dy_stride;
  long long dresidual_out_stride;
  long long dx_stride;
  long long segment_columns;  // see Places
  long long segment_room;
  long long segment_stride;
#if CHANNEL_NUMBERS > 0
  long long channels[CHANNEL_NUMBERS];  // see row_channels.cuh
#endif
};

// Of a channel the sums are of dz, which its weight is multiplied with when they are complete.
constexpr bool SUMS_COLUMNS = !HAS_CHANNELS;
static_assert(!SEGMENTED || !SUMS_COLUMNS || (!WANTS_DWEIGHT && !WANTS_DBIAS), "only `first` has the column of a sum");

// Weights and biases of a thread's columns; or of the part's channel.
struct Affine {
  Kept<WEIGHT_TYPE, HAS_WEIGHT && !HAS_CHANNELS, WEIGHT_ACCESS> weights;
  Kept<BIAS_TYPE, HAS_BIAS && !HAS_CHANNELS, BIAS_ACCESS> biases;

  // Those of the thread's i-th vector.
  __device__ __forceinline__ void get(int i, const Given& given, Compute (&weight)[VECTOR], Compute (&bias)[VECTOR]) {
    if constexpr (HAS_CHANNELS) {
#pragma unroll
      for (int j = 0; j < VECTOR; ++j) {
        if constexpr (HAS_WEIGHT) weight[j] = given.weight[0];
        if constexpr (HAS_BIAS) bias[j] = given.bias[0];
      }
    } else {
      weights.get(i, weight);
      biases.get(i, bias);
      add_weight_offset(weight);
    }
  }
};

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, BLOCKS_PER_MULTIPROCESSOR)
    row_pipeline_backward(const Arguments arguments) {
  let_next_launch_begin();
  clear_words(arguments.words, arguments.word_pairs);
  // Of two turns: the next one's are written while these are read.
  __shared__ OfWarps of_warps[2];
  __shared__ Given givens[2];
  __shared__ OfRow of_row[2];
  extern __shared__ __align__(COPY_ALIGNMENT) X_TYPE staged[];  // x, dy, dresidual_out
  using Values = Vector<X_TYPE, VECTOR>;

  const RowParts parts = row_parts_of(arguments, arguments.room);
  const SharedPart part = row_part_of_block(arguments, parts);
  const long long rows = arguments.rows, groups = part.groups;
  const int own_vectors = own_vectors_of(part.count / VECTOR);
  const auto has = [&](int i) { return i < own_vectors; };
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const bool works = warp < WARPS, tells = warp == WARPS, waits = warp == WARPS + 1;

  const Places places(arguments, part);
  const long long first = places.first;
  struct Sources {
    const X_TYPE* x;
    const X_TYPE* dy;
    const X_TYPE* dresidual_out;
    int vectors;
    unsigned phase;
  };
  const auto sources_of = [&](long long row) {
    Sources of = {arguments.x + row * arguments.x_stride + first, arguments.dy + row * arguments.dy_stride + first,
                  nullptr, row < rows ? own_vectors : 0, phase_of(row, arguments.x_stride)};
    pin(of.x);
    pin(of.dy);
    if constexpr (HAS_DRESIDUAL) {
      of.dresidual_out = arguments.dresidual_out + row * arguments.dresidual_out_stride + first;
      pin(of.dresidual_out);
    }
    return of;
  };
  const auto fill = [&](X_TYPE* slot, const Sources& of, int i) {
    if (i < of.vectors) {
      places.visit(i, of.phase, [&](const auto& spot) {
        spot.copy(slot, of.x);
        spot.copy(slot + STAGED, of.dy);
        if constexpr (HAS_DRESIDUAL) spot.copy(slot + 2 * STAGED, of.dresidual_out);
      });
    }
    copy_async_commit();
  };

  Affine affine = {};
  long long row = part.group;  // that is summed
  const auto load_given = [&](long long row) {
    return loaded_of_row(arguments, parts, part, row < rows ? row : rows - 1);
  };
  Loaded next_given = {};
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
  } else if (waits) {
    if (lane == 0) givens[0] = load_given(row).widened();
    next_given = load_given(row + groups);
  }
  __syncthreads();
  if (!works) wait_for_words();

  const Exchange<2> exchange(arguments.words, part);
  Compute dweight_sums[SUMS_COLUMNS && WANTS_DWEIGHT ? RESIDENT : 1][VECTOR] = {};
  Compute dbias_sums[SUMS_COLUMNS && WANTS_DBIAS ? RESIDENT : 1][VECTOR] = {};
  for (int turn = 0; row - LAG * groups < rows; ++turn, row += groups) {
    const int done_turn = turn - LAG;
    const long long done_row = row - LAG * groups;  // that is finished
    const bool sums_up = row < rows, finishes = done_turn >= 0;
    if (works) {
      // Reduce along the row, and add to the column sums on the way.
      const Given given = givens[turn % 2];
      X_TYPE* const own = slots_of(staged, turn);
      const unsigned phase = phase_of(row, arguments.x_stride);
      Compute sums[2] = {0, 0};
      as_they_arrive<UNDER_WAY, 0, RESIDENT>([&](int i) {
        if (!sums_up || !has(i)) return;
        places.visit(i, phase, [&](const auto& spot) {
          const auto& there = spot.there();
          const Values x = load<X_TYPE, VECTOR>(own + i * STEP), dy = load<X_TYPE, VECTOR>(own + STAGED + i * STEP);
          Compute weight[VECTOR], bias[VECTOR], of_vector[2] = {0, 0};
          affine.get(i, given, weight, bias);
#pragma unroll
          for (int j = 0; j < VECTOR; ++j) {
            Gradient gradient = gradient_of(widen(x, j), widen(dy, j), given.mean, given.rstd, weight[j], bias[j]);
            if (!there(j)) gradient = {0, 0, 0};
            if constexpr (SUMS_COLUMNS && WANTS_DWEIGHT) dweight_sums[i][j] += gradient.dz * gradient.xhat;
            if constexpr (SUMS_COLUMNS && WANTS_DBIAS) dbias_sums[i][j] += gradient.dz;
            const Compute summed = HAS_CHANNELS ? gradient.dz : gradient.g;
            of_vector[0] += summed;
            of_vector[1] += summed * gradient.xhat;
          }
          sums[0] += of_vector[0];
          sums[1] += of_vector[1];
        });
      });
      warp_sum<32, 1>(sums);
      if (lane == 0) {
        of_warps[turn % 2].sums[0][warp] = sums[0];
        of_warps[turn % 2].sums[1][warp] = sums[1];
      }
    } else if (waits) {
      if (lane == 0) givens[(turn + 1) % 2] = next_given.widened();
      next_given = load_given(row + 2 * groups);
      if (finishes) {
        const OfRow finished = awaited_row(arguments, exchange, parts, part, done_row, done_turn);
        if (lane == 0) of_row[turn % 2] = finished;
      }
    }
    __syncthreads();
    if (tells && sums_up) {
      const OfWarps& of = of_warps[turn % 2];
      Compute sums[2] = {lane < WARPS ? of.sums[0][lane] : 0, lane < WARPS ? of.sums[1][lane] : 0};
      warp_sum<32, 1>(sums);
      exchange.tell(sums, turn);
    }
    if (!works) continue;

    // Finish and store; and fill again what was stored.
    const OfRow of = of_row[turn % 2];
    X_TYPE* const own = slots_of(staged, done_turn + AHEAD);  // those of done_turn
    const unsigned done_phase = phase_of(done_row, arguments.dx_stride);
    X_TYPE* dx = arguments.dx + done_row * arguments.dx_stride + first;
    pin(dx);
    const Sources next = sources_of(done_row + AHEAD * groups);
    const int done_vectors = finishes ? own_vectors : 0;
#pragma unroll
    for (int i = 0; i < RESIDENT; ++i) {
      X_TYPE* const slot = own + i * STEP;
      if (i < done_vectors) {
        const Values x = load<X_TYPE, VECTOR>(slot), dy = load<X_TYPE, VECTOR>(slot + STAGED);
        Values added;
        if constexpr (HAS_DRESIDUAL) added = load<X_TYPE, VECTOR>(slot + 2 * STAGED);
        Compute weight[VECTOR], bias[VECTOR], results[VECTOR];
        affine.get(i, of.given, weight, bias);
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) {
          const Gradient gradient =
              gradient_of(widen(x, j), widen(dy, j), of.given.mean, of.given.rstd, weight[j], bias[j]);
          results[j] = gradient.g * of.given.rstd + (gradient.xhat * of.slope + of.offset);
          if constexpr (HAS_DRESIDUAL) results[j] += widen(added, j);
        }
        const Values finished = rounded<X_TYPE>(results);
        places.visit(i, done_phase, [&](const auto& spot) { spot.write(dx, finished); });
      }
      fill(slot, next, i);
    }
  }

  // Write the group's row of sums.
  const auto write_sums = [&](const auto& values, auto* sums) {
#pragma unroll
    for (int i = 0; i < RESIDENT; ++i) {
      if (has(i)) store_rounded(sums + part.group * arguments.columns + first + i * STEP, values[i]);
    }
  };
  if constexpr (SUMS_COLUMNS && WANTS_DWEIGHT) write_sums(dweight_sums, arguments.dweight);
  if constexpr (SUMS_COLUMNS && WANTS_DBIAS) write_sums(dbias_sums, arguments.dbias);
}
