"""Fine-tuning from 16-bit weights: how much of fp32's progress do the visible weights show, and what may one export?

    ./build.sh bench finetuning          all, with the packages of PyPI that are there: minutes on 2 cores
    ./build.sh bench finetuning quick    three networks, 2 seeds, up to 300 steps, without the packages
    ./build.sh bench finetuning bandit   reinforcement learning alone: one action
    ./build.sh bench finetuning policy   reinforcement learning alone: a character model, three minutes
    ./build.sh bench finetuning draw     draws the last run again; also: quick draw, bandit draw, policy draw

Exit status: 0 if the numbers support the claim, 1 if not.

Writes build/bench/finetuning.csv, .md and .svg, of the bandit finetuning_bandit.md, of the policy
finetuning_policy.md and .svg (docs/fine-tuning.md), and prints the hash of the numbers. Networks, arms and pictures are
those of bench/fidelity.py. Each seed has its own checkpoint, which fp32 AdamW trains; all arms then begin at its 16-bit
numbers and see the same batches. What could be tuned was fixed before:"""
HYPER = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}  # AdamW, the learning rate constant
CHECKPOINT = {"digits": (600, 64), "transformer": (1000, 8), "bandit": (600, 64), "policy": (1500, 32)}  # steps and
# batch of its training, lr 1e-3 along a cosine
RUNS = {"digits": [(1e-6, (30, 100, 300, 1000, 1500)), (1e-5, (300,))],  # learning rates, and after which steps losses
        "transformer": [(1e-6, (30, 100, 300, 1000, 3000)), (1e-5, (300,))],  # are taken
        "bandit": [(1e-6, (30, 100, 300, 1000, 1500)), (1e-5, (300,))],
        "policy": [(1e-6, (25, 50, 100, 150, 200))]}
EXPORTS = 100  # after so many steps the full weights are exported
SEEDS = {"digits": 8, "transformer": 5, "bandit": 8, "policy": 8}
ROLLOUT = 4  # characters that the policy draws
FP16 = 1 / 8  # an ulp of fp16 is this part of an ulp of bf16: so are the learning rates
SCALE = 1024.0  # of the loss, in fp16

import csv
import hashlib
import math
import multiprocessing
import os
import sys

QUICK, DRAW = (word in sys.argv[1:] for word in ("quick", "draw"))
ALONE = [word for word in ("bandit", "policy") if word in sys.argv[1:]]
if QUICK:
    RUNS = {"digits": [(1e-6, (100, 300))], "bandit": [(1e-6, (30, 100))], "policy": [(1e-6, (80,))]}
    SEEDS = dict.fromkeys(RUNS, 2)
if ALONE:
    SEEDS = {word: SEEDS[word] for word in ALONE}
import fidelity  # noqa: E402
import kahan_opt as kopt  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch.nn import Parameter  # noqa: E402

OUT = "build/bench/finetuning" + "_quick" * QUICK
RESULTS = "_".join([OUT] + ALONE) + ".csv"
FIELDS = "network format moments arm seed lr step ulps bytes start visible full nearest stochastic apart".split()
ROUNDINGS = {"KAHAN": kopt.KOPT_KAHAN, "EXACT": kopt.KOPT_EXACT, "COMPACT": kopt.KOPT_COMPACT,
             "STOCHASTIC": kopt.KOPT_STOCHASTIC, "FEEDBACK": kopt.KOPT_FEEDBACK, "NEAREST": kopt.KOPT_NEAREST}
FP32, MIXED, COPY, DRAWN = "fp32", "mixed precision", "fp32, a bf16 copy acts", ", drawn"
KEEP = ["KAHAN", "EXACT", "COMPACT"]
OURS = KEEP + [name + DRAWN for name in KEEP]
PEERS = ["optimi Kahan", "torchao stochastic"]
STUDIES = [("digits", "bf16", "fp32", [MIXED] + OURS + ["STOCHASTIC", "NEAREST"]), ("digits", "bf16", "own", PEERS),
           ("digits", "bf16", "bf16", ["KAHAN", "KAHAN" + DRAWN]), ("digits", "fp16", "fp32", [MIXED] + OURS),
           ("transformer", "bf16", "fp32", [MIXED, "KAHAN", "KAHAN" + DRAWN, "COMPACT" + DRAWN, "STOCHASTIC"]),
           ("bandit", "bf16", "fp32", [MIXED, "KAHAN", "KAHAN" + DRAWN, "COMPACT" + DRAWN, "STOCHASTIC"]),
           ("policy", "bf16", "fp32", [COPY, "KAHAN", "KAHAN" + DRAWN, "STOCHASTIC", "FEEDBACK", "NEAREST"])]
