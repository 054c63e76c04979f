/* test_noise.c - random numbers: each against binary64 and an own Philox, the same bits in any slicing and on every
   instruction set, distributions against statistical bounds (at fixed seeds, so that nothing flickers).
   Argument "quick": fewer numbers. "tail" COUNT: the numbers beyond 6.4 deviations among the first 2^COUNT. */
#define KAHAN_OPT_VMATH
#define KAHAN_OPT_IMPLEMENTATION
#include "../../kahan_opt.h"

#include <math.h>
#include <stdlib.h>

#include "tap.h"
#include "reference.h"
#include "inputs.h"

#ifdef __FAST_MATH__ /* see test_vmath.c */
#define REFERENCE 0
#else
#define REFERENCE 1
#endif

enum { MOST = 1 << 20, NOISE = 5 };

static const uint64_t golden = 0xdd67749871ca2818u; /* of fills of every kind: what they have been, see check_bits */

static const double normal_bound = 4; /* ulp, see docs/numerics.md */

static float *z, *y;
static size_t count; /* of the numbers in most tests of distributions */

/* ---- the reference ---------------------------------------------------------------------------------------------- */

static void words_of(uint32_t out[4], uint64_t seed, uint32_t step, uint32_t id, uint64_t e) {
    uint32_t key[2], counter[4];
    key[0] = (uint32_t)seed, key[1] = (uint32_t)(seed >> 32);
    counter[0] = (uint32_t)(e / 4), counter[1] = (uint32_t)(e / 4 >> 32) + ((uint32_t)NOISE << 28);
    counter[2] = step, counter[3] = id;
    ref_philox(7, counter, key, out);
}

static double normal_of(uint64_t seed, uint32_t step, uint32_t id, uint64_t e) {
    const double pi = 3.14159265358979323846;
    uint32_t x[4], n;
    double u, r, f;
    words_of(x, seed, step, id, e);
    u = ((double)x[e & 2] + 0.5) * 0x1p-32;
    r = sqrt(-2 * (u > 0.5 ? log1p(-((double)(0xffffffffu - x[e & 2]) + 0.5) * 0x1p-32) : log(u)));
    n = x[(e & 2) + 1] >> 30, f = ((double)(x[(e & 2) + 1] & 0x3fffffff) - 0x1p29 + 0.5) * 0x1p-31;
    if (e & 1) return r * (n == 0 ? sin(pi * f) : n == 1 ? cos(pi * f) : n == 2 ? -sin(pi * f) : -cos(pi * f));
    return r * (n == 0 ? cos(pi * f) : n == 1 ? -sin(pi * f) : n == 2 ? -cos(pi * f) : sin(pi * f));
}

static double off_by(float got, double want) /* in ulp of fp32 */
{
    int exponent;
    frexp(want, &exponent);
    return fabs((double)got - want) / ldexp(1, exponent - 24);
}

static void check_words(void) {
    static const uint64_t first[] = {0, 1, 255, 256, 1000003, (UINT64_C(1) << 34) + 77, (UINT64_C(1) << 54) - 5000};
    double worst = 0;
    size_t k, i;
    int wrong = 0;
    for (k = 0; k < sizeof first / sizeof *first && REFERENCE; ++k) {
        const uint64_t seed = k * UINT64_C(0x9e3779b97f4a7c15);
        const uint32_t step = (uint32_t)k * 77, id = (uint32_t)k * 12345 + 1;
        const size_t n = k == 4 ? count / 4 : 4000;
        kopt_normal(z, KOPT_F32, n, 0, 1, (kopt_random_key){seed, step, id, first[k]});
        for (i = 0; i < n; ++i) {
            double off = off_by(z[i], normal_of(seed, step, id, first[k] + i));
            if (!(off <= worst)) worst = off;
        }
        kopt_uniform(z, KOPT_F32, n, -1, 1, (kopt_random_key){seed, step, id, first[k]});
        for (i = 0; i < n; ++i) {
            uint32_t x[4];
            words_of(x, seed, step, id, first[k] + i);
            wrong +=
                ref_bits(z[i]) != ref_bits((float)((int)(2 * (x[(first[k] + i) & 3] >> 8)) + 1 - (1 << 24)) * 0x1p-24f);
        }
    }
    ok(worst <= normal_bound && !wrong,
       "each number is that of its words: normal %.2f ulp off at most, uniform %d wrong", worst, wrong);
}

