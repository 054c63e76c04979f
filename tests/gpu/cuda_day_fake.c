/* cuda_day_fake.c - the events that bench/cuda.c needs beside what cuda_fake.c has: they wait for all work and
   hold the time of the host. Weak: a runtime that has events of its own wins. */
#define _POSIX_C_SOURCE 200809L
#include <stdlib.h>
#include <time.h>

#define WEAK __attribute__((weak))
int cudaDeviceSynchronize(void);
int cudaEventCreate(void **event);
int cudaEventDestroy(void *event);
int cudaEventRecord(void *event, void *stream);
int cudaEventSynchronize(void *event);
int cudaEventElapsedTime(float *ms, void *begin, void *end);

WEAK int cudaEventCreate(void **event) {
    *event = calloc(1, sizeof(double));
    return *event ? 0 : 2;
}
WEAK int cudaEventDestroy(void *event) { return free(event), 0; }
WEAK int cudaEventRecord(void *event, void *stream) {
    struct timespec t;
    const int code = cudaDeviceSynchronize();
    (void)stream;
    clock_gettime(CLOCK_MONOTONIC, &t);
    *(double *)event = (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
    return code;
}
WEAK int cudaEventSynchronize(void *event) { return (void)event, cudaDeviceSynchronize(); }
WEAK int cudaEventElapsedTime(float *ms, void *begin, void *end) {
    *ms = (float)(*(double *)end - *(double *)begin);
    return 0;
}
