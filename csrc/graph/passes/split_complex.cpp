#include "graph/passes/split_complex.h"

#include <algorithm>
#include <optional>
#include <unordered_set>

#include "graph/passes/passes.h"
#include "graph/passes/rewrite.h"
#include "ops/ops.h"

namespace kiln::graph {
namespace {

using Sizes = std::vector<int64_t>;

/// A complex value's real and imaginary numbers: tensors of its sizes, or a number in the place of a tensor. An operand
/// of some sizes has at most one of them; one of no sizes may have two. `imag` is None for results that are real.
struct Parts {
  Arg real, imag;
};

/// Real arithmetic on tensors and numbers of one dtype, written before the node that is split.
class Real {
 public:
  Real(Rewrite& to, DType dtype) : to_(to), dtype_(dtype) {}

  Arg add(const Arg& a, const Arg& b) {
    return calculate(
        a, b, [](auto x, auto y) { return x + y; },
        [&] {
          return a.is_value() ? call("aten::add.Tensor", {a, b, Arg(1)}) : call("aten::add.Tensor", {b, a, Arg(1)});
        });
  }
  Arg sub(const Arg& a, const Arg& b) {
    return calculate(
        a, b, [](auto x, auto y) { return x - y; }, [&] { return call("aten::sub.Tensor", {tensor(a), b, Arg(1)}); });
  }
  Arg mul(const Arg& a, const Arg& b) {
    if (a == Arg(1.0)) return b;
    if (b == Arg(1.0)) return a;
    return calculate(
        a, b, [](auto x, auto y) { return x * y; },
        [&] { return a.is_value() ? call("aten::mul.Tensor", {a, b}) : call("aten::mul.Tensor", {b, a}); });
  }
  Arg div(const Arg& a, const Arg& b) {
    return calculate(
        a, b, [](auto x, auto y) { return x / y; }, [&] { return call("aten::div.Tensor", {tensor(a), b}); });
  }
  Arg neg(const Arg& a) { return a.is_value() ? call("aten::neg", {a}) : Arg(-a.to_double()); }
  Arg function(const char* op, const Arg& a) { return call(op, {tensor(a)}); }
  Arg function(const char* op, const Arg& a, const Arg& b) { return call(op, {tensor(a), tensor(b)}); }
  Arg where(const Arg& c, const Arg& a, const Arg& b) { return call("aten::where.self", {c, tensor(a), tensor(b)}); }
  Arg compare(const std::string& op, const Arg& a, const Arg& b) {
    return call("aten::" + op + (b.is_value() ? ".Tensor" : ".Scalar"), {tensor(a), b});
  }
  Arg call(const std::string& op, std::vector<Arg> args) { return to_.call(op, std::move(args)); }

  DType dtype() const { return dtype_; }
  /// A number as a tensor that broadcasts.
  Arg tensor(const Arg& a) { return a.is_value() ? a : full({}, a); }
  Arg full(const Sizes& sizes, const Arg& number) {
    return call("aten::full", {Arg::ints(sizes), number, Arg(dtype_), Arg(), Arg(Device{}), Arg()});
  }
  /// `part` with these sizes, in memory of its own or not.
  Arg sized(const Arg& part, const Sizes& sizes) {
    if (!part.is_value()) return full(sizes, part);
    if (part.value().meta().sizes == sizes) return part;
    return call("aten::expand", {part, Arg::ints(sizes), Arg(false)});
  }
  Arg cast(Value v) {
    if (v.meta().dtype == dtype_) return v;
    return call("aten::_to_copy", {v, Arg(dtype_), Arg(), Arg(), Arg(), Arg(false), Arg()});
  }

 private:
  /// Numbers are computed with as kernels would.
  template <class F, class G>
  Arg calculate(const Arg& a, const Arg& b, F numbers, G tensors) {
    if (a.is_value() || b.is_value()) return tensors();
    if (dtype_ == DType::Float32)
      return Arg(static_cast<double>(numbers(static_cast<float>(a.to_double()), static_cast<float>(b.to_double()))));
    return Arg(numbers(a.to_double(), b.to_double()));
  }

