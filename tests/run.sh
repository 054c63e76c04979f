# `./build.sh test`, a part of build.sh: every part is a small script in build/tests that prints TAP. prove runs them.
# What is much like another part or build runs by turns: see turn in tests/tap.sh.
# shellcheck shell=sh disable=SC2086,SC2154
. tests/tap.sh

skipped=0
lacks() { # lacks PART TOOLS
    echo "SKIPPED: $1 (no $2: see ./build.sh setup)"
    skipped=$((skipped + 1))
}

with() { # with PART TOOLS [TEST...]: can the part run, as TEST says, or without one, as all TOOLS are there?
    wanted=$1 tools=$2
    shift 2
    [ $# -gt 0 ] || set -- all_there $tools
    "$@" 2>/dev/null || { lacks "$wanted" "$tools"; return 1; }
}
all_there() { for tool; do have $tool || return 1; done; }

runs_with() { # runs_with FLAG...: can CC build a program with these flags, and does it run?
    echo 'int main(void) { return 0; }' >build/tests/empty.c
    $CC "$@" -o build/tests/empty build/tests/empty.c && build/tests/empty
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

# The longest parts take turns: those of one group with each commit, and the groups take about the same time. A part's
# own turns go on each time that it runs.
groups=10
group() { # group GROUP: is it the turn of this one, 0 to 9?
    [ $1 -lt $groups ] || wrong "group $1 has no turn"
    [ -n "${KOPT_ALL:-}" ] || [ $((commit % groups)) = $1 ]
}
seldom() { # seldom GROUP NAME COMMAND...: adds a part of this group
    group $1 || return 0
    name=$2
    shift 2
    part $name env KOPT_TURN=$((commit / groups)) "$@"
}

job() ( # job LIST NAME COMMAND...: adds a job for run_jobs to build/tests/LIST; build/tests/NAME.job repeats it
    list=$1 name=$2
    shift 2
    script "build/tests/$name.job" "$@"
    echo "build/tests/$name.job" >>"build/tests/$list"
)

# runs the jobs, one for each processor up to eight, first the objects; if one fails, the run ends when all of its list
# are done
run_jobs() {
    at_a_time=$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
    [ "$at_a_time" -le 8 ] || at_a_time=8
    for list in objects jobs; do
        [ ! -e build/tests/$list ] || xargs -n 1 -P "$at_a_time" sh <build/tests/$list
        rm -f build/tests/$list
    done
}

build() ( # build FILE COMPILER WORD...: adds a job that builds build/tests/FILE, as C99; a warning is an error
    file=$1 list=jobs
    shift
    case $file in *.o) list=objects ;; esac
    job $list "$file" "$@" -std=c99 $warnings -o "build/tests/$file"
)

# build_test FILE SUFFIX SOURCE COMPILER WORD...: the same for a test. All tests of a suffix share the implementation:
# SUFFIX.plain.o, or SUFFIX.vmath.o for tests with vector mathematics. A test that changes it has its own.
# libraries: what is linked, too.
libraries=
build_test() {
    file=$1 suffix=$2 source=$3 kind=plain define=
    shift 3
    if has_implementation "$source" || echo "$*" | grep -q DKAHAN_OPT_STATIC; then
        build "$file" "$@" "$source" $libraries -lm
        return
    fi
    ! grep -q 'define KAHAN_OPT_VMATH' "$source" || kind=vmath define=-DKAHAN_OPT_VMATH
    object=$suffix.$kind.o
    [ -e "build/tests/$object.job" ] || build "$object" "$@" $define -I. -c build/tests/plain.c
    build "$file" "$@" -DKOPT_IMPLEMENTED_ "$source" "build/tests/$object" $libraries -lm
}

sanitizes() { # sanitizes COMPILER MORE: does the compiler have the libraries of AddressSanitizer and UBSan, and MORE?
    echo 'int LLVMFuzzerTestOneInput(void); int LLVMFuzzerTestOneInput(void) { return 0; }' >build/tests/sanitizes.c
    [ -n "$2" ] || echo 'int main(void) { return 0; }' >>build/tests/sanitizes.c
    "$1" "-fsanitize=address,undefined$2" -o build/tests/sanitizes build/tests/sanitizes.c >/dev/null 2>&1
}

all=$(echo tests/*/test_*.c)
units() { printf ' tests/unit/test_%s.c' "$@"; }
bits=$(units tools step_bits api convert vmath inline)
# Other builds run only these: what the other tests check follows from the bits.
more_bits="$bits$(units save state dither compress environment)"
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
    have node && have "$1" && "$1" $wasi -o build/tests/empty.wasm build/tests/empty.c 2>/dev/null
}

sleef() { # sleef SUFFIX COMPILER FLAG...: builds the tests of arrays and steps with SLEEF and adds them as parts
    suffix=$1
    [ $suffix = sleef ] || turn 4 || return 0
    shift
    libraries=-lsleef
    program "$(units vmath atan)" $suffix '' quick "$@" -DKAHAN_OPT_SLEEF
    libraries=
}

# Vector mathematics with SLEEF, whose bits are the same in all of these builds, and all functions compared with MPFR.
vmath_parts() {
    beside=build/tests/test_vmath.native
    if with SLEEF libsleef-dev runs_with -lsleef; then
        sleef sleef $CC -O2
        sleef sleef_debug $CC -O0
        if with "SLEEF called by clang" clang; then
            sleef sleef_clang clang -O2
            sleef sleef_clang_debug clang -O0
            sleef sleef_clang_wide clang -Ofast -march=native -DKAHAN_OPT_ALL_ISAS
        fi
        with "SLEEF with link-time optimization by gcc" gcc && sleef lto gcc -O2 -flto
        with "SLEEF with link-time optimization by clang" "clang ld.lld" &&
            sleef lto_clang clang -O2 -flto -fuse-ld=lld -Wno-unused-command-line-argument
        beside="$beside build/tests/test_vmath.sleef"
    fi
    library=build/sleef-arm64/usr/lib/aarch64-linux-gnu
    if have aarch64-linux-gnu-gcc && have qemu-aarch64 && [ -e $library/libsleef.so.3 ]; then
        for name in test_vmath test_atan; do
            turn 4 || continue
            build $name.sleef_neon aarch64-linux-gnu-gcc -O2 -DKAHAN_OPT_SLEEF tests/unit/$name.c \
                $library/libsleef.so.3 -lm
            part $name.sleef_neon qemu-aarch64 -L /usr/aarch64-linux-gnu -E LD_LIBRARY_PATH=$library \
                build/tests/$name.sleef_neon quick
        done
    else
        printf 'NOTE: SLEEF on AArch64 is not tested (no build/sleef-arm64 or qemu-aarch64; '
        echo 'a foreign package, which not every mirror has)'
    fi
    for candidate in python3 /usr/bin/python3; do
        if $candidate -c 'import gmpy2' 2>/dev/null; then
            part vmath $candidate tests/bits/vmath.py test $beside
            return
        fi
    done
    lacks "vector mathematics compared with MPFR" python3-gmpy2
}

# The inline step in code of other languages and flags than the library's, which is built at -O2.
inline_parts() {
    while read -r name compiler flags; do
        with "the inline step by $compiler $flags" $compiler || continue
        job jobs "test_inline.$name" $compiler $flags $cxx_warnings -DKOPT_IMPLEMENTED_ \
            -o "build/tests/test_inline.$name" tests/unit/test_inline.c -x none build/tests/native.plain.o -lm
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
    with "the inline step by x87" "gcc-multilib for -m32" runs_with -m32 || return 0
    ! turn 2 || program tests/unit/test_inline.c x87 '' quick $CC -m32 -O2 -mno-sse -mfpmath=387
    ! turn 2 || program tests/unit/test_inline.c x87_ofast '' quick $CC -m32 -Ofast -mno-sse -mfpmath=387
}

library_job() { # adds the job that builds the library for Python, in build/tests/python
    job jobs python_library env "CC=$CC" python3 docs/examples/python/backend.py build/tests/python
}

prove_all() {
    if with "prove, which counts the results" prove; then
        prove -j2 --timer --failures build/tests/*.t
    else
        for t in build/tests/*.t; do "$t" || { echo "FAILED: $t" >&2; exit 1; }; done
    fi
    echo "$skipped parts skipped"
    [ $strict = 0 ] || [ $skipped = 0 ]
}

# Finds most mistakes in the least time.
fast_tests() {
    for source in $all; do # without the two slowest, which find nothing that the others miss
        case $source in */test_random.c | */test_rules.c) ;; *) program $source native '' quick $CC -O2 ;; esac
    done
    build ofast.o $CC -Ofast -ffp-contract=fast -I. -c build/tests/plain.c
    build probe.native $CC -O2 -DKOPT_IMPLEMENTED_ tests/bits/probe.c build/tests/native.plain.o
    warns clang -std=c99
    warns g++ -std=c++98 -x c++
    warns g++ -std=c++17 -x c++
    warns clang++ -std=c++98 -x c++
    build probe.ofast $CC -O2 -DKOPT_IMPLEMENTED_ tests/bits/probe.c build/tests/ofast.o
    part golden sh tests/bits/golden.sh build/tests/probe.native build/tests/probe.ofast
    part selftest sh tests/bits/selftest.sh build/tests/native.plain.o
    part setup sh tests/repo/setup.sh
    part usage sh tests/repo/usage.sh
    part figures sh tests/repo/figures.sh
    run_jobs
    prove_all
    cat <<'TEXT'
