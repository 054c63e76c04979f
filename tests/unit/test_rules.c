/* test_rules.c - Lion, Adan, RAdam, Ranger, AMSGrad and averages of weights against their papers in binary64; 8-bit
   moments: what a drop of the gradient leaves, the guard of a zero; stall counts. */
#define KAHAN_OPT_IMPLEMENTATION
#include "../../kahan_opt.h"

#include "tap.h"
#include "reference.h"
#include "inputs.h"

#include <stdlib.h>

enum { N = 256, STEPS = 1000, POOL = STEPS * 31 + N };
static float pool[POOL];

static uint32_t noise_state = 1;
static float gaussian(void) { return normal32(&noise_state); }

static unsigned char weight[4 * N], state[64 + 24 * N + 64], copy[4 * N];

static void run(kopt_result result) {
    if (result != KOPT_OK) exit(printf("Bail out! %s\n", kopt_result_string(result)));
}

/* ---- The rules as the papers and their first implementations write them ----------------------------------------- */

typedef struct scalar {
    double w, m, v, a, g, slow;
} scalar;

/* torch.optim.RAdam, optimi.Ranger: 0 while unrectified. */
static double rectify(double beta2, long t) {
    double end = 2 / (1 - beta2) - 1, power = pow(beta2, (double)t), now = end - 2 * (double)t * power / (1 - power);
    return now > 5 ? sqrt((now - 4) * (now - 2) * end / ((end - 4) * (end - 2) * now)) : 0;
}

/* StableAdamW's 1 / max(1, RMS), from the second moments after the step. */
static double calm(const kopt_optimizer *o, long t, const float *g, const scalar *s) {
    double sum = 0, c2 = 1 - pow(o->beta2, (double)t);
    int i;
    for (i = 0; i < N; ++i) {
        double v = (o->beta2 * s[i].v + (1 - o->beta2) * (double)g[i] * (double)g[i]) / c2;
        sum += (double)g[i] * (double)g[i] / (v > o->eps * o->eps ? v : o->eps * o->eps);
    }
    return sqrt(sum / N) > 1 ? 1 / sqrt(sum / N) : 1;
}

static void paper(const kopt_optimizer *o, long t, double g, double scale, scalar *s) {
    double lr = o->lr * scale, wd = o->weight_decay, c1 = 1 - pow(o->beta1, (double)t),
           c2 = 1 - pow(o->beta2, (double)t);
    double rate = o->decay_mode == KOPT_DECAY_FULLY_DECOUPLED ? lr / o->max_lr : lr, change, r; /* of the decay */
    if (o->maximize) g = -g;
    if (o->decay_mode == KOPT_DECAY_L2) g += wd * s->w;
    if (o->decay_mode != KOPT_DECAY_L2 && o->rule != KOPT_RULE_ADAN) s->w -= rate * wd * s->w;
    switch (o->rule) {
    case KOPT_RULE_LION:
        r = o->beta1 * s->m + (1 - o->beta1) * g;
        s->w -= lr * ((r > 0) - (r < 0));
        s->m = o->beta2 * s->m + (1 - o->beta2) * g;
        break;
    case KOPT_RULE_ADAN:
        change = t == 1 ? 0 : g - s->g;
        s->m += (1 - o->beta1) * (g - s->m);
        s->a += (1 - o->beta2) * (change - s->a);
        s->v += (1 - o->beta3) * ((g + o->beta2 * change) * (g + o->beta2 * change) - s->v);
        s->w -= lr * (s->m / c1 + o->beta2 * s->a / c2) / (sqrt(s->v / (1 - pow(o->beta3, (double)t))) + o->eps);
        if (o->decay_mode != KOPT_DECAY_L2) s->w /= 1 + rate * wd;
        s->g = g;
        break;
    case KOPT_RULE_RADAM:
    case KOPT_RULE_RANGER:
        s->m = o->beta1 * s->m + (1 - o->beta1) * g;
        s->v = o->beta2 * s->v + (1 - o->beta2) * g * g;
        r = rectify(o->beta2, t);
        if (r > 0 && o->rule == KOPT_RULE_RADAM)
            r *= sqrt(c2) / (sqrt(s->v) + o->eps);
        else if (r > 0)
            r /= sqrt(s->v / c2) + o->eps;
        else
            r = 1;
        s->w -= lr * r * s->m / c1;
        if (o->rule == KOPT_RULE_RANGER && t % o->lookahead == 0)
            s->w = s->slow += o->lookahead_rate * (s->w - s->slow);
        break;
    default: /* AMSGrad, StableAdamW */
        s->m = o->beta1 * s->m + (1 - o->beta1) * g;
        s->v = o->beta2 * s->v + (1 - o->beta2) * g * g;
        if (s->v > s->a || !o->amsgrad) s->a = s->v;
        s->w -= lr / c1 * s->m / (sqrt(s->a) / sqrt(c2) + o->eps);
    }
}

