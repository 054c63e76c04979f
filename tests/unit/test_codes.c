/* test_codes.c - the 8-bit codes of moments and gradients, section 6b: their values, that a value keeps its code, that
   all random numbers together are right in the mean, the ends of the range, what is not finite; the length of steps. */
#define KAHAN_OPT_IMPLEMENTATION
#include "../../kahan_opt.h"

#include "tap.h"
#include "reference.h"
#include "inputs.h"

#include <fenv.h>
#include <stdlib.h>

enum { B = 256, SQUARE = 1, SIGNED = 0, COMPRESSED = 2, WAYS = 3 };
static const char *const way_name[] = {"first moments", "second moments", "compressed gradients"};
static float weight[4 * B], grad[4 * B], in[4 * B], out[4 * B];
static unsigned char state[64 + 4 * 4 * (B + 4)], *code, *scale; /* of the moment that is looked at */
static kopt_isa isas[ISAS];                                      /* that this machine has */
static int isa_count;

static uint64_t noise_state = 1;
static uint32_t noise(void) { return (uint32_t)(splitmix64(&noise_state) >> 32); }

/* An optimizer and a tensor of n elements with fresh moments; code and scale are those of one of them. */
static int fresh(kopt_optimizer *o, kopt_tensor *t, size_t n, int square) {
    ref_layout l;
    o->first_moment_format = o->second_moment_format = KOPT_Q8;
    *t = kopt_tensor_of(weight, KOPT_F32, grad, KOPT_F32, n, state, sizeof state);
    memset(state, 0x5a, sizeof state);
    l = ref_layout_of(o, KOPT_F32, n);
    code = state + l.moment[square], scale = state + l.scale[square];
    return kopt_state_init(o, t, 1, NULL) == KOPT_OK;
}

/* The value of a code of the formulas, over the scale. */
static double value_of(int way, int k) {
    const int size = way == SQUARE ? k : k & 127;
    double x;
    if (way == SQUARE && k >= 127) return ldexp(1 + (k - 127) % 32 / 32.0, (k - 127) / 32 - 4);
    if (way == SQUARE) return k == 0 ? 0 : ldexp(1 + (k + 1) % 8 / 8.0, (k + 1) / 8 - 20);
    x = size < 8 ? ldexp(size, -16) : ldexp(1 + size % 8 / 8.0, size / 8 - 14);
    return k > 127 ? -x : x;
}

/* ---- Values ------------------------------------------------------------------------------------------------------ */

/* What is read of all codes beside `word`. */
static int read_all(int way, uint32_t word) {
    int i;
    if (way == COMPRESSED) {
        unsigned char bytes[4 + B];
        for (i = 0; i < 4; ++i) bytes[i] = (unsigned char)(word >> 8 * i);
        for (i = 0; i < B; ++i) bytes[4 + i] = (unsigned char)i;
        memset(out, 0, sizeof out);
        return kopt_decompress_add(out, KOPT_F32, bytes, sizeof bytes, KOPT_Q8, B, 1) == KOPT_OK;
    } else {
        kopt_optimizer o = kopt_adam(1e-3);
        kopt_tensor t;
        int good = fresh(&o, &t, B, way);
        for (i = 0; i < B; ++i) code[i] = (unsigned char)i;
        ref_set(scale, 4, 0, word);
        good &=
            kopt_state_read(&o, &t, way == SQUARE ? KOPT_SLOT_SECOND_MOMENT : KOPT_SLOT_FIRST_MOMENT, out) == KOPT_OK;
        return good;
    }
}

