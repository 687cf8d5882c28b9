// Simulated annealing over choices and offloads to the host: see sn_memory/plan/search/improve.py;
// tests/oracles/annealing_oracle.py makes the same decisions in Python.
#pragma once

#include "simulation.h"

namespace sn {

// The two transfer lanes: the latency of a copy, and the other seconds of each storage's; without the
// latter, lanes are closed. `pinned` below 0: no limit.
struct Lanes {
  double latency = 0;
  std::vector<double> out, back;
  int64_t pinned = -1;
  bool open() const { return !out.empty() && !back.empty(); }
};

// Per hole: 0 if it is not moved, else 1 plus the flags of copies that ops wait for, kOut and kBack.
using Moved = std::vector<char>;
constexpr char kOut = 1, kBack = 2;

// As in sn_memory.cost.offload: simulates choices whose moved holes get windows on the lanes.
class Offload {
 public:
  Offload(const Tables& tables, Simulation& simulation, const Lanes& lanes);

  // False if the choice cannot be carried out, or the host is too small for it.
  bool run(const Choice& choice, const Moved& moved);
  double seconds = 0;
  const Simulation& made() const { return simulation_; }

 private:
  void windows(const Moved& moved);
  bool early();
  double lanes();
  int64_t host_peak();

  const Tables& t_;
  Simulation& simulation_;
  Lanes lanes_;
  std::vector<double> starts_, ends_, copied_, ready_;
  std::vector<Move> moves_;
  // Per hole, the op before which its copy must be back: its end, or an earlier one for a rebuild.
  std::vector<int32_t> ending_, chosen_, back_;
  std::vector<std::pair<int32_t, int32_t>> leave_, free_, fetch_;
};

struct Settings {
  int64_t budget = 0, tries = 0;
  uint64_t seed = 0;
  bool recompute = true, wait = true;
  double warm = 0, cold = 0;
};

// Changes choice and moved to the fastest found within the budget, else to the lowest peak found.
// `leaves`, per hole: whether its storage may be offloaded during it.
void anneal(const Tables& tables, Simulation& simulation, const Lanes& lanes, const Settings& settings,
            const std::vector<char>& leaves, Choice& choice, Moved& moved, const Late& late);

}  // namespace sn
