#pragma once
#include <span>
#include <string>
#include <vector>

#include "ops/types.h"

// The table of operators: what each is (traits) and what it returns (shape rule). Rows stand in aten_*.def, rules in
// rules/*.cpp. In-place ops ("aten::add_.Tensor") are derived from their functional rows.
namespace kiln::ops {

/// One argument of a rule: a tensor stands for its metadata; a null pointer or None is "no tensor". A Python number
/// that an op takes in a tensor's place (a wrapped number) is passed as that number, so that it promotes as one.
using Arg = BasicArg<const TensorMeta*>;

/// The user called an op with arguments that eager refuses; `what()` is eager's message.
class ShapeError : public UserError {
 public:
  enum class Kind : uint8_t { Runtime, Index, Type, Value, NotImplemented };
  explicit ShapeError(const std::string& message, Kind kind = Kind::Runtime) : UserError(message), kind(kind) {}
  Kind kind;  // the Python exception that eager raises
};

/// What family an op is of.
enum class Kind : uint8_t {
  Pointwise,  // one result element from the elements at the same (broadcast) index
  Reduction,  // dims folded away: sum, amax, var, any, argmax
  Scan,       // cumsum, cumprod
  Softmax,    // a row from a row: softmax, log_softmax and their gradients
  View,       // the result shares its argument's storage
  Factory,    // a tensor from constants
  Copy,       // moves elements: clone, cat, pad, roll, repeat
  Gather,     // reads at indices held in a tensor
  Scatter,    // writes or adds at indices held in a tensor
  MatMul,
  Convolution,
  Pool,  // windows and resampling
  Norm,  // batch, layer, group norm and their gradients
  Attention,
  Sort,  // sort, topk
  Loss,  // reductions of a pointwise loss
  Other,
};

enum Flag : uint32_t {
  kRandom = 1,            // draws from a generator
  kMutates = 2,           // writes to an argument
  kMultiple = 4,          // works on lists of tensors (foreach)
  kNondeterministic = 8,  // may differ from run to run on equal inputs
  kMetaOnly = 16,         // needs no element of its argument, only its metadata (empty_like, new_zeros)
  kDataDependent = 32,    // the result's shape depends on elements
  /// The kernel refuses some elements (an index out of range, a singular matrix): a call is made though nobody uses its
  /// result. Of a pointwise op: in integers (a division by zero).
  kMayRaise = 64,
};

struct OpInfo;
/// Arguments follow the op's schema, all defaults filled in. Returns one entry per tensor result, lists flattened;
/// `defined` is false for results that eager leaves undefined. `requires_grad` is not a rule's business (false).
using Rule = std::vector<TensorMeta> (*)(const OpInfo& info, std::span<const Arg> args);

struct OpInfo {
  Op op;
  Kind kind = Kind::Other;
  uint32_t flags = 0;
  Rule rule = nullptr;
  /// In-place op: the functional op that it stems from; else null.
  const OpInfo* functional = nullptr;
  bool has(Flag f) const { return (flags & f) != 0; }
};

/// The op's row, or null if the table has none. Rows live as long as the process. Thread-safe.
const OpInfo* lookup(Op op);
/// All rows of the .def files, in order.
const std::vector<OpInfo>& table();

/// Sizes, strides, dtypes, devices and offsets of `op`'s results, as eager's CPU kernels give them. For an in-place op:
/// the changed argument's metadata. Throws Unsupported if the table has no rule, ShapeError if eager would refuse.
std::vector<TensorMeta> infer(Op op, std::span<const Arg> args);

/// Whether ATen has a single thread here: it leaves oneDNN for small convolutions then, which shows in strides. Of this
/// thread; whoever records a trace sets it.
bool one_thread();
void set_one_thread(bool one);

/// Traits; false for ops that are not in the table, except that in-place names are known by their spelling.
bool is_random(Op op);
bool is_view(Op op);
bool is_pointwise(Op op);
bool mutates(Op op);
/// How dear it is to compute a value again instead of keeping it: Free (views, factories), Cheap (pointwise, and what
/// fuses with it), Dear (reductions, windows, sorts, scatters), Never (products, convolutions, attention, random ops,
/// unknown ops).
enum class Recompute : uint8_t { Free, Cheap, Dear, Never };
Recompute recompute_cost(Op op);

/// Whether a call of the op, which may be one that ATen composes of others, saves tensors for its backward whatever it
/// is given. False if that is not known.
bool saves_tensors(Op op);

/// The process's default dtype (torch.get_default_dtype()), which wrapped floats and factories take. float32 at start.
DType default_dtype();
void set_default_dtype(DType t);

}  // namespace kiln::ops
