#include "runtime/conv/weight_rows.h"

#include <algorithm>
#include <cstring>

#include "base/round.h"
#include "runtime/gemm/kernels.h"

namespace kiln::runtime::conv {

void write_columns(std::vector<SumRow>& rows, int64_t cols, float* to, int64_t step) {
  std::sort(rows.begin(), rows.end(), [](const SumRow& a, const SumRow& b) { return a.place < b.place; });
  const int64_t count = static_cast<int64_t>(rows.size());
  alignas(64) float square[16 * 16];
  for (int64_t j = 0; j < cols; j += 16) {
    const int64_t width = std::min<int64_t>(16, cols - j);
    float* const out = to + j * step;
    // The lines that are written next: the wait for the right to write to them passes meanwhile.
    for (int64_t v = 16; v < std::min<int64_t>(32, cols - j); ++v)
      for (int64_t r = 0; r < count; r += 16) __builtin_prefetch(out + rows[r].place + v * step, 1);
    for (int64_t r = 0; r < count;) {
      // Places of one row of the gradient that lie side by side are written at once.
      if (width == 16 && r + 16 <= count && rows[r + 15].place == rows[r].place + 15) {
        for (int64_t q = 0; q < 16; ++q) std::memcpy(square + q * 16, rows[r + q].data + j, 64);
        gemm::transpose16(square, 16, out + rows[r].place, step);
        r += 16;
        continue;
      }
      for (int64_t v = 0; v < width; ++v) out[rows[r].place + v * step] = rows[r].data[j + v];
      ++r;
    }
  }
}

int64_t partial_floats(const Shape& s) { return round_up(s.taps() * s.ci * s.co, 16); }

void add_partials(const Shape& s, const float* partials, int64_t parts, float* dweight,
                  const gemm::Parallel& parallel) {
  const int64_t size = s.taps() * s.ci * s.co;
  if (parts == 1) return;
  parallel(ceil_div(size, 4096), [&](int64_t piece) {
    const int64_t end = std::min(size, (piece + 1) * 4096);
    for (int64_t part = 1; part < parts; ++part) {
      const float* from = partials + (part - 1) * partial_floats(s);
      for (int64_t q = piece * 4096; q < end; ++q) dweight[q] += from[q];
    }
  });
}

}  // namespace kiln::runtime::conv
