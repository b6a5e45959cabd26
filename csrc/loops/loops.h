#pragma once
#include <boost/container/static_vector.hpp>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/dtype.h"
#include "symbolic/expr.h"

// The loop-level IR. A Program is what lowering leaves of a graph: buffers, and in order either loop nests or library
// calls. A Nest is an outer domain of loop variables and a list of stages run for each point of it; a stage has its own
// inner loop variables (none: it runs once per outer point) and a body of scalar instructions in SSA form. A reduction
// is an instruction of a stage with inner variables whose result later stages read. Lowering makes nests of one or two
// stages; the scheduler makes larger ones of the same form; the emitters and the interpreter take any.
namespace kiln::loops {

using symbolic::Expr;
using BufferId = int32_t;
using ValueId = int32_t;

/// Input: has contents before, may be written too (an in-place change). Output: contents matter afterwards.
/// Temp: private to the program, may vanish. Const: an Input that never changes between calls.
/// Scratch: private to one nest and to one point of its outer domain (made by the scheduler only).
enum class BufferKind : uint8_t { Input, Output, Temp, Const, Scratch };

/// Memory that index expressions address by element. One storage is one buffer: two buffers never overlap.
struct Buffer {
  std::string name;
  DType dtype = DType::Float32;
  int64_t numel = 0;
  BufferKind kind = BufferKind::Temp;
  bool operator==(const Buffer&) const = default;
};

enum class Opcode : uint8_t {
#define KILN_OPCODE(name, arity, cls, help) name,
#include "loops/opcodes.def"
#undef KILN_OPCODE
  ConstInt,    // imm (integers, bool)
  ConstFloat,  // fimm (floats; rounded to dtype)
  IndexValue,  // the value of expression `index`, i64
  InRange,     // bool: imm <= index < imm2
  Cast,        // args[0] to dtype, as torch's .to()
  Bitcast,     // args[0]'s bits as dtype of equal size
  Where,       // args[0] bool ? args[1] : args[2]
  Load,        // buffer[index]
  MaskedLoad,  // args[0] bool ? buffer[index] : args[1]; index may be out of range where args[0] is false
  Indirect,    // binds indirect variable `var` to integer args[0], imm = size: a value v must be -size <= v < size if
               // `wrap`, else 0 <= v < size, otherwise the kernel stops with error `message`; negative wraps
  Store,       // buffer[index] = args[0] (mode); optional args[1]: bool, store only where true
  Reduce,      // over all inner variables of its stage, by `reduce`; results through itself and Project
  Project,     // args[0] a Reduce; its imm-th result
  Scan,        // running Reduce in row-major order over its stage's last inner variable; inclusive; results as Reduce's
};

/// Sum and Prod: args x. Max, Min: propagate NaN. Any, All: bool. ArgMax, ArgMin: args (x, i64 index) -> (value,
/// index); first index among equals, NaN wins. Welford: x -> (mean, m2). WelfordCombine: (mean, m2, count) of
/// equal-dtype parts
/// -> (mean, m2). OnlineSoftmax: x -> (max, sum of exp(x - max)). OnlineSoftmaxCombine: (max, sum) -> (max, sum).
enum class ReduceKind : uint8_t {
  Sum,
  Prod,
  Max,
  Min,
  Any,
  All,
  ArgMax,
  ArgMin,
  Welford,
  WelfordCombine,
  OnlineSoftmax,
  OnlineSoftmaxCombine
};

/// Assign. Add: buffer[index] += value in iteration order (scatter-add; an index may repeat).
enum class StoreMode : uint8_t { Assign, Add };

/// Operands lie in the instruction itself: the scheduler copies instructions all the time.
using Operands = boost::container::static_vector<ValueId, 4>;

struct Inst {
  Opcode op = Opcode::ConstInt;
  DType dtype = DType::Float32;  // of the result; Store: of the value stored, which is the buffer's
  Operands args;
  BufferId buffer = -1;
  Expr index;
  int64_t imm = 0, imm2 = 0;
  double fimm = 0;
  int var = -1;
  bool wrap = false;
  ReduceKind reduce = ReduceKind::Sum;
  StoreMode mode = StoreMode::Assign;
  std::string message;
};

struct Stage {
  std::vector<int> vars;      // inner loop variables, outermost first
  std::vector<ValueId> body;  // instructions in order
};

/// One loop nest. Variables are shared by number: extents[v] is loop variable v's extent, whether outer or of a stage.
struct Nest {
  std::string name;
  std::vector<int64_t> extents;
  std::vector<int> outer;  // outer (independent) loop variables, outermost first
  std::vector<Stage> stages;
  std::vector<Inst> insts;  // arena; an instruction's id is its place here; those in no stage are dead
  int indirect_vars = 0;
  /// The item of the program before which it does not run, and with nothing that runs before it in one kernel: what it
  /// makes would lie there for long. Of no use in a kernel of its own.
  int not_before = 0;
  /// It changes an input while the program goes on: it runs after everything before it in the program that may raise an
  /// error, and not in one kernel with any such thing.
  bool after_errors = false;

