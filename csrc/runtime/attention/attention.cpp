#include "runtime/attention/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>

#include "base/round.h"
#include "runtime/attention/rows.h"
#include "runtime/gemm/kernels.h"
#include "runtime/gemm/scratch.h"

namespace kiln::runtime::attention {
namespace {

using gemm::kMaxTileRows;
using gemm::Scratch;

constexpr int64_t kQueryBlock = 64;                                 // rows of scores held at a time
constexpr int64_t kKeyBlock = 512;                                  // columns of scores held at a time
constexpr float kHidden = -std::numeric_limits<float>::infinity();  // score of a key that a query does not see

Scratch& scratch() {
  thread_local Scratch s;
  return s;
}

/// Packed panels of a B operand with `k` steps and `n` columns.
struct Panels {
  float* data;
  int64_t k, n;
  gemm::PackedB layout() const { return gemm::PackedB(n); }
  const float* panel(int64_t p) const { return data + layout().first_column(p) * k; }
};
int64_t panel_floats(int64_t k, int64_t n) { return k * round_up(n, 16); }

/// Columns of B are rows of `src` (count x size): B = src^T.
void pack_transposed(const float* src, int64_t row, int64_t count, int64_t size, const Panels& to) {
  const auto layout = to.layout();
  for (int64_t p = 0; p < layout.panels(); ++p) {
    const int64_t j = layout.first_column(p), width = layout.width(p);
    gemm::pack_panel(src + j * row, row, 1, std::min(width, count - j), size, width, const_cast<float*>(to.panel(p)));
  }
}
/// B = src (count steps x size columns).
void pack_plain(const float* src, int64_t row, int64_t count, int64_t size, const Panels& to) {
  const auto layout = to.layout();
  for (int64_t p = 0; p < layout.panels(); ++p) {
    const int64_t j = layout.first_column(p), width = layout.width(p);
    gemm::pack_panel(src + j, 1, row, std::min(width, size - j), count, width, const_cast<float*>(to.panel(p)));
  }
}

/// Which steps a tile of rows needs: the rest of its A is zero.
struct Steps {
  int64_t begin, end;
};

/// C (rows x b.n) (+)= A B, A's element (i, p) at a[i * row + p * step]. The tile of rows i to `last` needs the steps
/// `steps(i, last)`, and no columns from `limit(last)` on.
template <class StepsOf, class Limit>
void product(const float* a, int64_t row, int64_t step, int64_t rows, const Panels& b, float* c, int64_t ldc,
             bool accumulate, const StepsOf& steps, const Limit& limit) {
  const auto layout = b.layout();
  for (int64_t p = 0; p < layout.panels(); ++p) {
    const int64_t j = layout.first_column(p), width = layout.width(p), mr = gemm::tile_rows_for(width);
    for (int64_t i = 0; i < rows; i += mr) {
      const int64_t count = std::min(mr, rows - i), last = i + count - 1;
      if (j >= limit(last)) continue;
      const Steps range = steps(i, last);
      const int64_t length = std::max<int64_t>(0, range.end - range.begin);
      const float* left_rows[kMaxTileRows];
      float* c_rows[kMaxTileRows];
      for (int64_t r = 0; r < count; ++r) {
        left_rows[r] = a + (i + r) * row + range.begin * step;
        c_rows[r] = c + (i + r) * ldc;
      }
      gemm::micro_for(count, width)({1, &length, left_rows, step, nullptr}, b.panel(p) + range.begin * width,
                                    {c_rows, j, std::min(width, b.n - j), nullptr, accumulate});
    }
  }
}
constexpr auto kAll = [](int64_t) { return std::numeric_limits<int64_t>::max(); };
auto first(int64_t steps) {
  return [steps](int64_t, int64_t) { return Steps{0, steps}; };
}

/// Keys of the block that starts at `key0` which query `i` sees.
int64_t visible(const Shape& s, int64_t i, int64_t key0, int64_t keys) {
  return s.causal ? std::clamp<int64_t>(i + 1 - key0, 0, keys) : keys;
}

/// Keys and values of one head, packed for the products with queries and scores: all of them once if that is little,
/// else block by block as they are met.
class PackedKeys {
 public:
  static int64_t floats(const Shape& s) {
    return (blocks_kept(s) * (panel_floats(s.head_size, span(s)) + panel_floats(span(s), s.head_size)));
  }
  PackedKeys(const Shape& s, In k, In v, int64_t b, int64_t hk, float* memory)
      : s_(s), k_(k), v_(v), b_(b), hk_(hk), memory_(memory) {}

