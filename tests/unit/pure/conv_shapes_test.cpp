#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "runtime/conv/conv.h"

// Convolutions of random shapes, and products, against plain loops. Here and not beside ATen, so that the sanitizers
// see every read and write: all buffers are exactly as large as asked for.
namespace kiln::runtime::conv {
namespace {

const gemm::Parallel kSerial = [](int64_t n, const std::function<void(int64_t)>& f) {
  for (int64_t i = 0; i < n; ++i) f(i);
};

class Buffer {
 public:
  explicit Buffer(int64_t floats) : data_(static_cast<float*>(std::aligned_alloc(64, (floats * 4 + 63) / 64 * 64))) {}
  Buffer(int64_t floats, std::mt19937& random) : Buffer(floats) {
    std::uniform_real_distribution<float> values(-1, 1);
    for (int64_t i = 0; i < floats; ++i) data_[i] = values(random);
  }
  Buffer(const Buffer&) = delete;
  ~Buffer() { std::free(data_); }
  operator float*() { return data_; }

 private:
  float* data_;
};

struct Case {
  Shape s;
  WeightStrides ws;
  int threads;
};

Case random_case(std::mt19937& random) {
  const auto between = [&](int64_t low, int64_t high) {
    return low + static_cast<int64_t>(random() % (high - low + 1));
  };
  for (;;) {
    Shape s{};
    const bool wide = between(0, 5) == 0;  // packed panel by panel
    s.n = between(1, between(0, 2) ? 4 : 30);
    s.ci = wide ? between(100, 300) : between(1, between(0, 1) ? 8 : 40);
    s.co = wide ? between(100, 300) : between(1, between(0, 1) ? 20 : 140);
    s.h = between(1, wide ? 5 : 16), s.w = between(1, wide ? 5 : 20);
    const bool point = between(0, 2) == 0;
    s.kh = point ? 1 : between(1, 5), s.kw = point ? 1 : between(1, 5);
    s.pad_h = point ? 0 : between(0, 3), s.pad_w = point ? 0 : between(0, 3);
    s.stride_h = between(1, 3), s.stride_w = between(1, 3);
    s.dilation_h = between(0, 2) ? 1 : between(1, 3), s.dilation_w = between(0, 2) ? 1 : between(1, 3);
    const int64_t rows = s.h + 2 * s.pad_h - s.dilation_h * (s.kh - 1) - 1;
    const int64_t columns = s.w + 2 * s.pad_w - s.dilation_w * (s.kw - 1) - 1;
    if (rows < 0 || columns < 0) continue;
    s.oh = rows / s.stride_h + 1, s.ow = columns / s.stride_w + 1;
    if (s.oh > 1 && between(0, 7) == 0) --s.oh;  // a transposed convolution with much output padding
    const int64_t taps = s.taps();
    if (s.outputs() * s.co * s.ci * taps > 4'000'000) continue;
    if (between(0, 4) == 0 && s.co > 1) {  // a group for each channel
      s.ci = s.groups = s.co;
      return {s, {taps, taps, s.kw, 1}, static_cast<int>(between(1, 6))};
    }
    const WeightStrides layouts[] = {{s.ci * taps, taps, s.kw, 1},         // row-major
                                     {s.ci * taps, 1, s.kw * s.ci, s.ci},  // channels-last
                                     {taps, s.co * taps, s.kw, 1}};        // transposed
    return {s, layouts[between(0, 2)], static_cast<int>(between(1, 6))};
  }
}

void expect_close(float* got, const std::vector<double>& want, const char* what) {
  for (size_t i = 0; i < want.size(); ++i) ASSERT_NEAR(got[i], want[i], 2e-4) << what << " at " << i;
}

TEST(ConvShapes, EqualPlainLoops) {
  if (!gemm::supported()) GTEST_SKIP();
  std::mt19937 random(5);
  for (int round = 0; round < 500; ++round) {
    const auto [s, ws, threads] = random_case(random);
    SCOPED_TRACE("n " + std::to_string(s.n) + " channels " + std::to_string(s.ci) + " to " + std::to_string(s.co) +
                 " image " + std::to_string(s.h) + "x" + std::to_string(s.w) + " to " + std::to_string(s.oh) + "x" +
                 std::to_string(s.ow) + " kernel " + std::to_string(s.kh) + "x" + std::to_string(s.kw) + " round " +
                 std::to_string(round));
    const int64_t in_group = s.ci / s.groups, out_group = s.co / s.groups;
    const int64_t inputs = s.n * s.h * s.w * s.ci, weights = s.co * in_group * s.taps(), outputs = s.outputs() * s.co;
    Buffer x(inputs, random), w(weights, random), dy(outputs, random), shift_y(s.co, random), shift_x(s.ci, random);
    std::vector<double> y(outputs), dx(inputs), dw(weights);
    for (int64_t i = 0; i < outputs; ++i) y[i] = shift_y[i % s.co];
    for (int64_t i = 0; i < inputs; ++i) dx[i] = shift_x[i % s.ci];
    for (int64_t out = 0; out < s.outputs(); ++out)
      for (int64_t tap = 0; tap < s.taps(); ++tap) {
        const int64_t kh = tap / s.kw, kw = tap % s.kw, n = out / (s.oh * s.ow);
        const int64_t h = out / s.ow % s.oh * s.stride_h + kh * s.dilation_h - s.pad_h;
        const int64_t v = out % s.ow * s.stride_w + kw * s.dilation_w - s.pad_w;
        if (h < 0 || h >= s.h || v < 0 || v >= s.w) continue;
        const int64_t in = ((n * s.h + h) * s.w + v) * s.ci;
        for (int64_t o = 0; o < s.co; ++o)
          for (int64_t i = 0; i < in_group; ++i) {
            const int64_t place = o * ws.o + i * ws.i + kh * ws.h + kw * ws.w, from = in + o / out_group * in_group + i;
            y[out * s.co + o] += static_cast<double>(x[from]) * w[place];
            dx[from] += static_cast<double>(dy[out * s.co + o]) * w[place];
            dw[place] += static_cast<double>(dy[out * s.co + o]) * x[from];
          }
      }
    Buffer result(std::max({inputs, weights, outputs}));
    {
      Buffer work(forward_workspace(s));
      forward(s, x, w, ws, {shift_y}, result, work, kSerial, threads);
      expect_close(result, y, "forward");
    }
    if (worth_packing(s)) {
      Buffer packed(packed_weight_floats(s)), work(forward_packed_workspace(s));
      pack_weight(s, w, ws, packed, kSerial);
      forward_packed(s, x, w, ws, packed, {shift_y}, result, work, kSerial, threads);
      expect_close(result, y, "forward_packed");
    }
    {
      Buffer work(backward_input_workspace(s));
      backward_input(s, dy, w, ws, {shift_x}, result, work, kSerial, threads);
      expect_close(result, dx, "backward_input");
    }
    {
      Buffer work(backward_weight_workspace(s, threads));
      backward_weight(s, x, dy, result, ws, work, kSerial, threads);
      expect_close(result, dw, "backward_weight");
    }
    if (HasFatalFailure()) return;
  }
}

}  // namespace
}  // namespace kiln::runtime::conv
