// sn_memory._placing as a module of Python, an empty one: who walks through the package imports it.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

PyMODINIT_FUNC PyInit__placing() {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_placing", "The placing allocator: see sn_memory/pool/placing.py.", 0,
                               nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
