/* cuda_fake_test.c - what cuda_fake.sh runs: one kernel of cuda_fake_test.ptx, or one use of the runtime.
   Prints "right", "wrong: ..." or what cuda_fake.c bails out with. Argument: which. */
#include "cuda_fake.h"

#include <stdio.h>
#include <stdlib.h>

typedef struct {
    unsigned x, y, z;
} dim3;
void __cudaRegisterFunction(void **, const char *, char *, const char *, int, void *, void *, void *, void *, int *);
int cudaLaunchKernel(const void *, dim3, dim3, void **, size_t, void *);
int cudaFuncGetAttributes(void *, const void *);
int cudaMalloc(void **, size_t);
int cudaFree(void *);
int cudaMemset(void *, int, size_t);
int cudaMemsetAsync(void *, int, size_t, void *);
int cudaMemcpy(void *, const void *, size_t, int);
int cudaMemcpyAsync(void *, const void *, size_t, int, void *);
int cudaStreamCreateWithFlags(void **, unsigned);
int cudaStreamSynchronize(void *);
int cudaDeviceSynchronize(void);
int cudaStreamBeginCapture(void *, int);
int cudaStreamEndCapture(void *, void **);
int cudaGraphInstantiate(void **, void *, unsigned long long);
int cudaGraphLaunch(void *, void *);
int cudaPeekAtLastError(void);
int cudaGetLastError(void);

static uint32_t *out;
static void *stream;

static char host[2];

static int launch_in(void *in, const char *kernel, unsigned blocks, unsigned threads, uint64_t by) {
    void *arguments[] = {&out, &by};
    __cudaRegisterFunction(NULL, host, NULL, kernel, 0, NULL, NULL, NULL, NULL, NULL);
    return cudaLaunchKernel(host, (dim3){blocks, 1, 1}, (dim3){threads, 1, 1}, arguments, 0, in);
}

static void launch(const char *kernel, unsigned blocks, unsigned threads, uint64_t by) {
    if (launch_in(stream, kernel, blocks, threads, by) != 0) printf("wrong: launch\n");
    cudaStreamSynchronize(stream);
}

static int check(const char *what, int good) {
    if (!good) printf("wrong: %s\n", what);
    return good;
}
#define CHECK(condition) check(#condition, condition)

/* The results of `values` in thread 7. */
static void values(void) {
    static const uint32_t expected[32] = {
        0x88664422, 0xe8e8e8e8, 0x23456788, 0x88000000, 0x12,   0xffffffab, 0x12345f78, 0xffffffff,
        0,          0x00400000, 0xbf800000, 0x7fffffff, 16,     15,         0xc0000000, 0xfffffffb,
        2,          99,         99,         7,          7,      3,          496,        0xaaaaaaaa,
        33,         22,         77,         154,        0x3e00, 0xfffffffe, 0xffffffff, 0x3fc00001};
    launch("values", 1, 32, 0);
    for (int i = 0; i < 32; ++i)
        if (out[7 * 32 + i] != expected[i]) printf("wrong: %d: %08x, not %08x\n", i, out[7 * 32 + i], expected[i]);
    CHECK(out[1 * 32 + 17] == 31 && out[30 * 32 + 18] == 0 && out[2 * 32 + 23] == 0x55555555);
}

static void streams(void) {
    void *other;
    uint32_t word = 0;
    cudaStreamCreateWithFlags(&other, 1);
    cudaMemset(out, 0, 4), cudaDeviceSynchronize();
    CHECK(launch_in(stream, "store", 1, 1, 0) == 0 && *out == 0);
    cudaMemcpy(&word, out, 4, 2); /* the default stream does not wait for this one */
    CHECK(word == 0);
    cudaStreamSynchronize(stream);
    CHECK(*out == 1);
    cudaMemsetAsync(out, 1, 4, stream), cudaMemsetAsync(out, 2, 4, other);
    cudaDeviceSynchronize(); /* in an order that one would not expect */
    CHECK(*out == 0x01010101);
    cudaMemsetAsync(out, 3, 4, stream), cudaMemcpyAsync(&word, out, 4, 2, stream);
    CHECK(word == 0x03030303);                                     /* to pageable memory: waits */
    word = 5, cudaMemcpyAsync(out, &word, 4, 1, stream), word = 6; /* from it: is read now */
    cudaStreamSynchronize(stream);
    CHECK(*out == 5);
    CHECK(cudaMemcpy(out, &word, 1 << 20, 1) == 1 && cudaMemcpy(&word, &word, 4, 1) == 1);
}

static void captures(void) {
    void *graph, *exec, *p;
    uint32_t word = 7;
    launch("store", 1, 1, 4); /* loads it */
    cudaMemset(out, 0, 64), cudaDeviceSynchronize();
    CHECK(cudaStreamBeginCapture(stream, 0) == 0);
    CHECK(launch_in(stream, "store", 1, 1, 4) == 0 && cudaMemcpyAsync(out, &word, 4, 1, stream) == 0);
    CHECK(cudaStreamEndCapture(stream, &graph) == 0 && cudaGraphInstantiate(&exec, graph, 0) == 0 && out[1] == 0);
    word = 8; /* a graph reads at its replay */
    CHECK(cudaGraphLaunch(exec, stream) == 0 && cudaStreamSynchronize(stream) == 0 && out[0] == 8 && out[1] == 1);
    cudaStreamBeginCapture(stream, 0);
    CHECK(cudaMalloc(&p, 8) == 900 && cudaStreamEndCapture(stream, &graph) == 901 && graph == NULL);
    cudaStreamBeginCapture(stream, 0);
    CHECK(cudaStreamSynchronize(stream) == 900 && cudaStreamEndCapture(stream, &graph) == 901);
    cudaStreamBeginCapture(stream, 0);
    CHECK(cudaMemset(out, 0, 4) == 900 && cudaFree(NULL) == 900 && cudaStreamEndCapture(stream, &graph) == 901);
    cudaStreamBeginCapture(stream, 2);
    CHECK(cudaMalloc(&p, 8) == 0 && cudaStreamEndCapture(stream, &graph) == 0);
}

