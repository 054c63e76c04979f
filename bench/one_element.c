/* What an update of a weight takes, in ns: in fp32, by the one-element functions, by kopt_kahan_add(), and as a step of
   SGD. All arrays are in cache; the least of 60 rounds.

     ./build.sh bench one_element [N...]     N weights a call, at most 65536 (default 16 64 256 8192)

   build.sh compiles with -O2; with -march=native: CC='cc -march=native' ./build.sh bench one_element */
#include "timing.h"

#define KAHAN_OPT_IMPLEMENTATION
#include "../kahan_opt.h"

#include <stdio.h>
#include <stdlib.h>

enum { MOST = 1 << 16, WEIGHTS_A_ROUND = 1 << 16, ROUNDS = 60 };

static float master[MOST], delta[MOST];
static uint16_t w[MOST], c[MOST];
static unsigned char state[KOPT_STATE_BYTES(MOST, 2)];
static kopt_random_key key;
static kopt_step step;
static kopt_tensor t;

static void fp32(int n) {
    int i;
    for (i = 0; i < n; ++i) master[i] += delta[i];
}
static void nearest(int n) { /* stalls: only for comparison */
    int i;
    for (i = 0; i < n; ++i) w[i] = kopt_bf16_from_f32(kopt_f32_from_bf16(w[i]) + delta[i]);
}
static void bf16_one(int n) {
    int i;
    for (i = 0; i < n; ++i) kopt_kahan_add_bf16(&w[i], &c[i], delta[i], 0x8000);
}
static void fp16_one(int n) {
    int i;
    for (i = 0; i < n; ++i) kopt_kahan_add_fp16(&w[i], &c[i], delta[i], 0x8000);
}
static void bf16_array(int n) { key.step++, kopt_kahan_add(w, c, KOPT_BF16, delta, (size_t)n, key); }
static void fp16_array(int n) { key.step++, kopt_kahan_add(w, c, KOPT_FP16, delta, (size_t)n, key); }
static void range(int n) { kopt_step_range(&step, &t, 1, 0, (size_t)n); }

static const struct {
    const char *name;
    void (*run)(int n);
    int format;
} ways[] = {{"fp32: w[i] += delta[i]", fp32, KOPT_F32},         {"bf16, rounded to nearest", nearest, KOPT_BF16},
            {"kopt_kahan_add_bf16()", bf16_one, KOPT_BF16},     {"kopt_kahan_add(), bf16", bf16_array, KOPT_BF16},
            {"kopt_step_range(), SGD, bf16", range, KOPT_BF16}, {"kopt_kahan_add_fp16()", fp16_one, KOPT_FP16},
            {"kopt_kahan_add(), fp16", fp16_array, KOPT_FP16},  {"kopt_step_range(), SGD, fp16", range, KOPT_FP16}};

enum { WAYS = sizeof ways / sizeof ways[0] };

int main(int count, char **arguments) {
    static char *defaults[] = {NULL, (char *)"16", (char *)"64", (char *)"256", (char *)"8192"};
    static void (*volatile run)(int n); /* so that no way is inlined, and a loop has to run each time */
    double best[WAYS][16];
    int k, a, r, i;
    if (count == 1) count = 5, arguments = defaults;
    printf("%-30s", "ns a weight, n =");
    for (a = 1; a < count && a <= 16; ++a) printf(" %7s", arguments[a]);
    for (k = 0; k < WAYS; ++k) {
        const kopt_format format = ways[k].format == KOPT_F32 ? KOPT_BF16 : (kopt_format)ways[k].format;
        kopt_optimizer o = kopt_sgd(1, 0);
        t = kopt_tensor_of(w, format, delta, KOPT_F32, MOST, state, sizeof state);
        for (i = 0; i < MOST; ++i) master[i] = 1, delta[i] = 1e-6f * (float)(i % 97 - 48);
        if (kopt_state_init(&o, &t, 1, master) != KOPT_OK || kopt_step_begin(&step, &o) != KOPT_OK) return 1;
        for (i = 0; i < MOST; ++i) c[i] = 0;
        printf("\n%-30s", ways[k].name);
        for (a = 1; a < count && a <= 16; ++a) {
            const int n = atoi(arguments[a]);
            if (n < 1 || n > MOST) return 2;
            for (best[k][a - 1] = 1e9, r = 0; r < ROUNDS; ++r) {
                double begin = cpu_seconds();
                run = ways[k].run;
                for (i = 0; i < WEIGHTS_A_ROUND; i += n) run(n);
                begin = (cpu_seconds() - begin) / i * 1e9;
                if (begin < best[k][a - 1]) best[k][a - 1] = begin;
            }
            printf(" %7.3f", best[k][a - 1]);
        }
    }
    printf("\n");
    return 0;
}
