/* playground.c - trains a small network four times side by side in a web page: in fp32, and in bf16 with three
   roundings of the weights.

   `./build.sh web` builds the page around it and serves it. By hand, from the root of the repository:

       clang --target=wasm32 -O2 -mbulk-memory -nostdlib -fuse-ld=lld -Wl,--no-entry,--strip-all \
           -o playground.wasm docs/playground/playground.c
       cc -O2 -ffp-contract=off -o playground docs/playground/playground.c && ./playground

   The second program runs outside of a browser: it makes the run of the default settings and prints the hash of each
   arm as JSON. The page reads that file and compares.

   The task: two spirals of points, with noise. The network (2 inputs, two layers of 16 tanh, 2 classes) says to which
   spiral a point belongs. Each step draws 16 new points. The four arms start from the same weights and see the same
   points. They differ in how numbers are stored:

                    weights                       gradients, moments of AdamW
       fp32         fp32                          fp32
       nearest      bf16, rounded to nearest      bf16
       stochastic   bf16, rounded stochastically  bf16
       kahan        bf16, with a compensation     bf16

   All arithmetic is fp32: + - * / in the written order, and calls of the header. So every browser computes the same
   bits. */

#define KAHAN_OPT_VMATH /* kopt_vmath_exp, _log, _tanh and _sincospi; kopt_normal, kopt_uniform */
#ifdef __wasm__
#define EXPORT(name) __attribute__((export_name(#name))) name
#else
#define EXPORT(name) name
#endif
#define KAHAN_OPT_STATIC
#define KAHAN_OPT_IMPLEMENTATION
#include "../../kahan_opt.h"

/* What the page calls. */
kopt_result EXPORT(reset)(void);
void EXPORT(set)(double lr, double weight_decay, double beta2);
double EXPORT(train)(int arm, int steps);
uint64_t EXPORT(hash)(int arm);
const char *EXPORT(isa)(void);
const float *EXPORT(points)(int step);
const unsigned char *EXPORT(map)(int arm);

enum {
    INPUTS = 2,
    HIDDEN = 16,
    CLASSES = 2,
    LAYERS = 3,
    PARAMETERS = (INPUTS + 1) * HIDDEN + (HIDDEN + 1) * HIDDEN + (HIDDEN + 1) * CLASSES, /* with biases */
    BATCH = 16,
    SIDE = 48, /* of a map */
    SEED = 1
};
static const int width[LAYERS + 1] = {INPUTS, HIDDEN, HIDDEN, CLASSES};
static const double bound[LAYERS] = {0.57735026918962576, 0.43301270189221930, 0.57735026918962576}; /* of initial
    weights: sqrt(6 / (in + out)), Glorot & Bengio 2010 */

enum { FP32, NEAREST, STOCHASTIC, KAHAN, ARMS };

/* What an arm stores. An array holds fp32 numbers, or bf16 numbers in its first half. */
typedef struct {
    kopt_optimizer opt;
    kopt_tensor tensor;
    float weight[PARAMETERS], grad[PARAMETERS];
    unsigned char state[KOPT_STATE_BYTES(PARAMETERS, 8)];
} Arm;
static Arm arms[ARMS];

/* What forward and backward compute with, for the arm whose turn it is. activation[l] is the input of layer l,
   activation[LAYERS] are the logits; slope[l] is the gradient of activation[l]. */
static float weight[PARAMETERS], grad[PARAMETERS];
static float activation[LAYERS + 1][BATCH * HIDDEN], slope[LAYERS + 1][BATCH * HIDDEN];
static int32_t target[BATCH];

/* ---- The points -------------------------------------------------------------------------------------------------- */

/* Puts the points of a step into activation[0]. Point i belongs to spiral i mod 2. */
static kopt_result draw_points(uint64_t step) {
    float radius[BATCH], angle[BATCH], sine[BATCH], cosine[BATCH], *x = activation[0];
    kopt_random_key radii = {SEED, 0, 1, 0}, noise = {SEED, 0, 2, 0};
    radii.first_index = step * BATCH;
    noise.first_index = step * BATCH * INPUTS;
    kopt_result result = kopt_uniform(radius, KOPT_F32, BATCH, 0, 1, radii);
    if (result == KOPT_OK) result = kopt_normal(x, KOPT_F32, BATCH * INPUTS, 0, 0.05, noise);
    if (result != KOPT_OK) return result;
    for (int i = 0; i < BATCH; i++) {
        target[i] = i % CLASSES;
        angle[i] = 1.25f * radius[i] + (float)target[i]; /* 1 is half a turn */
    }
    result = kopt_vmath_sincospi(sine, cosine, angle, BATCH);
    for (int i = 0; i < BATCH; i++) {
        x[INPUTS * i] += radius[i] * cosine[i];
        x[INPUTS * i + 1] += radius[i] * sine[i];
    }
    return result;
}

/* ---- The network ------------------------------------------------------------------------------------------------- */

