/* tasks.c - short listings for docs/guide.md: a task in each function, which returns 0 if it went well.

       ./build.sh examples tasks

   Each makes its own optimizer and tensor; w, g, state and backward() stand for your model. */
#define KAHAN_OPT_IMPLEMENTATION
#include "../../kahan_opt.h"

#include <stdio.h>
#include <string.h>

enum { N = 1000 };
static kopt_bf16 w[N], g[N];
static unsigned char state[KOPT_STATE_BYTES(N, 6)];
static kopt_bf16 before[N]; /* the weights of each layer on disk, before its steps */

/* writes the gradient, times the loss scale; the goal of each weight is 0.5 */
static void backward(void *user, double loss_scale) {
    const float scale = (float)loss_scale;
    int i;
    (void)user;
    for (i = 0; i < N; ++i) g[i] = kopt_bf16_from_f32(scale * (kopt_f32_from_bf16(w[i]) - 0.5f));
}

/* A weight that the model uses twice: one tensor, with the sum of its gradients. */
static int tied_weights(void) {
    static kopt_bf16 sum[N], residual[N];
    kopt_optimizer opt = kopt_adamw(1e-3);
    kopt_accumulator a = kopt_accumulator_of(sum, KOPT_BF16, residual, N);
    kopt_tensor t = KOPT_TENSOR(KOPT_BF16, w, sum, N, state, sizeof state);
    int use;
    if (kopt_state_init(&opt, &t, 1, NULL)) return 1;
    for (use = 0; use < 2; ++use) {
        backward(NULL, 1); /* of the output layer, then of the embedding */
        if (kopt_accumulator_add(&a, g, KOPT_BF16, 1)) return 1;
    }
    a.count = 0; /* the next addition begins a new sum */
    return kopt_optimizer_step(&opt, &t, 1) != KOPT_OK;
}

/* Four micro-batches go into the moments one by one, and the last moves the weights. */
static int optimizer_accumulation(void) {
    kopt_optimizer opt = kopt_adamw(1e-3);
    kopt_tensor t = KOPT_TENSOR(KOPT_BF16, w, g, N, state, sizeof state);
    int micro;
    opt.beta1 = 0.974003746; /* 0.9 ^ (1 / 4) */
    opt.beta2 = 0.999749906; /* 0.999 ^ (1 / 4) */
    if (kopt_state_init(&opt, &t, 1, NULL)) return 1;
    for (micro = 0; micro < 4; ++micro) {
        backward(NULL, 1);
        opt.moments_only = micro < 3;
        if (kopt_optimizer_step(&opt, &t, 1)) return 1;
    }
    return 0;
}

/* Fresh moments for the same weights. To restart the learning rate alone, set opt.lr. */
static int warm_restart(void) {
    static float full[N];
    kopt_optimizer opt = kopt_adamw(1e-3);
    kopt_tensor t = KOPT_TENSOR(KOPT_BF16, w, g, N, state, sizeof state);
    if (kopt_state_init(&opt, &t, 1, NULL)) return 1;
    backward(NULL, 1);
    if (kopt_optimizer_step(&opt, &t, 1)) return 1;
    if (kopt_state_read(&opt, &t, KOPT_SLOT_WEIGHT, full)) return 1; /* with the residual */
    opt.step = 0, opt.seed++;                         /* the bias correction begins anew, with other random bits */
    if (kopt_state_init(&opt, &t, 1, full)) return 1; /* moments 0 */
    return kopt_optimizer_step(&opt, &t, 1) != KOPT_OK;
}

