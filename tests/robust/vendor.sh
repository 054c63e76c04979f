# The header in other projects' builds: with any language, compiler, folder, file name, order of includes and other
# headers it compiles without a warning, and nothing of it leaks. Prints TAP. Arguments: the sections to run (default:
# all): warnings leaks pragmas windows targets names pairs versions. Builds that are much like others run by turns.
wanted=" ${*:-warnings leaks pragmas windows targets names pairs versions} "
out=build/tests/vendor/${1:-all}
rm -rf $out
mkdir -p $out
root=$(pwd)
. tests/tap.sh

check() { # check DESCRIPTION COMMAND...: the command succeeds and prints nothing
    what=$1
    shift
    "$@" >$out/log 2>&1 && ! grep -q . $out/log
    report $? "$what"
}
refuse() { # refuse DESCRIPTION TEXT COMMAND...: the command fails and prints the text
    what=$1 text=$2
    shift 2
    if "$@" >$out/log 2>&1; then false; else grep -q "$text" $out/log; fi
    report $? "$what"
}
have() { command -v "$1" >/dev/null 2>&1; }
section() { case "$wanted" in *" $1 "*) true ;; *) false ;; esac; }

clangs=$(have clang && echo clang)
for version in 22 21 20 19 18 17 16 15; do # the newest, in addition to the system's
    if have clang-$version; then clangs="$clangs clang-$version" && break; fi
done
clang=${clangs##* }

implement='#define KAHAN_OPT_IMPLEMENTATION\n#include "kahan_opt.h"\n'
printf "$implement" >$out/plain.c
printf "#define KAHAN_OPT_STATIC\n$implement" >$out/static.c
printf "#define KAHAN_OPT_NO_SIMD\n$implement" >$out/no_simd.c
printf '#include "kahan_opt.h"\n' >$out/declare.c
printf "#define KAHAN_OPT_VMATH\n$implement" >$out/vmath.c
# Included twice before the implementation, and twice after it, with its macro still defined.
printf "#include \"kahan_opt.h\"\n#include \"kahan_opt.h\"\n$implement#include \"kahan_opt.h\"\n$implement" \
    >$out/often.c
printf "#define KAHAN_OPT_STATIC\n#include \"kahan_opt.h\"\n$implement#include \"kahan_opt.h\"\n" >$out/often_static.c
# The public macros that take arguments, as a program calls them.
cat >$out/macros.c <<'TEXT'
#include "kahan_opt.h"
enum { N = 1000 };
extern unsigned char state[KOPT_STATE_BYTES(N, 6)];
unsigned char state[KOPT_STATE_BYTES(N, 6)];
#if defined(__cplusplus) && __cplusplus >= 201103L
constexpr size_t ROWS = 10, COLUMNS = 100;
#else
enum { ROWS = 10, COLUMNS = 100 };
#endif
extern unsigned char matrix[KOPT_STATE_BYTES(ROWS * COLUMNS, 6)];
unsigned char matrix[KOPT_STATE_BYTES(ROWS * COLUMNS, 6)];
extern kopt_bf16 weight[N], grad[N];
kopt_bf16 weight[N], grad[N];
extern float master[N], fp32_grad[N];
float master[N], fp32_grad[N];
#ifdef __cplusplus
extern "C" {
#endif
kopt_tensor whole(void);
kopt_tensor mixed(void);
kopt_tensor fp32(void);
#ifdef __cplusplus
}
#endif
kopt_tensor whole(void) { return KOPT_TENSOR(KOPT_BF16, weight, grad, N, state, sizeof state); }
kopt_tensor mixed(void) { return KOPT_TENSOR(KOPT_FP16, weight, fp32_grad, N, state, sizeof state); }
kopt_tensor fp32(void) { return KOPT_TENSOR(KOPT_F32, master, fp32_grad, N, state, sizeof state); }
TEXT

# ---- warnings --------------------------------------------------------------------------------------------------------

languages() { # languages COMPILER FLAGS STANDARDS SOURCES: no warning without optimization
    for standard in $3; do
        for source in $4; do
            turn 3 || continue
            check "$1 -std=$standard: $source" $1 -std=$standard $2 -I. -fsyntax-only $out/$source.c
        done
    done
}

if section warnings; then
    if have gcc; then
        languages gcc "$gcc_c" 'c99 c11 gnu17' 'plain'
        languages gcc "$gcc_c" 'c2x' 'plain static no_simd often often_static declare vmath'
        languages gcc '-Wall -Wextra -Werror' 'c89 gnu89' 'plain'
        ! turn 2 || check "gcc -O3: no warning that needs the optimizer" gcc -std=c99 $gcc_c -O3 -I. \
            -c $out/plain.c -o $out/gcc_O3.o
    else missing "no gcc: warnings in C"; fi
    if have g++; then
        languages 'g++ -x c++' "$gcc_cpp -Wno-long-long" 'c++98' 'plain vmath'
        languages 'g++ -x c++' "$gcc_cpp" 'c++11 c++14 c++17' 'plain'
        languages 'g++ -x c++' "$gcc_cpp" 'c++20' 'plain static no_simd often often_static declare vmath'
        ! turn 2 || check "g++ -O2: no warning that needs the optimizer" g++ -x c++ -std=c++17 $gcc_cpp -O2 -I. \
            -c $out/plain.c -o $out/g++_O2.o
    else missing "no g++: warnings in C++"; fi
    for c in $clangs; do
        languages $c "$everything" 'c99' 'plain'
        languages $c '-Wall -Wextra -Werror' 'gnu89' 'plain'
        languages $c "$everything" 'c2x' 'plain static no_simd often often_static declare vmath'
        languages "$c -x c++" "$everything" 'c++98' 'plain vmath'
        languages "$c -x c++" "$everything -Wno-c++98-compat" 'c++11 c++17' 'plain'
        languages "$c -x c++" "$everything -Wno-c++98-compat" 'c++20' 'plain static no_simd often_static declare'
        ! turn 2 || check "$c -O2" $c -std=c99 $everything -O2 -I. -c $out/plain.c -o $out/clang_O2.o
    done
    [ -n "$clangs" ] || missing "no clang: -Weverything"
    for source in plain static no_simd often often_static declare; do
        if have tcc; then check "tcc: $source" tcc -Wall -Werror -I. -c $out/$source.c -o $out/tcc.o; fi
    done
    have tcc || missing "no tcc"
    if have gcc; then
        for flags in -DNDEBUG '-O1 -D_FORTIFY_SOURCE=2' '-fshort-enums -funsigned-char' -march=x86-64-v4 \
            -pedantic-errors; do
            case "$flags" in -march*) [ "$(uname -m)" = x86_64 ] || continue ;; esac
            turn 2 || continue
            source=plain
            case "$flags" in -O*) source=no_simd ;; esac
            check "gcc $flags" gcc -std=c99 $gcc_c $flags -I. -c -fsyntax-only $out/$source.c
        done
        if [ "$(uname -m)" = x86_64 ]; then # what the flags make useless is left out
            contains() { # contains ISAS COMPILER FLAG...
                isas=$1
                shift
                "$@" -O0 -I. -c $out/plain.c -o $out/isas.o &&
                    [ "$(nm $out/isas.o | grep -oE 'step_(sse2|avx2|avx512)' | sort -u | xargs)" = "$isas" ]
            }
            check "gcc: all instruction sets" contains 'step_avx2 step_avx512 step_sse2' gcc
            check "gcc -march=haswell: without SSE2" contains 'step_avx2 step_avx512' gcc -march=haswell
            check "gcc -march=x86-64-v4: AVX-512 alone" contains step_avx512 gcc -march=x86-64-v4
            check "gcc -march=x86-64-v4 -DKAHAN_OPT_ALL_ISAS" contains 'step_avx2 step_avx512 step_sse2' \
                gcc -march=x86-64-v4 -DKAHAN_OPT_ALL_ISAS
            case $clang in clang-19 | clang-2[01])
                check "$clang -mno-evex512, which zig cc passes: all instruction sets" \
                    contains 'step_avx2 step_avx512 step_sse2' $clang -mno-evex512 -w ;;
            esac
        fi
        # Bare metal has only the compiler's own headers.
        check "gcc -ffreestanding -nostdinc" gcc -ffreestanding -nostdinc -isystem "$(gcc -print-file-name=include)" \
            $gcc_c \
            -I. -fsyntax-only $out/plain.c
    fi

    # The quick start: the indented lines from "enum" to the closing brace of train().
    {
        printf "$implement#include <stddef.h>\n"
        printf '#ifdef __cplusplus\nextern "C"\n#endif\nvoid train(const float *initial_weights, int steps);\n'
        sed -n '/^       enum { N/,/^       }$/p' kahan_opt.h
    } >$out/quick_start.c
    check "the quick start is where it should be" grep -q kopt_optimizer_step $out/quick_start.c
    head -40 kahan_opt.h >$out/beginning
    check "the quick start is in the first 40 lines" grep -q kopt_optimizer_step $out/beginning
    check "the quick start compiles as shown in C99" ${CC:-cc} -std=c99 -Wall -Wextra -Wpedantic \
        -Wconversion -Werror -I. \
        -fsyntax-only $out/quick_start.c
    if have g++; then
        check "the quick start compiles as shown in C++" g++ -x c++ $gcc_cpp -Wno-missing-declarations -Wno-shadow -I. \
            -fsyntax-only $out/quick_start.c
    fi
    # A result that is not used. Only gcc warns about (void), too.
    printf '#include "kahan_opt.h"\nvoid once(kopt_optimizer *o, kopt_tensor *t);\n' >$out/unused.c
    printf 'void once(kopt_optimizer *o, kopt_tensor *t) { kopt_optimizer_step(o, t, 1); }\n' >>$out/unused.c
    sed 's/{ kopt/{ kopt_result ignored = kopt/; s/; }/; (void)ignored; }/' $out/unused.c >$out/meant.c
    for c in 'gcc -std=c99' 'gcc -std=c2x' 'g++ -x c++ -std=c++98' 'g++ -x c++ -std=c++17' "${clangs%% *} -std=c99"; do
        if have ${c%% *}; then
            refuse "$c warns about a result that is not used" unused-result $c -Werror -I. -O0 -c \
                -o $out/unused.o $out/unused.c
            check "$c does not if a variable takes it" $c -Wall -Wextra -Werror -I. -O0 -c -o $out/unused.o $out/meant.c
        fi
    done
    have gcc && check "the macros in the user's code: gcc" gcc -std=c99 $gcc_c -I. -fsyntax-only $out/macros.c
    have g++ && check "the macros in the user's code: g++" g++ -x c++ -std=c++17 $gcc_cpp -I. \
        -fsyntax-only $out/macros.c
    for c in $clangs; do
        check "the macros in the user's code: $c" $c -x c++ -std=c++17 $everything -Wno-c++98-compat -I. \
            -fsyntax-only $out/macros.c
    done
