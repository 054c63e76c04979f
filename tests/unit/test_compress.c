/* test_compress.c - compressed gradients and reductions: the bits, by reference.h, which calls nothing of the
   code under test; means, sums over many steps and their bounds in binary64; what is refused. */
#define KAHAN_OPT_IMPLEMENTATION
#include "../../kahan_opt.h"

#include "tap.h"
#include "reference.h"
#include "inputs.h"

#include <fenv.h>
#include <stdlib.h>

enum { MOST = 1300, EDGE = 16, CODE = 4 * MOST + 64 };

static int quick;

/* ---- Inputs ----------------------------------------------------------------------------------------------------- */

static uint64_t dice_state = 1;
static uint32_t dice(void) { return (uint32_t)(splitmix64(&dice_state) >> 32); }
static double normal(void) { return normal64(&dice_state); }

static const kopt_format codes[] = {KOPT_BF16, KOPT_FP16, KOPT_Q8, KOPT_Q1};

static kopt_isa isas[ISAS];
static int isa_count;

/* Gradients; any finite bits; any bits at all; nearly nothing, and zeros; the largest. */
enum { GRADIENTS, FINITE, ANY_BITS, TINY, LARGEST, KINDS };

static void fill(void *array, kopt_format f, size_t n, int kind) {
    size_t i;
    for (i = 0; i < n; ++i) {
        uint32_t word = dice() >> (f == KOPT_F32 ? 0 : 16);
        while (kind == FINITE && !ref_is_finite(f, word)) word = dice() >> (f == KOPT_F32 ? 0 : 16);
        if (kind == GRADIENTS) word = ref_narrow(f, ref_bits((float)(0.02 * normal())));
        if (kind == TINY)
            word =
                dice() & 1 ? (dice() & 1) << (f == KOPT_F32 ? 31 : 15) : word & (f == KOPT_F32 ? 0x81ffffff : 0x81ff);
        if (kind == LARGEST)
            word = (word & (f == KOPT_F32 ? 0x80000000 : 0x8000)) | (f == KOPT_F32    ? 0x7f7fffff
                                                                     : f == KOPT_BF16 ? 0x7f7f
                                                                                      : 0x7bff);
        ref_set(array, ref_width(f), i, word);
    }
}

static unsigned char grad[4 * MOST + 8], code[CODE], want[CODE], rest[4 * MOST + EDGE], want_rest[4 * MOST + EDGE];
static unsigned char sum[4 * MOST + EDGE], want_sum[4 * MOST + EDGE];

/* ---- Bits ------------------------------------------------------------------------------------------------------- */

static kopt_compressor any_compressor(kopt_format which, int how, size_t n) {
    kopt_compressor c = kopt_compressor_of(which, NULL, n);
    c.rounding = how & 1 ? KOPT_STOCHASTIC : KOPT_NEAREST;
    c.seed = (uint64_t)dice() << 32 | dice(), c.id = dice();
    c.first_index = dice() & 1 ? ((uint64_t)dice() << 31 | dice()) : dice() & 0xfff;
    if (which == KOPT_Q8 || which == KOPT_Q1) c.first_index &= ~UINT64_C(255);
    return c;
}

/* Three steps of one compressor are those of the reference, and nothing else is written. */
static int steps_differ(kopt_compressor c, kopt_format grad_format, kopt_format rest_format, int kind) {
    const size_t size = ref_code_size(c.code, c.n), rest_size = c.n * ref_width(rest_format);
    kopt_compressor reference = c;
    int step, bad = kopt_format_size(c.code, c.n) != size;
    memset(rest, 0x5a, sizeof rest), memset(want_rest, 0x5a, sizeof want_rest); /* not read in the first step */
    if (c.residual) c.residual = rest + 3, reference.residual = want_rest + 3;
    c.residual_format = reference.residual_format = rest_format;
    for (step = 0; step < 3; ++step) {
        fill(grad + 1, grad_format, c.n, step == 1 ? GRADIENTS : kind);
        memset(code, 0xa5, sizeof code), memset(want, 0xa5, sizeof want);
        bad += kopt_compress(&c, code + 5, size, grad + 1, grad_format) != KOPT_OK;
        ++reference.step;
        ref_compress(&reference, want + 5, grad + 1, grad_format);
        bad += memcmp(code, want, sizeof code) != 0 || memcmp(rest, want_rest, sizeof rest) != 0;
        bad += c.step != reference.step || rest[3 + (c.residual ? rest_size : 0)] != 0x5a;
    }
    return bad;
}

