// Products of a float32 matrix with few directions: see ops/products.py.
//
// Factors lie transposed, a direction's numbers side by side. Every sum has one order that no
// instruction set, block or thread changes, and no multiply-add is fused: the same bits everywhere.
#pragma once

#include <cstdint>

namespace sn {

// [rows, columns] floats; `stride` of them from one row to the next.
template <typename T>
struct Matrix {
  T* at;
  int64_t rows, columns, stride;
};

// Instruction sets with kernels of their own that this processor has; 0 runs anywhere.
int product_kernels();

// sums[j, i] = sum over k of factor[j, k] * matrix[i, k]: 16 partial sums, of k modulo 16, which
// are then added up in pairs.
void times_rows(const Matrix<const float>& matrix, const Matrix<const float>& factor,
                const Matrix<float>& sums, int kernel);

// sums[j, k] = sum over i of factor[j, i] * matrix[i, k], one after the other.
void times_columns(const Matrix<const float>& matrix, const Matrix<const float>& factor,
                   const Matrix<float>& sums, int kernel);

// matrix[i, k] = sum over j of left[j, i] * right[j, k], one after the other, or less that.
void outer(const Matrix<const float>& left, const Matrix<const float>& right,
           const Matrix<float>& matrix, bool subtract, int kernel);

// out = memory * decay + gradient; the sum of its squares, partial sums in float32 of 1024 each.
double remember(const float* memory, const float* gradient, float decay, float* out,
                int64_t count);

}  // namespace sn
