/* fuzz.c - hostile input to the whole public interface. Bytes become optimizers, tensors, state blocks and a sequence
   of calls: any alignment, length, format and option, values that no enum has, hyper-parameters that are NaN or
   infinite, buffers that overlap, blocks that are damaged, truncated or somebody else's, steps that never were begun.
   After each call:
     - it succeeds exactly when this file, which knows only the manual, says so;
     - an error has written nothing: not to the memory, the optimizer, the tensors, the step;
     - a success has written only where the manual says, and read nothing else (AddressSanitizer: all is poisoned);
     - its result is that of unit/reference.h, or of another instruction set in other slices, or fits its definition;
     - saved, moved, loaded: the run goes on bit for bit;
     - the caller's floating-point control register, whatever was in it, is back and has changed nothing.
   A target of libFuzzer; with FUZZ_STANDALONE a program: fuzz [COUNT [SEED [FIRST]]], or fuzz FILE: one finding. */
#define KAHAN_OPT_VMATH
#define KAHAN_OPT_STATIC /* its own implementation: a hostile step is made of the private fields of kopt_begun_ */
#define KAHAN_OPT_IMPLEMENTATION
#include "../../kahan_opt.h"

#include "../unit/tap.h"
#include "../unit/reference.h"
#include "../unit/inputs.h"

#include <stdlib.h>

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define POISON 1
#endif
#endif
#ifdef __SANITIZE_ADDRESS__
#define POISON 1
#endif
#ifdef POISON
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(p, size) ((void)(p), (void)(size))
#define ASAN_UNPOISON_MEMORY_REGION(p, size) ((void)(p), (void)(size))
#endif

#if defined(__x86_64__)
#include <xmmintrin.h>
#define get_control() _mm_getcsr()
#define set_control(x) _mm_setcsr(x)
#else
#define get_control() 0u
#define set_control(x) ((void)(x))
#endif

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);

/* ---- Input: choices from bytes; 0, which always is a harmless one, when they are used up ------------------------- */

static const uint8_t *input;
static size_t input_left;

static uint32_t byte(void) {
    if (input_left == 0) return 0;
    --input_left;
    return *input++;
}

static uint32_t below(uint32_t n) {
    uint32_t x = byte();
    if (n > 256) x |= byte() << 8;
    return n == 0 ? 0 : x % n;
}

static uint32_t word(void) {
    uint32_t x = byte();
    x = x << 8 | byte();
    x = x << 8 | byte();
    return x << 8 | byte();
}

static double any_double(void) {
    static const double table[] = {0,     1,    -1,   1e-3, 0.5,   0.9,  0.999999, 1 - 1.1102230246251565e-16, 1e-8,
                                   1e-45, 1e38, 3e38, 4e38, 1e308, -1e9, 1e-300,   1.1754943508222875e-38,     1e-38};
    uint32_t k = below(24);
    if (k < sizeof table / sizeof *table) return table[k];
    if (k == 18) return double_of(UINT64_C(0x8000) << 48);            /* -0 */
    if (k == 19) return double_of(UINT64_C(0x7ff8) << 48);            /* NaN */
    if (k == 20) return double_of((UINT64_C(0x7ff0) << 48) | word()); /* infinity, signalling NaN */
    if (k == 21) return double_of(UINT64_C(0xfff0) << 48);
    if (k == 22) return double_of(word()); /* a subnormal */
    return double_of((uint64_t)word() << 32 | word());
}

static int any_enum(void) {
    static const int table[] = {-1, 7, 255, 256, 257, 258, 0x7fffffff, -0x7fffffff - 1};
    uint32_t k = below(16);
    return k < 8 ? (int)k : table[k - 8];
}

/* ---- The world -------------------------------------------------------------------------------------------------- */

enum { ROOM = 65536, TENSORS = 3, LIST = 4, LONGEST = 700 };

typedef struct world {
    kopt_optimizer opt;
    kopt_step step;
    kopt_tensor t[TENSORS], list[LIST];
    kopt_state_arrays arrays[TENSORS], found; /* those of t[i], if its state is no block */
    kopt_counts counts[TENSORS];
    kopt_norm norm[2];
    kopt_scaler scaler;
    kopt_accumulator sum;
    kopt_compressor packer;
    int skipped;
    unsigned char memory[ROOM];
} world;
static world w, before, start, other;

static kopt_optimizer step_opt;  /* the optimizer that w.step was begun with */
static int step_is_pure;         /* w.step is as kopt_step_begin() made it   */
static kopt_format usual_format; /* of the weights of most tensors */
static size_t cursor;
static long run;

static void fail(const char *what) {
    fprintf(stderr, "fuzz: %s (%s, input %ld)\n", what, kopt_isa_name(kopt_isa_current()), run);
    abort();
}

#define REQUIRE(x, what)      \
    do {                      \
        if (!(x)) fail(what); \
    } while (0)

static unsigned char *take(size_t size) {
    size_t at = cursor + below(9);
    if (at + size > ROOM) at = below((uint32_t)(ROOM - size + 1)); /* onto something else */
    cursor = at + size;
    return w.memory + at;
}

/* No tensor is allowed to lie about the memory it has: that nobody can check. */
static void *fit(void *p, size_t size) {
    unsigned char *last = w.memory + ROOM - size;
    return p == NULL || (unsigned char *)p <= last ? p : last;
}

static int is_long(size_t n) { return n > LONGEST; } /* those are all beyond the address space */

/* The arrays of a state, in the order of kopt_state_arrays. */
enum { RESIDUAL, MOMENT, SCALE = MOMENT + 4, SLOW = SCALE + 4, SLOW_RESIDUAL, RATES, STATE_ARRAYS };
static void **array_of(kopt_state_arrays *a, int i) {
    return i == RESIDUAL ? &a->residual
           : i < SCALE   ? &a->moment[i - MOMENT]
           : i < SLOW    ? &a->scale[i - SCALE]
           : i == SLOW   ? &a->slow
           : i < RATES   ? &a->slow_residual
                         : &a->rates;
}

static void fit_tensor(kopt_tensor *t) {
    kopt_state_arrays *const arrays = &w.arrays[t - w.t];
    size_t room;
    int i;
    if (is_long(t->n)) return;
    t->weight = fit(t->weight, 4 * t->n), t->grad = fit(t->grad, 4 * t->n), t->copy = fit(t->copy, 4 * t->n);
    for (i = 0; i < STATE_ARRAYS; ++i) *array_of(arrays, i) = fit(*array_of(arrays, i), 4 * t->n + 16); /* rates: 16 */
    if (t->state == NULL) return;
    room = (size_t)(w.memory + ROOM - (unsigned char *)t->state);
    if (t->state_size > room) t->state_size = room;
}

static kopt_optimizer any_rule(void) {
    switch (below(14)) {
    case 9: return kopt_adam_atan2(1e-3);
    case 10: return kopt_smooth_lion(1e-3, 30);
    case 0: return kopt_sgd(0.01, 0.9);
    case 1: return kopt_sgd(0.01, 0);
    case 2: return kopt_adam(0.1);
    case 3: return kopt_lion(1e-3);
    case 4: return kopt_adan(1e-3);
    case 5: return kopt_radam(1e-3);
    case 6: return kopt_ranger(1e-3);
    case 7: return kopt_stable_adamw(1e-3);
    case 8: return kopt_ema(0.99);
    default: return kopt_adamw(1e-3);
    }
}

static void make_optimizer(void) {
    static const double lr[] = {1e-3, 0.1, 0, 1e-7, 30, 1e-40}, scale[] = {1, 1, 0.5, -3, 1e-30, 1e30};
    static const double decay[] = {0.01, 0, 1e-4, 100, 1e-50}, beta[] = {0.9, 0.999, 0, 0.5, 0.99999};
    static const double eps[] = {1e-8, 1e-15, 0.1, 1.2e-38};
    static const uint32_t step[] = {0, 0, 1, 2, 999, 0x80000000u, 0xfffffffeu, 0xffffffffu};
    kopt_optimizer *o = &w.opt;
    *o = any_rule();
    usual_format = (kopt_format)((below(3) + 1) % 3),
    o->first_moment_format = o->second_moment_format = (kopt_format)((below(4) + 1) % 4);
    if (below(3) == 2) o->second_moment_format = (kopt_format)below(4);
    if (below(3) == 0)
        usual_format = o->first_moment_format = o->second_moment_format = KOPT_BF16; /* the hot kernels */
    o->rounding = (kopt_rounding)((below(6) + 2) % 6);
    o->moment_rounding = (kopt_rounding)(1 - below(2));
    o->residual_rounding = (kopt_rounding)(1 - below(2));
    if (byte() & 1) {
        o->decay_mode = (kopt_decay_mode)below(3);
        o->lr = lr[below(6)], o->max_lr = below(3) ? 1 : 1e-3, o->weight_decay = decay[below(5)];
        o->beta1 = beta[below(5)], o->beta2 = beta[below(5)], o->beta3 = beta[below(5)], o->eps = eps[below(4)];
        o->grad_scale = scale[below(6)], o->clip = scale[below(6)];
        o->maximize = (int)below(2), o->moments_only = below(4) == 3;
        if (o->rule != KOPT_RULE_ADAM_ATAN2 || below(8) == 7) o->amsgrad = (int)below(2), o->stable = (int)below(2);
        o->lookahead = 1 + (int)below(3), o->lookahead_rate = below(3) * 0.5;
        if (o->momentum > 0) o->nesterov = (int)below(2);
        if (!o->nesterov) o->dampening = below(2) ? 0.3 : -2;
        o->step = step[below(8)];
        o->atan2_a = below(2) ? 1 : 0.3, o->atan2_b = below(2) ? 1 : 4, o->atan2_outside = (int)below(2);
        if (o->rule == KOPT_RULE_LION) o->sharpness = below(2) ? 1000 : 0;
    }
    o->zero_grad = (int)below(2);
    if (o->rounding == KOPT_FEEDBACK && byte() & 15) { /* which takes few */
        o->moment_rounding = KOPT_STOCHASTIC;
        if (!ref_accepts(o)) o->beta1 = 0.9;
        if (!ref_accepts(o)) o->rounding = KOPT_KAHAN;
    }
    if (o->rule == KOPT_RULE_EMA && byte() & 15) { /* which takes no options */
        o->weight_decay = 0, o->maximize = o->zero_grad = o->moments_only = 0;
    }
    o->seed = (uint64_t)word() << 32 | 0x9e3779b9u;
}

static void change_optimizer(void) {
    kopt_optimizer *o = &w.opt;
    double *const number[] = {&o->lr,       &o->max_lr,    &o->weight_decay, &o->beta1, &o->beta2, &o->eps,
                              &o->momentum, &o->dampening, &o->grad_scale,   &o->clip,  &o->beta3, &o->lookahead_rate};
    uint32_t k = below(35);
    if (k == 34) o->second_moment_format = (kopt_format)any_enum();
    if (k == 33) o->reserved32_ = word();
    if (k == 32) o->made_ = below(2) ? word() : KOPT_FOREIGN_;
    if (k == 28) o->atan2_a = any_double();
    if (k == 29) o->atan2_b = any_double();
    if (k == 30) o->sharpness = any_double();
    if (k == 31) o->atan2_outside = any_enum();
    if (k < 10) *number[k] = any_double();
    if (k == 22 || k == 23) *number[k - 12] = any_double();
    if (k == 24) o->amsgrad = any_enum();
    if (k == 25) o->stable = any_enum();
    if (k == 26) o->moments_only = any_enum();
    if (k == 27) o->lookahead = any_enum();
    if (k == 10) o->rule = (kopt_rule)any_enum();
    if (k == 11) o->reserved_[below(7)] = (uint64_t)1 << below(64);
    if (k == 12) o->rounding = (kopt_rounding)any_enum();
    if (k == 13) o->first_moment_format = (kopt_format)any_enum();
    if (k == 14) o->moment_rounding = (kopt_rounding)any_enum();
    if (k == 15) o->residual_rounding = (kopt_rounding)any_enum();
    if (k == 16) o->decay_mode = (kopt_decay_mode)any_enum();
    if (k == 17) o->nesterov = any_enum();
    if (k == 18) o->maximize = any_enum();
    if (k == 19) o->zero_grad = any_enum();
    if (k == 20) o->step = below(2) ? word() : 0xffffffffu - below(2);
    if (k == 21) o->seed = word();
}

static size_t a_length(void) {
    switch (below(4)) {
    case 0: return below(4);
    case 1: return below(40);
    case 2: return below(200);
    default: return below(LONGEST + 1);
    }
}

static uint64_t an_index(void) {
    static const uint64_t table[] = {0,
                                     1,
                                     127,
                                     128,
                                     256,
                                     UINT64_C(1) << 35,
                                     (UINT64_C(1) << 36) - 300,
                                     (UINT64_C(1) << 63) - 1,
                                     (UINT64_C(1) << 63) - 333,
                                     UINT64_C(1) << 63,
                                     UINT64_MAX};
    uint32_t k = below(64);
    return k < 11 ? table[k] : k < 32 ? word() : 0;
}

/* Of array i of a state, the bytes of an element (a scale: of a block), the elements, where it is in a block; and where
   it is. A block, if there is one, has room for it. */
static size_t width_of(const kopt_optimizer *o, const kopt_tensor *t, int i) {
    const ref_layout l = ref_layout_of(o, t->weight_format, t->n);
    if (i >= SCALE && i < SLOW) return ref_coded(o) >> (i - SCALE) & 1 ? 1 : 0;
    if (i == RATES) return ref_pays(o, t->weight_format) ? 4 : 0;
    return i == RESIDUAL ? l.residual_width
           : i < SCALE   ? l.moment_width[i - MOMENT]
           : i == SLOW   ? l.slow_width
                         : l.slow_residual_width;
}

static size_t bytes_of(const kopt_optimizer *o, const kopt_tensor *t, int i) {
    if (i == RATES) return t->n != 0 ? 4 * width_of(o, t, i) : 0;
    return width_of(o, t, i) * (i >= SCALE && i < SLOW ? (t->n + 63) / 64 : t->n);
}

static size_t offset_of(const kopt_optimizer *o, const kopt_tensor *t, int i) {
    const ref_layout l = ref_layout_of(o, t->weight_format, t->n);
    return i == RESIDUAL ? l.residual
           : i < SCALE   ? l.moment[i - MOMENT]
           : i < SLOW    ? l.scale[i - SCALE]
           : i == SLOW   ? l.slow
           : i < RATES   ? l.slow_residual
                         : 32; /* in the header */
}

static unsigned char *place_of(const kopt_optimizer *o, const kopt_tensor *t, int i) {
    if (width_of(o, t, i) == 0) return NULL;
    if (t->arrays == NULL) return t->state == NULL ? NULL : (unsigned char *)t->state + offset_of(o, t, i);
    return *array_of((kopt_state_arrays *)(uintptr_t)t->arrays, i);
}

static void make_tensor(kopt_tensor *t) {
    const kopt_format f = below(6) == 5 ? (kopt_format)below(3) : usual_format; /* a list may mix them */
    size_t n = a_length(), state = ref_layout_of(&w.opt, f, n).size;
    kopt_state_arrays *const arrays = &w.arrays[t - w.t];
    int i;
    kopt_format grad = (kopt_format)((below(3) + 1) % 3);
    if (f == KOPT_BF16 && below(2)) grad = KOPT_BF16;
    *t = kopt_tensor_of(NULL, f, NULL, grad, n, NULL, state);
    t->weight = take(n * ref_width(f));
    t->grad = take(n * ref_width(grad));
    memset(arrays, 0, sizeof *arrays);
    if (below(3) == 2) { /* a state in arrays; those that are not needed may be anywhere */
        arrays->size = sizeof *arrays, t->arrays = arrays, t->state_size = 0;
        for (i = 0; i < STATE_ARRAYS; ++i) {
            const size_t bytes = bytes_of(&w.opt, t, i);
            if (bytes != 0 || byte() & 1) *array_of(arrays, i) = take(bytes);
        }
    } else if (state != 0) {
        t->state = take(state);
    }
    if (below(3) == 2) t->copy_format = (kopt_format)below(3), t->copy = take(n * ref_width(t->copy_format));
    t->id = 3 * (uint32_t)(t - w.t) + below(4), t->first_index = an_index(); /* mostly increasing */
    if (below(4) == 3) t->rate_scale = below(2) ? 0.5 : 2;
    if (below(4) == 3) t->stable_scale = below(2) ? 0.5 : 0.75;
    if (below(4) == 3) t->counts = &w.counts[t - w.t];
    t->no_decay = below(4) == 3;
    fit_tensor(t);
}

/* Where in the memory an 8-byte number may lie. */
static size_t first_aligned(void) { return (size_t)(-(intptr_t)w.memory & 7); }

