/* reference.h - docs/numerics.md once more, for the tests to hold the implementation against. Rounding is integer
   arithmetic, every float operation goes through a volatile so that no compiler fuses or reorders it, and nothing here
   calls the code under test: of kahan_opt.h only types and enum values are used. */
#ifndef REFERENCE_H
#define REFERENCE_H

#include <math.h>
#include <string.h>

#if defined(__wasm__)    /* has no such pragma: without -Ofast */
#elif defined(__clang__) /* as the standard has it, whatever -Ofast the implementation is compiled with */
#pragma float_control(precise, on, push)
#elif defined(__GNUC__)
#pragma GCC push_options
#pragma GCC optimize("no-fast-math")
#endif

/* ---- Words and single operations -------------------------------------------------------------------------------- */

static inline uint32_t ref_bits(float x) {
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

static inline float ref_float(uint32_t u) {
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

static inline float ref_add(float a, float b) {
    volatile float x = a + b;
    return x;
}
static inline float ref_sub(float a, float b) {
    volatile float x = a - b;
    return x;
}
static inline float ref_mul(float a, float b) {
    volatile float x = a * b;
    return x;
}
/* In binary64, where the second rounding does no harm: clang -Ofast takes a float's root from an estimate nevertheless.
   */
static inline float ref_div(float a, float b) {
    volatile double x = (double)a / (double)b;
    return (float)x;
}
static inline float ref_sqrt(float a) {
    volatile double x = sqrt((double)a);
    return (float)x;
}

static inline size_t ref_width(kopt_format f) { return f == KOPT_F32 ? 4 : f == KOPT_Q8 ? 1 : 2; }

static inline uint32_t ref_get(const void *array, size_t width, size_t i) {
    const unsigned char *p = (const unsigned char *)array + i * width;
    uint32_t u = 0;
    uint16_t h;
    if (width == 4)
        memcpy(&u, p, 4);
    else if (width == 2)
        memcpy(&h, p, 2), u = h;
    else if (width == 1)
        u = *p;
    return u;
}

static inline void ref_set(void *array, size_t width, size_t i, uint32_t u) {
    unsigned char *p = (unsigned char *)array + i * width;
    uint16_t h = (uint16_t)u;
    if (width == 4)
        memcpy(p, &u, 4);
    else if (width == 2)
        memcpy(p, &h, 2);
    else if (width == 1)
        *p = (unsigned char)u;
}

/* ---- Conversions (sections 1 and 2) ----------------------------------------------------------------------------- */

static inline int ref_is_nan(kopt_format f, uint32_t u) {
    return f == KOPT_F32 ? (u << 1) > 0xff000000u : (u & 0x7fff) > (f == KOPT_BF16 ? 0x7f80u : 0x7c00u);
}

static inline int ref_is_finite(kopt_format f, uint32_t u) {
    return f == KOPT_F32 ? (u << 1) < 0xff000000u : (u & 0x7fff) < (f == KOPT_BF16 ? 0x7f80u : 0x7c00u);
}

/* m / 2^shift, to nearest, ties to even; m < 2^24. */
static inline uint32_t ref_shift(uint32_t m, uint32_t shift) {
    uint32_t whole, rest, half;
    if (shift == 0) return m;
    if (shift > 25) return 0;
    whole = m >> shift, rest = m & ((1u << shift) - 1), half = 1u << (shift - 1);
    return whole + (rest > half || (rest == half && (whole & 1)));
}

/* The significand of a finite fp32 and the weight of its last bit: |x| = significand * 2^(exponent - 150). */
static inline uint32_t ref_significand(uint32_t u, uint32_t *exponent) {
    uint32_t e = u >> 23 & 255;
    *exponent = e ? e : 1;
    return (u & 0x7fffff) | (e ? 0x800000u : 0);
}

/* fp32 word to the word of another format, to nearest even. */
static inline uint32_t ref_narrow(kopt_format f, uint32_t u) {
    uint32_t sign = u >> 16 & 0x8000, mag = u & 0x7fffffff, exponent, m;
    if (f == KOPT_F32) return u;
    if (mag > 0x7f800000) return sign | (f == KOPT_BF16 ? 0x7fc0u : 0x7e00u);
    if (f == KOPT_BF16) return sign | ((mag + 0x7fff + (mag >> 16 & 1)) >> 16);
    if (mag >= 0x477ff000) return sign | 0x7c00;
    if (mag >= 0x38800000) return sign | ((mag - 0x38000000 + 0xfff + (mag >> 13 & 1)) >> 13);
    m = ref_significand(mag, &exponent);
    return sign | ref_shift(m, 126 - exponent);
}

static inline uint32_t ref_widen(kopt_format f, uint32_t h) {
    uint32_t sign = (h & 0x8000) << 16, exponent = h >> 10 & 31, m = h & 0x3ff;
    if (f == KOPT_F32) return h;
    if (f == KOPT_BF16) return h << 16;
    if (exponent == 31) return sign | 0x7f800000 | m << 13;
    if (exponent) return sign | (exponent + 112) << 23 | m << 13;
    if (!m) return sign;
    for (exponent = 113; !(m & 0x400); --exponent) m <<= 1;
    return sign | exponent << 23 | (m & 0x3ff) << 13;
}

static inline uint32_t ref_extended(kopt_format f, uint32_t u) {
    uint32_t sign = u & 0x80000000u, mag = u & 0x7fffffff, exponent, m;
    if (mag > 0x7f800000) return f == KOPT_BF16 ? 0x7fc00000 : 0x7e000000;
    if (f == KOPT_BF16) return u;
    if (mag >= 0x47800000) return sign | 0x7c000000;
    if (mag >= 0x38800000) return sign | (mag - 0x38000000) << 3;
    m = ref_significand(mag, &exponent);
    return sign | (exponent >= 110 ? m << (exponent - 110) : ref_shift(m, 110 - exponent));
}

static inline uint32_t ref_from_extended(kopt_format f, uint32_t u) {
    uint32_t sign = u & 0x80000000u, mag = u & 0x7fffffff;
    if (f == KOPT_BF16) return u;
    if (mag > 0x7c000000) return 0x7fc00000;
    if (mag == 0x7c000000) return sign | 0x7f800000;
    if (mag >= 0x04000000) return sign | ((mag >> 3) + 0x38000000);
    return sign | ref_bits(ref_mul((float)mag, ref_float(0x2b800000))); /* 2^-40 */
}

/* fp32 word to 16 bits with the random number r; subnormals and the canonical NaN as they come. */
static inline uint32_t ref_stochastic(kopt_format f, uint32_t x, uint32_t r) {
    uint32_t u = ref_extended(f, x), last = f == KOPT_BF16 ? 0x7f7f0000 : 0x7bff0000;
    return (u + ((u & 0x7fffffff) >= last ? 0x8000 : r)) >> 16;
}

/* What a step does to a finished result of format f. */
static inline uint32_t ref_flush(kopt_format f, uint32_t u) {
    if (ref_is_nan(f, u)) return f == KOPT_F32 ? 0x7fc00000 : f == KOPT_BF16 ? 0x7fc0 : 0x7e00;
    if (f == KOPT_F32 && !(u & 0x7f800000)) return 0;
    if (f == KOPT_BF16 && !(u & 0x7f80)) return 0;
    return u;
}

/* ---- Random numbers (section 7) --------------------------------------------------------------------------------- */

static inline void ref_philox(int rounds, const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]) {
    uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3], k0 = key[0], k1 = key[1];
    for (; rounds > 0; --rounds, k0 += 0x9e3779b9, k1 += 0xbb67ae85) {
        uint64_t p0 = (uint64_t)0xd2511f53 * c0, p1 = (uint64_t)0xcd9e8d57 * c2;
        c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0, c1 = (uint32_t)p1;
        c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1, c3 = (uint32_t)p0;
    }
    out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
}

