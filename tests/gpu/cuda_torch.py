"""Runs GpuCall of docs/examples/python/kahan_opt/calls.py on a GPU, or without one on the driver of cuda_fake.c (see
cuda_torch.sh), and compares the bits with those of the CPU. Prints TAP.

usage: cuda_torch.py FOLDER     (the package as backend.py FOLDER cuda builds it)"""
import contextlib
import copy
import ctypes
import functools
import sys
import traceback

import torch
from torch.nn import Parameter

sys.path[:0] = [sys.argv[1], "docs/examples"]
sys.dont_write_bytecode = True

import kahan_opt as k  # noqa: E402
from kahan_opt import KahanOptimizer, KahanScaler, calls, cuda, state  # noqa: E402

GPU = torch.cuda.is_available()
fake = None if GPU else ctypes.CDLL("libcuda.so.1")
on_cpu = calls.CALLS["cpu"], state.on_device, state.zeros


def on_fake_device(x, _=None):
    """A copy of a tensor in memory of the fake GPU."""
    address, size = ctypes.c_void_p(), max(1, x.numel() * x.element_size())
    assert fake.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(size)) == 0
    memory = (ctypes.c_char * size).from_address(address.value)
    y = torch.frombuffer(memory, dtype=x.dtype, count=x.numel()) if x.numel() else x.clone()
    y = y.reshape(x.shape)
    with torch.no_grad():
        y.copy_(x)
    return y


class Done:
    """The companion. What a call launches is done when it returns, as on a GPU that is fast: a tensor in the fake
    memory is also one of the CPU."""

    def __getattr__(self, name):
        what = getattr(cuda, name)
        return what if isinstance(what, (str, type)) else lambda *arguments: (
            what(*arguments), fake.cudaDeviceSynchronize())[0]


class Arrival:
    """The event of a copy to the host: the copy is there when the test says so, or when somebody waits for it."""
    there = False

    def query(self):
        return Arrival.there

    def synchronize(self):
        pass

    def record(self):
        pass


def use(gpu):
    """From now on tensors are on the GPU, or on the CPU. Returns what moves one there."""
    fakes = calls.GpuCall, on_fake_device, lambda *arguments: on_fake_device(on_cpu[2](*arguments))
    calls.CALLS["cpu"], state.on_device, state.zeros = fakes if gpu and not GPU else on_cpu
    return torch.clone if not gpu else torch.Tensor.cuda if GPU else on_fake_device


@contextlib.contextmanager
def no_waiting(gpu):
    """Whoever asks for a value of a tensor, or waits for an event, fails, if on a GPU."""
    def fail(*_):
        raise AssertionError("it waits for the GPU")

    event, kept = torch.cuda.Event if GPU else Arrival, {}
    for kind, names in ((torch.Tensor, "item tolist cpu numpy __float__ __bool__ __int__ __index__"),
                        (event, "synchronize")):
        for name in names.split() if gpu else ():
            kept[kind, name] = kind.__dict__.get(name)
            setattr(kind, name, fail)
    try:
        yield
    finally:
        for (kind, name), was in kept.items():
            delattr(kind, name) if was is None else setattr(kind, name, was)


def noise(shape, seed, dtype):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def bits(x):
    return x.detach().cpu().contiguous().view(torch.int32 if x.dtype == torch.float32 else torch.int16)


def scaled(device):
    """Weights and loss scales of steps with a GradScaler; one gradient is infinite."""
    p = Parameter(noise((700,), 0, torch.float16).to(device))
    optimizer, scales = KahanOptimizer([p], "adamw"), []
    scaler = torch.amp.GradScaler(device, init_scale=1024.0, growth_interval=2)
    for t in range(8):
        scaler.scale(torch.ones((), device=device))
        p.grad = noise((700,), t, torch.float16).to(device) * 64
        if t == 3:
            p.grad[5] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return bits(p).tolist(), scales


