/* How fast checkpoints are saved and loaded in memory: with the vectors of this machine, in scalar code, and beside
   memcpy(). bf16 AdamW with KAHAN; the least of 9 rounds, in GB/s of the checkpoint.

     ./build.sh bench checkpoint [N]     N weights (default 8000000) */
#include "timing.h"

#define KAHAN_OPT_IMPLEMENTATION
#include "../kahan_opt.h"

#include <stdio.h>
#include <stdlib.h>

static void *allocate(size_t bytes) {
    void *p = calloc(bytes, 1);
    if (p == NULL) exit(fprintf(stderr, "checkpoint: out of memory\n"));
    return p;
}

int main(int count, char **arguments) {
    enum { ROUNDS = 9 };
    const long n = count > 1 ? atol(arguments[1]) : 8000000;
    static const char *const name[] = {"kopt_save", "kopt_load", "memcpy"};
    kopt_optimizer opt = kopt_adamw(1e-3);
    kopt_tensor t = kopt_tensor_of(NULL, KOPT_BF16, NULL, KOPT_BF16, (size_t)n, NULL, 0);
    unsigned char *saved, *copy;
    size_t size, i;
    int scalar, what, round;
    if (n < 1) return fprintf(stderr, "checkpoint: N is at least 1\n"), 2;
    t.weight = allocate(2 * t.n), t.grad = allocate(2 * t.n);
    t.state_size = kopt_state_size(&opt, &t), t.state = allocate(t.state_size);
    for (i = 0; i < t.n; i++) {
        ((kopt_bf16 *)t.weight)[i] = (kopt_bf16)(0x3C00 + i % 999);
        ((kopt_bf16 *)t.grad)[i] = (kopt_bf16)(0x3800 + i % 777);
    }
    if (kopt_state_init(&opt, &t, 1, NULL) != KOPT_OK || kopt_optimizer_step(&opt, &t, 1) != KOPT_OK) return 1;
    size = kopt_save_size(&opt, &t, 1), saved = allocate(size), copy = allocate(size);
    printf("%ld weights, %.1f MB\n", n, (double)size * 1e-6);
    for (scalar = 0; scalar < 2; scalar++) {
        if (scalar && kopt_isa_force(KOPT_ISA_SCALAR) != KOPT_OK) return 1;
        printf("%-10s", kopt_isa_name(kopt_isa_current()));
        for (what = 0; what < 3; what++) {
            double best = 1e9;
            for (round = 0; round < ROUNDS; round++) {
                const double begin = cpu_seconds();
                double seconds;
                kopt_result result = KOPT_OK;
                if (what == 0) result = kopt_save(&opt, &t, 1, saved, size);
                if (what == 1) result = kopt_load(&opt, &t, 1, saved, size);
                if (what == 2) memcpy(copy, saved, size);
                seconds = cpu_seconds() - begin;
                if (result != KOPT_OK || (what == 2 && memcmp(copy, saved, size) != 0)) return 1;
                if (seconds < best) best = seconds;
            }
            printf("   %s %5.2f GB/s", name[what], (double)size / best * 1e-9);
        }
        printf("\n");
    }
    return 0;
}
