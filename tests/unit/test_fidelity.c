/* test_fidelity.c - what the 16 bits lose: decay, small constant updates, second moments and whole trajectories, each
   against what it should be in exact arithmetic, in fp32 or in binary64. Argument "quick": without the longest runs. */
#define KAHAN_OPT_IMPLEMENTATION
#include "../../kahan_opt.h"

#include "tap.h"
#include "reference.h"
#include "inputs.h"

#include <stdlib.h>

enum { MOST = 1024, POOL = 1 << 16 };
static uint32_t noise_state = 1;
static float gaussian(void) { return normal32(&noise_state); }

/* One tensor in training. The gradient is always fp32. */
typedef struct training {
    kopt_optimizer opt;
    kopt_tensor t;
    unsigned char weight[4 * MOST], state[KOPT_STATE_BYTES(MOST, 12)];
} training;

static void start(training *r, kopt_optimizer opt, kopt_format f, float *grad, size_t n, const float *weights) {
    r->opt = opt;
    r->t = kopt_tensor_of(r->weight, f, grad, KOPT_F32, n, r->state, 0);
    r->t.state_size = kopt_state_size(&opt, &r->t);
    if (kopt_state_init(&r->opt, &r->t, 1, weights) != KOPT_OK) exit(printf("Bail out! kopt_state_init\n"));
}

static void train(training *r, long steps) {
    while (steps-- > 0)
        if (kopt_optimizer_step(&r->opt, &r->t, 1) != KOPT_OK) exit(printf("Bail out! kopt_optimizer_step\n"));
}

static const float *values(const training *r, kopt_slot what) {
    static float out[2][MOST];
    static int turn;
    turn = !turn;
    if (kopt_state_read(&r->opt, &r->t, what, out[turn]) != KOPT_OK) exit(printf("Bail out! kopt_state_read\n"));
    return out[turn];
}

static double mean(const float *x, size_t n) {
    double sum = 0;
    size_t i;
    for (i = 0; i < n; ++i) sum += (double)x[i];
    return sum / (double)n;
}

static int within(double x, double target, double relative) { return fabs(x - target) <= relative * fabs(target); }

/* ---- Weight decay alone ----------------------------------------------------------------------------------------- */

/* The mean factor that 1 / (lr * weight_decay) steps of decay leave: 1 / e. */
static double decayed(kopt_format f, kopt_rounding rounding, kopt_rounding compensation, double lr) {
    enum { N = 256 };
    static training r;
    static float grad[N], weight[N];
    kopt_optimizer o = kopt_adamw(lr);
    const float *x;
    double sum = 0;
    int i;
    o.rounding = rounding, o.residual_rounding = compensation;
    for (i = 0; i < N; ++i) weight[i] = (i & 1 ? 0.5f : -0.5f) * (1 + 3 * (float)i / N);
    start(&r, o, f, grad, N, weight);
    train(&r, (long)(1 / (lr * o.weight_decay) + 0.5));
    for (x = values(&r, KOPT_SLOT_WEIGHT), i = 0; i < N; ++i) sum += (double)(x[i] / weight[i]);
    return sum / N;
}

static void check_decay(int quick) {
    static const double lr[] = {1e-2, 1e-3, 1e-4};
    int f, k, rounding;
    for (k = 0; k < (quick ? 1 : 3); ++k)
        for (f = KOPT_BF16; f <= KOPT_FP16; ++f) {
            for (rounding = KOPT_KAHAN; rounding <= KOPT_EXACT; ++rounding) {
                double factor = decayed((kopt_format)f, (kopt_rounding)rounding, KOPT_STOCHASTIC, lr[k]);
                ok(within(factor, 0.36788, 0.005), "decay, lr * weight_decay = %.0e, %s %s: mean factor %.4f (0.3679)",
                   lr[k] / 100, format_name[f], rounding_name[rounding], factor);
            }
            note("for comparison: nearest %.4f, stochastic %.4f, Kahan with nearest compensation %.4f",
                 decayed((kopt_format)f, KOPT_NEAREST, KOPT_NEAREST, lr[k]),
                 decayed((kopt_format)f, KOPT_STOCHASTIC, KOPT_NEAREST, lr[k]),
                 decayed((kopt_format)f, KOPT_KAHAN, KOPT_NEAREST, lr[k]));
        }
}

/* ---- Small constant updates ------------------------------------------------------------------------------------- */

/* `steps` updates of `relative` times the initial weight, from random residuals: the mean displacement in units of the
   true one. EXACT must be the fp32 run at ten checkpoints. */
