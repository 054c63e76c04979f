/* cuda.c - what a step costs on a GPU, next to the device-to-device copy. Bits first: what differs from the CPU is not
   timed; after its times, three windows of each list make one more step, which must be that of the CPU. Medians of CUDA
   events, eager and from a graph; before each measured call the cache is overwritten, unless the arrays are much
   larger. Linked with the object that nvcc made of kahan_opt_cuda.cuh. With KAHAN_OPT_VMATH (here and there) it
   measures only the rules that this adds, and two others to compare.

       cuda [N]          everything; N elements in the large tensors (default 2^27). Below 2^20 the other lists shrink
                         to some hundred elements and each call is made once or twice: a rehearsal
       cuda quick [N]    the copy and three modes, with large tensors only
       cuda modes        the names of the modes, the most important ones first
       cuda step MODE N  one step, for a profiler
       cuda beside OTHER.so [N]
                         each mode and list beside those of another commit: this file and its kernels as a shared
                         library, made with the headers of that commit
   The table goes to stdout, and to the file that CUDA_ROWS names as lines NAME,VALUE,UNIT,VERDICT, where NAME is
   WHO | LIST | WHAT, and VERDICT is pass or miss where there is a goal. bench/cuda_peers.py adds PyTorch. Exit status:
   1 if bits are wrong or CUDA has an error. */
#define _POSIX_C_SOURCE 200809L /* clock_gettime() */
#define KAHAN_OPT_IMPLEMENTATION
#include "../kahan_opt.h"
#include "../kahan_opt_cuda.cuh"

#include "../tests/gpu/cuda_device.h"

#include <dlfcn.h>
#include <time.h>

/* ---- Timing ------------------------------------------------------------------------------------------------------ */

typedef void work(void *context);

static size_t large = (size_t)1 << 27; /* elements */
static int rehearsal, quick;
static size_t cache;     /* bytes of L2 */
static void *flush;      /* memory of four times that size */
static double copy_rate; /* bytes per microsecond, read and written */

static int compare_doubles(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

enum { MOST = 1000 };

/* Microseconds of one call. */
static double time_of(work *w, void *context, int cold) {
    static cudaEvent_t begin, end;
    float ms = 0;
    if (!begin) {
        CHECK(cudaEventCreate(&begin));
        CHECK(cudaEventCreate(&end));
    }
    if (cold) CHECK(cudaMemsetAsync(flush, 0, 4 * cache, stream));
    CHECK(cudaEventRecord(begin, stream));
    w(context);
    CHECK(cudaEventRecord(end, stream));
    CHECK(cudaEventSynchronize(end));
    CHECK(cudaEventElapsedTime(&ms, begin, end));
    return (double)ms * 1e3;
}

/* Median microseconds of one call: 11 calls at least, and about 0.1 s of them. */
static double device_time(work *w, void *context, int cold) {
    static double times[MOST];
    const size_t least = rehearsal ? 1 : 11;
    size_t n = 0;
    double total = 0;
    w(context), finish();
    while (n < least || (!rehearsal && total < 1e5 && n < MOST)) total += times[n++] = time_of(w, context, cold);
    qsort(times, n, sizeof times[0], compare_doubles);
    return times[n / 2];
}

/* Median microseconds of the host for one call, the GPU being idle. */
static double host_time(work *w, void *context) {
    double times[51];
    const size_t n = rehearsal ? 1 : 51;
    size_t i;
    for (i = 0; i < n; ++i) {
        struct timespec begin, end;
        finish();
        clock_gettime(CLOCK_MONOTONIC, &begin);
        w(context);
        clock_gettime(CLOCK_MONOTONIC, &end);
        times[i] = (double)(end.tv_sec - begin.tv_sec) * 1e6 + (double)(end.tv_nsec - begin.tv_nsec) * 1e-3;
    }
    finish();
    qsort(times, n, sizeof times[0], compare_doubles);
    return times[n / 2];
}

static void launch_graph(void *context) {
    cudaGraphExec_t *const replay = context;
    CHECK(cudaGraphLaunch(*replay, stream));
}

static cudaGraphExec_t captured(work *w, void *context, int repeats) {
    cudaGraph_t graph;
    cudaGraphExec_t replay;
    int i;
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    for (i = 0; i < repeats; ++i) w(context);
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&replay, graph, 0));
    CHECK(cudaGraphDestroy(graph));
    return replay;
}

/* Of `repeats` calls captured in one graph. */
static double graph_time(work *w, void *context, int cold, int repeats) {
    cudaGraphExec_t replay = captured(w, context, repeats);
    const double time = device_time(launch_graph, &replay, cold);
    CHECK(cudaGraphExecDestroy(replay));
    return time / repeats;
}

/* ---- The table --------------------------------------------------------------------------------------------------- */

static int wrong_bits;

static void put(const char *who, const char *list, const char *what, double value, const char *unit,
                const char *verdict) {
    char name[160];
    snprintf(name, sizeof name, "%s | %s | %s", who, list, what);
    row(name, value, unit, verdict);
}

static void put_bits(const char *who, const char *list, int equal) {
    put(who, list, "bits", equal, "equal", equal ? "pass" : "fail");
    if (equal) return;
    ++wrong_bits;
    printf("%-32s %-14s WRONG BITS\n", who, list);
}

