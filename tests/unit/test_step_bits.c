/* test_step_bits.c - every step is the one of docs/numerics.md, bit for bit: every rule, decay, format and rounding, on
   every instruction set, for any length, alignment, slicing and sharding, with NaN, infinities and subnormals in every
   array, and nothing written around the arrays. Argument "quick": a tenth of the combinations; "brief", for slow
   emulators: fewer, and the lengths. tests/unit/test_atan.c includes this file for the rules of KAHAN_OPT_VMATH. */
#define KAHAN_OPT_IMPLEMENTATION
#include "../../kahan_opt.h"

#include "tap.h"
#include "reference.h"
#include "inputs.h"

#include <fenv.h>

/* ---- Inputs ----------------------------------------------------------------------------------------------------- */

static uint64_t noise_state = 1;
static uint32_t noise(void) { return upper64(&noise_state); }
static uint32_t below(uint32_t n) { return scaled_to(noise(), n); }

/* How often an element is special (1 in ...): none, rare in long runs, every third. */
typedef enum profile { TAME, MIXED, WILD, PROFILES } profile;
static const uint32_t special_every[PROFILES] = {0, 150, 3};

static uint32_t special(kopt_format f) {
    uint32_t k = noise();
    if (k & 1) return f == KOPT_F32 ? noise() : noise() >> 16;
    return ref_narrow(f, special_words[below(SPECIAL_WORDS)]);
}

/* A number of format f with its magnitude in [2^low, 2^high). */
static uint32_t ordinary(kopt_format f, int low, int high, int with_sign) {
    uint32_t exponent = (uint32_t)(127 + low) + below((uint32_t)(high - low));
    return ref_narrow(f, (with_sign ? noise() & 0x80000000u : 0) | exponent << 23 | (noise() & 0x7fffff));
}

/* Special elements are so in all arrays: of any bits, near the largest number, or near the smallest. */
static uint32_t value(profile p, uint32_t element, kopt_format f, int low, int high, int with_sign) {
    uint32_t lot = element * 2654435761u >> 8;
    if (!special_every[p] || lot % special_every[p]) return ordinary(f, low, high, with_sign);
    switch (lot >> 16 & 3) {
    case 0: return ordinary(f, f == KOPT_FP16 ? 12 : 119, f == KOPT_FP16 ? 16 : 128, with_sign);
    case 1: return ordinary(f, f == KOPT_FP16 ? -26 : -127, f == KOPT_FP16 ? -14 : -118, with_sign);
    case 2: return below(2) ? special(f) : ordinary(f, f == KOPT_FP16 ? 4 : 57, f == KOPT_FP16 ? 12 : 67, with_sign);
    default: return special(f);
    }
}

/* ---- A case: an optimizer, its tensor, and all memory as it was before the first step --------------------------- */

enum { LONGEST = 8200, MARGIN = 128, STEPS = 3 };
typedef enum buffer { WEIGHT, GRAD, STATE, COPY, BUFFERS } buffer;
static const char *const buffer_name[BUFFERS] = {"weight", "gradient", "state", "copy"};

typedef unsigned char memory[BUFFERS][64 + 24 * LONGEST];
static memory initial, expected[STEPS];                              /* without margins                */
static unsigned char arena[BUFFERS][64 + 24 * LONGEST + 2 * MARGIN]; /* canaries on both sides */

static size_t buffer_size(const kopt_tensor *t, int b) {
    if (b == WEIGHT) return t->n * ref_width(t->weight_format);
    if (b == GRAD) return t->n * ref_width(t->grad_format);
    if (b == STATE) return t->state_size;
    return t->copy ? t->n * ref_width(t->copy_format) : 0;
}

static kopt_tensor place(const kopt_tensor *t, unsigned char *weight, unsigned char *grad, unsigned char *state,
                         unsigned char *copy) {
    kopt_tensor placed = *t;
    placed.weight = weight, placed.grad = grad;
    placed.state = t->state_size ? state : NULL;
    placed.copy = t->copy ? copy : NULL;
    return placed;
}

/* One without memory, which place() gives it. */
static kopt_tensor tensor(kopt_format weight, kopt_format grad, size_t n) {
    return kopt_tensor_of(NULL, weight, NULL, grad, n, NULL, 0);
}

static uint32_t salt;

static void randomise(void *array, size_t width, size_t n, profile p, kopt_format f, int low, int high, int with_sign) {
    size_t i;
    for (i = 0; i < n; ++i) ref_set(array, width, i, value(p, salt + (uint32_t)i, f, low, high, with_sign));
}

/* Fills the initial memory, a state block that kopt_state_init() has begun included. 0 if that was refused. */
static int prepare(const kopt_optimizer *o, kopt_tensor *t, profile p) {
    ref_layout l = ref_layout_of(o, t->weight_format, t->n);
    kopt_tensor placed;
    size_t i;
    int k;
    t->state_size = l.size;
    salt = noise();
    memset(initial, 0xa5, sizeof initial);
    placed = place(t, initial[WEIGHT], initial[GRAD], initial[STATE], initial[COPY]);
    if (kopt_state_size(o, &placed) != l.size || kopt_state_init(o, &placed, 1, NULL) != KOPT_OK) return 0;
    randomise(initial[WEIGHT], ref_width(t->weight_format), t->n, p, t->weight_format, -8, 1, 1);
    randomise(initial[GRAD], ref_width(t->grad_format), t->n, p, t->grad_format, -14, 0, 1);
    for (i = 0; i < t->n && l.residual_width; ++i) {
        uint32_t word = noise(), w = ref_get(initial[WEIGHT], 2, i);
        if (o->rounding == KOPT_KAHAN && (p != WILD || word & 0x10000)) /* at most half an ulp */
            word = t->weight_format == KOPT_BF16 ? (w & 0x7f80) < 0x0500 ? 0 : w - 0x480 - (word & 0x3ff)
                                                 : (w & 0x7fff) - (w & 0x7c00 ? word & 0x3ff : 0);
        ref_set(initial[STATE] + l.residual, l.residual_width, i, word ^ (word << 3 & 0x8000));
    }
    for (k = 0; k < 4; ++k) { /* any codes, any scale */
        if (ref_format(o, k) != KOPT_Q8) continue;
        for (i = 0; i < t->n * l.moment_width[k]; ++i) initial[STATE][l.moment[k] + i] = (unsigned char)noise();
        for (i = 0; i < (t->n + 63) / 64 * l.moment_width[k]; ++i)
            initial[STATE][l.scale[k] + i] = (unsigned char)(p == TAME || below(4) ? 110 + below(16)
                                                             : below(2)            ? below(3) * 127 + below(2)
                                                                                   : noise());
    }
    for (k = 0; k < 4; ++k) {
        int square = ref_square(o, k);
        if (l.moment_width[k] && ref_format(o, k) != KOPT_Q8)
            randomise(initial[STATE] + l.moment[k], l.moment_width[k], t->n, p, ref_format(o, k), square ? -20 : -14,
                      -1, !square);
    }
    if (l.slow_width) randomise(initial[STATE] + l.slow, l.slow_width, t->n, p, t->weight_format, -8, 1, 1);
    for (i = 0; i < t->n * l.slow_residual_width; ++i) initial[STATE][l.slow_residual + i] = (unsigned char)below(64);
    if (ref_pays(o, t->weight_format) && l.size && below(4)) { /* two earlier steps, in any order, or this one, too */
        const uint32_t newer = o->step + 1 - below(2), ago = 1 + (below(4) ? 0 : below(1000)), place = 2 * below(2);
        const uint32_t older = newer > ago && below(4) ? newer - ago : 0;
        ref_set(initial[STATE] + 32, 4, place, newer), ref_set(initial[STATE] + 32, 4, 2 - place, older);
        for (i = 1; i < 4; i += 2)
            ref_set(initial[STATE] + 32, 4, i, below(4) ? ref_bits((float)o->lr) : ordinary(KOPT_F32, -20, 2, 0));
    }
    return 1;
}

