/* test_atan.c - the rules of KAHAN_OPT_VMATH: Adam-atan2 and smooth Lion. Bit for bit as docs/numerics.md has them, in
   all the ways of test_step_bits.c; the atan2 of a step against libm's in binary64; both published formulas over
   500 steps; what the rules promise. Argument "quick": a part of it. With KAHAN_OPT_SLEEF all of it by SLEEF, whose
   vectors are to have the bits of SLEEF's functions of one number. */
#define KAHAN_OPT_VMATH
#include "test_step_bits.c"

#include <stdlib.h>

static kopt_optimizer make(rule r) {
    kopt_optimizer o = r == SMOOTH ? kopt_smooth_lion(0.01, 300) : kopt_adam_atan2(0.01);
    o.atan2_outside = r == OUTSIDE;
    if (r == OUTSIDE) o.atan2_a = o.atan2_b = 1;
    if (r == ATAN2 && below(2)) o.atan2_a = 0.5, o.atan2_b = 3;
    return o;
}

/* ---- The atan2 of a step ---------------------------------------------------------------------------------------- */

enum { N = 1024 };
static float weight[N], gradient[N], first[N], second[N], out[N];
static unsigned char state[64 + 8 * N + 64];

/* With beta 1/2, a gradient of 0 and both corrections 1, a step subtracts atan2(m / 2, sqrt(v / 2)). */
static void check_angle(int quick) {
    kopt_isa isas[ISAS];
    const int count = usable_isas(isas);
    double worst = 0;
    int round, i, signs = 0;
    for (round = 0; round < (quick ? 10 : 200); ++round) {
        kopt_optimizer o = kopt_adam_atan2(1);
        kopt_tensor t = kopt_tensor_of(weight, KOPT_F32, gradient, KOPT_F32, N, state, sizeof state);
        o.first_moment_format = o.second_moment_format = KOPT_F32, o.atan2_a = 1, o.beta1 = o.beta2 = 0.5,
        o.step = 1000;
        kopt_isa_force(isas[round / 2 % count]);
        memset(weight, 0, sizeof weight), memset(gradient, 0, sizeof gradient);
        for (i = 0; i < N; ++i) { /* roots of 12 bits; ratios near 1, and of any size */
            const int wide = round % 2 ? 1 : 40;
            second[i] = ref_float((uint32_t)(127 + (int)below((uint32_t)wide) - wide / 2) << 23 | (noise() & 0x7ff000));
            first[i] = ref_float((noise() & 0x80000000u) |
                                 (uint32_t)(127 + (int)below((uint32_t)wide) - wide / 2) << 23 | (noise() & 0x7fffff));
            out[i] = 2 * second[i] * second[i];
        }
        kopt_state_init(&o, &t, 1, NULL);
        kopt_state_write(&o, &t, KOPT_SLOT_SECOND_MOMENT, out);
        for (i = 0; i < N; ++i) out[i] = 2 * first[i];
        kopt_state_write(&o, &t, KOPT_SLOT_FIRST_MOMENT, out);
        if (kopt_optimizer_step(&o, &t, 1) != KOPT_OK) worst = 1;
        for (i = 0; i < N; ++i) {
            const double want = -atan2((double)first[i], (double)second[i]);
            const double error = fabs((double)weight[i] - want) / fabs(want);
            if (!(error <= worst)) worst = error;
            signs += (ref_bits(weight[i]) ^ ref_bits(first[i])) >> 31 == 0;
        }
    }
    kopt_isa_force(KOPT_ISA_AUTO);
    ok(worst < 7.62939453125e-06 && worst > 1e-8 && !signs,
       "the atan2 of a step is within 2^-17 of libm's in binary64: %.3g, 2^%.2f", worst, log2(worst));
}

/* ---- Both published formulas in binary64 ------------------------------------------------------------------------ */

/* In [-1/2, 1/2). */
static float uniform(void) { return (float)(noise() >> 8) / 16777216.0f - 0.5f; }