/* Number 0 of an element, and in the upper half what the number of each further store adds. */
static inline uint32_t ref_random(uint64_t seed, uint32_t step, uint32_t id, uint32_t stream, uint64_t e) {
    uint64_t block = e / 2048 * 16 + e % 128 / 8;
    uint32_t key[2], counter[4], out[4], own, other, row = (uint32_t)(e % 2048 / 128);
    key[0] = (uint32_t)seed, key[1] = (uint32_t)(seed >> 32);
    counter[0] = (uint32_t)block, counter[1] = (uint32_t)(block >> 32) + (stream << 28);
    counter[2] = step, counter[3] = id;
    ref_philox(7, counter, key, out);
    own = out[e / 2 % 4] >> (e & 1 ? 16 : 0) & 0xffff;
    other = out[e / 2 % 4] >> (e & 1 ? 0 : 16) & 0xffff;
    return (own + 16 * row * other) % 65536 + 65536 * (2 * other % 65536);
}

/* The number of store k: 0 the weight or its compensation, then the moments. */
static inline uint32_t ref_number(uint32_t r, uint32_t k) { return (r % 65536 + k * (r / 65536)) % 65536; }

/* ---- The step (sections 3 to 6) --------------------------------------------------------------------------------- */

/* Where the arrays of a state block lie (0 bytes wide: absent). */
typedef struct ref_layout {
    size_t residual_width, moment_width[4], slow_width, slow_residual_width;
    size_t residual, moment[4], scale[4], slow, slow_residual, size;
} ref_layout;

static inline int ref_moments(const kopt_optimizer *o) {
    if (o->rule == KOPT_RULE_SGD) return o->momentum > 0;
    if (o->rule == KOPT_RULE_EMA) return 0;
    return o->rule == KOPT_RULE_LION                 ? 1
           : o->rule == KOPT_RULE_ADAN               ? 4
           : o->rule == KOPT_RULE_ADAM && o->amsgrad ? 3
                                                     : 2;
}

/* Is moment k a mean or a maximum of squares? Of the rules with a second moment each has one there. */
static inline int ref_square(const kopt_optimizer *o, int k) {
    return k < ref_moments(o) && (k == 1 || (k == 2 && o->rule == KOPT_RULE_ADAM));
}

/* The format of moment k: squares have that of the second moment, all others that of the first. */
static inline kopt_format ref_format(const kopt_optimizer *o, int k) {
    return ref_square(o, k) ? o->second_moment_format : o->first_moment_format;
}

/* The moments of 8 bits, as a set of bits. */
static inline int ref_coded(const kopt_optimizer *o) {
    int k, set = 0;
    for (k = 0; k < ref_moments(o); ++k) set |= (ref_format(o, k) == KOPT_Q8) << k;
    return set;
}

/* Which roundings keep something beside a 16-bit weight. */
static inline int ref_carries(const kopt_optimizer *o, kopt_format f) {
    return f != KOPT_F32 && o->rounding >= KOPT_KAHAN && o->rounding <= KOPT_EXACT;
}

/* Does the first moment pay back the rounding errors of these weights? */
static inline int ref_pays(const kopt_optimizer *o, kopt_format f) {
    return f != KOPT_F32 && o->rounding == KOPT_FEEDBACK;
}

/* KOPT_FEEDBACK takes only what can pay: fp16 cannot hold what is owed. */
static inline int ref_accepts(const kopt_optimizer *o) {
    const double b = o->rule == KOPT_RULE_SGD ? o->momentum : o->beta1;
    if (o->rounding != KOPT_FEEDBACK) return 1;
    if (o->rule != KOPT_RULE_SGD && o->rule != KOPT_RULE_ADAM && o->rule != KOPT_RULE_ADAN &&
        o->rule != KOPT_RULE_RADAM)
        return 0;
    return b > 0 && b <= 0.999 && o->first_moment_format != KOPT_FP16 &&
           (o->first_moment_format == KOPT_F32 || o->moment_rounding == KOPT_STOCHASTIC);
}

static inline size_t ref_room(size_t bytes) { return (bytes + 15) / 16 * 16; }

static inline ref_layout ref_layout_of(const kopt_optimizer *o, kopt_format f, size_t n) {
    ref_layout l;
    int k;
    l.residual_width = !ref_carries(o, f) ? 0 : o->rounding == KOPT_COMPACT ? 1 : 2;
    l.residual = 64;
    l.size = l.residual + ref_room(n * l.residual_width);
    for (k = 0; k < 4; ++k) {
        l.moment_width[k] = k < ref_moments(o) ? ref_width(ref_format(o, k)) : 0;
        l.moment[k] = l.size;
        l.size += ref_room(n * l.moment_width[k]);
        l.scale[k] = l.size;
        if (k < ref_moments(o) && ref_format(o, k) == KOPT_Q8) l.size += ref_room((n + 63) / 64);
    }
    l.slow_width = o->rule == KOPT_RULE_RANGER ? ref_width(f) : 0;
    l.slow = l.size;
    l.size += ref_room(n * l.slow_width);
    l.slow_residual_width = o->rule == KOPT_RULE_RANGER ? l.residual_width : 0;
    l.slow_residual = l.size;
    l.size += ref_room(n * l.slow_residual_width);
    if (l.size == 64) l.size = 0;
    return l;
}

/* The per-step scalars of step number t, each rounded once from binary64. */
typedef struct ref_scalars {
    float grad_scale, l2, decay, beta1, one_minus_beta1, beta2, one_minus_beta2, momentum, rate, root_scale, eps;
    float beta3, one_minus_beta3, third_scale, back; /* Adan; Ranger: how far back to the slow weight */
    int rectified, lookahead, first, coded;          /* coded: moments that are left as they are, for codes of 8 bits */
    float sharpness;                                 /* smooth Lion */
    float payment;                                   /* FEEDBACK: what takes an error of the weight to the moment */
} ref_scalars;

#ifdef KAHAN_OPT_VMATH
/* atan2 for x > 0 as docs/numerics.md has it, operation by operation. */
static inline float ref_angle(float y, float x) {
    const uint32_t sign = ref_bits(y) & 0x80000000u;
    float q, z, a, b, angle;
    y = ref_float(ref_bits(y) ^ sign);
    if (ref_is_nan(KOPT_F32, ref_bits(x)) || ref_is_nan(KOPT_F32, ref_bits(y))) return ref_float(0x7fc00000);
    q = y > x ? ref_div(x, y) : ref_div(y, x);
    z = ref_mul(q, q);
    a = ref_add(ref_mul(ref_add(z, 1.75760663f), z), 3.77875996f);
    b = ref_add(ref_mul(ref_sub(z, 3.12811708f), z), 6.84485292f);
    angle = ref_mul(ref_mul(0.0131872343f, q), ref_sub(2.93177509f, z));
    angle = ref_mul(angle, ref_mul(a, b));
    if (y > x) angle = ref_sub(ref_float(0x3fc90fdb), angle);
    return ref_float(ref_bits(angle) | sign);
}

