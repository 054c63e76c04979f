/* test_random.c - the random bits are the documented ones, stochastic rounding is unbiased, any two of the
   numbers that come out of one word are as good as independent, and sums of rounding errors have the variance of
   separate draws. */
#define KAHAN_OPT_IMPLEMENTATION
#include "../../kahan_opt.h"

#include "tap.h"
#include "reference.h"
#include "inputs.h"

#include <stdlib.h>

static void check_known_answers(void) {
    static const uint32_t zero[4] = {0, 0, 0, 0};
    static const uint32_t ten[4] = {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8};
    static const uint32_t seven[4] = {0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48};
    uint32_t out[4];
    ref_philox(10, zero, zero, out);
    ok(!memcmp(out, ten, sizeof out), "reference: Philox4x32-10 gives the published answer");
    ref_philox(7, zero, zero, out);
    ok(!memcmp(out, seven, sizeof out), "reference: Philox4x32-7 gives the published answer");
    ok(kopt_random((kopt_random_key){0, 0, 0, 0}, 0, 0) == 0xbedeb709 &&
           kopt_random((kopt_random_key){0, 0, 0, 0}, 0, 1) == 0x6e125f6f &&
           kopt_random((kopt_random_key){0, 0, 0, 0}, 0, 7) == 0x14904f73,
       "kopt_random: the halves of the published answer, low half first, and twice the other half");
}

static void check_kopt_random(void) {
    uint64_t e = 1, seed = 1;
    uint32_t bad = 0, k;
    for (k = 0; k < 100000; ++k) {
        uint32_t step = (uint32_t)(seed >> 7), id = (uint32_t)(seed >> 23), stream = k % 16;
        lcg64(&seed);
        e = (seed >> k % 64 ^ k) >> 1;
        bad += kopt_random((kopt_random_key){seed, step, id, 0}, stream, e) != ref_random(seed, step, id, stream, e);
    }
    ok(!bad, "kopt_random, 16 streams, indices below 2^63: %u of %u differ", (unsigned)bad, (unsigned)k);
    for (bad = 0, k = 0; k < 65536; ++k) {
        const uint32_t r = k * 40503u ^ k << 16;
        bad += KOPT_RANDOM_STORE_(r, k % 5) != ref_number(r, k % 5);
    }
    ok(!bad, "KOPT_RANDOM_STORE_: %u differ", (unsigned)bad);
}

/* ---- Which bits are used ---------------------------------------------------------------------------------------- */

static uint32_t inline_stochastic(kopt_format f, uint32_t x, uint32_t r) {
    if (f == KOPT_BF16) return kopt_bf16_from_f32_stochastic(ref_float(x), r);
    return kopt_fp16_from_f32_stochastic(ref_float(x), r);
}

/* A number whose cut-off part and r just make an ulp, or just do not; for fp16 also below 2^-18, where the extended
   word itself is rounded. */
static uint32_t at_the_edge(kopt_format f, uint32_t r, uint32_t noise) {
    uint32_t u = (noise & 0x3fff0000) + ((0x10000 - r - (noise & 1)) & 0xffff);
    if (f != KOPT_FP16) return u;
    if (noise & 2) return ref_from_extended(f, u & ~7u);
    return ref_bits(((float)(u & 0x3fffff) + (float)(noise >> 2 & 3) / 4) * ref_float(0x2b800000)); /* 2^-40 */
}

