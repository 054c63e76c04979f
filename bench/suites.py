"""Other libraries' own tests of their optimizers, on the classes of docs/examples/python in their place: a part of
./build.sh bench torch tests. Prints for each library how many pass, and what does not; or why it is skipped.

    python3 bench/suites.py [LIBRARY]

The sources are fetched by git, at the commits below, into build/suites; packages go into a venv there, which takes
PyTorch from build/peers. SUITES says which tests: those that a class with other arguments and another state can take.
Left out are tests of names, arguments and memory of their own, large tensors, and all that needs a GPU. `trainer` uses
the Trainer of transformers, which is on accelerate, and resumes."""
import importlib
import inspect
import operator
import os
import re
import subprocess
import sys
import tempfile
import types
import venv

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
FOLDER = os.path.join(ROOT, "build", "suites")
PYTHON = os.path.join(FOLDER, "bin", "python")
PACKAGES = ("pytest", "lion-pytorch", "parameterized", "expecttest", "transformers==5.24.0", "accelerate==1.15.0")
SUITES = {  # repository, commit, files, and a pattern of the names of tests
    "optimi": ("warner-benjamin/optimi", "17a3d5422f3e41bb8973e1e4c9b39206c0d93b6d", ["tests"],
               "test_normal|param_groups|release|accumulation"),
    "pytorch_optimizer": ("kozistr/pytorch_optimizer", "7a076d2f8f09735e82f9ec1d2d389ec2526bbdbb",
                          ["tests/test_optimizers.py"], "f32_optimizers|bf16_optimizers"),
    "bitsandbytes": ("bitsandbytes-foundation/bitsandbytes", "95f9af309d4d5793847169c39288dcd3fcbdf564",
                     ["tests/test_optim.py"], "_(optimizer|lion)32bit.*dim2=(32|1)-(?!.*opt=(?!adam|momentum|lion))"),
    "torchao": ("pytorch/ao", "36027d82d1ad9949597ea16002ff4940374b1b94", ["test/test_low_bit_optim.py"],
                "(smoke|default_dtype|param_groups).*8bit|bf16_stochastic_round_correctness"),
    "flashoptim": ("databricks/flashoptim", "8b2d966e0329ed2b0c22c3782cae3989c0ccb03b", ["test/test_optimizers.py"],
                   "modifies_weights|zero_grads|descends|sgd_zero_momentum|multi_param_group"),
}

# What they call arguments that these classes have (None: what it asks for is so here), and what is one for all.
NAMES = {"k": "lookahead", "alpha": "lookahead_rate", "torch_init": None}
WORDS = ("decouple_wd", "decouple_lr", "kahan_sum")


def stand_ins(rules, base, **always):
    """A class for each of theirs, with its arguments and defaults."""
    from kahan_opt.options import defaults_of

    def make(theirs, rule):
        form, known = inspect.signature(theirs.__init__), defaults_of(rule, {}).keys() | set(WORDS)

        def __init__(self, *values, **options):
            given = form.bind(self, *values, **options)
            given.arguments.update(given.arguments.pop("kwargs", {}))
            asked = {name for name in given.arguments if given.arguments[name] and NAMES.get(name, name) is not None}
            given.apply_defaults()
            options = {NAMES.get(name, name): x for name, x in given.arguments.items()
                       if NAMES.get(name, name) in known}
            if options.get("dampening") is True:
                options["dampening"] = options["momentum"]
            for name in asked - {"self", "params", "foreach"}:
                assert NAMES.get(name, name) in known, "these classes have no " + name
            base.__init__(self, given.arguments["params"], rule, **options, **always)
        __init__.__signature__ = form
        return type(theirs.__name__, (base,), {"__init__": __init__})
    return {theirs.__name__: make(theirs, rule) for theirs, rule in rules.items()}


def optimi(base):
    import optimi as lib
    import optimi.optimizer
    import kahan_opt.torch
    rules = {lib.Adam: "adam", lib.AdamW: "adamw", lib.Adan: "adan", lib.Lion: "lion", lib.RAdam: "radam",
             lib.Ranger: "ranger", lib.SGD: "sgd", lib.StableAdamW: "stable_adamw"}
    for name, ours in stand_ins(rules, base).items():
        setattr(lib, name, ours)
    lib.optimizer.OptimiOptimizer = base
    for name in ("param_groups_weight_decay", "prepare_for_gradient_release", "remove_gradient_release"):
        setattr(lib, name, getattr(kahan_opt.torch, name))


def pytorch_optimizer(base):
    import pytorch_optimizer as lib
    from tests import constants
    ours = stand_ins({lib.AdamW: "adamw", lib.Adan: "adan", lib.Lion: "lion", lib.RAdam: "radam", lib.Ranger: "ranger",
                      lib.SGDW: "sgd", lib.StableAdamW: "stable_adamw"}, base)
    known = {"lr", "betas", "eps", "weight_decay", "momentum", "nesterov"}
    constants.OPTIMIZERS[:] = [(ours[theirs.__name__], config, steps) for theirs, config, steps in constants.OPTIMIZERS
                               if theirs.__name__ in ours and config.keys() <= known]


def bitsandbytes(base):
    import bitsandbytes as lib
    for name, ours in stand_ins({lib.optim.Adam: "adam", lib.optim.Lion: "lion", lib.optim.SGD: "sgd"}, base,
                                moment_format="f32").items():
        setattr(lib.optim, name, ours)
    from tests import test_optim as theirs
    for names in theirs.str2statenames.values():  # state1 and state2 there
        names[:] = [(row[0], row[0], *row[2:]) for row in names]


