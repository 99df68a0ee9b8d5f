// How the blocks of channel_grid_* share slabs: they all run at the same time, a group of blocks_per_slab of them for
// every groups-th slab, each with a part of its points.
//
// While a group works on one slab, the beginning of its next one comes in, as much as there are slots for; the rest
// follows as slots are finished.

// Where the threads of a block have come to in the slabs that are still to come in.
struct Ahead {
  long long slab;
  int vector;
  int slot;
  Chunk part;
  Walk walk;
};

struct Group {
  long long first_slab;
  long long step;  // from one of its slabs to the next
  long long slabs;
  int blocks;
  int rank;

  __device__ __forceinline__ Chunk part(long long slab, long long channels, long long points,
                                        long long points_per_block) const {
    Chunk part = chunk_at(static_cast<unsigned>(slab), rank, channels, points, points_per_block);
    part.there = part.there && slab < slabs;
    return part;
  }
};

__device__ __forceinline__ Group group_of_block(long long slabs, long long blocks_per_slab) {
  const int blocks = static_cast<int>(blocks_per_slab);
  return {blockIdx.x / blocks, gridDim.x / blocks, slabs, blocks, static_cast<int>(blockIdx.x) % blocks};
}

// What the blocks of a group tell each other: COUNT numbers for each of the slab's sets. Of set s, the block of rank s
// % blocks is the owner: it collects what all have, and tells all what follows from that. Everything twice, so that a
// block may still read one turn's when another has gone on to the next. Further it cannot go, for it then needs this
// one's numbers.
template <int COUNT>
struct SetExchange {
  static constexpr int PER_BLOCK = COUNT * TILE_SETS * WORDS;

  long long* words;    // of the group, a block's PER_BLOCK after the other
  long long* answers;  // of the group, PER_BLOCK
  long long step;      // from the words of one turn to those of the next
  long long answer_step;
  int rank;
  int blocks;

  __device__ __forceinline__ int owned() const { return (TILE_SETS - rank + blocks - 1) / blocks; }
  __device__ __forceinline__ int owned_set(int i) const { return rank + i * blocks; }

  // `own` is COUNT rows of TILE_SETS numbers.
  __device__ __forceinline__ void publish(const Compute* own, int turn) const {
    long long* target = words + turn % 2 * step + rank * PER_BLOCK;
    for (int i = thread_in_block(); i < PER_BLOCK; i += THREADS) {
      store_word(target + i, turn + 1, bits_of(own[i / WORDS], i % WORDS));
    }
  }

  // Leaves the numbers of the owned sets in `numbers`: for each, `blocks` times COUNT.
  __device__ __forceinline__ void collect(Compute* numbers, int turn) const {
    for (int i = thread_in_block(); i < owned() * blocks * COUNT; i += THREADS) {
      const int number = i % COUNT, block = i / COUNT % blocks, set = owned_set(i / (COUNT * blocks));
      numbers[i] = await_number(words + turn % 2 * step + block * PER_BLOCK + (number * TILE_SETS + set) * WORDS, turn);
    }
    __syncthreads();
  }

  __device__ __forceinline__ void answer(int set, const Compute (&numbers)[COUNT], int turn) const {
    long long* target = answers + turn % 2 * answer_step;
#pragma unroll
    for (int i = 0; i < COUNT * WORDS; ++i) {
      store_word(target + (i / WORDS * TILE_SETS + set) * WORDS + i % WORDS, turn + 1,
                 bits_of(numbers[i / WORDS], i % WORDS));
    }
  }

  // The i-th of COUNT times TILE_SETS answers.
  __device__ __forceinline__ Compute await_answer(int i, int turn) const {
    return await_number(answers + turn % 2 * answer_step + i * WORDS, turn);
  }

  __device__ __forceinline__ static Compute await_number(const long long* from, int turn) {
    unsigned bits[WORDS];
#pragma unroll
    for (int i = 0; i < WORDS; ++i) bits[i] = await_word(from + i, turn + 1);
    return number_of(bits);
  }
};

// `words` has room for two turns' words of every block, then for two turns' answers to every group.
template <int COUNT>
__device__ __forceinline__ SetExchange<COUNT> set_exchange_of(long long* words, const Group& group) {
  constexpr int PER_BLOCK = SetExchange<COUNT>::PER_BLOCK;
  const long long step = static_cast<long long>(gridDim.x) * PER_BLOCK;
  return {words + (static_cast<long long>(blockIdx.x) - group.rank) * PER_BLOCK,
          words + 2 * step + group.first_slab * PER_BLOCK, step, group.step * PER_BLOCK, group.rank, group.blocks};
}
