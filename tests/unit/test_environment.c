/* test_environment.c - the same bits in any floating-point environment of the caller, which finds it as it was: every
   public function, in each rounding mode, with subnormals flushed and (x86-64) with traps, where one operation
   outside of the library's own environment ends the call. Every case runs with numbers that the compiler does not
   know and with constants, none of them exact in binary. Not here: kopt_kahan_add_bf16 and kopt_kahan_add_fp16, which
   run in the caller's environment. Argument "quick": fewer formats. */
#if defined(__x86_64__) && defined(__linux__)
#define _POSIX_C_SOURCE 200809L
#define TRAPS 1
#endif
#define KAHAN_OPT_VMATH
#define KAHAN_OPT_IMPLEMENTATION
#include "../../kahan_opt.h"

#include <fenv.h>
#include <string.h>
#ifdef TRAPS
#include <setjmp.h>
#include <signal.h>
#endif

#include "tap.h"
#include "../bits/begun.h"
#include "reference.h"
#include "inputs.h"

#ifdef __GNUC__
#define NOINLINE __attribute__((__noinline__))
#define INLINE inline __attribute__((__always_inline__))
#else
#define NOINLINE
#define INLINE inline
#endif

enum { N = 300, ROOM = 24 * N + 512 };

static int quick;

/* ---- environments ----------------------------------------------------------------------------------------------- */

enum { FLUSH = 1, TRAP = 2 };

#if defined(__x86_64__) && defined(__GNUC__)
#define CAN_FLUSH 1
static void set_control(int flags) {
    uint32_t csr;
    __asm__ __volatile__("stmxcsr %0" : "=m"(csr));
    csr = (csr & 0x6000u) | (flags & FLUSH ? 0x8040u : 0) | (flags & TRAP ? 0 : 0x1f80u);
    __asm__ __volatile__("ldmxcsr %0" : : "m"(csr));
}

static uint64_t control(void) {
    uint32_t csr;
    uint16_t x87;
    __asm__ __volatile__("stmxcsr %0" : "=m"(csr));
    __asm__ __volatile__("fnstcw %0" : "=m"(x87));
    return (uint64_t)(csr & ~0x3fu) << 16 | x87; /* without what was raised */
}
#elif defined(__aarch64__)
#define CAN_FLUSH 1
static void set_control(int flags) {
    uint64_t fpcr;
    __asm__ __volatile__("mrs %0, fpcr" : "=r"(fpcr));
    fpcr = (fpcr & 0x00c00000u) | (flags & FLUSH ? 0x03080000u : 0); /* FZ, DN, FZ16 */
    __asm__ __volatile__("msr fpcr, %0" : : "r"(fpcr));
}

static uint64_t control(void) {
    uint64_t fpcr;
    __asm__ __volatile__("mrs %0, fpcr" : "=r"(fpcr));
    return fpcr;
}
#elif defined(__arm__) && defined(__ARM_FP)
#define CAN_FLUSH 1
static void set_control(int flags) {
    uint32_t fpscr;
    __asm__ __volatile__("vmrs %0, fpscr" : "=r"(fpscr));
    fpscr = (fpscr & 0x00c00000u) | (flags & FLUSH ? 0x03000000u : 0); /* FZ, DN */
    __asm__ __volatile__("vmsr fpscr, %0" : : "r"(fpscr));
}

static uint64_t control(void) {
    uint32_t fpscr;
    __asm__ __volatile__("vmrs %0, fpscr" : "=r"(fpscr));
    return fpscr & 0x07f79f00u;
}
#else
static void set_control(int flags) { (void)flags; }
static uint64_t control(void) { return (uint64_t)fegetround(); }
#endif

typedef struct environment {
    const char *name;
    int rounding, flags;
} environment;

static const environment environments[] = {
    {"to nearest", FE_TONEAREST, 0},
#ifdef FE_DOWNWARD
    {"downward", FE_DOWNWARD, 0},
#endif
#ifdef FE_UPWARD
    {"upward", FE_UPWARD, 0},
#endif
#ifdef FE_TOWARDZERO
    {"toward zero", FE_TOWARDZERO, 0},
#endif
#ifdef CAN_FLUSH
    {"to nearest, subnormals flushed", FE_TONEAREST, FLUSH},
    {"downward, subnormals flushed", FE_DOWNWARD, FLUSH},
    {"upward, subnormals flushed", FE_UPWARD, FLUSH},
    {"toward zero, subnormals flushed", FE_TOWARDZERO, FLUSH},
#endif
#ifdef TRAPS
    {"downward, with traps", FE_DOWNWARD, TRAP},
    {"upward, with traps", FE_UPWARD, TRAP},
#endif
};
enum { ENVIRONMENTS = sizeof environments / sizeof *environments };

