/* test_dither.c - kopt_state_dither(): the residual of each of all 65,536 weights, against binary64; that no step
   without an update shows it; how far weights then move; shards, seeds and instruction sets; what is refused. */
#define KAHAN_OPT_IMPLEMENTATION
#include "../../kahan_opt.h"

#include "tap.h"
#include "reference.h"
#include "inputs.h"

#include <fenv.h>
#include <stdlib.h>

enum { N = 65536, SEED = 12345, ID = 7, DITHER = 6 /* the stream */ };
static uint16_t weight[2][N], before[N];
static unsigned char state[2][64 + 20 * N], state_before[64 + 20 * N];
static float grad[N], values[2][N];

static kopt_optimizer optimizer(kopt_rounding rounding) {
    kopt_optimizer o = kopt_sgd(1, 0);
    o.rounding = rounding, o.seed = SEED;
    return o;
}

/* A tensor of weight[k] and state[k], with a fresh block. */
static kopt_tensor begin(const kopt_optimizer *o, kopt_format f, int k) {
    kopt_tensor t = kopt_tensor_of(weight[k], f, grad, KOPT_F32, N, state[k], sizeof state[k]);
    t.id = ID;
    memset(state[k], 0xA5, sizeof state[k]);
    if (kopt_state_init(o, &t, 1, NULL) != KOPT_OK) ok(0, "kopt_state_init");
    return t;
}

static void all_weights(int k) {
    size_t i;
    for (i = 0; i < N; ++i) weight[k][i] = (uint16_t)i;
}

/* Which bits does the draw use? Beside which weights is there a residual? */
static double level(const kopt_optimizer *o, kopt_format f, uint32_t r) {
    if (o->rounding == KOPT_EXACT)
        return f == KOPT_BF16 ? ((double)r - 32768) / 65536 : ((double)(r / 8) - 4096) / 8192;
    return ((double)(r / 256) - 128) / 256 + (o->rounding == KOPT_KAHAN ? 1 / 512.0 : 0);
}
static int has_residual(kopt_format f, uint32_t w) {
    return ref_is_finite(f, w) && fabs((double)ref_float(ref_widen(f, w))) >= (f == KOPT_BF16 ? 0x1p-100 : 0x1p-24);
}

/* The value `part` of the gap away from a weight: the gap above its magnitude, or the one below, as far as the ends of
   the interval that rounds to it are half a gap away. */
static double apart(kopt_format f, uint32_t w, double part) {
    const uint32_t mag = w & 0x7fff, near = part < 0 || !ref_is_finite(f, mag + 1) ? mag - 1 : mag + 1;
    const double x = (double)ref_float(ref_widen(f, mag)), gap = fabs((double)ref_float(ref_widen(f, near)) - x);
    return (w >> 15 ? -1 : 1) * (x + part * gap);
}

/* ---- Every weight ------------------------------------------------------------------------------------------------ */

static void check_every_weight(kopt_format f, kopt_rounding rounding) {
    const kopt_optimizer o = optimizer(rounding);
    const ref_layout l = ref_layout_of(&o, f, N);
    int bad = 0, drawn = 0, turn;
    size_t i;
    for (turn = 0; turn < 8; ++turn) { /* other draws */
        kopt_tensor t;
        all_weights(0);
        t = begin(&o, f, 0);
        t.first_index = (uint64_t)turn << (turn == 7 ? 40 : 16);
        bad += kopt_state_init(&o, &t, 1, NULL) != KOPT_OK;
        bad += kopt_state_dither(&o, &t, 1) != KOPT_OK;
        bad += kopt_state_read(&o, &t, KOPT_SLOT_WEIGHT, values[0]) != KOPT_OK;
        for (i = 0; i < N; ++i) {
            const uint32_t w = (uint32_t)i, kept = ref_get(state[0] + l.residual, l.residual_width, i);
            const uint32_t r = ref_number(ref_random(SEED, 0, ID, DITHER, t.first_index + i), 0);
            const double x = has_residual(f, w) ? apart(f, w, level(&o, f, r)) : 0;
            ref_element e;
            bad += weight[0][i] != w;
            if (!has_residual(f, w)) {
                bad += kept != 0;
                continue;
            }
            ++drawn;
            ref_write_weight(&o, f, (float)x, &e);
            bad += e.weight != w || kept != (e.residual & (l.residual_width == 1 ? 0xffu : 0xffffu));
            bad += (double)values[0][i] != x; /* so the reference is exact, too */
        }
    }
    ok(!bad && drawn > 8 * 56000, "%s %s: all weights keep their bits and get the residuals of binary64, %d: %d differ",
       format_name[f], rounding_name[rounding], drawn, bad);
}

