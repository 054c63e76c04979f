"""The options of the optimizers: their names, defaults and checks, and the kopt_optimizer of a group."""
import marshal
import textwrap

import torch

from . import header as k

FORMATS = {torch.float32: k.KOPT_F32, torch.bfloat16: k.KOPT_BF16, torch.float16: k.KOPT_FP16}
ADAM = ("betas", "eps", "amsgrad", "stable")
MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
RULES = {  # name: constructor, the options that only it has, and the names of its moments
    "sgd": (lambda lr: k.kopt_sgd(lr, 0), ("momentum", "dampening", "nesterov"), ("momentum_buffer",)),
    "adam": (k.kopt_adam, ADAM, MOMENTS),
    "adamw": (k.kopt_adamw, ADAM, MOMENTS),
    "stable_adamw": (k.kopt_stable_adamw, ADAM, MOMENTS),
    "lion": (k.kopt_lion, ("betas", "sharpness"), MOMENTS[:1]),
    "adan": (k.kopt_adan, ("betas", "eps"), ("exp_avg", "exp_avg_sq", "exp_avg_diff", "prev_grad")),
    "radam": (k.kopt_radam, ("betas", "eps"), MOMENTS[:2]),
    "ranger": (k.kopt_ranger, ("betas", "eps", "lookahead", "lookahead_rate"), MOMENTS[:2]),
    "adam_atan2": (k.kopt_adam_atan2, ("betas", "atan2_a", "atan2_b", "atan2_outside"), MOMENTS[:2]),
}
MOMENTS_OF_ALL = tuple({name: None for _, _, names in RULES.values() for name in names})
NOT_IN_TORCH = ("adan", "ranger")  # torch.optim has no moments like theirs
WORDS = {  # the options that are enums; all but the weights' own format decide the layout of the state
    "rounding": ("nearest", "stochastic", "kahan", "compact", "exact", "feedback"),
    "moment_format": ("f32", "bf16", "fp16", "q8"),
    "moment_rounding": ("nearest", "stochastic"), "residual_rounding": ("nearest", "stochastic"),
    "decay_mode": ("l2", "decoupled", "fully_decoupled")}
RESIDUALS = ("zero", "random", None)  # at first: an option of the package, not of the header
COMMON = ("lr", "weight_decay", "max_lr", "maximize", "seed") + tuple(WORDS)
ASKED_FOR = tuple(WORDS) + ("seed",)  # not of torch.optim: a program is told if load_state_dict() changes them
FLAGS = ("maximize", "amsgrad", "stable", "nesterov", "atan2_outside")
NUMBERS = {"lr": ("learning rate", 0), "eps": ("epsilon value", 2.0 ** -126), "weight_decay": ("weight_decay value", 0),
           "momentum": ("momentum value", 0), "max_lr": ("max_lr", 5e-324)}  # their names in errors, their least values
TORCH = ("lr", "betas", "eps", "weight_decay", "amsgrad", "momentum", "dampening", "nesterov", "maximize", "initial_lr")
WAYS = ("fused", "foreach", "capturable", "differentiable", "triton")  # how others step; here there is one way
REFUSED_WAYS = WAYS[2:]  # which promise more than speed
ABSENT = "Not in torch.optim"
MEANINGS = {  # option: what it is, and what torch.optim has instead; None: the same name
    "lr": ("learning rate, >= 0: a number, or a tensor of one element", None),
    "betas": ("decay rates of the averages per step, each in [0, 1); Adan: three", None),
    "eps": ("added to the root of the mean square, in units of the gradient; at least 1.2e-38", None),
    "weight_decay": ("weight decay, >= 0: see decay_mode", None),
    "momentum": ("decay rate of the momentum buffer per step, >= 0; 0: no buffer", None),
    "dampening": ("the gradient enters the momentum buffer times 1 - dampening", None),
    "nesterov": ("Nesterov momentum", None),
    "amsgrad": ("divide by the root of the largest mean square so far; one moment more", None),
    "maximize": ("go up the gradient", None),
    "rounding": ("of 16-bit weights. kahan, compact, exact: a residual of 2, 1, 2 bytes per weight is kept beside "
                 "them; feedback: none, the first moment pays the rounding error back; stochastic: none, and noise; "
                 "nearest: none, and small updates are lost",
                 ABSENT + ": it is nearest there"),
    "moment_format": ("of the moments: 4, 2, 2 or 1.016 bytes each. None: f32 for float32 parameters, bf16 for others. "
                      "A pair: (of averages, of mean squares). q8 is for tensors whose rows are whole blocks of 64 "
                      "elements; the moments of others are bf16", ABSENT + ": it is the parameter's dtype there"),
    "moment_rounding": ("how moments of 16 and 8 bits are stored", ABSENT + ": it is nearest there"),
    "residual_rounding": ("how the residuals of kahan and compact are stored", ABSENT),
    "residual": ("what is kept beside 16-bit weights at first. random: drawn once, by seed, id and place, from all "
                 "that leave the weight as it is; in the mean the weights then show every update, where with zero they "
                 "show none below half an ulp (docs/fine-tuning.md). None: random, where one is kept", ABSENT),
    "decay_mode": ("l2: decay joins the gradient; decoupled: weights shrink by lr * weight_decay per step; "
                   "fully_decoupled: by lr / max_lr * weight_decay",
                   "In torch.optim: Adam (l2), AdamW (decoupled), or decoupled_weight_decay"),
    "max_lr": ("the largest learning rate of the run, for fully_decoupled. None: the first lr", ABSENT),
    "seed": ("of the random bits of stochastic rounding, 0 to 2^64 - 1. A parameter's bits follow from seed, its id "
             "and its step", ABSENT + "; torch.manual_seed() has no effect here"),
    "threads": ("threads that share a step of 65,536 weights or more on the CPU; the same bits. None: as many as "
                "torch.get_num_threads() says", ABSENT + ": torch.set_num_threads()"),
    "stable": ("StableAdamW: if the RMS of g / sqrt(v) of a tensor is above 1, divide its rate by it", ABSENT),
    "sharpness": ("smooth Lion: tanh(sharpness * x) in place of the sign of x; 0: the sign", ABSENT),
    "lookahead": ("steps between two synchronizations of the slow weights", ABSENT),
    "lookahead_rate": ("how far the slow weights move towards the weights, 0 to 1", ABSENT),
    "atan2_a": ("the update is a * atan2(m, b * sqrt(v))", ABSENT),
    "atan2_b": ("see atan2_a", ABSENT),
    "atan2_outside": ("the square root of the bias correction outside of atan2", ABSENT)}