static uint64_t begin_environment(const environment *e) {
    fesetround(e->rounding);
    set_control(e->flags);
    return control();
}

/* ---- data ------------------------------------------------------------------------------------------------------- */

static float source[2][N];     /* fp32 of many magnitudes, some of them subnormal */
static float small[2][N];      /* between 2^-6 and 2^4, for functions that overflow soon */
static uint16_t half[3][2][N]; /* [KOPT_BF16], [KOPT_FP16]: the same kinds */
static unsigned char weight[4 * N], grad[4 * N], copy[4 * N], state[ROOM], residual[4 * N];
static float out[2 * N], out2[N];
static uint64_t hash;

static uint32_t noise_state = 1;
static uint32_t noise(void) { return lcg32(&noise_state) >> 7; }

static size_t width(kopt_format f) { return f == KOPT_F32 ? 4 : 2; }

static void make_data(void) {
    int k, i;
    for (k = 0; k < 2; ++k)
        for (i = 0; i < N; ++i) {
            const uint32_t sign = noise() << 31, fraction = noise() & 0x7fffff;
            const uint32_t exponent = i % 11 == 5 ? 0 : i % 13 == 7 ? 1 + noise() % 30 : 110 + noise() % 20;
            source[k][i] = ref_float(sign | exponent << 23 | fraction);
            small[k][i] = ref_float(sign | (121 + noise() % 10) << 23 | fraction);
            half[KOPT_BF16][k][i] = (uint16_t)((sign | exponent << 23 | fraction) >> 16);
            half[KOPT_FP16][k][i] = (uint16_t)(sign >> 16 | (exponent == 0 ? 0 : 4 + noise() % 16) << 10);
            half[KOPT_FP16][k][i] = (uint16_t)(half[KOPT_FP16][k][i] | (fraction & 0x3ff));
        }
}

static const void *data(kopt_format f, int k) {
    return f == KOPT_F32 ? (const void *)source[k] : (const void *)half[f][k];
}

static void record(const void *p, size_t n) { hash = fnv_bytes(hash, p, n); }

static void record_result(kopt_result r) {
    const uint32_t word = (uint32_t)r;
    record(&word, sizeof word);
}

#define RECORD(x) record(&(x), sizeof(x))

/* ---- cases: nothing here but calls, copies and choices by integers ---------------------------------------------- */

typedef struct values {
    double a, b, c, d; /* about 0.5, 1e-3, 0.4 and 2 */
    float f;
} values;

#define FIRST_VALUES 0.1, 1e-3, 1 / 3.0, 1.7, 0.3f /* as floats above themselves */
#define SECOND_VALUES 0.7, 1.1e-3, 0.45, 2.1, 1.3f /* below */

/* A case that takes v, and the functions that run it. */
#define CASE(name)                                                                        \
    static INLINE void name##_body(values v);                                             \
    static NOINLINE void name##_called(double a, double b, double c, double d, float f) { \
        values v;                                                                         \
        v.a = a, v.b = b, v.c = c, v.d = d, v.f = f;                                      \
        name##_body(v);                                                                   \
    }                                                                                     \
    static NOINLINE void name##_first(void) {                                             \
        const values v = {FIRST_VALUES};                                                  \
        name##_body(v);                                                                   \
    }                                                                                     \
    static NOINLINE void name##_second(void) {                                            \
        const values v = {SECOND_VALUES};                                                 \
        name##_body(v);                                                                   \
    }                                                                                     \
    static INLINE void name##_body(values v)

CASE(conversions_of_one_value) {
    uint32_t u[6];
    float x[2];
    int i;
    for (i = -1; i < N; ++i) {
        const float y = i < 0 ? v.f : source[0][i];
        u[0] = kopt_bf16_from_f32(y), u[1] = kopt_fp16_from_f32(y);
        u[2] = kopt_bf16_from_f32_stochastic(y, 0x1234), u[3] = kopt_fp16_from_f32_stochastic(y, 0x9876);
        u[4] = kopt_random((kopt_random_key){1, 2, 3, 0}, 4, (uint64_t)(i + 1)), u[5] = KOPT_RANDOM_STORE_(u[4], 3);
        x[0] = kopt_f32_from_bf16(half[KOPT_BF16][0][i < 0 ? 0 : i]);
        x[1] = kopt_f32_from_fp16(half[KOPT_FP16][0][i < 0 ? 0 : i]);
        RECORD(u), RECORD(x);
    }
}