  Rewrite& to_;
  DType dtype_;
};

Parts add(Real& r, const Parts& a, const Parts& b) { return {r.add(a.real, b.real), r.add(a.imag, b.imag)}; }
Parts mul(Real& r, const Parts& a, const Parts& b) {
  const Arg ac = r.mul(a.real, b.real), bd = r.mul(a.imag, b.imag);
  const Arg ad = r.mul(a.real, b.imag), bc = r.mul(a.imag, b.real);
  return {r.sub(ac, bd), r.add(ad, bc)};
}
/// Smith's algorithm (Communications of the ACM 5(8), 1962), in ATen's order of operations.
Parts div(Real& r, const Parts& a, const Parts& b) {
  const auto zeros = [&](const Arg& is_zero, const Parts& otherwise) -> Parts {
    const auto part = [&](const Arg& x, const Arg& y, const Arg& other) {
      return r.where(is_zero, r.div(x, r.function("aten::abs", y)), other);
    };
    return {part(a.real, b.real, otherwise.real), part(a.imag, b.imag, otherwise.imag)};
  };
  if (!b.imag.is_value() && b.imag.to_double() == 0) {  // the larger part is known
    const Arg ratio = r.div(b.imag, b.real);
    const Arg scale = r.div(Arg(1.0), r.add(b.real, r.mul(b.imag, ratio)));
    const Parts out{r.mul(r.add(a.real, r.mul(a.imag, ratio)), scale),
                    r.mul(r.sub(a.imag, r.mul(a.real, ratio)), scale)};
    if (!b.real.is_value() && b.real.to_double() != 0) return out;
    return zeros(r.compare("eq", b.real, Arg(0.0)), out);
  }
  const Arg c = r.function("aten::abs", b.real), d = r.function("aten::abs", b.imag);
  const Arg real_larger = r.compare("ge", c, d);
  const Arg large = r.where(real_larger, b.real, b.imag), small = r.where(real_larger, b.imag, b.real);
  const Arg ratio = r.div(small, large), scale = r.div(Arg(1.0), r.add(large, r.mul(small, ratio)));
  const Arg x = r.where(real_larger, a.real, a.imag), y = r.where(real_larger, a.imag, a.real);
  const Arg straight = r.sub(a.imag, r.mul(a.real, ratio)), crossed = r.sub(r.mul(a.imag, ratio), a.real);
  const Parts out{r.mul(r.add(x, r.mul(y, ratio)), scale), r.mul(r.where(real_larger, straight, crossed), scale)};
  return zeros(r.function("aten::logical_and", r.compare("eq", b.real, Arg(0.0)), r.compare("eq", b.imag, Arg(0.0))),
               out);
}

const Arg* number_at(const Node& n, size_t i) {
  if (i >= n.args.size()) return nullptr;
  return n.args[i].is_number() || n.args[i].is<std::complex<double>>() ? &n.args[i] : nullptr;
}
Parts parts_of_number(const Arg& a) {
  if (!a.is<std::complex<double>>()) return {Arg(a.to_double()), Arg(0.0)};
  const auto z = a.as<std::complex<double>>();
  return {Arg(z.real()), Arg(z.imag())};
}

class Splitting;
/// What one node is replaced by: parts for each of its results. None: it stays.
using Result = std::optional<std::vector<Parts>>;
using Rule = Result (*)(Splitting& s, const Node& n, Real& r);
const std::unordered_map<Op, Rule>& table();

class Splitting {
 public:
  explicit Splitting(Graph& g) : g_(g) {}

  bool run() {
    std::vector<Node*> nodes;
    for (const auto& n : g_.nodes()) nodes.push_back(n.get());
    for (Node* n : nodes)
      if (n->kind == NodeKind::Call) split(*n);
    if (split_.empty()) return false;
    const bool changed = assemble(nodes);
    eliminate_dead_code(g_);  // parts that nobody reads
    return changed;
  }

  // --- for rules
  /// The parts of an operand in the dtype that the node computes in.
  Parts operand(const Arg& a, Real& r) {
    if (!a.is_value()) return parts_of_number(a);
    const Value v = a.value();
    if (!is_complex(v.meta().dtype)) return {r.cast(v), Arg(0.0)};
    Parts p = parts_of(v);
    for (Arg* part : {&p.real, &p.imag})
      if (part->is_value()) *part = r.cast(part->value());
    return p;
  }
  Parts operand(const Node& n, size_t i, Real& r) { return operand(n.arg(i), r); }
  /// The same without numbers in the place of tensors.
  Parts tensors(const Arg& a, Real& r) {
    const Parts p = operand(a, r);
    const Sizes& sizes = a.value().meta().sizes;
    return {r.sized(p.real, sizes), r.sized(p.imag, sizes)};
  }
  /// Whether `v` lies in memory as pairs of the numbers that are computed with.
  bool is_in_memory(Value v, const Real& r) const {
    return !parts_.contains(v) && is_complex(v.meta().dtype) && to_real(v.meta().dtype) == r.dtype();
  }
  /// Whether an operand of the node is known by its parts alone.
  bool reads_split(const Node& n) const {
    bool found = false;
    for (const Arg& a : n.args) for_each_value(a, [&](const Value& v) { found |= parts_.contains(v); });
    return found;
  }
  /// What a real tensor holds that is a view of a complex one: parts of that, if they were computed.
  std::optional<Parts> seen_as_pairs(const Value& v) const {
    const auto it = pairs_.find(v);
    return it == pairs_.end() ? std::nullopt : std::optional(it->second);
  }
  Rewrite& writing() { return *to_; }

