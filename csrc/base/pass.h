#pragma once
#include <functional>
#include <string>

namespace kiln {

/// What the pass wrapper needs of an IR: a printer for dumps, and a verifier that throws InternalError.
struct PassHooks {
  std::function<std::string()> print;
  std::function<void()> verify;
};

/// Runs one pass: skipped if its name is in options().disable_passes, timed, verified (options().verify), dumped to
/// options().dump_dir when it changed the text. On a failed verification the text from before goes to stderr.
/// `pass` returns true if it changed the IR. Returns what `pass` returned (false if skipped).
bool run_pass(const std::string& name, const PassHooks& hooks, const std::function<bool()>& pass);

/// Whether to make a choice that is named and switched off as a pass is, but made within a stage.
bool pass_enabled(const std::string& name);

}  // namespace kiln