def everything(optimizers, *more):
    """The bits of all parameters and states."""
    found = list(more)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            found += [bits(p).tolist() for p in group["params"]]
        found += [(name, torch.as_tensor(x).tolist()) for s in optimizer.state_dict()["state"].values()
                  for name, x in sorted(s.items())]
    return found


def with_rule(rule, options, gpu):
    """Steps of a rule with gradients and states that move, another list, a rate that rises, a refusal by the host."""
    move, refused = use(gpu), False
    params = [Parameter(move(noise(shape, i, dtype))) for i, (shape, dtype) in enumerate(
        (((33, 9), torch.bfloat16), ((700,), torch.bfloat16), ((5,), torch.float32), ((40,), torch.float16),
         ((3, 512), torch.bfloat16)))]  # of the last there are 8-bit moments
    optimizer = KahanOptimizer([{"params": params[:1]}, {"params": params[1:], "lr": 0.02}], rule, **options)
    for t in range(1, 8):
        for i, p in enumerate(params):
            if t in (1, 4) or p.grad is None:  # new gradients, and steps with those that are there
                p.grad = move(noise(p.shape, 100 * t + i, p.dtype))
            else:
                p.grad.copy_(noise(p.shape, 100 * t + i, p.dtype))
        if t == 3:
            params[2].grad = None
        if t == 6:
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer.load_state_dict(saved)
            for p in params if gpu and not GPU else ():
                optimizer.state[p] = {name: x if name == "step" else on_fake_device(x)
                                      for name, x in optimizer.state[p].items()}
            optimizer.param_groups[0]["lr"] = 0.5
            optimizer.step()
            optimizer.param_groups[0]["rounding"], kept = "nearest", optimizer.param_groups[0]["rounding"]
            try:  # there is a residual: refused, and the next step is made
                optimizer.step()
            except ValueError:
                refused = True
            optimizer.param_groups[0]["rounding"] = kept
            assert refused == (kept != "feedback")
        for s in optimizer.state.values():
            if t == 5 and "rate" in s:  # as programs may that move a state
                s["rate"] = s["rate"].clone()
        for p in params if t == 2 else ():
            optimizer.step(param=p)
        if t != 2:
            optimizer.step()
    return everything([optimizer])


def with_scaler(gpu):
    """KahanScaler: two optimizers, of several calls each; infinities, clipping, unscale_(). No step waits."""
    move, Arrival.there = use(gpu), False
    params = [Parameter(move(noise(shape, i, dtype))) for i, (shape, dtype) in enumerate(
        (((33, 9), torch.bfloat16), ((700,), torch.bfloat16), ((5,), torch.float32), ((40,), torch.float16)))]
    optimizers = [KahanOptimizer([{"params": params[:1]}, {"params": params[1:3], "lr": 0.02}], "adamw"),
                  KahanOptimizer(params[3:], "adamw", rounding="feedback")]
    scaler, skips = KahanScaler(init_scale=1024.0, growth_interval=2, growth_factor=3.0, backoff_factor=0.3), []
    for t in range(1, 11):
        Arrival.there = t == 7
        with no_waiting(gpu and t > 1):
            scale = scaler.scale(move(torch.tensor(1.0)))
            for i, p in enumerate(params):
                p.grad = move((move(noise(p.shape, 100 * t + i, p.dtype)).float() * scale).to(p.dtype))
            if t in (3, 4):
                params[t - 2].grad[2] = float("inf" if t == 3 else "nan")
            if t == 9:
                params[3].grad[0] = float("inf")
            if t in (4, 6):
                scaler.unscale_(optimizers[0])
                params[2].grad[2] = 0.5  # what was infinite is known
            for optimizer in optimizers:
                scaler.step(optimizer, max_norm=0.5 * (t % 3))
                skips.append(scaler._skipped)
            scaler.update()
            if t == 5:
                for optimizer in optimizers:  # with other options
                    optimizer.step()
    norms = [(list(norm.digit), norm.nonfinite) for norm in (optimizer.grad_norm() for optimizer in optimizers)]
    return everything(optimizers, scaler.state_dict(), list(map(bool, skips)), norms, scaler.skipped)


