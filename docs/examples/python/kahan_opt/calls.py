"""A call of the library: a step of the tensors of a group that have the same dtype, device and step count."""
import array
import concurrent.futures
import ctypes
import functools
import os
import weakref

import torch

from . import header as k
from . import state
from .options import FORMATS, make
from .state import Host, dense, difference, first_index, like, local

try:
    from . import cuda as gpu
except ImportError as error:
    gpu, no_gpu = None, error

ADDRESS = "Q" if ctypes.sizeof(ctypes.c_void_p) == 8 else "I"
THREADED = 65536  # weights; with fewer, waking the threads takes longer than the step

try:  # as any operation in place does, it tells autograd that the values are new
    from torch.autograd.graph import increment_version
    increment_version([torch.zeros(1)])
except (ImportError, TypeError, AttributeError):  # PyTorch before 2.6
    def increment_version(tensors):
        for p in tensors:
            p.detach().as_strided((0,), (1,)).zero_()


def stream_of(device):
    return torch.cuda.current_stream(device).cuda_stream


@functools.lru_cache(None)
def pool(threads):
    return concurrent.futures.ThreadPoolExecutor(threads)


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


class Call:
    def __init__(self, optimizer, group, members):
        """members: parameters and their states, in the order of their ids."""
        self.optimizer, self.group = weakref.proxy(optimizer), group
        self.owners, self.states = map(list, zip(*members))
        self.params = list(map(local, self.owners))
        self.dtype, self.device = self.params[0].dtype, self.params[0].device
        self.tensors = (k.kopt_tensor * len(members))()
        self.words = memoryview(self.tensors).cast("B").cast(ADDRESS)
        self.versions = [optimizer._versions.get(id(p)) for p in self.owners]
        self.plain = [p.is_contiguous() for p in self.params]
        self.gaps = []
        for i, (t, owner, p, s) in enumerate(zip(self.tensors, self.owners, self.params, self.states)):
            t.weight, t.n, t.id, t.first_index = p.data_ptr(), p.numel(), s["id"], first_index(owner)
            t.weight_format, t.grad_format = FORMATS[p.dtype], FORMATS[owner.grad.dtype]
            t.state, t.state_size = s["block"].data_ptr(), s["block"].numel()
            if not self.plain[i] and like(p).stride() != p.stride():
                self.gaps.append(i)
        self.sizes = [t.n for t in self.tensors]
        self.parts = None
        if group["threads"] > 1 and sum(self.sizes) >= THREADED:
            self.parts = shares(self.sizes, group["threads"], make(group, self.dtype).stable)
        self.begin()
        self.set_grads()
        for p, s, t in zip(self.owners, self.states, self.tensors):
            words = k.kopt_explain(self.opt, t, 1) if self.device.type == "cpu" else ""
            words = difference(group, p, s) or words if not words.startswith("all fields") else ""
            if words:
                raise ValueError("the state of %s does not fit: %s" % (optimizer._name(p), words))

    def is_current(self):
        return {s["step"] for s in self.states} == {self.opt.step}

    def begin(self, grad_scale=1.0, clip=1.0, moments_only=False):
        """Checks the options and computes the scalars of the step, and counts nothing."""
        try:
            self.opt, self.began = make(self.group, self.dtype, self.states[0]["step"]), k.kopt_step()
            self.opt.grad_scale, self.opt.clip, self.opt.moments_only = grad_scale, clip, moments_only
            counted = type(self.opt).from_buffer_copy(self.opt)
            k.check(k.kopt_step_begin(self.began, counted))
            self.step = counted.step
        except Exception:
            self.optimizer._validate()
            raise

    def set_grads(self):
        """Their addresses, which may be new in each step. A gradient in another order than its weight is copied."""
        self.grads = [local(p.grad) for p in self.owners]
        for i, g in enumerate(self.grads):
            if g.layout is not torch.strided:
                raise RuntimeError("%s does not support sparse gradients, which %s has: use p.grad.to_dense()"
                                   % (self.group["rule"], self.optimizer._name(self.owners[i])))
            if not self.plain[i] or g.numel() != self.sizes[i] or not g.is_contiguous():
                p = self.params[i]
                if g.shape != p.shape:
                    raise RuntimeError("%s has a gradient of another shape: %s"
                                       % (self.optimizer._name(self.owners[i]), tuple(g.shape)))
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
        if versions != self.versions and self.dtype != torch.float32 and \
                self.group["rounding"] in ("kahan", "compact", "exact"):
            for old, new, owner, p, s in zip(self.versions, versions, self.owners, self.params, self.states):
                if old not in (None, new):  # a new value has no residual
                    Host(self.group, owner, s).write(k.KOPT_SLOT_WEIGHT, p.detach())

    def part(self, part):
        for first, last, begin, end in part:
            here = k.kopt_tensor.from_buffer(self.tensors, first * ctypes.sizeof(k.kopt_tensor))
            if end is None:
                k.check(k.kopt_optimizer_step(type(self.opt).from_buffer_copy(self.opt), here, last - first))
            else:
                k.check(k.kopt_step_range(self.began, here, 1, begin, end))

    def run(self):
        if self.parts is None:
            k.check(k.kopt_optimizer_step(self.opt, self.tensors, len(self.tensors)))
        else:
            list(pool(self.group["threads"]).map(self.part, self.parts))
        self.finish()

    def finish(self):
        self.opt.step = self.step
        for s in self.states:
            s["step"] = self.step
        for copy, i in zip(self.grads[len(self.params):], self.gaps):
            self.params[i].copy_(copy)
        increment_version(self.params)
        self.versions = [p._version for p in self.params]
        self.grads = None

    def add_norm(self, norm):
        k.check(k.kopt_norm_add_grads(norm, self.tensors, len(self.tensors)))


class GpuCall(Call):
    """The same on a GPU, on the current stream. Tensors that have moved get new addresses in the plan."""
    built = placed = None
    stopped = False  # by an error: the plan skips all steps

    def without_addresses(self):
        tensors = type(self.tensors).from_buffer_copy(self.tensors)
        for t in tensors:
            t.weight, t.grad, t.state, t.copy = (1 if p else None for p in (t.weight, t.grad, t.state, t.copy))
        return bytes(tensors)

    def run(self):
        if gpu is None:
            raise RuntimeError("a GPU needs the package of ./build.sh python cuda (%s)" % no_gpu)
        stream, tensors, placed = stream_of(self.device), self.without_addresses(), bytes(self.tensors)
        stopped, self.stopped = self.stopped, True
        if self.built != tensors:
            group = gpu.kopt_cuda_group(ctypes.pointer(self.opt), self.tensors, len(self.tensors))
            size = gpu.kopt_cuda_plan_size(group, 1)
            self.plan, self.host = gpu.kopt_cuda_plan(), torch.zeros(size, dtype=torch.uint8)
            k.check(gpu.kopt_cuda_plan_build(self.plan, self.host.data_ptr(), size, group, 1))
            self.memory = state.on_device(self.host, self.device)
            k.check(gpu.kopt_cuda_plan_upload(self.plan, self.memory.data_ptr(), stream))
            self.built = tensors
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
