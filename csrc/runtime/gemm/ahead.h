#pragma once
#include <algorithm>
#include <cstdint>

#include "base/round.h"

namespace kiln::runtime::gemm {

/// Memory that is to be read soon: asked for piece by piece while something else computes, so that nothing waits for
/// it later. `lines` lines of `length` floats, `stride` apart.
class Ahead {
 public:
  Ahead() = default;
  /// In `pieces` equal parts.
  Ahead(const float* data, int64_t lines, int64_t stride, int64_t length, int64_t pieces)
      : data_(data), lines_(lines), stride_(stride), length_(length) {
    each_ = ceil_div(lines * ceil_div(length, 16), std::max<int64_t>(1, pieces));
  }
  /// `count` vectors of `depth` elements: element (v, p) at data[v * vector + p * step].
  static Ahead of_vectors(const float* data, int64_t count, int64_t vector, int64_t depth, int64_t step,
                          int64_t pieces) {
    return step == 1 ? Ahead(data, count, vector, depth, pieces) : Ahead(data, depth, step, count, pieces);
  }
  /// As after so many parts were asked for.
  Ahead& skip(int64_t parts) {
    const int64_t in_line = ceil_div(length_, 16);
    if (in_line > 0) line_ = parts * each_ / in_line, at_ = parts * each_ % in_line * 16;
    return *this;
  }
  void ask() {
    for (int64_t i = 0; i < each_ && line_ < lines_; ++i) {
      __builtin_prefetch(data_ + line_ * stride_ + at_, 0, 2);
      if ((at_ += 16) < length_) continue;
      at_ = 0;
      ++line_;
    }
  }

 private:
  const float* data_ = nullptr;
  int64_t lines_ = 0, stride_ = 0, length_ = 0, each_ = 0, line_ = 0, at_ = 0;
};

}  // namespace kiln::runtime::gemm
