#include "runtime/disk_cache.h"

#include <sqlite3.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <functional>
#include <mutex>
#include <sstream>
#include <utility>

#include "base/log.h"
#include "base/options.h"

namespace kiln::runtime {
namespace {

using codegen::StoredObject;

constexpr int kFormat = 1;  // of the table; another one's is dropped
constexpr int64_t kDay = 24 * 60 * 60;

/// $KILN_CACHE_DIR, $XDG_CACHE_HOME/kiln or ~/.cache/kiln; empty without a home.
std::filesystem::path folder() {
  if (const std::string& set = options().cache_dir; !set.empty()) return set;
  if (const char* xdg = std::getenv("XDG_CACHE_HOME"); xdg && *xdg == '/') return std::filesystem::path(xdg) / "kiln";
  const char* home = std::getenv("HOME");
  return home && *home == '/' ? std::filesystem::path(home) / ".cache" / "kiln" : std::filesystem::path();
}

/// Makes the folder. False if it cannot be, or if others than the user could place code in it.
bool is_private(const std::filesystem::path& dir) {
  std::error_code error;
  if (!std::filesystem::exists(dir, error)) {
    std::filesystem::create_directories(dir.parent_path(), error);
    if (::mkdir(dir.c_str(), 0700) != 0 && errno != EEXIST) return false;
  }
  struct stat info;
  return ::stat(dir.c_str(), &info) == 0 && S_ISDIR(info.st_mode) && info.st_uid == ::geteuid() &&
         (info.st_mode & 0022) == 0;
}

struct Failure {
  std::string what;
  bool damaged = false;  // the file is no database, or a broken one
  explicit Failure(std::string text) : what(std::move(text)) {}
  explicit Failure(sqlite3* db) : what(sqlite3_errmsg(db)) {
    const int code = sqlite3_errcode(db);
    damaged = code == SQLITE_CORRUPT || code == SQLITE_NOTADB;
  }
};

/// A prepared statement.
class Statement {
 public:
  Statement(sqlite3* db, const char* sql) : db_(db) {
    if (sqlite3_prepare_v2(db, sql, -1, &statement_, nullptr) != SQLITE_OK) throw Failure(db);
  }
  ~Statement() { sqlite3_finalize(statement_); }
  Statement(const Statement&) = delete;
  Statement& operator=(const Statement&) = delete;

  // The texts live until the statement is stepped.
  Statement& bind(int at, const std::string& text) {
    sqlite3_bind_blob64(statement_, at, text.data(), text.size(), SQLITE_STATIC);
    return *this;
  }
  Statement& bind(int at, int64_t number) {
    sqlite3_bind_int64(statement_, at, number);
    return *this;
  }
  /// True for a row, false at the end.
  bool step() {
    const int code = sqlite3_step(statement_);
    if (code == SQLITE_ROW) return true;
    if (code != SQLITE_DONE) throw Failure(db_);
    sqlite3_reset(statement_);
    return false;
  }
  void reset() { sqlite3_reset(statement_); }
  std::string text(int column) const {
    const auto* data = static_cast<const char*>(sqlite3_column_blob(statement_, column));
    return data ? std::string(data, sqlite3_column_bytes(statement_, column)) : std::string();
  }
  int64_t number(int column) const { return sqlite3_column_int64(statement_, column); }

 private:
  sqlite3* db_;
  sqlite3_stmt* statement_ = nullptr;
};

class DiskCache final : public codegen::ObjectStore {
 public:
  /// Throws Failure.
  explicit DiskCache(std::filesystem::path path) : path_(std::move(path)) {
    try {
      open();
    } catch (const Failure& e) {
      if (!e.damaged) throw;
      remove_files();
      open();
    }
  }

  std::vector<StoredObject> find(const std::vector<std::string>& keys) override {
    std::vector<StoredObject> out;
    guarded([&] {
      std::vector<std::string> old;  // used again after long
      const int64_t now = std::time(nullptr);
      Statement select(db_, "SELECT code, externals, checksum, used FROM kernels WHERE key = ?");
      for (const std::string& key : keys) {
        select.bind(1, key);
        if (!select.step()) continue;
        StoredObject o{key, select.text(0), {}, static_cast<uint64_t>(select.number(2))};
        std::istringstream names(select.text(1));
        for (std::string name; std::getline(names, name);) o.externals.push_back(name);
        if (select.number(3) < now - kDay) old.push_back(key);
        select.reset();
        out.push_back(std::move(o));
      }
      if (old.empty()) return;
      run("BEGIN IMMEDIATE");
      Statement touch(db_, "UPDATE kernels SET used = ? WHERE key = ?");
      for (const std::string& key : old) touch.bind(1, now).bind(2, key).step();
      run("COMMIT");
    });
    return out;
  }

