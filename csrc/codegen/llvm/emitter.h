#pragma once
#include <functional>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "codegen/common/shape.h"
#include "llvm/IR/IRBuilder.h"
#include "llvm/IR/Module.h"
#include "loops/loops.h"
#include "schedule/schedule.h"

// Emits one kernel as LLVM IR, explicitly vectorized. A value is either uniform over the lanes (one scalar) or has
// `unroll` parts of `width` lanes each; arithmetic on uniform values stays scalar.
namespace kiln::codegen {

/// Vector math of the host process: decides which function computes an opcode, and remembers what the code calls.
class MathLibrary {
 public:
  explicit MathLibrary(std::function<void*(const std::string&)> resolve) : resolve_(std::move(resolve)) {}
  /// Whether there is such a function: one of the C library's by the name kiln_libm_<name>, or the resolver's. Found
  /// ones become externals of the code.
  bool find(const std::string& name);
  std::vector<std::pair<std::string, void*>> externals() const;

 private:
  std::function<void*(const std::string&)> resolve_;
  std::unordered_map<std::string, void*> known_;
};

class Emitter {
 public:
  Emitter(llvm::Module& module, MathLibrary& math, const schedule::Kernel& kernel,
          const std::vector<loops::Buffer>& buffers, const KernelShape& shape);
  void emit(const std::string& symbol);

 private:
  using Value = llvm::Value;
  using Type = llvm::Type;
  using Expr = symbolic::Expr;
  struct Parts {
    std::vector<Value*> v;  // one entry: uniform, if `uniform`; else one vector a part
    bool uniform = true;
  };
  /// Where the emission is: the vector variable, its first lane, and the mask of each part (null: all lanes).
  struct Lanes {
    int var = -1;  // loop variable over lanes; -1: none, everything is scalar
    int width = 1;
    int parts = 1;
    Value* base = nullptr;  // value of `var` in lane 0 of part 0
    int64_t valid = 1;      // lanes of all parts that the masks let through
    std::vector<Value*> masks;
  };

  // emit_kernel.cpp: loops and stages
  void emit_unit(Value* unit);
  /// The last digit of `rest` to base n; leaves the others in it.
  Value* take_digit(Value*& rest, Value* n);
  void emit_columns(Value* block);
  void emit_segments();
  Value* argument(Value* at);  // KernelShape::args[at]
  Value* open_constant(loops::ValueId id);
  Value* smaller(Value* a, Value* b);  // of two i64
  bool is_open(int var) const { return shape_.open[var] >= 0; }
  Value* extent_of(int var);
  /// A variable's extent without what is left after whole rounds of `step`.
  Value* whole_of(int var, int64_t step);
  void load_pointers(Value* first);
  void emit_stages();
  void emit_row_stage(const loops::Stage& s, size_t stage_index);
  void emit_column_stage(const loops::Stage& s, size_t stage_index);
  void emit_body(const loops::Stage& s);
  void emit_inst(loops::ValueId id);
  void loop(Value* lo, Value* hi, int64_t step, bool may_be_empty, const std::function<void(Value*)>& body);
  /// Runs body where the condition, a single bit, holds.
  void when(Value* condition, const std::function<void()>& body);
  void nested(const std::vector<int>& vars, size_t at, const std::function<void()>& body);
  /// The outer loops of a stage; `body` is its innermost one. Where sums cascade, the accumulators go to their second
  /// level after about a strip of rounds: here, or within the body, which is told so.
  void in_strips(size_t stage, const std::function<void(bool)>& body);
  /// Runs body over all of the lane variable in vectors, the remainder in a masked last round.
  void over_lanes(int var, int width, int unroll, int64_t strip, const std::function<void()>& body,
                  const std::function<void()>& after_strip);
  /// One block's share of a variable's elements: whole rounds of `step`, and in the last block what is left: where, and
  /// how much.
  void over_block(Value* block, int var, int64_t blocks, int64_t block_size, int64_t step,
                  const std::function<void(Value*)>& round, const std::function<void(Value*, int64_t)>& tail);
  /// Of a variable that overlaps (KernelShape::overlaps), from `lo` to `end`.
  void over_overlapping(Value* lo, Value* end, Value* extent, int64_t step, const std::function<void(Value*)>& round);
  /// Of a variable whose rest is open (KernelShape::open_rest): a vector at a time from `whole` to its end.
  void over_rest(int var, int width, Value* whole, const std::function<void()>& body);
  void set_lanes(int var, int width, int parts, Value* base, int64_t valid_lanes);
  /// One vector from `base` on, of which the first `count` lanes are there, which may be all.
  void set_leading_lanes(int var, int width, Value* base, Value* count);

