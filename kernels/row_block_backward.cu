// Gradients of layer norm for rows that fit in a block's registers. With xhat = (x - mean) * rstd and g = dy * weight:
//   dx = rstd * (g - mean(g) - xhat * mean(g * xhat)),  dweight = sum over rows of dy * xhat,  dbias = sum of dy.
//
// Moves x and dy once in and dx once out. Blocks are persistent: each takes every gridDim.x-th group of ROWS_PER_BLOCK
// rows and keeps the sums of its columns in registers, so dweight and dbias cost one row of partial sums a block, which
// column_sums adds up in a fixed order. Where STAGED, the next row is on its way into shared memory meanwhile.
#include "types.cuh"
#include "reduce.cuh"

struct Arguments {
  const X_TYPE* x;
  const X_TYPE* dy;
  const WEIGHT_TYPE* weight;
  const Compute* mean;
  const Compute* rstd;
  X_TYPE* dx;
  DWEIGHT_TYPE* dweight;  // [gridDim.x][columns]: partial sums, or the finished ones where there is one block
  DBIAS_TYPE* dbias;
  long long rows;
  long long columns;  // a multiple of VECTOR
  long long x_stride;  // elements from one row to the next
  long long dy_stride;
  long long dx_stride;
};

// ---- Copies to shared memory that a thread starts and does not wait for (cp.async, from sm_80 on).

// COUNT elements, together 4, 8 or 16 bytes, aligned to their size. What was in `shared` must have been read already.
template <int COUNT, typename T>
__device__ __forceinline__ void copy_async(T* shared, const T* global) {
  constexpr int BYTES = sizeof(T) * COUNT;
#ifdef CUNORM_EMULATOR
  cunorm_emulator::copy_async(shared, global, BYTES);
#else
  const unsigned target = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  if constexpr (BYTES == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(global) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(target), "l"(global), "n"(BYTES) : "memory");
  }
#endif
}

