"""Runs GpuCall of docs/examples/python/kahan_opt/calls.py on a fake GPU: see cuda_torch.sh. Prints TAP."""
import copy
import ctypes
import sys

import torch
from torch.nn import Parameter

sys.path[:0] = [sys.argv[1], "docs/examples"]
sys.dont_write_bytecode = True

import kahan_opt as k  # noqa: E402
from kahan_opt import KahanOptimizer, calls, cuda, state  # noqa: E402

malloc = cuda.library_.cudaMalloc
malloc.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
cuda.library_.cudaMemcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def on_device(x, _=None):
    """A copy of a tensor in memory of the fake GPU."""
    address, size = ctypes.c_void_p(), max(1, x.numel() * x.element_size())
    assert malloc(ctypes.byref(address), size) == 0
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
        assert cuda.library_.cudaDeviceSynchronize() == 0
        status = cuda.kopt_cuda_status.from_address(
            ctypes.cast(cuda.kopt_cuda_plan_status(self.plan), ctypes.c_void_p).value)
        k.check(status.result)


def noise(shape, seed, dtype):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def bits(x):
    return x.detach().contiguous().view(torch.int32 if x.dtype == torch.float32 else torch.int16)


def main():
    real = calls.CALLS["cpu"], state.on_device
    calls.stream_of = lambda device: None
    count = failed = 0
    for rule, options in (("adamw", {}), ("adamw", {"rounding": "exact", "moment_format": "q8"}),
                          ("sgd", {"momentum": 0.9}), ("stable_adamw", {}), ("ranger", {"lookahead": 2}),
                          ("adam_atan2", {"rounding": "compact"}), ("lion", {"maximize": True})):
        results = []
        for fake in (False, True):
            calls.CALLS["cpu"], state.on_device = (FakeCall, on_device) if fake else real
            place = on_device if fake else torch.clone
            params = [Parameter(place(noise(shape, i, dtype))) for i, (shape, dtype) in enumerate(
                (((33, 9), torch.bfloat16), ((700,), torch.bfloat16), ((5,), torch.float32), ((40,), torch.float16)))]
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
                    optimizer.param_groups[0]["lr"] = 0.5
                optimizer.step()
            results.append((params, optimizer.state_dict()["state"]))
        (a, s), (b, r) = results
        good = all(torch.equal(bits(p), bits(q)) for p, q in zip(a, b)) and all(
            torch.equal(s[i]["block"], r[i]["block"]) and s[i]["step"] == r[i]["step"] for i in s)
        count += 1
        failed += not good
        print("%s %d - %s %s: the bits of the CPU" % ("ok" if good else "not ok", count, rule, options or ""))
    print("1..%d" % count)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
