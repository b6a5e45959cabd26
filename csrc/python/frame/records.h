#pragma once
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/timer.h"
#include "python/capture/capture.h"

namespace kiln::frame {

/// What kiln.explain and reports show of one compile. Texts only.
struct Record {
  std::string function, file;
  int line = 0;
  std::string graph;             // torch level; empty if the region has no tensor op
  std::vector<std::string> ops;  // its operators in order
  std::vector<std::string> guards;
  bool has_break = false;
  capture::BreakReason reason;
  std::vector<StageTime> stages;
  std::vector<std::string> aten;  // traced graph
  std::string bytecode;           // original and modified, for a break
  std::string artifact;
  std::vector<std::string> dot;
};
/// A copy of a capture's torch-level graph that names what it calls as the user would: `torch.relu`, `operator.mul`.
std::shared_ptr<graph::Graph> with_names(const graph::Graph& torch_level, const std::vector<py::Ref>& targets);
bool recording();
void set_recording(bool on);
void add_record(Record record);
/// All records since the last call.
std::vector<Record> take_records();

}  // namespace kiln::frame
