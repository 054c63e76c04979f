/* The speed of kahan_opt.h against the memory system of this machine, in one process.

     ./build.sh bench              about two minutes; needs 1.6 GB of memory
     ./build.sh bench --gb 0.1     with smaller DRAM buffers (default 1: the arrays of the bf16 Kahan line take 1 GB)

   First all instruction sets must give the same bits. Then the lines of a table are timed in thread CPU time,
   interleaved: one after the other, again and again, so that what drifts, drifts for all; medians of the repetitions.
   The roofline of a line is a kernel that does nothing but read and write the same arrays in the same sizes (weight,
   residual, moments: read, changed, written back; gradient: read) with the widest vectors, in the same interleaving,
   with and without prefetch, the better of the two. Writes build/bench/bench.csv. */
#define _POSIX_C_SOURCE 199309L
#define KAHAN_OPT_IMPLEMENTATION
#include "../kahan_opt.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { REPETITIONS = 9, MAX_LINES = 32 };

static double cpu_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void fail(const char *why) {
    fprintf(stderr, "bench: %s\n", why);
    exit(2);
}

static double median(double *x, int n) {
    int i, k;
    for (i = 1; i < n; i++) { /* insertion sort */
        const double value = x[i];
        for (k = i; k > 0 && x[k - 1] > value; k--) x[k] = x[k - 1];
        x[k] = value;
    }
    return x[n / 2];
}

/* ---- a line of a table: one optimizer on one tensor ---- */

typedef struct line {
    const char *name;
    kopt_optimizer opt;
    kopt_isa isa;
    size_t n;
    int idle; /* the gradient has been zero for 3,000 steps */
    double step[REPETITIONS], roof[2][REPETITIONS];
} line;

static unsigned char *weight, *grad, *state; /* shared by all lines */
static size_t room, state_room;

static size_t size_of(kopt_format format) { return format == KOPT_F32 ? 4 : 2; }

/* Gradients have the weights' format. */
static kopt_tensor tensor(const line *l) {
    return kopt_tensor_of(weight, grad, l->opt.weight_format, l->n, state, state_room);
}

static void fill(const line *l) { /* weights in +-1, gradients in +-0.5, a pattern of 1024 */
    static float w[1024], g[1024];
    kopt_tensor t = tensor(l);
    const size_t size = size_of(l->opt.weight_format);
    size_t i;
    for (i = 0; i < 1024; i++) {
        w[i] = (float)((i * 2654435761u) % 1999) / 1000 - 1;
        g[i] = (float)((i * 40503u) % 977) / 977 - 0.5f;
    }
    for (i = 0; i < l->n; i += 1024) {
        const size_t some = l->n - i < 1024 ? l->n - i : 1024;
        kopt_convert(weight + i * size, l->opt.weight_format, w, KOPT_F32, some);
        kopt_convert(grad + i * size, l->opt.weight_format, g, KOPT_F32, some);
    }
    if (kopt_state_init(&l->opt, &t, NULL) != KOPT_OK) fail("a state block was refused");
    if (kopt_isa_force(l->isa) != KOPT_OK) fail("an instruction set was refused");
}

static void step(line *l) {
    kopt_tensor t = tensor(l);
    if (kopt_optimizer_step(&l->opt, &t, 1) != KOPT_OK) fail("a step was refused");
}

/* ---- the roofline: the traffic of a step, and nothing else ---- */

typedef struct stream {
    unsigned char *p;
    size_t lines; /* cache lines of 64 bytes per 64 elements */
} stream;

#ifdef __GNUC__
typedef uint64_t wide __attribute__((vector_size(64), aligned(1), may_alias));
#else
typedef struct wide { uint64_t x[8]; } wide;
#endif