static void loads(void) {
    void *graph;
    ptx_fail_loads(2);
    CHECK(launch_in(stream, "store", 1, 1, 0) == 2 && cudaFuncGetAttributes(NULL, host) == 2);
    ptx_fail_loads(0);
    cudaStreamBeginCapture(stream, 0);
    CHECK(launch_in(stream, "store", 1, 1, 0) == 900 && cudaStreamEndCapture(stream, &graph) == 901);
    CHECK(cudaFuncGetAttributes(NULL, &graph) == 98 && cudaFuncGetAttributes(NULL, host) == 0);
    ptx_fail_loads(2); /* too late */
    cudaStreamBeginCapture(stream, 0);
    CHECK(launch_in(stream, "store", 1, 1, 0) == 0 && cudaStreamEndCapture(stream, &graph) == 0);
    ptx_unload();
    CHECK(launch_in(stream, "store", 1, 1, 0) == 2);
    ptx_fail_loads(0), ptx_fail_launch(2);
    CHECK(launch_in(stream, "store", 1, 1, 0) == 0 && launch_in(stream, "store", 1, 1, 0) == 2);
    CHECK(launch_in(stream, "store", 1, 1, 0) == 0);
}

static void errors(void) {
    CHECK(cudaMemset(NULL, 0, 9) == 1 && cudaPeekAtLastError() == 1 && cudaMemset(out, 0, 4) == 0);
    CHECK(cudaGetLastError() == 1 && cudaGetLastError() == 0);
    CHECK(launch_in(stream, "store", 0, 32, 0) == 9 && launch_in(stream, "store", 1, 2000, 0) == 9);
}

int main(int argc, char **argv) {
    const char *which = argc > 1 ? argv[1] : "";
    enum { SIZE = 4096 + 8 };
    cudaStreamCreateWithFlags(&stream, 1);
    cudaMalloc((void **)&out, SIZE);
    CHECK(out[5] != out[6]); /* noise */
    memset(out, 0, SIZE);
    if (strcmp(which, "values") == 0) {
        values();
    } else if (strcmp(which, "loop") == 0) {
        launch("loop", 1, 2, 0);
    } else if (strcmp(which, "count") == 0) {
        for (int i = 0; i < 3; ++i) launch("loop", 1, 1, 0);
        CHECK(*out == 10 && ptx_instructions() == 3 * 44 && ptx_longest_thread("loop") == 44);
    } else if (strcmp(which, "last_block") == 0) {
        launch("last_block", 3, 64, 0);
        CHECK(out[0] == 3 && out[1] == 128 && out[2] == 128 && out[3] == 128);
    } else if (strcmp(which, "neighbour") == 0) {
        launch("neighbour", 2, 64, 0);
    } else if (strcmp(which, "neighbour_once") == 0) {
        launch("neighbour", 1, 64, 0);
        CHECK(out[0] == 1 && out[1] == 0 && out[63] == 62);
    } else if (strcmp(which, "global_race") == 0) {
        launch("global_race", 1, 1, 0);
        launch("global_race", 1, 1, 0); /* another launch is no race */
        CHECK(*out == 2);
        launch("global_race", 2, 1, 0);
    } else if (strcmp(which, "store") == 0) {
        launch("store", 1, 1, SIZE - 4);
        CHECK(out[SIZE / 4 - 1] == 1);
    } else if (strcmp(which, "misaligned") == 0) {
        launch("store", 1, 1, 2);
    } else if (strcmp(which, "beyond") == 0) {
        launch("store", 1, 1, SIZE);
    } else if (strcmp(which, "before") == 0) {
        launch("store", 1, 1, (uint64_t)-4);
    } else if (strcmp(which, "host") == 0) {
        out = malloc(64);
        launch("store", 1, 1, 0);
    } else if (strcmp(which, "freed") == 0) {
        cudaFree(out);
        launch("store", 1, 1, 0);
    } else if (strcmp(which, "shared_noise") == 0) {
        uint32_t first;
        launch("shared_load", 1, 1, 4), first = *out;
        launch("shared_load", 1, 1, 4);
        CHECK(first != *out);
    } else if (strcmp(which, "shared_beyond") == 0) {
        launch("shared_load", 1, 1, 8);
    } else if (strcmp(which, "local_load") == 0) {
        launch("local_load", 1, 1, 12);
    } else if (strcmp(which, "local_beyond") == 0) {
        launch("local_load", 1, 1, 16);
    } else if (strcmp(which, "streams") == 0) {
        streams();
    } else if (strcmp(which, "captures") == 0) {
        captures();
    } else if (strcmp(which, "loads") == 0) {
        loads();
    } else if (strcmp(which, "errors") == 0) {
        errors();
    } else {
        launch(which, 1, 64, 0);
    }
    printf("right\n");
    return 0;
}
