#pragma once
#include "ops/rules/common.h"

// Factories, and ops that move elements into a fresh tensor.
namespace kiln::ops::rules {

/// Factories by the places of their size list, dtype, device and memory format (-1: none). Strides row-major unless a
/// format is given.
Metas factory_at(int size_at, int dtype_at, int format_at, DType absent, Args args);
template <int Size, int Dtype, int Format>
Metas factory(const OpInfo&, Args args) {
  return factory_at(Size, Dtype, Format, default_dtype(), args);
}
/// Of floating numbers alone, with a size of one number: hann_window.
Metas window_at(int dtype_at, Args args);
template <int Dtype>
Metas window(const OpInfo&, Args args) {
  return window_at(Dtype, args);
}
/// Integer by default: randint, randperm.
template <int Size, int Dtype>
Metas int_factory(const OpInfo&, Args args) {
  return factory_at(Size, Dtype, -1, DType::Int64, args);
}
Metas fftfreq(const OpInfo& info, Args args);
Metas empty_strided(const OpInfo& info, Args args);
Metas full(const OpInfo& info, Args args);
Metas scalar_tensor(const OpInfo& info, Args args);
Metas arange(const OpInfo& info, Args args);
Metas arange_start(const OpInfo& info, Args args);
Metas arange_step(const OpInfo& info, Args args);
Metas linspace(const OpInfo& info, Args args);
Metas eye(const OpInfo& info, Args args);
Metas eye_m(const OpInfo& info, Args args);
Metas triangle_indices(const OpInfo& info, Args args);
/// *_like: (self, ..., dtype, layout, device, pin_memory, memory_format) with dtype at `At`.
Metas like_at(size_t dtype_at, Args args);
template <size_t Dtype>
Metas like_factory(const OpInfo&, Args args) {
  return like_at(Dtype, args);
}
/// new_*: (self, size, ..., dtype, layout, device, pin_memory) with dtype at `At`.
Metas new_at(size_t dtype_at, Args args);
template <size_t Dtype>
Metas new_factory(const OpInfo&, Args args) {
  return new_at(Dtype, args);
}
Metas new_empty_strided(const OpInfo& info, Args args);

Metas clone(const OpInfo& info, Args args);
Metas to_copy(const OpInfo& info, Args args);
Metas cat(const OpInfo& info, Args args);
Metas stack(const OpInfo& info, Args args);
Metas constant_pad(const OpInfo& info, Args args);
Metas flip(const OpInfo& info, Args args);
Metas roll(const OpInfo& info, Args args);
Metas repeat(const OpInfo& info, Args args);
Metas triangle(const OpInfo& info, Args args);
Metas rot90(const OpInfo& info, Args args);
Metas pad_nd(size_t spatial, Args args);
template <size_t N>
Metas border_pad(const OpInfo&, Args args) {
  return pad_nd(N, args);
}
/// Like argument 1 (the forward's input), in its suggested memory format.
Metas formatted_like_second(const OpInfo& info, Args args);
/// zeros of the sizes in argument 1: slice_backward and its kin.
Metas zeros_of_sizes(const OpInfo& info, Args args);
/// as_strided_scatter: a copy of self.
Metas scatter_into(const OpInfo& info, Args args);
/// slice_scatter and its kin, (self, src, ...), where `Part` is the rule of the view (self, ...) that src takes the
/// place of: it raises for dims and indices that self has not.
template <Metas (*Part)(const OpInfo&, Args)>
Metas scatter_into_part(const OpInfo& info, Args args) {
  std::vector<Arg> of_part(args.begin(), args.end());
  of_part.erase(of_part.begin() + 1);
  Part(info, of_part);
  return scatter_into(info, args);
}
Metas pixel_shuffle(const OpInfo& info, Args args);
Metas pixel_unshuffle(const OpInfo& info, Args args);
Metas channel_shuffle(const OpInfo& info, Args args);
Metas diag_embed(const OpInfo& info, Args args);
Metas block_diag(const OpInfo& info, Args args);

}  // namespace kiln::ops::rules