static void record_options(const kopt_optimizer *o) {
    RECORD(o->lr), RECORD(o->max_lr), RECORD(o->weight_decay), RECORD(o->lookahead_rate), RECORD(o->beta1);
    RECORD(o->beta2), RECORD(o->beta3), RECORD(o->eps), RECORD(o->momentum), RECORD(o->dampening);
    RECORD(o->grad_scale), RECORD(o->clip), RECORD(o->atan2_a), RECORD(o->atan2_b), RECORD(o->sharpness);
}

static void record_step(const kopt_step *step) {
    const step_scalars begun = scalars_of(step), *const s = &begun;
    RECORD(s->grad_scale), RECORD(s->l2), RECORD(s->weight_decay), RECORD(s->beta1), RECORD(s->gain1);
    RECORD(s->beta2), RECORD(s->gain2), RECORD(s->beta3), RECORD(s->gain3), RECORD(s->extrapolation);
    RECORD(s->third_scale), RECORD(s->slow_scale), RECORD(s->rate), RECORD(s->undecayed_rate), RECORD(s->root_scale),
        RECORD(s->eps), RECORD(s->sharpness);
}

typedef struct mixture {
    kopt_format weight, moment, grad, copy;
    kopt_rounding rounding;
} mixture;
static const mixture mixtures[] = {{KOPT_BF16, KOPT_BF16, KOPT_BF16, KOPT_F32, KOPT_KAHAN},
                                   {KOPT_F32, KOPT_F32, KOPT_F32, KOPT_BF16, KOPT_NEAREST},
                                   {KOPT_BF16, KOPT_Q8, KOPT_BF16, KOPT_FP16, KOPT_COMPACT},
                                   {KOPT_FP16, KOPT_FP16, KOPT_FP16, KOPT_F32, KOPT_KAHAN},
                                   {KOPT_BF16, KOPT_F32, KOPT_F32, KOPT_F32, KOPT_EXACT},
                                   {KOPT_FP16, KOPT_BF16, KOPT_FP16, KOPT_F32, KOPT_STOCHASTIC},
                                   {KOPT_BF16, KOPT_BF16, KOPT_BF16, KOPT_F32, KOPT_FEEDBACK}};

static unsigned char image[512 + sizeof state + sizeof weight], image_again[sizeof image];

static int append_image(void *user, const void *data, size_t size) {
    size_t *at = (size_t *)user;
    memcpy(image_again + *at, data, size);
    *at += size;
    return 0;
}
static int read_image(void *user, uint64_t offset, void *data, size_t size) {
    (void)user;
    memcpy(data, image_again + (size_t)offset, size);
    return 0;
}

static NOINLINE void record_checkpoint(kopt_optimizer *o, const kopt_tensor *t) {
    const size_t size = kopt_save_size(o, t, 1);
    size_t at = 0;
    kopt_optimizer inspected;
    kopt_file file;
    uint64_t count = 0, inspected_size = 0, end = 0;
    kopt_tensor shape;
    file.write = append_image, file.read = read_image, file.user = &at;
    record_result(kopt_save(o, t, 1, image, sizeof image));
    record(image, size);
    record_result(kopt_load(o, t, 1, image, size));
    record_result(kopt_save_to(o, t, 1, &file));
    record(image_again, at);
    record_result(kopt_load_from(o, t, 1, &file));
    memset(&inspected, 0, sizeof inspected);
    record_result(kopt_inspect(image, size, &inspected, &count, &inspected_size));
    memset(&shape, 0, sizeof shape);
    record_result(kopt_inspect_tensor(image, size, &end, &shape));
    RECORD(inspected_size), RECORD(end), RECORD(shape.n);
    RECORD(count), RECORD(inspected.lr), RECORD(inspected.weight_decay), RECORD(inspected.clip), RECORD(o->lr);
}

