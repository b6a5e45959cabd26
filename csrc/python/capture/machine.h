#pragma once

#include <c10/core/InferenceMode.h>

#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "aten/modes.h"
#include "aten/trace.h"
#include "aten/transforms.h"
#include "joint/marks.h"
#include "python/capture/arrays.h"
#include "python/capture/capture.h"
#include "python/capture/known.h"
#include "python/capture/lru_cache.h"
#include "python/cpython/function_modes.h"
#include "python/cpython/py311.h"
#include "python/cpython/ref.h"
#include "python/cpython/tensor.h"

// The state of one capture. Handlers of instructions (eval.h) and the rules for reading and writing existing objects
// work on it. Errors inside a capture travel as Python exceptions, since CPython's own frames lie in between; a graph
// break is the exception `graph_break_type()`, which no user handler sees.
namespace kiln::capture {

using guards::Guard;

/// Appends the tensors of a tuple or list, undefined ones for None; false if it holds anything else, or is neither.
bool tensors_of(PyObject* o, std::vector<at::Tensor>* out);
/// Whether one of `tensors` is `t` or, as autograd has it, a view of it.
bool has_or_views(const std::vector<at::Tensor>& tensors, const at::Tensor& t);
/// What may be computed a second time to learn a condition.
enum class Reach : uint8_t {
  Small,  // single elements, and small tensors of integers
  Masks,  // also what only compares larger ones, element by element, as is done to find out what a mask is for; sums
          // of floats are a model's work
  Constants,  // any small tensors, and comparisons of larger ones, if no input is among them
};

/// A parameter or buffer, read from its module.
bool is_module_state(const guards::Source& s);
class Leaver;
/// Imports kiln._numbers, outside of a capture.
void load_numbers();
/// The class of what stands for a text.
PyTypeObject* text_type();
/// kiln._masked.Masked.
PyTypeObject* masked_type();
/// What gives a number's value on leaving.
PyObject* number_value_function();

class Machine {
 public:
  Machine(PyThreadState* ts, py311::Frame* frame, const CaptureOptions& options);
  ~Machine();
  Machine(const Machine&) = delete;

  /// One attempt; the result is complete if `done`, else root_instruction and reason say where it broke.
  CaptureResult run();
  PyObject* evaluate(py311::Frame* frame, int throw_flag);
  bool place_root_arguments(struct Exec& e);
  /// Side effects, outputs and the graphs, once the exit is known.
  void finish();
  std::shared_ptr<const graph::StackTrace> stack_trace();

  PyThreadState* ts;
  py311::Frame* real_root;       // the frame that was asked for; untouched
  py311::Frame* root = nullptr;  // its running copy
  const CaptureOptions& options;
  aten::Trace trace;
  CaptureResult result;
  bool done = false;  // result.exit is filled

  // --- reading: see.cpp ---
  /// Stand-in (new reference) of `o`, which existed before the call and is found at `source`; takes guards. Null with a
  /// Python error set on failure (a graph break).
  PyObject* see(PyObject* o, const SourcePtr& source);
  /// As see, without guards on `o` itself until observe() meets it. Constants are left to the caller.
  PyObject* stand_in(PyObject* o, const SourcePtr& source);
  /// Takes the pending guard of an object that the program now looks at. False with an error set on failure.
  bool observe(PyObject* o) {
    auto it = index.find(o);
    return it == index.end() || knowns[it->second].active || activate(knowns[it->second]);
  }
  bool activate(Known& k);
  /// The guard of what is_constant(): by value, or by identity of what is compared so.
  void guard_constant(const SourcePtr& source, PyObject* constant);
  /// The guard of what makes a defaultdict's missing items.
  bool guard_factory(const Known& k);
  /// The guards of a function that may be another in each call (CaptureOptions::changing_functions).
  void guard_alike(const Known& k);
  Known* find(PyObject* o) {
    auto it = index.find(o);
    return it == index.end() ? nullptr : &knowns[it->second];
  }
  /// A function whose identity is not guarded.
  Known* find_alike(PyObject* o) {
    Known* k = PyFunction_Check(o) ? find_plain(o) : nullptr;
    return k && k->alike ? k : nullptr;
  }
  /// The known object `o` if it existed before the call and is no stand-in of another (an instance, function, module).
  Known* find_plain(PyObject* o) {
    Known* k = find(o);
    return k && k->kind == Known::Kind::Plain ? k : nullptr;
  }
  Known& remember(Known k);
  Class classify(PyObject* o);
  Class classify_type(PyTypeObject* t);
  /// True for constants, and tuples and frozensets of constants all the way down.
  bool is_constant(PyObject* o);
  PyObject* make_shadow(PyObject* o, Class c, const SourcePtr& source);
  /// For a mappingproxy of a dict.
  PyObject* make_proxy(PyObject* o, PyObject* dict, const SourcePtr& source);
  PyObject* make_fake(PyObject* tensor, const SourcePtr& source);
  // --- subclasses of torch.Tensor: tensor_classes.cpp ---
  /// Whether tensors of this one's class can be in a graph: what makes it more than a tensor is in Python.
  bool captures_class(PyObject* tensor) const;
  /// A parameter or buffer of a lazy module without a shape: the module's first call gives it one, and another class.
  static bool is_uninitialized(PyObject* tensor);
  PyObject* break_at_class(PyObject* tensor);
  /// Makes the tensor one of the class. False with an error set.
  bool take_class(PyObject* stand_in, PyObject* type);
  /// Guards that the tensor's class stays as it is.
  void note_class(PyObject* tensor);
  /// Whether a call with these arguments goes to the __torch_function__ of one's class.
  bool goes_to_class(PyObject* const* args, size_t n) const;
  /// Whether the tensor's class says in Python what operators do.
  bool has_own_operators(PyObject* tensor) const;
  /// Whether what Python asks of the object (its truth, its length) goes to a tensor's class.
  bool asks_class(PyObject* o) const { return py::is_tensor(o) && (goes_to_class(&o, 1) || has_own_operators(o)); }
  /// Whether reading or writing this accessor of PyTorch's goes to a mode, or to the __torch_function__ of the class.
  bool accessor_goes_elsewhere(PyObject* o, PyObject* name) const;
  /// What the program hung on the tensor, or on the real one; null without an error if there is nothing of that name.
  PyObject* load_hung_attr(PyObject* o, PyObject* name);
  /// What a subclass has of that name, unless the tensor itself has; not found: as of any other tensor.
  PyObject* load_tensor_class_attr(PyObject* o, PyObject* name, bool* found);
  /// For a call that gives a tensor another class: the operator that does it to the data, args[0] being its tensor.
  static PyObject* operator_of_class_change(PyObject* target, PyObject* const** args);
  PyObject* call_tensor_subclass(PyObject* type, PyObject* const* args, size_t nargsf, PyObject* kwnames);
  /// The real tensor behind a fake that stands for one, else null (borrowed).
  PyObject* real_of(PyObject* o) {
    Known* k = find(o);
    return k ? k->real.get() : nullptr;
  }

  /// Registers a C method that existed already bound (random.random): rebuilding it would lose its object.
  /// A bound method of a C object that lies on the stack at a break (a lock's __exit__) is made anew in each call:
  /// guards tell its object and its name. False if it is none, or with an error.
  bool guard_method_on_stack(PyObject* o, const SourcePtr& source);
  void remember_bound(PyObject* o, const SourcePtr& source);
  /// Registers a module, type or function that is reached without a path (by import).
  void remember_constant(PyObject* o);
  /// Registers a function that came out of a class, unless the captured code made it: its attributes existed before.
  void remember_function(PyObject* o);

