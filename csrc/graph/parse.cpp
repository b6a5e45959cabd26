#include <cctype>
#include <charconv>
#include <cmath>
#include <limits>

#include "graph/graph.h"

// Recursive descent over the text form; grammar in docs/ir/graph.md.
namespace kiln::graph {
namespace {

class Parser {
 public:
  explicit Parser(std::string_view text) : text_(text), graph_(std::make_unique<Graph>()) {}

  std::unique_ptr<Graph> run() {
    keyword("graph");
    graph_->name = word("a graph's name");
    expect('{');
    for (;;) {
      if (accept('%'))
        call();
      else if (const std::string what = word("a statement"); what == "input")
        input();
      else if (what == "mutate")
        mutate();
      else if (what == "ask")
        graph_->asked = static_cast<size_t>(integer());
      else if (what == "return")
        break;
      else
        fail("expected %name, input, mutate, ask or return, not '" + what + "'");
    }
    expect('(');
    graph_->outputs() = args(')');
    expect('}');
    skip();
    if (at_ != text_.size()) fail("text after the graph");
    return std::move(graph_);
  }

 private:
  [[noreturn]] void fail(const std::string& message) const {
    size_t line = 1, start = 0;
    for (size_t i = 0; i < at_ && i < text_.size(); ++i)
      if (text_[i] == '\n') {
        ++line;
        start = i + 1;
      }
    throw UserError("graph text, line " + std::to_string(line) + ", column " + std::to_string(at_ - start + 1) + ": " +
                    message);
  }

