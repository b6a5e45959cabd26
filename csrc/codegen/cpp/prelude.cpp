#include "codegen/cpp/emit.h"

namespace kiln::codegen {

// The meaning of each function is that of the opcode of its name (loops/opcodes.def).
std::string cpp_prelude() {
  return R"cpp(#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

               namespace kiln {
               namespace {

               struct bfloat16 {
                 uint16_t bits;
               };
               struct half {
                 uint16_t bits;
               };

               template <class To, class From>
               To bitcast(From v) {
                 static_assert(sizeof(To) == sizeof(From));
                 To to;
                 std::memcpy(&to, &v, sizeof to);
                 return to;
               }

               inline float to_float(bfloat16 v) { return bitcast<float>(static_cast<uint32_t>(v.bits) << 16); }
               inline float to_float(half v) { return static_cast<float>(bitcast<_Float16>(v.bits)); }
               inline bfloat16 to_bfloat16(float v) {
                 if (std::isnan(v)) return {0x7fc0};
                 const uint32_t bits = bitcast<uint32_t>(v);
                 return {static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
               }
               inline half to_half(float v) {
                 return {std::isnan(v) ? static_cast<uint16_t>((std::signbit(v) ? 0x8000 : 0) | 0x7e00)
                                       : bitcast<uint16_t>(static_cast<_Float16>(v))};
               }

               template <class T>
               constexpr bool is_half = std::is_same_v<T, bfloat16> || std::is_same_v<T, half>;

               /// As torch's .to(); of floats that do not fit, as the processor converts.
               template <class To, class From>
               To cast(From v) {
                 if constexpr (std::is_same_v<To, From>) {
                   return v;
                 } else if constexpr (is_half<From>) {
                   return cast<To>(to_float(v));
                 } else if constexpr (std::is_same_v<To, bfloat16>) {
                   return to_bfloat16(static_cast<float>(v));
                 } else if constexpr (std::is_same_v<To, half>) {
                   return to_half(static_cast<float>(v));
                 } else if constexpr (std::is_same_v<To, bool>) {
                   return v != From(0);
                 } else if constexpr (std::is_floating_point_v<From> && std::is_integral_v<To>) {
                   if constexpr (std::is_same_v<To, uint8_t> || std::is_same_v<To, int64_t>)
                     return static_cast<To>(v >= From(-9223372036854775808.0) && v < From(9223372036854775808.0)
                                                ? static_cast<int64_t>(v)
                                                : INT64_MIN);
                   else
                     return static_cast<To>(static_cast<double>(v) > -2147483649.0 &&
                                                    static_cast<double>(v) < 2147483648.0
                                                ? static_cast<int32_t>(v)
                                                : INT32_MIN);
                 } else if constexpr (std::is_same_v<To, double>) {
                   return static_cast<double>(v);
                 } else if constexpr (std::is_same_v<To, float>) {
                   return static_cast<float>(v);
                 } else {
                   return static_cast<To>(v);
                 }
               }

               // Integers wrap: computed without a sign.
               template <class T>
               T add(T a, T b) {
                 if constexpr (std::is_same_v<T, bool>)
                   return a || b;
                 else if constexpr (std::is_integral_v<T>)
                   return static_cast<T>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
                 else
                   return a + b;
               }
               template <class T>
               T sub(T a, T b) {
                 if constexpr (std::is_integral_v<T>)
                   return static_cast<T>(static_cast<uint64_t>(a) - static_cast<uint64_t>(b));
                 else
                   return a - b;
               }
               template <class T>
               T mul(T a, T b) {
                 if constexpr (std::is_same_v<T, bool>)
                   return a && b;
                 else if constexpr (std::is_integral_v<T>)
                   return static_cast<T>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
                 else
                   return a * b;
               }
               template <class T>
               T neg(T a) {
                 if constexpr (std::is_integral_v<T>)
                   return static_cast<T>(uint64_t{0} - static_cast<uint64_t>(a));
                 else
                   return -a;
               }
               template <class T>
               T abs(T a) {
                 if constexpr (std::is_floating_point_v<T>)
                   return std::fabs(a);
                 else
                   return a < T(0) ? neg(a) : a;
               }
               template <class T>
               T sign(T a) {
                 return static_cast<T>(static_cast<int>(a > T(0)) - static_cast<int>(a < T(0)));
               }
               template <class T>
               T maximum(T a, T b) {
                 if constexpr (std::is_floating_point_v<T>)
                   if (std::isnan(a) || std::isnan(b)) return std::isnan(a) ? a : b;
                 return a > b ? a : b;
               }
               template <class T>
               T minimum(T a, T b) {
                 if constexpr (std::is_floating_point_v<T>)
                   if (std::isnan(a) || std::isnan(b)) return std::isnan(a) ? a : b;
                 return a < b ? a : b;
               }
               template <class T>
               T fmax(T a, T b) {
                 return std::isnan(b) ? a : a > b ? a : b;
               }
               template <class T>
               T fmin(T a, T b) {
                 return std::isnan(b) ? a : a < b ? a : b;
               }

               /// A divisor that may be one: zero is error `code` for integers.
               template <class T>
               T divisor(T b, int32_t code, int32_t& failed) {
                 if constexpr (std::is_integral_v<T>)
                   if (b == T(0)) {
                     failed = code;
                     return T(1);
                   }
                 return b;
               }
               template <class T>
               T trunc_divide(T a, T b) {
                 if constexpr (std::is_floating_point_v<T>)
                   return std::trunc(a / b);
                 else if constexpr (std::is_signed_v<T>)
                   return b == T(-1) ? neg(a) : static_cast<T>(a / b);
                 else
                   return static_cast<T>(a / b);
               }
               template <class T>
               T fmod(T a, T b) {
                 if constexpr (std::is_floating_point_v<T>)
                   return std::fmod(a, b);
                 else if constexpr (std::is_signed_v<T>)
                   return b == T(-1) ? T(0) : static_cast<T>(a % b);
                 else
                   return static_cast<T>(a % b);
               }
               template <class T>
               T remainder(T a, T b) {
                 const T rest = fmod(a, b);
                 return rest != T(0) && (rest < T(0)) != (b < T(0)) ? static_cast<T>(rest + b) : rest;
               }
               template <class T>
               T floor_divide(T a, T b) {
                 if constexpr (std::is_floating_point_v<T>) {
                   if (b == 0) return a / b;
                   const T rest = std::fmod(a, b);
                   T q = (a - rest) / b;
                   if (rest != 0 && (b < 0) != (rest < 0)) q -= 1;
                   if (q == 0) return std::copysign(T(0), a / b);
                   const T down = std::floor(q);
                   return q - down > T(0.5) ? down + 1 : down;
                 } else {
                   const T rest = fmod(a, b);
                   return static_cast<T>(trunc_divide(a, b) - (rest != T(0) && (rest < T(0)) != (b < T(0))));
                 }
               }
               template <class T>
               T power(T a, T b) {
                 if constexpr (std::is_floating_point_v<T>) {
                   return std::pow(a, b);
                 } else {
                   if (b < T(0)) return a == T(1) ? T(1) : a == static_cast<T>(-1) ? (b & 1 ? a : T(1)) : T(0);
                   uint64_t result = 1, base = static_cast<uint64_t>(a);
                   for (uint64_t e = static_cast<uint64_t>(b); e; e >>= 1, base *= base)
                     if (e & 1) result *= base;
                   return static_cast<T>(result);
                 }
               }
               template <class T>
               T bit_not(T a) {
                 if constexpr (std::is_same_v<T, bool>)
                   return !a;
                 else
                   return static_cast<T>(~a);
               }
               template <class T>
               T shift_left(T a, T b) {
                 return b < T(0) || static_cast<uint64_t>(b) >= 8 * sizeof(T) ? T(0) : static_cast<T>(static_cast<uint64_t>(a) << b);
               }
               template <class T>
               T shift_right(T a, T b) {
                 if (b < T(0) || static_cast<uint64_t>(b) >= 8 * sizeof(T)) return a < T(0) ? static_cast<T>(-1) : T(0);
                 return static_cast<T>(a >> b);
               }
               template <class T>
               T sigmoid(T a) {
                 return T(1) / (T(1) + std::exp(-a));
               }

               /// Floor division and remainder of indices by a positive number.
               inline int64_t floor_div(int64_t a, int64_t d) { return a / d - (a % d < 0); }
               inline int64_t floor_mod(int64_t a, int64_t d) { return a % d + (a % d < 0 ? d : 0); }

               /// An index that was computed: in [0, size), else error `code`; `wrap`: negative ones count from the
               /// end.
               inline int64_t bound(int64_t v, int64_t size, bool wrap, int32_t code, int32_t& failed) {
                 if (wrap && v < 0) v += size;
                 if (v >= 0 && v < size) return v;
                 failed = code;
                 return 0;
               }

               template <class T>
               constexpr T lowest() {
                 if constexpr (std::is_floating_point_v<T>)
                   return -std::numeric_limits<T>::infinity();
                 else
                   return std::numeric_limits<T>::min();
               }
               template <class T>
               constexpr T highest() {
                 if constexpr (std::is_floating_point_v<T>)
                   return std::numeric_limits<T>::infinity();
                 else
                   return std::numeric_limits<T>::max();
               }

               /// Float sums are kept in double: as exact as sums in several levels.
               template <class T>
               struct Sum {
                 std::conditional_t<std::is_same_v<T, float>, double, T> total{};
                 void add(T x) { total = kiln::add(total, static_cast<decltype(total)>(x)); }
                 T first() const { return static_cast<T>(total); }
               };
               template <class T>
               struct Prod {
                 T total = T(1);
                 void add(T x) { total = mul(total, x); }
                 T first() const { return total; }
               };
               template <class T>
               struct Max {
                 T best = lowest<T>();
                 void add(T x) { best = maximum(best, x); }
                 T first() const { return best; }
               };
               template <class T>
               struct Min {
                 T best = highest<T>();
                 void add(T x) { best = minimum(best, x); }
                 T first() const { return best; }
               };
               template <class T>
               struct Any {
                 T any = T(0);
                 void add(T x) { any = static_cast<T>(any | x); }
                 T first() const { return any; }
               };
               template <class T>
               struct All {
                 T all = T(1);
                 void add(T x) { all = static_cast<T>(all & x); }
                 T first() const { return all; }
               };
               /// The first index of the extreme; NaN wins.
               template <class T, bool largest>
               struct ArgBest {
                 T best = largest ? lowest<T>() : highest<T>();
                 int64_t at = INT64_MAX;
                 void add(T x, int64_t i) {
                   bool x_nan = false, best_nan = false;
                   if constexpr (std::is_floating_point_v<T>) x_nan = std::isnan(x), best_nan = std::isnan(best);
                   const bool better = x_nan ? !best_nan : !best_nan && (largest ? x > best : x < best);
                   const bool equal = (x_nan && best_nan) || x == best;
                   if (better || (equal && i < at)) best = x, at = i;
                 }
                 T first() const { return best; }
                 int64_t second() const { return at; }
               };
               template <class T>
               using ArgMax = ArgBest<T, true>;
               template <class T>
               using ArgMin = ArgBest<T, false>;
               /// Mean and sum of squared differences from it (Welford 1962; parts by Chan et al. 1979).
               template <class T>
               struct Welford {
                 double mean = 0, m2 = 0, count = 0;
                 void add(T x) {
                   const double delta = x - mean;
                   count += 1;
                   mean += delta / count;
                   m2 += delta * (x - mean);
                 }
                 T first() const { return static_cast<T>(mean); }
                 T second() const { return static_cast<T>(m2); }
               };
               template <class T>
               struct WelfordCombine {
                 double mean = 0, m2 = 0, count = 0;
                 void add(T other_mean, T other_m2, T other_count) {
                   const double n = count + other_count;
                   if (n == 0) return;
                   const double delta = other_mean - mean, share = other_count / n;
                   mean += delta * share;
                   m2 += other_m2 + delta * delta * count * share;
                   count = n;
                 }
                 T first() const { return static_cast<T>(mean); }
                 T second() const { return static_cast<T>(m2); }
               };
               /// Maximum and sum of exp(x - maximum) in one pass (Milakov and Gimelshein 2018).
               template <class T>
               struct OnlineSoftmax {
                 T top = lowest<T>(), sum = T(0);
                 void add(T x, T part = T(1)) {
                   const T m = maximum(top, x);
                   const auto scaled = [&](T from, T s) {
                     return from == m && !(m > std::numeric_limits<T>::max()) ? s : s * std::exp(from - m);
                   };
                   sum = scaled(top, sum) + scaled(x, part);
                   top = m;
                 }
                 T first() const { return top; }
                 T second() const { return sum; }
               };
               template <class T>
               using OnlineSoftmaxCombine = OnlineSoftmax<T>;

               }  // namespace
               }  // namespace kiln
  )cpp";
}

}  // namespace kiln::codegen
