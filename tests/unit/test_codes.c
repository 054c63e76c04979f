/* test_codes.c - the 8-bit codes of moments and gradients, section 6b: their values, that a value keeps its code, that
   all random numbers together are right in the mean, the ends of the range, what is not finite; the length of steps. */
#define KAHAN_OPT_IMPLEMENTATION
#include "../../kahan_opt.h"

#include "tap.h"
#include "reference.h"
#include "inputs.h"

#include <fenv.h>
#include <stdlib.h>

enum { BLOCK = 64, B = 256, BLOCKS = B / BLOCK, SQUARE = 1, SIGNED = 0, COMPRESSED = 2, WAYS = 3 };
static const char *const way_name[] = {"first moments", "second moments", "compressed gradients"};
static float weight[4 * B], grad[4 * B], in[4 * B], out[4 * B];
static unsigned char state[64 + 4 * 4 * (B + 16)], *code, *scale; /* of the moment that is looked at */
static kopt_isa isas[ISAS];                                       /* that this machine has */
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

/* The value of a code of the formulas, over the scale. That of a number is the fp32 word of the code, four times its
   distance from that of 2^-21, read as a number. */
static double value_of(int way, int k) {
    const int size = way == SQUARE ? k : k & 127;
    double x;
    if (way == SQUARE && k >= 127) return ldexp(1 + (k - 127) % 32 / 32.0, (k - 127) / 32 - 4);
    if (way == SQUARE) return k == 0 ? 0 : ldexp(1 + (k + 1) % 8 / 8.0, (k + 1) / 8 - 20);
    x = size < 4 ? ldexp(size, -21) : (double)ref_float((ref_bits((float)size) - 0x33000000) << 2);
    return k > 127 ? -x : x;
}

/* ---- Values ------------------------------------------------------------------------------------------------------ */

/* What is read of all codes beside a scale. */
static int read_all(int way, int exponent) {
    int i;
    if (way == COMPRESSED) {
        unsigned char bytes[BLOCKS * (1 + BLOCK)];
        for (i = 0; i < B; ++i) bytes[i / BLOCK * (1 + BLOCK) + 1 + i % BLOCK] = (unsigned char)i;
        for (i = 0; i < BLOCKS; ++i) bytes[i * (1 + BLOCK)] = (unsigned char)exponent;
        memset(out, 0, sizeof out);
        return kopt_decompress_add(out, KOPT_F32, bytes, sizeof bytes, KOPT_Q8, B, 1) == KOPT_OK;
    } else {
        kopt_optimizer o = kopt_adam(1e-3);
        kopt_tensor t;
        int good = fresh(&o, &t, B, way);
        for (i = 0; i < B; ++i) code[i] = (unsigned char)i;
        memset(scale, exponent, BLOCKS);
        good &=
            kopt_state_read(&o, &t, way == SQUARE ? KOPT_SLOT_SECOND_MOMENT : KOPT_SLOT_FIRST_MOMENT, out) == KOPT_OK;
        return good;
    }
}

/* All codes beside all scales. */
static void check_values(void) {
    int way, k, e, bad = 0, falls = 0, nan = 0;
    for (way = 0; way < WAYS; ++way)
        for (e = 0; e < 256; ++e) {
            bad += !read_all(way, e);
            for (k = 0; k < 256; ++k) {
                const double x = e == 0 ? 0 * value_of(way, k) : ldexp(value_of(way, k), e - 127);
                const double most = ldexp(1, 128), want = way == SQUARE ? x * x : x;
                const uint32_t got = ref_bits(out[k]);
                nan += ref_is_nan(KOPT_F32, got);
                if (e == 255)
                    bad += !ref_is_nan(KOPT_F32, got);
                else if (way != SQUARE || (want < most && want > 1e-37)) /* exact, subnormals and the largest, too */
                    bad += !((double)out[k] >= want && (double)out[k] <= want);
                else
                    bad += got != ref_bits(ref_decoded(k, e, 1));
                if (e > 100 && e < 150)
                    falls +=
                        k > 0 && k != 128 && (way != SQUARE && k > 128 ? out[k] >= out[k - 1] : out[k] <= out[k - 1]);
            }
            if (e != 255) bad += ref_bits(out[0]) != 0;
        }
    ok(!bad && !falls && nan == WAYS * 256, "all codes beside all scales: %d wrong, %d do not ascend", bad, falls);
}

/* ---- Coding ------------------------------------------------------------------------------------------------------ */

/* Codes of the n <= 256 elements of in[], which are roots or numbers: by a first step, where moments are functions of
   the gradient alone (the root of its square is itself), or by compression. Random numbers are those from element
   `first` on. */