  Expr var(int v) const { return Expr::loop_var(v, extents[v]); }
  int add_var(int64_t extent) {
    extents.push_back(extent);
    return static_cast<int>(extents.size()) - 1;
  }
  ValueId add(Inst inst) {
    insts.push_back(std::move(inst));
    return static_cast<ValueId>(insts.size()) - 1;
  }
  int64_t outer_size() const;
  int64_t stage_size(const Stage& s) const;
  /// Every point of the outer domain times inner points of the largest stage.
  int64_t total_size() const;
};

/// Library call `index` of the caller's own list. `effect`: ordered against every other effect (random numbers).
/// `rows`: if positive, writes[0] is made in so many rows of equal length, one behind the other in memory, and the call
/// can tell which of them are finished. `raises`: it may raise an error, depending on the data.
struct Extern {
  int index = -1;
  std::string name;
  std::vector<BufferId> reads, writes;
  bool effect = false;
  bool raises = false;
  int64_t rows = 0;
};

struct Program {
  struct Item {
    bool is_nest = true;
    int index = 0;  // into nests or externs
  };
  std::vector<Buffer> buffers;
  std::vector<Nest> nests;
  std::vector<Extern> externs;
  std::vector<Item> items;  // in program order

  BufferId add_buffer(std::string name, DType dtype, int64_t numel, BufferKind kind);
  Nest& add_nest(Nest nest);
  void add_extern(Extern e);
};

// --- define-by-run ---------------------------------------------------------------------------------------------------

/// A value inside a rule: the handler's id and its dtype.
struct Val {
  ValueId id = -1;
  DType dtype = DType::Float32;
};

/// The handler a rule runs against. IrOps builds IR; others count or print. The named members are the rule's
/// vocabulary.
class Ops {
 public:
  virtual ~Ops() = default;
  virtual Val constant_int(DType t, int64_t v) = 0;
  virtual Val constant_float(DType t, double v) = 0;
  virtual Val index_value(const Expr& e) = 0;
  virtual Val in_range(const Expr& e, int64_t lo, int64_t hi) = 0;
  virtual Val load(BufferId b, const Expr& index) = 0;
  virtual Val masked_load(BufferId b, const Expr& index, Val mask, Val other) = 0;
  virtual Val cast(Val v, DType t) = 0;
  virtual Val bitcast(Val v, DType t) = 0;
  virtual Val where(Val condition, Val a, Val b) = 0;
  /// An index expression whose value is v (any integer dtype), in [0, size).
  virtual Expr indirect(Val v, int64_t size, bool wrap_negative, const std::string& error_message) = 0;
  virtual Val apply(Opcode op, std::span<const Val> args) = 0;

  /// A constant of any dtype from a double (integers: must be exact).
  Val constant(DType t, double v);
#define KILN_ARITY_1(name)            \
  Val name(Val a) {                   \
    const Val args[] = {a};           \
    return apply(Opcode::name, args); \
  }
#define KILN_ARITY_2(name)            \
  Val name(Val a, Val b) {            \
    const Val args[] = {a, b};        \
    return apply(Opcode::name, args); \
  }
#define KILN_ARITY_3(name)            \
  Val name(Val a, Val b, Val c) {     \
    const Val args[] = {a, b, c};     \
    return apply(Opcode::name, args); \
  }
#define KILN_OPCODE(name, arity, cls, help) KILN_ARITY_##arity(name)
#include "loops/opcodes.def"
#undef KILN_OPCODE
#undef KILN_ARITY_1
#undef KILN_ARITY_2
#undef KILN_ARITY_3
};

using Index = std::span<const Expr>;
/// A value at a point of an iteration space: a lowering rule's result.
using PointFn = std::function<Val(Ops&, Index)>;

/// Where a nest stores: `buffer[index(point)]`.
struct StoreTo {
  BufferId buffer = -1;
  std::function<Expr(Index)> index = nullptr;  // null: row-major over the ranges
  StoreMode mode = StoreMode::Assign;
};

/// Nest builder, for any form. pointwise() and reduction() below cover the common ones.
class NestBuilder : public Ops {
 public:
  NestBuilder(const std::vector<Buffer>& buffers, std::string name, const std::vector<int64_t>& outer);
  const std::vector<Expr>& outer() const { return outer_; }
  /// Opens a stage with inner loops of these extents (none: per outer point); returns its variables.
  std::vector<Expr> stage(const std::vector<int64_t>& inner);
  /// The results of a reduction over the open stage, readable from the next stage on.
  std::vector<Val> reduce(ReduceKind kind, std::vector<Val> args);
  /// A running reduction over the open stage's last variable.
  std::vector<Val> scan(ReduceKind kind, std::vector<Val> args);
  void store(BufferId b, const Expr& index, Val v, StoreMode mode = StoreMode::Assign);
  void store_if(Val condition, BufferId b, const Expr& index, Val v, StoreMode mode = StoreMode::Assign);
  Nest finish();