/* The expected memory after each step. */
static void expect(kopt_optimizer o, const kopt_tensor *t, int steps) {
    int k;
    for (k = 0; k < steps; ++k, ++o.step) {
        kopt_tensor placed = place(t, expected[k][WEIGHT], expected[k][GRAD], expected[k][STATE], expected[k][COPY]);
        int b;
        for (b = 0; b < BUFFERS; ++b) memcpy(expected[k][b], k ? expected[k - 1][b] : initial[b], buffer_size(t, b));
        ref_step_tensor(&o, &placed);
    }
}

static const char *const kind_name[] = {"SGD", "Adam", "Lion", "Adan", "RAdam", "Ranger", "EMA", "Adam-atan2"};

static const char *describe(const kopt_optimizer *o, const kopt_tensor *t) {
    static char text[400];
    snprintf(text, sizeof text,
             "%s momentum %g dampening %g nesterov %d, decay %d of %g, lr %g, weights %s %s, moments %s %s %s, "
             "compensation %s, gradient %s * %g * %g, copy %s, no_decay %d, maximize %d, zero_grad %d, step %u, n %lu, "
             "first %lu",
             kind_name[o->rule], o->momentum, o->dampening, o->nesterov, (int)o->decay_mode, o->weight_decay, o->lr,
             format_name[t->weight_format], rounding_name[o->rounding], format_name[o->first_moment_format],
             format_name[o->second_moment_format], rounding_name[o->moment_rounding],
             rounding_name[o->residual_rounding], format_name[t->grad_format], o->grad_scale, o->clip,
             t->copy ? format_name[t->copy_format] : "none", t->no_decay, o->maximize, o->zero_grad,
             (unsigned)o->step + 1, (unsigned long)t->n, (unsigned long)t->first_index);
    return text;
}

/* Formats of the first and the second moment: the same for both, or TWO_FORMATS, any two that differ. */
enum { TWO_FORMATS = KOPT_Q8 + 1 };
static void set_moments(kopt_optimizer *o, int moment) {
    const uint32_t first = moment == TWO_FORMATS ? below(4) : (uint32_t)moment;
    o->first_moment_format = (kopt_format)first;
    o->second_moment_format = (kopt_format)(moment == TWO_FORMATS ? (first + 1 + below(3)) % 4 : first);
}

static int complaints;

/* 1 if each array in the arena, at offset[b], is the expected one and its surroundings are untouched. */
static int compare(const kopt_optimizer *o, const kopt_tensor *t, const size_t offset[BUFFERS], int k,
                   const char *how) {
    int b;
    size_t i, size;
    for (b = 0; b < BUFFERS; ++b) {
        const unsigned char *p = arena[b] + offset[b];
        size = buffer_size(t, b);
        for (i = 0; i < size && p[i] == expected[k][b][i]; ++i) {
        }
        if (i < size) break;
        for (i = 0; i < MARGIN && p[size + i] == 0x5a; ++i) {
        }
        if (i < MARGIN) break;
        for (i = 0; i < offset[b] && arena[b][i] == 0x5a; ++i) {
        }
        if (i < offset[b]) break;
    }
    if (b == BUFFERS) return 1;
    if (complaints++ < 20)
        note("%s, step %d, %s: %s differs at byte %lu of %lu (%s)", kopt_isa_name(kopt_isa_current()), k + 1, how,
             buffer_name[b], (unsigned long)i, (unsigned long)size, describe(o, t));
    return 0;
}

/* The steps on one instruction set, in the arena at the given offsets, in slices of about `slice` elements in an order
   that is neither ascending nor descending. 0: in one call. */
static int steps_agree(kopt_optimizer o, const kopt_tensor *t, int steps, const size_t offset[BUFFERS], size_t slice) {
    kopt_tensor placed = place(t, arena[WEIGHT] + offset[WEIGHT], arena[GRAD] + offset[GRAD],
                               arena[STATE] + offset[STATE], arena[COPY] + offset[COPY]);
    int b, k;
    for (b = 0; b < BUFFERS; ++b) {
        size_t size = buffer_size(t, b);
        memset(arena[b], 0x5a, offset[b] + size + MARGIN);
        memcpy(arena[b] + offset[b], initial[b], size);
    }
    for (k = 0; k < steps; ++k) {
        kopt_step step;
        size_t i, pass, begin, count = slice ? t->n / slice + 1 : 1;
        if (slice) {
            int good = kopt_step_begin(&step, &o) == KOPT_OK;
            if (o.stable && !o.moments_only) {
                kopt_norm part, sum;
                memset(&sum, 0, sizeof sum);
                for (i = count; i-- > 0;) {
                    memset(&part, 0, sizeof part);
                    begin = i * slice;
                    good &= kopt_norm_add_stable(&part, &step, &placed, begin, i + 1 == count ? t->n : begin + slice) ==
                            KOPT_OK;
                    kopt_norm_merge(&sum, &part);
                }
                placed.stable_scale = kopt_norm_stable_scale(&sum, t->n);
            }
            for (pass = 0; pass < 3; ++pass)
                for (i = pass; i < count; i += 3) {
                    begin = i * slice;
                    good &= kopt_step_range(&step, &placed, 1, begin, i + 1 == count ? t->n : begin + slice) == KOPT_OK;
                }
            placed.stable_scale = 0;
            if (!good) return 0;
        } else if (kopt_optimizer_step(&o, &placed, 1) != KOPT_OK) {
            return 0;
        }
        if (!compare(&o, t, offset, k, slice ? "sliced" : "whole")) return 0;
    }
    return 1;
}

/* All instruction sets, each at its own alignment and slicing: how many disagree with the reference, or count other
   weights that stall. */
static int disagreements_prepared(const kopt_optimizer *o, kopt_tensor *t, int steps) {
    int isa, bad = 0, first = 1;
    kopt_counts counts = {0, 0, 0};
    expect(*o, t, steps);
    FOR_EACH_ISA(isa) {
        size_t offset[BUFFERS];
        int b, agree;
        if (t->counts) t->counts->wanted = t->counts->still = t->counts->stuck = 0;
        for (b = 0; b < BUFFERS; ++b) offset[b] = MARGIN / 2 + below(64);
        if (ref_coded(o))
            agree = steps_agree(*o, t, steps, offset, below(3) ? 64 * (1 + below(5)) : 0);
        else
            agree = steps_agree(*o, t, steps, offset, below(3) ? 1 + below(200) : 0);
        if (t->counts && first) counts = *t->counts;
        if (t->counts && memcmp(&counts, t->counts, sizeof counts)) agree = 0;
        first = 0, bad += !agree;
    }
    return bad;
}

static int disagreements(const kopt_optimizer *o, kopt_tensor *t, profile p, int steps) {
    if (!prepare(o, t, p)) {
        if (complaints++ < 20) note("refused, or of another size: %s", describe(o, t));
        return 1;
    }
    return disagreements_prepared(o, t, steps);
}

/* ---- Every combination ------------------------------------------------------------------------------------------ */

typedef enum rule {
    PLAIN,
    MOMENTUM,
    DAMPENED,
    NESTEROV,
    ADAM,
    AMSGRAD,
    STABLE,
    LION,
    ADAN,
    RADAM,
    RANGER,
    EMA,
#ifdef KAHAN_OPT_VMATH
    ATAN2,
    OUTSIDE,
    SMOOTH,
    RULES,
    FIRST = ATAN2
#else
    RULES,
    FIRST = PLAIN
#endif
} rule;
static const char *const rule_name[] = {"SGD",
                                        "SGD with momentum",
                                        "SGD with dampening",
                                        "Nesterov",
                                        "Adam",
                                        "AMSGrad",
                                        "StableAdamW",
                                        "Lion",
                                        "Adan",
                                        "RAdam",
                                        "Ranger",
                                        "EMA",
                                        "Adam-atan2",
                                        "Adam-atan2, corrected outside",
                                        "smooth Lion"};