// Waits for all copies that this thread has started. Until the next __syncthreads() it alone may read what arrived.
__device__ __forceinline__ void copy_async_wait() {
#ifdef CUNORM_EMULATOR
  cunorm_emulator::copy_async_wait();
#else
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// ---- The kernel.

extern "C" __global__ void __launch_bounds__(THREADS_PER_ROW * ROWS_PER_BLOCK, 1)
    row_block_backward(const Arguments arguments) {
  constexpr int WARPS_PER_ROW = (THREADS_PER_ROW + 31) / 32;
  constexpr int SCRATCH = 2 * WARPS_PER_ROW * ROWS_PER_BLOCK;
  constexpr int BLOCK_COLUMNS = THREADS_PER_ROW * VECTOR;
  __shared__ Compute scratch[2 * SCRATCH];

  const int columns = static_cast<int>(arguments.columns);
  const auto column_of = [](int i) { return (i * THREADS_PER_ROW + static_cast<int>(threadIdx.x)) * VECTOR; };
  Compute dweight_sums[VECTORS][VECTOR] = {}, dbias_sums[VECTORS][VECTOR] = {};

  // Where STAGED, a thread fetches its vectors of the next row while it works on this one, into shared memory that no
  // other thread reads: the bytes in flight are what keeps the memory busy while a block waits for its sums.
  extern __shared__ __align__(16) X_TYPE stage[];
  const auto stage_of = [&](int tensor, int i) {
    const int thread = threadIdx.y * THREADS_PER_ROW + threadIdx.x;
    return stage + ((tensor * VECTORS + i) * THREADS_PER_ROW * ROWS_PER_BLOCK + thread) * VECTOR;
  };
  const auto fetch = [&](long long row) {
    if (row < arguments.rows) {
#pragma unroll
      for (int i = 0; i < VECTORS; ++i) {
        if (column_of(i) < columns) {
          copy_async<VECTOR>(stage_of(0, i), arguments.x + row * arguments.x_stride + column_of(i));
          copy_async<VECTOR>(stage_of(1, i), arguments.dy + row * arguments.dy_stride + column_of(i));
        }
      }
    }
  };
  const long long rows_per_step = static_cast<long long>(gridDim.x) * ROWS_PER_BLOCK;
  const long long own_row = static_cast<long long>(blockIdx.x) * ROWS_PER_BLOCK + threadIdx.y;
  Compute mean = 0, rstd = 0, next_mean = 0, next_rstd = 0;
  const auto fetch_statistics = [&](long long row, Compute& mean, Compute& rstd) {
    mean = row < arguments.rows ? arguments.mean[row] : 0;
    rstd = row < arguments.rows ? arguments.rstd[row] : 0;
  };
  if constexpr (STAGED) {
    fetch(own_row);
    fetch_statistics(own_row, next_mean, next_rstd);
  }

  int turn = 0;
  for (long long first_row = static_cast<long long>(blockIdx.x) * ROWS_PER_BLOCK; first_row < arguments.rows;
       first_row += rows_per_step) {
    const long long row = first_row + threadIdx.y, next_row = row + rows_per_step;
    // Threads past the last row or column go along with nothing to add: the sums need every lane.
    const int end = row < arguments.rows ? columns : 0;

    // Load.
    if constexpr (STAGED) {
      mean = next_mean;
      rstd = next_rstd;
      fetch_statistics(next_row, next_mean, next_rstd);
      copy_async_wait();
    } else {
      fetch_statistics(row, mean, rstd);
    }
    const X_TYPE* x = arguments.x + row * arguments.x_stride;
    const X_TYPE* dy = arguments.dy + row * arguments.dy_stride;
    Vector<X_TYPE, VECTOR> x_values[VECTORS], dy_values[VECTORS];
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      if (column_of(i) < end) {
        x_values[i] = load<X_TYPE, VECTOR>(STAGED ? stage_of(0, i) : x + column_of(i));
        dy_values[i] = load<X_TYPE, VECTOR>(STAGED ? stage_of(1, i) : dy + column_of(i));
      }
    }

    // Reduce along the row, and add to the column sums on the way.
    Compute sums[2] = {0, 0};  // of g, and of g * xhat
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      if (column_of(i) < end) {
        Compute weight[VECTOR];
        if constexpr (HAS_WEIGHT) load_widened<VECTOR, WEIGHT_ACCESS>(arguments.weight + column_of(i), weight);
        Compute part = 0, part_with_xhat = 0;
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) {
          const Compute xhat = (widen(x_values[i].lane[j]) - mean) * rstd;
          const Compute gradient = widen(dy_values[i].lane[j]);
          if constexpr (WANTS_DWEIGHT) dweight_sums[i][j] += gradient * xhat;
          if constexpr (WANTS_DBIAS) dbias_sums[i][j] += gradient;
          const Compute g = HAS_WEIGHT ? gradient * weight[j] : gradient;
          part += g;
          part_with_xhat += g * xhat;
        }
        sums[0] += part;
        sums[1] += part_with_xhat;
      }
    }
    if constexpr (STAGED) fetch(next_row);
    if constexpr (!WANTS_DX) continue;
    row_sum<THREADS_PER_ROW>(sums, scratch + turn * SCRATCH);
    turn ^= 1;  // the other scratch next time, so that one barrier a row is enough
    // dx = rstd * (g - mean(g) - xhat * mean(g * xhat)), with what is the same along the row put together: but for the
    // rstd in xhat, whose square could leave the range of float.
    const Compute offset = -sums[0] / columns * rstd, slope = -sums[1] / columns * rstd;

    // Finish and store.
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      forget_widened(x_values[i]);
      forget_widened(dy_values[i]);
    }
    X_TYPE* dx = arguments.dx + row * arguments.dx_stride;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      if (column_of(i) < end) {
        Compute weight[VECTOR];
        if constexpr (HAS_WEIGHT) load_widened<VECTOR, WEIGHT_ACCESS>(arguments.weight + column_of(i), weight);
        Vector<X_TYPE, VECTOR> result;
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) {
          const Compute xhat = (widen(x_values[i].lane[j]) - mean) * rstd, gradient = widen(dy_values[i].lane[j]);
          const Compute g = HAS_WEIGHT ? gradient * weight[j] : gradient;
          narrow(g * rstd + (xhat * slope + offset), result.lane[j]);
        }
        store(dx + column_of(i), result);
      }
    }
  }

  // Add over threadIdx.y, and write the block's row of sums.
  if constexpr (WANTS_DWEIGHT || WANTS_DBIAS) {
    constexpr int ROW_SUMS = ROWS_PER_BLOCK > 1 ? ROWS_PER_BLOCK * BLOCK_COLUMNS : 1;
    __shared__ Compute row_sums[ROW_SUMS];
    const auto write_sums = [&](Compute(&values)[VECTORS][VECTOR], auto* sums) {
#pragma unroll
      for (int i = 0; i < VECTORS; ++i) {
        if constexpr (ROWS_PER_BLOCK > 1) {
          __syncthreads();
#pragma unroll
          for (int j = 0; j < VECTOR; ++j) {
            row_sums[threadIdx.y * BLOCK_COLUMNS + j * THREADS_PER_ROW + threadIdx.x] = values[i][j];
          }
          __syncthreads();
          if (threadIdx.y == 0) {
#pragma unroll
            for (int j = 0; j < VECTOR; ++j) {
              for (int other = 1; other < ROWS_PER_BLOCK; ++other) {
                values[i][j] += row_sums[other * BLOCK_COLUMNS + j * THREADS_PER_ROW + threadIdx.x];
              }
            }
          }
        }
        if (threadIdx.y == 0 && column_of(i) < columns) {
          const long long first = blockIdx.x * arguments.columns + column_of(i);
#pragma unroll
          for (int j = 0; j < VECTOR; ++j) narrow(values[i][j], sums[first + j]);
        }
      }
    };
    if constexpr (WANTS_DWEIGHT) write_sums(dweight_sums, arguments.dweight);
    if constexpr (WANTS_DBIAS) write_sums(dbias_sums, arguments.dbias);
  }
}
