"""Fine-tuning from 16-bit weights: how much of fp32's progress do the visible weights show, and what may one export?

    ./build.sh bench finetuning          all, with the packages of PyPI that are there: minutes on 2 cores
    ./build.sh bench finetuning quick    two networks, 2 seeds, up to 300 steps, without the packages
    ./build.sh bench finetuning bandit   the reinforcement learning alone
    ./build.sh bench finetuning draw     draws the last run again; also: quick draw, bandit draw

Exit status: 0 if the numbers support the claim, 1 if not.

Writes build/bench/finetuning.csv, and of all but the bandit finetuning.svg and finetuning.md, of the bandit
finetuning_bandit.svg and .md (docs/fine-tuning.md), and prints the hash of the numbers. Networks, arms and pictures are
those of bench/fidelity.py. Each seed has its own checkpoint, which fp32 AdamW trains; all arms then begin at its 16-bit
numbers and see the same batches. What could be tuned was fixed before:"""
HYPER = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}  # AdamW, the learning rate constant
CHECKPOINT = {"digits": (600, 64), "transformer": (1000, 8), "bandit": (600, 64)}  # steps and batch of its training, lr
# 1e-3 along a cosine
RUNS = {"digits": [(1e-6, (30, 100, 300, 1000, 1500)), (1e-5, (300,))],  # learning rates, and after which steps losses
        "transformer": [(1e-6, (30, 100, 300, 1000, 3000)), (1e-5, (300,))],  # are taken
        "bandit": [(1e-6, (30, 100, 300, 1000, 1500)), (1e-5, (300,))]}
EXPORTS = 100  # after so many steps the full weights are exported
SEEDS = {"digits": 8, "transformer": 5, "bandit": 8}
FP16 = 1 / 8  # an ulp of fp16 is this part of an ulp of bf16: so are the learning rates
SCALE = 1024.0  # of the loss, in fp16

import csv
import hashlib
import math
import multiprocessing
import os
import sys

QUICK, BANDIT, DRAW = (word in sys.argv[1:] for word in ("quick", "bandit", "draw"))
if QUICK:
    RUNS = {"digits": [(1e-6, (100, 300))], "bandit": [(1e-6, (30, 100))]}
    SEEDS = {"digits": 2, "bandit": 2}
elif BANDIT:
    SEEDS = {"bandit": SEEDS["bandit"]}
import fidelity  # noqa: E402
import kahan_opt as kopt  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch.nn import Parameter  # noqa: E402

OUT = "build/bench/finetuning" + "_quick" * QUICK
BANDITS = OUT + "_bandit"
RESULTS = (BANDITS if BANDIT else OUT) + ".csv"
FIELDS = "network format moments arm seed lr step ulps bytes start visible full nearest stochastic".split()
ROUNDINGS = {"KAHAN": kopt.KOPT_KAHAN, "EXACT": kopt.KOPT_EXACT, "COMPACT": kopt.KOPT_COMPACT,
             "STOCHASTIC": kopt.KOPT_STOCHASTIC, "NEAREST": kopt.KOPT_NEAREST}
FP32, MIXED, DRAWN = "fp32", "mixed precision", ", drawn"
KEEP = ["KAHAN", "EXACT", "COMPACT"]
OURS = KEEP + [name + DRAWN for name in KEEP]
PEERS = ["optimi Kahan", "torchao stochastic"]
STUDIES = [("digits", "bf16", "fp32", [MIXED] + OURS + ["STOCHASTIC", "NEAREST"]), ("digits", "bf16", "own", PEERS),
           ("digits", "bf16", "bf16", ["KAHAN", "KAHAN" + DRAWN]), ("digits", "fp16", "fp32", [MIXED] + OURS),
           ("transformer", "bf16", "fp32", [MIXED, "KAHAN", "KAHAN" + DRAWN, "COMPACT" + DRAWN, "STOCHASTIC"]),
           ("bandit", "bf16", "fp32", [MIXED, "KAHAN", "KAHAN" + DRAWN, "COMPACT" + DRAWN, "STOCHASTIC"])]
DTYPE = {"bf16": torch.bfloat16, "fp16": torch.float16}


# ---- data ------------------------------------------------------------------------------------------------------------

