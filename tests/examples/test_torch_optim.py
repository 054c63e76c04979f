"""The generic checks of PyTorch's own tests of optimizers, on the configurations that PyTorch has for them. Prints TAP.

    python3 test_torch_optim.py FOLDER [WORD]     FOLDER: what ./build.sh python made; WORD: only tests with it

The classes are registered as OptimizerInfo, with the configurations, schedulers and wrong arguments of
torch.testing._internal.common_optimizers: of PyTorch 2.3 and later, which ./build.sh bench torch tests installs. With
an older one, such as Debian's, the configurations are those in CONFIGURATIONS."""
import copy
import io
import re
import sys
import types
import unittest
import warnings

sys.dont_write_bytecode = True
import test_torch  # noqa: E402
from test_torch import BF16, F32, F64, Skip, equal, noise, parameters, refused, set_grads, steps, test  # noqa: E402

import torch  # noqa: E402
from torch.nn import Parameter  # noqa: E402
from kahan_opt import KahanAdamW, KahanOptimizer, KahanSGD  # noqa: E402

del test_torch.tests[:]
try:
    if "expecttest" not in sys.modules:  # the tests of PyTorch import it, these do not need it
        sys.modules["expecttest"] = types.ModuleType("expecttest")
        sys.modules["expecttest"].TestCase = unittest.TestCase
    from torch.testing._internal import common_optimizers as theirs
except ImportError:
    theirs = None

schedules = torch.optim.lr_scheduler
ADAM = [{}, {"lr": 0.01}, {"weight_decay": 0.1}, {"weight_decay": 0.1, "maximize": True},
        {"weight_decay": 0.1, "amsgrad": True}]
CONFIGURATIONS = {
    "Adam": ADAM, "AdamW": ADAM, "RAdam": [{}, {"lr": 2e-3}, {"eps": 1e-6}, {"weight_decay": 0.1}],
    "SGD": [{"lr": 1e-3}, {"lr": 1e-2}, {"lr": 1e-3, "weight_decay": 0.5}, {"lr": 1e-3, "momentum": 0.9},
            {"lr": 1e-3, "weight_decay": 0.1, "maximize": True}, {"lr": 1e-3, "momentum": 0.9, "dampening": 0.5},
            {"lr": 1e-3, "momentum": 0.9, "weight_decay": 0.1},
            {"lr": 1e-3, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}]}
SCHEDULERS = [[lambda o: schedules.ExponentialLR(o, gamma=0.9)],
              [lambda o: schedules.StepLR(o, gamma=0.9, step_size=10), schedules.ReduceLROnPlateau]]
# What PyTorch refuses and these classes take: betas may be floats and tensors, mixed.
TAKEN = ("betas must be either both floats or both Tensors",)


class KahanAdam(KahanOptimizer):
    def __init__(self, params, **options):
        super().__init__(params, "adam", **options)


class KahanRAdam(KahanOptimizer):
    def __init__(self, params, **options):
        super().__init__(params, "radam", **options)


class Info:
    """A class, its counterpart in torch.optim, and what PyTorch would run it with."""

    def __init__(self, optim_cls, torchs):
        self.optim_cls, self.torchs, self.schedulers, self.errors = optim_cls, torchs, SCHEDULERS, []
        configurations = CONFIGURATIONS[torchs.__name__]
        if theirs:
            entry, = (entry for entry in theirs.optim_db if entry.optim_cls is torchs)
            registered = theirs.OptimizerInfo(
                optim_cls, optim_inputs_func=entry.optim_inputs_func, scheduler_inputs=entry.scheduler_inputs,
                optim_error_inputs_func=entry.optim_error_inputs_func, supported_impls=(), supports_complex=False)
            theirs.optim_db.append(registered)
            configurations = [i.kwargs for i in registered.optim_inputs_func("cpu", F32)]
            self.schedulers = registered.scheduler_inputs
            self.errors = registered.optim_error_inputs_func("cpu", F32)
        self.configurations = [dict(c, lr=c.get("lr", 1e-3)) for c in configurations]

    def __iter__(self):
        """Fresh options of each configuration."""
        return iter(copy.deepcopy(self.configurations))


