// Products with something added or reshaped around: the product stays a library call, the rest fuses with neighbours.
#include <algorithm>

#include "decompose/builder.h"
#include "ops/ops.h"

namespace kiln::decompose {
namespace {

// beta*self + alpha*product.
Value combine(Builder& b, Value self, Value product, const Arg& beta, const Arg& alpha) {
  if (alpha.to_double() != 1) product = b.mul(product, alpha);
  if (beta.to_double() == 0) return product;
  if (beta.to_double() != 1) self = b.mul(self, beta);
  return b.add(product, self);
}

bool rounds(const Node& n) {
  // Half products keep their sum in float32 until the end inside the library.
  const DType t = n.results[0].dtype;
  return t == DType::Float16 || t == DType::BFloat16 || !is_floating(t);
}

// A bias that is one row is added by the product's own kernel.
bool is_row(const Node& n) {
  return n.arg(0).value().meta().dim() == 1 && n.arg(3).to_double() == 1 && n.arg(4).to_double() == 1;
}

/// Whether `v` is, maybe seen in another shape, what factors much smaller than it give: it is cheaper made anew where
/// it is needed than written and read.
bool is_outer_product(Value v) {
  static const graph::Op mul("aten::mul.Tensor"), mm("aten::mm"), bmm("aten::bmm"), unsafe_view("aten::_unsafe_view");
  while (ops::is_view(v.node->op) || v.node->op == unsafe_view) v = v.node->arg(0).value();
  if (!(v.node->op == mul || v.node->op == mm || v.node->op == bmm)) return false;
  constexpr int64_t kFew = 8;
  return std::all_of(v.node->args.begin(), v.node->args.begin() + 2,
                     [&](const Arg& a) { return a.is_value() && a.value().meta().numel() * kFew <= v.meta().numel(); });
}

/// How the product of a matrix and one row or column is computed.
enum class Form {
  Library,
  Sum,  // of element-wise products, which fuse with neighbours
  Row,  // of a column: the transposed product, since the library streams matrices past rows
};

/// For `matrix`, summed over its dimension `summed`. Measured on AVX-512: a generated sum along memory beats the
/// library's unless it is very long, and any sum beats it where the matrices are so small that calls are what costs.
Form form_of(const TensorMeta& matrix, int64_t summed, bool row) {
  constexpr int64_t kLongSum = 2048, kSmallMatrix = 1024, kSmall = 1 << 15;
  const int64_t rank = matrix.dim(), elements = matrix.sizes[rank - 2] * matrix.sizes[rank - 1];
  const bool batch = matrix.numel() > elements, along_memory = matrix.strides[summed] == 1;
  if (matrix.numel() <= kSmall || (batch && elements < kSmallMatrix)) return Form::Sum;
  if (along_memory && matrix.sizes[summed] <= kLongSum && (batch || !row)) return Form::Sum;
  return row ? Form::Library : Form::Row;
}

/// A batch of products so small that calls are what costs: spelled out, or as one sum; null if they are not. A sum runs
/// along rows of `y`, which lie in memory one way or the other.
Value tiny_products(Builder& b, Value x, Value y) {
  constexpr int64_t kTiny = 8192, kFew = 8, kTerms = 16;
  const TensorMeta &mx = x.meta(), &my = y.meta();
  const int64_t rank = mx.dim(), left = rank - 2, right = rank - 1;
  const int64_t m = mx.sizes[left], k = mx.sizes[right], n = my.sizes[right];
  if (rank != 3 || m * n * k > kTiny) return {};
  const bool along_rows = my.strides[right] == 1;
  if ((k <= kFew && n <= kTerms) || (k <= kTerms && along_rows)) {
    const auto slice = [&](Value v, int64_t dim, int64_t i) {
      return b.call("aten::slice.Tensor", {v, Arg(dim), Arg(i), Arg(i + 1), Arg(1)});
    };
    Value sum = b.mul(slice(x, right, 0), slice(y, left, 0));
    for (int64_t i = 1; i < k; ++i) sum = b.add(sum, b.mul(slice(x, right, i), slice(y, left, i)));
    return sum;
  }
  if (!along_rows && n > kFew) return {};
  return b.sum(b.mul(b.unsqueeze(x, right + 1), b.unsqueeze(y, left)), {right}, false);
}

/// [.., m, k] x [.., k, n]: with k = 1 each element is one product, and with m = 1 or n = 1 it may be a sum (see Form).
Value fused_product(Builder& b, const Node& n, Value x, Value y) {
  const int64_t rank = x.meta().dim(), left = rank - 2, right = rank - 1;
  if (x.meta().sizes[right] == 1) return b.mul(x, y);
  const bool row = x.meta().sizes[left] == 1, column = y.meta().sizes[right] == 1;
  if (rounds(n) || x.meta().sizes[right] == 0) return {};
  if (row == column) return tiny_products(b, x, y);
  const auto turned = [&](Value v) { return b.call("aten::transpose.int", {v, Arg(left), Arg(right)}); };
  Form form = row ? form_of(y.meta(), left, true) : form_of(x.meta(), right, false);
  if (is_outer_product(row ? y : x)) form = Form::Sum;
  if (form == Form::Library) return {};
  if (form == Form::Row) return turned(b.call(rank == 3 ? "aten::bmm" : "aten::mm", {turned(y), turned(x)}));
  return row ? b.sum(b.mul(turned(x), y), {left}, true) : b.sum(b.mul(x, turned(y)), {right}, true);
}

/// A batch of matrices by one and the same (F.linear of a tensor whose rows do not follow each other, before it is
/// copied): the product of all their rows by it. Null if it is no such batch.
Value product_of_rows(Builder& b, Value x, Value y) {
  const TensorMeta &mx = x.meta(), &my = y.meta();
  if (mx.dim() != 3 || mx.sizes[0] == 1 || mx.numel() == 0 || my.numel() == 0 || my.strides[0] != 0) return {};
  if (mx.strides[0] != mx.sizes[1] * mx.strides[1]) return {};
  const Value rows = b.view(x, {mx.sizes[0] * mx.sizes[1], mx.sizes[2]});
  const Value xy = b.call("aten::mm", {rows, b.call("aten::select.int", {y, Arg(0), Arg(0)})});
  return b.view(xy, {mx.sizes[0], mx.sizes[1], my.sizes[2]});
}

bool product(Builder& b, const Node& n, std::vector<Value>& out) {
  const Value x = n.arg(0).value(), y = n.arg(1).value();
  out = {fused_product(b, n, x, y)};
  if (!out[0]) out[0] = product_of_rows(b, x, y);
  return static_cast<bool>(out[0]);
}

bool addmm(Builder& b, const Node& n, std::vector<Value>& out) {
  const Value x = n.arg(1).value(), y = n.arg(2).value();
  if (rounds(n)) return false;
  Value xy = fused_product(b, n, x, y);
  if (!xy && is_row(n)) return false;
  if (!xy) xy = b.call("aten::mm", {x, y});
  out = {combine(b, n.arg(0).value(), xy, n.arg(3), n.arg(4))};
  return true;
}
bool baddbmm(Builder& b, const Node& n, std::vector<Value>& out) {
  if (rounds(n)) return false;
  out = {combine(b, n.arg(0).value(), b.call("aten::bmm", {n.arg(1), n.arg(2)}), n.arg(3), n.arg(4))};
  return true;
}

/// A matrix by a vector is one by a column.
Value matrix_vector(Builder& b, Value matrix, Value vector) {
  return b.call("aten::squeeze.dim", {b.call("aten::mm", {matrix, b.unsqueeze(vector, 1)}), Arg(1)});
}
bool mv(Builder& b, const Node& n, std::vector<Value>& out) {
  out = {matrix_vector(b, n.arg(0).value(), n.arg(1).value())};
  return true;
}
bool addmv(Builder& b, const Node& n, std::vector<Value>& out) {
  if (rounds(n)) return false;
  out = {combine(b, n.arg(0).value(), matrix_vector(b, n.arg(1).value(), n.arg(2).value()), n.arg(3), n.arg(4))};
  return true;
}
bool addr(Builder& b, const Node& n, std::vector<Value>& out) {
  if (rounds(n)) return false;
  const Value outer = b.mul(b.unsqueeze(n.arg(1).value(), 1), n.arg(2).value());
  out = {combine(b, n.arg(0).value(), outer, n.arg(3), n.arg(4))};
  return true;
}

/// (grad_output, input, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups, mask): the
/// bias' gradient is a sum that fuses with what makes grad_output, and that is as exact as any other.
bool convolution_backward(Builder& b, const Node& n, std::vector<Value>& out) {
  if (!n.results[2].defined) return false;
  const Value grad = n.arg(0).value();
  Sizes dims{0};
  for (int64_t d = 2; d < grad.meta().dim(); ++d) dims.push_back(d);
  out.resize(3);
  if (n.results[0].defined || n.results[1].defined) {
    std::vector<Arg> args = n.args;
    args[3] = Arg();
    args[10] = Arg(std::vector<Arg>{n.arg(10).list()[0], n.arg(10).list()[1], Arg(false)});
    std::vector<TensorMeta> results = n.results;
    results[2] = ops::undefined_meta();
    Node* const rest = b.raw_node("aten::convolution_backward", std::move(args), std::move(results));
    for (uint32_t i = 0; i < 2; ++i)
      if (n.results[i].defined) out[i] = rest->out(i);
  }
  out[2] = b.to(b.sum(b.up(grad), dims, false), n.results[2].dtype);
  return true;
}

const RuleRow kRows[] = {
    {"aten::convolution_backward", convolution_backward},
    {"aten::addmm", addmm},
    {"aten::baddbmm", baddbmm},
    {"aten::mm", product},
    {"aten::bmm", product},
    {"aten::mv", mv},
    {"aten::addmv", addmv},
    {"aten::addr", addr},
};

}  // namespace

std::span<const RuleRow> linear_rules() { return kRows; }

}  // namespace kiln::decompose
