// How the blocks of channel_grid_* share slabs: they all run at the same time, a group of blocks_per_slab of them for
// every groups-th slab, each with a part of its points.
//
// A thread sums its vectors of a slab from the first to the last and finishes them from the last to the first. While a
// group works on one slab, the next ones come in: as much of them as there are free slots, and the rest as slots are
// finished.
//
// Where there are more vectors than slots, the last RESIDENT stay in registers and the first HELD in slots, and the
// rest pass through the STREAMED other slots: up for the sums, and down again from the last that are still there. So
// what comes again is what was read last, which the L2 cache has longest.
constexpr int STREAMED = SLOTS - HELD;
static_assert(STREAMED == 0 || STREAMED >= FEW, "what is taken at a time must be there");

// The slot of a thread's i-th vector. From one slab to the next the order of the slots is MIRRORED: so those that
// become free first are those that are filled first.
__device__ __forceinline__ int slot_of_vector(int i, bool mirrored) {
  int slot = i;
  if constexpr (STREAMED > 0) {
    if (i >= SLOTS) slot = HELD + static_cast<unsigned>(i - HELD) % STREAMED;
  }
  return mirrored ? SLOTS - 1 - slot : slot;
}

// A tensor that is read.
struct Source {
  const X_TYPE* memory;
  long long sample_stride;
  long long channel_stride;
  const long long (&point_strides)[POINT_DIMS];
  Slots slots;
};

// A block's part of a slab, on its way into the slots.
template <int SOURCES>
struct Arriving {
  bool mirrored;  // its slots
  int count;      // vectors that this thread has of it in slots
  int next;       // the vector that is to come
  Path paths[SOURCES];
};

// What brings in a thread's vectors: each in a group of copies. A block has the same points of every slab, so that the
// ways over them, which take divisions, are found once.
template <int SOURCES>
struct Intake {
  const Source (&sources)[SOURCES];
  const long long (&sizes)[POINT_DIMS];
  int vectors;  // in slots
  int free;     // slots that no slab needs
  Walk first;   // from the first vector on
  Walk middle;  // from where the way down begins: STREAMED, the last that is read again; else the last with a free slot

  __device__ __forceinline__ Intake(const Source (&of)[SOURCES], const long long (&point_sizes)[POINT_DIMS], Chunk part,
                                    int count)
      : sources(of), sizes(point_sizes), vectors(count), free(max(0, SLOTS - count)) {
    part.there = true;
    first = walk_over(part, sizes);
    middle = walk_over(part, sizes, STREAMED > 0 ? vectors - STREAMED - 1 : max(0, free - 1));
  }

  __device__ __forceinline__ void go_to(Arriving<SOURCES>& arriving, const Chunk& part, const Walk& walk) const {
    arriving.next = first.left - walk.left;
#pragma unroll
    for (int k = 0; k < SOURCES; ++k) {
      const Source& source = sources[k];
      arriving.paths[k] = path_of(walk, part, source.sample_stride, source.channel_stride, source.point_strides);
    }
  }
  __device__ __forceinline__ Arriving<SOURCES> begin(const Chunk& part, bool mirrored, const Walk& walk) const {
    Arriving<SOURCES> arriving = {mirrored, part.there ? min(first.left, vectors) : 0};
    go_to(arriving, part, walk);
    return arriving;
  }

  // The next vector: of the way up, or down.
  template <bool UP>
  __device__ __forceinline__ void fill(Arriving<SOURCES>& arriving, int slot) const {
    if (arriving.next < arriving.count) {
#pragma unroll
      for (int k = 0; k < SOURCES; ++k) {
        sources[k].slots.fill(slot, sources[k].memory + arriving.paths[k].offset(sources[k].point_strides));
      }
    }
    copy_async_commit();
    step<UP>(arriving);
  }
  template <bool UP>
  __device__ __forceinline__ void step(Arriving<SOURCES>& arriving) const {
    arriving.next += UP ? 1 : -1;
#pragma unroll
    for (int k = 0; k < SOURCES; ++k) {
      if constexpr (UP) {
        arriving.paths[k].advance(sizes);
      } else {
        arriving.paths[k].retreat(sizes);
      }
    }
  }

  // So many vectors, from the first on.
  __device__ __forceinline__ void fill_first(Arriving<SOURCES>& arriving, int several) const {
#pragma unroll 1
    for (int i = 0; i < several; ++i) fill<true>(arriving, slot_of_vector(i, arriving.mirrored));
  }