/* The same two steps with all layers in memory: are the bits others? */
static int differs_in_memory(kopt_bf16 (*layers)[N], int count) {
    enum { MOST = 4 };
    static kopt_bf16 weight[MOST][N], grad[MOST][N];
    static unsigned char block[MOST][sizeof state];
    kopt_optimizer opt = kopt_adamw(1e-3);
    kopt_tensor t[MOST];
    int layer, iteration;
    for (layer = 0; layer < count; ++layer) {
        memcpy(weight[layer], before, sizeof before);
        t[layer] = KOPT_TENSOR(KOPT_BF16, weight[layer], grad[layer], N, block[layer], sizeof block[layer]);
    }
    if (kopt_list_set_ids(t, (size_t)count, 0) || kopt_state_init(&opt, t, (size_t)count, NULL)) return 1;
    for (iteration = 0; iteration < 2; ++iteration) {
        for (layer = 0; layer < count; ++layer) {
            memcpy(w, weight[layer], sizeof w);
            backward(NULL, 1);
            memcpy(grad[layer], g, sizeof g);
        }
        if (kopt_optimizer_step(&opt, t, (size_t)count)) return 1;
    }
    return memcmp(weight, layers, (size_t)count * sizeof weight[0]) != 0;
}

/* One layer at a time in memory. The bits are those of one call for all layers. */
static int parameters_on_disk(void) {
    enum { LAYERS = 4, BYTES = sizeof w + sizeof state };
    static kopt_bf16 layers[LAYERS][N];
    kopt_optimizer opt = kopt_adamw(1e-3);
    kopt_tensor t = KOPT_TENSOR(KOPT_BF16, w, g, N, state, sizeof state);
    FILE *file = tmpfile();
    int layer, iteration;
    if (file == NULL) return 1;
    memcpy(before, w, sizeof w);
    for (iteration = 0; iteration < 3; ++iteration) {
        kopt_step step;
        if (iteration > 0 && kopt_step_begin(&step, &opt)) return 1;
        for (layer = 0; layer < LAYERS; ++layer) {
            t.id = (uint32_t)layer; /* before its state is made, and in each step */
            if (fseek(file, (long)layer * BYTES, SEEK_SET)) return 1;
            if (iteration == 0) {
                if (kopt_state_init(&opt, &t, 1, NULL)) return 1;
            } else {
                if (fread(w, sizeof w, 1, file) != 1 || fread(state, sizeof state, 1, file) != 1) return 1;
                backward(NULL, 1); /* of this layer */
                if (kopt_step_run(&step, &t, 1) || fseek(file, (long)layer * BYTES, SEEK_SET)) return 1;
            }
            if (fwrite(w, sizeof w, 1, file) != 1 || fwrite(state, sizeof state, 1, file) != 1) return 1;
            memcpy(layers[layer], w, sizeof w);
        }
    }
    return fclose(file) || differs_in_memory(layers, LAYERS);
}

/* Which share of the updates reaches the weights that the model reads. Beside each step, an fp32 step from the same
   full weights, moments and gradient says what was intended; the share is the projection of what happened on that. */
static int effective_update(void) {
    static float full[N], intended[N], moment[N];
    static kopt_bf16 old[N];
    static unsigned char shadow_state[KOPT_STATE_BYTES(N, 8)];
    kopt_optimizer opt = kopt_adamw(1e-4), shadow_opt;
    kopt_tensor t = KOPT_TENSOR(KOPT_BF16, w, g, N, state, sizeof state);
    kopt_tensor shadow = kopt_tensor_of(intended, KOPT_F32, g, KOPT_BF16, N, shadow_state, sizeof shadow_state);
    double arrived = 0, length = 0;
    int i, slot, steps = 100;
    for (i = 0; i < N; ++i) full[i] = 1 + 0.001f * (float)i;
    opt.rounding = KOPT_STOCHASTIC; /* with KOPT_NEAREST the share is 0 */
    if (kopt_state_init(&opt, &t, 1, full)) return 1;
    while (steps-- > 0) {
        backward(NULL, 1);
        shadow_opt = opt, shadow_opt.first_moment_format = shadow_opt.second_moment_format = KOPT_F32;
        if (kopt_state_read(&opt, &t, KOPT_SLOT_WEIGHT, full)) return 1;
        if (kopt_state_init(&shadow_opt, &shadow, 1, full)) return 1;
        for (slot = KOPT_SLOT_FIRST_MOMENT; slot <= KOPT_SLOT_SECOND_MOMENT; ++slot)
            if (kopt_state_read(&opt, &t, (kopt_slot)slot, moment) ||
                kopt_state_write(&shadow_opt, &shadow, (kopt_slot)slot, moment))
                return 1;
        memcpy(old, w, sizeof w);
        if (kopt_optimizer_step(&opt, &t, 1) || kopt_optimizer_step(&shadow_opt, &shadow, 1)) return 1;
        for (i = 0; i < N; ++i) {
            const double wanted = (double)intended[i] - (double)full[i];
            arrived += wanted * (double)(kopt_f32_from_bf16(w[i]) - kopt_f32_from_bf16(old[i]));
            length += wanted * wanted;
        }
    }
    printf("share of the updates that arrives: %.2f\n", arrived / length);
    return arrived / length < 0.8 || arrived / length > 1.2;
}

