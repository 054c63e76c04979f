"""What training in 16 bit loses, and what it does not: five experiments with error bars, a picture and a table each.

    ./build.sh bench fidelity          all, with the packages of PyPI that are there: minutes on 2 cores
    ./build.sh bench fidelity quick    smaller, without the packages: under a minute
    ./build.sh bench fidelity draw     draws the results of the last run again, without running it; also: quick draw

Writes the results to build/bench/fidelity_*.csv, pictures (.svg) and tables (.md) beside them. Each picture has a claim
in its title. Exit status: 0 if the numbers support all claims, 1 if not, 2 if the run cannot begin. docs/evidence.md
explains the experiments. What could be tuned stands here. It was fixed before the runs and is the same for all:"""
# AdamW with the defaults of PyTorch. The learning rate falls to 0 along a cosine, from the first step on.
HYPER = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
MARGIN = 0.01  # two losses are level if the 95 % interval of their difference lies within +-MARGIN nats
FULL = {"seeds": 10, "stall": 2000, "decay": 20000, "settle": 4000, "drop": 8000,  # steps
        "digits": (1200, 64, 2000), "language model": (1500, 32, 8192), "transformer": (1000, 8, 512)}
QUICK = {"seeds": 3, "stall": 500, "decay": 2000, "settle": 3000, "drop": 4000,
         "digits": (300, 64, 500), "language model": (400, 16, 1024), "transformer": (400, 4, 64)}
# of the networks: steps, examples in a step, and at most so many examples for the final loss
UPDATES = [1e-2, 3e-3, 1e-3, 3e-4, 1e-4, 3e-5, 1e-5, 3e-6, 1e-6, 3e-7, 1e-7, 3e-8, 1e-8]  # relative to a weight of 1.5

import ctypes
import csv
import functools
import importlib
import logging
import math
import multiprocessing
import os
import re
import sys
import textwrap
import time

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # torchao compiles its step; the operations are the same without
os.environ["OMP_NUM_THREADS"] = "1"
sys.path[0] = "build/bench/python"  # the bindings that build.sh makes
try:
    import torch
    import torch.nn.functional as F
    import kahan_opt as kopt
except ImportError as error:
    print("fidelity: %s (./build.sh bench fidelity makes the bindings and finds PyTorch)" % error,
          file=sys.stderr)
    sys.exit(2)

logging.disable(logging.WARNING)  # torchao and bitsandbytes speak of parts that are not used here
OUT = "build/bench/fidelity"
T95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}  # Student, by count


def interval(values):
    """The mean and half of its 95 % interval."""
    n = len(values)
    mean = sum(values) / n
    deviation = math.sqrt(sum((x - mean) ** 2 for x in values) / (n - 1))
    return mean, T95.get(n, 1.96) * deviation / math.sqrt(n)


# ---- the methods -----------------------------------------------------------------------------------------------------

FORMAT = {torch.float32: kopt.KOPT_F32, torch.bfloat16: kopt.KOPT_BF16, torch.float16: kopt.KOPT_FP16}


class Ours:
    """kopt_adamw, or another rule, for a list of parameters, with the face of a torch.optim.Optimizer."""

    def __init__(self, parameters, seed, lr, betas, eps, weight_decay, rule=kopt.kopt_adamw, moments=None,
                 **fields):
        self.parameters, self.param_groups, self.grad_scale = parameters, [{"lr": lr}], 1
        self.opt = rule(lr)
        self.opt.beta1, self.opt.beta2 = betas
        self.opt.eps, self.opt.weight_decay, self.opt.seed = eps, weight_decay, seed
        if moments is not None:
            self.opt.first_moment_format = self.opt.second_moment_format = moments
        for name, value in fields.items():
            setattr(self.opt, name, value)
        self.tensors, self.blocks = (kopt.kopt_tensor * len(parameters))(), []
        for i, p in enumerate(parameters):
            form = FORMAT[p.dtype]
            t = kopt.kopt_tensor_of(p.data_ptr(), form, None, form, p.numel(), None, 0)
            self.blocks.append(ctypes.create_string_buffer(kopt.kopt_state_size(self.opt, t)))
            t.state, t.state_size = ctypes.addressof(self.blocks[i]), len(self.blocks[i])
            self.tensors[i] = t
        kopt.check(kopt.kopt_list_set_ids(self.tensors, len(parameters), 0))
        kopt.check(kopt.kopt_state_init(self.opt, self.tensors, len(parameters), None))

    def step(self):
        grads = [p.grad.contiguous() for p in self.parameters]
        for tensor, grad in zip(self.tensors, grads):
            tensor.grad = grad.data_ptr()
        self.opt.lr, self.opt.grad_scale = self.param_groups[0]["lr"], self.grad_scale
        kopt.check(kopt.kopt_optimizer_step(self.opt, self.tensors, len(self.tensors)))

    def begin(self, values):  # the first parameter at these fp32 numbers, as far as it can hold them
        kopt.check(kopt.kopt_state_write(self.opt, self.tensors[0], kopt.KOPT_SLOT_WEIGHT, values.data_ptr()))

    def state_bytes(self):
        return sum(len(block) for block in self.blocks)

    def read(self, slot):  # of the first parameter
        out = torch.empty(self.parameters[0].numel())
        kopt.check(kopt.kopt_state_read(self.opt, self.tensors[0], slot, out.data_ptr()))
        return out.double()

    def weight(self):  # with its residual
        return self.read(kopt.KOPT_SLOT_WEIGHT)

    def second_moment(self):
        return self.read(kopt.KOPT_SLOT_SECOND_MOMENT)


