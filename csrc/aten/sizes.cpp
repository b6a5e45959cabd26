#include "aten/sizes.h"

#include <c10/util/generic_math.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <regex>

#include "aten/pch.h"
#include "base/error.h"

namespace kiln::aten {

namespace {
using symbolic::Expr;
using symbolic::Number;
using symbolic::Real;
using Relation = Sizes::Relation;

/// No tensor has more elements in a dimension.
constexpr int64_t kLargestSize = int64_t{1} << 48;
/// Larger ints are guarded by value.
constexpr int64_t kLargestInt = int64_t{1} << 31;

/// An expression, or how one compares with zero, as PyTorch computes with it.
class SizeNode final : public c10::SymNodeImpl {
 public:
  SizeNode(std::shared_ptr<Sizes> sizes, Expr expr) : sizes_(std::move(sizes)), expr_(std::move(expr)) {}
  SizeNode(std::shared_ptr<Sizes> sizes, Expr difference, Relation relation)
      : sizes_(std::move(sizes)), expr_(std::move(difference)), is_bool_(true), relation_(relation) {}

  const Expr& expr() const { return expr_; }
  bool is_int() override { return !is_bool_; }
  bool is_bool() override { return is_bool_; }
  bool is_float() override { return false; }
  bool has_hint() override { return true; }
  bool is_symbolic() override { return !expr_.is_constant(); }
  c10::SymNode sym_float() override;
  c10::SymNode truediv(const c10::SymNode& o) override;
  c10::SymNode int_truediv(const c10::SymNode& o) override { return truediv(o); }
  std::string str() override { return symbolic::print(expr_); }
  std::string _graph_repr() override { return str(); }
  c10::SymNode clone() override { return c10::SymNode::reclaim_copy(this); }
  std::optional<int64_t> constant_int() override {
    return !is_bool_ && expr_.is_constant() ? std::optional(expr_.constant()) : std::nullopt;
  }
  std::optional<int64_t> maybe_as_int() override { return constant_int(); }
  std::optional<bool> constant_bool() override {
    return is_bool_ && expr_.is_constant() ? std::optional(holds(relation_, expr_.constant())) : std::nullopt;
  }

  c10::SymNode wrap_int(int64_t n) override { return number(Expr(n)); }
  c10::SymNode wrap_bool(bool b) override { return truth(Expr(b ? 0 : 1), Relation::Equal); }

  c10::SymNode add(const c10::SymNode& o) override { return number(expr_ + of(o)); }
  c10::SymNode sub(const c10::SymNode& o) override { return number(expr_ - of(o)); }
  c10::SymNode mul(const c10::SymNode& o) override { return number(expr_ * of(o)); }
  c10::SymNode neg() override { return number(Expr(0) - expr_); }
  c10::SymNode floordiv(const c10::SymNode& o) override {
    const int64_t d = sizes_->pin(of(o));
    if (d <= 0) throw Unsupported("a division of a size by what is not positive");
    return number(symbolic::floordiv(expr_, d));
  }
  c10::SymNode int_floordiv(const c10::SymNode& o) override { return floordiv(o); }
  c10::SymNode mod(const c10::SymNode& o) override {
    const int64_t d = sizes_->pin(of(o));
    if (d <= 0) throw Unsupported("the remainder of a size by what is not positive");
    return number(symbolic::mod(expr_, d));
  }
  c10::SymNode sym_min(const c10::SymNode& o) override { return number(symbolic::min(expr_, of(o))); }
  c10::SymNode sym_max(const c10::SymNode& o) override { return number(symbolic::max(expr_, of(o))); }
  c10::SymNode eq(const c10::SymNode& o) override { return truth(expr_ - of(o), Relation::Equal); }
  c10::SymNode ne(const c10::SymNode& o) override { return truth(expr_ - of(o), Relation::NotEqual); }
  c10::SymNode lt(const c10::SymNode& o) override { return truth(expr_ - of(o), Relation::Less); }
  c10::SymNode le(const c10::SymNode& o) override { return truth(expr_ - of(o), Relation::LessEqual); }
  c10::SymNode gt(const c10::SymNode& o) override { return truth(of(o) - expr_, Relation::Less); }
  c10::SymNode ge(const c10::SymNode& o) override { return truth(of(o) - expr_, Relation::LessEqual); }
  c10::SymNode sym_not() override { return wrap_bool(!decide()); }
  c10::SymNode sym_and(const c10::SymNode& o) override { return wrap_bool(decide() && o->guard_bool("", 0)); }
  c10::SymNode sym_or(const c10::SymNode& o) override { return wrap_bool(decide() || o->guard_bool("", 0)); }

