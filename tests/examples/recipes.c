/* recipes.c - trains one small task with a loop of docs/places.md: LOOP is its file, PROJECT the project that it has
   the shape of. recipes.sh compiles it. The task: a network of two layers learns from another network of that shape,
   with larger weights, and noise. Losses are averages over the same samples, without the noise.

   usage: PROGRAM ARM STEPS [FILE]
   Prints "LOSS BYTES": the mean squared error, and the bytes that weights, gradients and what the loop allocates take
   for each weight. With FILE it writes the weights to FILE instead, or, if FILE begins with =, prints their largest
   difference to those in the file.

   ARM: plain    as the page has it
        nearest  the same with 16-bit weights that are rounded to nearest
        stochastic   ... rounded stochastically
        f32      the library's step in fp32: no 16-bit number anywhere
        moments  fp32 weights, bf16 moments
        rounded  as the page has it; at the end, the fp32 weights are rounded to bf16

   With WIDE, the network has about 85,000 weights, and the program prints what a weight takes in each call of the
   loop, in ns: the least of STEPS calls. Loops that compute gradients themselves are measured with what they do. */
#ifdef WIDE
#include "../../bench/timing.h"
#endif
#include "../../kahan_opt.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LLMC 1
#define GENANN 2
#define KANN 3
#define KANN_FIELDS 4
#define DARKNET 5
#define TINYENGINE 6
#define AIFES 7
#define GGML 8

#ifdef WIDE
enum { INPUTS = 256, HIDDEN = 256, OUTPUTS = 64 };
#else
enum { INPUTS = 24, HIDDEN = 32, OUTPUTS = 8 };
#endif
enum { BATCH = 8, SAMPLES = 1024, N1 = HIDDEN * INPUTS, N2 = OUTPUTS * HIDDEN };
enum { N = N1 + HIDDEN + N2 + OUTPUTS }; /* the weights in order: layer 1, its biases, layer 2, its biases */
static float all_weights[N];
#if PROJECT != GENANN && PROJECT != TINYENGINE
static float all_grads[N];
#endif
static float input[SAMPLES][INPUTS], target[SAMPLES][OUTPUTS], clean[SAMPLES][OUTPUTS];

static float noise(void) { /* in [-1, 1) */
    static uint32_t state = 1;
    state = state * 1664525u + 1013904223u;
    return (float)(state >> 8) / 8388608 - 1;
}

/* An activation of + - * / alone: the same bits with every libm. slope() takes its result, as genann's does. */
#if PROJECT == GENANN
static double act(double x) { return x / (1 + fabs(x)); }
static double slope(double y) { return (1 - fabs(y)) * (1 - fabs(y)); }
#else
static float act(float x) { return x / (1 + fabsf(x)); }
static float slope(float y) { return (1 - fabsf(y)) * (1 - fabsf(y)); }
#endif

/* ---- what the arms change in the library's functions ------------------------------------------------------------- */

enum { PLAIN, NEAREST, STOCHASTIC, F32, MOMENTS, ROUNDED };
static int arm;
static size_t allocated, states; /* bytes that the loop has, and those of them that are state blocks */

static void *counted_malloc(size_t size) {
    allocated += size;
    return malloc(size);
}

static void *counted_calloc(size_t n, size_t size) {
    allocated += n * size;
    return calloc(n, size);
}

/* In the arms with fp32 weights, the weights are the copy of a tensor, and its state has another place. */
static kopt_result in_arm(kopt_optimizer *opt, const kopt_tensor *t, const float *initial, int init) {
    static unsigned char blocks[2][KOPT_STATE_BYTES(N, 8)];
    static const void *owner[2];
    kopt_optimizer o = *opt;
    kopt_tensor other = *t;
    kopt_result result;
    const int place = owner[0] == NULL || owner[0] == t->grad ? 0 : 1;
    owner[place] = t->grad;
    if (arm == NEAREST) o.rounding = KOPT_NEAREST;
    if (arm == STOCHASTIC) o.rounding = KOPT_STOCHASTIC;
    if (arm == F32 || arm == MOMENTS) {
        other.weight_format = KOPT_F32;
        if (arm == F32) o.first_moment_format = o.second_moment_format = KOPT_F32;
        other.weight = t->copy;
        other.copy = NULL;
        other.state = blocks[place];
        other.state_size = sizeof blocks[place];
        initial = NULL;
    }
    if (init) states += kopt_state_size(&o, &other), allocated -= t->state_size;
    result = init ? kopt_state_init(&o, &other, 1, initial) : kopt_optimizer_step(&o, &other, 1);
    opt->step = o.step;
    if (result != KOPT_OK) fprintf(stderr, "%s\n", kopt_result_string(result));
    return result;
}

