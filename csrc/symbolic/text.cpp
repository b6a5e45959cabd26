#include <cctype>

#include "base/error.h"
#include "symbolic/expr.h"

namespace kiln::symbolic {
namespace {

std::string print_atom(const AtomNode& n) {
  switch (n.kind) {
    case AtomKind::Var:
      return (n.var_kind == VarKind::Loop ? "i" : n.var_kind == VarKind::Indirect ? "t" : "s") + std::to_string(n.id);
    case AtomKind::FloorDiv:
    case AtomKind::Mod: {
      std::string a = print(n.a);
      if (a.find(' ') != std::string::npos || a.find('*') != std::string::npos) a = "(" + a + ")";
      return "(" + a + (n.kind == AtomKind::Mod ? " % " : " // ") + std::to_string(n.divisor) + ")";
    }
    case AtomKind::Min:
      return "min(" + print(n.a) + ", " + print(n.b) + ")";
    case AtomKind::Max:
      return "max(" + print(n.a) + ", " + print(n.b) + ")";
    case AtomKind::Product:
      return print(n.a) + "*" + print(n.b);
  }
  return "?";
}

/// Recursive descent over `sum := product (('+'|'-') product)*`, `product := unary (('*'|'//'|'%') unary)*`.
class Parser {
 public:
  Parser(std::string_view text, const std::function<Range(VarKind, int)>& range_of) : s_(text), range_of_(range_of) {}
  Expr parse() {
    Expr e = sum();
    skip();
    if (at_ != s_.size()) error("unexpected text");
    return e;
  }

 private:
  [[noreturn]] void error(const std::string& what) {
    throw UserError("index expression '" + std::string(s_) + "', column " + std::to_string(at_ + 1) + ": " + what);
  }
  void skip() {
    while (at_ < s_.size() && s_[at_] == ' ') ++at_;
  }
  bool take(std::string_view token) {
    skip();
    if (s_.substr(at_, token.size()) != token) return false;
    at_ += token.size();
    return true;
  }
  void need(std::string_view token) {
    if (!take(token)) error("expected '" + std::string(token) + "'");
  }
  int64_t number() {
    skip();
    const size_t start = at_;
    while (at_ < s_.size() && std::isdigit(static_cast<unsigned char>(s_[at_]))) ++at_;
    if (start == at_ || at_ - start > 18) error("expected a number");
    return std::stoll(std::string(s_.substr(start, at_ - start)));
  }
  Expr sum() {
    Expr e = product();
    for (;;) {
      if (take("+"))
        e = e + product();
      else if (take("-"))
        e = e - product();
      else
        return e;
    }
  }
  Expr product() {
    Expr e = unary();
    for (;;) {
      if (take("*")) {
        e = e * unary();
      } else if (take("//") || take("%")) {
        const bool is_mod = s_[at_ - 1] == '%';
        const int64_t d = number();
        if (d <= 0) error("the divisor must be positive");
        e = is_mod ? mod(e, d) : floordiv(e, d);
      } else {
        return e;
      }
    }
  }
  Expr unary() {
    if (take("-")) return unary() * Expr(-1);
    if (take("(")) {
      Expr e = sum();
      need(")");
      return e;
    }
    if (take("min(") || take("max(")) {
      const bool is_min = s_[at_ - 2] == 'n';
      Expr a = sum();
      need(",");
      Expr b = sum();
      need(")");
      return is_min ? min(a, b) : max(a, b);
    }
    skip();
    if (at_ < s_.size() && std::isdigit(static_cast<unsigned char>(s_[at_]))) return Expr(number());
    if (at_ < s_.size() && (s_[at_] == 'i' || s_[at_] == 't' || s_[at_] == 's')) {
      const char c = s_[at_++];
      const VarKind kind = c == 'i' ? VarKind::Loop : c == 't' ? VarKind::Indirect : VarKind::Size;
      const int id = static_cast<int>(number());
      return Expr::var(id, range_of_(kind, id), kind);
    }
    error("expected an operand");
  }
  std::string_view s_;
  size_t at_ = 0;
  const std::function<Range(VarKind, int)>& range_of_;
};

}  // namespace

std::string print(const Expr& e) {
  std::string out;
  for (const Term& t : e.terms()) {
    const std::string atom = print_atom(*t.atom);
    const int64_t k = t.coef < 0 ? -t.coef : t.coef;
    if (out.empty())
      out = t.coef < 0 ? "-" : "";
    else
      out += t.coef < 0 ? " - " : " + ";
    if (k != 1) out += std::to_string(k) + "*";
    out += atom;
  }
  if (out.empty()) return std::to_string(e.constant());
  if (e.constant() != 0) {
    out += e.constant() < 0 ? " - " : " + ";
    out += std::to_string(e.constant() < 0 ? -e.constant() : e.constant());
  }
  return out;
}

Expr parse(std::string_view text, const std::function<Range(VarKind, int id)>& range_of) {
  return Parser(text, range_of).parse();
}

}  // namespace kiln::symbolic
