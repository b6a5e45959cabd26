#include "python/frame/engine.h"

#include <torch/csrc/autograd/engine.h>

#include "python/pch.h"

namespace kiln::frame {

void start_engine() {
  static bool started = false;
  if (std::exchange(started, true)) return;
  const c10::InferenceMode no_inference(false);
  const at::AutoGradMode history(true);
  const at::Tensor root = at::zeros({}).requires_grad_().clone();
  const pybind11::gil_scoped_release no_gil;
  torch::autograd::Engine::get_default_engine().execute(
      {torch::autograd::impl::gradient_edge(root)}, {at::ones({})}, /*keep_graph=*/false, /*create_graph=*/false,
      /*accumulate_grad=*/false, {torch::autograd::impl::gradient_edge(root)});
}

}  // namespace kiln::frame
