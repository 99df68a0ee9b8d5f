// How a row, or a block's part of one, is cut into vectors.
//
// Where rows are PEELED, they begin anywhere. The vectors then begin where the result is aligned, at least PIECE
// columns from either end, and the columns beside them, the edges, go one to a thread. What lies in another way than
// the result (always the weights) is read as two aligned pieces: the margins keep that within the row.
constexpr int PIECE = 16 / sizeof(X_TYPE);  // elements in 16 bytes

struct Cut {
  int head;  // columns before the first vector; where PEELED, from PIECE to 2 * PIECE - 1
  int vectors;
  int columns;

  __device__ __forceinline__ int column(int vector) const { return (PEELED ? head : 0) + vector * VECTOR; }
  __device__ __forceinline__ int edges() const { return PEELED ? columns - vectors * VECTOR : 0; }
  __device__ __forceinline__ bool has_edge(int thread) const { return PEELED && thread < edges(); }
  __device__ __forceinline__ int edge_column(int thread) const {
    return thread < head ? thread : thread + vectors * VECTOR;
  }
};

// How far an address lies behind a multiple of 16 bytes, in elements.
__device__ __forceinline__ int shift_of(const X_TYPE* address) {
  return static_cast<int>(reinterpret_cast<size_t>(address) % 16 / sizeof(X_TYPE));
}

// The cut of so many columns, for vectors that are aligned in the row (of the result) that begins at `aligned`.
__device__ __forceinline__ Cut cut_of(const X_TYPE* aligned, int columns) {
  if constexpr (!PEELED) return {0, columns / VECTOR, columns};
  const int head = PIECE + (PIECE - shift_of(aligned)) % PIECE;
  return {head, max(0, columns - head - PIECE) / VECTOR, columns};
}
