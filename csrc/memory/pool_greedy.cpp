#include "pool_greedy.h"

#include <algorithm>
#include <utility>

namespace sn {
namespace {

struct Placed {
  int64_t offset, end;
  int32_t first, last;
};

// Placed buffers by offset. One long array would spend its time moving itself at each insertion.
class Shelf {
 public:
  template <typename Visit>
  void scan(int32_t first, int32_t last, Visit visit) const {
    for (const Block& block : blocks_) {
      if (block.first >= last || block.last <= first) continue;
      for (const Placed& item : block.items)
        if (item.first < last && first < item.last && !visit(item)) return;
    }
  }

  void insert(const Placed& item) {
    auto block = std::upper_bound(
        blocks_.begin(), blocks_.end(), item.offset,
        [](int64_t offset, const Block& b) { return offset < b.items.front().offset; });
    if (block == blocks_.begin()) {
      if (blocks_.empty()) blocks_.emplace_back();
      block = blocks_.begin();
    } else {
      --block;
    }
    auto place = std::upper_bound(
        block->items.begin(), block->items.end(), item.offset,
        [](int64_t offset, const Placed& p) { return offset < p.offset; });
    block->items.insert(place, item);
    block->widen(item);
    if (block->items.size() > kBlock) {
      Block upper;
      upper.items.assign(block->items.begin() + kBlock / 2, block->items.end());
      block->items.resize(kBlock / 2);
      block->measure();
      upper.measure();
      blocks_.insert(block + 1, std::move(upper));
    }
  }

 private:
  static constexpr size_t kBlock = 512;
  struct Block {
    std::vector<Placed> items;
    int32_t first = INT32_MAX, last = 0;
    void widen(const Placed& item) {
      first = std::min(first, item.first);
      last = std::max(last, item.last);
    }
    void measure() {
      first = INT32_MAX;
      last = 0;
      for (const Placed& item : items) widen(item);
    }
  };
  std::vector<Block> blocks_;
};

}  // namespace

std::vector<int64_t> first_fit(const Problem& problem, const std::vector<int32_t>& order) {
  std::vector<int64_t> offsets(problem.count(), 0);
  Shelf shelf;
  for (int32_t i : order) {
    int64_t offset = 0;
    shelf.scan(problem.first[i], problem.last[i], [&](const Placed& item) {
      if (item.offset >= offset + problem.size[i]) return false;
      if (item.end > offset) offset = problem.aligned(i, item.end);
      return true;
    });
    offsets[i] = offset;
    shelf.insert({offset, offset + problem.size[i], problem.first[i], problem.last[i]});
  }
  return offsets;
}

}  // namespace sn
