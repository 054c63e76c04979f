/* test_random.c - the random bits are the documented ones, stochastic rounding is unbiased, and the three numbers that
   one element takes from one draw are as good as independent. */
#define KAHAN_OPT_IMPLEMENTATION
#include "../kahan_opt.h"

#include "tap.h"
#include "reference.h"

static const char *const format_name[] = {"fp32", "bf16", "fp16"};

static void check_known_answers(void)
{
    static const uint32_t zero[4] = {0, 0, 0, 0};
    static const uint32_t ten[4] = {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8};
    static const uint32_t seven[4] = {0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48};
    uint32_t out[4];
    ref_philox(10, zero, zero, out);
    ok(!memcmp(out, ten, sizeof out), "reference: Philox4x32-10 gives the published answer");
    ref_philox(7, zero, zero, out);
    ok(!memcmp(out, seven, sizeof out), "reference: Philox4x32-7 gives the published answer");
    ok(kopt_random(0, 0, 0, 0, 0) == 0xb709 && kopt_random(0, 0, 0, 0, 1) == 0x5f6f &&
           kopt_random(0, 0, 0, 0, 7) == 0x4f73, "kopt_random: the halves of the published answer, low half first");
}

static void check_kopt_random(void)
{
    uint64_t e = 1, seed = 1;
    uint32_t bad = 0, k;
    for (k = 0; k < 100000; ++k) {
        uint32_t step = (uint32_t)(seed >> 7), id = (uint32_t)(seed >> 23), stream = k % 16;
        seed = seed * UINT64_C(6364136223846793005) + 1442695040888963407u;
        e = (seed >> k % 64 ^ k) >> 1;
        bad += kopt_random(seed, step, id, stream, e) != ref_random(seed, step, id, stream, e);
    }
    ok(!bad, "kopt_random, 16 streams, indices below 2^63: %u of %u differ", (unsigned)bad, (unsigned)k);
    for (bad = 0, k = 0; k < 65536; ++k)
        bad += KOPT_RANDOM_WEIGHT(k) != (k * 20201 & 0xffff) || KOPT_RANDOM_FIRST_MOMENT(k) != (k * 10579 & 0xffff) ||
               KOPT_RANDOM_THIRD_MOMENT(k) != (k * 13355 & 0xffff) || KOPT_RANDOM_FOURTH_MOMENT(k) != (k * 14021 & 0xffff);
    ok(!bad, "the products are the documented ones: %u differ", (unsigned)bad);
}

/* ---- Which bits are used ---------------------------------------------------------------------------------------- */

static uint32_t inline_stochastic(kopt_format f, uint32_t x, uint32_t r)
{
    if (f == KOPT_BF16) return kopt_bf16_from_f32_stochastic(ref_float(x), r);
    return kopt_fp16_from_f32_stochastic(ref_float(x), r);
}

/* A number whose cut-off part and r just make an ulp, or just do not; for fp16 also below 2^-18, where the extended
   word itself is rounded. */
static uint32_t at_the_edge(kopt_format f, uint32_t r, uint32_t noise)
{
    uint32_t u = (noise & 0x3fff0000) + ((0x10000 - r - (noise & 1)) & 0xffff);
    if (f != KOPT_FP16) return u;
    if (noise & 2) return ref_from_extended(f, u & ~7u);
    return ref_bits(((float)(u & 0x3fffff) + (float)(noise >> 2 & 3) / 4) * ref_float(0x2b800000)); /* 2^-40 */
}