/* Times of 0 were not measured. share_of: bytes per microsecond; goal: the share, or 0. */
static void put_times(const char *who, const char *list, double elements, double bytes, double eager, double graph,
                      double host, double share_of, double goal) {
    const double best = graph > 0 && graph < eager ? graph : eager, share = elements * bytes / best / share_of;
    const char *const verdict = goal <= 0 || rehearsal ? "" : share >= goal ? "pass" : "miss";
    printf("%-32s %-14s %10.1f us %10.1f us %7.1f us %8.2f Gel/s %6.2f B/el %6.1f %%", who, list, eager, graph, host,
           elements / best / 1e3, bytes, 100 * share);
    if (goal > 0) printf(" (goal %.0f %%)%s%s", 100 * goal, *verdict ? ": " : "", verdict);
    puts("");
    fflush(stdout);
    put(who, list, "eager", eager, "us", "");
    if (graph > 0) put(who, list, "graph", graph, "us", "");
    if (host > 0) put(who, list, "host", host, "us", "");
    put(who, list, "rate", elements / best / 1e3, "Gel/s", "");
    put(who, list, "bytes", bytes, "B/el", "");
    put(who, list, "share of copy", share, "1", verdict);
    if (goal > 0) put(who, list, "goal", goal, "1", "");
}

/* ---- Steps ------------------------------------------------------------------------------------------------------- */

typedef struct mode {
    const char *name;
    kopt_format weight, grad, moment;
    kopt_rounding rounding;
    int rule;        /* 0 SGD, 1 AdamW, 2 StableAdamW, 3 Adam-atan2, 4 smooth Lion, 5 Lion, 6 Adan, 7 AMSGrad */
    int copy, stats; /* copy: a bf16 copy of fp32 weights; stats: with norm, clipping and finite check */
    double bytes;    /* per element, read and written */
    double goal;     /* the share of the copy's rate, with a large tensor */
} mode;
static const mode modes[] = {
    {"AdamW bf16 KAHAN", KOPT_BF16, KOPT_BF16, KOPT_BF16, KOPT_KAHAN, 1, 0, 0, 18, 0.92},
#ifdef KAHAN_OPT_VMATH
    {"AdamW fp32", KOPT_F32, KOPT_F32, KOPT_F32, KOPT_NEAREST, 1, 0, 0, 28, 0.92},
    {"Adam-atan2 bf16 KAHAN", KOPT_BF16, KOPT_BF16, KOPT_BF16, KOPT_KAHAN, 3, 0, 0, 18, 0.85},
    {"smooth Lion bf16 KAHAN", KOPT_BF16, KOPT_BF16, KOPT_BF16, KOPT_KAHAN, 4, 0, 0, 14, 0.85},
#else
    {"AdamW bf16 KAHAN 8-bit moments", KOPT_BF16, KOPT_BF16, KOPT_Q8, KOPT_KAHAN, 1, 0, 0, 14.0625, 0.60},
    {"AdamW bf16 KAHAN fp32 moments", KOPT_BF16, KOPT_BF16, KOPT_F32, KOPT_KAHAN, 1, 0, 0, 26, 0.85},
    {"AdamW bf16 KAHAN norm clip", KOPT_BF16, KOPT_BF16, KOPT_BF16, KOPT_KAHAN, 1, 0, 1, 20, 0.85},
    {"AdamW fp32", KOPT_F32, KOPT_F32, KOPT_F32, KOPT_NEAREST, 1, 0, 0, 28, 0.92},
    {"AdamW bf16 EXACT", KOPT_BF16, KOPT_BF16, KOPT_BF16, KOPT_EXACT, 1, 0, 0, 18, 0.92},
    {"AdamW bf16 STOCHASTIC", KOPT_BF16, KOPT_BF16, KOPT_BF16, KOPT_STOCHASTIC, 1, 0, 0, 14, 0.85},
    {"StableAdamW bf16 KAHAN", KOPT_BF16, KOPT_BF16, KOPT_BF16, KOPT_KAHAN, 2, 0, 0, 22, 0.85},
    {"SGD momentum bf16 KAHAN", KOPT_BF16, KOPT_BF16, KOPT_BF16, KOPT_KAHAN, 0, 0, 0, 14, 0.85},
    {"Lion bf16 KAHAN", KOPT_BF16, KOPT_BF16, KOPT_BF16, KOPT_KAHAN, 5, 0, 0, 14, 0.85},
    {"AdamW fp16 KAHAN", KOPT_FP16, KOPT_FP16, KOPT_FP16, KOPT_KAHAN, 1, 0, 0, 18, 0.85},
    {"AdamW bf16 COMPACT", KOPT_BF16, KOPT_BF16, KOPT_BF16, KOPT_COMPACT, 1, 0, 0, 16, 0.85},
    {"AdamW bf16 NEAREST", KOPT_BF16, KOPT_BF16, KOPT_BF16, KOPT_NEAREST, 1, 0, 0, 14, 0.85},
    {"AdamW fp32 master bf16 copy", KOPT_F32, KOPT_BF16, KOPT_F32, KOPT_NEAREST, 1, 1, 0, 28, 0.92},
    {"AdamW bf16 COMPACT 8-bit moments", KOPT_BF16, KOPT_BF16, KOPT_Q8, KOPT_COMPACT, 1, 0, 0, 12.0625, 0.60},
    {"Adan bf16 KAHAN", KOPT_BF16, KOPT_BF16, KOPT_BF16, KOPT_KAHAN, 6, 0, 0, 26, 0.60},
    {"AMSGrad bf16 KAHAN", KOPT_BF16, KOPT_BF16, KOPT_BF16, KOPT_KAHAN, 7, 0, 0, 22, 0.60},
#endif
};
enum { MODES = sizeof modes / sizeof modes[0] };

