// Products of a float32 matrix with few directions: see ops/products.py.
//
// Factors are stored transposed, each direction contiguous. Every sum has a fixed order, whatever
// the instruction set, block or thread, and no multiply-add is fused: the same bits everywhere.
#pragma once

#include <cstdint>

namespace sn {

// [rows, columns] floats, with `stride` floats from one row to the next.
template <typename T>
struct Matrix {
  T* at;
  int64_t rows, columns, stride;
};

// The number of kernels that this processor supports; kernel 0 runs on any.
int product_kernels();

// sums[j, i] = sum over k of factor[j, k] * matrix[i, k]: 16 partial sums, of k modulo 16, which
// are then added in pairs.
void times_rows(const Matrix<const float>& matrix, const Matrix<const float>& factor,
                const Matrix<float>& sums, int kernel);

// sums[j, k] = sum over i of factor[j, i] * matrix[i, k], one term after another.
void times_columns(const Matrix<const float>& matrix, const Matrix<const float>& factor,
                   const Matrix<float>& sums, int kernel);

// matrix[i, k] = (or, with `subtract`, -=) sum over j of left[j, i] * right[j, k], term by term.
void outer(const Matrix<const float>& left, const Matrix<const float>& right,
           const Matrix<float>& matrix, bool subtract, int kernel);

// out = memory * decay + gradient; returns the sum of its squares, float32 sums of 1024 each.
double remember(const float* memory, const float* gradient, float decay, float* out,
                int64_t count);

}  // namespace sn