static void check_documented_bits(void) {
    enum { LONGEST = 4300 };
    static const uint64_t first[] = {
        0, 1, 7, 12345, UINT64_C(0x7fffffff9), UINT64_C(0x1ffffffffffffffb), UINT64_C(0x7ffffffffffff000)};
    static uint32_t from[LONGEST], to[LONGEST];
    uint32_t state = 1;
    int isa, target, source;
    size_t i, k, n;
    FOR_EACH_ISA(isa)
    for (target = KOPT_F32; target <= KOPT_FP16; ++target) {
        unsigned bad = 0;
        for (source = KOPT_F32; source <= KOPT_FP16; ++source)
            for (k = 0; k < 70; ++k) {
                uint64_t seed = k * UINT64_C(0x9e3779b97f4a7c15), base = first[k % 7];
                uint32_t step = (uint32_t)(k * 77777777), id = (uint32_t)(k * 1234567891);
                n = k < 7 ? LONGEST : k * 3;
                for (i = 0; i < n; ++i) {
                    uint32_t r = ref_number(ref_random(seed, step, id, 1, base + i), 0);
                    from[i] = mixed32(&state);
                    if (i % 3) from[i] = (from[i] & 0x8fffffff) + 0x30000000; /* where fp16 has numbers */
                    if (i % 5 == 0) from[i] = at_the_edge((kopt_format)target, r, from[i]);
                }
                kopt_convert_stochastic(to, (kopt_format)target, from, (kopt_format)source, n,
                                        (kopt_random_key){seed, step, id, base});
                for (i = 0; i < n; ++i) {
                    uint32_t r = ref_number(ref_random(seed, step, id, 1, base + i), 0);
                    uint32_t x = ref_widen((kopt_format)source, ref_get(from, ref_width((kopt_format)source), i));
                    uint32_t want = target == KOPT_F32 ? x : ref_stochastic((kopt_format)target, x, r);
                    uint32_t got = ref_get(to, ref_width((kopt_format)target), i);
                    int nan = ref_is_nan(KOPT_F32, x);
                    bad += nan ? !ref_is_nan((kopt_format)target, got) : got != want;
                    if (target != KOPT_F32) bad += inline_stochastic((kopt_format)target, x, r) != want;
                }
            }
        ok(!bad, "stochastic conversion to %s uses the documented bits, %s: %u wrong", format_name[target],
           kopt_isa_name((kopt_isa)isa), bad);
    }
}

/* ---- Bias ------------------------------------------------------------------------------------------------------- */

enum { DRAWS = 1000000 };
static float sample[DRAWS];
static uint16_t rounded[DRAWS];

/* The fraction of x that is rounded up in magnitude, as a z score against the fraction that is cut off. */
static double bias_score(kopt_format f, uint32_t x, uint32_t step) {
    uint32_t u = ref_extended(f, x), down = u >> 16, stray = 0;
    double p = (u & 0xffff) / 65536.0, up = 0, deviation = sqrt(DRAWS * p * (1 - p));
    int i;
    for (i = 0; i < DRAWS; ++i) sample[i] = ref_float(x);
    kopt_convert_stochastic(rounded, f, sample, KOPT_F32, DRAWS, (kopt_random_key){42, step, (uint32_t)f, 0});
    for (i = 0; i < DRAWS; ++i) up += rounded[i] == down + 1, stray += rounded[i] != down + 1 && rounded[i] != down;
    if (stray) return 1e9;
    return p == 0 ? up : fabs(up - DRAWS * p) / deviation;
}

static void check_bias(void) {
    static const uint32_t fraction[16] = {0,      1,      2,      100,    0x1234, 0x4000, 0x7ffe, 0x7fff,
                                          0x8000, 0x8001, 0x8002, 0xa5a5, 0xc000, 0xfff0, 0xfffe, 0xffff};
    static const uint32_t bf16_base[4] = {0x3f80, 0x3fff, 0x0001, 0x7f7e};
    static const uint32_t fp16_base[4] = {0x3c00, 0x3bff, 0x0000, 0x7bfe};
    int f, i, sign;
    for (f = KOPT_BF16; f <= KOPT_FP16; ++f)
        for (sign = 0; sign < 2; ++sign) {
            double worst = 0;
            uint32_t at = 0;
            for (i = 0; i < 64; ++i) {
                uint32_t base = f == KOPT_BF16 ? bf16_base[i / 16] : fp16_base[i / 16];
                uint32_t u = (base << 16) + fraction[i % 16];
                double z;
                if (f == KOPT_FP16 && base) u &= ~7u; /* what an fp32 can be */
                u = ref_from_extended((kopt_format)f, u) | (uint32_t)sign << 31;
                z = bias_score((kopt_format)f, u, (uint32_t)(i * 2 + sign));
                if (z > worst) worst = z, at = u;
            }
            ok(worst < 4, "unbiased, %s %s: 64 numbers, %d draws each, largest deviation %.2f standard errors (%08x)",
               sign ? "negative" : "positive", format_name[f], DRAWS, worst, (unsigned)at);
        }
}

/* ---- NaN, infinity, overflow ------------------------------------------------------------------------------------ */

