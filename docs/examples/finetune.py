"""finetune.py - fine-tunes a small transformer in pure bf16, from a bf16 checkpoint, and plots the loss beside fp32.

    pip install ./docs/examples/python; pip install torch matplotlib        (without matplotlib: a plot in the terminal)
    python docs/examples/finetune.py [STEPS [FOLDER]]                       a minute; or ./build.sh examples finetune

Each part after a line `# %%` is a cell: editors run them one by one, as in a notebook."""
# %% Settings. The model is that of torch_transformer.py, on bytes: first of the header, then of the documentation
import glob
import sys

import torch
from torch.nn import functional as F

from kahan_opt import KahanAdamW, param_groups_weight_decay
from torch_transformer import Transformer

steps, folder = int((sys.argv[1:] or [100])[0]), (sys.argv[2:] or ["build"])[0]
length, batch, every = 64, 16, 5
code, prose = (torch.tensor([min(c, 127) for name in names for c in open(name, "rb").read()])
               for names in (["kahan_opt.h"], sorted(glob.glob("docs/*.md"))))


def loss_of(model, text, generator):
    places = torch.randint(0, len(text) - length - 1, (batch,), generator=generator).tolist()
    rows = torch.stack([text[i:i + length + 1] for i in places])
    return F.cross_entropy(model(rows[:, :-1]).float().flatten(0, 1), rows[:, 1:].flatten())


def train(name, model, optimizer, text):
    """The losses on held-out text, the last tenth."""
    seen, split, curve = torch.Generator().manual_seed(1), len(text) * 9 // 10, []
    for step in range(steps + 1):
        if step % every == 0:
            held_out = torch.Generator().manual_seed(2)
            with torch.no_grad():
                curve.append(sum(loss_of(model, text[split:], held_out).item() for _ in range(4)) / 4)
            print("\r%-18s step %4d of %d: loss %.3f" % (name, step, steps, curve[-1]), end="", flush=True)
        optimizer.zero_grad()
        loss_of(model, text[:split], seen).backward()
        optimizer.step()
    print()
    return curve


# %% The checkpoint: a model that knows the header, saved in bf16. Nothing of it is in fp32 from here on
torch.manual_seed(0)
model = Transformer(64, 2, length)
train("training in fp32", model, torch.optim.AdamW(model.parameters(), lr=2e-3), code)
torch.save(model.to(torch.bfloat16).state_dict(), folder + "/finetune.pt")

# %% The fine-tuning, three times from this checkpoint: in fp32, in bf16 with KahanAdamW, in bf16 with torch's AdamW
curves = {}
for name, make in (("fp32 torch.AdamW", torch.optim.AdamW), ("bf16 KahanAdamW", KahanAdamW),
                   ("bf16 torch.AdamW", torch.optim.AdamW)):
    model = Transformer(64, 2, length).to(torch.bfloat16)
    model.load_state_dict(torch.load(folder + "/finetune.pt"))
    model = model.float() if "fp32" in name else model
    optimizer = make(param_groups_weight_decay(model, 0.1), lr=2e-4)
    curves[name] = train(name, model, optimizer, prose)
    if make is KahanAdamW:  # the result in fp32, with what bf16 cuts off
        full = {key: optimizer.full_weights(p) for key, p in model.named_parameters()}
        torch.save(dict(model.float().state_dict(), **full), folder + "/finetuned.pt")

# %% The plot
top, low = max(map(max, curves.values())), min(map(min, curves.values()))
try:
    from matplotlib import pyplot
    for name, curve in curves.items():
        pyplot.plot(range(0, steps + 1, every), curve, "--" if "fp32" in name else "-", label=name)
    pyplot.legend(), pyplot.xlabel("step"), pyplot.ylabel("loss, nats per byte")
    pyplot.savefig(folder + "/finetune.png", dpi=150)
    print("the plot is " + folder + "/finetune.png")
except ImportError:
    for name, curve in curves.items():
        print("%-18s %s" % (name, "".join("▁▂▃▄▅▆▇█"[int(7.99 * (x - low) / (top - low))] for x in curve)))
for name, curve in curves.items():
    print("%-18s loss %.4f, minus fp32 %+.4f" % (name, curve[-1], curve[-1] - curves["fp32 torch.AdamW"][-1]))
