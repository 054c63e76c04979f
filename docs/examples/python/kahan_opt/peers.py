"""States of optimi, FlashOptim, bitsandbytes and torchao for load_state_dict(), with the names of torch.optim."""
import torch

from . import header as k
from .options import RULES
from .state import Host, like, local

OPTIONS = "setup torch_init adam_wd kahan_sum decouple_lr decouple_wd beta1 beta2 beta3 step".split()  # of optimi


def options_of(group, now):
    """Gives the options of a saved group their names here. Returns what its states need to be read."""
    betas = [group[name] for name in ("beta1", "beta2", "beta3") if name in group]
    context = betas, group.get("step", 1), group.get("master_bytewidth")
    if "kahan_sum" in group:
        optimis = {name: group.pop(name) for name in OPTIONS if name in group}
        decoupled = optimis.get("decouple_wd", now["decay_mode"] != "l2")
        group["decay_mode"] = "fully_decoupled" if optimis["decouple_lr"] else "decoupled" if decoupled else "l2"
        group.update({"betas": tuple(betas)} if betas else {})
        group.update({"dampening": group["momentum"] * group["dampening"]} if "dampening" in group else {})
    if "betas" in group and "momentum" in now:  # SGD of bitsandbytes
        group["momentum"] = group["betas"][0]
    for name in {"betas", "eps"} & group.keys() - now.keys():
        del group[name]
    return context


def scaled(values, scales, block):
    return (values.flatten() * scales.flatten().float().repeat_interleave(block)[:values.numel()]).view_as(values)


def state_of(context, group, p, s):
    """(state, what its residual adds to the parameter, which must have its values, or None)"""
    (betas, count, width), s, extra = context, dict(s), None
    s.update(s.pop("__bnb_optimizer_quant_state__", {}))
    for name, x in list(s.items()):
        if hasattr(x, "codes") and hasattr(x, "scale"):  # torchao
            s[name] = x.dequantize().float()
        elif name.endswith("::quantized"):  # FlashOptim: int8 is soft-signed, uint8 are roots
            signed, name = s.pop(name).dtype == torch.int8, name.split(":")[0]
            y = x.float() / (127 if signed else 255)
            y = scaled(y / (2 - y.abs()) if signed else y, s.pop(name + "::scales"), 32)
            s[name] = y if signed else y * y
        elif name in ("state1", "state2"):  # bitsandbytes
            scales, table = s.pop("absmax" + name[-1], None), s.pop("qmap" + name[-1], None)
            if x.dtype == torch.uint8:
                if scales is None or table is None:
                    raise ValueError("%s has 8 bits, but no blocks with absmax and qmap" % name)
                block = 1 << (-(-x.numel() // scales.numel()) - 1).bit_length()  # the last one may be shorter
                x = scaled(table.float()[x.long()], scales, block if scales.numel() > 1 else x.numel())
            s[RULES[group["rule"]][2][int(name[-1]) - 1]] = x
            del s[name]
    if "error_bits" in s:  # FlashOptim: in parts of half an ulp
        bits, mantissa, least = (s.pop("error_bits"),) + ((7, -126) if p.dtype == torch.bfloat16 else (10, -14))
        bits = bits.view(torch.int16) if width == 4 and bits.dtype == p.dtype else bits
        exponent = (torch.frexp(local(p).detach().float())[1] - 1).clamp(min=least).masked_fill_(local(p) == 0, least)
        extra = torch.ldexp(bits.to(p.device).float() / (32767 if width == 4 else 127), exponent - mantissa - 1)
    if "kahan_comp" in s:  # optimi, whose averages are corrected
        x, step = s.pop("kahan_comp"), int(s.get("step", count))
        s["step"], extra = step, x.float() if x is not None and x.shape == p.shape else None
        if group["rule"] not in ("sgd", "lion"):
            for name, beta in zip(("exp_avg", "exp_avg_diff", "exp_avg_sq")[::4 - len(betas)], betas):
                s[name] = (s[name].double() * (1 - beta ** step)).float()
        if "prev_grad" in s:
            s["prev_grad"] = -s["prev_grad"]
        if group["rule"] == "sgd":
            s["momentum_buffer"] = s.pop("exp_avg", None)
    return s, extra


def add_residual(group, p, s, extra):
    """Puts what belongs to a parameter into the residual of its state."""
    if group["rounding"] == "kahan":
        s["residual"].copy_(extra * (2 ** 11 if p.dtype == torch.float16 else 1))  # section 3 of docs/numerics.md
    else:
        part, copy = local(p).detach().float(), p.detach().clone()
        for values in (part + extra, part):
            Host(group, copy, s).write(k.KOPT_SLOT_WEIGHT, torch.where(local(copy) == local(p), part + extra, values))
