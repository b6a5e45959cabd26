#include "codegen/triton/emit.h"

namespace kiln::codegen {

// The meaning of each function is that of the opcode or reduction of its name (loops/opcodes.def, loops/loops.h).
// Functions that put two states of a reduction together call no others: they become regions of an operation.
std::string triton_prelude() {
  return R"py(import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def check(holds, mask, error_, code: tl.constexpr):
    # Reports error `code` where a condition does not hold.
    tl.store(error_ + 0 * holds.to(tl.int32), code, (holds == 0) & mask)


@triton.jit
def bound(v, size: tl.constexpr, WRAP: tl.constexpr, mask, error_, code: tl.constexpr):
    # An index that was computed: in [0, size), else error `code`. WRAP: negative ones count from the end.
    v = v.to(tl.int64)
    if WRAP:
        v = tl.where(v < 0, v + size, v)
    inside = (v >= 0) & (v < size)
    check(inside, mask, error_, code)
    return tl.where(inside, v, 0)


@triton.jit
def divisor(b, mask, error_, code: tl.constexpr):
    # A divisor that may be one: zero is error `code`.
    check(b != 0, mask, error_, code)
    return tl.where(b == 0, 1, b)


# Floor division and remainder of indices by a positive number.
@triton.jit
def floor_div(a, d: tl.constexpr):
    return a // d - (a % d < 0).to(tl.int32)


@triton.jit
def floor_mod(a, d: tl.constexpr):
    return a % d + tl.where(a % d < 0, d, 0)


# bfloat16 by its bits: to the nearest, ties to even.
@triton.jit
def from_bfloat16(x):
    bits = x.to(tl.uint16, bitcast=True).to(tl.uint32)
    return (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def to_bfloat16(x):
    bits = x.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    rounded = tl.where(x != x, 0x7FC0, rounded)
    return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)


# Integers from floats; what does not fit is the smallest, as on the x86.
@triton.jit
def to_int64(x):
    fits = (x >= -9223372036854775808.0) & (x < 9223372036854775808.0)
    return tl.where(fits, tl.where(fits, x, 0.0).to(tl.int64), -9223372036854775808)


@triton.jit
def to_int32(x):
    fits = (x > -2147483649.0) & (x < 2147483648.0)
    return tl.where(fits, tl.where(fits, x, 0.0).to(tl.int32), -2147483648)


@triton.jit
def divide(a, b):
    if b.dtype == tl.float32:
        q = tl.div_rn(a, b)
    else:
        q = a / b
    return q


@triton.jit
def sigmoid(a):
    return divide(1.0, 1.0 + libdevice.exp(0.0 - a))


@triton.jit
def sign(a):
    return (a > 0).to(a.dtype) - (a < 0).to(a.dtype)


@triton.jit
def fmax(a, b):
    return tl.where((a > b) | (b != b), a, b)


@triton.jit
def fmin(a, b):
    return tl.where((a < b) | (b != b), a, b)


@triton.jit
def trunc_divide(a, b):
    return libdevice.trunc(divide(a, b))


@triton.jit
def remainder(a, b):
    rest = libdevice.fmod(a, b)
    return tl.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)


@triton.jit
def floor_divide(a, b):
    rest = libdevice.fmod(a, b)
    q = divide(a - rest, b)
    q = tl.where((rest != 0) & ((rest < 0) != (b < 0)), q - 1.0, q)
    down = tl.floor(q)
    down = tl.where(q - down > 0.5, down + 1.0, down)
    whole = divide(a, b)
    down = tl.where(q == 0, libdevice.copysign(q * 0.0, whole), down)
    return tl.where(b == 0, whole, down)


# Triton's integer division truncates. The smallest number by -1 wraps.
@triton.jit
def trunc_divide_int(a, b, SIGNED: tl.constexpr):
    if SIGNED:
        q = tl.where(b == -1, 0 - a, a // tl.where(b == -1, 1, b))
    else:
        q = a // b
    return q


@triton.jit
def fmod_int(a, b, SIGNED: tl.constexpr):
    if SIGNED:
        rest = tl.where(b == -1, 0, a % tl.where(b == -1, 1, b))
    else:
        rest = a % b
    return rest


@triton.jit
def remainder_int(a, b, SIGNED: tl.constexpr):
    rest = fmod_int(a, b, SIGNED)
    return tl.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)


@triton.jit
def floor_divide_int(a, b, SIGNED: tl.constexpr):
    rest = fmod_int(a, b, SIGNED)
    down = (rest != 0) & ((rest < 0) != (b < 0))
    return trunc_divide_int(a, b, SIGNED) - down.to(a.dtype)


@triton.jit
def power_int(a, b, SIGNED: tl.constexpr, BITS: tl.constexpr):
    result = a * 0 + b * 0 + 1
    base = a + b * 0
    rest = tl.where(b < 0, 0, b) + a * 0
    for _ in range(BITS):
        result = tl.where(rest % 2 != 0, result * base, result)
        base = base * base
        rest = rest // 2
    if SIGNED:
        inverse = tl.where(a == 1, 1, tl.where(a == -1, tl.where(b % 2 != 0, a, a * 0 + 1), a * 0))
        result = tl.where(b < 0, inverse, result)
    return result


@triton.jit
def shift_left(a, b, BITS: tl.constexpr):
    inside = (b >= 0) & (b < BITS)
    return tl.where(inside, a << tl.where(inside, b, 0), 0)


@triton.jit
def shift_right(a, b, BITS: tl.constexpr):
    inside = (b >= 0) & (b < BITS)
    return tl.where(inside, a >> tl.where(inside, b, 0), 0 - (a < 0).to(a.dtype))


# Pairs of values, and of states of a reduction.
@triton.jit
def add(a, b):
    return a + b


@triton.jit
def multiply(a, b):
    return a * b


@triton.jit
def either(a, b):
    return a | b


@triton.jit
def both(a, b):
    return a & b


@triton.jit
def maximum(a, b):
    return tl.where((a > b) | (a != a), a, b)


@triton.jit
def minimum(a, b):
    return tl.where((a < b) | (a != a), a, b)


@triton.jit
def first_maximum(a, i, b, j):
    # NaN is the largest; of equal values the one with the smaller index.
    more = (a == a) & ((b != b) | (b > a))
    same = ((a != a) & (b != b)) | (a == b)
    take = more | (same & (j < i))
    return tl.where(take, b, a), tl.where(take, j, i)


@triton.jit
def first_minimum(a, i, b, j):
    less = (a == a) & ((b != b) | (b < a))
    same = ((a != a) & (b != b)) | (a == b)
    take = less | (same & (j < i))
    return tl.where(take, b, a), tl.where(take, j, i)


@triton.jit
def moments(mean, m2, count, other_mean, other_m2, other_count):
    # Mean, sum of squared differences from it, count (Chan et al. 1979).
    n = count + other_count
    share = other_count / tl.where(n == 0, 1.0, n)
    delta = other_mean - mean
    first = count == 0
    more = tl.where(first, other_mean - other_mean, delta * delta * count * share)  # of infinities NaN
    mean = tl.where(first, other_mean, tl.where(other_count == 0, mean, mean + delta * share))
    return mean, m2 + other_m2 + more, n


@triton.jit
def softmax_sum(top, part, other_top, other_part):
    # Maximum, sum of exp(x - maximum) (Milakov and Gimelshein 2018).
    m = tl.where((top > other_top) | (top != top), top, other_top)
    finite = m != float("inf")
    part = tl.where((top == m) & finite, part, part * libdevice.exp(top - m))
    other_part = tl.where((other_top == m) & finite, other_part, other_part * libdevice.exp(other_top - m))
    return m, part + other_part
)py";
}

}  // namespace kiln::codegen