  /// While one lives, frames on this thread run in CPython's own evaluator.
  struct Paused {
    explicit Paused(Machine& machine) : m(machine) { ++m.paused; }
    ~Paused() { --m.paused; }
    Machine& m;
  };
  int paused = 0;

  // --- guards and sources ---
  void guard(Guard::Kind kind, const SourcePtr& source, PyObject* object = nullptr, uint64_t number = 0,
             const SourcePtr& other = nullptr);
  SourcePtr child(guards::Source::Kind kind, const SourcePtr& base, PyObject* key, int64_t index = 0);
  /// Where class `type`, which `source` leads to, has its attribute `name`: what a staticmethod wraps, or what it
  /// holds.
  SourcePtr attribute_of_class(const SourcePtr& source, PyObject* type, PyObject* name);
  /// The item of a dict whose key the source `key` finds.
  SourcePtr item_at(const SourcePtr& dict, const SourcePtr& key);
  SourcePtr source_of_object(PyObject* o);  // its known source, or a Const source
  /// The user's line now, "file:line"; null if no code runs.
  const std::shared_ptr<const std::string>& where();
  /// The line that a frame is at.
  const std::shared_ptr<const graph::StackFrame>& place_of(py311::Frame* f);

  // --- attributes: attributes.cpp ---
  /// getattr; new reference. `missing_ok`: null without an error if there is no such attribute.
  PyObject* load_attr(PyObject* o, PyObject* name, bool missing_ok = false);
  /// For LOAD_METHOD: 1 if *method is an unbound function to be called with o first, 0 if it is an attribute, -1 error.
  int load_method(PyObject* o, PyObject* name, PyObject** method);
  bool store_attr(PyObject* o, PyObject* name, PyObject* value);  // value null: delete
  /// A write that `descr`, which the class has for the name, takes: in Python, or the graph breaks.
  bool store_by_descriptor(PyObject* descr, PyObject* o, PyObject* name, PyObject* value);
  /// What object.__setattr__ and object.__getattribute__ do.
  bool generic_store_attr(PyObject* o, PyObject* name, PyObject* value);
  PyObject* generic_load_attr(PyObject* o, Known* k, PyObject* name, bool missing_ok);
  /// The instance's own attribute `name` (its __dict__ and what was written over it). New reference; null without an
  /// error if it has none.
  PyObject* load_instance_attr(PyObject* o, Known* k, PyObject* name, bool* found);
  /// The first object met that has the same __dict__ object as `o`: what is written on one shows on all.
  PyObject* dict_owner(PyObject* o);
  const std::unordered_map<PyObject*, py::Ref>& dict_shadows() const { return dict_shadows_; }
  PyObject* instance_dict(PyObject* o);  // o.__dict__ as the program may see it
  PyObject* load_global(PyObject* globals, PyObject* builtins, PyObject* name, bool allow_missing = false);
  bool store_global(PyObject* globals, PyObject* name, PyObject* value);
  PyObject* load_cell(PyObject* cell, const SourcePtr& source);
  /// Where an existing cell's contents are found; null if the captured code made the cell, or has not met it.
  SourcePtr source_of_contents(PyObject* cell);
  /// The source of the cell whose contents `contents` is.
  static SourcePtr cell_itself(const SourcePtr& contents);
  bool store_cell(PyObject* cell, PyObject* value);
  PyObject* load_module_attr(PyObject* module, Known* k, PyObject* name, bool missing_ok);
  PyObject* load_type_attr(PyObject* type, Known* k, PyObject* name, bool missing_ok);
  PyObject* load_nn_module_attr(PyObject* o, Known* k, PyObject* name, bool missing_ok);
  bool is_plain_module_write(PyObject* o, PyObject* name, PyObject* value);
  /// Whether it is a tensor of no class of its own that nothing says more of.
  bool is_plain_tensor(PyObject* o);
  PyObject* load_tensor_attr(PyObject* o, PyObject* name, bool missing_ok);
  bool store_tensor_attr(PyObject* o, PyObject* name, PyObject* value);  // tensors.cpp
  PyObject* load_grad(PyObject* o);                                      // tensors.cpp
  /// Gives an existing tensor's fake the stand-in of its .grad; with `look`, guards on what it is.
  bool ensure_grad(PyObject* fake, bool look);
  static bool is_namespace(PyObject* dict);       // a module's
  bool is_written_as_dict(PyObject* dict) const;  // a namespace
  bool is_trusted_namespace(PyObject* dict);      // torch's and the standard library's: functions there are not guarded