/* 1000 steps on noisy gradients with a mean, in one format; the worst and the root mean square error relative to the
   largest weight. */
static double follow(kopt_optimizer o, kopt_format f, double *rms) {
    static float start[N], out[N];
    static scalar s[N];
    kopt_tensor t = kopt_tensor_of(weight, f, pool, KOPT_F32, N, state, sizeof state);
    double worst = 0, sum = 0, largest = 0, scale;
    long k;
    int i;
    for (i = 0; i < N; ++i) {
        scalar zero = {0, 0, 0, 0, 0, 0};
        s[i] = zero;
        start[i] = 1 + (float)i / N;
        s[i].w = s[i].slow = (double)start[i];
    }
    run(kopt_state_init(&o, &t, 1, start));
    for (k = 1; k <= STEPS; ++k) {
        float *g = pool + k * 31 - 31;
        t.grad = g;
        run(kopt_optimizer_step(&o, &t, 1));
        scale = o.stable ? calm(&o, k, g, s) : 1;
        for (i = 0; i < N; ++i) paper(&o, k, (double)g[i], scale, &s[i]);
    }
    run(kopt_state_read(&o, &t, KOPT_SLOT_WEIGHT, out));
    for (i = 0; i < N; ++i) {
        double e = fabs((double)out[i] - s[i].w);
        if (e > worst) worst = e;
        if (fabs(s[i].w) > largest) largest = fabs(s[i].w);
        sum += e * e;
    }
    *rms = sqrt(sum / N) / largest;
    return worst / largest;
}

static void check_papers(void) {
    static const char *const name[] = {"Lion", "Adan", "RAdam", "Ranger", "AMSGrad", "StableAdamW"};
    int k, d;
    for (k = 0; k < 6; ++k)
        for (d = 0; d < 3; ++d) {
            kopt_optimizer o = k == 0   ? kopt_lion(1e-4)
                               : k == 1 ? kopt_adan(1e-3)
                               : k == 2 ? kopt_radam(1e-3)
                               : k == 3 ? kopt_ranger(1e-3)
                               : k == 4 ? kopt_adam(1e-3)
                                        : kopt_stable_adamw(1e-3);
            double worst, rms, nearest;
            int f, r;
            o.amsgrad = k == 4;
            o.decay_mode = (kopt_decay_mode)d, o.weight_decay = d == KOPT_DECAY_FULLY_DECOUPLED ? 1e-4 : 0.1;
            o.maximize = d == 1;
            if (o.stable && d == KOPT_DECAY_L2) continue; /* calm() is without it */
            o.first_moment_format = o.second_moment_format = KOPT_F32;
            worst = follow(o, KOPT_F32, &rms);
            ok(worst < 1e-5, "%s, decay %d, fp32: 1000 steps within %.1e of binary64", name[k], d, worst);
            if (d == KOPT_DECAY_L2) continue;
            for (f = KOPT_BF16; f <= KOPT_FP16; ++f) {
                o.rounding = KOPT_NEAREST;
                follow(o, (kopt_format)f, &nearest);
                for (r = KOPT_STOCHASTIC; r < ROUNDINGS; ++r) {
                    /* a random walk of stochastic roundings; of the last ones; half an ulp of the residual; nothing */
                    double limit = r == KOPT_STOCHASTIC ? (f == KOPT_BF16 ? 0.06 : 0.008)
                                   : r == KOPT_FEEDBACK ? (f == KOPT_BF16 ? 0.01 : 0.003)
                                   : r == KOPT_EXACT    ? 1e-5
                                   : f == KOPT_BF16     ? 3e-4
                                                        : 4e-5;
                    o.rounding = (kopt_rounding)r;
                    if (!ref_accepts(&o)) continue;
                    follow(o, (kopt_format)f, &rms);
                    ok(rms < limit && (!ref_carries(&o, (kopt_format)f) || rms < nearest / 10),
                       "%s, decay %d, %s %s: %.1e from binary64 (nearest: %.1e)", name[k], d, format_name[f],
                       rounding_name[r], rms, nearest);
                }
            }
        }
}

