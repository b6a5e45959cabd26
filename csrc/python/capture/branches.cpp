// torch.cond on a tensor: both branches are captured, one after the other, and torch.where selects what they return.
// That differs from eager's choice in speed alone as long as a branch has no effects, draws no random numbers and
// raises for no elements; what is not like that, or costs much and needs no gradient, is a branch of the program: a
// graph break. Gradients go through both branches, as in eager (which has zeros for the other one), so what a branch
// reads is masked: where(pred, x, x.detach()) is x, and stops what a branch that was not taken makes of a zero gradient
// (0 * inf).
#include "aten/convert.h"
#include "aten/transforms.h"
#include "base/error.h"
#include "graph/passes/passes.h"
#include "ops/ops.h"
#include "python/capture/machine.h"
#include "python/cpython/tensor.h"
#include "python/pch.h"

namespace kiln::capture {

namespace {
using graph::Arg;
using graph::Node;
using graph::Value;

bool is_cheap(const Node& n) {
  const ops::OpInfo* info = ops::lookup(n.op);
  return info && (info->kind == ops::Kind::Pointwise || info->kind == ops::Kind::View);
}
}  // namespace

PyObject* Machine::branch_step(PyObject* const* args, size_t n) {
  KILN_CHECK(n > 0 && PyUnicode_Check(args[0]), "kiln._C._branch takes what to do");
  const std::string_view step = PyUnicode_AsUTF8(args[0]);
  if (step == "may")
    return PyBool_FromLong(options.both_branches && !options.for_fx && !aten::inside_transform() &&
                           !py::function_mode_active());
  if (step == "begin") {
    branches.push_back(now());
    Py_RETURN_NONE;
  }
  if (step == "alike" && n == 3) {  // that they are of equal sizes was asked already
    const at::Tensor &a = THPVariable_Unpack(args[1]), &b = THPVariable_Unpack(args[2]);
    return PyBool_FromLong(a.scalar_type() == b.scalar_type() && a.strides() == b.strides());
  }
  if (step == "refuse" && n == 2) {
    branches.push_back(now());  // the next attempt runs one branch
    return graph_break("data-dependent-branch", PyUnicode_AsUTF8(args[1]));
  }
  KILN_CHECK(step == "end" && n == 3 && py::is_tensor(args[1]) && !branches.empty(), "an unknown step of a branch");
  return end_branch(THPVariable_Unpack(args[1]), args[2] == Py_True);
}

PyObject* Machine::end_branch(const at::Tensor& pred, bool taken_if) {
  if (const char* why = refusal_since(branches.back()))
    return graph_break("data-dependent-branch", std::string("a branch of torch.cond ") + why);
  const std::vector<Node*> region = nodes_since(branches.back());
  const std::unordered_set<const Node*> own(region.begin(), region.end());
  if (draws_since(branches.back()) ||
      std::any_of(region.begin(), region.end(), [](const Node* n) { return graph::runs_unused(*n); }))
    return graph_break("data-dependent-branch", "a branch of torch.cond that draws random numbers, or may raise");
  std::vector<Value> outside;
  bool cheap = true;
  for (const Node* n : region) {
    cheap &= is_cheap(*n);
    for (const Arg& a : n->args)
      graph::for_each_value(a, [&](Value v) {
        if (v && !own.contains(v.node) && v.meta().requires_grad && n->grad_enabled &&
            std::find(outside.begin(), outside.end(), v) == outside.end())
          outside.push_back(v);
      });
  }
  if (!cheap && outside.empty() && !options.fullgraph)
    return graph_break("data-dependent-branch", "a branch of torch.cond that is left out where it is not taken");
  graph::Graph& g = trace.graph();
  const Value condition = trace.value_of(pred);
  if (!outside.empty()) g.set_insert_point(region.back());
  std::vector<std::pair<Value, Value>> masked;
  for (const Value& v : outside) {
    if (!v.meta().is_non_overlapping_and_dense()) {  // where() would have other strides
      g.set_insert_point(nullptr);
      return graph_break("data-dependent-branch", "a branch of torch.cond that reads a tensor with gaps");
    }
    graph::TensorMeta meta = v.meta(), detached = v.meta();
    detached.requires_grad = false;
    meta.offset = 0;
    const Value stopped = g.add_call(graph::Op("aten::detach"), {Arg(v)}, {detached})->out();
    Node* where = g.add_call(graph::Op("aten::where.self"),
                             {Arg(condition), Arg(taken_if ? v : stopped), Arg(taken_if ? stopped : v)}, {meta});
    for (Node* n : {stopped.node, where}) {
      n->stack = region.back()->stack;
      n->checkpoint = region.back()->checkpoint;
    }
    if (trace.sizes && trace.sizes->is_open(v))
      for (Node* n : {stopped.node, where}) trace.sizes->open(n);
    masked.emplace_back(v, where->out());
  }
  g.set_insert_point(nullptr);
  trace.num_nodes += static_cast<int64_t>(2 * masked.size());
  for (Node* n : region)
    for (Arg& a : n->args)
      graph::for_each_value(a, [&](Value& v) {
        for (const auto& [from, to] : masked)
          if (v == from) v = to;
      });
  branches.pop_back();
  Py_RETURN_NONE;
}

}  // namespace kiln::capture
