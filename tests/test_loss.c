/* test_loss.c - kopt_softmax and kopt_cross_entropy against binary64: error in ulp for any length and format, rows
   without probabilities, ignored rows, places, refusals, a table of one's own, and the same bits on every instruction
   set. Argument "quick": fewer rows. */
#define KAHAN_OPT_VMATH
#define KAHAN_OPT_IMPLEMENTATION
#include "../kahan_opt.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#if defined(__SSE2__) && !defined(__TINYC__)
#include <xmmintrin.h>
#endif

/* With it only the library computes as IEEE wants it: the bits are compared, with what other builds prove. Asked
   here, as reference.h switches it off for itself, and gcc does not define the macro again. */
#ifdef __FAST_MATH__
#define REFERENCE 0
#else
#define REFERENCE 1
#endif

#include "tap.h"
#include "reference.h"
#include "inputs.h"

enum { LONG = 1 << 20, FORMATS = 3 };

/* Of all bits with the built-in: what they have been, see check_bits. */
static const uint64_t golden = 0x571c80440dc09f58u;

/* What docs/vmath.md promises, in ulp of fp32: loss, probability; in ulp of 16 bits beyond the half of a rounding. */
static const double loss_bound = 2, softmax_bound = 3.5, gradient_bound = 4.5, half_bound = 1.0 / 2048;

static uint32_t noise = 1;
static uint32_t draw(void) { return mixed32(&noise); }

static int is_nan_word(uint32_t u) { return ref_is_nan(KOPT_F32, u); }

static size_t width(int format) { return ref_width((kopt_format)format); }

static void set(void *x, int format, size_t i, float value) {
    uint16_t half = format == KOPT_BF16 ? kopt_bf16_from_f32(value) : kopt_fp16_from_f32(value);
    if (format == KOPT_F32)
        memcpy((char *)x + 4 * i, &value, 4);
    else
        memcpy((char *)x + 2 * i, &half, 2);
}

static float get(const void *x, int format, size_t i) {
    float value;
    uint16_t half;
    if (format == KOPT_F32) {
        memcpy(&value, (const char *)x + 4 * i, 4);
        return value;
    }
    memcpy(&half, (const char *)x + 2 * i, 2);
    return format == KOPT_BF16 ? kopt_f32_from_bf16(half) : kopt_f32_from_fp16(half);
}

/* Logits about as large as `size`; some rows are sure of one value, in some values are masked. */
static void make_row(void *x, int format, size_t n, int kind) {
    static const float sizes[] = {0.01f, 1, 4, 30, 1000};
    size_t i;
    for (i = 0; i < n; ++i) {
        const int32_t sum = (int32_t)(draw() >> 10) + (int32_t)(draw() >> 10) + (int32_t)(draw() >> 10) - (3 << 21);
        volatile float value = (float)sum * (0x1p-21f * sizes[kind % 5]); /* rounded once, whatever C computes it in */
        set(x, format, i, value);
        if (kind % 7 == 5 && i % 3 == 1) set(x, format, i, ref_float(0xff800000u));
    }
    if (kind % 3 == 1) set(x, format, draw() % n, sizes[kind % 5] + 15);
}

/* ---- the reference: binary64 ------------------------------------------------------------------------------------ */

static double *terms;

typedef struct row {
    double most, sum, others; /* the sum of e^(x - most), without one of the largest in `others` */
    size_t top;
} row;

static row reference(const void *x, int format, size_t n) {
    row r;
    size_t i;
    r.top = 0, r.others = 0;
    for (i = 1; i < n; ++i)
        if (get(x, format, i) > get(x, format, r.top)) r.top = i;
    r.most = (double)get(x, format, r.top);
    for (i = 0; i < n; ++i) {
        terms[i] = exp((double)get(x, format, i) - r.most);
        if (i != r.top) r.others += terms[i];
    }
    r.sum = 1 + r.others;
    return r;
}

/* An ulp of a number as large as x with so many digits and this least exponent. */
static double ulp(double x, int digits, int least) {
    int exponent;
    frexp(x, &exponent);
    if (x == 0 || exponent < least) exponent = least;
    return ldexp(1, exponent - digits);
}