  // --- calls: call.cpp ---
  /// Calls with args[0..n); args[-1] may be overwritten. kwnames as in vectorcall. New reference.
  PyObject* call(PyObject* callable, PyObject* const* args, size_t nargsf, PyObject* kwnames);
  /// What a function gives whose result the user takes for a constant, called with the tensors of this very call.
  PyObject* constant_result(PyObject* callable, PyObject* const* args, size_t n, PyObject* kwnames);
  PyObject* call_ex(PyObject* callable, PyObject* args_tuple, PyObject* kwargs_dict);
  /// Whether one of the arguments, or an element of one, has a __torch_function__ of its own.
  bool overrides_among(PyObject* const* args, size_t n) const;
  /// Runs `f` as a torch-level call of `target`.
  PyObject* torch_call(PyObject* target, PyObject* const* args, size_t n, PyObject* kwnames,
                       const std::function<PyObject*()>& f);
  /// Whether the operator that was recorded last changes the sizes or strides of this tensor, which existed before.
  bool reshapes_input(PyObject* o);
  /// After a C call: translates kiln's failures into graph breaks, replaces real objects in the result.
  PyObject* after_c_call(PyObject* result);
  /// C code that iterates would advance an iterator that existed before the call: a graph break then, and true.
  bool refuses_iterator(PyObject* o);
  /// Whether C may read all that `o` gives, one after the other; a graph break otherwise.
  bool iterates(PyObject* o) { return !refuses_iterator(o) && reads(o, -1); }
  /// The arguments of a call that C code makes; `iterators`: whether it takes from iterators among them.
  bool refuses_arguments(PyObject* const* args, size_t nargsf, PyObject* kwnames, bool iterators);
  bool has_fake(PyObject* o, int depth = 0);
  PyObject* call_c(PyObject* callable, PyObject* const* args, size_t nargsf, PyObject* kwnames);
  PyObject* call_type(PyObject* type, PyObject* const* args, size_t nargsf, PyObject* kwnames);
  /// A call of an object for which is_getter() holds.
  PyObject* call_getter(PyObject* getter, PyObject* subject);
  PyObject* call_partial(PyObject* partial, PyObject* const* args, size_t nargsf, PyObject* kwnames);
  PyObject* call_weakref(PyObject* ref);
  /// What constructors of a dtype's class take: sizes, data, a tensor, or nothing. `dtype`: nullptr for torch.Tensor's.
  PyObject* legacy_tensor(const std::string& what, PyObject* dtype, PyObject* const* args, size_t n);
  PyObject* call_tensor_class(PyObject* type, PyObject* const* args, size_t n);
  /// isinstance() of torch.FloatTensor and its like, which ask for dispatch keys that stand-ins do not have; nullopt if
  /// there is none among `classes`.
  static std::optional<bool> is_of_tensor_class(const at::Tensor& t, PyObject* classes);
  PyObject* call_new_tensor(PyObject* callable, PyObject* const* args, size_t n, PyObject* kwnames);
  /// A call of torch.from_numpy or torch.as_tensor with an existing array. Null without an error if it is no such.
  PyObject* share_memory(PyObject* callable, PyObject* const* args, size_t n, PyObject* kwnames);
  /// torch.from_numpy of an existing array, as an input of the graph. Null without an error if it cannot be one.
  PyObject* memory_of_array(PyObject* array);
  PyObject* call_tensor_data(PyObject* callable, PyObject* const* args, size_t nargsf,
                             PyObject* kwnames);  // tensors.cpp
  PyObject* call_requires_grad(PyObject* callable, PyObject* const* args, size_t nargsf,
                               PyObject* kwnames);  // tensors.cpp
  PyObject* call_retain_grad(PyObject* tensor);
  /// Tensor._make_subclass(Parameter, data, requires_grad).
  PyObject* call_make_parameter(PyObject* callable, PyObject* const* args, size_t n, PyObject* kwnames);
  /// Whether `tensor.data = value` changes nothing, as in a module.to() that finds all in its place.
  bool is_same_data(PyObject* tensor, PyObject* value) const;
  struct DataWritten {
    PyObject* tensor;     // the fake of an existing one
    py::Ref data;         // what its .data is now
    graph::Value before;  // what it was in the graph, which its gradient belongs to
  };
  /// Writes .data of an existing tensor: from now on the program reads `value` there. False if the graph cannot see to
  /// it.
  bool replace_data(PyObject* tensor, PyObject* value);
  const DataWritten* new_data(PyObject* tensor) const;
  /// Whether a call that gave `result` is differentiated by a tensor whose .data was written, which the graph cannot
  /// be.
  bool differentiates_new_data(PyObject* const* args, size_t n, PyObject* result) const;
  /// Whether a call that is differentiated may keep an existing tensor, or a view of it, for a backward still to come.
  bool may_be_saved(const at::Tensor& t);
  /// Lets a tensor that needs no gradient yet, or was made to, be a leaf. False if the graph cannot see to it.
  bool make_leaf(const at::Tensor& t);
  /// Writes .requires_grad of a leaf. False if it is none, or cannot be seen to by the graph, or with an error set.
  bool set_requires_grad(PyObject* tensor, bool wanted);
  /// Where a leaf was made that `result` depends on (or which it is, with a gradient) and that is among the tensors
  /// that leave the captured part, itself, as a view's base or by its gradient: a later backward would not reach it. -1
  /// if there is none.
  int leaf_behind(const at::Tensor& result, const std::vector<at::Tensor>& leaving) const;
  PyObject* call_run_backward(PyObject* callable, PyObject* const* args, size_t nargsf,
                              PyObject* kwnames);  // tensors.cpp
  bool is_torch_operator(PyObject* o);
  /// Guards which function or class a module of PyTorch or of the standard library has by a name: programs put others
  /// into their places (torch.nn.functional.scaled_dot_product_attention). What such modules use of their own is
  /// theirs.
  void guard_replaceable(PyObject* dict, PyObject* name);
  /// PyTorch makes an operator's overload when it is first asked for, and keeps it as an attribute.
  void find_overload(PyObject* packet, PyObject* name);
  /// Code of the compiler that PyTorch ships: wrappers are looked through, markers ignored, the rest breaks.
  enum class PeerCode : uint8_t { None, Wrapper, Disabled, StepWrapper, Marker, Polyfill, Other };
  static PeerCode peer_code(PyCodeObject* code);
  PyObject* call_polyfill(py311::Frame* frame, bool* handled);
  /// Where a resume function's frame lets `o` go: false, and a break, if code runs then (a generator is closed, a
  /// __del__ is called), which has to happen there. identity.cpp
  bool may_let_go(PyObject* o);
  /// Stands for the traceback of what captured code raised: it is there, and what it tells breaks the graph. Borrowed.
  static PyObject* unknown_traceback();
  // loads.cpp
  PyObject* call_loader(py311::Frame* frame);
  /// Whether `function`, which is about to be called, behaves otherwise under vmap once the missing loader has run.
  bool waits_for_loader(PyObject* function);
  /// The same of a backward, which may meet what was called before.
  bool backward_waits_for_loader() const;
  /// Gives the capture up for this call of the program: a NotYet.
  PyObject* put_off(std::string why);
  /// The same until the loader of this name has run.
  PyObject* put_off_for(const std::string& loader);
  /// What a polyfill gave; with NotImplemented the call is not handled, and null.
  static PyObject* unless_declined(PyObject* result, bool* handled);

  // --- sizes that are left open: sizes.cpp ---
  /// From now on those of what is open (input_value) are.
  void open_sizes();
  void close_sizes();
  /// Whether `o` is a kiln._sizes.Size.
  bool is_size(PyObject* o) const;
  /// Whether it is that, or a kiln._sizes.Real, a float that is computed of sizes.
  bool is_open_number(PyObject* o) const;
  /// For a tuple with open ints: a view of `tensor`, by operators that take these, and what `tensor[index]` is in it:
  /// an ellipsis if that is all. Null without an error for any other index.
  py::Ref select_open(PyObject* tensor, PyObject* index);
  symbolic::Number open_number(PyObject* o) const;
  /// A function of `math` of such; null without an error for others. reals.cpp
  PyObject* call_on_reals(PyObject* callable, PyObject* const* args, size_t n);
  /// Whether there are any open numbers among `args`, also in tuples, lists and slices.
  bool size_among(PyObject* const* args, size_t n) const;
  /// Whether PyTorch's function takes symbolic ints where this capture may give it some.
  bool takes_open_sizes(const char* name) const;
  /// `o` with the numbers themselves, pinned, in the places of sizes. New reference.
  PyObject* with_values(PyObject* o);
  /// The same with the numbers of the traced call, which nothing pins; of lists there are none in `o`.
  PyObject* with_hints(PyObject* o);
  PyObject* on_values(PyObject* const* args, size_t n, const std::function<PyObject*(PyObject* const* values)>& f);
  /// The value of a tensor whose sizes are open, else none.
  graph::Value open_value(PyObject* tensor);
  PyObject* open_shape(PyObject* tensor, graph::Value v);
  /// len() of a tensor of open sizes; null without an error for other objects.
  PyObject* open_length(PyObject* o);
  /// The dimensions of an existing tensor whose sizes are open, as bits.
  uint64_t open_dims(const Known& k) const;
  /// Those of the tensor whose gradient it is, or which is the key that it is kept under in a dict, if they have the
  /// same sizes.
  uint64_t dims_of_owner(const Known& k) const;
  /// Has the open number delivered when the graph has run; its place (aten::Sizes::outputs).
  int64_t output_of(PyObject* number);
  /// Whether the int `o` found at `source` is open: its value was needed where a number of the graph stood for it.
  bool opens_int(PyObject* o, const SourcePtr& source) const;
  PyObject* open_int(PyObject* o, const SourcePtr& source);
  /// A torch.Size of which other ones were found at the same place: with open ints for what changes. Null without an
  /// error if nothing does.
  PyObject* changing_shape(PyObject* o, const SourcePtr& source);
  /// The answer to what asks a tensor for open sizes; null without an error if `target` is no such.
  PyObject* ask_size(PyObject* target, PyObject* const* args, size_t n, PyObject* kwnames);
  /// After a call that recorded the nodes behind the first `nodes_before` and gave `r` (null: raised): conditions on
  /// what it may have told, or been told, of sizes.
  void note_sizes_told(PyObject* target, PyObject* const* args, size_t n, PyObject* kwnames, PyObject* r,
                       int64_t nodes_before);
  /// Something looks at sizes that nobody sees: other sizes need a capture of their own.
  void refuse_sizes(const char* why);