  void keep(const std::vector<StoredObject>& objects) override {
    guarded([&] {
      run("BEGIN IMMEDIATE");
      Statement insert(db_, "INSERT OR REPLACE INTO kernels VALUES (?, ?, ?, ?, ?)");
      for (const StoredObject& o : objects) {
        std::string names;
        for (const std::string& e : o.externals) names += e + "\n";
        insert.bind(1, o.key).bind(2, o.code).bind(3, names).bind(4, static_cast<int64_t>(o.checksum));
        insert.bind(5, static_cast<int64_t>(std::time(nullptr))).step();
      }
      // Those that were not used for the longest time make room.
      const int64_t most = options().disk_cache_mb * (1 << 20) / number("PRAGMA page_size");
      if (number("PRAGMA page_count") - number("PRAGMA freelist_count") > most)
        run("DELETE FROM kernels WHERE rowid IN "
            "(SELECT rowid FROM kernels ORDER BY used LIMIT (SELECT count(*) / 2 FROM kernels))");
      run("COMMIT");
    });
  }

  DiskCacheInfo info() {
    DiskCacheInfo out{path_.string()};
    guarded([&] {
      out.kernels = number("SELECT count(*) FROM kernels");
      out.bytes = number("PRAGMA page_count") * number("PRAGMA page_size");
    });
    return out;
  }

  bool clear() {
    return guarded([&] {
      sqlite3_close(std::exchange(db_, nullptr));
      remove_files();
      open();
    });
  }

 private:
  void open() {
    try {
      if (sqlite3_open_v2(path_.c_str(), &db_, SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE, nullptr) != SQLITE_OK)
        throw db_ ? Failure(db_) : Failure("out of memory");
      sqlite3_busy_timeout(db_, 200);
      run("PRAGMA journal_mode = WAL");  // readers and the writer do not wait for each other
      run("PRAGMA synchronous = NORMAL");
      if (number("PRAGMA user_version") == kFormat) return;
      run("BEGIN IMMEDIATE");
      if (number("PRAGMA user_version") != kFormat) {  // another process may have been first
        run("DROP TABLE IF EXISTS kernels");
        run("CREATE TABLE kernels (key BLOB PRIMARY KEY, code BLOB, externals BLOB, checksum INTEGER, used INTEGER)");
        run(("PRAGMA user_version = " + std::to_string(kFormat)).c_str());
      }
      run("COMMIT");
    } catch (...) {
      sqlite3_close(std::exchange(db_, nullptr));
      throw;
    }
  }
  void remove_files() const {
    for (const char* end : {"", "-wal", "-shm"}) {
      std::error_code ignored;
      std::filesystem::remove(path_.string() + end, ignored);
    }
  }
  /// Runs f alone. What fails is undone and logged: the cache is a help, and no reason to stop.
  bool guarded(const std::function<void()>& f) {
    const std::lock_guard<std::mutex> lock(mutex_);
    try {
      if (!db_) return false;
      f();
      return true;
    } catch (const Failure& e) {
      if (db_ && !sqlite3_get_autocommit(db_)) sqlite3_exec(db_, "ROLLBACK", nullptr, nullptr, nullptr);
      log_artifact(Topic::fallback, "disk cache " + path_.string(), e.what + "\n");
      return false;
    }
  }
  void run(const char* sql) {
    Statement s(db_, sql);
    while (s.step()) {
    }
  }
  int64_t number(const char* sql) {
    Statement s(db_, sql);
    return s.step() ? s.number(0) : 0;
  }

  std::filesystem::path path_;
  std::mutex mutex_;
  sqlite3* db_ = nullptr;  // under mutex_; never closed at the end, and a forked process must not touch it
};

DiskCache* open_cache() {
  if (!options().disk_cache) return nullptr;
  struct Opened {
    std::filesystem::path dir;
    pid_t process = 0;
    DiskCache* cache = nullptr;
  };
  static auto* mutex = new std::mutex;
  static Opened opened;
  const std::filesystem::path dir = folder();
  const std::lock_guard<std::mutex> lock(*mutex);
  if (opened.process == ::getpid() && opened.dir == dir) return opened.cache;
  opened = {dir, ::getpid(), nullptr};
  if (dir.empty()) return nullptr;
  try {
    if (!is_private(dir)) throw Failure("is no folder that its user alone may write to");
    opened.cache = new DiskCache(dir / "kernels.sqlite");
  } catch (const Failure& e) {
    log_artifact(Topic::fallback, "disk cache " + dir.string(), e.what + "\n");
  }
  return opened.cache;
}

}  // namespace

codegen::ObjectStore* disk_cache() { return open_cache(); }

DiskCacheInfo disk_cache_info() {
  DiskCache* cache = open_cache();
  return cache ? cache->info() : DiskCacheInfo{};
}

bool clear_disk_cache() {
  DiskCache* cache = open_cache();
  return cache && cache->clear();
}

}  // namespace kiln::runtime
