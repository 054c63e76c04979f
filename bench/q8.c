/* q8.c - which 8-bit code serves the moments of AdamW? The evidence for docs/evidence.md.

       ./build.sh bench q8 check                 the properties of the codes, over all numbers they meet
       ./build.sh bench q8 blocks [BETA2]        second moments: the length of a step by them, by kinds of blocks
       ./build.sh bench q8 errors                one store and a run of stores, beside bitsandbytes and FlashOptim
       ./build.sh bench q8 steps [BETA2]         whole steps, with both moments stored, beside larger outliers
       ./build.sh bench q8 train TEXT [BETA2]    the final loss of four tasks, 10 seeds; TEXT is a file for two of them
       ./build.sh bench q8 train TEXT BETA2 DIGITS   digits in UCI's format (optdigits.tes), not drawn

   Moments stay here in fp32 arrays, but pass through a store after each step: x = decode(encode(x)). The program shares
   no code with kahan_opt.h. Each random number is a hash of (seed, what it is for, index). */

#include "companded.h"

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BLOCK = 256, LINES_BLOCK = 64, SEEDS = 10 }; /* values that share a scale: of the dynamic map, of lines */

/* ---- Numbers -------------------------------------------------------------------------------------------------- */

static uint64_t mix(uint64_t z) { /* the finalizer of splitmix64 */
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

typedef struct {
    uint64_t key, count;
} draws;

static draws draws_of(uint64_t seed, uint64_t purpose) {
    draws d;
    d.key = mix(seed * 0x9E3779B97F4A7C15u + mix(purpose + 1));
    d.count = 0;
    return d;
}
static uint64_t draw(draws *d) { return mix(d->key + ++d->count * 0x9E3779B97F4A7C15u); }
static float uniform(draws *d) { return (float)(draw(d) >> 40) * 0x1p-24f; }
static int below(draws *d, int n) { return (int)((draw(d) >> 33) % (uint64_t)n); }
static float gauss(draws *d) {
    const float a = uniform(d) + 0x1p-25f, b = uniform(d);
    return sqrtf(-2.0f * logf(a)) * cosf(6.2831853f * b);
}

static int32_t bits(float x) {
    int32_t u;
    memcpy(&u, &x, 4);
    return u;
}
static float from_bits(int32_t u) {
    float x;
    memcpy(&x, &u, 4);
    return x;
}

/* ---- Codes ---------------------------------------------------------------------------------------------------- */

/* Mean squares. Codes lie on lines in the domain of fp32 words: code at + k has the word of the line plus k << shift,
   and the lowest line counts. The scale, the least power of two that is not below the largest element of a block, is
   1.0, code 255. Code 0 is 0 and nothing else. */
typedef struct {
    int32_t word;
    int at, shift;
} line;
typedef struct {
    const char *name;
    enum { FP32, BF16, DYNAMIC, LINES } kind;
    int root;     /* the root of a mean square is coded, not the mean square */
    float longer; /* from the second step on this factor of roots makes up for the mean of 1 / sqrt(v) */
    int lines;
    line of[3];
} store;

#define ONE 0x3F800000
#define BINADE 0x00800000

#define TWO_LINES \
    2, { {ONE, 255, 18}, {ONE - 4 * BINADE, 127, 20} }
static const store stores[] = {
    {"fp32", FP32, 0, 1, 0, {{0, 0, 0}}},
    {"bf16", BF16, 0, 1, 0, {{0, 0, 0}}},
    {"dynamic map", DYNAMIC, 0, 1, 0, {{0, 0, 0}}},
    {"E5M3", LINES, 0, 1, 1, {{ONE, 255, 20}}},
    {"root 16", LINES, 1, 1, 1, {{ONE, 255, 19}}},
    {"root 16 x 1.006", LINES, 1, 1.006f, 1, {{ONE, 255, 19}}},
    {"root 32, 8", LINES, 1, 1, TWO_LINES},
    {"root 32, 8 x 1.003", LINES, 1, 1.003f, TWO_LINES},
    {"root 32, 16, 8", LINES, 1, 1, 3, {{ONE, 255, 18}, {ONE - 2 * BINADE, 191, 19}, {ONE - 10 * BINADE, 63, 20}}},
};
enum { STORES = sizeof stores / sizeof stores[0], TRAINED = STORES - 1, DYNAMIC_MAP = 2, CHOSEN = 7 };

static float unsigned_value(const store *s, int code) {
    int32_t word = 0x7F800000;
    int k;
    for (k = 0; k < s->lines; k++) {
        const int32_t here = s->of[k].word + (code - s->of[k].at) * (1 << s->of[k].shift);
        if (here < word) word = here;
    }
    return code == 0 ? 0.0f : from_bits(word);
}

/* Of 0 < y <= 1. */
static int unsigned_code(const store *s, float y, int32_t random) {
    int32_t place = 65536; /* never code 0 */
    int k;
    for (k = 0; k < s->lines; k++) {
        const int32_t half = 1 << (s->of[k].shift - 17);
        const int32_t here = s->of[k].at * 65536 + ((bits(y) - s->of[k].word + half) >> (s->of[k].shift - 16));
        if (here > place) place = here;
    }
    return (place + random) >> 16;
}

/* First moments and gradients: a sign and the word of the magnitude, shifted right by two. The scale is a power of two,
   and the largest value is above 31/32 and at most 31/16 of it; y is 2 x / scale, so at most 3.875. */
#define LEAST 0x1p-18f /* from here down codes are multiples of 2^-20 */

static float signed_scale(float largest) {
    const int32_t word = (bits(largest) + 0x0007FFFF) & 0x7F800000;
    return from_bits(word < 0x7F000000 ? word : 0x7F000000);
}
static float signed_inverse(float scale) { return from_bits(0x7F800000 - bits(scale)); } /* 2 / scale */

static int signed_code(float y, int32_t random) {
    const float size = fminf(fabsf(y), 3.875f);
    const float c = fminf(from_bits(((bits(size) + 2) >> 2) + 0x32E00000), size * 0x1p20f);
    const int32_t place = (int32_t)lrintf(c * 0x1p16f);
    return ((place + random) >> 16) | (signbit(y) ? 128 : 0);
}
static float signed_value(int code) { /* x / scale: half of y */
    const float c = (float)(code & 127);
    const int32_t word = bits(c) > 0x33000000 ? bits(c) - 0x33000000 : 0;
    const float size = fmaxf(from_bits(word * 4), c * 0x1p-21f);
    return code & 128 ? -size : size;
}
/* The scale of a block of squares or roots. */
static float line_scale(float largest) { return from_bits((bits(largest) + 0x007FFFFF) & 0x7F800000); }

/* The dynamic maps of bitsandbytes: the magnitudes in ascending order, without 0. */
static int dynamic_map(float *value, int first) {
    int n = 0, decade, i;
    for (decade = 0; decade < 7; decade++)
        for (i = 0; i < first << decade; i++)
            value[n++] = (float)(pow(10, decade - 6) * (0.1 + 0.9 * (i + 0.5) / (first << decade)));
    value[n++] = 1;
    return n;
}

static float dynamic_store(float y, int is_square, float random) { /* 0 <= y <= 1, random below 1 */
    static float map[2][256];
    static int n[2];
    const float *value = map[is_square];
    float below_y;
    int low = -1, high;
    if (n[is_square] == 0) n[is_square] = dynamic_map(map[is_square], is_square ? 2 : 1);
    high = n[is_square] - 1;
    if (y >= 1 || y == 0) return y;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (value[middle] <= y)
            low = middle;
        else
            high = middle;
    }
    below_y = low < 0 ? 0 : value[low];
    if ((y - below_y) / (value[high] - below_y) > random) return value[high];
    return low < 0 && is_square ? value[0] : below_y;
}

