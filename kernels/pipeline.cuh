// What row_pipeline_* and channel_pipeline_* have in common: many parts, one a turn, that each block takes through
// shared memory, and that are finished LAG turns after they were summed, so that nobody waits for what blocks tell each
// other meanwhile.
//
// The parts of AHEAD turns lie in shared memory, or are on their way there: a slot is a vector, of which each of the
// THREADS working threads has RESIDENT in each part. A slot belongs to one thread, which fills it again as soon as it
// has stored what became of it.
static_assert(LAG >= 1 && LAG < AHEAD);
constexpr int WARPS = THREADS / 32;              // that sum and finish
constexpr int STEP = THREADS * VECTOR;           // elements from one slot of a thread to its next
constexpr int STAGED = AHEAD * RESIDENT * STEP;  // elements of a tensor in shared memory
// Slots of a thread that are under way when a part is summed: LAG parts fewer than lie here. Each is filled in a group
// of its own, in order.
constexpr int UNDER_WAY = (AHEAD - LAG) * RESIDENT;

// A thread's first slot of a turn's part, in the slots of a tensor.
__device__ __forceinline__ X_TYPE* slots_of(X_TYPE* staged, int turn) {
  return pinned_shared(staged + turn % AHEAD * RESIDENT * STEP + static_cast<int>(threadIdx.x) * VECTOR);
}
