// Gradients of layer norm and RMS norm of long rows, each of which several blocks share. With xhat = (x - mean) * rstd,
// dz = dy times the derivative of the activation and g = dz * weight:
//   dx = rstd * (g - mean(g) - xhat * mean(g * xhat)) + dresidual_out,
//   dweight = sum over rows of dz * xhat,  dbias = sum over rows of dz.
// RMS norm (not CENTERED) has no mean, neither of x nor of g.
//
// Moves x and dy (and dresidual_out) once in and dx once out. How blocks share rows and tell each other what they have
// of them is in row_pipeline.cuh. Blocks keep the sums of their columns (see part_columns.cuh), so that dweight and
// dbias cost one row of partial sums a group of blocks, which column_sums adds up in a fixed order.
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
#include "row_pipeline.cuh"
// Weights are used twice, and there are the registers. On an H200 100,001, 131,073 and 262,145 bfloat16 columns take
// 1.21, 1.23 and 1.24 of a copy's time so, else 1.24, 1.27 and 1.27.
constexpr bool KEEPS_WIDENED = PARTS_ARE_RUNS;
#include "part_columns.cuh"

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
  long long room;               // what blocks have parts of: the columns or, PEELED, the room of all segments, or parts
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

static_assert(!HAS_CHANNELS || weights_of == WeightsOf::part);
static_assert(!PARTS_ARE_RUNS || AHEAD >= LAG + 2, "a row comes while another is summed");
// Of a channel the sums are of dz, which its weight is multiplied with when they are complete.
constexpr bool SUMS_COLUMNS = !HAS_CHANNELS;
constexpr int COLUMN_SUMS = SUMS_COLUMNS ? WANTS_DWEIGHT + WANTS_DBIAS : 0;  // of a column
static_assert(!SEGMENTED || PARTS_ARE_RUNS || COLUMN_SUMS == 0, "only `first` has the column of a sum");

// Of a turn's row, what each warp has of the sums of g (or dz) and of g (or dz) * xhat.
struct OfWarps {
  Compute sums[2][WARPS];
};

// What every warp needs to sum a row; weight and bias only where the block's part has one of each.
struct Given {
  Compute mean;
  Compute rstd;
  Compute weight[1];
  Compute bias[1];
};

// And to finish it: dx = g * rstd + (xhat * slope + offset) + dresidual_out, with what is the same along the row put
// together: but for the rstd in xhat, whose square could leave the range of float.
struct OfRow {
  Given given;
  Compute offset;
  Compute slope;
};

// The same of a row, as they lie in memory.
struct Loaded {
  Compute mean;
  Compute rstd;
  OfChannel of_channel;

  __device__ __forceinline__ Given widened() const {
    Given given = {mean, rstd, {}, {}};
    of_channel.widened(given.weight, given.bias);
    return given;
  }
};

// Weights and biases of the block's columns; or of the part's channel.
struct Affine {
  KeptAffine of_columns;

  // Those of the thread's i-th vector; PARTS_ARE_RUNS, of its i-th unit.
  __device__ __forceinline__ void get(int i, const Given& given, Compute (&weight)[UNIT], Compute (&bias)[UNIT]) {
    if constexpr (!HAS_CHANNELS) return of_columns.get(i, weight, bias);
#pragma unroll
    for (int j = 0; j < UNIT; ++j) {
      if constexpr (HAS_WEIGHT) weight[j] = given.weight[0];
      if constexpr (HAS_BIAS) bias[j] = given.bias[0];
    }
  }
};

// The sums of a row that has several channels, from what its blocks tell of their parts: each counts as much as its
// channel's weight.
struct ChannelMerge {
  const RowParts& parts;
  int blocks;                           // of a row
  WEIGHT_TYPE weights[PARTS_PER_LANE];  // of the lane's blocks, every 32nd, as they lie in memory

  __device__ __forceinline__ int block_of(int i) const { return static_cast<int>(threadIdx.x) % 32 + 32 * i; }

  // With the weights of a row whose first channel that is.
  __device__ __forceinline__ ChannelMerge(const RowParts& parts, int blocks, const WEIGHT_TYPE* row_weights)
      : parts(parts), blocks(blocks) {
    if constexpr (!HAS_WEIGHT) return;
#pragma unroll
    for (int i = 0; i < PARTS_PER_LANE; ++i) {
      if (block_of(i) < blocks) weights[i] = row_weights[parts.channel_of(block_of(i))];
    }
  }

  // The sums over the row of g and g * xhat, and those over one of its channels of dz and dz * xhat.
  __device__ __forceinline__ void merge(const Compute (&told)[PARTS_PER_LANE][2], int channel, Compute (&of_row)[2],
                                        Compute (&of_channel)[2]) const {
    Compute sums[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < PARTS_PER_LANE; ++i) {
      if (block_of(i) >= blocks) continue;
      const Compute weight = HAS_WEIGHT ? widen(weights[i]) : 1;
      const bool is_of_channel = parts.channel_of(block_of(i)) == channel;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        sums[j] += weight * told[i][j];
        sums[2 + j] += is_of_channel ? told[i][j] : 0;
      }
    }
    warp_sum<32, 1>(sums);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      of_row[j] = sums[j];
      of_channel[j] = sums[2 + j];
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
  using Values = Vector<X_TYPE, UNIT>;