  // --- numbers that the graph computes with: numbers.cpp ---
  /// Whether `o`, a float or an int or a tuple with such found at `source`, is to be an input of the graph.
  bool is_changing(PyObject* o, const SourcePtr& source) const;
  /// The kiln._numbers.Number that stands for `o`, a float or an int. New reference.
  PyObject* number_for(PyObject* o, const SourcePtr& source);
  bool is_number(PyObject* o) const;
  /// A Number that is the constant `o`, a np.float64, for its arithmetic with other numbers; null for other objects,
  /// and with an exception if its value cannot be read.
  py::Ref number_of_numpy(PyObject* o);
  /// float, np.float64 or int. Borrowed.
  static PyObject* class_of_number(PyObject* number);
  /// The first number or text among `args`, with `nested` also in lists and tuples; borrowed, or null.
  PyObject* number_among(PyObject* const* args, size_t n, bool nested = false) const;
  /// Ends this attempt, since the value of `number` is needed. Null.
  PyObject* specialize(PyObject* number);
  /// After a call that raised: what stands for a number among `args` may lack what the number has. Then the numbers
  /// themselves are tried; else null, with the exception. `before`: `instructions` at the call. What ran code of the
  /// program's own is not tried again with sizes.
  PyObject* retry_with_numbers(int64_t before, PyObject* const* args, size_t n,
                               const std::function<PyObject*(PyObject* const* values)>& again);
  /// tensor[key] = number, or open number: `store` is given the three with a tensor in the number's place.
  PyObject* store_number(PyObject* const* args, const std::function<PyObject*(PyObject* const*)>& store);
  PyObject* need_values(PyObject* sources);
  /// What item() gives for `tensor`, as a number; null without an error if that call is no such, or must break the
  /// graph.
  PyObject* item_number(PyObject* tensor);
  /// Whether `container`, which existed before, grows by a number that item() gave: a history that the next call finds
  /// longer. What is guarded of it is better left to the code behind a graph break.
  bool grows_with(PyObject* container, PyObject* number);
  /// The key of a dict, or the item of a set, that the number equals, or None.
  py::Ref key_of_number(PyObject* container, PyObject* number);
  /// The instructions at which the frames up to the root stand, as text.
  std::string call_site();
  /// What stands for a call of a function that takes numbers as they are (max, math.sqrt); null without an error if
  /// there is no such.
  PyObject* call_number_function(PyObject* callable, PyObject* const* args, size_t nargsf, PyObject* kwnames);
  /// What the Python function of this frame, which is done, gives if C code may have called it through a slot (as
  /// __index__), which wants an int, a float or a str. Steals `result`.
  PyObject* result_of_slot(const py311::Frame* frame, PyObject* result);
  /// Whether a KeyboardInterrupt is set that comes from the user's Ctrl-C, and not from a `raise` of the program.
  bool interrupted() const;
  /// Whether the exception that is set says that C code was given a stand-in of a number or a text.
  bool refuses_stand_in() const;
  PyObject* number_step(PyObject* const* args, size_t n);
  PyObject* operate_on_numbers(const char* op, PyObject* const* args);
  PyObject* call_with_numbers(PyObject* callable, const std::vector<PyObject*>& args, PyObject* kwnames);
  std::unordered_map<std::string, py::Ref> open_ints;  // by source
  /// Whether an open number is one of NumPy's: computed of its ints.
  bool computed_of_numpy(const symbolic::Number& n) const;
  /// What int() makes of such a number, which is NumPy's no longer; none of some.
  std::optional<symbolic::Expr> as_int(const symbolic::Expr& e);
  bool has_numbers = false, needed_int = false;
  std::unordered_map<std::string, py::Ref> numbers;                        // by source
  std::unordered_map<PyObject*, SourcePtr> number_sources;                 // of `numbers`
  std::unordered_set<std::string> needed_numbers;                          // sources whose values the program needed
  std::unordered_set<std::string> needed_items;                            // call sites of item() and of masks likewise
  static constexpr const char *kItem = "item() at ", *kMask = "mask at ";  // what these begin with
  bool assertions_refused = false;  // the next attempt keeps them out of the graph

  // --- texts made of numbers and sizes: texts.cpp ---
  /// A kiln._numbers.Text, which stands for a str that is made of numbers, or of sizes.
  bool is_text(PyObject* o) const;
  /// Whether one of them is a text, or a tuple of such.
  bool text_among(PyObject* const* args, size_t n) const;
  /// Whether texts are made of numbers at all.
  bool makes_texts() const;
  /// The Text of what `function` gives for such arguments; null without an error if it must be made now.
  PyObject* make_text(PyObject* function, PyObject* const* args, size_t n);
  /// Ends this attempt, since a text is needed now. Null.
  PyObject* need_text();
  /// What the call of a function that makes a str (str, format, a str's join) gives if it is a Text; else null without
  /// an error.
  PyObject* text_of_call(PyObject* callable, PyObject* const* args, size_t n, PyObject* kwnames);
  /// text_of_call() for a str's bound method join.
  PyObject* joined_text(PyObject* join, PyObject* given);
  /// Whether one of them is a number, a text or a size, also in lists and tuples.
  bool is_unknown(PyObject* const* args, size_t n) const;
  bool text_needed = false;  // the next attempt makes texts where they are asked for

  // --- masks as indices: masked.cpp ---
  /// Whether `o` is a kiln._masked.Masked, which stands for x[mask].
  bool is_masked(PyObject* o) const;
  /// The first of them among `args`, with `nested` also in lists and tuples; borrowed, or null.
  PyObject* masked_among(PyObject* const* args, size_t n, bool nested) const;
  /// Whether something may stand for x[mask].
  bool may_select(PyObject* x, PyObject* mask);
  /// The first of the key of `x[mask, 1:]`, if integers and slices follow; else none.
  static py::Ref mask_of_key(PyObject* key);
  /// What such a key's mask selects from. New reference.
  PyObject* part_behind_mask(PyObject* x, PyObject* key);
  /// What stands for x[mask]; null without an error if the index must be taken as it is.
  PyObject* select_masked(PyObject* x, PyObject* mask);
  /// Ends this attempt: the next one takes that mask's indices as they are. Null.
  PyObject* specialize_masked(PyObject* masked);
  /// Python's operator `op` where one of the operands is a Masked; null without an error if none is, or it is only
  /// kept.
  PyObject* operate_on_masked(const char* op, PyObject* const* args, size_t n);
  /// A call of a function that takes them; null without an error for any other.
  PyObject* call_on_masked(PyObject* callable, const std::vector<PyObject*>& args, PyObject* kwnames);
  /// The same of a function or method of C, to which others must not be given: bound to `self`, or null.
  PyObject* call_c_on_masked(PyObject* callable, PyObject* self, PyObject* const* args, size_t n, PyObject* kwnames);
  /// Whether both are one tensor, or computed alike.
  bool is_same_mask(PyObject* a, PyObject* b);
  /// The kiln._masked.Selection of a mask that selected before and has not been written since, or none.
  py::Ref selection_of(PyObject* mask);
  /// How many calls so far write to the memory of a tensor.
  size_t writes_of(PyObject* tensor);
  /// What x[mask] was taken of, if that can still be done on leaving.
  struct Selected {
    py::Ref masked, x, mask, values;
    size_t x_writes = 0, mask_writes = 0;
  };
  const Selected* unchanged_selection(PyObject* masked);
  std::vector<Selected> selected;
  bool has_masked = false;

