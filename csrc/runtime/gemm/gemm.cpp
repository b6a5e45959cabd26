#include "runtime/gemm/gemm.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "runtime/gemm/cut.h"
#include "runtime/gemm/few_rows.h"
#include "runtime/gemm/kernels.h"
#include "runtime/gemm/scratch.h"

namespace kiln::runtime::gemm {
namespace {

void pack_b_panel(const Depths& depths, const PackedB& layout, Matrix b, float* packed, int64_t panel) {
  const int64_t j = layout.first_column(panel), width = layout.width(panel);
  for (const Depths::Block& block : depths.blocks)
    pack_panel(b.data + block.k * b.row + j * b.col, b.col, b.row, std::min(width, layout.n - j), block.depth, width,
               packed + layout.at(block, panel));
}

/// The rows of a row-major C.
auto rows_of(float* c, int64_t ldc) {
  return [c, ldc](int64_t i, int64_t count, float** out) {
    float* row = c + i * ldc;
    for (int64_t r = 0; r < count; ++r, row += ldc) out[r] = row;
  };
}

void zero_product(int64_t m, int64_t n, float* c, int64_t ldc, const Epilogue& e) {
  for (int64_t i = 0; i < m; ++i)
    for (int64_t j = 0; j < n; ++j) c[i * ldc + j] = e.applied(0.0f, c[i * ldc + j], j);
}

bool transposed(const Matrix& a) { return a.row == 1 && a.col > 1; }

/// Packs rows [i0, i1) of A into tiles of mr rows, k-major.
void pack_rows(Matrix a, int64_t i0, int64_t i1, int64_t k, float* to) {
  const int64_t mr = tile().mr;
  // Of a transposed A a few lines at a time, for all tiles: a tile's part of a line is less than a cache line.
  const int64_t steps = a.row == 1 ? 32 : k;
  const int64_t sixes = transposed(a) ? (i1 - i0) / mr : 0;
  for (int64_t p = 0; p < k; p += steps) {
    const int64_t lines = std::min(steps, k - p);
    pack_sixes(a.data + i0 + p * a.col, a.col, lines, sixes, k, p + lines < k, to + p * mr);
    for (int64_t i = i0 + sixes * mr; i < i1; i += mr)
      pack_panel(a.data + i * a.row + p * a.col, a.row, a.col, std::min(mr, i1 - i), lines, mr,
                 to + (i - i0) * k + p * mr);
  }
}
void pack_all_rows(Matrix a, int64_t m, int64_t k, float* to, const Parallel& parallel) {
  const int64_t rows = 8 * tile().mr;
  parallel(ceil_div(m, rows),
           [&](int64_t t) { pack_rows(a, t * rows, std::min(m, (t + 1) * rows), k, to + t * rows * k); });
}

/// Whether A is copied into tiles before it meets B. A transposed A is read where it is, a line of it for each step,
/// while all of it stays in a core's second-level cache: packing it would cost up to a tenth of the product. A larger
/// one is slow to read there, as each step's line is in another page; where lines are 4096 bytes apart, and fall into
/// few of the caches' sets, products ran at half their speed and less. Narrow panels meet it so often that a copy is
/// better in any case.
bool packs_a(int64_t m, int64_t k, const Matrix& a) {
  if (a.col == 1) return false;
  return !has_avx512() || !transposed(a) || m * k > (1 << 17);
}

/// Whether B, which all threads meet whole, is packed by each of them for itself: where it stays in a core's
/// second-level cache, and where packing it, about as much work as three rows of A are, does not count. Lines that
/// another core wrote come slowly, from behind another last-level cache so slowly that products ran at half their
/// speed.
bool packs_own_b(int64_t m, int64_t n, int64_t k, int threads) {
  return threads > 1 && m >= int64_t{64} * threads && n * k <= (1 << 17);
}

/// A thread's own copy of B or of a panel of it, packed when it first needs it. One at a time.
class OwnCopy {
 public:
  explicit OwnCopy(int64_t floats) : floats_(floats), call_(++calls()) {}
  template <class Pack>
  const float* get(const Pack& pack, int64_t panel = 0) const {
    if (mine.call != call_ || mine.panel != panel) {
      mine.memory.reset(floats_);
      mine.data = mine.memory.take(floats_);
      pack(mine.data);
      mine.call = call_, mine.panel = panel;
    }
    return mine.data;
  }

