/* The integer code that stands in for doubles on machines without them gives the bits of the machine's own doubles:
   every operation on random and on awkward operands, and all per-step scalars over many steps. argv[1] = quick. */
#define KOPT_SOFT64_ 1 /* as if this machine had none */
#define KAHAN_OPT_STATIC
#define KAHAN_OPT_IMPLEMENTATION
#include "../kahan_opt.h"

#include "tap.h"
#include "reference.h"
#include "inputs.h"

static uint64_t random_state = 1;
static uint64_t any64(void) { return splitmix64(&random_state); }

static uint64_t with_exponent(uint64_t u, uint64_t e) { return (u & 0x800fffffffffffffu) | (e & 2047) << 52; }

/* The k-th kind of operands: any bits; exponents close together; short significands, for ties; subnormals; zeros. */
static void operands(long k, uint64_t *a, uint64_t *b) {
    *a = any64(), *b = any64();
    if (k % 8 < 4) *b = with_exponent(*b, (*a >> 52) + any64() % 120 - 60);
    if (k % 8 == 4) *a &= ~(uint64_t)0 << any64() % 53, *b &= ~(uint64_t)0 << any64() % 53;
    if (k % 8 == 4 || k % 8 == 5) *b = with_exponent(*b, (*a >> 52) + any64() % 8 - 4);
    if (k % 8 == 6) *a &= 0x803fffffffffffffu;
    if (k % 32 == 7) *a &= (uint64_t)1 << 63;
    if (k % 64 == 7) *b &= (uint64_t)1 << 63;
    if (k % 128 == 15) *b = *a ^ (uint64_t)1 << 63;
}

static int finite64(uint64_t u) { return (u >> 52 & 2047) != 2047; }

static void test_operations(long count) {
    long k, bad[6] = {0, 0, 0, 0, 0, 0}, done_of[6] = {0, 0, 0, 0, 0, 0};
    static const char *const name[6] = {"product", "quotient", "sum", "difference", "order", "float"};
    kopt_environment_ environment;
    int i;
    kopt_enter_(&environment); /* -Ofast may have set FTZ for the doubles */
    for (k = 0; k < count; ++k) {
        uint64_t a, b;
        volatile double x, y, r[4];
        volatile float f;
        operands(k, &a, &b);
        if (!finite64(a) || !finite64(b)) continue;
        x = double_of(a), y = double_of(b);
        r[0] = x * y, r[2] = x + y, r[3] = x - y;
        bad[0] += bits_of(r[0]) != kopt_mul64_(a, b);
        bad[2] += bits_of(r[2]) != kopt_add64_(a, b);
        bad[3] += bits_of(r[3]) != kopt_sub64_(a, b);
        bad[4] += (y > x) != kopt_less64_(a, b);
        ++done_of[0], ++done_of[2], ++done_of[3], ++done_of[4];
        if (b << 1) r[1] = x / y, bad[1] += bits_of(r[1]) != kopt_div64_(a, b), ++done_of[1];
        a = with_exponent(a, 860 + any64() % 290); /* from below the smallest fp32 to its largest */
        if (k % 4 == 1) a &= ~(uint64_t)0 << (28 + any64() % 3);
        x = double_of(a), f = (float)x;
        if (x < 3e38 && x > -3e38) bad[5] += ref_bits(f) != ref_bits(kopt_to_float_(a)), ++done_of[5];
    }
    kopt_leave_(&environment);
    for (i = 0; i < 6; ++i) ok(!bad[i] && done_of[i] > count / 2, "%s: %ld of %ld differ", name[i], bad[i], done_of[i]);
}

