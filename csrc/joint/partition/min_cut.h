#pragma once
#include <cstdint>
#include <vector>

namespace kiln::joint {

/// A flow network for minimum cuts. Vertex 0 is the source, vertex 1 the sink.
class FlowNetwork {
 public:
  static constexpr int kSource = 0, kSink = 1;
  static constexpr int64_t kInfinite = int64_t{1} << 60;
  int add_vertex() { return num_vertices_++; }
  /// A directed edge; `tag` >= 0 says that cutting it means something.
  void add_edge(int from, int to, int64_t capacity, int tag = -1) { edges_.push_back({from, to, capacity, tag}); }
  /// Tags of the edges of a minimum cut, the one nearest to the sink. Throws InternalError if there is none that is
  /// finite.
  std::vector<int> min_cut() const;

 private:
  struct Edge {
    int from, to;
    int64_t capacity;
    int tag;
  };
  std::vector<Edge> edges_;
  int num_vertices_ = 2;
};

}  // namespace kiln::joint
