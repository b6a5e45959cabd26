#pragma once
#include "ops/rules/common.h"

// Rules of ops that fold dims away, of scans and of softmax. Their CPU kernels write row-major results.
namespace kiln::ops::rules {

enum class Acc : uint8_t {
  Same,     // dtype of the input
  Sum,      // integers become int64
  Float,    // integers are refused, the default float for none
  ToFloat,  // integers become the default float
  Bool,     // any, all (uint8 stays uint8)
  Real,     // norms, variances: complex becomes real
  Index,    // int64
};

/// Sizes after folding `dims` (all if empty and `empty_is_all`).
Ints reduced_sizes(const TensorMeta& t, const Ints& dims, bool keepdim, bool empty_is_all = true);
Metas reduce(Acc acc, int dim_at, int keep_at, int dtype_at, Args args);

/// Argument places, -1 for none: the list of dims, keepdim, dtype.
template <Acc A, int Dim, int Keep, int Dtype>
Metas reduction(const OpInfo&, Args args) {
  return reduce(A, Dim, Keep, Dtype, args);
}
/// amax, amin: refuse empty dims.
Metas extremum(const OpInfo& info, Args args);
/// (values, indices) along one dim at argument `At`, keepdim behind it.
Metas select_with_index_at(size_t dim_at, size_t keep_at, Args args);
template <size_t Dim, size_t Keep>
Metas select_with_index(const OpInfo&, Args args) {
  return select_with_index_at(Dim, Keep, args);
}
Metas aminmax(const OpInfo& info, Args args);
Metas var_mean(const OpInfo& info, Args args);
Metas norm_with_dtype(const OpInfo& info, Args args);
Metas scan(const OpInfo& info, Args args);
Metas scan_with_index(const OpInfo& info, Args args);
Metas softmax(const OpInfo& info, Args args);
Metas safe_softmax(const OpInfo& info, Args args);
Metas softmax_backward(const OpInfo& info, Args args);
Metas nll_loss_forward(const OpInfo& info, Args args);
Metas nll_loss2d_forward(const OpInfo& info, Args args);
/// Row-major, like argument 1 (self of a gradient).
Metas contiguous_like_second(const OpInfo& info, Args args);
Metas sort(const OpInfo& info, Args args);
Metas sort_stable(const OpInfo& info, Args args);
Metas topk(const OpInfo& info, Args args);
Metas argsort(const OpInfo& info, Args args);
Metas bucketize(const OpInfo& info, Args args);
Metas searchsorted(const OpInfo& info, Args args);
Metas histc(const OpInfo& info, Args args);
Metas scalar_of(const OpInfo& info, Args args);
Metas trace(const OpInfo& info, Args args);
Metas margin_loss(const OpInfo& info, Args args);

}  // namespace kiln::ops::rules
