// Leaving the captured region: side effects from what was written, the modes, and how the frame goes on.
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/autograd/python_variable.h>

#include "aten/fake.h"
#include "base/error.h"
#include "python/capture/call_tools.h"
#include "python/capture/callables.h"
#include "python/capture/eval.h"
#include "python/capture/leaver.h"
#include "python/pch.h"

namespace kiln::capture {

using SK = guards::Source::Kind;

// --- side effects
// ------------------------------------------------------------------------------------------------------

void Leaver::diff_dict(const Known& k) {
  PyObject* now = k.stand_in.get();
  const py::Ref items = whole_items(now);
  PyObject* before = k.snapshot.get();  // key, value, key, value ...
  const Py_ssize_t n_before = PyList_GET_SIZE(before) / 2, n = PyList_GET_SIZE(items.get());
  // What was set in a dict that nobody looked at as a whole is guarded to have been there, or not.
  if (!k.looked_up) m.activate(const_cast<Known&>(k));
  // By identity: __hash__ and == of a stand-in are those of the object that it stands for only while the machine runs.
  std::unordered_map<PyObject*, PyObject*> old;
  for (Py_ssize_t i = 0; i < n_before; ++i)
    old.emplace(PyList_GET_ITEM(before, 2 * i), PyList_GET_ITEM(before, 2 * i + 1));
  std::unordered_set<PyObject*> left;
  // Writes of single items keep the order if what is left of the old keys comes first, in the old order.
  bool ordered = true;
  for (Py_ssize_t i = 0, next = 0; i < n; ++i) {
    PyObject* key = PyTuple_GET_ITEM(PyList_GET_ITEM(items.get(), i), 0);
    if (!old.contains(key)) continue;
    while (next < n_before && PyList_GET_ITEM(before, 2 * next) != key) ++next;
    ordered = ordered && next < n_before && static_cast<size_t>(i) == left.size();
    left.insert(key);
  }
  auto effect = [&](SideEffect::Kind kind) -> SideEffect& {
    SideEffect e;
    e.kind = kind;
    e.target = source(k.source);
    m.result.side_effects.push_back(std::move(e));
    return m.result.side_effects.back();
  };
  auto set_key = [&](SideEffect& e, PyObject* key) {
    if (m.is_constant(key))
      e.key = py::Ref::borrow(key);
    else
      e.key_recipe = recipe(key);
  };
  if (!ordered) {
    m.activate(const_cast<Known&>(k));
    RecipePtr value = make(Recipe::Kind::Dict);
    value->parts = dict_parts(now);
    effect(SideEffect::Kind::ReplaceDict).value = value;
    return;
  }
  for (Py_ssize_t i = 0; i < n_before; ++i) {
    PyObject* key = PyList_GET_ITEM(before, 2 * i);
    if (!left.contains(key)) set_key(effect(SideEffect::Kind::DelItem), key);
  }
  for (Py_ssize_t i = 0; i < n; ++i) {
    PyObject* key = PyTuple_GET_ITEM(PyList_GET_ITEM(items.get(), i), 0);
    PyObject* value = PyTuple_GET_ITEM(PyList_GET_ITEM(items.get(), i), 1);
    if (const auto it = old.find(key); it != old.end() && it->second == value) continue;
    RecipePtr r = recipe(value);
    SideEffect& e = effect(SideEffect::Kind::SetItem);
    e.value = r;
    set_key(e, key);
  }
}

void Leaver::diff_attributes(const Known& k) {
  const py::Ref now = py::Ref::steal(PyObject_GenericGetDict(k.stand_in.get(), nullptr));
  const py::Ref before_all = k.attributes ? k.attributes : py::Ref::steal(PyDict_New());
  PyObject* before = before_all.get();
  auto effect = [&](SideEffect::Kind kind, PyObject* name, RecipePtr value) {
    SideEffect e;
    e.kind = kind;
    e.target = source(k.source);
    e.key = py::Ref::borrow(name);
    e.value = std::move(value);
    m.activate(const_cast<Known&>(k));
    m.result.side_effects.push_back(std::move(e));
  };
  Py_ssize_t at = 0;
  PyObject *name, *value;
  while (PyDict_Next(before, &at, &name, &value))
    if (!PyDict_Contains(now.get(), name)) effect(SideEffect::Kind::DelAttr, name, nullptr);
  at = 0;
  while (PyDict_Next(now.get(), &at, &name, &value))
    if (PyDict_GetItem(before, name) != value) effect(SideEffect::Kind::SetAttr, name, recipe(value));
}

std::optional<int> Leaver::id_asked_for() const {
  for (const Machine::MadeId& id : ids_)
    if (makes(id.object)) return id.instruction;
  return std::nullopt;
}

void Leaver::add(SideEffect::Kind kind, RecipePtr target, PyObject* key, RecipePtr value) {
  if (key) note_id(key);
  SideEffect e;
  e.kind = kind;
  e.target = std::move(target);
  e.key = py::Ref::borrow(key);
  e.value = std::move(value);
  m.result.side_effects.push_back(std::move(e));
}

void Leaver::diff(Known& k) {
  PyObject* now = k.stand_in.get();
  PyObject* before = k.snapshot.get();
  PyObject** attributes = _PyObject_GetDictPtr(now);
  if (k.attributes || (attributes && *attributes && PyDict_GET_SIZE(*attributes))) diff_attributes(k);
  const bool deque = m.classify(now) == Class::Deque;
  if (deque && !k.active && k.appended) {
    RecipePtr value = make(Recipe::Kind::List);
    for (Py_ssize_t j = 0; j < PyList_GET_SIZE(k.appended.get()); ++j)
      value->parts.push_back(recipe(PyList_GET_ITEM(k.appended.get(), j)));
    return add(SideEffect::Kind::ExtendList, source(k.source), nullptr, value);
  }
  if (!m.differs(k)) return;
  const py::Ref items = deque ? py::Ref::steal(PySequence_List(now)) : py::Ref();
  if (deque) now = items.get();
  if (PyList_Check(now)) {
    const Py_ssize_t size = PyList_GET_SIZE(now), old = PyList_GET_SIZE(before);
    bool longer = size >= old;
    for (Py_ssize_t j = 0; longer && j < old; ++j) longer = PyList_GET_ITEM(now, j) == PyList_GET_ITEM(before, j);
    const bool extends = longer && !k.active && PyList_CheckExact(k.real.get());  // what nobody looked at stays
    if (!extends) m.activate(k);
    RecipePtr value = make(Recipe::Kind::List);
    for (Py_ssize_t j = extends ? old : 0; j < size; ++j) value->parts.push_back(recipe(PyList_GET_ITEM(now, j)));
    const auto replace = deque ? SideEffect::Kind::ReplaceDeque : SideEffect::Kind::ReplaceList;
    add(extends ? SideEffect::Kind::ExtendList : replace, source(k.source), nullptr, value);
  } else if (PyDict_Check(now)) {
    diff_dict(k);
  } else if (PySet_Check(now)) {
    RecipePtr value = make(Recipe::Kind::Set);
    elements_of_set(now, *value);
    m.activate(k);
    add(SideEffect::Kind::ReplaceSet, source(k.source), nullptr, value);
  }
}

void Leaver::keep_apart() {
  std::unordered_map<PyTypeObject*, bool> written;  // by class: whether one whose identity is not fixed is written
  std::unordered_set<const Known*> changed;
  const auto is_fixed = [&](const Known& k) {
    const Class c = m.classify(k.real.get());
    return k.source->kind == SK::Const || c == Class::Module || (c == Class::Function && !k.alike) || c == Class::Type;
  };
  const auto note = [&](const Known* k) {
    if (!k) return;
    changed.insert(k);
    written[Py_TYPE(k->real.get())] |= !is_fixed(*k);
  };
  for (const Known& k : m.knowns)
    if (m.was_written(k)) note(&k);
  for (PyObject* o : m.overlay_order) note(m.find(o));
  for (const auto& [o, shadow] : m.dict_shadows())
    if (const Known* const k = m.find(shadow.get()); k && m.was_written(*k)) note(m.find(o));
  for (const Known& k : m.knowns) {
    const auto it = written.find(Py_TYPE(k.real.get()));
    if (k.kind == Known::Kind::Tensor || it == written.end() || (!k.active && !k.looked_up && !changed.contains(&k)))
      continue;
    // Two that are what they are need not be told apart.
    if (it->second || !is_fixed(k)) m.guard(guards::Guard::Kind::Apart, k.source);
  }
  if (!m.cells_order.empty())
    for (const auto& [cell, contents] : m.cell_source) m.guard(guards::Guard::Kind::Apart, m.cell_itself(contents));
}

void Leaver::side_effects() {
  for (const Machine::Deferred& call : m.deferred) {
    SideEffect e;
    e.kind = SideEffect::Kind::Call;
    e.value = call.made ? constant(call.callable.get()) : recipe(call.callable.get());
    for (const py::Ref& a : call.args) e.extra.push_back(recipe(a.get()));
    m.result.side_effects.push_back(std::move(e));
  }
  for (size_t i = 0; i < m.knowns.size(); ++i) {  // recipes may add some
    Known& k = m.knowns[i];
    if (k.kind != Known::Kind::Shadow) continue;
    const size_t before = m.result.side_effects.size();
    diff(k);
    k.written = m.result.side_effects.size() > before;
  }
  for (PyObject* o : m.overlay_order) {
    auto it = m.overlays.find(o);
    if (it == m.overlays.end()) continue;
    RecipePtr target = recipe(o);
    for (auto& [name, value] : it->second.entries) {
      if (value)
        add(SideEffect::Kind::SetAttr, target, name.get(), recipe(value.get()));
      else
        add(SideEffect::Kind::DelAttr, target, name.get(), nullptr);
    }
  }
  for (auto& [dict, overlay] : m.globals_written)
    for (auto& [name, value] : overlay.entries) {
      if (value)
        add(SideEffect::Kind::StoreGlobal, constant(dict), name.get(), recipe(value.get()));
      else
        add(SideEffect::Kind::DeleteGlobal, constant(dict), name.get(), nullptr);
    }
  for (const py::Ref& c : m.cells_order) {
    PyObject* value = m.cells_written[c.get()].get();
    add(SideEffect::Kind::StoreCell, cell(c.get()), nullptr, value ? recipe(value) : nullptr);
  }
  for (const Machine::DataWritten& w : m.data_written)
    add(SideEffect::Kind::SetAttr, recipe(w.tensor), names().data, recipe(w.data.get()));
  for (PyObject* fake : m.flags_written) {
    const bool now = THPVariable_Unpack(fake).requires_grad();
    if (THPVariable_Unpack(m.real_of(fake)).requires_grad() != now)
      add(SideEffect::Kind::SetAttr, recipe(fake), names().requires_grad, constant(now ? Py_True : Py_False));
  }
  std::vector<std::pair<size_t, PyObject*>> droppable;  // effect, the gradient it replaces
  for (const py::Ref& fake : m.grad_order) {
    Machine::Grad& g = m.grads_[fake.get()];
    const at::Tensor t = THPVariable_Unpack(fake.get());
    const at::Tensor& now = t.grad();
    const bool had = static_cast<bool>(g.initial);
    auto& effects = m.result.side_effects;
    if (now.defined() ? had && THPVariable_Unpack(g.initial.get()).is_same(now) : !had && g.looked) continue;
    py::Ref value = now.defined() ? py::Ref::steal(THPVariable_Wrap(now)) : py::Ref::borrow(Py_None);
    add(SideEffect::Kind::SetAttr, recipe(fake.get()), names().grad, recipe(value.get()));
    if (had && !m.trace.find(THPVariable_Unpack(g.initial.get())))
      droppable.emplace_back(effects.size() - 1, g.initial.get());
  }
  for (auto [at, grad] : droppable)
    if (!made_.count(grad)) m.result.side_effects[at].drop_before = true;
  modes();
}

/// Grad mode, autocast and the like as the captured part leaves them.
void Leaver::modes() {
  const auto call_object = [&](PyObject* function, const std::vector<PyObject*>& args) {
    SideEffect e;
    e.kind = SideEffect::Kind::Call;
    e.value = constant(function);
    for (PyObject* a : args) e.extra.push_back(constant(a));
    m.result.side_effects.push_back(std::move(e));
  };
  const auto call = [&](const char* name, std::initializer_list<PyObject*> args, const char* in = "torch._C") {
    const py::Ref module = py::check(py::import_module(in));
    call_object(py::check(PyObject_GetAttrString(module.get(), name)).get(), args);
  };
  const auto flag = [](bool b) { return b ? Py_True : Py_False; };
  const aten::Modes now;
  const aten::Modes& before = m.modes_at_start;
  py::Ref cpu = py::Ref::steal(PyUnicode_InternFromString("cpu"));
  if (now.grad != before.grad) call("_set_grad_enabled", {flag(now.grad)});
  if (now.autocast != before.autocast) call("set_autocast_enabled", {cpu.get(), flag(now.autocast)});
  if (now.autocast_dtype != before.autocast_dtype)
    call("set_autocast_dtype", {cpu.get(), reinterpret_cast<PyObject*>(torch::getTHPDtype(now.autocast_dtype))});
  if (now.autocast_cache != before.autocast_cache) call("set_autocast_cache_enabled", {flag(now.autocast_cache)});
  const aten::TransformModes differentiation;
  if (differentiation.forward_grad != m.transform_modes_at_start.forward_grad)
    call("_set_fwd_grad_enabled", {flag(differentiation.forward_grad)});
  if (differentiation.saved_hooks_disabled != m.transform_modes_at_start.saved_hooks_disabled) {
    if (!differentiation.saved_hooks_disabled) {
      call("_saved_tensors_hooks_enable", {}, "torch._C._autograd");
    } else {
      const py::Ref message = py::check(PyUnicode_FromString(differentiation.saved_hooks_disabled->c_str()));
      call("_saved_tensors_hooks_disable", {message.get()}, "torch._C._autograd");
    }
  }
  const int64_t kept = m.function_modes_at_start.common();
  for (int64_t i = m.function_modes_at_start.size(); i > kept; --i) call("_pop_torch_function_stack", {});
  for (int64_t i = kept; i < py::num_function_modes(); ++i) {
    call("_push_on_torch_function_stack", {});
    m.result.side_effects.back().extra = {recipe(py::function_mode(i))};
  }
  if (const auto state = at::impl::PythonTorchFunctionTLS::get_disabled_state();
      state != m.function_modes_at_start.disabled()) {
    static constexpr std::array<const char*, 3> kNames = {"ENABLED", "SUBCLASSES_DISABLED", "ALL_DISABLED"};
    const py::Ref module = py::check(py::import_module("torch._C"));
    const py::Ref states = py::check(PyObject_GetAttrString(module.get(), "_TorchFunctionState"));
    call("_set_torch_function_state", {py::check(PyObject_GetAttrString(states.get(), kNames.at(state))).get()});
  }
  for (const Machine::Setting& s : m.settings) {
    if (!s.setter) continue;
    const py::Ref now = py::check(PyObject_CallObject(s.getter.get(), s.args.get()));
    if (PyObject_RichCompareBool(now.get(), s.before.get(), Py_EQ) == 1) continue;
    PyObject** const first = PySequence_Fast_ITEMS(s.args.get());
    std::vector<PyObject*> args(first, first + PyTuple_GET_SIZE(s.args.get()));
    args.push_back(now.get());
    call_object(s.setter.get(), args);
  }
  for (int i = 0; i < m.autocast_nesting; ++i) call("autocast_increment_nesting", {});
  for (int i = 0; i > m.autocast_nesting; --i) call("autocast_decrement_nesting", {});
  if (m.autocast_nesting < 0) call("clear_autocast_cache", {});
}

// --- exits
// -------------------------------------------------------------------------------------------------------------

bool Machine::is_made_function(PyObject* f) {
  // Existing functions that the program met are known; others come out of classes.
  return made_functions.count(f) != 0;
}

namespace {
/// Whether something tells when `o`, or an object in it, dies: a weak reference, a finalizer (__del__, the `finally` of
/// a generator, the end of a file), or a buffer that may be resized again. Tensors, which are stand-ins here, aside. A
/// module may be given a weak reference yet: its hooks of gradients have it.
bool is_watched(PyObject* o) {
  constexpr size_t kMost = 4096;  // objects that are looked at
  std::vector<PyObject*> todo{o};
  std::unordered_set<PyObject*> seen{o};
  while (!todo.empty()) {
    PyObject* const now = todo.back();
    todo.pop_back();
    PyTypeObject* const type = Py_TYPE(now);
    if (PyType_Check(now) || PyModule_Check(now) || PyFunction_Check(now) || PyCode_Check(now) || py::is_tensor(now))
      continue;
    if (PyObject_TypeCheck(now, reinterpret_cast<PyTypeObject*>(names().module_type))) return true;
    if (type->tp_finalize || type->tp_del || PyMemoryView_Check(now)) return true;
    if (PyType_SUPPORTS_WEAKREFS(type) && *PyObject_GET_WEAKREFS_LISTPTR(now)) return true;
    if (!PyObject_IS_GC(now)) continue;
    for (PyObject* part : referents_of(now))
      if (seen.size() < kMost && seen.insert(part).second) todo.push_back(part);
  }
  return false;
}
}  // namespace

void Machine::leave_return(PyObject* value) {
  Exit exit;
  exit.kind = Exit::Kind::Return;
  leave(exit, [&](Leaver& l) { exit.value = l.recipe(value); });
}

void Machine::leave_at(int offset, PyObject** sp, py311::Frame* frame) {
  Exit exit;
  exit.kind = Exit::Kind::Break;
  exit.offset = offset;
  auto r = break_reasons.find(offset);
  if (r != break_reasons.end()) exit.reason = r->second;
  leave(exit, [&](Leaver& l) {
    PyCodeObject* code = frame->f_code;
    for (int i = 0; i < code->co_nlocalsplus; ++i) {
      PyObject* o = frame->localsplus[i];
      const uint8_t kind = py311::local_kind(code, i);
      if (!o) {
        exit.locals.push_back(nullptr);
      } else if (kind & py311::KindFree) {
        auto s = std::make_shared<Recipe>();
        s->kind = Recipe::Kind::Source;
        s->source = guards::cell(i, py311::local_name(code, i));
        exit.locals.push_back(PyCell_GET(o) ? s : nullptr);
      } else {
        exit.locals.push_back(PyCell_Check(o) && (kind & py311::KindCell) ? l.cell(o) : l.recipe(o));
      }
      // What existed before is kept by who called, or by the frame before this one.
      const Known* k = o ? find(o) : nullptr;
      exit.watched.push_back(o && (options.resumes || !k) && !is_constant(o) && is_watched(k ? k->real.get() : o));
    }
    for (PyObject** p = py311::stack_base(frame); p < sp; ++p) exit.stack.push_back(l.recipe(*p));
  });
}

void Machine::leave(Exit& exit, const std::function<void(Leaver&)>& fill) {
  if (!finalizable.empty()) {
    root_instruction = finalizable.begin()->second;
    graph_break("object-with-finalizer", "an object with a __del__ is alive where the captured part ends");
    return;
  }
  aten::RecordingPaused no_recording;
  Paused paused_here(*this);
  result.exit.kind = exit.kind;
  Leaver leaver(*this);
  try {
    fill(leaver);
    leaver.side_effects();
    leaver.keep_apart();
  } catch (const NotRebuildable& e) {
    PyErr_Clear();
    // An earlier point may do: the last call before here that is not yet a break.
    trace.graph().outputs().clear();
    torch_level->outputs().clear();
    result.side_effects.clear();
    graph_break("not-rebuildable", e.what + " is alive where the captured part ends");
    while (!root_calls.empty() && options.break_at.count(root_calls.back())) root_calls.pop_back();
    root_instruction = root_calls.empty() ? -1 : root_calls.back();
    return;
  }
  PyErr_Clear();
  for (const at::Tensor& t : leaver.tensors)
    if (const int made_at = leaf_behind(t, leaver.tensors); made_at >= 0) {
      graph_break("autograd", "a tensor with requires_grad=True is made, and results depend on it");
      root_instruction = made_at;
      return;
    }
  for (const at::Tensor& t : leaver.tensors)
    if (const int registered_at = hook_behind(t); registered_at >= 0) {
      graph_break("autograd", "a hook on a gradient that is computed after the captured part");
      root_instruction = registered_at;
      return;
    }
  for (const auto& [t, instruction] : retained)
    if (has_or_views(leaver.tensors, t)) {
      graph_break("autograd", "a result of which retain_grad() was called");
      root_instruction = instruction;
      return;
    }
  for (const CachedObject& c : cached_objects)
    if (c.changed() || leaver.makes(c.object.get())) {
      graph_break("call-that-breaks", "a list or dict that functools.lru_cache keeps is changed, or leaves");
      root_instruction = c.instruction;
      return;
    }
  for (const SharedArray& s : shared_arrays)
    if (s.changed() || leaver.makes(s.owner.get())) {
      graph_break("tensor-constructor", "a tensor with the memory of an array that is written or leaves");
      root_instruction = s.instruction;
      return;
    }
  for (const Deferred& call : deferred)
    if (const bool written = versions_of(call.args) != call.versions; written || sees_message(call)) {
      graph_break("call-that-breaks", written ? "a tensor is written after a message was made of it"
                                              : "a message to loggers or handlers that the program changes or reads");
      root_instruction = call.instruction;
      return;
    }
  if (const auto instruction = leaver.id_asked_for()) {
    graph_break("call-that-breaks", "the id() of an object that the captured code makes leaves together with it");
    root_instruction = *instruction;
    return;
  }
  result.exit = std::move(exit);
  done = true;
}

void Machine::finish() {
  result.sizes = trace.sizes;
  // What was decided by an input's data is a condition on it, though nothing may be computed of it.
  const bool delivers = trace.sizes && trace.sizes->any_open() && !trace.sizes->outputs().empty();
  if (trace.num_nodes == 0 && branches_.numbers.empty() && branches_.values.empty() && !delivers) {
    result.inputs.clear();
    result.example_inputs.clear();
    return;
  }
  result.traced = trace.share();
  // Operators of tensors are methods of theirs, which may be replaced.
  PyObject* tensor = names().tensor_type;
  guard(guards::Guard::Kind::ClassVersion, child(guards::Source::Kind::Const, nullptr, tensor), tensor,
        py311::type_version(reinterpret_cast<PyTypeObject*>(tensor)));
  result.eager_condition = any_of(eager_conditions_, "eager_condition");
  result.other_branch = any_of(branches_, "other_branch");
  if (!torch_level_ok) return;
  result.torch_level = torch_level;
  if (trace.sizes && options.for_fx) finish_torch_sizes();
}

}  // namespace kiln::capture
