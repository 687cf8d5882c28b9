// The Python extension sn_compress._core: records, groups of floats, transforms. Arrays are passed
// as contiguous buffers, whose sizes are checked here; the caller (ops/record.py) has checked the
// settings.
#include "bindings.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "groups.h"
#include "half.h"
#include "record.h"
#include "spectrum.h"

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "payload words are little-endian; build without the extension on this machine"
#endif

namespace {

using sn::Buffer;

// Converter for "O&": a layout from the tuple that `numbers` in ops/record.py returns.
int layout_of(PyObject* numbers, void* to) {
  long long block, parts, kept, words;
  int values, code_bits, mantissa, bitmap;
  if (!PyTuple_Check(numbers)) return PyErr_BadArgument();
  if (!PyArg_ParseTuple(numbers, "LLLLiiip", &block, &parts, &kept, &words, &values, &code_bits,
                        &mantissa, &bitmap))
    return 0;
  *static_cast<sn::Layout*>(to) = {
      block,     parts,    kept,        words, static_cast<sn::Values>(values),
      code_bits, mantissa, bitmap != 0};
  return 1;
}

// The number of records, each with this many values and, if there is a memory, a row of it; or -1
// with an exception set.
int64_t rows_of(const Buffer& words, const Buffer& values, int64_t each, const sn::Layout& layout,
                const Buffer& memory = {}) {
  const int64_t rows = words.bytes() / (4 * layout.words);
  if (words.bytes() == 4 * rows * layout.words && values.bytes() == 4 * rows * each &&
      (!memory || memory.bytes() == 4 * rows * layout.floats()))
    return rows;
  PyErr_Format(PyExc_ValueError, "%zd bytes of records, %zd of values, %zd of memory do not match",
               words.bytes(), values.bytes(), memory.bytes());
  return -1;
}

PyObject* tally_of(const sn::Tally& tally) {
  return Py_BuildValue("Ldd", static_cast<long long>(tally.saturated), tally.energy, tally.error);
}

// Whether the sizes of the buffers of `count` elements in runs of groups are consistent; if not, an
// exception is set.
bool groups_match(int64_t count, int64_t run, int bits, int64_t group, const Buffer& bases,
                  const Buffer& steps, const Buffer& codes) {
  const bool legal = (bits == 1 || bits == 2 || bits == 4 || bits == 8) && group >= 32 &&
                     group <= 65536 && (group & (group - 1)) == 0 && run > 0 && count % run == 0;
  const int64_t runs = legal ? count / run : -1, groups = runs * ((run + group - 1) / group);
  if (legal && bases.bytes() == 4 * groups && steps.bytes() == 2 * groups &&
      codes.bytes() == runs * ((run * bits + 7) / 8))
    return true;
  PyErr_Format(PyExc_ValueError,
               "%lld elements in runs of %lld, groups of %lld and %d bits do not match %zd bytes of "
               "bases, %zd of steps and %zd of codes",
               static_cast<long long>(count), static_cast<long long>(run),
               static_cast<long long>(group), bits, bases.bytes(), steps.bytes(), codes.bytes());
  return false;
}

PyObject* encode(PyObject*, PyObject* args) {
  Buffer floats, memory, words;
  sn::Layout layout;
  double decay;
  long long top;
  if (!PyArg_ParseTuple(args, "O&O&O&O&dL", Buffer::out, &floats, Buffer::out_or_none, &memory,
                        Buffer::out, &words, layout_of, &layout, &decay, &top))
    return nullptr;
  const int64_t rows = rows_of(words, floats, layout.floats(), layout, memory);
  if (rows < 0) return nullptr;
  sn::Tally tally;
  const bool done = sn::unlocked([&] {
    tally = sn::encode_records(floats.as<float>(), memory.as<float>(), words.as<uint32_t>(), rows,
                               layout, static_cast<float>(decay), top);
  });
  return done ? tally_of(tally) : nullptr;
}

PyObject* decode(PyObject*, PyObject* args) {
  Buffer words, accum;
  sn::Layout layout;
  double weight;
  if (!PyArg_ParseTuple(args, "O&O&O&d", Buffer::in, &words, Buffer::out, &accum, layout_of,
                        &layout, &weight))
    return nullptr;
  const int64_t rows = rows_of(words, accum, layout.floats(), layout);
  if (rows < 0) return nullptr;
  int64_t damaged = -1;
  const bool done = sn::unlocked([&] {
    damaged = sn::decode_records(words.as<const uint32_t>(), accum.as<float>(), rows, layout,
                                 static_cast<float>(weight));
  });
  return done ? PyLong_FromLongLong(damaged) : nullptr;
}

// Whether Fourier supports blocks of this length, in such spans, with these roots; if not, an
// exception is set.
bool fourier_fits(int64_t block, int64_t parts, int64_t span, const Buffer& roots) {
  if (parts == 2 && span >= sn::Fourier::kShortest && span <= sn::Fourier::kLongest &&
      (span & (span - 1)) == 0 && block >= span && block % span == 0 &&
      roots.bytes() == 4 * sn::Fourier::roots_of(span))
    return true;
  PyErr_Format(PyExc_ValueError,
               "%zd bytes of roots for blocks of %lld floats in spans of %lld do not match",
               roots.bytes(), static_cast<long long>(block), static_cast<long long>(span));
  return false;
}

PyObject* fourier(PyObject*, PyObject* args) {
  PyObject *values_arg, *bins_arg, *roots_arg;
  long long block, span;
  int back;
  if (!PyArg_ParseTuple(args, "OOOLLp", &values_arg, &bins_arg, &roots_arg, &block, &span, &back))
    return nullptr;
  Buffer values, bins, roots;
  if (!values.take(values_arg, back) || !bins.take(bins_arg, !back) ||
      !roots.take(roots_arg, false) || !fourier_fits(block, 2, span, roots))
    return nullptr;
  const int64_t rows = values.bytes() / (4 * block);
  if (values.bytes() != rows * block * 4 || bins.bytes() != rows * (block + 2) * 4)
    return PyErr_Format(PyExc_ValueError, "%zd bytes of values and %zd of bins do not match",
                        values.bytes(), bins.bytes());
  return sn::run([&] {
    sn::Fourier fourier(block, span, roots.as<const float>());
    for (int64_t i = 0; i < rows; ++i)
      if (back)
        fourier.inverse(bins.as<float>() + i * (block + 2), values.as<float>() + i * block);
      else
        fourier.forward(values.as<float>() + i * block, bins.as<float>() + i * (block + 2));
  });
}

PyObject* encode_blocks(PyObject*, PyObject* args) {
  Buffer values, memory, words, roots;
  sn::Layout layout;
  double decay;
  long long top, span;
  if (!PyArg_ParseTuple(args, "O&O&O&O&dLLO&", Buffer::in, &values, Buffer::out_or_none, &memory,
                        Buffer::out, &words, layout_of, &layout, &decay, &top, &span, Buffer::in,
                        &roots) ||
      !fourier_fits(layout.block, layout.parts, span, roots))
    return nullptr;
  const int64_t rows = rows_of(words, values, layout.block, layout, memory);
  if (rows < 0) return nullptr;
  sn::Tally tally;
  const bool done = sn::unlocked([&] {
    tally = sn::encode_blocks(values.as<const float>(), memory.as<float>(), words.as<uint32_t>(),
                              rows, layout, static_cast<float>(decay), top, span,
                              roots.as<const float>());
  });
  return done ? tally_of(tally) : nullptr;
}

PyObject* decode_blocks(PyObject*, PyObject* args) {
  PyObject* payloads_arg;
  Buffer values, roots;
  sn::Layout layout;
  double weight;
  long long span;
  if (!PyArg_ParseTuple(args, "O!O&O&dLO&", &PyTuple_Type, &payloads_arg, Buffer::out, &values,
                        layout_of, &layout, &weight, &span, Buffer::in, &roots) ||
      !fourier_fits(layout.block, layout.parts, span, roots))
    return nullptr;
  const int64_t rows = values.bytes() / (4 * layout.block);
  const Py_ssize_t count = PyTuple_GET_SIZE(payloads_arg);
  const auto records = std::make_unique<Buffer[]>(static_cast<size_t>(count));
  std::vector<const uint32_t*> payloads;
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (!records[i].take(PyTuple_GET_ITEM(payloads_arg, i), false) ||
        rows_of(records[i], values, layout.block, layout) < 0)
      return nullptr;
    payloads.push_back(records[i].as<const uint32_t>());
  }
  int64_t damaged = -1;
  const bool done = sn::unlocked([&] {
    damaged = sn::decode_blocks(payloads, values.as<float>(), rows, layout,
                                static_cast<float>(weight), span, roots.as<const float>());
  });
  return done ? PyLong_FromLongLong(damaged) : nullptr;
}