static void add_in_arm(kopt_bf16 *w, kopt_bf16 *c, float delta, uint32_t random16) {
    static uint32_t random = 1;
    random = random * 1664525u + 1013904223u;
    if (arm == NEAREST)
        *w = kopt_bf16_from_f32(kopt_f32_from_bf16(*w) + delta);
    else if (arm == STOCHASTIC)
        *w = kopt_bf16_from_f32_stochastic(kopt_f32_from_bf16(*w) + delta, random >> 16);
    else
        kopt_kahan_add_bf16(w, c, delta, random16);
}

static kopt_result add_all_in_arm(void *w, void *c, kopt_format format, const float *delta, size_t n,
                                  kopt_random_key key) {
    kopt_bf16 *p = w;
    if (arm != NEAREST && arm != STOCHASTIC) return kopt_kahan_add(w, c, format, delta, n, key);
    for (size_t i = 0; i < n; i++) add_in_arm(&p[i], NULL, delta[i], 0);
    return KOPT_OK;
}

/* ---- the loop, and how a step of training calls it --------------------------------------------------------------- */

#ifndef WIDE
#define malloc(size) counted_malloc(size)
#define calloc(n, size) counted_calloc(n, size)
#define kopt_state_init(opt, t, count, initial) in_arm(opt, t, initial, count)
#define kopt_optimizer_step(opt, t, count) in_arm(opt, t, NULL, (count) - 1)
#define kopt_kahan_add_bf16(w, c, delta, random16) add_in_arm(w, c, delta, random16)
#define kopt_kahan_add(w, c, format, delta, n, key) add_all_in_arm(w, c, format, delta, n, key)
#endif
#ifdef WIDE
static double begin;
#define START begin = cpu_seconds() /* what a step does from here on is measured */
#else
#define START
#endif
#define EACH_SAMPLE_OF_BATCH(t, s) for (int s = (t) * BATCH % SAMPLES, b = 0; b < BATCH; b++, s++)

#if PROJECT != GENANN && PROJECT != TINYENGINE /* they have a forward and a backward pass of their own */
static float hidden[HIDDEN];
static void forward(const float *in, float *out) {
    for (int j = 0; j < HIDDEN; j++) {
        float sum = all_weights[N1 + j];
        for (int k = 0; k < INPUTS; k++) sum += all_weights[j * INPUTS + k] * in[k];
        hidden[j] = act(sum);
    }
    for (int j = 0; j < OUTPUTS; j++) {
        float sum = all_weights[N1 + HIDDEN + N2 + j];
        for (int k = 0; k < HIDDEN; k++) sum += all_weights[N1 + HIDDEN + j * HIDDEN + k] * hidden[k];
        out[j] = act(sum);
    }
}

/* all_grads += factor * the gradient of half the squared error of a batch. */
static void backward(int t, float factor) {
#ifdef WIDE /* any numbers will do */
    for (int i = 0; i < N; i++) all_grads[i] = factor * (float)((i + t) % 97 - 48) / 4096;
#else
    EACH_SAMPLE_OF_BATCH(t, s) {
        float out[OUTPUTS], d[OUTPUTS];
        forward(input[s], out);
        for (int j = 0; j < OUTPUTS; j++) {
            d[j] = factor * (out[j] - target[s][j]) * slope(out[j]);
            for (int k = 0; k < HIDDEN; k++) all_grads[N1 + HIDDEN + j * HIDDEN + k] += d[j] * hidden[k];
            all_grads[N1 + HIDDEN + N2 + j] += d[j];
        }
        for (int k = 0; k < HIDDEN; k++) {
            float sum = 0;
            for (int j = 0; j < OUTPUTS; j++) sum += d[j] * all_weights[N1 + HIDDEN + j * HIDDEN + k];
            sum *= slope(hidden[k]);
            for (int i = 0; i < INPUTS; i++) all_grads[k * INPUTS + i] += sum * input[s][i];
            all_grads[N1 + k] += sum;
        }
    }
#endif
    START;
}
#endif