/* s[0] is only read. */
#define ROOFLINE(name, target)                                                                             \
    target static uint64_t name(const stream *s, int streams, size_t n, size_t ahead) {                    \
        wide sum = {0};                                                                                    \
        size_t i, k;                                                                                       \
        int which;                                                                                         \
        for (i = 0; i + 64 <= n; i += 64) {                                                                \
            for (which = 0; which < streams; which++) {                                                    \
                unsigned char *p = s[which].p + i * s[which].lines;                                        \
                for (k = 0; k < s[which].lines; k++, p += 64) {                                            \
                    if (ahead != 0) __builtin_prefetch(p + ahead);                                         \
                    if (which == 0) sum ^= *(const wide *)p;                                               \
                    else *(wide *)p ^= sum;                                                                \
                }                                                                                          \
            }                                                                                              \
        }                                                                                                  \
        return sum[0];                                                                                     \
    }
#if defined(__x86_64__)
ROOFLINE(roofline_avx512, __attribute__((target("avx512f"))))
ROOFLINE(roofline_avx2, __attribute__((target("avx2"))))
#endif
ROOFLINE(roofline_plain, )

static volatile uint64_t sink;

static void roofline(const line *l, size_t ahead) {
    const kopt_optimizer *o = &l->opt;
    const int moments = o->rule == KOPT_ADAM ? 2 : o->momentum > 0 ? 1 : 0;
    stream s[5];
    int streams = 0, k;
    s[streams].p = grad, s[streams++].lines = size_of(o->weight_format);
    s[streams].p = weight, s[streams++].lines = size_of(o->weight_format);
    if (o->weight_format != KOPT_F32 && o->rounding >= KOPT_KAHAN)
        s[streams].p = state, s[streams++].lines = o->rounding == KOPT_COMPACT ? 1 : 2;
    for (k = 0; k < moments; k++, streams++) {
        s[streams].p = s[streams - 1].p + l->n * s[streams - 1].lines;
        if (streams == 2) s[streams].p = state;
        s[streams].lines = size_of(o->moment_format);
    }
#if defined(__x86_64__)
    if (kopt_isa_usable(KOPT_ISA_AVX512)) {
        sink = roofline_avx512(s, streams, l->n, ahead);
        return;
    }
    if (kopt_isa_usable(KOPT_ISA_AVX2)) {
        sink = roofline_avx2(s, streams, l->n, ahead);
        return;
    }
#endif
    sink = roofline_plain(s, streams, l->n, ahead);
}

static double traffic(const line *l) { /* bytes read and written per element and step */
    const kopt_optimizer *o = &l->opt;
    const size_t w = size_of(o->weight_format), m = size_of(o->moment_format);
    size_t residual = o->rounding == KOPT_COMPACT ? 1 : 2;
    if (o->weight_format == KOPT_F32 || o->rounding < KOPT_KAHAN) residual = 0;
    return (double)(w + 2 * (w + residual + m * (o->rule == KOPT_ADAM ? 2 : o->momentum > 0 ? 1 : 0)));
}

/* ---- a table ---- */

static FILE *csv;

static void table(const char *title, line *lines, int count, int with_roofline) {
    const size_t inner = lines[0].n > 4000000 ? 1 : 1000000 / (lines[0].n + 64);
    double first = 0;
    int r, i;
    size_t k;
    fflush(stdout);
    printf("\n%s\n%-34s %-7s %9s %6s %9s %9s %8s\n", title, "", "isa", "ns/elem", "B/elem", "GB/s", "roofline", "time");
    for (r = 0; r < REPETITIONS; r++) {
        for (i = 0; i < count; i++) {
            line *l = &lines[i];
            double t0, t1;
            fill(l);
            if (l->idle) { /* active for a while, then no gradient until the state has decayed */
                for (k = 0; k < 100; k++) step(l);
                memset(grad, 0, l->n * size_of(l->opt.weight_format));
                for (k = 0; k < 3000; k++) step(l);
            }
            step(l); /* warm */
            t0 = cpu_seconds();
            for (k = 0; k < inner; k++) step(l);
            t1 = cpu_seconds();
            l->step[r] = (t1 - t0) / (double)inner / (double)l->n * 1e9;
            if (!with_roofline) continue;
            for (k = 0; k < 2; k++) {
                t0 = cpu_seconds();
                roofline(l, k * 1024);
                l->roof[k][r] = (cpu_seconds() - t0) / (double)l->n * 1e9;
            }
        }
    }
    for (i = 0; i < count; i++) {
        line *l = &lines[i];
        const double ns = median(l->step, REPETITIONS), bytes = traffic(l);
        double fraction = 0;
        if (with_roofline) {
            const double plain = median(l->roof[0], REPETITIONS), ahead = median(l->roof[1], REPETITIONS);
            fraction = (plain < ahead ? plain : ahead) / ns;
        }
        if (i == 0) first = ns;
        printf("%-34s %-7s %9.3f %6.0f %9.1f ", l->name, kopt_isa_name(l->isa), ns, bytes, bytes / ns);
        if (with_roofline) printf("%9.2f", fraction);
        else printf("%9s", "");
        printf(" %7.2fx\n", ns / first);
        fprintf(csv, "%s,%s,%s,%zu,%.4f,%.0f,%.3f,%.3f\n", title, l->name, kopt_isa_name(l->isa), l->n, ns, bytes,
                fraction, ns / first);
    }
}

