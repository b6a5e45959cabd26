#include "runtime/gemm/split.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "runtime/gemm/ahead.h"
#include "runtime/gemm/amx.h"
#include "runtime/gemm/cut.h"
#include "runtime/gemm/scratch.h"

namespace kiln::runtime::gemm {
namespace {

using amx::kAcross;
using amx::kPairFloats;
using amx::kStep;
using amx::kStepFloats;

/// Depth of a block of k: two tiles of A of this depth stay in the first-level cache while B's panels pass.
constexpr int64_t kDepth = 128;
/// Blocks that are summed up by the unit; such sums are added to the total. The error of a sum grows with its length.
constexpr int64_t kSummed = 4;
/// Panels of B of this depth stay in the second-level cache while rows of A pass, beside the sums of a task's rows.
constexpr int64_t kPanels = 48;
constexpr int64_t kTaskRows = 256;

/// Where packed B's panels of 16 columns lie, block by block, and behind them the largest magnitude in each.
struct Layout {
  int64_t k, panels, blocks;
  Layout(int64_t k, int64_t n) : k(k), panels(ceil_div(n, kAcross)), blocks(ceil_div(k, kDepth)) {}
  int64_t depth(int64_t block) const { return std::min(kDepth, k - block * kDepth); }
  int64_t steps(int64_t block) const { return ceil_div(depth(block), kStep); }
  int64_t at(int64_t block, int64_t panel) const {
    return (panels * block * (kDepth / kStep) + panel * steps(block)) * kStepFloats;
  }
  int64_t largest(int64_t block, int64_t panel) const {
    return panels * ceil_div(k, kStep) * kStepFloats + block * panels + panel;
  }
  int64_t floats() const { return round_up(largest(blocks, 0), 16); }
};

/// As Cut: blocks of rows, by ranges of panels.
struct Tasks {
  static constexpr int64_t kRows = 2 * kAcross;
  int64_t m, panels, pairs, row_tasks, column_tasks;
  Tasks(int64_t m, int64_t panels, int threads, bool rows_wait) : m(m), panels(panels), pairs(ceil_div(m, kRows)) {
    const int64_t rows =
        rows_wait ? std::clamp(kWaitingFloats / (panels * kAcross) / kRows * kRows, kRows, kTaskRows) : kTaskRows;
    const int64_t wanted = threads > 1 ? threads * 4 : 1;
    row_tasks = std::min(pairs, std::max(ceil_div(m, rows), wanted));
    column_tasks = std::max(ceil_div(panels, kPanels), std::min(ceil_div(wanted, row_tasks), ceil_div(panels, 4)));
  }
  int64_t first_row(int64_t row_task) const { return std::min(m, row_task * pairs / row_tasks * kRows); }
  int64_t first_panel(int64_t column_task) const { return column_task * panels / column_tasks; }
};

/// Two tiles of A, of one block of k, or what there is of them.
struct Pair {
  float* parts;
  int64_t block, row, rows;  // rows: up to 32
  uint32_t largest[2];
  int64_t tiles() const { return ceil_div(rows, kAcross); }
};

/// Ends what Product::begin() began.
void finish(amx::Packing (&packing)[2], Pair& p) {
  for (int64_t tile = 0; tile < p.tiles(); ++tile) {
    packing[tile].go_on(packing[tile].lines());
    p.largest[tile] = packing[tile].largest();
  }
}

/// One product, and what of it is at hand.
struct Product {
  int64_t m, n, k;
  Matrix a, b;
  const float* packed;
  float* c;
  int64_t ldc;
  const Epilogue& epilogue;
  Layout layout;

  /// Begins to pack a pair, each tile by one of `packing`.
  void begin(const Pair& p, amx::Packing (&packing)[2]) const {
    for (int64_t tile = 0; tile < p.tiles(); ++tile) {
      const int64_t i = p.row + tile * kAcross;
      packing[tile].begin(
          {a.data + i * a.row + p.block * kDepth * a.col, a.row, a.col, std::min(kAcross, p.row + p.rows - i)},
          layout.depth(p.block), amx::Side::Left, p.parts + tile * layout.steps(p.block) * kStepFloats);
    }
  }

  Ahead ahead_of(const Pair& p, int64_t pieces) const {
    return Ahead::of_vectors(a.data + p.row * a.row + p.block * kDepth * a.col, p.rows, a.row, layout.depth(p.block),
                             a.col, pieces);
  }

  /// Multiplies without the unit: adds a pair by columns [j, j + cols) to `to`, 16 wide.
  void plainly(const Pair& p, int64_t j, int64_t cols, float* to) const {
    const int64_t begin = p.block * kDepth, end = begin + layout.depth(p.block);
    for (int64_t r = 0; r < p.rows; ++r)
      for (int64_t q = begin; q < end; ++q) {
        const float x = a.data[(p.row + r) * a.row + q * a.col];
        const float* const line = b.data + q * b.row + j * b.col;
        for (int64_t v = 0; v < cols; ++v) to[r * kAcross + v] += x * line[v * b.col];
      }
  }

