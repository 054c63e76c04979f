"""A parameter and its state: tensors of its shape, with the names of torch.optim."""
import ctypes
import math
import struct
import zlib

import torch

from . import header as k
from .options import FORMATS, MOMENTS_OF_ALL, bare, formats_of_group, moments_of

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "q8": torch.uint8}
RESIDUALS = {"kahan": None, "compact": torch.uint8, "exact": torch.int16}  # their dtype; None: that of the weight
BLOCK = 64  # elements of an 8-bit moment that share a scale
OLD_CODES = "its 8-bit moments are those of an earlier version, which are not read: begin with new moments"
KNOWN = {"residual", "slow", "slow_residual"} | {
    name + end for name in MOMENTS_OF_ALL for end in ("", "_root", "_scale")}  # all else in a state is the program's


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


def order(p):
    """The strides of like(p), of which no memory is needed."""
    return torch.empty_like(p, device="meta", requires_grad=False).stride()


def dense(p):
    """p itself, or a copy if p is a view with gaps."""
    return p.detach() if p.is_contiguous() or order(p) == p.stride() else like(p).copy_(p.detach())


def formats_of(group, p):
    """The formats of the first and second moment. 8 bits are for contiguous tensors whose rows are whole blocks, so
    that shards have the codes of the whole tensor. The moments of others are bf16."""
    whole = in_rows(p) and local(p).is_contiguous()
    return tuple("bf16" if word == "q8" and not whole else word for word in formats_of_group(group, p.dtype))


def in_rows(p):
    """Are the rows of p whole blocks?"""
    return p.ndim > 0 and p.numel() > 0 and p.numel() // p.shape[0] % BLOCK == 0


def tensors_of(group, p, formats):
    """The tensors of a state, in the order of a checkpoint: (name, field of kopt_state_arrays, place in it, dtype).
    Their names say what they hold: a root is not a mean of squares."""
    kept = []
    if p.dtype != torch.float32 and group["rounding"] in RESIDUALS:
        kept = [RESIDUALS[group["rounding"]] or p.dtype]
    found = [("residual", "residual", None, dtype) for dtype in kept]
    for slot, name in moments_of(group):
        word, square = formats["_sq" in name], "_sq" in name
        root = "_root" if square and word in ("fp16", "q8") else ""
        found.append((name + root, "moment", slot - 1, DTYPES[word]))
        if word == "q8":
            found.append((name + "_scale", "scale", slot - 1, torch.uint8))
    if group["rule"] == "ranger":
        found.append(("slow", "slow", None, p.dtype))
        found += [("slow_residual", "slow_residual", None, dtype) for dtype in kept]
    return found