#ifdef KAHAN_OPT_VMATH
static kopt_optimizer make(rule r);
#else
static kopt_optimizer make(rule r) {
    kopt_optimizer o = r == LION     ? kopt_lion(0.01)
                       : r == ADAN   ? kopt_adan(0.01)
                       : r == RADAM  ? kopt_radam(0.01)
                       : r == RANGER ? kopt_ranger(0.01)
                       : r == EMA    ? kopt_ema(0.99)
                       : r == STABLE ? kopt_stable_adamw(0.01)
                       : r >= ADAM   ? kopt_adam(0.01)
                                     : kopt_sgd(0.01, r == PLAIN ? 0 : 0.9);
    o.amsgrad = r == AMSGRAD;
    o.lookahead = 2;
    o.dampening = r == DAMPENED ? 0.25 : 0;
    o.nesterov = r == NESTEROV;
    return o;
}
#endif

/* What is not enumerated: hyper-parameters, gradient scale, copy, ids, step number. Mostly the ordinary. */
static void vary(kopt_optimizer *o, kopt_tensor *t) {
    static const uint64_t first[] = {0, 1, 129, (UINT64_C(1) << 35) - 100, (UINT64_C(1) << 63) - 64};
    static const double lr[] = {0.01, 0.001, 1, 1e-7, 3e4, 0}, wd[] = {0.01, 1e-4, 1, 1e3, 1e-50};
    static const double b1[] = {0.9, 0, 0.5, 0.95}, b2[] = {0.999, 0.95, 0, 0.99999};
    static const double eps[] = {1e-8, 1e-15, 0.1, 1.2e-38}, scale[] = {1, 1.0 / 1024, 3, 1e-30, 2};
    static const uint32_t step[] = {0, 1, 2, 1000, 0x80000000u, 0xfffffff0u};
    int odd = below(2) == 0;
    o->lr = lr[odd ? below(6) : below(2)];
    o->max_lr = o->lr > 0 ? o->lr * (1 + below(3)) : 1;
    if (o->weight_decay > 0) o->weight_decay = wd[odd ? below(5) : 0];
    o->beta1 = b1[odd ? below(4) : 0], o->beta2 = b2[odd ? below(4) : 0], o->eps = eps[odd ? below(4) : 0];
    o->grad_scale = scale[odd ? below(5) : 0], o->clip = below(3) ? 1 : 0.3;
    o->maximize = below(4) == 0, o->zero_grad = below(4) == 0;
    o->moments_only = below(8) == 0;
    if (o->rounding == KOPT_FEEDBACK && !(o->beta1 > 0)) o->beta1 = 0.999;
    if (o->rule == KOPT_RULE_RANGER) o->lookahead = 1 + (int)below(4), o->lookahead_rate = below(3) ? 0.5 : 0.2;
    if (o->rule == KOPT_RULE_EMA) {
        o->beta1 = below(2) ? 0.99 : 0.9999;
        o->moments_only = o->maximize = o->zero_grad = 0, o->weight_decay = 0;
    }
    o->step = step[below(6)];
    o->seed = (uint64_t)noise() << 32 | noise();
    t->id = noise();
    t->copy = below(2) ? NULL : initial[COPY];
    t->copy_format = (kopt_format)below(3);
    if (below(4) == 0) t->rate_scale = below(2) ? 0.3 : 0;
    t->no_decay = below(8) == 0;
    t->first_index = below(4) ? below(1000) : first[below(5)];
}

/* One combination of so many. */
static void check_combinations(uint32_t every) {
    uint32_t count = 0;
    int r, decay, weight, rounding, moment, moment_rounding, compensation, grad, p;
    for (r = FIRST; r < RULES; ++r)
        for (weight = KOPT_F32; weight <= KOPT_FP16; ++weight) {
            uint32_t cases = 0;
            int bad = 0;
            for (decay = 0; decay < 4; ++decay)
                for (rounding = KOPT_NEAREST; rounding < ROUNDINGS; ++rounding)
                    for (moment = KOPT_F32; moment <= TWO_FORMATS; ++moment)
                        for (moment_rounding = KOPT_NEAREST; moment_rounding <= KOPT_STOCHASTIC; ++moment_rounding)
                            for (compensation = KOPT_NEAREST; compensation <= KOPT_STOCHASTIC; ++compensation)
                                for (grad = KOPT_F32; grad <= KOPT_FP16; ++grad) {
                                    kopt_optimizer o = make((rule)r);
                                    kopt_tensor t = tensor((kopt_format)weight, (kopt_format)grad, 0);
                                    if (count++ % every) continue;
                                    set_moments(&o, moment), o.rounding = (kopt_rounding)rounding;
                                    o.moment_rounding = (kopt_rounding)moment_rounding;
                                    o.residual_rounding = (kopt_rounding)compensation;
                                    o.decay_mode = decay == 3 ? KOPT_DECAY_L2 : (kopt_decay_mode)decay,
                                    o.weight_decay = decay < 3;
                                    if (!ref_accepts(&o)) continue;
                                    vary(&o, &t);
                                    t.n = 100 + below(300);
                                    if (ref_coded(&o)) t.n += below(300);
                                    for (p = 0; p < PROFILES; ++p, ++cases)
                                        bad += disagreements(&o, &t, (profile)p, STEPS);
                                }
            ok(!bad, "%s, %s weights: %u runs, %d disagree with the reference", rule_name[r], format_name[weight],
               (unsigned)cases, bad);
        }
}

/* ---- Lengths ---------------------------------------------------------------------------------------------------- */

/* The combinations that train models, all bf16 and all fp16, but for first moments of FEEDBACK. */
static kopt_optimizer common(rule r, kopt_format f, int rounding, int decay) {
    kopt_optimizer o = make(r);
    o.first_moment_format = o.second_moment_format = f;
    if (rounding == KOPT_FEEDBACK && f == KOPT_FP16) o.first_moment_format = KOPT_BF16;
    o.rounding = (kopt_rounding)rounding;
    o.decay_mode = (kopt_decay_mode)decay, o.weight_decay = 0.01;
    o.seed = noise();
    return o;
}

static void check_lengths(int quick) {
    static const size_t large[] = {1000, 4099, 8191};
#ifdef KAHAN_OPT_VMATH
    static const rule tried[] = {ATAN2, SMOOTH};
#else
    static const rule tried[] = {PLAIN, MOMENTUM, ADAM, LION, RADAM};
#endif
    int r, f, rounding, k, p;
    for (r = 0; r < (int)(sizeof tried / sizeof *tried); ++r) {
        int bad = 0, cases = 0;
        for (f = KOPT_BF16; f <= KOPT_FP16; ++f)
            for (rounding = KOPT_NEAREST; rounding < ROUNDINGS; ++rounding) {
                kopt_optimizer o = common(tried[r], (kopt_format)f, rounding, KOPT_DECAY_DECOUPLED);
                kopt_tensor t = tensor((kopt_format)f, (kopt_format)f, 0);
                if (!ref_accepts(&o)) continue;
                for (t.n = 0; t.n <= 257; t.n += quick ? 13 : 1, ++cases) {
                    t.first_index = t.n % 3 ? below(256) : 0;
                    bad += disagreements(&o, &t, (profile)(t.n % 2), 2);
                }
                for (k = 0; k < (quick ? 1 : 3); ++k)
                    for (p = 0; p < PROFILES; ++p, ++cases) {
                        t.n = large[k], t.first_index = p ? 2 * below(100) + 1 : 0;
                        bad += disagreements(&o, &t, (profile)p, 3);
                    }
            }
        ok(!bad, "%s: lengths 0 to 257, 1000, 4099 and 8191, %d tensors, %d disagree", rule_name[tried[r]], cases, bad);
    }
}

#ifndef KAHAN_OPT_VMATH
/* AdamW with 8-bit moments, whole blocks and what is left of one; a block without gradients, or whose numbers are too
   small for a scale; a special element. */
