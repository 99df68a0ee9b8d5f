// Merging the statistics of parts: Chan, Golub and LeVeque's rule for many parts at once, by LANES neighbouring threads
// in double. The squared deviation of the whole is that of the parts, plus the squared deviation of their means.

// The sums of COUNT numbers over LANES threads: a part of a warp, or a whole block of as many. Every thread of the
// block must call it. Scratch: COUNT * LANES / 32 numbers where LANES are more than a warp.
template <int LANES, int COUNT>
__device__ __forceinline__ void total_over(double (&values)[COUNT], double* scratch) {
  constexpr int WARP_LANES = LANES < 32 ? LANES : 32;
#pragma unroll
  for (int offset = WARP_LANES / 2; offset > 0; offset /= 2) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) values[i] += __shfl_xor_sync(0xffffffffu, values[i], offset);
  }
  if constexpr (LANES > 32) {
    if (threadIdx.x % 32 == 0) {
#pragma unroll
      for (int i = 0; i < COUNT; ++i) scratch[threadIdx.x / 32 * COUNT + i] = values[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      values[i] = 0;
#pragma unroll
      for (int warp = 0; warp < LANES / 32; ++warp) values[i] += scratch[warp * COUNT + i];
    }
  }
}

struct Moments {
  double mean;
  double variance;
};

// for_each_part(use) calls use(count, mean, deviation) for each of the thread's parts; one over what these have in all
// is `share`. The means are taken from a pivot, one of them, so that nothing cancels that a double does not hold.
template <int LANES, typename ForEach>
__device__ __forceinline__ Moments merged(double share, double pivot, double* scratch, const ForEach& for_each_part) {
  double sums[2] = {0, 0};
  for_each_part([&](double points, double mean, double deviation) {
    const double difference = mean - pivot;
    sums[0] += points * difference;
    sums[1] += deviation + points * difference * difference;
  });
  total_over<LANES>(sums, scratch);
  const double shift = sums[0] * share;
  return {pivot + shift, not_negative(sums[1] * share - shift * shift)};
}