/* Steps in each mixture of formats, by each of the functions that step, and all that is done with a state block. */
static NOINLINE void record_steps(const kopt_optimizer *options, double rate_scale) {
    const int mixtures_here = quick ? 3 : (int)(sizeof mixtures / sizeof *mixtures);
    int m, k;
    for (m = 0; m < mixtures_here; ++m) {
        kopt_optimizer o = *options;
        const kopt_format format = mixtures[m].weight;
        kopt_tensor t = kopt_tensor_of(weight, format, grad, mixtures[m].grad, N, state, sizeof state);
        kopt_norm norm;
        kopt_step s;
        size_t size;
        o.first_moment_format = o.second_moment_format = mixtures[m].moment, o.rounding = mixtures[m].rounding;
        t.copy = copy, t.copy_format = mixtures[m].copy, t.rate_scale = rate_scale;
        memset(&s, 0, sizeof s);
        memset(state, 0, sizeof state);
        memcpy(grad, data(mixtures[m].grad, 1), N * width(mixtures[m].grad));
        size = kopt_state_size(&o, &t);
        record_result(kopt_state_init(&o, &t, 1, source[0]));
        record_result(kopt_optimizer_step(&o, &t, 1));
        record_result(kopt_step_begin(&s, &o));
        record_step(&s);
        record_result(kopt_step_run(&s, &t, 1));
        record_result(kopt_step_begin(&s, &o));
        if (o.stable) {
            memset(&norm, 0, sizeof norm);
            record_result(kopt_norm_add_stable(&norm, &s, &t, 0, N));
            RECORD(norm);
            t.stable_scale = kopt_norm_stable_scale(&norm, N);
            RECORD(t.stable_scale);
        }
        record_result(kopt_step_range(&s, &t, 1, 0, 256));
        record_result(kopt_step_range(&s, &t, 1, 256, N));
        record_result(kopt_step_begin(&s, &o));
        record_result(kopt_step_range(&s, &t, 1, 0, 100));
        record_result(kopt_step_range(&s, &t, 1, 100, kopt_list_length(&t, 1)));
        t.stable_scale = 0, t.no_decay = 1;
        record_result(kopt_optimizer_step(&o, &t, 1));
        t.no_decay = 0;
        record(weight, N * width(format)), record(copy, N * width(t.copy_format)), record(state, size);
        record_checkpoint(&o, &t);
        {
            kopt_state_arrays arrays;
            record_result(kopt_state_arrays_of(&o, &t, &arrays));
        }
        for (k = KOPT_SLOT_WEIGHT; k <= KOPT_SLOT_FOURTH_MOMENT; ++k) {
            const kopt_result result = kopt_state_read(&o, &t, (kopt_slot)k, out);
            if (result != KOPT_OK) break;
            record(out, sizeof source[0]);
            record_result(kopt_state_write(&o, &t, (kopt_slot)k, k == KOPT_SLOT_WEIGHT ? small[1] : small[0]));
            record(weight, N * width(format)), record(state, size);
        }
        record_result(kopt_state_init(&o, &t, 1, NULL)), record_result(kopt_state_dither(&o, &t, 1));
        record(weight, N * width(format)), record(copy, N * width(t.copy_format)), record(state, size);
    }
}

static void set_common(kopt_optimizer *o, values v) {
    o->weight_decay = v.a, o->grad_scale = v.c, o->clip = v.a, o->max_lr = v.c, o->seed = 7;
}

#define RULE(name, constructed, ...)    \
    CASE(name) {                        \
        kopt_optimizer o = constructed; \
        record_options(&o);             \
        set_common(&o, v);              \
        __VA_ARGS__;                    \
        record_steps(&o, v.c);          \
    }
RULE(sgd, kopt_sgd(v.b, 0), o.weight_decay = v.b)
RULE(momentum, kopt_sgd(v.b, v.a), o.dampening = v.c)
RULE(nesterov, kopt_sgd(v.b, v.c), o.nesterov = 1, o.decay_mode = KOPT_DECAY_FULLY_DECOUPLED)
RULE(adam, kopt_adam(v.b), o.amsgrad = 1)
RULE(adamw, kopt_adamw(v.b), o.beta1 = v.a, o.eps = v.b, o.maximize = 1)
RULE(stable_adamw, kopt_stable_adamw(v.b), o.eps = 1e-6)
RULE(lion, kopt_lion(v.b), o.beta2 = v.c)
RULE(adan, kopt_adan(v.b), o.beta3 = v.a)
RULE(radam, kopt_radam(v.b), o.beta2 = v.a, o.step = 20)
RULE(ranger, kopt_ranger(v.b), o.lookahead = 2, o.lookahead_rate = v.c, o.step = 30)
RULE(ema, kopt_ema(v.a), o.weight_decay = 0)
RULE(ema_of_a_tenth, kopt_ema(v.b), o.weight_decay = 0)
RULE(adam_atan2, kopt_adam_atan2(v.b), o.atan2_a = v.d, o.atan2_b = v.a)
RULE(adam_atan2_outside, kopt_adam_atan2(v.b), o.atan2_outside = 1)
RULE(smooth_lion, kopt_smooth_lion(v.b, v.d), o.beta1 = v.c)

