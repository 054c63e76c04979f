"""torch_kahan.py - optimizers for PyTorch that train weights in pure bf16 or fp16.

    ./build.sh python                  then put build/python into PYTHONPATH, or copy its files to your program
    ./build.sh examples torch_kahan    a small fit with them and with torch's own AdamW

    from torch_kahan import KahanAdamW
    model = model.to(torch.bfloat16)
    optimizer = KahanAdamW(model.parameters(), lr=1e-3)            # the rest of the loop stays as it is

Parameters and gradients are float32, bfloat16 or float16, on the CPU or (./build.sh python cuda) on a GPU. They are
stepped where they are, in one call for all tensors of a group. Options have the names of the header, and its enums are
words: rounding="exact", moment_format="q8". docs/pytorch.md says what each of them costs."""
import array
import concurrent.futures
import ctypes
import functools
from itertools import chain

import torch

import kahan_opt as k

FORMATS = {torch.float32: k.KOPT_F32, torch.bfloat16: k.KOPT_BF16, torch.float16: k.KOPT_FP16}
ADAM = ("betas", "eps", "amsgrad", "stable")
MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
RULES = {  # name: constructor, the options that only it has, and the names of its moments in torch.optim
    "sgd": (lambda lr: k.kopt_sgd(lr, 0), ("momentum", "dampening", "nesterov"), ("momentum_buffer",)),
    "adam": (k.kopt_adam, ADAM, MOMENTS),
    "adamw": (k.kopt_adamw, ADAM, MOMENTS),
    "stable_adamw": (k.kopt_stable_adamw, ADAM, MOMENTS),
    "lion": (k.kopt_lion, ("betas", "sharpness"), MOMENTS[:1]),
    "adan": (k.kopt_adan, ("betas", "eps"), ()),
    "radam": (k.kopt_radam, ("betas", "eps"), MOMENTS[:2]),
    "ranger": (k.kopt_ranger, ("betas", "eps", "lookahead", "lookahead_rate"), ()),
    "adam_atan2": (k.kopt_adam_atan2, ("betas", "atan2_a", "atan2_b", "atan2_outside"), MOMENTS[:2]),
}
WORDS = {  # the options that are enums; all but the weights' own format decide the layout of the state
    "rounding": ("nearest", "stochastic", "kahan", "compact", "exact"), "moment_format": ("f32", "bf16", "fp16", "q8"),
    "moment_rounding": ("nearest", "stochastic"), "compensation_rounding": ("nearest", "stochastic"),
    "decay_mode": ("l2", "decoupled", "fully_decoupled")}
COMMON = ("weight_decay", "max_lr", "maximize", "seed") + tuple(WORDS)
TORCH = ("lr", "betas", "eps", "weight_decay", "amsgrad", "momentum", "dampening", "nesterov", "maximize", "initial_lr")
ADDRESS = "Q" if ctypes.sizeof(ctypes.c_void_p) == 8 else "I"
THREADED = 65536  # weights; with fewer, waking the threads takes longer than the step

try:  # as any operation in place does, it tells autograd that the values are new
    from torch.autograd.graph import increment_version
    increment_version([torch.zeros(1)])
except (ImportError, TypeError, AttributeError):  # PyTorch before 2.6
    def increment_version(tensors):
        for p in tensors:
            p.detach().as_strided((0,), (1,)).zero_()

try:
    import kahan_opt_cuda as gpu
except ImportError as error:
    gpu, no_gpu = None, error


def on_device(x, device):
    return x.to(device)


def stream_of(device):
    return torch.cuda.current_stream(device).cuda_stream


@functools.lru_cache(None)
def pool(threads):
    return concurrent.futures.ThreadPoolExecutor(threads)


# ---- options -------------------------------------------------------------------------------------------------------


