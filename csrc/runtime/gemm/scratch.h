#pragma once
#include <cstdint>
#include <cstdlib>
#include <memory>

#include "base/round.h"

namespace kiln::runtime::gemm {

/// 64-byte aligned memory of one thread, kept between calls. What it holds at first is not defined.
class Scratch {
 public:
  /// The next `floats` floats; each such part begins on a border of 16.
  float* take(int64_t floats) {
    const int64_t at = used_;
    used_ += round_up(floats, 16);
    return data_.get() + at;
  }
  /// Makes room for `floats` in all and starts again at the front.
  void reset(int64_t floats) {
    if (floats > size_) {
      data_.reset(static_cast<float*>(std::aligned_alloc(64, round_up(floats * 4, 64))));
      size_ = floats;
    }
    used_ = 0;
  }

 private:
  struct Free {
    void operator()(float* p) const { std::free(p); }
  };
  std::unique_ptr<float, Free> data_;
  int64_t size_ = 0, used_ = 0;
};

}  // namespace kiln::runtime::gemm
