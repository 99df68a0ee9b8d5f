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
template <int LANES, typename ForEach>
__device__ __forceinline__ Moments merged(double count, const ForEach& for_each_part) {
  double sum = 0, deviation = 0;
  for_each_part([&](double points, double mean, double) { sum += points * mean; });
  const double mean = total_over<LANES>(sum) / count;
  for_each_part([&](double points, double mean_of_part, double deviation_of_part) {
    const double difference = mean_of_part - mean;
    deviation += deviation_of_part + points * difference * difference;
  });
  return {mean, total_over<LANES>(deviation) / count};
}
