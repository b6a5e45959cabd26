// What libraries run.
#include "lower/lowering.h"

namespace kiln::lower {

const char* out_overload(const graph::Op& op) {
  static const auto* table = new std::unordered_map<graph::Op, const char*>{
      {graph::Op("aten::mm"), "aten::mm.out"},       {graph::Op("aten::bmm"), "aten::bmm.out"},
      {graph::Op("aten::addmm"), "aten::addmm.out"}, {graph::Op("aten::baddbmm"), "aten::baddbmm.out"},
      {graph::Op("aten::mv"), "aten::mv.out"},       {graph::Op("aten::dot"), "aten::dot.out"},
  };
  const auto it = table->find(op);
  return it == table->end() ? nullptr : it->second;
}

bool draws_random(const graph::Op& op) {
  // By name: what ATen calls its generators' users.
  static constexpr std::string_view kNames[] = {
      "bernoulli",         "native_dropout",  "rand",          "randn",
      "randint",           "randperm",        "normal",        "uniform",
      "exponential",       "geometric",       "cauchy",        "log_normal",
      "multinomial",       "poisson",         "random",        "rrelu_with_noise",
      "binomial",          "dropout",         "alpha_dropout", "feature_dropout",
      "_sample_dirichlet", "_standard_gamma", "_fused_dropout"};
  std::string_view name = op.name();
  if (!name.starts_with("aten::")) return false;
  name.remove_prefix(6);
  name = name.substr(0, name.find('.'));
  for (std::string_view k : kNames)
    if (name == k || name == std::string(k) + "_" || name == std::string(k) + "_like") return true;
  return name.starts_with("_scaled_dot_product");
}

}  // namespace kiln::lower