static kopt_optimizer optimizer_of(const mode *m) {
    kopt_optimizer o = kopt_adamw(1e-3);
    switch (m->rule) {
    case 0: o = kopt_sgd(1e-3, 0.9); break;
    case 2: o = kopt_stable_adamw(1e-3); break;
#ifdef KAHAN_OPT_VMATH
    case 3: o = kopt_adam_atan2(1e-3); break;
    case 4: o = kopt_smooth_lion(1e-3, 10); break;
#endif
    case 5: o = kopt_lion(1e-3); break;
    case 6: o = kopt_adan(1e-3); break;
    case 7: o.amsgrad = 1; break;
    default: break;
    }
    o.first_moment_format = o.second_moment_format = m->moment;
    o.rounding = m->rounding;
    return o;
}

static size_t width(kopt_format f) { return f == KOPT_F32 ? 4 : 2; }
static size_t rounded(size_t bytes) { return (bytes + 511) & ~(size_t)255; }

/* Numbers with random fractions and signs, near 2^-4. */
static void fill(void *p, kopt_format f, size_t n, uint64_t salt) {
    size_t i;
    for (i = 0; i < n; ++i) {
        uint64_t x = (i + salt + 1) * UINT64_C(0x9E3779B97F4A7C15);
        uint32_t word;
        uint16_t half;
        x = (x ^ x >> 31) * UINT64_C(0xBF58476D1CE4E5B9);
        word = (uint32_t)(x >> 32);
        half = (uint16_t)(f == KOPT_BF16 ? (word >> 16 & 0x807Fu) | 0x3D80u : (word >> 16 & 0x83FFu) | 0x2C00u);
        word = (word & 0x807FFFFFu) | 0x3D800000u;
        if (f == KOPT_F32)
            memcpy((unsigned char *)p + 4 * i, &word, 4);
        else
            memcpy((unsigned char *)p + 2 * i, &half, 2);
    }
}

/* The same on the GPU, from a table; from its end on they repeat. zeros: nine of ten are 0, in rows of 1,024. */
static void device_fill(void *device, kopt_format f, size_t n, uint64_t salt, int zeros) {
    enum { OWN = 1 << 21, SALTS = 1 << 20 };
    static unsigned char *tables[2][3];
    const size_t bytes = width(f), size = n * bytes, from = salt % SALTS;
    size_t done = (n < OWN - from ? n : OWN - from) * bytes, k;
    if (!tables[zeros][f]) {
        unsigned char *const host = malloc(OWN * bytes);
        if (!host) abort();
        fill(host, f, OWN, 0);
        for (k = 0; zeros && k < OWN; k += 1024)
            if (k / 1024 % 10 != 0) memset(host + k * bytes, 0, 1024 * bytes);
        tables[zeros][f] = device_new(OWN * bytes);
        to_device(tables[zeros][f], host, OWN * bytes);
        free(host);
    }
    CHECK(cudaMemcpyAsync(device, tables[zeros][f] + from * bytes, done, cudaMemcpyDeviceToDevice, stream));
    while (done < size) {
        const size_t next = size - done < done ? size - done : done;
        CHECK(cudaMemcpyAsync((unsigned char *)device + done, device, next, cudaMemcpyDeviceToDevice, stream));
        done += next;
    }
}

/* Tensors in one piece of memory; their arrays begin `shift` bytes behind multiples of 256. */
typedef struct run {
    const mode *mode;
    kopt_optimizer opt;
    kopt_tensor *tensors;
    size_t count;
    kopt_cuda_plan plan;
    unsigned char *memory, *device;
    double elements;
} run;

/* 0: the GPU has not enough memory. */
static int make(run *r, const mode *m, const size_t *sizes, size_t count, size_t shift) {
    const kopt_cuda_options options = {1, 0, 1.0, NULL, NULL, NULL, {0, 0, 0, 0}};
    kopt_cuda_group group;
    size_t total = 1, k, size;
    unsigned char *p;
    void *bytes;
    memset(r, 0, sizeof *r);
    r->mode = m, r->opt = optimizer_of(m), r->count = count;
    for (k = 0; k < count; ++k)
        total += rounded(sizes[k] * width(m->weight)) + rounded(sizes[k] * width(m->grad)) +
                 rounded(state_bytes(&r->opt, m->weight, sizes[k])) + (m->copy ? rounded(sizes[k] * 2) : 0);
    if (total + total / 16 > device_room()) return 0;
    r->memory = p = device_new(total);
    CHECK(cudaMemsetAsync(p, 0, total, stream));
    r->tensors = malloc((count + 1) * sizeof *r->tensors);
    if (!r->tensors) abort();
    for (k = 0; k < count; ++k) {
        const size_t n = sizes[k], state_size = state_bytes(&r->opt, m->weight, n);
        unsigned char *const weight = p + shift, *const grad = weight + rounded(n * width(m->weight));
        unsigned char *const state = grad + rounded(n * width(m->grad));
        r->tensors[k] = kopt_tensor_of(weight, m->weight, grad, m->grad, n, state, state_size);
        r->tensors[k].id = (uint32_t)k;
        p = state - shift + rounded(state_size);
        if (m->copy) r->tensors[k].copy = p + shift, r->tensors[k].copy_format = KOPT_BF16, p += rounded(n * 2);
        device_fill(weight, m->weight, n, 1 + 97 * k, 0);
        device_fill(grad, m->grad, n, 7777 + 131 * k, 0);
        r->elements += (double)n;
    }
    DONE(kopt_cuda_state_init(&r->opt, r->tensors, count, NULL, stream));
    group.opt = &r->opt, group.tensors = r->tensors, group.count = count;
    size = kopt_cuda_plan_size(&group, 1);
    bytes = malloc(size);
    r->device = device_new(size);
    DONE(kopt_cuda_plan_build(&r->plan, bytes, size, &group, 1));
    DONE(kopt_cuda_plan_upload(&r->plan, r->device, stream));
    if (m->stats) DONE(kopt_cuda_plan_set_options(&r->plan, &options, stream));
    finish();
    return 1;
}

