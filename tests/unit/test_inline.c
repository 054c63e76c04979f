/* test_inline.c - the inline steps leave the weights, compensations and moments that kopt_optimizer_step() leaves: for
   any n, id, seed and step, for options from the smallest to the largest, and for gradients and weights that are zero,
   subnormal, huge, infinite or NaN. It compiles as C++98, too: build.sh takes it with all flags that spoil floats.
   Argument "quick": a part of it. */
#define KAHAN_OPT_IMPLEMENTATION
#include "../../kahan_opt.h"

#include "tap.h"

#ifndef __wasm__
#include <fenv.h>
#endif
#include <stdlib.h>
#include <string.h>

enum { N = 5000 };

static kopt_bf16 weight[N], grad[N], state[3 * N];        /* of the inline step  */
static kopt_bf16 library_weight[N], library_state[3 * N]; /* of the library      */
static unsigned char block[KOPT_STATE_BYTES(N, 6)];       /* its own state block */
static float moment[N];

static uint32_t generator;
static uint32_t draw(void) {
    generator = generator * 1664525u + 1013904223u;
    return generator >> 8;
}

/* ---- Values ------------------------------------------------------------------------------------------------------ */

enum { ORDINARY, SMALL, ANY, SPECIAL, ZERO, KINDS };
static const char *const kind_name[KINDS] = {"ordinary numbers", "tiny and subnormal", "any bits", "special", "zeros"};

static kopt_bf16 number(int kind) {
    static const uint16_t special[] = {0x0000, 0x0001, 0x007F, 0x0080, 0x0081, 0x00FF, 0x1F80, 0x2000,
                                       0x3F80, 0x5F80, 0x7E80, 0x7F00, 0x7F7E, 0x7F7F, 0x7F80, 0x7FC0};
    const uint32_t bits = draw();
    switch (kind) {
    case ORDINARY: return (kopt_bf16)(0x3A00u + (bits & 0x83FFu)); /* 2^-11 to 2^-4 in magnitude */
    case SMALL: return (kopt_bf16)(bits & 0x81FFu);
    case ANY: return (kopt_bf16)(bits & 0xFFFFu);
    case SPECIAL: return (kopt_bf16)(special[bits & 15u] | (bits & 0x8000u));
    default: return (kopt_bf16)(bits & 0x8000u);
    }
}

/* ---- One training by both ---------------------------------------------------------------------------------------- */

static void read_library(const kopt_optimizer *opt, const kopt_tensor *t, size_t n, int moments) {
    int k;
    size_t i;
    memcpy(library_state, block + 64, n * sizeof *library_state); /* the compensations follow the header */
    for (k = 1; k <= moments; ++k) {
        if (kopt_state_read(opt, t, (kopt_slot)k, moment) != KOPT_OK) memset(moment, 0x55, sizeof moment);
        for (i = 0; i < n; ++i) {
            uint32_t word;
            memcpy(&word, &moment[i], sizeof word);
            library_state[(size_t)k * n + i] = (kopt_bf16)(word >> 16);
        }
    }
}

/* The same steps by kopt_optimizer_step() and by an inline step: how many 16-bit words differ in the end. */
static long differences(kopt_inline_optimizer o, kopt_optimizer opt, size_t n, int steps, int weights, int gradients) {
    const int moments = opt.rule == KOPT_RULE_ADAM ? 2 : 0;
    long bad = 0;
    size_t i;
    int step;
    kopt_tensor t = KOPT_TENSOR(KOPT_BF16, library_weight, grad, n, block, sizeof block);
    opt.weight_decay = (double)o.weight_decay;
    opt.eps = (double)o.eps;
    opt.seed = o.seed;
    opt.step = o.step;
    t.id = o.id;
    for (i = 0; i < n; ++i) weight[i] = library_weight[i] = number(weights);
    memset(state, 0, sizeof state);
    if (kopt_state_init(&opt, &t, 1, NULL) != KOPT_OK) return -1;
    for (step = 0; step < steps; ++step) {
        for (i = 0; i < n; ++i) grad[i] = number(step % 3 == 2 ? ORDINARY : gradients);
        if (kopt_optimizer_step(&opt, &t, 1) != KOPT_OK) return -2;
        if (moments)
            kopt_inline_adamw(&o, weight, state, grad, n);
        else
            kopt_inline_sgd(&o, weight, state, grad, n);
    }
    read_library(&opt, &t, n, moments);
    for (i = 0; i < n; ++i) bad += weight[i] != library_weight[i];
    for (i = 0; i < (size_t)(1 + moments) * n; ++i) bad += state[i] != library_state[i];
    for (; i < 3 * (size_t)N; ++i) bad += state[i] != 0; /* nothing behind the state is touched */
    return bad + (o.step != opt.step);
}