static void check_constant(kopt_format f, float magnitude, float relative, long steps) {
    enum { N = 128, RUNS = 4, FP32 = 3 };
    static training run[RUNS];
    static float grad[N], weight[N], from[RUNS][N];
    double moved[RUNS] = {0};
    uint32_t draws = 1;
    int i, k, checkpoint, differ = 0;
    for (i = 0; i < N; ++i) {
        weight[i] = magnitude * (0.7f + uniform32(&draws));
        grad[i] = relative * weight[i] / 0.125f;
    }
    for (k = 0; k < RUNS; ++k) {
        kopt_optimizer o = kopt_sgd(0.125, 0);
        o.rounding = (kopt_rounding)(KOPT_KAHAN + k % FP32);
        start(&run[k], o, k == FP32 ? KOPT_F32 : f, grad, N, weight);
        memcpy(from[k], values(&run[k], KOPT_SLOT_WEIGHT), sizeof from[k]);
    }
    for (checkpoint = 0; checkpoint < 10; ++checkpoint) {
        for (k = 0; k < RUNS; ++k) train(&run[k], steps / 10);
        differ += memcmp(values(&run[FP32], KOPT_SLOT_WEIGHT), values(&run[KOPT_EXACT - KOPT_KAHAN], KOPT_SLOT_WEIGHT),
                         sizeof weight) != 0;
    }
    for (k = 0; k < RUNS; ++k) {
        const float *x = values(&run[k], KOPT_SLOT_WEIGHT);
        for (i = 0; i < N; ++i)
            moved[k] +=
                ((double)from[k][i] - (double)x[i]) / ((double)relative * (double)weight[i] * (double)steps) / N;
    }
    ok(within(moved[0], 1, 0.03), "%s weights near %g, %ld updates of %.0e: Kahan moves by %.4f of the true distance",
       format_name[f], (double)magnitude, steps, (double)relative, moved[0]);
    ok(within(moved[1], moved[FP32], 0.03), "... compact by %.4f, fp32 by %.4f", moved[1], moved[FP32]);
    ok(!differ, "... exact is fp32 bit for bit at 10 checkpoints (%d differ)", differ);
}

static void check_constants(int quick) {
    static const float magnitude[] = {1, 1e-4f, 1e-2f, 10};
    static const float relative[] = {1e-4f, 1e-5f, 1e-6f, 1e-7f};
    int size, k;
    long steps = 1000;
    for (size = 0; size < (quick ? 2 : 4); ++size, steps *= 10) {
        check_constant(KOPT_BF16, 1, relative[size], steps);
        for (k = 0; k < 4; ++k) check_constant(KOPT_FP16, magnitude[k], relative[size], steps);
    }
}

/* EXACT splits every fp32 into weight and remainder without loss. */
static void check_split(void) {
    static training r;
    static float in[MOST];
    const float *out;
    int f;
    for (f = KOPT_BF16; f <= KOPT_FP16; ++f) {
        uint32_t low = f == KOPT_BF16 ? 0x00800000 : 0x37000000, high = f == KOPT_BF16 ? 0x7f7f8000 : 0x477ff000;
        uint32_t word = low, lost = 0, sign = 0, fill = 0, tried = 0, i;
        kopt_optimizer o = kopt_sgd(1, 0);
        o.rounding = KOPT_EXACT;
        for (; word < high; word += 251, sign ^= 0x80000000u) {
            in[fill++] = ref_float(word | sign);
            if (fill < MOST) continue;
            start(&r, o, (kopt_format)f, in, MOST, in);
            out = values(&r, KOPT_SLOT_WEIGHT);
            for (i = 0; i < MOST; ++i) lost += ref_bits(out[i]) != ref_bits(in[i]);
            tried += fill, fill = 0;
        }
        ok(!lost, "exact %s: %u fp32 numbers split and joined again, %u changed", format_name[f], (unsigned)tried,
           (unsigned)lost);
    }
}

/* ---- Moments ---------------------------------------------------------------------------------------------------- */

static float pool[POOL + MOST];

/* Steps with a random window of the pool as the gradient; the same windows for the same `windows`. */
static void train_on_pool(training *r, long steps, uint32_t windows) {
    while (steps-- > 0) {
        r->t.grad = pool + (lcg32(&windows) >> 16) % POOL;
        train(r, 1);
    }
}

static void check_second_moment(double beta2) {
    enum { FP32, BF16, NEAREST, RUNS };
    static const char *const phase[] = {"settled", "gradient 100x smaller for 5 / (1 - beta2) steps",
                                        "for 15 / (1 - beta2)"};
    static training run[RUNS];
    static float weight[MOST];
    long settle = (long)(5 / (1 - beta2));
    int k, p;
    for (k = 0; k < RUNS; ++k) {
        kopt_optimizer o = kopt_adam(1e-3);
        o.beta2 = beta2;
        o.first_moment_format = o.second_moment_format = k == FP32 ? KOPT_F32 : KOPT_BF16;
        o.moment_rounding = k == NEAREST ? KOPT_NEAREST : KOPT_STOCHASTIC;
        start(&run[k], o, KOPT_BF16, pool, MOST, weight);
    }
    for (p = 0; p < 3; ++p) {
        double v[RUNS];
        for (k = 0; k < RUNS; ++k) {
            run[k].opt.grad_scale = p ? 0.01 : 1;
            train_on_pool(&run[k], p == 2 ? 2 * settle : settle, (uint32_t)p);
            v[k] = mean(values(&run[k], KOPT_SLOT_SECOND_MOMENT), MOST);
        }
        ok(within(v[BF16], v[FP32], 0.02), "beta2 = %g, %s: bf16 second moment is %.4f of fp32's (%.2e)", beta2,
           phase[p], v[BF16] / v[FP32], v[FP32]);
        note("for comparison: rounded to nearest %.4f", v[NEAREST] / v[FP32]);
    }
}