static void check_specials(void) {
    enum { BLOCK = 1 << 16 };
    static uint32_t from[BLOCK];
    int isa, f, word;
    uint32_t i, k;
    for (f = KOPT_BF16; f <= KOPT_FP16; ++f) FOR_EACH_ISA(isa) {
            unsigned lost = 0, moved = 0;
            for (k = 0; k < 256; ++k) { /* all 2^24 words with exponent 255, two of them infinities */
                for (i = 0; i < BLOCK; ++i) from[i] = (k & 128) << 24 | 0x7f800000 | (k & 127) << 16 | i;
                for (word = 0; word < 3; ++word) {
                    kopt_convert_stochastic(rounded, (kopt_format)f, from, KOPT_F32, BLOCK,
                                            (kopt_random_key){(uint64_t)word << 33, k, 5, (uint64_t)word * 11});
                    for (i = 0; i < BLOCK; ++i)
                        lost += i == 0 && !(k & 127) ? rounded[i] != ref_narrow((kopt_format)f, from[i])
                                                     : !ref_is_nan((kopt_format)f, rounded[i]);
                }
            }
            for (k = 0; k < 2; ++k) { /* from the largest finite number on, both signs: round to nearest */
                for (i = 0; i < BLOCK; ++i) from[i] = (f == KOPT_BF16 ? 0x7f7f0000 + i : 0x477fe000 + i) | k << 31;
                kopt_convert_stochastic(rounded, (kopt_format)f, from, KOPT_F32, BLOCK, (kopt_random_key){9, 1, 2, 3});
                for (i = 0; i < BLOCK; ++i) {
                    uint32_t u = ref_extended((kopt_format)f, from[i]); /* ties away: 7bff8000 is infinity too */
                    moved += rounded[i] != (u + 0x8000) >> 16;
                    moved += inline_stochastic((kopt_format)f, from[i], i * 20201 & 0xffff) != (u + 0x8000) >> 16;
                }
            }
            ok(!lost && !moved, "%s, %s: NaN and infinity stay (%u wrong), overflow as to nearest (%u wrong)",
               format_name[f], kopt_isa_name((kopt_isa)isa), lost, moved);
        }
}

/* ---- The numbers of one word (a, b): a + 2 t b of the even, b + 2 t a of the odd elements, t = 8 row + store -- */

/* Given one number r, is another uniform over b? By its upper `bits`. */
static int flat(uint32_t start, uint32_t factor, int bits) {
    static uint32_t count[65536];
    uint32_t b, i;
    memset(count, 0, sizeof count);
    for (b = 0; b < 65536; ++b) ++count[((start + factor * b) & 0xffff) >> (16 - bits)];
    for (i = 0; i < 1u << bits; ++i)
        if (count[i] != 65536u >> bits) return 0;
    return 1;
}

/* The largest |P(r < p, r' < q) - pq|, over all p and q, of two numbers whose difference is any multiple of 2^v: within
   a class of p and q modulo 2^v the count is off by min(x, y) - x y / 2^v. */
static double discrepancy(int v) {
    const uint32_t n = 1u << v;
    double worst = 0;
    uint32_t x, y;
    for (x = 0; x < n; ++x)
        for (y = 0; y < n; ++y) {
            const double off = (x < y ? x : y) - (double)x * y / n;
            if (off > worst) worst = off;
        }
    return worst / (65536.0 * (65536 >> v));
}

static void check_words(void) {
    uint32_t t, u, r, bad = 0, worst = 0;
    for (t = 1; t < 125; ++t) /* r = a + 2 s b, so the other is r + 2 (t - s) b */
        for (r = 1; r < 65536; r += 21845) {
            uint32_t v = 1, d = t;
            for (; !(d & 1); d >>= 1) ++v;
            if (v > worst) worst = v;
            bad += !flat(r, 2 * t, 16 - (int)v);
        }
    ok(!bad && worst == 7,
       "two numbers of one element, or of elements whole rows apart: given one, the upper %u bits of the other are "
       "uniform",
       16 - (unsigned)worst);
    ok(discrepancy((int)worst) < 1e-6, "... and joint probabilities are products but for %.1e",
       discrepancy((int)worst));
    for (bad = 0, t = 0; t < 125; ++t) /* r = a + 2 t b, so b + 2 u a = 2 u r + (1 - 4 t u) b */
        for (u = 0; u < 125; ++u) bad += !flat(2 * u * 12345, 1 - 4 * t * u, 16);
    ok(!bad, "a number of an even and one of its odd element: independent");
}

/* ---- Sums of rounding errors: their variance beside that of separate draws -------------------------------------- */

/* A number of `bits` bits rounds f / 2^bits up if it is one of the last f. Of two that are uniform and differ by any
   multiple of 2^v, each with the same probability: the covariance of their rounding errors. */
static double covariance(uint32_t f, int bits, int v) {
    const double n = (double)(1u << v), all = (double)(1u << bits), p = (double)f / all;
    const double each = (double)(f >> v), more = (double)(f & ((1u << v) - 1)); /* of n classes, `more` have each + 1 */
    return ((n - more) * each * each + more * (each + 1) * (each + 1)) * n / all / all - p * p;
}