 private:
  struct Mine {
    uint64_t call = 0;
    int64_t panel = 0;
    Scratch memory;
    float* data = nullptr;
  };
  static thread_local Mine mine;
  static std::atomic<uint64_t>& calls() {
    static std::atomic<uint64_t> n{0};
    return n;
  }
  int64_t floats_;
  uint64_t call_;
};
thread_local OwnCopy::Mine OwnCopy::mine;

/// Left operands of all tiles of a task, for one block of k. Segments that are zeros for all rows of a tile are left
/// out of it: a convolution's border, or most of a large kernel over a small image.
class TileTable {
 public:
  void fill(const Depths& depths, const Depths::Block& block, const RowPointers& rows, int64_t i0, int64_t i1,
            int64_t mr) {
    const int64_t tiles = ceil_div(i1 - i0, mr);
    const Depths::Segment* const segments = depths.segments.data() + block.first_segment;
    segments_ = block.segments;
    pointers_.resize(tiles * segments_ * kMaxTileRows);
    lengths_.resize(tiles * segments_), starts_.resize(tiles * segments_), counts_.resize(tiles);
    std::vector<int64_t> which(segments_);
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t i = i0 + t * mr, at = t * segments_;
      counts_[t] =
          rows(i, std::min(mr, i1 - i), segments, segments_, pointers_.data() + at * kMaxTileRows, which.data());
      for (int64_t q = 0; q < counts_[t]; ++q) {
        lengths_[at + q] = segments[which[q]].length;
        starts_[at + q] = segments[which[q]].k - block.k;
      }
    }
  }
  Left tile_at(int64_t index) const {
    const int64_t at = index * segments_;
    return {counts_[index], lengths_.data() + at, pointers_.data() + at * kMaxTileRows, 1, starts_.data() + at};
  }

 private:
  int64_t segments_ = 0;
  std::vector<int64_t> lengths_, starts_, counts_;  // counts: of segments, by tile
  std::vector<const float*> pointers_;
};

/// One block of k of a product: its tiles' rows, where they go and what is added on the way.
template <class RowsOfC>
struct Target {
  int64_t mr;
  const RowsOfC& rows_of_c;
  const Epilogue& epilogue;
  bool first, last;  // block of k
};

/// Runs the tiles of rows [i0, i1) with one panel, `packed`, which holds columns [j, j + cols) in lines of `width`.
template <class LeftOf, class RowsOfC>
void run_panel(const float* packed, int64_t j, int64_t cols, int64_t width, int64_t i0, int64_t i1,
               const LeftOf& left_of, const Target<RowsOfC>& to, Ahead* ahead = nullptr) {
  const int64_t mr = to.mr;
  float* c_rows[kMaxTileRows];
  const Store s{c_rows, j, cols, to.last && to.epilogue.bias ? to.epilogue.bias + j : nullptr,
                !to.first || to.epilogue.accumulate};
  const Micro whole = micro_for(mr, width);
  for (int64_t i = i0, tile = 0; i < i1; i += mr, ++tile) {
    if (ahead) ahead->ask();
    const int64_t rows = std::min(mr, i1 - i);
    to.rows_of_c(i, rows, c_rows);
    (rows == mr ? whole : micro_for(rows, width))(left_of(tile), packed, s);
  }
}

/// The same for panels [panel0, panel1) of a packed B.
template <class LeftOf, class RowsOfC>
void run_panels(const Depths::Block& block, const PackedB& layout, const float* packed, int64_t panel0, int64_t panel1,
                int64_t i0, int64_t i1, const LeftOf& left_of, const Target<RowsOfC>& to, Ahead* ahead = nullptr) {
  for (int64_t panel = panel0; panel < panel1; ++panel) {
    const int64_t j = layout.first_column(panel), width = layout.width(panel);
    run_panel(packed + layout.at(block, panel), j, std::min(width, layout.n - j), width, i0, i1, left_of, to, ahead);
  }
}

/// How a product is cut into tasks: blocks of rows, and with few rows or a large B also ranges of panels. Tasks that
/// follow each other share a range, so that it stays in the caches while all rows meet it. Tasks are of one size, as
/// far as tiles allow: nobody waits for a longer last one.
struct Cut {
  /// A block of A that fits beside a panel of B in the second-level cache: of a megabyte or more where there is
  /// AVX-512, else of 256 KB or more.
  static int64_t block_floats() { return has_avx512() ? 1 << 17 : 1 << 15; }
  static constexpr int64_t kCachedFloats = 1 << 19;
  int64_t m, mr, tiles, row_tasks, panels, column_tasks;
  /// Tiles have `mr` rows.
  Cut(int64_t m, int64_t mr, const Depths& depths, const PackedB& layout, int threads, bool rows_wait = false)
      : m(m), mr(mr), tiles(ceil_div(m, mr)), panels(layout.panels()) {
    int64_t fitting = block_floats() / depths.blocks[0].depth / mr;
    if (rows_wait) fitting = std::min(fitting, kWaitingFloats / layout.n / mr);
    // Enough tasks that one busy core does not stall the rest.
    const int64_t wanted = std::max(1, threads * 4);
    row_tasks = std::max(ceil_div(tiles, std::max<int64_t>(1, fitting)), std::min(wanted, tiles));
    const int64_t cached = std::max<int64_t>(4, kCachedFloats / (depths.k * tile().nr));
    column_tasks = std::max(ceil_div(panels, cached), std::min(ceil_div(wanted, row_tasks), panels));
  }
  int64_t tasks() const { return row_tasks * column_tasks; }
  /// Of a task, or one past the last.
  int64_t first_row(int64_t task) const { return first_tile(task % row_tasks) * mr; }
  int64_t end_row(int64_t task) const { return std::min(m, first_tile(task % row_tasks + 1) * mr); }
  int64_t first_panel(int64_t task) const { return task / row_tasks * panels / column_tasks; }
  int64_t end_panel(int64_t task) const { return (task / row_tasks + 1) * panels / column_tasks; }