 private:
  Parts parts_of(Value v) {
    if (const auto it = parts_.find(v); it != parts_.end()) return it->second;
    static const Op kConstant("kiln::tensor_constant");
    if (v.node->op == kConstant && v.meta().sizes.empty()) return parts_of_number(v.node->arg(0).list().at(0));
    if (const auto it = taken_apart_.find(v); it != taken_apart_.end()) return it->second;
    const Value pairs = to_->call("aten::view_as_real", {v});
    const auto part = [&](int64_t i) {
      return Arg(to_->call("aten::select.int", {pairs, Arg(v.meta().dim()), Arg(i)}));
    };
    new_.push_back(v);
    return taken_apart_[v] = {part(0), part(1)};
  }

  void split(Node& n) {
    static const Op kPairs("aten::view_as_real");
    if (n.op == kPairs) {
      if (const auto it = parts_.find(n.arg(0).value()); it != parts_.end()) {
        pairs_[n.out()] = it->second;
        split_.insert(&n);
      }
      return;
    }
    const auto rule = table().find(n.op);
    if (rule == table().end()) return;
    bool complex = false, known = true, wide = false;  // wide: of more than 32 bits
    const auto look = [&](const TensorMeta& m) {
      if (!m.defined) return;
      known &= m.device.type == DeviceType::CPU && m.dtype != DType::Opaque;
      complex |= is_complex(m.dtype);
      wide |= m.dtype == DType::Complex128 || (m.dtype == DType::Float64 && m.dim() > 0);
    };
    for (const Arg& a : n.args)
      for_each_value(a, [&](const Value& v) {
        if (!v) return;
        look(v.meta());
        complex |= pairs_.contains(v);
      });
    for (const TensorMeta& m : n.results) look(m);
    static const Op kNegView("aten::_neg_view");
    if ((!complex && n.op != kNegView) || !known || n.results.empty()) return;

    Rewrite to(g_, n);
    to_ = &to;
    new_.clear();
    const DType result_type = n.results[0].dtype;
    Real r(to, is_complex(result_type) ? to_real(result_type) : wide ? DType::Float64 : DType::Float32);
    Result result;
    try {
      result = rule->second(*this, n, r);
      if (result) finish(n, *result, r);
    } catch (const Unsupported&) {
      result.reset();
    } catch (const ops::ShapeError&) {
      result.reset();
    }
    if (!result) {
      for (uint32_t i = 0; i < n.results.size(); ++i) parts_.erase(n.out(i)), real_.erase(n.out(i));
      for (const Value& v : new_) taken_apart_.erase(v);
      to.undo();
    }
    to_ = nullptr;
    g_.set_insert_point(nullptr);
  }

  void finish(Node& n, std::vector<Parts>& result, Real& r) {
    KILN_CHECK(result.size() == n.results.size(), "splitting " + n.op.name() + " gave too few results");
    for (size_t i = 0; i < result.size(); ++i) {
      Parts& p = result[i];
      const TensorMeta& m = n.results[i];
      if (p.real.is_value() || !m.sizes.empty() || !is_complex(m.dtype)) p.real = r.sized(p.real, m.sizes);
      if (p.imag.is_value()) p.imag = r.sized(p.imag, m.sizes);
      const auto check = [&](const Arg& part) {
        if (part.is_value() && part.value().meta().dtype != to_real(m.dtype))
          throw Unsupported("other numbers than " + n.op.name() + " gives");
      };
      check(p.real);
      check(p.imag);
      const Value v = n.out(static_cast<uint32_t>(i));
      if (is_complex(m.dtype))
        parts_[v] = p;
      else
        real_[v] = p.real;
    }
    split_.insert(&n);
  }

  /// Whether the node may stay beside its parts: it costs nothing, or is what puts parts together.
  static bool may_stay(const Node& n) {
    static const Op kComplex("aten::complex");
    return n.op == kComplex || (ops::is_view(n.op) && is_complex(n.results.at(0).dtype));
  }

