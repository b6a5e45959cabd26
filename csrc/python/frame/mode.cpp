#include "python/frame/mode.h"

#include <vector>

namespace kiln::frame {

ConfigPtr intern_config(Config config) {
  if (config.alone) return std::make_shared<const Config>(std::move(config));
  // Weak: a backend that nothing compiles with any more can go.
  static auto* known = new std::vector<std::weak_ptr<const Config>>();
  std::erase_if(*known, [](const auto& w) { return w.expired(); });
  for (const auto& w : *known) {
    ConfigPtr c = w.lock();
    if (c->backend.get() == config.backend.get() && c->fullgraph == config.fullgraph && c->dynamic == config.dynamic &&
        c->options == config.options)
      return c;
  }
  auto made = std::make_shared<const Config>(std::move(config));
  known->push_back(made);
  return made;
}

Mode& mode() {
  thread_local Mode m;
  return m;
}

OptionScope::OptionScope(const Config& config) {
  for (const auto& [name, value] : config.options) {
    before_.emplace(name, get_option(name));
    set_option(name, value);
  }
}

OptionScope::~OptionScope() {
  for (const auto& [name, value] : before_) set_option(name, value);
}

}  // namespace kiln::frame
