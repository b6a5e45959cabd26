#include "base/log.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>

#include "base/error.h"

namespace kiln {
namespace {

constexpr std::string_view kNames[] = {
#define KILN_X(name, help) #name,
    KILN_LOG_TOPICS(KILN_X)
#undef KILN_X
};

uint32_t parse(std::string_view list) {
  uint32_t mask = 0;
  while (!list.empty()) {
    const size_t end = std::min(list.find(','), list.size());
    const std::string_view word = list.substr(0, end);
    list.remove_prefix(std::min(end + 1, list.size()));
    if (word.empty()) continue;
    bool found = false;
    for (size_t i = 0; i < std::size(kNames); ++i)
      if (kNames[i] == word) mask |= 1u << i, found = true;
    if (!found) throw UserError("KILN_LOGS has no topic '" + std::string(word) + "'");
  }
  return mask;
}

std::atomic<uint32_t>& mask() {
  static std::atomic<uint32_t> m = [] {
    const char* env = std::getenv("KILN_LOGS");
    try {
      return env ? parse(env) : 0u;
    } catch (const UserError& e) {
      std::fprintf(stderr, "kiln: %s\n", e.what());
      return 0u;
    }
  }();
  return m;
}

std::function<void(Topic, std::string_view, const std::string&)>& sink() {
  static std::function<void(Topic, std::string_view, const std::string&)> s;
  return s;
}

}  // namespace

bool log_enabled(Topic topic) { return mask().load(std::memory_order_relaxed) >> static_cast<int>(topic) & 1; }
void set_logs(std::string_view topics) { mask() = parse(topics); }
std::string_view topic_name(Topic topic) { return kNames[static_cast<size_t>(topic)]; }
void set_log_sink(std::function<void(Topic, std::string_view, const std::string&)> s) { sink() = std::move(s); }

void log_artifact(Topic topic, std::string_view heading, const std::string& text) {
  if (!log_enabled(topic)) return;
  if (sink()) return sink()(topic, heading, text);
  std::fprintf(stderr, "[kiln:%s] %.*s\n%s\n", std::string(topic_name(topic)).c_str(), static_cast<int>(heading.size()),
               heading.data(), text.c_str());
}

}  // namespace kiln