static double ulp32(double x) { return ulp(x, 24, -125); }

/* How far beyond half an ulp of the format `got` is from `want`, in such ulp; fp32: how far at all. */
static double beyond(float got, double want, int format) {
    static const int digits[] = {24, 8, 11}, least[] = {-125, -125, -13};
    const double largest = format == KOPT_FP16 ? 65504 : 0x1.fep127;
    double unit = ulp(want, digits[format], least[format]);
    if (format != KOPT_F32 && fabs(want) >= largest * (1 + 0.25 / 256)) return (double)fabsf(got) >= largest ? 0 : 1e9;
    return fabs((double)got - want) / unit - (format == KOPT_F32 ? 0 : 0.5);
}

/* ---- accuracy --------------------------------------------------------------------------------------------------- */

static unsigned char *logits, *gradient, *other;

typedef struct errors {
    double loss, softmax, gradient, half;
} errors;

static void larger(double *most, double x) {
    if (!(x <= *most)) *most = x;
}

static void measure(const kopt_vmath *vmath, int format, size_t n, int kind, errors *e) {
    static const double scales[] = {1, 1.0 / 3, 65536.0 / 7, 1e-3};
    const double scale = scales[kind & 3];
    int32_t target = kind % 4 == 1 ? 0 : (int32_t)(draw() % n);
    float loss = -1;
    double want;
    size_t i;
    row r;
    int good;
    make_row(logits, format, n, kind);
    r = reference(logits, format, n);
    if (kind % 4 == 1) target = (int32_t)r.top;
    good = kopt_cross_entropy(vmath, &loss, gradient, logits, (kopt_format)format, &target, 1, n, n, scale) == KOPT_OK;
    good &= kopt_softmax(vmath, other, logits, (kopt_format)format, 1, n, n) == KOPT_OK;
    if (!good) e->loss = 1e9;
    want = log1p(r.others) + (r.most - (double)get(logits, format, (size_t)target));
    if (isinf(want))
        larger(&e->loss, ref_bits(loss) == 0x7f800000u ? 0 : 1e9);
    else
        larger(&e->loss, fabs((double)loss - want) / ulp32(want));
    for (i = 0; i < n; ++i) {
        double p = terms[i] / r.sum, g = scale * p, off = 0;
        if (i == (size_t)target) g = -scale * (i == r.top ? r.others : r.sum - terms[i]) / r.sum;
        if (terms[i] < 0x1p-126 && format == KOPT_F32) { /* terms below the normal numbers lose digits */
            larger(&e->softmax, fabs((double)get(other, format, i) - p) / 0x1p-149);
            off = fabs((double)get(gradient, format, i) - g) / (0x1p-149 * (1 + scale));
            if (i == (size_t)target) off = beyond(get(gradient, format, i), g, format);
        } else {
            larger(format == KOPT_F32 ? &e->softmax : &e->half, beyond(get(other, format, i), p, format));
            off = beyond(get(gradient, format, i), g, format);
            if (format != KOPT_F32 && terms[i] < 0x1p-126 && i != (size_t)target) off = 0;
        }
        larger(format == KOPT_F32 ? &e->gradient : &e->half, off);
    }
}

