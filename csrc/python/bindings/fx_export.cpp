#include <pybind11/complex.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Layout.h>
#include <torch/csrc/MemoryFormat.h>
#include <torch/csrc/utils/tensor_memoryformats.h>

#include <algorithm>

#include "aten/convert.h"
#include "aten/fake.h"
#include "aten/modes.h"
#include "aten/schema.h"
#include "graph/infer.h"
#include "python/bindings/fx.h"
#include "python/capture/capture.h"
#include "python/pch.h"

namespace kiln::bindings {
namespace {

namespace pb = pybind11;
using graph::Arg;
using graph::Graph;
using graph::Node;
using graph::NodeKind;
using graph::Value;
using symbolic::Expr;
using symbolic::Real;

pb::object borrow(void* o) { return pb::reinterpret_borrow<pb::object>(static_cast<PyObject*>(o)); }

pb::object dtype_object(DType t) { return borrow(torch::getTHPDtype(aten::scalar_type_of(t))); }

/// Builds one torch.fx.Graph. Holds Python objects; lives under the GIL.
class Exporter {
 public:
  Exporter(const Graph& g, const std::vector<py::Ref>& targets, bool modes,
           const capture::CaptureResult* captured = nullptr)
      : g_(g), targets_(targets), modes_(modes), captured_(captured) {
    fx_ = pb::module_::import("torch.fx");
    operator_ = pb::module_::import("operator");
    metadata_ = pb::module_::import("torch.fx.passes.shape_prop").attr("TensorMetadata");
    graph_ = fx_.attr("Graph")();
    root_ = pb::module_::import("torch").attr("nn").attr("Module")();
  }

  /// `inputs`: the placeholders, if some are none of the graph's.
  pb::object run(const std::vector<frame::FxInput>& inputs = {}) {
    for (const frame::FxInput& in : inputs) {
      if (in.kind == frame::FxInput::Kind::Tensor)
        placeholder(*g_.inputs()[in.index]);
      else
        size_placeholder(in);
    }
    for (const auto& node : g_.nodes()) {
      if (node->kind == NodeKind::Placeholder) {
        if (!nodes_.contains(node.get())) placeholder(*node);
      } else {
        if (modes_) set_modes(node->grad_enabled, node->autocast);
        call(*node);
      }
    }
    if (modes_) set_modes(start_.grad, start_autocast());
    for (const graph::Mutation& m : g_.mutations()) {
      pb::object copy = aten_overload("aten::copy_");
      graph_.attr("call_function")(copy, pb::make_tuple(value(m.input), value(m.value)));
    }
    pb::list outputs;
    for (const Arg& a : g_.outputs()) outputs.append(object(a));
    graph_.attr("output")(pb::tuple(outputs));
    return fx_.attr("GraphModule")(root_, graph_);
  }

 private:
  // --- constants ---
  /// Strings and lists with the marks that capture writes for objects that a graph cannot hold: "target::N", "...",
  /// ["slice", start, stop, step], ["tuple", ...].
  pb::object marked_string(const std::string& s) {
    if (!targets_.empty() && s == "...") return pb::ellipsis();
    if (const auto target = target_of(s)) return argument(*target);
    const auto size = captured_ ? capture::size_index(s) : std::nullopt;
    if (size && *size < captured_->torch_sizes.size())
      return std::visit([&](const auto& n) { return number(n); }, captured_->torch_sizes[*size]);
    return pb::str(s);
  }
  /// An object as an argument of a node: the code that torch.fx writes has no text for it, so it is an attribute of the
  /// module. Python's types that stand for a dtype are that dtype.
  pb::object argument(const pb::object& o) {
    for (const auto& [type, dtype] : {std::pair{&PyBool_Type, DType::Bool},
                                      {&PyLong_Type, DType::Int64},
                                      {&PyFloat_Type, DType::Float64},
                                      {&PyComplex_Type, DType::Complex128}})
      if (o.ptr() == reinterpret_cast<PyObject*>(type)) return dtype_object(dtype);
    pb::object& node = attributes_[o.ptr()];
    if (!node) node = attribute("_constant" + std::to_string(attributes_.size() - 1), o);
    return node;
  }
  /// A get_attr node of the module's attribute `name`, which is `o` from now on.
  pb::object attribute(const std::string& name, const pb::object& o) {
    root_.attr(name.c_str()) = o;
    return graph_.attr("create_node")("get_attr", name);
  }
  std::optional<pb::object> target_of(const std::string& s) const {
    const auto index = targets_.empty() ? std::nullopt : capture::target_index(s);
    if (!index) return std::nullopt;
    KILN_CHECK(*index < targets_.size(), "no target " + s);
    return borrow(targets_[*index].get());
  }

