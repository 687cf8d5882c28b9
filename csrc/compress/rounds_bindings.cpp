// Bindings of a low-rank step's computation between collectives, on one host thread: see
// allreduce/methods/low_rank.py. They call the same functions as the bindings of single functions,
// in the same order, so results are bit-identical.
#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "column_arguments.h"
#include "lanes.h"
#include "orthonormal.h"
#include "products.h"

namespace sn {
namespace {

constexpr auto in = Buffer::in, out = Buffer::out;
constexpr int64_t kPrime = (1 << 20) - 3;  // see ops/fixed_point.py
constexpr int64_t kChunk = 1 << 18;        // elements whose squares are summed separately
constexpr int64_t kCount = 1 << 20;        // unit of the count in a column's word, above exponents
constexpr int64_t kMaxRanks = 2047;
constexpr int64_t kRowsAtOnce = 64;  // fewer would interleave the directions too often

// The sum of each word times 1, 0, 3, 4, ..., kPrime - 1, 1, 2, ..., modulo kPrime.
SN_CLONES int64_t word_sum(const int32_t* words, int64_t count) {
  int64_t sum = 0;
  for (int64_t start = 0; start < count;) {
    const int64_t first = 1 + start % (kPrime - 1);
    const int64_t here = std::min({int64_t{2048}, count - start, kPrime - first});
    int64_t block = 0;
    for (int64_t i = 0; i < here; ++i) block += (first + i) * words[start + i];
    sum += block % kPrime;
    start += here;
  }
  sum -= 2 * int64_t{words[1]};  // the checksum's own word
  return (sum % kPrime + kPrime) % kPrime;
}

struct Shape {
  int64_t rows, columns, size;
};

// Arguments of every round: shapes [tensors, 3] int64, and a matrix for each tensor.
struct Tensors {
  Buffer shapes;
  int64_t count = 0, elements = 0, left = 0, right = 0;

  // Whether the parsed shapes are legal; if not, an exception is set.
  bool check() {
    count = shapes.bytes() / 24;
    bool legal = count > 0 && shapes.bytes() == 24 * count;
    for (int64_t i = 0; legal && i < count; ++i) {
      const Shape& it = at(i);
      legal = it.rows > 0 && it.columns > 0 && it.size > 0 && it.size <= it.rows &&
              it.size <= it.columns;
      elements += it.rows * it.columns;
      left += it.size * it.rows;
      right += it.size * it.columns;
    }
    if (!legal) wrong("shapes");
    return legal;
  }
  const Shape& at(int64_t i) const { return shapes.as<const Shape>()[i]; }

  // Takes a buffer for each tensor, of its size.
  bool take_each(PyObject* tuple, bool writable, std::unique_ptr<Buffer[]>& into) const {
    if (!PyTuple_Check(tuple) || PyTuple_GET_SIZE(tuple) != count) {
      wrong("tensors");
      return false;
    }
    into.reset(new Buffer[static_cast<size_t>(count)]);
    for (int64_t i = 0; i < count; ++i) {
      if (!into[i].take(PyTuple_GET_ITEM(tuple, i), writable)) return false;
      if (into[i].bytes() != 4 * at(i).rows * at(i).columns) {
        wrong("tensors");
        return false;
      }
    }
    return true;
  }
};

// The columns of one side, their tables, and the format of their digits.
struct Side : ColumnArguments {
  // Converter for "O&": (sides, covered, units, lowest, bits, limit); a mean has different `units`.
  static int parse(PyObject* tuple, void* to) {
    auto& side = *static_cast<Side*>(to);
    return PyTuple_Check(tuple)
               ? PyArg_ParseTuple(tuple, "O&O&O&iid", in, &side.sides, in, &side.covered, in,
                                  &side.units, &side.lowest, &side.bits, &side.limit)
               : PyErr_BadArgument();
  }
  bool check(int64_t expected) {
    if (!ColumnArguments::check()) return false;
    if (count == expected) return true;
    wrong("side");
    return false;
  }

  // Packs a round's words; those of zeros if any value is not finite. Returns whether all are.
  bool seal(std::vector<float>& values, int32_t* to, float* own) const {
    const bool finite = all_finite(values.data(), static_cast<int64_t>(values.size()));
    if (!finite) std::fill(values.begin(), values.end(), 0.0f);
    pack(values.data(), static_cast<int32_t>(kCount), to, own);
    return finite;
  }

