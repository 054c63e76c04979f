"""kahan_opt: optimizers that train neural networks in pure bf16 or fp16, on one C header.

    from kahan_opt import KahanAdamW                               # needs PyTorch 1.13 or later
    model = model.to(torch.bfloat16)
    optimizer = KahanAdamW(model.parameters(), lr=1e-3)            # the rest of the loop stays as it is

`python -m kahan_opt` says what this installation is, and tests it. docs/pytorch.md is the manual. The functions,
structs and constants of the header are here, too, with their names in C; they need neither PyTorch nor NumPy."""
import importlib.util
import typing

from . import header
from .header import *

__version__ = "%d.%d.%d" % (KOPT_VERSION // 10000, KOPT_VERSION // 100 % 100, KOPT_VERSION % 100)
FOR_PYTORCH = ("KahanAdamW", "KahanOptimizer", "KahanSGD", "KahanScaler", "param_groups_weight_decay",
               "prepare_for_gradient_release", "remove_gradient_release")

if typing.TYPE_CHECKING:
    from .torch import *
else:
    __all__ = [name for name in dir(header) if name.lower().startswith("kopt_")] + ["check"]
    __all__ += FOR_PYTORCH if importlib.util.find_spec("torch") else ()


def __dir__():
    return sorted({*globals(), *__all__})


def __getattr__(name):
    """Imports PyTorch when the first of its optimizers is asked for."""
    if name in FOR_PYTORCH:
        return getattr(importlib.import_module(".torch", __name__), name)
    raise AttributeError("module %r has no attribute %r" % (__name__, name))