static void most_zero(run *r) {
    size_t k;
    for (k = 0; k < r->count; ++k) device_fill(r->tensors[k].grad, r->mode->grad, r->tensors[k].n, 7777, 1);
}

/* New addresses for all tensors: those that they have. */
static void move(void *context) {
    const run *const r = context;
    DONE(kopt_cuda_plan_set_arrays(&r->plan, 0, r->count, r->tensors, stream));
}

static void step(void *context) {
    const run *const r = context;
    if (r->mode->stats) DONE(kopt_cuda_plan_measure(&r->plan, stream));
    DONE(kopt_cuda_plan_step(&r->plan, stream));
}

static void statistics(void *context) {
    const run *const r = context;
    DONE(kopt_cuda_plan_measure(&r->plan, stream));
}

static void discard(run *r) {
    kopt_cuda_status status;
    from_device(&status, kopt_cuda_plan_status(&r->plan), sizeof status);
    if (status.result != KOPT_OK || status.skips != 0) {
        printf("Bail out! %s: a step was refused or skipped\n", r->mode->name);
        exit(1);
    }
    device_free(r->memory), device_free(r->device), free(r->plan.bytes), free(r->tensors);
}

/* Two steps are those of the CPU: weights, state, copy. The header of a state block is the host's. */
static int bits_equal(const mode *m, size_t n) {
    run r;
    const size_t weight_size = n * width(m->weight), grad_size = n * width(m->grad);
    unsigned char *const weight = malloc(weight_size), *const grad = malloc(grad_size), *const copy = calloc(n, 2);
    unsigned char *state, *seen;
    kopt_optimizer o = optimizer_of(m);
    const size_t state_size = state_bytes(&o, m->weight, n);
    kopt_tensor t;
    int k, equal = 1;
    if (!make(&r, m, &n, 1, 0)) {
        printf("Bail out! no memory for %d elements\n", (int)n);
        exit(1);
    }
    state = calloc(state_size + 1, 1), seen = malloc(weight_size + state_size + 2 * n);
    if (!weight || !grad || !copy || !state || !seen) abort();
    fill(weight, m->weight, n, 1), fill(grad, m->grad, n, 7777);
    t = kopt_tensor_of(weight, m->weight, grad, m->grad, n, state, state_size);
    if (m->copy) t.copy = copy, t.copy_format = KOPT_BF16;
    DONE(kopt_state_init(&o, &t, 1, NULL));
    if (m->stats) {
        kopt_norm norm;
        memset(&norm, 0, sizeof norm);
        DONE(kopt_norm_add(&norm, grad, m->grad, n));
        o.clip = kopt_norm_clip(&norm, 1.0, 1);
    }
    for (k = 0; k < 2; ++k) {
        step(&r);
        DONE(kopt_optimizer_step(&o, &t, 1));
    }
    from_device(seen, r.tensors[0].weight, weight_size);
    equal = equal && memcmp(seen, weight, weight_size) == 0;
    if (state_size > 64) {
        from_device(seen, r.tensors[0].state, state_size);
        equal = equal && memcmp(seen + 64, state + 64, state_size - 64) == 0;
    }
    if (m->copy) {
        from_device(seen, r.tensors[0].copy, 2 * n);
        equal = equal && memcmp(seen, copy, 2 * n) == 0;
    }
    discard(&r);
    free(weight), free(grad), free(copy), free(state), free(seen);
    return equal;
}

/* ---- Windows of a list: one step more of them is that of the CPU ------------------------------------------------- */

enum { WINDOW = 4096, WINDOWS = 3, ARRAYS = 12 };

/* Elements of a tensor in host memory, as a shard whose state is in arrays. */
typedef struct window {
    kopt_tensor t;
    kopt_state_arrays state;
    struct {
        void *host;
        const unsigned char *device;
        size_t size;
    } array[ARRAYS];
    size_t arrays;
} window;

static void *fetch(window *w, const void *device, size_t begin, size_t size) {
    void *const host = malloc(size + 1);
    if (!host || w->arrays == ARRAYS) abort();
    w->array[w->arrays].host = host, w->array[w->arrays].size = size;
    w->array[w->arrays].device = (const unsigned char *)device + begin;
    from_device(host, w->array[w->arrays++].device, size);
    return host;
}