  Val constant_int(DType t, int64_t v) override;
  Val constant_float(DType t, double v) override;
  Val index_value(const Expr& e) override;
  Val in_range(const Expr& e, int64_t lo, int64_t hi) override;
  Val load(BufferId b, const Expr& index) override;
  Val masked_load(BufferId b, const Expr& index, Val mask, Val other) override;
  Val cast(Val v, DType t) override;
  Val bitcast(Val v, DType t) override;
  Val where(Val condition, Val a, Val b) override;
  Expr indirect(Val v, int64_t size, bool wrap_negative, const std::string& error_message) override;
  Val apply(Opcode op, std::span<const Val> args) override;

 private:
  Val emit(Inst inst);
  const std::vector<Buffer>& buffers_;
  Nest nest_;
  std::vector<Expr> outer_;
  std::unordered_map<size_t, std::vector<ValueId>> seen_;  // open stage's pure instructions by hash, for reuse
};

/// for each point of `ranges`: store(fn(point)).
Nest pointwise(const std::vector<Buffer>& buffers, std::string name, const std::vector<int64_t>& ranges,
               const PointFn& fn, StoreTo to);
/// for each point p of `ranges`: r = reduce over q in `reduced` of fn(p ++ q); store(epilogue(p, r)).
/// Without an epilogue the first result is stored, cast to the buffer's dtype.
Nest reduction(const std::vector<Buffer>& buffers, std::string name, const std::vector<int64_t>& ranges,
               const std::vector<int64_t>& reduced, ReduceKind kind, const PointFn& fn, StoreTo to,
               const std::function<Val(Ops&, Index, const std::vector<Val>&)>& epilogue = nullptr);

/// Counts the scalar operations a rule costs per point (math functions weigh more than adds): inlining decisions.
struct Cost {
  int ops = 0, loads = 0, math = 0;
};
Cost cost_of(const std::vector<Buffer>& buffers, const std::vector<int64_t>& ranges, const PointFn& fn);

// --- text, checks, reference -----------------------------------------------------------------------------------------

int arity(Opcode op);
char opcode_class(Opcode op);
std::string_view opcode_name(Opcode op);
/// True for rows of opcodes.def.
bool is_scalar_op(Opcode op);
/// True for a function that takes a polynomial or a division of its own: many times the time of an addition.
bool is_math(Opcode op);
/// Division and remainder in whole steps: of integers, a divisor of zero is an error.
bool divides(Opcode op);
/// Computed by the C library itself, element by element.
bool is_c_math(Opcode op);
std::string_view reduce_name(ReduceKind k);
int result_count(ReduceKind k);
int operand_count(ReduceKind k);

/// Text form of docs/ir/loops.md; parse(print(p)) prints the same text.
std::string print(const Program& p);
std::string print(const Nest& n, const std::vector<Buffer>& buffers);
/// The same with names that the caller gives.
std::string print(const Nest& n, const std::function<std::string(BufferId)>& buffer_name);
Program parse(std::string_view text);
/// Throws InternalError on a malformed program: types, arities, use before definition or outside its stage's reach, an
/// index that can leave its buffer.
void verify(const Program& p);
void verify(const Nest& n, const std::vector<Buffer>& buffers);

/// Raised by the interpreter where a kernel would stop with an error.
struct KernelError : std::runtime_error {
  using std::runtime_error::runtime_error;
};
/// Runs a nest in plain loops, the definition of what it means. pointers[b] is buffer b's memory.
void interpret(const Nest& n, const std::vector<Buffer>& buffers, const std::vector<void*>& pointers);

}  // namespace kiln::loops
