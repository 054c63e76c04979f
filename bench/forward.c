/* What a forward and backward pass in plain C pays for weights of 16 bits: ns per weight and sample, beside fp32.

     ./build.sh bench forward     with gcc -O2, -O3 -march=native and -O3 -march=native -ffast-math

   A layer of 64 outputs and 256 inputs, in cache. Each way reads its weights and makes one of three loops:
     forward         y[r] = sum over c of w[r][c] x[c], a sum along a row
     backward rows   dx[c] += w[r][c] dy[r], row by row
     backward cols   dx[c] = sum over r of w[r][c] dy[r], column by column
   The last two lines convert the whole layer by kopt_convert() and then go forward and back in fp32, row by row, for
   each sample of a batch. The least of 31 rounds. bench/run.sh puts the columns of the flags side by side. */
#include "timing.h"

#include "../kahan_opt.h"

#include <stdio.h>

enum { OUTPUTS = 64, INPUTS = 256, N = OUTPUTS * INPUTS, ROUNDS = 31 };

static float wf[N], layer[N], x[INPUTS], dx[INPUTS], y[OUTPUTS], dy[OUTPUTS];
static kopt_bf16 wb[N];
static kopt_fp16 wh[N];

#define LOOPS(name, READ)                                                       \
    static void forward_##name(void) {                                          \
        int r, c;                                                               \
        for (r = 0; r < OUTPUTS; r++) {                                         \
            float sum = 0;                                                      \
            for (c = 0; c < INPUTS; c++) sum += READ(r * INPUTS + c) * x[c];    \
            y[r] = sum;                                                         \
        }                                                                       \
    }                                                                           \
    static void rows_##name(void) {                                             \
        int r, c;                                                               \
        for (c = 0; c < INPUTS; c++) dx[c] = 0;                                 \
        for (r = 0; r < OUTPUTS; r++)                                           \
            for (c = 0; c < INPUTS; c++) dx[c] += READ(r * INPUTS + c) * dy[r]; \
    }                                                                           \
    static void columns_##name(void) {                                          \
        int r, c;                                                               \
        for (c = 0; c < INPUTS; c++) {                                          \
            float sum = 0;                                                      \
            for (r = 0; r < OUTPUTS; r++) sum += READ(r * INPUTS + c) * dy[r];  \
            dx[c] = sum;                                                        \
        }                                                                       \
    }
#define FP32(i) wf[i]
#define BF16(i) kopt_f32_from_bf16(wb[i])
#define FP16(i) kopt_f32_from_fp16(wh[i])
LOOPS(fp32, FP32)
LOOPS(bf16, BF16)
LOOPS(fp16, FP16)

static void convert_bf16(void) {
    if (kopt_convert(layer, KOPT_F32, wb, KOPT_BF16, N) != KOPT_OK) wf[0] = 1e30f;
}
static void convert_fp16(void) {
    if (kopt_convert(layer, KOPT_F32, wh, KOPT_FP16, N) != KOPT_OK) wf[0] = 1e30f;
}

static double time_of(void (*volatile run)(void)) { /* ns per weight */
    double best = 1e9;
    int round, i;
    for (round = 0; round < ROUNDS; round++) {
        double seconds = cpu_seconds();
        for (i = 0; i < 100; i++) run();
        seconds = (cpu_seconds() - seconds) / 100 / N * 1e9;
        if (seconds < best) best = seconds;
    }
    return best;
}

static void row(const char *name, int named, double fp32, double bf16, double fp16) {
    if (named) printf("| %s ", name);
    printf("| %.3f | %.2f | %.2f%s\n", fp32, bf16 / fp32, fp16 / fp32, named ? "" : " |");
}

int main(int count, char **arguments) {
    static const struct {
        const char *name;
        void (*fp32)(void), (*bf16)(void), (*fp16)(void);
    } loops[] = {{"forward, sums along rows", forward_fp32, forward_bf16, forward_fp16},
                 {"backward, row by row", rows_fp32, rows_bf16, rows_fp16},
                 {"backward, sums along columns", columns_fp32, columns_bf16, columns_fp16}};
    const int named = count == 1 || arguments[1][0] == '1'; /* the first columns have the names of the rows */
    double pass = 0;
    int i;
    for (i = 0; i < N; i++) {
        wf[i] = 1e-3f * (float)(i % 97 - 48);
        wb[i] = kopt_bf16_from_f32(wf[i]);
        wh[i] = kopt_fp16_from_f32(wf[i]);
    }
    for (i = 0; i < INPUTS; i++) x[i] = 1e-2f * (float)(i % 31 - 15);
    for (i = 0; i < OUTPUTS; i++) dy[i] = 1e-2f * (float)(i % 13 - 6);
    for (i = 0; i < 3; i++) {
        const double fp32 = time_of(loops[i].fp32);
        pass += i < 2 ? fp32 : 0;
        row(loops[i].name, named, fp32, time_of(loops[i].bf16), time_of(loops[i].fp16));
    }
    row("`kopt_convert()` of the layer, batch 1", named, pass, pass + time_of(convert_bf16),
        pass + time_of(convert_fp16));
    row("`kopt_convert()` of the layer, batch 64", named, pass, pass + time_of(convert_bf16) / 64,
        pass + time_of(convert_fp16) / 64);
    return y[0] + dx[0] > 1e29f;
}
