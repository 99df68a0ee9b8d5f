// How row_pipeline_forward and row_held_forward take the statistics of a row: those of a block's part from those of its
// warps, each by a pivot of its own, and what of it every block is told.
static_assert(WARPS <= 32);

// Of a turn's row, what each warp has of it: the pivot, and the sums of the differences from it and of their squares;
// PEELED, also of how many numbers, which is not the same of every row.
struct OfWarps {
  Compute pivot[WARPS];
  Compute sums[2][WARPS];
  Compute counts[PEELED ? WARPS : 1];
};

// What a block tells of its part: its statistics and, PEELED, of how many numbers.
constexpr int TOLD = PEELED ? 4 : 3;

// What every warp needs to finish a row; weight and bias only where the block's part has one of each.
struct OfRow {
  Compute mean;
  Compute remainder;
  Compute rstd;
  Compute weight[1];
  Compute bias[1];
};

// How many lanes of a warp have an i-th vector, of so many that the block has.
__device__ __forceinline__ int lanes_with(int vectors, int warp, int i) {
  return min(32, max(0, vectors - i * THREADS - 32 * warp));
}

// A block's statistics from those of its warps, of which each lane merges one.
struct WarpMerge {
  Compute scale;  // one over the columns of the lane's warp; 0, where it has none
  Compute share;  // of the block's columns

  __device__ __forceinline__ void tell(const OfWarps& of_warps, const Exchange<TOLD>& exchange, int turn) const {
    const int lane = threadIdx.x % 32;
    Compute own[1][3] = {{0, 0, 0}}, own_scale = scale, shares[1] = {share}, told[TOLD] = {};
    if constexpr (PEELED) {
      const Compute count = lane < WARPS ? of_warps.counts[lane] : 0;
      Compute all[1] = {count};
      warp_sum<32, 1>(all);
      own_scale = count > 0 ? reciprocal_of(count) : 0;
      shares[0] = count * reciprocal_of(max(all[0], static_cast<Compute>(1)));
      told[TOLD - 1] = all[0];
    }
    if (own_scale > 0) {
      own[0][0] = CENTERED ? of_warps.pivot[lane] : 0;
      own[0][1] = CENTERED ? of_warps.sums[0][lane] * own_scale : 0;
      own[0][2] = not_negative(of_warps.sums[1][lane] * own_scale - own[0][1] * own[0][1]);
    }
    const Statistics whole = merged_of_lanes(own, shares);
    told[0] = whole.mean;
    told[1] = whole.remainder;
    told[2] = whole.variance;
    exchange.tell(told, turn);
  }
};

__device__ __forceinline__ WarpMerge warp_merge_of(int vectors) {
  const int lane = threadIdx.x % 32;
  int own = 0;
#pragma unroll
  for (int i = 0; i < RESIDENT; ++i) own += lane < WARPS ? lanes_with(vectors, lane, i) : 0;
  const Compute scale = own > 0 ? static_cast<Compute>(1) / (own * VECTOR) : 0;
  return {scale, static_cast<Compute>(own) / vectors};
}
