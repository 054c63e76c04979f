# What tests/robust/mutants.sh does for kahan_opt_cuda.cuh: its PTX runs on the CPU (ptx.py, cuda_fake.c). There is a
# kernel of each kind of step; the last of them takes the tensors of the others.
# shellcheck shell=sh disable=SC2086,SC2154
steps='X(1, 1, 2, 0) X(1, 3, 4, 0) X(1, 4, 2, 0) X(1, 1, 5, 0) X(2, 2, 1, 0) X(1, 1, 2, 1) X(0, 0, 0, 1) X(1, 3, 1, 1)
    X(1, 1, 2, 2) X(0, 0, 0, 2) X(1, 3, 1, 2) X(1, 1, 9, 3) X(2, 2, 9, 3) X(1, 0, 9, 3) X(0, 3, 9, 3) X(1, 3, 9, 3)
    X(1, 3, 9, 4)'

run() { # run PROGRAM: its tests, to the first that fails
    [ -z "${KOPT_REACHED:-}" ] || cut -f 1 $out/mutants >"$KOPT_REACHED" # each program may kill each
    (ulimit -t 60; stdbuf -oL $out/$1 20) | awk '
        { print }
        /^not ok|^Bail out!/ { exit 1 }
        /^1\.\./ { done = 1 }
        END { if (!done) exit 1 }'
}

object() { gcc -std=gnu99 -w -O1 -ffp-contract=off -Itests/gpu "$@"; } # object FLAG...

build() { # builds all programs once
    [ -n "${NVCC:-}" ] || { echo "1..0 # SKIP these mutants need nvcc"; exit; }
    root=$(dirname "$(dirname "$(command -v $NVCC)")")
    rm -rf $out
    mkdir -p $out/keep
    python3 tests/gpu/cuda_mutants.py kahan_opt_cuda.cuh $out $listed || exit 1
    cp -r tests kahan_opt.h $out
    sed -i "s/KOPT_CUDA_KERNELS_ = [0-9]*/KOPT_CUDA_KERNELS_ = $(echo "$steps" | grep -o X | wc -l)/" \
        $out/kahan_opt_cuda.cuh
    {
        echo "#define KOPT_CUDA_STEPS_(X) $(echo $steps)"
        echo '#define KAHAN_OPT_CUDA_IMPLEMENTATION'
        echo '#include "kahan_opt_cuda.cuh"'
    } >$out/few.cu
    $NVCC -I$out -O3 -Xcompiler -w,-fno-threadsafe-statics -gencode arch=compute_75,code=compute_75 \
        --keep --keep-dir $out/keep -c -o $out/few.o $out/few.cu || exit 1
    python3 tests/gpu/ptx.py $out/keep/few.ptx $out/half.1.c $out/half.2.c || exit 1
    for half in 1 2; do # each has the variable that chooses
        cat >>$out/half.$half.c <<'TEXT'
#include <stdlib.h>
__attribute__((constructor)) static void choose(void)
{
    const char *const number = getenv("KOPT_MUTANT");
    v_kopt_mutant_[0] = number ? (uint32_t)atoi(number) : 0;
}
__attribute__((weak)) void __cudaRegisterVar(void) {}
TEXT
    done
    object -c -o $out/half.1.o $out/half.1.c &
    object -c -o $out/half.2.o $out/half.2.c
    wait $! || exit 1
    printf '%s\n' cuda cuda_state >$out/programs
    while read -r name; do
        object -DPTX_ON_CPU -isystem "$root/include" -o $out/$name $out/tests/gpu/$name.c $out/tests/gpu/cuda_fake.c \
            $out/few.o $out/half.1.o $out/half.2.o -lm || exit 1
    done <$out/programs
}