static void change_tensor(kopt_tensor *t) {
    kopt_state_arrays *const arrays = &w.arrays[t - w.t];
    uint32_t k = below(24);
    void *p = byte() & 1 ? NULL : w.memory + below(ROOM);
    if (k == 0) t->weight = p;
    if (k == 1) t->grad = p;
    if (k == 2) t->state = p;
    if (k == 3) t->copy = p;
    if (k == 4) t->grad_format = (kopt_format)any_enum();
    if (k == 5) t->copy_format = (kopt_format)any_enum();
    if (k == 6) t->n += t->n < LONGEST - 8 ? below(8) : 0;
    if (k == 7) t->n -= t->n > 8 && !is_long(t->n) ? below(8) : 0;
    if (k == 8) t->n = below(2) ? SIZE_MAX - below(300) : (SIZE_MAX - 256) / 32 + 1 + below(2) * (SIZE_MAX / 4);
    if (k == 9) t->n = a_length();
    if (k == 10) t->state_size = below(2) ? below(ROOM) : t->state_size - below(5);
    if (k == 11) t->id = word();
    if (k == 12) t->first_index = an_index();
    if (k == 13) { /* at the edge of another array, or on it */
        const kopt_tensor *from = &w.t[below(TENSORS)];
        uint32_t what = below(4);
        unsigned char *base = what == 0 ? from->weight : what == 1 ? from->grad : what == 2 ? from->state : from->copy;
        if (base != NULL && base > w.memory + 8) t->grad = base + below(9) - 4;
        if (what == 3) t->weight = from->weight;
    }
    if (k == 14) t->rate_scale = below(2) ? any_double() : 0;
    if (k == 14) t->stable_scale = below(2) ? any_double() : 0;
    if (t->rate_scale * t->stable_scale > 1e38) t->rate_scale = 1; /* 0 times an infinite product is NaN */
    if (k == 15) t->counts = t->counts ? NULL : &w.counts[below(TENSORS)];
    if (k == 15 && below(4) == 3)
        t->counts = (kopt_counts *)(void *)(w.memory + below(ROOM / 8 - 3) * 8 + first_aligned());
    if (k == 16) t->weight_format = (kopt_format)any_enum();
    if (k == 17) t->no_decay = any_enum();
    if (k == 18) t->reserved_[below(2)] = (uint64_t)1 << below(64);
    if (k == 19) {
        t->reserved32_ = word();
    }
    if (k == 20) {
        if (byte() & 1) t->state = NULL;
        t->arrays = t->arrays ? NULL : arrays;
    }
    if (k == 21) *array_of(arrays, (int)below(STATE_ARRAYS)) = p;
    if (k == 22) { /* at the edge of another array, or on it */
        const kopt_tensor *from = &w.t[below(TENSORS)];
        unsigned char *base = below(2) ? from->weight : *array_of(&w.arrays[from - w.t], (int)below(STATE_ARRAYS));
        if (base != NULL && base > w.memory + 8) *array_of(arrays, (int)below(STATE_ARRAYS)) = base + below(9) - 4;
    }
    if (k == 23 && byte() & 1)
        arrays->size = below(2) ? sizeof *arrays : below(200);
    else if (k == 23)
        arrays->rates = p;
}

static kopt_begun_ begun_of(const kopt_step *step) {
    kopt_begun_ s;
    memcpy(&s, step, sizeof s);
    return s;
}

static void change_step(void) {
    kopt_begun_ begun = begun_of(&w.step), *const s = &begun;
    float *const number[] = {&s->grad_scale, &s->l2,          &s->weight_decay, &s->beta1,
                             &s->gain1,      &s->beta2,       &s->gain2,        &s->extrapolation,
                             &s->rate,       &s->root_scale,  &s->eps,          &s->beta3,
                             &s->gain3,      &s->third_scale, &s->slow_scale,   &s->undecayed_rate};
    uint32_t k = below(32);
    step_is_pure = 0;
    if (s->rule == KOPT_RULE_EMA && (k == 1 || k == 2 || k == 18)) k = 8; /* averages have none of these */
    if (k >= 24 && k < 27) k -= 13, *number[k] = ref_float(word()), k = 99;
    if (k == 31) *number[14] = ref_float(word());
    if (k == 12) *number[15] = ref_float(word() & 0xffff0000u);
    if (k == 27) s->moments_only = any_enum();
    if (k < 11) { /* one NaN: the kernels expect of a step that the lower half of a NaN's payload is zero */
        *number[k] = ref_float(word());
        if (ref_is_nan(KOPT_F32, ref_bits(*number[k]))) *number[k] = ref_float(0x7fc00000);
    }
    if (k == 17) s->nesterov = any_enum();
    if (k == 18) s->zero_grad = any_enum();
    if (k == 19) s->made = below(2) ? 0 : s->made + 1; /* of the next version */
    if (k == 20) s->made ^= (uint64_t)word() << (below(2) ? 32 : 0);
    if (k == 21) s->seed = word();
    memcpy(&w.step, s, sizeof *s);
    if (k == 22) memset(&w.step, (int)byte(), sizeof w.step);
    if (k == 23) {
        size_t i;
        uint32_t x = word();
        for (i = 0; i < sizeof w.step; ++i) ((unsigned char *)&w.step)[i] = (unsigned char)(lcg32(&x) >> 24);
    }
}

/* Everything small numbers, or everything of any bits: NaN, infinities, subnormals. */
static void fill_memory(void) {
    uint32_t x = word(), mode = below(3), i;
    for (i = 0; i + 1 < ROOM; i += 2) {
        lcg32(&x);
        ref_set(w.memory, 2, i / 2, mode == 0 ? 0x3c00 | (x >> 16 & 0x83ff) : mode == 1 && x >> 26 ? 0x3d80 : x >> 16);
    }
}

/* ---- What the manual says --------------------------------------------------------------------------------------- */

static int within(double x, double least, double most) {
    uint64_t u;
    memcpy(&u, &x, sizeof u);
    return (u >> 52 & 0x7ff) != 0x7ff && x >= least && x <= most;
}

static const double most = 3e38;

static int in_enum(int value, int last) { return value >= 0 && value <= last; }

/* What a conversion to float is defined for. */
static int in_float_range(double x) { return within(x, -most, most); }

static int is_beta(double x) { return within(x, 0, 1) && x < 1; }

static int optimizer_good(const kopt_optimizer *o) {
    int i;
    if (o->made_ != kopt_sgd(0, 0).made_) return 0;
    for (i = 0; i < 7; ++i)
        if (o->reserved_[i] != 0 || o->reserved32_ != 0) return 0;
    if (!in_enum((int)o->rule, KOPT_RULE_ADAM_ATAN2)) return 0;
    if (!in_enum((int)o->first_moment_format, KOPT_Q8) || !in_enum((int)o->second_moment_format, KOPT_Q8)) return 0;
    if (!in_enum((int)o->rounding, KOPT_FEEDBACK)) return 0;
    if (!in_enum((int)o->moment_rounding, KOPT_STOCHASTIC)) return 0;
    if (!in_enum((int)o->residual_rounding, KOPT_STOCHASTIC)) return 0;
    if (!in_enum((int)o->decay_mode, KOPT_DECAY_FULLY_DECOUPLED)) return 0;
    if (!ref_accepts(o)) return 0;
    if (!within(o->lr, 0, most) || !within(o->weight_decay, 0, most)) return 0;
    if (!within(o->grad_scale, -most, most) || !within(o->clip, -most, most)) return 0;
    if (o->decay_mode == KOPT_DECAY_FULLY_DECOUPLED && !(within(o->max_lr, 0, most) && o->max_lr > 0)) return 0;
    if (o->rule == KOPT_RULE_EMA)
        return within(o->beta1, 0, 1) && within(o->weight_decay, 0, 0) && !o->moments_only && !o->zero_grad &&
               !o->maximize;
    if (o->rule != KOPT_RULE_SGD) {
        if (!is_beta(o->beta1) || !is_beta(o->beta2) || (o->rule == KOPT_RULE_ADAN && !is_beta(o->beta3))) return 0;
        if (o->rule == KOPT_RULE_LION) return within(o->sharpness, 0, most);
        if (o->rule == KOPT_RULE_ADAM_ATAN2)
            return within(o->atan2_a, 0, most) && within(o->atan2_b, 1.1754943508222875e-38, most) && !o->amsgrad &&
                   !o->stable;
        if (!within(o->eps, 1.1754943508222875e-38, most)) return 0;
        return o->rule != KOPT_RULE_RANGER || (o->lookahead >= 1 && within(o->lookahead_rate, 0, 1));
    }
    if (!within(o->momentum, 0, most) || !within(o->dampening, -most, most)) return 0;
    return !o->nesterov || (o->momentum > 0 && !(o->dampening < 0) && !(o->dampening > 0));
}

/* The scalars of the next step are floats, also those of tensors without weight decay. */
static int scalars_good(const kopt_optimizer *o) {
    kopt_optimizer undecayed = *o;
    ref_scalars s = ref_scalars_of(o, o->step + 1);
    int good = ref_is_finite(KOPT_F32, ref_bits(s.grad_scale)) && ref_is_finite(KOPT_F32, ref_bits(s.rate)) &&
               ref_is_finite(KOPT_F32, ref_bits(s.decay)) && ref_is_finite(KOPT_F32, ref_bits(s.root_scale));
    undecayed.weight_decay = 0;
    s = ref_scalars_of(&undecayed, o->step + 1);
    return good && ref_is_finite(KOPT_F32, ref_bits(s.rate));
}

static ref_layout layout_of(const kopt_optimizer *o, const kopt_tensor *t) {
    return ref_layout_of(o, t->weight_format, t->n);
}

static size_t weight_width(const kopt_tensor *t) { return ref_width(t->weight_format); }

static int share(const void *a, size_t a_size, const void *b, size_t b_size) {
    uintptr_t x = (uintptr_t)a, y = (uintptr_t)b;
    return a != NULL && b != NULL && a_size != 0 && b_size != 0 && x < y + b_size && y < x + a_size;
}

typedef struct span {
    void *p;
    size_t size;
} span;

/* Weight, state block, copy, gradient, counts, the arrays of a state that is no block. */
enum { COPY_SPAN = 2, GRAD_SPAN = 3, COUNTS_SPAN = 4, ARRAY_SPANS = 5, SPANS = ARRAY_SPANS + STATE_ARRAYS };
static void spans(const kopt_optimizer *o, const kopt_tensor *t, span s[SPANS]) {
    int i;
    s[0].p = t->weight, s[0].size = t->n * weight_width(t);
    for (i = 0; i < STATE_ARRAYS; ++i) {
        s[ARRAY_SPANS + i].p = t->arrays ? place_of(o, t, i) : NULL;
        s[ARRAY_SPANS + i].size = s[ARRAY_SPANS + i].p ? bytes_of(o, t, i) : 0;
    }
    s[1].p = t->state, s[1].size = t->n && !t->arrays ? layout_of(o, t).size : 0;
    s[2].p = t->copy, s[2].size = t->n * ref_width(t->copy_format);
    s[3].p = t->grad, s[3].size = t->n * ref_width(t->grad_format);
    s[4].p = t->counts, s[4].size = sizeof *t->counts;
}

static int fields_good(const kopt_tensor *t) {
    if (!in_enum((int)t->weight_format, KOPT_FP16) || !in_enum((int)t->grad_format, KOPT_FP16)) return 0;
    if (t->copy != NULL && !in_enum((int)t->copy_format, KOPT_FP16)) return 0;
    if (is_long(t->n) || t->first_index >> 63) return 0;
    if (t->reserved32_ != 0 || t->reserved_[0] != 0 || t->reserved_[1] != 0) return 0;
    return within(t->rate_scale, 0, most) && within(t->stable_scale, 0, most) && bits_of(t->rate_scale) >> 63 == 0 &&
           bits_of(t->stable_scale) >> 63 == 0;
}

/* May a tensor have these arrays, whatever its options need? */
static int form_good(const kopt_tensor *t) {
    const kopt_state_arrays *a = t->arrays;
    return a == NULL || (a->size == sizeof *a && t->state == NULL);
}

static int arrays_good(const kopt_optimizer *o, const kopt_tensor *t) {
    int i;
    for (i = 0; i < STATE_ARRAYS; ++i)
        if (bytes_of(o, t, i) != 0 && place_of(o, t, i) == NULL) return 0;
    return form_good(t);
}

/* A tensor of the formats and rules of an optimizer; of a step, see formats_of. */
static int tensor_good(const kopt_optimizer *o, const kopt_tensor *t, int with_grad) {
    span s[SPANS];
    int i, k;
    if (!fields_good(t)) return 0;
    if (t->n == 0) return 1;
    spans(o, t, s);
    if (t->weight == NULL || (with_grad && t->grad == NULL)) return 0;
    if (t->arrays ? !arrays_good(o, t) : s[1].size != 0 && (t->state == NULL || t->state_size < s[1].size)) return 0;
    for (i = 0; i < SPANS; ++i)
        for (k = i + 1; k < SPANS; ++k)
            if ((with_grad || (i != GRAD_SPAN && k != GRAD_SPAN)) && share(s[i].p, s[i].size, s[k].p, s[k].size))
                return 0;
    return 1;
}

/* The ids of a list increase; shards of one tensor follow each other. */
static int follows(const kopt_tensor *a, const kopt_tensor *b) {
    return a->id < b->id ||
           (a->id == b->id && a->first_index <= b->first_index && b->first_index - a->first_index >= a->n);
}

/* The tensor before i of the list that has elements, or i. */
static size_t before_in_list(const kopt_tensor *list, size_t i) {
    size_t j = i;
    while (j > 0 && list[j - 1].n == 0) --j;
    return j > 0 ? j - 1 : i;
}

static uint64_t little(const unsigned char *p, int bytes) {
    uint64_t x = 0;
    int i;
    for (i = 0; i < bytes; ++i) x |= (uint64_t)p[i] << (8 * i);
    return x;
}

/* Of formats that may not exist, too: a byte. */
static unsigned char format_byte(kopt_format f) { return (unsigned char)(f == KOPT_Q8 ? 5u : (unsigned)f); }

static unsigned char second_byte(const kopt_optimizer *o) {
    if (ref_moments(o) < 2 || o->first_moment_format == o->second_moment_format) return 0;
    return (unsigned char)(1 + format_byte(o->second_moment_format));
}

/* The header of a block, by the table of docs/numerics.md section 8a. */
static void make_header(const kopt_optimizer *o, const kopt_tensor *t, unsigned char h[64]) {
    int i;
    memset(h, 0, 64), memcpy(h, "KOPT\2", 5);
    h[5] = (unsigned char)o->rule, h[6] = (unsigned char)t->weight_format;
    h[7] = (unsigned char)(t->weight_format == KOPT_F32 ? 0 : o->rounding);
    h[8] = format_byte(o->first_moment_format);
    h[9] = (unsigned char)ref_moments(o), h[11] = second_byte(o);
    for (i = 0; i < 8; ++i) {
        if (i < 4) h[12 + i] = (unsigned char)(t->id >> 8 * i);
        h[16 + i] = (unsigned char)((uint64_t)t->n >> 8 * i), h[24 + i] = (unsigned char)(t->first_index >> 8 * i);
    }
}

/* Is it a state of this optimizer? With arrays there is no header. */
static int block_good(const kopt_optimizer *o, const kopt_tensor *t) {
    unsigned char h[64];
    if (t->arrays) return form_good(t);
    if (t->n == 0 || layout_of(o, t).size == 0) return 1;
    make_header(o, t, h);
    return !memcmp(h, t->state, 32);
}

/* A block does not tell of the run. */
static void require_no_numbers(const kopt_optimizer *o, const kopt_tensor *t) {
    const unsigned char *h = t->state;
    int i;
    if (t->n == 0 || t->arrays || layout_of(o, t).size == 0) return;
    for (i = 32; i < 64; ++i)
        REQUIRE(h[i] == 0 || (i < 48 && ref_pays(o, t->weight_format)), "a block tells of the run");
}

/* The header of a tensor in a checkpoint: the decay mode, the roundings and what else tells apart the optimizers that
   fill the same arrays; and the numbers of the run. */
static void require_saved_header(const kopt_optimizer *o, const kopt_tensor *t, const unsigned char *h) {
    const int moments = ref_moments(o), sgd = o->rule == KOPT_RULE_SGD;
    const int compensated = o->rounding == KOPT_KAHAN || o->rounding == KOPT_COMPACT;
    const int average = o->rule == KOPT_RULE_EMA; /* has 1 - decay in the place of lr, and lr in that of the decay */
    const double number[4] = {average ? 1 - o->beta1 : o->lr, o->weight_decay,
                              average ? o->lr
                              : sgd   ? o->momentum
                                      : o->beta1,
                              sgd ? o->dampening : o->beta2};
    int i, rounding = 0, rest = moments;
    if (t->weight_format != KOPT_F32) rounding += (int)o->rounding;
    for (i = 0; i < moments && ref_format(o, i) == KOPT_F32;) ++i;
    if (i < moments) rounding += 16 * (int)o->moment_rounding;
    if (t->weight_format != KOPT_F32 && compensated) rounding += 32 * (int)o->residual_rounding;
    if (o->rule != KOPT_RULE_EMA) rest += 16 * (int)o->decay_mode;
    if (sgd && o->nesterov) rest += 8;
    if (o->rule == KOPT_RULE_ADAM && o->stable) rest += 64;
    if (o->rule == KOPT_RULE_ADAM_ATAN2 && o->atan2_outside) rest += 128;
    REQUIRE(!memcmp(h, "KOPT\2", 5) && h[5] == (unsigned)o->rule && h[6] == (unsigned)t->weight_format &&
                h[7] == rounding && h[8] == format_byte(o->first_moment_format) && h[9] == rest && h[10] == 1 &&
                h[11] == second_byte(o) && little(h + 12, 4) == t->id && little(h + 16, 8) == t->n &&
                little(h + 24, 8) == t->first_index && little(h + 32, 8) == o->seed && little(h + 40, 8) == o->step,
            "the header is not the documented one");
    for (i = 0; i < 4; ++i)
        if (in_float_range(number[i]))
            REQUIRE(little(h + 48 + 4 * i, 4) == ref_bits((float)number[i]), "other numbers in the header");
}

/* What a step knows of its optimizer. */
static kopt_optimizer formats_of(const kopt_step *step) {
    const kopt_begun_ s = begun_of(step);
    kopt_optimizer o = kopt_sgd(1, s.moment_count == 1 ? 0.9 : 0);
    o.rule = s.rule, o.rounding = s.rounding;
    o.first_moment_format = s.first_moment_format, o.second_moment_format = s.second_moment_format;
    o.zero_grad = s.zero_grad, o.moments_only = s.moments_only, o.amsgrad = s.moment_count == 3;
    return o;
}

/* Has this version begun the step? */
static int step_good(const kopt_step *step) {
    return begun_of(step).made == ((uint64_t)0x53544550 << 32) + KOPT_VERSION;
}

/* Does StableAdamW have to measure the whole tensor before it steps it? */
static int must_measure(const kopt_step *step, const kopt_tensor *t) {
    const kopt_begun_ s = begun_of(step);
    return s.stable && !s.moments_only && !(t->stable_scale > 0);
}

/* ---- Calls ------------------------------------------------------------------------------------------------------ */

