#!/bin/sh
# The door of kahan_opt: `./build.sh help` says what is behind it. Each command needs a C compiler (CC, default cc) and
# uses other tools if they are installed; `./build.sh setup` installs them all (Debian, Ubuntu).
# tests/run.sh, tests/setup.sh and bench/run.sh are parts of this script.
#
# Only lists of words are unquoted: CC and NVCC ("gcc -m32", "ccache gcc"), flags, sources, objects and packages.
# shellcheck disable=SC2086
set -eu
cd "$(dirname "$0")"
CC=${CC:-cc}

usage() {
    cat <<'TEXT'
usage: ./build.sh demo [--fp16] [FILE]     train a byte language model on FILE
       ./build.sh demo --precision P       ... P: amp_bf16 amp_fp16 bf16 fp16 all
       ./build.sh demo --rule adam_atan2   ... by Adam-atan2, beside AdamW
       ./build.sh examples [NAME [...]]    lists docs/examples; builds and runs one
       ./build.sh python [cuda]            the package for Python: build/python
       ./build.sh python wheel             ... its wheel and sdist, checked: build/dist
       ./build.sh web [build]              the playground, in build/web; serves it
       ./build.sh test [--no-skip]         all parts, some by turns (a skip fails)
       ./build.sh test --all [--no-skip]   all parts, and all of each: hours
       ./build.sh test --fast              half a minute: at each change
       ./build.sh web test | picture       the playground, in headless Chromium
       ./build.sh mutants [all|share K/N]  mistakes in the header: each is seen?
       ./build.sh mutants cuda             those in kahan_opt_cuda.cuh, with nvcc
       ./build.sh cuda [bench [COMMIT]]    the GPU part: its tests; its speed
       ./build.sh cuda day [--part N]      all on a GPU: 25 minutes (0: 90 s)
       ./build.sh bench [WORD...]          the bits, then the memory roofline
       ./build.sh bench help               ... and what else can be measured
       ./build.sh figures                  updates those of demo and theorem1 in docs
       ./build.sh figures NAME             ... bench bytes firmware stack fidelity finetuning scale tasks
       ./build.sh setup                    installs what the tests use, as root
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

# nvcc: in PATH, in its usual folder, or where setup installs it.
NVCC=${NVCC:-}
for nvcc in nvcc /usr/local/cuda/bin/nvcc build/cuda/nvidia/cu13/bin/nvcc; do
    if [ -z "$NVCC" ] && have "$nvcc"; then NVCC=$nvcc; fi
done
export NVCC CC

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
    offload)
        [ -n "$NVCC" ] || { echo "build.sh: offload needs CUDA (./build.sh setup installs nvcc)" >&2; exit 2; }
        root=$(dirname "$(dirname "$(readlink -f "$(command -v "$NVCC")")")")
        flags="-O2 -isystem $root/include" libraries="-L$root/lib64 -L$root/lib -lcudart_static -ldl -lrt -lpthread -lm"
        ;;
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
    knows python 'cuda wheel' "$@"
    [ "${1:-}" != wheel ] || exec env "CC=$CC" python3 tests/examples/wheel.py build/dist
    python_library build/python "$@"
    echo "build/python has the package for Python: PYTHONPATH=build/python python3 -c 'import kahan_opt'"
}

cuda() {
    case "${1:-}" in day) shift; exec sh tests/gpu/cuda_day.sh "$@" ;; esac # it checks its own arguments
    if [ "${1:-}" = bench ] && [ $# = 2 ]; then # beside the kernels of another commit
        git cat-file -e "$2:kahan_opt_cuda.cuh" 2>/dev/null || wrong "\`cuda\` does not know \`$2\`"
    else
        knows cuda bench "$@"
    fi
    mkdir -p build/tests
    [ -n "$NVCC" ] || { echo "SKIPPED: the GPU part (no nvcc; ./build.sh setup installs it)"; exit 0; }
    if [ $# -gt 0 ]; then . bench/run.sh && shift && bench_cuda "$@"; fi
    sh tests/gpu/cuda.sh | tee build/tests/cuda.log
    sed -n 's/^ok [0-9]* # SKIP/SKIPPED: the tests on a GPU:/p' build/tests/cuda.log
    ! grep -q '^not ok' build/tests/cuda.log
}

command=${1:-}
[ -z "$command" ] || shift
case $command in
demo | examples | python | cuda) $command "$@" ;;
test) . tests/run.sh ;;
setup) . tests/setup.sh ;;
bench) . bench/run.sh && bench "$@" ;;
mutants) exec sh tests/robust/mutants.sh "$@" ;;
web) knows web 'build test picture' "$@" && exec sh docs/playground/run.sh "$@" ;;
figures)
    knows figures 'bench bytes firmware stack fidelity finetuning bandit policy scale tasks draw' "$@"
    exec sh docs/figures.sh "$@"
    ;;
-h | --help | help) usage ;;
'') usage >&2; exit 2 ;;
*) wrong "there is no command \`$command\`" ;;
esac
