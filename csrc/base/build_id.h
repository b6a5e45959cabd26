#pragma once
#include <string>

namespace kiln {

/// What the linker has put into the library (or program) that holds this function: different for different code. Empty
/// if it has put nothing.
const std::string& build_id();

}  // namespace kiln
