#include "python/cpython/py311.h"
#include "python/frame/bytecode/code.h"

namespace kiln::frame::bytecode {

int forward_jump(int opcode) {
  switch (opcode) {
    case JUMP_BACKWARD:
    case JUMP_BACKWARD_NO_INTERRUPT:
      return JUMP_FORWARD;
    case POP_JUMP_BACKWARD_IF_FALSE:
      return POP_JUMP_FORWARD_IF_FALSE;
    case POP_JUMP_BACKWARD_IF_TRUE:
      return POP_JUMP_FORWARD_IF_TRUE;
    case POP_JUMP_BACKWARD_IF_NONE:
      return POP_JUMP_FORWARD_IF_NONE;
    case POP_JUMP_BACKWARD_IF_NOT_NONE:
      return POP_JUMP_FORWARD_IF_NOT_NONE;
    default:
      return opcode;
  }
}

bool uses_slot(int opcode) {
  switch (opcode) {
    case LOAD_FAST:
    case STORE_FAST:
    case DELETE_FAST:
    case LOAD_CLOSURE:
    case MAKE_CELL:
    case LOAD_DEREF:
    case STORE_DEREF:
    case DELETE_DEREF:
    case LOAD_CLASSDEREF:
      return true;
    default:
      return false;
  }
}

int stack_effect(const Instruction& i, bool jump) {
  // CPython's table books the arguments on PRECALL, which moves nothing; CALL takes them off.
  if (i.opcode == PRECALL) return 0;
  if (i.opcode == CALL) return -i.arg - 1;
  return PyCompile_OpcodeStackEffectWithJump(i.opcode, i.opcode >= HAVE_ARGUMENT ? i.arg : 0, jump ? 1 : 0);
}

std::vector<std::vector<bool>> live_slots(const Body& body, int num_slots) {
  const auto& list = body.instructions;
  const int n = static_cast<int>(list.size());
  std::vector<int> handler(static_cast<size_t>(n), -1);
  for (const Handler& h : body.handlers)
    for (int i = h.start; i < h.end; ++i) handler[i] = h.target;
  const std::vector<bool> none(static_cast<size_t>(num_slots), false);
  std::vector<std::vector<bool>> live(static_cast<size_t>(n), none);
  for (bool changed = true; changed;) {
    changed = false;
    for (int i = n - 1; i >= 0; --i) {
      const Instruction& in = list[i];
      std::vector<bool> now = none;
      const auto join = [&](int from) {
        if (from < 0 || from >= n) return;
        for (int s = 0; s < num_slots; ++s)
          if (live[from][s]) now[s] = true;
      };
      if (!ends_block(in.opcode)) join(i + 1);
      join(in.target);
      if (uses_slot(in.opcode) && in.arg < num_slots) now[in.arg] = in.opcode != STORE_FAST;
      // An exception may leave before a store happens: what the handler reads is live throughout.
      join(handler[i]);
      if (now != live[i]) {
        live[i] = std::move(now);
        changed = true;
      }
    }
  }
  return live;
}

std::vector<int> handled_exceptions(const Body& body) {
  const auto& list = body.instructions;
  const int n = static_cast<int>(list.size());
  std::vector<int> depth(static_cast<size_t>(n), -1);
  std::vector<int> work;
  const auto reach = [&](int i, int d) {
    // The bound only stops malformed code from growing without end.
    if (i < 0 || i >= n || depth[i] >= d || d > n) return;
    depth[i] = d;
    work.push_back(i);
  };
  reach(0, 0);
  while (!work.empty()) {
    const int i = work.back();
    work.pop_back();
    const Instruction& in = list[i];
    int after = depth[i];
    if (in.opcode == PUSH_EXC_INFO) ++after;
    if (in.opcode == POP_EXCEPT && after > 0) --after;
    if (!ends_block(in.opcode)) reach(i + 1, after);
    reach(in.target, after);
    for (const Handler& h : body.handlers)
      if (h.start <= i && i < h.end) reach(h.target, in.opcode == PUSH_EXC_INFO ? after : depth[i]);
  }
  return depth;
}

}  // namespace kiln::frame::bytecode
