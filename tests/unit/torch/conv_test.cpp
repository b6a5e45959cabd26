#include "runtime/conv/conv.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>

namespace kiln::runtime::conv {
namespace {

struct Case {
  int64_t n, ci, co, h, w, kh, kw, stride, pad, dilation;
};
const Case kCases[] = {{2, 3, 64, 11, 9, 7, 7, 2, 3, 1},
                       {1, 16, 48, 8, 8, 1, 1, 1, 0, 1},
                       {2, 64, 33, 6, 7, 3, 3, 1, 1, 1},
                       {3, 20, 5, 9, 9, 3, 3, 2, 1, 1},
                       {1, 8, 17, 10, 8, 3, 1, 1, 2, 2},
                       {2, 600, 20, 3, 3, 1, 1, 2, 0, 1},
                       {1, 1, 1, 1, 1, 3, 3, 1, 1, 1},
                       {2, 5, 9, 12, 5, 2, 4, 3, 0, 1},
                       {1, 33, 100, 5, 5, 5, 5, 1, 2, 1},
                       {4, 130, 70, 16, 16, 3, 3, 1, 1, 1},
                       {2, 4, 8, 7, 7, 3, 3, 1, 0, 2},
                       // Blocks of pixels that span several images.
                       {20, 6, 16, 14, 14, 5, 5, 1, 0, 1},
                       {30, 1, 6, 12, 8, 5, 3, 1, 0, 1},
                       {40, 7, 9, 9, 17, 3, 3, 2, 0, 1},
                       // Results, and inputs, of half a vector.
                       {3, 8, 8, 13, 9, 3, 3, 1, 1, 1},
                       {2, 12, 7, 10, 8, 3, 3, 1, 1, 1},
                       {2, 7, 24, 9, 8, 3, 3, 1, 1, 1},
                       // Many squares of results, for Winograd's form: whole ones, cut ones, no border and a wide one,
                       // more channels than a block of k has, columns that fill no vector.
                       {3, 32, 64, 14, 14, 3, 3, 1, 1, 1},
                       {9, 48, 40, 7, 9, 3, 3, 1, 1, 1},
                       {4, 36, 33, 15, 14, 3, 3, 1, 0, 1},
                       {5, 33, 50, 9, 11, 3, 3, 1, 2, 1},
                       {2, 600, 80, 17, 16, 3, 3, 1, 1, 1},
                       {1, 40, 130, 40, 9, 3, 3, 1, 4, 1},
                       // The same with few squares, a large weight, and columns that fill no panel.
                       {2, 300, 280, 7, 8, 3, 3, 1, 1, 1},
                       {1, 540, 150, 7, 7, 3, 3, 1, 1, 1},
                       // Large weights, which are packed panel by panel where panels are many for the threads.
                       {1, 150, 140, 5, 4, 3, 3, 1, 1, 1},
                       {2, 130, 200, 6, 6, 3, 3, 2, 1, 1},
                       {1, 600, 300, 3, 3, 1, 1, 1, 0, 1},
                       {1, 140, 150, 4, 4, 5, 5, 1, 2, 1},
                       {1, 70, 130, 9, 8, 7, 7, 2, 3, 1},
                       {1, 520, 660, 4, 3, 1, 1, 2, 0, 1},
                       // Kernels of one element over many pixels: multiply_split, where the host has a unit for it.
                       {4, 96, 120, 14, 13, 1, 1, 1, 0, 1},
                       {2, 330, 90, 20, 19, 1, 1, 1, 0, 1}};

void expect_close(const at::Tensor& got, const at::Tensor& want, const char* what) {
  const double error = (got.to(at::kDouble) - want).abs().max().item<double>();
  EXPECT_LT(error, 1e-5 * (1 + want.abs().max().item<double>())) << what;
}

// All three products against ATen's in double precision, for row-major and channels-last weights.
TEST(Conv, EqualsDoublePrecisionConvolution) {
  if (!gemm::supported()) GTEST_SKIP();
  at::manual_seed(3);
  for (const Case& c : kCases)
    for (const auto format : {at::MemoryFormat::Contiguous, at::MemoryFormat::ChannelsLast}) {
      const std::vector<int64_t> stride{c.stride, c.stride}, pad{c.pad, c.pad}, dilation{c.dilation, c.dilation};
      const auto x = at::randn({c.n, c.h, c.w, c.ci}).permute({0, 3, 1, 2});
      const auto w = at::randn({c.co, c.ci, c.kh, c.kw}).contiguous(format), bias = at::randn({c.co});
      const auto want = at::convolution(x.to(at::kDouble), w.to(at::kDouble), bias.to(at::kDouble), stride, pad,
                                        dilation, false, {0, 0}, 1);
      const Shape s{c.n,          c.ci,     c.h,      c.w,   c.co,  c.kh,       c.kw,      want.size(2),
                    want.size(3), c.stride, c.stride, c.pad, c.pad, c.dilation, c.dilation};
      const WeightStrides ws{w.stride(0), w.stride(1), w.stride(2), w.stride(3)};
      const auto work = at::empty({std::max({forward_workspace(s), backward_input_workspace(s),
                                             backward_weight_workspace(s, 1), backward_weight_workspace(s, 5)}) +
                                   16});
      auto* aligned =
          reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(work.data_ptr<float>()) + 63) & ~uintptr_t{63});
      for (const int threads : {1, 5}) {
        auto y = at::full({c.n, s.oh, s.ow, c.co}, 7.0f), dx = at::full({c.n, c.h, c.w, c.ci}, 7.0f),
             dw = at::full_like(w, 7.0f);
        const auto packed = at::empty({packed_weight_floats(s) + 16});
        auto* packed_data =
            reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(packed.data_ptr<float>()) + 63) & ~uintptr_t{63});
        pack_weight(s, w.data_ptr<float>(), ws, packed_data, gemm::serial);
        forward_packed(s, x.data_ptr<float>(), w.data_ptr<float>(), ws, packed_data, {bias.data_ptr<float>()},
                       y.data_ptr<float>(), aligned, gemm::serial, threads);
        expect_close(y.permute({0, 3, 1, 2}), want, "forward_packed");
        y.fill_(7.0f);
        forward(s, x.data_ptr<float>(), w.data_ptr<float>(), ws, {bias.data_ptr<float>()}, y.data_ptr<float>(), aligned,
                gemm::serial, threads);
        expect_close(y.permute({0, 3, 1, 2}), want, "forward");
        const auto dy = at::randn({c.n, s.oh, s.ow, c.co});
        const auto [want_dx, want_dw, unused] = at::convolution_backward(
            dy.permute({0, 3, 1, 2}).to(at::kDouble), x.to(at::kDouble), w.to(at::kDouble), at::OptionalIntArrayRef(),
            stride, pad, dilation, false, {0, 0}, 1, {true, true, false});
        const auto run = [&](const gemm::Epilogue& epilogue) {
          backward_input(s, dy.data_ptr<float>(), w.data_ptr<float>(), ws, epilogue, dx.data_ptr<float>(), aligned,
                         gemm::serial, threads);
          return dx.permute({0, 3, 1, 2});
        };
        expect_close(run({}), want_dx, "backward_input");
        const auto shift = at::randn({c.ci});
        expect_close(run({shift.data_ptr<float>()}), want_dx + shift.view({-1, 1, 1}), "transposed convolution");
        backward_weight(s, x.data_ptr<float>(), dy.data_ptr<float>(), dw.data_ptr<float>(), ws, aligned, gemm::serial,
                        threads);
        expect_close(dw, want_dw, "backward_weight");
      }
    }
}

}  // namespace
}  // namespace kiln::runtime::conv