fi

# ---- toolchains that are not installed: clang's front ends and back ends stand in for them ---------------------------

# No software development kit, so no stdlib.h, which clang's intrinsics include unless the build is freestanding.
if section windows; then
    for c in $clangs; do
        for language in C P; do
            for source in plain static no_simd often_static; do
                turn 3 || continue
                check "$c as clang-cl /W4 /WX /T$language: $source" $c --driver-mode=cl \
                    --target=x86_64-pc-windows-msvc /W4 /WX \
                    -Xclang -ffreestanding -I. /Zs /T$language $out/$source.c
            done
        done
        for arch in AVX AVX2 AVX512; do
            turn 3 || continue
            check "$c as clang-cl /O2 /arch:$arch: code for its instruction sets" $c --driver-mode=cl \
                --target=x86_64-pc-windows-msvc /W4 /WX -Xclang -ffreestanding -I. /O2 /arch:$arch \
                /c /Fo$out/windows.obj /TC $out/plain.c
        done
    done
    [ -n "$clangs" ] || missing "no clang: clang-cl"
    # The lines for Microsoft's compiler: intrinsics instead of assembly, and other pragmas.
    case $clang in clang-19 | clang-2*)
        check "$clang as clang-cl without __clang__" $clang --driver-mode=cl --target=x86_64-pc-windows-msvc \
            /U__clang__ \
            /W4 /WX -Wno-unknown-pragmas -Xclang -ffreestanding -I. /Zs /TC $out/plain.c
        # They give the bits in any environment and with /fp:fast, which -ffast-math stands in for. Built for Linux.
        mkdir -p $out/cl
        printf '#define _mm_getcsr() __builtin_ia32_stmxcsr()\n#define _mm_setcsr(x) __builtin_ia32_ldmxcsr(x)\n' \
            >$out/cl/intrin.h
        case $(uname -m) in x86_64)
            $clang -fms-extensions -U__clang__ -U__GNUC__ -D_MSC_VER=1940 -D_M_X64=100 -I$out/cl -w -O2 -ffast-math \
                -DKAHAN_OPT_NO_SIMD -o $out/cl/selftest tests/bits/selftest.c >$out/log 2>&1 &&
                $out/cl/selftest >$out/log 2>&1 && ! grep 'not tested' $out/log
            report $? "the selftest, with the lines for Microsoft's compiler" ;;
        esac
        echo 'void user(kopt_optimizer *o) { kopt_optimizer_step(o, 0, 0); }' | cat $out/declare.c - >$out/ignore.c
        refuse "... an ignored result, in C++17 with the __cplusplus of C++98" 'nodiscard' $clang --driver-mode=cl \
            --target=x86_64-pc-windows-msvc /U__clang__ /std:c++17 /D__cplusplus=199711L -Wno-builtin-macro-redefined \
            /WX -Wno-unknown-pragmas -Xclang -ffreestanding -I. /Zs /TP $out/ignore.c
        # The same lines of the GPU part: what nvcc hands to Microsoft's compiler, with a stub for CUDA's header.
        mkdir -p $out/cuda
        cat >$out/cuda/cuda_runtime.h <<'TEXT'
