// Layer norm and RMS norm of rows that lie behind each other in memory, and begin anywhere in it: as row_block_forward
// computes them.
//
// ROWS_PER_BLOCK rows are a run of memory. It comes to shared memory as a whole, and results take its place there and
// leave as a whole (see bulk_copy.cuh). So it makes no difference how a row
// begins: a thread has the same columns of all of its rows, every THREADS_PER_ROW-th vector, and their weights and biases
// in registers. A vector is as many numbers as divide a row, which is often one.
//
// Moves x (and the residual) once in, and y (and residual_out) once out.
#include "types.cuh"
#include "reduce.cuh"
#include "activation.cuh"
#include "affine.cuh"
#include "statistics.cuh"
#include "bulk_copy.cuh"

struct Arguments {
  const X_TYPE* x;
  const X_TYPE* residual;
  const WEIGHT_TYPE* weight;
  const BIAS_TYPE* bias;
  X_TYPE* y;
  X_TYPE* residual_out;
  Compute* mean;  // null where the statistics are not asked for; so is rstd
  Compute* rstd;
  long long rows;
  long long columns;  // a multiple of VECTOR, and at least of THREADS_PER_ROW * (VECTORS - 1) vectors
  double eps;
};

constexpr int BLOCK_THREADS = THREADS_PER_ROW * ROWS_AT_ONCE;
constexpr int PIECE = 16 / sizeof(X_TYPE);  // numbers of 16 bytes
static_assert(ROWS_PER_BLOCK % ROWS_AT_ONCE == 0 && BLOCK_THREADS >= 2 * PIECE && BLOCK_THREADS >= ROWS_PER_BLOCK);
// What sums begin with: minus zero, as the compiler leaves out what adds that. To add zero would be an instruction.
constexpr Compute NOTHING = -0.0;

__device__ __forceinline__ unsigned thread_in_block() { return threadIdx.y * THREADS_PER_ROW + threadIdx.x; }

// The block's rows: where they begin in every tensor, and how many numbers they are. Whole pieces of 16 bytes go in
// bulk; the numbers before and behind those, of which most runs have none, one by one.
struct Run {
  long long first;
  unsigned length;
  unsigned head;   // numbers before the first piece
  unsigned whole;  // numbers of all pieces

  // Where it comes to in shared memory: as far behind a line as in memory, for between two that lie otherwise copies
  // are slow.
  __device__ __forceinline__ X_TYPE* place(X_TYPE* shared, const X_TYPE* global) const {
    return shared + reinterpret_cast<size_t>(global + first) % BULK_ALIGNMENT / sizeof(X_TYPE);
  }
  __device__ __forceinline__ void fetch(BulkArrival& arrival, X_TYPE* shared, const X_TYPE* global) const {
    const X_TYPE* pieces = global + first + head;
    if (thread_in_block() == 0 && whole > 0) arrival.fetch(shared + head, pieces, whole * sizeof(X_TYPE));
    if (whole < length) copy_edges(shared, global + first);
  }
  __device__ __forceinline__ void send(X_TYPE* global, const X_TYPE* shared) const {
    if (thread_in_block() == 0 && whole > 0) send_bulk(global + first + head, shared + head, whole * sizeof(X_TYPE));
    if (whole < length) copy_edges(global + first, shared);
  }

 private:
  __device__ __forceinline__ void copy_edges(X_TYPE* target, const X_TYPE* source) const {
    const unsigned edge = thread_in_block(), number = edge < head ? edge : edge + whole;
    if (number < length) target[number] = source[number];
  }
};

__device__ __forceinline__ Run run_of(const X_TYPE* x, long long first, unsigned length) {
  const unsigned behind = reinterpret_cast<size_t>(x + first) % 16 / sizeof(X_TYPE);
  const unsigned head = min((PIECE - behind) % PIECE, length);
  return {first, length, head, (length - head) / PIECE * PIECE};
}

// What a run takes of shared memory: whole lines, and one more to begin anywhere in the first.
__device__ __forceinline__ unsigned room_of_run(unsigned length) {
  constexpr unsigned LINE = BULK_ALIGNMENT / sizeof(X_TYPE);
  return (length + LINE - 1) / LINE * LINE + LINE;
}