  // emit_ops.cpp
  Type* type_of(DType t, int width = 1) const;
  Type* memory_type_of(DType t, int width = 1) const;
  Value* splat(Value* v, int width);
  Value* part(const Parts& p, int i, int width);
  Parts map(const loops::Operands& args, const std::function<Value*(const std::vector<Value*>&)>& f);
  Value* scalar_op(const loops::Inst& i, DType t, const std::vector<Value*>& a);
  Value* integer_op(loops::Opcode op, DType t, const std::vector<Value*>& a);
  Value* float_op(loops::Opcode op, DType t, const std::vector<Value*>& a);
  Value* compare(loops::Opcode op, DType t, Value* a, Value* b);
  Value* cast(Value* v, DType from, DType to);
  Value* constant(DType t, const loops::Inst& i);
  Value* fconst(Type* t, double v);
  Value* round_to_bf16(Value* v);
  void check_divisor(Value* divisor, int part_index);
  Value* safe_integer_divide(loops::Opcode op, DType t, Value* a, Value* b);
  int error_code(const std::string& message);
  void fail_if(Value* any, int code);

  // math.cpp
  Value* call_math(loops::Opcode op, DType t, const std::vector<Value*>& a);
  /// Written out in vector code; null where the host has no fused multiply-add or there is no such form.
  Value* inline_math(loops::Opcode op, DType t, Value* x);
  Value* exp_f32(Value* x);
  Value* tanh_f32(Value* x);
  Value* erf_f32(Value* x);
  Value* log_f32(Value* x);
  Value* fma(Value* a, Value* b, Value* c);  // a * b + c, rounded once
  Value* polynomial(Value* x, std::initializer_list<double> highest_first);
  Value* call_vector(const std::string& name, const std::string& suffix, DType t, const std::vector<Value*>& a);

  // emit_memory.cpp
  Value* scalar_index(const Expr& e);
  Value* lane_index(const Expr& e, int part_index);
  bool depends_on_lanes(const Expr& e) const;
  Value* address(loops::BufferId b, Value* index);
  /// A vector of elements of `b` that begin at `at`; null mask: all lanes.
  Value* load_vector(loops::BufferId b, Value* at, Value* mask, int width);
  void store_vector(loops::BufferId b, Value* at, Value* v, Value* mask);
  Parts emit_load(const loops::Inst& i);
  /// How far each lane's index is from the first lane's, if that is the same for all vectors.
  std::optional<std::vector<int64_t>> lane_offsets(const Expr& e) const;
  /// Elements of `b` at `at` + each of `offsets`; null mask: all lanes. Where lanes share an element, the first of them
  /// must be one that the mask lets through, or none.
  Value* load_lanes(loops::BufferId b, Value* at, const std::vector<int64_t>& offsets, Value* mask);
  void emit_store(const loops::Inst& i);
  /// Stores of a stage that fill the gaps of each other's steps, in the order of their addresses, under the last of
  /// them in the body; the others have an empty list.
  std::unordered_map<loops::ValueId, std::vector<loops::ValueId>> woven_stores(const loops::Stage& s) const;
  void store_woven(const std::vector<loops::ValueId>& stores);
  void store_interleaved(loops::BufferId b, Value* at, const std::vector<Value*>& columns, int64_t valid);
  /// Lanes of a part that the masks let through.
  int64_t valid_lanes(int part_index) const;
  Value* leading_mask(int64_t count, int width);
  void emit_indirect(loops::ValueId id);
  Parts emit_in_range(loops::ValueId id);
  Parts emit_index_value(const loops::Inst& i);
  Value* from_memory(Value* v, DType t);
  Value* to_memory(Value* v, DType t);
  void tag(llvm::Instruction* i, loops::BufferId b);
  Value* lane_mask(int part_index, int width);