#pragma once
#include <stddef.h>
#define __global__
#define __device__
#define __host__
#define __shared__ static
#define __launch_bounds__(...)
#define __align__(n) __declspec(align(n))
struct dim3 {
    unsigned x, y, z;
    dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {}
};
static const dim3 threadIdx, blockIdx, blockDim, gridDim;
typedef struct CUstream_st *cudaStream_t;
enum cudaError_t {
    cudaSuccess, cudaErrorNoDevice, cudaErrorInsufficientDriver, cudaErrorSystemDriverMismatch, cudaErrorStubLibrary,
    cudaErrorInvalidDeviceFunction, cudaErrorNoKernelImageForDevice
};
struct cudaFuncAttributes { int numRegs; };
enum cudaMemcpyKind { cudaMemcpyHostToDevice = 1, cudaMemcpyDeviceToHost };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount };
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone };
cudaError_t cudaGetDevice(int *);
cudaError_t cudaDeviceGetAttribute(int *, cudaDeviceAttr, int);
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *, const void *, int, size_t);
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *, const void *);
cudaError_t cudaMemcpyAsync(void *, const void *, size_t, cudaMemcpyKind, cudaStream_t);
cudaError_t cudaMemsetAsync(void *, int, size_t, cudaStream_t);
cudaError_t cudaLaunchKernel(const void *, dim3, dim3, void **, size_t, cudaStream_t);
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus *);
unsigned atomicAdd(unsigned *, unsigned);
unsigned long long atomicAdd(unsigned long long *, unsigned long long);
unsigned __shfl_xor_sync(unsigned, unsigned, int);
unsigned __shfl_sync(unsigned, unsigned, int);
unsigned __reduce_max_sync(unsigned, unsigned);
void __syncthreads();
void __syncwarp(unsigned = ~0u);
void __threadfence();
unsigned __byte_perm(unsigned, unsigned, unsigned);
int __any_sync(unsigned, int);
int __syncthreads_or(int);
size_t __cvta_generic_to_shared(const void *);
struct uint4 { unsigned x, y, z, w; };
uint4 make_uint4(unsigned, unsigned, unsigned, unsigned);
unsigned __ballot_sync(unsigned, int);
int __clz(int);
int __clzll(long long);
int __popc(unsigned);
int min(int, int);
int max(int, int);
#define PTX(...)
TEXT
        # nvcc takes the bodies of device functions out before it hands over the rest. Here their PTX goes.
        sed 's/asm\( volatile\)\{0,1\}(/PTX(/' kahan_opt_cuda.cuh >$out/cuda/kahan_opt_cuda.cuh
        { printf '#include "cuda_runtime.h"\n#define KAHAN_OPT_VMATH\n#define KAHAN_OPT_CUDA_IMPLEMENTATION\n'
            printf '#define KAHAN_OPT_CUDA_SELF "cuda/kahan_opt_cuda.cuh"\n'
            printf '#include "cuda/kahan_opt_cuda.cuh"\n'; } >$out/cuda.cpp
        set -- $clang --driver-mode=cl --target=x86_64-pc-windows-msvc /D__CUDACC__ /U__clang__ -Wno-unknown-pragmas \
            -Xclang -ffreestanding -I. -I$out -I$out/cuda /TP
        check "kahan_opt_cuda.cuh: $clang as clang-cl without __clang__, as nvcc's host compiler" "$@" \
            /W4 /WX -Wpedantic -Wgnu -Wno-error=unknown-pragmas -Wno-unknown-pragmas \
            -Wno-uninitialized -Wno-unused-parameter /Zs $out/cuda.cpp
        "$@" /E $out/cuda.cpp >$out/cuda.i 2>/dev/null
        awk '/^#(line)? *[0-9]+ "/ { split($0, part, "\""); file = part[2]; line = $2 - 1; next }
            { line++ }
            file ~ /kahan_opt/ && /__builtin_[^o]|__atomic|__sync_|__attribute__|__asm|pragma unroll/ {
                print file ":" line ": " $0
            }
            file ~ /kahan_opt_cuda/ { seen++ }
            END { if (seen < 500) print "no lines of kahan_opt_cuda.cuh" }' $out/cuda.i >$out/log
        [ ! -s $out/log ]
        report $? "kahan_opt_cuda.cuh: none of GNU's words reaches Microsoft's compiler"
        # Code for the GPU uses asm, a word of C++; Microsoft's C++ does not know __asm__.
        awk '/__CUDA_ARCH__/ && /^#if/ && !/!defined/ { inside = 1; next } /^#(else|elif|endif)/ { inside = 0 }
            inside && /__asm__/ { print FILENAME ":" FNR ": " $0 }' kahan_opt.h kahan_opt_cuda.cuh >$out/log
        [ ! -s $out/log ]
        report $? "code for the GPU spells asm as C++ does" ;;
    esac
fi

if section targets; then
    # A function of an instruction set has no register of a higher one: a macro that outlives its pass would let SSE2
    # run AVX2's code, with all bits right, until a processor stops at it.
    case $(uname -m) in x86_64)
        if have objdump; then
            printf '#define KAHAN_OPT_VMATH\n#define KAHAN_OPT_IMPLEMENTATION\n#include "kahan_opt.h"\n' >$out/sets.c
            for c in gcc $clangs; do
                have $c && turn 3 || continue
                $c -O2 -I. -c -o $out/sets.o $out/sets.c && objdump -d --no-show-raw-insn $out/sets.o |
                    awk '/^[0-9a-f]+ </ { name = $2; total += name ~ /_(scalar|sse2|avx2|avx512)_/ }
                        name ~ /_(scalar|sse2)_/ && /[yz]mm|\tv[a-z]/ { print name $0 }
                        name ~ /_avx2_/ && /zmm|%k[0-7]/ { print name $0 }
                        END { if (total < 100) print total " functions only" }' >$out/log 2>&1
                test ! -s $out/log
                report $? "$c: no instruction of a higher set in a function of scalar code, SSE2 or AVX2"
            done
        fi
        if have qemu-x86_64; then # which also knows SSE4.1 from what came before it
            for c in gcc $clangs; do
                have $c && turn 3 || continue
                $c -O2 -static -o $out/probe tests/bits/probe.c >$out/log 2>&1
                for isa in sse2 scalar; do
                    qemu-x86_64 -cpu core2duo $out/probe $isa >$out/lines 2>$out/log &&
                        diff tests/bits/golden.txt $out/lines >$out/log
                    report $? "$c: $isa on a processor without AVX: the golden lines"
                done
            done
        else missing "no qemu-x86_64: SSE2 on an old processor"; fi ;;
    esac
    if [ -n "$clang" ]; then
        arm64ec=
        case $clang in clang-19 | clang-2*) arm64ec=arm64ec-pc-windows-msvc ;; esac
        for target in $arm64ec wasm32 thumbv6m-none-eabi thumbv7em-none-eabihf armeb-none-eabi aarch64-none-elf \
            aarch64_be-none-elf aarch64-apple-ios arm64-apple-macos x86_64-scei-ps4 x86_64-sie-ps5 i386-none-elf \
            x86_64-linux-gnux32 i686-pc-windows-msvc aarch64-pc-windows-msvc msp430 avr hexagon riscv32-none-elf \
            riscv64-none-elf mips-none-elf powerpc64-none-elf s390x-none-elf m68k bpf; do
            turn 3 || continue
            # -Wno-...-quirks: the driver's own, avr has no C library here
            flags="--target=$target -ffreestanding -nostdlibinc -Wall -Wextra -Wpedantic -Wconversion -Werror"
            flags="$flags -Wno-avr-rtlib-linking-quirks"
            work=-c source=plain
            [ $target != avr ] || source=declare # no double of 64 bits: inline functions only
            case $target in
            *86* | aarch64-* | arm64-*) work=-fsyntax-only ;; # other tests compile their code
            avr | m68k | bpf) work=-fsyntax-only ;;           # clang has no float in their registers, or none at all
            esac
            check "$target" $clang $flags -O1 $work -I. $out/$source.c -o $out/target.o
            # from the compiler's own run-time library there is soft float, never atomics
            if [ $work = -c ] && have llvm-nm; then
                llvm-nm -u $out/target.o >$out/log 2>&1
                ! grep -q 'atomic\|sqrt\|fma' $out/log
                report $? "$target: neither a library of atomics nor a libm"
            fi
        done
        ! $clang --target=avr -ffreestanding -fsyntax-only -I. $out/plain.c >$out/log 2>&1 &&
            grep -q 'needs a double of 64 bits' $out/log
        report $? "avr: the implementation says that it needs a double of 64 bits"
        # Vectors that are part of the target, in each language: without a warning of clang (see everything).
        target='wasm32 -msimd128'
        languages "$clang --target=$target -ffreestanding" "$everything" 'c99' 'plain vmath'
        languages "$clang --target=$target -ffreestanding -x c++" "$everything -Wno-c++98-compat" 'c++98 c++17' 'plain'
        check "$target: its code" $clang --target=$target -ffreestanding $everything -std=c99 -O1 -I. \
            -c $out/plain.c -o $out/target.o
        # On a console the intrinsics are in other files than on a PC.
        check "code for a console" ${clangs%% *} --target=x86_64-scei-ps4 -ffreestanding -Wall -Wextra -Werror -I. \
            -c $out/plain.c -o $out/target.o
        check "x87" $clang --target=i386-none-elf -mno-sse -ffreestanding -Wall -Wextra -Werror -I. \
            -fsyntax-only $out/plain.c
    else missing "no clang: other targets"; fi
    zig=build/zig/ziglang/zig
    if have $zig; then
        zig() { env ZIG_GLOBAL_CACHE_DIR=build/zig-cache ZIG_LOCAL_CACHE_DIR=build/zig-cache $zig "$@"; }
        for target in x86_64-macos aarch64-macos; do # tests/bits/matrix.sh builds for what it can run, too
            check "zig cc: $target" zig cc -target $target -Wall -Wextra -Wpedantic -Wconversion -Werror -I. \
                -c $out/plain.c -o $out/target.o
        done
        # A program of Zig that trains: with what Zig makes of the declarations and of the inline functions.
        cat >$out/train.zig <<'TEXT'
