// Gradients of layer norm and RMS norm for rows that fit in registers. With xhat = (x - mean) * rstd, dz = dy times the
// derivative of the activation and g = dz * weight:
//   dx = rstd * (g - mean(g) - xhat * mean(g * xhat)) + dresidual_out,
//   dweight = sum over rows of dz * xhat,  dbias = sum over rows of dz.
// RMS norm (not CENTERED) has no mean, neither of x nor of g.
//
// Moves x and dy (and dresidual_out) once in and dx once out. A block takes one group of ROWS_PER_BLOCK rows or, where
// it TAKES_TURNS, every (gridDim.x / BLOCKS_PER_ROW)-th, and keeps the sums of its columns in registers: dweight and
// dbias cost one row of partial sums a block, which column_sums adds up in a fixed order. Rows of several CLASSES are
// shared out otherwise (see row_share.cuh).
//
// Instance norm and group norm are layer norm with weights by channel (see row_channels.cuh). Blocks have whole
// channels, or channels whole blocks: each row leaves the sums of its channels, which column_sums adds over samples.
#include "types.cuh"
#include "dependent_launch.cuh"
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
constexpr bool FORWARD = false;
#include "row_affine.cuh"
#include "row_channel_sums.cuh"
#include "row_share.cuh"
#include "row_kept.cuh"

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
#if SEGMENT_NUMBERS > 0
  long long segments[SEGMENT_NUMBERS];  // see row_segments.cuh
#endif
};

static_assert(TAKES_TURNS || (stage == Stage::direct && CLASSES == 1));
static_assert(!KEPT_IN_L2 || stage == Stage::ahead);

// What a thread has of dweight or dbias, since its share began.
struct ColumnSums {
  Compute vectors[VECTORS][VECTOR];
  OfEdges<Compute> edges;
};

extern "C" __global__ void CLUSTER_DIMS __launch_bounds__(THREADS_PER_ROW * ROWS_PER_BLOCK, MIN_BLOCKS)
    row_block_backward(const Arguments arguments) {
  let_next_launch_begin();
  constexpr int SCRATCH = 2 * ((THREADS_PER_ROW + 31) / 32) * ROWS_PER_BLOCK;
  __shared__ Compute scratch[2][SCRATCH];
  __shared__ Exchange<2> exchange;
  // x, dy, dresidual_out; dx where it is a run; weight, bias, or those of channels and entries of theirs
  extern __shared__ __align__(COPY_ALIGNMENT) X_TYPE staged[];

  Part part = part_of_block(arguments);
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
  if (CLASSES > 1 && !WANTS_DX) __syncthreads();  // else there is one in the first row
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
  constexpr bool EXCHANGES = BLOCKS_PER_ROW > 1 && WANTS_DX;
  if constexpr (EXCHANGES) cluster_arrive();

  // Of weights by channel: what a channel of the block's part of a row has of dweight and dbias, and how it is written.
  constexpr bool CROSSES = weights_of == WeightsOf::crossing;
  constexpr bool SUMS_CHANNELS = (weights_of == WeightsOf::vector || CROSSES) && (WANTS_DWEIGHT || WANTS_DBIAS);
  ChannelSums channel_sums = {reinterpret_cast<Compute*>(unused) + STAGED_CHANNEL_ELEMENTS};
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

  // Adds over the rows of a block, and writes the share's row of sums. The upper half of the rows gives its sums to the
  // lower one, by column, until there is one row: two rows may be peeled differently.
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
      const int y = row_in_block();
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
      if (row_in_block() == 0) for_each_sum(place, own, [&](int column, Compute& sum) { shared(0, column) = sum; });
      __syncthreads();
      for (int i = thread_in_block(); i < part.columns; i += BLOCK_THREADS) narrow(shared(0, i), sums[i]);
    } else if (row_in_block() == 0) {
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
  int turn = 0;
  // Without turns, there is a block for each first row.
  for (; TAKES_TURNS ? first_row < part.rows || (CLASSES > 1 && begin_next_share(turn)) : turn == 0;
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
    if constexpr (KEEPS_OFFSETS) end_basic_block(arguments.columns);
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
      if constexpr (CROSSES) {
        Compute own[2][2] = {};  // of the channel that the vector begins in, and of the next
        Crossing crossing = {};
        if (place.has(i)) {
          crossing = affine.by_channel.affine.crossing_of<VECTOR>(place.column(i));
          const Compute slopes[2] = {slope_of(crossing.weight[0], rstd), slope_of(crossing.weight[1], rstd)};
#pragma unroll
          for (int j = 0; j < VECTOR; ++j) {
            const Compute deviation = deviation_of(widen(x_values[i], j), mean, rstd);
            const Compute z = deviation * crossing.of(j, slopes);
            const Compute dz = dz_of(widen(dy_values[i], j), z, crossing.of(j, crossing.bias));
            if (i < KEPT) kept_dz[i][j] = dz;
#pragma unroll
            for (int k = 0; k < 2; ++k) {
              const Compute part = crossing.of(j, {k == 0 ? dz : 0, k == 0 ? 0 : dz});
              own[k][0] += part;
              own[k][1] += part * deviation;
            }
          }
#pragma unroll
          for (int k = 0; k < 2; ++k) {
            own[k][1] *= missing_scale(rstd);
            sums[0] += HAS_WEIGHT ? crossing.weight[k] * own[k][0] : own[k][0];
            sums[1] += HAS_WEIGHT ? crossing.weight[k] * own[k][1] : own[k][1];
          }
        }
        if constexpr (SUMS_CHANNELS) {
          const int next = static_cast<int>(crossing.channel + 1 - channels.of_column(0));
          channel_sums.add(turn, i, own[0], own[1], place.has(i) && crossing.is_crossed(VECTOR), next);
        }
      } else if constexpr (HAS_CHANNELS) {
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
    row_sum<THREADS_PER_ROW>(sums, scratch[turn % 2], row_in_block());
    if constexpr (weights_of == WeightsOf::part) {
      if (threadIdx.x == 0 && place.there) write_channel(place.row, channels.of_column(0), sums[0], sums[1]);
      if constexpr (!WANTS_DX) continue;
      const Compute factor = HAS_WEIGHT ? affine.by_channel.affine.part_weight[0] : 1;
      sums[0] *= factor;
      sums[1] *= factor;
    }
    if constexpr (EXCHANGES) {
      if (turn == 0) cluster_wait();  // another block of the row may not have started
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

  if (EXCHANGES && turn == 0) cluster_wait();  // without a row too
  write_share();
}
