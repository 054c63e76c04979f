/* The shared library of bench/peers.py, which measures kahan_opt.h beside other optimizers in one process.

   build.sh compiles this file once for each part, because each has flags of its own:
     OURS    -std=c99 -O2: as any program would include the header
     NAIVE   -O3 -march=native, and a second time with -fno-math-errno, without which gcc keeps sqrtf() scalar:
             AdamW in fp32 as one writes it. NAIVE is the name of the function
     LLMC    -Ofast -march=native: the update of llm.c's train_gpt2.c, flags of its Makefile
     GGML    -O3 -march=native: the update of ggml's opt_step_adamw, flags of its build
   The last two are loops of our own after the published formulas, in their order of operations: not those projects'
   code. They keep the compiler's default standard, as there: with -std=c99 gcc would not fuse multiply and add. */
#include <stddef.h>

#ifdef OURS
#define KAHAN_OPT_IMPLEMENTATION
#include "../kahan_opt.h"

#include <stdlib.h>

typedef struct ours {
    kopt_optimizer opt;
    kopt_tensor t;
} ours;

/* A fresh AdamW over buffers of the caller, NULL if it was refused. moments: the format of both moments. */
ours *ours_new(int format, int rounding, int moments, double lr, void *w, void *g, size_t n, void *state, size_t room);
size_t ours_state_size(int format, int rounding, int moments, size_t n);
int ours_step(ours *o);
void ours_free(ours *o);
const char *ours_isa(void);
int ours_convert(void *dst, int dst_format, const void *src, int src_format, size_t n);

static kopt_optimizer optimizer(int rounding, int moments, double lr) {
    kopt_optimizer opt = kopt_adamw(lr);
    opt.rounding = (kopt_rounding)rounding;
    opt.first_moment_format = opt.second_moment_format = (kopt_format)moments;
    if (rounding == KOPT_NEAREST) opt.moment_rounding = KOPT_NEAREST;
    return opt;
}

size_t ours_state_size(int format, int rounding, int moments, size_t n) {
    const kopt_optimizer opt = optimizer(rounding, moments, 1e-3);
    const kopt_tensor t = kopt_tensor_of(NULL, (kopt_format)format, NULL, (kopt_format)format, n, NULL, 0);
    return kopt_state_size(&opt, &t);
}

ours *ours_new(int format, int rounding, int moments, double lr, void *w, void *g, size_t n, void *state, size_t room) {
    ours *o = malloc(sizeof *o);
    if (o == NULL) return NULL;
    o->opt = optimizer(rounding, moments, lr);
    o->t = kopt_tensor_of(w, (kopt_format)format, g, (kopt_format)format, n, state, room);
    if (kopt_state_init(&o->opt, &o->t, 1, NULL) == KOPT_OK) return o;
    free(o);
    return NULL;
}

int ours_step(ours *o) { return (int)kopt_optimizer_step(&o->opt, &o->t, 1); }

void ours_free(ours *o) { free(o); }

const char *ours_isa(void) { return kopt_isa_name(kopt_isa_current()); }

int ours_convert(void *dst, int dst_format, const void *src, int src_format, size_t n) {
    return (int)kopt_convert(dst, (kopt_format)dst_format, src, (kopt_format)src_format, n);
}

#else
#include <math.h>

/* What the loops are given: AdamW's hyper-parameters and the number of the step, from 1. */
#define LOOP(name)                                                                                                   \
    void name(float *w, const float *g, float *m, float *v, size_t n, float lr, float beta1, float beta2, float eps, \
              float wd, int t)

#ifdef NAIVE
LOOP(NAIVE);
LOOP(NAIVE) {
    const float rate = lr / (1 - powf(beta1, (float)t)), root = 1 / sqrtf(1 - powf(beta2, (float)t));
    const float keep = 1 - lr * wd;
    size_t i;
    for (i = 0; i < n; i++) {
        m[i] = beta1 * m[i] + (1 - beta1) * g[i];
        v[i] = beta2 * v[i] + (1 - beta2) * g[i] * g[i];
        w[i] = keep * w[i] - rate * m[i] / (sqrtf(v[i]) * root + eps);
    }
}
#endif

#ifdef LLMC
LOOP(llmc_step);
LOOP(llmc_step) {
    size_t i;
    for (i = 0; i < n; i++) {
        const float weight = w[i], grad = g[i];
        const float first = beta1 * m[i] + (1.0f - beta1) * grad;
        const float second = beta2 * v[i] + (1.0f - beta2) * grad * grad;
        const float first_hat = first / (1.0f - powf(beta1, (float)t)); /* in the loop, as there; -Ofast moves it out */
        const float second_hat = second / (1.0f - powf(beta2, (float)t));
        m[i] = first;
        v[i] = second;
        w[i] = weight - lr * (first_hat / (sqrtf(second_hat) + eps) + wd * weight);
    }
}
#endif

#ifdef GGML
LOOP(ggml_step);
LOOP(ggml_step) {
    const float beta1h = 1.0f / (1.0f - powf(beta1, (float)t)), beta2h = 1.0f / (1.0f - powf(beta2, (float)t));
    const float keep = 1.0f - lr * wd;
    size_t i;
    for (i = 0; i < n; i++) {
        m[i] = m[i] * beta1 + g[i] * (1.0f - beta1);
        v[i] = v[i] * beta2 + g[i] * g[i] * (1.0f - beta2);
        w[i] = w[i] * keep - lr * (m[i] * beta1h) / (sqrtf(v[i] * beta2h) + eps);
    }
}
#endif
#endif