def windows(path):
    with open(path, "rb") as file:
        return (torch.tensor(list(file.read())).unfold(0, fidelity.LENGTH + 1, 1),)


def data(network):
    """Of the checkpoint, and of the fine-tuning: the same digits one pixel to the right; other text."""
    if network != "transformer":
        x, y = fidelity.digits_data()[0]
        return (x, y), (x.view(-1, 8, 8).roll(1, 2).reshape(-1, 64), y)
    return windows("kahan_opt.h"), windows("docs/numerics.md")


def regret(w, batch, store):
    """A bandit: the network shows a digit and is paid 1 if it draws the right name. What it misses on average, exactly:
    nothing is drawn here."""
    x, y = batch
    hidden = store(torch.relu(x @ w[0] + w[1]))
    return 1 - torch.softmax(store(hidden @ w[2] + w[3]), 1)[torch.arange(len(y)), y].mean()


def reinforce(w, batch, store):
    """The policy gradient of one draw for each digit (Williams 1992), with the mean payment as baseline."""
    x, y, chance = batch
    hidden = store(torch.relu(x @ w[0] + w[1]))
    logits = store(hidden @ w[2] + w[3])
    drawn = (torch.softmax(logits.detach(), 1).cumsum(1) < chance[:, None]).sum(1).clamp(max=9)
    paid = (drawn == y).float()
    return (F.cross_entropy(logits, drawn, reduction="none") * (paid - paid.mean())).mean()


def network_of(name):
    """Its weights, the loss that the tables are made from, and the one whose gradient fine-tunes."""
    return {"digits": (fidelity.digits_weights, fidelity.digits_loss, fidelity.digits_loss),
            "transformer": (fidelity.transformer_weights, fidelity.transformer_loss, fidelity.transformer_loss),
            "bandit": (fidelity.digits_weights, regret, reinforce)}[name]


def batches(training, size, seed, chances=False):
    generator = torch.Generator().manual_seed(seed)
    while True:
        rows = torch.randint(len(training[0]), (size,), generator=generator)
        yield [part[rows] for part in training] + ([torch.rand(size, generator=generator)] if chances else [])


# ---- arms: .leaves are what the forward pass reads and gradients belong to -------------------------------------------

class Wide:
    """fp32 master weights, with torch.optim; the forward pass reads them (fp32), or a 16-bit copy (mixed precision)."""

    def __init__(self, start, dtype, lr, mixed):
        self.master, self.mixed = [Parameter(w.clone()) for w in start], mixed
        self.leaves = [Parameter(w.to(dtype)) for w in start] if mixed else self.master
        self.optimizer = torch.optim.AdamW(self.master, lr=lr, **HYPER)
        self.param_groups = self.optimizer.param_groups

    def step(self, scale=1.0):
        for w, leaf in zip(self.master, self.leaves):
            w.grad = leaf.grad.float() / scale
        self.optimizer.step()
        for w, leaf in zip(self.master, self.leaves if self.mixed else ()):
            leaf.data.copy_(w.detach())

    def full(self):
        return [w.detach() for w in self.master]

    def bytes_each(self):  # weight (and copy), gradient, two moments
        return 4 + (2 * self.leaves[0].element_size() if self.mixed else 4) + 8


class Narrow:
    """16-bit weights, with this library or a peer."""

    def __init__(self, start, dtype, lr, seed, arm, moments):
        self.leaves = [Parameter(w.to(dtype)) for w in start]
        hyper = dict(HYPER, lr=lr)
        self.ours = arm not in PEERS
        if not self.ours:
            torch.manual_seed(seed)
            make = fidelity.optimi_adamw if arm == PEERS[0] else fidelity.torchao_adamw
            self.optimizer = fidelity.Peer(make, self.leaves, hyper)
            return
        self.optimizer = o = fidelity.Ours(self.leaves, seed, rounding=ROUNDINGS[arm.replace(DRAWN, "")], **hyper,
                                           moments={"fp32": kopt.KOPT_F32, "bf16": kopt.KOPT_BF16}[moments])
        before = [p.detach().clone() for p in self.leaves]
        for t in o.tensors if arm.endswith(DRAWN) else ():
            kopt.check(kopt.kopt_state_dither(o.opt, t, 1))
        assert all(map(torch.equal, before, self.leaves))

    def step(self, scale):
        self.optimizer.grad_scale = 1 / scale
        self.optimizer.step()

    def full(self):
        if not self.ours:
            return None
        result = [torch.empty(p.shape) for p in self.leaves]
        for t, out in zip(self.optimizer.tensors, result):
            kopt.check(kopt.kopt_state_read(self.optimizer.opt, t, kopt.KOPT_SLOT_WEIGHT, out.data_ptr()))
        return result

    def bytes_each(self):
        return fidelity.bytes_each(self.leaves, self.optimizer)


