/* cuda_day.c - what takes a GPU minutes: every fp32 number as a gradient, arrays of more than 2^32 elements. The CPU
   makes the same steps, in all its threads.

       cuda_day numbers [BITS]       all 2^32 numbers, or 2^BITS of them, through one step of each mode
       cuda_day large [N]            N elements, by default 2^32 + 17
   Linked with the object that nvcc made of kahan_opt_cuda.cuh. */
#define _DEFAULT_SOURCE /* sysconf() */
#define KAHAN_OPT_IMPLEMENTATION
#include "../../kahan_opt.h"
#include "../../kahan_opt_cuda.cuh"

#include "cuda_device.h"
#include "../unit/tap.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- Threads: each takes every so-manieth piece ------------------------------------------------------------------ */

enum { PIECE = 1 << 16 };

typedef void piece_work(void *context, uint64_t piece);
typedef struct share {
    piece_work *work;
    void *context;
    uint64_t first, step, end;
} share;

static void *take_share(void *argument) {
    const share *const s = argument;
    uint64_t piece;
    for (piece = s->first; piece < s->end; piece += s->step) s->work(s->context, piece);
    return NULL;
}

enum { THREADS_AT_MOST = 64 };

static void in_threads(piece_work *work, void *context, uint64_t pieces) {
    const long processors = sysconf(_SC_NPROCESSORS_ONLN);
    const size_t threads = processors < 1 ? 1 : processors > THREADS_AT_MOST ? THREADS_AT_MOST : (size_t)processors;
    pthread_t ids[THREADS_AT_MOST];
    share shares[THREADS_AT_MOST];
    size_t i;
    for (i = 0; i < threads; ++i) {
        shares[i].work = work, shares[i].context = context;
        shares[i].first = i, shares[i].step = threads, shares[i].end = pieces;
        if (pthread_create(&ids[i], NULL, take_share, &shares[i]) != 0) abort();
    }
    for (i = 0; i < threads; ++i) pthread_join(ids[i], NULL);
}

/* ---- Plans of one tensor ----------------------------------------------------------------------------------------- */

typedef struct made_plan {
    kopt_cuda_plan plan;
    void *bytes, *device;
} made_plan;

static void make_plan(made_plan *p, const kopt_optimizer *opt, const kopt_tensor *t) {
    const kopt_cuda_group group = {opt, t, 1};
    const size_t size = kopt_cuda_plan_size(&group, 1);
    p->bytes = malloc(size), p->device = device_new(size);
    DONE(kopt_cuda_plan_build(&p->plan, p->bytes, size, &group, 1));
    DONE(kopt_cuda_plan_upload(&p->plan, p->device, stream));
}

static void discard_plan(made_plan *p) {
    kopt_cuda_status status;
    from_device(&status, kopt_cuda_plan_status(&p->plan), sizeof status);
    DONE((kopt_result)status.result);
    device_free(p->device), free(p->bytes);
}

/* NULL, and a skipped test, if the GPU has too little. */
static unsigned char *memory_for(const char *name, uint64_t n, size_t size) {
    if (device_room() >= size + size / 16) return device_new(size);
    skip("the GPU's memory is too small for it");
    row(name, (double)n, "elements", "skip");
    return NULL;
}

/* ---- Every number: each is the gradient of a weight of its own, which takes one step from 0 ---------------------- */

