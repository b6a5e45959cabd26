#pragma once
#include <c10/core/SymFloat.h>
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
#include "symbolic/real.h"

// Sizes that are left open while a graph is traced. The fakes have the sizes of the call that is traced; beside them a
// program that asks for a size gets an expression over the sizes of the graph's values (its leaves), and whatever a
// truth or a number is wanted of becomes a condition. A graph is right for other sizes if all conditions hold there.
// Shapes need no expressions of their own: whoever runs the graph's operators at other sizes sees what they give.
namespace kiln::aten {

class Sizes : public std::enable_shared_from_this<Sizes> {
 public:
  using Expr = symbolic::Expr;
  using Real = symbolic::Real;
  /// How an expression compares with zero.
  enum class Relation : uint8_t { Equal, NotEqual, Less, LessEqual };

  /// A variable of expressions: the size of `value` in dimension `dim`, or an int made of the float `of`, or else the
  /// int with the number `dim` that the program is given. `hint`: in the traced call.
  struct Leaf {
    graph::Value value;
    int64_t dim;
    int64_t hint;
    std::optional<Real> of = std::nullopt;  // of leaves before this one

    bool is_given() const { return !value && !of; }
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
  /// An argument of a call that is an open number: argument `arg` itself, or its element `item` (-1: itself).
  struct Argument {
    const graph::Node* node;
    size_t arg;
    int64_t item;
    symbolic::Number number;
  };

  /// Says that sizes of `node`'s results are open: a graph's input, or what is computed of such.
  void open(const graph::Node* node) { open_.insert(node); }
  bool any_open() const { return !open_.empty(); }
  bool is_open(graph::Value v) const { return v && open_.contains(v.node); }

  /// The size of an open value.
  Expr size(graph::Value v, int64_t dim, int64_t hint);
  /// An int that is given to the program.
  Expr given(int64_t number, int64_t hint);
  /// The int that `r`, which is rounded or a truth, gives. It has a value in the traced call.
  Expr whole(const Real& r);
  /// Has `n` delivered when the graph has run; the place.
  int64_t add_output(const symbolic::Number& n);
  /// The value in the traced call. It fits: what does not is no expression.
  int64_t hint(const Expr& e) const;
  /// None where Python raises an exception there.
  std::optional<double> hint(const Real& r) const;
  int64_t hint_bits(const symbolic::Number& n) const;
  /// Whether `e` can be computed with: it has few atoms, and it, and what it is made of, fits 62 bits in the traced
  /// call.
  bool fits(const Expr& e) const;
  /// Whether `difference` `relation` 0 holds; a condition from now on, unless it always does.
  bool decide(const Expr& difference, Relation relation);
  /// The truth of a comparison; a condition from now on.
  bool decide(const Real& truth);
  /// The value in the traced call, which becomes a condition; of a float, all ints that it is made of.
  int64_t pin(const Expr& e);
  std::optional<double> pin(const Real& r);
  void pin(const symbolic::Number& n);
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
  const std::vector<symbolic::Number>& outputs() const { return outputs_; }
  /// Calls f on every size and given int that `n` is computed of, also through ints of floats; with repetition.
  void for_each_leaf(const symbolic::Number& n, const std::function<void(size_t leaf)>& f) const;
  /// By leaf: whether an argument, a condition or an output is computed of it.
  std::vector<bool> used_leaves() const;
  /// What copies of some of the graph's calls, in a graph of their own, are given: the arguments that are computed of
  /// sizes of copied values and of given ints. The leaves keep their numbers. `copy_of`: null for what is not copied.
  std::shared_ptr<Sizes> for_copies(const std::function<graph::Node*(const graph::Node*)>& copy_of) const;

  /// One line for each condition, with the graph's names of values: "x.size(0) - 5 > 0".
  std::vector<std::string> texts() const;

  /// `e` as PyTorch takes it: a plain int if it is a constant.
  c10::SymInt symint(const Expr& e);
  c10::SymFloat symfloat(const Real& r);
  /// The expression behind an int, which PyTorch may have computed with; null for another's.
  static const Expr* expr_of(const c10::SymInt& n);
  static const Expr* expr_of(const c10::SymNode& n);
  static const Real* real_of(const c10::SymNode& n);

 private:
  std::vector<Leaf> leaves_;
  std::unordered_map<graph::Value, std::vector<int>> leaf_ids_;  // by dimension; -1: none yet
  std::vector<Condition> conditions_;
  std::unordered_map<Expr, uint8_t> compared_;  // relations that are conditions already, as bits
  std::unordered_set<graph::Value> layouts_, contiguous_;
  std::vector<Argument> arguments_;
  std::vector<symbolic::Number> outputs_;
  std::unordered_set<const graph::Node*> open_;
  std::string refused_;
};

/// The value of `e` at `leaves`; none if one on the way there does not fit 62 bits: Python's ints have no bound.
std::optional<int64_t> evaluate(const symbolic::Expr& e, const std::function<int64_t(size_t leaf)>& leaves);
/// The value of `r`; none where Python raises an exception, too.
std::optional<double> evaluate(const symbolic::Real& r, const std::function<int64_t(size_t leaf)>& leaves);
/// The int that a leaf made of `r` is.
std::optional<int64_t> evaluate_whole(const symbolic::Real& r, const std::function<int64_t(size_t leaf)>& leaves);
/// A delivered number in 64 bits: an int, or a float's bits. None if there is no value.
std::optional<int64_t> bits_of(const symbolic::Number& n, const std::function<int64_t(size_t leaf)>& leaves);
/// The number in the traced call, as an argument of a call.
graph::Arg hint_arg(const Sizes& sizes, const symbolic::Number& n);
/// Whether `value` compares with zero so.
bool holds(Sizes::Relation relation, int64_t value);

}  // namespace kiln::aten
