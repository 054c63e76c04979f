"""docs/examples/python/bindings.py: do the Python bindings have what the header has, and refuse a library that differs?
Prints TAP.

    python3 tests/examples/bindings.py FOLDER      FOLDER: what ./build.sh python made"""
import ctypes
import os
import re
import shutil
import subprocess
import sys
import tempfile

FOLDER = sys.argv[1]
CC = os.environ.get("CC", "cc").split()
sys.path.insert(0, FOLDER)
sys.dont_write_bytecode = True

from tap import done, report  # noqa: E402


def declared():
    """The header without comments, as far as its declarations go."""
    with open("kahan_opt.h", encoding="utf-8") as f:
        text = f.read()
    return re.sub(r"/\*.*?\*/", "", text[:text.index("#endif /* KAHAN_OPT_H */")], flags=re.S)


def complete(k):
    text = declared()
    names = set(re.findall(r"\bkopt_[a-z0-9_]*[a-z0-9]\b(?=\()", text)) | set(
        re.findall(r"\btypedef (?:enum|struct) (kopt_\w*[a-z0-9])\b", text)) | set(
        re.findall(r"^ +(KOPT_\w*[A-Z0-9])\b(?= *[=,]| *$)", text, re.M)) | set(
        re.findall(r"^#define (KOPT_\w*[A-Z0-9])\b", text, re.M)) - {"KOPT_TENSOR"}  # which needs the types of C
    missing = sorted(n for n in names if not hasattr(k, n))
    report(not missing and len(names) > 150, "each of the %d public names of the header is there" % len(names), missing)
    private = [n for n in dir(k) if re.match("kopt_.*_$|KOPT_.*_$", n)]
    report(not private, "nothing private is", private)
    fields = re.search(r"typedef struct kopt_tensor \{(.*?)\}", text, re.S).group(1).count(";")
    report(len(k.kopt_tensor._fields_) == fields, "kopt_tensor has its %d fields" % fields)


def works(k):
    opt = k.kopt_sgd(0.5, 0.25)
    report((opt.lr, opt.momentum, opt.rule, opt.rounding, opt.seed) == (0.5, 0.25, k.KOPT_RULE_SGD, k.KOPT_KAHAN, 0),
           "a struct comes back by value")
    report(k.KOPT_FP16 == 2 and k.kopt_version() == k.KOPT_VERSION and k.KOPT_STATE_BYTES(10, 6) >= k.kopt_state_size(
        k.kopt_adamw(1), k.kopt_tensor(n=10, weight_format=k.KOPT_BF16)) > 60, "constants and macros have values")
    report(k.kopt_f32_from_bf16(0x3F80) == 1 and k.kopt_fp16_from_f32(-2.0) == 0xC000,
           "functions that the header inlines can be called")
    w, c = ctypes.c_uint16(0x3F80), ctypes.c_uint16(0)
    k.kopt_kahan_add_bf16(ctypes.byref(w), ctypes.byref(c), 2.0 ** -10, 0x8000)
    report(w.value == 0x3F80 and k.kopt_f32_from_bf16(c.value) == 2.0 ** -10, "and write through pointers")
    try:
        opt.learning_rate = 1
        report(False, "a field that does not exist is refused")
    except AttributeError:
        report(True, "a field that does not exist is refused")
    opt.lr = float("nan")
    try:
        k.check(k.kopt_step_begin(k.kopt_step(), opt), "the head")
        report(False, "check() raises")
    except k.kopt_error as e:
        report(e.result == k.KOPT_ERROR_RANGE and str(e) == "the head: " + k.kopt_result_string(e.result),
               "check() raises kopt_error with kopt_result_string()", e)
    scaler = k.kopt_scaler_of()
    report(repr(scaler).startswith("kopt_scaler(scale=65536.0, minimum=0.0, growth=2.0,") and
           "rule=KOPT_RULE_SGD, " in repr(opt) and "rounding=KOPT_KAHAN, " in repr(opt) and
           "digit=[0, 0, " in repr(k.kopt_norm()), "a struct shows its fields, and enums their names", repr(opt))
    called = []
    weight, grad = (ctypes.c_uint16 * 4)(*[0x3F80] * 4), (ctypes.c_uint16 * 4)(*[0x3F80] * 4)
    opt = k.kopt_adamw(0.125)
    tensor = k.kopt_tensor_of(weight, k.KOPT_BF16, grad, k.KOPT_BF16, 4, None, 0)
    state = ctypes.create_string_buffer(k.kopt_state_size(opt, tensor))
    tensor.state, tensor.state_size = ctypes.addressof(state), len(state)
    k.check(k.kopt_state_init(opt, tensor, 1, None))
    kinds = dict(k.kopt_closure._fields_)
    closure = k.kopt_closure(evaluate=kinds["evaluate"](lambda user, scale: called.append((user, scale)) or 0))
    closure.user, skipped, scaler = 77, ctypes.c_int(5), k.kopt_scaler_of()
    k.check(k.kopt_scaler_step(scaler, opt, tensor, 1, 0.0, closure, ctypes.byref(skipped)))
    report(called == [(77, 65536.0)] and skipped.value == 0 and weight[0] == 0x3F60,
           "a closure is called with its arguments, and the step is made", (called, skipped, hex(weight[0])))