  int64_t guard_int(const char*, int64_t) override { return sizes_->pin(expr_); }
  int64_t int_() override { return sizes_->pin(expr_); }
  bool guard_bool(const char*, int64_t) override { return decide(); }
  bool bool_() override { return decide(); }
  bool expect_true(const char*, int64_t) override { return decide(); }
  bool guard_size_oblivious(const char*, int64_t) override { return decide(); }
  // PyTorch asks so where either answer is right and one is a shortcut.
  bool guard_or_false(const char*, int64_t) override { return constant_bool().value_or(false); }
  bool guard_or_true(const char*, int64_t) override { return constant_bool().value_or(true); }
  bool statically_known_true(const char*, int64_t) override { return constant_bool().value_or(false); }

 private:
  c10::SymNode number(Expr e) const { return c10::make_intrusive<SizeNode>(sizes_, std::move(e)); }
  c10::SymNode truth(Expr difference, Relation r) const {
    return c10::make_intrusive<SizeNode>(sizes_, std::move(difference), r);
  }
  static Expr of(const c10::SymNode& o) {
    if (const Expr* e = Sizes::expr_of(o)) return *e;
    if (const auto n = o->maybe_as_int()) return Expr(*n);
    throw Unsupported("arithmetic of a size with another symbolic number");
  }
  bool decide() const { return sizes_->decide(expr_, relation_); }

  std::shared_ptr<Sizes> sizes_;
  Expr expr_;
  bool is_bool_ = false;
  Relation relation_ = Relation::Equal;
};

/// A float computed of expressions, as PyTorch computes with it.
class RealNode final : public c10::SymNodeImpl {
 public:
  RealNode(std::shared_ptr<Sizes> sizes, Real real) : sizes_(std::move(sizes)), real_(std::move(real)) {}

  const Real& real() const { return real_; }
  bool is_int() override { return false; }
  bool is_bool() override { return false; }
  bool is_float() override { return true; }
  bool has_hint() override { return true; }
  bool is_symbolic() override { return real_.op() != Real::Op::Constant; }
  std::string str() override { return symbolic::print(real_); }
  std::string _graph_repr() override { return str(); }
  c10::SymNode clone() override { return c10::SymNode::reclaim_copy(this); }

  c10::SymNode wrap_float(double x) override { return number(Real(x)); }
  c10::SymNode wrap_int(int64_t n) override { return number(Real(Expr(n))); }
  c10::SymNode sym_float() override { return clone(); }
  c10::SymNode add(const c10::SymNode& o) override { return binary(Real::Op::Add, o); }
  c10::SymNode sub(const c10::SymNode& o) override { return binary(Real::Op::Sub, o); }
  c10::SymNode mul(const c10::SymNode& o) override { return binary(Real::Op::Mul, o); }
  c10::SymNode truediv(const c10::SymNode& o) override { return binary(Real::Op::Div, o); }
  c10::SymNode float_truediv(const c10::SymNode& o) override { return truediv(o); }
  c10::SymNode pow(const c10::SymNode& o) override { return binary(Real::Op::Pow, o); }
  c10::SymNode float_pow(const c10::SymNode& o) override { return pow(o); }
  c10::SymNode neg() override { return number(Real(Real::Op::Neg, real_)); }

  double guard_float(const char*, int64_t) override {
    const auto value = sizes_->pin(real_);
    if (!value) throw Unsupported("a float of sizes that Python does not compute");
    return *value;
  }

 private:
  c10::SymNode number(Real r) const { return c10::make_intrusive<RealNode>(sizes_, std::move(r)); }
  c10::SymNode binary(Real::Op op, const c10::SymNode& o) const {
    if (const Real* r = Sizes::real_of(o)) return number(Real(op, real_, *r));
    if (const Expr* e = Sizes::expr_of(o)) return number(Real(op, real_, Real(*e)));
    throw Unsupported("arithmetic of a float of sizes with another symbolic number");
  }

