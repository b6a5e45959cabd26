#pragma once
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>

#include "base/error.h"
#include "codegen/common/kernel.h"
#include "codegen/cpp/emit.h"
#include "loops/loops.h"
#include "schedule/schedule.h"

// Runs loop programs by the interpreter and by compiled kernels on equal data and compares every visible buffer.
namespace kiln::testing {

using loops::Buffer;
using loops::BufferId;
using loops::BufferKind;
using loops::Nest;
using loops::NestBuilder;
using loops::Opcode;
using loops::Program;
using loops::ReduceKind;
using loops::Val;
using symbolic::Expr;

struct Memory {
  static constexpr size_t kBehind = 64;  // bytes behind each buffer, which nothing may write
  std::vector<std::vector<char>> bytes;
  std::vector<void*> pointers;

  explicit Memory(const std::vector<Buffer>& buffers) {
    for (const Buffer& b : buffers) bytes.emplace_back(b.numel * dtype_size(b.dtype) + kBehind, 0);
    link();
  }
  Memory(const Memory& o) : bytes(o.bytes) { link(); }
  void link() {
    pointers.clear();
    for (auto& b : bytes) pointers.push_back(b.data());
  }
  template <class T>
  T* data(BufferId b) {
    return reinterpret_cast<T*>(bytes.at(b).data());
  }
};

inline double read_element(const void* p, DType t, int64_t i) {
  switch (t) {
    case DType::Bool:
    case DType::UInt8:
      return static_cast<const uint8_t*>(p)[i];
    case DType::Int8:
      return static_cast<const int8_t*>(p)[i];
    case DType::Int16:
      return static_cast<const int16_t*>(p)[i];
    case DType::Int32:
      return static_cast<const int32_t*>(p)[i];
    case DType::Int64:
      return static_cast<double>(static_cast<const int64_t*>(p)[i]);
    case DType::Float32:
      return static_cast<const float*>(p)[i];
    case DType::Float64:
      return static_cast<const double*>(p)[i];
    case DType::BFloat16: {
      const uint32_t bits = static_cast<uint32_t>(static_cast<const uint16_t*>(p)[i]) << 16;
      float f;
      std::memcpy(&f, &bits, 4);
      return f;
    }
    case DType::Float16: {
      _Float16 h;
      std::memcpy(&h, static_cast<const uint16_t*>(p) + i, 2);
      return static_cast<double>(h);
    }
    default:
      return 0;
  }
}

inline void write_element(void* p, DType t, int64_t i, double v) {
  switch (t) {
    case DType::Bool:
      static_cast<uint8_t*>(p)[i] = v != 0;
      break;
    case DType::UInt8:
      static_cast<uint8_t*>(p)[i] = static_cast<uint8_t>(v);
      break;
    case DType::Int8:
      static_cast<int8_t*>(p)[i] = static_cast<int8_t>(v);
      break;
    case DType::Int16:
      static_cast<int16_t*>(p)[i] = static_cast<int16_t>(v);
      break;
    case DType::Int32:
      static_cast<int32_t*>(p)[i] = static_cast<int32_t>(v);
      break;
    case DType::Int64:
      static_cast<int64_t*>(p)[i] = static_cast<int64_t>(v);
      break;
    case DType::Float32:
      static_cast<float*>(p)[i] = static_cast<float>(v);
      break;
    case DType::Float64:
      static_cast<double*>(p)[i] = v;
      break;
    case DType::BFloat16: {
      const float f = static_cast<float>(v);
      uint32_t bits;
      std::memcpy(&bits, &f, 4);
      static_cast<uint16_t*>(p)[i] =
          static_cast<uint16_t>(std::isnan(f) ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
      break;
    }
    case DType::Float16: {
      const _Float16 h = static_cast<_Float16>(v);
      std::memcpy(static_cast<uint16_t*>(p) + i, &h, 2);
      break;
    }
    default:
      break;
  }
}

/// Fills a buffer: floats normal, integers in [-bound, bound] (unsigned: [0, bound]).
inline void fill(Memory& m, const std::vector<Buffer>& buffers, BufferId b, std::mt19937& rng, double bound = 20) {
  std::normal_distribution<double> normal;
  std::uniform_int_distribution<int> integer(0, static_cast<int>(bound));
  for (int64_t i = 0; i < buffers[b].numel; ++i) {
    const DType t = buffers[b].dtype;
    double v = normal(rng);
    if (is_integral(t))
      v = t == DType::Bool ? integer(rng) % 2 : integer(rng) * (dtype_kind(t) == 'i' && normal(rng) < 0 ? -1 : 1);
    write_element(m.pointers[b], t, i, v);
  }
}

/// Equal bit for bit, or both NaN, or within `tolerance` relative (and absolute below one).
inline void expect_close(const Memory& want, const Memory& got, const std::vector<Buffer>& buffers, BufferId b,
                         double tolerance, const std::string& what) {
  for (int64_t i = 0; i < buffers[b].numel; ++i) {
    const double x = read_element(want.pointers[b], buffers[b].dtype, i);
    const double y = read_element(got.pointers[b], buffers[b].dtype, i);
    if ((std::isnan(x) && std::isnan(y)) || (x == y && std::signbit(x) == std::signbit(y))) continue;
    if (tolerance > 0 && std::fabs(x - y) <= tolerance * std::max(1.0, std::fabs(x))) continue;
    FAIL() << what << ": " << buffers[b].name << "[" << i << "]: interpreter " << x << ", kernel " << y;
  }
}

inline const DType kAll[] = {DType::Bool,  DType::UInt8,   DType::Int8,     DType::Int16,   DType::Int32,
                             DType::Int64, DType::Float16, DType::BFloat16, DType::Float32, DType::Float64};

/// Values that operators get wrong.
inline std::vector<double> nasty(DType t) {
  const double inf = std::numeric_limits<double>::infinity(), nan = std::nan("");
  if (t == DType::Bool) return {0, 1};
  if (dtype_kind(t) == 'u') return {0, 1, 2, 7, 127, 128, 254, 255};
  if (dtype_kind(t) == 'i') {
    const double max = std::ldexp(1.0, dtype_size(t) * 8 - 1);
    // 2^63 - 1 has no double: the largest below it does.
    return {0, 1, -1, 2, -2, 3, -3, 7, 100, -100, dtype_size(t) == 8 ? 9.2e18 : max - 1, -max};
  }
  return {0.0, -0.0, 1, -1, 0.5, -0.5, 2.5, -2.5, 1e-40, 3e4, -3e4, 7.25, inf, -inf, nan, 0.1, 1e30, -1e-30};
}

/// Whether there is the opcode on this dtype.
inline bool applies(Opcode op, DType t) {
  const char c = loops::opcode_class(op);
  const bool half = is_floating(t) && dtype_size(t) == 2;
  if (c == 'c') return true;
  if (half) return false;
  if (c == 'f') return is_floating(t);
  if (c == 'l') return is_integral(t);
  if (c == 'i') return is_integral(t) && t != DType::Bool;
  return t != DType::Bool;
}

inline void interpret_all(const Program& p, Memory& m) {
  for (const auto& item : p.items) loops::interpret(p.nests.at(item.index), p.buffers, m.pointers);
}

inline void run_plan(const schedule::Plan& plan, const std::vector<codegen::CompiledKernel>& kernels, Memory& m) {
  for (const schedule::Step& s : plan.steps) {
    std::vector<void*> pointers;
    for (const auto& a : plan.kernels[s.index].args) {
      if (a.place >= 0) m.pointers.at(a.buffer) = m.pointers.at(a.place);
      pointers.push_back(m.pointers.at(a.buffer));
    }
    codegen::run_serial(kernels[s.index], pointers.data());
  }
}

/// Runs the kernels from `start` and compares every buffer that is not a Temp with what the interpreter makes.
inline void check_kernels(const Program& p, const schedule::Plan& plan,
                          const std::vector<codegen::CompiledKernel>& kernels, const Memory& start, double tolerance) {
  Memory want = start;
  interpret_all(p, want);
  Memory got(plan.buffers);
  for (size_t b = 0; b < p.buffers.size(); ++b) got.bytes[b] = start.bytes[b];
  got.link();
  run_plan(plan, kernels, got);
  for (const auto& bytes : got.bytes)
    EXPECT_TRUE(std::all_of(bytes.end() - Memory::kBehind, bytes.end(), [](char c) { return c == 0; }))
        << "written behind a buffer: " << schedule::print(plan);
  for (size_t b = 0; b < p.buffers.size(); ++b)
    if (p.buffers[b].kind != BufferKind::Temp)
      expect_close(want, got, p.buffers, static_cast<BufferId>(b), tolerance, schedule::print(plan));
}

/// Schedules `p` and runs it as C++ source, too. Slow: the compiler is a program of its own.
inline void check_cpp(const Program& p, const Memory& start, double tolerance = 0, schedule::Options options = {}) {
  loops::verify(p);
  const schedule::Plan plan = schedule::make_plan(p, options);
  check_kernels(p, plan, codegen::compile_cpp(plan.kernels, plan.buffers), start, tolerance);
}

/// Schedules and compiles `p`, runs both ways from the same data, compares every buffer that is not a Temp. Returns the
/// kernels. Their code is kept, so that kernels of other sizes share it where they may. With KILN_TEST_CPP set in the
/// environment the same is checked of C++ source.
inline std::vector<codegen::CompiledKernel> check_program(const Program& p, const Memory& start, double tolerance = 0,
                                                          schedule::Options options = {}, int simd_bits = 0) {
  loops::verify(p);
  const schedule::Plan plan = schedule::make_plan(p, options);
  for (const auto& k : plan.kernels) loops::verify(k.nest, plan.buffers);
  codegen::CompileOptions compile;
  compile.simd_bits = simd_bits;
  static std::vector<std::shared_ptr<const void>> kept;
  const auto kernels = codegen::compile_llvm(plan.kernels, plan.buffers, compile);
  for (const auto& k : kernels) kept.push_back(k.owner);
  check_kernels(p, plan, kernels, start, tolerance);
  if (std::getenv("KILN_TEST_CPP")) check_cpp(p, start, std::max(tolerance, 1e-6), options);
  return kernels;
}

}  // namespace kiln::testing
