/* cuda.c - what a step costs on a GPU, next to the device-to-device copy. Bits first: what differs from the CPU is not
   timed. Medians of CUDA events, eager and from a graph; before each measured call the cache is overwritten, unless the
   arrays are much larger. Linked with the object that nvcc made of kahan_opt_cuda.cuh, with KAHAN_OPT_VMATH.

       cuda [N]          everything; N elements in the large tensors (default 2^27). Below 2^20 the other lists shrink
                         to some hundred elements and each call is made once or twice: a rehearsal
       cuda modes        the names of the modes
       cuda step MODE N  one step, for a profiler
   The table goes to stdout, and to the file that CUDA_ROWS names as lines NAME,VALUE,UNIT,VERDICT, where NAME is
   WHO | LIST | WHAT, and VERDICT is pass or miss where there is a goal. bench/cuda_peers.py adds PyTorch. Exit status:
   1 if bits are wrong or CUDA has an error. */
#define _POSIX_C_SOURCE 200809L /* clock_gettime() */
#define KAHAN_OPT_IMPLEMENTATION
#define KAHAN_OPT_VMATH
#include "../kahan_opt.h"
#include "../kahan_opt_cuda.cuh"

#include "../tests/cuda_device.h"

#include <time.h>

/* ---- Timing ------------------------------------------------------------------------------------------------------ */

typedef void work(void *context);

static size_t large = (size_t)1 << 27; /* elements */
static int rehearsal;
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
    int rule;        /* 0 SGD, 1 AdamW, 2 StableAdamW, 3 Adam-atan2, 4 smooth Lion */
    int copy, stats; /* copy: a bf16 copy of fp32 weights; stats: with norm, clipping and finite check */
    double bytes;    /* per element, read and written */
    double goal;     /* the share of the copy's rate, with a large tensor */
} mode;
static const mode modes[] = {
    {"AdamW bf16 KAHAN", KOPT_BF16, KOPT_BF16, KOPT_BF16, KOPT_KAHAN, 1, 0, 0, 18, 0.92},
    {"AdamW bf16 EXACT", KOPT_BF16, KOPT_BF16, KOPT_BF16, KOPT_EXACT, 1, 0, 0, 18, 0.92},
    {"AdamW fp32", KOPT_F32, KOPT_F32, KOPT_F32, KOPT_NEAREST, 1, 0, 0, 28, 0.92},
    {"AdamW fp32 master bf16 copy", KOPT_F32, KOPT_BF16, KOPT_F32, KOPT_NEAREST, 1, 1, 0, 28, 0.92},
    {"AdamW bf16 COMPACT", KOPT_BF16, KOPT_BF16, KOPT_BF16, KOPT_COMPACT, 1, 0, 0, 16, 0.85},
    {"AdamW bf16 STOCHASTIC", KOPT_BF16, KOPT_BF16, KOPT_BF16, KOPT_STOCHASTIC, 1, 0, 0, 14, 0.85},
    {"AdamW bf16 NEAREST", KOPT_BF16, KOPT_BF16, KOPT_BF16, KOPT_NEAREST, 1, 0, 0, 14, 0.85},
    {"AdamW fp16 KAHAN", KOPT_FP16, KOPT_FP16, KOPT_FP16, KOPT_KAHAN, 1, 0, 0, 18, 0.85},
    {"AdamW bf16 KAHAN fp32 moments", KOPT_BF16, KOPT_BF16, KOPT_F32, KOPT_KAHAN, 1, 0, 0, 26, 0.85},
    {"SGD momentum bf16 KAHAN", KOPT_BF16, KOPT_BF16, KOPT_BF16, KOPT_KAHAN, 0, 0, 0, 14, 0.85},
    {"AdamW bf16 KAHAN 8-bit moments", KOPT_BF16, KOPT_BF16, KOPT_Q8, KOPT_KAHAN, 1, 0, 0, 14.0625, 0.60},
    {"AdamW bf16 COMPACT 8-bit moments", KOPT_BF16, KOPT_BF16, KOPT_Q8, KOPT_COMPACT, 1, 0, 0, 12.0625, 0.60},
    {"StableAdamW bf16 KAHAN", KOPT_BF16, KOPT_BF16, KOPT_BF16, KOPT_KAHAN, 2, 0, 0, 22, 0.85},
    {"Adam-atan2 bf16 KAHAN", KOPT_BF16, KOPT_BF16, KOPT_BF16, KOPT_KAHAN, 3, 0, 0, 18, 0.85},
    {"smooth Lion bf16 KAHAN", KOPT_BF16, KOPT_BF16, KOPT_BF16, KOPT_KAHAN, 4, 0, 0, 14, 0.85},
    {"AdamW bf16 KAHAN norm clip", KOPT_BF16, KOPT_BF16, KOPT_BF16, KOPT_KAHAN, 1, 0, 1, 20, 0.85},
};
enum { MODES = sizeof modes / sizeof modes[0] };

