/* cuda.c - what a step costs on a GPU, next to the device-to-device copy. Bits first: what differs from the CPU is not
   timed. Medians of CUDA events, eager and from a graph; before each measured call the cache is overwritten, unless the
   arrays are much larger. Linked with the object that nvcc made of kahan_opt_cuda.cuh. With KAHAN_OPT_VMATH (here
   and there) it measures only the rules that this adds, and two others to compare.

       cuda [N]          everything; N elements in the large tensors (default 2^27). Below 2^20 the other lists shrink
                         to some hundred elements and each call is made once or twice: a rehearsal
       cuda quick [N]    the copy and three modes, with large tensors only
       cuda modes        the names of the modes, the most important ones first
       cuda step MODE N  one step, for a profiler
   The table goes to stdout, and to the file that CUDA_ROWS names as lines NAME,VALUE,UNIT,VERDICT, where NAME is
   WHO | LIST | WHAT, and VERDICT is pass or miss where there is a goal. bench/cuda_peers.py adds PyTorch. Exit status:
   1 if bits are wrong or CUDA has an error. */
#define _POSIX_C_SOURCE 200809L /* clock_gettime() */
#define KAHAN_OPT_IMPLEMENTATION
#include "../kahan_opt.h"
#include "../kahan_opt_cuda.cuh"

#include "../tests/gpu/cuda_device.h"

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

/* Median microseconds of one call: 11 calls at least, and about 0.1 s of them. */
static double device_time(work *w, void *context, int cold) {
    static double times[MOST];
    const size_t least = rehearsal ? 1 : 11;
    size_t n = 0;
    double total = 0;
    cudaEvent_t begin, end;
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    w(context), finish();
    while (n < least || (!rehearsal && total < 1e5 && n < MOST)) {
        float ms = 0;
        if (cold) CHECK(cudaMemsetAsync(flush, (int)n, 4 * cache, stream));
        CHECK(cudaEventRecord(begin, stream));
        w(context);
        CHECK(cudaEventRecord(end, stream));
        CHECK(cudaEventSynchronize(end));
        CHECK(cudaEventElapsedTime(&ms, begin, end));
        times[n++] = (double)ms * 1e3;
        total += (double)ms * 1e3;
    }
    CHECK(cudaEventDestroy(begin));
    CHECK(cudaEventDestroy(end));
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

/* Of `repeats` calls captured in one graph. */
static double graph_time(work *w, void *context, int cold, int repeats) {
    cudaGraph_t graph;
    cudaGraphExec_t replay;
    double time;
    int i;
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    for (i = 0; i < repeats; ++i) w(context);
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&replay, graph, 0));
    time = device_time(launch_graph, &replay, cold);
    CHECK(cudaGraphExecDestroy(replay));
    CHECK(cudaGraphDestroy(graph));
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
    printf("%-32s %-14s WRONG BITS: not timed\n", who, list);
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

/* The same on the GPU; from number 2^20 on they repeat. zeros: nine of ten are 0, in rows of 1,024. */
static void device_fill(void *device, kopt_format f, size_t n, uint64_t salt, int zeros) {
    enum { OWN = 1 << 20 };
    static unsigned char host[4 * OWN];
    const size_t size = n * width(f);
    size_t done = (n < OWN ? n : OWN) * width(f), k;
    fill(host, f, n < OWN ? n : OWN, salt);
    for (k = 0; zeros && k < done; k += 1024 * width(f))
        if (k / width(f) / 1024 % 10 != 0) memset(host + k, 0, done - k < 1024 * width(f) ? done - k : 1024 * width(f));
    to_device(device, host, done);
    while (done < size) {
        const size_t next = size - done < done ? size - done : done;
        CHECK(cudaMemcpyAsync((unsigned char *)device + done, device, next, cudaMemcpyDeviceToDevice, stream));
        done += next;
    }
    finish();
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
    const kopt_cuda_options options = {1, 1.0, NULL, NULL, NULL};
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
        if (count < 300 || k == 0) { /* the many small ones get the numbers of the first, below */
            device_fill(weight, m->weight, n, 1, 0);
            device_fill(grad, m->grad, n, 7777, 0);
        } else if (sizes[k] == sizes[0]) {
            CHECK(
                cudaMemcpyAsync(weight, r->tensors[0].weight, n * width(m->weight), cudaMemcpyDeviceToDevice, stream));
            CHECK(cudaMemcpyAsync(grad, r->tensors[0].grad, n * width(m->grad), cudaMemcpyDeviceToDevice, stream));
        }
        r->elements += (double)n;
    }
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

int main(int argc, char **argv) {
    size_t k;
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
    if (argc > 1 + quick) large = strtoull(argv[1 + quick], NULL, 10) & ~(size_t)1023;
    if (large == 0) return 2;
    rehearsal = large < (size_t)1 << 20;
    cache = (size_t)device_attribute(cudaDevAttrL2CacheSize);
    if (cache == 0) cache = 1024; /* a runtime that does not say */
    flush = device_new(4 * cache);
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
