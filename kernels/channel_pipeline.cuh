// How the blocks of channel_pipeline_* share slabs (some channels of a sample with all their points) that lie
// along the channels, and none waits for another.
//
// All blocks run at the same time, a group of blocks_per_slab of them for every groups-th slab, of which a block has
// the same points each time (see pipeline.cuh). A thread has the same channels of every POINT_LANES-th point.
//
// Until a slab is finished, LAG turns after it was summed, three kinds of warps that have no slots see to its sums.
// Some tell what their block has of each set of channels. Of set s the block of rank s is the owner: one of its warps
// collects what all blocks tell, and answers what follows from that. And a warp of each block reads the answers. What
// is told are parcels that carry the number of the turn (see grid_words.cuh), so that it takes neither fence nor
// barrier. Each warp goes on at its own pace: what warps of a block have for each other is handed over in two places of
// shared memory in turns (see handover.cuh).
static_assert(ALONG_CHANNELS && PLANE == 1 && HOLDERS == THREADS);
static_assert(TILE_SETS * SET_LANES <= 32 * TELLING_WARPS);
constexpr int READING_WARP = WARPS + TELLING_WARPS, OWNING_WARP = READING_WARP + 1;
// Turns whose parcels are kept. A block that tells of a turn has read the answers of so many turns before, so their
// owners have read what was told then; and an owner that answers has seen all blocks tell of that turn, so all have
// read the answers of so many turns before.
constexpr int KEPT = LAG + 1;
constexpr int BLOCK_THREADS = 32 * (OWNING_WARP + 1);

// The rows of sums, which those of the working threads that have sums of a row fill for the telling warps; and
// statistics, which the reading warp fills for the working ones.
using PlacesOfSums = TwoPlaces<Mbarriers<SUM_ROWS * CHANNEL_LANES>, Mbarriers<32 * TELLING_WARPS>>;
using PlacesOfSets = TwoPlaces<Mbarriers<32>, WarpBarriers<1, THREADS, 32>>;

// That of a turn, of all slabs.
struct Slab {
  bool there;
  unsigned sample;
  unsigned tile;  // of the sample's channels
};

// Those of a group, one a turn.
struct Slabs {
  long long count;  // of all
  SharedPart part;

  __device__ __forceinline__ Slab operator[](int turn) const {
    const long long index = part.group + turn * part.groups;
    const bool there = turn >= 0 && index < count;
    const unsigned place = there ? static_cast<unsigned>(index) : 0;
    return {there, place / TILES, place % TILES};
  }
};

// How many vectors of a part of so many points are a thread's.
__device__ __forceinline__ int own_vectors_of(int points) {
  return threadIdx.x < THREADS ? (points + POINT_LANES - 1 - point_lane()) / POINT_LANES : 0;
}

// Where a tensor has a thread's numbers: its first channel of its first point.
struct Place {
  long long sample_stride;
  int step;  // from one of the thread's vectors to the next
  long long first;

  __device__ __forceinline__ Place(long long sample_stride, long long point_stride, const SharedPart& part)
      : sample_stride(sample_stride), step(static_cast<int>(POINT_LANES * point_stride)),
        first((part.first + point_lane()) * point_stride + channel_lane() * VECTOR) {}

  // Those of a slab. The next vectors of the thread follow `step` from one another.
  template <typename T>
  __device__ __forceinline__ T* of(T* tensor, const Slab& slab) const {
    T* numbers = tensor + first + slab.sample * sample_stride + static_cast<long long>(slab.tile) * TILE_CHANNELS;
    pin(numbers);
    return numbers;
  }
};

// A block's sums of a slab: COUNT numbers of every unit of neighbouring channels, of which a vector has UNITS, in rows
// that are still to be added up.
template <int COUNT, int UNITS>
struct PartialSums {
  static constexpr int ROW_UNITS = CHANNEL_LANES * UNITS;
  static constexpr int ROW = COUNT * ROW_UNITS;

  Compute* rows;

  // Some numbers, from the first on, of each unit of the thread's channels.
  template <int SEVERAL>
  __device__ __forceinline__ void put(int first, const Compute (&sums)[SEVERAL * UNITS]) const {
    if (!has_row_of_sums()) return;
#pragma unroll
    for (int i = 0; i < SEVERAL; ++i) {
      Vector<Compute, UNITS> of_number;
#pragma unroll
      for (int j = 0; j < UNITS; ++j) of_number.lane[j] = sums[i * UNITS + j];
      store(rows + row_of_sums() * ROW + (first + i) * ROW_UNITS + channel_lane() * UNITS, of_number);
    }
  }

