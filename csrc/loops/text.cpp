#include <charconv>
#include <cstring>

#include "base/error.h"
#include "loops/loops.h"

// The text form of programs. Values are renumbered in order of appearance, so equal nests print equally.
namespace kiln::loops {
namespace {

constexpr const char* kReduceNames[] = {"Sum",           "Prod",
                                        "Max",           "Min",
                                        "Any",           "All",
                                        "ArgMax",        "ArgMin",
                                        "Welford",       "WelfordCombine",
                                        "OnlineSoftmax", "OnlineSoftmaxCombine"};
constexpr const char* kKindNames[] = {"input", "output", "temp", "const", "scratch"};

std::string number(double v) {
  char text[64];
  const auto r = std::to_chars(text, text + sizeof text, v);
  return std::string(text, r.ptr);
}

std::string quoted(const std::string& s) {
  std::string out = "\"";
  for (char c : s) {
    if (c == '"' || c == '\\') out += '\\';
    if (c == '\n') {
      out += "\\n";
      continue;
    }
    out += c;
  }
  return out + "\"";
}

std::string var_list(const std::vector<int>& vars) {
  std::string out = "[";
  for (size_t i = 0; i < vars.size(); ++i) out += (i ? ", i" : "i") + std::to_string(vars[i]);
  return out + "]";
}

std::string print_nest(const Nest& n, const std::function<std::string(BufferId)>& buffer_name,
                       const std::string& indent) {
  std::string out = indent + "nest " + quoted(n.name) + " extents [";
  for (size_t i = 0; i < n.extents.size(); ++i) out += (i ? ", " : "") + std::to_string(n.extents[i]);
  out += "] outer " + var_list(n.outer);
  if (n.not_before) out += " not_before " + std::to_string(n.not_before);
  if (n.after_errors) out += " after_errors";
  out += " {\n";
  std::vector<int> number_of(n.insts.size(), -1);
  int next = 0;
  for (const Stage& s : n.stages) {
    out += indent + "  stage " + var_list(s.vars) + " {\n";
    for (ValueId id : s.body) {
      const Inst& i = n.insts[id];
      number_of[id] = next++;
      const auto arg = [&](size_t k) {
        const ValueId a = i.args.at(k);
        return "%" + std::to_string(a >= 0 && a < static_cast<int>(number_of.size()) ? number_of[a] : -1);
      };
      const auto place = [&] { return " " + buffer_name(i.buffer) + "[" + print(i.index) + "]"; };
      std::string line;
      if (i.op == Opcode::Store) {
        line = i.mode == StoreMode::Add ? "StoreAdd" : "Store";
        line += " " + std::string(dtype_name(i.dtype)) + place() + " " + arg(0);
        if (i.args.size() > 1) line += " if " + arg(1);
      } else {
        line = "%" + std::to_string(number_of[id]) + " = " + std::string(opcode_name(i.op));
        if (i.op == Opcode::Reduce || i.op == Opcode::Scan) line += "." + std::string(reduce_name(i.reduce));
        line += " " + std::string(dtype_name(i.dtype));
        switch (i.op) {
          case Opcode::ConstInt:
            line += " " + std::to_string(i.imm);
            break;
          case Opcode::ConstFloat:
            line += " " + number(i.fimm);
            break;
          case Opcode::IndexValue:
            line += " " + print(i.index);
            break;
          case Opcode::InRange:
            line += " " + print(i.index) + " in " + std::to_string(i.imm) + ".." + std::to_string(i.imm2);
            break;
          case Opcode::Load:
          case Opcode::MaskedLoad:
            line += place();
            break;
          default:
            break;
        }
        for (size_t k = 0; k < i.args.size(); ++k) line += (k ? ", " : " ") + arg(k);
        if (i.op == Opcode::Project) line += " result " + std::to_string(i.imm);
        if (i.op == Opcode::Indirect)
          line += " as t" + std::to_string(i.var) + " size " + std::to_string(i.imm) + (i.wrap ? " wrap " : " ") +
                  quoted(i.message);
      }
      out += indent + "    " + line + "\n";
    }
    out += indent + "  }\n";
  }
  return out + indent + "}\n";
}

}  // namespace

std::string_view reduce_name(ReduceKind k) { return kReduceNames[static_cast<int>(k)]; }

std::string print(const Nest& n, const std::vector<Buffer>& buffers) {
  return print(n, [&](BufferId b) { return buffers.at(b).name; });
}

std::string print(const Nest& n, const std::function<std::string(BufferId)>& buffer_name) {
  return print_nest(n, buffer_name, "");
}

std::string print(const Program& p) {
  std::string out = "program {\n";
  for (const Buffer& b : p.buffers)
    out += "  buffer " + b.name + " " + std::string(dtype_name(b.dtype)) + " " + std::to_string(b.numel) + " " +
           kKindNames[static_cast<int>(b.kind)] + "\n";
  const auto name = [&](BufferId b) { return p.buffers.at(b).name; };
  const auto names = [&](const std::vector<BufferId>& list) {
    std::string text = "[";
    for (size_t i = 0; i < list.size(); ++i) text += (i ? ", " : "") + name(list[i]);
    return text + "]";
  };
  for (const Program::Item& item : p.items) {
    if (item.is_nest) {
      out += print_nest(p.nests[item.index], name, "  ");
    } else {
      const Extern& e = p.externs[item.index];
      out += "  extern " + std::to_string(e.index) + " " + quoted(e.name) + " reads " + names(e.reads) + " writes " +
             names(e.writes) + (e.effect ? " effect" : "") + (e.raises ? " raises" : "") +
             (e.rows > 0 ? " rows " + std::to_string(e.rows) : "") + "\n";
    }
  }
  return out + "}\n";
}

namespace {

class Parser {
 public:
  explicit Parser(std::string_view text) : s_(text) {}
  Program program() {
    need("program");
    need("{");
    while (!take("}")) {
      if (take("buffer")) {
        Buffer b;
        b.name = word();
        b.dtype = dtype();
        b.numel = integer();
        b.kind = static_cast<BufferKind>(one_of(word(), kKindNames, std::size(kKindNames)));
        if (ids_.count(b.name)) error("second buffer " + b.name);
        ids_[b.name] = static_cast<BufferId>(p_.buffers.size());
        p_.buffers.push_back(std::move(b));
      } else if (take("nest")) {
        p_.add_nest(nest());
      } else if (take("extern")) {
        Extern e;
        e.index = static_cast<int>(integer());
        e.name = string();
        need("reads");
        e.reads = buffer_list();
        need("writes");
        e.writes = buffer_list();
        e.effect = take("effect");
        e.raises = take("raises");
        if (take("rows")) e.rows = integer();
        p_.add_extern(std::move(e));
      } else {
        error("expected buffer, nest or extern");
      }
    }
    skip();
    if (at_ != s_.size()) error("text after the program");
    return std::move(p_);
  }

