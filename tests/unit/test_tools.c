/* test_tools.c - the training-loop tools against plain arithmetic of their own: long integers for the norm, binary64
   sums, a GradScaler written from its published semantics, quantisers with floor() and a loop. */
#define KAHAN_OPT_IMPLEMENTATION
#include "../../kahan_opt.h"

#include "tap.h"
#include "reference.h"
#include "inputs.h"

#include <fenv.h>
#include <float.h>
#include <stdlib.h>

static int quick;

/* ---- Random inputs ---------------------------------------------------------------------------------------------- */

static uint64_t dice_state = 1;
static uint32_t dice(void) { return (uint32_t)(splitmix64(&dice_state) >> 32); }
static double uniform(void) { return uniform64(&dice_state); }
static double normal(void) { return normal64(&dice_state); }

static kopt_isa isas[ISAS];
static int isa_count;

/* Exact for every finite word, in any FP environment (-Ofast flushes subnormals). */
static double exact(kopt_format f, uint32_t word) {
    uint32_t exponent, m = ref_significand(ref_widen(f, word), &exponent);
    return (ref_widen(f, word) >> 31 ? -1 : 1) * ldexp((double)m, (int)exponent - 150);
}

/* ---- The norm --------------------------------------------------------------------------------------------------- */

/* A natural number in bytes, lowest first. */
enum { BIG = 120, POINT = 14 }; /* the norm's digit[0] begins at byte POINT: the number is in units of 2^-(298 + 112) */
typedef struct big {
    unsigned char byte[BIG];
} big;

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