/* Steps without an update, beside a twin that has no residual: the weights stay equal, and so do the residuals. Tries
   every level of the draws, or (EXACT, quick) the ends and the middle of the interval. */
static int step_shows(kopt_optimizer o, kopt_format f, double part) {
    const ref_layout l = ref_layout_of(&o, f, N);
    kopt_tensor twin = begin(&o, f, 1), t;
    int bad = 0;
    size_t i;
    all_weights(0), all_weights(1);
    t = begin(&o, f, 0);
    bad += kopt_state_read(&o, &twin, KOPT_SLOT_WEIGHT, values[0]) != KOPT_OK;
    for (i = 0; i < N; ++i)
        if (has_residual(f, (uint32_t)i)) values[0][i] = (float)apart(f, (uint32_t)i, part);
    bad += kopt_state_init(&o, &t, 1, values[0]) != KOPT_OK;
    for (i = 0; i < N; ++i) bad += weight[0][i] != i && has_residual(f, (uint32_t)i);
    all_weights(0); /* -0 and payloads of NaN */
    memcpy(state_before, state[0], sizeof state_before);
    for (i = 0; i < 2; ++i) {
        kopt_optimizer other = o;
        bad += kopt_optimizer_step(&other, &twin, 1) != KOPT_OK || kopt_optimizer_step(&o, &t, 1) != KOPT_OK;
        bad += memcmp(weight[0], weight[1], sizeof weight[0]) != 0;
        bad += memcmp(state[0] + l.residual, state_before + l.residual, N * l.residual_width) != 0;
    }
    return bad;
}

static void check_no_update(kopt_format f, kopt_rounding rounding, int quick) {
    static const int ends[] = {0, 1, 7, 8, 32767, 32768, 32769, 65528, 65535};
    int isa, bad = 0, r, tried = 0;
    size_t i;
    memset(grad, 0, sizeof grad);
    FOR_EACH_ISA(isa)
    for (i = 0; i < sizeof ends / sizeof *ends; ++i) {
        kopt_optimizer o = optimizer(rounding);
        o.residual_rounding = i % 2 ? KOPT_STOCHASTIC : KOPT_NEAREST;
        bad += step_shows(o, f, level(&o, f, (uint32_t)ends[i])), ++tried;
    }
    for (r = 0; !quick && rounding != KOPT_EXACT && r < 65536; r += 256) {
        kopt_optimizer o = optimizer(rounding);
        bad += step_shows(o, f, level(&o, f, (uint32_t)r)), ++tried;
    }
    ok(!bad, "%s %s: steps without an update show nothing of %d residuals beside every weight: %d differ",
       format_name[f], rounding_name[rounding], tried, bad);
}

/* ---- How far weights move ---------------------------------------------------------------------------------------- */

/* 256 cells of the upper 8 bits. Of independent draws chi^2 has the mean 255 and the deviation sqrt(2 * 255) = 22.6;
   the mean of N draws, in gaps, deviates by 1 / sqrt(12 * N) = 0.0011, and their mean square, 1 / 12, by 1 / sqrt(180 *
   N) = 0.0003: the noise of an fp32 export, that of a rounding to 16 bits. Six deviations: one in 10^9. The share of
   weights that `part` of a gap takes across the edge must be `part`, to 5 deviations and the 2^-9 of KAHAN's grid. */
