/* stack.c - how much stack the public functions use. Each call runs on a stack of its own that was painted before; what
   it takes is from an empty call's frame down to the lowest word that has changed. All rules, formats, roundings and
   tools, for each instruction set, against the figures of the header's contract, point 6. stack.sh builds it with
   several compilers. Prints TAP and, as comments, what used most. */
#define _DEFAULT_SOURCE 1 /* MAP_ANONYMOUS, ucontext */
#define KAHAN_OPT_IMPLEMENTATION
#include "../../kahan_opt.h"

#include "../unit/tap.h"
#include "../unit/inputs.h"

#ifdef __linux__
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

/* ---- a painted stack -------------------------------------------------------------------------------------------- */

enum { ROOM = 1 << 16 };
static const uint64_t paint = 0xA5C3968778F00FE1u;
static uint64_t *stack;
static ucontext_t here, there;
static void (*volatile call)(void);
static uintptr_t bottom; /* of the frame of an empty call */

static void nothing(void) {
    volatile unsigned char local = 0;
    bottom = (uintptr_t)&local + local;
}

static void enter(void) { call(); }

/* Bytes of the stack down to the lowest word that f changes. */
static size_t depth(void (*f)(void)) {
    size_t i;
    size_t lowest;
    call = f;
    if (getcontext(&there)) abort();
    there.uc_stack.ss_sp = stack;
    there.uc_stack.ss_size = ROOM;
    there.uc_link = &here;
    makecontext(&there, enter, 0);
    if (swapcontext(&here, &there)) abort();
    for (i = 0; i < ROOM / 8 && stack[i] == paint; ++i) {
    }
    lowest = 8 * i;
    for (; i < ROOM / 8; ++i) stack[i] = paint;
    return ROOM - lowest;
}

static int reserve(void) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    unsigned char *p = mmap(NULL, ROOM + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    size_t i;
    if (p == MAP_FAILED || mprotect(p, page, PROT_NONE)) return 0;
    stack = (uint64_t *)(void *)(p + page);
    for (i = 0; i < ROOM / 8; ++i) stack[i] = paint;
    return 1;
}

/* ---- what is stated --------------------------------------------------------------------------------------------- */

/* Classes of calls: all but the others; steps with moments in 8 bits; what only KAHAN_OPT_VMATH has. */
enum { PLAIN, CODED, VECTOR_MATH, CLASSES };
static const char *const class_name[CLASSES] = {"all else", "moments in 8 bits", "vector mathematics"};

/* Without vectors in the build; with them, of the scalar kernels, which no machine takes by itself, and of others. */
static size_t limit_of(kopt_isa isa, int class) {
#ifdef KAHAN_OPT_NO_SIMD
    const size_t plain = 3072;
#else
    const size_t plain = isa == KOPT_ISA_SCALAR ? 3584 : 12288;
#endif
#if defined(__clang__) && !defined(__OPTIMIZE__)
    if (isa != KOPT_ISA_SCALAR) return class == VECTOR_MATH ? 49152 : 32768;
    return class == PLAIN ? 4096 : 9216;
#endif
    (void)isa;
    return class == PLAIN ? plain : plain + 4096;
}

static size_t most[CLASSES], whole_calls;
static char who[CLASSES][200];

static void measure(int class, const char *name, void (*f)(void), const char *options) {
    const size_t top = (size_t)((uintptr_t)stack + ROOM - bottom), used = depth(f);
    const size_t net = used > top ? used - top : 0;
    ++whole_calls;
    if (net > most[class]) {
        most[class] = net;
        snprintf(who[class], sizeof who[class], "%s%s%s", name, *options ? ", " : "", options);
    }
}

/* ---- what the calls work on ------------------------------------------------------------------------------------- */

