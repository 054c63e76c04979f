/* wasm.c - what the WebAssembly benchmark (bench/wasm.sh) measures: steps, conversions and the norm of N values in
   cache. Compiled twice, without and with -msimd128, and run by bench/wasm.js. Built as a program of another machine
   (bench/wasm.sh says how), `bench/wasm KIND COUNT` runs one kind COUNT times, to count instructions. No libc. */
#define KAHAN_OPT_IMPLEMENTATION
#include "../kahan_opt.h"

enum { N = 8192 };

static uint32_t weight[N], grad[N];
static uint64_t state[5 * N / 2];
static kopt_optimizer opt;
static kopt_tensor tensor;
static kopt_norm norm;

/* clang-format off */
static const struct kind {
    const char *name;
    char what; /* a letter of prepare() */
    kopt_format weight, grad, moment;
    kopt_rounding rounding;
} kinds[] = {
    {"AdamW, bf16 Kahan",                       'w', KOPT_BF16, KOPT_BF16, KOPT_BF16, KOPT_KAHAN},
    {"AdamW, bf16 stochastic",                  'w', KOPT_BF16, KOPT_BF16, KOPT_BF16, KOPT_STOCHASTIC},
    {"AdamW, bf16 compact",                     'w', KOPT_BF16, KOPT_BF16, KOPT_BF16, KOPT_COMPACT},
    {"AdamW, bf16 Kahan, 8-bit moments",        'w', KOPT_BF16, KOPT_BF16, KOPT_Q8,   KOPT_KAHAN},
    {"AdamW, fp16 Kahan",                       'w', KOPT_FP16, KOPT_FP16, KOPT_FP16, KOPT_KAHAN},
    {"AdamW, fp32",                             'w', KOPT_F32,  KOPT_F32,  KOPT_F32,  KOPT_NEAREST},
    {"Lion, bf16 Kahan",                        'l', KOPT_BF16, KOPT_BF16, KOPT_BF16, KOPT_KAHAN},
    {"SGD with momentum, bf16 Kahan",           's', KOPT_BF16, KOPT_BF16, KOPT_BF16, KOPT_KAHAN},
    {"SGD with momentum, bf16 stochastic",      's', KOPT_BF16, KOPT_BF16, KOPT_BF16, KOPT_STOCHASTIC},
    {"fp32 to bf16, to nearest",                'c', KOPT_BF16, KOPT_F32,  KOPT_F32,  KOPT_NEAREST},
    {"fp32 to bf16, stochastic",                'c', KOPT_BF16, KOPT_F32,  KOPT_F32,  KOPT_STOCHASTIC},
    {"fp32 to fp16, to nearest",                'c', KOPT_FP16, KOPT_F32,  KOPT_F32,  KOPT_NEAREST},
    {"fp16 to fp32",                            'c', KOPT_F32,  KOPT_FP16, KOPT_F32,  KOPT_NEAREST},
    {"norm, bf16",                              'n', KOPT_F32,  KOPT_BF16, KOPT_F32,  KOPT_NEAREST},
    {"norm, fp32",                              'n', KOPT_F32,  KOPT_F32,  KOPT_F32,  KOPT_NEAREST},
    {"all finite, bf16",                        'f', KOPT_F32,  KOPT_BF16, KOPT_F32,  KOPT_NEAREST}};
/* clang-format on */
enum { KINDS = sizeof kinds / sizeof kinds[0] };

#ifdef __wasm__
#define EXPORT(function) __attribute__((export_name(#function)))
void *memcpy(void *to, const void *from, size_t size);
void *memcpy(void *to, const void *from, size_t size) { /* the assignments of structs below */
    volatile unsigned char *p = (unsigned char *)to;
    size_t i;
    for (i = 0; i < size; i++) p[i] = ((const unsigned char *)from)[i];
    return to;
}
void *memset(void *to, int octet, size_t size);
void *memset(void *to, int octet, size_t size) {
    volatile unsigned char *p = (unsigned char *)to;
    size_t i;
    for (i = 0; i < size; i++) p[i] = (unsigned char)octet;
    return to;
}
#else
#define EXPORT(function)
#endif

