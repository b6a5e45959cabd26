#pragma once
#include <algorithm>
#include <vector>

#include "runtime/conv/winograd.h"
#include "runtime/gemm/kernels.h"
#include "runtime/gemm/target.h"

// What Winograd's forms of the product and of the weight's gradient share: patches of the input and their transform.
namespace kiln::runtime::conv {

using gemm::Lanes;

constexpr int64_t kPlaces = 16;  // of a patch, row by row

/// Anywhere in memory: a deduced type would promise the alignment of a whole vector.
template <int kLanes, class Vector>
KILN_INLINE void load(const float* from, Vector& to) {
  to = *reinterpret_cast<const typename Lanes<kLanes>::type*>(from);
}
template <int kLanes, class Vector>
KILN_INLINE void store(const Vector& value, float* to) {
  *reinterpret_cast<typename Lanes<kLanes>::type*>(to) = value;
}

/// The pixels of a patch, and where its transform goes: place p to `to` + p * `step`.
struct Patch {
  const float* pixels[kPlaces];
  int64_t channels;
  float* to;
  int64_t step;
};
void transform(const Patch& p);

/// `floats` floats on a cache line's border, in memory that a thread keeps.
inline float* aligned_floats(std::vector<float>& kept, int64_t floats) {
  constexpr int64_t kLine = 16;
  if (static_cast<int64_t>(kept.size()) < floats + kLine) kept.resize(floats + kLine);
  return reinterpret_cast<float*>(round_up(reinterpret_cast<intptr_t>(kept.data()), kLine * sizeof(float)));
}

/// Squares of 2 x 2 results; at the lower and right border, of fewer.
struct Tiling {
  int64_t rows, columns, lines;  // of a picture; rows of all pictures
  explicit Tiling(const Shape& s) : rows(ceil_div(s.oh, 2)), columns(ceil_div(s.ow, 2)), lines(s.n * rows) {}
  int64_t tiles() const { return lines * columns; }
  /// The first row of pixels of y, counted through all pictures, of a row of tiles.
  int64_t first_pixel_row(const Shape& s, int64_t line) const { return line / rows * s.oh + line % rows * 2; }
};

/// Where tile `index`, counted through all pictures, lies: its picture and the first pixel of its results.
struct Place {
  int64_t n, h, w;
  Place(const Tiling& t, int64_t index)
      : n(index / (t.rows * t.columns)), h(index / t.columns % t.rows * 2), w(index % t.columns * 2) {}
};

/// The pixels of x that a tile's patch has, from channel `c` on; `zeros` where it reaches over the border.
inline void find_pixels(const Shape& s, const Place& at, const float* x, int64_t c, const float* zeros, Patch& patch) {
  for (int64_t r = 0; r < 4; ++r) {
    const int64_t h = at.h - s.pad_h + r;
    for (int64_t q = 0; q < 4; ++q) {
      const int64_t w = at.w - s.pad_w + q;
      const bool inside = h >= 0 && h < s.h && w >= 0 && w < s.w;
      patch.pixels[r * 4 + q] = inside ? x + ((at.n * s.h + h) * s.w + w) * s.ci + c : zeros;
    }
  }
}

}  // namespace kiln::runtime::conv
