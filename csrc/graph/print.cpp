#include <charconv>
#include <cmath>

#include "graph/graph.h"

namespace kiln::graph {
namespace {

void write_int(std::string& out, int64_t v) { out += std::to_string(v); }

// Shortest text that reads back as the same double, always distinguishable from an integer.
void write_double(std::string& out, double v) {
  if (std::isnan(v)) {
    out += "nan";
    return;
  }
  if (std::isinf(v)) {
    out += v < 0 ? "-inf" : "inf";
    return;
  }
  char buffer[40];
  const auto end = std::to_chars(buffer, buffer + sizeof buffer, v).ptr;
  const std::string_view text(buffer, static_cast<size_t>(end - buffer));
  out += text;
  if (text.find_first_of(".e") == std::string_view::npos) out += ".0";
}

void write_string(std::string& out, std::string_view s) {
  static constexpr char kHex[] = "0123456789abcdef";
  out += '"';
  for (char c : s) {
    const auto u = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (c == '\n') {
      out += "\\n";
    } else if (u < 0x20 || u == 0x7f) {
      out += "\\x";
      out += kHex[u >> 4];
      out += kHex[u & 15];
    } else {
      out += c;
    }
  }
  out += '"';
}

void write_ints(std::string& out, const std::vector<int64_t>& values, char open, char close) {
  out += open;
  for (size_t i = 0; i < values.size(); ++i) {
    if (i) out += ", ";
    write_int(out, values[i]);
  }
  out += close;
}

void write_device(std::string& out, const Device& d) {
  static constexpr const char* kNames[] = {"cpu", "cuda", "meta", "other"};
  out += kNames[static_cast<size_t>(d.type)];
  if (d.index >= 0) {
    out += ':';
    write_int(out, d.index);
  }
}

void write_meta(std::string& out, const TensorMeta& t) {
  if (!t.defined) {
    out += "none";
    return;
  }
  out += dtype_name(t.dtype);
  write_ints(out, t.sizes, '[', ']');
  if (t.strides != contiguous_strides(t.sizes)) write_ints(out, t.strides, '<', '>');
  if (t.offset != 0) {
    out += '+';
    write_int(out, t.offset);
  }
  if (!(t.device == Device{})) {
    out += '@';
    write_device(out, t.device);
  }
  if (t.requires_grad) out += " grad";
}

void write_value(std::string& out, const Value& v) {
  if (!v) {
    out += "undefined";
    return;
  }
  out += '%';
  out += v.node->name;
  if (v.node->results.size() != 1 || v.node->returns_list) {
    out += '#';
    write_int(out, v.index);
  }
}

void write_arg(std::string& out, const Arg& arg) {
  std::visit(
      [&](const auto& v) {
        using T = std::decay_t<decltype(v)>;
        if constexpr (std::is_same_v<T, std::monostate>) {
          out += "None";
        } else if constexpr (std::is_same_v<T, Value>) {
          write_value(out, v);
        } else if constexpr (std::is_same_v<T, bool>) {
          out += v ? "True" : "False";
        } else if constexpr (std::is_same_v<T, int64_t>) {
          write_int(out, v);
        } else if constexpr (std::is_same_v<T, double>) {
          write_double(out, v);
        } else if constexpr (std::is_same_v<T, std::complex<double>>) {
          out += "complex(";
          write_double(out, v.real());
          out += ", ";
          write_double(out, v.imag());
          out += ')';
        } else if constexpr (std::is_same_v<T, std::string>) {
          write_string(out, v);
        } else if constexpr (std::is_same_v<T, DType>) {
          out += dtype_name(v);
        } else if constexpr (std::is_same_v<T, Layout>) {
          static constexpr const char* kNames[] = {"strided", "sparse", "mkldnn", "other_layout"};
          out += kNames[static_cast<size_t>(v)];
        } else if constexpr (std::is_same_v<T, Device>) {
          out += "device(";
          write_device(out, v);
          out += ')';
        } else if constexpr (std::is_same_v<T, MemoryFormat>) {
          static constexpr const char* kNames[] = {"contiguous_format", "preserve_format", "channels_last",
                                                   "channels_last_3d"};
          out += kNames[static_cast<size_t>(v)];
        } else {
          out += '[';
          for (size_t i = 0; i < v.size(); ++i) {
            if (i) out += ", ";
            write_arg(out, v[i]);
          }
          out += ']';
        }
      },
      arg.data);
}

void write_op(std::string& out, const Op& op) {
  const std::string& name = op.name();
  const bool plain = !name.empty() && std::all_of(name.begin(), name.end(), [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '.' || c == ':';
  });
  if (plain)
    out += name;
  else
    write_string(out, name);
}

void write_node(std::string& out, const Node& n) {
  if (n.kind == NodeKind::Placeholder) {
    out += "  input %" + n.name + " : ";
    write_meta(out, n.results.at(0));
  } else {
    out += "  %" + n.name + " = ";
    write_op(out, n.op);
    out += '(';
    bool first = true;
    for (const Arg& a : n.args) {
      if (!std::exchange(first, false)) out += ", ";
      write_arg(out, a);
    }
    for (const auto& [key, a] : n.kwargs) {
      if (!std::exchange(first, false)) out += ", ";
      out += key + "=";
      write_arg(out, a);
    }
    out += ") : ";
    if (n.results.size() == 1 && !n.returns_list) {
      write_meta(out, n.results[0]);
    } else {
      out += n.returns_list ? '[' : '(';
      for (size_t i = 0; i < n.results.size(); ++i) {
        if (i) out += ", ";
        write_meta(out, n.results[i]);
      }
      out += n.returns_list ? ']' : ')';
    }
  }
  std::string notes;
  auto note = [&](const std::string& text) { notes += (notes.empty() ? "" : ", ") + text; };
  if (!n.grad_enabled) note("no_grad");
  if (n.autocast != DType::Opaque) note("autocast=" + std::string(dtype_name(n.autocast)));
  if (n.backward) note("backward");
  if (n.checkpoint) note("checkpoint=" + std::to_string(n.checkpoint));
  if (n.recomputed) note("recomputed");
  if (n.frozen) note("frozen");
  if (!n.module_path.empty()) {
    std::string path = "module=";
    write_string(path, n.module_path);
    note(path);
  }
  if (!notes.empty()) out += " {" + notes + "}";
  out += '\n';
}

}  // namespace

std::string print(const TensorMeta& t) {
  std::string out;
  write_meta(out, t);
  return out;
}

std::string print(const Arg& a) {
  std::string out;
  write_arg(out, a);
  return out;
}

std::string print(const Graph& g, bool stacks) {
  std::string out = "graph " + g.name + " {\n";
  const StackTrace* last = nullptr;
  for (const auto& node : g.nodes()) {
    if (stacks && node->stack && !node->stack->empty() && node->stack.get() != last) {
      last = node->stack.get();
      const StackFrame& frame = *last->back();
      out += "  # " + frame.file + ":" + std::to_string(frame.line) + " in " + frame.function + "\n";
    }
    write_node(out, *node);
  }
  for (const Mutation& m : g.mutations()) {
    out += "  mutate ";
    write_value(out, m.input);
    out += " = ";
    write_value(out, m.value);
    if (m.uncounted) out += " uncounted";
    out += '\n';
  }
  if (g.asked) out += "  ask " + std::to_string(*g.asked) + "\n";
  out += "  return (";
  for (size_t i = 0; i < g.outputs().size(); ++i) {
    if (i) out += ", ";
    write_arg(out, g.outputs()[i]);
  }
  return out + ")\n}\n";
}

}  // namespace kiln::graph
