"""A call of the library: a step of the tensors of a group that have the same dtype, device, formats and step count."""
import array
import concurrent.futures
import contextlib
import ctypes
import functools
import operator
import os
import struct
import sys
import weakref

import torch

from . import header as k
from . import state
from .options import FORMATS, bare, layout_of, make
from .state import dense, first_index, forget_residual, formats_of, like, local, pays_back, point, tensors_of

try:
    from . import cuda as gpu
except ImportError as error:
    gpu, no_gpu = None, error

ADDRESS = "Q" if ctypes.sizeof(ctypes.c_void_p) == 8 else "I"
RATES = struct.Struct("=IfIf")  # two steps and their rates: kopt_state_arrays
THREADED = 65536  # weights; with fewer, waking the threads takes longer than the step

try:  # as any operation in place does, it tells autograd that the values are new
    from torch.autograd.graph import increment_version
    increment_version([torch.zeros(1)])
except (ImportError, TypeError, AttributeError):  # PyTorch before 2.6
    def increment_version(tensors):
        for p in tensors:
            p.detach().as_strided((0,), (1,)).zero_()


def current(device):
    """Makes a GPU the current one: the default stream, and what is launched, belong to it."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def stream_of(device):
    return torch.cuda.current_stream(device).cuda_stream


@functools.lru_cache(None)
def load_kernels():
    """Hands the PTX of all kernels to the library, which keeps its address."""
    import lzma  # which not every Python has
    with lzma.open(os.path.splitext(gpu.path_)[0] + ".ptx.xz") as f:
        ptx = f.read()
    k.check(gpu.kopt_cuda_use_ptx(ptx, len(ptx)), "a GPU needs NVIDIA's driver 525 or later")
    return ptx


pool = functools.lru_cache(None)(concurrent.futures.ThreadPoolExecutor)  # by the number of threads
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=pool.cache_clear)  # a child process has none of these threads


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


dtype_of = operator.attrgetter("dtype")
address_of, size_of, is_contiguous = torch.Tensor.data_ptr, torch.Tensor.numel, torch.Tensor.is_contiguous


def parted(keys, *columns):
    """{key: columns}: the rows that have it."""
    keys = list(keys)
    if keys.count(keys[0]) == len(keys):
        return {keys[0]: columns}
    found = {}
    for key, row in zip(keys, zip(*columns)):
        found.setdefault(key, []).append(row)
    return {key: list(map(list, zip(*rows))) for key, rows in found.items()}


class Entry:
    """What a step needs of a parameter and its state, until one of their tensors is replaced or moves. It keeps none of
    them alive."""
    __slots__ = ("number", "layout", "formats", "names", "key", "references", "version", "kind", "plain", "sharded",
                 "gap", "n", "arrays", "rates", "tensor")

    def __init__(self, group, number, p, s, version, lost):
        """lost() is called when one of the tensors has died: another may get its id and its address."""
        self.number, self.layout, self.formats, self.version = number, layout_of(group), formats_of(group, p), version
        table, part = tensors_of(group, p, self.formats), local(p)
        self.names = [row[0] for row in table]
        tensors = [s[name] for name in self.names]
        self.plain, self.sharded, self.n = part.is_contiguous(), part is not p, part.numel()
        self.gap = not self.plain and like(part).stride() != part.stride()
        self.kind = sys.intern("%s %s %s %d" % (p.dtype, p.device, self.formats, self.plain + 2 * self.sharded))
        self.key, = self.keys([p], [p.grad], [s])
        self.references = [weakref.ref(x, lambda _, i=id(p): lost(i)) for x in (p, *tensors)]
        self.arrays = k.kopt_state_arrays(ctypes.sizeof(k.kopt_state_arrays))
        point(self.arrays, table, list(map(local, tensors)))
        self.rates = bytearray(16) if pays_back(group, p) else None  # of the library, in a step
        if self.rates:
            if p.device.type != "cpu":
                raise ValueError("rounding='feedback' is for the CPU")
            self.arrays.rates = ctypes.addressof(ctypes.c_char.from_buffer(self.rates))
        t = k.kopt_tensor(
            weight=part.data_ptr(), n=self.n, id=number, first_index=first_index(p), weight_format=FORMATS[p.dtype],
            grad_format=FORMATS[p.grad.dtype], arrays=ctypes.pointer(self.arrays) if table else None)
        words = k.kopt_explain(bare(group, p.dtype, self.formats), t, 1) if p.device.type == "cpu" and self.n else "all"
        if not words.startswith("all"):
            raise ValueError(words)
        self.tensor = bytes(t)

    def keys(self, params, grads, states):
        """The keys that entries of this kind should have, in a loop in C: there may be many parameters."""
        parts = list(map(local, params)) if self.sharded else params
        columns = [map(address_of, parts), map(size_of, parts), map(dtype_of, grads),
                   map(is_contiguous if self.plain else torch.Tensor.stride, parts)]
        for name in self.names:
            tensors = [s[name] for s in states]
            columns += [map(id, tensors), map(address_of, map(local, tensors) if self.sharded else tensors)]
        return zip(*columns)

    @staticmethod
    def hold(entries, layout, params, grads, states):
        """The step counts, if entries of one kind hold."""
        try:
            keys = entries[0].keys(params, grads, states)
            steps = [s["step"] for s in states]
            fits = entries[0].layout == layout and all(map(operator.eq, keys, [e.key for e in entries]))
            return steps if fits and set(map(type, steps)) == {int} else None
        except (KeyError, TypeError):  # there is no such state
            return None

    def parameter(self):
        """None if it is gone."""
        return self.references[0]()

    def settle(self, part, s):
        """A value that a program has written has no residual."""
        version = part._version
        if self.version not in (None, version):
            forget_residual(part, s)
            self.version = version


class Call:
    """The same entries in the next step make the same call. Between steps it keeps no tensor alive."""

    def __init__(self, optimizer, group, entries, other=None):
        """other: the call in this place before, of other entries."""
        self.optimizer, self.group, self.entries = weakref.proxy(optimizer), group, entries
        self.tensors = (k.kopt_tensor * len(entries)).from_buffer(bytearray(b"".join([e.tensor for e in entries])))
        self.words = memoryview(self.tensors).cast("B").cast(ADDRESS)
        self.sizes = [e.n for e in entries]
        self.gaps = [i for i, e in enumerate(entries) if e.gap]
        self.whole, self.cut = sum(self.sizes), (0, [])

    def begin(self, options, step, params, grads, states, grad_scale=1.0, clip=1.0, moments_only=False):
        """Checks the options and computes the scalars of the step, and counts nothing. options: by kind."""
        first, self.owners, self.states = self.entries[0], params, states
        self.params = list(map(local, params)) if first.sharded else params
        try:
            if first.kind not in options:
                options[first.kind] = make(self.group, self.params[0].dtype, first.formats)
            self.opt, self.began = type(options[first.kind]).from_buffer_copy(options[first.kind]), k.kopt_step()
            self.opt.grad_scale, self.opt.clip, self.opt.moments_only = grad_scale, clip, moments_only
            self.opt.step = step
            k.check(k.kopt_step_begin(self.began, self.opt))
            self.step, self.opt.step = self.opt.step, step
        except Exception:
            self.optimizer._validate()
            raise
        self.set_grads(list(map(local, grads)) if first.sharded else grads)
        if "residual" in first.names and [p._version for p in self.params] != [e.version for e in self.entries]:
            for e, p, s in zip(self.entries, self.params, states):
                e.settle(p, s)
        if first.rates:
            for e, s in zip(self.entries, states):
                RATES.pack_into(e.rates, 0, s["step"], s["rate"], 0, 0.0)

    def set_grads(self, grads):
        """Their addresses, which may be new in each step."""
        self.grads = list(grads)
        if not (self.entries[0].plain and all(map(is_contiguous, grads)) and list(map(size_of, grads)) == self.sizes):
            self.order_grads()
        try:
            addresses = array.array(ADDRESS, map(address_of, self.grads))
            if 0 in addresses:  # without memory: no elements, or a zero tensor of autograd
                self.grads = [torch.zeros_like(p, dtype=g.dtype) if g._is_zerotensor() else g
                              for g, p in zip(self.grads, self.params)]
                addresses = array.array(ADDRESS, map(address_of, self.grads))
        except RuntimeError:  # PyTorch 1.13 calls sparse tensors contiguous
            self.order_grads()
            raise
        field = k.kopt_tensor.grad.offset // self.words.itemsize
        self.words[field::len(self.words) // len(self.grads)] = addresses
        for i in self.gaps:
            self.grads.append(dense(self.params[i]))  # held until the step is done
            self.tensors[i].weight = self.grads[-1].data_ptr()

    def order_grads(self):
        """A gradient in another order than its weight is copied."""
        for i, (g, p) in enumerate(zip(self.grads, self.params)):
            if g.layout is not torch.strided:
                raise RuntimeError("%s does not support sparse gradients, which %s has: use p.grad.to_dense()"
                                   % (self.group["rule"], self.optimizer._name(self.owners[i])))
            if g.shape != p.shape:
                raise RuntimeError("%s has a gradient of another shape: %s"
                                   % (self.optimizer._name(self.owners[i]), tuple(g.shape)))
            if g.stride() != like(p).stride():
                self.grads[i] = like(p, g.dtype).copy_(g)

    def parts(self):
        """What each thread steps; nothing, if there is one. With few weights, waking them takes longer."""
        threads = self.whole >= THREADED and (self.group["threads"] or torch.get_num_threads())
        if self.cut[0] != threads:
            self.cut = threads, shares(self.sizes, threads, self.opt.stable) if threads > 1 else []
        return self.cut[1]

    def part(self, part):
        for first, last, begin, end in part:
            here = k.kopt_tensor.from_buffer(self.tensors, first * ctypes.sizeof(k.kopt_tensor))
            if end is None:
                k.check(k.kopt_step_run(self.began, here, last - first))
            else:
                k.check(k.kopt_step_range(self.began, here, 1, begin, end))

    def run(self):
        parts = self.parts()
        if parts:
            list(pool(self.cut[0]).map(self.part, parts))
        else:
            k.check(k.kopt_step_run(self.began, self.tensors, len(self.tensors)))
        self.finish()

    def finish(self):
        for e, s in zip(self.entries, self.states) if self.entries[0].rates else ():
            _, last, number, rate = RATES.unpack(e.rates)
            s["rate"] = rate if number == self.step else last  # a step with a rate of 0 leaves it
        for s in self.states:
            s["step"] = self.step
        for copy, i in zip(self.grads[len(self.params):], self.gaps):
            self.params[i].copy_(copy)
        increment_version(self.params)
        if "residual" in self.entries[0].names:
            for e, p in zip(self.entries, self.params):
                e.version = p._version
        self.grads = self.owners = self.params = self.states = None

    def add_norm(self, norm):
        k.check(k.kopt_norm_add_grads(norm, self.tensors, len(self.tensors)))


class GpuCall(Call):
    """The same on a GPU, on the current stream. Tensors that have moved get new addresses in the plan."""

    def __init__(self, optimizer, group, entries, other=None):
        super().__init__(optimizer, group, entries)
        self.built, self.placed, self.stopped = None, None, False  # stopped, by an error: the plan skips all steps
        if other is not None and other.built == self.without_addresses():
            self.plan, self.memory, self.host, self.built = other.plan, other.memory, other.host, other.built
            self.stopped = other.stopped

    def without_addresses(self):
        tensors = type(self.tensors).from_buffer_copy(self.tensors)
        for t in tensors:
            t.weight = t.grad = t.arrays = None
        return bytes(tensors)

    def run(self):
        with current(self.params[0].device):
            self.launch()

    def launch(self):
        if gpu is None:
            raise RuntimeError("this package has no kernels for a GPU: it was built without nvcc (%s)" % no_gpu)
        stream, placed = stream_of(self.params[0].device), bytes(self.tensors)
        stopped, self.stopped = self.stopped, True
        if self.built is None:
            load_kernels()
            group = gpu.kopt_cuda_group(ctypes.pointer(self.opt), self.tensors, len(self.tensors))
            size = gpu.kopt_cuda_plan_size(group, 1)
            self.plan, self.host = gpu.kopt_cuda_plan(), torch.zeros(size, dtype=torch.uint8)
            k.check(gpu.kopt_cuda_plan_build(self.plan, self.host.data_ptr(), size, group, 1))
            self.memory = state.on_device(self.host, self.params[0].device)
            k.check(gpu.kopt_cuda_plan_upload(self.plan, self.memory.data_ptr(), stream))
            self.built = self.without_addresses()
        else:
            k.check(gpu.kopt_cuda_plan_set_optimizer(self.plan, 0, self.opt, stream))
            if self.placed != placed:
                k.check(gpu.kopt_cuda_plan_set_arrays(self.plan, 0, len(self.tensors), self.tensors, stream))
            if stopped:
                k.check(gpu.kopt_cuda_plan_acknowledge(self.plan, stream))
        self.placed = placed
        k.check(gpu.kopt_cuda_plan_step(self.plan, stream))
        self.stopped = False
        self.finish()

    def add_norm(self, norm):
        raise NotImplementedError("the exact norm is for tensors on the CPU: use torch.nn.utils.clip_grad_norm_, and "
                                  "torch.amp.GradScaler")


CALLS = {"cpu": Call, "cuda": GpuCall}  # by the type of the device
