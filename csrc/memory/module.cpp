// Python bindings of sn_memory's C++: sn_memory._core. Arrays are passed as contiguous buffers of 64-bit
// integers; their sizes and the ranges of indices are checked here, values by sn_memory/pool/pack.py. The
// planner's searches are bound in bindings.cpp.
#include <algorithm>
#include <memory>

#include "buffers.h"
#include "bindings.h"
#include "pool_search.h"

namespace {

constexpr const char* kProblem = "sn_memory._core.problem";
constexpr const char* kSearch = "sn_memory._core.search";

using sn::Integers;
using sn::unlocked;
using ProblemPointer = std::shared_ptr<const sn::Indexed>;

// A search runs without the GIL, so two threads could enter it at once.
struct Desk {
  sn::Search search;
  bool busy = false;
};

bool read_problem(PyObject* first_arg, PyObject* last_arg, PyObject* size_arg, PyObject* align_arg,
                  int sections, sn::Problem* problem) {
  Integers first, last, size, align;
  if (!first.take(first_arg) || !last.take(last_arg) || !size.take(size_arg) ||
      !align.take(align_arg))
    return false;
  if (first.count() != size.count() || last.count() != size.count() ||
      align.count() != size.count() || size.count() >= (1u << 31)) {
    PyErr_SetString(PyExc_ValueError, "first, last, size and align do not have one length");
    return false;
  }
  if (std::any_of(align.begin(), align.end(), [](int64_t x) { return x < 1; })) {
    PyErr_SetString(PyExc_ValueError, "an alignment is below 1");
    return false;
  }
  if (!first.indices(&problem->first, sections) ||
      !last.indices(&problem->last, static_cast<int64_t>(sections) + 1))
    return false;
  for (size_t i = 0; i < size.count(); ++i)
    if (problem->first[i] >= problem->last[i]) {
      PyErr_SetString(PyExc_ValueError, "a buffer has no section");
      return false;
    }
  problem->size.assign(size.begin(), size.end());
  problem->align.assign(align.begin(), align.end());
  problem->sections = sections;
  return true;
}

// The search of a capsule, if no thread is using it; nullptr with an exception otherwise.
Desk* idle_desk(PyObject* capsule) {
  auto* desk = static_cast<Desk*>(PyCapsule_GetPointer(capsule, kSearch));
  if (!desk || !desk->busy) return desk;
  PyErr_SetString(PyExc_RuntimeError, "another thread runs this search; start one of your own");
  return nullptr;
}

PyObject* first_fit(PyObject*, PyObject* args) {
  PyObject *first, *last, *size, *align, *order_arg, *out_arg;
  int sections;
  if (!PyArg_ParseTuple(args, "OOOOiOO", &first, &last, &size, &align, &sections, &order_arg,
                        &out_arg))
    return nullptr;
  return sn::guarded([&]() -> PyObject* {
    sn::Problem problem;
    if (!read_problem(first, last, size, align, sections, &problem)) return nullptr;
    Integers order, out;
    std::vector<int32_t> indices;
    if (!order.take(order_arg) || !out.take(out_arg, true) ||
        !order.indices(&indices, problem.count()))
      return nullptr;
    if (out.count() != problem.size.size())
      return PyErr_Format(PyExc_ValueError, "%zu offsets for %d buffers", out.count(),
                          problem.count());
    std::vector<int64_t> offsets;
    if (!unlocked([&] { offsets = sn::first_fit(problem, indices); })) return nullptr;
    std::copy(offsets.begin(), offsets.end(), out.begin());
    Py_RETURN_NONE;
  });
}

PyObject* problem(PyObject*, PyObject* args) {
  PyObject *first, *last, *size, *align;
  int sections;
  if (!PyArg_ParseTuple(args, "OOOOi", &first, &last, &size, &align, &sections)) return nullptr;
  return sn::guarded([&]() -> PyObject* {
    sn::Problem plain;
    if (!read_problem(first, last, size, align, sections, &plain)) return nullptr;
    auto pointer = std::make_unique<ProblemPointer>();
    if (!unlocked([&] { *pointer = std::make_shared<const sn::Indexed>(std::move(plain)); }))
      return nullptr;
    return sn::capsule_of(std::move(pointer), kProblem);
  });
}

PyObject* search(PyObject*, PyObject* args) {
  PyObject *problem_arg, *rank_arg, *weight_arg;
  long long capacity;
  int rule;
  if (!PyArg_ParseTuple(args, "OLiOO", &problem_arg, &capacity, &rule, &rank_arg, &weight_arg))
    return nullptr;
  auto* shared = static_cast<ProblemPointer*>(PyCapsule_GetPointer(problem_arg, kProblem));
  if (!shared) return nullptr;
  const sn::Indexed& known = **shared;
  return sn::guarded([&]() -> PyObject* {
    Integers rank, weight;
    std::vector<int32_t> ranks;
    if (!rank.take(rank_arg) || !weight.take(weight_arg) || !rank.indices(&ranks, known.count()))
      return nullptr;
    if (ranks.size() != known.size.size() ||
        weight.count() != static_cast<size_t>(known.sections) || rule < 0 || rule > 1 ||
        std::any_of(weight.begin(), weight.end(), [](int64_t x) { return x < 1; }))
      return PyErr_Format(PyExc_ValueError, "rank, weight or rule do not suit %d buffers",
                          known.count());
    std::unique_ptr<Desk> desk(
        new Desk{sn::Search(*shared, capacity, static_cast<sn::Rule>(rule), std::move(ranks),
                            std::vector<int64_t>(weight.begin(), weight.end()))});
    return sn::capsule_of(std::move(desk), kSearch);
  });
}

PyObject* run(PyObject*, PyObject* args) {
  PyObject* capsule;
  long long decisions, work;
  if (!PyArg_ParseTuple(args, "OLL", &capsule, &decisions, &work)) return nullptr;
  Desk* desk = idle_desk(capsule);
  if (!desk) return nullptr;
  auto verdict = sn::Verdict::unfinished;
  desk->busy = true;
  const bool done = unlocked([&] { verdict = desk->search.run(decisions, work); });
  desk->busy = false;
  if (!done) return nullptr;
  return Py_BuildValue("(iL)", static_cast<int>(verdict),
                       static_cast<long long>(desk->search.spent()));
}

PyObject* read(PyObject*, PyObject* args) {
  PyObject *capsule, *offset_arg, *weight_arg;
  if (!PyArg_ParseTuple(args, "OOO", &capsule, &offset_arg, &weight_arg)) return nullptr;
  Desk* desk = idle_desk(capsule);
  if (!desk) return nullptr;
  const sn::Search* search = &desk->search;
  Integers offset, weight;
  if (!offset.take(offset_arg, true) || !weight.take(weight_arg, true)) return nullptr;
  if (offset.count() != search->offsets().size() || weight.count() != search->weights().size())
    return PyErr_Format(PyExc_ValueError, "%zu offsets and %zu weights do not suit the search",
                        offset.count(), weight.count());
  std::copy(search->offsets().begin(), search->offsets().end(), offset.begin());
  std::copy(search->weights().begin(), search->weights().end(), weight.begin());
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"first_fit", first_fit, METH_VARARGS, "See sn_memory.pool.pack.first_fit."},
    {"problem", problem, METH_VARARGS, "A problem with its lists, for `search`."},
    {"search", search, METH_VARARGS, "See sn_memory.pool.pack.Search."},
    {"run", run, METH_VARARGS, "See sn_memory.pool.pack.Search.run."},
    {"read", read, METH_VARARGS, "Copy the offsets and weights of a search out."},
    {"tables", sn::tables, METH_VARARGS, "The holes of a graph, for `simulate`, `fit` and `trim`."},
    {"simulate", sn::simulate, METH_VARARGS, "See sn_memory.plan.simulate.simulate."},
    {"fit", sn::fit_choice, METH_VARARGS, "See sn_memory.plan.search.candidates.fit."},
    {"trim", sn::trim_choice, METH_VARARGS, "See sn_memory.plan.search.candidates.trim."},
    {"anneal", sn::anneal_choice, METH_VARARGS, "See sn_memory.plan.search.improve.anneal."},
    {"contents", sn::contents, METH_O, "What dictionaries of a list hold, for `unchanged`."},
    {"unchanged", sn::unchanged, METH_VARARGS, "Whether these hold the same objects still."},
    {"pack_mask", sn::pack_mask, METH_VARARGS, "Where values meet a test, a bit each."},
    {"spread_mask", sn::spread_mask, METH_VARARGS, "Values, or one, where a bit is set; else 0."},
    {"two_values", sn::two_values, METH_VARARGS, "The one value there is beside zero; -1: others."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "_core", "C++ back end of sn_memory.", -1,
                      methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__core() { return PyModule_Create(&module); }
