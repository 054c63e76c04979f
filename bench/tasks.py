"""Other tasks: the roundings beside fp32 and other libraries where errors differ from those of bench/fidelity.py.

    ./build.sh bench tasks          all, with the packages of PyPI that are there: 20 minutes of 2 cores
    ./build.sh bench tasks quick    smaller, without the packages: under a minute
    ./build.sh bench tasks draw     the table and the claims of the last run again; also: quick draw

Exit status: 0 if the numbers support the claims, 1 if not, 2 if the run cannot begin.

Writes build/bench/tasks.csv, tasks.md and tasks_verdicts.md (docs/evidence.md), and prints the hash of the numbers.
The verdicts count the three tasks of `bench fidelity`, too, if its results are there. Arms are those of
bench/fidelity.py, optimi with its own beta2, bitsandbytes with fp32 weights. In each task and seed all arms begin at
the same bf16 numbers and see the same data; weights, gradients and what layers pass on have 16 bits, fp32's runs 32.
What could be tuned was fixed before, after trials with other seeds. AdamW as in fidelity.py, but for the learning
rates:"""
DECAY = 0.999  # of the average
MOMENTUM, L2 = 0.9, 5e-4  # of SGD, as Zamirai et al. 2020 train ResNet; the learning rate falls by 10 at 3/7 and 5/7
TOKENS, CLASSES = 1024, 16  # the token of rank r comes with a probability of 1 / r; rare: the last three quarters
POLE, DISCOUNT = 200, 0.99  # steps of an episode at most
SEEDS = 10
FULL = {"average": (1000, 64, 1e-3), "rare rows": (1000, 32, 1e-3), "residual net": (450, 32, 0.1),
        "policy": (80, 16, 1e-3), "drift": (200000, 8, 1e-5)}  # steps, examples in a step, learning rate
QUICK = {"average": (300, 64, 1e-3), "rare rows": (600, 32, 1e-3), "residual net": (40, 32, 0.1),
         "policy": (15, 16, 1e-3), "drift": (2000, 8, 1e-4)}

import csv
import hashlib
import importlib
import math
import multiprocessing
import os
import sys
import time

import fidelity
import kahan_opt as kopt
import numpy
import torch
import torch.nn.functional as F
from fidelity import (BNB, COMPACT_V, FEEDBACK, FEEDBACK_V, FP32, HEAVY, KAHAN_V, METHODS, MOMENTS_ONLY, NEAREST,
                      OPTIMI, OPTIMI_OWN, OURS, ROUNDED, TORCH, TORCHAO, digits_data, matrix, uniform)
from torch.nn import Parameter

BNB_WIDE = "bitsandbytes 8-bit, fp32 weights"


def torch_sgd(parameters, hyper):
    return torch.optim.SGD(parameters, lr=hyper["lr"], momentum=MOMENTUM, weight_decay=L2)


def optimi_sgd(parameters, hyper):
    return importlib.import_module("optimi").SGD(parameters, lr=hyper["lr"], momentum=MOMENTUM, weight_decay=L2,
                                                 kahan_sum=True, triton=False)


METHODS[OPTIMI_OWN] = fidelity.MOMENTS[OPTIMI_OWN]
METHODS[BNB_WIDE] = fidelity.Method(BNB_WIDE, "", fidelity.peer(fidelity.bitsandbytes_adamw), wide=True,
                                    peer="bitsandbytes")
SGD = {name: fidelity.Method(name, "", fidelity.peer(make))
       for name, make in ((FP32, torch_sgd), (ROUNDED, torch_sgd), (TORCH, torch_sgd), (OPTIMI, optimi_sgd))}


# ---- training --------------------------------------------------------------------------------------------------------

def start(method, weights, seed, rule=None, **changes):
    """The parameters of a method, which begin at the same bf16 numbers for all, and its optimizer."""
    dtype = torch.float32 if METHODS[method].wide else torch.bfloat16
    parameters = [Parameter(w.bfloat16().to(dtype)) for w in weights]
    table = METHODS if rule is None or method in OURS else SGD
    changes.update({"rule": rule} if rule and method in OURS else {})
    return parameters, table[method].start(parameters, seed, **changes), fidelity.storing(dtype)


def finish(method, parameters, store):
    """The weights that are measured, and how layers pass them on."""
    if method != ROUNDED:
        return [p.float() for p in parameters], store
    return [p.bfloat16().float() for p in parameters], fidelity.storing(torch.bfloat16)