/* The average of weights that stand still comes to them, whatever the decay; in between it is the geometric one. */
static void check_ema(void) {
    int f, r;
    for (f = KOPT_F32; f <= KOPT_FP16; ++f)
        for (r = f == KOPT_F32 ? KOPT_EXACT : KOPT_NEAREST; r <= KOPT_EXACT; ++r) {
            static float zero[N], out[N];
            static uint16_t live[N];
            kopt_optimizer o = kopt_ema(0.9999);
            kopt_tensor t = kopt_tensor_of(weight, (kopt_format)f, live, KOPT_BF16, N, state, sizeof state);
            double mean = 0, want = 1 - pow(0.9999, 10000);
            long k;
            int i;
            o.rounding = (kopt_rounding)r;
            for (i = 0; i < N; ++i) zero[i] = 1, live[i] = 0x4000; /* from 1 to 2 */
            run(kopt_state_init(&o, &t, 1, zero));
            for (k = 0; k < 10000; ++k) run(kopt_optimizer_step(&o, &t, 1));
            run(kopt_state_read(&o, &t, KOPT_SLOT_WEIGHT, out));
            for (i = 0; i < N; ++i) mean += (double)out[i] / N;
            if (f != KOPT_F32 && r == KOPT_NEAREST)
                ok(mean < 1.01, "EMA, %s nearest, stalls as nearest does: %.4f of %.4f", format_name[f], mean,
                   1 + want);
            else
                ok(fabs(mean - 1 - want) < 0.01, "EMA, %s %s: %.4f of %.4f", format_name[f], rounding_name[r], mean,
                   1 + want);
        }
}

/* Zero gradients: nothing moves but by decay, whatever the moments are rounded to. */
static void check_rest(void) {
    int k, f, moment, r, moved = 0, cases = 0;
    for (k = 0; k < 5; ++k)
        for (f = KOPT_F32; f <= KOPT_FP16; ++f)
            for (moment = KOPT_F32; moment <= KOPT_Q8; ++moment)
                for (r = 0; r < ROUNDINGS; ++r) {
                    static float zero[N], before[N], after[N];
                    kopt_optimizer o = k == 0   ? kopt_lion(0.1)
                                       : k == 1 ? kopt_adan(0.1)
                                       : k == 2 ? kopt_radam(0.1)
                                       : k == 3 ? kopt_ranger(0.1)
                                                : kopt_adam(0.1);
                    kopt_tensor t = kopt_tensor_of(weight, (kopt_format)f, zero, KOPT_F32, N, state, sizeof state);
                    int i;
                    o.amsgrad = k == 4, o.weight_decay = 0;
                    o.first_moment_format = o.second_moment_format = (kopt_format)moment, o.rounding = (kopt_rounding)r;
                    if (!ref_accepts(&o)) continue;
                    ++cases;
                    for (i = 0; i < N; ++i) before[i] = gaussian();
                    run(kopt_state_init(&o, &t, 1, before));
                    run(kopt_state_read(&o, &t, KOPT_SLOT_WEIGHT, before));
                    for (i = 0; i < 50; ++i) run(kopt_optimizer_step(&o, &t, 1));
                    run(kopt_state_read(&o, &t, KOPT_SLOT_WEIGHT, after));
                    moved += memcmp(before, after, sizeof after) != 0;
                }
    ok(!moved, "no gradient, no decay: nothing moves in 50 steps, %d runs, %d moved", cases, moved);
}

/* ---- 8-bit moments ---------------------------------------------------------------------------------------------- */

/* The second moment after the gradient has dropped tenfold, but for one element of each block that holds the scale up:
   as a fraction of fp32's. */
