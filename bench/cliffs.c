/* Is any combination of formats, roundings and rules slow? Each beside AdamW with all in bf16 and Kahan, which has
   limits to keep.

     ./build.sh bench cliffs               in cache on each instruction set, in DRAM on the best: four minutes
     ./build.sh bench cliffs quick         the same with fewer rounds and smaller arrays: 90 seconds
     ... cache | dram                      one of the two places
     ... sse2 avx2                         these instruction sets
     ... --nearest-stores                  moments and compensations rounded to nearest (not those of the baseline)
     ... --markdown                        the tables of docs/benchmarks.md and nothing else on stdout

   In cache: 8,192 weights, in thread CPU time. Each round measures the combination between two turns of the baseline
   (all in bf16, Kahan, stochastic stores of moments and compensations); a ratio is the median of the ratios of the
   rounds, and rounds in which the baseline was slow count only if there are no others: see measure().
   In DRAM: as many weights as hold some 128 or 256 MB, but 40 million at most. The roofline is a kernel that does
   nothing but read and write arrays of the same sizes (gradient: read; weight, residual, moments: read and written;
   copy: written) with the widest vectors, with and without prefetch, the best of three, in the same rounds.
   The limits are in limit_of(). Writes build/bench/cliffs.csv, which has all of them. */
#include "timing.h"

#define KAHAN_OPT_IMPLEMENTATION
#include "../kahan_opt.h"

#include "combination.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { IN_CACHE = 8192, MOST_WEIGHTS = 40000000, MAX_ROUNDS = 60, MAX_ROWS = 5000, AHEADS = 3 };
enum { CACHE, DRAM, PLACES };

#define QUIET 1.07
static const char *const place_name[PLACES] = {"cache", "DRAM"};
static int quick, markdown, nearest_stores;

static void fail(const char *why) {
    fprintf(stderr, "cliffs: %s\n", why);
    exit(2);
}

/* ---- a combination: what it keeps, and what it may take ---- */

static size_t size_of(int format) { return format == F32 ? 4 : format == Q8 ? 1 : 2; }

static int moments_of(const combination *c) {
    switch (c->rule) {
    case SGD:
    case EMA: return 0;
    case MOMENTUM:
    case LION: return 1;
    case AMSGRAD: return 3;
    case ADAN: return 4;
    default: return 2;
    }
}

static size_t residual_of(const combination *c) {
    return c->weight == F32 || c->rounding < KAHAN ? 0 : c->rounding == COMPACT ? 1 : 2;
}

static size_t copy_of(const combination *c) { return c->copy == NO_COPY ? 0 : size_of(c->copy); }

static size_t rewritten(const combination *c) { /* bytes per weight that a step reads and writes */
    return size_of(c->weight) + residual_of(c) + size_of(c->moment) * (size_t)moments_of(c);
}
static size_t held(const combination *c) { /* at most: 1 for the scales of 8-bit moments */
    return rewritten(c) + size_of(c->grad) + copy_of(c) + (c->moment == Q8);
}
static size_t traffic(const combination *c) { return 2 * rewritten(c) + size_of(c->grad) + copy_of(c); }

/* What the step of a combination may take beside the time that it took when each had code of its own: the text is short
   where few train. By instruction set, and by what is rare. */
static double allowance_of(const combination *c, kopt_isa isa) {
    const int small = isa != KOPT_ISA_AVX2 && isa != KOPT_ISA_AVX512;
    const int headline =
        c->copy == NO_COPY && c->weight == c->grad && c->weight == c->moment &&
        (c->weight == F32 ||
         (c->weight == BF16 && (c->rounding == KAHAN || c->rounding == STOCHASTIC || c->rounding == EXACT)));
    switch (c->rule) {
    case AMSGRAD:
    case STABLE_ADAMW:
    case ADAN:
    case RADAM:
    case RANGER:
    case EMA: return 2.2;
    case SGD:
    case MOMENTUM:
    case LION:
    case ADAMW:
        if (headline) return small ? 1.05 : 1.03;
        break;
    default: break;
    }
    if (small) return 2.2;
    if (c->weight == FP16 || c->moment == FP16) return isa == KOPT_ISA_AVX512 ? 1.7 : 1.4;
    return c->moment == Q8 ? 1.15 : 1.1;
}

