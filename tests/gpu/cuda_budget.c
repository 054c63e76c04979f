/* cuda_budget.c - PTX instructions that a step executes for each element, and that the prologue's longest thread
   executes, within limits. cuda_fake.c counts them, so the figures are the same on every machine with the same
   nvcc. They are for compute_75 at -O3, before ptxas. Argument: the name of the compiler. What was executed goes to the
   file that PTX_PROFILE names, for tests/gpu/sass.py. */
#define KAHAN_OPT_IMPLEMENTATION
#include "../../kahan_opt.h"
#include "../../kahan_opt_cuda.cuh"
#include <cuda_runtime_api.h>

#include "cuda_fake.h"
#include "../unit/tap.h"
#include "../unit/inputs.h"

#include <stdlib.h>
#include <string.h>

enum { ADAMW, STABLE, SGD, LION, PLAIN_SGD, RADAM, ADAN, RANGER, AMSGRAD, EMA, MIXED };
enum { N = 1 << 17, ODD = N + 5 };
enum { B = KOPT_BF16, H = KOPT_FP16, F = KOPT_F32, Q = KOPT_Q8 };
enum {
    KAHAN = KOPT_KAHAN,
    FEEDBACK = KOPT_FEEDBACK,
    EXACT = KOPT_EXACT,
    COMPACT = KOPT_COMPACT,
    NOISE = KOPT_STOCHASTIC,
    NEAR = KOPT_NEAREST
};
typedef struct mode {
    const char *name;
    int rule, weight, grad, moment, rounding, stores; /* MIXED: 8-bit second moments; stores: of moments, residual */
    size_t n, off;                                    /* off: bytes from an aligned address, all arrays */
    int stats;                                        /* kopt_cuda_plan_measure instead of kopt_cuda_plan_step */
    double limit;                                     /* instructions for each element, ... */
    int relative;                                     /* ... or times those of the first mode */
} mode;

/* The limits: what the kernels need, rounded up. */
static const mode modes[] = {
    {"AdamW KAHAN bf16", ADAMW, B, B, B, KAHAN, NOISE, N, 0, 0, 76, 0},
    {"AdamW KAHAN bf16, n % 8 = 5", ADAMW, B, B, B, KAHAN, NOISE, ODD, 0, 0, 1.05, 1},
    {"AdamW KAHAN bf16, nearest stores", ADAMW, B, B, B, KAHAN, NEAR, N, 0, 0, 80, 0},
    {"AdamW KAHAN bf16, fp32 gradients", ADAMW, B, F, B, KAHAN, NOISE, N, 0, 0, 1.05, 1},
    {"AdamW KAHAN bf16, fp32 moments", ADAMW, B, B, F, KAHAN, NOISE, N, 0, 0, 1, 1},
    {"AdamW KAHAN bf16, 8-bit moments", ADAMW, B, B, Q, KAHAN, NOISE, N, 0, 0, 128, 0},
    {"AdamW KAHAN bf16, 8-bit second moments", MIXED, B, B, B, KAHAN, NOISE, N, 0, 0, 101, 0},
    {"AdamW KAHAN bf16, 2 bytes off", ADAMW, B, B, B, KAHAN, NOISE, N, 2, 0, 403, 0},
    {"AdamW EXACT bf16", ADAMW, B, B, B, EXACT, NOISE, N, 0, 0, 72, 0},
    {"AdamW COMPACT bf16", ADAMW, B, B, B, COMPACT, NOISE, N, 0, 0, 78, 0},
    {"AdamW COMPACT bf16, 8-bit moments", ADAMW, B, B, Q, COMPACT, NOISE, N, 0, 0, 128, 0},
    {"AdamW STOCHASTIC bf16", ADAMW, B, B, B, NOISE, NOISE, N, 0, 0, 68, 0},
    {"AdamW FEEDBACK bf16", ADAMW, B, B, B, FEEDBACK, NOISE, N, 0, 0, 80, 0},
    {"AdamW FEEDBACK bf16, 8-bit second moments", MIXED, B, B, B, FEEDBACK, NOISE, N, 0, 0, 105, 0},
    {"AdamW FEEDBACK bf16, 8-bit moments", ADAMW, B, B, Q, FEEDBACK, NOISE, N, 0, 0, 131, 0},
    {"AdamW NEAREST bf16", ADAMW, B, B, B, NEAR, NOISE, N, 0, 0, 70, 0},
    {"AdamW KAHAN fp16", ADAMW, H, H, H, KAHAN, NOISE, N, 0, 0, 114, 0},
    {"AdamW KAHAN fp16, fp32 moments", ADAMW, H, H, F, KAHAN, NOISE, N, 0, 0, 83, 0},
    {"AdamW fp32", ADAMW, F, F, F, NEAR, NOISE, N, 0, 0, 42, 0},
    {"AdamW fp32, 8-bit moments", ADAMW, F, F, Q, NEAR, NOISE, N, 0, 0, 113, 0},
    {"AdamW fp32, bf16 gradients", ADAMW, F, B, F, NEAR, NOISE, N, 0, 0, 43, 0},
    {"StableAdamW KAHAN bf16", STABLE, B, B, B, KAHAN, NOISE, N, 0, 0, 122, 0},
    {"SGD with momentum KAHAN bf16", SGD, B, B, B, KAHAN, NOISE, N, 0, 0, 74, 0},
    {"SGD KAHAN bf16", PLAIN_SGD, B, B, B, KAHAN, NOISE, N, 0, 0, 54, 0},
    {"Lion KAHAN bf16", LION, B, B, B, KAHAN, NOISE, N, 0, 0, 82, 0},
    {"RAdam KAHAN bf16", RADAM, B, B, B, KAHAN, NOISE, N, 0, 0, 94, 0},
    {"Adan KAHAN bf16", ADAN, B, B, B, KAHAN, NOISE, N, 0, 0, 131, 0},
    {"Adan fp32", ADAN, F, F, F, NEAR, NOISE, N, 0, 0, 63, 0},
    {"Ranger KAHAN bf16", RANGER, B, B, B, KAHAN, NOISE, N, 0, 0, 185, 0},
    {"AMSGrad KAHAN bf16", AMSGRAD, B, B, B, KAHAN, NOISE, N, 0, 0, 107, 0},
    {"EMA KAHAN bf16", EMA, B, B, B, KAHAN, NOISE, N, 0, 0, 57, 0},
    {"statistics of bf16", ADAMW, B, B, B, KAHAN, NOISE, 1 << 20, 0, 1, 14, 0}, /* beside the slots */
    {"statistics of fp16", ADAMW, H, H, H, KAHAN, NOISE, 1 << 20, 0, 1, 15, 0},
    {"statistics of fp32", ADAMW, F, F, F, NEAR, NOISE, 1 << 20, 0, 1, 23, 0},
};
/* Instructions of the prologue's longest thread, for one group of AdamW; no target. */
enum { PROLOGUE = 335, CLIPPED = 1820 }; /* step 2; step 100,001 with check_finite and max_norm */