static void check_bits(void) {
    static const size_t lengths[] = {0, 1, 7, 64, 191, 256, 257, 700};
    int w, how, f, r, kind, k, l;
    for (w = 0; w < 4; ++w) {
        int bad = 0, cases = 0;
        for (how = 0; how < 2; ++how)
            for (f = 0; f < 3; ++f)
                for (r = 0; r < 6; ++r) /* no residual; fp32; bf16 and fp16, nearest or stochastic */
                    for (kind = 0; kind < KINDS; ++kind)
                        for (k = 0; k < isa_count; ++k)
                            for (l = quick ? (kind + r + f) % 3 : 0; l < 8; l += quick ? 3 : 1) {
                                kopt_compressor c = any_compressor(codes[w], how, lengths[l]);
                                if (codes[w] == KOPT_Q1 && how == 1 && r > 0) continue;
                                if (r > 0) c.residual = rest;
                                c.residual_rounding = r & 1 ? KOPT_NEAREST : KOPT_STOCHASTIC;
                                kopt_isa_force(isas[k]);
                                bad += steps_differ(c, (kopt_format)f, (kopt_format)(r / 2), kind);
                                ++cases;
                            }
        kopt_isa_force(KOPT_ISA_AUTO);
        ok(!bad, "%s: code and residual are the reference's in %d cases of 3 steps, on every ISA",
           format_name[codes[w]], cases);
    }
}

static void check_slices(void) {
    static const int modes[] = ROUNDING_DIRECTIONS;
    int w, how, trial;
    for (w = 0; w < 4; ++w) {
        const uint32_t block = codes[w] == KOPT_Q8 ? 64 : codes[w] == KOPT_Q1 ? 256 : 0;
        int bad = 0;
        for (how = 0; how < 2; ++how)
            for (trial = 0; trial < 20; ++trial) {
                const int feedback = !(codes[w] == KOPT_Q1 && how == 1);
                kopt_compressor whole = any_compressor(codes[w], how, MOST), part;
                size_t begin, end, size = ref_code_size(codes[w], MOST);
                whole.step = 7, whole.residual = feedback ? rest : NULL;
                part = whole;
                fill(grad, KOPT_BF16, MOST, GRADIENTS), fill(rest, KOPT_BF16, MOST, GRADIENTS);
                memcpy(want_rest, rest, sizeof rest);
                bad += kopt_compress(&whole, want, size, grad, KOPT_BF16) != KOPT_OK;
                for (begin = 0; begin < MOST; begin = end) {
                    end = begin + (block ? block * (1 + dice() % 3) : 1 + dice() % 400);
                    if (end > MOST) end = MOST;
                    part.n = end - begin, part.step = 7, part.first_index = whole.first_index + begin;
                    if (feedback) part.residual = want_rest + 2 * begin;
                    fesetround(modes[dice() % 4]);
                    bad +=
                        kopt_compress(&part, code + (block ? kopt_format_size(codes[w], begin) : 2 * begin),
                                      kopt_format_size(codes[w], end - begin), grad + 2 * begin, KOPT_BF16) != KOPT_OK;
                    fesetround(FE_TONEAREST);
                }
                bad += memcmp(code, want, size) != 0 || memcmp(rest, want_rest, 2 * MOST) != 0;
            }
        ok(!bad, "%s: the code of %s is that of the whole, in any rounding mode of the caller", format_name[codes[w]],
           block == 64 ? "slices at multiples of 64"
           : block     ? "slices at multiples of 256"
                       : "any slices");
    }
}

static void check_decompress(void) {
    static const double scales[] = {1, 0.25, -3.7, 1e-30, 0, 3e38, 1 + 1e-12};
    int w, f, kind, k, s;
    for (w = 0; w < 4; ++w) {
        int bad = 0;
        for (f = 0; f < 3; ++f)
            for (kind = 0; kind < KINDS; ++kind)
                for (k = 0; k < isa_count; ++k)
                    for (s = 0; s < 7; ++s) {
                        const kopt_format format = (kopt_format)f;
                        const size_t n = s == 0 ? 700 : 1 + dice() % 600, cut = n / 512 * 256,
                                     width = ref_width(format);
                        const size_t size = ref_code_size(codes[w], n);
                        size_t i;
                        kopt_isa_force(isas[k]);
                        fill(code, KOPT_BF16, sizeof code / 2, kind); /* as any bytes */
                        fill(sum + 1, format, n, kind == ANY_BITS ? ANY_BITS : GRADIENTS);
                        memcpy(want_sum, sum, sizeof sum);
                        for (i = 0; i < n; ++i)
                            ref_set(want_sum + 1, width, i,
                                    ref_decompress_add(format, ref_get(sum + 1, width, i),
                                                       ref_decode(code, codes[w], i), scales[s]));
                        bad += kopt_decompress_add(sum + 1, format, code, kopt_format_size(codes[w], cut), codes[w],
                                                   cut, scales[s]) != KOPT_OK;
                        bad += kopt_decompress_add(
                                   sum + 1 + cut * width, format, code + kopt_format_size(codes[w], cut),
                                   size - kopt_format_size(codes[w], cut), codes[w], n - cut, scales[s]) != KOPT_OK;
                        bad += memcmp(sum, want_sum, sizeof sum) != 0;
                    }
        kopt_isa_force(KOPT_ISA_AUTO);
        ok(!bad, "%s: decompress and add, in slices, is the reference's for any bytes of code", format_name[codes[w]]);
    }
}

