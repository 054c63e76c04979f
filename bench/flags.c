/* kahan_opt.h beside itself, built with other flags and compilers.

     ./build.sh bench flags [N [OFFSET]]     N weights (default 10,240: in cache), in arrays that begin OFFSET bytes
                                             (default 0) behind a multiple of 64

   build.sh compiles this file once for each set of flags, with STEP the name of the function it makes, and once with
   BUILDS, the list of those names: the program. The first is -O2, as README says. The builds take turns, in thread CPU
   time; printed are the medians, in ns per weight, and the medians of the ratios to the first. */
#ifdef STEP
#define KAHAN_OPT_STATIC
#define KAHAN_OPT_IMPLEMENTATION
#else
#include "timing.h"

#include "room.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#endif
#include "../kahan_opt.h"

typedef struct arrays {
    void *memory, *weight, *grad, *state; /* memory: what free() takes */
    size_t n, room;
} arrays;

/* So many steps of AdamW; 0: begins anew. Returns 0 if something was refused. */
typedef int step_function(const arrays *a, kopt_format format, kopt_rounding rounding, unsigned count);

#ifdef STEP
step_function STEP;
int STEP(const arrays *a, kopt_format format, kopt_rounding rounding, unsigned count) {
    static kopt_optimizer opt;
    kopt_tensor t = kopt_tensor_of(a->weight, format, a->grad, format, a->n, a->state, a->room);
    if (count == 0) {
        opt = kopt_adamw(1e-3);
        opt.first_moment_format = opt.second_moment_format = format;
        opt.rounding = rounding;
        return kopt_state_init(&opt, &t, 1, NULL) == KOPT_OK;
    }
    for (; count > 0; count--)
        if (kopt_optimizer_step(&opt, &t, 1) != KOPT_OK) return 0;
    return 1;
}
#else
#define BUILD(name) step_function step_##name;
BUILDS
#undef BUILD
#define BUILD(name) {step_##name, #name},
static const struct {
    step_function *step;
    const char *flags;
} builds[] = {BUILDS};
enum { COUNT = sizeof builds / sizeof builds[0], REPETITIONS = 51, LINES = 3 };

static void fail(const char *why) {
    fprintf(stderr, "flags: %s\n", why);
    exit(2);
}

int main(int count, char **arguments) {
    static const struct {
        const char *name;
        kopt_format format;
        kopt_rounding rounding;
    } line[LINES] = {{"fp32", KOPT_F32, KOPT_NEAREST},
                     {"bf16 Kahan", KOPT_BF16, KOPT_KAHAN},
                     {"bf16 stochastic", KOPT_BF16, KOPT_STOCHASTIC}};
    static double time[COUNT][REPETITIONS], ratio[COUNT][REPETITIONS];
    const size_t n = count > 1 ? strtoull(arguments[1], NULL, 10) : 10240;
    const size_t offset = count > 2 ? strtoull(arguments[2], NULL, 10) : 0;
    const unsigned steps = (unsigned)(300000 / (n + 1)) + 1;
    int l, r, b;
    if (count > 3 || n == 0 || offset > 64) fail("usage: flags [N [OFFSET]], N weights, OFFSET up to 64 bytes");
    for (l = 0; l < LINES; l++) {
        arrays a[COUNT];
        printf("%-16s", line[l].name);
        for (b = 0; b < COUNT; b++) {
            unsigned char *next;
            a[b].n = n, a[b].room = KOPT_STATE_BYTES(n, 8);
            next = a[b].memory = malloc(8 * n + a[b].room + SPARE);
            if (next == NULL) fail("out of memory");
            a[b].weight = take(&next, 4 * n) + offset, a[b].grad = take(&next, 4 * n) + offset;
            a[b].state = take(&next, a[b].room) + offset;
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
            printf("  %s %.3f ns %.2f", builds[b].flags, median(time[b], REPETITIONS), median(ratio[b], REPETITIONS));
            free(a[b].memory);
        }
        printf("\n");
    }
    return 0;
}
#endif