const kopt = @import("declare.zig");
export fn main() c_int {
    var weight = [_]kopt.kopt_bf16{kopt.kopt_bf16_from_f32(1)} ** 40;
    var grad = weight;
    var state: [1000]u8 = undefined;
    var opt = kopt.kopt_adamw(0.1);
    const t = kopt.kopt_tensor_of(&weight, kopt.KOPT_BF16, &grad, kopt.KOPT_BF16, 40, &state, state.len);
    if (kopt.kopt_state_init(&opt, &t, 1, null) != kopt.KOPT_OK) return 1;
    if (kopt.kopt_optimizer_step(&opt, &t, 1) != kopt.KOPT_OK) return 2;
    if (weight[39] >= 0x3F80) return 3;
    var compensation: kopt.kopt_bf16 = 0;
    weight[0] = 0x3F80;
    kopt.kopt_kahan_add_bf16(&weight[0], &compensation, 0.25, 0);
    return if (kopt.kopt_f32_from_bf16(weight[0]) == 1.25) 0 else 4;
}
TEXT
        sed -n '/^#ifndef KAHAN_OPT_H/,/^#endif \/\* KAHAN_OPT_H/p' kahan_opt.h | grep '^KOPT_API_' |
            sed 's/(.*//; s/.*[ *]//' | sort >$out/declared
        # Zig translates no assembly, which TinyCC's branch lacks. The program takes the last.
        for options in -DKAHAN_OPT_BINDINGS -D__TINYC__; do
            zig translate-c -DKAHAN_OPT_VMATH $options -I. $out/declare.c >$out/declare.zig 2>$out/log &&
                sed -n 's/^pub extern fn \(kopt_[a-z0-9_]*[a-z0-9]\)(.*/\1/p' $out/declare.zig | sort |
                comm -23 $out/declared - >$out/log && ! grep 'demoted to extern' $out/declare.zig >>$out/log &&
                [ ! -s $out/log ]
            report $? "zig translate-c: every function, $options"
        done
        zig build-obj $out/train.zig -fPIC -femit-bin=$out/train.o >$out/log 2>&1 &&
            ${CC:-cc} -w -I. -o $out/train $out/no_simd.c $out/train.o >$out/log 2>&1 && $out/train
        report $? "zig translate-c: a program of Zig trains"
    else missing "no zig: macOS, translate-c"; fi
fi

# ---- folders and names -----------------------------------------------------------------------------------------------

if section names; then
    cc="${CC:-cc} -Wall -Wextra -Werror -fsyntax-only"
    folder="$out/third party/optimizers"
    mkdir -p "$folder"
    cp kahan_opt.h "$folder/kahan_opt.h"
    printf '#define KAHAN_OPT_IMPLEMENTATION\n#include "third party/optimizers/kahan_opt.h"\n' >$out/folder.c
    check "in a folder with a space in its name" $cc $out/folder.c
    elsewhere() ( cd / && "$@" )
    check "the same, from another folder" elsewhere $cc "$root/$out/folder.c"
    printf '#define KAHAN_OPT_IMPLEMENTATION\n#include <kahan_opt.h>\n' >$out/angle.c
    check "in angle brackets, through -I" $cc "-I$folder" $out/angle.c
    check "in angle brackets, through -isystem" $cc -isystem "$folder" $out/angle.c
    printf 'int x;\n' >$out/nothing.c
    check "from the command line" $cc -DKAHAN_OPT_IMPLEMENTATION -include "$folder/kahan_opt.h" $out/nothing.c
    mkdir -p $out/link
    ln -s "$root/kahan_opt.h" $out/link/kahan_opt.h
    printf '#define KAHAN_OPT_IMPLEMENTATION\n#include "link/kahan_opt.h"\n' >$out/link.c
    check "as a symbolic link" $cc $out/link.c

    rm "$folder/kahan_opt.h"
    cp kahan_opt.h "$folder/my optimizer.hpp"
    printf '#define KAHAN_OPT_IMPLEMENTATION\n#include "third party/optimizers/my optimizer.hpp"\n' >$out/renamed.c
    printf '#define KAHAN_OPT_SELF "my optimizer.hpp"\n' | cat - $out/renamed.c >$out/named.c
    for c in gcc $clangs; do
        have $c && check "renamed, found by itself: $c" $c -Wall -Wextra -Wpedantic -Werror -fsyntax-only $out/renamed.c
    done
    check "renamed, with KAHAN_OPT_SELF" $cc $out/named.c
    if have tcc; then check "renamed, with KAHAN_OPT_SELF: tcc" tcc -Wall -Werror -c $out/named.c -o $out/tcc.o; fi

    # If the header cannot include itself, there is one error, which says so.
    { echo '#define KAHAN_OPT_IMPLEMENTATION'; cat kahan_opt.h; echo 'int main(void) { return 0; }'; } >$out/pasted.c
    { echo '#pragma once'; cat kahan_opt.h; } >$out/once.h
    { printf '#ifndef ALL_H\n#define ALL_H\n'; cat kahan_opt.h; echo '#endif'; } >$out/guarded.h
    # Elements of a size that the format does not have.
    for wrong in 'KOPT_BF16, master, grad' 'KOPT_F32, weight, fp32_grad' 'KOPT_F32, master, grad' \
        'KOPT_FP16, weight, (unsigned char *)grad' 'KOPT_BF16, weight, (double *)fp32_grad'; do
        sed "s/KOPT_TENSOR(KOPT_BF16, weight, grad,/KOPT_TENSOR($wrong,/" $out/macros.c >$out/wrong.c
        for c in 'gcc -std=c99' 'g++ -x c++ -std=c++98' "${clangs%% *} -std=c99"; do
            have ${c%% *} && refuse "KOPT_TENSOR($wrong, ..) does not compile: $c" 'negative' $c -I. -fsyntax-only \
                $out/wrong.c
        done
    done
    for header in once guarded; do
        printf '#define KAHAN_OPT_IMPLEMENTATION\n#include "%s.h"\nint main(void) { return 0; }\n' $header \
            >$out/$header.c
    done
    for c in gcc $clangs; do
        have $c || continue
        for where in 'pasted:is pasted into another file' 'once:did not read itself' 'guarded:did not read itself'; do
            refuse "${where%%:*}: $c says so" "${where#*:}" $c -fsyntax-only $out/${where%%:*}.c
            [ "$(grep -c 'error:' $out/log)" = 1 ]
            report $? "... and nothing else"
        done
    done
