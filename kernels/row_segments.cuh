// Where a row has a column, of row_block_*: a row is one run of memory or, where it is SEGMENTED, as many as there are
// samples, a channel of batch norm. All rows and tensors have their segments equally far apart, and no vector reaches
// from one into the next.
constexpr bool SEGMENTED = SEGMENT_NUMBERS > 0;

#if SEGMENT_NUMBERS > 0
// Offsets within a row are less than 2^31, so that 32 bits do.
struct Segments {
  unsigned gap;  // what lies between the end of a segment and the next, in elements
  // column / columns of a segment is column * factor >> shift, as in row_channels.cuh.
  unsigned factor;
  int shift;

  __device__ __forceinline__ int offset_of(int column) const {
    const unsigned segment = static_cast<unsigned>(static_cast<unsigned long long>(column) * factor >> shift);
    return column + static_cast<int>(segment * gap);
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
  return {static_cast<unsigned>(arguments.segments[0]), static_cast<unsigned>(arguments.segments[1]),
          static_cast<int>(arguments.segments[2])};
#else
  return {};
#endif
}
