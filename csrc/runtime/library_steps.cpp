#include "runtime/library_steps.h"

#include <ATen/Parallel.h>

#include <cmath>

#include "base/error.h"
#include "base/pass.h"
#include "graph/convolution.h"
#include "runtime/arena.h"
#include "runtime/attention/attention.h"
#include "runtime/conv/conv.h"
#include "runtime/epilogue_step.h"
#include "runtime/frozen.h"
#include "runtime/gemm/few_rows.h"
#include "runtime/gemm/gemm.h"
#include "runtime/gemm/split.h"
#include "runtime/parallel.h"
#include "runtime/random/bernoulli.h"

namespace kiln::runtime {
namespace {

using graph::Node;
using graph::TensorMeta;
using graph::Value;

bool is_f32(const TensorMeta& m) { return m.dtype == DType::Float32 && m.device.type == graph::DeviceType::CPU; }

float* workspace(int64_t floats) { return static_cast<float*>(scratch(floats * static_cast<int64_t>(sizeof(float)))); }

/// A step over some slots with a name; the parts that all steps here share.
class LibraryStep : public RowsStep {
 public:
  LibraryStep(std::string what, std::vector<Slot> reads, std::vector<Slot> writes)
      : what_(std::move(what)), reads_(std::move(reads)), writes_(std::move(writes)) {}
  std::string describe(const Plan& plan) const override {
    std::string text;
    for (Slot s : writes_) text += (text.empty() ? "" : ", ") + plan.slot_text(s);
    text += " <- " + what_ + "(";
    for (size_t i = 0; i < reads_.size(); ++i) text += (i ? ", " : "") + plan.slot_text(reads_[i]);
    return text + ")";
  }
  void for_each_slot(const std::function<void(Slot)>& f) const override {
    for (Slot s : reads_) f(s);
    for (Slot s : writes_) f(s);
    if (weight_input_ != kNoSlot) f(weight_input_);
  }
  void run_rows(Frame& frame, const gemm::RowsDone&) const override { run(frame); }

 protected:
  Slot weight_input_ = kNoSlot;  // the input behind an operand that is a weight: alive while the step looks at it
  float* at(const Frame& frame, Slot s) const { return reinterpret_cast<float*>(frame.ptrs[s]); }

