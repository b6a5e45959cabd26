#include "loops_harness.h"

namespace kiln::testing {
namespace {

using loops::ReduceKind;
using loops::StoreMode;

/// Each nest a kernel of its own.
schedule::Options one_each() {
  schedule::Options o;
  o.fusion = false;
  return o;
}

}  // namespace

TEST(Cpp, ScalarOpsEqualInterpreter) {
  Program p;
  struct Case {
    Opcode op;
    std::array<BufferId, 4> b;
  };
  std::vector<Case> cases;
  for (int k = 0; k < static_cast<int>(Opcode::ConstInt); ++k)
    for (DType t : kAll) {
      const auto op = static_cast<Opcode>(k);
      if (!applies(op, t)) continue;
      const auto n = static_cast<int64_t>(nasty(t).size() * nasty(t).size());
      const std::string name = std::string(loops::opcode_name(op)) + "_" + std::string(dtype_name(t));
      const DType r = loops::opcode_class(op) == 'c' ? DType::Bool : t;
      cases.push_back(
          {op,
           {p.add_buffer("a" + name, t, n, BufferKind::Input), p.add_buffer("b" + name, t, n, BufferKind::Input),
            p.add_buffer("c" + name, t, n, BufferKind::Input), p.add_buffer("out" + name, r, n, BufferKind::Output)}});
    }
  for (const Case& c : cases)
    p.add_nest(loops::pointwise(p.buffers, std::string(loops::opcode_name(c.op)), {p.buffers[c.b[0]].numel},
                                [&](loops::Ops& o, loops::Index i) {
                                  std::vector<Val> args;
                                  for (int k = 0; k < loops::arity(c.op); ++k) args.push_back(o.load(c.b[k], i[0]));
                                  return o.apply(c.op, args);
                                },
                                {c.b[3]}));
  Memory m(p.buffers);
  for (const Case& c : cases) {
    const DType t = p.buffers[c.b[0]].dtype;
    const auto v = nasty(t);
    for (size_t i = 0; i < v.size(); ++i)
      for (size_t j = 0; j < v.size(); ++j) {
        const auto at = static_cast<int64_t>(i * v.size() + j);
        write_element(m.pointers[c.b[0]], t, at, v[i]);
        write_element(m.pointers[c.b[1]], t, at, is_integral(t) && loops::divides(c.op) && v[j] == 0 ? 1 : v[j]);
        write_element(m.pointers[c.b[2]], t, at, v[(i + j) % v.size()]);
      }
  }
  check_cpp(p, m, 2e-7, one_each());
}

TEST(Cpp, CastsEqualInterpreter) {
  Program p;
  std::vector<std::pair<BufferId, BufferId>> pairs;
  for (DType from : kAll)
    for (DType to : kAll) {
      const std::string name = std::string(dtype_name(from)) + "_" + std::string(dtype_name(to));
      const auto n = static_cast<int64_t>(nasty(from).size());
      const BufferId a = p.add_buffer("in_" + name, from, n, BufferKind::Input);
      pairs.push_back({a, p.add_buffer("out_" + name, to, n, BufferKind::Output)});
    }
  for (const auto& pair : pairs)
    p.add_nest(loops::pointwise(
        p.buffers, "cast", {p.buffers[pair.first].numel},
        [&](loops::Ops& o, loops::Index i) { return o.cast(o.load(pair.first, i[0]), p.buffers[pair.second].dtype); },
        {pair.second}));
  Memory m(p.buffers);
  for (const auto& pair : pairs) {
    const DType t = p.buffers[pair.first].dtype;
    const auto v = nasty(t);
    for (size_t i = 0; i < v.size(); ++i) write_element(m.pointers[pair.first], t, static_cast<int64_t>(i), v[i]);
  }
  check_cpp(p, m, 0, one_each());
}

// Rows and columns, every kind, floats with NaN, integers and bool.
TEST(Cpp, ReductionsEqualInterpreter) {
  std::mt19937 rng(3);
  Program p;
  const int64_t rows = 5, columns = 37;
  const auto both = [&](ReduceKind kind, DType t, BufferId x) {
    for (const bool by_row : {true, false}) {
      const int64_t outer = by_row ? rows : columns, inner = by_row ? columns : rows;
      NestBuilder n(p.buffers, "reduce", {outer});
      const std::vector<Expr> in = n.stage({inner});
      const Expr at = by_row ? n.outer()[0] * Expr(columns) + in[0] : in[0] * Expr(columns) + n.outer()[0];
      std::vector<Val> args{n.load(x, at)};
      if (kind == ReduceKind::ArgMax || kind == ReduceKind::ArgMin) args.push_back(n.index_value(in[0]));
      if (kind == ReduceKind::OnlineSoftmaxCombine) args.push_back(n.constant_float(t, 2));
      if (kind == ReduceKind::WelfordCombine) {
        args.push_back(n.constant_float(t, 1.5));
        args.push_back(n.constant_float(t, 4));
      }
      const std::vector<Val> results = n.reduce(kind, args);
      n.stage({});
      for (const Val& r : results) {
        const BufferId out = p.add_buffer("out" + std::to_string(p.buffers.size()), r.dtype, outer, BufferKind::Output);
        n.store(out, n.outer()[0], r);
      }
      p.add_nest(n.finish());
    }
  };
  std::vector<BufferId> inputs;
  const auto input = [&](DType t) {
    inputs.push_back(p.add_buffer("in" + std::to_string(p.buffers.size()), t, rows * columns, BufferKind::Input));
    return inputs.back();
  };
  for (DType t : {DType::Float32, DType::Float64}) {
    const BufferId x = input(t);
    for (int k = 0; k <= static_cast<int>(ReduceKind::OnlineSoftmaxCombine); ++k) {
      const auto kind = static_cast<ReduceKind>(k);
      if (kind != ReduceKind::Any && kind != ReduceKind::All) both(kind, t, x);
    }
  }
  for (DType t : {DType::Int32, DType::Int64, DType::UInt8}) {
    const BufferId x = input(t);
    for (ReduceKind kind :
         {ReduceKind::Sum, ReduceKind::Prod, ReduceKind::Max, ReduceKind::Min, ReduceKind::ArgMax, ReduceKind::ArgMin})
      both(kind, t, x);
  }
  const BufferId flags = input(DType::Bool);
  both(ReduceKind::Any, DType::Bool, flags);
  both(ReduceKind::All, DType::Bool, flags);
  Memory m(p.buffers);
  for (BufferId b : inputs) fill(m, p.buffers, b, rng, 3);
  m.data<float>(inputs[0])[columns + 4] = std::nanf("");
  check_cpp(p, m, 3e-5, one_each());
}

TEST(Cpp, ScansScattersAndMasks) {
  std::mt19937 rng(4);
  Program p;
  const BufferId x = p.add_buffer("x", DType::Float32, 60, BufferKind::Input);
  const BufferId at = p.add_buffer("at", DType::Int64, 60, BufferKind::Input);
  const BufferId sums = p.add_buffer("sums", DType::Float32, 60, BufferKind::Output);
  const BufferId table = p.add_buffer("table", DType::Float32, 7, BufferKind::Output);
  const BufferId shifted = p.add_buffer("shifted", DType::BFloat16, 60, BufferKind::Output);
  {
    NestBuilder n(p.buffers, "scan", {5});
    const std::vector<Expr> in = n.stage({12});
    const Expr e = n.outer()[0] * Expr(12) + in[0];
    n.store(sums, e, n.scan(ReduceKind::Sum, {n.load(x, e)})[0]);
    p.add_nest(n.finish());
  }
  {
    NestBuilder n(p.buffers, "scatter", {});
    const std::vector<Expr> in = n.stage({60});
    const Expr to = n.indirect(n.load(at, in[0]), 7, true, "index out of range");
    n.store(table, to, n.load(x, in[0]), StoreMode::Add);
    p.add_nest(n.finish());
  }
  p.add_nest(loops::pointwise(p.buffers, "shift", {60},
                              [&](loops::Ops& o, loops::Index i) {
                                const Val inside = o.in_range(i[0] - Expr(2), 0, 60);
                                const Val v =
                                    o.masked_load(x, i[0] - Expr(2), inside, o.constant_float(DType::Float32, -1));
                                return o.cast(v, DType::BFloat16);
                              },
                              {shifted}));
  Memory m(p.buffers);
  fill(m, p.buffers, x, rng);
  for (int i = 0; i < 60; ++i) m.data<int64_t>(at)[i] = i % 14 - 7;
  check_cpp(p, m, 1e-6, one_each());

  m.data<int64_t>(at)[30] = 7;
  const schedule::Plan plan = schedule::make_plan(p, one_each());
  const auto kernels = codegen::compile_cpp(plan.kernels, plan.buffers);
  EXPECT_THROW(run_plan(plan, kernels, m), loops::KernelError);
}

TEST(Cpp, ReadsAsOneWouldWriteIt) {
  Program p;
  const BufferId x = p.add_buffer("x", DType::Float32, 12, BufferKind::Input);
  const BufferId y = p.add_buffer("y", DType::Float32, 12, BufferKind::Output);
  p.add_nest(loops::pointwise(p.buffers, "halve", {3, 4},
                              [&](loops::Ops& o, loops::Index i) {
                                const Val v = o.load(x, i[0] * Expr(4) + i[1]);
                                return o.Mul(v, o.constant_float(DType::Float32, 0.5));
                              },
                              {y}));
  const schedule::Plan plan = schedule::make_plan(p, {});
  EXPECT_EQ(codegen::emit_cpp(plan.kernels.at(0), plan.buffers, "halve").text, R"(// halve
extern "C" int32_t halve(void* const* buffers, const int64_t*, int64_t begin, int64_t end, void*) {
  auto* x_ = static_cast<const float*>(buffers[0]);
  auto* y_ = static_cast<float*>(buffers[1]);
  int32_t failed = 0;
#pragma omp parallel for reduction(max : failed)
  for (int64_t unit = begin; unit < end; ++unit) {
#pragma omp simd
    for (int64_t i0 = 0; i0 < 12; ++i0) {
      const float v0 = x_[i0];
      const float v1 = v0 * 0.5f;
      y_[i0] = v1;
    }
  }
  return failed;
}
)");
}

TEST(Cpp, LongLoopsAreCutForThreads) {
  Program p;
  const int64_t n = 20000;
  const BufferId x = p.add_buffer("x", DType::Float32, 3 * n, BufferKind::Input);
  const BufferId y = p.add_buffer("y", DType::Float32, 3 * n, BufferKind::Output);
  p.add_nest(loops::pointwise(p.buffers, "turn", {3, n},
                              [&](loops::Ops& o, loops::Index i) { return o.load(x, i[0] + i[1] * Expr(3)); }, {y}));
  Memory m(p.buffers);
  std::mt19937 rng(5);
  fill(m, p.buffers, x, rng);
  check_cpp(p, m);
  const schedule::Plan plan = schedule::make_plan(p, {});
  EXPECT_GE(codegen::emit_cpp(plan.kernels.at(0), plan.buffers, "turn").units, 3);
}

}  // namespace kiln::testing