#ifdef KAHAN_OPT_SLEEF
extern float Sleef_cinz_atan2f1_u10purec(float, float);
#define ref_atan2 Sleef_cinz_atan2f1_u10purec
#else
#define ref_atan2 ref_angle
#endif

/* That of arrays, which test_vmath.c compares with libm's. */
static inline float ref_tanh(float x) {
    kopt_vmath_tanh(&x, &x, 1);
    return x;
}
#endif

static inline double ref_root(double a) {
    volatile double x = 1, y = (1 + a) / 2;
    while (y < x) x = y, y = (x + a / x) / 2;
    return x;
}

static inline double ref_power(double base, uint32_t t) {
    volatile double p = 1, b = base;
    for (; t; t >>= 1, b = b * b)
        if (t & 1) p = p * b;
    return p;
}

/* 1 - beta, rounded once: the difference in binary64, and what that loses, which decides half-way between floats. */
static inline float ref_one_minus(double beta) {
    volatile double difference = 1 - beta, rest = 1 - difference, lost = rest - beta;
    const float x = (float)difference, other = nextafterf(x, difference > (double)x ? 2.0f : 0.0f);
    volatile double middle = ((double)x + (double)other) / 2;
    if (difference != middle || lost == 0) return x;
    return (lost > 0) == (other > x) ? other : x;
}

/* 1 - beta^t. */
static inline float ref_correction(double beta, uint32_t t) {
    float rest = ref_one_minus(beta), all = 0;
    int bit;
    for (bit = 0; bit < 32 && t >> bit; ++bit) {
        if (t >> bit & 1) all = ref_sub(ref_add(all, rest), ref_mul(all, rest));
        rest = ref_sub(ref_add(rest, rest), ref_mul(rest, rest));
    }
    return all;
}

static inline ref_scalars ref_scalars_of(const kopt_optimizer *o, uint32_t t) {
    ref_scalars s = {0, 0, 0, 0, 1, 0, 1, 0, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0};
    const float c1 = ref_correction(o->beta1, t), c2 = ref_correction(o->beta2, t), c3 = ref_correction(o->beta3, t);
    const float wd = (float)o->weight_decay;
    s.grad_scale = ref_mul((float)o->grad_scale, (float)o->clip);
    if (o->maximize) s.grad_scale = -s.grad_scale;
    if (o->decay_mode == KOPT_DECAY_L2) s.l2 = wd;
    s.first = t == 1;
    s.eps = (float)o->eps;
    s.beta1 = (float)o->beta1, s.one_minus_beta1 = ref_one_minus(o->beta1);
    s.beta2 = (float)o->beta2, s.one_minus_beta2 = ref_one_minus(o->beta2);
    s.beta3 = (float)o->beta3, s.one_minus_beta3 = ref_one_minus(o->beta3);
    s.rate = o->rule == KOPT_RULE_EMA ? (float)(1 - o->beta1) : (float)o->lr;
    if (o->decay_mode == KOPT_DECAY_DECOUPLED) s.decay = ref_mul(s.rate, wd);
    if (o->decay_mode == KOPT_DECAY_FULLY_DECOUPLED) s.decay = ref_mul(ref_div(s.rate, (float)o->max_lr), wd);
    if (o->rule == KOPT_RULE_SGD) {
        s.momentum = (float)o->momentum;
        s.beta1 = t > 1 ? s.momentum : 0, s.one_minus_beta1 = t > 1 ? (float)(1 - o->dampening) : 1;
    } else if (o->rule == KOPT_RULE_ADAM) {
        s.rate = ref_div(s.rate, c1);
        s.root_scale = ref_div(1, ref_sqrt(c2));
#ifdef KAHAN_OPT_VMATH
    } else if (o->rule == KOPT_RULE_LION) {
        s.sharpness = (float)o->sharpness;
    } else if (o->rule == KOPT_RULE_ADAM_ATAN2) {
        const float a = (float)o->atan2_a, b = (float)o->atan2_b;
        s.rate = o->atan2_outside ? ref_div(ref_mul(s.rate, a), c1) : ref_mul(s.rate, a);
        s.root_scale = ref_div(o->atan2_outside ? b : ref_mul(b, c1), ref_sqrt(c2));
        s.eps = ref_float(0x00800000);
#endif
    } else if (o->rule == KOPT_RULE_ADAN) {
        float shrink = o->decay_mode == KOPT_DECAY_L2 ? 1 : ref_add(1, s.decay);
        s.third_scale = ref_div(ref_mul(s.beta2, c1), c2);
        s.root_scale = ref_div(1, ref_sqrt(c3));
        s.rate = ref_div(ref_div(s.rate, shrink), c1);
        s.decay = ref_div(s.decay, shrink);
    } else if (o->rule == KOPT_RULE_RADAM || o->rule == KOPT_RULE_RANGER) {
        volatile double longest, length, over, under, x, y;
        x = 1 - o->beta2, longest = 2 / x, longest = longest - 1;
        x = 2.0 * t, x = x * ref_power(o->beta2, t), x = x / (1 - ref_power(o->beta2, t)), length = longest - x;
        s.rate = ref_div(s.rate, c1);
        if (o->rule == KOPT_RULE_RANGER) s.root_scale = ref_div(1, ref_sqrt(c2));
        if (length > 5) {
            x = length - 4, y = length - 2, over = x * y, over = over * longest;
            x = longest - 4, y = longest - 2, under = x * y, under = under * length;
            x = over / under;
            s.rectified = 1;
            s.rate = ref_mul(s.rate, (float)ref_root(x));
            if (o->rule == KOPT_RULE_RADAM) s.rate = ref_div(s.rate, ref_div(1, ref_sqrt(c2)));
        }
        s.lookahead = o->rule == KOPT_RULE_RANGER && t % (uint32_t)o->lookahead == 0;
        s.back = (float)(1 - o->lookahead_rate);
    }
    s.coded = ref_coded(o);
    if (ref_square(o, 1) && ref_format(o, 1) == KOPT_Q8 && t > 1) s.root_scale = ref_mul(s.root_scale, 1.003f);
    return s;
}

/* One element: the words of its formats, before and after. */
typedef struct ref_element {
    uint32_t weight, residual, moment[4], slow, slow_residual, grad;
} ref_element;

/* The weight with what COMPACT and EXACT remember of it; residual is sign-extended. The weight stands alone if the two
   do not make a finite number. */
static inline float ref_weight(const kopt_optimizer *o, kopt_format f, uint32_t weight, uint32_t residual) {
    if (f != KOPT_F32 && (o->rounding == KOPT_COMPACT || o->rounding == KOPT_EXACT)) {
        uint32_t joint = (weight << 16) + (o->rounding == KOPT_COMPACT ? residual << 8 : residual);
        if (ref_is_finite(f, joint >> 16)) return ref_float(ref_from_extended(f, joint));
    }
    return ref_float(ref_widen(f, weight));
}