static void check_values(void) {
    static const uint32_t exact[] = {0x3f800000, 0x40000000, 0x2f800000, 0x50000000};
    int way, k, s, bad = 0, falls = 0, nan = 0;
    for (way = 0; way < WAYS; ++way)
        for (s = 0; s < 4; ++s) {
            bad += !read_all(way, exact[s]);
            for (k = 0; k < 256; ++k) {
                const double x = value_of(way, k) * (double)ref_float(exact[s]);
                bad += (double)out[k] != (way == SQUARE ? x * x : x);
                falls += k > 0 && k != 128 && (way != SQUARE && k > 128 ? out[k] >= out[k - 1] : out[k] <= out[k - 1]);
            }
            bad += ref_bits(out[0]) != 0;
        }
    ok(!bad && !falls, "the values of all codes: %d wrong, %d do not ascend", bad, falls);
    for (bad = 0, way = 0; way < WAYS; ++way) /* a scale that is none of ours: one product, and of squares one more */
        for (s = 0; s < 1000; ++s) {
            const uint32_t word = s < 3 ? 0x80000000u | exact[s] : s < 40 ? 1u << s % 32 : noise();
            bad += !read_all(way, word);
            for (k = 0; k < 256; ++k) {
                const uint32_t got = ref_bits(out[k]), want = ref_bits(ref_decoded(k, word, way == SQUARE));
                const int is = ref_is_nan(KOPT_F32, got);
                if (is) nan++;
                if (is != ref_is_nan(KOPT_F32, want)) bad++;
                if (!is && got != want && (way != COMPRESSED || got << 1 || want << 1)) bad++; /* 0 + -0 is 0 */
            }
        }
    ok(!bad && nan, "... beside any scale: %d wrong, %d NaN", bad, nan);
}

/* ---- Coding ------------------------------------------------------------------------------------------------------ */

/* Codes of the n <= 256 elements of in[], which are roots or numbers: by a first step, where moments are functions of
   the gradient alone (the root of its square is itself), or by compression. Random numbers are those from element
   `first` on. */
static int codes_by(int way, kopt_rounding how, size_t n, uint64_t first) {
    kopt_tensor t;
    int good;
    if (way == COMPRESSED) {
        static unsigned char bytes[4 + B];
        kopt_compressor c = kopt_compressor_of(KOPT_Q8, NULL, n);
        c.rounding = how, c.first_index = first, c.seed = 7;
        good = kopt_compress(&c, bytes, sizeof bytes, in, KOPT_F32) == KOPT_OK;
        code = bytes + 4, scale = bytes;
        return good;
    }
    if (way == SQUARE) {
        kopt_optimizer o = kopt_adam(0);
        o.beta1 = o.beta2 = 0, o.moment_rounding = how, o.seed = 7;
        good = fresh(&o, &t, n, SQUARE);
        t.first_index = first;
        memcpy(grad, in, n * sizeof *in);
        return good & (kopt_state_init(&o, &t, 1, NULL) == KOPT_OK) & (kopt_optimizer_step(&o, &t, 1) == KOPT_OK);
    } else {
        kopt_optimizer o = kopt_sgd(0, 0.5);
        o.moment_rounding = how, o.seed = 7;
        good = fresh(&o, &t, n, SIGNED);
        t.first_index = first;
        memcpy(grad, in, n * sizeof *in);
        return good & (kopt_state_init(&o, &t, 1, NULL) == KOPT_OK) & (kopt_optimizer_step(&o, &t, 1) == KOPT_OK);
    }
}

/* The random number of that element. */
static uint32_t draw_of(int way, uint64_t e) {
    return ref_number(ref_random(7, 1, 0, way == COMPRESSED ? 3 : 0, e), way == COMPRESSED ? 0 : 1 + (uint32_t)way);
}

/* The scale of codes_by(). */
static uint32_t scale_of(int way) {
    if (way != COMPRESSED) return ref_get(scale, 4, 0);
    return scale[0] | (uint32_t)scale[1] << 8 | (uint32_t)scale[2] << 16 | (uint32_t)scale[3] << 24;
}

/* Values of codes keep them with every random number: those of squares beside scales that are powers of two, where
   value * scale is exact, and to nearest beside any. Elements 0 and 1 hold the scale. */
