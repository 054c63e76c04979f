/* The speed of kahan_opt.h against the memory system of this machine, in one process.

     ./build.sh bench              the tables of docs/benchmarks.md: four minutes, 1.8 GB of memory
     ./build.sh bench --sizes      how cost grows with n, and a model of it: two minutes, 10 GB
     ./build.sh bench --all        every rule x rounding x moment format x instruction set x size, and two threads from
                                   10^6 weights on: twenty minutes, 4.5 GB
     ... --gb 0.1                  with smaller DRAM buffers (default 1: the arrays of the bf16 Kahan line take 1 GB)

   First all instruction sets must give the same bits. Then the lines of a table are timed in thread CPU time,
   interleaved: one after the other, again and again, so that what drifts, drifts for all; medians of the repetitions. A
   ratio is the median of the ratios in each repetition.
   The roofline of a line is a kernel that does nothing but read and write the same arrays in the same sizes (weight,
   residual, moments: read, changed, written back; gradient: read) with the widest vectors, in the same interleaving,
   with and without prefetch, the best of three. Writes build/bench/bench.csv, sizes.csv, all.csv. */
#define _GNU_SOURCE /* ptrace, threads, clocks */
#include "timing.h"

#define KAHAN_OPT_IMPLEMENTATION
#include "../kahan_opt.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef __unix__
#include <pthread.h>
#endif
#if defined(__linux__) && (defined(__x86_64__) || defined(__aarch64__))
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>
#define COUNTS_INSTRUCTIONS 1
#endif

enum { REPETITIONS = 9, MAX_LINES = 32, ISAS = KOPT_ISA_SIMD128 + 1 };
enum { AHEADS = 3 }; /* the roofline with prefetch 0, 1 and 2 KB ahead */

static void fail(const char *why) {
    fprintf(stderr, "bench: %s\n", why);
    exit(2);
}

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- a line of a table: one optimizer on one tensor ---- */

typedef struct line {
    const char *name;
    kopt_optimizer opt;
    kopt_format format; /* of weights and gradients */
    kopt_isa isa;
    size_t n;
    int idle; /* the gradient has been zero for 3,000 steps */
    double step[REPETITIONS], roof[AHEADS][REPETITIONS];
} line;

static unsigned char *weight, *grad, *state; /* shared by all lines */
static size_t room, state_room;

static size_t size_of(kopt_format format) { return format == KOPT_F32 ? 4 : format == KOPT_Q8 ? 1 : 2; }

static kopt_tensor tensor(const line *l) {
    return kopt_tensor_of(weight, l->format, grad, l->format, l->n, state, state_room);
}

static void fill(const line *l) { /* weights in +-1, gradients in +-0.5, a pattern of 1024 */
    static float w[1024], g[1024];
    kopt_tensor t = tensor(l);
    const size_t size = size_of(l->format);
    size_t i;
    for (i = 0; i < 1024; i++) {
        w[i] = (float)((i * 2654435761u) % 1999) / 1000 - 1;
        g[i] = (float)((i * 40503u) % 977) / 977 - 0.5f;
    }
    for (i = 0; i < l->n; i += 1024) {
        const size_t some = l->n - i < 1024 ? l->n - i : 1024;
        if (kopt_convert(weight + i * size, l->format, w, KOPT_F32, some) != KOPT_OK ||
            kopt_convert(grad + i * size, l->format, g, KOPT_F32, some) != KOPT_OK)
            fail("a conversion was refused");
    }
    if (kopt_state_init(&l->opt, &t, 1, NULL) != KOPT_OK) fail("a state block was refused");
    if (kopt_isa_force(l->isa) != KOPT_OK) fail("an instruction set was refused");
}

static void step(line *l) {
    kopt_tensor t = tensor(l);
    if (kopt_optimizer_step(&l->opt, &t, 1) != KOPT_OK) fail("a step was refused");
}

static int moments_of(const kopt_optimizer *o) {
    switch (o->rule) {
    case KOPT_RULE_SGD: return o->momentum > 0;
    case KOPT_RULE_LION: return 1;
    case KOPT_RULE_EMA: return 0;
    case KOPT_RULE_ADAN: return 4;
    default: return o->amsgrad ? 3 : 2;
    }
}

static size_t residual_of(const line *l) {
    const kopt_rounding rounding = l->opt.rounding;
    return l->format == KOPT_F32 || rounding < KOPT_KAHAN ? 0 : rounding == KOPT_COMPACT ? 1 : 2;
}

/* ---- the roofline: the traffic of a step, and nothing else ---- */

typedef struct stream {
    unsigned char *p;
    size_t lines; /* cache lines of 64 bytes per 64 elements */
} stream;

#ifdef __GNUC__
typedef uint64_t wide __attribute__((vector_size(64), aligned(1), may_alias));
#else
typedef struct wide {
    uint64_t x[8];
} wide;
#endif

/* s[0] is only read. */
#define ROOFLINE(name, target)                                                          \
    target static uint64_t name(const stream *s, int streams, size_t n, size_t ahead) { \
        wide sum = {0};                                                                 \
        size_t i, k;                                                                    \
        int which;                                                                      \
        for (i = 0; i + 64 <= n; i += 64) {                                             \
            for (which = 0; which < streams; which++) {                                 \
                unsigned char *p = s[which].p + i * s[which].lines;                     \
                for (k = 0; k < s[which].lines; k++, p += 64) {                         \
                    if (ahead != 0) __builtin_prefetch(p + ahead);                      \
                    if (which == 0)                                                     \
                        sum ^= *(const wide *)p;                                        \
                    else                                                                \
                        *(wide *)p ^= sum;                                              \
                }                                                                       \
            }                                                                           \
        }                                                                               \
        return sum[0];                                                                  \
    }
