/* What each number of bytes costs: excess risk over fp32, on problems whose noise 16-bit weights cannot hide.

     ./build.sh bench bytes [SEEDS]     8 seeds; prints a table in Markdown

   Least squares: 32 weights, drawn from N(0, s^2), targets with noise 1, batches of 8, 20,000 steps of AdamW without
   decay, cosine to 0; s is the size of the weights, lr 3e-3 s. The risk is |w - w*|^2 / 2, in nats of a Gaussian above
   the best. Logistic regression: 32 weights of size 1/3, 60,000 steps at a constant 1e-3; the mean loss of the last
   6,000 steps on 2,048 held-out examples.
   All arms of a seed see the same examples. Each cell is the mean over the seeds of the difference to fp32, times 1e4,
   and the half width of Student's 95 % interval. The weights are those that a forward pass reads. */
#define KAHAN_OPT_IMPLEMENTATION
#include "../kahan_opt.h"
#include "bytes.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { D = 32, BATCH = 8, HELD_OUT = 2048, SEEDS = 32 };

typedef struct task {
    const char *name;
    double size, lr, beta1, beta2;
    int logistic;
} task;
static const task tasks[] = {{"least squares, weights of size 1", 1, 3e-3, .9, .999, 0},
                             {"of size 10", 10, 3e-2, .9, .999, 0},
                             {"beta1 .99", 1, 3e-3, .99, .999, 0},
                             {"beta1 .999, beta2 .9999", 1, 3e-3, .999, .9999, 0},
                             {"logistic regression", 1, 1e-3, .9, .999, 1}};
enum { TASKS = sizeof tasks / sizeof *tasks };

static uint64_t random_state;
static double uniform(void) { /* xorshift64* */
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return ((double)((random_state * 0x2545F4914F6CDD1Du) >> 11) + .5) / 9007199254740992.0;
}
static void normals(double *x, int n) { /* Box and Muller; n is even */
    for (; n > 0; n -= 2, x += 2) {
        const double r = sqrt(-2 * log(uniform())), angle = 6.283185307179586 * uniform();
        x[0] = r * cos(angle);
        x[1] = r * sin(angle);
    }
}

static void must(kopt_result result) {
    if (result == KOPT_OK) return;
    fprintf(stderr, "bytes: %s\n", kopt_result_string(result));
    exit(1);
}

static double dot(const double *a, const double *b) {
    double sum = 0;
    int i;
    for (i = 0; i < D; i++) sum += a[i] * b[i];
    return sum;
}

/* The risk of an arm at the end. */
static double run(const task *t, const arm *a, int seed) {
    static double held_out[HELD_OUT][D], label[HELD_OUT];
    static float w32[D], g[D], zeros[D];
    static kopt_bf16 w16[D];
    static unsigned char state[KOPT_STATE_BYTES(D, 16)];
    const int steps = t->logistic ? 60000 : 20000;
    double best[D], w[D], sum = 0;
    int i, b, k, measured = 0;
    kopt_optimizer o = kopt_adamw(t->lr);
    kopt_tensor tensor =
        kopt_tensor_of(a->weight == KOPT_F32 ? (void *)w32 : w16, a->weight, g, KOPT_F32, D, state, sizeof state);
    o.weight_decay = 0;
    o.beta1 = t->beta1;
    o.beta2 = t->beta2;
    o.seed = (uint64_t)seed;
    o.rounding = a->rounding;
    o.first_moment_format = a->first;
    o.second_moment_format = a->second;
    random_state = 88172645463325252u + 977u * (uint64_t)seed;
    for (i = 0; i < 30; i++) uniform();
    normals(best, D);
    for (i = 0; i < D; i++) best[i] *= t->size / (t->logistic ? 3 : 1);
    for (b = 0; b < HELD_OUT && t->logistic; b++) {
        normals(held_out[b], D);
        label[b] = uniform() < 1 / (1 + exp(-dot(held_out[b], best)));
    }
    must(kopt_state_init(&o, &tensor, 1, zeros));
    for (k = 0; k <= steps; k++) {
        double gradient[D] = {0};
        for (i = 0; i < D; i++) w[i] = a->weight == KOPT_F32 ? w32[i] : kopt_f32_from_bf16(w16[i]);
        if (t->logistic && k > steps - 6000 && k % 60 == 0) {
            double loss = 0;
            for (b = 0; b < HELD_OUT; b++) loss += log1p(exp((1 - 2 * label[b]) * dot(held_out[b], w)));
            sum += loss / HELD_OUT;
            measured++;
        }
        if (k == steps) break;
        if (!t->logistic) o.lr = kopt_cosine_lr((uint32_t)k, 0, (uint32_t)steps, t->lr, 0);
        for (b = 0; b < BATCH; b++) {
            double x[D + 2], error;
            normals(x, D + 2);
            error = t->logistic ? 1 / (1 + exp(-dot(x, w))) - (uniform() < 1 / (1 + exp(-dot(x, best))))
                                : dot(x, w) - dot(x, best) - x[D];
            for (i = 0; i < D; i++) gradient[i] += error * x[i] / BATCH;
        }
        for (i = 0; i < D; i++) g[i] = (float)gradient[i];
        must(kopt_optimizer_step(&o, &tensor, 1));
    }
    if (t->logistic) return sum / measured;
    for (i = 0; i < D; i++) sum += (w[i] - best[i]) * (w[i] - best[i]) / 2;
    return sum;
}

/* Student's 97.5 % quantile with n - 1 degrees of freedom. */
static double quantile(int n) {
    static const double table[] = {12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201};
    return n - 2 < 11 ? table[n - 2] : 2.04 + 2 / (double)n;
}

int main(int argc, char **argv) {
    const int seeds = argc > 1 ? atoi(argv[1]) : 8;
    int i, j, s;
    if (seeds < 2 || seeds > SEEDS) {
        fprintf(stderr, "usage: bytes [SEEDS]   2 to %d; 8\n", SEEDS);
        return 2;
    }
    printf("| | bytes |");
    for (j = 0; j < TASKS; j++) printf(" %s |", tasks[j].name);
    printf("\n|---|---|");
    for (j = 0; j < TASKS; j++) printf("---|");
    printf("\n");
    for (i = 0; i < ARMS; i++) {
        static double base[TASKS][SEEDS + 1];
        printf("| %s | %s |", arms[i].name, arms[i].bytes);
        for (j = 0; j < TASKS; j++) {
            double x[SEEDS], mean = 0, square = 0;
            for (s = 0; s < seeds; s++) {
                x[s] = run(&tasks[j], &arms[i], s + 1) - (i == 0 ? 0 : base[j][s]);
                if (i == 0) base[j][s] = x[s];
                mean += x[s] / seeds;
            }
            for (s = 0; s < seeds; s++) square += (x[s] - mean) * (x[s] - mean) / (seeds - 1);
            if (i == 0)
                printf(" %.4g |", 1e4 * mean);
            else
                printf(" %+.2g ± %.1g |", 1e4 * mean, 1e4 * quantile(seeds) * sqrt(square / seeds));
            fflush(stdout);
        }
        printf("\n");
    }
    return 0;
}
