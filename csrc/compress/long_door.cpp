// Python's door to long transforms and their records. Sizes are checked here; the callers
// (ops/spectra/long_fourier.py, ops/records/long_record.py) have checked dtypes and settings.
#include "door.h"

#include <memory>
#include <vector>

#include "long_record.h"

namespace sn {
namespace {

// How a vector is split, as ops/spectra/long_fourier.py says it: (height, width, roots of the
// height, roots of the width, turns).
struct SplitArgument {
  Buffer height_roots, width_roots, turns;
  Split split;

  bool take(PyObject* argument) {
    long long height, width;
    PyObject *of_height, *of_width, *of_turns;
    if (!PyArg_ParseTuple(argument, "LLOOO", &height, &width, &of_height, &of_width, &of_turns) ||
        !height_roots.take(of_height, false) || !width_roots.take(of_width, false) ||
        !turns.take(of_turns, false))
      return false;
    constexpr long long longest = 1 << 20;
    const bool legal = height >= kCell && width >= kCell && height <= longest &&
                       width <= longest && width % 2 == 0;
    if (!legal || height_roots.bytes() != 4 * roots_of(height) ||
        width_roots.bytes() != 4 * roots_of(width) || turns.bytes() != 8 * 4 * width) {
      wrong("split");
      return false;
    }
    split = {height, width, height_roots.as<const float>(), width_roots.as<const float>(),
             turns.as<const double>()};
    return true;
  }

  bool holds(const Buffer& plane, long long first, long long last, int64_t tiles) const {
    return plane.bytes() == 4 * split.plane() && first >= 0 && first <= last && last <= tiles;
  }
};

PyObject* forward_columns(PyObject*, PyObject* args) {
  PyObject *split_arg, *values_arg, *plane_arg;
  SplitArgument s;
  Buffer values, plane;
  long long first, last;
  int half;
  if (!PyArg_ParseTuple(args, "O!OOpLL", &PyTuple_Type, &split_arg, &values_arg, &plane_arg, &half,
                        &first, &last) ||
      !s.take(split_arg) || !values.take(values_arg, false) || !plane.take(plane_arg, true))
    return nullptr;
  const int64_t count = values.bytes() / 4;
  if (!s.holds(plane, first, last, s.split.column_tiles()) || count > s.split.length())
    return wrong("columns");
  if (!unlocked([&] {
        columns_forward(s.split, values.as<const float>(), count, half != 0, plane.as<float>(),
                        first, last);
      }))
    return nullptr;
  Py_RETURN_NONE;
}

PyObject* forward_rows(PyObject*, PyObject* args) {
  PyObject *split_arg, *plane_arg, *memory_arg;
  SplitArgument s;
  Buffer plane, memory;
  double decay;
  long long first, last;
  if (!PyArg_ParseTuple(args, "O!OOdLL", &PyTuple_Type, &split_arg, &plane_arg, &memory_arg,
                        &decay, &first, &last))
    return nullptr;
  const bool remembers = memory_arg != Py_None;
  if (!s.take(split_arg) || !plane.take(plane_arg, true) ||
      (remembers && !memory.take(memory_arg, false)))
    return nullptr;
  if (!s.holds(plane, first, last, s.split.row_tiles()) ||
      (remembers && memory.bytes() != 4 * (s.split.length() + 2)))
    return wrong("rows");
  uint32_t peak = 0;
  if (!unlocked([&] {
        peak = rows_forward(s.split, plane.as<float>(),
                            remembers ? memory.as<const float>() : nullptr,
                            static_cast<float>(decay), first, last);
      }))
    return nullptr;
  return PyLong_FromUnsignedLong(peak);
}

PyObject* inverse_rows(PyObject*, PyObject* args) {
  PyObject *split_arg, *plane_arg;
  SplitArgument s;
  Buffer plane;
  long long first, last;
  if (!PyArg_ParseTuple(args, "O!OLL", &PyTuple_Type, &split_arg, &plane_arg, &first, &last) ||
      !s.take(split_arg) || !plane.take(plane_arg, true))
    return nullptr;
  if (!s.holds(plane, first, last, s.split.row_tiles())) return wrong("rows");
  if (!unlocked([&] { rows_inverse(s.split, plane.as<float>(), first, last); })) return nullptr;
  Py_RETURN_NONE;
}

PyObject* inverse_columns(PyObject*, PyObject* args) {
  PyObject *split_arg, *plane_arg, *values_arg;
  SplitArgument s;
  Buffer plane, values;
  long long first, last;
  if (!PyArg_ParseTuple(args, "O!OOLL", &PyTuple_Type, &split_arg, &plane_arg, &values_arg, &first,
                        &last) ||
      !s.take(split_arg) || !plane.take(plane_arg, false) || !values.take(values_arg, true))
    return nullptr;
  const int64_t count = values.bytes() / 4;
  if (!s.holds(plane, first, last, s.split.column_tiles()) || count > s.split.length())
    return wrong("columns");
  if (!unlocked([&] {
        columns_inverse(s.split, plane.as<const float>(), values.as<float>(), count, first, last);
      }))
    return nullptr;
  Py_RETURN_NONE;
}

// All bins from the plane, or into it.
PyObject* natural_order(PyObject*, PyObject* args) {
  PyObject *split_arg, *plane_arg, *bins_arg;
  SplitArgument s;
  Buffer plane, bins;
  int back;
  if (!PyArg_ParseTuple(args, "O!OOp", &PyTuple_Type, &split_arg, &plane_arg, &bins_arg, &back) ||
      !s.take(split_arg) || !plane.take(plane_arg, back) || !bins.take(bins_arg, !back))
    return nullptr;
  if (!s.holds(plane, 0, 0, 0) || bins.bytes() != 4 * (s.split.length() + 2)) return wrong("bins");
  if (!unlocked([&] {
        if (back)
          bins_to_plane(s.split, bins.as<const float>(), plane.as<float>());
        else
          plane_to_bins(s.split, plane.as<const float>(), bins.as<float>());
      }))
    return nullptr;
  Py_RETURN_NONE;
}

struct LayoutArguments {
  long long block, parts, kept, words;
  int values, code_bits, mantissa, bitmap;

