/* threads.c - threads of your own share a step: each calls kopt_step_range() on elements of its own.

       cc -O2 -pthread -o threads docs/examples/threads.c && ./threads [THREADS]

   Shares may end anywhere, also within a tensor. Random bits come from an element's index, so slicing changes nothing:
   exit status 1 if a bit differs. */
#define _POSIX_C_SOURCE 200112L
#define KAHAN_OPT_IMPLEMENTATION
#include "../../kahan_opt.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { N = 4000001, STEPS = 20, MOST = 64 };

typedef struct share {
    pthread_t thread;
    const kopt_step *step;
    const kopt_tensor *tensors;
    size_t count, begin, end;
    kopt_result result;
} share;

static void *work(void *argument) {
    share *s = argument;
    s->result = kopt_step_range(s->step, s->tensors, s->count, s->begin, s->end);
    return NULL;
}

static int step_shared(kopt_optimizer *opt, const kopt_tensor *tensors, size_t count, size_t threads) {
    const size_t n = kopt_list_length(tensors, count);
    share s[MOST];
    kopt_step step;
    size_t i, done = 0;
    if (kopt_step_begin(&step, opt) != KOPT_OK) return 1;
    for (i = 0; i < threads; ++i) {
        s[i].step = &step, s[i].tensors = tensors, s[i].count = count;
        s[i].begin = n * i / threads, s[i].end = n * (i + 1) / threads;
        if (i > 0 && pthread_create(&s[i].thread, NULL, work, &s[i]) != 0) exit(2); /* a pool of threads costs less */
    }
    work(&s[0]); /* the first share is this thread's */
    for (i = 1; i < threads; ++i) pthread_join(s[i].thread, NULL);
    for (i = 0; i < threads; ++i) done += s[i].result == KOPT_OK;
    return done < threads;
}

/* Returns the milliseconds of the quickest step. *waited: the part of the time without a core, if there is one thread.
   w: the weights; their state block is behind them. */
static double train(size_t threads, kopt_bf16 *w, kopt_bf16 *g, double *waited) {
    kopt_optimizer opt = kopt_adamw(1e-3);
    kopt_tensor t = KOPT_TENSOR(KOPT_BF16, w, g, N, w + N, KOPT_STATE_BYTES(N, 6));
    struct timespec a, b;
    double ms, least = 1e9, all = 0;
    clock_t used;
    int i;
    for (i = 0; i < N; ++i) w[i] = g[i] = kopt_bf16_from_f32((float)(i % 1999 + 1) / 2000);
    if (kopt_state_init(&opt, &t, 1, NULL) != KOPT_OK) exit(2);
    used = clock();
    for (i = 0; i < STEPS; ++i) {
        clock_gettime(CLOCK_MONOTONIC, &a);
        if (threads > 1 ? step_shared(&opt, &t, 1, threads) : kopt_optimizer_step(&opt, &t, 1) != KOPT_OK) exit(2);
        clock_gettime(CLOCK_MONOTONIC, &b);
        ms = (double)(b.tv_sec - a.tv_sec) * 1e3 + (double)(b.tv_nsec - a.tv_nsec) * 1e-6;
        all += ms;
        if (ms < least) least = ms;
    }
    *waited = 1 - (double)(clock() - used) * 1e3 / CLOCKS_PER_SEC / all;
    return least;
}

int main(int argc, char **argv) {
    const size_t room = N * sizeof(kopt_bf16) + KOPT_STATE_BYTES(N, 6);
    int differ, threads = argc > 1 ? atoi(argv[1]) : 2;
    kopt_bf16 *one = calloc(1, room), *several = calloc(1, room), *g = malloc(N * sizeof *g);
    double first, second, waited, unused;
    if (threads < 1 || threads > MOST || one == NULL || several == NULL || g == NULL) return 2;
    first = train(1, one, g, &waited), second = train((size_t)threads, several, g, &unused);
    differ = memcmp(one, several, room);
    printf("the quickest of %d steps: 1 thread %.2f ms, %d threads %.2f ms, ratio %.2f; the bits %s\n", STEPS, first,
           threads, second, first / second, differ ? "differ" : "are the same");
    if (waited > 0.05) printf("the machine is busy: 1 thread waited %.0f %% of the time for a core\n", 100 * waited);
    return differ != 0;
}