static void *device_new(size_t size) {
    void *p = NULL;
    if (cudaHostAlloc(&p, size, cudaHostAllocMapped) != cudaSuccess) printf("Bail out! no memory\n"), exit(1);
    return p;
}

/* Numbers from 1/16 on, of any sign. */
static void fill(unsigned char *p, int format, size_t n) {
    uint64_t state = 1;
    for (; n; --n) {
        const uint32_t u = upper64(&state), sign = u & 0x80000000;
        const uint32_t single = sign | 0x3d800000 | (u & 0x7fffff);
        const uint16_t half = (uint16_t)(format == KOPT_BF16 ? single >> 16 : sign >> 16 | 0x2c00 | (u & 0x3ff));
        memcpy(p, format == KOPT_F32 ? (const void *)&single : (const void *)&half, format == KOPT_F32 ? 4 : 2);
        p += format == KOPT_F32 ? 4 : 2;
    }
}

static FILE *profile;

/* Instructions of the second step, or of its statistics. */
static double measured(const mode *m) {
    kopt_optimizer o = m->rule == SGD         ? kopt_sgd(1e-3, 0.9)
                       : m->rule == PLAIN_SGD ? kopt_sgd(1e-3, 0)
                       : m->rule == LION      ? kopt_lion(1e-3)
                       : m->rule == RADAM     ? kopt_radam(1e-3)
                       : m->rule == ADAN      ? kopt_adan(1e-3)
                       : m->rule == RANGER    ? kopt_ranger(1e-3)
                       : m->rule == EMA       ? kopt_ema(0.999)
                                              : kopt_adamw(1e-3);
    const size_t wide = m->weight == KOPT_F32 ? 4 : 2, grad_wide = m->grad == KOPT_F32 ? 4 : 2;
    size_t size, failed = 0;
    unsigned char *weight, *grad, *state;
    uint64_t before;
    unsigned char *bytes;
    kopt_tensor t;
    kopt_cuda_group g = {NULL, NULL, 1};
    kopt_cuda_plan plan;
    o.stable = m->rule == STABLE, o.amsgrad = m->rule == AMSGRAD;
    o.first_moment_format = (kopt_format)m->moment;
    o.second_moment_format = m->rule == MIXED ? KOPT_Q8 : (kopt_format)m->moment;
    o.rounding = (kopt_rounding)m->rounding;
    o.moment_rounding = o.residual_rounding = (kopt_rounding)m->stores;
    weight = device_new(m->n * wide + m->off), grad = device_new(m->n * grad_wide + m->off);
    t = kopt_tensor_of(weight + m->off, (kopt_format)m->weight, grad + m->off, (kopt_format)m->grad, m->n, NULL, 0);
    t.state_size = kopt_state_size(&o, &t);
    state = device_new(t.state_size + m->off);
    t.state = state + m->off;
    fill(weight + m->off, m->weight, m->n), fill(grad + m->off, m->grad, m->n);
    failed += kopt_state_init(&o, &t, 1, NULL) != KOPT_OK;
    g.opt = &o, g.tensors = &t;
    size = kopt_cuda_plan_size(&g, 1);
    bytes = device_new(2 * size); /* of the host and of the GPU */
    failed += kopt_cuda_plan_build(&plan, bytes, size, &g, 1) != KOPT_OK;
    failed += kopt_cuda_plan_upload(&plan, bytes + size, NULL) != KOPT_OK;
    failed += kopt_cuda_plan_step(&plan, NULL) != KOPT_OK || cudaDeviceSynchronize() != cudaSuccess;
    before = ptx_instructions();
    ptx_profile(NULL);
    failed += (m->stats ? kopt_cuda_plan_measure(&plan, NULL) : kopt_cuda_plan_step(&plan, NULL)) != KOPT_OK;
    failed += cudaDeviceSynchronize() != cudaSuccess;
    failed +=
        kopt_cuda_plan_status(&plan)->result != KOPT_OK || kopt_cuda_plan_status(&plan)->steps != (m->stats ? 1 : 2);
    before = ptx_instructions() - before;
    if (profile) fprintf(profile, "mode %lu %s\n", (unsigned long)m->n, m->name), ptx_profile(profile);
    cudaFreeHost(weight), cudaFreeHost(grad), cudaFreeHost(state), cudaFreeHost(bytes);
    if (failed) printf("Bail out! %s: no step\n", m->name), exit(1);
    return (double)before / (double)m->n;
}