/* ---- bits ------------------------------------------------------------------------------------------------------- */

static uint64_t hash_of(uint64_t hash, const void *x, size_t size, size_t n) {
    size_t i;
    for (i = 0; i < n; ++i) hash = fnv(hash, ref_get(x, size, i));
    return hash;
}

/* All kinds of fills of n numbers from index first on. */
static kopt_result fill(int kind, void *out, size_t n, uint64_t first) {
    switch (kind) {
    case 0: return kopt_normal(out, KOPT_F32, n, 0, 1, (kopt_random_key){1, 2, 3, first});
    case 1: return kopt_normal(out, KOPT_BF16, n, 0.5, 2, (kopt_random_key){1, 2, 4, first});
    case 2: return kopt_normal(out, KOPT_FP16, n, -1, 1e-3, (kopt_random_key){1, 2, 5, first});
    case 3: return kopt_uniform(out, KOPT_F32, n, -3, 7, (kopt_random_key){1, 2, 6, first});
    default: return kopt_uniform(out, KOPT_BF16, n, -0.1, 0.1, (kopt_random_key){1, 2, 7, first});
    }
}

enum { FILLS = 5, BITS = 3000 };
static const size_t fill_size[FILLS] = {4, 2, 2, 4, 2};

static void check_bits(void) {
    int isa, kind;
    FOR_EACH_ISA(isa) {
        uint64_t hash = FNV_START;
        int wrong = 0;
        for (kind = 0; kind < FILLS; ++kind) {
            const size_t size = fill_size[kind];
            unsigned char *part = (unsigned char *)y + 3; /* no alignment */
            size_t at, n, k;
            wrong += fill(kind, z, BITS, 1000) != KOPT_OK;
            hash = hash_of(hash, z, size, BITS);
            memset(y, 0x5a, 4 * BITS + 64);
            for (at = 0; at < BITS; at += n) {
                n = (at * 7 + 13) % 301;
                if (n > BITS - at) n = BITS - at;
                wrong += fill(kind, part + at * size, n, 1000 + at) != KOPT_OK;
                for (k = 0; k < 8; ++k) wrong += part[(at + n) * size + k] != 0x5a;
                if (n == 0) n = 1, fill(kind, part + at * size, 1, 1000 + at);
            }
            wrong += memcmp(part, z, BITS * size) != 0;
        }
        ok(!wrong && hash == golden, "%s: fills of every kind, in any slicing: %016llx, %d wrong",
           kopt_isa_name((kopt_isa)isa), (unsigned long long)hash, wrong);
    }
}

/* mean + deviation * z in fp32, then rounded once. */
static void check_formats(void) {
    static uint16_t half[10000];
    size_t i;
    int format, wrong = 0;
    kopt_normal(z, KOPT_F32, 10000, 0, 1, (kopt_random_key){5, 6, 7, 8});
    for (format = 0; format <= KOPT_FP16; ++format) {
        const double mean = format == KOPT_BF16 ? 0 : 0.3, deviation = format == KOPT_BF16 ? 1 : 1e-6;
        void *out = format == KOPT_F32 ? (void *)y : (void *)half;
        wrong +=
            kopt_normal(out, (kopt_format)format, 10000, mean, deviation, (kopt_random_key){5, 6, 7, 8}) != KOPT_OK;
        for (i = 0; i < 10000; ++i)
            wrong += ref_get(out, ref_width((kopt_format)format), i) !=
                     ref_narrow((kopt_format)format, ref_bits(ref_add((float)mean, ref_mul((float)deviation, z[i]))));
    }
    ok(!wrong, "mean + deviation * number, rounded once: %d wrong", wrong);
}

/* ---- distributions ---------------------------------------------------------------------------------------------- */

static double normal_below(double x) { return erfc(-x * 0.70710678118654752440) / 2; }

static int compare(const void *a, const void *b) {
    const float x = *(const float *)a, w = *(const float *)b;
    return (x > w) - (x < w);
}

