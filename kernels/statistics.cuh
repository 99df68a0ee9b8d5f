// The statistics of a row, of a part of one, or of a chunk; and the sums that they are made of.
//
// The squares are those of differences from a shift that lies near the mean, never of the values alone: rows far from
// zero would lose their variance to rounding. Every vector is summed by itself first: less rounding, shorter chains.

// The mean is the sum of two numbers: its rounding alone would show where a row lies far from zero.
struct Statistics {
  Compute mean;
  Compute remainder;
  Compute variance;  // the mean square, where not CENTERED
};

// Adds what one vector has to a sum.
template <int COUNT>
__device__ __forceinline__ void add_values(const Vector<X_TYPE, COUNT>& values, Compute (&sum)[1]) {
  Compute part = 0;
#pragma unroll
  for (int i = 0; i < COUNT; ++i) part += widen(values, i);
  sum[0] += part;
}

// The same for the differences from the shift, and for their squares; where not CENTERED, for the squares alone, and of
// the values.
template <int COUNT>
__device__ __forceinline__ void add_differences(const Vector<X_TYPE, COUNT>& values, Compute shift,
                                                Compute (&sums)[2]) {
  Compute part = 0, part_of_squares = 0;
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    const Compute difference = CENTERED ? widen(values, i) - shift : widen(values, i);
    if constexpr (CENTERED) part += difference;
    part_of_squares += difference * difference;
  }
  sums[0] += part;
  sums[1] += part_of_squares;
}

// Statistics of parts are merged by Chan, Golub and LeVeque's rule: the squared deviation of the whole is that of the
// parts, plus that of their means, each weighted with the share of the row that the part has. All blocks of a row have
// as much, but for the last.
struct Shares {
  Compute each;
  Compute last;
  int blocks;

  __device__ __forceinline__ Compute of(int block) const { return block < blocks - 1 ? each : last; }
};

__device__ __forceinline__ Shares shares_of_blocks(long long columns, long long columns_per_block, int blocks) {
  const Compute scale = static_cast<Compute>(1) / columns;
  return {columns_per_block * scale, (columns - (blocks - 1) * columns_per_block) * scale, blocks};
}
