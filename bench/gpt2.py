"""GPT-2 of 124 million parameters from llm.c's token files: the steps of this library beside mixed precision. For one
GPU and an hour.

    ./build.sh python cuda
    PYTHONPATH=build/python python3 bench/gpt2.py TRAIN.bin VALIDATION.bin [ARM...]    arms: see below; all by default
    PYTHONPATH=build/python python3 bench/gpt2.py bytes [ARM...]    150 steps on 6 MB of bytes: half a minute for each
    PYTHONPATH=build/python python3 bench/gpt2.py toy [ARM...]      a toy on the CPU, in seconds

The files are those of llm.c's dev/data: 256 words of 32 bits (20240520, 1, number of tokens, zeros), then tokens of 16
bits. Architecture, initial weights, betas, decay and clipping are llm.c's for this model; the batch is smaller, so that
an hour has enough steps, and is one micro-batch, so that no gradients are summed in 16 bits. All arms begin at the same
bf16 numbers and see the same batches. Prints the losses, a table, and the hash of the losses. The bytes
are those of bench/scale.py, Python's standard library; each tenth block of 4096 is held out. The arm flashoptim needs
the package of this name. All that could be tuned was fixed before the first run:"""
LAYERS, WIDTH, HEADS, LENGTH, TOKENS = 12, 768, 12, 1024, 50257
STEPS, BATCH, EVERY, VALIDATION = 3000, 32, 250, 20  # EVERY so many steps: the loss of VALIDATION batches
HYPER = {"lr": 6e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
WARM_UP, CLIP, SEED = 256, 1.0, 1

import hashlib
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

MIXED, NEAREST, FLASH = "mixed", "nearest", "flashoptim"
ARMS = {MIXED: None, "kahan": {"rounding": "kahan"}, "stochastic": {"rounding": "stochastic"},
        "compact8": {"rounding": "compact", "moment_format": "q8"},
        NEAREST: {"rounding": "nearest", "moment_rounding": "nearest"}}


def tokens_of(path):
    with open(path, "rb") as file:
        magic, version, count = struct.unpack("<3i", file.read(1024)[:12])
    if (magic, version) != (20240520, 1) or os.path.getsize(path) != 1024 + 2 * count:
        sys.exit("gpt2: %s is not a token file of llm.c, or is cut off" % path)
    return torch.from_file(path, False, 512 + count, dtype=torch.int16)[512:]  # mapped; 50256 is negative


def batch(tokens, number, device):
    """Batch `number` of a random order of places that is the same for all arms."""
    generator = torch.Generator().manual_seed(SEED * 1000003 + number)
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


def train(arm, training, validation, device):
    torch.manual_seed(SEED)
    model = Model().to(torch.bfloat16).to(device)
    if arm == MIXED:
        model.float()
    groups = param_groups_weight_decay(model, HYPER["weight_decay"])
    optimizer = optimizer_of(arm, groups)
    losses, begin, trained = [], time.time(), 0.0  # trained: seconds of the steps from number EVERY on
    for step in range(STEPS + 1):
        autocast = torch.autocast(device, torch.bfloat16, enabled=arm == MIXED)
        if step % EVERY == 0 or step == STEPS:
            if device == "cuda":
                torch.cuda.synchronize()
            if step > EVERY:
                trained += time.time() - resumed
            with torch.no_grad(), autocast:
                held_out = [loss_of(model, *batch(validation, -1 - i, device)).item() for i in range(VALIDATION)]
            losses.append(sum(held_out) / VALIDATION)
            spent = time.time() - begin
            print("%-10s step %5d of %d: loss %.4f, %4.0f s%s" % (arm, step, STEPS, losses[-1], spent, "" if not step
                  else ", %.0f more" % (spent * (STEPS - step) / step)), flush=True)
            resumed = time.time()
        if step == STEPS:
            break
        falling = 0.5 * (1 + math.cos(math.pi * (step - WARM_UP) / (STEPS - WARM_UP)))
        for group in optimizer.param_groups:
            group["lr"] = HYPER["lr"] * min((step + 1) / WARM_UP, falling if step > WARM_UP else 1)
        optimizer.zero_grad()
        with autocast:
            loss = loss_of(model, *batch(training, step, device))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
    memory = torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else 0.0
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    return losses, (STEPS - EVERY) * BATCH * LENGTH / trained, memory


def token_file(path, text):
    with open(path, "wb") as file:
        file.write(struct.pack("<3i", 20240520, 1, len(text)) + bytes(1012))
        file.write(struct.pack("<%dH" % len(text), *text))
    return path


def toy():
    """A small model, and a token file of the bytes of this library."""
    global LAYERS, WIDTH, HEADS, LENGTH, TOKENS, STEPS, BATCH, EVERY, VALIDATION, WARM_UP
    LAYERS, WIDTH, HEADS, LENGTH, TOKENS, STEPS, BATCH, EVERY, VALIDATION, WARM_UP = 2, 32, 2, 32, 256, 40, 8, 20, 4, 8
    with open("kahan_opt.h", "rb") as file:
        path = token_file("build/gpt2.bin", file.read())
    return path, path


def bytes_of_python():
    global STEPS, EVERY, WARM_UP
    STEPS, EVERY, WARM_UP = 150, 50, 15
    sys.path.append("bench")
    import scale
    parts = scale.blocks(scale.TRAIN)
    print("text: %s" % hashlib.sha256(scale.text(scale.TRAIN)).hexdigest()[:16])
    return [token_file("build/gpt2_%d.bin" % i, bytes(part.flatten().tolist())) for i, part in enumerate(parts)]


def main(words):
    if words[:1] == ["toy"]:
        files, words, device = toy(), words[1:], "cpu"
    elif words[:1] == ["bytes"] and torch.cuda.is_available():
        files, words, device = bytes_of_python(), words[1:], "cuda"
    elif len(words) >= 2 and torch.cuda.is_available():
        files, words, device = words[:2], words[2:], "cuda"
    else:
        sys.exit(__doc__.split("\n\n")[1] + ("" if torch.cuda.is_available() else "\n\ngpt2: PyTorch finds no GPU"))
    if not set(words) <= {*ARMS, FLASH}:
        sys.exit("gpt2: the arms are " + ", ".join([*ARMS, FLASH]))
    training, validation = map(tokens_of, files)
    rows = {arm: train(arm, training, validation, device) for arm in words or ARMS}
    reference = rows.get(MIXED, ([math.nan],))[0][-1]
    print("\n| arm | loss | minus mixed precision | tokens a second | GB at most |\n|---|---|---|---|---|")
    for arm, (losses, speed, memory) in rows.items():
        minus = "" if math.isnan(reference) else "%+.4f" % (losses[-1] - reference)
        print("| %s | %.4f | %s | %.0f | %.1f |" % (arm, losses[-1], minus, speed, memory))
    print("\nlosses: %s" % hashlib.sha256(repr([rows[arm][0] for arm in rows]).encode()).hexdigest()[:16])


if __name__ == "__main__":
    main(sys.argv[1:])
