#include <gtest/gtest.h>

#include <thread>

#include "aten/convert.h"
#include "base/error.h"
#include "compiler/compile.h"

namespace kiln {
namespace {

using graph::Arg;
using graph::Graph;
using graph::Op;
using graph::TensorMeta;
using graph::Value;

TensorMeta f32(std::vector<int64_t> sizes) {
  TensorMeta m;
  m.strides = graph::contiguous_strides(sizes);
  m.sizes = std::move(sizes);
  return m;
}

TEST(Artifact, RunsACallAndReturnsEagersValues) {
  Graph g;
  Value x = g.add_input("x", f32({3, 4}))->out();
  Value y = g.add_input("y", f32({3, 4}))->out();
  Value s = g.add_call(Op("aten::add.Tensor"), {x, y, Arg(2)}, {f32({3, 4})})->out();
  Value r = g.add_call(Op("aten::relu"), {s}, {f32({3, 4})})->out();
  g.outputs() = {r, Arg()};
  auto artifact = compiler::compile_functional(g, false);
  at::Tensor a = at::randn({3, 4}), b = at::randn({3, 4});
  auto out = artifact->run({a, b});
  ASSERT_EQ(out.size(), 2u);
  EXPECT_TRUE(at::equal(out[0], at::relu(a + 2 * b)));
  EXPECT_FALSE(out[1].defined());
}

TEST(Artifact, ListsOfTensorsInAndOut) {
  Graph g;
  Value x = g.add_input("x", f32({4, 2}))->out();
  auto* parts = g.add_call(Op("aten::split.Tensor"), {x, Arg(2), Arg(0)}, {f32({2, 2}), f32({2, 2})});
  Value c = g.add_call(Op("aten::cat"), {Arg::values({parts->out(1), parts->out(0)}), Arg(0)}, {f32({4, 2})})->out();
  g.outputs() = {c};
  at::Tensor a = at::randn({4, 2});
  auto out = compiler::compile_functional(g, false)->run({a});
  EXPECT_TRUE(at::equal(out[0], at::cat({a.slice(0, 2, 4), a.slice(0, 0, 2)})));
}

TEST(Artifact, MutationsHappenAsIfAllAtOnce) {
  Graph g;
  Value x = g.add_input("x", f32({3}))->out();
  Value y = g.add_input("y", f32({3}))->out();
  g.mutations() = {{x, y}, {y, x}};
  g.outputs() = {x};
  at::Tensor a = at::ones({3}), b = at::zeros({3});
  const auto version = a.unsafeGetTensorImpl()->version_counter().current_version();
  auto out = compiler::compile_functional(g, false)->run({a, b});
  EXPECT_TRUE(at::equal(a, at::zeros({3})));
  EXPECT_TRUE(at::equal(b, at::ones({3})));
  EXPECT_TRUE(at::equal(out[0], at::ones({3})));
  EXPECT_GT(a.unsafeGetTensorImpl()->version_counter().current_version(), version);
}

TEST(Artifact, OtherStridesThanTracedGiveTheSameValues) {
  Graph g;
  Value x = g.add_input("x", f32({2, 3}))->out();
  Value v = g.add_call(Op("aten::view"), {x, Arg::ints({6})}, {f32({6})})->out();
  g.outputs() = {v};
  at::Tensor a = at::randn({3, 2}).t();
  EXPECT_TRUE(at::equal(compiler::compile_functional(g, false)->run({a})[0], a.reshape({6})));
}

TEST(Artifact, TensorConstants) {
  Graph g;
  TensorMeta m = f32({2, 2});
  m.dtype = DType::Int64;
  Value c = g.add_call(Op("kiln::tensor_constant"),
                       {Arg(Arg::List{Arg(1), Arg(-2), Arg(3), Arg(4)}), Arg::ints({2, 2}), Arg(DType::Int64)}, {m})
                ->out();
  g.outputs() = {c};
  auto artifact = compiler::compile_functional(g, false);
  at::Tensor first = artifact->run({})[0];
  first.zero_();
  EXPECT_EQ(artifact->run({})[0][0][1].item<int64_t>(), -2);
}

TEST(Artifact, UnknownOpIsUnsupported) {
  Graph g;
  Value x = g.add_input("x", f32({2}))->out();
  g.outputs() = {g.add_call(Op("aten::no_such_op"), {x}, {f32({2})})->out()};
  EXPECT_THROW(compiler::compile_functional(g, false), Unsupported);
}

TEST(Artifact, ConcurrentCallsDoNotMix) {
  Graph g;
  Value x = g.add_input("x", f32({1000}))->out();
  Value v = x;
  for (int i = 0; i < 10; ++i) v = g.add_call(Op("aten::add.Scalar"), {v, Arg(1.0), Arg(1)}, {f32({1000})})->out();
  g.outputs() = {v};
  auto artifact = compiler::compile_functional(g, false);
  std::vector<std::thread> threads;
  std::atomic<int> bad{0};
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      for (int i = 0; i < 50; ++i)
        if (!at::equal(artifact->run({at::full({1000}, double(t))})[0], at::full({1000}, double(t + 10)))) ++bad;
    });
  for (auto& t : threads) t.join();
  EXPECT_EQ(bad, 0);
}

}  // namespace
}  // namespace kiln
