// Runs kernel bodies on the host, one block after another; see block.cuh.
#pragma once

#include <memory>
#include <vector>

#include "block.cuh"

namespace sn {

// Runs kernel(block, shared, dynamic) for each block; `shared` and `dynamic` (`words` of 32 bits)
// contain garbage at first, as shared memory does. Allocated at exact size, for the sanitizers.
template <int Threads, typename Shared, typename Kernel>
void run(i64 blocks, int order, i64 words, Kernel kernel) {
  const auto shared = std::make_unique<Shared>();
  for (i64 index = 0; index < blocks; ++index) {
    std::vector<u32> dynamic(static_cast<size_t>(words), 0xFFFFFFFFu);
    std::memset(static_cast<void*>(shared.get()), 0xFF, sizeof(Shared));
    kernel(Block<Threads>(index, static_cast<Order>(order)), *shared, dynamic.data());
  }
}

}  // namespace sn