  pb::object list(const Arg::List& items) {
    const std::string* mark =
        !targets_.empty() && !items.empty() && items[0].is<std::string>() ? &items[0].as<std::string>() : nullptr;
    if (mark && *mark == "slice" && items.size() == 4)
      return pb::reinterpret_steal<pb::object>(
          PySlice_New(object(items[1]).ptr(), object(items[2]).ptr(), object(items[3]).ptr()));
    const bool tuple = mark && *mark == "tuple";
    pb::list out;
    for (size_t i = tuple ? 1 : 0; i < items.size(); ++i) out.append(object(items[i]));
    if (tuple) return pb::tuple(out);
    return out;
  }

  pb::object object(const Arg& a) {
    return std::visit(
        [&](const auto& v) -> pb::object {
          using T = std::decay_t<decltype(v)>;
          if constexpr (std::is_same_v<T, std::monostate>)
            return pb::none();
          else if constexpr (std::is_same_v<T, Value>)
            return v ? value(v) : pb::none();
          else if constexpr (std::is_same_v<T, std::string>)
            return marked_string(v);
          else if constexpr (std::is_same_v<T, DType>)
            return dtype_object(v);
          else if constexpr (std::is_same_v<T, graph::Layout>)
            return borrow(torch::getTHPLayout(aten::to_layout(v)));
          else if constexpr (std::is_same_v<T, graph::Device>)
            return pb::reinterpret_steal<pb::object>(THPDevice_New(aten::to_device(v)));
          else if constexpr (std::is_same_v<T, graph::MemoryFormat>)
            return borrow(torch::utils::getTHPMemoryFormat(aten::to_memory_format(v)));
          else if constexpr (std::is_same_v<T, Arg::List>)
            return list(v);
          else
            return pb::cast(v);
        },
        a.data);
  }

  // --- values ---
  pb::object value(const Value& v) {
    pb::object node = nodes_.at(v.node);
    if (v.node->results.size() == 1 && !v.node->returns_list) return node;
    pb::object& item = items_[v];
    if (!item) {
      item = graph_.attr("call_function")(operator_.attr("getitem"), pb::make_tuple(node, v.index));
      describe(item, pb::none(), {&v.node->results.at(v.index), 1}, false);
    }
    return item;
  }

  pb::object tensor_metadata(const graph::TensorMeta& t) {
    pb::object format = pb::none();
    if (t.is_contiguous())
      format = object(graph::MemoryFormat::Contiguous);
    else if (t.is_contiguous(graph::MemoryFormat::ChannelsLast))
      format = object(graph::MemoryFormat::ChannelsLast);
    else if (t.is_contiguous(graph::MemoryFormat::ChannelsLast3d))
      format = object(graph::MemoryFormat::ChannelsLast3d);
    pb::object size = pb::module_::import("torch").attr("Size")(pb::cast(t.sizes));
    return metadata_(size, dtype_object(t.dtype), t.requires_grad, pb::tuple(pb::cast(t.strides)), format, false,
                     pb::dict());
  }

  void describe(const pb::object& node, const pb::object& stack_trace, std::span<const graph::TensorMeta> results,
                bool many) {
    pb::list infos, fakes;
    for (const graph::TensorMeta& t : results) {
      const bool plain = t.defined && t.dtype != DType::Opaque;
      infos.append(plain ? tensor_metadata(t) : pb::none());
      pb::object fake = pb::none();
      if (plain) {
        at::Tensor tensor = aten::make_fake(t);
        if (t.requires_grad && !tensor.requires_grad()) tensor.set_requires_grad(true);
        fake = pb::cast(tensor);
      }
      fakes.append(fake);
    }
    pb::object info = many            ? pb::object(pb::tuple(infos))
                      : infos.empty() ? pb::object(pb::none())
                                      : pb::object(infos[0]);
    pb::object fake = many            ? pb::object(pb::tuple(fakes))
                      : fakes.empty() ? pb::object(pb::none())
                                      : pb::object(fakes[0]);
    pb::dict meta = node.attr("meta");
    meta["tensor_meta"] = info;
    meta["val"] = fake;
    meta["example_value"] = fake;
    if (!stack_trace.is_none()) meta["stack_trace"] = stack_trace;
  }