/* Elements [begin, end) of tensor k, as the GPU has them. begin is a multiple of 64, as blocks of 8-bit moments are. */
static void open_window(window *w, const run *r, size_t k, size_t begin, size_t end) {
    const kopt_tensor *const t = &r->tensors[k];
    const size_t moment = r->mode->moment == KOPT_Q8 ? 1 : width(r->mode->moment), n = end - begin;
    const size_t residual = r->mode->rounding == KOPT_COMPACT ? 1 : 2, scales = (end + 63) / 64 - begin / 64;
    unsigned char *const block = malloc(t->state_size); /* only its header is read */
    kopt_tensor host = *t;
    kopt_state_arrays at;
    int m;
    if (!block) abort();
    from_device(block, t->state, 64);
    host.state = block;
    DONE(kopt_state_arrays_of(&r->opt, &host, &at));
    memset(w, 0, sizeof *w);
    w->t = *t, w->t.n = n, w->t.first_index = begin;
    w->t.weight = fetch(w, t->weight, begin * width(t->weight_format), n * width(t->weight_format));
    w->t.grad = fetch(w, t->grad, begin * width(t->grad_format), n * width(t->grad_format));
    if (t->copy) w->t.copy = fetch(w, t->copy, begin * 2, n * 2);
    w->t.state = NULL, w->t.state_size = 0, w->t.arrays = &w->state;
    w->state.size = sizeof w->state;
#define IN_STATE_(p) ((unsigned char *)t->state + ((unsigned char *)(p) - block))
    if (at.residual) w->state.residual = fetch(w, IN_STATE_(at.residual), begin * residual, n * residual);
    for (m = 0; m < 4; ++m) {
        if (at.moment[m]) w->state.moment[m] = fetch(w, IN_STATE_(at.moment[m]), begin * moment, n * moment);
        if (at.scale[m]) w->state.scale[m] = fetch(w, IN_STATE_(at.scale[m]), begin / 64, scales);
    }
#undef IN_STATE_
    free(block);
}

/* Are its arrays those on the GPU? Frees them. */
static int close_window(window *w) {
    int equal = 1;
    for (; w->arrays > 0; --w->arrays) {
        const size_t i = w->arrays - 1, size = w->array[i].size;
        void *const seen = malloc(size + 1);
        if (!seen) abort();
        from_device(seen, w->array[i].device, size);
        equal &= memcmp(seen, w->array[i].host, size) == 0;
        free(seen), free(w->array[i].host);
    }
    return equal;
}

/* `most` elements at the beginning of the first tensor, in the middle of the middle one, at the end of the last one;
   fewer windows if they are the same tensors, whole. */
static int open_windows(window *w, const run *r, size_t most) {
    const kopt_tensor *const t = r->tensors;
    const size_t middle = r->count / 2, last = r->count - 1, n = t[middle].n, end = t[last].n;
    const size_t begin = (n < most ? 0 : (n - most) / 2) & ~(size_t)63;
    open_window(&w[0], r, 0, 0, t[0].n < most ? t[0].n : most);
    if (last == 0 && n <= most) return 1;
    open_window(&w[1], r, middle, begin, n < most ? n : begin + most);
    open_window(&w[2], r, last, (end < most ? 0 : end - most) & ~(size_t)63, end);
    return WINDOWS;
}

/* The norm of all gradients, by the CPU. */
static kopt_norm norm_of(const run *r) {
    enum { PART = 1 << 20 };
    static unsigned char grad[4 * PART];
    const size_t bytes = width(r->mode->grad);
    kopt_norm norm;
    size_t k, i;
    memset(&norm, 0, sizeof norm);
    for (k = 0; k < r->count; ++k)
        for (i = 0; i < r->tensors[k].n; i += PART) {
            const size_t n = r->tensors[k].n - i < PART ? r->tensors[k].n - i : PART;
            from_device(grad, (unsigned char *)r->tensors[k].grad + i * bytes, n * bytes);
            DONE(kopt_norm_add(&norm, grad, r->mode->grad, n));
        }
    return norm;
}

static int windows_equal(run *r) {
    window w[WINDOWS];
    int k, count, equal = 1;
    from_device(&r->opt.step, kopt_cuda_plan_steps(&r->plan, 0), 4);
    count = open_windows(w, r, r->mode->rule == 2 ? SIZE_MAX : WINDOW); /* StableAdamW measures all of a tensor */
    step(r);
    if (r->mode->stats) {
        const kopt_norm norm = norm_of(r);
        r->opt.clip = kopt_norm_clip(&norm, 1.0, 1);
    }
    for (k = 0; k < count; ++k) {
        kopt_optimizer o = r->opt;
        DONE(kopt_optimizer_step(&o, &w[k].t, 1));
        equal &= close_window(&w[k]);
    }
    return equal;
}

/* ---- Lists of tensors -------------------------------------------------------------------------------------------- */

