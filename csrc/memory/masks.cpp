// One bit for each element: of which sign it is, or which of two values. For what compressed
// activations keep of ReLUs and dropout: see sn_memory/torch/activations/packing.py.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "../compress/bits.h"
#include "../compress/bindings.h"
#include "../compress/lanes.h"
#include "bindings.h"

namespace sn {
namespace {

constexpr int64_t kRun = 1024;  // elements worked on at a time: scratch stays in the cache

// Words that stand for floats: below this magnitude they are numbers or infinite, above NaN.
enum class Words { kSingle, kHalf, kBrain, kByte };
// What is asked of an element; in the order of TESTS in packing.py.
enum class Test { kAboveOrNan, kAbove, kSet };

template <typename Word, Test test>
__attribute__((always_inline)) inline void look(const Word* values, int64_t count, Word infinite,
                                                uint8_t* found) {
  using Signed = std::make_signed_t<Word>;
  const auto top = static_cast<Word>(static_cast<Word>(~Word{0}) >> 1);
  for (int64_t i = 0; i < count; ++i) {
    const Word word = values[i];
    const auto magnitude = static_cast<Word>(word & top);
    const bool above = static_cast<Signed>(word) > 0, nan = magnitude > infinite;
    bool is;
    if (test == Test::kSet) is = magnitude != 0;
    else if (test == Test::kAbove) is = above & !nan;
    else is = above | nan;
    found[i] = is;
  }
}

SN_CLONES void look_wide(const uint32_t* values, int64_t count, Test test, uint8_t* found) {
  if (test == Test::kSet) look<uint32_t, Test::kSet>(values, count, 0x7F800000u, found);
  else if (test == Test::kAbove) look<uint32_t, Test::kAbove>(values, count, 0x7F800000u, found);
  else look<uint32_t, Test::kAboveOrNan>(values, count, 0x7F800000u, found);
}

SN_CLONES void look_narrow(const uint16_t* values, int64_t count, uint16_t infinite, Test test,
                           uint8_t* found) {
  if (test == Test::kSet) look<uint16_t, Test::kSet>(values, count, infinite, found);
  else if (test == Test::kAbove) look<uint16_t, Test::kAbove>(values, count, infinite, found);
  else look<uint16_t, Test::kAboveOrNan>(values, count, infinite, found);
}

SN_CLONES void look_byte(const uint8_t* values, int64_t count, uint8_t* found) {
  for (int64_t i = 0; i < count; ++i) found[i] = values[i] != 0;
}

// Bytes of 0 and 1, up to a multiple of 8 of them, to bits; the lowest first.
SN_CLONES void squeeze(const uint8_t* found, int64_t bytes, uint8_t* out) {
  for (int64_t i = 0; i < bytes; ++i) out[i] = squeezed(found + 8 * i);
}

SN_CLONES void spread_all(const uint8_t* bits, int64_t bytes, uint8_t* out) {
  for (int64_t i = 0; i < bytes; ++i) spread(bits[i], out + 8 * i);
}

template <typename Word>
__attribute__((always_inline)) inline void keep(const Word* from, Word value, const uint8_t* on,
                                                int64_t count, Word* to) {
  if (from)
    for (int64_t i = 0; i < count; ++i) to[i] = from[i] & static_cast<Word>(-static_cast<Word>(on[i]));
  else
    for (int64_t i = 0; i < count; ++i) to[i] = value & static_cast<Word>(-static_cast<Word>(on[i]));
}

SN_CLONES void keep8(const uint64_t* from, uint64_t value, const uint8_t* on, int64_t count,
                     uint64_t* to) {
  keep(from, value, on, count, to);
}
SN_CLONES void keep4(const uint32_t* from, uint32_t value, const uint8_t* on, int64_t count,
                     uint32_t* to) {
  keep(from, value, on, count, to);
}
SN_CLONES void keep2(const uint16_t* from, uint16_t value, const uint8_t* on, int64_t count,
                     uint16_t* to) {
  keep(from, value, on, count, to);
}
SN_CLONES void keep1(const uint8_t* from, uint8_t value, const uint8_t* on, int64_t count,
                     uint8_t* to) {
  keep(from, value, on, count, to);
}

// How many words are neither zero, with either sign, nor `value`.
template <typename Word>
__attribute__((always_inline)) inline int64_t others(const Word* values, int64_t count, Word value) {
  Word found = 0;
  for (int64_t i = 0; i < count; ++i) {
    const Word word = values[i];
    const bool zero = static_cast<Word>(word << 1) == 0;
    found = static_cast<Word>(found | static_cast<Word>(!zero & (word != value)));
  }
  return found;
}

SN_CLONES int64_t others4(const uint32_t* values, int64_t count, uint32_t value) {
  return others(values, count, value);
}
SN_CLONES int64_t others2(const uint16_t* values, int64_t count, uint16_t value) {
  return others(values, count, value);
}

// The first word that is not zero, 0 if all are; -1 if a word after it is neither zero nor it.
template <typename Word, typename Others>
int64_t second_value(const Word* values, int64_t count, Others others_than) {
  int64_t i = 0;
  while (i < count && static_cast<Word>(values[i] << 1) == 0) ++i;
  if (i == count) return 0;
  const Word value = values[i];
  for (; i < count; i += kRun)
    if (others_than(values + i, std::min(kRun, count - i), value)) return -1;
  return value;
}

bool kind_of(const char* name, Words& kind, int64_t& width) {
  const char* names[] = {"float32", "float16", "bfloat16", "bool"};
  const int64_t widths[] = {4, 2, 2, 1};
  for (int i = 0; i < 4; ++i)
    if (!std::strcmp(name, names[i])) {
      kind = static_cast<Words>(i);
      width = widths[i];
      return true;
    }
  PyErr_Format(PyExc_ValueError, "values are %s; expected float32, float16, bfloat16 or bool", name);
  return false;
}

bool suits(int64_t count, const Buffer& bits) {
  if (bits.bytes() == (count + 7) / 8) return true;
  PyErr_Format(PyExc_ValueError, "%lld elements do not match %lld bytes of bits",
               static_cast<long long>(count), static_cast<long long>(bits.bytes()));
  return false;
}

}  // namespace

PyObject* pack_mask(PyObject*, PyObject* args) {
  PyObject *values_arg, *bits_arg;
  const char* name;
  int asked;
  Words kind;
  int64_t width;
  if (!PyArg_ParseTuple(args, "OsiO", &values_arg, &name, &asked, &bits_arg) ||
      !kind_of(name, kind, width))
    return nullptr;
  Buffer values, bits;
  if (!values.take(values_arg, false) || !bits.take(bits_arg, true)) return nullptr;
  const int64_t count = values.bytes() / width;
  if (!suits(count, bits)) return nullptr;
  if (asked < 0 || asked > 2)
    return PyErr_Format(PyExc_ValueError, "test %d; expected 0, 1 or 2", asked);
  const auto test = static_cast<Test>(asked);
  Py_BEGIN_ALLOW_THREADS
  uint8_t found[kRun];
  for (int64_t i = 0; i < count; i += kRun) {
    const int64_t here = std::min(kRun, count - i);
    if (kind == Words::kSingle)
      look_wide(values.as<const uint32_t>() + i, here, test, found);
    else if (kind == Words::kByte)
      look_byte(values.as<const uint8_t>() + i, here, found);
    else
      look_narrow(values.as<const uint16_t>() + i, here,
                  kind == Words::kHalf ? 0x7C00 : 0x7F80, test, found);
    for (int64_t j = here; j % 8; ++j) found[j] = 0;
    squeeze(found, (here + 7) / 8, bits.as<uint8_t>() + i / 8);
  }
  Py_END_ALLOW_THREADS
  Py_RETURN_NONE;
}

PyObject* spread_mask(PyObject*, PyObject* args) {
  PyObject *bits_arg, *values_arg, *out_arg;
  int width;
  unsigned long long value;
  if (!PyArg_ParseTuple(args, "OOiKO", &bits_arg, &values_arg, &width, &value, &out_arg))
    return nullptr;
  if (width != 1 && width != 2 && width != 4 && width != 8)
    return PyErr_Format(PyExc_ValueError, "elements of %d bytes; expected 1, 2, 4 or 8", width);
  Buffer bits, values, out;
  const bool constant = values_arg == Py_None;
  if (!bits.take(bits_arg, false) || !out.take(out_arg, true) ||
      (!constant && !values.take(values_arg, false)))
    return nullptr;
  const int64_t count = out.bytes() / width;
  if (!suits(count, bits)) return nullptr;
  if (!constant && values.bytes() != out.bytes())
    return PyErr_Format(PyExc_ValueError, "%lld bytes of values do not match %lld of results",
                        static_cast<long long>(values.bytes()),
                        static_cast<long long>(out.bytes()));
  Py_BEGIN_ALLOW_THREADS
  uint8_t on[kRun];
  const uint8_t* from = constant ? nullptr : values.as<const uint8_t>();
  uint8_t* to = out.as<uint8_t>();
  for (int64_t i = 0; i < count; i += kRun) {
    const int64_t here = std::min(kRun, count - i);
    spread_all(bits.as<const uint8_t>() + i / 8, (here + 7) / 8, on);
    const uint8_t* source = constant ? nullptr : from + i * width;
    uint8_t* target = to + i * width;
    if (width == 8)
      keep8(reinterpret_cast<const uint64_t*>(source), value, on, here,
            reinterpret_cast<uint64_t*>(target));
    else if (width == 4)
      keep4(reinterpret_cast<const uint32_t*>(source), static_cast<uint32_t>(value), on, here,
            reinterpret_cast<uint32_t*>(target));
    else if (width == 2)
      keep2(reinterpret_cast<const uint16_t*>(source), static_cast<uint16_t>(value), on, here,
            reinterpret_cast<uint16_t*>(target));
    else
      keep1(source, static_cast<uint8_t>(value), on, here, target);
  }
  Py_END_ALLOW_THREADS
  Py_RETURN_NONE;
}

PyObject* two_values(PyObject*, PyObject* args) {
  PyObject* values_arg;
  const char* name;
  Words kind;
  int64_t width, found = 0;
  if (!PyArg_ParseTuple(args, "Os", &values_arg, &name) || !kind_of(name, kind, width))
    return nullptr;
  Buffer values;
  if (!values.take(values_arg, false)) return nullptr;
  Py_BEGIN_ALLOW_THREADS
  if (width == 4)
    found = second_value(values.as<const uint32_t>(), values.bytes() / 4, others4);
  else if (width == 2)
    found = second_value(values.as<const uint16_t>(), values.bytes() / 2, others2);
  Py_END_ALLOW_THREADS
  return PyLong_FromLongLong(found);
}

}  // namespace sn
