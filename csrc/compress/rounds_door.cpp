// Python's door to whole rounds of the low-rank exchange on one thread of a host: see
// sums/host_rounds.py. They call what the doors of single functions call, in the same order, so
// the bits are the same.
#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "column_arguments.h"
#include "lanes.h"
#include "orthonormal.h"
#include "products.h"

namespace sn {
namespace {

constexpr int64_t kHead = 2;               // words: ranks without numbers, checksum
constexpr int64_t kPrime = (1 << 20) - 3;  // see ops/words/word_sum.py
constexpr int64_t kChunk = 1 << 18;        // elements whose squares are summed by themselves
constexpr int64_t kCount = 1 << 20;        // in a column's word, above the exponents' sum
constexpr int64_t kMaxRanks = 2047;

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
  sum -= 2 * int64_t{words[1]};  // its own place
  return (sum % kPrime + kPrime) % kPrime;
}

struct Shape {
  int64_t rows, columns, size;
};

// What every round is called with: shapes [tensors, 3] int64 and a matrix of each tensor.
struct Tensors {
  Buffer shapes;
  int64_t count = 0, elements = 0, left = 0, right = 0;

  bool take(PyObject* shapes_arg) {
    if (!shapes.take(shapes_arg, false)) return false;
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

  // A buffer for each tensor, of its size.
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

// The columns of one side, their tables and how they become digits.
struct Side : ColumnArguments {
  double limit = 0;

  // (sides, covered, units, lowest, bits, limit) of a tuple; `units` of a mean are others
  bool take(PyObject* tuple, PyObject* exponents_arg, int64_t expected) {
    PyObject *sides_arg, *covered_arg, *units_arg;
    if (!PyArg_ParseTuple(tuple, "OOOiid", &sides_arg, &covered_arg, &units_arg, &lowest, &bits,
                          &limit) ||
        !ColumnArguments::take(sides_arg, exponents_arg, covered_arg, units_arg))
      return false;
    if (count == expected && limit >= 0 && limit < (1 << (bits - 1))) return true;
    wrong("side");
    return false;
  }
  int64_t all_words() const { return kHead + columns + words(); }

  template <typename Digit>
  void pack(const float* values, int32_t* heads, float* own) const {
    std::vector<Digit> digits(static_cast<size_t>(words() * 4) / sizeof(Digit));
    to_digits(values, sides.as<const int64_t>(), exponents.as<const int32_t>(), columns, scales(),
              static_cast<float>(limit), static_cast<int32_t>(kCount), heads, digits.data(), own);
    join_digits(digits.data(), words(), heads + columns);
  }

  // A round's words with their head; zeros but for the first one without numbers.
  void seal(std::vector<float>& values, bool finite, bool all_finite_so_far, int32_t* to,
            float* own) const {
    if (!finite) std::fill(values.begin(), values.end(), 0.0f);
    if (bits == 8)
      pack<int8_t>(values.data(), to + kHead, own);
    else
      pack<int16_t>(values.data(), to + kHead, own);
    const bool lost = !finite || !all_finite_so_far;
    if (lost) std::fill_n(to + kHead, all_words() - kHead, 0);
    to[0] = lost;
    to[1] = 0;
    to[1] = static_cast<int32_t>(word_sum(to, all_words()));
  }

  // Sums of digits, and the exponents of the next step.
  void open(const int32_t* total, int32_t* sums, int32_t* next) const {
    for (int64_t i = 0; i < columns; ++i) {
      const int64_t head = total[kHead + i];
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
    split_digits(total + kHead + columns, words(), bits, count, sums);
  }
};

bool is_damaged(const int32_t* total, int64_t words) {
  return (word_sum(total, words) - total[1]) % kPrime != 0;
}

PyObject* low_rank_first(PyObject*, PyObject* args) {
  PyObject *shapes_arg, *memories_arg, *gradients_arg, *outs_arg, *basis_arg, *left_arg,
      *exponents_arg, *words_arg;
  double decay;
  int kernel;
  if (!PyArg_ParseTuple(args, "OOOOdOOOiO", &shapes_arg, &memories_arg, &gradients_arg, &outs_arg,
                        &decay, &basis_arg, &left_arg, &exponents_arg, &kernel, &words_arg))
    return nullptr;
  Tensors tensors;
  std::unique_ptr<Buffer[]> memories, gradients, outs;
  Buffer basis, words;
  Side left;
  if (!tensors.take(shapes_arg) || !tensors.take_each(memories_arg, false, memories) ||
      !tensors.take_each(gradients_arg, false, gradients) ||
      !tensors.take_each(outs_arg, true, outs) || !basis.take(basis_arg, false) ||
      !words.take(words_arg, true) || !left.take(left_arg, exponents_arg, tensors.left))
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
      double squares = 0;
      for (int64_t start = 0; start < elements; start += kChunk)
        squares += remember(memories[i].as<const float>() + start,
                            gradients[i].as<const float>() + start, static_cast<float>(decay),
                            outs[i].as<float>() + start, std::min(kChunk, elements - start));
      energy = i ? energy + static_cast<float>(squares) : static_cast<float>(squares);
      times_rows({outs[i].as<const float>(), it.rows, it.columns, it.columns},
                 {q, it.size, it.columns, it.columns}, {to, it.size, it.rows, it.rows}, kernel);
      q += it.size * it.columns;
      to += it.size * it.rows;
    }
    finite = std::isfinite(energy);
    left.seal(p, all_finite(p.data(), tensors.left), finite, words.as<int32_t>(), own.data());
  });
  return done ? Py_BuildValue("dO", static_cast<double>(energy), finite ? Py_True : Py_False)
              : nullptr;
}

PyObject* low_rank_second(PyObject*, PyObject* args) {
  PyObject *shapes_arg, *matrices_arg, *total_arg, *left_arg, *left_exponents_arg, *right_arg,
      *right_exponents_arg, *p_arg, *own_arg, *next_arg, *words_arg;
  int transform, kernel, finite;
  if (!PyArg_ParseTuple(args, "OOOOOOOiipOOOO", &shapes_arg, &matrices_arg, &total_arg, &left_arg,
                        &left_exponents_arg, &right_arg, &right_exponents_arg, &transform, &kernel,
                        &finite, &p_arg, &own_arg, &next_arg, &words_arg))
    return nullptr;
  Tensors tensors;
  std::unique_ptr<Buffer[]> matrices;
  Buffer total, p, own, next, words;
  Side left, right;
  if (!tensors.take(shapes_arg) || !tensors.take_each(matrices_arg, false, matrices) ||
      !total.take(total_arg, false) || !left.take(left_arg, left_exponents_arg, tensors.left) ||
      !right.take(right_arg, right_exponents_arg, tensors.right) || !p.take(p_arg, true) ||
      !own.take(own_arg, true) || !next.take(next_arg, true) || !words.take(words_arg, true))
    return nullptr;
  if (total.bytes() != 4 * left.all_words() || words.bytes() != 4 * right.all_words() ||
      p.bytes() != 4 * tensors.left || own.bytes() != 4 * tensors.right ||
      next.bytes() != 4 * left.columns || transform < 1 || transform > 52 || kernel < 0 ||
      kernel >= product_kernels())
    return wrong("low_rank_second");
  const auto* sum = total.as<const int32_t>();
  bool damaged = false;
  double sent = 0;
  const bool done = unlocked([&] {
    damaged = is_damaged(sum, left.all_words());
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
    right.seal(q, all_finite(q.data(), tensors.right), finite != 0, words.as<int32_t>(),
               own.as<float>());
    const float* read = own.as<const float>();
    for (size_t i = 0; i < q.size(); ++i) sent += read[i] * (2.0 * q[i] - read[i]);
  });
  return done ? Py_BuildValue("OOd", sum[0] ? Py_True : Py_False, damaged ? Py_True : Py_False,
                              sent)
              : nullptr;
}

PyObject* low_rank_last(PyObject*, PyObject* args) {
  PyObject *shapes_arg, *matrices_arg, *means_arg, *total_arg, *p_arg, *own_arg, *right_arg,
      *exponents_arg, *basis_arg, *new_arg, *next_arg;
  int transform, kernel, lost;
  if (!PyArg_ParseTuple(args, "OOOOOOOOiipOOO", &shapes_arg, &matrices_arg, &means_arg, &total_arg,
                        &p_arg, &own_arg, &right_arg, &exponents_arg, &transform, &kernel, &lost,
                        &basis_arg, &new_arg, &next_arg))
    return nullptr;
  Tensors tensors;
  std::unique_ptr<Buffer[]> matrices, means;
  Buffer total, p, own, basis, made, next;
  Side right;  // with the units of a mean
  if (!tensors.take(shapes_arg) || !tensors.take_each(matrices_arg, true, matrices) ||
      !tensors.take_each(means_arg, true, means) || !total.take(total_arg, false) ||
      !p.take(p_arg, false) || !own.take(own_arg, false) || !basis.take(basis_arg, false) ||
      !right.take(right_arg, exponents_arg, tensors.right) || !made.take(new_arg, true) ||
      !next.take(next_arg, true))
    return nullptr;
  if (total.bytes() != 4 * right.all_words() || p.bytes() != 4 * tensors.left ||
      own.bytes() != 4 * tensors.right || basis.bytes() != 4 * tensors.right ||
      made.bytes() != 4 * tensors.right || next.bytes() != 4 * right.columns || transform < 1 ||
      transform > 52 || kernel < 0 || kernel >= product_kernels())
    return wrong("low_rank_last");
  const auto* sum = total.as<const int32_t>();
  const bool gone = lost || sum[0];
  bool damaged = false;
  const bool done = unlocked([&] {
    damaged = is_damaged(sum, right.all_words());
    const auto size = static_cast<size_t>(tensors.right);
    std::vector<int32_t> sums(size);
    right.open(sum, sums.data(), next.as<int32_t>());
    std::vector<float> mean(size);
    spread_units(right.sides.as<const int64_t>(), right.exponents.as<const int32_t>(),
                 right.columns, right.scales(), mean.data());
    const float poison = gone ? std::numeric_limits<float>::quiet_NaN() : 1.0f;
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
                  transform, made.as<float>() + column);
      row += it.size * it.rows;
      column += it.size * it.columns;
    }
    if (!gone) return;  // else everything stays as it was
    std::copy_n(basis.as<const float>(), size, made.as<float>());
    std::copy_n(right.exponents.as<const int32_t>(), right.columns, next.as<int32_t>());
  });
  return done ? Py_BuildValue("OO", gone ? Py_True : Py_False, damaged ? Py_True : Py_False)
              : nullptr;
}

}  // namespace

PyMethodDef rounds_methods[] = {
    {"low_rank_first", low_rank_first, METH_VARARGS, "See sn_compress.sums.host_rounds."},
    {"low_rank_second", low_rank_second, METH_VARARGS, "See sn_compress.sums.host_rounds."},
    {"low_rank_last", low_rank_last, METH_VARARGS, "See sn_compress.sums.host_rounds."},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace sn