 private:
  std::string what_;
  std::vector<Slot> reads_, writes_;
};

/// An operand that may be a weight, and its packed form.
struct FrozenOperand {
  Slot slot = kNoSlot;  // the weight's input; kNoSlot if the operand is none
  PackedWeight weight;
  /// `form`: as PackedWeight's, of the operand.
  FrozenOperand(const Plan& plan, Slot operand, const std::string& form)
      : weight(form + " at " + std::to_string(plan.slots[operand].meta.offset)) {
    const SlotInfo& info = plan.slots[operand];
    const Slot root = info.kind == SlotInfo::Kind::View ? info.base : operand;
    if (plan.slots[root].frozen) slot = root;
  }
  std::shared_ptr<const PackedWeight::Buffer> packed(const Frame& frame, int64_t floats,
                                                     const std::function<void(float*)>& pack) const {
    return slot == kNoSlot ? nullptr : weight.get(frame.tensors[slot], floats, pack);
  }
};

// --- matrix products ------------------------------------------------------------------------------------------------

/// Where mm, addmm and bmm have their operands.
struct Product {
  Value a, b, bias;
};

std::optional<Product> product_of(const Node& n) {
  const std::string& op = n.op.name();
  if (op == "aten::mm" || op == "aten::bmm") return Product{n.arg(0).value(), n.arg(1).value(), {}};
  if (op == "aten::addmm") {
    for (size_t i : {3, 4})
      if (n.args.size() > i && n.arg(i).is_number() && n.arg(i).to_double() != 1.0) return std::nullopt;
    return Product{n.arg(1).value(), n.arg(2).value(), n.arg(0).value()};
  }
  return std::nullopt;
}

/// A bias that is one row, its elements side by side, added to every row of the product.
bool is_row(const TensorMeta& bias, int64_t n) {
  if (bias.sizes.empty() || bias.sizes.back() != n || (n > 1 && bias.strides.back() != 1)) return false;
  return bias.dim() == 1 || (bias.dim() == 2 && (bias.sizes[0] == 1 || bias.strides[0] == 0));
}

bool serves_product(const TensorMeta& a, const TensorMeta& b, const TensorMeta* bias, const TensorMeta& c) {
  if (!gemm::supported() || !is_f32(a) || !is_f32(b) || !is_f32(c)) return false;
  const size_t r = c.sizes.size();
  const int64_t m = c.sizes[r - 2], n = c.sizes[r - 1], k = a.sizes[r - 1];
  if (n > 1 && c.strides[r - 1] != 1) return false;
  if (bias && !(is_f32(*bias) && is_row(*bias, n))) return false;
  if (n < 8 || k < 4) return false;
  // Too few rows for a register tile: the matrix is streamed once, as it lies.
  if (m > 0 && gemm::reads_b_once(m)) return a.strides[r - 1] == 1 && (b.strides[r - 2] == 1 || b.strides[r - 1] == 1);
  // ATen's library takes a batch of small ones in one call.
  constexpr int64_t kSmall = 32 * 32 * 32;
  return m > 0 && (r == 2 || c.sizes[0] == 1 || m * n * k > kSmall);
}

class ProductStep final : public LibraryStep {
 public:
  ProductStep(const Node& node, Slot a, Slot b, Slot bias, Slot c, const Plan& plan)
      : LibraryStep("matmul " + node.op.name(),
                    bias == kNoSlot ? std::vector<Slot>{a, b} : std::vector<Slot>{a, b, bias}, {c}),
        split_(splits(plan.slots[a].meta, plan.slots[c].meta)),
        weight_(plan, b, form_of(plan.slots[b].meta, split_)),
        a_(a),
        b_(b),
        bias_(bias),
        c_(c) {
    weight_input_ = weight_.slot;
    const TensorMeta &ma = plan.slots[a].meta, &mb = plan.slots[b].meta, &mc = plan.slots[c].meta;
    const size_t r = mc.sizes.size();
    m_ = mc.sizes[r - 2], n_ = mc.sizes[r - 1], k_ = ma.sizes[r - 1];
    a_row_ = ma.strides[r - 2], a_col_ = ma.strides[r - 1];
    b_row_ = mb.strides[r - 2], b_col_ = mb.strides[r - 1];
    // A dimension of one element may have any stride; 1 opens the packed-free path.
    if (k_ == 1) a_col_ = 1;
    ldc_ = mc.strides[r - 2];
    if (r == 3) batch_ = mc.sizes[0], a_batch_ = ma.strides[0], b_batch_ = mb.strides[0], c_batch_ = mc.strides[0];
  }

  /// As PackedWeight's, of the right side.
  static std::string form_of(const TensorMeta& b, bool split) {
    std::string form = split ? "split product" : "product";
    for (size_t d = b.sizes.size() - 2; d < b.sizes.size(); ++d)
      form += " " + std::to_string(b.sizes[d]) + ":" + std::to_string(b.strides[d]);
    return form;
  }

  int64_t row_length() const override { return batch_ == 1 && ldc_ == n_ ? n_ : 0; }
  void run(Frame& frame) const override { multiply(frame, nullptr); }
  void run_rows(Frame& frame, const gemm::RowsDone& done) const override { multiply(frame, &done); }

 private:
  static bool splits(const TensorMeta& a, const TensorMeta& c) {
    const size_t r = c.sizes.size();
    return gemm::splits(c.sizes[r - 2], c.sizes[r - 1], a.sizes[r - 1]) && pass_enabled("plan.split_products");
  }

