/* test_tools.c - the training-loop tools against plain arithmetic of their own: long integers for the norm, binary64
   sums, a GradScaler written from its published semantics, quantisers with floor() and a loop. */
#define KAHAN_OPT_IMPLEMENTATION
#include "../kahan_opt.h"

#include "tap.h"
#include "reference.h"

#include <fenv.h>
#include <stdlib.h>

static int quick;

/* ---- Random inputs ---------------------------------------------------------------------------------------------- */

static uint64_t dice_state = 1;

static uint32_t dice(void) /* splitmix64, upper half */
{
    uint64_t z = dice_state += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return (uint32_t)((z ^ z >> 31) >> 32);
}

static double uniform(void) { return (dice() + 0.5) / 4294967296.0; }

static double normal(void) { return sqrt(-2 * log(uniform())) * cos(6.283185307179586 * uniform()); }

static const char *const format_name[] = {"fp32", "bf16", "fp16"};

static kopt_isa isas[KOPT_ISA_COUNT];
static int isa_count;

static void find_isas(void)
{
    int k;
    for (k = 0; k < (int)KOPT_ISA_COUNT; ++k)
        if (kopt_isa_usable((kopt_isa)k)) isas[isa_count++] = (kopt_isa)k;
}

/* Exact for every finite word, in any FP environment (-Ofast flushes subnormals). */
static double exact(kopt_format f, uint32_t word)
{
    uint32_t exponent, m = ref_significand(ref_widen(f, word), &exponent);
    return (ref_widen(f, word) >> 31 ? -1 : 1) * ldexp((double)m, (int)exponent - 150);
}

/* ---- The norm --------------------------------------------------------------------------------------------------- */

/* A natural number in bytes, lowest first. */
enum { BIG = 120, POINT = 14 }; /* the norm's digit[0] begins at byte POINT: the number is in units of 2^-(298 + 112) */
typedef struct big { unsigned char byte[BIG]; } big;

static void big_add(big *a, uint64_t x, unsigned bit) /* a += x * 2^bit; x < 2^56 */
{
    unsigned i = bit / 8, carry = 0;
    for (x <<= bit % 8; (x || carry) && i < BIG; ++i, x >>= 8) {
        carry += a->byte[i] + (unsigned)(x & 255);
        a->byte[i] = (unsigned char)carry;
        carry >>= 8;
    }
}

static void big_square(big *a, uint64_t x, unsigned bit) /* a = x^2 * 2^bit */
{
    uint64_t low = x & 0xfffffff, high = x >> 28; /* x < 2^56 */
    memset(a, 0, sizeof *a);
    big_add(a, low * low, bit);
    big_add(a, low * high, bit + 29);
    big_add(a, high * high, bit + 56);
}

static int big_compare(const big *a, const big *b)
{
    int i;
    for (i = BIG - 1; i >= 0; --i)
        if (a->byte[i] != b->byte[i]) return a->byte[i] < b->byte[i] ? -1 : 1;
    return 0;
}

static uint64_t big_norm(big *sum, const void *x, kopt_format f, size_t n) /* returns how many are not finite */
{
    uint64_t strange = 0;
    size_t i;
    memset(sum, 0, sizeof *sum);
    for (i = 0; i < n; ++i) {
        uint32_t word = ref_get(x, ref_width(f), i), exponent;
        uint64_t m;
        if (!ref_is_finite(f, word)) {
            ++strange;
            continue;
        }
        m = ref_significand(ref_widen(f, word), &exponent);
        big_add(sum, m * m, 8 * POINT + 2 * (exponent - 1));
    }
    return strange;
}

static int same_norm(const kopt_norm *norm, const big *sum, uint64_t strange)
{
    int i;
    for (i = 0; i < 20; ++i) {
        const unsigned char *b = sum->byte + POINT + 4 * i;
        if (norm->digit[i] != (b[0] | (uint64_t)b[1] << 8 | (uint64_t)b[2] << 16 | (uint64_t)b[3] << 24)) return 0;
    }
    return norm->nonfinite == strange;
}

/* value is the root of sum, rounded once: sum lies between the squares of its neighbours' middles. */
static int is_root(double value, const big *sum)
{
    uint64_t u, m;
    int exponent;
    unsigned bit;
    big low, high;
    memcpy(&u, &value, sizeof u);
    m = (u & UINT64_C(0xfffffffffffff)) | UINT64_C(0x10000000000000);
    exponent = (int)(u >> 52) - 1075; /* value = m * 2^exponent */
    bit = (unsigned)(2 * exponent - 4 + 298 + 8 * POINT);
    big_square(&low, 4 * m - (m == UINT64_C(0x10000000000000) ? 1 : 2), bit);
    big_square(&high, 4 * m + 2, bit);
    return m & 1 ? big_compare(&low, sum) < 0 && big_compare(sum, &high) < 0
                 : big_compare(&low, sum) <= 0 && big_compare(sum, &high) <= 0;
}