/* 1 + 3 scale, exactly, for the scales whose words are powers of two: none but 1 is 1. */
static void check_scales(void) {
    int power, sign, bad = 0;
    for (power = -10; power <= 10; ++power)
        for (sign = -1; sign <= 1; sign += 2) {
            const double scale = ldexp(sign, power);
            const uint16_t three = 0x4040;
            const void *shards[1];
            float one = 1, all, value = 3;
            shards[0] = &value;
            bad += kopt_decompress_add(&one, KOPT_F32, &three, 2, KOPT_BF16, 1, scale) != KOPT_OK;
            bad += kopt_reduce(&all, KOPT_F32, shards, 1, KOPT_F32, 1, scale) != KOPT_OK;
            bad += ref_bits(one) != ref_bits((float)(1 + 3 * scale)) || ref_bits(all) != ref_bits((float)(3 * scale));
        }
    ok(!bad, "scales that are powers of two: %d wrong", bad);
}

/* ---- What it is good for ---------------------------------------------------------------------------------------- */

static void decode(double *out, const kopt_compressor *c, const void *array, kopt_format f) {
    float decoded[MOST];
    size_t i;
    kopt_compressor once = *c;
    memset(decoded, 0, sizeof decoded);
    kopt_compress(&once, code, sizeof code, array, f);
    kopt_decompress_add(decoded, KOPT_F32, code, sizeof code, c->code, c->n, 1);
    for (i = 0; i < c->n; ++i) out[i] = (double)decoded[i];
}

/* Stochastic codes: the mean over many steps is the gradient, each element and all together. */
static void check_unbiased(void) {
    enum { N = 300 };
    const int trials = quick ? 6000 : 12000;
    static float g[N];
    static double y[MOST], total[N], squares[N];
    int w, t, i;
    for (i = 0; i < N; ++i) g[i] = (float)(normal() * (i % 3 ? 0.02 : 0.0002));
    g[17] = -0.1f; /* the largest of its block is negative */
    for (w = 0; w < 4; ++w) {
        double worst = 0, all = 0, variance = 0;
        memset(total, 0, sizeof total), memset(squares, 0, sizeof squares);
        for (t = 0; t < trials; ++t) {
            kopt_compressor c = kopt_compressor_of(codes[w], NULL, N);
            c.step = (uint32_t)t, c.seed = 5;
            decode(y, &c, g, KOPT_F32);
            for (i = 0; i < N; ++i) {
                const double error = y[i] - (double)g[i];
                total[i] += error, squares[i] += error * error;
            }
        }
        for (i = 0; i < N; ++i) {
            const double mean = total[i] / trials, deviation = sqrt(squares[i] / trials - mean * mean);
            const double z = deviation > 0 ? fabs(mean) / (deviation / sqrt(trials)) : 0;
            if (z > worst) worst = z;
            all += mean, variance += squares[i] / trials / trials;
        }
        ok(worst < 4.5 && fabs(all) < 4 * sqrt(variance),
           "%s, stochastic: the mean of %d codes is the gradient: worst of "
           "%d elements %.1f standard errors, their sum %.1f",
           format_name[codes[w]], trials, (int)N, worst, fabs(all) / sqrt(variance));
    }
}

/* The sum of what arrives is the sum of the gradients less the last residual, but for roundings to fp32 and, of 16-bit
   residuals, to those. Without a residual it is not. */
static void check_feedback(void) {
    enum { N = 600 };
    const int steps = quick ? 200 : 1000;
    static float g[N];
    static double y[MOST], arrived[N], gone[N], bound[N];
    int w, r, t, i;
    for (w = 0; w < 4; ++w)
        for (r = 0; r < 4; ++r) { /* none, fp32, bf16, fp16 */
            kopt_compressor c = kopt_compressor_of(codes[w], r ? rest : NULL, N);
            double early = 0, late = 0, loss = 0, size = 0;
            int above = 0;
            c.residual_format = (kopt_format)(r ? r - 1 : 1), c.rounding = KOPT_NEAREST;
            memset(arrived, 0, sizeof arrived), memset(gone, 0, sizeof gone), memset(bound, 0, sizeof bound);
            for (t = 0; t < steps; ++t) {
                for (i = 0; i < N; ++i) g[i] = (float)(0.001 * (i % 7 - 3) + 0.02 * normal());
                decode(y, &c, g, KOPT_F32);
                ++c.step;
                for (i = 0; i < N; ++i) {
                    const double kept =
                        r ? (double)ref_float(
                                ref_widen(c.residual_format, ref_get(rest, ref_width(c.residual_format), (size_t)i)))
                          : 0;
                    const double unit = r == 2 ? ldexp(1, -7) : r == 3 ? ldexp(1, -10) : ldexp(1, -24);
                    arrived[i] += y[i], gone[i] += (double)g[i];
                    bound[i] += ldexp(fabs(y[i] + kept), -23) + fabs(kept) * unit + (r == 3 ? ldexp(1, -24) : 0);
                    if (t < steps / 2 && fabs(kept) > early) early = fabs(kept);
                    if (t >= steps / 2 && fabs(kept) > late) late = fabs(kept);
                    if (t == steps - 1) {
                        const double missing = fabs(gone[i] - kept - arrived[i]);
                        loss += missing, size += bound[i];
                        if (missing > bound[i]) above = 1;
                    }
                }
            }
            if (r)
                ok(!above && late < 1.5 * early,
                   "%s with a residual in %s: after %d steps the sums differ by the residual and "
                   "%.1e (bound %.1e); the residual does not grow: %.3f, %.3f",
                   format_name[codes[w]], format_name[c.residual_format], steps, loss / N, size / N, early, late);
            else if (codes[w] == KOPT_Q8 || codes[w] == KOPT_Q1)
                ok(loss > 100 * size, "%s without: they differ by %.4f (bound of roundings %.1e)",
                   format_name[codes[w]], loss / N, size / N);
        }
}

