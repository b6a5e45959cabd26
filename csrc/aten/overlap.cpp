#include "aten/overlap.h"

#include <algorithm>
#include <unordered_map>

#include "aten/convert.h"
#include "aten/pch.h"
#include "ops/ops.h"

namespace kiln::aten {
namespace {

/// Bytes from the first byte of the storage: of the first element, and behind the last one. `t` is not empty.
std::pair<int64_t, int64_t> reach(const at::Tensor& t) {
  int64_t last = t.storage_offset();
  for (int64_t d = 0; d < t.dim(); ++d) last += (t.size(d) - 1) * t.stride(d);
  const auto size = static_cast<int64_t>(t.element_size());
  return {t.storage_offset() * size, (last + 1) * size};
}

/// Calls f(byte) with the place of each element's first byte.
template <class F>
void for_each_place(const at::Tensor& t, int64_t dim, int64_t at, const F& f) {
  if (dim == t.dim()) return f(at * static_cast<int64_t>(t.element_size()));
  for (int64_t i = 0; i < t.size(dim); ++i) for_each_place(t, dim + 1, at + i * t.stride(dim), f);
}

bool share_elements(const at::Tensor& a, const at::Tensor& b) {
  if (a.numel() == 0 || b.numel() == 0) return false;
  const auto [a0, a1] = reach(a);
  const auto [b0, b1] = reach(b);
  if (a1 <= b0 || b1 <= a0) return false;
  constexpr int64_t kMaxBytes = 1 << 26;
  if (a1 - a0 > kMaxBytes || a.element_size() != b.element_size()) return true;
  std::vector<bool> taken(static_cast<size_t>(a1 - a0), false);
  for_each_place(a, 0, a.storage_offset(), [&](int64_t at) { taken[static_cast<size_t>(at - a0)] = true; });
  bool shared = false;
  for_each_place(b, 0, b.storage_offset(), [&](int64_t at) {
    if (at >= a0 && at < a1) shared |= taken[static_cast<size_t>(at - a0)];
  });
  return shared;
}

/// Whether each element of the result is made of the elements at its place.
bool is_elementwise(const OpInfo& op) {
  const std::string& name = op.handle.operator_name().name;
  if (name == "aten::copy_" || name.starts_with("aten::_foreach_")) return true;
  if (op.kind == OpKind::Out)
    return ops::is_pointwise(graph::Op(name)) || ops::is_pointwise(graph::Op(name + ".Tensor"));
  return ops::is_pointwise(op.op);
}

struct Place {
  int argument, index;  // index in a list
  at::Tensor tensor;
};

std::vector<Place> places_of(c10::ArrayRef<c10::IValue> args) {
  std::vector<Place> out;
  for (size_t i = 0; i < args.size(); ++i) {
    if (!args[i].isTensor() && !args[i].isTensorList()) continue;
    int index = 0;
    for_each_tensor(args[i], [&](const at::Tensor& t) {
      if (t.defined() && t.layout() == at::kStrided && t.has_storage()) out.push_back({static_cast<int>(i), index, t});
      ++index;
    });
  }
  return out;
}

/// Whether the elements of `a` lie one by one where those of `b` do.
bool same_place(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && a.strides() == b.strides() && a.storage_offset() == b.storage_offset() &&
         a.scalar_type() == b.scalar_type();
}

}  // namespace

bool overlaps_itself(const at::Tensor& t) {
  if (t.layout() != at::kStrided || t.numel() == 0 || t.is_non_overlapping_and_dense()) return false;
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride, size
  for (int64_t d = 0; d < t.dim(); ++d)
    if (t.size(d) > 1) dims.emplace_back(t.stride(d), t.size(d));
  std::sort(dims.begin(), dims.end());
  int64_t reach = 0;
  for (const auto& [stride, size] : dims) {
    if (stride <= reach) return true;
    reach += stride * (size - 1);
  }
  return false;
}

std::string order_matters(const OpInfo& op, c10::ArrayRef<c10::IValue> args) {
  if (op.written_args.empty() || op.kind == OpKind::InPlaceView) return "";
  std::vector<Place> places = places_of(args);
  const auto by_storage = [](const Place& a, const Place& b) {
    return std::less<>()(a.tensor.storage().unsafeGetStorageImpl(), b.tensor.storage().unsafeGetStorageImpl());
  };
  std::stable_sort(places.begin(), places.end(), by_storage);
  for (const Place& w : places) {
    if (std::find(op.written_args.begin(), op.written_args.end(), w.argument) == op.written_args.end()) continue;
    if (overlaps_itself(w.tensor)) return op.op.name() + " writes to memory that overlaps itself";
    const auto [first, last] = std::equal_range(places.begin(), places.end(), w, by_storage);
    for (auto other = first; other != last; ++other) {
      if (other->argument == w.argument && other->index == w.index) continue;
      const bool one_by_one = other->argument != w.argument && other->index == w.index && is_elementwise(op) &&
                              same_place(other->tensor, w.tensor);
      if (!one_by_one && share_elements(w.tensor, other->tensor))
        return op.op.name() + " reads memory that it writes, in an order of its own";
    }
  }
  return "";
}

bool writes_shared_memory(const OpInfo& op, c10::ArrayRef<c10::IValue> args) {
  std::unordered_map<const c10::StorageImpl*, int> uses;
  for (const c10::IValue& v : args)
    for_each_tensor(v, [&](const at::Tensor& t) {
      if (t.defined()) ++uses[t.storage().unsafeGetStorageImpl()];
    });
  bool shared = false;
  for (const int arg : op.written_args)
    for_each_tensor(args[static_cast<size_t>(arg)], [&](const at::Tensor& t) {
      if (t.defined()) shared |= uses[t.storage().unsafeGetStorageImpl()] > 1;
    });
  return shared;
}

}  // namespace kiln::aten
