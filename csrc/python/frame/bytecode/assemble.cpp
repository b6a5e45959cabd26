#include <algorithm>

#include "base/error.h"
#include "python/cpython/py311.h"
#include "python/frame/bytecode/code.h"

namespace kiln::frame::bytecode {
namespace {

int units_for(int arg) { return arg > 0xffffff ? 4 : arg > 0xffff ? 3 : arg > 0xff ? 2 : 1; }

/// Writes co_linetable in its long form.
class LineWriter {
 public:
  explicit LineWriter(int firstline) : line_(firstline) {}
  void add(const Location& l, int units) {
    for (; units > 0; units -= 8) entry(l, std::min(units, 8));
  }
  const std::string& bytes() const { return out_; }

 private:
  void varint(unsigned v) {
    while (v >= 64) {
      out_.push_back(static_cast<char>(64 | (v & 63)));
      v >>= 6;
    }
    out_.push_back(static_cast<char>(v));
  }
  void signed_varint(int v) { varint(v < 0 ? (static_cast<unsigned>(-v) << 1) | 1 : static_cast<unsigned>(v) << 1); }
  void entry(const Location& l, int units) {
    const bool columns = l.column >= 0 && l.end_column >= 0 && l.end_line >= l.line;
    const int kind = l.line < 0 ? 15 : columns ? 14 : 13;
    out_.push_back(static_cast<char>(0x80 | (kind << 3) | (units - 1)));
    if (kind == 15) return;
    signed_varint(l.line - line_);
    line_ = l.line;
    if (kind == 13) return;
    varint(static_cast<unsigned>(l.end_line - l.line));
    varint(static_cast<unsigned>(l.column + 1));
    varint(static_cast<unsigned>(l.end_column + 1));
  }
  int line_;
  std::string out_;
};

void exception_varint(std::string& out, unsigned v, int start_bit) {
  // Most significant six bits first.
  int groups = 1;
  while (groups < 6 && (v >> (6 * groups))) ++groups;
  for (int g = groups - 1; g >= 0; --g) {
    int b = static_cast<int>((v >> (6 * g)) & 63) | (g ? 64 : 0);
    if (g == groups - 1) b |= start_bit;
    out.push_back(static_cast<char>(b));
  }
}

py::Ref tuple_of(const std::vector<py::Ref>& items) {
  py::Ref t = py::check(PyTuple_New(static_cast<Py_ssize_t>(items.size())));
  for (size_t i = 0; i < items.size(); ++i) PyTuple_SET_ITEM(t.get(), static_cast<Py_ssize_t>(i), items[i].new_ref());
  return t;
}

py::Ref bytes_of(const std::string& s) {
  return py::check(PyBytes_FromStringAndSize(s.data(), static_cast<Py_ssize_t>(s.size())));
}

}  // namespace

py::Ref assemble(const Body& body, const Frame& frame, std::vector<int>* offsets_out) {
  const auto& list = body.instructions;
  const int n = static_cast<int>(list.size());
  std::vector<int> args(static_cast<size_t>(n)), start(static_cast<size_t>(n) + 1);
  for (int i = 0; i < n; ++i) args[i] = list[i].target >= 0 ? 0 : list[i].arg;
  // Arguments of jumps depend on sizes, which depend on arguments: sizes only grow until nothing changes.
  std::vector<int> prefix(static_cast<size_t>(n));
  for (int i = 0; i < n; ++i) prefix[i] = units_for(args[i]) - 1;
  for (bool changed = true; changed;) {
    changed = false;
    int at = 0;
    for (int i = 0; i < n; ++i) {
      start[i] = at;
      at += prefix[i] + 1 + py311::cache_units(list[i].opcode);
    }
    start[n] = at;
    for (int i = 0; i < n; ++i) {
      if (list[i].target < 0) continue;
      KILN_CHECK(list[i].target < n, "a jump's target does not exist");
      const int next = start[i] + prefix[i] + 1 + py311::cache_units(list[i].opcode);
      const int distance = start[list[i].target] - next;
      args[i] = is_backward_jump(list[i].opcode) ? -distance : distance;
      KILN_CHECK(args[i] >= 0, "a jump goes in the wrong direction");
      if (units_for(args[i]) - 1 > prefix[i]) {
        prefix[i] = units_for(args[i]) - 1;
        changed = true;
      }
    }
  }
  std::string code;
  LineWriter lines(frame.firstline);
  if (offsets_out) offsets_out->clear();
  for (int i = 0; i < n; ++i) {
    if (offsets_out) offsets_out->push_back(start[i] + prefix[i]);
    for (int k = prefix[i]; k > 0; --k) {
      code.push_back(static_cast<char>(EXTENDED_ARG));
      code.push_back(static_cast<char>((args[i] >> (8 * k)) & 0xff));
    }
    code.push_back(static_cast<char>(list[i].opcode));
    code.push_back(static_cast<char>(args[i] & 0xff));
    code.append(static_cast<size_t>(2 * py311::cache_units(list[i].opcode)), '\0');
    lines.add(list[i].location, start[i + 1] - start[i]);
  }
  std::vector<Handler> handlers = body.handlers;
  std::sort(handlers.begin(), handlers.end(), [](const Handler& a, const Handler& b) { return a.start < b.start; });
  std::string table;
  for (const Handler& h : handlers) {
    if (h.start >= h.end) continue;
    exception_varint(table, static_cast<unsigned>(start[h.start]), 0x80);
    exception_varint(table, static_cast<unsigned>(start[h.end] - start[h.start]), 0);
    exception_varint(table, static_cast<unsigned>(start[h.target]), 0);
    exception_varint(table, static_cast<unsigned>(h.depth << 1 | (h.lasti ? 1 : 0)), 0);
  }
  py::Ref bytes = bytes_of(code), linetable = bytes_of(lines.bytes()), exceptions = bytes_of(table);
  py::Ref varnames = tuple_of(frame.varnames), cellvars = tuple_of(frame.cellvars), freevars = tuple_of(frame.freevars);
  return py::check(reinterpret_cast<PyObject*>(PyCode_NewWithPosOnlyArgs(
      frame.argcount, 0, 0, static_cast<int>(frame.varnames.size()), frame.stacksize, frame.flags, bytes.get(),
      frame.consts.get(), frame.names.get(), varnames.get(), freevars.get(), cellvars.get(), frame.filename.get(),
      frame.name.get(), frame.qualname.get(), frame.firstline, linetable.get(), exceptions.get())));
}

std::string disassemble(PyObject* code) {
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  std::string text = "<no disassembly>\n";
  py::Ref dis = py::Ref::steal(py::import_module("dis"));
  py::Ref bytecode = dis ? py::Ref::steal(PyObject_CallMethod(dis.get(), "Bytecode", "O", code)) : py::Ref();
  py::Ref out = bytecode ? py::Ref::steal(PyObject_CallMethod(bytecode.get(), "dis", nullptr)) : py::Ref();
  if (const char* utf8 = out ? PyUnicode_AsUTF8(out.get()) : nullptr) text = utf8;
  PyErr_Clear();
  PyErr_Restore(type, value, traceback);
  return text;
}

}  // namespace kiln::frame::bytecode