static void check_drop(void) {
    enum { BIG = 4096 };
    static float grad[BIG], wide[2][BIG];
    static uint16_t w[BIG];
    static unsigned char block[64 + 12 * BIG + 1000];
    double ratio[2] = {0, 0};
    int rounding, i, k;
    for (rounding = KOPT_NEAREST; rounding <= KOPT_STOCHASTIC; ++rounding) {
        kopt_optimizer o[2];
        o[0] = kopt_adam(1e-9), o[1] = o[0];
        o[0].first_moment_format = o[0].second_moment_format = KOPT_F32,
        o[1].first_moment_format = o[1].second_moment_format = KOPT_Q8;
        for (k = 0; k < 2; ++k) {
            kopt_tensor t = kopt_tensor_of(w, KOPT_BF16, grad, KOPT_F32, BIG, block, sizeof block);
            double sum = 0;
            o[k].moment_rounding = (kopt_rounding)rounding;
            memset(w, 0, sizeof w);
            run(kopt_state_init(&o[k], &t, 1, NULL));
            srand(1);
            for (i = 0; i < 9000; ++i) {
                int e;
                for (e = 0; e < BIG; ++e)
                    grad[e] = pool[(i * 1237 + e) % POOL] * (i < 3000 || e % 256 == 0 ? 1.0f : 0.1f);
                run(kopt_optimizer_step(&o[k], &t, 1));
            }
            run(kopt_state_read(&o[k], &t, KOPT_SLOT_SECOND_MOMENT, wide[k]));
            for (i = 0; i < BIG; ++i) sum += i % 256 ? (double)wide[k][i] : 0;
            ratio[rounding] = k ? sum / ratio[rounding] : sum;
        }
    }
    ok(fabs(ratio[KOPT_STOCHASTIC] - 1) < 0.1, "8-bit second moment after a tenfold drop: %.3f of fp32", ratio[1]);
    note("with nearest codes: %.2f", ratio[KOPT_NEAREST]);
}

/* A block where one gradient is 10^6 times the others: the small ones may not blow up. */
static void check_guard(void) {
    static float grad[N], out[N];
    kopt_optimizer o = kopt_adam(1e-3);
    kopt_tensor t = kopt_tensor_of(weight, KOPT_F32, grad, KOPT_F32, N, state, sizeof state);
    double most = 0;
    int i, k;
    o.first_moment_format = o.second_moment_format = KOPT_Q8;
    memset(weight, 0, sizeof weight);
    run(kopt_state_init(&o, &t, 1, NULL));
    for (k = 0; k < 1000; ++k) {
        for (i = 0; i < N; ++i) grad[i] = pool[(k * 31 + i) % POOL] * (i ? 1e-4f : 1);
        run(kopt_optimizer_step(&o, &t, 1));
    }
    run(kopt_state_read(&o, &t, KOPT_SLOT_WEIGHT, out));
    for (i = 1; i < N; ++i)
        if (fabs((double)out[i]) > most) most = fabs((double)out[i]);
    ok(most < 0.5, "gradients 10^-4 of the block's largest, 1000 steps of 1e-3: the farthest weight is at %.3f", most);
    for (i = 0; i < N; ++i) grad[i] = i == 7 ? ref_float(0x7fc00000) : 1;
    run(kopt_optimizer_step(&o, &t, 1));
    run(kopt_state_read(&o, &t, KOPT_SLOT_FIRST_MOMENT, out));
    for (k = 0, i = 0; i < N; ++i) k += ref_is_nan(KOPT_F32, ref_bits(out[i]));
    ok(k == 64, "a NaN makes the moments of its block NaN, not numbers: %d of %d", k, N);
}

/* Large tensors take the kernels of vectors. Same bits as the scalar path's: also where values are zero, tiny, huge,
   infinite, NaN, and equal in magnitude to a code or beside it. */