static void check_uniform(kopt_format f, kopt_rounding rounding) {
    const kopt_optimizer o = optimizer(rounding);
    const uint16_t one = f == KOPT_BF16 ? 0x3f80 : 0x3c00;
    int cell[256] = {0};
    double chi = 0, sum = 0, squares = 0;
    kopt_tensor t;
    size_t i;
    for (i = 0; i < N; ++i) weight[0][i] = (uint16_t)(one + 1 + i % 2);
    t = begin(&o, f, 0);
    ok(kopt_state_dither(&o, &t, 1) == KOPT_OK && kopt_state_read(&o, &t, KOPT_SLOT_WEIGHT, values[0]) == KOPT_OK,
       "drawn");
    for (i = 0; i < N; ++i) {
        const double x = (double)values[0][i] - (double)ref_float(ref_widen(f, weight[0][i]));
        const double part = x * (f == KOPT_BF16 ? 128 : 1024);
        ++cell[(int)floor((part + 0.5) * 256)];
        sum += part;
        squares += part * part;
    }
    for (i = 0; i < 256; ++i) chi += (cell[i] - N / 256.0) * (cell[i] - N / 256.0) / (N / 256.0);
    ok(fabs(chi - 255) < 6 * 22.6 && fabs(sum / N + (rounding == KOPT_COMPACT ? 1 / 512.0 : 0)) < 6 * 0.0011 &&
           fabs(squares / N - 1 / 12.0) < 6 * 0.0003,
       "%s %s: uniform: chi^2 of 256 cells %.0f, mean %.4f of a gap, mean square %.4f", format_name[f],
       rounding_name[rounding], chi, sum / N, squares / N);
}

/* The mean way of the visible weights in gaps, after 16 steps of part / 16 each. down: towards 0. */
static double moved(kopt_format f, kopt_rounding rounding, uint16_t from, int mask, double part, int down, int dither) {
    kopt_optimizer o = optimizer(rounding);
    kopt_tensor t;
    double sum = 0;
    size_t i;
    int step;
    for (i = 0; i < N; ++i)
        before[i] = weight[0][i] = (uint16_t)((from + (i & (unsigned)mask)) | (i & 64 ? 0x8000u : 0));
    t = begin(&o, f, 0);
    for (i = 0; i < N; ++i) {
        const double w = (double)ref_float(ref_widen(f, before[i]));
        grad[i] = (float)((w - apart(f, before[i], down ? -part : part)) / 16);
    }
    if (dither && kopt_state_dither(&o, &t, 1) != KOPT_OK) return (double)NAN;
    for (step = 0; step < 16; ++step)
        if (kopt_optimizer_step(&o, &t, 1) != KOPT_OK) return (double)NAN;
    for (i = 0; i < N; ++i) sum += (weight[0][i] & 0x7fff) - (before[i] & 0x7fff); /* bits are in gaps */
    return (down ? -sum : sum) / N;
}

static void check_moves(kopt_format f, kopt_rounding rounding) {
    static const double parts[] = {0.1, 0.3, 0.45};
    const uint16_t one = f == KOPT_BF16 ? 0x3f80 : 0x3c00;
    double worst = 0, without = 0;
    size_t i;
    int down, power;
    for (i = 0; i < 3; ++i)
        for (down = 0; down < 2; ++down)
            for (power = 0; power < 2; ++power) { /* of two: the gap below is half as wide */
                const double p = parts[i], deviation = sqrt(p * (1 - p) / N);
                const uint16_t from = (uint16_t)(one + 1 - power);
                const double with = moved(f, rounding, from, power ? 0 : 63, p, down, 1);
                worst = fmax(worst, (fabs(with - p) - 0.002) / deviation);
                without = fmax(without, fabs(moved(f, rounding, from, power ? 0 : 63, p, down, 0)));
            }
    ok(worst < 5 && without == 0 && worst > -1000,
       "%s %s: 0.1 to 0.45 of a gap, up and down, also from powers of two: all of it is seen, %.1f deviations off; "
       "without the draw %g",
       format_name[f], rounding_name[rounding], worst, without);
}

