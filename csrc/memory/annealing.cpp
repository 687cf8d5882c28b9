#include "annealing.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>

namespace sn {

namespace {

// The flags that are tried for a moved hole.
constexpr char kWaits[] = {0, 0, 0, 0, 0, kOut, kBack, kOut | kBack};

// splitmix64 (Steele et al., 2014): the same numbers here and in the oracle.
class Draw {
 public:
  explicit Draw(uint64_t seed) : state_(seed) {}
  uint64_t next() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  int32_t below(size_t count) { return static_cast<int32_t>(next() % count); }
  double part() { return static_cast<double>(next() >> 11) * 0x1p-53; }

 private:
  uint64_t state_;
};

class Annealer {
 public:
  Annealer(const Tables& tables, Simulation& simulation, const Lanes& lanes, const Settings& settings,
           const std::vector<char>& leaves, Choice& choice, Moved& moved)
      : t_(tables), offload_(tables, simulation, lanes), lanes_(lanes), set_(settings),
        draw_(settings.seed), choice_(choice), moved_(moved) {
    for (int32_t hole = 0; hole < t_.holes(); ++hole) {
      int32_t storage = t_.storage[hole];
      bool again = set_.recompute && t_.rebuildable[storage] && !t_.stays[hole];
      leaves_.push_back(lanes_.open() && leaves[hole]);
      again_.push_back(again);
      if (leaves_.back() || again) free_.push_back(hole);
    }
  }

  void run(const Late& late) {
    if (free_.empty() || !offload_.run(choice_, moved_)) return;
    take();
    note();
    double scale = seconds_, price = scale;
    for (int64_t tried = 0; tried < set_.tries; ++tried) {
      if (tried % 32 == 0) {
        if (late()) break;
        double gone = static_cast<double>(tried) / static_cast<double>(set_.tries);
        heat_ = scale * set_.warm * std::pow(set_.cold / set_.warm, gone);
        // The price of a byte above the budget oscillates around that at which choices just fit.
        price *= over_ > 0 ? 1.05 : 0.95;
        price = std::min(std::max(price, 1e-3 * scale), 1e4 * scale);
      }
      propose();
      if (undo_.empty()) continue;
      if (!offload_.run(choice_, moved_)) {
        restore();
        continue;
      }
      double over = excess();
      double worse = offload_.seconds - seconds_ + price * (over - over_);
      if (worse > 0 && draw_.part() >= std::exp(-worse / heat_)) {
        restore();
        continue;
      }
      take();
      note();
    }
    choice_ = best_choice_;
    moved_ = best_moved_;
  }

 private:
  double excess() const {
    double over = 0;
    for (int64_t live : offload_.made().live)
      if (live > set_.budget) over += static_cast<double>(live - set_.budget);
    return over / static_cast<double>(std::max<int64_t>(1, set_.budget - t_.base));
  }

  // Makes the choice that was just simulated the current one.
  void take() {
    seconds_ = offload_.seconds;
    over_ = excess();
    hot_.clear();
    const Simulation& made = offload_.made();
    for (size_t run = 0; run < made.live.size(); ++run)
      if (made.live[run] > set_.budget) hot_.push_back(made.at[run]);
  }

  void note() {
    int64_t above = std::max<int64_t>(0, offload_.made().peak() - set_.budget);
    if (above > best_above_ || (above == best_above_ && seconds_ >= best_seconds_)) return;
    best_above_ = above;
    best_seconds_ = seconds_;
    best_choice_ = choice_;
    best_moved_ = moved_;
  }

  void propose() {
    undo_.clear();
    double many = draw_.part();
    int32_t hole = first();
    alter(hole);
    for (double limit : {0.5, 0.2}) {
      if (many >= limit) break;
      hole = draw_.below(2) ? near(hole) : free_[draw_.below(free_.size())];
      alter(hole);
    }
  }

  // Above the budget, prefers a hole where it is exceeded; else one that costs something.
  int32_t first() {
    bool aimed = draw_.below(4) != 0;
    int32_t hot = aimed && !hot_.empty() ? hot_[draw_.below(hot_.size())] : -1;
    int32_t hole = free_[draw_.below(free_.size())];
    for (int tries = 0; aimed && tries < 12; ++tries) {
      bool there = choice_[hole] == kKeep && !moved_[hole];
      if (hot < 0 ? !there : t_.start[hole] < hot && hot <= t_.end[hole]) break;
      hole = free_[draw_.below(free_.size())];
    }
    return hole;
  }

  // A hole of an operand of this hole's storage, at the time at which that is recomputed.
  int32_t near(int32_t hole) {
    auto chain = t_.chain[t_.storage[hole]];
    if (chain.begin() == chain.end()) return hole;
    int32_t op = chain.begin()[draw_.below(static_cast<size_t>(chain.end() - chain.begin()))];
    auto reads = t_.reads[op];
    if (reads.begin() == reads.end()) return hole;
    int32_t source = reads.begin()[draw_.below(static_cast<size_t>(reads.end() - reads.begin()))];
    for (int32_t other = t_.first[source]; other < t_.first[source + 1]; ++other)
      if (t_.end[other] >= t_.end[hole]) return leaves_[other] || again_[other] ? other : hole;
    return hole;
  }

  void alter(int32_t hole) {
    int32_t way = draw_.below(8), held = kKeep;
    char moved = 0;
    if (leaves_[hole] && way >= 6)
      moved = static_cast<char>(1 + (set_.wait ? kWaits[draw_.below(std::size(kWaits))] : 0));
    if (!moved && again_[hole] && way >= 2) {
      held = 0;
      if (way == 4) held = t_.ops();
      if (way == 5)
        held = t_.start[hole] + 1 + draw_.below(static_cast<size_t>(t_.end[hole] - t_.start[hole]));
    }
    if (held == choice_[hole] && moved == moved_[hole]) return;
    undo_.push_back({hole, choice_[hole], moved_[hole]});
    choice_[hole] = held;
    moved_[hole] = moved;
  }

  void restore() {
    for (size_t n = undo_.size(); n-- > 0;) {
      choice_[undo_[n].hole] = undo_[n].held;
      moved_[undo_[n].hole] = undo_[n].moved;
    }
  }

  struct Undo {
    int32_t hole, held;
    char moved;
  };

  const Tables& t_;
  Offload offload_;
  Lanes lanes_;
  Settings set_;
  Draw draw_;
  Choice& choice_;
  Moved& moved_;
  std::vector<char> leaves_, again_;
  std::vector<int32_t> free_, hot_;
  std::vector<Undo> undo_;
  double seconds_ = 0, over_ = 0, heat_ = 0;
  int64_t best_above_ = std::numeric_limits<int64_t>::max();
  double best_seconds_ = 0;
  Choice best_choice_;
  Moved best_moved_;
};

}  // namespace

void anneal(const Tables& tables, Simulation& simulation, const Lanes& lanes, const Settings& settings,
            const std::vector<char>& leaves, Choice& choice, Moved& moved, const Late& late) {
  Annealer(tables, simulation, lanes, settings, leaves, choice, moved).run(late);
}

}  // namespace sn