static line make(const char *name, kopt_optimizer opt, kopt_format format, kopt_rounding rounding, size_t n,
                 kopt_isa isa) {
    line l;
    memset(&l, 0, sizeof l);
    l.name = name;
    l.opt = opt;
    l.opt.weight_format = l.opt.moment_format = format;
    l.opt.rounding = rounding;
    if (rounding == KOPT_NEAREST) l.opt.moment_rounding = KOPT_NEAREST;
    l.n = n;
    l.isa = isa;
    return l;
}

/* ---- the bits first ---- */

static uint64_t hash(uint64_t h, const void *data, size_t n) { /* FNV-1a */
    const unsigned char *p = data;
    size_t i;
    for (i = 0; i < n; i++) h = (h ^ p[i]) * 0x100000001B3u;
    return h;
}

static void check_bits(void) {
    uint64_t expected = 0;
    int isa, rounding;
    for (isa = 0; isa < KOPT_ISA_COUNT; isa++) {
        uint64_t h = 0xCBF29CE484222325u;
        if (!kopt_isa_usable((kopt_isa)isa)) continue;
        for (rounding = KOPT_NEAREST; rounding <= KOPT_EXACT; rounding++) {
            line l = make("", kopt_adamw(1e-3), KOPT_BF16, (kopt_rounding)rounding, 5000, (kopt_isa)isa);
            int k;
            fill(&l);
            for (k = 0; k < 5; k++) step(&l);
            h = hash(hash(h, weight, 2 * l.n), state, kopt_state_size(&l.opt, l.n));
        }
        printf("bits %-7s %016llx\n", kopt_isa_name((kopt_isa)isa), (unsigned long long)h);
        if (isa == 0) expected = h;
        else if (h != expected) fail("the instruction sets disagree: nothing is measured");
    }
}

