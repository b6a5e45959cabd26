#include "joint/partition/min_cut.h"

// Boost.Graph trips this warning under -O2; nothing of ours is meant.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <boost/graph/adjacency_list.hpp>
#include <boost/graph/boykov_kolmogorov_max_flow.hpp>
#include <deque>

#include "base/error.h"

namespace kiln::joint {

std::vector<int> FlowNetwork::min_cut() const {
  using Traits = boost::adjacency_list_traits<boost::vecS, boost::vecS, boost::directedS>;
  struct EdgeData {
    int64_t capacity = 0, residual = 0;
    Traits::edge_descriptor reverse{};
  };
  struct VertexData {
    Traits::edge_descriptor predecessor{};
    boost::default_color_type color{};
    long distance = 0;
  };
  using Graph = boost::adjacency_list<boost::vecS, boost::vecS, boost::directedS, VertexData, EdgeData>;
  Graph g(static_cast<size_t>(num_vertices_));
  std::vector<Graph::edge_descriptor> forward;
  forward.reserve(edges_.size());
  for (const Edge& e : edges_) {
    const auto there = boost::add_edge(static_cast<size_t>(e.from), static_cast<size_t>(e.to), g).first;
    const auto back = boost::add_edge(static_cast<size_t>(e.to), static_cast<size_t>(e.from), g).first;
    g[there].capacity = e.capacity;
    g[there].reverse = back;
    g[back].reverse = there;
    forward.push_back(there);
  }
  const int64_t flow = boost::boykov_kolmogorov_max_flow(
      g, boost::get(&EdgeData::capacity, g), boost::get(&EdgeData::residual, g), boost::get(&EdgeData::reverse, g),
      boost::get(&VertexData::predecessor, g), boost::get(&VertexData::color, g), boost::get(&VertexData::distance, g),
      boost::get(boost::vertex_index, g), static_cast<size_t>(kSource), static_cast<size_t>(kSink));
  KILN_CHECK(flow < kInfinite, "no finite cut separates the forward from the backward");
  // Vertices from which the sink can still be reached, walking residual edges backwards.
  std::vector<std::vector<int>> into(static_cast<size_t>(num_vertices_));
  for (const auto& e : boost::make_iterator_range(boost::edges(g)))
    if (g[e].residual > 0) into[boost::target(e, g)].push_back(static_cast<int>(boost::source(e, g)));
  std::vector<bool> sink_side(static_cast<size_t>(num_vertices_));
  std::deque<int> todo{kSink};
  sink_side[kSink] = true;
  while (!todo.empty()) {
    const int v = todo.front();
    todo.pop_front();
    for (int u : into[static_cast<size_t>(v)])
      if (!sink_side[static_cast<size_t>(u)]) {
        sink_side[static_cast<size_t>(u)] = true;
        todo.push_back(u);
      }
  }
  std::vector<int> cut;
  for (const Edge& e : edges_)
    if (e.tag >= 0 && !sink_side[static_cast<size_t>(e.from)] && sink_side[static_cast<size_t>(e.to)])
      cut.push_back(e.tag);
  return cut;
}

}  // namespace kiln::joint
