#include "graph/passes/channels_last.h"

#include <gtest/gtest.h>

namespace kiln::graph {
namespace {

const Node* find(const Graph& g, const std::string& name) {
  for (const auto& n : g.nodes())
    if (n->name == name) return n.get();
  return nullptr;
}

TEST(ChannelsLast, ConvertsActivationsAndRestoresOutputs) {
  const auto g = parse(R"(graph net {
  input %x : f32[2, 3, 8, 8]
  input %w : f32[4, 3, 3, 3]
  input %v : f32[5, 4, 1, 1]
  %c = aten::convolution(%x, %w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1) : f32[2, 4, 8, 8]
  %r = aten::relu(%c) : f32[2, 4, 8, 8]
  %d = aten::convolution(%r, %v, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1) : f32[2, 5, 8, 8]
  %t = aten::view(%d, [2, 320]) : f32[2, 320]
  return (%r, %t)
})");
  ASSERT_TRUE(convert_to_channels_last(*g));
  verify(*g, true);
  for (const char* name : {"c", "r", "d"})
    EXPECT_TRUE(find(*g, name)->results[0].is_contiguous(MemoryFormat::ChannelsLast)) << name << "\n" << print(*g);
  // The input is copied once; the second convolution takes its input as it comes.
  EXPECT_NE(find(*g, "c")->arg(0).value().node, g->inputs()[0]);
  EXPECT_EQ(find(*g, "d")->arg(0).value().node, find(*g, "r"));
  // A view that channels-last strides do not allow, and the outputs, see the old layout.
  for (const Arg& out : g->outputs()) EXPECT_TRUE(out.value().meta().is_contiguous()) << print(*g);
  EXPECT_TRUE(find(*g, "t")->arg(0).value().meta().is_contiguous());
}

TEST(ChannelsLast, KeepsTheWeightGradientsLayout) {
  const auto g = parse(R"(graph back {
  input %dy : f32[2, 4, 8, 8]
  input %x : f32[2, 3, 8, 8]
  input %w : f32[4, 3, 3, 3]
  %g = aten::convolution_backward(%dy, %x, %w, [4], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, True]) : (f32[2, 3, 8, 8], f32[4, 3, 3, 3], f32[4])
  return (%g#0, %g#1, %g#2)
})");
  ASSERT_TRUE(convert_to_channels_last(*g));
  const Node* n = find(*g, "g");
  EXPECT_TRUE(n->results[0].is_contiguous(MemoryFormat::ChannelsLast));
  EXPECT_TRUE(n->results[1].is_contiguous());
  EXPECT_TRUE(g->outputs()[0].value().meta().is_contiguous());
  EXPECT_EQ(g->outputs()[1].value().node, n);
}

TEST(ChannelsLast, LeavesOtherGraphsAlone) {
  const auto g =
      parse("graph f {\n  input %x : f32[2, 3, 8, 8]\n  %r = aten::relu(%x) : f32[2, 3, 8, 8]\n  return (%r)\n}");
  const std::string before = print(*g);
  EXPECT_FALSE(convert_to_channels_last(*g));
  EXPECT_EQ(print(*g), before);
}

}  // namespace
}  // namespace kiln::graph
