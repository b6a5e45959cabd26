#pragma once
#include "aten/schema.h"

// Memory that a call meets twice. What eager makes of that depends on its kernel: an error, or the order of its loop.
namespace kiln::aten {

/// Whether two elements of `t` may share an address.
bool overlaps_itself(const at::Tensor& t);

/// Why a call's results depend on the order in which its elements are written: a written tensor overlaps itself, or
/// another argument shares elements with it, other than one by one. Empty if they do not. Fakes will do.
std::string order_matters(const OpInfo& op, c10::ArrayRef<c10::IValue> args);

/// Whether a tensor that a call writes to lies in the memory of another of its arguments. Fakes will do.
bool writes_shared_memory(const OpInfo& op, c10::ArrayRef<c10::IValue> args);

}  // namespace kiln::aten