enum { N = 517 };
static uint32_t weight_room[N + 16], grad_room[N + 16], copy_room[N + 16], float_room[N + 16], slow_room[N + 16];
static unsigned char state_room[64 + 24 * N + 512], code_room[8 * N], image[sizeof state_room + 4 * N + 256];
static kopt_optimizer opt;
static kopt_tensor t;
static kopt_step step;
static kopt_counts counts;
static kopt_norm norm, other_norm;
static kopt_result result;
static size_t range_begin, range_end;
static volatile double number;
static kopt_slot stream;
static kopt_state_arrays arrays, found;
static int wrong;

static uint32_t noise_state = 1;
static uint32_t below(uint32_t n) { return scaled_to(lcg32(&noise_state), n); }

/* n numbers around 1, with a few that no fast kernel takes. */
static void fill(void *array, kopt_format format, size_t n, int special) {
    size_t i;
    for (i = 0; i < n; ++i) {
        uint32_t u = (120u + below(10)) << 23 | below(1u << 23) | below(2) << 31;
        float x;
        if (special && i % 300 == 150) u = i % 600 == 150 ? 0x7f800000u : 0x7fc00000u;
        memcpy(&x, &u, 4);
        if (format == KOPT_F32) ((uint32_t *)array)[i] = u;
        if (format == KOPT_BF16) ((uint16_t *)array)[i] = kopt_bf16_from_f32(x);
        if (format == KOPT_FP16) ((uint16_t *)array)[i] = kopt_fp16_from_f32(x);
    }
}

static void must(int good, const char *name, const char *options) {
    if (good) return;
    if (wrong++ < 10) note("%s failed: %s (%s)", name, kopt_result_string(result), options);
}

/* Measures a call that has to succeed. */
static void take(int class, const char *name, void (*f)(void), const char *options) {
    result = KOPT_OK;
    measure(class, name, f, options);
    must(result == KOPT_OK, name, options);
}

/* ---- steps ------------------------------------------------------------------------------------------------------ */

static void run_begin(void) { result = kopt_step_begin(&step, &opt); }
static void run_step(void) { result = kopt_step_run(&step, &t, 1); }
static void run_range(void) { result = kopt_step_range(&step, &t, 1, range_begin, range_end); }
static void run_measure(void) { result = kopt_norm_add_stable(&norm, &step, &t, range_begin, range_end); }
static void run_list(void) { result = kopt_optimizer_step(&opt, &t, 1); }
static void run_init(void) { result = kopt_state_init(&opt, &t, 1, (const float *)(const void *)float_room); }
static void run_read(void) { result = kopt_state_read(&opt, &t, stream, (float *)(void *)float_room); }
static void run_write(void) { result = kopt_state_write(&opt, &t, stream, (const float *)(const void *)float_room); }
static void run_save(void) { result = kopt_save(&opt, &t, 1, image, sizeof image); }
static void run_arrays_of(void) { result = kopt_state_arrays_of(&opt, &t, &found); }
static void run_explain(void) { number = kopt_explain(&opt, &t, 1) != NULL; }
static void run_dither(void) {
    result = kopt_state_init(&opt, &t, 1, NULL);
    if (result == KOPT_OK) result = kopt_state_dither(&opt, &t, 1);
}
static void run_load(void) { result = kopt_load(&opt, &t, 1, image, sizeof image); }

/* What is there before each call: the state block stays. */
static void refill(int special) {
    fill(weight_room, t.weight_format, t.n, 0);
    fill(grad_room, t.grad_format, t.n, special);
}