/* Layer l has a row of weights for each of its inputs, and then a row of biases. */
static kopt_result forward(void) {
    const float *w = weight;
    for (int l = 0; l < LAYERS; l++) {
        const int in = width[l], out = width[l + 1];
        for (int i = 0; i < BATCH; i++) {
            const float *x = activation[l] + i * in;
            float *y = activation[l + 1] + i * out;
            for (int o = 0; o < out; o++) y[o] = w[in * out + o];
            for (int k = 0; k < in; k++)
                for (int o = 0; o < out; o++) y[o] += x[k] * w[k * out + o];
        }
        w += (in + 1) * out;
        if (l == LAYERS - 1) break;
        kopt_result result = kopt_vmath_tanh(activation[l + 1], activation[l + 1], (size_t)(BATCH * out));
        if (result != KOPT_OK) return result;
    }
    return KOPT_OK;
}

/* From slope[LAYERS] to grad. */
static void backward(void) {
    int at = PARAMETERS;
    for (int i = 0; i < PARAMETERS; i++) grad[i] = 0;
    for (int l = LAYERS - 1; l >= 0; l--) {
        const int in = width[l], out = width[l + 1];
        at -= (in + 1) * out;
        const float *w = weight + at;
        float *g = grad + at;
        for (int i = 0; i < BATCH; i++) {
            const float *x = activation[l] + i * in, *dy = slope[l + 1] + i * out;
            for (int k = 0; k < in; k++) {
                float sum = 0;
                for (int o = 0; o < out; o++) {
                    g[k * out + o] += x[k] * dy[o];
                    sum += w[k * out + o] * dy[o];
                }
                slope[l][i * in + k] = sum * (1 - x[k] * x[k]); /* x is a tanh; nobody reads the slopes of the points */
            }
            for (int o = 0; o < out; o++) g[in * out + o] += dy[o];
        }
    }
}

/* loss = log(sum of e^logit) - logit[target] of each point; slope: the gradient of the mean. */
static kopt_result cross_entropy(float loss[BATCH]) {
    kopt_result result = KOPT_OK;
    for (int i = 0; i < BATCH && result == KOPT_OK; i++) {
        const float *logit = activation[LAYERS] + i * CLASSES;
        float *p = slope[LAYERS] + i * CLASSES, largest = logit[0], sum = 0;
        for (int c = 1; c < CLASSES; c++) largest = logit[c] > largest ? logit[c] : largest;
        for (int c = 0; c < CLASSES; c++) p[c] = logit[c] - largest;
        result = kopt_vmath_exp(p, p, CLASSES);
        for (int c = 0; c < CLASSES; c++) sum += p[c];
        for (int c = 0; c < CLASSES; c++) p[c] = (p[c] / sum - (c == target[i] ? 1.0f : 0.0f)) / (float)BATCH;
        if (result == KOPT_OK) result = kopt_vmath_log(&loss[i], &sum, 1);
        loss[i] += largest - logit[target[i]];
    }
    return result;
}

/* ---- What the page calls ----------------------------------------------------------------------------------------- */

/* All arms begin again with the same weights. Returns 0, which is KOPT_OK, or an error. */
kopt_result reset(void) {
    static const kopt_rounding rounding[ARMS] = {KOPT_NEAREST, KOPT_NEAREST, KOPT_STOCHASTIC, KOPT_KAHAN};
    kopt_result result = KOPT_OK;
    float *w = weight;
    for (int l = 0; l < LAYERS && result == KOPT_OK; l++) {
        const kopt_random_key key = {SEED, 0, 3 + (uint32_t)l, 0};
        const size_t in = (size_t)width[l], out = (size_t)width[l + 1];
        result = kopt_uniform(w, KOPT_F32, in * out, -bound[l], bound[l], key);
        for (size_t o = 0; o < out; o++) w[in * out + o] = 0;
        w += (in + 1) * out;
    }
    for (int a = 0; a < ARMS && result == KOPT_OK; a++) {
        Arm *arm = &arms[a];
        const kopt_format format = a == FP32 ? KOPT_F32 : KOPT_BF16;
        arm->opt = kopt_adamw(1e-3);
        arm->opt.first_moment_format = arm->opt.second_moment_format = format;
        arm->opt.rounding = rounding[a];
        arm->tensor = kopt_tensor_of(arm->weight, format, arm->grad, format, PARAMETERS, arm->state, 0);
        arm->tensor.state_size = kopt_state_size(&arm->opt, &arm->tensor);
        result = kopt_state_init(&arm->opt, &arm->tensor, 1, weight);
    }
    return result;
}

/* The settings of all arms, from the next step on. */
void set(double lr, double weight_decay, double beta2) {
    for (int a = 0; a < ARMS; a++) {
        arms[a].opt.lr = lr;
        arms[a].opt.weight_decay = weight_decay;
        arms[a].opt.beta2 = beta2;
    }
}

/* Trains one arm for some steps. Returns the mean of their losses in nats per point; -1 if the arm does not exist or
   the header refuses a setting, and then no step was made with it. */
