#include <algorithm>

#include "base/error.h"
#include "codegen/llvm/emitter.h"

// Index expressions, loads and stores. An access is uniform (scalar), contiguous in the lanes (one vector), or neither
// (gather and scatter).
namespace kiln::codegen {

using loops::Inst;
using loops::Opcode;
using loops::ValueId;
using symbolic::AtomKind;
using symbolic::AtomNode;
using symbolic::Expr;
using symbolic::Term;
using symbolic::VarKind;

bool Emitter::depends_on_lanes(const Expr& e) const {
  bool depends = false;
  for_each_var(e, [&](const AtomNode& v) {
    if (v.var_kind == VarKind::Loop)
      depends |= v.id == lanes_.var;
    else
      depends |= v.var_kind == VarKind::Indirect && !indirect_[v.id].uniform;
  });
  return depends;
}

llvm::Value* Emitter::scalar_index(const Expr& e) {
  Value* total = nullptr;
  for (const Term& t : e.terms()) {
    const AtomNode& n = *t.atom;
    Value* v = nullptr;
    switch (n.kind) {
      case AtomKind::Var:
        if (n.var_kind == VarKind::Loop)
          v = n.id == lanes_.var ? lanes_.base : loop_values_.at(n.id);
        else if (n.var_kind == VarKind::Size)
          v = sizes_.at(n.id);
        else
          v = part(indirect_.at(n.id), 0, 1);
        KILN_CHECK(v, "index variable without a value in " + nest_.name);
        break;
      case AtomKind::FloorDiv: {
        Value* a = scalar_index(n.a);
        Value* d = b_.getInt64(n.divisor);
        if (n.a.range().lo >= 0)
          v = b_.CreateUDiv(a, d);
        else {
          Value* q = b_.CreateSDiv(a, d);
          Value* r = b_.CreateSub(a, b_.CreateMul(q, d));
          v = b_.CreateSelect(b_.CreateICmpSLT(r, b_.getInt64(0)), b_.CreateSub(q, b_.getInt64(1)), q);
        }
        break;
      }
      case AtomKind::Mod: {
        Value* a = scalar_index(n.a);
        Value* d = b_.getInt64(n.divisor);
        if (n.a.range().lo >= 0)
          v = b_.CreateURem(a, d);
        else {
          Value* r = b_.CreateSRem(a, d);
          v = b_.CreateSelect(b_.CreateICmpSLT(r, b_.getInt64(0)), b_.CreateAdd(r, d), r);
        }
        break;
      }
      case AtomKind::Min:
      case AtomKind::Max: {
        Value *a = scalar_index(n.a), *b = scalar_index(n.b);
        Value* less = b_.CreateICmpSLT(a, b);
        v = n.kind == AtomKind::Min ? b_.CreateSelect(less, a, b) : b_.CreateSelect(less, b, a);
        break;
      }
      case AtomKind::Product:
        v = b_.CreateMul(scalar_index(n.a), scalar_index(n.b));
        break;
    }
    if (t.coef != 1) v = b_.CreateMul(v, b_.getInt64(t.coef));
    total = total ? b_.CreateAdd(total, v) : v;
  }
  if (!total) return b_.getInt64(e.constant());
  return e.constant() ? b_.CreateAdd(total, b_.getInt64(e.constant())) : total;
}

/// The index of every lane, as a vector of i64; only what depends on the lanes is computed per lane.
llvm::Value* Emitter::lane_index(const Expr& e, int p) {
  const int w = lanes_.width;
  if (!depends_on_lanes(e)) return splat(scalar_index(e), w);
  if (w == 1) {
    // One lane: the vector variable is an ordinary one, and indirect variables are scalars of this part.
    KILN_CHECK(lanes_.parts == 1, "one lane, several parts");
    Value* saved = lanes_.base;
    const std::vector<Parts> indirect = indirect_;
    for (Parts& i : indirect_)
      if (!i.v.empty()) i = {{i.v[0]}, true};
    Value* v = scalar_index(e);
    indirect_ = indirect;
    lanes_.base = saved;
    return v;
  }
  Type* type = type_of(DType::Int64, w);
  const auto k = [&](int64_t c) { return llvm::ConstantInt::getSigned(type, c); };
  Value* total = nullptr;
  for (const Term& t : e.terms()) {
    const AtomNode& n = *t.atom;
    Value* v = nullptr;
    switch (n.kind) {
      case AtomKind::Var:
        if (n.var_kind == VarKind::Loop && n.id == lanes_.var) {
          std::vector<llvm::Constant*> iota;
          for (int l = 0; l < w; ++l) iota.push_back(b_.getInt64(static_cast<int64_t>(p) * w + l));
          v = b_.CreateAdd(splat(lanes_.base, w), llvm::ConstantVector::get(iota));
        } else if (n.var_kind == VarKind::Loop) {
          v = splat(loop_values_.at(n.id), w);
        } else if (n.var_kind == VarKind::Size) {
          v = splat(sizes_.at(n.id), w);
        } else {
          v = part(indirect_.at(n.id), p, w);
        }
        break;
      case AtomKind::FloorDiv:
      case AtomKind::Mod: {
        Value* a = lane_index(n.a, p);
        const symbolic::Range r = n.a.range();
        if (r.lo >= 0 && r.hi <= INT32_MAX) {
          // Division by a constant is a multiplication in 32 bits, but a loop over the lanes in 64.
          Type* narrow = type_of(DType::Int32, w);
          Value* x = b_.CreateTrunc(a, narrow);
          Value* d = llvm::ConstantInt::get(narrow, n.divisor);
          if (n.divisor > INT32_MAX)
            v = n.kind == AtomKind::Mod ? a : k(0);
          else
            v = b_.CreateZExt(n.kind == AtomKind::Mod ? b_.CreateURem(x, d) : b_.CreateUDiv(x, d), type);
        } else {
          Value *q = b_.CreateSDiv(a, k(n.divisor)), *rest = b_.CreateSub(a, b_.CreateMul(q, k(n.divisor)));
          Value* low = b_.CreateICmpSLT(rest, k(0));
          v = n.kind == AtomKind::Mod ? b_.CreateSelect(low, b_.CreateAdd(rest, k(n.divisor)), rest)
                                      : b_.CreateSelect(low, b_.CreateSub(q, k(1)), q);
        }
        break;
      }
      case AtomKind::Min:
      case AtomKind::Max: {
        Value *a = lane_index(n.a, p), *b = lane_index(n.b, p);
        Value* less = b_.CreateICmpSLT(a, b);
        v = n.kind == AtomKind::Min ? b_.CreateSelect(less, a, b) : b_.CreateSelect(less, b, a);
        break;
      }
      case AtomKind::Product:
        v = b_.CreateMul(lane_index(n.a, p), lane_index(n.b, p));
        break;
    }
    if (t.coef != 1) v = b_.CreateMul(v, k(t.coef));
    total = total ? b_.CreateAdd(total, v) : v;
  }
  return e.constant() ? b_.CreateAdd(total, k(e.constant())) : total;
}

llvm::Value* Emitter::address(loops::BufferId b, Value* index) {
  return b_.CreateGEP(memory_type_of(buffers_[b].dtype), pointers_.at(b), index);
}

llvm::Value* Emitter::from_memory(Value* v, DType t) {
  return t == DType::Bool ? b_.CreateICmpNE(v, llvm::Constant::getNullValue(v->getType())) : v;
}

llvm::Value* Emitter::to_memory(Value* v, DType t) {
  if (t != DType::Bool) return v;
  const auto* vector = llvm::dyn_cast<llvm::FixedVectorType>(v->getType());
  return b_.CreateZExt(v, type_of(DType::UInt8, vector ? vector->getNumElements() : 1));
}

void Emitter::tag(llvm::Instruction* i, loops::BufferId b) {
  i->setMetadata(llvm::LLVMContext::MD_alias_scope, scope_.at(b));
  if (noalias_.at(b)) i->setMetadata(llvm::LLVMContext::MD_noalias, noalias_[b]);
  if (!written_.at(b) && llvm::isa<llvm::LoadInst>(i))
    i->setMetadata(llvm::LLVMContext::MD_invariant_load, llvm::MDNode::get(context_, {}));
}

llvm::Value* Emitter::lane_mask(int p, int width) {
  if (lanes_.masks[p]) return lanes_.masks[p];
  return llvm::Constant::getAllOnesValue(type_of(DType::Bool, width));
}

namespace {
/// How e moves with the lanes: a constant stride, or not evenly.
struct LaneStride {
  bool linear = false;
  int64_t stride = 0;
  Expr rest;
};
/// How many elements lie between the lanes' first and last one, both included, and whether each is another one's.
struct Reach {
  int64_t span = 0;
  bool distinct = true;
};
Reach reach_of(std::vector<int64_t> offsets) {
  std::sort(offsets.begin(), offsets.end());
  return {offsets.back() - offsets.front() + 1, std::adjacent_find(offsets.begin(), offsets.end()) == offsets.end()};
}
}  // namespace

llvm::Value* Emitter::load_vector(loops::BufferId b, Value* at, Value* mask, int width) {
  const llvm::Align align(dtype_size(buffers_.at(b).dtype));
  Type* vector = memory_type_of(buffers_.at(b).dtype, width);
  Value* pointer = address(b, at);
  llvm::Instruction* load;
  if (mask)
    load = b_.CreateMaskedLoad(vector, pointer, align, mask, llvm::Constant::getNullValue(vector));
  else
    load = b_.CreateAlignedLoad(vector, pointer, align);
  tag(load, b);
  return load;
}

void Emitter::store_vector(loops::BufferId b, Value* at, Value* v, Value* mask) {
  const llvm::Align align(dtype_size(buffers_.at(b).dtype));
  Value* pointer = address(b, at);
  llvm::Instruction* store;
  if (mask)
    store = b_.CreateMaskedStore(v, pointer, align, mask);
  else
    store = b_.CreateAlignedStore(v, pointer, align);
  tag(store, b);
}

Emitter::Parts Emitter::emit_load(const Inst& i) {
  const DType t = buffers_.at(i.buffer).dtype;
  const llvm::Align align(dtype_size(t));
  const bool masked = i.op == Opcode::MaskedLoad;
  const bool uniform_mask = !masked || env_[i.args[0]].uniform;
  const auto scalar_load = [&](Value* index, Value* condition, Value* other) -> Value* {
    Value* p = address(i.buffer, index);
    if (!condition) {
      auto* load = b_.CreateAlignedLoad(memory_type_of(t), p, align);
      tag(load, i.buffer);
      return from_memory(load, t);
    }
    // The address may lie outside the buffer where the condition is false: read a place of our own instead.
    Value* safe = b_.CreateSelect(condition, p, stack_slot(memory_type_of(t), "unused"));
    Value* v = from_memory(b_.CreateAlignedLoad(memory_type_of(t), safe, align), t);
    return b_.CreateSelect(condition, v, other);
  };
  if (!depends_on_lanes(i.index) && uniform_mask && (!masked || env_[i.args[1]].uniform)) {
    Value* condition = masked ? part(env_[i.args[0]], 0, 1) : nullptr;
    Value* other = masked ? part(env_[i.args[1]], 0, 1) : nullptr;
    return {{scalar_load(scalar_index(i.index), condition, other)}, true};
  }
  const int w = lanes_.width;
  LaneStride lane;
  lane.linear = split_linear(i.index, lanes_.var, lane.stride, lane.rest) && !depends_on_lanes(lane.rest);
  const bool plain = w == 1 || (lane.linear && (lane.stride == 0 || lane.stride == 1));
  const auto offsets = plain ? std::nullopt : lane_offsets(i.index);
  const Reach reach = offsets ? reach_of(*offsets) : Reach{};
  Parts out;
  out.uniform = false;
  for (int p = 0; p < lanes_.parts; ++p) {
    Value* condition = masked ? part(env_[i.args[0]], p, w) : nullptr;
    Value* other = masked ? part(env_[i.args[1]], p, w) : nullptr;
    if (w == 1) {
      out.v.push_back(scalar_load(lane_index(i.index, p), condition, other));
      continue;
    }
    Value* mask = lanes_.masks[p];
    Type* vector = memory_type_of(t, w);
    if (condition && uniform_mask && lane.linear && lane.stride == 1 && llvm::isa<llvm::Constant>(other) &&
        other->getType() == vector) {
      // All lanes or none: what stands for none is loaded from a place of our own, which is cheaper than a mask.
      Value* at = b_.CreateAdd(scalar_index(i.index), b_.getInt64(static_cast<int64_t>(p) * w));
      Value* pointer = b_.CreateSelect(part(env_[i.args[0]], 0, 1), address(i.buffer, at), constant_in_memory(other));
      out.v.push_back(mask ? static_cast<Value*>(b_.CreateMaskedLoad(vector, pointer, align, mask, other))
                           : b_.CreateAlignedLoad(vector, pointer, align));
      continue;
    }
    if (condition) mask = mask ? b_.CreateAnd(mask, condition) : condition;
    Value* pass = llvm::Constant::getNullValue(vector);
    Value* v = nullptr;
    if (lane.linear && lane.stride == 1) {
      // scalar_index takes the vector variable as its first lane's value.
      Value* at = b_.CreateAdd(scalar_index(i.index), b_.getInt64(static_cast<int64_t>(p) * w));
      v = load_vector(i.buffer, at, mask, w);
    } else if (lane.linear && lane.stride == 0) {
      // One address under a mask that differs from lane to lane.
      Value* any = b_.CreateOrReduce(mask);
      Value* s = scalar_load(scalar_index(i.index), any, llvm::Constant::getNullValue(type_of(t)));
      v = splat(s, w);
      out.v.push_back(b_.CreateSelect(condition, v, other));
      continue;
    } else if (offsets && reach.span <= schedule::kMostInterleaved * w && (reach.distinct || !condition)) {
      Value* before = lanes_.base;
      lanes_.base = b_.CreateAdd(before, b_.getInt64(static_cast<int64_t>(p) * w));
      Value* at = scalar_index(i.index);
      lanes_.base = before;
      if (reach.span == 1) {  // of a last, masked vector the first lanes are the valid ones
        out.v.push_back(splat(scalar_load(at, nullptr, nullptr), w));
        continue;
      }
      v = load_lanes(i.buffer, at, *offsets, mask);
    } else {
      Value* pointers = address(i.buffer, lane_index(i.index, p));
      auto* gather = b_.CreateMaskedGather(vector, pointers, align, mask ? mask : lane_mask(p, w), pass);
      tag(gather, i.buffer);
      v = gather;
    }
    v = from_memory(v, t);
    out.v.push_back(condition ? b_.CreateSelect(condition, v, other) : v);
  }
  return out;
}

void Emitter::emit_store(const Inst& i) {
  const DType t = buffers_.at(i.buffer).dtype;
  const llvm::Align align(dtype_size(t));
  const bool conditional = i.args.size() > 1;
  const bool add = i.mode == loops::StoreMode::Add;
  const auto sum = [&](Value* old, Value* v) -> Value* {
    if (t == DType::Bool) return b_.CreateOr(old, v);
    if (t == DType::BFloat16 || t == DType::Float16)
      return cast(b_.CreateFAdd(cast(old, t, DType::Float32), cast(v, t, DType::Float32)), DType::Float32, t);
    return is_floating(t) ? b_.CreateFAdd(old, v) : b_.CreateAdd(old, v);
  };
  const auto scalar_store = [&](Value* index, Value* v, Value* condition) {
    Value* p = address(i.buffer, index);
    const auto store = [&] {
      if (add) {
        auto* old = b_.CreateAlignedLoad(memory_type_of(t), p, align);
        tag(old, i.buffer);
        v = sum(from_memory(old, t), v);
      }
      tag(b_.CreateAlignedStore(to_memory(v, t), p, align), i.buffer);
    };
    condition ? when(condition, store) : store();
  };
  const int w = lanes_.width;
  if (lanes_.var < 0 || (w == 1 && lanes_.parts == 1)) {
    scalar_store(lanes_.var < 0 ? scalar_index(i.index) : lane_index(i.index, 0), part(env_[i.args[0]], 0, 1),
                 conditional ? part(env_[i.args[1]], 0, 1) : nullptr);
    return;
  }
  LaneStride lane;
  lane.linear = split_linear(i.index, lanes_.var, lane.stride, lane.rest) && !depends_on_lanes(lane.rest);
  for (int p = 0; p < lanes_.parts; ++p) {
    Value* v = part(env_[i.args[0]], p, w);
    Value* mask = lanes_.masks[p];
    if (conditional) {
      Value* condition = part(env_[i.args[1]], p, w);
      mask = mask ? b_.CreateAnd(mask, condition) : condition;
    }
    Type* vector = memory_type_of(t, w);
    Value* pass = llvm::Constant::getNullValue(vector);
    if (lane.linear && lane.stride == 1) {
      Value* at = b_.CreateAdd(scalar_index(i.index), b_.getInt64(static_cast<int64_t>(p) * w));
      if (add) v = sum(from_memory(load_vector(i.buffer, at, mask, w), t), v);
      store_vector(i.buffer, at, to_memory(v, t), mask);
      continue;
    }
    Value* pointers = address(i.buffer, lane_index(i.index, p));
    if (!mask) mask = lane_mask(p, w);
    if (add) {  // lanes do not meet at one address here: shape_of made such nests one lane wide
      auto* old = b_.CreateMaskedGather(vector, pointers, align, mask, pass);
      tag(old, i.buffer);
      v = sum(from_memory(old, t), v);
    }
    tag(b_.CreateMaskedScatter(to_memory(v, t), pointers, align, mask), i.buffer);
  }
}

llvm::Value* Emitter::leading_mask(int64_t count, int width) {
  std::vector<llvm::Constant*> bits;
  for (int l = 0; l < width; ++l) bits.push_back(b_.getInt1(l < count));
  return llvm::ConstantVector::get(bits);
}

int64_t Emitter::valid_lanes(int p) const {
  return std::clamp<int64_t>(lanes_.valid - static_cast<int64_t>(p) * lanes_.width, 0, lanes_.width);
}

void Emitter::emit_indirect(ValueId id) {
  const Inst& i = nest_.insts[id];
  const Parts& source = env_[i.args[0]];
  Parts out;
  out.uniform = source.uniform;
  const int n = source.uniform ? 1 : lanes_.parts;
  for (int p = 0; p < n; ++p) {
    const int w = source.uniform ? 1 : lanes_.width;
    Value* v = cast(part(source, p, w), i.dtype, DType::Int64);
    const int open = shape_.open_constant[id];
    Value* size = open >= 0 ? splat(sizes_.at(open), w) : llvm::ConstantInt::get(v->getType(), i.imm);
    if (i.wrap) {
      Value* negative = b_.CreateICmpSLT(v, llvm::Constant::getNullValue(v->getType()));
      v = b_.CreateSelect(negative, b_.CreateAdd(v, size), v);
    }
    Value* bad = b_.CreateICmpUGE(v, size);
    if (w > 1) {
      if (lanes_.masks[p]) bad = b_.CreateAnd(bad, lanes_.masks[p]);
      bad = b_.CreateOrReduce(bad);
    }
    fail_if(bad, error_code(i.message));
    out.v.push_back(v);
  }
  indirect_[i.var] = out;
}

Emitter::Parts Emitter::emit_index_value(const Inst& i) {
  if (!depends_on_lanes(i.index)) return {{scalar_index(i.index)}, true};
  Parts out;
  out.uniform = false;
  for (int p = 0; p < lanes_.parts; ++p) out.v.push_back(lane_index(i.index, p));
  return out;
}

Emitter::Parts Emitter::emit_in_range(ValueId id) {
  const Inst& i = nest_.insts[id];
  const int open = shape_.open_constant[id];
  const Parts e = emit_index_value(i);
  Parts out;
  out.uniform = e.uniform;
  for (Value* v : e.v) {
    Type* type = v->getType();
    // lo <= v < hi as one unsigned comparison.
    Value *lo = b_.getInt64(i.imm), *count = b_.getInt64(i.imm2 - i.imm);
    if (open >= 0) lo = sizes_.at(open), count = b_.CreateSub(sizes_.at(open + 1), lo);
    const auto* vector = llvm::dyn_cast<llvm::FixedVectorType>(type);
    const int width = vector ? static_cast<int>(vector->getNumElements()) : 1;
    out.v.push_back(b_.CreateICmpULT(b_.CreateSub(v, splat(lo, width)), splat(count, width)));
  }
  return out;
}

}  // namespace kiln::codegen
