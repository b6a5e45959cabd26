#include <algorithm>
#include <limits>

#include "base/error.h"
#include "codegen/llvm/emitter.h"

// Reductions and scans: accumulators in stack slots (promoted to registers later), one per part, combined at the end.
namespace kiln::codegen {

using loops::Inst;
using loops::Opcode;
using loops::ReduceKind;
using loops::Stage;
using loops::ValueId;

namespace {
bool is_arg(ReduceKind k) { return k == ReduceKind::ArgMax || k == ReduceKind::ArgMin; }
bool is_online(ReduceKind k) { return k == ReduceKind::OnlineSoftmax || k == ReduceKind::OnlineSoftmaxCombine; }
}  // namespace

std::vector<llvm::Type*> Emitter::accumulator_types(const Inst& i, int width) const {
  Type* t = type_of(i.dtype, width);
  if (i.reduce == ReduceKind::Welford) return {t, t, t, t};      // mean - first element, m2, count, first element
  if (i.reduce == ReduceKind::WelfordCombine) return {t, t, t};  // mean, m2, count
  if (is_arg(i.reduce)) return {t, type_of(DType::Int64, width)};
  if (is_online(i.reduce)) return {t, t};
  return {t};
}

std::vector<llvm::Value*> Emitter::identity(const Inst& i, int width) {
  Type* t = type_of(i.dtype, width);
  const auto lowest = [&](bool largest) -> Value* {
    if (is_floating(i.dtype)) return llvm::ConstantFP::getInfinity(t, !largest);
    const unsigned bits = t->getScalarSizeInBits();
    const bool s = dtype_kind(i.dtype) == 'i';
    const llvm::APInt v = largest ? (s ? llvm::APInt::getSignedMaxValue(bits) : llvm::APInt::getMaxValue(bits))
                                  : (s ? llvm::APInt::getSignedMinValue(bits) : llvm::APInt::getMinValue(bits));
    return llvm::ConstantInt::get(t, v);
  };
  Value* zero = llvm::Constant::getNullValue(t);
  switch (i.reduce) {
    case ReduceKind::Sum:
      // -0.0 is the identity of IEEE addition, but an empty sum, and ATen's, starts from +0.0.
      return {zero};
    case ReduceKind::Prod:
      return {is_floating(i.dtype) ? fconst(t, 1.0) : llvm::ConstantInt::get(t, 1)};
    case ReduceKind::Any:
      return {zero};
    case ReduceKind::All:
      return {llvm::Constant::getAllOnesValue(t)};
    case ReduceKind::Max:
      return {lowest(false)};
    case ReduceKind::Min:
      return {lowest(true)};
    case ReduceKind::ArgMax:
    case ReduceKind::ArgMin:
      return {lowest(i.reduce == ReduceKind::ArgMin),
              llvm::ConstantInt::get(type_of(DType::Int64, width), std::numeric_limits<int64_t>::max())};
    case ReduceKind::Welford:
      return {zero, zero, zero, zero};
    case ReduceKind::WelfordCombine:
      return {zero, zero, zero};
    case ReduceKind::OnlineSoftmax:
    case ReduceKind::OnlineSoftmaxCombine:
      return {lowest(false), zero};
  }
  return {};
}

std::vector<llvm::Value*> Emitter::combine(const Inst& i, const std::vector<Value*>& a, const std::vector<Value*>& b) {
  const DType t = i.dtype;
  const bool f = is_floating(t);
  const auto op = [&](Opcode o, Value* x, Value* y) { return f ? float_op(o, t, {x, y}) : integer_op(o, t, {x, y}); };
  switch (i.reduce) {
    case ReduceKind::Sum:
      return {op(Opcode::Add, a[0], b[0])};
    case ReduceKind::Prod:
      return {t == DType::Bool ? b_.CreateAnd(a[0], b[0]) : op(Opcode::Mul, a[0], b[0])};
    case ReduceKind::Max:
      return {op(Opcode::Maximum, a[0], b[0])};
    case ReduceKind::Min:
      return {op(Opcode::Minimum, a[0], b[0])};
    case ReduceKind::Any:
      return {b_.CreateOr(a[0], b[0])};
    case ReduceKind::All:
      return {b_.CreateAnd(a[0], b[0])};
    case ReduceKind::ArgMax:
    case ReduceKind::ArgMin: {
      const bool max = i.reduce == ReduceKind::ArgMax;
      Value* better = compare(max ? Opcode::Gt : Opcode::Lt, t, b[0], a[0]);
      Value* equal = compare(Opcode::Eq, t, b[0], a[0]);
      if (f) {
        Value *na = b_.CreateFCmpUNO(a[0], a[0]), *nb = b_.CreateFCmpUNO(b[0], b[0]);
        better = b_.CreateOr(b_.CreateAnd(better, b_.CreateNot(na)), b_.CreateAnd(nb, b_.CreateNot(na)));
        equal = b_.CreateOr(equal, b_.CreateAnd(na, nb));
      }
      Value* first = b_.CreateICmpSLT(b[1], a[1]);
      Value* take = b_.CreateOr(better, b_.CreateAnd(equal, first));
      return {b_.CreateSelect(take, b[0], a[0]), b_.CreateSelect(take, b[1], a[1])};
    }
    case ReduceKind::Welford:
    case ReduceKind::WelfordCombine: {
      // Chan et al.: parts with counts na and nb; an empty part changes nothing.
      Type* type = a[0]->getType();
      Value* n = b_.CreateFAdd(a[2], b[2]);
      Value* empty = b_.CreateFCmpOEQ(n, llvm::Constant::getNullValue(type));
      Value* share = b_.CreateFDiv(b[2], b_.CreateSelect(empty, fconst(type, 1.0), n));
      Value* delta = b_.CreateFSub(b[0], a[0]);
      Value* mean = b_.CreateFAdd(a[0], b_.CreateFMul(delta, share));
      Value* cross = b_.CreateFMul(b_.CreateFMul(delta, delta), b_.CreateFMul(a[2], share));
      return {mean, b_.CreateFAdd(b_.CreateFAdd(a[1], b[1]), cross), n};
    }
    case ReduceKind::OnlineSoftmax:
    case ReduceKind::OnlineSoftmaxCombine: {
      Value* m = float_op(Opcode::Maximum, t, {a[0], b[0]});
      const auto scaled = [&](const std::vector<Value*>& x) {
        // exp(-inf - -inf) would be NaN: a part that has seen nothing, or only -inf, counts as it is. With an infinity
        // in the row the sum is NaN, as eager's.
        Value* same = b_.CreateAnd(b_.CreateFCmpOEQ(x[0], m),
                                   b_.CreateFCmpONE(m, llvm::ConstantFP::getInfinity(m->getType(), false)));
        Value* e = float_op(Opcode::Exp, t, {b_.CreateFSub(x[0], m)});
        return b_.CreateSelect(same, x[1], b_.CreateFMul(x[1], e));
      };
      return {m, b_.CreateFAdd(scaled(a), scaled(b))};
    }
  }
  return {};
}

std::vector<llvm::Value*> Emitter::accumulate(const Inst& i, const std::vector<Value*>& acc,
                                              const std::vector<Value*>& x, Value*& reciprocal) {
  Type* type = acc[0]->getType();
  if (i.reduce == ReduceKind::Welford) {
    // Counted from the first element on, elements are of the size of their spread, and so are rounding errors. The mean
    // waits for no division.
    Value* n = b_.CreateFAdd(acc[2], fconst(type, 1.0));
    if (!reciprocal) reciprocal = b_.CreateFDiv(fconst(type, 1.0), n);
    Value* first = b_.CreateSelect(b_.CreateFCmpOEQ(acc[2], llvm::Constant::getNullValue(type)), x[0], acc[3]);
    Value* from_first = b_.CreateFSub(x[0], first);
    Value* delta = b_.CreateFSub(from_first, acc[0]);
    Value* mean = b_.CreateFAdd(acc[0], b_.CreateFMul(delta, reciprocal));
    Value* m2 = b_.CreateFAdd(acc[1], b_.CreateFMul(delta, b_.CreateFSub(from_first, mean)));
    return {mean, m2, n, first};
  }
  if (i.reduce == ReduceKind::OnlineSoftmax) return combine(i, acc, {x[0], fconst(type, 1.0)});
  return combine(i, acc, x);
}

std::vector<llvm::Value*> Emitter::append(const Inst& i, const std::vector<Value*>& a, const std::vector<Value*>& b) {
  Value* zero = llvm::Constant::getNullValue(a[0]->getType());
  Value *a_empty = b_.CreateFCmpOEQ(a[2], zero), *b_empty = b_.CreateFCmpOEQ(b[2], zero);
  Value* first = b_.CreateSelect(a_empty, b[3], a[3]);
  Value* mean = b_.CreateFAdd(b[0], b_.CreateFSub(b[3], first));
  std::vector<Value*> both = combine(i, {a[0], a[1], a[2]}, {mean, b[1], b[2]});
  both.push_back(first);
  for (size_t c = 0; c < both.size(); ++c) both[c] = b_.CreateSelect(b_empty, a[c], both[c]);
  return both;
}

std::vector<llvm::Value*> Emitter::absolute(const std::vector<Value*>& acc) {
  return {b_.CreateFAdd(acc[0], acc[3]), acc[1], acc[2]};
}

void Emitter::begin_reductions(const Stage& s, int width, int unroll, int levels) {
  if (levels > 1) {
    strips_ = stack_slot(b_.getInt64Ty(), "strips");
    b_.CreateStore(b_.getInt64(0), strips_);
  }
  for (ValueId id : s.body) {
    const Inst& i = nest_.insts[id];
    if (i.op != Opcode::Reduce && i.op != Opcode::Scan) continue;
    const std::vector<Type*> types = accumulator_types(i, width);
    const std::vector<Value*> start = identity(i, width);
    Accumulator& a = accumulators_[id];
    const auto fill = [&](Accumulator::Slots& slots) {
      slots.assign(unroll, {});
      for (std::vector<Value*>& part : slots)
        for (size_t c = 0; c < types.size(); ++c) {
          part.push_back(stack_slot(types[c], "acc"));
          b_.CreateStore(start[c], part.back());
        }
    };
    fill(a.slots);
    const bool rounds = i.reduce == ReduceKind::Welford || (i.reduce == ReduceKind::Sum && is_floating(i.dtype));
    a.levels.assign(i.op == Opcode::Reduce && rounds ? levels : 0, {});
    for (Accumulator::Slots& level : a.levels) fill(level);
  }
}

void Emitter::emit_reduce_step(ValueId id) {
  const Inst& i = nest_.insts[id];
  const int w = lanes_.width;
  Accumulator& a = accumulators_.at(id);
  const std::vector<Type*> types = accumulator_types(i, w);
  Parts result[3];
  const int parts = lanes_.var < 0 ? 1 : lanes_.parts;
  // Where lanes are results, all of them have seen as many elements.
  const bool together = std::find(nest_.outer.begin(), nest_.outer.end(), lanes_.var) != nest_.outer.end();
  Value* reciprocal = nullptr;
  for (int p = 0; p < parts; ++p) {
    if (!together) reciprocal = nullptr;
    std::vector<Value*> acc, x;
    for (size_t c = 0; c < types.size(); ++c) acc.push_back(b_.CreateLoad(types[c], a.slots[p][c]));
    for (ValueId arg : i.args) x.push_back(part(env_[arg], p, w));
    std::vector<Value*> next = accumulate(i, acc, x, reciprocal);
    Value* mask = lanes_.var < 0 ? nullptr : lanes_.masks[p];
    for (size_t c = 0; c < types.size(); ++c) {
      if (mask) next[c] = b_.CreateSelect(mask, next[c], acc[c]);
      b_.CreateStore(next[c], a.slots[p][c]);
      if (i.op == Opcode::Scan) result[c].v.push_back(next[c]);
    }
  }
  if (i.op != Opcode::Scan) return;
  std::vector<Parts>& out = reduced_[id];
  out.clear();
  for (int c = 0; c < loops::result_count(i.reduce); ++c) {
    result[c].uniform = lanes_.var < 0;
    out.push_back(result[c]);
  }
  env_[id] = out[0];
}

size_t Emitter::cascade_levels() const {
  size_t levels = 0;
  for (const auto& [id, a] : accumulators_) levels = std::max(levels, a.levels.size());
  return levels;
}

void Emitter::flush_cascade() {
  const size_t levels = cascade_levels();
  if (levels > 0) flush_level(0);
  if (levels < 2) return;
  Value* count = b_.CreateAdd(b_.CreateLoad(b_.getInt64Ty(), strips_), b_.getInt64(1));
  b_.CreateStore(count, strips_);
  int64_t strip = 1;
  for (size_t level = 1; level < levels; ++level) {
    strip *= kStrip;
    when(b_.CreateICmpEQ(b_.CreateURem(count, b_.getInt64(strip)), b_.getInt64(0)), [&] { flush_level(level); });
  }
}

void Emitter::flush_level(size_t level) {
  for (auto& [id, a] : accumulators_) {
    if (level >= a.levels.size()) continue;
    const Inst& i = nest_.insts[id];
    const Accumulator::Slots &from = level == 0 ? a.slots : a.levels[level - 1], &to = a.levels[level];
    for (size_t p = 0; p < to.size(); ++p) {
      std::vector<Value*> outer, inner;
      for (size_t c = 0; c < to[p].size(); ++c) {
        Type* t = llvm::cast<llvm::AllocaInst>(to[p][c])->getAllocatedType();
        outer.push_back(b_.CreateLoad(t, to[p][c]));
        inner.push_back(b_.CreateLoad(t, from[p][c]));
        b_.CreateStore(llvm::Constant::getNullValue(t), from[p][c]);
      }
      const std::vector<Value*> sum =
          i.reduce == ReduceKind::Welford ? append(i, outer, inner) : combine(i, outer, inner);
      for (size_t c = 0; c < sum.size(); ++c) b_.CreateStore(sum[c], to[p][c]);
    }
  }
}

void Emitter::finish_reductions(const Stage& s, bool lanes_are_results) {
  // The last strip's end emptied the accumulators alone.
  for (size_t level = 1, n = cascade_levels(); level < n; ++level) flush_level(level);
  for (ValueId id : s.body) {
    const Inst& i = nest_.insts[id];
    if (i.op != Opcode::Reduce) continue;
    Accumulator& a = accumulators_.at(id);
    std::vector<std::vector<Value*>> parts;
    for (size_t p = 0; p < a.slots.size(); ++p) {
      parts.emplace_back();
      for (size_t c = 0; c < a.slots[p].size(); ++c) {
        Type* t = llvm::cast<llvm::AllocaInst>(a.slots[p][c])->getAllocatedType();
        parts.back().push_back(b_.CreateLoad(t, (a.levels.empty() ? a.slots : a.levels.back())[p][c]));
      }
      if (i.reduce == ReduceKind::Welford) parts.back() = absolute(parts.back());
    }
    a.levels.clear();
    std::vector<Parts>& out = reduced_[id];
    out.clear();
    const int results = loops::result_count(i.reduce);
    if (lanes_are_results) {
      for (int c = 0; c < results; ++c) {
        Parts r;
        r.uniform = false;
        for (auto& p : parts) r.v.push_back(p[c]);
        if (lanes_.width == 1 && lanes_.parts == 1) r.uniform = true;
        out.push_back(r);
      }
    } else {
      for (size_t n = parts.size(); n > 1; n = (n + 1) / 2)
        for (size_t p = 0; p + (n + 1) / 2 < n; ++p) parts[p] = combine(i, parts[p], parts[p + (n + 1) / 2]);
      std::vector<Value*> v = parts[0];
      auto* vector = llvm::dyn_cast<llvm::FixedVectorType>(v[0]->getType());
      for (int w = vector ? vector->getNumElements() : 1; w > 1; w /= 2) {
        std::vector<int> low, high;
        for (int l = 0; l < w / 2; ++l) low.push_back(l), high.push_back(l + w / 2);
        std::vector<Value*> x, y;
        for (Value* c : v) {
          if (w == 2) {  // scalars, not vectors of one
            x.push_back(b_.CreateExtractElement(c, static_cast<uint64_t>(0)));
            y.push_back(b_.CreateExtractElement(c, static_cast<uint64_t>(1)));
            continue;
          }
          x.push_back(b_.CreateShuffleVector(c, low));
          y.push_back(b_.CreateShuffleVector(c, high));
        }
        v = combine(i, x, y);
      }
      for (int c = 0; c < results; ++c) {
        Value* r = v[c]->getType()->isVectorTy() ? b_.CreateExtractElement(v[c], static_cast<uint64_t>(0)) : v[c];
        out.push_back({{r}, true});
      }
    }
    env_[id] = out[0];
    for (ValueId other : s.body)
      if (nest_.insts[other].op == Opcode::Project && nest_.insts[other].args[0] == id)
        env_[other] = out.at(nest_.insts[other].imm);
  }
}

}  // namespace kiln::codegen
