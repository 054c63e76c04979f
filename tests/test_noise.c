/* test_noise.c - random numbers and Langevin steps: each number against binary64 and an own Philox, the same bits in
   any slicing and on every instruction set, distributions against statistical bounds (at fixed seeds, so that nothing
   flickers), Langevin steps against SGD and against the distribution that they must reach.
   Argument "quick": fewer numbers. "tail" COUNT: the numbers beyond 6.4 deviations among the first 2^COUNT. */
#define KAHAN_OPT_VMATH
#define KAHAN_OPT_IMPLEMENTATION
#include "../kahan_opt.h"

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

enum { MOST = 1 << 20, NOISE = 5, LANGEVIN = 6 };

static const uint64_t golden = 0xe572fc8db60eeaccu; /* of fills of every kind: what they have been, see check_bits */
static const uint64_t golden_langevin = 0xd0578799f19f1900u;

static const double normal_bound = 4; /* ulp, see docs/vmath.md */

static float *z, *y;
static size_t count; /* of the numbers in most tests of distributions */

/* ---- the reference ---------------------------------------------------------------------------------------------- */

static void words_of(uint32_t out[4], uint64_t seed, uint32_t step, uint32_t id, uint32_t stream, uint32_t attempt,
                     uint64_t e) {
    uint32_t key[2], counter[4];
    key[0] = (uint32_t)seed, key[1] = (uint32_t)(seed >> 32);
    counter[0] = (uint32_t)(e / 4), counter[1] = (uint32_t)(e / 4 >> 32) + (stream << 28) + (attempt << 20);
    counter[2] = step, counter[3] = id;
    ref_philox(7, counter, key, out);
}

static double normal_of(uint64_t seed, uint32_t step, uint32_t id, uint32_t stream, uint32_t attempt, uint64_t e) {
    const double pi = 3.14159265358979323846;
    uint32_t x[4], n;
    double u, r, f;
    words_of(x, seed, step, id, stream, attempt, e);
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
    double worst = 0, worst_noise = 0;
    size_t k, i;
    int wrong = 0;
    for (k = 0; k < sizeof first / sizeof *first && REFERENCE; ++k) {
        const uint64_t seed = k * UINT64_C(0x9e3779b97f4a7c15);
        const uint32_t step = (uint32_t)k * 77, id = (uint32_t)k * 12345 + 1;
        const size_t n = k == 4 ? count / 4 : 4000;
        kopt_optimizer opt = kopt_sgd(1, 0);
        kopt_tensor t;
        kopt_normal(z, KOPT_F32, n, 0, 1, (kopt_random_key){seed, step, id, first[k]});
        for (i = 0; i < n; ++i) {
            double off = off_by(z[i], normal_of(seed, step, id, NOISE, 0, first[k] + i));
            if (!(off <= worst)) worst = off;
        }
        /* with rate 1 and temperature 1/2 a weight of 0 becomes the number itself */
        opt.weight_format = KOPT_F32, opt.seed = seed, opt.step = step;
        memset(y, 0, n * 4), memset(z, 0, n * 4);
        t = kopt_tensor_of(y, z, KOPT_F32, n, NULL, 0);
        t.id = id, t.first_index = first[k];
        wrong += kopt_langevin_step(&opt, &t, 1, 0.5) != KOPT_OK;
        for (i = 0; i < n; ++i) {
            double off = off_by(y[i], normal_of(seed, step + 1, id, LANGEVIN, 0, first[k] + i));
            if (!(off <= worst_noise)) worst_noise = off;
        }
        kopt_uniform(z, KOPT_F32, n, -1, 1, (kopt_random_key){seed, step, id, first[k]});
        for (i = 0; i < n; ++i) {
            uint32_t x[4];
            words_of(x, seed, step, id, NOISE, 0, first[k] + i);
            wrong +=
                ref_bits(z[i]) != ref_bits((float)((int)(2 * (x[(first[k] + i) & 3] >> 8)) + 1 - (1 << 24)) * 0x1p-24f);
        }
    }
    ok(worst <= normal_bound && worst_noise <= normal_bound && !wrong,
       "each number is that of its words: normal %.2f, Langevin %.2f ulp off at most, uniform %d wrong", worst,
       worst_noise, wrong);
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
    case 4: return kopt_uniform(out, KOPT_BF16, n, -0.1, 0.1, (kopt_random_key){1, 2, 7, first});
    case 5: return kopt_truncated_normal(out, KOPT_F32, n, 1, 3, 2, (kopt_random_key){1, 2, 8, first});
    case 6: return kopt_truncated_normal(out, KOPT_FP16, n, 0, 1, 0.5, (kopt_random_key){1, 2, 9, first});
    case 7: return kopt_init_he(out, KOPT_F32, n, KOPT_NORMAL, 300, (kopt_random_key){1, 0, 10, first});
    case 8: return kopt_init_he(out, KOPT_BF16, n, KOPT_UNIFORM, 1, (kopt_random_key){1, 0, 11, first});
    case 9: return kopt_init_he(out, KOPT_F32, n, KOPT_TRUNCATED_NORMAL, 17, (kopt_random_key){1, 0, 12, first});
    case 10: return kopt_init_xavier(out, KOPT_F32, n, KOPT_NORMAL, 1, 1, (kopt_random_key){1, 0, 13, first});
    case 11: return kopt_init_xavier(out, KOPT_FP16, n, KOPT_UNIFORM, 4096, 1000, (kopt_random_key){1, 0, 14, first});
    default: return kopt_init_xavier(out, KOPT_F32, n, KOPT_TRUNCATED_NORMAL, 3, 5, (kopt_random_key){1, 0, 15, first});
    }
}

