#pragma once
#include <complex>
#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "base/dtype.h"
#include "base/error.h"

// What an operator's rules speak of: its name, its tensors' metadata, its constant arguments. The graph IR is built on
// these (csrc/graph/graph.h names them again in its own namespace).
namespace kiln::ops {

/// Interned operator name, spelled as the dispatcher does: "aten::add.Tensor", "aten::relu". Compares by id.
/// Thread-safe.
class Op {
 public:
  Op() = default;
  explicit Op(std::string_view name);
  const std::string& name() const;
  uint32_t id() const { return id_; }
  bool operator==(const Op& o) const { return id_ == o.id_; }

 private:
  uint32_t id_ = 0;
};

enum class DeviceType : uint8_t { CPU, CUDA, Meta, Other };
struct Device {
  DeviceType type = DeviceType::CPU;
  int8_t index = -1;  // -1: none given
  bool operator==(const Device&) const = default;
};
enum class Layout : uint8_t { Strided, Sparse, Mkldnn, Other };
enum class MemoryFormat : uint8_t { Contiguous, Preserve, ChannelsLast, ChannelsLast3d };

inline bool is_channels_last(MemoryFormat f) {
  return f == MemoryFormat::ChannelsLast || f == MemoryFormat::ChannelsLast3d;
}

/// What is known of a tensor without its data. sizes, strides in elements; offset in elements into its storage.
struct TensorMeta {
  DType dtype = DType::Float32;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  int64_t offset = 0;
  Device device;
  bool requires_grad = false;
  /// False: no tensor (an undefined result, such as a gradient that was not asked for); the other members mean nothing.
  bool defined = true;

  int64_t dim() const { return static_cast<int64_t>(sizes.size()); }
  int64_t numel() const;
  /// As Tensor::is_contiguous(memory_format): dims of size 1 may have any stride, an empty tensor is contiguous.
  bool is_contiguous(MemoryFormat format = MemoryFormat::Contiguous) const;
  /// Each element has its own address and they fill one block, in any order of dims.
  bool is_non_overlapping_and_dense() const;
  bool operator==(const TensorMeta&) const = default;
};
/// The metadata of "no tensor".
TensorMeta undefined_meta();
/// Row-major strides of `sizes`, in elements.
std::vector<int64_t> contiguous_strides(const std::vector<int64_t>& sizes);
/// Strides of `sizes` in the given format (Preserve is not a format here: InternalError).
std::vector<int64_t> strides_for(const std::vector<int64_t>& sizes, MemoryFormat format);

/// One argument: None, a tensor (`Tensor` is the leaf: a graph value or a pointer to metadata), a constant, or a list.
template <class Tensor>
class BasicArg {
 public:
  using List = std::vector<BasicArg>;
  using Storage = std::variant<std::monostate, Tensor, bool, int64_t, double, std::complex<double>, std::string, DType,
                               Layout, Device, MemoryFormat, List>;
  BasicArg() = default;
  BasicArg(Tensor v) : data(v) {}
  BasicArg(bool v) : data(v) {}
  BasicArg(int v) : data(static_cast<int64_t>(v)) {}
  BasicArg(int64_t v) : data(v) {}
  BasicArg(double v) : data(v) {}
  BasicArg(std::complex<double> v) : data(v) {}
  BasicArg(std::string v) : data(std::move(v)) {}
  BasicArg(const char* v) : data(std::string(v)) {}
  BasicArg(DType v) : data(v) {}
  BasicArg(Layout v) : data(v) {}
  BasicArg(Device v) : data(v) {}
  BasicArg(MemoryFormat v) : data(v) {}
  BasicArg(List v) : data(std::move(v)) {}
  static BasicArg ints(const std::vector<int64_t>& values) { return List(values.begin(), values.end()); }
  static BasicArg values(const std::vector<Tensor>& values) { return List(values.begin(), values.end()); }

  template <class T>
  bool is() const {
    return std::holds_alternative<T>(data);
  }
  bool is_none() const { return is<std::monostate>(); }
  bool is_value() const { return is<Tensor>(); }
  bool is_list() const { return is<List>(); }
  /// A number: bool, int64 or double.
  bool is_number() const { return is<bool>() || is<int64_t>() || is<double>(); }
  template <class T>
  const T& as() const {
    return std::get<T>(data);
  }
  Tensor value() const { return std::get<Tensor>(data); }
  const List& list() const { return std::get<List>(data); }
  /// From bool or int64; InternalError otherwise.
  int64_t to_int() const {
    if (is<bool>()) return as<bool>();
    KILN_CHECK(is<int64_t>(), "argument is not an integer");
    return as<int64_t>();
  }
  /// From bool, int64 or double.
  double to_double() const {
    if (is<double>()) return as<double>();
    return static_cast<double>(to_int());
  }
  /// From bool or int64.
  bool to_bool() const { return to_int() != 0; }
  /// A list of ints, or one int as a list of one.
  std::vector<int64_t> to_ints() const {
    if (!is_list()) return {to_int()};
    std::vector<int64_t> out;
    out.reserve(list().size());
    for (const BasicArg& a : list()) out.push_back(a.to_int());
    return out;
  }
  /// A list of tensors; None entries become null leaves.
  std::vector<Tensor> to_values() const {
    KILN_CHECK(is_list(), "argument is not a list of tensors");
    std::vector<Tensor> out;
    out.reserve(list().size());
    for (const BasicArg& a : list()) out.push_back(a.is_none() ? Tensor{} : a.value());
    return out;
  }
  bool operator==(const BasicArg&) const = default;

  Storage data;
};

}  // namespace kiln::ops

template <>
struct std::hash<kiln::ops::Op> {
  size_t operator()(const kiln::ops::Op& o) const noexcept { return o.id(); }
};