/* 500 steps; the largest error relative to the way of the weights. */
static double follow(kopt_optimizer o, kopt_format f) {
    enum { M = 128 };
    static double w[M], m[M], v[M];
    static uint16_t half[M];
    kopt_tensor t =
        kopt_tensor_of(f == KOPT_F32 ? (void *)weight : half, f, gradient, KOPT_F32, M, state, sizeof state);
    double worst = 0, way = 0;
    int i, k;
    for (i = 0; i < M; ++i) w[i] = (double)(out[i] = 1 + (float)i / M), m[i] = v[i] = 0;
    if (kopt_state_init(&o, &t, 1, out) != KOPT_OK) return 1;
    for (k = 1; k <= 500; ++k) {
        const double c1 = 1 - pow(o.beta1, k), c2 = 1 - pow(o.beta2, k);
        for (i = 0; i < M; ++i) {
            const double g = (double)(gradient[i] = uniform() + 0.001f * (float)(i - M / 2) * (i % 3 ? 1e-6f : 1));
            double x;
            w[i] -= o.lr * o.weight_decay * w[i];
            if (o.rule == KOPT_RULE_LION) {
                x = tanh(o.sharpness * (o.beta1 * m[i] + (1 - o.beta1) * g));
                m[i] = o.beta2 * m[i] + (1 - o.beta2) * g;
            } else {
                m[i] = o.beta1 * m[i] + (1 - o.beta1) * g;
                v[i] = o.beta2 * v[i] + (1 - o.beta2) * g * g;
                x = o.atan2_outside ? o.atan2_a / c1 * atan2(m[i], o.atan2_b * sqrt(v[i]) / sqrt(c2))
                                    : o.atan2_a * atan2(m[i] / c1, o.atan2_b * sqrt(v[i] / c2));
            }
            w[i] -= o.lr * x;
        }
        if (kopt_optimizer_step(&o, &t, 1) != KOPT_OK) return 1;
    }
    if (kopt_state_read(&o, &t, KOPT_SLOT_WEIGHT, out) != KOPT_OK) return 1;
    for (i = 0; i < M; ++i) {
        way = fmax(way, fabs(w[i] - 1 - (double)i / M));
        worst = fmax(worst, isfinite((double)out[i]) ? fabs((double)out[i] - w[i]) : 1e9);
    }
    return worst / way;
}