PyObject* hadamard(PyObject*, PyObject* args) {
  Buffer rows;
  long long block;
  if (!PyArg_ParseTuple(args, "O&L", Buffer::out, &rows, &block)) return nullptr;
  if (block < 1 || (block & (block - 1)) || rows.bytes() % (4 * block))
    return PyErr_Format(PyExc_ValueError, "%zd bytes are not rows of %lld floats, a power of two",
                        rows.bytes(), block);
  return sn::run([&] { sn::hadamard(rows.as<float>(), rows.bytes() / (4 * block), block); });
}

PyObject* through_half(PyObject*, PyObject* args) {
  Buffer values, out;
  if (!PyArg_ParseTuple(args, "O&O&", Buffer::in, &values, Buffer::out, &out)) return nullptr;
  if (values.bytes() != out.bytes()) return sn::wrong("through_half");
  return sn::run([&] {
    sn::through_half(values.as<const float>(), out.as<float>(), values.bytes() / 4);
  });
}

// Whether this is one of `names`, whose index is then stored in `to`.
template <typename Enum, size_t count>
bool named(PyObject* name, const char* const (&names)[count], void* to) {
  for (size_t i = 0; PyUnicode_Check(name) && i < count; ++i)
    if (PyUnicode_CompareWithASCIIString(name, names[i]) == 0) {
      *static_cast<Enum*>(to) = static_cast<Enum>(i);
      return true;
    }
  return false;
}

