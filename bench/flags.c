/* kahan_opt.h beside itself, built with other flags and compilers.

     ./build.sh bench flags [N]      N weights (default 10,240: in cache)

   build.sh compiles this file once for each set of flags, with STEP the name of the function it makes, and once with
   BUILDS, the list of those names: the program. The first is -O2, as README says. The builds take turns, in thread CPU
   time; printed are the medians, in ns per weight, and the medians of the ratios to the first. */
#define _POSIX_C_SOURCE 199309L
#include <stddef.h>

typedef struct arrays {
    void *weight, *grad, *state;
    size_t n, room;
} arrays;

#ifdef STEP
#define KAHAN_OPT_STATIC
#define KAHAN_OPT_IMPLEMENTATION
#include "../kahan_opt.h"

int STEP(const arrays *a, int format, int rounding, unsigned count);
/* So many steps of AdamW; 0: begins anew. Returns 0 if something was refused. */
int STEP(const arrays *a, int format, int rounding, unsigned count) {
    static kopt_optimizer opt;
    kopt_tensor t = kopt_tensor_of(a->weight, a->grad, (kopt_format)format, a->n, a->state, a->room);
    if (count == 0) {
        opt = kopt_adamw(1e-3);
        opt.weight_format = opt.moment_format = (kopt_format)format;
        opt.rounding = (kopt_rounding)rounding;
        return kopt_state_init(&opt, &t, NULL) == KOPT_OK;
    }
    for (; count > 0; count--)
        if (kopt_optimizer_step(&opt, &t, 1) != KOPT_OK) return 0;
    return 1;
}
#else
#include "../kahan_opt.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct build {
    int (*step)(const arrays *a, int format, int rounding, unsigned count);
    const char *flags;
} build;
#define BUILD(name) int step_##name(const arrays *a, int format, int rounding, unsigned count);
BUILDS
#undef BUILD
#define BUILD(name) {step_##name, #name},
static const build builds[] = {BUILDS};
enum { COUNT = sizeof builds / sizeof builds[0], REPETITIONS = 51, LINES = 3 };

static double cpu_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int ascending(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *x) {
    qsort(x, REPETITIONS, sizeof *x, ascending);
    return x[REPETITIONS / 2];
}

static void fail(const char *why) {
    fprintf(stderr, "flags: %s\n", why);
    exit(2);
}

int main(int count, char **arguments) {
    static const struct { const char *name; kopt_format format; kopt_rounding rounding; } line[LINES] = {
        {"fp32", KOPT_F32, KOPT_NEAREST}, {"bf16 Kahan", KOPT_BF16, KOPT_KAHAN}, {"bf16 stochastic", KOPT_BF16, KOPT_STOCHASTIC}};
    static double time[COUNT][REPETITIONS], ratio[COUNT][REPETITIONS];
    const size_t n = count > 1 ? strtoull(arguments[1], NULL, 10) : 10240;
    const unsigned steps = (unsigned)(300000 / (n + 1)) + 1;
    int l, r, b;
    for (l = 0; l < LINES; l++) {
        arrays a[COUNT];
        printf("%-16s", line[l].name);
        for (b = 0; b < COUNT; b++) {
            a[b].n = n, a[b].room = KOPT_STATE_BYTES(n, 8);
            a[b].weight = malloc(4 * n), a[b].grad = malloc(4 * n), a[b].state = malloc(a[b].room);
            if (a[b].weight == NULL || a[b].grad == NULL || a[b].state == NULL) fail("out of memory");
            memset(a[b].weight, 0x3C, 4 * n), memset(a[b].grad, 0x3C, 4 * n); /* 0.0115, in fp32 and in bf16 */
            if (!builds[b].step(&a[b], line[l].format, line[l].rounding, 0)) fail("a state block was refused");
        }
        for (r = 0; r < REPETITIONS; r++)
            for (b = 0; b < COUNT; b++) {
                const double start = cpu_seconds();
                if (!builds[b].step(&a[b], line[l].format, line[l].rounding, steps)) fail("a step was refused");
                time[b][r] = (cpu_seconds() - start) / steps / (double)n * 1e9;
                ratio[b][r] = time[b][r] / time[0][r];
            }
        for (b = 0; b < COUNT; b++) {
            printf("  %s %.3f ns %.2f", builds[b].flags, median(time[b]), median(ratio[b]));
            free(a[b].weight), free(a[b].grad), free(a[b].state);
        }
        printf("\n");
    }
    return 0;
}
#endif
