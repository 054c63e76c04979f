"""GPT-2's architecture on a GPU: the steps of this library beside mixed precision.

    ./build.sh python cuda
    PYTHONPATH=build/python python3 bench/gpt2.py bytes [ARM...]    12 minutes: each arm with three seeds learns 6 MB of
                                                                    bytes in 1,000 steps, then is fine-tuned
    PYTHONPATH=build/python python3 bench/gpt2.py TRAIN.bin VALIDATION.bin [ARM...]    an hour: 124 million parameters
                                                                    and llm.c's token files, one seed
    PYTHONPATH=build/python python3 bench/gpt2.py toy [ARM...]      a toy of the first on the CPU, in seconds

arms: mixed, kahan, feedback, stochastic, compact8, nearest; flashoptim, which needs the package of this name. Without a
word, all that are there. Initial weights, betas, decay and clipping are llm.c's for this model; a step is one small
batch, so that no gradients are summed in 16 bits. All arms begin at the same bf16 numbers and see the same batches.

The bytes are those of bench/scale.py, Python's standard library; each tenth block of 4096 is held out. Fine-tuning
begins at the bf16 weights of the mixed run and has Python's manual, at a constant rate of 1e-6: its column is how far
the held-out loss has fallen. Losses are of the 16 bits that a forward pass reads. Intervals are of 95 %, of differences
with the same seed (Student's t). `step` is the optimizer's share of an iteration, without clipping.

The token files are those of llm.c's dev/data: 256 words of 32 bits (20240520, 1, number of tokens, zeros), then tokens
of 16 bits. Prints the losses, a table, and the hash of the losses. What could be tuned was fixed before the runs:"""
LAYERS, WIDTH, HEADS, LENGTH, TOKENS = 12, 768, 12, 1024, 50257
STEPS, BATCH, EVERY, VALIDATION = 3000, 32, 250, 20  # EVERY so many steps: the loss of VALIDATION batches
HYPER = {"lr": 6e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
WARM_UP, CLIP, SEEDS = 256, 1.0, (1,)
TUNING, TUNED = 1e-6, 0  # the rate and the steps of the fine-tuning

import hashlib
import importlib.util
import math
import os
import struct
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F

sys.path.append("docs/examples")
import torch_transformer  # noqa: E402
from kahan_opt import KahanAdamW, param_groups_weight_decay  # noqa: E402

sys.path.append("bench")  # fidelity puts its bindings first, which are loaded by now
import fidelity  # noqa: E402

MIXED, NEAREST, FLASH = "mixed", "nearest", "flashoptim"
ARMS = {MIXED: None, "kahan": {"rounding": "kahan"}, "feedback": {"rounding": "feedback"},
        "stochastic": {"rounding": "stochastic"}, "compact8": {"rounding": "compact", "moment_format": "q8"},
        NEAREST: {"rounding": "nearest", "moment_rounding": "nearest"}}
if importlib.util.find_spec("flashoptim"):
    ARMS[FLASH] = None


def tokens_of(path):
    with open(path, "rb") as file:
        magic, version, count = struct.unpack("<3i", file.read(1024)[:12])
    if (magic, version) != (20240520, 1) or os.path.getsize(path) != 1024 + 2 * count:
        sys.exit("gpt2: %s is not a token file of llm.c, or is cut off" % path)
    return torch.from_file(path, False, 512 + count, dtype=torch.int16)[512:]  # mapped; 50256 is negative


def batch(tokens, seed, number, device):
    """Batch `number` of a random order of places that is the same for all arms."""
    generator = torch.Generator().manual_seed(seed * 1000003 + number)
    at = torch.randint(len(tokens) - LENGTH, (BATCH, 1), generator=generator)
    rows = (tokens[at + torch.arange(LENGTH + 1)].long() & 0xFFFF).to(device)
    return rows[:, :-1], rows[:, 1:]


class Block(torch_transformer.Block):
    def attend(self, q, key, v, mask):
        if hasattr(F, "scaled_dot_product_attention"):  # PyTorch 2
            return F.scaled_dot_product_attention(q, key, v, is_causal=True)
        return super().attend(q, key, v, mask)


class Model(torch_transformer.Transformer):
    """With GPT-2's tokens, initial weights, and the embedding of tokens as output layer."""

    def __init__(self):
        super().__init__(WIDTH, 0, LENGTH)
        self.token, self.head = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS, bias=False)
        self.blocks = nn.ModuleList(Block(WIDTH, HEADS) for _ in range(LAYERS))
        self.head.weight = self.token.weight
        for name, p in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(p)
            elif p.dim() == 2:  # what is added to the residual stream is smaller
                last = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 * ((2 * LAYERS) ** -0.5 if last else 1))


