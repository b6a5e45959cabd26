"""Keeps the launches of Triton kernels that tests make, to be run again on a machine with a GPU, where kiln need not be.

    pytest tests/python/test_triton_emitter.py --record-triton kernels.pt
    python tools/replay_triton.py kernels.pt       # there

A file has `sources` (texts of modules) and `launches`, one for each kernel that is unlike the others: a dict with the index
of its source, its name, how it is launched (the fields of _triton.Kernel), `slots` (for each parameter the index of its
memory), and each memory's contents before and after, as Triton's interpreter leaves them.
"""

import torch

from kiln import _triton

MOST_BYTES = 1 << 20  # of one launch


class Recorder:
    def __init__(self):
        self.sources, self.launches, self.seen, self.left_out = [], [], set(), 0
        self.load, self.call = _triton.load, _triton.Kernel.__call__
        _triton.load = self._load
        _triton.Kernel.__call__ = lambda kernel, buffers: self._launch(kernel, buffers)

    def _load(self, source, descriptions):
        kernels = self.load(source, descriptions)
        for kernel in kernels:
            kernel.source = source
        return kernels

    def _launch(self, kernel, buffers):
        key = kernel.source, kernel.function.fn.__name__
        memory = {(b.data_ptr(), b.dtype, b.numel()): b for b in buffers}
        apart = len({pointer for pointer, _, numel in memory if numel}) == sum(numel > 0 for _, _, numel in memory)
        small = sum(b.nbytes for b in memory.values()) <= MOST_BYTES
        if key in self.seen or not (apart and small):
            self.left_out += key not in self.seen
            return self.call(kernel, buffers)
        self.seen.add(key)
        before = [b.clone() for b in memory.values()]
        error = self.call(kernel, buffers)
        if kernel.source not in self.sources:
            self.sources.append(kernel.source)
        places = {k: i for i, k in enumerate(memory)}
        self.launches.append({
            "source": self.sources.index(kernel.source), "name": key[1], "points": kernel.points,
            "xblock": kernel.xblock, "rblock": kernel.rblock, "scratch": kernel.scratch,
            "segmented": kernel.segmented, "fails": kernel.fails, "error": error,
            "slots": [places[b.data_ptr(), b.dtype, b.numel()] for b in buffers],
            "before": before, "after": [b.clone() for b in memory.values()],
        })  # fmt: skip
        return error

    def save(self, path):
        _triton.load, _triton.Kernel.__call__ = self.load, self.call
        torch.save({"sources": self.sources, "launches": self.launches}, path)
        print(f"\n{len(self.launches)} kernels of {len(self.sources)} sources in {path}; {self.left_out} left out")
