#include "graph/graph.h"

namespace kiln::graph {
namespace {

std::string escape(std::string_view s) {
  std::string out;
  for (char c : s) {
    if (c == '"' || c == '\\' || c == '{' || c == '}' || c == '<' || c == '>' || c == '|') out += '\\';
    if (c == '\n')
      out += "\\n";
    else
      out += c;
  }
  return out;
}

// What a node's label lists besides its tensors: the constants among its arguments.
std::string constants(const Node& n) {
  std::string out;
  auto add = [&](const std::string& prefix, const Arg& a) {
    bool has_value = false;
    for_each_value(a, [&](const Value&) { has_value = true; });
    if (has_value || a.is_none()) return;
    std::string text = print(a);
    if (text.size() > 60) text.replace(57, std::string::npos, "...");
    out += (out.empty() ? "" : ", ") + prefix + text;
  };
  for (const Arg& a : n.args) add("", a);
  for (const auto& [key, a] : n.kwargs) add(key + "=", a);
  return out;
}

// Colour by what the node does, so that forward, backward and inputs are told apart at a glance.
const char* color(const Node& n) {
  if (n.kind == NodeKind::Placeholder) return "#cfe8cf";
  return n.backward ? "#f6d9c6" : "#d6e4f5";
}

}  // namespace

std::string to_dot(const Graph& g) {
  std::string out = "digraph \"" + escape(g.name) +
                    "\" {\n  rankdir=TB;\n  node [shape=record, style=filled, fontname=\"Helvetica\", fontsize=10];\n";
  auto edge = [&](const Value& v, const std::string& to) {
    if (!v) return;
    out += "  \"" + v.node->name + "\" -> \"" + to + "\"";
    if (v.node->results.size() > 1) out += " [label=\"" + std::to_string(v.index) + "\", fontsize=8]";
    out += ";\n";
  };
  for (const auto& node : g.nodes()) {
    const Node& n = *node;
    std::string label = escape(n.name);
    if (n.kind == NodeKind::Call) {
      label += "|" + escape(n.op.name());
      if (const std::string c = constants(n); !c.empty()) label += "|" + escape(c);
    }
    std::string types;
    for (const TensorMeta& t : n.results) types += (types.empty() ? "" : "\n") + print(t);
    label += "|" + escape(types);
    out += "  \"" + n.name + "\" [label=\"{" + label + "}\", fillcolor=\"" + color(n) + "\"];\n";
    for (const Arg& a : n.args) for_each_value(a, [&](const Value& v) { edge(v, n.name); });
    for (const auto& [key, a] : n.kwargs) for_each_value(a, [&](const Value& v) { edge(v, n.name); });
  }
  out += "  \"return\" [label=\"return\", fillcolor=\"#eeeeee\"];\n";
  for (const Arg& a : g.outputs()) for_each_value(a, [&](const Value& v) { edge(v, "return"); });
  for (const Mutation& m : g.mutations())
    out += "  \"" + m.value.node->name + "\" -> \"" + m.input.node->name +
           "\" [style=dashed, label=\"mutate\", constraint=false];\n";
  return out + "}\n";
}

}  // namespace kiln::graph
