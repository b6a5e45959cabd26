#pragma once
#include <cstdint>
#include <optional>
#include <string_view>

namespace kiln {

// name as IR texts spell it (torch's short names), size in bytes, kind (b bool, u unsigned, i signed, f float, c
// complex)
#define KILN_DTYPES(X)           \
  X(Bool, "b8", 1, 'b')          \
  X(UInt8, "u8", 1, 'u')         \
  X(Int8, "i8", 1, 'i')          \
  X(Int16, "i16", 2, 'i')        \
  X(Int32, "i32", 4, 'i')        \
  X(Int64, "i64", 8, 'i')        \
  X(Float16, "f16", 2, 'f')      \
  X(BFloat16, "bf16", 2, 'f')    \
  X(Float32, "f32", 4, 'f')      \
  X(Float64, "f64", 8, 'f')      \
  X(Complex64, "c64", 8, 'c')    \
  X(Complex128, "c128", 16, 'c') \
  X(Opaque, "opaque", 1, 'o')  // a dtype kiln only passes on (quantized, float8, ...)

enum class DType : uint8_t {
#define KILN_X(name, text, size, kind) name,
  KILN_DTYPES(KILN_X)
#undef KILN_X
};

/// Short name as IR texts print it, such as "f32".
std::string_view dtype_name(DType t);
/// Inverse of dtype_name; nullopt for an unknown name.
std::optional<DType> dtype_from_name(std::string_view name);
/// Size of one element in bytes.
int dtype_size(DType t);
/// 'b', 'u', 'i', 'f', 'c' or 'o', see KILN_DTYPES.
char dtype_kind(DType t);
inline bool is_floating(DType t) { return dtype_kind(t) == 'f'; }
/// float16 and bfloat16, which are computed with as float32.
inline bool is_half(DType t) { return t == DType::Float16 || t == DType::BFloat16; }
inline bool is_complex(DType t) { return dtype_kind(t) == 'c'; }
/// c64 -> f32, c128 -> f64, others unchanged.
DType to_real(DType t);
/// bool, unsigned or signed integer.
inline bool is_integral(DType t) { return dtype_kind(t) == 'b' || dtype_kind(t) == 'u' || dtype_kind(t) == 'i'; }
/// Type promotion of two tensors of equal category priority, as torch.promote_types.
DType promote_types(DType a, DType b);

}  // namespace kiln
