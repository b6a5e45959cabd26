#include "symbolic/real.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace kiln::symbolic {
namespace {

using Op = Real::Op;

Real size(int id) { return Real(Expr::var(id, {0, int64_t{1} << 60}, VarKind::Size)); }

/// Where every variable is `n`.
std::optional<double> at(const Real& r, int64_t n) {
  return evaluate(r, [&](const Expr& e) { return std::optional(evaluate(e, [&](const AtomNode&) { return n; })); });
}

TEST(Real, ComputesAsPythonDoes) {
  const Real n = size(0);
  EXPECT_EQ(at(Real(Op::Div, n, Real(7.0)), 3), 3.0 / 7.0);
  EXPECT_EQ(at(Real(Op::Pow, n, Real(-0.5)), 16), 0.25);
  EXPECT_EQ(at(Real(Real::find_function("sqrt"), n), 2), std::sqrt(2.0));
  EXPECT_EQ(at(Real(Op::FloorDiv, Real(Op::Neg, n), Real(2.0)), 7), -4.0);
  EXPECT_EQ(at(Real(Op::Mod, Real(Op::Neg, n), Real(2.0)), 7), 1.0);
  EXPECT_EQ(at(Real(Op::Mod, n, Real(-2.0)), 7), -1.0);
  EXPECT_TRUE(std::signbit(*at(Real(Op::Mod, n, Real(-2.0)), 4)));  // -0.0
  // 1.0 // 0.1 is 9, although 1.0 / 0.1 is 10.
  EXPECT_EQ(at(Real(Op::FloorDiv, n, Real(0.1)), 1), 9.0);
}

TEST(Real, RoundsToInts) {
  const Real half(Op::Div, size(0), Real(2.0));
  EXPECT_EQ(at(Real(Op::Floor, half), 5), 2.0);
  EXPECT_EQ(at(Real(Op::Ceil, half), 5), 3.0);
  EXPECT_EQ(at(Real(Op::Round, half), 5), 2.0);  // to even
  EXPECT_EQ(at(Real(Op::Round, half), 7), 4.0);
  EXPECT_EQ(at(Real(Op::Trunc, Real(Op::Neg, half)), 5), -2.0);
}

TEST(Real, ComparesToZeroOrOne) {
  EXPECT_EQ(at(Real(Op::Less, size(0), Real(2.5)), 2), 1.0);
  EXPECT_EQ(at(Real(Op::LessEqual, size(0), Real(1.5)), 2), 0.0);
  EXPECT_EQ(at(Real(Op::Equal, size(0), Real(2.0)), 2), 1.0);
  EXPECT_EQ(at(Real(Op::Equal, Real(std::nan("")), Real(std::nan(""))), 2), 0.0);
}

TEST(Real, HasNoValueWherePythonRaises) {
  const Real n = size(0);
  EXPECT_EQ(at(Real(Op::Div, Real(1.0), n), 0), std::nullopt);
  EXPECT_EQ(at(Real(Op::Mod, Real(1.0), n), 0), std::nullopt);
  EXPECT_EQ(at(Real(Op::Pow, n, Real(-1.0)), 0), std::nullopt);
  EXPECT_EQ(at(Real(Op::Pow, Real(Op::Neg, n), Real(0.5)), 2), std::nullopt);  // complex
  EXPECT_EQ(at(Real(Op::Pow, n, Real(1000.0)), 9), std::nullopt);              // overflows
  EXPECT_EQ(at(Real(Real::find_function("log"), n), 0), std::nullopt);
  EXPECT_EQ(at(Real(Real::find_function("exp"), n), 1000), std::nullopt);
  EXPECT_EQ(at(Real(Op::Trunc, Real(std::numeric_limits<double>::infinity())), 1), std::nullopt);
  EXPECT_EQ(at(n, (int64_t{1} << 53) + 1), std::nullopt);  // no double
  // An infinite operand gives what it gives.
  EXPECT_EQ(at(Real(Op::Pow, Real(std::numeric_limits<double>::infinity()), n), 2),
            std::numeric_limits<double>::infinity());
}

TEST(Real, Prints) {
  const Real n = size(0);
  EXPECT_EQ(print(Real(Op::Mul, Real(Op::Div, n, Real(2.0)), Real(0.1))), "(s0 / 2.0) * 0.1");
  EXPECT_EQ(print(Real(Real::find_function("sqrt"), Real(Op::Pow, n, Real(-0.5)))), "sqrt(s0 ** -0.5)");
  EXPECT_EQ(print(Real(Op::Trunc, Real(Op::Mul, Real(n.integer() * Expr(3) + Expr(1)), Real(0.75)))),
            "int((3*s0 + 1) * 0.75)");
  EXPECT_EQ(print(Real(1e300)), "1e+300");
}

TEST(Real, EqualTreesAreEqual) {
  const auto made = [] { return Real(Op::Div, size(0), Real(2.0)); };
  EXPECT_EQ(made(), made());
  EXPECT_FALSE(made() == Real(Op::Div, size(1), Real(2.0)));
  EXPECT_FALSE(Real(0.0) == Real(-0.0));
}

}  // namespace
}  // namespace kiln::symbolic