/* The numbers a + 2 t b of n values t, rounding the same fraction f / 2^bits: the variance of the sum of their errors
   over n times that of one. */
static double exact_ratio(const int *t, int n, uint32_t f, int bits) {
    const double p = (double)f / (double)(1u << bits);
    double sum = n * p * (1 - p);
    int i, k;
    for (i = 0; i < n; ++i)
        for (k = 0; k < i; ++k) {
            int v = 1, d = t[i] - t[k];
            for (; !(d & 1); d /= 2) ++v;
            sum += 2 * covariance(f, bits, v < bits ? v : bits);
        }
    return sum / (n * p * (1 - p));
}

/* The same where the fractions have nothing to do with each other: given a number r, the mean error is r / 2^bits less
   1/2, and two numbers have the covariance of their residues modulo 2^v. */
static double unrelated_ratio(const int *t, int n, int bits) {
    double sum = 0;
    int i, k;
    for (i = 0; i < n; ++i)
        for (k = 0; k < i; ++k) {
            int v = 1, d = t[i] - t[k];
            for (; !(d & 1); d /= 2) ++v;
            sum += pow(4, v < bits ? v : bits) - 1;
        }
    return 1 + sum / (n * (pow(4, bits) - 1));
}

/* The largest over the equal fractions that the `width` upper bits of `bits` tell apart. */
static double largest_ratio(const int *t, int n, int bits, int width) {
    double worst = 0;
    uint32_t f, step = 1u << (bits - width);
    for (f = step; f < 1u << bits; f += step) {
        const double ratio = exact_ratio(t, n, f, bits);
        if (ratio > worst) worst = ratio;
    }
    return worst;
}

static void check_exact_variance(void) {
    static const char *const name[] = {"16 rows of 128", "rows 8 apart", "5 stores"};
    int rows[16], apart[2] = {0, 64}, stores[5], i, k, width;
    const int *group[3] = {rows, apart, stores};
    const int size[3] = {16, 2, 5};
    double worst;
    for (i = 0; i < 16; ++i) rows[i] = 8 * i;
    for (i = 0; i < 5; ++i) stores[i] = i;
    for (k = 0; k < 3; ++k) {
        double few = 0, all = 0;
        for (width = 1; width <= 16; ++width) {
            worst = largest_ratio(group[k], size[k], 16, width) - 1;
            if (width <= 9 && worst > few) few = worst;
            if (worst > all) all = worst;
        }
        ok(few < 1e-12 && all < 0.01,
           "%s, any equal fraction: the variance of separate draws with up to 9 upper bits, "
           "at most %.4f of it more with 10 to 16",
           name[k], all);
    }
    worst = largest_ratio(rows, 16, 8, 8);
    ok(unrelated_ratio(rows, 16, 16) - 1 < 1e-5, "16 rows, unrelated fractions: 1 + %.1e of it",
       unrelated_ratio(rows, 16, 16) - 1);
    ok(worst > 2, "... the lower 8 bits would show: %.2f of it, %.2f with fraction 0.3, up to %.2f",
       unrelated_ratio(rows, 16, 8), exact_ratio(rows, 16, 77, 8), worst);
}

/* Of sums S of rounding errors: S^2 less the variance of separate draws, one value for each word, whose mean is 0. */
typedef struct spread {
    double word, sum, squares, variance, words;
} spread;

static void add_sum(spread *s, double error, double variance) {
    s->word += error * error - variance;
    s->variance += variance;
}

static void end_word(spread *s) {
    s->sum += s->word, s->squares += s->word * s->word;
    s->word = 0, ++s->words;
}

/* In standard errors of the mean, which the values themselves give. */
static double score_of(const spread *s) {
    const double mean = s->sum / s->words, variance = s->squares / s->words - mean * mean;
    return mean / sqrt(variance / s->words);
}

static double ratio_of(const spread *s) { return 1 + s->sum / s->variance; }

enum { SPANS = 128, NUMBERS = 2048 * SPANS, STEPS = 4 };
static uint32_t drawn[STEPS][NUMBERS]; /* what kopt_random gives */
static uint16_t unrelated[65536];

typedef struct source {
    int width, lower; /* which bits of each number: the upper `width` of 16, or the lower ones */
    int fraction;     /* 0: the middle, 1: 0.3; 2: unrelated ones */
} source;