/* In cache: of the ratio to the baseline, at most, without the allowance. By formats: */
static double limit_of_formats(const combination *c) {
    if (c->moment == Q8) return c->weight == FP16 ? 2.4 : 2.0;
    if (c->weight == FP16) return c->moment == FP16 ? 2.2 : 1.8;
    if (c->moment == FP16) return 1.9;
    if (c->weight == F32) return 1.6;
    return c->rounding == KAHAN || c->rounding == STOCHASTIC ? 1.4 : 1.5;
}

/* ... and by rules: the larger one. 0: there is none. In DRAM: of the fraction of the roofline, at least. */
static double limit_of(const combination *c, kopt_isa isa, int place) {
    const double formats = limit_of_formats(c), more = allowance_of(c, isa);
    if (place == DRAM) return c->rule == SGD ? 0.75 : c->rule == ADAMW && c->moment != Q8 ? 0.45 : 0;
    switch (c->rule) {
    case ADAMW:
    case ADAM_L2:
    case FULLY_DECOUPLED: return more * formats;
    case EMA: return more;
    case ADAN: return more * (formats > 2.4 ? formats : 2.4);
    case RANGER_SYNCS:
    case ADAM_ATAN2: return 0;
    default: return more * (formats > 1.7 ? formats : 1.7);
    }
}

/* StableAdamW goes over the tensor twice, and its limit is that of one of them. */
static double passes(const combination *c) { return c->rule == STABLE_ADAMW ? 2 : 1; }
static const char *name_of(int rule) { return rule == STABLE_ADAMW ? "StableAdamW/2" : rule_name[rule]; }

/* ---- arrays, the baseline and the roofline ---- */

static unsigned char *arena[2]; /* in DRAM the second is the roofline's */
static size_t arena_room;

static void *allocate(size_t bytes) {
    void *p = malloc(bytes);
    if (p == NULL) fail("out of memory");
    memset(p, 0, bytes);
    return p;
}

static arrays lay_out(const combination *c, size_t n, unsigned char *room, size_t bytes) {
    unsigned char *next = room;
    arrays a;
    a.n = n;
    a.weight = take(&next, n * size_of(c->weight));
    a.grad = take(&next, n * size_of(c->grad));
    a.copy = take(&next, n * copy_of(c));
    a.state = take(&next, 0);
    a.state_room = bytes - (size_t)((unsigned char *)a.state - room);
    return a;
}

static kopt_optimizer base_opt;
static kopt_tensor base;
static unsigned base_steps;
static double base_least; /* seconds per weight: its fastest turn on this instruction set */

static double run(kopt_optimizer *opt, kopt_tensor *t, unsigned steps) { /* seconds */
    const double start = cpu_seconds();
    for (; steps > 0; steps--)
        if (kopt_optimizer_step(opt, t, 1) != KOPT_OK) fail("a step was refused");
    return cpu_seconds() - start;
}

static unsigned steps_for(kopt_optimizer *opt, kopt_tensor *t, double seconds) { /* so many take about as long */
    unsigned steps = 1;
    double time = 0;
    while (steps < 10000 && (time = run(opt, t, steps)) < seconds / 4) steps *= 2;
    return (unsigned)(steps * seconds / time) + 1;
}

static void start_baseline(void) {
    static const combination c = {ADAMW, BF16, NO_COPY, KAHAN, BF16, BF16, 0};
    static unsigned char room[10 * IN_CACHE + SPARE + 64];
    const arrays a = lay_out(&c, IN_CACHE, room, sizeof room);
    if (!begin(&c, &a, &base_opt, &base)) fail("the baseline was refused");
}

typedef struct stream {
    unsigned char *p;
    size_t lines; /* cache lines of 64 bytes per 64 elements */
    int written;  /* 0: read; 1: read and written; 2: written */
} stream;

