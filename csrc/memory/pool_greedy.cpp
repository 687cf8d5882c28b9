#include "pool_problem.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

namespace sn {
namespace {

struct Placed {
  int64_t offset, end;
  int32_t first, last;
};

// Placed buffers by offset, in blocks: insertions into one long array would move most of it. Lifetimes
// are separate columns, so that many items of a block are compared at a time.
class Block {
 public:
  static constexpr int32_t kMost = 512;

  // Calls visit(offset, end) for each item alive in [first, last), by offset, until it returns false.
  template <typename Visit>
  bool scan(int32_t first, int32_t last, Visit visit) const {
    if (earliest_ >= last || latest_ <= first) return true;
    uint8_t alive[kMost] = {};
    for (int32_t x = 0; x < count_; ++x)
      alive[x] = static_cast<uint8_t>((first_[x] < last) & (first < last_[x]));
    for (int32_t x = 0; x < count_; ++x) {
      if (x % 8 == 0) {
        uint64_t eight;
        std::memcpy(&eight, alive + x, 8);
        if (!eight) {
          x += 7;
          continue;
        }
      }
      if (alive[x] && !visit(offset_[x], end_[x])) return false;
    }
    return true;
  }

  void insert(const Placed& item) {
    const auto at =
        std::upper_bound(offset_, offset_ + count_, item.offset) - offset_;
    put(offset_, at, item.offset);
    put(end_, at, item.end);
    put(first_, at, item.first);
    put(last_, at, item.last);
    ++count_;
    widen(item.first, item.last);
  }

  std::unique_ptr<Block> halve() {
    auto upper = std::make_unique<Block>();
    for (int32_t x = kMost / 2; x < kMost; ++x)
      upper->insert({offset_[x], end_[x], first_[x], last_[x]});
    count_ = kMost / 2;
    earliest_ = INT32_MAX;
    latest_ = 0;
    for (int32_t x = 0; x < count_; ++x) widen(first_[x], last_[x]);
    return upper;
  }

  bool full() const { return count_ == kMost; }
  int64_t lowest() const { return offset_[0]; }

 private:
  template <typename T>
  void put(T* column, ptrdiff_t at, T value) {
    std::copy_backward(column + at, column + count_, column + count_ + 1);
    column[at] = value;
  }
  void widen(int32_t first, int32_t last) {
    earliest_ = std::min(earliest_, first);
    latest_ = std::max(latest_, last);
  }

  int32_t first_[kMost], last_[kMost];
  int64_t offset_[kMost], end_[kMost];
  int32_t count_ = 0, earliest_ = INT32_MAX, latest_ = 0;
};

class Shelf {
 public:
  Shelf() { blocks_.push_back(std::make_unique<Block>()); }

  template <typename Visit>
  void scan(int32_t first, int32_t last, Visit visit) const {
    for (const auto& block : blocks_)
      if (!block->scan(first, last, visit)) return;
  }

  void insert(const Placed& item) {
    auto block = std::upper_bound(
        blocks_.begin() + 1, blocks_.end(), item.offset,
        [](int64_t offset, const auto& b) { return offset < b->lowest(); });
    --block;
    (*block)->insert(item);
    if ((*block)->full()) {
      auto upper = (*block)->halve();
      blocks_.insert(block + 1, std::move(upper));
    }
  }

 private:
  std::vector<std::unique_ptr<Block>> blocks_;
};

}  // namespace

std::vector<int64_t> first_fit(const Problem& problem, const std::vector<int32_t>& order) {
  std::vector<int64_t> offsets(problem.count(), 0);
  Shelf shelf;
  for (int32_t i : order) {
    int64_t offset = 0;
    shelf.scan(problem.first[i], problem.last[i], [&](int64_t start, int64_t end) {
      if (start >= offset + problem.size[i]) return false;
      if (end > offset) offset = problem.aligned(i, end);
      return true;
    });
    offsets[i] = offset;
    shelf.insert({offset, offset + problem.size[i], problem.first[i], problem.last[i]});
  }
  return offsets;
}

}  // namespace sn
