// The activation that may follow a norm, y = activate(z), and its derivative; ACTIVATION is the name of one.
//
// silu(z) = z * sigmoid(z) (Elfwing and others 2017, arXiv:1702.03118); gelu(z) = z * Phi(z), and gelu_tanh its
// approximation by tanh, here as z * sigmoid(2u) with u = sqrt(2 / pi) * (z + 0.044715 z^3) (Hendrycks and Gimpel 2016,
// arXiv:1606.08415). Both gelus are written so that nothing cancels where z is far below zero. NaN stays NaN.
enum class Activation { none, relu, silu, gelu, gelu_tanh };
constexpr Activation activation = Activation::ACTIVATION;

__device__ __forceinline__ float exponential(float value) { return expf(value); }
__device__ __forceinline__ double exponential(double value) { return exp(value); }
__device__ __forceinline__ float erf_complement(float value) { return erfcf(value); }
__device__ __forceinline__ double erf_complement(double value) { return erfc(value); }

__device__ __forceinline__ Compute sigmoid(Compute value) { return 1 / (1 + exponential(-value)); }

// The sigmoid, and what it lacks of 1, which as a difference would lose its digits.
struct SigmoidPair {
  Compute value;
  Compute complement;
};

__device__ __forceinline__ SigmoidPair sigmoid_pair(Compute value) {
  const Compute power = exponential(value < 0 ? value : -value), larger = 1 / (1 + power), smaller = power * larger;
  return value < 0 ? SigmoidPair{smaller, larger} : SigmoidPair{larger, smaller};
}

// Phi, the distribution function of the standard normal.
__device__ __forceinline__ Compute normal_cdf(Compute value) {
  return static_cast<Compute>(0.5) * erf_complement(value * static_cast<Compute>(-0.70710678118654752));
}

// 2u, of which gelu_tanh takes the sigmoid.
__device__ __forceinline__ Compute gelu_tanh_argument(Compute z) {
  return static_cast<Compute>(1.5957691216057308) * z * (1 + static_cast<Compute>(0.044715) * z * z);
}

__device__ __forceinline__ Compute activate(Compute z) {
  if constexpr (activation == Activation::relu) return z < 0 ? 0 : z;
  if constexpr (activation == Activation::silu) return z * sigmoid(z);
  if constexpr (activation == Activation::gelu) return z * normal_cdf(z);
  if constexpr (activation == Activation::gelu_tanh) return z * sigmoid(gelu_tanh_argument(z));
  return z;
}

__device__ __forceinline__ Compute activation_derivative(Compute z) {
  if constexpr (activation == Activation::relu) return z <= 0 ? 0 : 1;
  if constexpr (activation == Activation::silu) {
    const SigmoidPair s = sigmoid_pair(z);
    return s.value * (1 + z * s.complement);
  }
  if constexpr (activation == Activation::gelu) {
    const Compute density = static_cast<Compute>(0.3989422804014327) * exponential(static_cast<Compute>(-0.5) * z * z);
    return normal_cdf(z) + z * density;
  }
  if constexpr (activation == Activation::gelu_tanh) {
    // Beyond 20 the derivative is 0 or 1, and the square of z could leave the range of float.
    z = z < -20 ? -20 : z > 20 ? 20 : z;
    const SigmoidPair s = sigmoid_pair(gelu_tanh_argument(z));
    const Compute slope = static_cast<Compute>(1.5957691216057308) * (1 + static_cast<Compute>(0.134145) * z * z);
    return s.value * (1 + z * s.complement * slope);
  }
  return 1;
}
