#include "base/pass.h"

#include <atomic>
#include <cstdio>
#include <fstream>

#include "base/error.h"
#include "base/log.h"
#include "base/options.h"
#include "base/timer.h"

namespace kiln {

bool pass_enabled(const std::string& name) {
  if (log_enabled(Topic::bisect)) log_artifact(Topic::bisect, "bisect", "pass " + name);
  return !pass_disabled(name);
}

bool run_pass(const std::string& name, const PassHooks& hooks, const std::function<bool()>& pass) {
  if (!pass_enabled(name)) return false;
  const Options& o = options();
  KILN_CHECK(o.inject_failure.empty() || !name.starts_with(o.inject_failure), "injected into " + name);
  const bool keep_before = o.verify || !o.dump_dir.empty();
  const std::string before = keep_before && hooks.print ? hooks.print() : std::string();
  bool changed = false;
  {
    StageTimer timer(name);
    changed = pass();
  }
  if (o.verify && hooks.verify) {
    try {
      hooks.verify();
    } catch (const InternalError& e) {
      std::fprintf(stderr, "kiln: pass %s broke the IR; before it:\n%s\n", name.c_str(), before.c_str());
      throw InternalError("pass " + name + ": " + e.what());
    }
  }
  if (!o.dump_dir.empty() && hooks.print) {
    const std::string after = hooks.print();
    if (after != before) {
      static std::atomic<int> counter{0};
      char number[16];
      std::snprintf(number, sizeof number, "%04d", counter++);
      std::ofstream(o.dump_dir + "/" + number + "_" + name + ".txt") << after;
    }
  }
  return changed;
}

}  // namespace kiln
