#include <dlfcn.h>
#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "base/error.h"
#include "codegen/common/shape.h"
#include "codegen/cpp/emit.h"

extern char** environ;

// C++ source in, functions out, by the system's compiler.
namespace kiln::codegen {
namespace {

/// Work that is worth a task of its own, in units of point_cost().
constexpr double kTaskCost = 1 << 16;

/// A folder that goes with this.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "kiln-cpp-XXXXXX").string();
    if (!mkdtemp(name.data())) throw InternalError("no temporary folder can be made for C++ source");
    path_ = name;
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

std::string read_file(const std::filesystem::path& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

/// Runs a program, its messages to a file; its exit status, or -1 if it cannot be started.
int run(std::vector<std::string> arguments, const std::string& messages) {
  std::vector<char*> argv;
  for (std::string& a : arguments) argv.push_back(a.data());
  argv.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, messages.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  posix_spawn_file_actions_adddup2(&actions, STDERR_FILENO, STDOUT_FILENO);
  pid_t child = 0;
  const int failed = posix_spawnp(&child, argv[0], &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  int status = 0;
  if (failed || waitpid(child, &status, 0) < 0) return -1;
  return WIFEXITED(status) && WEXITSTATUS(status) != 127 ? WEXITSTATUS(status) : -1;
}

std::shared_ptr<void> build(const std::string& source) {
  const TemporaryFolder folder;
  const auto file = [&](const char* name) { return (folder.path() / name).string(); };
  std::ofstream(file("kernels.cpp")) << source;
  const char* chosen = std::getenv("CXX");
  const std::string compiler = chosen && *chosen ? chosen : "c++";
  // Of OpenMP the lanes alone: threads are ATen's, who call a kernel for a part of its units.
  const int status = run({compiler, "-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno",
                          "-fopenmp-simd", "-fPIC", "-shared", "-w", file("kernels.cpp"), "-o", file("kernels.so")},
                         file("messages"));
  if (status < 0)
    throw Unsupported("emitter=cpp needs a C++ compiler, and '" + compiler +
                      "' cannot be run; set CXX, or emitter=llvm");
  if (status > 0) throw InternalError("generated C++ does not compile:\n" + read_file(file("messages")));
  void* library = dlopen(file("kernels.so").c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) throw InternalError(std::string("generated C++ cannot be loaded: ") + dlerror());
  return {library, [](void* l) { dlclose(l); }};
}

}  // namespace

std::vector<CompiledKernel> compile_cpp(const std::vector<schedule::Kernel>& kernels,
                                        const std::vector<loops::Buffer>& buffers) {
  std::vector<CppKernel> emitted;
  std::string source = cpp_prelude();
  for (size_t k = 0; k < kernels.size(); ++k) {
    emitted.push_back(emit_cpp(kernels[k], buffers, "kernel_" + std::to_string(k)));
    source += "\n" + emitted.back().text;
  }
  std::vector<CompiledKernel> out(kernels.size());
  if (kernels.empty()) return out;
  const std::shared_ptr<void> library = build(source);
  for (size_t k = 0; k < kernels.size(); ++k) {
    CompiledKernel& c = out[k];
    c.name = kernels[k].nest.name;
    c.fn = reinterpret_cast<KernelFn>(dlsym(library.get(), emitted[k].symbol.c_str()));
    KILN_CHECK(c.fn, "generated C++ has no " + emitted[k].symbol);
    c.offsets.assign(kernels[k].args.size(), 0);
    c.units = emitted[k].units;
    const double points = static_cast<double>(kernels[k].nest.outer_size()) / std::max<double>(1, c.units);
    c.grain = std::max<int64_t>(1, static_cast<int64_t>(kTaskCost / (1 + points * point_cost(kernels[k].nest))));
    c.errors = emitted[k].errors;
    c.text = std::make_shared<const std::string>(std::move(emitted[k].text));
    c.owner = library;
  }
  return out;
}

}  // namespace kiln::codegen
