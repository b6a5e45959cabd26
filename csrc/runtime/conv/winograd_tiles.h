#pragma once
#include <algorithm>

#include "runtime/conv/winograd.h"
#include "runtime/gemm/kernels.h"
#include "runtime/gemm/target.h"

// What Winograd's forms of the product and of the weight's gradient share: patches of the input and their transform,
// and the product for one place of them.
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

// Transforms act on the rows of a square and then on its columns. Vectors hold channels: transform_vector does that for
// a whole vector from channel `c` on, or for one channel.

/// transform_vector for all channels.
template <int kLanes, class T>
KILN_INLINE void transform_channels(const T& t, int64_t channels) {
  const int64_t whole = channels / kLanes * kLanes;
  for (int64_t c = 0; c < whole; c += kLanes) transform_vector<kLanes>(t, c);
  for (int64_t c = whole; c < channels; ++c) transform_vector<1>(t, c);
}
template <class T>
KILN_AVX512 void transform512(const T& t, int64_t channels) {
  transform_channels<16>(t, channels);
}
template <class T>
KILN_AVX2 void transform256(const T& t, int64_t channels) {
  transform_channels<8>(t, channels);
}
template <class T>
void transform(const T& t, int64_t channels) {
  gemm::has_avx512() ? transform512(t, channels) : transform256(t, channels);
}

/// Of a patch of the input.
template <class Vector>
KILN_INLINE void transform_input(const Vector (&d)[4], Vector (&to)[4]) {
  to[0] = d[0] - d[2];
  to[1] = d[1] + d[2];
  to[2] = d[2] - d[1];
  to[3] = d[1] - d[3];
}
/// The pixels of a patch, and where its transform goes: place p to `to` + p * `step`.
struct Patch {
  const float* pixels[kPlaces];
  float* to;
  int64_t step;
};
template <int kLanes>
KILN_INLINE void transform_vector(const Patch& p, int64_t c) {
  using Vector = typename Lanes<kLanes>::type;
  Vector rows[4][4], column[4], out[4];
#pragma GCC unroll 4
  for (int r = 0; r < 4; ++r) {
#pragma GCC unroll 4
    for (int q = 0; q < 4; ++q) load<kLanes>(p.pixels[r * 4 + q] + c, column[q]);
    transform_input(column, rows[r]);
  }
#pragma GCC unroll 4
  for (int q = 0; q < 4; ++q) {
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) column[r] = rows[r][q];
    transform_input(column, out);
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) store<kLanes>(out[r], p.to + (r * 4 + q) * p.step + c);
  }
}

/// Rows times a panel of `width` columns, `b`, for one place: `a_row` floats from row to row, `a_step` from one of the
/// `depth` steps to the next.
struct RowsTimesPanel {
  const float* a;
  int64_t a_row, a_step;
  const float* b;
  int64_t depth, width, columns;
  float* c;
  int64_t c_row;
  bool accumulate;
};
/// ask() is called for each tile of registers, to ask for what is needed next.
template <class Ask>
void multiply(const RowsTimesPanel& p, int64_t rows, const Ask& ask) {
  const int64_t mr = gemm::tile_rows_for(p.width);
  const float* a = p.a;
  float* c = p.c;
  for (int64_t left = rows; left > 0; left -= mr) {
    ask();
    const int64_t height = std::min(mr, left);
    const float* a_rows[gemm::kMaxTileRows];
    float* c_rows[gemm::kMaxTileRows];
    for (int64_t r = 0; r < height; ++r, a += p.a_row, c += p.c_row) a_rows[r] = a, c_rows[r] = c;
    gemm::micro_for(height, p.width)({1, &p.depth, a_rows, p.a_step}, p.b,
                                     {c_rows, 0, p.columns, nullptr, p.accumulate});
  }
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
