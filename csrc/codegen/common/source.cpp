#include "codegen/common/source.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <map>

#include "base/error.h"

namespace kiln::codegen {

using loops::BufferId;
using symbolic::AtomKind;

std::string identifier(const std::string& name) {
  std::string text = name.empty() || std::isdigit(static_cast<unsigned char>(name[0])) ? "b" + name : name;
  for (char& c : text)
    if (!std::isalnum(static_cast<unsigned char>(c))) c = '_';
  return text;
}

BufferNames name_buffers(const schedule::Kernel& kernel, const std::vector<loops::Buffer>& buffers, size_t num_args) {
  BufferNames names;
  std::map<std::string, int> taken;
  const auto give = [&](BufferId b) {
    std::string name = identifier(buffers.at(static_cast<size_t>(b)).name) + "_";
    if (const int n = taken[name]++) name += std::to_string(n) + "_";
    names.of[b] = std::move(name);
  };
  for (size_t i = 0; i < num_args; ++i) give(kernel.args[i].buffer);
  for (const loops::Stage& s : kernel.nest.stages)
    for (loops::ValueId id : s.body) {
      const BufferId b = kernel.nest.insts[static_cast<size_t>(id)].buffer;
      if (b < 0 || names.of.count(b)) continue;
      const loops::Buffer& buffer = buffers.at(static_cast<size_t>(b));
      KILN_CHECK(buffer.kind == loops::BufferKind::Scratch,
                 "a kernel touches " + buffer.name + ", which is no argument");
      give(b);
      names.scratch.push_back(b);
    }
  return names;
}

namespace {

std::string enclosed(const std::string& text) { return text.find(' ') == std::string::npos ? text : "(" + text + ")"; }

std::string atom_text(const symbolic::AtomNode& a, const IndexStyle& style) {
  const bool positive = a.a.range().lo >= 0;
  const std::string divisor = std::to_string(a.divisor);
  const auto call = [](const std::string& f, const std::string& x, const std::string& y) {
    return f + "(" + x + ", " + y + ")";
  };
  switch (a.kind) {
    case AtomKind::Var:
      return style.variable(a);
    case AtomKind::FloorDiv:
      return positive ? "(" + enclosed(index_text(a.a, style)) + " " + style.divide + " " + divisor + ")"
                      : call(style.floor_div, index_text(a.a, style), divisor);
    case AtomKind::Mod:
      return positive ? "(" + enclosed(index_text(a.a, style)) + " % " + divisor + ")"
                      : call(style.floor_mod, index_text(a.a, style), divisor);
    case AtomKind::Min:
      return call(style.min, index_text(a.a, style), index_text(a.b, style));
    case AtomKind::Max:
      return call(style.max, index_text(a.a, style), index_text(a.b, style));
    case AtomKind::Product:
      return enclosed(index_text(a.a, style)) + " * " + enclosed(index_text(a.b, style));
  }
  throw InternalError("an index of no kind");
}

}  // namespace

std::string index_text(const symbolic::Expr& e, const IndexStyle& style) {
  std::string text;
  for (const symbolic::Term& t : e.terms()) {
    const int64_t magnitude = t.coef < 0 ? -t.coef : t.coef;
    text += t.coef < 0 ? (text.empty() ? "-" : " - ") : (text.empty() ? "" : " + ");
    text += (magnitude == 1 ? "" : std::to_string(magnitude) + " * ") + atom_text(*t.atom, style);
  }
  const int64_t c = e.constant();
  if (text.empty()) return c == INT64_MIN ? "(-9223372036854775807 - 1)" : std::to_string(c);
  if (c) text += (c < 0 ? " - " : " + ") + std::to_string(c < 0 ? -c : c);
  return text;
}

std::string float_digits(double v, DType t) {
  char digits[64];
  char* end = t == DType::Float64 ? std::to_chars(digits, digits + sizeof digits, v).ptr
                                  : std::to_chars(digits, digits + sizeof digits, static_cast<float>(v)).ptr;
  std::string text(digits, end);
  if (text.find_first_of(".e") == std::string::npos) text += ".0";
  return text;
}

const char* shared_infix(loops::Opcode op) {
  using loops::Opcode;
  switch (op) {
    case Opcode::And:
      return "&";
    case Opcode::Or:
      return "|";
    case Opcode::Xor:
      return "^";
    case Opcode::Eq:
      return "==";
    case Opcode::Ne:
      return "!=";
    case Opcode::Lt:
      return "<";
    case Opcode::Le:
      return "<=";
    case Opcode::Gt:
      return ">";
    case Opcode::Ge:
      return ">=";
    default:
      return nullptr;
  }
}

int error_number(std::vector<std::string>& errors, const std::string& message) {
  const auto found = std::find(errors.begin(), errors.end(), message);
  if (found == errors.end()) errors.push_back(message);
  return static_cast<int>(std::find(errors.begin(), errors.end(), message) - errors.begin()) + 1;
}

}  // namespace kiln::codegen