static void check_codes(int quick) {
    static const size_t lengths[] = {64, 65, 191, 256, 257, 511, 1000, 2048, 2304, 4099};
    int bad = 0, cases = 0, k, p, again, isa;
    for (k = 0; k < (int)(sizeof lengths / sizeof *lengths); ++k)
        for (p = 0; p < PROFILES; ++p)
            for (again = 0; again < (quick ? 4 : 24); ++again, ++cases) {
                static const size_t offset[BUFFERS] = {65, 66, 67, 68};
                kopt_optimizer o = common(ADAM, KOPT_BF16, KOPT_KAHAN, KOPT_DECAY_DECOUPLED);
                kopt_tensor t = tensor(KOPT_BF16, KOPT_BF16, lengths[k]);
                ref_layout l;
                size_t i, block = 64 * below(5);
                o.first_moment_format = o.second_moment_format = KOPT_Q8;
                l = ref_layout_of(&o, t.weight_format, t.n);
                o.zero_grad = (int)below(2), o.maximize = (int)below(2), o.grad_scale = below(2) ? 1 : 0.3;
                t.first_index = below(4) ? 64 * (uint64_t)below(256) : 128 * (uint64_t)below(64);
                if (!prepare(&o, &t, (profile)p)) ++bad;
                if (below(2) && block < t.n) { /* nearly nothing */
                    for (i = block; i < block + 64 && i < t.n; ++i) ref_set(initial[GRAD], 2, i, 0);
                    initial[STATE][l.scale[0] + block / 64] = (unsigned char)(below(2) ? 0 : 1 + below(4));
                    initial[STATE][l.scale[1] + block / 64] = (unsigned char)(below(2) ? 0 : 1 + below(4));
                }
                if (below(2))
                    ref_set(below(2) ? initial[WEIGHT] : initial[GRAD], 2, below((uint32_t)t.n), special(KOPT_BF16));
                if (below(2)) ref_set(initial[STATE] + l.residual, 2, below((uint32_t)t.n), special(KOPT_BF16));
                expect(o, &t, 3);
                FOR_EACH_ISA(isa) bad += !steps_agree(o, &t, 3, offset, 0);
            }
    ok(!bad, "AdamW with 8-bit moments: 64 to 4099 weights, %d tensors, %d disagree", cases, bad);
}

/* The largest root of a block may be the scale itself, which has code 255 with any random number: not 256, which those
   from 65533 on would reach from above 1. */
static void check_largest_code(void) {
    enum { BLOCK = 64 };
    static float wide[BLOCK], w[BLOCK];
    static uint16_t narrow[BLOCK], half[BLOCK];
    static unsigned char state[64 + 6 * BLOCK];
    int isa, grad, weight, bad = 0, found = 0;
    size_t i;
    uint64_t e = 0;
    while (ref_number(ref_random(7, 1, 0, 0, e), 2) < 65533 && e < 1000000) ++e;
    for (i = 0; i < BLOCK; ++i) narrow[i] = 0x5e80, wide[i] = ref_float(0x5e800000); /* 2^62 */
    FOR_EACH_ISA(isa)
    for (grad = KOPT_F32; grad <= KOPT_BF16; ++grad)
        for (weight = KOPT_F32; weight <= KOPT_BF16; ++weight) {
            kopt_optimizer o = kopt_adam(0.125);
            kopt_tensor t =
                kopt_tensor_of(weight == KOPT_F32 ? (void *)w : half, (kopt_format)weight,
                               grad == KOPT_F32 ? (void *)wide : narrow, (kopt_format)grad, BLOCK, state, sizeof state);
            ref_layout l;
            o.first_moment_format = o.second_moment_format = KOPT_Q8, o.beta1 = o.beta2 = 0, o.seed = 7,
            t.first_index = e / BLOCK * BLOCK;
            l = ref_layout_of(&o, t.weight_format, BLOCK);
            bad += kopt_state_init(&o, &t, 1, NULL) != KOPT_OK || kopt_optimizer_step(&o, &t, 1) != KOPT_OK;
            bad += state[l.scale[1]] != 127 + 62;
            for (i = 0; i < BLOCK; ++i) bad += state[l.moment[1] + i] != 255;
            found += ref_number(ref_random(7, 1, 0, 0, e), 2) >= 65533;
        }
    ok(!bad && found, "a root that is the scale has code 255, %d times with the largest numbers: %d wrong", found, bad);
}

/* The same of a first moment, which in the first step of SGD with momentum is the gradient: not code 128, which has the
   other sign, nor 256. Above 31/16 * 2^127 numbers have the largest code. */
static void check_largest_signed_code(void) {
    static const uint32_t most[] = {0x40780000, 0x7f780000, 0x7f780001, 0x7f7fffff};
    static float w[64], g[64];
    static unsigned char state[64 + 64 + 16];
    int isa, k, bad = 0;
    size_t i;
    uint64_t e = 0;
    while (ref_number(ref_random(7, 1, 0, 0, e), 1) < 65533 && e < 1000000) ++e;
    FOR_EACH_ISA(isa)
    for (k = 0; k < 4; ++k) {
        kopt_optimizer o = kopt_sgd(0, 0.5);
        kopt_tensor t = kopt_tensor_of(w, KOPT_F32, g, KOPT_F32, 64, state, sizeof state);
        for (i = 0; i < 64; ++i) g[i] = ref_float(most[k] | (i % 2 ? 0x80000000u : 0));
        o.first_moment_format = o.second_moment_format = KOPT_Q8, o.seed = 7, t.first_index = e / 64 * 64;
        bad += kopt_state_init(&o, &t, 1, NULL) != KOPT_OK || kopt_optimizer_step(&o, &t, 1) != KOPT_OK || e == 1000000;
        bad += state[64 + 64] != (k == 0 ? 128 : 254);
        for (i = 0; i < 64; ++i) bad += state[64 + i] != (i % 2 ? 255 : 127);
    }
    ok(!bad, "the largest first moment of a block has code 127, or 255 below 0: %d wrong", bad);
}

/* 2^-126 is a scale, that of what is above 15/16 of it; below that there is none. Momentum of the first step is the
   gradient itself. */
static void check_least_scale(void) {
    static const uint32_t least[] = {0x00f80000, 0x00780000};
    static float g[64], w[64];
    static unsigned char state[64 + 64 + 16];
    int isa, k, bad = 0;
    size_t i;
    FOR_EACH_ISA(isa)
    for (k = 0; k < 2; ++k) {
        kopt_optimizer o = kopt_sgd(0.125, 0.5);
        kopt_tensor t = kopt_tensor_of(w, KOPT_F32, g, KOPT_F32, 64, state, sizeof state);
        o.first_moment_format = o.second_moment_format = KOPT_Q8, o.moment_rounding = KOPT_NEAREST;
        for (i = 0; i < 64; ++i) g[i] = ref_float(i % 3 == 0 ? 0 : least[k] | (i % 3 == 1 ? 0 : 0x80000000u));
        bad += kopt_state_init(&o, &t, 1, NULL) != KOPT_OK || kopt_optimizer_step(&o, &t, 1) != KOPT_OK;
        bad += state[64 + 64] != (k ? 0 : 1);
        for (i = 0; i < 64; ++i) bad += state[64 + i] != (k || i % 3 == 0 ? 0 : i % 3 == 1 ? 127 : 255);
    }
    ok(!bad, "8-bit first moments above 15/16 * 2^-126 have the scale 2^-126, those below it none: %d wrong", bad);
}
#endif

/* One special element in a long run of ordinary ones, at each place of a block: any special value in one of the arrays,
   or all arrays where their results come to lie between the largest finite number and infinity. */