static void run_all(int class, const char *options, int states) {
    const int moments = kopt_moments_(&opt);
    t.state_size = kopt_state_size(&opt, &t);
    t.state = state_room;
    if (t.arrays != NULL) { /* where they would be in the block */
        t.arrays = NULL;
        run_init();
        result = kopt_state_arrays_of(&opt, &t, &arrays);
        must(result == KOPT_OK, "kopt_state_arrays_of", options);
        t.arrays = &arrays;
        t.state = NULL;
        t.state_size = 0;
    }
    fill(float_room, KOPT_F32, t.n, 0);
    if (states)
        take(class, "kopt_state_init", run_init, options);
    else
        run_init();
    if (states) {
        for (stream = KOPT_SLOT_WEIGHT; (int)stream <= moments; stream = (kopt_slot)(stream + 1)) {
            take(class, "kopt_state_read", run_read, options);
            if ((opt.first_moment_format != KOPT_FP16 && opt.second_moment_format != KOPT_FP16) ||
                stream == KOPT_SLOT_WEIGHT)
                fill(float_room, KOPT_F32, t.n, 0);
            take(class, "kopt_state_write", run_write, options);
        }
#ifndef KAHAN_OPT_NO_SIMD
        if (kopt_isa_current() != KOPT_ISA_SCALAR) /* in a build with vectors their buffers are larger */
#endif
        {
            take(class, "kopt_save", run_save, options);
            take(class, "kopt_load", run_load, options);
        }
        take(class, "kopt_explain", run_explain, options);
        take(class, "kopt_state_arrays_of", run_arrays_of, options);
        if (opt.rule != KOPT_RULE_EMA && (t.weight_format == KOPT_F32 || opt.rounding != KOPT_NEAREST))
            take(class, "kopt_state_dither", run_dither, options);
        run_init();
    }
    refill(1);
    take(class, "kopt_optimizer_step", run_list, options);
    refill(0);
    if (opt.rule == KOPT_RULE_RANGER) opt.step = 5; /* the next one ends in Lookahead */
    take(class, "kopt_step_begin", run_begin, options);
    take(class, "kopt_step_run", run_step, options);
    range_begin = t.n > 512 ? 256 : 0;
    range_end = t.n;
    take(class, "kopt_step_begin", run_begin, options);
    refill(1);
    t.stable_scale = opt.stable ? 1 : 0;
    take(class, "kopt_step_range", run_range, options);
    t.stable_scale = 0;
    if (opt.rule == KOPT_RULE_ADAM && opt.stable) take(class, "kopt_norm_add_stable", run_measure, options);
    run_init();
}

static void formats(int rule, const char *name) {
    static const kopt_format copy_formats[] = {KOPT_F32, KOPT_BF16, KOPT_FP16};
    static const size_t lengths[] = {N, N - 252, 100, 3};
    char options[160];
    const int count = kopt_moments_(&opt), pairs = count == 0 ? 1 : count == 1 ? 4 : 16;
    int weight, rounding, moment, way, grad, class, states;
    size_t k;
    for (weight = 0; weight < 3; ++weight)
        for (rounding = 0; rounding < (weight == KOPT_F32 ? 1 : 5); ++rounding)
            for (moment = 0; moment < pairs; ++moment)
                for (way = 0; way < 2; ++way)
                    for (grad = 0; grad < 3; ++grad) {
                        t.weight_format = (kopt_format)weight;
                        opt.rounding = (kopt_rounding)rounding;
                        opt.first_moment_format = (kopt_format)(moment % 4);
                        opt.second_moment_format = (kopt_format)((moment % 4 + moment / 4) % 4);
                        opt.moment_rounding = opt.residual_rounding = (kopt_rounding)way;
                        class = count > 0 && opt.first_moment_format == KOPT_Q8 ? CODED : PLAIN;
                        if (count > 1 && opt.second_moment_format == KOPT_Q8) class = CODED;
                        if (rule > KOPT_RULE_EMA) class = VECTOR_MATH;
                        if (moment >= 4 && (way + grad + moment + rounding) % 3) continue; /* a third of those mixed */
                        for (k = 0; k < 6; ++k) { /* first as the fast kernels want it, then not; in arrays */
                            t.n = lengths[k % 4];
                            t.arrays = k < 4 ? NULL : &arrays;
                            t.grad_format = (kopt_format)grad;
                            t.first_index = k % 4 == 0 ? 0 : 256u * below(9) + (k % 4 == 1 ? 0 : below(9));
                            t.copy = NULL;
                            t.counts = NULL;
                            opt.zero_grad = opt.maximize = opt.moments_only = 0;
                            if (k % 4 != 0) {
                                if (below(2)) t.copy = copy_room;
                                if (below(2)) t.counts = &counts;
                                t.copy_format = copy_formats[below(3)];
                                opt.zero_grad = rule != KOPT_RULE_EMA && below(2);
                                if (opt.stable == 0 && rule != KOPT_RULE_EMA) opt.moments_only = !below(4);
                            }
                            opt.step = 0;
                            states = grad == 0 && way == 0 && k % 4 == 0;
                            snprintf(options, sizeof options,
                                     "%s, weights %d, rounding %d, moments %d %d, stochastic %d, gradient %d, n %d, "
                                     "first %d%s%s%s",
                                     name, weight, rounding, (int)opt.first_moment_format,
                                     (int)opt.second_moment_format, way, grad, (int)t.n, (int)t.first_index,
                                     t.copy ? ", copy" : "", t.counts ? ", counts" : "", t.arrays ? ", arrays" : "");
                            run_all(class, options, states);
                        }
                    }
}

