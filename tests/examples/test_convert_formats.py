"""docs/examples/convert.py: the states of other optimizers, converted both ways, and what it says. Prints TAP.

    python3 tests/examples/test_convert_formats.py [FOLDER]     FOLDER has kahan_opt (default build/python)

Needs PyTorch, safetensors and optimi. The references share no code with convert.py: PyTorch and optimi are the packages
themselves; AnyPrecisionAdamW, FusedAdam with remainders and AdamW8bit are written anew from the published formulas;
words of fp32 are split and 8-bit maps are made by integer arithmetic. `./build.sh bench converters` does the rest with
the real bitsandbytes."""
import contextlib
import io
import itertools
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
import warnings
import zlib
from fractions import Fraction

sys.path.insert(0, "docs/examples")
sys.path.insert(0, "tests")
LIBRARY = sys.argv[1] if sys.argv[1:] else "build/python"
sys.path.insert(0, LIBRARY)

import convert
import kahan_opt as ko
import peers
import torch
from safetensors.torch import load_file, save_file

SHAPES = {"layer.weight": (80, 70), "layer.bias": (70,), "out.weight": (3, 5)}
COUNT = sum(torch.Size(shape).numel() for shape in SHAPES.values())
N, M = 60, 40  # steps before and after a conversion
LR = 1e-3
FP32 = 3 * M * 2.0 ** -24  # two runs in fp32 that round about three times in a step: of the largest weight
count = 0


def ok(good, text):
    global count
    count += 1
    print("%sok %d - %s" % ("" if good else "not ", count, text.replace("#", "no.")), flush=True)


def words(t):
    """The bits of a tensor, as integers."""
    return t.reshape(-1).view({2: torch.int16, 4: torch.int32, 1: torch.uint8}[t.element_size()]).long()


def same(a, b):
    return a.dtype == b.dtype and torch.equal(words(a), words(b))


# ---- the task: the same gradients for all, which do not depend on the weights ----

def initial():
    """Exact in bf16, so that a run in bf16 begins where one in binary64 does."""
    g = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=g).bfloat16().float() for name, shape in SHAPES.items()}


def gradients(steps):
    """A mean of its own for each weight, and noise; exact in bf16."""
    g = torch.Generator().manual_seed(2)
    mean = {name: torch.randn(shape, generator=g) for name, shape in SHAPES.items()}
    return [{name: (0.5 * mean[name] + torch.randn(shape, generator=g)).bfloat16().float()
             for name, shape in SHAPES.items()} for _ in range(steps)]


GRADIENTS = gradients(N + M)