  void multiply(Frame& frame, const gemm::RowsDone* done) const {
    const gemm::Epilogue epilogue{bias_ == kNoSlot ? nullptr : at(frame, bias_), false, done};
    const float *a = at(frame, a_), *b = at(frame, b_);
    float* c = at(frame, c_);
    const int threads = at::get_num_threads();
    const gemm::Matrix ma{a, a_row_, a_col_}, mb{b, b_row_, b_col_};
    const auto one = [&](int64_t i, float* work, const gemm::Parallel& parallel, int workers) {
      (split_ ? gemm::multiply_split : gemm::multiply)(m_, n_, k_, {a + i * a_batch_, a_row_, a_col_},
                                                       {b + i * b_batch_, b_row_, b_col_}, c + i * c_batch_, ldc_,
                                                       epilogue, work, parallel, workers);
    };
    const auto floats = [&](int workers) {
      return split_ ? gemm::split_workspace_floats(n_, k_) : gemm::workspace_floats(m_, n_, k_, ma, mb, workers);
    };
    // With few rows reading the matrix is the work.
    const double flops = 2.0 * std::max<int64_t>(m_, 8) * n_ * k_;
    if (batch_ == 1) {
      if (split_) {
        if (const auto kept = weight_.packed(frame, gemm::split_floats(k_, n_),
                                             [&](float* to) { gemm::pack_split(k_, n_, mb, to, parallel_tasks); }))
          return gemm::multiply_split_packed(m_, n_, k_, ma, mb, kept->data(), c, ldc_, epilogue, parallel_tasks,
                                             threads);
      } else if (const auto kept = gemm::reads_b_once(m_)
                                       ? nullptr
                                       : weight_.packed(frame, gemm::packed_floats(k_, n_), [&](float* to) {
                                           gemm::pack(k_, n_, mb, to, parallel_tasks);
                                         })) {
        const bool alone = flops < 1e6;
        const int workers = alone ? 1 : threads;
        gemm::multiply_packed(m_, n_, k_, ma, kept->data(), c, ldc_, epilogue,
                              workspace(gemm::packed_a_floats(m_, n_, k_, ma, workers)),
                              alone ? gemm::Parallel(gemm::serial) : gemm::Parallel(parallel_tasks), workers);
        return;
      }
      // Waking the pool costs some microseconds; below that one core is as fast.
      if (flops < 1e6)
        one(0, workspace(floats(1)), gemm::serial, 1);
      else
        one(0, workspace(floats(threads)), parallel_tasks, threads);
      return;
    }
    if (batch_ >= 2 * threads || flops < 1e6) {
      const int64_t pieces = flops * batch_ < 1e6 ? 1 : std::min<int64_t>(batch_, threads * 4);
      const int64_t need = floats(1);
      float* const work = workspace(need * pieces);
      parallel_tasks(pieces, [&](int64_t p) {
        for (int64_t i = batch_ * p / pieces; i < batch_ * (p + 1) / pieces; ++i)
          one(i, work + p * need, gemm::serial, 1);
      });
      return;
    }
    float* const work = workspace(floats(threads));
    for (int64_t i = 0; i < batch_; ++i) one(i, work, parallel_tasks, threads);
  }

  bool split_;  // multiply_split
  FrozenOperand weight_;
  Slot a_, b_, bias_, c_;
  int64_t m_, n_, k_, batch_ = 1, a_row_, a_col_, a_batch_ = 0, b_row_, b_col_, b_batch_ = 0, ldc_, c_batch_ = 0;
};

/// A few rows of a half type times a matrix whose columns are dense, as a language model's weights are for one word
/// after another. ATen reads the matrix once for each row, oneDNN slower than memory gives it.
bool serves_half_rows(const TensorMeta& a, const TensorMeta& b, const TensorMeta* bias, const TensorMeta& c) {
  const auto serves = [&](const TensorMeta& m) {
    return m.dtype == c.dtype && m.device.type == graph::DeviceType::CPU;
  };
  if (!is_half(c.dtype) || !gemm::supported() || c.dim() != 2 || !serves(a) || !serves(b) || !serves(c)) return false;
  const int64_t m = c.sizes[0], n = c.sizes[1], k = a.sizes[1];
  if (m < 1 || m > gemm::kFewRows || n < 8 || k < 16 || (bias && !(serves(*bias) && is_row(*bias, n)))) return false;
  return a.strides[1] == 1 && b.strides[0] == 1 && c.strides[1] == 1;
}

class HalfRowsStep final : public LibraryStep {
 public:
  HalfRowsStep(Slot a, Slot b, Slot bias, Slot c, const Plan& plan)
      : LibraryStep("matmul half rows", bias == kNoSlot ? std::vector<Slot>{a, b} : std::vector<Slot>{a, b, bias}, {c}),
        a_(a),
        b_(b),
        bias_(bias),
        c_(c) {
    const TensorMeta &ma = plan.slots[a].meta, &mb = plan.slots[b].meta, &mc = plan.slots[c].meta;
    brain_ = mc.dtype == DType::BFloat16;
    m_ = mc.sizes[0], n_ = mc.sizes[1], k_ = ma.sizes[1];
    row_ = ma.strides[0], line_ = mb.strides[1], ldc_ = mc.strides[0];
  }
  void run(Frame& frame) const override {
    const auto half = [&](Slot s) { return reinterpret_cast<uint16_t*>(frame.ptrs[s]); };
    const gemm::HalfProduct product{half(a_), row_, half(b_), line_, bias_ == kNoSlot ? nullptr : half(bias_),
                                    half(c_), ldc_};
    const bool alone = 16.0 * n_ * k_ < 1e6;  // as ProductStep
    const int threads = alone ? 1 : at::get_num_threads();
    gemm::multiply_few_half_rows(brain_, m_, n_, k_, product, workspace(m_ * k_),
                                 alone ? gemm::Parallel(gemm::serial) : gemm::Parallel(parallel_tasks), threads);
  }

