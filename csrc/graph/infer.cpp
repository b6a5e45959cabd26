#include "graph/infer.h"

#include "ops/ops.h"

namespace kiln::graph {
namespace {

ops::Arg convert(const Arg& arg) {
  return std::visit(
      [](const auto& v) -> ops::Arg {
        using T = std::decay_t<decltype(v)>;
        if constexpr (std::is_same_v<T, std::monostate>) {
          return {};
        } else if constexpr (std::is_same_v<T, Value>) {
          return v ? &v.meta() : static_cast<const TensorMeta*>(nullptr);
        } else if constexpr (std::is_same_v<T, Arg::List>) {
          ops::Arg::List list;
          list.reserve(v.size());
          for (const Arg& a : v) list.push_back(convert(a));
          return list;
        } else {
          return v;
        }
      },
      arg.data);
}

}  // namespace

std::vector<TensorMeta> infer(Op op, const std::vector<Arg>& args) {
  std::vector<ops::Arg> converted;
  converted.reserve(args.size());
  for (const Arg& a : args) converted.push_back(convert(a));
  return ops::infer(op, converted);
}

Node* add_inferred(Graph& g, Op op, std::vector<Arg> args, std::string name_hint) {
  std::vector<TensorMeta> results = infer(op, args);
  return g.add_call(op, std::move(args), std::move(results), std::move(name_hint));
}

}  // namespace kiln::graph
