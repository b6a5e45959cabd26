#include <cmath>
#include <limits>

#include "codegen/common/kernel.h"
#include "codegen/llvm/emitter.h"
#include "llvm/IR/Intrinsics.h"
#include "llvm/IR/IntrinsicsX86.h"

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
    case Opcode::Log:
      return log_f32(x);
    default:
      return nullptr;
  }
}

llvm::Value* Emitter::fma(Value* a, Value* b, Value* c) {
  return b_.CreateIntrinsic(llvm::Intrinsic::fma, {a->getType()}, {a, b, c});
}

llvm::Value* Emitter::polynomial(Value* x, std::initializer_list<double> highest_first) {
  Value* p = nullptr;
  for (double c : highest_first) p = p ? fma(p, x, fconst(x->getType(), c)) : fconst(x->getType(), c);
  return p;
}

/// exp by 2^n * p(r), |r| <= ln2/2: n = round(x / ln2), r in two steps (Cody and Waite), p the degree-6 minimax
/// polynomial with the Taylor head 1 + r + r^2/2. At most 1 ulp over the whole range, gradual underflow included; NaN,
/// infinities exact.
llvm::Value* Emitter::exp_f32(Value* x) {
  Type* t = x->getType();
  const auto f = [&](double v) { return fconst(t, v); };
  // Beyond these the result is 0 or infinity in any case; NaN passes both selects.
  Value* is_zero = b_.CreateFCmpOLT(x, f(-104.0));
  Value* low = b_.CreateSelect(is_zero, f(-104.0), x);
  Value* in = b_.CreateSelect(b_.CreateFCmpOGT(low, f(89.0)), f(89.0), low);
  Value* n = b_.CreateUnaryIntrinsic(llvm::Intrinsic::roundeven, b_.CreateFMul(in, f(1.44269504088896341)));
  Value* r = fma(n, f(-0.693359375), in);
  r = fma(n, f(2.12194440054690583e-4), r);
  Value* p = polynomial(r, {1.98756915e-4, 1.39819995e-3, 8.33345272e-3, 4.16657962e-2, 1.66666657e-1, 5.00000000e-1});
  p = fma(p, b_.CreateFMul(r, r), r);
  // An underflow to zero costs as much as twenty results, and masks ask for many.
  p = b_.CreateSelect(is_zero, f(0.0), b_.CreateFAdd(p, f(1.0)));
  const auto* vector = llvm::dyn_cast<llvm::FixedVectorType>(t);
  if (vector && vector->getNumElements() == 16 && host_simd_bits() >= 512) {  // one instruction for p * 2^n
    constexpr int kNoRoundingOverride = 4;
    return b_.CreateIntrinsic(llvm::Intrinsic::x86_avx512_mask_scalef_ps_512, {},
                              {p, n, p, b_.getInt16(0xffff), b_.getInt32(kNoRoundingOverride)});
  }
  // 2^n in two factors, so that n from -150 to 128 stays in range of normal exponents.
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
  Value* a = b_.CreateUnaryIntrinsic(llvm::Intrinsic::fabs, x);
  Value* z = b_.CreateFMul(a, a);
  Value* q =
      polynomial(z, {-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1});
  Value* small = fma(b_.CreateFMul(q, z), a, a);
  Value* e = exp_f32(b_.CreateFAdd(a, a));
  Value* large = b_.CreateFSub(f(1.0), b_.CreateFDiv(f(2.0), b_.CreateFAdd(e, f(1.0))));
  Value* r = b_.CreateSelect(b_.CreateFCmpOLT(a, f(0.625)), small, large);
  return b_.CreateBinaryIntrinsic(llvm::Intrinsic::copysign, r, x);
}

/// erf as x P(x^2) / Q(x^2) below 3.92, where it rounds to 1: a relative error of 2e-8, fitted by iteratively
/// reweighted least squares. Absolute error under 5e-7, rounding included, like the formula of eager's float32.
llvm::Value* Emitter::erf_f32(Value* x) {
  Type* t = x->getType();
  const auto f = [&](double v) { return fconst(t, v); };
  Value* a = b_.CreateUnaryIntrinsic(llvm::Intrinsic::fabs, x);
  Value* z = b_.CreateFMul(a, a);
  Value* p = polynomial(z, {2.0507204681052826e-06, 0.0002848680014722049, 0.003763938555493951, 0.05274362862110138,
                            0.19036440551280975, 1.1283791065216064});
  Value* q = polynomial(z, {3.8097481592558324e-05, 0.001162171014584601, 0.014965839684009552, 0.1140921488404274,
                            0.5020387768745422, 1.0});
  Value* r = b_.CreateFDiv(b_.CreateFMul(a, p), q);
  // NaN passes both: it is neither over 1 nor beyond.
  r = b_.CreateSelect(b_.CreateFCmpOGT(r, f(1.0)), f(1.0), r);
  r = b_.CreateSelect(b_.CreateFCmpOGE(a, f(3.92)), f(1.0), r);
  return b_.CreateBinaryIntrinsic(llvm::Intrinsic::copysign, r, x);
}

/// log by e ln2 + log(1 + r), 1 + r in [sqrt(1/2), sqrt(2)): the polynomial of Cephes' logf. At most 1.5 ulp;
/// subnormals, zeros, infinity and NaN as they should be.
llvm::Value* Emitter::log_f32(Value* x) {
  Type* t = x->getType();
  const auto f = [&](double v) { return fconst(t, v); };
  const auto* vector = llvm::dyn_cast<llvm::FixedVectorType>(t);
  Type* i32 = type_of(DType::Int32, vector ? static_cast<int>(vector->getNumElements()) : 1);
  const auto k = [&](int64_t v) { return llvm::ConstantInt::getSigned(i32, v); };
  Value* tiny = b_.CreateFCmpOLT(x, f(1.17549435e-38));
  Value* normal = b_.CreateSelect(tiny, b_.CreateFMul(x, f(8388608.0)), x);
  Value* bits = b_.CreateBitCast(normal, i32);
  Value* exponent = b_.CreateAShr(b_.CreateSub(bits, k(0x3f3504f3)), k(23));  // of sqrt(1/2) and above: 0
  Value* m = b_.CreateBitCast(b_.CreateSub(bits, b_.CreateShl(exponent, k(23))), t);
  Value* e = b_.CreateFSub(b_.CreateSIToFP(exponent, t), b_.CreateSelect(tiny, f(23.0), f(0.0)));
  Value* r = b_.CreateFSub(m, f(1.0));
  Value* z = b_.CreateFMul(r, r);
  Value* p = polynomial(r, {7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1,
                            -1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1});
  Value* y = fma(e, f(-2.12194440e-4), b_.CreateFMul(b_.CreateFMul(r, z), p));
  y = fma(z, f(-0.5), y);
  y = fma(e, f(0.693359375), b_.CreateFAdd(r, y));
  Value* inf = f(std::numeric_limits<double>::infinity());
  Value* outside = b_.CreateSelect(b_.CreateFCmpOEQ(x, f(0.0)), b_.CreateFNeg(inf), f(std::nan("")));
  y = b_.CreateSelect(b_.CreateFCmpOGT(x, f(0.0)), y, outside);
  return b_.CreateSelect(b_.CreateFCmpOEQ(x, inf), inf, y);
}

}  // namespace kiln::codegen
