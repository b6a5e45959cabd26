import sys
import warnings

import torch

import kiln

from . import KINDS


def main():
    kind, first, last = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    warnings.simplefilter("ignore")
    differing = 0
    for seed in range(first, last):
        kiln.reset()
        try:
            KINDS[kind].run(seed)
            assert torch.is_grad_enabled(), "gradients were left off"
        except Exception as e:
            torch.set_grad_enabled(True)
            differing += 1
            print(f"--- {kind} {seed}\n{KINDS[kind].program(seed)}\n{type(e).__name__}: {str(e)[:2000]}\n", flush=True)
    print(f"{last - first} programs, {differing} differ")


if __name__ == "__main__":
    main()