static void check_own_codes(void) {
    int way, isa, turn, i;
    for (way = 0; way < WAYS; ++way) {
        int bad = 0, lowest = 0, highest = 0;
        for (isa = 0; isa < isa_count; ++isa)
            for (turn = 0; turn < 120; ++turn) {
                const uint64_t first = B * (uint64_t)(turn + 1000 * isa);
                const int power = turn % 50 - 25;
                unsigned char want[B];
                kopt_isa_force(isas[isa]);
                for (i = 0; i < B; ++i) {
                    const uint32_t r = draw_of(way, first + (uint64_t)i);
                    want[i] = (unsigned char)(i == 0 ? way == SQUARE ? 255 : 127 : noise() >> 8);
                    in[i] = (float)ldexp(value_of(way, want[i]), power);
                    if (way == SIGNED && want[i] == 128) want[i] = 0, in[i] = 0; /* one product more: -0 becomes 0 */
                    lowest += r < 64, highest += r > 65472;
                }
                bad += !codes_by(way, KOPT_STOCHASTIC, B, first) || scale_of(way) != (uint32_t)(127 + power) << 23;
                for (i = 0; i < B; ++i) bad += code[i] != want[i];
            }
        ok(!bad && lowest && highest, "%s: a value keeps its code with all random numbers, %d do not", way_name[way],
           bad);
    }
    for (way = SIGNED; way <= SQUARE; ++way) { /* read and written: to nearest, any scale of a block */
        const kopt_slot what = way == SQUARE ? KOPT_SLOT_SECOND_MOMENT : KOPT_SLOT_FIRST_MOMENT;
        int bad = 0, first;
        for (turn = 0; turn < 500; ++turn) {
            kopt_optimizer o = kopt_adam(0);
            kopt_tensor t;
            unsigned char was[B + 4];
            uint32_t word = 0x2a000000 + noise() % 0x35800000; /* no square below 2^-126 */
            bad += !fresh(&o, &t, B, way);
            if (way == SIGNED) word &= 0x7f800000;
            first = way == SQUARE ? 255 : 120; /* the largest: any of the upper 8 */
            for (i = 0; i < B; ++i) code[i] = was[i] = (unsigned char)(i == 0 ? first : (int)(noise() >> 8 & 255));
            ref_set(scale, 4, 0, word);
            bad += kopt_state_read(&o, &t, what, out) != KOPT_OK || kopt_state_write(&o, &t, what, out) != KOPT_OK;
            bad += ref_get(scale, 4, 0) != word;
            for (i = 0; i < B; ++i) bad += code[i] != was[i];
        }
        ok(!bad, "%s: read and written they are the same, under any scale: %d are not", way_name[way], bad);
    }
}

/* A number a part p of the way between two values gets the upper code with those random numbers that are
   65536 * (1 - p) or more, rounded, and so is itself in the mean over all 2^16: of each element p is put just above or
   below what its number decides. A unit of 65536 * p is 4 ulp of the number or more: room for its rounding. */
static void check_mean(void) {
    int way, isa, turn, i;
    for (way = 0; way < WAYS; ++way) {
        const int last = way == SQUARE ? 255 : 127;
        const int turns = 1200 / isa_count;
        static char met[65536];
        int bad = 0, numbers = 0;
        memset(met, 0, sizeof met);
        for (isa = 0; isa < isa_count; ++isa)
            for (turn = 0; turn < turns; ++turn) {
                const uint64_t first = B * (uint64_t)(turn + 1000 * isa);
                const int power = turn % 40 - 20;
                unsigned char want[B];
                kopt_isa_force(isas[isa]);
                for (i = 0; i < B; ++i) {
                    const int least = way == SQUARE;
                    const int k = i == 0 ? last - 1 : least + (int)(noise() % (uint32_t)(last - least));
                    const uint32_t r = draw_of(way, first + (uint64_t)i);
                    const int up = (int)(noise() >> 9 & 1);
                    const int minus = way != SQUARE && (noise() >> 9 & 1);
                    const double p = i == 0 ? 1 : (65536 - (double)r - (up ? 0.35 : 0.65)) / 65536;
                    const double low = value_of(way, k), high = value_of(way, k + 1);
                    want[i] = (unsigned char)((k + (up || i == 0)) | (minus ? 128 : 0));
                    in[i] = (float)ldexp(low + (high - low) * p, power);
                    if (minus) in[i] = -in[i];
                    numbers += !met[r], met[r] = 1;
                }
                if (way != SQUARE && in[0] < 0) in[0] = -in[0], want[0] = 127;
                bad += !codes_by(way, KOPT_STOCHASTIC, B, first);
                for (i = 0; i < B; ++i) bad += code[i] != want[i];
            }
        ok(!bad && numbers > 60000, "%s: the mean over all random numbers is the number, %d of %d wrong; %d met",
           way_name[way], bad, turns * B * isa_count, numbers);
    }
}

