# Checks kahan_opt_cuda.cuh with nvcc. Without a GPU: it compiles for every architecture within the limits of registers,
# no flag changes the PTX, C links with the object, every function returns a result code, and cuda.c runs the PTX
# on the CPU. With a GPU it runs there, too. Prints TAP. With the argument "quick": one architecture instead of all,
# fewer lists. Part of it runs by turns.
out=build/tests/cuda_nvcc
rm -rf $out/keep
mkdir -p $out/keep
nvcc=${NVCC:-nvcc}
. tests/tap.sh
known=$($nvcc --list-gpu-arch)
all=
for arch in 75 80 86 87 89 90 100 103 110 120; do
    case "$known" in *compute_$arch*) all="$all $arch" ;; esac
done
root=$(dirname "$(dirname "$(command -v $nvcc)")")
root=$(readlink -f "$root")
ptxas=$root/bin/ptxas
[ -x "$ptxas" ] || ptxas=ptxas
quick=
if [ "${1:-}" = quick ]; then
    quick=yes all=90
    ! turn 2 || all=120
fi
all=$(echo $all)
{ # "#define KAHAN_OPT_CUDA_IMPLEMENTATION" and the include
    sed -n '/^#define KAHAN_OPT_CUDA_IMPL/,/^```/p' docs/gpu.md | sed '/^```/d' # the file of the documentation
    echo '#include "kahan_opt_cuda.cuh"'
} >$out/plain.cu
printf '#define KAHAN_OPT_VMATH\n#include "plain.cu"\n' >$out/vmath.cu
printf '#define KAHAN_OPT_IMPLEMENTATION\n#include "kahan_opt.h"\n' >$out/host.c