DTYPE = {"bf16": torch.bfloat16, "fp16": torch.float16}


# ---- data ------------------------------------------------------------------------------------------------------------

def windows(path):
    with open(path, "rb") as file:
        return (torch.tensor(list(file.read())).unfold(0, fidelity.LENGTH + 1, 1),)


def data(network):
    """Of the checkpoint, and of the fine-tuning: the same digits one pixel to the right; other text; the same text."""
    if network in ("digits", "bandit"):
        x, y = fidelity.digits_data()[0]
        return (x, y), (x.view(-1, 8, 8).roll(1, 2).reshape(-1, 64), y)
    return windows("kahan_opt.h"), windows("docs/numerics.md" if network == "transformer" else "kahan_opt.h")


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
    drawn = pick(logits.detach(), chance)[:, 0]
    paid = (drawn == y).float()
    return (F.cross_entropy(logits, drawn, reduction="none") * (paid - paid.mean())).mean()


def pick(logits, chance):
    return (torch.softmax(logits, 1).cumsum(1) < chance).sum(1, keepdim=True).clamp(max=logits.shape[1] - 1)


def rollouts(w, batch, store):
    """The first 8 characters of each text, and those that a character model draws after them."""
    text, chances = batch
    said = text[:, :8]
    for chance in chances.split(1, 1):
        said = torch.cat([said, pick(fidelity.model_logits(w, said[:, -8:], store), chance)], 1)
    return said


def log_chances(w, said, store):
    """The logarithm of the probability of each character after the first 8."""
    before = said[:, :7 + ROLLOUT].unfold(1, 8, 1)
    found = torch.log_softmax(fidelity.model_logits(w, before.flatten(0, 1), store), 1).view(len(said), ROLLOUT, -1)
    return found.gather(2, said[:, 8:8 + ROLLOUT, None])[:, :, 0]


def missed(w, batch, store):
    """The model goes on with a text and is paid for the characters before its first mistake. What it misses on average,
    exactly: nothing is drawn here."""
    return 1 - log_chances(w, batch[0], store).cumsum(1).exp().mean()


def reinforce_text(w, batch, store):
    """The policy gradient of one rollout for each text, with the mean payment from each character on as baseline."""
    text, said = batch
    paid = (said == text[:, :8 + ROLLOUT])[:, 8:].cumprod(1).flip(1).cumsum(1).flip(1).float()
    return -(log_chances(w, said, store) * (paid - paid.mean(0))).mean()


def network_of(name):
    """Its weights, the loss of its checkpoint, the one that the tables are made from, and the one whose gradient
    fine-tunes."""
    return {"digits": (fidelity.digits_weights,) + (fidelity.digits_loss,) * 3,
            "transformer": (fidelity.transformer_weights,) + (fidelity.transformer_loss,) * 3,
            "bandit": (fidelity.digits_weights, fidelity.digits_loss, regret, reinforce),
            "policy": (fidelity.model_weights, fidelity.model_loss, missed, reinforce_text)}[name]


def batches(training, size, seed, draws=0):
    generator = torch.Generator().manual_seed(seed)
    while True:
        rows = torch.randint(len(training[0]), (size,), generator=generator)
        yield [part[rows] for part in training] + ([torch.rand(size, draws, generator=generator)] if draws else [])


# ---- arms: .leaves are what the forward pass reads and gradients belong to, .visible what acts -----------------------

class Wide:
    """fp32 master weights, with torch.optim; the forward pass reads them, or a 16-bit copy (mixed precision)."""

    def __init__(self, start, dtype, lr, arm):
        self.master = [Parameter(w.clone()) for w in start]
        self.visible = self.master if arm == FP32 else [Parameter(w.to(dtype)) for w in start]
        self.leaves = self.visible if arm == MIXED else self.master
        self.optimizer = torch.optim.AdamW(self.master, lr=lr, **HYPER)
        self.param_groups = self.optimizer.param_groups

    def step(self, scale=1.0):
        for w, leaf in zip(self.master, self.leaves):
            w.grad = leaf.grad.float() / scale
        self.optimizer.step()
        for w, copy in zip(self.master, self.visible):
            copy.data.copy_(w.detach())

    def full(self):
        return [w.detach() for w in self.master]

    def bytes_each(self):  # weight (and copy), gradient, two moments
        copy = 0 if self.visible is self.master else self.visible[0].element_size()
        return 4 + copy + self.leaves[0].element_size() + 8