/* To nearest: half of a gap. Not zero above zero. */
static void check_nearest(void) {
    int way, isa, turn, i;
    for (way = 0; way < WAYS; ++way) {
        const int last = way == SQUARE ? 255 : 127;
        int bad = 0;
        for (isa = 0; isa < isa_count; ++isa)
            for (turn = 0; turn < 30; ++turn) {
                unsigned char want[B];
                kopt_isa_force(isas[isa]);
                for (i = 0; i < B; ++i) {
                    const int k = (int)(noise() % (uint32_t)last), up = (int)(noise() >> 9 & 1);
                    const double low = value_of(way, k), high = value_of(way, k + 1);
                    want[i] = (unsigned char)(k + up + (way == SQUARE && k + up == 0));
                    in[i] = (float)(low + (high - low) * (up ? 0.5001 : 0.4999));
                }
                want[7] = (unsigned char)last, in[7] = (float)value_of(way, last);
                bad += !codes_by(way, KOPT_NEAREST, B, 0);
                for (i = 0; i < B; ++i) bad += code[i] != want[i];
            }
        ok(!bad, "%s to nearest: %d wrong", way_name[way], bad);
    }
}

/* ---- Scales: the largest, the smallest, what is not finite ------------------------------------------------------- */

/* The largest root is the scale and has code 255 whatever it is and whatever is drawn. */
static void check_largest_root(void) {
    uint64_t e = 0;
    int isa, turn, i, bad = 0;
    while (draw_of(SQUARE, e) < 65534) ++e;
    for (isa = 0; isa < isa_count; ++isa)
        for (turn = 0; turn < 200; ++turn) {
            const uint32_t word = turn == 0 ? 0x5f7fffff : 0x20800000 + noise() % 0x3effffff;
            kopt_isa_force(isas[isa]);
            for (i = 0; i < B; ++i) in[i] = ref_float(word);
            bad += !codes_by(SQUARE, KOPT_STOCHASTIC, B, e / B * B);
            bad += scale_of(SQUARE) != ref_bits((float)sqrt((double)(float)((double)in[0] * (double)in[0])));
            for (i = 0; i < B; ++i) bad += code[i] != 255;
        }
    ok(!bad, "the largest root has code 255 with any random number: %d wrong", bad);
}

/* One value to each of four blocks of zeros, written as a moment; the scales it should have, and the codes. */
static int written(int square, const uint32_t word[4], const uint32_t scales[4], const int codes[4]) {
    const kopt_slot what = square ? KOPT_SLOT_SECOND_MOMENT : KOPT_SLOT_FIRST_MOMENT;
    kopt_optimizer o = kopt_adam(0);
    kopt_tensor t;
    int i, k, bad = !fresh(&o, &t, 4 * B, square);
    memset(in, 0, sizeof in);
    for (k = 0; k < 4; ++k) in[B * k + 3 + k] = ref_float(word[k]);
    bad += kopt_state_write(&o, &t, what, in) != KOPT_OK || kopt_state_read(&o, &t, what, out) != KOPT_OK;
    for (k = 0; k < 4; ++k) {
        bad += ref_get(scale, 4, (size_t)k) != scales[k];
        for (i = B * k; i < B * (k + 1); ++i) {
            const int nan = scales[k] == 0x7fc00000;
            bad += code[i] != (i == B * k + 3 + k ? codes[k] : 0) || ref_is_nan(KOPT_F32, ref_bits(out[i])) != nan;
            if (!nan && i != B * k + 3 + k) bad += ref_bits(out[i]) != 0;
        }
    }
    return bad;
}

#define OF_FOUR(what, square, word, scales, codes)                   \
    do {                                                             \
        static const uint32_t words_[4] = word, scales_[4] = scales; \
        static const int codes_[4] = codes;                          \
        ok(!written(square, words_, scales_, codes_), what);         \
    } while (0)
#define FOUR(a, b, c, d) {a, b, c, d}