/* What is left of the n values of a block after they were stored. d: NULL rounds to nearest. */
static void store_block(const store *s, float *x, int n, int is_square, draws *d) {
    float largest = 0, scale, inverse;
    uint64_t word = 0;
    int i;
    if (s->kind == FP32) return;
    if (s->kind == LINES && n > LINES_BLOCK) {
        store_block(s, x, LINES_BLOCK, is_square, d);
        store_block(s, x + LINES_BLOCK, n - LINES_BLOCK, is_square, d);
        return;
    }
    for (i = 0; i < n; i++)
        if (fabsf(x[i]) > largest) largest = fabsf(x[i]);
    if (s->kind == LINES && is_square && s->root) largest = sqrtf(largest);
    scale = largest < 0x1p-126f ? 0 : largest;
    if (s->kind == LINES) scale = is_square ? line_scale(scale) : signed_scale(scale);
    inverse = s->kind == LINES && !is_square ? signed_inverse(scale) : 1 / scale;
    for (i = 0; i < n; i++, word >>= 16) {
        int32_t random = 32768;
        if (d != NULL) {
            if (i % 4 == 0) word = draw(d);
            random = (int32_t)(word & 0xFFFF);
        }
        if (s->kind == BF16)
            x[i] = from_bits((int32_t)((uint32_t)(bits(x[i]) + random) & 0xFFFF0000u));
        else if (scale == 0)
            x[i] = 0;
        else if (s->kind == DYNAMIC) {
            const float stored = dynamic_store(fminf(fabsf(x[i]) * inverse, 1), is_square, (float)random * 0x1p-16f);
            x[i] = copysignf(stored * scale, x[i]);
        } else if (!is_square)
            x[i] = signed_value(signed_code(x[i] * inverse, random)) * scale;
        else if (x[i] > 0) {
            const float root = s->root ? sqrtf(x[i]) : x[i];
            const float stored = unsigned_value(s, unsigned_code(s, root * inverse, random)) * scale;
            x[i] = s->root ? stored * stored : stored;
        }
    }
}

/* ---- check ---------------------------------------------------------------------------------------------------- */

static int failures;
static void claim(int holds, const char *of, const char *what) {
    printf("%s %s: %s\n", holds ? "ok    " : "WRONG ", of, what);
    failures += !holds;
}

/* Of a square's code, or of the signed one (NULL). */
static int code_of(const store *s, float y, int32_t random) {
    return s ? unsigned_code(s, y, random) : signed_code(y, random);
}
static double value_of(const store *s, int code) {
    return s ? (double)unsigned_value(s, code) : 2.0 * (double)signed_value(code);
}

/* The mean over all 2^16 random numbers. Codes ascend with them: the first that gives the upper code is searched. */
static double mean_of(const store *s, float y) {
    const int low = code_of(s, y, 0);
    int32_t a = 0, b = 65535;
    if (code_of(s, y, b) == low) return value_of(s, low);
    while (b - a > 1) {
        const int32_t middle = (a + b) / 2;
        if (code_of(s, y, middle) == low)
            a = middle;
        else
            b = middle;
    }
    return value_of(s, low) + (value_of(s, low + 1) - value_of(s, low)) * (65536 - b) / 65536;
}

static void check_code(const store *s) {
    const char *name = s ? s->name : "signed word";
    const int last = s ? 255 : 127;
    const float least = s ? (float)value_of(s, 1) : LEAST * 0x1p-30f;
    double worst = 0, before = 0;
    int ascends = 1, exact = 1, beside = 1, mean_ascends = 1, again = 1, code, k;
    int32_t u;
    draws d = draws_of(1, 99);
    for (code = 1; code <= last; code++) {
        const float y = (float)value_of(s, code);
        ascends &= value_of(s, code) > value_of(s, code - 1);
        exact &= code_of(s, y, 0) == code && code_of(s, y, 65535) == code;
        for (k = 0; k < 20000 && s; k++) {
            const float scale = from_bits((int32_t)(0x20000000 + draw(&d) % 0x40000000));
            const float back = y * scale * (1 / scale);
            again &= code_of(s, back, 32768) == code;
            if (code == 255) again &= code_of(s, back, 0) == 255 && code_of(s, back, 65535) == 255;
        }
        if (!s) again &= code_of(s, -y, 0) == (code | 128) && value_of(s, code | 128) == -value_of(s, code);
    }
    for (u = bits(least); u <= bits((float)value_of(s, last)); u += !s && u < bits(LEAST) - 4 * BINADE ? 1024 : 1) {
        const float y = from_bits(u);
        const int low = code_of(s, y, 0), high = code_of(s, y, 65535);
        const double mean = mean_of(s, y), below_gap = low > 0 ? value_of(s, low) - value_of(s, low - 1) : 0;
        const double gap = low < last ? fmax(value_of(s, low + 1) - value_of(s, low), below_gap) : below_gap;
        beside &= high - low <= 1 && high <= last;
        mean_ascends &= mean >= before;
        before = mean;
        worst = fmax(worst, fabs(mean - (double)y) / gap);
    }
    claim(ascends && exact, name, "values ascend with the code, and get it back with all random numbers");
    claim(beside, name, "all other numbers get one of the two codes beside them");
    claim(mean_ascends && worst <= (s ? 0x1.2p-17 : 0x1.84p-17), name,
          "the mean of all random numbers ascends, within 2^-16.8 of a gap, that of the signed code within 2^-16.4");
    claim(again, name,
          s ? "decoded, coded to nearest with any scale: the same code; the largest is always 255" : "signs");
    if (s)
        claim(code_of(s, 0x1p-126f, 0) == 1 && code_of(s, 0x1p-126f, 65535) == 1, name, "never 0 above 0");
    else
        claim(signed_code(0, 0) == 0 && signed_code(0, 65535) == 0 && value_of(s, 0) == 0.0, name, "0 stays 0");
}