  // To be called when the i-th vector was summed.
  __device__ __forceinline__ void release(Arriving<SOURCES>& arriving, int i) const {
    if (STREAMED > 0 && i >= HELD && i + STREAMED < vectors) {
      fill<true>(arriving, slot_of_vector(i, arriving.mirrored));
    } else {
      copy_async_commit();
    }
  }

  // Calls finish(i), then fill_again(i), for the vectors of a part from i down to `end`, which is not one of them.
  template <typename Finish, typename FillAgain>
  __device__ __forceinline__ void finish_down(int i, int end, const Finish& finish,
                                              const FillAgain& fill_again) const {
#pragma unroll 1
    for (; i > end; i -= 2) {
      if (STREAMED > 0 && i >= HELD) copy_async_wait<(STREAMED > 2 ? STREAMED - 2 : 0)>();
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (i - j > end) finish(i - j);
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (i - j > end) fill_again(i - j);
      }
    }
  }

  // Finishes a part, and fills its slots again: with what is to pass through once more, with what the next slab still
  // lacks, and where there is room with the beginning of the one after that, whose part is part_after. Returns that.
  template <typename Finish>
  __device__ __forceinline__ Arriving<SOURCES> finish_part(const Chunk& part, Arriving<SOURCES>& arriving,
                                                           Arriving<SOURCES>& ahead, const Chunk& part_after,
                                                           const Finish& finish) const {
    const auto slot_of = [&](int i) { return slot_of_vector(i, arriving.mirrored); };
    if constexpr (STREAMED > 0) {
      go_to(arriving, part, middle);
      finish_down(vectors - 1, SLOTS - 1, finish, [&](int i) { fill<false>(arriving, slot_of(i)); });
    }
    finish_down(min(vectors, SLOTS) - 1, free - 1, finish, [&](int i) { fill<true>(ahead, slot_of(i)); });
    if (STREAMED > 0 || free == 0) return begin(part_after, arriving.mirrored, first);
    Arriving<SOURCES> after = begin(part_after, arriving.mirrored, middle), down = after;
    finish_down(free - 1, -1, finish, [&](int i) { fill<false>(down, slot_of(i)); });
    step<true>(after);
    return after;
  }
};

// The vectors of a thread that stay in its registers. Those of the next slab come in as those of the last are finished,
// and are there when all in slots were summed.
template <int SOURCES>
struct Residents {
  const Source (&sources)[SOURCES];
  const long long (&sizes)[POINT_DIMS];
  Walk first;  // from the first of them on
  int count;   // that this thread has of the slab
  Vector<X_TYPE, VECTOR> values[SOURCES][RESIDENT > 0 ? RESIDENT : 1];

  // Behind so many vectors in slots.
  __device__ __forceinline__ Residents(const Source (&of)[SOURCES], const long long (&point_sizes)[POINT_DIMS],
                                       Chunk part, int vectors)
      : sources(of), sizes(point_sizes), count(0) {
    part.there = true;
    first = walk_over(part, sizes, vectors);
  }

  // Calls finish(i) for those that there are, and loads those of the next part.
  template <typename Finish>
  __device__ __forceinline__ void replace(const Chunk& next, const Finish& finish) {
    if constexpr (RESIDENT > 0) {
      Path paths[SOURCES];
#pragma unroll
      for (int k = 0; k < SOURCES; ++k) {
        const Source& source = sources[k];
        paths[k] = path_of(first, next, source.sample_stride, source.channel_stride, source.point_strides);
      }
      const int next_count = next.there ? first.left : 0;
#pragma unroll
      for (int i = 0; i < RESIDENT; ++i) {
        if (i < count) finish(i);
#pragma unroll
        for (int k = 0; k < SOURCES; ++k) {
          const X_TYPE* source = sources[k].memory + paths[k].offset(sources[k].point_strides);
          if (i < next_count) values[k][i] = load<X_TYPE, VECTOR>(source);
          paths[k].advance(sizes);
        }
      }
      count = next_count;
    }
  }

  // Calls use(i) for those that there are.
  template <typename Use>
  __device__ __forceinline__ void for_each(const Use& use) const {
    if constexpr (RESIDENT > 0) {
#pragma unroll
      for (int i = 0; i < RESIDENT; ++i) {
        if (i < count) use(i);
      }
    }
  }
};

