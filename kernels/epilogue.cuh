// The end of a norm: VECTOR numbers of a row, from `column` on, are normalized, scaled, shifted and rounded.
//
// The mean comes as two numbers, mean + remainder: its rounding alone would show where a row lies far from zero.
__device__ __forceinline__ Vector<X_TYPE, VECTOR> normalized(const Vector<X_TYPE, VECTOR>& x, Compute mean,
                                                             Compute remainder, Compute rstd,
                                                             const WEIGHT_TYPE* weights, const BIAS_TYPE* biases,
                                                             long long column) {
  Compute weight[VECTOR], bias[VECTOR];
  if constexpr (HAS_WEIGHT) load_widened<VECTOR, WEIGHT_ACCESS>(weights + column, weight);
  if constexpr (HAS_BIAS) load_widened<VECTOR, BIAS_ACCESS>(biases + column, bias);
  Vector<X_TYPE, VECTOR> result;
#pragma unroll
  for (int i = 0; i < VECTOR; ++i) {
    Compute value = (widen(x.lane[i]) - mean - remainder) * rstd;
    if constexpr (HAS_WEIGHT) value *= weight[i];
    if constexpr (HAS_BIAS) value += bias[i];
    narrow(value, result.lane[i]);
  }
  return result;
}