static void check_signed_scales(void) {
    int holds = 1;
    uint32_t u;
    for (u = 1; u < 0x7F800000u; u += 97) {
        const float x = from_bits((int32_t)u), scale = signed_scale(x);
        if (scale == 0)
            holds &= x <= 0.9375f * 0x1p-126f;
        else {
            const float y = x * signed_inverse(scale);
            holds &= y > 1.875f && (y <= 3.875f || scale == 0x1p127f) && scale >= 0x1p-126f;
        }
    }
    holds &= signed_scale(from_bits(0x7F7FFFFF)) == 0x1p127f;
    claim(holds, "signed word", "largest values of 2^-126 to 31/16 of 2^127 are coded at 1.875 to 3.875");
}

/* ---- blocks --------------------------------------------------------------------------------------------------- */

static void blocks(float beta2) {
    enum { N = 1024, KINDS = 7 };
    static const char *kinds[KINDS] = {"same sigma",  "spread 100",  "spread 1000", "outlier 1e3",
                                       "outlier 1e4", "outlier 1e5", "sparse .002"};
    static float sigma[N], exact[N], stored[N];
    const int steps = beta2 > 0.995f ? 5000 : 1500;
    int s, kind, i, t;
    printf("Mean of sqrt(v / v_stored), standard deviation; beta2 %g\n\n| code |", (double)beta2);
    for (kind = 0; kind < KINDS; kind++) printf(" %s |", kinds[kind]);
    printf("\n|---|---|---|---|---|---|---|---|\n");
    for (s = 1; s < STORES; s++) {
        printf("| %s |", stores[s].name);
        for (kind = 0; kind < KINDS; kind++) {
            draws setup = draws_of(1, 1), g = draws_of(1, 2), d = draws_of(1, 3);
            double sum = 0, squares = 0, count = 0, longer = (double)stores[s].longer;
            for (i = 0; i < N; i++) {
                const float outlier = kind == 3 ? 1e3f : kind == 4 ? 1e4f : 1e5f;
                sigma[i] = 1;
                if (kind == 1 || kind == 2) sigma[i] = powf(kind == 1 ? 100 : 1000, uniform(&setup));
                if (kind >= 3 && kind <= 5 && i % BLOCK == 0) sigma[i] = outlier;
                exact[i] = stored[i] = 0;
            }
            for (t = 0; t < steps; t++) {
                for (i = 0; i < N; i++) {
                    const float x = gauss(&g) * sigma[i], square = kind == 6 && uniform(&g) >= 0.002f ? 0 : x * x;
                    exact[i] = beta2 * exact[i] + (1 - beta2) * square;
                    stored[i] = beta2 * stored[i] + (1 - beta2) * square;
                    if (t > steps / 2 && exact[i] > 0 && sigma[i] < 1e3f) { /* small neighbours, not outliers */
                        const double ratio = fmin(sqrt((double)exact[i] / (double)stored[i]), 99) / longer;
                        sum += ratio, squares += ratio * ratio, count++;
                    }
                }
                for (i = 0; i < N; i += BLOCK) store_block(&stores[s], stored + i, BLOCK, 1, &d);
            }
            printf(" %.3f (%.2f) |", sum / count, sqrt(fmax(squares / count - sum / count * (sum / count), 0)));
            fflush(stdout);
        }
        printf("\n");
    }
}

/* ---- errors --------------------------------------------------------------------------------------------------- */

typedef struct {
    const char *name;
    const store *code; /* NULL: companded */
    int nearest_first, nearest_second;
} coding;

static void store_moment(const coding *c, float *x, int n, int is_square, draws *d) {
    int i;
    if (c->code == NULL)
        store_companded(x, n, is_square);
    else
        for (i = 0; i < n; i += BLOCK)
            store_block(c->code, x + i, BLOCK, is_square,
                        (is_square ? c->nearest_second : c->nearest_first) ? NULL : d);
}

static float direction(const float *moment, int i, int n) { return moment[i] / (sqrtf(moment[n + i]) + 1e-12f); }

/* The rms error of a first moment that each step stores, over its rms. The errors of all stores that it remembers
   add up. */
static double memory_error(const coding *c, float beta) {
    enum { N = 2048 };
    static float exact[N], kept[N];
    draws g = draws_of(1, 1), d = draws_of(1, 2);
    const int steps = (int)(8 / (1 - beta));
    double off = 0, size = 0;
    int i, t;
    memset(exact, 0, sizeof exact);
    memset(kept, 0, sizeof kept);
    for (t = 0; t < steps; t++) {
        for (i = 0; i < N; i++) {
            const float x = (1 - beta) * gauss(&g);
            exact[i] = beta * exact[i] + x, kept[i] = beta * kept[i] + x;
        }
        store_moment(c, kept, N, 0, &d);
    }
    for (i = 0; i < N; i++) off += pow((double)kept[i] - (double)exact[i], 2), size += pow((double)exact[i], 2);
    return 100 * sqrt(off / size);
}

