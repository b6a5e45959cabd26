#pragma once
#include "ops/rules/common.h"

// Views: the result shares the argument's storage; strides and offset are exact.
namespace kiln::ops::rules {

/// Strides under which `t` can be seen with `sizes` without a copy, or nullopt (computeStride).
std::optional<Ints> view_strides(const TensorMeta& t, const Ints& sizes);
/// `sizes` with a -1 resolved. Throws eager's message for a wrong number of elements.
Ints infer_size(Ints sizes, int64_t numel);

TensorMeta expand_to(const TensorMeta& t, const Ints& sizes);
TensorMeta slice_of(const TensorMeta& t, int64_t dim, std::optional<int64_t> start, std::optional<int64_t> end,
                    int64_t step);

Metas view(const OpInfo& info, Args args);
Metas reshape(const OpInfo& info, Args args);
Metas reshape_alias(const OpInfo& info, Args args);
Metas view_dtype(const OpInfo& info, Args args);
Metas view_as_real(const OpInfo& info, Args args);
Metas view_as_complex(const OpInfo& info, Args args);
Metas permute(const OpInfo& info, Args args);
Metas transpose(const OpInfo& info, Args args);
Metas t(const OpInfo& info, Args args);
Metas expand(const OpInfo& info, Args args);
Metas slice(const OpInfo& info, Args args);
Metas select(const OpInfo& info, Args args);
Metas squeeze(const OpInfo& info, Args args);
Metas unsqueeze(const OpInfo& info, Args args);
Metas as_strided(const OpInfo& info, Args args);
Metas unfold(const OpInfo& info, Args args);
Metas diagonal(const OpInfo& info, Args args);
Metas alias(const OpInfo& info, Args args);
Metas split(const OpInfo& info, Args args);
Metas split_with_sizes(const OpInfo& info, Args args);
Metas unbind(const OpInfo& info, Args args);

/// The "_copy" twin of a view: its elements in fresh row-major tensors.
template <Rule R>
Metas copied(const OpInfo& info, Args args) {
  Metas out = R(info, args);
  for (TensorMeta& t : out) t = contiguous(t, t.sizes);
  return out;
}

}  // namespace kiln::ops::rules