def loss_of(model, inputs, wanted):
    return F.cross_entropy(model(inputs).float().flatten(0, 1), wanted.flatten())


def optimizer_of(arm, groups):
    if arm == FLASH:  # weights with 8 bits more, 8-bit moments
        import flashoptim
        return flashoptim.FlashAdamW(groups, **HYPER)
    if arm == MIXED:
        fused = {"fused": True} if groups[0]["params"][0].is_cuda else {}
        return torch.optim.AdamW(groups, **fused, **HYPER)
    return KahanAdamW(groups, **HYPER, **ARMS[arm])


def mark(device):
    """A point of time in the work of the device."""
    if device == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(a, b):
    return b - a if isinstance(a, float) else a.elapsed_time(b) / 1000


def rate(step):
    falling = 0.5 * (1 + math.cos(math.pi * (step - WARM_UP) / (STEPS - WARM_UP)))
    return HYPER["lr"] * min((step + 1) / WARM_UP, falling if step > WARM_UP else 1)


class Run:
    """losses: held out, after each EVERY steps. weights: at the end, in bf16. speed: tokens a second, from step EVERY
    on. share: of the optimizer in that time. memory: GB at most."""

    def __init__(self, arm, seed, texts, device, start=None):
        """start: the weights that are fine-tuned."""
        torch.manual_seed(seed)
        (training, held_out), steps = texts, TUNED if start else STEPS
        model = Model().to(torch.bfloat16).to(device)
        if start:
            model.load_state_dict(start)
        if arm == MIXED:
            model.float()
        optimizer = optimizer_of(arm, param_groups_weight_decay(model, HYPER["weight_decay"]))
        self.losses, begin, trained, marks = [], time.time(), 0.0, []
        for step in range(steps + 1):
            autocast = torch.autocast(device, torch.bfloat16, enabled=arm == MIXED)
            if step % EVERY == 0 or step == steps:
                if device == "cuda":
                    torch.cuda.synchronize()
                if step > EVERY:
                    trained += time.time() - resumed
                with torch.no_grad(), autocast:
                    losses = [loss_of(model, *batch(held_out, 1, -1 - i, device)).item() for i in range(VALIDATION)]
                self.losses.append(sum(losses) / VALIDATION)
                spent = time.time() - begin
                print("%s%-10s seed %d, step %5d of %d: loss %.4f, %4.0f s%s" % (
                    "fine-tuned " if start else "", arm, seed, step, steps, self.losses[-1], spent,
                    ", %.0f more" % (spent * (steps - step) / step) if step else ""), flush=True)
                resumed = time.time()
            if step == steps:
                break
            for group in optimizer.param_groups:
                group["lr"] = TUNING if start else rate(step)
            optimizer.zero_grad()
            with autocast:
                loss = loss_of(model, *batch(training, seed, step, device))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            before = mark(device)
            optimizer.step()
            if step >= EVERY:
                marks.append((before, mark(device)))
        self.weights = {name: x.to(torch.bfloat16) for name, x in model.state_dict().items()}
        self.speed = (steps - EVERY) * BATCH * LENGTH / trained if trained else math.nan
        self.share = sum(between(*pair) for pair in marks) / trained if trained else math.nan
        self.memory = torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else 0.0
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()


def token_file(path, text):
    with open(path, "wb") as file:
        file.write(struct.pack("<3i", 20240520, 1, len(text)) + bytes(1012))
        file.write(struct.pack("<%dH" % len(text), *text))
    return path