def with_tensors(gpu):
    """grad_scale and found_inf as a GradScaler sets them. No step waits."""
    move, Arrival.there = use(gpu), False
    p = Parameter(move(noise((700,), 0, torch.float16)))
    optimizer = KahanOptimizer([p], "adamw")
    for t, found in enumerate((0, 1, 0, 0, 1, 0)):
        p.grad = move(noise((700,), t, torch.float16))
        with no_waiting(gpu and t not in (0, 5)):
            if t != 3:
                optimizer.grad_scale = move(torch.tensor([3.0]))
                optimizer.found_inf = move(torch.tensor(float(found)))
            optimizer.step()
        optimizer.__dict__.pop("grad_scale", None)
        optimizer.__dict__.pop("found_inf", None)
        if t == 4:  # another list: its plan begins where the last one is
            optimizer.add_param_group({"params": [Parameter(move(noise((5,), 0, torch.float16)))]})
            optimizer.param_groups[0]["params"].append(optimizer.param_groups.pop()["params"][0])
            optimizer.param_groups[0]["params"][1].grad = move(noise((5,), 1, torch.float16))
    return everything([optimizer])


def refusals(gpu):
    """A step that the GPU refuses raises in a later one, or in state_dict(), and is not counted."""
    move, Arrival.there = use(gpu), False
    p = Parameter(move(noise((700,), 0, torch.bfloat16)))
    p.grad = move(noise((700,), 1, torch.bfloat16))
    optimizer = KahanOptimizer([p], "adamw", lr=2.0 ** -10)
    optimizer.step()
    rate = move(torch.tensor([float("nan")]))
    for late in (optimizer.step, optimizer.state_dict) if gpu else ():
        plan = next(iter(optimizer._plans.values())).plan
        k.check(calls.gpu.kopt_cuda_plan_set_options(
            plan.plan, cuda.kopt_cuda_options(lr=rate.data_ptr()), calls.stream_of(p.device)))
        rate.fill_(float("nan"))
        Arrival.there = False
        optimizer.step()
        optimizer.step()
        rate.fill_(2.0 ** -10)
        if GPU:
            torch.cuda.synchronize()
        Arrival.there = True
        try:
            late()
            assert False, "nothing was raised"
        except k.kopt_error as e:
            assert e.result == k.KOPT_ERROR_RANGE and "the GPU has refused an earlier step" in str(e)
        assert not optimizer._reports
    optimizer.step()
    return everything([optimizer])


@contextlib.contextmanager
def instead(where, name, what):
    kept = getattr(where, name)
    setattr(where, name, what)
    try:
        yield kept
    finally:
        setattr(where, name, kept)


def no_memory(gpu):
    """A step for whose report there is no memory is not made; one whose report is not sent counts."""
    def fail(*_):
        raise MemoryError("for the test")

    move, Arrival.there = use(gpu), False
    p = Parameter(move(noise((700,), 0, torch.bfloat16)))
    p.grad = move(noise((700,), 1, torch.bfloat16))
    optimizer = KahanOptimizer([p], "adamw")
    for t, (where, name) in enumerate(((calls, "room_on_host"), (torch.cuda.Event if GPU else Arrival, "record"))):
        optimizer.step()
        with instead(where, name, fail):
            try:
                optimizer.step()
                assert not gpu, "nothing was raised"
            except MemoryError:
                pass
        if gpu and t == 0:
            optimizer.step()
    return everything([optimizer])


def failed_load(gpu):
    """What the driver refuses says where to look."""
    move = use(gpu)
    if gpu:
        try:
            k.check(k.KOPT_ERROR_DEVICE)
        except k.kopt_error as e:
            assert "nvidia-smi" in str(e) and "cudaPeekAtLastError" not in str(e)
        calls.no_gpu = "for the test"
        with instead(calls, "gpu", None):
            p = Parameter(move(torch.ones(5)))
            p.grad = move(torch.ones(5))
            try:
                KahanOptimizer([p], "adamw").step()
                assert False, "nothing was raised"
            except RuntimeError as e:
                assert "NVCC=nvcc pip install" in str(e) and "on the CPU" in str(e)
    return True


