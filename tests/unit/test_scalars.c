/* test_scalars.c - the scalars of a step, from kopt_step_begin(), beside those of the reference, which rounds once from
   binary64: over many steps, and for any hyper-parameters; bias corrections beside libm's; the factor of roots beside
   8-bit moments. It looks into kopt_step, so it has an implementation of its own. argv[1] = quick. */
#define KAHAN_OPT_STATIC
#define KAHAN_OPT_IMPLEMENTATION
#include "../../kahan_opt.h"

#include "tap.h"
#include "../bits/begun.h"
#include "reference.h"
#include "inputs.h"

#include <fenv.h>

static uint64_t random_state = 1;
static uint64_t any64(void) { return splitmix64(&random_state); }

static uint64_t with_exponent(uint64_t u, uint64_t e) { return (u & 0x800fffffffffffffu) | (e & 2047) << 52; }

static int same(float a, float b) { return ref_bits(a) == ref_bits(b); }

/* The scalars of the next step. 0 if it is refused. */
static int begin(kopt_begun_ *s, kopt_optimizer *o) {
    kopt_step step;
    if (kopt_step_begin(&step, o) != KOPT_OK) return 0;
    memcpy(s, &step, sizeof *s);
    return 1;
}

/* kopt_step_begin() against the reference. */
static int scalars_differ(kopt_optimizer *o, uint32_t step) {
    kopt_begun_ s;
    kopt_optimizer undecayed = *o;
    ref_scalars r;
    o->step = step - 1;
    r = ref_scalars_of(o, step);
    undecayed.weight_decay = 0;
    if (!begin(&s, o) || s.step != step) return 1;
    if (!same(s.undecayed_rate, ref_scalars_of(&undecayed, step).rate)) return 1;
    if (!same(s.grad_scale, r.grad_scale) || !same(s.l2, r.l2) || !same(s.weight_decay, r.decay) ||
        !same(s.rate, r.rate))
        return 1;
    if (o->rule == KOPT_RULE_EMA) return 0;
    if (!same(s.beta1, r.beta1) || !same(s.gain1, r.one_minus_beta1)) return 1;
    if (o->rule == KOPT_RULE_SGD) return !same(s.extrapolation, r.momentum);
    if (o->rule != KOPT_RULE_LION && !same(s.eps, r.eps)) return 1;
    if (o->rule == KOPT_RULE_ADAN)
        return !(same(s.beta3, r.beta3) && same(s.gain3, r.one_minus_beta3) && same(s.beta2, r.beta2) &&
                 same(s.gain2, r.one_minus_beta2) && same(s.extrapolation, r.beta2) &&
                 same(s.third_scale, r.third_scale) && same(s.root_scale, r.root_scale));
    if (!same(s.beta2, r.beta2) || !same(s.gain2, r.one_minus_beta2)) return 1;
    if (o->rule == KOPT_RULE_RADAM || o->rule == KOPT_RULE_RANGER) {
        if (s.unrectified != !r.rectified) return 1;
        if (o->rule == KOPT_RULE_RANGER && (!same(s.slow_scale, r.back) || s.sync != r.lookahead)) return 1;
        if (s.unrectified) return 0;
    }
    return o->rule != KOPT_RULE_LION && !same(s.root_scale, r.root_scale);
}