  const RowParts parts = row_parts_of(arguments);
  const SharedPart part = row_part_of_block(arguments, parts);
  const long long rows = arguments.rows, groups = part.groups;
  const int own_vectors = own_vectors_of(part.count / VECTOR);
  const auto has = [&](int i) { return i < own_vectors; };
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const bool works = warp < WARPS, tells = warp == WARPS, waits = warp == WARPS + 1;

  const OwnColumns own_columns = own_columns_of(arguments, part);
  const Units units(own_columns, phase_of(part.group, arguments.x_stride));
  const Places places(arguments, part, own_columns);
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
  KeptSums<COLUMN_SUMS> column_sums = {};
  long long row = part.group;  // that is summed
  const int own_channel = parts.channel_of(part.rank);  // of those that a row has
  const auto load_given = [&](long long row) {
    const long long there = row < rows ? row : rows - 1;
    return Loaded{CENTERED ? arguments.mean[there] : 0, arguments.rstd[there],
                  OfChannel(arguments.weight, arguments.bias, channel_of_row(arguments, there) + own_channel)};
  };
  Loaded next_given = {};
  if (works) {
    for (int ahead = 0; ahead < AHEAD - LAG; ++ahead) {
      X_TYPE* const slots = slots_of(staged, ahead);
      const Sources sources = sources_of(row + ahead * groups);
#pragma unroll
      for (int i = 0; i < RESIDENT; ++i) fill(slots + i * STEP, sources, i);
    }
    affine.of_columns.fetch(arguments.weight, arguments.bias, own_columns, units);
    if constexpr (PARTS_ARE_RUNS) copy_async_wait<UNDER_WAY - RESIDENT>();
  } else if (waits) {
    if (lane == 0) givens[0] = load_given(row).widened();
    next_given = load_given(row + groups);
  }
  __syncthreads();
  if (!works) wait_for_words();