class Peer:
    """An optimizer of another library."""

    def __init__(self, make, parameters, hyper):
        self.optimizer, self.parameters = make(parameters, hyper), parameters
        self.param_groups, self.step, self.grad_scale = self.optimizer.param_groups, self.optimizer.step, None

    def begin(self, values):
        parameter = self.parameters[0]
        parameter.grad = torch.zeros_like(parameter)
        self.step()  # makes the state
        with torch.no_grad():
            parameter.copy_(values)
            if "kahan_comp" in self.optimizer.state[parameter]:
                self.optimizer.state[parameter]["kahan_comp"].copy_(values - parameter)

    def state_bytes(self):  # without the step counts, and without the tables that all tensors share
        shared = ("step", "qmap1", "qmap2")
        return sum(value.numel() * value.element_size() for state in self.optimizer.state.values()
                   for name, value in state.items() if torch.is_tensor(value) and name not in shared)

    def weight(self):  # with its residual
        residual = self.optimizer.state[self.parameters[0]].get("kahan_comp")
        weight = self.parameters[0].detach().double()
        return weight if residual is None else weight + residual.double()

    def second_moment(self):
        state = self.optimizer.state[self.parameters[0]]
        if "state2" in state:
            return (state["qmap2"][state["state2"].long()].view(-1, 256) * state["absmax2"].view(-1, 1)).view(-1)
        return state["exp_avg_sq"].double()


class HeavyBall(Peer):
    """Beside each weight and moment an 8-bit correction, which its own class reads and writes."""

    def state(self, parameter):
        return self.optimizer.state[parameter][0]

    def correction(self, name):
        state = self.state(self.parameters[0])
        return importlib.import_module("heavyball").utils._ULPState(state[name + "::ecc"], 127.0)

    def begin(self, values):
        super().begin(values)
        self.correction("param").compute_correction(values, self.parameters[0].detach())

    def state_bytes(self):
        return sum(value.numel() * value.element_size() for p in self.parameters
                   for name, value in self.state(p).items() if torch.is_tensor(value) and name != "step")

    def weight(self):
        return self.correction("param").decode(self.parameters[0].detach()).double()

    def second_moment(self):
        name = "update_by_adam_exp_avg_sq_0"
        return self.correction(name).decode(self.state(self.parameters[0])[name]).double()


def bytes_each(parameters, optimizer):
    """Of weight, gradient and state."""
    memory = sum(2 * p.numel() * p.element_size() for p in parameters) + optimizer.state_bytes()
    return memory / sum(p.numel() for p in parameters)


class Method:
    """wide: fp32 throughout; rounded: until it is measured. peer: the package of PyPI that it needs. width: of its
    line."""

    def __init__(self, name, colour, make, wide=False, peer=None, formats=("bf16", "fp16"), width=1.5, rounded=False):
        self.name, self.colour, self.make, self.wide, self.peer = name, colour, make, wide, peer
        self.formats, self.width, self.rounded = formats, width, rounded

    def start(self, parameters, seed, **changes):
        torch.manual_seed(seed)  # torchao draws its random bits from here
        return self.make(parameters, seed, {**HYPER, **changes})


def ours(rounding, **fields):
    return lambda parameters, seed, hyper: Ours(parameters, seed, rounding=rounding, **hyper, **fields)


def peer(make, face=Peer):
    return lambda parameters, seed, hyper: face(make, parameters, hyper)


def torch_adamw(parameters, hyper):
    return torch.optim.AdamW(parameters, **hyper)


def optimi_adamw(parameters, hyper):
    return importlib.import_module("optimi").AdamW(parameters, kahan_sum=True, triton=False, **hyper)


def optimi_own_adamw(parameters, hyper):
    return optimi_adamw(parameters, {**hyper, "betas": (0.9, 0.99)})


def torchao_adamw(parameters, hyper):
    return importlib.import_module("torchao.optim")._AdamW(parameters, bf16_stochastic_round=True, **hyper)


def bitsandbytes_adamw(parameters, hyper):
    return importlib.import_module("bitsandbytes").optim.AdamW8bit(parameters, **hyper)


def heavyball_adamw(parameters, hyper):
    mode = {torch.bfloat16: "bf16+8", torch.float16: "fp16+8"}[parameters[0].dtype]
    return importlib.import_module("heavyball").AdamW(parameters, ecc=mode, param_ecc=mode, **hyper)


def optimi_eps_adamw(parameters, hyper):
    return optimi_adamw(parameters, {**hyper, "eps": 1e-6})


def torch_eps_adamw(parameters, hyper):
    return torch_adamw(parameters, {**hyper, "eps": 1e-6})


FP32, NEAREST, STOCHASTIC, KAHAN, COMPACT, EXACT, FEEDBACK = (
    "fp32", "NEAREST", "STOCHASTIC", "KAHAN", "COMPACT", "EXACT", "FEEDBACK")
ROUNDED, KAHAN_V, COMPACT_V, Q8, FEEDBACK_V, FEEDBACK_Q8 = (
    "fp32 rounded at the end", "KAHAN with 8-bit second moments", "COMPACT with 8-bit second moments",
    "COMPACT with 8-bit moments", "FEEDBACK with 8-bit second moments", "FEEDBACK with 8-bit moments")
TORCH, OPTIMI, TORCHAO, BNB, HEAVY = (
    "torch 16-bit", "optimi Kahan", "torchao stochastic", "bitsandbytes 8-bit", "HeavyBall ecc")
