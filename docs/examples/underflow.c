/* underflow.c - why fp16 needs a loss scale. A line is fitted to 64 points whose slopes are small, all in fp16:
   weights and gradients. The gradients are about 1e-8; the smallest fp16 number is 6e-8, so they are stored as
   zero and nothing is learned. Multiplied by the loss scale before they are stored, they are ordinary numbers.

       cc -O2 -o underflow docs/examples/underflow.c && ./underflow                                                   */
#define KAHAN_OPT_IMPLEMENTATION
#include "../../kahan_opt.h"

#include <stdio.h>

enum { POINTS = 64, INPUTS = 3 };

static const float truth[INPUTS] = {2e-4f, -3e-4f, 1e-4f};

typedef struct fit {
    kopt_fp16 weight[INPUTS], grad[INPUTS];
    unsigned char state[KOPT_STATE_BYTES(INPUTS, 6)];
    int zeros, overflows; /* of the gradients of all steps */
} fit;

/* Input j of point i: small, and not the same for any two. */
static float input(int i, int j) { return (float)((i * (5 + 8 * j) + 3 * j) % 64 - 31) * 1e-4f; }

static float error(const fit *f, int i) {
    float sum = 0;
    int j;
    for (j = 0; j < INPUTS; ++j) sum += (kopt_f32_from_fp16(f->weight[j]) - truth[j]) * input(i, j);
    return sum;
}

static double loss(const fit *f) {
    double sum = 0;
    int i;
    for (i = 0; i < POINTS; ++i) sum += (double)error(f, i) * (double)error(f, i) / POINTS;
    return sum;
}

/* The backward pass of scale * loss, its results stored in fp16. */
static int evaluate(void *user, double scale) {
    fit *f = (fit *)user;
    int i, j;
    for (j = 0; j < INPUTS; ++j) {
        float g = 0;
        for (i = 0; i < POINTS; ++i) g += (float)scale * 2 * error(f, i) * input(i, j) / POINTS;
        f->grad[j] = kopt_fp16_from_f32(g);
        f->zeros += f->grad[j] == 0 || f->grad[j] == 0x8000;
        f->overflows += (f->grad[j] & 0x7C00) == 0x7C00;
    }
    return 0;
}

static double train(double scale, int steps) {
    static fit f; /* all weights 0 */
    kopt_optimizer opt = kopt_adam(1e-5);
    kopt_tensor t;
    kopt_scaler scaler = kopt_scaler_of();
    kopt_closure closure = {evaluate, NULL, &f};
    static const fit none;
    double before;
    int i, skipped, skips = 0;
    f = none;
    opt.eps = 1e-15; /* the default 1e-8 is as large as these gradients */
    scaler.scale = scale;
    scaler.interval = scale > 1 ? 20 : 4000000000u; /* 1 and no growth: no loss scale */
    t = KOPT_TENSOR(KOPT_FP16, f.weight, f.grad, INPUTS, f.state, sizeof f.state);
    if (kopt_state_init(&opt, &t, 1, NULL) != KOPT_OK) return -1;
    before = loss(&f);
    for (i = 0; i < steps; ++i) {
        if (kopt_scaler_step(&scaler, &opt, &t, 1, 0, &closure, &skipped) != KOPT_OK) return -1;
        skips += skipped;
    }
    printf("%-22s %3d %%  %9d  %11.2g  %10.2e  %10.2e\n", scale > 1 ? "dynamic, from 65536" : "none",
           100 * f.zeros / (steps * INPUTS), skips, scaler.scale, before, loss(&f));
    return loss(&f) / before;
}

int main(void) {
    double without, with;
    printf("loss scale         zero gradients   skipped  scale after  loss before  loss after\n");
    without = train(1, 1000);
    with = train(65536, 1000);
    if (!(without > 0.99 && with >= 0 && with < 1e-3)) return 1;
    printf("Without a loss scale every gradient became 0 and nothing was learned; with one the loss fell to %.0e of "
           "what it was.\n",
           with);
    return 0;
}