  Layout layout() const {
    return {block, parts, kept, words, static_cast<Values>(values), code_bits, mantissa,
            bitmap != 0};
  }
  // One record of this split's spectrum.
  bool fits(const Split& split, const Buffer& record) const {
    return block == split.length() && parts == 2 && record.bytes() == 4 * words;
  }
};

PyObject* encode(PyObject*, PyObject* args) {
  PyObject *split_arg, *plane_arg, *memory_arg, *words_arg;
  SplitArgument s;
  Buffer plane, memory, words;
  LayoutArguments a;
  unsigned int peak;
  long long top;
  if (!PyArg_ParseTuple(args, "O!OIOOLLLLiiipL", &PyTuple_Type, &split_arg, &plane_arg, &peak,
                        &memory_arg, &words_arg, &a.block, &a.parts, &a.kept, &a.words, &a.values,
                        &a.code_bits, &a.mantissa, &a.bitmap, &top))
    return nullptr;
  const bool remembers = memory_arg != Py_None;
  if (!s.take(split_arg) || !plane.take(plane_arg, false) || !words.take(words_arg, true) ||
      (remembers && !memory.take(memory_arg, true)))
    return nullptr;
  const Layout layout = a.layout();
  if (!s.holds(plane, 0, 0, 0) || !a.fits(s.split, words) ||
      (layout.values != Values::range && layout.values != Values::half) ||
      (remembers && memory.bytes() != 4 * (s.split.length() + 2)))
    return wrong("record");
  Tally tally;
  if (!unlocked([&] {
        tally = encode_long(s.split, plane.as<const float>(), peak,
                            remembers ? memory.as<float>() : nullptr, words.as<uint32_t>(), layout,
                            top);
      }))
    return nullptr;
  return Py_BuildValue("Ldd", static_cast<long long>(tally.saturated), tally.energy, tally.error);
}

// The sum of records into a plane of zeros: the first damaged one or -1, and whether one of the
// others holds NaN.
PyObject* decode(PyObject*, PyObject* args) {
  PyObject *split_arg, *records_arg, *plane_arg;
  SplitArgument s;
  Buffer plane;
  LayoutArguments a;
  double weight;
  if (!PyArg_ParseTuple(args, "O!O!OLLLLiiipd", &PyTuple_Type, &split_arg, &PyTuple_Type,
                        &records_arg, &plane_arg, &a.block, &a.parts, &a.kept, &a.words, &a.values,
                        &a.code_bits, &a.mantissa, &a.bitmap, &weight) ||
      !s.take(split_arg) || !plane.take(plane_arg, true))
    return nullptr;
  const Layout layout = a.layout();
  const Py_ssize_t count = PyTuple_GET_SIZE(records_arg);
  const auto records = std::make_unique<Buffer[]>(static_cast<size_t>(count));
  bool match = s.holds(plane, 0, 0, 0);
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (!records[i].take(PyTuple_GET_ITEM(records_arg, i), false)) return nullptr;
    match = match && a.fits(s.split, records[i]);
  }
  if (!match) return wrong("records");
  Py_ssize_t damaged = -1;
  bool finite = true;
  if (!unlocked([&] {
        for (Py_ssize_t i = 0; i < count && damaged < 0; ++i) {
          const Decoded decoded = decode_long(s.split, records[i].as<const uint32_t>(), layout,
                                              static_cast<float>(weight), plane.as<float>());
          if (decoded == Decoded::damaged) damaged = i;
          finite &= decoded != Decoded::not_finite;
        }
        settle(s.split, plane.as<float>());
      }))
    return nullptr;
  return Py_BuildValue("nO", damaged, finite ? Py_True : Py_False);
}

}  // namespace

PyMethodDef long_methods[] = {
    {"long_forward_columns", forward_columns, METH_VARARGS,
     "See sn_compress.ops.spectra.long_fourier."},
    {"long_forward_rows", forward_rows, METH_VARARGS, "See sn_compress.ops.spectra.long_fourier."},
    {"long_inverse_rows", inverse_rows, METH_VARARGS, "See sn_compress.ops.spectra.long_fourier."},
    {"long_inverse_columns", inverse_columns, METH_VARARGS,
     "See sn_compress.ops.spectra.long_fourier."},
    {"long_natural_order", natural_order, METH_VARARGS,
     "See sn_compress.ops.spectra.long_fourier."},
    {"long_encode", encode, METH_VARARGS, "See sn_compress.ops.records.long_record.encode_long."},
    {"long_decode", decode, METH_VARARGS, "See sn_compress.ops.records.long_record.decode_long."},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace sn
