#pragma once
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "python/capture/machine.h"

// Leaving the captured region. recipes.cpp says how to make what is alive anew, leave.cpp what was written and what is
// left over.
namespace kiln::capture {

/// Something alive that no recipe can make.
struct NotRebuildable {
  std::string what;
};

class Leaver {
 public:
  explicit Leaver(Machine& machine) : m(machine) {}

  std::vector<at::Tensor> tensors;  // that leave the captured part

  RecipePtr recipe(PyObject* o);
  RecipePtr constant(PyObject* o) {
    RecipePtr r = make(Recipe::Kind::Constant);
    r->object = py::Ref::borrow(o);
    return r;
  }
  RecipePtr source(const SourcePtr& s) {
    RecipePtr r = make(Recipe::Kind::Source);
    r->source = s;
    return r;
  }
  RecipePtr contents(PyObject* container);
  /// Whether one of the recipes makes this very object.
  bool makes(PyObject* o) const { return made_.contains(o); }
  /// Where the root asked for the id of an object that is made anew, if the number leaves, too; else nothing.
  std::optional<int> id_asked_for() const;
  /// The cell object itself; null recipe kind Source for the root's free variables.
  RecipePtr cell(PyObject* c);
  void side_effects();
  /// Guards that what was written is none of the other existing objects that were read: these had what they had before.
  void keep_apart();
  void add(SideEffect::Kind kind, RecipePtr target, PyObject* key, RecipePtr value);
  /// The effects that make a container what its shadow became.
  void diff(Known& k);
  void modes();

 private:
  static RecipePtr make(Recipe::Kind kind) {
    auto r = std::make_shared<Recipe>();
    r->kind = kind;
    return r;
  }
  RecipePtr output(PyObject* tensor);
  /// The nn.Parameter `t`, which has this data.
  RecipePtr parameter(const RecipePtr& data, const at::Tensor& t);
  /// The tensor made one of a class.
  RecipePtr of_class(const RecipePtr& tensor, PyTypeObject* type);
  RecipePtr instance(PyObject* o);
  /// x[mask] of a kiln._masked.Masked. masked.cpp
  RecipePtr masked(PyObject* o);
  /// Its (key, value) pairs; an OrderedDict from which dict's own methods took something has none.
  static py::Ref whole_items(PyObject* dict);
  std::vector<RecipePtr> dict_parts(PyObject* o);  // key, value, key, value, ...
  void elements_of_set(PyObject* set, Recipe& r);
  RecipePtr by_reduce(PyObject* o);
  /// A copy of the array, or a view of the copy of the one that owns the memory.
  RecipePtr array(PyObject* o);
  RecipePtr begin(PyObject* o, Recipe::Kind kind) {
    RecipePtr r = make(kind);
    made_[o] = r;
    return r;
  }
  void attributes(PyObject* o, Recipe& r);
  void diff_dict(const Known& k);
  /// To be told of each constant that leaves.
  void note_id(PyObject* o) {
    if (PyLong_CheckExact(o))
      if (const auto it = m.made_ids.find(PyLong_AsVoidPtr(o)); it != m.made_ids.end()) ids_.push_back(it->second);
    PyErr_Clear();
  }
  void diff_attributes(const Known& k);

  Machine& m;
  std::unordered_map<PyObject*, RecipePtr> made_;
  static constexpr int kDeepestRecipe = 2000;  // what is made of them is gone through in recursions, too
  int depth_ = 0;
  std::unordered_set<PyObject*> open_;
  std::unordered_set<PyObject*> entered_;  // whose recipes are on the way
  std::vector<Machine::MadeId> ids_;
  std::unordered_map<const c10::TensorImpl*, int64_t> outputs_;
};

}  // namespace kiln::capture
