"""The rules of kahan_opt.h beside those of PyTorch and optimi, on the same gradients. Prints TAP.

    python3 tests/examples/peers.py [CC]        needs PyTorch (Debian: python3-torch) and optimi (PyPI: torch-optimi)

The header is compiled to a shared library and called through ctypes; its structs and enums are read from its text, so a
new field needs nothing here. Two things are compared over STEPS steps:

1. fp32: weights and moments within 1e-5 of the peer's in fp32, weights also of the peer's in binary64, relative to the
   largest that the value has been. (The peers' own rounding of 1 - lr * weight_decay alone makes 5e-6 of it.)
2. bf16 with Kahan against bf16 in the peer (optimi: with its own Kahan summation; rules that only PyTorch has: as they
   are): the distance of the weights from the peer's own binary64 trajectory, which must not be larger than the peer's.
"""
import ctypes
import importlib
import math
import re
import subprocess
import sys
import types

import torch

STEPS = 400
N = 1500   # not a multiple of any vector or block
ZERO = 20  # so many of them never get a gradient
BUILD = "build/tests/peers"


# ---- optimi on a PyTorch older than 2.2: what it imports or calls and never needs here ----

def import_optimi():
    try:
        importlib.import_module("torch.utils._foreach_utils")
    except ImportError:
        stub = types.ModuleType("torch.utils._foreach_utils")
        stub._foreach_supported_types = [torch.Tensor]
        stub._group_tensors_by_device_and_dtype = None
        sys.modules[stub.__name__] = stub
    if not hasattr(torch, "_disable_dynamo"):
        torch._disable_dynamo = lambda function: function
    if not hasattr(torch.optim.Optimizer, "register_load_state_dict_post_hook"):
        torch.optim.Optimizer.register_load_state_dict_post_hook = lambda self, hook: None
    sys.path.insert(0, "build/python")  # where ./build.sh setup puts it
    import optimi
    return optimi


# ---- kahan_opt.h through ctypes ----

class Header:
    """The compiled header: functions as attributes, `enum` and `struct` from its text."""

    def __init__(self, compiler):  # its words
        with open("kahan_opt.h", encoding="utf-8") as file:
            text = re.sub(r"/\*.*?\*/", "", file.read(), flags=re.S)
        self.enum = {}
        for body in re.findall(r"typedef enum (?:KOPT_NODISCARD_ )?\w+ \{(.*?)\}", text, flags=re.S):
            value = -1
            for entry in filter(str.strip, body.split(",")):
                name, _, number = entry.partition("=")
                value = int(number) if number else value + 1
                self.enum[name.strip()] = value
        self.optimizer = self.struct(text, "kopt_optimizer")
        self.tensor = self.struct(text, "kopt_tensor")
        path = "./" + BUILD + ".so"
        source = ('#define KAHAN_OPT_IMPLEMENTATION\n#include "kahan_opt.h"\n'
                  "unsigned long size_of[] = {sizeof(kopt_optimizer), sizeof(kopt_tensor)};\n")
        subprocess.run([*compiler, "-std=c99", "-O2", "-shared", "-fPIC", "-I.", "-x", "c", "-", "-o", path],
                       input=source.encode(), check=True)
        self.library = ctypes.CDLL(path)
        sizes = (ctypes.c_ulong * 2).in_dll(self.library, "size_of")
        assert list(sizes) == [ctypes.sizeof(self.optimizer), ctypes.sizeof(self.tensor)], "the structs were misread"
        self.library.kopt_state_size.restype = ctypes.c_size_t

    @staticmethod
    def struct(text, name):
        body = re.search(r"typedef struct %s \{(.*?)\} %s;" % (name, name), text, flags=re.S).group(1)
        ctype = {"double": ctypes.c_double, "float": ctypes.c_float, "int": ctypes.c_int, "size_t": ctypes.c_size_t,
                 "uint32_t": ctypes.c_uint32, "uint64_t": ctypes.c_uint64}
        body = re.sub(r"#ifdef.*?#endif", "", body, flags=re.S)  # not in this build
        fields = []
        for declaration in filter(str.strip, body.split(";")):
            kind, names = re.match(r"\s*((?:struct )?\w+)(.*)", declaration, flags=re.S).groups()
            for field in names.split(","):
                field, _, count = field.strip(" *\n]").partition("[")
                here = ctypes.c_void_p if "*" in names else ctype.get(kind, ctypes.c_int)
                fields.append((field, here * int(count) if count else here))
        return type(name, (ctypes.Structure,), {"_fields_": fields})

    def make(self, rule, options):
        """kopt_RULE(lr) with the options set; a string is the name of an enum value."""
        opt = self.optimizer()
        self.check(self.library.kopt_optimizer_init(
            ctypes.byref(opt), self.enum["KOPT_RULE_" + rule.upper()], ctypes.c_double(options["lr"]),
            self.library.kopt_version(), ctypes.c_size_t(ctypes.sizeof(opt)),
            ctypes.c_size_t(ctypes.sizeof(self.tensor))))
        for field, value in options.items():
            getattr(opt, field)  # ctypes would take a field that is not there
            setattr(opt, field, self.enum[value] if isinstance(value, str) else value)
        return opt

    def check(self, result):
        if result != self.enum["KOPT_OK"]:
            self.library.kopt_result_string.restype = ctypes.c_char_p
            raise RuntimeError(self.library.kopt_result_string(result).decode())