// Converters for "O&".
const char* const kFloats[] = {"float32", "float16", "bfloat16"};  // in the order of sn::Floats

int floats_of(PyObject* name, void* to) {
  if (named<sn::Floats>(name, kFloats, to)) return 1;
  return PyErr_Format(PyExc_ValueError, "got floats of type %S", name) != nullptr;
}

Py_ssize_t bytes_of(sn::Floats kind) { return kind == sn::Floats::kSingle ? 4 : 2; }

const char* const kForms[] = {"", "plain", "avx2", "avx512"};  // in the order of sn::Form

int form_of(PyObject* name, void* to) {
  if (named<sn::Form>(name, kForms, to) && sn::form_runs(*static_cast<sn::Form*>(to))) return 1;
  return PyErr_Format(PyExc_ValueError, "no form %S on this processor", name) != nullptr;
}

PyObject* group_forms(PyObject*, PyObject*) {
  PyObject* names = PyList_New(0);
  for (int i = 1; names && i < 4; ++i) {
    if (!sn::form_runs(static_cast<sn::Form>(i))) continue;
    PyObject* name = PyUnicode_FromString(kForms[i]);
    if (!name || PyList_Append(names, name) < 0) Py_CLEAR(names);
    Py_XDECREF(name);
  }
  return names;
}

// The arguments of both directions about runs: their length and, if not empty, a turn's numbers.
struct RunArguments {
  long long count = 0, first = 0, length = 0;
  PyObject* numbers;
  sn::Turn turn;

  // Whether all elements to pack are within the `there` elements; if not, an exception is set.
  bool fit(int64_t there, int64_t group) {
    const Py_ssize_t size = PyTuple_Check(numbers) ? PyTuple_GET_SIZE(numbers) : 0;
    if (size == 0) {
      count = there;
      return true;
    }
    long long n, rows, far_row, near_row, piece, far, near;
    if (!PyArg_ParseTuple(numbers, "LLLLLLL", &n, &rows, &far_row, &near_row, &piece, &far, &near))
      return false;
    count = n, turn = {rows, far_row, near_row, piece, far, near};
    const bool legal = length > 0 && count > 0 && count % length == 0 && first % length == 0 &&
                       first >= 0 && first + count <= there && rows > 0 && piece > 0 &&
                       there % (rows * length) == 0 && length % piece == 0 && group <= 256 &&
                       std::min({far_row, near_row, far, near}) >= 0 &&
                       (near_row == 1 || near == 1);
    if (legal && (there / (rows * length) - 1) * far_row + (rows - 1) * near_row +
                         (length / piece - 1) * far + (piece - 1) * near < there)
      return true;
    PyErr_Format(PyExc_ValueError, "a turn that does not match %lld elements in runs of %lld",
                 static_cast<long long>(there), length);
    return false;
  }

  sn::Runs runs() const {
    return {count, length, first, PyTuple_GET_SIZE(numbers) ? &turn : nullptr};
  }
};

