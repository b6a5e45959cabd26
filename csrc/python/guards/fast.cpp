#include <algorithm>
#include <unordered_set>

#include "python/cpython/py311.h"
#include "python/guards/tree.h"

// The fast program of a guard tree: see GuardTree.
namespace kiln::guards {
namespace {

bool is_heap(PyTypeObject* t) { return (t->tp_flags & Py_TPFLAGS_HEAPTYPE) != 0; }

}  // namespace

/// In order: that a word is where it was rests on those before it, which say that its object is alive.
const GuardTree::Word* GuardTree::first_changed(const Word* word, const Word* end) {
  while (word != end && *word->address == word->expected) ++word;
  return word;
}

GuardTree::Outcome GuardTree::run_fast(const Call& call, Owned& owned) {
  const auto value_of = [&](const Operand& o) { return o.slot >= 0 ? slots_[o.slot] : o.object; };
  const Word* word = words_.data();
  failed_ = {-1, false};
  for (Fast& f : fast_) {
    switch (f.op) {
      case FastOp::GlobalState:
        if (pack_global_state() != f.number) return Outcome::Fails;
        break;
      case FastOp::TypeVersion:
        if (reinterpret_cast<PyTypeObject*>(f.expected)->tp_version_tag == f.number) break;
        if (!classes_[f.guard]->holds()) return Outcome::Fails;
        f.number = classes_[f.guard]->tag();
        break;
      case FastOp::Fetch: {
        PyObject* value = fetch(nodes_[f.node], value_of(f.operand), value_of(f.other), call, owned);
        if (!value) return Outcome::Fails;
        if (f.pin && value != f.expected) {
          failed_ = {f.node, true};
          return Outcome::Unknown;
        }
        if (f.out >= 0) slots_[f.out] = value;
        break;
      }
      case FastOp::TypeIs:
        if (reinterpret_cast<PyObject*>(Py_TYPE(value_of(f.operand))) != f.expected) {
          failed_ = {f.node, true};
          return Outcome::Unknown;
        }
        break;
      case FastOp::Words: {
        const Word* end = word + f.out;
        if (const Word* changed = first_changed(word, end); changed != end) {
          failed_ = word_nodes_[static_cast<size_t>(changed - words_.data())];
          return Outcome::Unknown;
        }
        word = end;
        break;
      }
      case FastOp::Tensor:
        if (!check_tensor(value_of(f.operand), facts_[f.guard])) return Outcome::Fails;
        break;
      case FastOp::Images:
        for (size_t i = images_.first_changed(0); i < images_.size(); i = images_.first_changed(i + 1))
          if (!check_tensor(images_.object(i), facts_[images_.guard(i)])) return Outcome::Fails;
        break;
      case FastOp::Holds:
        if (!holds(f.guard, value_of(f.operand), value_of(f.other))) return Outcome::Fails;
        break;
    }
  }
  sorted_.clear();
  for (int slot : moving_) {
    if (std::binary_search(fixed_.begin(), fixed_.end(), slots_[slot])) return Outcome::Fails;
    sorted_.push_back(slots_[slot]);
  }
  std::sort(sorted_.begin(), sorted_.end());
  if (std::adjacent_find(sorted_.begin(), sorted_.end()) != sorted_.end()) return Outcome::Fails;
  return Outcome::Holds;
}

void GuardTree::make_fast() {
  fast_.clear();
  delivered_.clear();
  words_.clear();
  word_nodes_.clear();
  images_.clear();
  failed_ = {-1, false};
  std::vector<Fast> types;  // versions of the types, few
  std::vector<Fast> last;   // checks of pinned tensors: nothing rests on them

  // How a node's value is known to the fast program. `pinned`: it is `object`; `strong`: even the very same live object
  // with the same immutable content as now, not merely one at the same address.
  struct Known {
    bool pinned = false, strong = false, type_checked = false;
    Operand operand;
  };
  std::vector<Known> known(nodes_.size());
  std::unordered_set<PyObject*> stamped, versioned;
  int num_slots = 0;

  const auto add = [&](FastOp op, int node) -> Fast& {
    fast_.push_back({});
    fast_.back().op = op;
    fast_.back().node = node;
    return fast_.back();
  };
  /// One more word to compare; words in a row are one step.
  const auto add_word = [&](const void* address, uint64_t expected, int node, bool pin) {
    if (fast_.empty() || fast_.back().op != FastOp::Words) add(FastOp::Words, -1).out = 0;
    ++fast_.back().out;
    words_.push_back({static_cast<const uint64_t*>(address), expected});
    word_nodes_.push_back({node, pin});
  };
  const auto check_type = [&](int id, PyTypeObject* type) {
    if (known[id].type_checked) return;
    known[id].type_checked = true;
    if (known[id].strong && !is_heap(type)) return;
    if (known[id].pinned) {
      add_word(&known[id].operand.object->ob_type, reinterpret_cast<uintptr_t>(type), id, true);
      return;
    }
    Fast& f = add(FastOp::TypeIs, id);
    f.operand = known[id].operand;
    f.expected = reinterpret_cast<PyObject*>(type);
    f.pin = true;
  };
  const auto check_version = [&](int guard) {
    PyObject* type = guards_[guard].object.get();
    if (!classes_[guard] || !versioned.insert(type).second) return;
    Fast f;
    f.op = FastOp::TypeVersion;
    f.expected = type;
    f.guard = guard;
    f.number = classes_[guard]->tag();
    types.push_back(f);
  };
  /// True if the content of the dict at node `id` is covered by its stamp.
  const auto stamp = [&](int id) {
    if (id < 0 || !known[id].pinned || nodes_[id].stamp_moves) return false;
    PyObject* dict = known[id].operand.object;
    if (!PyDict_Check(dict)) return false;
    if (!stamped.insert(dict).second) return true;
    check_type(id, Py_TYPE(dict));
    add_word(&reinterpret_cast<PyDictObject*>(dict)->ma_version_tag, py311::dict_version(dict), id, false);
    if (PyODict_Check(dict)) {
      const size_t& order = reinterpret_cast<py311::OrderedDict*>(dict)->state;
      add_word(&order, order, id, false);
    }
    return true;
  };

  for (int g : globals_) {
    Fast& f = add(guards_[g].kind == Guard::Kind::GlobalState ? FastOp::GlobalState : FastOp::Holds, -1);
    f.guard = g;
    f.number = guards_[g].number;
  }
  for (int id : order_) {
    const Node& n = nodes_[id];
    Known& k = known[id];
    PyObject* value = values_[id];
    const Known* base = n.parent >= 0 ? &known[n.parent] : nullptr;
    const auto pin = [&](bool strong) {
      k.pinned = true;
      k.strong = strong;
      k.operand.object = value;
    };
    switch (n.kind) {
      case Source::Kind::Const:
        pin(true);
        break;
      case Source::Kind::Global:
      case Source::Kind::DictItem:
      case Source::Kind::DictKeyAt:
        if (stamp(n.parent)) pin(true);
        break;
      case Source::Kind::DictItemAt:
        if (known[n.key_node].strong && stamp(n.parent)) pin(true);
        break;
      case Source::Kind::InstanceDict:
        if (base->pinned && !n.moves) {
          check_type(n.parent, Py_TYPE(base->operand.object));
          add_word(_PyObject_GetDictPtr(base->operand.object), reinterpret_cast<uintptr_t>(value), id, true);
          pin(false);
          k.type_checked = true;  // an instance's __dict__ is a dict
        }
        break;
      case Source::Kind::ListItem:
        if (base->strong && PyTuple_CheckExact(base->operand.object)) pin(true);
        break;
      case Source::Kind::Type:
        if (base->pinned) {
          check_type(n.parent, reinterpret_cast<PyTypeObject*>(value));
          pin(false);
        }
        break;
      default:
        break;
    }
    if (!k.pinned) {
      Fast& f = add(FastOp::Fetch, id);
      if (base) f.operand = base->operand;
      if (n.key_node >= 0) f.other = known[n.key_node].operand;
      // A leaf is checked by itself; only what carries more is worth comparing by address.
      if (!n.children.empty() && !n.moves) {
        f.pin = true;
        f.expected = value;
        pin(false);
      } else {
        f.out = k.operand.slot = num_slots++;
      }
    }
    for (int g : n.checks) {
      const Guard& guard = guards_[g];
      switch (guard.kind) {
        case Guard::Kind::Type:
          check_type(id, reinterpret_cast<PyTypeObject*>(guard.object.get()));
          check_version(g);
          continue;
        case Guard::Kind::ClassVersion:
          if (!k.pinned) break;
          check_version(g);
          continue;
        case Guard::Kind::Is:
          if (k.pinned) {
            if (auto it = functions_.find(g); it != functions_.end()) {
              const auto* f = reinterpret_cast<PyFunctionObject*>(guard.object.get());
              const FunctionParts& parts = it->second;
              add_word(&f->func_code, reinterpret_cast<uintptr_t>(parts.code.get()), -1, false);
              add_word(&f->func_defaults, reinterpret_cast<uintptr_t>(parts.defaults.get()), -1, false);
              add_word(&f->func_kwdefaults, reinterpret_cast<uintptr_t>(parts.kwdefaults.get()), -1, false);
              if (f->func_kwdefaults)
                add_word(&reinterpret_cast<PyDictObject*>(f->func_kwdefaults)->ma_version_tag, parts.kwdefaults_version,
                         -1, false);
            }
            continue;
          }
          break;
        case Guard::Kind::Equals:
          if (k.strong) continue;
          break;
        case Guard::Kind::Apart:
          continue;
        case Guard::Kind::Length:
          if (k.strong && PyTuple_CheckExact(value)) continue;
          [[fallthrough]];
        case Guard::Kind::Keys:
        case Guard::Kind::DictHas:
        case Guard::Kind::DictLacks:
          if (stamp(id)) continue;
          break;
        default:
          break;
      }
      const bool pinned_tensor = k.pinned && guard.kind == Guard::Kind::Tensor;
      if (pinned_tensor && images_.add(k.operand.object, g)) continue;
      Fast f;
      f.op = guard.kind == Guard::Kind::Tensor ? FastOp::Tensor : FastOp::Holds;
      f.guard = g;
      f.operand = k.operand;
      (pinned_tensor ? last : fast_).push_back(f);
    }
  }
  fast_.insert(fast_.end(), types.begin(), types.end());
  fast_.insert(fast_.end(), last.begin(), last.end());
  if (images_.size()) add(FastOp::Images, -1);
  for (int g : binary_) {
    const Known& a = known[ends_[g].first];
    const Known& b = known[ends_[g].second];
    if (a.pinned && b.pinned && guards_[g].kind != Guard::Kind::DictLacks) continue;
    Fast& f = add(FastOp::Holds, -1);
    f.guard = g;
    f.operand = a.operand;
    f.other = b.operand;
  }
  fixed_.clear();
  moving_.clear();
  for (int id : distinct_) {
    if (known[id].pinned)
      fixed_.push_back(known[id].operand.object);
    else
      moving_.push_back(known[id].operand.slot);
  }
  std::sort(fixed_.begin(), fixed_.end());
  for (int id : wanted_) delivered_.push_back(known[id].operand);
  slots_.assign(static_cast<size_t>(num_slots), nullptr);
  has_fast_ = true;
}

}  // namespace kiln::guards