static void check_accuracy(const kopt_vmath *vmath, const char *name, int rounds, int long_rounds, size_t longest) {
    static const size_t lengths[] = {1, 2, 3, 5, 16, 17, 31, 64, 100, 255, 256, 257, 300, 511, 1000, 4099};
    errors near_ones = {0, 0, 0, 0}, far_ones = {0, 0, 0, 0};
    int format, round;
    size_t k;
    if (!REFERENCE) return;
    noise = 1;
    for (round = 0; round < rounds; ++round)
        for (format = 0; format < FORMATS; ++format)
            for (k = 0; k < sizeof lengths / sizeof *lengths; ++k)
                measure(vmath, format, lengths[k], round * 16 + (int)k, &near_ones);
    for (format = 0; format < FORMATS; ++format)
        for (k = 100003; k <= longest; k = k * 3 + 1)
            for (round = 0; round < long_rounds; ++round) measure(vmath, format, k, round * 3 + format, &far_ones);
    ok(near_ones.loss <= loss_bound && near_ones.softmax <= softmax_bound && near_ones.gradient <= gradient_bound &&
           near_ones.half <= half_bound,
       "%s: loss %.2f ulp off at most, softmax %.2f, gradient %.2f; in 16 bits %.5f ulp beyond the half", name,
       near_ones.loss, near_ones.softmax, near_ones.gradient, near_ones.half);
    ok(far_ones.loss <= loss_bound && far_ones.softmax <= softmax_bound && far_ones.gradient <= gradient_bound &&
           far_ones.half <= half_bound,
       "%s, 100,003 and more columns: %.2f, %.2f, %.2f, %.5f", name, far_ones.loss, far_ones.softmax, far_ones.gradient,
       far_ones.half);
}

/* ---- the same bits ---------------------------------------------------------------------------------------------- */

static uint64_t hash_of(uint64_t hash, const void *x, int format, size_t n) {
    size_t i;
    for (i = 0; i < n; ++i) hash = fnv(hash, ref_bits(get(x, format, i)));
    return hash;
}

static uint64_t hash_rows(const kopt_vmath *vmath) {
    static const size_t lengths[] = {200, 256, 257, 777, 2048, 5003}; /* after 1 to 40 */
    uint64_t hash = FNV_START;
    int format, kind = 0;
    size_t k;
    noise = 9;
    for (format = 0; format < FORMATS; ++format)
        for (k = 0; k < 46; ++k) {
            size_t n = k < 40 ? k + 1 : lengths[k - 40], i, r;
            int32_t target[3];
            float loss[3] = {-1, -1, -1};
            for (r = 0; r < 3; ++r)
                make_row(logits + r * n * width(format), format, n, kind++), target[r] = (int32_t)(draw() % n);
            if (k & 1) target[1] = -1;
            for (i = 0; i < n && k == 16; ++i) set(logits, format, i, 0); /* all alike */
            kopt_softmax(vmath, other, logits, (kopt_format)format, 3, n, n);
            hash = hash_of(hash, other, format, 3 * n);
            kopt_cross_entropy(vmath, loss, logits, logits, (kopt_format)format, target, 3, n, n, 1000.0 / 3);
            hash = hash_of(hash_of(hash, logits, format, 3 * n), loss, KOPT_F32, 3);
        }
    return hash;
}

static void check_bits(void) {
    int isa;
    FOR_EACH_ISA(isa) {
        uint64_t hash;
        hash = hash_rows(kopt_vmath_builtin());
        ok(hash == golden, "the bits with %s: %016llx", kopt_vmath_builtin()->name, (unsigned long long)hash);
    }
}

/* ---- rows that are special -------------------------------------------------------------------------------------- */

