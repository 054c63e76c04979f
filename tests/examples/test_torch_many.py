"""The optimizers beside what else a training has: several processes, FSDP2, checkpoints of torch.distributed,
torch.compile, several optimizers under one GradScaler, SAM. Prints TAP.

    python3 test_torch_many.py FOLDER [WORD]     FOLDER: what ./build.sh python made; WORD: only tests with it"""
import copy
import os
import subprocess
import sys
import tempfile
import traceback

sys.dont_write_bytecode = True
import test_torch  # noqa: E402
from test_torch import BF16, FP16, F32, Skip, backward, equal, model_of, noise  # noqa: E402
from test_torch import parameters, refused, steps, test  # noqa: E402

import torch  # noqa: E402
from torch.nn import Parameter  # noqa: E402
from kahan_opt import KahanAdamW, KahanOptimizer, KahanSGD  # noqa: E402

del test_torch.tests[:]
RANKS = 2
jobs = {}


def on_ranks(function, worlds=(RANKS,)):
    """A test that runs as RANKS processes, which are in a group with gloo. `function` gets the rank and a folder.
    worlds: numbers of processes, which run one after the other with the same folder."""
    jobs[function.__name__] = function

    def run():
        with tempfile.TemporaryDirectory() as folder:
            for ranks in worlds:
                run_on(ranks, folder)

    def run_on(ranks, folder):
        processes = [subprocess.Popen([sys.executable, __file__, sys.argv[1], function.__name__, str(rank), str(ranks),
                                       folder], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
                     for rank in range(ranks)]
        try:
            said = [process.communicate(timeout=240)[0] for process in processes]  # a rank that waits is killed
        finally:
            for process in processes:
                process.kill()
        for text in said:
            if "SKIP " in text:
                raise Skip(text.split("SKIP ")[1].splitlines()[0])
        assert all(process.returncode == 0 for process in processes), "\n".join(said)

    run.__name__, run.__doc__ = function.__name__, function.__doc__
    test(run)


def rank_main(name, rank, ranks, folder):
    import torch.distributed as dist
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks, init_method="file://%s/store%d" % (folder, ranks))
    try:
        jobs[name](rank, folder)
    except Skip as reason:
        print("SKIP %s" % reason)
    finally:
        dist.barrier()
        dist.destroy_process_group()


def train(model, optimizer, first, last):
    for t in range(first, last):
        optimizer.zero_grad()
        backward(model, t)
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@on_ranks
def data_parallel(rank, folder):
    """DistributedDataParallel: the ranks have the same weights, those of one process with the averaged gradients"""
    from torch.nn.parallel import DistributedDataParallel
    alone, shared = model_of(F32), model_of(F32)
    a, b = (KahanAdamW(m.parameters(), lr=0.01, moment_format="bf16") for m in (alone, shared))
    wrapped = DistributedDataParallel(shared)
    for t in range(6):
        for optimizer in (a, b):
            optimizer.zero_grad()
        for r in range(RANKS):
            x = noise(5, 6, seed=10 * t + r, dtype=F32)
            (alone(x).square().mean() / RANKS).backward()
            if r == rank:
                wrapped(x).square().mean().backward()
        for p, q in zip(alone.parameters(), shared.parameters()):
            assert torch.allclose(p.grad, q.grad, rtol=1e-5, atol=1e-7)
            q.grad.copy_(p.grad)  # the sums have another order
        a.step()
        b.step()
    assert equal(list(alone.parameters()), list(shared.parameters()))


@on_ranks
def zero_redundancy(rank, folder):
    """ZeroRedundancyOptimizer on two ranks: each has a part of the state; the weights are those of one optimizer"""
    import torch.distributed as dist
    from torch.distributed.optim import ZeroRedundancyOptimizer
    alone, shared = model_of(F32), model_of(F32)
    a, b = KahanAdamW(alone.parameters(), lr=0.01), ZeroRedundancyOptimizer(shared.parameters(), KahanAdamW, lr=0.01)
    assert equal(train(alone, a, 0, 4), train(shared, b, 0, 4))
    counts = torch.zeros(RANKS)
    counts[rank] = len(b.optim.state)
    dist.all_reduce(counts)
    assert counts.sum() == len(list(shared.parameters())) and counts.min() > 0, counts
    for to in range(RANKS):  # each rank gets all of the state, and the run goes on from it
        b.consolidate_state_dict(to)
        saved = [b.state_dict() if rank == to else None]
        dist.broadcast_object_list(saved, to)
    other = ZeroRedundancyOptimizer(shared.parameters(), KahanAdamW, lr=1.0)
    other.load_state_dict(saved[0])
    assert equal(train(alone, a, 4, 7), train(shared, other, 4, 7))