static void check_lone_specials(int quick) {
    enum { EDGE = 5, RESIDUAL = 2 };
    int bad = 0, cases = 0, rounding, a, r, isa;
#ifdef KAHAN_OPT_VMATH
    static const rule tried[] = {ATAN2, SMOOTH};
#else
    static const rule tried[] = {MOMENTUM, ADAM};
#endif
    for (rounding = KOPT_NEAREST; rounding < ROUNDINGS; ++rounding)
        for (r = 0; r < 2; ++r)
            for (a = 0; a <= EDGE; ++a) {
                static const size_t offset[BUFFERS] = {65, 66, 67, 68};
                kopt_optimizer o = common(tried[r], KOPT_BF16, rounding, KOPT_DECAY_DECOUPLED);
                kopt_tensor t = tensor(KOPT_BF16, KOPT_BF16, 400);
                ref_layout l = ref_layout_of(&o, t.weight_format, t.n);
                unsigned char *array[EDGE] = {initial[WEIGHT], initial[GRAD], NULL, NULL, NULL};
                size_t width[EDGE] = {2, 2, 0, 0, 0}, at;
                int gradient = tried[r] == MOMENTUM ? 119 : 60; /* the exponent whose square, or itself, is enough */
                if (!ref_accepts(&o)) continue;
                array[2] = initial[STATE] + l.residual, width[2] = l.residual_width;
                array[3] = initial[STATE] + l.moment[0], width[3] = l.moment_width[0];
                array[4] = initial[STATE] + l.moment[1], width[4] = l.moment_width[1];
                o.weight_decay = 0;
                o.zero_grad = a % 2;
                for (at = 0; at < 260; at += quick ? 37 : 1, ++cases) {
                    t.first_index = below(64);
                    prepare(&o, &t, TAME);
                    if (a < EDGE) {
                        ref_set(array[a], width[a], at, special(KOPT_BF16));
                    } else {
                        ref_set(array[0], 2, at, 0x7f7f - below(2));
                        ref_set(array[1], 2, at, 0x8000 | ordinary(KOPT_BF16, gradient, gradient + 7, 0));
                        ref_set(array[RESIDUAL], width[RESIDUAL], at, 0);
                        ref_set(array[3], width[3], at, 0x8000 | ordinary(KOPT_BF16, 118, 127, 0));
                        ref_set(array[4], width[4], at, 0x7f7f - below(2));
                    }
                    expect(o, &t, 2);
                    FOR_EACH_ISA(isa) bad += !steps_agree(o, &t, 2, offset, 0);
                }
            }
    ok(!bad, "one special element among ordinary ones: %d cases, %d disagree", cases, bad);
}

/* What a kernel of vectors hands to that of one lane, or nearly: infinity, NaN of any payload, and what is next to the
   largest number of a format. */
static uint32_t sharp(kopt_format f) {
    static const uint32_t wide[] = {0x7f800000, 0x7fffffff, 0x7f800001, 0x7fbfffff, 0x7fc00000, 0x7fff8000,
                                    0x7fffe000, 0x7f7fffff, 0x7f7f8000, 0x7f7f0000, 0x7f7effff, 0x7f7e8000,
                                    0x477fdfff, 0x477fe000, 0x477fefff, 0x477ff000, 0x47800000};
    static const uint32_t brain[] = {0x7f80, 0x7fff, 0x7f81, 0x7fbf, 0x7fc0, 0x7f7f, 0x7f7e, 0x477f, 0x4780};
    static const uint32_t half[] = {0x7c00, 0x7fff, 0x7c01, 0x7dff, 0x7e00, 0x7bff, 0x7bfe};
    if (f == KOPT_F32) return wide[below(sizeof wide / sizeof *wide)] | (noise() & 0x80000000u);
    return (f == KOPT_BF16 ? brain[below(sizeof brain / sizeof *brain)] : half[below(sizeof half / sizeof *half)]) |
           (noise() & 0x8000u);
}

/* The largest number of format f, or the one before it. */
static uint32_t largest(kopt_format f) {
    return (f == KOPT_F32 ? 0x7f7fffff : f == KOPT_BF16 ? 0x7f7f : 0x7bff) - below(2);
}

/* At an element one of the arrays is sharp, or all; or numbers are so large that results come to lie between the
   largest finite one and infinity. */
static void sharpen(const kopt_optimizer *o, const kopt_tensor *t, size_t at) {
    const ref_layout l = ref_layout_of(o, t->weight_format, t->n);
    const uint32_t only = below(14);
    const size_t weight = ref_width(t->weight_format);
    unsigned char *const s = initial[STATE];
    size_t k;
    if (only > 10) {
        const kopt_format f = t->grad_format;
        const int half = t->weight_format == KOPT_FP16 || o->first_moment_format == KOPT_FP16 ||
                         o->second_moment_format == KOPT_FP16 || f == KOPT_FP16;
        ref_set(initial[WEIGHT], weight, at, largest(t->weight_format));
        ref_set(initial[GRAD], ref_width(f), at, ordinary(f, half ? 8 : 118, half ? 16 : 128, 1));
        if (l.residual_width) ref_set(s + l.residual, l.residual_width, at, 0);
        for (k = 0; k < 4; ++k)
            if (l.moment_width[k] && ref_format(o, (int)k) != KOPT_Q8 && below(2))
                ref_set(s + l.moment[k], l.moment_width[k], at, largest(ref_format(o, (int)k)));
        return;
    }
    if (only < 2) ref_set(initial[WEIGHT], weight, at, sharp(t->weight_format));
    if (only < 1 || only == 2 || only > 9) ref_set(initial[GRAD], ref_width(t->grad_format), at, sharp(t->grad_format));
    if (l.residual_width && o->rounding >= KOPT_COMPACT && only == 9) { /* together NaN, its lowest bits set */
        ref_set(initial[WEIGHT], 2, at, noise() & 0x8000u);
        ref_set(s + l.residual, l.residual_width, at, 0xffffu - below(16));
    }
    if (l.residual_width && (only < 1 || only == 3))
        ref_set(s + l.residual, l.residual_width, at, o->rounding == KOPT_KAHAN ? sharp(t->weight_format) : noise());
    for (k = 0; k < 4; ++k)
        if (l.moment_width[k] && (only < 1 || (only > 3 && only < 8 && only % (uint32_t)ref_moments(o) == k))) {
            if (ref_format(o, (int)k) == KOPT_Q8)
                s[l.scale[k] + at / 64] = (unsigned char)(below(2) ? 255 * below(2) : below(2) ? 254 : noise());
            else
                ref_set(s + l.moment[k], l.moment_width[k], at, sharp(ref_format(o, (int)k)));
        }
    if (l.slow_width && (only < 1 || only == 8)) ref_set(s + l.slow, weight, at, sharp(t->weight_format));
    if (l.slow_residual_width && (only < 1 || only == 9))
        ref_set(s + l.slow_residual, l.slow_residual_width, at,
                o->rounding == KOPT_KAHAN ? sharp(t->weight_format) : noise());
}

/* Every rule, format and rounding of weights, formats of moments and gradients: one to four sharp elements in a
   turn, or in the tail of each length. */
static void check_sharp(int quick) {
    static const uint32_t lengths[] = {63, 63, 63, 300};
    static kopt_counts counts;
    const int many = quick ? 2 : 40;
    int r, weight, rounding, moment, grad, again;
    for (r = FIRST; r < RULES; ++r) {
        int bad = 0;
        uint32_t cases = 0;
        for (weight = KOPT_F32; weight <= KOPT_FP16; ++weight)
            for (rounding = KOPT_NEAREST; rounding < (weight == KOPT_F32 ? 1 : ROUNDINGS); ++rounding)
                for (moment = KOPT_F32; moment <= TWO_FORMATS; ++moment)
                    for (grad = KOPT_F32; grad <= KOPT_FP16; ++grad)
                        for (again = 0; again < many * (grad == weight && moment == weight ? 6 : 1); ++again) {
                            kopt_optimizer o = make((rule)r);
                            kopt_tensor t = tensor((kopt_format)weight, (kopt_format)grad, 0);
                            uint32_t k;
                            set_moments(&o, moment), o.rounding = (kopt_rounding)rounding;
                            o.moment_rounding = rounding == KOPT_FEEDBACK ? KOPT_STOCHASTIC : (kopt_rounding)below(2);
                            o.residual_rounding = (kopt_rounding)below(2);
                            if (!ref_accepts(&o)) continue;
                            ++cases;
                            o.decay_mode = below(2) ? KOPT_DECAY_L2 : (kopt_decay_mode)below(3),
                            o.weight_decay = below(4) != 0;
                            vary(&o, &t);
                            t.n = 1 + below(lengths[below(4)]);
                            t.first_index += below(2);
                            if (below(4) == 0) t.counts = &counts;
                            if (below(4) == 0) { /* what has a kernel of its own */
                                t.copy = NULL, t.counts = NULL, o.moments_only = 0, t.n += 64;
                                o.decay_mode = o.rule == KOPT_RULE_EMA ? o.decay_mode : KOPT_DECAY_DECOUPLED;
                                if (rounding == KOPT_FEEDBACK) o.residual_rounding = KOPT_STOCHASTIC;
                                o.moment_rounding = o.residual_rounding;
                            }
                            bad += !prepare(&o, &t, TAME);
                            for (k = below(4); k < 4; ++k) sharpen(&o, &t, below((uint32_t)t.n));
                            bad += disagreements_prepared(&o, &t, 2);
                        }
        ok(!bad, "%s: infinities, NaN and what is next to them, %u tensors, %d disagree", rule_name[r], (unsigned)cases,
           bad);
    }
}

