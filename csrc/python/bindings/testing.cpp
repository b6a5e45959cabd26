// Parts of the frame layer, one by one, for tests: guard trees without capture, continuations at every instruction.
#include <chrono>

#include "aten/convert.h"
#include "base/error.h"
#include "python/bindings/bindings.h"
#include "python/cpython/py311.h"
#include "python/frame/bind.h"
#include "python/frame/bytecode/code.h"
#include "python/frame/errors.h"
#include "python/frame/leave.h"
#include "python/frame/resume.h"
#include "python/guards/tree.h"

namespace pb = pybind11;

namespace kiln::bindings {
namespace {

using guards::Guard;
using guards::SourcePtr;

/// ("local", 0, "x"), ("item", source, key), ...: the constructors of guards/source.h by name.
SourcePtr source_of(pb::handle h) {
  const auto t = h.cast<pb::tuple>();
  const auto kind = t[0].cast<std::string>();
  const auto base = [&] { return source_of(t[1]); };
  const auto text = [&](size_t i) { return t[i].cast<std::string>(); };
  const auto number = [&](size_t i) { return t[i].cast<int64_t>(); };
  if (kind == "local") return guards::local(number(1), text(2));
  if (kind == "cell") return guards::cell(number(1), text(2));
  if (kind == "global") return guards::global(pb::object(t[1]).ptr(), text(2));
  if (kind == "const") return guards::constant(pb::object(t[1]).ptr(), text(2));
  if (kind == "attr") return guards::attr(base(), text(2));
  if (kind == "dict") return guards::instance_dict(base());
  if (kind == "item") return guards::dict_item(base(), pb::object(t[2]).ptr());
  if (kind == "item_at") return guards::dict_item_at(base(), source_of(t[2]));
  if (kind == "index") return guards::list_item(base(), number(2));
  if (kind == "key_at") return guards::dict_key_at(base(), number(2));
  if (kind == "element_at") return guards::set_item_at(base(), number(2));
  if (kind == "contents") return guards::cell_contents(base());
  if (kind == "type") return guards::type_of(base());
  if (kind == "weakref") return guards::weakref(base());
  throw UserError("no kind of source is called " + kind);
}

/// ("type", source, cls), ("length", source, 3), ("tensor", source, example), ("same", source, other), ...
Guard guard_of(pb::handle h) {
  const auto t = h.cast<pb::tuple>();
  const auto kind = t[0].cast<std::string>();
  Guard g{};
  if (kind == "global_state") {
    g.kind = Guard::Kind::GlobalState;
    g.number = guards::pack_global_state();
    return g;
  }
  g.source = source_of(t[1]);
  const auto object = [&](Guard::Kind k) {
    g.kind = k;
    g.object = py::Ref::borrow(pb::object(t[2]).ptr());
  };
  const auto other = [&](Guard::Kind k) {
    g.kind = k;
    g.other = source_of(t[2]);
  };
  if (kind == "type")
    object(Guard::Kind::Type);
  else if (kind == "is")
    object(Guard::Kind::Is);
  else if (kind == "equals")
    object(Guard::Kind::Equals);
  else if (kind == "keys")
    object(Guard::Kind::Keys);
  else if (kind == "has")
    object(Guard::Kind::DictHas);
  else if (kind == "lacks")
    object(Guard::Kind::DictLacks);
  else if (kind == "same")
    other(Guard::Kind::SameObject);
  else if (kind == "not_same")
    other(Guard::Kind::NotSame);
  else if (kind == "length") {
    g.kind = Guard::Kind::Length;
    g.number = t[2].cast<uint64_t>();
  } else if (kind == "tensor") {
    const pb::object example = t[2];
    const at::Tensor& tensor = THPVariable_Unpack(example.ptr());
    g.kind = Guard::Kind::Tensor;
    g.object = py::Ref::borrow(reinterpret_cast<PyObject*>(Py_TYPE(example.ptr())));
    g.number = tensor.unsafeGetTensorImpl()->key_set().raw_repr();
    g.meta = aten::meta_of(tensor);
    g.is_leaf = tensor.is_leaf();
  } else {
    throw UserError("no kind of guard is called " + kind);
  }
  return g;
}

struct Tree {
  explicit Tree(std::vector<Guard> guards, std::vector<SourcePtr> wanted) : tree(std::move(guards), wanted) {}
  guards::GuardTree tree;

