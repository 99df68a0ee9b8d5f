// Merging the statistics of parts: Chan, Golub and LeVeque's rule for many parts at once, by LANES neighbouring threads
// in double. The squared deviation of the whole is that of the parts, plus the squared deviation of their means.

template <int LANES>
__device__ __forceinline__ double total_over(double value) {
#pragma unroll
  for (int offset = LANES / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
  return value;
}

struct Moments {
  double mean;
  double variance;
};

// for_each_part(use) calls use(count, mean, deviation) for each of the thread's parts; they have `count` numbers in all.
// The means are taken from a pivot, one of them, so that nothing cancels that a double does not hold.
template <int LANES, typename ForEach>
__device__ __forceinline__ Moments merged(double count, double pivot, const ForEach& for_each_part) {
  double sum = 0, deviation = 0;
  for_each_part([&](double points, double mean, double deviation_of_part) {
    const double difference = mean - pivot;
    sum += points * difference;
    deviation += deviation_of_part + points * difference * difference;
  });
  const double shift = total_over<LANES>(sum) / count;
  return {pivot + shift, total_over<LANES>(deviation) / count - shift * shift};
}
