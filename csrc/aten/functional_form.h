#pragma once
#include <ATen/core/dispatch/Dispatcher.h>

#include <string>
#include <vector>

// Operators from elsewhere (torch.library) that write to their arguments. PyTorch's functionalization knows only ATen's
// own in-place operators, so these get a form of kiln's that writes to nothing.
namespace kiln::aten {

/// Gives `op`, which writes to arguments, a functional form: an operator kiln_functional::ns__name.overload with the
/// same arguments, which runs `op` on clones of what it writes to and returns op's fresh results followed by the
/// clones. Returns why there can be none, or an empty string. Once per operator; thread-safe.
std::string make_functional_form(const c10::OperatorHandle& op);

/// While it lives, functionalization puts the functional forms that were made into the place of their operators. They
/// are not left registered: others ask the dispatcher which operators have a kernel there.
class FunctionalForms {
 public:
  FunctionalForms();
  FunctionalForms(const FunctionalForms&) = delete;
  FunctionalForms& operator=(const FunctionalForms&) = delete;

 private:
  std::vector<c10::RegistrationHandleRAII> kernels_;
};

}  // namespace kiln::aten
