#include "pool_search.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

namespace sn {
namespace {

constexpr int64_t kNever = std::numeric_limits<int64_t>::max();
constexpr int32_t kNone = -1;
constexpr int64_t kUnit = 1 << 20;
// A decision may visit every buffer in every section this many times before it counts as several.
// Bounds of two buffers that rest on each other rise byte by byte, for years if the capacity is
// large. On the published files this counts about 2 % more decisions than there are.
constexpr int64_t kPasses = 100;
// The queue is truncated when this many sections at its front are done.
constexpr size_t kDone = 4096;

}  // namespace

Indexed::Indexed(Problem problem) : Problem(std::move(problem)) {
  members.resize(sections);
  neighbours.resize(count());
  std::vector<int32_t> order(count());
  std::iota(order.begin(), order.end(), 0);
  for (int32_t i = 0; i < count(); ++i)
    for (int32_t s = first[i]; s < last[i]; ++s) members[s].push_back(i);
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t x, int32_t y) { return first[x] < first[y]; });
  for (size_t x = 0; x < order.size(); ++x)
    for (size_t y = x + 1; y < order.size() && first[order[y]] < last[order[x]]; ++y) {
      neighbours[order[x]].push_back(order[y]);
      neighbours[order[y]].push_back(order[x]);
    }
}

Search::Search(std::shared_ptr<const Indexed> problem, int64_t capacity, Rule rule,
               std::vector<int32_t> rank, std::vector<int64_t> weight)
    : shared_(std::move(problem)),
      problem_(*shared_),
      capacity_(capacity),
      rule_(rule),
      rank_(std::move(rank)),
      weight_(std::move(weight)),
      offset_(problem_.count(), 0),
      least_(problem_.count(), 0),
      base_(problem_.count(), 0),
      slack_(problem_.sections, 0),
      lowest_(problem_.sections, 0),
      placed_(problem_.count(), 0),
      marked_(problem_.sections, 0),
      ids_(problem_.count()),
      components_{{0, static_cast<size_t>(problem_.count())}},
      component_(0),
      pending_(kNone) {
  std::iota(ids_.begin(), ids_.end(), 0);
  std::stable_sort(ids_.begin(), ids_.end(), [&](int32_t x, int32_t y) {
    return problem_.first[x] < problem_.first[y];
  });
  for (What what : {What::least, What::base}) stamp_[static_cast<int>(what)].resize(ids_.size(), 0);
  for (What what : {What::slack, What::lowest})
    stamp_[static_cast<int>(what)].resize(problem_.sections, 0);
  int64_t looks = 0;
  for (int32_t i = 0; i < problem_.count(); ++i) {
    refuted_ |= problem_.size[i] > capacity_;
    looks += problem_.last[i] - problem_.first[i];
    mark(i);
  }
  unit_ = kPasses * (looks + problem_.sections + problem_.count());
}

void Search::set(What what, std::vector<int64_t>& values, int32_t index, int64_t value) {
  int64_t& stamp = stamp_[static_cast<int>(what)][index];
  if (stamp != level_) {
    trail_.push_back({what, index, values[index]});
    stamp = level_;
  }
  values[index] = value;
}

void Search::mark(int32_t i) {
  for (int32_t s = problem_.first[i]; s < problem_.last[i]; ++s)
    if (!marked_[s]) {
      marked_[s] = 1;
      queue_.push_back(s);
    }
}

void Search::clear_marks() {
  for (int32_t s : queue_) marked_[s] = 0;
  queue_.clear();
  head_ = 0;
}

bool Search::raise(int32_t i, int64_t offset) {
  if (offset <= least_[i]) return true;
  offset = problem_.aligned(i, offset);
  if (offset > capacity_ - problem_.size[i]) {
    const int64_t share = kUnit / (problem_.last[i] - problem_.first[i]);
    for (int32_t s = problem_.first[i]; s < problem_.last[i]; ++s) weight_[s] += share;
    return false;
  }
  set(What::least, least_, i, offset);
  mark(i);
  return true;
}

bool Search::raise_onto_others(int32_t i) {
  int64_t top = kNever;
  for (int32_t k : problem_.neighbours[i])
    if (!placed_[k]) top = std::min(top, least_[k] + problem_.size[k]);
  return top != kNever && raise(i, top);
}

