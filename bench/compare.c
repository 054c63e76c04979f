/* Two versions of kahan_opt.h in one process: how the time of a step changes from one to the other.

     bench/compare.sh OLD.h NEW.h [N...]       compiles this file three times: see there

   With HEADER defined it is a shared library of that header. Without, it is the program, which knows nothing of
   kahan_opt.h and calls both libraries through a struct of functions: structs of the two versions may differ, and
   combination.h has the calls of each.
   Both step the same arrays, from the same numbers, in turns, in thread CPU time: what slows down one round slows down
   both, and a ratio is the median of the ratios of the rounds. Their weights must be equal at the end of each turn.
   With HEADER and COUNT it is a program of that header, which steps one combination: an emulator counts the
   instructions. */
#ifndef HEADER
#define _GNU_SOURCE /* dlopen, getrusage, fork */
#include "timing.h"
#else
#define KAHAN_OPT_IMPLEMENTATION
#include HEADER
#endif
#include "combination.h"
#include <stdlib.h>
#include <string.h>

#if !defined(HEADER) || defined(COUNT)
static const combination list[] = {{ADAMW, BF16, NO_COPY, KAHAN, BF16, BF16, 0},
                                   {ADAMW, BF16, NO_COPY, KAHAN, BF16, BF16, 1},
                                   {ADAMW, BF16, NO_COPY, STOCHASTIC, BF16, BF16, 0},
                                   {MOMENTUM, BF16, NO_COPY, KAHAN, BF16, BF16, 0},
                                   {ADAMW, F32, NO_COPY, NEAREST, F32, F32, 0},
                                   /* all in bf16 */
                                   {ADAMW, BF16, NO_COPY, NEAREST, BF16, BF16, 0},
                                   {ADAMW, BF16, NO_COPY, NEAREST, BF16, BF16, 1},
                                   {ADAMW, BF16, NO_COPY, COMPACT, BF16, BF16, 0},
                                   {ADAMW, BF16, NO_COPY, EXACT, BF16, BF16, 0},
                                   {ADAM_L2, BF16, NO_COPY, KAHAN, BF16, BF16, 0},
                                   {FULLY_DECOUPLED, BF16, NO_COPY, KAHAN, BF16, BF16, 0},
                                   {SGD, BF16, NO_COPY, KAHAN, BF16, BF16, 0},
                                   {SGD, BF16, NO_COPY, STOCHASTIC, BF16, BF16, 0},
                                   {MOMENTUM, BF16, NO_COPY, STOCHASTIC, BF16, BF16, 0},
                                   {LION, BF16, NO_COPY, KAHAN, BF16, BF16, 0},
                                   {LION, BF16, NO_COPY, STOCHASTIC, BF16, BF16, 0},
                                   {AMSGRAD, BF16, NO_COPY, KAHAN, BF16, BF16, 0},
                                   {STABLE_ADAMW, BF16, NO_COPY, KAHAN, BF16, BF16, 0},
                                   {ADAN, BF16, NO_COPY, KAHAN, BF16, BF16, 0},
                                   {RADAM, BF16, NO_COPY, KAHAN, BF16, BF16, 0},
                                   {RANGER, BF16, NO_COPY, KAHAN, BF16, BF16, 0},
                                   {RANGER_SYNCS, BF16, NO_COPY, KAHAN, BF16, BF16, 0},
                                   {EMA, BF16, NO_COPY, KAHAN, BF16, BF16, 0},
                                   {EMA, BF16, NO_COPY, STOCHASTIC, BF16, BF16, 0},
                                   {ADAM_ATAN2, BF16, NO_COPY, KAHAN, BF16, BF16, 0},
                                   /* bf16 weights with other moments and gradients */
                                   {ADAMW, BF16, NO_COPY, KAHAN, BF16, F32, 0},
                                   {ADAMW, BF16, NO_COPY, KAHAN, BF16, FP16, 0},
                                   {ADAMW, BF16, NO_COPY, KAHAN, F32, BF16, 0},
                                   {ADAMW, BF16, NO_COPY, KAHAN, F32, F32, 0},
                                   {ADAMW, BF16, NO_COPY, KAHAN, FP16, BF16, 0},
                                   {ADAMW, BF16, NO_COPY, KAHAN, Q8, BF16, 0},
                                   {ADAMW, BF16, NO_COPY, STOCHASTIC, BF16, F32, 0},
                                   {ADAMW, BF16, NO_COPY, STOCHASTIC, F32, BF16, 0},
                                   {ADAMW, BF16, NO_COPY, STOCHASTIC, Q8, BF16, 0},
                                   {MOMENTUM, BF16, NO_COPY, KAHAN, F32, F32, 0},
                                   {LION, BF16, NO_COPY, KAHAN, Q8, F32, 0},
                                   {SGD, BF16, NO_COPY, KAHAN, BF16, F32, 0},
                                   {EMA, BF16, NO_COPY, KAHAN, BF16, F32, 0},
                                   /* fp32 weights */
                                   {ADAMW, F32, BF16, NEAREST, F32, BF16, 0},
                                   {ADAMW, F32, FP16, NEAREST, F32, FP16, 0},
                                   {ADAMW, F32, NO_COPY, NEAREST, F32, BF16, 0},
                                   {ADAMW, F32, NO_COPY, NEAREST, BF16, BF16, 0},
                                   {ADAMW, F32, NO_COPY, NEAREST, Q8, F32, 0},
                                   {SGD, F32, NO_COPY, NEAREST, F32, F32, 0},
                                   {MOMENTUM, F32, NO_COPY, NEAREST, F32, F32, 0},
                                   {LION, F32, NO_COPY, NEAREST, F32, F32, 0},
                                   {AMSGRAD, F32, NO_COPY, NEAREST, F32, F32, 0},
                                   {STABLE_ADAMW, F32, NO_COPY, NEAREST, F32, F32, 0},
                                   {ADAN, F32, NO_COPY, NEAREST, F32, F32, 0},
                                   {RADAM, F32, NO_COPY, NEAREST, F32, F32, 0},
                                   {RANGER, F32, NO_COPY, NEAREST, F32, F32, 0},
                                   {EMA, F32, NO_COPY, NEAREST, F32, F32, 0},
                                   /* fp16 weights */
                                   {ADAMW, FP16, NO_COPY, KAHAN, FP16, FP16, 0},
                                   {ADAMW, FP16, NO_COPY, KAHAN, FP16, FP16, 1},
                                   {ADAMW, FP16, NO_COPY, STOCHASTIC, FP16, FP16, 0},
                                   {ADAMW, FP16, NO_COPY, COMPACT, FP16, FP16, 0},
                                   {ADAMW, FP16, NO_COPY, EXACT, FP16, FP16, 0},
                                   {ADAMW, FP16, NO_COPY, KAHAN, F32, FP16, 0},
                                   {ADAMW, FP16, NO_COPY, KAHAN, BF16, F32, 0},
                                   {ADAMW, FP16, NO_COPY, KAHAN, Q8, FP16, 0},
                                   {SGD, FP16, NO_COPY, KAHAN, FP16, FP16, 0},
                                   {MOMENTUM, FP16, NO_COPY, KAHAN, FP16, FP16, 0},
                                   {LION, FP16, NO_COPY, KAHAN, FP16, FP16, 0},
                                   {ADAN, FP16, NO_COPY, KAHAN, FP16, FP16, 0},
                                   {EMA, FP16, NO_COPY, KAHAN, FP16, FP16, 0}};
