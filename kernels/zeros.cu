// Writes zeros: the counters of rows that the blocks of the next launch claim (see row_block_forward.cu).
//
// A few blocks do, so that those of the next launch, which have their rows on the way before they need the counters,
// find room on the multiprocessors at once.
#include "dependent_launch.cuh"

struct Arguments {
  uint4* target;
  long long count;  // of 16 bytes each
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) zeros(const Arguments arguments) {
  let_next_launch_begin();
  wait_for_earlier_launches();
  const long long first = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x;
#pragma unroll 4
  for (long long i = first; i < arguments.count; i += static_cast<long long>(gridDim.x) * THREADS) {
    arguments.target[i] = make_uint4(0, 0, 0, 0);
  }
}
