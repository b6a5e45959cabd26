#include <algorithm>
#include <bit>

#include "codegen/llvm/emitter.h"

// Accesses to a few vectors' worth of memory in another order than that of the lanes (small steps, repeated elements):
// whole vectors are loaded and shuffled, or stored where other accesses fill the gaps.
namespace kiln::codegen {

using loops::Inst;
using loops::Opcode;
using loops::ValueId;
using symbolic::Expr;

namespace {
/// Whether all of e, whatever its variables are, is a multiple of d.
bool is_multiple(const Expr& e, int64_t d) {
  return e.constant() % d == 0 &&
         std::all_of(e.terms().begin(), e.terms().end(), [d](const symbolic::Term& t) { return t.coef % d == 0; });
}
}  // namespace

std::optional<std::vector<int64_t>> Emitter::lane_offsets(const Expr& e) const {
  const int w = lanes_.width;
  std::vector<int64_t> out(w);
  for (const symbolic::Term& t : e.terms()) {
    const symbolic::AtomNode& n = *t.atom;
    if (n.kind == symbolic::AtomKind::Var && n.var_kind == symbolic::VarKind::Loop) {
      for (int l = 0; l < w && n.id == lanes_.var; ++l) out[l] += t.coef * l;
      continue;
    }
    const bool indirect = n.kind == symbolic::AtomKind::Var && n.var_kind == symbolic::VarKind::Indirect;
    if (indirect ? indirect_[n.id].uniform : !depends_on_lanes(n.a) && !depends_on_lanes(n.b)) continue;
    // The dividend of a vector's first lane is a multiple of what the vectors step by.
    int64_t stride = 0;
    Expr rest;
    if (n.kind != symbolic::AtomKind::FloorDiv && n.kind != symbolic::AtomKind::Mod) return std::nullopt;
    if (!split_linear(n.a, lanes_.var, stride, rest) || stride < 1 || depends_on_lanes(rest)) return std::nullopt;
    const int64_t step = stride * w, d = n.divisor;
    const bool within = d % step == 0 && is_multiple(rest, step);  // one of the divisor's multiples holds all lanes
    if (!within && (step % d != 0 || !is_multiple(rest, d))) return std::nullopt;
    for (int l = 0; l < w; ++l) {
      const int64_t at = l * stride;
      if (n.kind == symbolic::AtomKind::FloorDiv)
        out[l] += within ? 0 : t.coef * (at / d);
      else
        out[l] += t.coef * (within ? at : at % d);
    }
  }
  return out;
}

llvm::Value* Emitter::load_lanes(loops::BufferId b, Value* at, const std::vector<int64_t>& offsets, Value* mask) {
  const int w = lanes_.width;
  const auto [low, high] = std::minmax_element(offsets.begin(), offsets.end());
  const int64_t span = *high - *low + 1, width = std::min<int64_t>(w, std::bit_ceil(static_cast<uint64_t>(span)));
  Value* out = nullptr;
  for (int64_t k = 0; k < span; k += width) {
    // The last piece ends with the last element that is wanted: what follows may be another's memory.
    const int64_t first = std::max<int64_t>(0, std::min(k, span - width));
    std::vector<int> wanted(width, w), taken(w);  // wanted: element -> the mask's lane, or w (nobody's)
    for (int l = w; l-- > 0;) {
      const int64_t at_lane = offsets[l] - *low, from = at_lane - first;
      const bool here = at_lane >= k && at_lane < k + width;
      taken[l] = static_cast<int>(out ? (here ? w + from : l) : (here ? from : 0));
      if (here) wanted[from] = l;
    }
    Value* own = nullptr;
    if (mask)
      own = b_.CreateShuffleVector(mask, llvm::Constant::getNullValue(mask->getType()), wanted);
    else if (span < width)
      own = leading_mask(span, static_cast<int>(width));
    Value* piece = load_vector(b, b_.CreateAdd(at, llvm::ConstantInt::getSigned(b_.getInt64Ty(), *low + first)), own,
                               static_cast<int>(width));
    out = out ? b_.CreateShuffleVector(out, piece, taken) : b_.CreateShuffleVector(piece, taken);
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
