#include "base/dtype.h"

#include <algorithm>
#include <array>

#include "base/error.h"

namespace kiln {
namespace {
struct Row {
  std::string_view name;
  int size;
  char kind;
};
constexpr Row kRows[] = {
#define KILN_X(name, text, size, kind) {text, size, kind},
    KILN_DTYPES(KILN_X)
#undef KILN_X
};
const Row& row(DType t) { return kRows[static_cast<size_t>(t)]; }

// The order in which kinds win over each other in promotion.
int rank(char kind) { return kind == 'b' ? 0 : kind == 'u' || kind == 'i' ? 1 : kind == 'f' ? 2 : 3; }
}  // namespace

std::string_view dtype_name(DType t) { return row(t).name; }
int dtype_size(DType t) { return row(t).size; }
char dtype_kind(DType t) { return row(t).kind; }

std::optional<DType> dtype_from_name(std::string_view name) {
  for (size_t i = 0; i < std::size(kRows); ++i)
    if (kRows[i].name == name) return static_cast<DType>(i);
  return std::nullopt;
}

DType to_real(DType t) {
  if (t == DType::Complex64) return DType::Float32;
  if (t == DType::Complex128) return DType::Float64;
  return t;
}

DType promote_types(DType a, DType b) {
  if (a == b) return a;
  const char ka = dtype_kind(a), kb = dtype_kind(b);
  if (ka == 'o' || kb == 'o') throw Unsupported("arithmetic in a dtype that is only passed on");
  if (rank(ka) != rank(kb)) {
    const DType hi = rank(ka) > rank(kb) ? a : b, lo = rank(ka) > rank(kb) ? b : a;
    if (is_complex(hi) && is_floating(lo)) return lo == DType::Float64 ? DType::Complex128 : hi;
    return hi;
  }
  if (ka == 'f' && dtype_size(a) == 2 && dtype_size(b) == 2) return DType::Float32;  // f16 with bf16
  if (ka != kb) {  // u8 with a signed integer: i8 cannot hold it
    const DType s = ka == 'i' ? a : b;
    return s == DType::Int8 ? DType::Int16 : s;
  }
  return dtype_size(a) >= dtype_size(b) ? a : b;
}

}  // namespace kiln