/* fp16 moments of gradients near the smallest fp16 number, of random and of constant sign. */
static void check_small_gradients(void) {
    enum { FP32, FP16, RUNS };
    static training run[RUNS];
    static float weight[MOST], constant[MOST];
    double v[RUNS], moved[RUNS];
    int k, i;
    for (i = 0; i < MOST; ++i) weight[i] = 1, constant[i] = 1e-6f;
    for (k = 0; k < RUNS; ++k) {
        kopt_optimizer o = kopt_adam(1e-5);
        o.first_moment_format = o.second_moment_format = k == FP32 ? KOPT_F32 : KOPT_FP16;
        o.grad_scale = 1e-6;
        start(&run[k], o, KOPT_F32, pool, MOST, weight);
        train_on_pool(&run[k], 10000, 7);
        v[k] = mean(values(&run[k], KOPT_SLOT_SECOND_MOMENT), MOST);
        o.grad_scale = 1;
        start(&run[k], o, KOPT_F32, constant, MOST, weight);
        train(&run[k], 10000);
        moved[k] = 1 - mean(values(&run[k], KOPT_SLOT_WEIGHT), MOST);
    }
    ok(within(v[FP16], v[FP32], 0.05), "fp16 second moment of Gaussian gradients of 1e-6: %.4f of fp32's (%.2e)",
       v[FP16] / v[FP32], v[FP32]);
    ok(within(moved[FP16], moved[FP32], 0.02) && within(moved[FP16], 0.1 / 1.01, 0.02),
       "10000 steps of lr = 1e-5 on gradients of 1e-6 move by %.5f with fp16 moments, %.5f with fp32", moved[FP16],
       moved[FP32]);
}

/* Under a loss scale the gradient enters the moments unscaled: what fp16 has no number for is lost there, not in bf16.
 */
static void check_moments_under_loss_scale(void) {
    static training r;
    static float zero[MOST], scaled[MOST];
    static const float size[] = {1e-5f, 1e-6f, 1e-7f, 1e-8f};
    int k, f, i;
    for (k = 0; k < 4; ++k) {
        double moved[3];
        for (i = 0; i < MOST; ++i) scaled[i] = size[k] * 65536;
        for (f = KOPT_F32; f <= KOPT_FP16; ++f) {
            kopt_optimizer o = kopt_adam(1e-3);
            o.first_moment_format = o.second_moment_format = (kopt_format)f;
            o.grad_scale = 1.0 / 65536;
            start(&r, o, KOPT_F32, scaled, MOST, zero);
            train(&r, 1000);
            moved[f] = -mean(values(&r, KOPT_SLOT_WEIGHT), MOST);
        }
        ok(within(moved[KOPT_BF16], moved[KOPT_F32], 0.01) &&
               (k < 2 ? within(moved[KOPT_FP16], moved[KOPT_F32], 0.02) : moved[KOPT_FP16] < 0.9 * moved[KOPT_F32]),
           "1000 steps under a loss scale, gradients of %.0e: bf16 moments reach %.2f, fp16 moments %.2f of fp32's way",
           (double)size[k], moved[KOPT_BF16] / moved[KOPT_F32], moved[KOPT_FP16] / moved[KOPT_F32]);
    }
}

/* ---- EXACT against fp32 ------------------------------------------------------------------------------------------ */

/* The weights of an fp32 run with moments of format `fp32_moments` and those of an EXACT one: how many differ? */
static int differ_from_fp32(kopt_optimizer o, kopt_format f, kopt_format moments, kopt_format fp32_moments) {
    enum { N = 512 };
    static training run[2];
    static float weight[N];
    uint32_t draws = 5;
    int i, k, differ = 0;
    const float *a, *b;
    for (i = 0; i < N; ++i) weight[i] = (i & 1 ? 1.0f : -1.0f) * (0.5f + 3 * uniform32(&draws));
    for (k = 0; k < 2; ++k) {
        o.rounding = KOPT_EXACT, o.first_moment_format = o.second_moment_format = k ? fp32_moments : moments;
        start(&run[k], o, k ? KOPT_F32 : f, pool, N, weight);
        train_on_pool(&run[k], 200, 3);
    }
    a = values(&run[0], KOPT_SLOT_WEIGHT), b = values(&run[1], KOPT_SLOT_WEIGHT);
    for (i = 0; i < N; ++i) differ += ref_bits(a[i]) != ref_bits(b[i]);
    return differ;
}

static void check_exact(void) {
    static training r;
    static float in[MOST];
    kopt_optimizer adamw = kopt_adamw(1e-3);
    uint32_t draws = 9;
    int f, m, i, differ, apart, off = 0;
    const float *out;
    for (f = KOPT_BF16; f <= KOPT_FP16; ++f) {
        for (differ = 0, m = KOPT_F32; m <= KOPT_Q8; ++m)
            differ += differ_from_fp32(adamw, (kopt_format)f, (kopt_format)m, (kopt_format)m);
        apart = differ_from_fp32(adamw, (kopt_format)f, KOPT_BF16, KOPT_F32);
        ok(!differ && apart > 500,
           "exact %s: the weights of fp32 runs with the same moments (%d differ), not with other moments (%d of 512)",
           format_name[f], differ, apart);
    }
    adamw.rounding = KOPT_EXACT;
    for (i = 0; i < MOST; ++i) in[i] = (float)ldexp((double)uniform32(&draws), -17);
    start(&r, adamw, KOPT_FP16, in, MOST, in);
    for (out = values(&r, KOPT_SLOT_WEIGHT), differ = i = 0; i < MOST; ++i) {
        off += fabs((double)out[i] - (double)in[i]) > 0x1p-41;
        differ += ref_bits(out[i]) != ref_bits(in[i]);
    }
    ok(!off && differ > MOST / 3,
       "exact fp16 below 2^-17: within 2^-41 (%d are not), not bit for bit (%d of %d differ)", off, differ, MOST);
}