class Model(torch.nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        for name, value in initial().items():
            part = name.split(".")[0]
            if not hasattr(self, part):
                self.add_module(part, torch.nn.Module())
            getattr(self, part).register_parameter(name.split(".")[1], torch.nn.Parameter(value.to(dtype)))

    def step(self, optimizer, begin, end):
        for t in range(begin, end):
            for name, p in self.named_parameters():
                p.grad = GRADIENTS[t][name].to(p.dtype)
            optimizer.step()
        return optimizer


class Ours:
    """A checkpoint of kahan_opt in memory of its own, through the C interface."""

    def __init__(self, path, shapes=None):
        with open(path, "rb") as f:
            data = f.read()
        self.opt, self.names = ko.kopt_optimizer(), list(shapes or SHAPES)
        ko.check(ko.kopt_inspect(data, len(data), ko.byref(self.opt), None, None))
        self.tensors, self.memory = (ko.kopt_tensor * len(self.names))(), {}
        for i, (name, shape) in enumerate((shapes or SHAPES).items()):
            n, t = torch.Size(shape).numel(), self.tensors[i]
            dtype = {ko.KOPT_F32: torch.float32, ko.KOPT_BF16: torch.bfloat16, ko.KOPT_FP16: torch.float16}
            t.weight_format = self.format_of(data, i)
            weight = torch.zeros(n, dtype=dtype[t.weight_format])
            t.n, t.id, t.weight = n, i, weight.data_ptr()
            block = torch.zeros(ko.kopt_state_size(ko.byref(self.opt), ko.byref(t)), dtype=torch.uint8)
            t.state, t.state_size = block.data_ptr(), block.numel()
            self.memory[name] = weight, block
        ko.check(ko.kopt_load(ko.byref(self.opt), self.tensors, len(self.tensors), data, len(data)))

    @staticmethod
    def format_of(data, i):
        """Byte 6 of the header of tensor i, whose bytes begin with "KOPT" and have the id in bytes 12 to 15."""
        return next(data[at + 6] for at in range(176, len(data), 4) if data[at:at + 4] == b"KOPT" and
                    int.from_bytes(data[at + 12:at + 16], "little") == i)

    def step(self, begin, end):
        for t in range(begin, end):
            keep = [GRADIENTS[t][name].contiguous() for name in self.names]
            for tensor, gradient in zip(self.tensors, keep):
                tensor.grad, tensor.grad_format = gradient.data_ptr(), ko.KOPT_F32
            ko.check(ko.kopt_optimizer_step(ko.byref(self.opt), self.tensors, len(self.tensors)))
        return self

    def read(self, name, slot):
        i = self.names.index(name)
        out = torch.empty(self.tensors[i].n)
        ko.check(ko.kopt_state_read(ko.byref(self.opt), ko.byref(self.tensors[i]), slot, out.data_ptr()))
        return out

    def residual(self, name):
        """The residual as int16 words: the array after the header of the state block."""
        weight, block = self.memory[name]
        return block[64:64 + 2 * weight.numel()].view(torch.int16)

    def value(self, name):
        """Weight + compensation."""
        return self.memory[name][0].double() + self.residual(name).view(torch.bfloat16).double()

    def save(self, path):
        size = ko.kopt_save_size(ko.byref(self.opt), self.tensors, len(self.tensors))
        out = torch.zeros(size, dtype=torch.uint8)
        ko.check(ko.kopt_save(ko.byref(self.opt), self.tensors, len(self.tensors), out.data_ptr(), size))
        with open(path, "wb") as f:
            f.write(out.numpy().tobytes())


def fresh(path, make, shapes=None, values=None, weights=ko.KOPT_BF16, moments=None, **fields):
    """A checkpoint of kahan_opt at step 0."""
    opt = make
    if moments is not None:
        opt.first_moment_format = opt.second_moment_format = moments
    for key, value in fields.items():
        setattr(opt, key, value)
    values = values or initial()
    shapes = shapes or SHAPES
    tensors, keep = (ko.kopt_tensor * len(shapes))(), []
    for i, name in enumerate(shapes):
        n = values[name].numel()
        weight = torch.zeros(4 * n, dtype=torch.uint8)
        t = tensors[i]
        t.weight_format, t.n, t.id, t.weight = weights, n, i, weight.data_ptr()
        block = torch.zeros(ko.kopt_state_size(ko.byref(opt), ko.byref(t)), dtype=torch.uint8)
        value = values[name].float().contiguous()
        keep += [weight, block, value]
        t.state, t.state_size = block.data_ptr(), block.numel()
        ko.check(ko.kopt_state_init(ko.byref(opt), ko.byref(t), 1, value.data_ptr()))
    size = ko.kopt_save_size(ko.byref(opt), tensors, len(tensors))
    out = torch.zeros(size, dtype=torch.uint8)
    ko.check(ko.kopt_save(ko.byref(opt), tensors, len(tensors), out.data_ptr(), size))
    with open(path, "wb") as f:
        f.write(out.numpy().tobytes())
    return path


# ---- optimizers written anew ----

class AnyPrecisionAdamW(torch.optim.Optimizer):
    """That of torchdistx: every operation in the type of its buffer."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, use_kahan_summation=True,
                 momentum_dtype=torch.float32, variance_dtype=torch.bfloat16,
                 compensation_buffer_dtype=torch.bfloat16):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay,
                                      use_kahan_summation=use_kahan_summation, momentum_dtype=momentum_dtype,
                                      variance_dtype=variance_dtype,
                                      compensation_buffer_dtype=compensation_buffer_dtype))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                s, g, (b1, b2) = self.state[p], p.grad, group["betas"]
                if not s:
                    s["step"] = torch.tensor(0.0)
                    s["exp_avg"] = torch.zeros_like(p, dtype=group["momentum_dtype"])
                    s["exp_avg_sq"] = torch.zeros_like(p, dtype=group["variance_dtype"])
                    s["compensation"] = torch.zeros_like(p, dtype=group["compensation_buffer_dtype"])
                s["step"] += 1
                p.mul_(1 - group["lr"] * group["weight_decay"])
                s["exp_avg"].mul_(b1).add_(g, alpha=1 - b1)
                s["exp_avg_sq"].mul_(b2).addcmul_(g, g, value=1 - b2)
                root = (s["exp_avg_sq"].sqrt() / (1 - b2 ** s["step"]) ** 0.5).add_(group["eps"])
                s["compensation"].addcdiv_(s["exp_avg"], root, value=-group["lr"] / (1 - b1 ** s["step"]).item())
                old = p.clone()
                p.add_(s["compensation"])
                s["compensation"].add_(old.sub_(p))


def remainder_join(high, low):
    """The C code of TransformerEngine and apex: `if (rem < 0) p--;` and a union of two int16."""
    high = (high - (low < 0).long()) & 0xFFFF
    return high * 65536 + (low & 0xFFFF)


def remainder_split(word):
    """`if (rem < 0) p++;`"""
    low = word & 0xFFFF
    low = low - 65536 * (low >= 32768).long()
    return ((word >> 16) + (low < 0).long()) & 0xFFFF, low


def bits_to_float(word):
    return (word - (word >= 1 << 31).long() * (1 << 32)).int().view(torch.float32)


def halves(high, low):
    """bf16 and int16 tensors of these words."""
    return (high - 65536 * (high >= 32768).long()).short().view(torch.bfloat16), low.short()


class FusedAdam(torch.optim.Optimizer):
    """That of TransformerEngine with store_param_remainders=True (and of apex): fp32 moments, an int16 remainder. One
    step count in the group, adam_w_mode beside it, and its own load_state_dict()."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0):
        super().__init__(params, dict(lr=lr, bias_correction=True, betas=betas, eps=eps, weight_decay=weight_decay))
        self.adam_w_mode = 1

    def update_group(self, group):
        self.param_groups[0].update((key, value) for key, value in group.items() if key != "params")

    def load_state_dict(self, state_dict):
        self.update_group(state_dict["param_groups"][0])
        for number, p in zip(state_dict["param_groups"][0]["params"], self.param_groups[0]["params"]):
            self.state[p] = {key: value.clone() for key, value in state_dict["state"][number].items()}

    @torch.no_grad()
    def step(self):
        group = self.param_groups[0]
        group["step"] = group.get("step", 0) + 1
        b1, b2 = group["betas"]
        for p in group["params"]:
            s, g = self.state[p], p.grad.float()
            if not s:
                s["exp_avg"], s["exp_avg_sq"] = torch.zeros_like(g), torch.zeros_like(g)
                s["master_param"] = torch.zeros_like(p, dtype=torch.int16)
            w = bits_to_float(remainder_join(words(p), s["master_param"].reshape(-1).long())).reshape(p.shape)
            s["exp_avg"].mul_(b1).add_(g, alpha=1 - b1)
            s["exp_avg_sq"].mul_(b2).addcmul_(g, g, value=1 - b2)
            root = (s["exp_avg_sq"] / (1 - b2 ** group["step"])).sqrt() + group["eps"]
            update = s["exp_avg"] / (1 - b1 ** group["step"]) / root + group["weight_decay"] * w
            w = w - group["lr"] * update
            high, low = halves(*remainder_split(words(w) & 0xFFFFFFFF))
            p.copy_(high.reshape(p.shape))
            s["master_param"].copy_(low.reshape(p.shape))


class DistributedFusedAdam(FusedAdam):
    """The state_dict of apex: step beside the parameters, the fp32 weight as `param`."""

    def state_dict(self):
        numbers = list(range(len(self.param_groups[0]["params"])))
        state = {"step": self.param_groups[0].get("step", 0)}
        for i, p in zip(numbers, self.param_groups[0]["params"]):
            s = self.state[p]
            if not s:
                continue
            word = remainder_join(words(p), s["master_param"].reshape(-1).long())
            state[i] = {"param": bits_to_float(word).reshape(p.shape), "exp_avg": s["exp_avg"],
                        "exp_avg_sq": s["exp_avg_sq"]}
        group = {key: value for key, value in self.param_groups[0].items() if key not in ("params", "step")}
        return {"state": state, "param_groups": [{**group, "params": numbers}]}

    def load_state_dict(self, d):
        self.update_group({**d["param_groups"][0], "step": d["state"]["step"]})
        for number, p in zip(d["param_groups"][0]["params"], self.param_groups[0]["params"]):
            s = d["state"][number]
            low = words(s["param"]) & 0xFFFF  # as apex: only the lower halves; the weights are already there
            self.state[p] = {"exp_avg": s["exp_avg"].clone(), "exp_avg_sq": s["exp_avg_sq"].clone(),
                             "master_param": (low - 65536 * (low >= 32768).long()).short().reshape(p.shape)}


def exact_map(signed):
    """The dynamic map in rational numbers, each rounded once to fp32 by integers."""
    values = [Fraction(0), Fraction(1)]
    for decade in range(7):
        n = 2 ** (decade + (0 if signed else 1))
        for k in range(n):
            x = (Fraction(1, 10) + Fraction(9, 10) * Fraction(2 * k + 1, 2 * n)) / 10 ** (6 - decade)
            values += [x, -x] if signed else [x]
    return sorted(values)


def to_fp32(x):
    """A Fraction, rounded to nearest even."""
    if x == 0:
        return 0.0
    e = 0
    while abs(x) * Fraction(2) ** -e >= 1 << 24:
        e += 1
    while abs(x) * Fraction(2) ** -e < 1 << 23:
        e -= 1
    return round(x * Fraction(2) ** -e) * 2.0 ** e  # round() is to even


QMAP = {signed: torch.tensor([to_fp32(x) for x in exact_map(signed)]) for signed in (True, False)}


def dequantize(codes, scales, qmap):
    return torch.stack([qmap[c] * scales[i // 256] for i, c in enumerate(codes.reshape(-1).tolist())])


def fast_dequantize(codes, scales, qmap):
    flat = qmap[codes.reshape(-1).long()]
    return (flat * scales.repeat_interleave(256)[:flat.numel()]).reshape(codes.shape)


def quantize(x, qmap):
    """To the nearest value, the larger magnitude of a block being the scale, as bitsandbytes does."""
    flat, codes, scales = x.reshape(-1), [], []
    for block in flat.split(256):
        scales.append(block.abs().max())
        codes.append(((block / scales[-1])[:, None] - qmap[None]).abs().argmin(1))
    return torch.cat(codes).to(torch.uint8).reshape(x.shape), torch.stack(scales)


class Optimizer8bit(torch.optim.Optimizer):
    """AdamW8bit, Lion8bit and SGD8bit of bitsandbytes, with its nested state_dict."""
    BETAS = {"AdamW8bit": (0.9, 0.999), "Lion8bit": (0.9, 0.99), "SGD8bit": (0.9, 0.0)}

    def __init__(self, params, lr=1e-3, eps=1e-8, weight_decay=0.0):
        super().__init__(params, dict(lr=lr, betas=self.BETAS[type(self).__name__], eps=eps,
                                      weight_decay=weight_decay))

    def state_dict(self):
        d = super().state_dict()
        for i, s in d["state"].items():
            nested = {key: value for key, value in s.items() if key != "step"}
            d["state"][i] = {"step": s["step"], "__bnb_optimizer_quant_state__": nested}
        return d

    def get(self, s, i):
        x = s["state%d" % i]
        return x if x.dtype == torch.float32 else fast_dequantize(x, s["absmax%d" % i], s["qmap%d" % i])

    def put(self, s, i, x):
        if s["state%d" % i].dtype == torch.float32:
            s["state%d" % i] = x
        else:
            s["state%d" % i], s["absmax%d" % i] = quantize(x, s["qmap%d" % i])

    @torch.no_grad()
    def step(self):
        kind = type(self).__name__
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                s, g, w = self.state[p], p.grad.float(), p.float()
                if not s:
                    s["step"] = 0
                    for i in (1, 2) if kind == "AdamW8bit" else (1,):
                        s["state%d" % i] = torch.zeros(p.shape)
                        if p.numel() >= 4096:
                            s["qmap%d" % i] = QMAP[i == 1]
                            s["state%d" % i] = torch.zeros(p.shape, dtype=torch.uint8)
                            s["absmax%d" % i] = torch.zeros(-(-p.numel() // 256))
                s["step"] += 1
                m = self.get(s, 1)
                if kind == "SGD8bit":
                    g = g + group["weight_decay"] * w
                    m = g if s["step"] == 1 else b1 * m + g
                    update = m
                elif kind == "Lion8bit":
                    update = torch.sign(b1 * m + (1 - b1) * g)
                    m = b2 * m + (1 - b2) * g
                else:
                    m = b1 * m + (1 - b1) * g
                    v = b2 * self.get(s, 2) + (1 - b2) * g * g
                    update = m / (1 - b1 ** s["step"]) / ((v / (1 - b2 ** s["step"])).sqrt() + group["eps"])
                    self.put(s, 2, v)
                self.put(s, 1, m)
                if kind != "SGD8bit":
                    w = w * (1 - group["lr"] * group["weight_decay"])
                p.copy_(w - group["lr"] * update)


AdamW8bit = type("AdamW8bit", (Optimizer8bit,), {})
Lion8bit = type("Lion8bit", (Optimizer8bit,), {})
SGD8bit = type("SGD8bit", (Optimizer8bit,), {})


# ---- helpers of the tests ----

FOLDER = tempfile.mkdtemp(prefix="convert")


def at(name):
    return os.path.join(FOLDER, name)


def said(report, *patterns):
    return all(any(re.search(pattern, line) for line in report) for pattern in patterns)


def relative(a, b):
    """The largest difference, in units of the largest |b|."""
    return ((a.double() - b.double()).abs().max() / b.double().abs().max()).item()


def compensated_values(model, optimizer, key):
    return [p.data.double() + optimizer.state[p][key].double() for p in model.parameters()]


def distance(values, exact):
    """Root mean square."""
    return (sum(((w.reshape(q.shape) - q.data) ** 2).sum().item() for w, q in zip(values, exact.parameters())) /
            COUNT) ** 0.5


def files_equal(a, b):
    with open(a, "rb") as f, open(b, "rb") as g:
        return f.read() == g.read()


def same_tensors(a, b, keys=None):
    a, b = load_file(a), load_file(b)
    return (set(a) == set(b) or keys is not None) and all(same(a[k], b[k]) for k in keys or a)


# ---- the tests ----

def test_torch():
    o = torch.optim
    cases = [("AdamW", o.AdamW, {"lr": LR, "weight_decay": 0.1}),
             ("Adam with L2", o.Adam, {"lr": LR, "weight_decay": 0.1}),
             ("AMSGrad", o.Adam, {"lr": LR, "amsgrad": True}),
             ("AdamW, maximize", o.AdamW, {"lr": LR, "maximize": True}),
             ("SGD, Nesterov", o.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
             ("SGD, dampening", o.SGD, {"lr": 1e-2, "momentum": 0.9, "dampening": 0.5}), ("SGD", o.SGD, {"lr": 1e-2}),
             ("RAdam", o.RAdam, {"lr": LR})]
    for name, make, options in cases:
        model = Model()
        optimizer = model.step(make(model.parameters(), **options), 0, N)
        convert.save(at("torch"), "torch", model, optimizer)
        report = convert.convert("torch", "kahan_opt", at("torch"), at("ours"), step=N if make is o.SGD else None)
        convert.convert("kahan_opt", "torch", at("ours"), at("back"), names=at("torch"))
        there, here = load_file(at("torch")), Ours(at("ours"))
        exact = same_tensors(at("torch"), at("back"))
        exact &= all(same(here.read(k, ko.KOPT_SLOT_WEIGHT), there["model." + k].reshape(-1)) for k in SHAPES)
        ok(exact and here.opt.step == N and here.opt.rounding == ko.KOPT_EXACT and not said(report, "changed"),
           "PyTorch's %s: to bf16 EXACT and back, bit for bit" % name)
        other, theirs = Model(), None
        theirs = make(other.parameters(), **{"lr": 123.0, **({"momentum": 0.9} if "momentum" in options else {})})
        convert.load(at("back"), "torch", other, theirs)
        model.step(optimizer, N, N + M)
        other.step(theirs, N, N + M)
        here.step(N, N + M)
        equal = all(same(p.data, q.data) for p, q in zip(model.parameters(), other.parameters()))
        worst = max(relative(here.read(k, ko.KOPT_SLOT_WEIGHT), p.data.reshape(-1))
                    for k, p in model.named_parameters())
        ok(equal and worst <= FP32, "... %d steps there and %d here: within %.1e of all there (at most 7e-6); and "
           "loaded back there: the same bits" % (N, M, worst))
    started = fresh(at("ours"), ko.kopt_adamw(LR), rounding=ko.KOPT_EXACT, moments=ko.KOPT_F32, weight_decay=0.1,
                    seed=7)
    ours = Ours(started).step(0, N)
    ours.save(at("ours"))
    report = convert.convert("kahan_opt", "torch", at("ours"), at("torch"), names=at("names.json"))
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1)
    convert.load(at("torch"), "torch", model, optimizer)
    model.step(optimizer, N, N + M)
    ours.step(N, N + M)
    worst = max(relative(p.data.reshape(-1), ours.read(k, ko.KOPT_SLOT_WEIGHT)) for k, p in model.named_parameters())
    ok(worst <= FP32 and said(report, "seed 7 .*metadata"), "%d steps here, %d in PyTorch: within %.1e of all here"
       % (N, M, worst))
    convert.convert("torch", "kahan_opt", at("torch"), at("again"))
    ok(files_equal(at("ours"), at("again")), "kahan_opt to PyTorch and back: the same bytes, with seed and formats")


def test_fp32():
    values = {name: 1.2345678 * value for name, value in initial().items()}
    save_file(values, at("weights"))
    report = convert.convert("fp32", "kahan_opt", at("weights"), at("ours"), rule="lion", lr=2e-4)
    names = sorted(values)
    ours = Ours(at("ours"), {k: SHAPES[k] for k in names})
    ok(all(same(ours.read(k, ko.KOPT_SLOT_WEIGHT), values[k].reshape(-1)) for k in names) and
       ours.opt.rule == ko.KOPT_RULE_LION
       and ours.opt.lr == 2e-4 and ours.opt.step == 0 and said(report, "this one is new"),
       "fp32 masters to EXACT: every bit; the optimizer is new, and it says so")
    convert.convert("kahan_opt", "fp32", at("ours"), at("back"))
    ok([k for k in sorted(load_file(at("back")))] == ["tensor0", "tensor1", "tensor2"],
       "without --names the tensors are called by their ids")
    for rounding, bits in (("KAHAN", 17), ("COMPACT", 16), ("NEAREST", 8)):
        report = convert.convert("fp32", "kahan_opt", at("weights"), at("ours"),
                                 rounding=getattr(ko, "KOPT_" + rounding))
        ours = Ours(at("ours"), {k: SHAPES[k] for k in names})
        # read() gives fp32; the true value of KAHAN is the sum of two numbers
        worst, wrong = 0.0, 0
        for k in names:
            x = values[k].reshape(-1).double()
            y = ours.read(k, ko.KOPT_SLOT_WEIGHT).double()
            if rounding == "KAHAN":
                y = ours.memory[k][0].double() + (ours.residual(k).view(torch.bfloat16)).double()
            wrong += int((x != y).sum())
            worst = max(worst, ((x - y).abs() / x.abs()).max().item())
        line = [s for s in report if s.startswith("weights")][0]
        numbers = re.search(r"(\d+) values, (\d+) changed; largest error \S+, relative (\S+)", line)
        ok(numbers.groups() == (str(COUNT), str(wrong), "%.2g" % worst) and worst <= 2.0 ** -bits,
           "... to %s: %.1e (at most 2^-%d), as it says" % (rounding, worst, bits))
    low = {name: value.bfloat16() for name, value in values.items()}
    save_file(low, at("low"))
    for rounding in ("KAHAN", "COMPACT", "EXACT"):
        report = convert.convert("fp32", "kahan_opt", at("low"), at("ours"), residual="random", seed=5,
                                 rounding=getattr(ko, "KOPT_" + rounding))
        ours, wrong = Ours(at("ours"), {k: SHAPES[k] for k in names}), 0
        for k in names:
            weight, block = low[k].reshape(-1).clone(), torch.zeros_like(ours.memory[k][1])
            t = ko.kopt_tensor(weight=weight.data_ptr(), weight_format=ko.KOPT_BF16, n=weight.numel(),
                               id=names.index(k), state=block.data_ptr(), state_size=block.numel())
            ko.check(ko.kopt_state_init(ko.byref(ours.opt), ko.byref(t), 1, None))
            ko.check(ko.kopt_state_dither(ko.byref(ours.opt), ko.byref(t), 1))
            wrong += not torch.equal(ours.memory[k][1], block) or not same(ours.memory[k][0], weight)
        ok(not wrong and ours.opt.seed == 5 and said(report, "residuals: drawn at random.*seed 5",
                                                     "weights: %d values, all exact" % COUNT),
           "bf16 weights with residuals drawn at random, %s: those of kopt_state_dither()" % rounding)
    refused("residuals of fp32 weights drawn at random", "residuals already", "fp32", "kahan_opt", at("weights"),
            residual="random")
    refused("residuals beside NEAREST", "keep no residual", "fp32", "kahan_opt", at("low"), residual="random",
            rounding=ko.KOPT_NEAREST)
    refused("residuals for another library", "PyTorch has no such choice", "kahan_opt", "torch", at("ours"),
            residual="random")
    refused("residuals of a run drawn again", "has a residual already", "kahan_opt", "kahan_opt", at("ours"),
            residual="random")
    big = {"a": torch.tensor([1e5, 1.0])}
    save_file(big, at("weights"))
    refused("fp16 weights that overflow", "too large for the format", "fp32", "kahan_opt", at("weights"),
            weights=ko.KOPT_FP16)
    save_file({"a": torch.tensor([float("nan"), float("inf"), 1.0])}, at("weights"))
    report = convert.convert("fp32", "kahan_opt", at("weights"), at("ours"))
    ok(said(report, "weights: 3 values, all exact; 2 are infinite or NaN"), "infinity and NaN stay, and are counted")
    save_file({"a": torch.tensor([1e-6, 1.0]), "b": torch.arange(3)}, at("weights"))
    report = convert.convert("fp32", "kahan_opt", at("weights"), at("ours"), weights=ko.KOPT_FP16,
                             rounding=ko.KOPT_NEAREST)
    ok(said(report, "weights: 2 values, 1 changed", "left out.*: b"), "fp16: the loss of a small weight is counted; "
       "integers are left out by name")


def test_optimi():
    optimi = peers.import_optimi()
    for name, options in (("AdamW", {"lr": LR, "weight_decay": 0}), ("Adam", {"lr": LR}),
                          ("StableAdamW", {"lr": LR, "weight_decay": 0}), ("Lion", {"lr": 1e-4}),
                          ("SGD", {"lr": 1e-2, "momentum": 0.9}),
                          ("Adan", {"lr": LR, "weight_decay": 0, "kahan_sum": True})):
        model, make = Model(torch.bfloat16), getattr(optimi, name)
        options["triton"] = False
        optimizer = model.step(make(model.parameters(), **options), 0, N)
        convert.save(at("optimi"), "optimi", model, optimizer)
        report = convert.convert("optimi", "kahan_opt", at("optimi"), at("ours"), step=N)
        there, here = load_file(at("optimi")), Ours(at("ours"))
        raw = all(torch.equal(here.residual(k).long(), words(there["optimizer.kahan_comp." + k])) and
                  same(here.memory[k][0], there["model." + k].reshape(-1)) for k in SHAPES)
        compensated = sum(int((there["optimizer.kahan_comp." + k] != 0).sum()) for k in SHAPES)
        convert.convert("kahan_opt", "optimi", at("ours"), at("back"), names=at("optimi"))
        ok(raw and compensated > COUNT / 2 and same_tensors(at("optimi"), at("back")) and here.opt.rounding ==
           ko.KOPT_KAHAN, "optimi's %s: weights and compensations are the same words here; and back, every bit" % name)
        if name in ("AdamW", "Adam", "StableAdamW"):
            m = there["optimizer.exp_avg.layer.weight"].double().reshape(-1) * (1 - 0.9 ** N)
            v = there["optimizer.exp_avg_sq.layer.weight"].double().reshape(-1) * (1 - 0.99 ** N)
            worst = max(relative(here.read("layer.weight", 1), m), relative(here.read("layer.weight", 2), v))
            ok(worst < 1e-7 and said(report, "bias-corrected"), "... moments: 1 - beta^t times those (%.0e)" % worst)
        if name == "Adan":
            ok(same(here.read("out.weight", 4).bfloat16(), -there["optimizer.prev_grad.out.weight"].reshape(-1)),
               "... the previous gradient has the other sign")
        exact = Model(torch.float64)
        exact.step(make(exact.parameters(), **options), 0, N + M)
        other = Model(torch.bfloat16)
        theirs = make(other.parameters(), **{**options, "lr": 0.5})
        convert.load(at("back"), "optimi", other, theirs)
        model.step(optimizer, N, N + M)
        other.step(theirs, N, N + M)
        here.step(N, N + M)
        equal = all(same(p.data, q.data) for p, q in zip(model.parameters(), other.parameters()))
        there_, here_ = distance(compensated_values(model, optimizer, "kahan_comp"), exact), distance(
            [here.value(k) for k in SHAPES], exact)
        ok(equal and here_ <= there_, "... %d steps there and %d here end %.2e from binary64, all there %.2e (at most "
           "that); loaded back there: the same bits" % (N, M, here_, there_))
    # from here to there
    fresh(at("ours"), ko.kopt_adamw(LR), weight_decay=0, beta2=0.99, eps=1e-6, seed=3)
    ours = Ours(at("ours")).step(0, N)
    ours.save(at("ours"))
    report = convert.convert("kahan_opt", "optimi", at("ours"), at("optimi"), names=at("names.json"))
    ok(said(report, "compensation: optimi rounds it to nearest, not stochastically",
            "moments: optimi rounds 16-bit moments", "weights: %d values, all exact" % COUNT,
            "first moment: %d values, .* changed" % COUNT, "seed 3"),
       "kahan_opt to optimi: says that compensations and moments are rounded to nearest there, and what the "
       "correction costs in bf16")
    there = load_file(at("optimi"))
    ok(all(torch.equal(ours.residual(k).long(), words(there["optimizer.kahan_comp." + k])) for k in SHAPES),
       "... the stochastic compensations themselves are kept")
    model, exact = Model(torch.bfloat16), Model(torch.float64)
    optimizer = optimi.AdamW(model.parameters(), lr=1, triton=False)
    convert.load(at("optimi"), "optimi", model, optimizer)
    model.step(optimizer, N, N + M)
    ours.step(N, N + M)
    exact.step(optimi.AdamW(exact.parameters(), lr=LR, weight_decay=0, triton=False), 0, N + M)
    alone = Model(torch.bfloat16)
    theirs = alone.step(optimi.AdamW(alone.parameters(), lr=LR, weight_decay=0, triton=False), 0, N + M)
    error = [distance(values, exact) for values in (compensated_values(model, optimizer, "kahan_comp"),
                                                    compensated_values(alone, theirs, "kahan_comp"))]
    ok(error[0] <= 1.1 * error[1], "... %d steps here and %d in optimi: %.2e from binary64, all in optimi %.2e (at "
       "most 1.1 times that), all here %.2e" % (N, M, *error, distance([ours.value(k) for k in SHAPES], exact)))
    fresh(at("ours"), ko.kopt_adamw(LR), weights=ko.KOPT_FP16, weight_decay=0, moments=ko.KOPT_FP16)
    ours = Ours(at("ours")).step(0, N)
    ours.save(at("ours"))
    report = convert.convert("kahan_opt", "optimi", at("ours"), at("optimi"), names=at("names.json"))
    there = load_file(at("optimi"))
    scaled = max((there["optimizer.kahan_comp." + k].double().reshape(-1) * 2048 -
                  ours.residual(k).view(torch.float16).double()).abs().max().item() for k in SHAPES)
    ok(scaled <= 2048 * 2.0 ** -25 and said(report, "holds its root") and
       said(report, "weights: %d values, [0-9]+ changed" % COUNT),
       "fp16: the compensation is 2^11 times larger here; there it is rounded to 2^-24 (off by %.1e), and it says so"
       % (scaled / 2048))
    ranger = Model(torch.bfloat16)
    optimizer = ranger.step(optimi.Ranger(ranger.parameters(), lr=LR, triton=False), 0, 6)
    convert.save(at("optimi"), "optimi", ranger, optimizer)
    report = convert.convert("optimi", "kahan_opt", at("optimi"), at("ours"))
    here = Ours(at("ours"))
    ok(here.opt.rule == ko.KOPT_RULE_RANGER and here.opt.lookahead == 6, "Ranger converts after a synchronization")
    ranger.step(optimizer, 6, 7)
    convert.save(at("optimi"), "optimi", ranger, optimizer)
    refused("Ranger between two synchronizations", "only right after a synchronization", "optimi", "kahan_opt",
            at("optimi"))


def test_torchdistx():
    model = Model(torch.bfloat16)
    # two types of moments are its default, but PyTorch 1.13 cannot divide them on the CPU
    optimizer = model.step(AnyPrecisionAdamW(model.parameters(), lr=LR, momentum_dtype=torch.bfloat16), 0, N)
    convert.save(at("tdx"), "torchdistx", model, optimizer)
    report = convert.convert("torchdistx", "kahan_opt", at("tdx"), at("ours"))
    there, here = load_file(at("tdx")), Ours(at("ours"))
    raw = all(torch.equal(here.residual(k).long(), words(there["optimizer.compensation." + k])) and
              same(here.memory[k][0], there["model." + k].reshape(-1)) and
              same(here.read(k, 1), there["optimizer.exp_avg." + k].float().reshape(-1)) and
              same(here.read(k, 2), there["optimizer.exp_avg_sq." + k].float().reshape(-1)) for k in SHAPES)
    ok(raw and not said(report, "changed"), "torchdistx: weights, compensations and moments are the same here")
    convert.convert("kahan_opt", "torchdistx", at("ours"), at("back"), names=at("tdx"))
    back = load_file(at("back"))
    ok(all(same(back[k].to(there[k].dtype), there[k]) for k in there), "... and back")
    other = Model(torch.bfloat16)
    theirs = AnyPrecisionAdamW(other.parameters(), lr=1)
    convert.load(at("back"), "torchdistx", other, theirs)
    exact = Model(torch.float64)
    exact.step(torch.optim.AdamW(exact.parameters(), lr=LR, weight_decay=0), 0, N + M)
    for m, o in ((model, optimizer), (other, theirs)):
        m.step(o, N, N + M)
    here.step(N, N + M)
    error = [distance(values, exact) for values in (
        [here.value(k) for k in SHAPES], compensated_values(other, theirs, "compensation"),
        compensated_values(model, optimizer, "compensation"))]
    ok(error[0] <= error[2] and error[1] <= error[2], "... goes on here and there as near to binary64 as all there: "
       "%.2e, %.2e, %.2e" % tuple(error))


def test_remainders():
    # every upper half, beside lower halves at the ties and between
    low = torch.tensor([0, 1, 0x4000, 0x7FFF, 0x8000, 0x8001, 0xC000, 0xFFFF])
    word = (torch.arange(65536)[:, None] * 65536 + low).reshape(-1)
    finite = (word & 0x7FFFFFFF) < 0x7F7F8000
    chosen = word[finite]
    weight, rest = halves(*remainder_split(chosen))
    ok(torch.equal(remainder_join(words(weight) & 0xFFFF, rest.long()), chosen), "the reference inverts itself")
    shapes = {"w": (chosen.numel(),)}
    group = {"lr": LR, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0, "adam_w_mode": True,
             "bias_correction": True}
    meta = {"format": "transformer_engine", "optimizer": "FusedAdam", "group": json.dumps(group), "ids": '{"w": 0}',
            "step": "5"}
    zeros = {"optimizer.exp_avg.w": torch.zeros(chosen.numel()), "optimizer.exp_avg_sq.w": torch.zeros(chosen.numel())}
    save_file({"model.w": weight, "optimizer.master_param.w": rest, **zeros}, at("te"), meta)
    report = convert.convert("transformer_engine", "kahan_opt", at("te"), at("ours"))
    here = Ours(at("ours"), shapes)
    ok(same(here.memory["w"][0], weight) and torch.equal(here.residual("w"), rest) and not said(report, "changed"),
       "TransformerEngine's remainders: for %d words, every upper half below infinity, weight and remainder are those "
       "of EXACT" % chosen.numel())
    convert.convert("kahan_opt", "transformer_engine", at("ours"), at("back"), names=at("te"))
    ok(same_tensors(at("te"), at("back")), "... and back, with the sign and the ties (upwards in magnitude)")
    convert.convert("kahan_opt", "apex", at("ours"), at("apex"), names=at("te"))
    apex = load_file(at("apex"))
    ok(torch.equal(words(apex["optimizer.param.w"]) & 0xFFFFFFFF, chosen) and same(apex["model.w"], weight),
       "apex: `param` has the fp32 words, and the bf16 weights are their split")
    convert.convert("apex", "kahan_opt", at("apex"), at("again"))
    ok(files_equal(at("ours"), at("again")), "... and back: the same bytes")
    top = torch.tensor([0x7F7F8000, 0x7F7FFFFF, 0xFF7F8000])
    weight, rest = halves(*remainder_split(top))
    state = {"model.w": weight, "optimizer.master_param.w": rest, "optimizer.exp_avg.w": torch.zeros(3),
             "optimizer.exp_avg_sq.w": torch.zeros(3)}
    save_file(state, at("te"), meta)
    refused("masters above the largest bf16, whose weight is infinite", "too large", "transformer_engine", "kahan_opt",
            at("te"))
    nans = torch.tensor([0x7FFFFFFF, 0x7FC00000, 0x7F800000])
    weight, rest = halves(*remainder_split(nans))
    ok(weight[0].item() == 0, "the trick of the remainders makes a zero of 7FFFFFFF, a NaN")
    state.update({"model.w": weight, "optimizer.master_param.w": rest})
    save_file(state, at("te"), meta)
    report = convert.convert("transformer_engine", "kahan_opt", at("te"), at("ours"))
    here = Ours(at("ours"), {"w": (3,)})
    ok([x & 0xFFFF for x in words(here.memory["w"][0]).tolist()] == [0x7FC0, 0x7FC0, 0x7F80] and
       not here.residual("w").any() and said(report, "3 are infinite or NaN"),
       "... here it is a NaN again, and it says so")
    state.update({"model.w": torch.ones(3).bfloat16(), "optimizer.master_param.w": torch.full((3,), 1.5)})
    save_file(state, at("te"), meta)
    report = convert.convert("transformer_engine", "kahan_opt", at("te"), at("ours"))
    here = Ours(at("ours"), {"w": (3,)})
    ok(said(report, "3 of w are not their rounded masters") and here.read("w", 0)[0] == 1.5,
       "fp32 masters that their weights do not follow: the masters count, and it says so")

    for form, make in (("transformer_engine", FusedAdam), ("apex", DistributedFusedAdam)):
        model = Model(torch.bfloat16)
        optimizer = model.step(make(model.parameters(), lr=LR, weight_decay=0.1), 0, N)
        convert.save(at("te"), form, model, optimizer)
        report = convert.convert(form, "kahan_opt", at("te"), at("ours"))
        here = Ours(at("ours"))
        convert.convert("kahan_opt", form, at("ours"), at("back"), names=at("te"))
        ok(here.opt.step == N and here.opt.decay_mode == ko.KOPT_DECAY_DECOUPLED and
           same_tensors(at("te"), at("back")) and
           not said(report, "changed"), "%s: %s after %d steps, and back: every bit" % (form, make.__name__, N))
        other = Model(torch.bfloat16)
        theirs = make(other.parameters(), lr=1)
        convert.load(at("back"), form, other, theirs)
        for m, o in ((model, optimizer), (other, theirs)):
            m.step(o, N, N + M)
        here.step(N, N + M)
        worst = 0.0
        for k, p in model.named_parameters():
            low = optimizer.state[p]["master_param"].reshape(-1).long()
            worst = max(worst, relative(here.read(k, 0), bits_to_float(remainder_join(words(p.data), low))))
        equal = all(same(p.data, q.data) for p, q in zip(model.parameters(), other.parameters()))
        ok(worst <= FP32 and equal, "... goes on here within %.1e of the masters there (at most 7e-6), and loaded back "
           "with the same bits" % worst)


def test_8bit():
    for signed in (True, False):
        ok(len(QMAP[signed]) == 256 and same(convert.dynamic_map(signed), QMAP[signed]),
           "the %s dynamic map, made by integers" % ("signed" if signed else "unsigned"))
    g = torch.Generator().manual_seed(5)
    n = 5000  # the last block is short
    codes = torch.randint(0, 256, (n,), generator=g).to(torch.uint8)
    scales = torch.rand(20, generator=g) * 10.0 ** torch.arange(-10, 10)
    for signed, slot in ((True, 1), (False, 2)):
        codes[::256] = 255
        other = torch.full((n,), 127, dtype=torch.uint8)
        data = {"model.w": torch.ones(n), "optimizer.qmap1": QMAP[True], "optimizer.qmap2": QMAP[False]}
        data["optimizer.state1.w"], data["optimizer.state2.w"] = (codes, other * 0) if signed else (other, codes)
        data["optimizer.absmax1.w"] = scales.clone()
        data["optimizer.absmax2.w"] = scales.clone()
        meta = {"format": "bitsandbytes", "optimizer": "PagedAdamW8bit", "ids": '{"w": 0}', "step": "9",
                "group": json.dumps({"lr": LR, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01})}
        save_file(data, at("bnb"), meta)
        convert.convert("bitsandbytes", "kahan_opt", at("bnb"), at("ours"), moments=ko.KOPT_F32)
        here = Ours(at("ours"), {"w": (n,)})
        expected = dequantize(codes, scales, QMAP[signed])
        kind = "signed" if signed else "unsigned"
        ok(torch.equal(here.read("w", slot), expected) and here.opt.step == 9,
           "8-bit codes (%s) with fp32 moments here: each is map * scale" % kind)
        report = convert.convert("kahan_opt", "bitsandbytes", at("ours"), at("back"), names=at("bnb"))
        back = load_file(at("back"))
        key = "optimizer.state%d.w" % slot
        off = ((back["optimizer.absmax%d.w" % slot] - scales).abs() / scales).max().item()
        ok(torch.equal(back[key], data[key]) and off <= 2.0 ** -22 and same(back["model.w"], data["model.w"]),
           "... and back: every code, also where the largest is negative; the scales within %.0e" % off)
        report = convert.convert("bitsandbytes", "kahan_opt", at("bnb"), at("ours"))
        here = Ours(at("ours"), {"w": (n,)})
        error = (here.read("w", slot).double() - expected.double()).abs()
        # docs/numerics.md, section 6b: codes of roots are 1/8 of a binade apart at most, so squares 1/8; those of first
        # moments 1/16, 1/8, 1/4, 1/2 and 1 in four binades each from the largest of 64 on, and 2^-21 below
        largest = torch.nn.functional.pad(expected.double().abs(), (0, -n % 64)).reshape(-1, 64).amax(1)
        largest = largest.repeat_interleave(64)[:n]
        below = torch.log2(largest / expected.double().abs()).clamp(max=40) + 1
        gap = expected.double().abs() * (2.0 ** ((below / 4).floor() - 4) if signed else 0.125)
        gap = gap + largest * (2.0 ** -21 if signed else 2e-12)
        line = [s for s in report if s.startswith("first" if signed else "second")][0]
        ok(here.opt.first_moment_format == ko.KOPT_Q8 and bool((error <= gap).all()) and
           said(report, "8-bit codes: .*other codes") and "changed; largest error %.2g" % error.max() in line,
           "... with 8-bit moments here: %s, as it says" % line.split("; ")[1])
    # what the quantizer promises
    x = torch.randn(512, generator=g) * 10.0 ** torch.randint(-9, 1, (512,), generator=g)
    for signed, values in ((True, x), (True, torch.zeros(300)), (False, x * x)):
        mine, largest = convert.encode(values, QMAP[signed])
        y = dequantize(mine, largest, QMAP[signed]).double()
        theirs = quantize(torch.where(values == 0, 1e-30, values), QMAP[signed])
        theirs = fast_dequantize(*theirs, QMAP[signed]).double()
        here, there = (y - values.double()).abs(), (theirs - values.double()).abs()
        lifted = (theirs == 0) & (values > 0) & torch.tensor(not signed)
        if values.any():
            ok(bool((here[~lifted].square().sum() <= there[~lifted].square().sum()) & (mine[lifted] == 1).all()) and
               (signed or int(lifted.sum()) > 5), "the quantizer (%s) is not worse than that of bitsandbytes%s"
               % ("signed" if signed else "unsigned", "" if signed else ", and squares above 0 never get code 0"))
        else:
            ok(not y.any() and bool((mine == 127).all()), "a block of zeros has the code of 0")
    meta_step = {"format": "bitsandbytes", "optimizer": "AdamW8bit", "ids": '{"w": 0}', "step": "9",
                 "group": json.dumps({"lr": LR, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01})}
    wide = {**data, "optimizer.absmax1.w": scales[:3].clone(), "optimizer.absmax2.w": scales[:3].clone()}
    save_file(wide, at("bnb"), meta_step)
    report = convert.convert("bitsandbytes", "kahan_opt", at("bnb"), at("ours"))
    here = Ours(at("ours"), {"w": (n,)})
    expected = QMAP[False][data["optimizer.state2.w"].long()] * scales[:3].repeat_interleave(2048)[:n]
    error = (here.read("w", 2).double() - expected.double()).abs() <= expected.double() / 8 + 1e-30
    ok(said(report, "blocks of 2048 values, not 256: it is coded again") and bool(error.all()),
       "blocks of 2048 (bitsandbytes before 0.44) are coded again, and it says so")
    save_file({**data, "optimizer.absmax1.w": torch.ones(7)}, at("bnb"), meta_step)
    refused("scales that fit no size of blocks", "7 scales for 5000 codes", "bitsandbytes", "kahan_opt", at("bnb"))

    for make, options in ((AdamW8bit, {"lr": LR}), (Lion8bit, {"lr": 1e-4}), (SGD8bit, {"lr": 1e-2})):
        model = Model()
        optimizer = model.step(make(model.parameters(), **options), 0, N)
        convert.save(at("bnb"), "bitsandbytes", model, optimizer)
        convert.convert("bitsandbytes", "kahan_opt", at("bnb"), at("ours"), weights=ko.KOPT_BF16)
        convert.convert("bitsandbytes", "kahan_opt", at("bnb"), at("full"), moments=ko.KOPT_F32, weights=ko.KOPT_F32)
        report = convert.convert("kahan_opt", "bitsandbytes", at("full"), at("back"), names=at("bnb"))
        there, back = load_file(at("bnb")), load_file(at("back"))
        codes = all(torch.equal(back[k], there[k]) for k in there if k.startswith("optimizer.state"))
        ok(codes and same(there["model.out.weight"], back["model.out.weight"]) and
           said(report, "fewer than 4096 elements"), "%s to fp32 moments and back: the same codes" % make.__name__)
        exact, other = Model(torch.float64), Model()
        theirs = make(other.parameters(), lr=1)
        convert.load(at("back"), "bitsandbytes", other, theirs)
        plain = {AdamW8bit: lambda p: torch.optim.AdamW(p, weight_decay=0, **options),
                 Lion8bit: lambda p: peers.import_optimi().Lion(p, triton=False, **options),
                 SGD8bit: lambda p: torch.optim.SGD(p, momentum=0.9, **options)}[make]
        exact.step(plain(exact.parameters()), 0, N + M)
        model.step(optimizer, N, N + M)
        other.step(theirs, N, N + M)
        runs = [[p.data for p in model.parameters()], [p.data for p in other.parameters()]]
        for path in ("ours", "full"):
            ours = Ours(at(path)).step(N, N + M)
            runs.append([ours.read(k, 0) for k in SHAPES])
        start = [x for x in initial().values()]
        moved = distance(start, exact)
        error = [distance(values, exact) / moved for values in runs]
        ok(abs(error[1] - error[0]) <= 1e-3 * error[0] and error[2] <= 0.05 and error[3] <= error[0],
           "... the distance from binary64, in parts of the way: all there %.4f, loaded back %.4f, %d steps here with "
           "8-bit moments %.4f (at most 0.05), with fp32 moments %.4f" % (error[0], error[1], M, error[2], error[3]))
    fresh(at("ours"), ko.kopt_adamw(LR), moments=ko.KOPT_Q8)
    Ours(at("ours")).step(0, N).save(at("ours"))
    report = convert.convert("kahan_opt", "bitsandbytes", at("ours"), at("bnb"), names=at("names.json"))
    ok(load_file(at("bnb"))["model.out.weight"].dtype == torch.float32,
       "kahan_opt to bitsandbytes: fp32 weights, as there are residuals")
    report = convert.convert("kahan_opt", "bitsandbytes", at("ours"), at("bnb"), names=at("names.json"),
                             weights=ko.KOPT_BF16)
    ok(said(report, "residual: bitsandbytes keeps none", "second moment: kahan_opt holds its root", "8-bit codes",
            "weights: %d values, [0-9]+ changed" % COUNT), "... bf16 weights: names residuals, roots and codes")


# ---- refusals ----

def refused(what, pattern, source, target, path, **options):
    """The conversion must be refused in words, leave OUT as it was, and no other file."""
    out = at("untouched")
    with open(out, "w") as f:
        f.write("before")
    files, text = sorted(os.listdir(FOLDER)), ""
    try:
        convert.convert(source, target, path, out, **options)
    except convert.Refused as e:
        text = str(e)
    with open(out, "rb") as f:
        good = f.read() == b"before" and sorted(os.listdir(FOLDER)) == files
    match = re.search(pattern, text)
    ok(bool(match) and good, "refused: %s%s" % (what, "" if match else " (it says: %s)" % text))


def test_refusals():
    fresh(at("ours"), ko.kopt_adamw(LR))
    model = Model()
    optimizer = model.step(torch.optim.AdamW(model.parameters(), lr=LR), 0, 3)
    convert.save(at("torch"), "torch", model, optimizer)
    data = load_file(at("torch"))
    from safetensors import safe_open
    with safe_open(at("torch"), "pt") as f:
        meta = {k: v for k, v in f.metadata().items() if k != "crc32"}

    def altered(change=None, **new_meta):
        new = {k: v.clone() for k, v in data.items()}
        if change:
            change(new)
        save_file(new, at("altered"), {k: v for k, v in {**meta, **new_meta}.items() if v is not None})
        return at("altered")

    k, t = "kahan_opt", "torch"
    refused("a file that is not there", "cannot be read: No such file", k, t, at("none"))
    refused("an empty file", "no checkpoint of kahan_opt", k, t, write("empty", b""))
    refused("a checkpoint that is something else", "no checkpoint of kahan_opt", k, t,
            write("noise", bytes(range(256)) * 4))
    refused("safetensors that are something else", "no safetensors file, or it is damaged", t, k, at("noise"))
    torch.save(model.state_dict(), at("pickle"))
    refused("a pickle", r"pickle.*convert.save\(\)", t, k, at("pickle"))
    refused("a checkpoint where safetensors should be", "is a checkpoint of kahan_opt", t, k, at("ours"))
    refused("an unknown format", "no format `keras`", "keras", k, at("ours"))
    refused("a state of another library", "holds a state of torch, not of optimi", "optimi", k, at("torch"))
    save_file(data, at("altered"))
    refused("a file without metadata", r"does not say from which optimizer", t, k, at("altered"))
    refused("a missing moment", "optimizer.exp_avg_sq.layer.bias is missing", t, k,
            altered(lambda d: d.pop("optimizer.exp_avg_sq.layer.bias")))
    refused("a moment of another shape", r"exp_avg of layer.bias has the shape \[3\], its weight \[70\]", t, k,
            altered(lambda d: d.update({"optimizer.exp_avg.layer.bias": torch.zeros(3)})))
    refused("a moment of another type", "exp_avg of layer.bias has the type torch.int64", t, k,
            altered(lambda d: d.update({"optimizer.exp_avg.layer.bias": torch.zeros(70).long()})))
    refused("a weight of another type", "layer.bias has the type torch.float64", t, k,
            altered(lambda d: d.update({"model.layer.bias": torch.zeros(70).double()})))
    refused("a state that is unknown", "has no state `optimizer.velocity", t, k,
            altered(lambda d: d.update({"optimizer.velocity.layer.bias": torch.zeros(70)})))
    refused("a state without a weight", "belongs to no weight", t, k,
            altered(lambda d: d.update({"optimizer.exp_avg.nobody": torch.zeros(70)})))
    refused("a negative mean of squares", "has a negative number: the file is damaged", t, k,
            altered(lambda d: d["optimizer.exp_avg_sq.layer.bias"].fill_(-1)))
    refused("an unknown optimizer", "kahan_opt has no Rprop; of PyTorch it takes SGD, Adam, AdamW, RAdam", t, k,
            altered(optimizer="Rprop"))
    refused("metadata that lack the groups", "metadata has no correct 'group'", t, k, altered(group=None))
    refused("a group that lacks a number", "has no 'betas'", t, k, altered(group='{"lr": 1, "weight_decay": 0}'))
    refused("a group with a value that is no number", "has a wrong value", t, k,
            altered(group=json.dumps({**json.loads(meta["group"]), "lr": None})))
    refused("a step count that is too large", "step 4294967296 is not below", t, k, altered(step="4294967296"))
    refused("names that differ", "are not those of its weights: layer.bias", t, k,
            altered(ids='{"layer.weight": 0, "out.weight": 1}'))
    refused("two equal ids", "the same id", t, k, altered(ids='{"layer.weight": 0, "layer.bias": 0, "out.weight": 1}'))
    convert.convert(t, k, altered(lambda d: d.update({"model.layer.bias": torch.full((70,), 0.1).half()})), at("mixed"))
    convert.convert(k, k, at("mixed"), at("again"))
    mixed = convert.read_kahan_opt(at("again")).tensors
    ok({one.id: one.weight.dtype for one in mixed} == {0: torch.float32, 1: torch.float16, 2: torch.float32} and
       same(mixed[1].weight, torch.full((70,), 0.1).half()), "two types of weights: each tensor keeps its own")
    refused("a hyper-parameter out of its range", "out of range", t, k,
            altered(group=json.dumps({**json.loads(meta["group"]), "eps": 0.0})))
    refused("fp16 moments that overflow", "too large for the format", t, k,
            altered(lambda d: d["optimizer.exp_avg.layer.bias"].fill_(1e6)), moments=ko.KOPT_FP16)
    refused("an option of the other direction", "--rounding: PyTorch has no such choice", k, t, at("ours"),
            rounding=ko.KOPT_EXACT)
    for name, opt, form, pattern in (
            ("Lion for PyTorch", ko.kopt_lion(LR), "torch", "PyTorch cannot go on .*no such rule"),
            ("StableAdamW for PyTorch", ko.kopt_stable_adamw(LR), "torch", "cannot hold .*stable = 1"),
            ("AMSGrad for optimi", ko.kopt_adamw(LR), "optimi", "cannot hold amsgrad = 1"),
            ("Adan for bitsandbytes", ko.kopt_adan(LR), "bitsandbytes", "no such rule"),
            ("Adam-atan2", ko.kopt_adam_atan2(LR), "optimi", "no such rule"),
            ("smooth Lion", ko.kopt_smooth_lion(LR, 3), "optimi", "cannot hold sharpness = 3"),
            ("an average of weights", ko.kopt_ema(0.9), "torch", "no such rule")):
        opt.amsgrad = int("AMSGrad" in name)
        refused(name, pattern, k, form, fresh(at("ours2"), opt))
    refused("names of another model", "tensor 1 has 70 elements, but b has the shape", k, t, at("ours"),
            names=write("n", json.dumps({"a": {"id": 0, "shape": [80, 70]}, "b": {"id": 1, "shape": [9]},
                                         "c": {"id": 2, "shape": [15]}}).encode()))
    refused("names that lack an id", "tensor 2 has no name", k, t, at("ours"),
            names=write("n", json.dumps({"a": {"id": 0, "shape": [80, 70]}, "b": {"id": 1, "shape": [70]}}).encode()))
    refused("names in another form", "is not of the form", k, t, at("ours"), names=write("n", b'{"a": 3}'))

    # damage
    with open(at("ours"), "rb") as f:
        whole = f.read()
    wrong = []
    for position in list(range(0, 400)) + list(range(400, len(whole), 997)) + [len(whole) - 1]:
        broken = bytearray(whole)
        broken[position] ^= 1 << position % 8
        wrong += [position] if accepted("kahan_opt", "torch", broken) else []
    for cut in (*range(0, 400, 7), len(whole) // 2, len(whole) - 1):
        wrong += [cut] if accepted("kahan_opt", "torch", whole[:cut]) else []
    ok(not wrong, "a flipped bit or a cut anywhere in a checkpoint is refused%s" % (wrong[:5] or ""))
    with open(at("torch"), "rb") as f:
        whole = f.read()
    wrong = [p for p in range(8, len(whole), 1499) if accepted("torch", "kahan_opt", flipped(whole, p))]
    wrong += [c for c in range(0, len(whole), 4999) if accepted("torch", "kahan_opt", whole[:c])]
    ok(not wrong, "... and in a safetensors file of this script%s" % (wrong[:5] or ""))

    contradictions()

    def message(call):
        try:
            call()
        except convert.Refused as e:
            return str(e)
        return ""

    text = message(lambda: convert.convert(k, t, at("ours"), at("no/such/folder")))
    ok("cannot be written: No such file" in text, "refused: a folder that is not there")

    two = torch.optim.AdamW([{"params": [model.layer.weight]},
                             {"params": [model.layer.bias, model.out.weight], "lr": 1}])
    model.step(two, 0, 1)
    ok("2 param_groups" in message(lambda: convert.save(at("g"), "torch", model, two)), "refused: two groups at once")
    convert.save(at("g"), "torch", model, two, group=1)
    convert.convert("torch", "kahan_opt", at("g"), at("g2"))
    ok(json.loads(read_meta(at("g"))["ids"]) == {"layer.bias": 1, "out.weight": 2},
       "a group has a file, with ids of its own in the model")
    model.out.weight.grad = None
    two.state[model.layer.bias]["step"] = torch.tensor(9.0)
    text = message(lambda: convert.save(at("g"), "torch", model, two, group=1))
    ok("are at steps 1, 9" in text, "refused: two step counts")
    other = Model(torch.bfloat16)
    text = message(lambda: convert.load(at("torch"), "torch", other, torch.optim.AdamW(other.parameters())))
    ok("torch.float32 [80, 70] in the file, torch.bfloat16" in text, "refused: load() into weights of another type")
    text = message(lambda: convert.load(at("torch"), "torch", model, torch.optim.SGD(model.parameters(), lr=1)))
    ok("is for AdamW, not for SGD" in text, "refused: load() into another optimizer")
    late = Model()
    optimizer = torch.optim.AdamW(late.parameters())
    late.layer.weight.grad = GRADIENTS[0]["layer.weight"]
    optimizer.step()
    convert.save(at("late"), "torch", late, optimizer)
    report = convert.convert("torch", "kahan_opt", at("late"), at("ours"))
    ok(said(report, "layer.bias has none, as it never had a gradient"),
       "a parameter without a state gets zeros, and it says so")


def contradictions():
    """Files that no damage made: their fields contradict each other or are no numbers, and their checksums are right.
    Each is converted to what it says, or refused in a sentence."""
    with open(at("ours"), "rb") as f:
        whole = f.read()
    tried, wrong = 0, []
    opt, again = ko.kopt_optimizer(), bytearray(180)
    fields = [(i, 1) for i in range(4, 12)] + [(12, 4), (16, 8), (24, 8), (32, 8), (40, 4), (44, 4), (168, 4), (172, 4)]
    fields += [(i, 8) for i in range(48, 168, 8)]
    fields += [(176 + i, size) for i, size in fields[:14]] + [(176 + i, 4) for i in (48, 52, 56, 60)]
    values = [0, 1, 2, 3, 7, 16, 255, 0x7FC00000, 2 ** 32 - 1, 0x7FF0 << 48, 0x7FF8 << 48, 0x3FE0 << 48, 2 ** 63]
    for (place, size), value in itertools.product(fields, values):
        broken = bytearray(whole)
        broken[place:place + size] = (value % (1 << 8 * size)).to_bytes(size, "little")
        broken[-4:] = zlib.crc32(broken[:-4] + b"\0").to_bytes(4, "little")
        tried += 1
        if not accepted("kahan_opt", "fp32", broken):
            continue
        ko.check(ko.kopt_inspect(bytes(broken), 256, ko.byref(opt), None, None))
        ko.check(ko.kopt_save(ko.byref(opt), None, 0, (ko.c_char * 180).from_buffer(again), 180))
        if again[:16] + again[32:176] != broken[:16] + broken[32:176]:
            wrong.append((place, value))
    ok(tried > 500 and not wrong, "%d checkpoints that contradict themselves: refused, or they are what they say %s" % (
        tried, wrong[:3] or ""))
    data, meta, tried, wrong = load_file(at("torch")), read_meta(at("torch")), 0, []
    texts = ["", "[]", "{}", "null", "-1", "NaN", '"x"', "[1]", '{"a": 1}', "1e999"]
    parts = [None, [], {}, "x", -1, -2.5, float("nan"), float("inf"), 1 << 70, 7, [0.9], [0.9, "x"]]
    for key in sorted(set(meta) - {"crc32"}):
        changes = [None] + texts
        if meta[key].startswith("{"):
            old = json.loads(meta[key])
            changes += [json.dumps({**old, k: part}) for k in old for part in parts]
            changes += [json.dumps({k: v for k, v in old.items() if k != gone}) for gone in old]
        for change in changes:
            new = {k: v for k, v in meta.items() if k not in ("crc32", key)}
            convert.store_safetensors(at("altered"), data, new if change is None else {**new, key: change})
            model = Model()
            optimizer = torch.optim.AdamW(model.parameters())
            for call in (lambda: convert.convert("torch", "kahan_opt", at("altered"), at("unwanted")),
                         lambda: convert.convert("fp32", "kahan_opt", at("altered"), at("unwanted")),
                         lambda: convert.load(at("altered"), "torch", model, optimizer),
                         lambda: convert.read_names(at("altered")), lambda: convert.inspect(at("altered"))):
                tried += 1
                try:
                    call()
                except convert.Refused:
                    pass
                except Exception as error:  # pylint: disable=broad-except
                    wrong.append((key, change, repr(error)))
    ok(tried > 500 and not wrong, "%d uses of safetensors files with contradicting metadata: refused, or used %s" % (
        tried, wrong[:3] or ""))


def read_meta(path):
    from safetensors import safe_open
    with safe_open(path, "pt") as f:
        return f.metadata()


def write(name, data):
    with open(at(name), "wb") as f:
        f.write(data)
    return at(name)


def flipped(data, position):
    data = bytearray(data)
    data[position] ^= 1 << position % 8
    return data


def accepted(source, target, data):
    try:
        convert.convert(source, target, write("broken", bytes(data)), at("unwanted"))
    except convert.Refused:
        return False
    return True


def test_command_line():
    fresh(at("ours"), ko.kopt_adamw(LR), seed=7)
    command = [sys.executable, "docs/examples/convert.py"]
    env = {**os.environ, "PYTHONPATH": LIBRARY}

    def run(*arguments):
        return subprocess.run(command + list(arguments), capture_output=True, text=True, env=env)

    r = run("kahan_opt", "optimi", at("ours"), at("out"), "--names", at("names.json"))
    ok(r.returncode == 0 and r.stdout == "" and "convert: compensation: optimi rounds it to nearest" in r.stderr and
       "convert: seed 7" in r.stderr and os.stat(at("out")).st_mode & 0o777 == 0o644,
       "the command converts and says on stderr what is lost")
    r = run("inspect", at("out"))
    ok(r.returncode == 0 and "optimi: AdamW, step 0" in r.stdout and
       "model.layer.weight: bfloat16 [80, 70], id 0" in r.stdout, "inspect shows a safetensors file")
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        convert.main(["inspect", at("ours")])
    ok("KOPT_RULE_ADAM, step 0, seed 7, weights bf16 kahan, moments bf16" in text.getvalue() and
       "tensor 1: 70 elements" in text.getvalue(), "... and a checkpoint")
    r = run("kahan_opt", "torch", at("noise"), at("out"))
    ok(r.returncode == 1 and r.stderr.startswith("convert: ") and "Nothing was written" in r.stderr and
       "Traceback" not in r.stderr, "a refusal is a sentence, and status 1")
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        convert.main(["--help"])
    ok("convert.py FROM TO IN OUT" in text.getvalue() and "bitsandbytes" in text.getvalue(), "--help")


def main():
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.umask(0o022)
    print("# PyTorch %s" % torch.__version__)
    write("names.json", json.dumps({k: {"id": i, "shape": s} for i, (k, s) in enumerate(SHAPES.items())}).encode())
    for test in (test_torch, test_fp32, test_optimi, test_torchdistx, test_remainders, test_8bit, test_refusals,
                 test_command_line):
        test()
    print("1..%d" % count)
    for name in os.listdir(FOLDER):
        os.unlink(at(name))
    os.rmdir(FOLDER)


if __name__ == "__main__":
    main()