/* EXACT is the fp32 run that starts from the drawn values. */
static void check_exact(kopt_format f) {
    kopt_optimizer o = kopt_adamw(1e-4), fp32 = kopt_adamw(1e-4);
    kopt_tensor t, master;
    uint32_t word = 1;
    int bad = 0, step;
    size_t i;
    enum { M = 5000 };
    o.rounding = KOPT_EXACT,
    o.first_moment_format = o.second_moment_format = fp32.first_moment_format = fp32.second_moment_format = KOPT_F32;
    for (i = 0; i < M; ++i) values[0][i] = (uniform32(&word) + 0.1f) * (i % 2 ? -1.0f : 1.0f);
    ok(kopt_convert(weight[0], f, values[0], KOPT_F32, M) == KOPT_OK, "weights");
    t = kopt_tensor_of(weight[0], f, grad, KOPT_F32, M, state[0], sizeof state[0]);
    bad += kopt_state_init(&o, &t, 1, NULL) != KOPT_OK || kopt_state_dither(&o, &t, 1) != KOPT_OK;
    bad += kopt_state_read(&o, &t, KOPT_SLOT_WEIGHT, values[0]) != KOPT_OK;
    master = kopt_tensor_of(values[0], KOPT_F32, grad, KOPT_F32, M, state[1], sizeof state[1]);
    bad += kopt_state_init(&fp32, &master, 1, NULL) != KOPT_OK;
    for (step = 0; step < 30; ++step) {
        for (i = 0; i < M; ++i) grad[i] = uniform32(&word) - 0.5f;
        bad += kopt_optimizer_step(&o, &t, 1) != KOPT_OK || kopt_optimizer_step(&fp32, &master, 1) != KOPT_OK;
        bad += kopt_state_read(&o, &t, KOPT_SLOT_WEIGHT, values[1]) != KOPT_OK;
        bad += memcmp(values[0], values[1], 4 * M) != 0;
    }
    ok(!bad, "%s EXACT: bit for bit the fp32 run from the drawn values: %d differ", format_name[f], bad);
}

/* ---- Shards, keys, copies ---------------------------------------------------------------------------------------- */

static void check_keys(kopt_format f, kopt_rounding rounding) {
    static const size_t cut[] = {0, 1, 777, 4096, 30001, N};
    kopt_optimizer o = optimizer(rounding), other = o;
    const ref_layout l = ref_layout_of(&o, f, N);
    const size_t bytes = N * l.residual_width;
    kopt_tensor t;
    int bad = 0, isa;
    size_t i;
    all_weights(0), all_weights(1);
    t = begin(&o, f, 0);
    bad += kopt_state_dither(&o, &t, 1) != KOPT_OK;
    FOR_EACH_ISA(isa) {
        t = begin(&o, f, 1);
        bad += kopt_state_dither(&o, &t, 1) != KOPT_OK || memcmp(state[0], state[1], kopt_state_size(&o, &t)) != 0;
    }
    for (i = 0; i + 1 < sizeof cut / sizeof *cut; ++i) {
        const size_t n = cut[i + 1] - cut[i];
        t = kopt_tensor_of(weight[1] + cut[i], f, NULL, KOPT_F32, n, state[1], sizeof state[1]);
        t.id = ID, t.first_index = cut[i];
        bad += kopt_state_init(&o, &t, 1, NULL) != KOPT_OK || kopt_state_dither(&o, &t, 1) != KOPT_OK;
        bad += memcmp(state[1] + 64, state[0] + 64 + cut[i] * l.residual_width, n * l.residual_width) != 0;
    }
    other.step = 99, other.lr = 0.5; /* a checkpoint of another library may bring its step and moments */
    t = begin(&other, f, 1);
    bad += kopt_state_dither(&other, &t, 1) != KOPT_OK || memcmp(state[0] + 64, state[1] + 64, bytes) != 0;
    for (i = 0; i < 2; ++i) {
        other = o, other.seed += i == 0;
        t = begin(&other, f, 1), t.id += i == 1;
        bad += kopt_state_init(&other, &t, 1, NULL) != KOPT_OK || kopt_state_dither(&other, &t, 1) != KOPT_OK;
        bad += memcmp(state[0] + 64, state[1] + 64, bytes) == 0;
    }
    ok(!bad, "%s %s: same draws on every instruction set and in shards, others with another seed or id: %d differ",
       format_name[f], rounding_name[rounding], bad);
}

static void check_ranger(void) {
    const kopt_format f = KOPT_BF16;
    kopt_optimizer o = kopt_ranger(1e-3);
    const ref_layout l = ref_layout_of(&o, f, N);
    kopt_tensor t;
    int bad = 0;
    all_weights(0);
    o.seed = SEED;
    t = begin(&o, f, 0);
    t.copy = values[1], t.copy_format = KOPT_F32;
    bad += kopt_state_dither(&o, &t, 1) != KOPT_OK;
    bad += memcmp(state[0] + l.slow, weight[0], 2 * N) != 0;
    bad += memcmp(state[0] + l.slow_residual, state[0] + l.residual, 2 * N) != 0;
    bad += kopt_convert(values[0], KOPT_F32, weight[0], KOPT_BF16, N) != KOPT_OK;
    bad += memcmp(values[0], values[1], sizeof values[0]) != 0;
    ok(!bad, "Ranger's slow weights get the residual, the copy is that of the visible weights: %d differ", bad);
}