static kopt_optimizer optimizer_of(const mode *m) {
    kopt_optimizer o = m->rule == 4   ? kopt_smooth_lion(1e-3, 10)
                       : m->rule == 3 ? kopt_adam_atan2(1e-3)
                       : m->rule == 2 ? kopt_stable_adamw(1e-3)
                       : m->rule == 1 ? kopt_adamw(1e-3)
                                      : kopt_sgd(1e-3, 0.9);
    o.weight_format = m->weight;
    o.moment_format = m->moment;
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

/* The same on the GPU; from number 2^20 on they repeat. */
static void device_fill(void *device, kopt_format f, size_t n, uint64_t salt) {
    enum { OWN = 1 << 20 };
    static unsigned char host[4 * OWN];
    const size_t size = n * width(f);
    size_t done = (n < OWN ? n : OWN) * width(f);
    fill(host, f, n < OWN ? n : OWN, salt);
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
                 rounded(kopt_state_size(&r->opt, sizes[k])) + (m->copy ? rounded(sizes[k] * 2) : 0);
    if (total + total / 16 > device_room()) return 0;
    r->memory = p = device_new(total);
    CHECK(cudaMemsetAsync(p, 0, total, stream));
    r->tensors = malloc((count + 1) * sizeof *r->tensors);
    if (!r->tensors) abort();
    for (k = 0; k < count; ++k) {
        const size_t n = sizes[k], state_size = kopt_state_size(&r->opt, n);
        unsigned char *const weight = p + shift, *const grad = weight + rounded(n * width(m->weight));
        unsigned char *const state = grad + rounded(n * width(m->grad));
        r->tensors[k] = kopt_tensor_of(weight, grad, m->grad, n, state, state_size);
        r->tensors[k].id = (uint32_t)k;
        p = state - shift + rounded(state_size);
        if (m->copy) r->tensors[k].copy = p + shift, r->tensors[k].copy_format = KOPT_BF16, p += rounded(n * 2);
        if (count < 300 || k == 0) { /* the many small ones get the numbers of the first, below */
            device_fill(weight, m->weight, n, 1);
            device_fill(grad, m->grad, n, 7777);
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
    DONE(kopt_cuda_plan_upload(&r->plan, r->device, bytes, stream));
    if (m->stats) DONE(kopt_cuda_plan_set_options(&r->plan, &options, stream));
    finish();
    free(bytes);
    return 1;
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
    device_free(r->memory), device_free(r->device), free(r->tensors);
}

/* Two steps are those of the CPU: weights, state, copy. The header of a state block is the host's. */
static int bits_equal(const mode *m, size_t n) {
    run r;
    const size_t weight_size = n * width(m->weight), grad_size = n * width(m->grad);
    unsigned char *const weight = malloc(weight_size), *const grad = malloc(grad_size), *const copy = calloc(n, 2);
    unsigned char *state, *seen;
    kopt_optimizer o = optimizer_of(m);
    const size_t state_size = kopt_state_size(&o, n);
    kopt_tensor t;
    int k, equal = 1;
    if (!make(&r, m, &n, 1, 0)) {
        printf("Bail out! no memory for %d elements\n", (int)n);
        exit(1);
    }
    state = calloc(state_size + 1, 1), seen = malloc(weight_size + state_size + 2 * n);
    if (!weight || !grad || !copy || !state || !seen) abort();
    fill(weight, m->weight, n, 1), fill(grad, m->grad, n, 7777);
    t = kopt_tensor_of(weight, grad, m->grad, n, state, state_size);
    if (m->copy) t.copy = copy, t.copy_format = KOPT_BF16;
    DONE(kopt_state_init(&o, &t, NULL));
    if (m->stats) {
        kopt_norm norm;
        memset(&norm, 0, sizeof norm);
        DONE(kopt_norm_add(&norm, grad, m->grad, n));
        o.clip = kopt_clip_coefficient(&norm, 1.0, 1);
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
    size_t count, size; /* size 0: GPT-2; 1: `large` elements */
    size_t shift;       /* of the arrays, in bytes */
    int all;            /* with every mode, not only the first */
} list;
static const list lists[] = {
    {"large", 1, 1, 0, 1},
    {"GPT-2 124M", 0, 0, 0, 1},
    {"10000 x 64", 10000, 64, 0, 1},
    {"1000 x 1024", 1000, 1024, 0, 1},
    {"1e3", 1, 1000, 0, 0},
    {"1e4", 1, 10000, 0, 0},
    {"1e5", 1, 100000, 0, 0},
    {"1e6", 1, 1000000, 0, 0},
    {"1e7", 1, 10000000, 0, 0},
    {"1e9", 1, 1000000000, 0, 0},
    {"200 x 1M", 200, 1048576, 0, 0},
    {"10 x 16.8M", 10, 16777216, 0, 0},
    {"large 2 bytes off", 1, 1, 2, 0},
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
    for (n = 0; n < (rehearsal ? l->count / 300 + 1 : l->count); ++n) sizes[n] = l->size == 1 ? large : shrunk(l->size);
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
        if (!l->all && m != modes) continue;
        if (!make(&r, m, sizes, count, l->shift)) {
            printf("%-32s %-14s does not fit into memory\n", m->name, l->name);
            put(m->name, l->name, "memory", 0, "1", "skip");
            continue;
        }
        cold = r.elements * m->bytes < 8 * (double)cache;
        eager = device_time(step, &r, cold), host = host_time(step, &r), graph = graph_time(step, &r, cold, 1);
        put_times(m->name, l->name, r.elements, m->bytes, eager, graph, host, copy_rate,
                  l->size == 1 && l->shift == 0 ? m->goal : 0);
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
                      time, 0, copy_rate / 2, 0.85); /* half of the copy's bytes are read */
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

/* ---- Functions of arrays: the same call on both sides, with the arrays of either --------------------------------- */

typedef struct array_row {
    const char *name;
    kopt_format input;
    double bytes;
    int kind, function;
} array_row;
enum { NEAREST, STOCHASTIC, WIDEN, ACCUMULATE, CLIP, COMPRESS, ADD, REDUCE, FUNCTION, ATAN2, SINCOSPI, MAP };
static const array_row array_rows[] = {
    {"fp32 to bf16 nearest", KOPT_F32, 6, NEAREST, 0},
    {"fp32 to bf16 stochastic", KOPT_F32, 6, STOCHASTIC, 0},
    {"bf16 to fp32", KOPT_BF16, 6, WIDEN, 0},
    {"accumulate bf16 KAHAN", KOPT_BF16, 10, ACCUMULATE, 0},
    {"clip by value bf16", KOPT_BF16, 4, CLIP, 0},
    {"compress to 8 bits", KOPT_BF16, 7.0156, COMPRESS, KOPT_Q8},
    {"add 8 bits", KOPT_F32, 9.0156, ADD, KOPT_Q8},
    {"compress to 1 bit", KOPT_BF16, 6.1406, COMPRESS, KOPT_SIGN},
    {"add 1 bit", KOPT_F32, 8.1406, ADD, KOPT_SIGN},
    {"reduce 4 shards bf16", KOPT_BF16, 2.5, REDUCE, 0},
    {"exp", KOPT_F32, 8, FUNCTION, 0},
    {"log", KOPT_F32, 8, FUNCTION, 1},
    {"tanh", KOPT_F32, 8, FUNCTION, 2},
    {"erf", KOPT_F32, 8, FUNCTION, 3},
    {"erfc", KOPT_F32, 8, FUNCTION, 4},
    {"atan2", KOPT_F32, 12, ATAN2, 0},
    {"sincospi", KOPT_F32, 12, SINCOSPI, 0},
    {"map GELU bf16", KOPT_BF16, 4, MAP, KOPT_GELU},
    {"map SiLU bf16", KOPT_BF16, 4, MAP, KOPT_SILU},
};

enum { ARRAYS = 4 }; /* two inputs, two outputs of up to 4 bytes for each element */
typedef struct arrays {
    const array_row *row;
    unsigned char *p[ARRAYS];
    size_t n;
    int gpu;
} arrays;

/* Sums and compressors have made one step: before it residuals are not read. */
static void call(void *context) {
    typedef kopt_result host_function(const kopt_vmath *, float *, const float *, size_t);
    typedef kopt_result device_function(float *, const float *, size_t, void *);
    static host_function *const host[] = {kopt_vmath_exp, kopt_vmath_log, kopt_vmath_tanh, kopt_vmath_erf,
                                          kopt_vmath_erfc};
    static device_function *const device[] = {kopt_cuda_vmath_exp, kopt_cuda_vmath_log, kopt_cuda_vmath_tanh,
                                              kopt_cuda_vmath_erf, kopt_cuda_vmath_erfc};
    const kopt_vmath *const builtin = kopt_vmath_builtin();
    const arrays *const a = context;
    const array_row *const t = a->row;
    const int gpu = a->gpu;
    const size_t n = a->n;
    void *const x = a->p[0], *const y = a->p[1], *const out = a->p[2], *const rest = a->p[3];
    float *const fx = x, *const fy = y, *const fout = out, *const frest = rest;
    kopt_random_key key;
    key.seed = 1, key.step = 2, key.id = 3, key.first_index = 0;
    switch (t->kind) {
    case NEAREST:
        DONE(gpu ? kopt_cuda_convert(out, KOPT_BF16, x, KOPT_F32, n, stream)
                 : kopt_convert(out, KOPT_BF16, x, KOPT_F32, n));
        break;
    case STOCHASTIC:
        DONE(gpu ? kopt_cuda_convert_stochastic(out, KOPT_BF16, x, KOPT_F32, n, key, stream)
                 : kopt_convert_stochastic(out, KOPT_BF16, x, KOPT_F32, n, key));
        break;
    case WIDEN:
        DONE(gpu ? kopt_cuda_convert(out, KOPT_F32, x, KOPT_BF16, n, stream)
                 : kopt_convert(out, KOPT_F32, x, KOPT_BF16, n));
        break;
    case ACCUMULATE: {
        kopt_accumulator sum = kopt_accumulator_of(out, KOPT_BF16, rest, n);
        sum.count = sum.step = 1;
        DONE(gpu ? kopt_cuda_accumulate(&sum, x, KOPT_BF16, 1, NULL, stream) : kopt_accumulate(&sum, x, KOPT_BF16, 1));
        break;
    }
    case CLIP:
        DONE(gpu ? kopt_cuda_clip_value(x, KOPT_BF16, n, 0.1, stream) : kopt_clip_value(x, KOPT_BF16, n, 0.1));
        break;
    case COMPRESS: {
        const size_t size = kopt_compressed_size((kopt_format)t->function, n);
        kopt_compressor c = kopt_compressor_of((kopt_format)t->function, rest, n);
        c.step = 1;
        DONE(gpu ? kopt_cuda_compress(&c, out, size, x, KOPT_BF16, NULL, stream)
                 : kopt_compress(&c, out, size, x, KOPT_BF16));
        break;
    }
    case ADD: {
        const kopt_format code = (kopt_format)t->function;
        const size_t size = kopt_compressed_size(code, n);
        DONE(gpu ? kopt_cuda_decompress_add(out, KOPT_F32, x, size, code, n, 0.5, stream)
                 : kopt_decompress_add(out, KOPT_F32, x, size, code, n, 0.5));
        break;
    }
    case REDUCE: {
        const size_t shard = n / 4 * 2;
        const void *const shards[] = {a->p[0], a->p[0] + shard, a->p[0] + 2 * shard, a->p[0] + 3 * shard};
        DONE(gpu ? kopt_cuda_reduce(out, KOPT_BF16, x, n / 4, 4, KOPT_BF16, n / 4, 0.25, stream)
                 : kopt_reduce(out, KOPT_BF16, shards, 4, KOPT_BF16, n / 4, 0.25));
        break;
    }
    case FUNCTION:
        DONE(gpu ? device[t->function](fout, fx, n, stream) : host[t->function](builtin, fout, fx, n));
        break;
    case ATAN2:
        DONE(gpu ? kopt_cuda_vmath_atan2(fout, fy, fx, n, stream) : kopt_vmath_atan2(builtin, fout, fy, fx, n));
        break;
    case SINCOSPI:
        DONE(gpu ? kopt_cuda_vmath_sincospi(fout, frest, fx, n, stream)
                 : kopt_vmath_sincospi(builtin, fout, frest, fx, n));
        break;
    default:
        DONE(gpu ? kopt_cuda_map((kopt_function)t->function, out, x, KOPT_BF16, n, stream)
                 : kopt_map(NULL, (kopt_function)t->function, out, x, KOPT_BF16, n));
    }
}

static void fill_arrays(const arrays *a) {
    int k;
    for (k = 0; k < ARRAYS; ++k)
        if (a->gpu && k < 2)
            device_fill(a->p[k], a->row->input, a->n, k ? 77 : 1);
        else if (a->gpu)
            CHECK(cudaMemsetAsync(a->p[k], 0x3C, 4 * a->n, stream)); /* sums and residuals: 0.0115 */
        else if (k < 2)
            fill(a->p[k], a->row->input, a->n, k ? 77 : 1);
        else
            memset(a->p[k], 0x3C, 4 * a->n);
}

/* With log the negative numbers are NaNs. */
static int same(const unsigned char *a, const unsigned char *b, size_t size, int floats) {
    for (; size; size -= 4, a += 4, b += 4) {
        uint32_t x, y;
        memcpy(&x, a, 4), memcpy(&y, b, 4);
        if (x != y && !(floats && (x & 0x7FFFFFFFu) > 0x7F800000u && (y & 0x7FFFFFFFu) > 0x7F800000u)) return 0;
    }
    return 1;
}

static void time_arrays(void) {
    const size_t check = (size_t)1 << (rehearsal ? 11 : 17), most = large > check ? large : check;
    unsigned char *const seen = malloc(4 * check);
    arrays host, device;
    size_t k;
    int i;
    if (!seen || device_room() < 18 * most) {
        puts("the functions of arrays do not fit into memory");
        put("functions of arrays", "large", "memory", 0, "1", "skip");
        return;
    }
    for (i = 0; i < ARRAYS; ++i) {
        host.p[i] = calloc(check, 4), device.p[i] = device_new(4 * most);
        if (!host.p[i]) abort();
    }
    for (k = 0; k < sizeof array_rows / sizeof array_rows[0]; ++k) {
        const array_row *const t = &array_rows[k];
        int equal = 1;
        host.row = device.row = t, host.gpu = 0, device.gpu = 1;
        host.n = device.n = check;
        fill_arrays(&host), fill_arrays(&device);
        call(&host), call(&device);
        for (i = 0; i < ARRAYS; ++i) {
            const size_t size = i < 2 ? check * width(t->input) : 4 * check;
            from_device(seen, device.p[i], size);
            equal = equal && same(seen, host.p[i], size, t->kind == FUNCTION);
        }
        put_bits(t->name, "2^17", equal);
        if (!equal) continue;
        device.n = large;
        fill_arrays(&device);
        put_times(t->name, "large", (double)large, t->bytes, device_time(call, &device, 0), 0, 0, copy_rate, 0);
    }
    for (i = 0; i < ARRAYS; ++i) free(host.p[i]), device_free(device.p[i]);
    free(seen);
}

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
    if (argc > 1) large = strtoull(argv[1], NULL, 10) & ~(size_t)1023;
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
    time_launches();
    for (k = 0; k < MODES; ++k) time_mode(&modes[k]);
    time_arrays();
    device_free(flush);
    printf("bits: %d wrong\n", wrong_bits);
    return wrong_bits != 0;
}