static void test_scalars(long count) {
    static const double betas[] = {0,     -0.0,   0.5,      0.9,  0.95,      0.98,      0.99,
                                   0.999, 0.9999, 0.999999, 1e-3, 1 - 1e-12, 1 - 1e-15, 0x1p-25};
    const size_t many = sizeof betas / sizeof *betas;
    long k, bad = 0, t;
    size_t i;
    for (i = 0; i < many; ++i) /* the first steps, and steps up to the last one */
        for (t = 1; t <= count / 40; ++t) {
            kopt_optimizer o = kopt_adamw(1e-3);
            o.beta1 = betas[i], o.beta2 = betas[(i + (size_t)t) % many];
            bad += scalars_differ(&o, (uint32_t)t);
            bad += scalars_differ(&o, (uint32_t)any64() >> any64() % 32 | 1);
        }
    ok(!bad, "AdamW with usual betas: the scalars of %ld steps differ", bad);
    for (bad = 0, t = 1; t <= count; ++t) { /* with beta2 at its usual values RAdam's average grows beyond 5 steps */
        kopt_optimizer o = t % 2 ? kopt_radam(1e-3) : kopt_ranger(1e-3);
        o.beta2 = betas[5 + t % 5];
        bad += scalars_differ(&o, (uint32_t)(t < count / 2 ? t : t * t));
    }
    ok(!bad, "RAdam and Ranger with usual betas: the scalars of %ld steps differ", bad);
    for (bad = 0, k = 0; k < count; ++k) {
        kopt_optimizer o = kopt_adam(1);
        o.rule = (kopt_rule)(k % 7);
        o.lr = double_of(with_exponent(any64() >> 1, 900 + any64() % 220));
        o.weight_decay =
            k % 5 && o.rule != KOPT_RULE_EMA ? double_of(with_exponent(any64() >> 1, 900 + any64() % 130)) : 0;
        o.max_lr = double_of(with_exponent(any64() >> 1, 1000 + any64() % 30));
        o.beta1 = double_of(with_exponent(any64() >> 1, 1022 - any64() % 20));
        o.beta2 = double_of(with_exponent(any64() >> 1, 1022 - any64() % 3));
        o.momentum = double_of(with_exponent(any64() >> 1, 1022 - any64() % 150));
        o.dampening = double_of(with_exponent(any64(), 1022 - any64() % 10));
        o.grad_scale = double_of(with_exponent(any64(), 1000 + any64() % 50));
        o.clip = double_of(with_exponent(any64() >> 1, 870 + any64() % 153));
        o.eps = double_of(with_exponent(any64() >> 1, 900 + any64() % 200));
        o.beta3 = double_of(with_exponent(any64() >> 1, 1022 - any64() % 20));
        o.lookahead = 1 + (int)(any64() % 10);
        o.lookahead_rate = double_of(with_exponent(any64() >> 1, 1022 - any64() % 5));
        o.decay_mode = (kopt_decay_mode)(k % 3);
        o.maximize = o.rule != KOPT_RULE_EMA && k & 8;
        bad += scalars_differ(&o, (uint32_t)any64() >> any64() % 32 | 1);
    }
    ok(!bad, "any hyper-parameters: the scalars of %ld of %ld steps differ", bad, count);
}

/* gain = 1 - beta. 1 - 2^-k has the gain 2^-k. 1 - (a + b) has a float a as its gain where b is less than half of a's
   last digit; from half of it on the next one, and half-way the one whose digits are even. */
static void test_gain(long count) {
    static const double few[][2] = {{0x1p-25, 1}, /* beyond 64 digits, at and beside a half of the last one: 1 - beta */
                                    {0x1.0000000000001p-25, 0x1.fffffep-1},
                                    {0x1.8p-24, 0x1.fffffcp-1},
                                    {0x1.7ffffffffffffp-24, 0x1.fffffep-1},
                                    {0x1p-1074, 1},
                                    {-0.0, 1}};
    long bad = 0, k;
    for (k = 0; k < 6; ++k) {
        kopt_optimizer o = kopt_adamw(1e-3);
        kopt_begun_ s;
        o.beta1 = few[k][0];
        bad += !begin(&s, &o) || (double)s.gain1 != few[k][1];
    }
    for (k = 1; k <= 53; ++k) {
        kopt_optimizer o = kopt_adamw(1e-3);
        kopt_begun_ s;
        o.beta1 = o.beta2 = 1 - ldexp(1, (int)-k);
        bad += !begin(&s, &o) || (double)s.gain1 != ldexp(1, (int)-k) || !same(s.gain1, s.gain2);
    }
    for (k = 0; k < count; ++k) {
        kopt_optimizer o = kopt_adamw(1e-3);
        kopt_begun_ s;
        const uint32_t digits = 0x800000u | (uint32_t)(any64() >> 41);
        const uint64_t parts = (uint64_t)1 << 27, part = k % 3 ? any64() % parts : parts / 2; /* of the last digit */
        const int scale = (int)(any64() % 2); /* the gain is in [1/2, 1) or [1/4, 1/2): 1 - gain is exact */
        const uint32_t up = part > parts / 2 || (part == parts / 2 && digits % 2);
        o.beta2 = 1 - ldexp((double)(digits * parts + part), -51 - scale);
        bad += !begin(&s, &o) || (double)s.gain2 != ldexp((double)(digits + up), -24 - scale);
    }
    ok(!bad, "1 - beta: %ld gains are not the nearest floats", bad);
}

