#include "compiler/compile.h"

#include "base/error.h"

namespace kiln::compiler {}  // namespace kiln::compiler
