"""Graph breaks: a branch on a tensor's values.

`toy_example` cannot be one graph: which branch it takes is known only when `b` has values. It becomes three: the part before the
branch, and one part for each branch, in functions that go on after it (`__resume_at_<offset>_<n>`).

Expected output: the original and the modified bytecode of `toy_example` and of the two resume functions, their guards, the break
with this file's line, then

    graphs: 3
    fullgraph=True: data-dependent-branch ... if b.sum() < 0 ... toy_example.py, line ...
"""

import torch

import kiln
from kiln.testing import CompileCounter


def toy_example(a, b):
    x = a / (torch.abs(a) + 1)
    if b.sum() < 0:
        b = b * -1
    return x * b


def main():
    torch.manual_seed(0)
    kiln.set_logs("bytecode,guards,graph_breaks")
    counter = CompileCounter()
    compiled = kiln.compile(toy_example, backend=counter)
    for _ in range(100):
        a, b = torch.randn(10), torch.randn(10)
        assert torch.allclose(compiled(a, b), toy_example(a, b))
    kiln.set_logs("")
    print("graphs:", counter.frame_count)
    try:
        kiln.compile(toy_example, fullgraph=True)(torch.randn(10), torch.randn(10))
    except kiln.exc.GraphBreakError as error:
        print("fullgraph=True:", error)


if __name__ == "__main__":
    main()