  pb::object stack_trace(const Node& n) {
    if (!n.stack || n.stack->empty()) return pb::none();
    pb::object& known = traces_[n.stack.get()];
    if (!known) {
      pb::object getline = pb::module_::import("linecache").attr("getline");
      std::string text;
      for (const auto& f : *n.stack) {
        text += "  File \"" + f->file + "\", line " + std::to_string(f->line) + ", in " + f->function + "\n";
        const auto line = pb::cast<std::string>(getline(f->file, f->line).attr("strip")());
        if (!line.empty()) text += "    " + line + "\n";
      }
      known = pb::str(text);
    }
    return known;
  }

  // --- sizes ---
  void size_placeholder(const frame::FxInput& in) {
    const symbolic::AtomNode& variable = *in.size.terms().at(0).atom;
    const std::string name = symbolic::print(in.size);
    leaves_[variable.id] =
        with_size(graph_.attr("create_node")("placeholder", name, pb::tuple(), pb::dict(), name), in.size);
  }

  /// Says that `node` gives `e`.
  pb::object with_size(const pb::object& node, const Expr& e) {
    return with_value(node, pb::cast(captured_->sizes->symint(e)));
  }
  static pb::object with_value(const pb::object& node, const pb::object& value) {
    for (const char* name : {"val", "example_value"}) node.attr("meta")[name] = value;
    return node;
  }

  pb::object compute(const char* module, const char* function, const pb::object& a, const pb::object& b) {
    return graph_.attr("call_function")(pb::module_::import(module).attr(function), pb::make_tuple(a, b));
  }

  /// A node that computes `e`; a plain int if it is one.
  pb::object number(const Expr& e) {
    pb::object& known = numbers_[e];
    if (known) return known;
    pb::object sum;
    for (const symbolic::Term& term : e.terms()) {
      pb::object value = atom(*term.atom);
      if (term.coef != 1) value = compute("operator", "mul", value, pb::int_(term.coef));
      sum = sum ? compute("operator", "add", sum, value) : value;
    }
    if (!sum)
      sum = pb::int_(e.constant());
    else if (e.constant() != 0)
      sum = compute("operator", "add", sum, pb::int_(e.constant()));
    if (pb::isinstance(sum, fx_.attr("Node"))) with_size(sum, e);
    return numbers_[e] = sum;
  }

  pb::object atom(const symbolic::AtomNode& a) {
    using Kind = symbolic::AtomKind;
    switch (a.kind) {
      case Kind::Var:
        return leaf(a.id);
      case Kind::FloorDiv:
        return compute("operator", "floordiv", number(a.a), pb::int_(a.divisor));
      case Kind::Mod:
        return compute("operator", "mod", number(a.a), pb::int_(a.divisor));
      case Kind::Min:
        return compute("torch", "sym_min", number(a.a), number(a.b));
      case Kind::Max:
        return compute("torch", "sym_max", number(a.a), number(a.b));
      case Kind::Product:
        return compute("operator", "mul", number(a.a), number(a.b));
    }
    throw InternalError("bad atom");
  }