 private:
  [[noreturn]] void error(const std::string& what) {
    int line = 1, column = 1;
    for (size_t i = 0; i < at_ && i < s_.size(); ++i) {
      column = s_[i] == '\n' ? 1 : column + 1;
      line += s_[i] == '\n';
    }
    throw UserError("loop program, line " + std::to_string(line) + ", column " + std::to_string(column) + ": " + what);
  }
  void skip() {
    while (at_ < s_.size() && std::isspace(static_cast<unsigned char>(s_[at_]))) ++at_;
  }
  static bool is_word(char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '.'; }
  /// "t" and "i" are prefixes of numbers; other words must end where the token does.
  bool take(std::string_view token) {
    skip();
    if (s_.substr(at_, token.size()) != token) return false;
    if (token.size() > 1 && is_word(token.back()) && token != ".." && at_ + token.size() < s_.size() &&
        is_word(s_[at_ + token.size()]))
      return false;
    at_ += token.size();
    return true;
  }
  void need(std::string_view token) {
    if (!take(token)) error("expected '" + std::string(token) + "'");
  }
  std::string word() {
    skip();
    const size_t start = at_;
    while (at_ < s_.size() && is_word(s_[at_])) ++at_;
    if (start == at_) error("expected a word");
    return std::string(s_.substr(start, at_ - start));
  }
  int64_t integer() {
    skip();
    int64_t v = 0;
    const auto r = std::from_chars(s_.data() + at_, s_.data() + s_.size(), v);
    if (r.ec != std::errc()) error("expected an integer");
    at_ = r.ptr - s_.data();
    return v;
  }
  double real() {
    skip();
    double v = 0;
    const auto r = std::from_chars(s_.data() + at_, s_.data() + s_.size(), v);
    if (r.ec != std::errc()) error("expected a number");
    at_ = r.ptr - s_.data();
    return v;
  }
  std::string string() {
    need("\"");
    std::string out;
    while (at_ < s_.size() && s_[at_] != '"') {
      if (s_[at_] == '\\' && at_ + 1 < s_.size()) {
        ++at_;
        out += s_[at_] == 'n' ? '\n' : s_[at_];
        ++at_;
      } else {
        out += s_[at_++];
      }
    }
    if (at_ == s_.size()) error("the string does not end");
    ++at_;
    return out;
  }
  int one_of(const std::string& name, const char* const* names, size_t count) {
    for (size_t i = 0; i < count; ++i)
      if (name == names[i]) return static_cast<int>(i);
    error("unknown name " + name);
  }
  DType dtype() {
    const std::string name = word();
    const auto t = dtype_from_name(name);
    if (!t) error("unknown dtype " + name);
    return *t;
  }
  BufferId buffer() {
    const std::string name = word();
    const auto it = ids_.find(name);
    if (it == ids_.end()) error("unknown buffer " + name);
    return it->second;
  }
  std::vector<BufferId> buffer_list() {
    std::vector<BufferId> out;
    need("[");
    while (!take("]")) {
      if (!out.empty()) need(",");
      out.push_back(buffer());
    }
    return out;
  }
  std::vector<int> var_list(const Nest& n) {
    std::vector<int> out;
    need("[");
    while (!take("]")) {
      if (!out.empty()) need(",");
      need("i");
      const int64_t v = integer();
      if (v < 0 || v >= static_cast<int64_t>(n.extents.size())) error("unknown variable");
      out.push_back(static_cast<int>(v));
    }
    return out;
  }
  Expr expr_until(const Nest& n, std::string_view stop) {
    skip();
    const size_t end = s_.find(stop, at_);
    if (end == std::string_view::npos) error("expected '" + std::string(stop) + "'");
    const Expr e = symbolic::parse(s_.substr(at_, end - at_), [&](symbolic::VarKind kind, int id) -> symbolic::Range {
      if (kind == symbolic::VarKind::Loop && id < static_cast<int>(n.extents.size()))
        return {0, std::max<int64_t>(n.extents[id], 1) - 1};
      if (kind == symbolic::VarKind::Indirect && sizes_.count(id)) return {0, std::max<int64_t>(sizes_[id], 1) - 1};
      error("unknown index variable");
    });
    at_ = end + stop.size();
    return e;
  }
  ValueId value() {
    need("%");
    const int64_t v = integer();
    const auto it = values_.find(v);
    if (it == values_.end()) error("unknown value %" + std::to_string(v));
    return it->second;
  }
  Nest nest() {
    Nest n;
    values_.clear();
    sizes_.clear();
    n.name = string();
    need("extents");
    need("[");
    while (!take("]")) {
      if (!n.extents.empty()) need(",");
      n.extents.push_back(integer());
    }
    need("outer");
    n.outer = var_list(n);
    if (take("not_before")) n.not_before = static_cast<int>(integer());
    n.after_errors = take("after_errors");
    need("{");
    while (!take("}")) {
      need("stage");
      Stage s;
      s.vars = var_list(n);
      need("{");
      while (!take("}")) {
        const bool defines = take("%");
        const int64_t number = defines ? integer() : -1;
        if (defines) need("=");
        Inst i = inst(n);
        const ValueId id = n.add(std::move(i));
        if (defines) values_[number] = id;
        s.body.push_back(id);
      }
      n.stages.push_back(std::move(s));
    }
    return n;
  }
  Inst inst(Nest& n) {
    Inst i;
    std::string name = word();
    const size_t dot = name.find('.');
    if (dot != std::string::npos) {
      i.reduce = static_cast<ReduceKind>(one_of(name.substr(dot + 1), kReduceNames, std::size(kReduceNames)));
      name.resize(dot);
    }
    i.dtype = dtype();
    if (name == "Store" || name == "StoreAdd") {
      i.op = Opcode::Store;
      i.mode = name == "StoreAdd" ? StoreMode::Add : StoreMode::Assign;
      i.buffer = buffer();
      need("[");
      i.index = expr_until(n, "]");
      i.args.push_back(value());
      if (take("if")) i.args.push_back(value());
      return i;
    }
    int op = -1;
    for (int k = 0; k <= static_cast<int>(Opcode::Scan); ++k)
      if (opcode_name(static_cast<Opcode>(k)) == name) op = k;
    if (op < 0) error("unknown instruction " + name);
    i.op = static_cast<Opcode>(op);
    switch (i.op) {
      case Opcode::ConstInt:
        i.imm = integer();
        break;
      case Opcode::ConstFloat:
        i.fimm = real();
        break;
      case Opcode::IndexValue:
        i.index = expr_until(n, "\n");
        break;
      case Opcode::InRange:
        i.index = expr_until(n, " in ");
        i.imm = integer();
        need("..");
        i.imm2 = integer();
        break;
      case Opcode::Load:
      case Opcode::MaskedLoad:
        i.buffer = buffer();
        need("[");
        i.index = expr_until(n, "]");
        break;
      default:
        break;
    }
    const int count = i.op == Opcode::Reduce || i.op == Opcode::Scan ? operand_count(i.reduce) : arity(i.op);
    for (int k = 0; k < count; ++k) {
      if (k) need(",");
      i.args.push_back(value());
    }
    if (i.op == Opcode::Project) {
      need("result");
      i.imm = integer();
    }
    if (i.op == Opcode::Indirect) {
      need("as");
      need("t");
      i.var = static_cast<int>(integer());
      need("size");
      i.imm = integer();
      i.wrap = take("wrap");
      i.message = string();
      sizes_[i.var] = i.imm;
      n.indirect_vars = std::max(n.indirect_vars, i.var + 1);
    }
    return i;
  }

  std::string_view s_;
  size_t at_ = 0;
  Program p_;
  std::unordered_map<std::string, BufferId> ids_;
  std::unordered_map<int64_t, ValueId> values_;
  std::unordered_map<int, int64_t> sizes_;
};

}  // namespace

Program parse(std::string_view text) { return Parser(text).program(); }

}  // namespace kiln::loops