static void steps(void) {
    memset(&t, 0, sizeof t);
    t = kopt_tensor_of(weight_room, KOPT_BF16, grad_room, KOPT_BF16, N, state_room, sizeof state_room);
    opt = kopt_sgd(0.01, 0), formats(KOPT_RULE_SGD, "SGD");
    opt = kopt_sgd(0.01, 0.9), opt.weight_decay = 0.01, formats(KOPT_RULE_SGD, "momentum");
    opt = kopt_sgd(0.01, 0.9), opt.nesterov = 1, formats(KOPT_RULE_SGD, "Nesterov");
    opt = kopt_adam(0.01), opt.weight_decay = 0.01, formats(KOPT_RULE_ADAM, "Adam");
    opt = kopt_adamw(0.01), formats(KOPT_RULE_ADAM, "AdamW");
    opt = kopt_adamw(0.01), opt.amsgrad = 1, formats(KOPT_RULE_ADAM, "AMSGrad");
    opt = kopt_stable_adamw(0.01), formats(KOPT_RULE_ADAM, "StableAdamW");
    opt = kopt_lion(0.01), formats(KOPT_RULE_LION, "Lion");
    opt = kopt_adan(0.01), formats(KOPT_RULE_ADAN, "Adan");
    opt = kopt_radam(0.01), formats(KOPT_RULE_RADAM, "RAdam");
    opt = kopt_ranger(0.01), formats(KOPT_RULE_RANGER, "Ranger");
    opt = kopt_ema(0.99), formats(KOPT_RULE_EMA, "EMA");
#ifdef KAHAN_OPT_VMATH
    opt = kopt_adam_atan2(0.01), formats(KOPT_RULE_ADAM_ATAN2, "Adam-atan2");
    opt = kopt_smooth_lion(0.01, 2), formats(KOPT_RULE_ADAM_ATAN2, "smooth Lion");
#endif
}

/* ---- tools ------------------------------------------------------------------------------------------------------ */

static struct {
    void *dst;
    const void *src;
    kopt_format to, from;
    size_t n;
    kopt_rounding rounding;
} bulk;
static kopt_accumulator sums;
static kopt_compressor codec;
static kopt_scaler scaler;
static volatile uint32_t random_number;
static const void *shards[3];

