#include "runtime/attention/attention.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace kiln::runtime::attention {
namespace {

template <class T>
Tensor4<T> view(const at::Tensor& t) {
  return {t.data_ptr<float>(), t.stride(0), t.stride(1), t.stride(2)};
}

struct Case {
  int64_t batch, heads, kv_heads, queries, keys, size;
  bool causal;
  enum class Masked { No, Everywhere, ByKey } masked = Masked::No;
};
using Masked = Case::Masked;
const Case kCases[] = {{2, 3, 3, 128, 128, 64, true},
                       {1, 4, 2, 70, 70, 32, true},
                       {2, 2, 2, 65, 130, 16, false},
                       {1, 1, 1, 1, 1, 8, true},
                       {1, 2, 1, 5, 1100, 48, false},
                       {1, 1, 1, 600, 1030, 20, true},
                       {1, 2, 2, 200, 100, 7, true},
                       {2, 2, 2, 9, 300, 80, true},
                       {2, 2, 2, 70, 600, 16, false, Masked::Everywhere},
                       {2, 4, 2, 33, 40, 8, false, Masked::ByKey},
                       {1, 2, 2, 90, 90, 24, true, Masked::Everywhere}};

at::Tensor view(const at::Tensor& mask, Mask& to) {
  const auto stride = [&](int64_t i) { return mask.size(i) == 1 ? 0 : mask.stride(i); };
  to = {mask.data_ptr<float>(), stride(0), stride(1), stride(2), stride(3)};
  return mask;
}

// Against softmax written out in double precision, with heads interleaved in memory as a transformer has them.
TEST(Attention, EqualsDoublePrecisionSoftmax) {
  if (!gemm::supported()) GTEST_SKIP();
  at::manual_seed(5);
  for (const Case& c : kCases) {
    const Shape s{c.batch, c.heads, c.kv_heads, c.queries, c.keys, c.size, 1.0f / std::sqrt(float(c.size)), c.causal};
    const auto make = [&](int64_t length, int64_t heads) {
      return at::randn({c.batch, length, heads, c.size}).transpose(1, 2);
    };
    const auto q = make(c.queries, c.heads), k = make(c.keys, c.kv_heads), v = make(c.keys, c.kv_heads);
    const auto g = make(c.queries, c.heads);
    at::Tensor added = at::zeros({1, 1, 1, 1});
    Mask mask;
    if (c.masked == Masked::Everywhere) {
      added = view(at::randn({c.batch, c.heads, c.queries, c.keys}), mask);
      added.masked_fill_(at::rand_like(added) < 0.3, -INFINITY);
      added.select(2, 3).fill_(-INFINITY);  // a query that sees nothing
    } else if (c.masked == Masked::ByKey) {
      added = view(at::randn({c.batch, 1, 1, c.keys}), mask);
    }
    auto out = at::full_like(q, 7), dq = at::full_like(q, 7), dk = at::full_like(k, 7), dv = at::full_like(v, 7);
    auto lse = at::empty({c.batch, c.queries, c.heads}).transpose(1, 2);
    const RowSums sums{lse.data_ptr<float>(), lse.stride(0), lse.stride(1), lse.stride(2)};
    forward(s, view<const float>(q), view<const float>(k), view<const float>(v), mask, view<float>(out), sums,
            gemm::serial);
    auto again = at::full_like(q, 7);
    forward(s, view<const float>(q), view<const float>(k), view<const float>(v), mask, view<float>(again), {},
            gemm::serial);
    EXPECT_TRUE(at::equal(again, out));
    backward(s, view<const float>(g), view<const float>(q), view<const float>(k), view<const float>(v), mask,
             view<const float>(out), sums, view<float>(dq), view<float>(dk), view<float>(dv), gemm::serial);

    const int64_t group = c.heads / c.kv_heads;
    const auto qd = q.to(at::kDouble), gd = g.to(at::kDouble);
    const auto kd = k.to(at::kDouble).repeat_interleave(group, 1), vd = v.to(at::kDouble).repeat_interleave(group, 1);
    auto scores = qd.matmul(kd.transpose(-1, -2)) * double(s.scale) + added.to(at::kDouble);
    if (c.causal) {
      const auto hidden = at::ones({c.queries, c.keys}, at::kBool).tril().logical_not();
      scores = scores.masked_fill(hidden, -INFINITY);
    }
    const auto hidden_rows = scores.amax(-1) == -INFINITY;
    const auto p = scores.softmax(-1).masked_fill(hidden_rows.unsqueeze(-1), 0), want = p.matmul(vd);
    const auto dp = gd.matmul(vd.transpose(-1, -2)), ds = p * (dp - (gd * want).sum(-1, true)) * double(s.scale);
    const auto fold = [&](const at::Tensor& t) { return t.view({c.batch, c.kv_heads, group, c.keys, c.size}).sum(2); };
    const auto near = [](const at::Tensor& got, const at::Tensor& expected, const char* what) {
      EXPECT_LT((got.to(at::kDouble) - expected).abs().max().item<double>(),
                2e-5 * (1 + expected.abs().max().item<double>()))
          << what;
    };
    near(out, want, "out");
    near(lse, scores.logsumexp(-1).masked_fill(hidden_rows, 0), "lse");
    near(dq, ds.matmul(kd), "grad_q");
    near(dk, fold(ds.transpose(-1, -2).matmul(qd).contiguous()), "grad_k");
    near(dv, fold(p.transpose(-1, -2).matmul(gd).contiguous()), "grad_v");
  }
}

}  // namespace
}  // namespace kiln::runtime::attention
