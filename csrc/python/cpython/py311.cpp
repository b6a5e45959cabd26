#include "python/cpython/py311.h"

#include <unordered_map>

namespace kiln::py311 {

const uint8_t* plain_code(PyCodeObject* code, int* units) {
  struct Plain {
    const uint8_t* bytes;
    int units;
  };
  // Code objects are few and mostly live as long as their module; holding them keeps the key valid.
  static auto* cache = new std::unordered_map<PyCodeObject*, Plain>();
  auto it = cache->find(code);
  if (it == cache->end()) {
    PyObject* bytes = PyCode_GetCode(code);
    if (!bytes) return nullptr;
    Py_INCREF(code);
    Plain plain{reinterpret_cast<const uint8_t*>(PyBytes_AS_STRING(bytes)),
                static_cast<int>(PyBytes_GET_SIZE(bytes) / 2)};
    it = cache->emplace(code, plain).first;
  }
  if (units) *units = it->second.units;
  return it->second.bytes;
}

bool is_jump(int opcode) {
  switch (opcode) {
    case JUMP_FORWARD:
    case FOR_ITER:
    case SEND:
    case JUMP_IF_FALSE_OR_POP:
    case JUMP_IF_TRUE_OR_POP:
    case POP_JUMP_FORWARD_IF_FALSE:
    case POP_JUMP_FORWARD_IF_TRUE:
    case POP_JUMP_FORWARD_IF_NONE:
    case POP_JUMP_FORWARD_IF_NOT_NONE:
      return true;
    default:
      return is_backward_jump(opcode);
  }
}

bool is_backward_jump(int opcode) {
  switch (opcode) {
    case JUMP_BACKWARD:
    case JUMP_BACKWARD_NO_INTERRUPT:
    case POP_JUMP_BACKWARD_IF_FALSE:
    case POP_JUMP_BACKWARD_IF_TRUE:
    case POP_JUMP_BACKWARD_IF_NONE:
    case POP_JUMP_BACKWARD_IF_NOT_NONE:
      return true;
    default:
      return false;
  }
}

bool ends_block(int opcode) {
  switch (opcode) {
    case RETURN_VALUE:
    case RAISE_VARARGS:
    case RERAISE:
    case JUMP_FORWARD:
    case JUMP_BACKWARD:
    case JUMP_BACKWARD_NO_INTERRUPT:
      return true;
    default:
      return false;
  }
}

namespace {
/// One varint of the exception table: six bits a byte, most significant first, bit 6 says that more follow.
const uint8_t* read_varint(const uint8_t* p, int* value) {
  int v = *p & 63;
  while (*p & 64) v = (v << 6) | (*++p & 63);
  *value = v;
  return p + 1;
}
}  // namespace

bool find_handler(PyCodeObject* code, int instruction, int* handler, int* depth, bool* push_lasti) {
  const auto* p = reinterpret_cast<const uint8_t*>(PyBytes_AS_STRING(code->co_exceptiontable));
  const uint8_t* end = p + PyBytes_GET_SIZE(code->co_exceptiontable);
  while (p < end) {
    int start, size, target, depth_and_lasti;
    p = read_varint(p, &start);
    p = read_varint(p, &size);
    p = read_varint(p, &target);
    p = read_varint(p, &depth_and_lasti);
    if (instruction < start) return false;
    if (instruction < start + size) {
      *handler = target;
      *depth = depth_and_lasti >> 1;
      *push_lasti = depth_and_lasti & 1;
      return true;
    }
  }
  return false;
}

RunningFrame::RunningFrame(PyThreadState* ts, Frame* frame) : ts_(ts) {
  _PyCFrame* outer = ts->cframe;
  cframe_.use_tracing = outer->use_tracing;
  cframe_.previous = outer;
  ts->cframe = &cframe_;
  frame->is_entry = true;
  frame->previous = outer->current_frame;
  cframe_.current_frame = frame;
}

RunningFrame::~RunningFrame() {
  ts_->cframe = cframe_.previous;
  ts_->cframe->use_tracing = cframe_.use_tracing;
}

bool copy_set(PyObject* empty, PyObject* set) {
  auto* to = reinterpret_cast<PySetObject*>(empty);
  const auto* from = reinterpret_cast<const PySetObject*>(set);
  const size_t places = static_cast<size_t>(from->mask) + 1;
  if (places > PySet_MINSIZE) {
    auto* table = static_cast<setentry*>(PyMem_Malloc(places * sizeof(setentry)));
    if (!table) return PyErr_NoMemory(), false;
    to->table = table;
  }
  for (size_t i = 0; i < places; ++i) {
    to->table[i] = from->table[i];
    if (PyObject* key = to->table[i].key; key && key != _PySet_Dummy) Py_INCREF(key);
  }
  to->fill = from->fill;
  to->used = from->used;
  to->mask = from->mask;
  to->finger = from->finger;
  return true;
}

bool is_of_class_statement(PyTypeObject* t) {
  // Such classes share a destructor; those that C makes from a description may have it, too, but bring a __new__.
  static PyObject* const made =
      PyObject_CallFunction(reinterpret_cast<PyObject*>(&PyType_Type), "s(){}", "OfClassStatement");
  static PyObject* const name = PyUnicode_InternFromString("__new__");
  if (!(t->tp_flags & Py_TPFLAGS_HEAPTYPE) || t->tp_dealloc != reinterpret_cast<PyTypeObject*>(made)->tp_dealloc)
    return false;
  PyObject* const allocates = PyDict_GetItemWithError(t->tp_dict, name);
  return !allocates || !PyCFunction_Check(allocates);
}

PyObject* dict_behind(PyObject* o) {
  struct Proxy {  // of Objects/descrobject.c
    PyObject_HEAD;
    PyObject* mapping;
  };
  if (Py_TYPE(o) != &PyDictProxy_Type) return nullptr;
  PyObject* mapping = reinterpret_cast<Proxy*>(o)->mapping;
  return PyDict_Check(mapping) ? mapping : nullptr;
}

unsigned type_version(PyTypeObject* type) {
  // A lookup of any name gives the type a version tag if it can have one.
  if (!PyType_HasFeature(type, Py_TPFLAGS_VALID_VERSION_TAG)) {
    static PyObject* name = PyUnicode_InternFromString("__class__");
    _PyType_Lookup(type, name);
  }
  return PyType_HasFeature(type, Py_TPFLAGS_VALID_VERSION_TAG) ? type->tp_version_tag : 0;
}

}  // namespace kiln::py311
