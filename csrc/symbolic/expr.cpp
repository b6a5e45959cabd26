#include "symbolic/expr.h"

#include <algorithm>
#include <numeric>

#include "base/error.h"
#include "base/hash.h"

namespace kiln::symbolic {
namespace {

int64_t floor_div(int64_t a, int64_t b) { return a / b - ((a % b != 0) && ((a < 0) != (b < 0))); }
int64_t floor_mod(int64_t a, int64_t b) { return a - floor_div(a, b) * b; }
int64_t clamp128(__int128 v) {
  constexpr int64_t kMax = INT64_MAX, kMin = INT64_MIN;
  return v > kMax ? kMax : v < kMin ? kMin : static_cast<int64_t>(v);
}

int compare(const Expr& a, const Expr& b);
int compare(const AtomNode& a, const AtomNode& b) {
  if (&a == &b) return 0;
  if (a.kind != b.kind) return a.kind < b.kind ? -1 : 1;
  if (a.kind == AtomKind::Var) {
    if (a.var_kind != b.var_kind) return a.var_kind < b.var_kind ? -1 : 1;
    return a.id < b.id ? -1 : a.id > b.id ? 1 : 0;
  }
  if (a.divisor != b.divisor) return a.divisor < b.divisor ? -1 : 1;
  if (int c = compare(a.a, b.a)) return c;
  return a.kind == AtomKind::FloorDiv || a.kind == AtomKind::Mod ? 0 : compare(a.b, b.b);
}
int compare(const Expr& a, const Expr& b) {
  if (&a.terms() != &b.terms()) {
    const auto &x = a.terms(), &y = b.terms();
    for (size_t i = 0; i < std::min(x.size(), y.size()); ++i) {
      if (int c = compare(*x[i].atom, *y[i].atom)) return c;
      if (x[i].coef != y[i].coef) return x[i].coef < y[i].coef ? -1 : 1;
    }
    if (x.size() != y.size()) return x.size() < y.size() ? -1 : 1;
  }
  return a.constant() < b.constant() ? -1 : a.constant() > b.constant() ? 1 : 0;
}

const std::shared_ptr<const std::vector<Term>>& no_terms() {
  static const auto empty = std::make_shared<const std::vector<Term>>();
  return empty;
}

Atom make_atom(AtomNode n) {
  size_t h = static_cast<size_t>(n.kind);
  if (n.kind == AtomKind::Var) {
    hash_combine(h, static_cast<int>(n.var_kind));
    hash_combine(h, n.id);
  } else {
    hash_combine(h, n.divisor);
    hash_combine(h, n.a.hash());
    hash_combine(h, n.b.hash());
  }
  n.hash = h;
  return std::make_shared<const AtomNode>(std::move(n));
}

/// The atom if e is exactly one atom with coefficient one.
Atom single_atom(const Expr& e) {
  return e.constant() == 0 && e.terms().size() == 1 && e.terms()[0].coef == 1 ? e.terms()[0].atom : nullptr;
}
}  // namespace

struct Builder {
  static Expr from_atom(Atom a) { return Expr(0, {Term{1, std::move(a)}}); }

