"""The options of the optimizers: their names, defaults and checks, and the kopt_optimizer of a group."""
import torch

from . import header as k

FORMATS = {torch.float32: k.KOPT_F32, torch.bfloat16: k.KOPT_BF16, torch.float16: k.KOPT_FP16}
ADAM = ("betas", "eps", "amsgrad", "stable")
MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
RULES = {  # name: constructor, the options that only it has, and the names of its moments in torch.optim
    "sgd": (lambda lr: k.kopt_sgd(lr, 0), ("momentum", "dampening", "nesterov"), ("momentum_buffer",)),
    "adam": (k.kopt_adam, ADAM, MOMENTS),
    "adamw": (k.kopt_adamw, ADAM, MOMENTS),
    "stable_adamw": (k.kopt_stable_adamw, ADAM, MOMENTS),
    "lion": (k.kopt_lion, ("betas", "sharpness"), MOMENTS[:1]),
    "adan": (k.kopt_adan, ("betas", "eps"), ()),
    "radam": (k.kopt_radam, ("betas", "eps"), MOMENTS[:2]),
    "ranger": (k.kopt_ranger, ("betas", "eps", "lookahead", "lookahead_rate"), ()),
    "adam_atan2": (k.kopt_adam_atan2, ("betas", "atan2_a", "atan2_b", "atan2_outside"), MOMENTS[:2]),
}
WORDS = {  # the options that are enums; all but the weights' own format decide the layout of the state
    "rounding": ("nearest", "stochastic", "kahan", "compact", "exact"), "moment_format": ("f32", "bf16", "fp16", "q8"),
    "moment_rounding": ("nearest", "stochastic"), "compensation_rounding": ("nearest", "stochastic"),
    "decay_mode": ("l2", "decoupled", "fully_decoupled")}
COMMON = ("lr", "weight_decay", "max_lr", "maximize", "seed") + tuple(WORDS)
FLAGS = ("maximize", "amsgrad", "stable", "nesterov", "atan2_outside")
NUMBERS = {"lr": ("learning rate", 0), "eps": ("epsilon value", 2.0 ** -126), "weight_decay": ("weight_decay value", 0),
           "momentum": ("momentum value", 0), "max_lr": ("max_lr", 5e-324)}  # their names in errors, their least values
TORCH = ("lr", "betas", "eps", "weight_decay", "amsgrad", "momentum", "dampening", "nesterov", "maximize", "initial_lr")
WAYS = ("fused", "foreach", "capturable", "differentiable")  # how torch.optim steps; here there is one way


def refuse_ways(options):
    for name in WAYS:
        if options.get(name):
            raise ValueError("%s=True is not supported: there is one way to step, a call of the library" % name)


def defaults_of(rule, options):
    """All options of a rule with their values: those of its constructor, where `options` does not have them."""
    if rule not in RULES:
        raise ValueError("Invalid rule: %r: choose one of %s" % (rule, ", ".join(RULES)))
    constructor, own, _ = RULES[rule]
    opt = constructor(1e-3)
    values = {"rule": rule, "threads": 1}
    for name in COMMON + own:
        if name in ("max_lr", "moment_format"):
            values[name] = None  # the first learning rate; f32 for float32 parameters, bf16 for the others
        elif name in WORDS:
            names = [word for word in WORDS[name] if getattr(k, "KOPT_" + word.upper()) == getattr(opt, name)]
            values[name] = names[0]
        elif name == "betas":
            values[name] = (opt.beta1, opt.beta2, opt.beta3)[:3 if rule == "adan" else 2]
        else:
            values[name] = bool(getattr(opt, name)) if name in FLAGS else getattr(opt, name)
    refuse_ways(options)
    for name, value in options.items():
        if name in values:
            values[name] = value
        elif name not in WAYS:
            raise TypeError("%s has no option %r; it has %s" % (rule, name, ", ".join(values)))
    return values


def validate(group, number):
    """Says in words which option of group `number` is wrong. max_lr, if it is needed, becomes the first lr."""
    where = " (group %d)" % number

    def as_float(name, value):
        try:
            return float(value + 0)  # text is no number
        except (TypeError, ValueError, RuntimeError):
            raise TypeError("%s must be a number, not %r%s" % (name, value, where)) from None

    for name, words in WORDS.items():
        if group[name] not in words and not (name == "moment_format" and group[name] is None):
            raise ValueError("Invalid %s: %r: choose one of %s%s" % (name, group[name], ", ".join(words), where))
    for name, (what, least) in NUMBERS.items():
        if name == "max_lr" and group[name] is None:
            if group["decay_mode"] != "fully_decoupled":
                continue
            if group["lr"] == 0:
                raise ValueError("Invalid max_lr: None: decay_mode='fully_decoupled' needs the largest learning rate: "
                                 "pass it as max_lr, or as the first lr" + where)
            group[name] = float(group["lr"])
        if not least <= as_float(name, group.get(name, least)) <= 3e38:
            raise ValueError("Invalid %s: %s%s" % (what, group[name], where))
    betas = group.get("betas", ())
    if not isinstance(betas, (tuple, list)) or "betas" in group and len(betas) != 2 + (group["rule"] == "adan"):
        raise ValueError("Invalid betas: %s: %s has another number of them%s" % (betas, group["rule"], where))
    for i, beta in enumerate(betas):
        if not 0.0 <= as_float("betas[%d]" % i, beta) < 1.0:
            raise ValueError("Invalid beta parameter at index %d: %s%s" % (i, beta, where))
    if group.get("nesterov") and (group["momentum"] <= 0 or group["dampening"] != 0):
        raise ValueError("Nesterov momentum requires a momentum and zero dampening" + where)
    for name, least, most in (("threads", 1, 2 ** 31), ("seed", 0, 2 ** 64 - 1)):
        if not isinstance(group[name], int) or not least <= group[name] <= most:
            raise ValueError("Invalid %s: %r: it is a whole number from %d on%s" % (name, group[name], least, where))
    result = k.kopt_step_begin(make(group, torch.bfloat16), k.kopt_step())
    if result != k.KOPT_OK:
        raise ValueError("Invalid options of %s: %s%s" % (group["rule"], k.kopt_result_string(result), where))


def make(group, dtype, step=0):
    """The kopt_optimizer for the tensors of a group that have this dtype."""
    constructor, own, _ = RULES[group["rule"]]
    opt = constructor(0.0)
    opt.weight_format, opt.step = FORMATS[dtype], step
    if dtype == torch.float32:
        opt.moment_format = k.KOPT_F32
    for name in COMMON + own:
        value = group[name]
        if name == "betas":
            for i, beta in enumerate(value):
                setattr(opt, "beta%d" % (i + 1), beta)
        elif value is not None or name not in ("max_lr", "moment_format"):
            setattr(opt, name, getattr(k, "KOPT_" + value.upper()) if name in WORDS else value)
    return opt


def moments_of(group):
    """(slot, name in torch.optim) of each moment."""
    names = [name for name in RULES[group["rule"]][2] if (name != "max_exp_avg_sq" or group["amsgrad"]) and
             (name != "momentum_buffer" or group["momentum"] > 0)]
    return list(enumerate(names, k.KOPT_FIRST_MOMENT))