#if PROJECT == LLMC
#include LOOP
static GPT2 model = {N, all_weights, all_grads, NULL, NULL};
static void prepare(void) {}
static void step(int t) {
    memset(all_grads, 0, sizeof all_grads);
    backward(t, 1.0f / BATCH);
    gpt2_update(&model, RATE, 0.9f, 0.999f, 1e-8f, 0.01f, t + 1);
}
#endif

#if PROJECT == KANN
#include LOOP
static float *state;
static void prepare(void) { state = new_state(N); }
static void step(int t) {
    memset(all_grads, 0, sizeof all_grads);
    backward(t, 1.0f / BATCH);
    rmsprop(N, RATE, NULL, 0.9f, all_grads, all_weights, state);
}
#endif

#if PROJECT == KANN_FIELDS /* LOOP chooses the fields of an optimizer that is to do what kann does */
static void prepare(void) {}
static void step(int number) {
    static kopt_bf16 weights[N];
    static unsigned char state[KOPT_STATE_BYTES(N, 6)];
    const double learning_rate = (double)RATE, decay = (double)0.9f;
    const int t = number + 1;
    kopt_tensor p = {weights, all_grads, all_weights, state, sizeof state, N, .weight_format = KOPT_BF16};
#include LOOP
    memset(all_grads, 0, sizeof all_grads);
    backward(number, 1.0f / BATCH);
    if ((t == 1 && kopt_state_init(&opt, &p, 1, all_weights)) || kopt_optimizer_step(&opt, &p, 1)) exit(1);
}
#endif

#if PROJECT == DARKNET
static void axpy(size_t n, float a, const float *x, float *y) {
    for (size_t i = 0; i < n; i++) y[i] += a * x[i];
}
static void scale(size_t n, float a, float *x) {
    for (size_t i = 0; i < n; i++) x[i] *= a;
}
#include LOOP
static layer layers[2];
static void prepare(void) {
    layers[0].inputs = INPUTS, layers[0].outputs = layers[1].inputs = HIDDEN, layers[1].outputs = OUTPUTS;
    layers[0].weights = all_weights, layers[0].biases = all_weights + N1;
    layers[1].weights = all_weights + N1 + HIDDEN, layers[1].biases = all_weights + N1 + HIDDEN + N2;
    make_updates(&layers[0]);
    make_updates(&layers[1]);
}
static void step(int t) { /* its backward pass adds to the updates; here to all_grads, which are then moved */
    const update_args a = {BATCH, t + 1, RATE, 0.9f, 1e-4f};
    float *updates[] = {layers[0].weight_updates, layers[0].bias_updates, layers[1].weight_updates,
                        layers[1].bias_updates};
    const size_t sizes[] = {N1, HIDDEN, N2, OUTPUTS};
    const float *from = all_grads;
    memset(all_grads, 0, sizeof all_grads);
    backward(t, -1);
    for (int i = 0; i < 4; from += sizes[i], i++) axpy(sizes[i], 1, from, updates[i]);
    START;
    for (int i = 0; i < 2; i++) update_layer(layers[i], a);
}
#endif

#if PROJECT == AIFES
#include LOOP
static optimizer adam = {RATE,
                         0.9f,
                         0.999f,
                         1e-7f,
                         0,
                         0,
                         adam_sizeof_optimem,
                         adam_init_optimem,
                         adam_zero_gradients,
                         adam_begin_step,
                         adam_update_params};
static tensor weights[2], gradients[2];
static void *optimem[2];
static void prepare(void) { /* two tensors: the layers with their biases */
    weights[0].n = gradients[0].n = N1 + HIDDEN, weights[1].n = gradients[1].n = N2 + OUTPUTS;
    weights[0].data = all_weights, weights[1].data = all_weights + N1 + HIDDEN;
    gradients[0].data = all_grads, gradients[1].data = all_grads + N1 + HIDDEN;
    for (int i = 0; i < 2; i++) {
        optimem[i] = malloc(adam.sizeof_optimem(&adam, &weights[i]));
        adam.init_optimem(&adam, &weights[i], optimem[i]);
    }
}
static void step(int t) {
    for (int i = 0; i < 2; i++) adam.zero_gradients(&adam, &gradients[i]);
    backward(t, 1.0f / BATCH);
    adam.begin_step(&adam);
    for (int i = 0; i < 2; i++) adam.update_params(&adam, &weights[i], &gradients[i], optimem[i]);
}
#endif

