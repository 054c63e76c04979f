"""A step of the tensors of a group that have the same dtype, device and formats; on a GPU, and the same step count."""
import array
import bisect
import concurrent.futures
import contextlib
import ctypes
import functools
import operator
import os
import sys
import weakref

import torch

from . import header as k
from . import state
from .options import FORMATS, as_written, bare, layout_of, make
from .state import dense, first_index, forget_residual, formats_of, like, local, order, pays_back, point, tensors_of

try:
    from . import cuda as gpu
except ImportError as error:
    gpu, no_gpu = None, error

WITH_KERNELS = "NVCC=nvcc pip install ./docs/examples/python installs it with them"
ADDRESS = "Q" if ctypes.sizeof(ctypes.c_void_p) == 8 else "I"
BUCKET = 512  # parameters, whose tensors stay in the cache while they are looked at
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


def on_gpu(x):
    """Is it a tensor on a GPU?"""
    return isinstance(x, torch.Tensor) and issubclass(CALLS.get(x.device.type, Call), GpuCall)


def room_on_host(x):
    """Page-locked memory for a copy, and an event for its arrival."""
    return torch.empty_like(x, device="cpu", pin_memory=True), torch.cuda.Event()


def used_here(x):
    """Tells PyTorch's allocator that the current stream uses this memory."""
    x.record_stream(torch.cuda.current_stream(x.device))