enum { NORM_N = 20011 };
static unsigned char data[4 * NORM_N + 8], moved[4 * NORM_N + 8];

/* kind 0: normal numbers, 1: any bits that are finite, 2: any bits at all, 3: half of them zero, scales that jump;
   4, 5: after a while four times and 32 times as large, all near a power of two. */
static void fill(unsigned char *x, kopt_format f, size_t n, int kind)
{
    size_t i;
    for (i = 0; i < n; ++i) {
        uint32_t word = dice() >> (f == KOPT_F32 ? 0 : 16);
        if (kind == 1)
            while (!ref_is_finite(f, word)) word = dice() >> (f == KOPT_F32 ? 0 : 16);
        if (kind == 0) word = ref_narrow(f, ref_bits((float)(1e-3 * normal())));
        if (kind == 3)
            word = dice() & 1 ? 0 : ref_narrow(f, ref_bits((float)ldexp(normal(), (int)(i / 4096 % 5) * 9 - 20)));
        if (kind >= 4)
            word = ref_narrow(f, ref_bits((float)((i < 4096 ? 1 : kind == 4 ? 4 : 32) * (1.98 + 1e-3 * uniform()))));
        ref_set(x, ref_width(f), i, word);
    }
}

static kopt_norm norm_of_slices(const unsigned char *x, kopt_format f, size_t n, size_t slices, int merge)
{
    kopt_norm sum = {{0}, 0};
    size_t k, i;
    for (k = 0; k < slices; ++k) {
        size_t begin = n * k / slices, end = n * (k + 1) / slices;
        kopt_norm part = {{0}, 0};
        kopt_norm_add(merge ? &part : &sum, x + begin * ref_width(f), f, end - begin);
        if (merge == 1) kopt_norm_merge(&sum, &part);
        if (merge == 2) { /* as an all-reduce does it */
            for (i = 0; i < 20; ++i) sum.digit[i] += part.digit[i];
            sum.nonfinite += part.nonfinite;
        }
    }
    if (merge == 2) {
        kopt_norm zero = {{0}, 0};
        kopt_norm_merge(&sum, &zero);
    }
    return sum;
}

static void check_norm(void)
{
    static const char *const kind_name[] = {"normal numbers", "any finite bits", "any bits",
                                            "zeros and jumping scales", "times four", "times 32"};
    static const size_t slices[] = {1, 2, 7, 64};
    int f, kind, k, s, merge;
    for (f = 0; f < 3; ++f)
        for (kind = 0; kind < 6; ++kind) {
            const kopt_format format = (kopt_format)f;
            const size_t width = ref_width(format);
            big sum;
            uint64_t strange;
            int bad_bits = 0, bad_root = 0;
            size_t i;
            unsigned char *x = data + 1; /* no alignment */
            fill(x, format, NORM_N, kind);
            strange = big_norm(&sum, x, format, NORM_N);
            for (k = 0; k < isa_count; ++k) {
                kopt_norm norm = {{0}, 0};
                kopt_isa_force(isas[k]);
                for (s = 0; s < 4; ++s)
                    for (merge = 0; merge < 3; ++merge) {
                        norm = norm_of_slices(x, format, NORM_N, slices[s], merge);
                        bad_bits += !same_norm(&norm, &sum, strange);
                    }
                if (strange)
                    bad_root += ref_bits((float)kopt_norm_value(&norm)) != 0x7f800000u;
                else
                    bad_root += !is_root(kopt_norm_value(&norm), &sum);
                for (i = 0; i < NORM_N; ++i) /* another order */
                    ref_set(moved, width, i, ref_get(x, width, (i * 7919 + 5) % NORM_N));
                norm = norm_of_slices(moved, format, NORM_N, 1, 0);
                bad_bits += !same_norm(&norm, &sum, strange);
            }
            kopt_isa_force(KOPT_ISA_COUNT);
            ok(!bad_bits, "norm of %s, %s: the exact integer, for 1, 2, 7, 64 slices, any order, every ISA",
               format_name[f], kind_name[kind]);
            ok(!bad_root, "norm of %s, %s: its root, rounded once", format_name[f], kind_name[kind]);
        }
}