INFOS = [Info(KahanAdamW, torch.optim.AdamW), Info(KahanAdam, torch.optim.Adam), Info(KahanRAdam, torch.optim.RAdam),
         Info(KahanSGD, torch.optim.SGD)]
cases = 0


def check(function):
    """A test for each class, with all of its configurations."""
    for info in INFOS:
        def run(info=info):
            global cases
            count = function(info)
            cases += len(info.configurations) if count is None else count

        run.__name__ = function.__name__ + "_" + info.optim_cls.__name__
        run.__doc__ = "%s: %s" % (info.optim_cls.__name__, function.__doc__)
        test(run)


def fit(optimizer, weight, bias, x, count=20, chain=()):
    """The loss before and after some steps of a small regression."""
    def closure():
        optimizer.zero_grad()
        loss = (weight.float().mv(x.float()) + bias.float()).pow(2).sum()
        loss.backward()
        return loss

    first = closure().item()
    for _ in range(count):
        loss = optimizer.step(closure)
        for scheduler in chain:
            scheduler.step(loss) if isinstance(scheduler, schedules.ReduceLROnPlateau) else scheduler.step()
    return first, closure().item()


def regression(dtype, contiguous=True):
    weight, bias = noise(10, 5, dtype=dtype), noise(10, dtype=dtype)
    if not contiguous:
        weight, bias = (torch.stack([x, x], -1)[..., 0] for x in (weight, bias))
    return Parameter(weight), Parameter(bias), noise(5, seed=7, dtype=dtype)


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


@check
def tolerances(info):
    """fp32 stays within torch.testing's tolerances of torch.optim in every configuration: weights and moments"""
    for options in info:
        ours, others = parameters(F32), parameters(F32)
        a, b = info.optim_cls(ours, **options), info.torchs(others, **options)
        for t in range(1, 8):
            for params in (ours, others):
                set_grads(params, t)
            a.step()
            b.step()
            torch.testing.assert_close(ours, others)
        for p, q in zip(ours, others):
            moments = {name: value for name, value in b.state[q].items() if name != "step" and value is not None}
            torch.testing.assert_close(a.moments(p), moments)


@check
def direction(info):
    """the loss goes the right way, in fp32 and bf16, contiguous or not"""
    for options in info:
        for dtype in (F32, BF16):
            for contiguous in (True, False):
                weight, bias, x = regression(dtype, contiguous)
                first, last = fit(info.optim_cls([weight, bias], **options), weight, bias, x)
                assert last > first if options.get("maximize") else last < first, options
    return 4 * len(info.configurations)


@check
def scheduled(info):
    """the same with the schedulers that PyTorch has for the class, and with two parameter groups"""
    for options in info:
        for chain in info.schedulers:
            for grouped in (False, True):
                weight, bias, x = regression(F32)
                params = [{"params": [weight]}, {"params": [bias], "lr": 0.01}] if grouped else [weight, bias]
                optimizer = info.optim_cls(params, **copy.deepcopy(options))  # schedulers write to a tensor
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    first, last = fit(optimizer, weight, bias, x, chain=[make(optimizer) for make in chain])
                assert last > first if options.get("maximize") else last < first, options
    return 2 * len(info.schedulers) * len(info.configurations)


@check
def tensor_rates(info):
    """a learning rate that is a tensor of 0, 1 or 2 dimensions gives the bits of the number, also after fill_()"""
    for options in info:
        for shape in ((), (1,), (1, 1)):
            ours, others = parameters(F32), parameters(F32)
            a = info.optim_cls(ours, **dict(options, lr=torch.full(shape, 0.25)))
            b = info.optim_cls(others, **dict(options, lr=0.25))
            assert equal(steps(a, ours, 2), steps(b, others, 2))
            a.param_groups[0]["lr"].fill_(0.5)
            b.param_groups[0]["lr"] = 0.5
            assert equal(steps(a, ours, 2), steps(b, others, 2)) and isinstance(a.param_groups[0]["lr"], torch.Tensor)
    return 3 * len(info.configurations)


