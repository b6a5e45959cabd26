#pragma once
#include <cstdint>

// The matrix unit that multiplies tiles of bfloat16 (Intel's AMX): the only code that is written for it. A float32
// number is cut into three bfloat16, whose sum it is exactly.
namespace kiln::runtime::gemm::amx {

/// True where the host has the unit, and the kernel lets this process use it.
bool supported();

/// While one lives, this thread's tiles are configured for multiply(); what they were before comes back afterwards.
class Tiles {
 public:
  Tiles();
  ~Tiles();
  Tiles(const Tiles&) = delete;

 private:
  alignas(64) uint8_t before_[64];
};

/// Rows of a tile of A, columns of one of B, and the depth of both.
constexpr int64_t kAcross = 16, kStep = 32;
constexpr int64_t kParts = 3;
/// What a step of 16 vectors takes, in floats: three tiles of 1 KB.
constexpr int64_t kPartFloats = kAcross * kStep / 2, kStepFloats = kParts * kPartFloats;

/// 16 rows of A or 16 columns of B along k: element (v, p) at data[v * vector + p * step].
struct Vectors {
  const float* data;
  int64_t vector, step;
  int64_t count;  // that exist: 1 .. 16
};
enum class Side : uint8_t { Left, Right };

/// Cuts numbers into their parts, line by line, so that it may be done while the unit multiplies.
class Packing {
 public:
  Packing() = default;
  Packing(const Packing&) = delete;
  Packing& operator=(const Packing&) = delete;
  /// Of `depth` elements of each vector, to `to`, step by step of kStep, zeros where there are no more. Numbers p and
  /// p + 16 of a step share a pair.
  void begin(const Vectors& vectors, int64_t depth, Side side, float* to);
  /// So many are left.
  int64_t lines() const { return lines_; }
  /// Packs at most `count` of them.
  void go_on(int64_t count);
  /// The bits of the largest magnitude so far, NaN above all.
  uint32_t largest() const;

 private:
  friend struct Lines;
  void begin_step();
  Vectors vectors_{};
  int64_t depth_ = 0, at_ = 0, lines_ = 0, apart_ = 0;
  Side side_ = Side::Left;
  const float *low_ = nullptr, *high_ = nullptr;  // the halves of the next line
  float* to_ = nullptr;
  alignas(64) uint32_t largest_[kAcross] = {};
  alignas(64) float turned_[2][kAcross * kAcross];
};

/// Whether products of such numbers, by the bits of the largest ones, are as exact as in float32: the unit takes
/// numbers below 2^-126 for zeros, and a part of an infinity is none.
bool exact(uint32_t largest_left, uint32_t largest_right);

/// Sums of two tiles of rows with a panel: 32 rows of 16 columns.
constexpr int64_t kPairFloats = 2 * kAcross * kAcross;

/// What a product does on the way, while the core would wait for the unit.
struct Meanwhile {
  Packing* packing[2] = {};     // one after the other, or null
  int64_t lines = 0;            // to pack in each step
  const float* soon = nullptr;  // asks for 32 lines of memory, `apart` floats apart
  int64_t apart = 0;
};
/// `to`, as kPairFloats or, without `second`, its first half, becomes `from` (nothing, if that is null) + left x right.
/// `first` and `second` are packed rows, `right` packed columns, of `steps` steps. Needs Tiles.
void multiply(const float* first, const float* second, const float* right, int64_t steps, const float* from, float* to,
              const Meanwhile& meanwhile);

/// Adds the sums of one or two `tiles` to others.
void add(const float* sums, int64_t tiles, float* to);

/// Rows of C from their sums with panels that follow each other, kPairFloats each.
struct Finished {
  const float* sums;
  int64_t rows, columns;
  float* c;
  int64_t ldc;
  const float* bias;  // or null
  bool accumulate;    // C += sums
};
void store(const Finished& f);

}  // namespace kiln::runtime::gemm::amx
