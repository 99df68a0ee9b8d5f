// How a warp collects what the blocks of a group tell each other of a turn: words that carry its number beside the bits
// (see grid_words.cuh).
constexpr int COLLECTED_PITCH = 32 * PARTS_PER_LANE;  // places for what as many blocks tell as lanes can collect

// How long a warp rests before it asks for words again, so that asking does not get in the way of what blocks move:
// layer norm backward of 100 x 1,000,000 float32 numbers takes 1.20 of a copy's time without that on an H200, and 1.085
// with 40, 200 or 800 ns; instance norm backward of 2,097,152 float16 numbers 1.23, and 1.15, 1.13 or 1.11; channels
// last up to 0.05 less.
constexpr unsigned REST_NS = 200;

// The words, or parcels, of SEVERAL places, when all of them have the tag: place(i) is the i-th, there(i) whether there
// is one; in place of those that are not there zeros. All are asked for together, until all have come: one after the
// other, each would take its way to the cache and back.
template <int SEVERAL, typename Word, typename There, typename Place>
__device__ __forceinline__ void await_words(Word (&seen)[SEVERAL], unsigned tag, const There& there,
                                            const Place& place) {
#pragma unroll
  for (int i = 0; i < SEVERAL; ++i) seen[i] = {};
  bool all;
  do {
    all = true;
#pragma unroll
    for (int i = 0; i < SEVERAL; ++i) {
      if (there(i) && !has_tag(seen[i], tag)) seen[i] = load_word(place(i));
    }
#pragma unroll
    for (int i = 0; i < SEVERAL; ++i) all &= !there(i) | has_tag(seen[i], tag);
    if (!all) __nanosleep(REST_NS);
  } while (!all);
}

// Two sums of what the blocks have told, for all lanes.
__device__ __forceinline__ void sum_parts(const Compute (&parts)[PARTS_PER_LANE][2], Compute (&sums)[2]) {
  sums[0] = sums[1] = 0;
#pragma unroll
  for (int i = 0; i < PARTS_PER_LANE; ++i) {
    sums[0] += parts[i][0];
    sums[1] += parts[i][1];
  }
  warp_sum<32, 1>(sums);
}