static kopt_optimizer library_of(int adam, kopt_inline_optimizer o) {
    kopt_optimizer opt = adam ? kopt_adamw((double)o.lr) : kopt_sgd((double)o.lr, 0);
    opt.beta1 = 1 - (double)o.gain1;
    opt.beta2 = 1 - (double)o.gain2;
    return opt;
}

static const char *const name[2] = {"SGD", "AdamW"};

static void test_sizes(int adam, int quick) {
    static const int sizes[] = {0, 1, 2, 7, 8, 9, 127, 128, 129, 255, 257, 1000, 2047, 2048, 2049, 4097, 5000};
    int i;
    for (i = 0; i < (int)(sizeof sizes / sizeof *sizes); ++i) {
        kopt_inline_optimizer o = kopt_inline_optimizer_of(3e-3f, 0.01f, (uint32_t)i);
        const long bad = differences(o, library_of(adam, o), (size_t)sizes[i], quick ? 10 : 300, ORDINARY, ORDINARY);
        ok(bad == 0, "%s, %d weights: %ld words differ", name[adam], sizes[i], bad);
    }
}

static void test_values(int adam, int quick) {
    int weights, gradients, decays;
    for (weights = 0; weights < KINDS; ++weights)
        for (gradients = 0; gradients < KINDS; ++gradients) {
            long bad = 0;
            for (decays = 0; decays < 2;
                 ++decays) { /* without decay, a weight that is infinite is not multiplied by 0 */
                kopt_inline_optimizer o = kopt_inline_optimizer_of(0.02f, decays ? 0.05f : 0, 3);
                bad += differences(o, library_of(adam, o), 2500, quick ? 8 : 100, weights, gradients);
            }
            ok(bad == 0, "%s, weights: %s, gradients: %s: %ld words differ", name[adam], kind_name[weights],
               kind_name[gradients], bad);
        }
}

/* 2^32 steps of a microcontroller: the counter goes back to 2^31, and the weights go on as from there. */
static void test_wrap(int adam) {
    kopt_inline_optimizer o = kopt_inline_optimizer_of(3e-3f, 0.01f, 1), earlier = o;
    static kopt_bf16 last[N];
    size_t i;
    int k;
    long bad = 0;
    o.step = 0xFFFFFFFFu, earlier.step = 0x7FFFFFFFu;
    for (k = 0; k < 2; ++k) {
        kopt_inline_optimizer *const run = k == 0 ? &earlier : &o;
        memset(state, 0, sizeof state);
        for (i = 0; i < N; ++i) weight[i] = 0x3F80, grad[i] = (kopt_bf16)(0x3C00 + i % 64);
        if (adam)
            kopt_inline_adamw(run, weight, state, grad, N);
        else
            kopt_inline_sgd(run, weight, state, grad, N);
        bad += run->step != 0x80000000u;
        for (i = 0; i < N; ++i) bad += k == 1 && weight[i] != last[i], bad += (weight[i] & 0x7F80) == 0x7F80;
        memcpy(last, weight, sizeof last);
    }
    ok(!bad, "%s: step 2^32 counts as 2^31", name[adam]);
}