bool Search::infer(int32_t section) {
  row_.clear();
  int64_t total = 0, lowest = kNever, highest = 0, top = kNever, next_top = kNever;
  int32_t top_owner = kNone;
  for (int32_t k : problem_.members[section]) {
    if (placed_[k]) continue;
    row_.emplace_back(least_[k], problem_.size[k]);
    total += problem_.size[k];
    lowest = std::min(lowest, least_[k]);
    highest = std::max(highest, least_[k]);
    const int64_t end = least_[k] + problem_.size[k];
    if (end < top) {
      next_top = top;
      top = end;
      top_owner = k;
    } else {
      next_top = std::min(next_top, end);
    }
  }
  if (row_.empty()) {
    if (slack_[section] != kNever) set(What::slack, slack_, section, kNever);
    return true;
  }
  // Above `highest` there are no gaps, so no gap can push the end any further than this.
  if (highest + total > capacity_) {
    std::sort(row_.begin(), row_.end());
    int64_t height = 0;
    for (const auto& [least, size] : row_) height = std::max(height, least) + size;
    if (height > capacity_) {
      weight_[section] += kUnit;
      return false;
    }
  }
  const int64_t slack = capacity_ - lowest - total;
  if (slack != slack_[section]) set(What::slack, slack_, section, slack);
  if (lowest != lowest_[section]) set(What::lowest, lowest_, section, lowest);
  for (int32_t k : problem_.members[section]) {
    if (placed_[k] || least_[k] - lowest <= slack) continue;
    if (!raise(k, k == top_owner ? next_top : top)) return false;
  }
  return true;
}

Search::Settled Search::propagate(int64_t until) {
  while (head_ < queue_.size()) {
    if (work_ >= until) return Settled::later;
    const int32_t section = queue_[head_++];
    marked_[section] = 0;
    work_ += 1 + static_cast<int64_t>(problem_.members[section].size());
    if (!infer(section)) {
      clear_marks();
      return Settled::no;
    }
    if (head_ >= kDone && head_ > queue_.size() / 2) {
      queue_.erase(queue_.begin(), queue_.begin() + static_cast<std::ptrdiff_t>(head_));
      head_ = 0;
    }
  }
  queue_.clear();
  head_ = 0;
  return Settled::yes;
}

bool Search::place(int32_t i) {
  offset_[i] = least_[i];
  placed_[i] = 1;
  trail_.push_back({What::placed, i, 0});
  mark(i);
  const int64_t top = least_[i] + problem_.size[i];
  for (int32_t k : problem_.neighbours[i]) {
    if (placed_[k]) continue;
    const int64_t base = problem_.aligned(k, top);
    if (base_[k] < base) set(What::base, base_, k, base);
    if (!raise(k, top)) return false;
  }
  return true;
}

bool Search::forced(int32_t i) const {
  const int64_t top = least_[i] + problem_.size[i];
  for (int32_t k : problem_.neighbours[i])
    if (!placed_[k] && least_[k] < top) return false;
  return true;
}

void Search::undo(size_t trail) {
  ++level_;
  for (; trail_.size() > trail; trail_.pop_back()) {
    const Change& change = trail_.back();
    switch (change.what) {
      case What::least: least_[change.index] = change.before; break;
      case What::base: base_[change.index] = change.before; break;
      case What::slack: slack_[change.index] = change.before; break;
      case What::lowest: lowest_[change.index] = change.before; break;
      case What::placed: placed_[change.index] = 0; break;
    }
  }
}

// Returns to the last choice and raises its buffer; false if no choice is left.
bool Search::backtrack() {
  clear_marks();
  while (!choices_.empty()) {
    const Choice choice = choices_.back();
    choices_.pop_back();
    undo(choice.trail);
    component_ = choice.component;
    pending_ = choice.pending;
    ids_.resize(choice.ids);
    components_.resize(choice.components);
    agenda_.resize(choice.agenda);
    if (raise_onto_others(choice.buffer)) return true;
  }
  return false;
}

