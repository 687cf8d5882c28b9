// fit and trim of sn_memory/plan/search/candidates.py; tests/oracles/fitting_oracle.py makes the same decisions in
// the same order.
#include <algorithm>
#include <cmath>
#include <limits>

#include "simulation.h"

namespace sn {

namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

// Presence of tests/oracles/fitting_oracle.py: when each storage is live, and when each op runs again.
class Presence {
 public:
  explicit Presence(const Tables& tables)
      : t_(tables), begin_(tables.storages() + 1), again_(tables.ops()),
        seen_(tables.storages(), 0) {}

  void take(const Simulation& schedule) {
    std::fill(begin_.begin(), begin_.end(), 0);
    for (const Interval& it : schedule.intervals) ++begin_[it.storage + 1];
    for (size_t s = 1; s < begin_.size(); ++s) begin_[s] += begin_[s - 1];
    fill_ = begin_;
    spans_.resize(schedule.intervals.size());
    for (const Interval& it : schedule.intervals)
      spans_[fill_[it.storage]++] = {schedule.at[it.first], schedule.at[it.last]};
    std::fill(again_.begin(), again_.end(), -1);
    for (size_t run = 0; run < schedule.ops.size(); ++run)
      if (schedule.ops[run] != schedule.at[run]) again_[schedule.ops[run]] = schedule.at[run];
  }

  bool there(int32_t storage, int32_t at) const {
    for (int32_t n = begin_[storage]; n < begin_[storage + 1]; ++n)
      if (spans_[n].first < at && at <= spans_[n].second) return true;
    return false;
  }

  double closure_seconds(int32_t storage, int32_t at) {
    ++stamp_;
    double total = 0;
    missing_.assign(1, storage);
    seen_[storage] = stamp_;
    while (!missing_.empty()) {
      int32_t here = missing_.back();
      missing_.pop_back();
      if (!t_.rebuildable[here]) return kNever;
      for (int32_t op : t_.chain[here]) {
        ++looks;
        if (op >= at) break;
        if (again_[op] >= at) continue;
        if (t_.expires[op] < at) return kNever;
        total += t_.seconds[op];
        for (int32_t source : t_.reads[op]) {
          auto chain = t_.chain[source];
          if (seen_[source] == stamp_ || chain.begin() == chain.end()) continue;
          seen_[source] = stamp_;
          if (!there(source, at)) missing_.push_back(source);
        }
      }
    }
    return total;
  }

  int64_t looks = 0;

 private:
  const Tables& t_;
  std::vector<int32_t> begin_, fill_;
  std::vector<std::pair<int32_t, int32_t>> spans_;
  std::vector<int32_t> again_, seen_, missing_;
  int32_t stamp_ = 0;
};

struct Row {
  int32_t hole, left, right;
  int64_t weight;
  double price;
};

struct Change {
  int32_t hole, held;
};

class Fitter {
 public:
  Fitter(const Tables& tables, Simulation& simulation, const std::vector<double>& factors,
         int64_t budget, double dear)
      : t_(tables), schedule_(simulation), presence_(tables), factors_(factors), budget_(budget),
        dear_(dear), banned_(tables.holes(), 0), over_(tables.ops()), total_(tables.ops() + 1) {}

  bool run(Choice& choice, const std::vector<Move>& moves, int rounds, const Late& late) {
    for (const Move& move : moves) banned_[move.hole] = 1;
    bool possible = schedule_.run(choice, moves);
    for (int round = 0; round < rounds; ++round) {
      if (!possible) return false;
      if (!excess()) return true;
      if (late() || !find(choice, late)) return false;
      if (changes_.empty()) return false;
      Choice trial = choice;
      for (const Change& change : changes_) trial[change.hole] = change.held;
      possible = schedule_.run(trial, moves);
      if (!possible) {
        // Some of them are incompatible; find out which, one by one.
        trial = choice;
        for (const Change& change : changes_) {
          if (late()) return false;
          int32_t before = trial[change.hole];
          trial[change.hole] = change.held;
          if (schedule_.run(trial, moves)) continue;
          trial[change.hole] = before;
          banned_[change.hole] = 1;
        }
        possible = schedule_.run(trial, moves);
      }
      choice = std::move(trial);
    }
    return false;
  }

 private:
  bool excess() {
    std::fill(over_.begin(), over_.end(), 0);
    bool any = false;
    for (size_t run = 0; run < schedule_.live.size(); ++run) {
      int64_t& here = over_[schedule_.at[run]];
      here = std::max(here, schedule_.live[run] - budget_);
      any = any || here > 0;
    }
    return any;
  }

  void count() {
    total_[0] = 0;
    for (int32_t op = 0; op < t_.ops(); ++op) total_[op + 1] = total_[op] + (over_[op] > 0);
  }

  int32_t hole_at(int32_t storage, int32_t at) const {
    for (int32_t hole = t_.first[storage]; hole < t_.first[storage + 1]; ++hole)
      if (t_.end[hole] >= at) return hole;
    return t_.first[storage + 1] - 1;
  }

  void add(int32_t hole, int32_t left, int32_t right) {
    if (right > left && !banned_[hole] && total_[right] > total_[left])
      rows_.push_back({hole, left, right, t_.bytes[t_.storage[hole]], 0});
  }