@check
def errors(info):
    """the wrong arguments of PyTorch's list are refused with its words, or warned about"""
    if not info.errors:
        raise Skip("this PyTorch has no list of wrong arguments")
    for entry in info.errors:
        given = entry.optimizer_error_input
        params = [Parameter(torch.randn(1))] if given.params is None else given.params
        if any(words in entry.error_regex for words in TAKEN) or given.kwargs.get("foreach"):
            info.optim_cls(params, **given.kwargs)
        elif issubclass(entry.error_type, Warning):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                info.optim_cls(params, **given.kwargs)
            assert any(re.search(entry.error_regex, str(w.message)) for w in caught), given.desc
        else:
            try:
                info.optim_cls(params, **given.kwargs)
                raise AssertionError("not refused: " + given.desc)
            except entry.error_type as error:
                assert re.search(entry.error_regex, str(error)), (given.desc, error)
    return len(info.errors)


@check
def noops(info):
    """gradients of zero, no gradients, empty gradients: the weights stay, the moments decay"""
    for options in info:
        weight, bias, _ = regression(F32)
        empty = Parameter(torch.zeros(0, 3))
        optimizer = info.optim_cls([weight, bias, empty], **options)
        before = [weight.detach().clone(), bias.detach().clone()]
        optimizer.step()
        assert equal(before, [weight.detach(), bias.detach()]) and not optimizer.state
        empty.grad = torch.zeros(0, 3)
        optimizer.step()
        assert equal(before, [weight.detach(), bias.detach()])
        weight.grad, bias.grad = torch.zeros_like(weight), torch.zeros_like(bias)
        optimizer.step()
        assert equal(before, [weight.detach(), bias.detach()]) == (options.get("weight_decay", optimizer.defaults[
            "weight_decay"]) == 0)


@check
def checkpoints(info):
    """state_dict() is deterministic, loads with equal options and steps, through a file, deepcopy and older forms"""
    for options in info:
        for dtype in (F32, BF16):
            params, copies = parameters(dtype), parameters(dtype)
            optimizer = info.optim_cls(params, **options)
            steps(optimizer, params, 3)
            for p, q in zip(params, copies):
                q.data.copy_(p.data)
            for how in (copy.deepcopy, through_a_file):
                other = info.optim_cls(copies, **options)
                saved = how(optimizer.state_dict())
                for group in saved["param_groups"]:  # as of a version that lacked this option
                    group.pop("maximize")
                    group.setdefault("maximize", options.get("maximize", False))
                other.load_state_dict(saved)
                one, two = optimizer.state_dict(), other.state_dict()
                assert one["param_groups"] == two["param_groups"] and one["state"].keys() == two["state"].keys()
                for i, s in one["state"].items():
                    assert all(torch.equal(torch.as_tensor(s[n]), torch.as_tensor(two["state"][i][n])) for n in s)
            twin, own = copy.deepcopy((optimizer, params))
            assert {name for name in vars(optimizer) if name[0] != "_"} <= set(vars(twin))
            assert equal(steps(twin, own, 2, first=4), steps(other, copies, 2, first=4))
    return 4 * len(info.configurations)


@check
def torchs_checkpoints(info):
    """the state of torch.optim loads, with its step as a number, too, and goes on within its tolerances"""
    for options in info:
        ours, others = parameters(F32), parameters(F32)
        b = info.torchs(others, **options)
        steps(b, others, 5)
        for p, q in zip(ours, others):
            p.data.copy_(q.data)
        saved = copy.deepcopy(b.state_dict())
        for s in saved["state"].values():
            if "step" in s:
                s["step"] = float(s["step"])
        a = info.optim_cls(ours)
        a.load_state_dict(saved)
        steps(a, ours, 3, first=6)
        steps(b, others, 3, first=6)
        torch.testing.assert_close(ours, others)
        again = info.torchs(parameters(F32), **options)
        again.load_state_dict(a.torch_state_dict())
        for p, q in zip(again.param_groups[0]["params"], others):
            assert all(value is None or torch.allclose(value, again.state[p][name], rtol=1e-5, atol=1e-6)
                       for name, value in b.state[q].items())