def code_of(option, word):
    """The value of an enum of the header."""
    return getattr(k, ("KOPT_DECAY_" if option == "decay_mode" else "KOPT_") + word.upper())


def described_options(rule):
    """The options of a rule for help(), with defaults and what torch.optim has instead."""
    lines, values = [], defaults_of(rule, {})
    for name in ("lr",) + RULES[rule][1] + COMMON[1:] + ("residual", "threads"):
        meaning, torchs = MEANINGS[name]
        words = RESIDUALS[:2] if name == "residual" else WORDS.get(name)
        choice = " (%s)" % ", ".join(map(repr, words)) if words else ""
        text = "%s%s: %s. Default %r.%s" % (name, choice, meaning, values[name], " %s." % torchs if torchs else "")
        lines += textwrap.wrap(text, 108, initial_indent="    ", subsequent_indent="        ")
    return "\n".join(lines)


def translated(options):
    """Options with the names of the header, of those that may have names of optimi or torch.optim."""
    options = dict(options)
    kahan_sum, decouple_wd, decouple_lr = (options.pop(name, None) for name in (
        "kahan_sum", "decouple_wd", "decouple_lr"))
    if kahan_sum is not None:
        rounding = "kahan" if kahan_sum else "nearest"
        if options.get("rounding", "kahan") not in ("kahan", rounding):
            raise ValueError("kahan_sum=%s and rounding=%r contradict each other" % (kahan_sum, options["rounding"]))
        options["rounding"] = rounding
    if decouple_wd is None:
        decouple_wd = options.pop("decoupled_weight_decay", None)  # torch.optim's name
    if decouple_wd is not None:
        options["decay_mode"] = "decoupled" if decouple_wd else "l2"
    if decouple_lr:
        options["decay_mode"] = "fully_decoupled"
    options.pop("gradient_release", None)  # every optimizer can: see prepare_for_gradient_release()
    for name in WAYS:
        if options.pop(name, None) and name in REFUSED_WAYS:
            raise ValueError("%s=True is not supported: there is one way to step, a call of the library" % name)
    return options


def betas_of(rule):
    """Their names in the header."""
    return ("beta1", "beta2", "beta3")[:3 if rule == "adan" else 2]