  // --- conditions on numbers: conditions.cpp ---
  using NodeSet = std::unordered_set<graph::Node*>;
  /// Bool tensors of one element, each with the truth that it is asked for, and all that they are computed by.
  struct Conditions {
    NodeSet nodes;
    std::vector<std::pair<graph::Value, bool>> values;
    std::vector<std::pair<graph::Value, graph::Arg>> numbers;  // integers, and what else they are asked to be than
  };
  /// Takes a bool tensor of one element: where it is `truth`, the call runs in eager. False if it depends on more than
  /// single elements and small tensors of integers.
  bool add_eager_condition(const at::Tensor& condition, bool truth = true);
  /// The truth of such a tensor for this call, which becomes a guard. None if it depends on more.
  std::optional<bool> decide(const at::Tensor& condition);
  /// The same of any tensor of one integer or bool, and of what hangs on constants alone.
  std::optional<bool> decide_truth(const at::Tensor& t);
  /// What the elements of `t`, integers or bools, are in this call, which becomes a guard. Undefined if they depend on
  /// more, or if data shall decide nothing more (CaptureOptions::data_branches).
  at::Tensor decide_numbers(const at::Tensor& t);
  /// The truth of the comparison of numbers that runs now for which the program does not raise an exception, if it does
  /// so for the other.
  std::optional<bool> asserted_truth() const;
  /// The value of a tensor of one element, if it depends on nothing but constants.
  std::optional<at::Scalar> constant_value(const at::Tensor& t);
  /// The same; of an integer or bool also what it is in this call, which becomes a guard (a size or index that is a
  /// tensor).
  std::optional<at::Scalar> known_value(const at::Tensor& t);
  /// What `value` is computed by. False if that is more than `reach` allows.
  bool trace_back(graph::Value value, NodeSet* nodes, Reach reach = Reach::Small);
  /// Has a condition's calls take the open sizes that they are given, and with them the inputs that have these. Sizes
  /// of other values, all if they are not `open`, are as in this call from now on.
  void take_sizes(NodeSet* nodes, bool open = true);
  /// What `value` is for this call's inputs, and what computes it. Undefined if there is no value, if trace_back() says
  /// no or `may_run` does of one of the nodes, or if they raise.
  at::Tensor evaluate(graph::Value value, NodeSet* nodes, Reach reach = Reach::Small,
                      const std::function<bool(const graph::Node*)>& may_run = nullptr);
  /// Whether one of the conditions has its truth, if there are any.
  CaptureResult::Condition any_of(const Conditions& conditions, const char* name);
  /// Has the call run in eager if `condition`, a 0-dim bool tensor, turns out to be not `wanted`: when the graph has
  /// run, but for what it writes to what exists, or before a graph that does what cannot be put off. False if that is
  /// not possible.
  bool assert_that(const at::Tensor& condition, bool wanted);
  /// Whether what is recorded so far can be dropped when it has been computed: it changes nothing that existed before,
  /// random generators aside, but memory that a graph writes at its end.
  bool may_be_dropped();
  /// Looks at the nodes that were recorded since the last time: node_order_, writers_, changes_, acts_, released_.
  void index_nodes();
  void note_released(const graph::Node& backward);
  /// Adds what becomes of the assertions to the graph. False if they cannot stay in it.
  bool finish_assertions();

  // --- shapes that depend on data: data_shapes.cpp ---
  /// A call of an operator whose result has such a shape, where the data decide it as decide_numbers() has it: false,
  /// or its results instead of its arguments are on the stack.
  bool replace_data_shape(const c10::OperatorHandle& op, torch::jit::Stack& stack);
  /// aten::nonzero of what may_decide() allows, with the number of results of this call. Undefined if that cannot be.
  at::Tensor sized_nonzero(const at::Tensor& mask);
  /// Whether decide_numbers() may know what is computed of `t`.
  bool may_decide(const at::Tensor& t);
  /// Tensor.tolist(); null without an error if its elements cannot be decided.
  PyObject* decided_list(PyObject* tensor);

  // --- settings of PyTorch: settings.cpp ---
  struct Setting {
    py::Ref getter, args, before;  // args: the getter's, a tuple
    py::Ref setter;                // null if the program only read it
  };
  std::vector<Setting> settings;
  /// The setting of this getter and these arguments; its value before is a guard. Null with an error if the getter
  /// raises.
  Setting* find_setting(PyObject* getter, PyObject* const* args, size_t n);
  /// A call of what tells a setting, or of what sets it.
  PyObject* call_setting(PyObject* callable, PyObject* const* args, size_t n, PyObject* kwnames);
  void restore_settings();
  /// warnings.warn.
  PyObject* call_warn(PyObject* const* args, size_t n, PyObject* kwnames);
  /// A warning of C code, which shows this warnings.WarningMessage.
  PyObject* defer_shown_warning(PyObject* shown);
  /// Has the warning given on leaving, as one about the line that the frame `at` is at.
  PyObject* warn_at(py311::Frame* at, PyObject* message, PyObject* category);
  PyObject* refuse_warning();
  /// The filters that the program has given the module warnings, borrowed; None if it has changed more than them. Null
  /// without an error if they are those from outside.
  PyObject* written_filters(PyObject* module);

