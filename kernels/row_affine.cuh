// The weight and bias of row_block_*: a thread gets those of its vectors (see row_stage.cuh for what a place is).
//
// They come from memory, through the cache, at every row. Where WEIGHTS_STAGED, a thread first takes its own into
// shared memory: a row that fills the cache would drive them out of it, and each row would cost their bytes again.

template <int ACCESS_BYTES, typename T>
struct Parameter {
  const T* memory;  // of the block's part of a row
  T* staged;        // BLOCK_THREADS * VECTORS * VECTOR elements of shared memory

  __device__ __forceinline__ T* own(int i) const { return staged + (i * BLOCK_THREADS + thread_in_block()) * VECTOR; }

  // Takes this thread's into shared memory, for all rows: they must all begin in the same way, where they are PEELED.
  __device__ __forceinline__ void stage(const Place& place) const {
    if constexpr (WEIGHTS_STAGED) {
#pragma unroll
      for (int i = 0; i < VECTORS; ++i) {
        if (!place.has(i)) continue;
        constexpr int STEP = PEELED ? 1 : ACCESS_BYTES / sizeof(T) < VECTOR ? ACCESS_BYTES / sizeof(T) : VECTOR;
#pragma unroll
        for (int j = 0; j < VECTOR; j += STEP) store(own(i) + j, load<T, STEP>(memory + place.column(i) + j));
      }
    }
  }

  // Those of the thread's i-th vector.
  __device__ __forceinline__ void get(const Place& place, int i, Compute (&values)[VECTOR]) const {
    if constexpr (WEIGHTS_STAGED) {
      constexpr int BYTES = sizeof(T) * VECTOR;
      load_widened<VECTOR, (BYTES < 16 ? BYTES : 16)>(own(i), values);
    } else if constexpr (PEELED) {
      load_widened_anywhere<VECTOR>(memory + place.column(i), values);
    } else {
      load_widened<VECTOR, ACCESS_BYTES>(memory + place.column(i), values);
    }
  }
};

struct Affine {
  Parameter<WEIGHT_ACCESS, WEIGHT_TYPE> weights;
  Parameter<BIAS_ACCESS, BIAS_TYPE> biases;

  __device__ __forceinline__ void stage(const Place& place) const {
    if constexpr (HAS_WEIGHT) weights.stage(place);
    if constexpr (HAS_BIAS) biases.stage(place);
  }
  __device__ __forceinline__ void get(const Place& place, int i, Compute (&weight)[VECTOR],
                                      Compute (&bias)[VECTOR]) const {
    if constexpr (HAS_WEIGHT) weights.get(place, i, weight);
    if constexpr (HAS_BIAS) biases.get(place, i, bias);
    add_weight_offset(weight);
  }
  __device__ __forceinline__ void get_edge(const Place& place, Compute (&weight)[1], Compute (&bias)[1]) const {
    if constexpr (HAS_WEIGHT) weight[0] = widen(weights.memory[place.edge_column()]);
    if constexpr (HAS_BIAS) bias[0] = widen(biases.memory[place.edge_column()]);
    add_weight_offset(weight);
  }
};

// `staged` is shared memory for both, 16-byte aligned.
__device__ __forceinline__ Affine affine_of(const WEIGHT_TYPE* weights, const BIAS_TYPE* biases, const Part& part,
                                            void* staged) {
  WEIGHT_TYPE* staged_weights = static_cast<WEIGHT_TYPE*>(staged);
  BIAS_TYPE* staged_biases =
      reinterpret_cast<BIAS_TYPE*>(staged_weights + (HAS_WEIGHT ? BLOCK_THREADS * VECTORS * VECTOR : 0));
  return {{weights + part.first_column, staged_weights}, {biases + part.first_column, staged_biases}};
}
