#include "base/error.h"

#include <string_view>

namespace kiln {

void fail_check(const char* file, int line, const char* condition, const std::string& message) {
  std::string_view path(file);
  // A path of the build machine says nothing to the reader; the part below csrc/ does.
  if (auto at = path.rfind("csrc/"); at != std::string_view::npos) path.remove_prefix(at + 5);
  throw InternalError(std::string(path) + ":" + std::to_string(line) + ": " + message + " [" + condition + "]");
}

}  // namespace kiln