static double uniform_below(double x) { return (x + 1) / 2; }

/* Kolmogorov and Smirnov: sqrt(n) times the largest distance of the distribution functions. Above 2.2 with p = 1e-4. */
static double distance(float *x, size_t n, double (*below)(double)) {
    double most = 0;
    size_t i;
    qsort(x, n, sizeof *x, compare);
    for (i = 0; i < n; ++i) {
        double p = below((double)x[i]), high = (double)(i + 1) / (double)n - p, low = p - (double)i / (double)n;
        if (high > most) most = high;
        if (low > most) most = low;
    }
    return most * sqrt((double)n);
}

typedef struct moments {
    double m[5]; /* powers 1 .. 4 of x, in deviations of their means */
} moments;

static moments moments_of(const float *x, size_t n) {
    static const double mean[5] = {1, 0, 1, 0, 3}, variance[5] = {1, 1, 2, 15, 96};
    moments r = {{0, 0, 0, 0, 0}};
    size_t i;
    int k;
    for (i = 0; i < n; ++i) {
        double v = (double)x[i], p = 1;
        for (k = 1; k < 5; ++k) r.m[k] += p *= v;
    }
    for (k = 1; k < 5; ++k) r.m[k] = (r.m[k] / (double)n - mean[k]) / sqrt(variance[k] / (double)n);
    return r;
}

static void check_normal(void) {
    static const double edges[] = {1, 2, 3, 4, 4.5, 5};
    double tail[6] = {0}, worst = 0, all = 0;
    size_t k, i;
    int good = 1, tries;
    moments m;
    kopt_normal(z, KOPT_F32, count, 0, 1, (kopt_random_key){0, 0, 0, 0});
    m = moments_of(z, count);
    for (k = 1; k < 5; ++k) good &= fabs(m.m[k]) < 4;
    ok(good, "mean, variance, skewness, kurtosis of %zu: %.2f, %.2f, %.2f, %.2f deviations off", count, m.m[1], m.m[2],
       m.m[3], m.m[4]);
    worst = distance(z, count, normal_below);
    ok(worst < 2.2, "Kolmogorov and Smirnov: %.2f", worst);
    for (tries = 0; tries < 16; ++tries) { /* the tails, of 16 seeds */
        kopt_normal(z, KOPT_F32, count, 0, 1, (kopt_random_key){(uint64_t)tries + 100, 1, 1, 0});
        for (i = 0; i < count; ++i)
            for (k = 0; k < 6; ++k) tail[k] += fabs((double)z[i]) > edges[k];
        all += (double)count;
    }
    for (good = 1, k = 0; k < 6; ++k) {
        const double want = all * 2 * normal_below(-edges[k]), off = (tail[k] - want) / sqrt(want);
        good &= fabs(off) < (want < 20 ? 6 : 4.5);
        note("beyond %.1f deviations: %.0f of %.0f, expected %.1f (%+.2f)", edges[k], tail[k], all, want, off);
    }
    ok(good, "the tails have as many as they should");
    kopt_normal(z, KOPT_F32, 1, 0, 1,
                (kopt_random_key){0, 0, 0, UINT64_C(7433237650)}); /* the largest of the first 2^34: "tail 34" */
    ok((double)z[0] < -6.58 && off_by(z[0], normal_of(0, 0, 0, UINT64_C(7433237650))) <= normal_bound, "far out: %.9g",
       (double)z[0]);
}

/* Correlations of x and |x| with those of others, in deviations of theirs. */
static double related(const float *a, const float *b, size_t n) {
    double ab = 0, size = 0;
    const double mean = 0.79788456080286535588; /* of |x| */
    size_t i;
    for (i = 0; i < n; ++i) {
        const double p = (double)a[i], q = (double)b[i];
        ab += p * q;
        size += (fabs(p) - mean) * (fabs(q) - mean);
    }
    ab = fabs(ab) / sqrt((double)n), size = fabs(size) / (1 - mean * mean) / sqrt((double)n);
    return ab > size ? ab : size;
}

