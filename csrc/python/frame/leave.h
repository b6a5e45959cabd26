#pragma once
#include <ATen/core/Tensor.h>

#include <vector>

#include "python/capture/capture.h"

namespace kiln::frame {

/// What a graph returned: tensors of kiln's own graphs, or objects of a Python backend's callable.
struct GraphOutputs {
  std::vector<at::Tensor> tensors;
  std::vector<py::Ref> objects;
  std::vector<int64_t> sizes;  // what recipes of a Size give
  bool python = false;
  /// The `i`-th output as a Python object: None for an undefined tensor. Throws PythonError or InternalError.
  py::Ref object(size_t i) const;
  size_t size() const { return python ? objects.size() : tensors.size(); }
};

/// The recipes and side effects of one captured region in compact form: made once per entry, run on every hit.
class LeaveProgram {
 public:
  /// `results` are the recipes that `run` delivers, null pointers for NULL. Sources that recipes read are appended to
  /// `wanted`; `run` takes their objects.
  LeaveProgram(const std::vector<capture::RecipePtr>& results, const std::vector<capture::SideEffect>& effects,
               std::vector<guards::SourcePtr>& wanted);
  /// Rebuilds objects, applies the side effects in order and returns the results. `sources` are the objects of the
  /// sources appended to `wanted`, in that order. Throws py::PythonError.
  std::vector<py::Ref> run(const GraphOutputs& outputs, PyObject* const* sources) const;
  /// Lets go of the gradients that the effects replace unseen; before the graph runs.
  void drop_gradients(PyObject* const* sources) const;
  /// The result if it is nothing but output 0, without side effects: index of that output; -1 otherwise.
  int single_output() const { return single_output_; }
  /// Marks the outputs that recipes use.
  const std::vector<int64_t>& used_outputs() const { return used_outputs_; }
  /// Renumbers outputs after unused ones were dropped: map[old] is the new index.
  void renumber_outputs(const std::vector<int64_t>& map);

 private:
  struct Step {
    capture::Recipe::Kind kind;
    bool fill = false;  // second half of a recipe: state and elements
    int slot = -1;
    int64_t index = 0;
    py::Ref object;
    std::vector<int> parts;
    std::vector<std::pair<py::Ref, int>> state;
    std::vector<int> elements;
  };
  struct Effect {
    capture::SideEffect::Kind kind;
    int target = -1, key_slot = -1, value = -1;
    py::Ref key;
    std::vector<int> extra;
  };
  /// Of the steps behind the first `from`, which only results need, those that call something go behind the effects: a
  /// constructor (reversed) may ask an object for what an effect gives it.
  void put_off_calls(std::ptrdiff_t from);
  int visit(const capture::RecipePtr& recipe, std::vector<guards::SourcePtr>& wanted,
            std::unordered_map<const capture::Recipe*, int>& slots);
  void make(const Step& step, const GraphOutputs& outputs, PyObject* const* sources, std::vector<py::Ref>& slots) const;
  void fill(const Step& step, std::vector<py::Ref>& slots) const;
  void apply(const Effect& effect, std::vector<py::Ref>& slots) const;

  std::vector<Step> steps_;
  size_t behind_effects_ = 0;  // the first step that is taken when the effects are made
  std::vector<Effect> effects_;
  std::vector<int> results_;
  std::vector<int64_t> used_outputs_;
  std::vector<int64_t> dropped_grads_;  // sources whose .grad is dropped
  int num_slots_ = 0;
  int64_t num_sources_ = 0;
  int single_output_ = -1;
};

}  // namespace kiln::frame
