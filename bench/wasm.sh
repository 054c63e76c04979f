#!/bin/sh
# WebAssembly without and with its vectors (-msimd128), in one process of node: the time of steps and conversions, the
# stack, and the size of a small trainer. `./build.sh bench wasm [ROUNDS]`, or CLANG=clang-19 sh bench/wasm.sh [ROUNDS].
set -eu
cd "$(dirname "$0")/.."
out=build/bench
mkdir -p $out
clang=${CLANG:-clang-19}
for tool in "$clang" node; do
    command -v "$tool" >/dev/null || { echo "bench/wasm.sh needs $tool (./build.sh setup installs it)" >&2; exit 2; }
done
build() { # build SOURCE PROGRAM FLAG...
    source=$1 program=$2
    shift 2
    "$clang" --target=wasm32 -ffreestanding -nostdlib -fuse-ld=lld -Wl,--no-entry,--no-check-features,--stack-first \
        -Wl,--export=__stack_pointer -I. "$@" -o "$program" "$source"
}
build bench/wasm.c $out/wasm_scalar.wasm -O2
build bench/wasm.c $out/wasm_simd128.wasm -O2 -msimd128
node bench/wasm.js $out/wasm_scalar.wasm $out/wasm_simd128.wasm "$@"

cat >$out/trainer.c <<'C'
#define KAHAN_OPT_IMPLEMENTATION
#include "kahan_opt.h"
static uint16_t weight[1024], grad[1024];
static uint32_t state[KOPT_STATE_BYTES(1024, 6) / 4 + 1];
static kopt_optimizer opt;
static kopt_tensor tensor;
__attribute__((export_name("begin"))) int begin(const float *weights);
int begin(const float *weights) {
    opt = kopt_adamw(1e-3);
    tensor = KOPT_TENSOR(KOPT_BF16, weight, grad, 1024, state, sizeof state);
    return (int)kopt_state_init(&opt, &tensor, 1, weights);
}
__attribute__((export_name("step"))) int step(void);
int step(void) { return (int)kopt_optimizer_step(&opt, &tensor, 1); }
void *memcpy(void *to, const void *from, size_t n) {
    size_t i;
    for (i = 0; i < n; i++) ((volatile char *)to)[i] = ((const char *)from)[i];
    return to;
}
void *memset(void *to, int octet, size_t n) {
    size_t i;
    for (i = 0; i < n; i++) ((volatile char *)to)[i] = (char)octet;
    return to;
}
C
printf '\n| bytes of a trainer, bf16 AdamW | scalar | simd128 |\n|---|---|---|\n'
bytes() { # bytes FLAG...
    build $out/trainer.c $out/trainer.wasm -Wl,--strip-all -Wno-everything "$@"
    wc -c <$out/trainer.wasm
}
for flags in -O2 -Os; do
    echo "| $flags | $(bytes $flags) | $(bytes $flags -msimd128) |"
done
