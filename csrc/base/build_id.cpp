#include "base/build_id.h"

#include <elf.h>
#include <link.h>

#include <cstdint>
#include <cstring>

namespace kiln {
namespace {

/// Calls back for each object in memory: fills `data`, a string, from the one that holds this function.
int visit(dl_phdr_info* info, size_t, void* data) {
  const auto here = reinterpret_cast<ElfW(Addr)>(&visit);
  bool holds = false;
  for (int k = 0; k < info->dlpi_phnum; ++k) {
    const ElfW(Phdr)& part = info->dlpi_phdr[k];
    const ElfW(Addr) first = info->dlpi_addr + part.p_vaddr;
    holds |= part.p_type == PT_LOAD && here >= first && here < first + part.p_memsz;
  }
  if (!holds) return 0;
  const auto padded = [](size_t n) { return (n + 3) / 4 * 4; };
  for (int k = 0; k < info->dlpi_phnum; ++k) {
    const ElfW(Phdr)& part = info->dlpi_phdr[k];
    if (part.p_type != PT_NOTE) continue;
    const char* at = reinterpret_cast<const char*>(info->dlpi_addr + part.p_vaddr);
    const char* const end = at + part.p_memsz;
    while (at + sizeof(ElfW(Nhdr)) <= end) {
      ElfW(Nhdr) note;
      std::memcpy(&note, at, sizeof note);
      const char* const name = at + sizeof note;
      const char* const id = name + padded(note.n_namesz);
      if (note.n_type == NT_GNU_BUILD_ID && note.n_namesz == 4 && std::memcmp(name, "GNU", 4) == 0) {
        for (size_t i = 0; i < note.n_descsz; ++i) {
          constexpr char kDigits[] = "0123456789abcdef";
          const auto byte = static_cast<uint8_t>(id[i]);
          *static_cast<std::string*>(data) += {kDigits[byte / 16], kDigits[byte % 16]};
        }
        return 1;
      }
      at = id + padded(note.n_descsz);
    }
  }
  return 1;
}

}  // namespace

const std::string& build_id() {
  static const std::string id = [] {
    std::string found;
    dl_iterate_phdr(visit, &found);
    return found;
  }();
  return id;
}

}  // namespace kiln