/* One bit: the mean of the magnitudes, in binary64. A NaN or infinity takes its block and no other. */
static void check_blocks(void) {
    enum { N = 700 };
    static float g[N], out[N];
    static unsigned char residual[4 * N];
    kopt_compressor c = kopt_compressor_of(KOPT_Q1, residual, N);
    int w, i, k, bad = 0;
    double mean[3] = {0, 0, 0};
    fill(g, KOPT_F32, N, GRADIENTS);
    c.residual_format = KOPT_F32;
    for (i = 0; i < N; ++i) mean[i / 256] += fabs((double)g[i]) / (i < 512 ? 256 : N - 512);
    kopt_compress(&c, code, sizeof code, g, KOPT_F32);
    memset(out, 0, sizeof out);
    kopt_decompress_add(out, KOPT_F32, code, sizeof code, KOPT_Q1, N, 1);
    for (i = 0; i < N; ++i) bad += fabs(fabs((double)out[i]) / mean[i / 256] - 1) > 1e-5 || (out[i] < 0) != (g[i] < 0);
    ok(!bad, "1 bit: sign and mean magnitude");
    for (w = 0; w < 4; ++w) {
        const int block = codes[w] == KOPT_Q8 ? 64 : codes[w] == KOPT_Q1 ? 256 : 1;
        bad = 0;
        for (k = 0; k < 3; ++k) {
            const uint32_t strange[] = {0x7f800000, 0xff800000, 0x7fc00001};
            c = kopt_compressor_of(codes[w], residual, N);
            c.residual_format = KOPT_F32;
            fill(g, KOPT_F32, N, GRADIENTS);
            g[300] = ref_float(strange[k]);
            kopt_compress(&c, code, sizeof code, g, KOPT_F32);
            memset(out, 0, sizeof out);
            kopt_decompress_add(out, KOPT_F32, code, sizeof code, codes[w], N, 1);
            for (i = 0; i < N; ++i) {
                const int hit = i / block == 300 / block;
                const uint32_t u = ref_bits(out[i]);
                bad += ref_is_finite(KOPT_F32, u) == hit || !ref_is_finite(KOPT_F32, ref_get(residual, 4, (size_t)i));
                bad += hit && ref_get(residual, 4, (size_t)i) != 0;
                bad += hit && (block > 1 || k == 2) && u != 0x7fc00000;
                bad += hit && block == 1 && k < 2 && u != strange[k];
            }
        }
        ok(!bad, "%s: what is not finite arrives so, and leaves no residual", format_name[codes[w]]);
    }
}

/* 2^-126 is a scale, below it there is none. 8 bit: it is that of magnitudes above 15/16 of it. 1 bit: the means of 256
   such magnitudes are exact. */
static void check_least_scale(void) {
    static float g[256], out[256];
    int w, how, k, i, bad = 0;
    for (w = 2; w < 4; ++w)
        for (how = 0; how < 2; ++how)
            for (k = 0; k < 2; ++k) {
                const int n = w == 2 ? 64 : 256;
                kopt_compressor c = kopt_compressor_of(codes[w], NULL, (size_t)n);
                c.rounding = how ? KOPT_STOCHASTIC : KOPT_NEAREST;
                for (i = 0; i < n; ++i)
                    g[i] = ref_float(w == 2 ? k ? 0x00780000 : 0x00f80000
                                     : k    ? (how ? 0x007fffff : 0x007fff00)
                                            : 0x00800000);
                bad += kopt_compress(&c, code, sizeof code, g, KOPT_F32) != KOPT_OK;
                if (w == 2) bad += code[0] != (k ? 0 : 1);
                if (w == 3) bad += code[0] != 0 || code[1] != 0 || code[2] != (k ? 0 : 0x80) || code[3] != 0;
                for (i = 0; w == 2 && i < 64; ++i) bad += code[1 + i] != (k ? 0 : 127);
                for (i = 0; w == 3 && i < 32; ++i) bad += code[4 + i] != 0;
                memset(out, 0, sizeof out);
                bad += kopt_decompress_add(out, KOPT_F32, code, sizeof code, codes[w], (size_t)n, 1) != KOPT_OK;
                for (i = 0; i < n; ++i) bad += ref_bits(out[i]) != (k ? 0 : w == 2 ? 0x00f80000u : 0x00800000u);
            }
    ok(!bad, "the smallest scale of 8 bit and 1 bit is 2^-126: %d wrong", bad);
}

