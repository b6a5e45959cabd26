#include <ATen/core/LegacyTypeDispatch.h>

#include "aten/convert.h"
#include "aten/fake.h"
#include "python/bindings/bindings.h"

// Doors into single stages for tests: fakes, and what their fallback sees.
namespace kiln {
namespace {

/// Writes one line per op: name, then the results' sizes.
class LineObserver : public aten::FakeObserver {
 public:
  void called(const aten::OpInfo& op, c10::ArrayRef<c10::IValue> args, c10::ArrayRef<c10::IValue> results) override {
    std::ostringstream line;
    line << op.op.name();
    for (const c10::IValue& r : results)
      aten::for_each_tensor(r, [&](const at::Tensor& t) {
        if (t.defined())
          line << ' ' << t.sizes();
        else
          line << " none";
      });
    lines.push_back(line.str());
  }
  std::vector<std::string> lines;
};

/// Runs fn(*args) with tensors replaced by fakes and fakes made by factories; returns (result, lines).
pybind11::tuple run_on_fakes(const pybind11::function& fn, const pybind11::args& args) {
  pybind11::tuple fakes(args.size());
  for (size_t i = 0; i < args.size(); ++i) {
    if (THPVariable_Check(args[i].ptr()))
      fakes[i] = aten::make_fake(THPVariable_Unpack(args[i].ptr()));
    else
      fakes[i] = args[i];
  }
  LineObserver observer;
  pybind11::object result;
  {
    aten::FakeModeGuard mode;
    aten::FakeObserverGuard guard(&observer);
    result = fn(*fakes);
  }
  return pybind11::make_tuple(result, observer.lines);
}

}  // namespace
}  // namespace kiln

KILN_BINDINGS(debug_joint) {
  m.def("_make_fake", [](const at::Tensor& t) { return kiln::aten::make_fake(t); });
  m.def("_run_on_fakes", &kiln::run_on_fakes);
}