fi

# ---- macros that are defined in one file but not in another ----------------------------------------------------------

if section pairs; then
    cat >$out/pair_user.c <<'TEXT'
#include "kahan_opt.h"
#ifdef __cplusplus
extern "C" {
#endif
size_t size_of_optimizer(void);
size_t size_of_step(void);
#ifdef __cplusplus
}
#endif
static struct guarded {
    unsigned char before[64];
    kopt_optimizer opt;
    unsigned char between[64];
    kopt_step step;
    unsigned char after[64];
} g;
static kopt_bf16 weight[40], grad[40];
static unsigned char state[KOPT_STATE_BYTES(40, 6)];
int main(void) {
    float one[40];
    int i;
    kopt_tensor t = kopt_tensor_of(weight, KOPT_BF16, grad, KOPT_BF16, 40, state, sizeof state);
    for (i = 0; i < 64; i++) g.before[i] = g.between[i] = g.after[i] = 0x5A;
    for (i = 0; i < 40; i++) one[i] = 1, grad[i] = 0x3F80;
    if (size_of_optimizer() != sizeof g.opt || size_of_step() != sizeof g.step) return 1;
    g.opt = kopt_sgd(0.25, 0);
    if (kopt_state_init(&g.opt, &t, 1, one) != KOPT_OK || kopt_step_begin(&g.step, &g.opt) != KOPT_OK) return 2;
    if (kopt_step_run(&g.step, &t, 1) != KOPT_OK) return 3;
    for (i = 0; i < 40; i++)
        if (weight[i] != 0x3F40) return 4; /* 0.75 */
    for (i = 0; i < 64; i++)
        if (g.before[i] != 0x5A || g.between[i] != 0x5A || g.after[i] != 0x5A) return 5;
    g.opt.rule = KOPT_RULE_ADAM_ATAN2; /* there or refused */
    g.opt.weight_decay = 0;
    i = (int)kopt_step_begin(&g.step, &g.opt);
#ifdef USES_VMATH
    return kopt_vmath_exp(one, one, 40) != KOPT_OK;
#else
    return i == (int)KOPT_OK || i == (int)KOPT_ERROR_OPTION ? 0 : 6;
#endif
}
TEXT
    cat >$out/pair_library.c <<'TEXT'
#define KAHAN_OPT_IMPLEMENTATION
#include "kahan_opt.h"
#ifdef __cplusplus
extern "C" {
#endif
size_t size_of_optimizer(void);
size_t size_of_step(void);
#ifdef __cplusplus
}
#endif
size_t size_of_optimizer(void) { return sizeof(kopt_optimizer); }
size_t size_of_step(void) { return sizeof(kopt_step); }
TEXT
    pair() { # pair USER-FLAG LIBRARY-FLAG COMPILER...: builds and runs a program; its output is in the log
        user_flag=$1 library_flag=$2
        shift 2
        "$@" -DKAHAN_OPT_NO_SIMD -I. $library_flag -c $out/pair_library.c -o $out/pair_library.o >$out/log 2>&1 &&
            "$@" -I. $user_flag -c $out/pair_user.c -o $out/pair_user.o >>$out/log 2>&1 &&
            "$@" -x none $out/pair_user.o $out/pair_library.o -o $out/pair >>$out/log 2>&1 && $out/pair >>$out/log 2>&1
    }
    for compiler in 'gcc -O1' 'gcc -O1 -flto' 'g++ -O1 -x c++' 'g++ -O1 -flto -x c++' 'clang -O1'; do
        have ${compiler%% *} || { missing "no ${compiler%% *}"; continue; }
        turn 2 || continue
        for flags in -DKAHAN_OPT_VMATH: :-DKAHAN_OPT_VMATH -DKAHAN_OPT_SLEEF: \
            '-DKAHAN_OPT_API=__attribute__((visibility("default"))):'; do
            pair "${flags%%:*}" "${flags#*:}" $compiler
            report $? "$compiler: the program with '${flags%%:*}', the library with '${flags#*:}': one layout"
        done
        ! pair '-DKAHAN_OPT_VMATH -DUSES_VMATH' '' $compiler && grep -q 'kopt_vmath' $out/log
        report $? "$compiler: functions of KAHAN_OPT_VMATH from a library without it do not link"
        pair -DKAHAN_OPT_STATIC '' $compiler || grep -q 'undefined reference.*kopt_optimizer_init' $out/log
        report $? "$compiler: KAHAN_OPT_STATIC without an implementation in its file is right or does not link"
    done
fi

# ---- two versions ----------------------------------------------------------------------------------------------------