static kopt_norm norm_of(int format) {
    kopt_norm norm, other;
    kopt_tensor t = kopt_tensor_of(weight, KOPT_BF16, grad, (kopt_format)format, N, state, sizeof state);
    memset(&norm, 0, sizeof norm), memset(&other, 0, sizeof other);
    memcpy(grad, data((kopt_format)format, 0), N * width((kopt_format)format));
    record_result(kopt_norm_add(&norm, data((kopt_format)format, 1), (kopt_format)format, N));
    record_result(kopt_norm_add_grads(&other, &t, 1));
    record_result(kopt_norm_add_range(&other, &t, 1, 3, N - 1));
    record_result(kopt_norm_merge(&norm, &other));
    RECORD(norm);
    return norm;
}

CASE(norm) {
    double x;
    int format;
    for (format = 0; format < 3; ++format) {
        const kopt_norm norm = norm_of(format);
        x = kopt_norm_value(&norm), RECORD(x);
        x = kopt_norm_clip(&norm, v.a, v.c), RECORD(x);
        x = kopt_norm_clip(&norm, v.d, v.b), RECORD(x);
        x = kopt_norm_stable_scale(&norm, 77), RECORD(x);
        x = kopt_norm_stable_scale(&norm, UINT64_C(0x123456789abcdef)), RECORD(x);
    }
}

CASE(clip_value) {
    int format;
    for (format = 0; format < 3; ++format) {
        memcpy(grad, data((kopt_format)format, 0), N * width((kopt_format)format));
        record_result(kopt_clip_value(grad, (kopt_format)format, N, v.a));
        RECORD(grad);
        record_result(kopt_clip_value(grad, (kopt_format)format, N, v.b));
        RECORD(grad);
    }
}

static void record_scaler(const kopt_scaler *s) {
    RECORD(s->scale), RECORD(s->minimum), RECORD(s->growth), RECORD(s->backoff);
}

CASE(scaler_update) {
    kopt_scaler s = kopt_scaler_of();
    int i;
    record_scaler(&s);
    s.scale = v.c, s.growth = v.d, s.backoff = v.c, s.interval = 2;
    for (i = 0; i < 9; ++i) {
        record_result(kopt_scaler_update(&s, i == 4 || i == 5));
        record_scaler(&s);
    }
}

static int evaluate(void *user, double scale) {
    (void)user;
    RECORD(scale);
    return 0;
}

CASE(scaler_step) {
    kopt_optimizer o = kopt_adamw(v.b);
    kopt_scaler s = kopt_scaler_of();
    kopt_tensor t = kopt_tensor_of(weight, KOPT_BF16, grad, KOPT_BF16, N, state, sizeof state);
    kopt_closure closure = {evaluate, NULL, NULL};
    int i, skipped;
    t.rate_scale = v.c, o.grad_scale = v.d;
    s.scale = v.c, s.growth = v.d, s.backoff = v.c, s.interval = 1;
    memcpy(grad, half[KOPT_BF16][1], sizeof half[0][0]);
    record_result(kopt_state_init(&o, &t, 1, source[0]));
    for (i = 0; i < 3; ++i) {
        record_result(kopt_scaler_step(&s, &o, &t, 1, v.a, &closure, &skipped));
        record_scaler(&s);
        RECORD(o.grad_scale), RECORD(o.clip);
        record(weight, 2 * N), record(state, kopt_state_size(&o, &t));
    }
}

CASE(scaler_begin) {
    kopt_optimizer all[2] = {kopt_adamw(v.b), kopt_sgd(v.b, v.c)}, *const o = &all[0], was = *o;
    kopt_scaler s = kopt_scaler_of();
    kopt_tensor t = kopt_tensor_of(weight, KOPT_BF16, grad, KOPT_BF16, N, state, sizeof state);
    kopt_norm norm;
    kopt_step steps[2];
    int skipped;
    o->grad_scale = v.d, o->weight_decay = v.a, o->beta1 = v.c;
    s.scale = v.c, s.growth = v.d, s.interval = 1;
    memcpy(grad, half[KOPT_BF16][1], sizeof half[0][0]);
    record_result(kopt_list_set_ids(&t, 1, 3));
    record_result(kopt_state_init(o, &t, 1, source[0]));
    memset(&norm, 0, sizeof norm);
    record_result(kopt_norm_add_grads(&norm, &t, 1));
    record_result(kopt_scaler_begin(&s, steps, o, 1, &norm, v.a, &skipped));
    record_scaler(&s), record_step(steps);
    record_result(kopt_scaler_begin(&s, steps, all, 2, &norm, v.a, &skipped));
    record_scaler(&s), record_step(&steps[0]), record_step(&steps[1]);
    record_result(kopt_inspect(state, sizeof state, &was, NULL, NULL));
    RECORD(was.lr), RECORD(was.weight_decay), RECORD(was.beta1), RECORD(was.beta2);
}

