#include "bindings.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>

#include "annealing.h"
#include "buffers.h"
#include "simulation.h"

namespace sn {

namespace {

constexpr const char* kTables = "sn_memory._core.tables";

// The tables of a graph and the scratch memory for work on them, for one thread at a time.
struct Bench {
  Tables tables;
  std::unique_ptr<Simulation> simulation;
  bool busy = false;
};

// Calls work(bench) with the bench of a capsule. Other Python threads run meanwhile, and must not enter.
template <class Work>
PyObject* at_bench(PyObject* capsule, const Work& work) {
  auto* bench = static_cast<Bench*>(PyCapsule_GetPointer(capsule, kTables));
  if (!bench) return nullptr;
  if (bench->busy)
    return PyErr_Format(PyExc_RuntimeError, "another thread plans with these tables; make your own");
  bench->busy = true;
  PyObject* made = guarded([&] { return work(*bench); });
  bench->busy = false;
  return made;
}

bool unsuited(const char* what) {
  PyErr_Format(PyExc_ValueError, "%s do not suit the graph", what);
  return false;
}

// Lengths of rows, and their concatenated items, all below `bound`.
bool ragged(PyObject* counts_arg, PyObject* items_arg, size_t rows, int64_t bound, Ragged* out) {
  Integers counts, items;
  if (!counts.take(counts_arg) || !items.take(items_arg) || !items.indices(&out->items, bound))
    return false;
  out->start.assign(1, 0);
  for (int64_t count : counts) {
    if (count < 0 || count > static_cast<int64_t>(out->items.size()) - out->start.back())
      return unsuited("rows");
    out->start.push_back(out->start.back() + static_cast<int32_t>(count));
  }
  bool whole = static_cast<size_t>(out->start.back()) == out->items.size();
  return counts.count() == rows && whole ? true : unsuited("rows");
}

bool column(PyObject* arg, size_t count, int64_t bound, std::vector<int32_t>* out) {
  Integers values;
  if (!values.take(arg) || !values.indices(out, bound)) return false;
  return out->size() == count ? true : unsuited("columns");
}

// Small numbers below `bound`; by default, flags.
bool flags(PyObject* arg, size_t count, std::vector<char>* out, int64_t bound = 2) {
  std::vector<int32_t> values;
  if (!column(arg, count, bound, &values)) return false;
  out->assign(values.begin(), values.end());
  return true;
}

bool sizes(PyObject* arg, size_t count, std::vector<int64_t>* out) {
  Integers values;
  if (!values.take(arg)) return false;
  out->assign(values.begin(), values.end());
  return out->size() == count ? true : unsuited("sizes");
}

// Doubles are passed as a buffer of eight bytes each, like everything else.
bool doubles(PyObject* arg, std::vector<double>* out) {
  Integers values;
  if (!values.take(arg)) return false;
  const auto* first = reinterpret_cast<const double*>(values.begin());
  out->assign(first, first + values.count());
  return true;
}

// The holes of a storage are `first[s]` to `first[s + 1]`, in the order of its uses.
bool consistent(const Tables& t) {
  if (t.first.front() != 0 || t.first.back() != t.holes()) return unsuited("holes");
  for (int32_t s = 0; s < t.storages(); ++s) {
    if (t.first[s] > t.first[s + 1]) return unsuited("holes");
    for (int32_t hole = t.first[s]; hole < t.first[s + 1]; ++hole)
      if (t.storage[hole] != s || t.start[hole] >= t.end[hole]) return unsuited("holes");
  }
  std::vector<int32_t> uses(t.storages(), 0);
  for (int32_t storage : t.touched.items) ++uses[storage];
  for (int32_t s = 0; s < t.storages(); ++s)
    if (uses[s] != t.first[s + 1] - t.first[s]) return unsuited("uses");
  return true;
}

bool read_choice(PyObject* arg, const Tables& t, Choice* out) {
  Integers values;
  if (!values.take(arg)) return false;
  if (values.count() != static_cast<size_t>(t.holes())) return unsuited("choices");
  for (int64_t held : values)
    if (held < kKeep || held > t.ops()) return unsuited("choices");
  out->assign(values.begin(), values.end());
  return true;
}

bool read_moves(PyObject* arg, const Tables& t, std::vector<Move>* out) {
  Integers values;
  if (!values.take(arg)) return false;
  if (values.count() % 3) return unsuited("moves");
  std::vector<char> seen(t.holes(), 0);
  for (const int64_t* at = values.begin(); at != values.end(); at += 3) {
    bool known = at[0] >= 0 && at[0] < t.holes() && !seen[at[0]];
    if (!known || at[1] < t.start[at[0]] || at[1] >= at[2] || at[2] > t.end[at[0]])
      return unsuited("moves");
    seen[at[0]] = 1;
    out->push_back({static_cast<int32_t>(at[0]), static_cast<int32_t>(at[1]),
                    static_cast<int32_t>(at[2])});
  }
  return true;
}

bool write_choice(PyObject* arg, const Choice& choice) {
  Integers out;
  if (!out.take(arg, true) || out.count() != choice.size()) return unsuited("choices");
  std::copy(choice.begin(), choice.end(), out.begin());
  return true;
}

template <class Values>
PyObject* bytes_of(const Values& values) {
  return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(values.data()),
                                   static_cast<Py_ssize_t>(values.size() * sizeof(values[0])));
}

// Releases the GIL as long as this lives. Work is ended by a Python callable, for which `late` briefly
// acquires the GIL now and then; or, given an integer, after that many units of work, whatever the
// clock. Both handle Ctrl-C; an exception ends the work too, and is raised afterwards.
class Unlocked {
 public:
  Unlocked(PyObject* until, const Simulation& simulation) : until_(until), work_(simulation.work) {
    counts_ = PyLong_Check(until) != 0;
    if (counts_) end_ = work_ + std::min(PyLong_AsLongLong(until), kMost - work_);
    thread_ = PyEval_SaveThread();
  }
  ~Unlocked() { PyEval_RestoreThread(thread_); }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