CALLED_INLINE = """
KOPT_API_ kopt_result kopt_optimizer_init(kopt_optimizer *opt, kopt_rule rule, double lr, int version, size_t opt_size,
                                          size_t tensor_size) { return KOPT_ERROR_NULL; }
"""


def refuses():
    """Libraries of changed headers. They have the table, but no functions: so they are quick to build."""
    with open("kahan_opt.h", encoding="utf-8") as f:
        header = f.read()
    with open(os.path.join(FOLDER, "kahan_opt.c"), encoding="utf-8") as f:
        same_c = f.read()
    package, script = os.path.join(FOLDER, "kahan_opt"), os.path.abspath("docs/examples/python/bindings.py")

    def attempt(text, words, old="", new="", fresh=False):
        """fresh: the C file, too, is made from the changed header; otherwise only the header is another one."""
        with tempfile.TemporaryDirectory() as folder:
            path = lambda name: os.path.join(folder, name)  # noqa: E731
            changed = header.replace(old, new) if old else header
            assert not old or changed != header, old
            with open(path("kahan_opt.h"), "w", encoding="utf-8") as f:
                f.write(changed)
            source = same_c
            if fresh:
                subprocess.run([sys.executable, script, path("kahan_opt.h"), folder], check=True,
                               stdout=subprocess.DEVNULL)
                with open(path("kahan_opt.c"), encoding="utf-8") as f:
                    source = f.read()
            shutil.rmtree(path("kahan_opt"), ignore_errors=True)
            shutil.copytree(package, path("kahan_opt"), ignore=shutil.ignore_patterns("*.so"))
            with open(path("kahan_opt.c"), "w", encoding="utf-8") as f:
                f.write(source.replace("#define KAHAN_OPT_IMPLEMENTATION", "") + CALLED_INLINE)
            build = subprocess.run(CC + ["-shared", "-fPIC", "-I.", "-o", "kahan_opt/libkahan_opt.so", "kahan_opt.c"],
                                   cwd=folder, capture_output=True, text=True)
            said = build.stderr
            if build.returncode == 0:
                said = subprocess.run([sys.executable, "-c", "import kahan_opt"], cwd=folder, capture_output=True,
                                      text=True).stderr.strip().split("\n")[-1]
            report(re.search(words, said), text, said)

    differs = "^ImportError: .*does not belong to .*Build both again, by ./build.sh python or pip. What differs: .*"
    attempt("the table of the same header is accepted", "^ImportError: .*libkahan_opt.so has no kopt_format_size")
    attempt("another type of a field is refused", differs + "`kopt_optimizer.lr: double` is ",
            "    double lr;  ", "    float lr;  ")
    attempt("also if the C file says so", differs, "    double lr;  ", "    float lr;  ", fresh=True)
    attempt("the same size, but another type, is refused", differs + "it lacks `kopt_tensor.rate_scale: double`",
            "    double rate_scale; ", "    uint64_t rate_scale; ", fresh=True)
    attempt("two fields that are exchanged are refused", differs,
            "double beta1, beta2, beta3;", "double beta2, beta1, beta3;")
    attempt("a new field is refused", differs, "    double rate_scale; ", "    double before; double rate_scale; ")
    attempt("another value of an enum is refused", differs + "`KOPT_KAHAN` is 5, 0 there and 2, 0 here",
            "KOPT_KAHAN = 2,", "KOPT_KAHAN = 5,")
    attempt("arguments in another order: the compiler refuses the table", "error: conflicting types",
            "kopt_format_size(kopt_format format, size_t n);",
            "kopt_format_size(size_t n, kopt_format format);")
    attempt("also if the C file says so", differs + "lacks `size_t kopt_format_size",
            "kopt_format_size(kopt_format format, size_t n);",
            "kopt_format_size(size_t n, kopt_format format);", fresh=True)
    this = int(re.search(r"#define KOPT_VERSION (\d+)", header)[1])
    attempt("another version is refused", differs + "`KOPT_VERSION` is %d, 0 there and %d, 0 here" % (this + 1, this),
            "#define KOPT_VERSION %d" % this, "#define KOPT_VERSION %d" % (this + 1))
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(package, os.path.join(folder, "kahan_opt"), ignore=shutil.ignore_patterns("*.so"))
        for text, make, words in (
                ("a library that is missing", lambda f: None, "is missing: run ./build.sh python"),
                ("a library of something else", lambda f: subprocess.run(
                    CC + ["-shared", "-fPIC", "-x", "c", "/dev/null", "-o", f], check=True),
                 "no table of its layouts")):
            make(os.path.join(folder, "kahan_opt", "libkahan_opt.so"))
            said = subprocess.run([sys.executable, "-c", "import kahan_opt"], cwd=folder, capture_output=True,
                                  text=True)
            report("ImportError" in said.stderr and words in said.stderr, text, said.stderr)


