#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Layout.h>
#include <torch/csrc/MemoryFormat.h>

#include "aten/convert.h"
#include "aten/schema.h"
#include "aten/trace.h"
#include "graph/infer.h"
#include "python/bindings/fx.h"
#include "python/cpython/tensor.h"
#include "python/pch.h"

namespace kiln::bindings {
namespace {

namespace pb = pybind11;
using graph::Arg;
using graph::Graph;
using graph::Node;
using graph::TensorMeta;
using graph::Value;

class Importer {
 public:
  explicit Importer(const std::vector<TensorMeta>& inputs) : inputs_(inputs), g_(std::make_unique<Graph>()) {
    node_type_ = pb::module_::import("torch.fx").attr("Node");
    getitem_ = pb::module_::import("operator").attr("getitem");
  }

  std::unique_ptr<Graph> run(const pb::object& gm) {
    const pb::list nodes(gm.attr("graph").attr("nodes"));
    for (pb::handle h : nodes) {
      const auto node = pb::reinterpret_borrow<pb::object>(h);
      const auto kind = pb::cast<std::string>(node.attr("op"));
      if (kind == "placeholder")
        placeholder(node);
      else if (kind == "call_function")
        call(node);
      else if (kind == "get_attr")
        constant(gm, node);
      else if (kind == "output")
        output(node);
      else
        throw Unsupported("a GraphModule with a " + kind + " node");
    }
    if (g_->inputs().size() != inputs_.size())
      throw Unsupported("a GraphModule with " + std::to_string(g_->inputs().size()) + " inputs in place of " +
                        std::to_string(inputs_.size()));
    return std::move(g_);
  }

 private:
  static std::string name_of(const pb::object& node) { return pb::cast<std::string>(node.attr("name")); }

  void placeholder(const pb::object& node) {
    const size_t index = g_->inputs().size();
    if (index >= inputs_.size()) throw Unsupported("a GraphModule with more inputs than the graph it was made from");
    set(node, g_->add_input(name_of(node), inputs_[index])->out());
  }

  /// A tensor that the module keeps: its numbers are the graph's.
  void constant(const pb::object& gm, const pb::object& node) {
    const pb::object kept = pb::module_::import("operator").attr("attrgetter")(node.attr("target"))(gm);
    if (!py::is_tensor(kept.ptr())) throw Unsupported("a GraphModule with an attribute that is no tensor");
    const at::Tensor t = THPVariable_Unpack(kept.ptr());
    if (!aten::can_be_constant(t)) throw Unsupported("a GraphModule with a tensor that is no small constant");
    const TensorMeta meta = aten::constant_meta(t);
    set(node, g_->add_call(graph::Op("kiln::tensor_constant"), aten::constant_args(aten::numbers_of(t), meta), {meta},
                           name_of(node))
                  ->out());
  }

  void output(const pb::object& node) {
    pb::object result = node.attr("args")[pb::int_(0)];
    if (!pb::isinstance<pb::tuple>(result) && !pb::isinstance<pb::list>(result)) result = pb::make_tuple(result);
    for (pb::handle item : result) g_->outputs().push_back(arg(pb::reinterpret_borrow<pb::object>(item)));
  }

  void call(const pb::object& node) {
    const pb::object target = node.attr("target");
    const pb::tuple args = node.attr("args");
    if (target.is(getitem_)) return item(node, args);
    if (!pb::hasattr(target, "_schema"))
      throw Unsupported("a call of " + pb::cast<std::string>(pb::repr(target)) + " in a graph of ATen ops");
    const pb::object schema = target.attr("_schema");
    std::string name = pb::cast<std::string>(schema.attr("name"));
    if (const auto overload = pb::cast<std::string>(schema.attr("overload_name")); !overload.empty())
      name += "." + overload;
    if (name == "aten::lift_fresh_copy") return set(node, get(args[0]));  // graphs do not write to constants
    const aten::OpInfo& op = aten::get_op(name);
    const pb::dict kwargs = node.attr("kwargs");
    const auto& arguments = op.schema().arguments();
    std::vector<Arg> converted;
    for (size_t i = 0; i < arguments.size(); ++i) {
      const pb::str key(arguments[i].name());
      if (i < args.size())
        converted.push_back(arg(args[i]));
      else if (kwargs.contains(key))
        converted.push_back(arg(kwargs[key]));
      else if (const auto& d = arguments[i].default_value())
        converted.push_back(aten::from_ivalue(*d, arguments[i].real_type(), aten::ValueOf()));
      else
        throw Unsupported(name + " without its argument " + arguments[i].name());
    }
    if (name == "aten::copy_" && converted[0].is_value() &&
        converted[0].value().node->kind == graph::NodeKind::Placeholder) {
      g_->mutations().push_back({converted[0].value(), converted[1].value()});
      set(node, converted[1].value());
      return;
    }
    std::vector<TensorMeta> results = known_results(node);
    if (results.empty()) results = graph::infer(op.op, converted);
    Node* made = g_->add_call(op.op, std::move(converted), std::move(results), name_of(node));
    const auto& returns = op.schema().returns();
    made->returns_list = returns.size() == 1 && returns[0].type()->kind() == c10::TypeKind::ListType;
    set(node, made->out());
  }