static float any_of(const float *list, uint32_t count) { return list[draw() % count]; }

static void test_options(int adam, int quick) {
    static const float rates[] = {0, 1e-40f, 1e-30f, 1e-4f, 4e-3f, 1, 1e30f},
                       decays[] = {0, 1e-40f, 1e-30f, 0.01f, 1, 1e6f};
    static const float gains[] = {1e-5f, 0.001f, 0.02f, 0.1f, 0.15f, 0.5f, 1},
                       epsilons[] = {1e-37f, 1e-8f, 1e-3f, 1e10f};
    long bad = 0, failed = 0;
    int trial;
    for (trial = 0; trial < (quick ? 60 : 2000); ++trial) {
        kopt_inline_optimizer o =
            kopt_inline_optimizer_of(any_of(rates, 7), any_of(decays, 6), draw() << 8 | draw() >> 16);
        long words;
        o.gain1 = any_of(gains, 7);
        o.gain2 = any_of(gains, 7);
        o.eps = any_of(epsilons, 4);
        o.seed = (uint64_t)draw() << 42 ^ (uint64_t)draw() << 20 ^ draw();
        if (trial % 3 != 0) o.step = trial % 3 == 1 ? draw() : 0xFFFFFFFFu - 4 - draw() % 4;
        words = differences(o, library_of(adam, o), 300, 4, ORDINARY, trial % 5 == 0 ? SPECIAL : ORDINARY);
        if (words < 0) ++failed;
        if (words > 0) ++bad;
    }
    ok(bad == 0 && failed == 0,
       "%s, rates, decays, gains, eps, seeds, ids and steps: %ld of %d differ, %ld are refused", name[adam], bad, trial,
       failed);
}

/* kopt_inline_optimizer_of() has the defaults of kopt_adamw(), and decimal betas are 1 - gain, too. */
static void test_defaults(void) {
    /* not as constants, which -fsingle-precision-constant cuts */
    static const char *const betas[] = {"0.8", "0.85", "0.9", "0.95", "0.98", "0.99", "0.995", "0.999", "0.9995"};
    static const char *const gains[] = {"0.2", "0.15", "0.1", "0.05", "0.02", "0.01", "0.005", "0.001", "0.0005"};
    kopt_inline_optimizer o = kopt_inline_optimizer_of(1e-3f, 0.01f, 7);
    kopt_optimizer opt = kopt_adamw((double)o.lr);
    const float fields[] = {o.lr, o.weight_decay, o.eps};
    const float library_fields[] = {(float)opt.lr, (float)opt.weight_decay, (float)opt.eps};
    long bad = differences(o, opt, 500, 30, ORDINARY, ORDINARY);
    int i;
    ok(o.step == opt.step && o.seed == opt.seed && o.id == 7 && memcmp(fields, library_fields, sizeof fields) == 0,
       "the fields of kopt_inline_optimizer_of()");
    ok(bad == 0, "the defaults of kopt_adamw(): %ld words differ", bad);
    for (bad = 0, i = 0; i < 9; ++i) {
        o.gain1 = o.gain2 = (float)strtod(gains[i], NULL);
        opt.beta1 = opt.beta2 = strtod(betas[i], NULL);
        bad += differences(o, opt, 500, 30, ORDINARY, ORDINARY);
    }
    ok(bad == 0, "betas from 0.8 to 0.9995 as 1 - gain: %ld words differ", bad);
}

int main(int argc, char **argv) {
    const int quick = argc > 1 && strcmp(argv[1], "quick") == 0;
    int adam;
#ifndef __wasm__
    fesetenv(FE_DFL_ENV); /* -Ofast starts with subnormals flushed; inline functions take the environment as it is */
#endif
    for (adam = 0; adam < 2; ++adam) {
        test_sizes(adam, quick);
        test_values(adam, quick);
        test_options(adam, quick);
        test_wrap(adam);
    }
    test_defaults();
    return done();
}
