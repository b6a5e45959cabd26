#include "runtime/epilogue_step.h"

#include <algorithm>
#include <mutex>

#include "runtime/parallel.h"

namespace kiln::runtime {

EpilogueStep::EpilogueStep(std::unique_ptr<Step> producer, std::shared_ptr<const KernelStep> kernel)
    : producer_(std::move(producer)), kernel_(std::move(kernel)) {
  const auto* rows = dynamic_cast<const RowsStep*>(producer_.get());
  if (rows && rows->row_length() > 0 && !kernel_->kernel().reads.first.empty()) rows_ = rows;
}

void EpilogueStep::run(Frame& frame) const {
  if (!rows_) {
    producer_->run(frame);
    kernel_->run(frame);
    return;
  }
  const codegen::UnitSpans& reads = kernel_->kernel().reads;
  const int64_t length = rows_->row_length();
  std::mutex mutex;
  std::vector<std::pair<int64_t, int64_t>> done;  // ranges of units
  rows_->run_rows(frame, [&](int64_t begin, int64_t end) {
    const auto first = std::lower_bound(reads.first.begin(), reads.first.end(), begin * length);
    const auto last = std::lower_bound(reads.last.begin(), reads.last.end(), end * length);
    const int64_t from = first - reads.first.begin(), to = last - reads.last.begin();
    if (from >= to) return;
    kernel_->run_units(frame, from, to, ScratchUser::Epilogue);
    const std::lock_guard<std::mutex> lock(mutex);
    done.push_back({from, to});
  });
  // Units that need rows of two blocks, and all if no rows were announced.
  std::sort(done.begin(), done.end());
  done.push_back({kernel_->kernel().units, 0});
  std::vector<std::pair<int64_t, int64_t>> left;
  int64_t at = 0;
  for (const auto& [from, to] : done) {
    if (at < from) left.push_back({at, from});
    at = to;
  }
  if (left.size() == 1) return kernel_->run_parallel_units(frame, left[0].first, left[0].second);
  parallel_tasks(static_cast<int64_t>(left.size()),
                 [&](int64_t i) { kernel_->run_units(frame, left[i].first, left[i].second); });
}

std::string EpilogueStep::describe(const Plan& plan) const {
  return producer_->describe(plan) + "\n    then " + kernel_->describe(plan);
}

void EpilogueStep::for_each_slot(const std::function<void(Slot)>& f) const {
  producer_->for_each_slot(f);
  kernel_->for_each_slot(f);
}

}  // namespace kiln::runtime
