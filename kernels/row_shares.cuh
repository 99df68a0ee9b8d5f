// Which rows a group of blocks takes, backward, where it adds up the sums of its columns over them.
//
// Where rows are PEELED, all that a thread adds up must begin in the same way, or its sums would be of other columns
// from row to row. With one class the plan sees to it that the step from one row to the next is whole vectors: the
// number of groups is then a multiple of the number of ways to begin, and clusters, of which there are few, would leave
// multiprocessors idle. They take CLASSES: every CLASSES-th row begins alike. The rows of the first class come first,
// then those of the second and so on. Of this order each group has an equal part, and of each class in it a share,
// which leaves a row of sums. Where a class ends just where the part of a group does, that has an empty share of the
// next one too, and leaves zeros: so there are always as many rows of sums as groups and further classes.
static_assert(CLASSES == 1 || ROWS_PER_BLOCK == 1);

struct Share {
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
