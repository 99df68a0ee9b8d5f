// The weights and biases of a thread's channels, one for each of CHANNEL_VECTOR: of neighbours, which are aligned, or
// along planes (see channel_tile.cuh) of the channels that the numbers of its vectors belong to, often the same.
struct OwnAffine {
  Vector<WEIGHT_TYPE, CHANNEL_VECTOR> weights;
  Vector<BIAS_TYPE, CHANNEL_VECTOR> biases;

  // Starts to load them: whoever uses them waits. Who has no channel loads those of the first: with a branch ptxas
  // would wait for them at once, to put them and what is there otherwise into the same registers.
  __device__ __forceinline__ void fetch(const Chunk& chunk, const WEIGHT_TYPE* all_weights,
                                        const BIAS_TYPE* all_biases) {
    if constexpr (HAS_WEIGHT) fetch_of<WEIGHT_ACCESS>(chunk, all_weights, weights);
    if constexpr (HAS_BIAS) fetch_of<BIAS_ACCESS>(chunk, all_biases, biases);
  }
  __device__ __forceinline__ void get(Compute (&weight)[CHANNEL_VECTOR], Compute (&bias)[CHANNEL_VECTOR]) const {
    if constexpr (HAS_WEIGHT) widen_all(weights, weight);
    if constexpr (HAS_BIAS) widen_all(biases, bias);
    add_weight_offset(weight);
  }

 private:
  template <int ACCESS_BYTES, typename T>
  __device__ __forceinline__ static void fetch_of(const Chunk& chunk, const T* all, Vector<T, CHANNEL_VECTOR>& own) {
    if constexpr (PLANE == 1) {
      own = load_in_pieces<CHANNEL_VECTOR, ACCESS_BYTES>(all + (chunk.there ? chunk.channel : 0));
    } else {
#pragma unroll
      for (int j = 0; j < CHANNEL_VECTOR; ++j) {
        own.lane[j] = all[chunk.there ? chunk.first_channel + channel_in_tile(j) : 0];
      }
    }
  }
};

__device__ __forceinline__ void load_own_affine(const Chunk& chunk, const WEIGHT_TYPE* weights,
                                                const BIAS_TYPE* biases, Compute (&weight)[CHANNEL_VECTOR],
                                                Compute (&bias)[CHANNEL_VECTOR]) {
  OwnAffine own = {};
  own.fetch(chunk, weights, biases);
  own.get(weight, bias);
}
