#pragma once
#include <c10/core/SymInt.h>
#include <c10/core/SymNodeImpl.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "graph/graph.h"
#include "symbolic/expr.h"

// Sizes that are left open while a graph is traced. The fakes have the sizes of the call that is traced; beside them a
// program that asks for a size gets an expression over the sizes of the graph's values (its leaves), and whatever a
// truth or a number is wanted of becomes a condition. A graph is right for other sizes if all conditions hold there.
// Shapes need no expressions of their own: whoever runs the graph's operators at other sizes sees what they give.
namespace kiln::aten {

class Sizes : public std::enable_shared_from_this<Sizes> {
 public:
  using Expr = symbolic::Expr;
  /// How an expression compares with zero.
  enum class Relation : uint8_t { Equal, NotEqual, Less, LessEqual };

  /// The size of `value` in dimension `dim`, a variable of expressions; `hint`: in the traced call. Without a value: an
  /// int that the program is given, the one with the number `dim`.
  struct Leaf {
    graph::Value value;
    int64_t dim;
    int64_t hint;
  };
  struct Condition {
    enum class Kind : uint8_t {
      Compare,     // `size` `relation` 0
      Layout,      // `value` has the sizes, strides and offset of `layout`
      Contiguous,  // whether `value` is contiguous: `contiguous`
    };
    Kind kind;
    Expr size;
    Relation relation = Relation::Equal;
    graph::Value value;
    graph::TensorMeta layout;
    bool contiguous = false;
  };
  /// An argument of a call that is an expression: argument `arg` itself, or its element `item` (-1: itself).
  struct Argument {
    const graph::Node* node;
    size_t arg;
    int64_t item;
    Expr size;
  };

  /// Says that sizes of `node`'s results are open: a graph's input, or what is computed of such.
  void open(const graph::Node* node) { open_.insert(node); }
  bool any_open() const { return !open_.empty(); }
  bool is_open(graph::Value v) const { return v && open_.contains(v.node); }

  /// The size of an open value.
  Expr size(graph::Value v, int64_t dim, int64_t hint);
  /// An int that is given to the program.
  Expr given(int64_t number, int64_t hint);
  /// Has `e` delivered when the graph has run; its number.
  int64_t add_output(const Expr& e);
  /// The value in the traced call. It fits: what does not is no expression.
  int64_t hint(const Expr& e) const;
  /// Whether `e` can be computed with: it has few atoms, and it, and what it is made of, fits 62 bits in the traced
  /// call.
  bool fits(const Expr& e) const;
  /// Whether `difference` `relation` 0 holds; a condition from now on, unless it always does.
  bool decide(const Expr& difference, Relation relation);
  /// The value in the traced call, which becomes a condition.
  int64_t pin(const Expr& e);
  /// The value's layout, or whether it is contiguous, was looked at.
  void note_layout(graph::Value v, const graph::TensorMeta& layout);
  void note_contiguous(graph::Value v, bool contiguous);
  void note_argument(Argument a) { arguments_.push_back(std::move(a)); }

  /// Something that no condition tells asks for sizes: the graph is for the traced call's alone.
  void refuse(std::string why) { refused_ = std::move(why); }
  const std::string& refused() const { return refused_; }

  const std::vector<Leaf>& leaves() const { return leaves_; }
  const std::vector<Condition>& conditions() const { return conditions_; }
  const std::vector<Argument>& arguments() const { return arguments_; }
  const std::vector<Expr>& outputs() const { return outputs_; }

  /// One line for each condition, with the graph's names of values: "x.size(0) - 5 > 0".
  std::vector<std::string> texts() const;

  /// `e` as PyTorch takes it: a plain int if it is a constant.
  c10::SymInt symint(const Expr& e);
  /// The expression behind an int, which PyTorch may have computed with; null for another's.
  static const Expr* expr_of(const c10::SymInt& n);
  static const Expr* expr_of(const c10::SymNode& n);

 private:
  std::vector<Leaf> leaves_;
  std::unordered_map<graph::Value, std::vector<int>> leaf_ids_;  // by dimension; -1: none yet
  std::vector<Condition> conditions_;
  std::unordered_map<Expr, uint8_t> compared_;  // relations that are conditions already, as bits
  std::unordered_set<graph::Value> layouts_, contiguous_;
  std::vector<Argument> arguments_;
  std::vector<Expr> outputs_;
  std::unordered_set<const graph::Node*> open_;
  std::string refused_;
};

/// The value of `e` at `leaves`; none if one on the way there does not fit 62 bits: Python's ints have no bound.
std::optional<int64_t> evaluate(const symbolic::Expr& e, const std::function<int64_t(size_t leaf)>& leaves);
/// Whether `value` compares with zero so.
bool holds(Sizes::Relation relation, int64_t value);

}  // namespace kiln::aten
