/* Adam-atan2 beside AdamW: decoupled decay, bf16 with Kahan and fp32, on each instruction set.

     ./build.sh bench atan2 [N]      N weights (default 8192: in cache); first by SLEEF, if the system has it

   The lines of a row are timed in thread CPU time, interleaved: one after the other, again and again, so that what
   drifts, drifts for all. Printed are the medians, in ns per weight, and the medians of the ratios to AdamW's. */
#include "timing.h"

#define KAHAN_OPT_VMATH
#define KAHAN_OPT_IMPLEMENTATION
#include "../kahan_opt.h"

#include <stdio.h>
#include <stdlib.h>

enum { LINES = 3, REPETITIONS = 201 };
static const kopt_format format[] = {KOPT_BF16, KOPT_F32};
#ifdef KAHAN_OPT_SLEEF
static const char *const title[LINES] = {"AdamW", "Adam-atan2 by SLEEF", "smooth Lion by SLEEF"};
#else
static const char *const title[LINES] = {"AdamW", "Adam-atan2", "smooth Lion"};
#endif

static void *allocate(size_t bytes) {
    void *p = calloc(1, bytes);
    if (p == NULL) exit(fprintf(stderr, "atan2: out of memory\n"));
    return p;
}

int main(int count, char **arguments) {
    const size_t n = count > 1 ? strtoull(arguments[1], NULL, 10) : 8192, steps = 160000 / (n + 1) + 1;
    static double time[LINES][REPETITIONS], ratio[LINES][REPETITIONS];
    float *grad = allocate(4 * n), *initial = allocate(4 * n);
    kopt_bf16 *grad16 = allocate(2 * n);
    kopt_tensor t[LINES];
    size_t i, s;
    int isa, f, line, r;
    if (count > 2 || n == 0) {
        fputs("usage: atan2 [N], N the number of weights\n", stderr);
        return 2;
    }
    for (line = 0; line < LINES; line++)
        t[line] = kopt_tensor_of(allocate(4 * n), KOPT_F32, NULL, KOPT_F32, n, allocate(KOPT_STATE_BYTES(n, 8)),
                                 KOPT_STATE_BYTES(n, 8));
    for (i = 0; i < n; i++) {
        const uint32_t x = (uint32_t)i * 2654435761u;
        grad[i] = ((float)(x >> 8) - 8388608) * 1e-9f;
        grad16[i] = kopt_bf16_from_f32(grad[i]);
        initial[i] = 0.01f * (float)(i % 100) - 0.5f;
    }
    for (isa = KOPT_ISA_SIMD128; isa > 0; isa--) {
        if (kopt_isa_force((kopt_isa)isa) != KOPT_OK) continue;
        for (f = 0; f < 2; f++) {
            kopt_optimizer opt[LINES];
            opt[0] = kopt_adamw(1e-3);
            opt[1] = kopt_adam_atan2(1e-3);
            opt[2] = kopt_smooth_lion(1e-3, 300);
            for (line = 0; line < LINES; line++) {
                opt[line].weight_decay = 0.01;
                opt[line].first_moment_format = opt[line].second_moment_format = t[line].weight_format =
                    t[line].grad_format = format[f];
                t[line].grad = format[f] == KOPT_BF16 ? (void *)grad16 : (void *)grad;
                if (kopt_state_init(&opt[line], &t[line], 1, initial) != KOPT_OK) return 1;
            }
            for (r = 0; r < REPETITIONS; r++)
                for (line = 0; line < LINES; line++) {
                    const double start = cpu_seconds();
                    for (s = 0; s < steps; s++)
                        if (kopt_optimizer_step(&opt[line], &t[line], 1) != KOPT_OK) return 1;
                    time[line][r] = (cpu_seconds() - start) / (double)steps / (double)n * 1e9;
                    ratio[line][r] = time[line][r] / time[0][r];
                }
            for (line = 0; line < LINES; line++)
                printf("%-8s %s %-20s %7.3f ns   %.2f\n", kopt_isa_name((kopt_isa)isa),
                       format[f] == KOPT_BF16 ? "bf16" : "fp32", title[line], median(time[line], REPETITIONS),
                       median(ratio[line], REPETITIONS));
        }
    }
    return 0;
}