static void check_specials(void) {
    static const uint32_t bad[4][4] = {{0x3f800000, 0x40000000, 0x7fc00000, 0}, /* NaN; +inf, one and two; nothing */
                                       {0x3f800000, 0x7f800000, 0x40400000, 0x40800000},
                                       {0x7f800000, 0, 0x7f800000, 0xff800000},
                                       {0xff800000, 0xff800000, 0xff800000, 0xff800000}};
    static const float largest[] = {65504, -65504, -65504, -65504};
    const float masked = ref_float(0xff800000u);
    int format, isa, wrong = 0;
    size_t k, i, n;
    FOR_EACH_ISA(isa) {
        for (format = 0; format < FORMATS; ++format)
            for (n = 4; n <= 400; n = n * 3 + 1) {
                const uint32_t canonical = 0x7fc00000u;
                float loss;
                int32_t target;
                for (k = 0; k < 4; ++k) {
                    for (i = 0; i < n; ++i)
                        set(logits, format, i, i < 4 ? ref_float(bad[k][i]) : ref_float(k == 3 ? 0xff800000u : 0));
                    if (k == 0 && n > 4)
                        set(logits, format, 2, 0), set(logits, format, n - 1, ref_float(0xffc00000u)); /* at the end */
                    target = 3, loss = 0;
                    wrong += kopt_cross_entropy(NULL, &loss, gradient, logits, (kopt_format)format, &target, 1, n, n,
                                                2) != KOPT_OK;
                    wrong += kopt_softmax(NULL, other, logits, (kopt_format)format, 1, n, n) != KOPT_OK;
                    wrong += !is_nan_word(ref_bits(loss));
                    for (i = 0; i < n; ++i) {
                        wrong += ref_bits(get(other, format, i)) != canonical ||
                                 ref_bits(get(gradient, format, i)) != canonical;
                    }
                    target = -5; /* ignored, whatever is in it */
                    wrong += kopt_cross_entropy(NULL, &loss, gradient, logits, (kopt_format)format, &target, 1, n, n,
                                                2) != KOPT_OK;
                    wrong += ref_bits(loss) != 0;
                    for (i = 0; i < n; ++i) wrong += ref_bits(get(gradient, format, i)) != 0;
                }
                /* a target that is masked: loss +inf, gradient -scale; masked others: 0 */
                for (i = 0; i < n; ++i) set(logits, format, i, i == 0 ? ref_float(0x40400000u) : masked);
                target = 2;
                wrong += kopt_cross_entropy(NULL, &loss, gradient, logits, (kopt_format)format, &target, 1, n, n, 2) !=
                         KOPT_OK;
                wrong += ref_bits(loss) != 0x7f800000u;
                for (i = 0; i < n; ++i)
                    wrong += ref_bits(get(gradient, format, i)) != ref_bits(i == 0 ? 2.0f : i == 2 ? -2.0f : 0.0f);
                /* sure: nothing overflows, probability 1 and 0, loss 0 or the whole distance */
                for (i = 0; i < n; ++i) set(logits, format, i, largest[i < 4 ? i : 3]);
                target = 0;
                wrong += kopt_cross_entropy(NULL, &loss, gradient, logits, (kopt_format)format, &target, 1, n, n, 2) !=
                         KOPT_OK;
                wrong += ref_bits(loss) << 1 != 0;
                for (i = 0; i < n; ++i) wrong += ref_bits(get(gradient, format, i)) << 1 != 0;
                target = 1;
                wrong +=
                    kopt_cross_entropy(NULL, &loss, NULL, logits, (kopt_format)format, &target, 1, n, n, 2) != KOPT_OK;
                wrong += ref_bits(loss) != ref_bits(get(logits, format, 0) - get(logits, format, 1));
            }
    }
    ok(!wrong, "NaN, infinities, masks and sure rows: %d wrong", wrong);
    {
        static float far_apart[] = {3e38f, -3e38f, 0, 3e38f};
        static int32_t targets[] = {0, 1};
        float loss[2], p[4];
        kopt_cross_entropy(NULL, loss, NULL, far_apart, KOPT_F32, targets, 1, 4, 4, 1);
        kopt_cross_entropy(NULL, loss + 1, NULL, far_apart, KOPT_F32, targets + 1, 1, 4, 4, 1);
        kopt_softmax(NULL, p, far_apart, KOPT_F32, 1, 4, 4);
        ok(ref_bits(loss[0]) == 0x3f317218u && ref_bits(loss[1]) == 0x7f800000u && ref_bits(p[0]) == 0x3f000000u &&
               ref_bits(p[1]) == 0 && ref_bits(p[2]) == 0 && ref_bits(p[3]) == 0x3f000000u,
           "differences beyond fp32");
    }
}

/* ---- places ----------------------------------------------------------------------------------------------------- */