enum { LIST = 10000 };
typedef struct list {
    const char *name;
    size_t count, size; /* size 0: GPT-2; 1: `large` elements; 2: and 5 more */
    size_t shift;       /* of the arrays, in bytes */
    int all;            /* with every mode, not only the first */
    int zeros;          /* nine of ten gradients are 0, as those of an embedding: so are their second moments */
} list;
static const list lists[] = {
    {"large", 1, 1, 0, 1, 0},
    {"GPT-2 124M", 0, 0, 0, 1, 0},
    {"10000 x 64", 10000, 64, 0, 1, 0},
    {"1000 x 1024", 1000, 1024, 0, 1, 0},
    {"large 90 % zeros", 1, 1, 0, 0, 1},
    {"large n % 8 = 5", 1, 2, 0, 0, 0},
    {"1e3", 1, 1000, 0, 0, 0},
    {"1e4", 1, 10000, 0, 0, 0},
    {"1e5", 1, 100000, 0, 0, 0},
    {"1e6", 1, 1000000, 0, 0, 0},
    {"1e7", 1, 10000000, 0, 0, 0},
    {"1e9", 1, 1000000000, 0, 0, 0},
    {"200 x 1M", 200, 1048576, 0, 0, 0},
    {"10 x 16.8M", 10, 16777216, 0, 0, 0},
    {"large 2 bytes off", 1, 1, 2, 0, 0},
};

static size_t shrunk(size_t n) { return rehearsal && n > 300 ? n / 10000 + 300 : n; }

static size_t sizes_of(const list *l, size_t *sizes) {
    static const size_t layer[] = {768, 768, 768 * 2304, 2304, 768 * 768,  768,
                                   768, 768, 768 * 3072, 3072, 3072 * 768, 768};
    size_t n = 0, k;
    if (l->size == 0) {
        sizes[n++] = shrunk(50257 * 768), sizes[n++] = shrunk(1024 * 768);
        for (k = 0; k < 12 * sizeof layer / sizeof layer[0]; ++k)
            sizes[n++] = shrunk(layer[k % (sizeof layer / sizeof layer[0])]);
        sizes[n++] = shrunk(768), sizes[n++] = shrunk(768);
        return n;
    }
    for (n = 0; n < (rehearsal ? l->count / 300 + 1 : l->count); ++n)
        sizes[n] = l->size == 1 ? large : l->size == 2 ? large + 5 : shrunk(l->size);
    return n;
}

static void time_mode(const mode *m) {
    const size_t odd = rehearsal ? 1003 : 100003, whole = (size_t)1 << (rehearsal ? 11 : 17);
    static size_t sizes[LIST];
    const int equal = bits_equal(m, whole) && bits_equal(m, odd);
    size_t k;
    put_bits(m->name, "2^17 and 100003", equal);
    if (!equal) return;
    for (k = 0; k < sizeof lists / sizeof lists[0]; ++k) {
        const list *const l = &lists[k];
        const size_t count = sizes_of(l, sizes);
        double eager, graph, host;
        int cold;
        run r;
        if ((!l->all && m != modes) || (quick && l->size != 1)) continue;
        if (!make(&r, m, sizes, count, l->shift)) {
            printf("%-32s %-14s does not fit into memory\n", m->name, l->name);
            put(m->name, l->name, "memory", 0, "1", "skip");
            continue;
        }
        if (l->zeros) most_zero(&r);
        cold = r.elements * m->bytes < 8 * (double)cache;
        eager = device_time(step, &r, cold), host = host_time(step, &r), graph = graph_time(step, &r, cold, 1);
        put_times(m->name, l->name, r.elements, m->bytes, eager, graph, host, copy_rate,
                  l->size == 1 && l->shift == 0 ? m->goal : 0);
        if (l->size == 0 && m == modes) {
            const double time = device_time(move, &r, 0), own = host_time(move, &r);
            put("set_arrays", l->name, "eager", time, "us", "");
            put("set_arrays", l->name, "host", own, "us", "");
            printf("%-32s %-14s %10.2f us, %.2f us of the host\n", "set_arrays", l->name, time, own);
        }
        if (l->size == 64) {
            const double warm = graph_time(step, &r, 0, 1);
            const char *const verdict = m != modes || rehearsal ? "" : graph <= 60 ? "pass" : "miss";
            put(m->name, l->name, "at most 60 us", graph, "us", verdict);
            put(m->name, l->name, "graph in cache", warm, "us", "");
            if (m == modes)
                printf("%-32s %-14s goal: at most 60 us, is %.1f (%.1f in cache) %s\n", m->name, l->name, graph, warm,
                       verdict);
        }
        if (l->size == 1 && l->shift == 0 && (m == modes || m->weight == KOPT_F32) && !m->copy) {
            const double time = graph_time(statistics, &r, 0, 1), bytes = (double)width(m->grad);
            put_times(m->weight == KOPT_F32 ? "statistics fp32" : "statistics bf16", l->name, r.elements, bytes, time,
                      time, 0, copy_rate, 0.85);
        }
        put_bits(m->name, l->name, windows_equal(&r));
        discard(&r);
    }
}

enum { IN_ONE_GRAPH = 20 };