  std::shared_ptr<Sizes> sizes_;
  Real real_;
};

c10::SymNode SizeNode::sym_float() { return c10::make_intrusive<RealNode>(sizes_, Real(expr_)); }
c10::SymNode SizeNode::truediv(const c10::SymNode& o) {
  return c10::make_intrusive<RealNode>(sizes_, Real(Real::Op::Div, Real(expr_), Real(of(o))));
}
}  // namespace

std::optional<int64_t> evaluate(const Expr& e, const std::function<int64_t(size_t)>& leaves) {
  constexpr __int128 kMost = __int128{1} << 62;
  const auto fits = [&](__int128 n) { return n < kMost && n > -kMost; };
  __int128 sum = e.constant();
  for (const symbolic::Term& term : e.terms()) {
    const symbolic::AtomNode& atom = *term.atom;
    __int128 value = 0;
    if (atom.kind == symbolic::AtomKind::Var) {
      value = leaves(static_cast<size_t>(atom.id));
    } else {
      const bool unary = atom.kind == symbolic::AtomKind::FloorDiv || atom.kind == symbolic::AtomKind::Mod;
      const auto a = evaluate(atom.a, leaves), b = unary ? std::optional<int64_t>(0) : evaluate(atom.b, leaves);
      if (!a || !b) return std::nullopt;
      switch (atom.kind) {
        case symbolic::AtomKind::FloorDiv:
          value = c10::div_floor_integer(*a, atom.divisor);
          break;
        case symbolic::AtomKind::Mod:
          value = *a - c10::div_floor_integer(*a, atom.divisor) * atom.divisor;
          break;
        case symbolic::AtomKind::Min:
          value = std::min(*a, *b);
          break;
        case symbolic::AtomKind::Max:
          value = std::max(*a, *b);
          break;
        case symbolic::AtomKind::Product:
          value = static_cast<__int128>(*a) * *b;
          break;
        case symbolic::AtomKind::Var:
          break;
      }
    }
    if (!fits(value) || !fits(value * term.coef)) return std::nullopt;
    sum += value * term.coef;
    if (!fits(sum)) return std::nullopt;
  }
  return static_cast<int64_t>(sum);
}

std::optional<double> evaluate(const Real& r, const std::function<int64_t(size_t)>& leaves) {
  return symbolic::evaluate(r, [&](const Expr& e) { return evaluate(e, leaves); });
}

std::optional<int64_t> evaluate_whole(const Real& r, const std::function<int64_t(size_t)>& leaves) {
  const auto value = evaluate(r, leaves);
  if (!value || std::fabs(*value) > static_cast<double>(kLargestSize)) return std::nullopt;
  return static_cast<int64_t>(*value);
}

std::optional<int64_t> bits_of(const Number& n, const std::function<int64_t(size_t)>& leaves) {
  if (const Expr* e = std::get_if<Expr>(&n)) return evaluate(*e, leaves);
  const auto value = evaluate(std::get<Real>(n), leaves);
  return value ? std::optional(std::bit_cast<int64_t>(*value)) : std::nullopt;
}

bool holds(Relation relation, int64_t value) {
  switch (relation) {
    case Relation::Equal:
      return value == 0;
    case Relation::NotEqual:
      return value != 0;
    case Relation::Less:
      return value < 0;
    case Relation::LessEqual:
      return value <= 0;
  }
  throw InternalError("bad relation");
}

Expr Sizes::size(graph::Value v, int64_t dim, int64_t hint) {
  std::vector<int>& ids = leaf_ids_[v];
  const auto at = static_cast<size_t>(dim);
  if (ids.size() <= at) ids.resize(at + 1, -1);
  if (ids[at] < 0) {
    ids[at] = static_cast<int>(leaves_.size());
    leaves_.push_back({v, dim, hint});
  }
  return Expr::var(ids[at], {0, kLargestSize}, symbolic::VarKind::Size);
}

Expr Sizes::given(int64_t number, int64_t hint) {
  const auto it = std::find_if(leaves_.begin(), leaves_.end(),
                               [&](const Leaf& leaf) { return leaf.is_given() && leaf.dim == number; });
  const auto id = static_cast<int>(it - leaves_.begin());
  if (it == leaves_.end()) leaves_.push_back({{}, number, hint});
  return Expr::var(id, {-kLargestInt, kLargestInt}, symbolic::VarKind::Size);
}

namespace {
/// The quotient of two ints that `r` rounds, if it is that of Python's //: below 2**48 the quotient of the floats is no
/// further from the true one than the next int is.
std::optional<Expr> quotient(const Real& r) {
  const bool up = r.op() == Real::Op::Ceil;
  if (!up && r.op() != Real::Op::Floor && r.op() != Real::Op::Trunc) return std::nullopt;
  const Real& of = r.operands()[0];
  if (of.op() == Real::Op::Integer) return of.integer();
  if (of.op() != Real::Op::Div || of.operands()[0].op() != Real::Op::Integer) return std::nullopt;
  const Expr& n = of.operands()[0].integer();
  const Real& d = of.operands()[1];
  const double by = d.op() == Real::Op::Constant ? d.constant()
                    : d.op() == Real::Op::Integer && d.integer().is_constant()
                        ? static_cast<double>(d.integer().constant())
                        : 0;
  const bool small = n.range().lo >= -kLargestSize && n.range().hi <= kLargestSize && by >= 1 && by <= kLargestInt;
  if (!small || by != std::floor(by) || (r.op() == Real::Op::Trunc && n.range().lo < 0)) return std::nullopt;
  const auto divisor = static_cast<int64_t>(by);
  return up ? Expr(0) - symbolic::floordiv(Expr(0) - n, divisor) : symbolic::floordiv(n, divisor);
}
}  // namespace

Expr Sizes::whole(const Real& r) {
  if (const auto e = quotient(r)) return *e;
  const auto it = std::find_if(leaves_.begin(), leaves_.end(), [&](const Leaf& leaf) { return leaf.of == r; });
  const auto id = static_cast<int>(it - leaves_.begin());
  if (it == leaves_.end()) {
    const auto now = evaluate_whole(r, [&](size_t leaf) { return leaves_.at(leaf).hint; });
    KILN_CHECK(now, "an int of a float that has none");
    leaves_.push_back({{}, -1, *now, r});
  }
  const symbolic::Range range = r.is_truth() ? symbolic::Range{0, 1} : symbolic::Range{-kLargestSize, kLargestSize};
  return Expr::var(id, range, symbolic::VarKind::Size);
}

int64_t Sizes::add_output(const Number& n) {
  const auto it = std::find(outputs_.begin(), outputs_.end(), n);
  const int64_t place = it - outputs_.begin();
  if (it == outputs_.end()) outputs_.push_back(n);
  return place;
}

std::optional<double> Sizes::hint(const Real& r) const {
  return evaluate(r, [&](size_t leaf) { return leaves_.at(leaf).hint; });
}

int64_t Sizes::hint_bits(const Number& n) const {
  const auto bits = bits_of(n, [&](size_t leaf) { return leaves_.at(leaf).hint; });
  KILN_CHECK(bits, "an open number without a value");
  return *bits;
}

graph::Arg hint_arg(const Sizes& sizes, const Number& n) {
  if (const Expr* e = std::get_if<Expr>(&n)) return graph::Arg(sizes.hint(*e));
  return graph::Arg(*sizes.hint(std::get<Real>(n)));
}

void Sizes::for_each_leaf(const Number& n, const std::function<void(size_t)>& f) const {
  symbolic::for_each_var(n, [&](const symbolic::AtomNode& v) {
    const auto leaf = static_cast<size_t>(v.id);
    if (const auto& of = leaves_.at(leaf).of)
      for_each_leaf(*of, f);
    else
      f(leaf);
  });
}

std::vector<bool> Sizes::used_leaves() const {
  std::vector<bool> used(leaves_.size(), false);
  const auto use = [&](const auto& self, const Number& n) -> void {
    symbolic::for_each_var(n, [&](const symbolic::AtomNode& v) {
      const auto leaf = static_cast<size_t>(v.id);
      if (used[leaf]) return;
      used[leaf] = true;
      if (const auto& of = leaves_[leaf].of) self(self, *of);
    });
  };
  for (const Argument& a : arguments_) use(use, a.number);
  for (const Condition& c : conditions_)
    if (c.kind == Condition::Kind::Compare) use(use, c.size);
  for (const Number& n : outputs_) use(use, n);
  return used;
}

std::shared_ptr<Sizes> Sizes::for_copies(const std::function<graph::Node*(const graph::Node*)>& copy_of) const {
  auto copies = std::make_shared<Sizes>();
  copies->leaves_ = leaves_;
  std::vector<bool> gone(leaves_.size(), false);
  for (size_t i = 0; i < leaves_.size(); ++i) {
    graph::Value& v = copies->leaves_[i].value;
    if (!v) continue;
    graph::Node* const copy = copy_of(v.node);
    gone[i] = !copy;
    v = copy ? copy->out(v.index) : graph::Value();
  }
  for (const Argument& a : arguments_) {
    const graph::Node* const copy = copy_of(a.node);
    bool known = copy;
    for_each_leaf(a.number, [&](size_t leaf) { known &= !gone[leaf]; });
    if (known) copies->arguments_.push_back({copy, a.arg, a.item, a.number});
  }
  return copies;
}

int64_t Sizes::hint(const Expr& e) const {
  const auto value = evaluate(e, [&](size_t leaf) { return leaves_.at(leaf).hint; });
  KILN_CHECK(value, "a size that is no int of 62 bits");
  return *value;
}

namespace {
/// The number of e's atoms, one that occurs twice counted twice; at most `most`.
int64_t count_atoms(const Expr& e, int64_t most) {
  int64_t count = 0;
  for (const symbolic::Term& t : e.terms()) {
    if (++count >= most) break;
    if (t.atom->kind == symbolic::AtomKind::Var) continue;
    count += count_atoms(t.atom->a, most - count);
    if (count < most) count += count_atoms(t.atom->b, most - count);
  }
  return std::min(count, most);
}
}  // namespace

bool Sizes::fits(const Expr& e) const {
  constexpr int64_t kMostAtoms = 64;
  if (count_atoms(e, kMostAtoms) >= kMostAtoms) return false;
  constexpr int64_t kMostFactor = int64_t{1} << 40;  // so that sums and products of a few have no overflow
  const auto small = [&](int64_t n) { return n < kMostFactor && n > -kMostFactor; };
  return small(e.constant()) &&
         std::all_of(e.terms().begin(), e.terms().end(), [&](const symbolic::Term& t) { return small(t.coef); }) &&
         evaluate(e, [&](size_t leaf) { return leaves_.at(leaf).hint; });
}

bool Sizes::decide(const Expr& difference, Relation relation) {
  const bool truth = aten::holds(relation, hint(difference));
  if (difference.is_constant()) return truth;
  Expr size = difference;
  if (!truth) {
    const bool equality = relation == Relation::Equal || relation == Relation::NotEqual;
    if (!equality) size = Expr(0) - difference;  // not a < 0: -a <= 0
    relation = relation == Relation::Equal      ? Relation::NotEqual
               : relation == Relation::NotEqual ? Relation::Equal
               : relation == Relation::Less     ? Relation::LessEqual
                                                : Relation::Less;
  }
  const symbolic::Range range = size.range();
  const bool always = relation == Relation::NotEqual    ? range.lo > 0 || range.hi < 0
                      : relation == Relation::Less      ? range.hi < 0
                      : relation == Relation::LessEqual ? range.hi <= 0
                                                        : false;
  uint8_t& seen = compared_[size];
  const auto bit = static_cast<uint8_t>(1u << static_cast<unsigned>(relation));
  if (always || (seen & bit)) return truth;
  seen |= bit;
  Condition c{Condition::Kind::Compare, size, relation, {}, {}, false};
  conditions_.push_back(std::move(c));
  return truth;
}

int64_t Sizes::pin(const Expr& e) {
  const int64_t value = hint(e);
  decide(e - Expr(value), Relation::Equal);
  return value;
}

bool Sizes::decide(const Real& truth) { return decide(whole(truth), Relation::NotEqual); }

std::optional<double> Sizes::pin(const Real& r) {
  symbolic::for_each_integer(r, [&](const Expr& e) { pin(e); });
  return hint(r);
}

void Sizes::pin(const Number& n) {
  std::visit([&](const auto& x) { pin(x); }, n);
}

void Sizes::note_layout(graph::Value v, const graph::TensorMeta& layout) {
  if (is_open(v) && layouts_.insert(v).second)
    conditions_.push_back({Condition::Kind::Layout, {}, {}, v, layout, false});
}

void Sizes::note_contiguous(graph::Value v, bool contiguous) {
  if (is_open(v) && contiguous_.insert(v).second)
    conditions_.push_back({Condition::Kind::Contiguous, {}, {}, v, {}, contiguous});
}

std::vector<std::string> Sizes::texts() const {
  const auto name = [](graph::Value v) { return v.node->name + (v.index ? "." + std::to_string(v.index) : ""); };
  const std::function<std::string(const Number&)> in_words = [&](const Number& n) {
    static const std::regex variable("\\bs([0-9]+)");
    const std::string text = symbolic::print(n);
    std::string out;
    auto at = text.begin();
    for (std::sregex_iterator it(text.begin(), text.end(), variable), end; it != end; ++it) {
      const Leaf& leaf = leaves_.at(std::stoul((*it)[1].str()));
      out.append(at, (*it)[0].first);
      out += leaf.value ? name(leaf.value) + ".size(" + std::to_string(leaf.dim) + ")"
             : leaf.of  ? "(" + in_words(*leaf.of) + ")"
                        : "int" + std::to_string(leaf.dim);
      at = (*it)[0].second;
    }
    return out.append(at, text.end());
  };
  const auto truth_of = [&](const Expr& e) -> const Real* {
    if (e.constant() != 0 || e.terms().size() != 1 || e.terms()[0].atom->kind != symbolic::AtomKind::Var)
      return nullptr;
    const auto& of = leaves_.at(static_cast<size_t>(e.terms()[0].atom->id)).of;
    return of && of->is_truth() && e.terms()[0].coef == 1 ? &*of : nullptr;
  };
  std::vector<std::string> lines;
  for (const Condition& c : conditions_) {
    switch (c.kind) {
      case Condition::Kind::Compare: {
        if (const Real* truth = truth_of(c.size)) {
          lines.push_back(c.relation == Relation::NotEqual ? in_words(*truth) : "not (" + in_words(*truth) + ")");
          break;
        }
        const char* const relation = c.relation == Relation::Equal      ? " == 0"
                                     : c.relation == Relation::NotEqual ? " != 0"
                                     : c.relation == Relation::Less     ? " < 0"
                                                                        : " <= 0";
        lines.push_back(in_words(c.size) + relation);
        break;
      }
      case Condition::Kind::Layout:
        lines.push_back(name(c.value) + " is " + graph::print(c.layout));
        break;
      case Condition::Kind::Contiguous:
        lines.push_back(std::string(c.contiguous ? "" : "not ") + name(c.value) + ".is_contiguous()");
        break;
    }
  }
  return lines;
}

c10::SymInt Sizes::symint(const Expr& e) {
  if (e.is_constant()) return c10::SymInt(e.constant());
  return c10::SymInt(c10::SymNode(c10::make_intrusive<SizeNode>(shared_from_this(), e)));
}

c10::SymFloat Sizes::symfloat(const Real& r) {
  if (r.op() == Real::Op::Constant) return c10::SymFloat(r.constant());
  return c10::SymFloat(c10::SymNode(c10::make_intrusive<RealNode>(shared_from_this(), r)));
}

const Real* Sizes::real_of(const c10::SymNode& n) {
  const auto* node = dynamic_cast<const RealNode*>(n.get());
  return node ? &node->real() : nullptr;
}

const Expr* Sizes::expr_of(const c10::SymNode& n) {
  const auto* node = dynamic_cast<const SizeNode*>(n.get());
  return node ? &node->expr() : nullptr;
}

const Expr* Sizes::expr_of(const c10::SymInt& n) { return n.is_heap_allocated() ? expr_of(n.toSymNode()) : nullptr; }

}  // namespace kiln::aten