/* 1 - beta^t, of which the rate and the scale of the root are made, against libm. */
static void test_corrections(int quick) {
    static const double betas[] = {0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999, 0.9995, 0.9999, 0.99999, 0.999999};
    double worst = 0;
    uint32_t t;
    size_t i;
    for (i = 0; i < sizeof betas / sizeof *betas; ++i)
        for (t = 1; t < 4000000; t += t < (quick ? 3000u : 100000u) ? 1 : 997) {
            kopt_optimizer o = kopt_adamw(1);
            double c = -expm1(t * log(betas[i])), rate, root;
            kopt_begun_ s;
            o.beta1 = o.beta2 = betas[i], o.step = t - 1;
            if (!begin(&s, &o)) worst = 1;
            rate = fabs((double)s.rate * c - 1), root = fabs((double)s.root_scale * sqrt(c) - 1);
            if (!(rate <= worst)) worst = rate;
            if (!(root <= worst)) worst = root;
        }
    ok(worst < 4e-7, "bias corrections, 12 betas, up to step 4000000: off by at most %.2g", worst);
    for (i = 0; i < 2; ++i) { /* the worst that a search over beta, step and lr has found: of the rate, of the root */
        static const double beta[] = {0.9999997480218621, 0.999999998037478};
        static const uint32_t step[] = {534275, 153400963};
        kopt_optimizer o = kopt_adamw(0.001986909768501119);
        double c = -expm1(step[i] * log(beta[i])), off;
        kopt_begun_ s;
        o.beta1 = o.beta2 = beta[i], o.step = step[i] - 1;
        if (!begin(&s, &o)) worst = 1;
        off = i == 0 ? fabs((double)s.rate / o.lr * c - 1) : fabs((double)s.root_scale * sqrt(c) - 1);
        if (!(off <= worst)) worst = off;
    }
    ok(worst > 6e-7 && worst < 7e-7, "bias corrections, other betas: off by at most %.2g", worst);
}

/* Beside 8-bit moments. */
static void test_factor(void) {
    const kopt_optimizer made[] = {kopt_adam(1e-3),  kopt_adamw(1e-3),  kopt_stable_adamw(1e-3), kopt_adan(1e-3),
                                   kopt_radam(1e-3), kopt_ranger(1e-3), kopt_lion(1e-3),         kopt_sgd(1e-3, 0.9)};
    const float factor = 1.003f; /* as a float, where constants are wider */
    int rule, step, bad = 0;
    for (rule = 0; rule < 8; ++rule)
        for (step = 0; step < 12; ++step) {
            kopt_optimizer o = made[rule];
            kopt_begun_ plain, coded;
            uint32_t want;
            o.amsgrad = rule == 1, o.step = (uint32_t)step;
            bad += !begin(&plain, &o);
            o.step = (uint32_t)step, o.first_moment_format = o.second_moment_format = KOPT_Q8;
            bad += !begin(&coded, &o);
            want = ref_bits(plain.root_scale);
            if (rule < 6 && step > 0) want = ref_bits((float)((double)plain.root_scale * (double)factor));
            bad += rule < 6 && ref_bits(coded.root_scale) != want;
            bad += ref_bits(coded.rate) != ref_bits(plain.rate) || ref_bits(coded.eps) != ref_bits(plain.eps);
        }
    ok(!bad, "from the second step on roots are multiplied by 1.003: %d wrong", bad);
}

#define SAME(field) (offsetof(step_scalars, field) == offsetof(kopt_begun_, field))
static void check_begun(void) {
    ok(sizeof(step_scalars) == sizeof(kopt_begun_) && SAME(made) && SAME(rule) && SAME(first_moment_format) &&
           SAME(second_moment_format) && SAME(rounding) && SAME(moment_rounding) && SAME(residual_rounding) &&
           SAME(nesterov) && SAME(zero_grad) && SAME(moment_count) && SAME(moments_only) && SAME(unrectified) &&
           SAME(sync) && SAME(stable) && SAME(grad_scale) && SAME(l2) && SAME(weight_decay) && SAME(beta1) &&
           SAME(gain1) && SAME(beta2) && SAME(gain2) && SAME(beta3) && SAME(gain3) && SAME(extrapolation) &&
           SAME(third_scale) && SAME(rate) && SAME(undecayed_rate) && SAME(root_scale) && SAME(eps) && SAME(step) &&
           SAME(seed) && SAME(sharpness) && SAME(slow_scale),
       "begun.h has the fields of kopt_begun_");
    ok(offsetof(kopt_begun_, rule) == 8 && offsetof(kopt_begun_, seed) % 8 == 0 &&
           offsetof(kopt_begun_, seed) == offsetof(kopt_begun_, feedback) + 4 &&
           sizeof(kopt_begun_) == offsetof(kopt_begun_, slow_scale) + 4,
       "... which are without padding: the same places with any flag and on any machine");
}

int main(int argc, char **argv) {
    const int quick = argc > 1 && strcmp(argv[1], "quick") == 0;
    fesetenv(FE_DFL_ENV); /* -Ofast starts with subnormals flushed, and the reference computes here */
    test_scalars(quick ? 2000 : 20000);
    test_gain(quick ? 20000 : 200000);
    test_corrections(quick);
    test_factor();
    check_begun();
    return done();
}