enum { WRITTEN = 96, RESULTS = KOPT_ERROR_VERSION + 1, CALLS = 43 };
static span written[WRITTEN];
static int written_count;
static uint32_t control, results[RESULTS];
static struct {
    const char *name;
    uint32_t accepted, refused;
} tally[CALLS];

/* Between prepare() and finish() there is one call. What it may touch is announced. */
static void prepare(void) {
    memcpy(&before, &w, sizeof w);
    written_count = 0;
    ASAN_POISON_MEMORY_REGION(w.memory, ROOM);
}

static void reads(const void *p, size_t size) {
    if (p != NULL && size <= ROOM) ASAN_UNPOISON_MEMORY_REGION((const unsigned char *)p, size);
}

static void writes(void *p, size_t size) {
    if (p == NULL || size == 0 || size > ROOM) return;
    reads(p, size);
    REQUIRE(written_count < WRITTEN, "more places than this file has room for");
    written[written_count].p = p, written[written_count++].size = size;
}

/* From here to finish() the caller's control register is hostile: any rounding, FTZ, DAZ. */
static void hostile_control(void) {
#if defined(__x86_64__)
    static const uint32_t table[] = {0x1f80, 0x1f80, 0x9fc0, 0x3f80, 0x5f80, 0x7f80, 0xffc0, 0x1f80};
    set_control(table[below(8)]);
    control = get_control(); /* valgrind keeps less */
#endif
}

static void finish(int call, const char *name, int accepted, int expected) {
    int i;
    if ((get_control() & 0xffc0u) != (control & 0xffc0u)) fail("the control register is not restored");
    set_control(0x1f80u);
    control = get_control();
    ASAN_UNPOISON_MEMORY_REGION(w.memory, ROOM);
    tally[call].name = name;
    *(accepted ? &tally[call].accepted : &tally[call].refused) += 1;
    if (expected >= 0 && accepted != expected) {
        fprintf(stderr, "fuzz: %s was %s\n", name, accepted ? "accepted" : "refused");
        fail("and should not");
    }
    /* expected -1: tensors that share memory without being neighbours; one may change the header of the other */
    for (i = 0; i < written_count && (accepted || expected < 0); ++i)
        memcpy((unsigned char *)&before + ((unsigned char *)written[i].p - (unsigned char *)&w), written[i].p,
               written[i].size);
    if (memcmp(&before, &w, sizeof w) != 0) {
        fprintf(stderr, "fuzz: %s\n", name);
        fail(accepted ? "something else was written" : "refused, but something was written");
    }
}

static int took(kopt_result r) {
    REQUIRE((unsigned)r < RESULTS, "no such result");
    REQUIRE(kopt_result_string(r) != NULL, "no sentence");
    ++results[r];
    return r == KOPT_OK;
}

static void announce_step(const kopt_optimizer *o, const kopt_tensor *t, size_t begin, size_t end) {
    const ref_layout l = layout_of(o, t);
    const size_t weight = weight_width(t), grad = ref_width(t->grad_format), n = end - begin;
    unsigned char *state = t->state;
    int k;
    if (is_long(t->n)) return;
    if (state != NULL && t->state_size >= 64) reads(state, 64);
    if (begin >= end || end > t->n) return;
    if (t->counts) writes(t->counts, sizeof *t->counts);
    if (t->weight) reads((unsigned char *)t->weight + begin * weight, n * weight);
    if (t->weight && !o->moments_only) writes((unsigned char *)t->weight + begin * weight, n * weight);
    if (t->copy && !o->moments_only)
        writes((unsigned char *)t->copy + begin * ref_width(t->copy_format), n * ref_width(t->copy_format));
    if (t->grad) reads((unsigned char *)t->grad + begin * grad, n * grad);
    if (t->grad && o->zero_grad) writes((unsigned char *)t->grad + begin * grad, n * grad);
    if (t->arrays ? !arrays_good(o, t) : state == NULL || t->state_size < l.size) return;
    if (place_of(o, t, RATES)) reads(place_of(o, t, RATES), 16);
    if (place_of(o, t, RATES) && begin == 0) writes(place_of(o, t, RATES), 16);
    for (k = 0; k < RATES; ++k) {
        const int scale = k >= SCALE && k < SLOW;
        const size_t width = width_of(o, t, k), first = scale ? begin / 64 : begin;
        unsigned char *p = place_of(o, t, k);
        if (p == NULL) continue;
        reads(p + first * width, (scale ? (n + 63) / 64 : n) * width);
        if (k >= MOMENT && k < SLOW ? 1 : !o->moments_only)
            writes(p + first * width, (scale ? (n + 63) / 64 : n) * width);
    }
}

static void force_other(kopt_isa isa) {
    kopt_isa next = KOPT_ISA_SCALAR;
    if (isa == KOPT_ISA_SCALAR || below(2)) next = (kopt_isa)below(KOPT_ISA_SIMD128 + 1);
    if (kopt_isa_force(next) != KOPT_OK) kopt_isa_force(KOPT_ISA_SCALAR);
}

/* Elements [low, high) of one tensor, in slices; StableAdamW measured in other slices before. */
static void step_sliced(const kopt_step *s, const kopt_tensor *t, size_t low, size_t high) {
    kopt_tensor scaled = *t;
    const size_t a = low + below((uint32_t)(high - low + 1)), b = a + below((uint32_t)(high - a + 1));
    if (must_measure(s, t)) {
        kopt_norm first, second;
        memset(&first, 0, sizeof first), memset(&second, 0, sizeof second);
        REQUIRE(kopt_norm_add_stable(&second, s, t, b, high) == KOPT_OK &&
                    kopt_norm_add_stable(&first, s, t, low, b) == KOPT_OK &&
                    kopt_norm_merge(&first, &second) == KOPT_OK,
                "a slice is not measured");
        scaled.stable_scale = kopt_norm_stable_scale(&first, high - low);
    }
    REQUIRE(kopt_step_range(s, &scaled, 1, b, high) == KOPT_OK && kopt_step_range(s, &scaled, 1, low, a) == KOPT_OK &&
                kopt_step_range(s, &scaled, 1, a, b) == KOPT_OK,
            "a slice is refused, but not the whole");
}

/* The same tensor with its state in the other form: of arrays in a block, with a header made here, or the arrays of a
   block where they are. Afterwards, put_back(). */
enum { BLOCK = 64 + 24 * LONGEST + 512 };
static unsigned char block_room[LIST][BLOCK];
static kopt_tensor other_form(const kopt_optimizer *o, const kopt_tensor *t, unsigned char *block,
                              kopt_state_arrays *views) {
    kopt_tensor turned = *t;
    int i;
    memset(views, 0, sizeof *views);
    views->size = sizeof *views;
    if (t->arrays) make_header(o, t, block);
    for (i = 0; i < STATE_ARRAYS && t->n != 0; ++i) {
        if (t->arrays == NULL) *array_of(views, i) = place_of(o, t, i);
        if (t->arrays && place_of(o, t, i)) memcpy(block + offset_of(o, t, i), place_of(o, t, i), bytes_of(o, t, i));
    }
    turned.arrays = t->arrays ? NULL : views;
    turned.state = t->arrays ? block : NULL;
    turned.state_size = t->arrays ? BLOCK : 0;
    return turned;
}

static void put_back(const kopt_optimizer *o, const kopt_tensor *t, const unsigned char *block) {
    int i;
    for (i = 0; i < STATE_ARRAYS && t->n != 0 && t->arrays; ++i)
        if (place_of(o, t, i)) memcpy(place_of(o, t, i), block + offset_of(o, t, i), bytes_of(o, t, i));
}

/* Puts the memory before a step back, and keeps what the step made of it in `other`. */
static void take_back(void) {
    memcpy(other.memory, w.memory, ROOM), memcpy(other.counts, w.counts, sizeof w.counts);
    memcpy(w.memory, start.memory, ROOM), memcpy(w.counts, start.counts, sizeof w.counts);
}

/* The same slices, or those of the tensor whose state is in the other form. */
static void step_otherwise(const kopt_step *s, const kopt_tensor *t, size_t low, size_t high, int turn) {
    const kopt_optimizer o = formats_of(s);
    kopt_state_arrays views;
    kopt_tensor turned = *t;
    if (turn) turned = other_form(&o, t, block_room[0], &views);
    step_sliced(s, &turned, low, high);
    if (turn) put_back(&o, t, block_room[0]);
}

/* w is the result of a step on `count` tensors that share nothing; `start` is how it began. The reference, or another
   instruction set in slices, must give the same. */
static void step_again(const kopt_step *s, const kopt_optimizer *o, const kopt_tensor *t, size_t count) {
    const kopt_isa isa = kopt_isa_current();
    uint32_t how = below(4);
    size_t i;
    if (how == 0) return;
    take_back();
    if (how == 1 && o != NULL) {
        for (i = 0; i < count; ++i) {
            const size_t at = (size_t)((unsigned char *)t[i].counts - w.memory);
            kopt_state_arrays views;
            const kopt_tensor block = t[i].arrays ? other_form(o, &t[i], block_room[i], &views) : t[i];
            ref_step_tensor(o, &block);
            put_back(o, &t[i], block_room[i]);
            if (t[i].counts && t[i].n && at < ROOM) /* where an empty tensor counts, may be another's weights */
                memcpy(t[i].counts, other.memory + at, sizeof *t[i].counts); /* it does not count */
        }
        REQUIRE(memcmp(other.memory, w.memory, ROOM) == 0, "a step is not the reference's");
        return;
    }
    force_other(isa);
    for (i = 0; i < count; ++i) step_otherwise(s, &t[i], 0, t[i].n, how == 3);
    kopt_isa_force(isa);
    REQUIRE(memcmp(other.memory, w.memory, ROOM) == 0, "another instruction set, in slices, differs");
    REQUIRE(memcmp(other.counts, w.counts, sizeof w.counts) == 0, "another instruction set, in slices, counts others");
}

static int neighbours_share(const kopt_optimizer *o, const kopt_tensor *a, const kopt_tensor *b) {
    span x[SPANS], y[SPANS];
    int i, k;
    spans(o, a, x), spans(o, b, y);
    for (i = 0; i < SPANS; ++i)
        for (k = 0; k < SPANS; ++k) {
            const int grads = i == GRAD_SPAN && k == GRAD_SPAN, counts = i == COUNTS_SPAN && k == COUNTS_SPAN;
            if (!counts && !(grads && !o->zero_grad) && share(x[i].p, x[i].size, y[k].p, y[k].size)) return 1;
        }
    return 0;
}

/* Lists some tensors, mostly different ones. */
static void make_list(size_t count) {
    size_t i;
    for (i = 0; i < count; ++i) w.list[i] = w.t[i < TENSORS && byte() & 15 ? i : below(TENSORS)];
}

/* Is the list such as a step of this optimizer takes, or, without gradients, kopt_save()? Without blocks, the state
   blocks may have anything in them. *apart: no two of its tensors share memory. */
static int list_good(const kopt_optimizer *opt, size_t count, int with_grad, int blocks, int *apart) {
    const kopt_tensor *list = w.list;
    kopt_optimizer o = *opt;
    size_t i, j;
    if (!with_grad) o.zero_grad = 0; /* gradients do not matter */
    *apart = 1;
    for (i = 0; i < count; ++i) {
        if (!tensor_good(&o, &list[i], with_grad) || (blocks && !block_good(&o, &list[i]))) return 0;
        for (j = 0; j < i; ++j) {
            const int share_memory = list[i].n && list[j].n && neighbours_share(&o, &list[j], &list[i]);
            if (share_memory) *apart = 0;
            if (j != before_in_list(list, i) || !list[i].n || !list[j].n) continue;
            if (share_memory || !follows(&list[j], &list[i])) return 0;
        }
    }
    return 1;
}

/* An optimizer for a caller of any version and any sizes, who has opt_size bytes. */
static void call_make(void) {
    static const int versions[] = {KOPT_VERSION - 1, KOPT_VERSION + 1, 0, -KOPT_VERSION, 10000 + KOPT_VERSION};
    const int which = byte() & 7 ? (int)below(12) : any_enum();
    const int rule = which > 7 && which < 12 ? which - 8 + KOPT_RULE_ADAMW : which;
    const int version = below(8) < 5 ? KOPT_VERSION : versions[below(5)];
    const size_t size = below(4) ? sizeof(kopt_optimizer) : below(600);
    const size_t tensor_size = below(4) ? sizeof(kopt_tensor) : below(300);
    unsigned char *p = byte() & 31 ? w.memory + first_aligned() + 8 * below(ROOM / 8 - 100) : NULL;
    kopt_result r, expected = KOPT_OK, later = KOPT_OK;
    size_t i;
    if (!in_enum(rule, KOPT_RULE_ADAM_ATAN2) && (rule < KOPT_RULE_ADAMW || rule > KOPT_RULE_SMOOTH_LION))
        expected = KOPT_ERROR_OPTION, later = KOPT_ERROR_UNINITIALIZED;
    if (version != KOPT_VERSION || size != sizeof(kopt_optimizer) || tensor_size != sizeof(kopt_tensor))
        expected = later = KOPT_ERROR_VERSION;
    if (p == NULL) expected = KOPT_ERROR_NULL;
    prepare();
    writes(p, size);
    hostile_control();
    r = kopt_optimizer_init((kopt_optimizer *)(void *)p, (kopt_rule)rule, 0.25, version, size, tensor_size);
    finish(41, "kopt_optimizer_init", took(r), -1);
    REQUIRE(r == expected, "another result of an optimizer");
    if (p == NULL || size != sizeof w.opt) return;
    for (i = r == KOPT_ERROR_VERSION ? 4 : 0; r != KOPT_OK && i < size; ++i)
        REQUIRE(p[i] == 0, "a refused optimizer is not zero");
    memcpy(&w.opt, p, size);
    r = kopt_step_begin(&w.step, &w.opt);
    REQUIRE(r == later, "the first step of an optimizer");
    if (!took(r)) return;
    step_opt = w.opt, --step_opt.step, step_is_pure = 1;
}

static void call_optimizer_step(void) {
    size_t count = below(LIST + 1), i;
    int expected = 0, apart, good;
    uint32_t no = below(64);
    kopt_optimizer o;
    if (count > TENSORS && byte() & 7) count = 1;
    make_list(count);
    memcpy(&start, &w, sizeof w);
    o = w.opt;
    if (optimizer_good(&w.opt) && w.opt.step != UINT32_MAX) expected = scalars_good(&w.opt);
    if (!list_good(&o, count, 1, 1, &apart) || no == 1 || (no == 2 && count)) expected = 0;
    prepare();
    for (i = 0; i < count; ++i) announce_step(&o, &w.list[i], 0, w.list[i].n);
    writes(&w.opt.step, sizeof w.opt.step);
    hostile_control();
    good = took(kopt_optimizer_step(no == 1 ? NULL : &w.opt, no == 2 ? NULL : w.list, count));
    finish(0, "kopt_optimizer_step", good, expected && !apart ? -1 : expected);
    if (!good) return;
    REQUIRE(w.opt.step == o.step + 1, "the step is not counted once");
    if (apart) {
        kopt_step s;
        kopt_optimizer again = o;
        REQUIRE(kopt_step_begin(&s, &again) == KOPT_OK, "begin refuses what a step accepts");
        step_again(&s, &o, w.list, count);
    }
}

static void call_step_begin(void) {
    int good, expected = 0;
    uint32_t no = below(64);
    kopt_optimizer o = w.opt;
    if (optimizer_good(&w.opt) && w.opt.step != UINT32_MAX) expected = scalars_good(&w.opt);
    if (no == 1 || no == 2) expected = 0;
    prepare();
    writes(&w.opt.step, sizeof w.opt.step), writes(&w.step, sizeof w.step);
    hostile_control();
    good = took(kopt_step_begin(no == 2 ? NULL : &w.step, no == 1 ? NULL : &w.opt));
    finish(1, "kopt_step_begin", good, expected);
    if (!good) return;
    REQUIRE(w.opt.step == o.step + 1 && begun_of(&w.step).step == w.opt.step, "the step is not counted once");
    step_opt = o, step_is_pure = 1;
}

static void call_step_run(void) {
    const kopt_optimizer o = formats_of(&w.step);
    const size_t count = byte() & 3 ? 1 : below(LIST + 1);
    uint32_t no = below(64);
    int good, apart, expected;
    size_t i;
    make_list(count);
    expected = list_good(&o, count, 1, 1, &apart) && step_good(&w.step) && no != 1 && !(no == 2 && count);
    memcpy(&start, &w, sizeof w);
    prepare();
    for (i = 0; i < count; ++i) announce_step(&o, &w.list[i], 0, w.list[i].n);
    hostile_control();
    good = took(kopt_step_run(no == 1 ? NULL : &w.step, no == 2 ? NULL : w.list, count));
    finish(2, "kopt_step_run", good, expected && !apart ? -1 : expected);
    if (good && apart) step_again(&w.step, step_is_pure ? &step_opt : NULL, w.list, count);
}

/* What of each tensor of a list is in a range of its elements; [first, last): from the first tensor with part in it
   to the last. good: the list has these elements, and no tensor up to the last is longer than memory. */
typedef struct {
    size_t from[TENSORS], to[TENSORS], first, last;
    int good;
} list_cut;

static list_cut cut_list(size_t count, size_t begin, size_t end) {
    list_cut c = {{0}, {0}, 0, 0, 1};
    size_t i, size = 0;
    for (i = 0, c.first = count; i < count && size < end; ++i) {
        const size_t n = w.list[i].n;
        if (is_long(n)) break; /* size < end */
        c.from[i] = begin > size ? begin - size : 0, c.to[i] = end - size < n ? end - size : n;
        if (c.from[i] > n) c.from[i] = n;
        if (c.from[i] < c.to[i]) c.first = c.first < i ? c.first : i, c.last = i + 1;
        size += n;
    }
    if (begin > end || size < end) c.good = 0;
    return c;
}

