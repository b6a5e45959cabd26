#include "graph/graph.h"

#include <gtest/gtest.h>

#include <cmath>
#include <thread>

#include "base/error.h"

namespace kiln::graph {
namespace {

TensorMeta meta(std::vector<int64_t> sizes, DType dtype = DType::Float32) {
  TensorMeta t;
  t.dtype = dtype;
  t.strides = contiguous_strides(sizes);
  t.sizes = std::move(sizes);
  return t;
}

constexpr const char* kText = R"(graph joint {
  input %x : f32[2, 3] grad
  input %w : bf16[4, 3, 5, 6]<90, 1, 18, 3>+7@cuda:1
  %relu = aten::relu(%x) : f32[2, 3] grad
  %max = aten::max.dim(%relu, 1, False) : (f32[2], i64[2], none) {no_grad}
  %split = aten::split.Tensor(%x, 1, 0) : [f32[1, 3], f32[1, 3]+3]
  %one = aten::unbind.int(%x, 0) : [f32[2, 3]]
  %t = aten::index.Tensor(%x, [None, %max#1]) : f32[2, 2]
  %full = aten::full([], -1.5, f64, strided, device(cpu), None) : f64[] {backward}
  %flag = aten::any(%max#1) : b8[]
  %odd = "built in <x>"(1, -2, 1e+30, inf, -inf, nan, complex(1.0, -2.5), "a\"\n\x01", channels_last, undefined, k=[%one#0, True]) : () {no_grad, backward, checkpoint=2, recomputed, module="layers.0"}
  mutate %x = %relu uncounted
  ask 4
  return (%max#0, None, %split#1, 3, %flag)
}
)";

TEST(Graph, TextRoundTrips) {
  const auto g = parse(kText);
  verify(*g);
  EXPECT_EQ(print(*g), kText);
  const auto copy = g->clone();
  verify(*copy);
  EXPECT_EQ(print(*copy), kText);
  const Node* odd = std::prev(g->nodes().end())->get();
  EXPECT_TRUE(std::isnan(odd->args[5].as<double>()));
  EXPECT_EQ(odd->args[7].as<std::string>(), "a\"\n\x01");
  EXPECT_EQ(odd->kwargs[0].second.list()[0].value().node->name, "one");
}

TEST(Graph, ParserNamesThePlace) {
  auto message = [](const char* text) {
    try {
      parse(text);
    } catch (const UserError& e) {
      return std::string(e.what());
    }
    return std::string("no error");
  };
  EXPECT_EQ(message("graph g {\n  %a = aten::relu(%b) : f32[1]\n  return ()\n}"),
            "graph text, line 2, column 21: %b is not defined before its use");
  EXPECT_NE(message("graph g {\n  input %a : f99[1]\n  return ()\n}").find("line 2, column 17: unknown dtype 'f99'"),
            std::string::npos);
  EXPECT_NE(message("graph g {\n  input %a : f32[1]\n  input %a : f32[1]\n return ()\n}").find("defined twice"),
            std::string::npos);
  EXPECT_NE(message("graph g {\n return (\"abc)\n}").find("unterminated"), std::string::npos);
  EXPECT_NE(message("graph g { return (1) } x").find("text after"), std::string::npos);
  EXPECT_NE(message("").find("expected 'graph'"), std::string::npos);
}

TEST(Graph, NamesAreUniqueAndReadable) {
  Graph g;
  Node* x = g.add_input("x", meta({2}));
  EXPECT_EQ(g.add_call(Op("aten::add.Tensor"), {x->out(), 1}, {meta({2})})->name, "add");
  EXPECT_EQ(g.add_call(Op("aten::add.Tensor"), {x->out(), 1}, {meta({2})})->name, "add_1");
  EXPECT_EQ(g.add_call(Op("torch._C._nn.linear"), {x->out()}, {meta({2})})->name, "linear");
  EXPECT_EQ(g.add_call(Op("target::12"), {x->out()}, {meta({2})})->name, "target");
  EXPECT_EQ(g.add_call(Op("aten::relu"), {x->out()}, {meta({2})}, "add_1")->name, "add_1_1");
  EXPECT_EQ(g.add_call(Op("aten::add.Tensor"), {x->out(), 1}, {meta({2})})->name, "add_2");
  EXPECT_EQ(g.unique_name("1.weird-name"), "_1_weird_name");
}

TEST(Graph, InsertsErasesAndReplaces) {
  Graph g;
  Node* x = g.add_input("x", meta({2}));
  Node* a = g.add_call(Op("aten::relu"), {x->out()}, {meta({2})}, "a");
  Node* b = g.add_call(Op("aten::cat"), {Arg::values({a->out(), x->out(), a->out()}), 0}, {meta({6})}, "b");
  g.outputs() = {b->out(), a->out()};
  g.set_insert_point(b);
  Node* c = g.add_call(Op("aten::cos"), {a->out()}, {meta({2})}, "c");
  g.set_insert_point(nullptr);
  Node* y = g.add_input("y", meta({2}));
  std::vector<std::string> order;
  for (const auto& n : g.nodes()) order.push_back(n->name);
  EXPECT_EQ(order, (std::vector<std::string>{"x", "y", "a", "c", "b"}));
  EXPECT_EQ(g.use_counts()[a], 4);
  g.replace_uses({{a, {c->out()}}, {c, {y->out()}}});
  EXPECT_EQ(b->arg(0).to_values(), (std::vector<Value>{y->out(), x->out(), y->out()}));
  EXPECT_EQ(g.outputs()[1].value(), y->out());
  g.erase(c);
  g.erase(a);
  verify(g);
  g.replace_all_uses(x->out(), y->out());
  g.erase_input(0);
  verify(g);
  EXPECT_EQ(g.inputs(), std::vector<Node*>{y});
}

TEST(Graph, VerifierFindsBrokenGraphs) {
  Graph g, other;
  Node* x = g.add_input("x", meta({2}));
  Node* a = g.add_call(Op("aten::relu"), {x->out()}, {meta({2})});
  Node* foreign = other.add_input("z", meta({2}));
  g.outputs() = {a->out()};
  EXPECT_NO_THROW(verify(g, true));
  a->args[0] = foreign->out();
  EXPECT_THROW(verify(g), InternalError);
  a->args[0] = x->out(1);
  EXPECT_THROW(verify(g), InternalError);
  a->args[0] = a->out();
  EXPECT_THROW(verify(g), InternalError);
  a->args[0] = x->out();
  g.mutations() = {{a->out(), a->out()}};
  EXPECT_THROW(verify(g), InternalError);
  g.mutations() = {{x->out(), a->out()}};
  EXPECT_NO_THROW(verify(g));
  a->name = "x";
  EXPECT_THROW(verify(g), InternalError);
  a->name = "a";
  g.add_call(Op("aten::add_.Tensor"), {a->out(), 1}, {meta({2})});
  EXPECT_NO_THROW(verify(g));
  EXPECT_THROW(verify(g, true), InternalError);
}

TEST(Graph, DotNamesEveryNode) {
  const auto g = parse(kText);
  const std::string dot = to_dot(*g);
  for (const auto& n : g->nodes()) EXPECT_NE(dot.find("\"" + n->name + "\" [label="), std::string::npos) << n->name;
  EXPECT_NE(dot.find("\"max\" -> \"return\" [label=\"0\""), std::string::npos);
}

TEST(Ops, NamesAreInternedAcrossThreads) {
  std::vector<std::thread> threads;
  std::vector<std::vector<Op>> seen(4);
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      for (int i = 0; i < 500; ++i) seen[t].emplace_back("test::op" + std::to_string(i));
    });
  for (auto& t : threads) t.join();
  for (int t = 1; t < 4; ++t) EXPECT_EQ(seen[t], seen[0]);
  EXPECT_EQ(seen[0][7].name(), "test::op7");
  EXPECT_EQ(Op(), Op(""));
}

TEST(TensorMeta, KnowsItsLayout) {
  TensorMeta t = meta({2, 3, 4, 5});
  EXPECT_TRUE(t.is_contiguous());
  EXPECT_FALSE(t.is_contiguous(MemoryFormat::ChannelsLast));
  t.strides = strides_for(t.sizes, MemoryFormat::ChannelsLast);
  EXPECT_EQ(t.strides, (std::vector<int64_t>{60, 1, 15, 3}));
  EXPECT_TRUE(t.is_contiguous(MemoryFormat::ChannelsLast));
  EXPECT_TRUE(t.is_non_overlapping_and_dense());
  t.strides = {60, 2, 15, 3};
  EXPECT_FALSE(t.is_non_overlapping_and_dense());
  EXPECT_EQ(contiguous_strides({2, 0, 3}), (std::vector<int64_t>{3, 3, 1}));
  EXPECT_TRUE(meta({0, 3}).is_contiguous());
  EXPECT_EQ(meta({2, 0}).numel(), 0);
  EXPECT_EQ(meta({}).numel(), 1);
}

}  // namespace
}  // namespace kiln::graph
