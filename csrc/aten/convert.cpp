#include "aten/convert.h"

#include <mutex>
#include <unordered_map>
#include <vector>

#include "aten/fake.h"
#include "aten/pch.h"
#include "base/error.h"

namespace kiln::aten {

using graph::Arg;

DType dtype_of(at::ScalarType t) {
  switch (t) {
    case at::kBool:
      return DType::Bool;
    case at::kByte:
      return DType::UInt8;
    case at::kChar:
      return DType::Int8;
    case at::kShort:
      return DType::Int16;
    case at::kInt:
      return DType::Int32;
    case at::kLong:
      return DType::Int64;
    case at::kHalf:
      return DType::Float16;
    case at::kBFloat16:
      return DType::BFloat16;
    case at::kFloat:
      return DType::Float32;
    case at::kDouble:
      return DType::Float64;
    case at::kComplexFloat:
      return DType::Complex64;
    case at::kComplexDouble:
      return DType::Complex128;
    default:
      return DType::Opaque;
  }
}

at::ScalarType scalar_type_of(DType t) {
  switch (t) {
    case DType::Bool:
      return at::kBool;
    case DType::UInt8:
      return at::kByte;
    case DType::Int8:
      return at::kChar;
    case DType::Int16:
      return at::kShort;
    case DType::Int32:
      return at::kInt;
    case DType::Int64:
      return at::kLong;
    case DType::Float16:
      return at::kHalf;
    case DType::BFloat16:
      return at::kBFloat16;
    case DType::Float32:
      return at::kFloat;
    case DType::Float64:
      return at::kDouble;
    case DType::Complex64:
      return at::kComplexFloat;
    case DType::Complex128:
      return at::kComplexDouble;
    case DType::Opaque:
      break;
  }
  throw Unsupported("a tensor of a dtype that kiln does not know");
}

graph::Device device_of(const c10::Device& d) {
  using T = graph::DeviceType;
  const T type = d.is_cpu() ? T::CPU : d.is_cuda() ? T::CUDA : d.is_meta() ? T::Meta : T::Other;
  return {type, type == T::CPU ? static_cast<int8_t>(-1) : static_cast<int8_t>(d.index())};
}

c10::Device to_device(const graph::Device& d) {
  switch (d.type) {
    case graph::DeviceType::CPU:
      return c10::Device(c10::kCPU);
    case graph::DeviceType::CUDA:
      return c10::Device(c10::kCUDA, d.index);
    case graph::DeviceType::Meta:
      return c10::Device(c10::kMeta);
    case graph::DeviceType::Other:
      break;
  }
  throw Unsupported("a device that kiln does not know");
}

at::MemoryFormat to_memory_format(graph::MemoryFormat f) {
  switch (f) {
    case graph::MemoryFormat::Contiguous:
      return at::MemoryFormat::Contiguous;
    case graph::MemoryFormat::Preserve:
      return at::MemoryFormat::Preserve;
    case graph::MemoryFormat::ChannelsLast:
      return at::MemoryFormat::ChannelsLast;
    case graph::MemoryFormat::ChannelsLast3d:
      return at::MemoryFormat::ChannelsLast3d;
  }
  throw InternalError("bad memory format");
}

graph::MemoryFormat memory_format_of(at::MemoryFormat f) {
  switch (f) {
    case at::MemoryFormat::Contiguous:
      return graph::MemoryFormat::Contiguous;
    case at::MemoryFormat::Preserve:
      return graph::MemoryFormat::Preserve;
    case at::MemoryFormat::ChannelsLast:
      return graph::MemoryFormat::ChannelsLast;
    case at::MemoryFormat::ChannelsLast3d:
      return graph::MemoryFormat::ChannelsLast3d;
    default:
      throw Unsupported("a memory format that kiln does not know");
  }
}

at::Layout to_layout(graph::Layout l) {
  switch (l) {
    case graph::Layout::Strided:
      return at::kStrided;
    case graph::Layout::Sparse:
      return at::kSparse;
    case graph::Layout::Mkldnn:
      return at::kMkldnn;
    case graph::Layout::Other:
      break;
  }
  throw Unsupported("a layout that kiln does not know");
}

graph::Layout layout_of(at::Layout l) {
  switch (l) {
    case at::kStrided:
      return graph::Layout::Strided;
    case at::kSparse:
      return graph::Layout::Sparse;
    case at::kMkldnn:
      return graph::Layout::Mkldnn;
    default:
      return graph::Layout::Other;
  }
}

graph::TensorMeta meta_of(const at::Tensor& t) {
  if (t.layout() != at::kStrided) throw Unsupported("a tensor of layout " + c10::str(t.layout()));
  graph::TensorMeta m;
  m.dtype = dtype_of(t.scalar_type());
  m.sizes = t.sizes().vec();
  m.strides = t.strides().vec();
  m.offset = t.storage_offset();
  m.device = device_of(t.device());
  m.requires_grad = t.requires_grad();
  return m;
}

at::Tensor reinterpret(const at::Tensor& t, at::ScalarType dtype) {
  const int64_t from = static_cast<int64_t>(t.element_size()), to = static_cast<int64_t>(c10::elementSize(dtype));
  const int64_t bytes = static_cast<int64_t>(t.storage().nbytes()) - t.storage_offset() * from;
  const int64_t count = bytes / std::max(from, to) * std::max(from, to) / from;
  const at::Tensor line = t.as_strided({count}, {1}, t.storage_offset());
  if (c10::isComplexType(dtype) && c10::toRealValueType(dtype) == t.scalar_type())
    return at::view_as_complex(line.view({count / 2, 2}));
  if (t.is_complex() && c10::toRealValueType(t.scalar_type()) == dtype) return at::view_as_real(line).view({2 * count});
  return line.view(dtype);
}

at::Tensor empty_of(const graph::TensorMeta& m) {
  return at::empty_strided(m.sizes, m.strides, at::TensorOptions(scalar_type_of(m.dtype)).device(to_device(m.device)));
}

namespace {

[[noreturn]] void misfit(const c10::TypePtr& type) {
  throw InternalError("an argument does not fit the schema's type " + type->str());
}

at::Scalar to_scalar(const Arg& a, const c10::TypePtr& type) {
  if (a.is<bool>()) return at::Scalar(a.as<bool>());
  if (a.is<int64_t>()) return at::Scalar(a.as<int64_t>());
  if (a.is<double>()) return at::Scalar(a.as<double>());
  if (a.is<std::complex<double>>()) return at::Scalar(c10::complex<double>(a.as<std::complex<double>>()));
  misfit(type);
}

c10::IValue list_ivalue(const Arg& arg, const c10::TypePtr& element, const TensorOf& tensor_of) {
  // Schemas broadcast one number to a list ("int[2] stride=1").
  const Arg::List one = arg.is_list() ? Arg::List{} : Arg::List{arg};
  const Arg::List& items = arg.is_list() ? arg.list() : one;
  const bool optional = element->kind() == c10::TypeKind::OptionalType;
  const c10::TypePtr inner = optional ? element->expectRef<c10::OptionalType>().getElementType() : element;
  switch (inner->kind()) {
    case c10::TypeKind::TensorType:
      if (optional) {
        c10::List<std::optional<at::Tensor>> l;
        l.reserve(items.size());
        for (const Arg& a : items)
          l.push_back(a.is_none() || !a.value() ? std::optional<at::Tensor>() : tensor_of(a.value()));
        return l;
      } else {
        c10::List<at::Tensor> l;
        l.reserve(items.size());
        for (const Arg& a : items) l.push_back(a.is_none() || !a.value() ? at::Tensor() : tensor_of(a.value()));
        return l;
      }
    case c10::TypeKind::IntType:
    case c10::TypeKind::SymIntType: {
      c10::List<int64_t> l;
      l.reserve(items.size());
      for (const Arg& a : items) l.push_back(a.to_int());
      return l;
    }
    case c10::TypeKind::FloatType: {
      c10::List<double> l;
      l.reserve(items.size());
      for (const Arg& a : items) l.push_back(a.to_double());
      return l;
    }
    case c10::TypeKind::BoolType: {
      c10::List<bool> l;
      l.reserve(items.size());
      for (const Arg& a : items) l.push_back(a.to_bool());
      return l;
    }
    case c10::TypeKind::StringType: {
      c10::List<std::string> l;
      for (const Arg& a : items) l.push_back(a.as<std::string>());
      return l;
    }
    default: {
      c10::impl::GenericList l(inner);
      l.reserve(items.size());
      for (const Arg& a : items) l.push_back(to_ivalue(a, element, tensor_of));
      return l;
    }
  }
}

using Object = c10::ivalue::Object;
using WeakObject = c10::weak_intrusive_ptr<Object>;

/// Objects of TorchBind classes that graphs have as arguments. A guard on the one that the program gives, or the
/// program's frame, keeps each alive while a graph runs with it.
struct Objects {
  std::mutex mutex;
  std::vector<WeakObject> all;
  std::unordered_map<const Object*, int64_t> ids;
};
Objects& objects() {
  static auto* o = new Objects();
  return *o;
}

int64_t id_of(const c10::intrusive_ptr<Object>& object) {
  Objects& o = objects();
  std::lock_guard lock(o.mutex);
  const auto [it, is_new] = o.ids.emplace(object.get(), static_cast<int64_t>(o.all.size()));
  if (!is_new && o.all[static_cast<size_t>(it->second)].lock() == object) return it->second;
  it->second = static_cast<int64_t>(o.all.size());  // another was there before
  o.all.emplace_back(object);
  return it->second;
}

c10::IValue object_of(int64_t id) {
  Objects& o = objects();
  std::lock_guard lock(o.mutex);
  c10::intrusive_ptr<Object> object = o.all.at(static_cast<size_t>(id)).lock();
  KILN_CHECK(object, "a graph's object has died before it");
  return object;
}

}  // namespace

c10::IValue to_ivalue(const Arg& arg, const c10::TypePtr& type, const TensorOf& tensor_of) {
  if (type->kind() == c10::TypeKind::OptionalType) {
    if (arg.is_none()) return {};
    if (arg.is_value() && !arg.value()) return {};
    return to_ivalue(arg, type->expectRef<c10::OptionalType>().getElementType(), tensor_of);
  }
  switch (type->kind()) {
    case c10::TypeKind::TensorType:
      if (arg.is_none()) return at::Tensor();
      if (!arg.is_value()) {
        return wrapped_number(to_scalar(arg, type));
      }
      return arg.value() ? tensor_of(arg.value()) : at::Tensor();
    case c10::TypeKind::ListType:
      return list_ivalue(arg, type->expectRef<c10::ListType>().getElementType(), tensor_of);
    case c10::TypeKind::IntType:
    case c10::TypeKind::SymIntType:
      // ScalarType, MemoryFormat and Layout are ints in a schema.
      if (arg.is<DType>()) return static_cast<int64_t>(scalar_type_of(arg.as<DType>()));
      if (arg.is<graph::MemoryFormat>()) return static_cast<int64_t>(to_memory_format(arg.as<graph::MemoryFormat>()));
      if (arg.is<graph::Layout>()) return static_cast<int64_t>(to_layout(arg.as<graph::Layout>()));
      return arg.to_int();
    case c10::TypeKind::ScalarTypeType:
      return static_cast<int64_t>(scalar_type_of(arg.as<DType>()));
    case c10::TypeKind::MemoryFormatType:
      return static_cast<int64_t>(to_memory_format(arg.as<graph::MemoryFormat>()));
    case c10::TypeKind::LayoutType:
      return static_cast<int64_t>(to_layout(arg.as<graph::Layout>()));
    case c10::TypeKind::FloatType:
      return arg.to_double();
    case c10::TypeKind::BoolType:
    case c10::TypeKind::SymBoolType:
      return arg.to_bool();
    case c10::TypeKind::NumberType:
      return to_scalar(arg, type);
    case c10::TypeKind::StringType:
      return arg.as<std::string>();
    case c10::TypeKind::DeviceObjType:
      return to_device(arg.as<graph::Device>());
    case c10::TypeKind::ClassType:
    case c10::TypeKind::AnyClassType:
      return object_of(arg.to_int());
    default:
      misfit(type);
  }
}

namespace {

template <class Tensor>
ops::BasicArg<Tensor> convert(const c10::IValue& v, const c10::TypePtr& type,
                              const std::function<ops::BasicArg<Tensor>(const at::Tensor&)>& arg_of) {
  if (v.isNone()) return {};
  if (type->kind() == c10::TypeKind::OptionalType)
    return convert<Tensor>(v, type->expectRef<c10::OptionalType>().getElementType(), arg_of);
  if (v.isTensor()) return v.toTensor().defined() ? arg_of(v.toTensor()) : ops::BasicArg<Tensor>();
  switch (type->kind()) {
    // Real schemas tell these apart from ints; the ints in a boxed call do not.
    case c10::TypeKind::ScalarTypeType: {
      const DType t = dtype_of(static_cast<at::ScalarType>(v.toInt()));
      if (t == DType::Opaque) throw Unsupported("a dtype that kiln does not know");
      return t;
    }
    case c10::TypeKind::MemoryFormatType:
      return memory_format_of(static_cast<at::MemoryFormat>(v.toInt()));
    case c10::TypeKind::LayoutType:
      return layout_of(static_cast<at::Layout>(v.toInt()));
    default:
      break;
  }
  if (v.isBool()) return v.toBool();
  if (v.isInt()) return v.toInt();
  if (v.isDouble()) return v.toDouble();
  if (v.isComplexDouble()) return static_cast<std::complex<double>>(v.toComplexDouble());
  if (v.isString()) return v.toStringRef();
  if (v.isDevice()) return device_of(v.toDevice());
  if (v.isObject()) return id_of(v.toObject());
  if (v.isSymInt() || v.isSymFloat() || v.isSymBool()) throw Unsupported("a symbolic number as an argument");
  if (v.isList()) {
    const c10::TypePtr element = type->kind() == c10::TypeKind::ListType
                                     ? type->expectRef<c10::ListType>().getElementType()
                                     : c10::TypePtr(c10::AnyType::get());
    typename ops::BasicArg<Tensor>::List list;
    for (const c10::IValue& item : v.toListRef()) list.push_back(convert<Tensor>(item, element, arg_of));
    return list;
  }
  throw Unsupported("an argument of kind " + v.tagKind());
}

}  // namespace

Arg from_ivalue(const c10::IValue& v, const c10::TypePtr& type, const ValueOf& arg_of) {
  return convert<graph::Value>(v, type, arg_of);
}
MetaArg from_ivalue(const c10::IValue& v, const c10::TypePtr& type, const MetaOf& meta) {
  return convert<const ops::TensorMeta*>(v, type, meta);
}

std::vector<Arg> to_args(const c10::FunctionSchema& schema, c10::ArrayRef<c10::IValue> values, const ValueOf& arg_of) {
  std::vector<Arg> args;
  args.reserve(values.size());
  const auto& arguments = schema.arguments();
  for (size_t i = 0; i < values.size(); ++i)
    args.push_back(from_ivalue(values[i], arguments.at(i).real_type(), arg_of));
  return args;
}

std::vector<c10::IValue> to_stack(const c10::FunctionSchema& schema, const std::vector<Arg>& args,
                                  const TensorOf& tensor_of) {
  std::vector<c10::IValue> stack;
  const auto& arguments = schema.arguments();
  KILN_CHECK(args.size() <= arguments.size(), "too many arguments for " + schema.name());
  stack.reserve(arguments.size());
  for (size_t i = 0; i < args.size(); ++i) stack.push_back(to_ivalue(args[i], arguments[i].real_type(), tensor_of));
  for (size_t i = args.size(); i < arguments.size(); ++i) {
    KILN_CHECK(arguments[i].default_value(), "missing argument " + arguments[i].name() + " of " + schema.name());
    stack.push_back(*arguments[i].default_value());
  }
  return stack;
}

graph::Arg number_arg(const at::Scalar& s) {
  if (s.isBoolean()) return s.toBool();
  if (s.isIntegral(false)) return s.toLong();
  if (s.isComplex()) return static_cast<std::complex<double>>(s.toComplexDouble());
  return s.toDouble();
}

graph::Arg numbers_of(const at::Tensor& t) {
  const at::Tensor flat = t.detach().reshape({-1});
  graph::Arg::List numbers;
  for (int64_t i = 0; i < flat.numel(); ++i) numbers.push_back(number_arg(flat[i].item()));
  return numbers;
}

at::Tensor constant_tensor(const std::vector<graph::Arg>& args) {
  const auto& values = args.at(0).list();
  const at::ScalarType type = scalar_type_of(args.at(2).as<DType>());
  const std::vector<int64_t> sizes = args.at(1).to_ints();
  const bool is_complex = c10::isComplexType(type), is_float = c10::isFloatingType(type);
  const NoFakeGuard real;
  // Built in the widest type of the kind, which holds every value exactly.
  const at::ScalarType wide = is_complex ? at::kComplexDouble : is_float ? at::kDouble : at::kLong;
  at::Tensor t = at::empty({static_cast<int64_t>(values.size())}, wide);
  for (size_t i = 0; i < values.size(); ++i) {
    const graph::Arg& v = values[i];
    if (is_complex) {
      t.mutable_data_ptr<c10::complex<double>>()[i] = v.is<std::complex<double>>()
                                                          ? c10::complex<double>(v.as<std::complex<double>>())
                                                          : c10::complex<double>(v.to_double());
    } else if (is_float) {
      t.mutable_data_ptr<double>()[i] = v.to_double();
    } else {
      t.mutable_data_ptr<int64_t>()[i] = v.to_int();
    }
  }
  return t.to(type).reshape(sizes);
}

at::Tensor wrapped_number(const at::Scalar& number) {
  at::Tensor t = at::scalar_to_tensor(number);
  t.unsafeGetTensorImpl()->set_wrapped_number(true);
  return t;
}

at::Scalar wrapped_number_value(const at::Tensor& t) {
  // Read directly: at::item would go through the dispatcher, where a trace may be listening.
  switch (t.scalar_type()) {
    case at::kBool:
      return at::Scalar(*t.const_data_ptr<bool>());
    case at::kLong:
      return at::Scalar(*t.const_data_ptr<int64_t>());
    case at::kDouble:
      return at::Scalar(*t.const_data_ptr<double>());
    case at::kComplexDouble:
      return at::Scalar(*t.const_data_ptr<c10::complex<double>>());
    default:
      throw InternalError("a wrapped number of an unexpected dtype");
  }
}

void for_each_tensor(const c10::IValue& value, const std::function<void(const at::Tensor&)>& f) {
  if (value.isTensor()) {
    f(value.toTensor());
  } else if (value.isList()) {
    for (const c10::IValue& item : value.toListRef()) for_each_tensor(item, f);
  }
}

c10::IValue map_tensors(const c10::IValue& value, const std::function<at::Tensor(const at::Tensor&)>& f) {
  const auto mapped = [&](const at::Tensor& t) { return t.defined() ? f(t) : t; };
  if (value.isTensor()) return mapped(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& t : value.toTensorVector()) list.push_back(mapped(t));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& t : value.toOptionalTensorVector())
      list.push_back(t ? std::optional(mapped(*t)) : t);
    return list;
  }
  return value;
}

bool has_mask(const c10::IValue& indices) {
  bool mask = false;
  for_each_tensor(indices, [&](const at::Tensor& t) { mask = mask || (t.defined() && is_mask(t.scalar_type())); });
  return mask;
}

std::vector<at::Tensor> flatten_tensors(c10::ArrayRef<c10::IValue> results) {
  std::vector<at::Tensor> out;
  for (const c10::IValue& r : results) {
    if (r.isTensor()) {
      out.push_back(r.toTensor());
    } else if (r.isTensorList()) {
      for (const at::Tensor& t : r.toTensorVector()) out.push_back(t);
    } else if (r.isNone()) {
      out.emplace_back();
    } else {
      throw Unsupported("an operator that returns a value of kind " + r.tagKind());
    }
  }
  return out;
}

}  // namespace kiln::aten