/* ---- The smallest updates ---------------------------------------------------------------------------------------- */

/* What the stores of one weight mean: the weight, its compensation c, what is added, and the random bits. */
static double stored(kopt_format f, kopt_rounding rounding, uint16_t w, uint16_t c, float delta, uint32_t r) {
    if (rounding == KOPT_STOCHASTIC) {
        const float x = ref_add(ref_float(ref_widen(f, w)), delta);
        w = f == KOPT_BF16 ? kopt_bf16_from_f32_stochastic(x, r) : kopt_fp16_from_f32_stochastic(x, r);
    } else if (f == KOPT_BF16)
        kopt_kahan_add_bf16(&w, &c, delta, r);
    else
        kopt_kahan_add_fp16(&w, &c, delta, r);
    return (double)ref_float(ref_widen(f, w)) +
           (rounding == KOPT_KAHAN ? (double)ref_float(ref_widen(f, c)) * (f == KOPT_FP16 ? 0x1p-11 : 1) : 0);
}

/* ... in the mean over all 2^16 random numbers: the first that gives the other result is searched. */
static double mean_stored(kopt_format f, kopt_rounding rounding, uint16_t w, uint16_t c, float delta) {
    const double first = stored(f, rounding, w, c, delta, 0), last = stored(f, rounding, w, c, delta, 65535);
    uint32_t low = 0, high = 65535;
    if (!(first < last) && !(first > last)) return first;
    while (high - low > 1) {
        const uint32_t middle = (low + high) / 2;
        if (fabs(stored(f, rounding, w, c, delta, middle) - first) > 0)
            high = middle;
        else
            low = middle;
    }
    return first + (last - first) * (65536 - high) / 65536;
}

/* One update of 2^-e of the weight, up or down, of weights with random digits and random residuals: the mean progress
   in units of the update. *moved: the share of the weights that move at all, in the mean. */
static double progress(kopt_format f, int rounding, int quiet, int e, double *moved) {
    enum { N = 1024, ROUNDS = 8 };
    static training r;
    static float weight[N], grad[N];
    uint32_t draws = 11;
    double sum = 0, n = N * ROUNDS;
    int round, i;
    kopt_optimizer o = kopt_sgd(1, 0);
    o.rounding = (kopt_rounding)rounding;
    for (*moved = round = 0; round < ROUNDS; ++round) {
        for (i = 0; i < N; ++i) {
            weight[i] = 1 + uniform32(&draws);
            grad[i] = (float)ldexp((double)(i & 1 ? weight[i] : -weight[i]), -e);
        }
        if (rounding == KOPT_KAHAN || rounding == KOPT_STOCHASTIC)
            for (i = 0; i < N; ++i) {
                const uint32_t w = ref_narrow(f, ref_bits(weight[i]));
                const float rest = (weight[i] - ref_float(ref_widen(f, w))) * (f == KOPT_FP16 ? 2048 : 1);
                const uint16_t c = (uint16_t)(rounding == KOPT_KAHAN ? ref_narrow(f, ref_bits(rest)) : 0);
                const double from = (double)ref_float(ref_widen(f, w)) +
                                    (double)ref_float(ref_widen(f, c)) * (f == KOPT_FP16 ? 0x1p-11 : 1);
                const double to = quiet ? stored(f, KOPT_KAHAN, (uint16_t)w, c, -grad[i], 0x8000)
                                        : mean_stored(f, (kopt_rounding)rounding, (uint16_t)w, c, -grad[i]);
                sum += (from - to) / (double)grad[i] / n;
                *moved += (fabs(to - from) > 0) / n;
            }
        else {
            const int steps = rounding == KOPT_COMPACT ? 2000 : 1; /* its noise is larger than one update */
            static float from[N];
            const float *to;
            start(&r, o, f, grad, N, weight);
            memcpy(from, values(&r, KOPT_SLOT_WEIGHT), sizeof from);
            train(&r, steps);
            for (to = values(&r, KOPT_SLOT_WEIGHT), i = 0; i < N; ++i) {
                sum += ((double)from[i] - (double)to[i]) / (double)grad[i] / n / steps;
                *moved += (ref_bits(to[i]) != ref_bits(from[i])) / n;
            }
        }
    }
    return sum;
}

/* The table of the header, README.md and faq.md: from which updates on the mean progress is right, and from which on a
   weight moves at all. */
