// What a thread needs of its channels for the gradients of its numbers, and the last step to dx: for
// channel_slab_backward, channel_grid_backward and channel_pipeline_backward.

// What the parts of a slab have of each channel: the sums of dz and of dz * xhat.
constexpr int NUMBERS = 2;

// What a thread knows of its channels, as it comes from memory.
struct Fetched {
  OwnAffine affine;
  Compute mean[CHANNEL_VECTOR];
  Compute rstd[CHANNEL_VECTOR];

  // Starts to load it, as OwnAffine does: whoever uses it waits.
  __device__ __forceinline__ void fetch(const Chunk& part, long long channels, const WEIGHT_TYPE* weights,
                                        const BIAS_TYPE* biases, const Compute* means, const Compute* rstds) {
    affine.fetch(part, weights, biases);
    const long long first_set = (part.sample * channels + part.first_channel) / CHANNELS_PER_SET;
#pragma unroll
    for (int j = 0; j < CHANNEL_VECTOR; ++j) {
      const long long set = part.there ? first_set + set_in_tile(j) : 0;
      mean[j] = means[set];
      rstd[j] = rstds[set];
    }
  }
};

// What a thread knows of its channels.
struct Own {
  Compute weight[CHANNEL_VECTOR];
  Compute bias[CHANNEL_VECTOR];
  Compute mean[CHANNEL_VECTOR];
  Compute rstd[CHANNEL_VECTOR];
  Compute slope[CHANNEL_VECTOR];  // of the deviation in z

  __device__ __forceinline__ void set(const Fetched& fetched) {
    fetched.affine.get(weight, bias);
#pragma unroll
    for (int j = 0; j < CHANNEL_VECTOR; ++j) {
      mean[j] = fetched.mean[j];
      rstd[j] = fetched.rstd[j];
      set_slope(j);
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
      set_slope(j);
    }
  }
  __device__ __forceinline__ void set_slope(int j) { slope[j] = slope_of(weight[j], rstd[j]); }

  __device__ __forceinline__ Compute deviation(Compute x, int j) const { return deviation_of(x, mean[j], rstd[j]); }
  __device__ __forceinline__ Compute dz(Compute dy, Compute z, int j) const { return dz_of(dy, z, bias[j]); }
};

// Of a set: the means of g and of g * xhat.
struct SetMeans {
  Compute g;
  Compute product;
};

// What dx is made with: what is the same for all points is put together.
struct Finish {
  Compute scales[CHANNEL_VECTOR];
  Compute offsets[CHANNEL_VECTOR];
  Compute slopes[CHANNEL_VECTOR];

  Finish() = default;
  // means_of(j) are those of the set that the thread's j-th channel is of.
  template <typename MeansOf>
  __device__ __forceinline__ Finish(const MeansOf& means_of, const Own& thread) {
#pragma unroll
    for (int j = 0; j < CHANNEL_VECTOR; ++j) {
      const SetMeans means = means_of(j);
      scales[j] = scale_of(thread.weight[j], thread.rstd[j]);
      offsets[j] = -means.g * thread.rstd[j];
      slopes[j] = -means.product * thread.rstd[j] * missing_scale(thread.rstd[j]);
    }
  }

  __device__ __forceinline__ Vector<X_TYPE, VECTOR> of(const Vector<X_TYPE, VECTOR>& dy,
                                                       const Vector<X_TYPE, VECTOR>& x, const Own& thread) const {
    Compute results[VECTOR];
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) {
      const int channel = channel_of(j);
      const Compute value = widen(x, j), z = (value - thread.mean[channel]) * scales[channel];
      results[j] = thread.dz(widen(dy, j), z, channel) * scales[channel] +
                   (thread.deviation(value, channel) * slopes[channel] + offsets[channel]);
    }
    return rounded<X_TYPE>(results);
  }
};
