/* offload.c - the optimizer on the CPU, the model on a GPU: state and steps are here, weights and gradients travel in
   pieces.

       cc -O2 -o offload docs/examples/offload.c -I/usr/local/cuda/include -L/usr/local/cuda/lib64 -lcudart && ./offload

   The GPU keeps weights and gradients, 4 bytes of each parameter in bf16; the host has the weights once more, the state
   (6 bytes with KOPT_KAHAN) and two pieces of gradient. A step brings 2 bytes of each parameter over the link and sends
   2 back. Pieces take two streams in turn: while one is stepped, the gradient of the next arrives and the weights of
   the one before leave. The memory is page-locked: otherwise a copy waits for the CPU. A piece is a shard of its
   tensor, with a state block of its own, so the bits are those of a step of the whole. Arguments: the number of
   parameters, and that of a piece, a multiple of 64. Exit status 1 if a bit differs from a step of the whole. */
#define KAHAN_OPT_IMPLEMENTATION
#include "../../kahan_opt.h"

#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct offload {
    kopt_tensor *pieces; /* in the memory of the host; their gradients are in two buffers, in turn */
    size_t count, each;  /* pieces; parameters of each but the last */
    kopt_bf16 *gpu_weights, *gpu_grads;
    cudaStream_t streams[2];
} offload;

static void check(int bad) {
    if (!bad) return;
    fputs("offload: there is no GPU, or no memory\n", stderr);
    exit(2);
}

static void *page_locked(size_t size) {
    void *p = NULL;
    check(cudaHostAlloc(&p, size, cudaHostAllocDefault) != cudaSuccess);
    return p;
}

/* Of a tensor of n parameters on the GPU, whose weights are read. */
static void begin(offload *o, const kopt_optimizer *opt, kopt_bf16 *gpu_weights, kopt_bf16 *gpu_grads, size_t n,
                  size_t each) {
    kopt_bf16 *const weights = page_locked(n * sizeof *weights), *const grads = page_locked(2 * each * sizeof *grads);
    size_t i;
    o->count = (n + each - 1) / each, o->each = each;
    o->gpu_weights = gpu_weights, o->gpu_grads = gpu_grads;
    o->pieces = malloc(o->count * sizeof *o->pieces);
    check(o->pieces == NULL || cudaMemcpy(weights, gpu_weights, n * 2, cudaMemcpyDeviceToHost) != cudaSuccess ||
          cudaStreamCreate(&o->streams[0]) != cudaSuccess || cudaStreamCreate(&o->streams[1]) != cudaSuccess);
    for (i = 0; i < o->count; ++i) {
        const size_t at = i * each, size = n - at < each ? n - at : each;
        kopt_tensor *const t = &o->pieces[i];
        *t = kopt_tensor_of(weights + at, KOPT_BF16, grads + i % 2 * each, KOPT_BF16, size, NULL, 0);
        t->first_index = at; /* all have the id of their tensor, 0 */
        t->state_size = kopt_state_size(opt, t);
        t->state = malloc(t->state_size);
        check(t->state == NULL);
    }
    check(kopt_state_init(opt, o->pieces, o->count, NULL) != KOPT_OK);
}

/* Requests the gradient of piece i. */
static void fetch(const offload *o, size_t i) {
    if (i < o->count)
        check(cudaMemcpyAsync(o->pieces[i].grad, o->gpu_grads + i * o->each, o->pieces[i].n * 2, cudaMemcpyDeviceToHost,
                              o->streams[i % 2]) != cudaSuccess);
}

/* A step, when the gradients are complete. */
static void step(const offload *o, kopt_optimizer *opt) {
    kopt_step s;
    size_t i;
    check(kopt_step_begin(&s, opt) != KOPT_OK);
    fetch(o, 0), fetch(o, 1);
    for (i = 0; i < o->count; ++i) {
        const kopt_tensor *const t = &o->pieces[i];
        check(cudaStreamSynchronize(o->streams[i % 2]) != cudaSuccess); /* its gradient is here */
        check(kopt_step_run(&s, t, 1) != KOPT_OK);                      /* threads.c shares this among threads */
        check(cudaMemcpyAsync(o->gpu_weights + i * o->each, t->weight, t->n * 2, cudaMemcpyHostToDevice,
                              o->streams[i % 2]) != cudaSuccess);
        fetch(o, i + 2);
    }
    for (i = 0; i < 2; ++i) check(cudaStreamSynchronize(o->streams[i]) != cudaSuccess);
}

int main(int argc, char **argv) {
    const size_t n = argc > 1 ? strtoul(argv[1], NULL, 10) : 1u << 26;
    const size_t each = argc > 2 ? strtoul(argv[2], NULL, 10) : 1u << 22;
    kopt_optimizer opt = kopt_adamw(1e-3), same = opt;
    kopt_bf16 *const weights = malloc(n * 2), *const grads = malloc(n * 2), *const result = malloc(n * 2);
    kopt_tensor whole = kopt_tensor_of(weights, KOPT_BF16, grads, KOPT_BF16, n, NULL, 0);
    void *gpu_weights = NULL, *gpu_grads = NULL;
    offload o;
    size_t i;
    int k, differ;
    if (n == 0 || each == 0 || each % 64 != 0) return 2;
    whole.state_size = kopt_state_size(&opt, &whole);
    whole.state = malloc(whole.state_size);
    check(weights == NULL || grads == NULL || result == NULL || whole.state == NULL ||
          cudaMalloc(&gpu_weights, n * 2) != cudaSuccess || cudaMalloc(&gpu_grads, n * 2) != cudaSuccess);
    for (i = 0; i < n; ++i) weights[i] = kopt_bf16_from_f32((float)(i % 1999 + 1) / 2000);
    check(cudaMemcpy(gpu_weights, weights, n * 2, cudaMemcpyHostToDevice) != cudaSuccess);
    check(kopt_state_init(&same, &whole, 1, NULL) != KOPT_OK);
    begin(&o, &opt, gpu_weights, gpu_grads, n, each);
    for (k = 0; k < 5; ++k) {
        for (i = 0; i < n; ++i) grads[i] = kopt_bf16_from_f32((float)((i + (size_t)k * 77) % 201) / 100 - 1);
        /* in place of forward and backward pass */
        check(cudaMemcpy(gpu_grads, grads, n * 2, cudaMemcpyHostToDevice) != cudaSuccess);
        step(&o, &opt);
        check(kopt_optimizer_step(&same, &whole, 1) != KOPT_OK);
    }
    check(cudaMemcpy(result, gpu_weights, n * 2, cudaMemcpyDeviceToHost) != cudaSuccess);
    differ = memcmp(result, weights, n * 2) != 0;
    printf(
        "%lu parameters in %lu pieces: in a step 2 bytes of each come from the GPU, and 2 go back; the bits %s those "
        "of a step of the whole\n",
        (unsigned long)n, (unsigned long)o.count, differ ? "are not" : "are");
    return differ;
}
