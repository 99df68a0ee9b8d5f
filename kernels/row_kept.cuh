// What a thread of row_block_backward keeps in registers over a turn, and where its code has branches so that ptxas has
// the registers: decided here, at compile time.

// The registers of a thread, of 4 bytes, and those that it holds over a turn: x, dy, sums, and weights that came early.
constexpr int SHARING_THREADS = BLOCK_THREADS * MIN_BLOCKS;
constexpr int REGISTERS = 65536 / SHARING_THREADS < 255 ? 65536 / SHARING_THREADS : 255;
constexpr int EARLY_BYTES =
    weights_come == Weights::early ? HAS_WEIGHT * sizeof(WEIGHT_TYPE) + HAS_BIAS * sizeof(BIAS_TYPE) : 0;
constexpr int SUM_BYTES = (WANTS_DWEIGHT + WANTS_DBIAS) * sizeof(Compute);
constexpr int HELD = VECTORS * VECTOR * (SUM_BYTES + 2 * sizeof(X_TYPE) + EARLY_BYTES) / 4;

// Whether vectors that are not there are skipped, by a branch for each. Else they are zeros, and one instruction
// follows another: ptxas then keeps the derivative of an activation from one pass for the next, if it has registers.
// Under silu 256, 1024 and 4096 columns of bfloat16 take 1.10, 1.04 and 1.10 so, else 1.43, 1.33 and 1.49; but on
// an H100 10,752, of which not all threads have 3 vectors, take 1.21 and 1.10 (under the exact gelu 1.17 and 1.35), and
// 100 of float32, read directly, 1.31 and 1.14. Peeled rows are always skipped, and without an activation rows that
// come ahead, whose branches are few: 4097 columns take 1.12, else 1.51.
constexpr int IN_PART = VECTORS - WHOLE_VECTORS;  // vectors that not every thread has
constexpr int ROOM = 44 + (ROWS_PER_BLOCK == 1 && IN_PART > 0 && activation != Activation::gelu ? 12 : 0);
constexpr bool KEEPS_DERIVATIVE = activation != Activation::none && !PEELED && IN_PART < 2 &&
                                  HELD + VECTORS * VECTOR + ROOM <= REGISTERS;
constexpr bool ZEROS_DIRECTLY = activation == Activation::none || sizeof(X_TYPE) == 2;
constexpr bool SKIPS = HAS_CHANNELS || !(stage == Stage::direct && !PEELED ? ZEROS_DIRECTLY : KEEPS_DERIVATIVE);

// Of so many of a thread's vectors dz is kept, in place of dy, where an activation's derivative would have to be made
// again for it (for silu two of the slow instructions of the special function unit, for each number): as many as there
// are registers for, beside what is held and others. With fewer, ptxas spills. Of channels, where 512 threads share a
// multiprocessor; else all or none. On an H100 4097 and 50,257 columns take 1.13 and 1.54 under silu so, else 1.18 and
// 1.82, and 1.18 and 1.71 under the exact gelu, else 1.58 and 2.48. Of float32, where it takes the registers of dy,
// all, where nothing spills so (500 columns take 1.43, else 1.17).
constexpr bool OF_CROSSING = weights_of == WeightsOf::crossing;
constexpr int OTHER_REGISTERS = activation == Activation::gelu  ? 72 + 16 * OF_CROSSING
                                : weights_of == WeightsOf::part ? 32
                                : OF_CROSSING                   ? 80
                                : HAS_CHANNELS                  ? 48
                                : PEELED                        ? 60
                                                                : 64;
constexpr int DZ_WORDS = sizeof(X_TYPE) == 2 ? VECTOR / 2 : 0;  // that dz takes more than dy
constexpr int registers_with(int kept) {
  return OTHER_REGISTERS + (HAS_CHANNELS ? VECTORS * VECTOR : HELD) + kept * DZ_WORDS;
}
constexpr int most_kept(int registers) {
  int kept = 0;
  while (kept < VECTORS && registers_with(kept + 1) <= registers) ++kept;
  return HAS_CHANNELS || kept == VECTORS ? kept : 0;
}
constexpr bool OF_FLOATS = sizeof(X_TYPE) == 4 && (PEELED ? !HAS_DRESIDUAL || VECTORS <= 5
                                                          : ROWS_PER_BLOCK == 1 || stage == Stage::direct);
constexpr bool KEEPS_DZ =
    activation != Activation::none && SKIPS && (sizeof(X_TYPE) == 2 || (OF_FLOATS && !HAS_CHANNELS));
constexpr int KEEPING_REGISTERS = HAS_CHANNELS ? 65536 / (SHARING_THREADS > 512 ? SHARING_THREADS : 512) : REGISTERS;
constexpr int KEPT = !KEEPS_DZ ? 0 : DZ_WORDS > 0 ? most_kept(KEEPING_REGISTERS) : VECTORS;

// Whether the means of the sums are divisions. Their branches keep ptxas from spilling where registers are few: 8192
// columns with a residual take 1.06 so, else 1.44. Elsewhere a product is as good, and less: 24,576, 3 vectors of a
// thread, take 1.07, else 1.13 (but 32,768, 4 vectors, 1.08 and 1.06). Under an activation they would part what ptxas
// keeps: 8192 columns take 1.09 under silu, else 1.49; on an H100 40,000 with a residual 1.08 and 1.15. But where dz is
// kept and fills the registers 20,000 take 1.12 so on an H100, else 1.20; and where x, dy and the sums fill them
// 262,144 1.94, else 2.55, since 368 bytes spill.
constexpr bool IS_LONG = !PEELED && VECTORS * VECTOR * sizeof(X_TYPE) > 48;
constexpr bool FILLS_REGISTERS = HELD * 5 / 4 + 40 + 12 * PEELED + 20 * HAS_DRESIDUAL > REGISTERS;
constexpr bool KEEPS_MOST = KEPT * DZ_WORDS > 0 && !PEELED && registers_with(KEPT) + 12 > REGISTERS;
constexpr bool IS_FULL = HELD + VECTORS * VECTOR >= REGISTERS;
constexpr int MOST_BY_PRODUCTS = PEELED && activation != Activation::none ? 4 : 5;  // else 8 bytes of bfloat16 spill
constexpr bool DIVIDES = HAS_CHANNELS                     ? VECTORS > MOST_BY_PRODUCTS
                         : activation == Activation::none ? IS_LONG || FILLS_REGISTERS
                                                          : KEEPS_MOST || IS_FULL;