static double error_of(const source *s, size_t element, uint32_t store, uint32_t step, double *variance) {
    const uint32_t n = 1u << s->width, number = KOPT_RANDOM_STORE_(drawn[step][element], store);
    const uint32_t other = unrelated[(element + 7919 * store + 104729 * step) & 65535];
    const uint32_t f = s->fraction == 0 ? n / 2 : s->fraction == 1 ? n * 3 / 10 : other >> (16 - s->width);
    const uint32_t bits = s->lower ? number & (n - 1) : number >> (16 - s->width);
    *variance = (double)f * (double)(n - f);
    return (double)((bits + f) >> s->width << s->width) - (double)f;
}

enum { ROWS, APART, WORD, STORES, ROWS_STORES, OVER_STEPS, ROWS_STEPS, GROUPS };
static const char *const group_name[] = {
    "16 rows", "rows 8 apart",       "the 32 elements of a word", "5 stores", "16 rows and 5 stores",
    "4 steps", "16 rows and 4 steps"};

static void add_word(spread g[GROUPS], const source *s, size_t at) {
    double all = 0, all_variance = 0;
    size_t parity, row;
    uint32_t k;
    int i;
    for (parity = 0; parity < 2; ++parity) {
        double sum[GROUPS] = {0}, variance[GROUPS] = {0}, half[8], half_variance[8];
        for (row = 0; row < 16; ++row) {
            const size_t element = at + 128 * row + parity;
            double stores = 0, stores_variance = 0, steps = 0, steps_variance = 0, v, e;
            for (k = 0; k < 5; ++k) {
                e = error_of(s, element, k, 0, &v);
                if (k == 0) {
                    sum[ROWS] += e, variance[ROWS] += v;
                    if (row < 8)
                        half[row] = e, half_variance[row] = v;
                    else
                        add_sum(&g[APART], half[row - 8] + e, half_variance[row - 8] + v);
                    steps = e, steps_variance = v;
                }
                stores += e, stores_variance += v;
            }
            for (k = 1; k < STEPS; ++k) {
                steps += error_of(s, element, 0, k, &v);
                steps_variance += v;
            }
            add_sum(&g[STORES], stores, stores_variance);
            add_sum(&g[OVER_STEPS], steps, steps_variance);
            sum[ROWS_STORES] += stores, variance[ROWS_STORES] += stores_variance;
            sum[ROWS_STEPS] += steps, variance[ROWS_STEPS] += steps_variance;
        }
        add_sum(&g[ROWS], sum[ROWS], variance[ROWS]);
        add_sum(&g[ROWS_STORES], sum[ROWS_STORES], variance[ROWS_STORES]);
        add_sum(&g[ROWS_STEPS], sum[ROWS_STEPS], variance[ROWS_STEPS]);
        all += sum[ROWS], all_variance += variance[ROWS];
    }
    add_sum(&g[WORD], all, all_variance);
    for (i = 0; i < GROUPS; ++i) end_word(&g[i]);
}

static void measure(spread g[GROUPS], const source *s) {
    size_t at;
    memset(g, 0, GROUPS * sizeof *g);
    for (at = 0; at < NUMBERS; at += at % 128 == 126 ? 2048 - 126 : 2) add_word(g, s, at);
}

/* 5 standard errors: by chance once in 5,000 times for all 336 comparisons. */
static void check_variance(void) {
    static const char *const kind[] = {"the middle", "0.3", "unrelated fractions"};
    spread g[GROUPS];
    source s = {0, 0, 0};
    uint32_t state = 1, step;
    size_t e;
    int i;
    for (step = 0; step < STEPS; ++step)
        for (e = 0; e < NUMBERS; ++e) drawn[step][e] = kopt_random((kopt_random_key){5, step, 9, 0}, 0, e);
    for (e = 0; e < 65536; ++e) unrelated[e] = (uint16_t)(lcg32(&state) >> 16);
    for (s.fraction = 0; s.fraction < 3; ++s.fraction) {
        double worst[GROUPS] = {0}, ratio[GROUPS];
        for (s.width = 1; s.width <= 16; ++s.width) {
            if (s.fraction == 1 && s.width == 1) continue; /* 3 / 10 of 1 bit is none */
            measure(g, &s);
            for (i = 0; i < GROUPS; ++i)
                if (fabs(score_of(&g[i])) > worst[i]) worst[i] = fabs(score_of(&g[i])), ratio[i] = ratio_of(&g[i]);
        }
        for (i = 0; i < GROUPS; ++i)
            ok(worst[i] < 5,
               "sums of rounding errors over %s, %s, 1 to 16 upper bits: the variance of separate draws "
               "(%.3f of it, %.1f standard errors, where it is farthest)",
               group_name[i], kind[s.fraction], ratio[i], worst[i]);
    }
    s.width = 8, s.lower = 1;
    for (s.fraction = 1; s.fraction < 3; ++s.fraction) {
        measure(g, &s);
        ok(score_of(&g[ROWS]) > 5, "... the lower 8 bits, %s, would show: %.2f of it, %.1f standard errors",
           kind[s.fraction], ratio_of(&g[ROWS]), score_of(&g[ROWS]));
    }
}

