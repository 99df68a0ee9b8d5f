// Weights and biases by channel: those of instance, group and batch norm, a row of which is one channel or several.
//
// Row r has channels_per_row of them, `positions` columns each, from channel r % rows_per_sample * channels_per_row on.
// WEIGHTS_OF names whose weight and bias a number has:
// - columns: its column's, the same in every row; nothing else here is used;
// - part: those of one channel, in which the block's part of the row lies;
// - vector: those of one channel, in which its vector lies;
// - crossing: those of its own channel, which may begin within a vector, but is no shorter than one;
// - numbers: the same, of channels of any length.
enum class WeightsOf { columns, part, vector, crossing, numbers };
constexpr WeightsOf weights_of = WeightsOf::WEIGHTS_OF;
constexpr bool HAS_CHANNELS = weights_of != WeightsOf::columns;

// Rows and the columns of a row are fewer than 2^31, so that 32 bits do.
struct Channels {
  unsigned rows_per_sample;
  unsigned channels_per_row;
  unsigned positions;
  Reciprocal by_rows_per_sample;
  Reciprocal by_positions;
  unsigned first_column;  // of the block's part

  __device__ __forceinline__ unsigned sample_of(long long row) const {
    unsigned sample = by_rows_per_sample.quotient_of(static_cast<unsigned>(row));
    pin(sample);  // else the compiler goes on with 64 bits
    return sample;
  }
  // The first channel of a row. Where blocks take turns by a division, which is hidden there: past a few
  // multiplications ptxas moves the loads of weights behind those of the next row, and on an H100 group norm of 64 x
  // 2048 x 7^2 float16 numbers takes 1.08 of the time.
  __device__ __forceinline__ unsigned first_of(long long row) const {
    const unsigned number = static_cast<unsigned>(row);
    const unsigned place = TAKES_TURNS ? number % rows_per_sample : number - sample_of(row) * rows_per_sample;
    return place * channels_per_row;
  }
  // Which of the row's channels a column of the block's part lies in.
  __device__ __forceinline__ unsigned of_column(int column) const {
    return by_positions.quotient_of(first_column + column);
  }
};

// Where a vector lies: its first `left` numbers, or all, are of one channel, the others of the next.
struct Crossing {
  unsigned channel;
  int left;
  Compute weight[2];  // of the two
  Compute bias[2];

  __device__ __forceinline__ bool is_crossed(int count) const { return left < count; }
  // What its j-th number has of what the two have. An index would be one into memory.
  __device__ __forceinline__ Compute of(int j, const Compute (&both)[2]) const {
    return j == 0 || j < left ? both[0] : both[1];
  }
};

// The numbers of such a vector, as normalized_alike has them.
template <int COUNT>
__device__ __forceinline__ Vector<X_TYPE, COUNT> normalized_crossing(const Vector<X_TYPE, COUNT>& x, Compute mean,
                                                                     Compute remainder, Compute rstd,
                                                                     const Crossing& crossing) {
  Compute scales[2], shifts[2], y[COUNT];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    scales[i] = HAS_WEIGHT ? rstd * crossing.weight[i] : rstd;
    shifts[i] = HAS_BIAS ? crossing.bias[i] - remainder * scales[i] : -remainder * scales[i];
  }
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    y[i] = (widen(x, i) - mean) * crossing.of(i, scales) + crossing.of(i, shifts);
    activate_next(y, i);
  }
  return rounded<X_TYPE>(y);
}

// From what a kernel is given: numbers in the order of the fields.
template <int COUNT>
__device__ __forceinline__ Channels channels_of(const long long (&numbers)[COUNT], long long first_column) {
  return {static_cast<unsigned>(numbers[0]),
          static_cast<unsigned>(numbers[1]),
          static_cast<unsigned>(numbers[2]),
          reciprocal_in(numbers[3]),
          reciprocal_in(numbers[4]),
          static_cast<unsigned>(first_column)};
}

// What shared memory has of a channel, where it is STAGED: its weight, its bias, or both.
constexpr int STAGED_NUMBERS = HAS_WEIGHT + HAS_BIAS;