static void check_places(void) {
    enum { ROWS = 5 };
    static const size_t columns[] = {1, 3, 16, 40, 256, 300};
    int format, wrong = 0;
    size_t k, r, i;
    noise = 4;
    for (format = 0; format < FORMATS; ++format)
        for (k = 0; k < 6; ++k) {
            const size_t n = columns[k], stride = n + 3, size = width(format), all = ((ROWS - 1) * stride + n) * size,
                         at = size * (k % 3);
            int32_t target[ROWS];
            float loss[ROWS], alone;
            for (r = 0; r < ROWS; ++r)
                make_row(logits + (r * stride) * size, format, n, (int)(k + r)), target[r] = (int32_t)(draw() % n);
            for (r = 0; r + 1 < ROWS; ++r)
                for (i = n; i < stride; ++i)
                    set(logits, format, r * stride + i, ref_float(0x7f800000u)); /* between rows: not read */
            target[2] = -1;
            memset(gradient, 0x5a, all + 64);
            wrong += kopt_cross_entropy(NULL, loss, gradient + at, logits, (kopt_format)format, target, ROWS, n, stride,
                                        0.25) != KOPT_OK;
            for (i = 0; i < at; ++i) wrong += gradient[i] != 0x5a;
            for (i = at + all; i < all + 64; ++i) wrong += gradient[i] != 0x5a;
            for (r = 0; r < ROWS; ++r) {
                for (i = n * size; i < stride * size && r + 1 < ROWS; ++i)
                    wrong += gradient[at + r * stride * size + i] != 0x5a;
                wrong += kopt_cross_entropy(NULL, &alone, other, logits + r * stride * size, (kopt_format)format,
                                            target + r, 1, n, n, 0.25) != KOPT_OK;
                wrong += memcmp(other, gradient + at + r * stride * size, n * size) != 0 ||
                         ref_bits(alone) != ref_bits(loss[r]);
                wrong += kopt_cross_entropy(NULL, &alone, NULL, logits + r * stride * size, (kopt_format)format,
                                            target + r, 1, n, n, 99) != KOPT_OK;
                wrong += ref_bits(alone) != ref_bits(loss[r]);
                wrong += kopt_cross_entropy(NULL, NULL, other, logits + r * stride * size, (kopt_format)format,
                                            target + r, 1, n, n, 0.25) != KOPT_OK;
                wrong += memcmp(other, gradient + at + r * stride * size, n * size) != 0;
            }
            memcpy(other, logits, all); /* in place */
            wrong += kopt_cross_entropy(NULL, loss, other, other, (kopt_format)format, target, ROWS, n, stride, 0.25) !=
                     KOPT_OK;
            for (r = 0; r < ROWS; ++r)
                wrong += memcmp(other + r * stride * size, gradient + at + r * stride * size, n * size) != 0;
            for (r = 0; r + 1 < ROWS; ++r)
                wrong += memcmp(other + (r * stride + n) * size, logits + (r * stride + n) * size, 3 * size) != 0;
            wrong += kopt_softmax(NULL, gradient, logits, (kopt_format)format, ROWS, n, stride) != KOPT_OK;
            wrong += kopt_softmax(NULL, logits, logits, (kopt_format)format, ROWS, n, stride) != KOPT_OK;
            for (r = 0; r < ROWS; ++r)
                wrong += memcmp(logits + r * stride * size, gradient + r * stride * size, n * size) != 0;
        }
    ok(!wrong, "rows apart and in place, only loss, only gradient, nothing between them: %d wrong", wrong);
}