def defaults_of(rule, options):
    """All options of a rule with their values: those of its constructor, where `options` does not have them."""
    if rule not in RULES:
        raise ValueError("Invalid rule: %r: choose one of %s" % (rule, ", ".join(RULES)))
    constructor, own, _ = RULES[rule]
    opt = constructor(1e-3)
    values = {"rule": rule, "lr": 1e-3, "threads": 1}
    for name in COMMON + own:
        if name in WORDS:
            names = [word for word in WORDS[name] if getattr(k, "KOPT_" + word.upper()) == getattr(opt, name)]
            values[name] = names[0]
        elif name == "betas":
            values[name] = (opt.beta1, opt.beta2, opt.beta3)[:3 if rule == "adan" else 2]
        else:
            values[name] = None if name == "max_lr" else getattr(opt, name)  # None: the first learning rate
    for name, value in options.items():
        if name not in values:
            raise TypeError("%s has no option %r; it has %s" % (rule, name, ", ".join(values)))
        values[name] = value
    return values


def validate(group):
    """Says in words which option of a group is wrong."""
    for name, words in WORDS.items():
        if group[name] not in words:
            raise ValueError("Invalid %s: %r: choose one of %s" % (name, group[name], ", ".join(words)))
    for name, what, least in (("lr", "learning rate", 0), ("eps", "epsilon value", 2.0 ** -126),
                              ("weight_decay", "weight_decay value", 0), ("momentum", "momentum value", 0)):
        if name in group and not least <= float(group[name]) <= 3e38:
            raise ValueError("Invalid %s: %s" % (what, group[name]))
    betas = group.get("betas", ())
    if betas and len(betas) != (3 if group["rule"] == "adan" else 2):
        raise ValueError("Invalid betas: %s: %s has another number of them" % (betas, group["rule"]))
    for i, beta in enumerate(betas):
        if not 0.0 <= float(beta) < 1.0:
            raise ValueError("Invalid beta parameter at index %d: %s" % (i, beta))
    if group.get("nesterov") and (group["momentum"] <= 0 or group["dampening"] != 0):
        raise ValueError("Nesterov momentum requires a momentum and zero dampening")
    if not isinstance(group["threads"], int) or group["threads"] < 1:
        raise ValueError("Invalid threads: %r" % group["threads"])
    result = k.kopt_step_begin(make(group, torch.bfloat16), k.kopt_step())
    if result != k.KOPT_OK:
        raise ValueError("Invalid options of %s: %s" % (group["rule"], k.kopt_result_string(result)))


def make(group, dtype, step=0):
    """The kopt_optimizer for the tensors of a group that have this dtype."""
    constructor, own, _ = RULES[group["rule"]]
    opt = constructor(float(group["lr"]))
    opt.weight_format, opt.step = FORMATS[dtype], step
    for name in COMMON + own:
        value = group[name]
        if name == "betas":
            for i, beta in enumerate(value):
                setattr(opt, "beta%d" % (i + 1), float(beta))
        elif name in WORDS:
            setattr(opt, name, getattr(k, "KOPT_" + value.upper()))
        elif value is not None:
            setattr(opt, name, value)
    return opt


def moments_of(group):
    """(slot, name in torch.optim) of each moment."""
    names = [name for name in RULES[group["rule"]][2] if (name != "max_exp_avg_sq" or group["amsgrad"]) and
             (name != "momentum_buffer" or group["momentum"] > 0)]
    return list(enumerate(names, k.KOPT_FIRST_MOMENT))


# ---- a parameter and its state -------------------------------------------------------------------------------------


def like(p, dtype=None):
    """A tensor without gaps, in the order that p has in memory. This is also the order of the state."""
    return torch.empty_like(p, dtype=dtype, requires_grad=False)


def dense(p):
    """p itself, or a copy if p is a view with gaps."""
    return p.detach() if p.is_contiguous() or like(p).stride() == p.stride() else like(p).copy_(p.detach())


class Host:
    """A parameter and its state block in the memory of the host, for the functions that read and write state."""

    def __init__(self, group, index, p, step, block=None):
        self.opt, self.name = make(group, p.dtype, step), "parameter %d" % index
        self.p, self.weight, self.home = p, dense(p).cpu(), block
        if block is None:
            block = torch.zeros(k.kopt_state_size(self.opt, p.numel()), dtype=torch.uint8)
        self.block = block.cpu()
        self.t = k.kopt_tensor(weight=self.weight.data_ptr(), n=p.numel(), id=index, state=self.block.data_ptr(),
                               state_size=self.block.numel())

    def check(self, result):
        k.check(result, self.name)
        return self

    def read(self, slot):
        values = like(self.weight, torch.float32)
        self.check(k.kopt_state_read(self.opt, self.t, slot, values.data_ptr()))
        return values

    def write(self, slot, values):
        if values.shape != self.p.shape:
            raise ValueError("%s has the shape %s, the values for it %s"
                             % (self.name, tuple(self.p.shape), tuple(values.shape)))
        values = like(self.weight, torch.float32).copy_(values)
        return self.check(k.kopt_state_write(self.opt, self.t, slot, values.data_ptr()))

    def back(self):
        """What was written here becomes the parameter and its state."""
        if self.weight.data_ptr() != self.p.data_ptr():
            self.p.detach().copy_(self.weight)
        if self.home is not None and self.home.data_ptr() != self.block.data_ptr():
            self.home.copy_(self.block)


