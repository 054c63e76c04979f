"""A parameter and its state: the block of the library, and its form in state_dict()."""
import ctypes
import struct
import zlib

import torch

from . import header as k
from .options import FORMATS, RULES, WORDS, make

def on_device(x, device):
    return x.to(device)


def local(p):
    """p itself, or what this rank has of a DTensor."""
    return p.to_local() if hasattr(p, "to_local") else p


def is_sharded(p):
    return any(not place.is_replicate() for place in getattr(p, "placements", ()))


def first_index(p):
    """The place in a DTensor of this rank's first element, so that shards draw the random bits of their elements."""
    if not is_sharded(p):
        return 0
    cuts = [dim for dim, place in enumerate(p.placements) if not place.is_replicate()]
    if len(cuts) > 1 or not p.placements[cuts[0]].is_shard(0):
        raise TypeError("a DTensor of shape %s has the placements %s: only shards of dimension 0, over one dimension "
                        "of the mesh, are consecutive elements" % (tuple(p.shape), p.placements))
    rows, mesh = max(p.shape[0], 1), p.device_mesh
    return min(mesh.get_local_rank(cuts[0]) * -(-rows // mesh.size(cuts[0])), rows) * (p.numel() // rows)


def like(p, dtype=None):
    """A tensor without gaps, in the order that p has in memory. This is also the order of the state."""
    return torch.empty_like(p, dtype=dtype, requires_grad=False)


def dense(p):
    """p itself, or a copy if p is a view with gaps."""
    return p.detach() if p.is_contiguous() or like(p).stride() == p.stride() else like(p).copy_(p.detach())


def tensor_of(weight, number, first, block):
    """The kopt_tensor of a weight on the host."""
    return k.kopt_tensor(weight=weight.data_ptr(), weight_format=FORMATS[weight.dtype], n=weight.numel(), id=number,
                         first_index=first, state=block.data_ptr(), state_size=block.numel())


def bytes_of_state(opt, dtype, n):
    return k.kopt_state_size(opt, k.kopt_tensor(weight_format=FORMATS[dtype], n=n))


class Host:
    """A parameter and its state in the memory of the host, for the functions that read and write state. The options are
    those that the block has in its header, so it does not matter what has become of its group."""

    def __init__(self, group, p, s):
        self.p, self.s = local(p), s
        self.weight, self.block = dense(self.p).cpu(), s["block"].cpu()
        self.opt = k.kopt_optimizer()
        if k.kopt_inspect(self.block.data_ptr(), self.block.numel(), self.opt, None, None) != k.KOPT_OK:
            self.opt = make(group, p.dtype)
        self.opt.step, self.opt.max_lr = s["step"], self.opt.max_lr or 1.0
        self.opt.beta1, self.opt.beta2 = (min(beta, 1 - 2.0 ** -24) for beta in (self.opt.beta1, self.opt.beta2))
        self.t = tensor_of(self.weight, s["id"], first_index(p), self.block)

    def read(self, slot):
        values = like(self.weight, torch.float32)
        k.check(k.kopt_state_read(self.opt, self.t, slot, values.data_ptr()))
        return values

    def write(self, slot, values):
        """The parameter and its state get these values."""
        values = like(self.weight, torch.float32).copy_(local(values))
        k.check(k.kopt_state_write(self.opt, self.t, slot, values.data_ptr()))
        if self.weight.data_ptr() != self.p.data_ptr():
            self.p.detach().copy_(self.weight)
        if self.s["block"].data_ptr() != self.block.data_ptr():
            self.s["block"].copy_(self.block)


def begun(group, p, number):
    """The state of a parameter before its first step. number: its id, which selects its random bits."""
    opt = make(group, p.dtype)
    size = bytes_of_state(opt, p.dtype, local(p).numel())
    s = {"step": 0, "id": number, "block": torch.zeros(size, dtype=torch.uint8)}
    host = Host(group, p, s)
    k.check(k.kopt_state_init(opt, host.t, 1, None))
    if group.get("residual") == "random":  # an earlier version has none
        k.check(k.kopt_state_dither(opt, host.t, 1))
    s["block"] = on_device(s["block"], p.device)
    return s


# A state in state_dict() is what kopt_save() writes of its tensor: the header, then the arrays of the block, without
# the weights between them; bytes 44 to 47 of the header get the CRC-32 of all of it. docs/numerics.md, section 8c.
HEADER = struct.Struct("<4s8BIQQQII16s")
CHECKSUM = slice(44, 48)


def raw(tensor):
    """The bytes of a tensor on the CPU, where they are."""
    array = ctypes.c_ubyte * (tensor.numel() * tensor.element_size())
    return memoryview(array.from_address(tensor.data_ptr())).cast("B")


def checksum(block):
    return zlib.crc32(raw(block)[48:], zlib.crc32(bytes(4), zlib.crc32(raw(block)[:44]))).to_bytes(4, "little")


def places(opt, t):
    """In the checkpoint of one tensor: where its header begins, where the arrays behind its weights do, and the end."""
    head, weights = k.kopt_save_size(opt, None, 0) - 4, k.kopt_format_size(t.weight_format, t.n)
    return head, head + HEADER.size + -(-weights // 4) * 4, k.kopt_save_size(opt, t, 1)


def checkpoint_of(opt, t):
    data = torch.empty(k.kopt_save_size(opt, t, 1), dtype=torch.uint8)
    k.check(k.kopt_save(opt, t, 1, data.data_ptr(), data.numel()))
    return data


def seal(opt, t):
    """The state of a tensor for state_dict()."""
    data, (head, arrays, _) = checkpoint_of(opt, t), places(opt, t)
    block = torch.cat([data[head:head + HEADER.size], data[arrays:-4]])
    raw(block)[CHECKSUM] = checksum(block)
    return block


def unseal(opt, t, block):
    """Fills the state of a tensor from what seal() has made. False: it is damaged, or of another version."""
    k.check(k.kopt_state_init(opt, t, 1, None))
    data, (head, arrays, _) = checkpoint_of(opt, t), places(opt, t)
    if checksum(block) != raw(block)[CHECKSUM] or raw(block)[:5] != raw(data)[head:head + 5]:
        return False
    data[arrays:-4] = block[HEADER.size:]
    raw(data)[-4:] = zlib.crc32(b"\0", zlib.crc32(raw(data)[:-4])).to_bytes(4, "little")
    k.check(k.kopt_load(opt, t, 1, data.data_ptr(), data.numel()))
    return True


def described(block, sealed=False):
    """What the header of a block says, in words; nothing, if it is none."""
    opt, t = k.kopt_optimizer(), k.kopt_tensor()
    if block.numel() < HEADER.size or sealed and raw(block)[:4] != b"KOPT":
        return {}
    if not sealed:
        if (k.kopt_inspect(block.data_ptr(), block.numel(), opt, None, None) != k.KOPT_OK or
                k.kopt_inspect_tensor(block.data_ptr(), block.numel(), k.byref(k.c_uint64()), t) != k.KOPT_OK):
            return {}
    else:
        (_, _, opt.rule, t.weight_format, rounding, moments, count, _, _, t.id, t.n, t.first_index, _, opt.step,
         _, _) = HEADER.unpack(raw(block)[:HEADER.size])
        opt.rounding, opt.first_moment_format = rounding & 15, 3 if moments == 4 else moments
        opt.amsgrad = opt.rule == k.KOPT_RULE_ADAM and count & 7 == 3
        opt.momentum = opt.rule == k.KOPT_RULE_SGD and count & 7
    rules = {code: name for name in RULES for code in [getattr(k, "KOPT_RULE_" + name.upper(), None)]}
    dtypes = {code: dtype for dtype, code in FORMATS.items()}
    words = {"rule": rules.get(opt.rule), "dtype": dtypes.get(t.weight_format), "elements": t.n, "id": t.id,
             "first_index": t.first_index, "amsgrad": bool(opt.amsgrad), "momentum": opt.momentum > 0}
    words.update((name, dict(enumerate(WORDS[name])).get(code))
                 for name, code in (("rounding", opt.rounding), ("moment_format", opt.first_moment_format)))
    return dict(words, step=opt.step) if sealed else words


def difference(group, p, s, sealed=False):
    """How a block differs from that which the parameter would get in this group, in words; "" if they agree."""
    opt, block, has = make(group, p.dtype), s["block"][:HEADER.size].cpu(), s["block"].numel()
    t = k.kopt_tensor(weight_format=FORMATS[p.dtype], n=local(p).numel(), id=s["id"], first_index=first_index(p))
    size, (_, arrays, end) = k.kopt_state_size(opt, t), places(opt, t)
    if size and sealed:
        size = end - 4 - arrays + HEADER.size
    if not size or not has:
        return "" if has == size else "it has %d bytes, but %d are needed" % (has, size)
    small, weight = torch.zeros(bytes_of_state(opt, p.dtype, 1), dtype=torch.uint8), torch.zeros(1, dtype=p.dtype)
    k.check(k.kopt_state_init(opt, tensor_of(weight, s["id"], t.first_index, small), 1, None))
    have, want = described(block, sealed), dict(described(small), elements=t.n, bytes=size)
    have["bytes"] = has
    return ", ".join("it has %s %s, but %s is needed" % (name, have[name], want[name])
                     for name in want if name in have and have[name] != want[name])


def block_name(p):
    """The key of a block in state_dict(). Each rank has its own shard of a DTensor's state, so its own key: of values
    with the same key torch.distributed.checkpoint saves one."""
    return "block_at_%d" % first_index(p) if is_sharded(p) else "block"


def is_saved(s):
    """Does an entry of state_dict() have a block, or moments of torch.optim?"""
    return any(name.startswith("block") for name in s)


def opened(group, p, number, s):
    """The state of a parameter from its entry in state_dict(). ValueError: what is wrong with it."""
    if "block" not in s and block_name(p) not in s:
        raise ValueError("it has %s, but %s is needed: it is the shard of another rank, or of another number of ranks"
                         % (", ".join(name for name in s if name.startswith("block")), block_name(p)))
    s = dict(s, block=s.get(block_name(p), s.get("block")))
    # load_state_dict() has converted the bytes to the dtype of the parameter, which is exact
    result = {"step": int(s["step"]), "id": number, "block": s["block"].to("cpu", torch.uint8)}
    opt, n, step = make(group, p.dtype), local(p).numel(), described(result["block"], sealed=True).get("step")
    block, weight = torch.zeros(bytes_of_state(opt, p.dtype, n), dtype=torch.uint8), torch.zeros(n, dtype=p.dtype)
    t = tensor_of(weight, number, first_index(p), block)
    fault = difference(group, p, result, sealed=True)
    if not fault and block.numel() and not unseal(opt, t, result["block"]):
        fault = "it is damaged, or was not sealed"
    if not fault and step not in (None, result["step"]):
        fault = "its step is %d, not %d" % (step, result["step"])
    if fault:
        raise ValueError(fault)
    return dict(result, block=on_device(block, p.device))
