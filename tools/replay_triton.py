"""Runs recorded launches of Triton kernels on a GPU, and compares what they write with what the interpreter wrote.

    python tools/replay_triton.py kernels.pt [--jobs 16]

Needs PyTorch, Triton and a GPU, and nothing of kiln. What a file holds and how it is made: tests/python/triton_records.py.
Exit status 1 if a kernel fails, or writes other numbers.
"""

import argparse
import importlib.util
import multiprocessing
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch

TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 2e-5, torch.float64: 1e-10}


def module_of(source, folder, number):
    path = Path(folder) / f"kernels_{number}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(function, launch):
    """The memories after the launch, and the number of the error that the kernel reports."""
    memories = [m.cuda() for m in launch["before"]]
    buffers = [memories[slot] for slot in launch["slots"]]
    error = torch.zeros(1, dtype=torch.int32, device="cuda")
    blocks = {"XBLOCK": launch["xblock"]} | ({"RBLOCK": launch["rblock"]} if launch["rblock"] else {})
    each = len(buffers) // len(launch["points"])
    for k, points in enumerate(launch["points"]):
        programs = -(-points // launch["xblock"])
        if programs == 0:
            continue
        arguments = buffers[k * each : (k + 1) * each]
        for dtype, numel in launch["scratch"]:
            arguments.append(torch.empty(programs * launch["xblock"] * numel, dtype=dtype, device="cuda"))
        arguments += [points] * launch["segmented"] + [error] * launch["fails"]
        function[(programs,)](*arguments, **blocks, enable_fp_fusion=False)
    return memories, int(error[0])


def difference(launch, memories, error):
    if bool(error) != bool(launch["error"]):
        return f"reports error {error}, not {launch['error']}"
    if error:
        return ""
    for k, (got, want) in enumerate(zip(memories, launch["after"])):
        tolerance = TOLERANCE.get(got.dtype, 0)
        try:
            torch.testing.assert_close(got.cpu(), want, rtol=tolerance, atol=tolerance, equal_nan=True)
        except AssertionError as error:
            return f"memory {k} ({got.dtype}): {error}"
    return ""


def work(task):
    path, job, jobs = task
    recorded = torch.load(path, weights_only=False)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        modules = {}
        for number, launch in enumerate(recorded["launches"]):
            if number % jobs != job:
                continue
            source = launch["source"]
            if source not in modules:
                modules[source] = module_of(recorded["sources"][source], folder, source)
            try:
                found = difference(launch, *run(getattr(modules[source], launch["name"]), launch))
            except Exception as error:  # a compiler's, or the device's
                found = f"{type(error).__name__}: {error}"[:2000]
            results.append((number, launch["name"], found))
    return results


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file")
    parser.add_argument("--jobs", type=int, default=16)
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with context.Pool(arguments.jobs) as pool:
        tasks = [(arguments.file, job, arguments.jobs) for job in range(arguments.jobs)]
        results = sorted(r for part in pool.imap_unordered(work, tasks) for r in part)
    wrong = [r for r in results if r[2]]
    for number, name, found in wrong:
        print(f"--- {number} {name}\n{found}")
    print("by their first words:", Counter(found.split(":")[0][:60] for _, _, found in wrong).most_common(12))
    print(f"{torch.cuda.get_device_name()}: {len(results)} kernels ran, {len(wrong)} of them otherwise")
    sys.exit(bool(wrong) or not results)


if __name__ == "__main__":
    main()
