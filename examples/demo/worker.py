"""One training run in a process of its own: `worker.py digits|text eager|kiln steps`. Does a step whenever it is asked on
stdin, and answers in lines of JSON; so eager and kiln can take turns on one machine."""

import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

from tasks import TASKS

import kiln
from kiln.bench.worker import memory_peak, reply
from kiln.explanation import Explanation, recording


def main() -> None:
    name, compiler = sys.argv[1:3]
    sys.stdout = sys.stderr
    kiln.config.disk_cache = False  # the first step is told as it is on a machine that has never run this
    task = TASKS[name](seed=0)
    step = kiln.compile(task.step) if compiler == "kiln" else task.step
    infer = kiln.compile(task.module) if compiler == "kiln" else task.module
    torch.manual_seed(1)  # dropout draws the same masks in both runs
    told = Explanation([])
    reply(title=task.title, steps=task.steps, before=memory_peak())
    for line in sys.stdin:
        word, _, number = line.strip().partition(" ")
        if word != "step":
            break
        x, y = task.batch(int(number))
        if compiler == "kiln" and not told.entries:
            with recording() as record:
                seconds, loss = timed(step, x, y)
            told = Explanation(record.entries)
        else:
            seconds, loss = timed(step, x, y)
        reply(loss=loss, seconds=seconds)
    memory = memory_peak()
    task.module.eval()
    reply(
        accuracy=task.accuracy(infer),
        memory=memory,
        graphs=[dot for entry in told.entries for dot in entry.dot],
        stages=told.stage_times,
        summary=str(told).splitlines()[0] if told.entries else "",
        breaks=[str(b) for b in told.break_reasons],
    )


def timed(step, x, y) -> tuple[float, float]:
    start = time.perf_counter()
    loss = step(x, y)
    seconds = time.perf_counter() - start
    return seconds, loss.item()


if __name__ == "__main__":
    main()