  static guards::Call call(const std::vector<pb::object>& locals, std::vector<PyObject*>& array) {
    for (const auto& o : locals) array.push_back(o.ptr());
    return {array.data(), static_cast<int>(array.size()), nullptr, static_cast<int>(array.size())};
  }
  pb::object check(const std::vector<pb::object>& locals) {
    std::vector<PyObject*> array, values(tree.num_wanted());
    guards::Owned owned;
    if (!tree.check(call(locals, array), values.data(), owned)) return pb::none();
    pb::list list;
    for (PyObject* v : values) list.append(pb::reinterpret_borrow<pb::object>(v));
    return list;
  }
  double time(const std::vector<pb::object>& locals, int64_t count) {
    std::vector<PyObject*> array, values(tree.num_wanted());
    guards::Owned owned;
    const guards::Call c = call(locals, array);
    const auto start = std::chrono::steady_clock::now();
    for (int64_t i = 0; i < count; ++i)
      if (!tree.check(c, values.data(), owned)) throw UserError("a guard fails");
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / static_cast<double>(count);
  }
  std::string failure(const std::vector<pb::object>& locals) {
    std::vector<PyObject*> array;
    return tree.failure(call(locals, array));
  }
};

// --- a function run by nothing but continuations --------------------------------------------------------------------

capture::RecipePtr local_recipe(int slot) {
  auto r = std::make_shared<capture::Recipe>();
  r->kind = capture::Recipe::Kind::Source;
  r->source = guards::local(slot, "");
  return r;
}

capture::RecipePtr recipe(capture::Recipe::Kind kind, std::vector<capture::RecipePtr> parts = {}) {
  auto r = std::make_shared<capture::Recipe>();
  r->kind = kind;
  r->parts = std::move(parts);
  return r;
}

/// A break at the first instruction that the code would run for its own sake, with nothing changed before it.
capture::Exit exit_at_start(PyCodeObject* code, PyObject* const* locals) {
  const frame::bytecode::Body body = frame::bytecode::decode(code);
  capture::Exit exit;
  exit.kind = capture::Exit::Kind::Break;
  exit.locals.resize(static_cast<size_t>(code->co_nlocalsplus));
  exit.watched.resize(exit.locals.size());
  if (const frame::ResumePoint* point = frame::code_info(code)->resume.get()) {
    // Slots that are not bound were passed as None and are deleted first.
    std::vector<bool> deleted(static_cast<size_t>(code->co_nlocalsplus), false);
    size_t i = 0;
    for (; body.instructions[i].opcode != JUMP_FORWARD; ++i) {
      const auto& in = body.instructions[i];
      if (in.opcode == DELETE_FAST && in.arg < point->num_slots) deleted[in.arg] = true;
      if (in.opcode == PUSH_NULL) exit.stack.push_back(recipe(capture::Recipe::Kind::Null));
      if (in.opcode == LOAD_FAST) exit.stack.push_back(local_recipe(in.arg));
    }
    for (int s = 0; s < point->num_slots; ++s)
      if (!deleted[s]) exit.locals[s] = local_recipe(s);
    exit.offset = body.instructions[body.instructions[i].target].offset;
    return exit;
  }
  size_t i = 0;
  const int args = frame::num_arguments(code);
  for (int s = 0; s < args; ++s) exit.locals[s] = local_recipe(s);
  for (; body.instructions[i].opcode != RESUME; ++i) {
    const auto& in = body.instructions[i];
    if (in.opcode != MAKE_CELL) continue;
    exit.locals[in.arg] = in.arg < args ? recipe(capture::Recipe::Kind::Cell, {local_recipe(in.arg)})
                                        : recipe(capture::Recipe::Kind::Cell);
  }
  exit.offset = body.instructions[i + 1].offset;
  return exit;
}

/// Calls `f` so that each of its instructions is a graph break: every one runs in a continuation of its own. Returns
/// the result and the number of steps.
pb::tuple single_step(pb::handle f, const pb::args& args, const pb::kwargs& kwargs) {
  try {
    auto* function = reinterpret_cast<PyFunctionObject*>(f.ptr());
    std::vector<PyObject*> array;
    for (const auto& a : args) array.push_back(a.ptr());
    pb::list names;
    for (const auto& [name, value] : kwargs) {
      names.append(name);
      array.push_back(value.ptr());
    }
    pb::tuple kwnames(names);
    frame::Bound bound;
    if (!frame::bind(function, nullptr, array.data(), static_cast<Py_ssize_t>(args.size()), kwnames.ptr(), &bound))
      throw UserError("the arguments do not fit");
    auto* code = reinterpret_cast<PyCodeObject*>(function->func_code);
    std::vector<PyObject*> locals(bound.locals, bound.locals + bound.count);
    frame::ResumeCall held;
    for (int64_t steps = 1;; ++steps) {
      const frame::Continuation next = frame::make_continuation(code, exit_at_start(code, locals.data()));
      std::vector<SourcePtr> wanted;
      frame::LeaveProgram leave(next.results, {}, wanted);
      std::vector<PyObject*> sources;
      for (const SourcePtr& s : wanted) sources.push_back(locals.at(static_cast<size_t>(s->index)));
      std::vector<py::Ref> results = leave.run({}, sources.data());
      py::Ref state = py::check(PyTuple_New(static_cast<Py_ssize_t>(results.size())));
      for (size_t i = 0; i < results.size(); ++i)
        PyTuple_SET_ITEM(state.get(), static_cast<Py_ssize_t>(i), results[i].new_ref());
      py::Ref made = py::check(PyFunction_New(next.code.get(), function->func_globals));
      if (function->func_closure && PyFunction_SetClosure(made.get(), function->func_closure) < 0)
        throw py::PythonError{};
      std::vector<PyObject*> call(locals.begin(), locals.begin() + frame::num_arguments(code));
      call.push_back(state.get());
      py::Ref result = py::check(PyObject_Vectorcall(made.get(), call.data(), call.size(), nullptr));
      frame::ResumeCall to;
      if (!frame::take_resume_call(result.get(), &to))
        return pb::make_tuple(pb::reinterpret_steal<pb::object>(result.release()), steps);
      held = std::move(to);
      code = reinterpret_cast<PyCodeObject*>(held.code.get());
      locals.clear();
      for (const py::Ref& a : held.args) locals.push_back(a.get());
    }
  } catch (...) {
    frame::set_python_error(std::current_exception());
    throw pb::error_already_set();
  }
}

}  // namespace

KILN_BINDINGS(testing) {
  pb::module_ t = m.def_submodule("testing", "Parts of the frame layer, for tests.");
  pb::class_<Tree>(t, "GuardTree", "Guards over sources, both given as nested tuples.")
      .def(pb::init([](const pb::list& guards, const pb::list& wanted) {
             std::vector<Guard> g;
             std::vector<SourcePtr> w;
             for (pb::handle h : guards) g.push_back(guard_of(h));
             for (pb::handle h : wanted) w.push_back(source_of(h));
             return std::make_unique<Tree>(std::move(g), std::move(w));
           }),
           pb::arg("guards"), pb::arg("wanted") = pb::list())
      .def("check", &Tree::check, "The wanted objects, or None if a guard fails.")
      .def("time", &Tree::time, pb::arg("locals"), pb::arg("count") = 1000, "Mean seconds of one check.")
      .def("failure", &Tree::failure, "Text of the first guard that fails, or ''.")
      .def("texts",
           [](const Tree& tree) {
             std::vector<std::string> texts;
             for (const Guard& g : tree.tree.guards()) texts.push_back(g.text());
             return texts;
           })
      .def_property_readonly("slow_runs", [](const Tree& tree) { return tree.tree.slow_runs(); })
      .def_property_readonly("fast_size", [](const Tree& tree) { return tree.tree.fast_size(); });
  t.def("single_step", &single_step,
        "Calls a Python function with a graph break at each of its instructions; (result, number of steps).");
}

}  // namespace kiln::bindings