/* The stores of a step themselves. Weight 1 becomes 1 + u 2^-23; errors in units of 2^-23 (bf16) or 2^-26 (fp16). */
typedef struct store_row {
    const char *name;
    kopt_format format;
    kopt_rounding rounding;
    uint32_t equal, most; /* a u whose fraction is about 0.3; all are below `most` */
} store_row;

static double store_error(const store_row *s, uint32_t u, uint32_t stored, uint32_t kept, double *variance) {
    const uint32_t one = s->format == KOPT_BF16 ? 0x3f80 : 0x3c00;
    double whole = (double)(s->format == KOPT_BF16 ? u : 8 * u), unit = s->rounding == KOPT_STOCHASTIC ? 65536 : 256, f;
    double got = 65536 * ((double)stored - one);
    if (s->rounding == KOPT_COMPACT) got += 256 * ((double)(kept ^ 0x80) - 128);
    if (s->rounding == KOPT_KAHAN) {
        const double rest = u < 0x8000 ? whole : whole - 65536; /* what is compensated */
        got += (double)ref_float(kept << 16) * 8388608;
        for (unit = 1; unit * 256 <= fabs(rest); unit *= 2) continue;
        f = fabs(rest) / unit - floor(fabs(rest) / unit);
    } else {
        f = whole / unit - floor(whole / unit);
    }
    *variance = f * (1 - f) * unit * unit;
    return got - whole;
}

static void check_stores(void) {
    static const store_row stores[] = {{"bf16 stochastic", KOPT_BF16, KOPT_STOCHASTIC, 0x4ccd, 0x10000},
                                       {"fp16 stochastic", KOPT_FP16, KOPT_STOCHASTIC, 0x0999, 0x2000},
                                       {"bf16 compact", KOPT_BF16, KOPT_COMPACT, 0x124d, 0x10000},
                                       {"fp16 compact", KOPT_FP16, KOPT_COMPACT, 0x0249, 0x2000},
                                       {"bf16 Kahan", KOPT_BF16, KOPT_KAHAN, 0x4026, 0x10000}};
    static uint16_t weight[NUMBERS];
    static float grad[NUMBERS];
    static unsigned char state[KOPT_STATE_BYTES(NUMBERS, 2)];
    static uint32_t u[NUMBERS];
    int k, random_fractions, scalar;
    for (k = 0; k < (int)(sizeof stores / sizeof *stores); ++k)
        for (random_fractions = 0; random_fractions < 2; ++random_fractions)
            for (scalar = 0; scalar < 2; ++scalar) {
                const store_row *s = &stores[k];
                const size_t width = s->rounding == KOPT_COMPACT ? 1 : 2;
                spread rows = {0, 0, 0, 0, 0}, apart = rows, word = rows;
                kopt_optimizer o = kopt_sgd(1, 0);
                kopt_tensor t = kopt_tensor_of(weight, s->format, grad, KOPT_F32, NUMBERS, state, sizeof state);
                size_t e, at, parity, row;
                int good;
                kopt_isa_force(scalar ? KOPT_ISA_SCALAR : KOPT_ISA_AUTO);
                o.rounding = s->rounding, o.seed = 11, t.id = (uint32_t)k;
                for (e = 0; e < NUMBERS; ++e) {
                    u[e] = random_fractions ? (unrelated[e & 65535] ^ (uint32_t)(e >> 3)) & (s->most - 1) : s->equal;
                    grad[e] = -ref_mul((float)u[e], ref_float(0x34000000)); /* 2^-23 */
                    weight[e] = s->format == KOPT_BF16 ? 0x3f80 : 0x3c00;
                }
                good = kopt_state_init(&o, &t, 1, NULL) == KOPT_OK && kopt_optimizer_step(&o, &t, 1) == KOPT_OK;
                for (at = 0; at < NUMBERS; at += at % 128 == 126 ? 2048 - 126 : 2) {
                    double all = 0, all_variance = 0;
                    for (parity = 0; parity < 2; ++parity) {
                        double sum = 0, variance = 0, half[8], half_variance[8];
                        for (row = 0; row < 16; ++row) {
                            const size_t i = at + 128 * row + parity;
                            const uint32_t kept = s->rounding == KOPT_STOCHASTIC ? 0 : ref_get(state + 64, width, i);
                            double v, error = store_error(s, u[i], weight[i], kept, &v);
                            sum += error, variance += v;
                            if (row < 8)
                                half[row] = error, half_variance[row] = v;
                            else
                                add_sum(&apart, half[row - 8] + error, half_variance[row - 8] + v);
                        }
                        add_sum(&rows, sum, variance);
                        all += sum, all_variance += variance;
                    }
                    add_sum(&word, all, all_variance);
                    end_word(&rows), end_word(&apart), end_word(&word);
                }
                ok(good && fabs(score_of(&rows)) < 5 && fabs(score_of(&apart)) < 5 && fabs(score_of(&word)) < 5,
                   "a step's %s store, %s, %s: over 16 rows, 8 apart, a word %.3f, %.3f, %.3f of the variance of "
                   "separate draws (%.1f, %.1f, %.1f standard errors)",
                   s->name, random_fractions ? "unrelated fractions" : "0.3", kopt_isa_name(kopt_isa_current()),
                   ratio_of(&rows), ratio_of(&apart), ratio_of(&word), score_of(&rows), score_of(&apart),
                   score_of(&word));
            }
    kopt_isa_force(KOPT_ISA_AUTO);
}