enum { FILLS = 13, BITS = 3000 };
static const size_t fill_size[FILLS] = {4, 2, 2, 4, 2, 4, 2, 4, 2, 4, 4, 2, 4};

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
    wrong = kopt_truncated_normal(y, KOPT_F32, 10000, 0, 1, 1, (kopt_random_key){5, 6, 7, 8}) != KOPT_OK;
    for (i = 0; i < 10000 && REFERENCE; ++i) {
        const uint32_t limit = ref_bits(1);
        uint32_t attempt = 0;
        double want = (double)z[i];
        while (fabs(want) > 1 && ++attempt < 256) want = normal_of(5, 6, 7, NOISE, attempt, 8 + i);
        if (attempt == 0)
            wrong += ref_bits(y[i]) != ref_bits(z[i]);
        else
            wrong += off_by(y[i], want) > normal_bound;
        wrong += (ref_bits(y[i]) & 0x7fffffff) > limit;
    }
    ok(!wrong, "the truncated normal is the first draw within the limit: %d wrong", wrong);
}

/* Limits that are one of the numbers, and the floats below and above it: what is at most the limit stays, beside others
   that are drawn again. 1/2 is a limit, the double below it is none. */
static void check_limit(void) {
    enum { BLOCK = 256 };
    const double least = 0.5 - 0x1p-54;
    float x = 7;
    int k, i, off, tried = 0, wrong = 0;
    kopt_normal(z, KOPT_F32, BLOCK, 0, 1, (kopt_random_key){1, 2, 3, 0});
    for (k = 0; k < BLOCK; ++k)
        for (off = -1; off <= 1; ++off) {
            const uint32_t limit = (ref_bits(z[k]) & 0x7fffffff) + (uint32_t)off;
            if (limit < 0x3f000000 || limit > 0x40000000) continue;
            ++tried;
            wrong += kopt_truncated_normal(y, KOPT_F32, BLOCK, 0, 1, (double)ref_float(limit),
                                           (kopt_random_key){1, 2, 3, 0}) != KOPT_OK;
            for (i = 0; i < BLOCK; ++i) {
                wrong += ((ref_bits(z[i]) & 0x7fffffff) <= limit) != (ref_bits(z[i]) == ref_bits(y[i]));
                wrong += (ref_bits(y[i]) & 0x7fffffff) > limit;
            }
        }
    ok(!wrong && tried > 300, "numbers at %d limits stay, those beyond are drawn again: %d wrong", tried, wrong);
    wrong = kopt_truncated_normal(&x, KOPT_F32, 1, 0, 1, least, (kopt_random_key){1, 2, 3, 0}) != KOPT_ERROR_RANGE;
    wrong += ref_bits(x) != ref_bits(7) ||
             kopt_truncated_normal(&x, KOPT_F32, 1, 0, 1, 0.5, (kopt_random_key){1, 2, 3, 0}) != KOPT_OK;
    ok(!wrong, "the lowest limit is 1/2");
}