# 1. One object for all architectures; registers, stack and spills of every kernel that steps. Quick: from one PTX,
# because nothing here is specific to an architecture; it is kept for what follows.
object() { # object NAME ARCHITECTURES
    name=$1 archs=$2 codes=${quick:+--keep --keep-dir $out/keep}
    for arch in $archs; do
        virtual=$arch
        [ -z "$quick" ] || virtual=75
        codes="$codes -gencode arch=compute_$virtual,code=sm_$arch"
    done
    $nvcc -I. -O3 -Werror all-warnings --threads 2 -Xptxas -v -Xcompiler -fno-threadsafe-statics $codes \
        -c $out/$name.cu \
        -o $out/$name.o >$out/log 2>&1
    report $? "$name: compiles without a warning for sm_$(echo $archs | sed 's/ /, sm_/g')"
    cp $out/log $out/$name.ptxas
    # step_kernel_<weight, moment, rounding, how>: formats are 0 to 4 (fp32, bf16, fp16, 8 bits, bf16 and 8 bits), how
    # is 0 (Adam), 1 (one), 2 (more), 3 (any) or 4 (mixed)
    awk '
        /Compiling entry function/ { split($0, part, "'"'"'"); name = part[2]; arch = part[4] }
        /bytes stack frame/ { stack = $1; spill = $5 }
        /Used [0-9]+ registers/ {
            for (i = 1; i < NF; i++) if ($i == "Used") registers = $(i + 1)
            seen++
            usual = name ~ /step_kernel_.*ELi[01]EEv/
            any = name ~ /step_kernel_.*ELi[34]EEv/
            # of kernels that process elements, those of rare steps may spill a little, and that which measures
            # StableAdamW some values of a round
            most = any ? 160 : name ~ /measure_kernel/ ? 80 : 0
            if (name !~ /prologue|setting|factor/ && (stack > most || spill > most))
                print arch, name, "stack", stack, "spills", spill
            limit = 128
            if (usual) limit = name ~ /_ILi2ELi0E/ ? 96 : 80
            if (name ~ /step_kernel_ILi[01]ELi[34]E/) limit = name ~ /ELi0EEv/ ? 96 : 128
            if (registers > limit) print arch, name, "registers", registers
            if (name ~ /step_kernel_ILi1ELi1ELi2ELi0E/) hot++
        }
        END { print seen + 0, hot + 0 >"/dev/stderr" }' $out/$name.ptxas >$out/log 2>$out/seen
    test ! -s $out/log && [ "$(awk '{print $2}' $out/seen)" = "$(echo $archs | wc -w)" ]
    status=$? kernels=$(awk '{print $1}' $out/seen)
    what="$name: registers, spills and stack frames are within limits"
    report $status "$what ($kernels kernels looked at)"
}
object plain "$all"
if [ -z "$quick" ]; then
    object vmath "$all"
else # quick: PTX only
    $nvcc -I. -O3 -Werror all-warnings -Xcompiler -fno-threadsafe-statics -gencode arch=compute_75,code=compute_75 \
        --keep --keep-dir $out/keep -c $out/vmath.cu -o $out/vmath.o >$out/log 2>&1
    report $? "vmath: compiles without a warning"
fi

# 2. PTX: no flag changes it; no flushing, no approximation, no fused or contractible operation.
ptx() { # ptx SOURCE NAME FLAGS...
    source=$1 name=$2
    shift 2
    if [ $# = 0 ] && [ -s $out/keep/$source.ptx ]; then
        cp $out/keep/$source.ptx $out/$name.full
    else
        $nvcc -I. -arch=compute_75 -ptx "$@" -o $out/$name.full $out/$source.cu >$out/log 2>&1 || return 1
    fi
    sed '/^\/\//d' $out/$name.full >$out/$name.ptx
}
for source in plain vmath; do
    ptx $source $source
    report $? "$source: PTX"
    for flags in "--use_fast_math" "-fmad=false" "-ftz=true -prec-div=false -prec-sqrt=false -fmad=true"; do
        # the first flag implies the last one; vmath contains all of plain
        case "$quick$flags$source" in yes-f* | yes--f* | yes-*plain) continue ;; esac
        turn 2 || continue
        ptx $source other $flags && cmp $out/$source.ptx $out/other.ptx >$out/log 2>&1
        report $? "$source: the same PTX with $flags"
    done
    # what a step stores is +0 below 2^-126: an addition of 0 that flushes
    grep -nE '\.ftz|\.approx|\.full\.|fma\.|mad\.(rn\.)?f|ex2|lg2|rcp\.|rsqrt|\.sat' $out/$source.ptx |
        grep -vE 'add\.rn\.ftz\.f32 %r[0-9]+, %r[0-9]+, 0f00000000;' >$out/log
    ! test -s $out/log
    report $? "$source: PTX: nothing is flushed but what is stored, and nothing approximated or fused"
    grep -nE '^[[:space:]]*(@%p[0-9]+ )?(add|sub|mul|div|sqrt)\.(f32|f64)' $out/$source.ptx >$out/log
    ! test -s $out/log
    report $? "$source: PTX: every + - * / and square root names its rounding"
done
for operation in add.rn.f32 sub.rn.f32 mul.rn.f32 div.rn.f32 sqrt.rn.f32 div.rn.f64 \
    ld.global.v4.u32 st.global.v4.u32; do
    grep -q "$operation" $out/plain.ptx || echo "$operation is missing" >>$out/log
done
! test -s $out/log
report $? "PTX: has the operations that these checks look for"
hot=kopt_cuda_step_kernel_ILi1ELi1ELi2ELi0E # AdamW, KAHAN, all in bf16
sed -n "/entry.*$hot/,/^}/p" $out/plain.ptx >$out/hot.ptx
awk '/\.rn\.f32/ { run = 0 } /ld.global.v4.u32/ { if (++run > most) most = run } END { exit most < 5 }' $out/hot.ptx
report $? "PTX: an octet's loads, of five arrays, are issued before any is used"

# Other compilers and ways to compile: clang, relocatable code, C++17 and C++20 give no warning; -G is refused.
: >$out/texture_fetch_functions.h # CUDA 13 has none, and clang 19 includes it
clang=
for name in clang clang-19 clang-20; do
    if [ -z "$clang" ] && command -v $name >/dev/null && echo '__global__ void f() {}' >$out/clang.cu &&
        $name -x cuda -fsyntax-only --cuda-path="$root" --cuda-gpu-arch=sm_90 -I$out -Wno-unknown-cuda-version \
            $out/clang.cu >/dev/null 2>&1; then clang=$name; fi
done
if [ -z "$clang" ]; then missing "no clang that compiles CUDA"; else
    for source in plain vmath; do
        turn 2 || continue
        $clang -x cuda -fsyntax-only --cuda-path="$root" --cuda-gpu-arch=sm_90 -I. -I$out -Wno-unknown-cuda-version \
            $everything -Wno-c++98-compat -Wno-c++98-compat-pedantic $out/$source.cu >$out/log 2>&1
        report $? "$source: $clang accepts it as CUDA, for the GPU and the host, without any warning"
    done
fi
{ # one kernel of each kind is enough for what only the front end sees
    echo '#define KOPT_CUDA_STEPS_(X) X(1, 1, 2, 0) X(1, 3, 2, 1) X(1, 3, 2, 2) X(0, 2, -1, 3) X(1, 3, -1, 4)'
    cat $out/plain.cu
} >$out/few.cu
# The strict lists of the host's compiler. nvcc's headers and what it makes of device functions warn, too: only what is
# said of our files counts, and not that nvcc writes line directives like gcc.
strict() { # strict COMPILER LIST
    $nvcc -I. -arch=compute_75 -DKAHAN_OPT_VMATH -ccbin $1 -Xcompiler "$(echo $2 -Wno-error | tr ' ' ,)" -c \
        -o $out/few.o $out/few.cu >$out/all 2>&1
    status=$?
    grep -E 'kahan_opt(_cuda)?\.c?uh?h?:[0-9:]+ (warning|error)' $out/all >$out/ours
    grep -v 'line directive\|-gnu-line-marker' $out/ours >$out/log
    [ $status = 0 ] && ! test -s $out/log && grep -q kahan_opt_cuda.cuh $out/ours
    report $? "the strict list of $1, through nvcc"
}
! command -v g++ >/dev/null || ! turn 2 || strict g++ "$gcc_cpp"
[ -z "$clang" ] || ! turn 2 || strict $clang "$everything -Wno-c++98-compat -Wno-c++98-compat-pedantic -Wno-comma
    -Wno-unreachable-code -Wno-unused-function -Wno-unused-template -Wno-missing-noreturn -Wno-reserved-identifier"
more() { # more N FLAG...: with N more scalars, one does not fit into what kernels load: it must not compile
    sed "s/^    vf32_ slow_scale;/    vf32_ more[$1]; &/" kahan_opt.h >$out/more.h
    shift
    $nvcc -I. -I$out -DKAHAN_OPT_SELF='"more.h"' "$@" -arch=compute_75 -ptx -o $out/more.ptx $out/few.cu >$out/log 2>&1
    [ $? != 0 ] && grep -q "kahan_opt_cuda.cuh($(sed -n /kopt_cuda_scalars_fit_/= kahan_opt_cuda.cuh)): error" $out/log
    report $? "scalars that kernels do not load: refused by the compiler $*"
}
! turn 2 || more 3
! turn 2 || more 1 -DKAHAN_OPT_VMATH
for flags in -std=c++17 "-std=c++20 -rdc=true"; do
    turn 2 || continue
    $nvcc -I. $flags -O3 -Werror all-warnings -arch=compute_75 -c -o $out/few.o $out/few.cu >$out/log 2>&1
    report $? "compiles with $flags"
done
$nvcc -I. -G -arch=sm_90 -ptx -o $out/other.full $out/plain.cu >$out/log 2>&1
[ $? != 0 ] && grep -q 'use -lineinfo' $out/log
report $? "nvcc -G is refused, in words"

# 3. C links with the object and needs no C++ library; without a GPU every function returns a result code. All programs
# in C share the implementation for the host: $out/host.plain.o, or host.vmath.o.
{
    ${CC:-cc} -std=c99 -O2 -I. -c -o $out/host.plain.o $out/host.c &&
        ${CC:-cc} -std=c99 -O2 -DKAHAN_OPT_VMATH -I. -c -o $out/host.vmath.o $out/host.c
} >$out/log 2>&1
report $? "the implementation for the host"
in_c() { ${CC:-cc} -std=c99 -O2 -DKOPT_IMPLEMENTED_ -isystem "$root/include" "$@"; } # in_c FLAG... SOURCE
linked() { "$@" "-L$root/lib64" "-L$root/lib" -lcudart_static -ldl -lrt -lpthread -lm; } # linked COMPILER WORD...
nm -u $out/plain.o | grep -E '__cxa|_ZSt|_Znw|_Zdl|__gxx' >$out/log
! test -s $out/log
report $? "the object needs no C++ library"
nm -g --defined-only $out/plain.o $out/vmath.o | awk 'NF == 3 { print $3 }' | grep -v '^kopt_cuda_' >$out/log
! test -s $out/log
report $? "every exported symbol begins with kopt_cuda_"
linked in_c -Wall -Wextra -Wpedantic -Werror -o $out/use_c tests/gpu/cuda_use.c $out/plain.o $out/host.plain.o \
    >$out/log 2>&1
report $? "C links with it"
$out/use_c >$out/log 2>&1
report $? "C: codes, and the program's own CUDA error stays: $(head -1 $out/log)"

# The listings of the documentation: what they print compiles and links, here with a few of the kernels.
fragment() { awk -v part="$1" '/^```c$/ { text = ""; c = 1; next } /^```$/ { if (text ~ part) printf "%s", text; c = 0 }
    c { text = text $0 "\n" }' docs/gpu.md; } # fragment PATTERN: the block of C that has it
listing() { # listing N FUNCTION CALL: the N-th commands that begin with nvcc, for a program with a function of the page
    mkdir -p $out/listing$1
    cp kahan_opt.h kahan_opt_cuda.cuh $out/listing$1
    cp $out/few.cu $out/listing$1/kahan_gpu.cu
    { echo '#define KAHAN_OPT_IMPLEMENTATION' && fragment "$2" && echo "int main(void) { return (int)$3; }"; } \
        >$out/listing$1/train.c
    awk -v n=$1 '/^    nvcc / { k++; inside = 1 } !/^    / { inside = 0 } inside && k == n' docs/gpu.md >$out/commands
    (PATH="$root/bin:$PATH" CPATH="$root/include" LIBRARY_PATH="$root/lib64:$root/lib" && cd $out/listing$1 &&
        export PATH CPATH LIBRARY_PATH && sh -ex ../commands) >$out/log 2>&1 && [ -s $out/listing$1/a.out ]
    report $? "docs/gpu.md: its commands, number $1: the program links"
}
listing 1 'kopt_result begin' 'begin(NULL, NULL, NULL, NULL, 0, NULL)'
listing 2 'kopt_cuda_use_ptx' 'use_gpu(NULL, 0)'

# Where KAHAN_OPT_STATIC and KAHAN_OPT_API apply, and in which order the files are included.
unit() { printf '#define %s\n' "$@" | sed 's/=/ /; s/^#define #/#/'; } # unit LINE...: macros NAME=VALUE, or #include
few=$(sed -n 's/^#define \(KOPT_CUDA_STEPS_.*\)/\1/p' $out/few.cu)
header='#include "kahan_opt.h"' companion='#include "kahan_opt_cuda.cuh"'
exported='KAHAN_OPT_API=__attribute__((visibility("default")))'
unit "$few" "$exported" KAHAN_OPT_CUDA_IMPLEMENTATION "$companion" >$out/exports.cu
unit "$exported" "$companion" >$out/client.cpp
echo 'int main() { return kopt_cuda_plan_step(nullptr, nullptr) != KOPT_ERROR_NULL; }' >>$out/client.cpp
library() { # a C++ client of a shared library that hides all but KAHAN_OPT_API
    $nvcc -I. -Werror all-warnings -Xcompiler -fno-threadsafe-statics,-fPIC,-fvisibility=hidden -arch=compute_75 \
        -c -o $out/exports.o $out/exports.cu && linked ${CC:-cc} -shared -o $out/libexports.so $out/exports.o &&
        nm -D --defined-only $out/libexports.so | grep -q ' T kopt_cuda_plan_step$' &&
        ${CC:-cc} -x c++ -Wall -Wextra -Werror -I. -c -o $out/client.o $out/client.cpp &&
        ${CC:-cc} -o $out/client $out/client.o $out/libexports.so && LD_LIBRARY_PATH=$out $out/client
}
library >$out/log 2>&1
report $? "KAHAN_OPT_API: a shared library exports the functions, and C++ calls them"
unit KAHAN_OPT_STATIC KAHAN_OPT_IMPLEMENTATION "$header" "$companion" >$out/private.c
${CC:-cc} -std=c99 -Wall -Wextra -Werror -I. -c -o $out/private.o $out/private.c >$out/log 2>&1
report $? "KAHAN_OPT_STATIC beside the declarations: no warning"
unit "$few" KAHAN_OPT_STATIC KAHAN_OPT_CUDA_IMPLEMENTATION "$companion" >$out/private.cu
$nvcc -I. -Werror all-warnings -Xcompiler -Wall,-Werror -arch=compute_75 -c -o $out/private.o \
    $out/private.cu >$out/log 2>&1
report $? "KAHAN_OPT_STATIC beside the implementation: no warning"
for first in "KAHAN_OPT_IMPLEMENTATION;$header" "$header" "$companion"; do
    unit "$few" >$out/late.cu
    (IFS=';' && unit $first KAHAN_OPT_CUDA_IMPLEMENTATION "$companion") >>$out/late.cu
    ${CC:-cc} -x c++ -std=c++14 -I. -fsyntax-only $out/late.cu >$out/log 2>&1
    [ "$(grep -c error: $out/log)" = 1 ] && grep -q 'before the first include of kahan_opt.h or' $out/log
    report $? "the implementation after $first: one error, in words"
done

# 4. The GPU's tests and the bench compile; the tests run if there is a GPU.
linked in_c -DKAHAN_OPT_VMATH -o $out/gpu tests/gpu/cuda.c $out/vmath.o $out/host.vmath.o >$out/log 2>&1
report $? "the tests for a GPU compile"
linked in_c -DGPU -DKAHAN_OPT_VMATH -o $out/bench bench/cuda.c $out/vmath.o $out/host.vmath.o >$out/log 2>&1
report $? "the bench for a GPU compiles"
$out/gpu >$out/gpu.log 2>&1
status=$?
if grep -q '^1..0 # SKIP' $out/gpu.log; then
    missing "$(sed -n 's/^1..0 # SKIP //p' $out/gpu.log)"
else
    cp $out/gpu.log $out/log
    ! grep -q '^not ok\|^Bail' $out/log && [ $status = 0 ]
    report $? "on the GPU: $(grep -c '^ok' $out/gpu.log) tests"
    if command -v compute-sanitizer >/dev/null; then # one call of the tests fails on purpose
        compute-sanitizer --error-exitcode 9 --report-api-errors no $out/gpu 20 >$out/log 2>&1
        report $? "on the GPU under compute-sanitizer"
    fi
fi

# 5. The same PTX on the CPU: see ptx.py and cuda_fake.c. The same tests run, on every machine with nvcc.
echo '#include <ucontext.h>
_Float16 half; __int128 wide; ucontext_t context;' >$out/probe.c
if ! command -v python3 >/dev/null || ! ${CC:-cc} -c -o $out/probe.o $out/probe.c 2>$out/log; then
    missing "the PTX on the CPU needs Python and a compiler with _Float16, __int128 and ucontext.h"
    echo "1..$count"
    exit
fi
level=-O1
[ -z "$quick" ] || level=-O0 # it compiles in less time than the tests then take longer
from_c() { ${CC:-cc} -std=gnu99 -w $level -fPIC -ffp-contract=off -Itests/gpu -c -o "$1.o" "$1.c"; } # from_c NAME
on_cpu() { # on_cpu SOURCE LISTS: runs the tests with the kernels of $out/SOURCE.ptx
    on=$1 lists=$2 halves=$out/$1
    define=
    [ $on = plain ] || define=-DKAHAN_OPT_VMATH
    {
        python3 tests/gpu/ptx.py $out/$on.ptx $halves.1.c $halves.2.c &&
            in_c -DPTX_ON_CPU $define -c -o $out/$on.test.o tests/gpu/cuda.c && {
            from_c $halves.1 &
            from_c $halves.2 && wait $!
        } && ${CC:-cc} -o $out/$on.cpu $out/$on.test.o $out/host.$on.o $out/$on.o $halves.1.o $halves.2.o $out/fake.o \
            -lm
    } >$out/log 2>&1
    report $? "$on: the PTX becomes C, each instruction a statement"
    $out/$on.cpu $lists >$out/log 2>&1
    status=$?
    grep -q '^1\.\.' $out/log && ! grep -q '^not ok\|^Bail' $out/log && [ $status = 0 ]
    report $? "$on: on the CPU: $(grep -c '^ok' $out/log) tests; $(sed -n 's/^ok 2 - //p' $out/log)"
}
${CC:-cc} -std=gnu99 -O2 -fPIC -c -o $out/fake.o tests/gpu/cuda_fake.c
if [ -n "$quick" ]; then many=100 some=50; else many=1000 some=400; fi
on_cpu plain $many
! turn 4 || on_cpu vmath $some

on_fake="$out/host.plain.o $out/fake.o -lm"          # what a program in C is linked with,
on_plain="$out/plain.o $out/plain.1.o $out/plain.2.o" # if it launches kernels
in_c -o $out/state tests/gpu/cuda_state.c $on_plain $on_fake >$out/log 2>&1 &&
    $out/state $many >$out/log 2>&1 && grep -q '^1\.\.' $out/log && ! grep -q '^not ok' $out/log
report $? "on the CPU: state blocks, $(grep -c '^ok' $out/log) tests"

# What the documentation prints for a plan that exists, after a call that has stopped it: it goes on.
{
    echo '#define KAHAN_OPT_IMPLEMENTATION' && fragment 'kopt_result begin' && cat <<'TEXT' &&
int main(void) {
    enum { N = 100 };
    kopt_optimizer opt = kopt_sgd(0.01, 0.9);
    void *weight, *grad, *state, *device;
    unsigned char bytes[20000];
    kopt_tensor t = kopt_tensor_of(NULL, KOPT_F32, NULL, KOPT_F32, N, NULL, 0);
    const kopt_cuda_group group = {&opt, &t, 1};
    kopt_cuda_plan plan;
    kopt_cuda_status status;
    uint32_t steps;
    cudaStream_t stream;
    t.state_size = kopt_state_size(&opt, &t);
    cudaStreamCreate(&stream);
    cudaMalloc(&weight, 4 * N), cudaMalloc(&grad, 4 * N), cudaMalloc(&state, t.state_size), cudaMalloc(&device, 20000);
    cudaMemsetAsync(weight, 0, 4 * N, stream), cudaMemsetAsync(grad, 0, 4 * N, stream);
    t.weight = weight, t.grad = grad, t.state = state;
    if (begin(&plan, &group, bytes + (16 - (uintptr_t)bytes % 16), device, 19000, stream) != KOPT_OK) return 1;
    if (kopt_cuda_plan_set_optimizer(&plan, 9, &opt, stream) != KOPT_ERROR_BOUNDS) return 2;
    opt.step = 5;
    {
TEXT
        fragment plan_set_step && cat <<'TEXT'
        if (result != KOPT_OK || kopt_cuda_plan_step(&plan, stream) != KOPT_OK) return 3;
    }
    cudaMemcpyAsync(&status, kopt_cuda_plan_status(&plan), sizeof status, cudaMemcpyDeviceToHost, stream);
    cudaMemcpyAsync(&steps, kopt_cuda_plan_steps(&plan, 0), 4, cudaMemcpyDeviceToHost, stream);
    cudaStreamSynchronize(stream);
    return status.result != KOPT_OK || status.steps != 1 || steps != 6 ? 4 : 0;
}
TEXT
} >$out/recovery.c
in_c -I. -o $out/recovery $out/recovery.c $on_plain $on_fake >$out/log 2>&1 && $out/recovery >>$out/log 2>&1
report $? "on the CPU: docs/gpu.md: a stopped plan goes on after a load"

# The driver in place of the runtime: the same file, by a compiler that knows no kernels, takes them from the PTX, in
# one text or, as the package for Python has it, in one for each kernel.
without_nvcc() { # without_nvcc COMPILER FLAG...: the object for the host
    "$@" -x c++ $cxx_warnings -I. -c -o $out/driver.o $out/plain.cu >$out/log 2>&1 && ! nm -u $out/driver.o | grep cuda
    report $? "without nvcc: $* accepts it without a warning"
}
! turn 2 || {
    without_nvcc ${CC:-cc} -std=c++14 -O2
    [ -z "$clang" ] || without_nvcc $clang -std=c++20 -O2
    {
        mkdir -p $out/lib && ${CC:-cc} -shared -Wl,-soname,libcuda.so.1 -o $out/lib/libcuda.so.1 $out/plain.1.o \
            $out/plain.2.o $out/fake.o -lm &&
            in_c -DPTX_ON_CPU -DPTX_DRIVER -o $out/driver tests/gpu/cuda.c $out/host.plain.o $out/driver.o \
                $out/lib/libcuda.so.1 -ldl -lm
    } >$out/log 2>&1
    report $? "without nvcc: C links with it"
    { cat $out/plain.ptx && printf '\0'; } >$out/plain.text
    python3 -c 'import sys; sys.path.insert(0, "docs/examples/python"); sys.dont_write_bytecode = True
import backend; open(sys.argv[2], "wb").write(backend.texts(open(sys.argv[1]).read()))' $out/plain.full $out/plain.texts
    for texts in text texts; do
        turn 2 || continue
        LD_LIBRARY_PATH=$out/lib PTX_TEXTS=$out/plain.$texts $out/driver 10 >$out/log 2>&1
        status=$?
        grep -q '^1\.\.' $out/log && ! grep -q '^not ok\|^Bail' $out/log && [ $status = 0 ]
        report $? "on the CPU, by the driver: $(grep -c '^ok' $out/log) tests; $(sed -n 's/^ok 1 - //p' $out/log)"
    done
    tr '\0' '\n' <$out/plain.texts | awk '/^\.(version|target|address)/ && seen[$0]++ { next } 1' >$out/oldest.ptx
    $ptxas -arch=sm_75 -o $out/oldest.cubin $out/oldest.ptx >$out/log 2>&1
    report $? "ptxas takes the texts as PTX of $(sed -n '/^\.version/ { s/.//p; q; }' $out/oldest.ptx)"
}

exchanged() { # a mistake that must be seen: two registers of a load of 16 bytes. 100 lists have no such load
    python3 tests/gpu/ptx.py --only $hot --swap $hot $out/plain.ptx $out/swapped.c &&
        from_c $out/swapped &&
        ${CC:-cc} -o $out/swapped $out/plain.test.o $on_plain $out/swapped.o $on_fake
}
! turn 4 || {
    exchanged >$out/log 2>&1 && ! $out/swapped 400 >$out/log 2>&1 && grep -q '^not ok 1 ' $out/log
    report $? "on the CPU: two registers of one wide load exchanged are seen"
}

offload() { # offload SOURCE: docs/examples/offload.c, or it with a mistake
    in_c $warnings -I. -o $out/offload "$1" $on_fake >$out/log 2>&1 && $out/offload 10007 1024 >>$out/log
}
offload docs/examples/offload.c && $out/offload 500 1024 >>$out/log
report $? "on the CPU: the example offload has the bits of a step of the whole"
sed 's/check(cudaStreamSynchronize(o->streams.i % 2.).*/;/; s/"..\/..\/kahan_opt.h"/"kahan_opt.h"/' \
    docs/examples/offload.c >$out/offload_wrong.c
! offload $out/offload_wrong.c && grep -q 'bits are not' $out/log
report $? "... and not if it does not wait for the gradients"

# 6. Instructions for each element, within limits.
version=$($nvcc --version | sed -n 's/.*release [^,]*, /nvcc /p')
in_c -o $out/budget tests/gpu/cuda_budget.c $on_plain $on_fake >$out/log 2>&1 &&
    PTX_PROFILE=$out/profile $out/budget "$version" >$out/log 2>&1
status=$?
sed -n '/^# /p; s/^\(not ok\|ok\) [0-9]* - /#     /p' $out/log
grep '^not ok' $out/log >$out/over
mv $out/over $out/log
[ $status = 0 ] && ! test -s $out/log
report $? "PTX instructions are within the limits of tests/gpu/cuda_budget.c"

# 7. The same in SASS: what ptxas makes of each executed line of PTX.
for nvdisasm in nvdisasm "$root/bin/nvdisasm" build/nvdisasm/nvidia/cu13/bin/nvdisasm; do
    ! command -v "$nvdisasm" >/dev/null || break
done
if ! command -v "$nvdisasm" >/dev/null; then missing "no nvdisasm; ./build.sh setup installs it"; else
    $ptxas -arch=sm_90 -lineinfo -o $out/sass.cubin $out/plain.ptx >$out/log 2>&1 &&
        "$nvdisasm" -gp -c $out/sass.cubin >$out/sass 2>$out/log &&
        python3 tests/gpu/sass.py $out/profile $out/sass tests/gpu/cuda_sass.txt >$out/log
    status=$?
    [ $status != 0 ] || sed 's/^ok [0-9]* - /#     /; /^1\.\./d' $out/log
    report $status "SASS instructions of sm_90 are within the limits of tests/gpu/cuda_sass.txt"
fi
echo "1..$count"
