#include "ops/types.h"

#include <algorithm>
#include <deque>
#include <mutex>
#include <numeric>
#include <shared_mutex>
#include <unordered_map>

namespace kiln::ops {
namespace {

// Names live as long as the process; a deque keeps their addresses, so that name() may hand out references.
struct Interner {
  std::shared_mutex mutex;
  std::deque<std::string> names;
  std::unordered_map<std::string_view, uint32_t> ids;
  Interner() { add(""); }
  uint32_t add(std::string_view name) {
    names.emplace_back(name);
    const auto id = static_cast<uint32_t>(names.size() - 1);
    ids.emplace(names.back(), id);
    return id;
  }
};
Interner& interner() {
  static Interner* table = new Interner;  // never destroyed: ops may be named while the process exits
  return *table;
}

// Contiguity of PyTorch's 4-d and 5-d channels-last formats, `order` from the innermost dim outwards.
bool contiguous_in_order(const TensorMeta& t, const std::vector<size_t>& order) {
  if (t.sizes.size() != order.size()) return false;
  int64_t expected = 1;
  for (size_t d : order)
    if (t.sizes[d] != 1) {
      if (t.strides[d] != expected) return false;
      expected *= t.sizes[d];
    }
  return true;
}

}  // namespace

Op::Op(std::string_view name) {
  Interner& table = interner();
  {
    std::shared_lock lock(table.mutex);
    if (auto it = table.ids.find(name); it != table.ids.end()) {
      id_ = it->second;
      return;
    }
  }
  std::unique_lock lock(table.mutex);
  auto it = table.ids.find(name);
  id_ = it != table.ids.end() ? it->second : table.add(name);
}

const std::string& Op::name() const {
  Interner& table = interner();
  std::shared_lock lock(table.mutex);
  return table.names[id_];
}

int64_t TensorMeta::numel() const {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<int64_t>());
}

bool TensorMeta::is_contiguous(MemoryFormat format) const {
  switch (format) {
    case MemoryFormat::ChannelsLast:
      return contiguous_in_order(*this, {1, 3, 2, 0});
    case MemoryFormat::ChannelsLast3d:
      return contiguous_in_order(*this, {1, 4, 3, 2, 0});
    default:
      break;
  }
  if (numel() == 0) return true;
  int64_t expected = 1;
  for (size_t d = sizes.size(); d-- > 0;)
    if (sizes[d] != 1) {
      if (strides[d] != expected) return false;
      expected *= sizes[d];
    }
  return true;
}

bool TensorMeta::is_non_overlapping_and_dense() const {
  if (numel() == 0) return true;
  std::vector<size_t> perm;
  for (size_t d = 0; d < sizes.size(); ++d)
    if (sizes[d] != 1) perm.push_back(d);
  std::sort(perm.begin(), perm.end(), [&](size_t a, size_t b) { return strides[a] < strides[b]; });
  int64_t expected = 1;
  for (size_t d : perm) {
    if (strides[d] != expected) return false;
    expected *= sizes[d];
  }
  return true;
}

TensorMeta undefined_meta() {
  TensorMeta t;
  t.dtype = DType::Opaque;
  t.defined = false;
  return t;
}

std::vector<int64_t> contiguous_strides(const std::vector<int64_t>& sizes) {
  std::vector<int64_t> strides(sizes.size());
  int64_t step = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    strides[d] = step;
    step *= std::max<int64_t>(sizes[d], 1);
  }
  return strides;
}

std::vector<int64_t> strides_for(const std::vector<int64_t>& sizes, MemoryFormat format) {
  std::vector<size_t> order;  // innermost first
  switch (format) {
    case MemoryFormat::Contiguous:
      return contiguous_strides(sizes);
    case MemoryFormat::ChannelsLast:
      if (sizes.size() == 3)
        order = {0, 2, 1};
      else
        order = {1, 3, 2, 0};
      break;
    case MemoryFormat::ChannelsLast3d:
      if (sizes.size() == 4)
        order = {0, 3, 2, 1};
      else
        order = {1, 4, 3, 2, 0};
      break;
    case MemoryFormat::Preserve:
      KILN_CHECK(false, "preserve_format has no strides of its own");
  }
  KILN_CHECK(order.size() == sizes.size(), "channels-last format of a tensor with another number of dims");
  std::vector<int64_t> strides(sizes.size());
  int64_t step = 1;
  for (size_t d : order) {
    strides[d] = step;
    step *= std::max<int64_t>(sizes[d], 1);
  }
  return strides;
}

}  // namespace kiln::ops