static void check_smallest_updates(void) {
    static const struct {
        const char *name;
        int rounding, quiet, right[3], moves[3];
    } row[] = {{"nearest", KOPT_NEAREST, 0, {0, 6, 9}, {0, 8, 11}},
               {"Kahan with nearest compensation", KOPT_KAHAN, 1, {0, 15, 21}, {0, 17, 23}},
               {"stochastic", KOPT_STOCHASTIC, 0, {0, 22, 22}, {0, 24, 24}},
               {"compact", KOPT_COMPACT, 0, {0, 22, 22}, {0, 24, 24}},
               {"exact", KOPT_EXACT, 0, {0, 22, 22}, {0, 24, 24}},
               {"Kahan", KOPT_KAHAN, 0, {0, 31, 34}, {0, 33, 36}}};
    size_t k;
    int f;
    for (k = 0; k < sizeof row / sizeof *row; ++k)
        for (f = KOPT_BF16; f <= KOPT_FP16; ++f) {
            const int right = row[k].right[f], moves = row[k].moves[f];
            double all, fewer, ignored;
            const double at_right = progress((kopt_format)f, row[k].rounding, row[k].quiet, right, &ignored);
            const double at_moves = progress((kopt_format)f, row[k].rounding, row[k].quiet, moves, &all);
            progress((kopt_format)f, row[k].rounding, row[k].quiet, moves + 1, &fewer);
            ok(within(at_right, 1, 0.01) && at_moves > 1.1 && all > 0.99 && fewer < 0.6,
               "%s, %s: updates of 2^-%d of a weight make %.4f of their way, 2^-%d %.2f (%.0f %% of the weights move), "
               "2^-%d move %.0f %%",
               row[k].name, format_name[f], right, at_right, moves, at_moves, 100 * all, moves + 1, 100 * fewer);
        }
}

/* numerics.md, section 3: the compensation is at most half an ulp of the weight, and the last bit of that. */
static void check_compensation(void) {
    int f, k;
    for (f = KOPT_BF16; f <= KOPT_FP16; ++f) {
        const int digits = f == KOPT_BF16 ? 7 : 10;
        const double bound = 1 + ldexp(1, -digits);
        double most = 0, most_nearest = 0;
        uint32_t draws = 4;
        for (k = 0; k < 400000; ++k) {
            const float old = 1 + uniform32(&draws);
            const uint16_t w = (uint16_t)ref_narrow((kopt_format)f, ref_bits(old));
            const double ulp = ldexp(1, -digits), tiny = ldexp((double)uniform32(&draws) - 0.5, -22);
            const float delta = k & 1 ? (float)((k & 2 ? 0.5 : -0.5) * ulp + tiny) /* next to a tie */
                                      : (float)ldexp((double)uniform32(&draws) - 0.5, k % 14 - 8);
            const uint32_t random[] = {0, 0x8000, 0xffff};
            int i;
            for (i = 0; i < 3; ++i) {
                uint16_t here = w, c = 0;
                double scale = 1, half;
                int exponent = 0;
                if (f == KOPT_BF16)
                    kopt_kahan_add_bf16(&here, &c, delta, random[i]);
                else
                    kopt_kahan_add_fp16(&here, &c, delta, random[i]), scale = 0x1p-11;
                frexp((double)ref_float(ref_widen((kopt_format)f, here)), &exponent);
                half = ldexp(scale, -(exponent - 2 - digits));
                half *= fabs((double)ref_float(ref_widen((kopt_format)f, c)));
                if (half > most) most = half;
                if (i == 1 && half > most_nearest) most_nearest = half;
            }
        }
        ok(within(most, bound, 0) && within(most_nearest, 1, 0),
           "%s: compensations of up to (1 + 2^-%d) of half an ulp of the weight: %.7f; to nearest: %.7f",
           format_name[f], digits, most, most_nearest);
    }
}

/* Updates of random signs, of 1e-6 of the weight: the error of the weight, rms, over the true displacement, rms. Each
   stochastic store moves the weight at random, and these moves add up like those of the updates. */
static void check_random_updates(void) {
    enum { STEPS = 4000 };
    static const int rounding[] = {KOPT_EXACT, KOPT_KAHAN, KOPT_COMPACT, KOPT_STOCHASTIC};
    static const double least[] = {0, 1.5, 3, 50}, most[] = {0.05, 5, 8, 150};
    static training r;
    static float weight[MOST], grad[MOST];
    static double want[MOST];
    int k, t, i;
    for (k = 0; k < 4; ++k) {
        kopt_optimizer o = kopt_sgd(1, 0);
        uint32_t draws = 21;
        double error = 0, true_way = 0, bias = 0;
        const float *x;
        o.rounding = (kopt_rounding)rounding[k];
        for (i = 0; i < MOST; ++i) {
            weight[i] = 1 + uniform32(&draws);
            if (o.rounding == KOPT_STOCHASTIC)
                weight[i] = ref_float(ref_widen(KOPT_BF16, ref_narrow(KOPT_BF16, ref_bits(weight[i]))));
        }
        start(&r, o, KOPT_BF16, grad, MOST, weight);
        for (x = values(&r, KOPT_SLOT_WEIGHT), i = 0; i < MOST; ++i) want[i] = (double)(weight[i] = x[i]);
        for (t = 0; t < STEPS; ++t) {
            for (i = 0; i < MOST; ++i) {
                grad[i] = lcg32(&draws) >> 31 ? 1e-6f * weight[i] : -1e-6f * weight[i];
                want[i] -= (double)grad[i];
            }
            train(&r, 1);
        }
        for (x = values(&r, KOPT_SLOT_WEIGHT), i = 0; i < MOST; ++i) {
            const double off = ((double)x[i] - want[i]) / (double)weight[i];
            const double way = (want[i] - (double)weight[i]) / (double)weight[i];
            error += off * off / MOST, true_way += way * way / MOST, bias += off / MOST;
        }
        ok(sqrt(error / true_way) < most[k] && sqrt(error / true_way) >= least[k] &&
               fabs(bias) < 4 * sqrt(error / MOST),
           "%d updates of +-1e-6 of a weight, %s: errors of %.3f of the true displacement, %.1e of the weight; mean "
           "%.1e",
           STEPS, rounding_name[rounding[k]], sqrt(error / true_way), sqrt(error), bias);
    }
}