  Late late() {
    return [this] { return ask(); };
  }

 private:
  bool ask() {
    if (counts_ && work_ >= end_) return true;
    const auto now = std::chrono::steady_clock::now();
    if (late_ || (asked_ && now - last_ < kBetween)) return late_;
    PyEval_RestoreThread(thread_);
    if (counts_) {
      late_ = PyErr_CheckSignals() != 0;
    } else {
      PyObject* answer = PyObject_CallNoArgs(until_);
      late_ = !answer || PyObject_IsTrue(answer) != 0;
      Py_XDECREF(answer);
    }
    thread_ = PyEval_SaveThread();
    asked_ = true;
    last_ = std::chrono::steady_clock::now();
    return late_;
  }

  // If another thread is running, the GIL is handed over only after some milliseconds.
  static constexpr std::chrono::milliseconds kBetween{20};
  static constexpr long long kMost = INT64_MAX;
  PyObject* until_;
  const int64_t& work_;
  int64_t end_ = 0;
  PyThreadState* thread_;
  bool counts_ = false, asked_ = false, late_ = false;
  std::chrono::steady_clock::time_point last_;
};

// Runs search(late), which changes `choice` without the GIL; returns its work, or -1 with an exception set.
template <class Search>
int64_t searched(Bench& bench, PyObject* until, PyObject* choice_arg, const Choice& choice,
                 const Search& search) {
  const int64_t before = bench.simulation->work;
  {
    Unlocked work(until, *bench.simulation);
    search(work.late());
  }
  if (PyErr_Occurred() || !write_choice(choice_arg, choice)) return -1;
  return bench.simulation->work - before;
}

PyObject* spent(int64_t work) { return work < 0 ? nullptr : PyLong_FromLongLong(work); }

}  // namespace

PyObject* tables(PyObject*, PyObject* args) {
  PyObject *reads[2], *outputs[2], *touched[2], *chain[2];
  PyObject *first, *storage, *start, *end, *expires, *bytes, *workspace, *seconds;
  PyObject *resident, *keep, *rebuildable, *stays;
  long long base;
  if (!PyArg_ParseTuple(args, "(OO)(OO)(OO)(OO)OOOOOOOOOOOOL", &reads[0], &reads[1],
                        &outputs[0], &outputs[1], &touched[0], &touched[1],
                        &chain[0], &chain[1], &first, &storage, &start, &end, &expires, &bytes,
                        &workspace, &seconds, &resident, &keep, &rebuildable, &stays, &base))
    return nullptr;
  return guarded([&]() -> PyObject* {
    auto bench = std::make_unique<Bench>();
    Tables& t = bench->tables;
    Integers sized, gapped;
    if (!sized.take(bytes) || !doubles(seconds, &t.seconds) || !gapped.take(storage))
      return nullptr;
    size_t storages = sized.count(), ops = t.seconds.size(), holes = gapped.count();
    if (storages >= (1u << 30) || ops >= (1u << 30) || holes >= (1u << 30))
      return unsuited("sizes"), nullptr;
    auto all = static_cast<int64_t>(ops);
    t.base = base;
    auto held = static_cast<int64_t>(storages);
    if (!ragged(reads[0], reads[1], ops, held, &t.reads) ||
        !ragged(outputs[0], outputs[1], ops, held, &t.outputs) ||
        !ragged(touched[0], touched[1], ops, held, &t.touched) ||
        !ragged(chain[0], chain[1], storages, all, &t.chain) ||
        !column(first, storages + 1, static_cast<int64_t>(holes) + 1, &t.first) ||
        !column(storage, holes, held, &t.storage) || !column(start, holes, all, &t.start) ||
        !column(end, holes, all + 1, &t.end) || !column(expires, ops, all + 1, &t.expires) ||
        !sizes(bytes, storages, &t.bytes) || !sizes(workspace, ops, &t.workspace) ||
        !flags(resident, storages, &t.resident) || !flags(keep, storages, &t.keep) ||
        !flags(rebuildable, storages, &t.rebuildable) || !flags(stays, holes, &t.stays) ||
        !consistent(t))
      return nullptr;
    bench->simulation = std::make_unique<Simulation>(t);
    return capsule_of(std::move(bench), kTables);
  });
}

