"""Builds the package kahan_opt: what pip calls (PEP 517), and ./build.sh python.

    pip install ./docs/examples/python                          compiles the header with cc, gcc, clang or CC,
                                                                CPPFLAGS, CFLAGS, CXXFLAGS and LDFLAGS
    python3 docs/examples/python/backend.py FOLDER [cuda]       the same package in FOLDER, without pip
    python3 docs/examples/python/backend.py FOLDER wheel        a wheel for all Pythons of this platform, and an sdist

It needs Python and a C compiler. With NVCC, the command of CUDA's compiler, the package also has the PTX of kernels for
GPUs, which the driver compiles where it runs. The headers are those of the repository; only an sdist has copies."""
import ast
import base64
import gzip
import hashlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
sys.dont_write_bytecode = True  # nothing is written beside the sources
import bindings  # noqa: E402

HEADER, CUDA, NVCC = "kahan_opt.h", "kahan_opt_cuda.cuh", os.environ.get("NVCC")
ROOT = HERE if os.path.exists(os.path.join(HERE, HEADER)) else os.path.normpath(os.path.join(HERE, "..", "..", ".."))
COMPILERS = ("cc", "gcc", "clang", "clang-cl", "x86_64-w64-mingw32-gcc") if os.name == "nt" else ("cc", "gcc", "clang")
MACHINES = {3: r"i\d86", 22: r"s390\w*", 40: r"arm\w+", 62: "x86_64", 183: "aarch64", 243: r"riscv\d+"}  # ELF's numbers


def version():
    with open(os.path.join(ROOT, HEADER), encoding="utf-8") as f:
        number = int(re.search(r"^#define KOPT_VERSION (\d+)", f.read(), re.M).group(1))
    return "%d.%d.%d" % (number // 10000, number // 100 % 100, number % 100)


def compiler():
    """The command of a C compiler: CC, or the first that is there."""
    if os.environ.get("CC"):
        return shlex.split(os.environ["CC"])
    for name in COMPILERS:
        if shutil.which(name):
            return [name]
    sys.exit("kahan_opt needs a C compiler, and there is none of %s. Install gcc or clang (Debian: apt install gcc; "
             "macOS: xcode-select --install; Windows: MinGW-w64 or LLVM), or set CC to the command of yours."
             % ", ".join(COMPILERS))


def flags(name):
    return shlex.split(os.environ.get(name, ""))


def build(folder, cuda=False, copy=shutil.copy):
    """Writes the package to FOLDER/kahan_opt."""
    package = os.path.join(folder, "kahan_opt")
    os.makedirs(package, exist_ok=True)
    for name in os.listdir(os.path.join(HERE, "kahan_opt")):
        if name.endswith((".py", ".typed")):
            copy(os.path.join(HERE, "kahan_opt", name), os.path.join(package, name))
    bindings.main([os.path.join(ROOT, name) for name in [HEADER, CUDA][:1 + cuda]], folder)
    for name, language in [("kahan_opt.c", []), ("kahan_opt_cuda.cu", ["-x", "c++"])][:1 + cuda]:
        command, source = compiler(), os.path.join(folder, name)
        library = os.path.join(package, "lib" + name.split(".")[0] + (".dll" if os.name == "nt" else ".so"))
        if os.path.basename(command[0]).lower() in ("clang-cl", "clang-cl.exe"):
            run(command + ["/nologo", "/LD", "/O2", "/I" + ROOT, "/Fe" + library, "/TP" if language else "/TC", source])
        else:
            run(command + ["-shared", "-O2", *flags("CPPFLAGS"), *flags("CXXFLAGS" if language else "CFLAGS"),
                           "-fdebug-prefix-map=%s=." % folder,  # the same bytes in every folder
                           "-I" + ROOT, "-o", library, *language, source]
                + ["-fPIC", "-ldl"] * (os.name != "nt") + flags("LDFLAGS"))
    if cuda:
        import lzma  # which not every Python has
        run(shlex.split(os.environ["NVCC"]) +
            ["-ptx", "-arch=compute_75", "-I" + ROOT, "-o", source[:-2] + "ptx", source])
        with open(source[:-2] + "ptx", encoding="utf-8") as f, lzma.open(
                os.path.join(package, "libkahan_opt_cuda.ptx.xz"), "wb") as packed:
            packed.write(texts(f.read()))


def texts(ptx):
    """A text for each kernel, so that the driver compiles those that are used; in the version of CUDA 12.0."""
    ptx = re.sub(r'//.*|^\s*\.pragma "used_bytes_mask.*', "", ptx, flags=re.M)  # a hint of later versions
    head, *kernels = re.split(r"^(?=\.entry )", re.sub(r"^\.version .*", ".version 8.0", ptx, flags=re.M), flags=re.M)
    return b"".join((re.sub(r"\s*\n\s*", "\n", head + kernel) + "\0").encode() for kernel in kernels)


def run(command):
    try:
        failed = subprocess.call(command)
    except OSError as error:
        failed = error
    if failed:
        sys.exit("kahan_opt: the compiler failed (%s): %s" % (failed, " ".join(map(shlex.quote, command))))


# ---- what pip calls --------------------------------------------------------------------------------------------------


def metadata():
    with open(os.path.join(HERE, "pyproject.toml"), encoding="utf-8") as f:
        said = dict(re.findall(r'^([a-z-]+) = "(.*)"$', f.read(), re.M))
    with open(os.path.join(HERE, "kahan_opt", "__init__.py"), encoding="utf-8") as f:
        about = ast.get_docstring(ast.parse(f.read()))
    return ("Metadata-Version: 2.1\nName: %s\nVersion: %s\nSummary: %s\nRequires-Python: %s\n"
            "License: MIT-0 OR Unlicense\nProvides-Extra: torch\nRequires-Dist: torch>=1.13; extra == 'torch'\n"
            "Description-Content-Type: text/plain\n\n%s\n" % (
                said["name"], version(), said["description"], said["requires-python"], about))


def write_wheel(folder, files, tag):
    info, name = "kahan_opt-%s.dist-info/" % version(), "kahan_opt-%s-%s.whl" % (version(), tag)
    with open(os.path.join(ROOT, "LICENSE"), "rb") as f:
        files[info + "LICENSE"] = f.read()
    files[info + "METADATA"] = metadata().encode()
    files[info + "WHEEL"] = b"Wheel-Version: 1.0\nGenerator: kahan_opt\nRoot-Is-Purelib: false\nTag: " + tag.encode()
    files[info + "RECORD"] = ("".join("%s,sha256=%s,%d\n" % (
        file, base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("="), len(data))
        for file, data in sorted(files.items())) + info + "RECORD,,\n").encode()
    with zipfile.ZipFile(os.path.join(folder, name), "w", zipfile.ZIP_DEFLATED) as wheel:
        for file, data in sorted(files.items()):
            item = zipfile.ZipInfo(file)  # of 1980
            item.external_attr, item.compress_type = 0o100644 << 16, zipfile.ZIP_DEFLATED
            wheel.writestr(item, data)
    return name


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None, manylinux=False):
    platform = re.sub(r"\W", "_", sysconfig.get_platform())
    with tempfile.TemporaryDirectory() as folder:
        build(folder, bool(NVCC))
        names = ["kahan_opt/" + name for name in os.listdir(os.path.join(folder, "kahan_opt"))]
        files = {name: open(os.path.join(folder, name), "rb").read() for name in names}
    elf = next((files[name] for name in names if files[name].startswith(b"\x7fELF")), b"")
    machine = int.from_bytes(elf[18:20], "big" if elf[5:6] == b"\2" else "little")
    if platform.startswith("linux") and not re.search(MACHINES.get(machine, "") + "$", platform):
        sys.exit("kahan_opt: the compiler (%s) is not one for %s. For a wheel of another machine set "
                 "_PYTHON_HOST_PLATFORM, such as linux-aarch64" % (shlex.join(compiler()), sysconfig.get_platform()))
    if manylinux:  # the newest glibc that the library asks for
        symbols = [n for name in files if name.endswith(".so") for n in re.findall(rb"GLIBC_2\.(\d+)", files[name])]
        platform = platform.replace("linux", "manylinux_2_%d" % max(17, *map(int, symbols)))
    return write_wheel(wheel_directory, files, "py3-none-" + platform)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    """A package of links to the sources, in build/editable; what is compiled or generated is not made again."""
    folder = os.path.join(ROOT, "build", "editable")
    shutil.rmtree(folder, ignore_errors=True)
    build(folder, bool(NVCC), os.symlink)
    return write_wheel(wheel_directory, {"kahan_opt.pth": (folder + "\n").encode()}, "py3-none-any")