# ---- one call: the tensors of a group that have the same dtype, device and step count ------------------------------


def shares(sizes, threads, whole):
    """Cuts a list of tensors into parts of about the same number of elements: lists of (first tensor, one after the
    last, begin, end), where end is None for all elements. Ranges begin at multiples of 4096."""
    share = -(-sum(sizes) // threads)
    parts, part, room = [], [], share
    for i, n in enumerate(sizes):
        begin = 0
        while begin < n:
            end = n if whole or n - begin <= room + 4096 else begin + -(-room // 4096) * 4096
            if begin == 0 and end == n and part and part[-1][3] is None:
                part[-1] = (part[-1][0], i + 1, 0, None)
            else:
                part.append((i, i + 1, begin, None if begin == 0 and end == n else end))
            room -= end - begin
            begin = end
            if room <= 0:
                parts.append(part)
                part, room = [], share
    return parts + [part] if part else parts


class Call:
    def __init__(self, group, members, versions):
        """members: (index, parameter, state) of each tensor. versions: those that the last steps left, by id()."""
        self.group = group
        self.indices, self.params, self.states = map(list, zip(*members))
        self.dtype, self.device = self.params[0].dtype, self.params[0].device
        self.tensors = (k.kopt_tensor * len(members))()
        self.words = memoryview(self.tensors).cast("B").cast(ADDRESS)
        self.versions = [versions.get(id(p)) for p in self.params]
        self.plain = [p.is_contiguous() for p in self.params]
        self.gaps = []
        for i, (t, p, s) in enumerate(zip(self.tensors, self.params, self.states)):
            t.weight, t.n, t.id = p.data_ptr(), p.numel(), self.indices[i]
            t.grad_format = FORMATS[p.grad.dtype]
            t.state, t.state_size = s["block"].data_ptr(), s["block"].numel()
            if not self.plain[i] and like(p).stride() != p.stride():
                self.gaps.append(i)
        self.sizes = [t.n for t in self.tensors]
        self.parts = None
        if group["threads"] > 1 and sum(self.sizes) >= THREADED:
            self.parts = shares(self.sizes, group["threads"], make(group, self.dtype).stable)
        self.begin()
        self.set_grads()
        for index, t in zip(self.indices, self.tensors) if self.device.type == "cpu" else ():
            # an empty range writes nothing, but checks the state
            k.check(k.kopt_step_range(self.began, t, 0, 0), "parameter %d" % index)

    def is_current(self):
        return {s["step"] for s in self.states} == {self.opt.step}

    def begin(self, grad_scale=1.0, clip=1.0):
        """Checks the options and computes the scalars of the step, and counts nothing."""
        self.opt, self.began = make(self.group, self.dtype, self.states[0]["step"]), k.kopt_step()
        self.opt.grad_scale, self.opt.clip = grad_scale, clip
        result = k.kopt_step_begin(type(self.opt).from_buffer_copy(self.opt), self.began)
        if result != k.KOPT_OK:
            validate(self.group)
            k.check(result)

    def set_grads(self):
        """Their addresses, which may be new in each step. A gradient in another order than its weight is copied."""
        self.grads = [p.grad for p in self.params]
        for i, g in enumerate(self.grads):
            if g.layout is not torch.strided:
                raise RuntimeError("%s does not support sparse gradients, which parameter %d has: use p.grad.to_dense()"
                                   % (self.group["rule"], self.indices[i]))
            if not self.plain[i] or g.numel() != self.sizes[i] or not g.is_contiguous():
                p = self.params[i]
                if g.shape != p.shape:
                    raise RuntimeError("parameter %d has the shape %s, its gradient %s"
                                       % (self.indices[i], tuple(p.shape), tuple(g.shape)))
                order = like(p).stride()
                if g.stride() != order:
                    self.grads[i] = like(p, g.dtype).copy_(g)
        field = k.kopt_tensor.grad.offset // self.words.itemsize
        addresses = array.array(ADDRESS, [g.data_ptr() for g in self.grads])
        self.words[field::len(self.words) // len(self.grads)] = addresses

    def prepare(self):
        self.set_grads()
        for i in self.gaps:
            self.grads.append(dense(self.params[i]))  # held until the step is done
            self.tensors[i].weight = self.grads[-1].data_ptr()
        versions = [p._version for p in self.params]
        if versions != self.versions and self.dtype != torch.float32:
            for i, (p, s) in enumerate(zip(self.params, self.states)):  # a new value has no residual
                if self.versions[i] not in (None, versions[i]) and \
                        self.group["rounding"] in ("kahan", "compact", "exact"):
                    host = Host(self.group, self.indices[i], p, s["step"], s["block"])
                    host.write(k.KOPT_WEIGHT, p.detach()).back()

    def part(self, part):
        for first, last, begin, end in part:
            here = k.kopt_tensor.from_buffer(self.tensors, first * ctypes.sizeof(k.kopt_tensor))
            if end is None:
                k.check(k.kopt_optimizer_step(type(self.opt).from_buffer_copy(self.opt), here, last - first))
            else:
                k.check(k.kopt_step_range(self.began, here, begin, end))

    def run(self):
        if self.parts is None:
            k.check(k.kopt_optimizer_step(self.opt, self.tensors, len(self.tensors)))
        else:
            list(pool(self.group["threads"]).map(self.part, self.parts))
        self.finish()

    def finish(self):
        self.opt.step = self.began.step
        for s in self.states:
            s["step"] = self.began.step
        for copy, i in zip(self.grads[len(self.params):], self.gaps):
            self.params[i].copy_(copy)
        increment_version(self.params)
        self.versions = [p._version for p in self.params]
        self.grads = None

    def add_norm(self, norm):
        k.check(k.kopt_norm_add_grads(norm, self.tensors, len(self.tensors)))


class GpuCall(Call):
    """The same on a GPU, on the current stream. The plan is uploaded again if a tensor has moved."""
    built = None

    def run(self):
        if gpu is None:
            raise RuntimeError("a GPU needs ./build.sh python cuda (%s)" % no_gpu)
        stream, tensors = stream_of(self.device), bytes(self.tensors)
        if self.built != tensors:
            group = gpu.kopt_cuda_group(ctypes.pointer(self.opt), self.tensors, len(self.tensors))
            size = gpu.kopt_cuda_plan_size(group, 1)
            self.plan, host = gpu.kopt_cuda_plan(), torch.zeros(size, dtype=torch.uint8)
            k.check(gpu.kopt_cuda_plan_build(self.plan, host.data_ptr(), size, group, 1))
            self.memory, self.built = on_device(host, self.device), tensors
            self.plan.device = self.memory.data_ptr()
        else:
            k.check(gpu.kopt_cuda_plan_set_optimizer(self.plan, 0, self.opt, stream))
        k.check(gpu.kopt_cuda_plan_step(self.plan, stream))
        self.finish()

    def add_norm(self, norm):
        raise NotImplementedError("the exact norm is for tensors on the CPU: use torch.nn.utils.clip_grad_norm_, and "
                                  "torch.amp.GradScaler")


# ---- the optimizers ------------------------------------------------------------------------------------------------


class KahanOptimizer(torch.optim.Optimizer):
    """Any rule of RULES, with its options and those of COMMON. threads: for tensors on the CPU, with the same bits."""

    _step_supports_amp_scaling = hasattr(getattr(torch, "amp", None), "GradScaler")  # the protocol of PyTorch 2.3

    def __init__(self, params, rule="adamw", **options):
        self._plans, self._versions = {}, {}
        super().__init__(params, defaults_of(rule, options))

    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            if group["rule"] != self.defaults["rule"]:
                raise ValueError("all groups have one rule")
            if group["max_lr"] is None:
                group["max_lr"] = float(group["lr"]) or 1.0
            validate(group)
        except Exception:
            self.param_groups.pop()
            raise
        group["params"] = list(dict.fromkeys(group["params"]))  # a weight that is listed twice is stepped once

    def _members(self):
        """(index, group, parameter). The index selects the random bits: it is that of state_dict()."""
        groups = ((group, p) for group in self.param_groups for p in group["params"])
        return [(index, group, p) for index, (group, p) in enumerate(groups)]

    # ---- step ----

    @torch.no_grad()
    def step(self, closure=None):
        """One step of each parameter that has a gradient. If anything is refused, nothing is written."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)  # of a GradScaler
        if found_inf is not None and float(found_inf):
            return loss
        calls = self._calls()
        for call in calls:
            call.begin(1.0 if scale is None else 1.0 / float(scale), getattr(self, "clip", 1.0))
        for call in calls:
            call.run()
        return loss

    def _calls(self):
        """The calls of a step, with the gradients of now. They are made anew if the list of tensors has changed."""
        calls, first = [], 0
        for number, group in enumerate(self.param_groups):
            params = [p for p in group["params"] if p.grad is not None]
            layout = [group[name] for name in WORDS] + [group["threads"]]
            key = [layout, list(map(id, params)), [p.data_ptr() for p in params], [p.numel() for p in params],
                   [p.grad.dtype for p in params], [id(self.state.get(p)) for p in params]]
            plan = self._plans.get(number)
            if plan is None or plan[0] != key or not all(call.is_current() for call in plan[1]):
                for call in plan[1] if plan else ():
                    self._versions.update(zip(map(id, call.params), call.versions))
                plan = self._plans[number] = (key, self._plan(group, first))
                key[-1] = [id(self.state[p]) for p in params]  # some may be new
            calls += plan[1]
            first += len(group["params"])
        for call in calls:
            call.prepare()
        return calls

    def _plan(self, group, first):
        buckets, fresh = {}, False
        for index, p in enumerate(group["params"], first):
            if p.grad is None:
                continue
            if p.device.type not in ("cpu", "cuda"):
                raise TypeError("parameter %d is on %s: use the CPU or a GPU with CUDA" % (index, p.device))
            if p.dtype not in FORMATS or p.grad.dtype not in FORMATS:
                raise TypeError("parameter %d is %s, its gradient %s: use bfloat16, float16 or float32 (for complex "
                                "numbers: torch.view_as_real)" % (index, p.dtype, p.grad.dtype))
            s = self.state[p]
            if "block" not in s:
                host, fresh = Host(group, index, p, 0), True
                host.check(k.kopt_state_init(host.opt, host.t, None))
                s["step"], s["block"] = 0, on_device(host.block, p.device)
            buckets.setdefault((p.dtype, p.device, s["step"]), []).append((index, p, s))
        if fresh:
            self._refuse_shared_memory()
        return [(Call if device.type == "cpu" else GpuCall)(group, members, self._versions)
                for (_, device, _), members in buckets.items()]

    def _refuse_shared_memory(self):
        spans = sorted((p.data_ptr(), p.data_ptr() + p.numel() * p.element_size(), index)
                       for index, _, p in self._members() if p.numel() and p.is_contiguous())
        for (_, end, one), (begin, _, other) in zip(spans, spans[1:]):
            if begin < end:
                raise RuntimeError("parameters %d and %d share memory: list a tied weight once" % (one, other))

    @torch.no_grad()
    def grad_norm(self):
        """The kopt_norm of all gradients: exact, and it counts infinities and NaNs."""
        norm = k.kopt_norm()
        for call in self._calls():
            call.add_norm(norm)
        return norm

    # ---- state ----

    def state_dict(self):
        """That of torch.optim. `block` holds all of a parameter's state but its weight, in the sealed form of
        kopt_state_seal(): the same bytes on every machine, with a checksum."""
        result = super().state_dict()
        state = dict(result["state"])
        for index, group, p in self._members():
            s = self.state.get(p)
            if s:
                state[index] = dict(s, block=self._seal(group, index, p, s["step"], s["block"].to("cpu", copy=True)))
        return dict(result, state=state)

    @staticmethod
    def _seal(group, index, p, step, block):
        host = Host(group, index, p, step, block)
        host.check(k.kopt_state_seal(host.opt, host.t))
        return host.block

    def load_state_dict(self, state_dict):
        """Takes what state_dict() made, and also the state of torch.optim.SGD, Adam, AdamW and RAdam. It is checked
        whole before anything is written. Load the model, too: its weights are not in here."""
        super().load_state_dict(self._from_torch(state_dict))

    def __setstate__(self, state):
        if "defaults" not in state:  # from load_state_dict(); copy and pickle bring the open blocks
            state, opened = dict(state), type(self.state)(dict)
            for group in state["param_groups"]:
                if group.get("rule", self.defaults["rule"]) != self.defaults["rule"]:
                    raise ValueError("the state is that of %s, not of %s" % (group["rule"], self.defaults["rule"]))
                for name, value in self.defaults.items():
                    group.setdefault(name, value)
            members = [(group, p) for group in state["param_groups"] for p in group["params"]]
            for index, (group, p) in enumerate(members):
                s = state["state"].pop(p, None)
                if s:
                    opened[p] = self._open(group, index, p, s)
            opened.update(state["state"])
            state["state"] = opened
        super().__setstate__(state)
        self._plans, self._versions = {}, {}

    @staticmethod
    def _open(group, index, p, s):
        if "block" not in s:
            raise ValueError("the state of parameter %d has no block: it is that of another optimizer" % index)
        # torch has converted the bytes to the dtype of the parameter, which is exact
        host = Host(group, index, p, 0, s["block"].to("cpu", torch.uint8, copy=True))
        result = k.kopt_state_open(host.opt, host.t)
        if result == k.KOPT_OK and host.block.numel() != k.kopt_state_size(host.opt, p.numel()):
            result = k.KOPT_ERROR_SIZE
        if result == k.KOPT_OK and host.block.numel() and host.opt.step != int(s["step"]):
            result = k.KOPT_ERROR_MISMATCH
        if result != k.KOPT_OK:
            raise ValueError("the state of parameter %d is refused: %s" % (index, k.kopt_result_string(result)))
        return dict(s, step=int(s["step"]), block=on_device(host.block, p.device))

    # ---- exchange with torch.optim, in fp32 ----

    @torch.no_grad()
    def torch_state_dict(self):
        """The state in the layout of torch.optim.SGD, Adam, AdamW or RAdam (exp_avg, exp_avg_sq, step), in fp32."""
        rule = self.defaults["rule"]
        if not RULES[rule][2]:
            raise ValueError("torch.optim has nothing like " + rule)
        state, groups = {}, []
        for index, group, p in self._members():
            s = self.state.get(p)
            if s:
                host = Host(group, index, p, s["step"], s["block"])
                state[index] = {} if rule == "sgd" else {"step": torch.tensor(float(s["step"]))}
                state[index].update((name, host.read(slot)) for slot, name in moments_of(group))
        indices = iter(range(len(self._members())))
        for group in self.param_groups:
            groups.append({name: group[name] for name in TORCH if name in group})
            groups[-1]["params"] = [next(indices) for _ in group["params"]]
        return {"state": state, "param_groups": groups}

    @torch.no_grad()
    def _from_torch(self, state_dict):
        groups = [dict(self.defaults, **group) for group in state_dict["param_groups"]]
        names = [(group, name) for group in groups for name in group["params"]]
        state = dict(state_dict["state"])
        for (group, name), (index, _, p) in zip(names, self._members()):
            s = state.get(name)
            if not s or "block" in s:
                continue
            moments = moments_of(group)
            given = {n for n, value in s.items() if n != "step" and value is not None}
            if given - {n for _, n in moments} or any(s.get(n) is None for _, n in moments):
                raise ValueError("the state of parameter %d has %s, but should have a block, or the moments of %s: %s"
                                 % (index, ", ".join(sorted(given)) or "neither", group["rule"],
                                    ", ".join(n for _, n in moments)))
            step = int(s.get("step", 1))  # torch's SGD does not count; its buffer is there after the first step
            host = Host(dict(group, max_lr=group["max_lr"] or 1.0), index, p, step)
            host.check(k.kopt_state_init(host.opt, host.t, None))
            for slot, n in moments:
                host.write(slot, s[n])
            state[name] = {"step": step, "block": self._seal(group, index, p, step, host.block)}
        return dict(state_dict, state=state)

    @torch.no_grad()
    def read_weights(self):
        """The weights together with what is kept beside them, as fp32 tensors in the order of the groups."""
        return [Host(group, index, p, self.state[p]["step"], self.state[p]["block"]).read(k.KOPT_WEIGHT)
                if self.state.get(p) else p.detach().float() for index, group, p in self._members()]

    @torch.no_grad()
    def write_weights(self, weights):
        """Sets the parameters, and what is kept beside them, from fp32 tensors: masters, an average, a checkpoint."""
        members, weights = self._members(), list(weights)
        if [p.shape for _, _, p in members] != [w.shape for w in weights]:
            raise ValueError("write_weights: not the number of tensors or the shapes of the parameters")
        for (index, group, p), values in zip(members, weights):
            s = self.state[p]
            host = Host(group, index, p, s.get("step", 0), s.get("block"))
            if not s:
                host.check(k.kopt_state_init(host.opt, host.t, None))
            host.write(k.KOPT_WEIGHT, values).back()
            s.update(step=host.opt.step, block=s.get("block", on_device(host.block, p.device)))
        increment_version([p for _, _, p in members])
        self._plans, self._versions = {}, {}


class KahanAdamW(KahanOptimizer):
    """torch.optim.AdamW, in pure 16 bit. options: those of the rule "adamw" and of COMMON."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2, amsgrad=False, **options):
        super().__init__(params, "adamw", lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad,
                         **options)


class KahanSGD(KahanOptimizer):
    """torch.optim.SGD, in pure 16 bit. options: those of COMMON."""

    def __init__(self, params, lr=1e-3, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False, **options):
        super().__init__(params, "sgd", lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay,
                         nesterov=nesterov, **options)


class KahanScaler:
    """kopt_scaler with the calls of torch.amp.GradScaler, for tensors on the CPU. Unscaling, the search for infinities
    and clipping need no pass that writes. fields: those of kopt_scaler, such as scale=1024.0."""

    def __init__(self, **fields):
        self.scaler, self.found_inf = k.kopt_grad_scaler(), False
        self.load_state_dict(fields)

    def scale(self, loss):
        return loss.float() * self.scaler.scale

    def step(self, optimizer, max_norm=0.0):
        """Steps unless a gradient is infinite or NaN. max_norm: clips the norm of all gradients to it; 0: does not."""
        norm, scale = optimizer.grad_norm(), self.scaler.scale
        self.found_inf = norm.nonfinite != 0
        optimizer.clip = k.kopt_clip_coefficient(norm, max_norm, 1.0 / scale)
        optimizer.grad_scale, optimizer.found_inf = scale, self.found_inf
        try:
            return optimizer.step()
        finally:
            del optimizer.clip, optimizer.grad_scale, optimizer.found_inf

    def update(self):
        k.check(k.kopt_scaler_update(self.scaler, int(self.found_inf)))

    def state_dict(self):
        return {name: getattr(self.scaler, name) for name, _ in self.scaler._fields_}

    def load_state_dict(self, state):
        for name, value in state.items():
            setattr(self.scaler, name, value)


def main():
    """Fits 1000 numbers with small steps, in bf16: torch's AdamW stalls, the others arrive."""
    print("mean error of 1000 bf16 weights after 2000 steps with lr 1e-4 (their rounding alone makes 0.002)")
    for name, make in (("torch AdamW", torch.optim.AdamW), ("KahanAdamW", KahanAdamW),
                       ("  compact, 8 bit", lambda p, **o: KahanAdamW(p, rounding="compact", moment_format="q8", **o))):
        target = torch.linspace(1.0, 1.1, 1000)
        w = torch.nn.Parameter(torch.ones(1000, dtype=torch.bfloat16))
        optimizer = make([w], lr=1e-4, weight_decay=0.0)
        for _ in range(2000):
            w.grad = (w.detach().float() - target).to(torch.bfloat16)
            optimizer.step()
        print("%-18s %.4f" % (name, (w.detach().float() - target).abs().mean()))


if __name__ == "__main__":
    main()
