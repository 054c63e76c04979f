"""convert.py - converts checkpoints of kahan_opt to and from the states of other optimizers, and says what is lost.

    ./build.sh python                                              builds the library, in build/python
    python3 docs/examples/convert.py FROM TO IN OUT [options]      --help: the formats and the options
    python3 docs/examples/convert.py inspect FILE

A checkpoint of kahan_opt holds the bytes of kopt_save(). All other files are safetensors: `model.NAME` is a weight,
`optimizer.KEY.NAME` the state KEY of that weight, and the metadata has the rest. In Python, save() and load() write and
read these files from a model and its optimizer. docs/pytorch.md has the formats and what each cannot hold.

Needs PyTorch 1.13 or later (on the CPU) and safetensors; ./build.sh setup installs both."""
import argparse
import collections
import dataclasses
import json
import math
import os
import sys
import tempfile
import zlib

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "build", "python"))

try:
    import kahan_opt as ko
    import torch
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import save_file
except ImportError as absent:
    raise SystemExit("convert: %s. It needs ./build.sh python, PyTorch and safetensors" % absent) from None


class Refused(Exception):
    """Why a conversion was not made, in a sentence. No file has been written."""


@dataclasses.dataclass
class Tensor:
    """One tensor in no format: everything here is exact. The arrays are flat."""
    name: str
    id: int
    shape: tuple
    weight: torch.Tensor                # as the forward pass sees it: fp32, bf16 or fp16
    residual: torch.Tensor = None       # fp32: a Kahan compensation. The true weight is weight + residual
    master: torch.Tensor = None         # fp32: the true weight itself
    moments: dict = dataclasses.field(default_factory=dict)  # slot: fp32. Mean squares as they are, not as roots
    coded: bool = False                 # have the moments been 8-bit codes, with a scale for each 256?
    form: int = None                    # the format of the weights in kahan_opt, if the file has chosen one

    def keeps(self):
        """Is there more than the weight that the forward pass sees?"""
        return self.master is not None or self.residual is not None

    def value(self):
        """The true weight in binary64."""
        if self.master is not None:
            return self.master.double()
        return self.weight.double() + (0 if self.residual is None else self.residual.double())


@dataclasses.dataclass
class Checkpoint:
    opt: ko.kopt_optimizer              # the options, whatever the format
    tensors: list
    notes: list                         # what reading had to say
    chosen: dict = dataclasses.field(default_factory=dict)  # fields of opt that the file itself has chosen


DTYPE = {ko.KOPT_F32: torch.float32, ko.KOPT_BF16: torch.bfloat16, ko.KOPT_FP16: torch.float16}
FORMAT = {dtype: form for form, dtype in DTYPE.items()}
NAMED_FORMAT = {"f32": ko.KOPT_F32, "bf16": ko.KOPT_BF16, "fp16": ko.KOPT_FP16, "q8": ko.KOPT_Q8}
FORMAT_NAME = {form: name for name, form in NAMED_FORMAT.items()}
ROUNDING = {"kahan": ko.KOPT_KAHAN, "compact": ko.KOPT_COMPACT, "exact": ko.KOPT_EXACT,
            "stochastic": ko.KOPT_STOCHASTIC, "nearest": ko.KOPT_NEAREST}
RESIDUALS = ("zero", "random")
SLOT = {ko.KOPT_SLOT_FIRST_MOMENT: "first moment", ko.KOPT_SLOT_SECOND_MOMENT: "second moment",
        ko.KOPT_SLOT_THIRD_MOMENT: "third moment", ko.KOPT_SLOT_FOURTH_MOMENT: "previous gradient"}
OWN = ("rounding first_moment_format second_moment_format moment_rounding residual_rounding zero_grad moments_only "
       "grad_scale clip seed").split()  # fields of the options that no other format has


def refuse_unless(condition, sentence, *words):
    if not condition:
        raise Refused(sentence % words)


def check(result, what):
    refuse_unless(result == ko.KOPT_OK, "%s: %s", what, ko.kopt_result_string(result))


# ---- the optimizers of each format ----------------------------------------------------------------------------------

# make: the constructor here. group: the hyper-parameters in a param_group. moments: their key by slot. debiased: the
# beta of the moments that are stored divided by 1 - beta^step.
Class = collections.namedtuple("Class", "make decay group moments debiased")
ADAM = {1: "exp_avg", 2: "exp_avg_sq"}
HAT = {1: "beta1", 2: "beta2"}
ADAN = {1: "exp_avg", 2: "exp_avg_sq", 3: "exp_avg_diff", 4: "prev_grad"}
L2, DECOUPLED, FULLY = ko.KOPT_DECAY_L2, ko.KOPT_DECAY_DECOUPLED, ko.KOPT_DECAY_FULLY_DECOUPLED
BETAS = "beta1 beta2"
CLASSES = {
    "torch": {
        "SGD": Class("sgd", L2, "momentum dampening nesterov maximize", {1: "momentum_buffer"}, {}),
        "Adam": Class("adam", L2, "betas eps amsgrad maximize", {3: "max_exp_avg_sq", **ADAM}, {}),
        "AdamW": Class("adamw", DECOUPLED, "betas eps amsgrad maximize", {3: "max_exp_avg_sq", **ADAM}, {}),
        "RAdam": Class("radam", L2, "betas eps", ADAM, {})},
    "optimi": {
        "SGD": Class("sgd", L2, "momentum", {1: "exp_avg"}, {}),
        "Adam": Class("adam", L2, BETAS + " eps", ADAM, HAT),
        "AdamW": Class("adamw", DECOUPLED, BETAS + " eps", ADAM, HAT),
        "StableAdamW": Class("stable_adamw", DECOUPLED, BETAS + " eps", ADAM, HAT),
        "Lion": Class("lion", DECOUPLED, BETAS, {1: "exp_avg"}, {}),
        "RAdam": Class("radam", L2, BETAS + " eps", ADAM, HAT),
        "Ranger": Class("ranger", DECOUPLED, BETAS + " eps k alpha", ADAM, HAT),
        "Adan": Class("adan", DECOUPLED, BETAS + " beta3 eps", ADAN, {1: "beta1", 2: "beta3", 3: "beta2"})},
    "torchdistx": {"AnyPrecisionAdamW": Class("adamw", DECOUPLED, "betas eps", ADAM, {})},
    "transformer_engine": {"FusedAdam": Class("adamw", DECOUPLED, "betas eps", ADAM, {})},
    "apex": {"DistributedFusedAdam": Class("adamw", DECOUPLED, "betas eps", ADAM, {})},
    "bitsandbytes": {
        "AdamW": Class("adamw", DECOUPLED, "betas eps", {1: "state1", 2: "state2"}, {}),
        "Adam": Class("adamw", DECOUPLED, "betas eps", {1: "state1", 2: "state2"}, {}),
        "Lion": Class("lion", DECOUPLED, "betas", {1: "state1"}, {}),
        "SGD": Class("sgd", L2, "betas", {1: "state1"}, {})},
}
PEERS = {"fp32": "a file of weights", "torch": "PyTorch", "optimi": "optimi", "torchdistx": "torchdistx",
         "transformer_engine": "TransformerEngine", "apex": "apex", "bitsandbytes": "bitsandbytes"}