def captured(gpu):
    """A step in the capture of a graph is refused, and nothing is written."""
    move, refused = use(gpu), 0
    p = Parameter(move(noise((700,), 0, torch.float32)))
    p.grad = move(noise((700,), 1, torch.float32))
    optimizer, scaler = KahanOptimizer([p], "adamw"), KahanScaler()
    for _ in range(3):
        optimizer.step()
        before = everything([optimizer])
        with instead(torch.cuda, "is_initialized", lambda: True), instead(
                torch.cuda, "is_current_stream_capturing", lambda: True):
            for step in (optimizer.step, lambda: scaler.step(optimizer), *[lambda: scaler.unscale_(optimizer)] * gpu):
                try:
                    step()
                except RuntimeError as e:
                    refused += "captured in a CUDA graph" in str(e)
        assert refused == 2 + gpu and everything([optimizer]) == before
        refused = 0
    return everything([optimizer])


def another_stream(gpu):
    """PyTorch's allocator hears of each stream that uses a plan, once."""
    move, Arrival.there, used = use(gpu), True, []
    p = Parameter(move(noise((700,), 0, torch.bfloat16)))
    optimizer = KahanOptimizer([p], "adamw", rounding="feedback")
    stream = torch.cuda.Stream() if GPU else ctypes.c_void_p()
    assert GPU or fake.cudaStreamCreate(ctypes.byref(stream)) == 0
    with instead(calls, "used_here", lambda x: used.append(x.data_ptr())):
        for t, other in enumerate((0, 0, 1, 1, 0, 1)):
            if t == 5:
                optimizer.param_groups[0]["residual_rounding"] = "nearest"  # takes another plan
            p.grad = move(noise((700,), t, torch.bfloat16))
            with torch.cuda.stream(stream if GPU and other else None), instead(
                    calls, "stream_of", calls.stream_of if GPU else lambda _: stream.value if other else None):
                optimizer.step()
            if GPU:
                torch.cuda.synchronize()
            if gpu:
                call = next(iter(optimizer._plans.values()))
                all_three = [x.data_ptr() for x in (call.plan.memory, call.plan.scales, call.rates)]
                assert used == (all_three if t in (0, 2, 5) else []), (t, used, all_three)
            used.clear()
    return everything([optimizer])


def main():
    if not GPU:
        calls.stream_of, calls.gpu = lambda device: None, Done()
        calls.room_on_host, calls.used_here = lambda x: (torch.empty_like(x), Arrival()), lambda x: None
    tests = [(functools.partial(with_rule, rule, options), "%s %s" % (rule, options or "")) for rule, options in (
        ("adamw", {}), ("adamw", {"rounding": "exact", "moment_format": "q8"}), ("sgd", {"momentum": 0.9}),
        ("stable_adamw", {}), ("ranger", {"lookahead": 2}), ("adam_atan2", {"rounding": "compact"}),
        ("lion", {"maximize": True}), ("adamw", {"rounding": "feedback"}),
        ("radam", {"rounding": "feedback", "moment_format": "q8"}))]
    tests += [(test, test.__doc__.split(".")[0]) for test in (
        with_scaler, with_tensors, refusals, no_memory, failed_load, captured, another_stream)]
    count = failed = 0
    for test, words in tests:
        count += 1
        try:
            good = test(gpu=False) == test(gpu=True)
        except Exception:
            good = False
            print("".join("# %s\n" % line for line in traceback.format_exc().splitlines()), end="")
        failed += not good
        print("%s %d - %s: the bits of the CPU" % ("ok" if good else "not ok", count, words), flush=True)
    if GPU:
        count += 1
        with torch.cuda.stream(torch.cuda.Stream()):
            good = scaled("cpu") == scaled("cuda")
        failed += not good
        print("%s %d - steps and skips with a GradScaler on another stream: the bits of the CPU"
              % ("ok" if good else "not ok", count))
    print("1..%d" % count)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
