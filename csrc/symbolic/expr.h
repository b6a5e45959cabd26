#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

// Integer expressions over loop variables: what a view, a stride or a pooling window becomes. Always in one canonical
// form, a sum `c + k1*a1 + k2*a2 ...` of distinct atoms; every atom knows its value range, so that building an
// expression also simplifies it: (i*8 + j)//8 is i as soon as 0 <= j < 8. Equal expressions are structurally equal.
namespace kiln::symbolic {

/// Inclusive bounds of an expression's value.
struct Range {
  int64_t lo = 0, hi = 0;
  bool operator==(const Range&) const = default;
};

/// Loop: counts 0 .. hi. Indirect: bound to a loaded value in [lo, hi]. Size: a symbolic size (reserved).
enum class VarKind : uint8_t { Loop, Indirect, Size };

struct AtomNode;
using Atom = std::shared_ptr<const AtomNode>;
struct Term {
  int64_t coef;
  Atom atom;
};

class Expr {
 public:
  Expr() : Expr(int64_t{0}) {}
  Expr(int64_t constant);
  Expr(int constant) : Expr(static_cast<int64_t>(constant)) {}
  /// A variable; two variables are the same iff kind and id agree (the range must agree then, too).
  /// A variable whose range is one value is that constant.
  static Expr var(int id, Range range, VarKind kind = VarKind::Loop);
  static Expr loop_var(int id, int64_t extent) { return var(id, {0, extent - 1}); }

  int64_t constant() const { return constant_; }              // the constant term
  const std::vector<Term>& terms() const { return *terms_; }  // sorted, distinct atoms, nonzero coefficients
  bool is_constant() const { return terms_->empty(); }
  bool is_constant(int64_t v) const { return is_constant() && constant_ == v; }
  /// The variable's id if this is exactly one loop variable, else -1.
  int as_loop_var() const;
  Range range() const { return range_; }
  size_t hash() const { return hash_; }
  bool operator==(const Expr& o) const;

  friend Expr operator+(const Expr& a, const Expr& b);
  friend Expr operator-(const Expr& a, const Expr& b);
  friend Expr operator*(const Expr& a, const Expr& b);
  Expr& operator+=(const Expr& o) { return *this = *this + o; }

 private:
  friend struct Builder;
  Expr(int64_t constant, std::vector<Term> terms);
  int64_t constant_ = 0;
  std::shared_ptr<const std::vector<Term>> terms_;
  Range range_;
  size_t hash_ = 0;
};

/// Floor division and Python-style remainder by a positive constant.
Expr floordiv(const Expr& a, int64_t d);
Expr mod(const Expr& a, int64_t d);
Expr min(const Expr& a, const Expr& b);
Expr max(const Expr& a, const Expr& b);

enum class AtomKind : uint8_t { Var, FloorDiv, Mod, Min, Max, Product };
struct AtomNode {
  AtomKind kind;
  VarKind var_kind = VarKind::Loop;
  int id = -1;          // Var
  int64_t divisor = 0;  // FloorDiv, Mod
  Expr a, b;            // operands (Product: a is an atom or product, b an atom)
  Range range;
  size_t hash = 0;
};

/// Calls f on every variable of e, with repetition.
void for_each_var(const Expr& e, const std::function<void(const AtomNode& var)>& f);
bool uses_var(const Expr& e, int id, VarKind kind = VarKind::Loop);
bool has_indirect(const Expr& e);
/// Replaces variables; f returns true and fills `out` for those to be replaced.
Expr substitute(const Expr& e, const std::function<bool(const AtomNode& var, Expr& out)>& f);
/// Replaces loop variable i by values[i] (those beyond the vector stay).
Expr substitute_loop_vars(const Expr& e, const std::vector<Expr>& values);

/// True if e = stride*v + rest with rest free of loop variable v; then sets both.
bool split_linear(const Expr& e, int var, int64_t& stride, Expr& rest);
/// The stride alone; nullopt where split_linear is false.
std::optional<int64_t> stride_along(const Expr& e, int var);
/// sum of index[i]*strides[i], plus offset.
Expr linearize(const std::vector<Expr>& index, const std::vector<int64_t>& strides, int64_t offset = 0);
/// Row-major coordinates of a linear index in a tensor of `sizes`.
std::vector<Expr> delinearize(const Expr& linear, const std::vector<int64_t>& sizes);

/// "8*i0 + (i1 // 4) + 3": loop variables i<id>, indirect t<id>, sizes s<id>. Canonical: equal iff expressions are
/// equal.
std::string print(const Expr& e);
/// Inverse of print; `range_of` gives each variable's range. Throws UserError on malformed text.
Expr parse(std::string_view text, const std::function<Range(VarKind, int id)>& range_of);
/// Value of e under an assignment of its variables.
int64_t evaluate(const Expr& e, const std::function<int64_t(const AtomNode& var)>& value);

}  // namespace kiln::symbolic

template <>
struct std::hash<kiln::symbolic::Expr> {
  size_t operator()(const kiln::symbolic::Expr& e) const noexcept { return e.hash(); }
};
