// Python's door to the C++ back end: sn_compress._core. Arrays come as contiguous buffers, their
// sizes are checked here; the caller (ops/record.py) has checked the settings.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <new>

#include "groups.h"
#include "record.h"
#include "spectrum.h"

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "payload words are little-endian; build without the extension on this machine"
#endif

namespace {

class Buffer {
 public:
  ~Buffer() {
    if (view_.obj) PyBuffer_Release(&view_);
  }
  bool take(PyObject* object, bool writable) {
    return PyObject_GetBuffer(object, &view_, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) == 0;
  }
  template <typename T>
  T* as() const {
    return static_cast<T*>(view_.buf);
  }
  Py_ssize_t bytes() const { return view_.len; }

 private:
  Py_buffer view_ = {};
};


// The layout's numbers, in the order of `_numbers` in ops/record.py.
struct LayoutArguments {
  long long block, parts, kept, words;
  int values, code_bits, mantissa, bitmap;

  sn::Layout layout() const {
    return {block, parts, kept, words, static_cast<sn::Values>(values), code_bits, mantissa,
            bitmap != 0};
  }
};

// The number of rows, or -1 with an exception set if the buffers do not belong together.
int64_t rows_of(const Buffer& words, const Buffer& floats, const sn::Layout& layout) {
  const int64_t rows = words.bytes() / (4 * layout.words);
  if (words.bytes() != rows * layout.words * 4 || floats.bytes() != rows * layout.floats() * 4) {
    PyErr_Format(PyExc_ValueError, "%zd bytes of records and %zd of coefficients do not match",
                 words.bytes(), floats.bytes());
    return -1;
  }
  return rows;
}

// Whether the buffers of `count` elements in groups belong together; if not, an exception is set.
bool groups_match(int64_t count, int bits, int64_t group, const Buffer& bases, const Buffer& steps,
                  const Buffer& codes) {
  const bool legal = (bits == 1 || bits == 2 || bits == 4 || bits == 8) && group >= 32 &&
                     group <= 65536 && (group & (group - 1)) == 0;
  const int64_t groups = legal ? (count + group - 1) / group : -1;
  if (legal && bases.bytes() == 4 * groups && steps.bytes() == 2 * groups &&
      codes.bytes() == (count * bits + 7) / 8)
    return true;
  PyErr_Format(PyExc_ValueError,
               "%lld elements in groups of %lld and %d bits do not match %zd bytes of bases, %zd "
               "of steps and %zd of codes",
               static_cast<long long>(count), static_cast<long long>(group), bits, bases.bytes(),
               steps.bytes(), codes.bytes());
  return false;
}

PyObject* encode(PyObject*, PyObject* args) {
  PyObject *floats_arg, *memory_arg, *words_arg;
  LayoutArguments a;
  double decay;
  long long top;
  if (!PyArg_ParseTuple(args, "OOOLLLLiiipdL", &floats_arg, &memory_arg, &words_arg, &a.block,
                        &a.parts, &a.kept, &a.words, &a.values, &a.code_bits, &a.mantissa,
                        &a.bitmap, &decay, &top))
    return nullptr;
  const sn::Layout layout = a.layout();
  Buffer floats, memory, words;
  const bool remembers = memory_arg != Py_None;
  if (!floats.take(floats_arg, true) || !words.take(words_arg, true) ||
      (remembers && !memory.take(memory_arg, true)))
    return nullptr;
  const int64_t rows = rows_of(words, floats, layout);
  if (rows < 0) return nullptr;
  if (remembers && memory.bytes() != floats.bytes())
    return PyErr_Format(PyExc_ValueError, "memory has %zd bytes, the coefficients %zd",
                        memory.bytes(), floats.bytes());
  sn::Tally tally;
  bool out_of_memory = false;
  Py_BEGIN_ALLOW_THREADS
  try {
    tally = sn::encode_records(floats.as<float>(), remembers ? memory.as<float>() : nullptr,
                               words.as<uint32_t>(), rows, layout, static_cast<float>(decay), top);
  } catch (const std::bad_alloc&) {
    out_of_memory = true;
  }
  Py_END_ALLOW_THREADS
  if (out_of_memory) return PyErr_NoMemory();
  return Py_BuildValue("Ldd", static_cast<long long>(tally.saturated), tally.energy, tally.error);
}

PyObject* decode(PyObject*, PyObject* args) {
  PyObject *words_arg, *accum_arg;
  LayoutArguments a;
  double weight;
  if (!PyArg_ParseTuple(args, "OOLLLLiiipd", &words_arg, &accum_arg, &a.block, &a.parts, &a.kept,
                        &a.words, &a.values, &a.code_bits, &a.mantissa, &a.bitmap, &weight))
    return nullptr;
  const sn::Layout layout = a.layout();
  Buffer words, accum;
  if (!words.take(words_arg, false) || !accum.take(accum_arg, true)) return nullptr;
  const int64_t rows = rows_of(words, accum, layout);
  if (rows < 0) return nullptr;
  int64_t damaged;
  Py_BEGIN_ALLOW_THREADS
  damaged = sn::decode_records(words.as<const uint32_t>(), accum.as<float>(), rows, layout,
                               static_cast<float>(weight));
  Py_END_ALLOW_THREADS
  return PyLong_FromLongLong(damaged);
}

PyObject* hadamard(PyObject*, PyObject* args) {
  PyObject* rows_arg;
  long long block;
  if (!PyArg_ParseTuple(args, "OL", &rows_arg, &block)) return nullptr;
  Buffer rows;
  if (!rows.take(rows_arg, true)) return nullptr;
  if (block < 1 || (block & (block - 1)) || rows.bytes() % (4 * block))
    return PyErr_Format(PyExc_ValueError, "%zd bytes are not rows of %lld floats, a power of two",
                        rows.bytes(), block);
  Py_BEGIN_ALLOW_THREADS
  sn::hadamard(rows.as<float>(), rows.bytes() / (4 * block), block);
  Py_END_ALLOW_THREADS
  Py_RETURN_NONE;
}

PyObject* pack_groups(PyObject*, PyObject* args) {
  PyObject *values_arg, *bases_arg, *steps_arg, *spread_arg, *codes_arg;
  long long first, group;
  int bits;
  double bound;
  unsigned int key, other;
  if (!PyArg_ParseTuple(args, "OOOOOLiLdII", &values_arg, &bases_arg, &steps_arg, &spread_arg,
                        &codes_arg, &first, &bits, &group, &bound, &key, &other))
    return nullptr;
  Buffer values, bases, steps, spread, codes;
  if (!values.take(values_arg, false) || !bases.take(bases_arg, true) ||
      !steps.take(steps_arg, true) || !spread.take(spread_arg, true) ||
      !codes.take(codes_arg, true))
    return nullptr;
  const int64_t count = values.bytes() / 4;
  if (!groups_match(count, bits, group, bases, steps, codes)) return nullptr;
  if (spread.bytes() != bases.bytes())
    return PyErr_Format(PyExc_ValueError, "spread has %zd bytes, bases %zd", spread.bytes(),
                        bases.bytes());
  const sn::Grid grid = {bits, group, static_cast<float>(bound), key, other};
  sn::Escapes escapes;
  bool out_of_memory = false;
  Py_BEGIN_ALLOW_THREADS
  try {
    sn::pack_groups(values.as<const float>(), count, first, grid, bases.as<float>(),
                    steps.as<uint16_t>(), spread.as<uint32_t>(), codes.as<uint8_t>(), escapes);
  } catch (const std::bad_alloc&) {
    out_of_memory = true;
  }
  Py_END_ALLOW_THREADS
  if (out_of_memory) return PyErr_NoMemory();
  const auto number = static_cast<Py_ssize_t>(escapes.at.size());
  // Not "y#": that makes None of an empty vector's null pointer.
  const auto* at = reinterpret_cast<const char*>(escapes.at.data());
  const auto* lost = reinterpret_cast<const char*>(escapes.values.data());
  return Py_BuildValue("NN", PyBytes_FromStringAndSize(at, 8 * number),
                       PyBytes_FromStringAndSize(lost, 4 * number));
}

PyObject* unpack_groups(PyObject*, PyObject* args) {
  PyObject *bases_arg, *steps_arg, *codes_arg, *values_arg;
  long long group;
  int bits;
  if (!PyArg_ParseTuple(args, "OOOOiL", &bases_arg, &steps_arg, &codes_arg, &values_arg, &bits,
                        &group))
    return nullptr;
  Buffer values, bases, steps, codes;
  if (!values.take(values_arg, true) || !bases.take(bases_arg, false) ||
      !steps.take(steps_arg, false) || !codes.take(codes_arg, false))
    return nullptr;
  const int64_t count = values.bytes() / 4;
  if (!groups_match(count, bits, group, bases, steps, codes)) return nullptr;
  Py_BEGIN_ALLOW_THREADS
  sn::unpack_groups(bases.as<const float>(), steps.as<const uint16_t>(),
                    codes.as<const uint8_t>(), count, bits, group, values.as<float>());
  Py_END_ALLOW_THREADS
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"pack_groups", pack_groups, METH_VARARGS, "See sn_compress.ops.groups.pack."},
    {"unpack_groups", unpack_groups, METH_VARARGS, "See sn_compress.ops.groups.unpack."},
    {"encode_records", encode, METH_VARARGS, "See sn_compress.ops.record.encode_records."},
    {"decode_records", decode, METH_VARARGS, "See sn_compress.ops.record.decode_records."},
    {"hadamard", hadamard, METH_VARARGS, "See sn_compress.ops.spectrum.hadamard."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "_core", "C++ back end of sn_compress.ops.", -1,
                      methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__core() { return PyModule_Create(&module); }