/* Moments of normal gradients, all of one size, as in bitsandbytes' own test: the mean error of one store over the mean
   magnitude, and the rms error of the step; the same of a run in which each step stores its moments; first moments of
   longer memory in such a run; and the second moments some time after every other gradient has become 100 times
   smaller. */
static void errors(void) {
    enum { N = 8192, ONCE = 1000, AFTER = 4000 };
    static const coding codings[] = {{"**here**", &stores[CHOSEN], 0, 0},
                                     {"here, first moments to nearest", &stores[CHOSEN], 1, 0},
                                     {"here, both to nearest", &stores[CHOSEN], 1, 1},
                                     {"dynamic map, stochastic", &stores[DYNAMIC_MAP], 0, 0},
                                     {"... first moments to nearest", &stores[DYNAMIC_MAP], 1, 0},
                                     {"... both: bitsandbytes", &stores[DYNAMIC_MAP], 1, 1},
                                     {"companded: FlashOptim", NULL, 1, 1}};
    static float exact[2 * N], kept[2 * N], once[2 * N];
    size_t c;
    int i, t, k;
    printf("| error, %% | m, one store | v, one store | step, one store | step in a run | m in a run, beta1 0.9 | 0.99 "
           "| 0.999 | v after a drop by 100, fp32: 1 |\n"
           "|---|---|---|---|---|---|---|---|---|\n");
    for (c = 0; c < sizeof codings / sizeof *codings; c++) {
        draws g = draws_of(1, 1), d = draws_of(1, 2);
        double wrong[2] = {0, 0}, size[2] = {0, 0}, off[2] = {0, 0}, length = 0, left = 0, right = 0;
        memset(exact, 0, sizeof exact);
        memset(kept, 0, sizeof kept);
        for (t = 1; t <= ONCE + AFTER; t++) {
            for (i = 0; i < N; i++) {
                const float x = gauss(&g) * (t <= ONCE || i % 2 == 0 ? 0.01f : 0.0001f);
                exact[i] = 0.9f * exact[i] + 0.1f * x, exact[N + i] = 0.999f * exact[N + i] + 0.001f * x * x;
                kept[i] = 0.9f * kept[i] + 0.1f * x, kept[N + i] = 0.999f * kept[N + i] + 0.001f * x * x;
            }
            if (t == ONCE) { /* the step that reads what was stored */
                memcpy(once, exact, sizeof once);
                for (k = 0; k < 2; k++) store_moment(&codings[c], once + k * N, N, k, &d);
                for (i = 0; i < 2 * N; i++)
                    wrong[i / N] += fabs((double)once[i] - (double)exact[i]), size[i / N] += fabs((double)exact[i]);
                for (i = 0; i < N; i++) {
                    const double u = (double)direction(exact, i, N);
                    length += u * u;
                    off[0] += pow((double)direction(once, i, N) - u, 2);
                    off[1] += pow((double)direction(kept, i, N) - u, 2);
                }
            }
            for (k = 0; k < 2; k++) store_moment(&codings[c], kept + k * N, N, k, &d);
        }
        for (i = N + 1; i < 2 * N; i += 2) left += (double)kept[i], right += (double)exact[i];
        printf("| %s | %.2f | %.2f | %.1f | %.1f | %.2g | %.2g | %.2g | %.3g |\n", codings[c].name,
               100 * wrong[0] / size[0], 100 * wrong[1] / size[1], 100 * sqrt(off[0] / length),
               100 * sqrt(off[1] / length), memory_error(&codings[c], 0.9f), memory_error(&codings[c], 0.99f),
               memory_error(&codings[c], 0.999f), left / right);
    }
}

/* Steps of AdamW with both moments stored beside those with fp32 moments, of the neighbours of one outlier per block:
   their length, their part along the fp32 step, the longest. */
static void steps(float beta2) {
    enum { N = 1024, KINDS = 9 };
    static const float outlier[KINDS] = {1, 1e3f, 1e4f, 2e4f, 5e4f, 1e5f, 5e5f, 1e6f, 1e7f};
    static float m[2][N], v[2][N];
    const store *s = &stores[STORES - 2];
    const int last = beta2 > 0.995f ? 5000 : 1500;
    double length[KINDS], along[KINDS], longest[KINDS];
    int kind, i, k, t;
    for (kind = 0; kind < KINDS; kind++) {
        draws g = draws_of(1, 2), d = draws_of(1, 3);
        double size[2] = {0, 0}, product = 0, square = 0;
        longest[kind] = 0;
        memset(m, 0, sizeof m);
        memset(v, 0, sizeof v);
        for (t = 1; t <= last; t++) {
            const float rate = 1 / (1 - powf(0.9f, (float)t)), scale = 1 / sqrtf(1 - powf(beta2, (float)t));
            for (i = 0; i < N; i++) {
                const float x = gauss(&g) * (i % BLOCK == 0 ? outlier[kind] : 1);
                double step[2];
                for (k = 0; k < 2; k++) {
                    m[k][i] = 0.9f * m[k][i] + 0.1f * x;
                    v[k][i] = beta2 * v[k][i] + (1 - beta2) * x * x;
                    step[k] = (double)(rate * m[k][i] / (sqrtf(v[k][i]) * scale * (k && t > 1 ? s->longer : 1)));
                }
                if (t <= last / 2 || i % BLOCK == 0) continue;
                for (k = 0; k < 2; k++) size[k] += fabs(step[k]);
                product += step[0] * step[1], square += step[0] * step[0];
                longest[kind] = fmax(longest[kind], fabs(step[1]));
            }
            for (i = 0; i < N; i += BLOCK) {
                store_block(s, m[1] + i, BLOCK, 0, &d);
                store_block(s, v[1] + i, BLOCK, 1, &d);
            }
        }
        length[kind] = size[1] / size[0], along[kind] = product / square;
    }
    printf("| outlier, beta2 %g |", (double)beta2);
    for (kind = 0; kind < KINDS; kind++) printf(" %g |", (double)outlier[kind]);
    printf("\n|---|---|---|---|---|---|---|---|---|---|\n| mean length |");
    for (kind = 0; kind < KINDS; kind++) printf(" %.3f |", length[kind]);
    printf("\n| along the fp32 step |");
    for (kind = 0; kind < KINDS; kind++) printf(" %.3f |", along[kind]);
    printf("\n| the longest, in units of lr |");
    for (kind = 0; kind < KINDS; kind++) printf(" %.1f |", longest[kind]);
    printf("\n");
}

