#include "python/frame/cache.h"

#include <unordered_set>

#include "runtime/arena.h"

namespace kiln::frame {
namespace {

// All live caches and records; touched under the GIL only. Never destroyed: code objects outlive static destructors.
std::unordered_set<CodeCache*>& all_caches() {
  static auto* set = new std::unordered_set<CodeCache*>();
  return *set;
}
/// Calls f(CodeCache&) for each. Entries that it frees can run destructors that free or add caches.
template <class F>
void for_each_cache(F&& f) {
  const std::vector<CodeCache*> caches(all_caches().begin(), all_caches().end());
  for (CodeCache* c : caches)
    if (all_caches().contains(c)) f(*c);
}
std::unordered_set<CodeInfo*>& all_infos() {
  static auto* set = new std::unordered_set<CodeInfo*>();
  return *set;
}
std::unordered_set<std::string>& warnings_given() {
  static auto* set = new std::unordered_set<std::string>();
  return *set;
}

Py_ssize_t extra_index() {
  static const Py_ssize_t index = _PyEval_RequestCodeExtraIndex([](void* p) { delete static_cast<CodeInfo*>(p); });
  return index;
}

}  // namespace

CodeCache::CodeCache() { all_caches().insert(this); }
CodeCache::~CodeCache() { all_caches().erase(this); }

void CodeCache::clear() {
  // Entries that are running are held by who runs them.
  std::vector<EntryPtr> gone;
  gone.swap(entries);
  owners.clear();
  eager = false;
  compiles = 0;
  changing_numbers.clear();
  changing_functions.clear();
  changing_contents.clear();
  constant_numbers.clear();
  breaking_items.clear();
  changing_sizes.clear();
  backend_takes_sizes = true;
  late_sizes = {};
}

void CodeCache::drop_unreachable() {
  std::unordered_map<PyObject*, Py_ssize_t> held;
  const auto compared = [](const EntryPtr& e, auto&& see) {
    for (const guards::Guard& g : e->tree.guards())
      if (g.kind == guards::Guard::Kind::Is) see(g.object.get());
  };
  for (const EntryPtr& e : entries) compared(e, [&](PyObject* o) { ++held[o]; });
  std::vector<EntryPtr> gone;  // freeing entries can run destructors that free or add caches
  std::erase_if(entries, [&](EntryPtr& e) {
    bool reachable = true;
    compared(e, [&](PyObject* o) { reachable &= Py_REFCNT(o) > held[o]; });
    if (reachable) return false;
    gone.push_back(std::move(e));
    return true;
  });
  // Else a call that makes what it is given anew would compile each time.
  constexpr int64_t kWorth = 32;
  int64_t hits = 0;
  for (const EntryPtr& e : gone) hits += e->hits;
  for (const EntryPtr& e : gone) {
    if (hits < kWorth * std::ssize(gone)) break;
    if (const auto owner = owners.find(e->owner); owner != owners.end()) --owner->second.compiles;
    --compiles;
  }
}

CodeInfo::CodeInfo() { all_infos().insert(this); }
CodeInfo::~CodeInfo() { all_infos().erase(this); }

CodeCache& CodeInfo::cache(const ConfigPtr& config) {
  for (auto& [c, cache] : caches)
    if (c == config) return *cache;
  caches.emplace_back(config, std::make_unique<CodeCache>());
  return *caches.back().second;
}

CodeInfo* find_code_info(PyCodeObject* code) {
  void* extra = nullptr;
  if (_PyCode_GetExtra(reinterpret_cast<PyObject*>(code), extra_index(), &extra) < 0) PyErr_Clear();
  return static_cast<CodeInfo*>(extra);
}

CodeInfo* code_info(PyCodeObject* code) {
  if (CodeInfo* info = find_code_info(code)) return info;
  auto info = std::make_unique<CodeInfo>();
  if (_PyCode_SetExtra(reinterpret_cast<PyObject*>(code), extra_index(), info.get()) < 0) {
    PyErr_Clear();
    return nullptr;
  }
  return info.release();
}

void forget_owner(const void* owner) {
  for_each_cache([&](CodeCache& cache) {
    if (cache.owners.erase(owner) == 0) return;
    for (const EntryPtr& e : cache.entries)
      if (e->owner == owner) e->owner = nullptr;
    cache.drop_unreachable();
  });
}

void forget_caches(const ConfigPtr& config) {
  // Freeing entries can run destructors that free or add records.
  std::vector<std::unique_ptr<CodeCache>> gone;
  for (CodeInfo* i : all_infos())
    std::erase_if(i->caches, [&](auto& c) {
      if (c.first != config) return false;
      gone.push_back(std::move(c.second));
      return true;
    });
}

void reset_caches() {
  for_each_cache([](CodeCache& cache) { cache.clear(); });
  for (CodeInfo* i : all_infos()) {
    if (i->skip == CodeInfo::Skip::Yes || i->skip == CodeInfo::Skip::Below) i->skip = CodeInfo::Skip::Unknown;
    i->jumps.clear();
  }
  warnings_given().clear();
  runtime::release_arena();
}

void warn_once(const std::string& key, const std::string& text) {
  if (!warnings_given().insert(key).second) return;
  if (PyErr_WarnEx(PyExc_UserWarning, text.c_str(), 1) < 0) throw py::PythonError{};
}

}  // namespace kiln::frame
