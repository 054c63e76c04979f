"""docs/examples/convert.py with the packages of PyPI: bitsandbytes, optimi and torchao on PyTorch 2, on the CPU.

    ./build.sh bench converters [FOLDER]     FOLDER has kahan_opt (default build/python)

Runs tests/examples/test_convert_formats.py first, then prints three tables: runs that change the library in the middle
(docs/pytorch.md has this one), the 8-bit quantizers beside each other, and all 2^32 words of fp32 as 16-bit remainders.
Exits with 1 if a number is above its limit. TransformerEngine and apex run on a GPU only: their formulas are in the
test."""
import os
import subprocess
import sys
import warnings

warnings.simplefilter("ignore")
sys.path[0] = "tests/examples"  # instead of bench

import test_convert_formats as t  # puts FOLDER into sys.path
import convert
import kahan_opt as ko
import torch

N, M = 300, 200
failed = []


def limit(good, what):
    if not good:
        failed.append(what)
    return "" if good else "  ABOVE ITS LIMIT"


def cases():
    import bitsandbytes.optim as b
    optimi = t.peers.import_optimi()
    adamw = lambda p: torch.optim.AdamW(p, lr=t.LR, weight_decay=0)
    lion = lambda p: optimi.Lion(p, lr=1e-4, triton=False)
    kahan = {"lr": t.LR, "weight_decay": 0, "triton": False}
    for name, options, exact in (
            ("AdamW8bit", {"lr": t.LR, "weight_decay": 0}, adamw), ("Adam8bit", {"lr": t.LR}, adamw),
            ("PagedAdamW8bit", {"lr": t.LR, "weight_decay": 0}, adamw), ("Lion8bit", {"lr": 1e-4}, lion),
            ("SGD8bit", {"lr": 1e-2, "momentum": 0.9}, lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9)),
            ("AdamW32bit", {"lr": t.LR, "weight_decay": 0}, adamw)):
        yield "bitsandbytes", name, lambda p, n=name, o=options: getattr(b, n)(p, **o), exact, torch.float32
    yield "optimi", "AdamW", lambda p: optimi.AdamW(p, **kahan), lambda p: optimi.AdamW(p, **kahan), torch.bfloat16
    yield "optimi", "Lion", lion, lion, torch.bfloat16
    yield ("torchdistx", "AnyPrecisionAdamW", lambda p: t.AnyPrecisionAdamW(p, lr=t.LR), adamw, torch.bfloat16)
    yield "torch", "AdamW", adamw, adamw, torch.float32


def values(model, optimizer, form):
    if form in convert.COMPENSATION:
        return t.compensated_values(model, optimizer, convert.COMPENSATION[form])
    return [p.data.double() for p in model.parameters()]


def train():
    print("Distance of the true weights from binary64 after %d + %d steps, in parts of the way they went:" % (N, M))
    print("| from | all there | %d there, %d here | the same, fp32 moments here | %d here, %d there |" % (N, M, N, M))
    print("|---|---|---|---|---|")
    t.GRADIENTS = t.gradients(N + M)
    names = {key: {"id": i, "shape": shape} for i, (key, shape) in enumerate(t.SHAPES.items())}
    t.write("names.json", t.json.dumps(names).encode())
    for form, name, make, exact_make, dtype in cases():
        exact = t.Model(torch.float64)
        exact.step(exact_make(exact.parameters()), 0, N + M)
        moved = t.distance([x.double() for x in t.initial().values()], exact)
        model = t.Model(dtype)
        optimizer = model.step(make(model.parameters()), 0, N)
        convert.save(t.at("there"), form, model, optimizer)
        model.step(optimizer, N, N + M)
        errors = [t.distance(values(model, optimizer, form), exact) / moved]
        for moments in (None, ko.KOPT_F32):
            convert.convert(form, "kahan_opt", t.at("there"), t.at("here"), moments=moments)
            here = t.Ours(t.at("here")).step(N, N + M)
            true = here.value if here.opt.rounding == ko.KOPT_KAHAN else lambda k, h=here: h.read(k, 0).double()
            errors.append(t.distance([true(k) for k in t.SHAPES], exact) / moved)
        # the other way: begin here with the options of that file
        with t.convert.safe_open(t.at("there"), "pt") as f:
            group = t.json.loads(f.metadata()["group"])
        opt = convert.options_from(form, type(optimizer).__name__, group)
        opt.rounding = ko.KOPT_KAHAN if dtype == torch.bfloat16 else ko.KOPT_EXACT
        moments = ko.KOPT_Q8 if "8bit" in name else ko.KOPT_BF16 if form == "optimi" else ko.KOPT_F32
        opt.first_moment_format = opt.second_moment_format = moments
        t.fresh(t.at("here"), opt)
        t.Ours(t.at("here")).step(0, N).save(t.at("here"))
        convert.convert("kahan_opt", form, t.at("here"), t.at("there"), names=t.at("names.json"),
                        moments=ko.KOPT_F32 if "32bit" in name else None)
        model = t.Model(dtype)
        optimizer = make(model.parameters())
        convert.load(t.at("there"), form, model, optimizer)
        model.step(optimizer, N, N + M)
        errors.append(t.distance(values(model, optimizer, form), exact) / moved)
        worst = 0.05 if "8bit" in name else max(1.1 * errors[0], 1e-5)
        print("| %s %s | %s |%s" % (form, name, " | ".join("%.2g" % e for e in errors),
                                    limit(max(errors[1:]) <= worst, name)), flush=True)


