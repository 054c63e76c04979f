"""Builds the wheel and the source archive of the package for Python, twice, and checks them: the same bytes, metadata,
an install without network in a fresh environment, types, an editable install; with NVCC, the kernels for GPUs.
Publishes nothing. Prints TAP.

    python3 tests/examples/wheel.py FOLDER      FOLDER: gets them"""
import glob
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile

sys.dont_write_bytecode = True
from tap import done, report  # noqa: E402

USER = """
from kahan_opt import KahanAdamW, KahanScaler
import torch

optimizer = KahanAdamW(torch.nn.Linear(4, 4).parameters(), lr=1e-3)
scale: float = KahanScaler(init_scale=2.0).get_scale()
wrong: int = optimizer
"""


def run(*words, **more):
    said = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **more)
    return said.returncode, said.stdout


def there(module):
    return run(sys.executable, "-c", "import " + module)[0] == 0


def backend(folder, *words, **variables):
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    return run(sys.executable, "docs/examples/python/backend.py", folder, *words, env={**os.environ, **variables})


def build(folder):
    """Its files and their bytes, with debug information, which names folders."""
    status, said = backend(folder, "wheel", CFLAGS="-g")
    if status:
        sys.exit(said)
    return {os.path.basename(path): open(path, "rb").read() for path in glob.glob(folder + "/*")}


def environment(folder):
    """A fresh one, which sees PyTorch, if it is installed. Returns its Python and a function that installs into it."""
    run(sys.executable, "-m", "venv", "--system-site-packages", "--without-pip", folder)
    python = os.path.join(folder, "bin", "python")
    return python, lambda *what: run(sys.executable, "-m", "pip", "--python", python, "install", "--no-index",
                                     "--no-deps", "--force-reinstall", "--disable-pip-version-check", *what)


def used(python, folder):
    """What a user sees of an installed package."""
    status, said = run(python, "-m", "kahan_opt", cwd=folder)
    report(status == 0 and "self-test: passed" in said and folder in said and "GPU kernels: " in said,
           "... and its self-test passes", said)
    status, said = run(python, "-c", "import kahan_opt, sys\nassert 'torch' not in sys.modules\n"
                       "assert 'KahanAdamW' in dir(kahan_opt)\nassert 'torch' not in sys.modules", cwd=folder)
    report(status == 0, "dir() has the optimizers, and importing the package does not import PyTorch", said)
    status, said = run(python, "-c", "from kahan_opt import *\nkopt_adamw, check, KOPT_BF16\n"
                       "assert 'c_int' not in dir()\n" + ("KahanAdamW, KahanScaler" if there("torch") else ""),
                       cwd=folder)
    report(status == 0, "import * has the names of the header and the optimizers, and no others", said)


def commands(folder):
    """What the compiler is asked for."""
    said = backend(folder, CC="echo", CPPFLAGS="-DP", CFLAGS="-g '-DC=a b'", CXXFLAGS="-DX", LDFLAGS="-Wl,-z,now")[1]
    report(" -O2 -DP -g -DC=a b -f" in said and "-DX" not in said and said.endswith(" -Wl,-z,now\n"),
           "CPPFLAGS, CFLAGS and LDFLAGS are the compiler's, as a shell reads them", said)
    status, said = backend(folder, CFLAGS="-fnone-of-ours")
    report(status == 1 and said.count("-fnone-of-ours") > 1, "... whose words are shown when it refuses one", said)
    if sys.platform == "linux":
        other = "linux-riscv64" if os.uname().machine != "riscv64" else "linux-aarch64"
        status, said = backend(folder, "wheel", _PYTHON_HOST_PLATFORM=other)
        report(status == 1 and not os.listdir(folder) and said.count("\n") == 2 and " is not one for " + other in said,
               "no wheel has a library for another machine than its name says", said)
    cross = shutil.which("aarch64-linux-gnu-gcc")
    if cross:
        status, said = backend(folder, "wheel", CC=cross, CPPFLAGS="-DKAHAN_OPT_NO_SIMD", NVCC="",
                               _PYTHON_HOST_PLATFORM="linux-aarch64")
        report(status == 0 and glob.glob(folder + "/*-manylinux_2_17_aarch64.whl"),
               "a cross compiler makes a wheel for the machine that _PYTHON_HOST_PLATFORM names", said)
    else:
        report(True, "# SKIP no aarch64-linux-gnu-gcc: a wheel for another machine")


