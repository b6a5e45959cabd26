#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "graph/passes/passes.h"
#include "graph/passes/split_complex.h"
#include "graph/passes/widen_half.h"

// Each file of tests/golden/graph names a pass, a graph, and the graph that the pass makes of it. KILN_UPDATE_GOLDEN=1
// writes the files anew.
namespace kiln::graph {
namespace {

using Pass = bool (*)(Graph&);
const std::map<std::string, Pass> kPasses = {{"dce", eliminate_dead_code},
                                             {"cse", eliminate_common_subexpressions},
                                             {"fold", fold_constants},
                                             {"views", simplify_views},
                                             {"copies", remove_redundant_copies},
                                             {"clean_up", clean_up},
                                             {"recompute_operands", recompute_operands},
                                             {"split_complex", split_complex},
                                             {"widen_half", [](Graph& g) { return widen_half(g, is_half); }}};

std::vector<std::filesystem::path> files() {
  std::vector<std::filesystem::path> out;
  for (const auto& entry : std::filesystem::directory_iterator(KILN_GOLDEN_DIR "/graph"))
    if (entry.path().extension() == ".txt") out.push_back(entry.path());
  std::sort(out.begin(), out.end());
  return out;
}

class GraphPass : public testing::TestWithParam<std::filesystem::path> {};

TEST_P(GraphPass, MakesTheGoldenGraph) {
  std::stringstream stream;
  stream << std::ifstream(GetParam()).rdbuf();
  const std::string text = stream.str();
  const size_t colon = text.find("# pass: "), end = text.find('\n'), cut = text.find("---\n");
  ASSERT_EQ(colon, 0u) << "the first line must be '# pass: NAME'";
  ASSERT_NE(cut, std::string::npos);
  const Pass pass = kPasses.at(text.substr(8, end - 8));
  const auto g = parse(text.substr(0, cut));
  verify(*g, true);
  const std::string before = print(*g);
  const bool changed = pass(*g);
  verify(*g, true);
  const std::string after = print(*g);
  EXPECT_EQ(changed, before != after);
  if (std::getenv("KILN_UPDATE_GOLDEN"))
    std::ofstream(GetParam()) << text.substr(0, cut) << "---\n" << after;
  else
    EXPECT_EQ(after, text.substr(cut + 4));
  pass(*g);
  if (pass != clean_up) {
    EXPECT_EQ(print(*g), after) << "a second run changes the graph again";
  }
}

INSTANTIATE_TEST_SUITE_P(Golden, GraphPass, testing::ValuesIn(files()),
                         [](const auto& info) { return info.param.stem().string(); });

}  // namespace
}  // namespace kiln::graph
