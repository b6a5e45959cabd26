#pragma once
#include <functional>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "schedule/schedule.h"

// Rewrites of one nest that keep its meaning. Fusion and loop order are made of these.
namespace kiln::schedule {

using loops::Buffer;
using loops::Expr;
using loops::Inst;
using loops::Nest;
using loops::Opcode;
using loops::Stage;
using loops::ValueId;

/// True for instructions that matter without a user: stores, and checked indices.
bool has_effect(const Inst& i);
/// One stage, no inner loops.
bool is_pointwise(const Nest& n);
bool is_empty(const Nest& n);

/// Whether a scan runs over the stage's last variable.
bool scans(const Nest& n, const Stage& s);
/// Whether a scan runs over variable `v`: two halves of that would be many scans, and without it there is none.
bool is_scanned(const Nest& n, int v);
/// symbolic::substitute for the indices of a nest, few of which differ: each is made once.
class Substitution {
 public:
  /// `f` as for symbolic::substitute; what it says of a variable does not change.
  using Rule = std::function<bool(const symbolic::AtomNode& var, Expr& out)>;
  explicit Substitution(Rule f) : f_(std::move(f)) {}
  const Expr& operator()(const Expr& e);

 private:
  Rule f_;
  std::unordered_map<Expr, Expr> made_;
};

/// Replaces loop variables in every index expression of the live instructions, of the stages from the `first` on.
void substitute_vars(Nest& n, const std::function<bool(int var, Expr& out)>& f, size_t first = 0);
/// Splits loop variable v into (outer, inner) with `inner_extent` dividing its extent; returns the two new variables.
std::pair<int, int> split_var(Nest& n, int v, int64_t inner_extent);
/// Splits variables under // and % of their own until these are gone, where extents divide.
void split_divided_vars(Nest& n);
/// Merges neighbouring loop variables whose every use allows it.
void merge_vars(Nest& n);
/// Joins the innermost outer loop of a pointwise nest, if it has but a few elements, with the one outside of it in
/// memory, where vectors over both read little more than they need: undoes splits that helped nobody.
void join_lanes(Nest& n);
/// Drops dead instructions, unused variables and those of extent one (not a scan's), empty stages; renumbers
/// everything.
void compact(Nest& n);
/// Common subexpressions, loads of what was just stored, in each stage and from outer stages into later ones.
/// `forward(buffer)`: a stored value may stand for a later load from that buffer.
void reuse_values(Nest& n);
/// Orders loops so that the innermost one runs along memory.
void order_loops(Nest& n);

/// An access's index as sum of stride * variable, sorted by stride; nullopt if it is anything else.
struct Digit {
  int64_t stride;
  int var;
};
struct Affine {
  int64_t offset = 0;
  std::vector<Digit> digits;
};
std::optional<Affine> as_affine(const Expr& e);

/// The index determines variable v: (e // stride) % extent == v, with v's own stride in e.
bool determines(const Nest& n, const Expr& e, int v, int64_t& stride);
/// e's digit of `stride` and `extent` is variable v.
bool digit_is(const Nest& n, const Expr& e, int64_t stride, int v);

}  // namespace kiln::schedule