class Narrow:
    """16-bit weights, with this library or a peer."""

    def __init__(self, start, dtype, lr, seed, arm, moments):
        self.leaves = self.visible = [Parameter(w.to(dtype)) for w in start]
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
    weights, loss_of, _, _ = network_of(network)
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
    (_, _, loss_of, tuned), dtype, training = network_of(network), DTYPE[form], data(network)[1]
    rows = torch.linspace(0, len(training[0]) - 1, min(1438, len(training[0]))).long()
    chosen = [part[rows] for part in training]

    @torch.no_grad()
    def loss(weights):
        return loss_of([w.float() for w in weights], chosen, lambda x: x).item()

    @torch.no_grad()
    def drawn(batch):
        return [batch[0], rollouts([w.float() for w in one.visible], batch, store)]

    @torch.no_grad()
    def apart():
        """The mean of |ratio - 1|, of the probabilities that trainer and actor give to what the actor draws."""
        said = drawn(chosen + [torch.rand(len(rows), ROLLOUT, generator=torch.Generator().manual_seed(seed))])[1]
        trainer, actor = (log_chances([w.float() for w in part], said, store) for part in (one.leaves, one.visible))
        return ((trainer - actor).exp() - 1).abs().mean().item()

    wide = arm in (FP32, MIXED, COPY)
    one = Wide(start, dtype, lr, arm) if wide else Narrow(start, dtype, lr, seed, arm, moments)
    scale = SCALE if form == "fp16" and arm != FP32 else 1.0
    store, stream, result = fidelity.storing(torch.float32 if arm == FP32 else dtype), batches(
        training, CHECKPOINT[network][1], 5000 + seed, {"bandit": 1, "policy": ROLLOUT}.get(network, 0)), []
    values = torch.cat([w.flatten() for w in start if w.dim() > 1]).abs()
    ulp = 2.0 ** (values[values > 0].median().log2().floor().item() - (7 if form == "bf16" else 10))
    begin = loss(start)
    for step in range(1, marks[-1] + 1):
        for leaf in one.leaves:
            leaf.grad = None
        batch = drawn(next(stream)) if network == "policy" else next(stream)
        (tuned([w.float() for w in one.leaves], batch, store) * scale).backward()
        one.step(scale)
        if step in marks:
            row = [network, form, moments, arm, seed, "%g" % lr, step, "%.3g" % (lr * step / ulp),
                   "%.1f" % one.bytes_each(), begin, loss(one.visible), "", "", "",
                   apart() if arm == COPY else ""]
            full = one.full() if step == EXPORTS else None
            if full:
                nearest, stochastic = exported(full, dtype, seed)
                row[11:14] = loss(full), loss(nearest), loss(stochastic)
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
    for arm, module in () if QUICK or ALONE else zip(PEERS, ("optimi", "torchao.optim")):
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
    return "" if pair is None else "%.2f±%.2f" % pair if pair[1] >= 0.02 else "%.2f" % pair[0]


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
    marks, acts = marks_of(rows, network, "bf16"), network in ("bandit", "policy")
    low = marks[0][0]
    names = [("%d%s (%.2g)" % (step, " at %g" % lr * (lr != low), ulps) if acts else "%.2g" % ulps)
             for lr, step, ulps in marks]
    what = "steps (lr × steps / ulp)" if acts else "lr × steps / ulp"
    lines = ["", "| %s, bf16%s: %s | %s |" % (network, ", lr %g" % low * acts, what, " | ".join(names)),
             "|---" * (len(marks) + 1) + "|"]
    means = lambda arm, key: [mean(rows, network, arm, lr, step, key) for lr, step, _ in marks]
    if acts:
        lines.append("| fp32: reward, %.4f at first | %s |" % (1 - means(FP32, "start")[0], " | ".join(
            "%.4f" % (1 - missed) for missed in means(FP32, "visible"))))
    lines += ["| %s | %s |" % (arm + more, " | ".join(map(cell, shares)))
              for arm, more, shares in arms_of(rows, network)]
    if network == "policy":
        lines.append("| copy: trainer and actor differ by | %s |" % " | ".join(
            "%.2f %%" % (100 * apart) for apart in means(COPY, "apart")))
    return lines


def mean(rows, network, arm, lr, step, key):
    values = [float(r[key]) for r in rows if (r["network"], r["format"], r["arm"], r["lr"], r["step"]) ==
              (network, "bf16", arm, "%g" % lr, str(step))]
    return sum(values) / len(values)


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