/* Instructions of the prologue's longest thread after `steps` steps. */
static unsigned long prologue(uint32_t steps, int clipped) {
    const kopt_cuda_options options = {1, 0, 1, NULL, NULL, NULL, {0, 0, 0, 0}};
    const kopt_optimizer o = kopt_adamw(1e-3);
    const size_t n = 1000, state_size = KOPT_STATE_BYTES(n, 6);
    unsigned char *const weight = device_new(2 * n), *const grad = device_new(2 * n),
                         *const state = device_new(state_size);
    kopt_tensor t = kopt_tensor_of(weight, KOPT_BF16, grad, KOPT_BF16, n, state, state_size);
    const kopt_cuda_group g = {&o, &t, 1};
    const size_t size = kopt_cuda_plan_size(&g, 1);
    unsigned char *const bytes = device_new(2 * size);
    kopt_cuda_plan plan;
    size_t failed;
    fill(weight, KOPT_BF16, n), fill(grad, KOPT_BF16, n);
    failed = kopt_state_init(&o, &t, 1, NULL) != KOPT_OK;
    failed += kopt_cuda_plan_build(&plan, bytes, size, &g, 1) != KOPT_OK;
    failed += kopt_cuda_plan_upload(&plan, bytes + size, NULL) != KOPT_OK;
    if (clipped) failed += kopt_cuda_plan_set_options(&plan, &options, NULL) != KOPT_OK;
    failed += kopt_cuda_plan_set_step(&plan, steps, NULL) != KOPT_OK;
    if (clipped) failed += kopt_cuda_plan_measure(&plan, NULL) != KOPT_OK;
    failed += kopt_cuda_plan_step(&plan, NULL) != KOPT_OK || cudaDeviceSynchronize() != cudaSuccess;
    failed += kopt_cuda_plan_status(&plan)->steps != 1 || *kopt_cuda_plan_steps(&plan, 0) != steps + 1;
    cudaFreeHost(weight), cudaFreeHost(grad), cudaFreeHost(state), cudaFreeHost(bytes);
    if (failed) printf("Bail out! prologue: no step\n"), exit(1);
    return (unsigned long)ptx_longest_thread("prologue");
}

int main(int argc, char **argv) {
    double first = 0;
    size_t i;
    unsigned long longest;
    if (getenv("PTX_PROFILE")) profile = fopen(getenv("PTX_PROFILE"), "w");
    if (argc > 1) note("PTX for compute_75, -O3, of %s; instructions for each element", argv[1]);
    for (i = 0; i < sizeof modes / sizeof *modes; ++i) {
        const double count = measured(&modes[i]);
        if (i == 0) first = count;
        if (modes[i].relative)
            ok(count <= modes[i].limit * first, "%s: %.1f, %.3f times the first; the limit is %.2f", modes[i].name,
               count, count / first, modes[i].limit);
        else
            ok(count > 1 && count <= modes[i].limit, "%s: %.1f; the limit is %.0f", modes[i].name, count,
               modes[i].limit);
    }
    longest = prologue(1, 0);
    ok(longest > 0 && longest <= PROLOGUE, "the prologue's longest thread: %lu; the limit is %d", longest, PROLOGUE);
    longest = prologue(100000, 1);
    ok(longest > 0 && longest <= CLIPPED, "... step 100001, clipped: %lu; the limit is %d", longest, CLIPPED);
    if (profile) fclose(profile);
    return done();
}