OPTIMI_OWN, FP32_OWN = "optimi Kahan, its beta2 of 0.99", "fp32, beta2 of 0.99"
OPTIMI_EPS, TORCH_EPS = "optimi Kahan with an eps of 1e-6", "torch 16-bit with an eps of 1e-6"
V8 = {"second_moment_format": kopt.KOPT_Q8}
METHODS = {m.name: m for m in (
    Method(FP32, "#8c959f", peer(torch_adamw), wide=True, width=9),  # of PyTorch: a reference that is not ours
    Method(ROUNDED, "#57606a", peer(torch_adamw), wide=True, rounded=True),
    Method(EXACT, "#2ca25f", ours(kopt.KOPT_EXACT), width=6),
    Method(KAHAN, "#0b3d91", ours(kopt.KOPT_KAHAN), width=2.5),
    Method(KAHAN_V, "#4c6fbf", ours(kopt.KOPT_KAHAN, **V8)),
    Method(COMPACT, "#218bff", ours(kopt.KOPT_COMPACT), width=4),
    Method(COMPACT_V, "#79b8ff", ours(kopt.KOPT_COMPACT, **V8)),
    Method(Q8, "#1b7c83", ours(kopt.KOPT_COMPACT, moments=kopt.KOPT_Q8)),
    Method(FEEDBACK, "#57b894", ours(kopt.KOPT_FEEDBACK), width=3),
    Method(FEEDBACK_V, "#3d8b6e", ours(kopt.KOPT_FEEDBACK, **V8)),
    Method(FEEDBACK_Q8, "#9a6700", ours(kopt.KOPT_FEEDBACK, moments=kopt.KOPT_Q8)),
    Method(STOCHASTIC, "#f08c00", ours(kopt.KOPT_STOCHASTIC)),
    Method(NEAREST, "#d1242f", ours(kopt.KOPT_NEAREST, moment_rounding=kopt.KOPT_NEAREST)),
    Method(OPTIMI, "#8250df", peer(optimi_adamw), peer="optimi"),
    Method(TORCHAO, "#bc4c00", peer(torchao_adamw), peer="torchao", formats=("bf16",)),
    Method(TORCH, "#e85aad", peer(torch_adamw), peer="torch"),
    Method(OPTIMI_EPS, "#b392f0", peer(optimi_eps_adamw), peer="optimi", formats=("fp16",)),
    Method(TORCH_EPS, "#f2a6d2", peer(torch_eps_adamw), peer="torch", formats=("fp16",)),
    Method(BNB, "#6e5a2e", peer(bitsandbytes_adamw), peer="bitsandbytes"),
    Method(HEAVY, "#1f2328", peer(heavyball_adamw, HeavyBall), peer="heavyball"))}
KEEPS = [EXACT, KAHAN, KAHAN_V, COMPACT, COMPACT_V, Q8, FEEDBACK, FEEDBACK_V, FEEDBACK_Q8, STOCHASTIC]
OURS = KEEPS + [NEAREST]
QUICK_ARMS = [FP32, EXACT, KAHAN, COMPACT, Q8, FEEDBACK_Q8, STOCHASTIC, NEAREST]
MOMENTS_ONLY = [ROUNDED, KAHAN_V, COMPACT_V, Q8, FEEDBACK_V, FEEDBACK_Q8]  # weights are stored as another arm's

# Formats and roundings of the second moment. Weights play no part.
MOMENTS = {m.name: m for m in (
    METHODS[FP32],
    Method("bf16", "#0b3d91", ours(kopt.KOPT_KAHAN), width=6),
    Method("fp16 (its root)", "#218bff", ours(kopt.KOPT_KAHAN, moments=kopt.KOPT_FP16), width=3.5),
    Method("8-bit", "#1b7c83", ours(kopt.KOPT_KAHAN, moments=kopt.KOPT_Q8)),
    Method("bf16 to nearest", "#d1242f", ours(kopt.KOPT_KAHAN, moment_rounding=kopt.KOPT_NEAREST)),
    Method("8-bit to nearest", "#f08c00", ours(kopt.KOPT_KAHAN, moments=kopt.KOPT_Q8,
                                               moment_rounding=kopt.KOPT_NEAREST)),
    METHODS[OPTIMI], METHODS[TORCHAO], METHODS[TORCH], METHODS[BNB], METHODS[HEAVY],
    Method(OPTIMI_OWN, "", peer(optimi_own_adamw), peer="optimi"),
    Method(FP32_OWN, "", lambda parameters, seed, hyper: Peer(
        torch_adamw, parameters, {**hyper, "betas": (0.9, 0.99)}), wide=True))}
BESIDE = {OPTIMI_OWN: FP32_OWN}  # what it is compared with; all others with FP32
FOLLOW = {"bf16": 0.02, "fp16 (its root)": 0.02, "8-bit": 0.3, HEAVY: 0.02}  # how far from fp32's at most
STUCK = ["bf16 to nearest", "8-bit to nearest", OPTIMI, TORCHAO, TORCH, BNB]


# ---- the three networks ----------------------------------------------------------------------------------------------

# Every tensor in memory has 16 bits: weights, gradients, and what layers pass on, forward and backward (store). The
# arithmetic between is fp32, as on hardware that multiplies 16-bit numbers. So the results do not depend on how well
# PyTorch computes in 16 bit on this processor.

def storing(dtype):
    return (lambda x: x) if dtype == torch.float32 else (lambda x: x.to(dtype).float())


def uniform(generator, rows, columns, limit):
    return limit * (2 * torch.rand(rows, columns, generator=generator) - 1)


def matrix(generator, rows, columns):
    return uniform(generator, rows, columns, rows ** -0.5)


@functools.lru_cache(None)
def digits_data():
    from sklearn.datasets import load_digits  # 1797 images of 8 x 8, in the package itself
    data = load_digits()
    x, y = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
    held_out = torch.arange(len(y)) % 5 == 4
    return (x[~held_out], y[~held_out]), (x[held_out], y[held_out])


def digits_weights(g):
    return [matrix(g, 64, 128), torch.zeros(128), matrix(g, 128, 10), torch.zeros(10)]


def digits_loss(w, batch, store):
    x, y = batch
    hidden = store(torch.relu(x @ w[0] + w[1]))
    return F.cross_entropy(store(hidden @ w[2] + w[3]), y)


@functools.lru_cache(None)
def text_data(length):
    """Windows of the bytes of kahan_opt.h. One block of 256 bytes in ten is held out, as in the demo."""
    with open("kahan_opt.h", "rb") as file:
        text = torch.tensor(list(file.read()))
    begin = torch.arange(len(text) - length + 1)
    first, last = begin // 256 % 10 == 5, (begin + length - 1) // 256 % 10 == 5
    windows = text.unfold(0, length, 1)
    return (windows[begin[~first & ~last]],), (windows[begin[first & last]],)


def model_weights(g):  # docs/examples/demo.c: 8 bytes, 16 numbers each, 96 units, 256 bytes to choose from
    return [uniform(g, 256, 16, 1), matrix(g, 128, 96), torch.zeros(96), matrix(g, 96, 256), torch.zeros(256)]


def model_logits(w, text, store):
    hidden = store(torch.tanh(F.embedding(text, w[0]).flatten(1) @ w[1] + w[2]))
    return store(hidden @ w[3] + w[4])


def model_loss(w, batch, store):
    window, = batch
    return F.cross_entropy(model_logits(w, window[:, :8], store), window[:, 8])


WIDTH, HEADS, LENGTH = 32, 2, 16