static void check_independence(void) {
    static const size_t lags[] = {1, 2, 3, 4, 5, 7, 8, 16, 63, 64, 65, 128, 255, 256, 257, 1024};
    const size_t n = count / 2;
    double worst = 0, x;
    size_t k;
    kopt_normal(z, KOPT_F32, n + 1024, 0, 1, (kopt_random_key){7, 7, 7, 0});
    for (k = 0; k < sizeof lags / sizeof *lags; ++k) {
        x = related(z, z + lags[k], n);
        if (x > worst) worst = x;
    }
    ok(worst < 4.5, "neighbours up to 1024 apart are not related: %.2f deviations at most", worst);
    for (worst = 0, k = 0; k < 12; ++k) {
        const uint64_t seed = k < 3 ? 7 + (UINT64_C(1) << 31 * k) : 7;
        const uint32_t step = k >= 3 && k < 6 ? 7 ^ (1u << 15 * (k - 3)) : 7,
                       id = k >= 6 && k < 9 ? 7 ^ (1u << 15 * (k - 6)) : 7;
        const uint64_t first = k >= 9 ? UINT64_C(1) << (k == 9 ? 20 : k == 10 ? 34 : 53) : 0;
        kopt_normal(y, KOPT_F32, n, 0, 1, (kopt_random_key){seed, step, id, first});
        x = related(z, y, n);
        if (x > worst) worst = x;
    }
    ok(worst < 4.5, "nor are seeds, steps, ids, places: %.2f", worst);
}

static void check_uniform(void) {
    double mean = 0, square = 0, d;
    size_t i;
    int wrong = 0;
    kopt_uniform(z, KOPT_F32, count, -1, 1, (kopt_random_key){3, 0, 0, 0});
    for (i = 0; i < count; ++i)
        mean += (double)z[i], square += (double)z[i] * (double)z[i],
            wrong += !(fabs((double)z[i]) < 1 && fabs((double)z[i]) > 0);
    mean *= sqrt(3 / (double)count), square = (square / (double)count - 1.0 / 3) / sqrt(4.0 / 45 / (double)count);
    d = distance(z, count, uniform_below);
    ok(!wrong && fabs(mean) < 4 && fabs(square) < 4 && d < 2.2,
       "uniform: mean %.2f, variance %.2f deviations off, distance %.2f, %d outside", mean, square, d, wrong);
    wrong = kopt_uniform(y, KOPT_BF16, 1000, 5, 5, (kopt_random_key){3, 0, 0, 0}) != KOPT_OK;
    for (i = 0; i < 1000; ++i) wrong += ref_get(y, 2, i) != 0x40a0;
    wrong += kopt_uniform(y, KOPT_F32, 1000, -3e38, 3e38, (kopt_random_key){3, 0, 0, 0}) != KOPT_OK;
    for (i = 0; i < 1000; ++i) wrong += !ref_is_finite(KOPT_F32, ref_bits(y[i]));
    ok(!wrong, "uniform on a point, on all floats: %d wrong", wrong);
}

/* ---- refusals --------------------------------------------------------------------------------------------------- */

