// Where a row or a column lies in a tensor, for row_split_* and pointwise_*: its index is a mixed-radix number over the
// sizes of the dimensions that could not be merged.
template <int DIMS>
__device__ __forceinline__ long long offset_of(long long index, const long long (&sizes)[DIMS],
                                               const long long (&strides)[DIMS]) {
  long long offset = 0;
#pragma unroll
  for (int i = DIMS - 1; i > 0; --i) {
    offset += index % sizes[i] * strides[i];
    index /= sizes[i];
  }
  return offset + index * strides[0];
}