  /// What is read of the nodes that are split, found from the last node on: `needed_`.
  void find_needed() {
    const auto need = [&](const Value& v) {
      if (v) needed_.insert(v);
    };
    const auto need_parts = [&](const Parts& p) {
      for_each_value(p.real, need);
      for_each_value(p.imag, need);
    };
    for (const Arg& a : g_.outputs()) for_each_value(a, need);
    for (const Mutation& m : g_.mutations()) need(m.value);
    for (auto it = g_.nodes().rbegin(); it != g_.nodes().rend(); ++it) {
      Node& n = **it;
      bool read = !split_.contains(&n) && runs_unused(n);
      for (uint32_t i = 0; i < n.results.size(); ++i) {
        const Value v = n.out(i);
        if (!needed_.contains(v)) continue;
        if (const auto real = real_.find(v); real != real_.end())
          for_each_value(real->second, need);
        else if (const auto pairs = pairs_.find(v); pairs != pairs_.end())
          need_parts(pairs->second);
        else if (split_.contains(&n) && !may_stay(n))
          need_parts(parts_.at(v));
        else
          read = true;
      }
      if (!read) continue;
      for (const Arg& a : n.args) for_each_value(a, need);
      stays_.insert(&n);
    }
  }

  bool assemble(const std::vector<Node*>& nodes) {
    find_needed();
    std::unordered_map<const Node*, std::vector<Value>> replaced;
    for (Node* n : nodes) {
      if (!split_.contains(n) || stays_.contains(n)) continue;
      Rewrite to(g_, *n);
      std::vector<Value> results(n->results.size());
      for (uint32_t i = 0; i < results.size(); ++i) {
        const Value v = n->out(i);
        if (!needed_.contains(v)) continue;
        if (const auto real = real_.find(v); real != real_.end()) {
          Value by = real->second.value();
          if (const auto it = replaced.find(by.node); it != replaced.end()) by = it->second[by.index];
          results[i] = laid_out(by, v.meta(), to);
        } else if (const auto pairs = pairs_.find(v); pairs != pairs_.end()) {
          results[i] = pairs_together(*n, pairs->second, replaced, to);
        } else {
          results[i] = together(parts_.at(v), v.meta(), to);
        }
      }
      replaced[n] = std::move(results);
    }
    g_.set_insert_point(nullptr);
    if (replaced.empty()) return false;
    g_.replace_uses(replaced);
    for (auto n = nodes.rbegin(); n != nodes.rend(); ++n)
      if (replaced.contains(*n)) g_.erase(*n);
    return true;
  }

  /// view_as_real of what has been split: a view if the complex tensor is there.
  Value pairs_together(const Node& n, const Parts& p,
                       const std::unordered_map<const Node*, std::vector<Value>>& replaced, Rewrite& to) {
    const Value of = n.arg(0).value();
    if (needed_.contains(of)) {
      const auto it = replaced.find(of.node);
      return to.call("aten::view_as_real", {it == replaced.end() ? of : it->second[of.index]});
    }
    Real r(to, n.results[0].dtype);
    const Sizes& sizes = of.meta().sizes;
    const Value stacked =
        to.call("aten::stack", {Arg::values({r.sized(p.real, sizes).value(), r.sized(p.imag, sizes).value()}),
                                Arg(static_cast<int64_t>(sizes.size()))});
    return laid_out(stacked, n.results[0], to);
  }

  Value together(const Parts& p, const TensorMeta& meta, Rewrite& to) {
    Real r(to, to_real(meta.dtype));
    const Value v = to.call("aten::complex", {r.sized(p.real, meta.sizes), r.sized(p.imag, meta.sizes)});
    return laid_out(v, meta, to);
  }

  Value laid_out(Value v, TensorMeta meta, Rewrite& to) {
    if (v.meta().strides == meta.strides || !meta.is_non_overlapping_and_dense()) return v;
    meta.offset = 0;
    const Value copy = to.call("aten::clone", {v, Arg()});
    copy.node->results[0] = std::move(meta);
    return copy;
  }