static int big_compare(const big *a, const big *b) {
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

static void norm_of_big(kopt_norm *norm, const big *sum) /* in the carried form */
{
    int i;
    memset(norm, 0, sizeof *norm);
    for (i = 0; i < 20; ++i) {
        const unsigned char *b = sum->byte + POINT + 4 * i;
        norm->digit[i] = b[0] | (uint64_t)b[1] << 8 | (uint64_t)b[2] << 16 | (uint64_t)b[3] << 24;
    }
}

static int same_norm(const kopt_norm *norm, const big *sum, uint64_t strange) {
    kopt_norm want;
    norm_of_big(&want, sum);
    return !memcmp(norm->digit, want.digit, sizeof want.digit) && norm->nonfinite == strange;
}

/* value is the root of sum, rounded once: sum lies between the squares of its neighbours' middles. */
static int is_root(double value, const big *sum) {
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
   4 to 7: after a while 4, 8, 16 and 32 times as large, all near a power of two; 8: later 4 times. */
static void fill(unsigned char *x, kopt_format f, size_t n, int kind) {
    size_t i;
    for (i = 0; i < n; ++i) {
        uint32_t word = dice() >> (f == KOPT_F32 ? 0 : 16);
        if (kind == 1)
            while (!ref_is_finite(f, word)) word = dice() >> (f == KOPT_F32 ? 0 : 16);
        if (kind == 0) word = ref_narrow(f, ref_bits((float)(1e-3 * normal())));
        if (kind == 3)
            word = dice() & 1 ? 0 : ref_narrow(f, ref_bits((float)ldexp(normal(), (int)(i / 4096 % 5) * 9 - 20)));
        if (kind >= 4) {
            const int times = i < (kind == 8 ? 16384 : 4096) ? 1 : kind == 8 ? 4 : 1 << (kind - 2);
            word = ref_narrow(f, ref_bits((float)(times * (1.98 + 1e-3 * uniform()))));
        }
        ref_set(x, ref_width(f), i, word);
    }
}

static kopt_norm norm_of_slices(const unsigned char *x, kopt_format f, size_t n, size_t slices, int merge) {
    kopt_norm sum = {0};
    size_t k, i;
    for (k = 0; k < slices; ++k) {
        size_t begin = n * k / slices, end = n * (k + 1) / slices;
        kopt_norm part = {0};
        kopt_norm_add(merge ? &part : &sum, x + begin * ref_width(f), f, end - begin);
        if (merge == 1) kopt_norm_merge(&sum, &part);
        if (merge == 2) { /* as an all-reduce does it */
            for (i = 0; i < 20; ++i) sum.digit[i] += part.digit[i];
            sum.nonfinite += part.nonfinite;
        }
    }
    if (merge == 2) {
        kopt_norm zero = {0};
        kopt_norm_merge(&sum, &zero);
    }
    return sum;
}

static void check_norm(void) {
    static const char *const kind_name[] = {"normal numbers", "any finite bits", "any bits", "zeros and jumping scales",
                                            "times 4",        "times 8",         "times 16", "times 32",
                                            "times 4, later"};
    static const size_t slices[] = {1, 2, 7, 64};
    int f, kind, k, s, merge;
    for (f = 0; f < 3; ++f)
        for (kind = 0; kind < 9; ++kind) {
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
                kopt_norm norm = {0};
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
            kopt_isa_force(KOPT_ISA_AUTO);
            ok(!bad_bits, "norm of %s, %s: the exact integer, for 1, 2, 7, 64 slices, any order, every ISA",
               format_name[f], kind_name[kind]);
            ok(!bad_root, "norm of %s, %s: its root, rounded once", format_name[f], kind_name[kind]);
        }
}

static void check_norm_edges(void) {
    static const uint32_t special[] = {0, 1, 0x7fffff, 0x800000, 0x3f800000, 0x7f7fffff, 0x80000001, 0xff7fffff};
    float four[4] = {3, -4, 0, 0};
    kopt_norm norm = {0};
    int k, bad = 0, modes[] = ROUNDING_DIRECTIONS;
    ok(kopt_norm_value(&norm) == 0 && is_nan(kopt_norm_value(NULL)), "the norm of nothing is 0, no norm has none");
    ok(is_nan(kopt_norm_stable_scale(NULL, 1)) && is_nan(kopt_norm_stable_scale(NULL, 0)) &&
           kopt_norm_stable_scale(&norm, 0) == 1 && kopt_norm_stable_scale(&norm, 9) == 1,
       "the scale of StableAdamW: 1 from nothing, NaN from no norm");
    kopt_norm_add(&norm, four, KOPT_F32, 4);
    ok(kopt_norm_value(&norm) == 5, "the norm of 3 and -4 is 5");
    norm.nonfinite = 1;
    ok(kopt_norm_stable_scale(&norm, 9) == 1, "the scale of StableAdamW is 1 from what is not finite");
    norm.nonfinite = 0;
    ok(kopt_norm_stable_scale(&norm, 9) < 1, "... and less from the same that is");
    ok(kopt_norm_stable_scale(&norm, 0x80000000u) == 1, "... and 1 if there are 2^31 values");
    for (k = 0; k < 8; ++k) {
        float x = ref_float(special[k]);
        uint32_t mag = special[k] & 0x7fffffff;
        kopt_norm one = {0};
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
        big_square(&sum, UINT64_C(0x20000000000000) + 2 * (uint64_t)k + 1, 8 * POINT + 34 * (unsigned)k);
        norm_of_big(&norm, &sum);
        bad += !is_root(kopt_norm_value(&norm), &sum);
    }
    ok(!bad, "a root between two numbers goes to the even one");
    for (k = 0, bad = 0; k < 600; ++k) { /* such a tie of an even number, and with one bit below it */
        const uint64_t even = UINT64_C(0x10000000000000) + 2 * (uint64_t)k;
        const unsigned places = (unsigned)k / 3, last = places ? 2 * places - 1 : 0;
        const double low = ldexp((double)even, (int)places - 148), high = ldexp((double)(even + 1), (int)places - 148);
        big sum;
        big_square(&sum, 2 * even + 1, 8 * POINT + 2 * places);
        norm_of_big(&norm, &sum);
        bad += kopt_norm_value(&norm) < low || kopt_norm_value(&norm) > low;
        big_add(&sum, 1, 8 * POINT + (k % 3 == 0 ? 0 : k % 3 == 1 ? last : places));
        norm_of_big(&norm, &sum);
        bad += kopt_norm_value(&norm) < high || kopt_norm_value(&norm) > high;
    }
    ok(!bad, "a root between two numbers but for one bit of the sum, at any distance, goes up: %d wrong", bad);
    memset(&norm, 0, sizeof norm);
    for (k = 0; k < 20; ++k) norm.digit[k] = UINT64_MAX; /* as 2^32 ranks may leave them */
    ok(kopt_norm_value(&norm) > 0 && kopt_norm_merge(&norm, &norm) == KOPT_OK && norm.digit[0] < UINT64_C(0x100000000),
       "words that an all-reduce left without carry are read and merged");
}

/* One number of each size, and the smallest there is beside it: nothing is lost in the unit of the large one. */
static void check_norm_far_apart(void) {
    int f, k, bad = 0;
    uint32_t word;
    for (f = 0; f < 3; ++f)
        for (word = 1; ref_is_finite((kopt_format)f, word); word += f == KOPT_F32 ? 0x123456 : 37) {
            big sum;
            size_t i;
            for (i = 0; i < 128; ++i) ref_set(data, ref_width((kopt_format)f), i, i % 64 == 5 ? word : (uint32_t)i % 2);
            big_norm(&sum, data, (kopt_format)f, 128);
            for (k = 0; k < isa_count; ++k) {
                kopt_norm norm = {0};
                kopt_isa_force(isas[k]);
                bad += kopt_norm_add(&norm, data, (kopt_format)f, 128) != KOPT_OK || !same_norm(&norm, &sum, 0);
            }
        }
    for (k = 0; k < isa_count; ++k) { /* below the upper 12 bits of the window, where 1 is the largest */
        kopt_norm norm = {0};
        big sum;
        uint32_t i;
        for (i = 0; i < 128; ++i) ref_set(data, 4, i, i == 0 ? 0x3f800000 : 0x39000000 + i * 0xf5d3);
        big_norm(&sum, data, KOPT_F32, 128);
        kopt_isa_force(isas[k]);
        bad += kopt_norm_add(&norm, data, KOPT_F32, 128) != KOPT_OK || !same_norm(&norm, &sum, 0);
    }
    kopt_isa_force(KOPT_ISA_AUTO);
    ok(!bad, "the norm of a number of any size and of the smallest subnormal beside it: %d wrong", bad);
}

/* fp32 at the ends of a window, for a largest magnitude with any exponent: the largest numbers two binades above it;
   the same beside odd ones 18 binades below; numbers whose squares lie .49 of a unit above and below the next multiple,
   of the unit in which sums are exact; and one infinity. */
static void check_norm_window(void) {
    static const uint32_t exponents[] = {1, 2, 17, 18, 19, 20, 21, 22, 40, 127, 200, 250, 251, 252, 253, 254};
    int e, k, bad = 0;
    for (e = 0; e < 16; ++e) {
        const uint32_t top = exponents[e], above = top < 252 ? top + 2 : 254, below = top > 18 ? top - 18 : 1;
        big sum;
        uint32_t i;
        for (i = 0; i < NORM_N; ++i) {
            uint32_t word = top << 23 | dice() >> 9;
            if (i >= 4096) word = above << 23 | 0x7fffff;
            if (i >= 8192 && i % 3 != 0) word = below << 23 | 1;
            if (i >= 12288) word = below << 23 | (ref_bits((float)sqrt(4.49 / 4)) & 0x7fffff);
            if (i >= 16384) word = below << 23 | (ref_bits((float)sqrt(4.51 / 4)) & 0x7fffff);
            ref_set(data, 4, i, i == 9000 ? 0x7f800000 : word);
        }
        big_norm(&sum, data, KOPT_F32, NORM_N);
        for (k = 0; k < isa_count; ++k) {
            kopt_norm norm = {0};
            kopt_isa_force(isas[k]);
            bad += kopt_norm_add(&norm, data, KOPT_F32, NORM_N) != KOPT_OK || !same_norm(&norm, &sum, 1);
        }
    }
    kopt_isa_force(KOPT_ISA_AUTO);
    ok(!bad, "the norm of fp32 numbers of 21 binades: %d wrong", bad);
}

/* The sum of 2^32 equal norms before its carry, as an all-reduce leaves it: each word times 2^32, which is the number
   one digit higher. Here 18 digits of ones: a norm of 2^155, to 577 bits. */
static void check_norm_ranks(void) {
    static unsigned char x[4 * 100];
    kopt_norm ranks, sum, grads;
    const kopt_norm zero = {0};
    kopt_tensor t = kopt_tensor_of(NULL, KOPT_F32, x, KOPT_F32, 100, NULL, 0);
    big all, twice, more;
    int k, i, bad = 0, bad_merge = 0, bad_add = 0;
    memset(&all, 0, sizeof all), memset(&ranks, 0, sizeof ranks);
    for (i = 0; i < 18; ++i) {
        ranks.digit[i] = UINT64_C(0xffffffff) << 32;
        big_add(&all, 0xffffffff, 8 * POINT + 32 * (unsigned)i + 32);
    }
    for (more = twice = all, i = 0; i < 18; ++i) big_add(&twice, 0xffffffff, 8 * POINT + 32 * (unsigned)i + 32);
    for (k = 0; k < 100; ++k) { /* from the largest to the smallest */
        uint32_t word = 0x7f7fffff - (uint32_t)(k % 20) * 0x06012345, exponent;
        const uint64_t m = ref_significand(word, &exponent);
        ref_set(x, 4, (size_t)k, word);
        big_add(&more, m * m, 8 * POINT + 2 * (exponent - 1));
    }
    bad += !is_root(kopt_norm_value(&ranks), &all) || fabs(kopt_norm_clip(&ranks, 1, ldexp(1, -154)) - 0.5) > 1e-6;
    bad += kopt_norm_stable_scale(&ranks, UINT64_C(1) << 62) != ldexp(1, -124); /* 2^155 * 2^-31 */
    for (k = 0; k < isa_count; ++k) {
        kopt_isa_force(isas[k]);
        sum = zero, bad_merge += kopt_norm_merge(&sum, &ranks) != KOPT_OK || !same_norm(&sum, &all, 0);
        sum = ranks, bad_merge += kopt_norm_merge(&sum, &zero) != KOPT_OK || !same_norm(&sum, &all, 0);
        sum = ranks, bad_merge += kopt_norm_merge(&sum, &ranks) != KOPT_OK || !same_norm(&sum, &twice, 0);
        sum = ranks, bad_add += kopt_norm_add(&sum, x, KOPT_F32, 100) != KOPT_OK || !same_norm(&sum, &more, 0);
        grads = ranks, bad_add += kopt_norm_add_grads(&grads, &t, 1) != KOPT_OK || !same_norm(&grads, &more, 0);
    }
    kopt_isa_force(KOPT_ISA_AUTO);
    ok(!bad, "the words of 2^32 ranks, without carry: value, clip, scale of StableAdamW");
    ok(!bad_merge, "... merged: %d wrong", bad_merge);
    ok(!bad_add, "... added to: %d wrong", bad_add);
}

/* Where the step must not happen, the coefficient is NaN, also with max_norm 0; no step begins with it. */
static void check_no_step(kopt_norm norm) {
    const double nan = double_of(UINT64_C(0x7ff8) << 48), infinity = double_of(UINT64_C(0x7ff0) << 48);
    const double max_norm[] = {0, 1, -1, -1e-300, infinity, -infinity, nan}, most = 1e100;
    const double grad_scale[] = {
        1, 0, most, -most, double_of(bits_of(most) + 1), -double_of(bits_of(most) + 1), infinity, -infinity, nan};
    kopt_norm other = norm;
    int k, g, which, bad = 0, taken = 0;
    other.nonfinite = UINT64_C(1) << 40;
    for (k = 0; k < 7; ++k)
        for (g = 0; g < 9; ++g)
            for (which = 0; which < 3; ++which) { /* finite, not finite, none */
                const double clip = kopt_norm_clip(which == 2 ? NULL
                                                   : which    ? &other
                                                              : &norm,
                                                   max_norm[k], grad_scale[g]);
                const int steps = which == 0 && k < 2 && g < 4;
                float weight[2] = {1, 2}, grad[2] = {3, 4};
                const float before[2] = {1, 2};
                kopt_optimizer o = kopt_sgd(0.5, 0);
                const kopt_tensor t = kopt_tensor_of(weight, KOPT_F32, grad, KOPT_F32, 2, NULL, 0);
                kopt_step step;
                o.clip = clip;
                taken += steps;
                bad += is_nan(clip) == steps || (steps && !(clip > 0 && clip <= 1));
                bad += kopt_step_begin(&step, &o) != (steps ? KOPT_OK : KOPT_ERROR_RANGE);
                bad += o.step != (uint32_t)steps;
                if (steps) continue;
                bad += kopt_optimizer_step(&o, &t, 1) != KOPT_ERROR_RANGE || o.step != 0;
                bad += memcmp(weight, before, sizeof weight) != 0;
            }
    ok(!bad && taken == 8, "the clip coefficient is NaN where no step must be, and no step begins: %d wrong", bad);
}

static void check_clipping(void) {
    static const double max_norm[] = {1e-6, 0.5, 1, 4.999, 5, 5.1, 100};
    float g[2] = {3, -4}, weights[2] = {1, 1}, grad[2] = {768, -1024}, small[2];
    kopt_norm norm = {0};
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
    ok(kopt_norm_clip(&norm, 0, 1) == 1 && kopt_norm_clip(&norm, -0.0, 1e100) == 1, "max_norm 0: no clipping");
    check_no_step(norm);

    /* Loss scale 256: the clipped step is the step with the clipped gradient. */
    memset(&norm, 0, sizeof norm);
    opt.grad_scale = 1.0 / 256;
    t = kopt_tensor_of(weights, KOPT_F32, grad, KOPT_F32, 2, NULL, 0);
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
    kopt_isa_force(KOPT_ISA_AUTO);
}

/* A limit that is a number of the format, and the doubles below and above it: what is left of larger numbers. */
static void check_clip_limits(void) {
    static const uint32_t words[3][10] = {
        {1, 2, 0x007fffff, 0x00800000, 0x00800001, 0x3f800000, 0x3f800001, 0x3fffffff, 0x7f7ffffe, 0x7f7fffff},
        {1, 2, 0x7f, 0x80, 0x81, 0x3f80, 0x3f81, 0x3fff, 0x7f7e, 0x7f7f},
        {1, 2, 0x3ff, 0x400, 0x401, 0x3c00, 0x3c01, 0x3fff, 0x7bfe, 0x7bff}};
    static const double far_above[3] = {3.5e38, 3.3961775292304960e38, 65520}; /* in bf16, fp16 nearer to infinity */
    unsigned char x[4 * 20];
    uint32_t was[20];
    int f, k, off, isa, i, bad = 0;
    for (f = 0; f < 3; ++f)
        for (k = 0; k < 10; ++k)
            for (off = -1; off <= 2; ++off)
                for (isa = 0; isa < isa_count; ++isa) {
                    const kopt_format format = (kopt_format)f;
                    const uint32_t word = words[f][k], sign = f == 0 ? 0x80000000 : 0x8000;
                    const uint32_t infinite = f == 0 ? 0x7f800000 : f == 1 ? 0x7f80 : 0x7c00, want = word - (off < 0);
                    double limit = exact(format, word);
                    uint64_t u;
                    if (off == 2 && k < 9) continue;
                    memcpy(&u, &limit, sizeof u);
                    u += (uint64_t)(int64_t)(off == 2 ? 0 : off);
                    memcpy(&limit, &u, sizeof limit);
                    if (off == 2) limit = far_above[f];
                    for (i = 0; i < 20; ++i) { /* two below to one above, 0 at least; infinity */
                        was[i] = i % 5 == 4 ? infinite : word == 1 && i % 5 == 0 ? 0 : word + (uint32_t)(i % 5) - 2;
                        ref_set(x, ref_width(format), (size_t)i, was[i] | (i & 1 ? sign : 0));
                    }
                    kopt_isa_force(isas[isa]);
                    bad += kopt_clip_value(x, format, 20, limit) != KOPT_OK;
                    for (i = 0; i < 20; ++i) {
                        const uint32_t is = ref_get(x, ref_width(format), (size_t)i);
                        bad += is != ((was[i] > want ? want : was[i]) | (i & 1 ? sign : 0));
                    }
                }
    kopt_isa_force(KOPT_ISA_AUTO);
    ok(!bad, "clipping by value: limits that are numbers of the format, a double below, a double above: %d wrong", bad);
}

static void check_norm_refusals(void) {
    kopt_norm norm, before, other = {0};
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
    t[0] = t[1] = kopt_tensor_of(NULL, KOPT_F32, x, KOPT_F32, 4, NULL, 0);
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

/* ---- The loss scale: GradScaler once more, from its published semantics ------------------------------------------ */

typedef struct torch_scaler {
    volatile float scale;
    int growth_tracker, hysteresis_tracker;
} torch_scaler;

static void torch_update(torch_scaler *t, int found, double growth, double backoff, int interval, int hysteresis) {
    volatile double product;
    if (found) {
        t->hysteresis_tracker -= 1;
        if (t->hysteresis_tracker > 0) {
            t->growth_tracker = 0;
            return;
        }
        product = (double)t->scale * backoff;
        t->scale = (float)product;
        t->growth_tracker = 0;
        return;
    }
    t->hysteresis_tracker = hysteresis;
    if (t->growth_tracker + 1 < interval) {
        t->growth_tracker += 1;
        return;
    }
    product = (double)t->scale * growth;
    if (product < 3.4028235677973366e38) t->scale = (float)product; /* is finite as a float */
    t->growth_tracker = 0;
}

static void check_scaler_trace(void) {
    static const struct {
        double growth, backoff, overflow;
        uint32_t interval, hysteresis;
    } c[] = {{2, 0.5, 0.0005, 2000, 1},
             {2, 0.5, 0.02, 20, 1},
             {1.7, 0.61, 0.1, 5, 1},
             {2, 0.5, 0.3, 2, 3},
             {3, 0.9, 0, 50, 1}};
    int k, i;
    for (k = 0; k < 5; ++k) {
        kopt_scaler s = kopt_scaler_of();
        torch_scaler t = {65536, 0, 0};
        int bad = 0, lowered = 0, raised = 0;
        if (k == 0) bad += s.growth != 2 || s.backoff != 0.5 || s.interval != 2000 || s.hysteresis != 1;
        s.growth = c[k].growth, s.backoff = c[k].backoff, s.interval = c[k].interval, s.hysteresis = c[k].hysteresis;
        t.hysteresis_tracker = (int)s.hysteresis;
        for (i = 0; i < 10000; ++i) {
            /* overflows come more often where the scale is high, as in life */
            int found = uniform() < (k == 0 && s.scale > 0x1p20 ? 0.5 : c[k].overflow);
            const double was = s.scale;
            bad += kopt_scaler_update(&s, found) != KOPT_OK;
            torch_update(&t, found, c[k].growth, c[k].backoff, (int)c[k].interval, (int)c[k].hysteresis);
            bad += s.scale != (double)t.scale || s.good != (uint32_t)t.growth_tracker;
            lowered += s.scale<was, raised += s.scale> was;
        }
        bad += raised == 0 || (c[k].overflow > 0 && lowered == 0);
        ok(!bad, "the scale of 10,000 steps is GradScaler's: growth %g, backoff %g, interval %u, hysteresis %u",
           c[k].growth, c[k].backoff, (unsigned)c[k].interval, (unsigned)c[k].hysteresis);
    }
}

static void check_scaler_limits(void) {
    const double smallest = 0x1p-126, largest = 0x1.fffffep127; /* normal floats */
    const double infinity = double_of(UINT64_C(0x7ff0) << 48), nan = double_of(UINT64_C(0x7ff8) << 48);
    const double wrong[] = {0,         -0.0,   infinity,
                            -infinity, nan,    -1,
                            0x1p-127,  1e-300, double_of(bits_of(smallest) - 1),
                            1e39,      1e300,  double_of(bits_of(largest) + 1)};
    static const kopt_scaler zeros;
    kopt_scaler s = kopt_scaler_of(), was;
    size_t k;
    int bad, good = 1;
    s.minimum = 1;
    for (k = 0; k < 100; ++k) kopt_scaler_update(&s, 1);
    ok(s.scale == 1, "the scale does not fall below the minimum");
    s.minimum = 0;
    for (k = 0; k < 1000; ++k) kopt_scaler_update(&s, 1);
    good = s.scale == smallest && kopt_scaler_update(&s, 1) == KOPT_OK;
    ok(good, "without a minimum it falls to the least normal float, and stays");
    s.scale = 3e38, s.interval = 1;
    for (k = 0; k < 10; ++k) kopt_scaler_update(&s, 0);
    ok(s.scale == 3e38, "the scale does not become infinite");
    s.scale = largest / 2, kopt_scaler_update(&s, 0);
    good = s.scale == largest;
    s.scale = 0x1p100, s.growth = 268435448; /* 2^28 - 8: what becomes 2^128 */
    kopt_scaler_update(&s, 0);
    good &= s.scale == 0x1p100;
    s.growth = 268435448 - ldexp(1, -25), kopt_scaler_update(&s, 0); /* what becomes the largest float */
    ok(good && s.scale == largest, "... but the largest float");
    s = kopt_scaler_of(), s.scale = 0.1, s.interval = 2; /* no float */
    good = kopt_scaler_update(&s, 0) == KOPT_OK && s.scale == 0.1;
    good &= kopt_scaler_update(&s, 0) == KOPT_OK && s.scale == (double)(float)0.2;
    s.minimum = 0.15;
    good &= kopt_scaler_update(&s, 1) == KOPT_OK && s.scale == 0.15;
    ok(good, "a scale or a minimum that is no float is taken as it is; each change is rounded to a float");
    for (k = 0, good = 1; k < sizeof wrong / sizeof *wrong; ++k) {
        s = kopt_scaler_of();
        s.scale = wrong[k];
        was = s;
        good &= kopt_scaler_update(&s, 1) == KOPT_ERROR_RANGE && !memcmp(&s, &was, sizeof s);
    }
    ok(good, "a scale that is no normal number of fp32 is refused");
    s = kopt_scaler_of(), s.bad = 0x7fffffff, s.hysteresis = 0xffffffff;
    bad = kopt_scaler_update(&s, 1) != KOPT_OK || s.bad != 0x80000000 || s.scale != 65536;
    s.bad = 0xfffffffe;
    for (k = 0; k < 2; ++k) bad += kopt_scaler_update(&s, 1) != KOPT_OK || s.bad != 0xffffffff;
    ok(!bad && s.scale == 16384, "overflows in a row are counted to 2^32 - 1");
#define WRONG(code, field, value)                      \
    (s = kopt_scaler_of(), s.field = (value), was = s, \
     good &= kopt_scaler_update(&s, 0) == KOPT_ERROR_##code && !memcmp(&s, &was, sizeof s))
    good = 1;
    WRONG(RANGE, growth, 1), WRONG(RANGE, growth, HUGE_VAL), WRONG(RANGE, growth, nan), WRONG(RANGE, growth, 1.1e30);
    WRONG(RANGE, backoff, 1), WRONG(RANGE, backoff, 0), WRONG(RANGE, backoff, nan), WRONG(RANGE, backoff, 0.9e-30);
    WRONG(RANGE, interval, 0), WRONG(RANGE, hysteresis, 0), WRONG(RANGE, minimum, infinity), WRONG(RANGE, minimum, -1);
    WRONG(RANGE, minimum, nan), WRONG(RANGE, minimum, 3.1e38), WRONG(RANGE, minimum, -0x1p-1074);
    good &= kopt_scaler_update(NULL, 0) == KOPT_ERROR_NULL;
    s = was = zeros;
    good &= kopt_scaler_update(&s, 0) == KOPT_ERROR_RANGE && !memcmp(&s, &was, sizeof s);
    ok(good, "a scaler with a field out of range, or of zeros, is refused and does not change");
    for (k = 0, good = 1; k < 64; ++k) WRONG(OPTION, reserved_, UINT64_C(1) << k);
    ok(good, "... or with its reserved field set");
#undef WRONG
    s = kopt_scaler_of(), s.backoff = 1e-30;
    ok(kopt_scaler_update(&s, 0) == KOPT_OK, "a backoff of 1e-30 is taken");
    s = kopt_scaler_of(), s.minimum = -0.0;
    ok(kopt_scaler_update(&s, 1) == KOPT_OK && s.scale == 32768, "a minimum of -0 is none");
    s = kopt_scaler_of(), s.minimum = 3e38;
    ok(kopt_scaler_update(&s, 1) == KOPT_OK && s.scale == 3e38, "a minimum of 3e38 is one");
}

/* A model of two fp16 tensors whose gradients a closure writes, 3 * scale * 2^-20 and the like. */
enum { A = 37, B = 5 };
typedef struct model {
    kopt_optimizer opt;
    kopt_tensor t[2];
    uint16_t weight[A + B], grad[A + B];
    unsigned char state[2][KOPT_STATE_BYTES(A, 6)];
    int calls, overflow_above, reduced, fails; /* fails: 1: model_evaluate(), 2: model_reduce() */
} model;

static void model_build(model *m) {
    int i;
    memset(m, 0, sizeof *m);
    m->opt = kopt_adamw(1e-2);
    m->opt.zero_grad = 1;
    m->opt.seed = 5;
    m->t[0] = KOPT_TENSOR(KOPT_FP16, m->weight, m->grad, A, m->state[0], sizeof m->state[0]);
    m->t[1] = KOPT_TENSOR(KOPT_FP16, m->weight + A, m->grad + A, B, m->state[1], sizeof m->state[1]);
    m->t[1].id = 1;
    for (i = 0; i < A + B; ++i) m->weight[i] = (uint16_t)(0x3800 + 7 * i);
    kopt_state_init(&m->opt, m->t, 2, NULL);
}

static int model_evaluate(void *user, double scale) {
    model *m = (model *)user;
    int i;
    ++m->calls;
    for (i = 0; i < A + B; ++i)
        m->grad[i] = (uint16_t)ref_narrow(KOPT_FP16, ref_bits((float)((i % 7 - 3) * 0x1p-20 * scale)));
    if (scale > m->overflow_above) m->grad[A + 2] = 0x7c00;
    return m->fails & 1;
}

static int model_reduce(void *user, kopt_norm *norm) /* another rank says: infinite */
{
    model *m = (model *)user;
    ++m->calls;
    norm->nonfinite += (uint64_t)m->reduced;
    return -(m->fails >> 1);
}

static void check_scaler_step(void) {
    static model m, was, plain;
    kopt_scaler s = kopt_scaler_of(), before;
    kopt_closure closure = {model_evaluate, NULL, NULL};
    kopt_norm norm = {0};
    int k, skipped = -1, skips = 0, bad = 0, bad_norm = 0;
    closure.user = &m;

    /* Overflows above 2^13: three skips, then steps. Each is a plain step with the gradient unscaled. */
    model_build(&m);
    m.overflow_above = 8192;
    s.interval = 4;
    for (k = 0; k < 20; ++k) {
        const double scale = s.scale;
        was = m;
        bad += kopt_scaler_step(&s, &m.opt, m.t, 2, 0, &closure, &skipped) != KOPT_OK;
        if (scale > 8192) {
            ++skips;
            bad += skipped != 1 || memcmp(m.weight, was.weight, sizeof m.weight);
            bad += memcmp(m.state, was.state, sizeof m.state) != 0;
            bad += memcmp(&m.opt, &was.opt, sizeof m.opt) || m.grad[0] == 0;
            bad += s.scale != scale / 2;
        } else {
            plain = was;
            plain.t[0].weight = plain.weight, plain.t[0].grad = plain.grad, plain.t[0].state = plain.state[0];
            plain.t[1].weight = plain.weight + A, plain.t[1].grad = plain.grad + A, plain.t[1].state = plain.state[1];
            model_evaluate(&plain, scale);
            plain.opt.grad_scale = 1 / scale;
            ref_step_tensor(&plain.opt, &plain.t[0]);
            ref_step_tensor(&plain.opt, &plain.t[1]);
            bad += skipped != 0 || memcmp(m.weight, plain.weight, sizeof m.weight);
            bad += memcmp(m.state, plain.state, sizeof m.state) || memcmp(m.grad, plain.grad, sizeof m.grad);
            bad += m.opt.step != was.opt.step + 1 || m.opt.grad_scale != 1 || m.opt.clip != 1;
        }
    }
    ok(!bad && skips > 3, "scaled steps of pure fp16 are the reference's; a skipped one changes nothing at all");
    ok(m.calls == 20, "the closure is evaluated once a step");

    /* Clipping inside: the same as by hand. */
    model_build(&m);
    m.opt.rule = KOPT_RULE_SGD, m.opt.momentum = 0.9, m.overflow_above = 1 << 20;
    kopt_state_init(&m.opt, m.t, 2, NULL);
    plain = m;
    plain.t[0].weight = plain.weight, plain.t[0].grad = plain.grad, plain.t[0].state = plain.state[0];
    plain.t[1].weight = plain.weight + A, plain.t[1].grad = plain.grad + A, plain.t[1].state = plain.state[1];
    model_evaluate(&plain, 65536);
    kopt_norm_add_grads(&norm, plain.t, 2);
    plain.opt.grad_scale = 1 / 65536.0;
    plain.opt.clip = kopt_norm_clip(&norm, 1e-6, plain.opt.grad_scale);
    bad_norm = !(plain.opt.clip < 0.5);
    kopt_optimizer_step(&plain.opt, plain.t, 2);
    s = kopt_scaler_of();
    bad_norm += kopt_scaler_step(&s, &m.opt, m.t, 2, 1e-6, &closure, &skipped) != KOPT_OK || skipped;
    bad_norm += memcmp(m.weight, plain.weight, sizeof m.weight) || memcmp(m.state, plain.state, sizeof m.state);
    ok(!bad_norm, "a scaled and clipped step is the same as by hand");
    bad_norm = kopt_scaler_step(&s, &m.opt, m.t, 2, DBL_MAX, NULL, NULL) != KOPT_OK;
    bad_norm += kopt_scaler_step(&s, &m.opt, m.t, 2, HUGE_VAL, NULL, NULL) != KOPT_ERROR_RANGE;
    ok(!bad_norm, "max_norm is the largest double at most");

    /* Another rank overflows: this one skips as well. No closure: the gradients are there. */
    model_build(&m);
    m.overflow_above = 1 << 20, m.reduced = 1;
    closure.reduce = model_reduce;
    was = m, s = kopt_scaler_of();
    bad = kopt_scaler_step(&s, &m.opt, m.t, 2, 1, &closure, &skipped) != KOPT_OK || !skipped || m.calls != 2;
    bad += memcmp(m.weight, was.weight, sizeof m.weight) || m.opt.step || s.scale != 32768;
    model_evaluate(&m, s.scale);
    bad += kopt_scaler_step(&s, &m.opt, m.t, 2, 1, NULL, NULL) != KOPT_OK || m.opt.step != 1;
    ok(!bad, "what another rank found is heeded; closure and skipped may be NULL");

    /* A closure that fails: no step, and nothing but the gradients changes. */
    for (k = 1, bad = 0; k <= 2; ++k) {
        model_build(&m);
        m.overflow_above = 1 << 20, m.fails = k;
        closure.reduce = model_reduce;
        was = m, s = before = kopt_scaler_of();
        skipped = -1;
        bad += kopt_scaler_step(&s, &m.opt, m.t, 2, 1, &closure, &skipped) != KOPT_ERROR_CLOSURE || skipped != -1;
        bad += memcmp(m.weight, was.weight, sizeof m.weight) || memcmp(m.state, was.state, sizeof m.state);
        bad += memcmp(&m.opt, &was.opt, sizeof m.opt) || memcmp(&s, &before, sizeof s) || m.calls != k;
        m.fails = 0;
        bad += kopt_scaler_step(&s, &m.opt, m.t, 2, 1, &closure, &skipped) != KOPT_OK || skipped || m.opt.step != 1;
    }
    ok(!bad, "a closure that fails ends the call, and the next call makes the step");

    /* Refusals, before the closure is called. */
    model_build(&m);
    m.overflow_above = 1 << 20;
    closure.reduce = NULL;
    s = before = kopt_scaler_of();
    was = m;
    bad = kopt_scaler_step(NULL, &m.opt, m.t, 2, 0, &closure, NULL) != KOPT_ERROR_NULL;
    bad += kopt_scaler_step(&s, NULL, m.t, 2, 0, &closure, NULL) != KOPT_ERROR_NULL;
    bad += kopt_scaler_step(&s, &m.opt, NULL, 2, 0, &closure, NULL) != KOPT_ERROR_NULL;
    bad += kopt_scaler_step(&s, &m.opt, m.t, 2, -1, &closure, NULL) != KOPT_ERROR_RANGE;
    m.t[1].state_size = 10, was.t[1].state_size = 10;
    bad += kopt_scaler_step(&s, &m.opt, m.t, 2, 0, &closure, NULL) != KOPT_ERROR_SIZE;
    m.t[1].state_size = was.t[1].state_size = sizeof m.state[1];
    s.scale = before.scale = 1.2e-38, m.opt.grad_scale = was.opt.grad_scale = 3.7; /* 3.08e38 */
    bad += kopt_scaler_step(&s, &m.opt, m.t, 2, 0, &closure, NULL) != KOPT_ERROR_RANGE;
    bad += memcmp(&m, &was, sizeof m) || memcmp(&s, &before, sizeof s);
    ok(!bad, "a scaled step that is refused calls no closure and changes nothing");
}

/* Gradients 24 and -32, whose norm is 40, under a scale: the coefficient in binary64, the step by the reference. What
   opt.clip holds is not read, and stays, as does opt.grad_scale. */
static void check_scaler_clip(void) {
    static const double max_norm[] = {0, 1, 0.1, 2.4, 2.6, 1000}, grad_scale[] = {0.5, -0.5, 3};
    static const double scales[] = {8, 3, 1024, 0.1};
    int k, g, c, i, bad = 0;
    for (k = 0; k < 4; ++k)
        for (g = 0; g < 3; ++g)
            for (c = 0; c < 6; ++c) {
                const float grad[2] = {24, -32};
                float weights[2] = {1, -1}, want[2] = {1, -1}, gradients[2] = {24, -32};
                kopt_optimizer opt = kopt_sgd(0.7, 0), explicit_opt;
                kopt_tensor t = kopt_tensor_of(weights, KOPT_F32, gradients, KOPT_F32, 2, NULL, 0), reference;
                kopt_scaler s = kopt_scaler_of();
                volatile double unscale = grad_scale[g] / scales[k], norm = 40 * fabs(unscale);
                volatile double sum = norm + 1e-6, quotient = max_norm[c] / sum;
                int skipped = 1;
                opt.grad_scale = grad_scale[g], opt.clip = 123;
                s.scale = scales[k];
                explicit_opt = opt, explicit_opt.grad_scale = unscale;
                explicit_opt.clip = max_norm[c] > 0 && quotient < 1 ? quotient : 1;
                reference = t, reference.weight = want;
                ref_step_tensor(&explicit_opt, &reference);
                bad += kopt_scaler_step(&s, &opt, &t, 1, max_norm[c], NULL, &skipped) != KOPT_OK || skipped;
                for (i = 0; i < 2; ++i)
                    bad += ref_bits(weights[i]) != ref_bits(want[i]) || ref_bits(gradients[i]) != ref_bits(grad[i]);
                bad += opt.clip < 123 || opt.clip > 123 || opt.step != 1;
                bad += opt.grad_scale < grad_scale[g] || opt.grad_scale > grad_scale[g];
            }
    ok(!bad, "a scaled and clipped step is that of the coefficient in binary64: %d wrong", bad);
}

/* Two parameter groups under one loss scale: w -= lr * g / scale with SGD in fp32, in powers of two, so each number is
   exact. The scale is GradScaler's. */
typedef struct groups {
    float weight[3], grad[3]; /* one weight in group 0, two in group 1 */
    kopt_optimizer opt[2];
    kopt_tensor t[2];
} groups;

static void groups_build(groups *g) {
    int i;
    memset(g, 0, sizeof *g);
    for (i = 0; i < 2; ++i) {
        g->opt[i] = kopt_sgd(i ? 0.5 : 1, 0);
        g->t[i] = kopt_tensor_of(&g->weight[i], KOPT_F32, &g->grad[i], KOPT_F32, (size_t)i + 1, NULL, 0);
        g->t[i].id = (uint32_t)i;
    }
}

static kopt_result groups_step(groups *g, kopt_scaler *s, double max_norm, int *skipped) {
    kopt_norm norm = {0};
    kopt_step steps[2];
    kopt_result result;
    int i;
    kopt_norm_add_grads(&norm, g->t, 2);
    result = kopt_scaler_begin(s, steps, g->opt, 2, &norm, max_norm, skipped);
    for (i = 0; i < 2 && result == KOPT_OK; ++i) {
        const kopt_result run = kopt_step_run(&steps[i], &g->t[i], 1);
        result = run == (*skipped ? KOPT_ERROR_STEP : KOPT_OK) ? KOPT_OK : KOPT_ERROR_DEVICE;
    }
    return result;
}

static void check_scaler_groups(void) {
    static groups g, was;
    kopt_scaler s = kopt_scaler_of(), before;
    kopt_norm norm = {0};
    kopt_step steps[2], same[2];
    kopt_closure closure = {model_evaluate, NULL, NULL};
    torch_scaler torch = {1024, 0, 0};
    static model m[2];
    uint32_t made = 0;
    double want[3] = {0, 0, 0};
    int k, i, skipped = -1, bad = 0, overflows = 0, grown = 0;

    groups_build(&g);
    s.scale = 1024, s.interval = 3;
    for (k = 0; k < 30; ++k) {
        const double scale = s.scale;
        const int overflow = k % 7 == 2;
        for (i = 0; i < 3; ++i) g.grad[i] = (float)(scale * (i + 1));
        if (overflow) g.grad[k % 3] = HUGE_VALF; /* in one group or in the other */
        bad += groups_step(&g, &s, 0, &skipped) != KOPT_OK || skipped != overflow;
        for (i = 0; i < 3 && !overflow; ++i) want[i] -= (i ? 0.5 : 1) * (i + 1);
        for (i = 0; i < 3; ++i) bad += (double)g.weight[i] < want[i] || (double)g.weight[i] > want[i];
        made += !overflow, overflows += overflow;
        torch_update(&torch, overflow, 2, 0.5, 3, 1);
        grown += s.scale > scale;
        bad += s.scale != (double)torch.scale || g.opt[0].step != made || g.opt[1].step != made;
    }
    ok(!bad && overflows == 4 && grown > 3, "two groups move by their gradients when the scale grows or falls: %d",
       bad);

    /* The norm of all: gradients 24, and -32 and 0, times the scale; clipped to 10 of 40. */
    groups_build(&g);
    s = kopt_scaler_of(), s.scale = 8;
    g.grad[0] = 8 * 24, g.grad[1] = 8 * -32;
    bad = groups_step(&g, &s, 10, &skipped) != KOPT_OK || skipped;
    bad += fabs((double)g.weight[0] + 6) > 1e-5 || fabs((double)g.weight[1] - 4) > 1e-5 || g.weight[2] != 0;
    ok(!bad, "groups are clipped together");

    /* One call per group: refused, and nothing has changed. At the latest in the first iteration without a skip. */
    for (k = 0; k < 2; ++k) {
        groups_build(&g);
        s = kopt_scaler_of(), s.interval = 1;
        for (i = 0; i < 3; ++i) g.grad[i] = 65536;
        bad = 0;
        if (k) { /* both overflow first */
            g.grad[0] = g.grad[1] = HUGE_VALF;
            bad += kopt_scaler_step(&s, &g.opt[0], &g.t[0], 1, 0, NULL, &skipped) != KOPT_OK || !skipped;
            bad += kopt_scaler_step(&s, &g.opt[1], &g.t[1], 1, 0, NULL, &skipped) != KOPT_OK || !skipped;
            g.grad[0] = g.grad[1] = 16384;
        }
        bad += kopt_scaler_step(&s, &g.opt[0], &g.t[0], 1, 0, NULL, &skipped) != KOPT_OK || skipped;
        was = g, before = s;
        kopt_norm_add_grads(&norm, &g.t[1], 1);
        bad += kopt_scaler_step(&s, &g.opt[1], &g.t[1], 1, 0, NULL, &skipped) != KOPT_ERROR_MISMATCH;
        bad += kopt_scaler_begin(&s, steps, &g.opt[1], 1, &norm, 0, &skipped) != KOPT_ERROR_MISMATCH;
        bad += memcmp(&g, &was, sizeof g) || memcmp(&s, &before, sizeof s);
        bad += groups_step(&g, &s, 0, &skipped) != KOPT_OK; /* one of the two has made all steps: all together */
        ok(!bad, "a scaler of one group is refused with the other%s", k ? ", after overflows of both" : "");
    }
    /* A group that began later, before or after the older one. */
    for (k = 0; k < 2; ++k) {
        groups_build(&g);
        s = kopt_scaler_of(), g.opt[0].step = 1000;
        bad = 0;
        for (i = 0; i < 3; ++i)
            bad += kopt_scaler_step(&s, &g.opt[(k + i) & 1], &g.t[(k + i) & 1], 1, 0, NULL, NULL) != KOPT_OK;
        ok(bad > 0, "... also if the groups have not made equally many steps");
    }
    groups_build(&g);
    s = kopt_scaler_of(), g.opt[0].step = 1000;
    bad = kopt_scaler_step(&s, &g.opt[0], &g.t[0], 1, 0, NULL, NULL) != KOPT_OK;
    for (k = 0; k < 3; ++k) bad += groups_step(&g, &s, 0, &skipped) != KOPT_OK;
    bad += g.opt[0].step != 1004 || g.opt[1].step != 3;
    bad += kopt_scaler_step(&s, &g.opt[0], &g.t[0], 1, 0, NULL, NULL) != KOPT_OK;
    ok(!bad, "a group may join, and may leave");

    /* Back to an older checkpoint: with the scaler of that time, or with a new one. */
    groups_build(&g);
    s = kopt_scaler_of();
    for (k = bad = 0; k < 5; ++k) bad += groups_step(&g, &s, 0, &skipped) != KOPT_OK;
    was = g, before = s;
    for (k = 0; k < 5; ++k) bad += groups_step(&g, &s, 0, &skipped) != KOPT_OK;
    g.opt[0].step = g.opt[1].step = 5;
    bad += groups_step(&g, &s, 0, &skipped) != KOPT_ERROR_MISMATCH;
    for (k = 0; k < 2; ++k) {
        s = k ? kopt_scaler_of() : before;
        bad += groups_step(&g, &s, 0, &skipped) != KOPT_OK;
        g.opt[0].step = g.opt[1].step = 5;
    }
    s = kopt_scaler_of(); /* resumed: a new scaler with the fields of the old one, and large counts */
    g.opt[0].step = g.opt[1].step = UINT32_MAX - 1;
    bad += groups_step(&g, &s, 0, &skipped) != KOPT_OK || groups_step(&g, &s, 0, &skipped) != KOPT_ERROR_STEP;
    ok(!bad, "a scaler goes back with its optimizers, or begins again");

    /* Each call makes its own gradients: no wrong scale is possible, and two models may take turns. */
    model_build(&m[0]), model_build(&m[1]);
    m[0].overflow_above = m[1].overflow_above = 1 << 20;
    s = kopt_scaler_of(), s.interval = 1;
    for (k = bad = 0; k < 6; ++k) {
        closure.user = &m[k & 1];
        bad +=
            kopt_scaler_step(&s, &m[k & 1].opt, m[k & 1].t, 2, 0, &closure, &skipped) != KOPT_OK || skipped != (k > 4);
    }
    ok(!bad && m[0].opt.step == 3 && m[1].opt.step == 2, "with a closure, two optimizers may share a scaler");
    bad = kopt_scaler_update(&s, 0) != KOPT_OK;
    bad += kopt_scaler_step(&s, &m[0].opt, m[0].t, 2, 0, NULL, NULL) != KOPT_OK;
    ok(!bad, "kopt_scaler_update() alone is tied to no optimizer");

    /* All or nothing. */
    groups_build(&g);
    s = kopt_scaler_of();
    memset(steps, 0x55, sizeof steps), memcpy(same, steps, sizeof same);
    before = s, skipped = 7;
    for (k = bad = 0; k < 2; ++k) {
        norm.nonfinite = (uint64_t)k;
#define BEGIN(scaler, steps, opts, count, norm, max_norm) \
    kopt_scaler_begin(scaler, steps, opts, count, norm, max_norm, &skipped)
        g.opt[1].lr = -1;
        bad += BEGIN(&s, steps, g.opt, 2, &norm, 0) != KOPT_ERROR_RANGE;
        g.opt[1].lr = 1, g.opt[1].step = UINT32_MAX;
        bad += BEGIN(&s, steps, g.opt, 2, &norm, 0) != KOPT_ERROR_STEP;
        g.opt[1].step = 0, g.opt[1].made_ ^= 1;
        bad += BEGIN(&s, steps, g.opt, 2, &norm, 0) != KOPT_ERROR_VERSION;
        g.opt[1].made_ ^= 0x10001;
        bad += BEGIN(&s, steps, g.opt, 2, &norm, 0) != KOPT_ERROR_UNINITIALIZED;
        g.opt[1].made_ ^= 0x10000, g.opt[1].reserved_[3] = 1;
        bad += BEGIN(&s, steps, g.opt, 2, &norm, 0) != KOPT_ERROR_OPTION;
        g.opt[1].reserved_[3] = 0, s.reserved_ = 1;
        bad += BEGIN(&s, steps, g.opt, 2, &norm, 0) != KOPT_ERROR_OPTION;
        s.reserved_ = 0, s.scale = 1e-30, g.opt[1].grad_scale = 1e30; /* 1e60 */
        bad += BEGIN(&s, steps, g.opt, 2, &norm, 0) != KOPT_ERROR_RANGE;
        s.scale = before.scale, g.opt[1].grad_scale = 1;
        bad += BEGIN(&s, steps, g.opt, 0, &norm, 0) != KOPT_ERROR_RANGE;
        bad += BEGIN(&s, steps, g.opt, 2, &norm, -1) != KOPT_ERROR_RANGE;
        bad += BEGIN(&s, steps, g.opt, 2, &norm, HUGE_VAL) != KOPT_ERROR_RANGE;
        bad += BEGIN(NULL, steps, g.opt, 2, &norm, 0) != KOPT_ERROR_NULL;
        bad += BEGIN(&s, steps, NULL, 2, &norm, 0) != KOPT_ERROR_NULL;
        bad += BEGIN(&s, steps, g.opt, 2, NULL, 0) != KOPT_ERROR_NULL;
        bad += BEGIN(&s, NULL, g.opt, 2, &norm, 0) != KOPT_ERROR_NULL;
#undef BEGIN
    }
    bad += g.opt[0].step || g.opt[1].step || skipped != 7;
    bad += memcmp(steps, same, sizeof steps) || memcmp(&s, &before, sizeof s);
    ok(!bad, "if one group is refused, none has begun and nothing has changed");
}

/* ---- Gradient accumulation -------------------------------------------------------------------------------------- */

enum { SUM_N = 1037 };
typedef struct sum_memory {
    unsigned char sum[4 * SUM_N + 1], residual[2 * SUM_N + 1];
} sum_memory;

/* The same in the words of numerics.md: the weight store with update = -delta. */
static void reference_accumulate(sum_memory *m, const kopt_accumulator *a, const void *grad, kopt_format f,
                                 float scale) {
    kopt_optimizer o;
    ref_layout l;
    size_t i;
    memset(&o, 0, sizeof o);
    o.rounding = a->rounding, o.residual_rounding = a->residual_rounding;
    l = ref_layout_of(&o, a->format, SUM_N);
    for (i = 0; i < SUM_N; ++i) {
        ref_element e;
        uint32_t r = ref_number(ref_random(a->seed, a->step + 1, a->id, 2, a->first_index + i), 0), carried;
        float delta = ref_mul(ref_float(ref_widen(f, ref_get(grad, ref_width(f), i))), scale), w;
        memset(&e, 0, sizeof e);
        if (a->count) {
            e.weight = ref_get(m->sum, ref_width(a->format), i);
            if (l.residual_width) e.residual = ref_get(m->residual, l.residual_width, i);
        }
        carried = o.rounding == KOPT_COMPACT ? (e.residual ^ 128) - 128 : (e.residual ^ 0x8000) - 0x8000;
        w = ref_weight(&o, a->format, e.weight, carried);
        ref_store_weight(&o, a->format, &e, w, -delta, r);
        ref_set(m->sum, ref_width(a->format), i, e.weight);
        if (l.residual_width) ref_set(m->residual, l.residual_width, i, e.residual);
    }
}

static void check_accumulate_bits(void) {
    static sum_memory got, want, sliced;
    int f, g, rounding, noisy, turn;
    for (f = 0; f < 3; ++f) {
        int bad = 0, bad_slices = 0;
        for (g = 0; g < 3; ++g)
            for (rounding = 0; rounding <= KOPT_EXACT; ++rounding)
                for (noisy = quick && rounding != KOPT_KAHAN; noisy < 2; ++noisy) {
                    kopt_accumulator a = kopt_accumulator_of(got.sum + 1, (kopt_format)f, got.residual + 1, SUM_N), b;
                    a.rounding = (kopt_rounding)rounding, a.residual_rounding = (kopt_rounding)noisy;
                    a.seed = UINT64_C(0x1234567890abcdef), a.id = 77, a.first_index = 1000003;
                    b = a;
                    memset(&got, 0xff, sizeof got), want = got, sliced = got; /* old NaNs must not be read */
                    for (turn = 0; turn < 12; ++turn) {
                        const float scale = turn % 3 ? 1.0f : 0.7f;
                        static sum_memory aligned;
                        size_t width = ref_width((kopt_format)g), step, at;
                        fill(data, (kopt_format)g, SUM_N, turn == 11 ? 2 : turn == 10 ? 1 : turn % 2 ? 3 : 0);
                        if (turn == 8) a.count = b.count = 0;
                        kopt_isa_force(isas[turn % isa_count]);
                        memcpy(aligned.sum, want.sum + 1, 4 * SUM_N);
                        memcpy(aligned.residual, want.residual + 1, 2 * SUM_N);
                        reference_accumulate(&aligned, &a, data, (kopt_format)g, scale);
                        memcpy(want.sum + 1, aligned.sum, 4 * SUM_N);
                        memcpy(want.residual + 1, aligned.residual, 2 * SUM_N);
                        bad += kopt_accumulator_add(&a, data, (kopt_format)g, (double)scale) != KOPT_OK;
                        for (at = 0; at < SUM_N; at += step) { /* slices, each with a struct of its own */
                            kopt_accumulator c = b;
                            step = 1 + dice() % 400;
                            if (step > SUM_N - at) step = SUM_N - at;
                            c.sum = sliced.sum + 1 + at * ref_width(a.format);
                            c.residual = sliced.residual + 1 + at * (rounding == KOPT_COMPACT ? 1 : 2);
                            c.first_index += at, c.n = step;
                            kopt_accumulator_add(&c, data + at * width, (kopt_format)g, (double)scale);
                        }
                        ++b.count, ++b.step;
                        if (f == 0 || rounding < 2) memcpy(want.residual, got.residual, sizeof got.residual);
                        bad += memcmp(&got, &want, sizeof got) != 0;
                        if (f == 0 || rounding < 2) memcpy(sliced.residual, got.residual, sizeof got.residual);
                        bad_slices += memcmp(&got, &sliced, sizeof got) != 0;
                    }
                    bad += a.count != 4 || a.step != 12;
                }
        kopt_isa_force(KOPT_ISA_AUTO);
        ok(!bad, "sums in %s: five roundings, gradients of all formats, all values, every ISA", format_name[f]);
        ok(!bad_slices, "sums in %s: the same for any slicing", format_name[f]);
    }
}

static void check_accumulate_quality(void) {
    enum { BATCHES = 4096, M = 64 };
    static double exact_sum[M];
    static float out[M];
    static unsigned char sum[4 * M], residual[2 * M], grad[4 * M];
    int f, rounding, k, i;
    for (f = 1; f < 3; ++f)
        for (rounding = 0; rounding <= KOPT_EXACT; ++rounding) {
            const double step = f == KOPT_BF16 ? 1.0 / 128 : 1.0 / 1024;
            kopt_accumulator a = kopt_accumulator_of(sum, (kopt_format)f, residual, M);
            double worst = 0, worst_seen = 0, mean = 0;
            a.rounding = (kopt_rounding)rounding;
            memset(exact_sum, 0, sizeof exact_sum);
            for (k = 0; k < BATCHES; ++k) {
                for (i = 0; i < M; ++i) { /* between 1 and 2, of either sign; the sum fits into fp16 */
                    const float x = (float)(i & 1 ? -1 - uniform() : 1 + uniform());
                    const uint32_t word = ref_narrow((kopt_format)f, ref_bits(x));
                    ref_set(grad, 2, (size_t)i, word);
                    exact_sum[i] += exact((kopt_format)f, word);
                }
                kopt_accumulator_add(&a, grad, (kopt_format)f, 1);
            }
            kopt_accumulator_read(&a, out);
            for (i = 0; i < M; ++i) {
                double off = fabs((double)out[i] / exact_sum[i] - 1);
                double seen = fabs(exact((kopt_format)f, ref_get(sum, 2, (size_t)i)) / exact_sum[i] - 1);
                if (off > worst) worst = off;
                if (seen > worst_seen) worst_seen = seen;
                mean += off / (double)M;
            }
            if (rounding == KOPT_NEAREST)
                ok(f == KOPT_BF16 ? mean > 0.8 : mean > 0.1, "4,096 micro-batches in %s, nearest: %.1f %% off",
                   format_name[f], 100 * mean);
            else if (rounding == KOPT_STOCHASTIC)
                ok(worst < 64 * step && worst > step / 100, "4,096 micro-batches in %s, stochastic: %.2g off at most",
                   format_name[f], worst);
            else
                ok(worst < (rounding == KOPT_COMPACT ? step / 6 : 1e-3) && worst_seen < 0.51 * step,
                   "4,096 micro-batches in %s, %s: %.1e off with the residual, %.1e without", format_name[f],
                   rounding_name[rounding], worst, worst_seen);
        }
}

static void check_accumulate_step(void) {
    static uint16_t weights[2][SUM_N], sum[SUM_N], residual[SUM_N];
    static float total[SUM_N];
    kopt_optimizer opt = kopt_sgd(0.5, 0);
    kopt_accumulator a = kopt_accumulator_of(sum, KOPT_BF16, residual, SUM_N);
    kopt_tensor t;
    int k, i, bad = 0;
    opt.rounding = KOPT_NEAREST;
    for (k = 0; k < 8; ++k) {
        fill(data, KOPT_BF16, SUM_N, 0);
        for (i = 0; i < SUM_N; ++i) total[i] += ref_float(ref_widen(KOPT_BF16, ref_get(data, 2, (size_t)i)));
        bad += kopt_accumulator_add(&a, data, KOPT_BF16, 1) != KOPT_OK;
    }
    opt.grad_scale = 1.0 / a.count;
    t = kopt_tensor_of(weights[0], KOPT_BF16, a.sum, a.format, a.n, NULL, 0);
    bad += kopt_optimizer_step(&opt, &t, 1) != KOPT_OK;
    for (i = 0; i < SUM_N; ++i)
        bad += fabs((double)ref_float((uint32_t)weights[0][i] << 16) + 0.5 * (double)total[i] / 8) >
               0.01 * fabs(0.5 * (double)total[i] / 8) + 1e-9;
    ok(!bad, "the sum is the gradient of a step");
}

static void check_accumulate_refusals(void) {
    static sum_memory m, before;
    kopt_accumulator a = kopt_accumulator_of(m.sum, KOPT_BF16, m.residual, 8), was;
    float grad[8] = {1, 2, 3, 4, 5, 6, 7, 8}, out[8] = {9};
    int good = a.rounding == KOPT_KAHAN && kopt_accumulator_of(m.sum, KOPT_BF16, NULL, 8).rounding == KOPT_STOCHASTIC;
    kopt_accumulator_add(&a, grad, KOPT_F32, 1);
    before = m, was = a;
#define REFUSE(result, change, call)                                                    \
    (a = was, change, good &= (call) == (result) && a.count == 1 && a.step == was.step, \
     good &= !memcmp(&m, &before, sizeof m))
    REFUSE(KOPT_ERROR_NULL, a.sum = NULL, kopt_accumulator_add(&a, grad, KOPT_F32, 1));
    REFUSE(KOPT_ERROR_NULL, a.residual = NULL, kopt_accumulator_add(&a, grad, KOPT_F32, 1));
    REFUSE(KOPT_ERROR_NULL, (void)0, kopt_accumulator_add(&a, NULL, KOPT_F32, 1));
    REFUSE(KOPT_ERROR_NULL, (void)0, kopt_accumulator_add(NULL, grad, KOPT_F32, 1));
    REFUSE(KOPT_ERROR_NULL, (void)0, kopt_accumulator_read(&a, NULL));
    REFUSE(KOPT_ERROR_OPTION, a.format = (kopt_format)3, kopt_accumulator_add(&a, grad, KOPT_F32, 1));
    REFUSE(KOPT_ERROR_OPTION, a.rounding = (kopt_rounding)5, kopt_accumulator_add(&a, grad, KOPT_F32, 1));
    REFUSE(KOPT_ERROR_OPTION, a.residual_rounding = KOPT_KAHAN, kopt_accumulator_add(&a, grad, KOPT_F32, 1));
    REFUSE(KOPT_ERROR_OPTION, (void)0, kopt_accumulator_add(&a, grad, (kopt_format)7, 1));
    REFUSE(KOPT_ERROR_RANGE, (void)0, kopt_accumulator_add(&a, grad, KOPT_F32, HUGE_VAL));
    REFUSE(KOPT_ERROR_OPTION, a.reserved_n_ = 1, kopt_accumulator_add(&a, grad, KOPT_F32, 1));
    REFUSE(KOPT_ERROR_OPTION, a.reserved_n_ = SIZE_MAX - SIZE_MAX / 2, kopt_accumulator_add(&a, grad, KOPT_F32, 1));
    REFUSE(KOPT_ERROR_OPTION, a.reserved32_ = 1, kopt_accumulator_add(&a, grad, KOPT_F32, 1));
    REFUSE(KOPT_ERROR_OPTION, a.reserved32_ = UINT32_C(1) << 31, kopt_accumulator_read(&a, out));
    REFUSE(KOPT_ERROR_OPTION, a.reserved_n_ = 256, kopt_accumulator_read(&a, out));
    REFUSE(KOPT_ERROR_UNINITIALIZED, a.made_ = 0, kopt_accumulator_read(&a, out));
    REFUSE(KOPT_ERROR_BOUNDS, a.n = SIZE_MAX / 4, kopt_accumulator_add(&a, grad, KOPT_F32, 1));
    REFUSE(KOPT_ERROR_BOUNDS, a.first_index = UINT64_MAX, kopt_accumulator_add(&a, grad, KOPT_F32, 1));
    REFUSE(KOPT_ERROR_OVERLAP, a.residual = m.sum + 2, kopt_accumulator_add(&a, grad, KOPT_F32, 1));
    REFUSE(KOPT_ERROR_OVERLAP, (void)0, kopt_accumulator_add(&a, m.sum, KOPT_F32, 1));
    REFUSE(KOPT_ERROR_OVERLAP, (void)0, kopt_accumulator_read(&a, (float *)(void *)m.sum));
    a = was, a.step = UINT32_MAX, was = a;
    REFUSE(KOPT_ERROR_STEP, (void)0, kopt_accumulator_add(&a, grad, KOPT_F32, 1));
    a = was;
    good &= kopt_accumulator_read(&a, out) == KOPT_OK && !memcmp(out, grad, sizeof grad);
    a.count = 0;
    good &= kopt_accumulator_read(&a, out) == KOPT_OK && ref_bits(out[3]) == 0;
    ok(good, "accumulation: bad arguments are refused and nothing is added or counted");
}

/* ---- The learning rate ------------------------------------------------------------------------------------------ */

/* By libm, in the widest format. */
static long double cosine_by_libm(double step, double warmup, double steps, double peak, double last) {
    const double top = warmup > 1 ? warmup - 1 : 0;
    const long double pi = 3.14159265358979323846264338327950288L, drop = (long double)peak - (long double)last;
    long double half;
    if (step < warmup) return (long double)peak * (long double)(step + 1) / (long double)warmup;
    if (step >= steps - 1) return (long double)last;
    half = sinl(pi / 2 * (long double)(step - top) / (long double)(steps - 1 - top));
    return (long double)peak - drop * half * half;
}

/* A number up to most, as likely small as large. */
static uint32_t dice_to(uint32_t most) {
    const uint32_t x = dice() >> dice() % 32;
    return x > most ? x % (most + 1) : x;
}

/* Are the rates from step `from` to step `to` ever higher, or ever lower? */
static int is_monotone(uint32_t from, uint32_t to, uint32_t warmup, uint32_t steps, double peak, double last) {
    double before = kopt_cosine_lr(from, warmup, steps, peak, last), rate;
    const int up = to < warmup || last > peak;
    while (from < to) {
        rate = kopt_cosine_lr(++from, warmup, steps, peak, last);
        if (up ? !(rate >= before) : !(rate <= before)) return 0;
        before = rate;
    }
    return 1;
}

/* What the manual says of the seams. */
static void check_cosine_ends(void) {
    const double p = 1.3e-3, q = 7e-5;
    const uint32_t most = UINT32_MAX;
    long k, bad = 0;
    for (k = 0; k < 20000; ++k) {
        const uint32_t steps = dice_to(most), warmup = dice_to(steps);
        const double peak = uniform(), last = k % 3 ? uniform() : k % 2 ? 0 : peak;
        const double first = kopt_cosine_lr(0, warmup, steps, peak, last);
        if (warmup > 0) bad += !(fabs(first - peak / warmup) <= first * 2.3e-16);
        if (warmup > 0) bad += kopt_cosine_lr(warmup - 1, warmup, steps, peak, last) != peak;
        if (warmup == 0 && steps > 1) bad += first != peak;
        if (steps > warmup) bad += kopt_cosine_lr(steps - 1, warmup, steps, peak, last) != last;
        bad += kopt_cosine_lr(steps, warmup, steps, peak, last) != last;
        bad += kopt_cosine_lr(steps + dice_to(most - steps), warmup, steps, peak, last) != last;
    }
    ok(!bad, "the learning rate is exactly the peak and exactly the last one at its ends: %ld wrong", bad);
    ok(kopt_cosine_lr(0, 0, 0, p, q) == q && kopt_cosine_lr(0, 0, 1, p, q) == q && kopt_cosine_lr(0, 1, 1, p, q) == p &&
           kopt_cosine_lr(1, 1, 1, p, q) == q && kopt_cosine_lr(0, 0, 2, p, q) == p &&
           kopt_cosine_lr(0, 1, 2, p, q) == p && kopt_cosine_lr(1, 0, 2, p, q) == q &&
           kopt_cosine_lr(1, 1, 2, p, q) == q && kopt_cosine_lr(1, 2, 2, p, q) == p &&
           kopt_cosine_lr(2, 2, 2, p, q) == q && kopt_cosine_lr(most, 0, most, p, q) == q &&
           kopt_cosine_lr(most - 1, most, most, p, q) == p && kopt_cosine_lr(most, most, most, p, q) == q,
       "0, 1 and 2 steps, with and without warm-up, and 2^32 - 1 steps");
}

/* Beside libm; the later half of the cosine is the earlier one turned over; ever lower, also near the ends and the
   middle of the longest ones, where two steps differ least. */
static void check_cosine(void) {
    const long count = quick ? 20000 : 400000;
    double worst = 0;
    long k, bad = 0, turned = 0;
    for (k = 0; k < count; ++k) {
        const uint32_t steps = 1 + dice_to(UINT32_MAX - 1), warmup = k % 2 ? 0 : dice_to(steps), step = dice_to(steps);
        const double peak = ldexp(0.5 + uniform(), -(int)(dice() % 40)), last = k % 3 ? peak * uniform() : 0;
        const double rate = kopt_cosine_lr(step, warmup, steps, peak, last);
        const long double error = (long double)rate - cosine_by_libm(step, warmup, steps, peak, last);
        if (!(fabs((double)error) <= worst * peak)) worst = fabs((double)error) / peak;
    }
    ok(worst < 1e-15, "the learning rate beside libm: off by at most %.2g of the peak", worst);
    for (k = 0; k < count; ++k) {
        const uint32_t steps = 2 + dice_to(UINT32_MAX - 2), warmup = k % 2 ? 0 : dice_to(steps - 1);
        const uint32_t top = warmup ? warmup - 1 : 0, length = steps - 1 - top, done = dice_to(length);
        const uint32_t place[] = {warmup, steps - 1, top + length / 2, done, steps - 1 - done, dice_to(steps)};
        const double peak = uniform(), lasts[] = {0, peak * uniform(), peak * (1 - 1e-9), 2 * peak, peak * (1 - 1e-15)};
        const double last = lasts[dice() % 5];
        const uint32_t middle = place[k % 6] > steps ? steps : place[k % 6];
        const uint32_t from = middle < 3 ? 0 : middle - 3, to = middle > UINT32_MAX - 3 ? UINT32_MAX : middle + 3;
        const uint32_t seam = warmup > from && warmup - 1 < to ? warmup - 1 : from; /* of two directions */
        bad += !is_monotone(from, seam, warmup, steps, peak, last) + !is_monotone(seam, to, warmup, steps, peak, last);
        turned += !(fabs(kopt_cosine_lr(top + done, warmup, steps, 1, 0) +
                         kopt_cosine_lr(steps - 1 - done, warmup, steps, 1, 0) - 1) < 2.3e-16);
    }
    ok(!bad, "... from one step to the next it never turns back: %ld of %ld do", bad, count);
    ok(!turned, "... and both halves are alike: %ld of %ld are not", turned, count);
}

/* Bits, the hash and the values of which are those of Python: docs/numerics.md, section 6c, and mpmath. */
static void check_cosine_bits(void) {
    static const struct {
        uint32_t step, warmup, steps;
        double rate; /* correctly rounded */
    } known[] = {{4, 10, 100, 5e-4},
                 {10, 10, 100, 0.000999725872158593},
                 {54, 10, 100, 0.00055},
                 {77, 10, 100, 0.000226297089847607},
                 {98, 10, 100, 0.00010027412784140693},
                 {1, 0, 4294967295u, 0.001},
                 {1234567890, 0, 4294967295u, 0.0008286530722534699}};
    uint64_t hash = FNV_START;
    uint32_t state = 1, k, steps, warmup;
    int bad = 0;
    for (k = 0; k < sizeof known / sizeof *known; ++k)
        bad += !(fabs(kopt_cosine_lr(known[k].step, known[k].warmup, known[k].steps, 1e-3, 1e-4) - known[k].rate) <
                 4.4e-19);
    ok(!bad, "... known values: %d wrong", bad);
    for (k = 0; k < 5000; ++k) {
        const uint32_t shift = k % 29;
        steps = lcg32(&state) >> shift, warmup = (lcg32(&state) >> shift) / 8;
        if (warmup > steps) warmup = steps;
        hash = fnv(hash, bits_of(kopt_cosine_lr(lcg32(&state) >> shift, warmup, steps, 1e-3, k % 2 ? 0 : 1e-4)));
    }
    ok(hash == UINT64_C(0x37fb31c257c912df), "... the bits of 5000: %016llx", (unsigned long long)hash);
}

static void check_cosine_refusals(void) {
    const double nan = double_of(UINT64_C(0x7ff8) << 48), infinity = double_of(UINT64_C(0x7ff0) << 48);
    const double bad_rate[] = {nan, -nan, infinity, -infinity, -1e-3, -double_of(1)};
    const double most = double_of((UINT64_C(0x7ff0) << 48) - 1);
    const uint32_t step[] = {0, 4, 5, 50, 99, 100, 200};
    int k, s, bad = 0;
    for (s = 0; s < 7; ++s) {
        for (k = 0; k < 6; ++k)
            bad += !is_nan(kopt_cosine_lr(step[s], 5, 100, bad_rate[k], 1e-3)) +
                   !is_nan(kopt_cosine_lr(step[s], 5, 100, 1e-3, bad_rate[k]));
        bad += !is_nan(kopt_cosine_lr(step[s], 101, 100, 1e-3, 0)) + !is_nan(kopt_cosine_lr(step[s], 1, 0, 1e-3, 0));
        bad += is_nan(kopt_cosine_lr(step[s], 100, 100, most, 0)) + is_nan(kopt_cosine_lr(step[s], 5, 100, 0, most));
        bad += is_nan(kopt_cosine_lr(step[s], 0, 100, -0.0, most)) + is_nan(kopt_cosine_lr(step[s], 0, 0, most, most));
    }
    ok(!bad, "... NaN for rates that a step refuses, and for a warm-up beyond the end: %d wrong", bad);
}

int main(int argc, char **argv) {
    quick = argc > 1 && !strcmp(argv[1], "quick");
    fesetenv(FE_DFL_ENV); /* -Ofast would start with subnormals flushed: the references need them */
    isa_count = usable_isas(isas);
    check_norm();
    check_norm_edges();
    check_norm_far_apart();
    check_norm_window();
    check_norm_ranks();
    check_clipping();
    check_clip_limits();
    check_norm_refusals();
    check_scaler_trace();
    check_scaler_limits();
    check_scaler_step();
    check_scaler_clip();
    check_scaler_groups();
    check_accumulate_bits();
    check_accumulate_quality();
    check_accumulate_step();
    check_accumulate_refusals();
    check_cosine_ends();
    check_cosine();
    check_cosine_bits();
    check_cosine_refusals();
    return done();
}