static void check_norm_edges(void)
{
    static const uint32_t special[] = {0, 1, 0x7fffff, 0x800000, 0x3f800000, 0x7f7fffff, 0x80000001, 0xff7fffff};
    float four[4] = {3, -4, 0, 0};
    kopt_norm norm = {{0}, 0};
    int k, bad = 0, modes[] = {FE_TONEAREST, FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO};
    ok(kopt_norm_value(&norm) == 0 && kopt_norm_value(NULL) == 0, "the norm of nothing is 0");
    kopt_norm_add(&norm, four, KOPT_F32, 4);
    ok(kopt_norm_value(&norm) == 5, "the norm of 3 and -4 is 5");
    for (k = 0; k < 8; ++k) {
        float x = ref_float(special[k]);
        uint32_t mag = special[k] & 0x7fffffff;
        kopt_norm one = {{0}, 0};
        big sum;
        kopt_norm_add(&one, &x, KOPT_F32, 1);
        big_norm(&sum, &x, KOPT_F32, 1);
        bad += mag ? !is_root(kopt_norm_value(&one), &sum) : kopt_norm_value(&one) != 0;
        bad += mag >= 0x800000 && kopt_norm_value(&one) != (double)ref_float(mag);
    }
    ok(!bad, "the norm of one number is its magnitude, from the smallest subnormal to the largest float");
    fill(data, KOPT_F32, NORM_N, 0);
    norm = norm_of_slices(data, KOPT_F32, NORM_N, 1, 0);
    for (k = 0, bad = 0; k < 4; ++k) {
        kopt_norm again;
        double value;
        fesetround(modes[k]);
        again = norm_of_slices(data, KOPT_F32, NORM_N, 1, 0);
        value = kopt_norm_value(&again);
        fesetround(FE_TONEAREST);
        bad += memcmp(&again, &norm, sizeof norm) || value != kopt_norm_value(&norm);
    }
    ok(!bad, "the norm does not depend on the caller's rounding mode");
    for (k = 0, bad = 0; k < 8; ++k) { /* roots of 54 bits: a tie each */
        big sum;
        int i;
        big_square(&sum, UINT64_C(0x20000000000000) + 2 * (uint64_t)k + 1, 8 * POINT + 34 * (unsigned)k);
        for (i = 0; i < 20; ++i)
            norm.digit[i] = sum.byte[POINT + 4 * i] | (uint64_t)sum.byte[POINT + 4 * i + 1] << 8 |
                            (uint64_t)sum.byte[POINT + 4 * i + 2] << 16 | (uint64_t)sum.byte[POINT + 4 * i + 3] << 24;
        bad += !is_root(kopt_norm_value(&norm), &sum);
    }
    ok(!bad, "a root between two numbers goes to the even one");
    memset(&norm, 0, sizeof norm);
    for (k = 0; k < 20; ++k) norm.digit[k] = UINT64_MAX; /* as 2^32 ranks may leave them */
    ok(kopt_norm_value(&norm) > 0 && kopt_norm_merge(&norm, &norm) == KOPT_OK && norm.digit[0] < UINT64_C(0x100000000),
       "words that an all-reduce left without carry are read and merged");
}