def refuse_capture():
    """What a graph replays has the options and the step count of its capture."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("a step cannot be captured in a CUDA graph: step outside of it, or use kahan_opt_cuda.cuh, "
                           "whose steps can")


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


dtype_of, version_of = operator.attrgetter("dtype"), operator.attrgetter("_version")
address_of, size_of, is_contiguous = torch.Tensor.data_ptr, torch.Tensor.numel, torch.Tensor.is_contiguous
array_of = functools.lru_cache(1000)(operator.mul)  # (a type, a length): a new type takes 10 microseconds


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
                 "gap", "n", "arrays", "pays", "tensor")

    def __init__(self, group, number, p, s, version, lost):
        """lost() is called when one of the tensors has died: another may get its id and its address."""
        self.number, self.layout, self.formats, self.version = number, layout_of(group), formats_of(group, p), version
        table, part = tensors_of(group, p, self.formats), local(p)
        self.names = [row[0] for row in table]
        tensors = [s[name] for name in self.names]
        self.plain, self.sharded, self.n = part.is_contiguous(), part is not p, part.numel()
        self.gap = not self.plain and order(part) != part.stride()
        self.kind = sys.intern("%s %s %s %d" % (p.dtype, p.device, self.formats, self.plain + 2 * self.sharded))
        self.key, = zip(*self.columns([p], [p.grad], [s]))
        self.references = [weakref.ref(x, lambda _, i=id(p): lost(i)) for x in (p, *tensors)]
        self.arrays = k.kopt_state_arrays(ctypes.sizeof(k.kopt_state_arrays))
        point(self.arrays, table, list(map(local, tensors)))
        self.pays = pays_back(group, p)
        if self.pays:
            self.arrays.rates = s["rate"].data_ptr()  # until a call has a row for it
        t = k.kopt_tensor(
            weight=part.data_ptr(), n=self.n, id=number, first_index=first_index(p), weight_format=FORMATS[p.dtype],
            grad_format=FORMATS[p.grad.dtype], arrays=ctypes.pointer(self.arrays) if table else None)
        words = k.kopt_explain(bare(group, p.dtype, self.formats), t, 1) if p.device.type == "cpu" and self.n else "all"
        if not words.startswith("all"):
            raise ValueError(words)
        self.tensor = bytes(t)

    def columns(self, params, grads, states):
        """The keys that entries of this kind should have, as columns: loops in C, for there may be many parameters."""
        parts = list(map(local, params)) if self.sharded else params
        contiguous = is_contiguous if self.plain else torch.Tensor.stride
        columns = [list(map(address_of, parts)), list(map(size_of, parts)), list(map(dtype_of, grads)),
                   list(map(contiguous, parts))]
        for name in self.names:
            tensors = list(map(operator.itemgetter(name), states))
            columns += [list(map(id, tensors)),
                        list(map(address_of, map(local, tensors) if self.sharded else tensors))]
        return columns

    def parameter(self):
        """None if it is gone."""
        return self.references[0]()

    def settle(self, part, s):
        """A value that a program has written has no residual."""
        version = part._version
        if self.version not in (None, version):
            forget_residual(part, s)
            self.version = version


def taken(column, places):
    """places: a slice, or a list."""
    return column[places] if type(places) is slice else list(map(column.__getitem__, places))


def places_of(numbers):
    """A slice, if they follow one another."""
    row = range(numbers[0], numbers[0] + len(numbers))
    return slice(row.start, row.stop) if numbers == list(row) else numbers


class Bucket:
    """Parameters of a group whose entries are of one kind, and the keys of these entries as columns: what is to be
    looked at in each step is made once."""

    def __init__(self, rows):
        """rows: (place in the group's list, id() of the parameter, entry, its key)."""
        places, self.ids, entries, keys = map(list, zip(*rows))
        self.places, self.last = places_of(places), (None, None)
        self.all = entries, list(map(list, zip(*keys))), None

    def find(self, where):
        """where: the places of the states in their list, by id(). One that is not there is behind the last."""
        self.all, self.last = (*self.all[:2], places_of([where.get(i, len(where)) for i in self.ids])), (None, None)

    def of(self, places):
        """Entries, their keys, and places of their states: of some, or of all."""
        if places is not None and self.last[0] != places:
            entries, keys, at = self.all
            at = None if at is None else taken(range(at.start, at.stop) if type(at) is slice else at, places)
            self.last = places, (taken(entries, places), [taken(column, places) for column in keys], at)
        return self.all if places is None else self.last[1]

    @classmethod
    def cut(cls, rows):
        """Buckets of at most BUCKET parameters."""
        return [cls(rows[i:i + BUCKET]) for i in range(0, len(rows), BUCKET)]

    @staticmethod
    def hold(entries, keys, layout, params, grads, states):
        """The step counts and the addresses of the gradients, if entries of one kind hold. keys: their columns. A
        gradient that has not the order of its weight in memory has no address."""
        first = entries[0]
        try:
            steps = list(map(operator.itemgetter("step"), states))
            if first.layout != layout or first.columns(params, grads, states) != keys or set(map(type, steps)) != {int}:
                return None
        except (KeyError, TypeError):  # there is no such state
            return None
        grads = list(map(local, grads)) if first.sharded else grads
        try:
            if first.plain and all(map(is_contiguous, grads)) and list(map(size_of, grads)) == keys[1]:
                return steps, list(map(address_of, grads))
        except RuntimeError:  # PyTorch 1.13 calls sparse tensors contiguous
            pass
        return steps, [0] * len(grads)


class Call:
    """The same entries in the next step make the same call. Between steps it keeps no tensor alive."""

    def __init__(self, optimizer, group, entries, other=None):
        """other: the call in this place before, of other entries."""
        self.optimizer, self.group, self.entries = weakref.proxy(optimizer), group, entries
        memory = bytearray(b"".join([e.tensor for e in entries]))
        self.tensors = array_of(k.kopt_tensor, len(entries)).from_buffer(memory)
        self.words = memoryview(self.tensors).cast("B").cast(ADDRESS)
        self.sizes = [e.n for e in entries]
        self.gaps = [] if entries[0].plain else [i for i, e in enumerate(entries) if e.gap]
        self.whole, self.cut, self.rates, self.placed, self.left = sum(self.sizes), (0, []), None, None, None

    @staticmethod
    def lists(steps, *columns):
        """What one call can step, by the step counts: (steps, other columns) with the rows in their order."""
        if steps.count(steps[0]) < len(steps):
            pick = operator.itemgetter(*sorted(range(len(steps)), key=steps.__getitem__))
            steps, *columns = (list(pick(column)) for column in (steps, *columns))
        return [(steps, *columns)]

    def begin(self, options, steps, params, grads, states, addresses, loss_scale=None, clip=1.0, moments_only=False):
        """Checks the options and computes the scalars of the step, and counts nothing. options: the last ones."""
        first, self.owners, self.states = self.entries[0], params, states
        self.params = list(map(local, params)) if first.sharded else params
        try:
            place, written = (id(self.group), first.kind), as_written(self.group)
            if written is None or options.get(place, (None,))[0] != written:
                options[place] = written, make(self.group, self.params[0].dtype, first.formats)
            self.opt = type(options[place][1]).from_buffer_copy(options[place][1])
            self.opt.grad_scale, self.opt.clip, self.opt.moments_only = self.unscaling(loss_scale), clip, moments_only
            self.begin_runs(steps)
        except Exception:
            self.optimizer._validate()
            raise
        self.set_grads(map(local, grads) if first.sharded else grads, addresses)
        if "residual" in first.names:
            self.versions = list(map(version_of, self.params))
            if self.versions != (self.left or [e.version for e in self.entries]):
                self.tell()
                for e, p, s in zip(self.entries, self.params, states):
                    e.settle(p, s)
        if first.pays and (self.rates is None or self.places != [s["rate"].data_ptr() for s in states]):
            self.gather_rates(states)

    def begin_runs(self, steps):
        """A run is what has the same step count: (kopt_step, the new count, first tensor, one after the last)."""
        self.runs, last = [], 0
        while last < len(steps):
            first, began, self.opt.step = last, k.kopt_step(), steps[last]
            k.check(k.kopt_step_begin(began, self.opt))
            last = bisect.bisect_right(steps, steps[first], first)
            self.runs.append((began, self.opt.step, first, last))
        self.opt.step = steps[0]

    def unscaling(self, loss_scale):
        """The factor of the gradients."""
        return 1.0 if loss_scale is None else 1.0 / float(loss_scale)

    def gather_rates(self, states):
        """Makes the last rates of FEEDBACK views of one array. In a row of it are two steps with their rates: the last
        one, which is step 1 to the library, and in a step the new one."""
        device = self.params[0].device
        self.rates, self.placed = state.on_device(torch.zeros(len(states), 4), device), None
        self.steps, now = self.rates.view(torch.int32), self.rates[:, 1]
        now.copy_(torch.stack([torch.as_tensor(s["rate"], dtype=torch.float32, device=device) for s in states]))
        self.steps[:, 0] = 1
        for e, s, row in zip(self.entries, states, self.rates):
            s["rate"], e.arrays.rates = row[1], row.data_ptr()
        self.places = [s["rate"].data_ptr() for s in states]

    def set_grads(self, grads, addresses):
        """Their addresses, which may be new in each step."""
        self.grads = list(grads)
        if not all(addresses):
            for i in [i for i, address in enumerate(addresses) if not address]:
                self.grads[i] = self.ordered(i)
                addresses[i] = self.grads[i].data_ptr()
        field = k.kopt_tensor.grad.offset // self.words.itemsize
        self.words[field::len(self.words) // len(addresses)] = array.array(ADDRESS, addresses)
        for i in self.gaps:
            self.grads.append(dense(self.params[i]))  # held until the step is done
            self.tensors[i].weight = self.grads[-1].data_ptr()

    def ordered(self, i):
        """A gradient, or a copy if it has another order than its weight, or no memory: a zero tensor of autograd."""
        g, p = self.grads[i], self.params[i]
        if g.layout is not torch.strided:
            raise RuntimeError("%s does not support sparse gradients, which %s has: use p.grad.to_dense()"
                               % (self.group["rule"], self.optimizer._name(self.owners[i])))
        if g.shape != p.shape:
            raise RuntimeError("%s has a gradient of another shape: %s"
                               % (self.optimizer._name(self.owners[i]), tuple(g.shape)))
        return like(p, g.dtype).copy_(g) if g._is_zerotensor() or g.stride() != order(p) else g

    def parts(self):
        """What each thread steps; nothing, if there is one. With few weights, waking them takes longer."""
        threads = self.whole >= THREADED and (self.group["threads"] or torch.get_num_threads())
        if self.cut[0] != threads:
            self.cut = threads, shares(self.sizes, threads, self.opt.stable) if threads > 1 else []
        return self.cut[1]

    def part(self, part):
        for first, last, begin, end in part:
            for began, _, low, high in self.runs:
                low, high = max(low, first), min(high, last)
                here = k.kopt_tensor.from_buffer(self.tensors, low * ctypes.sizeof(k.kopt_tensor)) if low < high else 0
                if here and end is None:
                    k.check(k.kopt_step_run(began, here, high - low))
                elif here:
                    k.check(k.kopt_step_range(began, here, 1, begin, end))

    def run(self):
        parts = self.parts()
        if parts:
            list(pool(self.cut[0]).map(self.part, parts))
        else:
            self.part([(0, len(self.sizes), 0, None)])
        self.finish()

    def finish(self):
        for _, step, first, last in self.runs:
            for s in self.states[first:last]:
                s["step"] = step
        if self.entries[0].pays:  # a step with a rate of 0 leaves it
            now = self.rates[:, 1]
            now.copy_(torch.where(self.steps[:, 2] != 0, self.rates[:, 3], now))
            self.steps[:, 2] = 0
        for copy, i in zip(self.grads[len(self.params):], self.gaps):
            self.params[i].copy_(copy)
        increment_version(self.params)
        if "residual" in self.entries[0].names:
            self.left = [p._version for p in self.params] if self.gaps else [v + 1 for v in self.versions]
        self.grads = self.owners = self.params = self.states = None

    def tell(self):
        """Tells the entries the versions that its last step left, for others than the same call."""
        for e, version in zip(self.entries, self.left or ()):
            e.version = version
        self.left = None

    def knows(self, step):
        """Can it make this step without a plan that is told?"""
        return True

    def add_norm(self, norm):
        k.check(k.kopt_norm_add_grads(norm, self.tensors, len(self.tensors)))


class Plan:
    """A plan of the library, on a GPU. step, options, stopped: what the host believes of it. stopped, by an error: it
    skips all steps."""

    def __init__(self, kind, opt, tensors, device, stream):
        load_kernels()
        group = gpu.kopt_cuda_group(ctypes.pointer(opt), tensors, len(tensors))
        size = gpu.kopt_cuda_plan_size(group, 1)
        self.plan, self.host = gpu.kopt_cuda_plan(), torch.zeros(size, dtype=torch.uint8)
        k.check(gpu.kopt_cuda_plan_build(self.plan, self.host.data_ptr(), size, group, 1))
        self.memory, self.scales = state.on_device(self.host, device), state.on_device(torch.zeros(2), device)
        k.check(gpu.kopt_cuda_plan_upload(self.plan, self.memory.data_ptr(), stream))
        self.status = self.part(gpu.kopt_cuda_plan_status(self.plan), gpu.kopt_cuda_status)
        self.norm = self.part(gpu.kopt_cuda_plan_norm(self.plan, None), k.kopt_norm).view(torch.int64)
        self.kind, self.step, self.options, self.stopped = kind, opt.step, bytes(gpu.kopt_cuda_options()), False

    def part(self, pointer, kind):
        first = ctypes.cast(pointer, ctypes.c_void_p).value - self.memory.data_ptr()
        return self.memory[first:first + ctypes.sizeof(kind)]


class Report:
    """What a GPU says of a step, when it has come that far. Made before the step, as there may be no memory for it."""

    def __init__(self, plan, entries):
        self.plan, self.entries, self.may_skip = plan, entries, any(plan.options)
        self.copy, self.event = room_on_host(plan.status)

    def send(self):
        self.copy.copy_(self.plan.status, non_blocking=True)
        self.event.record()

    def read(self, states):
        """Takes the step back, if it was skipped. Returns the kopt_result."""
        if not self.event.query():
            self.event.synchronize()
        status = gpu.kopt_cuda_status.from_buffer_copy(ctypes.string_at(self.copy.data_ptr(), self.copy.numel()))
        self.plan.stopped = self.plan.stopped or status.result != k.KOPT_OK
        self.plan.step -= status.skipped
        for e in self.entries if status.skipped else ():
            s = states.get(e.parameter())
            if s:
                s["step"] -= 1
        return status.result


class GpuCall(Call):
    """The same on a GPU, on the current stream. Tensors that have moved get new addresses in the plan. Nothing waits
    for the GPU: a step that it has skipped counts until its report has come."""

    def __init__(self, optimizer, group, entries, other=None):
        super().__init__(optimizer, group, entries)
        self.layout = self.without_addresses()
        self.plan = other.plan if other is not None and other.layout == self.layout else None

    @staticmethod
    def lists(*columns):
        """The same, with one step count each: a plan has one."""
        return parted(columns[0], *columns).values()

    def without_addresses(self):
        tensors = type(self.tensors).from_buffer_copy(self.tensors)
        for t in tensors:
            t.weight = t.grad = t.arrays = None
        return bytes(tensors)

    def unscaling(self, loss_scale):
        self.loss_scale = loss_scale if on_gpu(loss_scale) else None
        return super().unscaling(None if on_gpu(loss_scale) else loss_scale)

    def prepare(self, found_inf=None, max_norm=None):
        """Gives the plan what is new in this step. With a max_norm, which may be 0, it measures the gradients."""
        if gpu is None:
            raise RuntimeError("this package has no kernels for a GPU: it was built without nvcc (%s). %s, or keep the "
                               "parameters on the CPU" % (no_gpu, WITH_KERNELS))
        with current(self.params[0].device):
            self.set(stream_of(self.params[0].device), found_inf, max_norm)
            self.report = Report(self.plan, self.entries)

    def set(self, stream, found_inf, max_norm):
        placed, plan, first = bytes(self.tensors), self.plan, self.entries[0]
        kind = first.kind, first.layout, self.opt.moment_rounding, self.opt.residual_rounding, self.opt.stable
        if plan is None or plan.kind != kind:
            plan = self.plan = Plan(kind, self.opt, self.tensors, self.params[0].device, stream)
            stopped, plan.stopped, self.placed = False, True, None
        else:
            stopped, plan.stopped = plan.stopped, True
            k.check(gpu.kopt_cuda_plan_set_optimizer(plan.plan, 0, self.opt, stream))
            if self.placed != placed:
                k.check(gpu.kopt_cuda_plan_set_arrays(plan.plan, 0, len(self.tensors), self.tensors, stream))
            if plan.step != self.opt.step:
                k.check(gpu.kopt_cuda_plan_set_step(plan.plan, self.opt.step, stream))
                plan.step = self.opt.step
        if self.placed is None:  # the plan or the rates are new
            self.streams = set()
        if stream not in self.streams:
            for x in (plan.memory, plan.scales) + (() if self.rates is None else (self.rates,)):
                used_here(x)
            self.streams.add(stream)
        self.placed = placed
        options = gpu.kopt_cuda_options(check_finite=max_norm is not None, max_norm=max_norm or 0.0)
        for i, (name, x) in enumerate((("loss_scale", self.loss_scale), ("found_inf", found_inf))):
            if on_gpu(x):
                plan.scales[i:i + 1].copy_(x.reshape(1), non_blocking=True)
                setattr(options, name, plan.scales[i:].data_ptr())
        if plan.options != bytes(options):
            k.check(gpu.kopt_cuda_plan_set_options(plan.plan, options, stream))
            plan.options = bytes(options)
        if stopped:
            k.check(gpu.kopt_cuda_plan_acknowledge(plan.plan, stream))
        if max_norm is not None:
            k.check(gpu.kopt_cuda_plan_measure(plan.plan, stream))
        plan.stopped = False

    def run(self):
        device, self.plan.stopped = self.params[0].device, True
        with current(device):
            k.check(gpu.kopt_cuda_plan_step(self.plan.plan, stream_of(device)))
            self.plan.step, self.plan.stopped = self.runs[0][1], False
            self.finish()
            self.report.send()
            self.optimizer._reports.append(self.report)

    def add_norm(self, norm):
        self.prepare(max_norm=0.0)
        here = self.plan.norm.cpu()
        k.check(k.kopt_norm_merge(norm, k.kopt_norm.from_buffer_copy(ctypes.string_at(here.data_ptr(), 8 * len(here)))))

    def knows(self, step):
        """Does the plan come to this step by itself?"""
        return self.plan is None or self.plan.step == step


def add_norms(calls):
    """Gives these calls the norm of all their gradients. Returns whether one is not finite: a tensor."""
    norms = [call.plan.norm for call in calls]
    if len(norms) > 1:
        total = sum(norm.to(norms[0].device) for norm in norms)
        for norm in norms:
            norm.copy_(total)
    return norms[0][k.kopt_norm.nonfinite.offset // 8] != 0


CALLS = {"cpu": Call, "cuda": GpuCall}  # by the type of the device