// One of all slabs: some channels of a sample.
struct Slab {
  unsigned sample;
  unsigned tile;  // of the sample's channels
};

struct Group {
  long long first_slab;
  long long step;  // from one of its slabs to the next
  int blocks;
  int rank;
  unsigned samples;
  unsigned tiles;  // of a sample's channels
  long long channels;
  Chunk first;  // the block's part of the first slab

  __device__ __forceinline__ bool has(const Slab& slab) const { return slab.sample < samples; }
  // By divisions.
  __device__ __forceinline__ Slab slab_at(long long index) const {
    const unsigned place = static_cast<unsigned>(index);
    return {place / tiles, place % tiles};
  }
  // The slab that lies a `distance` behind. Without any, which would take as long as a few vectors in every turn.
  __device__ __forceinline__ Slab behind(const Slab& slab, const Slab& distance) const {
    Slab next = {slab.sample + distance.sample, slab.tile + distance.tile};
    if (next.tile >= tiles) {
      next.tile -= tiles;
      ++next.sample;
    }
    return next;
  }
  // The block's part of a slab. Of all slabs it has the same points.
  __device__ __forceinline__ Chunk part(const Slab& slab) const {
    Chunk part = first;
    part.sample = slab.sample;
    part.first_channel = static_cast<long long>(slab.tile) * TILE_CHANNELS;
    part.channel = part.first_channel + channel_in_tile(0);
    part.there = part.channel < channels && has(slab);
    return part;
  }
};

__device__ __forceinline__ Group group_of_block(long long slabs, long long blocks_per_slab, long long channels,
                                                long long points, long long points_per_block) {
  const unsigned tiles = static_cast<unsigned>((channels + TILE_CHANNELS - 1) / TILE_CHANNELS);
  const int blocks = static_cast<int>(blocks_per_slab), rank = static_cast<int>(blockIdx.x) % blocks;
  const unsigned group = blockIdx.x / blocks;
  return {group, gridDim.x / blocks, blocks, rank, static_cast<unsigned>(slabs) / tiles, tiles, channels,
          chunk_at(group, rank, channels, points, points_per_block)};
}

// ROWS numbers of each channel of a slab, on their way to shared memory. They are loaded before what comes in by
// cp.async, and stored behind it: who waited for them in between would wait for all of that, 1 to 4 us.
template <int ROWS>
struct ChannelNumbers {
  static constexpr int COUNT = (ROWS * TILE_CHANNELS + THREADS - 1) / THREADS;  // of a thread
  Compute numbers[COUNT];

  // What value(row, channel) gives.
  template <typename Value>
  __device__ __forceinline__ void load(const Group& group, const Slab& slab, const Value& value) {
#pragma unroll
    for (int k = 0; k < COUNT; ++k) {
      const int i = thread_in_block() + k * THREADS;
      const long long channel = static_cast<long long>(slab.tile) * TILE_CHANNELS + i % TILE_CHANNELS;
      const bool there = i < ROWS * TILE_CHANNELS && channel < group.channels && group.has(slab);
      numbers[k] = there ? value(i / TILE_CHANNELS, channel) : 0;
    }
  }

  // To ROWS rows of TILE_CHANNELS numbers, for all threads to see.
  __device__ __forceinline__ void store_in(Compute* shared) const {
#pragma unroll
    for (int k = 0; k < COUNT; ++k) {
      const int i = thread_in_block() + k * THREADS;
      if (i < ROWS * TILE_CHANNELS) shared[i] = numbers[k];
    }
    __syncthreads();
  }
};

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
      const long long* told = words + turn % 2 * step + block * PER_BLOCK;
      numbers[i] = await_number(told + (number * TILE_SETS + set) * WORDS, turn + 1);
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

  // Leaves those of every set of the tile in `sets`, whose fields they are.
  template <typename T>
  __device__ __forceinline__ void await_answers(T (&sets)[TILE_SETS], int turn) const {
    static_assert(sizeof(T) == COUNT * sizeof(Compute));
    for (int i = thread_in_block(); i < COUNT * TILE_SETS; i += THREADS) {
      Compute* fields = reinterpret_cast<Compute*>(sets + i % TILE_SETS);
      fields[i / TILE_SETS] = await_number(answers + turn % 2 * answer_step + i * WORDS, turn + 1);
    }
    __syncthreads();
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
