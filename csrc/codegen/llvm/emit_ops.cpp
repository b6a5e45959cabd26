#include <cmath>

#include "base/error.h"
#include "codegen/llvm/emitter.h"
#include "llvm/IR/Intrinsics.h"

// Scalar instructions: what each opcode is in LLVM IR, for one value or for a vector of lanes.
namespace kiln::codegen {

using loops::Inst;
using loops::Opcode;
using loops::ValueId;

namespace {
int width_of(llvm::Value* v) {
  const auto* t = llvm::dyn_cast<llvm::FixedVectorType>(v->getType());
  return t ? static_cast<int>(t->getNumElements()) : 1;
}
bool is_signed(DType t) { return dtype_kind(t) == 'i'; }
}  // namespace

llvm::Type* Emitter::type_of(DType t, int width) const {
  Type* s = nullptr;
  llvm::LLVMContext& c = const_cast<llvm::LLVMContext&>(context_);
  switch (t) {
    case DType::Bool:
      s = Type::getInt1Ty(c);
      break;
    case DType::UInt8:
    case DType::Int8:
      s = Type::getInt8Ty(c);
      break;
    case DType::Int16:
    case DType::BFloat16:  // halves are carried as bits; only casts look inside
    case DType::Float16:
      s = Type::getInt16Ty(c);
      break;
    case DType::Int32:
      s = Type::getInt32Ty(c);
      break;
    case DType::Int64:
      s = Type::getInt64Ty(c);
      break;
    case DType::Float32:
      s = Type::getFloatTy(c);
      break;
    case DType::Float64:
      s = Type::getDoubleTy(c);
      break;
    default:
      throw Unsupported("kernels on " + std::string(dtype_name(t)));
  }
  return width == 1 ? s : llvm::FixedVectorType::get(s, width);
}

llvm::Type* Emitter::memory_type_of(DType t, int width) const {
  return t == DType::Bool ? type_of(DType::UInt8, width) : type_of(t, width);
}

llvm::Value* Emitter::splat(Value* v, int width) { return width == 1 ? v : b_.CreateVectorSplat(width, v); }

llvm::Value* Emitter::part(const Parts& p, int i, int width) {
  KILN_CHECK(!p.v.empty(), "a loop value is used before it is computed in " + nest_.name);
  return p.uniform ? splat(p.v[0], width) : p.v.at(i);
}

Emitter::Parts Emitter::map(const loops::Operands& args, const std::function<Value*(const std::vector<Value*>&)>& f) {
  bool uniform = true;
  for (ValueId a : args) uniform &= env_[a].uniform;
  Parts out;
  out.uniform = uniform;
  const int n = uniform ? 1 : lanes_.parts;
  for (int p = 0; p < n; ++p) {
    std::vector<Value*> operands;
    for (ValueId a : args) operands.push_back(uniform ? part(env_[a], 0, 1) : part(env_[a], p, lanes_.width));
    out.v.push_back(f(operands));
  }
  return out;
}

llvm::Value* Emitter::fconst(Type* t, double v) { return llvm::ConstantFP::get(t, v); }

llvm::Value* Emitter::constant(DType t, const Inst& i) {
  if (i.op == Opcode::ConstInt) return llvm::ConstantInt::get(type_of(t), i.imm, true);
  if (t == DType::Float32) return llvm::ConstantFP::get(context_, llvm::APFloat(static_cast<float>(i.fimm)));
  if (t == DType::Float64) return llvm::ConstantFP::get(context_, llvm::APFloat(i.fimm));
  llvm::APFloat f(static_cast<float>(i.fimm));
  bool loses = false;
  f.convert(t == DType::BFloat16 ? llvm::APFloat::BFloat() : llvm::APFloat::IEEEhalf(),
            llvm::APFloat::rmNearestTiesToEven, &loses);
  return llvm::ConstantInt::get(context_, f.bitcastToAPInt());
}

llvm::Value* Emitter::round_to_bf16(Value* v) {
  const int w = width_of(v);
  Type* i32 = type_of(DType::Int32, w);
  const auto k = [&](uint32_t c) { return llvm::ConstantInt::get(i32, c); };
  Value* bits = b_.CreateBitCast(v, i32);
  Value* odd = b_.CreateAnd(b_.CreateLShr(bits, k(16)), k(1));
  Value* rounded = b_.CreateLShr(b_.CreateAdd(bits, b_.CreateAdd(odd, k(0x7fff))), k(16));
  Value* out = b_.CreateSelect(b_.CreateFCmpUNO(v, v), k(0x7fc0), rounded);
  return b_.CreateTrunc(out, type_of(DType::Int16, w));
}

llvm::Value* Emitter::cast(Value* v, DType from, DType to) {
  if (from == to) return v;
  const int w = width_of(v);
  Type* target = type_of(to, w);
  if (from == DType::BFloat16) {
    Value* wide = b_.CreateZExt(v, type_of(DType::Int32, w));
    v = b_.CreateBitCast(b_.CreateShl(wide, llvm::ConstantInt::get(wide->getType(), 16)), type_of(DType::Float32, w));
    return cast(v, DType::Float32, to);
  }
  if (from == DType::Float16) {
    Type* half = Type::getHalfTy(context_);
    v = b_.CreateBitCast(v, w == 1 ? half : llvm::FixedVectorType::get(half, w));
    return cast(b_.CreateFPExt(v, type_of(DType::Float32, w)), DType::Float32, to);
  }
  if (is_half(to)) {
    // Through f32, as ATen converts: f64 to f16 rounds twice there too.
    v = cast(v, from, DType::Float32);
    if (to == DType::BFloat16) return round_to_bf16(v);
    Type* half = Type::getHalfTy(context_);
    return b_.CreateBitCast(b_.CreateFPTrunc(v, w == 1 ? half : llvm::FixedVectorType::get(half, w)), target);
  }
  if (to == DType::Bool)
    return is_floating(from) ? b_.CreateFCmpUNE(v, llvm::Constant::getNullValue(v->getType()))
                             : b_.CreateICmpNE(v, llvm::Constant::getNullValue(v->getType()));
  if (is_floating(from) && is_floating(to)) return b_.CreateFPCast(v, target);
  if (is_floating(to)) return is_signed(from) ? b_.CreateSIToFP(v, target) : b_.CreateUIToFP(v, target);
  if (is_floating(from)) {
    // The processor's conversion gives the minimum for what does not fit; narrow integers take its low bits.
    const DType wide = to == DType::UInt8 || to == DType::Int64 ? DType::Int64 : DType::Int32;
    Value* i = b_.CreateFreeze(b_.CreateFPToSI(v, type_of(wide, w)));
    return b_.CreateTrunc(i, target);
  }
  return is_signed(from) ? b_.CreateSExtOrTrunc(v, target) : b_.CreateZExtOrTrunc(v, target);
}

llvm::Value* Emitter::compare(Opcode op, DType t, Value* a, Value* b) {
  using P = llvm::CmpInst::Predicate;
  if (is_half(t)) {
    a = cast(a, t, DType::Float32);
    b = cast(b, t, DType::Float32);
    t = DType::Float32;
  }
  if (is_floating(t)) {
    const P p = op == Opcode::Eq   ? P::FCMP_OEQ
                : op == Opcode::Ne ? P::FCMP_UNE
                : op == Opcode::Lt ? P::FCMP_OLT
                : op == Opcode::Le ? P::FCMP_OLE
                : op == Opcode::Gt ? P::FCMP_OGT
                                   : P::FCMP_OGE;
    return b_.CreateFCmp(p, a, b);
  }
  const bool s = is_signed(t);
  const P p = op == Opcode::Eq   ? P::ICMP_EQ
              : op == Opcode::Ne ? P::ICMP_NE
              : op == Opcode::Lt ? (s ? P::ICMP_SLT : P::ICMP_ULT)
              : op == Opcode::Le ? (s ? P::ICMP_SLE : P::ICMP_ULE)
              : op == Opcode::Gt ? (s ? P::ICMP_SGT : P::ICMP_UGT)
                                 : (s ? P::ICMP_SGE : P::ICMP_UGE);
  return b_.CreateICmp(p, a, b);
}

llvm::Value* Emitter::scalar_op(const Inst& i, DType t, const std::vector<Value*>& a) {
  if (loops::opcode_class(i.op) == 'c') return compare(i.op, t, a[0], a[1]);
  if (is_integral(t)) return integer_op(i.op, t, a);
  if (is_half(t)) throw InternalError("arithmetic on " + std::string(dtype_name(t)) + " in " + nest_.name);
  return float_op(i.op, t, a);
}

int Emitter::error_code(const std::string& message) {
  const auto it = std::find(shape_.errors.begin(), shape_.errors.end(), message);
  KILN_CHECK(it != shape_.errors.end(), "kernel error without a number: " + message);
  return static_cast<int>(it - shape_.errors.begin()) + 1;
}

void Emitter::fail_if(Value* any, int code) {
  llvm::BasicBlock*& error = error_blocks_[code];
  if (!error) {
    error = llvm::BasicBlock::Create(context_, "error", fn_);
    llvm::IRBuilder<>(error).CreateRet(b_.getInt32(code));
  }
  auto* next = llvm::BasicBlock::Create(context_, "checked", fn_);
  b_.CreateCondBr(any, error, next);
  b_.SetInsertPoint(next);
}

void Emitter::check_divisor(Value* divisor, int p) {
  Value* zero = b_.CreateICmpEQ(divisor, llvm::Constant::getNullValue(divisor->getType()));
  if (width_of(divisor) > 1) {
    if (lanes_.masks[p]) zero = b_.CreateAnd(zero, lanes_.masks[p]);
    zero = b_.CreateOrReduce(zero);
  }
  fail_if(zero, error_code(kDivisionByZero));
}

llvm::Value* Emitter::safe_integer_divide(Opcode op, DType t, Value* a, Value* b) {
  // Lanes that do not count and the one overflowing quotient must not trap.
  Type* type = a->getType();
  Value* zero = llvm::Constant::getNullValue(type);
  Value* one = llvm::ConstantInt::get(type, 1);
  const bool s = is_signed(t);
  Value* minus_one = llvm::ConstantInt::getSigned(type, -1);
  Value* bad = b_.CreateICmpEQ(b, zero);
  Value* negate = s ? b_.CreateICmpEQ(b, minus_one) : nullptr;
  if (s) bad = b_.CreateOr(bad, negate);
  Value* divisor = b_.CreateSelect(bad, one, b);
  Value* q = s ? b_.CreateSDiv(a, divisor) : b_.CreateUDiv(a, divisor);
  if (s) q = b_.CreateSelect(negate, b_.CreateNeg(a), q);
  Value* r = b_.CreateSub(a, b_.CreateMul(q, b));
  if (op == Opcode::TruncDiv) return q;
  if (op == Opcode::Fmod) return r;
  if (!s) return op == Opcode::FloorDiv ? q : r;
  Value* differ = b_.CreateICmpSLT(b_.CreateXor(r, b), zero);
  Value* adjust = b_.CreateAnd(b_.CreateICmpNE(r, zero), differ);
  return op == Opcode::FloorDiv ? b_.CreateSelect(adjust, b_.CreateSub(q, one), q)
                                : b_.CreateSelect(adjust, b_.CreateAdd(r, b), r);
}

llvm::Value* Emitter::integer_op(Opcode op, DType t, const std::vector<Value*>& a) {
  Type* type = a[0]->getType();
  Value* zero = llvm::Constant::getNullValue(type);
  const bool s = is_signed(t);
  switch (op) {
    case Opcode::Add:
      return t == DType::Bool ? b_.CreateOr(a[0], a[1]) : b_.CreateAdd(a[0], a[1]);
    case Opcode::Sub:
      return b_.CreateSub(a[0], a[1]);
    case Opcode::Mul:
      return b_.CreateMul(a[0], a[1]);
    case Opcode::FloorDiv:
    case Opcode::TruncDiv:
    case Opcode::Remainder:
    case Opcode::Fmod:
      return safe_integer_divide(op, t, a[0], a[1]);
    case Opcode::Maximum:
      return b_.CreateSelect(s ? b_.CreateICmpSGT(a[0], a[1]) : b_.CreateICmpUGT(a[0], a[1]), a[0], a[1]);
    case Opcode::Minimum:
      return b_.CreateSelect(s ? b_.CreateICmpSLT(a[0], a[1]) : b_.CreateICmpULT(a[0], a[1]), a[0], a[1]);
    case Opcode::Neg:
      return b_.CreateNeg(a[0]);
    case Opcode::Abs:
      return s ? b_.CreateSelect(b_.CreateICmpSLT(a[0], zero), b_.CreateNeg(a[0]), a[0]) : a[0];
    case Opcode::Sign: {
      Value* positive = b_.CreateZExt(s ? b_.CreateICmpSGT(a[0], zero) : b_.CreateICmpNE(a[0], zero), type);
      return s ? b_.CreateSub(positive, b_.CreateZExt(b_.CreateICmpSLT(a[0], zero), type)) : positive;
    }
    case Opcode::And:
      return b_.CreateAnd(a[0], a[1]);
    case Opcode::Or:
      return b_.CreateOr(a[0], a[1]);
    case Opcode::Xor:
      return b_.CreateXor(a[0], a[1]);
    case Opcode::Not:
      return b_.CreateNot(a[0]);
    case Opcode::Shl:
    case Opcode::Shr: {
      const unsigned bits = type->getScalarSizeInBits();
      Value* limit = llvm::ConstantInt::get(type, bits);
      Value* fits = b_.CreateICmpULT(a[1], limit);
      Value* by = b_.CreateSelect(fits, a[1], zero);
      if (op == Opcode::Shl) return b_.CreateSelect(fits, b_.CreateShl(a[0], by), zero);
      Value* all = s ? b_.CreateAShr(a[0], llvm::ConstantInt::get(type, bits - 1)) : zero;
      return b_.CreateSelect(fits, s ? b_.CreateAShr(a[0], by) : b_.CreateLShr(a[0], by), all);
    }
    case Opcode::Pow: {
      // By squaring over the exponent's bits; negative exponents leave only bases of one.
      Value* one = llvm::ConstantInt::get(type, 1);
      Value *result = one, *base = a[0], *e = a[1];
      const int bits = static_cast<int>(type->getScalarSizeInBits());
      for (int k = 0; k < bits - (s ? 1 : 0); ++k) {
        Value* odd = b_.CreateICmpNE(b_.CreateAnd(b_.CreateLShr(e, llvm::ConstantInt::get(type, k)), one), zero);
        result = b_.CreateSelect(odd, b_.CreateMul(result, base), result);
        base = b_.CreateMul(base, base);
      }
      if (!s) return result;
      Value* minus_one = llvm::ConstantInt::getSigned(type, -1);
      Value* odd = b_.CreateICmpNE(b_.CreateAnd(e, one), zero);
      Value* of_minus_one = b_.CreateSelect(odd, minus_one, one);
      Value* negative = b_.CreateSelect(b_.CreateICmpEQ(a[0], one), one,
                                        b_.CreateSelect(b_.CreateICmpEQ(a[0], minus_one), of_minus_one, zero));
      return b_.CreateSelect(b_.CreateICmpSLT(e, zero), negative, result);
    }
    default:
      throw InternalError(std::string(loops::opcode_name(op)) + " on integers in " + nest_.name);
  }
}

llvm::Value* Emitter::float_op(Opcode op, DType t, const std::vector<Value*>& a) {
  using llvm::Intrinsic::ID;
  Type* type = a[0]->getType();
  Value* zero = llvm::Constant::getNullValue(type);
  Value* one = fconst(type, 1.0);
  const auto unary = [&](ID id) { return b_.CreateUnaryIntrinsic(id, a[0]); };
  // maxps and minps give their second operand when one is NaN, and LLVM matches this select to them.
  const auto larger = [&](Value* x, Value* y) { return b_.CreateSelect(b_.CreateFCmpOGT(x, y), x, y); };
  const auto smaller = [&](Value* x, Value* y) { return b_.CreateSelect(b_.CreateFCmpOLT(x, y), x, y); };
  const auto not_nan = [](Value* v) {
    const auto* c = llvm::dyn_cast<llvm::Constant>(v);
    if (const auto* s = c && c->getType()->isVectorTy() ? c->getSplatValue() : c) {
      const auto* f = llvm::dyn_cast<llvm::ConstantFP>(s);
      return f && !f->isNaN();
    }
    return false;
  };
  switch (op) {
    case Opcode::Add:
      return b_.CreateFAdd(a[0], a[1]);
    case Opcode::Sub:
      return b_.CreateFSub(a[0], a[1]);
    case Opcode::Mul:
      return b_.CreateFMul(a[0], a[1]);
    case Opcode::Div:
      return b_.CreateFDiv(a[0], a[1]);
    case Opcode::Neg:
      return b_.CreateFNeg(a[0]);
    case Opcode::Abs:
      return unary(llvm::Intrinsic::fabs);
    case Opcode::Sign:
      return b_.CreateFSub(b_.CreateUIToFP(b_.CreateFCmpOGT(a[0], zero), type),
                           b_.CreateUIToFP(b_.CreateFCmpOLT(a[0], zero), type));
    case Opcode::Sqrt:
      return unary(llvm::Intrinsic::sqrt);
    case Opcode::Rsqrt:
      return b_.CreateFDiv(one, unary(llvm::Intrinsic::sqrt));
    case Opcode::Reciprocal:
      return b_.CreateFDiv(one, a[0]);
    case Opcode::Floor:
      return unary(llvm::Intrinsic::floor);
    case Opcode::Ceil:
      return unary(llvm::Intrinsic::ceil);
    case Opcode::Trunc:
      return unary(llvm::Intrinsic::trunc);
    case Opcode::Round:
      return unary(llvm::Intrinsic::roundeven);
    case Opcode::Fma:
      return b_.CreateIntrinsic(llvm::Intrinsic::fma, {type}, {a[0], a[1], a[2]});
    case Opcode::Copysign:
      return b_.CreateBinaryIntrinsic(llvm::Intrinsic::copysign, a[0], a[1]);
    case Opcode::Maximum:
    case Opcode::Minimum: {
      const auto pick = [&](Value* x, Value* y) { return op == Opcode::Maximum ? larger(x, y) : smaller(x, y); };
      if (not_nan(a[1])) return pick(a[1], a[0]);
      if (not_nan(a[0])) return pick(a[0], a[1]);
      // A NaN in a[0] last: x86 has that in two instructions, and with the NaN first in five.
      return b_.CreateSelect(b_.CreateFCmpORD(a[0], a[0]), pick(a[0], a[1]), a[0]);
    }
    case Opcode::Fmax:
      return b_.CreateSelect(b_.CreateFCmpORD(a[1], a[1]), larger(a[0], a[1]), a[0]);
    case Opcode::Fmin:
      return b_.CreateSelect(b_.CreateFCmpORD(a[1], a[1]), smaller(a[0], a[1]), a[0]);
    case Opcode::TruncDiv:
      return b_.CreateUnaryIntrinsic(llvm::Intrinsic::trunc, b_.CreateFDiv(a[0], a[1]));
    case Opcode::Sigmoid: {
      Value* e = float_op(Opcode::Exp, t, {b_.CreateFNeg(a[0])});
      return b_.CreateFDiv(one, b_.CreateFAdd(one, e));
    }
    case Opcode::Remainder:
    case Opcode::FloorDiv: {
      Value* rest = call_math(Opcode::Fmod, t, a);
      Value* nonzero = b_.CreateFCmpUNE(rest, zero);
      Value* differ = b_.CreateXor(b_.CreateFCmpOLT(a[1], zero), b_.CreateFCmpOLT(rest, zero));
      Value* adjust = b_.CreateAnd(nonzero, differ);
      if (op == Opcode::Remainder) return b_.CreateSelect(adjust, b_.CreateFAdd(rest, a[1]), rest);
      // The same steps as torch.floor_divide, which is exact where floor(a / b) is not.
      Value* q = b_.CreateFDiv(b_.CreateFSub(a[0], rest), a[1]);
      q = b_.CreateSelect(adjust, b_.CreateFSub(q, one), q);
      Value* down = b_.CreateUnaryIntrinsic(llvm::Intrinsic::floor, q);
      Value* up = b_.CreateFCmpOGT(b_.CreateFSub(q, down), fconst(type, 0.5));
      down = b_.CreateSelect(up, b_.CreateFAdd(down, one), down);
      Value* plain = b_.CreateFDiv(a[0], a[1]);
      Value* signed_zero = b_.CreateBinaryIntrinsic(llvm::Intrinsic::copysign, zero, plain);
      Value* r = b_.CreateSelect(b_.CreateFCmpUNE(q, zero), down, signed_zero);
      return b_.CreateSelect(b_.CreateFCmpOEQ(a[1], zero), plain, r);
    }
    default:
      return call_math(op, t, a);
  }
}

}  // namespace kiln::codegen