def defaults_of(rule, options):
    """All options of a rule with their values: those of its constructor, where `options` does not have them."""
    if rule not in RULES:
        raise ValueError("Invalid rule: %r: choose one of %s" % (rule, ", ".join(RULES)))
    constructor, own, _ = RULES[rule]
    opt = constructor(1e-3)
    values = {"rule": rule, "threads": None, "residual": None}
    for name in COMMON + own:
        if name in ("max_lr", "moment_format"):
            values[name] = None  # the first learning rate; f32 for float32 parameters, bf16 for the others
        elif name in WORDS:
            names = [word for word in WORDS[name] if code_of(name, word) == getattr(opt, name)]
            values[name] = names[0]
        elif name == "betas":
            values[name] = tuple(getattr(opt, beta) for beta in betas_of(rule))
        else:
            values[name] = bool(getattr(opt, name)) if name in FLAGS else getattr(opt, name)
    for name, value in translated(options).items():
        if name in values:
            values[name] = value
        else:
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

    for name, words in dict(WORDS, residual=RESIDUALS).items():
        pair = name == "moment_format" and isinstance(group[name], (tuple, list))
        values = group[name] if pair else (group[name],) * 2
        if len(values) != 2 or any(x not in words and not (name == "moment_format" and x is None) for x in values):
            raise ValueError("Invalid %s: %r: choose one of %s%s" % (
                name, group[name], ", ".join(filter(None, words)), where))
    if group["residual"] == "random" and group["rounding"] in ("nearest", "feedback"):
        raise ValueError("residual='random' needs a rounding that keeps one: kahan, compact or exact%s" % where)
    if isinstance(group["lr"], torch.Tensor) and group["lr"].numel() != 1:
        raise ValueError("Tensor lr must be 1-element" + where)
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
    if not isinstance(betas, (tuple, list)) or "betas" in group and len(betas) != len(betas_of(group["rule"])):
        raise ValueError("Invalid betas: %s: %s has another number of them%s" % (betas, group["rule"], where))
    for i, beta in enumerate(betas):
        if not 0.0 <= as_float("betas[%d]" % i, beta) < 1.0:
            raise ValueError("Invalid beta parameter at index %d: %s%s" % (i, beta, where))
    if group.get("nesterov") and (group["momentum"] <= 0 or group["dampening"] != 0):
        raise ValueError("Nesterov momentum requires a momentum and zero dampening" + where)
    for name, least, most in (("threads", 1, 2 ** 31), ("seed", 0, 2 ** 64 - 1)):
        if group[name] is None and name == "threads":
            continue
        if not isinstance(group[name], int) or not least <= group[name] <= most:
            raise ValueError("Invalid %s: %r: it is an int from %d to %d%s" % (name, group[name], least, most, where))
    opt = make(group, torch.bfloat16)
    if k.kopt_step_begin(k.kopt_step(), opt) != k.KOPT_OK:
        raise ValueError("Invalid options of %s: %s%s" % (group["rule"], k.kopt_explain(opt, None, 0), where))


def formats_of_group(group, dtype):
    """The formats of the first and second moment that a group asks for, for parameters of this dtype."""
    given = group["moment_format"]
    return tuple(word or ("f32" if dtype == torch.float32 else "bf16")
                 for word in (given if isinstance(given, (tuple, list)) else (given,) * 2))


def bare(group, dtype, formats):
    """A kopt_optimizer with those options of a group that say which tensors a state has."""
    opt = RULES[group["rule"]][0](1e-3)
    opt.seed, opt.rounding = group["seed"], code_of("rounding", group["rounding"])
    opt.first_moment_format, opt.second_moment_format = (code_of("moment_format", word) for word in formats)
    if "amsgrad" in group:
        opt.amsgrad = group["amsgrad"]
    if "momentum" in group:
        opt.momentum = 0.5 * (group["momentum"] > 0)
    return opt


def make(group, dtype, formats=None):
    """The kopt_optimizer for the tensors of a group that have this dtype."""
    constructor, own, _ = RULES[group["rule"]]
    opt = constructor(0.0)
    opt.first_moment_format, opt.second_moment_format = (
        code_of("moment_format", word) for word in formats or formats_of_group(group, dtype))
    for name in COMMON + own:
        value = group[name]
        if name == "betas":
            if len(value) != len(betas_of(group["rule"])):
                raise ValueError("Invalid betas: %s" % (value,))  # which validate() says in words
            for beta, number in zip(betas_of(group["rule"]), value):
                setattr(opt, beta, number)
        elif name != "moment_format" and (value is not None or name != "max_lr"):
            setattr(opt, name, code_of(name, value) if name in WORDS else value)
    return opt


def as_written(group):
    """The options that make() reads, as bytes: it need not be called again for the same. None: one is a tensor."""
    try:
        return marshal.dumps([group["rule"], *map(group.__getitem__, COMMON + RULES[group["rule"]][1])], 2)
    except ValueError:
        return None


def layout_of(group):
    """The options that say which tensors a state has. If they change, it is looked at again."""
    return group["rounding"], group["moment_format"], group.get("amsgrad"), group.get("momentum", 0) > 0


def moments_of(group):
    """(slot, name) of each moment."""
    names = [name for name in RULES[group["rule"]][2] if (name != "max_exp_avg_sq" or group["amsgrad"]) and
             (name != "momentum_buffer" or group["momentum"] > 0)]
    return list(enumerate(names, k.KOPT_SLOT_FIRST_MOMENT))