/* 2^11 for the compensation of fp16 weights, 1 for bf16. */
static inline float ref_compensation_scale(kopt_format f) { return f == KOPT_FP16 ? 2048.0f : 1.0f; }

static inline float ref_compensation(kopt_format f, uint32_t residual) {
    return ref_div(ref_float(ref_widen(f, residual & 0xffff)), ref_compensation_scale(f));
}

/* Mean squares are kept as their root in fp16, and never as zero. The largest of them is rounded to nearest. */
static inline int ref_rooted(const kopt_optimizer *o, int k) {
    return ref_format(o, k) == KOPT_FP16 && ref_square(o, k);
}

static inline float ref_load_moment(const kopt_optimizer *o, const ref_element *e, int k) {
    float x = ref_float(ref_widen(ref_format(o, k), e->moment[k]));
    return ref_rooted(o, k) ? ref_mul(x, x) : x;
}

static inline void ref_store_moment(const kopt_optimizer *o, ref_element *e, int k, float x, uint32_t r) {
    kopt_format f = ref_format(o, k);
    int nearest = f == KOPT_F32 || o->moment_rounding == KOPT_NEAREST || (o->rule == KOPT_RULE_ADAM && k == 2);
    if (ref_rooted(o, k)) x = ref_sqrt(x);
    e->moment[k] = ref_flush(f, nearest ? ref_narrow(f, ref_bits(x))
                                        : ref_stochastic(f, ref_bits(x), ref_number(r, (uint32_t)k + 1)));
    if (ref_rooted(o, k) && x > 0 && e->moment[k] == 0) e->moment[k] = 1;
}

static inline void ref_store_weight(const kopt_optimizer *o, kopt_format f, ref_element *e, float w, float update,
                                    uint32_t r) {
    kopt_rounding rounding = f == KOPT_F32 ? KOPT_NEAREST : o->rounding;
    int noisy = o->residual_rounding == KOPT_STOCHASTIC;
    float difference = ref_sub(w, update);
    uint32_t x = ref_bits(difference), stored, residual = 0, u;
    if (rounding == KOPT_NEAREST) {
        stored = ref_narrow(f, x);
    } else if (rounding == KOPT_STOCHASTIC || rounding == KOPT_FEEDBACK) {
        stored = ref_stochastic(f, x, r);
    } else if (rounding == KOPT_KAHAN) {
        float y = ref_sub(ref_compensation(f, e->residual), update), c;
        u = ref_bits(ref_add(w, y));
        stored = f == KOPT_BF16 ? (ref_extended(f, u) + 0x8000) >> 16 : ref_narrow(f, u); /* bf16: ties away */
        c = ref_add(ref_sub(w, ref_float(ref_widen(f, stored))), y);
        u = ref_bits(ref_mul(c, ref_compensation_scale(f)));
        residual = ref_flush(f, noisy ? ref_stochastic(f, u, r) : ref_narrow(f, u));
    } else if (rounding == KOPT_COMPACT) {
        u = (ref_extended(f, ref_flush(KOPT_F32, x)) + (noisy ? r >> 8 : 128)) >> 8;
        stored = (u + 128) >> 8;
        residual = u & 255;
    } else {
        u = ref_extended(f, ref_flush(KOPT_F32, x));
        stored = (u + 0x8000) >> 16;
        residual = u & 0xffff;
    }
    e->residual = ref_is_finite(f, stored) ? residual : 0;
    e->weight = ref_flush(f, stored);
}

/* The residual as COMPACT and EXACT add it to the word of the weight. */
static inline uint32_t ref_signed(const kopt_optimizer *o, uint32_t residual) {
    return o->rounding == KOPT_COMPACT ? (residual ^ 128) - 128 : (residual ^ 0x8000) - 0x8000;
}

/* What KAHAN keeps beside the weight; 0 otherwise. */
static inline float ref_rest(const kopt_optimizer *o, kopt_format f, uint32_t residual) {
    return f != KOPT_F32 && o->rounding == KOPT_KAHAN ? ref_compensation(f, residual) : 0;
}

/* The first moment m, less its share of the error of the new weight w - update: as it is, where that is no number of
   its format. unit: what m is divided by. */
static inline float ref_pay(const kopt_optimizer *o, kopt_format f, const ref_scalars *s, uint32_t r, float w,
                            float update, float m, float unit) {
    const uint32_t most = ref_format(o, 0) == KOPT_BF16 ? 0x7f7f0000 : 0x7f7fffff;
    const uint32_t word = ref_flush(f, ref_stochastic(f, ref_bits(ref_sub(w, update)), ref_number(r, 0)));
    const float error = ref_sub(ref_sub(w, ref_float(ref_widen(f, word))), update);
    const float paid = ref_sub(m, ref_mul(ref_mul(s->payment, error), unit));
    return (ref_bits(paid) & 0x7fffffff) <= most ? paid : m;
}

static inline float ref_mean(float beta, float one_minus_beta, float old, float x) {
    return ref_add(ref_mul(beta, old), ref_mul(one_minus_beta, x));
}

static inline float ref_mean_square(float beta, float one_minus_beta, float old, float x) {
    return ref_add(ref_mul(beta, old), ref_mul(ref_mul(one_minus_beta, x), x));
}