static void run_convert(void) { result = kopt_convert(bulk.dst, bulk.to, bulk.src, bulk.from, bulk.n); }
static void run_stochastic(void) {
    result = kopt_convert_stochastic(bulk.dst, bulk.to, bulk.src, bulk.from, bulk.n, (kopt_random_key){7, 3, 1, 5});
}
static void run_all_finite(void) { number = kopt_all_finite(bulk.src, bulk.from, bulk.n); }
static void run_norm(void) { result = kopt_norm_add(&norm, bulk.src, bulk.from, bulk.n); }
static void run_norm_grads(void) { result = kopt_norm_add_grads(&norm, &t, 1); }
static void run_norm_range(void) { result = kopt_norm_add_range(&norm, &t, 1, 1, t.n); }
static void run_merge(void) { result = kopt_norm_merge(&norm, &other_norm); }
static void run_value(void) { number = kopt_norm_value(&norm); }
static void run_norm_clip(void) { number = kopt_norm_clip(&norm, 1, 1); }
static void run_cosine(void) { number = kopt_cosine_lr(300, 100, 1000, 1e-3, 1e-4); }
static void run_stable_scale(void) { number = kopt_norm_stable_scale(&norm, N); }
static void run_clip(void) { result = kopt_clip_value(bulk.dst, bulk.to, bulk.n, 0.25); }
static void run_scaler(void) { result = kopt_scaler_step(&scaler, &opt, &t, 1, 1.0, NULL, NULL); }
static void run_update(void) { result = kopt_scaler_update(&scaler, 1); }
static void run_accumulate(void) { result = kopt_accumulator_add(&sums, bulk.src, bulk.from, 0.5); }
static void run_kahan_add(void) {
    result = kopt_kahan_add(copy_room, code_room, bulk.to, (const float *)(const void *)float_room, bulk.n,
                            (kopt_random_key){7, 3, 1, 5});
}
static void run_accumulator_read(void) { result = kopt_accumulator_read(&sums, (float *)(void *)float_room); }
static void run_compress(void) { result = kopt_compress(&codec, code_room, sizeof code_room, bulk.src, bulk.from); }
static void run_decompress(void) {
    result = kopt_decompress_add(bulk.dst, bulk.to, code_room, sizeof code_room, codec.code, bulk.n, 0.5);
}
static void run_reduce(void) { result = kopt_reduce(bulk.dst, bulk.to, shards, 3, bulk.from, bulk.n, 0.5); }
static void run_random(void) { random_number = kopt_random((kopt_random_key){7, 3, 1, 0}, 0, 12345); }
static void run_small(void) {
    kopt_optimizer o = kopt_ranger(0.01);
    number = (double)kopt_state_size(&o, &t) + kopt_version() + (kopt_result_string(KOPT_OK) != NULL);
    number = (int)kopt_isa_current() + kopt_isa_usable(KOPT_ISA_AVX2) + (kopt_isa_name(KOPT_ISA_NEON) != NULL);
    scaler = kopt_scaler_of();
}

