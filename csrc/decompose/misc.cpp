// What belongs to no family of its own.
#include <cmath>
#include <numeric>

#include "decompose/builder.h"

namespace kiln::decompose {
namespace {

bool dropout_backward(Builder& b, const Node& n, std::vector<Value>& out) {  // (grad, mask, scale)
  out = {b.mul(b.mul(n.arg(0), b.to(n.arg(1).value(), n.results[0].dtype)), n.arg(2))};
  return true;
}

bool logsumexp(Builder& b, const Node& n, std::vector<Value>& out) {  // (self, dims, keepdim)
  const Value x = n.arg(0).value();
  if (x.meta().numel() == 0 || x.meta().dim() == 0 || !is_floating(x.meta().dtype)) return false;
  const Sizes dims = n.arg(1).to_ints();
  const Value top = b.call("aten::amax", {x, Arg::ints(dims), Arg(true)});
  // A row of infinities must not become NaN.
  const Value finite = b.ne(b.call("aten::abs", {top}), Arg(std::numeric_limits<double>::infinity()));
  const Value shift = b.where(finite, top, b.full({}, 0.0, top.meta().dtype));
  const Value sum = b.sum(b.exp(b.sub(x, shift)), dims, true);
  out = {b.view(b.add(b.log(sum), shift), n.results[0].sizes)};
  return true;
}

bool glu(Builder& b, const Node& n, std::vector<Value>& out) {  // (self, dim)
  const Value x = n.arg(0).value();
  const int64_t dim = wrap(n.arg(1).to_int(), x.meta().dim()), half = x.meta().sizes[dim] / 2;
  auto part = [&](int64_t i) {
    return b.call("aten::slice.Tensor", {x, Arg(dim), Arg(i * half), Arg((i + 1) * half), Arg(1)});
  };
  out = {b.to(b.mul(b.up(part(0)), b.sigmoid(b.up(part(1)))), n.results[0].dtype)};
  return true;
}
bool glu_backward(Builder& b, const Node& n, std::vector<Value>& out) {  // (grad, self, dim)
  const Value x = n.arg(1).value();
  const int64_t dim = wrap(n.arg(2).to_int(), x.meta().dim()), half = x.meta().sizes[dim] / 2;
  auto part = [&](int64_t i) {
    return b.up(b.call("aten::slice.Tensor", {x, Arg(dim), Arg(i * half), Arg((i + 1) * half), Arg(1)}));
  };
  const Value g = b.up(n.arg(0).value()), s = b.sigmoid(part(1)), gs = b.mul(g, s);
  const Value second = b.mul(b.mul(gs, b.sub(b.full({}, 1.0, s.meta().dtype), s)), part(0));
  out = {b.to(b.call("aten::cat", {Arg::values({gs, second}), Arg(dim)}), n.results[0].dtype)};
  return true;
}

bool pixel_shuffle(Builder& b, const Node& n, std::vector<Value>& out) {  // (self, factor)
  const Value x = n.arg(0).value();
  const int64_t r = n.arg(1).to_int();
  if (x.meta().dim() != 4) return false;
  const auto& s = x.meta().sizes;
  const Value split = b.view(x, {s[0], s[1] / (r * r), r, r, s[2], s[3]});
  out = {b.view(b.call("aten::permute", {split, Arg::ints({0, 1, 4, 2, 5, 3})}), n.results[0].sizes)};
  return true;
}

// A matrix product with a vector inside.
bool dot(Builder& b, const Node& n, std::vector<Value>& out) {
  out = {b.sum_all(b.mul(n.arg(0), n.arg(1)))};
  return is_floating(n.results[0].dtype);
}

// linalg.vector_norm(self, ord, dim, keepdim, dtype) for orders other than those that are one reduction.
bool vector_norm(Builder& b, const Node& n, std::vector<Value>& out) {
  const DType t = n.results[0].dtype;
  Value x = n.arg(0).value();
  if (!n.arg(1).is_number() || !is_floating(t) || !is_floating(x.meta().dtype)) return false;
  const double p = n.arg(1).to_double();
  if (p == 1 || p == 2 || p < 0 || !std::isfinite(p)) return false;
  Sizes dims(static_cast<size_t>(x.meta().dim()));
  std::iota(dims.begin(), dims.end(), 0);
  if (!n.arg(2).is_none()) dims = n.arg(2).to_ints();
  if (dims.empty()) return false;
  x = b.up(b.to(x, t));
  const bool keep = n.arg(3).to_bool();
  if (p == 0) {
    out = {b.to(b.sum(b.to(b.ne(x, Arg(0.0)), x.meta().dtype), dims, keep), t)};
    return true;
  }
  const auto power = [&](Value v, double e) { return b.call("aten::pow.Tensor_Scalar", {v, Arg(e)}); };
  const Value powers = p == 4 ? power(power(x, 2), 2) : power(b.call("aten::abs", {x}), p);
  out = {b.to(power(b.sum(powers, dims, keep), 1 / p), t)};
  return true;
}

// linalg.cross(self, other, dim)
bool cross(Builder& b, const Node& n, std::vector<Value>& out) {
  const Sizes& s = n.results[0].sizes;
  const Value x = b.expand(n.arg(0).value(), s), y = b.expand(n.arg(1).value(), s);
  const int64_t dim = wrap(n.args.size() > 2 ? n.arg(2).to_int() : -1, static_cast<int64_t>(s.size()));
  const auto part = [&](Value v, int64_t i) {
    return b.call("aten::slice.Tensor", {v, Arg(dim), Arg(i % 3), Arg(i % 3 + 1), Arg(1)});
  };
  std::vector<Value> parts;
  for (int64_t i = 0; i < 3; ++i)
    parts.push_back(b.sub(b.mul(part(x, i + 1), part(y, i + 2)), b.mul(part(x, i + 2), part(y, i + 1))));
  out = {b.call("aten::cat", {Arg::values(parts), Arg(dim)})};
  return true;
}

// Without the vectors that nobody reads, as eager computes them when it keeps nothing for a backward: ATen gives empty
// ones then.
TensorMeta nothing(TensorMeta like) {
  like.sizes = {0};
  like.strides = {1};
  return like;
}
// (A, full_matrices, compute_uv, driver) -> (U, S, Vh)
bool singular_values(Builder& b, const Node& n, std::vector<Value>& out) {
  if (!n.arg(2).to_bool() || b.is_used(n, 0) || b.is_used(n, 2)) return false;
  Node* const values = b.raw_node("aten::_linalg_svd", {n.arg(0), n.arg(1), Arg(false), n.arg(3)},
                                  {nothing(n.results[0]), n.results[1], nothing(n.results[2])});
  out = {{}, values->out(1), {}};
  return true;
}
// (A, UPLO, compute_v) -> (values, vectors)
bool eigenvalues(Builder& b, const Node& n, std::vector<Value>& out) {
  if (!n.arg(2).to_bool() || b.is_used(n, 1)) return false;
  Node* const values =
      b.raw_node("aten::_linalg_eigh", {n.arg(0), n.arg(1), Arg(false)}, {n.results[0], nothing(n.results[1])});
  out = {values->out(0), {}};
  return true;
}

const RuleRow kRows[] = {
    {"aten::_linalg_svd", singular_values},
    {"aten::_linalg_eigh", eigenvalues},
    {"aten::linalg_vector_norm", vector_norm},
    {"aten::linalg_cross", cross},
    {"aten::native_dropout_backward", dropout_backward},
    {"aten::logsumexp", logsumexp},
    {"aten::glu", glu},
    {"aten::glu_backward", glu_backward},
    {"aten::pixel_shuffle", pixel_shuffle},
    {"aten::dot", dot},
};

}  // namespace

std::span<const RuleRow> misc_rules() { return kRows; }

}  // namespace kiln::decompose
