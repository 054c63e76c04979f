/* reference.h - docs/numerics.md once more, for the tests to hold the implementation against. Rounding is integer
   arithmetic, every float operation goes through a volatile so that no compiler fuses or reorders it, and nothing here
   calls the code under test: of kahan_opt.h only types and enum values are used. */
#ifndef REFERENCE_H
#define REFERENCE_H

#include <math.h>
#include <string.h>

/* ---- Words and single operations -------------------------------------------------------------------------------- */

static inline uint32_t ref_bits(float x)
{
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

static inline float ref_float(uint32_t u)
{
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

static inline float ref_add(float a, float b) { volatile float x = a + b; return x; }
static inline float ref_sub(float a, float b) { volatile float x = a - b; return x; }
static inline float ref_mul(float a, float b) { volatile float x = a * b; return x; }
static inline float ref_div(float a, float b) { volatile float x = a / b; return x; }
static inline float ref_sqrt(float a) { volatile float x = sqrtf(a); return x; }

static inline size_t ref_width(kopt_format f) { return f == KOPT_F32 ? 4 : 2; }

static inline uint32_t ref_get(const void *array, size_t width, size_t i)
{
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

static inline void ref_set(void *array, size_t width, size_t i, uint32_t u)
{
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

static inline int ref_is_nan(kopt_format f, uint32_t u)
{
    return f == KOPT_F32 ? (u << 1) > 0xff000000u : (u & 0x7fff) > (f == KOPT_BF16 ? 0x7f80u : 0x7c00u);
}

static inline int ref_is_finite(kopt_format f, uint32_t u)
{
    return f == KOPT_F32 ? (u << 1) < 0xff000000u : (u & 0x7fff) < (f == KOPT_BF16 ? 0x7f80u : 0x7c00u);
}

/* m / 2^shift, to nearest, ties to even; m < 2^24. */
static inline uint32_t ref_shift(uint32_t m, uint32_t shift)
{
    uint32_t whole, rest, half;
    if (shift == 0) return m;
    if (shift > 25) return 0;
    whole = m >> shift, rest = m & ((1u << shift) - 1), half = 1u << (shift - 1);
    return whole + (rest > half || (rest == half && (whole & 1)));
}

/* The significand of a finite fp32 and the weight of its last bit: |x| = significand * 2^(exponent - 150). */
static inline uint32_t ref_significand(uint32_t u, uint32_t *exponent)
{
    uint32_t e = u >> 23 & 255;
    *exponent = e ? e : 1;
    return (u & 0x7fffff) | (e ? 0x800000u : 0);
}

/* fp32 word to the word of another format, to nearest even. */
static inline uint32_t ref_narrow(kopt_format f, uint32_t u)
{
    uint32_t sign = u >> 16 & 0x8000, mag = u & 0x7fffffff, exponent, m;
    if (f == KOPT_F32) return u;
    if (mag > 0x7f800000) return sign | (f == KOPT_BF16 ? 0x7fc0u : 0x7e00u);
    if (f == KOPT_BF16) return sign | ((mag + 0x7fff + (mag >> 16 & 1)) >> 16);
    if (mag >= 0x477ff000) return sign | 0x7c00;
    if (mag >= 0x38800000) return sign | ((mag - 0x38000000 + 0xfff + (mag >> 13 & 1)) >> 13);
    m = ref_significand(mag, &exponent);
    return sign | ref_shift(m, 126 - exponent);
}

static inline uint32_t ref_widen(kopt_format f, uint32_t h)
{
    uint32_t sign = (h & 0x8000) << 16, exponent = h >> 10 & 31, m = h & 0x3ff;
    if (f == KOPT_F32) return h;
    if (f == KOPT_BF16) return h << 16;
    if (exponent == 31) return sign | 0x7f800000 | m << 13;
    if (exponent) return sign | (exponent + 112) << 23 | m << 13;
    if (!m) return sign;
    for (exponent = 113; !(m & 0x400); --exponent) m <<= 1;
    return sign | exponent << 23 | (m & 0x3ff) << 13;
}

static inline uint32_t ref_extended(kopt_format f, uint32_t u)
{
    uint32_t sign = u & 0x80000000u, mag = u & 0x7fffffff, exponent, m;
    if (mag > 0x7f800000) return f == KOPT_BF16 ? 0x7fc00000 : 0x7e000000;
    if (f == KOPT_BF16) return u;
    if (mag >= 0x47800000) return sign | 0x7c000000;
    if (mag >= 0x38800000) return sign | (mag - 0x38000000) << 3;
    m = ref_significand(mag, &exponent);
    return sign | (exponent >= 110 ? m << (exponent - 110) : ref_shift(m, 110 - exponent));
}

static inline uint32_t ref_from_extended(kopt_format f, uint32_t u)
{
    uint32_t sign = u & 0x80000000u, mag = u & 0x7fffffff;
    if (f == KOPT_BF16) return u;
    if (mag > 0x7c000000) return 0x7fc00000;
    if (mag == 0x7c000000) return sign | 0x7f800000;
    if (mag >= 0x04000000) return sign | ((mag >> 3) + 0x38000000);
    return sign | ref_bits(ref_mul((float)mag, ref_float(0x2b800000))); /* 2^-40 */
}

/* fp32 word to 16 bits with the random number r; subnormals and the canonical NaN as they come. */
static inline uint32_t ref_stochastic(kopt_format f, uint32_t x, uint32_t r)
{
    uint32_t u = ref_extended(f, x), last = f == KOPT_BF16 ? 0x7f7f0000 : 0x7bff0000;
    return (u + ((u & 0x7fffffff) >= last ? 0x8000 : r)) >> 16;
}

/* What a step does to a finished result of format f. */
static inline uint32_t ref_flush(kopt_format f, uint32_t u)
{
    if (ref_is_nan(f, u)) return f == KOPT_F32 ? 0x7fc00000 : f == KOPT_BF16 ? 0x7fc0 : 0x7e00;
    if (f == KOPT_F32 && !(u & 0x7f800000)) return 0;
    if (f == KOPT_BF16 && !(u & 0x7f80)) return 0;
    return u;
}

/* ---- Random numbers (section 7) --------------------------------------------------------------------------------- */

static inline void ref_philox(int rounds, const uint32_t counter[4], const uint32_t key[2], uint32_t out[4])
{
    uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3], k0 = key[0], k1 = key[1];
    for (; rounds > 0; --rounds, k0 += 0x9e3779b9, k1 += 0xbb67ae85) {
        uint64_t p0 = (uint64_t)0xd2511f53 * c0, p1 = (uint64_t)0xcd9e8d57 * c2;
        c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0, c1 = (uint32_t)p1;
        c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1, c3 = (uint32_t)p0;
    }
    out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
}

static inline uint32_t ref_random(uint64_t seed, uint32_t step, uint32_t id, uint32_t stream, uint64_t e)
{
    uint64_t block = e / 256 * 16 + e % 128 / 8;
    uint32_t key[2], counter[4], out[4], word;
    key[0] = (uint32_t)seed, key[1] = (uint32_t)(seed >> 32);
    counter[0] = (uint32_t)block, counter[1] = (uint32_t)(block >> 32) + (stream << 28);
    counter[2] = step, counter[3] = id;
    ref_philox(7, counter, key, out);
    word = out[e / 2 % 4];
    if (e % 256 >= 128) word ^= out[0] ^ out[1] ^ out[2] ^ out[3];
    return word >> (e & 1 ? 16 : 0) & 0xffff;
}

/* ---- The step (sections 3 to 6) --------------------------------------------------------------------------------- */

/* Where the arrays of a state block lie (0 bytes wide: absent). */
typedef struct ref_layout {
    size_t residual_width, first_width, second_width, residual, first, second, size;
} ref_layout;

static inline ref_layout ref_layout_of(const kopt_optimizer *o, size_t n)
{
    ref_layout l;
    int carries = o->weight_format != KOPT_F32 && o->rounding >= KOPT_KAHAN;
    size_t moment = ref_width(o->moment_format);
    l.residual_width = !carries ? 0 : o->rounding == KOPT_COMPACT ? 1 : 2;
    l.first_width = o->rule == KOPT_ADAM || o->momentum > 0 ? moment : 0;
    l.second_width = o->rule == KOPT_ADAM ? moment : 0;
    l.residual = 64;
    l.first = l.residual + (n * l.residual_width + 3) / 4 * 4;
    l.second = l.first + (n * l.first_width + 3) / 4 * 4;
    l.size = l.second + (n * l.second_width + 3) / 4 * 4;
    if (!l.residual_width && !l.first_width) l.size = 0;
    return l;
}

/* The per-step scalars of step number t, each rounded once from binary64. */
typedef struct ref_scalars {
    float grad_scale, l2, decay, beta1, one_minus_beta1, beta2, one_minus_beta2, momentum, rate, root_scale, eps;
} ref_scalars;

static inline double ref_power(double base, uint32_t t)
{
    volatile double p = 1, b = base;
    for (; t; t >>= 1, b = b * b)
        if (t & 1) p = p * b;
    return p;
}

static inline double ref_root(double a)
{
    volatile double x = 1, y = (1 + a) / 2;
    while (y < x) x = y, y = (x + a / x) / 2;
    return x;
}

static inline ref_scalars ref_scalars_of(const kopt_optimizer *o, uint32_t t)
{
    ref_scalars s = {0, 0, 0, 0, 1, 0, 1, 0, 0, 1, 0};
    volatile double scale = o->grad_scale * o->clip, step_rate = o->decay == KOPT_DECOUPLED ? o->lr : o->lr / o->max_lr;
    s.grad_scale = (float)(o->maximize ? -scale : scale);
    if (o->decay == KOPT_L2)
        s.l2 = (float)o->weight_decay;
    else
        s.decay = (float)(step_rate * o->weight_decay);
    s.rate = (float)o->lr;
    if (o->rule == KOPT_SGD) {
        s.momentum = (float)o->momentum;
        if (t > 1) s.beta1 = s.momentum, s.one_minus_beta1 = (float)(1 - o->dampening);
    } else {
        s.beta1 = (float)o->beta1, s.one_minus_beta1 = (float)(1 - o->beta1);
        s.beta2 = (float)o->beta2, s.one_minus_beta2 = (float)(1 - o->beta2);
        s.rate = (float)(o->lr / (1 - ref_power(o->beta1, t)));
        s.root_scale = (float)(1 / ref_root(1 - ref_power(o->beta2, t)));
        s.eps = (float)o->eps;
    }
    return s;
}

/* One element: the words of its formats, before and after. */
typedef struct ref_element { uint32_t weight, residual, first, second, grad; } ref_element;

/* The weight with what COMPACT and EXACT remember of it; residual is sign-extended. */
static inline float ref_weight(const kopt_optimizer *o, uint32_t weight, uint32_t residual)
{
    kopt_format f = o->weight_format;
    if (f != KOPT_F32 && o->rounding == KOPT_COMPACT)
        return ref_float(ref_from_extended(f, (weight << 16) + (residual << 8)));
    if (f != KOPT_F32 && o->rounding == KOPT_EXACT) return ref_float(ref_from_extended(f, (weight << 16) + residual));
    return ref_float(ref_widen(f, weight));
}

/* 2^11 for the compensation of fp16 weights, 1 for bf16. */
static inline float ref_compensation_scale(const kopt_optimizer *o)
{
    return o->weight_format == KOPT_FP16 ? 2048.0f : 1.0f;
}

static inline float ref_compensation(const kopt_optimizer *o, uint32_t residual)
{
    return ref_div(ref_float(ref_widen(o->weight_format, residual & 0xffff)), ref_compensation_scale(o));
}

static inline uint32_t ref_store_moment(const kopt_optimizer *o, float x, uint32_t r)
{
    kopt_format f = o->moment_format;
    if (f == KOPT_F32 || o->moment_rounding == KOPT_NEAREST) return ref_flush(f, ref_narrow(f, ref_bits(x)));
    return ref_flush(f, ref_stochastic(f, ref_bits(x), r));
}

static inline void ref_store_weight(const kopt_optimizer *o, ref_element *e, float w, float update, uint32_t r)
{
    kopt_format f = o->weight_format;
    kopt_rounding rounding = f == KOPT_F32 ? KOPT_NEAREST : o->rounding;
    int noisy = o->compensation_rounding == KOPT_STOCHASTIC;
    float difference = ref_sub(w, update);
    uint32_t x = ref_bits(difference), stored, residual = 0, u;
    if (rounding == KOPT_NEAREST) {
        stored = ref_narrow(f, x);
    } else if (rounding == KOPT_STOCHASTIC) {
        stored = ref_stochastic(f, x, r);
    } else if (rounding == KOPT_KAHAN) {
        float y = ref_sub(ref_compensation(o, e->residual), update), c;
        u = ref_bits(ref_add(w, y));
        stored = f == KOPT_BF16 ? (ref_extended(f, u) + 0x8000) >> 16 : ref_narrow(f, u); /* bf16: ties away */
        c = ref_add(ref_sub(w, ref_float(ref_widen(f, stored))), y);
        u = ref_bits(ref_mul(c, ref_compensation_scale(o)));
        residual = ref_flush(f, noisy ? ref_stochastic(f, u, r) : ref_narrow(f, u));
    } else if (rounding == KOPT_COMPACT) {
        u = (ref_extended(f, ref_flush(KOPT_F32, x)) + (noisy ? r & 255 : 128)) >> 8;
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

static inline void ref_step_element(const kopt_optimizer *o, const ref_scalars *s, kopt_format grad_format, uint32_t r,
                                    ref_element *e)
{
    uint32_t carried = o->rounding == KOPT_COMPACT ? (e->residual ^ 128) - 128 : (e->residual ^ 0x8000) - 0x8000;
    float w = ref_weight(o, e->weight, carried), update;
    float g = ref_mul(ref_float(ref_widen(grad_format, e->grad)), s->grad_scale);
    if (s->l2 > 0) g = ref_add(g, ref_mul(s->l2, w));
    if (o->rule == KOPT_SGD && !(o->momentum > 0)) {
        update = ref_mul(s->rate, g);
    } else {
        float m = ref_float(ref_widen(o->moment_format, e->first));
        m = ref_add(ref_mul(s->beta1, m), ref_mul(s->one_minus_beta1, g));
        e->first = ref_store_moment(o, m, r * 10579 & 0xffff);
        update = ref_mul(s->rate, o->nesterov ? ref_add(g, ref_mul(s->momentum, m)) : m);
        if (o->rule == KOPT_ADAM) {
            float v = ref_float(ref_widen(o->moment_format, e->second)), root;
            if (o->moment_format == KOPT_FP16) v = ref_mul(v, v);
            v = ref_add(ref_mul(s->beta2, v), ref_mul(ref_mul(s->one_minus_beta2, g), g));
            root = ref_sqrt(v);
            e->second = ref_store_moment(o, o->moment_format == KOPT_FP16 ? root : v, r);
            if (o->moment_format == KOPT_FP16 && root > 0 && e->second == 0) e->second = 1;
            update = ref_mul(s->rate, ref_div(m, ref_add(ref_mul(root, s->root_scale), s->eps)));
        }
    }
    if (s->decay > 0) update = ref_add(update, ref_mul(s->decay, w));
    ref_store_weight(o, e, w, update, r * 20201 & 0xffff);
    if (o->zero_grad) e->grad = 0;
}

/* Step number opt->step + 1 on a whole tensor, in place. */
static inline void ref_step_tensor(const kopt_optimizer *o, const kopt_tensor *t)
{
    ref_layout l = ref_layout_of(o, t->n);
    ref_scalars s = ref_scalars_of(o, o->step + 1);
    size_t i, weight_width = ref_width(o->weight_format), grad_width = ref_width(t->grad_format);
    unsigned char *state = (unsigned char *)t->state;
    for (i = 0; i < t->n; ++i) {
        ref_element e;
        e.weight = ref_get(t->weight, weight_width, i);
        e.grad = ref_get(t->grad, grad_width, i);
        e.residual = l.residual_width ? ref_get(state + l.residual, l.residual_width, i) : 0;
        e.first = l.first_width ? ref_get(state + l.first, l.first_width, i) : 0;
        e.second = l.second_width ? ref_get(state + l.second, l.second_width, i) : 0;
        ref_step_element(o, &s, t->grad_format, ref_random(o->seed, o->step + 1, t->id, 0, t->first_index + i), &e);
        ref_set(t->weight, weight_width, i, e.weight);
        ref_set(t->grad, grad_width, i, e.grad);
        if (l.residual_width) ref_set(state + l.residual, l.residual_width, i, e.residual);
        if (l.first_width) ref_set(state + l.first, l.first_width, i, e.first);
        if (l.second_width) ref_set(state + l.second, l.second_width, i, e.second);
        if (t->copy)
            ref_set(t->copy, ref_width(t->copy_format), i,
                    ref_narrow(t->copy_format, ref_widen(o->weight_format, e.weight)));
    }
}

#endif