class Ours:
    """One tensor and its optimizer, with the face of a Peer."""

    def __init__(self, header, rule, options, initial, dtype):
        self.header, self.dtype = header, dtype
        form = {torch.float32: "KOPT_F32", torch.bfloat16: "KOPT_BF16"}[dtype]
        self.opt = header.make(rule, {"first_moment_format": form, "second_moment_format": form, **options})
        self.stored = torch.empty(N, dtype=dtype)
        self.gradient = torch.empty(N, dtype=dtype)
        self.tensor = header.tensor(weight=self.stored.data_ptr(), weight_format=header.enum[form],
                                    grad=self.gradient.data_ptr(), grad_format=header.enum[form], n=N)
        size = header.library.kopt_state_size(ctypes.byref(self.opt), ctypes.byref(self.tensor))
        self.block = ctypes.create_string_buffer(max(size, 1))
        self.tensor.state, self.tensor.state_size = ctypes.addressof(self.block), size
        header.check(header.library.kopt_state_init(ctypes.byref(self.opt), ctypes.byref(self.tensor),
                                                    ctypes.c_size_t(1), ctypes.c_void_p(initial.data_ptr())))

    def step(self, gradient, lr):
        self.gradient.copy_(gradient)
        self.opt.lr = lr
        self.header.check(self.header.library.kopt_optimizer_step(
            ctypes.byref(self.opt), ctypes.byref(self.tensor), ctypes.c_size_t(1)))

    def get(self, what):
        """The weights, or the first or second moment, in binary64."""
        if what == "weight":
            return self.stored.double()
        out = torch.empty(N)
        self.header.check(self.header.library.kopt_state_read(
            ctypes.byref(self.opt), ctypes.byref(self.tensor), self.header.enum["KOPT_SLOT_%s_MOMENT" % what.upper()],
            ctypes.c_void_p(out.data_ptr())))
        return out.double()