  // --- torch.autograd.Function: custom_function.cpp ---
  /// A call of Function.apply.
  PyObject* call_custom_function(py311::Frame* frame, bool* handled);
  /// What kiln._polyfills.custom_function asks for: ("output", tensor) looks at one, ("begin", inputs, outputs) gives
  /// the gradients of the outputs, ("end", gradients of the inputs), ("inside") whether a backward is being captured,
  /// ("refuse", why).
  PyObject* custom_function_step(PyObject* const* args, size_t n);
  /// The traced values of tensors, in a list; None for undefined ones.
  graph::Arg values_of(const std::vector<at::Tensor>& tensors);
  // --- hooks on gradients: gradient_hooks.cpp ---
  struct GradientHook {
    c10::intrusive_ptr<torch::autograd::Node> node;  // grad_fn of the tensor, then; null for a leaf's
    py::Ref function;
    int instruction = -1;  // the root's that registered it
    int64_t number = 0;    // no other hook of the process has it
    graph::Value value;    // the tensor's; null for a leaf's
    bool removed = false;
    at::Tensor accumulated;  // of a hook that runs when this leaf's gradient was added: the leaf's fake
  };
  std::vector<GradientHook> gradient_hooks;
  bool running_hook = false, hooks_ran = false;
  std::vector<at::Tensor> backward_leaves;  // of the backward that runs, if it accumulates
  /// What kiln._polyfills asks for: ("register", tensor, hook) gives the hook's number, ("remove", number).
  PyObject* gradient_hook_step(PyObject* const* args, size_t n);
  void add_gradient_hook(const at::Tensor& t, PyObject* function);
  void add_accumulated_hook(const at::Tensor& leaf, PyObject* function);
  void remove_gradient_hook(GradientHook& h);
  /// Records the gradients that the engine has given these tensors and that the graph does not know yet.
  void note_gradients(const std::vector<at::Tensor>& tensors);
  /// Lets the fake of an existing leaf have the leaf's hooks. False with an error set.
  bool add_hooks_of(const at::Tensor& fake, const Known& k);
  /// Interprets a call of the hook, in the middle of a backward. `grad`: undefined for one of an accumulated gradient.
  at::Tensor run_gradient_hook(size_t at, const at::Tensor& grad);
  /// Which instruction registered a hook that a backward of `result` would be the first to run; -1 if there is none.
  int hook_behind(const at::Tensor& result) const;
  /// Beginning and end of one of torch.cond's branches, both of which are computed.
  PyObject* branch_step(PyObject* const* args, size_t n);
  PyObject* end_branch(const at::Tensor& pred, bool taken_if);
  /// Beginning and end of a checkpointed call, whose nodes are marked (Node::checkpoint).
  PyObject* checkpoint_step(PyObject* const* args, size_t n);
  PyObject* begin_checkpoint(PyObject* policy, bool same_numbers);
  PyObject* end_checkpoint();
  /// Asks the checkpointed call's policy about what was recorded since it was last asked. False with an error set.
  bool decide_kept();
  /// The forward of a function whose backward calls autograd, to run it again: a checkpoint.
  void checkpoint_forward();
  PyObject* begin_custom_function(PyObject* inputs, PyObject* outputs, bool materialize);
  PyObject* end_custom_function(PyObject* grads);
  PyObject* defer_call(py311::Frame* frame);
  /// Has `callable` called on leaving; `made`: by the capture itself. None.
  PyObject* defer(py::Ref callable, const std::vector<PyObject*>& args, bool made = false);
  /// A function under functools.lru_cache.
  PyObject* call_cached(PyObject* wrapper, PyObject* const* args, size_t nargsf, PyObject* kwnames);
  std::vector<CachedCall> cached_calls;
  std::vector<CachedObject> cached_objects;
  std::vector<SharedArray> shared_arrays;
  /// An object that the captured code made, of which id() was asked for, with the root's instruction that did.
  struct MadeId {
    PyObject* object;
    int instruction;
  };
  std::unordered_map<void*, MadeId> made_ids;  // by the id
  /// The result that such a call has just given, with guards that a later one gives the same. Null without an error if
  /// nothing tells.
  PyObject* see_cached(PyObject* wrapper, PyObject* result);
  void guard_identity(PyObject* real);

  // --- what C code observes unseen: identity.cpp ---
  /// Whether one is a tuple of numbers that change from call to call, and the other the same where it is a constant.
  /// Guarded either way.
  bool is_same_tuple(PyObject* a, PyObject* b);
  /// Guards that two existing objects which were told apart are two objects.
  void distinguish(PyObject* a, PyObject* b);
  /// Guards the identity of existing objects that C code compares or hashes by their address: `o`, or what it contains
  /// (of a dict its keys, and with `values` its values).
  void pin(PyObject* o, bool values = true, int depth = 0);
  /// As pin, for a container in which `key` is looked up or stored.
  void pin_lookup(PyObject* container, PyObject* key);
  /// Has `key` told apart from the members of a set that the captured code has made, such as the memo of
  /// named_modules(), instead of pinning them: the objects may be others in the next call. False if that is not enough.
  /// Whoever sees the order of such a set pins them after all (reads()).
  bool tell_apart(PyObject* set, PyObject* key);
  /// PySet_Contains or PySet_Add, for what tell_apart() is true for.
  int look_up_apart(int (*f)(PyObject* set, PyObject* key), PyObject* set, PyObject* key);
  /// Has the members of a set told apart no longer, but pinned.
  void pin_members(PyObject* set);
  std::unordered_set<PyObject*> told_apart;  // such sets; `alive` holds them
  /// While one lives, id() of `key` is asked for by its hash alone, which tells nothing that is not guarded otherwise.
  class Hashing {
   public:
    Hashing(Machine& m, PyObject* key) : hashed_(m.hashed), before_(std::exchange(m.hashed, key)) {}
    ~Hashing() { hashed_ = before_; }
    Hashing(const Hashing&) = delete;

   private:
    PyObject*& hashed_;
    PyObject* const before_;
  };
  PyObject* hashed = nullptr;
  /// Whether a shadow holds other than what it held when it was made.
  bool differs(const Known& k) const;
  /// Whether it was ever written to, also if what it held was put back.
  bool was_written(const Known& k) const;
  /// To be told of a write to `o`, and after a call of C code which may have written to its arguments.
  void note_write(PyObject* o);
  void note_writes(PyObject* const* args, size_t n);
  /// As pin, for the arguments (the receiver first) of a function of C, if it compares or hashes.
  void pin_compared(PyObject* c_callable, PyObject* const* args, size_t n);
  /// What object.__reduce_ex__ gives for an existing object (copy.copy, copy.deepcopy), its attributes seen; null
  /// without an error if the call is another.
  PyObject* reduce_existing(PyObject* c_callable, PyObject* const* args, size_t n);
  /// Breaks the graph where a function of C would read the attributes of an existing object.
  bool reads_attributes(PyObject* c_callable, PyObject* const* args, size_t n);
  /// Breaks the graph where C code gets a function of C as a callback whose calls the machine has to see.
  bool refuses_callback(PyObject* o);
  /// The function that stands for a class of C whose instances read attributes (new reference), or null.
  PyObject* polyfilled_class(PyTypeObject* type);
  // --- objects of C classes that C code reads: c_objects.cpp ---
  /// How the state in C of an existing object is told: not at all (it has none), by value (guarded when the object is
  /// seen), by which object it is, by the memory that it lends, or by no guard.
  enum class CState : uint8_t { None, Value, Fixed, Memory, Other };
  CState c_state(PyTypeObject* t);
  /// To be asked where C code reads `o`: guards what it may find, and what it may find in tuples, lists and dicts
  /// (unless depth is -1). False with a graph break set if no guard can tell.
  bool reads(PyObject* o, int depth = 0);
  bool opens(PyObject* container);                   // guards the lists in dicts, too
  bool reads_what_it_holds(PyObject* o, int depth);  // iterators and views that were made during the capture
  /// The same for all arguments of a function of C, the receiver first.
  bool reads_arguments(PyObject* c_callable, PyObject* const* args, size_t n);
  /// What a function of NumPy's or a method of an array makes of constants (arrays.cpp): numpy.prod(x.shape),
  /// numpy.triu(numpy.ones((n, n))). Null without an error for other functions and other arguments; breaks the graph
  /// where NumPy warns.
  PyObject* call_numpy(PyObject* callable, PyObject* const* args, size_t nargsf, PyObject* kwnames);
  /// Breaks the graph where an operator in C would write to an existing object of a C class.
  bool refuses_write(PyObject* o);
  /// Breaks the graph where a method of C would read or write what no guard and no effect covers.
  bool refuses_method(PyObject* c_callable, PyObject* receiver);
  /// Breaks the graph where `made` shares the memory of the existing `base`: writes to it would go unseen.
  bool refuses_view(PyObject* base, PyObject* made);
  /// Guards the code and the defaults of a function that is interpreted.
  void guard_function(PyFunctionObject* function);
  /// Registers an object with a __del__ in Python that the captured code made: it must die before the captured part
  /// ends, or else be made in eager.
  void remember_finalizer(PyObject* made);
  /// True if the frame is a __del__ that is not to run: its object belongs to an abandoned attempt.
  bool skips_finalizer(py311::Frame* frame);
  /// The frame of a Python function with a policy of its own; *handled is false if it is to be interpreted.
  PyObject* call_python_special(py311::Frame* frame, bool* handled);

