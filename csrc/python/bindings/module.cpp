#include "base/error.h"
#include "python/bindings/bindings.h"
#include "python/frame/errors.h"
#include "runtime/compiled_function.h"

namespace kiln::bindings {
namespace {

std::vector<Init>& inits() {
  static std::vector<Init> list;
  return list;
}

}  // namespace

bool add_bindings(Init init) {
  inits().push_back(init);
  return true;
}

}  // namespace kiln::bindings

PYBIND11_MODULE(_C, m) {
  m.doc() = "kiln's C++ core.";
  pybind11::register_exception_translator([](std::exception_ptr p) {
    try {
      if (p) std::rethrow_exception(p);
    } catch (const kiln::UserError&) {
      kiln::frame::set_python_error(p);
    } catch (const kiln::Unsupported&) {
      kiln::frame::set_python_error(p);
    } catch (const kiln::InternalError&) {
      kiln::frame::set_python_error(p);
    } catch (const kiln::runtime::HookRaised&) {
      kiln::frame::set_python_error(p);
    }
  });
  for (kiln::bindings::Init init : kiln::bindings::inits()) init(m);
}