typedef struct mode {
    const char *name;
    int rule; /* 0 SGD, 1 AdamW, 2 Adam-atan2, 3 smooth Lion */
    kopt_format weight, moment;
    kopt_rounding rounding;
} mode;
static const mode modes[] = {
#ifdef KAHAN_OPT_VMATH
    {"Adam-atan2 fp32", 2, KOPT_F32, KOPT_F32, KOPT_NEAREST},
    {"smooth Lion fp32", 3, KOPT_F32, KOPT_F32, KOPT_NEAREST},
#else
    {"SGD to bf16 NEAREST", 0, KOPT_BF16, KOPT_BF16, KOPT_NEAREST},
    {"SGD to bf16 STOCHASTIC", 0, KOPT_BF16, KOPT_BF16, KOPT_STOCHASTIC},
    {"SGD to fp16 NEAREST", 0, KOPT_FP16, KOPT_FP16, KOPT_NEAREST},
    {"SGD to fp16 STOCHASTIC", 0, KOPT_FP16, KOPT_FP16, KOPT_STOCHASTIC},
    {"SGD to bf16 EXACT", 0, KOPT_BF16, KOPT_BF16, KOPT_EXACT},
    {"SGD to fp16 KAHAN", 0, KOPT_FP16, KOPT_FP16, KOPT_KAHAN},
    {"AdamW fp32", 1, KOPT_F32, KOPT_F32, KOPT_NEAREST},
    {"AdamW bf16 KAHAN", 1, KOPT_BF16, KOPT_BF16, KOPT_KAHAN},
    {"AdamW fp16 KAHAN", 1, KOPT_FP16, KOPT_FP16, KOPT_KAHAN},
#endif
};

static kopt_optimizer optimizer_of(const mode *m) {
    kopt_optimizer o = m->rule == 1 ? kopt_adamw(0.01) : kopt_sgd(1, 0);
#ifdef KAHAN_OPT_VMATH
    if (m->rule == 2) o = kopt_adam_atan2(0.01);
    if (m->rule == 3) o = kopt_smooth_lion(0.01, 1);
#endif
    o.first_moment_format = o.second_moment_format = m->moment, o.rounding = m->rounding;
    return o;
}

static size_t width(kopt_format f) { return f == KOPT_F32 ? 4 : 2; }

typedef struct chunk {
    const mode *mode;
    uint64_t first; /* number of its first number */
    int bits;
    size_t n;
    uint32_t *grad;
    unsigned char *weight, *state; /* what the GPU made; the state without its header */
    unsigned char *bad;            /* of each piece: is it wrong? */
} chunk;

/* Number i of 2^bits: all words in order, or a sample. */
static uint32_t number(uint64_t i, int bits) { return (uint32_t)(bits == 32 ? i : i * 2654435769u); }

static void fill_piece(void *context, uint64_t k) {
    chunk *const c = context;
    size_t i;
    for (i = k * PIECE; i < c->n && i < (k + 1) * PIECE; ++i) c->grad[i] = number(c->first + i, c->bits);
}

/* The arrays of a state block, with their bytes per weight. */
typedef struct part {
    size_t at, size;
} part;

static size_t parts_of(part *parts, const kopt_optimizer *o, kopt_format weights, size_t n) {
    const size_t width_of_moment = width(o->first_moment_format);
    const size_t residual = weights == KOPT_F32 || o->rounding < KOPT_KAHAN ? 0 : 2;
    size_t count = 0, at = 64, k;
    const size_t moments = o->rule == KOPT_RULE_SGD ? 0 : o->rule == KOPT_RULE_LION ? 1 : 2;
    if (residual) parts[count].at = at, parts[count++].size = residual, at += (n * residual + 15) / 16 * 16;
    for (k = 0; k < moments; ++k)
        parts[count].at = at, parts[count++].size = width_of_moment, at += (n * width_of_moment + 15) / 16 * 16;
    return count;
}

static void check_piece(void *context, uint64_t k) {
    chunk *const c = context;
    const size_t m = c->n - k * PIECE < PIECE ? c->n - k * PIECE : PIECE, size = width(c->mode->weight);
    kopt_optimizer o = optimizer_of(c->mode);
    const size_t state_size = state_bytes(&o, c->mode->weight, m);
    unsigned char *const weight = calloc(m, size), *const state = calloc(state_size + 1, 1);
    kopt_tensor t = kopt_tensor_of(weight, c->mode->weight, c->grad + k * PIECE, KOPT_F32, m, state_size ? state : NULL,
                                   state_size);
    part ours[4], theirs[4];
    size_t count, a;
    if (!weight || !state) abort();
    t.first_index = c->first + k * PIECE;
    DONE(kopt_state_init(&o, &t, 1, NULL));
    count = parts_of(ours, &o, c->mode->weight, m), parts_of(theirs, &o, c->mode->weight, c->n);
    DONE(kopt_optimizer_step(&o, &t, 1));
    c->bad[k] = memcmp(weight, c->weight + k * PIECE * size, m * size) != 0;
    for (a = 0; a < count; ++a)
        c->bad[k] |=
            memcmp(state + ours[a].at, c->state + theirs[a].at + k * PIECE * ours[a].size, m * ours[a].size) != 0;
    free(weight), free(state);
}

