// What belongs to no family of its own.
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

const RuleRow kRows[] = {
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