/* ---- What is tied: the 16 rows of one word, all 2^32 words. The upper bit of a number decides, and the lowest 4 bits
        of `own` do not reach it: 16 rows times `other` have none. ------------------------------------------------ */

static void check_ties(void) {
    static double p[16 * 64 + 1], next[16 * 64 + 1];
    double count[17] = {0}, fourth = 0, variance = 0, beyond[2] = {0, 0};
    uint32_t own, other;
    int i, k, step;
    for (own = 0; own < 65536; own += 16)
        for (other = 0; other < 4096; ++other) { /* 16 other, modulo 2^16: 16 of own, 16 of other each */
            uint32_t r = own, up = 0;
            for (i = 0; i < 16; ++i, r += 16 * other) up += r >> 15 & 1;
            ++count[up];
        }
    for (i = 0; i <= 16; ++i) {
        count[i] /= 16777216;
        variance += count[i] * (i - 8) * (i - 8);
        fourth += count[i] * (i - 8) * (i - 8) * (i - 8) * (i - 8);
    }
    ok(fabs(count[0] + count[16] - 0.0333) < 5e-5, "16 rows in the middle go one way with probability %.4f, not %.5f",
       count[0] + count[16], 2.0 / 65536);
    ok(fabs(variance - 4) < 1e-9, "... and have the variance of separate draws, %.6f", variance);
    /* the sum of 64 such steps: 1024 draws, of deviation 16 */
    memset(p, 0, sizeof p);
    for (p[0] = 1, step = 0; step < 64; ++step) {
        memset(next, 0, sizeof next);
        for (i = 0; i <= 16 * step; ++i)
            for (k = 0; k <= 16; ++k) next[i + k] += p[i] * count[k];
        memcpy(p, next, sizeof p);
    }
    for (i = 0; i <= 1024; ++i) {
        if (abs(i - 512) > 3 * 16) beyond[0] += p[i];
        if (abs(i - 512) > 4 * 16) beyond[1] += p[i];
    }
    ok(fabs(fourth / 16 - 3 - 7.45) < 0.01 && beyond[0] < 0.0032 && beyond[1] < 1.3e-4,
       "... with an excess kurtosis of %.2f; sums of 64 steps: %.2f, beyond 3 deviations %.4f (separate draws: "
       "0.0024), 4: %.1e (5.4e-05)",
       fourth / 16 - 3, (fourth / 16 - 3) / 64, beyond[0], beyond[1]);
}

/* ---- Independence of neighbours --------------------------------------------------------------------------------- */

/* +-1 for each element: whether the midpoint was rounded up. */
static void coin(signed char *out, uint64_t seed, uint32_t step, uint32_t id, uint64_t first) {
    int i;
    for (i = 0; i < DRAWS; ++i) sample[i] = 1.00390625f;
    kopt_convert_stochastic(rounded, KOPT_BF16, sample, KOPT_F32, DRAWS, (kopt_random_key){seed, step, id, first});
    for (i = 0; i < DRAWS; ++i) out[i] = rounded[i] == 0x3f81 ? 1 : -1;
}

