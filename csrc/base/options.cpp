#include "base/options.h"

#include <cstdlib>
#include <type_traits>

#include "base/error.h"

namespace kiln {
namespace {

void read_env(const char* env, bool& out) {
  if (const char* v = std::getenv(env)) out = *v != '\0' && std::string(v) != "0" && std::string(v) != "false";
}
void read_env(const char* env, int64_t& out) {
  const char* v = std::getenv(env);
  if (!v) return;
  char* end = nullptr;
  const long long n = std::strtoll(v, &end, 10);
  if (end != v && *end == '\0') out = n;
}
void read_env(const char* env, std::string& out) {
  if (const char* v = std::getenv(env)) out = v;
}

Options from_environment() {
  Options o;
#define KILN_OPTION(type, name, default_value, env, help) read_env(env, o.name);
#include "base/options.def"
#undef KILN_OPTION
  return o;
}

template <class T>
const char* type_text() {
  if constexpr (std::is_same_v<T, bool>) return "bool";
  if constexpr (std::is_same_v<T, int64_t>) return "int";
  return "str";
}

template <class T>
void assign(T& slot, const OptionValue& value, const std::string& name) {
  if (const T* v = std::get_if<T>(&value)) {
    slot = *v;
    return;
  }
  throw UserError("option '" + name + "' takes a value of type " + type_text<T>());
}

}  // namespace

Options& options() {
  static Options o = from_environment();
  return o;
}

const std::vector<OptionInfo>& option_table() {
  static const std::vector<OptionInfo> table = {
#define KILN_OPTION(type, name, default_value, env, help) \
  {#name, env, help, type_text<type>(), OptionValue(type(default_value))},
#include "base/options.def"
#undef KILN_OPTION
  };
  return table;
}

OptionValue get_option(const std::string& name) {
  Options& o = options();
#define KILN_OPTION(type, field, default_value, env, help) \
  if (name == #field) return OptionValue(o.field);
#include "base/options.def"
#undef KILN_OPTION
  throw UserError("kiln has no option '" + name + "'; docs/options.md lists them");
}

void set_option(const std::string& name, const OptionValue& value) {
  Options& o = options();
#define KILN_OPTION(type, field, default_value, env, help) \
  if (name == #field) return assign<type>(o.field, value, name);
#include "base/options.def"
#undef KILN_OPTION
  throw UserError("kiln has no option '" + name + "'; docs/options.md lists them");
}

bool pass_disabled(const std::string& pass) {
  const std::string& list = options().disable_passes;
  for (size_t at = 0; at < list.size();) {
    size_t end = list.find(',', at);
    if (end == std::string::npos) end = list.size();
    if (list.compare(at, end - at, pass) == 0 && end - at == pass.size()) return true;
    at = end + 1;
  }
  return false;
}

}  // namespace kiln