double train(int a, int steps) {
    if (a < 0 || a >= ARMS || steps < 1) return -1;
    Arm *arm = &arms[a];
    const kopt_format format = arm->tensor.weight_format;
    double sum = 0;
    for (int s = 0; s < steps; s++) {
        float loss[BATCH];
        kopt_result result = draw_points(arm->opt.step);
        if (result == KOPT_OK) result = kopt_convert(weight, KOPT_F32, arm->weight, format, PARAMETERS);
        if (result == KOPT_OK) result = forward();
        if (result == KOPT_OK) result = cross_entropy(loss);
        if (result == KOPT_OK) backward();
        if (result == KOPT_OK) result = kopt_convert(arm->grad, format, grad, KOPT_F32, PARAMETERS);
        if (result == KOPT_OK) result = kopt_optimizer_step(&arm->opt, &arm->tensor, 1);
        if (result != KOPT_OK) return -1;
        for (int i = 0; i < BATCH; i++) sum += (double)loss[i];
    }
    return sum / ((double)BATCH * steps);
}

static uint64_t fnv1a(uint64_t hash, const void *p, size_t size) {
    for (const unsigned char *byte = p; size > 0; byte++, size--) hash = (hash ^ *byte) * 0x100000001B3u;
    return hash;
}

/* A hash (FNV-1a, 64 bits) of the weights and the state of one arm. */
uint64_t hash(int a) {
    if (a < 0 || a >= ARMS) return 0;
    const Arm *arm = &arms[a];
    const size_t size = kopt_format_size(arm->tensor.weight_format, PARAMETERS);
    const uint64_t weights = fnv1a(0xCBF29CE484222325u, arm->weight, size);
    return fnv1a(weights, arm->state, arm->tensor.state_size);
}

/* The instruction set whose code the header runs, a string that ends with 0. */
const char *isa(void) { return kopt_isa_name(kopt_isa_current()); }

/* The BATCH points of a step, x and y of each, for the page to draw. NULL if the header refuses. */
const float *points(int step) { return draw_points((uint64_t)step) == KOPT_OK ? activation[0] : NULL; }

/* What an arm says of SIDE by SIDE points from (-1.1, 1.1) to (1.1, -1.1), row by row: 0 for the spiral of the even
   points, 255 for the other. NULL if the arm does not exist or the header refuses. */
const unsigned char *map(int a) {
    static unsigned char pixel[SIDE * SIDE];
    float *x = activation[0], odds[BATCH];
    if (a < 0 || a >= ARMS ||
        kopt_convert(weight, KOPT_F32, arms[a].weight, arms[a].tensor.weight_format, PARAMETERS) != KOPT_OK)
        return NULL;
    for (int p = 0; p < SIDE * SIDE; p += BATCH) { /* a row is three batches */
        for (int i = 0; i < BATCH; i++) {
            x[INPUTS * i] = 2.2f / (SIDE - 1) * (float)((p + i) % SIDE) - 1.1f;
            x[INPUTS * i + 1] = 1.1f - 2.2f / (SIDE - 1) * (float)(p / SIDE);
        }
        if (forward() != KOPT_OK) return NULL;
        for (int i = 0; i < BATCH; i++) odds[i] = activation[LAYERS][CLASSES * i] - activation[LAYERS][CLASSES * i + 1];
        if (kopt_vmath_exp(odds, odds, BATCH) != KOPT_OK) return NULL;
        for (int i = 0; i < BATCH; i++) pixel[p + i] = (unsigned char)(255 / (1 + odds[i]));
    }
    return pixel;
}

/* ---- Outside of a browser ---------------------------------------------------------------------------------------- */

#ifndef __wasm__
#include <stdio.h>
#include <stdlib.h>

/* ./playground [STEPS]: the default run, as JSON. STEPS is a multiple of 40 above 400; nothing is printed for another.
   The loss is the mean of the last MEAN points of the curve. */
int main(int argc, char **argv) {
    enum { STEPS = 8000, POINT = 40, MEAN = 10 };
    static const char *const name[ARMS] = {"fp32", "nearest", "stochastic", "kahan"};
    const double lr = 1e-3, weight_decay = 0.01, beta2 = 0.999;
    const int steps = argc > 1 ? atoi(argv[1]) : STEPS;
    if (steps <= POINT * MEAN || steps % POINT != 0 || reset() != KOPT_OK) return 1;
    set(lr, weight_decay, beta2);
    printf("{\"steps\": %d, \"point\": %d, \"mean\": %d, \"lr\": %g, \"weight_decay\": %g, \"beta2\": %g,\n"
           " \"parameters\": %d, \"batch\": %d, \"side\": %d, \"isa\": \"%s\", \"arms\": [",
           steps, POINT, MEAN, lr, weight_decay, beta2, PARAMETERS, BATCH, SIDE, isa());
    for (int a = 0; a < ARMS; a++) {
        const double first = train(a, steps - POINT * MEAN), last = train(a, POINT * MEAN);
        if (first < 0 || last < 0) return 1;
        printf("%s\n  {\"name\": \"%s\", \"loss\": %.4f, \"hash\": \"%016llx\"}", a ? "," : "", name[a], last,
               (unsigned long long)hash(a));
    }
    puts("]}");
    return 0;
}
#endif