 private:
  Slot a_, b_, bias_, c_;
  bool brain_;
  int64_t m_, n_, k_, row_, line_, ldc_;
};

// --- convolutions
// ------------------------------------------------------------------------------------------------------

bool is_channels_last(const TensorMeta& m) {
  return m.dim() == 4 && m.is_contiguous(graph::MemoryFormat::ChannelsLast);
}

/// For a transposed convolution, that of the convolution whose gradient it is: x and y have changed places.
std::optional<conv::Shape> conv_shape(const Node& n, const TensorMeta& input, const TensorMeta& w,
                                      const TensorMeta& output) {
  const size_t at = graph::first_setting(n);
  const TensorMeta &x = graph::is_transposed(n) ? output : input, &y = graph::is_transposed(n) ? input : output;
  const auto stride = n.arg(at).to_ints(), pad = n.arg(at + 1).to_ints(), dilation = n.arg(at + 2).to_ints();
  const int64_t groups = graph::groups_of(n);
  if (x.dim() != 4 || (groups > 1 && graph::is_transposed(n))) return std::nullopt;
  const conv::Shape shape{x.sizes[0],
                          x.sizes[1],
                          x.sizes[2],
                          x.sizes[3],
                          w.sizes[0],
                          w.sizes[2],
                          w.sizes[3],
                          y.sizes[2],
                          y.sizes[3],
                          graph::setting_of(stride, 0),
                          graph::setting_of(stride, 1),
                          graph::setting_of(pad, 0),
                          graph::setting_of(pad, 1),
                          graph::setting_of(dilation, 0),
                          graph::setting_of(dilation, 1),
                          groups,
                          pass_enabled("plan.winograd"),
                          pass_enabled("plan.split_products")};
  return conv::supported(shape) ? std::optional(shape) : std::nullopt;
}

bool serves_convolution(const Node& n, const TensorMeta& x, const TensorMeta& w, const TensorMeta& y) {
  return is_f32(x) && is_f32(w) && is_f32(y) && is_channels_last(x) && is_channels_last(y) &&
         w.is_non_overlapping_and_dense() && w.numel() > 0 && x.numel() > 0 && y.numel() > 0 && conv_shape(n, x, w, y);
}

conv::WeightStrides weight_strides(const TensorMeta& w) {
  return {w.strides[0], w.strides[1], w.strides[2], w.strides[3]};
}

class ConvolutionStep final : public LibraryStep {
 public:
  ConvolutionStep(const conv::Shape& shape, Slot x, Slot w, Slot bias, Slot y, const Plan& plan)
      : LibraryStep("convolution", bias == kNoSlot ? std::vector<Slot>{x, w} : std::vector<Slot>{x, w, bias}, {y}),
        shape_(shape),
        strides_(weight_strides(plan.slots[w].meta)),
        weight_(plan, w, conv::packed_weight_form(shape, strides_)),
        x_(x),
        w_(w),
        bias_(bias),
        y_(y) {
    weight_input_ = weight_.slot;
  }

  int64_t row_length() const override { return shape_.co; }
  void run(Frame& frame) const override { convolve(frame, nullptr); }
  void run_rows(Frame& frame, const gemm::RowsDone& done) const override { convolve(frame, &done); }

 private:
  void convolve(Frame& frame, const gemm::RowsDone* done) const {
    const float *const x = at(frame, x_), *const w = at(frame, w_);
    const gemm::Epilogue epilogue{bias_ == kNoSlot ? nullptr : at(frame, bias_), false, done};
    const int threads = at::get_num_threads();
    const auto pack = [&](float* to) { conv::pack_weight(shape_, w, strides_, to, parallel_tasks); };
    std::shared_ptr<const PackedWeight::Buffer> kept;
    if (conv::worth_packing(shape_)) kept = weight_.packed(frame, conv::packed_weight_floats(shape_), pack);
    if (kept)
      conv::forward_packed(shape_, x, w, strides_, kept->data(), epilogue, at(frame, y_),
                           workspace(conv::forward_packed_workspace(shape_)), parallel_tasks, threads);
    else
      conv::forward(shape_, x, w, strides_, epilogue, at(frame, y_), workspace(conv::forward_workspace(shape_)),
                    parallel_tasks, threads);
  }