static void check_refusals(void) {
    const double nan_value = (double)ref_float(0x7fc00000);
    const uint64_t end = UINT64_C(1) << 54;
    float x[4] = {7, 7, 7, 7};
    ok(kopt_normal(NULL, KOPT_F32, 1, 0, 1, (kopt_random_key){0, 0, 0, 0}) == KOPT_ERROR_NULL &&
           kopt_normal(NULL, KOPT_F32, 0, 0, 1, (kopt_random_key){0, 0, 0, 0}) == KOPT_OK &&
           kopt_normal(x, KOPT_Q8, 1, 0, 1, (kopt_random_key){0, 0, 0, 0}) == KOPT_ERROR_OPTION &&
           kopt_normal(x, (kopt_format)-1, 1, 0, 1, (kopt_random_key){0, 0, 0, 0}) == KOPT_ERROR_OPTION &&
           kopt_normal(x, KOPT_F32, 1, nan_value, 1, (kopt_random_key){0, 0, 0, 0}) == KOPT_ERROR_RANGE &&
           kopt_normal(x, KOPT_F32, 1, 0, -1, (kopt_random_key){0, 0, 0, 0}) == KOPT_ERROR_RANGE &&
           kopt_normal(x, KOPT_F32, 1, 0, 1e39, (kopt_random_key){0, 0, 0, 0}) == KOPT_ERROR_RANGE &&
           kopt_normal(x, KOPT_F32, 1, 0, 1, (kopt_random_key){0, 0, 0, end}) == KOPT_ERROR_BOUNDS &&
           kopt_normal(x, KOPT_F32, 2, 0, 1, (kopt_random_key){0, 0, 0, end - 1}) == KOPT_ERROR_BOUNDS &&
           kopt_normal(x, KOPT_F32, ~(size_t)0, 0, 1, (kopt_random_key){0, 0, 0, 0}) == KOPT_ERROR_BOUNDS,
       "normal: NULL, formats, ranges, indices");
    ok(kopt_normal(x, KOPT_F32, 1, 3.1e38, 0, (kopt_random_key){0, 0, 0, 0}) == KOPT_ERROR_RANGE &&
           kopt_normal(x, KOPT_F32, 1, -3.1e38, 0, (kopt_random_key){0, 0, 0, 0}) == KOPT_ERROR_RANGE &&
           kopt_normal(x, KOPT_F32, 1, 0, 3.1e38, (kopt_random_key){0, 0, 0, 0}) == KOPT_ERROR_RANGE,
       "normal: no means and deviations beyond 3e38");
    ok(kopt_normal(x + 2, KOPT_F32, 1, -3e38, 0, (kopt_random_key){0, 0, 0, end - 1}) == KOPT_OK &&
           ref_bits(x[2]) == ref_bits((float)-3e38) &&
           kopt_normal(x + 2, KOPT_F32, 2, 3e38, 0, (kopt_random_key){0, 0, 0, end - 2}) == KOPT_OK &&
           ref_bits(x[3]) == ref_bits((float)3e38),
       "normal: these, and the last indices below 2^54");
    ok(kopt_uniform(x, KOPT_F32, 1, 1, 0, (kopt_random_key){0, 0, 0, 0}) == KOPT_ERROR_RANGE &&
           kopt_uniform(x, KOPT_F32, 1, 0, nan_value, (kopt_random_key){0, 0, 0, 0}) == KOPT_ERROR_RANGE &&
           kopt_uniform(x, KOPT_F32, 1, -1e39, 0, (kopt_random_key){0, 0, 0, 0}) == KOPT_ERROR_RANGE &&
           kopt_uniform(x, KOPT_F32, 1, -3.1e38, 1e38, (kopt_random_key){0, 0, 0, 0}) == KOPT_ERROR_RANGE &&
           kopt_uniform(x, KOPT_F32, 1, -1e38, 3.1e38, (kopt_random_key){0, 0, 0, 0}) == KOPT_ERROR_RANGE &&
           kopt_uniform(NULL, KOPT_F32, 1, 0, 1, (kopt_random_key){0, 0, 0, 0}) == KOPT_ERROR_NULL,
       "uniform: ranges, NULL");
    ok(ref_bits(x[0]) == ref_bits(7) && ref_bits(x[1]) == ref_bits(7), "and nothing was written");
}

int main(int arguments, char **argument) {
    const int quick = arguments > 1 && !strcmp(argument[1], "quick");
    count = quick ? 1 << 16 : MOST;
    z = malloc(4 * MOST + 64), y = malloc(4 * MOST + 64);
    if (z == NULL || y == NULL) return 2;
    if (arguments > 2 && !strcmp(argument[1], "tail")) {
        uint64_t first, end = UINT64_C(1) << atoi(argument[2]);
        size_t i;
        for (first = 0; first < end; first += 16384) {
            kopt_normal(z, KOPT_F32, 16384, 0, 1, (kopt_random_key){0, 0, 0, first});
            for (i = 0; i < 16384; ++i)
                if (fabs((double)z[i]) > 6.4) printf("%llu %.9g\n", (unsigned long long)(first + i), (double)z[i]);
        }
        return 0;
    }
    check_words();
    check_bits();
    check_formats();
    check_normal();
    check_independence();
    check_uniform();
    check_refusals();
    free(z), free(y);
    return done();
}