enum { COMBINATIONS = sizeof list / sizeof list[0] };

static void describe(const combination *c, char *text, size_t room) {
    char rounding[32] = "", copy[32] = "", moment[32] = "";
    if (c->weight != F32)
        snprintf(rounding, sizeof rounding, " %s%s", rounding_name[c->rounding],
                 c->nearest_stores ? ", nearest stores" : "");
    if (c->copy != NO_COPY) snprintf(copy, sizeof copy, " + %s copy", format_name[c->copy]);
    if (c->rule != SGD && c->rule != EMA) snprintf(moment, sizeof moment, "m %s ", format_name[c->moment]);
    snprintf(text, room, "%s %s%s%s (%sg %s)", rule_name[c->rule], format_name[c->weight], copy, rounding, moment,
             format_name[c->grad]);
}
#endif

#ifdef COUNT
/* INDEX N STEPS: so many steps of a combination of the list; 0: its name. Exits with 2 behind the end of the list, and
   with 3 if the header refuses the combination. */
int main(int count, char **arguments) {
    static unsigned char room[1 << 20];
    const unsigned long index = count == 4 ? strtoul(arguments[1], NULL, 10) : COMBINATIONS;
    unsigned long steps = count == 4 ? strtoul(arguments[3], NULL, 10) : 0;
    unsigned char *next = room;
    char name[128];
    kopt_optimizer opt;
    kopt_tensor t;
    arrays a;
    if (index >= COMBINATIONS) return 2;
    describe(&list[index], name, sizeof name);
    if (steps == 0) puts(name);
    a.n = strtoul(arguments[2], NULL, 10);
    if (a.n == 0 || a.n > 8192) return 2;
    a.weight = take(&next, 4 * a.n), a.grad = take(&next, 4 * a.n), a.copy = take(&next, 4 * a.n);
    a.state = take(&next, a.state_room = 32 * a.n);
    if (!begin(&list[index], &a, &opt, &t)) return 3;
    for (; steps > 0; steps--)
        if (kopt_optimizer_step(&opt, &t, 1) != KOPT_OK) return 3;
    return 0;
}
#else
typedef struct library {
    const char *(*isa_name)(int isa);
    int (*force)(int isa); /* 0: not on this machine, or not in this build    */
    size_t (*state_size)(const combination *c, size_t n);
    int (*begin)(const combination *c, const arrays *a); /* fills the arrays; 0: refused                    */
    int (*run)(unsigned steps);                          /* more of the same; 0: refused                    */
} library;