static inline void ref_step_element(const kopt_optimizer *o, kopt_format f, const ref_scalars *s,
                                    kopt_format grad_format, uint32_t r, ref_element *e) {
    float w = ref_weight(o, f, e->weight, ref_signed(o, e->residual)), update = 0, p[4] = {0, 0, 0, 0}, x, z;
    float rest = ref_rest(o, f, e->residual), unit = 1;
    float g = ref_mul(ref_float(ref_widen(grad_format, e->grad)), s->grad_scale);
    int k, moments = ref_moments(o);
    if (s->l2 > 0) g = ref_add(g, ref_mul(s->l2, w));
    for (k = 0; k < moments; ++k) p[k] = ref_load_moment(o, e, k);
    switch (o->rule) {
    case KOPT_RULE_SGD:
        if (moments) p[0] = ref_mean(s->beta1, s->one_minus_beta1, p[0], g);
        update = !moments ? g : o->nesterov ? ref_add(g, ref_mul(s->momentum, p[0])) : p[0];
        update = ref_mul(s->rate, update);
        break;
    case KOPT_RULE_EMA: update = ref_mul(s->rate, ref_add(ref_sub(w, g), rest)); break;
    case KOPT_RULE_LION:
        x = ref_mean(s->beta1, s->one_minus_beta1, p[0], g);
        k = (int)(ref_bits(x) & 0x7fffffff); /* by its bits: -Ofast knows no NaN */
        z = k > 0x7f800000 ? x : k == 0 ? 0 : ref_float(0x3f800000 | (ref_bits(x) & 0x80000000));
#ifdef KAHAN_OPT_VMATH
        if (s->sharpness > 0) z = ref_tanh(ref_mul(s->sharpness, x));
#endif
        update = ref_mul(s->rate, z);
        p[0] = ref_mean(s->beta2, s->one_minus_beta2, p[0], g);
        break;
    case KOPT_RULE_ADAM:
        p[0] = ref_mean(s->beta1, s->one_minus_beta1, p[0], g);
        p[1] = ref_mean_square(s->beta2, s->one_minus_beta2, p[1], g);
        x = ref_float(ref_bits(p[1]) & 0x7fffffff), z = ref_float(ref_bits(p[2]) & 0x7fffffff);
        if (moments == 3) p[2] = z > x || ref_is_nan(KOPT_F32, ref_bits(z)) ? z : x;
        x = ref_add(ref_mul(ref_sqrt(p[moments == 3 ? 2 : 1]), s->root_scale), s->eps);
        update = ref_mul(s->rate, ref_div(p[0], x)), unit = x;
        break;
    case KOPT_RULE_ADAN:
        x = s->first ? 0 : ref_sub(g, p[3]);
        p[0] = ref_mean(s->beta1, s->one_minus_beta1, p[0], g);
        p[1] = ref_mean_square(s->beta3, s->one_minus_beta3, p[1], ref_add(g, ref_mul(s->beta2, x)));
        p[2] = ref_mean(s->beta2, s->one_minus_beta2, p[2], x);
        p[3] = g;
        x = ref_add(ref_mul(ref_sqrt(p[1]), s->root_scale), s->eps);
        update = ref_mul(s->rate, ref_div(ref_add(p[0], ref_mul(s->third_scale, p[2])), x)), unit = x;
        break;
    case KOPT_RULE_ADAM_ATAN2:
#ifdef KAHAN_OPT_VMATH
        p[0] = ref_mean(s->beta1, s->one_minus_beta1, p[0], g);
        p[1] = ref_mean_square(s->beta2, s->one_minus_beta2, p[1], g);
        x = ref_add(ref_mul(ref_sqrt(p[1]), s->root_scale), s->eps);
        update = ref_mul(s->rate, ref_atan2(p[0], x));
#endif
        break;
    case KOPT_RULE_RADAM:
    case KOPT_RULE_RANGER:
        p[0] = ref_mean(s->beta1, s->one_minus_beta1, p[0], g);
        p[1] = ref_mean_square(s->beta2, s->one_minus_beta2, p[1], g);
        x = ref_add(ref_mul(ref_sqrt(p[1]), s->root_scale), s->eps);
        if (s->rectified) unit = x;
        update = ref_mul(s->rate, s->rectified ? ref_div(p[0], x) : p[0]);
        break;
    case KOPT_RULE_ADAMW: /* no rules: for kopt_optimizer_init() only */
    case KOPT_RULE_STABLE_ADAMW:
    case KOPT_RULE_SMOOTH_LION: break;
    }
    if (s->decay > 0) update = ref_add(update, ref_mul(s->decay, w));
    if (s->lookahead) {
        z = ref_weight(o, f, e->slow, ref_signed(o, e->slow_residual));
        x = ref_add(ref_sub(w, z), ref_sub(rest, ref_rest(o, f, e->slow_residual)));
        update = ref_add(update, ref_mul(s->back, ref_sub(x, update)));
    }
    if (ref_pays(o, f)) p[0] = ref_pay(o, f, s, r, w, update, p[0], unit);
    for (k = 0; k < moments; ++k) {
        if (s->coded >> k & 1)
            e->moment[k] = ref_bits(p[k]);
        else
            ref_store_moment(o, e, k, p[k], r);
    }
    if (!o->moments_only) ref_store_weight(o, f, e, w, update, ref_number(r, 0));
    if (s->lookahead && !o->moments_only) e->slow = e->weight, e->slow_residual = e->residual;
    if (o->zero_grad) e->grad = 0;
}

/* ---- Writing and reading state (section 8b) --------------------------------------------------------------------- */

/* To nearest even with one NaN. */
static inline uint32_t ref_narrow_canonical(kopt_format f, float x) {
    uint32_t u = ref_narrow(f, ref_bits(x));
    return f != KOPT_F32 && ref_is_nan(f, u) ? u & 0x7fff : u;
}

static inline void ref_write_weight(const kopt_optimizer *o, kopt_format f, float x, ref_element *e) {
    uint32_t u = f == KOPT_F32 ? 0 : ref_extended(f, ref_bits(x));
    e->weight = ref_narrow_canonical(f, x), e->residual = 0;
    if (!ref_carries(o, f)) return;
    if (o->rounding == KOPT_KAHAN) {
        float rest;
        if (f == KOPT_BF16) e->weight = (u + 0x8000) >> 16;
        rest = ref_mul(ref_sub(x, ref_float(ref_widen(f, e->weight))), ref_compensation_scale(f));
        e->residual = ref_narrow_canonical(f, rest);
    } else {
        if (o->rounding == KOPT_COMPACT) u = (u + 0x80) & 0xffffff00;
        e->weight = (u + 0x8000) >> 16;
        e->residual = o->rounding == KOPT_COMPACT ? u >> 8 & 0xff : u & 0xffff;
    }
    if (!ref_is_finite(f, e->weight)) e->residual = 0;
}

static inline float ref_read_weight(const kopt_optimizer *o, kopt_format f, const ref_element *e) {
    float w = ref_weight(o, f, e->weight, ref_signed(o, e->residual));
    return f == KOPT_F32 || o->rounding != KOPT_KAHAN ? w : ref_add(w, ref_rest(o, f, e->residual));
}

/* Moment k of 16 or 32 bits. */
static inline uint32_t ref_write_moment(const kopt_optimizer *o, int k, float x) {
    uint32_t u = ref_narrow_canonical(ref_format(o, k), ref_rooted(o, k) ? ref_sqrt(x) : x);
    if (!ref_rooted(o, k)) return u;
    return ref_bits(x) << 1 == 0 ? 0 : u == 0 ? 1 : u; /* a root has no sign, and only that of 0 is 0 */
}

static inline float ref_read_moment(const kopt_optimizer *o, int k, uint32_t word) {
    ref_element e;
    e.moment[k] = word;
    return ref_load_moment(o, &e, k);
}

/* ---- 8-bit codes (section 6b) ------------------------------------------------------------------------------------ */

/* The number a code stands for, over the scale: signed, or the root of a mean of squares. A root has 32 codes in each
   of the upper four binades below the scale, then 8. A number below 2 has 16 in each of four, then 8, 4, 2 and 1 in
   each of four; codes 1 to 4 are multiples of 2^-21. */
static inline float ref_code(int code, int square) {
    const int k = square ? code < 127 ? code + 1 : code - 127 : code & 127;
    double x;
    if (square) {
        x = code == 0 ? 0 : code < 127 ? ldexp(8 + k % 8, k / 8 - 23) : ldexp(32 + k % 32, k / 32 - 9);
    } else {
        int first = 4, codes = 1, exponent = -19;
        while (k >= first + 4 * codes) first += 4 * codes, codes *= 2, exponent += 4;
        x = k < 4 ? ldexp(k, -21) : ldexp(codes + (k - first) % codes, exponent + (k - first) / codes) / codes;
    }
    return (float)(!square && code > 127 ? -x : x);
}

