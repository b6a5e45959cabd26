#pragma once
#include <cstdint>
#include <string>
#include <variant>
#include <vector>

namespace kiln {

/// Every option of kiln, one member a row of options.def; the defaults are overridden by the environment at load.
struct Options {
#define KILN_OPTION(type, name, default_value, env, help) type name = default_value;
#include "base/options.def"
#undef KILN_OPTION
};

/// The process's options. Written only under the GIL (kiln.config) or before threads start.
Options& options();

using OptionValue = std::variant<bool, int64_t, std::string>;
struct OptionInfo {
  std::string name, env, help, type;
  OptionValue default_value;
};
/// The table's rows, in order.
const std::vector<OptionInfo>& option_table();
/// Reads or writes an option by name. Throws UserError for an unknown name or a value of another type.
OptionValue get_option(const std::string& name);
void set_option(const std::string& name, const OptionValue& value);
/// True if `pass` is listed in disable_passes.
bool pass_disabled(const std::string& pass);

}  // namespace kiln