  // --- tokens ---
  void skip() {
    while (at_ < text_.size()) {
      if (std::isspace(static_cast<unsigned char>(text_[at_])))
        ++at_;
      else if (text_[at_] == '#')
        at_ = std::min(text_.find('\n', at_), text_.size());
      else
        break;
    }
  }
  char peek() {
    skip();
    return at_ < text_.size() ? text_[at_] : '\0';
  }
  bool accept(char c) {
    if (peek() != c) return false;
    ++at_;
    return true;
  }
  void expect(char c) {
    if (!accept(c)) fail(std::string("expected '") + c + "'");
  }
  static bool is_word(char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_'; }
  std::string word(const std::string& what) {
    skip();
    const size_t start = at_;
    while (at_ < text_.size() && is_word(text_[at_])) ++at_;
    if (start == at_) fail("expected " + what);
    return std::string(text_.substr(start, at_ - start));
  }
  void keyword(const std::string& k) {
    if (word("'" + k + "'") != k) fail("expected '" + k + "'");
  }
  bool accept_word(std::string_view w) {
    skip();
    if (text_.substr(at_, w.size()) != w) return false;
    if (at_ + w.size() < text_.size() && is_word(text_[at_ + w.size()])) return false;
    at_ += w.size();
    return true;
  }
  int64_t integer() {
    skip();
    int64_t v = 0;
    const auto [end, error] = std::from_chars(text_.data() + at_, text_.data() + text_.size(), v);
    if (error != std::errc()) fail("expected an integer");
    at_ = static_cast<size_t>(end - text_.data());
    return v;
  }
  std::string string() {
    expect('"');
    std::string out;
    while (at_ < text_.size() && text_[at_] != '"') {
      char c = text_[at_++];
      if (c == '\\') {
        if (at_ >= text_.size()) break;
        c = text_[at_++];
        if (c == 'n')
          c = '\n';
        else if (c == 'x') {
          int code = 0;
          const auto [end, error] =
              std::from_chars(text_.data() + at_, text_.data() + std::min(at_ + 2, text_.size()), code, 16);
          if (error != std::errc() || end != text_.data() + at_ + 2) fail("\\x needs two hexadecimal digits");
          at_ += 2;
          c = static_cast<char>(code);
        }
      }
      out += c;
    }
    if (at_ >= text_.size()) fail("unterminated string");
    ++at_;
    return out;
  }

  // --- types ---
  std::vector<int64_t> ints(char close) {
    std::vector<int64_t> out;
    if (accept(close)) return out;
    do out.push_back(integer());
    while (accept(','));
    expect(close);
    return out;
  }
  Device device() {
    Device d;
    const std::string name = word("a device");
    if (name == "cpu")
      d.type = DeviceType::CPU;
    else if (name == "cuda")
      d.type = DeviceType::CUDA;
    else if (name == "meta")
      d.type = DeviceType::Meta;
    else if (name == "other")
      d.type = DeviceType::Other;
    else
      fail("unknown device '" + name + "'");
    if (accept(':')) {
      const int64_t index = integer();
      if (index < 0 || index > std::numeric_limits<int8_t>::max()) fail("device index out of range");
      d.index = static_cast<int8_t>(index);
    }
    return d;
  }
  DType dtype_of(const std::string& name) {
    const auto dtype = dtype_from_name(name);
    if (!dtype) fail("unknown dtype '" + name + "'");
    return *dtype;
  }
  TensorMeta type() {
    TensorMeta t;
    const std::string name = word("a dtype");
    if (name == "none") return ops::undefined_meta();
    t.dtype = dtype_of(name);
    expect('[');
    t.sizes = ints(']');
    if (accept('<')) {
      t.strides = ints('>');
      if (t.strides.size() != t.sizes.size()) fail("as many strides as sizes are needed");
    } else {
      t.strides = contiguous_strides(t.sizes);
    }
    if (accept('+')) t.offset = integer();
    if (accept('@')) t.device = device();
    t.requires_grad = accept_word("grad");
    return t;
  }
  std::vector<TensorMeta> types(char close) {
    std::vector<TensorMeta> out;
    if (accept(close)) return out;
    do out.push_back(type());
    while (accept(','));
    expect(close);
    return out;
  }

  // --- arguments ---
  Value value() {  // after '%'
    const std::string name = word("a name");
    const auto it = nodes_.find(name);
    if (it == nodes_.end()) fail("%" + name + " is not defined before its use");
    Value v{it->second, 0};
    if (at_ < text_.size() && text_[at_] == '#') {
      ++at_;
      const int64_t index = integer();
      if (index < 0) fail("a result's index cannot be negative");
      v.index = static_cast<uint32_t>(index);
    }
    if (v.index >= v.node->results.size()) fail("%" + name + " has no result " + std::to_string(v.index));
    return v;
  }
  double real() {
    skip();
    for (const auto& [text, number] : {std::pair<std::string_view, double>{"-inf", -HUGE_VAL},
                                       {"inf", HUGE_VAL},
                                       {"nan", std::numeric_limits<double>::quiet_NaN()}})
      if (accept_word(text)) return number;
    double v = 0;
    const auto [end, error] = std::from_chars(text_.data() + at_, text_.data() + text_.size(), v);
    if (error != std::errc()) fail("expected a number");
    at_ = static_cast<size_t>(end - text_.data());
    return v;
  }
  Arg number() {
    if (accept_word("-inf")) return -HUGE_VAL;
    size_t end = at_ + (text_[at_] == '-');
    while (end < text_.size() && std::isdigit(static_cast<unsigned char>(text_[end]))) ++end;
    const bool is_real = end < text_.size() && (text_[end] == '.' || text_[end] == 'e');
    if (is_real) return real();
    return integer();
  }
  Arg arg() {
    const char c = peek();
    if (c == '%') {
      ++at_;
      return value();
    }
    if (c == '[') {
      ++at_;
      return args(']');
    }
    if (c == '"') return string();
    if (c == '-' || std::isdigit(static_cast<unsigned char>(c))) return number();
    const std::string w = word("an argument");
    if (w == "None") return {};
    if (w == "True") return true;
    if (w == "False") return false;
    if (w == "undefined") return Value{};
    if (w == "inf") return HUGE_VAL;
    if (w == "nan") return std::numeric_limits<double>::quiet_NaN();
    if (w == "complex") {
      expect('(');
      const double re = real();
      expect(',');
      const double im = real();
      expect(')');
      return std::complex<double>(re, im);
    }
    if (w == "device") {
      expect('(');
      const Device d = device();
      expect(')');
      return d;
    }
    if (w == "strided") return Layout::Strided;
    if (w == "sparse") return Layout::Sparse;
    if (w == "mkldnn") return Layout::Mkldnn;
    if (w == "other_layout") return Layout::Other;
    if (w == "contiguous_format") return MemoryFormat::Contiguous;
    if (w == "preserve_format") return MemoryFormat::Preserve;
    if (w == "channels_last") return MemoryFormat::ChannelsLast;
    if (w == "channels_last_3d") return MemoryFormat::ChannelsLast3d;
    if (const auto dtype = dtype_from_name(w)) return *dtype;
    fail("unknown argument '" + w + "'");
  }
  std::vector<Arg> args(char close) {
    std::vector<Arg> out;
    if (accept(close)) return out;
    do out.push_back(arg());
    while (accept(','));
    expect(close);
    return out;
  }

  // --- statements ---
  void define(Node* node, const std::string& name) {
    if (!nodes_.emplace(name, node).second) fail("%" + name + " is defined twice");
    if (node->name != name) fail("'" + name + "' is not a name");
  }
  void notes(Node* n) {
    if (!accept('{')) return;
    do {
      const std::string w = word("a note");
      if (w == "no_grad")
        n->grad_enabled = false;
      else if (w == "backward")
        n->backward = true;
      else if (w == "recomputed")
        n->recomputed = true;
      else if (w == "checkpoint") {
        expect('=');
        n->checkpoint = static_cast<int>(integer());
      } else if (w == "autocast") {
        expect('=');
        n->autocast = dtype_of(word("a dtype"));
      } else if (w == "frozen")
        n->frozen = true;
      else if (w == "module") {
        expect('=');
        n->module_path = string();
      } else
        fail("unknown note '" + w + "'");
    } while (accept(','));
    expect('}');
  }
  void input() {
    expect('%');
    const std::string name = word("a name");
    expect(':');
    Node* n = graph_->add_input(name, type());
    define(n, name);
    notes(n);
  }
  std::string op_name() {
    if (peek() == '"') return string();
    const size_t start = at_;
    while (at_ < text_.size() && (is_word(text_[at_]) || text_[at_] == '.' || text_[at_] == ':')) ++at_;
    if (start == at_) fail("expected an operator's name");
    return std::string(text_.substr(start, at_ - start));
  }
  // A keyword argument: a word and '=' (no argument of another form has '=' after a word).
  std::optional<std::string> key() {
    skip();
    size_t end = at_;
    while (end < text_.size() && is_word(text_[end])) ++end;
    if (end == at_ || end >= text_.size() || text_[end] != '=') return std::nullopt;
    std::string k(text_.substr(at_, end - at_));
    at_ = end + 1;
    return k;
  }
  void call() {  // after '%'
    const std::string name = word("a name");
    expect('=');
    const Op op{op_name()};
    expect('(');
    std::vector<Arg> positional;
    std::vector<std::pair<std::string, Arg>> named;
    if (!accept(')')) {
      do {
        if (auto k = key())
          named.emplace_back(*k, arg());
        else if (named.empty())
          positional.push_back(arg());
        else
          fail("a positional argument after a keyword argument");
      } while (accept(','));
      expect(')');
    }
    expect(':');
    std::vector<TensorMeta> results;
    bool list = false;
    if (accept('[')) {
      list = true;
      results = types(']');
    } else if (accept('(')) {
      results = types(')');
    } else {
      results.push_back(type());
    }
    Node* n = graph_->add_call(op, std::move(positional), std::move(results), name);
    n->kwargs = std::move(named);
    n->returns_list = list;
    define(n, name);
    notes(n);
  }
  void mutate() {
    expect('%');
    const Value input = value();
    expect('=');
    expect('%');
    const Value changed = value();
    graph_->mutations().push_back({input, changed, accept_word("uncounted")});
  }

  std::string_view text_;
  size_t at_ = 0;
  std::unique_ptr<Graph> graph_;
  std::unordered_map<std::string, Node*> nodes_;
};

}  // namespace

std::unique_ptr<Graph> parse(std::string_view text) { return Parser(text).run(); }

}  // namespace kiln::graph
