// The activation y = activate(z), of a norm's result or on its own, and its derivative; ACTIVATION is the name of one.
//
// silu(z) = z * sigmoid(z) (Elfwing and others 2017, arXiv:1702.03118); gelu(z) = z * Phi(z), and gelu_tanh its
// approximation by tanh, here as z * sigmoid(2u) with u = sqrt(2 / pi) * (z + 0.044715 z^3) (Hendrycks and Gimpel 2016,
// arXiv:1606.08415). NaN stays NaN.
//
// Both gelus are z times a distribution function F with F(-t) = 1 - F(t), so with t = |z| each follows from its tail
// F(-t), which is computed as a product: gelu(z) = max(z, 0) - t * F(-t), and gelu'(z) is m = gelu'(-t) where z < 0 and
// 1 - m elsewhere. Nothing cancels, and nothing branches.
enum class Activation { none, relu, silu, gelu, gelu_tanh };
constexpr Activation activation = Activation::ACTIVATION;

__device__ __forceinline__ float exponential(float value) { return expf(value); }
__device__ __forceinline__ double exponential(double value) { return exp(value); }
__device__ __forceinline__ float power_of_two(float value) { return exp2f(value); }  // with -ftz=true, one instruction
__device__ __forceinline__ double power_of_two(double value) { return exp2(value); }
__device__ __forceinline__ float reciprocal(float value) { return __fdividef(1, value); }
__device__ __forceinline__ double reciprocal(double value) { return 1 / value; }

// For results of sixteen bits the exponential takes two instructions.
__device__ __forceinline__ Compute sigmoid(Compute value) {
  constexpr Compute LOG2_E = 1.4426950408889634;
  if constexpr (sizeof(X_TYPE) == 2) return reciprocal(1 + power_of_two(-LOG2_E * value));
  return reciprocal(1 + exponential(-value));
}

// The sigmoid, and what it lacks of 1, which as a difference would lose digits that more than sixteen bits keep.
struct SigmoidPair {
  Compute value;
  Compute complement;
};

__device__ __forceinline__ SigmoidPair sigmoid_pair(Compute value) {
  const Compute power = exponential(value < 0 ? value : -value), larger = reciprocal(1 + power);
  const Compute smaller = power * larger;
  return value < 0 ? SigmoidPair{smaller, larger} : SigmoidPair{larger, smaller};
}

// Where a tail has become zero: a factor in front of it stops here, since infinity times zero would be NaN.
constexpr Compute TAIL_END = sizeof(Compute) == 4 ? 16 : 40;

// exp(-t^2 / 2). In float the exponent is rounded, which changes the result by up to 3e-8 of it for each unit of t^2.
// Where 24 bits of the result are kept, what was rounded off is made good.
__device__ __forceinline__ float gaussian(float t) {
  constexpr float SCALE = 0.72134752f, SCALE_REST = 9.629815e-9f, LOG_2 = 0.69314718f;  // log2(e) / 2 in two pieces
  const float square = t * t, exponent = -SCALE * square, power = power_of_two(exponent);
  if constexpr (sizeof(X_TYPE) == 2) return power;
  float rest = fmaf(-SCALE, square, -exponent);
  rest = fmaf(-SCALE_REST, square, rest);
  rest = fmaf(-SCALE, fmaf(t, t, -square), rest);
  return fmaf(power, LOG_2 * rest, power);
}
__device__ __forceinline__ double gaussian(double t) { return exp(-0.5 * t * t); }

// Phi(-t) / exp(-t^2 / 2), which is Mills' ratio but for a factor: a polynomial in u = 1 / (1 + 0.345 t), whose
// relative error is below 5e-8 up to 13.4, where the exponential becomes zero. It is the one whose largest error is the
// least (by Lawson's algorithm; tests/test_gelu.py makes it again).
__device__ __forceinline__ float mills_ratio(float t) {
  const float u = reciprocal(fmaf(0.345f, t, 1));
  float sum = -0.0284272078f;
  sum = fmaf(sum, u, 0.145487949f);
  sum = fmaf(sum, u, -0.271569818f);
  sum = fmaf(sum, u, 0.187617704f);
  sum = fmaf(sum, u, -0.0378700644f);
  sum = fmaf(sum, u, 0.111904502f);
  sum = fmaf(sum, u, 0.117213808f);
  sum = fmaf(sum, u, 0.138023987f);
  sum = fmaf(sum, u, 0.137619123f);
  return sum * u;
}

// For t that is not negative: Phi(-t), of the standard normal, and the derivative of gelu at -t.
constexpr Compute DENSITY_AT_0 = 0.3989422804014327;  // 1 / sqrt(2 pi)

__device__ __forceinline__ float normal_tail(float t) { return gaussian(min(t, TAIL_END)) * mills_ratio(t); }
__device__ __forceinline__ double normal_tail(double t) { return 0.5 * erfc(t * 0.70710678118654752); }

