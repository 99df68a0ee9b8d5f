// What the compiled calls of every framework have in common: a call's kind, by which it is found again, and the launches
// that Python has planned for it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

namespace cunorm {

// All that the preparation of a call depended on, as numbers.
using Kind = std::vector<std::int64_t>;
struct KindHash {
  std::size_t operator()(const Kind& kind) const {
    std::uint64_t hash = 0xcbf29ce484222325;
    for (const std::int64_t part : kind) {
      hash = (hash ^ static_cast<std::uint64_t>(part)) * 0x9e3779b97f4a7c15;
      hash ^= hash >> 32;
    }
    return hash;
  }
};
constexpr std::size_t MOST_KNOWN = 4096;  // kinds that are kept

// The driver's CUlaunchAttribute and CUlaunchConfig, as cunorm/launch.py has them.
struct LaunchAttribute {
  std::int32_t id;
  std::int32_t padding;
  std::uint32_t value[16];
};
struct LaunchConfig {
  std::uint32_t grid[3];
  std::uint32_t block[3];
  std::uint32_t shared_bytes;
  void* stream;
  const LaunchAttribute* attributes;
  std::uint32_t attribute_count;
};

// The driver's cuLaunchKernelEx.
using LaunchKernel = int (*)(const LaunchConfig*, void* function, void** parameters, void** extra);

// A step of cunorm/launch.py.
struct Launch {
  std::string kernel;
  void* function;
  LaunchConfig config;  // its attributes are those below
  std::vector<LaunchAttribute> attributes;
  std::string arguments;    // the kernel's argument struct, which begins with pointers: zeros here
  std::vector<int> places;  // for each of these, where among a call's pointers it is; -1 for one that stays null

  // With attributes as pairs of an id and the value's first word.
  template <typename Pairs>
  static Launch of(std::string kernel, std::uintptr_t function, std::uint32_t grid, std::uint32_t block_x,
                   std::uint32_t block_y, std::uint32_t shared_bytes, const Pairs& pairs, std::string arguments,
                   std::vector<int> places) {
    std::vector<LaunchAttribute> attributes;
    for (const auto& [id, value] : pairs) attributes.push_back({id, 0, {value}});
    const auto count = static_cast<std::uint32_t>(attributes.size());
    const LaunchConfig config = {{grid, 1, 1}, {block_x, block_y, 1}, shared_bytes, nullptr, nullptr, count};
    return {std::move(kernel), reinterpret_cast<void*>(function), config, std::move(attributes), std::move(arguments),
            std::move(places)};
  }

  // The driver's status: 0 for success.
  int start(LaunchKernel launch_kernel, const std::vector<std::uint64_t>& pointers, void* stream) const {
    std::string packed = arguments;
    for (std::size_t i = 0; i < places.size(); ++i) {
      if (places[i] >= 0) std::memcpy(&packed[8 * i], &pointers[places[i]], 8);
    }
    LaunchConfig here = config;
    here.stream = stream;
    here.attributes = attributes.data();
    void* parameters[] = {packed.data()};
    return launch_kernel(&here, function, parameters, nullptr);
  }
};

}  // namespace cunorm
