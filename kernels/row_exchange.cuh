// What the blocks that share rows, row_pipeline_* and row_stream_*, tell each other of those, in words (see
// collected.cuh): COUNT numbers each, of EXCHANGES turns.
template <int COUNT>
struct Exchange {
  static constexpr int COUNT_WORDS = COUNT * WORDS;

  long long* words;  // of the group: [EXCHANGES][COUNT_WORDS][COLLECTED_PITCH]
  int rank;
  int blocks;

  __device__ __forceinline__ Exchange(long long* all, const SharedPart& part)
      : words(all + part.group * EXCHANGES * COUNT_WORDS * COLLECTED_PITCH), rank(part.rank), blocks(part.blocks) {}

  __device__ __forceinline__ long long* of_turn(int turn) const {
    return words + turn % EXCHANGES * COUNT_WORDS * COLLECTED_PITCH;
  }

  // To be called by a warp whose lanes have the same numbers.
  __device__ __forceinline__ void tell(const Compute (&numbers)[COUNT], int turn) const {
    const int lane = threadIdx.x % 32;
    if (lane >= COUNT_WORDS) return;
    unsigned bits = 0;
#pragma unroll
    for (int i = 0; i < COUNT_WORDS; ++i) bits = lane == i ? bits_of(numbers[i / WORDS], i % WORDS) : bits;
    store_word(of_turn(turn) + lane * COLLECTED_PITCH + rank, turn + 1, bits);
  }

  // What the blocks have of a row (see await_parts).
  __device__ __forceinline__ void await(Compute (&numbers)[PARTS_PER_LANE][COUNT], int turn) const {
    await_parts(numbers, of_turn(turn), blocks, turn + 1);
  }
};
