// Depth-first search for a packing within a capacity; see sn_memory/pool/pack.py for the algorithm.
// tests/oracles/pool_search_oracle.py makes the same decisions in the same order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "pool_problem.h"

namespace sn {

enum class Verdict { impossible = 0, found = 1, unfinished = 2 };
enum class Rule { lowest = 0, weighted = 1 };

// A problem with the lists that searches need; shared by all its searches.
struct Indexed : Problem {
  explicit Indexed(Problem problem);
  std::vector<std::vector<int32_t>> members;     // per section: its live buffers, by number
  std::vector<std::vector<int32_t>> neighbours;  // per buffer: those live at the same time
};

class Search {
 public:
  Search(std::shared_ptr<const Indexed> problem, int64_t capacity, Rule rule,
         std::vector<int32_t> rank, std::vector<int64_t> weight);

  // Runs for at most `decisions` decisions, and stops soon after having visited `work` buffers, even
  // within a decision; the next call resumes.
  Verdict run(int64_t decisions, int64_t work);
  // Decisions made; one that visited far more buffers than usual counts several times.
  int64_t spent() const { return decisions_ + work_ / unit_; }
  const std::vector<int64_t>& offsets() const { return offset_; }
  const std::vector<int64_t>& weights() const { return weight_; }

 private:
  enum class What : uint8_t { least, base, slack, lowest, placed };
  struct Change {
    What what;
    int32_t index;
    int64_t before;
  };
  struct Range {
    size_t begin, end;
  };
  struct Pending {
    int32_t component, next;
    size_t choices;
  };
  struct Choice {
    int32_t buffer, component, pending;
    size_t trail, ids, components, agenda;
  };

  enum class Settled { yes, no, later };

  void set(What what, std::vector<int64_t>& values, int32_t index, int64_t value);
  void mark(int32_t i);
  void clear_marks();
  bool raise(int32_t i, int64_t offset);
  bool raise_onto_others(int32_t i);
  bool infer(int32_t section);
  Settled propagate(int64_t until);
  bool decide();
  bool place(int32_t i);
  bool forced(int32_t i) const;
  void undo(size_t trail);
  bool backtrack();
  void split();
  int32_t pick();
  int32_t pick_section() const;
  bool before(int32_t i, int32_t k) const;

  std::shared_ptr<const Indexed> shared_;
  const Indexed& problem_;
  int64_t capacity_;
  Rule rule_;
  bool refuted_ = false;
  // Consequences of a decision are still being inferred; the component is split afterwards.
  bool settling_ = true, split_after_ = true;
  int64_t decisions_ = 0, work_ = 0, unit_ = 1;
  std::vector<int32_t> rank_;
  std::vector<int64_t> weight_;  // [sections] how often each one ended a branch, times kUnit

  std::vector<int64_t> offset_;  // [n] offset of a placed buffer
  std::vector<int64_t> least_;   // [n] lower bound on the buffer's offset in this branch
  std::vector<int64_t> base_;    // [n] aligned top of the placed buffers beneath
  std::vector<int64_t> slack_;   // [sections] bytes that may still be wasted
  std::vector<int64_t> lowest_;  // [sections] least of the least offsets
  std::vector<char> placed_, marked_;
  std::vector<int32_t> queue_;  // sections to infer from; those before head_ are done
  size_t head_ = 0;
  std::vector<std::pair<int64_t, int64_t>> row_;

  // Values to restore when the last choice is undone: only the value of each at that choice, or
  // bounds that rise byte by byte would fill the memory. stamp_ says which are recorded already.
  std::vector<Change> trail_;
  std::vector<int64_t> stamp_[4];
  int64_t level_ = 1;
  std::vector<Choice> choices_;
  std::vector<int32_t> ids_;  // buffers of the components, by first section
  std::vector<Range> components_;
  std::vector<Pending> agenda_;
  int32_t component_, pending_;
};

}  // namespace sn