/* A range of a list, and each of its parts once more, in slices, on another instruction set. */
static void call_step_range(void) {
    const kopt_optimizer o = formats_of(&w.step);
    const kopt_isa isa = kopt_isa_current();
    const int coded = o.first_moment_format == KOPT_Q8 || o.second_moment_format == KOPT_Q8;
    const int blocks = coded && ref_moments(&o) > 0;
    const size_t count = byte() & 3 ? below(TENSORS + 1) : 1;
    size_t i, j, k, size = 0, begin, end;
    list_cut c;
    uint32_t no = below(64);
    int good, apart = 1, expected = step_good(&w.step);
    for (i = 0; i < count; ++i) {
        w.list[i] = w.t[byte() & 15 ? i : below(TENSORS)];
        if (is_long(w.list[i].n) && byte() & 15) w.list[i].n = 0;
        if (!is_long(w.list[i].n)) size += w.list[i].n;
    }
    begin = below((uint32_t)size + 2), end = begin + below((uint32_t)size + 2);
    if (byte() & 7 && end > size) end = size;
    if (no == 3) end = SIZE_MAX - begin;
    c = cut_list(count, begin, end);
    if (!c.good) expected = 0;
    for (i = c.first; i < c.last && expected; ++i) {
        const kopt_tensor *t = &w.list[i];
        const size_t n = t->n;
        if (!tensor_good(&o, t, 1) || !block_good(&o, t)) expected = 0;
        for (j = c.first; j < i && expected; ++j) {
            const int share_memory = n && w.list[j].n && neighbours_share(&o, &w.list[j], t);
            k = j + 1;
            while (k < i && w.list[k].n == 0) ++k; /* k == i: only tensors without elements are between j and i */
            if (n && w.list[j].n && k == i && (share_memory || !follows(&w.list[j], t))) expected = 0;
            if (share_memory) apart = 0;
        }
        if (blocks) c.from[i] -= c.from[i] % 64, c.to[i] -= c.to[i] == n ? 0 : c.to[i] % 64;
        if (c.from[i] < c.to[i] && c.to[i] - c.from[i] != n && must_measure(&w.step, t)) expected = 0;
    }
    if (no == 1 || (no == 2 && count)) expected = 0;
    memcpy(&start, &w, sizeof w);
    prepare();
    for (i = c.first; i < c.last && expected; ++i) announce_step(&o, &w.list[i], c.from[i], c.to[i]);
    for (i = 0; i < count; ++i)
        if (!is_long(w.list[i].n) && w.list[i].state != NULL && w.list[i].state_size >= 64) reads(w.list[i].state, 64);
    hostile_control();
    good = took(kopt_step_range(no == 1 ? NULL : &w.step, no == 2 ? NULL : w.list, count, begin, end));
    finish(3, "kopt_step_range", good, expected && !apart ? -1 : expected);
    for (i = size = 0; i < count && w.list[i].n <= SIZE_MAX - size; ++i) size += w.list[i].n;
    REQUIRE(kopt_list_length(w.list, count) == (i < count ? 0 : size), "another length of a list");
    if (!good || !apart) return;
    take_back();
    force_other(isa);
    for (i = c.last; i-- > c.first;)
        if (c.from[i] < c.to[i]) step_otherwise(&w.step, &w.list[i], c.from[i], c.to[i], (int)below(2));
    kopt_isa_force(isa);
    REQUIRE(memcmp(other.memory, w.memory, ROOM) == 0, "a range of a list is not the ranges of its tensors");
    REQUIRE(memcmp(other.counts, w.counts, sizeof w.counts) == 0, "a range of a list counts others");
}

static int same_nan(uint32_t a, uint32_t b) { return a == b || (ref_is_nan(KOPT_F32, a) && ref_is_nan(KOPT_F32, b)); }

/* The weights and residuals of t are those of the fp32 values at `from`. */
static void require_weights(const kopt_optimizer *o, const kopt_tensor *t, const unsigned char *from) {
    ref_layout l = layout_of(o, t);
    size_t i;
    for (i = 0; i < t->n; ++i) {
        ref_element e;
        uint32_t mask = l.residual_width == 1 ? 0xff : 0xffff, got = ref_get(t->weight, weight_width(t), i);
        ref_write_weight(o, t->weight_format, ref_float(ref_get(from, 4, i)), &e);
        REQUIRE(t->weight_format == KOPT_F32 ? same_nan(got, e.weight) : got == e.weight, "another weight is written");
        if (!l.residual_width) continue;
        if (ref_get(place_of(o, t, RESIDUAL), l.residual_width, i) != (e.residual & mask))
            fail("another residual is written");
    }
}

/* The copy, if there is one, is that of the weights. */
static void require_copy(const kopt_tensor *t) {
    size_t i;
    for (i = 0; t->copy != NULL && i < t->n; ++i) {
        const uint32_t seen = ref_widen(t->weight_format, ref_get(t->weight, weight_width(t), i));
        const uint32_t want = ref_narrow(t->copy_format, seen), got = ref_get(t->copy, ref_width(t->copy_format), i);
        if (got != want && !(ref_is_nan(t->copy_format, got) && ref_is_nan(t->copy_format, want)))
            fail("the copy is not that of the weights");
    }
}

/* Ranger's slow weights are the weights. */
static void require_slow(const kopt_optimizer *o, const kopt_tensor *t) {
    const size_t residual = bytes_of(o, t, SLOW_RESIDUAL);
    if (o->rule != KOPT_RULE_RANGER) return;
    if (memcmp(place_of(o, t, SLOW), t->weight, bytes_of(o, t, SLOW)) != 0 ||
        (residual != 0 && memcmp(place_of(o, t, SLOW_RESIDUAL), place_of(o, t, RESIDUAL), residual) != 0))
        fail("slow weights are not the weights");
}

/* Moments, and residuals if no weights were written, are zero. */
static void require_fresh(const kopt_optimizer *o, const kopt_tensor *t, int residual) {
    size_t i;
    int k;
    for (k = residual ? RESIDUAL : MOMENT; k < SLOW; ++k)
        for (i = 0; i < bytes_of(o, t, k); ++i) REQUIRE(place_of(o, t, k)[i] == 0, "a fresh state");
}

static void call_init(void) {
    const size_t count = byte() & 3 ? 1 : below(LIST + 1);
    unsigned char *from = below(4) == 3 ? NULL : w.memory + below(ROOM);
    uint32_t no = below(64);
    size_t size = 0, i, at = 0;
    int expected, good, apart;
    make_list(count);
    for (i = 0; i < count; ++i) size += is_long(w.list[i].n) ? 0 : 4 * w.list[i].n;
    if (count != 0 && w.list->copy != NULL && w.list->copy_format == KOPT_F32 && below(4) == 3) from = w.list->copy;
    from = fit(from, size);
    expected = optimizer_good(&w.opt) && list_good(&w.opt, count, 0, 0, &apart) && no != 1 && !(no == 2 && count);
    memcpy(&start, &w, sizeof w);
    prepare();
    for (i = 0; i < count && expected; ++i) {
        const kopt_tensor *t = &w.list[i];
        span s[SPANS];
        int k;
        spans(&w.opt, t, s); /* one without elements has counts */
        for (k = 0; k < SPANS; ++k)
            if (k != GRAD_SPAN && share(from, size, s[k].p, s[k].size) &&
                !(k == COPY_SPAN && count == 1 && from == t->copy && t->copy_format == KOPT_F32))
                expected = 0;
    }
    for (i = 0; i < count && expected; ++i) {
        span s[SPANS];
        int k;
        spans(&w.opt, &w.list[i], s);
        if (s[COPY_SPAN].p) writes(s[COPY_SPAN].p, s[COPY_SPAN].size);
        reads(s[0].p, s[0].size); /* where Ranger's slow weights and the copy start */
        if (from) writes(s[0].p, s[0].size);
        writes(s[1].p, s[1].size);
        for (k = ARRAY_SPANS; k < SPANS; ++k) writes(s[k].p, s[k].size);
    }
    if (from) reads(from, size);
    hostile_control();
    good = took(
        kopt_state_init(no == 1 ? NULL : &w.opt, no == 2 ? NULL : w.list, count, (const float *)(const void *)from));
    finish(4, "kopt_state_init", good, expected && !apart ? -1 : expected);
    for (i = 0; i < count && good && apart; at += 4 * w.list[i++].n) {
        const kopt_tensor *t = &w.list[i];
        if (t->n == 0) continue;
        REQUIRE(block_good(&w.opt, t), "the header is not the documented one");
        require_no_numbers(&w.opt, t);
        require_copy(t);
        if (from) require_weights(&w.opt, t, start.memory + (from - w.memory) + at);
        require_slow(&w.opt, t);
        require_fresh(&w.opt, t, from == NULL);
    }
}

/* Moment k of t is that of the fp32 values at `fp32`, as it was written or read. */
static void require_moments(const kopt_optimizer *o, const kopt_tensor *t, int k, const unsigned char *fp32,
                            int reading) {
    const unsigned char *const moment = place_of(o, t, MOMENT + k), *const scales = place_of(o, t, SCALE + k);
    const kopt_format format = ref_format(o, k);
    const int square = ref_square(o, k);
    uint32_t value[64], none[64] = {0}, want;
    unsigned char code[64], scale;
    size_t i, j;
    for (i = 0; i < t->n; ++i) {
        uint32_t x = ref_get(fp32, 4, i), stored = ref_get(moment, ref_width(format), i);
        if (format == KOPT_Q8 && reading) {
            want = ref_bits(ref_decoded((int)stored, scales[i / 64], square));
            REQUIRE(same_nan(x, want), "another value is read");
        } else if (format == KOPT_Q8) {
            size_t n = t->n - i < 64 ? t->n - i : 64;
            if (i % 64 != 0) continue;
            for (j = 0; j < n; ++j) value[j] = ref_get(fp32, 4, i + j);
            ref_quantise(code, &scale, value, n, square, 0, none);
            REQUIRE(!memcmp(code, moment + i, n) && scale == scales[i / 64], "another block is written");
        } else if (reading) {
            REQUIRE(same_nan(x, ref_bits(ref_read_moment(o, k, stored))), "another value is read");
        } else {
            want = ref_write_moment(o, k, ref_float(x));
            REQUIRE(format == KOPT_F32 ? same_nan(stored, want) : stored == want, "another moment");
        }
    }
}

static void call_read_write(int reading) {
    kopt_tensor *t = &w.t[below(TENSORS)];
    const ref_layout l = layout_of(&w.opt, t);
    const kopt_slot what = (kopt_slot)(byte() & 31 ? (int)below(3) : any_enum());
    const size_t size = is_long(t->n) ? 0 : 4 * t->n, weight = weight_width(t);
    const int k = in_enum((int)what, KOPT_SLOT_FOURTH_MOMENT) ? (int)what - KOPT_SLOT_FIRST_MOMENT : 0;
    unsigned char *fp32 = fit(w.memory + below(ROOM), size), *state = t->state;
    uint32_t no = below(64);
    int good, expected, j;
    size_t i;
    span s[SPANS];
    spans(&w.opt, t, s);
    expected = optimizer_good(&w.opt) && tensor_good(&w.opt, t, 0) && block_good(&w.opt, t) &&
               in_enum((int)what, ref_moments(&w.opt));
    for (j = 0; j < SPANS && expected; ++j) expected = j == GRAD_SPAN || !share(fp32, size, s[j].p, s[j].size);
    if (no == 1 || no == 2 || (no == 3 && t->n)) expected = 0;
    prepare();
    if (state != NULL && t->state_size >= 64) reads(state, 64);
    if (expected && t->n) {
        reads(s[0].p, s[0].size), reads(s[1].p, s[1].size), reads(fp32, size);
        for (j = ARRAY_SPANS; j < SPANS; ++j) reads(s[j].p, s[j].size);
        if (reading) writes(fp32, size);
        if (!reading && what == KOPT_SLOT_WEIGHT) {
            writes(s[0].p, s[0].size), writes(s[2].p, s[2].size);
            for (j = 0; j < STATE_ARRAYS; ++j)
                if (j == RESIDUAL || j == SLOW || j == SLOW_RESIDUAL)
                    writes(place_of(&w.opt, t, j), bytes_of(&w.opt, t, j));
        } else if (!reading) {
            writes(place_of(&w.opt, t, MOMENT + k), bytes_of(&w.opt, t, MOMENT + k));
            writes(place_of(&w.opt, t, SCALE + k), bytes_of(&w.opt, t, SCALE + k));
        }
    }
    hostile_control();
    good = took(reading ? kopt_state_read(no == 1 ? NULL : &w.opt, no == 2 ? NULL : t, what,
                                          no == 3 ? NULL : (float *)(void *)fp32)
                        : kopt_state_write(no == 1 ? NULL : &w.opt, no == 2 ? NULL : t, what,
                                           no == 3 ? NULL : (const float *)(const void *)fp32));
    finish(reading ? 5 : 6, reading ? "kopt_state_read" : "kopt_state_write", good, expected);
    if (!good || t->n == 0) return;
    if (what != KOPT_SLOT_WEIGHT) {
        require_moments(&w.opt, t, k, fp32, reading);
    } else if (!reading) {
        require_weights(&w.opt, t, fp32);
        require_slow(&w.opt, t);
        require_copy(t);
    } else {
        for (i = 0; i < t->n; ++i) {
            ref_element e;
            e.weight = ref_get(t->weight, weight, i), e.residual = 0;
            if (l.residual_width) e.residual = ref_get(place_of(&w.opt, t, RESIDUAL), l.residual_width, i);
            REQUIRE(same_nan(ref_get(fp32, 4, i), ref_bits(ref_read_weight(&w.opt, t->weight_format, &e))),
                    "another weight is read");
        }
    }
}

static void call_dither(void) {
    const size_t count = byte() & 3 ? 1 : below(LIST + 1);
    uint32_t no = below(64);
    int good, expected, apart;
    size_t i, k;
    make_list(count);
    expected = optimizer_good(&w.opt) && w.opt.rule != KOPT_RULE_EMA && list_good(&w.opt, count, 0, 1, &apart) &&
               no != 0 && !(no == 1 && count);
    for (i = 0; i < count; ++i)
        if (w.list[i].weight_format != KOPT_F32 && w.opt.rounding == KOPT_NEAREST) expected = 0;
    prepare();
    for (i = 0; i < count; ++i) {
        const kopt_tensor *t = &w.list[i];
        if (t->state != NULL && t->state_size >= 64) reads(t->state, 64);
    }
    for (i = 0; i < count && expected; ++i) {
        const kopt_tensor *t = &w.list[i];
        const size_t size = bytes_of(&w.opt, t, RESIDUAL);
        if (size) reads(place_of(&w.opt, t, RESIDUAL), size);
        for (k = 0; k < size; ++k)
            if (place_of(&w.opt, t, RESIDUAL)[k] != 0) expected = 0;
    }
    for (i = 0; i < count && expected; ++i) {
        const kopt_tensor *t = &w.list[i];
        if (bytes_of(&w.opt, t, RESIDUAL) == 0) continue;
        reads(t->weight, t->n * weight_width(t));
        writes(place_of(&w.opt, t, RESIDUAL), bytes_of(&w.opt, t, RESIDUAL));
        writes(t->copy, t->n * ref_width(t->copy_format));
        writes(place_of(&w.opt, t, SLOW), bytes_of(&w.opt, t, SLOW));
        writes(place_of(&w.opt, t, SLOW_RESIDUAL), bytes_of(&w.opt, t, SLOW_RESIDUAL));
    }
    hostile_control();
    good = took(kopt_state_dither(no == 0 ? NULL : &w.opt, no == 1 ? NULL : w.list, count));
    finish(40, "kopt_state_dither", good, expected && !apart ? -1 : expected);
    for (i = 0; i < count && good && apart; ++i) {
        const kopt_tensor *t = &w.list[i];
        const ref_layout l = layout_of(&w.opt, t);
        if (t->n == 0 || !l.residual_width) continue;
        require_slow(&w.opt, t);
        require_copy(t);
        for (k = 0; k < t->n; ++k) { /* the weight and its residual are what their sum is stored as */
            const kopt_format f = t->weight_format;
            ref_element e, again;
            e.weight = ref_get(t->weight, 2, k),
            e.residual = ref_get(place_of(&w.opt, t, RESIDUAL), l.residual_width, k);
            if (e.residual == 0) continue; /* or -0 and 0 would be 0 */
            ref_write_weight(&w.opt, f, ref_read_weight(&w.opt, f, &e), &again);
            REQUIRE(again.weight == e.weight &&
                        (uint16_t)(again.residual ^ e.residual) << (16 - 8 * l.residual_width) == 0,
                    "a drawn residual changes the weight");
        }
    }
}

/* A header that some block, or some tensor in a checkpoint, may have. */
static int header_good(const unsigned char *h) {
    static const unsigned char least[] = {0, 2, 1, 4, 2, 2, 0, 2}, largest[] = {1, 3, 1, 4, 2, 2, 0, 2};
    const int rule = h[5], rounding = h[7] % 16, moments = h[9] % 8, decay = h[9] / 16 % 4;
    const int compensated = h[6] != KOPT_F32 && (rounding == KOPT_KAHAN || rounding == KOPT_COMPACT);
    const int coded = h[8] != KOPT_F32 || h[11] > 1; /* has any moment 16 or 8 bits, if there are two? */
    if (memcmp(h, "KOPT\2", 5) != 0 || h[10] > 1) return 0;
    if (h[11] != 0 && (h[11] > 6 || h[11] == 4 || h[11] == 5 || h[11] == h[8] + 1 || moments < 2)) return 0;
    if (rule > KOPT_RULE_ADAM_ATAN2 || h[6] > KOPT_FP16 || rounding > KOPT_FEEDBACK) return 0;
    if (h[8] > 5 || h[8] == 3 || h[8] == 4) return 0;
    if (rounding == KOPT_FEEDBACK && (moments == 0 || rule == KOPT_RULE_LION || rule > KOPT_RULE_RADAM)) return 0;
    if (rounding == KOPT_FEEDBACK && h[8] == KOPT_FP16) return 0;
    if (rounding == KOPT_FEEDBACK && h[10] && h[8] != KOPT_F32 && !(h[7] & 16)) return 0;
    if (moments < least[rule] || moments > largest[rule] || (h[6] == KOPT_F32 && rounding != 0)) return 0;
    if (little(h + 16, 8) > (SIZE_MAX - 256) / 32 || little(h + 24, 8) >> 63 != 0) return 0;
    if (h[10] == 0) return h[7] < 16 && h[9] < 8 && little(h + 16, 8) != 0 && (moments != 0 || rounding >= KOPT_KAHAN);
    if (h[7] >= 64 || (h[7] & 16 && (moments == 0 || !coded)) || (h[7] & 32 && !compensated)) return 0;
    if (decay > KOPT_DECAY_FULLY_DECOUPLED || (decay != 0 && rule == KOPT_RULE_EMA)) return 0;
    return (!(h[9] & 8) || (rule == KOPT_RULE_SGD && moments != 0)) && (!(h[9] & 64) || rule == KOPT_RULE_ADAM) &&
           (!(h[9] & 128) || rule == KOPT_RULE_ADAM_ATAN2);
}

