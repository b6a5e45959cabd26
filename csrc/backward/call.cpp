#include "backward/call.h"

#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <algorithm>
#include <unordered_set>

#include "aten/fake.h"
#include "aten/pch.h"

namespace kiln::backward {

using torch::autograd::Edge;
using torch::dynamo::autograd::CompiledNodeArgs;
using torch::dynamo::autograd::NodeCall;

bool is_number(const at::Tensor& t) { return t.unsafeGetTensorImpl()->is_wrapped_number() && !t.is_complex(); }
bool is_constant(const at::Tensor& t) { return t.unsafeGetTensorImpl()->is_wrapped_number() && t.is_complex(); }

namespace {

class KeyWriter {
 public:
  explicit KeyWriter(std::string& key) : key_(key) {}
  template <class T>
  void add(const T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    key_.append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  void add(c10::IntArrayRef list) {
    add(list.size());
    for (int64_t v : list) add(v);
  }
  void add(const at::Tensor& t) {
    add(t.scalar_type());
    add(t.device());
    add(t.layout());
    add(t.requires_grad());
    add(t.is_leaf());
    add(is_number(t));
    if (is_constant(t)) add(t.item().toComplexDouble());
    if (t.layout() != c10::kStrided) return;
    add(t.sizes());
    add(t.strides());
  }

 private:
  std::string& key_;
};

/// Finds the tensors that are views of others, in which all their elements lie. `leaves` stay themselves: their .grad
/// is asked for.
void find_views(Call& call, const std::unordered_set<const c10::TensorImpl*>& leaves) {
  const auto& tensors = call.collected.tensor_args.inputs;
  const auto is_leaf = [&](const at::Tensor& t) { return leaves.contains(t.unsafeGetTensorImpl()); };
  const auto is_block = [](const at::Tensor& t) {
    return t.layout() == c10::kStrided && t.has_storage() && t.numel() > 0 && t.is_non_overlapping_and_dense() &&
           !t.is_conj() && !t.is_neg();
  };
  const auto end = [](const at::Tensor& t) {
    return at::detail::computeStorageNbytes(t.sizes(), t.strides(), /*itemsize=*/1, t.storage_offset());
  };
  std::unordered_map<const void*, std::vector<size_t>> by_storage;
  for (size_t i = 0; i < tensors.size(); ++i)
    if (tensors[i].layout() == c10::kStrided && tensors[i].has_storage() && tensors[i].numel() > 0)
      by_storage[tensors[i].storage().unsafeGetStorageImpl()].push_back(i);
  for (const auto& [storage, sharing] : by_storage) {
    if (sharing.size() < 2) continue;
    // The largest holds the others, if any does; of equal ones a leaf.
    size_t owner = sharing.size();
    for (size_t k = 0; k < sharing.size(); ++k) {
      const at::Tensor& t = tensors[sharing[k]];
      if (!is_block(t)) continue;
      const auto better = [&](const at::Tensor& other) {
        return t.numel() != other.numel() ? t.numel() > other.numel() : is_leaf(t) && !is_leaf(other);
      };
      if (owner == sharing.size() || better(tensors[sharing[owner]])) owner = k;
    }
    if (owner == sharing.size()) continue;
    const at::Tensor& base = tensors[sharing[owner]];
    for (size_t i : sharing) {
      const at::Tensor& t = tensors[i];
      if (i == sharing[owner] || is_leaf(t) || t.scalar_type() != base.scalar_type() || t.is_conj() || t.is_neg())
        continue;
      if (t.storage_offset() >= base.storage_offset() && end(t) <= end(base)) call.view_of[i] = sharing[owner];
    }
  }
}

void add_modes(KeyWriter& key) {
  key.add(at::autocast::is_autocast_enabled(at::kCPU));
  key.add(at::autocast::get_autocast_dtype(at::kCPU));
  key.add(c10::InferenceMode::is_enabled());
  key.add(at::globalContext().deterministicAlgorithms());
  key.add(c10::get_default_dtype_as_scalartype());
}

}  // namespace

bool is_of_type(const Node& node, std::string_view name) {
  // PyTorch does not export the types themselves.
  return std::string_view(typeid(node).name()).find(name) != std::string_view::npos;
}

std::string why_not(const std::vector<Turn>& turns) {
  if (at::GradMode::is_enabled()) return "create_graph=True asks for the gradients' own graph";
  if (torch::autograd::AnomalyMode::is_enabled()) return "anomaly detection looks at each node";
  if (std::count_if(turns.begin(), turns.end(), [](const Turn& turn) { return turn.runs; }) < 2)
    return "there is nothing to compute";
  for (const Turn& turn : turns) {
    if (turn.runs && turn.node->is_aot_backward()) return "torch.compile has compiled a part of it";
    if (turn.runs && is_of_type(*turn.node, "CppNode") && !turn.node->is_traceable())
      return "the C++ function " + turn.node->name() + " is not declared as traceable";
  }
  return "";
}

void look_through(const std::vector<Turn>& turns, const GraphTask& task, const edge_list& outputs, Call& call) {
  KeyWriter key(call.key), structure(call.structure);
  auto& node_calls = call.collected.node_calls;
  for (size_t i = 0; i < outputs.size(); ++i)
    node_calls.lookup(outputs[i].function).mark_output(static_cast<int>(outputs[i].input_nr), static_cast<int>(i));
  std::unordered_set<const c10::TensorImpl*> leaves;
  for (const Turn& turn : turns) {
    if (const auto* leaf = dynamic_cast<const torch::autograd::AccumulateGrad*>(turn.node.get()))
      leaves.insert(leaf->variable.unsafeGetTensorImpl());
    NodeCall& node = node_calls.lookup(turn.node);
    node.needed = turn.runs;
    call.nodes.push_back(&node);
    CompiledNodeArgs args(call.collected, node);
    args.collect(node);
    if (args.cond(turn.runs)) {
      turn.node->compiled_args(args);
      args.collect(turn.node->next_edges());
      for (const Edge& e : turn.node->next_edges()) {
        const auto info = e.is_valid() ? task.exec_info_.find(e.function.get()) : task.exec_info_.end();
        args.collect(info != task.exec_info_.end() && info->second.should_execute());
      }
    }
    const auto of_node = args.key();
    const auto* type = of_node.node_type.name();
    structure.add(type);
    key.add(type);
    key.add(of_node.key_size);
    call.key.append(reinterpret_cast<const char*>(of_node.key), of_node.key_size);
  }
  for (const auto& size : call.collected.all_size_inputs) key.add(size.value);
  for (const auto& number : call.collected.lifted_ivalue_args.args) {
    const c10::IValue& v = *number.actual_ptr;
    key.add(v.isDouble());
    v.isDouble() ? key.add(v.toDouble()) : key.add(v.toInt());
  }
  find_views(call, leaves);
  const auto& tensors = call.collected.tensor_args.inputs;
  for (size_t i = 0; i < tensors.size(); ++i) {
    key.add(tensors[i]);
    const auto owner = call.view_of.find(i);
    key.add(owner == call.view_of.end() ? i : owner->second);
    if (owner != call.view_of.end()) key.add({tensors[i].storage_offset(), tensors[owner->second].storage_offset()});
  }
  add_modes(key);
}

}  // namespace kiln::backward
