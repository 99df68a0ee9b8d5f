// The statistics of a row, of a part of one, or of a chunk; and the sums that they are made of.
//
// The squares are those of differences from a pivot, which lies near the mean, never of the values alone: rows far from
// zero would lose their variance to rounding. Every vector is summed by itself first: less rounding, shorter chains. It
// begins with its first number: to begin with zero would be an addition more, which the compiler may not leave out.

// The mean is the sum of two numbers: its rounding alone would show where a row lies far from zero.
struct Statistics {
  Compute mean;
  Compute remainder;
  Compute variance;  // the mean square, where not CENTERED
};

// Adds what one vector has to a sum: its i-th number, if it is there(i).
template <int COUNT, typename There = All>
__device__ __forceinline__ void add_values(const Vector<X_TYPE, COUNT>& values, Compute (&sum)[1],
                                           const There& there = {}) {
  const auto value_of = [&](int i) { return there(i) ? widen(values, i) : 0; };
  Compute part = value_of(0);
#pragma unroll
  for (int i = 1; i < COUNT; ++i) part += value_of(i);
  sum[0] += part;
}

// The same for the differences from the pivot, and for their squares; where not CENTERED, for the squares alone, and of
// the values.
template <int COUNT, typename There = All>
__device__ __forceinline__ void add_differences(const Vector<X_TYPE, COUNT>& values, Compute pivot, Compute (&sums)[2],
                                                const There& there = {}) {
  const auto difference_of = [&](int i) {
    const Compute difference = CENTERED ? widen(values, i) - pivot : widen(values, i);
    return there(i) ? difference : 0;
  };
  const Compute first = difference_of(0);
  Compute part = CENTERED ? first : 0, part_of_squares = first * first;
#pragma unroll
  for (int i = 1; i < COUNT; ++i) {
    const Compute difference = difference_of(i);
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

// Those of a lane's blocks, every 32nd; of such that are not there zeros.
template <int PARTS>
__device__ __forceinline__ void shares_of_lane(const Shares& of_blocks, Compute (&shares)[PARTS]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < PARTS; ++i) shares[i] = lane + 32 * i < of_blocks.blocks ? of_blocks.of(lane + 32 * i) : 0;
}

// Those of a whole, in all lanes of a warp: each calls use(share, statistics) for its parts, in a fixed order. `first`
// is the mean of one of them.
template <typename ForEachPart>
__device__ __forceinline__ Statistics merged_in_warp(Compute first, const ForEachPart& for_each_part) {
  Statistics whole = {0, 0, 0};
  if constexpr (CENTERED) {
    Compute sum[1] = {0};
    for_each_part([&](Compute share, const Statistics& part) {
      sum[0] += share * (part.mean - first + part.remainder);
    });
    warp_sum<32, 1>(sum);
    // The first part's pivot may be far from the whole's mean, and differences from it would be rounded more.
    add_apart(first, sum[0], whole.mean, whole.remainder);
  }
  Compute sum[1] = {0};
  for_each_part([&](Compute share, const Statistics& part) {
    const Compute difference = CENTERED ? part.mean - whole.mean + part.remainder - whole.remainder : 0;
    sum[0] += share * (part.variance + difference * difference);
  });
  warp_sum<32, 1>(sum);
  whole.variance = sum[0];
  return whole;
}

// The same of PARTS of each lane, which have such shares of the whole: of each its statistics are the first numbers.
template <int PARTS, int NUMBERS>
__device__ __forceinline__ Statistics merged_of_lanes(const Compute (&parts)[PARTS][NUMBERS],
                                                      const Compute (&shares)[PARTS]) {
  const Compute first = CENTERED ? __shfl_sync(0xffffffffu, parts[0][0], 0) : 0;
  return merged_in_warp(first, [&](auto use) {
#pragma unroll
    for (int i = 0; i < PARTS; ++i) use(shares[i], Statistics{parts[i][0], parts[i][1], parts[i][2]});
  });
}