/* Bytes of a tensor with such a header in a checkpoint, or of such a block. */
static uint64_t header_size(const unsigned char *h) {
    const uint64_t step = h[10] ? 4 : 16, n = little(h + 16, 8), weight = h[6] == KOPT_F32 ? 4 : 2;
    const int rounding = h[7] % 16, ranger = h[5] == KOPT_RULE_RANGER;
    const int kept = rounding < KOPT_KAHAN || rounding == KOPT_FEEDBACK ? 0 : rounding == KOPT_COMPACT ? 1 : 2;
    const uint64_t residual = n * (uint64_t)kept;
    uint64_t size[13] = {0}, all = 64;
    kopt_optimizer o = kopt_adamw(0);
    int k;
    o.rule = (kopt_rule)h[5], o.amsgrad = h[9] % 8 == 3, o.momentum = h[9] % 8;
    o.first_moment_format = h[8] == 5 ? KOPT_Q8 : (kopt_format)h[8];
    o.second_moment_format = h[11] == 0 ? o.first_moment_format : h[11] == 6 ? KOPT_Q8 : (kopt_format)(h[11] - 1);
    size[0] = h[10] ? n * weight : 0, size[1] = residual;
    if (ranger) size[2] = n * weight, size[3] = residual;
    for (k = 0; k < h[9] % 8; ++k) {
        size[4 + k] = n * ref_width(ref_format(&o, k));
        size[8 + k] = ref_format(&o, k) == KOPT_Q8 ? (n + 63) / 64 : 0;
    }
    if (h[10] && rounding == KOPT_FEEDBACK && n != 0) size[12] = 16;
    for (k = 0; k < 13; ++k) all += (size[k] + step - 1) / step * step;
    return all;
}

/* What a header says, whatever its bytes are: of a block or, with a bit that is wrong or none, of a checkpoint. */
static void call_inspect(void) {
    static unsigned char image[176 + 64 + 4 * LONGEST + 32 * LONGEST], saved[64];
    const kopt_tensor *t = &w.t[below(TENSORS)];
    const unsigned char *h = t->state;
    size_t size = byte() & 15 ? t->state_size : below(64);
    kopt_optimizer o;
    kopt_tensor shape = {0};
    uint64_t count = 0, whole = 0, offset;
    int expected, good,
        right = h != NULL && size >= 64 && optimizer_good(&w.opt) && tensor_good(&w.opt, t, 0) && t->n &&
                layout_of(&w.opt, t).size && block_good(&w.opt, t);
    if (byte() & 1 && right && kopt_save(&w.opt, t, 1, image, sizeof image) == KOPT_OK) {
        require_saved_header(&w.opt, t, image + 176);
        memcpy(saved, image + 176, 64), h = saved, size = byte() & 15 ? 64 : below(64);
        if (byte() & 1) saved[below(64)] ^= (unsigned char)(1u << below(8)), right = 0;
    }
    expected = h != NULL && size >= 64;
    if (expected) {
        reads(h, 64);
        expected = header_good(h);
    }
    prepare();
    if (h != NULL && size >= 64) reads(h, 64);
    hostile_control();
    good = took(kopt_inspect(h, size, &o, &count, &whole));
    finish(15, "kopt_inspect", good, expected);
    offset = byte() & 3 ? 0 : word() % 65;
    expected = expected && offset == 0;
    prepare();
    if (h != NULL && size >= 64) reads(h, 64);
    hostile_control();
    finish(7, "kopt_inspect_tensor", took(kopt_inspect_tensor(h, size, &offset, &shape)), expected);
    if (!good) return;
    REQUIRE((int)o.rule == h[5] && (int)o.rounding == h[7] % 16 && o.step == (h[10] ? little(h + 40, 4) : 0) &&
                o.seed == (h[10] ? little(h + 32, 8) : 0) && count == 1 && whole == header_size(h),
            "another header is told of");
    if (right)
        REQUIRE(ref_layout_of(&o, t->weight_format, t->n).size == layout_of(&w.opt, t).size &&
                    !o.stable == !(h[10] && w.opt.rule == KOPT_RULE_ADAM && w.opt.stable),
                "another optimizer is told of");
    if (expected)
        REQUIRE((int)shape.weight_format == h[6] && shape.n == little(h + 16, 8) && shape.id == little(h + 12, 4) &&
                    shape.first_index == little(h + 24, 8) && offset == whole,
                "another tensor is told of");
}

/* A walk over the tensors of a checkpoint of `size` bytes, which have a wrong bit at `wrong`, or none if that is size.
   Only `there` bytes are there. */
static void walk_image(const unsigned char *image, size_t size, size_t there, size_t wrong, size_t count) {
    unsigned char *p = malloc(there + (there == 0)); /* ends there, for a sanitizer */
    uint64_t offset = byte() & 1 ? 0 : byte() & 1 ? below((uint32_t)size + 8) : ~(uint64_t)0 - word() % 512;
    const uint64_t begun = offset;
    size_t walked = 0;
    int whole = 1;
    if (p == NULL) return;
    memcpy(p, image, there);
    for (;;) {
        const uint64_t at = offset == 0 ? 176 : offset, was = offset;
        kopt_tensor t;
        int good, expected = there >= 176 && at < size - 4 && size - 4 - at >= 64 && at + 64 <= there;
        if (expected) {
            const unsigned char *h = p + at;
            expected = header_good(h) && h[10] == 1 && header_size(h) <= size - 4 - at;
        }
        if (wrong < 176 && there >= 176) expected = -1; /* the head may be good or bad */
        prepare();
        hostile_control();
        good = took(kopt_inspect_tensor(p, there, &offset, &t));
        finish(7, "kopt_inspect_tensor", good, expected);
        REQUIRE(good ? at + 64 <= offset && at + 64 <= there : offset == was, "a step that leads nowhere");
        if (!good) break;
        REQUIRE(t.n == little(p + at + 16, 8) && t.id == little(p + at + 12, 4) && t.weight == NULL &&
                    t.state == NULL && t.state_size == 0 && (int)t.weight_format == p[at + 6] &&
                    offset == at + header_size(p + at),
                "another tensor is told of");
        ++walked;
        whole &= (int)(offset <= there);
    }
    if (wrong == size && there == size && begun == 0)
        REQUIRE(walked == count && whole && offset == (count ? size - 4 : 0), "not all tensors are told of");
    free(p);
}

static void call_number(void) {
    const size_t count = below(LIST + 1);
    const uint32_t first = byte() & 1 ? word() : UINT32_MAX - below(LIST + 1);
    const int expected = count == 0 || first + (uint64_t)count - 1 <= UINT32_MAX;
    size_t i;
    int good;
    for (i = 0; i < count; ++i) w.list[i] = w.t[i % TENSORS];
    prepare();
    for (i = 0; i < count; ++i) writes(&w.list[i].id, sizeof w.list[i].id);
    hostile_control();
    good = took(kopt_list_set_ids(w.list, count, first));
    finish(16, "kopt_list_set_ids", good, expected);
    for (i = 0; i < count && good; ++i) REQUIRE(w.list[i].id == first + i, "another id");
}

typedef struct image_bytes {
    unsigned char *at;
    size_t size;
} image_bytes;

static int append_image(void *user, const void *data, size_t size) {
    image_bytes *f = user;
    memcpy(f->at + f->size, data, size);
    f->size += size;
    return 0;
}

static int read_image(void *user, uint64_t offset, void *data, size_t size) {
    const image_bytes *f = user;
    if (offset > f->size || size > f->size - (size_t)offset) return 1;
    memcpy(data, f->at + (size_t)offset, size);
    return 0;
}

static void read_state(const kopt_optimizer *o, const kopt_tensor *t) {
    int k;
    if (t->n && !t->arrays) reads(t->state, layout_of(o, t).size);
    for (k = 0; k < STATE_ARRAYS && t->arrays; ++k) reads(place_of(o, t, k), bytes_of(o, t, k));
}

static void spoil_state(const kopt_optimizer *o, const kopt_tensor *t) {
    int k;
    if (t->n && !t->arrays && layout_of(o, t).size) memset(t->state, 0x5a, layout_of(o, t).size);
    for (k = 0; k < STATE_ARRAYS && t->arrays; ++k)
        if (bytes_of(o, t, k)) memset(place_of(o, t, k), 0x5a, bytes_of(o, t, k));
}

/* A list is saved; with one damaged bit, or cut off, it is not loaded; whole, it is loaded over anything, and saved
   again it is the same bytes. */
static void call_checkpoint(void) {
    static unsigned char image[LIST * (64 + 4 * LONGEST + 32 * LONGEST)], again[sizeof image];
    const size_t count = below(LIST + 1);
    size_t i, size, at;
    int apart, expected, good, k;
    kopt_optimizer o;
    kopt_file file;
    image_bytes image_file;
    uint64_t found = 0, bytes = 0;
    make_list(count);
    expected = optimizer_good(&w.opt) && list_good(&w.opt, count, 0, 1, &apart);
    prepare();
    for (i = 0; i < count; ++i) {
        const kopt_tensor *t = &w.list[i];
        if (t->state != NULL && t->state_size >= 64) reads(t->state, 64);
        if (expected) reads(t->weight, t->n * weight_width(t));
        if (expected) read_state(&w.opt, t);
    }
    hostile_control();
    good = took(kopt_save(&w.opt, w.list, count, image, sizeof image));
    finish(37, "kopt_save", good, expected);
    if (!good) return;
    size = kopt_save_size(&w.opt, w.list, count);
    REQUIRE(size >= 180 && size <= sizeof image && little(image + 24, 8) == size, "another size");
    for (i = 0; i < count && w.list[i].weight_format == KOPT_F32;) ++i;
    REQUIRE(image[6] == (i < count ? (int)w.list[i].weight_format : count ? KOPT_F32 : KOPT_BF16), "another format");
    file.write = append_image, file.read = read_image, file.user = &image_file;
    image_file.at = again, image_file.size = 0;
    REQUIRE(kopt_save_to(&w.opt, w.list, count, &file) == KOPT_OK && image_file.size == size &&
                memcmp(again, image, size) == 0,
            "in pieces, it is saved in another way");
    memset(&o, 0, sizeof o);
    REQUIRE(kopt_inspect(image, 176, &o, &found, &bytes) == KOPT_OK && found == count && bytes == size &&
                o.rule == w.opt.rule && o.step == w.opt.step && bits_of(o.lr) == bits_of(w.opt.lr) &&
                (o.rule != KOPT_RULE_EMA || bits_of(1 - o.beta1) == bits_of(1 - w.opt.beta1)),
            "another optimizer is told of");
    walk_image(image, size, byte() & 3 ? size : below((uint32_t)size), size, count);
    at = below(2) ? below(176) : below((uint32_t)size);
    image[at] ^= (unsigned char)(1u << below(8));
    walk_image(image, size, byte() & 3 ? size : below((uint32_t)size), at, count);
    memcpy(again, image, sizeof image);
    prepare();
    hostile_control();
    finish(38, "kopt_load", took(kopt_load(&w.opt, w.list, count, image, size)), 0);
    REQUIRE(kopt_save(&w.opt, w.list, count, image, size) == KOPT_OK, "it is not saved twice");
    prepare();
    hostile_control();
    image_file.at = image, image_file.size = below((uint32_t)size);
    good = took(at & 1 ? kopt_load(&w.opt, w.list, count, image, image_file.size)
                       : kopt_load_from(&w.opt, w.list, count, &file));
    finish(38, "kopt_load", good, 0);
    if (!apart) return;
    for (i = 0; i < count; ++i) {
        const kopt_tensor *t = &w.list[i];
        if (t->n == 0) continue;
        memset(t->weight, 0x5a, t->n * weight_width(t));
        spoil_state(&w.opt, t);
    }
    w.opt.step = word(), w.opt.seed = word(), w.opt.lr = 0.5;
    prepare();
    for (i = 0; i < count; ++i) {
        const kopt_tensor *t = &w.list[i];
        if (t->n == 0) continue;
        writes(t->weight, t->n * weight_width(t));
        if (!t->arrays) writes(t->state, layout_of(&w.opt, t).size);
        for (k = 0; k < STATE_ARRAYS && t->arrays; ++k) writes(place_of(&w.opt, t, k), bytes_of(&w.opt, t, k));
        if (t->copy) writes(t->copy, t->n * ref_width(t->copy_format));
    }
    writes(&w.opt, sizeof w.opt);
    hostile_control();
    image_file.size = size;
    good = took(at & 1 ? kopt_load(&w.opt, w.list, count, image, size) : kopt_load_from(&w.opt, w.list, count, &file));
    finish(38, "kopt_load", good, 1);
    for (i = 0; i < count; ++i) require_copy(&w.list[i]);
    REQUIRE(kopt_save(&w.opt, w.list, count, again, size) == KOPT_OK && memcmp(again, image, size) == 0,
            "what was loaded is not what was saved");
}

/* One tensor is saved, moved, also to the other form, loaded by an optimizer that has not stepped, and stepped. */
static void call_resume(void) {
    static unsigned char image[176 + 64 + 4 * LONGEST + 32 * LONGEST], later[sizeof image];
    kopt_tensor *t = &w.t[below(TENSORS)];
    kopt_optimizer o = w.opt;
    size_t total, i;
    unsigned char *place, *block = t->state;
    kopt_state_arrays *const arrays = &w.arrays[t - w.t];
    int turn, k;
    if (!optimizer_good(&o) || o.step == UINT32_MAX || scalars_good(&o) != 1 || !tensor_good(&o, t, 1)) return;
    total = t->n ? layout_of(&o, t).size : 0;
    if (total == 0 || !block_good(&o, t)) return;
    memcpy(&start, &w, sizeof w);
    if (kopt_optimizer_step(&w.opt, t, 1) != KOPT_OK) return;
    REQUIRE(kopt_save(&w.opt, t, 1, later, sizeof later) == KOPT_OK, "save refuses what a step accepts");
    memcpy(&w, &start, sizeof w);
    REQUIRE(kopt_save(&w.opt, t, 1, image, sizeof image) == KOPT_OK, "save refuses what a step accepts");
    place = fit(w.memory + below(ROOM), total);
    for (i = 0; i < SPANS; ++i) { /* onto free memory only */
        span s[SPANS];
        spans(&o, t, s);
        if (share(place, total, s[i].p, s[i].size)) place = block;
    }
    if (place == NULL) return; /* arrays, and no free memory */
    memset(place, 0x5a, total);
    if (place != block && block != NULL) memset(block, 0xee, total);
    memset(t->weight, 0x5a, t->n * weight_width(t));
    turn = !t->arrays && byte() & 1;
    t->state = place, t->state_size = total, t->arrays = NULL;
    for (k = 0; k < STATE_ARRAYS && turn; ++k) *array_of(arrays, k) = place_of(&o, t, k);
    if (turn) arrays->size = sizeof *arrays, t->arrays = arrays, t->state = NULL;
    w.opt.step = word(), w.opt.seed = word();
    REQUIRE(kopt_load(&w.opt, t, 1, image, sizeof image) == KOPT_OK, "what was saved is not loaded");
    REQUIRE(w.opt.step == o.step && w.opt.seed == o.seed, "step and seed are not restored");
    REQUIRE(kopt_optimizer_step(&w.opt, t, 1) == KOPT_OK, "what was loaded is not stepped");
    REQUIRE(kopt_save(&w.opt, t, 1, image, sizeof image) == KOPT_OK, "save refuses what a step accepts");
    if (memcmp(image, later, kopt_save_size(&w.opt, t, 1)) != 0) fail("resumed, the weights or the state differ");
    tally[9].name = "saved, moved, loaded, stepped", ++tally[9].accepted, ++tally[9].refused;
}

static void call_arrays_of(void) {
    kopt_tensor *t = &w.t[below(TENSORS)];
    kopt_state_arrays *out = byte() & 7 ? &w.found : &w.arrays[t - w.t], *want = &other.found;
    const uint32_t no = below(64);
    int good, k, expected = optimizer_good(&w.opt) && tensor_good(&w.opt, t, 0) && block_good(&w.opt, t) && no > 2;
    memset(want, 0, sizeof *want);
    want->size = sizeof *want;
    for (k = 0; k < STATE_ARRAYS && expected; ++k)
        if (t->n != 0 || t->arrays) *array_of(want, k) = place_of(&w.opt, t, k);
    prepare();
    if (t->state != NULL && t->state_size >= 64) reads(t->state, 64);
    writes(out, sizeof *out);
    hostile_control();
    good = took(kopt_state_arrays_of(no == 0 ? NULL : &w.opt, no == 1 ? NULL : t, no == 2 ? NULL : out));
    finish(8, "kopt_state_arrays_of", good, expected);
    REQUIRE(!good || !memcmp(out, want, sizeof *want), "the arrays of a state are elsewhere");
}

