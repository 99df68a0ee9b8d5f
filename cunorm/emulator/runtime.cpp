// Runs one launch of a kernel on the CPU: every CUDA thread is a fiber, and one fiber runs at a time.
//
// A fiber runs until it waits (at a barrier, a warp primitive, an atomic), then a random one that can go on does. So a
// result that depends on an order which CUDA does not promise differs from seed to seed. This file is compiled without
// sanitizers: it switches stacks behind their back, and tells AddressSanitizer of each switch.
#include "runtime.h"

#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <unistd.h>

#include <string>
#include <vector>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace cunorm_emulator {
namespace {

constexpr size_t STACK_BYTES = 256 * 1024;  // touched pages only; a sanitizer's report needs some of it too
constexpr size_t PAGE_BYTES = 64 * 1024;    // a multiple of the page size of every machine
constexpr size_t ALIGNMENT = 256;           // of cudaMalloc
constexpr int WARP = 32;

// ---- Switching stacks -----------------------------------------------------------------------------------------------

#if defined(__x86_64__)
extern "C" void cunorm_emulator_switch(void** save, void* load);
asm(R"(
.text
.globl cunorm_emulator_switch
.type cunorm_emulator_switch, @function
cunorm_emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size cunorm_emulator_switch, .-cunorm_emulator_switch
)");

struct Context {
  void* stack_pointer = nullptr;
  void prepare(char* stack, void (*entry)()) {
    void** top = reinterpret_cast<void**>(stack + STACK_BYTES) - 2;
    top[0] = reinterpret_cast<void*>(entry);  // where the first switch returns to
    top[1] = nullptr;                         // and there a stack trace ends
    stack_pointer = top - 6;
    memset(stack_pointer, 0, 6 * sizeof(void*));
  }
  void switch_to(const Context& next) { cunorm_emulator_switch(&stack_pointer, next.stack_pointer); }
};
#else
// AddressSanitizer forgets a stack's layout at each swapcontext: past a barrier, overruns of local arrays pass unseen.
struct Context {
  ucontext_t context;
  void prepare(char* stack, void (*entry)()) {
    getcontext(&context);
    context.uc_stack.ss_sp = stack;
    context.uc_stack.ss_size = STACK_BYTES;
    context.uc_link = nullptr;
    makecontext(&context, entry, 0);
  }
  void switch_to(const Context& next) { swapcontext(&context, &next.context); }
};
#endif

// ---- What there is --------------------------------------------------------------------------------------------------

struct SharedVariable {
  std::string name;
  const void* key;  // null: the dynamic one
  char* data;
  size_t bytes;
};

struct Barrier {
  const char* name = nullptr;
  Site site = {nullptr, 0};
  unsigned arrived = 0, count = 0, result = 0;
};

struct Cluster {
  unsigned arrived = 0, alive = 0, phase = 0;
};

struct BulkCopy {
  void* target;
  const void* source;
  unsigned bytes;
};

// Where what is fetched in bulk arrives.
struct BulkBarrier {
  const void* address;
  unsigned ended;  // phases
  bool expects;    // in the phase that has not ended
  unsigned expected_bytes;
  std::vector<BulkCopy> under_way;
};

struct Fiber;

struct Block {
  uint3 index;
  Cluster* cluster;
  unsigned rank;
  Fiber* fibers;
  unsigned alive;
  Barrier barrier;
  std::vector<SharedVariable> shared;
  std::vector<BulkBarrier> bulk_barriers;
};

enum class State { ready, at_block_barrier, at_warp_collective, at_cluster_barrier, exited };

struct AsyncCopy {
  unsigned group;
  void* shared;
  const void* global;
  unsigned bytes;
  unsigned read;  // of them; zeros follow
};

struct Fiber {
  Context context;
  char* stack;
  void* fake_stack;
  Block* block;
  uint3 index;
  unsigned linear;
  State state;
  // What it waits at, and what it brings there and takes away.
  const char* name;
  Site site;
  Combine combine;
  unsigned mask;
  uint64_t value, result;
  int source;
  unsigned copy_groups;  // of asynchronous copies that it has committed
  std::vector<AsyncCopy> copies_under_way;
  std::vector<BulkCopy> sent_in_bulk;
  bool arrived_at_cluster;
  unsigned cluster_phase;
};

struct Buffer {
  char* data;
  size_t bytes;
};

struct Job {
  uint64_t grid[3], block[3], shared_bytes, seed, cluster, cooperative, timeout_ms;
  uint64_t watched_buffer, watched_offset, watched_bytes;  // no bytes: nothing is watched
  uint64_t fields, buffers;
};

Job job;
std::vector<Buffer> buffers;
std::vector<uint64_t> arguments;
std::vector<Fiber> fibers;
std::vector<Fiber*> ready;
Fiber* current = nullptr;

uint64_t arrived_blocks = 0;  // of a cooperative launch

Fiber main_fiber;  // only its context is used
const void* main_stack = nullptr;
size_t main_stack_bytes = 0;
unsigned threads_per_block;
uint64_t random_state;

uint64_t random_below(uint64_t end) {  // splitmix64
  uint64_t z = (random_state += 0x9e3779b97f4a7c15u);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return (z ^ (z >> 31)) % end;
}

// ---- Reports --------------------------------------------------------------------------------------------------------

std::string text(const char* format, ...) {
  char line[512];
  va_list list;
  va_start(list, format);
  vsnprintf(line, sizeof line, format, list);
  va_end(list);
  return line;
}

std::string place_of(const Fiber& fiber) {
  const uint3 b = fiber.block->index, t = fiber.index;
  return text("block (%u, %u, %u), thread (%u, %u, %u)", b.x, b.y, b.z, t.x, t.y, t.z);
}

void print_place() {
  if (current != nullptr) fprintf(stderr, "cunorm-emulator-place: %s\n", place_of(*current).c_str());
}

std::string describe(const Fiber& fiber) {
  const std::string who = text("thread (%u, %u, %u)", fiber.index.x, fiber.index.y, fiber.index.z);
  switch (fiber.state) {
    case State::ready: return who + " has not arrived anywhere";
    case State::exited: return who + " has exited";
    default: break;
  }
  const std::string waits = who + text(" waits at %s, %s:%d", fiber.name, fiber.site.file, fiber.site.line);
  return fiber.state == State::at_warp_collective ? waits + text(" with mask 0x%08x", fiber.mask) : waits;
}

std::string lane_list(unsigned lanes) {
  std::string list = __builtin_popcount(lanes) == 1 ? "lane" : "lanes";
  const char* separator = " ";
  for (int first = 0; first < WARP; ++first) {
    if (!(lanes >> first & 1)) continue;
    int last = first;
    while (last + 1 < WARP && lanes >> (last + 1) & 1) ++last;
    list += first == last ? text("%s%d", separator, first) : text("%s%d-%d", separator, first, last);
    separator = ", ";
    first = last;
  }
  return list;
}

// Which buffer or shared variable an address that a sanitizer complains about belongs to.
void print_memory(uintptr_t address) {
  constexpr uintptr_t NEAR = 4096;
  std::string best;
  uintptr_t distance = NEAR + 1;
  const auto consider = [&](const std::string& name, const char* data, size_t bytes) {
    const uintptr_t begin = reinterpret_cast<uintptr_t>(data), end = begin + bytes;
    const uintptr_t away = address < begin ? begin - address : address >= end ? address - end : 0;
    if (away >= distance) return;
    distance = away;
    best = text("byte %lld of %s (%zu bytes)", static_cast<long long>(address - begin), name.c_str(), bytes);
  };
  for (size_t i = 0; i < buffers.size(); ++i) consider(text("buffer %zu", i), buffers[i].data, buffers[i].bytes);
  if (current != nullptr) {
    for (const SharedVariable& variable : current->block->shared) {
      const std::string name = variable.key == nullptr ? "dynamic" : "'" + variable.name + "'";
      consider(name + " __shared__ memory", variable.data, variable.bytes);
    }
  }
  if (!best.empty()) fprintf(stderr, "cunorm-emulator-memory: %s\n", best.c_str());
}

void on_abort(int) {  // the sanitizers abort after their report
  print_place();
  if (__asan_report_present()) print_memory(reinterpret_cast<uintptr_t>(__asan_get_report_address()));
  fflush(stdout);
  _exit(3);
}

void on_timeout(int) {
  fprintf(stderr, "cunorm-emulator: still running after %.3g s\n", job.timeout_ms / 1e3);
  print_place();
  __sanitizer_print_stack_trace();
  _exit(4);
}

// ---- Who wrote the watched bytes: after each turn of a thread, whether they are what they were before it --------------

const char* watched = nullptr;
std::string watched_before;
std::string writer;

void begin_watching() {
  if (job.watched_bytes == 0) return;
  watched = buffers[job.watched_buffer].data + job.watched_offset;
  watched_before.assign(watched, job.watched_bytes);
}

void look_at_watched() {
  if (watched == nullptr || memcmp(watched, watched_before.data(), job.watched_bytes) == 0) return;
  watched_before.assign(watched, job.watched_bytes);
  writer = place_of(*current);
}

// ---- The scheduler --------------------------------------------------------------------------------------------------

void enter(Fiber* next) {
  current = next;
  thread_index = next->index;
  block_index = next->block->index;
}

void switch_fiber(Fiber* from, Fiber* to, bool from_ends) {
  const bool to_main = to == &main_fiber;
  __sanitizer_start_switch_fiber(from_ends ? nullptr : &from->fake_stack, to_main ? main_stack : to->stack,
                                 to_main ? main_stack_bytes : STACK_BYTES);
  from->context.switch_to(to->context);
  __sanitizer_finish_switch_fiber(from->fake_stack, nullptr, nullptr);
}

Fiber* take_ready() {
  if (ready.empty()) return nullptr;
  std::swap(ready[random_below(ready.size())], ready.back());
  Fiber* fiber = ready.back();
  ready.pop_back();
  return fiber;
}

void make_ready(Fiber* fiber) {
  fiber->state = State::ready;
  ready.push_back(fiber);
}

Fiber* lane_of(const Fiber* fiber, int lane) {  // null past the end of the block
  const unsigned linear = fiber->linear / WARP * WARP + lane;
  return linear < threads_per_block ? &fiber->block->fibers[linear] : nullptr;
}

bool same_place(const Fiber& a, const Fiber& b) {
  return a.state == b.state && a.name == b.name && a.mask == b.mask && a.site.line == b.site.line &&
         strcmp(a.site.file, b.site.file) == 0;
}

// Nobody can go on: says of one waiting thread whom it waits for.
[[noreturn]] void report_deadlock() {
  for (Fiber& fiber : fibers) {  // a warp's trouble is the more exact one: a barrier often only waits for that warp
    if (fiber.state != State::at_warp_collective) continue;
    current = &fiber;
    std::string others;
    unsigned missing = 0;
    for (int lane = 0; lane < WARP; ++lane) {
      if (!(fiber.mask >> lane & 1)) continue;
      const Fiber* other = lane_of(&fiber, lane);
      if (other == nullptr || same_place(*other, fiber)) continue;
      missing |= 1u << lane;
      if (__builtin_popcount(missing) <= 4) others += "; " + describe(*other);
    }
    fail(fiber.site, "deadlock: %s with mask 0x%08x in warp %u of the block waits for %s%s", fiber.name, fiber.mask,
         fiber.linear / WARP, lane_list(missing).c_str(), others.c_str());
  }
  for (Fiber& fiber : fibers) {
    if (fiber.state == State::exited) continue;
    current = &fiber;
    for (const Fiber& other : fibers) {
      if (other.state == fiber.state || other.state == State::exited) continue;
      fail(fiber.site, "deadlock: %s; %s", describe(fiber).c_str(), describe(other).c_str());
    }
    fail(fiber.site, "deadlock: %s", describe(fiber).c_str());
  }
  fail({"", 0}, "deadlock");
}

void suspend() {
  look_at_watched();
  Fiber* from = current;
  Fiber* next = take_ready();
  if (next == nullptr) report_deadlock();
  if (next == from) return;
  enter(next);
  switch_fiber(from, next, false);
}

void complete_block_barrier(Block* block) {
  Barrier& barrier = block->barrier;
  if (barrier.arrived == 0 || barrier.arrived < block->alive) return;
  for (unsigned i = 0; i < threads_per_block; ++i) {
    Fiber* fiber = &block->fibers[i];
    if (fiber->state != State::at_block_barrier) continue;
    fiber->result = barrier.result;
    make_ready(fiber);
  }
  barrier = Barrier();
}

void complete_cluster_barrier(Cluster* cluster) {
  if (cluster->arrived == 0 || cluster->arrived < cluster->alive) return;
  cluster->arrived = 0;
  ++cluster->phase;
  for (Fiber& fiber : fibers) {
    if (fiber.state == State::at_cluster_barrier && fiber.block->cluster == cluster) make_ready(&fiber);
  }
}

uint64_t combined(Combine combine, bool first, uint64_t total, uint64_t value, int lane) {
  const bool less = static_cast<int64_t>(value) < static_cast<int64_t>(total);
  switch (combine) {
    case Combine::ballot: return total | uint64_t{value != 0} << lane;
    case Combine::any: return total | (value != 0);
    case Combine::all: return first ? value != 0 : total & (value != 0);
    case Combine::add: return total + value;
    case Combine::min: return first || less ? value : total;
    case Combine::max: return first || !less ? value : total;
    case Combine::bit_and: return first ? value : total & value;
    case Combine::bit_or: return total | value;
    case Combine::bit_xor: return total ^ value;
    default: return 0;
  }
}

// Lets the lanes go on that wait together with `fiber`, if they are all there.
void complete_warp_collective(Fiber* fiber) {
  Fiber* lanes[WARP];
  for (int i = 0; i < WARP; ++i) {
    lanes[i] = fiber->mask >> i & 1 ? lane_of(fiber, i) : nullptr;
    // __syncwarp() counts exited lanes as arrived, as the barriers do; a value cannot come from them.
    if (lanes[i] != nullptr && lanes[i]->state == State::exited && fiber->combine == Combine::none) lanes[i] = nullptr;
    if (lanes[i] != nullptr && !same_place(*lanes[i], *fiber)) return;
  }
  uint64_t total = 0;
  bool first = true;
  for (int i = 0; i < WARP; ++i) {
    if (lanes[i] == nullptr) continue;
    total = combined(fiber->combine, first, total, lanes[i]->value, i);
    first = false;
  }
  const bool shuffles = fiber->combine == Combine::shuffle;
  for (Fiber* lane : lanes) {
    if (lane == nullptr) continue;
    lane->result = shuffles ? lanes[lane->source]->value : total;
    make_ready(lane);
  }
}

char* allocate(size_t bytes) {
  void* data = nullptr;
  if (posix_memalign(&data, ALIGNMENT, bytes) != 0) fail({"", 0}, "cannot allocate %zu bytes", bytes);
  return static_cast<char*>(data);
}

SharedVariable& add_shared(Block* block, const char* name, const void* key, size_t bytes) {
  block->shared.push_back({name, key, allocate(bytes), bytes});
  memset(block->shared.back().data, 0xff, bytes);  // NaN in every floating-point type
  return block->shared.back();
}

SharedVariable& find_shared(Block* block, const char* name, const void* key, size_t bytes) {
  for (SharedVariable& variable : block->shared) {
    if (variable.key == key) return variable;
  }
  return add_shared(block, name, key, bytes);
}

[[noreturn]] void fiber_main() {
  __sanitizer_finish_switch_fiber(nullptr, main_stack == nullptr ? &main_stack : nullptr,
                                  main_stack_bytes == 0 ? &main_stack_bytes : nullptr);
  cunorm_emulator_kernel(arguments.data());
  look_at_watched();
  Fiber* self = current;
  if (self->arrived_at_cluster) fail({"", 0}, "a thread exits between cluster arrive and cluster wait");
  if (!self->copies_under_way.empty() || !self->sent_in_bulk.empty()) {
    fail({"", 0}, "the thread ends with asynchronous copies that it did not wait for");
  }
  self->state = State::exited;
  Block* block = self->block;
  --block->alive;
  --block->cluster->alive;
  if (block->alive == 0) {
    for (const BulkBarrier& barrier : block->bulk_barriers) {
      if (!barrier.under_way.empty()) fail({"", 0}, "the block ends with copies in bulk that it did not wait for");
    }
    // Freed, not kept for the next block: another block of the cluster that still reads it is in error.
    for (SharedVariable& variable : block->shared) free(variable.data);
    block->shared.clear();
  }
  complete_block_barrier(block);
  complete_cluster_barrier(block->cluster);
  for (int i = 0; i < WARP; ++i) {
    Fiber* other = lane_of(self, i);
    if (other == nullptr || other->state != State::at_warp_collective) continue;
    if (other->combine == Combine::none) complete_warp_collective(other);
  }
  Fiber* next = take_ready();
  if (next == nullptr) {
    for (const Fiber& fiber : fibers) {
      if (fiber.state != State::exited) report_deadlock();
    }
    next = &main_fiber;
    current = nullptr;
  } else {
    enter(next);
  }
  switch_fiber(self, next, true);
  __builtin_unreachable();
}

// Blocks [first, first + count) in the order of blockIdx, all at once.
void run_blocks(uint64_t first, uint64_t count) {
  std::vector<Block> blocks(count);
  std::vector<Cluster> clusters((count + job.cluster - 1) / job.cluster);
  for (uint64_t b = 0; b < count; ++b) {
    const uint64_t linear = first + b;
    Block& block = blocks[b];
    block.index = {static_cast<unsigned>(linear % job.grid[0]),
                   static_cast<unsigned>(linear / job.grid[0] % job.grid[1]),
                   static_cast<unsigned>(linear / job.grid[0] / job.grid[1])};
    block.cluster = &clusters[b / job.cluster];
    block.rank = static_cast<unsigned>(b % job.cluster);
    block.fibers = &fibers[b * threads_per_block];
    block.alive = threads_per_block;
    block.cluster->alive += threads_per_block;
    add_shared(&block, "dynamic", nullptr, job.shared_bytes);
    for (unsigned t = 0; t < threads_per_block; ++t) {
      Fiber& fiber = block.fibers[t];
      fiber.block = &block;
      fiber.linear = t;
      fiber.index = {static_cast<unsigned>(t % job.block[0]), static_cast<unsigned>(t / job.block[0] % job.block[1]),
                     static_cast<unsigned>(t / job.block[0] / job.block[1])};
      fiber.fake_stack = nullptr;
      fiber.arrived_at_cluster = false;
      fiber.copy_groups = 0;
      fiber.context.prepare(fiber.stack, fiber_main);
      make_ready(&fiber);
    }
  }
  Fiber* next = take_ready();
  enter(next);
  switch_fiber(&main_fiber, next, false);
}

void run_grid() {
  const uint64_t blocks = job.grid[0] * job.grid[1] * job.grid[2];
  const uint64_t together = job.cooperative ? blocks : job.cluster;
  threads_per_block = static_cast<unsigned>(job.block[0] * job.block[1] * job.block[2]);
  fibers.resize(together * threads_per_block);
  const size_t stride = STACK_BYTES + PAGE_BYTES;
  void* stacks = mmap(nullptr, fibers.size() * stride, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (stacks == MAP_FAILED) fail({"", 0}, "cannot allocate the stacks of %zu threads", fibers.size());
  for (size_t i = 0; i < fibers.size(); ++i) {
    char* base = static_cast<char*>(stacks) + i * stride;
    mprotect(base, PAGE_BYTES, PROT_NONE);  // best effort: the kernel limits how many there may be
    fibers[i].stack = base + PAGE_BYTES;
  }
  std::vector<uint64_t> order(blocks / together);
  for (size_t i = 0; i < order.size(); ++i) {
    order[i] = i;
    std::swap(order[i], order[random_below(i + 1)]);
  }
  for (const uint64_t i : order) run_blocks(i * together, together);
}

// ---- The job --------------------------------------------------------------------------------------------------------

void read_exactly(FILE* file, void* data, size_t bytes) {
  if (fread(data, 1, bytes, file) != bytes) fail({"", 0}, "the job file is too short");
}

// The file holds the Job; three words a field (kind, buffer, value); the bytes of each buffer; the buffers.
void read_job(const char* path) {
  FILE* file = fopen(path, "rb");
  if (file == nullptr) fail({"", 0}, "cannot open the job file");
  read_exactly(file, &job, sizeof job);
  std::vector<uint64_t> fields(3 * job.fields), sizes(job.buffers);
  read_exactly(file, fields.data(), fields.size() * sizeof(uint64_t));
  read_exactly(file, sizes.data(), sizes.size() * sizeof(uint64_t));
  for (const uint64_t bytes : sizes) {
    buffers.push_back({allocate(bytes), bytes});
    read_exactly(file, buffers.back().data, bytes);
  }
  fclose(file);
  for (size_t i = 0; i < job.fields; ++i) {
    const uint64_t base = fields[3 * i] ? reinterpret_cast<uint64_t>(buffers[fields[3 * i + 1]].data) : 0;
    arguments.push_back(base + fields[3 * i + 2]);
  }
  if (arguments.size() * sizeof(uint64_t) != cunorm_emulator_arguments_bytes) {
    fail({"", 0}, "struct Arguments has %lu bytes, but %zu fields of 8 bytes were given",
         cunorm_emulator_arguments_bytes, arguments.size());
  }
  random_state = job.seed;
  block_shape = dim3(job.block[0], job.block[1], job.block[2]);
  grid_shape = dim3(job.grid[0], job.grid[1], job.grid[2]);
}

void write_result(const char* path) {
  FILE* file = fopen(path, "wb");
  if (file == nullptr) fail({"", 0}, "cannot open the result file");
  for (const Buffer& buffer : buffers) {
    if (fwrite(buffer.data, 1, buffer.bytes, file) != buffer.bytes) fail({"", 0}, "cannot write the result");
  }
  if (fclose(file) != 0) fail({"", 0}, "cannot write the result");
}

}  // namespace

// ---- What the kernel calls ------------------------------------------------------------------------------------------

uint3 thread_index, block_index;
dim3 block_shape, grid_shape;

void fail(Site site, const char* format, ...) {
  va_list list;
  va_start(list, format);
  fprintf(stderr, "cunorm-emulator: ");
  vfprintf(stderr, format, list);
  fprintf(stderr, "\n");
  va_end(list);
  print_place();
  if (site.line != 0) fprintf(stderr, "cunorm-emulator-line: %s:%d\n", site.file, site.line);
  fflush(stdout);
  _exit(3);
}

void yield() {
  ready.push_back(current);
  suspend();
}

void sleep() {
  if (ready.empty()) usleep(1000);  // a loop that waits for nobody should not burn a core until the timeout
  yield();
}

void arrive_at_grid(Site site) {
  if (!job.cooperative) fail(site, "blocks wait for each other in a launch that is not cooperative");
  ++arrived_blocks;
}

void wait_for_grid() {
  while (arrived_blocks < job.grid[0] * job.grid[1] * job.grid[2]) yield();
}

unsigned block_barrier(const char* name, Combine combine, unsigned value, Site site) {
  Fiber* self = current;
  Barrier& barrier = self->block->barrier;
  if (barrier.arrived != 0 && (barrier.site.line != site.line || strcmp(barrier.site.file, site.file) != 0)) {
    const Fiber* other = self->block->fibers;
    while (other->state != State::at_block_barrier) ++other;
    fail(site, "divergent barrier: %s, %s:%d, while %s", name, site.file, site.line, describe(*other).c_str());
  }
  self->state = State::at_block_barrier;
  self->name = name;
  self->site = site;
  barrier.name = name;
  barrier.site = site;
  const unsigned one = value != 0;
  switch (combine) {
    case Combine::any: barrier.result |= one; break;
    case Combine::all: barrier.result = barrier.arrived == 0 ? one : barrier.result & one; break;
    case Combine::count: barrier.result += one; break;
    default: break;
  }
  ++barrier.arrived;
  complete_block_barrier(self->block);
  suspend();
  return static_cast<unsigned>(self->result);
}

unsigned lane() { return current->linear % WARP; }

unsigned live_lanes() {
  unsigned lanes = 0;
  for (int i = 0; i < WARP; ++i) {
    const Fiber* fiber = lane_of(current, i);
    if (fiber != nullptr && fiber->state != State::exited) lanes |= 1u << i;
  }
  return lanes;
}

unsigned long long warp_collective(const char* name, Combine combine, unsigned mask, unsigned long long value,
                                   int source, Site site) {
  Fiber* self = current;
  const unsigned warp = self->linear / WARP;
  if (!(mask >> lane() & 1)) {
    fail(site, "%s in warp %u: mask 0x%08x does not name its caller, lane %u", name, warp, mask, lane());
  }
  const unsigned absent = mask & ~live_lanes();
  if (absent != 0 && combine != Combine::none) {
    fail(site, "%s in warp %u: mask 0x%08x names %s, which exited or never existed", name, warp, mask,
         lane_list(absent).c_str());
  }
  if (combine == Combine::shuffle && !(mask >> source & 1)) {
    fail(site, "%s in warp %u: lane %u reads lane %d, which mask 0x%08x does not name", name, warp, lane(), source,
         mask);
  }
  self->state = State::at_warp_collective;
  self->name = name;
  self->site = site;
  self->combine = combine;
  self->mask = mask;
  self->value = value;
  self->source = source;
  complete_warp_collective(self);
  suspend();
  return self->result;
}

void* static_shared(const char* name, unsigned long bytes, const void* key) {
  return find_shared(current->block, name, key, bytes).data;
}

void* dynamic_shared() {
  if (current == nullptr) fail({"", 0}, "declare `extern __shared__` memory inside the kernel, not at file scope");
  return find_shared(current->block, "dynamic", nullptr, job.shared_bytes).data;
}

unsigned cluster_rank() { return current->block->rank; }
unsigned cluster_blocks() { return static_cast<unsigned>(job.cluster); }

void cluster_arrive(Site site) {
  Fiber* self = current;
  if (self->arrived_at_cluster) fail(site, "cluster arrive twice without a wait between");
  self->arrived_at_cluster = true;
  self->cluster_phase = self->block->cluster->phase;
  ++self->block->cluster->arrived;
  complete_cluster_barrier(self->block->cluster);
}

void cluster_wait(Site site) {
  Fiber* self = current;
  if (!self->arrived_at_cluster) fail(site, "cluster wait without an arrive");
  if (self->block->cluster->phase == self->cluster_phase) {
    self->state = State::at_cluster_barrier;
    self->name = "cluster wait";
    self->site = site;
    suspend();
  }
  self->arrived_at_cluster = false;
}

void* cluster_map(const void* address, unsigned rank, Site site) {
  Block* block = current->block;
  if (rank >= job.cluster) fail(site, "block %u of a cluster of %u", rank, cluster_blocks());
  Block* other = block - block->rank + rank;
  if (other->alive == 0) fail(site, "block %u of the cluster has exited, and its shared memory is gone", rank);
  const uintptr_t wanted = reinterpret_cast<uintptr_t>(address);
  for (const SharedVariable& variable : block->shared) {
    const uintptr_t begin = reinterpret_cast<uintptr_t>(variable.data);
    if (wanted < begin || wanted >= begin + (variable.bytes == 0 ? 1 : variable.bytes)) continue;
    const size_t offset = wanted - begin;
    return find_shared(other, variable.name.c_str(), variable.key, variable.bytes).data + offset;
  }
  fail(site, "%p is not an address in this block's shared memory", address);
}

void copy_async(void* shared, const void* global, unsigned bytes, Site site) {
  copy_async_first(shared, global, bytes, bytes, site);
}

static void arrive(const AsyncCopy& copy) {
  memcpy(copy.shared, copy.global, copy.read);
  memset(static_cast<char*>(copy.shared) + copy.read, 0, copy.bytes - copy.read);
}

void copy_async_first(void* shared, const void* global, unsigned bytes, unsigned read, Site site) {
  check_aligned(shared, bytes, site);
  check_aligned(global, bytes, site);
  if (read > bytes) fail(site, "a copy of %u bytes cannot read %u", bytes, read);
  const AsyncCopy copy = {current->copy_groups, shared, global, bytes, read};
  if (job.seed != 0 && random_below(2) == 0) return arrive(copy);
  memset(shared, 0xFF, bytes);
  current->copies_under_way.push_back(copy);
}

void copy_async_commit() { ++current->copy_groups; }

void copy_async_wait(unsigned pending) {
  // They lie in the order of their groups.
  std::vector<AsyncCopy>& copies = current->copies_under_way;
  auto copy = copies.begin();
  for (; copy != copies.end() && copy->group + pending < current->copy_groups; ++copy) {
    arrive(*copy);
  }
  copies.erase(copies.begin(), copy);
}

void bulk_begin(const void* barrier) { current->block->bulk_barriers.push_back({barrier, 0, false, 0, {}}); }

static BulkBarrier& bulk_barrier(const void* address, Site site) {
  for (BulkBarrier& barrier : current->block->bulk_barriers) {
    if (barrier.address == address) return barrier;
  }
  fail(site, "a barrier of copies in bulk was not begun, or not all threads could know");
}

static void check_bulk(const void* shared, const void* global, unsigned bytes, Site site) {
  check_aligned(shared, 16, site);
  check_aligned(global, 16, site);
  if (bytes % 16 != 0) fail(site, "a copy in bulk of %u bytes, no multiple of 16", bytes);
}

void bulk_expect(const void* barrier, unsigned bytes, Site site) {
  BulkBarrier& own = bulk_barrier(barrier, site);
  if (own.expects) fail(site, "a barrier of copies in bulk is told twice in a phase what to expect");
  own.expects = true;
  own.expected_bytes = bytes;
}

void bulk_fetch(const void* barrier, void* shared, const void* global, unsigned bytes, Site site) {
  check_bulk(shared, global, bytes, site);
  memset(shared, 0xFF, bytes);
  bulk_barrier(barrier, site).under_way.push_back({shared, global, bytes});
}

void bulk_wait(const void* barrier, unsigned phase, Site site) {
  while (bulk_barrier(barrier, site).ended % 2 == phase % 2) {
    BulkBarrier& own = bulk_barrier(barrier, site);
    if (!own.expects) {
      yield();
      continue;
    }
    unsigned bytes = 0;
    for (const BulkCopy& copy : own.under_way) {
      memcpy(copy.target, copy.source, copy.bytes);
      bytes += copy.bytes;
    }
    if (bytes != own.expected_bytes) {
      fail(site, "%u bytes come in bulk where %u are expected", bytes, own.expected_bytes);
    }
    own.under_way.clear();
    own.expects = false;
    ++own.ended;
  }
}

void bulk_send(void* global, const void* shared, unsigned bytes, Site site) {
  check_bulk(shared, global, bytes, site);
  current->sent_in_bulk.push_back({global, shared, bytes});
}

void bulk_wait_sent(unsigned pending) {
  std::vector<BulkCopy>& sent = current->sent_in_bulk;
  while (sent.size() > pending) {
    memcpy(sent.front().target, sent.front().source, sent.front().bytes);
    sent.erase(sent.begin());
  }
}

unsigned long long clock() {
  static unsigned long long now = 0;
  return ++now;
}

void check_aligned(const void* address, unsigned long alignment, Site site) {
  if (reinterpret_cast<uintptr_t>(address) % alignment == 0) return;
  print_memory(reinterpret_cast<uintptr_t>(address));
  fail(site, "misaligned address: an access of this type needs a multiple of %lu bytes", alignment);
}

}  // namespace cunorm_emulator

int main(int count, char** values) {
  using namespace cunorm_emulator;
  if (count != 3) return 2;
  signal(SIGABRT, on_abort);
  signal(SIGALRM, on_timeout);
  read_job(values[1]);
  const itimerval timer = {{0, 0}, {static_cast<time_t>(job.timeout_ms / 1000),
                                    static_cast<suseconds_t>(job.timeout_ms % 1000 * 1000)}};
  setitimer(ITIMER_REAL, &timer, nullptr);
  begin_watching();
  run_grid();
  if (!writer.empty()) fprintf(stderr, "cunorm-emulator-writer: %s\n", writer.c_str());
  write_result(values[2]);
  return 0;
}
