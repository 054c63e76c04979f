"""kahan_opt.h beside other CPU optimizers and conversions, in one process.

    ./build.sh bench --peers [--gb SIZE]     about ten minutes; build.sh builds the library and installs the peers

SIZE is what the arrays of our bf16 Kahan AdamW take in the DRAM table (default 1, less if the memory is less).

- One thread. Thread CPU time, or the process's where a peer starts threads of its own (marked *). The lines of a table
  are run one after the other, again and again, so that what drifts, drifts for all; medians of the repetitions.
- All lines work in the same memory: weights, gradients, state. What a peer allocates of its own beside (temporaries,
  quantized state) stays where it puts it. Before each measurement weights and gradients are written anew, the state
  begins with zeros, and two steps go unmeasured; so all numbers are normal ones.
- Before anything is measured each line makes STEPS steps with gradients that change, and is compared with our fp32
  AdamW: `off` is the mean distance of the weights, relative to the mean way that they went. A line beyond its limit has
  not done the work and is left out.
- A step or conversion is one call from Python. What that costs by itself is in the tables of 256 numbers.

`held` is weight + gradient + state, in bytes per weight; `moved` what a single pass must read and write of them.
Writes build/bench/peers.csv.
"""
import array
import contextlib
import ctypes
import io
import logging
import mmap
import os
import statistics
import sys
import time
import warnings

for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[variable] = "1"  # read when the libraries are loaded
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.abspath("build/peers/inductor"))
warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

REPETITIONS = 5
EXACT, ROUNDED = 1e-3, 0.25                   # limits of `off`; ten roundings of a 16-bit weight are 2 to 9 % here
STEPS = 10
PATTERN = 1024
SMALL = (999_936, 10_240)  # multiples of 256, or peers with blocks would keep fp32 state
CALL = 256
F32, BF16, FP16, Q8 = 0, 1, 2, 3              # kopt_format
NEAREST, STOCHASTIC, KAHAN = 0, 1, 2          # kopt_rounding
SIZE = {F32: 4, BF16: 2, FP16: 2}
BETA1, BETA2, EPS, DECAY = 0.9, 0.999, 1e-8, 0.01

library = ctypes.CDLL(os.path.abspath("build/bench/peers.so"))
pointer, size_t, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_float
library.ours_new.restype = pointer
library.ours_new.argtypes = [ctypes.c_int] * 3 + [ctypes.c_double, pointer, pointer, size_t, pointer, size_t]
library.ours_state_size.restype = size_t
library.ours_state_size.argtypes = [ctypes.c_int] * 3 + [size_t]
library.ours_step.argtypes = library.ours_free.argtypes = [pointer]
library.ours_isa.restype = ctypes.c_char_p
library.ours_convert.argtypes = [pointer, ctypes.c_int, pointer, ctypes.c_int, size_t]
for loop in ("naive_step", "naive_vector_step", "llmc_step", "ggml_step"):
    getattr(library, loop).argtypes = [pointer] * 4 + [size_t] + [number] * 5 + [ctypes.c_int]

missing = []  # (who, why)


def had(who, load):
    """What load() returns, or None: the reason is printed at the end."""
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            return load()
    except Exception as why:  # whatever a package of others may raise
        missing.append((who, f"{type(why).__name__}: {why}".splitlines()[0][:150]))
        return None


def import_torch():
    import torch
    torch.set_num_threads(1)
    return torch


torch = had("PyTorch", import_torch)
numpy = had("NumPy", lambda: __import__("numpy"))


# ---- the memory that all lines share ----

class Pool:
    """weights (4n bytes), gradients (4n), state (12n), each with room to spare, at multiples of 4096."""

    def __init__(self, n):
        self.n = n
        part = (4 * n + 8192) // 4096 * 4096
        self.offset = {"w": 0, "g": part, "state": 2 * part}
        self.room = 3 * part
        self.memory = mmap.mmap(-1, 5 * part)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):
                self.memory.madvise(mmap.MADV_HUGEPAGE)  # 4 KB pages would measure the TLB
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        ctypes.memset(self.base, 0, 5 * part)

    def at(self, name):
        return self.base + self.offset[name]

    def tensor(self, name, dtype, count, skip=0):
        return torch.frombuffer(self.memory, dtype=dtype, count=count, offset=self.offset[name] + skip)

    def array(self, name, dtype, count):
        return numpy.frombuffer(self.memory, dtype=dtype, count=count, offset=self.offset[name])