  /// A pair by a panel. `sums`: of the blocks so far that are summed up with this one, 32 rows of 16.
  void multiply(const Pair& p, int64_t panel, float* sums, amx::Meanwhile meanwhile) const {
    const int64_t steps = layout.steps(p.block);
    const bool has_second = p.tiles() == 2, first = p.block % kSummed == 0;
    // Of C what the last sums go to, else the sums that come next.
    const bool last = p.block + 1 == layout.blocks;
    if (!last || p.rows == 2 * kAcross) {
      meanwhile.soon = last ? c + p.row * ldc + panel * kAcross : sums + kPairFloats;
      meanwhile.apart = last ? ldc : kAcross;
    }
    const uint32_t right_largest = std::bit_cast<uint32_t>(packed[layout.largest(p.block, panel)]);
    if (amx::exact(p.largest[0], right_largest) && (!has_second || amx::exact(p.largest[1], right_largest)))
      return amx::multiply(p.parts, has_second ? p.parts + steps * kStepFloats : nullptr,
                           packed + layout.at(p.block, panel), steps, first ? nullptr : sums, sums, meanwhile);
    if (first) std::memset(sums, 0, sizeof(float) * kPairFloats);
    plainly(p, panel * kAcross, std::min(n - panel * kAcross, kAcross), sums);
  }

