// Python's door to what the low-rank exchange computes on a host. Sizes are checked here; the
// callers (ops/products.py, ops/orthonormal.py, ops/fixed_point.py) have
// checked dtypes.
#include <vector>

#include "column_arguments.h"
#include "orthonormal.h"
#include "products.h"

namespace sn {
namespace {

// What the three products are called with: a matrix [rows, columns], factors [directions, rows]
// and [directions, columns], of which rows or columns from `first` to `last` are worked on.
struct Product {
  Buffer matrix, left, right;
  long long rows, columns, directions, first, last;
  int option, kernel;

  // writes : of matrix, left, right, which is the result: "m", "l" or "r"
  bool take(PyObject* args, char writes) {
    PyObject *m, *l, *r;
    if (!PyArg_ParseTuple(args, "OOOLLLLLii", &m, &l, &r, &rows, &columns, &directions, &first,
                          &last, &option, &kernel) ||
        !matrix.take(m, writes == 'm') || !left.take(l, writes == 'l') ||
        !right.take(r, writes == 'r'))
      return false;
    const long long end = writes == 'r' ? columns : rows;
    if (rows < 0 || columns < 0 || directions < 1 || first < 0 || first > last || last > end ||
        kernel < 0 || kernel >= product_kernels() || matrix.bytes() != 4 * rows * columns ||
        left.bytes() != 4 * directions * rows || right.bytes() != 4 * directions * columns) {
      wrong("product");
      return false;
    }
    return true;
  }
};

PyObject* times_rows(PyObject*, PyObject* args) {
  Product p;
  if (!p.take(args, 'l')) return nullptr;
  const int64_t rows = p.last - p.first;
  const bool done = unlocked([&] {
    sn::times_rows({p.matrix.as<float>() + p.first * p.columns, rows, p.columns, p.columns},
                   {p.right.as<float>(), p.directions, p.columns, p.columns},
                   {p.left.as<float>() + p.first, p.directions, rows, p.rows}, p.kernel);
  });
  if (!done) return nullptr;
  Py_RETURN_NONE;
}

PyObject* times_columns(PyObject*, PyObject* args) {
  Product p;
  if (!p.take(args, 'r')) return nullptr;
  const int64_t columns = p.last - p.first;
  const bool done = unlocked([&] {
    sn::times_columns({p.matrix.as<float>() + p.first, p.rows, columns, p.columns},
                      {p.left.as<float>(), p.directions, p.rows, p.rows},
                      {p.right.as<float>() + p.first, p.directions, columns, p.columns},
                      p.kernel);
  });
  if (!done) return nullptr;
  Py_RETURN_NONE;
}

PyObject* outer(PyObject*, PyObject* args) {
  Product p;
  if (!p.take(args, 'm')) return nullptr;
  const int64_t rows = p.last - p.first;
  const bool done = unlocked([&] {
    sn::outer({p.left.as<float>() + p.first, p.directions, rows, p.rows},
              {p.right.as<float>(), p.directions, p.columns, p.columns},
              {p.matrix.as<float>() + p.first * p.columns, rows, p.columns, p.columns},
              p.option != 0, p.kernel);
  });
  if (!done) return nullptr;
  Py_RETURN_NONE;
}

PyObject* kernels(PyObject*, PyObject*) { return PyLong_FromLong(product_kernels()); }

PyObject* remember(PyObject*, PyObject* args) {
  PyObject *memory_arg, *gradient_arg, *out_arg;
  double decay;
  if (!PyArg_ParseTuple(args, "OOdO", &memory_arg, &gradient_arg, &decay, &out_arg))
    return nullptr;
  Buffer memory, gradient, out;
  if (!memory.take(memory_arg, false) || !gradient.take(gradient_arg, false) ||
      !out.take(out_arg, true))
    return nullptr;
  if (memory.bytes() != out.bytes() || gradient.bytes() != out.bytes()) return wrong("remember");
  double energy = 0;
  const bool done = unlocked([&] {
    energy = sn::remember(memory.as<const float>(), gradient.as<const float>(),
                          static_cast<float>(decay), out.as<float>(), out.bytes() / 4);
  });
  return done ? PyFloat_FromDouble(energy) : nullptr;
}

PyObject* orthonormal(PyObject*, PyObject* args) {
  PyObject *sums_arg, *instead_arg, *shapes_arg, *out_arg;
  int bits;
  if (!PyArg_ParseTuple(args, "OOOiO", &sums_arg, &instead_arg, &shapes_arg, &bits, &out_arg))
    return nullptr;
  Buffer sums, instead, shapes, out;
  const bool some = instead_arg != Py_None;
  if (!sums.take(sums_arg, false) || (some && !instead.take(instead_arg, false)) ||
      !shapes.take(shapes_arg, false) || !out.take(out_arg, true))
    return nullptr;
  const auto* shape = shapes.as<const int64_t>();
  const Py_ssize_t matrices = shapes.bytes() / 16;
  int64_t count = 0;
  bool legal = shapes.bytes() == 16 * matrices && bits > 0 && bits <= 52;
  for (Py_ssize_t i = 0; legal && i < matrices; ++i) {
    legal = shape[2 * i] >= 0 && shape[2 * i + 1] >= 0;
    count += shape[2 * i] * shape[2 * i + 1];
  }
  const bool wide = sums.bytes() == 8 * count;  // float64, else int32
  if (!legal || out.bytes() != 4 * count || (!wide && sums.bytes() != 4 * count) ||
      (some && instead.bytes() != 4 * count))
    return wrong("orthonormal");
  const bool done = unlocked([&] {
    Orthonormal made;
    int64_t at = 0;
    for (Py_ssize_t i = 0; i < matrices; ++i) {
      const int64_t rows = shape[2 * i], width = shape[2 * i + 1];
      const float* other = some ? instead.as<const float>() + at : nullptr;
      float* found = out.as<float>() + at;
      if (wide)
        made(sums.as<const double>() + at, other, rows, width, bits, found);
      else
        made(sums.as<const int32_t>() + at, other, rows, width, bits, found);
      at += rows * width;
    }
  });
  if (!done) return nullptr;
  Py_RETURN_NONE;
}

PyObject* all_finite(PyObject*, PyObject* argument) {
  Buffer values;
  if (!values.take(argument, false)) return nullptr;
  bool finite = false;
  if (!unlocked([&] { finite = sn::all_finite(values.as<const float>(), values.bytes() / 4); }))
    return nullptr;
  return PyBool_FromLong(finite);
}

PyObject* pack_columns(PyObject*, PyObject* args) {
  PyObject *values_arg, *sides_arg, *exponents_arg, *covered_arg, *units_arg, *words_arg, *own_arg;
  ColumnArguments a;
  int count;
  double limit;
  if (!PyArg_ParseTuple(args, "OOOOOiidiOO", &values_arg, &sides_arg, &exponents_arg, &covered_arg,
                        &units_arg, &a.lowest, &a.bits, &limit, &count, &words_arg, &own_arg))
    return nullptr;
  Buffer values, words, own;
  if (!values.take(values_arg, false) || !words.take(words_arg, true) ||
      !own.take(own_arg, true) || !a.take(sides_arg, exponents_arg, covered_arg, units_arg))
    return nullptr;
  if (values.bytes() != 4 * a.count || own.bytes() != 4 * a.count ||
      words.bytes() != 4 * (a.columns + a.words()) || limit < 0 || limit >= (1 << (a.bits - 1)))
    return wrong("pack_columns");
  const bool done = unlocked([&] {
    const auto pack = [&](auto digit) {
      std::vector<decltype(digit)> digits(
          static_cast<size_t>(a.words() * 4) / sizeof digit);
      auto* heads = words.as<int32_t>();
      to_digits(values.as<const float>(), a.sides.as<const int64_t>(),
                a.exponents.as<const int32_t>(), a.columns, a.scales(),
                static_cast<float>(limit), count, heads, digits.data(), own.as<float>());
      join_digits(digits.data(), a.words(), heads + a.columns);
    };
    if (a.bits == 8)
      pack(int8_t{});
    else
      pack(int16_t{});
  });
  if (!done) return nullptr;
  Py_RETURN_NONE;
}

PyObject* unpack_columns(PyObject*, PyObject* args) {
  PyObject *words_arg, *sides_arg, *exponents_arg, *units_arg, *sums_arg, *each_arg;
  ColumnArguments a;
  if (!PyArg_ParseTuple(args, "OOOOiiOO", &words_arg, &sides_arg, &exponents_arg, &units_arg,
                        &a.lowest, &a.bits, &sums_arg, &each_arg))
    return nullptr;
  Buffer words, sums, each;
  if (!words.take(words_arg, false) || !sums.take(sums_arg, true) ||
      !each.take(each_arg, true) || !a.take(sides_arg, exponents_arg, units_arg, units_arg))
    return nullptr;
  if (words.bytes() != 4 * a.words() || sums.bytes() != 4 * a.count ||
      each.bytes() != 4 * a.count)
    return wrong("unpack_columns");
  const bool done = unlocked([&] {
    split_digits(words.as<const int32_t>(), a.words(), a.bits, a.count, sums.as<int32_t>());
    spread_units(a.sides.as<const int64_t>(), a.exponents.as<const int32_t>(), a.columns,
                 a.scales(), each.as<float>());
  });
  if (!done) return nullptr;
  Py_RETURN_NONE;
}

}  // namespace

PyMethodDef low_rank_methods[] = {
    {"times_rows", times_rows, METH_VARARGS, "See sn_compress.ops.products."},
    {"times_columns", times_columns, METH_VARARGS, "See sn_compress.ops.products."},
    {"outer", outer, METH_VARARGS, "See sn_compress.ops.products."},
    {"product_kernels", kernels, METH_NOARGS, "Instruction sets; the last one is the fastest."},
    {"remember", remember, METH_VARARGS, "See sn_compress.ops.products."},
    {"orthonormal", orthonormal, METH_VARARGS, "See sn_compress.ops.orthonormal."},
    {"all_finite", all_finite, METH_O, "Whether all float32 numbers are finite."},
    {"pack_columns", pack_columns, METH_VARARGS, "See sn_compress.ops.fixed_point."},
    {"unpack_columns", unpack_columns, METH_VARARGS, "See sn_compress.ops.fixed_point."},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace sn