/* ---- distributions ---------------------------------------------------------------------------------------------- */

static double normal_below(double x) { return erfc(-x * 0.70710678118654752440) / 2; }

static int compare(const void *a, const void *b) {
    const float x = *(const float *)a, w = *(const float *)b;
    return (x > w) - (x < w);
}

static double limit_of_cdf;
static double truncated_below(double x) {
    const double tail = normal_below(-limit_of_cdf);
    return (normal_below(x) - tail) / (1 - 2 * tail);
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
    ok((double)z[0] < -6.58 && off_by(z[0], normal_of(0, 0, 0, NOISE, 0, UINT64_C(7433237650))) <= normal_bound,
       "far out: %.9g", (double)z[0]);
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
    kopt_truncated_normal(y, KOPT_F32, n, 0, 1, 0.5, (kopt_random_key){7, 7, 7, 0}); /* other draws: 1 and more */
    for (x = 0, k = 0; k < n; ++k)
        if (fabs((double)z[k]) > 0.5) x += (double)z[k] * (double)y[k];
    x = fabs(x) / sqrt((double)n);
    if (x > worst) worst = x;
    ok(worst < 4.5, "nor are seeds, steps, ids, places, attempts: %.2f", worst);
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

static void check_truncated(void) {
    static const double limits[] = {0.5, 1, 2, 3, 8};
    size_t k, i;
    for (k = 0; k < 5; ++k) {
        int outside = 0;
        double d;
        kopt_truncated_normal(z, KOPT_F32, count / 4, 0, 1, limits[k], (kopt_random_key){11, 0, (uint32_t)k, 0});
        for (i = 0; i < count / 4; ++i) outside += fabs((double)z[i]) > limits[k];
        limit_of_cdf = limits[k];
        d = distance(z, count / 4, truncated_below);
        ok(!outside && d < 2.2, "truncated at %g deviations: distance %.2f, %d outside", limits[k], d, outside);
    }
}

static void check_init(void) {
    static const char *const names[] = {"normal", "uniform", "truncated normal"};
    static const double kurtosis[] = {3, 1.8, 2.37}; /* a little above, for the last */
    int kind, xavier;
    for (xavier = 0; xavier < 2; ++xavier)
        for (kind = KOPT_NORMAL; kind <= KOPT_TRUNCATED_NORMAL; ++kind) {
            const double want = xavier ? 2.0 / (77 + 513) : 2.0 / 77;
            double mean = 0, variance = 0, largest = 0;
            size_t i;
            if (xavier)
                kopt_init_xavier(z, KOPT_F32, count, (kopt_distribution)kind, 77, 513, (kopt_random_key){1, 0, 2, 0});
            else
                kopt_init_he(z, KOPT_F32, count, (kopt_distribution)kind, 77, (kopt_random_key){1, 0, 2, 0});
            for (i = 0; i < count; ++i) {
                const double x = (double)z[i];
                mean += x, variance += x * x;
                if (fabs(x) > largest) largest = fabs(x);
            }
            mean /= sqrt(want * (double)count);
            variance = (variance / (double)count / want - 1) / sqrt((kurtosis[kind] - 1) / (double)count);
            largest /= sqrt(want);
            ok(fabs(mean) < 4 && fabs(variance) < 4 && (kind != KOPT_UNIFORM || largest <= 1.7320509) &&
                   (kind != KOPT_TRUNCATED_NORMAL || largest <= 2.2737),
               "%s, %s: mean %.2f, variance %.2f deviations off, largest %.4f", xavier ? "Xavier" : "He", names[kind],
               mean, variance, largest);
        }
    kopt_init_he(z, KOPT_F32, 1000, KOPT_NORMAL, 8, (kopt_random_key){3, 0, 4, 5});
    kopt_normal(y, KOPT_F32, 1000, 0, 0.5, (kopt_random_key){3, 0, 4, 5});
    ok(!memcmp(z, y, 4000), "He of 8 inputs is the normal distribution with deviation 1/2, step 0");
}

/* Deviations sqrt(2 / fan) / sqrt(1 - 4 p(2) / (2 P(2) - 1)), p and P the normal density and distribution function, and
   half ranges sqrt(2 / fan) * sqrt(3): at fans for which they are so close to the middle of two floats that one unit in
   the last place of the binary64 factor, up or down, gives another float. The floats are mpmath's, of 200 digits. */
static void check_init_factors(void) {
    static const struct {
        uint64_t fan;
        uint32_t word;
        kopt_distribution kind;
    } c[] = {{UINT64_C(11641097792859526), 0x32800000, KOPT_TRUNCATED_NORMAL},
             {UINT64_C(11641078364707037), 0x32800008, KOPT_TRUNCATED_NORMAL},
             {UINT64_C(27021510791345184), 0x3280000d, KOPT_UNIFORM},
             {UINT64_C(27021485021684255), 0x32800012, KOPT_UNIFORM}};
    int k, wrong = 0;
    if (sizeof(size_t) < sizeof(uint64_t)) {
        skip("no such fans in 32 bits");
        return;
    }
    for (k = 0; k < 4; ++k) {
        const double width = (double)ref_float(c[k].word);
        wrong += kopt_init_he(z, KOPT_F32, 256, c[k].kind, (size_t)c[k].fan, (kopt_random_key){1, 0, 2, 3}) != KOPT_OK;
        if (c[k].kind == KOPT_UNIFORM)
            wrong += kopt_uniform(y, KOPT_F32, 256, -width, width, (kopt_random_key){1, 0, 2, 3}) != KOPT_OK;
        else
            wrong += kopt_truncated_normal(y, KOPT_F32, 256, 0, width, 2, (kopt_random_key){1, 0, 2, 3}) != KOPT_OK;
        wrong += memcmp(z, y, 4 * 256) != 0;
    }
    ok(!wrong, "the factors of truncated and uniform initial weights to the last bit: %d wrong", wrong);
}

/* ---- Langevin steps --------------------------------------------------------------------------------------------- */

enum { N = 1500, SETUPS = 11 };

/* Weights in every format and rounding, gradients in every format, decay, scale, copy, zeroing. */
typedef struct sampler {
    kopt_optimizer opt;
    kopt_tensor t;
    unsigned char weight[4 * N + 4], grad[4 * N + 4], state[64 + 2 * N + 16], copy[4 * N];
} sampler;

static void make_sampler(sampler *s, int setup) {
    static float initial[N];
    size_t i;
    memset(s, 0, sizeof *s);
    s->opt = kopt_sgd(0.03, 0);
    s->opt.weight_format = setup == 10 ? KOPT_F32 : setup < 5 ? KOPT_BF16 : KOPT_FP16;
    s->opt.rounding = (kopt_rounding)(setup % 5);
    s->opt.seed = UINT64_C(0x123456789) + (unsigned)setup, s->opt.step = 5;
    s->opt.weight_decay = setup % 3 == 1 ? 0.01 : 0;
    s->opt.decay_mode = setup % 2 ? KOPT_L2 : KOPT_DECOUPLED;
    s->opt.grad_scale = setup % 3 == 2 ? 0.25 : 1;
    s->opt.maximize = setup % 4 == 3;
    s->opt.zero_grad = setup % 5 == 4;
    s->t = kopt_tensor_of(s->weight + 1, s->grad + 1, (kopt_format)(setup % 3), N, s->state + 1, sizeof s->state - 1);
    s->t.id = 9, s->t.first_index = 300 + (uint64_t)setup;
    s->t.rate_scale = setup % 4 == 1 ? 0.5f : 1;
    if (setup & 1) s->t.copy = s->copy, s->t.copy_format = KOPT_BF16;
    kopt_normal(initial, KOPT_F32, N, 0, 1, (kopt_random_key){1, 0, 0, 0});
    for (i = 0; i < N; i += 100) initial[i] = 0;
    kopt_state_init(&s->opt, &s->t, initial);
    kopt_normal(s->t.grad, s->t.grad_format, N, 0.2, 3, (kopt_random_key){2, 0, 0, 0});
}

static void move_sampler(sampler *to, const sampler *from) {
    *to = *from;
    to->t.weight = to->weight + 1, to->t.grad = to->grad + 1, to->t.state = to->state + 1;
    if (to->t.copy != NULL) to->t.copy = to->copy;
}

static int same(const sampler *a, const sampler *b) {
    return !memcmp(a->weight, b->weight, sizeof a->weight) && !memcmp(a->grad, b->grad, sizeof a->grad) &&
           !memcmp(a->state, b->state, sizeof a->state) && !memcmp(a->copy, b->copy, sizeof a->copy) &&
           a->opt.step == b->opt.step;
}

/* The numbers of stream 6: see check_words. */
static void noise_of(float *out, const sampler *s) {
    static float zero[N];
    kopt_optimizer opt = kopt_sgd(1, 0);
    kopt_tensor t = kopt_tensor_of(out, zero, KOPT_F32, N, NULL, 0);
    opt.weight_format = KOPT_F32, opt.seed = s->opt.seed, opt.step = s->opt.step;
    t.id = s->t.id, t.first_index = s->t.first_index;
    memset(out, 0, 4 * N);
    kopt_langevin_step(&opt, &t, 1, 0.5);
}

static void check_langevin(void) {
    static sampler start, a, b, c;
    static float numbers[N], gradient[N];
    uint64_t hash = 0;
    int setup, isa, cold = 0, wrong = 0, sliced = 0, machines = 0;
    size_t i;
    for (setup = 0; setup < SETUPS; ++setup) {
        kopt_step step;
        float factor;
        kopt_tensor tiles;
        make_sampler(&start, setup);
        /* without heat: SGD */
        move_sampler(&a, &start), move_sampler(&b, &start);
        cold += kopt_optimizer_step(&a.opt, &a.t, 1) != KOPT_OK || kopt_langevin_step(&b.opt, &b.t, 1, 0) != KOPT_OK ||
                !same(&a, &b);
        /* with it: SGD with an fp32 gradient that holds the noise; by the reference, in any rounding */
        move_sampler(&b, &start);
        wrong += kopt_langevin_step(&b.opt, &b.t, 1, 1.5) != KOPT_OK;
        noise_of(numbers, &start);
        factor = ref_mul((float)0.03, start.t.rate_scale);
        factor = ref_sqrt(ref_div(3, factor));
        for (i = 0; i < N; ++i) {
            float g =
                ref_float(ref_widen(start.t.grad_format, ref_get(start.t.grad, ref_width(start.t.grad_format), i)));
            g = ref_mul(g, (float)start.opt.grad_scale * (start.opt.maximize ? -1.0f : 1.0f));
            gradient[i] = ref_add(g, ref_mul(-factor, numbers[i]));
        }
        move_sampler(&c, &start);
        tiles = c.t;
        tiles.grad = gradient, tiles.grad_format = KOPT_F32;
        c.opt.grad_scale = 1, c.opt.maximize = 0, c.opt.zero_grad = 0;
        ref_step_tensor(&c.opt, &tiles);
        c.opt.step++;
        if (start.opt.zero_grad) memset(c.t.grad, 0, N * ref_width(c.t.grad_format));
        wrong += !same(&b, &c);
        hash = hash_of(hash, b.t.weight, ref_width(b.opt.weight_format), N);
        /* any slices, any shards, any instruction set */
        FOR_EACH_ISA(isa) {
            size_t at = 0, n;
            ++machines;
            move_sampler(&a, &start);
            sliced += kopt_step_begin(&a.opt, &step) != KOPT_OK;
            for (; at < N; at += n) {
                n = at % 256 == 0 ? 67 : 1 + at * 3 % 400;
                if (n > N - at) n = N - at;
                sliced += kopt_langevin_range(&step, &a.t, 1.5, at, at + n) != KOPT_OK;
            }
            sliced += kopt_langevin_range(&step, &a.t, 1.5, 7, 7) != KOPT_OK;
            sliced += !same(&a, &b);
        }
    }
    ok(!cold, "temperature 0 is SGD, bit for bit: %d wrong", cold);
    ok(!wrong, "the step is SGD with the noise in an fp32 gradient: %d of %d setups wrong", wrong, SETUPS);
    ok(!sliced && hash == golden_langevin, "in any slices, on %d instruction sets: %d wrong, bits %016llx",
       machines / SETUPS, sliced, (unsigned long long)hash);
}

/* lr 1/2, rate_scale 1/2 and a decay of 1/4: all is a sum of powers of two. The noise of the second temperature is
   10^-18 of the weight. */
static void check_langevin_decay(void) {
    static const double heat[] = {0, 1e-36};
    static float weight[300], grad[300];
    int decay, k, i, wrong = 0;
    for (decay = KOPT_L2; decay <= KOPT_FULLY_DECOUPLED; ++decay)
        for (k = 0; k < 2; ++k) {
            kopt_optimizer opt = kopt_sgd(0.5, 0);
            kopt_tensor t = kopt_tensor_of(weight, grad, KOPT_F32, 300, NULL, 0);
            opt.weight_format = KOPT_F32, opt.decay_mode = (kopt_decay_mode)decay, opt.weight_decay = 0.25,
            opt.max_lr = 2;
            t.rate_scale = 0.5f;
            for (i = 0; i < 300; ++i) weight[i] = 2, grad[i] = (float)(i % 3 - 1);
            wrong += kopt_langevin_step(&opt, &t, 1, heat[k]) != KOPT_OK;
            for (i = 0; i < 300; ++i) /* 2 - 1/4 g - 1/4 * 1/4 * 2; the last over max_lr = 2, if that counts */
                wrong += ref_bits(weight[i]) !=
                         ref_bits((decay == KOPT_FULLY_DECOUPLED ? 1.9375f : 1.875f) - 0.25f * (float)(i % 3 - 1));
        }
    ok(!wrong, "a tensor's rate_scale multiplies rate and decay: %d wrong", wrong);
}

/* The potential k w^2 / 2: w = (1 - lr k) w + sqrt(2 lr T) N has the variance T / (k (1 - lr k / 2)) for any w. */
static void check_stationary(size_t n) {
    static const char *const names[] = {"fp32", "bf16 KAHAN", "bf16 EXACT", "fp16 KAHAN"};
    const double lr = 0.1, k = 2, heat = 0.7, want = heat / (k * (1 - lr * k / 2));
    int arm, step;
    for (arm = 0; arm < 4; ++arm) {
        kopt_optimizer opt = kopt_sgd(lr, 0);
        kopt_tensor t;
        unsigned char *weight = malloc(4 * n), *grad = malloc(4 * n), *state = malloc(64 + 2 * n + 12);
        double mean = 0, variance = 0, d;
        int good = weight != NULL && grad != NULL && state != NULL;
        size_t i;
        if (!good) exit(2);
        opt.weight_format = arm == 0 ? KOPT_F32 : arm == 3 ? KOPT_FP16 : KOPT_BF16;
        opt.rounding = arm == 2 ? KOPT_EXACT : KOPT_KAHAN;
        opt.grad_scale = k; /* the gradient is the weight itself */
        t = kopt_tensor_of(weight, grad, KOPT_F32, n, state, 64 + 2 * n + 12);
        for (i = 0; i < n; ++i) y[i] = 3;
        good &= kopt_state_init(&opt, &t, y) == KOPT_OK;
        for (step = 0; step < 60; ++step) {
            good &= kopt_state_read(&opt, &t, KOPT_WEIGHT, (float *)(void *)grad) == KOPT_OK;
            good &= kopt_langevin_step(&opt, &t, 1, heat) == KOPT_OK;
        }
        kopt_state_read(&opt, &t, KOPT_WEIGHT, y);
        for (i = 0; i < n; ++i)
            mean += (double)y[i], variance += (double)y[i] * (double)y[i], y[i] = (float)((double)y[i] / sqrt(want));
        mean /= sqrt(want * (double)n);
        variance = (variance / (double)n / want - 1) / sqrt(2 / (double)n);
        d = distance(y, n, normal_below);
        ok(good && fabs(mean) < 4 && fabs(variance) < 4 && d < 2.2,
           "%s: after 60 steps in a bowl its distribution: mean %.2f, variance %.2f deviations off, distance %.2f",
           names[arm], mean, variance, d);
        free(weight), free(grad), free(state);
    }
}

/* ---- refusals --------------------------------------------------------------------------------------------------- */

static void check_refusals(void) {
    static sampler start, a;
    const double nan_value = (double)ref_float(0x7fc00000);
    const uint64_t end = UINT64_C(1) << 54;
    kopt_step step;
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
    ok(kopt_truncated_normal(x, KOPT_F32, 1, 0, 1, 0.4, (kopt_random_key){0, 0, 0, 0}) == KOPT_ERROR_RANGE &&
           kopt_truncated_normal(x, KOPT_F32, 1, 0, 1, nan_value, (kopt_random_key){0, 0, 0, 0}) == KOPT_ERROR_RANGE &&
           kopt_truncated_normal(x, KOPT_F32, 1, 0, -1, 2, (kopt_random_key){0, 0, 0, 0}) == KOPT_ERROR_RANGE &&
           kopt_uniform(x, KOPT_F32, 1, 1, 0, (kopt_random_key){0, 0, 0, 0}) == KOPT_ERROR_RANGE &&
           kopt_uniform(x, KOPT_F32, 1, 0, nan_value, (kopt_random_key){0, 0, 0, 0}) == KOPT_ERROR_RANGE &&
           kopt_uniform(x, KOPT_F32, 1, -1e39, 0, (kopt_random_key){0, 0, 0, 0}) == KOPT_ERROR_RANGE &&
           kopt_uniform(x, KOPT_F32, 1, -3.1e38, 1e38, (kopt_random_key){0, 0, 0, 0}) == KOPT_ERROR_RANGE &&
           kopt_uniform(x, KOPT_F32, 1, -1e38, 3.1e38, (kopt_random_key){0, 0, 0, 0}) == KOPT_ERROR_RANGE &&
           kopt_uniform(NULL, KOPT_F32, 1, 0, 1, (kopt_random_key){0, 0, 0, 0}) == KOPT_ERROR_NULL &&
           kopt_init_he(x, KOPT_F32, 1, KOPT_NORMAL, 0, (kopt_random_key){0, 0, 0, 0}) == KOPT_ERROR_RANGE &&
           kopt_init_he(x, KOPT_F32, 1, (kopt_distribution)3, 1, (kopt_random_key){0, 0, 0, 0}) == KOPT_ERROR_OPTION &&
           kopt_init_xavier(x, KOPT_F32, 1, KOPT_NORMAL, 1, 0, (kopt_random_key){0, 0, 0, 0}) == KOPT_ERROR_RANGE &&
           kopt_init_xavier(x, KOPT_F32, 1, KOPT_NORMAL, ~(size_t)0, 2, (kopt_random_key){0, 0, 0, 0}) ==
               KOPT_ERROR_BOUNDS,
       "the others: limits, ranges, fans");
    ok(ref_bits(x[0]) == ref_bits(7) && ref_bits(x[1]) == ref_bits(7), "and nothing was written");
    make_sampler(&start, 3);
    move_sampler(&a, &start);
    ok(kopt_langevin_step(NULL, &a.t, 1, 1) == KOPT_ERROR_NULL &&
           kopt_langevin_step(&a.opt, NULL, 1, 1) == KOPT_ERROR_NULL &&
           kopt_langevin_step(&a.opt, &a.t, 1, -1) == KOPT_ERROR_RANGE &&
           kopt_langevin_step(&a.opt, &a.t, 1, nan_value) == KOPT_ERROR_RANGE &&
           kopt_langevin_step(&a.opt, &a.t, 1, 1e39) == KOPT_ERROR_RANGE && same(&a, &start),
       "Langevin: NULL, temperatures");
    a.opt.momentum = 0.9, a.t.state_size = ~(size_t)0;
    ok(kopt_langevin_step(&a.opt, &a.t, 0, 1) == KOPT_ERROR_OPTION && a.opt.step == start.opt.step,
       "momentum is refused");
    a.opt = kopt_adamw(1e-3);
    ok(kopt_langevin_step(&a.opt, &a.t, 0, 1) == KOPT_ERROR_OPTION && a.opt.step == 0, "and so are the other rules");
    move_sampler(&a, &start);
    a.opt.lr = 1e-39;
    ok(kopt_langevin_step(&a.opt, &a.t, 1, 1) == KOPT_ERROR_RANGE && a.opt.step == start.opt.step,
       "a noise that is infinite next to the rate is refused");
    a.opt.lr = 1;
    ok(kopt_langevin_step(&a.opt, &a.t, 0, 1e38) == KOPT_OK &&
           kopt_langevin_step(&a.opt, &a.t, 0, 1.1e38) == KOPT_ERROR_RANGE,
       "temperatures to 1e38");
    a.opt.lr = 0;
    ok(kopt_langevin_step(&a.opt, &a.t, 1, 1) == KOPT_OK && !memcmp(a.weight, start.weight, sizeof a.weight),
       "with rate 0 nothing moves");
    kopt_step_begin(&a.opt, &step);
    ok(kopt_langevin_range(&step, &a.t, 1, 5, 4) == KOPT_ERROR_BOUNDS &&
           kopt_langevin_range(&step, &a.t, 1, 0, N + 1) == KOPT_ERROR_BOUNDS &&
           kopt_langevin_range(NULL, &a.t, 1, 0, 1) == KOPT_ERROR_NULL &&
           kopt_langevin_range(&step, NULL, 1, 0, 1) == KOPT_ERROR_NULL,
       "ranges");
    a.opt.lr = 0.03;
    a.opt.weight_format = KOPT_F32;
    kopt_step_begin(&a.opt, &step);
    a.t.first_index = end - N + 1;
    ok(kopt_langevin_range(&step, &a.t, 1, 0, 1) == KOPT_ERROR_BOUNDS, "an index beyond 2^54");
}

/* From rest and without a gradient, at temperature 2 lr: each weight becomes 2 lr times its number, whatever lr is. */
static void check_langevin_rates(void) {
    static float weight[300], grad[300], one[300];
    int power, i, wrong = 0;
    for (power = 0; power <= 40; ++power) { /* 1, 1/2 ... 2^-20, 2 ... 2^20 */
        const double lr = ldexp(1, power <= 20 ? -power : power - 20);
        kopt_optimizer opt = kopt_sgd(lr, 0);
        kopt_tensor t = kopt_tensor_of(weight, grad, KOPT_F32, 300, NULL, 0);
        opt.weight_format = KOPT_F32;
        memset(weight, 0, sizeof weight);
        wrong += kopt_langevin_step(&opt, &t, 1, 2 * lr) != KOPT_OK;
        if (power == 0) memcpy(one, weight, sizeof one);
        for (i = 0; i < 300; ++i)
            wrong += (ref_bits(one[i]) & 0x7fffffff) == 0 || ref_bits(weight[i]) != ref_bits((float)lr * one[i]);
    }
    ok(!wrong, "noise at rates that are powers of two, by themselves: %d wrong", wrong);
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
    check_limit();
    check_normal();
    check_independence();
    check_uniform();
    check_truncated();
    check_init();
    check_init_factors();
    check_langevin();
    check_langevin_decay();
    check_langevin_rates();
    check_stationary(quick ? 4096 : 65536);
    check_refusals();
    free(z), free(y);
    return done();
}
