// Triton source, run by the Python module kiln._triton.
#include "aten/convert.h"
#include "base/error.h"
#include "codegen/triton/emit.h"
#include "python/bindings/bindings.h"
#include "python/bindings/py_program.h"

namespace pb = pybind11;

namespace kiln::bindings {
namespace {

using aten::scalar_type_of;
using codegen::TritonKernel;
using codegen::TritonLaunch;

pb::object dtype_object(DType t) { return pb::cast(scalar_type_of(t)); }

pb::dict description(const TritonKernel& k) {
  pb::list scratch;
  for (const TritonKernel::Memory& m : k.scratch) scratch.append(pb::make_tuple(dtype_object(m.dtype), m.numel));
  pb::dict d;
  d["name"] = k.symbol;
  d["points"] = k.points;
  d["xblock"] = k.xblock;
  d["rblock"] = k.rblock;
  d["scratch"] = scratch;
  d["segmented"] = k.segmented;
  d["fails"] = !k.errors.empty();
  return d;
}

/// A Python function over a kernel's memory, which is handed to it as one flat tensor for each buffer.
class Launch {
 public:
  Launch(pb::object function, std::vector<TritonKernel::Memory> buffers)
      : function_(hold(std::move(function))), buffers_(std::move(buffers)) {}
  int32_t operator()(void* const* pointers) const {
    const pb::gil_scoped_acquire gil;
    try {
      pb::list tensors;
      for (size_t i = 0; i < buffers_.size(); ++i)
        tensors.append(at::from_blob(pointers[i], {buffers_[i].numel}, scalar_type_of(buffers_[i].dtype)));
      return (*function_)(tensors).cast<int32_t>();
    } catch (pb::error_already_set& e) {
      if (e.matches(PyExc_KeyboardInterrupt)) PyErr_SetInterrupt();  // comes when the call is over
      throw InternalError(std::string("a Triton kernel failed: ") + e.what());
    }
  }

 private:
  Held function_;
  std::vector<TritonKernel::Memory> buffers_;
};

std::vector<TritonLaunch> load(const std::string& source, const std::vector<TritonKernel>& kernels) {
  const pb::gil_scoped_acquire gil;
  std::vector<TritonLaunch> launches;
  try {
    pb::list descriptions;
    for (const TritonKernel& k : kernels) descriptions.append(description(k));
    const pb::list functions = pb::module_::import("kiln._triton").attr("load")(source, descriptions);
    for (size_t k = 0; k < kernels.size(); ++k) launches.emplace_back(Launch(functions[k], kernels[k].buffers));
  } catch (pb::error_already_set& e) {
    if (e.matches(PyExc_ImportError)) throw Unsupported(pb::str(e.value()).cast<std::string>());
    throw InternalError(std::string("Triton source cannot be loaded: ") + e.what());
  }
  return launches;
}

}  // namespace

KILN_BINDINGS(triton) { codegen::set_triton_loader(&load); }

}  // namespace kiln::bindings