 private:
  int64_t first_tile(int64_t row_task) const { return row_task * tiles / row_tasks; }
};

}  // namespace

bool supported() { return has_avx512() || (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")); }
int64_t tile_rows() { return tile().mr; }

bool packs_by_panel(int64_t n, int64_t k, int64_t a_floats, int threads) {
  return PackedB(n).panels() >= 2 * threads && n * k >= (1 << 17) && a_floats <= (1 << 19);
}

void serial(int64_t tasks, const std::function<void(int64_t)>& body) {
  for (int64_t i = 0; i < tasks; ++i) body(i);
}

void add_parts(const float* summands, int64_t step, int64_t parts, int64_t begin, int64_t end, int64_t n, float* c,
               int64_t ldc, const Epilogue& epilogue) {
  for (int64_t i = begin; i < end; ++i)
    for (int64_t j = 0; j < n; ++j) {
      float sum = summands[i * n + j];
      for (int64_t part = 1; part < parts; ++part) sum += summands[part * step + i * n + j];
      c[i * ldc + j] = epilogue.applied(sum, c[i * ldc + j], j);
    }
}

const float* zeros() {
  alignas(64) static const float line[kMaxDepth] = {};
  return line;
}

Depths::Depths(int64_t taps, int64_t length) : k(taps * length) {
  const int64_t pieces = std::max<int64_t>(1, ceil_div(length, kMaxDepth)), piece = ceil_div(length, pieces);
  for (int64_t t = 0; t < taps; ++t)
    for (int64_t at = 0; at < length; at += piece)
      segments.push_back({t * length + at, std::min(piece, length - at), t, at});
  for (int64_t s = 0; s < static_cast<int64_t>(segments.size()); ++s) {
    if (blocks.empty() || blocks.back().depth + segments[s].length > kMaxDepth)
      blocks.push_back({segments[s].k, 0, s, 0});
    blocks.back().depth += segments[s].length;
    ++blocks.back().segments;
  }
}

Depths Depths::taps_inside(int64_t taps, int64_t length) {
  Depths d;
  d.k = taps * length;
  const int64_t pieces = ceil_div(length, std::max<int64_t>(1, kMaxDepth / taps)), piece = ceil_div(length, pieces);
  for (int64_t at = 0; at < length; at += piece) {
    const int64_t some = std::min(piece, length - at);
    d.blocks.push_back({at * taps, some * taps, static_cast<int64_t>(d.segments.size()), taps});
    for (int64_t t = 0; t < taps; ++t) d.segments.push_back({at * taps + t * some, some, t, at});
  }
  return d;
}

// Widths differ by one vector at most: a panel of one vector would leave the multipliers waiting for loads.
int64_t PackedB::panels() const { return ceil_div(n, tile().nr); }
int64_t PackedB::first_column(int64_t panel) const {
  if (tile().nr == 16) return panel * 16;
  const int64_t narrow = tile().nr / 16 - 1, wide = std::max<int64_t>(0, ceil_div(n, 16) - narrow * panels());
  return 16 * (narrow * panel + std::min(panel, wide));
}
int64_t PackedB::width(int64_t panel) const {
  if (n <= kNarrowWidth) return kNarrowWidth;
  return std::min(first_column(panel + 1), round_up(n, 16)) - first_column(panel);
}
int64_t PackedB::columns(int64_t panel) const { return std::min(width(panel), n - first_column(panel)); }
int64_t PackedB::at(const Depths::Block& block, int64_t panel) const {
  return block.k * round_up(n, 16) + first_column(panel) * block.depth;
}

int64_t packed_floats(int64_t k, int64_t n) { return round_up(n, 16) * k; }

int64_t packed_a_floats(int64_t m, int64_t n, int64_t k, const Matrix& a, int threads) {
  if (m == 0 || n == 0 || k == 0 || !packs_a(m, k, a)) return 0;
  const Cut cut(m, tile().mr, Depths(1, k), PackedB(n), threads);
  return cut.column_tasks == 1 ? 0 : round_up(round_up(m, tile().mr) * k, 16);
}

namespace {

/// Up to this depth a panel of B is kept as a whole, in the second-level cache.
constexpr int64_t kKeptDepth = 4 * kMaxDepth;

/// Whether A may be read once for each panel: narrow panels would copy lines of a transposed one too often.
bool meets_panels(const Matrix& a) { return has_avx512() || !transposed(a); }

/// packs_by_panel, for a product that is not cut along k. It is better for larger A, too, where a packed B would be
/// read by threads that did not write it: rows are read from the last-level cache once a panel.
bool goes_by_panel(int64_t m, int64_t n, int64_t k, const Matrix& a, int threads) {
  const int64_t limit = transposed(a) || a.col == 1 ? 3 << 19 : 1 << 19;
  return meets_panels(a) && packs_by_panel(n, k, 0, threads) && m * k <= limit;
}

/// A long product with few results is cut along k: each thread packs what it multiplies, and adds to a C of its own.
/// How many of them; 1: it is cut along rows or columns.
int depth_parts(int64_t m, int64_t n, int64_t k, const Matrix& a, int threads) {
  constexpr int64_t kResults = 1 << 19, kDepth = 256;
  const int64_t parts = std::min<int64_t>(threads, k / kDepth);
  const bool by_panel =
      k < kKeptDepth ? goes_by_panel(m, n, k, a, threads) : meets_panels(a) && packs_by_panel(n, k, m * k, threads);
  return m * n * parts > kResults || by_panel || 2 * parts <= threads ? 1 : static_cast<int>(parts);
}
/// A part goes on in steps of this depth, so that what it reads stays in its second-level cache.
int64_t part_step(int64_t m, int64_t n) {
  return std::max<int64_t>(1, (1 << 17) / std::max(m, n) / kMaxDepth) * kMaxDepth;
}
int64_t part_floats(int64_t m, int64_t n, int64_t k, const Matrix& a, const Matrix& b, int parts) {
  const int64_t longest = ceil_div(k, parts), step = std::min(part_step(m, n), longest);
  int64_t most = 0;  // a shorter step, as the last one is, may be cut otherwise
  for (int64_t depth : {step, longest % step, k / parts % step, longest, k / parts})
    most = std::max(most, workspace_floats(m, n, std::min(depth, step), a, b, 1));
  return round_up(most, 16) + round_up(m * n, 16);
}

void multiply_by_depth(int64_t m, int64_t n, int64_t k, Matrix a, Matrix b, float* c, int64_t ldc,
                       const Epilogue& epilogue, float* workspace, const Parallel& parallel, int parts) {
  const int64_t floats = part_floats(m, n, k, a, b, parts);
  const auto partial = [&](int64_t part) { return workspace + part * floats; };
  parallel(parts, [&](int64_t part) {
    const int64_t begin = k * part / parts, end = k * (part + 1) / parts;
    for (int64_t p = begin; p < end; p += part_step(m, n))
      multiply(m, n, std::min(part_step(m, n), end - p), {a.data + p * a.col, a.row, a.col},
               {b.data + p * b.row, b.row, b.col}, partial(part), n, Epilogue{nullptr, p > begin},
               partial(part) + round_up(m * n, 16), serial, 1);
  });
  const int64_t tasks = std::min<int64_t>(m, parts);
  parallel(tasks, [&](int64_t task) {
    add_parts(workspace, floats, parts, m * task / tasks, m * (task + 1) / tasks, n, c, ldc, epilogue);
  });
}

}  // namespace

bool reads_b_once(int64_t m) { return m <= 3; }

int64_t workspace_floats(int64_t m, int64_t n, int64_t k, const Matrix& a, const Matrix& b, int threads) {
  if (has_few_rows(m, a, b)) return few_rows_floats(m, n, k, b, threads);
  if (const int parts = depth_parts(m, n, k, a, threads); parts > 1) return parts * part_floats(m, n, k, a, b, parts);
  if (goes_by_panel(m, n, k, a, threads)) return packs_a(m, k, a) ? round_up(m, tile().mr) * k : 0;
  const Chunk chunk(n, k);
  int64_t packed_a = 0;  // the last chunk, being smaller, may be cut otherwise
  for (int64_t width : {chunk.n, n % chunk.n})
    for (int64_t depth : {chunk.k, k % chunk.k})
      packed_a = std::max(packed_a, packed_a_floats(m, width, depth, a, threads));
  return (packs_own_b(m, n, k, threads) ? 0 : packed_floats(chunk.k, chunk.n)) + packed_a;
}

void pack(int64_t k, int64_t n, Matrix b, float* packed, const Parallel& parallel) {
  const Depths depths(1, k);
  const PackedB layout(n);
  parallel(layout.panels(), [&](int64_t panel) { pack_b_panel(depths, layout, b, packed, panel); });
}

namespace {

/// multiply_indirect; packed_b() is what a task takes for B.
template <class PackedBOf, class RowsOfC>
void run_indirect(int64_t m, const Depths& depths, const RowPointers& rows, const PackedB& layout,
                  const PackedBOf& packed_b, const RowsOfC& rows_of_c, const Epilogue& epilogue,
                  const Parallel& parallel, int threads) {
  if (m == 0 || layout.n == 0) return;
  const int64_t mr = tile_rows_for(layout.width(0));
  const Cut cut(m, mr, depths, layout, threads, epilogue.rows_done != nullptr);
  RowsLeft left(cut.row_tasks, cut.column_tasks, epilogue.rows_done);
  parallel(cut.tasks(), [&](int64_t task) {
    const int64_t i0 = cut.first_row(task), i1 = cut.end_row(task);
    const float* const packed = packed_b();
    TileTable table;
    for (const Depths::Block& block : depths.blocks) {
      table.fill(depths, block, rows, i0, i1, mr);
      run_panels(
          block, layout, packed, cut.first_panel(task), cut.end_panel(task), i0, i1,
          [&](int64_t index) { return table.tile_at(index); },
          Target{mr, rows_of_c, epilogue, block.k == 0, block.k + block.depth == depths.k});
    }
    left.finished(task % cut.row_tasks, i0, i1);
  });
}

/// multiply_packed; packed_b() is what a task takes for B.
template <class PackedBOf>
void run_packed(int64_t m, int64_t n, int64_t k, Matrix a, const PackedBOf& packed_b, float* c, int64_t ldc,
                const Epilogue& epilogue, float* workspace, const Parallel& parallel, int threads) {
  if (m == 0 || n == 0) return;
  if (k == 0) return zero_product(m, n, c, ldc, epilogue);
  const Depths depths(1, k);
  const PackedB layout(n);
  const int64_t mr = tile().mr;
  if (a.col == 1) {  // rows are contiguous: read them where they are
    const RowPointers rows = [&](int64_t i, int64_t count, const Depths::Segment* s, int64_t segments,
                                 const float** out, int64_t* which) {
      for (int64_t g = 0; g < segments; ++g, out += kMaxTileRows) {
        which[g] = g;
        for (int64_t r = 0; r < count; ++r) out[r] = a.data + (i + r) * a.row + s[g].k;
      }
      return segments;
    };
    return run_indirect(m, depths, rows, layout, packed_b, rows_of(c, ldc), epilogue, parallel, threads);
  }
  const bool packs = packs_a(m, k, a);
  const Cut cut(m, mr, depths, layout, threads, epilogue.rows_done != nullptr);
  RowsLeft left(cut.row_tasks, cut.column_tasks, epilogue.rows_done);
  const auto rows_of_c = rows_of(c, ldc);
  if (packs && cut.column_tasks > 1) pack_all_rows(a, m, k, workspace, parallel);
  parallel(cut.tasks(), [&](int64_t task) {
    const int64_t i0 = cut.first_row(task), i1 = cut.end_row(task);
    const float* const packed = packed_b();
    const float* packed_a = packs ? workspace + i0 * k : nullptr;
    Ahead ahead;
    if (packs && cut.column_tasks == 1) {  // no other task needs these rows
      thread_local std::vector<float> own;
      if (static_cast<int64_t>(own.size()) < round_up(i1 - i0, mr) * k) own.resize(round_up(i1 - i0, mr) * k);
      packed_a = own.data();
      pack_rows(a, i0, i1, k, own.data());
      if (const int64_t next = task + 1; a.row == 1 && next < cut.row_tasks)
        ahead = Ahead(a.data + cut.first_row(next), k, a.col, cut.end_row(next) - cut.first_row(next),
                      ceil_div(i1 - i0, mr) * layout.panels() * static_cast<int64_t>(depths.blocks.size()));
    }
    for (const Depths::Block& block : depths.blocks) {
      const float* rows[kMaxTileRows];
      const auto left_of = [&](int64_t index) {
        for (int64_t r = 0; r < mr; ++r)
          rows[r] =
              packs ? packed_a + index * mr * k + block.k * mr + r : a.data + i0 + index * mr + r + block.k * a.col;
        return Left{1, &block.depth, rows, packs ? mr : a.col, nullptr};
      };
      run_panels(block, layout, packed, cut.first_panel(task), cut.end_panel(task), i0, i1, left_of,
                 Target{mr, rows_of_c, epilogue, block.k == 0, block.k + block.depth == k}, &ahead);
    }
    left.finished(task % cut.row_tasks, i0, i1);
  });
}

}  // namespace

void multiply_packed(int64_t m, int64_t n, int64_t k, Matrix a, const float* packed, float* c, int64_t ldc,
                     const Epilogue& epilogue, float* workspace, const Parallel& parallel, int threads) {
  run_packed(m, n, k, a, [packed] { return packed; }, c, ldc, epilogue, workspace, parallel, threads);
}

namespace {

/// `left_of(block)` gives the left operands of a block of k: a function of the tile's index.
template <class LeftOf, class RowsOfC>
void run_by_panel(int64_t m, const Depths& depths, const LeftOf& left_of, const PackedB& layout,
                  const PanelSource& source, const RowsOfC& rows_of_c, const Epilogue& epilogue,
                  const Parallel& parallel, int threads) {
  const int64_t run = std::clamp<int64_t>(layout.panels() / (threads * 8), 1, 4), mr = tile().mr;
  const int64_t tiles = ceil_div(m, mr);
  const int64_t panels = layout.panels(), blocks = static_cast<int64_t>(depths.blocks.size());
  // With few panels a thread that is held up would keep the others waiting: they take pieces of its rows, too. All of
  // the panel is kept then, not one block after the other.
  constexpr int64_t kTasks = 16;
  int64_t pieces = 1;
  if (panels > 0 && depths.k <= kKeptDepth)
    pieces = std::max<int64_t>(1, std::min(threads * kTasks / panels, tiles / 8));
  const bool whole = pieces > 1;
  const OwnCopy copy((whole ? depths.k : kMaxDepth) * kMaxTileColumns);
  const auto packed = [&](int64_t b, int64_t panel) {
    if (!whole) return copy.get([&](float* to) { source.pack(depths.blocks[b], panel, to); }, panel * blocks + b);
    const int64_t width = layout.width(panel);
    const auto pack = [&](float* to) {
      for (const Depths::Block& block : depths.blocks) source.pack(block, panel, to + block.k * width);
    };
    return copy.get(pack, panel) + depths.blocks[b].k * width;
  };
  // What a thread most likely packs next.
  const auto ahead_of = [&](int64_t b, int64_t panel) {
    if (!whole && b + 1 < blocks) return source.ahead(depths.blocks[b + 1], panel, tiles);
    return panel + 1 < panels ? source.ahead(depths.blocks[whole ? b : 0], panel + 1, tiles) : Ahead();
  };
  const auto multiply_piece = [&](int64_t panel, int64_t piece) {
    const int64_t t0 = tiles * piece / pieces, t1 = tiles * (piece + 1) / pieces;
    for (int64_t b = 0; b < blocks; ++b) {
      const Depths::Block& block = depths.blocks[b];
      Ahead ahead = ahead_of(b, panel).skip(t0);
      const auto left = left_of(block);
      run_panel(
          packed(b, panel), layout.first_column(panel), layout.columns(panel), layout.width(panel), t0 * mr,
          std::min(m, t1 * mr), [&](int64_t index) { return left(t0 + index); },
          Target{mr, rows_of_c, epilogue, block.k == 0, block.k + block.depth == depths.k}, &ahead);
    }
  };
  parallel(ceil_div(panels * pieces, run), [&](int64_t task) {
    const int64_t end = std::min(panels * pieces, (task + 1) * run);
    for (int64_t i = task * run; i < end; ++i) multiply_piece(i / pieces, i % pieces);
  });
}

void multiply_by_panel(int64_t m, int64_t n, int64_t k, Matrix a, Matrix b, float* c, int64_t ldc,
                       const Epilogue& epilogue, float* packed_a, const Parallel& parallel, int threads) {
  const Depths depths(1, k);
  const PackedB layout(n);
  const int64_t mr = tile().mr;
  const bool packs = packs_a(m, k, a);
  if (packs) pack_all_rows(a, m, k, packed_a, parallel);
  const auto left_of = [&](const Depths::Block& block) {
    return [&](int64_t index) {
      thread_local const float* rows[kMaxTileRows];  // what is returned points there
      for (int64_t r = 0; r < mr; ++r)
        rows[r] = packs ? packed_a + (index * k + block.k) * mr + r
                        : a.data + std::min(m - 1, index * mr + r) * a.row + block.k * a.col;
      return Left{1, &block.depth, rows, packs ? mr : a.col, nullptr};
    };
  };
  const auto at = [&](const Depths::Block& block, int64_t panel) {
    return b.data + block.k * b.row + layout.first_column(panel) * b.col;
  };
  const PanelSource source{
      [&](const Depths::Block& block, int64_t panel, float* to) {
        pack_panel(at(block, panel), b.col, b.row, layout.columns(panel), block.depth, layout.width(panel), to);
      },
      [&](const Depths::Block& block, int64_t panel, int64_t pieces) {
        return Ahead::of_vectors(at(block, panel), layout.columns(panel), b.col, block.depth, b.row, pieces);
      }};
  run_by_panel(m, depths, left_of, layout, source, rows_of(c, ldc), epilogue, parallel, threads);
}

}  // namespace

void multiply(int64_t m, int64_t n, int64_t k, Matrix a, Matrix b, float* c, int64_t ldc, const Epilogue& epilogue,
              float* workspace, const Parallel& parallel, int threads) {
  if (m == 0 || n == 0) return;
  if (k == 0) return zero_product(m, n, c, ldc, epilogue);
  if (has_few_rows(m, a, b)) return multiply_few_rows(m, n, k, a, b, c, ldc, epilogue, workspace, parallel, threads);
  if (const int parts = depth_parts(m, n, k, a, threads); parts > 1)
    return multiply_by_depth(m, n, k, a, b, c, ldc, epilogue, workspace, parallel, parts);
  if (goes_by_panel(m, n, k, a, threads))
    return multiply_by_panel(m, n, k, a, b, c, ldc, epilogue, workspace, parallel, threads);
  if (packs_own_b(m, n, k, threads)) {
    const OwnCopy copy(packed_floats(k, n));
    const Depths depths(1, k);
    const PackedB layout(n);
    const auto packed_b = [&] {
      return copy.get([&](float* to) {
        for (int64_t panel = 0; panel < layout.panels(); ++panel) pack_b_panel(depths, layout, b, to, panel);
      });
    };
    return run_packed(m, n, k, a, packed_b, c, ldc, epilogue, workspace, parallel, threads);
  }
  const Chunk chunk(n, k);
  float* const work = workspace + packed_floats(chunk.k, chunk.n);
  chunk.each(n, k, epilogue, [&](int64_t j, int64_t width, int64_t p, int64_t depth, const Epilogue& e) {
    pack(depth, width, {b.data + p * b.row + j * b.col, b.row, b.col}, workspace, parallel);
    multiply_packed(m, width, depth, {a.data + p * a.col, a.row, a.col}, workspace, c + j, ldc, e, work, parallel,
                    threads);
  });
}

void multiply_indirect(int64_t m, const Depths& depths, const RowPointers& rows, const PackedB& layout,
                       const float* packed, const RowsOfC& rows_of_c, const Epilogue& epilogue,
                       const Parallel& parallel, int threads) {
  run_indirect(m, depths, rows, layout, [packed] { return packed; }, rows_of_c, epilogue, parallel, threads);
}

void multiply_by_panel(int64_t m, const Depths& depths, const RowPointers& rows, const PackedB& layout,
                       const PanelSource& source, const RowsOfC& rows_of_c, const Epilogue& epilogue,
                       const Parallel& parallel, int threads) {
  if (m == 0 || layout.n == 0) return;
  std::vector<TileTable> tables(depths.blocks.size());
  parallel(static_cast<int64_t>(tables.size()),
           [&](int64_t b) { tables[b].fill(depths, depths.blocks[b], rows, 0, m, tile().mr); });
  const auto left_of = [&](const Depths::Block& block) {
    const TileTable& table = tables[&block - depths.blocks.data()];
    return [&table](int64_t index) { return table.tile_at(index); };
  };
  run_by_panel(m, depths, left_of, layout, source, rows_of_c, epilogue, parallel, threads);
}

namespace {
template <int kCount>
void copy_lines(const float* src, int64_t step, int64_t k, int64_t width, float* dst) {
  for (int64_t p = 0; p < k; ++p) std::memcpy(dst + p * width, src + p * step, sizeof(float) * kCount);
}
}  // namespace

void pack_panel(const float* src, int64_t vec, int64_t step, int64_t count, int64_t k, int64_t width, float* dst) {
  if (count < width) std::memset(dst, 0, sizeof(float) * width * k);
  if (vec == 1) {
    switch (count) {  // whole panels: copies of a size that the compiler knows
      case 6:
        return copy_lines<6>(src, step, k, width, dst);
      case 8:
        return copy_lines<8>(src, step, k, width, dst);
      case 16:
        return copy_lines<16>(src, step, k, width, dst);
      case 32:
        return copy_lines<32>(src, step, k, width, dst);
      case 48:
        return copy_lines<48>(src, step, k, width, dst);
      case 64:
        return copy_lines<64>(src, step, k, width, dst);
      default:
        for (int64_t p = 0; p < k; ++p) std::memcpy(dst + p * width, src + p * step, sizeof(float) * count);
        return;
    }
  }
  int64_t v = 0;
  if (step == 1) {
    const int64_t whole = count / 16 * 16;
    int64_t p = 0;
    for (; p + 16 <= k; p += 16)
      for (v = 0; v < whole; v += 16) transpose16(src + v * vec + p, vec, dst + p * width + v, width);
    for (; p < k; ++p)
      for (v = 0; v < whole; ++v) dst[p * width + v] = src[v * vec + p];
    v = whole;
  }
  // Four vectors at a time keep the reads in few streams and the writes in one line.
  for (; v + 4 <= count; v += 4) {
    const float* s = src + v * vec;
    float* d = dst + v;
    for (int64_t p = 0; p < k; ++p, d += width, s += step) {
      d[0] = s[0];
      d[1] = s[vec];
      d[2] = s[2 * vec];
      d[3] = s[3 * vec];
    }
  }
  for (; v < count; ++v)
    for (int64_t p = 0; p < k; ++p) dst[p * width + v] = src[v * vec + p * step];
}

void transpose(const float* src, int64_t src_row, int64_t rows, int64_t cols, float* dst, int64_t dst_row) {
  int64_t r = 0;
  for (; r + 16 <= rows; r += 16) {
    int64_t c = 0;
    for (; c + 16 <= cols; c += 16) transpose16(src + r * src_row + c, src_row, dst + c * dst_row + r, dst_row);
    for (; c < cols; ++c)
      for (int64_t q = r; q < r + 16; ++q) dst[c * dst_row + q] = src[q * src_row + c];
  }
  for (; r < rows; ++r)
    for (int64_t c = 0; c < cols; ++c) dst[c * dst_row + r] = src[r * src_row + c];
}

}  // namespace kiln::runtime::gemm
