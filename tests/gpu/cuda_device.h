/* cuda_device.h - memory of a GPU, copies and errors, for the C programs that run on one: every call is checked, all
   work is on one stream of its own, and no memory is managed. row() writes what they measure as comma-separated lines
   NAME,VALUE,UNIT,VERDICT to the file that the variable CUDA_ROWS names; a name has no comma. */
#ifndef CUDA_DEVICE_H
#define CUDA_DEVICE_H

#include <cuda_runtime_api.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static cudaStream_t stream;

static inline void cuda_checked(cudaError_t error, const char *what, int line) {
    if (error == cudaSuccess) return;
    printf("Bail out! line %d: %s: %s\n", line, what, cudaGetErrorString(error));
    exit(1);
}
#define CHECK(call) cuda_checked(call, #call, __LINE__)

static inline void result_checked(kopt_result result, const char *what, int line) {
    if (result == KOPT_OK) return;
    printf("Bail out! line %d: %s: %s\n", line, what, kopt_result_string(result));
    exit(1);
}
#define DONE(call) result_checked(call, #call, __LINE__)

/* The end of all work so far. */
static inline void finish(void) { CHECK(cudaStreamSynchronize(stream)); }

static inline void *device_new(size_t size) {
    void *p = NULL;
    CHECK(cudaMalloc(&p, size ? size : 1));
    return p;
}

static inline void device_free(void *p) { CHECK(cudaFree(p)); }

static inline void to_device(void *device, const void *host, size_t size) {
    CHECK(cudaMemcpyAsync(device, host, size, cudaMemcpyHostToDevice, stream));
    finish();
}

static inline void from_device(void *host, const void *device, size_t size) {
    CHECK(cudaMemcpyAsync(host, device, size, cudaMemcpyDeviceToHost, stream));
    finish();
}

static inline size_t device_room(void) {
    size_t room = 0, all = 0;
    CHECK(cudaMemGetInfo(&room, &all));
    return room;
}

static inline int device_attribute(enum cudaDeviceAttr attribute) {
    int value = 0;
    CHECK(cudaDeviceGetAttribute(&value, attribute, 0));
    return value;
}

/* Memory of the host that copies quickly; ordinary memory if there is none. */
static inline void *host_new(size_t size) {
    void *p = NULL;
    if (cudaHostAlloc(&p, size, cudaHostAllocDefault) == cudaSuccess) return p;
    (void)cudaGetLastError();
    p = malloc(size);
    if (!p) printf("Bail out! out of memory\n"), exit(1);
    return p;
}

/* Begins work on the first GPU. 0: there is none, and the reason is printed as TAP. */
static inline int device_begin(void) {
    int devices = 0;
    const cudaError_t error = cudaGetDeviceCount(&devices);
    if (error != cudaSuccess || devices == 0) {
        printf("1..0 # SKIP no usable CUDA device (code %d)\n", (int)error);
        return 0;
    }
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    return 1;
}

static inline size_t state_bytes(const kopt_optimizer *opt, kopt_format weights, size_t n) {
    const kopt_tensor t = kopt_tensor_of(NULL, weights, NULL, KOPT_F32, n, NULL, 0);
    return kopt_state_size(opt, &t);
}

static inline void row(const char *name, double value, const char *unit, const char *verdict) {
    static FILE *rows;
    const char *const path = getenv("CUDA_ROWS");
    if (!rows && path) rows = fopen(path, "a");
    if (!rows) return;
    fprintf(rows, "%s,%.6g,%s,%s\n", name, value, unit, verdict);
    fflush(rows);
}

#endif
