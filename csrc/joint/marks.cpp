#include "joint/marks.h"

#include <torch/csrc/autograd/functions/utils.h>

#include "aten/autograd.h"
#include "aten/convert.h"
#include "aten/fake.h"
#include "aten/pch.h"
#include "base/error.h"

namespace kiln::joint {

using graph::Node;
using torch::autograd::variable_list;

namespace {
struct Marks {
  graph::Op function{"kiln::custom_function"}, function_end{"kiln::custom_function_end"}, hook{"kiln::gradient_hook"},
      hook_end{"kiln::gradient_hook_end"}, add{"kiln::register_hook"},
      add_accumulated{"kiln::register_accumulated_hook"}, remove{"kiln::remove_hook"}, grad{"kiln::grad"};
};
const Marks& marks() {
  static const Marks marks;
  return marks;
}

/// A gradient of `t`, laid out as `traced`, that of the traced call, was: expanded in the same dimensions, the others
/// dense in the same order.
at::Tensor gradient_like(const at::Tensor& t, const graph::TensorMeta& traced) {
  KILN_CHECK(static_cast<size_t>(t.dim()) == traced.sizes.size(), "a gradient has another number of dimensions");
  graph::TensorMeta meta = traced;
  meta.sizes = t.sizes().vec();
  std::vector<size_t> order(meta.sizes.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return std::pair(traced.strides[a], traced.sizes[a]) < std::pair(traced.strides[b], traced.sizes[b]);
  });
  int64_t stride = 1;
  for (size_t d : order) {
    if (traced.strides[d] == 0 && traced.sizes[d] != 1) continue;
    meta.strides[d] = stride;
    stride *= std::max<int64_t>(meta.sizes[d], 1);
  }
  return aten::make_fake(meta);
}
}  // namespace

namespace {
/// grad_fn of a gradient that is differentiated again, on fakes.
class FakeFormula : public torch::autograd::Node {
 public:
  explicit FakeFormula(std::vector<graph::TensorMeta> metas) : metas_(std::move(metas)) {
    for (graph::TensorMeta& m : metas_) m.requires_grad = false;
  }
  std::string name() const override { return "CustomFunctionBackward"; }

 protected:
  variable_list apply(variable_list&&) override {
    variable_list out;
    for (const graph::TensorMeta& m : metas_) out.push_back(aten::make_fake(m));
    return out;
  }

 private:
  std::vector<graph::TensorMeta> metas_;
};
}  // namespace

bool is_mark(const graph::Op& op) {
  const Marks& m = marks();
  return op == m.function || op == m.function_end || op == m.hook || op == m.hook_end || op == m.add ||
         op == m.add_accumulated || op == m.remove;
}

std::vector<at::Tensor> FakeCustomFunction::begin(const std::vector<at::Tensor>& inputs,
                                                  std::vector<at::Tensor>& outputs) {
  set_next_edges(torch::autograd::collect_next_edges(inputs));
  std::vector<at::Tensor> grads;
  for (at::Tensor& t : outputs) {
    graph::TensorMeta meta = aten::meta_of(t);
    meta.requires_grad = false;
    grads.push_back(aten::make_fake(meta));
    torch::autograd::set_history(t, getptr());
    aten::note_custom_view(t);
  }
  return grads;
}

void FakeCustomFunction::end(const std::vector<at::Tensor>& grads, std::vector<std::vector<size_t>> given) {
  given_ = std::move(given);
  for (const at::Tensor& t : grads) {
    graph::TensorMeta meta;
    meta.defined = t.defined();
    if (t.defined()) meta = aten::meta_of(t);
    meta.requires_grad = false;
    grads_.push_back(std::move(meta));
    const bool has = !given_.empty() && t.defined() && t.requires_grad();
    histories_.push_back(has ? torch::autograd::impl::gradient_edge(t) : torch::autograd::Edge());
  }
}

void FakeCustomFunction::forget() { histories_.clear(); }

variable_list FakeCustomFunction::apply(variable_list&& incoming) {
  variable_list out;
  for (size_t i = 0; i < grads_.size(); ++i) {
    out.push_back(grads_[i].defined ? aten::make_fake(grads_[i]) : at::Tensor());
    if (!out.back().defined() || !at::GradMode::is_enabled() || i >= given_.size()) continue;
    torch::autograd::edge_list edges;
    std::vector<graph::TensorMeta> metas;
    for (size_t k : given_[i]) {
      if (!incoming[k].defined() || !incoming[k].requires_grad()) continue;
      edges.push_back(torch::autograd::impl::gradient_edge(incoming[k]));
      metas.push_back(aten::meta_of(incoming[k]));
    }
    if (i < histories_.size() && histories_[i].is_valid()) {
      edges.push_back(histories_[i]);
      metas.push_back(grads_[i]);
    }
    if (edges.empty()) continue;
    const auto node = c10::make_intrusive<FakeFormula>(std::move(metas));
    node->set_next_edges(std::move(edges));
    torch::autograd::set_history(out.back(), node);
  }
  return out;
}

bool MarksOnFakes::takes(const Node& n) const { return is_mark(n.op) || (in_hook_ && n.op == marks().grad); }

std::vector<at::Tensor> MarksOnFakes::make(const Node& n, const TensorOf& tensor_of) {
  const Marks& m = marks();
  if (n.op == m.function) {
    function_ = c10::make_intrusive<FakeCustomFunction>();
    std::vector<at::Tensor> outputs = tensors_of(n.arg(1), tensor_of);
    return function_->begin(tensors_of(n.arg(0), tensor_of), outputs);
  }
  if (n.op == m.function_end) {
    KILN_CHECK(function_, "the end of a custom function that did not begin");
    function_->end(tensors_of(n.arg(0), tensor_of));
    function_ = nullptr;
    return {};
  }
  if (n.op == m.grad) return {gradient_like(tensor_of(n.arg(0)), n.results.at(0))};
  if (n.op == m.hook) {
    in_hook_ = true;
    // One that runs when a gradient was added is given nothing.
    return n.results.empty() ? variable_list() : variable_list{gradient_like(tensor_of(n.arg(1)), n.results.at(0))};
  }
  if (n.op == m.hook_end) in_hook_ = false;
  return {};
}

}  // namespace kiln::joint
