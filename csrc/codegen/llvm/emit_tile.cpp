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

void Emitter::emit_tile(const Stage& s, int var, Value* first, int count) {
  const int w = lanes_.width;
  const auto for_each_part = [&](Opcode op, const std::function<void(ValueId, int, Type*, Value*, int64_t)>& f) {
    for (ValueId id : s.body) {
      const Inst& i = nest_.insts[id];
      if (!shape_.crossing[id] || i.op != op) continue;
      int64_t jump = 0;
      Expr rest;
      split_linear(i.index, lanes_.var, jump, rest);
      loop_values_[var] = first;
      Value* at = scalar_index(i.index);
      for (int p = 0; p < lanes_.parts; ++p)
        f(id, p, memory_type_of(buffers_.at(i.buffer).dtype, w),
          b_.CreateAdd(at, b_.getInt64(static_cast<int64_t>(p) * w * jump)), jump);
    }
  };
  Value* const run = count < w ? leading_mask(count, w) : nullptr;  // what of a row lies in the tile
  for_each_part(Opcode::Load, [&](ValueId id, int p, Type* vector, Value* at, int64_t jump) {
    std::vector<Value*> rows(w, llvm::Constant::getNullValue(vector));
    for (int64_t l = 0; l < valid_lanes(p); ++l)
      rows[l] = load_vector(nest_.insts[id].buffer, b_.CreateAdd(at, b_.getInt64(l * jump)), run, w);
    const std::vector<Value*> columns = transpose(std::move(rows));
    for (int k = 0; k < count; ++k) b_.CreateStore(columns[k], tile_row(id, p, b_.getInt64(k)));
  });
  loop(b_.getInt64(0), b_.getInt64(count), 1, false, [&](Value* k) {
    row_ = k;
    loop_values_[var] = b_.CreateAdd(first, k);
    emit_body(s);
  });
  for_each_part(Opcode::Store, [&](ValueId id, int p, Type* vector, Value* at, int64_t jump) {
    const loops::BufferId buffer = nest_.insts[id].buffer;
    std::vector<Value*> columns;
    for (int k = 0; k < count; ++k) columns.push_back(b_.CreateLoad(vector, tile_row(id, p, b_.getInt64(k))));
    if (jump == count && count < 4) return store_interleaved(buffer, at, columns, valid_lanes(p));
    columns.resize(w, llvm::Constant::getNullValue(vector));
    const std::vector<Value*> rows = transpose(std::move(columns));
    for (int64_t l = 0; l < valid_lanes(p); ++l)
      store_vector(buffer, b_.CreateAdd(at, b_.getInt64(l * jump)), rows[l], run);
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