left out by --fast: test_random and test_rules, other compilers, machines and flags, C++ beyond its warnings,
    sanitizers, fuzzing, static analysis, NumPy, MPFR, PyTorch, SLEEF, the GPU part, vendoring, sizes, examples, demo;
    ./build.sh test has them
TEXT
}
warns() { # warns COMPILER STANDARD FLAG...: the implementation must compile without a warning
    with "warnings of $*" "$1" || return 0
    job jobs "warnings.$1$2" "$@" $cxx_warnings -DKAHAN_OPT_VMATH -I. -fsyntax-only build/tests/plain.c
}

run_tests() {
    knows test '--no-skip --fast --all' "$@"
    strict=0 fast=0
    for option; do
        case $option in --no-skip) strict=1 ;; --fast) fast=1 ;; --all) KOPT_ALL=yes && export KOPT_ALL ;; esac
    done
    rm -rf build/tests
    mkdir -p build/tests
    printf '#define KAHAN_OPT_IMPLEMENTATION\n#include "kahan_opt.h"\n' >build/tests/plain.c
    echo "building the tests ..."
    [ $fast = 0 ] || { fast_tests; return; }
    for source in $all; do
        argument=quick
        ! turn 8 || argument=
        program $source native '' "$argument" $CC -O2
    done
    ! turn 2 || program "$more_bits tests/unit/test_atan.c" ofast '' quick $CC -Ofast -ffp-contract=fast
    ! turn 2 || program "$more_bits" debug '' quick $CC -O0
    ! turn 2 || program tests/unit/test_environment.c fast_math '' quick $CC -O3 -ffast-math -DKAHAN_OPT_STATIC
    with "the caller's environment with clang-19" clang-19 && turn 2 &&
        program tests/unit/test_environment.c clang19 '' quick clang-19 -O3 -ffast-math
    # without the instruction sets below that of this machine
    ! turn 2 || program "$bits" this_machine '' quick $CC -O2 -march=native
    inline_parts
    with "clang -Ofast -march=native" clang && turn 2 &&
        program "$more_bits tests/unit/test_atan.c" clang '' quick clang -Ofast -march=native -DKAHAN_OPT_ALL_ISAS
    if with "NEON under qemu" "aarch64-linux-gnu-gcc qemu-aarch64" && turn 3; then
        program "$more_bits tests/unit/test_atan.c" neon qemu-aarch64 quick aarch64-linux-gnu-gcc -O2 -static
        program tests/unit/test_environment.c neon_ofast qemu-aarch64 quick aarch64-linux-gnu-gcc -Ofast -static
        program "$(units save)" neon_crc qemu-aarch64 quick aarch64-linux-gnu-gcc -O2 -static -march=armv8-a+crc
        part neon_exhaustive sh tests/bits/exhaustive.sh build/tests/test_convert.native \
            qemu-aarch64 build/tests/test_convert.neon
    fi
    # big-endian; 32-bit; an environment of its own. Each test by itself, as emulators are slow.
    for target in s390x:s390x-linux-gnu riscv64:riscv64-linux-gnu arm:arm-linux-gnueabihf ppc64le:powerpc64le-linux-gnu
    do
        compiler=${target#*:}-gcc emulator=qemu-${target%%:*}
        with "the bits on ${target%%:*}" "$compiler $emulator" || continue
        programs=$(units convert vmath)
        case $compiler in
        s390x*)
            programs=$(units tools api convert vmath inline)
            ! group 8 || program "$(units step_bits dither save)" s390x $emulator quick $compiler -O2 -static
            ;;
        arm-*) programs="$programs $(units inline)" ;;
        esac
        for source in $programs; do
            ! turn 7 || program $source "${target%%:*}" "$emulator" quick "$compiler" -O2 -static
        done
        ! turn 7 ||
            program tests/unit/test_environment.c "${target%%:*}_ofast" "$emulator" quick "$compiler" -Ofast -static
    done
    for compiler in clang clang-19; do # vectors of WebAssembly
        with "the bits of WebAssembly's vectors, $compiler" "$compiler, lld, node or wasi-libc" wasi $compiler &&
            turn 3 || continue
        programs=$(units step_bits)
        [ $compiler = clang ] || programs="$bits $(units save state)"
        for source in $programs; do
            case $source in *_api.c) continue ;; esac # takes other rounding directions, which WebAssembly lacks
            name=$(basename "$source" .c).wasm_$compiler
            build_test "$name" wasm_$compiler "$source" $compiler $wasi -O2
            part "$name" node --no-warnings tests/bits/wasi.js "build/tests/$name" quick
        done
    done
    for tool in gcc g++ clang tcc objcopy; do have $tool || lacks "vendoring: the tests that need $tool" $tool; done
    seldom 7 vendor sh tests/robust/vendor.sh warnings leaks
    seldom 2 vendor_more sh tests/robust/vendor.sh pragmas windows targets names pairs versions
    build probe.native $CC -O2 -DKOPT_CODED_FROM_=1 tests/bits/probe.c
    build probe.ofast $CC -Ofast tests/bits/probe.c
    part golden sh tests/bits/golden.sh build/tests/probe.native build/tests/probe.ofast
    python=
    for candidate in python3 /usr/bin/python3; do
        if $candidate -c 'import numpy' 2>/dev/null; then python=$candidate && break; fi
    done
    with "the NumPy reference" python3-numpy test -n "$python" &&
        part numpy sh tests/bits/golden.sh $python tests/bits/probe.py
    vmath_parts
    seldom 3 stack sh tests/robust/stack.sh
    seldom 6 abi sh tests/robust/abi.sh
    seldom 0 mutants sh tests/robust/mutants.sh turn
    tools=$(sh tests/bits/matrix.sh missing)
    [ -z "$tools" ] || lacks "some of the matrix" "$(echo $tools)"
    seldom 4 matrix sh tests/bits/matrix.sh turn
    tools=$(sh tests/bits/avx512.sh lacks)
    with "AVX-512 in Bochs" "$(echo $tools)" test -z "$tools" && seldom 8 avx512 sh tests/bits/avx512.sh
    with "the checks of the GPU part with nvcc" nvcc test -n "$NVCC" &&
        seldom 1 cuda sh tests/gpu/cuda.sh ${KOPT_ALL:-quick}
    with "the CUDA runtime for the CPU" python3 && part cuda_fake sh tests/gpu/cuda_fake.sh
    with "the rehearsal of the day with a GPU" nvcc test -n "$NVCC" &&
        seldom 5 cuda_day sh tests/gpu/cuda_day_test.sh
    for tool in 2:gcc 3:clang; do
        group=${tool%:*} tool=${tool#*:}
        with "the tests under $tool's sanitizers" "$tool with AddressSanitizer" sanitizes $tool '' &&
            seldom $group sanitize_$tool sh tests/robust/sanitize.sh $tool
    done
    with libFuzzer libclang-rt-14-dev sanitizes clang ,fuzzer && seldom 6 sanitize_fuzz sh tests/robust/sanitize.sh fuzz
    with "hostile input under valgrind" valgrind test -f /usr/include/valgrind/memcheck.h &&
        seldom 6 sanitize_valgrind sh tests/robust/sanitize.sh valgrind
    for tool in cppcheck clang-tidy; do have $tool || lacks "static analysis by $tool" $tool; done
    seldom 6 sanitize_static sh tests/robust/sanitize.sh static
    have luajit || lacks "the library called from LuaJIT" luajit
    have cmake || lacks "the CMake package" cmake
    seldom 7 examples sh tests/examples/examples.sh
    for tool in arm-none-eabi-gcc qemu-system-arm riscv64-linux-gnu-gcc qemu-system-riscv32 avr-gcc simavr; do
        have $tool || lacks "the firmware that needs $tool" $tool
    done
    seldom 6 firmware sh tests/examples/firmware.sh bits figures
    seldom 0 firmware_power sh tests/examples/firmware.sh power careless
    seldom 6 checkpoint sh tests/examples/checkpoint.sh crash damage
    seldom 2 checkpoint_more sh tests/examples/checkpoint.sh files machines
    seldom 8 lockstep sh tests/examples/lockstep.sh
    with "training on several ranks of MPI" "mpicc mpirun" && seldom 2 zero1 sh tests/examples/zero1.sh
    tools=$(sh docs/playground/run.sh lacks)
    with "the playground in a browser" "$tools" test -z "$tools" && seldom 0 web sh docs/playground/run.sh test
    part docs sh tests/examples/docs.sh
    part recipes sh tests/examples/recipes.sh
    with "the API reference" python3 && part api python3 tests/repo/api.py --check
    with "the freeze of the interface" "python3 gcc" && part freeze python3 tests/repo/freeze.py
    [ -d build/python/clang_format ] || have clang-format-19 || lacks "the format of the C files" clang-format-19
    with "names, banners and format" python3 && part style python3 tests/repo/style.py
    seldom 8 demo sh tests/examples/demo.sh
    part selftest sh tests/bits/selftest.sh build/tests/native.plain.o
    seldom 5 selftest sh tests/bits/selftest.sh # in its place
    part setup sh tests/repo/setup.sh
    part usage sh tests/repo/usage.sh
    part figures sh tests/repo/figures.sh
    build theorem1 $CC -O2 -DKOPT_IMPLEMENTED_ bench/theorem1.c build/tests/native.plain.o -lm
    part theorem1 build/tests/theorem1 test
    imports() { PYTHONPATH=build/python /usr/bin/python3 -c "import $1"; } # the system's own, and what setup adds
    optimi() { [ -d build/python/optimi ] && imports "$1"; }
    with "the rules compared with PyTorch and optimi" "python3-torch or torch-optimi" optimi 'torch, packaging' &&
        part peers /usr/bin/python3 tests/examples/peers.py $CC
    if with "the bindings for Python" python3; then
        library_job
        part bindings "${python:-python3}" tests/examples/bindings.py build/tests/python
    fi
    with "the wheel for Python" "python3-pip, python3-torch, mypy or twine" imports 'pip, torch, mypy, twine' &&
        seldom 9 wheel env "CC=$CC -DKAHAN_OPT_NO_SIMD" "NVCC=$NVCC" \
            /usr/bin/python3 tests/examples/wheel.py build/tests/dist
    if with "the optimizers for PyTorch" python3-torch imports torch; then
        part torch /usr/bin/python3 tests/examples/test_torch.py build/tests/python
        part torch_optim /usr/bin/python3 tests/examples/test_torch_optim.py build/tests/python
        part torch_many /usr/bin/python3 tests/examples/test_torch_many.py build/tests/python
    fi
    with "the converters" "python3-torch, torch-optimi or safetensors" optimi 'torch, safetensors' &&
        part convert_formats /usr/bin/python3 tests/examples/test_convert_formats.py build/tests/python
    with "the evidence with small settings" "python3-torch, python3-sklearn or python3-matplotlib" \
        imports 'torch, sklearn, matplotlib' &&
        { turn 12 || changed tests/examples/fidelity.sh bench/fidelity.py bench/finetuning.py bench/scale.py \
            bench/tasks.py; } &&
        part fidelity sh tests/examples/fidelity.sh
    run_jobs
    prove_all
}

run_tests "$@"