PyObject* simulate(PyObject*, PyObject* args) {
  PyObject *capsule, *choice_arg, *moves_arg;
  if (!PyArg_ParseTuple(args, "OOO", &capsule, &choice_arg, &moves_arg)) return nullptr;
  return at_bench(capsule, [&](Bench& bench) -> PyObject* {
    Choice choice;
    std::vector<Move> moves;
    if (!read_choice(choice_arg, bench.tables, &choice) ||
        !read_moves(moves_arg, bench.tables, &moves))
      return nullptr;
    Simulation& made = *bench.simulation;
    if (!made.run(choice, moves)) Py_RETURN_NONE;
    return Py_BuildValue("(NNNNNd)", bytes_of(made.ops), bytes_of(made.at),
                         bytes_of(made.intervals), bytes_of(made.live), bytes_of(made.host_copies),
                         made.seconds);
  });
}

PyObject* fit_choice(PyObject*, PyObject* args) {
  PyObject *capsule, *choice_arg, *moves_arg, *factors_arg, *until;
  long long budget;
  double dear;
  int rounds;
  if (!PyArg_ParseTuple(args, "OOOOLdiO", &capsule, &choice_arg, &moves_arg, &factors_arg,
                        &budget, &dear, &rounds, &until))
    return nullptr;
  return at_bench(capsule, [&](Bench& bench) -> PyObject* {
    Choice choice;
    std::vector<Move> moves;
    std::vector<double> factors;
    if (!read_choice(choice_arg, bench.tables, &choice) ||
        !read_moves(moves_arg, bench.tables, &moves) || !doubles(factors_arg, &factors))
      return nullptr;
    if (!factors.empty() && factors.size() != choice.size()) return unsuited("factors"), nullptr;
    bool found;
    const int64_t work = searched(bench, until, choice_arg, choice, [&](const Late& late) {
      found = fit(bench.tables, *bench.simulation, choice, moves, factors, budget, dear, rounds,
                  late);
    });
    if (work < 0) return nullptr;
    return Py_BuildValue("(NL)", PyBool_FromLong(found), static_cast<long long>(work));
  });
}

PyObject* trim_choice(PyObject*, PyObject* args) {
  PyObject *capsule, *choice_arg, *moves_arg, *order_arg, *until;
  long long budget;
  int filtered;
  if (!PyArg_ParseTuple(args, "OOOOLpO", &capsule, &choice_arg, &moves_arg, &order_arg, &budget,
                        &filtered, &until))
    return nullptr;
  return at_bench(capsule, [&](Bench& bench) -> PyObject* {
    Choice choice;
    std::vector<Move> moves;
    std::vector<int32_t> order;
    Integers listed;
    if (!read_choice(choice_arg, bench.tables, &choice) ||
        !read_moves(moves_arg, bench.tables, &moves) || !listed.take(order_arg) ||
        !listed.indices(&order, bench.tables.holes()))
      return nullptr;
    return spent(searched(bench, until, choice_arg, choice, [&](const Late& late) {
      trim(bench.tables, *bench.simulation, choice, moves, order, budget, filtered != 0, late);
    }));
  });
}

PyObject* anneal_choice(PyObject*, PyObject* args) {
  PyObject *capsule, *choice_arg, *moved_arg, *leaves_arg, *out_arg, *back_arg, *until;
  long long budget, tries, pinned;
  unsigned long long seed;
  int recompute, wait;
  double latency, warm, cold;
  if (!PyArg_ParseTuple(args, "OOOOLLKpp(dOOL)(dd)O", &capsule, &choice_arg, &moved_arg,
                        &leaves_arg, &budget, &tries, &seed, &recompute, &wait, &latency, &out_arg,
                        &back_arg, &pinned, &warm, &cold, &until))
    return nullptr;
  return at_bench(capsule, [&](Bench& bench) -> PyObject* {
    Lanes lanes{latency, {}, {}, pinned};
    const Settings settings{budget, tries, seed, recompute != 0, wait != 0, warm, cold};
    Choice choice;
    std::vector<char> moved, leaves;
    if (!read_choice(choice_arg, bench.tables, &choice) ||
        !flags(moved_arg, choice.size(), &moved, 2 + (kOut | kBack)) ||
        !flags(leaves_arg, choice.size(), &leaves) || !doubles(out_arg, &lanes.out) ||
        !doubles(back_arg, &lanes.back))
      return nullptr;
    const size_t storages = static_cast<size_t>(bench.tables.storages());
    if ((lanes.out.size() && lanes.out.size() != storages) || lanes.out.size() != lanes.back.size())
      return unsuited("lanes"), nullptr;
    if (!(warm > 0) || !(cold > 0)) return unsuited("settings"), nullptr;
    const int64_t work = searched(bench, until, choice_arg, choice, [&](const Late& late) {
      anneal(bench.tables, *bench.simulation, lanes, settings, leaves, choice, moved, late);
    });
    const Choice away(moved.begin(), moved.end());
    return work < 0 || !write_choice(moved_arg, away) ? nullptr : spent(work);
  });
}

}  // namespace sn