def build_sdist(sdist_directory, config_settings=None):
    base, files = "kahan_opt-" + version(), {"PKG-INFO": metadata().encode()}
    for folder, names in ((ROOT, (HEADER, CUDA, "LICENSE")), (HERE, ("pyproject.toml", "backend.py", "bindings.py")),
                          (HERE, ["kahan_opt/" + name for name in os.listdir(os.path.join(HERE, "kahan_opt"))])):
        files.update((name, open(os.path.join(folder, name), "rb").read())
                     for name in names if os.path.isfile(os.path.join(folder, name)))
    with gzip.GzipFile(os.path.join(sdist_directory, base + ".tar.gz"), "wb", mtime=0) as packed, tarfile.open(
            "", "w", packed, format=tarfile.PAX_FORMAT) as sdist:
        for name, data in sorted(files.items()):
            item = tarfile.TarInfo(base + "/" + name)  # of 1970
            item.size = len(data)
            sdist.addfile(item, io.BytesIO(data))
    return base + ".tar.gz"


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[2:] not in ([], ["cuda"], ["wheel"]):
        sys.exit("usage: backend.py FOLDER [cuda | wheel]")
    if sys.argv[2:] == ["wheel"]:
        sys.exit(not (build_wheel(sys.argv[1], manylinux=sys.platform == "linux") and build_sdist(sys.argv[1])))
    if sys.argv[2:] == ["cuda"] and not NVCC:
        sys.exit("kahan_opt: set NVCC to the command of CUDA's compiler: NVCC=nvcc")
    build(sys.argv[1], sys.argv[2:] == ["cuda"])
