#include <fstream>

#include "loops_harness.h"

namespace kiln::testing {
namespace {

/// Compares with tests/golden/<name>; KILN_UPDATE_GOLDEN=1 writes the file instead.
void expect_golden(const std::string& name, const std::string& text) {
  const std::string path = std::string(KILN_GOLDEN_DIR) + "/" + name;
  if (const char* update = std::getenv("KILN_UPDATE_GOLDEN"); update && *update == '1') {
    std::ofstream(path) << text;
    return;
  }
  std::ifstream in(path);
  ASSERT_TRUE(in) << "no golden file " << path << "; run with KILN_UPDATE_GOLDEN=1";
  const std::string want((std::istreambuf_iterator<char>(in)), {});
  EXPECT_EQ(text, want);
}

/// gelu -> layer_norm -> softmax over rows, every op its own nest.
Program chain(int64_t rows, int64_t width) {
  Program p;
  const auto buffer = [&](const char* name, int64_t n, BufferKind kind) {
    return p.add_buffer(name, DType::Float32, n, kind);
  };
  const BufferId x = buffer("x", rows * width, BufferKind::Input), w = buffer("w", width, BufferKind::Input);
  const BufferId g = buffer("g", rows * width, BufferKind::Temp), mean = buffer("mean", rows, BufferKind::Temp);
  const BufferId rstd = buffer("rstd", rows, BufferKind::Output), n = buffer("n", rows * width, BufferKind::Temp);
  const BufferId m = buffer("m", rows, BufferKind::Temp), s = buffer("s", rows, BufferKind::Temp);
  const BufferId y = buffer("y", rows * width, BufferKind::Output);
  const auto at = [&](loops::Index i) { return i[0] * Expr(width) + i[1]; };
  const auto f = [](loops::Ops& o, double v) { return o.constant(DType::Float32, v); };
  p.add_nest(loops::pointwise(p.buffers, "gelu", {rows, width},
                              [&](loops::Ops& o, loops::Index i) {
                                const Val v = o.load(x, at(i));
                                return o.Mul(o.Mul(v, f(o, 0.5)), o.Add(f(o, 1), o.Erf(o.Mul(v, f(o, 0.70710678118)))));
                              },
                              {g}));
  {
    NestBuilder b(p.buffers, "stats", {rows});
    const auto in = b.stage({width});
    const auto r = b.reduce(ReduceKind::Welford, {b.load(g, b.outer()[0] * Expr(width) + in[0])});
    b.stage({});
    b.store(mean, b.outer()[0], r[0]);
    b.store(rstd, b.outer()[0], b.Rsqrt(b.Add(b.Div(r[1], f(b, static_cast<double>(width))), f(b, 1e-5))));
    p.add_nest(b.finish());
  }
  p.add_nest(loops::pointwise(p.buffers, "normalize", {rows, width},
                              [&](loops::Ops& o, loops::Index i) {
                                return o.Mul(o.Mul(o.Sub(o.load(g, at(i)), o.load(mean, i[0])), o.load(rstd, i[0])),
                                             o.load(w, i[1]));
                              },
                              {n}));
  p.add_nest(loops::reduction(p.buffers, "max", {rows}, {width}, ReduceKind::Max,
                              [&](loops::Ops& o, loops::Index i) { return o.load(n, at(i)); }, {m}));
  p.add_nest(loops::reduction(
      p.buffers, "sum", {rows}, {width}, ReduceKind::Sum,
      [&](loops::Ops& o, loops::Index i) { return o.Exp(o.Sub(o.load(n, at(i)), o.load(m, i[0]))); }, {s}));
  p.add_nest(loops::pointwise(p.buffers, "softmax", {rows, width},
                              [&](loops::Ops& o, loops::Index i) {
                                return o.Div(o.Exp(o.Sub(o.load(n, at(i)), o.load(m, i[0]))), o.load(s, i[0]));
                              },
                              {y}));
  return p;
}

}  // namespace

TEST(Loops, TextRoundTrips) {
  const Program p = chain(6, 20);
  loops::verify(p);
  const std::string text = loops::print(p);
  EXPECT_EQ(loops::print(loops::parse(text)), text);
  expect_golden("loops/chain.txt", text);
}

TEST(Loops, TextOfEveryInstruction) {
  Program p;
  const BufferId x = p.add_buffer("x", DType::Float32, 64, BufferKind::Input);
  const BufferId k = p.add_buffer("k", DType::Int64, 8, BufferKind::Const);
  const BufferId y = p.add_buffer("y", DType::Float32, 64, BufferKind::Output);
  NestBuilder b(p.buffers, "all \"forms\"", {8});
  const auto in = b.stage({8});
  const Expr row = b.indirect(b.load(k, b.outer()[0]), 8, true, "index out of range");
  const Val inside = b.in_range(in[0] - Expr(1), 0, 6);
  const Val v = b.masked_load(x, row * Expr(8) + in[0] - Expr(1), inside, b.constant(DType::Float32, -INFINITY));
  const Val w = b.where(inside, v, b.cast(b.index_value(floordiv(in[0], 3)), DType::Float32));
  const auto r = b.reduce(ReduceKind::Welford, {w});
  b.store_if(inside, y, b.outer()[0] * Expr(8) + in[0], b.bitcast(b.bitcast(w, DType::Int32), DType::Float32));
  b.stage({});
  b.store(y, b.outer()[0], b.Fma(r[0], r[1], b.constant(DType::Float32, 0.1)), loops::StoreMode::Add);
  p.add_nest(b.finish());
  p.add_extern({3, "aten::mm", {x, k}, {y}, true});
  const std::string text = loops::print(p);
  EXPECT_EQ(loops::print(loops::parse(text)), text);
  expect_golden("loops/forms.txt", text);
}

TEST(Loops, ParserSaysWhere) {
  const auto fails = [](const std::string& text, const std::string& part) {
    try {
      loops::parse(text);
      ADD_FAILURE() << text;
    } catch (const UserError& e) {
      EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what();
    }
  };
  fails("program {\n  buffer x f31 4 input\n}", "line 2");
  fails("program {\n  nest \"a\" extents [4] outer [i1] {\n  }\n}", "unknown variable");
  fails("program {", "expected");
}

TEST(Loops, VerifierRefusesMalformedNests) {
  const Program good = chain(4, 8);
  const auto bad = [&](const std::function<void(Program&)>& harm) {
    Program p = good;
    harm(p);
    EXPECT_THROW(loops::verify(p), InternalError);
  };
  bad([](Program& p) { p.nests[0].insts[0].index += Expr(1); });        // leaves the buffer
  bad([](Program& p) { p.nests[0].insts[0].dtype = DType::Float64; });  // dtype of an access
  bad([](Program& p) {
    std::swap(p.nests[0].stages[0].body[0], p.nests[0].stages[0].body[2]);
  });  // use before definition
  bad([](Program& p) {
    p.nests[1].stages[1].body.push_back(p.nests[1].stages[0].body[0]);
    p.nests[1].outer.clear();
  });
  bad([](Program& p) { p.buffers[1].name = p.buffers[0].name; });
}

// The whole chain becomes one kernel over rows, and its intermediates scratch rows.
TEST(Schedule, RowChainIsOneKernel) {
  std::mt19937 rng(11);
  for (const auto& [rows, width] : {std::pair<int64_t, int64_t>{7, 50}, {3, 1}, {5, 64}, {40, 17}}) {
    const Program p = chain(rows, width);
    Memory m(p.buffers);
    fill(m, p.buffers, 0, rng);
    fill(m, p.buffers, 1, rng);
    check_program(p, m, 3e-5);
    const schedule::Plan plan = schedule::make_plan(p, {});
    EXPECT_EQ(plan.kernels.size(), 1u) << schedule::print(plan);
    EXPECT_EQ(schedule::plan_memory(plan).arena_bytes, 0) << schedule::print(plan);
    if (width == 50) expect_golden("loops/chain_fused.txt", schedule::print(plan));
  }
}

// Statistics over N, H, W for every channel, then the normalization and a ReLU: one kernel over channels.
TEST(Schedule, BatchNormIsOneKernel) {
  std::mt19937 rng(12);
  const int64_t n = 3, c = 10, hw = 35;
  Program p;
  const BufferId x = p.add_buffer("x", DType::Float32, n * c * hw, BufferKind::Input);
  const BufferId mean = p.add_buffer("mean", DType::Float32, c, BufferKind::Output);
  const BufferId var = p.add_buffer("var", DType::Float32, c, BufferKind::Temp);
  const BufferId y = p.add_buffer("y", DType::Float32, n * c * hw, BufferKind::Output);
  const auto at = [&](const Expr& i, const Expr& j, const Expr& k) { return i * Expr(c * hw) + j * Expr(hw) + k; };
  NestBuilder b(p.buffers, "stats", {c});
  const auto in = b.stage({n, hw});
  const auto r = b.reduce(ReduceKind::Welford, {b.load(x, at(in[0], b.outer()[0], in[1]))});
  b.stage({});
  b.store(mean, b.outer()[0], r[0]);
  b.store(var, b.outer()[0], b.Div(r[1], b.constant(DType::Float32, static_cast<double>(n * hw))));
  p.add_nest(b.finish());
  p.add_nest(loops::pointwise(p.buffers, "normalize", {n, c, hw},
                              [&](loops::Ops& o, loops::Index i) {
                                const Val d = o.Sub(o.load(x, at(i[0], i[1], i[2])), o.load(mean, i[1]));
                                const Val s = o.Rsqrt(o.Add(o.load(var, i[1]), o.constant(DType::Float32, 1e-5)));
                                return o.Maximum(o.Mul(d, s), o.constant(DType::Float32, 0));
                              },
                              {y}));
  Memory m(p.buffers);
  fill(m, p.buffers, x, rng);
  check_program(p, m, 3e-5);
  EXPECT_EQ(schedule::make_plan(p, {}).kernels.size(), 1u);
}

// A nest that reads the flattened view of what another wrote with four dimensions.
TEST(Schedule, ViewsDoNotStopFusion) {
  std::mt19937 rng(13);
  Program p;
  const BufferId x = p.add_buffer("x", DType::Float32, 240, BufferKind::Input);
  const BufferId t = p.add_buffer("t", DType::Float32, 240, BufferKind::Temp);
  const BufferId y = p.add_buffer("y", DType::Float32, 240, BufferKind::Output);
  p.add_nest(loops::pointwise(p.buffers, "double", {4, 5, 12},
                              [&](loops::Ops& o, loops::Index i) {
                                const Val v = o.load(x, i[0] * Expr(60) + i[1] * Expr(12) + i[2]);
                                return o.Add(v, v);
                              },
                              {t}));
  p.add_nest(loops::pointwise(p.buffers, "negate", {20, 12},
                              [&](loops::Ops& o, loops::Index i) { return o.Neg(o.load(t, i[0] * Expr(12) + i[1])); },
                              {y}));
  Memory m(p.buffers);
  fill(m, p.buffers, x, rng);
  check_program(p, m);
  const schedule::Plan plan = schedule::make_plan(p, {});
  ASSERT_EQ(plan.kernels.size(), 1u) << schedule::print(plan);
  EXPECT_EQ(plan.kernels[0].nest.extents, std::vector<int64_t>{240});
  EXPECT_EQ(plan.kernels[0].args.size(), 2u);
}

// What needs other points of its producer must wait for all of it; so must a write over what is still read.
TEST(Schedule, DependenciesAreKept) {
  std::mt19937 rng(14);
  Program p;
  const BufferId x = p.add_buffer("x", DType::Float32, 64, BufferKind::Input);
  const BufferId t = p.add_buffer("t", DType::Float32, 64, BufferKind::Temp);
  const BufferId y = p.add_buffer("y", DType::Float32, 64, BufferKind::Output);
  const BufferId z = p.add_buffer("z", DType::Float32, 64, BufferKind::Output);
  const auto nest = [&](const char* name, BufferId from, bool reversed, BufferId to) {
    p.add_nest(loops::pointwise(p.buffers, name, {64},
                                [&, from, reversed](loops::Ops& o, loops::Index i) {
                                  return o.Add(o.load(from, reversed ? Expr(63) - i[0] : i[0]),
                                               o.constant(DType::Float32, 1));
                                },
                                {to}));
  };
  nest("a", x, false, t);
  nest("b", t, true, y);   // reads t backwards
  nest("c", y, false, x);  // overwrites the input that a has read
  nest("d", x, true, z);
  Memory m(p.buffers);
  fill(m, p.buffers, x, rng);
  check_program(p, m);
}

TEST(Schedule, LongReductionsAreSplit) {
  std::mt19937 rng(15);
  schedule::Options two;
  two.threads = 2;
  for (const bool columns : {false, true})
    for (const ReduceKind kind :
         {ReduceKind::Sum, ReduceKind::ArgMax, ReduceKind::Welford, ReduceKind::OnlineSoftmax}) {
      const int64_t outer = columns ? 24 : 1, inner = 36000;
      Program p;
      const BufferId x = p.add_buffer("x", DType::Float32, outer * inner, BufferKind::Input);
      const DType second = kind == ReduceKind::ArgMax ? DType::Int64 : DType::Float32;
      const BufferId y = p.add_buffer("y", DType::Float32, outer, BufferKind::Output);
      const BufferId z = p.add_buffer("z", second, outer, BufferKind::Output);
      NestBuilder b(p.buffers, "r", {outer});
      const auto in = b.stage({inner});
      std::vector<Val> args{b.load(x, in[0] * Expr(outer) + b.outer()[0])};
      if (kind == ReduceKind::ArgMax) args.push_back(b.index_value(in[0]));
      const auto r = b.reduce(kind, args);
      b.stage({});
      b.store(y, b.outer()[0], r[0]);
      if (r.size() > 1) b.store(z, b.outer()[0], r[1]);
      p.add_nest(b.finish());
      Memory m(p.buffers);
      fill(m, p.buffers, x, rng);
      check_program(p, m, 3e-4, two);
      EXPECT_EQ(schedule::make_plan(p, two).kernels.size(), 2u);
    }
}

// What lies in columns is read in columns, however many values there are beside it that serve a whole row; and rows
// likewise.
TEST(Schedule, ValuesForAWholeRowOrColumnDoNotTurnALoop) {
  for (const bool columns : {false, true}) {
    const Program p = loops::parse(std::string(R"(program {
  buffer x f32 4096 input
  buffer a f32 64 input
  buffer b f32 64 input
  buffer y f32 64 output
  nest "sum" extents [64, 64] outer [i0] {
    stage [i1] {
      %0 = Load f32 x[)") + (columns ? "i0 + 64*i1" : "64*i0 + i1") +
                                   R"(]
      %1 = Load f32 a[)" + (columns ? "i1" : "i0") +
                                   R"(]
      %2 = Sub f32 %0, %1
      %3 = Load f32 b[)" + (columns ? "i1" : "i0") +
                                   R"(]
      %4 = Mul f32 %2, %3
      %5 = Reduce.Sum f32 %4
    }
    stage [] {
      Store f32 y[i0] %5
    }
  }
}
)");
    schedule::Options one;
    one.threads = 1;
    const auto plan = schedule::make_plan(p, one);
    ASSERT_EQ(plan.kernels.size(), 1u);
    EXPECT_EQ(plan.kernels[0].vectorize_outer, columns);
  }
}

// An optimizer's update of parameters of many sizes, a step counter each: two kernels in all.
TEST(Schedule, UpdatesOfManyTensorsAreOneKernel) {
  std::mt19937 rng(17);
  Program p;
  const BufferId rate = p.add_buffer("rate", DType::Float32, 1, BufferKind::Input);
  std::vector<std::array<BufferId, 3>> params;
  const int64_t sizes[] = {1, 5, 16, 33, 4096, 70001, 64, 1000};
  for (size_t k = 0; k < std::size(sizes); ++k) {
    const std::string n = std::to_string(k);
    params.push_back({p.add_buffer("w" + n, DType::Float32, sizes[k], BufferKind::Input),
                      p.add_buffer("g" + n, DType::Float32, sizes[k], BufferKind::Input),
                      p.add_buffer("step" + n, DType::Float32, 1, BufferKind::Input)});
  }
  for (size_t k = 0; k < params.size(); ++k) {
    const auto [w, g, step] = params[k];
    p.add_nest(loops::pointwise(
        p.buffers, "count", {},
        [&](loops::Ops& o, loops::Index) { return o.Add(o.load(step, 0), o.constant(DType::Float32, 1)); }, {step}));
    p.add_nest(loops::pointwise(p.buffers, "update", {sizes[k]},
                                [&](loops::Ops& o, loops::Index i) {
                                  const Val r = o.Div(o.load(rate, 0), o.load(step, 0));
                                  return o.Sub(o.load(w, i[0]), o.Mul(o.load(g, i[0]), r));
                                },
                                {w}));
  }
  Memory m(p.buffers);
  for (size_t b = 0; b < p.buffers.size(); ++b) fill(m, p.buffers, static_cast<BufferId>(b), rng);
  for (const auto& x : params) m.data<float>(x[2])[0] = 3;
  for (int bits : {512, 256, 128}) check_program(p, m, 0, {}, bits);
  // The tensor of one element is a kernel without a loop of its own.
  EXPECT_LE(schedule::make_plan(p, {}).kernels.size(), 3u) << schedule::print(schedule::make_plan(p, {}));
}

// A value of the forward and its copy for the backward read one buffer: what is not to run before the backward stays
// there, with what stands there.
TEST(Schedule, RecomputedValuesAreMadeWhereTheyAreRead) {
  for (const bool late : {false, true}) {
    Program p;
    const auto buffer = [&](const char* name, BufferKind kind) {
      return p.add_buffer(name, DType::Float32, 4096, kind);
    };
    const BufferId x = buffer("x", BufferKind::Input), y = buffer("y", BufferKind::Temp),
                   z = buffer("z", BufferKind::Temp), copy = buffer("copy", BufferKind::Temp),
                   grad = buffer("grad", BufferKind::Temp), out = buffer("out", BufferKind::Output);
    const auto sine = [&](BufferId to, const char* name) {
      return loops::pointwise(p.buffers, name, {4096},
                              [&](loops::Ops& o, loops::Index i) { return o.Sin(o.load(x, i[0])); }, {to});
    };
    p.add_nest(sine(y, "forward"));
    p.add_extern({0, "product", {y}, {z}, false});
    Nest again = sine(copy, "again");
    if (late) again.not_before = 2;
    p.add_nest(std::move(again));
    p.add_nest(loops::pointwise(
        p.buffers, "gradient", {4096},
        [&](loops::Ops& o, loops::Index i) { return o.Mul(o.load(z, i[0]), o.Cos(o.load(x, i[0]))); }, {grad}));
    p.add_extern({1, "product", {copy, grad}, {out}, false});
    loops::verify(p);
    EXPECT_EQ(loops::print(loops::parse(loops::print(p))), loops::print(p));
    const schedule::Plan plan = schedule::make_plan(p, {});
    ASSERT_EQ(plan.steps.size(), 4u) << schedule::print(plan);
    EXPECT_EQ(schedule::liveness(plan)[copy].first, late ? 2 : 0) << schedule::print(plan);
  }
  Program p;
  const BufferId x = p.add_buffer("x", DType::Float32, 8, BufferKind::Input);
  Nest nest =
      loops::pointwise(p.buffers, "early", {8}, [&](loops::Ops& o, loops::Index i) { return o.load(x, i[0]); }, {x});
  nest.not_before = 1;
  p.add_nest(std::move(nest));
  EXPECT_THROW(loops::verify(p), InternalError);
}

// What changes an input early runs behind what may raise an error before that, and apart from it.
TEST(Schedule, WhatComesAfterErrorsIsNotFusedWithThem) {
  for (const bool after : {false, true}) {
    Program p;
    const BufferId i = p.add_buffer("i", DType::Int64, 64, BufferKind::Input),
                   x = p.add_buffer("x", DType::Float32, 64, BufferKind::Input),
                   cache = p.add_buffer("cache", DType::Float32, 64, BufferKind::Input),
                   out = p.add_buffer("out", DType::Float32, 64, BufferKind::Output);
    p.add_nest(loops::pointwise(p.buffers, "gather", {64},
                                [&](loops::Ops& o, loops::Index at) {
                                  return o.load(x, o.indirect(o.load(i, at[0]), 64, false, "out of range"));
                                },
                                {out}));
    Nest write = loops::pointwise(
        p.buffers, "write", {64},
        [&](loops::Ops& o, loops::Index at) { return o.cast(o.load(i, at[0]), DType::Float32); }, {cache});
    write.after_errors = after;
    p.add_nest(std::move(write));
    p.add_extern({0, "check", {i}, {}, false, /*raises=*/true});
    EXPECT_EQ(loops::print(loops::parse(loops::print(p))), loops::print(p));
    const schedule::Plan plan = schedule::make_plan(p, {});
    ASSERT_EQ(plan.kernels.size(), after ? 2u : 1u) << schedule::print(plan);
    if (after) {
      EXPECT_EQ(plan.kernels[plan.steps[0].index].nest.name, "gather") << schedule::print(plan);
    }
  }
}

// A kernel waits for a small one that stands far behind it in the program: the small one runs when the kernel is due,
// so that what the kernel reads is free again.
TEST(Schedule, WhatAFusedKernelWaitsForRunsBeforeIt) {
  Program p;
  const auto buffer = [&](std::string name, int64_t numel, BufferKind kind) {
    return p.add_buffer(std::move(name), DType::Float32, numel, kind);
  };
  constexpr int kLayers = 4;
  const BufferId count = buffer("count", 1, BufferKind::Input), counted = buffer("counted", 1, BufferKind::Output);
  BufferId last = buffer("x", 4096, BufferKind::Input);
  std::vector<BufferId> sums, grads;
  for (int k = 0; k < kLayers; ++k) {
    const BufferId grad = buffer("grad" + std::to_string(k), 4096, BufferKind::Temp),
                   sum = buffer("sum" + std::to_string(k), 64, BufferKind::Temp);
    p.add_extern({k, "product", {last}, {grad}, false});
    p.add_nest(loops::reduction(
        p.buffers, "sum", {64}, {64}, loops::ReduceKind::Sum,
        [&](loops::Ops& o, loops::Index i) { return o.load(grad, i[0] * symbolic::Expr(64) + i[1]); }, {sum}));
    grads.push_back(last = grad);
    sums.push_back(sum);
  }
  p.add_nest(loops::pointwise(p.buffers, "count", {},
                              [&](loops::Ops& o, loops::Index) { return o.Sin(o.load(count, symbolic::Expr(0))); },
                              {counted}));
  for (BufferId sum : sums) {
    const BufferId to = buffer("new_" + p.buffers[sum].name, 64, BufferKind::Output);
    p.add_nest(loops::pointwise(
        p.buffers, "update", {64},
        [&](loops::Ops& o, loops::Index i) { return o.Mul(o.load(sum, i[0]), o.load(counted, symbolic::Expr(0))); },
        {to}));
  }
  loops::verify(p);
  const schedule::Plan plan = schedule::make_plan(p, {});
  const auto live = schedule::liveness(plan);
  for (int k = 0; k + 2 < kLayers; ++k) EXPECT_LT(live[grads[k]].second, live[grads[k + 2]].first) << print(plan);
}

TEST(Schedule, ArenaBlocksDoNotOverlapWhileAlive) {
  std::mt19937 rng(16);
  Program p;
  std::vector<BufferId> temps;
  const BufferId x = p.add_buffer("x", DType::Float32, 4096, BufferKind::Input);
  BufferId last = x;
  for (int k = 0; k < 12; ++k) {
    const BufferId t = p.add_buffer("t" + std::to_string(k), DType::Float32, 100 + static_cast<int64_t>(rng() % 3000),
                                    BufferKind::Temp);
    p.add_extern({k, "call", {last}, {t}, false});
    temps.push_back(last = t);
  }
  p.add_extern({12, "call", {temps[3], last}, {x}, false});
  const schedule::Plan plan = schedule::make_plan(p, {});
  const auto memory = schedule::plan_memory(plan);
  const auto live = schedule::liveness(plan);
  int64_t total = 0;
  for (BufferId a : temps) {
    total += p.buffers[a].numel * 4;
    ASSERT_GE(memory.offsets[a], 0);
    EXPECT_EQ(memory.offsets[a] % 64, 0);
    for (BufferId b : temps)
      if (a < b && live[a].first <= live[b].second && live[b].first <= live[a].second)
        EXPECT_TRUE(memory.offsets[a] + p.buffers[a].numel * 4 <= memory.offsets[b] ||
                    memory.offsets[b] + p.buffers[b].numel * 4 <= memory.offsets[a]);
  }
  EXPECT_LT(memory.arena_bytes, total / 2);
}

}  // namespace kiln::testing