#ifdef __GNUC__
typedef uint64_t wide __attribute__((vector_size(64), aligned(1), may_alias));
#else
typedef struct wide {
    uint64_t x[8];
} wide;
#error "the roofline needs vectors of gcc or clang"
#endif

#define ROOFLINE(name, target)                                                          \
    target static uint64_t name(const stream *s, int streams, size_t n, size_t ahead) { \
        wide sum = {0};                                                                 \
        size_t i, k;                                                                    \
        int which;                                                                      \
        for (i = 0; i + 64 <= n; i += 64)                                               \
            for (which = 0; which < streams; which++) {                                 \
                unsigned char *p = s[which].p + i * s[which].lines;                     \
                for (k = 0; k < s[which].lines; k++, p += 64) {                         \
                    if (ahead != 0) __builtin_prefetch(p + ahead);                      \
                    if (s[which].written == 0)                                          \
                        sum ^= *(const wide *)p;                                        \
                    else if (s[which].written == 1)                                     \
                        *(wide *)p ^= sum;                                              \
                    else                                                                \
                        *(wide *)p = sum;                                               \
                }                                                                       \
            }                                                                           \
        return sum[0];                                                                  \
    }
#if defined(__x86_64__)
ROOFLINE(roofline_avx512, __attribute__((target("avx512f"))))
ROOFLINE(roofline_avx2, __attribute__((target("avx2"))))
#endif
ROOFLINE(roofline_plain, )

static volatile uint64_t sink;

static double roofline(const combination *c, size_t n, size_t ahead) { /* seconds */
    static int widest = -1; /* asking takes microseconds in a virtual machine */
    const size_t bytes[4] = {size_of(c->grad), size_of(c->weight), residual_of(c), copy_of(c)};
    static const int written[4] = {0, 1, 1, 2};
    unsigned char *next = arena[1];
    stream s[8];
    int streams = 0, k;
    double start;
    for (k = 0; k < 4 + moments_of(c); k++) {
        const size_t lines = k < 4 ? bytes[k] : size_of(c->moment);
        if (lines == 0) continue;
        s[streams].p = take(&next, n * lines), s[streams].lines = lines, s[streams++].written = k < 4 ? written[k] : 1;
    }
    start = cpu_seconds();
#if defined(__x86_64__)
    if (widest < 0) widest = kopt_isa_usable(KOPT_ISA_AVX512) ? 2 : kopt_isa_usable(KOPT_ISA_AVX2);
    if (widest == 2) sink = roofline_avx512(s, streams, n, ahead);
    if (widest == 1) sink = roofline_avx2(s, streams, n, ahead);
#else
    widest = 0;
#endif
    if (widest == 0) sink = roofline_plain(s, streams, n, ahead);
    return cpu_seconds() - start;
}

/* ---- what is measured ---- */

typedef struct row {
    combination c;
    int isa, place;
    double ns, ratio, fraction, limit; /* fraction of the roofline; limit 0: none */
    int quiet;                         /* 0: other load was there in each round           */
} row;

static row rows[MAX_ROWS];
static int row_count;

static const row *found(const combination *c, int isa, int place) {
    int i;
    for (i = 0; i < row_count; i++) {
        const combination *d = &rows[i].c;
        if (rows[i].isa == isa && rows[i].place == place && d->rule == c->rule && d->weight == c->weight &&
            d->copy == c->copy && d->rounding == c->rounding && d->moment == c->moment && d->grad == c->grad)
            return &rows[i];
    }
    return NULL;
}

static double value_of(const row *r) { return r->place == DRAM ? r->fraction : r->ratio; }

static int is_over(const row *r) {
    if (r->limit <= 0) return 0;
    return r->place == DRAM ? r->fraction < r->limit : r->ratio > r->limit;
}

/* Seconds per weight of one turn of the baseline. */
static double base_turn(void) {
    const double time = run(&base_opt, &base, base_steps) / base_steps / IN_CACHE;
    if (base_least <= 0 || time < base_least) base_least = time;
    return time;
}