static void check_ends(void) {
    static const uint32_t tiny[] = {0x00000001, 0x00800000, 0x00012345, 0x2b000000};
    kopt_optimizer o = kopt_adamw(1e-3);
    kopt_tensor t;
    int i, bad = !fresh(&o, &t, 3 * B, SIGNED);
    for (i = 64; i < 64 + 2 * (3 * B + 16); ++i) bad += state[i] != 0;
    ok(!bad, "fresh moments are bytes of zero: %d are not", bad);

    OF_FOUR("first moments: nothing below 1.875 * 2^-126; NaN, infinity", SIGNED,
            FOUR(0x00f00000, 0x00f00001, 0x7fa00001, 0xff800000), FOUR(0, 0x00800000, 0x7fc00000, 0x7fc00000),
            FOUR(0, 119, 0, 0));
    OF_FOUR("first moments: a negative subnormal, a negative NaN, -1, -0", SIGNED,
            FOUR(0x807fffff, 0xffc00001, 0xbf800000, 0x80000000), FOUR(0, 0x7fc00000, 0x3f000000, 0),
            FOUR(0, 0, 248, 0));
    OF_FOUR("first moments: 1.875, next above, next below, twice that", SIGNED,
            FOUR(0x3ff00000, 0x3ff00001, 0x3fefffff, 0x406fffff), FOUR(0x3f000000, 0x3f800000, 0x3f000000, 0x3f800000),
            FOUR(127, 119, 127, 127));
    ok((double)out[3] == 1.875 && (double)out[B + 4] == 1.875 && (double)out[2 * B + 5] == 1.875,
       "... and what is read");
    OF_FOUR("first moments up to the largest fp32", SIGNED, FOUR(0x7f700000, 0x7f77ff00, 0x7f780000, 0xff7fffff),
            FOUR(0x7e800000, 0x7f000000, 0x7f000000, 0x7f000000), FOUR(127, 119, 120, 248));
    ok(ref_bits(out[3]) == 0x7f700000 && ref_bits(out[B + 4]) == 0x7f700000 && ref_bits(out[2 * B + 5]) == 0x7f800000 &&
           ref_bits(out[3 * B + 6]) == 0xff800000,
       "... what is rounded above them is infinite");
    OF_FOUR("second moments: NaN, infinity, a negative one, -0", SQUARE,
            FOUR(0xffc00000, 0x7f800000, 0x80000001, 0x80000000), FOUR(0x7fc00000, 0x7fc00000, 0x7fc00000, 0),
            FOUR(0, 0, 0, 0));
    OF_FOUR("second moments: 4, the largest fp32, 2^-126, the largest subnormal", SQUARE,
            FOUR(0x40800000, 0x7f7fffff, 0x00800000, 0x007fffff), FOUR(0x40000000, 0x5f7fffff, 0x20000000, 0x1fffffff),
            FOUR(255, 255, 255, 255));
    ok((double)out[3] == 4 && ref_bits(out[B + 4]) == 0x7f7ffffe && ref_bits(out[2 * B + 5]) == 0x00800000 &&
           ref_bits(out[3 * B + 6]) == 0x007fffff,
       "... and what is read");
    OF_FOUR("second moments: 2^-149, 2^-148, 1, 2", SQUARE, FOUR(1, 2, 0x3f800000, 0x40000000),
            FOUR(0x1a3504f3, 0x1a800000, 0x3f800000, 0x3fb504f3), FOUR(255, 255, 255, 255));
    ok(ref_bits(out[3]) == 1 && ref_bits(out[B + 4]) == 2, "... and what is read");

    for (bad = 0, i = 0; i < 4; ++i) { /* beside a large one: code 1, and it reads above 0 */
        bad += !fresh(&o, &t, B, SQUARE);
        memset(in, 0, sizeof in);
        in[0] = 1, in[1] = ref_float(tiny[i]);
        bad += kopt_state_write(&o, &t, KOPT_SLOT_SECOND_MOMENT, in) != KOPT_OK;
        bad += kopt_state_read(&o, &t, KOPT_SLOT_SECOND_MOMENT, out) != KOPT_OK;
        bad += code[0] != 255 || code[1] != 1 || code[2] != 0;
        bad += (double)out[1] != 1.25 * 1.25 * ldexp(1, -40) || ref_bits(out[2]) != 0;
    }
    ok(!bad, "a mean square above 0 is never 0: %d are", bad);
    memset(in, 0, sizeof in);
    in[0] = 1, in[1] = ref_float(0x80000000), in[2] = -ref_float(0x33800000), in[3] = ref_float(0x33800000);
    in[4] = ref_float(0x80000001), in[5] = ref_float(0x00000001); /* scale 1/2: below 2^-18 is 0 */
    bad = !fresh(&o, &t, B, SIGNED) || kopt_state_write(&o, &t, KOPT_SLOT_FIRST_MOMENT, in) != KOPT_OK;
    bad += kopt_state_read(&o, &t, KOPT_SLOT_FIRST_MOMENT, out) != KOPT_OK;
    for (i = 1; i < 6; ++i) {
        const int minus = i == 1 || i % 2 == 0;
        bad += code[i] != 128 * minus || ref_bits(out[i]) != (minus ? 0x80000000 : 0);
    }
    ok(!bad, "first moments: zeros keep their sign, and what is too small for codes");
    bad = !codes_by(COMPRESSED, KOPT_NEAREST, B, 0) || scale_of(COMPRESSED) != 0x3f000000 || code[0] != 120 ||
          code[1] != 128 || code[2] != 128 || code[3] != 0 || code[4] != 128 || code[5] != 0;
    ok(!bad, "compressed gradients too");
}

