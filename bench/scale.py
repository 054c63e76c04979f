"""A larger network than those of bench/fidelity.py: a GPT of a million weights learns 6 MB of text, then another text.

    ./build.sh bench scale          half an hour of 2 idle cores a seed; begun again, it makes the runs that are missing
    ./build.sh bench scale quick    a small network: seconds
    ./build.sh bench scale draw     the table and the claims of the last run again

Text: the Python files of the standard library; for fine-tuning, its English manual (pydoc_data/topics.py). Of their
blocks of 4096 bytes, each tenth is held out. All arms begin at the same bf16 numbers and see the same batches;
fine-tuning begins at the bf16 checkpoint of the fp32 run. But for the arm fp32, weights, gradients and activations are
bfloat16 tensors of PyTorch, forward and backward; only sums over many numbers are fp32, as in its matrix products.
Losses are those of the visible weights (the 16 bits, without residuals or masters), in fp32 arithmetic.
A matrix product of bf16 numbers is that of their fp32 values, rounded: what the instructions for bf16 compute, and ten
times as fast where PyTorch has none.

Writes build/bench/scale.csv and scale.md (docs/evidence.md). After a change of the header, remove scale.csv: without
it, all runs are made. Prints the hash of the numbers. Exit status: 0 if they support the claims, 1 if not. What could
be tuned was fixed before the runs, the numbers of steps for time, after a look at the time of a step with seed 0:"""
LAYERS, WIDTH, HEADS, LENGTH, BATCH = 5, 128, 4, 64, 8
STEPS, FIRST, LAST = 4000, 1e-3, 1e-5  # of the training; the learning rate falls along a cosine
TUNING, MARKS = 1e-6, (50, 200)  # of the fine-tuning: the learning rate, constant, and when losses are taken
SEEDS, BYTES, WINDOWS = (1, 2), 6000000, 512  # a loss is the mean of so many windows of LENGTH bytes
MARGIN = 0.01  # level: the held-out loss is within so many nats of fp32's, with each seed

import csv
import functools
import hashlib
import math
import multiprocessing
import os
import platform
import sys
import sysconfig
import time

QUICK, DRAW = "quick" in sys.argv[1:], "draw" in sys.argv[1:]
if QUICK:
    LAYERS, WIDTH, HEADS, LENGTH, STEPS, MARKS, BYTES, WINDOWS = 2, 32, 2, 32, 60, (20, 40), 300000, 64
sys.path.append("bench")  # for a process that begins anew
import fidelity  # noqa: E402
import finetuning  # noqa: E402
import kahan_opt as kopt  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from fidelity import FEEDBACK, FEEDBACK_Q8, FP32, KAHAN, NEAREST, Q8, ROUNDED, STOCHASTIC  # noqa: E402
from finetuning import DRAWN, MIXED  # noqa: E402

fidelity.OUT = OUT = "build/bench/scale" + ("_quick" if QUICK else "")
ARMS = [FP32, ROUNDED, MIXED, KAHAN, KAHAN + DRAWN, STOCHASTIC, Q8, Q8 + DRAWN, FEEDBACK, FEEDBACK_Q8, NEAREST]
TRAIN, TUNE = "training", "fine-tuning"
FIELDS = "setup phase arm seed step training held_out bytes".split()


# ---- text ------------------------------------------------------------------------------------------------------------

@functools.lru_cache(None)
def text(phase):
    root, files, found = sysconfig.get_path("stdlib"), [os.path.join("pydoc_data", "topics.py")], b""
    if phase == TRAIN:
        files = sorted(os.path.relpath(os.path.join(folder, name), root) for folder, _, names in os.walk(root)
                       for name in names if name.endswith(".py"))
    for name in files:
        if phase == TUNE or not {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings",
                                 "pydoc_data"} & set(name.split(os.sep)):
            with open(os.path.join(root, name), "rb") as file:
                found += file.read() if len(found) < BYTES else b""
    return found[:BYTES]


