#include <vector>

#include "bindings.h"

namespace sn {

namespace {

constexpr const char* kContents = "sn_memory._core.contents";

// Contents of dictionaries. Keys are kept alive; of values, and of the dictionaries, which are passed to
// each call, only addresses are kept: a capsule that held them would hide cycles from Python's collector.
struct Contents {
  std::vector<PyObject*> dictionaries;
  std::vector<Py_ssize_t> sizes;
  std::vector<PyObject*> keys;
  std::vector<PyObject*> values;

  ~Contents() {
    for (PyObject* it : keys) Py_DECREF(it);
  }
};

}  // namespace

PyObject* contents(PyObject*, PyObject* list) {
  if (!PyList_Check(list)) return PyErr_Format(PyExc_TypeError, "expected a list of dictionaries");
  return guarded([&]() -> PyObject* {
    auto made = std::make_unique<Contents>();
    for (Py_ssize_t at = 0; at < PyList_GET_SIZE(list); ++at) {
      PyObject* dictionary = PyList_GET_ITEM(list, at);
      if (!PyDict_Check(dictionary))
        return PyErr_Format(PyExc_TypeError, "item %zd is no dictionary", at);
      made->dictionaries.push_back(dictionary);
      made->sizes.push_back(PyDict_GET_SIZE(dictionary));
      Py_ssize_t place = 0;
      PyObject *key, *value;
      while (PyDict_Next(dictionary, &place, &key, &value)) {
        made->keys.push_back(key);
        Py_INCREF(key);
        made->values.push_back(value);
      }
    }
    return capsule_of(std::move(made), kContents);
  });
}

PyObject* unchanged(PyObject*, PyObject* args) {
  PyObject *capsule, *list;
  if (!PyArg_ParseTuple(args, "OO!", &capsule, &PyList_Type, &list)) return nullptr;
  auto* held = static_cast<Contents*>(PyCapsule_GetPointer(capsule, kContents));
  if (!held) return nullptr;
  // A training step has evicted all of this from the caches. Sizes first, as these loads are
  // independent; then the next dictionary's memory is prefetched while this one is compared.
  const size_t count = held->dictionaries.size();
  if (static_cast<size_t>(PyList_GET_SIZE(list)) != count) Py_RETURN_FALSE;
  for (size_t at = 0; at < count; ++at)
    if (PyList_GET_ITEM(list, static_cast<Py_ssize_t>(at)) != held->dictionaries[at] ||
        PyDict_GET_SIZE(held->dictionaries[at]) != held->sizes[at])
      Py_RETURN_FALSE;
  size_t next = 0;
  for (size_t at = 0; at < count; ++at) {
    if (held->sizes[at] == 0) continue;
    PyObject* dictionary = held->dictionaries[at];
    if (at + 4 < count)
      __builtin_prefetch(reinterpret_cast<PyDictObject*>(held->dictionaries[at + 4])->ma_keys);
    Py_ssize_t place = 0;
    PyObject *key, *value;
    while (PyDict_Next(dictionary, &place, &key, &value)) {
      if (key != held->keys[next] || value != held->values[next]) Py_RETURN_FALSE;
      ++next;
    }
  }
  Py_RETURN_TRUE;
}

}  // namespace sn
