#include "codegen/triton/emit.h"
#include "loops_harness.h"

namespace kiln::testing {
namespace {

using loops::StoreMode;

/// The text of a program's only kernel.
codegen::TritonKernel emitted(const Program& p) {
  const schedule::Plan plan = schedule::make_plan(p, {});
  EXPECT_EQ(plan.kernels.size(), 1u);
  return codegen::emit_triton(plan.kernels.at(0), plan.buffers, "kernel");
}

bool has(const codegen::TritonKernel& k, const std::string& text) { return k.text.find(text) != std::string::npos; }

}  // namespace

TEST(Triton, ReadsAsOneWouldWriteIt) {
  Program p;
  const BufferId x = p.add_buffer("x", DType::Float32, 12, BufferKind::Input);
  const BufferId y = p.add_buffer("y", DType::Float32, 12, BufferKind::Output);
  p.add_nest(loops::pointwise(p.buffers, "turn", {3, 4},
                              [&](loops::Ops& o, loops::Index i) {
                                const Val v = o.load(x, i[0] + i[1] * Expr(3));
                                return o.Mul(v, o.constant_float(DType::Float32, 0.5));
                              },
                              {y}));
  const codegen::TritonKernel k = emitted(p);
  EXPECT_EQ(k.text, R"(@triton.jit
def kernel(x_, y_, XBLOCK: tl.constexpr):
    # turn: 12 points
    # x_ f32[12], y_ f32[12] (written)
    xindex = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)
    xmask = xindex < 12
    v0 = tl.load(x_ + ((xindex // 4) + 3 * (xindex % 4)), mask=xmask)
    v1 = v0 * 0.5
    tl.store(y_ + xindex, v1, mask=xmask)
)");
  EXPECT_EQ(k.xblock, 16);
  EXPECT_EQ(k.rblock, 0);
}

TEST(Triton, LongReductionsRunInBlocks) {
  Program p;
  const int64_t n = 3000;
  const BufferId x = p.add_buffer("x", DType::Float32, 2 * n, BufferKind::Input);
  const BufferId y = p.add_buffer("y", DType::Float32, 2, BufferKind::Output);
  p.add_nest(loops::reduction(p.buffers, "largest", {2}, {n}, ReduceKind::Max,
                              [&](loops::Ops& o, loops::Index i) { return o.load(x, i[0] * Expr(n) + i[1]); }, {y}));
  const codegen::TritonKernel k = emitted(p);
  EXPECT_EQ(k.text, R"(@triton.jit
def kernel(x_, y_, XBLOCK: tl.constexpr, RBLOCK: tl.constexpr):
    # largest: 2 points, inner loops of 3000
    # x_ f32[6000], y_ f32[2] (written)
    xindex = (tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK))[:, None]
    r1 = tl.full((XBLOCK, RBLOCK), float("-inf"), tl.float32)
    for start in range(0, 3000, RBLOCK):
        rindex = start + tl.arange(0, RBLOCK)[None, :]
        rmask = rindex < 3000
        v0 = tl.load(x_ + (3000 * xindex + rindex), mask=rmask)
        r1_next = maximum(r1, v0)
        r1 = tl.where(rmask, r1_next, r1)
    v1 = tl.reduce(r1, 1, maximum, keep_dims=True)
    tl.store(y_ + xindex, v1)
)");
  EXPECT_EQ(k.xblock, 1);
  EXPECT_EQ(k.rblock, 1024);
}

TEST(Triton, IndicesFromDataAreChecked) {
  Program p;
  const BufferId x = p.add_buffer("x", DType::Float32, 7, BufferKind::Output);
  const BufferId at = p.add_buffer("at", DType::Int64, 60, BufferKind::Input);
  NestBuilder n(p.buffers, "scatter", {});
  const std::vector<Expr> in = n.stage({60});
  const Expr to = n.indirect(n.load(at, in[0]), 7, true, "index out of range");
  n.store(x, to, n.constant_float(DType::Float32, 1), StoreMode::Add);
  p.add_nest(n.finish());
  const codegen::TritonKernel k = emitted(p);
  EXPECT_TRUE(has(k, "t0 = bound(v0, 7, True, rmask, error_, 1).to(tl.int32)")) << k.text;
  EXPECT_TRUE(has(k, "tl.atomic_add(tl.broadcast_to(x_ + t0, (XBLOCK, RBLOCK)), 1.0, mask=rmask")) << k.text;
  EXPECT_EQ(k.errors, std::vector<std::string>{"index out of range"});
}

TEST(Triton, LargeIndicesHave64Bits) {
  for (const int64_t n : {int64_t{1} << 20, int64_t{1} << 32}) {
    Program p;
    const BufferId x = p.add_buffer("x", DType::Float32, n, BufferKind::Input);
    const BufferId y = p.add_buffer("y", DType::Float32, n, BufferKind::Output);
    p.add_nest(
        loops::pointwise(p.buffers, "copy", {n}, [&](loops::Ops& o, loops::Index i) { return o.load(x, i[0]); }, {y}));
    EXPECT_EQ(has(emitted(p), "tl.program_id(0).to(tl.int64)"), n > INT32_MAX);
  }
}

TEST(Triton, RefusesWhatTritonHasNot) {
  Program p;
  const BufferId x = p.add_buffer("x", DType::Float64, 4, BufferKind::Input);
  const BufferId y = p.add_buffer("y", DType::Float64, 4, BufferKind::Output);
  p.add_nest(loops::pointwise(
      p.buffers, "power", {4},
      [&](loops::Ops& o, loops::Index i) { return o.PowScalar(o.load(x, i[0]), o.load(x, i[0])); }, {y}));
  EXPECT_THROW(emitted(p), Unsupported);
  Program sums;
  const BufferId at = sums.add_buffer("at", DType::Int64, 4, BufferKind::Input);
  const BufferId out = sums.add_buffer("out", DType::Int8, 4, BufferKind::Output);
  NestBuilder n(sums.buffers, "scatter", {});
  const std::vector<Expr> in = n.stage({4});
  n.store(out, n.indirect(n.load(at, in[0]), 4, false, "index"), n.constant_int(DType::Int8, 1), StoreMode::Add);
  sums.add_nest(n.finish());
  EXPECT_THROW(emitted(sums), Unsupported);
}

// There is no Python here to run them.
TEST(Triton, NeedsALoader) {
  std::vector<std::string> reasons;
  EXPECT_THROW(codegen::compile_triton({}, {}, reasons), Unsupported);
}

}  // namespace kiln::testing
