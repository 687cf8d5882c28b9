#include "simulation.h"

#include <algorithm>

namespace sn {

Simulation::Simulation(const Tables& tables)
    : t_(tables),
      hole_(tables.storages()),
      opened_(tables.storages()),
      last_(tables.storages()),
      absent_(tables.storages(), -1),
      storage_seen_(tables.storages(), 0),
      op_seen_(tables.ops(), 0),
      out_(tables.ops() + 1),
      back_(tables.ops() + 1),
      move_of_(tables.holes(), -1),
      host_copy_of_(tables.holes(), -1) {}

int64_t Simulation::peak() const {
  return live.empty() ? 0 : *std::max_element(live.begin(), live.end());
}

bool Simulation::run(const Choice& choice, const std::vector<Move>& moves) {
  ops.clear();
  at.clear();
  intervals.clear();
  host_copies.clear();
  doubled_.clear();
  extra_.clear();
  seconds = 0;
  for (int32_t s = 0; s < t_.storages(); ++s) {
    hole_[s] = t_.first[s] - 1;
    opened_[s] = t_.resident[s] ? 0 : -1;
    last_[s] = 0;
    absent_[s] = -1;
  }
  for (const Move& move : moves) {
    out_[move.out].push_back(move.hole);
    back_[move.back].push_back(move.hole);
    move_of_[move.hole] = 1;
  }
  bool possible = true;
  for (int32_t op = 0; op < t_.ops() && possible; ++op) {
    for (int32_t moved : back_[op]) {
      int32_t storage = t_.storage[moved];
      if (absent_[storage] >= 0) fetch(storage);
    }
    bool complete = true;
    for (int32_t storage : t_.reads[op]) complete = complete && opened_[storage] >= 0;
    if (!complete) {
      possible = closure(op);
      if (!possible) break;
      rebuild(op, choice);
    }
    auto run = static_cast<int32_t>(ops.size());
    ops.push_back(op);
    at.push_back(op);
    seconds += t_.seconds[op];
    for (int32_t storage : t_.outputs[op]) opened_[storage] = run;
    for (int32_t storage : t_.touched[op]) {
      last_[storage] = run;
      int32_t here = ++hole_[storage];
      if (move_of_[here] >= 0) {
        host_copy_of_[here] = static_cast<int32_t>(host_copies.size());
        host_copies.push_back({here, storage, run, run, run});
      } else if (choice[here] != kKeep) {
        intervals.push_back({storage, opened_[storage], run});
        opened_[storage] = -1;
      }
    }
    for (int32_t moved : out_[op]) {
      int32_t storage = t_.storage[moved];
      intervals.push_back({storage, opened_[storage], run});
      opened_[storage] = -1;
      absent_[storage] = host_copy_of_[moved];
      host_copies[host_copy_of_[moved]].freed = run;
    }
  }
  for (const Move& move : moves) {
    out_[move.out].clear();
    back_[move.back].clear();
    move_of_[move.hole] = -1;
  }
  work += t_.ops() + static_cast<int64_t>(ops.size());
  if (!possible) return false;
  auto end = static_cast<int32_t>(ops.size()) - 1;
  for (int32_t s = 0; s < t_.storages(); ++s)
    if (opened_[s] >= 0 && !t_.resident[s])
      intervals.push_back({s, opened_[s], t_.keep[s] ? end : last_[s]});
  settle();
  sum();
  return true;
}

// Copies a storage back before the next run.
void Simulation::fetch(int32_t storage) {
  auto run = static_cast<int32_t>(ops.size());
  opened_[storage] = last_[storage] = run;
  host_copies[absent_[storage]].fetched = run;
  absent_[storage] = -1;
}

// Finds the ops to run again before `op`, into runs_, and the storages to fetch, into fetched_.
bool Simulation::closure(int32_t op) {
  ++stamp_;
  missing_.clear();
  runs_.clear();
  fetched_.clear();
  for (int32_t storage : t_.reads[op])
    if (opened_[storage] < 0) {
      missing_.push_back(storage);
      storage_seen_[storage] = stamp_;
    }
  while (!missing_.empty()) {
    int32_t storage = missing_.back();
    missing_.pop_back();
    if (absent_[storage] >= 0) {
      fetched_.push_back(storage);
      continue;
    }
    if (!t_.rebuildable[storage]) return false;
    for (int32_t again : t_.chain[storage]) {
      if (again >= op) break;
      if (op_seen_[again] == stamp_) continue;
      if (t_.expires[again] < op) return false;
      op_seen_[again] = stamp_;
      runs_.push_back(again);
      for (int32_t source : t_.reads[again])
        if (opened_[source] < 0 && storage_seen_[source] != stamp_) {
          storage_seen_[source] = stamp_;
          missing_.push_back(source);
        }
      for (int32_t made : t_.outputs[again]) {
        // A storage that was changed in place since must not be recomputed in its first version.
        bool away = absent_[made] >= 0 || opened_[made] >= 0;
        auto chain = t_.chain[made];
        if (!away && storage_seen_[made] != stamp_ && chain.end() - chain.begin() > 1) {
          storage_seen_[made] = stamp_;
          missing_.push_back(made);
        }
      }
    }
  }
  std::sort(runs_.begin(), runs_.end());
  return true;
}

void Simulation::rebuild(int32_t op, const Choice& choice) {
  for (int32_t storage : fetched_) fetch(storage);
  built_.clear();
  for (int32_t again : runs_) {
    auto run = static_cast<int32_t>(ops.size());
    ops.push_back(again);
    at.push_back(op);
    seconds += t_.seconds[again];
    for (int32_t storage : t_.reads[again]) last_[storage] = run;
    for (int32_t storage : t_.outputs[again]) {
      if (absent_[storage] >= 0) {
        extra_.emplace_back(run, t_.bytes[storage]);
      } else if (opened_[storage] < 0) {
        opened_[storage] = last_[storage] = run;
        built_.push_back(storage);
      } else {
        doubled_.emplace_back(storage, run);
      }
    }
  }
  auto needed = t_.touched[op];
  for (int32_t storage : built_)
    if (!needed.has(storage) && choice[hole_[storage]] > op) {
      intervals.push_back({storage, opened_[storage], last_[storage]});
      opened_[storage] = -1;
    }
}

// A second copy made after the last use of the first is no duplicate: it gets its own interval.
void Simulation::settle() {
  if (doubled_.empty()) return;
  std::vector<std::pair<int32_t, std::pair<int32_t, int32_t>>> spans;
  std::vector<int32_t> watched;
  for (const auto& [storage, run] : doubled_) watched.push_back(storage);
  std::sort(watched.begin(), watched.end());
  watched.erase(std::unique(watched.begin(), watched.end()), watched.end());
  for (const Interval& it : intervals)
    if (std::binary_search(watched.begin(), watched.end(), it.storage))
      spans.push_back({it.storage, {it.first, it.last}});
  std::sort(spans.begin(), spans.end());
  for (const auto& [storage, run] : doubled_) {
    auto here = std::lower_bound(spans.begin(), spans.end(), storage,
                                 [](const auto& span, int32_t s) { return span.first < s; });
    bool inside = false;
    for (; here != spans.end() && here->first == storage && !inside; ++here)
      inside = here->second.first <= run && run <= here->second.second;
    if (inside)
      extra_.emplace_back(run, t_.bytes[storage]);
    else
      intervals.push_back({storage, run, run});
  }
}

void Simulation::sum() {
  live.assign(ops.size() + 1, 0);
  for (const Interval& it : intervals) {
    live[it.first] += t_.bytes[it.storage];
    live[it.last + 1] -= t_.bytes[it.storage];
  }
  live.pop_back();
  int64_t held = t_.base;
  for (size_t run = 0; run < ops.size(); ++run) {
    held += live[run];
    live[run] = held + t_.workspace[ops[run]];
  }
  for (const auto& [run, size] : extra_) live[run] += size;
}

}  // namespace sn