/* fp32 weights into a 16-bit weight and its compensation, without a step, for kopt_kahan_add(). */
static int split_weights(void) {
    static kopt_bf16 compensation[N];
    const kopt_random_key key = {0, 1, 0, 0}; /* seed, step, id, first index: another step in each call */
    static float change[N];
    int i;
    for (i = 0; i < N; ++i) {
        const float start = 0.1f; /* your fp32 weight */
        w[i] = kopt_bf16_from_f32(start);
        compensation[i] = kopt_bf16_from_f32(start - kopt_f32_from_bf16(w[i])); /* fp16: this, times 2048 */
        change[i] = 1e-3f;
    }
    return kopt_kahan_add(w, compensation, KOPT_BF16, change, N, key) != KOPT_OK;
}

/* Two ranks exchange gradients of one bit, with error feedback. */
static int compressed_gradients(void) {
    static kopt_bf16 residual[2][N]; /* one in each of two ranks */
    static unsigned char code[N];    /* what is sent: kopt_format_size(KOPT_Q1, N) is 141 bytes */
    static float sum[N];
    kopt_optimizer opt = kopt_sgd(0.1, 0);
    kopt_tensor t = KOPT_TENSOR(KOPT_BF16, w, sum, N, state, sizeof state);
    kopt_compressor c[2];
    int rank, step;
    for (rank = 0; rank < 2; ++rank) c[rank] = kopt_compressor_of(KOPT_Q1, residual[rank], N);
    opt.grad_scale = 0.5, opt.zero_grad = 1;
    if (kopt_state_init(&opt, &t, 1, NULL)) return 1;
    for (step = 0; step < 10; ++step) {
        for (rank = 0; rank < 2; ++rank) {
            backward(NULL, 1);
            if (kopt_compress(&c[rank], code, sizeof code, g, KOPT_BF16)) return 1;
            if (kopt_decompress_add(sum, KOPT_F32, code, sizeof code, KOPT_Q1, N, 1)) return 1;
        }
        if (kopt_optimizer_step(&opt, &t, 1)) return 1;
    }
    return 0;
}

int main(void) {
    static const struct {
        const char *name;
        int (*run)(void);
    } tasks[] = {{"tied weights", tied_weights},
                 {"optimizer accumulation", optimizer_accumulation},
                 {"warm restart", warm_restart},
                 {"parameters on disk", parameters_on_disk},
                 {"effective update", effective_update},
                 {"split weights", split_weights},
                 {"compressed gradients", compressed_gradients}};
    size_t k;
    int failed = 0;
    for (k = 0; k < sizeof tasks / sizeof *tasks; ++k) {
        const int wrong = tasks[k].run();
        printf("%s: %s\n", tasks[k].name, wrong ? "FAILED" : "done");
        failed |= wrong;
    }
    return failed;
}
