// One bit per element: its sign, or which of two values it has. Compressed activations keep these for
// ReLUs and dropout: see sn_memory/torch/activations/packing.py.
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

constexpr int64_t kRun = 1024;  // elements processed at a time: scratch stays in the cache

// The bits of floats as integer words: a magnitude above infinity's is NaN.
enum class Words { kSingle, kHalf, kBrain, kByte };
// The test of an element; in the order of TESTS in packing.py.
enum class Test { kAboveOrNan, kAbove, kSet };

template <typename Word, Test test>
SN_CLONES void look_for(const Word* values, int64_t count, Word infinite, uint8_t* found) {
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

template <typename Word>
void look(const Word* values, int64_t count, Word infinite, Test test, uint8_t* found) {
  if (test == Test::kSet) look_for<Word, Test::kSet>(values, count, infinite, found);
  else if (test == Test::kAbove) look_for<Word, Test::kAbove>(values, count, infinite, found);
  else look_for<Word, Test::kAboveOrNan>(values, count, infinite, found);
}

SN_CLONES void look_byte(const uint8_t* values, int64_t count, uint8_t* found) {
  for (int64_t i = 0; i < count; ++i) found[i] = values[i] != 0;
}

// Packs bytes of 0 and 1 into bits, 8 into each of `bytes` output bytes; the lowest bit first.
SN_CLONES void squeeze(const uint8_t* found, int64_t bytes, uint8_t* out) {
  for (int64_t i = 0; i < bytes; ++i) out[i] = squeezed(found + 8 * i);
}

SN_CLONES void spread_all(const uint8_t* bits, int64_t bytes, uint8_t* out) {
  for (int64_t i = 0; i < bytes; ++i) spread(bits[i], out + 8 * i);
}

template <typename Word>
SN_CLONES void keep_each(const Word* from, const uint8_t* on, int64_t count, Word* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = from[i] & static_cast<Word>(-static_cast<Word>(on[i]));
}

template <typename Word>
SN_CLONES void keep_one(Word value, const uint8_t* on, int64_t count, Word* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = value & static_cast<Word>(-static_cast<Word>(on[i]));
}

// Writes values (or `value`, if `values` is null) where the bit is set, else 0.
template <typename Word>
void spread_words(const uint8_t* bits, const Word* values, uint64_t value, int64_t count, Word* to) {
  uint8_t on[kRun];
  for (int64_t i = 0; i < count; i += kRun) {
    const int64_t here = std::min(kRun, count - i);
    spread_all(bits + i / 8, (here + 7) / 8, on);
    if (values)
      keep_each(values + i, on, here, to + i);
    else
      keep_one(static_cast<Word>(value), on, here, to + i);
  }
}

// Whether any word is neither zero, of either sign, nor `value`.
template <typename Word>
SN_CLONES int64_t others(const Word* values, int64_t count, Word value) {
  Word found = 0;
  for (int64_t i = 0; i < count; ++i) {
    const Word word = values[i];
    const bool zero = static_cast<Word>(word << 1) == 0;
    found = static_cast<Word>(found | static_cast<Word>(!zero & (word != value)));
  }
  return found;
}

// The first nonzero word, 0 if there is none; -1 if a later word is neither zero nor equal to it.
template <typename Word>
int64_t second_value(const Word* values, int64_t count) {
  int64_t i = 0;
  while (i < count && static_cast<Word>(values[i] << 1) == 0) ++i;
  if (i == count) return 0;
  const Word value = values[i];
  for (; i < count; i += kRun)
    if (others(values + i, std::min(kRun, count - i), value)) return -1;
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
  Buffer values, bits;
  const char* name;
  int asked;
  Words kind;
  int64_t width;
  if (!PyArg_ParseTuple(args, "O&siO&", Buffer::in, &values, &name, &asked, Buffer::out, &bits) ||
      !kind_of(name, kind, width))
    return nullptr;
  const int64_t count = values.bytes() / width;
  if (!suits(count, bits)) return nullptr;
  if (asked < 0 || asked > 2)
    return PyErr_Format(PyExc_ValueError, "test %d; expected 0, 1 or 2", asked);
  const auto test = static_cast<Test>(asked);
  return run([&] {
    uint8_t found[kRun];
    for (int64_t i = 0; i < count; i += kRun) {
      const int64_t here = std::min(kRun, count - i);
      if (kind == Words::kSingle)
        look(values.as<const uint32_t>() + i, here, 0x7F800000u, test, found);
      else if (kind == Words::kByte)
        look_byte(values.as<const uint8_t>() + i, here, found);
      else
        look(values.as<const uint16_t>() + i, here,
             static_cast<uint16_t>(kind == Words::kHalf ? 0x7C00 : 0x7F80), test, found);
      for (int64_t j = here; j % 8; ++j) found[j] = 0;
      squeeze(found, (here + 7) / 8, bits.as<uint8_t>() + i / 8);
    }
  });
}

PyObject* spread_mask(PyObject*, PyObject* args) {
  Buffer bits, values, out;
  int width;
  unsigned long long value;
  if (!PyArg_ParseTuple(args, "O&O&iKO&", Buffer::in, &bits, Buffer::in_or_none, &values, &width,
                        &value, Buffer::out, &out))
    return nullptr;
  if (width != 1 && width != 2 && width != 4 && width != 8)
    return PyErr_Format(PyExc_ValueError, "elements of %d bytes; expected 1, 2, 4 or 8", width);
  const int64_t count = out.bytes() / width;
  if (!suits(count, bits)) return nullptr;
  if (values && values.bytes() != out.bytes())
    return PyErr_Format(PyExc_ValueError, "%lld bytes of values do not match %lld of results",
                        static_cast<long long>(values.bytes()),
                        static_cast<long long>(out.bytes()));
  const auto* from = bits.as<const uint8_t>();
  return run([&] {
    if (width == 8)
      spread_words(from, values.as<const uint64_t>(), value, count, out.as<uint64_t>());
    else if (width == 4)
      spread_words(from, values.as<const uint32_t>(), value, count, out.as<uint32_t>());
    else if (width == 2)
      spread_words(from, values.as<const uint16_t>(), value, count, out.as<uint16_t>());
    else
      spread_words(from, values.as<const uint8_t>(), value, count, out.as<uint8_t>());
  });
}

PyObject* two_values(PyObject*, PyObject* args) {
  Buffer values;
  const char* name;
  Words kind;
  int64_t width, found = 0;
  if (!PyArg_ParseTuple(args, "O&s", Buffer::in, &values, &name) || !kind_of(name, kind, width))
    return nullptr;
  const bool done = unlocked([&] {
    if (width == 4)
      found = second_value(values.as<const uint32_t>(), values.bytes() / 4);
    else if (width == 2)
      found = second_value(values.as<const uint16_t>(), values.bytes() / 2);
  });
  return done ? PyLong_FromLongLong(found) : nullptr;
}

}  // namespace sn
