#include "python/frame/leave.h"

#include <algorithm>

#include "base/error.h"
#include "python/cpython/function_modes.h"
#include "python/cpython/py311.h"
#include "python/pch.h"

namespace kiln::frame {

using capture::Recipe;
using capture::RecipePtr;
using capture::SideEffect;
using py::check;
using py::Ref;

py::Ref GraphOutputs::object(size_t i) const {
  KILN_CHECK(i < size(), "a recipe asks for output " + std::to_string(i) + " of " + std::to_string(size()));
  if (python) return objects[i];
  if (!tensors[i].defined()) return Ref::borrow(Py_None);
  return check(THPVariable_Wrap(tensors[i]));
}

LeaveProgram::LeaveProgram(const std::vector<RecipePtr>& results, const std::vector<SideEffect>& effects,
                           std::vector<guards::SourcePtr>& wanted) {
  std::unordered_map<const Recipe*, int> slots;
  const size_t first_source = wanted.size();
  // Objects exist before the effects that mention them; sources are read before any effect changes what they read.
  for (const SideEffect& e : effects) {
    Effect out;
    out.kind = e.kind;
    out.key = e.key;
    if (e.target) out.target = visit(e.target, wanted, slots);
    if (e.drop_before && e.target->kind == Recipe::Kind::Source)
      for (const Step& s : steps_)
        if (s.slot == out.target) dropped_grads_.push_back(s.index);
    if (e.key_recipe) out.key_slot = visit(e.key_recipe, wanted, slots);
    if (e.value) out.value = visit(e.value, wanted, slots);
    for (const RecipePtr& r : e.extra) out.extra.push_back(visit(r, wanted, slots));
    effects_.push_back(std::move(out));
  }
  const auto for_effects = static_cast<std::ptrdiff_t>(steps_.size());
  for (const RecipePtr& r : results) results_.push_back(r ? visit(r, wanted, slots) : -1);
  put_off_calls(for_effects);
  KILN_CHECK(static_cast<size_t>(num_sources_) == wanted.size() - first_source, "sources and recipes disagree");
  std::sort(used_outputs_.begin(), used_outputs_.end());
  used_outputs_.erase(std::unique(used_outputs_.begin(), used_outputs_.end()), used_outputs_.end());
  if (results.size() == 1 && results[0] && results[0]->kind == Recipe::Kind::Output && effects.empty() &&
      results[0]->state.empty())
    single_output_ = static_cast<int>(results[0]->index);
}

void LeaveProgram::put_off_calls(std::ptrdiff_t from) {
  std::vector<bool> late(static_cast<size_t>(num_slots_));
  const auto is_late = [&](int slot) { return slot >= 0 && late[static_cast<size_t>(slot)]; };
  const auto begin = steps_.begin() + from;
  for (auto s = begin; s != steps_.end(); ++s)
    if (!s->fill && (s->kind == Recipe::Kind::Call || std::any_of(s->parts.begin(), s->parts.end(), is_late)))
      late[static_cast<size_t>(s->slot)] = true;
  const auto behind = std::stable_partition(begin, steps_.end(), [&](const Step& s) {
    return !is_late(s.slot) && std::none_of(s.elements.begin(), s.elements.end(), is_late) &&
           std::none_of(s.state.begin(), s.state.end(), [&](const auto& named) { return is_late(named.second); });
  });
  behind_effects_ = static_cast<size_t>(behind - steps_.begin());
}

int LeaveProgram::visit(const RecipePtr& recipe, std::vector<guards::SourcePtr>& wanted,
                        std::unordered_map<const Recipe*, int>& slots) {
  KILN_CHECK(recipe != nullptr, "a recipe has an empty part");
  if (auto it = slots.find(recipe.get()); it != slots.end()) return it->second;
  Step step;
  step.kind = recipe->kind;
  step.object = recipe->object;
  step.index = recipe->index;
  if (recipe->kind == Recipe::Kind::Source) {
    step.index = static_cast<int64_t>(num_sources_++);
    wanted.push_back(recipe->source);
  }
  if (recipe->kind == Recipe::Kind::Output) used_outputs_.push_back(recipe->index);
  for (const RecipePtr& part : recipe->parts) step.parts.push_back(part ? visit(part, wanted, slots) : -1);
  // The content of one of its parts may refer to it, and is filled in behind all parts.
  if (auto it = slots.find(recipe.get()); it != slots.end()) return it->second;
  const int slot = step.slot = num_slots_++;
  slots.emplace(recipe.get(), slot);
  steps_.push_back(std::move(step));
  if (recipe->state.empty() && recipe->elements.empty()) return slot;
  // The object exists by now, so that its content may refer to it.
  Step fill;
  fill.kind = recipe->kind;
  fill.fill = true;
  fill.slot = slot;
  for (const auto& [name, value] : recipe->state) fill.state.emplace_back(name, visit(value, wanted, slots));
  for (const RecipePtr& e : recipe->elements) fill.elements.push_back(visit(e, wanted, slots));
  steps_.push_back(std::move(fill));
  return slot;
}

void LeaveProgram::renumber_outputs(const std::vector<int64_t>& map) {
  for (Step& s : steps_)
    if (s.kind == Recipe::Kind::Output && !s.fill) s.index = map.at(static_cast<size_t>(s.index));
  for (int64_t& i : used_outputs_) i = map.at(static_cast<size_t>(i));
  if (single_output_ >= 0) single_output_ = static_cast<int>(map.at(static_cast<size_t>(single_output_)));
}

namespace {

void must(int result) {
  if (result < 0) throw py::PythonError{};
}

/// Past what the object's class says of writing to it. Null removes.
int set_attribute(PyObject* target, PyObject* name, PyObject* value) {
  const py::PastOverrides itself(target);
  return PyType_Check(target) ? PyType_Type.tp_setattro(target, name, value)
                              : PyObject_GenericSetAttr(target, name, value);
}

/// Of a removal: one that the program set before it removed it may not be there, which raises `missing`. Guards say of
/// the others that they are.
void must_be_gone(int result, PyObject* missing) {
  if (result < 0 && PyErr_ExceptionMatches(missing)) return PyErr_Clear();
  must(result);
}

void set_dict_item(PyObject* dict, PyObject* key, PyObject* value) {
  // An OrderedDict keeps an order of its own beside the dict's.
  must(PyODict_Check(dict) ? PyODict_SetItem(dict, key, value) : PyDict_SetItem(dict, key, value));
}

Ref make_function(PyObject* code, const std::vector<int>& parts, const std::vector<Ref>& slots) {
  const auto part = [&](size_t i) -> PyObject* {
    if (i >= parts.size() || parts[i] < 0) return nullptr;
    PyObject* o = slots[parts[i]].get();
    return o == Py_None ? nullptr : o;
  };
  Ref f = check(PyFunction_New(code, part(0)));
  if (PyObject* name = part(1)) must(PyObject_SetAttrString(f.get(), "__name__", name));
  if (PyObject* defaults = part(2)) must(PyFunction_SetDefaults(f.get(), defaults));
  if (PyObject* defaults = part(3)) must(PyFunction_SetKwDefaults(f.get(), defaults));
  if (PyObject* closure = part(4)) must(PyFunction_SetClosure(f.get(), closure));
  if (PyObject* annotations = part(5)) must(PyFunction_SetAnnotations(f.get(), annotations));
  if (PyObject* qualname = part(6)) must(PyObject_SetAttrString(f.get(), "__qualname__", qualname));
  // functools.wraps() sets these.
  must(PyObject_SetAttrString(f.get(), "__doc__", part(7) ? part(7) : Py_None));
  must(PyObject_SetAttrString(f.get(), "__module__", part(8) ? part(8) : Py_None));
  return f;
}

}  // namespace

void LeaveProgram::make(const Step& s, const GraphOutputs& outputs, PyObject* const* sources,
                        std::vector<Ref>& slots) const {
  const auto part = [&](size_t i) -> PyObject* { return s.parts.at(i) < 0 ? nullptr : slots[s.parts[i]].get(); };
  Ref& out = slots[s.slot];
  switch (s.kind) {
    case Recipe::Kind::Source:
      out = Ref::borrow(sources[s.index]);
      return;
    case Recipe::Kind::Output:
      out = outputs.object(static_cast<size_t>(s.index));
      return;
    case Recipe::Kind::Size:
      out = check(PyLong_FromLongLong(outputs.sizes.at(static_cast<size_t>(s.index))));
      return;
    case Recipe::Kind::Real:
      out = check(PyFloat_FromDouble(std::bit_cast<double>(outputs.sizes.at(static_cast<size_t>(s.index)))));
      return;
    case Recipe::Kind::Constant:
      out = s.object;
      return;
    case Recipe::Kind::Null:
      return;
    case Recipe::Kind::List: {
      out = check(PyList_New(static_cast<Py_ssize_t>(s.parts.size())));
      for (size_t i = 0; i < s.parts.size(); ++i)
        PyList_SET_ITEM(out.get(), static_cast<Py_ssize_t>(i), slots[s.parts[i]].new_ref());
      return;
    }
    case Recipe::Kind::Tuple: {
      out = check(PyTuple_New(static_cast<Py_ssize_t>(s.parts.size())));
      for (size_t i = 0; i < s.parts.size(); ++i)
        PyTuple_SET_ITEM(out.get(), static_cast<Py_ssize_t>(i), slots[s.parts[i]].new_ref());
      return;
    }
    case Recipe::Kind::Set:
    case Recipe::Kind::FrozenSet: {
      out = check(s.kind == Recipe::Kind::Set ? PySet_New(nullptr) : PyFrozenSet_New(nullptr));
      if (s.object) must(py311::copy_set(out.get(), s.object.get()) ? 0 : -1);
      for (int p : s.parts) must(PySet_Add(out.get(), slots[p].get()));
      return;
    }
    case Recipe::Kind::Dict:
      out = check(PyDict_New());
      for (size_t i = 0; i + 1 < s.parts.size(); i += 2) must(PyDict_SetItem(out.get(), part(i), part(i + 1)));
      return;
    case Recipe::Kind::Slice:
      out = check(PySlice_New(part(0), part(1), part(2)));
      return;
    case Recipe::Kind::Cell:
      out = check(PyCell_New(s.parts.empty() ? nullptr : part(0)));
      return;
    case Recipe::Kind::Call: {
      std::vector<PyObject*> args;
      for (int p : s.parts) args.push_back(slots[p].get());
      out = check(PyObject_Vectorcall(s.object.get(), args.data(), args.size(), nullptr));
      return;
    }
    case Recipe::Kind::Instance: {
      auto* base = reinterpret_cast<PyTypeObject*>(part(0));
      Ref args = s.parts.size() > 1 ? Ref::borrow(part(1)) : check(PyTuple_New(0));
      out = check(base->tp_new(reinterpret_cast<PyTypeObject*>(s.object.get()), args.get(), nullptr));
      return;
    }
    case Recipe::Kind::Function:
      out = make_function(s.object.get(), s.parts, slots);
      return;
    case Recipe::Kind::Item: {
      PyObject* from = part(0);
      KILN_CHECK(PyTuple_Check(from) || PyList_Check(from), "an item's recipe needs a tuple or a list");
      out = check(PySequence_GetItem(from, static_cast<Py_ssize_t>(s.index)));
      return;
    }
    case Recipe::Kind::Method:
      out = check(PyMethod_New(part(0), part(1)));
      return;
  }
}

void LeaveProgram::fill(const Step& s, std::vector<Ref>& slots) const {
  PyObject* o = slots[s.slot].get();
  for (const auto& [name, value_slot] : s.state) {
    PyObject* value = slots[value_slot].get();
    if (PyList_Check(o) && s.kind == Recipe::Kind::List) {
      must(PyList_Append(o, value));
    } else if (s.kind == Recipe::Kind::Dict) {
      must(PyDict_SetItem(o, name.get(), value));
    } else if (s.kind == Recipe::Kind::Set) {
      must(PySet_Add(o, value));
    } else if (s.kind == Recipe::Kind::Cell) {
      must(PyCell_Set(o, value));
    } else {
      PyObject* descriptor = _PyType_Lookup(Py_TYPE(o), name.get());
      const bool in_slot =
          descriptor &&
          (Py_TYPE(descriptor) == &PyMemberDescr_Type ||
           (Py_TYPE(descriptor) == &PyGetSetDescr_Type && (PyExceptionInstance_Check(o) || py::is_tensor(o))));
      if (in_slot || !_PyObject_GetDictPtr(o)) {
        must(PyObject_GenericSetAttr(o, name.get(), value));
      } else {
        Ref dict = check(PyObject_GenericGetDict(o, nullptr));
        must(PyDict_SetItem(dict.get(), name.get(), value));
      }
    }
  }
  if (PyDict_Check(o)) {
    for (size_t i = 0; i + 1 < s.elements.size(); i += 2)
      set_dict_item(o, slots[s.elements[i]].get(), slots[s.elements[i + 1]].get());
  } else {
    for (int e : s.elements) {
      if (PyList_Check(o))
        must(PyList_Append(o, slots[e].get()));
      else if (PyAnySet_Check(o))
        must(PySet_Add(o, slots[e].get()));
      else
        throw InternalError("a recipe has elements for an object that is no list, dict or set");
    }
  }
}

void LeaveProgram::apply(const Effect& e, std::vector<Ref>& slots) const {
  const auto at = [&](int slot) -> PyObject* { return slot < 0 ? nullptr : slots[slot].get(); };
  PyObject* target = at(e.target);
  PyObject* key = e.key_slot >= 0 ? at(e.key_slot) : e.key.get();
  PyObject* value = at(e.value);
  switch (e.kind) {
    case SideEffect::Kind::SetAttr:
      must(set_attribute(target, key, value));
      return;
    case SideEffect::Kind::DelAttr:
      must_be_gone(set_attribute(target, key, nullptr), PyExc_AttributeError);
      return;
    case SideEffect::Kind::SetItem:
      if (PyList_Check(target) && PyLong_Check(key)) {
        Py_INCREF(value);
        must(PyList_SetItem(target, PyLong_AsSsize_t(key), value));
        return;
      }
      set_dict_item(target, key, value);
      return;
    case SideEffect::Kind::StoreGlobal:
      must(PyDict_SetItem(target, key, value));
      return;
    case SideEffect::Kind::DeleteGlobal:
      must_be_gone(PyDict_DelItem(target, key), PyExc_KeyError);
      return;
    case SideEffect::Kind::DelItem:
      must(PyODict_Check(target) ? PyODict_DelItem(target, key) : PyDict_DelItem(target, key));
      return;
    case SideEffect::Kind::ReplaceList:
      must(PyList_SetSlice(target, 0, PyList_GET_SIZE(target), value));
      return;
    case SideEffect::Kind::ExtendList:
      if (!PyList_Check(target)) {
        const Ref done = check(PyObject_CallMethod(target, "extend", "O", value));
        return;
      }
      must(PyList_SetSlice(target, PyList_GET_SIZE(target), PyList_GET_SIZE(target), value));
      return;
    case SideEffect::Kind::ReplaceDict: {
      if (PyODict_Check(target)) {
        Ref done = check(PyObject_CallMethod(reinterpret_cast<PyObject*>(&PyODict_Type), "clear", "O", target));
      } else {
        PyDict_Clear(target);
      }
      Py_ssize_t at_item = 0;
      PyObject *k, *v;
      while (PyDict_Next(value, &at_item, &k, &v)) set_dict_item(target, k, v);
      return;
    }
    case SideEffect::Kind::ReplaceSet:
      must(PySet_Clear(target));
      must(py311::copy_set(target, value) ? 0 : -1);
      return;
    case SideEffect::Kind::ReplaceDeque: {
      const Ref cleared = check(PyObject_CallMethod(target, "clear", nullptr));
      const Ref filled = check(PyObject_CallMethod(target, "extend", "O", value));
      return;
    }
    case SideEffect::Kind::StoreCell:
      must(PyCell_Set(target, value));
      return;
    case SideEffect::Kind::Call: {
      std::vector<PyObject*> args;
      for (int slot : e.extra) args.push_back(at(slot));
      check(PyObject_Vectorcall(value, args.data(), args.size(), nullptr));
      return;
    }
  }
}

void LeaveProgram::drop_gradients(PyObject* const* sources) const {
  for (int64_t i : dropped_grads_) THPVariable_Unpack(sources[i]).mutable_grad() = at::Tensor();
}

std::vector<Ref> LeaveProgram::run(const GraphOutputs& outputs, PyObject* const* sources) const {
  std::vector<Ref> slots(static_cast<size_t>(num_slots_));
  const auto take = [&](size_t from, size_t to) {
    for (size_t i = from; i < to; ++i) {
      if (steps_[i].fill)
        fill(steps_[i], slots);
      else
        make(steps_[i], outputs, sources, slots);
    }
  };
  take(0, behind_effects_);
  for (const Effect& e : effects_) apply(e, slots);
  take(behind_effects_, steps_.size());
  std::vector<Ref> results;
  results.reserve(results_.size());
  for (int slot : results_) results.push_back(slot < 0 ? Ref() : slots[slot]);
  return results;
}

}  // namespace kiln::frame