/* 31/16 times the scale has code 127 with any draw, and 255 below 0: not 128, or 256. So has everything above it, if
   the
   scale is the largest one. */
static void check_largest_code(void) {
    static const uint32_t most[] = {0x40780000, 0x7f780000, 0x7f780001, 0x7f7fffff};
    static float g[64];
    kopt_compressor c = kopt_compressor_of(KOPT_Q8, NULL, 64);
    uint64_t e = 0;
    int i, k, bad = 0;
    c.rounding = KOPT_STOCHASTIC, c.seed = 7;
    while (ref_number(ref_random(7, 1, 0, 3, e), 0) < 65533 && e < 1000000) ++e;
    c.first_index = e / 64 * 64;
    for (k = 0; k < 4; ++k) {
        for (i = 0; i < 64; ++i) g[i] = ref_float(most[k] | (i % 2 ? 0x80000000u : 0));
        c.step = 0;
        bad += kopt_compress(&c, code, sizeof code, g, KOPT_F32) != KOPT_OK || e == 1000000;
        bad += code[0] != (k == 0 ? 128 : 254);
        for (i = 0; i < 64; ++i) bad += code[1 + i] != (i % 2 ? 255 : 127);
    }
    ok(!bad, "the largest of a block has code 127, or 255 below 0: %d wrong", bad);
}

/* One bit: a zero has the sign it has. Of random signs, with the largest |x| = 1, x = (2 r + 1) / 2^16 - 1 is where the
   draw r decides: there and below the bit is set, 2^-18 above it is not. */
static void check_sign_edges(void) {
    static float g[256];
    kopt_compressor c = kopt_compressor_of(KOPT_Q1, NULL, 256);
    int turn, i, bad = 0;
    c.rounding = KOPT_NEAREST;
    for (i = 0; i < 256; ++i)
        g[i] = ref_float(i % 3 == 0 ? 0 : i % 3 == 1 ? 0x80000000u : i % 2 ? 0x3f800000u : 0xbf800000u);
    bad += kopt_compress(&c, code, sizeof code, g, KOPT_F32) != KOPT_OK;
    for (i = 0; i < 256; ++i) bad += (code[4 + i / 8] >> i % 8 & 1) != (i % 3 == 1 || (i % 3 == 2 && i % 2 == 0));
    ok(!bad, "1 bit: zeros keep their sign, %d do not", bad);
    for (turn = -1, bad = 0; turn < 2; ++turn) {
        c = kopt_compressor_of(KOPT_Q1, NULL, 256);
        for (i = 0; i < 256; ++i) {
            const int32_t r = (int32_t)ref_number(ref_random(c.seed, 1, c.id, 3, (uint64_t)i), 0);
            g[i] = i == 0 ? 1 : (float)(4 * (2 * r + 1 - 65536) + turn) / 262144; /* all exact */
        }
        bad += kopt_compress(&c, code, sizeof code, g, KOPT_F32) != KOPT_OK;
        for (i = 1; i < 256; ++i) bad += (code[4 + i / 8] >> i % 8 & 1) != (turn <= 0);
    }
    ok(!bad, "1 bit, stochastic: where the draw decides, and beside it: %d wrong", bad);
}

/* ---- Reductions ------------------------------------------------------------------------------------------------- */

static void check_reduce(void) {
    enum { SHARDS = 9 };
    static unsigned char shard[SHARDS][4 * MOST + 8];
    static const double scales[] = {1, 1.0 / 3, -2, 1e-40};
    const void *shards[SHARDS], *parts[SHARDS];
    int f, o, kind, k, s, cases = 0;
    for (f = 0; f < 3; ++f) {
        int bad = 0;
        for (o = 0; o < 3; ++o)
            for (kind = 0; kind < KINDS; ++kind)
                for (k = 0; k < isa_count; ++k)
                    for (s = 0; s < 4; ++s, ++cases) {
                        const kopt_format from = (kopt_format)f, to = (kopt_format)o;
                        const size_t n = dice() % 200, count = 1 + dice() % SHARDS, cut = n == 0 ? 0 : dice() % n;
                        const size_t width = ref_width(to), in_place = f == o ? dice() % (count + 1) : count;
                        unsigned char *out = in_place < count ? shard[in_place] + in_place % 4 : sum + 3;
                        size_t i, j;
                        for (j = 0; j < count; ++j) {
                            shards[j] = shard[j] + j % 4;
                            parts[j] = shard[j] + j % 4 + cut * ref_width(from);
                            fill(shard[j] + j % 4, from, n, kind);
                        }
                        for (i = 0; i < n; ++i)
                            ref_set(want_sum, width, i, ref_reduce(to, shards, count, from, i, scales[s]));
                        kopt_isa_force(isas[k]);
                        out[n * width] = 77;
                        bad += kopt_reduce(out + cut * width, to, parts, count, from, n - cut, scales[s]) != KOPT_OK;
                        bad += kopt_reduce(out, to, shards, count, from, cut, scales[s]) != KOPT_OK;
                        bad += memcmp(out, want_sum, n * width) != 0 || out[n * width] != 77;
                    }
        kopt_isa_force(KOPT_ISA_AUTO);
        ok(!bad, "reduction of %s: in the order of the shards, in slices, in place, on every ISA", format_name[f]);
    }
    note("%d reductions", cases);
}