# Three versions that can be told apart: each has a struct of a different size.
this=$(sed -n 's/^#define KOPT_VERSION \([0-9]*\).*/\1/p' kahan_opt.h)
version() { # version NUMBER: makes that version of the header
    mkdir -p $out/v$1
    sed "s/KOPT_VERSION $this/KOPT_VERSION $1/; s/KOPT_VERSION != $this/KOPT_VERSION != $1/
        s|$this / 10000|$1 / 10000|
        s/\"success\",/\"success $1\",/
        s/^typedef struct kopt_optimizer {/&\n    char padding_[$1];/" kahan_opt.h >$out/v$1/kahan_opt.h
}

if section versions; then
    version 100 && version 201 && version 302
    written_twice() {
        [ "$(grep -c "KOPT_VERSION $this" kahan_opt.h)" = 1 ] &&
            [ "$(grep -c "KOPT_VERSION != $this" kahan_opt.h)" = 1 ] &&
            [ "$(grep -c "KOPT_VERSION / 10000 != $this / 10000" kahan_opt.h)" = 1 ]
    }
    check "the version is written once in the header below, and twice above" written_twice
    user() { # user VERSION LINES...: makes a file that trains with this version
        v=$1
        shift
        printf "$@" | cat - >$out/user$v.c
        cat >>$out/user$v.c <<TEXT
#include "v$v/kahan_opt.h"
#include <string.h>
#ifdef __cplusplus
extern "C"
#endif
int user$v(void);
int user$v(void) { /* 0: it is this version, and a step works */
    kopt_optimizer opt = kopt_sgd(0.25, 0);
    static kopt_bf16 weight[40], grad[40];
    unsigned char state[KOPT_STATE_BYTES(40, 2)];
    float one[40];
    int i;
    kopt_tensor t = kopt_tensor_of(weight, KOPT_BF16, grad, KOPT_BF16, 40, state, sizeof state);
    for (i = 0; i < 40; i++) one[i] = 1, grad[i] = 0x3F80;
    if (kopt_version() != $v || strcmp(kopt_result_string(KOPT_OK), "success $v") != 0) return 1;
    if (sizeof opt.padding_ != $v || opt.lr < 0.25 || opt.lr > 0.25) return 2;
    if (kopt_state_init(&opt, &t, 1, one) != KOPT_OK || kopt_optimizer_step(&opt, &t, 1) != KOPT_OK) return 3;
    for (i = 0; i < 40; i++)
        if (weight[i] != 0x3F40) return 4; /* 0.75 */
    return 0;
}
TEXT
    }
    sides='#define KAHAN_OPT_STATIC\n#define KAHAN_OPT_IMPLEMENTATION\n'
    user 100 "$sides"
    user 201 "$sides"
    user 302 ''
    printf '#define KAHAN_OPT_IMPLEMENTATION\n#include "v302/kahan_opt.h"\n' >$out/library302.c
    cat >$out/main.c <<'TEXT'
#ifdef __cplusplus
extern "C" {
#endif
int user100(void);
int user201(void);
int user302(void);
#ifdef __cplusplus
}
#endif
int main(void) { return user100() * 16 + user201() * 4 + user302(); }
TEXT
    files="$out/user100.c $out/user201.c $out/user302.c $out/library302.c $out/main.c"
    run() { # run DESCRIPTION COMPILER...
        what=$1
        shift
        "$@" -I$out -o $out/program >$out/log 2>&1 && $out/program >>$out/log 2>&1
        report $? "$what"
    }
    # Names do not depend on the vocabularies, so all programs but one are scalar builds, which compile faster.
    fast='-DKAHAN_OPT_NO_SIMD -Wall -Wextra -Werror'
    have gcc && run "two private versions and a public one: gcc" gcc $fast $files
    have gcc && run "the same with link-time optimization" gcc $fast -O1 -flto $files
    have g++ && run "the same in C++" g++ -x c++ $fast $files
    [ -n "$clang" ] && run "the same, clang" $clang $fast $files
    have tcc && run "the same, tcc" tcc -Wall $files

    # As plugins: a loaded library must not bind to the functions of the program.
    pic="${CC:-cc} $fast -fPIC -I$out"
    $pic -shared $out/user100.c -o $out/libuser100.so >$out/log 2>&1 &&
        $pic -shared $out/user201.c -o $out/libuser201.so >>$out/log 2>&1
    run "two private versions in shared libraries, a public one in the program" ${CC:-cc} $fast -rdynamic \
        $out/main.c $out/user302.c \
        $out/library302.c -L$out -luser100 -luser201 "-Wl,-rpath,$root/$out"

    # A library that exports the functions, built as C, called from C++.
    printf '#define KAHAN_OPT_API __attribute__((visibility("default")))\n' >$out/shown.c
    printf '#define KAHAN_OPT_IMPLEMENTATION\n#include "v302/kahan_opt.h"\n' >>$out/shown.c
    printf '#define KAHAN_OPT_API __attribute__((visibility("default")))\n' | cat - $out/user302.c >$out/caller.c
    $pic -fvisibility=hidden -shared $out/shown.c -o $out/libshown.so >$out/log 2>&1
    printf '#ifdef __cplusplus\nextern "C"\n#endif\nint user302(void);\nint main(void) { return user302(); }\n' \
        >$out/main302.c
    have g++ && run "KAHAN_OPT_API: a shared library in C, called from C++" g++ -x c++ $fast \
        $out/caller.c $out/main302.c -x none -L$out -lshown \
        "-Wl,-rpath,$root/$out"

    # Two public versions: objcopy renames the functions of one, but not what is outside.
    if have objcopy; then
        ${CC:-cc} $fast -I$out -c $out/library302.c -o $out/library302.o >$out/log 2>&1
        printf '#define KAHAN_OPT_IMPLEMENTATION\n#include "v201/kahan_opt.h"\n' >$out/library201.c
        ${CC:-cc} $fast -fno-pic -I$out -c $out/library201.c -o $out/library201.o >>$out/log 2>&1
        objcopy --prefix-symbols=old_ $out/library201.o $out/old201.o >>$out/log 2>&1 &&
            objcopy --redefine-sym old_memcpy=memcpy --redefine-sym old_memset=memset $out/old201.o >>$out/log 2>&1
        printf 'int kopt_version(void);\nint old_kopt_version(void);\n' >$out/both.c
        printf 'int main(void) { return kopt_version() != 302 || old_kopt_version() != 201; }\n' >>$out/both.c
        run "two public versions, one renamed by objcopy" ${CC:-cc} -no-pie $out/both.c $out/library302.o $out/old201.o
    else missing "no objcopy"; fi

    cc="${CC:-cc} -I$out -fsyntax-only"
    printf '#include "v100/kahan_opt.h"\n#include "v201/kahan_opt.h"\n' >$out/mixed.c
    refuse "two versions in one file are an error" 'two versions of kahan_opt.h' $cc $out/mixed.c
    printf '#include "v100/kahan_opt.h"\n#define KAHAN_OPT_IMPLEMENTATION\n#include "v201/kahan_opt.h"\n' >$out/mixed.c
    refuse "the declarations of one version, the implementation of another" \
        'two versions of kahan_opt.h' $cc $out/mixed.c
    version 10203 && version 10304 && version 20000
    printf '#include "v10304/kahan_opt.h"\n#include "v10203/kahan_opt.h"\n#include "v10304/kahan_opt.h"\n' >$out/minor.c
    check "from 1.0 on, two versions with one major number may declare" $cc -Wall -Wextra -Werror $out/minor.c
    for case in '10203 20000' '20000 10203' '302 10203' '10203 302'; do
        printf '#include "v%s/kahan_opt.h"\n' $case >$out/mixed.c
        refuse "those with two major numbers may not: $case" 'two versions of kahan_opt.h' $cc $out/mixed.c
    done
    printf '#include "v10203/kahan_opt.h"\n#define KAHAN_OPT_IMPLEMENTATION\n' >$out/mixed.c
    printf '#include "v10304/kahan_opt.h"\n' >>$out/mixed.c
    refuse "one declares, the other implements: no" 'two versions of kahan_opt.h' $cc $out/mixed.c
    printf '#define KAHAN_OPT_SELF "../v201/kahan_opt.h"\n#define KAHAN_OPT_IMPLEMENTATION\n' >$out/mixed.c
    printf '#include "v100/kahan_opt.h"\n' >>$out/mixed.c
    refuse "KAHAN_OPT_SELF that names another version" 'two versions of kahan_opt.h' $cc $out/mixed.c
    printf '#define KAHAN_OPT_STATIC\n#define KAHAN_OPT_API\n#include "kahan_opt.h"\n' >$out/mixed.c
    refuse "KAHAN_OPT_STATIC with KAHAN_OPT_API" 'contradict each other' ${CC:-cc} -I. -fsyntax-only $out/mixed.c
    for macro in STATIC VMATH; do
        printf '#include "kahan_opt.h"\n#define KAHAN_OPT_%s\n' $macro >$out/mixed.c
        printf '#define KAHAN_OPT_IMPLEMENTATION\n#include "kahan_opt.h"\n' >>$out/mixed.c
        refuse "KAHAN_OPT_$macro after the first include" 'for the first time' ${CC:-cc} -I. -fsyntax-only $out/mixed.c
    done
    printf '#include "v100/kahan_opt.h"\n#include "v100/../v100/kahan_opt.h"\n#include "%s/v100/kahan_opt.h"\n' \
        "$root/$out" >$out/copies.c
    check "two copies of one version in one file are one" ${CC:-cc} \
        -Wall -Wextra -Werror -I$out -fsyntax-only $out/copies.c
fi

# ---- leaks: names, macros, symbols -----------------------------------------------------------------------------------

if section leaks; then
    # Macros of other libraries, with their values or with text that does not compile.
    cat >$out/macros.h <<'TEXT'
#define min(a, b) (((a) < (b)) ? (a) : (b)) /* windows.h */
#define max(a, b) (((a) > (b)) ? (a) : (b))
#define near
#define far
#define small char
#define hyper long
#define interface struct
#define IN
#define OUT
#define OPTIONAL
#define CONST const
#define VOID void
#define ERROR 0
#define TRUE 1
#define FALSE 0
#define DELETE 0x10000
#define STRICT 1
#define None 0 /* Xlib */
#define Bool int
#define Status int
#define Success 0
#define Always 2
#define likely(x) __builtin_expect(!!(x), 1) /* Linux */
#define unlikely(x) __builtin_expect(!!(x), 0)
#define swap(a, b) poison poison
#define noinline __attribute__((noinline))
#define unused __attribute__((unused))
#define packed __attribute__((packed))
#define aligned(n) __attribute__((aligned(n)))
#define always_inline inline __attribute__((always_inline))
#define abs(x) ((x) > 0 ? (x) : -(x)) /* Arduino */
#define round(x) ((x) >= 0 ? (long)((x) + 0.5) : (long)((x) - 0.5))
#define sq(x) ((x) * (x))
#define bit(b) (1UL << (b))
#define lowByte(w) ((uint8_t)((w) & 0xff))
#define F(string) string
#define PI 3.14
#define DEFAULT 1
#define byte unsigned char
#define word unsigned short
#define check(x) poison poison /* Unreal, Carbon */
#define verify(x) poison poison
#define require(x) poison poison
#define TEXT(x) L##x
#define step(a, b) poison poison /* functions of shaders and of everybody */
#define mix(a, b, c) poison poison
#define sign(x) poison poison
#define clamp(a, b, c) poison poison
#define add(a, b) poison poison
#define sub(a, b) poison poison
#define mul(a, b) poison poison
#define div(a, b) poison poison
#define load(a) poison poison
#define store(a) poison poison
#define set(a) poison poison
#define any(a) poison poison
#define all(a) poison poison
#define select(a, b, c) poison poison
#define convert(a) poison poison
#define index(a) poison poison
#define count(a) poison poison
#define bits(a) poison poison
#define value(a) poison poison
#define range(a) poison poison
#define half(a) poison poison
#define random() poison poison
#define DEBUG poison poison
#define TEST poison poison
#define VERSION poison poison
#define SIZE poison poison
#define N poison poison
#define ISA poison poison
#define LANES poison poison
#define PASS poison poison
#define NAME poison poison
#define FN poison poison
#define STATIC poison poison
#define INLINE poison poison
#define API poison poison
#define EXTERN poison poison
#define CAST poison poison
#define COPY poison poison
#define PAIRS poison poison
#define ROUND poison poison
#define SCALAR poison poison
#define AVX2 poison poison
#define NEON poison poison
TEXT
    standard='#include <stddef.h>\n#include <stdint.h>\n#include <stdlib.h>\n#include <string.h>\n'
    standard="$standard#include <stdbool.h>\n#include <assert.h>\n"
    standard="$standard#ifdef __TINYC__\n#elif !defined(__cplusplus)\n#include <iso646.h>\n#include <complex.h>\n"
    standard="$standard#include <tgmath.h>\n#else\n#include <cmath>\n#include <atomic>\n#include <cstring>\n"
    standard="$standard#include <dlfcn.h>\n#endif\n"
    isa='#ifdef __TINYC__\n#elif defined(__x86_64__) || defined(__i386__)\n#include <immintrin.h>\n'
    isa="$isa#elif defined(__aarch64__)\n#include <arm_neon.h>\n#endif\n"
    printf "$standard$isa#include \"macros.h\"\n" >$out/before.c
    printf "$standard$isa#include \"macros.h\"\n$implement" >$out/after.c
    mkdir -p $out/none
    : >$out/none/cuda_runtime.h # macros do not need what it declares
    { printf "$standard$isa#include \"macros.h\"\n"
        printf '#define KAHAN_OPT_CUDA_IMPLEMENTATION\n#include "kahan_opt_cuda.cuh"\n'; } >$out/after_cuda.c
    leaks() { # leaks SOURCE COMPILER FLAG...
        source=$1
        shift
        "$@" -I. -I$out -I$out/none -dM -E $out/before.c 2>/dev/null | sort >$out/macros_before
        "$@" -I. -I$out -I$out/none -dM -E $out/$source.c 2>/dev/null | sort >$out/macros_after
        comm -23 $out/macros_before $out/macros_after >$out/log
        ! grep -q . $out/log
        report $? "no macro of others is changed or lost: $source, $*"
        comm -13 $out/macros_before $out/macros_after | awk '{print $2}' | grep -v '^KOPT_\|^KAHAN_OPT_' >$out/log
        ! grep -q . $out/log && grep -q KOPT_VERSION $out/macros_after
        report $? "every macro that stays begins with KOPT_ or KAHAN_OPT_: $source, $*"
    }
    for c in 'gcc -std=gnu99' 'g++ -x c++ -std=gnu++17' "${clang:-clang} -std=gnu99" \
        "${clang:-clang} -x c++ -std=gnu++17" 'tcc'; do
        have ${c%% *} || continue
        check "users' macros do no harm: $c" $c -w -I. -I$out -c $out/after.c -o $out/macros.o
        [ "${c%% *}" = tcc ] && continue # its -dM prints nothing
        leaks after $c
        case $c in *c++*) # without nvcc, and its passes for the host and the GPU
            leaks after_cuda $c
            leaks after_cuda $c -D__CUDACC__
            leaks after_cuda $c -D__CUDACC__ -D__CUDA_ARCH__=750 ;;
        esac
    done
    for c in gcc $clang; do # it includes only what it needs
        have $c || continue
        $c -I. -H -fsyntax-only $out/declare.c 2>&1 | grep '^\.\. ' | sed 's/.*\///' | sort | tr '\n' ' ' >$out/log
        grep -q '^stddef.h stdint.h $' $out/log
        report $? "the declarations include stddef.h and stdint.h and nothing else: $c"
        # Parsing the declarations takes at most about 10 ms on a slow machine.
        $c -I. -E $out/declare.c 2>/dev/null | awk '/^# /{ours = /kahan_opt\.h/; next} ours && NF' >$out/declarations
        echo "$(wc -l <$out/declarations) lines, $(wc -c <$out/declarations) bytes" >$out/log
        [ "$(wc -l <$out/declarations)" -le 530 ] && [ "$(wc -c <$out/declarations)" -le 40000 ]
        report $? "the declarations are cheap to include: $(cat $out/log), $c"
    done
    if have g++; then
        printf 'extern "C" {\n#include "kahan_opt.h"\n}\n' >$out/wrapped.c
        check "the declarations inside the user's extern \"C\"" g++ -x c++ -Wall -Wextra -Werror -I. \
            -fsyntax-only $out/wrapped.c
    fi

    # Symbols, of the objects of the section "warnings" if it has run.
    have gcc && [ ! -f $out/gcc_O3.o ] && gcc -O3 -I. -c $out/plain.c -o $out/gcc_O3.o 2>$out/log
    have g++ && [ ! -f $out/g++_O2.o ] && g++ -x c++ -O2 -I. -c $out/plain.c -o $out/g++_O2.o 2>$out/log
    [ -n "$clang" ] && [ ! -f $out/clang_O2.o ] && $clang -O2 -I. -c $out/plain.c -o $out/clang_O2.o 2>$out/log
    symbols() { # symbols OBJECT DESCRIPTION: checks its names, the functions it needs, and its variables
        nm $out/$1 | awk '$2 ~ /[a-zA-Z]/ && NF == 3 {print $3}' |
            grep -v '^_*\(Z[A-Z]*[0-9]*\)\?kopt_\|^\.L\|^_ZZ*L*[0-9]*[a-z_]*kopt_\|^[a-z]*\.\(kopt\|[0-9]*$\)' >$out/log
        ! grep -q . $out/log
        report $? "$2: every symbol begins with kopt_"
        nm -u $out/$1 | grep -v '_GLOBAL_OFFSET_TABLE_\|__stack_chk_fail\| U mem\(cpy\|set\)$' >$out/log
        ! grep -q . $out/log
        report $? "$2: nothing of a library is used but memcpy and memset, so neither errno nor a locale"
        # writable: sections with the flag W that are not read-only after relocation
        objdump -t $out/$1 | awk '$4 ~ /^\.(data|bss|tdata|tbss)/ || $4 == "*COM*" || $3 ~ /^\.(data|bss|tdata|tbss)/' |
            grep -v '\.rel\.ro' | grep -v ' [.][a-z]*$' | awk '{print $NF}' | grep -v 'kopt_chosen_' >$out/log
        ! grep -q . $out/log
        report $? "$2: no variable but the chosen instruction set"
    }
    if have nm && have objdump && have gcc; then
        symbols gcc_O3.o "gcc -O3"
        have g++ && symbols g++_O2.o "g++ -O2"
        [ -n "$clang" ] && symbols clang_O2.o "$clang -O2"
        gcc -Os -I. -c $out/plain.c -o $out/gcc_Os.o && symbols gcc_Os.o "gcc -Os"
        for flags in 'gcc -Os' 'gcc -O3' "${clang:-gcc} -Os" "${clang:-gcc} -O3"; do
            turn 2 || continue
            $flags -I. -c $out/no_simd.c -o $out/no_simd.o && symbols no_simd.o "no_simd, $flags"
            nm $out/no_simd.o | grep kopt_chosen_ >$out/log
            ! grep -q . $out/log
            report $? "no_simd, $flags: not even that"
        done
        for flags in 'gcc -O1' 'g++ -x c++ -O1'; do
            $flags -DKAHAN_OPT_NO_SIMD -I. -c $out/static.c -o $out/static.o &&
                nm -g --defined-only $out/static.o >$out/log
            ! grep -q . $out/log
            report $? "KAHAN_OPT_STATIC, $flags: no symbol is seen from outside"
        done
        nm -g --defined-only $out/gcc_O3.o | awk '{print $3}' | sort >$out/exported
        sed -n '/^#ifndef KAHAN_OPT_H/,/^#endif \/\* KAHAN_OPT_H/p' kahan_opt.h >$out/declarations
        declared() { grep '^KOPT_API_' | sed 's/(.*//; s/.*[ *]//' | sort >$out/declared; }
        sed '/^#ifdef KAHAN_OPT_VMATH/,/^#endif/d' $out/declarations | declared
        diff $out/declared $out/exported >$out/log
        report $? "what is exported is what is declared"
        gcc -O1 -I. -c $out/vmath.c -o $out/vmath.o &&
            nm -g --defined-only $out/vmath.o | awk '{print $3}' | sort >$out/exported
        declared <$out/declarations
        diff $out/declared $out/exported >$out/log &&
            ! nm -u $out/vmath.o | grep -v '_GLOBAL_OFFSET_TABLE_\| U mem\(cpy\|set\)$' >>$out/log
        report $? "... and with KAHAN_OPT_VMATH, which needs nothing else from outside either"
    else missing "no nm, objdump or gcc"; fi