/* ---- Training ------------------------------------------------------------------------------------------------- */

typedef struct {
    int n;
    float *w, *g, *m, *v;
} tensor;
enum { TENSORS = 11, ROWS = 96, VOCAB = 96, RARE = 2000, CLASSES = 10, DIGITS = 1797 };
typedef struct {
    tensor of[TENSORS];
    int count;
} model;

static void add_tensor(model *net, int rows, int columns, float sigma, draws *d) { /* in the same place */
    static float room[TENSORS][4][RARE * 16];
    float(*of)[RARE * 16] = room[net->count];
    tensor *t = &net->of[net->count++];
    int i;
    memset(of, 0, sizeof room[0]);
    t->n = rows * columns, t->w = of[0], t->g = of[1], t->m = of[2], t->v = of[3];
    for (i = 0; i < t->n; i++) t->w[i] = sigma * gauss(d);
}

static void adamw(model *net, const store *s, float lr, float beta2, int step, uint64_t seed) {
    const float beta1 = 0.9f, eps = 1e-8f, rate = lr / (1 - powf(beta1, (float)step));
    const float root_scale = (step > 1 ? s->longer : 1) / sqrtf(1 - powf(beta2, (float)step));
    int k, i;
    for (k = 0; k < net->count; k++) {
        tensor *t = &net->of[k];
        draws d = draws_of(seed, 1000 + (uint64_t)step * 16 + (uint64_t)k);
        for (i = 0; i < t->n; i++) {
            const float g = t->g[i];
            t->m[i] = beta1 * t->m[i] + (1 - beta1) * g;
            t->v[i] = beta2 * t->v[i] + (1 - beta2) * g * g;
            t->w[i] -= rate * (t->m[i] / (sqrtf(t->v[i]) * root_scale + eps)) + lr * 0.01f * t->w[i];
            t->g[i] = 0;
        }
        for (i = 0; i < t->n; i += BLOCK) {
            const int n = t->n - i < BLOCK ? t->n - i : BLOCK;
            store_block(s, t->m + i, n, 0, &d);
            store_block(s, t->v + i, n, 1, &d);
        }
    }
}

/* y += x w for `rows` rows; its gradients: that of w is added to, dx written. */
static void dense(const float *x, const float *w, float *y, int rows, int in, int out) {
    int r, i, k;
    for (r = 0; r < rows; r++)
        for (i = 0; i < in; i++) {
            const float a = x[r * in + i], *from = w + i * out;
            float *to = y + r * out;
            for (k = 0; k < out; k++) to[k] += a * from[k];
        }
}
static void dense_back(const float *x, tensor *t, const float *dy, float *dx, int rows, int in, int out) {
    int r, i, k, j;
    for (r = 0; r < rows; r++)
        for (i = 0; i < in; i++) {
            const float a = x[r * in + i], *from = dy + r * out, *w = t->w + i * out;
            float *to = t->g + i * out, sum[8] = {0};
            for (k = 0; k < out; k++) to[k] += a * from[k];
            if (dx == NULL) continue;
            for (k = 0; k + 8 <= out; k += 8)
                for (j = 0; j < 8; j++) sum[j] += w[k + j] * from[k + j];
            for (; k < out; k++) sum[0] += w[k] * from[k];
            dx[r * in + i] = ((sum[0] + sum[1]) + (sum[2] + sum[3])) + ((sum[4] + sum[5]) + (sum[6] + sum[7]));
        }
}

/* The sum of the losses; logits become the gradient of their mean. */
static double cross_entropy(float *logits, const int *label, int rows, int classes) {
    double loss = 0;
    int r, k;
    for (r = 0; r < rows; r++) {
        float *z = logits + r * classes, largest = z[0], sum = 0;
        const float right = z[label[r]];
        for (k = 1; k < classes; k++) largest = fmaxf(largest, z[k]);
        for (k = 0; k < classes; k++) sum += z[k] = expf(z[k] - largest);
        loss += (double)(logf(sum) + largest - right);
        for (k = 0; k < classes; k++) z[k] = (z[k] / sum - (float)(k == label[r])) / (float)rows;
    }
    return loss;
}

/* A task draws a batch: tokens or features, and labels. */
typedef struct {
    int rows, label[ROWS], token[ROWS * 8];
    float feature[ROWS * 64];
} batch;

static int text_length;
static unsigned char text[1 << 20];
static float digit[DIGITS][64], teacher[RARE][CLASSES], rank_until[RARE];
static int digit_label[DIGITS];

static FILE *opened(const char *name) {
    FILE *f = fopen(name, "rb");
    if (f != NULL) return f;
    fprintf(stderr, "q8: cannot read %s\n", name);
    exit(2);
}
static void refuse(const char *name) {
    fprintf(stderr, "q8: %s is too short\n", name);
    exit(2);
}

static void read_text(const char *name) {
    FILE *f = opened(name);
    int c;
    while ((c = getc(f)) != EOF && text_length < (int)sizeof text)
        text[text_length++] = (unsigned char)(c >= 32 && c < 127 ? c - 32 : VOCAB - 1);
    fclose(f);
    if (text_length < 5120) refuse(name);
}