#if defined(__x86_64__)
ROOFLINE(roofline_avx512, __attribute__((target("avx512f"))))
ROOFLINE(roofline_avx2, __attribute__((target("avx2"))))
#endif
ROOFLINE(roofline_plain, )

static volatile uint64_t sink;

static void roofline(const line *l, size_t ahead) {
    const kopt_optimizer *o = &l->opt;
    stream s[7];
    int streams = 0, k;
    unsigned char *p = state;
    s[streams].p = grad, s[streams++].lines = size_of(l->format);
    s[streams].p = weight, s[streams++].lines = size_of(l->format);
    for (k = -1; k < moments_of(o); k++) {
        const size_t lines = k < 0 ? residual_of(l) : size_of(o->first_moment_format);
        if (lines == 0) continue;
        s[streams].p = p, s[streams++].lines = lines;
        p += l->n * lines;
    }
#if defined(__x86_64__)
    static int widest = -1; /* asking takes microseconds in a virtual machine */
    if (widest < 0) widest = kopt_isa_usable(KOPT_ISA_AVX512) ? 2 : kopt_isa_usable(KOPT_ISA_AVX2);
    if (widest > 0) {
        sink = (widest == 2 ? roofline_avx512 : roofline_avx2)(s, streams, l->n, ahead);
        return;
    }
#endif
    sink = roofline_plain(s, streams, l->n, ahead);
}

static double traffic(const line *l) { /* bytes read and written per element and step */
    const kopt_optimizer *o = &l->opt;
    const size_t w = size_of(l->format), m = size_of(o->first_moment_format) * (size_t)moments_of(o);
    return (double)(w + 2 * (w + residual_of(l) + m));
}

/* ---- a table ---- */

static FILE *csv;

static double
median_of(const double x[REPETITIONS]) { /* median() sorts, and a repetition belongs to those of the other lines */
    double copy[REPETITIONS];
    memcpy(copy, x, sizeof copy);
    return median(copy, REPETITIONS);
}

/* Of two things timed in the same repetitions: what slows down both leaves it alone. */
static double median_ratio(const double a[REPETITIONS], const double b[REPETITIONS]) {
    double ratio[REPETITIONS];
    int r;
    for (r = 0; r < REPETITIONS; r++) ratio[r] = a[r] / b[r];
    return median(ratio, REPETITIONS);
}

static void table(const char *title, line *lines, int count, int with_roofline) {
    const size_t inner = lines[0].n > 4000000 ? 1 : 1000000 / (lines[0].n + 64);
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
                memset(grad, 0, l->n * size_of(l->format));
                for (k = 0; k < 3000; k++) step(l);
            }
            step(l); /* warm */
            t0 = cpu_seconds();
            for (k = 0; k < inner; k++) step(l);
            t1 = cpu_seconds();
            l->step[r] = (t1 - t0) / (double)inner / (double)l->n * 1e9;
            if (!with_roofline) continue;
            for (k = 0; k < AHEADS; k++) {
                t0 = cpu_seconds();
                roofline(l, k * 1024);
                l->roof[k][r] = (cpu_seconds() - t0) / (double)l->n * 1e9;
            }
        }
    }
    for (i = 0; i < count; i++) {
        line *l = &lines[i];
        const double bytes = traffic(l), time = median_ratio(l->step, lines[0].step), ns = median_of(l->step);
        double fraction = 0;
        if (with_roofline) {
            size_t best = 0;
            for (k = 1; k < AHEADS; k++)
                if (median_of(l->roof[k]) < median_of(l->roof[best])) best = k;
            fraction = median_ratio(l->roof[best], l->step);
        }
        printf("%-34s %-7s %9.3f %6.0f %9.1f ", l->name, kopt_isa_name(l->isa), ns, bytes, bytes / ns);
        if (with_roofline)
            printf("%9.2f", fraction);
        else
            printf("%9s", "");
        printf(" %7.2fx\n", time);
        fprintf(csv, "%s,%s,%s,%zu,%.4f,%.0f,%.3f,%.3f\n", title, l->name, kopt_isa_name(l->isa), l->n, ns, bytes,
                fraction, time);
    }
}