  // Unpacks the sums of digits, and the exponents of the next step.
  void open(const int32_t* total, int32_t* sums, int32_t* next) const {
    for (int64_t i = 0; i < columns; ++i) {
      const int64_t head = total[i];
      const int64_t counted = (head + kCount / 2) >> 20;
      const int64_t ranked = std::min(std::max(counted, int64_t{1}), kMaxRanks);
      const int64_t over = 2 * (head - counted * kCount) + ranked;
      const int64_t known = (over - ((over % (2 * ranked)) + 2 * ranked) % (2 * ranked)) /
                            (2 * ranked);  // rounded down
      const int64_t highest = lowest + scales().places - 1;
      next[i] = counted > 0 ? static_cast<int32_t>(std::min(
                                  std::max(known, int64_t{lowest}), highest))
                            : exponents.as<const int32_t>()[i];
    }
    split_digits(total + columns, words(), bits, count, sums);
  }
};

PyObject* checksum_of_words(PyObject*, PyObject* words_arg) {
  Buffer words;
  if (!words.take(words_arg, false)) return nullptr;
  if (words.bytes() < 8 || words.bytes() % 4) return wrong("word_sum");
  return PyLong_FromLongLong(word_sum(words.as<const int32_t>(), words.bytes() / 4));
}

PyObject* low_rank_first(PyObject*, PyObject* args) {
  PyObject *memories_arg, *gradients_arg, *outs_arg;
  Tensors tensors;
  std::unique_ptr<Buffer[]> memories, gradients, outs;
  Buffer basis, words;
  Side left;
  double decay;
  int kernel;
  if (!PyArg_ParseTuple(args, "O&OOOdO&O&O&iO&", in, &tensors.shapes, &memories_arg,
                        &gradients_arg, &outs_arg, &decay, in, &basis, Side::parse, &left, in,
                        &left.exponents, &kernel, out, &words) ||
      !tensors.check() || !tensors.take_each(memories_arg, false, memories) ||
      !tensors.take_each(gradients_arg, false, gradients) ||
      !tensors.take_each(outs_arg, true, outs) || !left.check(tensors.left))
    return nullptr;
  if (basis.bytes() != 4 * tensors.right || words.bytes() != 4 * left.all_words() || kernel < 0 ||
      kernel >= product_kernels())
    return wrong("low_rank_first");
  float energy = 0;
  bool finite = false;
  const bool done = unlocked([&] {
    std::vector<float> p(static_cast<size_t>(tensors.left)), own(p.size());
    const float* q = basis.as<const float>();
    float* to = p.data();
    for (int64_t i = 0; i < tensors.count; ++i) {
      const Shape& it = tensors.at(i);
      const int64_t elements = it.rows * it.columns;
      const Matrix<const float> directions{q, it.size, it.columns, it.columns};
      double squares = 0;
      int64_t first = 0;  // first row not multiplied yet
      for (int64_t start = 0; start < elements; start += kChunk) {
        const int64_t stop = std::min(start + kChunk, elements);
        squares += remember(memories[i].as<const float>() + start,
                            gradients[i].as<const float>() + start, static_cast<float>(decay),
                            outs[i].as<float>() + start, stop - start);
        // While rows are in the cache, to save a pass over memory. Each row's bits are unaffected.
        const int64_t whole = stop / it.columns / kRowsAtOnce * kRowsAtOnce;
        const int64_t last = stop == elements ? it.rows : whole;
        if (last == first) continue;
        times_rows({outs[i].as<const float>() + first * it.columns, last - first, it.columns,
                    it.columns},
                   directions, {to + first, it.size, last - first, it.rows}, kernel);
        first = last;
      }
      energy = i ? energy + static_cast<float>(squares) : static_cast<float>(squares);
      q += it.size * it.columns;
      to += it.size * it.rows;
    }
    finite = left.seal(p, words.as<int32_t>(), own.data());
  });
  return done ? Py_BuildValue("dO", static_cast<double>(energy), finite ? Py_True : Py_False)
              : nullptr;
}

PyObject* low_rank_second(PyObject*, PyObject* args) {
  PyObject* matrices_arg;
  Tensors tensors;
  std::unique_ptr<Buffer[]> matrices;
  Buffer total, p, own, next, words;
  Side left, right;
  int transform, kernel;
  if (!PyArg_ParseTuple(args, "O&OO&O&O&O&O&iiO&O&O&O&", in, &tensors.shapes, &matrices_arg, in,
                        &total, Side::parse, &left, in, &left.exponents, Side::parse, &right, in,
                        &right.exponents, &transform, &kernel, out, &p, out, &own, out, &next, out,
                        &words) ||
      !tensors.check() || !tensors.take_each(matrices_arg, false, matrices) ||
      !left.check(tensors.left) || !right.check(tensors.right))
    return nullptr;
  if (total.bytes() != 4 * left.all_words() || words.bytes() != 4 * right.all_words() ||
      p.bytes() != 4 * tensors.left || own.bytes() != 4 * tensors.right ||
      next.bytes() != 4 * left.columns || transform < 1 || transform > 52 || kernel < 0 ||
      kernel >= product_kernels())
    return wrong("low_rank_second");
  const auto* sum = total.as<const int32_t>();
  bool finite = false;
  double sent = 0;
  const bool done = unlocked([&] {
    std::vector<int32_t> sums(static_cast<size_t>(tensors.left));
    left.open(sum, sums.data(), next.as<int32_t>());
    std::vector<float> q(static_cast<size_t>(tensors.right));
    Orthonormal orthonormal;
    int64_t row = 0, column = 0;
    for (int64_t i = 0; i < tensors.count; ++i) {
      const Shape& it = tensors.at(i);
      float* basis = p.as<float>() + row;
      orthonormal(sums.data() + row, nullptr, it.size, it.rows, transform, basis);
      times_columns({matrices[i].as<const float>(), it.rows, it.columns, it.columns},
                    {basis, it.size, it.rows, it.rows},
                    {q.data() + column, it.size, it.columns, it.columns}, kernel);
      row += it.size * it.rows;
      column += it.size * it.columns;
    }
    finite = right.seal(q, words.as<int32_t>(), own.as<float>());
    const float* read = own.as<const float>();
    for (size_t i = 0; i < q.size(); ++i) sent += read[i] * (2.0 * q[i] - read[i]);
  });
  return done ? Py_BuildValue("Od", finite ? Py_True : Py_False, sent) : nullptr;
}

PyObject* low_rank_last(PyObject*, PyObject* args) {
  PyObject *matrices_arg, *means_arg;
  Tensors tensors;
  std::unique_ptr<Buffer[]> matrices, means;
  Buffer total, p, own, basis, next_basis, next;
  Side right;  // with the units of a mean
  float poison;
  int transform, kernel;
  if (!PyArg_ParseTuple(args, "O&OOO&fO&O&O&O&iiO&O&O&", in, &tensors.shapes, &matrices_arg,
                        &means_arg, in, &total, &poison, in, &p, in, &own, Side::parse, &right, in,
                        &right.exponents, &transform, &kernel, in, &basis, out, &next_basis, out,
                        &next) ||
      !tensors.check() || !tensors.take_each(matrices_arg, true, matrices) ||
      !tensors.take_each(means_arg, true, means) || !right.check(tensors.right))
    return nullptr;
  if (total.bytes() != 4 * right.all_words() || p.bytes() != 4 * tensors.left ||
      own.bytes() != 4 * tensors.right || basis.bytes() != 4 * tensors.right ||
      next_basis.bytes() != 4 * tensors.right || next.bytes() != 4 * right.columns || transform < 1 ||
      transform > 52 || kernel < 0 || kernel >= product_kernels())
    return wrong("low_rank_last");
  const auto* sum = total.as<const int32_t>();
  return run([&] {
    const auto size = static_cast<size_t>(tensors.right);
    std::vector<int32_t> sums(size);
    right.open(sum, sums.data(), next.as<int32_t>());
    std::vector<float> mean(size);
    spread_units(right.sides.as<const int64_t>(), right.exponents.as<const int32_t>(),
                 right.columns, right.scales(), mean.data());
    for (size_t i = 0; i < size; ++i) mean[i] = static_cast<float>(sums[i]) * (mean[i] * poison);
    Orthonormal orthonormal;
    int64_t row = 0, column = 0;
    for (int64_t i = 0; i < tensors.count; ++i) {
      const Shape& it = tensors.at(i);
      const Matrix<const float> left{p.as<const float>() + row, it.size, it.rows, it.rows};
      outer(left, {own.as<const float>() + column, it.size, it.columns, it.columns},
            {matrices[i].as<float>(), it.rows, it.columns, it.columns}, true, kernel);
      outer(left, {mean.data() + column, it.size, it.columns, it.columns},
            {means[i].as<float>(), it.rows, it.columns, it.columns}, false, kernel);
      orthonormal(sums.data() + column, basis.as<const float>() + column, it.size, it.columns,
                  transform, next_basis.as<float>() + column);
      row += it.size * it.rows;
      column += it.size * it.columns;
    }
  });
}

}  // namespace

PyMethodDef rounds_methods[] = {
    {"word_sum", checksum_of_words, METH_O, "See sn_compress.ops.fixed_point.word_sum."},
    {"low_rank_first", low_rank_first, METH_VARARGS, "See LowRank.compiled_step."},
    {"low_rank_second", low_rank_second, METH_VARARGS, "See LowRank.compiled_step."},
    {"low_rank_last", low_rank_last, METH_VARARGS, "See LowRank.compiled_step."},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace sn