/* ---- The length of steps ----------------------------------------------------------------------------------------- */

/* Steps with both moments in 8 bits beside those with fp32 moments: their mean length, and their part along the latter.
   Gaussian gradients with one sigma, with sigmas spread over three decades, and beside one outlier per block. First
   moments near the last code make steps longer, but not their part along the exact ones. */
static void check_length(void) {
    enum { N = 2048, STEPS = 600, KINDS = 6 };
    static float w[2][N], g[N];
    static double sigma[N];
    static unsigned char block[2][64 + 8 * N + 1000];
    static const double outlier[KINDS] = {1, 0, 1e4, 2e4, 1e5, 5e5};
    static const double least[KINDS] = {0.994, 0.99, 0.99, 0.99, 1.08, 1.8},
                        most[KINDS] = {1.006, 1.02, 1.02, 1.02, 1.15, 2};
    int kind, i, k, step;
    for (kind = 0; kind < KINDS; ++kind) {
        kopt_optimizer o[2];
        kopt_tensor t[2];
        double size[2] = {0, 0}, product = 0, square = 0;
        int bad = 0;
        for (i = 0; i < N; ++i) {
            sigma[i] = i % B == 0 ? outlier[kind] : 1;
            if (kind == 1) sigma[i] = pow(1000, i * 797 % N / (double)N);
        }
        memset(w, 0, sizeof w);
        for (k = 0; k < 2; ++k) {
            o[k] = kopt_adam(1), o[k].beta2 = 0.99;
            o[k].first_moment_format = o[k].second_moment_format = k ? KOPT_Q8 : KOPT_F32;
            t[k] = kopt_tensor_of(w[k], KOPT_F32, g, KOPT_F32, N, block[k], sizeof block[k]);
            bad += kopt_state_init(&o[k], &t[k], 1, NULL) != KOPT_OK;
        }
        for (step = 0; step < STEPS; ++step) {
            for (i = 0; i < N; ++i) g[i] = (float)(normal64(&noise_state) * sigma[i]);
            for (k = 0; k < 2; ++k) bad += kopt_optimizer_step(&o[k], &t[k], 1) != KOPT_OK;
            for (i = 0; i < N && step >= STEPS / 2; ++i) {
                const double exact = (double)w[0][i], coded = (double)w[1][i];
                if (kind > 1 && i % B == 0) continue;
                size[0] += fabs(exact), size[1] += fabs(coded);
                product += exact * coded, square += exact * exact;
            }
            memset(w, 0, sizeof w); /* what a step subtracts is then all there is */
        }
        size[1] /= size[0], product /= square;
        ok(!bad && size[1] > least[kind] && size[1] < most[kind] && fabs(product - 1) < 0.02,
           "steps with 8-bit moments, %s %.0e: %.4f of the exact length, %.4f along the exact steps",
           kind == 1 ? "spread" : "outlier", kind == 1 ? 1e3 : outlier[kind], size[1], product);
    }
}

int main(void) {
    fesetenv(FE_DFL_ENV); /* -Ofast starts with subnormals flushed, and the reference computes here */
    isa_count = usable_isas(isas);
    check_values();
    check_own_codes();
    check_mean();
    check_nearest();
    check_largest_root();
    kopt_isa_force(KOPT_ISA_AUTO);
    check_ends();
    check_length();
    return done();
}
