// Attention of one query, as decoding with a cache of keys needs it, and the operators that nn.TransformerEncoderLayer
// and nn.MultiheadAttention call in place of their own code in inference: spelled out, their products keep packed
// weights, and what stands between these fuses.
#include <cmath>
#include <limits>

#include "decompose/builder.h"

namespace kiln::decompose {
namespace {

// Half types are rounded inside the operator where the calls that it stands for round elsewhere.
bool is_exact(const Node& n) {
  const TensorMeta& m = n.results[0];
  return (m.dtype == DType::Float32 || m.dtype == DType::Float64) && m.dim() == 3 && m.numel() > 0;
}

/// x [B, L, E] times w [F, E] transposed, plus b [F].
Value linear(Builder& b, Value x, Value w, Value bias) {
  const Sizes s = x.meta().sizes;
  const Value rows = b.view(x, {s[0] * s[1], s[2]});
  const Value t = b.call("aten::permute", {w, Arg::ints({1, 0})});
  return b.view(b.call("aten::addmm", {bias, rows, t, Arg(1), Arg(1)}), {s[0], s[1], w.meta().sizes[0]});
}

Value layer_norm(Builder& b, Value x, Value w, Value bias, const Arg& eps) {
  return b.call("aten::native_layer_norm", {x, Arg::ints({x.meta().sizes[2]}), w, bias, eps});
}

struct Heads {
  Value q, k, v;  // [B, H, L, D]
};

/// Queries, keys and values of x [B, L, E] from one product with w [3 E, E].
Heads heads_of(Builder& b, Value x, Value w, Value bias, int64_t heads) {
  const Sizes s = x.meta().sizes;
  const Value all = b.view(linear(b, x, w, bias), {s[0], s[1], 3, heads, s[2] / heads});
  const auto part = [&](int64_t i) {
    return b.call("aten::permute", {b.call("aten::select.int", {all, Arg(2), Arg(i)}), Arg::ints({0, 2, 1, 3})});
  };
  return {part(0), part(1), part(2)};
}

/// [B, H, L, D] to [B, L, E], times the last projection.
Value project(Builder& b, Value heads, Value w, Value bias) {
  const Sizes s = heads.meta().sizes;
  const Value lines = b.call("aten::permute", {heads, Arg::ints({0, 2, 1, 3})});
  const Value dense = b.call("aten::clone", {lines, graph::MemoryFormat::Contiguous});
  return linear(b, b.view(dense, {s[0], s[2], s[1] * s[3]}), w, bias);
}

/// Which keys are masked, as bools that expand to [B, H, L, L]; null if none are. A mask of the operators, the argument
/// `at`, is [L, L], [B, L] or [B, H, L, L], as its type says, and any number but zero masks: also one that would be
/// added elsewhere.
struct Masked {
  bool known = true;  // false: a mask of another kind
  Value keys;
};
Masked masked(Builder& b, const Node& n, size_t at, size_t type, const Heads& h) {
  if (!has(n, at)) return {};
  const Value mask = n.arg(at).value();
  const Sizes& s = mask.meta().sizes;
  const Sizes& q = h.q.meta().sizes;
  const Sizes square{q[2], q[2]}, padding{q[0], q[2]}, all{q[0], q[1], q[2], q[2]};
  if (n.arg(type).is_none()) return {false, {}};
  const int64_t kind = n.arg(type).to_int();
  if (kind < 0 || kind > 2 || s != (kind == 0 ? square : kind == 1 ? padding : all)) return {false, {}};
  const Value keys = mask.meta().dtype == DType::Bool ? mask : b.ne(mask, Arg(0));
  if (kind == 2) return {true, keys};
  return {true, b.unsqueeze(b.unsqueeze(keys, kind), kind)};
}

Value attention(Builder& b, const Heads& h, Value keys) {
  if (!keys)
    return b.call("aten::_scaled_dot_product_flash_attention_for_cpu",
                  {h.q, h.k, h.v, Arg(0.0), Arg(false), Arg(), Arg()});
  const DType t = h.q.meta().dtype;
  const auto filled = [&](double value) { return b.full({}, Arg(value), t); };
  const Value bias = b.where(keys, filled(-std::numeric_limits<double>::infinity()), filled(0));
  const Value y =
      b.call("aten::_scaled_dot_product_flash_attention_for_cpu", {h.q, h.k, h.v, Arg(0.0), Arg(false), bias, Arg()});
  // A query with no key at all: the operators give NaN, where this attention gives zero.
  const Value none = b.call("aten::all.dim", {keys, Arg(3), Arg(true)});
  return b.where(none, Arg(std::numeric_limits<double>::quiet_NaN()), y);
}

// (query, key, value, dropout_p, is_causal, attn_mask, scale): keys and values are read once, past one row each, so
// that nothing is gained by blocks of them.
bool one_query(Builder& b, const Node& n, std::vector<Value>& out) {
  const Value q = n.arg(0).value(), k = n.arg(1).value(), v = n.arg(2).value();
  const Sizes &s = q.meta().sizes, &keys = k.meta().sizes;
  const DType t = q.meta().dtype;
  if (s.size() != 4 || s[2] != 1 || (t != DType::Float32 && t != DType::Float64)) return false;
  if (n.arg(3).to_double() != 0 || n.arg(4).to_bool() || n.arg(6).is_value()) return false;
  if (keys != v.meta().sizes || keys[3] != s[3] || k.meta().numel() == 0 || s[1] % keys[1] != 0) return false;
  if (b.is_used(n, 1)) return false;  // the sums of the rows, which a backward asks for
  // Heads that share keys stand beside each other: [B, H of keys, heads that share, ..].
  const int64_t shared = s[1] / keys[1];
  const double scale = n.arg(6).is_none() ? 1 / std::sqrt(static_cast<double>(s[3])) : n.arg(6).to_double();
  const Value query = b.view(b.mul(q, Arg(scale)), {s[0], keys[1], shared, 1, s[3]});
  Value scores = b.sum(b.mul(query, b.unsqueeze(k, 2)), {4}, false);
  if (has(n, 5)) {
    Value mask = n.arg(5).value();
    Sizes m = mask.meta().sizes;
    if (mask.meta().dtype != t || m.size() > 4 || m.empty()) return false;
    while (m.size() < 4) m.insert(m.begin(), 1);
    if (shared > 1) m = m[1] == 1 ? Sizes{m[0], 1, 1, m[3]} : Sizes{m[0], keys[1], shared, m[3]};
    scores = b.add(scores, b.view(mask, m));
  }
  // Without any key the result is zero.
  const Value weights = has(n, 5) ? b.call("aten::_safe_softmax", {scores, Arg(3), Arg()})
                                  : b.call("aten::_softmax", {scores, Arg(3), Arg(false)});
  out = {b.view(b.sum(b.mul(b.unsqueeze(weights, 4), b.unsqueeze(v, 2)), {3}, false), s), {}};
  return true;
}

// (src, embed_dim, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias, use_gelu, norm_first, eps, norm_weight_1,
//  norm_bias_1, norm_weight_2, norm_bias_2, ffn_weight_1, ffn_bias_1, ffn_weight_2, ffn_bias_2, mask, mask_type)
bool encoder_layer(Builder& b, const Node& n, std::vector<Value>& out) {
  if (!is_exact(n)) return false;
  const auto value = [&](size_t i) { return n.arg(i).value(); };
  const auto norm = [&](Value x, size_t weight) {
    return layer_norm(b, x, value(weight), value(weight + 1), n.arg(9));
  };
  const bool before = n.arg(8).as<bool>();
  const Value src = value(0);
  const Heads heads = heads_of(b, before ? norm(src, 10) : src, value(3), value(4), n.arg(2).to_int());
  const Masked mask = masked(b, n, 18, 19, heads);
  if (!mask.known) return false;
  Value x = b.add(project(b, attention(b, heads, mask.keys), value(5), value(6)), src);
  if (!before) x = norm(x, 10);
  Value y = linear(b, before ? norm(x, 12) : x, value(14), value(15));
  y = n.arg(7).as<bool>() ? b.call("aten::gelu", {y, Arg("none")}) : b.call("aten::relu", {y});
  x = b.add(linear(b, y, value(16), value(17)), x);
  out = {before ? x : norm(x, 12)};
  return true;
}

// (query, key, value, embed_dim, num_head, qkv_weight, qkv_bias, proj_weight, proj_bias, mask, need_weights,
//  average_attn_weights, mask_type)
bool multi_head_attention(Builder& b, const Node& n, std::vector<Value>& out) {
  const auto value = [&](size_t i) { return n.arg(i).value(); };
  if (!is_exact(n) || value(0) != value(1) || value(0) != value(2)) return false;
  const int64_t heads = n.arg(4).to_int();
  const Heads h = heads_of(b, value(0), value(5), value(6), heads);
  const Masked mask = masked(b, n, 9, 12, h);
  if (!mask.known) return false;
  Value weights, result;
  if (n.arg(10).as<bool>()) {
    const Sizes s = h.q.meta().sizes;
    const Value t = b.call("aten::permute", {h.k, Arg::ints({0, 1, 3, 2})});
    const double scale = 1 / std::sqrt(static_cast<double>(s[3]));
    const auto matrices = [&](Value x) {
      const Sizes m = x.meta().sizes;
      return b.view(b.call("aten::clone", {x, graph::MemoryFormat::Contiguous}), {m[0] * m[1], m[2], m[3]});
    };
    Value scores = b.call("aten::bmm", {matrices(b.mul(h.q, scale)), matrices(t)});
    if (mask.keys) {
      scores = b.view(scores, {s[0], s[1], s[2], s[2]});
      scores = b.where(mask.keys, Arg(-std::numeric_limits<double>::infinity()), scores);
      scores = b.view(scores, {s[0] * s[1], s[2], s[2]});
    }
    weights = b.call("aten::_softmax", {scores, Arg(2), Arg(false)});
    result = b.view(b.call("aten::bmm", {weights, matrices(h.v)}), s);
    weights = b.view(weights, {s[0], s[1], s[2], s[2]});
    if (n.arg(11).as<bool>()) weights = b.div(b.sum(weights, {1}, false), static_cast<double>(heads));
  } else {
    result = attention(b, h, mask.keys);
  }
  out = {project(b, result, value(7), value(8)), weights};
  return true;
}

const RuleRow kRows[] = {
    {"aten::_scaled_dot_product_flash_attention_for_cpu", one_query},
    {"aten::_transformer_encoder_layer_fwd", encoder_layer},
    {"aten::_native_multi_head_attention", multi_head_attention},
};

}  // namespace

std::span<const RuleRow> attention_rules() { return kRows; }

}  // namespace kiln::decompose