def zeros(p, field, dtype):
    """A tensor of a state. Scales lie in rows beside the rows of their codes, so they are cut and joined with them."""
    p = p.detach()
    if field == "scale":
        p = p.reshape(p.shape[0], -1)[:, :p.numel() // p.shape[0] // BLOCK]
    return torch.zeros_like(p, dtype=dtype)


def point(arrays, table, tensors):
    """Sets the addresses in a kopt_state_arrays."""
    for (_, field, place, _), x in zip(table, tensors):
        if place is None:
            setattr(arrays, field, x.data_ptr())
        else:
            getattr(arrays, field)[place] = x.data_ptr()


class Host:
    """A parameter and its state in the memory of the host, for the functions that read and write state. What a program
    has made of the options of its group does not matter, but for those that say what there is."""

    def __init__(self, group, p, s, formats=None, number=0):
        formats = formats or formats_of(group, p)
        self.p, self.weight, self.opt = local(p), dense(local(p)).cpu(), bare(group, p.dtype, formats)
        self.table, self.arrays = tensors_of(group, p, formats), k.kopt_state_arrays(k.sizeof(k.kopt_state_arrays))
        self.theirs = [local(s[name]) for name, _, _, _ in self.table]
        self.ours, self.rates = [x.cpu() for x in self.theirs], torch.zeros(4)
        point(self.arrays, self.table, self.ours)
        self.arrays.rates = self.rates.data_ptr()
        self.t = k.kopt_tensor(weight=self.weight.data_ptr(), weight_format=FORMATS[p.dtype], n=self.p.numel(),
                               id=number, first_index=first_index(p), arrays=k.pointer(self.arrays))

    def read(self, slot):
        values = like(self.weight, torch.float32)
        k.check(k.kopt_state_read(self.opt, self.t, slot, values.data_ptr()))
        return values

    def write(self, slot, values):
        """The parameter or its state gets these values."""
        values = like(self.weight, torch.float32).copy_(local(values))
        k.check(k.kopt_state_write(self.opt, self.t, slot, values.data_ptr()))
        if slot == k.KOPT_SLOT_WEIGHT and self.weight.data_ptr() != self.p.data_ptr():
            self.p.detach().copy_(self.weight)
        self.back()

    def draw(self):
        """Draws the residual."""
        k.check(k.kopt_state_dither(self.opt, self.t, 1))
        self.back()

    def back(self):
        for ours, theirs in zip(self.ours, self.theirs):
            if ours.data_ptr() != theirs.data_ptr():
                theirs.copy_(ours)


def pays_back(group, p):
    """Is its state to have the rate of its last step? (KOPT_FEEDBACK)"""
    return group["rounding"] == "feedback" and p.dtype != torch.float32


def begun(group, p):
    """The state of a parameter before its first step."""
    s = {"step": 0}
    if pays_back(group, p):
        s["rate"] = torch.zeros((), device=p.device)
    s.update((name, zeros(p, field, dtype)) for name, field, _, dtype in tensors_of(group, p, formats_of(group, p)))
    if "slow" in s:
        s["slow"].copy_(p.detach())
    return s


def forget_residual(p, s):
    """p has a value that a program has written."""
    if "residual" in s:
        local(s["residual"]).zero_()
        if "slow" in s:
            local(s["slow_residual"]).zero_()
            local(s["slow"]).copy_(local(p).detach())


# ---- what others have made of a state --------------------------------------------------------------------------------


def stored_as(s, group):
    """The formats of the first and second moment of a state that is there."""
    words = {dtype: word for word, dtype in DTYPES.items()}
    found = [None, None]
    for _, name in moments_of(group):
        root, x = s.get(name + "_root"), s.get(name + "_root", s.get(name))
        rooted = root is not None and root.is_floating_point()
        found["_sq" in name] = "fp16" if rooted else None if x is None else words.get(x.dtype)
    return tuple(word or other or "f32" for word, other in zip(found, found[::-1]))


def fitted(group, p, s):
    """The state as a step takes it, from what a program, load_state_dict(), torch.optim or an earlier version has put
    there: its tensors themselves, where they fit. ValueError: what is wrong with it."""
    s = opened(group, p, s) if any(name.startswith("block") for name in s) else dict(s)
    for name, x in s.items():  # torch's mean of squares in fp16 is no root; float64
        if name in MOMENTS_OF_ALL and isinstance(x, torch.Tensor) and x.is_floating_point():
            if x.dtype == torch.float64 or x.dtype == torch.float16 and "_sq" in name:
                s[name] = x.float()
    if any(name.endswith("_scale") and name in KNOWN and x.is_floating_point() for name, x in s.items()):
        raise ValueError(OLD_CODES)
    formats, have = formats_of(group, p), {name for name, x in s.items() if name in KNOWN and x is not None}
    there = stored_as(s, group)
    table = tensors_of(group, p, there)
    want, uncounted = {row[0] for row in table}, group["rule"] in ("sgd", "lion")  # by some of those who write states
    optional = {"momentum_buffer"} if group["rule"] == "sgd" else set()  # a momentum may be scheduled from 0, or to 0
    if want - have - {"residual"} - optional or have - want - optional or "step" not in s and not uncounted:
        raise ValueError("it has %s, but should have step, %s (rounding=%r: another one needs a new optimizer, which "
                         "loads the moments of torch_state_dict())" % (
                             ", ".join(sorted(have | {"step"} & s.keys())) or "nothing",
                             ", ".join(row[0] for row in table), group["rounding"]))
    result = dict(s, step=int(s.get("step", 1)))  # what is not counted has been stepped
    result.pop("rate", None)
    if pays_back(group, p):  # moments of another rounding owe nothing, whatever the rate is
        result["rate"] = torch.as_tensor(s.get("rate", math.inf), dtype=torch.float32, device=p.device)
    codes = [s[name] for name, field, _, dtype in table if field == "moment" and dtype == torch.uint8]
    # scales go by the order that the codes have in memory
    other = codes and order(local(codes[0])) != order(local(p))
    coded = torch.empty_like(codes[0].detach(), dtype=p.dtype) if other else p
    for name, field, _, dtype in table:
        if name not in have or name == "residual" and s[name].shape != p.shape:  # a program cuts and joins moments only
            result[name] = zeros(p, field, dtype)
        else:
            model = zeros(p, field, dtype) if field == "scale" else coded if field == "moment" else p
            result[name] = placed(name, s[name], model, dtype, p.device)
    if tensors_of(group, p, formats) == table and order(local(coded)) == order(local(p)):
        return result
    other = dict(begun(group, p), **{
        name: x for name, x in result.items() if name not in KNOWN or not name.startswith(MOMENTS_OF_ALL)})
    old, new = Host(group, coded, result, there), Host(group, p, other, formats)
    for slot, _ in moments_of(group):
        new.write(slot, old.read(slot))
    return other


def placed(name, x, model, dtype, device):
    """A tensor of a state with the dtype and device that a step takes, and the order in memory of a model: x itself, if
    it has them."""
    if x.shape != model.shape:
        raise ValueError("%s has the shape %s, not %s" % (name, tuple(x.shape), tuple(model.shape)))
    if hasattr(x, "to_local") != hasattr(model, "to_local"):
        raise ValueError("%s and the parameter are not both DTensors" % name)
    if x.dtype != dtype and not (x.is_floating_point() and dtype.is_floating_point):
        raise ValueError("%s is %s, but %s is needed" % (name, x.dtype, dtype))
    x = x.detach().to(device, dtype) if (x.dtype, x.device) != (dtype, device) or x.requires_grad else x
    same = local(x).stride() == order(local(model))
    return x if same else torch.zeros_like(model.detach(), dtype=dtype, device=device).copy_(x)


def opened(group, p, s):
    """The state from a block of the versions before 0.9: the 64 bytes and the arrays of docs/numerics.md, section 8c,
    with the CRC-32 of all of it in bytes 44 to 47."""
    name = "block_at_%d" % first_index(p) if is_sharded(p) else "block"
    if name not in s and "block" not in s:
        raise ValueError("it has %s, but %s is needed: it is the shard of another rank, or of another number of ranks"
                         % (", ".join(name for name in s if name.startswith("block")), name))
    block, n = s.get(name, s.get("block")).to("cpu", torch.uint8).contiguous(), local(p).numel()
    result = {name: x for name, x in s.items() if not name.startswith("block") and name not in ("id", "sealed")}
    data = ctypes.string_at(block.data_ptr(), block.numel())
    if not data:
        return result
    if len(data) < 64 or zlib.crc32(data[:44] + bytes(4) + data[48:]) != int.from_bytes(data[44:48], "little"):
        raise ValueError("its block is damaged, or was not sealed")
    (rule, dtype, rounding, form, moments), (size,), (place,), (step,) = (
        struct.unpack_from(form, data, at) for form, at in (("5B", 5), ("<Q", 16), ("<Q", 24), ("<I", 40)))
    opt, rounded = bare(group, p.dtype, ("f32", "f32")), p.dtype != torch.float32
    for what, have, want in (
            ("rule", rule, opt.rule), ("dtype", dtype, FORMATS[p.dtype]), ("elements", size, n),
            ("rounding", rounding & 15, opt.rounding * rounded), ("place", place, first_index(p)),
            ("step", step, s["step"]), ("number of moments", moments & 7, len(moments_of(group)))):
        if have != want:
            raise ValueError("its block has %s %d, but %d is needed" % (what, have, want))
    if form > 2:
        raise ValueError(OLD_CODES)
    at, form = 64, ("f32", "bf16", "fp16")[form]
    for name, field, _, dtype in tensors_of(group, p, (form, form)):
        x = result[name] = zeros(p, field, dtype)
        size = local(x).numel() * x.element_size()
        memory = block[at:at + size].view(dtype)
        local(x).copy_(memory.as_strided(local(x).shape, local(x).stride()))
        at += -(-size // 4) * 4
    return result