def transformer_weights(g):
    one = torch.ones(WIDTH)
    return [uniform(g, 256, WIDTH, 1), uniform(g, LENGTH, WIDTH, 1), one, matrix(g, WIDTH, 3 * WIDTH),
            matrix(g, WIDTH, WIDTH), one, matrix(g, WIDTH, 4 * WIDTH), matrix(g, 4 * WIDTH, WIDTH), one,
            matrix(g, WIDTH, 256)]


def transformer_loss(w, batch, store):
    window, = batch
    embedding, position, gain1, qkv, project, gain2, up, down, gain3, out = w
    norm = lambda x, gain: store(F.layer_norm(x, (WIDTH,)) * gain)
    x = store(F.embedding(window[:, :-1], embedding) + position)
    parts = store(norm(x, gain1) @ qkv).view(len(window), LENGTH, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
    scores = parts[0] @ parts[1].transpose(-1, -2) * (HEADS / WIDTH) ** 0.5
    scores = scores.masked_fill(torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1), -math.inf)
    heads = store(store(torch.softmax(scores, -1)) @ parts[2])
    x = store(x + heads.transpose(1, 2).reshape(len(window), LENGTH, WIDTH) @ project)
    x = store(x + store(F.gelu(norm(x, gain2) @ up)) @ down)
    return F.cross_entropy(store(norm(x, gain3) @ out).flatten(0, 1), window[:, 1:].flatten())


class Task:
    def __init__(self, name, dtype, weights, loss, data):
        self.name, self.dtype, self.weights, self.loss, self.data = name, dtype, weights, loss, data
        self.format = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]


TASKS = {t.name: t for t in (
    Task("digits", torch.bfloat16, digits_weights, digits_loss, digits_data),
    Task("language model", torch.bfloat16, model_weights, model_loss, lambda: text_data(9)),
    Task("transformer", torch.float16, transformer_weights, transformer_loss, lambda: text_data(LENGTH + 1)))}


def train(task, method, seed, size):
    """One run: (loss on training data, loss on held-out data, bytes per parameter, steps skipped by loss scaling)."""
    task, method, (steps, batch, most) = TASKS[task], METHODS[method], size
    dtype = torch.float32 if method.wide else task.dtype
    store, generator = storing(dtype), torch.Generator().manual_seed(seed)
    training, held_out = task.data()
    # All methods begin at the same 16-bit numbers and see the same batches.
    weights = [torch.nn.Parameter(w.to(task.dtype).to(dtype)) for w in task.weights(generator)]
    optimizer = method.start(weights, seed)
    scale, clean, skipped = (65536.0 if dtype == torch.float16 else 1.0), 0, 0
    for step in range(steps):
        rows = torch.randint(len(training[0]), (batch,), generator=generator)
        loss = task.loss([w.float() for w in weights], [part[rows] for part in training], store)
        for w in weights:
            w.grad = None
        (loss * scale).backward()
        group, lr = optimizer.param_groups[0], HYPER["lr"] * 0.5 * (1 + math.cos(math.pi * step / steps))
        if torch.is_tensor(group["lr"]):  # torchao
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr
        if dtype == torch.float16:  # loss scaling: halve on overflow and skip, double after 500 good steps
            if not math.isfinite(loss.item()):  # whatever the scale is
                break
            if not all(torch.isfinite(w.grad).all() for w in weights):
                scale, clean, skipped = scale / 2, 0, skipped + 1
                continue
            if optimizer.grad_scale is None:  # a peer has no factor for its gradient: they are unscaled in fp16
                for w in weights:
                    w.grad.mul_(1 / scale)
            else:
                optimizer.grad_scale = 1 / scale
            clean += 1
            if clean % 500 == 0:
                scale *= 2
        optimizer.step()
    size = bytes_each(weights, optimizer)
    if method.rounded:
        weights, store = [w.detach().to(task.dtype) for w in weights], storing(task.dtype)
    with torch.no_grad():
        losses = []
        for part in (training, held_out):
            chosen = torch.linspace(0, len(part[0]) - 1, min(most, len(part[0]))).long()
            losses.append(task.loss([w.float() for w in weights], [x[chosen] for x in part], store).item())
    return [(*losses, size, skipped)]


# ---- one weight tensor -----------------------------------------------------------------------------------------------

def one_tensor(method, n):
    """n weights from 1 to 2, all of them bf16 numbers."""
    dtype = torch.float32 if method.wide else torch.bfloat16
    return torch.nn.Parameter((1 + torch.arange(n) % 128 / 128).to(dtype))


def stall(method, steps):
    """AdamW with betas of 0 and a constant gradient: each step adds the learning rate. The weights begin anywhere
    between two bf16 numbers, as in the middle of a run: a residual of 0 would hold the smallest updates."""
    n, rows = 16384, []
    values = one_tensor(METHODS[FP32], n).detach()
    values += (torch.rand(n, generator=torch.Generator().manual_seed(1)) - 0.5) / 128
    values = torch.where(values < 1, 2 - values, values)
    for update in UPDATES:
        count = min(steps, round(0.25 / update))  # never farther than a quarter of the weight
        w = one_tensor(METHODS[method], n)
        lr = 1.5 * update
        optimizer = METHODS[method].start([w], 1, lr=lr, betas=(0.0, 0.0), weight_decay=0.0)
        optimizer.begin(values)
        before = optimizer.weight().clone()
        gradient = torch.full_like(w, -1.0)
        for _ in range(count):
            w.grad = gradient.clone()  # optimi uses it as scratch memory
            optimizer.step()
        share = (optimizer.weight() - before) / (count * lr)
        rows.append((update, count, *spread(share), bytes_each([w], optimizer)))
    return rows


def spread(x):
    """The mean of many numbers and half of its 95 % interval."""
    return x.mean().item(), 1.96 * x.std().item() / math.sqrt(len(x))


