// The weights and biases of a thread's channels, one for each of CHANNEL_VECTOR: of neighbours, which are aligned, or
// along planes (see channel_tile.cuh) of the channels that the numbers of its vectors belong to, often the same.

__device__ __forceinline__ void load_own_affine(const Chunk& chunk, const WEIGHT_TYPE* weights,
                                                const BIAS_TYPE* biases, Compute (&weight)[CHANNEL_VECTOR],
                                                Compute (&bias)[CHANNEL_VECTOR]) {
  if constexpr (PLANE == 1) {
    return load_affine<CHANNEL_VECTOR>(weights + chunk.channel, biases + chunk.channel, weight, bias);
  }
#pragma unroll
  for (int j = 0; j < CHANNEL_VECTOR; ++j) {
    const long long channel = chunk.first_channel + channel_in_tile(j);
    Compute one_weight[1] = {}, one_bias[1] = {};
    load_affine<1>(weights + channel, biases + channel, one_weight, one_bias);
    weight[j] = one_weight[0];
    bias[j] = one_bias[0];
  }
}