def descend(parameters, optimizer, steps, rate, loss, after=lambda: None):
    for step in range(steps):
        for p in parameters:
            p.grad = None
        loss([p.float() for p in parameters]).backward()
        group, lr = optimizer.param_groups[0], rate(step / steps)
        if torch.is_tensor(group["lr"]):  # torchao
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr
        optimizer.step()
        after()


def batch(training, size, generator):
    rows = torch.randint(len(training[0]), (size,), generator=generator)
    return [part[rows] for part in training]


# ---- tasks: each gives (seed, measure), with AdamW also the bytes per parameter --------------------------------------

def average(method, seed, steps, size, lr):
    """The average of the weights of an fp32 run, which is the same for all methods."""
    training, held_out = digits_data()
    g = torch.Generator().manual_seed(seed)
    weights = fidelity.digits_weights(g)
    parameters, optimizer, store = start(FP32, weights, seed, lr=lr)
    wide = METHODS[method].wide
    means = [Parameter(w.bfloat16().to(torch.float32 if wide else torch.bfloat16)) for w in weights]
    if method in OURS:
        ema = METHODS[method].start(means, seed, lr=1, betas=(DECAY, 0.999), weight_decay=0.0,
                                    rule=lambda _: kopt.kopt_ema(DECAY))

    def after():
        with torch.no_grad():
            if method not in OURS:
                for mean, p in zip(means, parameters):
                    mean.lerp_(p.to(mean.dtype), 1 - DECAY)
                return
            for tensor, p in zip(ema.tensors, parameters):
                tensor.grad, tensor.grad_format = p.data_ptr(), kopt.KOPT_F32
            kopt.check(kopt.kopt_optimizer_step(ema.opt, ema.tensors, len(means)))

    loss = lambda w: fidelity.digits_loss(w, batch(training, size, g), store)
    descend(parameters, optimizer, steps, lambda t: lr, loss, after)
    with torch.no_grad():
        yield seed, fidelity.digits_loss(finish(method, means, store)[0], held_out, lambda x: x).item()


