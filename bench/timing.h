/* Time of a thread, and medians, for the benches. Include it first: it asks for POSIX. */
#ifndef TIMING_H
#define TIMING_H
#ifndef _GNU_SOURCE
#define _POSIX_C_SOURCE 199309L
#endif
#include <time.h>

static double cpu_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Sorts x. */
static double median(double *x, int n) {
    int i, k;
    for (i = 1; i < n; i++) { /* insertion sort */
        const double value = x[i];
        for (k = i; k > 0 && x[k - 1] > value; k--) x[k] = x[k - 1];
        x[k] = value;
    }
    return x[n / 2];
}

#endif
