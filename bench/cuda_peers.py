"""PyTorch's fused AdamW and optimi's Triton AdamW over the lists of bench/cuda.cu, added to its csv, and the ratios.

usage: cuda_peers.py build/bench/cuda.csv     (needs torch with a GPU; optimi if it is installed)
"""
import csv
import statistics
import sys

try:
    import torch
except ImportError as error:
    print(f"SKIPPED: PyTorch's and optimi's side of the GPU bench ({error}; pip install torch torch-optimi)")
    sys.exit(0)

LISTS = {f"1e{k}": [10 ** k] for k in range(3, 8)}
LISTS |= {"64M": [64_000_000], "1e8": [100_000_000], "1e9": [1_000_000_000],
          "GPT-2 124M": [50257 * 768, 1024 * 768]
          + [768, 768, 768 * 2304, 2304, 768 * 768, 768, 768, 768, 768 * 3072, 3072, 3072 * 768, 768] * 12 + [768, 768],
          "10,000 x 64": [64] * 10_000, "1,000 x 1,024": [1024] * 1_000}


def times(work, limit=0.3):
    """Median microseconds of one call, between events."""
    for _ in range(3):
        work()
    seen, total = [], 0.0
    while len(seen) < 11 or (total < limit * 1e6 and len(seen) < 2000):
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
    yield ("torch AdamW fused fp32", torch.float32, 28,
           lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.01, fused=True), times)
    yield ("torch AdamW fused bf16", torch.bfloat16, 14,
           lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.01, fused=True), times)
    yield ("torch AdamW fused fp32, graph", torch.float32, 28,
           lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.01, fused=True, capturable=True), replayed)
    yield ("torch AdamW fused bf16, graph", torch.bfloat16, 14,
           lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.01, fused=True, capturable=True), replayed)
    try:
        import optimi
    except ImportError as error:
        print(f"optimi is not measured: {error} (pip install torch-optimi)")
    else:
        yield ("optimi AdamW Kahan bf16", torch.bfloat16, 18,
               lambda p: optimi.AdamW(p, lr=1e-3, weight_decay=0.01, kahan_sum=True, triton=True), times)


def main(path):
    rows = list(csv.DictReader(open(path)))
    ours = {(r["who"], r["what"]): min(float(r[k]) for k in ("eager_us", "graph_us") if float(r[k]) > 0) for r in rows}
    copy = next(float(r["elements"]) * float(r["bytes"]) / float(r["eager_us"]) for r in rows
                if r["who"].startswith("device"))
    peers = {}
    with open(path, "a", newline="") as out:
        table = csv.writer(out)
        for name, dtype, width, make, clock in contenders():
            for what, sizes in LISTS.items():
                params = optimizer = None
                try:
                    params = [torch.randn(n, device="cuda").mul_(0.02).to(dtype).requires_grad_() for n in sizes]
                    for p in params:
                        p.grad = torch.randn_like(p) * 0.01
                    optimizer = make(params)
                    time = clock(optimizer.step)
                except torch.cuda.OutOfMemoryError:
                    print(f"{name:34} {what:16} does not fit into memory")
                    continue
                except Exception as error:  # a version without Triton, without capturable ...: the others still count
                    reason = str(error).splitlines()[0] if str(error) else ""
                    print(f"{name:34} not measured: {type(error).__name__}: {reason}")
                    break
                finally:
                    params = optimizer = None
                    torch.cuda.empty_cache()
                peers[name, what] = time
                part = sum(sizes) * width / time / copy
                print(f"{name:34} {what:16} {time:12.1f} us {sum(sizes) / time / 1e3:8.2f} Gel/s "
                      f"{100 * part:5.1f} % of copy")
                table.writerow([name, what, sum(sizes), width, f"{time:.2f}", 0, 0, f"{part:.4f}"])
    print()
    for mine, theirs, what, goal in (("AdamW bf16 KAHAN", "torch AdamW fused fp32", "1e8", 1.45),
                                     ("AdamW bf16 STOCHASTIC", "torch AdamW fused bf16", "1e8", 1.05),
                                     ("AdamW bf16 KAHAN", "optimi AdamW Kahan bf16", "1e8", 1.05),
                                     ("AdamW bf16 KAHAN", "torch AdamW fused fp32", "10,000 x 64", 100)):
        if (mine, what) in ours and (theirs, what) in peers:
            ratio = peers[theirs, what] / ours[mine, what]
            print(f"goal, {mine} against {theirs}, {what}: {ratio:.2f} times as fast, at least {goal}: "
                  f"{'met' if ratio >= goal else 'MISSED'}")


if __name__ == "__main__":
    if not torch.cuda.is_available():
        print("SKIPPED: PyTorch's side of the GPU bench (torch finds no GPU)")
    else:
        main(sys.argv[1] if len(sys.argv) > 1 else "build/bench/cuda.csv")