EXPORT(name) const char *name(int kind);
const char *name(int kind) { return kind < KINDS ? kinds[kind].name : (const char *)0; }

/* The name of the instruction set. */
EXPORT(path) const char *path(void);
const char *path(void) { return kopt_isa_name(kopt_isa_current()); }

/* Values of both signs in several binades below 1. */
static void fill(void *to, kopt_format format, uint32_t seed) {
    uint32_t i;
    for (i = 0; i < N; i++) {
        const uint32_t bits = (i * 2654435761u) ^ seed;
        const float x = ((float)(bits >> 8) * 0x1p-24f - 0.5f) * ((bits & 16u) != 0 ? 0.125f : 1.0f);
        if (format == KOPT_F32) {
            ((float *)to)[i] = x;
        } else {
            ((uint16_t *)to)[i] = format == KOPT_BF16 ? kopt_bf16_from_f32(x) : kopt_fp16_from_f32(x);
        }
    }
}

/* Makes the arrays of a kind ready. 0: refused. */
EXPORT(prepare) int prepare(int kind);
int prepare(int kind) {
    const struct kind *const k = &kinds[kind];
    static const kopt_norm zero = {0};
    norm = zero;
    fill(grad, k->grad, 0x55u);
    if (k->what == 'c' || k->what == 'n' || k->what == 'f') return 1;
    fill(weight, k->weight, 0);
    opt = k->what == 'w' ? kopt_adamw(1e-3) : k->what == 'l' ? kopt_lion(1e-4) : kopt_sgd(1e-2, 0.9);
    opt.rounding = k->rounding;
    opt.first_moment_format = opt.second_moment_format = k->moment;
    tensor = kopt_tensor_of(weight, k->weight, grad, k->grad, N, state, sizeof state);
    return kopt_state_init(&opt, &tensor, 1, 0) == KOPT_OK;
}

/* Runs the kind that is prepared `count` times. 0: refused. */
EXPORT(run) int run(int kind, int count);
int run(int kind, int count) {
    const struct kind *const k = &kinds[kind];
    int good = 1;
    for (; count > 0 && good; count--) {
        kopt_random_key key = {0};
        key.seed = (uint64_t)count;
        switch (k->what) {
        case 'c':
            good = (k->rounding == KOPT_STOCHASTIC ? kopt_convert_stochastic(weight, k->weight, grad, k->grad, N, key)
                                                   : kopt_convert(weight, k->weight, grad, k->grad, N)) == KOPT_OK;
            break;
        case 'n': good = kopt_norm_add(&norm, grad, k->grad, N) == KOPT_OK; break;
        case 'f': good = kopt_all_finite(grad, k->grad, N); break;
        default: good = kopt_optimizer_step(&opt, &tensor, 1) == KOPT_OK;
        }
    }
    return good;
}

/* A hash of all that the kinds write. */
EXPORT(hash) uint32_t hash(void);
uint32_t hash(void) {
    uint32_t h = 2166136261u;
    size_t i;
    for (i = 0; i < N; i++) h = (h ^ weight[i]) * 16777619u;
    for (i = 0; i < sizeof state / sizeof state[0]; i++) {
        h = (h ^ (uint32_t)state[i]) * 16777619u;
        h = (h ^ (uint32_t)(state[i] >> 32)) * 16777619u;
    }
    for (i = 0; i < 20; i++) h = (h ^ (uint32_t)norm.digit[i]) * 16777619u;
    return h;
}

#ifndef __wasm__
int main(int arguments, char **argument) {
    const int kind = arguments > 1 ? argument[1][0] - 'a' : 0, count = arguments > 2 ? argument[2][0] - '0' : 1;
    if (arguments > 3 && kopt_isa_force(KOPT_ISA_SCALAR) != KOPT_OK) return 1;
    return !(kind >= 0 && kind < KINDS && prepare(kind) && run(kind, count));
}
#endif
