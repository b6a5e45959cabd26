#include <limits>
#include <map>
#include <set>

#include "codegen/common/offsets.h"
#include "codegen/common/shape.h"
#include "codegen/common/text.h"
#include "loops_harness.h"

namespace kiln::testing {
// Every opcode on every dtype over all pairs of nasty operands, at every vector width.
TEST(Llvm, ScalarOpsEqualInterpreter) {
  for (int op = 0; op < static_cast<int>(Opcode::ConstInt); ++op) {
    Program p;
    std::vector<Nest> nests;
    std::vector<std::array<BufferId, 4>> ids;
    for (DType t : kAll) {
      if (!applies(static_cast<Opcode>(op), t)) continue;
      const int64_t n = static_cast<int64_t>(nasty(t).size() * nasty(t).size());
      const std::string name(dtype_name(t));
      const DType r = loops::opcode_class(static_cast<Opcode>(op)) == 'c' ? DType::Bool : t;
      std::array<BufferId, 4> b = {
          p.add_buffer("a" + name, t, n, BufferKind::Input), p.add_buffer("b" + name, t, n, BufferKind::Input),
          p.add_buffer("c" + name, t, n, BufferKind::Input), p.add_buffer("out" + name, r, n, BufferKind::Output)};
      ids.push_back(b);
    }
    for (const auto& b : ids)
      p.add_nest(loops::pointwise(p.buffers, std::string(loops::opcode_name(static_cast<Opcode>(op))),
                                  {p.buffers[b[0]].numel},
                                  [&](loops::Ops& o, loops::Index i) {
                                    std::vector<Val> args;
                                    for (int k = 0; k < loops::arity(static_cast<Opcode>(op)); ++k)
                                      args.push_back(o.load(b[k], i[0]));
                                    return o.apply(static_cast<Opcode>(op), args);
                                  },
                                  {b[3], nullptr, loops::StoreMode::Assign}));
    Memory m(p.buffers);
    for (const auto& b : ids) {
      const DType t = p.buffers[b[0]].dtype;
      const auto v = nasty(t);
      for (size_t i = 0; i < v.size(); ++i)
        for (size_t j = 0; j < v.size(); ++j) {
          const int64_t at = static_cast<int64_t>(i * v.size() + j);
          write_element(m.pointers[b[0]], t, at, v[i]);
          const bool zero = is_integral(t) && loops::divides(static_cast<Opcode>(op)) && v[j] == 0;
          write_element(m.pointers[b[1]], t, at, zero ? 1 : v[j]);
          write_element(m.pointers[b[2]], t, at, v[(i + j) % v.size()]);
        }
    }
    const Opcode o = static_cast<Opcode>(op);
    const bool rounded =
        o == Opcode::Exp || o == Opcode::Sigmoid || o == Opcode::Tanh || o == Opcode::Erf || o == Opcode::Log;
    for (int bits : {512, 256}) check_program(p, m, rounded ? 3e-7 : 0, {}, bits);
    if (HasFailure()) return;
  }
}

// The functions that kernels compute themselves, against double precision.
TEST(Llvm, InlineMathIsAccurate) {
  struct Case {
    Opcode op;
    double (*exact)(double);
    double lo, hi, ulps, absolute;
  };
  const Case cases[] = {{Opcode::Exp, std::exp, -86, 88.5, 1.5, 0},   {Opcode::Exp, std::exp, -104, -86, 0, 3e-45},
                        {Opcode::Tanh, std::tanh, -12, 12, 3, 0},     {Opcode::Erf, std::erf, -5, 5, 0, 5e-7},
                        {Opcode::Log, std::log, 0.25, 4, 1.5, 0},     {Opcode::Log, std::log, 4, 3e38, 1.5, 0},
                        {Opcode::Log, std::log, 1e-44, 1e-37, 1.5, 0}};
  const int64_t n = 40000;
  for (const Case& c : cases) {
    Program p;
    const BufferId x = p.add_buffer("x", DType::Float32, n, BufferKind::Input);
    const BufferId y = p.add_buffer("y", DType::Float32, n, BufferKind::Output);
    p.add_nest(loops::pointwise(p.buffers, "f", {n},
                                [&](loops::Ops& o, loops::Index i) {
                                  const Val args[] = {o.load(x, i[0])};
                                  return o.apply(c.op, args);
                                },
                                {y}));
    Memory m(p.buffers);
    for (int64_t i = 0; i < n; ++i)
      m.data<float>(x)[i] =
          static_cast<float>(c.lo + (c.hi - c.lo) * static_cast<double>(i) / static_cast<double>(n - 1));
    const schedule::Plan plan = schedule::make_plan(p, {});
    run_plan(plan, codegen::compile_llvm(plan.kernels, plan.buffers, {}), m);
    double worst = 0;
    for (int64_t i = 0; i < n; ++i) {
      const float in = m.data<float>(x)[i], got = m.data<float>(y)[i];
      const double want = c.exact(in);
      const double ulp = std::ldexp(1.0, std::max(std::ilogb(static_cast<float>(want)), -126) - 23);
      worst = std::max(worst, (std::fabs(got - want) - c.absolute) / ulp);
    }
    EXPECT_LE(worst, c.ulps) << loops::opcode_name(c.op) << " on " << c.lo << ".." << c.hi;
  }
}

TEST(Llvm, CastsEqualInterpreter) {
  Program p;
  std::vector<std::pair<BufferId, BufferId>> pairs;
  for (DType from : kAll)
    for (DType to : kAll) {
      const std::string name = std::string(dtype_name(from)) + "_" + std::string(dtype_name(to));
      const int64_t n = static_cast<int64_t>(nasty(from).size());
      const BufferId a = p.add_buffer("in_" + name, from, n, BufferKind::Input);
      const BufferId b = p.add_buffer("out_" + name, to, n, BufferKind::Output);
      pairs.push_back({a, b});
    }
  for (const auto& [a, b] : pairs) {
    const BufferId from = a, to = b;
    p.add_nest(loops::pointwise(
        p.buffers, "cast", {p.buffers[from].numel},
        [&, from, to](loops::Ops& o, loops::Index i) { return o.cast(o.load(from, i[0]), p.buffers[to].dtype); },
        {to, nullptr, loops::StoreMode::Assign}));
  }
  Memory m(p.buffers);
  for (const auto& [a, b] : pairs) {
    const auto v = nasty(p.buffers[a].dtype);
    for (size_t i = 0; i < v.size(); ++i) write_element(m.pointers[a], p.buffers[a].dtype, i, v[i]);
  }
  schedule::Options one_each;
  one_each.fusion = false;
  check_program(p, m, 0, one_each);
}

// Remainders of every length, in one and two dimensions, reductions included.
TEST(Llvm, EveryTailLength) {
  std::mt19937 rng(1);
  for (int64_t n = 1; n <= 40; ++n) {
    Program p;
    const BufferId x = p.add_buffer("x", DType::Float32, 3 * n, BufferKind::Input);
    const BufferId row = p.add_buffer("row", DType::Float32, n, BufferKind::Input);
    const BufferId y = p.add_buffer("y", DType::Float32, 3 * n, BufferKind::Output);
    const BufferId s = p.add_buffer("s", DType::Float32, 3, BufferKind::Output);
    const BufferId c = p.add_buffer("c", DType::Float32, n, BufferKind::Output);
    const BufferId k = p.add_buffer("k", DType::Int64, 3, BufferKind::Output);
    const auto load = [&](loops::Ops& o, const Expr& i, const Expr& j) { return o.load(x, i * Expr(n) + j); };
    p.add_nest(loops::pointwise(
        p.buffers, "scale", {3, n},
        [&](loops::Ops& o, loops::Index i) { return o.Mul(load(o, i[0], i[1]), o.load(row, i[1])); }, {y}));
    p.add_nest(loops::reduction(p.buffers, "rows", {3}, {n}, ReduceKind::Sum,
                                [&](loops::Ops& o, loops::Index i) { return load(o, i[0], i[1]); }, {s}));
    p.add_nest(loops::reduction(p.buffers, "columns", {n}, {3}, ReduceKind::Max,
                                [&](loops::Ops& o, loops::Index i) { return load(o, i[1], i[0]); }, {c}));
    p.add_nest(loops::reduction(
        p.buffers, "argmax", {3}, {n}, ReduceKind::ArgMax,
        [&](loops::Ops& o, loops::Index i) { return load(o, i[0], i[1]); }, {k, nullptr, loops::StoreMode::Assign},
        [](loops::Ops&, loops::Index, const std::vector<Val>& r) { return r[1]; }));
    Memory m(p.buffers);
    fill(m, p.buffers, x, rng);
    fill(m, p.buffers, row, rng);
    check_program(p, m, 1e-5, {}, n % 3 ? 512 : n % 2 ? 256 : 128);
    if (HasFailure()) return;
  }
}

TEST(Llvm, EveryReductionEitherWay) {
  std::mt19937 rng(2);
  const std::pair<ReduceKind, DType> cases[] = {
      {ReduceKind::Sum, DType::Float32},     {ReduceKind::Sum, DType::Float64},
      {ReduceKind::Sum, DType::Int64},       {ReduceKind::Prod, DType::Float32},
      {ReduceKind::Prod, DType::Int32},      {ReduceKind::Max, DType::Float32},
      {ReduceKind::Max, DType::Int8},        {ReduceKind::Min, DType::Float64},
      {ReduceKind::Min, DType::UInt8},       {ReduceKind::Any, DType::Bool},
      {ReduceKind::All, DType::Bool},        {ReduceKind::ArgMax, DType::Float32},
      {ReduceKind::ArgMin, DType::Int32},    {ReduceKind::Welford, DType::Float32},
      {ReduceKind::Welford, DType::Float64}, {ReduceKind::OnlineSoftmax, DType::Float32}};
  for (const auto& [kind_, t_] : cases)
    for (const bool columns : {false, true}) {
      const ReduceKind kind = kind_;
      const DType t = t_;
      const int64_t outer = 37, inner = 301;
      Program p;
      const BufferId x = p.add_buffer("x", t, outer * inner, BufferKind::Input);
      const BufferId y = p.add_buffer("y", t, outer, BufferKind::Output);
      const bool two = loops::result_count(kind) == 2;
      const DType t2 = kind == ReduceKind::ArgMax || kind == ReduceKind::ArgMin ? DType::Int64 : t;
      const BufferId z = p.add_buffer("z", t2, outer, BufferKind::Output);
      NestBuilder b(p.buffers, "reduce", {outer});
      const auto in = b.stage({7, inner / 7});
      const Expr q = in[0] * Expr(inner / 7) + in[1];
      const Expr at = columns ? q * Expr(outer) + b.outer()[0] : b.outer()[0] * Expr(inner) + q;
      std::vector<Val> args{b.load(x, at)};
      if (t2 != t) args.push_back(b.index_value(q));
      const auto r = b.reduce(kind, args);
      b.stage({});
      b.store(y, b.outer()[0], r[0]);
      if (two) b.store(z, b.outer()[0], r[1]);
      p.add_nest(b.finish());
      Memory m(p.buffers);
      fill(m, p.buffers, x, rng, 5);
      check_program(p, m, is_floating(t) ? 2e-5 : 0);
      if (is_floating(t)) {  // NaN goes through; equal extremes take the first index
        write_element(m.pointers[x], t, 17 * inner + 3, std::nan(""));
        if (kind != ReduceKind::Prod)  // infinity times an underflowed zero depends on the order
          write_element(m.pointers[x], t, 4 * inner + 3, std::numeric_limits<double>::infinity());
        if (kind != ReduceKind::Welford && kind != ReduceKind::OnlineSoftmax) check_program(p, m, 2e-5);
      }
      if (HasFailure()) return;
    }
}

TEST(Llvm, GatherScatterAndIndexErrors) {
  std::mt19937 rng(3);
  const int64_t rows = 23, width = 19, count = 41;
  Program p;
  const BufferId table = p.add_buffer("table", DType::Float32, rows * width, BufferKind::Input);
  const BufferId ids = p.add_buffer("ids", DType::Int64, count, BufferKind::Input);
  const BufferId out = p.add_buffer("out", DType::Float32, count * width, BufferKind::Output);
  const BufferId grad = p.add_buffer("grad", DType::Float32, rows * width, BufferKind::Output);
  const BufferId histogram = p.add_buffer("histogram", DType::Int64, rows, BufferKind::Output);
  p.add_nest(loops::pointwise(p.buffers, "embedding", {count, width},
                              [&](loops::Ops& o, loops::Index i) {
                                const Expr row = o.indirect(o.load(ids, i[0]), rows, true, "index out of range");
                                return o.load(table, row * Expr(width) + i[1]);
                              },
                              {out}));
  {
    NestBuilder b(p.buffers, "embedding_backward", {width});
    const auto in = b.stage({count});
    const Expr row = b.indirect(b.load(ids, in[0]), rows, true, "index out of range");
    b.store(grad, row * Expr(width) + b.outer()[0], b.load(out, in[0] * Expr(width) + b.outer()[0]),
            loops::StoreMode::Add);
    p.add_nest(b.finish());
  }
  {
    NestBuilder b(p.buffers, "count", {});
    const auto in = b.stage({count});
    const Expr row = b.indirect(b.load(ids, in[0]), rows, true, "index out of range");
    b.store(histogram, row, b.constant_int(DType::Int64, 1), loops::StoreMode::Add);
    p.add_nest(b.finish());
  }
  Memory m(p.buffers);
  fill(m, p.buffers, table, rng);
  for (int64_t i = 0; i < count; ++i) m.data<int64_t>(ids)[i] = static_cast<int64_t>(rng() % (2 * rows)) - rows;
  check_program(p, m, 1e-6);
  m.data<int64_t>(ids)[40] = rows;
  EXPECT_THROW(check_program(p, m), loops::KernelError);
  const schedule::Plan plan = schedule::make_plan(p, {});
  const auto kernels = codegen::compile_llvm(plan.kernels, plan.buffers, {});
  Memory got = m;
  EXPECT_THROW(run_plan(plan, kernels, got), loops::KernelError);
}

TEST(Llvm, IntegerDivisionByZeroStops) {
  Program p;
  const BufferId a = p.add_buffer("a", DType::Int32, 21, BufferKind::Input);
  const BufferId y = p.add_buffer("y", DType::Int32, 21, BufferKind::Output);
  p.add_nest(loops::pointwise(
      p.buffers, "div", {21},
      [&](loops::Ops& o, loops::Index i) { return o.FloorDiv(o.constant_int(DType::Int32, 7), o.load(a, i[0])); },
      {y}));
  Memory m(p.buffers);
  for (int i = 0; i < 21; ++i) m.data<int32_t>(a)[i] = i + 1;
  check_program(p, m);
  m.data<int32_t>(a)[20] = 0;
  const schedule::Plan plan = schedule::make_plan(p, {});
  const auto kernels = codegen::compile_llvm(plan.kernels, plan.buffers, {});
  EXPECT_THROW(run_plan(plan, kernels, m), loops::KernelError);
}

// Concatenation and padding: loads under a predicate whose index is out of range elsewhere.
TEST(Llvm, MaskedLoads) {
  std::mt19937 rng(4);
  for (const DType t : {DType::Float32, DType::BFloat16, DType::Int64, DType::Bool}) {
    const int64_t n = 5, a_width = 13, b_width = 30, width = a_width + b_width;
    Program p;
    const BufferId a = p.add_buffer("a", t, n * a_width, BufferKind::Input);
    const BufferId b = p.add_buffer("b", t, n * b_width, BufferKind::Input);
    const BufferId y = p.add_buffer("y", t, n * width, BufferKind::Output);
    const BufferId padded = p.add_buffer("padded", t, (n + 2) * (a_width + 2), BufferKind::Output);
    p.add_nest(loops::pointwise(p.buffers, "cat", {n, width},
                                [&](loops::Ops& o, loops::Index i) {
                                  const Val zero = o.constant(t, 0);
                                  const Val right = o.masked_load(b, i[0] * Expr(b_width) + i[1] - Expr(a_width),
                                                                  o.in_range(i[1], a_width, width), zero);
                                  return o.masked_load(a, i[0] * Expr(a_width) + i[1], o.in_range(i[1], 0, a_width),
                                                       right);
                                },
                                {y}));
    p.add_nest(loops::pointwise(
        p.buffers, "pad", {n + 2, a_width + 2},
        [&](loops::Ops& o, loops::Index i) {
          const Val inside = o.And(o.in_range(i[0], 1, n + 1), o.in_range(i[1], 1, a_width + 1));
          return o.masked_load(a, (i[0] - Expr(1)) * Expr(a_width) + i[1] - Expr(1), inside, o.constant(t, 1));
        },
        {padded}));
    Memory m(p.buffers);
    fill(m, p.buffers, a, rng);
    fill(m, p.buffers, b, rng);
    check_program(p, m);
  }
}

TEST(Llvm, StridedTransposedAndDividedIndices) {
  std::mt19937 rng(5);
  const int64_t n = 18, w = 35;
  for (const DType t : {DType::Float32, DType::Int64, DType::Float16, DType::Bool}) {
    Program p;
    const BufferId x = p.add_buffer("x", t, n * w * 2, BufferKind::Input);
    const BufferId a = p.add_buffer("a", t, n * w, BufferKind::Output);
    const BufferId b = p.add_buffer("b", t, n * w, BufferKind::Output);
    const BufferId c = p.add_buffer("c", t, n * w, BufferKind::Output);
    p.add_nest(loops::pointwise(
        p.buffers, "every second", {n, w},
        [&](loops::Ops& o, loops::Index i) { return o.load(x, i[0] * Expr(2 * w) + i[1] * Expr(2)); }, {a}));
    p.add_nest(loops::pointwise(p.buffers, "transpose", {w, n},
                                [&](loops::Ops& o, loops::Index i) { return o.load(x, i[1] * Expr(w) + i[0]); }, {b}));
    p.add_nest(loops::pointwise(
        p.buffers, "repeat", {n * w},
        [&](loops::Ops& o, loops::Index i) { return o.load(x, floordiv(i[0], 3) + mod(i[0], 5)); }, {c}));
    Memory m(p.buffers);
    fill(m, p.buffers, x, rng);
    check_program(p, m);
  }
}

// Steps of up to five, forwards and backwards, and stores that fill each other's gaps.
TEST(Llvm, SmallSteps) {
  std::mt19937 rng(9);
  for (const DType t : {DType::Float32, DType::Int64, DType::BFloat16, DType::Bool})
    for (const int64_t step : {1, 2, 3, 4, 5})
      for (const int64_t w : {3, 16, 37, 100})
        for (const int bits : {512, 256}) {
          const int64_t n = 3;
          Program p;
          const BufferId x = p.add_buffer("x", t, n * w * step, BufferKind::Input);
          const BufferId forth = p.add_buffer("forth", t, n * w, BufferKind::Output);
          const BufferId back = p.add_buffer("back", t, n * w, BufferKind::Output);
          const BufferId woven = p.add_buffer("woven", t, n * w * step, BufferKind::Output);
          p.add_nest(loops::pointwise(
              p.buffers, "forth", {n, w},
              [&](loops::Ops& o, loops::Index i) { return o.load(x, (i[0] * Expr(w) + i[1]) * Expr(step)); }, {forth}));
          p.add_nest(loops::pointwise(p.buffers, "back", {n, w},
                                      [&](loops::Ops& o, loops::Index i) {
                                        return o.load(x,
                                                      i[0] * Expr(w * step) + Expr((w - 1) * step) - i[1] * Expr(step));
                                      },
                                      {back}));
          NestBuilder b(p.buffers, "woven", {n, w});
          b.stage({});
          for (int64_t k = step; k-- > 0;) {  // the last first
            const Expr from = b.outer()[0] * Expr(w) + b.outer()[1] + Expr(k * n * w);
            b.store(woven, (b.outer()[0] * Expr(w) + b.outer()[1]) * Expr(step) + Expr(k), b.load(x, from));
          }
          p.add_nest(b.finish());
          Memory m(p.buffers);
          fill(m, p.buffers, x, rng);
          check_program(p, m, 0, {}, bits);
          if (HasFailure()) return;
        }
}

// Elements that lanes share, and indices that start again: divisors of a vector's width, multiples of it, and others;
// also behind a condition, and where the index has further terms.
TEST(Llvm, RepeatedElements) {
  std::mt19937 rng(11);
  for (const DType t : {DType::Float32, DType::Int64, DType::Bool})
    for (const int64_t by : {2, 3, 4, 8, 10, 16, 32, 64})
      for (const int64_t count : {1, 5})
        for (const int64_t step : {1, 3})
          for (const int bits : {512, 256}) {
            const int64_t n = 3, w = by * count;
            Program p;
            const BufferId x = p.add_buffer("x", t, n * w * step + by, BufferKind::Input);
            const auto nest = [&](const char* name, const std::function<Expr(loops::Index)>& index, bool condition) {
              const BufferId out = p.add_buffer(name, t, n * w, BufferKind::Output);
              p.add_nest(loops::pointwise(p.buffers, name, {n, w},
                                          [&](loops::Ops& o, loops::Index i) {
                                            if (!condition) return o.load(x, index(i));
                                            const loops::Val mask = o.in_range(i[1] + i[0] * Expr(5), 2, w);
                                            return o.masked_load(x, index(i), mask, o.constant(t, 1));
                                          },
                                          {out}));
            };
            const auto divided = [&](loops::Index i) { return i[0] * Expr(count) + floordiv(i[1], by) * Expr(step); };
            const auto again = [&](loops::Index i) { return i[0] * Expr(by) + mod(i[1], by) * Expr(step); };
            const auto turned = [&](loops::Index i) { return floordiv(i[1], by) + mod(i[1], by) * Expr(count); };
            const auto moved = [&](loops::Index i) { return floordiv(i[1] + i[0] * Expr(by), 2 * by) + i[0]; };
            for (const bool condition : {false, true}) {
              const std::string end = condition ? "_masked" : "";
              nest(("divided" + end).c_str(), divided, condition);
              nest(("again" + end).c_str(), again, condition);
              nest(("turned" + end).c_str(), turned, condition);
              nest(("moved" + end).c_str(), moved, condition);
            }
            Memory m(p.buffers);
            fill(m, p.buffers, x, rng);
            check_program(p, m, 0, {}, bits);
            if (HasFailure()) return;
          }
}

// Rows shorter than a vector, many to a unit; a last dim of every small size.
TEST(Llvm, ShortRows) {
  std::mt19937 rng(10);
  for (int64_t w = 1; w <= 17; ++w)
    for (const std::vector<int64_t>& outer : {std::vector<int64_t>{7}, {3000}, {5, 9}, {2, 3, 700}}) {
      std::vector<int64_t> domain = outer;
      domain.push_back(w);
      int64_t rows = 1;
      for (int64_t e : outer) rows *= e;
      Program p;
      const BufferId x = p.add_buffer("x", DType::Float32, rows * (w + 1), BufferKind::Input);
      const BufferId scale = p.add_buffer("scale", DType::Float32, w, BufferKind::Input);
      const BufferId y = p.add_buffer("y", DType::Float32, rows * w, BufferKind::Output);
      p.add_nest(loops::pointwise(p.buffers, "scale", domain,
                                  [&](loops::Ops& o, loops::Index i) {
                                    Expr row;
                                    for (size_t d = 0; d < outer.size(); ++d) row = row * Expr(outer[d]) + i[d];
                                    return o.Mul(o.load(x, row * Expr(w + 1) + i.back()), o.load(scale, i.back()));
                                  },
                                  {y}));
      Memory m(p.buffers);
      fill(m, p.buffers, x, rng);
      fill(m, p.buffers, scale, rng);
      check_program(p, m, 0, {}, w % 2 ? 512 : 256);
      if (HasFailure()) return;
    }
}

// Transposes of every type, with tails on both sides: of a load, of a store, and of both among others.
TEST(Llvm, TransposesInTiles) {
  std::mt19937 rng(7);
  const std::pair<int64_t, int64_t> sizes[] = {{16, 16}, {40, 3},  {3, 40},  {33, 2},
                                               {7, 130}, {101, 5}, {18, 35}, {64, 97}};
  for (const DType t : kAll)
    for (const auto& [rows, columns] : sizes)
      for (const int bits : {512, 256, 128}) {
        const int64_t n = rows, w = columns, batch = 2;
        Program p;
        const BufferId x = p.add_buffer("x", t, batch * n * w, BufferKind::Input);
        const BufferId z = p.add_buffer("z", t, batch * n * w, BufferKind::Input);
        const BufferId bias = p.add_buffer("bias", DType::Float64, w, BufferKind::Input);
        std::vector<BufferId> out;
        for (int k = 0; k < 4; ++k)
          out.push_back(p.add_buffer("out" + std::to_string(k), t, batch * n * w, BufferKind::Output));
        const auto straight = [&](loops::Index i) { return i[0] * Expr(n * w) + i[1] * Expr(w) + i[2]; };
        const auto turned = [&](loops::Index i) { return i[0] * Expr(n * w) + i[2] * Expr(n) + i[1]; };
        const std::vector<int64_t> domain = {batch, n, w};
        const auto larger = [&](loops::Ops& o, const Val& a, const Val& b) {  // exact for all types
          return o.where(o.Lt(o.cast(a, DType::Float64), o.cast(b, DType::Float64)), b, a);
        };
        const auto nest = [&](const char* name, BufferId to, const std::function<Expr(loops::Index)>& at,
                              const std::function<Val(loops::Ops&, loops::Index)>& f) {
          p.add_nest(loops::pointwise(p.buffers, name, domain, f, {to, at, loops::StoreMode::Assign}));
        };
        nest("load", out[0], straight, [&](loops::Ops& o, loops::Index i) { return o.load(x, turned(i)); });
        nest("store", out[1], turned,
             [&](loops::Ops& o, loops::Index i) { return larger(o, o.load(x, straight(i)), o.load(z, straight(i))); });
        nest("both", out[2], straight,
             [&](loops::Ops& o, loops::Index i) { return larger(o, o.load(x, turned(i)), o.load(z, straight(i))); });
        nest("row", out[3], turned, [&](loops::Ops& o, loops::Index i) {
          return o.where(o.Lt(o.load(bias, i[2]), o.constant(DType::Float64, 0)), o.load(x, straight(i)),
                         o.load(z, turned(i)));
        });
        Memory m(p.buffers);
        for (const BufferId b : {x, z, bias}) fill(m, p.buffers, b, rng);
        schedule::Options one_each;
        one_each.fusion = n % 2 == 0;
        check_program(p, m, 0, one_each, bits);
        if (HasFailure()) return;
      }
}

// A reduction whose lanes run over the outer variable, and a pass over its rows that is stored the other way round.
TEST(Llvm, TransposesOfColumns) {
  std::mt19937 rng(8);
  for (const int64_t n : {5, 16, 50})
    for (const int64_t w : {4, 35, 300}) {
      Program p;
      const BufferId x = p.add_buffer("x", DType::Float32, n * w, BufferKind::Input);
      const BufferId y = p.add_buffer("y", DType::Float32, n * w, BufferKind::Output);
      const BufferId s = p.add_buffer("s", DType::Float32, n, BufferKind::Output);
      NestBuilder b(p.buffers, "center", {n});
      auto in = b.stage({w});
      const auto at = [&] { return in[0] * Expr(n) + b.outer()[0]; };
      const auto sum = b.reduce(ReduceKind::Sum, {b.load(x, at())});
      in = b.stage({w});
      b.store(y, b.outer()[0] * Expr(w) + in[0], b.Sub(b.load(x, at()), sum[0]));
      in = b.stage({w});
      const auto square = [&](const Val& v) { return b.Mul(v, v); };
      const auto squares = b.reduce(ReduceKind::Sum, {square(b.load(x, at()))});
      b.stage({});
      b.store(s, b.outer()[0], squares[0]);
      p.add_nest(b.finish());
      Memory m(p.buffers);
      fill(m, p.buffers, x, rng);
      for (const int bits : {512, 256}) check_program(p, m, 1e-5, {}, bits);
      if (HasFailure()) return;
    }
}

// Tiles at the end overlap those before, but not where a unit may run before all of its inputs are there, or where its
// results replace them.
TEST(Llvm, TilesOverlapWhereInputsStay) {
  Program p;
  const BufferId x = p.add_buffer("x", DType::Float32, 150 * 210, BufferKind::Input);
  const BufferId y = p.add_buffer("y", DType::Float32, 150 * 210, BufferKind::Output);
  p.add_nest(loops::pointwise(p.buffers, "turned", {150, 210},
                              [&](loops::Ops& o, loops::Index i) { return o.Neg(o.load(x, i[1] * Expr(150) + i[0])); },
                              {y}));
  schedule::Plan plan = schedule::make_plan(p, {});
  const auto overlap = [&](const schedule::Kernel& k) {
    const std::vector<bool> overlaps = codegen::shape_of(k, plan.buffers, 512).overlaps;
    return std::count(overlaps.begin(), overlaps.end(), true);
  };
  schedule::Kernel kernel = plan.kernels.at(0);
  EXPECT_EQ(overlap(kernel), 2);
  kernel.streamed = x;
  EXPECT_EQ(overlap(kernel), 0);
  kernel.streamed = -1;
  for (schedule::KernelArg& a : kernel.args)
    if (a.buffer == y) a.place = x;
  EXPECT_EQ(overlap(kernel), 0);
}

TEST(Llvm, RunningSumsAndProducts) {
  std::mt19937 rng(6);
  for (const bool rows : {true, false}) {
    const int64_t n = 21, w = 37;
    Program p;
    const BufferId x = p.add_buffer("x", DType::Float32, n * w, BufferKind::Input);
    const BufferId y = p.add_buffer("y", DType::Float32, n * w, BufferKind::Output);
    const BufferId at = p.add_buffer("at", DType::Int64, n * w, BufferKind::Output);
    NestBuilder b(p.buffers, "cumsum", {rows ? n : w});
    const auto in = b.stage({rows ? w : n});
    const Expr e = rows ? b.outer()[0] * Expr(w) + in[0] : in[0] * Expr(w) + b.outer()[0];
    const Val v = b.load(x, e);
    b.store(y, e, b.scan(ReduceKind::Sum, {v})[0]);
    b.store(at, e, b.scan(ReduceKind::ArgMax, {v, b.index_value(in[0])})[1]);
    p.add_nest(b.finish());
    Memory m(p.buffers);
    fill(m, p.buffers, x, rng);
    check_program(p, m, 1e-5);
  }
}

TEST(Llvm, EqualStructuresShareCode) {
  Program p;
  std::vector<BufferId> in, out;
  for (int k = 0; k < 3; ++k) {
    in.push_back(p.add_buffer("x" + std::to_string(k), DType::Float32, 100, BufferKind::Input));
    out.push_back(p.add_buffer("y" + std::to_string(k), DType::Float32, 100, BufferKind::Output));
  }
  for (int k = 0; k < 3; ++k)
    p.add_nest(loops::pointwise(
        p.buffers, "n" + std::to_string(k), {100},
        [&](loops::Ops& o, loops::Index i) { return o.Add(o.load(in[k], i[0]), o.constant(DType::Float32, k / 2)); },
        {out[k]}));
  schedule::Options one_each;
  one_each.fusion = false;
  const schedule::Plan plan = schedule::make_plan(p, one_each);
  const auto kernels = codegen::compile_llvm(plan.kernels, plan.buffers, {});
  EXPECT_EQ(kernels[0].fn, kernels[1].fn);
  EXPECT_NE(kernels[0].fn, kernels[2].fn);
}

// The steps of a loop that was unrolled: each reads its part of a tensor, and one before it.
TEST(Llvm, KernelsThatDifferInWhereTheyBeginShareCode) {
  Program p;
  const BufferId x = p.add_buffer("x", DType::Float32, 400, BufferKind::Input);
  std::vector<BufferId> out;
  for (int k = 0; k < 3; ++k)
    out.push_back(p.add_buffer("y" + std::to_string(k), DType::Float32, 400, BufferKind::Output));
  for (int k = 0; k < 3; ++k)
    p.add_nest(loops::pointwise(
        p.buffers, "n" + std::to_string(k), {100},
        [&](loops::Ops& o, loops::Index i) {
          const loops::Val here = o.load(x, i[0] + symbolic::Expr(100 * k + 1));
          const loops::Val before =
              o.masked_load(x, i[0] + symbolic::Expr(100 * k), o.in_range(i[0], 1, 100), o.constant(DType::Float32, 7));
          return o.Sub(here, before);
        },
        {out[k], [k](loops::Index i) { return i[0] * symbolic::Expr(2) + symbolic::Expr(k); }}));
  schedule::Options one_each;
  one_each.fusion = false;
  const schedule::Plan plan = schedule::make_plan(p, one_each);
  const auto kernels = codegen::compile_llvm(plan.kernels, plan.buffers, {});
  EXPECT_EQ(kernels[1].fn, kernels[2].fn);
  EXPECT_NE(kernels[1].offsets, kernels[2].offsets);
  Memory m(p.buffers);
  for (int i = 0; i < 400; ++i) m.data<float>(x)[i] = static_cast<float>(i * i);
  for (int bits : {512, 256, 128}) check_program(p, m, 0, one_each, bits);
}

namespace {
/// The code of the plan's only kernel is what its text says, and nothing else: `codes` has the code of each text so
/// far.
void expect_code_of_text(const schedule::Plan& plan, int simd_bits, std::map<std::string, std::string>& codes) {
  for (const codegen::Lengths lengths : {codegen::Lengths::Few, codegen::Lengths::Any}) {
    schedule::Kernel kernel = plan.kernels.at(0);
    codegen::CompileOptions options;
    options.simd_bits = simd_bits;
    options.keep_text = true;
    options.reuse = false;
    options.lengths = lengths;
    const auto compiled = codegen::compile_llvm({kernel}, plan.buffers, options);
    if (compiled[0].units == 0) continue;
    codegen::take_offsets(kernel, plan.buffers);
    codegen::KernelShape shape = codegen::shape_of(kernel, plan.buffers, simd_bits, lengths);
    codegen::generalize(kernel, shape);
    const std::string text = std::to_string(simd_bits) + " " + codegen::canonical_text(kernel, plan.buffers, shape);
    const auto [code, fresh] = codes.try_emplace(text, *compiled[0].text);
    EXPECT_EQ(code->second, *compiled[0].text) << text;
  }
}

/// How many functions the programs `make` builds for `sizes` have in all, each of one kernel and checked against the
/// interpreter.
size_t codes_of(const std::vector<std::vector<int64_t>>& sizes,
                const std::function<void(Program&, const std::vector<int64_t>&)>& make, int simd_bits = 0) {
  std::mt19937 rng(3);
  std::set<codegen::KernelFn> codes;
  std::map<std::string, std::string> code_of_text;
  for (const std::vector<int64_t>& s : sizes) {
    Program p;
    make(p, s);
    Memory m(p.buffers);
    for (size_t b = 0; b < p.buffers.size(); ++b)
      if (p.buffers[b].kind == BufferKind::Input) fill(m, p.buffers, static_cast<BufferId>(b), rng);
    const auto kernels = check_program(p, m, 1e-4, {}, simd_bits);
    EXPECT_EQ(kernels.size(), 1u);
    codes.insert(kernels[0].fn);
    for (const int bits : {512, 256})
      if (bits <= codegen::host_simd_bits()) expect_code_of_text(schedule::make_plan(p, {}), bits, code_of_text);
  }
  return codes.size();
}
}  // namespace

// What a batch size or a sequence's length changes is not in the code.
TEST(Llvm, OneCodeServesAllBatchSizes) {
  const auto add = [](Program& p, const char* name, int64_t n, BufferKind kind) {
    return p.add_buffer(name, DType::Float32, n, kind);
  };
  // Rows of a batch and a length, normalized; the place in the sequence counts.
  const auto rows = [&](Program& p, const std::vector<int64_t>& s) {
    const BufferId x = add(p, "x", s[0] * s[1] * 96, BufferKind::Input),
                   y = add(p, "y", s[0] * s[1] * 96, BufferKind::Output);
    NestBuilder b(p.buffers, "rows", {s[0], s[1]});
    const Expr row = b.outer()[0] * Expr(s[1] * 96) + b.outer()[1] * Expr(96);
    const auto in = b.stage({96});
    const Val sum = b.reduce(ReduceKind::Sum, {b.load(x, row + in[0])})[0];
    const auto out = b.stage({96});
    b.store(y, row + out[0],
            b.Sub(b.Add(b.load(x, row + out[0]), b.cast(b.index_value(b.outer()[1]), DType::Float32)), sum));
    p.add_nest(b.finish());
  };
  EXPECT_EQ(codes_of({{4, 100}, {4, 77}, {2, 128}, {7, 33}, {300, 2}}, rows), 1u);
  // Sums down the columns: with and without a second level of accumulators.
  const auto columns = [&](Program& p, const std::vector<int64_t>& s) {
    const BufferId x = add(p, "x", s[0] * 64, BufferKind::Input), y = add(p, "y", 64, BufferKind::Output);
    NestBuilder b(p.buffers, "columns", {64});
    const auto in = b.stage({s[0]});
    const Val sum = b.reduce(ReduceKind::Sum, {b.load(x, in[0] * Expr(64) + b.outer()[0])})[0];
    b.stage({});
    b.store(y, b.outer()[0], sum);
    p.add_nest(b.finish());
  };
  // With half the lanes, 64 columns are more than one round, and how many are a unit's hangs on their length.
  const bool wide = codegen::host_simd_bits() >= 512;
  EXPECT_LE(codes_of({{400}, {385}, {511}, {300}}, columns), wide ? 1u : 2u);
  EXPECT_LE(codes_of({{40}, {50}, {100}, {128}, {129}, {400}}, columns), wide ? 2u : 4u);
  // Long rows, whose length changes: two with lanes left over have their own code, and one serves all others.
  const auto long_rows = [&](Program& p, const std::vector<int64_t>& s) {
    const BufferId x = add(p, "x", s[0] * s[1], BufferKind::Input), y = add(p, "y", s[0], BufferKind::Output);
    NestBuilder b(p.buffers, "long", {s[0]});
    const auto in = b.stage({s[1]});
    const Val sum = b.reduce(ReduceKind::Sum, {b.load(x, b.outer()[0] * Expr(s[1]) + in[0])})[0];
    b.stage({});
    b.store(y, b.outer()[0], sum);
    p.add_nest(b.finish());
  };
  EXPECT_EQ(codes_of({{5, 640}, {8, 1280}, {3, 256}}, long_rows), 1u);
  EXPECT_LE(codes_of({{8, 1285}, {5, 706}, {3, 261}, {3, 319}, {9, 129}, {4, 500}, {6, 4001}}, long_rows), 3u);
  EXPECT_LE(codes_of({{8, 2000}, {6, 900}, {7, 333}}, long_rows), wide ? 1u : 2u);
  codes_of({{5, 64 * 200 + 5}, {8, 64 * 130 + 63}, {3, 64 * 129}, {3, 64 * 300 + 1}, {2, 64 * 129 + 9}}, long_rows);
  // Heads of attention, turned: batch, heads, length, elements of a head.
  const auto heads = [&](Program& p, const std::vector<int64_t>& s) {
    const int64_t n = s[0] * s[1] * s[2] * s[3];
    const BufferId x = add(p, "x", n, BufferKind::Input), y = add(p, "y", n, BufferKind::Output);
    p.add_nest(loops::pointwise(p.buffers, "heads", s,
                                [&](loops::Ops& o, loops::Index i) {
                                  return o.Neg(
                                      o.load(x, ((i[0] * Expr(s[2]) + i[2]) * Expr(s[1]) + i[1]) * Expr(s[3]) + i[3]));
                                },
                                {y}));
  };
  for (int bits : {512, 256}) {
    EXPECT_EQ(codes_of({{4, 8, 150, 64}, {4, 8, 177, 64}, {2, 8, 133, 64}, {3, 8, 200, 64}}, heads, bits), 1u);
    codes_of({{4, 8, 100, 5}, {4, 8, 77, 5}, {2, 8, 3, 5}, {300, 8, 3, 5}, {300, 8, 2, 5}, {1, 8, 2, 5}}, heads, bits);
  }
  // Pictures and a number a channel; the transpose of the same, in tiles.
  const auto pictures = [&](Program& p, const std::vector<int64_t>& s) {
    const int64_t n = s[0] * s[1] * s[2];
    const BufferId x = add(p, "x", n, BufferKind::Input), y = add(p, "y", n, BufferKind::Output);
    const BufferId scale = add(p, "scale", s[1], BufferKind::Input);
    p.add_nest(loops::pointwise(p.buffers, "pictures", s,
                                [&](loops::Ops& o, loops::Index i) {
                                  return o.Mul(o.load(x, (i[0] * Expr(s[1]) + i[1]) * Expr(s[2]) + i[2]),
                                               o.load(scale, i[1]));
                                },
                                {y}));
  };
  EXPECT_EQ(codes_of({{4, 3, 128 * 128}, {9, 3, 64 * 96}, {2, 5, 64 * 128}}, pictures), 1u);
  const auto turned = [&](Program& p, const std::vector<int64_t>& s) {
    const int64_t n = s[0] * s[1] * s[2];
    const BufferId x = add(p, "x", n, BufferKind::Input), y = add(p, "y", n, BufferKind::Output);
    p.add_nest(loops::pointwise(
        p.buffers, "turned", s,
        [&](loops::Ops& o, loops::Index i) { return o.Neg(o.load(x, (i[0] * Expr(s[2]) + i[2]) * Expr(s[1]) + i[1])); },
        {y}));
  };
  EXPECT_EQ(codes_of({{4, 64, 1024}, {3, 64, 2048}, {9, 64, 512}}, turned), 1u);
  codes_of({{4, 70, 50}, {3, 33, 19}, {2, 18, 40}, {3, 10, 17}, {5, 9, 90}, {3, 40, 35}, {4, 21, 9}, {1, 90, 11}},
           turned);
  codes_of({{4, 64, 1024}, {3, 65, 1024}, {3, 64, 1030}, {3, 65, 1030}, {3, 200, 33}, {1, 200, 33}, {4, 200, 38}},
           turned);
}

// Nor, after a few of them, are the numbers that sizes make.
TEST(Llvm, OneCodeServesAllConstantsOfSizes) {
  // Positions behind those that a cache holds, in a table; lengths and widths are open.
  const auto positions = [](Program& p, const std::vector<int64_t>& s) {
    const BufferId table = p.add_buffer("table", DType::Float32, s[1] * s[2], BufferKind::Input);
    const BufferId y = p.add_buffer("y", DType::Float32, 4 * s[2], BufferKind::Output);
    p.add_nest(loops::pointwise(p.buffers, "positions", {4, s[2]},
                                [&](loops::Ops& o, loops::Index i) {
                                  const Val at = o.Add(o.index_value(i[0]), o.constant_int(DType::Int64, s[0]));
                                  const std::string message = "no row of " + std::to_string(s[1]);
                                  const Expr row = o.indirect(at, s[1], false, message);
                                  return o.Add(
                                      o.load(table, row * Expr(s[2]) + i[1]),
                                      o.cast(o.Lt(at, o.constant_int(DType::Int64, s[0] + 2)), DType::Float32));
                                },
                                {y}));
  };
  for (int bits : {512, 128}) {
    EXPECT_LE(
        codes_of({{60, 100, 256}, {17, 80, 256}, {1000, 3000, 256}, {99, 333, 256}, {50, 60, 256}}, positions, bits),
        3u);
    EXPECT_LE(codes_of({{60, 99, 555}, {61, 98, 770}, {17, 80, 1001}, {1000, 2000, 601}}, positions, bits), 3u);
    codes_of({{0, 100, 256}, {3, 80, 19}, {20, 24, 300}}, positions, bits);
  }
  // The mean and the corrected variance of rows.
  const auto moments = [](Program& p, const std::vector<int64_t>& s) {
    const double n = static_cast<double>(s[0]);
    const BufferId x = p.add_buffer("x", DType::Float32, 5 * s[0], BufferKind::Input);
    const BufferId y = p.add_buffer("y", DType::Float32, 5, BufferKind::Output);
    NestBuilder b(p.buffers, "moments", {5});
    const auto in = b.stage({s[0]});
    const Val v = b.load(x, b.outer()[0] * Expr(s[0]) + in[0]);
    const Val sum = b.reduce(ReduceKind::Sum, {v})[0], squares = b.reduce(ReduceKind::Sum, {b.Mul(v, v)})[0];
    b.stage({});
    const Val mean = b.Div(sum, b.constant(DType::Float32, n));
    const Val variance = b.Sub(b.Div(squares, b.constant(DType::Float32, n)), b.Mul(mean, mean));
    b.store(y, b.outer()[0], b.Mul(variance, b.constant(DType::Float32, n / (n - 1))));
    p.add_nest(b.finish());
  };
  EXPECT_EQ(codes_of({{256}, {512}, {1024}}, moments), 1u);
  EXPECT_LE(codes_of({{257}, {300}, {1001}, {1023}, {172}, {177}, {200}}, moments), 3u);
  codes_of({{40}, {90}, {250}, {41}, {93}, {255}, {17}, {50}, {70}, {130}, {33}, {63}, {65}, {47}, {129}}, moments);
  // What lies within a length, scaled by it.
  const auto padded = [](Program& p, const std::vector<int64_t>& s) {
    const BufferId x = p.add_buffer("x", DType::Float32, s[0], BufferKind::Input);
    const BufferId y = p.add_buffer("y", DType::Float32, 1000, BufferKind::Output);
    p.add_nest(loops::pointwise(p.buffers, "padded", {1000},
                                [&](loops::Ops& o, loops::Index i) {
                                  const Val here = o.in_range(i[0], 20, 20 + s[0]);
                                  const Val v = o.masked_load(x, i[0] - Expr(20), here, o.constant(DType::Float32, 0));
                                  return o.Mul(o.Div(v, o.constant(DType::Float32, std::sqrt(s[0]))),
                                               o.constant(DType::Float32, 2.0 / static_cast<double>(s[0])));
                                },
                                {y}));
  };
  for (int bits : {512, 128}) EXPECT_LE(codes_of({{100}, {301}, {960}, {577}, {65}}, padded, bits), 3u);
  // Sums over a batch and a length.
  const auto both = [](Program& p, const std::vector<int64_t>& s) {
    const BufferId x = p.add_buffer("x", DType::Float32, s[0] * s[1] * s[2], BufferKind::Input);
    const BufferId y = p.add_buffer("y", DType::Float32, s[2], BufferKind::Output);
    NestBuilder b(p.buffers, "both", {s[2]});
    const auto in = b.stage({s[0], s[1]});
    const Val sum = b.reduce(ReduceKind::Sum, {b.load(x, (in[0] * Expr(s[1]) + in[1]) * Expr(s[2]) + b.outer()[0])})[0];
    b.stage({});
    b.store(y, b.outer()[0], sum);
    p.add_nest(b.finish());
  };
  EXPECT_EQ(codes_of({{4, 150, 64}, {5, 130, 64}, {3, 177, 64}}, both), 1u);
  EXPECT_EQ(codes_of({{40, 9, 64}, {45, 10, 64}, {48, 8, 64}}, both), 1u);
  codes_of({{4, 3, 64}, {70, 100, 1}, {33, 70, 1}, {2, 64, 1}, {129, 2, 1}, {3, 129, 5}}, both);
}

// Division of what may be negative is other code than that of what is not, though the text is the same.
TEST(Llvm, CodeIsNotSharedByDivisionsOfOtherSigns) {
  const auto make = [](Program& p, const std::vector<int64_t>& s) {
    const BufferId x = p.add_buffer("x", DType::Float32, 8 * 64, BufferKind::Input);
    const BufferId y = p.add_buffer("y", DType::Float32, s[0] * 5 * 64, BufferKind::Output);
    p.add_nest(loops::pointwise(p.buffers, "signs", {s[0], 5, 64},
                                [&](loops::Ops& o, loops::Index i) {
                                  const Expr row = symbolic::floordiv(i[1] * Expr(2) - i[0] + Expr(2), 3) + Expr(1);
                                  return o.Neg(o.load(x, row * Expr(64) + i[2]));
                                },
                                {y}));
  };
  EXPECT_EQ(codes_of({{2}, {3}, {4}, {5}}, make), 3u);
}

TEST(Llvm, CodeIsKeptAsLongAsItIsUsed) {
  Program p;
  const BufferId x = p.add_buffer("x", DType::Float32, 100, BufferKind::Input);
  const BufferId y = p.add_buffer("y", DType::Float32, 100, BufferKind::Output);
  p.add_nest(loops::pointwise(
      p.buffers, "n", {100},
      [&](loops::Ops& o, loops::Index i) { return o.Add(o.load(x, i[0]), o.constant(DType::Float32, 0.7251)); }, {y}));
  const schedule::Plan plan = schedule::make_plan(p, {});
  const auto compile = [&](const codegen::CompileOptions& options = {}) {
    return codegen::compile_llvm(plan.kernels, plan.buffers, options).at(0);
  };
  auto first = compile();
  EXPECT_EQ(compile().owner, first.owner);
  codegen::CompileOptions anew;
  anew.reuse = false;
  EXPECT_NE(compile(anew).owner, first.owner);
  codegen::CompileOptions with_text;
  with_text.keep_text = true;  // the first code came without
  EXPECT_NE(compile(with_text).text, nullptr);
  const std::weak_ptr<const void> owner = first.owner;
  first = {};
  EXPECT_TRUE(owner.expired());
  EXPECT_NE(compile().fn, nullptr);
}

}  // namespace kiln::testing