  __device__ __forceinline__ Compute get(int row, int number, int unit) const {
    return rows[row * ROW + number * ROW_UNITS + unit];
  }
};

// The set that a thread of the telling warps sees to, with SET_LANES - 1 others.
__device__ __forceinline__ int told_set() { return (static_cast<int>(threadIdx.x) - THREADS) / SET_LANES; }
__device__ __forceinline__ int set_lane() { return (static_cast<int>(threadIdx.x) - THREADS) % SET_LANES; }

// How long a warp rests before it asks for a turn's parcels at all, which come about a turn after those that it had:
// what it asks for gets in the way of the others' parcels and numbers. Instance norm of 8 x 256 x 32^3 float16 numbers
// takes 1.47 of a copy's time without that on an H200, 1.44 with 500 ns and 1.42 with 1000; group norm backward of
// 8 x 128 x 256^2 1.50, 1.50 and 1.65. Two reading and two owning warps that take turns, and so ask more, took 1.00 to
// 1.09 of the time.
constexpr unsigned FIRST_REST_NS = 500;

// `count` parcels, every 32nd to a lane; in place of those that are not there zeros.
template <int SEVERAL>
__device__ __forceinline__ void await_parcels(Parcel (&parcels)[SEVERAL], const Parcel* first, int count,
                                              unsigned tag) {
  const int lane = threadIdx.x % 32;
  const Parcel* from = first + lane;
  pin(from);
  __nanosleep(FIRST_REST_NS);
  await_words(parcels, tag, [&](int i) { return lane + 32 * i < count; }, [&](int i) { return from + 32 * i; });
}

// Of those that a warp sees to, every 32nd to a lane.
constexpr int SETS_PER_LANE = (TILE_SETS + 31) / 32;

// What the blocks of a group tell each other of each set: COUNT numbers; and as many that its owner answers.
template <int COUNT>
struct SetParcels {
  static constexpr int TOLD = TILE_SETS * COLLECTED_PITCH;  // parcels of a turn

  Parcel* told;     // of the group: [KEPT][TILE_SETS][COLLECTED_PITCH]
  Parcel* answers;  // [KEPT][TILE_SETS]
  int rank;
  int blocks;

  __device__ __forceinline__ SetParcels(long long* words, const SharedPart& part)
      : told(reinterpret_cast<Parcel*>(words) + part.group * KEPT * (TOLD + TILE_SETS)), answers(told + KEPT * TOLD),
        rank(part.rank), blocks(part.blocks) {}

  __device__ __forceinline__ Parcel* told_of(int set, int turn) const {
    return told + turn % KEPT * TOLD + set * COLLECTED_PITCH;
  }
  __device__ __forceinline__ Parcel* answers_of(int turn) const { return answers + turn % KEPT * TILE_SETS; }

  __device__ __forceinline__ void tell(int set, const Compute (&numbers)[COUNT], int turn) const {
    store_word(told_of(set, turn) + rank, parcel_of(numbers, parcel_tag(turn)));
  }
  __device__ __forceinline__ void answer(int set, const Compute (&numbers)[COUNT], int turn) const {
    store_word(answers_of(turn) + set, parcel_of(numbers, parcel_tag(turn)));
  }

  // What the blocks have of a set, every 32nd block to a lane; of those that are not there zeros.
  __device__ __forceinline__ void await_told(Compute (&numbers)[PARTS_PER_LANE][COUNT], int set, int turn) const {
    Parcel parcels[PARTS_PER_LANE];
    await_parcels(parcels, told_of(set, turn), blocks, parcel_tag(turn));
#pragma unroll
    for (int i = 0; i < PARTS_PER_LANE; ++i) parcels[i].get(numbers[i]);
  }

  // When all have come, calls begin(), then use(set, numbers) for every 32nd set. What must be waited for to use them
  // belongs there: waited for before, it would keep the warp from asking meanwhile.
  template <typename Begin, typename Use>
  __device__ __forceinline__ void await_answers(int turn, const Begin& begin, const Use& use) const {
    const int lane = threadIdx.x % 32;
    Parcel parcels[SETS_PER_LANE];
    await_parcels(parcels, answers_of(turn), TILE_SETS, parcel_tag(turn));
    begin();
#pragma unroll
    for (int i = 0; i < SETS_PER_LANE; ++i) {
      Compute numbers[COUNT];
      parcels[i].get(numbers);
      if (lane + 32 * i < TILE_SETS) use(lane + 32 * i, numbers);
    }
  }
};