#if PROJECT == GGML
struct tensor *new_tensor(size_t n);
#include LOOP
struct tensor *new_tensor(size_t n) {          /* of n fp32 zeros */
    struct tensor *t = (calloc)(1, sizeof *t); /* not counted */
    t->n = n;
    t->data = calloc(n, sizeof(float));
    return t;
}
static struct tensor weights[2], gradients[2], pars, *node[2];
static float par[7] = {RATE, 0.9f, 0.999f, 1e-8f, 0.01f, 0, 0};
static void prepare(void) {
    pars.n = 7, pars.data = par;
    weights[0].n = gradients[0].n = N1 + HIDDEN, weights[1].n = gradients[1].n = N2 + OUTPUTS;
    weights[0].data = all_weights, weights[1].data = all_weights + N1 + HIDDEN;
    gradients[0].data = all_grads, gradients[1].data = all_grads + N1 + HIDDEN;
    for (int i = 0; i < 2; i++) node[i] = opt_step_adamw(&weights[i], &gradients[i], &pars);
}
static void step(int t) {
    memset(all_grads, 0, sizeof all_grads);
    backward(t, 1.0f / BATCH);
    par[5] = 1 / (1 - powf(par[1], (float)(t + 1)));
    par[6] = 1 / (1 - powf(par[2], (float)(t + 1)));
    for (int i = 0; i < 2; i++)
        for (int thread = 0; thread < 3; thread++) {
            const struct compute_params one = {thread, 3};
            compute_opt_step_adamw(&one, node[i]);
        }
}
#endif

#if PROJECT == GENANN
#include LOOP
static net network = {INPUTS, HIDDEN, OUTPUTS, N, NULL, NULL, NULL};
static void prepare(void) {
    static double memory[2 * (HIDDEN + OUTPUTS)];
    network.output = memory;
    network.delta = memory + HIDDEN + OUTPUTS;
    allocate_weights(&network);
    for (int i = 0; i < N; i++)
#if AFTER
        network.weight[i] = kopt_bf16_from_f32(all_weights[i]);
#else
        network.weight[i] = (double)all_weights[i];
#endif
}
static void forward(const float *in, float *out) {
    double x[INPUTS];
    const double *y;
    for (int k = 0; k < INPUTS; k++) x[k] = (double)in[k];
    y = run(&network, x);
    for (int j = 0; j < OUTPUTS; j++) out[j] = (float)y[j];
}
static void step(int t) {
    START;
    EACH_SAMPLE_OF_BATCH(t, s) {
        double x[INPUTS], y[OUTPUTS];
        for (int k = 0; k < INPUTS; k++) x[k] = (double)input[s][k];
        for (int j = 0; j < OUTPUTS; j++) y[j] = (double)target[s][j];
        train(&network, x, y, RATE);
    }
}
#endif

#if PROJECT == TINYENGINE
static float clamp(float x, float low, float high) { return x < low ? low : x > high ? high : x; }
#define forward dense_forward
#define backward dense_backward
#include LOOP
#undef forward
#undef backward
static void prepare(void) {
    for (int i = 0; i < N1 + N2; i++) {
        weight *w = i < N1 ? &weights1[i] : &weights2[i - N1];
#if AFTER
        w->value = kopt_bf16_from_f32(all_weights[i]);
#else
        *w = all_weights[i];
#endif
    }
}
static void forward_through(const float *in, float *y1, float *out) {
    dense_forward(in, INPUTS, weights1, y1, HIDDEN);
    for (int k = 0; k < HIDDEN; k++) y1[k] = act(y1[k]);
    dense_forward(y1, HIDDEN, weights2, out, OUTPUTS);
    for (int j = 0; j < OUTPUTS; j++) out[j] = act(out[j]);
}
static void forward(const float *in, float *out) {
    float y1[HIDDEN];
    forward_through(in, y1, out);
}
static void step(int t) {
    static const float scales[HIDDEN] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
                                         1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
    float y1[BATCH][HIDDEN], y2[BATCH][OUTPUTS], d1[BATCH][HIDDEN], d2[BATCH][OUTPUTS];
    EACH_SAMPLE_OF_BATCH(t, s) {
        forward_through(input[s], y1[b], y2[b]);
        for (int j = 0; j < OUTPUTS; j++) d2[b][j] = (y2[b][j] - target[s][j]) * slope(y2[b][j]);
        dense_backward(d2[b], OUTPUTS, weights2, d1[b], HIDDEN);
        for (int k = 0; k < HIDDEN; k++) d1[b][k] *= slope(y1[b][k]);
    }
    START;
    update(y1[0], HIDDEN, d2[0], OUTPUTS, weights2, BATCH, 1, scales, RATE);
    update(input[t * BATCH % SAMPLES], INPUTS, d1[0], HIDDEN, weights1, BATCH, 1, scales, RATE);
}
#endif