// Where they are STAGED, whoever uses this sees to it that those of a row are in shared memory.
template <bool STAGED>
struct ChannelAffine {
  Channels channels;
  const WEIGHT_TYPE* weights;  // of all channels
  const BIAS_TYPE* biases;
  unsigned first_channel;  // of the row
  Compute part_weight[1];
  Compute part_bias[1];
  const Compute* staged;  // STAGED_NUMBERS for each of the row's channels

  // To be called when a row begins.
  __device__ __forceinline__ void go_to(long long row) {
    first_channel = channels.first_of(row);
    if constexpr (weights_of == WeightsOf::part) load_one(channels.of_column(0), part_weight, part_bias);
  }

  // The weight and bias of one of the row's channels.
  __device__ __forceinline__ void load_one(unsigned channel, Compute (&weight)[1], Compute (&bias)[1]) const {
    if constexpr (STAGED) {
      const Compute* own = staged + static_cast<int>(channel) * STAGED_NUMBERS;
      const auto numbers = load<Compute, STAGED_NUMBERS == 2 ? 2 : 1>(own);
      if constexpr (HAS_WEIGHT) weight[0] = numbers.lane[0];
      if constexpr (HAS_BIAS) bias[0] = numbers.lane[STAGED_NUMBERS - 1];
    } else {
      load_affine<1>(weights + first_channel + channel, biases + first_channel + channel, weight, bias);
    }
  }

  // Of COUNT columns of the block's part, where no channel is shorter.
  template <int COUNT>
  __device__ __forceinline__ Crossing crossing_of(int column) const {
    pin(column);
    Crossing crossing;
    crossing.channel = channels.of_column(column);
    const unsigned end = (crossing.channel + 1) * channels.positions - channels.first_column;
    crossing.left = static_cast<int>(end) - column;
    const unsigned pair[2] = {crossing.channel, crossing.channel + crossing.is_crossed(COUNT)};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      Compute weight[1] = {}, bias[1] = {};
      load_one(pair[i], weight, bias);
      crossing.weight[i] = weight[0];
      crossing.bias[i] = bias[0];
    }
    return crossing;
  }

  // Those of COUNT columns of the block's part.
  template <int COUNT>
  __device__ __forceinline__ void get(int column, Compute (&weight)[COUNT], Compute (&bias)[COUNT]) const {
    if constexpr (weights_of == WeightsOf::crossing) {
      const Crossing crossing = crossing_of<COUNT>(column);
#pragma unroll
      for (int i = 0; i < COUNT; ++i) {
        if constexpr (HAS_WEIGHT) weight[i] = crossing.of(i, crossing.weight);
        if constexpr (HAS_BIAS) bias[i] = crossing.of(i, crossing.bias);
      }
      return;
    }
    Compute one_weight[1], one_bias[1];
    unsigned channel = 0;
    int left = 0;  // columns up to the next channel
    if constexpr (weights_of == WeightsOf::part) {
      if constexpr (HAS_WEIGHT) one_weight[0] = part_weight[0];
      if constexpr (HAS_BIAS) one_bias[0] = part_bias[0];
    } else {
      // Else the compiler keeps the channel of every vector from pass to pass, and spills.
      pin(column);
      channel = channels.of_column(column);
      left = static_cast<int>((channel + 1) * channels.positions - channels.first_column) - column;
      load_one(channel, one_weight, one_bias);
    }
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      if (weights_of == WeightsOf::numbers && i == left) {
        left += static_cast<int>(channels.positions);
        load_one(++channel, one_weight, one_bias);
      }
      if constexpr (HAS_WEIGHT) weight[i] = one_weight[0];
      if constexpr (HAS_BIAS) bias[i] = one_bias[0];
    }
  }
};

template <bool STAGED, typename KernelArguments>
__device__ __forceinline__ ChannelAffine<STAGED> channel_affine_of(const KernelArguments& arguments,
                                                                   long long first_column) {
  if constexpr (HAS_CHANNELS) {
    return {channels_of(arguments.channels, first_column), arguments.weight, arguments.bias, 0, {}, {}, nullptr};
  } else {
    return {};
  }
}
