/* openmp.c - a step spread over OpenMP's threads, where it is worth it. Without OpenMP the same code runs in one.

       cc -O2 -fopenmp -o openmp docs/examples/openmp.c && ./openmp

   Below 65,536 weights, 50 us of work, the caller steps them alone: to begin and end a parallel loop takes 1 us at
   best, and milliseconds where other programs use the cores. Chunks may end anywhere, also within a tensor. Exit
   status 1 if a bit differs from one thread's. */
#define KAHAN_OPT_IMPLEMENTATION
#include "../../kahan_opt.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#ifdef _OPENMP
#include <omp.h>
#endif

enum { WORTH_IT = 65536, CHUNK = 16384 };

static int step_parallel(kopt_optimizer *opt, const kopt_tensor *tensors, size_t count) {
    const size_t n = kopt_list_length(tensors, count);
    const ptrdiff_t chunks = (ptrdiff_t)((n + CHUNK - 1) / CHUNK); /* OpenMP 2 counts in signed integers only */
    kopt_step step;
    ptrdiff_t i;
    int failed = 0;
    if (kopt_step_begin(&step, opt) != KOPT_OK) return 1;
#ifdef _OPENMP
#pragma omp parallel for schedule(static) reduction(| : failed) if (n >= WORTH_IT)
#endif
    for (i = 0; i < chunks; ++i) {
        const size_t begin = (size_t)i * CHUNK, end = n - begin < CHUNK ? n : begin + CHUNK;
        failed |= kopt_step_range(&step, tensors, count, begin, end) != KOPT_OK;
    }
    return failed;
}

static double now(void) /* seconds; without OpenMP there is one thread, and its CPU time does */
{
#ifdef _OPENMP
    return omp_get_wtime();
#else
    return (double)clock() / CLOCKS_PER_SEC;
#endif
}

/* Returns the microseconds of the quickest of ten steps. *waited: the part of the time without a core, if there is one
   thread. w: n weights, their state block behind them. */
static double train(int parallel, size_t n, kopt_bf16 *w, kopt_bf16 *g, double *waited) {
    kopt_optimizer opt = kopt_adamw(1e-3);
    kopt_tensor t = KOPT_TENSOR(KOPT_BF16, w, g, n, w + n, KOPT_STATE_BYTES(n, 6));
    double least = 1e9, all = 0, begin, us;
    clock_t used;
    size_t i;
    for (i = 0; i < n; ++i) w[i] = g[i] = kopt_bf16_from_f32((float)(i % 1999 + 1) / 2000);
    if (kopt_state_init(&opt, &t, 1, NULL) != KOPT_OK) exit(2);
    used = clock();
    for (i = 0; i < 10; ++i) {
        begin = now();
        if (parallel ? step_parallel(&opt, &t, 1) : kopt_optimizer_step(&opt, &t, 1) != KOPT_OK) exit(2);
        us = (now() - begin) * 1e6;
        all += us;
        if (us < least) least = us;
    }
    *waited = 1 - (double)(clock() - used) * 1e6 / CLOCKS_PER_SEC / all;
    return least;
}

int main(void) {
    static const size_t sizes[] = {1000, 65536, 4000001}; /* the last is no multiple of a chunk */
    double waited = 0, unused;
    int i, differ = 0;
    for (i = 0; i < 3; ++i) {
        const size_t n = sizes[i], room = n * sizeof(kopt_bf16) + KOPT_STATE_BYTES(n, 6);
        kopt_bf16 *one = calloc(1, room), *several = calloc(1, room), *g = malloc(n * sizeof *g);
        if (one == NULL || several == NULL || g == NULL) return 2;
        printf("%7lu weights: one thread %.0f us, ", (unsigned long)n, train(0, n, one, g, &waited));
        printf("OpenMP %.0f us; ", train(1, n, several, g, &unused));
        differ |= memcmp(one, several, room) != 0;
        puts(differ ? "the bits differ" : "the bits are the same");
        free(one), free(several), free(g);
    }
    if (waited > 0.05) printf("the machine is busy: one thread waited %.0f %% of the time for a core\n", 100 * waited);
    return differ;
}
