// What the blocks that share rows, row_pipeline_*, row_stream_* and row_held_*, tell each other of those: COUNT numbers
// each, of EXCHANGES turns, three to a parcel (see grid_words.cuh). What asks for half as many things has them sooner,
// and is less in the way of others: instance norm backward of 64 channels of 128^3 float32 numbers takes 1.11 of the
// time of a copy on an H200, with a word of 8 bytes for each number 1.25.
template <int COUNT>
struct Exchange {
  static constexpr int PARCELS = (COUNT + 2) / 3;
  static constexpr int EACH = COUNT / PARCELS;  // numbers of a parcel
  static_assert(PARCELS * EACH == COUNT && sizeof(Compute) == 4);

  Parcel* parcels;  // of the group: [EXCHANGES][PARCELS][COLLECTED_PITCH]
  int rank;
  int blocks;

  __device__ __forceinline__ Exchange(long long* words, const SharedPart& part)
      : parcels(reinterpret_cast<Parcel*>(words) + part.group * EXCHANGES * PARCELS * COLLECTED_PITCH),
        rank(part.rank), blocks(part.blocks) {}

  __device__ __forceinline__ Parcel* of_turn(int turn) const {
    return parcels + turn % EXCHANGES * PARCELS * COLLECTED_PITCH;
  }

  // To be called by a warp whose lanes have the same numbers.
  __device__ __forceinline__ void tell(const Compute (&numbers)[COUNT], int turn) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < PARCELS; ++i) {
      Compute of_parcel[EACH];
#pragma unroll
      for (int j = 0; j < EACH; ++j) of_parcel[j] = numbers[i * EACH + j];
      if (lane == i) store_word(of_turn(turn) + i * COLLECTED_PITCH + rank, parcel_of(of_parcel, parcel_tag(turn)));
    }
  }

  // What the blocks have of a row, every 32nd block to a lane; of those that are not there zeros.
  __device__ __forceinline__ void await(Compute (&numbers)[PARTS_PER_LANE][COUNT], int turn) const {
    const int lane = threadIdx.x % 32;
    const Parcel* from = of_turn(turn) + lane;
    // Every place is a constant distance from the lane's first then. Instance norm of 2,097,152 float32 numbers takes
    // 1.40 of a copy's time on an H200 without this, with it 1.17.
    pin(from);
#pragma unroll
    for (int i = 0; i < PARCELS; ++i) {  // one after the other: there are no registers for all at once
      Parcel seen[PARTS_PER_LANE];
      await_words(
          seen, parcel_tag(turn), [&](int j) { return lane + 32 * j < blocks; },
          [&](int j) { return from + i * COLLECTED_PITCH + 32 * j; });
#pragma unroll
      for (int j = 0; j < PARTS_PER_LANE; ++j) {
        Compute of_parcel[EACH];
        seen[j].get(of_parcel);
#pragma unroll
        for (int k = 0; k < EACH; ++k) numbers[j][i * EACH + k] = of_parcel[k];
      }
    }
  }
};
