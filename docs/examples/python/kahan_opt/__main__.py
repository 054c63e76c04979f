"""python -m kahan_opt: says what this installation is, and tests that its steps have the bits of every machine."""
import array
import ctypes
import os
import sys
import zlib

from . import __version__, header as k

EXPECTED = 0x40C7DF59


def steps():
    """The CRC-32 of weights and moments, as fp32, after ten steps of each of some optimizers."""
    n, crc = 1003, 0
    noise = [(i * 2654435761 % 2 ** 32 / 2.0 ** 31 - 1) * 2.0 ** -(i % 9) for i in range(n)]
    for optimizer, options in ((k.kopt_adamw, {}),
                               (k.kopt_adamw, {"rounding": k.KOPT_EXACT, "moments": k.KOPT_Q8}),
                               (k.kopt_lion, {"rounding": k.KOPT_STOCHASTIC, "weights": k.KOPT_FP16}),
                               (k.kopt_stable_adamw, {"rounding": k.KOPT_COMPACT}),
                               (k.kopt_radam, {"weights": k.KOPT_F32, "moments": k.KOPT_F32})):
        opt, weights = optimizer(0.01), options.pop("weights", k.KOPT_BF16)
        if "moments" in options:
            opt.first_moment_format = opt.second_moment_format = options.pop("moments")
        for name, value in options.items():
            setattr(opt, name, value)
        start, grad, out = (array.array("f", noise) for _ in range(3))
        weight = ctypes.create_string_buffer(4 * n)
        t = k.kopt_tensor_of(weight, weights, grad.buffer_info()[0], k.KOPT_F32, n, None, 0)
        state = ctypes.create_string_buffer(k.kopt_state_size(opt, t))
        t.state, t.state_size = ctypes.addressof(state), len(state)
        k.check(k.kopt_state_init(opt, t, 1, start.buffer_info()[0]))
        for step in range(10):
            grad[:] = array.array("f", noise[step:] + noise[:step])
            k.check(k.kopt_optimizer_step(opt, t, 1))
        for slot in (k.KOPT_SLOT_WEIGHT, k.KOPT_SLOT_FIRST_MOMENT):
            k.check(k.kopt_state_read(opt, t, slot, out.buffer_info()[0]))
            if sys.byteorder == "big":
                out.byteswap()
            crc = zlib.crc32(out.tobytes(), crc)
    return crc


def gpu():
    """Are there kernels for a GPU, and a driver?"""
    try:
        from . import cuda  # noqa: F401
    except ImportError:
        return "none (NVCC=nvcc pip install ./docs/examples/python)"
    try:
        driver = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
        version = ctypes.c_int()
        driver.cuDriverGetVersion(ctypes.byref(version))
        return "yes (the driver has CUDA %d.%d)" % (version.value // 1000, version.value % 1000 // 10)
    except (OSError, AttributeError):
        return "yes, but there is no driver of NVIDIA"


def main():
    """The exit status: 0, or 1 if some bits are wrong."""
    sets = [i for i in range(k.KOPT_ISA_AUTO) if k.kopt_isa_usable(i)]
    print("kahan_opt %s: %s" % (__version__, k.path_))
    print("instruction set: %s (of %s)" % (
        k.kopt_isa_name(k.kopt_isa_current()), ", ".join(map(k.kopt_isa_name, sets))))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    print("threads: %d can run here; an optimizer has as many as PyTorch (threads=N: the same bits)" % cores)
    try:
        import torch
        print("PyTorch %s: from kahan_opt import KahanAdamW" % torch.__version__)
    except ImportError:
        print("PyTorch is not installed here: the optimizers need it, the functions of the header do not")
    print("GPU kernels: " + gpu())
    wrong = []
    for isa in sets:
        k.check(k.kopt_isa_force(isa))
        crc = steps()
        if crc != EXPECTED:
            wrong.append("%s makes %08x" % (k.kopt_isa_name(isa), crc))
    k.check(k.kopt_isa_force(k.KOPT_ISA_AUTO))
    print("self-test: " + ("FAILED: expected %08x, but %s" % (EXPECTED, ", ".join(wrong)) if wrong else
                           "passed: the same bits on %d instruction sets" % len(sets)))
    return len(wrong) > 0


if __name__ == "__main__":
    sys.exit(main())
