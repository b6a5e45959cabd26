#pragma once
#include <Python.h>
#include <opcode.h>

#include <cstdint>

// All that kiln knows of CPython 3.11's private layouts. Another minor version gets its own file.
static_assert(PY_VERSION_HEX >= 0x030b0000 && PY_VERSION_HEX < 0x030c0000, "this file describes CPython 3.11");

/// The interpreter's own frame, as CPython 3.11 lays it out.
struct _PyInterpreterFrame {
  PyFunctionObject* f_func;
  PyObject* f_globals;   // borrowed
  PyObject* f_builtins;  // borrowed
  PyObject* f_locals;    // null for functions
  PyCodeObject* f_code;
  PyFrameObject* frame_obj;  // made lazily; null until someone asks
  _PyInterpreterFrame* previous;
  _Py_CODEUNIT* prev_instr;  // the code unit before the next instruction
  int stacktop;              // of localsplus; -1 while the frame runs
  bool is_entry;
  char owner;
  PyObject* localsplus[1];  // locals, cells, free variables, then the value stack
};

namespace kiln::py311 {

using Frame = _PyInterpreterFrame;

enum Owner : char { OwnedByThread = 0, OwnedByGenerator = 1, OwnedByFrameObject = 2 };
enum GeneratorState : int8_t { Created = -2, Suspended = -1, Executing = 0, Completed = 1, Cleared = 4 };
/// Bits of co_localspluskinds.
enum LocalKind : uint8_t { KindLocal = 0x20, KindCell = 0x40, KindFree = 0x80 };

inline PyObject** stack_base(Frame* f) { return f->localsplus + f->f_code->co_nlocalsplus; }
inline _Py_CODEUNIT* first_instruction(PyCodeObject* code) {
  return reinterpret_cast<_Py_CODEUNIT*>(code->co_code_adaptive);
}
/// Index, in code units, of the last instruction that started (or of its last cache entry).
inline int last_instruction(Frame* f) { return static_cast<int>(f->prev_instr - first_instruction(f->f_code)); }
inline PyGenObject* generator_of(Frame* f) {
  return reinterpret_cast<PyGenObject*>(reinterpret_cast<char*>(f) - offsetof(PyGenObject, gi_iframe));
}
inline Frame* frame_of(PyGenObject* g) { return reinterpret_cast<Frame*>(g->gi_iframe); }
inline uint8_t local_kind(PyCodeObject* code, int i) {
  return static_cast<uint8_t>(PyBytes_AS_STRING(code->co_localspluskinds)[i]);
}
inline const char* local_name(PyCodeObject* code, int i) {
  return PyUnicode_AsUTF8(PyTuple_GET_ITEM(code->co_localsplusnames, i));
}

/// Number of inline cache units behind an instruction with this (unspecialised) opcode.
inline int cache_units(int opcode) {
  switch (opcode) {
    case BINARY_SUBSCR:
      return 4;
    case STORE_SUBSCR:
      return 1;
    case UNPACK_SEQUENCE:
      return 1;
    case STORE_ATTR:
      return 4;
    case LOAD_ATTR:
      return 4;
    case COMPARE_OP:
      return 2;
    case LOAD_GLOBAL:
      return 5;
    case BINARY_OP:
      return 1;
    case LOAD_METHOD:
      return 10;
    case PRECALL:
      return 1;
    case CALL:
      return 4;
    default:
      return 0;
  }
}

/// The code's instructions without specialisation: pairs of opcode and argument bytes, caches zeroed. Kept per code
/// object for the life of the process' interest in it (the code object is kept alive). Null with an exception set.
const uint8_t* plain_code(PyCodeObject* code, int* units = nullptr);

bool is_jump(int opcode);
bool is_backward_jump(int opcode);
/// The instruction never falls through to the next one.
bool ends_block(int opcode);

/// Looks `instruction` (in code units) up in the exception table. False if no handler covers it.
bool find_handler(PyCodeObject* code, int instruction, int* handler, int* depth, bool* push_lasti);

/// Links `frame` as the thread's running frame for the scope's duration, as the evaluator must.
class RunningFrame {
 public:
  RunningFrame(PyThreadState* ts, Frame* frame);
  ~RunningFrame();
  RunningFrame(const RunningFrame&) = delete;

 private:
  PyThreadState* ts_;
  _PyCFrame cframe_;
};

/// Gives `empty`, a set or frozenset that nobody has seen or a set that was cleared, the elements of `set` in the same
/// places: both are gone through in one order, and what is added or popped next is the same. CPython's own copies close
/// the gaps that removed elements leave. False with MemoryError set.
bool copy_set(PyObject* empty, PyObject* set);
/// Whether a class statement made the class, and not C: instances are what they refer to, and have no state of C's
/// but that of a base.
bool is_of_class_statement(PyTypeObject* t);
/// The dict of which `o` is a mappingproxy, borrowed; null for any other object.
PyObject* dict_behind(PyObject* o);
/// The version that CPython stamps on each dict anew at every write.
inline uint64_t dict_version(PyObject* dict) { return reinterpret_cast<PyDictObject*>(dict)->ma_version_tag; }
/// An OrderedDict, whose order is not that of the dict that it is, too.
struct OrderedDict {
  struct Node {
    PyObject* key;
    Py_hash_t hash;
    Node *next, *prev;
  };
  PyDictObject dict;
  Node *first, *last;
  Node** fast_nodes;
  Py_ssize_t fast_nodes_size;
  void* resize_sentinel;
  size_t state;  // incremented whenever the order changes
};
/// Calls f(key, value) in the order of an OrderedDict, all of them borrowed, until it gives false. No key is hashed.
template <class F>
void each_of_ordered(PyObject* dict, const F& f) {
  for (const OrderedDict::Node* n = reinterpret_cast<OrderedDict*>(dict)->first; n; n = n->next)
    if (!f(n->key, _PyDict_GetItem_KnownHash(dict, n->key, n->hash))) return;
}
/// The type's version, given one if it has none yet; 0 if CPython cannot version it.
unsigned type_version(PyTypeObject* type);

}  // namespace kiln::py311
