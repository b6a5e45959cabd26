#pragma once
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <map>
#include <string>
#include <vector>

#include "backward/engine_task.h"

namespace kiln::backward {

/// One backward, looked through: what its nodes hold that changes from call to call, and a text of all the rest.
struct Call {
  /// Tensors (`tensor_args.inputs`, each once), hooks and node ids, as PyTorch's visitors collect them.
  torch::dynamo::autograd::AutogradCompilerCall collected{torch::dynamo::autograd::SizeInput::STATIC};
  /// By turn.
  std::vector<torch::dynamo::autograd::NodeCall*> nodes;
  /// The types, constants, hooks and connections of all nodes, the metadata of all tensors, and the modes: equal keys
  /// mean equal graphs. `structure`: of the nodes' types alone.
  std::string key, structure;
  /// Tensors that are views of others before them, which hold all their elements: by index, the other's index.
  std::map<size_t, size_t> view_of;
};

/// Whether a tensor is a number of Python's as autograd saves it: of the least weight where types are promoted.
bool is_number(const at::Tensor& t);
/// Such numbers that are complex are part of the key.
bool is_constant(const at::Tensor& t);

/// Fills `call`. `outputs`: where gradients are captured. Tensors that nodes have saved are unpacked, which fails as in
/// the engine if they were freed or changed. Throws c10::NotImplementedError for nodes that cannot be looked through.
/// Needs the GIL: nodes of Python functions are asked in Python.
void look_through(const std::vector<Turn>& turns, const GraphTask& task, const edge_list& outputs, Call& call);

/// Whether the node's class, or template, has this name.
bool is_of_type(const Node& node, std::string_view name);

/// Why backwards like this one are not compiled at all, before they are looked through; "" if they may be.
/// Needs the GIL.
std::string why_not(const std::vector<Turn>& turns);

}  // namespace kiln::backward