COMPENSATION = {"optimi": "kahan_comp", "torchdistx": "compensation"}
REMAINDER = {"transformer_engine": "master_param", "apex": "param"}
RANGER = ("%s: Ranger converts only right after a synchronization, at a step that is a multiple of %d; this is step "
          "%d")
FIELD = {"k": "lookahead", "alpha": "lookahead_rate"}
READ = {ko.KOPT_RULE_SGD: "momentum dampening nesterov", ko.KOPT_RULE_ADAM: "beta1 beta2 eps amsgrad stable",
        ko.KOPT_RULE_LION: "beta1 beta2 sharpness", ko.KOPT_RULE_ADAN: "beta1 beta2 beta3 eps",
        ko.KOPT_RULE_RADAM: "beta1 beta2 eps",
        ko.KOPT_RULE_RANGER: "beta1 beta2 eps lookahead lookahead_rate", ko.KOPT_RULE_EMA: "",
        ko.KOPT_RULE_ADAM_ATAN2: ""}


def slots_of(opt):
    """The moments that the rule has."""
    if opt.rule == ko.KOPT_RULE_SGD:
        return [1] if opt.momentum != 0 else []
    return {ko.KOPT_RULE_ADAM: [1, 2, 3] if opt.amsgrad else [1, 2], ko.KOPT_RULE_LION: [1],
            ko.KOPT_RULE_ADAN: [1, 2, 3, 4],
            ko.KOPT_RULE_EMA: []}.get(opt.rule, [1, 2])


def squares_of(opt):
    """The moments that are averages of squares."""
    return [slot for slot in slots_of(opt) if slot == 2 or slot == 3 and opt.amsgrad]


def construct(rule, lr):
    return ko.kopt_sgd(lr, 0.0) if rule == "sgd" else getattr(ko, "kopt_" + rule)(lr)


def set_exactly(opt, key, value):
    """Sets a field. ctypes would drop the upper bits of an integer that is too large."""
    setattr(opt, key, value)
    if getattr(opt, key) != value:
        raise ValueError("%s = %r" % (key, value))


def class_of(form, name):
    """The entry of CLASSES, also for PagedAdamW8bit and the like."""
    short = name
    if form == "bitsandbytes":
        short = name.replace("Paged", "").replace("8bit", "").replace("32bit", "")
    refuse_unless(short in CLASSES[form], "kahan_opt has no %s; of %s it takes %s", name, PEERS[form],
                  ", ".join(CLASSES[form]))
    return CLASSES[form][short]


def options_from(form, name, group):
    """The options in a param_group of another library."""
    cls, opt = class_of(form, name), None
    try:
        opt = construct(cls.make, float(group["lr"]))
        opt.weight_decay, opt.decay_mode = float(group["weight_decay"]), cls.decay
        for key in cls.group.split():
            value = group.get(key, 0) if key in ("amsgrad", "maximize", "nesterov") else group[key]
            if key == "betas" and cls.make == "sgd":
                opt.momentum = value[0]  # betas[1] is a dampening, which no kernel of bitsandbytes reads
            elif key == "betas":
                opt.beta1, opt.beta2 = value[0], value[1]
            else:
                key = FIELD.get(key, key)
                set_exactly(opt, key, type(getattr(opt, key))(value))
        if form == "optimi":
            if group.get("decouple_lr"):
                opt.decay_mode, opt.max_lr = FULLY, float(group["max_lr"])
            elif "decouple_wd" in group:
                opt.decay_mode = DECOUPLED if group["decouple_wd"] else L2
            if cls.make == "sgd" and group["dampening"]:
                opt.dampening = opt.momentum
        if form in REMAINDER:
            opt.decay_mode = DECOUPLED if group["adam_w_mode"] else L2
        if form == "torch" and group.get("decoupled_weight_decay"):
            opt.decay_mode = DECOUPLED
    except KeyError as key:
        raise Refused("the param_group of %s %s has no %s" % (PEERS[form], name, key)) from None
    except (TypeError, ValueError, IndexError, OverflowError) as error:
        raise Refused("the param_group of %s %s has a wrong value: %s" % (PEERS[form], name, error)) from None
    refuse_unless(group.get("bias_correction", True), "kahan_opt has no Adam without bias correction")
    refuse_unless(not (group.get("adam_wd") and opt.weight_decay), "kahan_opt has no Adan with adam_wd")
    return opt


def group_from(form, name, opt):
    """The param_group of another library for these options. Some may not fit: see choose_class()."""
    cls = CLASSES[form][name]
    group = {"lr": opt.lr, "weight_decay": opt.weight_decay}
    for key in cls.group.split():
        if key == "betas":
            group[key] = [opt.momentum, 0.0] if cls.make == "sgd" else [opt.beta1, opt.beta2]
        else:
            value = getattr(opt, FIELD.get(key, key))
            group[key] = bool(value) if key in ("amsgrad", "maximize", "nesterov") else value
    if form == "optimi":
        group.update(decouple_lr=opt.decay_mode == FULLY, max_lr=opt.max_lr, foreach=None, triton=None,
                     gradient_release=False, setup=True)
        if name in ("SGD", "Adam", "AdamW", "RAdam", "Ranger"):
            group["decouple_wd"] = opt.decay_mode != L2
        if name == "SGD":
            group.update(dampening=opt.dampening == opt.momentum != 0, torch_init=True)
        if name == "Adan":
            group["adam_wd"] = False
    if form in REMAINDER:
        group.update(bias_correction=True, adam_w_mode=opt.decay_mode == DECOUPLED)
    return group


def differences(a, b):
    """The fields of two optimizers that differ, among those that the rule reads."""
    fields = ["lr", "maximize", "weight_decay"] + READ[a.rule].split()
    if a.weight_decay != 0:
        fields += ["decay_mode", "max_lr"] if a.decay_mode == FULLY else ["decay_mode"]
    return [field for field in fields if getattr(a, field) != getattr(b, field)]


def choose_class(form, opt):
    """The class of another library that computes what these options say, with the same kind of decay if it can be."""
    refused = "it has no such rule"
    for strict in (True, False):
        for name in CLASSES[form]:
            back = options_from(form, name, group_from(form, name, opt))
            if back.rule != opt.rule or strict and CLASSES[form][name].decay != opt.decay_mode:
                continue
            different = differences(opt, back)
            if not different:
                return name
            refused = "its %s cannot hold %s" % (name, ", ".join(
                "%s = %g" % (field, getattr(opt, field)) for field in different))
    raise Refused("%s cannot go on with this optimizer: %s" % (PEERS[form], refused))


# ---- files ----------------------------------------------------------------------------------------------------------

def read_bytes(path):
    try:
        with open(path, "rb") as f:
            return f.read()
    except OSError as error:
        raise Refused("%s cannot be read: %s" % (path, error.strerror)) from None