fi

# ---- pragmas: code after the header is compiled as if the header were not there --------------------------------------

if section pragmas; then
    cat >$out/user.c <<'TEXT'
#define HERE(n) __attribute__((section("user_text" #n), used, noinline))
HERE(1) static float user_fused(float a, float b, float c) { return a * b + c; }
HERE(2) static float user_sum(const float *x, int n) {
    float sum = 0;
    int i;
    for (i = 0; i < n; i++) sum += x[i] / 3.0f;
    return sum;
}
HERE(3) static int user_constant(void) {
    int x = 3;
    return __builtin_constant_p(x);
}
HERE(4) static int user_overflow(int x) { return x + 1 > x; }
TEXT
    printf "#define KAHAN_OPT_NO_SIMD\n$implement" | cat - $out/user.c >$out/user_after.c
    x86=
    [ "$(uname -m)" = x86_64 ] && x86=-mfma
    for flags in 'gcc -O0' "gcc -O2 $x86 -ffp-contract=fast" "gcc -Ofast $x86" 'gcc -Os -fwrapv' "${clang:-gcc} -O0" \
        "${clang:-gcc} -O2 $x86 -ffp-contract=off" "${clang:-gcc} -Ofast $x86"; do
        turn 2 || continue
        have ${flags%% *} && have objcopy || continue
        for source in user user_after; do
            # compares the contents of sections, not their addresses: gcc -O0 aligns
            $flags -I. -w -c $out/$source.c -o $out/$source.o && for n in 1 2 3 4; do
                objcopy -O binary -j user_text$n $out/$source.o $out/part && cat $out/part
            done >$out/$source.bin
        done 2>$out/log
        [ -s $out/user.bin ] && cmp $out/user.bin $out/user_after.bin >>$out/log 2>&1
        report $? "$flags: the code after the header is the same as without it"
    done
    # The header turns off no warning for the code after it.
    cat >$out/warn.c <<'TEXT'
