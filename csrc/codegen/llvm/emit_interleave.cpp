#include <algorithm>

#include "codegen/llvm/emitter.h"

// Accesses in small steps along the lanes: whole vectors of what lies between are loaded, or stored where other
// accesses fill the gaps.
namespace kiln::codegen {

using loops::Inst;
using loops::Opcode;
using loops::ValueId;

llvm::Value* Emitter::load_interleaved(loops::BufferId b, Value* at, int stride, Value* mask) {
  const int w = lanes_.width;
  Value* pass = llvm::Constant::getNullValue(memory_type_of(buffers_.at(b).dtype, w));
  Value* out = nullptr;
  for (int k = 0; k < stride; ++k) {
    // The last piece ends with the last element that is wanted: what follows may be another's memory.
    const int first = std::min(k * w, stride * (w - 1) + 1 - w);
    std::vector<int> wanted(w, w), taken(w);  // wanted: lane -> the mask's, or w (nobody's)
    for (int l = 0; l < w; ++l) {
      const int from = l * stride - first;
      const bool here = from >= 0 && from < w && l * stride >= k * w && l * stride < (k + 1) * w;
      taken[l] = here ? w + from : l;
      if (here) wanted[from] = l;
    }
    Value* own = mask ? b_.CreateShuffleVector(mask, llvm::Constant::getNullValue(mask->getType()), wanted) : nullptr;
    Value* piece = load_vector(b, b_.CreateAdd(at, b_.getInt64(first)), own);
    out = b_.CreateShuffleVector(out ? out : pass, piece, taken);
  }
  return out;
}

void Emitter::store_interleaved(loops::BufferId b, Value* at, const std::vector<Value*>& columns, int64_t valid) {
  const int w = lanes_.width, n = static_cast<int>(columns.size());
  for (int k = 0; k < n; ++k) {
    const int64_t left = valid * n - static_cast<int64_t>(k) * w;
    if (left <= 0) return;
    Value* out = columns[0];
    for (int c = 0; c < n; ++c) {
      std::vector<int> from(w);
      for (int l = 0; l < w; ++l) {
        const int element = k * w + l;
        from[l] = element % n == c ? w + element / n : l;
        if (c == 0) from[l] = element / n;
      }
      out = b_.CreateShuffleVector(out, columns[c], from);
    }
    store_vector(b, b_.CreateAdd(at, b_.getInt64(static_cast<int64_t>(k) * w)), out,
                 left < w ? leading_mask(left, w) : nullptr);
  }
}

std::unordered_map<ValueId, std::vector<ValueId>> Emitter::woven_stores(const loops::Stage& s) const {
  std::unordered_map<ValueId, std::vector<ValueId>> out;
  if (lanes_.var < 0 || lanes_.width < 4 || shape_.segmented) return out;
  struct Step {
    ValueId id;
    int64_t stride, offset;
    Expr rest;
  };
  std::vector<std::vector<Step>> groups;
  std::vector<loops::BufferId> read;
  for (ValueId id : s.body) {
    const Inst& i = nest_.insts[id];
    if (i.op == Opcode::Load || i.op == Opcode::MaskedLoad) read.push_back(i.buffer);
    if (i.op != Opcode::Store || i.mode != loops::StoreMode::Assign || i.args.size() > 1 || shape_.crossing[id])
      continue;
    Step step{id, 0, 0, {}};
    if (!split_linear(i.index, lanes_.var, step.stride, step.rest) || depends_on_lanes(step.rest)) continue;
    if (step.stride < 2 || step.stride > schedule::kMostInterleaved) continue;
    step.offset = step.rest.constant();
    step.rest = step.rest - Expr(step.offset);
    const auto fits = [&](const std::vector<Step>& g) {
      return nest_.insts[g[0].id].buffer == i.buffer && g[0].stride == step.stride && g[0].rest == step.rest;
    };
    const auto group = std::find_if(groups.begin(), groups.end(), fits);
    if (group == groups.end())
      groups.push_back({step});
    else
      group->push_back(step);
  }
  for (std::vector<Step>& g : groups) {
    const ValueId last = g.back().id;
    std::sort(g.begin(), g.end(), [](const Step& a, const Step& b) { return a.offset < b.offset; });
    bool whole = static_cast<int64_t>(g.size()) == g[0].stride;
    for (size_t k = 1; k < g.size(); ++k) whole &= g[k].offset == g[0].offset + static_cast<int64_t>(k);
    if (!whole || std::count(read.begin(), read.end(), nest_.insts[last].buffer)) continue;
    for (const Step& step : g) {
      out[step.id];
      out[last].push_back(step.id);
    }
  }
  return out;
}

void Emitter::store_woven(const std::vector<ValueId>& stores) {
  if (stores.empty()) return;
  const Inst& first = nest_.insts[stores[0]];
  const int64_t n = static_cast<int64_t>(stores.size());
  for (int p = 0; p < lanes_.parts; ++p) {
    std::vector<Value*> columns;
    for (ValueId id : stores)
      columns.push_back(
          to_memory(part(env_[nest_.insts[id].args[0]], p, lanes_.width), buffers_.at(first.buffer).dtype));
    Value* at = b_.CreateAdd(scalar_index(first.index), b_.getInt64(static_cast<int64_t>(p) * lanes_.width * n));
    store_interleaved(first.buffer, at, columns, valid_lanes(p));
  }
}

}  // namespace kiln::codegen