static void every_number(const mode *m, int bits) {
    const size_t n = (size_t)1 << (bits < 26 ? bits : 26), weight_size = n * width(m->weight);
    kopt_optimizer o = optimizer_of(m);
    const size_t state_size = state_bytes(&o, m->weight, n);
    unsigned char *const memory = memory_for(m->name, n, 4 * n + weight_size + state_size + 1024);
    const uint64_t pieces = (n + PIECE - 1) / PIECE;
    uint64_t wrong = 0, k;
    kopt_tensor t;
    chunk c;
    if (!memory) return;
    t = kopt_tensor_of(memory + 4 * n, m->weight, memory, KOPT_F32, n, NULL, state_size);
    if (state_size) t.state = memory + 4 * n + weight_size;
    c.mode = m, c.bits = bits, c.n = n, c.grad = host_new(4 * n), c.weight = host_new(weight_size);
    c.state = host_new(state_size + 1), c.bad = malloc(pieces);
    for (c.first = 0; c.first < UINT64_C(1) << bits; c.first += n) {
        made_plan p;
        t.first_index = c.first;
        in_threads(fill_piece, &c, pieces);
        to_device(t.grad, c.grad, 4 * n);
        CHECK(cudaMemsetAsync(t.weight, 0, weight_size, stream));
        DONE(kopt_cuda_state_init(&o, &t, 1, NULL, stream));
        make_plan(&p, &o, &t);
        DONE(kopt_cuda_plan_step(&p.plan, stream));
        from_device(c.weight, t.weight, weight_size);
        if (state_size) from_device(c.state, t.state, state_size);
        discard_plan(&p);
        in_threads(check_piece, &c, pieces);
        for (k = 0; k < pieces; ++k) {
            if (c.bad[k] && wrong == 0)
                note("%s: from number %08x on", m->name, (unsigned)number(c.first + k * PIECE, bits));
            wrong += c.bad[k] != 0;
        }
    }
    ok(wrong == 0, "%s, 2^%d numbers: %llu pieces differ from the CPU", m->name, bits, (unsigned long long)wrong);
    row(m->name, (double)(UINT64_C(1) << bits), "numbers", wrong == 0 ? "pass" : "fail");
    cudaFreeHost(c.grad), cudaFreeHost(c.weight), cudaFreeHost(c.state), free(c.bad), device_free(memory);
}

/* ---- More than 2^32 elements: windows of them are what the CPU makes of the same windows as shards --------------- */

enum { WINDOW = 8192 }; /* and fewer at the end */