/* A round is quiet if the baseline before and after it took about as little as ever on this instruction set. A busy
   neighbour takes more from the baseline, which keeps the units of the core busy, than from what waits: if there are
   quiet rounds, they alone count, and a few more are made to have some. */
static void measure(const combination *c, int isa, int place) {
    const size_t most = (arena_room - 2 * SPARE) / held(c);
    const size_t n = place == CACHE ? IN_CACHE : (most < MOST_WEIGHTS ? most : MOST_WEIGHTS) / 256 * 256;
    const double seconds = quick ? 4e-4 : 8e-4;
    const int enough = place == DRAM ? quick ? 3 : 5 : quick ? 7 : 15;
    const int most_rounds = place == DRAM ? enough : 4 * enough;
    double time[MAX_ROUNDS], ratio[MAX_ROUNDS], fraction[AHEADS][MAX_ROUNDS], before, after;
    const arrays a = lay_out(c, n, arena[0], arena_room);
    kopt_optimizer opt;
    kopt_tensor t;
    unsigned steps;
    int rounds = 0, calm = 0, r, k;
    row *result = &rows[row_count];
    if (row_count == MAX_ROWS) fail("too many rows");
    if (!begin(c, &a, &opt, &t)) fail("a combination was refused");
    start_baseline();
    run(&base_opt, &base, 1);
    run(&opt, &t, 1);
    steps = place == DRAM ? 1 : steps_for(&opt, &t, seconds);
    after = base_turn();
    for (r = 0; r < most_rounds && calm < enough; r++) {
        int quiet;
        double one;
        before = after;
        one = run(&opt, &t, steps) / steps / (double)n / passes(c);
        for (k = 0; k < AHEADS && place == DRAM; k++)
            fraction[k][r] = roofline(c, n, (size_t)k * 1024) / (double)n / one / passes(c);
        after = base_turn();
        quiet = before < QUIET * base_least && after < QUIET * base_least;
        if (quiet && calm == 0 && place == CACHE) rounds = 0; /* those that were not do not count any more */
        if (!quiet && calm > 0 && place == CACHE) continue;
        calm += quiet;
        time[rounds] = one, ratio[rounds++] = 2 * one / (before + after);
    }
    result->c = *c, result->isa = isa, result->place = place, result->quiet = calm > 0;
    result->ns = median(time, rounds) * 1e9;
    result->ratio = median(ratio, rounds);
    result->fraction = 0;
    for (k = 0; k < AHEADS && place == DRAM; k++) {
        const double x = median(fraction[k], r); /* the fastest roofline is the smallest */
        if (k == 0 || x < result->fraction) result->fraction = x;
    }
    result->limit = limit_of(c, isa, place);
    row_count++;
}

/* ---- grids: the formats of one rule, or the rules in the formats of their weights ---- */

enum { WEIGHTS = 13, COLUMNS = 11, CELL = 8, ALL_RULES = RULES }; /* ALL_RULES: the second kind of grid */

static int grid_rows(int rule) {
#ifndef KAHAN_OPT_VMATH
    if (rule == ALL_RULES) return ADAM_ATAN2; /* without it, the last one */
#endif
    return rule == ALL_RULES ? RULES : WEIGHTS;
}

static int grid_columns(int rule) { return rule == ALL_RULES ? COLUMNS : rule == SGD || rule == EMA ? 3 : 12; }

static void weights_of(combination *c, int weights) { /* fp32, with copies, five of bf16, five of fp16 */
    c->weight = weights < 3 ? F32 : weights < 8 ? BF16 : FP16;
    c->copy = weights == 1 ? BF16 : weights == 2 ? FP16 : NO_COPY;
    c->rounding = weights < 3 ? NEAREST : (weights - 3) % 5;
}