static void check_large(void) {
    enum { BIG = 4321 };
    static float grad[BIG], wide[2][BIG];
    static uint16_t w[2][BIG];
    static unsigned char block[2][64 + 12 * BIG + 1000];
    kopt_isa isas[ISAS];
    const int usable = usable_isas(isas);
    int isa, rule, how, i, k, cases = 0, differ = 0;
    for (isa = 1; isa < usable; ++isa)
        for (rule = 0; rule < 5; ++rule)
            for (how = KOPT_NEAREST; how <= KOPT_STOCHASTIC; ++how, ++cases) {
                for (k = 0; k < 2; ++k) {
                    kopt_optimizer o = rule == 0   ? kopt_sgd(0.1, 0.9)
                                       : rule == 1 ? kopt_lion(0.1)
                                       : rule == 2 ? kopt_adan(0.1)
                                                   : kopt_adamw(0.1);
                    kopt_tensor t = kopt_tensor_of(w[k], KOPT_BF16, grad, KOPT_F32, BIG, block[k], sizeof block[k]);
                    o.amsgrad = rule == 4, o.first_moment_format = o.second_moment_format = KOPT_Q8,
                    o.moment_rounding = (kopt_rounding)how;
                    memset(block[k], 0, sizeof block[k]);
                    memset(w[k], 0, sizeof w[k]);
                    run(kopt_isa_force(k ? isas[isa] : KOPT_ISA_SCALAR));
                    run(kopt_state_init(&o, &t, 1, NULL));
                    srand(7);
                    for (i = 0; i < 4; ++i) {
                        int e, part;
                        for (e = 0; e < BIG; ++e) {
                            part = e / 256 % 8;
                            grad[e] = ref_code(rand() % 256, 0) * (part == 0 ? 1.0f : part == 1 ? 1e-30f : 1e6f);
                            if (part >= 3 && rand() % 4 == 0)
                                grad[e] = ref_float(ref_bits(grad[e]) + (uint32_t)(rand() % 3) - 1);
                            if (part == 4) grad[e] *= 1e-6f * (float)(rand() % 1000);
                            if (part == 5) grad[e] = 0;
                            if (part == 6 && e % 256) { /* roots of a code, of the middle of two, and beside them */
                                const int code = 1 + rand() % 254;
                                const double low = (double)ref_code(code, 1), high = (double)ref_code(code + 1, 1);
                                grad[e] = 1e6f * (float)(rand() % 2 ? low : (low + high) / 2);
                                grad[e] = ref_float(ref_bits(grad[e]) + (uint32_t)(rand() % 3) - 1);
                            }
                            if (e % 256 == 0) grad[e] = 1e6f;
                        }
                        if (i == 2) grad[15 * 256 + 9] = ref_float(0x7f800000), grad[7 * 256] = ref_float(0xffc00000);
                        run(kopt_optimizer_step(&o, &t, 1));
                    }
                    run(kopt_state_read(&o, &t, KOPT_SLOT_FIRST_MOMENT, wide[k]));
                }
                differ += memcmp(w[0], w[1], sizeof w[0]) || memcmp(block[0], block[1], sizeof block[0]);
            }
    run(kopt_isa_force(KOPT_ISA_AUTO));
    ok(!differ, "8-bit moments of a large tensor: the scalar path's bits, %d cases, %d differ", cases, differ);
}