/* Gradient accumulation with random signs or with one: the error of sum and residual, relative to the sum's size, grows
   with the root of the count. */
static void check_accumulation(int quick) {
    enum { N = 256 };
    static const double unit[] = {3e-6, 7e-6, 2e-8}; /* KAHAN, COMPACT, EXACT: rms, over the root of the count */
    static uint16_t sum[N], residual[N];
    static float grad[N], out[N];
    static double want[N];
    int rounding, one_sign, count, k, i;
    for (rounding = KOPT_KAHAN; rounding <= KOPT_EXACT; ++rounding)
        for (one_sign = 0; one_sign < 2; ++one_sign) {
            double last = 0, least = 1, most = 0;
            for (count = 10; count <= (quick ? 1000 : 10000); count *= 10) {
                kopt_accumulator a = kopt_accumulator_of(sum, KOPT_BF16, residual, N);
                double square = 0, relative;
                a.rounding = (kopt_rounding)rounding;
                memset(want, 0, sizeof want);
                for (k = 0; k < count; ++k) {
                    for (i = 0; i < N; ++i) {
                        grad[i] = one_sign ? 1 + uniform32(&noise_state) : gaussian();
                        want[i] += (double)grad[i];
                    }
                    if (kopt_accumulator_add(&a, grad, KOPT_F32, 1) != KOPT_OK)
                        exit(printf("Bail out! kopt_accumulator_add\n"));
                }
                if (kopt_accumulator_read(&a, out) != KOPT_OK) exit(printf("Bail out! kopt_accumulator_read\n"));
                for (i = 0; i < N; ++i) {
                    const double off = (double)out[i] - want[i];
                    square += off * off / (one_sign ? want[i] * want[i] : count) / N;
                }
                relative = sqrt(square / count) / unit[rounding - KOPT_KAHAN];
                if (relative < least) least = relative;
                if (relative > most) most = relative;
                last = sqrt(square);
            }
            ok(least > 0.3 && most < 1.2,
               "accumulation, %s, %s: errors of %.2f to %.2f of %.0e * root of the count, %.1e of the last",
               rounding_name[rounding], one_sign ? "one sign" : "both signs", least, most, unit[rounding - KOPT_KAHAN],
               last);
        }
}

/* ---- Fine-tuning ------------------------------------------------------------------------------------------------- */

/* The loss is half of the squared distance from a target, for the weights as the model sees them. The gradient is noisy
   enough for AdamW to wander. How much of fp32's progress do the visible weights show, from a bf16 checkpoint, where
   each weight is in the middle of what rounds to it, and from fp32 values? */
static void check_fine_tuning(long steps, double least, double most) {
    enum {
        FP32,
        KAHAN,
        EXACT,
        COMPACT,
        STOCHASTIC,
        KEPT,
        ARMS,
        NEAREST_EXPORT = ARMS,
        STOCHASTIC_EXPORT,
        KEPT_EXPORT,
        ALL
    };
    enum { SEEDS = 32 };
    static const int rounding[ARMS] = {KOPT_NEAREST, KOPT_KAHAN, KOPT_EXACT, KOPT_COMPACT, KOPT_STOCHASTIC, KOPT_KAHAN};
    static training run[ARMS];
    static float from[MOST], kept[MOST], target[MOST], seen[MOST], grad[MOST];
    static uint16_t file[MOST];
    double progress[ALL] = {0};
    uint32_t draws = 17;
    int seed, arm, i;
    long t;
    for (seed = 0; seed < SEEDS; ++seed) {
        uint32_t windows;
        double before = 0;
        for (i = 0; i < MOST; ++i) {
            kept[i] = 0.125f * normal32(&draws), target[i] = kept[i] + 0.1f * normal32(&draws);
            from[i] = ref_float(ref_widen(KOPT_BF16, ref_narrow(KOPT_BF16, ref_bits(kept[i]))));
            before += ((double)from[i] - (double)target[i]) * ((double)from[i] - (double)target[i]);
        }
        for (arm = 0; arm < ARMS; ++arm) {
            kopt_optimizer o = kopt_adamw(1e-6);
            o.weight_decay = 0, o.first_moment_format = o.second_moment_format = KOPT_F32,
            o.rounding = (kopt_rounding)rounding[arm];
            o.seed = (uint64_t)seed;
            start(&run[arm], o, arm == FP32 ? KOPT_F32 : KOPT_BF16, grad, MOST, arm == KEPT ? kept : from);
            for (windows = (uint32_t)seed, t = 0; t < steps; ++t) {
                const float *noise = pool + (lcg32(&windows) >> 16) % POOL;
                kopt_convert(seen, KOPT_F32, run[arm].weight, run[arm].t.weight_format, MOST);
                for (i = 0; i < MOST; ++i) grad[i] = seen[i] - target[i] + 0.5f * noise[i];
                train(&run[arm], 1);
            }
        }
        for (arm = 0; arm < ALL; ++arm) {
            const kopt_random_key key = {99 + (uint64_t)seed, 0, 0, 0};
            const float *full = values(&run[arm < ARMS ? arm : arm == KEPT_EXPORT ? KEPT : FP32], KOPT_SLOT_WEIGHT);
            double after = 0;
            if (arm < ARMS) kopt_convert(seen, KOPT_F32, run[arm].weight, run[arm].t.weight_format, MOST);
            if (arm == NEAREST_EXPORT) kopt_convert(file, KOPT_BF16, full, KOPT_F32, MOST);
            if (arm > NEAREST_EXPORT) kopt_convert_stochastic(file, KOPT_BF16, full, KOPT_F32, MOST, key);
            if (arm >= ARMS) kopt_convert(seen, KOPT_F32, file, KOPT_BF16, MOST);
            for (i = 0; i < MOST; ++i)
                after += ((double)seen[i] - (double)target[i]) * ((double)seen[i] - (double)target[i]);
            progress[arm] += before - after;
        }
    }
    for (arm = ALL; arm-- > 0;) progress[arm] /= progress[FP32];
    ok(progress[KAHAN] > least && progress[KAHAN] < most && progress[EXACT] > least && progress[EXACT] < most &&
           progress[COMPACT] > least && progress[COMPACT] < most,
       "fine-tuning from a bf16 checkpoint, %ld steps of 1e-6: weights show %.2f (Kahan), %.2f (exact), %.2f (compact) "
       "of "
       "fp32's progress",
       steps, progress[KAHAN], progress[EXACT], progress[COMPACT]);
    ok(within(progress[STOCHASTIC], 1, 0.1) && within(progress[KEPT], 1, 0.05),
       "... stochastic %.2f, Kahan from fp32 values %.2f", progress[STOCHASTIC], progress[KEPT]);
    ok(progress[NEAREST_EXPORT] > least && progress[NEAREST_EXPORT] < most &&
           within(progress[STOCHASTIC_EXPORT], 1, 0.05) && within(progress[KEPT_EXPORT], 1, 0.05),
       "... the fp32 run's weights rounded to nearest %.2f, stochastically %.2f; Kahan from fp32 values, too, %.2f",
       progress[NEAREST_EXPORT], progress[STOCHASTIC_EXPORT], progress[KEPT_EXPORT]);
}

