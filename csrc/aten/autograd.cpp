#include "aten/autograd.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <unordered_set>

#include "aten/pch.h"

namespace kiln::aten {

using torch::autograd::CreationMeta;
using torch::autograd::Edge;
using torch::autograd::Node;

std::vector<Node*> nodes_behind(const std::vector<Edge>& roots) {
  std::unordered_set<const Node*> seen;
  std::vector<Node*> nodes, todo;
  const auto visit = [&](const Edge& e) {
    if (e.is_valid() && seen.insert(e.function.get()).second) todo.push_back(e.function.get());
  };
  for (const Edge& e : roots) visit(e);
  while (!todo.empty()) {
    Node* node = todo.back();
    todo.pop_back();
    nodes.push_back(node);
    for (const Edge& e : node->next_edges()) visit(e);
  }
  return nodes;
}

namespace {
void note_creation(const at::Tensor& t, CreationMeta how) {
  if (t.is_view()) torch::autograd::impl::get_view_autograd_meta(t)->set_creation_meta(how);
}
bool is_created(const at::Tensor& t, CreationMeta how) {
  return t.is_view() && torch::autograd::impl::get_view_autograd_meta(t)->get_creation_meta() == how;
}
}  // namespace

void note_custom_view(const at::Tensor& output) { note_creation(output, CreationMeta::IN_CUSTOM_FUNCTION); }
bool is_custom_view(const at::Tensor& t) { return is_created(t, CreationMeta::IN_CUSTOM_FUNCTION); }
void note_inference_view(const at::Tensor& t) { note_creation(t, CreationMeta::INFERENCE_MODE); }
bool is_inference_view(const at::Tensor& t) { return is_created(t, CreationMeta::INFERENCE_MODE); }

at::Tensor as_inference_tensor(const at::Tensor& t) {
  if (!t.defined() || t.is_inference()) return t;
  const c10::InferenceMode mode;  // what is made in it has no keys for autograd, and no version
  at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(t.storage()), t.key_set() - c10::autograd_dispatch_keyset_with_ADInplaceOrView, t.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  return made;
}

namespace {
struct Calls : torch::autograd::PostAccumulateGradHook {
  std::vector<std::function<void()>> calls;
  void operator()(const at::Tensor&) override {
    for (const auto& call : calls) call();
  }
};
}  // namespace

void after_accumulation(const at::Tensor& t, std::function<void()> call) {
  if (!torch::autograd::impl::post_acc_grad_hooks(t))
    torch::autograd::impl::set_post_acc_grad_hooks(t, std::make_unique<Calls>());
  static_cast<Calls&>(*torch::autograd::impl::post_acc_grad_hooks(t)).calls.push_back(std::move(call));
}

}  // namespace kiln::aten
