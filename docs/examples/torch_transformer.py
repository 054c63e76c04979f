"""torch_transformer.py - a small transformer, trained in fp32 and in pure bf16: the losses side by side.

    ./build.sh examples torch_transformer [--steps 100] [--seeds 1] [--width 64] [FILE]

It is a language model on the bytes of a file. In the bf16 runs, weights, gradients, moments and activations are bf16;
nothing is kept in fp32. Each run of a seed has the same initial weights and batches. The loss is that of 64 held-out
batches at the end."""
import argparse
import math
import statistics

import torch
from torch import nn
from torch.nn import functional as F

from kahan_opt import KahanAdamW


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, mask):
        batch, length, width = x.shape
        q, key, v = (a.reshape(batch, length, self.heads, -1).transpose(1, 2)
                     for a in self.qkv(self.norm1(x)).split(width, 2))
        heads = self.attend(q, key, v, mask[:length, :length])
        x = x + self.out(heads.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norm2(x))))

    def attend(self, q, key, v, mask):
        return (q @ key.transpose(2, 3) / math.sqrt(q.shape[-1]) + mask).softmax(3) @ v


class Transformer(nn.Module):
    def __init__(self, width, layers, length):
        super().__init__()
        self.token, self.place = nn.Embedding(128, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, width // 32) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 128)
        self.register_buffer("mask", torch.full((length, length), -1e4).triu(1))
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, text):
        x = self.token(text) + self.place.weight[:text.shape[1]]
        for block in self.blocks:
            x = block(x, self.mask)
        return self.head(self.norm(x))


RUNS = {  # name: dtype and optimizer
    "fp32 AdamW": (torch.float32, torch.optim.AdamW),
    "bf16 KAHAN": (torch.bfloat16, KahanAdamW),
    "bf16 EXACT": (torch.bfloat16, lambda p, **o: KahanAdamW(p, rounding="exact", **o)),
    "bf16 COMPACT": (torch.bfloat16, lambda p, **o: KahanAdamW(p, rounding="compact", **o)),
    "bf16 FEEDBACK": (torch.bfloat16, lambda p, **o: KahanAdamW(p, rounding="feedback", **o)),
    "bf16 FEEDBACK, q8": (torch.bfloat16, lambda p, **o: KahanAdamW(p, rounding="feedback", moment_format="q8", **o)),
    "bf16 STOCHASTIC": (torch.bfloat16, lambda p, **o: KahanAdamW(p, rounding="stochastic", **o)),
    "bf16 torch AdamW": (torch.bfloat16, torch.optim.AdamW),
}


def train(name, text, seed, steps, width, layers=2, length=64, batch=16, lr=1e-3):
    """The loss on held-out text after training, in nats per byte."""
    dtype, optimizer_of = RUNS[name]
    torch.manual_seed(seed)
    model = Transformer(width, layers, length).to(dtype)
    optimizer = optimizer_of(model.parameters(), lr=lr, weight_decay=0.1, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / 20) * (0.1 + 0.45 * (1 + math.cos(math.pi * step / steps))))
    split = len(text) * 9 // 10

    def loss_of(begin, end):
        places = torch.randint(begin, end - length - 1, (batch,)).tolist()
        inputs = torch.stack([text[i:i + length] for i in places])
        targets = torch.stack([text[i + 1:i + length + 1] for i in places])
        return F.cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten())

    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        loss_of(0, split).backward()
        optimizer.step()
        schedule.step()
    torch.manual_seed(1)
    with torch.no_grad():
        return statistics.fmean(loss_of(split, len(text)).item() for _ in range(64))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--runs", nargs="+", default=list(RUNS), choices=list(RUNS))
    parser.add_argument("file", nargs="?", default="kahan_opt.h")
    args = parser.parse_args()
    with open(args.file, "rb") as f:
        text = torch.tensor([min(c, 127) for c in f.read()])
    print("%d steps, width %d, %d seeds: loss on held-out text, nats per byte" % (args.steps, args.width, args.seeds))
    print("%-18s %8s %12s   %s" % ("", "mean", "minus first", "by seed"))
    first = None
    for name in args.runs:
        losses = [train(name, text, seed, args.steps, args.width) for seed in range(args.seeds)]
        first = first or losses
        print("%-18s %8.4f %+12.4f   %s" % (name, statistics.fmean(losses), statistics.fmean(losses) -
                                            statistics.fmean(first), " ".join("%.4f" % x for x in losses)), flush=True)


if __name__ == "__main__":
    main()
