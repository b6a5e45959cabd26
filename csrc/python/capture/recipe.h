#pragma once
#include <memory>
#include <string>
#include <vector>

#include "python/guards/source.h"

// How a captured frame is left: what to rebuild, what to write, where to go on. Pure data, made by the symbolic
// machine, run by frame/leave.cpp after the graph.
namespace kiln::capture {

/// How to make one object anew. Recipes form a DAG: one recipe object is one Python object (identity is kept).
struct Recipe;
using RecipePtr = std::shared_ptr<Recipe>;
struct Recipe {
  enum class Kind : uint8_t {
    Source,     // read `source`
    Output,     // graph output `index` (a tensor)
    Size,       // open number `index` (aten::Sizes::outputs), an int
    Real,       // the same, a float
    Constant,   // `object` itself
    Null,       // the NULL that CPython pushes on its stack (PUSH_NULL)
    List,       // new list of `parts`
    Tuple,      // new tuple of `parts` (exact type tuple)
    Set,        // new set of `parts`; or a copy of `object`, a set of constants, with the elements in the same places
    FrozenSet,  // the same, a frozenset
    Dict,       // new dict; parts alternate key, value
    Slice,      // parts: start, stop, step
    Cell,       // new cell; parts: content, or none if empty
    Call,       // object(*parts): range, partial, iter, ... (a pure constructor)
    Instance,   // object.__new__ of type `object` by its base's tp_new (`parts[0]`, a Constant: the base type to call
                // __new__ of, `parts[1]`: a Tuple of its extra arguments), then state (below)
    Function,   // function object; object: code; parts: globals, name, defaults|None, kwdefaults|None, closure|None,
                // annotations|None, qualname, doc|None, module|None
    Item,       // parts[0][index]: element of another recipe's tuple
    Method,     // bound method; parts: function, self
  };
  Kind kind;
  guards::SourcePtr source;
  py::Ref object;
  int64_t index = 0;
  std::vector<RecipePtr> parts;
  /// Instance: attributes for its __dict__ (name, value), filled after all objects exist so that cycles work.
  /// Containers with cycles put their elements here too (list: empty names).
  std::vector<std::pair<py::Ref, RecipePtr>> state;
  /// Instance of a list/dict/set subclass: its elements; dict alternates key, value.
  std::vector<RecipePtr> elements;
};

/// One write to an object that existed before the call, replayed in order after the graph ran.
struct SideEffect {
  enum class Kind : uint8_t {
    SetAttr,  // object.__setattr__-level write target.name = value (no user code runs)
    DelAttr,
    SetItem,      // dict target[key] = value
    DelItem,      // dict
    ReplaceList,  // target[:] = value (a list recipe)
    ExtendList,   // target.extend(value); of a list or a deque
    ReplaceDict,  // clear and refill in value's order
    ReplaceSet,
    ReplaceDeque,  // clear and refill from value, a list
    StoreGlobal,   // target is the globals dict
    DeleteGlobal,
    StoreCell,  // target is a cell
    Call,       // value(*args) for effects that only a call can make (a C type's method); args in `extra`
  };
  Kind kind;
  RecipePtr target;
  py::Ref key;           // attribute name or constant dict key
  RecipePtr key_recipe;  // dict key that must be rebuilt (a tensor), instead of `key`
  RecipePtr value;
  std::vector<RecipePtr> extra;
  /// A .grad that the region replaces without having used it: it is let go before the graph runs, as eager's zero_grad
  /// does, so that old and new gradients are not in memory together.
  bool drop_before = false;
};

/// Why and where capture stopped; ids come from graph_breaks.def.
struct BreakReason {
  std::string id;     // "data-dependent-branch"
  std::string cause;  // one sentence with the particulars
  std::string hint;
  std::string stack;  // the user's stack as Python prints it, innermost last
  std::string file;
  int line = 0;
  py::Ref jump_code;  // of a branch on a tensor: where it jumps
  int jump_at = -1;   // in code units
};

/// How the frame goes on after the captured part.
struct Exit {
  enum class Kind : uint8_t {
    Return,  // return `value`
    Break,   // run the instruction at `offset` in eager, then resume after it
  };
  Kind kind = Kind::Return;
  RecipePtr value;                // Return
  int offset = 0;                 // Break: index of the instruction, in code units, in the root code
  std::vector<RecipePtr> locals;  // Break: one per localsplus slot; null: unbound (cells: a Cell recipe or Source)
  std::vector<bool> watched;      // of these: whether something tells when the object dies, so that it must live on
  std::vector<RecipePtr> stack;   // Break: the value stack before the instruction, bottom first
  BreakReason reason;
};

}  // namespace kiln::capture
