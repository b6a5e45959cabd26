#pragma once
#include "schedule/schedule.h"

namespace kiln::schedule {

/// Operand packing: what a kernel reads again and again, in steps from lane to lane (a column of a matrix as one of two
/// points, a strided vector that each row is multiplied by), is copied to a Temp first, in the order in which it is
/// read, by a kernel of its own.
void pack_operands(Plan& plan);

}  // namespace kiln::schedule