/* The word of a scale: a power of two, whose exponent is stored. */
static inline uint32_t ref_scale_word(int exponent) { return exponent == 255 ? 0x7fc00000 : (uint32_t)exponent << 23; }

/* The moment, or the compressed number. */
static inline float ref_decoded(int code, int exponent, int square) {
    const float x = ref_mul(ref_code(code, square), ref_float(ref_scale_word(exponent)));
    return square ? ref_mul(x, x) : x;
}

/* The exponent of the scale, of the largest magnitude of a block: a root is at most the scale and above half of it, a
   number at most 31/16 of it and above 31/32. */
static inline int ref_scale(uint32_t largest, int square) {
    const int field = (int)(largest >> 23);
    const uint32_t fraction = largest & 0x7fffff;
    if (!ref_is_finite(KOPT_F32, largest)) return 255;
    if (square) return field + (fraction != 0);
    return field + (fraction > 0x780000) > 254 ? 254 : field + (fraction > 0x780000);
}

/* The code of x: its place between the values of two codes in units of 2^-16 of a gap, and r on top. The place of a
   root is rounded with ties up; that of a number from code 4 on loses two bits of the fraction of x with ties up, and
   is then rounded with ties to even. */
static inline int ref_encode(float x, int exponent, int square, uint32_t r) {
    const uint32_t word = square ? ref_bits(ref_sqrt(x)) : ref_bits(x) & 0x7fffffff;
    double y = ldexp((double)ref_float(word), 127 - exponent), at, gap, place, lost;
    int low = 0, high = square ? 256 : 128, binade;
    if (word << 1 == 0) return square ? 0 : (int)(ref_bits(x) >> 31) * 128;
    if (!square && y > 1.9375) y = 1.9375;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if ((double)ref_code(middle, square) <= y)
            low = middle;
        else
            high = middle;
    }
    if (square && low == 0) low = 1, y = (double)ref_code(1, 1); /* what is not 0 does not become 0 */
    at = (double)ref_code(low, square);
    gap = low < (square ? 255 : 127) ? (double)ref_code(low + 1, square) - at : square ? 1 : 0.0625;
    place = (low + (y - at) / gap) * 65536;
    if (square) {
        place = floor(place + 0.5);
    } else {
        frexp(y, &binade);
        lost = ldexp(4, binade - 24) / gap * 65536;
        if (low >= 4) place = floor(place / lost + 0.5) * lost;
        lost = place - floor(place);
        place = floor(place) + (lost > 0.5 || (lost >= 0.5 && fmod(floor(place), 2) > 0));
    }
    low = (int)(((uint32_t)place + r) >> 16);
    return square ? low : low + (int)(ref_bits(x) >> 31) * 128;
}

/* The codes of n numbers of one block, and its scale. */
static inline void ref_quantise(unsigned char *code, unsigned char *scale, const uint32_t *x, size_t n, int square,
                                int noisy, const uint32_t *r) {
    uint32_t largest = 0;
    size_t i;
    for (i = 0; i < n; ++i) {
        const uint32_t size = (square ? ref_bits(ref_sqrt(ref_float(x[i]))) : x[i]) & 0x7fffffff;
        if (size > largest) largest = size;
    }
    *scale = (unsigned char)ref_scale(largest, square);
    for (i = 0; i < n; ++i)
        code[i] = (unsigned char)(*scale == 0 || *scale == 255
                                      ? 0
                                      : ref_encode(ref_float(x[i]), *scale, square, noisy ? r[i] : 0x8000));
}

/* ---- Compressed gradients and reductions (sections 12 and 13) --------------------------------------------------- */

static inline uint32_t ref_canonical(kopt_format f, uint32_t u) {
    return !ref_is_nan(f, u) ? u : f == KOPT_F32 ? 0x7fc00000 : f == KOPT_BF16 ? 0x7fc0 : 0x7e00;
}

static inline size_t ref_code_size(kopt_format code, size_t n) {
    size_t size = 0, i;
    for (i = 0; i < n; ++i) {
        if (code == KOPT_BF16 || code == KOPT_FP16) size += 2;
        if (code == KOPT_Q8 && i % 64 == 0) size += 1;
        if (code == KOPT_Q1 && i % 256 == 0) size += 4;
        if (code == KOPT_Q8 || (code == KOPT_Q1 && i % 8 == 0)) size += 1;
    }
    return size;
}

static inline float ref_decode(const unsigned char *in, kopt_format code, size_t i) {
    const unsigned char *block = in + i / 256 * 36;
    uint32_t scale;
    if (code == KOPT_BF16 || code == KOPT_FP16) return ref_float(ref_widen(code, ref_get(in, 2, i)));
    if (code == KOPT_Q8) return ref_decoded(in[i / 64 * 65 + 1 + i % 64], in[i / 64 * 65], 0);
    scale = block[0] | (uint32_t)block[1] << 8 | (uint32_t)block[2] << 16 | (uint32_t)block[3] << 24;
    return ref_float(block[4 + i % 256 / 8] >> i % 8 & 1 ? scale ^ 0x80000000u : scale);
}

/* A block of KOPT_Q1: its scale and n / 8 bytes. */
static inline void ref_signs(unsigned char *out, uint32_t *scale, const uint32_t *x, size_t n, int noisy,
                             const uint32_t *r) {
    float largest = 0, mean = 0;
    int finite = 1;
    size_t i;
    for (i = 0; i < n; ++i) {
        const float size = ref_float(x[i] & 0x7fffffff);
        finite &= ref_is_finite(KOPT_F32, x[i]);
        if (finite && size > largest) largest = size;
        if (finite) mean = ref_add(mean, ref_mul(size, 0.00390625f));
    }
    if (n < 256) mean = ref_mul(mean, ref_div(256, (float)n));
    *scale = ref_flush(KOPT_F32, ref_bits(noisy ? largest : mean));
    if (!finite || !ref_is_finite(KOPT_F32, *scale)) *scale = 0x7fc00000;
    memset(out, 0, (n + 7) / 8);
    for (i = 0; i < n && *scale != 0 && *scale != 0x7fc00000; ++i) {
        unsigned negative = x[i] >> 31;
        if (noisy) { /* + with probability (x / largest + 1) / 2: of 65536 draws so many, rounded */
            const float y = ref_mul(ref_add(ref_div(ref_float(x[i]), ref_float(*scale)), 1), 32768);
            negative = !((double)y > (double)r[i] + 0.5);
        }
        out[i / 8] = (unsigned char)(out[i / 8] | negative << i % 8);
    }
}