static void check_documented_bits(void)
{
    enum { LONGEST = 1024 };
    static const uint64_t first[] = {0, 1, 7, 12345, UINT64_C(0x7fffffff9), UINT64_C(0x1ffffffffffffffb),
                                     UINT64_C(0x7ffffffffffff000)};
    static uint32_t from[LONGEST], to[LONGEST];
    uint32_t state = 1;
    int isa, target, source;
    size_t i, k, n;
    for (isa = 0; isa < KOPT_ISA_COUNT; ++isa)
        for (target = KOPT_F32; target <= KOPT_FP16; ++target) {
            unsigned bad = 0;
            if (kopt_isa_force((kopt_isa)isa) != KOPT_OK) continue;
            for (source = KOPT_F32; source <= KOPT_FP16; ++source)
                for (k = 0; k < 70; ++k) {
                    uint64_t seed = k * UINT64_C(0x9e3779b97f4a7c15), base = first[k % 7];
                    uint32_t step = (uint32_t)(k * 77777777), id = (uint32_t)(k * 1234567891);
                    n = k < 7 ? LONGEST : k * 3;
                    for (i = 0; i < n; ++i) {
                        uint32_t r = ref_random(seed, step, id, 1, base + i);
                        state = state * 1664525 + 1013904223;
                        from[i] = state ^ state >> 15;
                        if (i % 3) from[i] = (from[i] & 0x8fffffff) + 0x30000000; /* where fp16 has numbers */
                        if (i % 5 == 0) from[i] = at_the_edge((kopt_format)target, r, from[i]);
                    }
                    kopt_convert_stochastic(to, (kopt_format)target, from, (kopt_format)source, n, seed, step, id,
                                            base);
                    for (i = 0; i < n; ++i) {
                        uint32_t r = ref_random(seed, step, id, 1, base + i);
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
static double bias_score(kopt_format f, uint32_t x, uint32_t step)
{
    uint32_t u = ref_extended(f, x), down = u >> 16, stray = 0;
    double p = (u & 0xffff) / 65536.0, up = 0, deviation = sqrt(DRAWS * p * (1 - p));
    int i;
    for (i = 0; i < DRAWS; ++i) sample[i] = ref_float(x);
    kopt_convert_stochastic(rounded, f, sample, KOPT_F32, DRAWS, 42, step, (uint32_t)f, 0);
    for (i = 0; i < DRAWS; ++i) up += rounded[i] == down + 1, stray += rounded[i] != down + 1 && rounded[i] != down;
    if (stray) return 1e9;
    return p == 0 ? up : fabs(up - DRAWS * p) / deviation;
}

static void check_bias(void)
{
    static const uint32_t fraction[16] = {0, 1, 2, 100, 0x1234, 0x4000, 0x7ffe, 0x7fff, 0x8000, 0x8001, 0x8002, 0xa5a5,
                                          0xc000, 0xfff0, 0xfffe, 0xffff};
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

static void check_specials(void)
{
    enum { BLOCK = 1 << 16 };
    static uint32_t from[BLOCK];
    int isa, f, word;
    uint32_t i, k;
    for (f = KOPT_BF16; f <= KOPT_FP16; ++f)
        for (isa = 0; isa < KOPT_ISA_COUNT; ++isa) {
            unsigned lost = 0, moved = 0;
            if (kopt_isa_force((kopt_isa)isa) != KOPT_OK) continue;
            for (k = 0; k < 256; ++k) { /* all 2^24 words with exponent 255, two of them infinities */
                for (i = 0; i < BLOCK; ++i) from[i] = (k & 128) << 24 | 0x7f800000 | (k & 127) << 16 | i;
                for (word = 0; word < 3; ++word) {
                    kopt_convert_stochastic(rounded, (kopt_format)f, from, KOPT_F32, BLOCK, (uint64_t)word << 33, k, 5,
                                            (uint64_t)word * 11);
                    for (i = 0; i < BLOCK; ++i)
                        lost += i == 0 && !(k & 127) ? rounded[i] != ref_narrow((kopt_format)f, from[i])
                                                     : !ref_is_nan((kopt_format)f, rounded[i]);
                }
            }
            for (k = 0; k < 2; ++k) { /* from the largest finite number on, both signs: round to nearest */
                for (i = 0; i < BLOCK; ++i) from[i] = (f == KOPT_BF16 ? 0x7f7f0000 + i : 0x477fe000 + i) | k << 31;
                kopt_convert_stochastic(rounded, (kopt_format)f, from, KOPT_F32, BLOCK, 9, 1, 2, 3);
                for (i = 0; i < BLOCK; ++i) {
                    uint32_t u = ref_extended((kopt_format)f, from[i]); /* ties away: 7bff8000 is infinity too */
                    moved += rounded[i] != (u + 0x8000) >> 16;
                    moved += inline_stochastic((kopt_format)f, from[i], i * 20201 & 0xffff) != (u + 0x8000) >> 16;
                }
            }
            ok(!lost && !moved, "%s, %s: NaN and infinity stay (%u wrong), overflow as to nearest (%u wrong)",
               format_name[f], kopt_isa_name((kopt_isa)isa), lost, moved);
        }
    kopt_isa_force(KOPT_ISA_COUNT);
}

/* ---- The lattice (r, 20201 r, 10579 r, 13355 r, 14021 r) --------------------------------------------------------- */

static double correlation(uint32_t a, uint32_t b, uint32_t mask)
{
    double sum_a = 0, sum_b = 0, aa = 0, bb = 0, ab = 0, n = 65536;
    uint32_t r;
    for (r = 0; r < 65536; ++r) {
        double x = r * a & 0xffff, y = r * b & mask;
        sum_a += x, sum_b += y, aa += x * x, bb += y * y, ab += x * y;
    }
    return (n * ab - sum_a * sum_b) / sqrt((n * aa - sum_a * sum_a) * (n * bb - sum_b * sum_b));
}

/* The largest |P(r1 < a, r2 < b) - ab| over a 256 x 256 grid. */
static double discrepancy(uint32_t a, uint32_t b, uint32_t unit)
{
    static uint32_t below[257][257];
    double worst = 0;
    uint32_t r, i, j;
    memset(below, 0, sizeof below);
    for (r = 0; r < 65536; ++r) ++below[(r * a & 0xffff) / 256 + 1][(r * b & (256 * unit - 1)) / unit + 1];
    for (i = 1; i <= 256; ++i)
        for (j = 1; j <= 256; ++j) {
            double d;
            below[i][j] += below[i - 1][j] + below[i][j - 1] - below[i - 1][j - 1];
            d = fabs(below[i][j] / 65536.0 - i / 256.0 * (j / 256.0));
            if (d > worst) worst = d;
        }
    return worst;
}

/* The length of the shortest (h, k) other than 0 with h + multiplier * k = 0 mod 2^16. */
static double shortest_dual(uint32_t multiplier)
{
    double best = 1e9;
    int32_t k;
    for (k = 0; k <= 300; ++k) {
        int32_t h = (int32_t)((multiplier * (uint32_t)k & 0xffff) ^ 0x8000) - 0x8000;
        double square = (double)h * h + (double)k * k;
        if (square > 0 && square < best) best = square;
    }
    return sqrt(best);
}

static void check_lattice(void)
{
    static const uint32_t pair[10][2] = {{1, 20201}, {1, 10579}, {20201, 10579}, {1, 13355}, {1, 14021}, {20201, 13355},
                                         {20201, 14021}, {10579, 13355}, {10579, 14021}, {13355, 14021}};
    double best = 0;
    uint32_t i, inverse = 1, m;
    for (i = 0; i < 10; ++i) {
        double c = correlation(pair[i][0], pair[i][1], 0xffff), d = discrepancy(pair[i][0], pair[i][1], 256), s;
        while ((inverse * pair[i][0] & 0xffff) != 1) inverse += 2;
        s = shortest_dual(inverse * pair[i][1]);
        ok(fabs(c) < 2e-3 && d < 1e-3 && s >= 254,
           "lattice (%u r, %u r): correlation %.1e, largest |P - ab| %.1e, shortest dual vector %.1f",
           (unsigned)pair[i][0], (unsigned)pair[i][1], c, d, s);
        inverse = 1;
    }
    for (m = 1; m < 65536; m += 2)
        if (shortest_dual(m) > best) best = shortest_dual(m);
    note("the longest that a lattice of 2^16 points can have: %.1f", best);
    for (i = 0; i < 2; ++i) {
        static const uint32_t moment[2] = {1, 10579};
        double c = correlation(moment[i], 20201, 255), d = discrepancy(moment[i], 20201, 1);
        ok(fabs(c) < 0.01 && d < 0.01, "COMPACT's low 8 bits against (%u r): correlation %.1e, largest |P - ab| %.1e",
           (unsigned)moment[i], c, d);
    }
}

/* ---- Independence of neighbours --------------------------------------------------------------------------------- */

/* +-1 for each element: whether the midpoint was rounded up. */
static void coin(signed char *out, uint64_t seed, uint32_t step, uint32_t id, uint64_t first)
{
    int i;
    for (i = 0; i < DRAWS; ++i) sample[i] = 1.00390625f;
    kopt_convert_stochastic(rounded, KOPT_BF16, sample, KOPT_F32, DRAWS, seed, step, id, first);
    for (i = 0; i < DRAWS; ++i) out[i] = rounded[i] == 0x3f81 ? 1 : -1;
}

/* The same out of a step (stream 0): weight 1, update -2^-8, stochastic store. */
static void step_coin(signed char *out, uint32_t step, uint32_t id)
{
    static uint16_t weight[DRAWS], grad[DRAWS];
    kopt_optimizer o = kopt_sgd(1, 0);
    kopt_tensor t = kopt_tensor_of(weight, grad, KOPT_BF16, DRAWS, NULL, 0);
    int i;
    o.rounding = KOPT_STOCHASTIC, o.seed = 1, o.step = step - 1, t.id = id;
    for (i = 0; i < DRAWS; ++i) weight[i] = 0x3f80, grad[i] = 0xbb80;
    kopt_optimizer_step(&o, &t, 1);
    for (i = 0; i < DRAWS; ++i) out[i] = weight[i] == 0x3f81 ? 1 : -1;
}

static double score(const signed char *a, const signed char *b, int n)
{
    long sum = 0;
    int i;
    for (i = 0; i < n; ++i) sum += a[i] * b[i];
    return fabs((double)sum) / sqrt(n);
}

/* The eight words of one cipher block: any two and any three of their coins. Element i & 1 + 2 * word, 128 further for
   the words 4 to 7. */
static double score_block(const signed char *a, const int *word, int words)
{
    long sum = 0, n = 0;
    int span, block, half, k;
    for (span = 0; span + 256 <= DRAWS; span += 256)
        for (block = 0; block < 128; block += 8)
            for (half = 0; half < 2; ++half, ++n) {
                int product = 1;
                for (k = 0; k < words; ++k)
                    product *= a[span + block + half + 2 * (word[k] & 3) + 128 * (word[k] >> 2)];
                sum += product;
            }
    return fabs((double)sum) / sqrt((double)n);
}

static void check_blocks(void)
{
    static signed char a[DRAWS];
    int w[4];
    double z, two = 0, three = 0, four = 0;
    coin(a, 3, 1, 1, 0);
    for (w[0] = 0; w[0] < 8; ++w[0])
        for (w[1] = w[0] + 1; w[1] < 8; ++w[1]) {
            if ((z = score_block(a, w, 2)) > two) two = z;
            for (w[2] = w[1] + 1; w[2] < 8; ++w[2]) {
                if ((z = score_block(a, w, 3)) > three) three = z;
                for (w[3] = w[2] + 1; w[3] < 8; ++w[3])
                    if ((z = score_block(a, w, 4)) > four) four = z;
            }
        }
    ok(two < 4.5, "any two words of a block: |z| <= %.2f", two);
    ok(three < 4.5, "any three words of a block: |z| <= %.2f", three);
    ok(four > 300, "some four words of a block are tied, as documented: |z| = %.0f", four);
}

static void check_independence(void)
{
    static signed char a[DRAWS], b[DRAWS];
    double z, worst = 0;
    int lag;
    coin(a, 1, 1, 1, 0);
    for (lag = 1; lag <= 256; lag += lag == 64 ? 64 : lag == 136 ? 120 : 1)
        if ((z = score(a, a + lag, DRAWS - lag)) > worst) worst = z;
    ok(worst < 4.5, "elements 1 to 64, 128 to 136 and 256 apart: |z| <= %.2f", worst);
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

int main(void)
{
    check_known_answers();
    check_kopt_random();
    check_documented_bits();
    check_bias();
    check_specials();
    check_lattice();
    check_blocks();
    check_independence();
    return done();
}