static void check_formulas(int quick) {
    static const char *const name[] = {"Adam-atan2", "Adam-atan2, corrected outside", "smooth Lion"};
    int which, weights, rounding, moment;
    double error, other;
    for (which = 0; which < 3; ++which) {
        double worst32 = 0, worst16 = 0, worst8 = 0, plain = 0;
        for (weights = KOPT_F32; weights <= KOPT_FP16; ++weights)
            for (rounding = KOPT_NEAREST; rounding <= KOPT_EXACT; ++rounding)
                for (moment = KOPT_F32; moment <= KOPT_Q8; ++moment) {
                    kopt_optimizer o = which == 2 ? kopt_smooth_lion(1e-3, 10) : kopt_adam_atan2(1e-3);
                    o.atan2_outside = which == 1, o.atan2_b = which ? 1 : 0.7;
                    o.weight_decay = 0.1, o.seed = 5;
                    o.rounding = (kopt_rounding)rounding,
                    o.first_moment_format = o.second_moment_format = (kopt_format)moment;
                    if (weights == KOPT_F32 && rounding) continue;
                    if (quick && (weights == KOPT_FP16) != (moment == KOPT_FP16)) continue;
                    error = follow(o, (kopt_format)weights);
                    if (weights == KOPT_F32 && moment == KOPT_F32)
                        worst32 = error;
                    else if (weights != KOPT_F32 && rounding <= KOPT_STOCHASTIC)
                        plain = fmax(plain, error);
                    else if (moment == KOPT_Q8)
                        worst8 = fmax(worst8, error);
                    else
                        worst16 = fmax(worst16, error);
                }
        ok(worst32 < 2e-5, "%s in fp32 after 500 steps: %.2g of the way from the formula in binary64", name[which],
           worst32);
        ok(worst16 < 0.02 && plain > worst16,
           "... the worst with a residual, moments of 16 bits: %.2g; without a residual: %.2g", worst16, plain);
        /* A drawn E4M3 code has gaps of 1/8 to 1/15 of m, so a deviation of about m / sqrt(768); that of a step lasts
         * beta1 / (1 - beta1) = 9 steps. m / sqrt(v) is at most 0.31 here: sqrt(0.1 / 1.9) of noise, 0.22 of drift. So
         * after 500 steps a weight deviates by 1e-3 * 1.27 * 9 * 0.31 / sqrt(768) * sqrt(500) = 2.9e-3, of a way of 0.2
         * to 0.3: 0.014. The bound is 5 of these, for the worst of 128 weights in 14 combinations. Smooth Lion
         * multiplies by a sharpness of 10. */
        ok(worst8 < (which == 2 ? 0.2 : 0.07) && plain > worst8, "... and moments of 8 bits: %.2g", worst8);
    }
    {
        kopt_optimizer o = kopt_adam_atan2(1e-3), p = o;
        o.first_moment_format = o.second_moment_format = p.first_moment_format = p.second_moment_format = KOPT_F32;
        p.atan2_outside = 1;
        error = follow(o, KOPT_F32), p.atan2_outside = 0, other = follow(p, KOPT_F32);
        ok(error < 2e-5 && other < 2e-5, "defaults: a = 1.27, b = 1, beta 0.9, 0.99");
        ok(o.atan2_a > 1.269 && o.atan2_a < 1.271 && o.decay_mode == KOPT_DECAY_DECOUPLED, "... decay is decoupled");
    }
}

/* ---- What the rules promise ------------------------------------------------------------------------------------- */

/* The weights' words after 20 steps of gradients that are scaled by 2^power. */
static void run(kopt_optimizer o, int power, uint16_t *words, const float *start) {
    kopt_tensor t = kopt_tensor_of(words, KOPT_BF16, gradient, KOPT_F32, N, state, sizeof state);
    uint32_t seed = 7;
    int i, k;
    memset(words, 0, 2 * N);
    kopt_state_init(&o, &t, 1, start);
    for (k = 0; k < 20; ++k) {
        for (i = 0; i < N; ++i) {
            gradient[i] = ldexpf((float)(int)(lcg32(&seed) >> 8) - 8388608, power - 20);
            if (i % 5 == 0) gradient[i] = 0;
        }
        kopt_optimizer_step(&o, &t, 1);
    }
}