static line make(const char *name, kopt_optimizer opt, kopt_format format, kopt_rounding rounding, size_t n,
                 kopt_isa isa) {
    line l;
    memset(&l, 0, sizeof l);
    l.name = name;
    l.opt = opt;
    l.format = l.opt.first_moment_format = l.opt.second_moment_format = format;
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

enum { RULES = 11, WEIGHTS = 11, MOMENTS = 4 };
static const char *const rule_name[RULES] = {"SGD",  "SGD momentum", "AdamW",  "AMSGrad", "StableAdamW", "Lion",
                                             "Adan", "RAdam",        "Ranger", "EMA",     "Adam L2"};
static kopt_optimizer rule_of(int rule) {
    kopt_optimizer o;
    switch (rule) {
    case 0: return kopt_sgd(1e-3, 0);
    case 1: return kopt_sgd(1e-3, 0.9);
    case 3: o = kopt_adamw(1e-3), o.amsgrad = 1; return o;
    case 4: return kopt_stable_adamw(1e-3);
    case 5: return kopt_lion(1e-3);
    case 6: return kopt_adan(1e-3);
    case 7: return kopt_radam(1e-3);
    case 8: return kopt_ranger(1e-3);
    case 9: return kopt_ema(0.999);
    case 10: o = kopt_adam(1e-3), o.weight_decay = 0.01; return o;
    default: return kopt_adamw(1e-3);
    }
}
static const char *const weight_name[WEIGHTS] = {"fp32",         "bf16 nearest", "bf16 stochastic", "bf16 Kahan",
                                                 "bf16 compact", "bf16 exact",   "fp16 nearest",    "fp16 stochastic",
                                                 "fp16 Kahan",   "fp16 compact", "fp16 exact"};
static const char *const moment_name[MOMENTS] = {"fp32", "bf16", "fp16", "8 bit"};

/* Returns 0 if there is no such combination. */
static int combine(line *l, int rule, int weights, int moments, size_t n, kopt_isa isa) {
    kopt_format format = weights == 0 ? KOPT_F32 : weights < 6 ? KOPT_BF16 : KOPT_FP16;
    *l = make(rule_name[rule], rule_of(rule), format, weights == 0 ? KOPT_NEAREST : (kopt_rounding)((weights - 1) % 5),
              n, isa);
    l->opt.first_moment_format = l->opt.second_moment_format = (kopt_format)moments;
    return moments_of(&l->opt) > 0 || moments == KOPT_BF16;
}

static void check_bits(void) {
    uint64_t expected = 0;
    int isa, rule, weights, moments, cases = 0;
    for (isa = 0; isa < ISAS; isa++) {
        uint64_t h = 0xCBF29CE484222325u;
        if (!kopt_isa_usable((kopt_isa)isa)) continue;
        for (cases = 0, rule = 0; rule < RULES; rule++)
            for (weights = 0; weights < WEIGHTS; weights++)
                for (moments = 0; moments < MOMENTS; moments++) {
                    line l;
                    kopt_tensor t;
                    int k;
                    if (!combine(&l, rule, weights, moments, 2500, (kopt_isa)isa)) continue;
                    fill(&l);
                    for (k = 0; k < 3; k++) step(&l);
                    t = tensor(&l);
                    h = hash(hash(h, weight, size_of(l.format) * l.n), state, kopt_state_size(&l.opt, &t));
                    cases++;
                }
        printf("bits %-7s %016llx (%d combinations)\n", kopt_isa_name((kopt_isa)isa), (unsigned long long)h, cases);
        if (isa == 0)
            expected = h;
        else if (h != expected)
            fail("the instruction sets disagree: nothing is measured");
    }
}

/* ---- conversions: beside memcpy of as many bytes ---- */

static void conversions(const char *title, size_t n) {
    static const kopt_format from[] = {KOPT_F32, KOPT_F32, KOPT_BF16, KOPT_FP16},
                             to[] = {KOPT_BF16, KOPT_FP16, KOPT_F32, KOPT_F32};
    static const char *const name[] = {"fp32 to bf16", "fp32 to fp16", "bf16 to fp32", "fp16 to fp32"};
    const size_t inner = n > 4000000 ? 1 : 20000000 / n;
    double x[5][REPETITIONS];
    size_t k;
    int r, i;
    printf("\n%s\n%-34s %9s %9s %9s\n", title, "", "ns/elem", "GB/s", "memcpy");
    if (kopt_isa_force(KOPT_ISA_AUTO) != KOPT_OK) fail("the choice of the instruction set was refused");
    for (i = 0; (size_t)i < 4 * n; i += 4) memcpy(state + i, "\x12\x34\x56\x3e", 4);
    for (r = 0; r < REPETITIONS; r++)
        for (i = 0; i < 5; i++) {
            double t0;
            for (k = 0; k <= inner; k++) {
                if (k == 1) t0 = cpu_seconds();
                if (k == 0) t0 = 0;
                if (i == 4)
                    memcpy(weight, state, 3 * n);
                else if (kopt_convert(weight, to[i], state, from[i], n) != KOPT_OK)
                    fail("a conversion was refused");
            }
            x[i][r] = (cpu_seconds() - t0) / (double)inner / (double)n * 1e9;
        }
    for (i = 0; i < 5; i++) {
        const double ns = median(x[i], REPETITIONS), copy = median(x[4], REPETITIONS);
        printf("%-34s %9.3f %9.1f %9.2f\n", i == 4 ? "memcpy of 3 bytes" : name[i], ns, 6 / ns, copy / ns);
        fprintf(csv, "%s,%s,%s,%zu,%.4f,6,%.3f,0\n", title, i == 4 ? "memcpy" : name[i],
                kopt_isa_name(kopt_isa_current()), n, ns, copy / ns);
    }
}

/* ---- two threads: each steps half of the tensor; wall time ---- */

#ifdef __unix__
typedef struct half {
    const kopt_step *s;
    const kopt_tensor *t;
    size_t begin, end;
} half;

static void *run_half(void *p) {
    const half *h = p;
    if (kopt_step_range(h->s, h->t, 1, h->begin, h->end) != KOPT_OK) fail("a range was refused");
    return NULL;
}

static double wall_of_step(line *l, int two) {
    const size_t middle = two ? l->n / 512 * 256 : l->n;
    const double start = seconds();
    kopt_tensor t = tensor(l);
    pthread_t other;
    half h[2];
    kopt_step s;
    if (kopt_step_begin(&s, &l->opt) != KOPT_OK) fail("a step was refused");
    h[0].s = h[1].s = &s, h[0].t = h[1].t = &t;
    h[0].begin = 0, h[0].end = h[1].begin = middle, h[1].end = l->n;
    if (two && pthread_create(&other, NULL, run_half, &h[1]) != 0) fail("no thread");
    run_half(&h[0]);
    if (two) pthread_join(other, NULL);
    return seconds() - start;
}

static void threads(line *lines, int count) {
    int i, r;
    printf("\ntwo threads, %zu weights, wall time of a step\n%-34s %9s %9s %9s\n", lines[0].n, "", "1: ms", "2: ms",
           "faster");
    for (i = 0; i < count; i++) {
        line *l = &lines[i];
        double x[2][REPETITIONS];
        fill(l);
        for (r = 0; r < 2 * REPETITIONS; r++) x[r % 2][r / 2] = wall_of_step(l, r % 2) * 1e3;
        printf("%-34s %9.1f %9.1f %8.2fx\n", l->name, median(x[0], REPETITIONS), median(x[1], REPETITIONS),
               median(x[0], REPETITIONS) / median(x[1], REPETITIONS));
        fprintf(csv, "two threads,%s,%s,%zu,%.4f,%.0f,0,%.3f\n", l->name, kopt_isa_name(l->isa), l->n,
                median(x[1], REPETITIONS) * 1e6 / (double)l->n, traffic(l),
                median(x[0], REPETITIONS) / median(x[1], REPETITIONS));
    }
}
#endif

/* ---- instructions per element: a child is stepped one instruction at a time; the difference of two lengths ---- */

#ifdef COUNTS_INSTRUCTIONS
static double instructions(line *l, size_t n) { /* -1: ptrace is not allowed here */
    double count = 0;
    int status;
    pid_t child;
    l->n = n;
    fill(l);
    step(l);
    child = fork();
    if (child < 0) return -1;
    if (child == 0) {
        if (ptrace(PTRACE_TRACEME, 0, NULL, NULL) != 0) _exit(1);
        raise(SIGSTOP);
        step(l);
        _exit(0);
    }
    if (waitpid(child, &status, 0) != child || !WIFSTOPPED(status)) return -1;
    for (;;) {
        if (ptrace(PTRACE_SINGLESTEP, child, NULL, NULL) != 0 || waitpid(child, &status, 0) != child) return -1;
        if (WIFEXITED(status)) return WEXITSTATUS(status) == 0 ? count : -1;
        count++;
    }
}

static void count_instructions(line *lines, int count) {
    int i;
    printf("\ninstructions per element (single steps; 2,560 less 512 weights)\n");
    for (i = 0; i < count; i++) {
        const double few = instructions(&lines[i], 512), many = instructions(&lines[i], 2560);
        if (few < 0 || many < 0) {
            printf("not counted: this system does not allow it\n");
            return;
        }
        printf("%-34s %-7s %9.2f\n", lines[i].name, kopt_isa_name(lines[i].isa), (many - few) / 2048);
        fprintf(csv, "instructions,%s,%s,2560,%.3f,%.0f,0,0\n", lines[i].name, kopt_isa_name(lines[i].isa),
                (many - few) / 2048, traffic(&lines[i]));
    }
}
#endif

/* ---- the divider: what a divide and a root per element take if there is nothing else ---- */

#if defined(__x86_64__)
#include <immintrin.h>
#define DIVIDER(name, isa, type, load)                                                                    \
    __attribute__((target(isa))) static double name(const float *x, size_t n) {                           \
        type a = load(x), b = a, c = a, d = a;                                                            \
        double t0 = cpu_seconds(), ns;                                                                    \
        size_t i;                                                                                         \
        for (i = 0; i < n; i++)                                                                           \
            __asm__ volatile("vsqrtps %4, %0\n\tvdivps %4, %4, %1\n\tvsqrtps %4, %2\n\tvdivps %4, %4, %3" \
                             : "=v"(a), "=v"(b), "=v"(c), "=v"(d)                                         \
                             : "v"(load(x)));                                                             \
        ns = (cpu_seconds() - t0) * 1e9;                                                                  \
        return ns / (double)n / 2 / (sizeof(type) / 4);                                                   \
    }
DIVIDER(divider_avx512, "avx512f", __m512, _mm512_loadu_ps)
DIVIDER(divider_avx2, "avx2", __m256, _mm256_loadu_ps)
#endif

static void divider(void) {
#if defined(__x86_64__)
    float x[16];
    int i;
    for (i = 0; i < 16; i++) x[i] = 1.0f + (float)i;
    printf("\ndivide and root alone, ns/element:");
    if (kopt_isa_usable(KOPT_ISA_AVX512)) printf(" avx512 %.3f", divider_avx512(x, 2000000));
    if (kopt_isa_usable(KOPT_ISA_AVX2)) printf(" avx2 %.3f", divider_avx2(x, 2000000));
    printf("\n");
#endif
}

/* ---- cost over size, and a model of it ---- */

static size_t memory(void) { /* bytes that are free */
#if defined(__unix__) && defined(_SC_AVPHYS_PAGES)
    return (size_t)sysconf(_SC_AVPHYS_PAGES) * (size_t)sysconf(_SC_PAGESIZE);
#else
    return (size_t)4 << 30;
#endif
}

static void allocate(size_t n, size_t state_bytes) {
    free(weight), free(grad), free(state);
    room = 4 * n + 4096;
    state_room = state_bytes * n + 8192;
    weight = malloc(room);
    grad = malloc(room);
    state = malloc(state_room);
    if (weight == NULL || grad == NULL || state == NULL) fail("not enough memory: try --gb 0.1");
}

enum { POINTS = 19, SMALL = 13, CURVES = 4 }; /* SMALL: up to 10^6 weights */

/* What a line costs in ns. Elements that fill no pair of vectors are a rest: scalar code steps 1 to 3, and a padded
   pair more, which takes about as long for 4 as for 31. */
typedef struct costs {
    size_t pair;
    double call, each, start, one, padded; /* a rest of up to 3 costs start + one * its number, a larger one padded */
} costs;

/* ns per element. An element of a whole pair costs what is more of the arithmetic (measured where everything is in the
   second cache) and the bytes (the roofline kernel at this n); where both are alike they do not quite overlap: a norm
   of fourth powers, the power being a fit (the larger one alone is up to 22 % too small, squares are up to 31 % too
   large). */
static double model(const costs *c, size_t n, double bytes) {
    const size_t odd = n % c->pair;
    const double rest = odd == 0 ? 0 : odd <= 3 ? c->start + c->one * (double)odd : c->padded;
    const double each = sqrt(sqrt(c->each * c->each * c->each * c->each + bytes * bytes * bytes * bytes));
    return (c->call + rest + each * (double)(n - odd)) / (double)n;
}

/* ns per element of a line at each n, and the bytes' share of it. Interleaved: a machine that changes its speed changes
   all. */
static void at_sizes(line *l, const size_t *n, int count, double *ns, double *bytes) {
    const int repetitions = n[0] > 20000000 ? 3 : REPETITIONS;
    double x[POINTS][REPETITIONS], y[AHEADS][POINTS][REPETITIONS];
    int p, r, w;
    for (r = 0; r < repetitions; r++)
        for (p = 0; p < count; p++) {
            const size_t inner = n[p] > 2000000 ? 1 : 2000000 / (n[p] + 300) + 1;
            const double billions = (double)inner * (double)n[p] / 1e9; /* of elements */
            size_t k;
            double t0;
            l->n = n[p];
            fill(l);
            step(l);
            t0 = cpu_seconds();
            for (k = 0; k < inner; k++) step(l);
            x[p][r] = (cpu_seconds() - t0) / billions;
            for (w = 0; w < AHEADS; w++) { /* last: it makes any bits of the numbers */
                t0 = cpu_seconds();
                for (k = 0; k < inner; k++) roofline(l, (size_t)w * 1024);
                y[w][p][r] = (cpu_seconds() - t0) / billions;
            }
        }
    for (p = 0; p < count; p++) {
        ns[p] = median(x[p], repetitions);
        bytes[p] = median(y[0][p], repetitions);
        for (w = 1; w < AHEADS; w++)
            if (median(y[w][p], repetitions) < bytes[p]) bytes[p] = median(y[w][p], repetitions);
    }
}

static void plot(const char *path, const size_t *n, double measured[CURVES][POINTS], double predicted[CURVES][POINTS],
                 const int *points, const line *lines) {
    static const char *const colour[CURVES] = {"#777777", "#0b6e99", "#d9730d", "#448361"};
    FILE *f = fopen(path, "w");
    int c, p, decade;
    if (f == NULL) fail("cannot write the figure");
#define X(v) (60 + 72 * log10(v))
#define Y(v) (340 - 90 * log10(v))
    fprintf(f,
            "<svg xmlns='http://www.w3.org/2000/svg' width='760' height='460' viewBox='0 0 760 460' "
            "font-family='sans-serif' font-size='14'>\n"
            "<rect width='760' height='460' fill='white'/>\n"
            "<text x='60' y='26' font-size='18' font-weight='bold'>In small tensors a step costs a call, in large ones "
            "memory</text>\n");
    for (decade = 0; decade <= 9; decade++)
        fprintf(f, "<path d='M%d 50V405' stroke='#eee'/><text x='%d' y='422' text-anchor='middle'>1e%d</text>\n",
                60 + 72 * decade, 60 + 72 * decade, decade);
    for (decade = 0; decade <= 3; decade++)
        fprintf(f, "<path d='M60 %dH708' stroke='#eee'/><text x='52' y='%d' text-anchor='end'>%d</text>\n",
                340 - 90 * decade, 344 - 90 * decade,
                decade == 0   ? 1
                : decade == 1 ? 10
                : decade == 2 ? 100
                              : 1000);
    fprintf(f, "<text x='384' y='442' text-anchor='middle'>weights in the tensor</text>"
               "<text x='16' y='230' transform='rotate(-90 16 230)' text-anchor='middle'>ns per weight</text>\n");
    for (c = 0; c < CURVES; c++) {
        fprintf(f, "<polyline fill='none' stroke='%s' stroke-width='2' points='", colour[c]);
        for (p = 0; p < points[c]; p++) fprintf(f, "%.1f,%.1f ", X((double)n[p]), Y(measured[c][p]));
        fprintf(f, "'/>\n");
        for (p = 0; p < points[c]; p++)
            fprintf(f, "<circle cx='%.1f' cy='%.1f' r='3' fill='none' stroke='%s'/>\n", X((double)n[p]),
                    Y(predicted[c][p]), colour[c]);
        fprintf(f, "<text x='480' y='%d' fill='%s'>%s</text>\n", 70 + 18 * c, colour[c], lines[c].name);
    }
    fprintf(f, "<text x='480' y='%d' fill='#333'>circles: the model</text>\n</svg>\n", 70 + 18 * CURVES);
    if (fclose(f) != 0) fail("cannot write the figure");
}

static void sizes(kopt_isa best, double gigabytes) {
    const size_t n[POINTS] = {1,        3,        10,        32,        100,       316,     1000,
                              3162,     10240,    31623,     100000,    316228,    1000000, 3162278,
                              10000000, 31622777, 100000000, 316227766, 1000000000};
    double measured[CURVES][POINTS], predicted[CURVES][POINTS], worst = 0;
    int points[CURVES], c, p, together;
    line lines[CURVES];
    lines[0] = make("AdamW fp32", kopt_adamw(1e-3), KOPT_F32, KOPT_NEAREST, 1, best);
    lines[1] = make("AdamW bf16 Kahan", kopt_adamw(1e-3), KOPT_BF16, KOPT_KAHAN, 1, best);
    lines[2] = make("AdamW bf16 stochastic", kopt_adamw(1e-3), KOPT_BF16, KOPT_STOCHASTIC, 1, best);
    lines[3] = make("SGD momentum bf16 Kahan", kopt_sgd(1e-3, 0.9), KOPT_BF16, KOPT_KAHAN, 1, best);
    for (c = 0; c < CURVES; c++) {
        line *l = &lines[c];
        const size_t held = (size_t)(traffic(l) + (double)size_of(l->format)) / 2;
        const size_t lanes = best == KOPT_ISA_AVX512 ? 16 : best == KOPT_ISA_AVX2 ? 8 : 4;
        double bytes[POINTS];
        costs cost;
        for (p = 0; p < POINTS; p += together) {
            size_t most;
            together = p == 0 ? SMALL : 1;
            most = n[p + together - 1];
            if ((double)(most * held) >= gigabytes * 1e9 || most * held >= memory() / 10 * 9) break;
            free(weight), free(grad), free(state);
            room = size_of(l->format) * most + 4096;
            state_room = (held - 2 * size_of(l->format)) * most + 4096;
            weight = malloc(room), grad = malloc(room), state = malloc(state_room);
            if (weight == NULL || grad == NULL || state == NULL) break;
            at_sizes(l, n + p, together, measured[c] + p, bytes + p);
        }
        points[c] = p;
        if (p < SMALL) fail("too little memory for a curve");
        cost.pair = 2 * lanes;
        cost.each = measured[c][8] - measured[c][3] * 32 / 10240; /* of 32 weights nearly all is the call */
        cost.call = (measured[c][3] - cost.each) * 32;
        cost.one = (measured[c][1] * 3 - measured[c][0]) / 2;
        cost.start = measured[c][0] - cost.call - cost.one;
        cost.padded = measured[c][4] * 100 - cost.call - cost.each * 96; /* 100 weights: 96 in pairs of any set */
        printf(
            "\n%s: a call %.0f ns, arithmetic %.3f ns each, a rest of up to 3 %.0f ns and %.1f ns each, a larger one "
            "%.0f ns\n",
            l->name, cost.call, cost.each, cost.start, cost.one, cost.padded);
        printf("%12s %12s %12s %12s %8s\n", "weights", "bytes alone", "measured", "model", "error");
        for (p = 0; p < points[c]; p++) {
            double error;
            predicted[c][p] = model(&cost, n[p], bytes[p]);
            error = predicted[c][p] / measured[c][p] - 1;
            if (error > worst) worst = error;
            if (-error > worst) worst = -error;
            printf("%12zu %12.3f %12.3f %12.3f %+7.0f%%\n", n[p], bytes[p], measured[c][p], predicted[c][p],
                   100 * error);
            fprintf(csv, "size,%s,%s,%zu,%.4f,%.0f,%.3f,%.3f\n", l->name, kopt_isa_name(best), n[p], measured[c][p],
                    traffic(l), bytes[p] / measured[c][p], predicted[c][p] / measured[c][p]);
        }
    }
    plot("build/bench/cost.svg", n, measured, predicted, points, lines);
    printf("\nlargest error of the model: %.0f %%; written: build/bench/cost.svg\n", 100 * worst);
}

/* ---- everything ---- */

/* What --all measures of one combination. fp32 is AdamW in fp32 on the best set, with arrays of its own, in the same
   turns. */
typedef struct figures {
    double ns, roofline, fp32,
        two; /* two: how many times as fast with two threads, by the wall clock; 0: not measured */
} figures;

static figures measure(line *l, line *fp32, kopt_tensor *baseline, int two) {
    enum { MOST = 5 };
    const int repetitions = l->n > 1000000 ? 3 : MOST;
    const size_t inner = l->n > 100000 ? 1 : 200000 / (l->n + 100) + 1;
    double x[3][MOST], wall[2][MOST];
    figures f;
    size_t k;
    int r, which;
    fill(l);
    step(l);
    for (r = 0; r < repetitions; r++) {
        for (which = 0; which < 3; which++) {
            double t0;
            if (kopt_isa_force(which == 2 ? fp32->isa : l->isa) != KOPT_OK) fail("an instruction set was refused");
            t0 = cpu_seconds();
            for (k = 0; k < inner; k++) {
                if (which == 0) step(l);
                if (which == 1)
                    roofline(l, 2048),
                        roofline(l, 2048); /* twice: the second undoes what the first did to the numbers */
                if (which == 2 && kopt_optimizer_step(&fp32->opt, baseline, 1) != KOPT_OK) fail("a step was refused");
            }
            x[which][r] = (cpu_seconds() - t0) / (double)inner / (double)l->n * 1e9;
        }
        wall[0][r] = wall[1][r] = 0;
#ifdef __unix__
        for (which = 0; which < 2 && two; which++) wall[which][r] = wall_of_step(l, which);
#endif
    }
    f.ns = median(x[0], repetitions), f.roofline = median(x[1], repetitions) / 2, f.fp32 = median(x[2], repetitions);
    f.two = wall[1][0] > 0 ? median(wall[0], repetitions) / median(wall[1], repetitions) : 0;
    return f;
}

enum { SIZES = 7, IN_CACHE = 2, IN_DRAM = SIZES - 1 };
static figures found[SIZES][ISAS][RULES][WEIGHTS]; /* moments in the weights' format */

typedef enum column { TO_FP32, TO_ROOFLINE, TWO_THREADS } column;

static void print_rules(const char *title, int size, int isa, column value) {
    int rule, weights;
    printf("\n%s\n\n|  |", title);
    for (weights = 0; weights < WEIGHTS; weights++) printf(" %s |", weight_name[weights]);
    printf("\n|---|");
    for (weights = 0; weights < WEIGHTS; weights++) printf("---|");
    for (rule = 0; rule < RULES; rule++) {
        printf("\n| %s |", rule_name[rule]);
        for (weights = 0; weights < WEIGHTS; weights++) {
            const figures f = found[size][isa][rule][weights];
            printf(" %.2f |", value == TO_FP32 ? f.ns / f.fp32 : value == TO_ROOFLINE ? f.roofline / f.ns : f.two);
        }
    }
    printf("\n");
}

static void all(kopt_isa best, size_t dram) {
    const size_t n[SIZES] = {64, 1000, 10000, 100000, 1000000, 10000000, dram};
    int size, isa, rule, weights, moments;
    char title[128];
    fprintf(csv, "rule,weights,moments,isa,n,ns_per_element,bytes_per_element,fraction_of_roofline,ratio_to_fp32_adamw,"
                 "two_threads\n");
    for (size = 0; size < SIZES; size++) {
        line fp32 = make("", kopt_adamw(1e-3), KOPT_F32, KOPT_NEAREST, n[size], best);
        kopt_tensor baseline;
        fprintf(stderr, "n = %zu ...\n", n[size]);
        allocate(n[size], 8);
        fill(&fp32);
        baseline = tensor(&fp32);
        weight = grad = state = NULL; /* the baseline's now */
        allocate(n[size], 20);
        for (isa = ISAS - 1; isa >= 0; isa--)
            for (rule = 0; rule < RULES; rule++)
                for (weights = 0; weights < WEIGHTS; weights++)
                    for (moments = 0; moments < MOMENTS; moments++) {
                        line l;
                        figures f;
                        int same_format;
                        if (!kopt_isa_usable((kopt_isa)isa) ||
                            !combine(&l, rule, weights, moments, n[size], (kopt_isa)isa))
                            continue;
                        same_format = moments == (int)l.format || moments_of(&l.opt) == 0;
                        if (n[size] > 1000000 && (isa != (int)best || !same_format)) continue;
                        f = measure(&l, &fp32, &baseline, n[size] >= 1000000 && isa == (int)best && same_format);
                        if (same_format) found[size][isa][rule][weights] = f;
                        fprintf(csv, "%s,%s,%s,%s,%zu,%.4f,%.0f,%.3f,%.3f,%.2f\n", rule_name[rule],
                                weight_name[weights], moment_name[moments], kopt_isa_name((kopt_isa)isa), l.n, f.ns,
                                traffic(&l), f.roofline / f.ns, f.ns / f.fp32, f.two);
                    }
        free(baseline.weight), free(baseline.grad), free(baseline.state);
    }
    for (isa = ISAS - 1; isa >= 0; isa--) {
        if (!kopt_isa_usable((kopt_isa)isa)) continue;
        snprintf(title, sizeof title, "%s, 10,000 weights: time, AdamW in fp32 on %s is 1",
                 kopt_isa_name((kopt_isa)isa), kopt_isa_name(best));
        print_rules(title, IN_CACHE, isa, TO_FP32);
    }
    snprintf(title, sizeof title, "%s, DRAM, %zu weights: time, AdamW in fp32 is 1", kopt_isa_name(best), dram);
    print_rules(title, IN_DRAM, (int)best, TO_FP32);
    print_rules("DRAM: fraction of the roofline", IN_DRAM, (int)best, TO_ROOFLINE);
    print_rules("DRAM: how many times as fast with two threads", IN_DRAM, (int)best, TWO_THREADS);
}

int main(int argc, char **argv) {
    const kopt_isa best = kopt_isa_current();
    double gigabytes = 0;
    line lines[MAX_LINES];
    size_t n, lengths[] = {1, 32, 1000, 10000, 100000, 1000000};
    char title[128];
    const char *mode = "bench";
    int count, i, isa;
    if (argc > 1 && (strcmp(argv[1], "--sizes") == 0 || strcmp(argv[1], "--all") == 0))
        mode = argv[1] + 2, argc--, argv++;
    if (argc == 3 && strcmp(argv[1], "--gb") == 0) gigabytes = atof(argv[2]);
    if (argc == 1) gigabytes = strcmp(mode, "sizes") == 0 ? 17 : 1;
    if ((argc != 1 && argc != 3) || !(gigabytes >= 0.01 && gigabytes <= 1000))
        fail("usage: bench [--sizes | --all] [--gb SIZE]");
    n = (size_t)(gigabytes * 1e9 / 10) / 1024 * 1024 + 1024; /* bf16 Kahan AdamW: 10 bytes held per weight */
    allocate(strcmp(mode, "bench") == 0 ? n : 4096, strcmp(mode, "bench") == 0 ? 10 : 20);
    snprintf(title, sizeof title, "build/bench/%s.csv", mode);
    csv = fopen(title, "w");
    if (csv == NULL) fail("cannot write into build/bench");
    check_bits();
    if (strcmp(mode, "all") == 0) {
        all(best, n);
        if (fclose(csv) != 0) fail("cannot write build/bench/all.csv");
        printf("\nwritten: build/bench/all.csv\n");
        return 0;
    }
    fprintf(csv, "table,line,isa,n,ns_per_element,bytes_per_element,fraction_of_roofline,time_ratio_to_first_line\n");
    if (strcmp(mode, "sizes") == 0) {
        sizes(best, gigabytes);
        return fclose(csv) != 0;
    }

    count = 0;
    lines[count++] = make("AdamW fp32", kopt_adamw(1e-3), KOPT_F32, KOPT_NEAREST, n, best);
    lines[count++] = make("AdamW bf16 Kahan", kopt_adamw(1e-3), KOPT_BF16, KOPT_KAHAN, n, best);
    lines[count] = make("AdamW bf16 Kahan, nearest stores", kopt_adamw(1e-3), KOPT_BF16, KOPT_KAHAN, n, best);
    lines[count].opt.moment_rounding = lines[count].opt.residual_rounding = KOPT_NEAREST;
    count++;
    lines[count++] = make("AdamW bf16 exact", kopt_adamw(1e-3), KOPT_BF16, KOPT_EXACT, n, best);
    lines[count++] = make("AdamW bf16 compact", kopt_adamw(1e-3), KOPT_BF16, KOPT_COMPACT, n, best);
    lines[count++] = make("AdamW bf16 stochastic", kopt_adamw(1e-3), KOPT_BF16, KOPT_STOCHASTIC, n, best);
    lines[count++] = make("SGD momentum bf16 Kahan", kopt_sgd(1e-3, 0.9), KOPT_BF16, KOPT_KAHAN, n, best);
    lines[count++] = make("Lion bf16 Kahan", kopt_lion(1e-3), KOPT_BF16, KOPT_KAHAN, n, best);
    lines[count] = make("AdamW bf16 Kahan, 8-bit moments", kopt_adamw(1e-3), KOPT_BF16, KOPT_KAHAN, n, best);
    lines[count++].opt.first_moment_format = lines[count++].opt.second_moment_format = KOPT_Q8;
    lines[count++] = make("Adan bf16 Kahan", kopt_adan(1e-3), KOPT_BF16, KOPT_KAHAN, n, best);
    lines[count++] = make("AdamW fp16 Kahan", kopt_adamw(1e-3), KOPT_FP16, KOPT_KAHAN, n, best);
    if (best == KOPT_ISA_AVX512)
        lines[count++] = make("AdamW bf16 Kahan", kopt_adamw(1e-3), KOPT_BF16, KOPT_KAHAN, n, KOPT_ISA_AVX2);
    snprintf(title, sizeof title, "DRAM: %.2f GB for the bf16 Kahan line (%zu weights)", (double)n * 1e-8, n);
    table(title, lines, count, 1);

#ifdef __unix__
    count = 0;
    lines[count++] = make("AdamW fp32", kopt_adamw(1e-3), KOPT_F32, KOPT_NEAREST, n, best);
    lines[count++] = make("AdamW bf16 Kahan", kopt_adamw(1e-3), KOPT_BF16, KOPT_KAHAN, n, best);
    lines[count++] = make("AdamW bf16 stochastic", kopt_adamw(1e-3), KOPT_BF16, KOPT_STOCHASTIC, n, best);
    threads(lines, count);
#endif
    conversions("conversions, in the second cache", 65536);
    conversions("conversions, DRAM", (room < state_room ? room : state_room) / 4096 * 1024 - 1024);
    divider();

    count = 0;
    lines[count++] = make("AdamW fp32", kopt_adamw(1e-3), KOPT_F32, KOPT_NEAREST, 10240, best);
    lines[count++] = make("AdamW bf16 Kahan", kopt_adamw(1e-3), KOPT_BF16, KOPT_KAHAN, 10240, best);
    lines[count++] = make("AdamW bf16 stochastic", kopt_adamw(1e-3), KOPT_BF16, KOPT_STOCHASTIC, 10240, best);
    lines[count++] = make("SGD momentum bf16 Kahan", kopt_sgd(1e-3, 0.9), KOPT_BF16, KOPT_KAHAN, 10240, best);
    table("in cache: 10,240 weights", lines, count, 0);
#ifdef COUNTS_INSTRUCTIONS
    if (best == KOPT_ISA_AVX512)
        lines[count++] = make("AdamW bf16 Kahan", kopt_adamw(1e-3), KOPT_BF16, KOPT_KAHAN, 10240, KOPT_ISA_AVX2);
    count_instructions(lines, count);
#endif

    count = 0;
    for (isa = ISAS - 1; isa >= 0; isa--)
        if (kopt_isa_usable((kopt_isa)isa))
            lines[count++] = make("AdamW bf16 Kahan", kopt_adamw(1e-3), KOPT_BF16, KOPT_KAHAN, 10240, (kopt_isa)isa);
    table("in cache: 10,240 weights, each instruction set", lines, count, 0);

    count = 0;
    lines[count++] = make("active", kopt_adamw(1e-3), KOPT_BF16, KOPT_KAHAN, 10240, best);
    lines[count] = make("idle: no gradient for 3,000 steps", kopt_adamw(1e-3), KOPT_BF16, KOPT_KAHAN, 10240, best);
    lines[count++].idle = 1;
    table("idle parameters", lines, count, 0);

    printf("\nsize: AdamW bf16 Kahan, one call per tensor\n%10s %12s %12s\n", "weights", "ns/call", "ns/elem");
    for (i = 0; i < (int)(sizeof lengths / sizeof lengths[0]); i++) {
        line l = make("", kopt_adamw(1e-3), KOPT_BF16, KOPT_KAHAN, lengths[i], best);
        const size_t calls = 2000000 / (lengths[i] + 100) + 1;
        double x[REPETITIONS];
        size_t k;
        int r;
        fill(&l);
        for (r = 0; r < REPETITIONS; r++) {
            const double t0 = cpu_seconds();
            for (k = 0; k < calls; k++) step(&l);
            x[r] = (cpu_seconds() - t0) / (double)calls * 1e9;
        }
        printf("%10zu %12.0f %12.3f\n", lengths[i], median(x, REPETITIONS),
               median(x, REPETITIONS) / (double)lengths[i]);
        fprintf(csv, "size,AdamW bf16 Kahan,%s,%zu,%.4f,18,0,0\n", kopt_isa_name(best), lengths[i],
                median(x, REPETITIONS) / (double)lengths[i]);
    }
    fclose(csv);
    printf("\nwritten: build/bench/bench.csv\n");
    return 0;
}