static void test_infinity(void) {
    const uint64_t infinity = (uint64_t)2047 << 52, one = (uint64_t)1023 << 52, most = infinity - 1;
    ok(kopt_mul64_(most, most) == infinity && kopt_div64_(most, double_of(1) > 0 ? 1 : 0) == infinity &&
           kopt_add64_(most, most) == infinity && kopt_div64_(one, 0) == infinity,
       "overflow and division by zero give infinity");
    ok(kopt_mul64_(infinity, 0) == infinity && kopt_sub64_(infinity, infinity) == infinity &&
           kopt_div64_(infinity, infinity) == infinity,
       "infinity stays, so that a range check sees it");
    { /* fp32 from 2^128 - 2^103 on */
        const uint64_t top = (uint64_t)1 << 63, from = ((uint64_t)0x47efffff << 32) + 0xf0000000;
        const uint64_t beyond[] = {from, from + 1, (uint64_t)1151 << 52, (uint64_t)1223 << 52, most, infinity};
        int k, bad = ref_bits(kopt_to_float_(from - 1)) != 0x7f7fffff;
        bad += ref_bits(kopt_to_float_(from - 1 + top)) != 0xff7fffff;
        for (k = 0; k < 6; ++k) {
            bad += ref_bits(kopt_to_float_(beyond[k])) != 0x7f800000;
            bad += ref_bits(kopt_to_float_(beyond[k] + top)) != 0xff800000;
        }
        ok(!bad, "what is beyond the largest fp32 is infinite, with its sign");
    }
}

static int same(float a, float b) { return ref_bits(a) == ref_bits(b); }

/* kopt_step_begin() against the reference, which computes with doubles. */
static int scalars_differ(kopt_optimizer *o, uint32_t step) {
    kopt_step s;
    ref_scalars r;
    o->step = step - 1;
    r = ref_scalars_of(o, step);
    if (kopt_step_begin(o, &s) != KOPT_OK) return 1;
    if (!same(s.grad_scale, r.grad_scale) || !same(s.l2, r.l2) || !same(s.weight_decay, r.decay) ||
        !same(s.rate, r.rate))
        return 1;
    if (o->rule == KOPT_EMA) return 0;
    if (!same(s.beta1, r.beta1) || !same(s.gain1, r.one_minus_beta1)) return 1;
    if (o->rule == KOPT_SGD) return !same(s.extrapolation, r.momentum);
    if (o->rule != KOPT_LION && !same(s.eps, r.eps)) return 1;
    if (o->rule == KOPT_ADAN)
        return !(same(s.beta3, r.beta3) && same(s.gain3, r.one_minus_beta3) && same(s.beta2, r.beta2) &&
                 same(s.gain2, r.one_minus_beta2) && same(s.extrapolation, r.beta2) &&
                 same(s.third_scale, r.third_scale) && same(s.root_scale, r.root_scale));
    if (!same(s.beta2, r.beta2) || !same(s.gain2, r.one_minus_beta2)) return 1;
    if (o->rule == KOPT_RADAM || o->rule == KOPT_RANGER) {
        if (s.unrectified != !r.rectified) return 1;
        if (o->rule == KOPT_RANGER && (!same(s.slow_scale, r.back) || s.sync != r.lookahead)) return 1;
        if (s.unrectified) return 0;
    }
    return o->rule != KOPT_LION && !same(s.root_scale, r.root_scale);
}

static void test_scalars(long count) {
    static const double betas[] = {0, -0.0, 0.5, 0.9, 0.95, 0.98, 0.99, 0.999, 0.9999, 0.999999, 1e-3, 1 - 1e-12};
    const size_t many = sizeof betas / sizeof *betas;
    long k, bad = 0, t;
    size_t i;
    kopt_environment_ environment;
    kopt_enter_(&environment);
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
        o.lr = double_of(with_exponent(any64() >> 1, 900 + any64() % (o.rule == KOPT_EMA ? 123 : 220)));
        o.weight_decay = k % 5 && o.rule != KOPT_EMA ? double_of(with_exponent(any64() >> 1, 900 + any64() % 130)) : 0;
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
        o.maximize = o.rule != KOPT_EMA && k & 8;
        bad += scalars_differ(&o, (uint32_t)any64() >> any64() % 32 | 1);
    }
    ok(!bad, "any hyper-parameters: the scalars of %ld of %ld steps differ", bad, count);
    kopt_leave_(&environment);
}

int main(int argc, char **argv) {
    const int quick = argc > 1 && strcmp(argv[1], "quick") == 0;
    test_operations(quick ? 100000 : 3000000);
    test_infinity();
    test_scalars(quick ? 2000 : 20000);
    return done();
}
