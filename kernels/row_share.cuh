// Which rows a group of blocks of row_block_backward takes, and adds up the sums of its columns over; and how the
// statistics of these rows come.
//
// Where rows are PEELED, all that a thread adds up must begin in the same way, or its sums would be of other columns
// from row to row. With one class the plan sees to it that the step from one row to the next is whole vectors: the
// number of groups is then a multiple of the number of ways to begin, and clusters, of which there are few, would leave
// multiprocessors idle. They take CLASSES: every CLASSES-th row begins alike. The rows of the first class come first,
// then those of the second and so on. Of this order each group has an equal part, and of each class in it a share,
// which leaves a row of sums. Where a class ends just where the part of a group does, that has an empty share of the
// next one too, and leaves zeros: so there are always as many rows of sums as groups and further classes.
struct Share {
  static_assert(CLASSES == 1 || ROWS_PER_BLOCK == 1);

  long long all_rows;
  int of_class;

  // The first row, one behind the last row, and how many rows lie between two.
  __device__ __forceinline__ long long first() const {
    if constexpr (CLASSES == 1) return group() * ROWS_PER_BLOCK;
    return of_class + (count() > 0 ? begin() - class_begins_at(of_class) : 0) * CLASSES;
  }
  __device__ __forceinline__ long long end() const {
    if constexpr (CLASSES == 1) return all_rows;
    return count() > 0 ? first() + (count() - 1) * CLASSES + 1 : first();
  }
  __device__ __forceinline__ long long step() const {
    return CLASSES > 1 ? CLASSES : static_cast<long long>(groups()) * ROWS_PER_BLOCK;
  }
  // Which of the rows of sums it leaves.
  __device__ __forceinline__ long long place() const { return group() + (CLASSES > 1 ? of_class : 0); }

  // Goes to the next share of the group; false where there is none.
  __device__ __forceinline__ bool advance() {
    const int next = of_class + 1;
    if (next >= CLASSES || class_begins_at(next) > part_begins_at(group() + 1)) return false;
    of_class = next;
    return true;
  }

  __device__ __forceinline__ static long long group() { return blockIdx.x / BLOCKS_PER_ROW; }
  __device__ __forceinline__ static unsigned groups() { return gridDim.x / BLOCKS_PER_ROW; }
  // Places in the order.
  __device__ __forceinline__ long long part_begins_at(long long which) const { return which * all_rows / groups(); }
  __device__ __forceinline__ long long class_begins_at(int which) const {
    const long long longer = all_rows % CLASSES;  // classes, which come first
    return which * (all_rows / CLASSES) + (which < longer ? which : longer);
  }
  __device__ __forceinline__ long long begin() const {
    return max(class_begins_at(of_class), part_begins_at(group()));
  }
  __device__ __forceinline__ long long count() const {
    return min(class_begins_at(of_class + 1), part_begins_at(group() + 1)) - begin();
  }
};

// The first share of this block's group.
__device__ __forceinline__ Share first_share_of(long long all_rows) {
  Share share = {all_rows, 0};
  while (share.of_class + 1 < CLASSES &&
         share.class_begins_at(share.of_class + 1) <= share.part_begins_at(share.group())) {
    ++share.of_class;
  }
  return share;
}

// The mean and rstd of rows. Where rows come ahead, those of TURNS turns come at once, one turn's to each of the
// threads that have the same row and warp, and those of the next TURNS are on their way. A load that is under way in
// every turn would share a scoreboard with others, and where ptxas waits for one of those, it would wait for memory:
// 4096 columns of float16 take 1.34 so, else 1.08.
struct StatisticsAhead {
  static constexpr int TURNS = THREADS_PER_ROW < 32 ? THREADS_PER_ROW : 32;

  const Compute* means;
  const Compute* rstds;
  long long end;  // before which the last row is
  long long step;
  Compute mean, rstd, next_mean, next_rstd;

  // Starts to load those of the turn's row, the first of a share, and of those that follow it.
  __device__ __forceinline__ void begin(int turn, long long row) {
    fetch(row - turn % TURNS * step);
    if (CLASSES == 1 || turn % TURNS == 0) return;
    mean = next_mean;
    rstd = next_rstd;
    fetch(row + (TURNS - turn % TURNS) * step);
  }

  // Starts to load those of the row, and of the TURNS - 1 that follow it.
  __device__ __forceinline__ void fetch(long long row) {
    if constexpr (stage == Stage::direct) return;
    load(row + threadIdx.x % TURNS * step, next_mean, next_rstd);
  }

  // Those of the turn's row: for turns from zero up, in all threads.
  __device__ __forceinline__ void get(int turn, long long row, Compute& row_mean, Compute& row_rstd) {
    if constexpr (stage == Stage::direct) return load(row, row_mean, row_rstd);
    if (turn % TURNS == 0) {
      mean = next_mean;
      rstd = next_rstd;
      fetch(row + TURNS * step);
    }
    row_mean = CENTERED ? __shfl_sync(0xffffffff, mean, turn % TURNS, TURNS) : 0;
    row_rstd = __shfl_sync(0xffffffff, rstd, turn % TURNS, TURNS);
  }

  __device__ __forceinline__ bool has(long long row) const { return row < end && (CLASSES == 1 || row >= 0); }
  __device__ __forceinline__ void load(long long row, Compute& row_mean, Compute& row_rstd) const {
    row_mean = CENTERED && has(row) ? means[row] : 0;
    row_rstd = has(row) ? rstds[row] : 0;
  }
};
