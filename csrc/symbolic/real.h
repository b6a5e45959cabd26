#pragma once
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "symbolic/expr.h"

// Floats that a Python program computes of integer expressions (n / 2, math.sqrt(n), n ** -0.5, int(0.75 * n)): trees
// of Python's operations, each of which rounds as Python's does. Nothing is simplified: that would change the result's
// bits.
namespace kiln::symbolic {

class Real {
 public:
  /// Python's operators, comparisons (1 if they hold, else 0), conversions to an int, and functions of `math`.
  enum class Op : uint8_t {
    Constant,
    Integer,
    Neg,
    Abs,
    Add,
    Sub,
    Mul,
    Div,
    FloorDiv,
    Mod,
    Pow,
    Less,
    LessEqual,
    Equal,
    Floor,
    Ceil,
    Trunc,
    Round,
    Function,
  };
  /// Null if Python's function math.`name` has no row. Functions of one float that give a float.
  struct Function;
  static const Function* find_function(std::string_view name);

  explicit Real(double constant);
  explicit Real(Expr integer);
  /// Neg, Abs and Floor to Round have `a` alone.
  Real(Op op, Real a);
  Real(Op op, Real a, Real b);
  Real(const Function* function, Real a);

  Op op() const;
  double constant() const;      // of a Constant
  const Expr& integer() const;  // of an Integer
  const Function* function() const;
  std::string_view function_name() const;
  const std::vector<Real>& operands() const;
  /// Comparisons give 0 or 1, Floor to Round other ints, in floating point.
  bool is_truth() const { return op() >= Op::Less && op() <= Op::Equal; }
  bool gives_int() const { return op() >= Op::Less && op() <= Op::Round; }
  int64_t num_nodes() const;
  bool operator==(const Real& o) const;

 private:
  struct Node;
  std::shared_ptr<const Node> node_;
};

/// An int or a float.
using Number = std::variant<Expr, Real>;

/// Calls f on every integer expression in r, with repetition.
void for_each_integer(const Real& r, const std::function<void(const Expr&)>& f);
void for_each_var(const Number& n, const std::function<void(const AtomNode& var)>& f);

/// The value where `integer` gives that of an expression. None if `integer` gives none, or an int that no double is,
/// and where Python raises an exception or leaves the floats: a division by zero, an overflowing power or function, the
/// root of a negative number, an int of what is infinite.
std::optional<double> evaluate(const Real& r, const std::function<std::optional<int64_t>(const Expr&)>& integer);

/// As Python writes it, "sqrt(s0) / 2.0", with brackets around what has operands of its own.
std::string print(const Real& r);
std::string print(const Number& n);

}  // namespace kiln::symbolic