/* A range of 8-bit moments begins and ends at blocks, its ends rounded down, or at the end of the tensor. */
static void check_ranges(void) {
    enum { LENGTH = 1000 };
    static const size_t cut[] = {0, 50, 100, 511, 999, LENGTH};
    static uint16_t w[3][LENGTH], g[LENGTH];
    static unsigned char block[3][64 + 2000 + 2 * (1008 + 16)];
    kopt_optimizer o = kopt_adamw(1e-3);
    kopt_tensor t[3];
    kopt_step s;
    int i, bad = 0;
    o.first_moment_format = o.second_moment_format = KOPT_Q8;
    for (i = 0; i < LENGTH; ++i) g[i] = (uint16_t)(0x3c00 + i);
    for (i = 0; i < 3; ++i) {
        t[i] = kopt_tensor_of(w[i], KOPT_BF16, g, KOPT_BF16, LENGTH, block[i], sizeof block[i]);
        run(kopt_state_init(&o, &t[i], 1, NULL));
    }
    ok(kopt_state_size(&o, t) == sizeof block[0], "8-bit moments: %u bytes for 1000 weights",
       (unsigned)kopt_state_size(&o, t));
    run(kopt_step_begin(&s, &o)), run(kopt_step_run(&s, &t[0], 1));
    run(kopt_step_range(&s, &t[1], 1, 1, 63)), run(kopt_step_range(&s, &t[1], 1, 527, 801));
    ok(!memcmp(w[1], w[2], 512) && !memcmp(w[1] + 768, w[2] + 768, 464) && memcmp(w[1] + 512, w[2] + 512, 512),
       "a range from within a block to within the next one is the first of them");
    run(kopt_state_init(&o, &t[1], 1, NULL));
    memset(w[1], 0, sizeof w[1]);
    for (i = 4; i >= 0; --i) run(kopt_step_range(&s, &t[1], 1, cut[i], cut[i + 1]));
    run(kopt_step_range(&s, &t[1], 1, 3, 3));
    ok(!memcmp(w[0], w[1], sizeof w[0]) && !memcmp(block[0], block[1], sizeof block[0]),
       "ranges that cover a tensor step each element once, wherever they end");
    bad += kopt_step_range(&s, &t[2], 1, 300, 299) != KOPT_ERROR_BOUNDS;
    bad += kopt_step_range(&s, &t[2], 1, 256, LENGTH + 1) != KOPT_ERROR_BOUNDS;
    for (i = 0; i < LENGTH; ++i) bad += w[2][i] != 0;
    ok(!bad, "... but for ends beyond that of the tensor, or before their beginning");
    run(kopt_step_range(&s, &t[2], 1, 60, LENGTH));
    ok(!memcmp(w[0], w[2], sizeof w[0]), "a range from within the first block is the whole");
    t[0].weight_format = KOPT_Q8;
    ok(kopt_state_init(&o, t, 1, NULL) == KOPT_ERROR_OPTION && kopt_state_size(&o, t) == 0,
       "8-bit weights are refused");
}

/* ---- Moments only, telemetry ------------------------------------------------------------------------------------ */

/* Two gradients into the moments, then the weights: the weights move once, the moments three times. */
static void check_moments_only(void) {
    static float m[N];
    static uint16_t before[N];
    kopt_optimizer o = kopt_adamw(1e-2);
    kopt_tensor t = kopt_tensor_of(weight, KOPT_BF16, pool, KOPT_F32, N, state, sizeof state);
    int i, k, bad = 0;
    for (i = 0; i < N; ++i) before[i] = 0x3f80;
    memcpy(weight, before, sizeof before);
    t.copy = copy, t.copy_format = KOPT_F32;
    o.first_moment_format = o.second_moment_format = KOPT_F32;
    run(kopt_state_init(&o, &t, 1, NULL));
    memset(copy, 0x77, sizeof copy);
    o.moments_only = 1;
    for (k = 0; k < 2; ++k) t.grad = pool + 500 * k, run(kopt_optimizer_step(&o, &t, 1));
    bad += memcmp(before, weight, sizeof before) != 0;
    for (i = 0; i < (int)sizeof copy; ++i) bad += copy[i] != 0x77;
    run(kopt_state_read(&o, &t, KOPT_SLOT_FIRST_MOMENT, m));
    for (i = 0; i < N; ++i) bad += fabs((double)m[i] - 0.1 * (0.9 * (double)pool[i] + (double)pool[500 + i])) > 1e-6;
    ok(!bad, "moments_only: moments move, weights and copy do not: %d wrong", bad);
    o.moments_only = 0;
    run(kopt_optimizer_step(&o, &t, 1));
    ok(memcmp(before, weight, sizeof before) != 0, "... and the last micro-batch moves the weights");
}

/* A tensor that joins after 10000 steps: a copy of the optimizer with step 0 steps it as a run of its own would, bit
   for bit. In the list of the others its first update is (1 - beta1) / sqrt(1 - beta2) = 3.16 times lr: the corrections
   are over. */
