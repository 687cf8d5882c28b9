// What sn_memory/plan/simulate.py, search/candidates.py and others call. Every size and index that comes in is checked.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

namespace sn {

PyObject* tables(PyObject*, PyObject* args);
PyObject* simulate(PyObject*, PyObject* args);
PyObject* fit_choice(PyObject*, PyObject* args);
PyObject* trim_choice(PyObject*, PyObject* args);
PyObject* anneal_choice(PyObject*, PyObject* args);
// What sn_memory/torch/model/guards.py calls.
PyObject* contents(PyObject*, PyObject* list);
PyObject* unchanged(PyObject*, PyObject* args);
// What sn_memory/torch/activations/packing.py calls.
PyObject* pack_mask(PyObject*, PyObject* args);
PyObject* spread_mask(PyObject*, PyObject* args);
PyObject* two_values(PyObject*, PyObject* args);

}  // namespace sn