  /// A node that computes `r`, a plain float or int for what is none.
  pb::object number(const Real& r) {
    using Op = Real::Op;
    struct Row {
      Op op;
      const char *module, *function;
    };
    static constexpr Row kRows[] = {
        {Op::Neg, "operator", "neg"},           {Op::Abs, "operator", "abs"},      {Op::Add, "operator", "add"},
        {Op::Sub, "operator", "sub"},           {Op::Mul, "operator", "mul"},      {Op::Div, "operator", "truediv"},
        {Op::FloorDiv, "operator", "floordiv"}, {Op::Mod, "operator", "mod"},      {Op::Pow, "operator", "pow"},
        {Op::Less, "operator", "lt"},           {Op::LessEqual, "operator", "le"}, {Op::Equal, "operator", "eq"},
        {Op::Floor, "math", "floor"},           {Op::Ceil, "math", "ceil"},        {Op::Trunc, "math", "trunc"},
        {Op::Round, "builtins", "round"},
    };
    if (r.op() == Op::Constant) return pb::float_(r.constant());
    if (r.op() == Op::Integer) return number(r.integer());
    std::string module = "math", function;
    if (r.op() == Op::Function) {
      function = r.function_name();
    } else {
      const Row* row = std::find_if(std::begin(kRows), std::end(kRows), [&](const Row& x) { return x.op == r.op(); });
      KILN_CHECK(row != std::end(kRows), "no function for an operation of a float");
      module = row->module;
      function = row->function;
    }
    pb::tuple operands(r.operands().size());
    for (size_t i = 0; i < r.operands().size(); ++i) operands[i] = number(r.operands()[i]);
    const pb::object node =
        graph_.attr("call_function")(pb::module_::import(module.c_str()).attr(function.c_str()), operands);
    if (r.gives_int()) return node;
    // pybind11's cast of a SymFloat is for PyTorch's own nodes alone.
    return with_value(
        node, pb::module_::import("torch").attr("SymFloat")(pb::cast(captured_->sizes->symfloat(r).toSymNodeImpl())));
  }

  /// The size of a value, if it is no placeholder of its own. Those of inputs that are not open are guarded.
  pb::object leaf(int id) {
    if (pb::object known = leaves_[id]) return known;
    const aten::Sizes::Leaf& leaf = captured_->sizes->leaves().at(static_cast<size_t>(id));
    if (leaf.of) return leaves_[id] = with_size(number(*leaf.of), captured_->sizes->whole(*leaf.of));
    const Value v = captured_->torch_leaves.at(static_cast<size_t>(id));
    if (v.node->kind == NodeKind::Placeholder) return leaves_[id] = pb::int_(leaf.hint);
    return leaves_[id] = graph_.attr("call_method")("size", pb::make_tuple(value(v), leaf.dim));
  }

  // --- modes ---
  DType start_autocast() const { return start_.autocast ? aten::dtype_of(start_.autocast_dtype) : DType::Opaque; }

  /// Nodes that put grad mode and the CPU's autocast into the state that the next call was captured in.
  void set_modes(bool grad, DType autocast) {
    const pb::object torch = pb::module_::import("torch");
    if (grad != grad_) {
      graph_.attr("call_function")(torch.attr("_C").attr("_set_grad_enabled"), pb::make_tuple(grad));
      grad_ = grad;
    }
    if (autocast == autocast_) return;
    const pb::object amp = torch.attr("amp").attr("autocast_mode");
    if (entered_) graph_.attr("call_function")(amp.attr("_exit_autocast"), pb::make_tuple(entered_));
    entered_ = pb::object();
    if (autocast != start_autocast()) {
      const bool on = autocast != DType::Opaque;
      // Without the cache of casts: it outlives the block if there is an autocast around the call.
      entered_ = graph_.attr("call_function")(
          amp.attr("_enter_autocast"),
          pb::make_tuple("cpu", on ? dtype_object(autocast) : pb::object(pb::none()), on, false));
    }
    autocast_ = autocast;
  }

  // --- nodes ---
  pb::object create(const char* kind, const pb::object& target, const pb::tuple& args, const pb::dict& kwargs,
                    const Node& n) {
    pb::object node = graph_.attr("create_node")(kind, target, args, kwargs, n.name);
    describe(node, stack_trace(n), n.results, n.results.size() != 1 || n.returns_list);
    if (!n.module_path.empty()) {
      pb::dict modules;
      modules[pb::str(n.module_path)] =
          pb::make_tuple(n.module_path, pb::module_::import("torch").attr("nn").attr("Module"));
      node.attr("meta")["nn_module_stack"] = modules;
    }
    nodes_[&n] = node;
    return node;
  }

  void placeholder(const Node& n) {
    const pb::object node = create("placeholder", pb::str(n.name), pb::tuple(), pb::dict(), n);
    // torch.fx gives another name to a node that is called as a builtin is (pow), and writes code that assigns the
    // argument to it, over another argument of that name.
    node.attr("target") = node.attr("name");
  }

  /// The operator of a node. Where a functional graph has a lazy conjugate, it means its numbers: whether the tensor is
  /// one afterwards is none of the graph's business.
  std::string operator_name(const Node& n) const {
    static const graph::Op kLazy("aten::_conj");
    return !modes_ && n.op == kLazy ? "aten::_conj_physical" : n.op.name();
  }