static void check_traits(void) {
    static uint16_t a[N], b[N];
    static const int powers[] = {-30, -7, 1, 13, 40};
    int rounding, p, i, bad = 0, moved = 0, isa;
    for (i = 0; i < N; ++i) first[i] = 0.01f * (float)(i % 100 - 50);
    FOR_EACH_ISA(isa)
    for (rounding = KOPT_NEAREST; rounding <= KOPT_EXACT; ++rounding) {
        kopt_optimizer o = kopt_adam_atan2(1e-2);
        o.rounding = (kopt_rounding)rounding;
        run(o, 0, a, first);
        for (p = 0; p < 5; ++p) run(o, powers[p], b, first), bad += memcmp(a, b, sizeof a) != 0;
        for (i = 0; i < N; ++i) moved += a[i] != ref_narrow(KOPT_BF16, ref_bits(first[i]));
    }
    ok(!bad && moved > 1000, "gradients times 2^-30 to 2^40: the same weights, bit for bit");

    { /* no gradient since the beginning: nothing moves but by decay, and decay is that of AdamW */
        kopt_optimizer o = kopt_adam_atan2(1e-2), w = kopt_adamw(1e-2);
        kopt_tensor t = kopt_tensor_of(a, KOPT_BF16, gradient, KOPT_F32, N, state, sizeof state);
        o.rounding = w.rounding = KOPT_EXACT;
        memset(gradient, 0, sizeof gradient);
        kopt_state_init(&o, &t, 1, first);
        memcpy(b, a, sizeof a);
        for (i = 0; i < 50; ++i) kopt_optimizer_step(&o, &t, 1);
        ok(memcmp(a, b, sizeof a) == 0, "a zero state and no gradient: atan2(0, 0) = 0, nothing moves");
        o.weight_decay = w.weight_decay = 0.1;
        kopt_state_init(&o, &t, 1, first);
        for (i = 0; i < 50; ++i) kopt_optimizer_step(&o, &t, 1);
        t.weight = b;
        kopt_state_init(&w, &t, 1, first);
        for (i = 0; i < 50; ++i) kopt_optimizer_step(&w, &t, 1);
        ok(memcmp(a, b, sizeof a) == 0 && a[1] != ref_narrow(KOPT_BF16, ref_bits(first[1])), "... but by decay");
    }
    { /* a second moment that has underflowed: a quarter turn, where Adam would divide by eps */
        kopt_optimizer o = kopt_adam_atan2(1e-2);
        kopt_tensor t = kopt_tensor_of(weight, KOPT_F32, gradient, KOPT_F32, 4, state, sizeof state);
        const float tiny[4] = {1e-25f, -1e-25f, 0, 1e-28f};
        o.first_moment_format = o.second_moment_format = KOPT_F32, o.atan2_a = 1;
        memset(weight, 0, sizeof weight), memcpy(gradient, tiny, sizeof tiny);
        kopt_state_init(&o, &t, 1, NULL);
        kopt_optimizer_step(&o, &t, 1);
        ok(fabsf(weight[0] + 0.015707963f) < 1e-8f && ref_bits(weight[1]) == (ref_bits(weight[0]) ^ 0x80000000u) &&
               ref_bits(weight[2]) == 0 && ref_bits(weight[3]) == ref_bits(weight[0]),
           "a root that underflows to 0: -+pi/2 times the rate");
    }
    { /* the limit of smooth Lion is Lion; a small sharpness is linear */
        kopt_optimizer smooth = kopt_smooth_lion(1e-3, 1e20), lion = kopt_lion(1e-3);
        run(smooth, -20, a, first), run(lion, -20, b, first);
        ok(memcmp(a, b, sizeof a) == 0, "smooth Lion, sharpness 1e20: the bits of Lion");
        smooth.sharpness = 1e6, run(smooth, -20, a, first);
        ok(memcmp(a, b, sizeof a) != 0, "... sharpness 1e6: other bits");
        smooth.sharpness = 0, run(smooth, -20, a, first);
        ok(memcmp(a, b, sizeof a) == 0, "... sharpness 0: Lion");
    }
}