static combination cell_of(int rule, int line, int column) {
    combination c;
    c.nearest_stores = nearest_stores;
    c.rule = rule == ALL_RULES ? line : rule;
    weights_of(&c, rule == ALL_RULES ? column == 0 ? 0 : column + 2 : line);
    c.moment = rule == ALL_RULES ? c.weight : column / 3;
    c.grad = rule == ALL_RULES ? c.weight : column % 3;
    if (moments_of(&c) == 0) c.moment = c.weight;
    return c;
}

static void label_of(const combination *c, char *text, size_t room) {
    if (c->copy != NO_COPY)
        snprintf(text, room, "fp32 + %s copy", format_name[c->copy]);
    else if (c->weight == F32)
        snprintf(text, room, "fp32");
    else
        snprintf(text, room, "%s %s", format_name[c->weight], rounding_name[c->rounding]);
}

static void line_label(int rule, int line, char *text, size_t room) {
    combination c;
    weights_of(&c, line);
    if (rule == ALL_RULES)
        snprintf(text, room, "%s", name_of(line));
    else
        label_of(&c, text, room);
}

/* Two lines of words above a column: what is the same for its neighbours, and what is not. */
static const char *upper_label(int rule, int column) {
    const combination c = cell_of(rule, 0, column);
    return rule == ALL_RULES ? format_name[c.weight] : moments_of(&c) == 0 ? "" : format_name[c.moment];
}
static const char *lower_label(int rule, int column) {
    static const char *const brief[ROUNDINGS] = {"near.", "stoch.", "kahan", "comp.", "exact"};
    const combination c = cell_of(rule, 0, column);
    return rule != ALL_RULES ? format_name[c.grad] : c.weight == F32 ? "" : brief[c.rounding];
}

static void title_of(int rule, int isa, int place, char *text, size_t room) {
    snprintf(text, room, "%s on %s, %s%s", rule == ALL_RULES ? "Every rule" : name_of(rule),
             kopt_isa_name((kopt_isa)isa),
             place == DRAM ? "DRAM: fraction of the roofline" : "in cache: time, AdamW all in bf16 with Kahan is 1",
             nearest_stores ? "; small stores to nearest" : "");
}

static void print_grid(int rule, int isa, int place) {
    char text[128];
    int line, column;
    title_of(rule, isa, place, text, sizeof text);
    printf("\n%s\n%-18s", text, rule == ALL_RULES ? "weights" : rule == SGD ? "" : "moments");
    for (column = 0; column < grid_columns(rule); column++) {
        const char *label = upper_label(rule, column);
        printf("%*s", CELL, column > 0 && strcmp(label, upper_label(rule, column - 1)) == 0 ? "" : label);
    }
    printf("\n%-18s", rule == ALL_RULES ? "rounding" : "gradients");
    for (column = 0; column < grid_columns(rule); column++) printf("%*s", CELL, lower_label(rule, column));
    printf("\n");
    for (line = 0; line < grid_rows(rule); line++) {
        line_label(rule, line, text, sizeof text);
        printf("%-18s", text);
        for (column = 0; column < grid_columns(rule); column++) {
            const combination c = cell_of(rule, line, column);
            const row *r = found(&c, isa, place);
            if (r == NULL)
                printf("%*s", CELL, "-");
            else
                printf("%*.2f%c", CELL - 1, value_of(r), is_over(r) ? '!' : ' ');
        }
        printf("\n");
    }
    fflush(stdout);
}

/* Some columns of a grid: of a rule, gradients in the format of the weights; of all rules, four kinds of weights. */
static int in_markdown(int rule, int line, int column) {
    const combination c = cell_of(rule, line, column);
    if (rule != ALL_RULES) return c.grad == c.weight;
    return c.weight == F32 || c.rounding == KAHAN || (c.weight == BF16 && c.rounding == STOCHASTIC);
}