static void check_order(void) {
    const float a = 1e8f, b = -1e8f, c = 1;
    const void *shards[3];
    float out[2], sum32;
    kopt_bf16 half[3];
    shards[0] = &a, shards[1] = &b, shards[2] = &c;
    kopt_reduce(&out[0], KOPT_F32, shards, 3, KOPT_F32, 1, 1);
    shards[0] = &c, shards[1] = &a, shards[2] = &b;
    kopt_reduce(&out[1], KOPT_F32, shards, 3, KOPT_F32, 1, 1);
    ok(ref_bits(out[0]) == ref_bits(1) && ref_bits(out[1]) == 0,
       "the order is that of the list: 1e8 - 1e8 + 1 is 1, 1 + 1e8 - 1e8 is 0");
    half[0] = 0x3f80, half[1] = half[2] = 0x3b80; /* 1 + 2^-8 + 2^-8 */
    shards[0] = &half[0], shards[1] = &half[1], shards[2] = &half[2];
    kopt_reduce(&half[0], KOPT_BF16, shards, 3, KOPT_BF16, 1, 1);
    sum32 = 1 + 1.0f / 128;
    ok(half[0] == ref_bits(sum32) >> 16, "16-bit numbers are added in fp32 and rounded once");
}

static void mpi_sum(kopt_format format, void *in, void *inout, const int *len) {
    const void *shards[2];
    shards[0] = inout, shards[1] = in;
    if (len != NULL && *len > 0) kopt_reduce(inout, format, shards, 2, format, (size_t)*len, 1);
}

static void check_mpi(void) {
    int f, k, trial, bad = 0, len;
    for (f = 1; f < 3; ++f)
        for (k = 0; k < isa_count; ++k)
            for (trial = 0; trial < 60; ++trial) {
                const kopt_format format = (kopt_format)f;
                const void *shards[2];
                size_t i;
                kopt_isa_force(isas[k]);
                len = (int)(dice() % 90);
                fill(grad + 1, format, 100, trial % KINDS), fill(sum + 3, format, 100, trial % KINDS);
                memcpy(want_sum, sum, sizeof sum);
                shards[0] = sum + 3, shards[1] = trial == 9 ? sum + 3 : grad + 1;
                for (i = 0; i < (size_t)len; ++i)
                    ref_set(want_sum + 3, 2, i, ref_reduce(format, shards, 2, format, i, 1));
                mpi_sum(format, trial == 9 ? sum + 3 : grad + 1, sum + 3, &len);
                bad += memcmp(sum, want_sum, sizeof sum) != 0;
                len = -1, mpi_sum(format, grad, sum, &len);
                len = 20, mpi_sum(format, NULL, sum, &len), mpi_sum(format, grad, NULL, &len),
                mpi_sum(format, grad, sum, NULL);
                mpi_sum(format, sum + 1, sum, &len), mpi_sum(format, sum, sum + 38, &len);
                bad += memcmp(sum, want_sum, sizeof sum) != 0;
            }
    kopt_isa_force(KOPT_ISA_AUTO);
    ok(!bad, "the sums for MPI are fp32 sums rounded once; NULL, overlap and negative lengths do nothing");
}

/* ---- Refusals --------------------------------------------------------------------------------------------------- */

/* Bytes of n values: counted one by one, and as far as there are arrays. */
static void check_sizes(void) {
    const size_t most = SIZE_MAX / 32 - 8;
    int f, bad = 0;
    size_t n, k;
    for (f = KOPT_F32; f <= KOPT_Q1; ++f) {
        const kopt_format format = (kopt_format)f;
        const size_t block = format == KOPT_Q8 ? 64 : 256;
        for (n = 0; n <= MOST; ++n)
            bad += kopt_format_size(format, n) != (format == KOPT_F32 ? 4 * n : ref_code_size(format, n));
        for (k = 0; k < 5; ++k) /* where the code of a slice begins */
            bad += kopt_format_size(format, block * k + 77) - kopt_format_size(format, block * k) !=
                   kopt_format_size(format, 77);
        bad += kopt_format_size(format, most) < most / 8 || kopt_format_size(format, most) > 4 * most;
        bad += kopt_format_size(format, most + 1) != 0 || kopt_format_size(format, SIZE_MAX) != 0;
    }
    bad += kopt_format_size(KOPT_F32, most) != 4 * most || kopt_format_size(KOPT_FP16, most) != 2 * most;
    for (f = -1; f <= 5; f += 6) bad += kopt_format_size((kopt_format)f, 300) != 0;
    ok(!bad, "sizes of every format: %d wrong", bad);
}