  Graph& g_;
  Rewrite* to_ = nullptr;
  std::unordered_map<Value, Parts> parts_;        // of complex results of nodes that are split
  std::unordered_map<Value, Parts> taken_apart_;  // of others, as views
  std::unordered_map<Value, Arg> real_;           // what real results of nodes that are split become
  std::unordered_map<Value, Parts> pairs_;        // of real results that are views of complex ones
  std::vector<Value> new_;                        // in taken_apart_, by the node that is being split
  std::unordered_set<const Node*> split_;
  std::unordered_set<Value> needed_;
  std::unordered_set<const Node*> stays_;  // of the nodes that are split, those that are needed as they are
};

// --- rules -----------------------------------------------------------------------------------------------------------

Result one(Parts p) { return std::vector<Parts>{std::move(p)}; }
Result real(Arg a) { return one({std::move(a), Arg()}); }

template <int Sign, bool Reversed>
Result sum_of(Splitting& s, const Node& n, Real& r) {  // a + alpha * b
  Parts a = s.operand(n, Reversed ? 1 : 0, r), b = s.operand(n, Reversed ? 0 : 1, r);
  const Arg* alpha = number_at(n, 2);
  if (n.args.size() > 2 && !alpha) return {};
  Parts factor = alpha ? parts_of_number(*alpha) : Parts{Arg(1.0), Arg(0.0)};
  if (Sign < 0)
    factor = {r.neg(factor.real), alpha && alpha->is<std::complex<double>>() ? r.neg(factor.imag) : Arg(0.0)};
  return one(add(r, a, mul(r, b, factor)));
}
Result product(Splitting& s, const Node& n, Real& r) { return one(mul(r, s.operand(n, 0, r), s.operand(n, 1, r))); }
Result quotient(Splitting& s, const Node& n, Real& r) { return one(div(r, s.operand(n, 0, r), s.operand(n, 1, r))); }
Result reciprocal(Splitting& s, const Node& n, Real& r) {
  return one(div(r, {Arg(1.0), Arg(0.0)}, s.operand(n, 0, r)));
}
Result power(Splitting& s, const Node& n, Real& r) {
  const Arg* e = number_at(n, 1);
  if (!e || !e->is_number() || e->to_double() != 2) return {};
  const Parts a = s.operand(n, 0, r);
  return one(mul(r, a, a));
}
Result square(Splitting& s, const Node& n, Real& r) {
  const Parts a = s.operand(n, 0, r);
  return one(mul(r, a, a));
}
Result neg(Splitting& s, const Node& n, Real& r) {
  const Parts a = s.operand(n, 0, r);
  return one({r.sub(Arg(0.0), a.real), r.sub(Arg(0.0), a.imag)});
}
Result neg_view(Splitting&, const Node& n, Real& r) {
  if (is_complex(n.results[0].dtype)) return {};
  return real(r.call("aten::neg", {n.arg(0)}));
}
Result conj(Splitting& s, const Node& n, Real& r) {
  const Parts a = s.operand(n, 0, r);
  return one({a.real, r.neg(a.imag)});
}
Result exp(Splitting& s, const Node& n, Real& r) {
  const Parts a = s.tensors(n.arg(0), r);
  const Arg size = r.function("aten::exp", a.real);
  // Of a real number it is real, however large.
  const Arg sin = r.mul(size, r.function("aten::sin", a.imag));
  return one({r.mul(size, r.function("aten::cos", a.imag)), r.where(r.compare("eq", a.imag, Arg(0.0)), a.imag, sin)});
}
Arg abs_of(Real& r, const Parts& a) { return r.function("aten::hypot", a.real, a.imag); }
Result abs(Splitting& s, const Node& n, Real& r) { return real(abs_of(r, s.operand(n, 0, r))); }
Result angle(Splitting& s, const Node& n, Real& r) {
  const Parts a = s.operand(n, 0, r);
  return real(r.function("aten::atan2", a.imag, a.real));
}
Result sgn(Splitting& s, const Node& n, Real& r) {
  const Parts a = s.operand(n, 0, r);
  const Arg size = abs_of(r, a), is_zero = r.compare("eq", size, Arg(0.0));
  return one({r.where(is_zero, Arg(0.0), r.div(a.real, size)), r.where(is_zero, Arg(0.0), r.div(a.imag, size))});
}
Result complex(Splitting&, const Node& n, Real& r) { return one({r.cast(n.arg(0).value()), r.cast(n.arg(1).value())}); }
Result polar(Splitting&, const Node& n, Real& r) {
  const Arg size = n.arg(0), angle = n.arg(1);
  return one({r.mul(size, r.function("aten::cos", angle)), r.mul(size, r.function("aten::sin", angle))});
}

Result view_as_complex(Splitting& s, const Node& n, Real& r) {
  const Value pairs = n.arg(0).value();
  if (const std::optional<Parts> p = s.seen_as_pairs(pairs)) return one(*p);
  const int64_t last = pairs.meta().dim() - 1;
  static const Op kStack("aten::stack");
  if (pairs.node->op == kStack && wrap(pairs.node->arg(1).to_int(), last + 1) == last) {
    const std::vector<Value> list = pairs.node->arg(0).to_values();
    return one({list.at(0), list.at(1)});
  }
  const auto part = [&](int64_t i) { return r.call("aten::select.int", {pairs, Arg(last), Arg(i)}); };
  return one({part(0), part(1)});
}
Result equal(Splitting& s, const Node& n, Real& r) {
  const Parts a = s.operand(n, 0, r), b = s.operand(n, 1, r);
  return real(r.function("aten::logical_and", r.compare("eq", a.real, b.real), r.compare("eq", a.imag, b.imag)));
}
Result unequal(Splitting& s, const Node& n, Real& r) {
  const Parts a = s.operand(n, 0, r), b = s.operand(n, 1, r);
  return real(r.function("aten::logical_or", r.compare("ne", a.real, b.real), r.compare("ne", a.imag, b.imag)));
}
Result isnan(Splitting& s, const Node& n, Real& r) {
  const Parts a = s.operand(n, 0, r);
  const auto of = [&](const Arg& part) { return r.function("aten::isnan", part); };
  return real(r.function("aten::logical_or", of(a.real), of(a.imag)));
}
Result where(Splitting& s, const Node& n, Real& r) {
  const Parts a = s.operand(n, 1, r), b = s.operand(n, 2, r);
  return one({r.where(n.arg(0), a.real, b.real), r.where(n.arg(0), a.imag, b.imag)});
}

/// The parts of argument `At` as they are: copies, casts.
template <int At>
Result same(Splitting& s, const Node& n, Real& r) {
  if (!is_complex(n.results[0].dtype)) return {};  // ATen warns
  return one(s.operand(n, At, r));
}
Result clone(Splitting& s, const Node& n, Real& r) {
  const bool turns = n.results[0].strides != n.arg(0).value().meta().strides;
  if (turns && !s.reads_split(n)) return {};  // whole numbers are turned faster
  return same<0>(s, n, r);
}
Result filled(const Node& n, const Arg& value, Real& r) {
  const Parts p = parts_of_number(value);
  return one({r.full(n.results[0].sizes, p.real), p.imag});
}
template <int Value>
Result fill_with(Splitting&, const Node& n, Real& r) {
  return filled(n, Arg(Value), r);
}
template <int At>
Result fill_arg(Splitting&, const Node& n, Real& r) {
  const Arg* number = number_at(n, At);
  return number ? filled(n, *number, r) : Result();
}

/// A matrix product, by one of real numbers: a row's pairs (re, im) meet the rows [re im] and [-im re] of the right
/// factor, of all columns first the real and then the imaginary ones. Of the two factors, transposed or not, the one is
/// written out so that takes less writing.
Parts product_of_reals(Splitting& s, const Node& n, Real& r) {  // bmm(left, right)
  const Value a = n.arg(0).value(), b = n.arg(1).value();
  constexpr int64_t rank = 3;
  const int64_t rows = a.meta().sizes[rank - 2], shared = a.meta().sizes[rank - 1], columns = b.meta().sizes[rank - 1];
  const auto swapped = [&](const Arg& v) { return r.call("aten::transpose.int", {v, Arg(rank - 2), Arg(rank - 1)}); };
  const auto is_free = [&](Value v, int64_t dim) { return s.is_in_memory(v, r) && v.meta().strides[dim] == 1; };
  const int64_t direct = 4 * columns + (is_free(a, rank - 1) ? 0 : 2 * rows);
  const int64_t turned = 4 * rows + (is_free(b, rank - 2) ? 0 : 2 * columns);
  const bool turn = turned < direct;
  const auto pairs_of = [&](Value v) {
    if (is_free(v, turn ? rank - 2 : rank - 1)) return r.call("aten::view_as_real", {turn ? swapped(v) : Arg(v)});
    const Parts p = s.tensors(v, r);
    const Arg x = turn ? swapped(p.real) : p.real, y = turn ? swapped(p.imag) : p.imag;
    return r.call("aten::stack", {Arg::values({x.value(), y.value()}), Arg(rank)});
  };
  const Value lines = pairs_of(turn ? b : a).value();
  Parts p = s.tensors(turn ? a : b, r);
  if (turn) p = {swapped(p.real), swapped(p.imag)};
  const std::vector<Value> blocks{p.real.value(), p.imag.value(), r.neg(p.imag).value(), p.real.value()};
  const Value factor = r.call("aten::stack", {Arg::values(blocks), Arg(rank - 1)}).value();
  const int64_t height = turn ? columns : rows, width = turn ? rows : columns;
  Sizes sizes = n.results[0].sizes;
  const auto matrix = [&](Value v, int64_t high, int64_t wide) {
    sizes[rank - 2] = high;
    sizes[rank - 1] = wide;
    return s.writing().reshape(v, sizes);
  };
  const Arg product = r.call("aten::bmm", {matrix(lines, height, 2 * shared), matrix(factor, 2 * shared, 2 * width)});
  const auto part = [&](int64_t i) {
    const Arg v = r.call("aten::slice.Tensor", {product, Arg(rank - 1), Arg(i * width), Arg((i + 1) * width), Arg(1)});
    return turn ? swapped(v) : v;
  };
  return {part(0), part(1)};
}
/// For what libraries are slow with: tiny matrices, and those that lie in memory with gaps between both rows and
/// columns.
Result matrix_product(Splitting& s, const Node& n, Real& r) {
  constexpr int64_t kTiny = 8, kFewest = 4;
  const TensorMeta &a = n.arg(0).value().meta(), &b = n.arg(1).value().meta();
  const std::initializer_list<int64_t> sizes{a.sizes[1], a.sizes[2], b.sizes[2]};
  const auto has_gaps = [&](const Arg& factor) {
    const TensorMeta& m = factor.value().meta();
    return s.is_in_memory(factor.value(), r) && m.strides[1] != 1 && m.strides[2] != 1;
  };
  const bool strided = (has_gaps(n.arg(0)) || has_gaps(n.arg(1))) && std::ranges::min(sizes) >= kFewest;
  if (a.numel() == 0 || b.numel() == 0 || !(strided || std::ranges::max(sizes) <= kTiny)) return {};
  return one(product_of_reals(s, n, r));
}

/// What moves or adds up elements does so with each part. `Number`: the argument that is an element, if a number.
template <int Number = -1, int Type = -1>
Result each_part(Splitting& s, const Node& n, Real& r) {
  std::vector<Arg> args[2] = {n.args, n.args};
  const auto put = [&](Arg& real, Arg& imag) {
    const Parts p = s.tensors(real, r);
    real = p.real;
    imag = p.imag;
  };
  const auto is_complex_value = [](const Arg& a) {
    return a.is_value() && a.value() && is_complex(a.value().meta().dtype);
  };
  for (size_t i = 0; i < n.args.size(); ++i) {
    Arg &x = args[0][i], &y = args[1][i];
    if (Type >= 0 && i == static_cast<size_t>(Type)) {
      x = y = Arg();  // a cast has been made
    } else if (Number >= 0 && i == static_cast<size_t>(Number)) {
      const Arg* number = number_at(n, i);
      if (!number) return {};
      const Parts p = parts_of_number(*number);
      x = p.real;
      y = p.imag;
    } else if (is_complex_value(x)) {
      put(x, y);
    } else if (x.is_list() && std::any_of(x.list().begin(), x.list().end(), is_complex_value)) {
      auto &xs = std::get<Arg::List>(x.data), &ys = std::get<Arg::List>(y.data);
      for (size_t k = 0; k < xs.size(); ++k) put(xs[k], ys[k]);
    }
  }
  std::vector<Parts> out(n.results.size());
  Node* const reals = s.writing().node(n.op.name(), args[0]);
  Node* const imags = s.writing().node(n.op.name(), args[1]);
  for (uint32_t i = 0; i < out.size(); ++i) out[i] = {reals->out(i), imags->out(i)};
  return out;
}
/// Whole numbers are copied faster than parts are.
template <int Number = -1>
Result each_part_of_split(Splitting& s, const Node& n, Real& r) {
  return s.reads_split(n) ? each_part<Number>(s, n, r) : Result();
}
Result index_add(Splitting& s, const Node& n, Real& r) { return n.arg(4) == Arg(1) ? each_part<>(s, n, r) : Result(); }
Result reshape(Splitting& s, const Node& n, Real& r) {
  const Parts p = s.tensors(n.arg(0), r);
  const auto of = [&](const Arg& part) { return s.writing().reshape(part.value(), n.results[0].sizes); };
  return one({of(p.real), of(p.imag)});
}

/// Also of what is seen as pairs.
Result select(Splitting& s, const Node& n, Real& r) {
  const Value from = n.arg(0).value();
  if (is_complex(from.meta().dtype)) return each_part<>(s, n, r);
  const std::optional<Parts> p = s.seen_as_pairs(from);
  const int64_t rank = from.meta().dim();
  if (!p || wrap(n.arg(1).to_int(), rank) != rank - 1) return {};
  return real(wrap(n.arg(2).to_int(), 2) == 0 ? p->real : p->imag);
}

struct Row {
  const char* op;
  Rule rule;
};
const Row kRows[] = {
    {"aten::add.Tensor", sum_of<1, false>},
    {"aten::add.Scalar", sum_of<1, false>},
    {"aten::sub.Tensor", sum_of<-1, false>},
    {"aten::sub.Scalar", sum_of<-1, false>},
    {"aten::rsub.Tensor", sum_of<-1, true>},
    {"aten::rsub.Scalar", sum_of<-1, true>},
    {"aten::mul.Tensor", product},
    {"aten::mul.Scalar", product},
    {"aten::div.Tensor", quotient},
    {"aten::div.Scalar", quotient},
    {"aten::reciprocal", reciprocal},
    {"aten::pow.Tensor_Scalar", power},
    {"aten::square", square},
    {"aten::neg", neg},
    {"aten::_neg_view", neg_view},
    {"aten::_conj", conj},
    {"aten::_conj_physical", conj},
    {"aten::conj_physical", conj},
    {"aten::exp", exp},
    {"aten::abs", abs},
    {"aten::angle", angle},
    {"aten::sgn", sgn},
    {"aten::complex", complex},
    {"aten::polar", polar},
    {"aten::view_as_complex", view_as_complex},
    {"aten::eq.Tensor", equal},
    {"aten::eq.Scalar", equal},
    {"aten::ne.Tensor", unequal},
    {"aten::ne.Scalar", unequal},
    {"aten::isnan", isnan},
    {"aten::where.self", where},
    {"aten::masked_fill.Scalar", each_part<2>},

    {"aten::_to_copy", same<0>},
    {"aten::clone", clone},
    {"aten::copy", same<1>},
    {"aten::alias", same<0>},
    {"aten::detach", same<0>},
    {"aten::lift_fresh", same<0>},
    {"aten::zeros", fill_with<0>},
    {"aten::zeros_like", fill_with<0>},
    {"aten::new_zeros", fill_with<0>},
    {"aten::ones", fill_with<1>},
    {"aten::ones_like", fill_with<1>},
    {"aten::new_ones", fill_with<1>},
    {"aten::full", fill_arg<1>},
    {"aten::full_like", fill_arg<1>},
    {"aten::new_full", fill_arg<2>},
    {"aten::fill.Scalar", fill_arg<1>},
    {"aten::scalar_tensor", fill_arg<0>},

    {"aten::sum", each_part<-1, 1>},
    {"aten::sum.dim_IntList", each_part<-1, 3>},
    {"aten::mean", each_part<-1, 1>},
    {"aten::mean.dim", each_part<-1, 3>},
    {"aten::cumsum", each_part<-1, 2>},
    {"aten::bmm", matrix_product},

    {"aten::view", reshape},
    {"aten::_unsafe_view", reshape},
    {"aten::_reshape_alias", reshape},
    {"aten::permute", each_part<>},
    {"aten::transpose.int", each_part<>},
    {"aten::t", each_part<>},
    {"aten::expand", each_part<>},
    {"aten::slice.Tensor", each_part<>},
    {"aten::select.int", select},
    {"aten::squeeze", each_part<>},
    {"aten::squeeze.dim", each_part<>},
    {"aten::squeeze.dims", each_part<>},
    {"aten::unsqueeze", each_part<>},
    {"aten::unfold", each_part<>},
    {"aten::diagonal", each_part<>},
    {"aten::split.Tensor", each_part<>},
    {"aten::split_with_sizes", each_part<>},
    {"aten::unbind.int", each_part<>},

    {"aten::cat", each_part_of_split<>},
    {"aten::stack", each_part_of_split<>},
    {"aten::constant_pad_nd", each_part_of_split<2>},
    {"aten::slice_backward", each_part<>},
    {"aten::slice_scatter", each_part<>},
    {"aten::select_backward", each_part<>},
    {"aten::select_scatter", each_part<>},
    {"aten::diagonal_backward", each_part<>},
    {"aten::diagonal_scatter", each_part<>},
    {"aten::flip", each_part<>},
    {"aten::roll", each_part<>},
    {"aten::repeat", each_part<>},
    {"aten::tril", each_part<>},
    {"aten::triu", each_part<>},
    {"aten::index.Tensor", each_part<>},
    {"aten::_unsafe_index.Tensor", each_part<>},
    {"aten::index_put", each_part<>},
    {"aten::_unsafe_index_put", each_part<>},
    {"aten::index_select", each_part<>},
    {"aten::index_add", index_add},
    {"aten::index_copy", each_part<>},
    {"aten::index_fill.int_Scalar", each_part<3>},
    {"aten::embedding", each_part<>},
    {"aten::embedding_dense_backward", each_part<>},
    {"aten::gather", each_part<>},
    {"aten::scatter.src", each_part<>},
    {"aten::scatter.value", each_part<3>},
    {"aten::scatter_add", each_part<>},
};

const std::unordered_map<Op, Rule>& table() {
  static const auto* rules = [] {
    auto* t = new std::unordered_map<Op, Rule>;
    for (const Row& row : kRows) (*t)[Op(row.op)] = row.rule;
    return t;
  }();
  return *rules;
}

}  // namespace

bool split_complex(Graph& g) { return Splitting(g).run(); }

}  // namespace kiln::graph
