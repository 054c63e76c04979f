"""The tables of docs/distributed.md: bytes on the wire and in memory when the optimizer's state is divided among ranks.

    python3 docs/distributed.py                      prints the tables
    python3 docs/distributed.py RANKS STATE CODE M   prints what zero1 should measure, with M micro-batches in a batch
"""
import sys

# Bytes per parameter of AdamW's state (what stays with the owner of the shard) and of a checkpoint with its weights.
MOMENT8 = 1 + 4 / 256  # a code, and a scale per 256
STATES = {
    "fp32 masters, bf16 weights": (4 + 8, 4 + 8),
    "bf16 `KOPT_KAHAN`": (2 + 4, 2 + 2 + 4),
    "bf16 `KOPT_COMPACT`": (1 + 4, 2 + 1 + 4),
    "bf16 `KOPT_COMPACT`, 8-bit moments": (1 + 2 * MOMENT8, 2 + 1 + 2 * MOMENT8),
}
CODES = {"fp32": 4, "bf16": 2, "q8": 1 + 4 / 256, "sign": 1 / 8 + 4 / 256}
WEIGHT = GRADIENT = RESIDUAL = 2  # bf16; RESIDUAL: of error feedback
SUM = 4  # the gradient of the shard, in fp32

# (parameters, ranks that divide the model, ranks that divide the state)
CLUSTERS = [(1e9, 1, 8), (1e11, 8, 128), (1e12, 1000, 10)]


def received(code, ranks, micro_batches=None, weight=WEIGHT):
    """Bytes per parameter that a rank receives in a step: its shard of all gradients, and all other shards of weights.
    The mean of the ranks. micro_batches: in a batch, of which each rank has its part; None: one for each rank."""
    rounds = 1 if micro_batches is None else micro_batches / ranks
    return (rounds * CODES[code] + weight) * (ranks - 1) / ranks


def zero1(state, ranks, compressed):
    """Bytes per parameter on each rank: weights and gradients whole, the sum and the state divided."""
    return WEIGHT + GRADIENT + compressed * RESIDUAL + (SUM + STATES[state][0]) / ranks


def number(x, digits=3):
    """`digits` significant digits, without an exponent."""
    text = "%.*g" % (digits, x)
    return text if "e" not in text else "%d" % round(x)


def row(*cells):
    print("| " + " | ".join(cells) + " |")


def head(*cells):
    row(*cells)
    print("|" + "---|" * len(cells))


def power(n):
    return "10^%d" % round(len("%d" % n) - 1)


def cluster(n, parts, ranks):
    return "%s on %s" % (power(n), "%d" % ranks if parts == 1 else "%d x %d" % (parts, ranks))


def tables():
    print("GB that a rank receives in a step:\n")
    head("", "bytes per parameter", *[cluster(*c) for c in CLUSTERS])
    for name, code, weight in (("all-reduce of fp32 gradients, no shards", "fp32", 4),
                               ("fp32 masters, fp32 gradients", "fp32", 2), ("bf16 gradients", "bf16", 2),
                               ("gradients of 8 bits (`KOPT_Q8`)", "q8", 2),
                               ("gradients of 1 bit (`KOPT_Q1`)", "sign", 2)):
        row(name, number(CODES[code] + weight, 4), *[number(received(code, d, None, weight) * n / p / 1e9)
                                                     for n, p, d in CLUSTERS])
    print("\nGB on each rank, D ranks divide the state:\n")
    head("", "bytes per parameter", *[cluster(*c) for c in CLUSTERS])
    for state in STATES:
        for compressed in (0, 1):
            if compressed and "8-bit" not in state:
                continue
            whole = WEIGHT + GRADIENT + compressed * RESIDUAL
            row(state + (", error feedback" if compressed else ""),
                "%d + %s / D" % (whole, number(SUM + STATES[state][0], 4)),
                *[number(zero1(state, d, compressed) * n / p / 1e9) for n, p, d in CLUSTERS])
    print("\nBytes per parameter, of all ranks together, when weights and gradients are divided, too (ZeRO-3, FSDP):\n")
    head("", "in memory", "in a checkpoint")
    for state, (kept, saved) in STATES.items():
        row(state, number(WEIGHT + GRADIENT + kept), number(saved, 4))


if __name__ == "__main__":
    if len(sys.argv) == 1:
        tables()
    else:
        ranks, state, code, micro_batches = int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
        name = [s for s in STATES if s.endswith(state)][0]
        print("%.4f %.4f %.4f" % (WEIGHT + GRADIENT, (SUM + STATES[name][0]) / ranks,
                                  received(code, ranks, micro_batches)))