/* Call number c->step: what kopt_compress() leaves in out and in the residual. */
static inline void ref_compress(const kopt_compressor *c, unsigned char *out, const void *grad,
                                kopt_format grad_format) {
    const size_t width = ref_width(c->residual_format);
    const int noisy = c->rounding == KOPT_STOCHASTIC;
    size_t at, i, n;
    for (at = 0; at < c->n; at += n) {
        uint32_t x[256], r[256], rest, scale = 0;
        unsigned char *to = out + ref_code_size(c->code, at);
        n = c->code == KOPT_Q8 ? 64 : 256;
        if (c->n - at < n) n = c->n - at;
        for (i = 0; i < n; ++i) {
            x[i] = ref_widen(grad_format, ref_get(grad, ref_width(grad_format), at + i));
            if (c->residual && c->step > 1) {
                rest = ref_widen(c->residual_format, ref_get(c->residual, width, at + i));
                x[i] = ref_bits(ref_add(ref_float(x[i]), ref_float(rest)));
            }
            x[i] = ref_canonical(KOPT_F32, x[i]);
            r[i] = ref_number(ref_random(c->seed, c->step, c->id, 3, c->first_index + at + i), 0);
            if (c->code == KOPT_BF16 || c->code == KOPT_FP16)
                ref_set(
                    to, 2, i,
                    ref_canonical(c->code, noisy ? ref_stochastic(c->code, x[i], r[i]) : ref_narrow(c->code, x[i])));
        }
        if (c->code == KOPT_Q8) ref_quantise(to + 1, to, x, n, 0, noisy, r);
        if (c->code == KOPT_Q1) ref_signs(to + 4, &scale, x, n, noisy, r);
        for (i = 0; i < 4 && c->code == KOPT_Q1; ++i) to[i] = (unsigned char)(scale >> 8 * i);
        for (i = 0; i < n && c->residual; ++i) {
            rest = ref_bits(ref_sub(ref_float(x[i]), ref_decode(out, c->code, at + i)));
            if (!ref_is_finite(c->residual_format, ref_narrow(c->residual_format, rest))) rest = 0;
            r[i] = ref_number(ref_random(c->seed, c->step, c->id, 4, c->first_index + at + i), 0);
            if (c->residual_format != KOPT_F32)
                rest = c->residual_rounding == KOPT_STOCHASTIC ? ref_stochastic(c->residual_format, rest, r[i])
                                                               : ref_narrow(c->residual_format, rest);
            ref_set(c->residual, width, at + i, rest);
        }
    }
}

/* The word of sum + decoded * scale. */
static inline uint32_t ref_decompress_add(kopt_format format, uint32_t sum, float decoded, double scale) {
    const float factor = (float)scale;
    if (ref_bits(factor) != 0x3f800000) decoded = ref_mul(decoded, factor);
    sum = ref_bits(ref_add(ref_float(ref_widen(format, sum)), decoded));
    return ref_canonical(format, ref_narrow(format, sum));
}

/* The word of element i of a reduction. */
static inline uint32_t ref_reduce(kopt_format out, const void *const *shards, size_t count, kopt_format format,
                                  size_t i, double scale) {
    const float factor = (float)scale;
    float sum = 0;
    size_t k;
    for (k = 0; k < count; ++k) {
        const float x = ref_float(ref_widen(format, ref_get(shards[k], ref_width(format), i)));
        sum = k == 0 ? x : ref_add(sum, x);
    }
    if (ref_bits(factor) != 0x3f800000) sum = ref_mul(sum, factor);
    return ref_canonical(out, ref_narrow(out, ref_bits(sum)));
}

/* 0 is the default. */
static inline float ref_rate_scale(const kopt_tensor *t) { return t->rate_scale > 0 ? (float)t->rate_scale : 1; }

/* StableAdamW: 1 / max(1, RMS of g / max(root of the new v, eps)). The sum of squares is added in 2^-200 as integers of
   32 bits, exactly as long as no ratio is below 2^-76. */
static inline float ref_stable_scale(const kopt_optimizer *o, const kopt_tensor *t, const ref_scalars *s) {
    const kopt_format f = t->weight_format;
    ref_layout l = ref_layout_of(o, f, t->n);
    const unsigned char *state = (const unsigned char *)t->state;
    uint64_t digit[16] = {0};
    volatile double sum = 0, x;
    size_t i;
    int k;
    for (i = 0; i < t->n; ++i) {
        uint32_t code, residual = l.residual_width ? ref_get(state + l.residual, l.residual_width, i) : 0;
        float g = ref_mul(ref_float(ref_widen(t->grad_format, ref_get(t->grad, ref_width(t->grad_format), i))),
                          s->grad_scale);
        float w = ref_weight(o, f, ref_get(t->weight, ref_width(f), i), ref_signed(o, residual)), v, root;
        uint64_t m;
        int e;
        if (s->l2 > 0) g = ref_add(g, ref_mul(s->l2, w));
        code = ref_get(state + l.moment[1], l.moment_width[1], i);
        if (ref_format(o, 1) == KOPT_Q8)
            v = ref_decoded((int)code, state[l.scale[1] + i / 64], 1);
        else
            v = ref_float(ref_widen(ref_format(o, 1), code));
        if (ref_format(o, 1) == KOPT_FP16) v = ref_mul(v, v);
        root = ref_mul(ref_sqrt(ref_mean_square(s->beta2, s->one_minus_beta2, v, g)), s->root_scale);
        g = ref_div(g, root > s->eps || ref_is_nan(KOPT_F32, ref_bits(root)) ? root : s->eps);
        if (!ref_is_finite(KOPT_F32, ref_bits(g))) return 1;
        m = ref_bits(g) & 0x7fffffff, e = (int)(m >> 23);
        if (e < 50) continue; /* below 2^-77: its square changes no bit of a sum near 1 */
        m = (m & 0x7fffff) | 0x800000, m *= m;
        e = 2 * (e - 150) + 200; /* m * 2^(e - 200) */
        digit[e / 32] += m << e % 32 & 0xffffffff;
        digit[e / 32 + 1] += m << e % 32 >> 32 & 0xffffffff;
        digit[e / 32 + 2] += e % 32 ? m >> (64 - e % 32) : 0;
    }
    for (k = 0; k < 15; ++k) digit[k + 1] += digit[k] >> 32, digit[k] &= 0xffffffff;
    for (k = 15; k >= 0; --k) sum = sum + ldexp((double)digit[k], 32 * k - 200);
    x = sqrt(sum);
    x = x * ref_root(1 / (double)t->n);
    return x > 1 ? (float)(1 / x) : 1;
}

static inline void ref_step_elements(const kopt_optimizer *o, const kopt_tensor *t, const ref_scalars *s) {
    const kopt_format f = t->weight_format;
    ref_layout l = ref_layout_of(o, f, t->n);
    size_t i, weight_width = ref_width(f), grad_width = ref_width(t->grad_format);
    unsigned char *state = (unsigned char *)t->state;
    for (i = 0; i < t->n; ++i) {
        ref_element e;
        int k;
        e.weight = ref_get(t->weight, weight_width, i);
        e.grad = ref_get(t->grad, grad_width, i);
        e.residual = l.residual_width ? ref_get(state + l.residual, l.residual_width, i) : 0;
        for (k = 0; k < 4; ++k)
            e.moment[k] = l.moment_width[k] ? ref_get(state + l.moment[k], l.moment_width[k], i) : 0;
        e.slow = l.slow_width ? ref_get(state + l.slow, l.slow_width, i) : 0;
        e.slow_residual = l.slow_residual_width ? ref_get(state + l.slow_residual, l.slow_residual_width, i) : 0;
        ref_step_element(o, f, s, t->grad_format, ref_random(o->seed, o->step + 1, t->id, 0, t->first_index + i), &e);
        ref_set(t->weight, weight_width, i, e.weight);
        ref_set(t->grad, grad_width, i, e.grad);
        if (l.residual_width) ref_set(state + l.residual, l.residual_width, i, e.residual);
        for (k = 0; k < 4; ++k)
            if (l.moment_width[k]) ref_set(state + l.moment[k], l.moment_width[k], i, e.moment[k]);
        if (l.slow_width) ref_set(state + l.slow, l.slow_width, i, e.slow);
        if (l.slow_residual_width) ref_set(state + l.slow_residual, l.slow_residual_width, i, e.slow_residual);
        if (t->copy && !o->moments_only)
            ref_set(t->copy, ref_width(t->copy_format), i, ref_narrow(t->copy_format, ref_widen(f, e.weight)));
    }
}