#ifdef HEADER
static kopt_optimizer opt;
static kopt_tensor tensor;

static const char *isa_name(int isa) { return kopt_isa_name((kopt_isa)isa); }
static int force(int isa) { return kopt_isa_usable((kopt_isa)isa) && kopt_isa_force((kopt_isa)isa) == KOPT_OK; }
static size_t state_size(const combination *c, size_t n) {
    arrays a = {0};
    kopt_optimizer o;
    kopt_tensor t;
    a.n = n;
    make(c, &a, &o, &t);
    return kopt_state_size(&o, &t);
}
static int begin_it(const combination *c, const arrays *a) { return begin(c, a, &opt, &tensor); }
static int run(unsigned steps) {
    for (; steps > 0; steps--)
        if (kopt_optimizer_step(&opt, &tensor, 1) != KOPT_OK) return 0;
    return 1;
}

extern const library functions;
#ifdef __GNUC__
__attribute__((__visibility__("default")))
#endif
const library functions = {isa_name, force, state_size, begin_it, run};
#else

#include <dlfcn.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

enum { ROUNDS = 41, SIDES = 2 };

static void fail(const char *why) {
    fprintf(stderr, "compare: %s\n", why);
    exit(2);
}

static const library *open_library(const char *path) {
    void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    const library *functions = handle == NULL ? NULL : dlsym(handle, "functions");
    if (functions == NULL) fail(dlerror());
    return functions;
}

static void *allocate(size_t bytes) {
    void *p = malloc(bytes);
    if (p == NULL) fail("out of memory");
    return p;
}

/* So many steps from the beginning, of which a tenth are not timed; seconds. */
static double turn(const library *l, const combination *c, const arrays *a, unsigned steps) {
    double start;
    if (!l->begin(c, a) || !l->run(steps / 10 + 1)) fail("a step was refused");
    start = cpu_seconds();
    if (!l->run(steps)) fail("a step was refused");
    return cpu_seconds() - start;
}

