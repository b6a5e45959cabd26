#include <cmath>

#include "base/error.h"
#include "codegen/llvm/emitter.h"

// Elementary functions: Sleef's as ATen carries them (so results equal eager's), or libm's lane by lane without them.
namespace kiln::codegen {

using loops::Opcode;

namespace {

struct MathRow {
  Opcode op;
  const char* sleef;    // name without type and lanes
  const char* f32_ulp;  // accuracy suffix that ATen uses
  const char* f64_ulp;
  float (*f32)(float);
  double (*f64)(double);
  float (*f32_2)(float, float) = nullptr;
  double (*f64_2)(double, double) = nullptr;
};

#define KILN_MATH1(op, name, u32, u64) {Opcode::op, #name, u32, u64, &::name##f, &::name}
#define KILN_MATH2(op, name, u32, u64) {Opcode::op, #name, u32, u64, nullptr, nullptr, &::name##f, &::name}
const MathRow kMath[] = {
    KILN_MATH1(Exp, exp, "_u10", "_u10"),     KILN_MATH1(Exp2, exp2, "_u10", "_u10"),
    KILN_MATH1(Expm1, expm1, "_u10", "_u10"), KILN_MATH1(Log, log, "_u10", "_u10"),
    KILN_MATH1(Log2, log2, "_u10", "_u10"),   KILN_MATH1(Log10, log10, "_u10", "_u10"),
    KILN_MATH1(Log1p, log1p, "_u10", "_u10"), KILN_MATH1(Sin, sin, "_u35", "_u10"),
    KILN_MATH1(Cos, cos, "_u35", "_u10"),     KILN_MATH1(Tan, tan, "_u10", "_u10"),
    KILN_MATH1(Asin, asin, "_u10", "_u10"),   KILN_MATH1(Acos, acos, "_u10", "_u10"),
    KILN_MATH1(Atan, atan, "_u10", "_u10"),   KILN_MATH1(Sinh, sinh, "_u10", "_u10"),
    KILN_MATH1(Cosh, cosh, "_u10", "_u10"),   KILN_MATH1(Tanh, tanh, "_u10", "_u10"),
    KILN_MATH1(Asinh, asinh, "_u10", "_u10"), KILN_MATH1(Acosh, acosh, "_u10", "_u10"),
    KILN_MATH1(Atanh, atanh, "_u10", "_u10"), KILN_MATH1(Erf, erf, "_u10", "_u10"),
    KILN_MATH1(Erfc, erfc, "_u15", "_u15"),   KILN_MATH1(Lgamma, lgamma, "_u10", "_u10"),
    KILN_MATH2(Pow, pow, "_u10", "_u10"),     KILN_MATH2(Atan2, atan2, "_u10", "_u10"),
    KILN_MATH2(Hypot, hypot, "_u05", "_u05"), KILN_MATH2(Fmod, fmod, "", ""),
    KILN_MATH2(Nextafter, nextafter, "", ""), KILN_MATH2(PowScalar, pow, "", ""),
#define KILN_C_MATH(f, opcode) KILN_MATH1(opcode, f, "", ""),
#include "ops/c_math.def"
#undef KILN_C_MATH
};
#undef KILN_MATH1
#undef KILN_MATH2

const MathRow& row_of(Opcode op) {
  for (const MathRow& r : kMath)
    if (r.op == op) return r;
  throw InternalError("no code for " + std::string(loops::opcode_name(op)));
}

constexpr std::string_view kLibm = "kiln_libm_";

std::string libm_name(const MathRow& row, bool single) { return std::string(kLibm) + row.sleef + (single ? "f" : ""); }

void* libm_address(const std::string& name) {
  if (!name.starts_with(kLibm)) return nullptr;
  for (const MathRow& r : kMath) {
    if (name == libm_name(r, true)) return r.f32 ? reinterpret_cast<void*>(r.f32) : reinterpret_cast<void*>(r.f32_2);
    if (name == libm_name(r, false)) return r.f64 ? reinterpret_cast<void*>(r.f64) : reinterpret_cast<void*>(r.f64_2);
  }
  return nullptr;
}

/// A function of its arguments alone: what is the same for all elements of a loop is called before it.
llvm::FunctionCallee declare_math(llvm::Module& module, const std::string& name, llvm::FunctionType* type) {
  llvm::FunctionCallee callee = module.getOrInsertFunction(name, type);
  if (auto* f = llvm::dyn_cast<llvm::Function>(callee.getCallee())) {
    f->setDoesNotThrow();
    f->setDoesNotAccessMemory();
    f->addFnAttr(llvm::Attribute::WillReturn);
  }
  return callee;
}

}  // namespace

bool MathLibrary::find(const std::string& name) {
  const auto it = known_.find(name);
  if (it != known_.end()) return it->second != nullptr;
  void* address = libm_address(name);
  if (!address && resolve_) address = resolve_(name);
  known_[name] = address;
  return address != nullptr;
}

std::vector<std::pair<std::string, void*>> MathLibrary::externals() const {
  std::vector<std::pair<std::string, void*>> out;
  for (const auto& [name, address] : known_)
    if (address) out.push_back({name, address});
  return out;
}

llvm::Value* Emitter::call_vector(const std::string& name, const std::string& suffix, DType t,
                                  const std::vector<Value*>& a) {
  const auto* vector = llvm::dyn_cast<llvm::FixedVectorType>(a[0]->getType());
  const int width = vector ? static_cast<int>(vector->getNumElements()) : 1;
  const int size = dtype_size(t);
  if (vector && width == 1) {
    // The last step of a lane-wise reduction: a vector of one.
    std::vector<Value*> scalars;
    for (Value* v : a) scalars.push_back(b_.CreateExtractElement(v, static_cast<uint64_t>(0)));
    Value* r = call_vector(name, suffix, t, scalars);
    return r ? b_.CreateInsertElement(llvm::PoisonValue::get(a[0]->getType()), r, static_cast<uint64_t>(0)) : nullptr;
  }
  // The library has functions of 512 and 256 bits; other widths are cut into them or padded.
  const int full = (shape_.simd_bits >= 512 ? 64 : 32) / size;
  int lanes = width >= full ? full : 32 / size;
  const auto symbol = [&](int n) {
    return "Sleef_" + name + (t == DType::Float32 ? "f" : "d") + std::to_string(n) + suffix;
  };
  if (!math_.find(symbol(lanes))) return nullptr;
  llvm::FunctionType* type =
      llvm::FunctionType::get(type_of(t, lanes), std::vector<Type*>(a.size(), type_of(t, lanes)), false);
  const llvm::FunctionCallee callee = declare_math(module_, symbol(lanes), type);
  const auto slice = [&](Value* v, int from) -> Value* {
    if (width == lanes) return v;
    if (width == 1) return splat(v, lanes);
    std::vector<int> pick;
    for (int l = 0; l < lanes; ++l) pick.push_back(std::min(from + l, width - 1));
    return b_.CreateShuffleVector(v, pick);
  };
  Value* out = nullptr;
  for (int from = 0; from < width; from += lanes) {
    std::vector<Value*> operands;
    for (Value* v : a) operands.push_back(slice(v, from));
    Value* r = b_.CreateCall(callee, operands);
    if (width == lanes) return r;
    if (width == 1) return b_.CreateExtractElement(r, static_cast<uint64_t>(0));
    if (!out) out = llvm::PoisonValue::get(type_of(t, width));
    // Widen the piece, then take its lanes into place.
    std::vector<int> widen, take;
    for (int l = 0; l < width; ++l) {
      widen.push_back(l < lanes ? l : 0);
      take.push_back(l >= from && l < from + lanes ? width + (l - from) : l);
    }
    out = b_.CreateShuffleVector(out, b_.CreateShuffleVector(r, widen), take);
  }
  return out;
}

llvm::Value* Emitter::call_math(Opcode op, DType t, const std::vector<Value*>& a) {
  if (a.size() == 1)
    if (Value* v = inline_math(op, t, a[0])) return v;
  const MathRow& row = row_of(op);
  const bool single = t == DType::Float32;
  if (!loops::is_c_math(op))
    if (Value* v = call_vector(row.sleef, single ? row.f32_ulp : row.f64_ulp, t, a)) return v;
  const std::string name = libm_name(row, single);
  const bool found = math_.find(name);
  KILN_CHECK(found, "no " + name);
  llvm::FunctionType* type = llvm::FunctionType::get(type_of(t), std::vector<Type*>(a.size(), type_of(t)), false);
  const llvm::FunctionCallee callee = declare_math(module_, name, type);
  const auto* vector = llvm::dyn_cast<llvm::FixedVectorType>(a[0]->getType());
  if (!vector) return b_.CreateCall(callee, a);
  Value* out = llvm::PoisonValue::get(a[0]->getType());
  for (uint64_t l = 0; l < vector->getNumElements(); ++l) {
    std::vector<Value*> operands;
    for (Value* v : a) operands.push_back(b_.CreateExtractElement(v, l));
    out = b_.CreateInsertElement(out, b_.CreateCall(callee, operands), l);
  }
  return out;
}

}  // namespace kiln::codegen