/* ---- What is refused --------------------------------------------------------------------------------------------- */

static kopt_result dithered(const kopt_optimizer *o, const kopt_tensor *t, int *written) {
    kopt_result result;
    memcpy(before, weight[0], sizeof before), memcpy(state_before, state[0], sizeof state_before);
    result = kopt_state_dither(o, t, 1);
    *written += memcmp(before, weight[0], sizeof before) || memcmp(state_before, state[0], sizeof state_before);
    return result;
}

static void check_refused(void) {
    const kopt_format f = KOPT_BF16;
    kopt_optimizer o = optimizer(KOPT_KAHAN), zero;
    kopt_tensor t;
    int written = 0, bad = 0;
    size_t i;
    for (i = 0; i < N; ++i) weight[0][i] = 0x3f81, grad[i] = 1e-6f, values[0][i] = 1.001f;
    t = begin(&o, f, 0);
    memset(&zero, 0, sizeof zero);
    bad += dithered(NULL, &t, &written) != KOPT_ERROR_NULL || dithered(&o, NULL, &written) != KOPT_ERROR_NULL;
    bad += dithered(&zero, &t, &written) != KOPT_ERROR_UNINITIALIZED;
    t.id = 8;
    bad += dithered(&o, &t, &written) != KOPT_ERROR_MISMATCH;
    t.id = ID, t.state_size = 100;
    bad += dithered(&o, &t, &written) != KOPT_ERROR_SIZE;
    t.state_size = sizeof state[0], t.weight = NULL;
    bad += dithered(&o, &t, &written) != KOPT_ERROR_NULL;
    t.weight = state[0];
    bad += dithered(&o, &t, &written) != KOPT_ERROR_OVERLAP;
    t.weight = weight[0];
    memset(state[0], 0, sizeof state[0]);
    bad += dithered(&o, &t, &written) != KOPT_ERROR_STATE;
    ok(!bad && !written, "refused: NULL, no constructor, another id, too short, overlaps, before kopt_state_init()");

    t = begin(&o, f, 0), bad = written = 0;
    bad += kopt_state_dither(&o, &t, 1) != KOPT_OK;
    bad += dithered(&o, &t, &written) != KOPT_ERROR_STEP;
    bad += kopt_state_init(&o, &t, 1, values[0]) != KOPT_OK || dithered(&o, &t, &written) != KOPT_ERROR_STEP;
    t = begin(&o, f, 0);
    bad += kopt_optimizer_step(&o, &t, 1) != KOPT_OK || dithered(&o, &t, &written) != KOPT_ERROR_STEP;
    for (i = 0; i + 1 < N; ++i) grad[i] = 0;
    for (grad[N - 1] = 0.001f, i = KOPT_KAHAN; i <= KOPT_EXACT; ++i) { /* a residual of the last element only */
        o.rounding = (kopt_rounding)i;
        t = begin(&o, f, 0);
        bad += kopt_optimizer_step(&o, &t, 1) != KOPT_OK || dithered(&o, &t, &written) != KOPT_ERROR_STEP;
    }
    ok(!bad && !written, "refused: a second call, after fp32 weights, after a step");

    o = optimizer(KOPT_NEAREST), o.momentum = 0.9, bad = written = 0;
    t = begin(&o, f, 0);
    bad += dithered(&o, &t, &written) != KOPT_ERROR_OPTION;
    o.rounding = KOPT_STOCHASTIC;
    t = begin(&o, f, 0);
    bad += dithered(&o, &t, &written) != KOPT_OK;
    o = kopt_adamw(0.01), o.rounding = KOPT_FEEDBACK;
    t = begin(&o, f, 0);
    bad += dithered(&o, &t, &written) != KOPT_OK;
    o.rounding = KOPT_NEAREST;
    t = kopt_tensor_of(values[0], KOPT_F32, NULL, KOPT_F32, 100, state[0], sizeof state[0]);
    bad += kopt_state_init(&o, &t, 1, NULL) != KOPT_OK || dithered(&o, &t, &written) != KOPT_OK;
    o = optimizer(KOPT_KAHAN), memset(&t, 0, sizeof t);
    bad += dithered(&o, &t, &written) != KOPT_OK; /* no elements */
    ok(!bad && !written,
       "nothing to draw: NEAREST is refused; STOCHASTIC, FEEDBACK, fp32 and no elements are left as they are");

    for (bad = written = 0, i = KOPT_NEAREST; i <= KOPT_EXACT; ++i) {
        o = kopt_ema(0.9), o.rounding = (kopt_rounding)i;
        t = begin(&o, f, 0);
        bad += dithered(&o, &t, &written) != KOPT_ERROR_OPTION;
    }
    ok(!bad && !written, "refused: an average, with any rounding");
}