/* ---- Trajectories against binary64 ------------------------------------------------------------------------------ */

/* One step of torch.optim.SGD, Adam or AdamW on one weight, as its documentation writes it. */
static double torch_step(const kopt_optimizer *o, long t, double w, double g, double state[2]) {
    double wd = o->weight_decay;
    if (o->maximize) g = -g;
    if (o->decay_mode == KOPT_DECAY_L2) g += wd * w;
    if (o->decay_mode == KOPT_DECAY_DECOUPLED) w -= o->lr * wd * w;
    if (o->decay_mode == KOPT_DECAY_FULLY_DECOUPLED) w -= o->lr / o->max_lr * wd * w;
    if (o->rule == KOPT_RULE_SGD) {
        if (o->momentum > 0) {
            state[0] = t > 1 ? o->momentum * state[0] + (1 - o->dampening) * g : g;
            g = o->nesterov ? g + o->momentum * state[0] : state[0];
        }
        return w - o->lr * g;
    }
    state[0] = o->beta1 * state[0] + (1 - o->beta1) * g;
    state[1] = o->beta2 * state[1] + (1 - o->beta2) * g * g;
    return w - o->lr / (1 - pow(o->beta1, (double)t)) * state[0] /
                   (sqrt(state[1]) / sqrt(1 - pow(o->beta2, (double)t)) + o->eps);
}

static void check_trajectory(const char *name, kopt_optimizer o, int schedule) {
    enum { N = 64, STEPS = 1000 };
    static training r;
    static float weight[N];
    double w[N], state[N][2] = {{0, 0}}, worst = 0, first_lr = o.lr;
    const float *x;
    long t;
    int i;
    o.first_moment_format = o.second_moment_format = KOPT_F32;
    for (i = 0; i < N; ++i) w[i] = (double)(weight[i] = gaussian());
    start(&r, o, KOPT_F32, pool, N, weight);
    for (t = 1; t <= STEPS; ++t) {
        float *g = pool + t * 31;
        if (schedule) r.opt.lr = first_lr * (1 + cos(3.14159 * (double)t / STEPS)) / 2;
        for (i = 0; i < N; ++i) w[i] = torch_step(&r.opt, t, w[i], (double)g[i], state[i]);
        r.t.grad = g;
        train(&r, 1);
    }
    for (x = values(&r, KOPT_SLOT_WEIGHT), i = 0; i < N; ++i)
        if (fabs((double)x[i] - w[i]) > worst) worst = fabs((double)x[i] - w[i]);
    ok(worst < 1e-5, "%s, fp32, 1000 steps: within %.1e of binary64", name, worst);
}

static void check_trajectories(void) {
    kopt_optimizer sgd = kopt_sgd(0.01, 0), momentum = kopt_sgd(0.01, 0.9), dampened = momentum, nesterov = momentum;
    kopt_optimizer l2 = kopt_adam(1e-3), adamw = kopt_adamw(1e-3), fully = adamw;
    sgd.weight_decay = momentum.weight_decay = 1e-3;
    dampened.dampening = 0.3, dampened.maximize = 1;
    nesterov.nesterov = 1, nesterov.weight_decay = 1e-3;
    l2.weight_decay = 0.1, adamw.weight_decay = 0.1;
    fully.decay_mode = KOPT_DECAY_FULLY_DECOUPLED, fully.weight_decay = 1e-4;
    check_trajectory("SGD", sgd, 0);
    check_trajectory("SGD with momentum", momentum, 0);
    check_trajectory("SGD with dampening, maximize", dampened, 0);
    check_trajectory("Nesterov", nesterov, 0);
    check_trajectory("Adam", kopt_adam(1e-3), 0);
    check_trajectory("Adam with L2", l2, 0);
    check_trajectory("AdamW", adamw, 0);
    check_trajectory("AdamW, fully decoupled, cosine schedule", fully, 1);
}

