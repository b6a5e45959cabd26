#pragma once
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

namespace kiln {

/// What this process has made, by a text that says all of how it was made; kept as long as somebody uses it.
/// Thread-safe. Two threads may make the same thing at once; the later one is kept.
template <class T>
class WeakMap {
 public:
  std::shared_ptr<T> find(const std::string& key) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto it = entries_.find(key);
    return it == entries_.end() ? nullptr : it->second.lock();
  }

  void keep(const std::string& key, const std::shared_ptr<T>& made) {
    const std::lock_guard<std::mutex> lock(mutex_);
    entries_[key] = made;
    if (entries_.size() < sweep_at_) return;
    std::erase_if(entries_, [](const auto& e) { return e.second.expired(); });
    sweep_at_ = 2 * entries_.size() + kFewest;
  }

 private:
  static constexpr size_t kFewest = 1024;
  mutable std::mutex mutex_;
  std::unordered_map<std::string, std::weak_ptr<T>> entries_;  // guarded by mutex_
  size_t sweep_at_ = kFewest;                                  // guarded by mutex_: entries at which dead ones go
};

}  // namespace kiln
