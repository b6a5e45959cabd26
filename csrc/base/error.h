#pragma once
#include <stdexcept>
#include <string>

// Three kinds of failure, never mixed: the user's mistake, a program kiln refuses (it runs in eager instead), and a
// bug of kiln's own. Nothing that a user's program can reach aborts the process.
namespace kiln {

/// The caller did something wrong (bad option, bad backend). Surfaces as a Python exception with this message.
class UserError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// kiln cannot compile this; the part runs in eager. `reason` becomes the graph break's or fallback's message.
class Unsupported : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The program has still to do what is done once in a process: this call runs in eager as a whole, the next is
/// compiled.
class NotYet : public Unsupported {
 public:
  using Unsupported::Unsupported;
};

/// A broken invariant inside kiln. Falls back to eager with one warning, or raises under KILN_STRICT=1.
class InternalError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Throws InternalError with the place and the failed condition.
[[noreturn]] void fail_check(const char* file, int line, const char* condition, const std::string& message);

}  // namespace kiln

/// Checks an invariant of kiln's own; `message` is any expression convertible to std::string, built only on failure.
#define KILN_CHECK(condition, message)                             \
  do {                                                             \
    if (!(condition)) [[unlikely]]                                 \
      ::kiln::fail_check(__FILE__, __LINE__, #condition, message); \
  } while (0)
