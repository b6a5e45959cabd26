#include <chrono>
#include <cstdio>

#include "loops_harness.h"

// Times of compiled kernels, run by hand: kiln_pure_tests --gtest_also_run_disabled_tests
// --gtest_filter='*KernelBench*'
namespace kiln::testing {
namespace {

double best_of(int rounds, const std::function<void()>& f) {
  double best = 1e30;
  for (int k = 0; k < rounds; ++k) {
    const auto start = std::chrono::steady_clock::now();
    f();
    best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  return best;
}

void measure(const char* name, const Program& p, double bytes) {
  std::mt19937 rng(1);
  const schedule::Plan plan = schedule::make_plan(p, {});
  std::vector<codegen::CompiledKernel> kernels;
  const double compile = best_of(3, [&] { kernels = codegen::compile_llvm(plan.kernels, plan.buffers, {}); });
  Memory m(plan.buffers);
  for (size_t b = 0; b < p.buffers.size(); ++b)
    if (p.buffers[b].kind == BufferKind::Input) fill(m, p.buffers, static_cast<BufferId>(b), rng);
  const double t = best_of(30, [&] { run_plan(plan, kernels, m); });
  std::printf("%-24s %zu kernels, compiled in %6.2f ms, run in %8.3f ms, %6.1f GB/s on one thread\n", name,
              plan.kernels.size(), compile * 1e3, t * 1e3, bytes / t * 1e-9);
}

}  // namespace

TEST(KernelBench, DISABLED_All) {
  const int64_t rows = 2048, width = 1024;
  const auto at = [&](loops::Index i) { return i[0] * Expr(width) + i[1]; };
  const auto tensor = [&](Program& p, const char* name, int64_t n, BufferKind kind) {
    return p.add_buffer(name, DType::Float32, n, kind);
  };
  {
    Program p;
    const BufferId x = tensor(p, "x", rows * width, BufferKind::Input),
                   y = tensor(p, "y", rows * width, BufferKind::Output);
    p.add_nest(loops::pointwise(
        p.buffers, "relu", {rows, width},
        [&](loops::Ops& o, loops::Index i) { return o.Maximum(o.load(x, at(i)), o.constant(DType::Float32, 0)); },
        {y}));
    measure("relu", p, 8.0 * rows * width);
  }
  {
    Program p;
    const BufferId x = tensor(p, "x", rows * width, BufferKind::Input),
                   y = tensor(p, "y", rows * width, BufferKind::Output);
    p.add_nest(loops::pointwise(p.buffers, "gelu", {rows, width},
                                [&](loops::Ops& o, loops::Index i) {
                                  const Val v = o.load(x, at(i));
                                  return o.Mul(o.Mul(v, o.constant(DType::Float32, 0.5)),
                                               o.Add(o.constant(DType::Float32, 1),
                                                     o.Erf(o.Mul(v, o.constant(DType::Float32, 0.70710678)))));
                                },
                                {y}));
    measure("gelu", p, 8.0 * rows * width);
  }
  {
    Program p;
    const BufferId x = tensor(p, "x", rows * width, BufferKind::Input),
                   y = tensor(p, "y", rows * width, BufferKind::Output);
    NestBuilder b(p.buffers, "softmax", {rows});
    auto in = b.stage({width});
    const auto r = b.reduce(ReduceKind::OnlineSoftmax, {b.load(x, b.outer()[0] * Expr(width) + in[0])});
    in = b.stage({width});
    const Expr e = b.outer()[0] * Expr(width) + in[0];
    b.store(y, e, b.Div(b.Exp(b.Sub(b.load(x, e), r[0])), r[1]));
    p.add_nest(b.finish());
    measure("softmax", p, 8.0 * rows * width);
  }
  {
    Program p;
    const BufferId x = tensor(p, "x", rows * width, BufferKind::Input),
                   y = tensor(p, "y", rows * width, BufferKind::Output);
    NestBuilder b(p.buffers, "layer_norm", {rows});
    auto in = b.stage({width});
    const auto r = b.reduce(ReduceKind::Welford, {b.load(x, b.outer()[0] * Expr(width) + in[0])});
    b.stage({});
    const Val rstd = b.Rsqrt(b.Add(b.Div(r[1], b.constant(DType::Float32, width)), b.constant(DType::Float32, 1e-5)));
    in = b.stage({width});
    const Expr e = b.outer()[0] * Expr(width) + in[0];
    b.store(y, e, b.Mul(b.Sub(b.load(x, e), r[0]), rstd));
    p.add_nest(b.finish());
    measure("layer_norm", p, 8.0 * rows * width);
  }
  {
    Program p;
    const BufferId x = tensor(p, "x", rows * width, BufferKind::Input), y = tensor(p, "y", width, BufferKind::Output);
    p.add_nest(loops::reduction(p.buffers, "column_sum", {width}, {rows}, ReduceKind::Sum,
                                [&](loops::Ops& o, loops::Index i) { return o.load(x, i[1] * Expr(width) + i[0]); },
                                {y}));
    measure("column sum", p, 4.0 * rows * width);
  }
  {
    Program p;
    const BufferId x = tensor(p, "x", rows * width, BufferKind::Input), y = tensor(p, "y", rows, BufferKind::Output);
    p.add_nest(loops::reduction(p.buffers, "row_sum", {rows}, {width}, ReduceKind::Sum,
                                [&](loops::Ops& o, loops::Index i) { return o.load(x, at(i)); }, {y}));
    measure("row sum", p, 4.0 * rows * width);
  }
  {
    Program p;
    const BufferId x = tensor(p, "x", rows * width, BufferKind::Input),
                   y = tensor(p, "y", rows * width, BufferKind::Output);
    p.add_nest(loops::pointwise(p.buffers, "transpose", {width, rows},
                                [&](loops::Ops& o, loops::Index i) { return o.load(x, i[1] * Expr(width) + i[0]); },
                                {y}));
    measure("transpose", p, 8.0 * rows * width);
  }
}

}  // namespace kiln::testing