def wide_model():
    """Its 8-bit moments are in rows: the first weight has them, the second has not."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(512, 9), torch.nn.LayerNorm(9), torch.nn.Linear(9, 7)).to(BF16)


def train_wide(model, optimizer, first, last):
    for t in range(first, last):
        optimizer.zero_grad()
        model(noise(5, 512, seed=t)).float().square().mean().backward()
        optimizer.step()


def fully_sharded(rank, folder):
    """FSDP2: the bits of one process, also after a checkpoint of 2 ranks is read by 2, 1 and 3, nested and flattened"""
    try:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
        from torch.distributed.fsdp import fully_shard
    except ImportError:
        raise Skip("this PyTorch has no FSDP2") from None
    import torch.distributed as dist
    for i, options in enumerate(({}, {"rounding": "exact", "seed": 3}, {"rounding": "compact", "moment_format": "q8"},
                                 {"rounding": "stochastic", "moment_format": ("fp16", "q8")})):
        for flat in (False, True):
            alone, place = wide_model(), os.path.join(folder, "checkpoint%d%d" % (i, flat))
            a = KahanAdamW(alone.parameters(), lr=0.01, **options)
            how = StateDictOptions(flatten_optimizer_state_dict=flat)

            def sharded():
                model = wide_model()
                for layer in model:
                    fully_shard(layer)
                fully_shard(model)
                return model, KahanAdamW(model.parameters(), lr=0.01, **options)

            def same(model, optimizer):
                for p, q in zip(alone.parameters(), model.parameters()):
                    assert torch.equal(p.detach(), q.full_tensor().detach()), (options, flat)
                    for name, x in a.state[p].items():
                        y = optimizer.state[q][name]  # gloo does not send int16
                        assert name == "step" or torch.equal(x.float(), y.float().full_tensor()), (name, options)

            train_wide(alone, a, 0, 4)
            if not os.path.exists(place):
                dist.barrier()
                model, optimizer = sharded()
                train_wide(model, optimizer, 0, 4)  # each rank has the same batch: the average of gradients is exact
                same(model, optimizer)
                states = get_state_dict(model, optimizer, options=how)
                dcp.save({"model": states[0], "optimizer": states[1]}, checkpoint_id=place)
            other, second = sharded()
            states = dict(zip(("model", "optimizer"), get_state_dict(other, second, options=how)))
            dcp.load(states, checkpoint_id=place)
            set_state_dict(other, second, model_state_dict=states["model"], optim_state_dict=states["optimizer"],
                           options=how)
            same(other, second)
            if dist.get_world_size() != 3:  # an average of three gradients is not exact
                train_wide(alone, a, 4, 7)
                train_wide(other, second, 4, 7)
                same(other, second)


on_ranks(fully_sharded, worlds=(2, 1, 3))


@on_ranks
def sharded_flat(rank, folder):
    """FSDP1, with and without use_orig_params: its state has the shapes of the parameters, and the run resumes"""
    try:
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
        from torch.distributed.checkpoint.state_dict import get_state_dict  # noqa: F401
    except (ImportError, ValueError):  # ValueError: PyTorch 1.13 in Python 3.11
        raise Skip("this PyTorch has no FSDP1 on the CPU") from None
    for original in (True, False):
        def wrapped():
            model = FSDP(wide_model(), device_id=torch.device("cpu"), use_orig_params=original)
            return model, KahanAdamW(model.parameters(), lr=0.01)

        model, optimizer = wrapped()
        train_wide(model, optimizer, 0, 3)
        saved, weights = FSDP.optim_state_dict(model, optimizer), copy.deepcopy(model.state_dict())
        if rank == 0:
            assert saved["state"]["0.weight"]["residual"].shape == (9, 512)
            assert saved["state"]["2.bias"]["exp_avg_sq"].shape == (7,)
        other, second = wrapped()
        other.load_state_dict(weights)
        second.load_state_dict(FSDP.optim_state_dict_to_load(other, second, saved))
        train_wide(other, second, 3, 6)
        # not the numbers: on the CPU PyTorch 2.15 gathers wrong ones now and then, also of its own AdamW
        assert {s["step"] for s in second.state.values()} == {6}, original


@test
def distributed_state():
    """get_optimizer_state_dict() and set_optimizer_state_dict(), which go by names: the run resumes"""
    try:
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
    except ImportError:
        raise Skip("this PyTorch has no such functions") from None
    model = model_of()
    optimizer = KahanAdamW(model.parameters(), lr=0.01)
    train(model, optimizer, 0, 3)
    saved, other = copy.deepcopy(get_optimizer_state_dict(model, optimizer)), copy.deepcopy(model)
    second = KahanAdamW(other.parameters(), lr=1.0)
    set_optimizer_state_dict(other, second, saved)
    assert second.param_groups[0]["lr"] == 0.01
    assert equal(train(model, optimizer, 3, 6), train(other, second, 3, 6))


@test
def compiled():
    """a function with a step, and step() itself, under torch.compile: the bits without it"""
    if not hasattr(torch, "compile") or sys.version_info >= (3, 11) and torch.__version__ < "2.1":
        raise Skip("this PyTorch has no torch.compile")
    for how in ("function", "step", "optimizer in a loop with a schedule"):
        plain, model = model_of(), model_of()
        a, b = KahanAdamW(plain.parameters(), lr=0.01), KahanAdamW(model.parameters(), lr=0.01)
        rates = [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in (a, b)]

        def step(x, model=model, optimizer=b):
            optimizer.zero_grad()
            loss = model(x).float().square().mean()
            loss.backward()
            optimizer.step()
            return loss

        compiled_step = torch.compile(b.step if how == "step" else step, backend="eager")
        for t in range(4):
            x = noise(5, 6, seed=t)
            loss = step(x, plain, a)
            if how == "step":
                b.zero_grad()
                model(x).float().square().mean().backward()
                compiled_step()
            else:
                assert torch.equal(loss.detach(), compiled_step(x).detach())
            if "schedule" in how:
                for rate in rates:
                    rate.step()
        assert equal(list(plain.parameters()), list(model.parameters())), how


@test
def one_scaler():
    """torch.amp.GradScaler with several of these optimizers: each skips its own overflows, all others step"""
    if not hasattr(getattr(torch, "amp", None), "GradScaler"):
        raise Skip("this PyTorch has no GradScaler for the CPU")
    for dtypes in ((F32, F32), (FP16, BF16), (FP16, FP16)):
        params, plain = ([Parameter(noise(20, seed=i, dtype=d)) for i, d in enumerate(dtypes)] for _ in range(2))
        optimizers, references = ([KahanAdamW([p], lr=0.01, seed=i) for i, p in enumerate(list_)]
                                  for list_ in (params, plain))
        scaler, scale = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=100), 64.0
        for t, overflows in enumerate(((), (0,), (1,), (0, 1), ())):
            scaler.scale(torch.tensor(1.0))
            for i, (p, q) in enumerate(zip(params, plain)):
                q.grad = noise(20, seed=10 * t + i, dtype=q.dtype)
                p.grad = q.grad * scale
                if i in overflows:
                    p.grad[3] = float("inf")
                else:
                    references[i].step()
                scaler.step(optimizers[i])
            scaler.update()
            scale /= 2 if overflows else 1
            assert scaler.get_scale() == scale and equal(params, plain), (dtypes, t)


class SAM:
    """Foret et al. 2021: the gradient at the point uphill, the step from where the weights were."""

    def __init__(self, optimizer, rho=0.05, told=True):
        self.optimizer, self.rho, self.told = optimizer, rho, told

    def step(self, closure):
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        closure()
        norm = torch.stack([p.grad.float().norm() for p in params]).norm()
        with torch.no_grad():
            old = [p.clone() for p in params]
            for p in params:
                p.add_(p.grad * (self.rho / norm))
        closure()
        with torch.no_grad():
            for p, value in zip(params, old):
                p.copy_(value)
        if self.told:
            self.optimizer.weights_restored()
        self.optimizer.step()


@test
def sharpness_aware():
    """SAM: with weights_restored() the residuals stay, so small steps arrive; without it they are lost"""
    results = {}
    for told in (True, False):
        w = Parameter(torch.ones(64, dtype=BF16))
        optimizer = KahanSGD([w], lr=2.0 ** -14)
        sam = SAM(optimizer, told=told)

        def closure():
            w.grad = torch.full((64,), -1.0, dtype=BF16)

        for _ in range(1000):
            sam.step(closure)
        results[told] = (optimizer.full_weights(w) - 1).mean().item() / (1000 * 2.0 ** -14)
    assert abs(results[True] - 1) < 0.02 and results[False] < 0.02, results
    model, mirror = model_of(), model_of()
    a, b = KahanAdamW(model.parameters(), lr=0.01), KahanAdamW(mirror.parameters(), lr=0.01)
    sam = SAM(a)
    for t in range(5):
        probe = copy.deepcopy(mirror)  # the same gradients, from a copy of the model
        other = SAM(KahanOptimizer(probe.parameters(), "sgd", lr=0.0))
        for m, s in ((model, sam), (probe, other)):
            def closure(m=m):
                m.zero_grad()
                backward(m, t)
            s.step(closure)
        for p, q in zip(mirror.parameters(), probe.parameters()):
            p.grad = q.grad
        b.step()
        assert equal(list(model.parameters()), list(mirror.parameters())), t
    p = parameters()
    optimizer = KahanAdamW(p)
    optimizer.weights_restored()  # before the first step
    steps(optimizer, p, 1)


if __name__ == "__main__":
    if len(sys.argv) == 6:
        try:
            rank_main(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
        except BaseException:
            traceback.print_exc()
            os._exit(1)  # the others of the group may wait for this one
    else:
        test_torch.main()
