// First fit in a given order; tests/oracles/first_fit_oracle.py finds the same offsets.
#pragma once

#include <cstdint>
#include <vector>

#include "pool_problem.h"

namespace sn {

// Puts each buffer, in the order given, at the lowest aligned offset that is free for its life.
std::vector<int64_t> first_fit(const Problem& problem, const std::vector<int32_t>& order);

}  // namespace sn