class Peer:
    def __init__(self, make, options, initial, dtype, is_optimi):
        self.parameter = torch.nn.Parameter(initial.to(dtype, copy=True))
        self.options, self.is_optimi, self.steps = options, is_optimi, 0
        if is_optimi:
            options = {"kahan_sum": dtype == torch.bfloat16, **options}
        self.optimizer = make([self.parameter], **options)

    def step(self, gradient, lr):
        self.optimizer.param_groups[0]["lr"] = lr
        self.parameter.grad = gradient.to(self.parameter.dtype, copy=True)  # optimi uses it as scratch memory
        self.optimizer.step()
        self.steps += 1

    def get(self, what):
        """Moments as PyTorch keeps them (optimi's are divided by 1 - beta^t already, but for SGD and Lion), or None."""
        if what == "weight":
            return self.parameter.detach().double().clone()
        state, group = self.optimizer.state[self.parameter], self.optimizer.param_groups[0]
        names = ("momentum_buffer", "exp_avg") if what == "first" else ("exp_avg_sq",)
        values = [state[name].double() for name in names if state.get(name) is not None]
        if not values:
            return None
        if self.is_optimi and "exp_avg_sq" in state:
            number = {"first": "beta1", "second": "beta3" if "beta3" in group else "beta2"}[what]
            return values[0] * (1 - group[number] ** self.steps)
        return values[0].clone()


# ---- the same gradients for all ----

def make_task():
    """Weights and gradients of many sizes; gradients with a mean, noise, and a scale that falls to a quarter. All are
    bf16 numbers, so that every format sees the same ones."""
    generator = torch.Generator().manual_seed(1)
    normal = lambda *shape: torch.randn(*shape, generator=generator)
    uniform = lambda n: torch.rand(n, generator=generator)
    initial = (normal(N) * 10 ** (-2 * uniform(N))).bfloat16().float()
    scale = 10 ** (-3 * uniform(N))
    scale[:ZERO] = 0
    mean = 0.3 * normal(N)
    gradients = [((normal(N) + mean) * scale * 4 ** (-t / STEPS)).bfloat16().float() for t in range(STEPS)]
    return initial, gradients


def cosine(lr, t):
    return lr * 0.5 * (1 + math.cos(math.pi * t / STEPS))