static void check_late(void) {
    static unsigned char late_state[64 + 8 * N], fresh_state[64 + 8 * N];
    static float w[3][N], g[N];
    int adamw, format, k, i;
    for (adamw = 0; adamw < 2; ++adamw)
        for (format = KOPT_F32; format <= KOPT_BF16; ++format) {
            kopt_optimizer o = adamw ? kopt_adamw(1e-3) : kopt_adam(1e-3), late, fresh = o;
            kopt_tensor t[2], alone;
            int bad = 0;
            o.first_moment_format = o.second_moment_format = fresh.first_moment_format = fresh.second_moment_format =
                (kopt_format)format;
            for (k = 0; k < 2; ++k)
                t[k] = kopt_tensor_of(w[k], KOPT_F32, g, KOPT_F32, N, k ? late_state : state, 64 + 8 * N);
            alone = kopt_tensor_of(w[2], KOPT_F32, g, KOPT_F32, N, fresh_state, sizeof fresh_state);
            run(kopt_list_set_ids(t, 2, 0));
            alone.id = 1;
            for (i = 0; i < N; ++i) w[0][i] = w[1][i] = w[2][i] = 0, g[i] = 0.01f;
            run(kopt_state_init(&o, t, 2, NULL));
            run(kopt_state_init(&fresh, &alone, 1, NULL));
            for (k = 0; k < 10000; ++k) run(kopt_optimizer_step(&o, t, 1)); /* t[1] is frozen */
            late = o, late.step = 0;
            for (k = 0; k < 20; ++k) {
                for (i = 0; i < N; ++i) g[i] = pool[k * 31 + i];
                run(kopt_optimizer_step(&late, &t[1], 1)), run(kopt_optimizer_step(&fresh, &alone, 1));
                bad += memcmp(w[1], w[2], sizeof w[1]) != 0;
            }
            bad += memcmp(late_state + 64, fresh_state + 64, kopt_state_size(&o, &alone) - 64) != 0;
            ok(!bad, "%s, moments %d: a late tensor with an optimizer of its own is like new", adamw ? "AdamW" : "Adam",
               format);
            for (i = 0; i < N; ++i) w[1][i] = 0, g[i] = 0.01f;
            run(kopt_state_init(&o, &t[1], 1, NULL));
            run(kopt_optimizer_step(&o, t, 2));
            ok(fabs((double)w[1][7] + 3.16e-3) < 0.03e-3, "... in the list of the others it moves by %.2f lr",
               (double)w[1][7] / -1e-3);
        }
}

/* Counts for updates of 1e-5 of the weight: all still in bf16; stuck only where nothing is kept. */
static void check_counts(void) {
    int rounding, noisy;
    for (rounding = KOPT_NEAREST; rounding <= KOPT_EXACT; ++rounding)
        for (noisy = 0; noisy < 2; ++noisy) {
            static float grad[N];
            kopt_optimizer o = kopt_sgd(1, 0);
            kopt_tensor t = kopt_tensor_of(weight, KOPT_BF16, grad, KOPT_F32, N, state, sizeof state);
            kopt_counts c = {0, 0, 0};
            int i, k;
            for (i = 0; i < N; ++i) grad[i] = i < 200 ? 1e-8f : 0;
            for (i = 0; i < N; ++i) ref_set(weight, 2, (size_t)i, 0x3f80);
            o.rounding = (kopt_rounding)rounding;
            o.residual_rounding = noisy ? KOPT_STOCHASTIC : KOPT_NEAREST;
            run(kopt_state_init(&o, &t, 1, NULL));
            t.counts = &c;
            for (k = 0; k < 10; ++k) run(kopt_optimizer_step(&o, &t, 1));
            ok(c.wanted == 2000 && c.stuck <= c.still && c.still <= c.wanted, "%s %d: %u wanted, %u still, %u stuck",
               rounding_name[rounding], noisy, (unsigned)c.wanted, (unsigned)c.still, (unsigned)c.stuck);
            if (rounding == KOPT_NEAREST) ok(c.stuck == 2000, "nearest: all are stuck");
            if (rounding >= KOPT_COMPACT)
                ok(c.stuck == 2000, "%s: 1e-8 of a weight is below fp32's grain, too", rounding_name[rounding]);
            if (rounding == KOPT_KAHAN) ok(c.still == 2000 && c.stuck < 2000, "Kahan: still, but not stuck");
        }
}

int main(int count, char **arguments) {
    int i, quick = count > 1 && !strcmp(arguments[1], "quick");
    for (i = 0; i < POOL; ++i) pool[i] = gaussian() + 0.3f;
    check_papers();
    check_ema();
    check_rest();
    if (!quick) check_drop();
    check_guard();
    check_large();
    check_ranges();
    check_moments_only();
    check_late();
    check_counts();
    return done();
}
