"""Time of a step of KahanAdamW beside torch's own AdamW, for 1, 100 and 10,000 tensors, and with layers that are
dropped: another set of 48 has gradients in each step. Prints a table in markdown.

    ./build.sh bench torch [ROUNDS]

In each round every optimizer makes one step on tensors of its own, one after the other. Ratios are of the same round;
times and ratios are medians over the rounds. One thread."""
import os
import statistics
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.join(HERE, "..", "build", "python"), os.path.join(HERE, "..", "docs", "examples")]

import torch  # noqa: E402
import kahan_opt as k  # noqa: E402
from kahan_opt import KahanAdamW  # noqa: E402

SIZES = ((1, 64, 1), (100, 64, 1), (10000, 64, 1), (1, 10 ** 7, 1), (100, 10 ** 5, 1), (10000, 1000, 1)) + tuple(
    (count, n, share) for count, n in ((480, 1000), (96, 10 ** 5)) for share in (0.9, 0.5, 0.1))
LAYERS = 48


def fused(params):
    try:
        return torch.optim.AdamW(params, fused=True)
    except (RuntimeError, TypeError):  # an older PyTorch, on the CPU
        return torch.optim.AdamW(params, foreach=True)


def bf16_moments(params):
    return KahanAdamW(params, moment_format="bf16")


RUNS = ("torch fp32", fused, torch.float32), ("torch bf16", fused, torch.bfloat16), \
    ("KahanAdamW bf16", KahanAdamW, torch.bfloat16), ("KahanAdamW fp32, bf16 moments", bf16_moments, torch.float32)


def measure(count, n, share, rounds):
    """Seconds of each round: lists for each of RUNS, and for the library's calls in the step of KahanAdamW bf16."""
    made, chance = [], torch.Generator().manual_seed(0)
    for _, make, dtype in RUNS:
        params = [torch.nn.Parameter(torch.randn(n).to(dtype)) for _ in range(count)]
        optimizer = make(params)
        made.append((params, optimizer))
    times = [[] for _ in range(len(RUNS) + 1)]
    for turn in range(rounds + 2):  # two to warm up, of all layers
        used = (torch.rand(LAYERS, generator=chance) < (share if turn > 1 else 1)).tolist()
        used[0] = True
        for (params, optimizer), seconds in zip(made, times):
            for i, p in enumerate(params):  # new gradients, as after zero_grad()
                p.grad = torch.randn_like(p) if used[i * LAYERS // count] else None
            begin = time.perf_counter()
            optimizer.step()
            seconds.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        for call in made[2][1]._plans.values():  # the optimizer itself does not count this step
            call.part([(0, len(call.sizes), 0, None)])
        times[-1].append(time.perf_counter() - begin)
    return [seconds[2:] for seconds in times]


def main():
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 25
    torch.set_num_threads(1)
    print("PyTorch %s, %s, one thread, %s, median of %d rounds; microseconds per step\n" % (
        torch.__version__, "fused" if fused([torch.nn.Parameter(torch.zeros(1))]).defaults.get("fused") else "foreach",
        k.kopt_isa_name(k.kopt_isa_current()), rounds))
    print("| tensors | weights each | with a gradient | %s | in C | bf16 to torch fp32 | to torch bf16 |"
          % " | ".join(name for name, _, _ in RUNS))
    print("|" + "---:|" * (len(RUNS) + 6))
    for count, n, share in SIZES:
        times = measure(count, n, share, rounds)
        ratios = [statistics.median(a / b for a, b in zip(times[2], other)) for other in times[:2]]
        print("| %s | %s | %d %% | %s | %s |" % (format(count, ","), format(n, ","), 100 * share, " | ".join(
            format(round(statistics.median(t) * 1e6), ",") for t in times),
            " | ".join("**%.2f**" % r if i == 0 else "%.2f" % r for i, r in enumerate(ratios))), flush=True)


if __name__ == "__main__":
    main()