// The vectors of a row that a thread has.
struct Own {
  int vectors;  // of a row

  __device__ __forceinline__ bool has(int i) const {
    return i < VECTORS - 1 || i * THREADS_PER_ROW + static_cast<int>(threadIdx.x) < vectors;
  }
  __device__ __forceinline__ static int column(int i) { return (i * THREADS_PER_ROW + threadIdx.x) * VECTOR; }
};

template <typename A, typename B>
constexpr bool ARE_ALIKE = false;
template <typename A>
constexpr bool ARE_ALIKE<A, A> = true;

// The weights and biases of a thread's columns, as they come: those of a single column in one register, if they are of
// sixteen bits.
struct OwnAffine {
  static constexpr bool PAIRED =
      VECTOR == 1 && HAS_WEIGHT && HAS_BIAS && sizeof(WEIGHT_TYPE) == 2 && ARE_ALIKE<WEIGHT_TYPE, BIAS_TYPE>;
  using Pair = Vector<WEIGHT_TYPE, 2>;
  unsigned pairs[PAIRED ? VECTORS : 1];
  Vector<WEIGHT_TYPE, VECTOR> weights[PAIRED ? 1 : VECTORS];
  Vector<BIAS_TYPE, VECTOR> biases[PAIRED ? 1 : VECTORS];

