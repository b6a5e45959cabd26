#include "aten/sizes.h"

#include <gtest/gtest.h>

#include "base/error.h"
#include "runtime/compiled_graph.h"
#include "runtime/sized_program.h"

namespace kiln {
namespace {

using aten::Sizes;
using graph::Arg;
using graph::Graph;
using graph::Op;
using graph::TensorMeta;
using graph::Value;
using symbolic::Expr;
using Relation = Sizes::Relation;
using Ints = runtime::SizedProgram::Ints;

TensorMeta f32(std::vector<int64_t> sizes) {
  TensorMeta m;
  m.strides = graph::contiguous_strides(sizes);
  m.sizes = std::move(sizes);
  return m;
}

/// x.view(2 * n, 3) of an x of n rows of 6, traced with 4 rows.
struct Halves {
  std::shared_ptr<Graph> graph = std::make_shared<Graph>();
  std::shared_ptr<Sizes> sizes = std::make_shared<Sizes>();
  Value x, view;
  Halves() {
    x = graph->add_input("x", f32({4, 6}))->out();
    sizes->open(x.node);
    const Expr n = sizes->size(x, 0, 4);
    view = graph->add_call(Op("aten::view"), {x, Arg::ints({8, 3})}, {f32({8, 3})})->out();
    sizes->note_argument({view.node, 1, 0, n * 2});
    graph->outputs() = {view};
  }
  std::shared_ptr<const runtime::SizedProgram> program() const {
    EXPECT_EQ(runtime::SizedProgram::refusal(*graph, *sizes), "");
    return runtime::SizedProgram::make(graph, *sizes);
  }
};

TEST(Sizes, AnswersBecomeConditions) {
  Halves h;
  const Expr n = h.sizes->size(h.x, 0, 4);
  EXPECT_EQ(h.sizes->hint(n * 3 + 1), 13);
  EXPECT_TRUE(h.sizes->decide(n - 4, Relation::Equal));
  EXPECT_FALSE(h.sizes->decide(n - 3, Relation::LessEqual));
  EXPECT_FALSE(h.sizes->decide(n, Relation::Less));  // no size is: no condition
  EXPECT_TRUE(h.sizes->decide(n - 4, Relation::Equal));
  ASSERT_EQ(h.sizes->conditions().size(), 2u);
  EXPECT_EQ(h.sizes->texts()[0], "x.size(0) - 4 == 0");
  EXPECT_EQ(h.sizes->texts()[1], "-x.size(0) + 3 < 0");
}

TEST(Sizes, PyTorchComputesWithThem) {
  Halves h;
  const c10::SymInt n = h.sizes->symint(h.sizes->size(h.x, 0, 4));
  const c10::SymInt m = (n * 2 + 1) / 3 - 1;
  ASSERT_TRUE(Sizes::expr_of(m));
  EXPECT_EQ(h.sizes->hint(*Sizes::expr_of(m)), 2);
  EXPECT_TRUE(h.sizes->conditions().empty());
  EXPECT_TRUE(n > 3);
  EXPECT_EQ(h.sizes->conditions().size(), 1u);
  EXPECT_EQ(n.guard_int(__FILE__, __LINE__), 4);
  EXPECT_EQ(h.sizes->texts().back(), "x.size(0) - 4 == 0");
}

TEST(SizedProgram, ComputesArgumentsFromTheSizesAtHand) {
  Halves h;
  h.sizes->add_output(h.sizes->size(h.view, 0, 8));
  const auto program = h.program();
  Ints sizes;
  const at::Tensor x = at::randn({5, 6});
  const auto out = program->run({x}, {}, &sizes);
  EXPECT_TRUE(at::equal(out.at(0), x.view({10, 3})));
  EXPECT_EQ(sizes, Ints{10});
}

TEST(SizedProgram, StopsWhereAConditionFails) {
  Halves h;
  h.sizes->decide(h.sizes->size(h.view, 0, 8) - 10, Relation::Less);
  const auto program = h.program();
  Ints sizes;
  EXPECT_TRUE(program->fits({at::randn({3, 6})}, {}));
  EXPECT_FALSE(program->fits({at::randn({7, 6})}, {}));
  EXPECT_THROW(program->run({at::randn({7, 6})}, {}, &sizes), runtime::SizesDiffer);
}

TEST(SizedProgram, GivesTheGraphOfOtherSizes) {
  const Halves h;
  Ints sizes;
  const auto traced = h.program()->trace_at({at::randn({5, 6})}, {}, &sizes);
  const Value result = traced->outputs().at(0).value();
  EXPECT_EQ(result.meta().sizes, (std::vector<int64_t>{10, 3}));
  EXPECT_EQ(result.node->arg(1).to_ints(), (std::vector<int64_t>{10, 3}));
}

TEST(SizedProgram, IntsAreLeavesToo) {
  auto g = std::make_shared<Graph>();
  auto sizes = std::make_shared<Sizes>();
  const Value x = g->add_input("x", f32({6}))->out();
  const Value part = g->add_call(Op("aten::slice.Tensor"), {x, Arg(0), Arg(2), Arg(4), Arg(1)}, {f32({2})})->out();
  const Expr start = sizes->given(0, 2);
  sizes->note_argument({part.node, 2, -1, start});
  sizes->note_argument({part.node, 3, -1, start + 2});
  g->outputs() = {part};
  ASSERT_EQ(runtime::SizedProgram::refusal(*g, *sizes), "");
  const auto program = runtime::SizedProgram::make(g, *sizes);
  const at::Tensor v = at::arange(6.0);
  Ints delivered;
  EXPECT_TRUE(at::equal(program->run({v}, {3}, &delivered).at(0), v.slice(0, 3, 5)));
}

TEST(SizedProgram, TellsWhetherAConditionFailsBehindAChange) {
  const auto changes = [](const graph::Node& n) { return n.op == Op("aten::add_.Tensor"); };
  for (const bool first : {false, true}) {
    auto g = std::make_shared<Graph>();
    auto sizes = std::make_shared<Sizes>();
    const Value x = g->add_input("x", f32({4, 6}))->out(), count = g->add_input("count", f32({1}))->out();
    sizes->open(x.node);
    const Expr n = sizes->size(x, 0, 4);
    const auto write = [&] { g->add_call(Op("aten::add_.Tensor"), {count, count, Arg(1)}, {f32({1})}); };
    if (first) write();
    const Value view = g->add_call(Op("aten::view"), {x, Arg::ints({8, 3})}, {f32({8, 3})})->out();
    sizes->note_argument({view.node, 1, 0, n * 2});
    if (!first) write();
    g->outputs() = {view};
    const auto program = runtime::SizedProgram::make(g, *sizes, changes);
    EXPECT_EQ(program->asks_behind_changes(), first);
    EXPECT_TRUE(runtime::SizedProgram::make(g, *sizes)->asks_behind_changes());
    Ints delivered;
    const at::Tensor counted = at::ones({1});
    // A view that these sizes do not allow.
    EXPECT_ANY_THROW(program->run({at::ones({6, 5}).t(), counted}, {}, &delivered));
    EXPECT_EQ(runtime::raised_before_writes(), !first);
    EXPECT_EQ(counted.item<float>(), first ? 2 : 1);
  }
}

TEST(SizedProgram, RefusesWhatChangesSizesInPlace) {
  Halves h;
  h.graph->add_call(Op("aten::t_"), {h.view}, {f32({3, 8})});
  EXPECT_NE(runtime::SizedProgram::refusal(*h.graph, *h.sizes).find("aten::t_"), std::string::npos);
  EXPECT_THROW(runtime::SizedProgram::make(h.graph, *h.sizes), InternalError);
}

}  // namespace
}  // namespace kiln