def cases(optimi):
    """name, peer, peer's options, our rule, our options. Where there are no options, it is the defaults that agree.
    L2 is a power of two: with 0.1, a gradient of -0.1 w leaves rounding errors, of which Adam makes a whole step."""
    torch_betas = {"betas": (0.9, 0.999), "eps": 1e-8}
    optimi_adam = {"beta2": 0.99, "eps": 1e-6}
    never = 2 ** 30
    o = torch.optim
    return [
        ("SGD", o.SGD, {"lr": 0.01}, "sgd", {}),
        ("SGD with L2", o.SGD, {"lr": 0.01, "weight_decay": 0.125}, "sgd", {"weight_decay": 0.125}),
        ("SGD with momentum", o.SGD, {"lr": 0.01, "momentum": 0.9}, "sgd", {"momentum": 0.9}),
        ("SGD with dampening", o.SGD, {"lr": 0.01, "momentum": 0.9, "dampening": 0.5}, "sgd",
         {"momentum": 0.9, "dampening": 0.5}),
        ("SGD with Nesterov momentum", o.SGD, {"lr": 0.01, "momentum": 0.9, "nesterov": True}, "sgd",
         {"momentum": 0.9, "nesterov": 1}),
        ("SGD, Nesterov, L2, maximize", o.SGD,
         {"lr": 0.01, "momentum": 0.8, "nesterov": True, "weight_decay": 0.125, "maximize": True}, "sgd",
         {"momentum": 0.8, "nesterov": 1, "weight_decay": 0.125, "maximize": 1}),
        ("Adam", o.Adam, {"lr": 1e-3}, "adam", {}),
        ("Adam with L2", o.Adam, {"lr": 1e-3, "weight_decay": 0.125}, "adam", {"weight_decay": 0.125}),
        ("Adam, maximize", o.Adam, {"lr": 1e-3, "maximize": True}, "adam", {"maximize": 1}),
        ("AMSGrad", o.Adam, {"lr": 1e-3, "amsgrad": True}, "adam", {"amsgrad": 1}),
        ("AdamW", o.AdamW, {"lr": 1e-3}, "adamw", {}),
        ("AdamW with AMSGrad, decay 0.3", o.AdamW, {"lr": 1e-3, "amsgrad": True, "weight_decay": 0.3}, "adamw",
         {"amsgrad": 1, "weight_decay": 0.3}),
        ("RAdam", o.RAdam, {"lr": 1e-3}, "radam", {}),
        ("RAdam with L2", o.RAdam, {"lr": 1e-3, "weight_decay": 0.125}, "radam", {"weight_decay": 0.125}),

        ("optimi SGD", optimi.SGD, {"lr": 0.01}, "sgd", {}),
        ("optimi SGD, momentum", optimi.SGD, {"lr": 0.01, "momentum": 0.9}, "sgd", {"momentum": 0.9}),
        ("optimi SGD, dampening, as PyTorch starts it", optimi.SGD,
         {"lr": 0.01, "momentum": 0.9, "dampening": True, "torch_init": True}, "sgd",
         {"momentum": 0.9, "dampening": 0.9}),
        ("optimi SGD, decoupled decay", optimi.SGD,
         {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1, "decouple_wd": True}, "sgd",
         {"momentum": 0.9, "weight_decay": 0.1, "decay_mode": "KOPT_DECAY_DECOUPLED"}),
        ("optimi SGD, fully decoupled decay", optimi.SGD,
         {"lr": 0.01, "momentum": 0.9, "weight_decay": 1e-4, "decouple_lr": True}, "sgd",
         {"momentum": 0.9, "weight_decay": 1e-4, "decay_mode": "KOPT_DECAY_FULLY_DECOUPLED"}),
        ("optimi Adam", optimi.Adam, {"lr": 1e-3}, "adam", optimi_adam),
        ("optimi AdamW", optimi.AdamW, {"lr": 1e-3}, "adamw", optimi_adam),
        ("optimi AdamW, PyTorch's betas, decay 0.1", optimi.AdamW, {"lr": 1e-3, "weight_decay": 0.1, **torch_betas},
         "adamw", {"weight_decay": 0.1}),
        ("optimi AdamW, fully decoupled decay", optimi.AdamW, {"lr": 1e-3, "weight_decay": 1e-4, "decouple_lr": True},
         "adamw", {"weight_decay": 1e-4, "decay_mode": "KOPT_DECAY_FULLY_DECOUPLED", **optimi_adam}),
        ("optimi Lion", optimi.Lion, {"lr": 1e-4}, "lion", {}),
        ("optimi Lion, decay 0.1", optimi.Lion, {"lr": 1e-4, "weight_decay": 0.1}, "lion", {"weight_decay": 0.1}),
        ("optimi Adan", optimi.Adan, {"lr": 1e-3}, "adan", {}),
        ("optimi Adan without decay", optimi.Adan, {"lr": 1e-3, "weight_decay": 0}, "adan", {"weight_decay": 0}),
        ("optimi RAdam", optimi.RAdam, {"lr": 1e-3}, "ranger", {"lookahead": never}),
        ("optimi Ranger", optimi.Ranger, {"lr": 1e-3}, "ranger", {}),
        ("optimi Ranger, decay 0.1, every 5 steps, 0.8", optimi.Ranger,
         {"lr": 1e-3, "weight_decay": 0.1, "k": 5, "alpha": 0.8}, "ranger",
         {"weight_decay": 0.1, "lookahead": 5, "lookahead_rate": 0.8}),
        ("optimi StableAdamW", optimi.StableAdamW, {"lr": 1e-3}, "stable_adamw", {}),
        ("optimi StableAdamW, decay 0.1", optimi.StableAdamW, {"lr": 1e-3, "weight_decay": 0.1}, "stable_adamw",
         {"weight_decay": 0.1}),
    ]


