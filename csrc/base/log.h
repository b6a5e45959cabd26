#pragma once
#include <functional>
#include <string>
#include <string_view>

// Artifact logs: KILN_LOGS=graph,guards,... switches topics on; each topic prints whole texts, not debug lines.
namespace kiln {

#define KILN_LOG_TOPICS(X)                                                                    \
  X(graph, "captured torch-level graphs")                                                     \
  X(bytecode, "original and modified bytecode")                                               \
  X(guards, "guards of each compiled entry")                                                  \
  X(recompiles, "which guard failed and caused a recompile")                                  \
  X(graph_breaks, "graph breaks with the user's stack, cause and hint")                       \
  X(aot, "joint, forward and backward graphs")                                                \
  X(loops, "loop-level IR before and after scheduling")                                       \
  X(output_code, "kernels as C++ (or Triton) source, and the artifact's steps")               \
  X(llvm_ir, "kernels as LLVM has optimized them")                                            \
  X(compiled_autograd, "backwards under kiln.compiled_autograd, and why others run in eager") \
  X(timing, "time of every stage and pass")                                                   \
  X(step_times, "time of each step of an artifact, after 10, 100, .. calls")                  \
  X(bisect, "functions, graphs and kernels, numbered as bisect counts them")                  \
  X(fallback, "ops that run as ATen calls, shapes from Meta kernels, and other quiet fallbacks")

enum class Topic {
#define KILN_X(name, help) name,
  KILN_LOG_TOPICS(KILN_X)
#undef KILN_X
};

bool log_enabled(Topic topic);
/// Switches topics by a comma-separated list ("" for none). Throws UserError for an unknown topic.
void set_logs(std::string_view topics);
/// Prints `text` under the topic's heading if the topic is on.
void log_artifact(Topic topic, std::string_view heading, const std::string& text);
/// Replaces the sink (stderr by default); tests and Python's logging use it.
void set_log_sink(std::function<void(Topic, std::string_view heading, const std::string& text)> sink);
std::string_view topic_name(Topic topic);

}  // namespace kiln
