#include "python/frame/records.h"

namespace kiln::frame {
namespace {
bool on = false;
std::vector<Record>& records() {
  static std::vector<Record> list;
  return list;
}
}  // namespace

bool recording() { return on; }
void set_recording(bool value) { on = value; }
void add_record(Record record) { records().push_back(std::move(record)); }
std::vector<Record> take_records() { return std::exchange(records(), {}); }

}  // namespace kiln::frame
