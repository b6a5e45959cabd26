#pragma once
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>

#include <functional>
#include <vector>

// What PyTorch's autograd knows of tensors, be they fakes, functional or real.
namespace kiln::aten {

/// The autograd nodes that a backward from `roots`, which the caller holds, may reach.
std::vector<torch::autograd::Node*> nodes_behind(const std::vector<torch::autograd::Edge>& roots);

/// Says of an output of a custom autograd function, if it is a view, that autograd lets nobody write to it.
void note_custom_view(const at::Tensor& output);
/// Whether the history of `t` is not that of the tensor that it is a view of.
bool is_custom_view(const at::Tensor& t);

/// Whether `t` is a view that was made in inference mode of a tensor that was not.
bool is_inference_view(const at::Tensor& t);
/// Says so of `t`, if it is a view: autograd lets nobody write to it outside of the mode.
void note_inference_view(const at::Tensor& t);
/// `t`, which has no history, as a tensor of the same memory that was made in inference mode; itself if it was.
at::Tensor as_inference_tensor(const at::Tensor& t);

/// Has `call` run when a gradient was added to the .grad of the leaf `t`, after the calls that were added before.
void after_accumulation(const at::Tensor& t, std::function<void()> call);

}  // namespace kiln::aten