def make_pattern(values):
    """The values again and again, in each format; exact in bf16, so that all lines begin with the same numbers."""
    f32, half = array.array("f", values), array.array("H", [0] * PATTERN)
    floats, halves = f32.buffer_info()[0], half.buffer_info()[0]
    library.ours_convert(halves, BF16, floats, F32, PATTERN)
    library.ours_convert(floats, F32, halves, BF16, PATTERN)
    pattern = {F32: f32.tobytes() * 512, BF16: half.tobytes() * 512}
    library.ours_convert(halves, FP16, floats, F32, PATTERN)
    pattern[FP16] = half.tobytes() * 512
    return pattern


WEIGHTS = make_pattern([(i * 2654435761 % 1999) / 1000 - 1 for i in range(PATTERN)])
GRADS = make_pattern([(i * 40503 % 977) / 977 - 0.5 for i in range(PATTERN)])


def fill(address, pattern, fmt, n, shift=0):
    """n values of the pattern, from its element shift on."""
    source, size = pattern[fmt][shift * SIZE[fmt]:], n * SIZE[fmt]
    whole = (len(source) // (PATTERN * SIZE[fmt])) * PATTERN * SIZE[fmt]
    for begin in range(0, size, whole):
        ctypes.memmove(address + begin, source, min(whole, size - begin))


# ---- the lines ----

class Line:
    """start(pool, n, lr) returns the function that makes a step, and one to call after the first step, or None."""

    def __init__(self, who, version, fmt, state, start, limit, destroys=False, smallest=1):
        self.who, self.version, self.fmt, self.start, self.limit = who, version, fmt, start, limit
        self.held = 2 * SIZE[fmt] + state
        self.moved = 3 * SIZE[fmt] + 2 * state
        self.destroys, self.smallest = destroys, smallest  # destroys: the gradient; it is written anew before each step
        self.off = None

    def begin(self, pool, n, lr):
        fill(pool.at("w"), WEIGHTS, self.fmt, n)
        fill(pool.at("g"), GRADS, self.fmt, n)
        ctypes.memset(pool.at("state"), 0, min(pool.room, 12 * n + 4096))
        return self.start(pool, n, lr)


def ours(who, fmt, rounding, moments, state, limit):
    def start(pool, n, lr):
        room = library.ours_state_size(fmt, rounding, moments, n)
        handle = library.ours_new(fmt, rounding, moments, lr, pool.at("w"), pool.at("g"), n, pool.at("state"), room)
        if not handle:
            raise RuntimeError("kahan_opt.h refused the optimizer")
        handles.append(handle)
        return lambda: library.ours_step(handle), None
    return Line(who, "kahan_opt.h " + library.ours_isa().decode(), fmt, state, start, limit)


handles = []


def plain(who, version, function):
    def start(pool, n, lr):
        count = 0
        w, g, m = pool.at("w"), pool.at("g"), pool.at("state")
        v = m + (4 * n + 63) // 64 * 64

        def step():
            nonlocal count
            count += 1
            function(w, g, m, v, n, lr, BETA1, BETA2, EPS, DECAY, count)
        return step, None
    return Line(who, version, F32, 8, start, EXACT)


def peer(who, version, fmt, state, make, limit, **more):
    """make(parameters, lr) returns an optimizer in the manner of torch.optim."""
    def start(pool, n, lr):
        dtype = {F32: torch.float32, BF16: torch.bfloat16, FP16: torch.float16}[fmt]
        weight = torch.nn.Parameter(pool.tensor("w", dtype, n))
        weight.grad = pool.tensor("g", dtype, n)
        optimizer = make([weight], lr)

        def adopt():  # its state into the shared memory
            skip = 0
            for key, value in optimizer.state[weight].items():
                if type(value) is torch.Tensor and value.numel() == n:
                    place = pool.tensor("state", value.dtype, n, skip)
                    place.copy_(value)
                    optimizer.state[weight][key] = place
                    skip += (n * value.element_size() + 63) // 64 * 64
        return optimizer.step, adopt
    return Line(who, version, fmt, state, start, limit, **more)


def lines_of_peers():
    if torch is None:
        missing.append(("torch.optim, optimi, torchao, bitsandbytes", "need PyTorch"))
        return []
    lines, version = [], "torch " + torch.__version__
    common = {"betas": (BETA1, BETA2), "eps": EPS, "weight_decay": DECAY}
    adamw = torch.optim.AdamW
    for fmt, name, limit in ((F32, "fp32", EXACT), (BF16, "bf16", ROUNDED), (FP16, "fp16", ROUNDED)):
        for how, options in (("fused", {"fused": True}), ("foreach", {"foreach": True}),
                             ("for loop", {"foreach": False})):
            lines.append(peer(f"torch AdamW {name} {how}", version, fmt, 2 * SIZE[fmt],
                              lambda p, lr, options=options: adamw(p, lr=lr, **common, **options), limit))
    optimi = had("optimi", lambda: __import__("optimi"))
    if optimi:
        from importlib import metadata
        version = "optimi " + metadata.version("torch-optimi")
        for how, foreach in (("foreach", True), ("for loop", False)):
            lines.append(peer(f"optimi AdamW bf16 Kahan {how}", version, BF16, 6,
                              lambda p, lr, foreach=foreach: optimi.AdamW(
                                  p, lr=lr, kahan_sum=True, foreach=foreach, triton=False, **common),
                              ROUNDED, destroys=True))
    torchao = had("torchao", lambda: __import__("torchao.optim", fromlist=["optim"]))
    if torchao:
        version = "torchao " + __import__("torchao").__version__
        lines.append(peer("torchao AdamW bf16 stochastic", version, BF16, 4,
                          lambda p, lr: torchao._AdamW(p, lr=lr, bf16_stochastic_round=True, **common), ROUNDED))
        lines.append(peer("torchao AdamW8bit bf16 stochastic", version, BF16, 2.03,
                          lambda p, lr: torchao.AdamW8bit(p, lr=lr, bf16_stochastic_round=True, **common), ROUNDED,
                          smallest=4096))
    bnb = had("bitsandbytes", lambda: __import__("bitsandbytes"))
    if bnb:
        version = "bitsandbytes " + bnb.__version__
        lines.append(peer("bitsandbytes AdamW bf16, fp32 state", version, BF16, 8,
                          lambda p, lr: bnb.optim.AdamW(p, lr=lr, **common), ROUNDED))
        lines.append(peer("bitsandbytes AdamW8bit bf16", version, BF16, 2.03,
                          lambda p, lr: bnb.optim.AdamW8bit(p, lr=lr, **common), ROUNDED, smallest=4096))
    deepspeed = had("DeepSpeed", lambda: __import__("deepspeed.ops.adam", fromlist=["adam"]).DeepSpeedCPUAdam)
    if deepspeed:
        version = "deepspeed " + __import__("deepspeed").__version__
        for fmt, name, limit in ((F32, "fp32", EXACT), (BF16, "bf16, fp32 moments", ROUNDED),
                                 (FP16, "fp16, fp32 moments", ROUNDED)):
            lines.append(peer("DeepSpeedCPUAdam " + name, version, fmt, 8,
                              lambda p, lr: deepspeed(p, lr=lr, **common), limit))
    return lines


def all_lines():
    lines = [ours("ours, AdamW fp32", F32, NEAREST, F32, 8, EXACT),
             ours("ours, AdamW bf16 Kahan", BF16, KAHAN, BF16, 6, ROUNDED),
             ours("ours, AdamW bf16 stochastic", BF16, STOCHASTIC, BF16, 4, ROUNDED),
             ours("ours, AdamW bf16 nearest", BF16, NEAREST, BF16, 4, ROUNDED),
             ours("ours, AdamW bf16 Kahan, 8-bit moments", BF16, KAHAN, Q8, 4.03, ROUNDED),
             ours("ours, AdamW bf16 Kahan, fp32 moments", BF16, KAHAN, F32, 10, ROUNDED),
             ours("ours, AdamW bf16 nearest, fp32 moments", BF16, NEAREST, F32, 8, ROUNDED),
             ours("ours, AdamW fp16 Kahan, fp32 moments", FP16, KAHAN, F32, 10, ROUNDED),
             ours("ours, AdamW fp16 nearest, fp32 moments", FP16, NEAREST, F32, 8, ROUNDED)]
    compiler = os.environ.get("CC", "cc")
    for who, flags, loop in (("naive loop fp32", "-O3 native", "naive_step"),
                             ("naive loop fp32, no errno", "-O3 native", "naive_vector_step"),
                             ("llm.c's formula fp32", "-Ofast native", "llmc_step"),
                             ("ggml's formula fp32", "-O3 native", "ggml_step")):
        lines.append(plain(who, f"{compiler} {flags}", getattr(library, loop)))
    return lines + lines_of_peers()


def clear():
    while handles:
        library.ours_free(handles.pop())


# ---- do they do the work? ----

def weights_of(pool, fmt, n):
    result = array.array("f", bytes(4 * n))
    library.ours_convert(result.buffer_info()[0], F32, pool.at("w"), fmt, n)
    return result


def check(lines):
    n, good, expected = SMALL[1], [], None
    pool = Pool(n)
    fill(pool.at("w"), WEIGHTS, F32, n)
    first = weights_of(pool, F32, n)
    for line in lines:
        def run(line=line):
            step, adopt = line.begin(pool, n, 0.01)
            for k in range(STEPS):
                fill(pool.at("g"), GRADS, line.fmt, n, 37 * k)
                step()
                if k == 0 and adopt:
                    adopt()
            return weights_of(pool, line.fmt, n)
        got = had(line.who, run)
        clear()
        if got is None:
            continue
        expected = expected or got
        way = sum(abs(a - b) for a, b in zip(expected, first))
        line.off = sum(abs(a - b) for a, b in zip(expected, got)) / way
        if line.off <= line.limit:  # not so if it is NaN
            good.append(line)
        else:
            missing.append((line.who, f"does other work: its weights are {100 * line.off:.2g} % off; not measured"))
    return good


# ---- tables ----

def measure(lines, n, title, rows):
    pool, results = Pool(n), {}
    calls = max(1, min(400, 4_000_000 // n))
    lines = [line for line in lines if n >= line.smallest]
    for _ in range(REPETITIONS):
        for line in lines:
            if results.get(line.who, True) is None:
                continue

            def run(line=line):
                step, adopt = line.begin(pool, n, 1e-3)
                seconds = processes = 0.0
                step()
                if adopt:
                    adopt()
                fill(pool.at("g"), GRADS, line.fmt, n)
                step()  # warm
                for _ in range(calls if line.destroys else 1):
                    if line.destroys:
                        fill(pool.at("g"), GRADS, line.fmt, n)
                    process, thread = time.process_time(), time.thread_time()
                    for _ in range(1 if line.destroys else calls):
                        step()
                    seconds += time.thread_time() - thread
                    processes += time.process_time() - process
                return seconds / calls / n * 1e9, processes / calls / n * 1e9
            result = had(f"{line.who}, {n} weights", run)
            clear()
            if result is None:
                results[line.who] = None
            else:
                results.setdefault(line.who, []).append(result)
    unit, scale = ("us/call", n / 1000) if n == CALL else ("ns/weight", 1)
    print(f"\n{title}\n{'':38} {'':22} {'held':>5} {'moved':>5} {unit:>9} {'/fp32':>7} {'/Kahan':>7} {'off':>8}")
    times = {}
    for line in lines:
        if results.get(line.who):
            thread, process = (statistics.median(column) for column in zip(*results[line.who]))
            own_threads = process > 1.15 * thread + 1000 / n  # + 1 us: the clocks themselves
            times[line.who] = process if own_threads else thread, "*" if own_threads else " "
    fp32, kahan = times["ours, AdamW fp32"][0], times["ours, AdamW bf16 Kahan"][0]
    for line in lines:
        if line.who in times:
            ns, mark = times[line.who]
            print(f"{line.who:38} {line.version:22.22} {line.held:5.4g} {line.moved:5.4g} {ns * scale:9.3f}{mark}"
                  f"{ns / fp32:6.2f}x {ns / kahan:6.2f}x {100 * line.off:7.2g}%", flush=True)
            rows.append((title, n, line.who, line.version, line.held, line.moved, f"{ns:.4f}", f"{ns / fp32:.3f}",
                         f"{ns / kahan:.3f}", f"{line.off:.3g}"))


def conversions(n, rows):
    """From the gradients' memory to the state's. memcpy reads and writes as many bytes as the conversions do."""
    pool, title = Pool(n), f"conversions of {n:,} numbers"
    calls = max(1, min(400, 4_000_000 // n))
    dtypes = {F32: "float32", BF16: "bfloat16", FP16: "float16"}
    unit, scale = ("us/call", n / 1000) if n == CALL else ("ns/number", 1)
    print(f"\n{title}\n{'':38} {'':22} {'':5} {'moved':>5} {unit:>9} {'/memcpy':>8}")
    for source, target in ((F32, BF16), (BF16, F32), (F32, FP16), (FP16, F32)):
        name = f"{dtypes[source]} to {dtypes[target]}"
        a, b = pool.at("g"), pool.at("state")
        fill(a, GRADS, source, n)
        lines = [("memcpy of 6 bytes a number", "libc", lambda: ctypes.memmove(b, a, 3 * n), False),
                 ("ours, " + name, "kahan_opt.h " + library.ours_isa().decode(),
                  lambda: library.ours_convert(b, target, a, source, n), True)]
        if torch is not None:
            version = "torch " + torch.__version__
            t = [pool.tensor("g", getattr(torch, dtypes[source]), n),
                 pool.tensor("state", getattr(torch, dtypes[target]), n)]
            lines += [("torch copy_, " + name, version, lambda: t[1].copy_(t[0]), True),
                      ("torch .to(), which allocates", version, lambda: t[0].to(t[1].dtype), False)]
        if numpy is not None and BF16 not in (source, target):
            version = "numpy " + numpy.__version__
            x = [pool.array("g", dtypes[source], n), pool.array("state", dtypes[target], n)]
            lines += [("numpy copyto, " + name, version, lambda: numpy.copyto(x[1], x[0], casting="same_kind"), True),
                      ("numpy astype, which allocates", version, lambda: x[0].astype(x[1].dtype), False)]
        results, expected = {}, None
        for _ in range(REPETITIONS):
            for who, _, run, compared in lines:
                if compared:
                    ctypes.memset(b, 0xFF, SIZE[target] * n)
                run()
                if compared:
                    got = ctypes.string_at(b, min(n, 100_000) * SIZE[target])
                    expected = expected or got
                    if got != expected:
                        raise SystemExit(f"peers: {who}: other numbers than ours")
                begin = time.thread_time()
                for _ in range(calls):
                    run()
                results.setdefault(who, []).append((time.thread_time() - begin) / calls / n * 1e9)
        copy = statistics.median(results[lines[0][0]])
        for who, version, _, _ in lines:
            ns = statistics.median(results[who])
            print(f"{who:38} {version:22.22} {'':5} {6:5} {ns * scale:9.3f} {ns / copy:7.2f}x", flush=True)
            rows.append((title + ", " + name, n, who, version, "", 6, f"{ns:.4f}", f"{ns / copy:.3f}", "", ""))


def memory_available():
    with contextlib.suppress(OSError, ValueError):
        with open("/proc/meminfo", encoding="ascii") as file:
            for entry in file:
                if entry.startswith("MemAvailable:"):
                    return int(entry.split()[1]) * 1024
    return 1 << 62


def main():
    gigabytes = 1.0
    try:
        if len(sys.argv) != 1:
            option, size = sys.argv[1:]
            gigabytes = float(size) if option == "--gb" else 0
    except ValueError:
        gigabytes = 0
    if not 0.01 <= gigabytes <= 1000:
        raise SystemExit("usage: peers.py [--gb SIZE]")
    n = int(gigabytes * 1e9 / 10) // 1024 * 1024
    most = memory_available() // 40 // 1024 * 1024  # 20 bytes for all, up to 16 of temporaries, and some for others
    if n > most:
        print(f"memory for {most * 1e-8:.2f} GB only")
        n = most
    rows = []
    lines = check(all_lines())
    if [line.who for line in lines[:2]] != ["ours, AdamW fp32", "ours, AdamW bf16 Kahan"]:
        raise SystemExit(f"peers: our own steps failed: {missing}")
    measure(lines, n, f"DRAM: {n * 1e-8:.2f} GB for our bf16 Kahan ({n:,} weights)", rows)
    for small in SMALL:
        measure(lines, small, f"{small:,} weights", rows)
    measure(lines, CALL, f"a call: {CALL} weights", rows)
    for size in (n, *SMALL, CALL):
        conversions(size, rows)
    for who, why in missing:
        print(f"\nSKIPPED: {who} ({why})", end="")
    with open("build/bench/peers.csv", "w", encoding="utf-8") as file:
        file.write("table,n,who,version,bytes_held,bytes_moved,ns_per_element,ratio_1,ratio_2,off\n")
        for row in rows:
            file.write(",".join('"%s"' % field if isinstance(field, str) and "," in field else str(field)
                                for field in row) + "\n")
    print("\n\nwritten: build/bench/peers.csv")


if __name__ == "__main__":
    main()