# With these the peer's moments do not stall: averages over 10 to 100 gradients with noise in them, rounded to nearest.
# Stochastic rounding, the default here, then only costs: the variance of its error is 1/6 ulp^2 instead of at most
# 1/12, and what nearest ignores has no noise at all. Choose KOPT_NEAREST for the moments where this matters.
NOISIER = ("optimi SGD, dampening, as PyTorch starts it", "optimi Lion", "optimi Lion, decay 0.1")


# ---- the comparisons ----

count = 0


def ok(good, description):
    global count
    count += 1
    print("%sok %d - %s" % ("" if good else "not ", count, description), flush=True)


def relative(a, b, largest):
    """The largest |a - b| relative to the largest that value of b has been."""
    error = (a - b).abs()
    error = torch.where(error == 0, error, error / largest)
    return float("inf") if torch.isnan(error).any() else error.max().item()


def compare_fp32(name, ours, peer, reference, lr, gradients):
    largest = {"weight": peer.get("weight").abs()}
    worst = {"weight": 0.0, "first moment": 0.0, "second moment": 0.0, "weight against binary64": 0.0}
    for t, gradient in enumerate(gradients):
        for run in (ours, peer, reference):
            run.step(gradient, cosine(lr, t))
        for key in worst:
            what = key.split()[0]
            value = (reference if "binary64" in key else peer).get(what)
            if value is None:
                continue
            largest[what] = torch.maximum(largest.get(what, torch.zeros(N)), value.abs())
            if t % 20 == 19:
                worst[key] = max(worst[key], relative(ours.get(what), value, largest[what]))
    seen = ", ".join("%s %.1e" % (key, worst[key]) for key in worst if key.split()[0] in largest)
    ok(all(value <= 1e-5 for value in worst.values()), "%s, fp32: within 1e-5 (%s)" % (name, seen))


def compare_bf16(name, ours, peer, reference, lr, gradients, noisier):
    """Root mean square, over weights and the second half of the run, of (weight - reference) relative to the largest
    that weight has been, in units of 2^-8. Rounding the reference itself to bf16 would give about 0.4."""
    largest, errors = reference.get("weight").abs(), {run: 0.0 for run in (*ours, peer)}
    for t, gradient in enumerate(gradients):
        for run in (*ours, peer, reference):
            run.step(gradient, cosine(lr, t))
        right = reference.get("weight")
        largest = torch.maximum(largest, right.abs())
        if t >= STEPS // 2 and t % 10 == 9:
            for run in errors:
                errors[run] += (256 * (run.get("weight") - right) / largest).square().mean().item()
    default, nearest, theirs = (math.sqrt(error / (STEPS / 20)) for error in errors.values())
    ok(nearest <= theirs, "%s, bf16, moments to nearest as in the peer: error %.3f, the peer's own %.3f"
       % (name, nearest, theirs))
    limit = 1.6 if noisier else 1
    ok(default <= limit * theirs, "%s, bf16: error %.3f, the peer's own %.3f%s"
       % (name, default, theirs, " (moments that cannot stall: at most 1.6 times that)" if noisier else ""))


def main():
    torch.set_num_threads(1)
    optimi = import_optimi()
    header = Header(sys.argv[1:] or ["cc"])
    print("# PyTorch %s, optimi %s" % (torch.__version__, optimi.__version__))
    initial, gradients = make_task()
    for name, make, peer_options, rule, options in cases(optimi):
        is_optimi = make.__module__.startswith("optimi")
        lr = peer_options["lr"]
        ours = lambda dtype, **more: Ours(header, rule, {"lr": lr, **options, **more}, initial, dtype)
        peer = lambda dtype: Peer(make, peer_options, initial, dtype, is_optimi)
        compare_fp32(name, ours(torch.float32), peer(torch.float32), peer(torch.float64), lr, gradients)
        both = ours(torch.bfloat16), ours(torch.bfloat16, moment_rounding="KOPT_NEAREST")
        compare_bf16(name, both, peer(torch.bfloat16), peer(torch.float64), lr, gradients, name in NOISIER)
    print("1..%d" % count)


if __name__ == "__main__":
    main()
