/* What 8-bit moments do to whole steps: AdamW with moments in KOPT_Q8 beside fp32 moments, same gradients.

     ./build.sh bench codes

   8,192 elements with normal gradients; beta1 0.9, beta2 0.999; the steps 2,501 to 5,000. One element of each 256 has
   gradients of the size in the first column, the others of size 1. Of these others: the mean length of a step over that
   with fp32 moments, and the root mean square of the difference, in % of the root mean square of a step. First of all
   255, then of the 63 that share a block with the large one. */
#define KAHAN_OPT_IMPLEMENTATION
#include "../kahan_opt.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { N = 8192, GROUP = 256, BLOCK = 64, STEPS = 5000, POOL = 1 << 20 };

static float pool[POOL], weight[2][N], grad[N];
static unsigned char state[2][KOPT_STATE_BYTES(N, 8)];

static uint64_t random_state = 88172645463325252u;
static uint64_t random64(void) { /* xorshift64 */
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    return random_state ^= random_state << 17;
}
static double uniform(void) { return ((double)(random64() >> 11) + .5) / 9007199254740992.0; }

static void must(kopt_result result) {
    if (result != KOPT_OK) exit(1);
}

int main(void) {
    static const double outliers[] = {1, 100, 1e3, 1e4, 1e5, 1e6};
    unsigned row;
    int i, k, s;
    for (i = 0; i < POOL; i++) pool[i] = (float)(sqrt(-2 * log(uniform())) * cos(6.283185307179586 * uniform()));
    printf("| outlier | length, 255 | noise, 255 | length, 63 | noise, 63 |\n|---|---|---|---|---|\n");
    for (row = 0; row < sizeof outliers / sizeof *outliers; row++) {
        double fp32[2] = {0, 0}, q8[2] = {0, 0}, square[2] = {0, 0}, error[2] = {0, 0};
        kopt_optimizer o[2];
        kopt_tensor t[2];
        for (k = 0; k < 2; k++) {
            o[k] = kopt_adam(1);
            o[k].first_moment_format = o[k].second_moment_format = k ? KOPT_Q8 : KOPT_F32;
            t[k] = kopt_tensor_of(weight[k], KOPT_F32, grad, KOPT_F32, N, state[k], sizeof state[k]);
            must(kopt_state_init(&o[k], &t[k], 1, NULL));
        }
        for (s = 0; s < STEPS; s++) {
            const float *x = pool + random64() % (POOL - N);
            memset(weight, 0, sizeof weight); /* a step leaves minus its length */
            for (i = 0; i < N; i++) grad[i] = (float)(x[i] * (i % GROUP == 0 ? outliers[row] : 1));
            for (k = 0; k < 2; k++) must(kopt_optimizer_step(&o[k], &t[k], 1));
            for (i = 0; i < N && s >= STEPS / 2; i++) {
                const double a = weight[0][i], b = weight[1][i];
                const int near_it = i % GROUP < BLOCK;
                for (k = 0; k <= near_it && i % GROUP != 0; k++) {
                    fp32[k] += fabs(a);
                    q8[k] += fabs(b);
                    square[k] += a * a;
                    error[k] += (a - b) * (a - b);
                }
            }
        }
        printf("| %g |", outliers[row]);
        for (k = 0; k < 2; k++) printf(" %.3f | %.1f %% |", q8[k] / fp32[k], 100 * sqrt(error[k] / square[k]));
        printf("\n");
    }
    return 0;
}