  conv::Shape shape_;
  conv::WeightStrides strides_;
  FrozenOperand weight_;
  Slot x_, w_, bias_, y_;
};

class TransposedConvolutionStep final : public LibraryStep {
 public:
  TransposedConvolutionStep(const conv::Shape& shape, Slot x, Slot w, Slot bias, Slot y, const Plan& plan)
      : LibraryStep("transposed_convolution", bias == kNoSlot ? std::vector<Slot>{x, w} : std::vector<Slot>{x, w, bias},
                    {y}),
        shape_(shape),
        strides_(weight_strides(plan.slots[w].meta)),
        x_(x),
        w_(w),
        bias_(bias),
        y_(y) {}
  void run(Frame& frame) const override {
    conv::backward_input(shape_, at(frame, x_), at(frame, w_), strides_,
                         {bias_ == kNoSlot ? nullptr : at(frame, bias_)}, at(frame, y_),
                         workspace(conv::backward_input_workspace(shape_)), parallel_tasks, at::get_num_threads());
  }

 private:
  conv::Shape shape_;
  conv::WeightStrides strides_;
  Slot x_, w_, bias_, y_;
};

/// Of a convolution or, with `transposed`, of a transposed one; without the bias.
class ConvolutionBackwardStep final : public LibraryStep {
 public:
  ConvolutionBackwardStep(const conv::Shape& shape, bool transposed, Slot dy, Slot x, Slot w,
                          const std::vector<Slot>& results, const Plan& plan)
      : LibraryStep("convolution_backward", {dy, x, w}, used(results)),
        shape_(shape),
        transposed_(transposed),
        w_strides_(weight_strides(plan.slots[w].meta)),
        dy_(dy),
        x_(x),
        w_(w),
        dx_(results[0]),
        dw_(results[1]) {
    if (dw_ != kNoSlot) dw_strides_ = weight_strides(plan.slots[dw_].meta);
  }
  static std::vector<Slot> used(std::vector<Slot> slots) {
    std::erase(slots, kNoSlot);
    return slots;
  }
  void run(Frame& frame) const override {
    const float *dy = at(frame, dy_), *x = at(frame, x_);
    const int threads = at::get_num_threads();
    if (dx_ != kNoSlot && transposed_)
      conv::forward(shape_, dy, at(frame, w_), w_strides_, {}, at(frame, dx_),
                    workspace(conv::forward_workspace(shape_)), parallel_tasks, threads);
    else if (dx_ != kNoSlot)
      conv::backward_input(shape_, dy, at(frame, w_), w_strides_, {}, at(frame, dx_),
                           workspace(conv::backward_input_workspace(shape_)), parallel_tasks, threads);
    if (dw_ != kNoSlot)
      conv::backward_weight(shape_, transposed_ ? dy : x, transposed_ ? x : dy, at(frame, dw_), dw_strides_,
                            workspace(conv::backward_weight_workspace(shape_, threads)), parallel_tasks, threads);
  }

