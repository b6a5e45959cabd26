// _foreach_* ops: one call per tensor. Horizontal fusion makes one kernel of them again.
#include "decompose/builder.h"

namespace kiln::decompose {
namespace {

// What a list op is called for one tensor, by (name, overload); "" where names are equal.
struct Single {
  std::string_view name, overload;
  const char* op;
};
constexpr Single kSingles[] = {
    {"add", "List", "aten::add.Tensor"},
    {"add", "Tensor", "aten::add.Tensor"},
    {"sub", "List", "aten::sub.Tensor"},
    {"mul", "List", "aten::mul.Tensor"},
    {"mul", "Tensor", "aten::mul.Tensor"},
    {"div", "List", "aten::div.Tensor"},
    {"div", "Tensor", "aten::div.Tensor"},
    {"maximum", "List", "aten::maximum"},
    {"minimum", "List", "aten::minimum"},
    {"clamp_min", "List", "aten::maximum"},
    {"clamp_max", "List", "aten::minimum"},
    {"maximum", "Scalar", "aten::clamp_min"},
    {"minimum", "Scalar", "aten::clamp_max"},
    {"clamp_min", "Scalar", "aten::clamp_min"},
    {"clamp_max", "Scalar", "aten::clamp_max"},
    {"pow", "List", "aten::pow.Tensor_Tensor"},
    {"pow", "Scalar", "aten::pow.Tensor_Scalar"},
    {"lerp", "List", "aten::lerp.Tensor"},
    {"lerp", "Scalar", "aten::lerp.Scalar"},
    {"addcmul", "Scalar", "aten::addcmul"},
    {"addcdiv", "Scalar", "aten::addcdiv"},
    {"norm", "Scalar", "aten::linalg_vector_norm"},
    {"copy", "", "aten::copy"},
};

}  // namespace

bool foreach_rule(Builder& b, const Node& n, std::vector<Value>& out) {
  std::string_view full = n.op.name();
  full.remove_prefix(std::string_view("aten::_foreach_").size());
  const size_t dot = full.find('.');
  const std::string name(full.substr(0, dot));
  std::string overload(dot == std::string_view::npos ? "" : full.substr(dot + 1));
  // A list of numbers gives each tensor its own.
  if (overload == "ScalarList") overload = "Scalar";
  std::string op = overload.empty() ? "aten::" + name : "aten::" + name + "." + overload;
  for (const Single& s : kSingles)
    if (s.name == name && s.overload == overload) op = s.op;
  const size_t count = n.args.at(0).list().size();
  if (count != n.results.size()) return false;
  for (size_t i = 0; i < count; ++i) {
    std::vector<Arg> args;
    for (const Arg& a : n.args) {
      if (a.is_list() && a.list().size() != count) return false;
      args.push_back(a.is_list() ? a.list()[i] : a);
    }
    if (name == "norm") {  // (self, ord, dtype)
      args = {args[0], args[1], Arg(), Arg(false), args.size() > 2 ? args[2] : Arg()};
    } else if ((name == "add" || name == "sub") && args.size() == 2) {
      args.push_back(Arg(1));
    } else if (name == "copy") {
      args.resize(2);
      args.push_back(Arg(false));
    }
    const Value v = b.call(op.c_str(), std::move(args));
    if (v.meta().dtype != n.results[i].dtype) return false;
    out.push_back(v);
  }
  return true;
}

}  // namespace kiln::decompose
