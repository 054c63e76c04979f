"""PyTorch's fused AdamW, optimi's and FlashOptim's Triton AdamW, and the Python class of this library over lists of
bench/cuda.c, and the ratios to its figures. Adds lines NAME,VALUE,UNIT,VERDICT to the file that CUDA_ROWS names.

usage: cuda_peers.py TABLE     (what bench/cuda.c wrote; needs torch with a GPU; the others if they are installed)
"""
import csv
import functools
import importlib
import os
import statistics
import sys

try:
    import torch
except ImportError as error:
    print(f"SKIPPED: PyTorch's and optimi's side of the GPU bench ({error}; pip install torch torch-optimi)")
    sys.exit(0)

LARGE = 1 << 27
LISTS = {"large": [LARGE],
         "GPT-2 124M": [50257 * 768, 1024 * 768]
         + [768, 768, 768 * 2304, 2304, 768 * 768, 768, 768, 768, 768 * 3072, 3072, 3072 * 768, 768] * 12 + [768, 768],
         "10000 x 64": [64] * 10_000, "1000 x 1024": [1024] * 1_000, "1e6": [1_000_000]}
# ours, theirs, list, how many times as fast: fp32 has 28 bytes per element and KAHAN 18, bf16 14 and STOCHASTIC 14
GOALS = (("AdamW bf16 KAHAN", "torch AdamW fused fp32", "large", 1.45),
         ("AdamW bf16 STOCHASTIC", "torch AdamW fused bf16", "large", 1.05))
# name, bytes per element, package, class, options; FlashOptim: 8 bits more of each weight, and 8-bit moments
OTHERS = (("KahanAdamW bf16", 18, "kahan_opt", "KahanAdamW", {}),
          ("KahanAdamW bf16 COMPACT 8-bit", 12.0625, "kahan_opt", "KahanAdamW",
           {"rounding": "compact", "moment_format": "q8"}),
          ("optimi AdamW Kahan bf16", 18, "optimi", "AdamW", {"kahan_sum": True, "triton": True}),
          ("FlashAdamW bf16", 12.25, "flashoptim", "FlashAdamW", {}))
MOST = 1000  # calls


def times(work, limit=0.1):
    """Median microseconds of one call, between events: 11 calls at least, and about `limit` seconds of them."""
    for _ in range(3):
        work()
    seen, total = [], 0.0
    while len(seen) < 11 or (total < limit * 1e6 and len(seen) < MOST):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        seen.append(begin.elapsed_time(end) * 1e3)
        total += seen[-1]
    return statistics.median(seen)


def replayed(work):
    """Median microseconds of a replay of the work from a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return times(graph.replay)


def contenders():
    """Name, dtype, bytes per element, how to make it, how to time it."""
    def fused(parameters, **more):
        return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.01, fused=True, **more)

    for name, dtype, width in (("fp32", torch.float32, 28), ("bf16", torch.bfloat16, 14)):
        yield f"torch AdamW fused {name}", dtype, width, fused, times
        yield f"torch AdamW fused {name} graph", dtype, width, lambda p: fused(p, capturable=True), replayed
    for name, width, package, title, options in OTHERS:
        try:
            module = importlib.import_module(package)
        except ImportError as error:
            print(f"{package} is not measured: {error}")
        else:
            yield (name, torch.bfloat16, width,
                   functools.partial(getattr(module, title), lr=1e-3, weight_decay=0.01, **options), times)


def measure(dtype, sizes, make, clock):
    """Microseconds of a step."""
    parameters = [torch.randn(n, device="cuda").mul_(0.02).to(dtype).requires_grad_() for n in sizes]
    for p in parameters:
        p.grad = torch.randn_like(p) * 0.01
    return clock(make(parameters).step)


class Rows:
    """The file that CUDA_ROWS names, or none."""

    def __init__(self):
        self.path = os.environ.get("CUDA_ROWS")

    def put(self, name, value, unit, verdict=""):
        if self.path:
            with open(self.path, "a", encoding="utf-8") as out:
                out.write(f"{name},{value:.6g},{unit},{verdict}\n")


def main(path):
    ours = {}
    with open(path, encoding="utf-8") as table:
        for record in csv.reader(table):
            if len(record) == 4:
                ours[record[0]] = float(record[1])
    bandwidth = ours["device-to-device copy | 16 B x large | bandwidth"] * 1e6  # bytes per microsecond
    rows, peers = Rows(), {}
    for name, dtype, width, make, clock in contenders():
        for what, sizes in LISTS.items():
            try:
                time = measure(dtype, sizes, make, clock)
            except torch.cuda.OutOfMemoryError:
                print(f"{name:34} {what:16} does not fit into memory")
                continue
            except Exception as error:  # a version without Triton, without capturable ...: the others still count
                reason = str(error).splitlines()[0] if str(error) else ""
                print(f"{name:34} not measured: {type(error).__name__}: {reason}")
                break
            finally:
                torch.cuda.empty_cache()
            peers[name, what] = time
            share = sum(sizes) * width / time / bandwidth
            rows.put(f"{name} | {what} | time", time, "us")
            rows.put(f"{name} | {what} | share of copy", share, "1")
            print(f"{name:34} {what:16} {time:12.1f} us {sum(sizes) / time / 1e3:8.2f} Gel/s "
                  f"{100 * share:5.1f} % of copy")
    print()
    for mine, theirs, what, goal in GOALS:
        own = [ours[key] for kind in ("eager", "graph") if (key := f"{mine} | {what} | {kind}") in ours]
        other = [peers[key] for suffix in ("", " graph") if (key := (theirs + suffix, what)) in peers]
        if own and other:
            ratio = min(other) / min(own)
            verdict = "pass" if ratio >= goal else "miss"
            rows.put(f"{mine} | {what} | times as fast as {theirs} (goal {goal})", ratio, "1", verdict)
            print(f"goal: {mine} against {theirs}, {what}: {ratio:.2f} times as fast, at least {goal}: {verdict}")
    return 0 if peers else 1


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    if not torch.cuda.is_available():
        print("SKIPPED: PyTorch's side of the GPU bench (torch finds no GPU)")
        sys.exit(0)
    sys.exit(main(sys.argv[1]))
