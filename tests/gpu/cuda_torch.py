"""Runs GpuCall of docs/examples/python/kahan_opt/calls.py on a GPU, or without one on the driver of cuda_fake.c (see
cuda_torch.sh), and compares the bits with those of the CPU. Prints TAP.

usage: cuda_torch.py FOLDER     (the package as backend.py FOLDER cuda builds it)"""
import copy
import ctypes
import sys

import torch
from torch.nn import Parameter

sys.path[:0] = [sys.argv[1], "docs/examples"]
sys.dont_write_bytecode = True

import kahan_opt as k  # noqa: E402
from kahan_opt import KahanOptimizer, calls, cuda, state  # noqa: E402

GPU = torch.cuda.is_available()
fake = None if GPU else ctypes.CDLL("libcuda.so.1")


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


class FakeCall(calls.GpuCall):
    """Each step is done when it returns: a tensor in the fake memory is also one of the CPU."""

    def run(self):
        super().run()
        assert fake.cudaDeviceSynchronize() == 0
        status = cuda.kopt_cuda_status.from_address(
            ctypes.cast(cuda.kopt_cuda_plan_status(self.plan), ctypes.c_void_p).value)
        k.check(status.result)


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


def main():
    cpu = calls.CALLS["cpu"], state.on_device, state.zeros
    if not GPU:
        calls.stream_of = lambda device: None
    count = failed = 0
    for rule, options in (("adamw", {}), ("adamw", {"rounding": "exact", "moment_format": "q8"}),
                          ("sgd", {"momentum": 0.9}), ("stable_adamw", {}), ("ranger", {"lookahead": 2}),
                          ("adam_atan2", {"rounding": "compact"}), ("lion", {"maximize": True})):
        results, refusals = [], []
        for on_gpu in (False, True):
            faked = FakeCall, on_fake_device, lambda *arguments: on_fake_device(cpu[2](*arguments))
            calls.CALLS["cpu"], state.on_device, state.zeros = faked if on_gpu and not GPU else cpu
            place = torch.clone if not on_gpu else torch.Tensor.cuda if GPU else on_fake_device
            params = [Parameter(place(noise(shape, i, dtype))) for i, (shape, dtype) in enumerate(
                (((33, 9), torch.bfloat16), ((700,), torch.bfloat16), ((5,), torch.float32), ((40,), torch.float16),
                 ((3, 512), torch.bfloat16)))]  # of the last there are 8-bit moments
            optimizer = KahanOptimizer(
                [{"params": params[:1]}, {"params": params[1:], "lr": 0.02}], rule, **options)
            for t in range(1, 8):
                for i, p in enumerate(params):
                    if t in (1, 4) or p.grad is None:  # new gradients, and steps with those that are there
                        p.grad = place(noise(p.shape, 100 * t + i, p.dtype))
                    else:
                        p.grad.copy_(noise(p.shape, 100 * t + i, p.dtype))
                if t == 3:
                    params[2].grad = None
                if t == 6:
                    saved = copy.deepcopy(optimizer.state_dict())
                    optimizer.load_state_dict(saved)
                    for p in params if on_gpu and not GPU else ():
                        optimizer.state[p] = {name: x if name == "step" else on_fake_device(x)
                                              for name, x in optimizer.state[p].items()}
                    optimizer.param_groups[0]["lr"] = 0.5
                    optimizer.step()
                    optimizer.param_groups[0]["rounding"], kept = "nearest", optimizer.param_groups[0]["rounding"]
                    try:  # there is a residual: refused, and the next step is made
                        optimizer.step()
                        refused = False
                    except Exception:
                        refused = True
                    optimizer.param_groups[0]["rounding"] = kept
                    refusals.append(refused)
                optimizer.step()
            results.append((params, optimizer.state_dict()["state"]))
        (a, s), (b, r) = results
        good = all(torch.equal(bits(p), bits(q)) for p, q in zip(a, b)) and all(
            s[i].keys() == r[i].keys() and all(torch.equal(torch.as_tensor(x), torch.as_tensor(r[i][name]).cpu())
                                               for name, x in s[i].items()) for i in s)
        good = good and refusals == [True, True]
        count += 1
        failed += not good
        print("%s %d - %s %s: the bits of the CPU" % ("ok" if good else "not ok", count, rule, options or ""))
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