@check
def hooks(info):
    """hooks of one optimizer and of all, before and after a step"""
    if not hasattr(torch.optim.Optimizer, "register_load_state_dict_pre_hook"):
        raise Skip("this PyTorch has no hooks")
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
    for options in info:
        said, params = [], parameters(F32)
        optimizer = info.optim_cls(params, **options)
        handles = [register_optimizer_step_pre_hook(lambda *a: said.append(0)),
                   optimizer.register_step_pre_hook(lambda *a: said.append(1)),
                   optimizer.register_step_post_hook(lambda *a: said.append(2)),
                   register_optimizer_step_post_hook(lambda *a: said.append(3))]
        steps(optimizer, params, 2)
        for handle in handles:
            handle.remove()
        steps(optimizer, params, 1)
        assert sorted(said) == [0, 0, 1, 1, 2, 2, 3, 3] and said[0] in (0, 1) and said[3] in (2, 3)


@check
def groups(info):
    """each group has its own rate and decay: decay pulls the second one towards zero faster"""
    for options in info:
        if options.get("maximize"):
            continue
        a, b = Parameter(torch.ones(10, 5)), Parameter(torch.ones(10, 5))
        optimizer = info.optim_cls([{"params": [a], "weight_decay": 0.0}, {"params": [b], "weight_decay": 0.5}],
                                   **dict(options, lr=0.01))
        for _ in range(5):
            a.grad, b.grad = torch.zeros_like(a), torch.zeros_like(b)
            optimizer.step()
        assert bool((a == 1).all()) and bool((b < 1).all()), options


@check
def other_dtypes(info):
    """a default dtype of float64 changes nothing; complex and sparse tensors are refused"""
    for options in info:
        one, two = parameters(F32), parameters(F32)
        steps(info.optim_cls(one, **options), one, 3)
        torch.set_default_dtype(F64)
        try:
            optimizer = info.optim_cls(two, **options)
            for t in range(1, 4):
                for i, p in enumerate(two):
                    p.grad = torch.randn(*p.shape, generator=torch.Generator().manual_seed(1000 * t + i), dtype=F32)
                optimizer.step()
        finally:
            torch.set_default_dtype(F32)
        assert equal(one, two)
        odd = Parameter(torch.ones(2, dtype=torch.complex64))
        odd.grad = torch.ones(2, dtype=torch.complex64)
        refused(TypeError, "torch.view_as_real", info.optim_cls([odd], **options).step)
        p = Parameter(torch.ones(3))
        p.grad = torch.ones(3).to_sparse()
        refused(RuntimeError, "sparse gradients", info.optim_cls([p], **options).step)


@check
def named(info):
    """parameters with names: the names are in state_dict(), which loads with and without them"""
    model = torch.nn.Linear(3, 4)
    try:
        torch.optim.SGD(model.named_parameters(), lr=1)
    except TypeError:
        raise Skip("this PyTorch has no named parameters") from None
    for options in info:
        optimizer = info.optim_cls(model.named_parameters(), **options)
        steps(optimizer, list(model.parameters()), 2)
        saved = optimizer.state_dict()
        assert saved["param_groups"][0]["param_names"] == ["weight", "bias"]
        plain = info.optim_cls(model.parameters(), **options)
        plain.load_state_dict(saved)
        info.optim_cls(model.named_parameters(), **options).load_state_dict(plain.state_dict())
        refused(ValueError, "with/without names", info.optim_cls(model.named_parameters()).add_param_group,
                {"params": [Parameter(torch.ones(2))]})


@test
def counted():
    """the number of cases"""
    print("# %d cases in %d configurations of %s" % (cases, sum(len(i.configurations) for i in INFOS), (
        "PyTorch's OptimizerInfo" if theirs else "this file")))


if __name__ == "__main__":
    test_torch.main()
