#!/bin/sh
# kahan_opt: ./build.sh demo | examples | test | bench | cuda | web | figures | mutants | setup. Each command needs a C
# compiler (CC, default cc) and uses other tools if they are installed. `./build.sh setup` installs them all (Debian,
# Ubuntu).
#
# Only lists of words are unquoted: CC and NVCC ("gcc -m32", "ccache gcc"), flags, sources, objects and packages.
# shellcheck disable=SC2086
set -eu
cd "$(dirname "$0")"
CC=${CC:-cc}
WARNINGS='-Wall -Wextra -Wpedantic -Wconversion -Wsign-conversion -Wshadow -Wdouble-promotion -Wundef -Wcast-qual'
C_WARNINGS="$WARNINGS -Wmissing-prototypes -Werror"

usage() {
    cat <<'TEXT'
usage: ./build.sh demo [--fp16] [FILE]   train a byte language model on FILE (default: kahan_opt.h) in 16 bits and fp32
       ./build.sh demo --precision P     ... in fp32 and P: amp_bf16, amp_fp16 (mixed precision), bf16, fp16, or all
       ./build.sh demo --rule adam_atan2 ... with AdamW in fp32 and bf16, and with Adam-atan2 in bf16
       ./build.sh examples               what is in docs/examples
       ./build.sh examples NAME [...]    build one of them in build/examples and run it, with the words that follow
       ./build.sh test [--no-skip]       all tests that can run here; names what it skips (--no-skip: a skip fails)
       ./build.sh test --fast            half a minute, at each change: native tests, hashes; says what it leaves out
       ./build.sh bench [--gb SIZE]      check the bits, then compare with the memory roofline
       ./build.sh bench --sizes | --all  how cost grows with n, and a model of it; every combination
       ./build.sh bench atan2            the rules of KAHAN_OPT_VMATH compared with AdamW, also by SLEEF if installed
       ./build.sh bench flags [N [OFFSET]] the header built with -O0, -O3 -march=native and clang, compared with -O2
       ./build.sh bench one_element [N...] updates of single weights and kopt_kahan_add(), compared with fp32
       ./build.sh bench --peers [--gb S] compare with PyTorch, optimi, torchao, bitsandbytes (installs them: up to 6 GB)
       ./build.sh bench cliffs [quick]   compare every combination with bf16 Kahan AdamW: is any slow?
       ./build.sh bench compare OLD NEW  two versions of the header in one process (--help: options)
       ./build.sh bench calls [HEADER]   instructions of a call, by callgrind: what small tensors cost
       ./build.sh bench q8 [check | ...] which 8-bit code serves the moments of AdamW? (docs/q8.md)
       ./build.sh bench wasm [ROUNDS]    WebAssembly without and with its vectors, in node
       ./build.sh bench torch [ROUNDS]   a step of KahanAdamW beside torch's AdamW, for 1, 100 and 10,000 tensors
       ./build.sh bench torch tests      the tests of the optimizers with the newest PyTorch (installs it: 5 GB)
       ./build.sh bench converters       convert.py with the real bitsandbytes, optimi, torchao (installs them: 6 GB)
       ./build.sh bench fidelity [quick] what 16 bit loses: losses, stalls, decay with error bars (docs/fidelity.md)
       ./build.sh bench theorem1         how far from the solution SGD with 16-bit weights ends (docs/theorem1.md)
       ./build.sh cuda [bench]           the GPU part: its PTX, also run on the CPU, and its tests if there is a GPU
       ./build.sh cuda day [--part N]    all on a GPU in 25 minutes; --part 0: 90 seconds (docs/gpu-day.md)
       ./build.sh web [build]            the playground of docs/playground.md, in build/web, and serves it
       ./build.sh web test | picture     ... tested in headless Chromium; its picture in docs
       ./build.sh figures                update the figures of demo and theorem1 in README.md and docs: a minute
       ./build.sh figures bench          ... and of bench cliffs and --sizes, on an idle machine: ten minutes, 10 GB
       ./build.sh figures firmware       ... and of docs/firmware.md, with the compilers of Debian 12
       ./build.sh figures fidelity [draw] ... and of bench fidelity; draw: from its last run
       ./build.sh mutants [all|share K/N] change the header in some 400 ways: does each make a test fail?
       ./build.sh python [cuda]          the package for Python, in build/python; cuda: also that for GPUs, with nvcc
       ./build.sh setup                  install the tools that the full test uses (apt, as root)
TEXT
}

have() { command -v "$1" >/dev/null 2>&1; }

wrong() { # wrong WHAT: prints it and the usage, and exits with status 2
    { echo "build.sh: $1" && usage; } >&2
    exit 2
}

knows() { # knows COMMAND WORDS ARGUMENT...: are all arguments among WORDS? N: any number; FILE: any word without a dash
    command=$1 words=" $2 "
    shift 2
    for word; do
        kind=FILE
        case $word in -*) kind=- ;; *[!0-9.]* | '') ;; *) kind=N ;; esac
        case "$words" in *" $word "* | *" $kind "*) ;; *) wrong "\`$command\` does not know \`$word\`" ;; esac
    done
}

demo() {
    knows demo '--fp16 --precision --rule --help FILE N' "$@"
    mkdir -p build/demo
    $CC -std=c99 -O3 -o build/demo/demo docs/examples/demo.c -lm
    exec build/demo/demo "$@"
}

