#pragma once
#include <functional>
#include <string>
#include <unordered_map>
#include <vector>

#include "schedule/schedule.h"

// What the emitters of readable source have in common: names, index expressions, numbers of errors.
namespace kiln::codegen {

/// `name` as an identifier of C++ or Python.
std::string identifier(const std::string& name);

/// The buffers of a kernel by name; each name ends with an underscore, which no other name of the source does.
struct BufferNames {
  std::unordered_map<loops::BufferId, std::string> of;
  std::vector<loops::BufferId> scratch;  // those that are no arguments, in order of their first use
};
/// Names the first `num_args` arguments and the scratch buffers. Throws InternalError if the kernel touches another.
BufferNames name_buffers(const schedule::Kernel& kernel, const std::vector<loops::Buffer>& buffers, size_t num_args);

/// How a language writes index expressions. Its own division and remainder serve where the dividend is not negative,
/// the functions elsewhere.
struct IndexStyle {
  const char* divide = "/";
  const char* floor_div = "floor_div";
  const char* floor_mod = "floor_mod";
  const char* min = "min";
  const char* max = "max";
  std::function<std::string(const symbolic::AtomNode& variable)> variable;
};
std::string index_text(const symbolic::Expr& e, const IndexStyle& style);

/// The operator between two operands that means in C++ and in Python what the opcode means, whatever their dtype; null
/// if there is none.
const char* shared_infix(loops::Opcode op);
/// The fewest digits that give a finite number of the dtype back, with a point or an exponent; half types as float32.
std::string float_digits(double v, DType t);

/// The number, from one, of `message` among `errors`, to which it is added if it is new.
int error_number(std::vector<std::string>& errors, const std::string& message);

}  // namespace kiln::codegen