static void tools(void) {
    static const size_t lengths[] = {N, 3};
    char options[160];
    int from, to, k, way, code, residual;
    take(PLAIN, "kopt_random", run_random, "");
    take(PLAIN, "constants", run_small, "");
    take(PLAIN, "kopt_cosine_lr", run_cosine, "");
    for (k = 0; k < 2; ++k)
        for (from = 0; from < 3; ++from) {
            bulk.n = lengths[k];
            bulk.from = (kopt_format)from;
            bulk.src = grad_room;
            bulk.dst = copy_room;
            fill(grad_room, bulk.from, bulk.n, 1);
            fill(slow_room, bulk.from, bulk.n, 0);
            snprintf(options, sizeof options, "of format %d, n %d", from, (int)bulk.n);
            take(PLAIN, "kopt_all_finite", run_all_finite, options);
            take(PLAIN, "kopt_norm_add", run_norm, options);
            t.grad_format = bulk.from;
            t.n = bulk.n;
            take(PLAIN, "kopt_norm_add_grads", run_norm_grads, options);
            take(PLAIN, "kopt_norm_add_range", run_norm_range, options);
            take(PLAIN, "kopt_norm_merge", run_merge, options);
            bulk.src = slow_room;
            memset(&norm, 0, sizeof norm);
            take(PLAIN, "kopt_norm_add", run_norm, options);
            take(PLAIN, "kopt_norm_value", run_value, options);
            take(PLAIN, "kopt_norm_clip", run_norm_clip, options);
            take(PLAIN, "kopt_norm_stable_scale", run_stable_scale, options);
            bulk.to = bulk.from;
            bulk.dst = slow_room;
            take(PLAIN, "kopt_clip_value", run_clip, options);
            bulk.src = grad_room;
            bulk.dst = copy_room;
            for (to = 0; to < 3; ++to) {
                snprintf(options, sizeof options, "from format %d to %d, n %d", from, to, (int)bulk.n);
                bulk.to = (kopt_format)to;
                take(PLAIN, "kopt_convert", run_convert, options);
                take(PLAIN, "kopt_convert_stochastic", run_stochastic, options);
                if (to != KOPT_F32) take(PLAIN, "kopt_kahan_add", run_kahan_add, options);
                shards[0] = grad_room;
                shards[1] = slow_room;
                shards[2] = weight_room;
                take(PLAIN, "kopt_reduce", run_reduce, options);
                for (way = 0; way < 10; ++way) {
                    sums =
                        kopt_accumulator_of(copy_room, bulk.to, to == KOPT_F32 || way < 4 ? NULL : code_room, bulk.n);
                    sums.rounding = (kopt_rounding)(way / 2);
                    sums.residual_rounding = (kopt_rounding)(way % 2);
                    snprintf(options, sizeof options, "from format %d to %d, rounding %d, n %d", from, to, way,
                             (int)bulk.n);
                    take(PLAIN, "kopt_accumulator_add", run_accumulate, options);
                    take(PLAIN, "kopt_accumulator_add", run_accumulate, options);
                    take(PLAIN, "kopt_accumulator_read", run_accumulator_read, options);
                }
            }
            for (code = KOPT_BF16; code <= KOPT_Q1; ++code)
                for (residual = -1; residual < 3; ++residual)
                    for (way = 0; way < 2; ++way) {
                        if (code == KOPT_Q1 && way == 1 && residual >= 0) continue;
                        codec = kopt_compressor_of((kopt_format)code, residual < 0 ? NULL : slow_room, bulk.n);
                        if (residual >= 0) codec.residual_format = (kopt_format)residual;
                        codec.rounding = codec.residual_rounding = (kopt_rounding)way;
                        bulk.to = (kopt_format)(way + 1);
                        snprintf(options, sizeof options, "from format %d, code %d, residual %d, rounding %d, n %d",
                                 from, code, residual, way, (int)bulk.n);
                        take(PLAIN, "kopt_compress", run_compress, options);
                        take(PLAIN, "kopt_compress", run_compress, options);
                        fill(copy_room, bulk.to, bulk.n, 0);
                        take(PLAIN, "kopt_decompress_add", run_decompress, options);
                    }
            fill(grad_room, bulk.from, bulk.n, 0);
            opt = kopt_adamw(0.01);
            scaler = kopt_scaler_of();
            t.weight_format = KOPT_BF16;
            t.first_index = 0;
            t.copy = NULL;
            t.counts = NULL;
            t.arrays = NULL;
            t.state = state_room;
            t.state_size = kopt_state_size(&opt, &t);
            fill(float_room, KOPT_F32, t.n, 0);
            run_init();
            take(PLAIN, "kopt_scaler_step", run_scaler, options);
            take(PLAIN, "kopt_scaler_update", run_update, options);
        }
    bulk.n = N;
}

/* ---- vector mathematics ----------------------------------------------------------------------------------------- */

#ifdef KAHAN_OPT_VMATH
static kopt_function function;

