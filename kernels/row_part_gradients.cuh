// How row_pipeline_backward and row_held_backward sum along a row: those of a block's part from those of its warps, and
// what they come to when all blocks have told theirs.

// Of a turn's row, what each warp has of the sums of g (or dz) and of g (or dz) * xhat.
struct OfWarps {
  Compute sums[2][WARPS];
};

// What every warp needs to sum a row; weight and bias only where the block's part has one of each.
struct Given {
  Compute mean;
  Compute rstd;
  Compute weight[1];
  Compute bias[1];
};

// And to finish it: dx = g * rstd + (xhat * slope + offset) + dresidual_out, with what is the same along the row put
// together: but for the rstd in xhat, whose square could leave the range of float.
struct OfRow {
  Given given;
  Compute offset;
  Compute slope;
};

// The same of a row, as they lie in memory.
struct Loaded {
  Compute mean;
  Compute rstd;
  OfChannel of_channel;

  __device__ __forceinline__ Given widened() const {
    Given given = {mean, rstd, {}, {}};
    of_channel.widened(given.weight, given.bias);
    return given;
  }
};

// The sums of a row that has several channels, from what its blocks tell of their parts: each counts as much as its
// channel's weight.
struct ChannelMerge {
  const RowParts& parts;
  int blocks;                           // of a row
  WEIGHT_TYPE weights[PARTS_PER_LANE];  // of the lane's blocks, every 32nd, as they lie in memory

  __device__ __forceinline__ int block_of(int i) const { return static_cast<int>(threadIdx.x) % 32 + 32 * i; }

  // With the weights of a row whose first channel that is.
  __device__ __forceinline__ ChannelMerge(const RowParts& parts, int blocks, const WEIGHT_TYPE* row_weights)
      : parts(parts), blocks(blocks) {
    if constexpr (!HAS_WEIGHT) return;
#pragma unroll
    for (int i = 0; i < PARTS_PER_LANE; ++i) {
      if (block_of(i) < blocks) weights[i] = row_weights[parts.channel_of(block_of(i))];
    }
  }

  // The sums over the row of g and g * xhat, and those over one of its channels of dz and dz * xhat.
  __device__ __forceinline__ void merge(const Compute (&told)[PARTS_PER_LANE][2], int channel, Compute (&of_row)[2],
                                        Compute (&of_channel)[2]) const {
    Compute sums[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < PARTS_PER_LANE; ++i) {
      if (block_of(i) >= blocks) continue;
      const Compute weight = HAS_WEIGHT ? widen(weights[i]) : 1;
      const bool is_of_channel = parts.channel_of(block_of(i)) == channel;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        sums[j] += weight * told[i][j];
        sums[2 + j] += is_of_channel ? told[i][j] : 0;
      }
    }
    warp_sum<32, 1>(sums);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      of_row[j] = sums[j];
      of_channel[j] = sums[2 + j];
    }
  }
};

template <typename KernelArguments>
__device__ __forceinline__ Loaded loaded_of_row(const KernelArguments& arguments, const RowParts& parts,
                                                const SharedPart& part, long long row) {
  return {CENTERED ? arguments.mean[row] : 0, arguments.rstd[row],
          OfChannel(arguments.weight, arguments.bias, channel_of_row(arguments, row) + parts.channel_of(part.rank))};
}

// Waits, by a warp, for what all blocks tell of a row in a turn. The first block of a channel writes its sums.
template <typename KernelArguments>
__device__ __forceinline__ OfRow awaited_row(const KernelArguments& arguments, const Exchange<2>& exchange,
                                             const RowParts& parts, const SharedPart& part, long long row, int turn) {
  const int own_channel = parts.channel_of(part.rank);
  const Loaded loaded = loaded_of_row(arguments, parts, part, row);
  Compute told[PARTS_PER_LANE][2], sums[2], of_channel[2];
  Compute factor = 1;  // of the sums, where the whole row has one weight
  if constexpr (SEVERAL_CHANNELS) {
    const ChannelMerge of_channels(parts, part.blocks, arguments.weight + channel_of_row(arguments, row));
    exchange.await(told, turn);
    of_channels.merge(told, own_channel, sums, of_channel);
  } else {
    exchange.await(told, turn);
    sum_parts(told, sums);
    of_channel[0] = sums[0];
    of_channel[1] = sums[1];
  }
  const Given given = loaded.widened();
  if (HAS_CHANNELS && parts.first_of(part.rank) == 0 && threadIdx.x % 32 == 0) {
    const long long place = row * channels_per_row(arguments) + own_channel;
    if constexpr (WANTS_DBIAS) narrow(of_channel[0], arguments.dbias[place]);
    if constexpr (WANTS_DWEIGHT) narrow(of_channel[1], arguments.dweight[place]);
  }
  if constexpr (HAS_CHANNELS && HAS_WEIGHT && !SEVERAL_CHANNELS) factor = given.weight[0];
  const Compute scale = -factor / static_cast<Compute>(arguments.columns);
  return {given, CENTERED ? sums[0] * scale * given.rstd : 0, sums[1] * scale * given.rstd};
}