/* What a step costs beside its elements. */
static void time_launches(void) {
    size_t size = 64;
    run r;
    double time;
    if (!make(&r, modes, &size, 0, 0)) return;
    time = graph_time(step, &r, 0, IN_ONE_GRAPH);
    put("prologue", "no tensor", "graph of 20", time, "us", "");
    printf("%-32s %-14s %10.2f us of 20 in a graph\n", "prologue", "no tensor", time);
    time = graph_time(step, &r, 0, 1);
    put("prologue", "no tensor", "graph", time, "us", "");
    discard(&r);
    if (!make(&r, modes, &size, 1, 0)) return;
    time = graph_time(step, &r, 0, IN_ONE_GRAPH);
    put("step", "64 elements", "graph of 20", time, "us", "");
    printf("%-32s %-14s %10.2f us of 20 in a graph\n", "step", "64 elements", time);
    put("step", "64 elements", "graph", graph_time(step, &r, 0, 1), "us", "");
    put("step", "64 elements", "eager", device_time(step, &r, 0), "us", "");
    time = host_time(step, &r);
    put("step", "64 elements", "host", time, "us", "");
    printf("%-32s %-14s %10.2f us of the host\n", "step", "64 elements", time);
    discard(&r);
}

#ifndef KAHAN_OPT_VMATH
/* ---- Accumulation ------------------------------------------------------------------------------------------------ */

typedef struct sum {
    kopt_accumulator a;
    void *grad;
} sum;

/* The first addition does not read the sum: it is not timed. */
static void add(void *context) {
    sum *const s = context;
    DONE(kopt_cuda_accumulator_add(&s->a, s->grad, KOPT_BF16, 1, NULL, NULL, stream));
}

static void time_accumulation(void) {
    const size_t check = (size_t)1 << (rehearsal ? 11 : 17);
    static const char name[] = "accumulate bf16 KAHAN";
    kopt_accumulator host = kopt_accumulator_of(malloc(2 * check), KOPT_BF16, malloc(2 * check), check);
    unsigned char *const grad = malloc(2 * check), *const seen = malloc(2 * check);
    int equal = 1, k;
    sum s;
    if (!host.sum || !host.residual || !grad || !seen) abort();
    s.a = kopt_accumulator_of(device_new(2 * large), KOPT_BF16, device_new(2 * large), check);
    s.grad = device_new(2 * large);
    fill(grad, KOPT_BF16, check, 1), device_fill(s.grad, KOPT_BF16, large, 1, 0);
    for (k = 0; k < 3; ++k) add(&s), DONE(kopt_accumulator_add(&host, grad, KOPT_BF16, 1));
    from_device(seen, s.a.sum, 2 * check);
    equal = equal && memcmp(seen, host.sum, 2 * check) == 0;
    from_device(seen, s.a.residual, 2 * check);
    equal = equal && memcmp(seen, host.residual, 2 * check) == 0;
    put_bits(name, "2^17", equal);
    s.a.n = large, s.a.count = 0;
    add(&s);
    if (equal) put_times(name, "large", (double)large, 10, device_time(add, &s, 0), 0, 0, copy_rate, 0.85);
    device_free(s.a.sum), device_free(s.a.residual), device_free(s.grad);
    free(host.sum), free(host.residual), free(grad), free(seen);
}

#endif

/* ---- The copy ---------------------------------------------------------------------------------------------------- */

typedef struct copying {
    void *from, *to;
    size_t size;
} copying;

static void copy(void *context) {
    const copying *const c = context;
    CHECK(cudaMemcpyAsync(c->to, c->from, c->size, cudaMemcpyDeviceToDevice, stream));
}

static void time_copy(void) {
    copying c;
    double time;
    c.size = 16 * large; /* 2 GiB */
    c.from = device_new(c.size), c.to = device_new(c.size);
    CHECK(cudaMemsetAsync(c.from, 1, c.size, stream));
    finish();
    time = device_time(copy, &c, 0);
    copy_rate = 2 * (double)c.size / time;
    put_times("device-to-device copy", "16 B x large", (double)large, 32, time, 0, 0, copy_rate, 0);
    put("device-to-device copy", "16 B x large", "bandwidth", copy_rate / 1e6, "TB/s", "");
    device_free(c.from), device_free(c.to);
}

/* ---- Beside another commit: the same steps by the kernels of both, in turns -------------------------------------- */

enum { ROUNDS = 41 };

typedef struct side {
    void (*begin)(size_t elements);
    int (*make)(const char *mode, size_t list); /* 0: no such mode, or not enough memory */
    double (*time)(void);                       /* microseconds of one step, replayed from a graph */
    uint64_t (*end)(void);                      /* a hash of weights */
} side;

static run side_run;
static cudaGraphExec_t side_replay;

static void prepare(size_t elements) {
    large = elements & ~(size_t)1023;
    rehearsal = large < (size_t)1 << 20;
    cache = (size_t)device_attribute(cudaDevAttrL2CacheSize);
    if (cache == 0) cache = 1024; /* a runtime that does not say */
    flush = device_new(4 * cache);
}

static void side_begin(size_t elements) {
    if (!stream && !device_begin()) exit(77);
    prepare(elements);
}

static int side_make(const char *name, size_t l) {
    static size_t sizes[LIST];
    const size_t count = sizes_of(&lists[l], sizes);
    size_t k;
    for (k = 0; k < MODES && strcmp(modes[k].name, name) != 0; ++k) continue;
    if (k == MODES || !make(&side_run, &modes[k], sizes, count, lists[l].shift)) return 0;
    if (lists[l].zeros) most_zero(&side_run);
    side_replay = captured(step, &side_run, 1);
    return 1;
}

static double side_time(void) {
    return time_of(launch_graph, &side_replay, side_run.elements * side_run.mode->bytes < 8 * (double)cache);
}

