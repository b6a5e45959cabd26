#include "python/frame/expected_jumps.h"

#include <algorithm>

#include "python/frame/cache.h"
#include "python/frame/resume.h"

namespace kiln::frame {

namespace {
/// In so many calls a jump goes one way before it is expected to go on like this; if it went the other way before, too.
/// (A loop that data ends goes both ways in each.)
constexpr int64_t kOften = 8, kOftenAgain = 32;

/// The instruction's place in the code that a resume function's is a part of.
std::pair<PyCodeObject*, int> original(PyCodeObject* code, int at) {
  const CodeInfo* info = find_code_info(code);
  if (!info || !info->resume) return {code, at};
  const auto& copies = info->resume->copies;
  const auto copy = std::find_if(copies.begin(), copies.end(), [&](const auto& c) { return c.first == at; });
  if (copy == copies.end() || copy->second < 0) return {nullptr, -1};
  return {reinterpret_cast<PyCodeObject*>(info->resume->original.get()), copy->second};
}
}  // namespace

JumpSite jump_site(PyCodeObject* code, int at, PyCodeObject* owner) {
  const auto [in, place] = original(code, at);
  if (!in) return {};
  const CodeInfo* info = find_code_info(owner);
  const bool own =
      in == owner || (info && info->resume && info->resume->original.get() == reinterpret_cast<PyObject*>(in));
  return {in, place, own ? py::Ref() : py::Ref::borrow(reinterpret_cast<PyObject*>(in))};
}

std::optional<bool> expected_jump(PyCodeObject* code, int at) {
  const auto [in, place] = original(code, at);
  const CodeInfo* info = in ? find_code_info(in) : nullptr;
  if (!info) return std::nullopt;
  const auto it = info->jumps.find(place);
  if (it == info->jumps.end()) return std::nullopt;
  const JumpHistory& seen = it->second;
  if (seen.varies || seen.calls < (seen.both ? kOftenAgain : kOften)) return std::nullopt;
  return seen.jumped;
}

void note_jump(const JumpSite& site, PyCodeObject* resumed, int64_t call) {
  CodeInfo* info = code_info(site.code);
  const CodeInfo* to = find_code_info(resumed);
  if (!info || !to || !to->resume) return;
  JumpHistory& seen = info->jumps[site.at];
  const bool jumped = to->resume->offset != site.at + 1;
  const bool turned = seen.call >= 0 && jumped != seen.jumped;
  if (turned) seen.both = true, seen.calls = 0;
  if (!turned && call != seen.call) ++seen.calls;
  seen.jumped = jumped;
  seen.call = call;
}

void note_varying(const std::vector<JumpSite>& sites) {
  for (const JumpSite& site : sites)
    if (CodeInfo* info = code_info(site.code)) info->jumps[site.at].varies = true;
}

}  // namespace kiln::frame