/* Ten glyphs of 5 x 7 points, moved, scaled, sheared and covered with noise. */
static void draw_digits(void) {
    static const char *glyph[10] = {"01110100011001110101110011000101110", "00100011000010000100001000010001110",
                                    "01110100010000100010001000100011111", "11111000100010000010000011000101110",
                                    "00010001100101010010111110001000010", "11111100001111000001000011000101110",
                                    "00110010001000011110100011000101110", "11111000010001000100010000100001000",
                                    "01110100011000101110100011000101110", "01110100011000101111000010001001100"};
    draws d = draws_of(1, 10);
    int i, x, y;
    for (i = 0; i < DIGITS; i++) {
        const float sx = 0.6f + 0.4f * uniform(&d), sy = 0.75f + 0.4f * uniform(&d), shear = uniform(&d) - 0.5f;
        const float dx = 2 * uniform(&d) - 1, dy = 2 * uniform(&d) - 1;
        digit_label[i] = i % 10;
        for (y = 0; y < 8; y++)
            for (x = 0; x < 8; x++) {
                const float v = ((float)y - 3.5f + dy) * sy + 3;
                const float u = ((float)x - 3.5f + dx) * sx + shear * (v - 3) + 2;
                const int u0 = (int)floorf(u), v0 = (int)floorf(v);
                float ink = 0;
                int k;
                for (k = 0; k < 4; k++) { /* bilinear */
                    const int a = u0 + (k & 1), b = v0 + (k >> 1);
                    const float part = (1 - fabsf(u - (float)a)) * (1 - fabsf(v - (float)b));
                    if (a >= 0 && a < 5 && b >= 0 && b < 7 && glyph[i % 10][b * 5 + a] == '1') ink += part;
                }
                digit[i][y * 8 + x] = ink + 0.15f * gauss(&d);
            }
    }
}

static void read_digits(const char *name) { /* in a line 64 numbers of 0 to 16 and the label, with commas */
    FILE *f = opened(name);
    int i, k, x;
    for (i = 0; i < DIGITS; i++)
        for (k = 0; k < 65; k++) {
            if (fscanf(f, "%d%*[,]", &x) != 1) refuse(name);
            if (k < 64)
                digit[i][k] = (float)x / 16;
            else
                digit_label[i] = x;
        }
    fclose(f);
}

/* Tokens by Zipf's law, each with ten numbers of its own; a label is drawn from the softmax of their sum. */
static void make_teacher(void) {
    draws d = draws_of(1, 11);
    double sum = 0, so_far = 0;
    int i, k;
    for (i = 0; i < RARE; i++) sum += 1.0 / (i + 1);
    for (i = 0; i < RARE; i++) {
        so_far += 1.0 / (i + 1);
        rank_until[i] = (float)(so_far / sum);
        for (k = 0; k < CLASSES; k++) teacher[i][k] = gauss(&d);
    }
}

enum { DIGITS_TASK, BYTES_TASK, GPT_TASK, SPARSE_TASK, TASKS };

static void draw_batch(int task, batch *b, draws *d, int held_out) {
    int r, k;
    b->rows = task == GPT_TASK ? ROWS : 32;
    for (r = 0; r < b->rows; r++) {
        if (task == DIGITS_TASK) {
            const int i = below(d, DIGITS);
            memcpy(b->feature + r * 64, digit[i], sizeof digit[i]);
            b->label[r] = digit_label[i];
        } else if (task == BYTES_TASK || (task == GPT_TASK && r % 24 == 0)) { /* one block of 512 in ten is held out */
            const int length = task == BYTES_TASK ? 8 : 24, block = below(d, text_length / 5120) * 10;
            const int at = (held_out ? block : block + 1 + below(d, 9)) * 512 + below(d, 512 - length - 1);
            for (k = 0; k < length; k++) b->token[r * (task == BYTES_TASK ? 8 : 1) + k] = text[at + k];
            for (k = 0; k < (task == BYTES_TASK ? 1 : 24); k++) b->label[r + k] = text[at + k + (length == 8 ? 8 : 1)];
        } else if (task == SPARSE_TASK) {
            float logit[CLASSES] = {0}, best = -1e9f;
            for (k = 0; k < 8; k++) {
                const float u = uniform(d);
                int low = 0, high = RARE - 1, c;
                while (low < high) {
                    const int middle = (low + high) / 2;
                    if (rank_until[middle] > u)
                        high = middle;
                    else
                        low = middle + 1;
                }
                b->token[r * 8 + k] = low;
                for (c = 0; c < CLASSES; c++) logit[c] += teacher[low][c];
            }
            for (k = 0; k < CLASSES; k++) { /* Gumbel's way to draw from a softmax */
                const float here = logit[k] - logf(-logf(uniform(d) + 0x1p-25f));
                if (here > best) best = here, b->label[r] = k;
            }
        }
    }
}

/* Digits, bytes, sparse: [embedding,] dense layers with tanh, logits. Returns the sum of the losses. */
typedef struct {
    int embed, width[4], layers; /* numbers per token, 0: features; width[0] inputs ... width[layers] classes */
} shape;
static const shape shapes[TASKS] = {
    {0, {64, 128, 64, 10}, 3}, {16, {128, 64, VOCAB, 0}, 2}, {0, {0}, 0}, {16, {16, CLASSES, 0, 0}, 1}};

static double mlp(model *net, int task, const batch *b, int learn) {
    static float x[4][ROWS * 128], dx[4][ROWS * 128];
    const shape *s = &shapes[task];
    const int first = s->embed > 0, rows = b->rows;
    double loss;
    int r, k, j, i;
    memset(x, 0, sizeof x);
    if (!first)
        memcpy(x[0], b->feature, sizeof(float) * (size_t)(rows * 64));
    else
        for (r = 0; r < rows; r++)
            for (k = 0; k < 8; k++)
                for (j = 0; j < 16; j++) /* side by side, or their sum */
                    x[0][r * s->width[0] + (k * 16 + j) % s->width[0]] += net->of[0].w[b->token[r * 8 + k] * 16 + j];
    for (k = 0; k < s->layers; k++) {
        const int in = s->width[k], out = s->width[k + 1];
        const float *bias = net->of[first + 2 * k + 1].w;
        for (i = 0; i < rows * out; i++) x[k + 1][i] = bias[i % out];
        dense(x[k], net->of[first + 2 * k].w, x[k + 1], rows, in, out);
        if (k + 1 < s->layers)
            for (i = 0; i < rows * out; i++) x[k + 1][i] = tanhf(x[k + 1][i]);
    }
    loss = cross_entropy(x[s->layers], b->label, rows, s->width[s->layers]);
    if (!learn) return loss;
    memcpy(dx[s->layers], x[s->layers], sizeof x[0]);
    for (k = s->layers - 1; k >= 0; k--) {
        const int in = s->width[k], out = s->width[k + 1];
        for (i = 0; i < rows * out; i++) net->of[first + 2 * k + 1].g[i % out] += dx[k + 1][i];
        dense_back(x[k], &net->of[first + 2 * k], dx[k + 1], k > 0 || first ? dx[k] : NULL, rows, in, out);
        if (k > 0)
            for (i = 0; i < rows * in; i++) dx[k][i] *= 1 - x[k][i] * x[k][i];
    }
    for (r = 0; r < rows && first; r++)
        for (k = 0; k < 8; k++)
            for (j = 0; j < 16; j++)
                net->of[0].g[b->token[r * 8 + k] * 16 + j] += dx[0][r * s->width[0] + (k * 16 + j) % s->width[0]];
    return loss;
}