PyObject* pack_groups(PyObject*, PyObject* args) {
  Buffer values, bases, steps, spread, codes;
  RunArguments a;
  long long group;
  int bits;
  double bound;
  unsigned int key, other;
  sn::Floats kind;
  sn::Form form = sn::Form::kBest;
  if (!PyArg_ParseTuple(args, "O&O&O&O&O&O&LLiLdIIO!|O&", Buffer::in, &values, floats_of, &kind,
                        Buffer::out, &bases, Buffer::out, &steps, Buffer::out_or_none, &spread,
                        Buffer::out, &codes, &a.first, &a.length, &bits, &group, &bound, &key,
                        &other, &PyTuple_Type, &a.numbers, form_of, &form) ||
      !a.fit(values.bytes() / bytes_of(kind), group) ||
      !groups_match(a.count, a.length, bits, group, bases, steps, codes))
    return nullptr;
  if (spread && spread.bytes() != bases.bytes())
    return PyErr_Format(PyExc_ValueError, "spread has %zd bytes, bases %zd", spread.bytes(),
                        bases.bytes());
  const sn::Grid grid = {bits, group, static_cast<float>(bound), key, other};
  const sn::Packed packed = {bases.as<float>(), steps.as<uint16_t>(), spread.as<uint32_t>(),
                             codes.as<uint8_t>()};
  sn::Escapes escapes;
  if (!sn::unlocked([&] {
        sn::pack_groups(values.as<const void>(), kind, a.runs(), grid, form, packed, escapes);
      }))
    return nullptr;
  const auto number = static_cast<Py_ssize_t>(escapes.found.size());
  PyObject* const at = PyBytes_FromStringAndSize(nullptr, 8 * number);
  PyObject* const lost = PyBytes_FromStringAndSize(nullptr, 4 * number);
  for (Py_ssize_t i = 0; at && lost && i < number; ++i) {
    std::memcpy(PyBytes_AS_STRING(at) + 8 * i, &escapes.found[i].at, 8);
    std::memcpy(PyBytes_AS_STRING(lost) + 4 * i, &escapes.found[i].value, 4);
  }
  return Py_BuildValue("NNL", at, lost,
                       static_cast<long long>(escapes.zeros));
}

PyObject* unpack_groups(PyObject*, PyObject* args) {
  Buffer values, bases, steps, codes;
  RunArguments a;
  long long group;
  int bits;
  sn::Floats kind;
  sn::Form form = sn::Form::kBest;
  if (!PyArg_ParseTuple(args, "O&O&O&O&O&LLiLO!|O&", Buffer::in, &bases, Buffer::in, &steps,
                        Buffer::in, &codes, Buffer::out, &values, floats_of, &kind, &a.first,
                        &a.length, &bits, &group, &PyTuple_Type, &a.numbers, form_of, &form) ||
      !a.fit(values.bytes() / bytes_of(kind), group) ||
      !groups_match(a.count, a.length, bits, group, bases, steps, codes))
    return nullptr;
  const sn::Packed packed = {bases.as<float>(), steps.as<uint16_t>(), nullptr,
                             codes.as<uint8_t>()};
  return sn::run([&] {
    sn::unpack_groups(packed, a.runs(), bits, group, form, values.as<void>(), kind);
  });
}

PyMethodDef methods[] = {
    {"group_forms", group_forms, METH_NOARGS,
     "Names of the forms of pack_groups() and unpack_groups() that run here."},
    {"pack_groups", pack_groups, METH_VARARGS, "See sn_compress.ops.groups.pack."},
    {"unpack_groups", unpack_groups, METH_VARARGS, "See sn_compress.ops.groups.unpack."},
    {"encode_records", encode, METH_VARARGS, "See sn_compress.ops.record.encode_records."},
    {"decode_records", decode, METH_VARARGS, "See sn_compress.ops.record.decode_records."},
    {"encode_blocks", encode_blocks, METH_VARARGS,
     "See sn_compress.ops.record.encode_blocks."},
    {"decode_blocks", decode_blocks, METH_VARARGS,
     "See sn_compress.ops.record.decode_blocks."},
    {"fourier", fourier, METH_VARARGS, "See sn_compress.ops.spectrum."},
    {"through_half", through_half, METH_VARARGS,
     "See sn_compress.ops.quantize.through_half."},
    {"hadamard", hadamard, METH_VARARGS, "See sn_compress.ops.spectrum.hadamard."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "_core", "C++ back end of sn_compress.ops.", -1,
                      methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__core() {
  PyObject* core = PyModule_Create(&module);
  for (PyMethodDef* more : {sn::low_rank_methods, sn::graph_methods, sn::rounds_methods})
    if (core && PyModule_AddFunctions(core, more) < 0) Py_CLEAR(core);
  return core;
}
