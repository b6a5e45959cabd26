#include "compiler/compile.h"

#include "base/error.h"
#include "base/options.h"
#include "base/timer.h"
#include "runtime/aten_artifact.h"

namespace kiln::compiler {

std::shared_ptr<runtime::Artifact> compile_functional(const graph::Graph& g, bool inference) {
  graph::verify(g, /*functional=*/true);
  return runtime::aten_artifact(g);
}

}  // namespace kiln::compiler