static void call_convert(void) {
    kopt_format to = (kopt_format)(byte() & 31 ? (int)below(3) : any_enum());
    kopt_format from = (kopt_format)(byte() & 31 ? (int)below(3) : any_enum());
    int stochastic = (int)below(2), good, expected;
    size_t n = byte() & 31 ? a_length() : SIZE_MAX / 32 + below(2) * (SIZE_MAX / 2), i;
    size_t room = is_long(n) ? 0 : 4 * n, to_size, from_size;
    unsigned char *dst = byte() & 31 ? fit(w.memory + below(ROOM), room) : NULL;
    unsigned char *src = byte() & 31 ? fit(w.memory + below(ROOM), room) : NULL;
    uint64_t seed = word(), first = an_index();
    uint32_t step = word(), id = byte();
    to_size = is_long(n) ? 0 : n * ref_width(to), from_size = is_long(n) ? 0 : n * ref_width(from);
    expected = in_enum((int)to, KOPT_FP16) && in_enum((int)from, KOPT_FP16) && !is_long(n) &&
               (!stochastic || first >> 63 == 0) &&
               (n == 0 || (dst != NULL && src != NULL && !share(dst, to_size, src, from_size)));
    prepare();
    reads(src, from_size), writes(dst, to_size);
    hostile_control();
    good = took(stochastic ? kopt_convert_stochastic(dst, to, src, from, n, (kopt_random_key){seed, step, id, first})
                           : kopt_convert(dst, to, src, from, n));
    finish(10, "kopt_convert", good, expected);
    for (i = 0; i < n && good; ++i) {
        uint32_t x = ref_widen(from, ref_get(src, ref_width(from), i)), y = ref_get(dst, ref_width(to), i), want;
        want = ref_narrow(to, x);
        if (stochastic && to != KOPT_F32)
            want = ref_stochastic(to, x, ref_number(ref_random(seed, step, id, 1, first + i), 0));
        if (y != want && !(ref_is_nan(to, y) && ref_is_nan(to, want))) fail("a conversion is not the reference's");
    }
}

static void call_all_finite(void) {
    kopt_format f = (kopt_format)(byte() & 15 ? (int)below(3) : any_enum());
    size_t n = byte() & 31 ? a_length() : SIZE_MAX / 4, size = is_long(n) ? 0 : n * ref_width(f), i;
    const unsigned char *p = byte() & 31 ? fit(w.memory + below(ROOM), 4 * (is_long(n) ? 0 : n)) : NULL;
    int good, expected = in_enum((int)f, KOPT_FP16) && !is_long(n) && (p != NULL || n == 0);
    for (i = 0; i < n && expected; ++i) expected = ref_is_finite(f, ref_get(p, ref_width(f), i));
    prepare();
    reads(p, size);
    hostile_control();
    good = kopt_all_finite(p, f, n);
    finish(11, "kopt_all_finite", good, expected);
}

/* Some memory as an array, mostly a good one. */
static kopt_format any_format(void) { return (kopt_format)(byte() & 31 ? (int)below(3) : any_enum()); }
static size_t any_length(void) { return byte() & 31 ? a_length() : SIZE_MAX / 32 + below(3) * (SIZE_MAX / 4); }

static unsigned char *any_array(size_t n) {
    return byte() & 31 ? fit(w.memory + below(ROOM), is_long(n) ? 0 : 4 * n) : NULL;
}

/* A kopt_norm: one of two, or on top of other memory, but where a struct can be. */
static kopt_norm *any_norm(void) {
    uint32_t k = below(16);
    unsigned char *p = w.memory + below(ROOM - sizeof(kopt_norm) - 8);
    if (k == 0) return NULL;
    if (k == 1) return (kopt_norm *)(void *)(p + (8 - (uintptr_t)p % 8));
    return &w.norm[k & 1];
}

/* The sum of what another instruction set finds in two parts is the same. */
static void call_norm_add(void) {
    const kopt_format f = any_format();
    const size_t n = any_length(), width = ref_width(f), size = is_long(n) ? 0 : n * width;
    unsigned char *p = any_array(n);
    kopt_norm *norm = any_norm(), sum, part, first, zero;
    const kopt_isa isa = kopt_isa_current();
    int good, expected = in_enum((int)f, KOPT_FP16) && !is_long(n) && (p != NULL || n == 0) && norm != NULL &&
                         !share(norm, sizeof *norm, p, size);
    size_t cut;
    if (norm) memcpy(&first, norm, sizeof first);
    prepare();
    reads(p, size), writes(norm, sizeof *norm);
    hostile_control();
    good = took(kopt_norm_add(norm, p, f, n));
    finish(13, "kopt_norm_add", good, expected);
    if (!good || n == 0) return;
    force_other(isa);
    memset(&zero, 0, sizeof zero), memcpy(&sum, &zero, sizeof sum), memcpy(&part, &zero, sizeof part);
    cut = below((uint32_t)n + 1);
    REQUIRE(kopt_norm_add(&sum, p + cut * width, f, n - cut) == KOPT_OK && kopt_norm_add(&part, p, f, cut) == KOPT_OK &&
                kopt_norm_merge(&sum, &part) == KOPT_OK && kopt_norm_merge(&sum, &first) == KOPT_OK &&
                kopt_norm_merge(norm, &zero) == KOPT_OK,
            "a part of an array has no norm");
    REQUIRE(!memcmp(&sum, norm, sizeof sum), "the norm of two parts is another");
    kopt_isa_force(isa);
}

static void call_norms(void) {
    kopt_norm *norm = any_norm(), *from = any_norm();
    const double limit = any_double(), scale = any_double();
    size_t count = below(TENSORS + 1), i;
    double value[2], clip[2], stable[2];
    int good, expected = norm != NULL;
    if (below(4) == 0 && norm) /* any bits at all */
        for (i = 0; i < sizeof *norm; i += 7) ((unsigned char *)norm)[i] = (unsigned char)byte();
    for (i = 0; i < count; ++i) {
        const kopt_tensor *t = &w.t[i];
        w.list[i] = *t;
        if (!in_enum((int)t->grad_format, KOPT_FP16) || is_long(t->n) || (t->grad == NULL && t->n)) expected = 0;
        if (expected && share(norm, sizeof *norm, t->grad, t->n * ref_width(t->grad_format))) expected = 0;
    }
    prepare();
    for (i = 0; i < count; ++i)
        if (!is_long(w.list[i].n)) reads(w.list[i].grad, w.list[i].n * ref_width(w.list[i].grad_format));
    writes(norm, sizeof *norm);
    hostile_control();
    good = took(kopt_norm_add_grads(norm, w.list, count));
    finish(14, "kopt_norm_add_grads", good, expected);
    if (norm != NULL && from != NULL && norm != from && share(norm, sizeof *norm, from, sizeof *from)) from = norm;
    prepare();
    reads(from, sizeof *from), writes(norm, sizeof *norm);
    hostile_control();
    good = took(kopt_norm_merge(norm, from));
    finish(31, "kopt_norm_merge", good, norm != NULL && from != NULL);
    for (i = 0; i < 2; ++i) {
        prepare();
        reads(norm, sizeof *norm);
        if (i == 1) hostile_control();
        value[i] = kopt_norm_value(norm), clip[i] = kopt_norm_clip(norm, limit, scale);
        stable[i] = kopt_norm_stable_scale(norm, (uint64_t)count << (8 * count));
        finish(32, "kopt_norm_value and its like", 1, -1);
    }
    expected = norm != NULL && norm->nonfinite == 0 && within(limit, 0, 1.7976931348623157e308) &&
               within(scale, -1e100, 1e100);
    tally[32].refused++;
    REQUIRE(!memcmp(&value[0], &value[1], sizeof *value) && !memcmp(&clip[0], &clip[1], sizeof *clip) &&
                !memcmp(&stable[0], &stable[1], sizeof *stable),
            "the caller's control register changes a norm");
    REQUIRE(expected ? clip[0] >= 0 && clip[0] <= 1 : is_nan(clip[0]), "a wrong clip");
    REQUIRE(norm == NULL ? is_nan(value[0]) && is_nan(stable[0]) : value[0] >= 0 && stable[0] >= 0 && stable[0] <= 1,
            "a norm is impossible");
    REQUIRE(!(limit >= 0 && limit <= 0) || !expected || clip[0] >= 1, "clipped without a limit");
}

/* The norm of a range of a list: the parts one after the other, by kopt_norm_add(). */
static void call_norm_range(void) {
    kopt_norm *norm = any_norm(), parts, none;
    const size_t count = below(TENSORS + 1);
    const uint32_t no = below(64);
    size_t i, size = 0, begin, end;
    int good, pass, expected = norm != NULL;
    list_cut c;
    for (i = 0; i < count; ++i) {
        w.list[i] = w.t[i];
        if (is_long(w.list[i].n)) w.list[i].n = byte() & 15 ? 0 : SIZE_MAX - byte();
        if (!is_long(w.list[i].n)) size += w.list[i].n;
    }
    begin = below((uint32_t)size + 2), end = begin + below((uint32_t)size + 2);
    if (byte() & 7 && end > size) end = size;
    if (no == 2 && count) expected = 0;
    memset(&none, 0, sizeof none), memset(&parts, 0, sizeof parts);
    if (norm) memcpy(&parts, norm, sizeof parts);
    c = cut_list(count, begin, end);
    if (!c.good) expected = 0;
    for (pass = 0; pass < 2; ++pass) {
        if (pass == 1) prepare();
        for (i = c.first; i < c.last && expected; ++i) {
            const kopt_tensor *t = &w.list[i];
            const size_t width = ref_width(t->grad_format);
            if (!in_enum((int)t->grad_format, KOPT_FP16))
                expected = 0; /* also of a tensor in between that has no elements */
            else if (t->n && (t->grad == NULL || share(norm, sizeof *norm, t->grad, t->n * width)))
                expected = 0;
            else if (pass == 1 && c.from[i] < c.to[i])
                reads((const unsigned char *)t->grad + c.from[i] * width, (c.to[i] - c.from[i]) * width);
        }
    }
    writes(norm, sizeof *norm);
    hostile_control();
    good = took(kopt_norm_add_range(norm, no == 2 ? NULL : w.list, count, begin, end));
    finish(36, "kopt_norm_add_range", good, expected);
    for (i = c.first; i < c.last && good; ++i) {
        const kopt_tensor *t = &w.list[i];
        const size_t width = ref_width(t->grad_format);
        if (c.from[i] < c.to[i])
            kopt_norm_add(&parts, (const unsigned char *)t->grad + c.from[i] * width, t->grad_format,
                          c.to[i] - c.from[i]);
    }
    if (!good) return;
    kopt_norm_merge(&parts, &none), kopt_norm_merge(norm, &none); /* in one form */
    REQUIRE(!memcmp(&parts, norm, sizeof parts), "the norm of a range is not that of its parts");
}

static void call_measure(void) {
    const kopt_tensor *t = &w.t[below(TENSORS)];
    const kopt_optimizer o = formats_of(&w.step);
    const size_t begin = below((uint32_t)(is_long(t->n) ? 9 : t->n + 2));
    const size_t size = byte() & 15 ? below(300) : SIZE_MAX - 600;
    const size_t end = begin + size > t->n && byte() & 15 ? t->n : begin + size;
    kopt_norm *norm = any_norm();
    int good, expected = step_good(&w.step) && begun_of(&w.step).stable && tensor_good(&o, t, 1) && block_good(&o, t) &&
                         norm != NULL && begin <= end && end <= t->n;
    span s[SPANS];
    int i;
    spans(&o, t, s);
    for (i = 0; i < SPANS && expected; ++i) expected = !share(norm, sizeof *norm, s[i].p, s[i].size);
    prepare();
    if (t->state && t->state_size >= 64) reads(t->state, 64);
    if (expected && end > begin) {
        const size_t n = end - begin, weight = weight_width(t), grad = ref_width(t->grad_format);
        reads((unsigned char *)t->weight + begin * weight, n * weight);
        reads((unsigned char *)t->grad + begin * grad, n * grad);
        for (i = RESIDUAL; i < SLOW; ++i) {
            const size_t width = width_of(&o, t, i);
            unsigned char *p = place_of(&o, t, i);
            if (p == NULL || (i >= SCALE && i != SCALE + 1)) continue;
            reads(i < SCALE ? p + begin * width : p, (i < SCALE ? n : (t->n + 63) / 64) * width);
        }
    }
    writes(norm, sizeof *norm);
    hostile_control();
    good = took(kopt_norm_add_stable(norm, &w.step, t, begin, end));
    finish(17, "kopt_norm_add_stable", good, expected);
}

/* No magnitude above the largest number of the format that is not above the limit; nothing else changes. */
static void call_clip_value(void) {
    const kopt_format f = any_format();
    const size_t n = any_length(), width = ref_width(f), size = is_long(n) ? 0 : n * width;
    const double limit = any_double();
    unsigned char *p = any_array(n);
    int good, expected = in_enum((int)f, KOPT_FP16) && !is_long(n) && (p != NULL || n == 0) &&
                         within(limit, 0, 1.7976931348623157e308);
    size_t i;
    memcpy(&start, &w, sizeof w);
    prepare();
    writes(p, size);
    hostile_control();
    good = took(kopt_clip_value(p, f, n, limit));
    finish(18, "kopt_clip_value", good, expected);
    for (i = 0; i < n && good; ++i) {
        const uint32_t sign = f == KOPT_F32 ? 0x80000000u : 0x8000u, y = ref_get(p, width, i), mag = y & (sign - 1);
        const uint32_t x = ref_get(start.memory + (p - w.memory), width, i);
        if (ref_is_nan(f, x) || (double)ref_float(ref_widen(f, x & (sign - 1))) <= limit) {
            REQUIRE(x == y, "clipped for no reason");
        } else {
            REQUIRE((x & sign) == (y & sign) && (double)ref_float(ref_widen(f, mag)) <= limit, "not clipped");
            REQUIRE(!((double)ref_float(ref_widen(f, mag + 1)) <= limit), "clipped too much");
        }
    }
}

/* ---- Accumulation and the loss scale ---- */

static void make_sum(void) {
    kopt_accumulator *a = &w.sum;
    const size_t n = a_length();
    const int plain = below(3) == 2;
    *a = kopt_accumulator_of(w.memory + below(ROOM - 8 * LONGEST), (kopt_format)((below(3) + 1) % 3), NULL, n);
    if (!plain) a->residual = (unsigned char *)a->sum + 4 * n, a->rounding = (kopt_rounding)(KOPT_KAHAN + below(3));
    a->residual_rounding = (kopt_rounding)(1 - below(2));
    a->count = below(3), a->step = byte() & 7 ? below(9) : 0xffffffffu - below(2);
    a->id = byte(), a->seed = word(), a->first_index = an_index();
}

static void change_sum(void) {
    kopt_accumulator *a = &w.sum;
    uint32_t k = below(12);
    if (k == 9) a->made_ = word();
    if (k == 10) a->reserved32_ = word();
    if (k == 11) a->reserved_n_ = word();
    if (k == 0) a->format = (kopt_format)any_enum();
    if (k == 1) a->rounding = (kopt_rounding)any_enum();
    if (k == 2) a->residual_rounding = (kopt_rounding)any_enum();
    if (k == 3) a->residual = byte() & 1 || a->sum == NULL ? NULL : (unsigned char *)a->sum + below(9);
    if (k == 4) a->sum = byte() & 7 ? fit(w.memory + below(ROOM), 4 * LONGEST) : NULL;
    if (k == 5) a->n = any_length();
    if (k == 6) a->count = below(2) ? 0 : 0xffffffffu;
    if (k == 7) a->first_index = an_index();
    if (k == 8) a->step = word();
    if (!is_long(a->n)) a->sum = fit(a->sum, 4 * a->n), a->residual = fit(a->residual, 4 * a->n);
}

/* An optimizer whose weights, of the format of the sum, are stored as the sum is. */
static kopt_optimizer stored_like(const kopt_accumulator *a) {
    kopt_optimizer o = kopt_sgd(1, 0);
    o.rounding = a->rounding, o.residual_rounding = a->residual_rounding;
    return o;
}

static int sum_good(const kopt_accumulator *a, const void *array, size_t size) {
    kopt_optimizer o = stored_like(a);
    ref_layout l;
    size_t sum;
    if (a->made_ != kopt_accumulator_of(NULL, KOPT_F32, NULL, 0).made_) return 0;
    if (a->reserved32_ != 0 || a->reserved_n_ != 0) return 0;
    if (!in_enum((int)a->format, KOPT_FP16) || !in_enum((int)a->rounding, KOPT_EXACT)) return 0;
    if (!in_enum((int)a->residual_rounding, KOPT_STOCHASTIC) || is_long(a->n) || a->first_index >> 63) return 0;
    if (a->n == 0) return 1;
    l = ref_layout_of(&o, a->format, a->n);
    sum = a->n * ref_width(a->format);
    if (a->sum == NULL || array == NULL || (a->residual == NULL && l.residual_width)) return 0;
    return !share(a->sum, sum, array, size) && !share(a->residual, a->n * l.residual_width, array, size) &&
           !share(a->sum, sum, a->residual, a->n * l.residual_width);
}