  // Of the i-th vector of a row, which begins there in its slots; PARTS_ARE_RUNS, of the i-th unit.
  const auto finish = [&](int i, const X_TYPE* slot, const OfRow& of) {
    const Values x = load<X_TYPE, UNIT>(slot), dy = load<X_TYPE, UNIT>(slot + STAGED);
    Values added;
    if constexpr (HAS_DRESIDUAL) added = load<X_TYPE, UNIT>(slot + 2 * STAGED);
    Compute weight[UNIT], bias[UNIT], results[UNIT];
    affine.get(i, of.given, weight, bias);
#pragma unroll
    for (int j = 0; j < UNIT; ++j) {
      const Gradient gradient =
          gradient_of(widen(x, j), widen(dy, j), of.given.mean, of.given.rstd, weight[j], bias[j]);
      results[j] = gradient.g * of.given.rstd + (gradient.xhat * of.slope + of.offset);
      if constexpr (HAS_DRESIDUAL) results[j] += widen(added, j);
    }
    return rounded<X_TYPE>(results);
  };
  const Exchange<2> exchange(arguments.words, part);
  for (int turn = 0; row - LAG * groups < rows; ++turn, row += groups) {
    const int done_turn = turn - LAG;
    const long long done_row = row - LAG * groups;  // that is finished
    const int awaited_turn = done_turn + FINISHES_EARLY;
    const long long awaited_row = done_row + FINISHES_EARLY * groups;  // whose sums are wanted in the end
    const bool sums_up = row < rows, finishes = done_turn >= 0;
    const auto sum_up = [&] {
      // Reduce along the row, and add to the column sums on the way.
      const Given given = givens[turn % 2];
      const unsigned phase = phase_of(row, arguments.x_stride);
      Compute sums[2] = {0, 0};
      const auto add = [&](int i, const Values& x, const Values& dy, const auto& there) {
        Compute weight[UNIT], bias[UNIT], of_unit[2] = {0, 0};
        affine.get(i, given, weight, bias);
#pragma unroll
        for (int j = 0; j < UNIT; ++j) {
          Gradient gradient = gradient_of(widen(x, j), widen(dy, j), given.mean, given.rstd, weight[j], bias[j]);
          if (!there(j)) gradient = {0, 0, 0};
          if constexpr (SUMS_COLUMNS && WANTS_DWEIGHT) column_sums.sums[i][j][0] += gradient.dz * gradient.xhat;
          if constexpr (SUMS_COLUMNS && WANTS_DBIAS) column_sums.sums[i][j][COLUMN_SUMS - 1] += gradient.dz;
          const Compute summed = HAS_CHANNELS ? gradient.dz : gradient.g;
          of_unit[0] += summed;
          of_unit[1] += summed * gradient.xhat;
        }
        sums[0] += of_unit[0];
        sums[1] += of_unit[1];
      };
      if constexpr (PARTS_ARE_RUNS) {
        // Behind the part there are zeros of x and dy, and so of all sums, as long as mean * rstd is finite. To ask for
        // these columns, too, would spill.
        const X_TYPE* const first_unit = units.first_in(slots_of_block(staged, turn), phase);
        if (sums_up) {
          units.visit([&](int i) {
            const X_TYPE* const unit = first_unit + i * Units::APART;
            add(i, load<X_TYPE, UNIT>(unit), load<X_TYPE, UNIT>(unit + STAGED),
                [&](int j) { return i > 0 || units.column(0) + j >= 0; });
          });
        }
      } else {
        X_TYPE* const own = slots_of(staged, turn);
        as_they_arrive<UNDER_WAY, 0, RESIDENT>([&](int i) {
          if (!sums_up || !has(i)) return;
          places.visit(i, phase, [&](const auto& spot) {
            add(i, load<X_TYPE, UNIT>(own + i * STEP), load<X_TYPE, UNIT>(own + STAGED + i * STEP), spot.there());
          });
        });
      }
      warp_sum<32, 1>(sums);
      if (lane == 0) {
        of_warps[turn % 2].sums[0][warp] = sums[0];
        of_warps[turn % 2].sums[1][warp] = sums[1];
      }
    };
    const auto finish_in_place = [&] {
      if (!finishes) return;
      const OfRow of = of_row[turn % 2];
      const unsigned phase = phase_of(done_row, arguments.dx_stride);
      X_TYPE* const first_unit = units.first_in(slots_of_block(staged, done_turn), phase);
      units.visit([&](int i) {
        X_TYPE* const unit = first_unit + i * Units::APART;
        store(unit, finish(i, unit, of));
      });
    };
    if (works) {
      sum_up();
      if constexpr (PARTS_ARE_RUNS) {
        finish_in_place();
        // Others may have what has come of the next row.
        copy_async_wait<UNDER_WAY - 2 * RESIDENT>();
      }
    } else if (waits) {
      if (lane == 0) givens[(turn + 1) % 2] = next_given.widened();
      next_given = load_given(row + 2 * groups);
      if (awaited_turn >= 0 && awaited_row < rows) {
        const Loaded loaded = load_given(awaited_row);
        Compute told[PARTS_PER_LANE][2], sums[2], of_channel[2];
        Compute factor = 1;  // of the sums, where the whole row has one weight
        if constexpr (SEVERAL_CHANNELS) {
          const long long channel = channel_of_row(arguments, awaited_row);
          const ChannelMerge of_channels(parts, part.blocks, arguments.weight + channel);
          exchange.await(told, awaited_turn);
          of_channels.merge(told, own_channel, sums, of_channel);
        } else {
          exchange.await(told, awaited_turn);
          sum_parts(told, sums);
          of_channel[0] = sums[0];
          of_channel[1] = sums[1];
        }
        if (lane == 0) {
          const Given given = loaded.widened();
          if (HAS_CHANNELS && parts.first_of(part.rank) == 0) {
            const long long place = awaited_row * channels_per_row(arguments) + own_channel;
            if constexpr (WANTS_DBIAS) narrow(of_channel[0], arguments.dbias[place]);
            if constexpr (WANTS_DWEIGHT) narrow(of_channel[1], arguments.dweight[place]);
          }
          if constexpr (HAS_CHANNELS && HAS_WEIGHT && !SEVERAL_CHANNELS) factor = given.weight[0];
          const Compute scale = -factor / static_cast<Compute>(arguments.columns);
          OfRow& target = of_row[(turn + FINISHES_EARLY) % 2];
          target = {given, CENTERED ? sums[0] * scale * given.rstd : 0, sums[1] * scale * given.rstd};
        }
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

    // Finish, if that is not done, and store; and fill again what was stored.
    OfRow of;
    if constexpr (!PARTS_ARE_RUNS) of = of_row[turn % 2];
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
        const auto finished = vector_to_store(slot, [&] { return finish(i, slot, of); });
        places.visit(i, done_phase, [&](const auto& spot) { spot.write(dx, finished); });
      }
      fill(slot, next, i);
    }
  }

  // Write the group's row of sums.
  const long long group_row = part.group * arguments.columns;
  Compute* const gathered = reinterpret_cast<Compute*>(staged);
  if constexpr (SUMS_COLUMNS && WANTS_DWEIGHT) {
    column_sums.write(0, arguments.dweight + group_row, own_columns, units, gathered);
  }
  if constexpr (SUMS_COLUMNS && WANTS_DBIAS) {
    column_sums.write(COLUMN_SUMS - 1, arguments.dbias + group_row, own_columns, units, gathered);
  }
}