  // --- breaks: breaks.cpp ---
  /// Sets the GraphBreak exception; returns null for convenience. `id` is of graph_breaks.def.
  PyObject* graph_break(const char* id, const std::string& particulars);
  bool break_pending() const { return broken; }
  /// The frame that runs, or, of kiln's own functions, the one that called them.
  py311::Frame* user_frame();
  std::string user_stack();
  /// Fills result.exit for leaving at the root's current instruction, before it runs.
  void leave_at(int offset, PyObject** sp, py311::Frame* frame);
  void leave_return(PyObject* value);
  void leave(Exit& exit, const std::function<void(Leaver&)>& fill);
  bool is_made_function(PyObject* f);
  /// Registers a class that the captured code made; gives it back.
  PyObject* remember_made_type(PyObject* type);
  /// Breaks the graph at a write to a class, unless the captured code made it.
  bool refuses_class_write(PyObject* type);

  // --- torch level: record.cpp ---
  std::shared_ptr<graph::Graph> torch_level = std::make_shared<graph::Graph>();
  bool torch_level_ok = true;  // false once a call fitted no graph: there is no torch-level graph then
  std::unordered_map<graph::Value, graph::Value> to_torch;  // traced value -> its torch-level value
  std::unordered_map<graph::Value, graph::Value> made_as;   // what that was first, of values that were written in place
  int torch_depth = 0;
  void mirror_node(graph::Node& traced);
  /// An argument of the torch-level graph that is an open size.
  graph::Arg size_arg(const symbolic::Number& n);
  void finish_torch_sizes();
  /// Appends the node of a call that recorded something. False with an error set if its arguments fit no graph.
  bool record_torch_level(PyObject* target, PyObject* const* args, size_t n, PyObject* kwnames, PyObject* result);
  bool to_arg(PyObject* o, graph::Arg* out);
  graph::Value torch_value_of(PyObject* tensor);
  graph::Op target_op(PyObject* target);
  graph::Value input_value(const at::Tensor& t);
  std::unordered_map<PyObject*, int> target_index;

  // --- containers that nobody looks at as a whole: unread.cpp ---
  /// Whether `o` is a list, a deque or a dict: one that is only appended to, or of which only some items are asked for,
  /// is not guarded as a whole.
  bool may_stay_unread(PyObject* o) const;
  /// Whether the container that is being loaded is not looked at here. Guards its type then.
  bool stays_unread(Known& k);
  /// How many items there are in such a container: a number of the graph's, where they were others in another call.
  /// Null without an error for any other object.
  PyObject* length_of_unread(PyObject* container);
  /// What `__len__` of a class in Python gives, which may be such a number. Null without an error for any other object.
  PyObject* length_by_method(PyObject* o);
  /// list.append on an existing list that the program has not looked at: its length is no business of the graph's.
  /// Null without an error for any other call.
  PyObject* append_unread(PyObject* callable, PyObject* container, PyObject* item);
  enum class LookUp : uint8_t {
    Item,      // what is found is the result
    Presence,  // only whether there is something
  };
  /// To be asked before `key` is looked up in an existing container. 1: nobody has looked at it as a whole, and what is
  /// found there, or that nothing is, is guarded now; 0: it is guarded as a whole, or is none; -1: an error is set.
  int looks_up(PyObject* container, PyObject* key, LookUp what);
  bool guard_lookup(Known& k, PyObject* key, LookUp what);
  /// An item of a dict was set, of which nobody knows what it was before: that is written on leaving, even if it is
  /// what it was in this call.
  void note_item_written(PyObject* dict, PyObject* key);
  bool guard_lookup_of_tensor(Known& k, PyObject* key, LookUp what);
  bool guard_item(const Known& container, PyObject* value, const SourcePtr& source);
  /// dict.get(key, other) and the like of such a dict. Null without an error for any other call.
  PyObject* look_up_unread(PyObject* callable, PyObject* dict, PyObject* key, PyObject* other);
  const struct Exec* loading = nullptr;  // while one of its instructions puts something on the stack