/* New moments and weights between the largest number and infinity, where a stochastic store is one to nearest: in the
   lower half of that interval all, or in the upper one, so that nothing else sends a turn to the code of one lane. With
   betas of 0 the moments are a gradient and its square. */
static void check_last_interval(void) {
    static const size_t offset[BUFFERS] = {65, 66, 67, 68};
    int r, rounding, weight, moment, narrow, square, upper, isa, bad = 0, cases = 0;
    uint32_t i;
    for (r = FIRST; r < RULES; ++r)
        for (weight = KOPT_BF16; weight <= KOPT_FP16 && r != EMA; ++weight)
            for (moment = KOPT_BF16; moment <= KOPT_FP16; ++moment)
                for (rounding = KOPT_NEAREST; rounding < ROUNDINGS; ++rounding)
                    for (narrow = 0; narrow <= (moment == weight); ++narrow) /* gradients in the format of the rest */
                        for (square = 0; square < 2; ++square)
                            for (upper = 0; upper < 2; ++upper) {
                                const int brain = moment == KOPT_BF16, rooted = square && brain; /* fp16 keeps roots */
                                const uint32_t most = brain ? 0x7f7f : 0x7bff, infinity = brain ? 0x7f80 : 0x7c00;
                                const uint32_t half = brain ? 0x8000 : 0x1000;
                                const double by = 0.25 + 0.5 * upper; /* of the interval */
                                kopt_optimizer o = make((rule)r);
                                kopt_tensor t =
                                    tensor((kopt_format)weight, narrow ? (kopt_format)moment : KOPT_F32, 130);
                                ref_layout l;
                                int k;
                                o.first_moment_format = o.second_moment_format = (kopt_format)moment;
                                o.rounding = (kopt_rounding)rounding, o.moment_rounding = KOPT_STOCHASTIC;
                                o.beta1 = o.beta2 = o.beta3 = o.dampening = o.weight_decay = 0, o.seed = noise();
                                if (rounding == KOPT_FEEDBACK) o.beta1 = 1e-10;
                                if (!ref_accepts(&o)) continue;
                                ++cases;
                                o.lr = by * ldexp(1, weight == KOPT_BF16 ? 120 : 5); /* of the weight's interval */
                                if (o.rule == KOPT_RULE_SGD || o.rule == KOPT_RULE_RADAM || o.rule == KOPT_RULE_RANGER)
                                    o.lr /= rooted ? ldexp(1, 64) : ldexp(1, brain ? 128 : 16); /* they do not divide */
                                if (narrow) o.grad_scale = 1 + (rooted ? (1 + by) / 510 : by / (brain ? 255 : 2047));
                                l = ref_layout_of(&o, t.weight_format, t.n);
                                bad += !prepare(&o, &t, TAME);
                                if (t.state_size > 64) memset(initial[STATE] + 64, 0, t.state_size - 64);
                                for (i = 0; i < t.n; ++i) {
                                    const uint32_t u = (brain ? 0x7f7f0000 : 0x477fe000) + half / 4 + below(half / 2);
                                    const float g = ref_float(u + (upper ? half : 0));
                                    if (narrow)
                                        ref_set(initial[GRAD], 2, i, rooted ? 0x5f7f : most);
                                    else
                                        ref_set(initial[GRAD], 4, i, ref_bits(rooted ? ref_sqrt(g) : g));
                                    ref_set(initial[WEIGHT], 2, i, weight == KOPT_BF16 ? 0xff7f : 0xfbff);
                                }
                                expect(o, &t, 1);
                                k = rooted && ref_moments(&o) > 1;
                                for (i = 0; i < t.n && k >= rooted && k < ref_moments(&o) && r != ADAN; ++i)
                                    bad += ref_get(expected[0][STATE] + l.moment[k], 2, i) != (upper ? infinity : most);
                                for (i = 0; i < t.n && (r == PLAIN || (r == ADAM && square >= brain)); ++i) /* finite */
                                    bad += ref_get(expected[0][WEIGHT], 2, i) !=
                                           (weight == KOPT_BF16 ? 0xff7fu : 0xfbffu) + (uint32_t)upper;
                                FOR_EACH_ISA(isa) bad += !steps_agree(o, &t, 1, offset, 0);
                            }
    ok(!bad, "stores between the largest number and infinity: %d tensors, %d disagree", cases, bad);
}

/* ---- Random numbers to their lowest bit ------------------------------------------------------------------------- */

#ifndef KAHAN_OPT_VMATH
/* Where a stochastic store goes up by its whole random number and not by one less, or would by one more: gradients are
   chosen so that what is cut off and the number of the weight (or its compensation), of the first or of the second
   moment add up to 2^16 or 2^16 - 1. Unrounded values are those of the reference with fp32 in all places. */
