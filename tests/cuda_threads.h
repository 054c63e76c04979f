/* cuda_threads.h - the launches of kahan_opt_cuda.cuh by threads: 256 of them run a block at the same time, as on a
   GPU, so that the thread sanitizer sees where a barrier is missing. Blocks run one after the other. */
#ifndef CUDA_THREADS_H
#define CUDA_THREADS_H
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>

typedef void work_of_thread(void *arguments, uint32_t block, uint32_t blocks, uint32_t thread, uint32_t *shared);
static struct {
    pthread_barrier_t begin, end, all[2], warp[8][2]; /* by turns: see below */
    work_of_thread *work;
    void *arguments;
    uint32_t block, blocks, value[256], *shared;
    int running;
} pool;
static __thread uint32_t my_thread, my_turn, my_warp_turn;

/* One barrier for all turns would hide races: a thread that wakes up late would see what the others did before they
   came to it again, as the thread sanitizer takes a barrier for. */
static void kopt_threads_barrier(void) { pthread_barrier_wait(&pool.all[my_turn++ & 1]); }
static void kopt_threads_warp(void) { pthread_barrier_wait(&pool.warp[my_thread >> 5][my_warp_turn++ & 1]); }

static uint32_t kopt_threads_exchange(uint32_t x, int distance) {
    uint32_t other;
    pool.value[my_thread] = x;
    kopt_threads_warp();
    other = pool.value[my_thread ^ (uint32_t)distance];
    kopt_threads_warp();
    return other;
}

static void *pool_thread(void *number) {
    my_thread = (uint32_t)(uintptr_t)number;
    for (;;) {
        pthread_barrier_wait(&pool.begin);
        pool.work(pool.arguments, pool.block, pool.blocks, my_thread, pool.shared);
        pthread_barrier_wait(&pool.end);
    }
    return NULL;
}

/* shared: words of shared memory, with any values in them at first. */
static void launch(work_of_thread *work, void *arguments, uint32_t blocks, size_t shared) {
    uint32_t i;
    if (!pool.running) {
        pthread_attr_t small;
        pthread_attr_init(&small), pthread_attr_setstacksize(&small, 1 << 18);
        pthread_barrier_init(&pool.begin, NULL, 257), pthread_barrier_init(&pool.end, NULL, 257);
        for (i = 0; i < 2; ++i) pthread_barrier_init(&pool.all[i], NULL, 256);
        for (i = 0; i < 16; ++i) pthread_barrier_init(&pool.warp[i / 2][i % 2], NULL, 32);
        for (i = 0; i < 256; ++i) {
            pthread_t thread;
            if (pthread_create(&thread, &small, pool_thread, (void *)(uintptr_t)i) != 0) abort();
            pthread_detach(thread);
        }
        pool.running = 1;
    }
    pool.work = work, pool.arguments = arguments, pool.blocks = blocks;
    pool.shared = malloc(4 * shared + 1);
    for (pool.block = 0; pool.block < blocks; ++pool.block) {
        size_t k;
        for (k = 0; k < shared; ++k) pool.shared[k] = 0xdeadbeef;
        pthread_barrier_wait(&pool.begin);
        pthread_barrier_wait(&pool.end);
    }
    free(pool.shared);
}
#else /* the second reading, by kahan_opt_cuda.cuh */

typedef struct {
    kopt_cuda_arguments_ *a;
    kopt_cuda_compression_ *k;
} threads_arguments;

#define KERNEL_LANES(i, name, rule, weight, grad, moment, rounding, small_stores, copies)                             \
    static void threads_##name(void *arguments, uint32_t block, uint32_t blocks, uint32_t thread, uint32_t *shared) { \
        const threads_arguments *const t = arguments;                                                                 \
        (void)shared;                                                                                                 \
        kopt_cuda_step_lane_(t->a, block * 8 + (thread >> 5), blocks * 8, thread & 31, rule, weight, grad, moment,    \
                             rounding, small_stores, copies);                                                         \
    }
KOPT_CUDA_ALL_(KERNEL_LANES)

#define KERNEL_BLOCKS(i, name, rule, weight, grad, moment, rounding, small_stores, copies)                            \
    static void threads_##name(void *arguments, uint32_t block, uint32_t blocks, uint32_t thread, uint32_t *shared) { \
        const threads_arguments *const t = arguments;                                                                 \
        kopt_cuda_step_blocks_(t->a, block * 8 + (thread >> 5), blocks * 8, thread & 31,                              \
                               shared + (thread >> 5) * (weight < 0 ? 4 : 2) * KOPT_SLOTS_, rule, weight, grad,       \
                               rounding, small_stores, copies);                                                       \
    }
KOPT_CUDA_ALL_BLOCKS_(KERNEL_BLOCKS)

static void threads_measure(void *arguments, uint32_t block, uint32_t blocks, uint32_t thread, uint32_t *shared) {
    const threads_arguments *const t = arguments;
    KOPT_CUDA_MEASURE_BLOCK_(t->a, block, blocks, thread, shared);
}

static void threads_stats(void *arguments, uint32_t block, uint32_t blocks, uint32_t thread, uint32_t *shared) {
    const threads_arguments *const t = arguments;
    KOPT_CUDA_STATS_BLOCK_(t->a, block, blocks, thread, shared);
}

static void threads_compress(void *arguments, uint32_t block, uint32_t blocks, uint32_t thread, uint32_t *shared) {
    const threads_arguments *const t = arguments;
    kopt_cuda_compress_blocks_(t->k, block * 8 + (thread >> 5), blocks * 8, thread & 31,
                               shared + (thread >> 5) * KOPT_WAITING_);
}

#define KERNEL_NAME(i, name, rule, weight, grad, moment, rounding, small_stores, copies) threads_##name,
static kopt_result kopt_cuda_launch_step_(int kernel, kopt_cuda_arguments_ *a, uint32_t blocks, void *stream) {
    static work_of_thread *const table[] = {KOPT_CUDA_ALL_(KERNEL_NAME) KOPT_CUDA_ALL_BLOCKS_(KERNEL_NAME)};
    threads_arguments t = {a, NULL};
    (void)stream;
    launch(table[kernel], &t, blocks, 8 * 4 * KOPT_SLOTS_);
    return KOPT_OK;
}

static kopt_result kopt_cuda_launch_measure_(kopt_cuda_arguments_ *a, size_t size, uint32_t blocks, void *stream) {
    threads_arguments t = {a, NULL};
    (void)stream;
    memset(a->ratios, 0, size);
    launch(threads_measure, &t, blocks, 256 * 32);
    return KOPT_OK;
}

static kopt_result kopt_cuda_launch_stats_(kopt_cuda_arguments_ *a, uint32_t blocks, void *stream) {
    threads_arguments t = {a, NULL};
    (void)stream;
    memset(&a->control->norm, 0, KOPT_CUDA_CLEARED_);
    launch(threads_stats, &t, blocks, 256 * 32);
    return KOPT_OK;
}

static kopt_result kopt_cuda_launch_compress_(kopt_cuda_compression_ *k, void *stream) {
    threads_arguments t = {NULL, k};
    (void)stream;
    launch(threads_compress, &t, 2, 8 * KOPT_WAITING_);
    if (k->steps != NULL) ++*k->steps;
    return KOPT_OK;
}
#endif