__device__ __forceinline__ float normal_tail_derivative(float t) {
  const float inside = min(t, TAIL_END);
  return gaussian(inside) * fmaf(-DENSITY_AT_0, inside, mills_ratio(t));
}
__device__ __forceinline__ double normal_tail_derivative(double t) {
  return normal_tail(t) - DENSITY_AT_0 * min(t, TAIL_END) * gaussian(t);
}

// The same of gelu_tanh, whose distribution function is sigmoid(2u).
constexpr Compute SLOPE_AT_0 = 1.5957691216057308;  // 2 * sqrt(2 / pi)

__device__ __forceinline__ Compute exp_minus_2u(Compute t) {
  constexpr Compute SCALE = -2.302208198144325;  // -SLOPE_AT_0 * log2(e)
  return power_of_two(SCALE * t * (1 + static_cast<Compute>(0.044715) * t * t));
}

__device__ __forceinline__ Compute tanh_tail(Compute t) {
  const Compute power = exp_minus_2u(t);
  return power * reciprocal(1 + power);
}

__device__ __forceinline__ Compute tanh_tail_derivative(Compute t) {
  const Compute power = exp_minus_2u(t), complement = reciprocal(1 + power), inside = min(t, TAIL_END);
  const Compute slope = SLOPE_AT_0 * (1 + static_cast<Compute>(0.134145) * inside * inside);
  return power * complement * (1 - inside * complement * slope);
}

__device__ __forceinline__ Compute activate(Compute z) {
  if constexpr (activation == Activation::relu) return z < 0 ? 0 : z;
  if constexpr (activation == Activation::silu) return z * sigmoid(z);
  if constexpr (activation == Activation::gelu || activation == Activation::gelu_tanh) {
    const Compute t = abs(z), tail = activation == Activation::gelu ? normal_tail(t) : tanh_tail(t);
    return max(z, static_cast<Compute>(0)) - min(t, TAIL_END) * tail;
  }
  return z;
}

// The larger of two numbers, of which the first may be NaN and stays so.
__device__ __forceinline__ float at_least(float value, float least) {
#if !defined(CUNORM_EMULATOR) && __CUDA_ARCH__ >= 800
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(value) : "f"(least));
  return value;
#else
  return value < least ? least : value;
#endif
}

// The same of several numbers, in place: to be called for one after the other, when it and those before it are there.
//
// Of silu two that are rounded to sixteen bits share a reciprocal, 1 / (a * b): the unit for exponentials and
// reciprocals has three results to give for them in place of four, and gives one while others give eight. 8 x 128 x
// 256^2 float16 numbers in 32 groups, channels second, take 1.31 so, and 1.36 otherwise; of bfloat16 1.52 and 1.61.
// (Backward, with more else to do, nothing is gained.) So that a product stays in range, no sigmoid is less than 2^-62,
// and below -43 silu is what it is there, -9e-18. A NaN does not reach its neighbour.
template <int COUNT>
__device__ __forceinline__ void activate_next(Compute (&z)[COUNT], int i) {
  if constexpr (activation == Activation::silu && sizeof(X_TYPE) == 2 && COUNT % 2 == 0) {
    constexpr float LOG2_E = 1.44269504f, MOST = 62;
    if (i % 2 == 0) return;
    Compute &one = z[i - 1], &other = z[i];
    const float first = 1 + power_of_two(min(-LOG2_E * one, MOST));
    const float second = 1 + power_of_two(min(-LOG2_E * other, MOST));
    const float both = reciprocal(first * second);
    one = at_least(one, -MOST / LOG2_E) * (both * second);
    other = at_least(other, -MOST / LOG2_E) * (both * first);
  } else {
    z[i] = activate(z[i]);
  }
}

template <int COUNT>
__device__ __forceinline__ void activate_all(Compute (&z)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) activate_next(z, i);
}

// Of all but relu, which activation_gradient knows by itself.
__device__ __forceinline__ Compute activation_derivative(Compute z) {
  if constexpr (activation == Activation::silu && sizeof(X_TYPE) == 2) {
    // s + z * s * (1 - s), as two multiply-adds.
    const Compute s = sigmoid(z);
    return (z - z * s) * s + s;
  }
  if constexpr (activation == Activation::silu) {
    const SigmoidPair s = sigmoid_pair(z);
    return s.value * (1 + z * s.complement);
  }
  if constexpr (activation == Activation::gelu || activation == Activation::gelu_tanh) {
    const Compute t = abs(z);
    const Compute below = activation == Activation::gelu ? normal_tail_derivative(t) : tanh_tail_derivative(t);
    return z < 0 ? below : 1 - below;
  }
  return 1;
}

// The gradient of z, of which the activation was taken: where relu is flat that is 0, also of a dy that is infinite.
__device__ __forceinline__ Compute activation_gradient(Compute dy, Compute z) {
  if constexpr (activation == Activation::relu) return z <= 0 ? 0 : dy;
  return dy * activation_derivative(z);
}
