#pragma once
#include <cstdint>
#include <memory>
#include <string>

#include "python/cpython/ref.h"

namespace kiln::guards {

struct Source;
using SourcePtr = std::shared_ptr<const Source>;

/// A path by which an object that existed before the call is found again at the next call. Evaluating one has no side
/// effects and runs no Python code.
struct Source {
  enum class Kind : uint8_t {
    Local,         // fast local `index` of the root frame (arguments first); name for printing
    Cell,          // content of the root frame's cell or free variable `index` (index into localsplus)
    CellObject,    // the root frame's free variable `index`, the cell itself
    Global,        // `object` (a module's dict, held) [name]
    Const,         // `object` itself, held strongly (a module, a type, an object reached from one)
    Attr,          // getattr(base, name) of a C-level attribute: slot, getset, member (x.grad, fn.__closure__)
    InstanceDict,  // base.__dict__ (the dict object itself)
    DictItem,      // base[key] of a dict; `object` is the key (hashable constant)
    DictItemAt,    // base[key] of a dict where the key is found by `key_source` (a tensor, a module)
    ListItem,      // base[index] of a list, tuple or deque
    DictKeyAt,     // the index-th key of a dict in insertion order
    SetItemAt,     // the index-th element of a set in iteration order
    CellContents,  // base.cell_contents
    Type,          // type(base)
    WeakRef,       // base() of a weakref
    Length,        // len(base) of a list, tuple, dict, set or deque
    Index,         // operator.index(base) of an int of NumPy's
    ArrayMemory,   // torch.from_numpy(base) of an array: a tensor with its memory, another one each time
    FunctionMode,  // the `index`-th TorchFunctionMode of this thread, the outermost first
  };
  Kind kind;
  SourcePtr base;        // null for Local, Cell, Global, Const, FunctionMode
  SourcePtr key_source;  // DictItemAt
  int64_t index = 0;
  std::string name;
  py::Ref object;

  /// As Python would spell it: L['x'], G['model'].layers[0].__dict__['weight'].
  std::string text() const;
  /// The same for a path that is found again in another call, and for no other: where texts may be equal, addresses
  /// tell paths apart.
  std::string id() const;

 private:
  std::string text(bool unique) const;
};

/// An id() as it is to be read: without addresses.
std::string shown(const std::string& id);

SourcePtr local(int64_t index, std::string name);
SourcePtr cell(int64_t index, std::string name);
SourcePtr cell_object(int64_t index, std::string name);
SourcePtr global(PyObject* dict, std::string name);
SourcePtr constant(PyObject* object, std::string name);
SourcePtr attr(SourcePtr base, std::string name);
SourcePtr instance_dict(SourcePtr base);
SourcePtr dict_item(SourcePtr base, PyObject* key);
SourcePtr dict_item_at(SourcePtr base, SourcePtr key);
SourcePtr list_item(SourcePtr base, int64_t index);
SourcePtr dict_key_at(SourcePtr base, int64_t index);
SourcePtr set_item_at(SourcePtr base, int64_t index);
SourcePtr cell_contents(SourcePtr base);
SourcePtr type_of(SourcePtr base);
SourcePtr weakref(SourcePtr base);
SourcePtr length(SourcePtr base);
SourcePtr index(SourcePtr base);
SourcePtr array_memory(SourcePtr base);
SourcePtr function_mode(int64_t index);

}  // namespace kiln::guards