def blocks(phase):
    """(those to train with, those that are held out)"""
    data = torch.frombuffer(bytearray(text(phase)), dtype=torch.uint8)
    data = data[:len(data) // 4096 * 4096].view(-1, 4096)
    held_out = torch.arange(len(data)) % 10 == 5
    return data[~held_out], data[held_out]


def batch(part, generator):
    rows = torch.randint(len(part), (BATCH, 1), generator=generator)
    return part[rows, torch.randint(4096 - LENGTH, (BATCH, 1), generator=generator) + torch.arange(LENGTH + 1)].long()


# ---- the network -----------------------------------------------------------------------------------------------------

def weights(g):
    one, matrix, uniform, small = torch.ones(WIDTH), fidelity.matrix, fidelity.uniform, (2 * LAYERS) ** -0.5
    layers = [[one, matrix(g, WIDTH, 3 * WIDTH), small * matrix(g, WIDTH, WIDTH),
               one, matrix(g, WIDTH, 4 * WIDTH), small * matrix(g, 4 * WIDTH, WIDTH)] for _ in range(LAYERS)]
    return [uniform(g, 256, WIDTH, 0.5), uniform(g, LENGTH, WIDTH, 0.5), one, matrix(g, WIDTH, 256)] + sum(layers, [])


class Product(torch.autograd.Function):
    """a @ b: sums in fp32, then rounded to the type of a."""
    @staticmethod
    def forward(saved, a, b):
        saved.save_for_backward(a, b)
        return (a.float() @ b.float()).to(a.dtype)

    @staticmethod
    def backward(saved, slope):
        a, b = saved.saved_tensors
        slope, wide = slope.float(), a.float()
        of_a = slope @ b.float().transpose(-1, -2)
        if b.dim() == 2:  # a weight, of all rows
            wide, slope = wide.flatten(0, -2), slope.flatten(0, -2)
        return of_a.to(a.dtype), (wide.transpose(-1, -2) @ slope).to(b.dtype)


matmul = Product.apply


def loss_of(w, window):
    dtype = w[0].dtype
    norm = lambda x, gain: F.layer_norm(x.float(), (WIDTH,), gain.float()).to(dtype)
    later = torch.full((LENGTH, LENGTH), -math.inf, dtype=dtype).triu(1)
    x = F.embedding(window[:, :-1], w[0].float()).to(dtype) + w[1]
    for i in range(4, len(w), 6):
        gain1, qkv, project, gain2, up, down = w[i:i + 6]
        parts = matmul(norm(x, gain1), qkv).view(len(window), LENGTH, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        scores = matmul(parts[0], parts[1].transpose(-1, -2)) * (HEADS / WIDTH) ** 0.5
        heads = matmul(torch.softmax(scores + later, -1), parts[2])
        x = x + matmul(heads.transpose(1, 2).reshape(len(window), LENGTH, WIDTH), project)
        x = x + matmul(F.gelu(matmul(norm(x, gain2), up)), down)
    return F.cross_entropy(matmul(norm(x, w[2]), w[3]).float().flatten(0, 1), window[:, 1:].flatten())


@torch.no_grad()
def loss(leaves, part):
    """Over windows from all of it that do not overlap."""
    windows, wide = part.unfold(1, LENGTH + 1, LENGTH + 1).reshape(-1, LENGTH + 1), [w.float() for w in leaves]
    windows = windows[torch.linspace(0, len(windows) - 1, min(WINDOWS, len(windows))).long()].long()
    return "%.7f" % (sum(loss_of(wide, some).item() * len(some) for some in windows.split(32)) / len(windows))


# ---- runs ------------------------------------------------------------------------------------------------------------

def start(arm, values, seed, lr):
    """(what the forward pass reads, its optimizer)"""
    if arm == MIXED:
        one = finetuning.Wide(values, torch.bfloat16, lr, MIXED)
        one.state_bytes = lambda: sum(12 * x.numel() for x in values)  # masters and moments
        return one.leaves, one
    leaves = [torch.nn.Parameter(x.to(torch.float32 if arm == FP32 else torch.bfloat16)) for x in values]
    one = fidelity.METHODS[arm.replace(DRAWN, "")].start(leaves, seed, lr=lr)
    for tensor in one.tensors if arm.endswith(DRAWN) else ():
        kopt.check(kopt.kopt_state_dither(one.opt, tensor, 1))
    return leaves, one


def run(job):
    phase, arm, seed = job
    (part, held_out), generator, rows = blocks(phase), torch.Generator().manual_seed(seed), []
    checkpoint, marks = "%s_%d.pt" % (OUT, seed), (STEPS,) if phase == TRAIN else MARKS
    values = [x.bfloat16().float() for x in (weights(generator) if phase == TRAIN else torch.load(checkpoint))]
    leaves, one = start(arm, values, seed, TUNING)
    for step in range(marks[-1] + 1):
        if step in marks or (phase, arm, step) == (TUNE, FP32, 0):  # where all begin
            size = 2 * leaves[0].element_size() + one.state_bytes() / sum(x.numel() for x in leaves)
            rows.append((setup(), *job, step, loss(leaves, part) if phase == TRAIN else "",
                         loss(values if step == 0 else leaves, held_out), "%.2f" % size if step else ""))
        if step in marks and arm == FP32:
            rounded = [x.detach().bfloat16() for x in leaves]
            rows.append((setup(), phase, ROUNDED, seed, step, loss(rounded, part) if phase == TRAIN else "",
                         loss(rounded, held_out), "%.2f" % size))
        if step == marks[-1]:
            break
        if phase == TRAIN:
            one.param_groups[0]["lr"] = LAST + (FIRST - LAST) * 0.5 * (1 + math.cos(math.pi * step / STEPS))
        for leaf in leaves:
            leaf.grad = None
        loss_of(leaves, batch(part, generator)).backward()
        one.step()
        with count:
            count.value += 1
            if count.value % 250 == 0:
                passed = time.time() - begin
                print("scale: %5d of %d steps, %4.0f s; %.0f s are left" % (
                    count.value, total, passed, passed * (total / count.value - 1)), file=sys.stderr, flush=True)
    if (phase, arm) == (TRAIN, FP32):
        torch.save([x.detach() for x in leaves], checkpoint)
    return [dict(zip(FIELDS, map(str, row))) for row in rows]


def initialize(*shared):
    global count, total, begin
    torch.set_num_threads(1)
    count, total, begin = shared


@functools.lru_cache(None)
def setup():
    """Runs with another one are forgotten."""
    parts = (LAYERS, WIDTH, HEADS, LENGTH, BATCH, STEPS, FIRST, LAST, TUNING, MARKS, WINDOWS, fidelity.HYPER,
             torch.__version__, text(TRAIN), text(TUNE), ROUNDED)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:8]


def read():
    with open(OUT + ".csv", "a+", newline="", encoding="utf-8") as file:
        file.seek(0)
        return [row for row in csv.DictReader(file) if row["setup"] == setup()]


def run_all():
    rows = read()
    done = {(row["phase"], row["arm"], row["seed"]) for row in rows}
    every = [(phase, arm, seed) for phase in (TRAIN, TUNE) for seed in SEEDS for arm in ARMS
             if (phase == TUNE or not arm.endswith(DRAWN)) and arm != ROUNDED]  # fp32's run has its rows, too
    jobs = [(phase, arm, seed) for phase, arm, seed in every if (phase, arm, str(seed)) not in done]
    print("scale: %d runs are done, %d are not" % (len(every) - len(jobs), len(jobs)), file=sys.stderr)
    steps = sum(STEPS if job[0] == TRAIN else MARKS[-1] for job in jobs)
    with multiprocessing.Pool(min(2, len(os.sched_getaffinity(0))), initialize,
                              (multiprocessing.Value("l", 0), steps, time.time())) as pool:
        for phase in (TRAIN, TUNE):  # which needs the checkpoints
            for some in pool.imap_unordered(run, [job for job in jobs if job[0] == phase]):
                rows = sorted(rows + some, key=lambda r: (r["phase"] == TUNE, ARMS.index(r["arm"]), r["seed"],
                                                          int(r["step"])))
                with open(OUT + ".part", "w", newline="", encoding="utf-8") as file:
                    writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
                    writer.writeheader()
                    writer.writerows(rows)
                os.replace(OUT + ".part", OUT + ".csv")


# ---- results ---------------------------------------------------------------------------------------------------------

def of(rows, phase, arm, step, what="held_out"):
    """With each seed."""
    return [float(rows[phase, arm, seed, step][what]) for seed in SEEDS]


def minus(rows, a, b):
    return [x - y for x, y in zip(of(rows, *a), of(rows, *b))]


def cell(form, values):
    return ", ".join(form % x for x in values).replace("-", "−")


def main():
    for phase in (TRAIN, TUNE):
        print("text for %s: %d bytes of Python %s, sha256 %s" % (
            phase, len(text(phase)), platform.python_version(), hashlib.sha256(text(phase)).hexdigest()))
    if not DRAW:
        run_all()
    rows = {(r["phase"], r["arm"], int(r["seed"]), int(r["step"])): r for r in read()}
    if len(rows) < len(SEEDS) * (len(ARMS) * (1 + len(MARKS)) - 1):  # 2 arms do not train, and fp32 has a step 0
        print("scale: there are runs missing: run it without `draw`", file=sys.stderr)
        return 2
    print("sha256 of the numbers: %s" % hashlib.sha256(repr(
        [(*key, r["training"], r["held_out"]) for key, r in rows.items()]).encode()).hexdigest()[:16])
    above, share, lines = {}, {}, []  # held-out losses minus fp32's; at each mark the share of fp32's progress
    for arm in ARMS:
        line, tuned = [arm] + [""] * 4, [minus(rows, (TUNE, FP32, 0), (TUNE, arm, step)) for step in MARKS]
        wide = tuned if arm == FP32 else wide
        share[arm] = [[x / y for x, y in zip(*pair)] for pair in zip(tuned, wide)]
        if not arm.endswith(DRAWN):
            above[arm] = minus(rows, (TRAIN, arm, STEPS), (TRAIN, FP32, STEPS))
            line = [arm, rows[TRAIN, arm, SEEDS[0], STEPS]["bytes"], cell("%.4f", of(rows, TRAIN, arm, STEPS, TRAIN)),
                    cell("%.4f", of(rows, TRAIN, arm, STEPS)), cell("%+.4f", above[arm]) if arm != FP32 else ""]
        lines.append(line + [cell("%.4f", x) + " nats" if arm == FP32 else cell("%.2f", y)
                             for x, y in zip(tuned, share[arm])])
    print("\n" + fidelity.table("", ["", "bytes per parameter", "training loss", "held-out loss", "minus fp32"] +
                                ["fine-tuned, %d steps" % step for step in MARKS], lines))
    claims = [("level with fp32: %s" % arm, max(map(abs, above[arm])) <= MARGIN)
              for arm in (MIXED, KAHAN, STOCHASTIC, Q8, FEEDBACK, FEEDBACK_Q8)]
    claims += [("not level: NEAREST", min(above[NEAREST]) > MARGIN)]
    claims += [("fine-tuned, from the first within a quarter of fp32's progress: %s" % arm,
                max(abs(x - 1) for x in share[arm][0]) < 0.25) for arm in (KAHAN + DRAWN, Q8 + DRAWN, STOCHASTIC)]
    claims += [("fine-tuned, less than half of it at first: %s" % arm, max(share[arm][0]) < 0.5)
               for arm in (MIXED, KAHAN, Q8, NEAREST)]
    for words, shown in claims:
        print("%s: %s" % ("shown" if shown else "NOT SHOWN", words))
    return 0 if all(shown for _, shown in claims) else 1


if __name__ == "__main__":
    sys.exit(main())
