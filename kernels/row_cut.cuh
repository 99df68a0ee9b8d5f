// How a row, or a block's part of one, is cut into vectors.
//
// Where rows are PEELED, they begin anywhere. The vectors then begin where the result is aligned, at least MARGIN
// columns from either end, and the columns beside them, the edges, go one to a thread at a time. What lies in another
// way than the result is read as two aligned pieces: a MARGIN of a piece keeps that within the row.
constexpr int PIECE = 16 / sizeof(X_TYPE);  // elements in 16 bytes
#ifndef MARGIN
constexpr int MARGIN = PIECE;
#endif
constexpr int MOST_EDGES = PEELED ? 2 * (MARGIN + PIECE - 1) : 0;

struct Cut {
  int head;  // columns before the first vector; where PEELED, from MARGIN to MARGIN + PIECE - 1
  int vectors;
  int columns;

  __device__ __forceinline__ int column(int vector) const { return (PEELED ? head : 0) + vector * VECTOR; }
  __device__ __forceinline__ int edges() const { return PEELED ? columns - vectors * VECTOR : 0; }
  __device__ __forceinline__ bool has_edge(int edge) const { return PEELED && edge < edges(); }
  __device__ __forceinline__ int edge_column(int edge) const { return edge < head ? edge : edge + vectors * VECTOR; }
};

// How far an address lies behind a multiple of 16 bytes, in elements.
__device__ __forceinline__ int shift_of(const X_TYPE* address) {
  return static_cast<int>(reinterpret_cast<size_t>(address) % 16 / sizeof(X_TYPE));
}

// The cut of so many columns, for vectors that are aligned in the row (of the result) that begins at `aligned`.
__device__ __forceinline__ Cut cut_of(const X_TYPE* aligned, int columns) {
  if constexpr (!PEELED) return {0, columns / VECTOR, columns};
  const int head = MARGIN + (PIECE - shift_of(aligned)) % PIECE;
  return {head, max(0, columns - head - MARGIN) / VECTOR, columns};
}