static void print_markdown(int rule, int isa, int place) {
    char text[128];
    int line, column;
    title_of(rule, isa, place, text, sizeof text);
    printf("%s%s:\n\n| |", text, rule == ALL_RULES ? "" : rule == SGD ? "" : "; by moments, gradients as weights");
    for (column = 0; column < grid_columns(rule); column++) {
        const combination c = cell_of(rule, 0, column);
        if (!in_markdown(rule, 0, column)) continue;
        label_of(&c, text, sizeof text);
        printf(" %s |", rule == ALL_RULES ? text : moments_of(&c) == 0 ? "" : format_name[c.moment]);
    }
    printf("\n|---|");
    for (column = 0; column < grid_columns(rule); column++)
        if (in_markdown(rule, 0, column)) printf("---|");
    for (line = 0; line < grid_rows(rule); line++) {
        line_label(rule, line, text, sizeof text);
        printf("\n| %s |", text);
        for (column = 0; column < grid_columns(rule); column++) {
            const combination c = cell_of(rule, line, column);
            const row *r = found(&c, isa, place);
            if (!in_markdown(rule, line, column)) continue;
            if (r == NULL)
                printf(" |");
            else
                printf(is_over(r) ? " **%.2f** |" : " %.2f |", value_of(r));
        }
    }
    printf("\n\n");
}

static void measure_grid(int rule, int isa, int place) {
    int line, column;
    for (line = 0; line < grid_rows(rule); line++)
        for (column = 0; column < grid_columns(rule); column++) {
            const combination c = cell_of(rule, line, column);
            if (found(&c, isa, place) == NULL) measure(&c, isa, place);
        }
    if (!markdown) print_grid(rule, isa, place);
}

/* ---- the file for other programs ---- */

static FILE *open_output(const char *path) {
    FILE *f = fopen(path, "w");
    if (f == NULL) fail("cannot write into build/bench");
    return f;
}

static void write_csv(FILE *f) {
    int i;
    fprintf(f, "isa,place,rule,weight,copy,rounding,moment,grad,ns_per_weight,ratio,bytes_per_weight,"
               "fraction_of_roofline,limit,ok\n");
    for (i = 0; i < row_count; i++) {
        const row *r = &rows[i];
        const combination *c = &r->c;
        fprintf(f, "%s,%s,%s,%s,%s,%s,%s,%s,%.4f,%.4f,%lu,", kopt_isa_name((kopt_isa)r->isa), place_name[r->place],
                name_of(c->rule), format_name[c->weight], c->copy == NO_COPY ? "-" : format_name[c->copy],
                c->weight == F32 ? "-" : rounding_name[c->rounding], moments_of(c) == 0 ? "-" : format_name[c->moment],
                format_name[c->grad], r->ns, r->ratio, (unsigned long)traffic(c));
        if (r->place == DRAM) fprintf(f, "%.3f", r->fraction);
        if (r->limit > 0)
            fprintf(f, ",%.2f,%s\n", r->limit, is_over(r) ? "over" : "ok");
        else
            fprintf(f, ",,\n");
    }
}

static void summary(FILE *f, int measured[PLACES][ISAS]) {
    int place, isa, i, all = 0, all_ok = 0;
    fprintf(f, "\n");
    for (place = 0; place < PLACES; place++)
        for (isa = ISAS - 1; isa >= 0; isa--) {
            int limited = 0, ok = 0;
            double most = 0;
            int loud = 0;
            const row *worst = NULL;
            if (!measured[place][isa]) continue;
            for (i = 0; i < row_count; i++) {
                const row *r = &rows[i];
                double beyond;
                if (r->place != place || r->isa != isa) continue;
                loud += !r->quiet && place == CACHE;
                if (r->limit <= 0) continue;
                limited++, ok += !is_over(r);
                beyond = place == DRAM ? r->limit / r->fraction : r->ratio / r->limit;
                if (beyond > most) most = beyond, worst = r;
            }
            all += limited, all_ok += ok;
            fprintf(f, "%s, %s: %d of %d within their limits", kopt_isa_name((kopt_isa)isa), place_name[place], ok,
                    limited);
            if (worst != NULL) {
                char text[64];
                const combination *c = &worst->c;
                label_of(c, text, sizeof text);
                fprintf(f, "; the worst: %s, %s, moments %s, gradients %s: %.2f, limit %.2f", name_of(c->rule), text,
                        moments_of(c) == 0 ? "-" : format_name[c->moment], format_name[c->grad], value_of(worst),
                        worst->limit);
            }
            fprintf(f, "\n");
            if (loud > 0)
                fprintf(f, "    the machine was busy all through %d combinations: their numbers are too small\n", loud);
        }
    fprintf(f, "%d of %d within their limits\n", all_ok, all);
}

