/* main.c - takes a step with the kahan_opt that CMake or pkg-config has found */
#include <kahan_opt.h>
#include <stdio.h>

enum { N = 1000 };
static kopt_bf16 weight[N], grad[N];
static unsigned char state[KOPT_STATE_BYTES(N, 6)];

int main(void) {
    kopt_optimizer opt = kopt_adamw(1e-3);
    kopt_tensor t = KOPT_TENSOR(KOPT_BF16, weight, grad, N, state, sizeof state);
    int i;
    for (i = 0; i < N; ++i) grad[i] = kopt_bf16_from_f32(1);
    if (kopt_state_init(&opt, &t, 1, NULL) != KOPT_OK || kopt_optimizer_step(&opt, &t, 1) != KOPT_OK) return 1;
    printf("version %d, weight %g\n", kopt_version(), (double)kopt_f32_from_bf16(weight[0]));
    return 0;
}
