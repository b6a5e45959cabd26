#pragma once
#include <memory>
#include <string>
#include <vector>

#include "graph/graph.h"
#include "python/guards/source.h"

namespace kiln::guards {

/// Sums and products of a few ints below it fit 64 bits.
constexpr int64_t kSmallInt = int64_t{1} << 31;
bool is_small_int(PyObject* o);

/// One observation that capture made and that must hold again for its result to be valid.
struct Guard {
  enum class Kind : uint8_t {
    Type,  // type(source) is `object`, and that type's version tag is unchanged (class attributes are as they were)
    ClassVersion,  // source is the class `object`, and its version tag is unchanged (an attribute was read through it)
    Is,        // source is `object` (None, True, functions, types, modules, nn.Module instances where identity matters)
    Equals,    // same type and == `object`, for int, float (bit-equal, so that nan and -0.0 work), str, bytes, complex
               // and classes derived from them, NumPy's scalars, dtype and other immutable constants, and
               // tuples/frozensets of them
    SmallInt,  // an int of less than kSmallInt in magnitude
    Contents,  // source lends memory (an array, a bytearray) that holds what contents_of() gave as `object`
    Length,    // len of a list, tuple, dict, set or deque is `number`
    Keys,      // keys of a dict or elements of a set, in order, are the tuple `object` (compared with `is`, then ==)
    DictHas,   // dict has key `object`
    DictLacks,   // dict lacks key `object` (an attribute found on the class, a global found in builtins), or, if there
                 // is no `object`, the key that `other` finds
    AttrLacks,   // the slot or C attribute `object` of source is unset: reading it raises AttributeError
    Tensor,      // a tensor with `meta`, dispatch keys `number`, same Python class `object`; is_leaf in flags
    SameObject,  // source and `other` are one object
    NotSame,     // source and `other` are two objects
    Apart,       // source is no object that another guard of this kind, or a Tensor guard, is about
    NoHooks,     // source is a tensor; no hook of its own, nor of the node that adds to its .grad, waits for a gradient
    GlobalState,  // grad mode, inference mode, autocast, default dtype, deterministic flags, function modes are
                  // `number` packed by pack_global_state()
    Setting,      // `object` is (getter, args, value): the C function `getter` gives `value` for the tuple `args`
  };
  Kind kind;
  SourcePtr source;  // null for GlobalState, Setting
  SourcePtr other;
  py::Ref object;
  uint64_t number = 0;
  /// `number` of an Is guard on a function whose code and defaults nobody changes.
  static constexpr uint64_t kIdentityAlone = 1;
  graph::TensorMeta meta;
  bool is_leaf = true;
  /// Tensor: the dimensions that may have any size, as bits. If there are any, strides may be others, too.
  uint64_t any_dims = 0;
  /// The user's line that observed it, "file:line", or null; printed with the guard and with a recompile.
  std::shared_ptr<const std::string> where;

  std::string text() const;
};

/// Process-wide switches that change what a captured program means, packed into one word.
uint64_t pack_global_state();
/// Why nothing may be compiled where this thread stands now; nullptr if it may. Part of the global state.
const char* eager_only();

/// What is active of torch.autograd.graph.saved_tensors_hooks.
enum class SavedHooks : uint8_t {
  None,
  Keeping,  // they give back what they are given, whatever that is: a checkpoint's, or save_on_cpu's
  Others,   // they are to see the tensors that eager saves
};
/// A checkpoint runs its function a second time, from outside of compiled code; both runs must save the same tensors.
/// So what runs under its hooks without EnteredUnderHooks, as a part of compiled code around the checkpoint, is to run
/// in eager: Others.
SavedHooks saved_hooks();
/// In the second run of what a checkpoint contains.
bool recomputing();

/// A compiled function is called from outside of compiled code.
class EnteredUnderHooks {
 public:
  EnteredUnderHooks();
  ~EnteredUnderHooks();
  EnteredUnderHooks(const EnteredUnderHooks&) = delete;

 private:
  const void* before_;
};

}  // namespace kiln::guards