void Search::split() {
  const Range range = components_[component_];
  std::vector<Range> pieces;
  const size_t kept = ids_.size();
  int32_t end = kNone;
  for (size_t x = range.begin; x < range.end; ++x) {
    const int32_t k = ids_[x];
    if (placed_[k]) continue;
    if (problem_.first[k] >= end) pieces.push_back({ids_.size(), ids_.size()});
    end = std::max(end, problem_.last[k]);
    ids_.push_back(k);
    pieces.back().end = ids_.size();
  }
  if (pieces.size() == 1) {
    ids_.resize(kept);
    return;
  }
  // The smallest goes on top of the agenda: it is refuted fastest.
  std::stable_sort(pieces.begin(), pieces.end(), [](const Range& x, const Range& y) {
    return x.end - x.begin > y.end - y.begin;
  });
  for (const Range& piece : pieces) {
    agenda_.push_back({static_cast<int32_t>(components_.size()), pending_, choices_.size()});
    components_.push_back(piece);
    pending_ = static_cast<int32_t>(agenda_.size()) - 1;
  }
  component_ = kNone;
}

bool Search::before(int32_t i, int32_t k) const {
  return least_[i] != least_[k] ? least_[i] < least_[k] : rank_[i] < rank_[k];
}

int32_t Search::pick_section() const {
  const Range range = components_[component_];
  int32_t begin = problem_.sections, end = 0, best = kNone;
  for (size_t x = range.begin; x < range.end; ++x) {
    if (placed_[ids_[x]]) continue;
    begin = std::min(begin, problem_.first[ids_[x]]);
    end = std::max(end, problem_.last[ids_[x]]);
  }
  double best_score = 0;
  for (int32_t s = begin; s < end; ++s) {
    if (slack_[s] == kNever) continue;
    if (rule_ == Rule::lowest) {
      if (best == kNone || lowest_[s] < lowest_[best] ||
          (lowest_[s] == lowest_[best] && slack_[s] < slack_[best]))
        best = s;
    } else {
      const double score =
          static_cast<double>(lowest_[s] + capacity_ / 20) / static_cast<double>(weight_[s]);
      if (best == kNone || score < best_score) {
        best = s;
        best_score = score;
      }
    }
  }
  return best;
}

int32_t Search::pick() {
  int32_t best = kNone;
  for (int32_t k : problem_.members[pick_section()])
    if (!placed_[k] && (best == kNone || before(k, best))) best = k;
  for (;;) {
    int32_t under = kNone;
    work_ += 1 + static_cast<int64_t>(problem_.neighbours[best].size());
    for (int32_t k : problem_.neighbours[best])
      if (!placed_[k] && least_[k] + problem_.size[k] <= least_[best] &&
          (under == kNone || before(k, under)))
        under = k;
    if (under == kNone) return best;
    best = under;
  }
}

// Places the next buffer or puts it on top of another; false if that is impossible.
bool Search::decide() {
  const Range range = components_[component_];
  work_ += static_cast<int64_t>(range.end - range.begin);
  const int32_t i = pick();
  split_after_ = least_[i] <= base_[i];
  // A buffer that would float must rest on one that is not placed yet.
  if (!split_after_) return raise_onto_others(i);
  if (!forced(i)) {
    choices_.push_back({i, component_, pending_, trail_.size(), ids_.size(), components_.size(),
                        agenda_.size()});
    ++level_;
  }
  return place(i);
}

Verdict Search::run(int64_t decisions, int64_t work) {
  const int64_t until = work_ + std::min(work, kNever - work_);
  while (!refuted_) {
    bool alive = true;
    if (settling_) {
      const Settled settled = propagate(until);
      if (settled == Settled::later) return Verdict::unfinished;
      settling_ = false;
      alive = settled == Settled::yes;
      if (alive && split_after_) split();
    } else {
      if (component_ == kNone) {
        if (pending_ == kNone) return Verdict::found;
        const Pending& next = agenda_[pending_];
        component_ = next.component;
        pending_ = next.next;
        // Choices within the finished neighbour cannot help this component.
        choices_.resize(next.choices);
      }
      if (decisions <= 0 || work_ >= until) return Verdict::unfinished;
      --decisions;
      ++decisions_;
      settling_ = alive = decide();
    }
    if (alive) continue;
    split_after_ = false;
    settling_ = backtrack();
    refuted_ = !settling_;
  }
  return Verdict::impossible;
}

}  // namespace sn
