// Where L2 is asked to keep what is read longer than anything else: from sm_80 on, and as the plan has it (KEPT_IN_L2).
//
// What is read once is of no more use there, and yet a kernel that reads more than L2 holds, and writes as much, is
// quicker so: on an H200 rows of 34 to 268 MB take 0.97 of the time forward, a plain copy 0.96. What it writes then
// leaves L2 sooner. Nothing else does that: neither results that are the first to leave (evict_first, .cs, .wt), nor
// what is read (evict_first 1.03 to 1.05), nor longer sectors. What is left of x makes room for what others read more
// than once, not at the first time but at the second: a tensor of 32 MB that is read three times behind 268 MB of x
// takes 20.4, 18.3 and 13.6 microseconds, else 19.3, 14.4 and 13.6; what is read once behind it, and products of
// matrices, take as long as else. To let go of each line when it has been used (applypriority) costs as much as it
// saves.

// The policy that createpolicy.fractional.L2::evict_last makes for all that is read.
constexpr unsigned long long EVICT_LAST = 0x14F0000000000000;

#if !defined(CUNORM_EMULATOR) && __CUDA_ARCH__ >= 800
// The compiler's own way to say what loads from a pointer ask of L2: of CUDA 12.0 to 13.0 at least.
extern "C" __device__ void* __nv_associate_access_property(const void* pointer, unsigned long long property);
#endif

// The pointer, whose loads ask for it where they are KEPT. For loads alone: see keep_in_l2 for asynchronous copies.
template <bool KEPT, typename T>
__device__ __forceinline__ const T* kept_in_l2(const T* pointer) {
#if !defined(CUNORM_EMULATOR) && __CUDA_ARCH__ >= 800
  if constexpr (KEPT) return static_cast<const T*>(__nv_associate_access_property(pointer, EVICT_LAST));
#endif
  return pointer;
}

// Asks for it for the 128 bytes that a thread has just begun to copy its vector from, if it is KEPT; of eight threads
// with neighbouring vectors of 16 bytes one asks for all. With a policy of their own, ptxas makes illegal instructions
// of asynchronous copies whose address in shared memory has a part that is the same for the whole warp (CUDA 12.9 and
// 13.0). Before the copy it is of less use: rows of 4096 float16 numbers take 0.98 of the time backward, else 0.99.
template <bool KEPT, typename T>
__device__ __forceinline__ void keep_in_l2(const T* pointer) {
#if !defined(CUNORM_EMULATOR) && __CUDA_ARCH__ >= 800
  if (KEPT && threadIdx.x % 8 == 0) asm volatile("prefetch.global.L2::evict_last [%0];" ::"l"(pointer));
#endif
}