def draw(rows):
    """Of the digits."""
    plot = fidelity.pyplot()
    figure, ax = plot.subplots(figsize=(7.6, 4.8))
    looks = {MIXED: ("#8c959f", 6), "KAHAN": ("#0b3d91", 2), "COMPACT": ("#218bff", 3), "STOCHASTIC": ("#f08c00", 1.5),
             "NEAREST": ("#d1242f", 1.5), PEERS[0]: ("#8250df", 1.5), PEERS[1]: ("#bc4c00", 1.5)}
    marks = marks_of(rows, "digits", "bf16")
    for arm, _, shares in arms_of(rows, "digits"):
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
    fidelity.save(figure, "", "With residuals drawn at random the visible weights follow fp32 from the first step on",
                  "Fine-tuning from bf16 weights. Dashed: residual 0 at first, and master weights", right=0.7)


def draw_rewards(rows):
    """Of the policy, against the steps; 1 is what fp32 has gained in the end."""
    looks = {FP32: ("#8c959f", 9), COPY: ("#8250df", 6), "KAHAN": ("#0b3d91", 2), "KAHAN" + DRAWN: ("#0b3d91", 5),
             "STOCHASTIC": ("#f08c00", 3), "FEEDBACK": ("#1b7c83", 1.5), "NEAREST": ("#d1242f", 2.5)}
    figure, ax = fidelity.pyplot().subplots(figsize=(6, 4.6))
    marks, ends = marks_of(rows, "policy", "bf16"), []
    steps = [0] + [step for _, step, _ in marks]
    for arm, (colour, width) in looks.items():
        gains = [0] + [mean(rows, "policy", arm, lr, step, "start") - mean(rows, "policy", arm, lr, step, "visible")
                       for lr, step, _ in marks]
        whole = gains[-1] if arm == FP32 else whole
        ax.plot(steps, [gain / whole for gain in gains], color=colour, linewidth=width, zorder=9 - width,
                linestyle="--" if arm == "KAHAN" else "-")
        ends.append((gains[-1] / whole, arm, colour))
    last = math.inf
    for end, arm, colour in sorted(ends, reverse=True):  # names beside the ends, one below the other
        last = min(end + 0.05, last - 0.085)
        ax.text(steps[-1] * 1.03, last, arm, color=colour, va="center")
    ax.set_xlim(0, steps[-1])
    ax.set_xlabel("steps")
    ax.set_ylabel("gain in reward")
    fidelity.save(figure, "", "A drawn residual, STOCHASTIC and FEEDBACK earn what fp32 earns",
                  "A character model by REINFORCE, bf16, lr 1e-6. 1: fp32's gain in the end. Mean of %d seeds" %
                  len({r["seed"] for r in rows if r["network"] == "policy"}))


def summary(rows):
    """Of the policy, at the end, with standard errors."""
    lr, step, _ = marks_of(rows, "policy", "bf16")[-1]
    print("\nshare of fp32's gain after %d steps, and its standard error:" % step)
    for arm, _, shares in arms_of(rows, "policy"):
        count = len({r["seed"] for r in rows if r["network"] == "policy"})
        print("    %-24s %5.3f  %.3f" % (arm, shares[-1][0], shares[-1][1] / fidelity.T95.get(count, 1.96)))
    print("%s: mean |ratio - 1| of the probabilities by trainer and actor of what is drawn: %.5f" %
          (COPY, mean(rows, "policy", COPY, lr, step, "apart")))


def shown(rows):
    """The claim: drawn or rounded stochastically, the weights follow fp32 from the first mark on; with a residual of 0,
    as a copy or rounded to nearest, they do not."""
    drawn, others = [], []
    for network, form, moments, arms in STUDIES:
        marks = marks_of(rows, network, form)
        for arm in arms if marks and moments == "fp32" else ():
            values = [share(rows, network, form, moments, arm, lr, step)[0] for lr, step, _ in marks]
            if arm.endswith(DRAWN) or arm in ("STOCHASTIC", "FEEDBACK"):
                drawn += [abs(value - 1) for value in values]
            elif arm in KEEP + [MIXED, COPY, "NEAREST"]:
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
        draw(results)
    for name in ("bandit", "policy"):
        if name in ran:
            write(table(results, name), OUT + "_" + name)
    if "policy" in ran:
        fidelity.OUT = OUT + "_policy"
        draw_rewards(results)
        summary(results)
    sys.exit(not shown(results))