int main(int argc, char **argv) {
    const kopt_isa best = kopt_isa_current();
    double gigabytes = 1;
    line lines[MAX_LINES];
    size_t n, sizes[] = {1, 32, 1000, 10000, 100000, 1000000};
    char title[128];
    int count, i, isa;
    if (argc == 3 && strcmp(argv[1], "--gb") == 0) gigabytes = atof(argv[2]);
    if ((argc != 1 && argc != 3) || !(gigabytes >= 0.01 && gigabytes <= 1000)) fail("usage: bench [--gb SIZE]");
    n = (size_t)(gigabytes * 1e9 / 10) / 1024 * 1024 + 1024; /* bf16 Kahan AdamW: 10 bytes held per weight */
    room = 4 * n + 4096;
    state_room = 8 * n + 4096;
    weight = malloc(room);
    grad = malloc(room);
    state = malloc(state_room);
    if (weight == NULL || grad == NULL || state == NULL) fail("not enough memory: try --gb 0.1");
    csv = fopen("build/bench/bench.csv", "w");
    if (csv == NULL) fail("cannot write build/bench/bench.csv");
    fprintf(csv, "table,line,isa,n,ns_per_element,bytes_per_element,fraction_of_roofline,time_ratio_to_first_line\n");

    check_bits();

    count = 0;
    lines[count++] = make("AdamW fp32", kopt_adamw(1e-3), KOPT_F32, KOPT_NEAREST, n, best);
    lines[count++] = make("AdamW bf16 Kahan", kopt_adamw(1e-3), KOPT_BF16, KOPT_KAHAN, n, best);
    lines[count] = make("AdamW bf16 Kahan, nearest stores", kopt_adamw(1e-3), KOPT_BF16, KOPT_KAHAN, n, best);
    lines[count].opt.moment_rounding = lines[count].opt.compensation_rounding = KOPT_NEAREST;
    count++;
    lines[count++] = make("AdamW bf16 exact", kopt_adamw(1e-3), KOPT_BF16, KOPT_EXACT, n, best);
    lines[count++] = make("AdamW bf16 compact", kopt_adamw(1e-3), KOPT_BF16, KOPT_COMPACT, n, best);
    lines[count++] = make("AdamW bf16 stochastic", kopt_adamw(1e-3), KOPT_BF16, KOPT_STOCHASTIC, n, best);
    lines[count++] = make("AdamW fp16 Kahan", kopt_adamw(1e-3), KOPT_FP16, KOPT_KAHAN, n, best);
    lines[count++] = make("SGD momentum bf16 Kahan", kopt_sgd(1e-3, 0.9), KOPT_BF16, KOPT_KAHAN, n, best);
    if (best == KOPT_ISA_AVX512)
        lines[count++] = make("AdamW bf16 Kahan", kopt_adamw(1e-3), KOPT_BF16, KOPT_KAHAN, n, KOPT_ISA_AVX2);
    snprintf(title, sizeof title, "DRAM: %.2f GB for the bf16 Kahan line (%zu weights)", (double)n * 1e-8, n);
    table(title, lines, count, 1);

    count = 0;
    for (isa = KOPT_ISA_COUNT - 1; isa >= 0; isa--)
        if (kopt_isa_usable((kopt_isa)isa))
            lines[count++] = make("AdamW bf16 Kahan", kopt_adamw(1e-3), KOPT_BF16, KOPT_KAHAN, 10240, (kopt_isa)isa);
    table("in cache: 10,240 weights, each instruction set", lines, count, 0);

    count = 0;
    lines[count++] = make("active", kopt_adamw(1e-3), KOPT_BF16, KOPT_KAHAN, 10240, best);
    lines[count] = make("idle: no gradient for 3,000 steps", kopt_adamw(1e-3), KOPT_BF16, KOPT_KAHAN, 10240, best);
    lines[count++].idle = 1;
    table("idle parameters", lines, count, 0);

    printf("\nsize: AdamW bf16 Kahan, one call per tensor\n%10s %12s %12s\n", "weights", "ns/call", "ns/elem");
    for (i = 0; i < (int)(sizeof sizes / sizeof sizes[0]); i++) {
        line l = make("", kopt_adamw(1e-3), KOPT_BF16, KOPT_KAHAN, sizes[i], best);
        const size_t calls = 2000000 / (sizes[i] + 100) + 1;
        double x[REPETITIONS];
        size_t k;
        int r;
        fill(&l);
        for (r = 0; r < REPETITIONS; r++) {
            const double t0 = cpu_seconds();
            for (k = 0; k < calls; k++) step(&l);
            x[r] = (cpu_seconds() - t0) / (double)calls * 1e9;
        }
        printf("%10zu %12.0f %12.3f\n", sizes[i], median(x, REPETITIONS), median(x, REPETITIONS) / (double)sizes[i]);
        fprintf(csv, "size,AdamW bf16 Kahan,%s,%zu,%.4f,18,0,0\n", kopt_isa_name(best), sizes[i],
                median(x, REPETITIONS) / (double)sizes[i]);
    }
    fclose(csv);
    printf("\nwritten: build/bench/bench.csv\n");
    return 0;
}