/* ---- the task ---------------------------------------------------------------------------------------------------- */

static void make_task(void) {
    static float teacher1[HIDDEN][INPUTS], teacher2[OUTPUTS][HIDDEN];
    int s, j, k;
    for (j = 0; j < HIDDEN; ++j)
        for (k = 0; k < INPUTS; ++k) teacher1[j][k] = noise();
    for (j = 0; j < OUTPUTS; ++j)
        for (k = 0; k < HIDDEN; ++k) teacher2[j][k] = noise();
    for (s = 0; s < SAMPLES; ++s) {
        float y[HIDDEN];
        for (k = 0; k < INPUTS; ++k) input[s][k] = noise();
        for (j = 0; j < HIDDEN; ++j) {
            float sum = 0;
            for (k = 0; k < INPUTS; ++k) sum += teacher1[j][k] * input[s][k];
            y[j] = sum / (1 + fabsf(sum));
        }
        for (j = 0; j < OUTPUTS; ++j) {
            float sum = 0;
            for (k = 0; k < HIDDEN; ++k) sum += teacher2[j][k] * y[k];
            clean[s][j] = sum / (1 + fabsf(sum));
            target[s][j] = clean[s][j] + 0.1f * noise();
        }
    }
    for (k = 0; k < N; ++k) all_weights[k] = noise();
}

static double loss(void) {
    double sum = 0;
    for (int s = 0; s < SAMPLES; s++) {
        float out[OUTPUTS];
        forward(input[s], out);
        for (int j = 0; j < OUTPUTS; j++) sum += pow((double)(out[j] - clean[s][j]), 2);
    }
    return sum / (SAMPLES * OUTPUTS);
}

static double file_of_weights(const char *path) { /* see the usage */
    float other[N];
    double largest = 0;
    FILE *file = path[0] == '=' ? fopen(path + 1, "rb") : fopen(path, "wb");
    const int done = file != NULL && (path[0] == '=' ? fread(other, sizeof other, 1, file)
                                                     : fwrite(all_weights, sizeof all_weights, 1, file)) == 1;
    if (!done || fclose(file) != 0) exit(2);
    for (int i = 0; i < N && path[0] == '='; i++) largest = fmax(largest, fabs((double)(other[i] - all_weights[i])));
    return largest;
}

int main(int argc, char **argv) {
    static const char *names[] = {"plain", "nearest", "stochastic", "f32", "moments", "rounded"};
    size_t bytes = 2 * sizeof all_weights, n = N; /* with the gradients */
    int found = 0;
    if (argc < 3) return 2;
    for (int i = 0; i < 6; i++)
        if (strcmp(argv[1], names[i]) == 0) arm = i, found = 1;
    if (!found) return 2;
    (void)in_arm, (void)add_in_arm, (void)add_all_in_arm, (void)counted_malloc, (void)counted_calloc;
    make_task();
    prepare();
#ifdef WIDE
    double least = 1e9;
    for (int t = 0; t < atoi(argv[2]); t++) step(t), least = fmin(least, cpu_seconds() - begin);
    printf("%.2f\n", least / N * 1e9 / (PROJECT == GENANN ? BATCH : 1));
    return 0;
#endif
    for (int t = 0; t < atoi(argv[2]); t++) step(t);
    for (int i = 0; i < N && arm == ROUNDED; i++)
        all_weights[i] = kopt_f32_from_bf16(kopt_bf16_from_f32(all_weights[i]));
    if (argc > 3) {
        printf("%.1e\n", file_of_weights(argv[3]));
        return 0;
    }
#if PROJECT == DARKNET
    bytes = sizeof all_weights - 4 * (HIDDEN + OUTPUTS), n = N1 + N2; /* biases are not counted */
    allocated -= 4 * (HIDDEN + OUTPUTS);
#elif PROJECT == GENANN
    bytes = 0;
#elif PROJECT == TINYENGINE
    bytes = sizeof weights1 + sizeof weights2, n = N1 + N2;
#endif
    if (arm == F32 || arm == MOMENTS) allocated = 0; /* there are no 16-bit weights */
    printf("%.5f %zu\n", loss(), (bytes + allocated + states) / n);
    return 0;
}