def exported(full, dtype, seed):
    """The full weights in 16 bit: to nearest, and stochastically."""
    nearest, stochastic = [w.to(dtype) for w in full], [torch.empty(w.shape, dtype=dtype) for w in full]
    for i, (w, out) in enumerate(zip(full, stochastic)):
        kopt.check(kopt.kopt_convert_stochastic(out.data_ptr(), fidelity.FORMAT[dtype], w.contiguous().data_ptr(),
                                                kopt.KOPT_F32, w.numel(), kopt.kopt_random_key(seed=seed, id=i)))
    return nearest, stochastic


# ---- runs ------------------------------------------------------------------------------------------------------------

def checkpoint(network, seed):
    weights, loss_of, _ = network_of("digits" if network == "bandit" else network)
    steps, size = CHECKPOINT[network]
    w = [Parameter(x.clone()) for x in weights(torch.Generator().manual_seed(seed))]
    optimizer, stream = torch.optim.AdamW(w, lr=1e-3, **HYPER), batches(data(network)[0], size, 1000 + seed)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 1e-3 * 0.5 * (1 + math.cos(math.pi * step / steps))
        optimizer.zero_grad()
        loss_of(w, next(stream), lambda x: x).backward()
        optimizer.step()
    return [x.detach() for x in w]


def run(network, form, moments, arm, seed, lr, marks, start):
    """A row for each mark."""
    (_, loss_of, tuned), dtype, training = network_of(network), DTYPE[form], data(network)[1]
    rows = torch.linspace(0, len(training[0]) - 1, min(1438, len(training[0]))).long()
    chosen = [part[rows] for part in training]

    @torch.no_grad()
    def loss(weights):
        return loss_of([w.float() for w in weights], chosen, lambda x: x).item()

    wide = arm in (FP32, MIXED)
    one = Wide(start, dtype, lr, arm == MIXED) if wide else Narrow(start, dtype, lr, seed, arm, moments)
    scale = SCALE if form == "fp16" and arm != FP32 else 1.0
    store, stream, result = fidelity.storing(torch.float32 if arm == FP32 else dtype), batches(
        training, CHECKPOINT[network][1], 5000 + seed, network == "bandit"), []
    values = torch.cat([w.flatten() for w in start if w.dim() > 1]).abs()
    ulp = 2.0 ** (values[values > 0].median().log2().floor().item() - (7 if form == "bf16" else 10))
    begin = loss(start)
    for step in range(1, marks[-1] + 1):
        for leaf in one.leaves:
            leaf.grad = None
        (tuned([w.float() for w in one.leaves], next(stream), store) * scale).backward()
        one.step(scale)
        if step in marks:
            row = [network, form, moments, arm, seed, "%g" % lr, step, "%.3g" % (lr * step / ulp),
                   "%.1f" % one.bytes_each(), begin, loss(one.leaves), "", "", ""]
            full = one.full() if step == EXPORTS else None
            if full:
                nearest, stochastic = exported(full, dtype, seed)
                row[11:] = loss(full), loss(nearest), loss(stochastic)
            result.append(["%.7f" % x if isinstance(x, float) else x for x in row])
    return result


def job(arguments):
    """All runs of a network from one checkpoint."""
    torch.set_num_threads(1)
    network, seed, peers = arguments
    rows, trained = [], checkpoint(network, seed)
    for form in ("bf16", "fp16"):
        studies = [(m, arm) for n, f, m, arms in STUDIES if (n, f) == (network, form) for arm in arms
                   if arm not in PEERS or arm in peers]
        start = [w.to(DTYPE[form]).float() for w in trained]
        for lr, marks in RUNS[network] if studies else ():
            lr *= FP16 if form == "fp16" else 1
            for moments, arm in [("fp32", FP32)] + studies:
                rows += run(network, form, moments, arm, seed, lr, marks, start)
    return rows


