// What surrounds the statistics of a norm: y = activate(xhat * (WEIGHT_OFFSET + weight) + bias), and its gradient.
//
// xhat is (x - mean) * rstd, or x * rstd where the norm is not CENTERED (RMS norm).

// Weights as they are multiplied with.
template <int COUNT>
__device__ __forceinline__ void add_weight_offset(Compute (&weight)[COUNT]) {
  if constexpr (HAS_WEIGHT && WEIGHT_OFFSET != 0) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) weight[i] += static_cast<Compute>(WEIGHT_OFFSET);
  }
}

// COUNT weights and biases from where they are aligned.
template <int COUNT>
__device__ __forceinline__ void load_affine(const WEIGHT_TYPE* weights, const BIAS_TYPE* biases,
                                            Compute (&weight)[COUNT], Compute (&bias)[COUNT]) {
  if constexpr (HAS_WEIGHT) widen_all(load_in_pieces<COUNT, WEIGHT_ACCESS>(weights), weight);
  if constexpr (HAS_BIAS) widen_all(load_in_pieces<COUNT, BIAS_ACCESS>(biases), bias);
  add_weight_offset(weight);
}

// The same from anywhere (see Anywhere), if they are ANYWHERE.
template <bool ANYWHERE, int COUNT>
__device__ __forceinline__ void load_affine_anywhere(const WEIGHT_TYPE* weights, const BIAS_TYPE* biases,
                                                     Compute (&weight)[COUNT], Compute (&bias)[COUNT]) {
  if constexpr (!ANYWHERE || COUNT == 1) return load_affine<COUNT>(weights, biases, weight, bias);
  if constexpr (HAS_WEIGHT) widen_all(Anywhere<WEIGHT_TYPE, COUNT>(weights).load_from(0), weight);
  if constexpr (HAS_BIAS) widen_all(Anywhere<BIAS_TYPE, COUNT>(biases).load_from(0), bias);
  add_weight_offset(weight);
}

__device__ __forceinline__ Compute scale_and_shift(Compute xhat, Compute weight, Compute bias) {
  if constexpr (HAS_WEIGHT) xhat *= weight;
  if constexpr (HAS_BIAS) xhat += bias;
  return xhat;
}

// Numbers of a row: normalized, scaled, shifted, activated and rounded.
//
// The mean comes as two numbers, mean + remainder: its rounding alone would show where a row lies far from zero.
template <int COUNT>
__device__ __forceinline__ Vector<X_TYPE, COUNT> normalized(const Vector<X_TYPE, COUNT>& x, Compute mean,
                                                            Compute remainder, Compute rstd,
                                                            const Compute (&weight)[COUNT],
                                                            const Compute (&bias)[COUNT]) {
  const Compute shift = -remainder * rstd;
  Compute y[COUNT];
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    const Compute value = widen(x, i);
    const Compute xhat = CENTERED ? (value - mean) * rstd + shift : value * rstd;
    y[i] = scale_and_shift(xhat, weight[i], bias[i]);
    activate_next(y, i);
  }
  return rounded<X_TYPE>(y);
}

// The same of numbers that have one weight and bias: an instruction less for each.
template <int COUNT>
__device__ __forceinline__ Vector<X_TYPE, COUNT> normalized_alike(const Vector<X_TYPE, COUNT>& x, Compute mean,
                                                                  Compute remainder, Compute rstd, Compute weight,
                                                                  Compute bias) {
  const Compute scale = HAS_WEIGHT ? rstd * weight : rstd;
  const Compute shift = HAS_BIAS ? bias - remainder * scale : -remainder * scale;
  Compute y[COUNT];
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    y[i] = (widen(x, i) - mean) * scale + shift;
    activate_next(y, i);
  }
  return rounded<X_TYPE>(y);
}

// One number's part in the gradients.
struct Gradient {
  Compute xhat;
  Compute dz;  // of what the activation was given: dy, where there is none
  Compute g;   // of xhat
};

// Where dz is known.
__device__ __forceinline__ Gradient gradient_with(Compute x, Compute dz, Compute mean, Compute rstd, Compute weight) {
  return {CENTERED ? (x - mean) * rstd : x * rstd, dz, HAS_WEIGHT ? dz * weight : dz};
}

__device__ __forceinline__ Gradient gradient_of(Compute x, Compute dy, Compute mean, Compute rstd, Compute weight,
                                                Compute bias) {
  if constexpr (activation == Activation::none) return gradient_with(x, dy, mean, rstd, weight);
  const Compute xhat = gradient_with(x, 0, mean, rstd, weight).xhat;
  const Compute dz = activation_gradient(dy, scale_and_shift(xhat, weight, bias));
  return gradient_with(x, dz, mean, rstd, weight);
}

// ---- The gradients of numbers that have one mean, rstd, weight and bias, as those of a channel do: what is the same
// for them all is put together.

template <typename T>
constexpr bool IS_HALF = false;
template <>
constexpr bool IS_HALF<__half> = true;
// Whether the deviation x - mean stands for xhat in sums and products, which make its rstd good: two multiplications
// less for each number. Of float16 numbers nothing leaves the range of float so; of others the square of rstd could.
constexpr bool BY_DEVIATION = IS_HALF<X_TYPE>;

// xhat, or what stands for it.
__device__ __forceinline__ Compute deviation_of(Compute x, Compute mean, Compute rstd) {
  const Compute deviation = CENTERED ? x - mean : x;
  return BY_DEVIATION ? deviation : deviation * rstd;
}
// By what sums of its products are to be multiplied.
__device__ __forceinline__ Compute missing_scale(Compute rstd) { return BY_DEVIATION ? rstd : 1; }
// Of x - mean in z, and of dz in dx.
__device__ __forceinline__ Compute scale_of(Compute weight, Compute rstd) { return HAS_WEIGHT ? weight * rstd : rstd; }
// Of the deviation in z.
__device__ __forceinline__ Compute slope_of(Compute weight, Compute rstd) {
  return BY_DEVIATION ? scale_of(weight, rstd) : static_cast<Compute>(HAS_WEIGHT ? weight : 1);
}
// Of z without the bias.
__device__ __forceinline__ Compute dz_of(Compute dy, Compute z, Compute bias) {
  if constexpr (activation == Activation::none) return dy;
  return activation_gradient(dy, HAS_BIAS ? z + bias : z);
}