def torchao(base):
    from torchao import optim as lib
    for name, ours in stand_ins({lib.Adam8bit: "adam", lib.AdamW8bit: "adamw"}, base, moment_format="q8").items():
        setattr(lib, name, ours)

    def rounded(params, bf16_stochastic_round, **options):
        return base(params, "adamw", rounding="stochastic", **options)
    lib._AdamW = rounded


def flashoptim(base):
    import flashoptim as lib

    class Flash:
        """Their view of a state: moments that materialize()."""

        def __init__(self, rule, params, *, quantize=True, master_weight_bits=24, fused=True, check_numerics=False,
                     **options):
            self.inner = base(params, rule, rounding={None: "nearest", 24: "compact", 32: "kahan"}[master_weight_bits],
                              moment_format="q8" if quantize else "f32", **options)

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def _ensure_state_initialized(self, p, hparams):
            self.inner._begin([self.inner._member(p)])

        @property
        def state(self):
            return {p: {name: types.SimpleNamespace(materialize=lambda x=x: x, is_quantized=lambda: False)
                        for name, x in self.inner.moments(p).items()}
                    for group in self.inner.param_groups for p in group["params"]}

    for name, rule in (("FlashLion", "lion"), ("FlashSGD", "sgd"), ("FlashAdamW", "adamw"), ("FlashAdam", "adam")):
        setattr(lib, name, lambda params, rule=rule, **options: Flash(rule, params, **options))


def trainer():
    """A run that is resumed after half of its steps ends with the bits of one that is not."""
    import torch
    import transformers
    from kahan_opt import KahanAdamW

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layers = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 1))
            self.bfloat16()

        def forward(self, x, labels):
            return {"loss": (self.layers(x.bfloat16()) - labels).float().square().mean()}

    def train(folder, checkpoint=None):
        model = Model()
        optimizer = KahanAdamW(model.parameters(), lr=1e-2)
        rate = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 6)
        transformers.Trainer(model=model, train_dataset=data, optimizers=(optimizer, rate),
                             args=transformers.TrainingArguments(
                                 output_dir=folder, max_steps=6, save_steps=3, per_device_train_batch_size=8,
                                 use_cpu=True, report_to=[], disable_tqdm=True)).train(checkpoint)
        return [[p, *optimizer.state[p].values()] for p in model.parameters()]

    data = [{"x": torch.randn(16, generator=torch.Generator().manual_seed(i)), "labels": torch.ones(1)}
            for i in range(64)]
    with tempfile.TemporaryDirectory() as folder:
        whole, resumed = train(folder), train(folder + "/resumed", folder + "/checkpoint-3")
    same = all(torch.equal(torch.as_tensor(a), torch.as_tensor(b))
               for one, other in zip(whole, resumed) for a, b in zip(one, other))
    sys.exit(print("transformers %s: the resumed run has %s bits" % (
        transformers.__version__, "the same" if same else "OTHER")) or not same)


def fetch(name, folder):
    """The sources of a library."""
    repository, commit, files, _ = SUITES[name]
    git = ["git", "-C", folder]
    if not os.path.isdir(folder):
        os.makedirs(folder)
        subprocess.check_call(git + ["init", "-q"])
    if subprocess.call(git + ["cat-file", "-e", commit + "^{commit}"], stderr=subprocess.DEVNULL):
        subprocess.check_call(git + ["fetch", "-q", "--depth", "1", "https://github.com/" + repository, commit])
    subprocess.check_call(git + ["checkout", "-q", "-f", commit])
    if name == "flashoptim":  # it looks for a GPU, in all tests
        for file in [*files, "test/conftest.py"]:
            with open(os.path.join(folder, file)) as f:
                text = f.read().replace('device = "cuda"', 'device = "cpu"').replace("pytest.exit(", "str(")
            with open(os.path.join(folder, file), "w") as f:
                f.write(text.replace("returncode=1,", ""))


def run(name):
    """In the venv: the tests of one library."""
    sys.path[0] = os.path.join(ROOT, "build", "python")
    if name == "trainer":
        trainer()
    import pytest
    folder, (_, _, files, select) = os.path.join(FOLDER, name), SUITES[name]
    os.chdir(folder)
    if name in ("torchao", "bitsandbytes"):  # the packages: parts of them are compiled
        importlib.import_module(name)
    sys.path.insert(0, folder)
    from kahan_opt.torch import KahanOptimizer
    globals()[name](KahanOptimizer)
    chosen = types.SimpleNamespace(pytest_collection_modifyitems=lambda items: operator.setitem(
        items, slice(None), [item for item in items if re.search(select, item.name)]))
    sys.exit(pytest.main(["-q", "--no-header", "--tb=line", "-p", "no:cacheprovider", "-W", "ignore", "-o", "addopts=",
                          *files], [chosen]))


def main():
    if sys.argv[1:2] == ["in-venv"]:
        run(sys.argv[2])
    if not os.path.exists(PYTHON):
        venv.create(FOLDER, with_pip=True)
    site = subprocess.check_output([PYTHON, "-c", "import site; print(site.getsitepackages()[0])"], text=True).strip()
    with open(os.path.join(site, "peers.pth"), "w") as f:
        f.write(os.path.join(ROOT, "build", "peers") + "\n")
    subprocess.call([PYTHON, "-m", "pip", "install", "-q", *PACKAGES])
    for name in sys.argv[1:] or [*SUITES, "trainer"]:
        print("# %s" % name, flush=True)
        try:
            if name in SUITES:
                fetch(name, os.path.join(FOLDER, name))
        except (OSError, subprocess.CalledProcessError) as error:
            print("SKIP %s: its sources cannot be fetched (%s)" % (name, error))
            continue
        subprocess.call([PYTHON, os.path.abspath(__file__), "in-venv", name], env={
            name: value for name, value in os.environ.items() if name != "PYTHONPATH"})


if __name__ == "__main__":
    main()