def run_all():
    peers, rows = present(), []
    jobs = [(network, seed, peers) for network, seeds in SEEDS.items() for seed in range(seeds)]
    with multiprocessing.Pool(len(os.sched_getaffinity(0))) as pool:
        for (network, seed, _), more in zip(jobs, pool.imap(job, jobs)):
            rows += more
            print("%s, seed %d" % (network, seed), file=sys.stderr, flush=True)
    with open(RESULTS, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([FIELDS] + rows)


def present():
    """Peers that are installed."""
    found = []
    for arm, module in () if QUICK else zip(PEERS, ("optimi", "torchao.optim")):
        try:
            __import__(module)
            found.append(arm)
        except (ImportError, AttributeError, RuntimeError) as absent:
            print("SKIPPED: %s (%s)" % (arm, str(absent).splitlines()[:1]), file=sys.stderr)
    return found


# ---- results ---------------------------------------------------------------------------------------------------------

def read():
    with open(RESULTS, newline="", encoding="utf-8") as file:
        text = file.read()
    print("sha256 of the numbers: %s" % hashlib.sha256(text.encode()).hexdigest()[:16])
    return list(csv.DictReader(text.splitlines()))


def share(rows, network, form, moments, arm, lr, step, what="visible"):
    """Of fp32's progress: the mean over the seeds, and half of its 95 % interval. None: was not run."""
    def of(moments, arm):
        wanted = [network, form, moments, arm, "%g" % lr, str(step)]
        return {r["seed"]: r for r in rows
                if [r[name] for name in ("network", "format", "moments", "arm", "lr", "step")] == wanted}
    mine, theirs = of(moments, arm), of("fp32", FP32)
    values = [(float(r["start"]) - float(r[what])) / (float(r["start"]) - float(theirs[seed]["visible"]))
              for seed, r in mine.items() if r[what]]
    return fidelity.interval(values) if len(values) > 1 else None


def cell(pair):
    return "" if pair is None else "%.2f ± %.2f" % pair if pair[1] >= 0.02 else "%.2f" % pair[0]


def marks_of(rows, network, form):
    """(lr, step, ulps) in the order of the picture."""
    seen = {(float(r["lr"]), int(r["step"])): [] for r in rows if (r["network"], r["format"]) == (network, form)}
    for r in rows:
        if (r["network"], r["format"]) == (network, form):
            seen[float(r["lr"]), int(r["step"])].append(float(r["ulps"]))
    return sorted(((lr, step, sum(x) / len(x)) for (lr, step), x in seen.items()), key=lambda m: m[2])


def in_tables(moments, arm):
    """In the tables and the picture; the others are in the .csv: they hardly differ from those that are shown."""
    return moments != "bf16" and not arm.startswith("EXACT")


def arms_of(rows, network):
    """What is in its table and picture: the arm, what is added to its name, and its share at each mark."""
    marks = marks_of(rows, network, "bf16")
    for n, f, moments, arms in STUDIES:
        for arm in [arm for arm in arms if (n, f) == (network, "bf16") and in_tables(moments, arm)]:
            shares = [share(rows, n, f, moments, arm, lr, step) for lr, step, _ in marks]
            if any(shares):
                yield arm, {"bf16": ", moments bf16"}.get(moments, ""), shares


def table(rows, network):
    marks, bandit = marks_of(rows, network, "bf16"), network == "bandit"
    low = marks[0][0]
    names = [("%d%s (%.2g)" % (step, " at %g" % lr * (lr != low), ulps) if bandit else "%.2g" % ulps)
             for lr, step, ulps in marks]
    what = "steps (lr × steps / ulp)" if bandit else "lr × steps / ulp"
    lines = ["", "| %s, bf16%s: %s | %s |" % (network, ", lr %g" % low * bandit, what, " | ".join(names)),
             "|---" * (len(marks) + 1) + "|"]
    if bandit:
        of = lambda lr, step, key: [1 - float(r[key]) for r in rows if (r["network"], r["arm"], r["lr"], r["step"]) ==
                                    (network, FP32, "%g" % lr, str(step))]
        mean = lambda values: sum(values) / len(values)
        lines.append("| fp32: reward, %.4f at first | %s |" % (mean(of(*marks[0][:2], "start")), " | ".join(
            "%.4f" % mean(of(lr, step, "visible")) for lr, step, _ in marks)))
    return lines + ["| %s | %s |" % (arm + more, " | ".join(map(cell, shares)))
                    for arm, more, shares in arms_of(rows, network)]


def exports(rows):
    lr = RUNS["digits"][0][0]
    lines = ["", "| digits, bf16, %d steps at %g | visible | full, fp32 | to nearest | stochastic |" % (EXPORTS, lr),
             "|---|---|---|---|---|"]
    return lines + ["| %s | %s |" % (arm, " | ".join(
        cell(share(rows, "digits", "bf16", "fp32", arm, lr, EXPORTS, what))
        for what in ("visible", "full", "nearest", "stochastic")))
        for arm in [FP32, "KAHAN", "KAHAN" + DRAWN, "COMPACT" + DRAWN]]


def write(lines, out):
    with open(out + ".md", "w", encoding="utf-8") as file:
        file.write("\n".join(lines[1:]) + "\n")
    print("\n".join(lines))


def draw(rows, network, title, subtitle):
    plot = fidelity.pyplot()
    figure, ax = plot.subplots(figsize=(7.6, 4.8))
    looks = {MIXED: ("#8c959f", 6), "KAHAN": ("#0b3d91", 2), "COMPACT": ("#218bff", 3), "STOCHASTIC": ("#f08c00", 1.5),
             "NEAREST": ("#d1242f", 1.5), PEERS[0]: ("#8250df", 1.5), PEERS[1]: ("#bc4c00", 1.5)}
    marks = marks_of(rows, network, "bf16")
    for arm, _, shares in arms_of(rows, network):
        points = [(ulps, *pair) for (_, _, ulps), pair in zip(marks, shares) if pair]
        colour, width = looks[arm.replace(DRAWN, "")]
        ax.errorbar(*zip(*points), color=colour, linewidth=width, label=arm, zorder=9 - width, elinewidth=1,
                    linestyle="-" if arm.endswith(DRAWN) or arm in ("STOCHASTIC", "NEAREST") else "--", marker="o",
                    markersize=width + 2, markeredgewidth=0)
    ax.set_xscale("log")
    ax.set_xlabel("learning rate × steps / ulp of the median weight")
    ax.set_ylim(-0.1, 1.2)
    ax.set_ylabel("share of fp32's progress in the weights")
    fidelity.legend(figure, ax, 0.7)
    fidelity.save(figure, "", title, subtitle + ". Dashed: residual 0 at first, and master weights", right=0.7)


def shown(rows):
    """The claim: with a drawn residual the weights follow fp32 from the first mark on, with 0 or as a copy not."""
    drawn, others = [], []
    for network, form, moments, arms in STUDIES:
        marks = marks_of(rows, network, form)
        for arm in arms if marks and moments == "fp32" else ():
            values = [share(rows, network, form, moments, arm, lr, step)[0] for lr, step, _ in marks]
            if arm.endswith(DRAWN):
                drawn += [abs(value - 1) for value in values]
            elif arm in KEEP + [MIXED]:
                others.append(values[0])
    print("\ndrawn: at most %.2f from fp32's progress; others: at most %.2f of it at first" % (max(drawn), max(others)))
    return max(drawn) < 0.25 and max(others) < 0.5


if __name__ == "__main__":
    if not DRAW:
        run_all()
    results = read()
    ran = {row["network"] for row in results}
    if "digits" in ran:
        fidelity.OUT = OUT
        write([line for name in ("digits", "transformer") if name in ran for line in table(results, name)] +
              exports(results), OUT)
        draw(results, "digits", "With residuals drawn at random the visible weights follow fp32 from the first step on",
             "Fine-tuning from bf16 weights")
    if "bandit" in ran:
        fidelity.OUT = BANDITS
        write(table(results, "bandit"), BANDITS)
        draw(results, "bandit", "With residuals drawn at random the visible weights earn fp32's reward from the start",
             "A policy gradient from bf16 weights")
    sys.exit(not shown(results))
