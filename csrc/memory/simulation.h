// From decisions to runs, peak and seconds: see sn_memory/plan/simulate.py and search/candidates.py;
// tests/oracles has the same in Python, to the last bit of every sum. A search simulates thousands of
// choices, so all scratch memory is kept between calls.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

namespace sn {

constexpr int32_t kKeep = -1;

// Rows of different lengths, one after the other.
struct Ragged {
  std::vector<int32_t> start, items;
  struct Row {
    const int32_t *first, *last;
    const int32_t* begin() const { return first; }
    const int32_t* end() const { return last; }
    bool has(int32_t item) const {
      for (int32_t each : *this)
        if (each == item) return true;
      return false;
    }
  };
  Row operator[](int32_t row) const {
    return {items.data() + start[row], items.data() + start[row + 1]};
  }
};

// sn_memory.graph.liveness.Holes as numbers; fields of the same name have the same meaning.
struct Tables {
  Ragged reads, outputs, touched, chain;
  std::vector<int32_t> first, storage, start, end, expires;
  std::vector<int64_t> bytes, workspace;
  std::vector<double> seconds;
  std::vector<char> resident, keep, rebuildable, stays;
  int64_t base = 0;

  int32_t ops() const { return static_cast<int32_t>(seconds.size()); }
  int32_t storages() const { return static_cast<int32_t>(bytes.size()); }
  int32_t holes() const { return static_cast<int32_t>(storage.size()); }
  bool inner(int32_t hole) const { return hole + 1 < first[storage[hole] + 1]; }
};

struct Move {
  int32_t hole, out, back;
};

struct HostCopy {
  int32_t hole, storage, left, freed, fetched;
};

struct Interval {
  int32_t storage, first, last;
};

using Choice = std::vector<int32_t>;

// Simulates choices, one after the other; the fields are those of sn_memory.plan.simulate.Schedule.
class Simulation {
 public:
  explicit Simulation(const Tables& tables);

  // False if the choice cannot be carried out.
  bool run(const Choice& choice, const std::vector<Move>& moves);

  std::vector<int32_t> ops, at;
  std::vector<Interval> intervals;
  std::vector<int64_t> live;
  std::vector<HostCopy> host_copies;
  double seconds = 0;
  int64_t peak() const;
  // Work so far, in simulated ops; table look-ups count as well. It depends only on the calls, so a
  // search that ends by it ends at the same point on any machine.
  int64_t work = 0;

 private:
  bool closure(int32_t op);
  void rebuild(int32_t op, const Choice& choice);
  void settle();
  void sum();
  void fetch(int32_t storage);

  const Tables& t_;
  std::vector<int32_t> hole_, opened_, last_;
  // Per storage: the host copy it is on, or -1.
  std::vector<int32_t> absent_;
  // Marks of the current closure: equal to stamp_ if seen.
  std::vector<int32_t> storage_seen_, op_seen_;
  int32_t stamp_ = 0;
  std::vector<int32_t> missing_, runs_, fetched_, built_;
  std::vector<std::pair<int32_t, int32_t>> doubled_;
  std::vector<std::pair<int32_t, int64_t>> extra_;
  std::vector<std::vector<int32_t>> out_, back_;
  std::vector<int32_t> move_of_, host_copy_of_;
};

// Called now and then; true ends the work.
using Late = std::function<bool()>;

// sn_memory.plan.search.candidates.fit and trim: both change the choice; fit says whether it found one.
bool fit(const Tables& tables, Simulation& simulation, Choice& choice, const std::vector<Move>& moves,
         const std::vector<double>& factors, int64_t budget, double dear, int rounds,
         const Late& late);
void trim(const Tables& tables, Simulation& simulation, Choice& choice, const std::vector<Move>& moves,
          const std::vector<int32_t>& order, int64_t budget, bool filtered, const Late& late);

}  // namespace sn