/* Of the windows. */
static uint64_t side_end(void) {
    window w[WINDOWS];
    uint64_t hash = 0;
    int k, count = open_windows(w, &side_run, WINDOW);
    size_t i;
    for (k = 0; k < count; ++k) {
        for (i = 0; i < w[k].array[0].size; ++i)
            hash = (hash ^ ((unsigned char *)w[k].array[0].host)[i]) * UINT64_C(0x100000001B3);
        (void)close_window(&w[k]);
    }
    CHECK(cudaGraphExecDestroy(side_replay));
    discard(&side_run);
    return hash;
}

extern const side kopt_bench_side;
const side kopt_bench_side = {side_begin, side_make, side_time, side_end};

/* A line of the table: medians, and of the ratios of the rounds median and quartiles. */
static void compare_list(const side *const *sides, const char *mode, size_t l) {
    static double time[2][ROUNDS], ratio[ROUNDS];
    const int rounds = rehearsal ? 1 : ROUNDS;
    uint64_t hash[2];
    int r, k;
    for (k = 0; k < 2; ++k)
        if (!sides[k]->make(mode, l)) {
            if (k == 1) (void)sides[0]->end();
            printf("%-32s %-14s not in both, or too little memory\n", mode, lists[l].name);
            put(mode, lists[l].name, "beside", 0, "1", "skip");
            return;
        }
    for (k = 0; k < 2; ++k) (void)sides[k]->time(); /* the first step is not compared */
    for (r = 0; r < rounds; ++r) {
        for (k = 0; k < 2; ++k) time[(r + k) % 2][r] = sides[(r + k) % 2]->time(); /* each begins every other round */
        ratio[r] = time[1][r] / time[0][r];
    }
    for (k = 0; k < 2; ++k) {
        hash[k] = sides[k]->end();
        qsort(time[k], (size_t)rounds, sizeof(double), compare_doubles);
    }
    qsort(ratio, (size_t)rounds, sizeof(double), compare_doubles);
    printf("%-32s %-14s %10.1f us %10.1f us %8.3f   %.3f %.3f%s\n", mode, lists[l].name, time[0][rounds / 2],
           time[1][rounds / 2], ratio[rounds / 2], ratio[rounds / 4], ratio[rounds - 1 - rounds / 4],
           hash[0] == hash[1] ? "" : "   OTHER WEIGHTS");
    fflush(stdout);
    put(mode, lists[l].name, "other", time[0][rounds / 2], "us", "");
    put(mode, lists[l].name, "this", time[1][rounds / 2], "us", "");
    put(mode, lists[l].name, "this/other", ratio[rounds / 2], "1", hash[0] == hash[1] ? "" : "fail");
    wrong_bits += hash[0] != hash[1];
}

static int beside(const char *path) {
    void *const library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    const side *const other = library ? dlsym(library, "kopt_bench_side") : NULL;
    const side *const sides[2] = {other, &kopt_bench_side};
    size_t k, l;
    if (!other) return printf("Bail out! %s\n", dlerror()), 1;
    other->begin(large);
    printf("%-32s %-14s %13s %13s %8s   quartiles\n", "", "", "other", "this", "ratio");
    for (k = 0; k < MODES; ++k)
        for (l = 0; l < sizeof lists / sizeof lists[0]; ++l)
            if (lists[l].all || k == 0) compare_list(sides, modes[k].name, l);
    return wrong_bits != 0;
}

int main(int argc, char **argv) {
    size_t k;
    int words;
    if (argc > 1 && strcmp(argv[1], "modes") == 0) {
        for (k = 0; k < MODES; ++k) puts(modes[k].name);
        return 0;
    }
    if (!device_begin()) return 77;
    if (argc > 3 && strcmp(argv[1], "step") == 0) {
        const size_t n = strtoull(argv[3], NULL, 10);
        for (k = 0; k < MODES; ++k)
            if (strcmp(argv[2], modes[k].name) == 0) {
                run r;
                if (!make(&r, &modes[k], &n, 1, 0)) return 1;
                step(&r);
                discard(&r);
                return 0;
            }
        return 2;
    }
    quick = argc > 1 && strcmp(argv[1], "quick") == 0;
    words = quick ? 1 : argc > 2 && strcmp(argv[1], "beside") == 0 ? 2 : 0;
    prepare(argc > 1 + words ? strtoull(argv[1 + words], NULL, 10) : large);
    if (large == 0) return 2;
    if (words == 2) return beside(argv[2]);
    printf("sm_%d%d, %d processors, L2 %d MB; large: %lu elements\n",
           device_attribute(cudaDevAttrComputeCapabilityMajor), device_attribute(cudaDevAttrComputeCapabilityMinor),
           device_attribute(cudaDevAttrMultiProcessorCount), (int)(cache >> 20), (unsigned long)large);
    printf("%-32s %-14s %13s %13s %10s %37s\n", "", "", "eager", "graph", "host", "of the copy");
    time_copy();
    if (!quick) time_launches();
    for (k = 0; k < (quick ? 3 : MODES); ++k) time_mode(&modes[k]);
#ifndef KAHAN_OPT_VMATH
    if (!quick) time_accumulation();
#endif
    device_free(flush);
    printf("bits: %d wrong\n", wrong_bits);
    return wrong_bits != 0;
}
