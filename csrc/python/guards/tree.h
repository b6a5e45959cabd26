#pragma once
#include <Python.h>

#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "python/guards/checks.h"
#include "python/guards/class_image.h"
#include "python/guards/guard.h"
#include "python/guards/tensor_image.h"

namespace kiln::guards {

/// The call that sources are read from: the root frame's fast locals before its first instruction.
struct Call {
  PyObject* const* locals = nullptr;  // arguments first; other slots may be null or absent
  int num_locals = 0;                 // length of `locals`
  PyObject* closure = nullptr;        // tuple of cells, or null
  int first_free = 0;                 // localsplus index of the first free variable
  PyObject* globals = nullptr;        // the function's
};

/// What failure() says where tensors that must be apart in memory are not.
inline constexpr const char* kSharedMemory = "inputs share memory and one of them is changed in place";

/// References that live until the values that `check` gave out were taken over.
using Owned = std::vector<py::Ref>;

/// The guards of one compiled entry over the tree of their sources: a prefix that many sources share is read once.
///
/// There are two programs. The slow one reads every source and checks every guard. After it succeeded once, a fast one
/// is made for the objects that it met: CPython 3.11 stamps each dict with a version that no other state of any dict in
/// the process ever has, so while a dict's stamp is the remembered one, all that was read from it is still so, and only
/// its stamp is looked at. Objects found by other ways (a local, a list's item) are compared by address and what hangs
/// on them is checked again. If anything in the fast program differs, the slow one decides, and the fast one is made
/// anew; what keeps differing is no longer assumed. All members need the GIL. Reads run no Python code.
/// Sources with a Tensor or an Apart guard were different objects when captured (one tensor found by two sources has
/// one tensor guard and a SameObject), and must be so again.
class GuardTree {
 public:
  /// `wanted`: sources whose objects `check` delivers.
  GuardTree(std::vector<Guard> guards, const std::vector<SourcePtr>& wanted);
  GuardTree(const GuardTree&) = delete;
  GuardTree& operator=(const GuardTree&) = delete;

  /// Which of the first wanted tensors, the graph's inputs, the graph writes to: the memory of such a one must be apart
  /// from that of every other input.
  void set_written(std::vector<bool> written) { written_ = std::move(written); }
  /// True if every guard holds for `call`; then values[i] is the object of wanted[i], borrowed: valid while `owned`
  /// lives and no other code runs.
  bool check(const Call& call, PyObject** values, Owned& owned);
  /// The text of the first guard that fails for `call`, with what was found instead; "" if all hold.
  std::string failure(const Call& call);
  /// If `call` differs from what was captured in the sizes and strides of tensors and in ints alone: a number that
  /// tells such calls apart. `where`: gets the nodes at which it differs.
  std::optional<uint64_t> sizes_key(const Call& call, std::vector<int>* where = nullptr);
  /// The same for a call that is taken to differ at the nodes `where` alone, in nothing but sizes: the rest is not
  /// looked at.
  std::optional<uint64_t> sizes_key_at(const Call& call, const std::vector<int>& where);
  struct Change {
    enum class Kind : uint8_t { Number, Function, Sizes, Contents } kind;
    SourcePtr source;
    uint64_t dims = 0;  // Sizes: which, as bits
  };
  /// Floats and ints that are guarded by value and have another value in `call`, functions that are guarded by identity
  /// and are others of the same code, tensors that differ in sizes alone, and memory of other contents, as far as they
  /// can be read. `alone`: there are some, and nothing else that a guard on one object tells differs.
  std::vector<Change> changes(const Call& call, bool* alone);
  const std::vector<Guard>& guards() const { return guards_; }
  size_t num_wanted() const { return wanted_.size(); }
  /// How often the slow program ran and how many steps the fast one has; for tests.
  int64_t slow_runs() const { return slow_runs_; }
  size_t fast_size() const { return fast_.size() + words_.size() + images_.size(); }

