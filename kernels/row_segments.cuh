// Where a row has a column, of row_block_*: a row is one run of memory or, where it is SEGMENTED, as many as there are
// samples, a channel of batch norm. All rows and tensors have their segments equally far apart, and no vector reaches
// from one into the next.
constexpr bool SEGMENTED = SEGMENT_NUMBERS > 0;

#if SEGMENT_NUMBERS > 0
// Offsets within a row are less than 2^31, so that 32 bits do.
struct Segments {
  unsigned gap;  // what lies between the end of a segment and the next, in elements
  Reciprocal by_columns;  // of a segment

  __device__ __forceinline__ int offset_of(int column) const {
    // Unsigned, also where no row has the column: nobody uses that.
    return static_cast<int>(column + by_columns.quotient_of(column) * gap);
  }
};
#else
struct Segments {
  __device__ __forceinline__ int offset_of(int column) const { return column; }
};
#endif

// From what a kernel is given.
template <typename KernelArguments>
__device__ __forceinline__ Segments segments_of(const KernelArguments& arguments) {
#if SEGMENT_NUMBERS > 0
  return {static_cast<unsigned>(arguments.segments[0]), reciprocal_in(arguments.segments[1])};
#else
  return {};
#endif
}