static void check_clipping(void)
{
    static const double max_norm[] = {1e-6, 0.5, 1, 4.999, 5, 5.1, 100};
    float g[2] = {3, -4}, weights[2] = {1, 1}, grad[2] = {768, -1024}, small[2];
    kopt_norm norm = {{0}, 0};
    kopt_optimizer opt = kopt_sgd(0.5, 0);
    kopt_tensor t;
    size_t i;
    int k, f, bad = 0;
    kopt_norm_add(&norm, g, KOPT_F32, 2);
    for (k = 0; k < 7; ++k) {
        volatile double sum = 5 + 1e-6, quotient = max_norm[k] / sum, scaled = 5 * 0.25, eps = scaled + 1e-6;
        volatile double second = max_norm[k] / eps;
        bad += kopt_norm_clip(&norm, max_norm[k], 1) != (quotient < 1 ? quotient : 1);
        bad += kopt_norm_clip(&norm, max_norm[k], -0.25) != (second < 1 ? second : 1);
    }
    ok(!bad, "the clip coefficient is min(1, max_norm / (norm * |grad_scale| + 1e-6))");
    ok(kopt_norm_clip(&norm, 0, 1) == 1 && kopt_norm_clip(&norm, -1, 1) == 1 && kopt_norm_clip(NULL, 1, 1) == 1,
       "no max_norm, no clipping");
    norm.nonfinite = 1;
    ok(kopt_norm_clip(&norm, 1, 1) == 0, "the clip coefficient of what is not finite is 0");

    /* Loss scale 256: the clipped step is the step with the clipped gradient. */
    memset(&norm, 0, sizeof norm);
    opt.weight_format = KOPT_F32, opt.grad_scale = 1.0 / 256;
    t = kopt_tensor_of(weights, grad, KOPT_F32, 2, NULL, 0);
    kopt_norm_add_grads(&norm, &t, 1);
    opt.clip = kopt_norm_clip(&norm, 1, opt.grad_scale);
    kopt_optimizer_step(&opt, &t, 1);
    for (i = 0; i < 2; ++i) small[i] = (float)(1 - 0.5 * (i ? -4 : 3) / (5 + 1e-6));
    ok(fabs((double)(weights[0] - small[0])) < 1e-6 && fabs((double)(weights[1] - small[1])) < 1e-6,
       "opt.clip clips in the step, with a loss scale in the gradient");

    for (f = 0; f < 3; ++f) {
        const kopt_format format = (kopt_format)f;
        const size_t width = ref_width(format);
        const double limits[] = {0, 1e-9, 0.1, 1, 1.001, 65519, 1e39};
        for (k = 0, bad = 0; k < 7 * isa_count; ++k) {
            const double limit = limits[k % 7];
            int reached = 0;
            kopt_isa_force(isas[k / 7]);
            fill(data, format, NORM_N, 2);
            memcpy(moved, data, sizeof data);
            bad += kopt_clip_value(moved, format, NORM_N, limit) != KOPT_OK;
            for (i = 0; i < NORM_N; ++i) {
                const uint32_t sign = width == 4 ? 0x80000000u : 0x8000u;
                uint32_t was = ref_get(data, width, i), is = ref_get(moved, width, i), next = (is & ~sign) + 1;
                if (ref_is_nan(format, was) || (ref_is_finite(format, was) && exact(format, was & ~sign) <= limit)) {
                    bad += was != is;
                } else { /* the largest that is not above the limit */
                    reached = 1;
                    bad += !(exact(format, is & ~sign) <= limit) || ((was ^ is) & sign);
                    bad += ref_is_finite(format, next) && exact(format, next) <= limit;
                }
            }
            bad += !reached && limit < 2;
        }
        ok(!bad, "clipping by value in %s: the largest magnitude not above the limit, NaN stays", format_name[f]);
    }
    kopt_isa_force(KOPT_ISA_COUNT);
}

static void check_norm_refusals(void)
{
    kopt_norm norm, before, other = {{0}, 0};
    float x[4] = {1, 2, 3, 4};
    kopt_tensor t[2];
    double infinite = HUGE_VAL;
    int good = 1;
    fill((unsigned char *)&norm, KOPT_F32, sizeof norm / 4, 1);
    before = norm;
    good &= kopt_norm_add(NULL, x, KOPT_F32, 4) == KOPT_ERROR_NULL;
    good &= kopt_norm_add(&norm, NULL, KOPT_F32, 4) == KOPT_ERROR_NULL;
    good &= kopt_norm_add(&norm, x, (kopt_format)3, 4) == KOPT_ERROR_OPTION;
    good &= kopt_norm_add(&norm, x, KOPT_F32, SIZE_MAX / 2) == KOPT_ERROR_BOUNDS;
    good &= kopt_norm_add(&norm, &norm, KOPT_F32, 1) == KOPT_ERROR_OVERLAP;
    good &= kopt_norm_merge(&norm, NULL) == KOPT_ERROR_NULL && kopt_norm_merge(NULL, &other) == KOPT_ERROR_NULL;
    t[0] = t[1] = kopt_tensor_of(NULL, x, KOPT_F32, 4, NULL, 0);
    t[1].grad = NULL;
    good &= kopt_norm_add_grads(&norm, t, 2) == KOPT_ERROR_NULL;
    good &= kopt_norm_add_grads(&norm, NULL, 2) == KOPT_ERROR_NULL;
    good &= !memcmp(&norm, &before, sizeof norm);
    good &= kopt_norm_add_grads(&other, t, 1) == KOPT_OK && kopt_norm_add(&other, NULL, KOPT_F32, 0) == KOPT_OK;
    ok(good, "norm: bad arguments are refused and nothing is added");
    good = kopt_clip_value(x, KOPT_F32, 4, -1) == KOPT_ERROR_RANGE;
    good &= kopt_clip_value(x, KOPT_F32, 4, infinite) == KOPT_ERROR_RANGE;
    good &= kopt_clip_value(NULL, KOPT_F32, 4, 1) == KOPT_ERROR_NULL;
    good &= kopt_clip_value(x, (kopt_format)9, 4, 1) == KOPT_ERROR_OPTION && x[3] == 4;
    ok(good, "clipping by value: bad arguments are refused and nothing is clipped");
}

int main(int argc, char **argv)
{
    quick = argc > 1 && !strcmp(argv[1], "quick");
    find_isas();
    check_norm();
    check_norm_edges();
    check_clipping();
    check_norm_refusals();
    return done();
}