extern int user_maybe(int c);
int user_maybe(int c) {
    int x;
    if (c > 3) x = c;
    return x;
}
extern unsigned user_sign(int c);
unsigned user_sign(int c) { return c; }
extern int user_equal(float c);
int user_equal(float c) { return c == 1.0f; }
static int user_forgotten(void) { return 1; }
TEXT
    printf "$implement" | cat - $out/warn.c >$out/warn_after.c
    for flags in 'gcc -O1' "${clang:-gcc} -O0"; do
        have ${flags%% *} || continue
        set -- -Wmaybe-uninitialized -Wsometimes-uninitialized -Wuninitialized -Wsign-conversion \
            -Wfloat-equal -Wunused-function
        case $flags in gcc*) set -- -Wmaybe-uninitialized -Wsign-conversion -Wfloat-equal -Wunused-function ;; esac
        for source in warn warn_after; do
            $flags "$@" -I. -c $out/$source.c -o $out/warn.o 2>&1 | grep -o '\[-W.*\]' | sort >$out/$source.log
        done
        [ "$(sort -u $out/warn.log | wc -l)" = 4 ] && diff $out/warn.log $out/warn_after.log >$out/log
        report $? "$flags: code after the header has its four warnings"
    done
    pragmas() { # pragmas push | pop: how many
        grep -c "^#pragma GCC diagnostic $1\|^#pragma GCC ${1}_options\|^#pragma float_control(.*$1)" kahan_opt.h
    }
    check "every push has its pop" test "$(pragmas push)" = "$(pragmas pop)"
fi
echo "1..$count"
[ $failed = 0 ]