CASE(kahan_add) {
    static float delta[N];
    int format;
    memcpy(delta, source[1], sizeof delta);
    delta[5] = v.f;
    for (format = KOPT_BF16; format <= KOPT_FP16; ++format) {
        memcpy(weight, data((kopt_format)format, 0), 2 * N), memset(residual, 0, 2 * N);
        record_result(kopt_kahan_add(weight, residual, (kopt_format)format, delta, N, (kopt_random_key){1, 2, 3, 4}));
        record_result(
            kopt_kahan_add(weight, residual, (kopt_format)format, source[0], N, (kopt_random_key){1, 3, 3, 4}));
        record(weight, 2 * N), record(residual, 2 * N);
    }
}

CASE(accumulate) {
    static const kopt_rounding roundings[] = {KOPT_KAHAN, KOPT_COMPACT, KOPT_EXACT, KOPT_STOCHASTIC, KOPT_NEAREST};
    int format, k, i;
    for (format = 0; format < 3; ++format)
        for (k = 0; k < 5; ++k) {
            kopt_accumulator a = kopt_accumulator_of(weight, (kopt_format)format, residual, N);
            a.rounding = roundings[k];
            for (i = 0; i < 2; ++i) {
                record_result(kopt_accumulator_add(&a, data((kopt_format)format, 0), (kopt_format)format, v.a));
                record_result(kopt_accumulator_add(&a, source[1], KOPT_F32, v.b));
            }
            record(weight, N * width((kopt_format)format));
            record_result(kopt_accumulator_read(&a, out));
            record(out, sizeof source[0]);
        }
}

CASE(compress) {
    static const kopt_format codes[] = {KOPT_BF16, KOPT_FP16, KOPT_Q8, KOPT_Q1};
    int k, i, sum_format;
    for (k = 0; k < 4; ++k) {
        kopt_compressor c = kopt_compressor_of(codes[k], residual, N), unbiased = kopt_compressor_of(codes[k], NULL, N);
        const size_t size = kopt_format_size(codes[k], N);
        for (i = 0; i < 2; ++i) {
            record_result(kopt_compress(&c, copy, sizeof copy, small[i], KOPT_F32));
            record(copy, size);
            record(residual, 2 * N);
            record_result(kopt_compress(&unbiased, state, sizeof state, half[KOPT_BF16][i], KOPT_BF16));
            record(state, size);
        }
        for (sum_format = 0; sum_format < 3; ++sum_format) {
            memcpy(weight, data((kopt_format)sum_format, 0), N * width((kopt_format)sum_format));
            record_result(kopt_decompress_add(weight, (kopt_format)sum_format, copy, sizeof copy, codes[k], N, v.a));
            record_result(kopt_decompress_add(weight, (kopt_format)sum_format, copy, sizeof copy, codes[k], N, v.d));
            record(weight, N * width((kopt_format)sum_format));
        }
    }
}

CASE(reduce) {
    const void *shards[2];
    int format, to;
    for (format = 0; format < 3; ++format)
        for (to = 0; to < 3; ++to) {
            shards[0] = data((kopt_format)format, 0), shards[1] = data((kopt_format)format, 1);
            record_result(kopt_reduce(weight, (kopt_format)to, shards, 2, (kopt_format)format, N, v.c));
            record(weight, N * width((kopt_format)to));
        }
    for (format = KOPT_BF16; format <= KOPT_FP16; ++format) {
        memcpy(weight, half[format][0], 2 * N);
        memcpy(grad, half[format][1], 2 * N);
        shards[0] = weight, shards[1] = grad;
        record_result(kopt_reduce(weight, (kopt_format)format, shards, 2, (kopt_format)format, N, 1));
        record(weight, 2 * N);
    }
}