static void check_lowest_bits(void) {
    enum { MANY = 8192, CHOICES = 4096 };
    static const struct {
        rule r;
        int rounding;
    } tried[] = {{PLAIN, KOPT_STOCHASTIC}, {PLAIN, KOPT_KAHAN}, {MOMENTUM, KOPT_STOCHASTIC}, {MOMENTUM, KOPT_KAHAN},
                 {ADAM, KOPT_STOCHASTIC},  {ADAM, KOPT_KAHAN},  {ADAM, KOPT_NEAREST},        {LION, KOPT_KAHAN}};
    static int choice[3][65536]; /* + 1, of what leaves so much in that store */
    static float grad[CHOICES], weight[CHOICES];
    static unsigned char state[64 + 8 * CHOICES];
    const size_t offset[BUFFERS] = {65, 66, 67, 68};
    int f, g, k, c, isa, bad = 0, cases = 0, edges[3][2] = {{0, 0}, {0, 0}, {0, 0}};
    size_t i;
    for (k = 0; k < (int)(sizeof tried / sizeof *tried); ++k)
        for (f = KOPT_BF16; f <= KOPT_FP16; ++f)
            for (g = KOPT_F32; g <= KOPT_BF16; ++g, ++cases) {
                const int kahan = tried[k].rounding == KOPT_KAHAN;
                kopt_optimizer o = common(tried[k].r, (kopt_format)f, tried[k].rounding, KOPT_DECAY_L2), fp32;
                kopt_tensor t = kopt_tensor_of(weight, KOPT_F32, grad, KOPT_F32, g == KOPT_F32 ? CHOICES : 128, state,
                                               sizeof state);
                const int stores = 1 + ref_moments(&o), scale = f == KOPT_BF16 ? -4 : kahan ? -29 : -20;
                const float start = !kahan ? 0 : f == KOPT_BF16 ? 1.0f : 0.125f;
                int store;
                o.weight_decay = 0, o.lr = f == KOPT_BF16 ? 0.0007 : 0.7, o.eps = 1e-15;
                if (o.rule == KOPT_RULE_LION && f == KOPT_FP16) o.lr = 1e-9;
                if (o.rule == KOPT_RULE_ADAM) o.lr = f == KOPT_BF16 ? 0.0007 : kahan ? 1e-9 : 3e-6;
                memset(choice, 0, sizeof choice), memset(weight, 0, sizeof weight), memset(state, 0, sizeof state);
                fp32 = o, fp32.first_moment_format = fp32.second_moment_format = KOPT_F32;
                for (i = 0; i < t.n; ++i) grad[i] = (float)ldexp(1 + (double)i / (double)t.n, scale);
                ref_step_tensor(&fp32, &t);
                for (i = 0; i < t.n; ++i)
                    for (store = 0; store < stores; ++store) {
                        const ref_layout l = ref_layout_of(&fp32, KOPT_F32, t.n);
                        float x = weight[i];
                        if (store > 0) x = ref_float(ref_get(state + l.moment[store - 1], 4, i));
                        if (store == 0 && start > 0) x = ref_mul(x, ref_compensation_scale((kopt_format)f));
                        if (store > 0 && ref_rooted(&o, store - 1)) x = ref_sqrt(x);
                        choice[store][ref_extended((kopt_format)f, ref_bits(x)) & 0xffff] = (int)i + 1;
                    }
                t = tensor((kopt_format)f, (kopt_format)g, MANY);
                bad += !prepare(&o, &t, TAME);
                if (t.state_size > 64) memset(initial[STATE] + 64, 0, t.state_size - 64);
                for (i = 0; i < MANY; ++i) {
                    const uint32_t r = ref_random(o.seed, o.step + 1, t.id, 0, i);
                    int found = 0;
                    for (store = (int)i % stores, c = 0; c < 2 * stores; ++c, store = (store + 1) % stores) {
                        const uint32_t number = ref_number(r, (uint32_t)store);
                        found = number == 0 ? 0 : choice[store][(c < stores ? 65536 : 65535) - number];
                        if (found) break;
                    }
                    if (found) ++edges[store][c >= stores];
                    ref_set(initial[WEIGHT], 2, i, ref_narrow((kopt_format)f, ref_bits(start)));
                    ref_set(initial[GRAD], ref_width(t.grad_format), i,
                            ref_narrow(t.grad_format, ref_bits(grad[found ? found - 1 : 0])));
                }
                expect(o, &t, 1);
                FOR_EACH_ISA(isa) bad += !steps_agree(o, &t, 1, offset, 0);
            }
    for (k = 0; k < 3; ++k) bad += edges[k][0] < 500 || edges[k][1] < 500;
    ok(!bad, "stores in which the lowest random bit decides: %d tensors, %d disagree", cases, bad);
}
#endif

#ifndef KAHAN_OPT_VMATH
/* FEEDBACK: what the first moment would owe comes to lie between the largest number of bf16 and that of fp32, where it
   is not taken. The rate is next to nothing, and decay moves the weights. */
static void check_largest_payment(void) {
    static const size_t offset[BUFFERS] = {65, 66, 67, 68};
    kopt_optimizer o = common(ADAM, KOPT_BF16, KOPT_FEEDBACK, KOPT_DECAY_DECOUPLED), wide;
    kopt_tensor t = tensor(KOPT_BF16, KOPT_F32, 8000);
    size_t i;
    int isa, bad = 0, between = 0;
    o.lr = 2e-38, o.weight_decay = 1e37, o.seed = 1; /* the same cases on every machine */
    bad += !prepare(&o, &t, TAME);
    memset(initial[STATE] + 32, 0, t.state_size - 32);
    for (i = 0; i < t.n; ++i) {
        ref_set(initial[WEIGHT], 2, i, 0x3f80 + (uint32_t)(i % 128));
        ref_set(initial[GRAD], 4, i, ref_bits(1e5f + 10 * (float)i));
    }
    wide = o, wide.first_moment_format = KOPT_F32; /* as it is before it is rounded */
    t.state_size = ref_layout_of(&wide, KOPT_BF16, t.n).size;
    expect(wide, &t, 1);
    for (i = 0; i < t.n; ++i) {
        const uint32_t u = ref_get(expected[0][STATE] + ref_layout_of(&wide, KOPT_BF16, t.n).moment[0], 4, i);
        between += (u & 0x7fffffff) > 0x7f7f0000 && (u & 0x7fffffff) <= 0x7f7fffff;
    }
    t.state_size = ref_layout_of(&o, KOPT_BF16, t.n).size;
    expect(o, &t, 1);
    FOR_EACH_ISA(isa) bad += !steps_agree(o, &t, 1, offset, 0);
    ok(!bad && between > 3, "FEEDBACK, %d first moments between the largest number and infinity: %d disagree", between,
       bad);
}
#endif

/* ---- Alignment, shards ------------------------------------------------------------------------------------------ */

static void check_alignment(void) {
    int bad = 0, rounding, f, b, isa;
    for (f = KOPT_BF16; f <= KOPT_FP16; ++f)
        for (rounding = KOPT_NEAREST; rounding < ROUNDINGS; ++rounding) {
            kopt_optimizer o = common(FIRST == PLAIN ? ADAM : FIRST, (kopt_format)f, rounding, KOPT_DECAY_L2);
            kopt_tensor t = tensor((kopt_format)f, (kopt_format)f, 300);
            if (!ref_accepts(&o)) continue;
            t.copy = initial[COPY], t.copy_format = KOPT_FP16, t.first_index = 5, o.zero_grad = 1;
            prepare(&o, &t, MIXED);
            expect(o, &t, 1);
            FOR_EACH_ISA(isa)
            for (b = 0; b < BUFFERS; ++b) {
                size_t offset[BUFFERS] = {64, 64, 64, 64}, shift;
                for (shift = 0; shift < 64; ++shift) offset[b] = 64 + shift, bad += !steps_agree(o, &t, 1, offset, 0);
            }
        }
    ok(!bad, "each pointer at each of 64 alignments: %d disagree", bad);
}

/* A tensor cut into shards, each with its own state block, against the whole. */
static void check_shards(void) {
    static const size_t cut[] = {0, 1, 64, 65, 200, 331, 500};
    static unsigned char weight[2000], grad[2000], state[64 + 24 * 500 + 24];
    int bad = 0, rounding, r, k, a;
    for (r = FIRST; r < RULES; ++r)
        for (rounding = KOPT_NEAREST; rounding < ROUNDINGS; ++rounding) {
            const kopt_format f = rounding % 2 ? KOPT_BF16 : KOPT_FP16;
            kopt_optimizer o = common((rule)r, f, rounding, KOPT_DECAY_L2), begun = o;
            kopt_tensor t = tensor(f, KOPT_BF16, 500), shard = t;
            ref_layout whole = ref_layout_of(&o, t.weight_format, t.n);
            kopt_step step;
            if (o.rule == KOPT_RULE_EMA) o.weight_decay = 0, begun = o;
            if (!ref_accepts(&o)) continue;
            if (o.stable) continue; /* depends on the whole tensor; the slices above measure it */
            t.first_index = 1000003;
            prepare(&o, &t, MIXED);
            expect(o, &t, 1);
            kopt_step_begin(&step, &begun);
            for (k = 0; k < 6; ++k) {
                size_t from = cut[k], n = cut[k + 1] - from;
                ref_layout l = ref_layout_of(&o, f, n);
                size_t width[7], there[7], here[7];
                width[0] = l.residual_width, there[0] = whole.residual, here[0] = l.residual;
                width[1] = l.slow_width, there[1] = whole.slow, here[1] = l.slow;
                width[2] = l.slow_residual_width, there[2] = whole.slow_residual, here[2] = l.slow_residual;
                for (a = 0; a < 4; ++a)
                    width[3 + a] = l.moment_width[a], there[3 + a] = whole.moment[a], here[3 + a] = l.moment[a];
                shard.n = n, shard.first_index = t.first_index + from;
                shard.weight = weight, shard.grad = grad, shard.state = state, shard.state_size = sizeof state;
                memcpy(weight, initial[WEIGHT] + 2 * from, 2 * n);
                memcpy(grad, initial[GRAD] + 2 * from, 2 * n);
                bad += kopt_state_init(&o, &shard, 1, NULL) != KOPT_OK;
                memcpy(state + 32, initial[STATE] + 32, 16);
                for (a = 0; a < 7; ++a)
                    memcpy(state + here[a], initial[STATE] + there[a] + from * width[a], n * width[a]);
                bad += kopt_step_run(&step, &shard, 1) != KOPT_OK;
                bad += memcmp(weight, expected[0][WEIGHT] + 2 * from, 2 * n) != 0;
                for (a = 0; a < 7; ++a)
                    bad += memcmp(state + here[a], expected[0][STATE] + there[a] + from * width[a], n * width[a]) != 0;
            }
        }
    ok(!bad, "six shards with their own state: %d differ from the whole", bad);
}

