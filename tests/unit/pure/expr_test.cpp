#include "symbolic/expr.h"

#include <gtest/gtest.h>

#include <random>

#include "base/error.h"

namespace kiln::symbolic {
namespace {

const int64_t kExtents[] = {8, 3, 16, 5, 1, 49};

Expr v(int id) { return Expr::loop_var(id, kExtents[id]); }
Range range_of(VarKind, int id) { return {0, kExtents[id] - 1}; }

/// An expression as drawn: value without any simplification, beside the canonical one.
struct Drawn {
  Expr e;
  std::function<int64_t(const std::vector<int64_t>&)> value;
};

int64_t floor_div(int64_t a, int64_t b) { return a / b - ((a % b != 0) && ((a < 0) != (b < 0))); }

Drawn draw(std::mt19937& rng, int depth) {
  const auto pick = [&](int n) { return static_cast<int>(rng() % n); };
  if (depth == 0 || pick(6) == 0) {
    if (pick(3) == 0) {
      const int64_t c = pick(40) - 12;
      return {Expr(c), [c](const auto&) { return c; }};
    }
    const int id = pick(6);
    return {v(id), [id](const auto& x) { return x[id]; }};
  }
  const Drawn a = draw(rng, depth - 1);
  const int64_t divisors[] = {1, 2, 3, 4, 8, 12, 16, 24, 49};
  const int64_t d = divisors[pick(9)];
  switch (pick(7)) {
    case 0:
    case 1: {
      const Drawn b = draw(rng, depth - 1);
      return {a.e + b.e, [=](const auto& x) { return a.value(x) + b.value(x); }};
    }
    case 2: {
      const int64_t c = pick(20) - 4;
      return {a.e * Expr(c), [=](const auto& x) { return a.value(x) * c; }};
    }
    case 3:
      return {floordiv(a.e, d), [=](const auto& x) { return floor_div(a.value(x), d); }};
    case 4:
      return {mod(a.e, d), [=](const auto& x) { return a.value(x) - floor_div(a.value(x), d) * d; }};
    case 5: {
      const Drawn b = draw(rng, depth - 1);
      return pick(2) ? Drawn{min(a.e, b.e), [=](const auto& x) { return std::min(a.value(x), b.value(x)); }}
                     : Drawn{max(a.e, b.e), [=](const auto& x) { return std::max(a.value(x), b.value(x)); }};
    }
    default: {
      const Drawn b = draw(rng, depth - 1);
      if (depth > 2) return {a.e - b.e, [=](const auto& x) { return a.value(x) - b.value(x); }};
      return {a.e * b.e, [=](const auto& x) { return a.value(x) * b.value(x); }};
    }
  }
}

}  // namespace

TEST(Expr, SimplifiesByRanges) {
  EXPECT_EQ(floordiv(v(2) * Expr(8) + v(0), 8), v(2));
  EXPECT_EQ(mod(v(2) * Expr(8) + v(0), 8), v(0));
  EXPECT_EQ(mod(v(2) * Expr(8) + v(0), 16), mod(v(2), 2) * Expr(8) + v(0));
  EXPECT_EQ(floordiv(v(2) * Expr(8) + v(0), 64), floordiv(v(2), 8));
  EXPECT_EQ(floordiv(floordiv(v(5), 3), 4), floordiv(v(5), 12));
  EXPECT_EQ(floordiv(v(5), 7) * Expr(7) + mod(v(5), 7), v(5));
  EXPECT_EQ(mod(mod(v(5), 14), 7), mod(v(5), 7));
  EXPECT_EQ(v(4), Expr(0)) << "a loop of one round is zero";
  EXPECT_EQ(min(v(0), Expr(7)), v(0));
}

// A view and its inverse give back the index: what chains of reshapes come to.
TEST(Expr, ReshapesCancel) {
  const Expr flat = linearize({v(0), v(2), v(5)}, {16 * 49, 49, 1});
  const auto coarse = delinearize(flat, {8 * 16, 49});
  const auto fine = delinearize(linearize(coarse, {49, 1}), {8, 16, 49});
  EXPECT_EQ(fine[0], v(0));
  EXPECT_EQ(fine[1], v(2));
  EXPECT_EQ(fine[2], v(5));
  const auto odd = delinearize(flat, {14, 448});
  EXPECT_EQ(linearize(odd, {448, 1}), flat);
}

TEST(Expr, FuzzKeepsValuesRangesAndText) {
  std::mt19937 rng(7);
  for (int round = 0; round < 3000; ++round) {
    const Drawn d = draw(rng, 4);
    const std::string text = print(d.e);
    const Expr again = parse(text, range_of);
    ASSERT_EQ(print(again), text);
    ASSERT_EQ(again, d.e) << text;
    ASSERT_EQ(again.hash(), d.e.hash());
    for (int k = 0; k < 20; ++k) {
      std::vector<int64_t> x;
      for (int64_t e : kExtents) x.push_back(static_cast<int64_t>(rng() % e));
      const int64_t want = d.value(x);
      ASSERT_EQ(evaluate(d.e, [&](const AtomNode& n) { return x[n.id]; }), want) << text;
      ASSERT_LE(d.e.range().lo, want) << text;
      ASSERT_GE(d.e.range().hi, want) << text;
      std::vector<Expr> constants(x.begin(), x.end());
      ASSERT_EQ(substitute_loop_vars(d.e, constants), Expr(want)) << text;
    }
  }
}

TEST(Expr, StrideOfVariable) {
  int64_t stride = 0;
  Expr rest;
  ASSERT_TRUE(split_linear(v(0) * Expr(48) + v(1) * Expr(16) + v(2), 1, stride, rest));
  EXPECT_EQ(stride, 16);
  EXPECT_EQ(rest, v(0) * Expr(48) + v(2));
  EXPECT_FALSE(split_linear(floordiv(v(5), 2), 5, stride, rest));
  ASSERT_TRUE(split_linear(floordiv(v(5), 2), 0, stride, rest));
  EXPECT_EQ(stride, 0);
}

TEST(Expr, ParserSaysWhere) {
  for (const char* bad : {"", "i0 +", "(i0", "i0 // 0", "3 $ 4", "min(i0)"})
    EXPECT_THROW(parse(bad, range_of), UserError) << bad;
}

}  // namespace kiln::symbolic