CASE(bulk) {
    int format, to, finite;
    float x = v.f;
    for (format = 0; format < 3; ++format)
        for (to = 0; to < 3; ++to) {
            record_result(kopt_convert(weight, (kopt_format)to, data((kopt_format)format, 0), (kopt_format)format, N));
            record(weight, N * width((kopt_format)to));
            record_result(kopt_convert_stochastic(weight, (kopt_format)to, data((kopt_format)format, 0),
                                                  (kopt_format)format, N, (kopt_random_key){1, 2, 3, 4}));
            record(weight, N * width((kopt_format)to));
            finite = kopt_all_finite(weight, (kopt_format)to, N), RECORD(finite);
        }
    record_result(kopt_convert(weight, KOPT_BF16, &x, KOPT_F32, 1));
    record(weight, 2);
}

CASE(vmath) {
    int k;
    (void)v;
    for (k = 0; k < 2; ++k) {
        float(*const x)[N] = k == 0 ? source : small;
        record_result(kopt_vmath_exp(out, x[0], N)), record(out, sizeof source[0]);
        record_result(kopt_vmath_log(out, x[0], N)), record(out, sizeof source[0]);
        record_result(kopt_vmath_tanh(out, x[0], N)), record(out, sizeof source[0]);
        record_result(kopt_vmath_erf(out, x[0], N)), record(out, sizeof source[0]);
        record_result(kopt_vmath_erfc(out, x[0], N)), record(out, sizeof source[0]);
        record_result(kopt_vmath_atan2(out, x[0], x[1], N)), record(out, sizeof source[0]);
        record_result(kopt_vmath_sincospi(out, out2, x[0], N)), record(out, sizeof source[0]), RECORD(out2);
    }
}

CASE(map) {
    int f, format;
    (void)v;
    for (f = KOPT_FN_EXP; f <= KOPT_FN_SOFTPLUS; ++f)
        for (format = KOPT_BF16; format <= KOPT_FP16; ++format) {
            record_result(kopt_map(weight, half[format][0], (kopt_format)format, N, (kopt_function)f));
            record(weight, 2 * N);
            record_result(
                kopt_map_backward(weight, half[format][1], half[format][0], (kopt_format)format, N, (kopt_function)f));
            record(weight, 2 * N);
        }
}

CASE(random_numbers) {
    int format;
    for (format = 0; format < 3; ++format) {
        const kopt_format to = (kopt_format)format;
        const size_t size = N * width(to);
        record_result(kopt_normal(weight, to, N, v.a, v.c, (kopt_random_key){1, 2, 3, 4})), record(weight, size);
        record_result(kopt_uniform(weight, to, N, v.b, v.a, (kopt_random_key){1, 2, 3, 4})), record(weight, size);
        record_result(kopt_uniform(weight, to, N, v.c, v.d, (kopt_random_key){1, 2, 3, 4})), record(weight, size);
    }
}

CASE(cosine) {
    static const uint32_t steps[][3] = {{3, 0, 90},   {3, 17, 90},  {16, 17, 90},
                                        {50, 17, 90}, {88, 17, 90}, {90, 17, 90}};
    double x;
    int k;
    for (k = 0; k < 6; ++k) {
        x = kopt_cosine_lr(steps[k][0], steps[k][1], steps[k][2], v.b, v.a), RECORD(x);
        x = kopt_cosine_lr(steps[k][0], steps[k][1], steps[k][2], v.d, v.c), RECORD(x);
        x = kopt_cosine_lr(steps[k][0] << 25, steps[k][1] << 25, steps[k][2] << 25, v.c, 0), RECORD(x);
    }
}

CASE(names) {
    const kopt_optimizer o = kopt_adamw(v.b);
    kopt_optimizer made;
    const kopt_tensor t = kopt_tensor_of(weight, KOPT_BF16, NULL, KOPT_F32, N, NULL, 0);
    const uint32_t u[] = {(uint32_t)kopt_version(), (uint32_t)*kopt_result_string(KOPT_ERROR_STEP),
                          (uint32_t)*kopt_explain(&o, &t, 1), kopt_isa_current() < KOPT_ISA_AUTO,
                          (uint32_t)kopt_isa_usable(KOPT_ISA_SCALAR)};
    RECORD(u);
    record_result(kopt_optimizer_init(&made, KOPT_RULE_ADAM, 1, KOPT_VERSION, sizeof made, sizeof t));
    RECORD(made.lr), RECORD(made.beta1), RECORD(made.eps);
}