/* A line of the table. Returns the ratio, or 0 if a header refuses the combination. */
static double compare(const library *const *l, const combination *c, const arrays *a, unsigned char *first) {
    double time[SIDES][ROUNDS], ratio[ROUNDS], ns[SIDES], seconds;
    const size_t bytes = (c->weight == F32 ? 4 : 2) * a->n;
    unsigned steps = 1;
    char text[128];
    int r, k, same = 1;
    if (!l[0]->begin(c, a) || !l[1]->begin(c, a)) return 0;
    while ((seconds = turn(l[0], c, a, steps)) < 1e-4 && steps < 100000) steps *= 2;
    steps = (unsigned)(steps * 4e-4 / seconds) + 1;
    for (r = 0; r < ROUNDS; r++) {
        for (k = 0; k < SIDES; k++) {
            const int side = (r + k) % SIDES; /* each begins every other round */
            time[side][r] = turn(l[side], c, a, steps);
            if (k == 0) memcpy(first, a->weight, bytes);
        }
        same &= memcmp(first, a->weight, bytes) == 0;
        ratio[r] = time[1][r] / time[0][r];
    }
    for (k = 0; k < SIDES; k++) ns[k] = median(time[k], ROUNDS) / steps / (double)a->n * 1e9;
    seconds = median(ratio, ROUNDS);
    describe(c, text, sizeof text);
    printf("%-62s %8.3f %8.3f %7.3f   %.3f %.3f%s\n", text, ns[0], ns[1], seconds, ratio[ROUNDS / 4],
           ratio[ROUNDS - 1 - ROUNDS / 4], same ? "" : "   OTHER WEIGHTS");
    fflush(stdout);
    return seconds;
}

int main(int count, char **arguments) {
    const library *l[SIDES];
    const char *only_isa = "", *only = "";
    int k, isa, number = 0;
    if (count > 2 && strcmp(arguments[1], "--cpu") == 0) { /* the user time of a command */
        struct rusage used;
        int status = 0;
        const pid_t child = fork();
        if (child == 0) execvp(arguments[2], arguments + 2), _exit(127);
        if (child < 0 || waitpid(child, &status, 0) != child || status != 0) fail("the command failed");
        if (getrusage(RUSAGE_CHILDREN, &used) != 0) fail("no times of children");
        printf("%.3f\n", (double)used.ru_utime.tv_sec + 1e-6 * (double)used.ru_utime.tv_usec);
        return 0;
    }
    if (count < 6) fail("usage: compare OLD.so NEW.so ISA TEXT N...; see bench/compare.sh");
    for (k = 0; k < SIDES; k++) l[k] = open_library(arguments[1 + k]);
    only_isa = arguments[3], only = arguments[4];
    for (k = 5; k < count; k++) {
        const size_t n = strtoull(arguments[k], NULL, 10);
        arrays a;
        unsigned char *first, *room, *next;
        int i;
        if (n == 0 || n > 100000000) fail("the number of weights is 1 to 100,000,000");
        a.n = n;
        a.state_room = 0;
        for (i = 0; i < COMBINATIONS; i++) {
            int side;
            for (side = 0; side < SIDES; side++)
                if (l[side]->state_size(&list[i], n) > a.state_room) a.state_room = l[side]->state_size(&list[i], n);
        }
        first = allocate(4 * n);
        next = room = allocate(12 * n + a.state_room + SPARE);
        a.weight = take(&next, 4 * n), a.grad = take(&next, 4 * n), a.copy = take(&next, 4 * n);
        a.state = take(&next, a.state_room);
        for (isa = ISAS - 1; isa >= 0; isa--) {
            double ratio[COMBINATIONS];
            int lines = 0;
            if (*only_isa != 0 && strcmp(only_isa, l[0]->isa_name(isa)) != 0) continue;
            if (!l[0]->force(isa) || !l[1]->force(isa)) continue;
            printf("%s%s, %zu weights: ns per weight; quartiles of the ratio\n", number++ > 0 ? "\n" : "",
                   l[0]->isa_name(isa), n);
            printf("%-62s %8s %8s %7s   from  to\n", "m: moments, g: gradients", "old", "new", "new/old");
            for (i = 0; i < COMBINATIONS; i++) {
                char text[128];
                describe(&list[i], text, sizeof text);
                if (strstr(text, only) == NULL) continue;
                ratio[lines] = compare(l, &list[i], &a, first);
                if (ratio[lines] > 0) lines++;
            }
            if (lines == 0) continue;
            printf("%d lines: ", lines);
            (void)median(ratio, lines);
            printf("from %.3f to %.3f, median %.3f\n", ratio[0], ratio[lines - 1], ratio[lines / 2]);
        }
        free(room), free(first);
    }
    if (number == 0) fail("no such instruction set in both headers on this machine");
    return 0;
}
#endif
#endif