 private:
  conv::Shape shape_;
  bool transposed_;
  conv::WeightStrides w_strides_, dw_strides_{};
  Slot dy_, x_, w_, dx_, dw_;
};

// --- attention -------------------------------------------------------------------------------------------------------

constexpr const char* kAttention = "aten::_scaled_dot_product_flash_attention_for_cpu";
constexpr const char* kAttentionBackward = "aten::_scaled_dot_product_flash_attention_for_cpu_backward";

/// The meta of a value: as the graph says, or as its slot has it.
using MetaOf = std::function<const TensorMeta&(Value)>;

bool is_heads(const TensorMeta& m) {
  return is_f32(m) && m.dim() == 4 && (m.sizes[3] == 1 || m.strides[3] == 1) && m.numel() > 0;
}

/// A float32 mask that broadcasts to [batch, heads, queries, keys].
bool is_mask(const TensorMeta& m) {
  return is_f32(m) && (m.dim() == 2 || m.dim() == 4) && m.numel() > 0 && (m.sizes.back() == 1 || m.strides.back() <= 1);
}

/// The mask of a node whose trailing arguments (dropout, causal, mask, scale) start at args[rest], if it has one.
Value mask_of(const Node& n, size_t rest) {
  const graph::Arg& mask = n.arg(rest + 2);
  return mask.is_value() ? mask.value() : Value{};
}

/// What q, k, v and the trailing arguments, from args[rest] on, say; nothing if ATen's kernel must serve.
std::optional<attention::Shape> attention_shape(const Node& n, const MetaOf& meta, size_t first, size_t rest) {
  const TensorMeta &q = meta(n.arg(first).value()), &k = meta(n.arg(first + 1).value()),
                   &v = meta(n.arg(first + 2).value());
  if (const Value mask = mask_of(n, rest); mask && !is_mask(meta(mask))) return std::nullopt;
  if (!is_heads(q) || !is_heads(k) || !is_heads(v)) return std::nullopt;
  if (n.arg(rest).to_double() != 0.0) return std::nullopt;  // dropout
  const graph::Arg& scale = n.arg(rest + 3);
  if (scale.is_value()) return std::nullopt;
  if (k.sizes[1] != v.sizes[1] || k.sizes[2] != v.sizes[2] || q.sizes[3] != v.sizes[3]) return std::nullopt;
  const attention::Shape s{
      q.sizes[0],
      q.sizes[1],
      k.sizes[1],
      q.sizes[2],
      k.sizes[2],
      q.sizes[3],
      scale.is_none() ? 1.0f / std::sqrt(static_cast<float>(q.sizes[3])) : static_cast<float>(scale.to_double()),
      n.arg(rest + 1).to_bool()};
  return attention::supported(s) ? std::optional(s) : std::nullopt;
}

/// Where a step finds its tensors; a slot that is kNoSlot is left out.
class AttentionTensors {
 public:
  AttentionTensors(std::vector<Slot> slots, const Plan& plan) : slots_(std::move(slots)) {
    for (Slot s : slots_) metas_.push_back(s == kNoSlot ? TensorMeta{} : plan.slots[s].meta);
  }
  template <class T>
  attention::Tensor4<T> heads(const Frame& frame, size_t i) const {
    const TensorMeta& m = metas_[i];
    return {data(frame, i), m.strides[0], m.strides[1], m.strides[2]};
  }
  attention::RowSums row_sums(const Frame& frame, size_t i) const {
    if (slots_[i] == kNoSlot) return {};
    const TensorMeta& m = metas_[i];
    return {data(frame, i), m.strides[0], m.strides[1], m.strides[2]};
  }
  attention::Mask mask(const Frame& frame, size_t i) const {
    if (slots_[i] == kNoSlot) return {};
    const TensorMeta& m = metas_[i];
    const size_t r = m.sizes.size();
    const auto stride = [&](size_t from_end) {
      return from_end <= r && m.sizes[r - from_end] > 1 ? m.strides[r - from_end] : 0;
    };
    return {data(frame, i), stride(4), stride(3), stride(2), stride(1)};
  }

 private:
  float* data(const Frame& frame, size_t i) const { return reinterpret_cast<float*>(frame.ptrs[slots_[i]]); }
  std::vector<Slot> slots_;
  std::vector<TensorMeta> metas_;
};

std::vector<Slot> present(std::vector<Slot> slots) {
  std::erase(slots, kNoSlot);
  return slots;
}

class AttentionStep final : public LibraryStep {
 public:
  /// `in`: q, k, v, mask; `results`: out, logsumexp. The mask and the logsumexp may be kNoSlot.
  AttentionStep(const attention::Shape& shape, const std::vector<Slot>& in, const std::vector<Slot>& results,
                const Plan& plan)
      : LibraryStep("attention", present(in), present(results)),
        shape_(shape),
        in_(in, plan),
        results_(results, plan) {}
  void run(Frame& frame) const override {
    const auto in = [&](size_t i) { return in_.heads<const float>(frame, i); };
    attention::forward(shape_, in(0), in(1), in(2), in_.mask(frame, 3), results_.heads<float>(frame, 0),
                       results_.row_sums(frame, 1), parallel_tasks);
  }

