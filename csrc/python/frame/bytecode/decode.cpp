#include "base/error.h"
#include "python/cpython/py311.h"
#include "python/frame/bytecode/code.h"

namespace kiln::frame::bytecode {
namespace {

/// Reads co_linetable: one Location per code unit.
class LineTable {
 public:
  LineTable(PyCodeObject* code, int units) : line_(code->co_firstlineno) {
    p_ = reinterpret_cast<const uint8_t*>(PyBytes_AS_STRING(code->co_linetable));
    end_ = p_ + PyBytes_GET_SIZE(code->co_linetable);
    locations_.reserve(static_cast<size_t>(units));
    while (p_ < end_) entry();
    locations_.resize(static_cast<size_t>(units));
  }
  const Location& at(int unit) const { return locations_[static_cast<size_t>(unit)]; }

 private:
  int byte() { return p_ < end_ ? *p_++ : 0; }
  int varint() {
    int value = 0, shift = 0, b;
    do {
      b = byte();
      value |= (b & 63) << shift;
      shift += 6;
    } while (b & 64);
    return value;
  }
  int signed_varint() {
    const int v = varint();
    return v & 1 ? -(v >> 1) : v >> 1;
  }
  void entry() {
    const int first = byte();
    const int kind = (first >> 3) & 15;
    const int length = (first & 7) + 1;
    Location l;
    if (kind == 15) {
      // no location
    } else if (kind == 14) {
      line_ += signed_varint();
      l.line = line_;
      l.end_line = line_ + varint();
      l.column = varint() - 1;
      l.end_column = varint() - 1;
    } else if (kind == 13) {
      line_ += signed_varint();
      l.line = l.end_line = line_;
    } else if (kind >= 10) {
      line_ += kind - 10;
      l.line = l.end_line = line_;
      l.column = byte();
      l.end_column = byte();
    } else {
      const int second = byte();
      l.line = l.end_line = line_;
      l.column = (kind << 3) | ((second >> 4) & 7);
      l.end_column = l.column + (second & 15);
    }
    locations_.insert(locations_.end(), static_cast<size_t>(length), l);
  }

  const uint8_t* p_;
  const uint8_t* end_;
  int line_;
  std::vector<Location> locations_;
};

int exception_varint(const uint8_t*& p) {
  int v = *p & 63;
  while (*p & 64) v = (v << 6) | (*++p & 63);
  ++p;
  return v;
}

}  // namespace

Body decode(PyCodeObject* code) {
  int units = 0;
  const uint8_t* bytes = py311::plain_code(code, &units);
  if (!bytes) throw py::PythonError{};
  const LineTable lines(code, units);
  Body body;
  std::vector<int> index(static_cast<size_t>(units) + 1, -1);  // of the instruction that a unit belongs to
  int extended = 0;
  for (int u = 0; u < units;) {
    const int opcode = bytes[2 * u];
    const int arg = bytes[2 * u + 1] | extended;
    const int id = static_cast<int>(body.instructions.size());
    index[u] = id;
    if (opcode == EXTENDED_ARG) {
      extended = arg << 8;
      ++u;
      continue;
    }
    Instruction i;
    i.opcode = opcode;
    i.arg = arg;
    i.offset = u;
    i.location = lines.at(u);
    body.instructions.push_back(i);
    const int next = u + 1 + py311::cache_units(opcode);
    KILN_CHECK(next <= units, "an instruction's caches reach beyond the code");
    for (int k = u + 1; k < next; ++k) index[k] = id;
    u = next;
    extended = 0;
  }
  index[units] = static_cast<int>(body.instructions.size());
  for (Instruction& i : body.instructions) {
    if (!is_jump(i.opcode)) continue;
    const int next = i.offset + 1 + py311::cache_units(i.opcode);
    const int to = is_backward_jump(i.opcode) ? next - i.arg : next + i.arg;
    KILN_CHECK(to >= 0 && to < units, "a jump leaves the code");
    i.target = index[to];
  }
  const auto* p = reinterpret_cast<const uint8_t*>(PyBytes_AS_STRING(code->co_exceptiontable));
  const uint8_t* end = p + PyBytes_GET_SIZE(code->co_exceptiontable);
  while (p < end) {
    Handler h;
    const int start = exception_varint(p);
    const int size = exception_varint(p);
    const int target = exception_varint(p);
    const int depth_lasti = exception_varint(p);
    KILN_CHECK(start + size <= units && target < units, "the exception table leaves the code");
    h.start = index[start];
    h.end = index[start + size];
    h.target = index[target];
    h.depth = depth_lasti >> 1;
    h.lasti = depth_lasti & 1;
    body.handlers.push_back(h);
  }
  return body;
}

int index_at(const Body& body, int offset) {
  for (size_t i = 0; i < body.instructions.size(); ++i) {
    const Instruction& in = body.instructions[i];
    // Prefixes stand before the instruction, caches behind it.
    if (in.offset >= 0 && offset <= in.offset + py311::cache_units(in.opcode)) return static_cast<int>(i);
  }
  return -1;
}

int append(Body& body, const Body& part) {
  const int base = static_cast<int>(body.instructions.size());
  for (Instruction i : part.instructions) {
    if (i.target >= 0) i.target += base;
    body.instructions.push_back(i);
  }
  for (Handler h : part.handlers) {
    h.start += base;
    h.end += base;
    h.target += base;
    body.handlers.push_back(h);
  }
  return base;
}

}  // namespace kiln::frame::bytecode