/* ---- all cases in all environments ------------------------------------------------------------------------------ */

typedef struct test_case {
    const char *name;
    void (*called)(double, double, double, double, float);
    void (*constant[2])(void);
} test_case;
#define ENTRY(name)                                           \
    {                                                         \
        #name, name##_called, { name##_first, name##_second } \
    }
static const test_case cases[] = {ENTRY(conversions_of_one_value),
                                  ENTRY(sgd),
                                  ENTRY(momentum),
                                  ENTRY(nesterov),
                                  ENTRY(adam),
                                  ENTRY(adamw),
                                  ENTRY(stable_adamw),
                                  ENTRY(lion),
                                  ENTRY(adan),
                                  ENTRY(radam),
                                  ENTRY(ranger),
                                  ENTRY(ema),
                                  ENTRY(ema_of_a_tenth),
                                  ENTRY(adam_atan2),
                                  ENTRY(adam_atan2_outside),
                                  ENTRY(smooth_lion),
                                  ENTRY(norm),
                                  ENTRY(clip_value),
                                  ENTRY(scaler_update),
                                  ENTRY(scaler_step),
                                  ENTRY(scaler_begin),
                                  ENTRY(kahan_add),
                                  ENTRY(accumulate),
                                  ENTRY(compress),
                                  ENTRY(reduce),
                                  ENTRY(bulk),
                                  ENTRY(vmath),
                                  ENTRY(map),
                                  ENTRY(random_numbers),
                                  ENTRY(cosine),
                                  ENTRY(names)};
enum { CASES = sizeof cases / sizeof *cases, WAYS = 4 };
static const volatile double value[2][4] = {{0.1, 1e-3, 1 / 3.0, 1.7}, {0.7, 1.1e-3, 0.45, 2.1}};
static const volatile float float_value[2] = {0.3f, 1.3f};

static void run(const test_case *c, int way) {
    const int k = way & 1;
    if (way < 2)
        (c->called)(value[k][0], value[k][1], value[k][2], value[k][3], float_value[k]);
    else
        (c->constant[k])();
}

#ifdef TRAPS
static sigjmp_buf place;
static void trapped(int signal_number) {
    (void)signal_number;
    siglongjmp(place, 1);
}
#endif

/* The hash of all that a case leaves. *moved: the environment is not as it was. */
static NOINLINE uint64_t hash_in(const environment *e, const test_case *c, int way, int *moved) {
    uint64_t before, after;
    memset(weight, 0, sizeof weight), memset(grad, 0, sizeof grad), memset(copy, 0, sizeof copy);
    memset(state, 0, sizeof state), memset(residual, 0, sizeof residual);
    hash = FNV_START;
#ifdef TRAPS
    if (sigsetjmp(place, 1) != 0) {
        begin_environment(&environments[0]);
        return 0;
    }
#endif
    before = begin_environment(e);
    run(c, way);
    after = control();
    begin_environment(&environments[0]);
    *moved += before != after;
    return hash;
}

int main(int argc, char **argv) {
    static uint64_t want[CASES][WAYS];
    int isa, e, c, way, first = 1;
    quick = argc > 1 && !strcmp(argv[1], "quick");
    make_data();
#ifdef TRAPS
    {
        struct sigaction action;
        memset(&action, 0, sizeof action);
        action.sa_handler = trapped;
        sigaction(SIGFPE, &action, NULL);
    }
#endif
    FOR_EACH_ISA(isa) {
        for (e = 0; e < ENVIRONMENTS; ++e, first = 0) {
            int moved = 0, other = 0, seen = 0;
            char list[1000] = "";
            for (c = 0; c < CASES; ++c) {
                int bad = 0;
                for (way = 0; way < WAYS; ++way) {
                    const uint64_t got = hash_in(&environments[e], &cases[c], way, &moved);
                    if (first) want[c][way] = got;
                    bad += got != want[c][way & 1]; /* of unknown numbers, in the default environment, scalar */
                }
                if (bad && strlen(list) + strlen(cases[c].name) + 2 < sizeof list)
                    strcat(strcat(list, " "), cases[c].name);
                other += bad;
                seen += want[c][0] != want[c][1];
            }
            ok(!other && !moved, "%s, %s: %d of %d runs with other bits, environment changed by %d%s",
               kopt_isa_name((kopt_isa)isa), environments[e].name, other, CASES * WAYS, moved, list);
            if (first) ok(seen == CASES - 3, "... %d of %d cases depend on the numbers", seen, CASES);
        }
    }
    return done();
}