/* ---- Lists ------------------------------------------------------------------------------------------------------ */

/* A tensor without decay is stepped as by an optimizer with a weight_decay of 0, whose step `expected` has. Control:
   with decay it is another step. */
static void check_no_decay(int quick) {
    static unsigned char decayed[4 * LONGEST];
    int bad = 0, cases = 0, r, decay, weight, rounding, moment, again;
    for (r = FIRST; r < RULES; ++r)
        for (decay = KOPT_DECAY_L2; decay <= KOPT_DECAY_FULLY_DECOUPLED; ++decay)
            for (weight = KOPT_F32; weight <= KOPT_FP16; ++weight)
                for (rounding = KOPT_NEAREST; rounding < (weight == KOPT_F32 ? 1 : ROUNDINGS); ++rounding)
                    for (moment = KOPT_F32; moment <= KOPT_Q8; ++moment)
                        for (again = 0; again < (quick ? 1 : 4); ++again) {
                            kopt_optimizer o = common((rule)r, (kopt_format)moment, rounding, decay), none;
                            kopt_tensor t = tensor((kopt_format)weight, (kopt_format)below(3), 300);
                            int isa;
                            if (!ref_accepts(&o)) continue;
                            ++cases;
                            o.weight_decay = o.rule == KOPT_RULE_EMA ? 0 : 0.5, o.max_lr = 0.02, o.step = 1;
                            none = o, none.weight_decay = 0;
                            bad += !prepare(&o, &t, again % 2 ? WILD : TAME);
                            expect(o, &t, 1), memcpy(decayed, expected[0][WEIGHT], sizeof decayed);
                            expect(none, &t, 1);
                            bad += !memcmp(decayed, expected[0][WEIGHT], buffer_size(&t, WEIGHT)) &&
                                   o.weight_decay > 0 && rounding != KOPT_NEAREST;
                            t.no_decay = 1;
                            FOR_EACH_ISA(isa) {
                                static const size_t offset[BUFFERS] = {65, 66, 67, 68};
                                bad += !steps_agree(o, &t, 1, offset, below(2) ? 0 : 64);
                            }
                        }
    ok(!bad, "no_decay: the step of weight_decay 0, %d tensors, %d disagree", cases, bad);
}

enum { TENSORS = 6, LENGTHS = 700 };
typedef struct list_memory {
    unsigned char array[TENSORS][BUFFERS][64 + 24 * LENGTHS];
} list_memory;

static void place_list(kopt_tensor *placed, const kopt_tensor *t, list_memory *m) {
    int k;
    for (k = 0; k < TENSORS; ++k)
        placed[k] = place(&t[k], m->array[k][WEIGHT], m->array[k][GRAD], m->array[k][STATE], m->array[k][COPY]);
}

/* One list of tensors in all formats, with and without decay: made and stepped by a call for the list, and by ranges
   that begin and end within tensors, against calls for each tensor alone. */
static void check_lists(void) {
    static const size_t length[TENSORS] = {300, 257, 64, LENGTHS, 1, 513};
    static list_memory fresh, alone, together;
    static float start[TENSORS * LENGTHS];
    kopt_tensor t[TENSORS], placed[TENSORS];
    int bad = 0, cases = 0, r, rounding, moment, k, isa, ranges;
    size_t i, total = 0;
    for (k = 0; k < TENSORS; ++k) total += length[k];
    for (r = FIRST; r < RULES; ++r)
        for (rounding = KOPT_NEAREST; rounding < ROUNDINGS; ++rounding)
            for (moment = KOPT_F32; moment <= KOPT_Q8; ++moment) {
                kopt_optimizer o = common((rule)r, (kopt_format)moment, rounding, (int)below(3));
                if (o.rule == KOPT_RULE_EMA) o.weight_decay = 0;
                if (!ref_accepts(&o)) continue;
                ++cases;
                memset(&fresh, 0xa5, sizeof fresh);
                for (i = 0; i < total; ++i) start[i] = ref_float(ordinary(KOPT_F32, -8, 1, 1));
                for (k = 0; k < TENSORS; ++k) {
                    t[k] = tensor((kopt_format)(k % 3), (kopt_format)below(3), length[k]);
                    t[k].no_decay = k % 2, t[k].id = 10 + (uint32_t)k, t[k].rate_scale = below(2) ? 0.5 : 0;
                    t[k].copy = below(2) ? initial[COPY] : NULL, t[k].copy_format = (kopt_format)below(3);
                    t[k].state_size = kopt_state_size(&o, &t[k]);
                    for (i = 0; i < t[k].n; ++i)
                        ref_set(fresh.array[k][GRAD], ref_width(t[k].grad_format), i,
                                ordinary(t[k].grad_format, -14, 0, 1));
                }
                alone = fresh;
                place_list(placed, t, &fresh);
                bad += kopt_state_init(&o, placed, TENSORS, start) != KOPT_OK;
                place_list(placed, t, &alone);
                for (i = 0, k = 0; k < TENSORS; i += t[k++].n)
                    bad += kopt_state_init(&o, &placed[k], 1, start + i) != KOPT_OK;
                bad += memcmp(&fresh, &alone, sizeof fresh) != 0;
                for (k = 0; k < TENSORS; ++k) {
                    kopt_optimizer one = o;
                    bad += kopt_optimizer_step(&one, &placed[k], 1) != KOPT_OK;
                }
                FOR_EACH_ISA(isa)
                for (ranges = 0; ranges <= !o.stable; ++ranges) { /* StableAdamW needs the whole of each tensor */
                    const size_t size = 1 + below(400);
                    kopt_optimizer all = o;
                    kopt_step step;
                    together = fresh;
                    place_list(placed, t, &together);
                    if (ranges) bad += kopt_step_begin(&step, &all) != KOPT_OK;
                    for (i = 0; ranges && i < total; i += size)
                        bad +=
                            kopt_step_range(&step, placed, TENSORS, i, i + size < total ? i + size : total) != KOPT_OK;
                    if (!ranges) bad += kopt_optimizer_step(&all, placed, TENSORS) != KOPT_OK;
                    bad += all.step != o.step + 1 || memcmp(&together, &alone, sizeof alone);
                    bad += !memcmp(&together, &fresh, sizeof fresh);
                }
            }
    ok(!bad, "lists of tensors in all formats, with and without decay: %d lists, %d differ from tensors alone", cases,
       bad);
}

#ifndef KAHAN_OPT_VMATH
int main(int count, char **arguments) {
    const int brief = count > 1 && !strcmp(arguments[1], "brief");
    const int quick = brief || (count > 1 && !strcmp(arguments[1], "quick"));
    fesetenv(FE_DFL_ENV); /* -Ofast would start with subnormals flushed: the reference needs them */
    check_combinations(brief ? 211 : quick ? 11 : 1);
    check_lengths(quick);
    if (brief) return done();
#ifndef KAHAN_OPT_VMATH
    check_codes(quick);
    check_largest_code();
    check_largest_signed_code();
    check_least_scale();
#endif
    check_lone_specials(quick);
    check_sharp(quick);
    check_last_interval();
#ifndef KAHAN_OPT_VMATH
    check_lowest_bits();
    check_largest_payment();
#endif
    check_alignment();
    check_shards();
    check_no_decay(quick);
    check_lists();
    return done();
}
#endif