  struct Block {
    Panels keys, values;  // [head_size, n], [n, head_size]
  };
  Block at(int64_t key0) {
    const int64_t d = s_.head_size, n = std::min(kKeyBlock, s_.keys - key0), index = key0 / kKeyBlock;
    const int64_t keys_floats = panel_floats(d, span(s_)), all = keys_floats + panel_floats(span(s_), d);
    float* const to = memory_ + index % blocks_kept(s_) * all;
    const Block block{{to, d, n}, {to + keys_floats, n, d}};
    if (index < packed_ && packed_ <= blocks_kept(s_)) return block;
    pack_transposed(k_.at(b_, hk_, key0), k_.row, n, d, block.keys);
    pack_plain(v_.at(b_, hk_, key0), v_.row, n, d, block.values);
    packed_ = index + 1;
    return block;
  }

 private:
  static constexpr int64_t kKeptFloats = 1 << 20;
  static int64_t span(const Shape& s) { return std::min(kKeyBlock, s.keys); }
  static int64_t blocks_kept(const Shape& s) {
    return 2 * s.keys * s.head_size <= kKeptFloats ? (s.keys + kKeyBlock - 1) / kKeyBlock : 1;
  }
  const Shape& s_;
  In k_, v_;
  int64_t b_, hk_;
  float* memory_;
  int64_t packed_ = 0;  // blocks, from the first on
};

void forward_block(const Shape& s, In q, Mask mask, Out out, RowSums lse, int64_t b, int64_t h, int64_t i0,
                   PackedKeys& packed, float* memory) {
  const Rows& on_row = row_functions();
  const int64_t d = s.head_size, rows = std::min(kQueryBlock, s.queries - i0);
  const int64_t ld = round_up(std::min(kKeyBlock, s.keys), 16);
  float *const scores = memory, *const acc = scores + kQueryBlock * ld;
  float *const top = acc + kQueryBlock * d, *const sum = top + kQueryBlock;
  std::fill_n(top, rows, kHidden);
  std::fill_n(sum, rows, 0.0f);
  const int64_t last = s.causal ? std::min(s.keys, i0 + rows) : s.keys;
  for (int64_t key0 = 0; key0 < last; key0 += kKeyBlock) {
    const int64_t keys = std::min(kKeyBlock, last - key0);
    const PackedKeys::Block block = packed.at(key0);
    const auto seen_by = [&](int64_t i) { return visible(s, i0 + i, key0, keys); };
    product(q.at(b, h, i0), q.row, 1, rows, block.keys, scores, ld, false, first(d), seen_by);
    for (int64_t i = 0; i < rows; ++i) {
      float* row = scores + i * ld;
      const int64_t seen = visible(s, i0 + i, key0, keys);
      if (mask.data && seen) on_row.mask(row, seen, s.scale, mask.at(b, h, i0 + i, key0), mask.key);
      const float scale = mask.data ? 1.0f : s.scale;
      const float high = seen ? on_row.highest(row, seen) * scale : kHidden;
      const float next = std::isnan(high) || high > top[i] ? high : top[i];
      if (next == kHidden) {  // nothing seen yet
        std::fill_n(row, keys, 0.0f);
        continue;
      }
      const float keep = top[i] == next ? 1.0f : std::exp(top[i] - next);
      sum[i] = sum[i] * keep + on_row.exponentiate(row, seen, keys, scale, next);
      top[i] = next;
      if (key0 > 0 && keep != 1.0f) on_row.scale(acc + i * d, d, keep);
    }
    product(
        scores, ld, 1, rows, block.values, acc, d, key0 > 0,
        [&](int64_t, int64_t last) { return Steps{0, seen_by(last)}; }, kAll);
  }
  for (int64_t i = 0; i < rows; ++i) {
    const bool hidden = top[i] == kHidden;  // as in eager: zeros, and 0 as the sum's logarithm
    if (!hidden) on_row.scale(acc + i * d, d, 1.0f / sum[i]);
    std::copy_n(acc + i * d, d, out.at(b, h, i0 + i));
    if (lse.data) lse.at(b, h, i0 + i) = hidden ? 0.0f : top[i] + std::log(sum[i]);
  }
}

/// Query blocks [block0, block1) of one head.
void forward_blocks(const Shape& s, In q, In k, In v, Mask mask, Out out, RowSums lse, int64_t b, int64_t h,
                    int64_t block0, int64_t block1) {
  Scratch& mem = scratch();
  const int64_t keys_floats = PackedKeys::floats(s), own = kQueryBlock * (round_up(kKeyBlock, 16) + s.head_size + 2);
  mem.reset(keys_floats + own + 32);
  PackedKeys packed(s, k, v, b, h / (s.heads / s.kv_heads), mem.take(keys_floats));
  float* const memory = mem.take(own);
  for (int64_t block = block0; block < block1; ++block)
    forward_block(s, q, mask, out, lse, b, h, block * kQueryBlock, packed, memory);
}

void backward_head(const Shape& s, In grad_out, In q, In k, In v, Mask mask, In out, RowSums lse, Out grad_q,
                   Out grad_k, Out grad_v, int64_t b, int64_t hk) {
  const Rows& on_row = row_functions();
  const int64_t d = s.head_size, group = s.heads / s.kv_heads, span = std::min(kKeyBlock, s.keys),
                ld = round_up(span, 16);
  Scratch& mem = scratch();
  mem.reset(2 * panel_floats(d, span) + panel_floats(span, d) + 2 * panel_floats(kQueryBlock, d) +
            2 * kQueryBlock * ld + kQueryBlock + 2 * span * d + 256);
  float *const kt_data = mem.take(panel_floats(d, span)), *const vt_data = mem.take(panel_floats(d, span));
  float *const k_data = mem.take(panel_floats(span, d)), *const q_data = mem.take(panel_floats(kQueryBlock, d));
  float *const g_data = mem.take(panel_floats(kQueryBlock, d)), *const p = mem.take(kQueryBlock * ld);
  float *const ds = mem.take(kQueryBlock * ld), *const delta = mem.take(kQueryBlock);
  float *const dk = mem.take(span * d), *const dv = mem.take(span * d);
  for (int64_t key0 = 0; key0 < s.keys; key0 += kKeyBlock) {
    const int64_t keys = std::min(kKeyBlock, s.keys - key0);
    const Panels kt{kt_data, d, keys}, vt{vt_data, d, keys}, kp{k_data, keys, d};
    pack_transposed(k.at(b, hk, key0), k.row, keys, d, kt);
    pack_transposed(v.at(b, hk, key0), v.row, keys, d, vt);
    pack_plain(k.at(b, hk, key0), k.row, keys, d, kp);
    std::fill_n(dk, keys * d, 0.0f);
    std::fill_n(dv, keys * d, 0.0f);
    for (int64_t h = hk * group; h < (hk + 1) * group; ++h)
      for (int64_t i0 = 0; i0 < s.queries; i0 += kQueryBlock) {
        const int64_t rows = std::min(kQueryBlock, s.queries - i0);
        const auto seen_by = [&](int64_t i) { return visible(s, i0 + i, key0, keys); };
        const int64_t seen_by_all = seen_by(rows - 1);
        if (seen_by_all == 0) {  // no query of the block sees a key of this one
          if (key0 == 0)
            for (int64_t i = 0; i < rows; ++i) std::fill_n(grad_q.at(b, h, i0 + i), d, 0.0f);
          continue;
        }
        const Panels qp{q_data, rows, d}, gp{g_data, rows, d};
        pack_plain(q.at(b, h, i0), q.row, rows, d, qp);
        pack_plain(grad_out.at(b, h, i0), grad_out.row, rows, d, gp);
        product(q.at(b, h, i0), q.row, 1, rows, kt, p, ld, false, first(d), seen_by);
        product(grad_out.at(b, h, i0), grad_out.row, 1, rows, vt, ds, ld, false, first(d), seen_by);
        for (int64_t i = 0; i < rows; ++i) {
          const int64_t seen = visible(s, i0 + i, key0, keys);
          delta[i] = on_row.dot(grad_out.at(b, h, i0 + i), out.at(b, h, i0 + i), d);
          if (mask.data && seen) on_row.mask(p + i * ld, seen, s.scale, mask.at(b, h, i0 + i, key0), mask.key);
          on_row.exponentiate(p + i * ld, seen, seen_by_all, mask.data ? 1.0f : s.scale, lse.at(b, h, i0 + i));
          on_row.score_gradient(p + i * ld, ds + i * ld, seen, seen_by_all, delta[i], s.scale);
        }
        // Query i sees no key after i: the first queries of a tile of keys may contribute nothing.
        const auto seeing = [&](int64_t j, int64_t) {
          return Steps{s.causal ? std::clamp<int64_t>(key0 + j - i0, 0, rows) : 0, rows};
        };
        product(p, 1, ld, seen_by_all, gp, dv, d, true, seeing, kAll);
        product(ds, 1, ld, seen_by_all, qp, dk, d, true, seeing, kAll);
        product(
            ds, ld, 1, rows, kp, grad_q.at(b, h, i0), grad_q.row, key0 > 0,
            [&](int64_t, int64_t last) { return Steps{0, seen_by(last)}; }, kAll);
      }
    for (int64_t j = 0; j < keys; ++j) {
      std::copy_n(dk + j * d, d, grad_k.at(b, hk, key0 + j));
      std::copy_n(dv + j * d, d, grad_v.at(b, hk, key0 + j));
    }
  }
}

}  // namespace

bool supported(const Shape& s) {
  // Packing the keys would be most of the work.
  constexpr int64_t kFewQueries = 16, kManyKeys = 16;  // for each query
  if (s.queries < kFewQueries && s.keys >= kManyKeys * s.queries) return false;
  return gemm::supported() && s.head_size > 0 && s.head_size <= 256 && s.queries > 0 && s.keys > 0 && s.kv_heads > 0 &&
         s.heads % s.kv_heads == 0;
}

void forward(const Shape& s, In q, In k, In v, Mask mask, Out out, RowSums lse, const gemm::Parallel& parallel) {
  // A task takes as many blocks of a head as it can, since they share the packed keys, but there must be enough tasks.
  constexpr int64_t kTasks = 16;
  const int64_t blocks = (s.queries + kQueryBlock - 1) / kQueryBlock, heads = s.batch * s.heads;
  const int64_t pieces = std::clamp<int64_t>((kTasks + heads - 1) / heads, 1, blocks);
  parallel(heads * pieces, [&](int64_t task) {
    const int64_t head = task / pieces, piece = task % pieces;
    forward_blocks(s, q, k, v, mask, out, lse, head / s.heads, head % s.heads, blocks * piece / pieces,
                   blocks * (piece + 1) / pieces);
  });
}

void backward(const Shape& s, In grad_out, In q, In k, In v, Mask mask, In out, RowSums lse, Out grad_q, Out grad_k,
              Out grad_v, const gemm::Parallel& parallel) {
  parallel(s.batch * s.kv_heads, [&](int64_t task) {
    backward_head(s, grad_out, q, k, v, mask, out, lse, grad_q, grad_k, grad_v, task / s.kv_heads, task % s.kv_heads);
  });
}

}  // namespace kiln::runtime::attention