int main(int count, char **arguments) {
    static const int cross[] = {ADAMW, SGD, MOMENTUM, LION, ALL_RULES}, in_dram[] = {ADAMW, SGD};
    int measured[PLACES][ISAS] = {{0}}, wanted[ISAS] = {0}, places[PLACES] = {0};
    int any_isa = 1, i, isa, best = -1;
    size_t k;
    FILE *csv;
    for (i = 1; i < count; i++) {
        const char *word = arguments[i];
        for (isa = 0; isa < ISAS; isa++)
            if (strcmp(word, kopt_isa_name((kopt_isa)isa)) == 0) break;
        if (isa < ISAS) {
            if (!kopt_isa_usable((kopt_isa)isa)) fail("this machine or this build has no such instruction set");
            wanted[isa] = 1, any_isa = 0;
        } else if (strcmp(word, "quick") == 0)
            quick = 1;
        else if (strcmp(word, "cache") == 0)
            places[CACHE] = 1;
        else if (strcmp(word, "dram") == 0)
            places[DRAM] = 1;
        else if (strcmp(word, "--markdown") == 0)
            markdown = 1;
        else if (strcmp(word, "--nearest-stores") == 0)
            nearest_stores = 1;
        else
            fail("usage: cliffs [quick] [cache] [dram] [ISA...] [--nearest-stores] [--markdown]");
    }
    if (!places[CACHE] && !places[DRAM]) places[CACHE] = places[DRAM] = 1;
    for (isa = 0; isa < ISAS; isa++) {
        if (any_isa) wanted[isa] = kopt_isa_usable((kopt_isa)isa);
        if (wanted[isa]) best = isa; /* a machine has one family */
    }
    csv = open_output("build/bench/cliffs.csv");

    arena_room = (size_t)IN_CACHE * 32 + 2 * SPARE;
    arena[0] = allocate(arena_room);
    for (isa = ISAS - 1; isa >= 0 && places[CACHE]; isa--) {
        if (!wanted[isa]) continue;
        if (kopt_isa_force((kopt_isa)isa) != KOPT_OK) fail("an instruction set was refused");
        start_baseline();
        base_least = 0, base_steps = steps_for(&base_opt, &base, quick ? 4e-4 : 8e-4);
        for (i = 0; i < 100; i++) base_turn();
        for (k = 0; k < sizeof cross / sizeof *cross; k++) measure_grid(cross[k], isa, CACHE);
        measured[CACHE][isa] = 1;
    }
    free(arena[0]);
    if (places[DRAM]) {
        arena_room = ((size_t)(quick ? 128 : 256) << 20) + 2 * SPARE;
        arena[0] = allocate(arena_room), arena[1] = allocate(arena_room);
        if (kopt_isa_force((kopt_isa)best) != KOPT_OK) fail("an instruction set was refused");
        start_baseline();
        base_least = 0, base_steps = steps_for(&base_opt, &base, 4e-4);
        for (k = 0; k < sizeof in_dram / sizeof *in_dram; k++) measure_grid(in_dram[k], best, DRAM);
        measured[DRAM][best] = 1;
        free(arena[0]), free(arena[1]);
    }

    for (i = 0; i < PLACES && markdown; i++)
        for (isa = ISAS - 1; isa >= 0; isa--) {
            if (!measured[i][isa]) continue;
            print_markdown(ADAMW, isa, i);
            print_markdown(i == DRAM ? SGD : ALL_RULES, isa, i);
        }
    write_csv(csv);
    if (fclose(csv) != 0) fail("cannot write into build/bench");
    summary(markdown ? stderr : stdout, measured);
    if (!markdown) printf("written: build/bench/cliffs.csv\n");
    return 0;
}
