#include "aten/meta_kernels.h"

#include <ATen/MetaFunctions.h>
#include <ATen/Operators.h>
#include <ATen/ops/is_same_size_compositeexplicitautograd_dispatch.h>

#include <unordered_map>

#include "aten/own_meta.h"

namespace kiln::aten {
namespace {

template <class Schema, Schema* function>
c10::KernelFunction boxed() {
  return c10::KernelFunction::makeFromUnboxedFunction(TORCH_FN(function));
}

template <class T>
std::string name_of() {
  std::string name = T::name;
  if (*T::overload_name) name += std::string(".") + T::overload_name;
  return name;
}

}  // namespace

const c10::KernelFunction* meta_kernel(graph::Op op) {
  static const auto& table = *[] {
    auto* t = new std::unordered_map<graph::Op, c10::KernelFunction>();
#define KILN_KERNEL(schema_struct, function)                \
  t->emplace(graph::Op(name_of<at::_ops::schema_struct>()), \
             boxed<at::_ops::schema_struct::schema, static_cast<at::_ops::schema_struct::schema*>(&function)>());
#define KILN_META(schema_struct, function) KILN_KERNEL(schema_struct, at::meta::function)
#define KILN_COMPOSITE(schema_struct, function) KILN_KERNEL(schema_struct, at::compositeexplicitautograd::function)
#define KILN_OWN(schema_struct, function) KILN_KERNEL(schema_struct, own::function)
#include "aten/meta_kernels.def"
#undef KILN_OWN
#undef KILN_COMPOSITE
#undef KILN_META
#undef KILN_KERNEL
    return t;
  }();
  auto it = table.find(op);
  return it == table.end() ? nullptr : &it->second;
}

}  // namespace kiln::aten
