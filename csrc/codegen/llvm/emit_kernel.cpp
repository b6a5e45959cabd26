#include <limits>

#include "base/error.h"
#include "codegen/llvm/emitter.h"
#include "llvm/IR/MDBuilder.h"

// Loops and stages of a kernel: units, vector rounds with a masked remainder, reductions' begin and end.
namespace kiln::codegen {

using loops::Inst;
using loops::Opcode;
using loops::Stage;
using loops::ValueId;

Emitter::Emitter(llvm::Module& module, MathLibrary& math, const schedule::Kernel& kernel,
                 const std::vector<loops::Buffer>& buffers, const KernelShape& shape)
    : module_(module),
      context_(module.getContext()),
      b_(module.getContext()),
      math_(math),
      kernel_(kernel),
      nest_(kernel.nest),
      buffers_(buffers),
      shape_(shape) {}

void Emitter::emit(const std::string& symbol) {
  Type* ptr = b_.getPtrTy();
  Type* i64 = b_.getInt64Ty();
  auto* signature = llvm::FunctionType::get(b_.getInt32Ty(), {ptr, ptr, i64, i64, ptr}, false);
  fn_ = llvm::Function::Create(signature, llvm::Function::ExternalLinkage, symbol, module_);
  fn_->addFnAttr(llvm::Attribute::NoUnwind);
  for (unsigned a : {0u, 1u, 4u}) fn_->addParamAttr(a, llvm::Attribute::NoAlias);
  const int bits = shape_.simd_bits;
  fn_->addFnAttr("prefer-vector-width", std::to_string(bits >= 512 ? 512 : 256));
  fn_->addFnAttr("min-legal-vector-width", std::to_string(bits >= 512 ? 512 : 256));

  entry_ = llvm::BasicBlock::Create(context_, "entry", fn_);
  b_.SetInsertPoint(entry_);
  // Buffers never overlap: every access of one is disjoint from every access of the others.
  llvm::MDBuilder metadata(context_);
  llvm::MDNode* domain = metadata.createAnonymousAliasScopeDomain();
  std::vector<std::pair<loops::BufferId, llvm::MDNode*>> scopes;
  const auto add_pointer = [&](loops::BufferId id, Value* p, bool written) {
    pointers_[id] = p;
    written_[id] |= written;
    llvm::MDNode* scope = metadata.createAnonymousAliasScope(domain);
    scope_[id] = llvm::MDNode::get(context_, {scope});
    scopes.push_back({id, scope});
  };
  pointer_count_ = shape_.segmented ? kernel_.args.size() / kernel_.segments.size() : kernel_.args.size();
  for (size_t k = 0; k < pointer_count_; ++k) add_pointer(kernel_.args[k].buffer, nullptr, kernel_.args[k].written);
  if (!shape_.segmented) load_pointers(fn_->getArg(0));
  for (const auto& [id, offset] : shape_.scratch_offset)
    add_pointer(id, b_.CreateConstGEP1_64(b_.getInt8Ty(), fn_->getArg(4), offset), true);
  // But for the results in place, which lie in an input's memory.
  for (const schedule::KernelArg& a : kernel_.args)
    if (a.place >= 0) {
      const auto scope_of = [&](loops::BufferId id) {
        return std::find_if(scopes.begin(), scopes.end(), [&](const auto& s) { return s.first == id; });
      };
      scope_of(a.buffer)->second = scope_of(a.place)->second;
      scope_[a.buffer] = scope_[a.place];
      written_[a.place] = true;
    }
  for (const auto& [id, scope] : scopes) {
    std::vector<llvm::Metadata*> others;
    for (const auto& [other, s] : scopes)
      if (s != scope) others.push_back(s);
    noalias_[id] = others.empty() ? nullptr : llvm::MDNode::get(context_, others);
  }

  loop_values_.assign(nest_.extents.size(), nullptr);
  env_.assign(nest_.insts.size(), {});
  indirect_.assign(nest_.indirect_vars, {});
  if (shape_.segmented) {
    emit_segments();
  } else {
    for (size_t k = 0; k < shape_.args.size(); ++k) sizes_.push_back(argument(b_.getInt64(static_cast<int64_t>(k))));
    loop(fn_->getArg(2), fn_->getArg(3), 1, true, [&](Value* unit) { emit_unit(unit); });
  }
  b_.CreateRet(b_.getInt32(0));
}

void Emitter::load_pointers(Value* first) {
  for (size_t k = 0; k < pointer_count_; ++k) {
    const loops::BufferId id = kernel_.args[k].buffer;
    auto* p = b_.CreateLoad(b_.getPtrTy(), b_.CreateConstGEP1_64(b_.getPtrTy(), first, k), buffers_[id].name);
    p->setMetadata(llvm::LLVMContext::MD_invariant_load, llvm::MDNode::get(context_, {}));
    pointers_[id] = p;
  }
}

llvm::Value* Emitter::argument(Value* at) {
  Type* i64 = b_.getInt64Ty();
  auto* v = b_.CreateLoad(i64, b_.CreateGEP(i64, fn_->getArg(1), at));
  v->setMetadata(llvm::LLVMContext::MD_invariant_load, llvm::MDNode::get(context_, {}));
  return v;
}

llvm::Value* Emitter::smaller(Value* a, Value* b) { return b_.CreateSelect(b_.CreateICmpSLT(a, b), a, b); }

llvm::Value* Emitter::open_constant(ValueId id) {
  Value* bits = sizes_.at(shape_.open_constant[id]);
  Type* type = type_of(nest_.insts[id].dtype);
  if (type->isIntegerTy()) return b_.CreateTrunc(bits, type);
  return b_.CreateFPTrunc(b_.CreateBitCast(bits, b_.getDoubleTy()), type);
}

llvm::Value* Emitter::extent_of(int var) {
  return is_open(var) ? sizes_.at(shape_.open[var]) : b_.getInt64(nest_.extents[var]);
}

llvm::Value* Emitter::whole_of(int var, int64_t step) {
  const int64_t left = nest_.extents[var] % step;
  if (!is_open(var)) return b_.getInt64(nest_.extents[var] - left);
  Value* extent = extent_of(var);
  if (shape_.open_rest[var]) return b_.CreateAnd(extent, b_.getInt64(-step));
  return left ? b_.CreateSub(extent, b_.getInt64(left)) : extent;
}

void Emitter::emit_segments() {
  Type* i64 = b_.getInt64Ty();
  const auto first_unit = [&](Value* segment) { return argument(b_.CreateAdd(segment, b_.getInt64(1))); };
  Value* count = argument(b_.getInt64(0));
  Value* current = stack_slot(i64, "segment");
  b_.CreateStore(b_.getInt64(0), current);
  loop(fn_->getArg(2), fn_->getArg(3), 1, true, [&](Value* unit) {
    // Units come in order: move on to the segment that holds this one.
    auto* test = llvm::BasicBlock::Create(context_, "find", fn_);
    auto* step = llvm::BasicBlock::Create(context_, "next", fn_);
    auto* found = llvm::BasicBlock::Create(context_, "found", fn_);
    b_.CreateBr(test);
    b_.SetInsertPoint(test);
    Value* segment = b_.CreateLoad(i64, current);
    Value* next = b_.CreateAdd(segment, b_.getInt64(1));
    b_.CreateCondBr(b_.CreateICmpSGE(unit, first_unit(next)), step, found);
    b_.SetInsertPoint(step);
    b_.CreateStore(next, current);
    b_.CreateBr(test);
    b_.SetInsertPoint(found);
    load_pointers(b_.CreateGEP(b_.getPtrTy(), fn_->getArg(0),
                               b_.CreateMul(segment, b_.getInt64(static_cast<int64_t>(pointer_count_)))));
    if (nest_.outer.empty()) return emit_stages();
    Value* extent = argument(b_.CreateAdd(b_.CreateAdd(count, b_.getInt64(2)), segment));
    Value* lo = b_.CreateMul(b_.CreateSub(unit, first_unit(segment)), b_.getInt64(shape_.block));
    Value* hi = b_.CreateAdd(lo, b_.getInt64(shape_.block));
    hi = smaller(hi, extent);
    const int width = shape_.width;
    Value* rest = b_.CreateAnd(b_.CreateSub(hi, lo), b_.getInt64(width - 1));
    Value* whole = b_.CreateSub(hi, rest);
    loop(lo, whole, width, true, [&](Value* i) {
      set_lanes(shape_.lane_var, width, 1, i, width);
      emit_stages();
    });
    when(b_.CreateICmpNE(rest, b_.getInt64(0)), [&] {
      set_leading_lanes(shape_.lane_var, width, whole, rest);
      emit_stages();
    });
    lanes_ = {};
  });
}

llvm::Value* Emitter::stack_slot(Type* t, const char* name) {
  llvm::IRBuilder<> at(entry_, entry_->begin());
  return at.CreateAlloca(t, nullptr, name);
}

llvm::Value* Emitter::constant_in_memory(Value* c) {
  Value*& slot = constants_in_memory_[c];
  if (!slot) {
    llvm::IRBuilder<> at(entry_, entry_->begin());
    slot = at.CreateAlloca(c->getType(), nullptr, "outside");
    at.CreateStore(c, slot);
  }
  return slot;
}

void Emitter::loop(Value* lo, Value* hi, int64_t step, bool may_be_empty, const std::function<void(Value*)>& body) {
  auto* head = llvm::BasicBlock::Create(context_, "loop", fn_);
  auto* exit = llvm::BasicBlock::Create(context_, "done", fn_);
  llvm::BasicBlock* before = b_.GetInsertBlock();
  if (may_be_empty)
    b_.CreateCondBr(b_.CreateICmpSLT(lo, hi), head, exit);
  else
    b_.CreateBr(head);
  b_.SetInsertPoint(head);
  llvm::PHINode* i = b_.CreatePHI(b_.getInt64Ty(), 2);
  i->addIncoming(lo, before);
  body(i);
  Value* next = b_.CreateAdd(i, b_.getInt64(step), "", true, true);
  i->addIncoming(next, b_.GetInsertBlock());
  b_.CreateCondBr(b_.CreateICmpSLT(next, hi), head, exit);
  exit->moveAfter(b_.GetInsertBlock());
  b_.SetInsertPoint(exit);
}

void Emitter::when(Value* condition, const std::function<void()>& body) {
  auto* then = llvm::BasicBlock::Create(context_, "then", fn_);
  auto* after = llvm::BasicBlock::Create(context_, "after", fn_);
  b_.CreateCondBr(condition, then, after);
  b_.SetInsertPoint(then);
  body();
  b_.CreateBr(after);
  after->moveAfter(b_.GetInsertBlock());
  b_.SetInsertPoint(after);
}

void Emitter::nested(const std::vector<int>& vars, size_t at, const std::function<void()>& body) {
  if (at == vars.size()) return body();
  const int v = vars[at];
  if (nest_.extents[v] == 1) {
    loop_values_[v] = b_.getInt64(0);
    return nested(vars, at + 1, body);
  }
  loop(b_.getInt64(0), extent_of(v), 1, false, [&](Value* i) {
    loop_values_[v] = i;
    nested(vars, at + 1, body);
  });
}

llvm::Value* Emitter::take_digit(Value*& rest, Value* n) {
  // Some processors take three times as long to divide 64 bits; a constant costs them nothing.
  const bool narrow = shape_.units <= std::numeric_limits<int32_t>::max() && !llvm::isa<llvm::Constant>(n);
  Type* type = narrow ? b_.getInt32Ty() : b_.getInt64Ty();
  Value *a = b_.CreateTrunc(rest, type), *d = b_.CreateTrunc(n, type);
  rest = b_.CreateZExt(b_.CreateUDiv(a, d), b_.getInt64Ty());
  return b_.CreateZExt(b_.CreateURem(a, d), b_.getInt64Ty());
}

void Emitter::emit_unit(Value* unit) {
  Value* rest = unit;
  // `open`: where among the arguments the count is. One code then serves any number, and finds the digit where there is
  // but one, too.
  const auto digit = [&](int64_t count, int open) -> Value* {
    if (count <= 1 && open < 0) return b_.getInt64(0);
    return take_digit(rest, open >= 0 ? sizes_[open] : b_.getInt64(count));
  };
  Value* block = digit(shape_.blocks, shape_.open_blocks);
  cross_unit_ = digit(shape_.cross_blocks, shape_.open_cross_blocks);
  Value* row_unit = digit(shape_.row_blocks, shape_.open_row_blocks);
  const std::vector<int>& vars = shape_.unit_vars;
  for (size_t k = vars.size(); k-- > 0;) {
    const int64_t extent = nest_.extents[vars[k]];
    if (extent <= 1) {
      loop_values_[vars[k]] = b_.getInt64(0);
      continue;
    }
    bool last = true;  // the outermost variable longer than one needs no remainder
    for (size_t j = 0; j < k; ++j) last &= nest_.extents[vars[j]] <= 1;
    loop_values_[vars[k]] = last ? rest : take_digit(rest, extent_of(vars[k]));
  }
  if (shape_.lane_var < 0) return emit_stages();
  const auto rows = [&] { nested(shape_.inner_vars, 0, [&] { emit_columns(block); }); };
  if (shape_.row_var < 0) return rows();
  over_block(
      row_unit, shape_.row_var, shape_.row_blocks, shape_.row_block, 1,
      [&](Value* row) {
        loop_values_[shape_.row_var] = row;
        rows();
      },
      nullptr);
}

void Emitter::set_lanes(int var, int width, int parts, Value* base, int64_t valid_lanes) {
  lanes_.var = var;
  lanes_.width = width;
  lanes_.parts = parts;
  lanes_.base = base;
  lanes_.valid = valid_lanes;
  lanes_.masks.assign(parts, nullptr);
  for (int p = 0; p < parts; ++p) {
    const int64_t valid = valid_lanes - static_cast<int64_t>(p) * width;
    if (valid >= width) continue;
    lanes_.masks[p] = width == 1 ? b_.getInt1(valid > 0) : leading_mask(valid, width);
  }
}

void Emitter::set_leading_lanes(int var, int width, Value* base, Value* count) {
  set_lanes(var, width, 1, base, width);
  if (width == 1) return;
  std::vector<llvm::Constant*> iota;
  for (int l = 0; l < width; ++l) iota.push_back(b_.getInt64(l));
  lanes_.masks[0] = b_.CreateICmpULT(llvm::ConstantVector::get(iota), splat(count, width));
}

void Emitter::over_rest(int var, int width, Value* whole, const std::function<void()>& body) {
  Value* extent = extent_of(var);
  // There is something left wherever this code runs.
  loop(whole, extent, width, false, [&](Value* i) {
    set_leading_lanes(var, width, i, b_.CreateSub(extent, i));
    body();
  });
}

void Emitter::over_lanes(int var, int width, int unroll, int64_t strip, const std::function<void()>& body,
                         const std::function<void()>& after_strip) {
  const int64_t step = static_cast<int64_t>(width) * unroll;
  const int64_t left = nest_.extents[var] % step, rounds = nest_.extents[var] / step;
  Value* whole = whole_of(var, step);
  const Lanes before = lanes_;
  const auto round = [&](Value* i) {
    set_lanes(var, width, unroll, i, step);
    body();
  };
  if (rounds == 1) {
    round(b_.getInt64(0));
  } else if (rounds > 0 && (strip <= 0 || rounds <= strip)) {
    loop(b_.getInt64(0), whole, step, false, round);
  } else if (rounds > 0) {
    // Strips: the first level of accumulators is added to the second after each.
    loop(b_.getInt64(0), whole, strip * step, false, [&](Value* start) {
      Value* end = b_.CreateAdd(start, b_.getInt64(strip * step));
      loop(start, smaller(end, whole), step, false, round);
      if (after_strip) after_strip();
    });
  }
  if (shape_.open_rest[var]) {
    over_rest(var, width, whole, body);
  } else if (left) {
    set_lanes(var, width, static_cast<int>((left + width - 1) / width), whole, left);
    body();
  }
  lanes_ = before;
}

void Emitter::over_overlapping(Value* lo, Value* end, Value* extent, int64_t step,
                               const std::function<void(Value*)>& round) {
  Value* last = b_.CreateSub(extent, b_.getInt64(step));
  loop(lo, end, step, false, [&](Value* i) { round(smaller(i, last)); });
}

void Emitter::over_block(Value* block, int var, int64_t blocks, int64_t block_size, int64_t step,
                         const std::function<void(Value*)>& round, const std::function<void(Value*, int64_t)>& tail) {
  if (shape_.overlaps[var]) {
    Value *lo = b_.CreateMul(block, b_.getInt64(block_size)), *extent = extent_of(var);
    Value* end = b_.CreateAdd(lo, b_.getInt64(block_size));
    return over_overlapping(lo, smaller(end, extent), extent, step, round);
  }
  const int64_t extent = nest_.extents[var], left = extent % step;
  Value* whole = whole_of(var, step);
  if (blocks <= 1 && !is_open(var)) {
    if (left < extent) loop(b_.getInt64(0), whole, step, false, round);
    if (left) tail(whole, left);
    return;
  }
  Value* lo = b_.CreateMul(block, b_.getInt64(block_size));
  Value* end = b_.CreateAdd(lo, b_.getInt64(block_size));
  loop(lo, smaller(end, whole), step, true, round);
  if (left) when(b_.CreateICmpSGT(end, whole), [&] { tail(whole, left); });
}

void Emitter::emit_columns(Value* block) {
  const int width = shape_.stage_width.empty() ? shape_.width : shape_.stage_width[0];
  const int unroll = shape_.stage_unroll.empty() ? 1 : shape_.stage_unroll[0];
  if (shape_.blocks <= 1 && !is_open(shape_.lane_var) && !shape_.overlaps[shape_.lane_var])
    return over_lanes(shape_.lane_var, width, unroll, 0, [&] { emit_stages(); }, nullptr);
  // Blocks are whole rounds; the last one takes what is left, and the masked remainder.
  const int64_t step = static_cast<int64_t>(width) * unroll;
  const auto round = [&](Value* i) {
    set_lanes(shape_.lane_var, width, unroll, i, step);
    emit_stages();
  };
  over_block(block, shape_.lane_var, shape_.blocks, shape_.block, step, round, [&](Value* whole, int64_t left) {
    if (shape_.open_rest[shape_.lane_var]) return over_rest(shape_.lane_var, width, whole, [&] { emit_stages(); });
    const int parts = static_cast<int>((left + width - 1) / width);
    set_lanes(shape_.lane_var, width, parts, whole, left);
    emit_stages();
  });
  lanes_ = {};
}

void Emitter::emit_stages() {
  for (size_t k = 0; k < nest_.stages.size(); ++k) {
    const Stage& s = nest_.stages[k];
    if (s.vars.empty()) {
      // Reductions over loops of one round were left without their loops.
      const bool columns = shape_.lane_var >= 0;
      begin_reductions(s, columns ? lanes_.width : 1, columns ? lanes_.parts : 1, 0);
      if (const int cross = shape_.stage_cross[k]; cross >= 0)
        over_block(
            cross_unit_, cross, shape_.cross_blocks, shape_.cross_block, lanes_.width,
            [&](Value* i) { emit_tile(s, cross, i, lanes_.width); },
            [&](Value* whole, int64_t left) { emit_tile(s, cross, whole, static_cast<int>(left)); });
      else
        emit_body(s);
      finish_reductions(s, columns);
    } else if (shape_.lane_var >= 0)
      emit_column_stage(s, k);
    else
      emit_row_stage(s, k);
  }
}

void Emitter::in_strips(size_t stage, const std::function<void(bool)>& body) {
  const std::vector<int>& all = nest_.stages[stage].vars;
  const std::vector<int> vars(all.begin(), all.end() - 1);
  const bool cascade = shape_.stage_levels[stage] > 0;
  const Strips strips = strips_of(nest_, shape_, stage);
  if (!cascade || strips.at < 0) return nested(vars, 0, [&] { body(cascade && strips.within); });
  const std::vector<int> outside(vars.begin(), vars.begin() + strips.at),
      inside(vars.begin() + strips.at + 1, vars.end());
  Value* extent = extent_of(vars[strips.at]);
  nested(outside, 0, [&] {
    loop(b_.getInt64(0), extent, strips.length, false, [&](Value* start) {
      Value* end = b_.CreateAdd(start, b_.getInt64(strips.length));
      end = smaller(end, extent);
      loop(start, end, 1, false, [&](Value* i) {
        loop_values_[vars[strips.at]] = i;
        nested(inside, 0, [&] { body(false); });
      });
      flush_cascade();
    });
  });
}

void Emitter::emit_row_stage(const Stage& s, size_t k) {
  const int width = shape_.stage_width[k], unroll = shape_.stage_unroll[k];
  begin_reductions(s, width, unroll, shape_.stage_levels[k]);
  if (nest_.stage_size(s) > 0) {
    in_strips(k, [&](bool strips) {
      for (ValueId id : s.body)
        if (nest_.insts[id].op == Opcode::Scan) begin_reductions({{}, {id}}, 1, 1, 0);
      over_lanes(s.vars.back(), width, unroll, strips ? kStrip : 0, [&] { emit_body(s); }, [&] { flush_cascade(); });
      if (strips) flush_cascade();
    });
  }
  finish_reductions(s, false);
}

void Emitter::emit_column_stage(const Stage& s, size_t k) {
  const int64_t extent = nest_.extents[s.vars.back()];
  begin_reductions(s, lanes_.width, lanes_.parts, shape_.stage_levels[k]);
  if (nest_.stage_size(s) > 0) {
    const int cross = shape_.stage_cross[k];
    const int step = cross >= 0 ? lanes_.width : 1;
    in_strips(k, [&](bool strips) {
      for (ValueId id : s.body)
        if (nest_.insts[id].op == Opcode::Scan) begin_reductions({{}, {id}}, lanes_.width, lanes_.parts, 0);
      const int64_t left = extent % step;
      Value* whole = whole_of(s.vars.back(), step);
      const auto round = [&](Value* i) {
        if (cross >= 0) return emit_tile(s, cross, i, step);
        loop_values_[s.vars.back()] = i;
        emit_body(s);
      };
      if (cross >= 0 && shape_.overlaps[cross])
        return over_overlapping(b_.getInt64(0), extent_of(cross), extent_of(cross), step, round);
      if (!strips && left < extent)
        loop(b_.getInt64(0), whole, step, false, round);
      else if (strips)
        loop(b_.getInt64(0), whole, kStrip, false, [&](Value* start) {
          Value* end = b_.CreateAdd(start, b_.getInt64(kStrip));
          loop(start, smaller(end, whole), step, false, round);
          flush_cascade();
        });
      if (left) emit_tile(s, cross, whole, static_cast<int>(left));
      if (strips && left) flush_cascade();
    });
  }
  finish_reductions(s, true);
}

void Emitter::emit_body(const Stage& s) {
  woven_ = woven_stores(s);
  for (ValueId id : s.body) emit_inst(id);
}

void Emitter::emit_inst(ValueId id) {
  const Inst& i = nest_.insts[id];
  switch (i.op) {
    case Opcode::ConstInt:
    case Opcode::ConstFloat:
      env_[id] = {{shape_.open_constant[id] >= 0 ? open_constant(id) : constant(i.dtype, i)}, true};
      break;
    case Opcode::IndexValue:
      env_[id] = emit_index_value(i);
      break;
    case Opcode::InRange:
      env_[id] = emit_in_range(id);
      break;
    case Opcode::Load:
    case Opcode::MaskedLoad:
      env_[id] = shape_.crossing[id] ? load_from_tile(id) : emit_load(i);
      break;
    case Opcode::Store:
      if (shape_.crossing[id])
        store_to_tile(id);
      else if (const auto woven = woven_.find(id); woven != woven_.end())
        store_woven(woven->second);
      else
        emit_store(i);
      break;
    case Opcode::Indirect:
      emit_indirect(id);
      break;
    case Opcode::Reduce:
    case Opcode::Scan:
      emit_reduce_step(id);
      break;
    case Opcode::Project: {
      const auto it = reduced_.find(i.args[0]);
      // Inside the reduction's own stage there is no result yet; finish_reductions fills it in.
      if (it != reduced_.end()) env_[id] = it->second.at(i.imm);
      break;
    }
    case Opcode::Cast: {
      const DType from = nest_.insts[i.args[0]].dtype;
      env_[id] = map(i.args, [&](const std::vector<Value*>& a) { return cast(a[0], from, i.dtype); });
      break;
    }
    case Opcode::Bitcast:
      env_[id] = map(i.args, [&](const std::vector<Value*>& a) {
        const auto* v = llvm::dyn_cast<llvm::FixedVectorType>(a[0]->getType());
        return b_.CreateBitCast(a[0], type_of(i.dtype, v ? v->getNumElements() : 1));
      });
      break;
    case Opcode::Where:
      env_[id] = map(i.args, [&](const std::vector<Value*>& a) { return b_.CreateSelect(a[0], a[1], a[2]); });
      break;
    default: {
      const DType t = nest_.insts[i.args[0]].dtype;
      int p = 0;
      env_[id] = map(i.args, [&](const std::vector<Value*>& a) {
        if (is_integral(t) && loops::divides(i.op)) check_divisor(a[1], p++);
        return scalar_op(i, t, a);
      });
    }
  }
}

}  // namespace kiln::codegen