static void check_refusals(void) {
    static float x[64], g[64], loss[8];
    static int32_t target[8] = {0, 1, 2, 3, 0, 1, 2, 3}, nowhere[3] = {-1, -1, -1};
    const size_t huge = ~(size_t)0 / 4;
    const double nan_scale = (double)ref_float(0x7fc00000u);
    int32_t last = target[7];
    size_t i;
    for (i = 0; i < 64; ++i) x[i] = (float)i, g[i] = 7;
    for (i = 0; i < 8; ++i) loss[i] = 7;
    ok(kopt_cross_entropy(NULL, NULL, NULL, x, KOPT_F32, target, 8, 4, 4, 1) == KOPT_ERROR_NULL &&
           kopt_cross_entropy(NULL, loss, g, NULL, KOPT_F32, target, 8, 4, 4, 1) == KOPT_ERROR_NULL &&
           kopt_cross_entropy(NULL, loss, g, x, KOPT_F32, NULL, 8, 4, 4, 1) == KOPT_ERROR_NULL &&
           kopt_softmax(NULL, NULL, x, KOPT_F32, 1, 1, 1) == KOPT_ERROR_NULL &&
           kopt_softmax(NULL, x, NULL, KOPT_F32, 1, 1, 1) == KOPT_ERROR_NULL &&
           kopt_cross_entropy(NULL, NULL, NULL, NULL, KOPT_F32, NULL, 0, 4, 4, 1) == KOPT_OK &&
           kopt_softmax(NULL, NULL, NULL, KOPT_F32, 7, 0, 5) == KOPT_OK &&
           kopt_softmax(NULL, NULL, NULL, KOPT_F32, 0, 5, 5) == KOPT_OK,
       "NULL is refused, but for nothing to do");
    ok(kopt_cross_entropy(NULL, loss, g, x, KOPT_Q8, target, 8, 4, 4, 1) == KOPT_ERROR_OPTION &&
           kopt_cross_entropy(NULL, loss, g, x, (kopt_format)-1, target, 8, 4, 4, 1) == KOPT_ERROR_OPTION &&
           kopt_softmax(NULL, g, x, KOPT_SIGN, 8, 4, 4) == KOPT_ERROR_OPTION,
       "formats that are none");
    ok(kopt_cross_entropy(NULL, loss, g, x, KOPT_F32, target, 8, 4, 3, 1) == KOPT_ERROR_BOUNDS &&
           kopt_softmax(NULL, g, x, KOPT_F32, huge, 4, 4) == KOPT_ERROR_BOUNDS &&
           kopt_softmax(NULL, g, x, KOPT_F32, 2, 4, huge) == KOPT_ERROR_BOUNDS &&
           kopt_softmax(NULL, g, x, KOPT_F32, huge / 16, huge / 16, huge / 16) == KOPT_ERROR_BOUNDS &&
           kopt_softmax(NULL, g, x, KOPT_F32, 2, huge, huge) == KOPT_ERROR_BOUNDS,
       "a stride below the columns, sizes beyond memory");
    target[7] = 4;
    ok(kopt_cross_entropy(NULL, loss, g, x, KOPT_F32, target, 8, 4, 4, 1) == KOPT_ERROR_BOUNDS &&
           kopt_cross_entropy(NULL, loss, NULL, x, KOPT_F32, target, 8, 4, 4, 1) == KOPT_ERROR_BOUNDS,
       "a target beyond the columns");
    target[7] = last;
    ok(kopt_cross_entropy(NULL, loss, NULL, NULL, KOPT_F32, nowhere, 3, 0, 7, 1) == KOPT_OK && ref_bits(loss[0]) == 0 &&
           ref_bits(loss[2]) == 0 && ref_bits(loss[3]) == ref_bits(7.0f) &&
           kopt_cross_entropy(NULL, loss, g, NULL, KOPT_F32, target, 8, 0, 7, 1) == KOPT_ERROR_BOUNDS,
       "rows of no columns: a loss of 0 where no target is asked for");
    loss[0] = loss[1] = loss[2] = 7;
    ok(kopt_cross_entropy(NULL, loss, g, x, KOPT_F32, target, 8, 4, 4, 1e39) == KOPT_ERROR_RANGE &&
           kopt_cross_entropy(NULL, loss, NULL, x, KOPT_F32, target, 8, 4, 4, nan_scale) == KOPT_ERROR_RANGE,
       "a scale that is no finite float");
    ok(kopt_cross_entropy(NULL, loss, x + 1, x, KOPT_F32, target, 8, 4, 4, 1) == KOPT_ERROR_OVERLAP &&
           kopt_cross_entropy(NULL, x, g, x, KOPT_F32, target, 8, 4, 4, 1) == KOPT_ERROR_OVERLAP &&
           kopt_cross_entropy(NULL, g + 31, g, x, KOPT_F32, target, 8, 4, 4, 1) == KOPT_ERROR_OVERLAP &&
           kopt_cross_entropy(NULL, (float *)(void *)target, g, x, KOPT_F32, target, 8, 4, 4, 1) ==
               KOPT_ERROR_OVERLAP &&
           kopt_cross_entropy(NULL, loss, target, x, KOPT_F32, target, 8, 4, 4, 1) == KOPT_ERROR_OVERLAP &&
           kopt_softmax(NULL, x, x + 4, KOPT_F32, 2, 4, 4) == KOPT_ERROR_OVERLAP,
       "overlap");
    for (i = 0; i < 64; ++i)
        if (ref_bits(g[i]) != ref_bits(7.0f) || ref_bits(x[i]) != ref_bits((float)i)) break;
    ok(i == 64 && ref_bits(loss[0]) == ref_bits(7.0f) && ref_bits(loss[7]) == ref_bits(7.0f),
       "and nothing was written");
    memcpy(g, target, 8 * sizeof *target);
    ok(kopt_cross_entropy(NULL, loss, g + 8, x, KOPT_F32, (const int32_t *)(const void *)g, 8, 4, 4, 1) == KOPT_OK,
       "a gradient right behind the targets is no overlap");
}

