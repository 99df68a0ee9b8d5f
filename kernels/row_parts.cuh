// What row_pipeline_* and row_held_* have in common: the part of a row that a block has, where blocks share rows of one
// channel, or of several, or such that are not of channels.
static_assert(!HAS_CHANNELS || weights_of == WeightsOf::part);
static_assert(!SEVERAL_CHANNELS || HAS_CHANNELS);

// How blocks share the columns of a row. Where it has several channels, as many blocks have parts of each of them; else
// the row itself counts as one. The last part of a channel may have fewer columns, but has some.
struct RowParts {
  long long columns;  // of a channel, or what there is room for
  long long each;     // of a part
  int blocks;         // that have parts of a channel
  float of_blocks;    // one over these

  // The channel that a block's part lies in, of those of the row. A division would take the warp that merges what
  // blocks tell longer than a turn. Of so few blocks a product with a float is as good: it is half of one over `blocks`
  // away from a whole number, at least.
  __device__ __forceinline__ int channel_of(int rank) const {
    return SEVERAL_CHANNELS ? static_cast<int>((static_cast<float>(rank) + 0.5f) * of_blocks) : 0;
  }
  // Where in its channel the part of a block begins.
  __device__ __forceinline__ long long first_of(int rank) const { return (rank - channel_of(rank) * blocks) * each; }
  __device__ __forceinline__ int count_of(int rank) const {
    const long long left = columns - first_of(rank);
    return static_cast<int>(left < each ? left : each);
  }
};

// So many columns are shared, but for those of a channel where rows have several.
template <typename KernelArguments>
__device__ __forceinline__ RowParts row_parts_of(const KernelArguments& arguments, long long columns) {
  const int blocks = static_cast<int>(arguments.blocks_per_row);
  if constexpr (SEVERAL_CHANNELS) {
    const Channels channels = channels_of(arguments.channels, 0);
    const int of_channel = blocks / static_cast<int>(channels.channels_per_row);
    return {channels.positions, arguments.columns_per_block, of_channel, 1.0f / of_channel};
  }
  return {columns, arguments.columns_per_block, blocks, 0};
}

// The block's own.
template <typename KernelArguments>
__device__ __forceinline__ SharedPart row_part_of_block(const KernelArguments& arguments, const RowParts& parts) {
  SharedPart part = part_of_block(parts.columns, arguments.columns_per_block, arguments.blocks_per_row);
  if constexpr (SEVERAL_CHANNELS) {
    part.first = parts.channel_of(part.rank) * parts.columns + parts.first_of(part.rank);
    part.count = parts.count_of(part.rank);
  }
  return part;
}

// The weight and bias of a channel, as they lie in memory. Who widens a number waits for it, and the warp
// that is to wait for what other blocks tell would only then begin to do so.
struct OfChannel {
  WEIGHT_TYPE weight;
  BIAS_TYPE bias;

  OfChannel() = default;
  __device__ __forceinline__ OfChannel(const WEIGHT_TYPE* weights, const BIAS_TYPE* biases, long long channel) {
    if constexpr (HAS_CHANNELS && HAS_WEIGHT) weight = weights[channel];
    if constexpr (HAS_CHANNELS && HAS_BIAS) bias = biases[channel];
  }

  __device__ __forceinline__ void widened(Compute (&to_weight)[1], Compute (&to_bias)[1]) const {
    if constexpr (HAS_CHANNELS && HAS_WEIGHT) to_weight[0] = widen(weight);
    if constexpr (HAS_CHANNELS && HAS_BIAS) to_bias[0] = widen(bias);
  }
};

// The channel of a row; the first, if it has several.
template <typename KernelArguments>
__device__ __forceinline__ long long channel_of_row(const KernelArguments& arguments, long long row) {
  if constexpr (HAS_CHANNELS) return channels_of(arguments.channels, 0).first_of(row);
  return row;
}

template <typename KernelArguments>
__device__ __forceinline__ long long channels_per_row(const KernelArguments& arguments) {
  if constexpr (SEVERAL_CHANNELS) return arguments.channels[1];
  return 1;
}
