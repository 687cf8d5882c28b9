// Bindings of the low-rank exchange's functions on a host. Sizes are checked here; the callers
// (ops/products.py, ops/orthonormal.py, ops/fixed_point.py) have checked dtypes.
#include "column_arguments.h"
#include "orthonormal.h"
#include "products.h"

namespace sn {
namespace {

// Arguments of the three products: a matrix [rows, columns], factors [directions, rows] and
// [directions, columns], and the range of rows or columns, `first` to `last`, to compute.
struct Product {
  Buffer matrix, left, right;
  long long rows, columns, directions, first, last;
  int option, kernel;

  // writes : which of matrix, left and right is the result: "m", "l" or "r"
  bool take(PyObject* args, char writes) {
    const auto mode = [&](char which) { return which == writes ? Buffer::out : Buffer::in; };
    if (!PyArg_ParseTuple(args, "O&O&O&LLLLLii", mode('m'), &matrix, mode('l'), &left, mode('r'),
                          &right, &rows, &columns, &directions, &first, &last, &option, &kernel))
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
  return run([&] {
    sn::times_rows({p.matrix.as<float>() + p.first * p.columns, rows, p.columns, p.columns},
                   {p.right.as<float>(), p.directions, p.columns, p.columns},
                   {p.left.as<float>() + p.first, p.directions, rows, p.rows}, p.kernel);
  });
}

PyObject* times_columns(PyObject*, PyObject* args) {
  Product p;
  if (!p.take(args, 'r')) return nullptr;
  const int64_t columns = p.last - p.first;
  return run([&] {
    sn::times_columns({p.matrix.as<float>() + p.first, p.rows, columns, p.columns},
                      {p.left.as<float>(), p.directions, p.rows, p.rows},
                      {p.right.as<float>() + p.first, p.directions, columns, p.columns},
                      p.kernel);
  });
}

PyObject* outer(PyObject*, PyObject* args) {
  Product p;
  if (!p.take(args, 'm')) return nullptr;
  const int64_t rows = p.last - p.first;
  return run([&] {
    sn::outer({p.left.as<float>() + p.first, p.directions, rows, p.rows},
              {p.right.as<float>(), p.directions, p.columns, p.columns},
              {p.matrix.as<float>() + p.first * p.columns, rows, p.columns, p.columns},
              p.option != 0, p.kernel);
  });
}

PyObject* kernels(PyObject*, PyObject*) { return PyLong_FromLong(product_kernels()); }

PyObject* remember(PyObject*, PyObject* args) {
  Buffer memory, gradient, out;
  double decay, energy = 0;
  if (!PyArg_ParseTuple(args, "O&O&dO&", Buffer::in, &memory, Buffer::in, &gradient, &decay,
                        Buffer::out, &out))
    return nullptr;
  if (memory.bytes() != out.bytes() || gradient.bytes() != out.bytes()) return wrong("remember");
  const bool done = unlocked([&] {
    energy = sn::remember(memory.as<const float>(), gradient.as<const float>(),
                          static_cast<float>(decay), out.as<float>(), out.bytes() / 4);
  });
  return done ? PyFloat_FromDouble(energy) : nullptr;
}

PyObject* orthonormal(PyObject*, PyObject* args) {
  Buffer sums, instead, shapes, out;
  int bits;
  if (!PyArg_ParseTuple(args, "O&O&O&iO&", Buffer::in, &sums, Buffer::in_or_none, &instead,
                        Buffer::in, &shapes, &bits, Buffer::out, &out))
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
      (instead && instead.bytes() != 4 * count))
    return wrong("orthonormal");
  return run([&] {
    Orthonormal made;
    int64_t at = 0;
    for (Py_ssize_t i = 0; i < matrices; ++i) {
      const int64_t rows = shape[2 * i], width = shape[2 * i + 1];
      const float* other = instead ? instead.as<const float>() + at : nullptr;
      float* found = out.as<float>() + at;
      if (wide)
        made(sums.as<const double>() + at, other, rows, width, bits, found);
      else
        made(sums.as<const int32_t>() + at, other, rows, width, bits, found);
      at += rows * width;
    }
  });
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
  Buffer values, words, own;
  ColumnArguments a;
  int count;
  if (!PyArg_ParseTuple(args, "O&O&O&O&O&iidiO&O&", Buffer::in, &values, Buffer::in, &a.sides,
                        Buffer::in, &a.exponents, Buffer::in, &a.covered, Buffer::in, &a.units,
                        &a.lowest, &a.bits, &a.limit, &count, Buffer::out, &words, Buffer::out,
                        &own) ||
      !a.check())
    return nullptr;
  if (values.bytes() != 4 * a.count || own.bytes() != 4 * a.count ||
      words.bytes() != 4 * a.all_words())
    return wrong("pack_columns");
  return run([&] {
    a.pack(values.as<const float>(), count, words.as<int32_t>(), own.as<float>());
  });
}

PyObject* unpack_columns(PyObject*, PyObject* args) {
  Buffer words, sums, each;
  ColumnArguments a;
  if (!PyArg_ParseTuple(args, "O&O&O&O&iiO&O&", Buffer::in, &words, Buffer::in, &a.sides,
                        Buffer::in, &a.exponents, Buffer::in, &a.units, &a.lowest, &a.bits,
                        Buffer::out, &sums, Buffer::out, &each) ||
      !a.check())
    return nullptr;
  if (words.bytes() != 4 * a.words() || sums.bytes() != 4 * a.count ||
      each.bytes() != 4 * a.count)
    return wrong("unpack_columns");
  return run([&] {
    split_digits(words.as<const int32_t>(), a.words(), a.bits, a.count, sums.as<int32_t>());
    spread_units(a.sides.as<const int64_t>(), a.exponents.as<const int32_t>(), a.columns,
                 a.scales(), each.as<float>());
  });
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
