#pragma once
#include <cstdint>
#include <string>
#include <vector>

// Where compiled kernels are kept between processes, as the code generator sees it.
namespace kiln::codegen {

/// One kernel's object code. Whoever reads it checks `checksum`: what a disk gives back may be damaged.
struct StoredObject {
  std::string key;                     // all that the code depends on: kernel, target, build of the code generator
  std::string code;                    // an object file
  std::vector<std::string> externals;  // functions of the process that it calls
  uint64_t checksum = 0;               // of code
};

class ObjectStore {
 public:
  virtual ~ObjectStore() = default;
  /// Those of `keys` that are kept, in any order. Neither function throws: a store that fails is an empty one.
  virtual std::vector<StoredObject> find(const std::vector<std::string>& keys) = 0;
  virtual void keep(const std::vector<StoredObject>& objects) = 0;
};

}  // namespace kiln::codegen