static void check_options(void) {
    static unsigned char image[176 + 64 + 4 * 208 + 4];
    static uint16_t a[N];
    kopt_tensor t = kopt_tensor_of(a, KOPT_BF16, gradient, KOPT_F32, 100, state, sizeof state);
    kopt_optimizer o = kopt_adam_atan2(1e-3), p = o;
    kopt_step step;
    int bad = 0;
#define REFUSES(result, change) (o = kopt_adam_atan2(1e-3), change, bad += kopt_step_begin(&step, &o) != result)
    REFUSES(KOPT_OK, (void)0);
    REFUSES(KOPT_OK, o.eps = 0); /* not read */
    REFUSES(KOPT_OK, o.atan2_a = 0);
    REFUSES(KOPT_ERROR_RANGE, o.atan2_a = -1);
    REFUSES(KOPT_ERROR_RANGE, o.atan2_a = HUGE_VAL);
    REFUSES(KOPT_ERROR_RANGE, o.atan2_b = 0);
    REFUSES(KOPT_ERROR_RANGE, o.atan2_b = (double)NAN);
    REFUSES(KOPT_ERROR_RANGE, (o.atan2_b = 3e38, o.atan2_outside = 1));
    REFUSES(KOPT_ERROR_RANGE, o.beta2 = 1);
    REFUSES(KOPT_ERROR_OPTION, o.amsgrad = 1);
    REFUSES(KOPT_ERROR_OPTION, o.stable = 1);
    REFUSES(KOPT_ERROR_OPTION, o.rule = (kopt_rule)8);
    REFUSES(KOPT_ERROR_OPTION, o.rule = KOPT_RULE_SMOOTH_LION); /* a constructor, not a rule */
    REFUSES(KOPT_ERROR_RANGE, (o = kopt_smooth_lion(1e-3, -1)));
    REFUSES(KOPT_ERROR_RANGE, (o = kopt_smooth_lion(1e-3, (double)NAN)));
#undef REFUSES
    ok(!bad, "options out of range are refused: %d are not as they should", bad);

    o = kopt_adam_atan2(1e-3), p = kopt_smooth_lion(1e-3, 50);
    ok(o.atan2_a == 1.27 && o.atan2_b == 1 && !o.atan2_outside && o.beta1 == 0.9 && o.beta2 == 0.99 && o.lr == 1e-3 &&
           o.weight_decay == 0 && o.decay_mode == KOPT_DECAY_DECOUPLED && o.sharpness == 0,
       "all fields of it");
    ok(p.rule == KOPT_RULE_LION && p.sharpness == 50 && p.beta1 == 0.9 && p.beta2 == 0.99 && p.weight_decay == 0 &&
           p.decay_mode == KOPT_DECAY_DECOUPLED,
       "... and of smooth Lion");
    kopt_state_init(&o, &t, 1, NULL);
    ok(state[5] == 7 && (state[9] & 7) == 2 && kopt_state_size(&o, &t) == 64 + 3 * 208,
       "the state block: rule 7, two moments");
    p = kopt_adamw(1e-3);
    ok(kopt_optimizer_step(&p, &t, 1) == KOPT_ERROR_MISMATCH, "... which AdamW refuses");
    ok(kopt_save(&o, &t, 1, image, sizeof image) == KOPT_OK && kopt_load(&o, &t, 1, image, sizeof image) == KOPT_OK,
       "... and which is saved and loaded");
}

/* Stall counts: each weight that has a gradient wants to move, and each instruction set counts the same. */
static void check_counts(void) {
    static uint16_t a[N];
    kopt_counts counts, first_counts = {0, 0, 0};
    kopt_optimizer o = kopt_adam_atan2(1e-4);
    kopt_tensor t = kopt_tensor_of(a, KOPT_BF16, gradient, KOPT_F32, N, state, sizeof state);
    int isa, i, bad = 0;
    t.counts = &counts, o.rounding = KOPT_STOCHASTIC;
    FOR_EACH_ISA(isa) {
        memset(&counts, 0, sizeof counts);
        o.step = 0;
        kopt_state_init(&o, &t, 1, first);
        for (i = 0; i < N; ++i) gradient[i] = i % 4 ? 0.01f * (float)(i % 7 - 3) : 0;
        kopt_optimizer_step(&o, &t, 1);
        if (isa == KOPT_ISA_SCALAR) first_counts = counts;
        bad += memcmp(&counts, &first_counts, sizeof counts) != 0;
        for (i = 0; i < N; ++i) counts.wanted -= gradient[i] > 0 || gradient[i] < 0;
        bad += counts.wanted != 0;
    }
    ok(!bad && first_counts.still > 10, "stall counts: %d wrong", bad);
}

int main(int count, char **arguments) {
    int quick = count > 1 && !strcmp(arguments[1], "quick");
    fesetenv(FE_DFL_ENV);
    check_angle(quick);
    check_formulas(quick);
    check_traits();
    check_options();
    check_counts();
    check_combinations(quick ? 37 : 3);
    check_lengths(1);
    check_lone_specials(quick);
    check_sharp(quick);
    check_last_interval();
    if (!quick) check_alignment();
    check_shards();
    check_no_decay(quick);
    check_lists();
    return done();
}
