#pragma once
#include <span>
#include <string>
#include <vector>

#include "loops/loops.h"

// Single operations as Triton text: dtypes, numbers, casts, scalar opcodes, the states of reductions.
namespace kiln::codegen::triton {

/// "tl.float32". Throws Unsupported for complex dtypes.
std::string type_name(DType t);

/// The number of a constant alone: Triton gives it the dtype of what it meets. `i` is a ConstInt or ConstFloat.
std::string literal(const loops::Inst& i);
/// Whether a literal of this dtype keeps its value and dtype next to a tensor of it.
bool literal_is_typed(DType t);
/// A constant of its own dtype.
std::string typed_constant(const loops::Inst& i);

/// `text` (a name) of dtype `from` as `to`, as torch's .to().
std::string cast(const std::string& text, DType from, DType to);

/// An operand: its name, if it is a constant its number, and the constant with its dtype.
struct Operand {
  std::string name;
  std::string typed;
  bool constant = false;
};
/// A scalar opcode on operands of dtype `t`; a divisor must be none that is zero. Throws Unsupported where Triton has
/// no such function.
std::string scalar_op(loops::Opcode op, DType t, std::span<const Operand> args);

/// How a reduction is computed: a state of several tensors, and a function of the prelude that puts two together.
struct ReduceForm {
  std::string combine;
  std::vector<DType> types;          // of the state's parts
  std::vector<std::string> initial;  // what the state is before the first value
};
/// `wide`: sums of float32 are kept in float64.
ReduceForm reduce_form(loops::ReduceKind kind, DType t, bool wide);
/// The state that one value is, from its operands' texts.
std::vector<std::string> reduce_state(loops::ReduceKind kind, DType t, std::vector<std::string> args, bool wide);

}  // namespace kiln::codegen::triton