  // emit_tile.cpp: accesses that run along another variable than the lanes (KernelShape::crossing)
  /// The stage's body for `count` values of `var`, at most a vector's width, from `first`.
  void emit_tile(const loops::Stage& s, int var, Value* first, int count);
  /// Where a lane's element is, of lanes that are `jump` elements apart.
  Value* lane_at(Value* first, int64_t lane, Value* jump);
  /// A function of (from, distance of its rows, to, distance of its rows), in elements: as many rows as a row has
  /// elements become columns.
  llvm::Function* transposer(Type* row);
  void over_tile_rows(const loops::Stage& s, int var, Value* first, int count);
  Parts load_from_tile(loops::ValueId id);
  void store_to_tile(loops::ValueId id);
  /// Element j of vector i of the result is element i of vector j.
  std::vector<Value*> transpose(std::vector<Value*> rows);
  Value* tile_row(loops::ValueId id, int part_index, Value* row);

  // emit_reduce.cpp
  std::vector<Value*> identity(const loops::Inst& i, int width);
  std::vector<Value*> combine(const loops::Inst& i, const std::vector<Value*>& a, const std::vector<Value*>& b);
  /// `acc` with one element (the operands) more. `reciprocal`, of the count, may stand in from an accumulator that has
  /// as many elements; null: it is computed, and left there.
  std::vector<Value*> accumulate(const loops::Inst& i, const std::vector<Value*>& acc, const std::vector<Value*>& x,
                                 Value*& reciprocal);
  /// The accumulators of two Welford reductions as one, counted from the first element of `a`.
  std::vector<Value*> append(const loops::Inst& i, const std::vector<Value*>& a, const std::vector<Value*>& b);
  /// The accumulator of a Welford reduction as (mean, m2, count).
  std::vector<Value*> absolute(const std::vector<Value*>& acc);
  /// Accumulators of a stage's reductions, at their identities; sums and Welford's get `levels` further levels.
  void begin_reductions(const loops::Stage& s, int width, int unroll, int levels);
  void emit_reduce_step(loops::ValueId id);
  /// At the end of a strip: adds the accumulators to the second level, and each level that is a strip long to the next.
  void flush_cascade();
  void flush_level(size_t level);
  size_t cascade_levels() const;
  void finish_reductions(const loops::Stage& s, bool lanes_are_results);
  std::vector<Type*> accumulator_types(const loops::Inst& i, int width) const;

  struct Accumulator {
    using Slots = std::vector<std::vector<Value*>>;  // [part][component]: stack slots
    Slots slots;
    std::vector<Slots> levels;  // the cascade's further levels, each of which adds up strips of the one before
  };

  llvm::Module& module_;
  llvm::LLVMContext& context_;
  llvm::IRBuilder<> b_;
  MathLibrary& math_;
  const schedule::Kernel& kernel_;
  const loops::Nest& nest_;
  const std::vector<loops::Buffer>& buffers_;
  const KernelShape& shape_;
  llvm::Function* fn_ = nullptr;
  llvm::BasicBlock* entry_ = nullptr;
  size_t pointer_count_ = 0;  // buffers of one segment
  std::unordered_map<loops::BufferId, Value*> pointers_;
  std::unordered_map<loops::BufferId, bool> written_;
  std::unordered_map<loops::BufferId, llvm::MDNode*> scope_, noalias_;
  std::vector<Value*> sizes_;        // per argument of a kernel without segments: its value
  std::vector<Value*> loop_values_;  // per loop variable: its scalar value (of the vector variable: unused)
  std::vector<Parts> env_;           // per instruction
  std::vector<Parts> indirect_;      // per indirect variable, as i64
  std::unordered_map<loops::ValueId, Accumulator> accumulators_;
  std::unordered_map<loops::ValueId, std::vector<Parts>> reduced_;
  std::unordered_map<int, llvm::BasicBlock*> error_blocks_;
  Lanes lanes_;
  Value* strips_ = nullptr;      // stack slot: how many strips have ended, where a cascade has more than one level
  Value* cross_unit_ = nullptr;  // pointwise kernel in tiles: its block of the crossing variable
  Value* row_ = nullptr;         // row of the tile that the body is at
  std::unordered_map<loops::ValueId, std::vector<loops::ValueId>> woven_;  // of the body that is emitted
  std::unordered_map<Type*, llvm::Function*> transposers_;
  std::unordered_map<loops::ValueId, Value*> tiles_;  // per crossing access: its tile, on the stack
  llvm::Value* stack_slot(Type* t, const char* name);
  /// A place on the stack that holds `c`, a constant, all the time.
  llvm::Value* constant_in_memory(Value* c);
  std::unordered_map<Value*, Value*> constants_in_memory_;
};

}  // namespace kiln::codegen