  // False if it was too late.
  bool find(const Choice& choice, const Late& late) {
    changes_.clear();
    rows_.clear();
    count();
    int32_t last_over = t_.ops() - 1;
    while (last_over > 0 && over_[last_over] <= 0) --last_over;
    for (int32_t hole = 0; hole < t_.holes(); ++hole) {
      int32_t storage = t_.storage[hole];
      if (choice[hole] == kKeep && t_.inner(hole) && t_.rebuildable[storage] && t_.bytes[storage])
        add(hole, t_.start[hole] + 1, t_.end[hole]);
    }
    for (const Interval& it : schedule_.intervals) {
      if (!t_.rebuildable[it.storage] || !t_.bytes[it.storage]) continue;
      int32_t begun = schedule_.at[it.first];
      if (begun == schedule_.ops[it.first]) continue;
      int32_t hole = hole_at(it.storage, begun);
      // At the op of the rebuild itself, dropping a storage may make room for the rest of it.
      if (!t_.stays[hole] && kKeep < choice[hole] && choice[hole] <= begun)
        add(hole, begun, std::min(t_.end[hole], schedule_.at[it.last]));
    }
    presence_.take(schedule_);
    size_t kept = 0;
    for (const Row& row : rows_) {
      double price = presence_.closure_seconds(t_.storage[row.hole], row.right);
      // A rebuild that costs a whole step is never taken, even if nothing else is left.
      if (!(price <= dear_)) continue;
      rows_[kept] = row;
      rows_[kept++].price = factors_.empty() ? price : price * factors_[row.hole];
    }
    rows_.resize(kept);
    schedule_.work += presence_.looks;
    presence_.looks = 0;
    return pick(choice, last_over, late);
  }

  bool pick(const Choice& choice, int32_t last_over, const Late& late) {
    while (!rows_.empty()) {
      schedule_.work += static_cast<int64_t>(rows_.size()) + t_.ops();
      if (late()) return false;
      size_t best = rows_.size();
      double least = kNever;
      for (size_t n = 0; n < rows_.size(); ++n) {
        const Row& row = rows_[n];
        // As an integer this may exceed 64 bits.
        double relief = static_cast<double>(total_[row.right] - total_[row.left]) *
                        static_cast<double>(row.weight);
        if (relief <= 0) continue;
        double score = (row.price + 1e-12) / relief;
        if (score < least) {
          least = score;
          best = n;
        }
      }
      if (best == rows_.size()) return true;
      Row row = rows_[best];
      rows_.erase(rows_.begin() + static_cast<std::ptrdiff_t>(best));
      bool kept = choice[row.hole] == kKeep;
      changes_.push_back({row.hole, kept ? 0 : std::min(row.right, last_over + 1)});
      for (int32_t op = row.left; op < row.right; ++op)
        over_[op] = std::max<int64_t>(over_[op] - row.weight, 0);
      count();
      if (total_.back() == 0) return true;
    }
    return true;
  }

  const Tables& t_;
  Simulation& schedule_;
  Presence presence_;
  const std::vector<double>& factors_;
  int64_t budget_;
  double dear_;
  std::vector<char> banned_;
  std::vector<int64_t> over_, total_;
  std::vector<Row> rows_;
  std::vector<Change> changes_;
};

// The most live bytes at each op, its rebuilds included.
void peaks(const Simulation& schedule, std::vector<int64_t>& most) {
  std::fill(most.begin(), most.end(), 0);
  for (size_t run = 0; run < schedule.live.size(); ++run)
    most[schedule.at[run]] = std::max(most[schedule.at[run]], schedule.live[run]);
}

// Per dropped hole, the op before which its storage is live again; its end if it is not.
void backs(const Tables& t, const Simulation& schedule, std::vector<int32_t>& back) {
  back = t.end;
  for (const Interval& it : schedule.intervals) {
    int32_t at = schedule.at[it.first];
    for (int32_t hole = t.first[it.storage]; hole < t.first[it.storage + 1]; ++hole)
      if (t.start[hole] < at && at <= t.end[hole]) back[hole] = std::min(back[hole], at);
  }
}

}  // namespace

bool fit(const Tables& tables, Simulation& simulation, Choice& choice, const std::vector<Move>& moves,
         const std::vector<double>& factors, int64_t budget, double dear, int rounds,
         const Late& late) {
  return Fitter(tables, simulation, factors, budget, dear).run(choice, moves, rounds, late);
}

void trim(const Tables& t, Simulation& simulation, Choice& choice, const std::vector<Move>& moves,
          const std::vector<int32_t>& order, int64_t budget, bool filtered, const Late& late) {
  if (!simulation.run(choice, moves)) return;
  double best = simulation.seconds;
  std::vector<int64_t> most(t.ops());
  std::vector<int32_t> back;
  auto note = [&] {
    if (!filtered) return;
    peaks(simulation, most);
    backs(t, simulation, back);
  };
  note();
  for (int32_t hole : order) {
    if (late()) return;
    ++simulation.work;
    if (filtered) {
      int32_t from = t.start[hole] + 1;
      if (back[hole] > from) {
        int64_t highest = *std::max_element(most.begin() + from, most.begin() + back[hole]);
        if (budget - highest < t.bytes[t.storage[hole]]) continue;
      }
    }
    int32_t before = choice[hole];
    choice[hole] = kKeep;
    if (simulation.run(choice, moves) && simulation.peak() <= budget && simulation.seconds <= best) {
      best = simulation.seconds;
      note();
    } else {
      choice[hole] = before;
    }
  }
}

}  // namespace sn