/* ---- Averages ---------------------------------------------------------------------------------------------------- */

/* How far the average of weights moves, in ulps, while these move by 0.3 ulp: what is seen of it, or a stochastic copy
   of what it keeps. In the truth it is 0.212 ulp. */
static double average_moves(kopt_format f, kopt_rounding rounding, int copy) {
    const double ulp = ldexp(1, f == KOPT_BF16 ? -10 : -13);
    const kopt_random_key key = {SEED, 0, ID, 0};
    double moved = 0;
    kopt_optimizer o = kopt_ema(0.99);
    kopt_tensor t;
    size_t i;
    int k;
    o.rounding = rounding, o.seed = SEED;
    for (i = 0; i < N; ++i) {
        values[1][i] = 0.125f + 0.125f * (float)(i % 128) / 128;
        weight[0][i] = (uint16_t)ref_narrow(f, ref_bits(values[1][i]));
    }
    t = begin(&o, f, 0);
    for (k = 1; k <= 300; ++k) {
        for (i = 0; i < N; ++i) grad[i] = values[1][i] + (float)(k * ulp / 1000);
        if (kopt_optimizer_step(&o, &t, 1) != KOPT_OK) return -1;
    }
    if (copy && (kopt_state_read(&o, &t, KOPT_SLOT_WEIGHT, values[0]) != KOPT_OK ||
                 kopt_convert_stochastic(weight[0], f, values[0], KOPT_F32, N, key) != KOPT_OK))
        return -1;
    for (i = 0; i < N; ++i) moved += (double)ref_float(ref_widen(f, weight[0][i])) - (double)values[1][i];
    return moved / N / ulp;
}

/* A draw would not help: an average pulls its residual back to the weights. docs/fine-tuning.md says what does. */
static void check_averages(kopt_format f) {
    double truth = 0, x;
    int k, rounding, bad = 0;
    for (k = 1; k <= 300; ++k) truth += 0.01 * (k / 1000.0 - truth);
    for (rounding = KOPT_KAHAN; rounding <= KOPT_EXACT; ++rounding) {
        bad += average_moves(f, (kopt_rounding)rounding, 0) != 0;
        x = average_moves(f, (kopt_rounding)rounding, 1);
        bad += fabs(x - truth) > 0.01;
    }
    x = average_moves(f, KOPT_STOCHASTIC, 0);
    bad += fabs(x - truth) > 0.01;
    ok(!bad, "an average moves by %.3f ulp: seen with STOCHASTIC (%.3f), else in a stochastic copy", truth, x);
}

int main(int argc, char **argv) {
    const int quick = argc > 1 && strcmp(argv[1], "quick") == 0;
    int format, rounding;
    fesetenv(FE_DFL_ENV); /* -Ofast starts with subnormals flushed, and the reference computes here */
    for (format = KOPT_BF16; format <= KOPT_FP16; ++format) {
        for (rounding = KOPT_KAHAN; rounding <= KOPT_EXACT; ++rounding) {
            check_every_weight((kopt_format)format, (kopt_rounding)rounding);
            check_no_update((kopt_format)format, (kopt_rounding)rounding, quick);
            check_uniform((kopt_format)format, (kopt_rounding)rounding);
            check_moves((kopt_format)format, (kopt_rounding)rounding);
            check_keys((kopt_format)format, (kopt_rounding)rounding);
        }
        check_exact((kopt_format)format);
    }
    check_ranger();
    check_refused();
    check_averages(KOPT_BF16);
    check_averages(KOPT_FP16);
    return done();
}
