#include "codegen/common/kernel.h"
#include "codegen/llvm/emitter.h"
#include "llvm/IR/Intrinsics.h"

// float32 functions written out in vector code. They save the call, and with it every register that a call spills.
namespace kiln::codegen {

using loops::Opcode;

llvm::Value* Emitter::inline_math(Opcode op, DType t, Value* x) {
  if (t != DType::Float32 || host_simd_bits() < 256) return nullptr;
  switch (op) {
    case Opcode::Exp:
      return exp_f32(x);
    case Opcode::Tanh:
      return tanh_f32(x);
    case Opcode::Erf:
      return erf_f32(x);
    default:
      return nullptr;
  }
}

/// exp by 2^n * p(r), |r| <= ln2/2: n = round(x / ln2), r in two steps (Cody and Waite), p the degree-6 minimax
/// polynomial with the Taylor head 1 + r + r^2/2. At most 1 ulp over the whole range, gradual underflow included; NaN,
/// infinities exact.
llvm::Value* Emitter::exp_f32(Value* x) {
  Type* t = x->getType();
  const auto f = [&](double v) { return fconst(t, v); };
  const auto fma = [&](Value* a, Value* b, Value* c) {
    return b_.CreateIntrinsic(llvm::Intrinsic::fma, {t}, {a, b, c});
  };
  // Beyond these the result is 0 or infinity in any case; NaN passes both selects.
  Value* low = b_.CreateSelect(b_.CreateFCmpOLT(x, f(-104.0)), f(-104.0), x);
  Value* in = b_.CreateSelect(b_.CreateFCmpOGT(low, f(89.0)), f(89.0), low);
  Value* n = b_.CreateUnaryIntrinsic(llvm::Intrinsic::roundeven, b_.CreateFMul(in, f(1.44269504088896341)));
  Value* r = fma(n, f(-0.693359375), in);
  r = fma(n, f(2.12194440054690583e-4), r);
  Value* p = f(1.98756915e-4);
  for (double c : {1.39819995e-3, 8.33345272e-3, 4.16657962e-2, 1.66666657e-1, 5.00000000e-1}) p = fma(p, r, f(c));
  p = fma(p, b_.CreateFMul(r, r), r);
  p = b_.CreateFAdd(p, f(1.0));
  // 2^n in two factors, so that n from -150 to 128 stays in range of normal exponents.
  const auto* vector = llvm::dyn_cast<llvm::FixedVectorType>(t);
  Type* i32 = type_of(DType::Int32, vector ? static_cast<int>(vector->getNumElements()) : 1);
  Value* k = b_.CreateFreeze(b_.CreateFPToSI(n, i32));
  Value* half = b_.CreateAShr(k, llvm::ConstantInt::get(i32, 1));
  const auto power = [&](Value* e) {
    Value* biased = b_.CreateAdd(e, llvm::ConstantInt::get(i32, 127));
    return b_.CreateBitCast(b_.CreateShl(biased, llvm::ConstantInt::get(i32, 23)), t);
  };
  return b_.CreateFMul(b_.CreateFMul(p, power(half)), power(b_.CreateSub(k, half)));
}

/// tanh: x + x^3 q(x^2) below 0.625 (coefficients: Cephes), 1 - 2/(exp(2x) + 1) above; odd, exact at infinities.
llvm::Value* Emitter::tanh_f32(Value* x) {
  Type* t = x->getType();
  const auto f = [&](double v) { return fconst(t, v); };
  const auto fma = [&](Value* a, Value* b, Value* c) {
    return b_.CreateIntrinsic(llvm::Intrinsic::fma, {t}, {a, b, c});
  };
  Value* a = b_.CreateUnaryIntrinsic(llvm::Intrinsic::fabs, x);
  Value* z = b_.CreateFMul(a, a);
  Value* q = f(-5.70498872745e-3);
  for (double c : {2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1}) q = fma(q, z, f(c));
  Value* small = fma(b_.CreateFMul(q, z), a, a);
  Value* e = exp_f32(b_.CreateFAdd(a, a));
  Value* large = b_.CreateFSub(f(1.0), b_.CreateFDiv(f(2.0), b_.CreateFAdd(e, f(1.0))));
  Value* r = b_.CreateSelect(b_.CreateFCmpOLT(a, f(0.625)), small, large);
  return b_.CreateBinaryIntrinsic(llvm::Intrinsic::copysign, r, x);
}

/// erf by Abramowitz and Stegun 7.1.26, the formula that eager uses for float32: absolute error under 5e-7, rounding
/// included.
llvm::Value* Emitter::erf_f32(Value* x) {
  Type* t = x->getType();
  const auto f = [&](double v) { return fconst(t, v); };
  const auto fma = [&](Value* a, Value* b, Value* c) {
    return b_.CreateIntrinsic(llvm::Intrinsic::fma, {t}, {a, b, c});
  };
  Value* a = b_.CreateUnaryIntrinsic(llvm::Intrinsic::fabs, x);
  Value* u = b_.CreateFDiv(f(1.0), fma(f(0.3275911), a, f(1.0)));
  Value* p = f(1.061405429);
  for (double c : {-1.453152027, 1.421413741, -0.284496736, 0.254829592}) p = fma(p, u, f(c));
  p = b_.CreateFMul(p, u);
  Value* e = exp_f32(b_.CreateFNeg(b_.CreateFMul(a, a)));
  Value* r = b_.CreateFSub(f(1.0), b_.CreateFMul(p, e));
  return b_.CreateBinaryIntrinsic(llvm::Intrinsic::copysign, r, x);
}

}  // namespace kiln::codegen