static void call_accumulate(void) {
    kopt_accumulator *a = &w.sum, old;
    const kopt_format f = any_format();
    const size_t n = is_long(a->n) ? 0 : a->n, size = n * ref_width(f);
    const double scale = byte() & 1 ? 1 : any_double();
    unsigned char *grad = any_array(n);
    const kopt_optimizer o = stored_like(a);
    uint32_t no = below(64);
    size_t i, residual_width;
    int good, expected;
    residual_width = ref_layout_of(&o, a->format, n).residual_width;
    expected = no != 1 && in_enum((int)f, KOPT_FP16) && sum_good(a, grad, size) && within(scale, -most, most) &&
               a->step != UINT32_MAX && a->count != UINT32_MAX;
    old = *a;
    memcpy(&start, &w, sizeof w);
    prepare();
    reads(grad, size), writes(a->sum, n * ref_width(a->format)), writes(&a->step, 4), writes(&a->count, 4);
    if (expected) writes(a->residual, n * residual_width);
    hostile_control();
    good = took(kopt_accumulator_add(no == 1 ? NULL : a, grad, f, scale));
    finish(19, "kopt_accumulator_add", good, expected);
    if (!good) return;
    REQUIRE(a->count == old.count + 1 && a->step == old.step + 1, "an addition is not counted once");
    for (i = 0; i < n; ++i) {
        const unsigned char *from = start.memory + ((unsigned char *)a->sum - w.memory);
        const unsigned char *rest = residual_width ? start.memory + ((unsigned char *)a->residual - w.memory) : NULL;
        float delta = ref_float(ref_widen(f, ref_get(grad, ref_width(f), i))), x;
        uint32_t got;
        ref_element e;
        e.weight = old.count ? ref_get(from, ref_width(a->format), i) : 0;
        e.residual = old.count && rest ? ref_get(rest, residual_width, i) : 0;
        x = ref_weight(&o, a->format, e.weight, ref_signed(&o, e.residual));
        if ((float)scale < 1 || (float)scale > 1) delta = ref_mul(delta, (float)scale);
        ref_store_weight(&o, a->format, &e, x, -delta,
                         ref_number(ref_random(a->seed, a->step, a->id, 2, a->first_index + i), 0));
        got = ref_get(a->sum, ref_width(a->format), i);
        REQUIRE(got == e.weight, "a sum is not the reference's");
        got = residual_width ? ref_get(a->residual, residual_width, i) : 0;
        REQUIRE(!residual_width || got == (e.residual & (residual_width == 1 ? 0xff : 0xffff)), "nor its residual");
    }
}

static void call_kahan_add(void) {
    const kopt_isa isa = kopt_isa_current();
    const kopt_format f = (kopt_format)(byte() & 31 ? KOPT_BF16 + (int)below(2) : any_enum());
    const size_t n = any_length(), size = is_long(n) ? 0 : 2 * n;
    unsigned char *const weight = any_array(n), *const c = any_array(n), *const delta = any_array(n);
    kopt_random_key key;
    size_t slice[4];
    int k, good, expected;
    key.seed = word(), key.step = word(), key.id = byte(), key.first_index = an_index();
    expected = (f == KOPT_BF16 || f == KOPT_FP16) && !is_long(n) && key.first_index >> 63 == 0 &&
               (n == 0 || (weight != NULL && c != NULL && delta != NULL && !share(weight, size, c, size) &&
                           !share(weight, size, delta, 2 * size) && !share(c, size, delta, 2 * size)));
    memcpy(&start, &w, sizeof w);
    prepare();
    reads(delta, 2 * size), writes(weight, size), writes(c, size);
    hostile_control();
    good = took(kopt_kahan_add(weight, c, f, (const float *)(void *)delta, n, key));
    finish(39, "kopt_kahan_add", good, expected);
    if (!good || n == 0 || (key.first_index + n) >> 63) return;
    memcpy(other.memory, w.memory, ROOM), memcpy(w.memory, start.memory, ROOM);
    slice[0] = 0, slice[3] = n;
    slice[1] = below((uint32_t)n + 1), slice[2] = slice[1] + below((uint32_t)(n - slice[1]) + 1);
    force_other(isa);
    for (k = 2; k >= 0; --k) {
        kopt_random_key of_slice = key;
        of_slice.first_index += slice[k];
        REQUIRE(kopt_kahan_add(weight + 2 * slice[k], c + 2 * slice[k], f,
                               (const float *)(void *)(delta + 4 * slice[k]), slice[k + 1] - slice[k],
                               of_slice) == KOPT_OK,
                "a slice is refused, but not the whole");
    }
    kopt_isa_force(isa);
    REQUIRE(memcmp(other.memory, w.memory, ROOM) == 0, "another instruction set, in slices, adds otherwise");
}

static void call_accumulator_read(void) {
    const kopt_accumulator *a = &w.sum;
    const size_t n = is_long(a->n) ? 0 : a->n;
    unsigned char *out = any_array(n);
    const kopt_optimizer o = stored_like(a);
    const ref_layout l = ref_layout_of(&o, a->format, n);
    uint32_t no = below(64);
    int good, expected = no != 1 && sum_good(a, out, 4 * n);
    size_t i;
    prepare();
    reads(a->sum, n * ref_width(a->format)), writes(out, 4 * n);
    if (expected) reads(a->residual, n * l.residual_width);
    hostile_control();
    good = took(kopt_accumulator_read(no == 1 ? NULL : a, (float *)(void *)out));
    finish(20, "kopt_accumulator_read", good, expected);
    for (i = 0; i < n && good; ++i) {
        ref_element e;
        e.weight = ref_get(a->sum, ref_width(a->format), i);
        e.residual = l.residual_width ? ref_get(a->residual, l.residual_width, i) : 0;
        REQUIRE(same_nan(ref_get(out, 4, i), a->count ? ref_bits(ref_read_weight(&o, a->format, &e)) : 0),
                "another sum is read");
    }
}

static void make_scaler(void) {
    uint32_t k = below(24);
    w.scaler = kopt_scaler_of();
    w.scaler.scale = below(4) ? 1024 : 1;
    w.scaler.interval = 1 + below(3), w.scaler.hysteresis = 1 + below(3);
    w.scaler.good = below(5), w.scaler.bad = below(5), w.scaler.minimum = below(3);
    if (k == 0) w.scaler.scale = any_double();
    if (k == 1) w.scaler.minimum = any_double();
    if (k == 2) w.scaler.growth = any_double();
    if (k == 3) w.scaler.backoff = any_double();
    if (k == 4) w.scaler.interval = below(2) * 0xffffffffu;
    if (k == 5) w.scaler.hysteresis = below(2) * 0xffffffffu;
    if (k == 6) w.scaler.good = w.scaler.bad = 0xffffffffu;
    if (k == 8) w.scaler.reserved_ = word();
    if (k == 7) w.scaler.steps_ = w.opt.step + below(3); /* from another optimizer, with more steps */
}

static int scaler_good(const kopt_scaler *s) {
    return within(s->scale, 1.1754943508222875e-38, 3.4028234663852886e38) && within(s->minimum, 0, most) &&
           s->interval && s->hysteresis && within(s->growth, 1, 1e30) && s->growth > 1 &&
           within(s->backoff, 1e-30, 1) && s->backoff < 1 && s->reserved_ == 0;
}

static int evaluated, reduced;
static int evaluate(void *user, double scale) { return evaluated += user == &w && scale > 0, 0; }
static int reduce(void *user, kopt_norm *norm) { return reduced += user == &w && norm != NULL, 0; }

/* The same step in ranges gives the weights of kopt_scaler_step(), which are in `other`. */
static void call_scaler_begin(const kopt_optimizer *from, const kopt_scaler *scale, double max_norm, size_t count,
                              int finite) {
    kopt_optimizer o = *from;
    kopt_norm norm;
    kopt_step s;
    size_t i;
    int skipped = 2;
    memcpy(w.memory, start.memory, ROOM), memcpy(w.counts, start.counts, sizeof w.counts), w.scaler = *scale;
    w.scaler.steps_ = 0; /* the step before may have made its own gradients */
    memset(&norm, 0, sizeof norm);
    kopt_norm_add_grads(&norm, w.list, count);
    hostile_control();
    REQUIRE(kopt_scaler_begin(&w.scaler, &s, &o, 1, &norm, max_norm, &skipped) == KOPT_OK && skipped == !finite,
            "a scaled step is not begun");
    set_control(0x1f80u), control = get_control();
    REQUIRE(o.step == from->step + (uint32_t)finite && !memcmp(&other.scaler, &w.scaler, sizeof w.scaler),
            "another count or scale");
    o.step = from->step;
    REQUIRE(!memcmp(&o, from, sizeof o), "a scaled step writes its optimizer");
    for (i = 0; i < count; ++i) {
        const kopt_result result = kopt_step_run(&s, &w.list[i], 1);
        REQUIRE(result == (finite ? KOPT_OK : KOPT_ERROR_STEP), "a scaled step is refused, or a skipped one run");
    }
    REQUIRE(!memcmp(other.memory, w.memory, ROOM) && !memcmp(other.counts, w.counts, sizeof w.counts),
            "a scaled step in ranges");
}

static void call_scaler(void) {
    size_t count = below(LIST), i, j, k;
    const double max_norm = byte() & 1 ? 0 : any_double();
    kopt_closure closure;
    kopt_optimizer o;
    kopt_norm norm;
    int good, expected = 0, finite = 1, with_closure = byte() & 1, with_skipped = byte() & 1;
    uint32_t no = below(64);
    make_scaler();
    closure.evaluate = byte() & 1 ? evaluate : NULL, closure.reduce = byte() & 1 ? reduce : NULL, closure.user = &w;
    for (i = 0; i < count; ++i) w.list[i] = w.t[byte() & 15 ? i : below(TENSORS)];
    memcpy(&start, &w, sizeof w);
    memset(&norm, 0, sizeof norm);
    o = w.opt;
    if (scaler_good(&w.scaler) && optimizer_good(&o) && o.step != UINT32_MAX && within(max_norm, 0, 1.7e308)) {
        o.grad_scale = o.grad_scale / w.scaler.scale, o.clip = 1;
        expected = optimizer_good(&o) && scalars_good(&o); /* the quotient may be out of range */
        if (o.step < w.scaler.steps_ && !(with_closure && closure.evaluate)) expected = 0;
    }
    for (i = 0; i < count && expected; ++i) {
        if (!tensor_good(&o, &w.list[i], 1) || !block_good(&o, &w.list[i])) expected = 0;
        for (j = 0; j < i && expected; ++j) {
            const int next = j == before_in_list(w.list, i);
            if (w.list[i].n == 0 || w.list[j].n == 0) continue;
            if (next && !follows(&w.list[j], &w.list[i])) expected = 0;
            if (!neighbours_share(&o, &w.list[j], &w.list[i])) continue;
            if (!next && expected) return; /* what then is not said */
            expected = 0;
        }
        for (k = 0; k < w.list[i].n && expected; ++k) {
            const kopt_format f = w.list[i].grad_format;
            finite &= ref_is_finite(f, ref_get(w.list[i].grad, ref_width(f), k));
        }
    }
    if (no < 3) expected = 0;
    evaluated = reduced = 0;
    prepare();
    for (i = 0; i < count; ++i) announce_step(&o, &w.list[i], 0, w.list[i].n);
    writes(&w.opt.step, sizeof w.opt.step), writes(&w.scaler, sizeof w.scaler);
    if (with_skipped) writes(&w.skipped, sizeof w.skipped);
    hostile_control();
    good = took(kopt_scaler_step(no == 0 ? NULL : &w.scaler, no == 1 ? NULL : &w.opt, no == 2 && count ? NULL : w.list,
                                 count, max_norm, with_closure ? &closure : NULL, with_skipped ? &w.skipped : NULL));
    finish(21, "kopt_scaler_step", good, no == 2 && !count ? -1 : expected);
    if (!good) {
        REQUIRE(!evaluated && !reduced, "refused after a closure was called");
        return;
    }
    REQUIRE(evaluated == (with_closure && closure.evaluate) && reduced == (with_closure && closure.reduce), "closures");
    REQUIRE(!with_skipped || w.skipped == !finite, "skipped for no reason, or not");
    REQUIRE(w.opt.step == start.opt.step + (uint32_t)finite, "a step is not counted once");
    memcpy(other.memory, w.memory, ROOM), memcpy(other.counts, w.counts, sizeof w.counts), other.scaler = w.scaler;
    memcpy(w.memory, start.memory, ROOM), memcpy(w.counts, start.counts, sizeof w.counts), w.scaler = start.scaler;
    if (finite) {
        kopt_norm_add_grads(&norm, w.list, count);
        o.clip = kopt_norm_clip(&norm, max_norm, o.grad_scale);
        REQUIRE(kopt_optimizer_step(&o, w.list, count) == KOPT_OK, "a step is refused, but not when scaled");
    }
    hostile_control();
    REQUIRE(kopt_scaler_update(&w.scaler, !finite) == KOPT_OK, "a scaler is refused, but not in a step");
    w.scaler.steps_ = start.opt.step + (uint32_t)finite;
    set_control(0x1f80u), control = get_control();
    REQUIRE(!memcmp(other.memory, w.memory, ROOM) && !memcmp(other.counts, w.counts, sizeof w.counts), "a scaled step");
    REQUIRE(!memcmp(&other.scaler, &w.scaler, sizeof w.scaler) && scaler_good(&w.scaler), "the scale after a step");
    call_scaler_begin(&start.opt, &start.scaler, max_norm, count, finite);
    REQUIRE(kopt_scaler_update(NULL, 0) == KOPT_ERROR_NULL, "the scale of nothing");
}

/* ---- Compression and reduction ---- */

static int is_code(int code) { return code >= KOPT_BF16 && code <= KOPT_Q1; }

static void make_packer(void) {
    kopt_compressor *c = &w.packer;
    const size_t n = any_length();
    *c = kopt_compressor_of((kopt_format)(byte() & 31 ? 1 + (int)below(4) : any_enum()), NULL, n);
    c->residual = below(3) ? any_array(n) : NULL;
    c->rounding = (kopt_rounding)(byte() & 31 ? (int)below(2) : any_enum());
    c->residual_rounding = (kopt_rounding)(byte() & 31 ? (int)below(2) : any_enum());
    c->residual_format = any_format();
    c->step = byte() & 15 ? below(3) : UINT32_MAX - below(2);
    c->id = byte(), c->seed = word(), c->first_index = an_index();
    if (below(64) == 63) c->made_ = word();
    if (below(64) == 63) c->reserved32_ = word();
    if (c->code == KOPT_Q8 || c->code == KOPT_Q1) c->first_index &= byte() & 31 ? ~UINT64_C(255) : UINT64_MAX;
}

static void call_compress(void) {
    static unsigned char want[4 * LONGEST];
    kopt_compressor *c = &w.packer, reference;
    const kopt_format f = any_format();
    unsigned char *grad, *out;
    uint32_t no = below(64);
    size_t n, size, room, rest, grad_size;
    int good, expected;
    make_packer();
    n = is_long(c->n) ? 0 : c->n;
    grad = any_array(n), out = any_array(n);
    size = ref_code_size(c->code, n), room = byte() & 15 ? size : size - below(9);
    rest = c->residual ? n * ref_width(c->residual_format) : 0, grad_size = n * ref_width(f);
    expected =
        no != 1 && c->made_ == kopt_compressor_of(KOPT_BF16, NULL, 0).made_ && c->reserved32_ == 0 &&
        in_enum((int)f, KOPT_FP16) && !is_long(c->n) && is_code((int)c->code) &&
        in_enum((int)c->rounding, KOPT_STOCHASTIC) && c->first_index >> 63 == 0 && c->step != UINT32_MAX &&
        (c->residual == NULL ||
         (in_enum((int)c->residual_format, KOPT_FP16) && in_enum((int)c->residual_rounding, KOPT_STOCHASTIC) &&
          !(c->code == KOPT_Q1 && c->rounding == KOPT_STOCHASTIC))) &&
        (c->code == KOPT_BF16 || c->code == KOPT_FP16 || c->first_index % (c->code == KOPT_Q8 ? 64 : 256) == 0) &&
        room >= size && (n == 0 || (grad != NULL && out != NULL)) && !share(grad, grad_size, out, size) &&
        !share(grad, grad_size, c->residual, rest) && !share(out, size, c->residual, rest);
    memcpy(&start, &w, sizeof w);
    prepare();
    reads(grad, grad_size), writes(out, size), writes(&c->step, 4);
    if (expected && c->residual) writes(c->residual, rest);
    hostile_control();
    good = took(kopt_compress(no == 1 ? NULL : c, out, room, grad, f));
    finish(22, "kopt_compress", good, expected);
    REQUIRE(kopt_format_size(c->code, c->n) == (is_long(c->n)           ? 0
                                                : c->code == KOPT_F32   ? 4 * n
                                                : is_code((int)c->code) ? size
                                                                        : 0),
            "a size");
    if (!good) return;
    REQUIRE(c->step == start.packer.step + 1, "a step of compression is not counted once");
    reference = *c;
    if (c->residual) reference.residual = start.memory + ((unsigned char *)c->residual - w.memory);
    ref_compress(&reference, want, grad, f);
    REQUIRE(n == 0 || !memcmp(want, out, size), "a code is not the reference's");
    REQUIRE(rest == 0 || !memcmp(reference.residual, c->residual, rest), "nor its residual");
}

static void call_decompress(void) {
    const kopt_format f = any_format(), code = (kopt_format)(byte() & 31 ? 1 + (int)below(4) : any_enum());
    const size_t length = any_length(), n = is_long(length) ? 0 : length, width = ref_width(f),
                 size = ref_code_size(code, n);
    const size_t room = byte() & 15 ? size : size - below(9);
    const double scale = byte() & 1 ? 1 : any_double();
    unsigned char *sum = any_array(n), *in = any_array(n);
    size_t i;
    int good, expected = in_enum((int)f, KOPT_FP16) && is_code((int)code) && !is_long(length) && room >= size &&
                         within(scale, -most, most) && (n == 0 || (sum != NULL && in != NULL)) &&
                         !share(sum, n * width, in, size);
    memcpy(&start, &w, sizeof w);
    prepare();
    reads(in, size), writes(sum, n * width);
    hostile_control();
    good = took(kopt_decompress_add(sum, f, in, room, code, length, scale));
    finish(23, "kopt_decompress_add", good, expected);
    for (i = 0; i < n && good; ++i) {
        const uint32_t was = ref_get(start.memory + (sum - w.memory), width, i);
        REQUIRE(ref_get(sum, width, i) == ref_decompress_add(f, was, ref_decode(in, code, i), scale), "a decoded sum");
    }
}