  /// The canonical sum of these terms: sorted, merged, and k*m*(x//m) + k*(x%m) put together again to k*x.
  static Expr sum(int64_t constant, std::vector<Term> terms) {
    for (bool again = true; again;) {
      again = false;
      std::sort(terms.begin(), terms.end(), [](const Term& x, const Term& y) { return compare(*x.atom, *y.atom) < 0; });
      size_t n = 0;
      for (size_t i = 0; i < terms.size(); ++i) {
        if (n > 0 && compare(*terms[n - 1].atom, *terms[i].atom) == 0)
          terms[n - 1].coef += terms[i].coef;
        else if (n != i)
          terms[n++] = std::move(terms[i]);
        else
          ++n;
        if (n > 0 && terms[n - 1].coef == 0) --n;
      }
      terms.resize(n);
      for (size_t i = 0; i < terms.size() && !again; ++i) {
        if (terms[i].atom->kind != AtomKind::Mod) continue;
        const Expr x = terms[i].atom->a;
        const int64_t m = terms[i].atom->divisor, k = terms[i].coef;
        int64_t wanted;
        if (__builtin_mul_overflow(k, m, &wanted)) continue;
        const bool maybe = std::any_of(terms.begin(), terms.end(), [&](const Term& t) {
          return t.coef == wanted && t.atom->kind != AtomKind::Mod;
        });
        if (!maybe) continue;
        const Atom quotient = single_atom(floordiv(x, m));
        if (!quotient) continue;
        for (size_t j = 0; j < terms.size(); ++j) {
          if (terms[j].coef != wanted || compare(*terms[j].atom, *quotient) != 0) continue;
          terms.erase(terms.begin() + std::max(i, j));
          terms.erase(terms.begin() + std::min(i, j));
          constant += k * x.constant();
          for (const Term& t : x.terms()) terms.push_back({k * t.coef, t.atom});
          again = true;
          break;
        }
      }
    }
    return Expr(constant, std::move(terms));
  }
};

Expr::Expr(int64_t constant) : constant_(constant), terms_(no_terms()), range_{constant, constant} {
  hash_ = std::hash<int64_t>{}(constant) * 0x9e3779b97f4a7c15ull;
}

Expr::Expr(int64_t constant, std::vector<Term> terms) : constant_(constant) {
  __int128 lo = constant, hi = constant;
  size_t h = std::hash<int64_t>{}(constant) * 0x9e3779b97f4a7c15ull;
  for (const Term& t : terms) {
    const __int128 a = static_cast<__int128>(t.coef) * t.atom->range.lo;
    const __int128 b = static_cast<__int128>(t.coef) * t.atom->range.hi;
    lo += std::min(a, b);
    hi += std::max(a, b);
    hash_combine(h, t.coef);
    hash_combine(h, t.atom->hash);
  }
  range_ = {clamp128(lo), clamp128(hi)};
  hash_ = h;
  terms_ = terms.empty() ? no_terms() : std::make_shared<const std::vector<Term>>(std::move(terms));
}

Expr Expr::var(int id, Range range, VarKind kind) {
  if (range.lo == range.hi) return Expr(range.lo);
  AtomNode n;
  n.kind = AtomKind::Var;
  n.var_kind = kind;
  n.id = id;
  n.range = range;
  return Builder::from_atom(make_atom(std::move(n)));
}

int Expr::as_loop_var() const {
  const Atom a = single_atom(*this);
  return a && a->kind == AtomKind::Var && a->var_kind == VarKind::Loop ? a->id : -1;
}

bool Expr::operator==(const Expr& o) const { return hash_ == o.hash_ && compare(*this, o) == 0; }

Expr operator+(const Expr& a, const Expr& b) {
  if (b.is_constant()) {
    if (b.constant() == 0) return a;
    if (a.is_constant()) return Expr(a.constant() + b.constant());
    return Expr(a.constant() + b.constant(), a.terms());
  }
  if (a.is_constant()) return b + a;
  std::vector<Term> terms = a.terms();
  terms.insert(terms.end(), b.terms().begin(), b.terms().end());
  return Builder::sum(a.constant() + b.constant(), std::move(terms));
}

Expr operator*(const Expr& a, const Expr& b) {
  if (a.is_constant() && !b.is_constant()) return b * a;
  if (b.is_constant()) {
    const int64_t k = b.constant();
    if (k == 0) return Expr(0);
    if (k == 1) return a;
    std::vector<Term> terms = a.terms();
    for (Term& t : terms) t.coef *= k;
    return Builder::sum(a.constant() * k, std::move(terms));
  }
  Expr total = b * Expr(a.constant()) + a * Expr(b.constant()) - Expr(a.constant() * b.constant());
  std::vector<Term> products;
  for (const Term& x : a.terms())
    for (const Term& y : b.terms()) {
      std::vector<Atom> factors;
      std::function<void(const Atom&)> flatten = [&](const Atom& f) {
        if (f->kind != AtomKind::Product) return factors.push_back(f);
        flatten(f->a.terms()[0].atom);
        flatten(f->b.terms()[0].atom);
      };
      flatten(x.atom);
      flatten(y.atom);
      std::sort(factors.begin(), factors.end(), [](const Atom& p, const Atom& q) { return compare(*p, *q) < 0; });
      Atom product = factors[0];
      for (size_t i = 1; i < factors.size(); ++i) {
        AtomNode n;
        n.kind = AtomKind::Product;
        n.a = Builder::from_atom(product);
        n.b = Builder::from_atom(factors[i]);
        const Range p = n.a.range(), q = n.b.range();
        const __int128 corners[] = {static_cast<__int128>(p.lo) * q.lo, static_cast<__int128>(p.lo) * q.hi,
                                    static_cast<__int128>(p.hi) * q.lo, static_cast<__int128>(p.hi) * q.hi};
        n.range = {clamp128(*std::min_element(corners, corners + 4)),
                   clamp128(*std::max_element(corners, corners + 4))};
        product = make_atom(std::move(n));
      }
      products.push_back({x.coef * y.coef, std::move(product)});
    }
  return total + Builder::sum(0, std::move(products));
}

Expr operator-(const Expr& a, const Expr& b) { return a + b * Expr(-1); }

namespace {
/// Splits e into multiples of g (divided by g) and a rest within [0, g). Fails if there is no such split.
bool split_by(const Expr& e, int64_t g, Expr& multiples, Expr& rest) {
  std::vector<Term> m, s;
  for (const Term& t : e.terms()) {
    if (t.coef % g == 0)
      m.push_back({t.coef / g, t.atom});
    else
      s.push_back(t);
  }
  const int64_t c = floor_mod(e.constant(), g);
  rest = Builder::sum(c, std::move(s));
  if (rest.range().lo < 0 || rest.range().hi >= g) return false;
  multiples = Builder::sum((e.constant() - c) / g, std::move(m));
  return true;
}

/// Common factors of e's coefficients with d that are worth a split, largest first.
std::vector<int64_t> split_candidates(const Expr& e, int64_t d) {
  std::vector<int64_t> out;
  for (const Term& t : e.terms()) {
    const int64_t g = std::gcd(std::abs(t.coef), d);
    if (g > 1) out.push_back(g);
  }
  std::sort(out.rbegin(), out.rend());
  out.erase(std::unique(out.begin(), out.end()), out.end());
  return out;
}
}  // namespace

Expr floordiv(const Expr& a, int64_t d) {
  KILN_CHECK(d > 0, "floordiv by " + std::to_string(d));
  if (d == 1) return a;
  if (floor_div(a.range().lo, d) == floor_div(a.range().hi, d)) return Expr(floor_div(a.range().lo, d));
  std::vector<Term> whole, rest;
  for (const Term& t : a.terms()) {
    const int64_t q = t.coef % d == 0 || t.coef > d ? t.coef / d : 0;
    if (q != 0) whole.push_back({q, t.atom});
    if (t.coef - q * d != 0) rest.push_back({t.coef - q * d, t.atom});
  }
  const int64_t c = floor_div(a.constant(), d);
  if (!whole.empty() || c != 0)
    return Builder::sum(c, std::move(whole)) + floordiv(Builder::sum(a.constant() - c * d, std::move(rest)), d);
  Expr multiples, small;
  for (int64_t g : split_candidates(a, d))
    if (split_by(a, g, multiples, small)) return floordiv(multiples, d / g);
  if (const Atom x = single_atom(a)) {
    int64_t product;
    if (x->kind == AtomKind::FloorDiv && !__builtin_mul_overflow(x->divisor, d, &product))
      return floordiv(x->a, product);
    if (x->kind == AtomKind::Mod && x->divisor % d == 0) return mod(floordiv(x->a, d), x->divisor / d);
  }
  AtomNode n;
  n.kind = AtomKind::FloorDiv;
  n.divisor = d;
  n.a = a;
  n.range = {floor_div(a.range().lo, d), floor_div(a.range().hi, d)};
  return Builder::from_atom(make_atom(std::move(n)));
}

Expr mod(const Expr& a, int64_t d) {
  KILN_CHECK(d > 0, "mod by " + std::to_string(d));
  if (d == 1) return Expr(0);
  const int64_t k = floor_div(a.range().lo, d);
  if (k == floor_div(a.range().hi, d)) return a - Expr(k * d);
  std::vector<Term> reduced;
  const int64_t c = floor_mod(a.constant(), d);
  bool changed = c != a.constant();
  for (const Term& t : a.terms()) {
    const int64_t coef = t.coef % d == 0 || t.coef > d ? t.coef % d : t.coef;
    changed |= coef != t.coef;
    if (coef != 0) reduced.push_back({coef, t.atom});
  }
  if (changed) return mod(Builder::sum(c, std::move(reduced)), d);
  Expr multiples, small;
  for (int64_t g : split_candidates(a, d))
    if (split_by(a, g, multiples, small)) return mod(multiples, d / g) * Expr(g) + small;
  if (const Atom x = single_atom(a))
    if (x->kind == AtomKind::Mod && x->divisor % d == 0) return mod(x->a, d);
  AtomNode n;
  n.kind = AtomKind::Mod;
  n.divisor = d;
  n.a = a;
  n.range = {0, a.range().lo >= 0 ? std::min(d - 1, a.range().hi) : d - 1};
  return Builder::from_atom(make_atom(std::move(n)));
}

namespace {
Expr min_or_max(const Expr& a, const Expr& b, bool is_min) {
  const Range d = (a - b).range();
  if (d.lo >= 0) return is_min ? b : a;
  if (d.hi <= 0) return is_min ? a : b;
  AtomNode n;
  n.kind = is_min ? AtomKind::Min : AtomKind::Max;
  const bool ordered = compare(a, b) <= 0;
  n.a = ordered ? a : b;
  n.b = ordered ? b : a;
  const Range x = a.range(), y = b.range();
  n.range =
      is_min ? Range{std::min(x.lo, y.lo), std::min(x.hi, y.hi)} : Range{std::max(x.lo, y.lo), std::max(x.hi, y.hi)};
  return Builder::from_atom(make_atom(std::move(n)));
}
}  // namespace

Expr min(const Expr& a, const Expr& b) { return min_or_max(a, b, true); }
Expr max(const Expr& a, const Expr& b) { return min_or_max(a, b, false); }

void for_each_var(const Expr& e, const std::function<void(const AtomNode&)>& f) {
  for (const Term& t : e.terms()) {
    if (t.atom->kind == AtomKind::Var) {
      f(*t.atom);
    } else {
      for_each_var(t.atom->a, f);
      for_each_var(t.atom->b, f);
    }
  }
}

bool uses_var(const Expr& e, int id, VarKind kind) {
  bool found = false;
  for_each_var(e, [&](const AtomNode& v) { found |= v.id == id && v.var_kind == kind; });
  return found;
}

bool has_indirect(const Expr& e) {
  bool found = false;
  for_each_var(e, [&](const AtomNode& v) { found |= v.var_kind == VarKind::Indirect; });
  return found;
}

Expr substitute(const Expr& e, const std::function<bool(const AtomNode&, Expr&)>& f) {
  if (e.is_constant()) return e;
  Expr total(e.constant());
  for (const Term& t : e.terms()) {
    const AtomNode& n = *t.atom;
    Expr value;
    switch (n.kind) {
      case AtomKind::Var:
        if (!f(n, value)) value = Builder::from_atom(t.atom);
        break;
      case AtomKind::FloorDiv:
        value = floordiv(substitute(n.a, f), n.divisor);
        break;
      case AtomKind::Mod:
        value = mod(substitute(n.a, f), n.divisor);
        break;
      case AtomKind::Min:
        value = min(substitute(n.a, f), substitute(n.b, f));
        break;
      case AtomKind::Max:
        value = max(substitute(n.a, f), substitute(n.b, f));
        break;
      case AtomKind::Product:
        value = substitute(n.a, f) * substitute(n.b, f);
        break;
    }
    total += value * Expr(t.coef);
  }
  return total;
}

Expr substitute_loop_vars(const Expr& e, const std::vector<Expr>& values) {
  return substitute(e, [&](const AtomNode& v, Expr& out) {
    if (v.var_kind != VarKind::Loop || v.id >= static_cast<int>(values.size())) return false;
    out = values[v.id];
    return true;
  });
}

std::optional<int64_t> stride_along(const Expr& e, int var) {
  int64_t stride = 0;
  for (const Term& t : e.terms()) {
    if (t.atom->kind != AtomKind::Var) {
      if (uses_var(Builder::from_atom(t.atom), var)) return std::nullopt;
    } else if (t.atom->var_kind == VarKind::Loop && t.atom->id == var) {
      stride = t.coef;
    }
  }
  return stride;
}

bool split_linear(const Expr& e, int var, int64_t& stride, Expr& rest) {
  const std::optional<int64_t> found = stride_along(e, var);
  if (!found) return false;
  stride = *found;
  std::vector<Term> others;
  for (const Term& t : e.terms())
    if (t.atom->kind != AtomKind::Var || t.atom->var_kind != VarKind::Loop || t.atom->id != var) others.push_back(t);
  rest = Builder::sum(e.constant(), std::move(others));
  return true;
}

Expr linearize(const std::vector<Expr>& index, const std::vector<int64_t>& strides, int64_t offset) {
  KILN_CHECK(index.size() == strides.size(), "linearize: ranks differ");
  Expr e(offset);
  for (size_t i = 0; i < index.size(); ++i) e += index[i] * Expr(strides[i]);
  return e;
}

std::vector<Expr> delinearize(const Expr& linear, const std::vector<int64_t>& sizes) {
  std::vector<Expr> out(sizes.size());
  int64_t stride = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    const Expr q = floordiv(linear, stride);
    out[i] = i == 0 && sizes[i] > 0 && linear.range().lo >= 0 && linear.range().hi < stride * sizes[i]
                 ? q
                 : mod(q, std::max<int64_t>(sizes[i], 1));
    stride *= std::max<int64_t>(sizes[i], 1);
  }
  return out;
}

int64_t evaluate(const Expr& e, const std::function<int64_t(const AtomNode&)>& value) {
  int64_t total = e.constant();
  for (const Term& t : e.terms()) {
    const AtomNode& n = *t.atom;
    int64_t v = 0;
    switch (n.kind) {
      case AtomKind::Var:
        v = value(n);
        break;
      case AtomKind::FloorDiv:
        v = floor_div(evaluate(n.a, value), n.divisor);
        break;
      case AtomKind::Mod:
        v = floor_mod(evaluate(n.a, value), n.divisor);
        break;
      case AtomKind::Min:
        v = std::min(evaluate(n.a, value), evaluate(n.b, value));
        break;
      case AtomKind::Max:
        v = std::max(evaluate(n.a, value), evaluate(n.b, value));
        break;
      case AtomKind::Product:
        v = evaluate(n.a, value) * evaluate(n.b, value);
        break;
    }
    total += t.coef * v;
  }
  return total;
}

}  // namespace kiln::symbolic