 private:
  attention::Shape shape_;
  AttentionTensors in_, results_;
};

class AttentionBackwardStep final : public LibraryStep {
 public:
  /// `in`: grad_out, q, k, v, out, logsumexp, mask (or kNoSlot); `results`: grad_q, grad_k, grad_v.
  AttentionBackwardStep(const attention::Shape& shape, const std::vector<Slot>& in, const std::vector<Slot>& results,
                        const Plan& plan)
      : LibraryStep("attention_backward", present(in), results),
        shape_(shape),
        in_(in, plan),
        results_(results, plan) {}
  void run(Frame& frame) const override {
    const auto in = [&](size_t i) { return in_.heads<const float>(frame, i); };
    const auto out = [&](size_t i) { return results_.heads<float>(frame, i); };
    attention::backward(shape_, in(0), in(1), in(2), in(3), in_.mask(frame, 6), in(4), in_.row_sums(frame, 5), out(0),
                        out(1), out(2), parallel_tasks);
  }

 private:
  attention::Shape shape_;
  AttentionTensors in_, results_;
};

// --- random numbers
// ---------------------------------------------------------------------------------------------------

/// aten::bernoulli.p into memory that is dense, in whose order ATen draws.
class BernoulliStep final : public LibraryStep {
 public:
  BernoulliStep(const Node& node, Slot out, const Plan& plan)
      : LibraryStep("bernoulli", {}, {out}),
        out_(out),
        dtype_(plan.slots[out].meta.dtype),
        count_(plan.slots[out].meta.numel()),
        p_(node.arg(1).to_double()) {}
  void run(Frame& frame) const override { random::bernoulli(frame.ptrs[out_], dtype_, count_, p_); }