static void large_step(const char *name, kopt_format moment_format, uint64_t n) {
    const uint64_t half = n > UINT64_C(1) << 32 ? UINT64_C(1) << 31 : n / 2, all = 2 * half;
    const uint64_t windows[] = {0, (n / 3) & ~UINT64_C(255), (half - 4096) & ~UINT64_C(255),
                                (all - 8192) & ~UINT64_C(255), (n - 4096) & ~UINT64_C(255)}; /* as blocks of moments */
    kopt_optimizer o = kopt_adamw(0.01);
    const size_t room = (size_t)((n * 2 + 255) & ~UINT64_C(255));
    kopt_tensor t;
    kopt_norm norm, sum;
    unsigned char *memory;
    static uint16_t grads[1 << 16];
    size_t state_size, k, a, bad = 0;
    made_plan p;
    uint64_t i;
    o.first_moment_format = o.second_moment_format = moment_format;
    state_size = state_bytes(&o, KOPT_BF16, (size_t)n);
    memory = memory_for(name, n, 2 * room + state_size);
    if (!memory) return;
    t = kopt_tensor_of(memory, KOPT_BF16, memory + room, KOPT_BF16, (size_t)n, memory + 2 * room, state_size);
    CHECK(cudaMemsetAsync(t.weight, 0x3c, (size_t)n * 2, stream));
    CHECK(cudaMemsetAsync(t.grad, 0x3d, (size_t)n * 2, stream));
    CHECK(cudaMemsetAsync(t.state, 0, state_size, stream));
    make_plan(&p, &o, &t);
    DONE(kopt_cuda_plan_measure(&p.plan, stream));
    from_device(&norm, kopt_cuda_plan_norm(&p.plan, NULL), sizeof norm);
    for (k = 0; k < 3; ++k) DONE(kopt_cuda_plan_step(&p.plan, stream));
    finish();
    for (k = 0; k < sizeof windows / sizeof windows[0]; ++k) {
        static uint16_t weight[WINDOW], grad[WINDOW], seen[WINDOW];
        static unsigned char state[KOPT_STATE_BYTES(WINDOW, 6)];
        const size_t m = n - windows[k] < WINDOW ? (size_t)(n - windows[k]) : WINDOW;
        kopt_optimizer q = kopt_adamw(0.01);
        kopt_tensor w = kopt_tensor_of(weight, KOPT_BF16, grad, KOPT_BF16, m, state, sizeof state);
        q.first_moment_format = q.second_moment_format = moment_format;
        w.state_size = kopt_state_size(&q, &w);
        memset(weight, 0x3c, sizeof weight), memset(grad, 0x3d, sizeof grad);
        w.first_index = windows[k];
        DONE(kopt_state_init(&q, &w, 1, NULL));
        for (a = 0; a < 3; ++a) DONE(kopt_optimizer_step(&q, &w, 1));
        from_device(seen, (uint16_t *)t.weight + windows[k], 2 * m);
        bad += memcmp(seen, weight, 2 * m) != 0;
        from_device(seen, (unsigned char *)t.state + 64 + windows[k] * 2, 2 * m); /* the compensation */
        bad += memcmp(seen, state + 64, 2 * m) != 0;
    }
    memset(&sum, 0, sizeof sum), memset(grads, 0x3d, sizeof grads);
    for (i = 0; i < n; i += 1 << 16)
        DONE(kopt_norm_add(&sum, grads, KOPT_BF16, n - i < 1 << 16 ? (size_t)(n - i) : 1 << 16));
    bad += memcmp(&sum, &norm, sizeof sum) != 0;
    discard_plan(&p), device_free(memory);
    ok(bad == 0, "%s, %llu elements: three steps and the norm; %d parts differ from the CPU", name,
       (unsigned long long)n, (int)bad);
    row(name, (double)n, "elements", bad == 0 ? "pass" : "fail");
}

int main(int argc, char **argv) {
    const char *const command = argc > 1 ? argv[1] : "";
    if (strcmp(command, "large") == 0) {
        const uint64_t n = argc > 2 ? strtoull(argv[2], NULL, 10) : (UINT64_C(1) << 32) + 17;
        if (n < 2 * WINDOW) return 2;
        if (!device_begin()) return 77;
        large_step("AdamW bf16 KAHAN", KOPT_BF16, n);
        large_step("AdamW bf16 KAHAN 8-bit moments", KOPT_Q8, n);
        return done();
    }
    if (strcmp(command, "numbers") == 0) {
        const int bits = argc > 2 ? atoi(argv[2]) : 32;
        size_t k;
        if (bits < 1 || bits > 32) return 2;
        if (!device_begin()) return 77;
        for (k = 0; k < sizeof modes / sizeof modes[0]; ++k) every_number(&modes[k], bits);
        return done();
    }
    fputs("usage: cuda_day numbers [BITS] | large [N]\n", stderr);
    return 2;
}
