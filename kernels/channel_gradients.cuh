// What a thread needs of its channels for the gradients of its numbers, and the last step to dx: for
// channel_slab_backward and channel_grid_backward.

// What the parts of a slab have of each channel: the sums of dz and of dz * xhat.
constexpr int NUMBERS = 2;

// What a thread knows of its channels.
struct Own {
  Compute weight[CHANNEL_VECTOR];
  Compute bias[CHANNEL_VECTOR];
  Compute mean[CHANNEL_VECTOR];
  Compute rstd[CHANNEL_VECTOR];

  __device__ __forceinline__ void load(const Chunk& part, long long channels, const WEIGHT_TYPE* weights,
                                       const BIAS_TYPE* biases, const Compute* means, const Compute* rstds) {
    if (!part.there) return;
    load_own_affine(part, weights, biases, weight, bias);
    const long long first_set = (part.sample * channels + part.first_channel) / CHANNELS_PER_SET;
#pragma unroll
    for (int j = 0; j < CHANNEL_VECTOR; ++j) {
      const long long set = first_set + set_in_tile(j);
      mean[j] = means[set];
      rstd[j] = rstds[set];
    }
  }

  // From rows of TILE_CHANNELS numbers each.
  __device__ __forceinline__ void load_rows(const Compute* rows) {
#pragma unroll
    for (int j = 0; j < CHANNEL_VECTOR; ++j) {
      const Compute* of_channel = rows + channel_in_tile(j);
      weight[j] = of_channel[0];
      bias[j] = of_channel[TILE_CHANNELS];
      mean[j] = of_channel[2 * TILE_CHANNELS];
      rstd[j] = of_channel[3 * TILE_CHANNELS];
    }
  }

  __device__ __forceinline__ Gradient gradient(Compute x, Compute dy, int channel) const {
    return gradient_of(x, dy, mean[channel], rstd[channel], weight[channel], bias[channel]);
  }
};

// Of a set: the means of g and of g * xhat.
struct SetMeans {
  Compute g;
  Compute product;
};

// What dx is made with. What is the same for all points is put together: but for the rstd in xhat, whose square could
// leave the range of float.
struct Finish {
  Compute offsets[CHANNEL_VECTOR];
  Compute slopes[CHANNEL_VECTOR];

  Finish() = default;
  __device__ __forceinline__ Finish(const SetMeans* sets, const Own& thread) {
#pragma unroll
    for (int j = 0; j < CHANNEL_VECTOR; ++j) {
      const SetMeans means = sets[set_in_tile(j)];
      offsets[j] = -means.g * thread.rstd[j];
      slopes[j] = -means.product * thread.rstd[j];
    }
  }

  __device__ __forceinline__ Vector<X_TYPE, VECTOR> of(const Vector<X_TYPE, VECTOR>& dy,
                                                       const Vector<X_TYPE, VECTOR>& x, const Own& thread) const {
    Compute results[VECTOR];
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) {
      const int channel = channel_of(j);
      const Gradient gradient = thread.gradient(widen(x, j), widen(dy, j), channel);
      results[j] = gradient.g * thread.rstd[channel] + (gradient.xhat * slopes[channel] + offsets[channel]);
    }
    return rounded<X_TYPE>(results);
  }
};