  // --- state ---
  std::deque<Known> knowns;
  std::unordered_map<PyObject*, int> index;  // object and stand-in -> knowns
  /// The same for tuples of numbers that change from call to call. Elsewhere the same object is a constant, guarded by
  /// its value: there may be another in that place next time.
  std::unordered_map<PyObject*, int> index_of_numbers;
  std::unordered_map<PyObject*, Overlay> overlays;         // attributes written on existing objects
  std::unordered_map<PyObject*, Overlay> globals_written;  // by globals dict
  std::unordered_map<PyObject*, py::Ref> cells_written;    // existing cell -> content (null: deleted)
  std::vector<py::Ref> cells_order;
  std::unordered_set<PyObject*> made_cells;
  std::vector<py::Ref> alive;                            // keeps identities valid
  std::unordered_map<PyObject*, SourcePtr> cell_source;  // of an existing cell's contents
  BreakReason reason;                                    // of the pending break
  std::unordered_map<int, BreakReason> break_reasons;    // of the earlier attempts, by the root's instruction
  std::vector<int> root_calls;                           // the root's calls so far
  std::unordered_set<PyObject*> made_functions, made_types, noted_classes;
  std::vector<PyObject*> overlay_order;
  struct Deferred {
    py::Ref callable;
    std::vector<py::Ref> args;
    bool made = false;      // the capture made `callable` itself
    int instruction = -1;   // of the root, which calls it
    uint32_t versions = 0;  // of the tensors among `args` at the call, their sum: it tells of a write
  };
  static uint32_t versions_of(const std::vector<py::Ref>& objects);
  std::vector<Deferred> deferred;  // calls to make on leaving, in order
  /// Whether the program changes what decides on a message to logging, or reads what the message may change.
  bool sees_message(const Deferred& message) const;
  /// istft asks whether a condition is equal to true, that its windows leave a gap, and raises if it is.
  bool inside_istft = false;
  std::vector<py::Ref> grad_order;
  aten::Modes modes_at_start;
  aten::TransformModes transform_modes_at_start;
  py::FunctionModes function_modes_at_start;
  /// The blocks of torch.inference_mode() that the program is in, and entered in the captured part; and whether it was
  /// in some where that ended, which nothing on leaving could enter.
  std::vector<std::unique_ptr<c10::InferenceMode>> inference_modes;
  bool inference_stays = false;
  PyObject* inference_mode_step(PyObject* const* args, size_t n);
  /// Gives level_around_duals, or sets it, on entry to and exit from forward_ad.dual_level().
  PyObject* dual_level_step(PyObject* const* args, size_t n);
  std::vector<DataWritten> data_written;
  std::vector<PyObject*> flags_written;  // fakes of existing tensors whose .requires_grad was written
  /// Tensors that became leaves of autograd, with the root's instruction that made them so.
  std::vector<std::pair<at::Tensor, int>> leaves_made;
  std::vector<std::pair<at::Tensor, int>> retained;  // likewise, of which retain_grad() was called
  std::unordered_map<PyObject*, int> finalizable;    // alive, with the root's instruction that made it
  std::vector<py::Ref> generators;                   // weak references to those that the captured code made
  /// Exceptions that came to a handler, with the root's instruction that raised them.
  std::unordered_map<PyObject*, int> caught;
  std::unordered_set<PyObject*> failed_iterators;  // of loops; a later instruction would find them exhausted
  py::Ref raised_interrupt;                        // the KeyboardInterrupt that the program raised last
  py::Ref handled_at_start;  // the exception that callers are handling, which the program's have for a __context__
  /// A point of the capture, to tell what has changed since then.
  struct Moment {
    size_t num_calls = 0, num_knowns = 0;
    std::vector<const void*> effects;
  };
  /// The custom function whose backward is being interpreted.
  struct CustomFunction {
    c10::intrusive_ptr<joint::FakeCustomFunction> node;
    graph::Node* begin = nullptr;
    Moment forward, beginning;  // of the forward, of the backward
  };
  CustomFunction custom_function;
  std::vector<c10::intrusive_ptr<joint::FakeCustomFunction>> custom_functions;  // that were interpreted
  /// The checkpointed call that is being interpreted, the outermost one.
  struct Checkpoint {
    struct Operator {
      graph::Node* node;
      const c10::FunctionSchema* schema;
      torch::jit::Stack args, results;
    };
    int depth = 0;  // of calls within calls
    int number = 0;
    Moment beginning;
    bool same_numbers = true;         // whether the backward's copies are to have the forward's random numbers
    py::Ref policy;                   // says of each operator whether its results are kept; null: none are
    std::vector<Operator> undecided;  // that it was not asked about yet
  };
  Checkpoint checkpoint;
  /// What the program has changed so far, of what existed before it: equal lists say that nothing was added.
  std::vector<const void*> effects_now(size_t num_knowns);
  static std::vector<const void*> contents_now(const Known& k);
  bool has_effects_since(const Moment& m);
  Moment now();
  /// What was recorded since then, the last first.
  std::vector<graph::Node*> nodes_since(const Moment& m);
  /// Whether that draws random numbers.
  bool draws_since(const Moment& m);
  /// What was recorded since then is to be: run at another time, run once more, or run by autograd.
  enum class Region : uint8_t { Plain, Checkpointed, Backward };
  /// Why that cannot be; null if it can.
  const char* refusal_since(const Moment& m, Region region = Region::Plain);
  int64_t level_around_duals = 0;  // of torch.func, that stands for an outermost forward_ad.dual_level(); 0: none
  std::vector<Moment> branches;    // of torch.cond that are being interpreted, by where they begin
  int autocast_nesting = 0;        // autocast blocks that the captured part entered, less those it left
  struct Grad {
    bool looked = false;
    py::Ref initial;  // stand-in of the .grad that the tensor came with; null for None
  };
  std::unordered_map<PyObject*, Grad> grads_;  // by fake
  int depth = 0;                               // inlined frames
  int root_instruction = -1;                   // where the root stands
  bool broken = false;                         // a graph break is on its way to the root
  std::string internal_error;                  // InternalError's text on its way out through C frames
  std::string given_up;                        // likewise the text of an Unsupported
  bool not_yet = false;                        // that is a NotYet
  std::string missing_loader;                  // vmap's, if the program came by it and it has not run
  bool decomposition_called = false;           // an operator was called that vmap knows by what that loads
  py::Ref interrupt;                           // likewise what a signal's handler raised
  int64_t instructions = 0;                    // interpreted so far
  /// Now and then: runs the handlers of signals, and looks at the limits. False if the capture is to be given up.
  bool may_go_on();

 private:
  std::shared_ptr<const graph::StackTrace> last_stack_;
  py311::Frame* last_stack_frame_ = nullptr;
  _Py_CODEUNIT* last_stack_instruction_ = nullptr;
  // By instruction: CPython goes through a code's table of lines from its start each time.
  std::unordered_map<const _Py_CODEUNIT*, std::shared_ptr<const graph::StackFrame>> places_;
  std::shared_ptr<const std::string> last_where_;
  const _Py_CODEUNIT* last_where_instruction_ = nullptr;
  struct SourceKey {
    int kind;
    const void* base;
    const void* key;
    int64_t index;
    bool operator==(const SourceKey&) const = default;
  };
  struct SourceKeyHash {
    size_t operator()(const SourceKey& k) const noexcept {
      size_t h = std::hash<const void*>{}(k.base) * 0x9E3779B97F4A7C15ull;
      h ^= std::hash<const void*>{}(k.key) + (h << 6) + (h >> 2);
      return h ^ static_cast<size_t>(k.index * 31 + k.kind);
    }
  };
  std::unordered_map<SourceKey, SourcePtr, SourceKeyHash> sources_;
  std::unordered_set<SourceKey, SourceKeyHash> guards_taken_;
  std::unordered_map<PyTypeObject*, Class> classes_;
  std::unordered_map<PyTypeObject*, CState> c_states_;
  Conditions eager_conditions_, branches_;
  std::vector<std::pair<graph::Value, bool>> assertions_;  // 0-dim bools, each with the truth that fails
  Bases bases_;
  std::unordered_map<const graph::Node*, size_t> node_order_;                  // of the trace's nodes so far
  std::unordered_map<const graph::Node*, std::vector<graph::Node*>> writers_;  // by what they write to, or its base
  bool changes_ = false;  // whether one of them changes what existed before
  NodeSet released_;      // those that let go of what they kept, in a backward that has run
  bool acts_ = false;     // whether one of them does what cannot be put off: an operator that nobody knows
  using Pair = std::pair<PyObject*, PyObject*>;
  struct PairHash {
    size_t operator()(const Pair& p) const noexcept {
      return std::hash<const void*>{}(p.first) * 0x9E3779B97F4A7C15ull ^ std::hash<const void*>{}(p.second);
    }
  };
  std::unordered_map<Pair, py::Ref, PairHash> globals_seen_, attributes_seen_;
  SourcePtr builtins_;                        // their dict, once it was read
  std::unordered_set<PyObject*> namespaces_;  // the dicts of modules that the program has, as dicts
  std::unordered_map<PyObject*, bool> trusted_;
  std::unordered_map<PyObject*, PyObject*> dict_owners_;  // by __dict__
  std::unordered_map<PyObject*, py::Ref> dict_shadows_;   // object -> shadow of its __dict__
  bool is_constant_type(PyTypeObject* t);
};

/// Scalars of NumPy's that hold a number or a text.
bool is_numpy_scalar(PyTypeObject* t);

/// Length and (key, value) list of a container as its C base has them, whatever its class overrides.
Py_ssize_t base_size(PyObject* container);
/// Whether it is the function len().
bool is_len(PyObject* o);
py::Ref base_items(PyObject* dict);

/// The thread's running capture, or null.
Machine* machine();
/// The exception that carries a graph break through Python frames.
PyObject* graph_break_type();

/// Objects of Python's and torch's modules that the machine compares with; loaded once.
struct Names {
  PyObject *append, *dict, *class_, *getattr, *getattribute, *setattr, *delattr, *call, *init, *name, *module,
      *qualname, *grad, *data, *requires_grad, *parameters, *buffers, *modules, *code, *closure, *defaults, *kwdefaults,
      *self, *func, *enter, *exit, *contents;
  PyObject *tensor_type, *parameter_type, *buffer_type, *module_type, *module_getattr, *module_setattr, *ordered_dict,
      *default_dict, *deque, *partial, *size_type;
};
const Names& names();

}  // namespace kiln::capture