def installs():
    """pip and the package, in a folder of its own."""
    run = lambda words, **more: subprocess.run(  # noqa: E731
        [sys.executable, *words], capture_output=True, text=True, **more)
    if run(["-m", "pip", "--version"]).returncode:
        report(True, "# SKIP no pip: the package installs")
        return
    with tempfile.TemporaryDirectory() as folder:
        scalar = dict(os.environ, CC=" ".join(CC + ["-DKAHAN_OPT_NO_SIMD"]))  # compiles in a second
        said = run(["-m", "pip", "install", "--no-index", "--no-deps", "--target", folder, "docs/examples/python"],
                   env=scalar)
        report(said.returncode == 0, "pip installs the package", said.stdout + said.stderr)
        said = run(["-m", "kahan_opt"], cwd=folder)
        report(said.returncode == 0 and folder in said.stdout and "self-test: passed" in said.stdout,
               "python -m kahan_opt says where it is, and its test passes", said.stdout + said.stderr)
        said = run(["-c", "import kahan_opt, sys; kahan_opt.kopt_adamw; assert 'torch' not in sys.modules; "
                    "kahan_opt.KahanAdam"], cwd=folder)
        report("module 'kahan_opt' has no attribute 'KahanAdam'" in said.stderr,
               "the header is there without PyTorch; what is not there has no name", said.stderr)
        said = run(["-c", "import sys; sys.path.insert(0, 'docs/examples/python'); sys.dont_write_bytecode = True; "
                    "import backend; backend.build_sdist(%r)" % folder])
        sources = [name for name in os.listdir(folder) if name.endswith(".tar.gz")]
        report(len(sources) == 1, "a source archive", said.stderr)
        shutil.unpack_archive(os.path.join(folder, sources[0]), folder)
        root = os.path.join(folder, sources[0][:-len(".tar.gz")])
        said = run([os.path.join(root, "backend.py"), os.path.join(folder, "again")], env=scalar)
        report(said.returncode == 0, "the archive builds, far from the repository", said.stderr)
        said = run(["docs/examples/python/backend.py", folder], env={"PATH": ""})
        report(said.returncode == 1 and "kahan_opt needs a C compiler" in said.stderr, "no compiler: a sentence", said)
        said = run(["docs/examples/python/backend.py", folder], env={"PATH": "", "CC": "no-such-compiler -O2"})
        report(said.returncode == 1 and "no-such-compiler -O2 -shared" in said.stderr, "a wrong one: its name", said)


def page(name, words, module):
    """Runs the blocks of docs/pytorch.md that are marked for this file."""
    with open("docs/pytorch.md", encoding="utf-8") as f:
        blocks = re.findall(r"<!-- test: %s -->\n```python\n(.*?)```" % re.escape(name), f.read(), re.S)
    try:
        __import__(module)
    except ImportError:
        report(True, "# SKIP no %s: %s" % (module, words))
        return
    try:
        for block in blocks:
            exec(compile(block, "docs/pytorch.md", "exec"), {})
        report(len(blocks) > 0, words)
    except Exception as e:
        report(False, words, repr(e))


def main():
    import kahan_opt as k
    complete(k)
    works(k)
    refuses()
    installs()
    page("bindings.py", "docs/pytorch.md: the examples with NumPy run", "numpy")
    sys.exit(done())


main()
