/* The calls whose instructions bench/calls.sh counts, at step 1,000, for callgrind: the instructions of each end in a
   file of their own, with its name. The first, which counts nothing, is what the counting takes. */
#ifndef HEADER
#define HEADER "../kahan_opt.h"
#endif
#define KAHAN_OPT_IMPLEMENTATION
#include HEADER
#include "combination.h"

#include <stdlib.h>
#include <valgrind/callgrind.h>

static void *allocate(size_t bytes) {
    void *p = malloc(bytes);
    if (p == NULL) exit(fprintf(stderr, "calls: out of memory\n"));
    return p;
}

int main(void) {
    static const combination list[] = {{ADAMW, BF16, NO_COPY, KAHAN, BF16, BF16, 0},
                                       {ADAMW, BF16, NO_COPY, STOCHASTIC, BF16, BF16, 0},
                                       {ADAMW, F32, NO_COPY, NEAREST, F32, F32, 0},
                                       {MOMENTUM, BF16, NO_COPY, KAHAN, BF16, BF16, 0}};
    static const char *const name[] = {"AdamW-bf16-kahan", "AdamW-bf16-stochastic", "AdamW-fp32",
                                       "momentum-bf16-kahan"};
    static const size_t n[] = {1, 32, 64, 256};
    size_t i, k;
    if (kopt_isa_force(KOPT_ISA_AVX2) != KOPT_OK) return fprintf(stderr, "calls: there is no AVX2\n"), 1;
    CALLGRIND_ZERO_STATS;
    CALLGRIND_DUMP_STATS_AT("nothing");
    for (i = 0; i < sizeof list / sizeof *list; i++)
        for (k = 0; k < sizeof n / sizeof *n; k++) {
            char text[64];
            kopt_optimizer opt;
            kopt_tensor t;
            kopt_step step;
            kopt_result result;
            arrays a;
            a.n = n[k], a.state_room = KOPT_STATE_BYTES(n[k], 16);
            a.weight = allocate(4 * a.n), a.grad = allocate(4 * a.n), a.copy = NULL, a.state = allocate(a.state_room);
            if (!begin(&list[i], &a, &opt, &t)) return 1;
            opt.step = 998;
            if (kopt_optimizer_step(&opt, &t, 1) != KOPT_OK) return 1;
            snprintf(text, sizeof text, "%s begin", name[i]);
            CALLGRIND_ZERO_STATS;
            result = kopt_step_begin(&step, &opt);
            if (k == 0) CALLGRIND_DUMP_STATS_AT(text);
            if (result != KOPT_OK || opt.step != 1000) return 1;
            snprintf(text, sizeof text, "%s %lu", name[i], (unsigned long)n[k]);
            CALLGRIND_ZERO_STATS;
            result = kopt_step_run(&step, &t, 1);
            CALLGRIND_DUMP_STATS_AT(text);
            if (result != KOPT_OK) return 1;
            free(a.weight), free(a.grad), free(a.state);
        }
    return 0;
}