 private:
  struct Node {
    Source::Kind kind = Source::Kind::Const;
    int parent = -1;
    int key_node = -1;  // DictItemAt
    int64_t index = 0;
    py::Ref object;  // Const: the object; DictItem, Global: the key; Attr: the name
    Py_hash_t hash = 0;
    std::vector<int> checks;    // guards on this node alone
    std::vector<int> children;  // nodes
    SourcePtr source;
    // What the fast program no longer assumes, and how often the assumption failed.
    bool stamp_moves = false;  // this dict's stamp
    bool moves = false;        // this value's address
    int stamp_misses = 0, misses = 0;
  };
  /// One operand of a fast step: an object known when the program was made, or a slot filled by an earlier step.
  struct Operand {
    PyObject* object = nullptr;
    int slot = -1;
  };
  enum class FastOp : uint8_t {
    GlobalState,  // pack_global_state() == number
    TypeVersion,  // version of the type `expected` is `number`, or it is as it was when guard `guard` was made
    Fetch,        // read `node` from operand and key (other) into slot `out`; with `pin` it must be `expected`
    TypeIs,       // type of operand is `expected`
    Words,        // the next `out` of words_
    Tensor,       // tensor facts of guard `guard`
    Images,       // all of images_
    Holds,        // guard `guard`, any kind
  };
  struct Fast {
    FastOp op;
    bool pin = false;
    int out = -1;
    int guard = -1;
    int node = -1;  // whose assumption it is, for counting misses
    Operand operand, other;
    PyObject* expected = nullptr;
    uint64_t number = 0;
  };
  /// Most steps compare one word of memory: a dict's stamp, an instance's __dict__ pointer, an object's type.
  struct Word {
    const uint64_t* address;
    uint64_t expected;
  };
  /// The memory that a tensor can reach.
  struct Reach {
    const char *begin, *end;
    bool written;
  };
  struct WordNode {
    int node;
    bool pin;
  };

  int add_source(const SourcePtr& source);
  int add_node(Node node);
  PyObject* fetch(const Node& node, PyObject* base, PyObject* key, const Call& call, Owned& owned) const;
  /// Adds to `key` how the sizes of `value`, read at node `id`, differ. False if it differs in more.
  bool add_sizes(int id, PyObject* value, size_t* key, bool* differs) const;
  /// The object at a node, by way of its parents.
  PyObject* read(int id, const Call& call, Owned& owned) const;
  bool holds(int guard, PyObject* value, PyObject* other) const;
  bool same_function(int guard) const;
  bool all_distinct();
  bool written_apart(PyObject* const* values);
  bool run_slow(const Call& call, Owned& owned, int* failed_guard, int* failed_node);
  void suspect(int node);
  bool fails_as_before(const Call& call, Owned& owned);
  enum class Outcome : uint8_t { Holds, Fails, Unknown };
  /// The first word of [word, end) that is not as expected, or `end`.
  static const Word* first_changed(const Word* word, const Word* end);
  Outcome run_fast(const Call& call, Owned& owned);
  void make_fast();

  std::vector<bool> written_;   // of the graph's inputs; empty if none is written
  std::vector<Reach> reaches_;  // scratch of written_apart
  std::vector<Guard> guards_;
  std::vector<TensorFacts> facts_;                    // one per guard, filled for tensors
  std::vector<std::shared_ptr<ClassImage>> classes_;  // one per guard, for Type and ClassVersion
  /// What a function guarded by identity consists of: assigning to these changes what a call of it means.
  struct FunctionParts {
    py::Ref code, defaults, kwdefaults;
    uint64_t kwdefaults_version = 0;
  };
  std::unordered_map<int, FunctionParts> functions_;  // by guard
  std::vector<int> distinct_;                         // nodes with a Tensor or Apart guard: all are different objects
  std::vector<std::pair<int, int>> ends_;             // one per guard: nodes of source and other, -1
  std::vector<Node> nodes_;
  std::unordered_map<std::string, int> ids_;
  std::unordered_map<SourcePtr, int> added_;  // of sources that were looked at: most guards are about one of these
  std::vector<int> order_;                    // nodes, parents before children, likely failures first
  std::vector<int> binary_;                   // guards on two nodes
  std::vector<int> globals_;                  // guards on no node
  std::vector<int> wanted_;                   // node of each wanted source

  std::vector<PyObject*> values_;  // scratch of the slow program, one per node
  std::vector<PyObject*> slots_;   // scratch of the fast program
  std::vector<Fast> fast_;
  std::vector<Operand> delivered_;  // where the fast program's wanted values are
  std::vector<Word> words_;
  std::vector<WordNode> word_nodes_;
  TensorImages images_;            // pinned tensors
  std::vector<PyObject*> fixed_;   // known to the fast program, different from each other; sorted
  std::vector<int> moving_;        // slots
  std::vector<PyObject*> sorted_;  // scratch
  bool has_fast_ = false;
  WordNode failed_ = {-1, false};  // the assumption that failed last
  /// The nodes that lead to the one whose guard failed last, and that one: of several entries most fail each time at
  /// the same guard, far down the tree.
  std::vector<int> suspects_;
  int64_t slow_runs_ = 0;
};

}  // namespace kiln::guards
