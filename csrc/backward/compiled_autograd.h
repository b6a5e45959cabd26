#pragma once
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>

#include "backward/call.h"
#include "backward/trace.h"

// Compiled autograd: the whole of a backward, whatever made its nodes, as one graph at run time.
namespace kiln::backward {

/// What the layer that knows Python does for it.
class Frontend {
 public:
  virtual ~Frontend() = default;
  /// Calls `body` with the GIL held.
  virtual void hold_gil(const std::function<void()>& body) = 0;
  /// Calls `body` with an object that PyTorch's nodes can call for `tracer` (see Tracer::run).
  virtual void with_compiler(Tracer& tracer, const std::function<void(PyObject*)>& body) = 0;
  /// A compiled backward: takes the tensors and hooks of a call, returns the captured gradients.
  using Compiled = std::function<variable_list(Call& call)>;
  virtual Compiled compile(const graph::Graph& g, const Call& call) = 0;
  virtual void warn(const std::string& message) = 0;
};

/// The backwards that one compiler has compiled. Its members take the GIL.
class Session {
 public:
  explicit Session(std::shared_ptr<Frontend> frontend) : frontend_(std::move(frontend)) {}
  /// Runs a backward: compiled, or in eager where it cannot be, which is said once for each reason.
  variable_list run(const std::vector<Turn>& turns, GraphTask& task, const edge_list& outputs);
  /// How many different ones were compiled.
  size_t size() const { return size_; }

 private:
  struct Entry {
    Frontend::Compiled compiled;
    ReturnedByTurn returned;              // of the functions that must be seen
    DifferentiatedByTurn differentiated;  // of compiled functions
    bool seen = false;
    bool refused = false;
  };
  /// The entry of a backward that can be compiled, or null.
  Entry* find(const std::vector<Turn>& turns, const GraphTask& task, const edge_list& outputs, Call& call);
  void compile(Entry& entry, Call& call, const std::vector<Turn>& turns, size_t num_outputs);
  void say(const std::string& why);

  std::shared_ptr<Frontend> frontend_;
  std::unordered_map<std::string, Entry> entries_;  // by Call::key
  std::unordered_map<std::string, int64_t> kinds_;  // by Call::structure: how many entries
  std::unordered_set<std::string> said_;
  size_t size_ = 0;
  bool busy_ = false;  // nodes may hold fakes
};

/// From now on all backwards of the process go to `session`; null: to PyTorch's engine. Returns the one before.
std::shared_ptr<Session> set_session(std::shared_ptr<Session> session);

}  // namespace kiln::backward