# The examples, each with the first sentence of its first comment. docs/examples/README.md is their index. An example of
# several files is a folder with a run.sh.
list_examples() {
    echo "./build.sh examples NAME builds an example and runs it:"
    for source in docs/examples/*.c docs/examples/*.cpp docs/examples/*.py docs/examples/*/run.sh; do
        name=${source%/run.sh}
        [ ! -e "$source" ] || awk -v name="$(basename "${name%.*}")" '!/^#!/ {
            sub(/^(# )? */, "")
            text = text $0 " "
            if (match(text, /\.[ "*]/)) {
                text = substr(text, 1, RSTART)
                sub(/^("""|\/\* *)?([a-z0-9_]+\.[a-z]+ - )?/, "", text)
                printf "  %-17s  %s\n", name, text
                exit
            }
        }' "$source"
    done
}

examples() {
    [ $# -gt 0 ] || { list_examples; return; }
    name=$(basename "$1") suffix=c compiler=$CC flags=-O2 libraries='' runner=''
    name=${name%.*}
    shift
    case $name in # what is not built and run as most are
    checkpoint) flags='-O2 -ffp-contract=off'; [ $# -gt 0 ] || set -- build/examples/run.checkpoint ;;
    compress | demo) flags=-O3 libraries=-lm ;;
    clients) suffix=cpp compiler=${CXX:-c++} flags='-std=c++11 -O2 -pthread' ;;
    lockstep) flags='-O2 -ffp-contract=off -pthread' ;;
    openmp) flags='-O2 -fopenmp' ;;
    threads) flags='-O2 -pthread' ;;
    zero1)
        have mpicc || { echo "build.sh: zero1 needs MPI (./build.sh setup installs it)" >&2; exit 2; }
        compiler=mpicc runner="mpirun -n ${RANKS:-4}"
        # Open MPI: more ranks than cores; as root in a container
        export OMPI_CC="$CC" OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_mpi_yield_when_idle=1
        export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
        ;;
    esac
    if [ -f "docs/examples/$name.py" ]; then
        newer_library build/python || python_library build/python
        python=python3
        $python -c 'import torch' 2>/dev/null || [ ! -x /usr/bin/python3 ] || python=/usr/bin/python3
        exec env "PYTHONPATH=build/python${PYTHONPATH:+:$PYTHONPATH}" $python "docs/examples/$name.py" "$@"
    fi
    [ ! -f "docs/examples/$name/run.sh" ] || exec env CC="$CC" sh "docs/examples/$name/run.sh" "$@"
    [ -f "docs/examples/$name.$suffix" ] || wrong "there is no example \`$name\`"
    mkdir -p build/examples
    $compiler $flags -o "build/examples/$name" "docs/examples/$name.$suffix" $libraries
    exec $runner "build/examples/$name" "$@"
}

# Installs PyTorch, optimi, torchao and bitsandbytes into build/peers, once: remove that folder to try again. PyTorch
# brings 5 GB of CUDA, which stay unused.
install_peers() {
    if [ -e build/peers/tried ] || ! python3 -m pip --version >/dev/null 2>&1; then return; fi
    echo "installing PyTorch, optimi, torchao and bitsandbytes into build/peers ..."
    mkdir -p build/peers
    pip_peers torch || echo "peers: PyTorch could not be installed" >&2
    for package in numpy packaging; do pip_peers --no-deps "$package" || true; done
    for package in torch-optimi torchao bitsandbytes; do
        pip_peers --no-deps "$package" || echo "peers: $package could not be installed" >&2
    done
    : >build/peers/tried
}
pip_peers() {
    set -- env PIP_ROOT_USER_ACTION=ignore python3 -m pip install -q --retries 1 --target build/peers "$@"
    ! have timeout || set -- timeout 360 "$@" # seconds per package
    "$@"
}

# Goes on as a Python program, with a Python that has the modules: in build/peers, or Debian's. Returns if none has.
exec_python() { # exec_python MODULES PROGRAM ARGUMENT...
    modules=$1
    shift
    for peers in build/peers ''; do
        for python in python3 /usr/bin/python3; do
            if PYTHONPATH=$peers "$python" -c "import $modules" 2>/dev/null; then
                exec env "PYTHONPATH=$peers" PYTHONDONTWRITEBYTECODE=1 "$python" "$@"
            fi
        done
    done
}

# Compiles one part of bench/peers.c with flags of its own. Linking is without -Ofast, which would make the process
# flush subnormals.
peer() { # peer NAME FLAG...
    name=$1
    shift
    $CC "$@" -fPIC -c -o "build/bench/peers_$name.o" bench/peers.c
    objects="$objects build/bench/peers_$name.o"
}
bench_peers() {
    mkdir -p build/bench
    objects=''
    peer ours -DOURS -std=c99 -O2
    peer naive -DNAIVE=naive_step -O3 -march=native
    peer vector -DNAIVE=naive_vector_step -O3 -march=native -fno-math-errno
    peer llmc -DLLMC -Ofast -march=native
    peer ggml -DGGML -O3 -march=native
    $CC -shared -o build/bench/peers.so $objects -lm
    install_peers
    exec_python torch bench/peers.py "$@"
    have python3 || { echo "bench: --peers needs python3" >&2; exit 2; }
    exec python3 bench/peers.py "$@"
}

# docs/examples/convert.py with the packages of PyPI.
bench_converters() {
    knows 'bench converters' '' "$@"
    python_library build/python
    install_peers
    [ -d build/peers/safetensors ] || pip_peers --no-deps safetensors
    PYTHONPATH=$PWD/build/peers exec python3 bench/converters.py build/python
}

# bench/fidelity.py with a Python that has PyTorch, scikit-learn and matplotlib: in build/peers, or Debian's. `quick`
# and `draw` install nothing.
bench_fidelity() {
    knows 'bench fidelity' 'quick draw' "$@"
    mkdir -p build/bench
    if [ $# = 0 ]; then
        install_peers
        [ ! -d build/peers/torch ] || [ -d build/peers/sklearn ] || pip_peers scikit-learn matplotlib || true
    fi
    newer_library build/bench/python || python_library build/bench/python
    exec_python 'torch, sklearn, matplotlib' bench/fidelity.py "$@"
    echo "bench: fidelity needs PyTorch, scikit-learn and matplotlib; ./build.sh setup installs them" >&2
    exit 2
}

# One program with several builds of the header: see bench/flags.c.
flags_build() { # flags_build NAME COMPILER FLAG...: skipped without the compiler
    name=$1
    shift
    have "$1" || return 0
    "$@" -c -DSTEP="step_$name" -o "build/bench/flags_$name.o" bench/flags.c
    objects="$objects build/bench/flags_$name.o" builds="$builds BUILD($name)"
}
bench_flags() {
    mkdir -p build/bench
    objects='' builds=''
    flags_build O2 $CC -O2
    flags_build O0 $CC -O0
    flags_build O3_native $CC -O3 -march=native
    flags_build clang_O2 clang -O2
    $CC -std=c99 -O2 "-DBUILDS=$builds" -o build/bench/flags bench/flags.c $objects
    exec build/bench/flags "$@"
}

bench() {
    case "${1:-}" in compare | calls) # they check their own arguments
        script=bench/$1.sh
        shift
        exec sh "$script" "$@"
        ;;
    fidelity) shift; bench_fidelity "$@" ;; # it does not return
    q8)
        shift
        mkdir -p build/bench
        $CC -std=c99 -O3 -o build/bench/q8 bench/q8.c -lm
        exec build/bench/q8 "$@"
        ;;
    torch)
        shift
        knows 'bench torch' 'N tests' "$@"
        python_library build/python
        if [ "${1:-}" = tests ]; then
            install_peers
            for test in test_torch test_torch_optim test_torch_many; do
                (exec_python torch tests/$test.py build/python)
            done
            exit
        fi
        exec_python torch bench/torch_steps.py "$@"
        echo "bench: torch needs PyTorch: ./build.sh setup, or bench --peers, installs it" >&2
        exit 2
        ;;
    wasm)
        shift
        knows 'bench wasm' N "$@"
        exec sh bench/wasm.sh "$@"
        ;;
    converters)
        shift
        bench_converters "$@"
        ;;
    esac
    if [ "${1:-}" = cliffs ]; then
        knows 'bench cliffs' \
            'cliffs quick cache dram --markdown --nearest-stores scalar sse2 avx2 avx512 neon simd128' "$@"
    else
        knows bench '--gb --sizes --all --peers flags theorem1 atan2 one_element N' "$@"
    fi
    program=bench
    case "${1:-}" in
        --peers) shift; bench_peers "$@" ;; # these two do not return
        flags) shift; bench_flags "$@" ;;
        theorem1 | atan2 | cliffs | one_element) program=$1; shift ;;
    esac
    mkdir -p build/bench
    $CC -std=c99 -O2 -o "build/bench/$program" "bench/$program.c" -lm -lpthread
    if [ $program = atan2 ] &&
        $CC -std=c99 -O2 -DKAHAN_OPT_SLEEF -o build/bench/atan2_sleef bench/atan2.c -lsleef -lm 2>/dev/null; then
        build/bench/atan2_sleef "$@"
    fi
    exec "build/bench/$program" "$@"
}

# nvcc: in PATH, in its usual folder, or where setup installs it.
NVCC=${NVCC:-}
for nvcc in nvcc /usr/local/cuda/bin/nvcc build/cuda/nvidia/cu13/bin/nvcc; do
    if [ -z "$NVCC" ] && have "$nvcc"; then NVCC=$nvcc; fi
done
export NVCC CC

runs_with() { # runs_with FLAG...: can CC build a program with these flags, and does it run?
    echo 'int main(void) { return 0; }' >build/tests/empty.c
    $CC "$@" -o build/tests/empty build/tests/empty.c 2>/dev/null && build/tests/empty 2>/dev/null
}

cuda() {
    case "${1:-}" in day) # it checks its own arguments
        shift
        exec sh tests/cuda_day.sh "$@"
        ;;
    esac
    knows cuda bench "$@"
    mkdir -p build/tests build/bench
    if [ "${1:-}" = bench ]; then
        [ -n "$NVCC" ] || { echo "SKIPPED: the GPU bench (no nvcc; ./build.sh setup installs it)"; exit 0; }
        CUDA_ROWS=build/bench/cuda.csv
        export CUDA_ROWS
        rm -f $CUDA_ROWS
        printf '#define KAHAN_OPT_CUDA_IMPLEMENTATION\n#include "kahan_opt_cuda.cuh"\n' >build/bench/kernels.cu
        set -- -I. -O3 -o build/bench/cuda bench/cuda.c build/bench/kernels.cu
        $NVCC -arch=native "$@" 2>/dev/null || $NVCC "$@"
        build/bench/cuda || [ $? = 77 ] # without a GPU it says so and writes no table
        [ -s build/bench/cuda.csv ] || exit 0
        if ! python3 -c 'import torch' 2>/dev/null; then
            install_peers
            PYTHONPATH=$PWD/build/peers${PYTHONPATH:+:$PYTHONPATH}
            export PYTHONPATH
        fi
        exec python3 bench/cuda_peers.py build/bench/cuda.csv # names missing packages
    fi
    [ -n "$NVCC" ] || { echo "SKIPPED: the checks with nvcc (no nvcc; ./build.sh setup installs it)"; exit 0; }
    sh tests/cuda.sh | tee build/tests/cuda.log
    sed -n 's/^ok [0-9]* # SKIP/SKIPPED: the tests on a GPU:/p' build/tests/cuda.log
    ! grep -q '^not ok' build/tests/cuda.log
}

# The package for Python, with the header as a shared library: docs/pytorch.md.
python_library() { # python_library FOLDER [cuda]
    [ -z "${2:-}" ] || [ -n "$NVCC" ] || { echo "python cuda: no nvcc; ./build.sh setup installs it" >&2; exit 1; }
    CC=$CC python3 docs/examples/python/backend.py "$@" >/dev/null
}
newer_library() { # newer_library FOLDER: is its library newer than all that it is made from?
    [ -e "$1/kahan_opt/libkahan_opt.so" ] &&
        [ -z "$(find kahan_opt.h docs/examples/python -name '*.[hp]*' -newer "$1/kahan_opt/libkahan_opt.so")" ]
}

python() {
    knows python cuda "$@"
    python_library build/python "$@"
    echo "build/python has the package for Python: PYTHONPATH=build/python python3 -c 'import kahan_opt'"
}

# ---- web: docs/playground compiled to WebAssembly, in build/web ------------------------------------------------------

web_build() { # web_build FLAG...: with these flags in addition
    rm -rf build/web
    mkdir -p build/web
    cp docs/playground/*.html docs/playground/*.css docs/playground/*.js build/web
    for code in scalar simd128; do
        simd= && [ $code = scalar ] || simd=-msimd128
        clang --target=wasm32 -std=c99 -O2 $simd "$@" -mbulk-memory -ffreestanding -nostdlib -fuse-ld=lld \
            -Wl,--no-entry,--strip-all -o build/web/$code.wasm docs/playground/playground.c
    done
    $CC -std=c99 -O2 -ffp-contract=off "$@" -o build/playground docs/playground/playground.c
    build/playground >build/web/native.json
}
web_lacks() { # what `web test` needs and this machine does not have
    {
        for tool in clang wasm-ld chromium chromedriver; do have $tool || echo $tool; done
        for module in selenium PIL; do
            /usr/bin/python3 -c "import $module" 2>/dev/null || echo "$module for Python"
        done
    } | paste -s -d , - | sed 's/,/, /g'
}
web() {
    knows web 'build test picture' "$@"
    case "${1:-}" in
    test | picture)
        lacks=$(web_lacks)
        [ -z "$lacks" ] || { echo "1..0 # SKIP no $lacks; ./build.sh setup installs it"; exit 0; }
        web_build $C_WARNINGS
        exec /usr/bin/python3 tests/web.py "$1"
        ;;
    esac
    for tool in clang wasm-ld; do
        have $tool || { echo "build.sh: web needs $tool (./build.sh setup installs it)" >&2; exit 2; }
    done
    web_build
    echo "build/web has the page and what it loads; any web server can serve it"
    [ "${1:-}" = build ] || exec python3 -m http.server "${PORT:-8000}" --bind 127.0.0.1 --directory build/web
}

# ---- setup: checks every step, reports a failure at once, and lists all failures at the end --------------------------

failures='' absences='' # one line each
setup_log=build/setup.log
setup_failed() { echo "setup: FAILED: $1" >&2 && failures="$failures    $1
"; }
setup_absent() { echo "setup: optional, left out: $1" && absences="$absences    $1
"; }
reason() { # the first error of the last step, or its last line if there is none
    { grep -m 1 '^E: \|^ERROR: ' $setup_log || tail -n 1 $setup_log; } | grep . || echo "without a message"
}
locked() { grep -q '^E: Could not get lock\|^E: Unable to acquire the dpkg' $setup_log; }

# Runs apt-get and waits, about four minutes at most, for locks that another program holds. DPkg::Lock::Timeout is for
# dpkg's lock. The loop is for the locks of the lists and archives, for which apt does not wait.
apt() {
    for try in 1 2 3 4 5 6 7 8; do
        LC_ALL=C DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=15 "$@" >$setup_log 2>&1 && return 0
        locked || return 1
        [ $try = 8 ] || { echo "setup: waiting: $(reason)"; sleep 15; }
    done
    return 1
}
apt_install() { apt install -y --no-install-recommends "$@"; }
pip_install() { /usr/bin/python3 -m pip install -q --no-deps --upgrade --target "$@" >$setup_log 2>&1; }
optional() { # optional WHAT CONSEQUENCE: the last step, which is optional, failed
    if locked; then setup_failed "$1: $(reason)"; else setup_absent "$1; $2 ($(reason))"; fi
}

# Installs all packages at once. If that fails, installs those that this system has and names the others.
install_packages() {
    apt_install "$@" && return
    why=$(reason)
    locked && { setup_failed "apt-get install: $why"; return; }
    there='' missing=''
    for package; do
        if LC_ALL=C apt-get -qq -s install --no-install-recommends "$package" >/dev/null 2>&1; then
            there="$there $package"
        else
            missing="$missing $package"
        fi
    done
    [ -n "$missing" ] || { setup_failed "apt-get install: $why"; return; }
    setup_failed "packages that this system's sources do not have:$missing"
    [ -z "$there" ] || apt_install $there || setup_failed "apt-get install of the others: $(reason)"
}

arm64_apt() {
    env LC_ALL=C apt-get -qq -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o APT::Sandbox::User=root \
        -o "Dir::Cache=$PWD" -o "Dir::State::lists=$PWD/lists" -o "Dir::State::status=$PWD/status" \
        -o "Dir::Etc::sourcelist=$sources" -o "Dir::Etc::sourceparts=$PWD/none" "$@"
}

# Installs Debian's SLEEF for AArch64 into build/sleef-arm64, with package lists of its own, so that the system needs no
# second architecture.
sleef_arm64() {
    if [ -e build/sleef-arm64/usr ] || [ "$(dpkg --print-architecture)" = arm64 ]; then return; fi
    mkdir -p build/sleef-arm64/lists/partial build/sleef-arm64/archives/partial
    (
        cd build/sleef-arm64
        : >status
        for sources in /etc/apt/sources.list.d/debian.sources /etc/apt/sources.list; do [ -f $sources ] && break; done
        arm64_apt update && arm64_apt download libsleef3 && dpkg -x libsleef3_*_arm64.deb . && rm -rf lists
    ) >$setup_log 2>&1 || optional "SLEEF for AArch64" "its test stays out"
}

setup() {
    knows setup '' "$@"
    if ! have apt-get; then
        { printf 'setup: this needs apt (Debian or Ubuntu); install clang, tcc, perl, qemu-user and the '
            echo 'cross compilers in this file by hand'; } >&2
        exit 2
    fi
    mkdir -p build
    if ! apt update; then
        setup_failed "apt-get update: $(reason)"
    elif grep -q '^W: ' $setup_log; then
        sed -n 's/^W: /setup: apt-get update warns: /p' $setup_log >&2
    fi
    # without gcc-multilib, which conflicts with the cross compilers
    install_packages gcc g++ libc6-dev perl clang clang-19 llvm \
        openmpi-bin libopenmpi-dev \
        qemu-system-misc \
        lld lld-19 tcc musl-tools gcc-12-multilib libc6-dev-i386 python3-numpy nodejs cppcheck clang-tidy valgrind \
        wasi-libc libclang-rt-14-dev-wasm32 libclang-rt-19-dev-wasm32 \
        libclang-rt-14-dev qemu-user qemu-system-arm gcc-arm-none-eabi gcc-avr avr-libc simavr luajit \
        gcc-mingw-w64-x86-64-win32 wine64 gcc-aarch64-linux-gnu libc6-dev-arm64-cross gcc-s390x-linux-gnu \
        libc6-dev-s390x-cross gcc-riscv64-linux-gnu libc6-dev-riscv64-cross gcc-arm-linux-gnueabihf \
        libc6-dev-armhf-cross gcc-powerpc-linux-gnu libc6-dev-powerpc-cross gcc-powerpc64le-linux-gnu \
        libc6-dev-ppc64el-cross gcc-mips-linux-gnu libc6-dev-mips-cross libsleef-dev python3-gmpy2 python3-mpmath
    sleef_arm64
    # PyTorch and optimi, for tests/peers.py; with safetensors, for the converters
    { apt_install python3-torch python3-packaging python3-pip &&
        pip_install build/python torch-optimi==0.3.3 safetensors==0.8.0; } ||
        optional "PyTorch and optimi" "the comparison with them stays out"
    # for bench fidelity
    apt_install python3-sklearn python3-matplotlib ||
        optional "scikit-learn and matplotlib" "the evidence with error bars stays out"
    # the browser for the playground
    apt_install chromium chromium-driver python3-selenium python3-pil fonts-dejavu-core ||
        optional "Chromium and Selenium" "the test of the playground stays out"
    # clang-format for tests/signs.py: other versions format differently with the same settings
    { apt_install python3-pip && pip_install build/python clang-format==19.1.7; } ||
        optional "clang-format" "the check of the format stays out"
    # nvcc for the GPU part: the compiler and linker of NVIDIA's toolkit, without a driver (280 MB)
    if ! have nvcc && ! have /usr/local/cuda/bin/nvcc; then
        if [ "$(uname -m)" != x86_64 ]; then
            setup_absent "nvcc; its parts stay out (here it is installed on x86-64 only)"
        else
            { apt_install python3-pip && pip_install build/cuda nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 \
                nvidia-cuda-crt==13.0.88 nvidia-cuda-runtime==13.0.96; } || optional "nvcc" "its parts stay out"
        fi
    fi
    if [ "$(uname -m)" = x86_64 ] && ! have nvdisasm; then # the instructions of GPUs, for tests/sass.py
        { apt_install python3-pip && pip_install build/nvdisasm nvidia-cuda-nvdisasm==13.5.37; } ||
            optional "nvdisasm" "the count of the GPU's instructions stays out"
    fi
    [ -z "$absences" ] || printf 'setup: optional and left out:\n%s' "$absences"
    [ -z "$failures" ] || { printf 'setup: INCOMPLETE; what failed:\n%s' "$failures" >&2; exit 1; }
    echo "setup: done"
}

# ---- test: every part is a small script in build/tests that prints TAP. prove runs them all -------------------------

skipped=0
skip() { # skip PART TOOL [them]
    echo "SKIPPED: $1 (no $2; ./build.sh setup installs ${3:-it})"
    skipped=$((skipped + 1))
}

quote() ( # quote WORD...: quotes each word for the shell
    for word; do
        quoted=
        while :; do
            case $word in *\'*) ;; *) break ;; esac
            quoted="$quoted${word%%\'*}'\''" word=${word#*\'}
        done
        printf " '%s'" "$quoted$word"
    done
)

script() ( # script FILE COMMAND...: writes a script that runs the command
    file=$1
    shift
    printf '#!/bin/sh\nexec%s\n' "$(quote "$@")" >"$file"
    chmod +x "$file"
)

part() ( # part NAME COMMAND...: adds a part, whose command prints TAP
    name=$1
    shift
    script "build/tests/$name.t" "$@"
)

job() ( # job LIST NAME COMMAND...: adds a job for run_jobs to build/tests/LIST; build/tests/NAME.job repeats it
    list=$1 name=$2
    shift 2
    script "build/tests/$name.job" "$@"
    echo "build/tests/$name.job" >>"build/tests/$list"
)

run_jobs() { # runs the jobs, two at a time, first the objects; if one fails, the run ends when all of its list are done
    for list in objects jobs; do
        [ ! -e build/tests/$list ] || xargs -n 1 -P 2 sh <build/tests/$list
        rm -f build/tests/$list
    done
}

build() ( # build FILE COMPILER WORD...: adds a job that builds build/tests/FILE, as C99; a warning is an error
    file=$1 list=jobs
    shift
    case $file in *.o) list=objects ;; esac
    job $list "$file" "$@" -std=c99 $C_WARNINGS -o "build/tests/$file"
)

# build_test FILE SUFFIX SOURCE COMPILER WORD...: the same for a test. All tests of a suffix share the implementation:
# SUFFIX.plain.o, or SUFFIX.vmath.o for tests with vector mathematics. A test that changes it has its own.
build_test() {
    file=$1 suffix=$2 source=$3 kind=plain define=
    shift 3
    if echo "$*" | cat - "$source" | grep -q '[D ]KAHAN_OPT_STATIC\|define KOPT_'; then
        build "$file" "$@" "$source" -lm
        return
    fi
    ! grep -q 'define KAHAN_OPT_VMATH' "$source" || kind=vmath define=-DKAHAN_OPT_VMATH
    object=$suffix.$kind.o
    [ -e "build/tests/$object.job" ] || build "$object" "$@" $define -I. -c build/tests/plain.c
    build "$file" "$@" -DKOPT_IMPLEMENTED_ "$source" "build/tests/$object" -lm
}

sanitizes() { # sanitizes COMPILER MORE: does the compiler have the libraries of AddressSanitizer and UBSan, and MORE?
    echo 'int LLVMFuzzerTestOneInput(void); int LLVMFuzzerTestOneInput(void) { return 0; }' >build/tests/sanitizes.c
    [ -n "$2" ] || echo 'int main(void) { return 0; }' >>build/tests/sanitizes.c
    "$1" "-fsanitize=address,undefined$2" -o build/tests/sanitizes build/tests/sanitizes.c >/dev/null 2>&1
}

all=$(echo tests/test_*.c)
bits='tests/test_tools.c tests/test_step_bits.c tests/test_api.c tests/test_convert.c tests/test_vmath.c'
bits="$bits tests/test_inline.c"
# Other builds run only these: what the other tests check follows from the bits.
more_bits="$bits$(printf ' tests/test_%s.c' save state compress environment)"
program() { # program SOURCES SUFFIX EMULATOR ARGUMENT COMPILER FLAG...: builds each test and adds it as a part
    sources=$1 suffix=$2 emulator=$3 argument=$4
    shift 4
    for source in $sources; do
        name=$(basename "$source" .c).$suffix
        build_test "$name" "$suffix" "$source" "$@"
        part "$name" ${emulator:+"$emulator"} "build/tests/$name" ${argument:+"$argument"}
    done
}

wasi='--target=wasm32-wasi --sysroot=/usr -msimd128' # Debian's wasi-libc
wasi() { # wasi COMPILER: does it build programs for WASI?
    echo 'int main(void) { return 0; }' >build/tests/empty.c
    have "$1" && "$1" $wasi -o build/tests/empty.wasm build/tests/empty.c 2>/dev/null
}

sleef() { # sleef SUFFIX COMPILER FLAG...: builds the tests of arrays and steps with SLEEF and adds them as parts
    suffix=$1
    shift
    for name in test_vmath.$suffix test_atan.$suffix; do
        build $name "$@" -DKAHAN_OPT_SLEEF tests/${name%%.*}.c -lsleef -lm
        part $name build/tests/$name quick
    done
}

# Vector mathematics with SLEEF, whose bits are the same in all of these builds, and all functions compared with MPFR.
vmath_parts() {
    beside=build/tests/test_vmath.native
    if runs_with -lsleef; then
        sleef sleef $CC -O2
        sleef sleef_debug $CC -O0
        if have clang; then
            sleef sleef_clang clang -O2
            sleef sleef_clang_debug clang -O0
            sleef sleef_clang_wide clang -Ofast -march=native -DKAHAN_OPT_ALL_ISAS
        else
            skip "SLEEF called by clang" clang
        fi
        if have gcc; then
            sleef lto gcc -O2 -flto
        else
            skip "SLEEF with link-time optimization by gcc" gcc
        fi
        if have clang && have ld.lld; then
            sleef lto_clang clang -O2 -flto -fuse-ld=lld
        else
            skip "SLEEF with link-time optimization by clang" "clang or lld"
        fi
        beside="$beside build/tests/test_vmath.sleef"
    else
        skip "SLEEF" libsleef-dev
    fi
    library=build/sleef-arm64/usr/lib/aarch64-linux-gnu
    if have aarch64-linux-gnu-gcc && have qemu-aarch64 && [ -e $library/libsleef.so.3 ]; then
        for name in test_vmath test_atan; do
            build $name.sleef_neon aarch64-linux-gnu-gcc -O2 -DKAHAN_OPT_SLEEF tests/$name.c $library/libsleef.so.3 -lm
            part $name.sleef_neon qemu-aarch64 -L /usr/aarch64-linux-gnu -E LD_LIBRARY_PATH=$library \
                build/tests/$name.sleef_neon quick
        done
    else
        printf 'NOTE: SLEEF on AArch64 is not tested (no build/sleef-arm64 or qemu-aarch64; '
        echo 'a foreign package, which not every mirror has)'
    fi
    for candidate in python3 /usr/bin/python3; do
        if $candidate -c 'import gmpy2' 2>/dev/null; then
            part vmath $candidate tests/vmath.py test $beside
            return
        fi
    done
    skip "vector mathematics compared with MPFR" python3-gmpy2
}

# The inline step in code of other languages and flags than the library's, which is built at -O2.
inline_parts() {
    while read -r name compiler flags; do
        have $compiler || { skip "the inline step by $compiler $flags" $compiler; continue; }
        warnings=$C_WARNINGS
        case $compiler in *++) warnings="$WARNINGS -Werror" ;; esac
        job jobs "test_inline.$name" $compiler $flags $warnings -DKOPT_IMPLEMENTED_ -o "build/tests/test_inline.$name" \
            tests/test_inline.c -x none build/tests/native.plain.o -lm
        part "test_inline.$name" "build/tests/test_inline.$name" quick
    done <<'TEXT'
debug gcc -std=c99 -O0
ofast gcc -std=c99 -Ofast
ofast_native gcc -std=c99 -Ofast -march=native
estimates gcc -std=c99 -Ofast -mrecip=all -fsingle-precision-constant
cxx98 g++ -x c++ -std=c++98 -Ofast
cxx17 g++ -x c++ -std=c++17 -O2 -ffp-contract=fast -march=native
clang_debug clang -std=c99 -O0
clang_native clang -std=c99 -Ofast -march=native -mrecip
clang_cxx98 clang++ -x c++ -std=c++98 -O2
TEXT
    case $(uname -m) in x86_64) ;; *) return ;; esac
    if runs_with -m32; then
        program tests/test_inline.c x87 '' quick $CC -m32 -O2 -mno-sse -mfpmath=387
        program tests/test_inline.c x87_ofast '' quick $CC -m32 -Ofast -mno-sse -mfpmath=387
    else
        skip "the inline step by x87" "gcc-multilib for -m32"
    fi
}

library_job() { # adds the job that builds the library for Python, in build/tests/python
    job jobs python_library env "CC=$CC" python3 docs/examples/python/backend.py build/tests/python
}

prove_all() {
    if have prove; then
        prove -j2 --timer build/tests/*.t
    else
        skip "prove, which counts the results" perl
        for t in build/tests/*.t; do "$t" || { echo "FAILED: $t" >&2; exit 1; }; done
    fi
    echo "$skipped parts skipped"
    [ $strict = 0 ] || [ $skipped = 0 ]
}

# Finds most mistakes in the least time.
fast_tests() {
    program "$all" native '' quick $CC -O2
    build ofast.o $CC -Ofast -ffp-contract=fast -I. -c build/tests/plain.c
    build probe.native $CC -O2 -DKOPT_IMPLEMENTED_ tests/probe.c build/tests/native.plain.o
    warnings clang -std=c99
    warnings g++ -std=c++98 -x c++
    warnings g++ -std=c++17 -x c++
    warnings clang++ -std=c++98 -x c++
    build probe.ofast $CC -O2 -DKOPT_IMPLEMENTED_ tests/probe.c build/tests/ofast.o
    part golden sh tests/golden.sh build/tests/probe.native build/tests/probe.ofast
    part selftest sh tests/selftest.sh build/tests/native.plain.o
    part setup sh tests/setup.sh
    part usage sh tests/usage.sh
    part figures sh tests/figures.sh
    run_jobs
    prove_all
    cat <<'TEXT'
left out by --fast: other compilers, machines and flags, C++ beyond its warnings, sanitizers, fuzzing, static analysis,
    NumPy, MPFR, PyTorch, SLEEF, the GPU part, vendoring, sizes, examples, demo; ./build.sh test has them
TEXT
}
warnings() { # warnings COMPILER STANDARD FLAG...: the implementation must compile without a warning
    have "$1" || { skip "warnings of $*" "$1"; return; }
    job jobs "warnings.$1$2" "$@" $WARNINGS -Werror -DKAHAN_OPT_VMATH -I. -fsyntax-only build/tests/plain.c
}

run_tests() {
    knows test '--no-skip --fast' "$@"
    strict=0 fast=0
    for option; do case $option in --no-skip) strict=1 ;; --fast) fast=1 ;; esac; done
    rm -rf build/tests
    mkdir -p build/tests
    printf '#define KAHAN_OPT_IMPLEMENTATION\n#include "kahan_opt.h"\n' >build/tests/plain.c
    echo "building the tests ..."
    [ $fast = 0 ] || { fast_tests; return; }
    program "$all" native '' '' $CC -O2
    program "$more_bits tests/test_atan.c" ofast '' quick $CC -Ofast -ffp-contract=fast
    program "$more_bits" debug '' quick $CC -O0
    program tests/test_environment.c fast_math '' quick $CC -O3 -ffast-math -DKAHAN_OPT_STATIC
    if have clang-19; then
        program tests/test_environment.c clang19 '' quick clang-19 -O3 -ffast-math
    else
        skip "the caller's environment with clang-19" clang-19
    fi
    # without the instruction sets below that of this machine
    program "$bits" this_machine '' quick $CC -O2 -march=native
    inline_parts
    if have clang; then
        program "$more_bits tests/test_atan.c" clang '' quick clang -Ofast -march=native -DKAHAN_OPT_ALL_ISAS
    else
        skip "clang -Ofast -march=native" clang
    fi
    if have aarch64-linux-gnu-gcc && have qemu-aarch64; then
        program "$more_bits tests/test_atan.c" neon qemu-aarch64 quick aarch64-linux-gnu-gcc -O2 -static
        program tests/test_environment.c neon_ofast qemu-aarch64 quick aarch64-linux-gnu-gcc -Ofast -static
        part neon_exhaustive sh tests/exhaustive.sh build/tests/test_convert.native \
            qemu-aarch64 build/tests/test_convert.neon
    else
        skip "NEON under qemu" "aarch64-linux-gnu-gcc or qemu-aarch64"
    fi
    # big-endian; 32-bit; an environment of its own
    for target in s390x:s390x-linux-gnu riscv64:riscv64-linux-gnu arm:arm-linux-gnueabihf ppc64le:powerpc64le-linux-gnu
    do
        compiler=${target#*:}-gcc emulator=qemu-${target%%:*}
        if have "$compiler" && have "$emulator"; then
            programs='tests/test_convert.c tests/test_vmath.c'
            case $compiler in
            s390x*) programs="$bits tests/test_save.c" ;;
            arm-*) programs="$programs tests/test_inline.c" ;;
            esac
            program "$programs" "${target%%:*}" "$emulator" quick "$compiler" -O2 -static
            program tests/test_environment.c "${target%%:*}_ofast" "$emulator" quick "$compiler" -Ofast -static
        else
            skip "the bits on ${target%%:*}" "$compiler or $emulator"
        fi
    done
    for compiler in clang clang-19; do # vectors of WebAssembly
        if have node && wasi $compiler; then
            programs='tests/test_step_bits.c'
            [ $compiler = clang ] || programs="$bits tests/test_save.c tests/test_state.c"
            for source in $programs; do
                [ "$source" != tests/test_api.c ] || continue # takes other rounding directions, which WebAssembly lacks
                name=$(basename "$source" .c).wasm_$compiler
                build_test "$name" wasm_$compiler "$source" $compiler $wasi -O2
                part "$name" node --no-warnings tests/wasi.js "build/tests/$name" quick
            done
        else
            skip "the bits of WebAssembly's vectors, $compiler" "$compiler, lld, node or wasi-libc" them
        fi
    done
    for tool in gcc g++ clang tcc objcopy; do have $tool || skip "vendoring: the tests that need $tool" $tool; done
    part vendor sh tests/vendor.sh warnings leaks
    part vendor_more sh tests/vendor.sh pragmas windows targets names pairs versions
    build probe.native $CC -O2 -DKOPT_CODED_FROM_=1 tests/probe.c
    build probe.ofast $CC -Ofast tests/probe.c
    part golden sh tests/golden.sh build/tests/probe.native build/tests/probe.ofast
    python=
    for candidate in python3 /usr/bin/python3; do
        if $candidate -c 'import numpy' 2>/dev/null; then python=$candidate && break; fi
    done
    if [ -n "$python" ]; then
        part numpy sh tests/golden.sh $python tests/probe.py
    else
        skip "the NumPy reference" python3-numpy
    fi
    vmath_parts
    part stack sh tests/stack.sh quick
    part mutants sh tests/mutants.sh turn 24
    cells=$(sh tests/cells.sh missing)
    if [ -n "$cells" ]; then
        tools=$(echo "$cells" | tr ' ' '\n' | grep -v '^[0-9]*$' | sort -u | paste -s -d , - | sed 's/,/, /g')
        skip "$(echo "$cells" | grep -c .) of the cells" "$tools" them
    fi
    part cells sh tests/cells.sh quick
    if [ -n "$NVCC" ]; then part cuda sh tests/cuda.sh quick; else skip "the checks of the GPU part with nvcc" nvcc; fi
    if have python3; then part cuda_fake sh tests/cuda_fake.sh; else skip "the CUDA runtime for the CPU" python3; fi
    if [ -n "$NVCC" ] && have python3; then
        part cuda_day sh tests/cuda_day_test.sh
    else
        skip "the rehearsal of the day with a GPU" "nvcc or python3"
    fi
    for tool in gcc clang; do
        if have $tool && sanitizes $tool ''; then
            part hostile_$tool sh tests/hostile.sh $tool
        else
            skip "the tests under $tool's sanitizers" "$tool with AddressSanitizer"
        fi
    done
    if have clang && sanitizes clang ,fuzzer; then
        part hostile_fuzz sh tests/hostile.sh fuzz
    else
        skip "libFuzzer" libclang-rt-14-dev
    fi
    if have valgrind && [ -f /usr/include/valgrind/memcheck.h ]; then
        part hostile_valgrind sh tests/hostile.sh valgrind
    else
        skip "hostile input under valgrind" valgrind
    fi
    for tool in cppcheck clang-tidy; do have $tool || skip "static analysis by $tool" $tool; done
    part hostile_static sh tests/hostile.sh static
    have luajit || skip "the library called from LuaJIT" luajit
    part examples sh tests/examples.sh
    for tool in arm-none-eabi-gcc qemu-system-arm riscv64-linux-gnu-gcc qemu-system-riscv32 avr-gcc simavr; do
        have $tool || skip "the firmware that needs $tool" $tool
    done
    part firmware sh tests/firmware.sh bits figures
    part firmware_power sh tests/firmware.sh power careless
    part checkpoint sh tests/checkpoint.sh crash damage
    part checkpoint_more sh tests/checkpoint.sh files machines
    part lockstep sh tests/lockstep.sh
    if have mpicc && have mpirun; then
        part zero1 sh tests/zero1.sh
    else
        skip "training on several ranks of MPI" "mpicc or mpirun"
    fi
    lacks=$(web_lacks)
    if [ -z "$lacks" ]; then part web sh build.sh web test; else skip "the playground in a browser" "$lacks" them; fi
    part docs sh tests/docs.sh
    part recipes sh tests/recipes.sh
    if have python3; then part api python3 tests/api.py --check; else skip "the API reference" python3; fi
    [ -d build/python/clang_format ] || have clang-format-19 || skip "the format of the C files" clang-format-19
    if have python3; then part signs python3 tests/signs.py; else skip "names, banners and format" python3; fi
    part demo sh tests/demo.sh
    part selftest sh tests/selftest.sh
    part setup sh tests/setup.sh
    part usage sh tests/usage.sh
    part figures sh tests/figures.sh
    build theorem1 $CC -O2 bench/theorem1.c -lm
    part theorem1 build/tests/theorem1 test
    if [ -d build/python/optimi ] && /usr/bin/python3 -c 'import torch, packaging' 2>/dev/null; then # the system's own
        part peers /usr/bin/python3 tests/peers.py $CC
    else
        skip "the rules compared with PyTorch and optimi" "python3-torch or torch-optimi"
    fi
    if have python3; then
        library_job
        part bindings "${python:-python3}" tests/bindings.py build/tests/python
    else
        skip "the bindings for Python" python3
    fi
    if /usr/bin/python3 -c 'import torch' 2>/dev/null; then
        part torch /usr/bin/python3 tests/test_torch.py build/tests/python
        part torch_optim /usr/bin/python3 tests/test_torch_optim.py build/tests/python
        part torch_many /usr/bin/python3 tests/test_torch_many.py build/tests/python
    else
        skip "the optimizers for PyTorch" python3-torch
    fi
    if [ -d build/python/optimi ] && PYTHONPATH=build/python /usr/bin/python3 -c 'import torch, safetensors' 2>/dev/null
    then
        part convert_formats /usr/bin/python3 tests/test_convert_formats.py build/tests/python
    else
        skip "the converters" "python3-torch, torch-optimi or safetensors" them
    fi
    if /usr/bin/python3 -c 'import torch, sklearn, matplotlib' 2>/dev/null; then
        part fidelity sh tests/fidelity.sh
    else
        skip "the evidence with small settings" "python3-torch, python3-sklearn or python3-matplotlib" them
    fi
    run_jobs
    prove_all
}

mutants() {
    case "${1:-all}" in
    all) exec sh tests/mutants.sh all ;;
    share) exec sh tests/mutants.sh share "${2%/*}" "${2#*/}" ;;
    *) wrong "mutants: it takes nothing, all, or share K/N" ;;
    esac
}

figures() {
    knows figures 'bench firmware fidelity draw' "$@"
    exec sh docs/figures.sh "$@"
}

case "${1:-}" in
demo) shift; demo "$@" ;;
examples) shift; examples "$@" ;;
test) shift; run_tests "$@" ;;
bench) shift; bench "$@" ;;
cuda) shift; cuda "$@" ;;
mutants) shift; mutants "$@" ;;
web) shift; web "$@" ;;
figures) shift; figures "$@" ;;
python) shift; python "$@" ;;
setup) shift; setup "$@" ;;
-h | --help | help) usage ;;
'') usage >&2; exit 2 ;;
*) wrong "there is no command \`$1\`" ;;
esac