static void check_environment(void) {
#if defined(__SSE2__) && !defined(__TINYC__) && !defined(KAHAN_OPT_NO_SIMD)
    static const float x[5] = {1, 1.00001f, -86.5f, -88, 0.3f};
    static const int32_t target = 2;
    float p[2][5], g[2][5], loss[2];
    unsigned before = _mm_getcsr(), after, hostile = 0xdfc0u; /* masks, FTZ, DAZ, upwards */
    kopt_softmax(NULL, p[0], x, KOPT_F32, 1, 5, 5);
    kopt_cross_entropy(NULL, loss, g[0], x, KOPT_F32, &target, 1, 5, 5, 0.3);
    _mm_setcsr(hostile);
    kopt_softmax(NULL, p[1], x, KOPT_F32, 1, 5, 5);
    kopt_cross_entropy(NULL, loss + 1, g[1], x, KOPT_F32, &target, 1, 5, 5, 0.3);
    after = _mm_getcsr();
    _mm_setcsr(before);
    ok((after | 0x3f) == (hostile | 0x3f) && !memcmp(p[0], p[1], sizeof p[0]) && !memcmp(g[0], g[1], sizeof g[0]) &&
           ref_bits(loss[0]) == ref_bits(loss[1]),
       "the caller's FP environment changes nothing and is put back");
#else
    skip("the caller's FP environment: this machine has no MXCSR");
#endif
}

/* libm's, in the place of somebody's vector library. */
ARRAYS_BY(own_exp, expf)
ARRAYS_BY(own_log, logf)

int main(int count, char **arguments) {
    const int quick = count > 1 && !strcmp(arguments[1], "quick");
    kopt_vmath own = {"own", NULL, NULL, NULL, NULL, NULL, NULL, NULL};
    int isa;
    own.exp = own_exp, own.log = own_log;
    logits = malloc(4 * LONG + 64), gradient = malloc(4 * LONG + 64), other = malloc(4 * LONG + 64),
    terms = malloc(LONG * sizeof *terms);
    if (logits == NULL || gradient == NULL || other == NULL || terms == NULL) return 2;
    check_bits();
    check_specials();
    check_places();
    check_refusals();
    check_environment();
    check_accuracy(kopt_vmath_builtin(), kopt_vmath_builtin()->name, quick ? 5 : 60, quick ? 1 : 4,
                   quick ? 100003 : LONG);
    check_accuracy(&own, "a table of one's own", quick ? 2 : 20, quick ? 1 : 4, 100003);
    FOR_EACH_ISA(isa)
    if (kopt_vmath_sleef() != NULL) /* twice the errors of libm's */
        check_accuracy(kopt_vmath_sleef(), kopt_vmath_sleef()->name, quick ? 2 : 20, quick ? 1 : 4, 100003);
    free(logits), free(gradient), free(other), free(terms);
    return done();
}