static void call_reduce(void) {
    enum { SHARDS = 4 };
    const kopt_format f = any_format(), to = below(3) ? f : any_format();
    const size_t length = any_length(), n = is_long(length) ? 0 : length, size = n * ref_width(f),
                 count = below(SHARDS + 1);
    const size_t out_size = n * ref_width(to);
    const double scale = byte() & 1 ? 1 : any_double();
    const void *shards[SHARDS], *from[SHARDS];
    unsigned char *out = any_array(n);
    uint32_t no = below(64);
    size_t i;
    int good, expected = in_enum((int)f, KOPT_FP16) && in_enum((int)to, KOPT_FP16) && !is_long(length) && count != 0 &&
                         within(scale, -most, most) && (n == 0 || (out != NULL && no != 1));
    for (i = 0; i < count; ++i) {
        shards[i] = byte() & 7 ? any_array(n) : out;
        if (n != 0 && (shards[i] == NULL || (share(out, out_size, shards[i], size) && !(out == shards[i] && f == to))))
            expected = 0;
    }
    memcpy(&start, &w, sizeof w);
    for (i = 0; i < count; ++i)
        from[i] = shards[i] ? start.memory + ((const unsigned char *)shards[i] - w.memory) : NULL;
    prepare();
    for (i = 0; i < count; ++i) reads(shards[i], size);
    writes(out, out_size);
    hostile_control();
    good = took(kopt_reduce(out, to, no == 1 ? NULL : shards, count, f, length, scale));
    finish(24, "kopt_reduce", good, expected);
    for (i = 0; i < n && good; ++i)
        REQUIRE(ref_get(out, ref_width(to), i) == ref_reduce(to, from, count, f, i, scale), "a reduction");
}

static void mpi_sum(kopt_format format, void *in, void *inout, const int *len) {
    const void *shards[2];
    shards[0] = inout, shards[1] = in;
    if (len != NULL && *len > 0) kopt_reduce(inout, format, shards, 2, format, (size_t)*len, 1);
}

static void call_mpi_sum(void) {
    const int bf16 = (int)below(2), n = (int)a_length();
    const kopt_format f = bf16 ? KOPT_BF16 : KOPT_FP16;
    unsigned char *inout = any_array((size_t)n), *in = byte() & 15 ? any_array((size_t)n) : inout;
    const size_t size = 2 * (size_t)n;
    int length = byte() & 15 ? n : -n, *len = byte() & 31 ? &length : NULL, expected, i;
    const void *from[2];
    expected = len && length > 0 && in != NULL && inout != NULL && (in == inout || !share(in, size, inout, size));
    memcpy(&start, &w, sizeof w);
    prepare();
    reads(in, size), writes(inout, size);
    hostile_control();
    mpi_sum(f, in, inout, len);
    finish(25, "a sum for MPI", expected, -1);
    if (!expected) {
        REQUIRE(!memcmp(start.memory, w.memory, ROOM), "a refused sum was done");
        return;
    }
    from[0] = start.memory + (inout - w.memory), from[1] = start.memory + (in - w.memory);
    for (i = 0; i < n; ++i)
        REQUIRE(ref_get(inout, 2, (size_t)i) == ref_reduce(f, from, 2, f, (size_t)i, 1), "a sum for MPI");
}

/* Do the tensors of a list have no fault that kopt_explain() tells of? */
static int explained_good(size_t count) {
    size_t i;
    for (i = 0; i < count; ++i) {
        const kopt_tensor *t = &w.list[i], *previous = &w.list[before_in_list(w.list, i)];
        if (!tensor_good(&w.opt, t, 0) || (t->n && !block_good(&w.opt, t))) return 0;
        if (t->n && previous != t && (!follows(previous, t) || neighbours_share(&w.opt, previous, t))) return 0;
    }
    return 1;
}

static void call_cosine(void) {
    const double peak = any_double(), last = any_double(), most = 1.7976931348623157e308;
    const uint32_t steps = byte() & 3 ? 1 + word() % 1000 : word(), warmup = byte() & 7 ? below(steps) : word();
    const uint32_t step = byte() & 7 ? below(steps + 2) : word(), top = warmup ? warmup - 1 : 0;
    const int expected = warmup <= steps && within(peak, 0, most) && within(last, 0, most);
    double rate[2];
    int i;
    for (i = 0; i < 2; ++i) {
        prepare();
        if (i == 1) hostile_control();
        rate[i] = kopt_cosine_lr(step, warmup, steps, peak, last);
        finish(42, "kopt_cosine_lr", expected, -1);
    }
    REQUIRE(!memcmp(&rate[0], &rate[1], sizeof *rate), "the caller's control register changes a learning rate");
    REQUIRE(expected ? rate[0] >= 0 && (rate[0] <= peak || rate[0] <= last) : is_nan(rate[0]), "a wrong learning rate");
    if (!expected) return;
    REQUIRE(step < top || rate[0] >= peak || rate[0] >= last, "a learning rate below both");
    REQUIRE(step < steps || !memcmp(&rate[0], &last, sizeof last), "another last learning rate");
    REQUIRE(step != top || steps <= 1 || !memcmp(&rate[0], &peak, sizeof peak), "another peak");
}

static void call_the_rest(void) {
    kopt_isa isa = (kopt_isa)any_enum();
    kopt_tensor *t = &w.t[below(TENSORS)];
    const size_t count = below(TENSORS + 1);
    size_t want = 0, size, i;
    uint64_t seed = word(), index = an_index();
    uint32_t id = word(), stream = below(16), step = word();
    int usable, good;
    const char *words, *words_of_tensors;
    make_list(count);
    if (optimizer_good(&w.opt) && fields_good(t) && t->n) want = layout_of(&w.opt, t).size;
    prepare();
    for (i = 0; i < count; ++i)
        if (w.list[i].state != NULL && w.list[i].state_size >= 64) reads(w.list[i].state, 64);
    hostile_control();
    size = kopt_state_size(&w.opt, t);
    words = kopt_explain(&w.opt, w.list, count), words_of_tensors = kopt_explain(NULL, w.list, count);
    REQUIRE(kopt_version() == KOPT_VERSION, "another version");
    REQUIRE(kopt_state_size(NULL, t) == 0 && kopt_state_size(&w.opt, NULL) == 0, "the state of nothing has a size");
    REQUIRE(kopt_result_string((kopt_result)isa) != NULL && kopt_isa_name(isa) != NULL, "no name");
    usable = kopt_isa_usable(isa);
    finish(12, "kopt_state_size", size != 0, want != 0);
    REQUIRE(size == want, "another size of the state");
    good = optimizer_good(&w.opt) && (w.opt.step == UINT32_MAX || scalars_good(&w.opt));
    good = good && explained_good(count);
    REQUIRE(good == !strncmp(words, "all fields", 10), "another wrong field");
    for (i = 0, good = count != 0; i < count; ++i) good = good && fields_good(&w.list[i]);
    REQUIRE(good == !strncmp(words_of_tensors, "all fields", 10), "another wrong field of a tensor");
    REQUIRE(!usable || strcmp(kopt_isa_name(isa), "unknown") != 0, "an instruction set that does not exist is usable");
    if (isa != KOPT_ISA_AUTO) REQUIRE(took(kopt_isa_force(isa)) == usable, "force and usable disagree");
    REQUIRE(kopt_random((kopt_random_key){seed, step, id, 0}, stream, index) ==
                ref_random(seed, step, id, stream, index),
            "another random");
}

/* ---- Vector mathematics, by the built-in: test_vmath.c tests its results, which here are its own at another place,
        one by one -------------------------------------------------------------------------------------------------- */

static int apart(const void *a, const void *b, size_t size) { return a == b || !share(a, size, b, size); }

static float *any_floats(size_t n) { return (float *)(void *)((uintptr_t)any_array(n) & ~(uintptr_t)3); }

static void call_map(void) {
    kopt_format format = byte() & 15 ? (kopt_format)(1 + below(2)) : any_format();
    int backward = (int)below(2), good, expected;
    kopt_function f = byte() & 31 ? (kopt_function)below(8) : (kopt_function)any_enum();
    size_t n = any_length(), size = is_long(n) ? 0 : 2 * n, i;
    unsigned char *x = any_array(n), *dy = byte() & 3 ? any_array(n) : x, *out;
    static uint16_t in[2][LONGEST + 1], want[LONGEST + 1];
    out = byte() & 3 ? any_array(n) : byte() & 1 ? x : dy;
    if (!backward) dy = x;
    expected = (unsigned)f <= KOPT_FN_SOFTPLUS && !(backward && f == KOPT_FN_LOG) &&
               (format == KOPT_BF16 || format == KOPT_FP16) && !is_long(n) &&
               (n == 0 || (x != NULL && dy != NULL && out != NULL && apart(out, x, size) && apart(out, dy, size)));
    if (expected && n != 0) {
        memcpy(in[0], x, size), memcpy(in[1], dy, size);
        for (i = 0; i < n; ++i)
            if (backward)
                kopt_map_backward(want + i, in[1] + i, in[0] + i, format, 1, f);
            else
                kopt_map(want + i, in[0] + i, format, 1, f);
    }
    prepare();
    reads(x, size), reads(dy, size), writes(out, size);
    hostile_control();
    good = took(backward ? kopt_map_backward(out, dy, x, format, n, f) : kopt_map(out, x, format, n, f));
    finish(26, backward ? "kopt_map_backward" : "kopt_map", good, expected);
    if (good && n != 0) REQUIRE(memcmp(out, want, size) == 0, "kopt_map depends on the place");
}

static void call_vmath(void) {
    int which = (int)below(7), good, expected;
    size_t n = any_length(), size = is_long(n) ? 0 : 4 * n;
    float *x = any_floats(n), *y = byte() & 3 ? any_floats(n) : x, *out = byte() & 3 ? any_floats(n) : x;
    if (which < 5) y = x;
    expected = !is_long(n) && (n == 0 || (x != NULL && y != NULL && out != NULL && apart(out, x, size)));
    if (expected && which == 5) expected = apart(out, y, size);
    if (expected && which == 6) expected = apart(y, x, size) && !share(out, size, y, size);
    prepare();
    reads(x, size), reads(y, size), writes(out, size);
    if (which == 6) writes(y, size);
    hostile_control();
    switch (which) {
    case 0: good = took(kopt_vmath_exp(out, x, n)); break;
    case 1: good = took(kopt_vmath_log(out, x, n)); break;
    case 2: good = took(kopt_vmath_tanh(out, x, n)); break;
    case 3: good = took(kopt_vmath_erf(out, x, n)); break;
    case 4: good = took(kopt_vmath_erfc(out, x, n)); break;
    case 5: good = took(kopt_vmath_atan2(out, y, x, n)); break;
    default: good = took(kopt_vmath_sincospi(out, y, x, n)); break;
    }
    finish(27, "kopt_vmath_exp and the others", good, expected);
}

static int index_good(uint64_t first, size_t n) {
    return !is_long(n) && first < UINT64_C(1) << 54 && first + n <= UINT64_C(1) << 54;
}

/* Random numbers: test_noise.c's affair; here, the same in slices by another instruction set. */
static kopt_result draw(int uniform, void *out, kopt_format format, size_t n, double a, double b, kopt_random_key key,
                        size_t begin) {
    key.first_index += begin;
    return uniform ? kopt_uniform(out, format, n, a, b, key) : kopt_normal(out, format, n, a, b, key);
}

static void call_draw(void) {
    const int uniform = (int)below(2);
    const uint32_t step = word(), id = word();
    const uint64_t seed = (uint64_t)word() << 32 | word(),
                   first = below(8) ? an_index() : (UINT64_C(1) << 54) - below(LONGEST);
    const kopt_random_key key = {seed, step, id, first};
    kopt_format format = any_format();
    double a = byte() & 3 ? -1.25 : any_double(), b = byte() & 3 ? 3.5 : any_double();
    size_t n = any_length(), width, size;
    unsigned char *out = any_array(n);
    static unsigned char kept[4 * LONGEST];
    int good, expected = in_enum((int)format, KOPT_FP16) && index_good(first, n) && within(a, -most, most) &&
                         within(b, uniform ? a : 0, most);
    if (n != 0 && out == NULL) expected = 0;
    width = in_enum((int)format, KOPT_FP16) ? ref_width(format) : 4, size = is_long(n) ? 0 : n * width;
    prepare();
    writes(out, size);
    hostile_control();
    good = took(draw(uniform, out, format, n, a, b, key, 0));
    finish(30, uniform ? "kopt_uniform" : "kopt_normal", good, expected);
    if (good && size != 0) {
        const kopt_isa isa = kopt_isa_current();
        size_t at = below((uint32_t)n);
        memcpy(kept, out, size), memset(out, 0, size);
        force_other(isa);
        REQUIRE(draw(uniform, out + at * width, format, n - at, a, b, key, at) == KOPT_OK &&
                    draw(uniform, out, format, at, a, b, key, 0) == KOPT_OK,
                "a slice is refused");
        kopt_isa_force(isa);
        REQUIRE(memcmp(kept, out, size) == 0, "other numbers in slices");
    }
}

/* ---- One input -------------------------------------------------------------------------------------------------- */

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    static const unsigned char calls[] = {8,  0,  0,  0,  1,  2,  2,  3,  3,  4,  5,  6,  9,  10, 11,
                                          12, 13, 14, 17, 18, 19, 19, 20, 21, 22, 22, 23, 24, 25, 26,
                                          26, 27, 29, 15, 16, 37, 3,  3,  36, 39, 40, 41, 42};
    int i, turn, k;
    input = bytes, input_left = size;
    control = get_control();
    memset(&w, 0, sizeof w - sizeof w.memory);
    memset(&step_opt, 0, sizeof step_opt);
    cursor = 0, step_is_pure = 0;
    fill_memory();
    make_optimizer();
    for (i = 0; i < TENSORS; ++i) make_tensor(&w.t[i]);
    if (kopt_isa_force((kopt_isa)below(KOPT_ISA_SIMD128 + 1)) != KOPT_OK) kopt_isa_force(KOPT_ISA_AUTO);
    if (byte() & 15) /* mostly, the tensors are ready */
        for (i = 0; i < TENSORS; ++i) kopt_state_init(&w.opt, &w.t[i], 1, NULL);
    if (byte() & 3) call_step_begin();
    make_sum();
    for (turn = 0; turn < 24 && input_left != 0; ++turn) {
        uint32_t change = byte();
        if (change < 20) change_optimizer();
        if (change >= 20 && change < 48) change_tensor(&w.t[below(TENSORS)]);
        if (change >= 48 && change < 54) change_step();
        if (change >= 54 && change < 60) w.memory[below(ROOM)] ^= (unsigned char)byte();
        if (change >= 60 && change < 70) { /* a bit of a header */
            unsigned char *h = w.t[below(TENSORS)].state;
            if (h != NULL && h + 64 <= w.memory + ROOM) h[below(64)] ^= (unsigned char)(1u << below(8));
        }
        if (change == 70) make_optimizer();
        for (i = 0; i < TENSORS; ++i) fit_tensor(&w.t[i]); /* in the formats of now */
        if (change == 71) make_tensor(&w.t[below(TENSORS)]);
        if (change == 72) fill_memory();
        if (change >= 73 && change < 80) make_sum();
        if (change >= 80 && change < 90) change_sum();
        k = calls[below(sizeof calls)];
        if (k == 41) call_make();
        if (k == 42) call_cosine();
        if (k == 0) call_optimizer_step();
        if (k == 1) call_step_begin();
        if (k == 2) call_step_run();
        if (k == 3) call_step_range();
        if (k == 36) call_norm_range();
        if (k == 4) call_init();
        if (k == 5 || k == 6) call_read_write(k == 5);
        if (k == 40) call_dither();
        if (k == 8) call_arrays_of();
        if (k == 9) call_resume();
        if (k == 37) call_checkpoint();
        if (k == 10) call_convert();
        if (k == 11) call_all_finite();
        if (k == 12) call_the_rest();
        if (k == 13) call_norm_add();
        if (k == 14) call_norms();
        if (k == 15) call_inspect();
        if (k == 16) call_number();
        if (k == 17) call_measure();
        if (k == 18) call_clip_value();
        if (k == 19) call_accumulate();
        if (k == 39) call_kahan_add();
        if (k == 20) call_accumulator_read();
        if (k == 21) call_scaler();
        if (k == 22) call_compress();
        if (k == 23) call_decompress();
        if (k == 24) call_reduce();
        if (k == 25) call_mpi_sum();
        if (k == 26) call_map();
        if (k == 27) call_vmath();
        if (k == 29) call_draw();
    }
    kopt_isa_force(KOPT_ISA_AUTO);
    return 0;
}

#ifdef FUZZ_STANDALONE
int main(int count, char **arguments) {
    static uint8_t bytes[4096];
    const long runs = count > 1 ? strtol(arguments[1], NULL, 10) : 20000;
    const long first = count > 3 ? strtol(arguments[3], NULL, 10) : 0;
    uint64_t seed = count > 2 ? (uint64_t)strtol(arguments[2], NULL, 10) : 1;
    int i, missing = 0;
    if (count == 2 && runs == 0) {
        FILE *file = fopen(arguments[1], "rb");
        if (file == NULL) return 2;
        LLVMFuzzerTestOneInput(bytes, fread(bytes, 1, sizeof bytes, file));
        fclose(file);
        return 0;
    }
    for (run = 0; run < runs; ++run) {
        size_t size, k;
        size = 40 + (size_t)(lcg64(&seed) >> 40) % 600;
        for (k = 0; k < size; ++k) bytes[k] = (uint8_t)(lcg64(&seed) >> 56);
        if (run >= first) LLVMFuzzerTestOneInput(bytes, size);
    }
    ok(1, "%ld hostile inputs", runs);
    for (i = 0; i < CALLS; ++i)
        if (tally[i].name != NULL)
            ok(tally[i].accepted && tally[i].refused, "%s: %u times accepted, %u times refused", tally[i].name,
               (unsigned)tally[i].accepted, (unsigned)tally[i].refused);
    for (i = 0; i < RESULTS; ++i)
        if (results[i] == 0 && i != KOPT_ERROR_DEVICE && i != KOPT_ERROR_CAPTURE)
            note("never: %s", kopt_result_string((kopt_result)i)), ++missing;
    ok(missing == 0, "every result occurred");
    return done();
}
#endif
