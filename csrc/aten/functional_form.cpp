#include "aten/functional_form.h"

#include <torch/library.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <mutex>

#include "aten/convert.h"
#include "aten/functional_tensor.h"
#include "aten/pch.h"
#include "aten/schema.h"
#include "base/error.h"

namespace kiln::aten {
namespace {

namespace fn = at::functionalization::impl;

/// Records live as long as the process.
struct Forms {
  std::mutex mutex;
  std::map<const OpInfo*, const OpInfo*> of;                     // by operator: its form
  std::map<const c10::FunctionSchema*, const OpInfo*> original;  // by the form's schema: the operator
};
Forms& forms() {
  static auto& all = *new Forms();
  return all;
}

size_t num_fresh(const OpInfo& op) {
  return static_cast<size_t>(std::count(op.written_return.begin(), op.written_return.end(), -1));
}

/// The form's kernel, for real tensors and for those on the meta device.
void run_form(const c10::OperatorHandle& form, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const OpInfo* op;
  {
    std::lock_guard lock(forms().mutex);
    op = forms().original.at(&form.schema());
  }
  const size_t first = stack->size() - op->schema().arguments().size();
  torch::jit::Stack call(std::make_move_iterator(stack->begin() + static_cast<int64_t>(first)),
                         std::make_move_iterator(stack->end()));
  stack->resize(first);
  bool meta = false;
  std::vector<c10::IValue> written;
  for (const int arg : op->written_args) {
    c10::IValue& value = call[static_cast<size_t>(arg)];
    value = map_tensors(value, [&](const at::Tensor& t) {
      meta |= t.is_meta();
      return t.clone();
    });
    written.push_back(value);
  }
  // What only writes may have no kernel for tensors without data, and nobody needs one.
  if (!meta || num_fresh(*op) > 0) {
    op->handle.callBoxed(call);
    for (size_t i = 0; i < op->written_return.size(); ++i)
      if (op->written_return[i] < 0) stack->push_back(std::move(call[i]));
  }
  std::move(written.begin(), written.end(), std::back_inserter(*stack));
}

/// The operator's kernel of functionalization.
void run_functionalized(const c10::OperatorHandle& handle, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const OpInfo& op = op_info(handle);
  const OpInfo* form;
  {
    std::lock_guard lock(forms().mutex);
    form = forms().of.at(&op);
  }
  const size_t first = stack->size() - op.schema().arguments().size();
  const torch::jit::Stack args(stack->begin() + static_cast<int64_t>(first), stack->end());
  for (const int arg : op.written_args)
    for_each_tensor(args[static_cast<size_t>(arg)], [&](const at::Tensor& t) {
      if (t.defined() && !fn::isFunctionalTensor(t))
        throw Unsupported(op.op.name() + " writes to a tensor that is no value of the graph");
    });
  stack->resize(first);
  torch::jit::Stack results;
  for (const c10::IValue& v : args) results.push_back(map_tensors(v, value_below));
  {
    c10::impl::ExcludeDispatchKeyGuard below(c10::DispatchKeySet(c10::DispatchKey::Functionalize));
    form->handle.callBoxed(results);
  }
  const size_t fresh = num_fresh(op);
  for (size_t i = 0; i < op.written_args.size(); ++i) {
    const std::vector<at::Tensor> values = flatten_tensors(c10::ArrayRef<c10::IValue>(results).slice(fresh + i, 1));
    size_t next = 0;
    for_each_tensor(args[static_cast<size_t>(op.written_args[i])], [&](const at::Tensor& wrapper) {
      const at::Tensor& value = values.at(next++);
      if (!wrapper.defined()) return;
      write_below(wrapper, value);
      wrapper.unsafeGetTensorImpl()->bump_version();  // as the ATen operators that do the writing would
    });
  }
  size_t next = 0;
  for (const int from : op.written_return)
    stack->push_back(
        from >= 0 ? args[static_cast<size_t>(from)]
                  : map_tensors(results[next++], [](const at::Tensor& t) { return fn::to_functional_tensor(t); }));
}

c10::FunctionSchema form_schema(const OpInfo& op) {
  std::vector<c10::Argument> arguments, returns;
  const auto plain = [](const c10::Argument& a, std::string name, std::optional<c10::IValue> default_value,
                        bool kwarg) {
    return c10::Argument(std::move(name), a.type(), a.real_type(), a.N(), std::move(default_value), kwarg);
  };
  for (const c10::Argument& a : op.schema().arguments())
    arguments.push_back(plain(a, a.name(), a.default_value(), a.kwarg_only()));
  for (size_t i = 0; i < op.written_return.size(); ++i)
    if (op.written_return[i] < 0) returns.push_back(plain(op.schema().returns()[i], "", {}, false));
  for (const int arg : op.written_args)
    returns.push_back(plain(op.schema().arguments()[static_cast<size_t>(arg)], "", {}, false));
  std::string name = op.handle.operator_name().name;
  name.replace(name.find("::"), 2, "__");
  if (name.back() == '_') name += "in_place";  // an underscore at the end says that an operator writes
  name = "kiln_functional::" + name;
  const std::string& overload = op.handle.operator_name().overload_name;
  // That of an operator of this name that is no more is in the way.
  std::string free = name;
  for (int i = 2; c10::Dispatcher::singleton().findSchema({free, overload}); ++i) free = name + std::to_string(i);
  return c10::FunctionSchema(free, overload, std::move(arguments), std::move(returns));
}

}  // namespace

std::string make_functional_form(const c10::OperatorHandle& handle) {
  const OpInfo& op = op_info(handle);
  const std::string& name = op.op.name();
  if (op.kind != OpKind::InPlace) return name + " changes the geometry of a tensor in place";
  if (op.needs_data || op.random) return name + " changes a tensor in place by what is not known ahead";
  for (size_t i = 0; i < op.written_return.size(); ++i)
    if (op.written_return[i] < 0 && op.schema().returns()[i].alias_info())
      return name + " changes a tensor in place and returns a view";
  static std::mutex making;  // the dispatcher, which has a lock of its own, is not called with that of the forms held
  std::lock_guard one_at_a_time(making);
  {
    std::lock_guard lock(forms().mutex);
    if (forms().of.count(&op)) return "";
  }
  // Never taken back: graphs that call the form may live as long as the process.
  static auto& library = *new torch::Library(torch::Library::FRAGMENT, "kiln_functional", {}, __FILE__, __LINE__);
  c10::FunctionSchema schema = form_schema(op);
  const c10::OperatorName form = schema.operator_name();
  library.def(std::move(schema));
  library.impl(form.overload_name.empty() ? form.name.c_str() : (form.name + "." + form.overload_name).c_str(),
               torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd,
                               torch::CppFunction::makeFromBoxedFunction<&run_form>()));
  const OpInfo& info =
      op_info(c10::Dispatcher::singleton().findSchemaOrThrow(form.name.c_str(), form.overload_name.c_str()));
  std::lock_guard lock(forms().mutex);
  forms().original.emplace(&info.schema(), &op);
  forms().of.emplace(&op, &info);
  return "";
}

FunctionalForms::FunctionalForms() {
  std::vector<c10::OperatorName> names;
  {
    std::lock_guard lock(forms().mutex);
    for (const auto& [op, form] : forms().of)
      if (!op->deregistered) names.push_back(op->handle.operator_name());
  }
  for (c10::OperatorName& name : names)
    kernels_.push_back(
        c10::Dispatcher::singleton().registerImpl(std::move(name), c10::DispatchKey::Functionalize,
                                                  c10::KernelFunction::makeFromBoxedFunction<&run_functionalized>(),
                                                  std::nullopt, nullptr, "kiln's functional form"));
}

}  // namespace kiln::aten