def quantizers():
    import bitsandbytes.functional as f
    from torchao.optim.quant_utils import quantize_8bit_with_qmap
    print("\nRoot mean square error of 8-bit codes, in parts of that of the values (blocks of 256):")
    print("| values | convert.py | bitsandbytes | torchao | squares above 0 with code 0: convert.py, the others |")
    print("|---|---|---|---|---|")
    g = torch.Generator().manual_seed(1)
    x = torch.randn(1 << 18, generator=g)
    rows = {"first moments, normal": (True, x), "first moments, sigma 1 to 1000": (
        True, x * 10 ** (3 * torch.rand(x.shape, generator=g))), "squares, normal": (False, x * x),
        "squares, sigma 1 to 10^4": (False, (x * 10 ** (4 * torch.rand(x.shape, generator=g))) ** 2)}
    for name, (signed, values_) in rows.items():
        qmap = f.create_dynamic_map(signed)
        results = [convert.encode(values_, qmap)]
        codes, state = f.quantize_blockwise(values_, code=qmap, blocksize=256)
        results.append((codes, state.absmax))
        scale = values_.reshape(-1, 256).abs().max(1).values
        codes = quantize_8bit_with_qmap((values_.reshape(-1, 256) / scale[:, None]).reshape(-1), qmap)
        results.append((codes, scale))
        errors, zeros = [], []
        for codes, scales in results:
            y = convert.decode(codes.reshape(-1), scales, qmap)
            errors.append(((y - values_).square().mean() / values_.square().mean()).sqrt().item())
            zeros.append(0 if signed else int(((codes.reshape(-1) == 0) & (values_ > 0)).sum()))
        print("| %s | %s | %s |%s" % (name, " | ".join("%.4f" % e for e in errors), "-" if signed else
                                      ", ".join(map(str, zeros)), limit(errors[0] <= min(errors[1:]) * 1.001 and
                                                                        zeros[0] == 0, name)), flush=True)


def remainders():
    """Every word of fp32 below infinity: the split of the packages against the state of kopt_state_init()."""
    size, wrong, total = 1 << 22, 0, 0
    opt = ko.kopt_sgd(0.1, 0)
    opt.rounding = ko.KOPT_EXACT
    weight = torch.zeros(size, dtype=torch.int16)
    tensor = ko.kopt_tensor(n=size, weight=weight.data_ptr(), weight_format=ko.KOPT_BF16)
    block = torch.zeros(ko.kopt_state_size(ko.byref(opt), ko.byref(tensor)), dtype=torch.uint8)
    tensor.state, tensor.state_size = block.data_ptr(), block.numel()
    for first in range(-1 << 31, 1 << 31, size):
        word = torch.arange(first, first + size, dtype=torch.int32)
        x, halves = word.view(torch.float32), word.view(torch.int16).reshape(-1, 2)  # little-endian: the union in C
        ko.check(ko.kopt_state_init(ko.byref(opt), ko.byref(tensor), 1, x.data_ptr()))
        low = halves[:, 0].contiguous()
        high = halves[:, 1] + (low < 0).short()
        different = (weight != high) | (block[64:64 + 2 * size].view(torch.int16) != low)
        different |= (convert.split(x)[0].view(torch.int16) != high) | (convert.split(x)[1] != low)
        different |= convert.join(weight.view(torch.bfloat16), low).view(torch.int32) != word
        good = (word & 0x7FFFFFFF) < 0x7F7F8000
        wrong, total = wrong + int((different & good).sum()), total + int(good.sum())
    print("\nAll %d words of fp32 below 7F7F8000 in magnitude: in %d the 16-bit remainder of TransformerEngine and "
          "apex is not that of EXACT%s" % (total, wrong, limit(wrong == 0, "remainders")))


def main():
    torch.set_num_threads(2)
    test = subprocess.run([sys.executable, t.__file__, t.LIBRARY], capture_output=True, text=True)
    bad = [line for line in test.stdout.splitlines() if line.startswith("not ok")]
    print("test_convert_formats.py with PyTorch %s: %s" % (torch.__version__, "%d failed" % len(bad) if bad else
          "all passed" if test.returncode == 0 else "ended early: " + test.stderr[-500:]))
    failed.extend(bad + ["the test"] * (test.returncode != 0))
    train()
    quantizers()
    if "--no-words" not in sys.argv:
        remainders()
    for name in os.listdir(t.FOLDER):
        os.unlink(t.at(name))
    os.rmdir(t.FOLDER)
    if failed:
        sys.exit("FAILED: " + "; ".join(failed))


if __name__ == "__main__":
    main()