def rare_rows(method, seed, steps, size, lr):
    """Embeddings of tokens; each has its own distribution of classes. The loss on all rare tokens alike."""
    g = torch.Generator().manual_seed(seed)
    chances = 1 / torch.arange(1, TOKENS + 1).float()
    teacher = torch.softmax(torch.randn(TOKENS, 8, generator=g) @ torch.randn(8, CLASSES, generator=g), 1)
    weights = [uniform(g, TOKENS, 16, 0.1), matrix(g, 16, 32), torch.zeros(32), matrix(g, 32, CLASSES)]
    parameters, optimizer, store = start(method, weights, seed, lr=lr)
    logits = lambda w, t, store: store(store(torch.tanh(store(F.embedding(t, w[0])) @ w[1] + w[2])) @ w[3])

    def loss(w):
        tokens = torch.multinomial(chances, size, True, generator=g)
        return F.cross_entropy(logits(w, tokens, store), torch.multinomial(teacher[tokens], 1, generator=g)[:, 0])

    descend(parameters, optimizer, steps, lambda t: lr * 0.5 * (1 + math.cos(math.pi * t)), loss)
    with torch.no_grad():
        rare = torch.arange(TOKENS // 4, TOKENS)
        weights, store = finish(method, parameters, store)
        found = torch.log_softmax(logits(weights, rare, store), 1)
        yield seed, -(teacher[rare] * found).sum(1).mean().item(), fidelity.bytes_each(parameters, optimizer)


def residual_net(method, seed, steps, size, lr, width=8, blocks=2):
    """Digits, 3 x 3 convolutions, batch norm (of the held-out images, too), two residual blocks."""
    training, held_out = digits_data()
    g = torch.Generator().manual_seed(seed)
    weights = []
    for inputs in [1] + [width] * 2 * blocks:
        weights += [torch.randn(width, inputs, 3, 3, generator=g) * (2 / (9 * inputs)) ** 0.5, torch.ones(width),
                    torch.zeros(width)]
    weights += [matrix(g, width, 10), torch.zeros(10)]
    parameters, optimizer, store = start(method, weights, seed, lr=lr, weight_decay=L2,
                                         rule=lambda lr: kopt.kopt_sgd(lr, MOMENTUM))

    def loss(w, digits, store):
        layer = lambda x, i: store(F.batch_norm(store(F.conv2d(x, w[i], padding=1)), None, None, w[i + 1], w[i + 2],
                                                True))
        x = torch.relu(layer(digits[0].view(-1, 1, 8, 8), 0))
        for i in range(3, 3 + 6 * blocks, 6):
            x = store(torch.relu(x + layer(torch.relu(layer(x, i)), i + 3)))
        return F.cross_entropy(store(store(x.mean((2, 3))) @ w[-2] + w[-1]), digits[1])

    descend(parameters, optimizer, steps, lambda t: lr * 0.1 ** ((t >= 3 / 7) + (t >= 5 / 7)),
            lambda w: loss(w, batch(training, size, g), store))
    with torch.no_grad():
        weights, store = finish(method, parameters, store)
        yield seed, loss(weights, held_out, store).item()


def policy(method, seed, steps, size, lr):
    """REINFORCE on a pole on a cart (Barto et al. 1983), a batch of episodes in each step, with the mean return at each
    time as baseline. Steps that the pole stays up, over the last quarter of the training."""
    g, rng, lengths = torch.Generator().manual_seed(seed), numpy.random.default_rng(seed), []
    weights = [matrix(g, 4, 32), torch.zeros(32), matrix(g, 32, 2), torch.zeros(2)]
    parameters, optimizer, store = start(method, weights, seed, lr=lr)
    logits = lambda w, x: store(store(torch.tanh(x @ w[0] + w[1])) @ w[2] + w[3])

    def loss(w):
        state, up = rng.uniform(-0.05, 0.05, (size, 4)), numpy.ones(size, bool)
        seen, right, alive = [], [], []
        chances = rng.uniform(size=(POLE, size))
        while up.any() and len(seen) < POLE:
            seen.append(torch.from_numpy(state).float())
            with torch.no_grad():
                right.append(chances[len(right)] < torch.softmax(logits(w, seen[-1]), 1)[:, 1].double().numpy())
            alive.append(up)
            _, speed, angle, turn = state.T
            sin, cos = numpy.sin(angle), numpy.cos(angle)
            push = (numpy.where(right[-1], 10, -10) + 0.05 * turn ** 2 * sin) / 1.1
            torque = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * cos ** 2 / 1.1))
            state = state + 0.02 * numpy.stack([speed, push - 0.05 * torque * cos / 1.1, turn, torque], 1)
            up = up & (abs(state[:, 0]) < 2.4) & (abs(state[:, 2]) < math.pi / 15)
        alive = numpy.array(alive, float)
        lengths.append(alive.sum() / size)
        returns = alive.copy()
        for t in range(len(returns) - 2, -1, -1):
            returns[t] += DISCOUNT * returns[t + 1]
        returns -= returns.sum(1, keepdims=True) / alive.sum(1, keepdims=True)
        advantage = torch.from_numpy(alive * returns / returns[alive > 0].std()).float()
        chosen = torch.from_numpy(numpy.array(right)).long()
        losses = F.cross_entropy(logits(w, torch.stack(seen)).flatten(0, 1), chosen.flatten(), reduction="none")
        return (losses * advantage.flatten()).sum() / alive.sum()

    descend(parameters, optimizer, steps, lambda t: lr, loss)
    yield seed, sum(lengths[-steps // 4:]) / len(lengths[-steps // 4:])


def drift(method, seeds, steps, size, lr, inputs=6, hidden=32, parts=64):
    """A long run at a constant rate. The networks of all seeds, 256 weights each, are one tensor; gradients by hand.
    The square error on held-out data, relative to the variance of what is to be learned."""
    g, wide = torch.Generator().manual_seed(seeds[0]), (inputs + 1) * hidden
    make = lambda *shape: torch.randn(*shape, generator=g)
    first, second, count = make(len(seeds), inputs + 1, 8) / 2, make(len(seeds), 8, 1) / 2, parts * size
    x = make(len(seeds), count + 1000, inputs + 1)
    x[:, :, 0] = 1
    y = torch.tanh(x @ first) @ second
    held_out, truth = x[:, count:], y[:, count:]
    x = x[:, :count].view(len(seeds), parts, size, -1).transpose(0, 1).contiguous()
    y = (y[:, :count] + 0.3 * make(len(seeds), count, 1)).view(len(seeds), parts, size, 1).transpose(0, 1).contiguous()
    weights = torch.cat([make(len(seeds), wide) * (inputs + 1) ** -0.5, make(len(seeds), hidden) * hidden ** -0.5], 1)
    (p,), optimizer, store = start(method, [weights.view(-1)], seeds[0], lr=lr)
    split = lambda w: (w[:, :wide].view(-1, inputs + 1, hidden), w[:, wide:].view(-1, hidden, 1))
    numbers = [i for _ in range(steps // parts + 1) for i in torch.randperm(parts, generator=g).tolist()]
    with torch.no_grad():
        for i in numbers[:steps]:
            one, two = split(p.float().view(len(seeds), -1))
            h = store(torch.tanh(torch.bmm(x[i], one)))
            error = store((torch.bmm(h, two) - y[i]) * (2 / size))
            back = store(torch.bmm(error, two.transpose(1, 2)) * (1 - h * h))
            p.grad = torch.cat([torch.bmm(x[i].transpose(1, 2), back).flatten(1),
                                torch.bmm(h.transpose(1, 2), error).flatten(1)], 1).view(-1).to(p.dtype)
            optimizer.step()
        one, two = split(finish(method, [p], store)[0][0].view(len(seeds), -1))
        losses = ((torch.tanh(held_out @ one) @ two - truth) ** 2).mean((1, 2)) / truth.var((1, 2))
    yield from zip(seeds, losses.tolist())


class Task:
    """margin: of the difference from fp32, see verdict()."""

    def __init__(self, run, title, methods, margin=0.01, more=False):
        self.run, self.title, self.methods, self.margin = run, title, methods, margin
        self.sign = -1 if more else 1

    def verdict(self, pair):
        """Level: the whole interval is within the margin. Otherwise better or worse: it is on one side of 0; or
        inconclusive: it holds 0, and a difference that matters. A run that ends in NaN is worse."""
        mean, half = self.sign * pair[0], pair[1]
        if abs(mean) + half <= self.margin:
            return LEVEL
        return BETTER if mean + half < 0 else INCONCLUSIVE if mean - half <= 0 else WORSE

    def signed(self, pair):
        if pair is None:
            return ""
        text = "%+.1f±%.1f" % pair
        if self.sign > 0:
            return fidelity.signed(pair)
        return ("0.0" + text[4:] if text[1:5] == "0.0±" else text).replace("-", "−")


LEVEL, INCONCLUSIVE, WORSE, BETTER = "level", "inconclusive", "worse", "better"
ADAMW = [FP32, ROUNDED] + OURS + [OPTIMI, OPTIMI_OWN, TORCHAO, TORCH, BNB, BNB_WIDE, HEAVY]
TASKS = {  # an average has no moments, SGD one, and the policy is measured in the training
    "average": Task(average, "average: held-out loss", [FP32, ROUNDED] + [
        m for m in OURS if m not in MOMENTS_ONLY + [FEEDBACK]] + [TORCH]),
    "rare rows": Task(rare_rows, "embeddings: loss of rare rows", ADAMW),
    "residual net": Task(residual_net, "residual net, SGD: held-out loss", [FP32, ROUNDED] + [
        m for m in OURS if m not in (KAHAN_V, COMPACT_V, FEEDBACK_V)] + [OPTIMI, TORCH]),
    "policy": Task(policy, "policy gradient: steps up, more is better", [m for m in ADAMW if m != ROUNDED], 0.5, True),
    "drift": Task(drift, "drift: held-out error", [m for m in ADAMW if m != HEAVY])}
TELLING = ["average", "rare rows", "drift"]  # the others do not separate NEAREST from fp32


# ---- runs and results ------------------------------------------------------------------------------------------------

def job(arguments):
    torch.set_num_threads(1)
    task, method, seed, size = arguments
    return [(task, method, one, "%.7g" % measure, *("%.2f" % x for x in more or [math.nan]))
            for one, measure, *more in TASKS[task].run(method, seed, *size)]


def run(sizes, seeds, arms, found):
    begin, rows = time.time(), []
    jobs = [(name, method, seed, sizes[name]) for name in reversed(list(TASKS)) for method in TASKS[name].methods
            if method in arms or METHODS[method].peer in found
            for seed in ([range(1, SEEDS + 1)] if name == "drift" else range(1, seeds + 1))]
    with multiprocessing.Pool(len(os.sched_getaffinity(0))) as pool:
        for done, more in enumerate(pool.imap_unordered(job, jobs), 1):
            rows += more
            if done % 20 == 0 or done == len(jobs):
                print("%4d of %d runs, %3.0f s" % (done, len(jobs), time.time() - begin), file=sys.stderr, flush=True)
    with open(OUT + ".csv", "w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([("task", "method", "seed", "measure", "bytes")] + sorted(rows))
    with open(OUT + "_versions.txt", "w", encoding="utf-8") as file:
        file.write(", ".join("%s %s" % item for item in found.items()) + "\n")


def results():
    """(task, method) -> the measures by seed; method -> bytes per parameter, with AdamW."""
    with open(OUT + ".csv", newline="", encoding="utf-8") as file:
        text = file.read()
    print("sha256 of the numbers: %s" % hashlib.sha256(text.encode()).hexdigest()[:16])
    measures, size = {}, {}
    for row in csv.DictReader(text.splitlines()):
        measures.setdefault((row["task"], row["method"]), {})[row["seed"]] = float(row["measure"])
        if row["bytes"] != "nan":
            size[row["method"]] = row["bytes"]
    return measures, size


def table(measures):
    """Prints and writes it. Returns (task, method) -> the mean difference from fp32 and half of its interval."""
    minus = {(task, method): fidelity.interval([x - measures[task, FP32][seed] for seed, x in by_seed.items()])
             for (task, method), by_seed in measures.items()}
    rows = [["fp32 itself"] + ["%.4g" % fidelity.interval(list(measures[task, FP32].values()))[0] for task in TASKS]]
    rows += [[method] + [task.signed(minus.get((name, method))) for name, task in TASKS.items()]
             for method in ADAMW[1:] if ("rare rows", method) in minus]
    with open(OUT + "_versions.txt", encoding="utf-8") as file:
        end = "\nMean of %d seeds; with %s.\n" % (len(measures["policy", FP32]), file.read().strip())
    head = ["minus fp32"] + [task.title for task in TASKS.values()]
    print(fidelity.table("", head, rows, end))
    return minus


def verdicts(minus, size):
    """Prints and writes how often a method was level with fp32, in these tasks and in those of bench/fidelity.py."""
    found = {method: [(name, task.verdict(minus[name, method])) for name, task in TASKS.items()
                      if (name, method) in minus] for method in ADAMW[1:] if ("rare rows", method) in minus}
    first = "build/bench/fidelity_loss.csv"
    if os.path.exists(first) and "quick" not in sys.argv[1:]:
        with open(first, encoding="utf-8") as file:
            rows = [{key: x if key in ("task", "method") else float(x) for key, x in row.items()}
                    for row in csv.DictReader(file)]
        for name, method in sorted({(row["task"], row["method"]) for row in rows}):
            if method in found:
                losses = fidelity.Losses(rows, name, method)
                pair = losses.minus if losses.finite else (math.nan, math.nan)
                found[method].insert(0, (name, Task(None, name, []).verdict(pair)))
    seen = {verdict for each in found.values() for _, verdict in each}
    kinds = [kind for kind in (LEVEL, INCONCLUSIVE, WORSE, BETTER) if kind in seen]
    of = lambda method, kind: [name for name, verdict in found[method] if verdict == kind]
    lines = [[method, size[method], "%d of %d" % (len(of(method, LEVEL)), len(found[method]))] +
             [", ".join(of(method, kind)) for kind in kinds[1:]] for method in found]
    print(fidelity.table("verdicts", ["", "bytes per parameter"] + kinds, lines))


def claims(minus):
    """Prints them. Do the numbers support all?"""
    far = lambda task, method: "%s, %s: %+.4f +- %.4f" % (task, method, *minus[task, method])
    is_not = lambda verdict, task, method: TASKS[task].verdict(minus[task, method]) != verdict
    not_level = [far(task, m) for task, m in minus if task in TELLING and m in fidelity.KEEPS
                 and is_not(LEVEL, task, m)]
    not_worse = [far(task, NEAREST) for task in TELLING if is_not(WORSE, task, NEAREST)]
    for text, missing in (("EXACT, KAHAN, COMPACT, 8-bit moments, STOCHASTIC are level with fp32: " +
                           ", ".join(TELLING), not_level),
                          ("NEAREST is worse: " + ", ".join(TELLING), not_worse)):
        print("%s: %s%s" % ("NOT SHOWN" if missing else "shown", text, " (%s)" % "; ".join(missing) * bool(missing)))
    return not not_level and not not_worse


if __name__ == "__main__":
    fidelity.OUT = OUT = "build/bench/tasks" + ("_quick" if "quick" in sys.argv[1:] else "")
    if "draw" not in sys.argv[1:]:
        if "quick" in sys.argv[1:]:
            run(QUICK, 3, fidelity.QUICK_ARMS, {"torch": torch.__version__})
        else:
            run(FULL, SEEDS, [FP32, ROUNDED] + OURS, fidelity.packages())
    elif not os.path.exists(OUT + ".csv"):
        print("tasks: there are no results to draw: run it without `draw` first", file=sys.stderr)
        sys.exit(2)
    found, each = results()
    differences = table(found)
    verdicts(differences, each)
    sys.exit(not claims(differences))