  static pb::object aten_overload(const std::string& name) {
    const size_t colons = name.find("::"), dot = name.find('.', colons);
    pb::object found = pb::module_::import("torch").attr("ops").attr(name.substr(0, colons).c_str());
    found = found.attr(name.substr(colons + 2, dot == std::string::npos ? dot : dot - colons - 2).c_str());
    return found.attr(dot == std::string::npos ? "default" : name.substr(dot + 1).c_str());
  }

  /// A tensor whose numbers the graph knows, as AOT compilers are used to it: an attribute of the module, copied by
  /// each run, since a result may be written.
  void constant(const Node& n) {
    pb::object tensor = pb::reinterpret_steal<pb::object>(THPVariable_Wrap(aten::constant_tensor(n.args)));
    const pb::object kept = attribute("_tensor_constant" + std::to_string(num_tensors_++), tensor);
    describe(kept, pb::none(), n.results, false);
    create("call_function", aten_overload("aten::lift_fresh_copy"), pb::make_tuple(kept), pb::dict(), n);
  }

  /// Python's `a += b` where `a` is a number, of which torch.fx would write code that assigns to it: `a + b`.
  pb::object without_assignment(const pb::object& target, const pb::list& args) const {
    if (args.empty() || pb::isinstance(args[0], fx_.attr("Node")) || !pb::hasattr(target, "__module__") ||
        !pb::str("_operator").equal(target.attr("__module__")))
      return target;
    const auto name = pb::cast<std::string>(target.attr("__name__"));
    if (name.size() < 2 || name[0] != 'i') return target;
    // iand is and_, ior is or_
    for (const std::string& plain : {name.substr(1), name.substr(1) + "_"})
      if (pb::hasattr(operator_, ("__" + name + "__").c_str()) && pb::hasattr(operator_, plain.c_str()))
        return operator_.attr(plain.c_str());
    return target;
  }

  void call(const Node& n) {
    static const graph::Op kConstant("kiln::tensor_constant");
    const std::string& name = n.op.name();
    if (n.op == kConstant) return constant(n);
    if (const aten::OpInfo* op = aten::find_op(n.op)) return aten_call(n, *op);
    pb::list args;
    for (const Arg& a : n.args) args.append(object(a));
    pb::dict kwargs;
    for (const auto& [key, a] : n.kwargs) kwargs[pb::str(key)] = object(a);
    if (name.starts_with("method.")) {
      create("call_method", pb::str(name.substr(7)), pb::tuple(args), kwargs, n);
      return;
    }
    const auto captured = target_of(name);
    pb::object target = captured ? *captured : imported(name);
    if (pb::object method = tensor_method(target); !method.is_none()) {
      create("call_method", method, pb::tuple(args), kwargs, n);
      return;
    }
    create("call_function", without_assignment(target, args), pb::tuple(args), kwargs, n);
  }

  /// The name under which a method of Tensor is called ("view" for torch.Tensor.view), else None. Operators' slots
  /// ("__add__") stay functions.
  static pb::object tensor_method(const pb::object& target) {
    if (!pb::hasattr(target, "__objclass__")) return pb::none();
    pb::object owner = target.attr("__objclass__");
    pb::object tensor = pb::module_::import("torch").attr("Tensor");
    if (PyObject_IsSubclass(tensor.ptr(), owner.ptr()) != 1 ||
        owner.ptr() == reinterpret_cast<PyObject*>(&PyBaseObject_Type)) {
      PyErr_Clear();
      return pb::none();
    }
    return pb::hasattr(target, "__name__") && PyCallable_Check(target.ptr()) ? target.attr("__name__")
                                                                             : pb::object(pb::none());
  }

  /// "torch.nn.functional.relu" -> the function: the longest importable module, then attributes.
  static pb::object imported(const std::string& name) {
    for (size_t end = name.rfind('.'); end != std::string::npos && end > 0; end = name.rfind('.', end - 1)) {
      py::Ref module = py::Ref::steal(py::import_module(name.substr(0, end).c_str()));
      if (!module) {
        PyErr_Clear();
        continue;
      }
      pb::object found = borrow(module.get());
      for (size_t at = end + 1; at <= name.size();) {
        const size_t next = std::min(name.find('.', at), name.size());
        found = found.attr(name.substr(at, next - at).c_str());
        at = next + 1;
      }
      return found;
    }
    return pb::module_::import("builtins").attr(name.c_str());
  }