  __device__ __forceinline__ void load(const WEIGHT_TYPE* weight, const BIAS_TYPE* bias, const Own& own) {
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      if (!own.has(i)) continue;
      const int column = own.column(i);
      if constexpr (PAIRED) {
        const Pair pair = {{weight[column], *reinterpret_cast<const WEIGHT_TYPE*>(bias + column)}};
        pairs[i] = *reinterpret_cast<const unsigned*>(&pair);
      } else {
        if constexpr (HAS_WEIGHT) weights[i] = load_in_pieces<VECTOR, WEIGHT_ACCESS>(weight + column);
        if constexpr (HAS_BIAS) biases[i] = load_in_pieces<VECTOR, BIAS_ACCESS>(bias + column);
      }
    }
  }

  // What is widened here had better not be kept for the next row: it would take twice the registers.
  __device__ __forceinline__ void get(int i, Compute (&weight)[VECTOR], Compute (&bias)[VECTOR]) {
    if constexpr (PAIRED) {
      pin(pairs[i]);
      const Pair pair = *reinterpret_cast<const Pair*>(&pairs[i]);
      weight[0] = widen(pair, 0);
      bias[0] = widen(pair, 1);
    } else {
      forget_widened(weights[i]);
      forget_widened(biases[i]);
      if constexpr (HAS_WEIGHT) widen_all(weights[i], weight);
      if constexpr (HAS_BIAS) widen_all(biases[i], bias);
    }
    add_weight_offset(weight);
  }
};

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, MIN_BLOCKS) row_bulk_forward(const Arguments arguments) {
  constexpr int SCRATCH = 2 * ((THREADS_PER_ROW + 31) / 32) * ROWS_AT_ONCE;
  __shared__ Compute scratch[2][SCRATCH];
  __shared__ Compute means[HAS_STATISTICS ? ROWS_PER_BLOCK : 1];
  __shared__ Compute rstds[HAS_STATISTICS ? ROWS_PER_BLOCK : 1];
  __shared__ BulkArrival arrival;
  extern __shared__ __align__(BULK_ALIGNMENT) X_TYPE runs[];  // x's, then the residual's

  const int columns = static_cast<int>(arguments.columns);
  const long long first_row = static_cast<long long>(blockIdx.x) * ROWS_PER_BLOCK, left = arguments.rows - first_row;
  const unsigned rows = left < ROWS_PER_BLOCK ? static_cast<unsigned>(left) : ROWS_PER_BLOCK;
  const Run run = run_of(arguments.x, first_row * columns, rows * columns);
  // Results take the place of what came: y that of x, residual_out that of the residual.
  X_TYPE* x_run = run.place(runs, arguments.x);
  X_TYPE* residual_run = run.place(runs + room_of_run(ROWS_PER_BLOCK * columns), arguments.residual);
  if (thread_in_block() == 0) {
    arrival.begin();
    arrival.expect((1 + HAS_RESIDUAL) * run.whole * sizeof(X_TYPE));
  }
  run.fetch(arrival, x_run, arguments.x);
  if constexpr (HAS_RESIDUAL) run.fetch(arrival, residual_run, arguments.residual);
  const Own own = {columns / VECTOR};
  OwnAffine affine;
  affine.load(arguments.weight, arguments.bias, own);
  const Compute scale = reciprocal_of(static_cast<Compute>(columns));
  __syncthreads();
  arrival.wait(0);

#pragma unroll 1
  for (int turn = 0; turn < ROWS_PER_BLOCK / ROWS_AT_ONCE; ++turn) {
    // Past the last row there is room for others, and nothing in it that matters.
    const int row = turn * ROWS_AT_ONCE + static_cast<int>(threadIdx.y);
    X_TYPE* numbers = x_run + row * columns;
    Vector<X_TYPE, VECTOR> values[VECTORS];
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      if (own.has(i)) values[i] = load<X_TYPE, VECTOR>(numbers + own.column(i));
    }
    if constexpr (HAS_RESIDUAL) {
      X_TYPE* residuals = residual_run + row * columns;
#pragma unroll
      for (int i = 0; i < VECTORS; ++i) {
        if (!own.has(i)) continue;
        values[i] = sum_of(values[i], load<X_TYPE, VECTOR>(residuals + own.column(i)));
        store(residuals + own.column(i), values[i]);
      }
    }
    Statistics statistics = {0, 0, 0};
    if constexpr (CENTERED) {
      Compute sum[1] = {NOTHING};
#pragma unroll
      for (int i = 0; i < VECTORS; ++i) {
        if (own.has(i)) add_values(values[i], sum);
      }
      row_sum<THREADS_PER_ROW>(sum, scratch[0], threadIdx.y);
      statistics.mean = sum[0] * scale;
#pragma unroll
      for (int i = 0; i < VECTORS; ++i) forget_widened(values[i]);
    }
    // Numbers one by one in two halves: 32 squares one after the other would be rounded by up to 4e-7.
    Compute sums[2] = {NOTHING, NOTHING}, of_second_half[2] = {NOTHING, NOTHING};
    constexpr bool HALVES = VECTOR == 1 && VECTORS > 1;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      const bool is_second = HALVES && i >= VECTORS / 2;
      if (own.has(i)) add_differences(values[i], statistics.mean, is_second ? of_second_half : sums);
    }
    if constexpr (HALVES) {
      sums[0] += of_second_half[0];
      sums[1] += of_second_half[1];
    }
    if constexpr (CENTERED) {
      row_sum<THREADS_PER_ROW>(sums, scratch[1], threadIdx.y);
      statistics.remainder = sums[0] * scale;
    } else {
      Compute squares[1] = {sums[1]};
      row_sum<THREADS_PER_ROW>(squares, scratch[turn % 2], threadIdx.y);
      sums[1] = squares[0];
    }
    statistics.variance = not_negative(sums[1] * scale - statistics.remainder * statistics.remainder);
    const Compute rstd = reciprocal_sqrt(statistics.variance + static_cast<Compute>(arguments.eps));
    if (HAS_STATISTICS && threadIdx.x == 0) {
      means[row] = statistics.mean + statistics.remainder;
      rstds[row] = rstd;
    }
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) forget_widened(values[i]);
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      if (!own.has(i)) continue;
      Compute weight[VECTOR], bias[VECTOR];
      affine.get(i, weight, bias);
      store(numbers + own.column(i),
            normalized(values[i], statistics.mean, statistics.remainder, rstd, weight, bias));
    }
  }
  let_bulk_copies_see();
  __syncthreads();
  run.send(arguments.y, x_run);
  if constexpr (HAS_RESIDUAL) run.send(arguments.residual_out, residual_run);
  // Only now: that copies may see what is in shared memory waits for what was stored elsewhere too.
  if constexpr (HAS_STATISTICS) {
    const unsigned row = thread_in_block();
    if (row < rows) {
      if constexpr (CENTERED) arguments.mean[first_row + row] = means[row];
      arguments.rstd[first_row + row] = rstds[row];
    }
  }
  if (thread_in_block() == 0) wait_for_sent<0>();
}
