#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>

#include <functional>
#include <optional>

#include "graph/graph.h"

// Between the graph's world and ATen's: dtypes, devices, metas, and arguments as IValues of a schema's types.
namespace kiln::aten {

/// kiln's dtype of a scalar type; DType::Opaque for the ones that kiln only passes on.
DType dtype_of(at::ScalarType t);
/// Throws InternalError for DType::Opaque, which stands for many types.
at::ScalarType scalar_type_of(DType t);
graph::Device device_of(const c10::Device& d);
/// Throws Unsupported for DeviceType::Other.
c10::Device to_device(const graph::Device& d);
at::MemoryFormat to_memory_format(graph::MemoryFormat f);
graph::MemoryFormat memory_format_of(at::MemoryFormat f);
at::Layout to_layout(graph::Layout l);
graph::Layout layout_of(at::Layout l);

/// dtype, sizes, strides, storage offset, device and requires_grad of a strided tensor with concrete sizes.
graph::TensorMeta meta_of(const at::Tensor& t);
/// What lies in memory from the first element of `t` on, as one line of elements of another dtype.
at::Tensor reinterpret(const at::Tensor& t, at::ScalarType dtype);
/// Fresh memory with the meta's sizes, strides and dtype (its offset is not kept).
at::Tensor empty_of(const graph::TensorMeta& m);

using TensorOf = std::function<at::Tensor(graph::Value)>;
/// `arg` as an IValue of the schema's `type`; tensors come from `tensor_of` (called only for defined values).
/// A number where the schema says Tensor becomes a wrapped number. Ints become floats where the schema says float; one
/// int becomes a list where it says list. Throws InternalError if the argument does not fit the type.
c10::IValue to_ivalue(const graph::Arg& arg, const c10::TypePtr& type, const TensorOf& tensor_of);
/// Inverse of to_ivalue for constants and tensors; `arg_of` maps a defined tensor to its graph value, or to a number if
/// it is a wrapped one. `type` is Argument::real_type(), which still tells dtypes, layouts and memory formats from
/// ints. Throws Unsupported for kinds of arguments that a graph cannot hold (generators, objects, symbolic numbers).
using ValueOf = std::function<graph::Arg(const at::Tensor&)>;
graph::Arg from_ivalue(const c10::IValue& v, const c10::TypePtr& type, const ValueOf& arg_of);
/// The same with metadata in place of values, as the op table's rules take arguments; `meta` is called on defined
/// tensors.
using MetaArg = ops::BasicArg<const ops::TensorMeta*>;
using MetaOf = std::function<MetaArg(const at::Tensor&)>;
MetaArg from_ivalue(const c10::IValue& v, const c10::TypePtr& type, const MetaOf& meta);
/// All arguments of a call, in schema order.
std::vector<graph::Arg> to_args(const c10::FunctionSchema& schema, c10::ArrayRef<c10::IValue> values,
                                const ValueOf& arg_of);
/// A whole stack for callBoxed; missing trailing arguments take the schema's defaults.
std::vector<c10::IValue> to_stack(const c10::FunctionSchema& schema, const std::vector<graph::Arg>& args,
                                  const TensorOf& tensor_of);

/// What PyTorch's bindings make of a number where an operator takes a tensor. Calls no operator.
at::Tensor wrapped_number(const at::Scalar& number);
/// The number that a wrapped number (a 0-dim tensor of weak dtype, the 1 of `x + 1`) holds.
at::Scalar wrapped_number_value(const at::Tensor& t);

/// Real tensors of up to this many elements may be constants of a program (torch.tensor([...])).
constexpr int64_t kMaxConstant = 4096;
graph::Arg number_arg(const at::Scalar& s);
/// The elements of a real tensor as a list of numbers. The caller sees to it that operators compute (NoFakeGuard).
graph::Arg numbers_of(const at::Tensor& t);
/// The tensor of a kiln::tensor_constant(numbers, sizes, dtype).
at::Tensor constant_tensor(const std::vector<graph::Arg>& args);

/// Calls f on every tensor in `value`, undefined ones included: a tensor, an optional one, or a list.
void for_each_tensor(const c10::IValue& value, const std::function<void(const at::Tensor&)>& f);
/// `value` with f(t) in the place of each defined tensor t in it: a tensor, an optional one, or a list.
c10::IValue map_tensors(const c10::IValue& value, const std::function<at::Tensor(const at::Tensor&)>& f);
/// Whether an index of this type selects by its data, instead of naming what is selected.
inline bool is_mask(at::ScalarType t) { return t == at::kBool || t == at::kByte; }
/// Whether indices (a Tensor?[]) have masks among them.
bool has_mask(const c10::IValue& indices);
/// Results of a boxed call, flattened to tensors in order. Throws Unsupported if one is neither a tensor nor a list of
/// them.
std::vector<at::Tensor> flatten_tensors(c10::ArrayRef<c10::IValue> results);

}  // namespace kiln::aten