/* With 8-bit moments: each block is decoded, stepped with fp32 in their place as a tensor of its own, and encoded. */
static inline void ref_step_blocks(const kopt_optimizer *o, const kopt_tensor *t, const ref_scalars *s) {
    const kopt_format f = t->weight_format;
    static unsigned char state[64 + 24 * 64 + 64];
    kopt_optimizer fp32 = *o;
    ref_layout l = ref_layout_of(o, f, t->n), b;
    unsigned char *whole = (unsigned char *)t->state;
    uint32_t x[64], r[64];
    size_t at, i, n, slow;
    int k;
    if (o->first_moment_format == KOPT_Q8) fp32.first_moment_format = KOPT_F32;
    if (o->second_moment_format == KOPT_Q8) fp32.second_moment_format = KOPT_F32;
    for (at = 0; at < t->n; at += 64) {
        kopt_tensor block = *t;
        n = block.n = t->n - at < 64 ? t->n - at : 64;
        b = ref_layout_of(&fp32, f, n);
        block.weight = (unsigned char *)t->weight + at * ref_width(f);
        block.grad = (unsigned char *)t->grad + at * ref_width(t->grad_format);
        if (t->copy) block.copy = (unsigned char *)t->copy + at * ref_width(t->copy_format);
        block.first_index = t->first_index + at;
        block.state = state;
        slow = o->rule == KOPT_RULE_RANGER;
        memcpy(state + b.residual, whole + l.residual + at * l.residual_width, n * l.residual_width);
        memcpy(state + b.slow, whole + l.slow + slow * at * l.slow_width, n * l.slow_width);
        memcpy(state + b.slow_residual, whole + l.slow_residual + slow * at * l.slow_residual_width,
               n * l.slow_residual_width);
        for (k = 0; k < ref_moments(o); ++k) {
            const int scale = s->coded >> k & 1 ? whole[l.scale[k] + at / 64] : 0;
            if (!(s->coded >> k & 1))
                memcpy(state + b.moment[k], whole + l.moment[k] + at * l.moment_width[k], n * l.moment_width[k]);
            for (i = 0; i < n && s->coded >> k & 1; ++i)
                ref_set(state + b.moment[k], 4, i,
                        ref_bits(ref_decoded(whole[l.moment[k] + at + i], scale, ref_square(o, k))));
        }
        ref_step_elements(&fp32, &block, s);
        memcpy(whole + l.residual + at * l.residual_width, state + b.residual, n * l.residual_width);
        memcpy(whole + l.slow + slow * at * l.slow_width, state + b.slow, n * l.slow_width);
        memcpy(whole + l.slow_residual + slow * at * l.slow_residual_width, state + b.slow_residual,
               n * l.slow_residual_width);
        for (k = 0; k < ref_moments(o); ++k) {
            if (!(s->coded >> k & 1)) {
                memcpy(whole + l.moment[k] + at * l.moment_width[k], state + b.moment[k], n * l.moment_width[k]);
                continue;
            }
            for (i = 0; i < n; ++i) {
                x[i] = ref_get(state + b.moment[k], 4, i);
                r[i] = ref_number(ref_random(o->seed, o->step + 1, t->id, 0, block.first_index + i), (uint32_t)k + 1);
            }
            ref_quantise(whole + l.moment[k] + at, whole + l.scale[k] + at / 64, x, n, ref_square(o, k),
                         o->moment_rounding == KOPT_STOCHASTIC && !(k == 2 && o->rule == KOPT_RULE_ADAM), r);
        }
    }
}

/* FEEDBACK, whose state has two places of a step and the rate in it. A step reads the later one of those before it, and
   writes its own into the other one. Where the rate rises, what the first moment owes shrinks in proportion. */
static inline void ref_guard(const kopt_optimizer *o, const kopt_tensor *t, ref_scalars *s) {
    unsigned char *const places = (unsigned char *)t->state + 32;
    const double b = o->rule == KOPT_RULE_SGD ? o->momentum : o->beta1;
    const float rate = ref_mul(s->rate, ref_rate_scale(t));
    const uint32_t step = o->step + 1, first = ref_get(places, 4, 0), second = ref_get(places, 4, 2);
    const int newer = second < step && (first >= step || second > first);
    const uint32_t then = newer ? second : first;
    const uint32_t last = then > 0 && then < step ? ref_get(places, 4, newer ? 3 : 1) : 0;
    float share = ref_div(ref_one_minus(b), (float)b);
    if (o->rule == KOPT_RULE_SGD && o->nesterov) share = ref_div(share, s->momentum);
    if (rate > 0) {
        if (ref_bits(rate) > last) s->beta1 = ref_mul(s->beta1, ref_div(ref_float(last), rate));
        ref_set(places, 4, newer ? 0 : 2, step), ref_set(places, 4, newer ? 1 : 3, ref_bits(rate));
    }
    share = rate > 0 ? ref_div(share, rate) : 0;
    if (o->moments_only || (o->rule == KOPT_RULE_RADAM && !s->rectified)) share = 0;
    s->payment = ref_is_finite(KOPT_F32, ref_bits(share)) ? share : 0;
}

/* Step number opt->step + 1 on a whole tensor, in place. */
static inline void ref_step_tensor(const kopt_optimizer *o, const kopt_tensor *t) {
    kopt_optimizer decayed = *o;
    ref_scalars s;
    float scale = ref_rate_scale(t);
    if (t->no_decay) decayed.weight_decay = 0;
    s = ref_scalars_of(&decayed, o->step + 1);
    if (ref_pays(o, t->weight_format) && t->n > 0) ref_guard(o, t, &s);
    if (o->rule == KOPT_RULE_ADAM && o->stable && t->stable_scale > 0)
        scale = ref_mul(scale, (float)t->stable_scale);
    else if (o->rule == KOPT_RULE_ADAM && o->stable && !o->moments_only)
        scale = ref_mul(scale, ref_stable_scale(o, t, &s));
    if (scale < 1 || scale > 1) {
        s.rate = ref_mul(s.rate, scale);
        s.decay = ref_mul(s.decay, scale);
    }
    if (s.coded)
        ref_step_blocks(o, t, &s);
    else
        ref_step_elements(o, t, &s);
}

#if defined(__wasm__)
#elif defined(__clang__)
#pragma float_control(pop)
#elif defined(__GNUC__)
#pragma GCC pop_options
#endif

#endif