/* A transformer: 2 layers, 2 heads, normalization before each part, no biases. */
enum { D = 32, HEADS = 2, HEAD = D / HEADS, T = 24, LAYERS = 2, WIDE = 4 * D };
typedef struct {
    float in[ROWS * D], a[ROWS * D], qkv[ROWS * 3 * D], p[HEADS * ROWS * T], o[ROWS * D];
    float mid[ROWS * D], b[ROWS * D], h[ROWS * WIDE];
} layer;

static void normalize(const float *x, float *y, int rows) {
    int r, k;
    for (r = 0; r < rows; r++) {
        float sum = 0, scale;
        for (k = 0; k < D; k++) sum += x[r * D + k] * x[r * D + k];
        scale = 1 / sqrtf(sum / D + 1e-5f);
        for (k = 0; k < D; k++) y[r * D + k] = x[r * D + k] * scale;
    }
}
static void normalize_back(const float *x, const float *y, const float *dy, float *dx, int rows) { /* dx += */
    int r, k;
    for (r = 0; r < rows; r++) {
        float sum = 0, dot = 0, scale;
        for (k = 0; k < D; k++) sum += x[r * D + k] * x[r * D + k], dot += dy[r * D + k] * y[r * D + k];
        scale = 1 / sqrtf(sum / D + 1e-5f);
        for (k = 0; k < D; k++) dx[r * D + k] += scale * (dy[r * D + k] - y[r * D + k] * dot / D);
    }
}

static void attend(layer *l, float *dqkv, const float *dout) { /* forward, or with dqkv backward */
    const float scale = 1 / sqrtf(HEAD);
    int r, h, j, k;
    for (r = 0; r < ROWS; r++)
        for (h = 0; h < HEADS; h++) {
            const int start = r - r % T, n = r % T + 1, head = h * HEAD;
            const float *q = l->qkv + r * 3 * D + head;
            float *p = l->p + (h * ROWS + r) * T, sum = 0, dot = 0, dp[T];
            if (dqkv == NULL) {
                float largest = -1e30f;
                for (j = 0; j < n; j++) {
                    const float *key = l->qkv + (start + j) * 3 * D + D + head;
                    p[j] = 0;
                    for (k = 0; k < HEAD; k++) p[j] += q[k] * key[k];
                    largest = fmaxf(largest, p[j] *= scale);
                }
                for (j = 0; j < n; j++) sum += p[j] = expf(p[j] - largest);
                for (j = 0; j < n; j++) {
                    const float *value = l->qkv + (start + j) * 3 * D + 2 * D + head;
                    p[j] /= sum;
                    for (k = 0; k < HEAD; k++) l->o[r * D + head + k] += p[j] * value[k];
                }
                continue;
            }
            for (j = 0; j < n; j++) {
                const int at = (start + j) * 3 * D + 2 * D + head;
                dp[j] = 0;
                for (k = 0; k < HEAD; k++) {
                    dp[j] += dout[r * D + head + k] * l->qkv[at + k];
                    dqkv[at + k] += p[j] * dout[r * D + head + k];
                }
                dot += p[j] * dp[j];
            }
            for (j = 0; j < n; j++) {
                const float ds = p[j] * (dp[j] - dot) * scale;
                const int at = (start + j) * 3 * D + D + head;
                for (k = 0; k < HEAD; k++) {
                    dqkv[r * 3 * D + head + k] += ds * l->qkv[at + k];
                    dqkv[at + k] += ds * q[k];
                }
            }
        }
}

static double gpt(model *net, const batch *b, int learn) { /* tensors: tokens, places, logits; 4 of each layer */
    static layer layers[LAYERS];
    static float x[ROWS * D], y[ROWS * D], z[ROWS * VOCAB], dx[ROWS * D], dy[ROWS * D];
    static float dh[ROWS * WIDE], dqkv[ROWS * 3 * D];
    const size_t size = sizeof x;
    double loss;
    int i, k, n;
    for (i = 0; i < ROWS * D; i++) x[i] = net->of[0].w[b->token[i / D] * D + i % D] + net->of[1].w[i % (T * D)];
    memset(layers, 0, sizeof layers);
    memset(z, 0, sizeof z);
    for (n = 0; n < LAYERS; n++) {
        layer *l = &layers[n];
        tensor *t = &net->of[3 + 4 * n];
        memcpy(l->in, x, size);
        normalize(x, l->a, ROWS);
        dense(l->a, t[0].w, l->qkv, ROWS, D, 3 * D);
        attend(l, NULL, NULL);
        dense(l->o, t[1].w, x, ROWS, D, D);
        memcpy(l->mid, x, size);
        normalize(x, l->b, ROWS);
        dense(l->b, t[2].w, l->h, ROWS, D, WIDE);
        for (i = 0; i < ROWS * WIDE; i++) l->h[i] = fmaxf(l->h[i], 0);
        dense(l->h, t[3].w, x, ROWS, WIDE, D);
    }
    normalize(x, y, ROWS);
    dense(y, net->of[2].w, z, ROWS, D, VOCAB);
    loss = cross_entropy(z, b->label, ROWS, VOCAB);
    if (!learn) return loss;
    memset(dx, 0, size);
    dense_back(y, &net->of[2], z, dy, ROWS, D, VOCAB);
    normalize_back(x, y, dy, dx, ROWS);
    for (n = LAYERS - 1; n >= 0; n--) {
        layer *l = &layers[n];
        tensor *t = &net->of[3 + 4 * n];
        dense_back(l->h, &t[3], dx, dh, ROWS, WIDE, D);
        for (i = 0; i < ROWS * WIDE; i++)
            if (l->h[i] <= 0) dh[i] = 0;
        dense_back(l->b, &t[2], dh, dy, ROWS, D, WIDE);
        normalize_back(l->mid, l->b, dy, dx, ROWS);
        memset(dqkv, 0, sizeof dqkv);
        dense_back(l->o, &t[1], dx, dy, ROWS, D, D);
        attend(l, dqkv, dy);
        dense_back(l->a, &t[0], dqkv, dy, ROWS, D, 3 * D);
        normalize_back(l->in, l->a, dy, dx, ROWS);
    }
    for (i = 0; i < ROWS; i++)
        for (k = 0; k < D; k++) {
            net->of[0].g[b->token[i] * D + k] += dx[i * D + k];
            net->of[1].g[i % T * D + k] += dx[i * D + k];
        }
    return loss;
}

