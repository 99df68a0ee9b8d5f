// How the launches of a plan overlap ("programmatic dependent launch", compute capability 9.0 and later): every launch
// but the first may begin before the one before it has ended, so the time that it takes to begin is not waited for.
//
// A kernel that may be followed lets the next launch begin, at its very start. That happens once each of its blocks has
// said so or is done: the next launch takes no room from blocks that are still to come. A kernel that may follow waits,
// in every thread and before it touches any memory but its own. The wait ends when the launch before is complete and
// what it wrote can be seen. That one has waited likewise, also where it had already let this one begin: so all earlier
// launches are complete, and what they read may be written too. The first launch of a plan begins when all that was
// before it on the stream is complete; in it, as in any launch that does not ask for an overlap, the wait does nothing.
//
// What a plan is given is therefore complete before any of its launches begins: a kernel may read it before it waits,
// but write nothing, where no launch before it in the plan writes it. Where rows are claimed row_block_forward does, to
// have its rows on the way early: the launch before it only clears the counters of rows. So do row_weight_gradients,
// before which only dx is written; row_split_forward and row_split_backward, whose x, dy and weights no launch before
// them writes, but for x where there is a residual; and channel_split_forward and channel_split_backward.
//
// Launches whose blocks wait for each other, which are cooperative, do not begin early, whatever they are asked to: so
// they are the first of their plans.

// The next launch may begin; what this one writes, before or after, it will see when it has waited.
__device__ __forceinline__ void let_next_launch_begin() {
#if !defined(CUNORM_EMULATOR) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

__device__ __forceinline__ void wait_for_earlier_launches() {
#if !defined(CUNORM_EMULATOR) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// For a launch that reads what the one before has read: what that read last, which is still in the cache, comes first.
__device__ __forceinline__ unsigned block_from_the_end() { return gridDim.x - 1 - blockIdx.x; }