def texts_of(name, parts):
    return [tokens_of(token_file("build/%s_%d.bin" % (name, i), part)) for i, part in enumerate(parts)]


def toy():
    """A small model, and tables of powers."""
    global LAYERS, WIDTH, HEADS, LENGTH, TOKENS, STEPS, BATCH, EVERY, VALIDATION, WARM_UP, SEEDS, TUNED
    LAYERS, WIDTH, HEADS, LENGTH, TOKENS, STEPS, BATCH, EVERY, VALIDATION, WARM_UP = 2, 32, 2, 32, 256, 40, 4, 20, 4, 8
    SEEDS, TUNED = (1, 2), 10
    tables = ["".join("%d to the power of %d is %d.\n" % (i, power, i ** power) for i in range(2000)).encode()
              for power in (2, 3)]
    return [texts_of("gpt2_toy_%d" % i, [table] * 2) for i, table in enumerate(tables)]


def bytes_of_python():
    global TOKENS, LENGTH, STEPS, BATCH, WARM_UP, SEEDS, TUNED
    TOKENS, LENGTH, STEPS, BATCH, WARM_UP, SEEDS, TUNED = 256, 256, 1000, 16, 100, (1, 2, 3), 200
    import scale
    return [texts_of("gpt2_" + phase, [bytes(part.flatten().tolist()) for part in scale.blocks(phase)])
            for phase in (scale.TRAIN, scale.TUNE)]


def beside(value, reference):
    """The mean, and with a reference that of the differences with its interval: of values by seed."""
    said = "%.4f | " % (sum(value) / len(value))
    if reference is None or reference is value:
        return said
    apart = [x - y for x, y in zip(value, reference)]
    return said + ("%+.4f ± %.4f" % fidelity.interval(apart) if len(apart) > 1 else "%+.4f" % apart[0])


def main(words):
    if words[:1] == ["toy"]:
        texts, words, device = toy(), words[1:], "cpu"
    elif words[:1] == ["bytes"] and torch.cuda.is_available():
        texts, words, device = bytes_of_python(), words[1:], "cuda"
    elif len(words) >= 2 and torch.cuda.is_available():
        texts, words, device = [list(map(tokens_of, words[:2]))], words[2:], "cuda"
    else:
        sys.exit(__doc__.split("\n\n")[1] + ("" if torch.cuda.is_available() else "\n\ngpt2: PyTorch finds no GPU"))
    if not set(words) <= set(ARMS):
        sys.exit("gpt2: the arms are " + ", ".join(ARMS))
    arms = [arm for arm in ARMS if arm in words or not words and (arm != FLASH or device == "cuda")]
    runs = {arm: [Run(arm, seed, texts[0], device) for seed in SEEDS] for arm in arms}
    tuned = {arm: [Run(arm, seed, texts[1], device, mixed.weights) for seed, mixed in zip(SEEDS, runs[MIXED])]
             for arm in arms if TUNED and MIXED in runs}
    print("\n| arm | loss | minus mixed | fine-tuning | minus mixed | tokens a second | step | GB at most |\n" +
          "|---" * 8 + "|")
    losses = {arm: [run.losses[-1] for run in of] for arm, of in runs.items()}
    fell = {arm: [run.losses[0] - run.losses[-1] for run in of] for arm, of in tuned.items()}
    for arm, of in runs.items():
        print("| %s | %s | %s | %.0f | %.1f %% | %.1f |" % (
            arm, beside(losses[arm], losses.get(MIXED)), beside(fell[arm], fell[MIXED]) if fell else " | ",
            sum(run.speed for run in of) / len(of), 100 * sum(run.share for run in of) / len(of),
            max(run.memory for run in of)))
    print("\nlosses: %s" % hashlib.sha256(repr([[run.losses for run in of] for of in [*runs.values(), *tuned.values()]]
                                               ).encode()).hexdigest()[:16])


if __name__ == "__main__":
    main(sys.argv[1:])