static const struct {
    const char *name;
    int steps, probes;
    float lr;
} tasks[TASKS] = {
    {"digits", 1500, 0, 1e-3f}, {"bytes", 2000, 200, 2e-3f}, {"GPT", 600, 60, 3e-3f}, {"sparse", 2000, 200, 3e-3f}};

static double evaluate(model *net, int task, batch *b) { /* digits: the training set; else what is held out */
    draws d = draws_of(7, 20);
    double loss = 0;
    int i, count = 0;
    for (i = 0; i < (task == DIGITS_TASK ? DIGITS / 32 : tasks[task].probes); i++, count += b->rows) {
        draw_batch(task, b, &d, 1);
        if (task == DIGITS_TASK) {
            memcpy(b->feature, digit[i * 32], sizeof(float) * 32 * 64);
            memcpy(b->label, digit_label + i * 32, sizeof(int) * 32);
        }
        loss += task == GPT_TASK ? gpt(net, b, 0) : mlp(net, task, b, 0);
    }
    return loss / count;
}

static double train_once(int task, const store *s, float beta2, uint64_t seed) {
    static batch b;
    model net;
    draws d = draws_of(seed, 30), data = draws_of(seed, 31);
    const shape *at = &shapes[task];
    int k, step;
    memset(&net, 0, sizeof net);
    if (task == GPT_TASK) {
        add_tensor(&net, VOCAB, D, 0.3f, &d);
        add_tensor(&net, T, D, 0.1f, &d);
        add_tensor(&net, D, VOCAB, 0.1f, &d);
        for (k = 0; k < LAYERS; k++) {
            add_tensor(&net, D, 3 * D, 1 / sqrtf(D), &d);
            add_tensor(&net, D, D, 0.3f / sqrtf(D), &d);
            add_tensor(&net, D, WIDE, 1 / sqrtf(D), &d);
            add_tensor(&net, WIDE, D, 0.3f / sqrtf(WIDE), &d);
        }
    } else {
        if (at->embed > 0) add_tensor(&net, task == SPARSE_TASK ? RARE : VOCAB, at->embed, 0.3f, &d);
        for (k = 0; k < at->layers; k++) {
            add_tensor(&net, at->width[k], at->width[k + 1], 1 / sqrtf((float)at->width[k]), &d);
            add_tensor(&net, 1, at->width[k + 1], 0, &d);
        }
    }
    for (step = 1; step <= tasks[task].steps; step++) { /* 5 % warm-up, then half a cosine down to 0 */
        const float part = (float)step / (float)tasks[task].steps, up = fminf(part * 20, 1);
        draw_batch(task, &b, &data, 0);
        if (task == GPT_TASK)
            gpt(&net, &b, 1);
        else
            mlp(&net, task, &b, 1);
        adamw(&net, s, tasks[task].lr * up * 0.5f * (1 + cosf(3.14159265f * part)), beta2, step, seed);
    }
    return evaluate(&net, task, &b);
}

static void train(float beta2, int last_task) {
    static double loss[TRAINED][SEEDS];
    int task, s, seed;
    printf("Final loss against fp32 moments, %%, mean and 95 %% interval of %d paired runs; beta2 %g\n\n", SEEDS,
           (double)beta2);
    printf("| task (loss) |");
    for (s = 1; s < TRAINED; s++) printf(" %s |", stores[s].name);
    printf("\n|---|---|---|---|---|---|---|---|\n");
    for (task = 0; task <= last_task; task++) {
        for (s = 0; s < TRAINED; s++) {
            double sum = 0, squares = 0, mean;
            for (seed = 0; seed < SEEDS; seed++) {
                const double x = loss[s][seed] = train_once(task, &stores[s], beta2, (uint64_t)seed + 1);
                const double change = 100 * (x / loss[0][seed] - 1);
                sum += s == 0 ? x : change, squares += change * change;
            }
            mean = sum / SEEDS;
            if (s == 0)
                printf("| %s (%.4f) |", tasks[task].name, mean);
            else
                printf(" %+.2f +- %.2f |", mean, 2.262 * sqrt((squares / SEEDS - mean * mean) / (SEEDS - 1)));
            fflush(stdout);
        }
        printf("\n");
    }
}

int main(int argc, char **argv) {
    const char *mode = argc > 1 ? argv[1] : "";
    int s;
    if (strcmp(mode, "check") == 0) {
        for (s = 0; s < STORES; s++)
            if (stores[s].kind == LINES) check_code(&stores[s]);
        check_code(NULL);
        check_signed_scales();
        return failures > 0;
    }
    if (strcmp(mode, "blocks") == 0) {
        blocks(argc > 2 ? (float)atof(argv[2]) : 0.999f);
        return 0;
    }
    if (strcmp(mode, "errors") == 0) {
        errors();
        return 0;
    }
    if (strcmp(mode, "steps") == 0) {
        steps(argc > 2 ? (float)atof(argv[2]) : 0.999f);
        return 0;
    }
    if (strcmp(mode, "train") == 0 && argc > 2) {
        read_text(argv[2]);
        if (argc > 4)
            read_digits(argv[4]);
        else
            draw_digits();
        make_teacher();
        train(argc > 3 ? (float)atof(argv[3]) : 0.999f, argc > 4 ? DIGITS_TASK : TASKS - 1);
        return 0;
    }
    fprintf(stderr, "usage: q8 check | errors | blocks [BETA2] | steps [BETA2] | train TEXT [BETA2 [DIGITS]]\n");
    return 2;
}