  void item(const pb::object& node, const pb::tuple& args) {
    const Value source = get(args[0]);
    const auto index = pb::cast<int64_t>(pb::object(args[1]));
    const auto n = static_cast<int64_t>(source.node->results.size());
    if (index < -n || index >= n) throw Unsupported("getitem out of range");
    set(node, source.node->out(static_cast<uint32_t>(index < 0 ? index + n : index)));
  }

  /// From meta["val"], if it describes tensors.
  static std::vector<TensorMeta> known_results(const pb::object& node) {
    const pb::dict meta = node.attr("meta");
    if (!meta.contains("val")) return {};
    pb::object val = meta["val"];
    if (!pb::isinstance<pb::tuple>(val) && !pb::isinstance<pb::list>(val)) val = pb::make_tuple(val);
    std::vector<TensorMeta> out;
    for (pb::handle h : val) {
      if (py::is_tensor(h.ptr()))
        out.push_back(aten::meta_of(THPVariable_Unpack(h.ptr())));
      else if (h.is_none())
        out.push_back(graph::undefined_meta());
      else
        return {};
    }
    if (out.size() == 1 && !out[0].defined) return {};
    return out;
  }

  Arg arg(const pb::object& o) {
    PyObject* p = o.ptr();
    if (o.is_none()) return {};
    if (pb::isinstance(o, node_type_)) return get(o);
    if (PyBool_Check(p)) return p == Py_True;
    if (PyLong_Check(p)) return pb::cast<int64_t>(o);
    if (PyFloat_Check(p)) return pb::cast<double>(o);
    if (PyComplex_Check(p)) return pb::cast<std::complex<double>>(o);
    if (PyUnicode_Check(p)) return pb::cast<std::string>(o);
    if (THPDtype_Check(p)) return aten::dtype_of(reinterpret_cast<THPDtype*>(p)->scalar_type);
    if (THPDevice_Check(p)) return aten::device_of(reinterpret_cast<THPDevice*>(p)->device);
    if (THPLayout_Check(p)) return aten::layout_of(reinterpret_cast<THPLayout*>(p)->layout);
    if (THPMemoryFormat_Check(p)) return aten::memory_format_of(reinterpret_cast<THPMemoryFormat*>(p)->memory_format);
    if (PyTuple_Check(p) || PyList_Check(p)) {
      Arg::List list;
      for (pb::handle h : o) list.push_back(arg(pb::reinterpret_borrow<pb::object>(h)));
      return list;
    }
    throw Unsupported("an argument " + pb::cast<std::string>(pb::repr(o)) + " in a graph of ATen ops");
  }

  void set(const pb::object& node, Value v) { values_[node.ptr()] = v; }
  Value get(const pb::object& node) {
    const auto it = values_.find(node.ptr());
    if (it == values_.end()) throw Unsupported("a GraphModule whose nodes are out of order");
    return it->second;
  }

  const std::vector<TensorMeta>& inputs_;
  std::unique_ptr<Graph> g_;
  pb::object node_type_, getitem_;
  std::unordered_map<PyObject*, Value> values_;
};

}  // namespace

std::unique_ptr<Graph> from_fx(PyObject* gm, const std::vector<TensorMeta>& inputs) {
  try {
    return Importer(inputs).run(pb::reinterpret_borrow<pb::object>(gm));
  } catch (pb::error_already_set& e) {
    e.restore();
  } catch (python_error& e) {
    e.restore();
  }
  throw py::PythonError{};
}

}  // namespace kiln::bindings