  /// Rows [i0, i1) by panels [panel0, panel1). The next pair is packed while the unit multiplies the last one: the core
  /// has nothing else to do then.
  void task(int64_t i0, int64_t i1, int64_t panel0, int64_t panel1) const {
    constexpr int64_t kRows = Tasks::kRows, kPartsFloats = 2 * kDepth / kStep * kStepFloats;
    const int64_t pairs = ceil_div(i1 - i0, kRows), panels = panel1 - panel0, columns = panel0 * kAcross;
    thread_local Scratch scratch;
    const int64_t floats = pairs * panels * kPairFloats;
    scratch.reset(2 * kPartsFloats + floats * (layout.blocks > kSummed ? 2 : 1));
    float* const parts[2] = {scratch.take(kPartsFloats), scratch.take(kPartsFloats)};
    float* const totals = scratch.take(floats);
    float* const sums = layout.blocks > kSummed ? scratch.take(floats) : nullptr;  // the first ones go to the totals
    const auto pair_at = [&](int64_t index) {
      const int64_t row = i0 + index % pairs * kRows;
      return Pair{parts[index % 2], index / pairs, row, std::min(kRows, i1 - row), {}};
    };
    const amx::Tiles configured;
    amx::Packing packing[2];
    Pair now = pair_at(0);
    begin(now, packing);
    finish(packing, now);
    const int64_t count = pairs * layout.blocks;
    for (int64_t index = 0; index < count; ++index) {
      const bool more = index + 1 < count;
      // What is packed after the next pair.
      Ahead ahead = index + 2 < count ? ahead_of(pair_at(index + 2), panels) : Ahead();
      Pair next = more ? pair_at(index + 1) : now;
      if (more) begin(next, packing);
      amx::Meanwhile meanwhile{{&packing[0], &packing[1]}};
      const bool last = now.block + 1 == layout.blocks, begun = now.block >= kSummed;
      const int64_t at = index % pairs * panels * kPairFloats;
      float *const pair_totals = totals + at, *const pair_sums = (begun ? sums : totals) + at;
      for (int64_t q = 0; q < panels; ++q) {
        meanwhile.lines = ceil_div(packing[0].lines() + packing[1].lines(), (panels - q) * layout.steps(now.block));
        ahead.ask();
        multiply(now, panel0 + q, pair_sums + q * kPairFloats, meanwhile);
        if (begun && (last || (now.block + 1) % kSummed == 0))
          amx::add(pair_sums + q * kPairFloats, now.tiles(), pair_totals + q * kPairFloats);
      }
      if (more) finish(packing, next);
      // Line by line: C's rows may lie so that a tile of them finds no room in the cache.
      if (last)
        amx::store({pair_totals, now.rows, std::min(n - columns, panels * kAcross), c + now.row * ldc + columns, ldc,
                    epilogue.bias ? epilogue.bias + columns : nullptr, epilogue.accumulate});
      now = next;
    }
  }
};

}  // namespace

// Cutting a number takes as long as some thirty multiplications gain: each of A meets n of B, each of B meets m of A.
bool splits(int64_t m, int64_t n, int64_t k) {
  constexpr int64_t kFewest = 80, kWorthwhile = 1 << 19;
  return std::min(m, n) >= kFewest && k >= 2 * kStep && m * n * k >= kWorthwhile && amx::supported();
}

int64_t split_floats(int64_t k, int64_t n) { return Layout(k, n).floats(); }

void pack_split(int64_t k, int64_t n, Matrix b, float* packed, const Parallel& parallel) {
  const Layout layout(k, n);
  // Panels of one task follow each other in a line of B.
  constexpr int64_t kTogether = 4;
  const int64_t groups = ceil_div(layout.panels, kTogether);
  parallel(groups * layout.blocks, [&](int64_t task) {
    const int64_t block = task / groups, begin = task % groups * kTogether;
    const int64_t end = std::min(layout.panels, begin + kTogether);
    const int64_t depth = layout.depth(block), steps = layout.steps(block);
    const auto columns = [&](int64_t panel) { return std::min(kAcross, n - panel * kAcross); };
    const auto from = [&](int64_t panel) { return b.data + block * kDepth * b.row + panel * kAcross * b.col; };
    amx::Packing packing;
    for (int64_t panel = begin; panel < end; ++panel) {
      Ahead ahead;
      if (const int64_t next = panel + 1; next < end)
        ahead = Ahead::of_vectors(from(next), columns(next), b.col, depth, b.row, steps);
      packing.begin({from(panel), b.col, b.row, columns(panel)}, depth, amx::Side::Right,
                    packed + layout.at(block, panel));
      while (packing.lines() > 0) {
        ahead.ask();
        packing.go_on(kAcross);
      }
      packed[layout.largest(block, panel)] = std::bit_cast<float>(packing.largest());
    }
  });
}

void multiply_split_packed(int64_t m, int64_t n, int64_t k, Matrix a, Matrix b, const float* packed, float* c,
                           int64_t ldc, const Epilogue& epilogue, const Parallel& parallel, int threads) {
  const Product product{m, n, k, a, b, packed, c, ldc, epilogue, Layout(k, n)};
  const Tasks cut(m, product.layout.panels, threads, epilogue.rows_done != nullptr);
  RowsLeft left(cut.row_tasks, cut.column_tasks, epilogue.rows_done);
  parallel(cut.row_tasks * cut.column_tasks, [&](int64_t task) {
    const int64_t row_task = task % cut.row_tasks, column_task = task / cut.row_tasks;
    const int64_t i0 = cut.first_row(row_task), i1 = cut.first_row(row_task + 1);
    product.task(i0, i1, cut.first_panel(column_task), cut.first_panel(column_task + 1));
    left.finished(row_task, i0, i1);
  });
}

namespace {

/// In how many ranges of columns B is cut, each of which is packed by the thread that multiplies by it: lines that
/// another core wrote come slowly. 1: columns are too few.
int64_t own_parts(int64_t n, int threads) {
  constexpr int64_t kFewestPanels = 4, kManyPanels = 16;
  const int64_t panels = ceil_div(n, kAcross);
  if (threads == 1 || panels < kFewestPanels * threads) return 1;
  return panels < kManyPanels * threads ? threads : 2 * threads;
}

/// What a thread packs at a time: it stays in the second-level cache.
Chunk own_chunk(int64_t n, int64_t k) {
  Chunk chunk(n, k);
  chunk.n = std::min<int64_t>(n, 24 * kAcross), chunk.k = std::min(k, kSummed * kDepth);
  return chunk;
}

}  // namespace

int64_t split_workspace_floats(int64_t n, int64_t k) {
  const Chunk chunk(n, k);
  return split_floats(chunk.k, chunk.n);
}

void multiply_split(int64_t m, int64_t n, int64_t k, Matrix a, Matrix b, float* c, int64_t ldc,
                    const Epilogue& epilogue, float* workspace, const Parallel& parallel, int threads) {
  const auto multiply = [&](const Chunk& chunk, int64_t j0, int64_t columns, const Epilogue& whole, float* packed,
                            const Parallel& run, int workers) {
    chunk.each(columns, k, whole, [&](int64_t j, int64_t width, int64_t p, int64_t depth, const Epilogue& e) {
      const Matrix some{b.data + p * b.row + (j0 + j) * b.col, b.row, b.col};
      pack_split(depth, width, some, packed, run);
      multiply_split_packed(m, width, depth, {a.data + p * a.col, a.row, a.col}, some, packed, c + j0 + j, ldc, e, run,
                            workers);
    });
  };
  const int64_t parts = own_parts(n, threads), panels = ceil_div(n, kAcross);
  if (parts == 1) return multiply(Chunk(n, k), 0, n, epilogue, workspace, parallel, threads);
  parallel(parts, [&](int64_t part) {
    const int64_t j0 = part * panels / parts * kAcross, j1 = std::min(n, (part + 1) * panels / parts * kAcross);
    const Chunk chunk = own_chunk(j1 - j0, k);
    thread_local Scratch scratch;
    scratch.reset(split_floats(chunk.k, chunk.n));
    multiply(chunk, j0, j1 - j0, {epilogue.bias ? epilogue.bias + j0 : nullptr, epilogue.accumulate},
             scratch.take(split_floats(chunk.k, chunk.n)), serial, 1);
  });
}

}  // namespace kiln::runtime::gemm
