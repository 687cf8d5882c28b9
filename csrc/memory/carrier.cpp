// windows, lower_moved, lane_seconds and host_peak_bytes of sn_memory/cost/offload.py.
#include <algorithm>
#include <limits>
#include <tuple>

#include "annealing.h"

namespace sn {

Carrier::Carrier(const Tables& tables, Lowering& lowering, const Lanes& lanes)
    : t_(tables), lowering_(lowering), lanes_(lanes), copied_(tables.storages()),
      ready_(tables.storages()), ending_(tables.end), back_(tables.gaps()) {
  double clock = 0;
  for (double seconds : t_.seconds) {
    clock += seconds;
    ends_.push_back(clock);
    starts_.push_back(clock - seconds);
  }
}

bool Carrier::run(const Choice& choice, const std::vector<char>& moved) {
  chosen_.clear();
  if (lanes_.open())
    for (int32_t gap = 0; gap < t_.gaps(); ++gap)
      if (moved[gap]) chosen_.push_back(gap);
  for (int32_t gap : chosen_) ending_[gap] = t_.end[gap];
  windows();
  if (!lowering_.run(choice, moves_)) return false;
  // Rebuilds may need a storage earlier than its own next use.
  if (early()) {
    windows();
    if (!lowering_.run(choice, moves_)) return false;
  }
  seconds = lowering_.trips.empty() ? lowering_.seconds : lanes();
  return lanes_.pinned < 0 || lowering_.trips.empty() || host_peak() <= lanes_.pinned;
}

bool Carrier::early() {
  bool any = false;
  for (const Move& move : moves_) back_[move.gap] = move.back;
  for (const Trip& trip : lowering_.trips) {
    int32_t fetched = lowering_.at[trip.fetched];
    if (fetched >= back_[trip.gap]) continue;
    ending_[trip.gap] = std::min(ending_[trip.gap], fetched);
    any = true;
  }
  return any;
}

void Carrier::windows() {
  moves_.clear();
  std::vector<int32_t>& gaps = chosen_;
  auto brief = [&](int32_t gap) { return ending_[gap] - t_.start[gap] <= 1; };
  std::sort(gaps.begin(), gaps.end(), [&](int32_t a, int32_t b) {
    return std::tie(t_.start[a], a) < std::tie(t_.start[b], b);
  });
  double lane = 0;
  for (int32_t gap : gaps) {
    if (brief(gap)) continue;
    double copy = lanes_.latency + static_cast<double>(t_.bytes[t_.storage[gap]]) / lanes_.out;
    lane = std::max(lane, ends_[t_.start[gap]]) + copy;
    auto place = std::lower_bound(ends_.begin() + t_.start[gap], ends_.end(), lane);
    back_[gap] = std::min(static_cast<int32_t>(place - ends_.begin()), ending_[gap] - 2);
  }
  std::sort(gaps.begin(), gaps.end(), [&](int32_t a, int32_t b) {
    return ending_[a] != ending_[b] ? ending_[a] > ending_[b] : a < b;
  });
  lane = std::numeric_limits<double>::infinity();
  for (int32_t gap : gaps) {
    if (brief(gap)) continue;
    int32_t end = ending_[gap], out = back_[gap];
    double copy = lanes_.latency + static_cast<double>(t_.bytes[t_.storage[gap]]) / lanes_.back;
    lane = std::min(lane, end < t_.ops() ? starts_[end] : ends_.back()) - copy;
    auto place = static_cast<int32_t>(
        std::upper_bound(starts_.begin(), starts_.end(), lane) - starts_.begin());
    moves_.push_back({gap, out, std::min(std::max(place - 1, out + 1), end)});
  }
}

double Carrier::lanes() {
  leave_.clear();
  free_.clear();
  fetch_.clear();
  for (const Trip& trip : lowering_.trips) {
    leave_.emplace_back(trip.left, trip.storage);
    free_.emplace_back(trip.freed, trip.storage);
    fetch_.emplace_back(trip.fetched, trip.storage);
  }
  auto by_run = [](const auto& a, const auto& b) { return a.first < b.first; };
  for (auto* events : {&leave_, &free_, &fetch_})
    std::stable_sort(events->begin(), events->end(), by_run);
  std::fill(ready_.begin(), ready_.end(), 0.0);
  double clock = 0, down = 0, up = 0;
  size_t leave = 0, free = 0, fetch = 0;
  for (int32_t run = 0; run < static_cast<int32_t>(lowering_.ops.size()); ++run) {
    for (; fetch < fetch_.size() && fetch_[fetch].first == run; ++fetch) {
      int32_t storage = fetch_[fetch].second;
      up = std::max(std::max(up, copied_[storage]), clock) + lanes_.latency +
           static_cast<double>(t_.bytes[storage]) / lanes_.back;
      ready_[storage] = up;
    }
    int32_t op = lowering_.ops[run];
    for (int32_t storage : t_.reads[op]) clock = std::max(clock, ready_[storage]);
    clock += t_.seconds[op];
    for (; leave < leave_.size() && leave_[leave].first == run; ++leave) {
      int32_t storage = leave_[leave].second;
      down = std::max(std::max(down, clock), ready_[storage]) + lanes_.latency +
             static_cast<double>(t_.bytes[storage]) / lanes_.out;
      ready_[storage] = 0;
      copied_[storage] = down;
    }
    for (; free < free_.size() && free_[free].first == run; ++free)
      clock = std::max(clock, copied_[free_[free].second]);
  }
  for (double moment : ready_) clock = std::max(clock, moment);
  return clock;
}

int64_t Carrier::host_peak() {
  // A fetch before run n comes before a copy out after run n.
  std::vector<std::tuple<int32_t, int, int64_t>> events;
  for (const Trip& trip : lowering_.trips) {
    events.emplace_back(trip.left, 1, t_.bytes[trip.storage]);
    events.emplace_back(trip.fetched, 0, -t_.bytes[trip.storage]);
  }
  std::sort(events.begin(), events.end());
  int64_t held = 0, most = 0;
  for (const auto& event : events) {
    held += std::get<2>(event);
    most = std::max(most, held);
  }
  return most;
}

}  // namespace sn