def decay(method, steps):
    """Weight decay alone: the gradient is 0."""
    w = one_tensor(METHODS[method], 4096)
    before, rows = w.detach().double().clone(), [(0, 1.0, 0.0)]
    optimizer = METHODS[method].start([w], 1)
    for step in range(1, steps + 1):
        w.grad = torch.zeros_like(w)
        optimizer.step()
        if step % (steps // 40) == 0:
            rows.append((step, *spread(optimizer.weight() / before)))
    return [(*row, bytes_each([w], optimizer)) for row in rows]


def moment(method, drop, settle, steps):
    """The gradient of every second weight drops, beside others that stay. The mean second moment of those that drop:
    1 before, 1 / drop^2 long after."""
    w = one_tensor(MOMENTS[method], 4096)
    optimizer, generator, rows = MOMENTS[method].start([w], 1), torch.Generator().manual_seed(1), []
    size = torch.ones(len(w))
    for step in range(1, settle + steps + 1):
        if step > settle:
            size[::2] = 1 / drop
        w.grad = (size * torch.randn(len(w), generator=generator)).to(w.dtype)
        optimizer.step()
        if step % ((settle + steps) // 56) == 0:
            rows.append((step - settle, *spread(optimizer.second_moment()[::2]), bytes_each([w], optimizer)))
    return rows


# ---- runs ------------------------------------------------------------------------------------------------------------

COLUMNS = {"loss": ("task", "method", "seed", "loss", "held_out", "bytes", "skipped"),
           "stall": ("method", "update", "steps", "share", "half", "bytes"),
           "decay": ("method", "step", "factor", "half", "bytes"),
           "moment": ("drop", "method", "step", "v", "half", "bytes")}


def job(arguments):
    torch.set_num_threads(1)
    experiment, key, function, rest = arguments
    return experiment, [(*key, *row) for row in function(*rest)]


def run(size, methods, versions):
    jobs = []
    for method in methods:  # the long ones first
        if method not in MOMENTS_ONLY + [FEEDBACK, OPTIMI_EPS, TORCH_EPS]:  # FEEDBACK refuses a beta1 of 0
            jobs.append(("stall", (method,), stall, (method, size["stall"])))
        if method not in MOMENTS_ONLY + [OPTIMI_EPS, TORCH_EPS]:
            jobs.append(("decay", (method,), decay, (method, size["decay"])))
    peers = {METHODS[method].peer for method in methods}
    for method in MOMENTS:
        if MOMENTS[method].peer in peers:
            for drop in (10, 100):
                jobs.append(("moment", (drop, method), moment, (method, drop, size["settle"], size["drop"])))
    for task in reversed(list(TASKS)):
        for method in methods:
            if TASKS[task].format in METHODS[method].formats:
                for seed in range(1, size["seeds"] + 1):
                    jobs.append(("loss", (task, method, seed), train, (task, method, seed, size[task])))
    results, start = {name: [] for name in COLUMNS}, time.time()
    with multiprocessing.Pool(len(os.sched_getaffinity(0))) as pool:
        for done, (experiment, rows) in enumerate(pool.imap_unordered(job, jobs), 1):
            results[experiment] += rows
            if done % 20 == 0 or done == len(jobs):
                print("%4d of %d runs, %3.0f s" % (done, len(jobs), time.time() - start), file=sys.stderr, flush=True)
    for name, rows in results.items():
        with open("%s_%s.csv" % (OUT, name), "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(COLUMNS[name])
            writer.writerows(sorted(rows, key=lambda row: [(isinstance(x, str), x) for x in row[:3]]))
    with open(OUT + "_versions.txt", "w", encoding="utf-8") as file:
        file.write(versions + "\n")


def packages():
    """The packages of PyPI that are there, by name, and their versions."""
    found = {"torch": torch.__version__.split("+")[0]}
    for name, module, wheel in (("optimi", "optimi", "torch-optimi"), ("torchao", "torchao.optim", "torchao"),
                                ("bitsandbytes", "bitsandbytes", "bitsandbytes"),
                                ("heavyball", "heavyball", "heavyball")):
        try:
            importlib.import_module(module)
            found[name] = importlib.import_module("importlib.metadata").version(wheel)
        except Exception as error:  # of any kind: what does not load is not there
            print("SKIPPED: %s (%s)" % (name, str(error).split("\n")[0]), flush=True)
    return found


# ---- claims ----------------------------------------------------------------------------------------------------------

class Results:
    """The rows of the last run, as dictionaries; and the claims about them."""

    def __init__(self):
        self.rows, self.failed = {}, 0
        for name in COLUMNS:
            with open("%s_%s.csv" % (OUT, name), encoding="utf-8") as file:
                rows = list(csv.DictReader(file))
            for row in rows:
                row.update({key: float(value) for key, value in row.items() if key not in ("task", "method")})
            self.rows[name] = rows
        with open(OUT + "_versions.txt", encoding="utf-8") as file:
            self.versions = file.read().strip()
        present = {row["method"] for row in self.rows["loss"]}
        self.methods = [name for name in METHODS if name in present]
        self.losses = {(task, method): Losses(self.rows["loss"], task, method) for task in TASKS
                       for method in self.methods if TASKS[task].format in METHODS[method].formats}

    def curve(self, name, **equal):
        return [row for row in self.rows[name] if all(row[key] == value for key, value in equal.items())]

    def end(self, name, **equal):
        return self.curve(name, **equal)[-1]

    def claim(self, text, missing):
        """missing: what does not support the claim, in words; nothing if the numbers do."""
        self.failed += bool(missing)
        print("%s: %s%s" % ("NOT SHOWN" if missing else "shown", text, " (%s)" % "; ".join(missing) if missing else ""))
        return text

    def of(self, *names):
        return [name for name in names if name in self.methods]


class Losses:
    """The final losses of a method in a task, and their differences from fp32 with the same seed: (mean, half)."""

    def __init__(self, rows, task, method):
        runs = [{row["seed"]: row for row in rows if (row["task"], row["method"]) == (task, m)} for m in (method, FP32)]
        self.count, self.bytes = len(runs[0]), next(iter(runs[0].values()))["bytes"]
        self.lost = sum(not math.isfinite(row["loss"]) for row in runs[0].values())
        self.each = [row["loss"] - runs[1][seed]["loss"] for seed, row in runs[0].items()]
        self.finite = not self.lost
        if self.finite:
            self.loss = interval([row["loss"] for row in runs[0].values()])
            self.minus = interval(self.each)
            self.held_out = interval([row["held_out"] - runs[1][seed]["held_out"] for seed, row in runs[0].items()])

    def level(self):
        return self.finite and abs(self.minus[0]) + self.minus[1] <= MARGIN

    def above(self):
        return not self.finite or self.minus[0] - self.minus[1] > MARGIN

    def __str__(self):
        return "%+.4f +- %.4f" % self.minus if self.finite else "NaN in %d of %d runs" % (self.lost, self.count)


def not_level(r, methods, level=True):
    return ["%s, %s: %s" % (task, method, r.losses[task, method]) for task in TASKS for method in methods
            if (task, method) in r.losses
            and not (r.losses[task, method].level() if level else r.losses[task, method].above())]


# ---- pictures --------------------------------------------------------------------------------------------------------

def pyplot():
    import matplotlib
    matplotlib.use("Agg")
    matplotlib.rcParams.update({
        "svg.hashsalt": "kahan_opt", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 12,
        "font.sans-serif": ["DejaVu Sans", "Helvetica", "Arial"], "figure.facecolor": "white",
        "axes.edgecolor": "#57606a", "axes.labelcolor": "#24292f", "text.color": "#24292f", "xtick.color": "#24292f",
        "ytick.color": "#24292f", "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
        "grid.color": "#e4e7eb", "axes.axisbelow": True})
    import matplotlib.pyplot
    return matplotlib.pyplot


def save(figure, name, title, subtitle, right=0.98, bottom=0):
    width, height = figure.get_size_inches()
    title, subtitle = textwrap.wrap(title, round(8.2 * width)), textwrap.wrap(subtitle, round(10 * width))
    figure.text(0.02, 1 - 0.15 / height, "\n".join(title), va="top", fontsize=14, fontweight="bold")
    top = 0.2 + 0.24 * len(title)  # inches
    figure.text(0.02, 1 - top / height, "\n".join(subtitle), va="top", fontsize=11, color="#57606a")
    figure.tight_layout(rect=(0, bottom, right, 1 - (top + 0.05 + 0.2 * len(subtitle)) / height))
    path = path_of(name, ".svg")
    figure.savefig(path, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    with open(path, encoding="utf-8") as file:
        text = file.read()
    # smaller: one digit after the point, no indentation, no comments, no names that nothing uses, and one style for all
    # marks of a group
    text = re.sub(r'(?m)^ +| +$|<!-- .* -->\n|(?<=<g) id="[^"]*"', "", re.sub(r"(\.\d)\d+(?=[^<>]*>)", r"\1", text))
    text = re.sub(r'<g([^>]*)>\n((?:<use [^>]* (style="[^"]*")/>\n)(?:<use [^>]* \3/>\n)*)</g>',
                  lambda m: "<g%s %s>\n%s</g>" % (m[1], m[3], m[2].replace(" " + m[3], "")), text)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
    pyplot().close(figure)


def curve(axes, name, x, y, half, number=0, every=1):
    """A line with its intervals at every so many points. Lines that lie on one another go from wide to narrow; those of
    other libraries are dashed."""
    method = METHODS.get(name) or MOMENTS[name]
    axes.errorbar(x, y, half, color=method.colour, label=name, linewidth=method.width,
                  linestyle="--" if method.peer else "-", alpha=0.6 if method.wide else 1, zorder=10 - method.width,
                  errorevery=(number % every, every), elinewidth=1.2, marker="o", markersize=method.width + 2,
                  markeredgewidth=0, markevery=(number % every, every))


def two_lines(name):
    return name.replace(" with ", " with\n").replace(" to nearest", "\nto nearest")


def legend(figure, axes, right):
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, list(map(two_lines, labels)), loc="center left", bbox_to_anchor=(right, 0.5), frameon=False,
                  fontsize=10, handlelength=2.4)


def legend_below(figure, axes):
    figure.legend(*axes.get_legend_handles_labels(), loc="lower center", ncol=3, frameon=False, fontsize=10)


def path_of(name, ending):
    return OUT + ("_" + name if name else "") + ending


def table(name, head, rows, end=""):
    """Writes a table for docs/evidence.md, and returns it."""
    line = lambda cells: "|%s|\n" % "|".join(" %s " % cell if cell else " " for cell in cells)
    text = line(head) + "|---" * len(head) + "|\n" + "".join(map(line, rows)) + end
    with open(path_of(name, ".md"), "w", encoding="utf-8") as file:
        file.write(text)
    return text


def signed(pair):
    return ("%+.4f±%.4f" % pair).replace("-0.0000", "0.0000").replace("+0.0000", "0.0000").replace("-", "−")


SYMLOG = {"linthresh": MARGIN, "linscale": 1.2}


def ticks(axis, seen):
    """-0.01, 0, 0.01, 0.1 ...: what the scale of differences shows."""
    axis.set_ticks([x for x in (-MARGIN, 0, MARGIN, 0.1, 1) if x <= max(MARGIN, seen * 2)])
    axis.set_major_formatter(lambda x, _: "%g" % x if x <= 0 else "+%g" % x)
    axis.set_minor_locator(pyplot().NullLocator())
    axis.set_tick_params(labelsize=10)


def draw_loss(r):
    title = r.claim("EXACT, KAHAN, COMPACT, FEEDBACK, STOCHASTIC, 8-bit moments: level with fp32. NEAREST is not",
                    not_level(r, KEEPS) + not_level(r, [NEAREST], level=False))
    names = [name for name in r.methods if name != FP32]
    figure, axes = pyplot().subplots(1, len(TASKS), figsize=(9.6, 1.6 + 0.42 * len(names)), sharey=True)
    for panel, task in zip(axes, TASKS.values()):
        panel.set_xscale("symlog", **SYMLOG)
        panel.axvspan(-MARGIN, MARGIN, color="#ddf4e4", zorder=0)
        panel.axvline(0, color="#57606a", linewidth=1)
        seen = [MARGIN]
        for y, name in enumerate(names):
            losses = r.losses.get((task.name, name))
            if losses is None:
                panel.text(0, y, METHODS[name].formats[0] + " only", ha="center", va="center", fontsize=9,
                           color="#57606a")
            elif not losses.finite:
                panel.text(0, y, "NaN in %d of %d runs" % (losses.lost, losses.count), ha="center", va="center",
                           fontsize=9, color="#d1242f")
            else:
                seen.append(losses.minus[0])
                colour = METHODS[name].colour
                panel.plot([x for each in losses.each for x in (each, each, math.nan)],
                           [y - 0.3, y + 0.3, math.nan] * losses.count, color=colour, linewidth=1, alpha=0.5)
                panel.errorbar(losses.minus[0], y, xerr=losses.minus[1], fmt="o", color=colour, markersize=5,
                               capsize=4, elinewidth=2)
        ticks(panel.xaxis, max(seen))
        panel.set_title("%s, %s" % (task.name, task.format), fontsize=11)
        panel.set_xlabel("loss minus fp32, nats")
    axes[0].set_yticks(range(len(names)))
    axes[0].set_yticklabels([two_lines(name) for name in names], fontsize=10)
    axes[0].set_ylim(len(names) - 0.5, -0.5)
    count = r.losses[next(iter(TASKS)), FP32].count
    save(figure, "loss", title, "Final training loss minus that of fp32 with the same seed: mean of %d seeds, 95 %% "
         "interval, each run a thin line. Level: in the green band" % count)
    rows = []
    for name in r.methods:
        found = [r.losses.get((task, name)) for task in TASKS]
        size = next(losses.bytes for losses in found[1:] if losses)  # of the language model, if it has this method
        rows.append([name, "%.2f" % size] + ["" if losses is None else "%.4f±%.4f" % losses.loss if name == FP32 else
                                             signed(losses.minus) if losses.finite else str(losses)
                                             for losses in found])
    table("loss", ["training loss minus fp32, or its own", "bytes per parameter"] +
          ["%s, %s" % (task.name, task.format) for task in TASKS.values()], rows)


def draw_stall(r):
    at = lambda method, update: r.end("stall", method=method, update=update)
    share = lambda method, update: at(method, update)["share"]
    no = lambda method, update: "%s at %g: %.3f" % (method, update, share(method, update))
    wrong = [no(m, u) for m in (EXACT, COMPACT, STOCHASTIC) for u in UPDATES
             if abs(share(m, u) - share(FP32, u)) > 0.01 + 2 * at(m, u)["half"]]
    wrong += [no(KAHAN, u) for u in UPDATES if abs(share(KAHAN, u) - 1) > 0.01 + 2 * at(KAHAN, u)["half"]]
    wrong += [no(m, u) for m in r.of(NEAREST, TORCH, BNB) for u in UPDATES if u <= 1e-3 and share(m, u) != 0]
    wrong += [no(FP32, u) for u in UPDATES if u < 1e-7 and share(FP32, u) != 0]
    title = r.claim("Updates of 1e-3 of a weight stop NEAREST, 3e-8 stops fp32, EXACT, COMPACT; none stops KAHAN",
                    wrong)
    if OPTIMI in r.methods:
        r.claim("the compensation of optimi, which rounds to nearest, stops, too: less than a third at 1e-6 and below",
                [no(OPTIMI, u) for u in UPDATES if u <= 1e-6 and share(OPTIMI, u) > 1 / 3])
    figure, axes = pyplot().subplots(figsize=(9.6, 5.4))
    names = [name for name in r.methods if r.curve("stall", method=name)]
    for name in names:
        rows = r.curve("stall", method=name)
        curve(axes, name, *([row[key] for row in rows] for key in ("update", "share", "half")))
    axes.set_xscale("log")
    axes.minorticks_off()
    axes.invert_xaxis()
    axes.set_xlabel("size of each update, relative to the weight")
    axes.set_ylabel("share of the true way")
    legend(figure, axes, 0.79)
    save(figure, "stall", title, "bf16 weights near 1.5 with random residuals, up to %d equal updates: how far they "
         "move, residual included; mean of 16384, 95 %% interval" % max(row["steps"] for row in r.rows["stall"]), 0.79)
    shown = [u for u in UPDATES if "%.0e" % u == "1e%+03d" % round(math.log10(u))]
    table("stall", ["update / weight"] + ["%.0e" % u for u in shown],
          [[name] +
           ["%.3f" % share(name, u) + ("±%.3f" % at(name, u)["half"] if at(name, u)["half"] >= 5e-4 else "")
            for u in shown] for name in names])


def draw_decay(r):
    rate = HYPER["lr"] * HYPER["weight_decay"]
    exact = lambda step: math.exp(step * math.log1p(-rate))
    lost = lambda name: 1 - r.end("decay", method=name)["factor"]
    last = r.end("decay", method=FP32)["step"]
    names = [name for name in r.methods if r.curve("decay", method=name)]
    right = 1 - exact(last)
    dead = r.of(NEAREST, TORCH, OPTIMI, BNB)
    wrong = ["%s: %.4f" % (m, 1 - lost(m)) for m in names if m not in dead
             if abs(lost(m) / right - 1) > 0.03]
    wrong += ["%s: %.4f" % (m, 1 - lost(m)) for m in dead if abs(lost(m)) > 0.01 * right]
    title = r.claim("Weight decay alone: weights rounded to nearest do not decay at all" +
                    (", nor do optimi's" if OPTIMI in r.methods else ""), wrong)
    figure, axes = pyplot().subplots(figsize=(9.6, 5.2))
    for i, name in enumerate(names):
        rows = r.curve("decay", method=name)
        curve(axes, name, *([row[key] for row in rows] for key in ("step", "factor", "half")), 3 * i, 10)
    axes.plot([0, last / 2, last], [exact(s) for s in (0, last / 2, last)], ":", color="black", label="exact", zorder=9)
    axes.set_xlabel("steps")
    axes.set_ylabel("mean weight, relative to the first")
    legend(figure, axes, 0.79)
    save(figure, "decay", title, "AdamW with a gradient of 0, lr * weight decay = %g: mean of 4096 bf16 weights, 95 %% "
         "interval" % rate, 0.79)
    table("decay", ["after %d steps" % last, "weight, exact: %.4f" % exact(last), "share of the true decay"],
          [[name, "%.4f±%.4f" % (1 - lost(name), r.end("decay", method=name)["half"]), "%.3f" % (lost(name) / right)]
           for name in names])


def draw_moment(r):
    names = [name for name in MOMENTS if r.curve("moment", method=name) and name != FP32_OWN]
    last = lambda name, drop: r.end("moment", method=name, drop=drop)["v"]
    times = lambda name, drop: last(name, drop) / last(BESIDE.get(name, FP32), drop)
    wrong = ["%s, %d: %.3f" % (m, d, times(m, d)) for m, limit in FOLLOW.items() if m in names for d in (10, 100)
             if abs(times(m, d) - 1) > limit]
    wrong += ["%s, %d: %.3f" % (m, d, times(m, d)) for m in STUCK if m in names for d in (10, 100) if times(m, d) < 10]
    title = r.claim("Gradients drop: second moments to nearest stay high, stochastic ones follow fp32", wrong)
    figure, axes = pyplot().subplots(1, 2, figsize=(9.6, 5.2), sharey=True)
    for panel, drop in zip(axes, (10, 100)):
        for i, name in enumerate(name for name in names if name not in BESIDE):
            rows = r.curve("moment", method=name, drop=drop)[1::2]
            curve(panel, name, *([row[key] for row in rows] for key in ("step", "v", "half")), 5 * i, 6)
        panel.set_yscale("log")
        panel.minorticks_off()
        panel.set_title("gradients %d times smaller" % drop, fontsize=11)
        panel.set_xlabel("steps since the drop")
    axes[0].set_ylabel("mean second moment")
    legend(figure, axes[0], 0.79)
    save(figure, "moment", title, "AdamW, beta2 = %g. The gradients of every second weight of 4096 drop: mean of their "
         "second moments, 95 %% interval" % HYPER["betas"][1], 0.79)
    table("moment", ["second moment / that of fp32", "before", "drop by 10", "drop by 100"],
          [[name, "%.3f" % (before(r, name) / before(r, BESIDE.get(name, FP32)))] +
           ["%.3g" % times(name, drop) for drop in (10, 100)] for name in names])


def before(r, name):
    return [row for row in r.curve("moment", method=name, drop=10.0) if row["step"] <= 0][-1]["v"]


def draw_bytes(r):
    wrong = not_level(r, [Q8, FEEDBACK_Q8])
    bytes_of = lambda name: max(r.losses[task, name].bytes for task in TASKS if (task, name) in r.losses)
    wrong += ["%s: %.2f bytes" % (m, bytes_of(m)) for m, most in ((Q8, 7.1), (FEEDBACK_Q8, 6.1)) if bytes_of(m) > most]
    fewer = [m for m in r.methods if bytes_of(m) < bytes_of(Q8) and m not in KEEPS]
    wrong += ["%s, too, with %.2f bytes" % (m, bytes_of(m)) for m in fewer if not not_level(r, [m])]
    title = r.claim("With 8-bit moments: COMPACT at 7.1 and FEEDBACK at 6.1 bytes per parameter are level with fp32 at "
                    "16", wrong)
    figure, axes = pyplot().subplots(1, len(TASKS), figsize=(9.6, 6.4), sharey=True)
    top = max(losses.minus[0] for losses in r.losses.values() if losses.finite)
    for panel, task in zip(axes, TASKS.values()):
        panel.set_yscale("symlog", **SYMLOG)
        panel.axhspan(-MARGIN, MARGIN, color="#ddf4e4", zorder=0)
        panel.axhline(0, color="#57606a", linewidth=1)
        for name in r.methods:
            losses = r.losses.get((task.name, name))
            if losses is not None and losses.finite:
                panel.errorbar(losses.bytes, losses.minus[0], yerr=losses.minus[1], capsize=3, elinewidth=1.5,
                               fmt="s" if METHODS[name].peer else "o", markersize=7, color=METHODS[name].colour,
                               label=name)
        panel.set_xlim(5, 17)
        panel.set_xticks([6, 8, 10, 12, 14, 16])
        panel.set_title("%s, %s" % (task.name, task.format), fontsize=11)
        panel.set_xlabel("bytes per parameter")
    ticks(axes[0].yaxis, top)
    axes[0].set_ylabel("loss minus fp32, nats")
    legend_below(figure, axes[0])
    save(figure, "bytes", title, "Weight, gradient and state of AdamW. Squares are other libraries. Green: level with "
         "fp32. Runs that end in NaN are not shown", bottom=0.26)


def draw():
    r = Results()
    for picture in (draw_loss, draw_stall, draw_decay, draw_moment, draw_bytes):
        picture(r)
    peers = r.of(OPTIMI, TORCHAO, TORCH, BNB)
    if peers:
        r.claim("in the language model none of these is level with fp32 (in another task, some are): " +
                ", ".join(peers), [m for m in peers if r.losses["language model", m].level()])
        loses = {m: (r.end("decay", method=m)["factor"] > 0.99) +
                 (r.end("moment", method=m, drop=10.0)["v"] > 10 * r.end("moment", method=FP32, drop=10.0)["v"])
                 for m in r.of(*peers, HEAVY)}
        r.claim("weight decay and second moments: HeavyBall loses neither, each of the others one or both",
                ["%s loses %d" % (m, n) for m, n in loses.items() if (n == 0) != (m == HEAVY)])
    with open(OUT + "_versions.md", "w", encoding="utf-8") as file:
        file.write("The tables are from %s.\n" % r.versions)
    print("written: %s_*.csv, .svg, .md" % OUT)
    return 1 if r.failed else 0


def main(words):
    global OUT
    if not set(words) <= {"quick", "draw"}:
        print("usage: fidelity.py [quick] [draw]", file=sys.stderr)
        return 2
    if "quick" in words:
        OUT += "_quick"
    if "draw" in words:
        if not os.path.exists(OUT + "_versions.txt"):
            print("fidelity: there are no results to draw: run it without `draw` first", file=sys.stderr)
            return 2
    elif "quick" in words:
        run(QUICK, QUICK_ARMS, "torch " + torch.__version__)
    else:
        found = packages()
        methods = [m.name for m in METHODS.values() if m.peer is None or m.peer in found]
        run(FULL, methods, ", ".join("%s %s" % item for item in found.items()))
    return draw()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