/* The same out of a step (stream 0): weight 1, update -2^-8, stochastic store. */
static void step_coin(signed char *out, uint32_t step, uint32_t id) {
    static uint16_t weight[DRAWS], grad[DRAWS];
    kopt_optimizer o = kopt_sgd(1, 0);
    kopt_tensor t = kopt_tensor_of(weight, KOPT_BF16, grad, KOPT_BF16, DRAWS, NULL, 0);
    int i;
    o.rounding = KOPT_STOCHASTIC, o.seed = 1, o.step = step - 1, t.id = id;
    for (i = 0; i < DRAWS; ++i) weight[i] = 0x3f80, grad[i] = 0xbb80;
    kopt_optimizer_step(&o, &t, 1);
    for (i = 0; i < DRAWS; ++i) out[i] = weight[i] == 0x3f81 ? 1 : -1;
}

static double score(const signed char *a, const signed char *b, int n) {
    long sum = 0;
    int i;
    for (i = 0; i < n; ++i) sum += a[i] * b[i];
    return fabs((double)sum) / sqrt(n);
}

/* Of the 32 elements that one word serves, 2 in each of 16 rows, the coins of some. */
static double score_word(const signed char *a, const int *element, int elements) {
    long sum = 0, n = 0;
    int span, pair, k;
    for (span = 0; span + 2048 <= DRAWS; span += 2048)
        for (pair = 0; pair < 128; pair += 2, ++n) {
            int product = 1;
            for (k = 0; k < elements; ++k) product *= a[span + pair + (element[k] & 1) + 128 * (element[k] >> 1)];
            sum += product;
        }
    return fabs((double)sum) / sqrt((double)n);
}

static void check_spans(void) {
    static signed char a[DRAWS];
    const int progression[4] = {0, 2, 4, 6};
    int e[3];
    double z, two = 0, three = 0;
    coin(a, 3, 1, 1, 0);
    for (e[0] = 0; e[0] < 32; ++e[0])
        for (e[1] = e[0] + 1; e[1] < 32; ++e[1]) {
            if ((z = score_word(a, e, 2)) > two) two = z;
            for (e[2] = e[1] + 1; e[2] < 32; ++e[2])
                if ((z = score_word(a, e, 3)) > three) three = z;
        }
    ok(two < 4.5, "any two elements of a word: |z| <= %.2f", two);
    ok(three < 5, "any three elements of a word: |z| <= %.2f", three);
    z = score_word(a, progression, 4);
    ok(z > 20, "some four elements of a word are tied, as documented: |z| = %.0f", z);
}

static void check_independence(void) {
    static signed char a[DRAWS], b[DRAWS];
    double z, worst = 0;
    int lag;
    coin(a, 1, 1, 1, 0);
    for (lag = 1; lag <= 4096; lag += lag == 64 ? 64 : lag == 136 ? 120 : lag < 136 ? 1 : 128)
        if ((z = score(a, a + lag, DRAWS - lag)) > worst) worst = z;
    ok(worst < 4.5, "elements 1 to 64, 128 to 136 and whole rows apart: |z| <= %.2f", worst);
    coin(b, 1, 2, 1, 0), z = score(a, b, DRAWS);
    ok(z < 4.5, "neighbouring steps: |z| = %.2f", z);
    coin(b, 1, 1, 2, 0), z = score(a, b, DRAWS);
    ok(z < 4.5, "neighbouring tensors: |z| = %.2f", z);
    coin(b, 2, 1, 1, 0), z = score(a, b, DRAWS);
    ok(z < 4.5, "neighbouring seeds: |z| = %.2f", z);
    coin(b, 1, 1, 1, 1), z = score(a + 1, b, DRAWS - 1);
    ok(z > 900, "first_index 1: the same numbers, one element on (z = %.0f)", z);
    step_coin(b, 1, 1), z = score(a, b, DRAWS);
    ok(z < 4.5, "streams 0 and 1: |z| = %.2f", z);
    step_coin(a, 2, 1), z = score(a, b, DRAWS);
    ok(z < 4.5, "stream 0, neighbouring steps: |z| = %.2f", z);
    for (worst = 0, lag = 1; lag <= 64; ++lag)
        if ((z = score(a, a + lag, DRAWS - lag)) > worst) worst = z;
    ok(worst < 4.5, "stream 0, elements 1 to 64 apart: |z| <= %.2f", worst);
}

int main(void) {
    check_known_answers();
    check_kopt_random();
    check_documented_bits();
    check_bias();
    check_specials();
    check_words();
    check_exact_variance();
    check_variance();
    check_stores();
    check_ties();
    check_spans();
    check_independence();
    return done();
}