  /// A copy in strides that are the graph's own, not those that clone() gives: to a tensor that has them.
  bool laid_out_copy(const Node& n) {
    static const graph::Op kClone("aten::clone");
    if (modes_ || n.op != kClone || graph::infer(n.op, n.args).at(0).strides == n.results[0].strides) return false;
    const graph::TensorMeta& meta = n.results[0];
    const pb::object from = object(n.args[0]);
    const pb::object to = graph_.attr("call_function")(
        aten_overload("aten::new_empty_strided"), pb::make_tuple(from, pb::cast(meta.sizes), pb::cast(meta.strides)));
    describe(to, pb::none(), n.results, false);
    create("call_function", aten_overload("aten::copy"), pb::make_tuple(to, from), pb::dict(), n);
    return true;
  }

  void aten_call(const Node& n, const aten::OpInfo& op) {
    if (laid_out_copy(n)) return;
    const auto& arguments = op.schema().arguments();
    const auto is_default = [&](size_t i) {
      const auto& d = arguments[i].default_value();
      if (!d) return false;
      const Arg standard = aten::from_ivalue(*d, arguments[i].real_type(), aten::ValueOf());
      if (standard == n.args[i]) return true;
      // 0 and 0.0 are one default.
      return standard.is_number() && n.args[i].is_number() && !standard.is<bool>() &&
             standard.to_double() == n.args[i].to_double();
    };
    size_t positional = 0;  // behind the last positional argument that differs from its default
    for (size_t i = 0; i < n.args.size() && i < arguments.size(); ++i)
      if (!arguments[i].kwarg_only() && !is_default(i)) positional = i + 1;
    pb::list args;
    pb::dict kwargs;
    for (size_t i = 0; i < n.args.size() && i < arguments.size(); ++i) {
      if (arguments[i].kwarg_only()) {
        if (!is_default(i)) kwargs[pb::str(arguments[i].name())] = object(n.args[i]);
      } else if (i < positional) {
        args.append(object(n.args[i]));
      }
    }
    create("call_function", aten_overload(operator_name(n)), pb::tuple(args), kwargs, n);
  }

  const Graph& g_;
  const std::vector<py::Ref>& targets_;
  const bool modes_;         // the graph was captured: its calls have modes
  const aten::Modes start_;  // where the graph will be called
  bool grad_ = start_.grad;
  DType autocast_ = start_autocast();
  pb::object entered_;  // the autocast that is on
  pb::object fx_, operator_, metadata_, graph_, root_;
  const capture::CaptureResult* captured_;
  std::unordered_map<int, pb::object> leaves_;            // of aten::Sizes, by id
  std::unordered_map<Expr, pb::object> numbers_;          // computed sizes
  std::unordered_map<PyObject*, pb::object> attributes_;  // nodes of objects that are arguments
  size_t num_tensors_ = 0;
  std::unordered_map<const Node*, pb::object> nodes_;
  std::unordered_map<Value, pb::object> items_;
  std::unordered_map<const graph::StackTrace*, pb::object> traces_;
};

/// Python exceptions leave as py::PythonError, with the exception set.
template <class F>
py::Ref exported(F&& f) {
  try {
    return py::Ref::steal(f().release().ptr());
  } catch (pb::error_already_set& e) {
    e.restore();
  } catch (python_error& e) {
    e.restore();
  }
  throw py::PythonError{};
}

}  // namespace

py::Ref to_fx(const Graph& g, const std::vector<py::Ref>& targets) {
  return exported([&] { return Exporter(g, targets, /*modes=*/true).run(); });
}

py::Ref aten_to_fx(const Graph& g, bool modes) {
  return exported([&] { return Exporter(g, {}, modes).run(); });
}

py::Ref captured_to_fx(const capture::CaptureResult& captured, const std::vector<frame::FxInput>& inputs) {
  if (!captured.torch_level) return aten_to_fx(*captured.traced, /*modes=*/true);
  return exported(
      [&] { return Exporter(*captured.torch_level, captured.torch_targets, /*modes=*/true, &captured).run(inputs); });
}

}  // namespace kiln::bindings