static float *floats(uint32_t *room) { return (float *)(void *)room; }
static void run_exp(void) { result = kopt_vmath_exp(floats(float_room), floats(grad_room), bulk.n); }
static void run_log(void) { result = kopt_vmath_log(floats(float_room), floats(grad_room), bulk.n); }
static void run_tanh(void) { result = kopt_vmath_tanh(floats(float_room), floats(grad_room), bulk.n); }
static void run_erf(void) { result = kopt_vmath_erf(floats(float_room), floats(grad_room), bulk.n); }
static void run_erfc(void) { result = kopt_vmath_erfc(floats(float_room), floats(grad_room), bulk.n); }
static void run_atan2(void) {
    result = kopt_vmath_atan2(floats(float_room), floats(grad_room), floats(slow_room), bulk.n);
}
static void run_sincospi(void) {
    result = kopt_vmath_sincospi(floats(float_room), floats(copy_room), floats(grad_room), bulk.n);
}
static void run_map(void) { result = kopt_map(bulk.dst, bulk.src, bulk.to, bulk.n, function); }
static void run_map_backward(void) {
    result = kopt_map_backward(bulk.dst, slow_room, bulk.src, bulk.to, bulk.n, function);
}
static void run_normal(void) { result = kopt_normal(bulk.dst, bulk.to, bulk.n, 0, 1, (kopt_random_key){7, 3, 1, 5}); }
static void run_uniform(void) {
    result = kopt_uniform(bulk.dst, bulk.to, bulk.n, -1, 1, (kopt_random_key){7, 3, 1, 5});
}
static void vector_mathematics(void) {
    static const size_t lengths[] = {N, 3};
    char options[160];
    int format, k, f;
    for (k = 0; k < 2; ++k) {
        bulk.n = lengths[k];
        fill(grad_room, KOPT_F32, bulk.n, 1);
        fill(slow_room, KOPT_F32, bulk.n, 1);
        snprintf(options, sizeof options, "n %d", (int)bulk.n);
        take(VECTOR_MATH, "kopt_vmath_exp", run_exp, options);
        take(VECTOR_MATH, "kopt_vmath_log", run_log, options);
        take(VECTOR_MATH, "kopt_vmath_tanh", run_tanh, options);
        take(VECTOR_MATH, "kopt_vmath_erf", run_erf, options);
        take(VECTOR_MATH, "kopt_vmath_erfc", run_erfc, options);
        take(VECTOR_MATH, "kopt_vmath_atan2", run_atan2, options);
        take(VECTOR_MATH, "kopt_vmath_sincospi", run_sincospi, options);
        for (format = 0; format < 3; ++format) {
            bulk.to = bulk.from = (kopt_format)format;
            bulk.dst = copy_room;
            bulk.src = grad_room;
            fill(grad_room, bulk.from, bulk.n, 0);
            fill(slow_room, bulk.from, bulk.n, 0);
            snprintf(options, sizeof options, "format %d, n %d", format, (int)bulk.n);
            take(VECTOR_MATH, "kopt_normal", run_normal, options);
            take(VECTOR_MATH, "kopt_uniform", run_uniform, options);
            for (f = 0; format != KOPT_F32 && f <= KOPT_FN_SOFTPLUS; ++f) {
                snprintf(options, sizeof options, "function %d, format %d, n %d", f, format, (int)bulk.n);
                function = (kopt_function)f;
                take(VECTOR_MATH, "kopt_map", run_map, options);
                if (f != KOPT_FN_LOG) take(VECTOR_MATH, "kopt_map_backward", run_map_backward, options);
            }
        }
    }
}
#endif

int main(void) {
    int isa, class;
    if (!reserve()) {
        skip("no memory of its own for a stack");
        return done();
    }
    depth(nothing);
    FOR_EACH_ISA(isa) {
        memset(most, 0, sizeof most);
        memset(who, 0, sizeof who);
        wrong = 0;
        steps();
        tools();
#ifdef KAHAN_OPT_VMATH
        vector_mathematics();
#endif
        ok(wrong == 0, "%s: every call succeeds", kopt_isa_name((kopt_isa)isa));
        for (class = 0; class < CLASSES; ++class) {
            if (most[class] == 0) continue;
            ok(most[class] <= limit_of((kopt_isa)isa, class), "%s, %s: %lu bytes, at most %lu",
               kopt_isa_name((kopt_isa)isa), class_name[class], (unsigned long)most[class],
               (unsigned long)limit_of((kopt_isa)isa, class));
            note("    %s", who[class]);
        }
    }
    note("%lu calls", (unsigned long)whole_calls);
    return done();
}

#else
int main(void) {
    skip("a stack of its own needs ucontext");
    return done();
}
#endif