 private:
  Slot out_;
  DType dtype_;
  int64_t count_;
  double p_;
};

bool serves_bernoulli(const Node& n, const TensorMeta& out) {
  return n.arg(1).is_number() && n.arg(1).to_double() >= 0 && n.arg(1).to_double() <= 1 && n.arg(2).is_none() &&
         out.device.type == graph::DeviceType::CPU && out.is_non_overlapping_and_dense() &&
         random::serves_bernoulli(out.dtype);
}

/// What kernel serves a node, decided from metas alone.
struct Choice {
  enum class Kind {
    None,
    Product,
    HalfRows,
    Convolution,
    ConvolutionBackward,
    Attention,
    AttentionBackward,
    Bernoulli
  };
  Kind kind = Kind::None;
  std::optional<conv::Shape> conv = {};
  std::optional<attention::Shape> attention = {};
};

Choice choose(const Node& n, const MetaOf& meta, const MetaOf& result_meta) {
  using Kind = Choice::Kind;
  const std::string& op = n.op.name();
  const auto result = [&](uint32_t i) -> const TensorMeta& { return result_meta({const_cast<Node*>(&n), i}); };
  if (const auto p = product_of(n)) {
    const TensorMeta* bias = p->bias ? &meta(p->bias) : nullptr;
    if (serves_half_rows(meta(p->a), meta(p->b), bias, result(0))) return {Kind::HalfRows};
    return {serves_product(meta(p->a), meta(p->b), bias, result(0)) ? Kind::Product : Kind::None};
  }
  if (op == "aten::convolution") {
    const TensorMeta &x = meta(n.arg(0).value()), &w = meta(n.arg(1).value());
    if (x.dim() != 4 || !serves_convolution(n, x, w, result(0))) return {};
    const TensorMeta* bias = n.arg(2).is_value() && n.arg(2).value() ? &meta(n.arg(2).value()) : nullptr;
    if (bias && !(is_f32(*bias) && is_row(*bias, result(0).sizes[1]))) return {};
    return {Kind::Convolution, conv_shape(n, x, w, result(0))};
  }
  if (op == "aten::convolution_backward") {
    const TensorMeta &dy = meta(n.arg(0).value()), &x = meta(n.arg(1).value()), &w = meta(n.arg(2).value());
    if (x.dim() != 4 || !serves_convolution(n, x, w, dy)) return {};
    const auto mask = n.arg(10).list();
    if (mask[2].to_bool() || (mask[0].to_bool() && !is_channels_last(result(0)))) return {};
    if (mask[1].to_bool() && !result(1).is_non_overlapping_and_dense()) return {};
    return {Kind::ConvolutionBackward, conv_shape(n, x, w, dy)};
  }
  if (op == kAttention) {
    auto s = attention_shape(n, meta, 0, 3);
    if (!s || !is_heads(result(0))) return {};
    return {Kind::Attention, {}, s};
  }
  if (op == kAttentionBackward) {
    auto s = attention_shape(n, meta, 1, 6);
    if (!s || !is_heads(meta(n.arg(0).value())) || !is_heads(meta(n.arg(4).value()))) return {};
    for (uint32_t i = 0; i < 3; ++i)
      if (!is_heads(result(i))) return {};
    return {Kind::AttentionBackward, {}, s};
  }
  if (op == "aten::bernoulli.p" && serves_bernoulli(n, result(0))) return {Kind::Bernoulli};
  return {};
}

}  // namespace

bool has_library_kernel(const Node& node) {
  const MetaOf meta = [](Value v) -> const TensorMeta& { return v.meta(); };
  return choose(node, meta, meta).kind != Choice::Kind::None;
}

bool library_may_be_faster(const Node& node) {
  const MetaOf meta = [](Value v) -> const TensorMeta& { return v.meta(); };
  const std::optional<conv::Shape> s = choose(node, meta, meta).conv;
  constexpr int64_t kManyTaps = 25, kManyChannels = 16;
  return s && s->groups == 1 && !graph::is_transposed(node) && s->taps() >= kManyTaps && s->ci >= kManyChannels &&
         s->co >= kManyChannels;
}

int64_t result_rows(const Node& node) {
  const TensorMeta& y = node.results[0];
  if (node.op.name() == "aten::convolution") return graph::is_transposed(node) ? 0 : y.numel() / y.sizes[1];
  if (product_of(node) && y.dim() == 2 && y.is_contiguous()) return y.sizes[0];
  return 0;
}

std::unique_ptr<Step> make_library_step(const Node& n, const AtenStep::SlotOf& slot_of,
                                        const std::vector<Slot>& results, const Plan& plan) {
  using Kind = Choice::Kind;
  const MetaOf meta = [&](Value v) -> const TensorMeta& { return plan.slots[slot_of(v)].meta; };
  const MetaOf result_meta = [&](Value v) -> const TensorMeta& {
    const Slot s = results.at(v.index);
    return s == kNoSlot ? v.meta() : plan.slots[s].meta;
  };
  const Choice c = choose(n, meta, result_meta);
  const auto arg = [&](size_t i) { return slot_of(n.arg(i).value()); };
  const auto optional = [&](size_t i) {
    return n.arg(i).is_value() && n.arg(i).value() ? slot_of(n.arg(i).value()) : kNoSlot;
  };
  switch (c.kind) {
    case Kind::None:
      return nullptr;
    case Kind::Product: {
      const Product p = *product_of(n);
      return std::make_unique<ProductStep>(n, slot_of(p.a), slot_of(p.b), p.bias ? slot_of(p.bias) : kNoSlot,
                                           results.at(0), plan);
    }
    case Kind::HalfRows: {
      const Product p = *product_of(n);
      return std::make_unique<HalfRowsStep>(slot_of(p.a), slot_of(p.b), p.bias ? slot_of(p.bias) : kNoSlot,
                                            results.at(0), plan);
    }
    case Kind::Convolution:
      if (graph::is_transposed(n))
        return std::make_unique<TransposedConvolutionStep>(*c.conv, arg(0), arg(1), optional(2), results.at(0), plan);
      return std::make_unique<ConvolutionStep>(*c.conv, arg(0), arg(1), optional(2), results.at(0), plan);
    case Kind::ConvolutionBackward: {
      const auto mask = n.arg(10).list();
      std::vector<Slot> wanted = results;
      wanted.resize(3, kNoSlot);
      for (size_t i = 0; i < 3; ++i)
        if (!mask[i].to_bool()) wanted[i] = kNoSlot;
      return std::make_unique<ConvolutionBackwardStep>(*c.conv, graph::is_transposed(n), arg(0), arg(1), arg(2), wanted,
                                                       plan);
    }
    case Kind::Attention:
      if (results.at(0) == kNoSlot) return nullptr;
      return std::make_unique<AttentionStep>(*c.attention, std::vector{arg(0), arg(1), arg(2), optional(5)},
                                             std::vector{results[0], results.at(1)}, plan);
    case Kind::AttentionBackward:
      for (size_t i = 0; i < 3; ++i)
        if (results.at(i) == kNoSlot) return nullptr;
      return std::make_unique<AttentionBackwardStep>(
          *c.attention, std::vector{arg(0), arg(1), arg(2), arg(3), arg(4), arg(5), optional(8)},
          std::vector{results[0], results[1], results[2]}, plan);
    case Kind::Bernoulli:
      return std::make_unique<BernoulliStep>(n, results.at(0), plan);
  }
  return nullptr;
}

}  // namespace kiln::runtime
