// windows, simulate_moved, lane_seconds and host_peak_bytes of sn_memory/cost/offload.py.
#include <algorithm>
#include <limits>
#include <tuple>

#include "annealing.h"

namespace sn {

Offload::Offload(const Tables& tables, Simulation& simulation, const Lanes& lanes)
    : t_(tables), simulation_(simulation), lanes_(lanes), copied_(tables.storages()),
      ready_(tables.storages()), ending_(tables.end), back_(tables.holes()) {
  double clock = 0;
  for (double seconds : t_.seconds) {
    clock += seconds;
    ends_.push_back(clock);
    starts_.push_back(clock - seconds);
  }
}

bool Offload::run(const Choice& choice, const Moved& moved) {
  chosen_.clear();
  if (lanes_.open())
    for (int32_t hole = 0; hole < t_.holes(); ++hole)
      if (moved[hole]) chosen_.push_back(hole);
  for (int32_t hole : chosen_) ending_[hole] = t_.end[hole];
  windows(moved);
  if (!simulation_.run(choice, moves_)) return false;
  // Rebuilds may need a storage earlier than its own next use.
  if (early()) {
    windows(moved);
    if (!simulation_.run(choice, moves_)) return false;
  }
  seconds = simulation_.host_copies.empty() ? simulation_.seconds : lanes();
  return lanes_.pinned < 0 || simulation_.host_copies.empty() || host_peak() <= lanes_.pinned;
}

bool Offload::early() {
  bool any = false;
  for (const Move& move : moves_) back_[move.hole] = move.back;
  for (const HostCopy& host_copy : simulation_.host_copies) {
    int32_t fetched = simulation_.at[host_copy.fetched];
    if (fetched >= back_[host_copy.hole]) continue;
    ending_[host_copy.hole] = std::min(ending_[host_copy.hole], fetched);
    any = true;
  }
  return any;
}

void Offload::windows(const Moved& moved) {
  moves_.clear();
  std::vector<int32_t>& holes = chosen_;
  auto brief = [&](int32_t hole) { return ending_[hole] - t_.start[hole] <= 1; };
  std::sort(holes.begin(), holes.end(), [&](int32_t a, int32_t b) {
    return std::tie(t_.start[a], a) < std::tie(t_.start[b], b);
  });
  double lane = 0, late = 0;
  for (int32_t hole : holes) {
    if (brief(hole)) continue;
    double copy = lanes_.latency + lanes_.out[t_.storage[hole]];
    double left = ends_[t_.start[hole]];
    lane = std::max(lane, left + late) + copy;
    if ((moved[hole] - 1) & kOut) {
      back_[hole] = t_.start[hole];
      late = lane - left;
      continue;
    }
    auto place = std::lower_bound(ends_.begin() + t_.start[hole], ends_.end(), lane - late);
    back_[hole] = std::min(static_cast<int32_t>(place - ends_.begin()), ending_[hole] - 2);
  }
  std::sort(holes.begin(), holes.end(), [&](int32_t a, int32_t b) {
    return ending_[a] != ending_[b] ? ending_[a] > ending_[b] : a < b;
  });
  lane = std::numeric_limits<double>::infinity();
  double early = 0;
  for (int32_t hole : holes) {
    if (brief(hole)) continue;
    int32_t end = ending_[hole], out = back_[hole];
    double copy = lanes_.latency + lanes_.back[t_.storage[hole]];
    double need = end < t_.ops() ? starts_[end] : ends_.back();
    lane = std::min(lane, need - early) - copy;
    if ((moved[hole] - 1) & kBack) {
      moves_.push_back({hole, out, end});
      early = need - lane;
      continue;
    }
    auto place = static_cast<int32_t>(
        std::upper_bound(starts_.begin(), starts_.end(), lane + early) - starts_.begin());
    moves_.push_back({hole, out, std::min(std::max(place - 1, out + 1), end)});
  }
}

double Offload::lanes() {
  leave_.clear();
  free_.clear();
  fetch_.clear();
  for (const HostCopy& host_copy : simulation_.host_copies) {
    leave_.emplace_back(host_copy.left, host_copy.storage);
    free_.emplace_back(host_copy.freed, host_copy.storage);
    fetch_.emplace_back(host_copy.fetched, host_copy.storage);
  }
  auto by_run = [](const auto& a, const auto& b) { return a.first < b.first; };
  for (auto* events : {&leave_, &free_, &fetch_})
    std::stable_sort(events->begin(), events->end(), by_run);
  std::fill(ready_.begin(), ready_.end(), 0.0);
  double clock = 0, down = 0, up = 0;
  size_t leave = 0, free = 0, fetch = 0;
  for (int32_t run = 0; run < static_cast<int32_t>(simulation_.ops.size()); ++run) {
    for (; fetch < fetch_.size() && fetch_[fetch].first == run; ++fetch) {
      int32_t storage = fetch_[fetch].second;
      up = std::max(std::max(up, copied_[storage]), clock) + lanes_.latency + lanes_.back[storage];
      ready_[storage] = up;
    }
    int32_t op = simulation_.ops[run];
    for (int32_t storage : t_.reads[op]) clock = std::max(clock, ready_[storage]);
    clock += t_.seconds[op];
    for (; leave < leave_.size() && leave_[leave].first == run; ++leave) {
      int32_t storage = leave_[leave].second;
      down = std::max(std::max(down, clock), ready_[storage]) + lanes_.latency +
             lanes_.out[storage];
      ready_[storage] = 0;
      copied_[storage] = down;
    }
    for (; free < free_.size() && free_[free].first == run; ++free)
      clock = std::max(clock, copied_[free_[free].second]);
  }
  for (double moment : ready_) clock = std::max(clock, moment);
  return clock;
}

int64_t Offload::host_peak() {
  // A fetch before run n comes before a copy out after run n.
  std::vector<std::tuple<int32_t, int, int64_t>> events;
  for (const HostCopy& host_copy : simulation_.host_copies) {
    events.emplace_back(host_copy.left, 1, t_.bytes[host_copy.storage]);
    events.emplace_back(host_copy.fetched, 0, -t_.bytes[host_copy.storage]);
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
