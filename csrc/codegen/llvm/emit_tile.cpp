#include <algorithm>

#include "base/error.h"
#include "codegen/llvm/emitter.h"

// Transposes: what runs along a loop of its own while the lanes run across is loaded and stored in rows, a tile of as
// many rows as a vector has lanes, and turned in registers. The body runs over the tile's columns in between; a tile
// waits for it on the stack, so that the code does not grow with the tile.
namespace kiln::codegen {

using loops::Inst;
using loops::Opcode;
using loops::Stage;
using loops::ValueId;

llvm::Value* Emitter::tile_row(ValueId id, int p, Value* row) {
  const int w = lanes_.width;
  Type* vector = memory_type_of(buffers_.at(nest_.insts[id].buffer).dtype, w);
  Value*& tile = tiles_[id];
  if (!tile) {
    // Other widths and parts than these do not meet in one kernel; its tails have fewer.
    const int most = *std::max_element(shape_.stage_unroll.begin(), shape_.stage_unroll.end());
    tile = stack_slot(llvm::ArrayType::get(vector, static_cast<uint64_t>(most) * w), "tile");
  }
  return b_.CreateGEP(vector, tile, b_.CreateAdd(row, b_.getInt64(static_cast<int64_t>(p) * w)));
}

std::vector<llvm::Value*> Emitter::transpose(std::vector<Value*> rows) {
  const int w = static_cast<int>(rows.size());
  const auto* type = llvm::cast<llvm::FixedVectorType>(rows[0]->getType());
  const int bytes = static_cast<int>(type->getScalarSizeInBits() / 8);
  const int e = std::min(w, 16 / bytes);  // elements of a 128-bit piece: what crosses pieces costs more
  const int pieces = w / e;
  // Within pieces, e rows at a time: pairs of rows half of them apart are zipped, log2(e) times.
  std::vector<int> low(w), high(w), even(w), odd(w);
  for (int q = 0; q < pieces; ++q)
    for (int k = 0; k < e; ++k) {
      low[q * e + k] = q * e + k / 2 + (k % 2 ? w : 0);
      high[q * e + k] = low[q * e + k] + e / 2;
      // Pieces of both operands, one after the other: those with even numbers, and those with odd ones.
      even[q * e + k] = 2 * q * e + k;
      odd[q * e + k] = even[q * e + k] + e;
    }
  std::vector<Value*> next(w);
  for (int round = 1; round < e; round *= 2) {
    for (int g = 0; g < w; g += e)
      for (int i = 0; i < e / 2; ++i) {
        next[g + 2 * i] = b_.CreateShuffleVector(rows[g + i], rows[g + i + e / 2], low);
        next[g + 2 * i + 1] = b_.CreateShuffleVector(rows[g + i], rows[g + i + e / 2], high);
      }
    rows.swap(next);
  }
  // Row j of each group now holds column j of every piece: the same for whole pieces, the other way round.
  for (int round = 1; round < pieces; round *= 2) {
    for (int j = 0; j < e; ++j)
      for (int i = 0; i < pieces / 2; ++i) {
        Value *a = rows[2 * i * e + j], *b = rows[(2 * i + 1) * e + j];
        next[i * e + j] = b_.CreateShuffleVector(a, b, even);
        next[(i + pieces / 2) * e + j] = b_.CreateShuffleVector(a, b, odd);
      }
    rows.swap(next);
  }
  return rows;
}

llvm::Value* Emitter::lane_at(Value* first, int64_t lane, Value* jump) {
  return b_.CreateAdd(first, b_.CreateMul(jump, b_.getInt64(lane)));
}

llvm::Function* Emitter::transposer(Type* vector) {
  llvm::Function*& f = transposers_[vector];
  if (f) return f;
  const auto* of = llvm::cast<llvm::FixedVectorType>(vector);
  Type *ptr = b_.getPtrTy(), *i64 = b_.getInt64Ty();
  auto* signature = llvm::FunctionType::get(b_.getVoidTy(), {ptr, i64, ptr, i64}, false);
  f = llvm::Function::Create(signature, llvm::Function::InternalLinkage, "transpose", module_);
  f->addFnAttrs(llvm::AttrBuilder(context_, fn_->getAttributes().getFnAttrs()));
  f->addFnAttr(llvm::Attribute::NoInline);
  const llvm::IRBuilderBase::InsertPointGuard back(b_);
  b_.SetInsertPoint(llvm::BasicBlock::Create(context_, "entry", f));
  const llvm::Align align(of->getScalarSizeInBits() / 8);
  const auto row = [&](Value* first, Value* stride, unsigned k) {
    return b_.CreateGEP(of->getElementType(), first, b_.CreateMul(stride, b_.getInt64(k)));
  };
  std::vector<Value*> rows;
  for (unsigned k = 0; k < of->getNumElements(); ++k)
    rows.push_back(b_.CreateAlignedLoad(vector, row(f->getArg(0), f->getArg(1), k), align));
  rows = transpose(std::move(rows));
  for (unsigned k = 0; k < of->getNumElements(); ++k)
    b_.CreateAlignedStore(rows[k], row(f->getArg(2), f->getArg(3), k), align);
  b_.CreateRetVoid();
  return f;
}

void Emitter::over_tile_rows(const Stage& s, int var, Value* first, int count) {
  loop(b_.getInt64(0), b_.getInt64(count), 1, false, [&](Value* k) {
    row_ = k;
    loop_values_[var] = b_.CreateAdd(first, k);
    emit_body(s);
  });
}

void Emitter::emit_tile(const Stage& s, int var, Value* first, int count) {
  const int w = lanes_.width;
  // `jump`: from one lane's element to the next one's.
  const auto for_each_part = [&](Opcode op, const std::function<void(ValueId, int, Type*, Value*, Value*)>& f) {
    for (ValueId id : s.body) {
      const Inst& i = nest_.insts[id];
      if (!shape_.crossing[id] || i.op != op) continue;
      loop_values_[var] = first;
      Value* at = scalar_index(i.index);
      Value* const base = lanes_.base;
      lanes_.base = b_.CreateAdd(base, b_.getInt64(1));
      Value* jump = b_.CreateSub(scalar_index(i.index), at);
      lanes_.base = base;
      for (int p = 0; p < lanes_.parts; ++p)
        f(id, p, memory_type_of(buffers_.at(i.buffer).dtype, w), lane_at(at, static_cast<int64_t>(p) * w, jump), jump);
    }
  };
  // Whole tiles of many shuffles: memory to stack and back by a function that all of them share.
  constexpr int kMany = 16;
  if (w >= kMany && count == w && valid_lanes(lanes_.parts - 1) == w) {
    for_each_part(Opcode::Load, [&](ValueId id, int p, Type* vector, Value* at, Value* jump) {
      Value* tile = tile_row(id, p, b_.getInt64(0));
      b_.CreateCall(transposer(vector), {address(nest_.insts[id].buffer, at), jump, tile, b_.getInt64(w)});
    });
    over_tile_rows(s, var, first, count);
    for_each_part(Opcode::Store, [&](ValueId id, int p, Type* vector, Value* at, Value* jump) {
      Value* tile = tile_row(id, p, b_.getInt64(0));
      b_.CreateCall(transposer(vector), {tile, b_.getInt64(w), address(nest_.insts[id].buffer, at), jump});
    });
    return;
  }
  Value* const run = count < w ? leading_mask(count, w) : nullptr;  // what of a row lies in the tile
  for_each_part(Opcode::Load, [&](ValueId id, int p, Type* vector, Value* at, Value* jump) {
    std::vector<Value*> rows(w, llvm::Constant::getNullValue(vector));
    for (int64_t l = 0; l < valid_lanes(p); ++l)
      rows[l] = load_vector(nest_.insts[id].buffer, lane_at(at, l, jump), run, w);
    const std::vector<Value*> columns = transpose(std::move(rows));
    for (int k = 0; k < count; ++k) b_.CreateStore(columns[k], tile_row(id, p, b_.getInt64(k)));
  });
  over_tile_rows(s, var, first, count);
  for_each_part(Opcode::Store, [&](ValueId id, int p, Type* vector, Value* at, Value* jump) {
    const loops::BufferId buffer = nest_.insts[id].buffer;
    std::vector<Value*> columns;
    for (int k = 0; k < count; ++k) columns.push_back(b_.CreateLoad(vector, tile_row(id, p, b_.getInt64(k))));
    // A few elements next to each other: the lanes fill each other's gaps, or this were no crossing access (shape_of).
    if (nest_.extents[var] == count && count < 4) return store_interleaved(buffer, at, columns, valid_lanes(p));
    columns.resize(w, llvm::Constant::getNullValue(vector));
    const std::vector<Value*> rows = transpose(std::move(columns));
    for (int64_t l = 0; l < valid_lanes(p); ++l) store_vector(buffer, lane_at(at, l, jump), rows[l], run);
  });
}

Emitter::Parts Emitter::load_from_tile(ValueId id) {
  const DType t = buffers_.at(nest_.insts[id].buffer).dtype;
  Parts out;
  out.uniform = false;
  for (int p = 0; p < lanes_.parts; ++p)
    out.v.push_back(from_memory(b_.CreateLoad(memory_type_of(t, lanes_.width), tile_row(id, p, row_)), t));
  return out;
}

void Emitter::store_to_tile(ValueId id) {
  const Inst& i = nest_.insts[id];
  for (int p = 0; p < lanes_.parts; ++p)
    b_.CreateStore(to_memory(part(env_[i.args[0]], p, lanes_.width), buffers_.at(i.buffer).dtype),
                   tile_row(id, p, row_));
}

}  // namespace kiln::codegen