static void check_defaults(void) {
    kopt_optimizer s = kopt_sgd(0.5, 0.25), a = kopt_adam(0.5), w = kopt_adamw(0.5);
    ok(s.rule == KOPT_RULE_SGD && a.rule == KOPT_RULE_ADAM && w.rule == KOPT_RULE_ADAM, "rules");
    ok(!(s.lr < 0.5 || s.lr > 0.5 || a.lr < 0.5 || a.lr > 0.5 || w.lr < 0.5 || w.lr > 0.5), "learning rate as given");
    ok(within(s.momentum, 0.25, 0) && within(s.dampening, 0, 0) && !s.nesterov && within(s.weight_decay, 0, 0) &&
           s.decay_mode == KOPT_DECAY_L2 && !s.maximize,
       "SGD has PyTorch's defaults");
    ok(within(a.beta1, 0.9, 0) && within(a.beta2, 0.999, 0) && within(a.eps, 1e-8, 0) && within(a.weight_decay, 0, 0) &&
           a.decay_mode == KOPT_DECAY_L2 && !a.maximize,
       "Adam has PyTorch's defaults");
    ok(within(w.beta1, 0.9, 0) && within(w.beta2, 0.999, 0) && within(w.eps, 1e-8, 0) &&
           within(w.weight_decay, 0.01, 0) && w.decay_mode == KOPT_DECAY_DECOUPLED && !w.maximize,
       "AdamW has PyTorch's defaults");
    ok(w.rounding == KOPT_KAHAN && w.first_moment_format == KOPT_BF16 && w.moment_rounding == KOPT_STOCHASTIC &&
           w.residual_rounding == KOPT_STOCHASTIC && !w.zero_grad && within(w.grad_scale, 1, 0) &&
           within(w.clip, 1, 0) && within(w.max_lr, 0.5, 0) && !w.seed && !w.step,
       "the other defaults are the documented ones");
}

/* ---- Rest ------------------------------------------------------------------------------------------------------- */

/* Weights that need a residual keep their value; weights that need none keep their bits. */
static void check_rest(void) {
    enum { N = 200 };
    static training r;
    static float grad[N], weight[N];
    static unsigned char before[4 * N];
    int rule, format, rounding, moment, quiet, whole, i, moved = 0, cases = 0;
    for (rule = 0; rule < 4; ++rule)
        for (format = KOPT_F32; format <= KOPT_FP16; ++format)
            for (rounding = 0; rounding < ROUNDINGS; ++rounding)
                for (moment = KOPT_F32; moment <= KOPT_FP16; ++moment)
                    for (quiet = 0; quiet < 2; ++quiet)
                        for (whole = 0; whole < 2; ++whole) {
                            const kopt_format f = (kopt_format)format;
                            kopt_optimizer o = rule == 3 ? kopt_adamw(0.1) : kopt_sgd(0.1, rule ? 0.9 : 0);
                            o.nesterov = rule == 2, o.weight_decay = 0;
                            o.rounding = (kopt_rounding)rounding;
                            o.first_moment_format = o.second_moment_format = (kopt_format)moment;
                            o.moment_rounding = o.residual_rounding = quiet ? KOPT_NEAREST : KOPT_STOCHASTIC;
                            if (!ref_accepts(&o)) continue;
                            ++cases;
                            for (i = 0; i < N; ++i) {
                                uint32_t word = ref_bits(gaussian());
                                if (whole) word = ref_widen(f, ref_narrow(f, word));
                                weight[i] = ref_float(word);
                            }
                            start(&r, o, f, grad, N, weight);
                            memcpy(before, r.weight, sizeof before);
                            memcpy(weight, values(&r, KOPT_SLOT_WEIGHT), sizeof weight);
                            train(&r, 100);
                            moved += whole && memcmp(before, r.weight, N * ref_width(f));
                            moved += memcmp(weight, values(&r, KOPT_SLOT_WEIGHT), sizeof weight) != 0;
                        }
    ok(!moved, "no gradient, no moments, no decay: nothing moves in 100 steps, %d runs, %d moved", cases, moved);
}

int main(int count, char **arguments) {
    int i, quick = count > 1 && !strcmp(arguments[1], "quick");
    for (i = 0; i < POOL + MOST; ++i) pool[i] = gaussian();
    check_defaults();
    check_trajectories();
    check_rest();
    check_split();
    check_decay(quick);
    check_constants(quick);
    check_exact();
    check_smallest_updates();
    check_compensation();
    check_random_updates();
    check_accumulation(quick);
    check_fine_tuning(300, 0.2, 0.3);
    if (!quick) check_fine_tuning(1500, 0.8, 0.9);
    check_second_moment(0.999);
    if (!quick) check_second_moment(0.9999);
    check_small_gradients();
    check_moments_under_loss_scale();
    return done();
}