def write_atomically(path, write):
    """write(temporary path), then rename: at any time, path has its old contents or all of its new ones."""
    folder = os.path.dirname(os.path.abspath(path))
    try:
        handle, temporary = tempfile.mkstemp(prefix=os.path.basename(path) + ".", suffix=".new", dir=folder)
    except OSError as error:
        raise Refused("%s cannot be written: %s" % (path, error.strerror)) from None
    os.close(handle)
    try:
        result = write(temporary)
        with open(temporary, "rb") as f:
            os.fsync(f.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
        handle = os.open(folder, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
        return result
    except (OSError, SafetensorError) as error:
        raise Refused("%s cannot be written: %s" % (path, error)) from None
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)


def open_safetensors(path):
    """The tensors and the metadata of a file."""
    if read_bytes(path)[:4] == b"KSAV":
        raise Refused("%s is a checkpoint of kahan_opt, not a safetensors file" % path)
    try:
        with safe_open(path, "pt") as f:
            data, metadata = {key: f.get_tensor(key) for key in f.keys()}, f.metadata() or {}
    except (SafetensorError, OSError, ValueError) as error:
        raise Refused("%s is no safetensors file, or it is damaged: %s. (A file of torch.save() is a pickle, which "
                      "does not tell which state belongs to which parameter: write one with convert.save().)"
                      % (path, error)) from None
    if "crc32" in metadata:
        refuse_unless(metadata["crc32"] == checksum(data, metadata), "%s is damaged: its checksum is wrong", path)
    return data, metadata


def json_of(path, metadata, key, absent=None):
    """The JSON object in a value of the metadata."""
    try:
        value = json.loads(metadata.get(key, absent))
    except (TypeError, ValueError):
        value = None
    refuse_unless(isinstance(value, dict), "%s: its metadata has no correct '%s'", path, key)
    return value


def ids_of(path, metadata):
    ids = json_of(path, metadata, "ids")
    refuse_unless(all(type(i) is int and 0 <= i < 1 << 32 for i in ids.values()), "%s: its metadata has no correct "
                  "'ids'", path)
    return ids


def step_of(path, metadata):
    """None if the file counts no steps."""
    text = metadata.get("step", "0")
    refuse_unless(text.isdecimal(), "%s: its metadata has no correct 'step'", path)
    return int(text) if "step" in metadata else None


def checksum(data, metadata):
    """The CRC-32 of the metadata and the tensors. safetensors itself has none."""
    crc = zlib.crc32(json.dumps({k: v for k, v in metadata.items() if k != "crc32"}, sort_keys=True).encode())
    for key in sorted(data):
        t = data[key].contiguous().reshape(-1)
        crc = zlib.crc32(("%s %s %s" % (key, t.dtype, list(data[key].shape))).encode(), crc)
        crc = zlib.crc32(t.view(torch.uint8).numpy().data if t.numel() else b"", crc)
    return "%08x" % crc


def store_safetensors(path, data, metadata):
    data = {key: value.contiguous() for key, value in data.items()}
    save_file(data, path, {**metadata, "crc32": checksum(data, metadata)})


def read_names(path):
    """{id: (name, shape)} from a JSON file {"NAME": {"id": 0, "shape": [2, 3]}, ...} or a file of write_peer()."""
    if path is None:
        return {}
    try:
        text = json.loads(read_bytes(path))
    except ValueError:
        data, metadata = open_safetensors(path)
        refuse_unless("ids" in metadata, "%s has no names of tensor ids in its metadata", path)
        ids, prefix = ids_of(path, metadata), "model." if "format" in metadata else ""
        refuse_unless(all(prefix + name in data for name in ids), "%s: its metadata names weights that it does not "
                      "have", path)
        text = {name: {"id": i, "shape": list(data[prefix + name].shape)} for name, i in ids.items()}
    try:
        names = {int(entry["id"]): (name, tuple(map(int, entry["shape"]))) for name, entry in text.items()}
    except (TypeError, KeyError, AttributeError, ValueError, OverflowError):
        raise Refused('%s is not of the form {"NAME": {"id": 0, "shape": [2, 3]}, ...}' % path) from None
    refuse_unless(len(names) == len(text), "%s gives two names the same id", path)
    return names


# ---- kahan_opt ------------------------------------------------------------------------------------------------------

def allocate(opt, tensors):
    """Memory for the tensors of kahan_opt: a list of (weight, state block)."""
    memory = []
    for t in tensors:
        memory.append((torch.zeros(t.n, dtype=DTYPE[t.weight_format]),
                       torch.zeros(ko.kopt_state_size(ko.byref(opt), ko.byref(t)), dtype=torch.uint8)))
        t.weight, t.state, t.state_size = memory[-1][0].data_ptr(), memory[-1][1].data_ptr(), memory[-1][1].numel()
    return memory


HEADER = 64  # bytes of a state block before its residual: see kopt_state_size()
SCALE = {torch.bfloat16: 1.0, torch.float16: 2048.0}  # an fp16 compensation is stored * 2^11


def read_kahan_opt(path, names=None):
    data, opt, count, end = read_bytes(path), ko.kopt_optimizer(), ko.c_uint64(), ko.c_uint64(0)
    refuse_unless(data[:4] == b"KSAV", "%s is no checkpoint of kahan_opt (bytes of kopt_save())", path)
    check(ko.kopt_inspect(data, len(data), ko.byref(opt), ko.byref(count), None), path)
    found, names = [], read_names(names)
    while len(found) < count.value:
        t = ko.kopt_tensor()
        result = ko.kopt_inspect_tensor(data, len(data), ko.byref(end), ko.byref(t))
        refuse_unless(result == ko.KOPT_OK and end.value <= len(data), "%s: tensor %d of %d is not complete: the file "
                      "was cut off or is damaged", path, len(found) + 1, count.value)
        found.append(t)
    tensors = (ko.kopt_tensor * len(found))(*found)
    memory = allocate(opt, tensors)
    check(ko.kopt_load(ko.byref(opt), tensors, len(tensors), data, len(data)), path)
    result = []
    for t, (weight, block) in zip(tensors, memory):
        name, shape = names.get(t.id, ("tensor%d" % t.id, (t.n,)))
        refuse_unless(t.first_index == 0, "%s: tensor %d begins at element %d: it is a shard of a larger tensor. "
                      "Make a checkpoint of whole tensors first", path, t.id, t.first_index)
        refuse_unless(not names or t.id in names, "%s: tensor %d has no name", path, t.id)
        refuse_unless(math.prod(shape) == t.n, "%s: tensor %d has %d elements, but %s has the shape %s", path, t.id,
                      t.n, name, list(shape))
        one = Tensor(name, t.id, shape, weight, form=t.weight_format)
        if t.weight_format != ko.KOPT_F32 and opt.rounding == ko.KOPT_KAHAN:
            one.residual, nothing = torch.empty(t.n), torch.zeros_like(weight).neg()  # -0 + x is x, also if x is -0
            t.weight = nothing.data_ptr()
            check(ko.kopt_state_read(ko.byref(opt), ko.byref(t), ko.KOPT_SLOT_WEIGHT, one.residual.data_ptr()), name)
        elif t.weight_format != ko.KOPT_F32 and opt.rounding in (ko.KOPT_COMPACT, ko.KOPT_EXACT):
            one.master = torch.empty(t.n)
            check(ko.kopt_state_read(ko.byref(opt), ko.byref(t), ko.KOPT_SLOT_WEIGHT, one.master.data_ptr()), name)
        for slot in slots_of(opt):
            one.moments[slot] = torch.empty(t.n)
            check(ko.kopt_state_read(ko.byref(opt), ko.byref(t), slot, one.moments[slot].data_ptr()), name)
        result.append(one)
    refuse_unless(len({t.id for t in result}) == len(result), "%s: two tensors have the same id: they are shards", path)
    refuse_unless(opt.rule != ko.KOPT_RULE_RANGER or opt.step % opt.lookahead == 0, RANGER, path, opt.lookahead,
                  opt.step)
    return Checkpoint(opt, result, [], {key: getattr(opt, key) for key in OWN})


def write_kahan_opt(path, ck, draw=False):
    """draw: the residuals, at random: of weights that have none."""
    opt, count = ck.opt, len(ck.tensors)
    check(ko.kopt_state_init(ko.byref(opt), None, 0, None), path)  # the options
    ck.tensors.sort(key=lambda t: t.id)
    tensors = (ko.kopt_tensor * count)()
    for t, one in zip(tensors, ck.tensors):
        t.weight_format, t.n, t.id = one.form, one.weight.numel(), one.id
    memory = allocate(opt, tensors)
    for t, one, (weight, block) in zip(tensors, ck.tensors, memory):
        value = one.value().float()
        check(ko.kopt_state_init(ko.byref(opt), ko.byref(t), 1, value.data_ptr()), one.name)
        if (opt.rounding == ko.KOPT_KAHAN and one.master is None and weight.dtype == one.weight.dtype and
                weight.dtype in SCALE and opt.rule != ko.KOPT_RULE_RANGER):
            weight.copy_(one.weight)  # both as they are: a sum in fp32 would lose the last bits of the compensation
            if one.residual is not None and not draw:
                kept = (one.residual * SCALE[weight.dtype]).to(weight.dtype)
                block[HEADER:HEADER + 2 * t.n] = kept.view(torch.uint8)
        if draw:
            kept = one.value() - one.weight.double() if one.keeps() else torch.zeros(1)
            refuse_unless(bool(((kept == 0) | kept.isnan()).all()), "--residual random: %s has a residual already, "
                          "which is better", one.name)
            check(ko.kopt_state_dither(ko.byref(opt), ko.byref(t), 1), "--residual random: " + one.name)
        for slot in slots_of(opt):
            values = one.moments[slot].contiguous()
            check(ko.kopt_state_write(ko.byref(opt), ko.byref(t), slot, values.data_ptr()),
                  "%s, %s" % (one.name, SLOT[slot]))
    data = bytearray(ko.kopt_save_size(ko.byref(opt), tensors, count))
    check(ko.kopt_save(ko.byref(opt), tensors, count, ko.byref(ko.c_char.from_buffer(data)), len(data)), path)
    with open(path, "wb") as f:
        f.write(data)


# ---- 16-bit remainders (TransformerEngine, apex) --------------------------------------------------------------------

def join(weight, remainder):
    """The fp32 master weights of bf16 weights and their int16 remainders: high * 2^16 + remainder, as words."""
    return (weight.view(torch.int16).int() * 65536 + remainder.int()).view(torch.float32)


def split(master):
    """fp32 to bf16 and int16: the upper half of the word, plus 1 if the lower half is negative as an int16."""
    low = ((master.view(torch.int32) & 0xFFFF) ^ 0x8000) - 0x8000
    return (((master.view(torch.int32) >> 16) + (low < 0).int())).short().view(torch.bfloat16), low.short()


# ---- 8-bit states (bitsandbytes) ------------------------------------------------------------------------------------

BLOCK, SMALLEST = 256, 4096  # elements of a block; of a tensor that bitsandbytes codes in 8 bits


def dynamic_map(signed):
    """The 256 values of Dettmers et al. 2022, ascending."""
    values = [0.0, 1.0]
    for decade in range(7):
        n = 2 ** (decade + (0 if signed else 1))
        part = [(0.1 + 0.9 * (k + 0.5) / n) * 10.0 ** (decade - 6) for k in range(n)]
        values += part + ([-x for x in part] if signed else [])
    return torch.tensor(sorted(values))


def in_blocks(x, size):
    return torch.nn.functional.pad(x, (0, -x.numel() % size)).reshape(-1, size)


def decode(codes, scales, qmap, size=BLOCK):
    return (in_blocks(qmap[codes.long()], size) * scales[:, None]).reshape(-1)[:codes.numel()]


def encode(x, qmap):
    """Codes and scales. A block's largest magnitude gets a code that is exact, also below 0, where the map ends at
    -0.993. A mean square above 0 never gets code 0: beside a first moment, it would make the update huge."""
    blocks = in_blocks(x, BLOCK)
    scales = blocks.max(1).values.clamp(min=0)
    if qmap[0] < 0:
        scales = torch.maximum(scales, (-blocks.min(1).values / -qmap[0]).clamp(min=0))
    y = blocks / torch.where(scales > 0, scales, torch.ones(()))[:, None]
    codes = torch.searchsorted((qmap[1:] + qmap[:-1]) / 2, y.contiguous())
    if qmap[0] == 0:
        codes = torch.where((codes == 0) & (blocks > 0), 1, codes)
    return codes.reshape(-1)[:x.numel()].to(torch.uint8), scales


def read_codes(one, slot, state, key, qmap, squares, notes):
    """Sets moment `slot` of tensor `one` from state1 or state2."""
    codes, scales = state[key].reshape(-1), state.get("absmax" + key[-1])
    refuse_unless(scales is not None, "optimizer.absmax%s.%s is missing", key[-1], one.name)
    refuse_unless(qmap is not None and qmap.numel() == 256, "optimizer.qmap%s, of 256 values, is missing", key[-1])
    scales, qmap = scales.reshape(-1).float(), qmap.float()
    n, size, known = codes.numel(), BLOCK, dynamic_map(signed=not squares)
    if bool(((qmap - known).abs() <= 3e-7 * known.abs()).all()):
        qmap = known
    if scales.numel() != -(-n // BLOCK):
        sizes = [b for b in (64, 128, 512, 1024, 2048, 4096) if -(-n // b) == scales.numel()]
        refuse_unless(sizes, "%s of %s: %d scales for %d codes: no blocks of a size that bitsandbytes has", key,
                      one.name, scales.numel(), n)
        size = sizes[0]
        notes.append("%s: %s has blocks of %d values, not %d: it is coded again" % (SLOT[slot], one.name, size, BLOCK))
    one.moments[slot] = decode(codes, scales, qmap, size)
    one.coded |= size == BLOCK and qmap is known


# ---- files of the other libraries -----------------------------------------------------------------------------------

def read_peer(path, form, rule="adamw", lr=None, step=None):
    data, metadata = open_safetensors(path)
    if form == "fp32":
        return read_fp32(path, data, metadata, rule, lr)
    refuse_unless("format" in metadata, "%s does not say from which optimizer it is: write it with convert.save()",
                  path)
    refuse_unless(metadata["format"] == form, "%s holds a state of %s, not of %s", path, metadata["format"], form)
    refuse_unless("optimizer" in metadata, "%s: its metadata has no correct 'optimizer'", path)
    name, group, ids = metadata["optimizer"], json_of(path, metadata, "group"), ids_of(path, metadata)
    count = step_of(path, metadata) if step is None else step
    own = json_of(path, metadata, "kahan_opt", "{}")
    if "moment_format" in own:  # files before 0.9 have one for all moments
        own.update(first_moment_format=own["moment_format"], second_moment_format=own["moment_format"])
    forms = own.get("weight_format", {})  # by name; files of version 0.2 have one number for all
    if not isinstance(forms, dict):
        forms = dict.fromkeys(ids, forms)
    opt, notes, tensors = options_from(form, name, group), [], []
    cls = class_of(form, name)
    if count is None:
        count = 1
        notes.append("step: %s's %s does not count steps; kahan_opt goes on from step 1, unless --step says otherwise"
                     % (PEERS[form], name))
    refuse_unless(0 <= count < 1 << 32, "%s: step %d is not below 2^32", path, count)
    opt.step = count
    weights = {key[6:]: value for key, value in data.items() if key.startswith("model.")}
    known = {COMPENSATION.get(form), REMAINDER.get(form), "la_param", "eps_sq", "mean_square", *cls.moments.values()}
    known |= {"absmax1", "absmax2", "qmap1", "qmap2"} if form == "bitsandbytes" else set()
    states = collections.defaultdict(dict)
    for key in data:
        if not key.startswith("model."):
            prefix, kind, owner = (key.split(".", 2) + ["", ""])[:3]
            refuse_unless(prefix == "optimizer" and kind in known, "%s: %s has no state `%s`", path, name, key)
            refuse_unless(owner in weights or not owner, "%s: `%s` belongs to no weight of the file", path, key)
            states[owner][kind] = data[key]
    refuse_unless(set(ids) == set(weights), "%s: the names of its metadata are not those of its weights: %s", path,
                  ", ".join(sorted(set(ids) ^ set(weights))))
    refuse_unless(len(set(ids.values())) == len(ids), "%s gives two weights the same id", path)
    for key, weight in sorted(weights.items(), key=lambda item: ids[item[0]]):
        refuse_unless(weight.dtype in FORMAT, "%s: %s has the type %s, not fp32, bf16 or fp16", path, key, weight.dtype)
        one = Tensor(key, ids[key], tuple(weight.shape), weight.reshape(-1), form=forms.get(key))
        refuse_unless(one.form is None or one.form in DTYPE, "the metadata have a wrong value: weight_format = %r",
                      one.form)
        read_states(path, form, cls, opt, one, states[key], states[""], notes)
        tensors.append(one)
    if cls.debiased:
        notes.append("moments: those of %s are bias-corrected; here they are multiplied by 1 - beta^%d" %
                     (PEERS[form], count))
    if cls.make == "radam" and form == "optimi":
        notes.append("eps: optimi's RAdam adds %g to the corrected root, kahan_opt (as PyTorch) to the uncorrected one"
                     % opt.eps)
    return Checkpoint(opt, tensors, notes, {key: own[key] for key in OWN if key in own})


def read_states(path, form, cls, opt, one, state, shared, notes):
    """Sets the moments and the residual of a tensor."""
    n, slots = one.weight.numel(), slots_of(opt)
    needed = [cls.moments[slot] for slot in slots]
    fresh = not any(key in state for key in needed)
    if fresh and slots:
        notes.append("moments: %s has none, as it never had a gradient; they begin as zeros, but count as those of "
                     "step %d" % (one.name, opt.step))
    factor = {slot: -math.expm1(opt.step * math.log(getattr(opt, beta))) if getattr(opt, beta) > 0 else 1.0
              for slot, beta in cls.debiased.items()}
    for slot in slots:
        key = cls.moments[slot]
        if fresh:
            one.moments[slot] = torch.zeros(n)
            continue
        refuse_unless(key in state, "%s: optimizer.%s.%s is missing", path, key, one.name)
        refuse_unless(state[key].numel() == n, "%s: %s of %s has the shape %s, its weight %s", path, key, one.name,
                      list(state[key].shape), list(one.shape))
        if form == "bitsandbytes" and state[key].dtype == torch.uint8:
            read_codes(one, slot, state, key, shared.get("qmap" + key[-1]), slot in squares_of(opt), notes)
        else:
            refuse_unless(state[key].dtype in FORMAT, "%s: %s of %s has the type %s", path, key, one.name,
                          state[key].dtype)
            one.moments[slot] = (state[key].reshape(-1).double() * factor.get(slot, 1.0)).float()
        if key == "prev_grad":
            one.moments[slot] = -one.moments[slot]  # optimi keeps its negative
        if slot in squares_of(opt):
            refuse_unless(not bool((one.moments[slot] < 0).any()), "%s: %s of %s, a mean of squares, has a negative "
                          "number: the file is damaged", path, key, one.name)
    if one.weight.dtype != torch.float32 and COMPENSATION.get(form) in state:
        residual = state[COMPENSATION[form]]
        refuse_unless(residual.numel() == n and residual.dtype in FORMAT, "%s: %s of %s has not the shape of its "
                      "weight, or is not fp32, bf16 or fp16", path, COMPENSATION[form], one.name)
        one.residual = residual.reshape(-1).float()
    if form in REMAINDER and not fresh:
        key = REMAINDER[form]
        refuse_unless(key in state, "%s: optimizer.%s.%s is missing", path, key, one.name)
        rest = state[key].reshape(-1)
        refuse_unless(one.weight.dtype == torch.bfloat16 and rest.numel() == n and
                      rest.dtype in (torch.int16, torch.float32), "%s: %s of %s must have the shape of a bf16 weight "
                      "and be int16 or fp32", path, key, one.name)
        one.master = join(one.weight, rest) if rest.dtype == torch.int16 else rest
        stale = int((split(one.master)[0].view(torch.int16) != one.weight.view(torch.int16)).sum())
        if stale:
            notes.append("weights: %d of %s are not their rounded masters; the masters count" % (stale, one.name))
    if "la_param" in state:
        refuse_unless(opt.step % opt.lookahead == 0, RANGER, path, opt.lookahead, opt.step)


def read_fp32(path, data, metadata, rule, lr):
    """Weights alone, of any file of safetensors: a fresh optimizer."""
    opt, notes, tensors = construct(rule, 1e-3 if lr is None else lr), [], []
    ids = ids_of(path, metadata) if "ids" in metadata else {}
    names = [key for key in sorted(data) if data[key].dtype in FORMAT]
    skipped = [key for key in sorted(data) if data[key].dtype not in FORMAT]
    if skipped:
        notes.append("left out, as they are not fp32, bf16 or fp16: %s" % ", ".join(skipped))
    refuse_unless(names, "%s has no weights", path)
    if set(ids) != set(names):
        ids = {name: i for i, name in enumerate(names)}
    for key in names:
        tensors.append(Tensor(key, ids[key], tuple(data[key].shape), data[key].reshape(-1)))
        tensors[-1].moments = {slot: torch.zeros(data[key].numel()) for slot in slots_of(opt)}
    notes.append("optimizer: a file of weights has none; this one is new (%s, lr %g, step 0)" % (rule, opt.lr))
    return Checkpoint(opt, tensors, notes)


def write_peer(path, ck, form, weights=None, moments=None):
    """Writes the file; ck.notes gets what it cannot hold."""
    opt, data = ck.opt, {}
    meta = {"format": form, "ids": json.dumps({t.name: t.id for t in ck.tensors}), "step": str(opt.step)}
    meta["kahan_opt"] = json.dumps(dict({key: getattr(opt, key) for key in OWN},
                                        weight_format={t.name: t.form for t in ck.tensors if t.form is not None}))
    name = None
    if form != "fp32":
        name = choose_class(form, opt)
        meta.update(optimizer=name + ("8bit" if form == "bitsandbytes" and moments != ko.KOPT_F32 else ""),
                    group=json.dumps(group_from(form, name, opt)))
    for one in ck.tensors:
        weight, value = one.weight, one.value()
        dtype = weight.dtype if weights is None else DTYPE[weights]
        if form in ("fp32", "torch") or form == "bitsandbytes" and weights is None and one.keeps():
            dtype = torch.float32
        if form in REMAINDER:
            dtype = torch.bfloat16
        if form in REMAINDER:
            weight, rest = split(value.float())
            data["optimizer.%s.%s" % (REMAINDER[form], one.name)] = (rest if form == "transformer_engine" else
                                                                     value.float()).reshape(one.shape)
        elif dtype == torch.float32 or weight.dtype != dtype:
            weight = value.float().to(dtype)
        data[("" if form == "fp32" else "model.") + one.name] = weight.reshape(one.shape)
        if form in COMPENSATION and dtype != torch.float32:
            exact = one.residual is not None and weight is one.weight
            rest = one.residual if exact else (value - weight.double()).float()
            rest = torch.where(weight.isfinite(), rest, torch.zeros(()))
            data["optimizer.%s.%s" % (COMPENSATION[form], one.name)] = rest.to(dtype).reshape(one.shape)
        if name is not None:
            write_moments(data, form, CLASSES[form][name], opt, one, dtype, moments)
        if opt.rule == ko.KOPT_RULE_RANGER:
            data["optimizer.la_param." + one.name] = weight.reshape(one.shape).clone()
        if name == "StableAdamW":
            data["optimizer.eps_sq." + one.name] = torch.tensor(opt.eps ** 2, dtype=dtype)
    if form in COMPENSATION:
        group, kahan = json.loads(meta["group"]), any("." + COMPENSATION[form] + "." in key for key in data)
        if form == "optimi":
            group["kahan_sum"] = kahan
        else:
            kept = str(torchdistx_dtype(opt, moments))
            group.update(use_kahan_summation=kahan, momentum_dtype=kept, variance_dtype=kept)
            if kahan:
                group["compensation_buffer_dtype"] = str(dtype)
        meta["group"] = json.dumps(group)
    store_safetensors(path, data, meta)


def torchdistx_dtype(opt, moments):
    return DTYPE.get(opt.first_moment_format if moments is None else moments, torch.float32)


def write_moments(data, form, cls, opt, one, dtype, moments):
    for slot in slots_of(opt):
        key, x = cls.moments[slot], one.moments[slot]
        if slot in cls.debiased and opt.step:
            beta = getattr(opt, cls.debiased[slot])
            x = (x.double() / (-math.expm1(opt.step * math.log(beta)) if beta > 0 else 1.0)).float()
        if key == "prev_grad":
            x = -x
        if form == "bitsandbytes" and moments != ko.KOPT_F32 and x.numel() >= SMALLEST:
            refuse_unless(bool(x.isfinite().all()), "%s of %s is not finite: 8-bit codes cannot hold it", SLOT[slot],
                          one.name)
            qmap = dynamic_map(signed=slot not in squares_of(opt))
            x, data["optimizer.absmax%s.%s" % (key[-1], one.name)] = encode(x, qmap)
            data["optimizer.qmap" + key[-1]] = qmap
        elif form == "optimi":
            x = x.to(dtype)
        elif form == "torchdistx":
            x = x.to(torchdistx_dtype(opt, moments))
        data["optimizer.%s.%s" % (key, one.name)] = x.reshape(one.shape)


# ---- a model and its optimizer --------------------------------------------------------------------------------------

def plain(value):
    """A hyper-parameter for JSON."""
    if isinstance(value, torch.Tensor):
        return value.item()
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, (tuple, list)):
        return [plain(v) for v in value]
    return value if isinstance(value, (bool, int, float, str, type(None))) else None


def parameters_of(model, optimizer, group):
    groups = optimizer.param_groups
    refuse_unless(group is not None or len(groups) == 1, "this optimizer has %d param_groups: make a file of each, "
                  "with group=0, group=1 and so on", len(groups))
    names = {id(p): (name, i) for i, (name, p) in enumerate(model.named_parameters())}
    chosen = groups[group or 0]["params"]
    refuse_unless(all(id(p) in names for p in chosen), "the optimizer has a parameter that the model does not have")
    return groups[group or 0], [(*names[id(p)], p) for p in chosen]


def save(path, form, model, optimizer, group=None):
    """Writes a model and its optimizer (of the library `form`) to a file that this script converts."""
    refuse_unless(form in CLASSES, "there is no format `%s`: it is one of %s", form, ", ".join(CLASSES))
    options, parameters = parameters_of(model, optimizer, group)
    data, steps, saved = {}, set(), optimizer.state_dict()
    number = {id(p): i for g, s in zip(optimizer.param_groups, saved["param_groups"]) for p, i in zip(g["params"],
                                                                                                  s["params"])}
    for name, i, p in parameters:
        data["model." + name] = p.detach().cpu()
        state = dict(saved["state"].get(number[id(p)], {}))
        state.update(state.pop("__bnb_optimizer_quant_state__", {}))
        if "step" in state and len(state) > 1:
            steps.add(int(state["step"]))
        for key, value in state.items():
            if key.startswith("qmap"):
                data["optimizer." + key] = value.cpu()
            elif isinstance(value, torch.Tensor) and key != "step":
                data["optimizer.%s.%s" % (key, name)] = value.detach().cpu()
    for place in (options, saved["state"]):  # optimi, TransformerEngine; apex
        if "step" in place:
            steps.add(int(place["step"]))
    refuse_unless(len(steps) <= 1, "the parameters are at steps %s: kahan_opt has one step count for a list. Save "
                  "those with another count as a group of their own", ", ".join(map(str, sorted(steps))))
    options = {key: plain(value) for key, value in options.items() if key not in ("params", "step")}
    if hasattr(optimizer, "adam_w_mode"):
        options["adam_w_mode"] = bool(optimizer.adam_w_mode)
    meta = {"format": form, "optimizer": type(optimizer).__name__, "group": json.dumps(options),
            "ids": json.dumps({name: i for name, i, _ in parameters})}
    if steps:
        meta["step"] = str(steps.pop())
    write_atomically(path, lambda temporary: store_safetensors(temporary, data, meta))


def load(path, form, model, optimizer, group=None):
    """Sets a model and its optimizer (of the library `form`) from a file of this script."""
    data, meta = open_safetensors(path)
    refuse_unless(meta.get("format") == form, "%s holds a state of %s, not of %s", path, meta.get("format"), form)
    cls, kind = meta.get("optimizer", "nothing"), type(optimizer).__name__
    refuse_unless(class_of(form, cls) == class_of(form, kind), "%s is for %s, not for %s", path, cls, kind)
    options, parameters = parameters_of(model, optimizer, group)
    weights = {key[6:] for key in data if key.startswith("model.")}
    refuse_unless(weights == {name for name, _, _ in parameters}, "%s and the model differ in %s", path,
                  ", ".join(sorted(weights ^ {name for name, _, _ in parameters})))
    for name, _, p in parameters:
        w = data["model." + name]
        refuse_unless(w.shape == p.shape and w.dtype == p.dtype, "%s: %s is %s %s in the file, %s %s in the model",
                      path, name, w.dtype, list(w.shape), p.dtype, list(p.shape))
    whole, states = {"state": {}, "param_groups": optimizer.state_dict()["param_groups"]}, {}
    step, saved = step_of(path, meta), json_of(path, meta, "group")
    options_from(form, cls, saved)  # refuses what is missing or no number
    refuse_unless(step is not None or form in ("optimi", "bitsandbytes") or not any(
        key.startswith("optimizer.exp_avg") for key in data), "%s: its metadata has no correct 'step'", path)
    numbers = whole["param_groups"][group or 0]["params"]
    for number, (name, _, p) in zip(numbers, parameters):
        p.data.copy_(data["model." + name])
        states[p] = {key.split(".", 2)[1]: value.to(p.device) for key, value in data.items()
                     if key.startswith("optimizer.") and key.split(".", 2)[2:] in ([name], [])}
        if form == "bitsandbytes":
            states[p]["step"] = step
        elif form == "torchdistx" or form == "torch" and "exp_avg" in states[p]:
            states[p]["step"] = torch.tensor(float(step))
        elif form == "optimi":
            states[p].setdefault("kahan_comp", None)
        whole["state"][number] = states[p]
    new = {key: getattr(torch, value[6:]) if str(value).startswith("torch.") else value
           for key, value in saved.items() if key != "adam_w_mode"}
    new = {key: tuple(value) if isinstance(value, list) else value for key, value in new.items()}
    if form in REMAINDER:  # these have buffers of their own
        whole["param_groups"][group or 0].update(new, step=step)
        whole["state"]["step"] = step
        optimizer.load_state_dict(whole)
        return
    if form == "optimi" and step is not None:
        new["step"] = torch.tensor(step, dtype=torch.int32)
    options.update(new)
    for p, state in states.items():  # not load_state_dict(), which would round the states to the type of the weight
        optimizer.state[p] = state


# ---- what is lost ---------------------------------------------------------------------------------------------------

def compare(before, after):
    """A line for each kind of number: how many changed, and by how much at most."""
    lines = []
    classes = [("weights", lambda t: t.value())]
    classes += [(SLOT[s], lambda t, s=s: t.moments[s].double()) for s in slots_of(before.opt)]
    other = {t.id: t for t in after.tensors}
    for kind, get in classes:
        if kind != "weights" and not any(t.moments for t in after.tensors):
            lines.append("%s: not in the result" % kind)
            continue
        count = changed = lost = special = 0
        error, relative = 0.0, 0.0
        for t in before.tensors:
            a, b = get(t), get(other[t.id])
            finite = a.isfinite()
            if bool((finite & ~b.isfinite()).any()):
                raise Refused("%s of %s: %.6g is too large for the format of the result" % (
                    kind, t.name, a[finite & ~b.isfinite()].abs().max()))
            special += int((~finite).sum())
            a, b = a[finite], b[finite]
            d = (a - b).abs()
            count, changed = count + t.weight.numel(), changed + int((d != 0).sum())
            lost += int(((a != 0) & (b == 0)).sum())
            if a.numel():
                error = max(error, d.max().item())
                relative = max(relative, torch.where(a == 0, d, d / a.abs()).max().item())
        words = "%d values" % count + (", all exact" if not changed else
                                       ", %d changed; largest error %.2g, relative %.2g" % (changed, error, relative))
        words += "; %d became 0" % lost if lost else ""
        lines.append("%s: %s%s" % (kind, words, "; %d are infinite or NaN, and stay so" % special if special else ""))
    return lines


def is_low(ck):
    """Has any tensor 16-bit weights?"""
    return any(t.form not in (None, ko.KOPT_F32) for t in ck.tensors)


def formats_of(opt):
    """The formats of its moments: that of all, or of the first and the second."""
    pair = [opt.first_moment_format, opt.second_moment_format]
    return pair if squares_of(opt) and pair[0] != pair[1] else pair[:1]


def losses(source, target, before, after):
    """What the target cannot hold or does in another way, in words."""
    a, b, lines = before.opt, after.opt, []
    low, peer = is_low(before), PEERS.get(target, "")
    if source == "kahan_opt":
        stochastic = low and a.rounding in (ko.KOPT_KAHAN, ko.KOPT_COMPACT) and a.residual_rounding
        small = after.tensors and after.tensors[0].weight.dtype != torch.float32
        narrow = small and (target == "optimi" or any(form in (ko.KOPT_BF16, ko.KOPT_FP16) for form in formats_of(a)))
        if target in COMPENSATION and small and (stochastic or a.rounding == ko.KOPT_EXACT):
            lines.append("compensation: %s rounds it to nearest, not stochastically: from now on an update below about "
                         "2^-17 of a weight is lost" % peer)
        if small and target == "bitsandbytes":
            lines.append("residual: bitsandbytes keeps none: from now on an update below 2^-9 of a weight is lost")
        if target in COMPENSATION and narrow and slots_of(a):
            lines.append("moments: %s rounds 16-bit moments to nearest: a second moment with a beta above 0.99 hardly "
                         "falls" % peer)
        if target == "bitsandbytes" and any(t.coded for t in after.tensors):
            lines.append("moments: 8-bit codes of the dynamic map; tensors of fewer than %d elements stay fp32; "
                         "--moments f32 loses nothing" % SMALLEST)
        if squares_of(a) and a.second_moment_format in (ko.KOPT_FP16, ko.KOPT_Q8) and target != "fp32":
            lines.append("second moment: kahan_opt holds its root, %s its square, which is made here" % peer)
        if low and a.rounding == ko.KOPT_STOCHASTIC:
            lines.append("rounding: %s has no stochastic weights" % peer)
        if target != "kahan_opt":
            lines.append("seed %d and the ids: %s has no random bits; only the metadata of the file keeps them" %
                         (a.seed, peer))
        odd = [f for f, default in (("grad_scale", 1), ("clip", 1), ("zero_grad", 0), ("moments_only", 0))
               if getattr(a, f) != default]
        if odd and target != "kahan_opt":
            lines.append("%s: %s has no such option: your loop must do it" % (", ".join(odd), peer))
    elif target == "kahan_opt":
        if "seed" not in before.chosen:
            lines.append("seed and ids: %s has none; the seed is %d, and the ids are the places of the parameters in "
                         "the model" % (PEERS[source], b.seed))
        if squares_of(b) and b.second_moment_format in (ko.KOPT_FP16, ko.KOPT_Q8):
            lines.append("second moment: kahan_opt holds its root in %s" % FORMAT_NAME[b.second_moment_format])
        if ko.KOPT_Q8 in formats_of(b) and any(t.coded for t in before.tensors):
            lines.append("8-bit codes: those of kahan_opt are other codes (docs/evidence.md); "
                         "--moments f32 loses nothing")
    return lines


# ---- the conversion -------------------------------------------------------------------------------------------------

def choose_formats(ck, rounding=None, weights=None, moments=None, seed=None):
    """Sets the formats of a checkpoint of kahan_opt: as asked for, as it was before, or what loses least."""
    opt, types = ck.opt, {t.weight.dtype for t in ck.tensors}
    for key, value in ck.chosen.items():
        try:
            set_exactly(opt, key, value)
        except (TypeError, ValueError):
            raise Refused("the metadata have a wrong value: %s = %r" % (key, value)) from None
    for t in ck.tensors:
        if weights is not None:
            t.form = weights
        elif t.form is None:  # fp32 weights become bf16, unless others are 16-bit weights already
            t.form = ko.KOPT_BF16 if types == {torch.float32} else FORMAT[t.weight.dtype]
    dtype = min(types, key=lambda dtype: (dtype == torch.float32, str(dtype)), default=torch.bfloat16)
    if rounding is not None:
        opt.rounding = rounding
    elif "rounding" not in ck.chosen:
        full = types == {torch.float32} or any(t.master is not None for t in ck.tensors)
        opt.rounding = ko.KOPT_EXACT if full else ko.KOPT_KAHAN
    if moments is not None:
        opt.first_moment_format = opt.second_moment_format = moments
    elif "first_moment_format" not in ck.chosen:
        narrow = any(t.moments for t in ck.tensors) and all(
            bool((m == m.to(dtype).float()).all()) for t in ck.tensors for m in t.moments.values())
        opt.first_moment_format = opt.second_moment_format = (
            ko.KOPT_Q8 if any(t.coded for t in ck.tensors) else
            FORMAT[dtype] if narrow and dtype == torch.bfloat16 else ko.KOPT_F32)
    if seed is not None:
        refuse_unless(0 <= seed < 1 << 64, "--seed: %d is not below 2^64", seed)
        opt.seed = seed


def convert(source, target, path, out, names=None, rounding=None, weights=None, moments=None, seed=None, rule="adamw",
            lr=None, step=None, residual="zero"):
    """Converts a file and returns the report, a list of sentences. Raises Refused, and then leaves `out` as it was.
    residual: "random" draws that of 16-bit weights which have none, for fine-tuning (docs/fine-tuning.md)."""
    refuse_unless(residual in RESIDUALS, "--residual: it is one of %s", ", ".join(RESIDUALS))
    for form in (source, target):
        refuse_unless(form == "kahan_opt" or form in PEERS, "there is no format `%s`: it is one of kahan_opt, %s", form,
                      ", ".join(PEERS))
    read = read_kahan_opt if source == "kahan_opt" else lambda p, _: read_peer(p, source, rule, lr, step)
    before = read(path, names)
    wrong = "--%s: %s has no such choice"
    refuse_unless(rounding is None or target == "kahan_opt", wrong, "rounding", PEERS.get(target))
    refuse_unless(residual == "zero" or target == "kahan_opt", wrong, "residual", PEERS.get(target))
    refuse_unless(weights is None or target not in ("fp32", "torch", *REMAINDER), wrong, "weights", PEERS.get(target))
    refuse_unless(moments is None or target == "kahan_opt" or target == "bitsandbytes" and moments == ko.KOPT_F32 or
                  target == "torchdistx" and moments != ko.KOPT_Q8, wrong, "moments", PEERS.get(target))

    def write(temporary):
        if target == "kahan_opt":
            new = dataclasses.replace(before, opt=ko.kopt_optimizer.from_buffer_copy(before.opt),
                                      tensors=list(map(dataclasses.replace, before.tensors)))
            choose_formats(new, rounding, weights, moments, seed)
            draw = residual == "random"
            refuse_unless(not draw or new.opt.rounding in (ko.KOPT_KAHAN, ko.KOPT_COMPACT, ko.KOPT_EXACT) and
                          is_low(new), "--residual random: these weights keep no residual")
            write_kahan_opt(temporary, new, draw)
            after = read_kahan_opt(temporary)
            if draw:
                before.notes.append("residuals: drawn at random from what rounds to the weights, by seed %d; the "
                                    "weights are compared without them" % new.opt.seed)
                for t in after.tensors:
                    t.master = t.residual = None
        else:
            write_peer(temporary, before, target, weights, moments)
            after = read_peer(temporary, target)
        if target == "fp32":
            for t in after.tensors:
                t.moments = {}
        return before.notes + compare(before, after) + losses(source, target, before, after)

    return write_atomically(out, write)


def inspect(path):
    """What a file holds, as lines."""
    if read_bytes(path)[:4] == b"KSAV":
        ck = read_kahan_opt(path)
        rules = {value: key for key, value in vars(ko).items() if key.startswith("KOPT_RULE_")}
        lines = ["kahan_opt: %s, step %d, seed %d, weights %s%s, moments %s" % (
            rules[ck.opt.rule], ck.opt.step, ck.opt.seed,
            " and ".join(FORMAT_NAME[form] for form in sorted({t.form for t in ck.tensors})),
            " " + {v: k for k, v in ROUNDING.items()}[ck.opt.rounding] if is_low(ck) else "",
            " and ".join(FORMAT_NAME[form] for form in formats_of(ck.opt)))]
        lines.append("  lr %g, weight_decay %g, " % (ck.opt.lr, ck.opt.weight_decay) + ", ".join(
            "%s %g" % (f, getattr(ck.opt, f)) for f in READ[ck.opt.rule].split()))
        return lines + ["  tensor %d: %d elements" % (t.id, t.weight.numel()) for t in ck.tensors]
    data, meta = open_safetensors(path)
    lines = ["%s: %s, step %s" % (meta.get("format", "safetensors"), meta.get("optimizer", "weights only"),
                                  meta.get("step", "not counted"))] + ["  " + meta.get("group", "")]
    ids = ids_of(path, meta) if "ids" in meta else {}
    for key in sorted(data):
        name = key[6:] if key.startswith("model.") else key
        lines.append("  %s: %s %s%s" % (key, str(data[key].dtype)[6:], list(data[key].shape),
                                        ", id %d" % ids[name] if name in ids else ""))
    return lines


def main(arguments):
    if arguments[:1] == ["inspect"] and len(arguments) == 2:
        print("\n".join(inspect(arguments[1])))
        return
    p = argparse.ArgumentParser(
        usage="convert.py FROM TO IN OUT [options]\n       convert.py inspect FILE",
        description="Converts optimizer states and says on stderr what is lost. Formats: kahan_opt (bytes of "
        "kopt_save()), %s (safetensors). Without options the result is what loses least." % ", ".join(PEERS))
    for name in ("source", "target", "input", "output"):
        p.add_argument(name, metavar={"source": "FROM", "target": "TO", "input": "IN", "output": "OUT"}[name])
    p.add_argument("--names", metavar="FILE", help="from kahan_opt: names and shapes of the tensor ids, as JSON "
                   '{"NAME": {"id": 0, "shape": [2, 3]}, ...} or as a file that this script wrote')
    p.add_argument("--rounding", choices=ROUNDING, help="to kahan_opt: what is kept beside 16-bit weights")
    p.add_argument("--weights", choices=("f32", "bf16", "fp16"), help="the format of the weights")
    p.add_argument("--moments", choices=NAMED_FORMAT, help="the format of the moments")
    p.add_argument("--seed", type=int, help="to kahan_opt: of its random bits; default 0")
    p.add_argument("--residual", choices=RESIDUALS, default="zero", help="to kahan_opt, from 16-bit weights without a "
                   "residual: random draws it, for fine-tuning (docs/fine-tuning.md)")
    p.add_argument("--step", type=int, help="from an optimizer that does not count its steps: how many it has made")
    p.add_argument("--rule", default="adamw", choices=("sgd", "adam", "adamw", "stable_adamw", "lion", "adan", "radam",
                                                       "ranger"), help="from fp32: the new optimizer; default adamw")
    p.add_argument("--lr", type=float, help="from fp32: its learning rate; default 0.001")
    a = p.parse_args(arguments)
    report = convert(a.source, a.target, a.input, a.output, a.names, ROUNDING.get(a.rounding),
                     NAMED_FORMAT.get(a.weights), NAMED_FORMAT.get(a.moments), a.seed, a.rule, a.lr, a.step,
                     a.residual)
    for line in report:
        print("convert: " + line, file=sys.stderr)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except Refused as refused:
        sys.exit("convert: %s. Nothing was written." % refused)