static void check_refusals(void) {
    static struct {
        unsigned char residual[4 * 300], out[4 * 300], grad[4 * 300];
    } m, was_m;
    kopt_compressor c = kopt_compressor_of(KOPT_Q8, m.residual, 300), was;
    const void *shards[3];
    const size_t size = kopt_format_size(KOPT_Q8, 300);
    int good;
    fill(&m, KOPT_F32, sizeof m / 4, GRADIENTS);
    was = c, was_m = m;
    ok(c.rounding == KOPT_NEAREST && c.residual_format == KOPT_BF16 &&
           kopt_compressor_of(KOPT_Q8, NULL, 3).rounding == KOPT_STOCHASTIC,
       "the defaults: nearest with a bf16 residual, stochastic without");
    ok(size == 305, "the size of 300 codes of 8 bits");
#define REFUSE(result, change, call)                                                            \
    do {                                                                                        \
        kopt_compressor now;                                                                    \
        c = was, change, now = c;                                                               \
        good &= call == result && !memcmp(&now, &c, sizeof c) && !memcmp(&m, &was_m, sizeof m); \
        if (!good) note("line %d", __LINE__), good = 1, ok(0, "refused");                       \
    } while (0)
#define COMPRESS(out, size, grad) kopt_compress(&c, out, size, grad, KOPT_F32)
    good = 1;
    REFUSE(KOPT_ERROR_NULL, (void)0, kopt_compress(NULL, m.out, size, m.grad, KOPT_F32));
    REFUSE(KOPT_ERROR_NULL, (void)0, COMPRESS(NULL, size, m.grad));
    REFUSE(KOPT_ERROR_NULL, (void)0, COMPRESS(m.out, size, NULL));
    REFUSE(KOPT_ERROR_SIZE, (void)0, COMPRESS(m.out, size - 1, m.grad));
    REFUSE(KOPT_ERROR_OPTION, c.code = KOPT_F32, COMPRESS(m.out, size, m.grad));
    REFUSE(KOPT_ERROR_OPTION, c.code = (kopt_format)5, COMPRESS(m.out, size, m.grad));
    REFUSE(KOPT_ERROR_OPTION, c.code = (kopt_format)-1, COMPRESS(m.out, size, m.grad));
    REFUSE(KOPT_ERROR_OPTION, c.rounding = KOPT_KAHAN, COMPRESS(m.out, size, m.grad));
    REFUSE(KOPT_ERROR_OPTION, c.residual_format = KOPT_Q8, COMPRESS(m.out, size, m.grad));
    REFUSE(KOPT_ERROR_OPTION, c.residual_rounding = KOPT_EXACT, COMPRESS(m.out, size, m.grad));
    REFUSE(KOPT_ERROR_OPTION, (c.code = KOPT_Q1, c.rounding = KOPT_STOCHASTIC), COMPRESS(m.out, size, m.grad));
    REFUSE(KOPT_ERROR_OPTION, (void)0, kopt_compress(&c, m.out, size, m.grad, KOPT_Q8));
    REFUSE(KOPT_ERROR_BOUNDS, c.n = SIZE_MAX / 4, COMPRESS(m.out, size, m.grad));
    REFUSE(KOPT_ERROR_BOUNDS, c.first_index = UINT64_C(1) << 63, COMPRESS(m.out, size, m.grad));
    REFUSE(KOPT_ERROR_BOUNDS, c.first_index = 96, COMPRESS(m.out, size, m.grad));
    REFUSE(KOPT_ERROR_BOUNDS, (c.first_index = 64, c.code = KOPT_Q1), COMPRESS(m.out, size, m.grad));
    REFUSE(KOPT_ERROR_STEP, c.step = UINT32_MAX, COMPRESS(m.out, size, m.grad));
    REFUSE(KOPT_ERROR_OPTION, c.reserved32_ = 1, COMPRESS(m.out, size, m.grad));
    REFUSE(KOPT_ERROR_OPTION, c.reserved32_ = UINT32_C(1) << 31, COMPRESS(m.out, size, m.grad));
    REFUSE(KOPT_ERROR_UNINITIALIZED, c.made_ = 0, COMPRESS(m.out, size, m.grad));
    REFUSE(KOPT_ERROR_UNINITIALIZED, memset(&c, 0, sizeof c), COMPRESS(m.out, size, m.grad));
    REFUSE(KOPT_ERROR_OVERLAP, (void)0, COMPRESS(m.grad, size, m.grad));
    REFUSE(KOPT_ERROR_OVERLAP, (void)0, COMPRESS(m.residual + 599, size, m.grad));
    REFUSE(KOPT_ERROR_OVERLAP, c.residual = m.grad + 1198, COMPRESS(m.out, size, m.grad));
    ok(good, "compression: bad arguments are refused, nothing is written or counted");
#define ADD(sum, in, size, n, scale) kopt_decompress_add(sum, KOPT_F32, in, size, KOPT_Q8, n, scale)
    REFUSE(KOPT_ERROR_NULL, (void)0, ADD(NULL, m.out, size, 300, 1));
    REFUSE(KOPT_ERROR_NULL, (void)0, ADD(m.grad, NULL, size, 300, 1));
    REFUSE(KOPT_ERROR_SIZE, (void)0, ADD(m.grad, m.out, size - 1, 300, 1));
    REFUSE(KOPT_ERROR_RANGE, (void)0, ADD(m.grad, m.out, size, 300, HUGE_VAL));
    REFUSE(KOPT_ERROR_RANGE, (void)0, ADD(m.grad, m.out, size, 300, -4e38));
    REFUSE(KOPT_ERROR_BOUNDS, (void)0, ADD(m.grad, m.out, size, SIZE_MAX / 2, 1));
    REFUSE(KOPT_ERROR_OVERLAP, (void)0, ADD(m.out + 304, m.out, size, 300, 1));
    REFUSE(KOPT_ERROR_OPTION, (void)0, kopt_decompress_add(m.grad, KOPT_F32, m.out, size, KOPT_F32, 300, 1));
    REFUSE(KOPT_ERROR_OPTION, (void)0, kopt_decompress_add(m.grad, KOPT_F32, m.out, size, (kopt_format)9, 300, 1));
    REFUSE(KOPT_ERROR_OPTION, (void)0, kopt_decompress_add(m.grad, KOPT_Q1, m.out, size, KOPT_Q8, 300, 1));
    ok(good, "decompression: bad arguments are refused, nothing is written");
    shards[0] = m.residual, shards[1] = m.out, shards[2] = NULL;
#define REDUCE(out, list, count, n, scale) kopt_reduce(out, KOPT_F32, list, count, KOPT_F32, n, scale)
    REFUSE(KOPT_ERROR_NULL, (void)0, REDUCE(NULL, shards, 2, 300, 1));
    REFUSE(KOPT_ERROR_NULL, (void)0, REDUCE(m.grad, NULL, 2, 300, 1));
    REFUSE(KOPT_ERROR_NULL, (void)0, REDUCE(m.grad, shards, 3, 300, 1));
    REFUSE(KOPT_ERROR_RANGE, (void)0, REDUCE(m.grad, shards, 0, 300, 1));
    REFUSE(KOPT_ERROR_RANGE, (void)0, REDUCE(m.grad, shards, 2, 300, -HUGE_VAL));
    REFUSE(KOPT_ERROR_RANGE, (void)0, REDUCE(m.grad, shards, 2, 300, -3.1e38));
    REFUSE(KOPT_ERROR_RANGE, (void)0, REDUCE(m.grad, shards, 2, 300, 3.1e38));
    REFUSE(KOPT_ERROR_RANGE, (void)0, ADD(m.grad, m.out, size, 300, -3.1e38));
    REFUSE(KOPT_ERROR_RANGE, (void)0, ADD(m.grad, m.out, size, 300, 3.1e38));
    REFUSE(KOPT_ERROR_BOUNDS, (void)0, REDUCE(m.grad, shards, 2, SIZE_MAX / 8, 1));
    REFUSE(KOPT_ERROR_BOUNDS, (void)0, REDUCE(m.grad, shards, SIZE_MAX / 2, 300, 1));
    REFUSE(KOPT_ERROR_OVERLAP, (void)0, REDUCE(m.out + 4, shards, 2, 299, 1));
    REFUSE(KOPT_ERROR_OVERLAP, (void)0, kopt_reduce(m.out, KOPT_BF16, shards, 2, KOPT_F32, 300, 1));
    REFUSE(KOPT_ERROR_OVERLAP, (void)0, REDUCE(shards, shards, 2, 1, 1));
    REFUSE(KOPT_ERROR_OPTION, (void)0, kopt_reduce(m.grad, KOPT_Q8, shards, 2, KOPT_F32, 300, 1));
    REFUSE(KOPT_ERROR_OPTION, (void)0, kopt_reduce(m.grad, KOPT_F32, shards, 2, KOPT_Q1, 300, 1));
    ok(good, "reduction: bad arguments are refused, nothing is written");
    c = kopt_compressor_of(KOPT_Q1, NULL, 0);
    ok(kopt_compress(&c, NULL, 0, NULL, KOPT_F32) == KOPT_OK && c.step == 1 &&
           kopt_decompress_add(NULL, KOPT_F32, NULL, 0, KOPT_Q1, 0, 1) == KOPT_OK &&
           kopt_reduce(NULL, KOPT_F32, NULL, 1, KOPT_F32, 0, 1) == KOPT_OK,
       "nothing may be NULL");
}

int main(int argc, char **argv) {
    quick = argc > 1 && !strcmp(argv[1], "quick");
    fesetenv(FE_DFL_ENV); /* -Ofast would start with subnormals flushed: the reference needs them */
    isa_count = usable_isas(isas);
    check_bits();
    check_slices();
    check_decompress();
    check_scales();
    check_unbiased();
    check_feedback();
    check_blocks();
    check_least_scale();
    check_largest_code();
    check_sign_edges();
    check_reduce();
    check_order();
    check_mpi();
    check_sizes();
    check_refusals();
    return done();
}