def main():
    folder = sys.argv[1]
    gpu = bool(os.environ.get("NVCC"))
    first, second = build(folder), build(folder)
    report(len(first) == 2 and first == second, "two builds have the same bytes: " + ", ".join(sorted(first)))
    wheel, = (name for name in first if name.endswith(".whl"))
    report("-py3-none-" in wheel and (sys.platform != "linux" or "-manylinux_2_" in wheel),
           "one wheel for all Pythons of the platform", wheel)
    if gpu:
        names = zipfile.ZipFile(os.path.join(folder, wheel)).namelist()
        there_too = {"kahan_opt/" + name for name in ("cuda.py", "libkahan_opt_cuda.so", "libkahan_opt_cuda.ptx.xz")}
        report(there_too <= set(names) and "manylinux_2_17" in wheel,
               "the wheel has the kernels for GPUs, and needs no later glibc", wheel)
        os.environ["NVCC"] = ""  # once is enough
    with tempfile.TemporaryDirectory() as place:
        commands(os.path.join(place, "other"))
    if there("twine"):
        status, said = run(sys.executable, "-m", "twine", "check", "--strict", *glob.glob(folder + "/*"))
        report(status == 0, "twine accepts the metadata", said)
    else:
        report(True, "# SKIP no twine: the metadata")
    if not there("pip"):
        report(True, "# SKIP no pip: the installs")
        return done()
    with tempfile.TemporaryDirectory() as place:
        python, install = environment(os.path.join(place, "fresh"))
        status, said = install(os.path.join(folder, wheel))
        report(status == 0, "a fresh environment: pip installs the wheel without network", said)
        used(python, place)
        if gpu:
            status, said = run(python, "-c", "from kahan_opt import header, calls\ntry:\n    calls.load_kernels()\n"
                               "except header.kopt_error as e:\n    print(e)", cwd=place)
            report(status == 0, "the wheel's kernels load, or it says that there is no driver", said)
        if there("mypy") and there("torch"):
            with open(os.path.join(place, "user.py"), "w", encoding="utf-8") as f:
                f.write(USER)
            status, said = run(sys.executable, "-m", "mypy", "--python-executable", python, "--strict", "user.py",
                               "--cache-dir", os.path.join(place, "cache"), cwd=place)
            report(said.count("error:") == 1 and 'user.py:7: error: Incompatible types in assignment (expression has '
                   'type "KahanAdamW", variable has type "int")' in said, "mypy --strict: the types are known", said)
        else:
            report(True, "# SKIP no mypy or no PyTorch: the types")
        archive, = glob.glob(folder + "/*.tar.gz")
        python, install = environment(os.path.join(place, "source"))
        status, said = install(archive)
        report(status == 0 and run(python, "-m", "kahan_opt", cwd=place)[0] == 0, "the source archive installs", said)
        python, install = environment(os.path.join(place, "editable"))
        status, said = install("-e", "docs/examples/python")
        status, said = run(python, "-c", "import kahan_opt.__main__ as used, os; "
                           "print(os.path.realpath(used.__file__))", cwd=place)
        source = os.path.realpath("docs/examples/python/kahan_opt/__main__.py")
        report(status == 0 and said.strip() == source, "an editable install: its modules are the sources", said)
    left = run("git", "status", "--porcelain", "--ignored", "docs/examples/python")
    report(left[0] or "pycache" not in left[1], "nothing is written beside the sources", left[1])
    return done()


if __name__ == "__main__":
    sys.exit(main())
