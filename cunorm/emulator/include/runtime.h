// What a kernel compiled for the CPU asks of the emulator: the one interface between the two halves of an executable.
//
// Above it stands cunorm_emulator.h, compiled with every kernel and therefore kept thin; below it runtime.cpp, compiled
// once. Both are compiled by the same compiler for the same machine, so plain types pass between them.
#pragma once

struct uint3 {
  unsigned x, y, z;
};

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

namespace cunorm_emulator {

// A line of the kernel's text. As a default argument, here() is evaluated where the function is called.
struct Site {
  const char* file;
  int line;
  static constexpr Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) { return {file, line}; }
};

// What a collective makes of the values that the threads bring. Integers are sign-extended to 64 bits.
enum class Combine { none, shuffle, ballot, any, all, count, add, min, max, bit_and, bit_or, bit_xor };

extern uint3 thread_index, block_index;
extern dim3 block_shape, grid_shape;

[[noreturn]] void fail(Site site, const char* format, ...);

// Lets other threads run. A loop that waits for memory to change must call it, or it never ends. sleep() also idles for
// a moment if there are none.
void yield();
void sleep();

// Waits for every thread of the block that has not exited.
unsigned block_barrier(const char* name, Combine combine, unsigned value, Site site);

// Waits for every lane in the mask; all must be at this line. `source` is the lane that a shuffle reads.
unsigned long long warp_collective(const char* name, Combine combine, unsigned mask, unsigned long long value,
                                   int source, Site site);
unsigned lane();
unsigned live_lanes();

// Memory of this block, made at the first call. `key` tells variables of one name apart.
void* static_shared(const char* name, unsigned long bytes, const void* key);
void* dynamic_shared();

// Clusters: `cluster` consecutive blocks that run together.
unsigned cluster_rank();
unsigned cluster_blocks();
void cluster_arrive(Site site);
void cluster_wait(Site site);
// The address in the shared memory of block `rank` that `address` has in this block's.
void* cluster_map(const void* address, unsigned rank, Site site);

// Cooperative launches, of which all blocks run together: one thread of each says that the block has come, and others
// wait until all have. Once in a launch.
void arrive_at_grid(Site site = Site::here());
void wait_for_grid();

// Copies to shared memory that arrive when the thread waits: until then there is what poison leaves. With a seed other
// than 0 half of them, at random, arrive at once: before another thread may have read what was there.
void copy_async(void* shared, const void* global, unsigned bytes, Site site = Site::here());
// The same, of which only the first `read` bytes are read; zeros follow.
void copy_async_first(void* shared, const void* global, unsigned bytes, unsigned read, Site site = Site::here());
void copy_async_commit();
void copy_async_wait(unsigned pending);

// Copies in bulk. What comes to shared memory arrives at a barrier, for the whole block: when a thread waits for that
// phase of it, not before, and must be as many bytes as were expected, which may be none. What leaves shared memory is
// read when the thread that has sent it waits, not before.
void bulk_begin(const void* barrier);
void bulk_expect(const void* barrier, unsigned bytes, Site site = Site::here());
void bulk_fetch(const void* barrier, void* shared, const void* global, unsigned bytes, Site site = Site::here());
void bulk_wait(const void* barrier, unsigned phase, Site site = Site::here());
void bulk_send(void* global, const void* shared, unsigned bytes, Site site = Site::here());
void bulk_wait_sent(unsigned pending);

unsigned long long clock();

// For accesses in the emulator's own headers, where a sanitizer would name the wrong line.
void check_aligned(const void* address, unsigned long alignment, Site site);

}  // namespace cunorm_emulator

// Defined by the kernel's text.
extern "C" void cunorm_emulator_kernel(const void* arguments);
extern "C" const unsigned long cunorm_emulator_arguments_bytes;