static int codes_by(int way, kopt_rounding how, size_t n, uint64_t first) {
    kopt_tensor t;
    int good;
    if (way == COMPRESSED) {
        static unsigned char bytes[BLOCKS * (1 + BLOCK)], apart[B], scales[BLOCKS];
        kopt_compressor c = kopt_compressor_of(KOPT_Q8, NULL, n);
        size_t i;
        c.rounding = how, c.first_index = first, c.seed = 7;
        good = kopt_compress(&c, bytes, sizeof bytes, in, KOPT_F32) == KOPT_OK;
        for (i = 0; i < n; ++i) apart[i] = bytes[i / BLOCK * (1 + BLOCK) + 1 + i % BLOCK];
        for (i = 0; i < (n + BLOCK - 1) / BLOCK; ++i) scales[i] = bytes[i * (1 + BLOCK)];
        code = apart, scale = scales;
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

static int scales_are(int exponent) {
    int i, bad = 0;
    for (i = 0; i < BLOCKS; ++i) bad += scale[i] != exponent;
    return !bad;
}

/* Values of codes keep them with every random number. The first element of each block holds the scale. */
static void check_own_codes(void) {
    int way, isa, turn, i;
    for (way = 0; way < WAYS; ++way) {
        int bad = 0, lowest = 0, highest = 0;
        for (isa = 0; isa < isa_count; ++isa)
            for (turn = 0; turn < 230; ++turn) {
                const uint64_t first = B * (uint64_t)(turn + 1000 * isa);
                const int exponent = way == SQUARE ? 100 + turn % 50 : 24 + turn; /* no value below 2^-126 */
                unsigned char want[B];
                kopt_isa_force(isas[isa]);
                for (i = 0; i < B; ++i) {
                    const uint32_t r = draw_of(way, first + (uint64_t)i);
                    want[i] = (unsigned char)(i % BLOCK == 0 ? way == SQUARE ? 255 : 127 : noise() >> 8);
                    in[i] = (float)ldexp(value_of(way, want[i]), exponent - 127);
                    if (way == SIGNED && want[i] == 128) want[i] = 0, in[i] = 0; /* one product more: -0 becomes 0 */
                    lowest += r < 64, highest += r > 65472;
                }
                bad += !codes_by(way, KOPT_STOCHASTIC, B, first) || !scales_are(exponent);
                for (i = 0; i < B; ++i) bad += code[i] != want[i];
            }
        ok(!bad && lowest && highest, "%s: a value keeps its code with all random numbers, %d do not", way_name[way],
           bad);
    }
    for (way = SIGNED; way <= SQUARE; ++way) { /* read and written: to nearest, any scale */
        const kopt_slot what = way == SQUARE ? KOPT_SLOT_SECOND_MOMENT : KOPT_SLOT_FIRST_MOMENT;
        int bad = 0;
        for (turn = 1; turn < 255; ++turn) {
            kopt_optimizer o = kopt_adam(0);
            kopt_tensor t;
            unsigned char was[B];
            if (way == SQUARE && (turn < 85 || turn > 190)) continue; /* squares below 2^-126, or infinite */
            bad += !fresh(&o, &t, B, way);
            for (i = 0; i < B; ++i)
                code[i] = was[i] =
                    (unsigned char)(i % BLOCK == 0 ? way == SQUARE ? 255 : 112 + turn % 16 : (int)(noise() >> 8 & 255));
            memset(scale, turn, BLOCKS);
            bad += kopt_state_read(&o, &t, what, out) != KOPT_OK || kopt_state_write(&o, &t, what, out) != KOPT_OK;
            bad += !scales_are(turn);
            for (i = 0; i < B; ++i) bad += code[i] != was[i];
        }
        ok(!bad, "%s: read and written they are the same, under any scale: %d are not", way_name[way], bad);
    }
}

/* A number a part p of the way between two values gets the upper code with those random numbers that are
   65536 * (1 - p) or more, rounded (of squares once, else twice), and so is itself in the mean over all 2^16: of each
   element p is put just above or
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
                    const int k = i % BLOCK == 0 ? last - 1 : least + (int)(noise() % (uint32_t)(last - least));
                    const uint32_t r = draw_of(way, first + (uint64_t)i);
                    const int up = (int)(noise() >> 9 & 1);
                    const int minus = way != SQUARE && (noise() >> 9 & 1);
                    const double p = i % BLOCK == 0 ? 1
                                                    : (65536 - (double)r -
                                                       (way == SQUARE ? up ? 0.35 : 0.65
                                                        : up          ? 0.1
                                                                      : 0.9)) /
                                                          65536;
                    const double low = value_of(way, k), high = value_of(way, k + 1);
                    want[i] = (unsigned char)((k + (up || i % BLOCK == 0)) | (minus ? 128 : 0));
                    in[i] = (float)ldexp(low + (high - low) * p, power);
                    if (minus) in[i] = -in[i];
                    numbers += !met[r], met[r] = 1;
                }
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
                for (i = 7; i < B; i += BLOCK) want[i] = (unsigned char)last, in[i] = (float)value_of(way, last);
                bad += !codes_by(way, KOPT_NEAREST, B, 0);
                for (i = 0; i < B; ++i) bad += code[i] != want[i];
            }
        ok(!bad, "%s to nearest: %d wrong", way_name[way], bad);
    }
}

/* ---- Scales: the largest, the smallest, what is not finite ------------------------------------------------------- */

/* The scale is the least power of two that is not below the largest root. A largest root that is not one gets one of
   its two neighbours. */
static void check_largest_root(void) {
    int isa, turn, i, bad = 0;
    for (isa = 0; isa < isa_count; ++isa)
        for (turn = 0; turn < 200; ++turn) {
            const uint32_t word = turn == 0 ? 0x5f7fffff : 0x20800000 + noise() % 0x3effffff;
            double root, place;
            kopt_isa_force(isas[isa]);
            for (i = 0; i < B; ++i) in[i] = ref_float(word);
            bad += !codes_by(SQUARE, KOPT_STOCHASTIC, B, B * (uint64_t)turn);
            root = (double)(float)sqrt((double)(float)((double)in[0] * (double)in[0]));
            bad += !scales_are(127 + (int)ceil(log2(root)));
            place = 255 - (1 - root / ldexp(1, scale[0] - 127)) * 64;
            for (i = 0; i < B; ++i) bad += fabs(code[i] - place) >= 1.001;
        }
    ok(!bad, "the largest root is at most the scale and above half of it: %d wrong", bad);
}

/* One value to each of four blocks of zeros, written as a moment; the scales it should have, and the codes. */
static int written(int square, const uint32_t word[4], const int scales[4], const int codes[4]) {
    const kopt_slot what = square ? KOPT_SLOT_SECOND_MOMENT : KOPT_SLOT_FIRST_MOMENT;
    kopt_optimizer o = kopt_adam(0);
    kopt_tensor t;
    int i, k, bad = !fresh(&o, &t, 4 * BLOCK, square);
    memset(in, 0, sizeof in);
    for (k = 0; k < 4; ++k) in[BLOCK * k + 3 + k] = ref_float(word[k]);
    bad += kopt_state_write(&o, &t, what, in) != KOPT_OK || kopt_state_read(&o, &t, what, out) != KOPT_OK;
    for (k = 0; k < 4; ++k) {
        bad += scale[k] != scales[k];
        for (i = BLOCK * k; i < BLOCK * (k + 1); ++i) {
            const int nan = scales[k] == 255;
            bad += code[i] != (i == BLOCK * k + 3 + k ? codes[k] : 0) || ref_is_nan(KOPT_F32, ref_bits(out[i])) != nan;
            if (!nan && i != BLOCK * k + 3 + k) bad += ref_bits(out[i]) != 0;
        }
    }
    return bad;
}

#define OF_FOUR(what, square, word, scales, codes)           \
    do {                                                     \
        static const uint32_t words_[4] = word;              \
        static const int scales_[4] = scales;                \
        static const int codes_[4] = codes;                  \
        ok(!written(square, words_, scales_, codes_), what); \
    } while (0)
#define FOUR(a, b, c, d) {a, b, c, d}

static void check_ends(void) {
    static const uint32_t tiny[] = {0x00000001, 0x00800000, 0x00012345, 0x2b000000};
    kopt_optimizer o = kopt_adamw(1e-3);
    kopt_tensor t;
    int i, bad = !fresh(&o, &t, 3 * B, SIGNED);
    for (i = 64; i < 64 + 2 * (3 * B + 16); ++i) bad += state[i] != 0; /* 12 scales are 16 bytes */
    ok(!bad, "fresh moments are bytes of zero: %d are not", bad);

    OF_FOUR("first moments: nothing up to 15/16 * 2^-126; NaN, infinity", SIGNED,
            FOUR(0x00780000, 0x00780001, 0x7fa00001, 0xff800000), FOUR(0, 1, 255, 255), FOUR(0, 110, 0, 0));
    OF_FOUR("first moments: a negative subnormal, a negative NaN, -1, -0", SIGNED,
            FOUR(0x80700000, 0xffc00001, 0xbf800000, 0x80000000), FOUR(0, 255, 127, 0), FOUR(0, 0, 240, 0));
    OF_FOUR("first moments: 31/16, next above, next below, twice that", SIGNED,
            FOUR(0x3ff80000, 0x3ff80001, 0x3ff7ffff, 0x4077ffff), FOUR(127, 128, 127, 128), FOUR(127, 111, 127, 127));
    ok((double)out[3] == 1.9375 && (double)out[BLOCK + 4] == 1.9375 && (double)out[2 * BLOCK + 5] == 1.9375,
       "... and what is read");
    OF_FOUR("first moments up to the largest fp32", SIGNED, FOUR(0x7ef80001, 0x7f740001, 0x7f780001, 0xff7fffff),
            FOUR(254, 254, 254, 254), FOUR(111, 127, 127, 255));
    ok(ref_bits(out[3]) == 0x7ef80000 && ref_bits(out[BLOCK + 4]) == 0x7f780000 &&
           ref_bits(out[2 * BLOCK + 5]) == 0x7f780000 && ref_bits(out[3 * BLOCK + 6]) == 0xff780000,
       "... of which the largest is read");
    OF_FOUR("second moments: NaN, infinity, a negative one, -0", SQUARE,
            FOUR(0xffc00000, 0x7f800000, 0x80000001, 0x80000000), FOUR(255, 255, 255, 0), FOUR(0, 0, 0, 0));
    OF_FOUR("second moments: 4, the largest fp32, 2^-126, the largest subnormal", SQUARE,
            FOUR(0x40800000, 0x7f7fffff, 0x00800000, 0x007fffff), FOUR(128, 191, 64, 64), FOUR(255, 255, 255, 255));
    ok((double)out[3] == 4 && ref_bits(out[BLOCK + 4]) == 0x7f800000 && ref_bits(out[2 * BLOCK + 5]) == 0x00800000 &&
           ref_bits(out[3 * BLOCK + 6]) == 0x00800000,
       "... and what is read");
    OF_FOUR("second moments: 2^-149, 2^-148, 1, 2", SQUARE, FOUR(1, 2, 0x3f800000, 0x40000000), FOUR(53, 53, 127, 128),
            FOUR(236, 255, 255, 236));
    ok(ref_bits(out[3]) == 1 && ref_bits(out[BLOCK + 4]) == 2, "... and what is read");

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
    bad = !fresh(&o, &t, B, SQUARE);
    in[0] = 1, in[1] = ref_float(0x80000000);
    bad += kopt_state_write(&o, &t, KOPT_SLOT_SECOND_MOMENT, in) != KOPT_OK || code[1] != 0;
    bad += kopt_state_read(&o, &t, KOPT_SLOT_SECOND_MOMENT, out) != KOPT_OK || ref_bits(out[1]) != 0;
    ok(!bad, "... and that of -0 is 0");
    memset(in, 0, sizeof in);
    in[0] = 1, in[1] = ref_float(0x80000000), in[2] = -ref_float(0x33800000), in[3] = ref_float(0x33800000);
    in[4] = ref_float(0x80000001), in[5] = ref_float(0x00000001); /* scale 1: below 2^-22 is 0 */
    bad = !fresh(&o, &t, B, SIGNED) || kopt_state_write(&o, &t, KOPT_SLOT_FIRST_MOMENT, in) != KOPT_OK;
    bad += kopt_state_read(&o, &t, KOPT_SLOT_FIRST_MOMENT, out) != KOPT_OK;
    for (i = 1; i < 6; ++i) {
        const int minus = i == 1 || i % 2 == 0;
        bad += code[i] != 128 * minus || ref_bits(out[i]) != (minus ? 0x80000000 : 0);
    }
    ok(!bad, "first moments: zeros keep their sign, and what is too small for codes");
    bad = !codes_by(COMPRESSED, KOPT_NEAREST, B, 0) || scale[0] != 127 || scale[1] != 0 || code[0] != 112 ||
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
    static const double outlier[KINDS] = {1, 0, 100, 1e3, 1e4, 1e5};
    static const double least[KINDS] = {0.994, 0.99, 0.995, 1, 1.01, 1.04},
                        most[KINDS] = {1.006, 1.02, 1.02, 1.025, 1.04, 1.1};
    int kind, i, k, step;
    for (kind = 0; kind < KINDS; ++kind) {
        kopt_optimizer o[2];
        kopt_tensor t[2];
        double size[2] = {0, 0}, product = 0, square = 0;
        int bad = 0;
        for (i = 0; i < N; ++i) {
            sigma[i] = i % BLOCK == 0 ? outlier[kind] : 1;
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
                if (kind > 1 && i % BLOCK == 0) continue;
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
