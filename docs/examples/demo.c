/* demo.c - trains a small language model five times: in fp32, and in pure 16 bit with four roundings of the weights.

       ./build.sh demo                     bf16, trains on kahan_opt.h
       ./build.sh demo --fp16 FILE         fp16 with a dynamic loss scale, trains on FILE
       ./build.sh demo --precision all     fp32, mixed precision and pure 16 bit in one table: see below
       ./build.sh demo --rule adam_atan2   AdamW in fp32 and bf16, and Adam-atan2 in bf16

   or by hand, from the root of the repository:

       cc -O3 -o demo docs/examples/demo.c -lm && ./demo [--fp16 | --precision P | --rule adam_atan2] [FILE]

   The model reads 8 bytes of a text and predicts the next one:

       bytes -> embedding -> hidden layer (tanh) -> logits -> softmax and cross entropy

   The five arms start from the same weights and see the same batches. They differ in how numbers are stored:

                    weights, gradients, activations, moments of AdamW               bytes per parameter
       fp32         all fp32                                                                 16
       nearest      all 16 bit, every store rounds to nearest                                 8
       stochastic   all 16 bit, weights and moments are rounded stochastically                8
       kahan        all 16 bit, a 16-bit compensation beside each weight                     10
       exact        all 16 bit, the low 16 bits of the fp32 weight beside each weight        10

   With --precision the arms are fp32 and the precision that is named (several: one option for each; or all of them):

       fp32         all fp32                                                                 16
       amp_bf16     mixed precision: fp32 weights and moments, and a bf16 copy of the        16
                    weights, with which forward and backward run; bf16 gradients
       amp_fp16     the same with fp16 and a dynamic loss scale                              16
       bf16, fp16   all 16 bit, with kahan; fp16 with a dynamic loss scale                   10

   With --rule adam_atan2 they are fp32 and bf16 as above, and Adam-atan2 in bf16 with AdamW's betas and decay, at 0.87
   of its learning rate: 1.27 atan2(m, sqrt(v)) is longer than m / sqrt(v) where that is small. It must end within 0.02
   of fp32.

   Arithmetic is fp32 in all of them, as in the registers of hardware with 16-bit storage: see Tensor.

   exp, log and tanh are the header's vector mathematics, by its own code. With SLEEF: -DKAHAN_OPT_SLEEF ... -lsleef.

   Results: a table, a plot and a sample of text on stdout; build/demo/loss.csv and build/demo/loss.svg, and
   build/demo/arrived.svg: the share of the updates that reaches the weights which the model reads.
   Exit status: 0 if the arms end as close to fp32 as they should, and nearest does not (see verdict), 1 if not, 2 if
   something could not be read or written. */

#define _POSIX_C_SOURCE 200809L /* clock_gettime, isatty, mkdir */

#define KAHAN_OPT_VMATH /* kopt_vmath_exp, _log and _tanh; Adam-atan2 */
#define KAHAN_OPT_IMPLEMENTATION
#include "../../kahan_opt.h"

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/* ---- The experiment --------------------------------------------------------------------------------------------- */

enum {
    VOCAB = 256, /* a token is a byte */
    CONTEXT = 8, /* tokens the model reads */
    EMBED = 16,  /* numbers per token */
    INPUT = CONTEXT * EMBED,
    HIDDEN = 96,
    BATCH = 16, /* predictions per step */
    STEPS = 10000,
    LOGS = 20, /* points of a loss curve */
    LOG_EVERY = STEPS / LOGS,
    SHADOWED = (LOG_EVERY + 9) / 10, /* so many steps in the middle of each of these are measured by a shadow */
    SAMPLE = 300,                    /* bytes of text generated at the end */
    SEED = 1,

    MIN_BYTES = 4096, /* of FILE */
    MAX_BYTES = 8 << 20,
    HELD_OUT_BLOCK = 256, /* one block of bytes in ten is held out for validation ... */
    HELD_OUT_EVERY = 10,
    HELD_OUT_MAX = 32768, /* ... but no more than this of a large file, to save time */

    SCALE_GROWS = 2000 /* fp16: the loss scale is doubled after so many steps without an overflow */
};

/* How the numbers of one arm are stored, and how its curve is drawn. */
typedef struct {
    const char *name;
    kopt_format format; /* of gradients, activations and the weights that they are computed with */
    int master;         /* 1: mixed precision. Those weights are a copy of fp32 ones, with fp32 moments */
    kopt_rounding rounding, moment_rounding;
    const char *terminal, *colour, *dash;
    double width;
} Arm;

enum { MAX_ARMS = 5 };

/* What is trained: a list of arms. */
typedef struct {
    const char *name, *title; /* for the plot: "Training in NAME, TITLE" */
    double learning_rate;     /* at the start; falls to 0 along a cosine */
    double apart;             /* nearest must end this much above fp32, in nats per byte of held-out text ... */
    double close;             /* ... and the others this close to it */
    int arms;
    Arm arm[MAX_ARMS];
    int drawn[MAX_ARMS]; /* the order in which the curves are drawn: from wide to narrow */
    int sampled;         /* the arm that generates text */
    int atan2;           /* the arm with Adam-atan2 in place of AdamW; 0: none */
} Setup;

static const double CLOSE = 0.01;

enum { FP32, NEAREST, STOCHASTIC, KAHAN, EXACT };

/* A weight that rounds to nearest stalls where |update| < ulp / 2. An ulp of fp16 is 8 times finer than one of bf16:
   the stall shows at a lower learning rate, and is weaker at any rate this model learns well with. */
static Setup setup_roundings(int fp16) {
    const kopt_format f = fp16 ? KOPT_FP16 : KOPT_BF16;
    const Setup setup = {fp16 ? "pure fp16" : "pure bf16",
                         "weights rounded in four ways",
                         fp16 ? 2.5e-4 : 1e-3,
                         fp16 ? 0.05 : 0.10,
                         CLOSE,
                         5,
                         {{"fp32", KOPT_F32, 0, KOPT_NEAREST, KOPT_NEAREST, "\033[90m", "#b9c0ca", "none", 9.0},
                          {"nearest", f, 0, KOPT_NEAREST, KOPT_NEAREST, "\033[31m", "#d1242f", "none", 2.5},
                          {"stochastic", f, 0, KOPT_STOCHASTIC, KOPT_STOCHASTIC, "\033[33m", "#f08c00", "5 4", 2.0},
                          {"kahan", f, 0, KOPT_KAHAN, KOPT_STOCHASTIC, "\033[34m", "#0b3d91", "none", 2.0},
                          {"exact", f, 0, KOPT_EXACT, KOPT_STOCHASTIC, "\033[32m", "#2ca25f", "none", 5.0}},
                         {FP32, EXACT, KAHAN, STOCHASTIC, NEAREST},
                         KAHAN,
                         0};
    return setup;
}

static const Arm precisions[MAX_ARMS] = {
    {"fp32", KOPT_F32, 0, KOPT_NEAREST, KOPT_NEAREST, "\033[90m", "#b9c0ca", "none", 11.0},
    {"amp_bf16", KOPT_BF16, 1, KOPT_NEAREST, KOPT_NEAREST, "\033[32m", "#2ca25f", "none", 8.0},
    {"amp_fp16", KOPT_FP16, 1, KOPT_NEAREST, KOPT_NEAREST, "\033[33m", "#f0c000", "none", 5.0},
    {"bf16", KOPT_BF16, 0, KOPT_KAHAN, KOPT_STOCHASTIC, "\033[34m", "#0b3d91", "none", 2.5},
    {"fp16", KOPT_FP16, 0, KOPT_KAHAN, KOPT_STOCHASTIC, "\033[31m", "#d1242f", "4 4", 1.5}};

/* fp32, and the wanted ones of the precisions. */
static Setup setup_precisions(const int *wanted) {
    Setup setup = {"mixed precision and pure 16 bit", "next to fp32", 1e-3, 0, CLOSE, 0, {{0}}, {0}, 0, 0};
    for (int p = 0; p < MAX_ARMS; p++)
        if (p == FP32 || wanted[p]) {
            setup.drawn[setup.arms] = setup.sampled = setup.arms;
            setup.arm[setup.arms++] = precisions[p];
        }
    return setup;
}

static Setup setup_atan2(void) {
    static const int wanted[MAX_ARMS] = {0, 0, 0, 1, 0}; /* bf16 */
    Setup setup = setup_precisions(wanted);
    Arm *arm = &setup.arm[setup.arms];
    setup.name = "pure bf16";
    setup.title = "AdamW and Adam-atan2";
    setup.close = 0.02;
    *arm = setup.arm[setup.arms - 1];
    arm->name = "adam_atan2";
    arm->terminal = "\033[31m", arm->colour = "#d1242f", arm->dash = "4 4", arm->width = 1.5;
    setup.drawn[setup.arms] = setup.sampled = setup.atan2 = setup.arms;
    setup.arms++;
    return setup;
}

typedef struct {
    double train_loss[LOGS]; /* mean since the previous point, in nats per byte */
    double val_loss[LOGS];   /* on all held-out bytes */
    double arrived[LOGS];    /* the share of the updates that arrives in the weights (see Shadow) */
    double final_train;      /* mean of the last tenth of the steps */
    double final_val;        /* the last point of val_loss */
    double bytes_per_parameter, seconds;
    int skipped; /* steps that were skipped because a gradient overflowed */
    unsigned char sample[SAMPLE];
} Result;

/* ---- Helpers ---------------------------------------------------------------------------------------------------- */

static void fail(const char *format, ...) {
    va_list args;
    va_start(args, format);
    fputs("demo: ", stderr);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    va_end(args);
    exit(2);
}

static void check(kopt_result result) {
    if (result != KOPT_OK) fail("kahan_opt: %s", kopt_result_string(result));
}

static void *allocate(size_t bytes) {
    void *memory = calloc(1, bytes);
    if (!memory) fail("out of memory");
    return memory;
}

static double wall_clock(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* ---- Random numbers (splitmix64) -------------------------------------------------------------------------------- */

static uint32_t random_bits(uint64_t *state) {
    uint64_t z = *state += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return (uint32_t)(z >> 32);
}

/* In [0, 1). */
static float random_uniform(uint64_t *state) { return (float)(random_bits(state) >> 8) * 0x1p-24f; }

/* ---- Data ------------------------------------------------------------------------------------------------------- */

typedef struct {
    unsigned char *bytes;
    size_t n;
    int truncated;
    size_t held_out_every; /* of so many blocks, one is held out */
    size_t *val, vals;     /* positions of the held-out bytes */
} Data;

/* Is the byte at this position never predicted in training? (It may be part of the context of one that is.) */
static int data_held_out(const Data *d, size_t position) {
    return position / HELD_OUT_BLOCK % d->held_out_every == d->held_out_every / 2;
}

static Data data_load(const char *path) {
    Data d = {0};
    FILE *file = fopen(path, "rb");
    if (!file) fail("cannot open %s: %s", path, strerror(errno));
    d.bytes = allocate(MAX_BYTES + 1);
    d.n = fread(d.bytes, 1, MAX_BYTES + 1, file);
    if (ferror(file)) fail("cannot read %s: %s", path, strerror(errno));
    fclose(file);
    if (d.n < MIN_BYTES) fail("%s has %zu bytes; at least %d are needed", path, d.n, MIN_BYTES);
    d.truncated = d.n > MAX_BYTES;
    if (d.truncated) d.n = MAX_BYTES;

    d.held_out_every = d.n / HELD_OUT_MAX + 1;
    if (d.held_out_every < HELD_OUT_EVERY) d.held_out_every = HELD_OUT_EVERY;
    d.val = allocate(d.n * sizeof *d.val);
    for (size_t i = CONTEXT; i < d.n; i++)
        if (data_held_out(&d, i)) d.val[d.vals++] = i;
    return d;
}

/* A random position in what is not held out. */
static size_t data_sample(const Data *d, uint64_t *random) {
    size_t position;
    do position = CONTEXT + random_bits(random) % (d->n - CONTEXT);
    while (data_held_out(d, position));
    return position;
}

/* ---- Tensors: 16-bit numbers in memory, fp32 in registers ------------------------------------------------------- */

/* What the model keeps is `stored`. `value` stands for the registers of a machine that computes in fp32: layers read
   and write it. tensor_store() rounds it to nearest into memory and loads it back, so that whoever reads it next sees
   the rounded numbers. In fp32 the two are one array. */
typedef struct {
    kopt_format format;
    size_t n;
    void *stored;
    float *value;
} Tensor;

static size_t format_bytes(kopt_format format) { return format == KOPT_F32 ? 4 : 2; }

static Tensor tensor_make(kopt_format format, size_t n) {
    Tensor t = {format, n, NULL, NULL};
    t.value = allocate(n * sizeof *t.value);
    t.stored = format == KOPT_F32 ? (void *)t.value : allocate(n * format_bytes(format));
    return t;
}

static void tensor_free(Tensor *t) {
    if (t->format != KOPT_F32) free(t->stored);
    free(t->value);
}

static void tensor_load(Tensor *t) {
    if (t->format != KOPT_F32) check(kopt_convert(t->value, KOPT_F32, t->stored, t->format, t->n));
}

static void tensor_store(Tensor *t) {
    if (t->format != KOPT_F32) check(kopt_convert(t->stored, t->format, t->value, KOPT_F32, t->n));
    tensor_load(t);
}

/* ---- Model ------------------------------------------------------------------------------------------------------ */

enum { EMBEDDING, HIDDEN_WEIGHT, HIDDEN_BIAS, OUTPUT_WEIGHT, OUTPUT_BIAS, PARAMETERS };

static const size_t parameter_rows[PARAMETERS] = {VOCAB, INPUT, 1, HIDDEN, 1};
static const size_t parameter_columns[PARAMETERS] = {EMBED, HIDDEN, HIDDEN, VOCAB, VOCAB};

typedef struct {
    Tensor weight[PARAMETERS], grad[PARAMETERS]; /* [parameter_rows][parameter_columns] */
    Tensor input, dinput;                        /* [BATCH][CONTEXT][EMBED] */
    Tensor hidden, dhidden;                      /* [BATCH][HIDDEN] */
    Tensor logits, dlogits;                      /* [BATCH][VOCAB] */
    unsigned char context[BATCH][CONTEXT];       /* the tokens it reads ... */
    int32_t target[BATCH];                       /* ... and the ones that follow */
} Model;

static size_t parameter_size(int p) { return parameter_rows[p] * parameter_columns[p]; }

static void model_make(Model *m, kopt_format format) {
    for (int p = 0; p < PARAMETERS; p++) {
        m->weight[p] = tensor_make(format, parameter_size(p));
        m->grad[p] = tensor_make(format, parameter_size(p));
    }
    m->input = tensor_make(format, BATCH * INPUT);
    m->dinput = tensor_make(format, BATCH * INPUT);
    m->hidden = tensor_make(format, BATCH * HIDDEN);
    m->dhidden = tensor_make(format, BATCH * HIDDEN);
    m->logits = tensor_make(format, BATCH * VOCAB);
    m->dlogits = tensor_make(format, BATCH * VOCAB);
}

static void model_free(Model *m) {
    for (int p = 0; p < PARAMETERS; p++) {
        tensor_free(&m->weight[p]);
        tensor_free(&m->grad[p]);
    }
    tensor_free(&m->input);
    tensor_free(&m->dinput);
    tensor_free(&m->hidden);
    tensor_free(&m->dhidden);
    tensor_free(&m->logits);
    tensor_free(&m->dlogits);
}

/* Initial weights in fp32: uniform, in a layer of n inputs up to 1 / sqrt(n); biases are zero. */
static void parameter_init(float *initial, int p, uint64_t *random) {
    size_t rows = parameter_rows[p];
    float range = p == EMBEDDING ? 1.0f : rows == 1 ? 0.0f : 1.0f / sqrtf((float)rows);
    for (size_t i = 0; i < parameter_size(p); i++) initial[i] = range * (2.0f * random_uniform(random) - 1.0f);
}

/* c[m][n] = a[m][k] b[k][n], k a multiple of 4. The inner loop runs along rows, so compilers vectorise it. */
static void matmul(float *restrict c, const float *restrict a, const float *restrict b, size_t m, size_t k, size_t n) {
    memset(c, 0, m * n * sizeof *c);
    for (size_t i = 0; i < m; i++, c += n)
        for (size_t p = 0; p < k; p += 4, a += 4) {
            const float *b0 = b + p * n, *b1 = b0 + n, *b2 = b1 + n, *b3 = b2 + n;
            float a0 = a[0], a1 = a[1], a2 = a[2], a3 = a[3];
            for (size_t j = 0; j < n; j++) c[j] += a0 * b0[j] + a1 * b1[j] + a2 * b2[j] + a3 * b3[j];
        }
}

/* Returns a[rows][columns] transposed, valid until the next call. */
static const float *transposed(const float *a, size_t rows, size_t columns) {
    static float result[HIDDEN * VOCAB]; /* the largest of them */
    for (size_t i = 0; i < rows; i++)
        for (size_t j = 0; j < columns; j++) result[j * rows + i] = a[i * columns + j];
    return result;
}

/* input[BATCH][CONTEXT][EMBED] = embedding[context[BATCH][CONTEXT]][EMBED] */
static void embedding_forward(Model *m) {
    for (size_t b = 0; b < BATCH; b++)
        for (size_t c = 0; c < CONTEXT; c++)
            memcpy(m->input.value + (b * CONTEXT + c) * EMBED, m->weight[EMBEDDING].value + m->context[b][c] * EMBED,
                   EMBED * sizeof(float));
}

/* dembedding[context[BATCH][CONTEXT]][EMBED] += dinput[BATCH][CONTEXT][EMBED] */
static void embedding_backward(Model *m) {
    float *dembedding = m->grad[EMBEDDING].value;
    memset(dembedding, 0, m->grad[EMBEDDING].n * sizeof *dembedding);
    for (size_t b = 0; b < BATCH; b++)
        for (size_t c = 0; c < CONTEXT; c++)
            for (size_t e = 0; e < EMBED; e++)
                dembedding[m->context[b][c] * EMBED + e] += m->dinput.value[(b * CONTEXT + c) * EMBED + e];
}

/* y[BATCH][columns] = x[BATCH][rows] weight[rows][columns] + bias[columns] */
static void linear_forward(Tensor *y, const Tensor *x, const Tensor *weight, const Tensor *bias) {
    size_t columns = bias->n, rows = weight->n / columns;
    matmul(y->value, x->value, weight->value, BATCH, rows, columns);
    for (size_t b = 0; b < BATCH; b++)
        for (size_t j = 0; j < columns; j++) y->value[b * columns + j] += bias->value[j];
}

/* dweight = x^T dy, dbias = sum of dy over the batch, dx = dy weight^T */
static void linear_backward(Tensor *dx, Tensor *dweight, Tensor *dbias, const Tensor *dy, const Tensor *x,
                            const Tensor *weight) {
    size_t columns = dbias->n, rows = weight->n / columns;
    matmul(dweight->value, transposed(x->value, BATCH, rows), dy->value, rows, BATCH, columns);
    memset(dbias->value, 0, columns * sizeof(float));
    for (size_t b = 0; b < BATCH; b++)
        for (size_t j = 0; j < columns; j++) dbias->value[j] += dy->value[b * columns + j];
    matmul(dx->value, dy->value, transposed(weight->value, rows, columns), BATCH, columns, rows);
}

/* hidden = tanh(hidden) */
static void tanh_forward(Tensor *hidden) { check(kopt_vmath_tanh(hidden->value, hidden->value, hidden->n)); }

/* dhidden = dhidden * (1 - hidden^2) */
static void tanh_backward(Tensor *dhidden, const Tensor *hidden) {
    for (size_t i = 0; i < hidden->n; i++) dhidden->value[i] *= 1.0f - hidden->value[i] * hidden->value[i];
}

/* probability = e^logit / sum of e^logit. Returns the logarithm of that sum. */
static float softmax(float *probability, const float *logit) {
    float largest = logit[0], sum = 0.0f, log_sum;
    for (size_t v = 1; v < VOCAB; v++) largest = logit[v] > largest ? logit[v] : largest;
    for (size_t v = 0; v < VOCAB; v++) probability[v] = logit[v] - largest;
    check(kopt_vmath_exp(probability, probability, VOCAB));
    for (size_t v = 0; v < VOCAB; v++) sum += probability[v];
    for (size_t v = 0; v < VOCAB; v++) probability[v] /= sum;
    check(kopt_vmath_log(&log_sum, &sum, 1));
    return largest + log_sum;
}

/* Returns the cross entropy in nats, summed over the first `rows` rows. If dlogits is not NULL it becomes the gradient
   of the mean, (softmax(logits) - onehot(target)) * loss_scale / BATCH. */
static double cross_entropy(Model *m, size_t rows, Tensor *dlogits, float loss_scale) {
    double sum = 0.0;
    for (size_t b = 0; b < rows; b++) {
        const float *logit = m->logits.value + b * VOCAB;
        float probability[VOCAB];
        sum += (double)(softmax(probability, logit) - logit[m->target[b]]);
        if (!dlogits) continue;
        probability[m->target[b]] -= 1.0f;
        for (size_t v = 0; v < VOCAB; v++) dlogits->value[b * VOCAB + v] = probability[v] * (loss_scale / BATCH);
    }
    if (dlogits) tensor_store(dlogits);
    return sum;
}

/* Fills row b of the batch with the byte at `position` and what comes before it. */
static void model_set_row(Model *m, size_t b, const Data *d, size_t position) {
    memcpy(m->context[b], d->bytes + position - CONTEXT, CONTEXT);
    m->target[b] = d->bytes[position];
}

/* Each tensor_store() is a trip through memory: what comes after it sees 16-bit numbers. */
static void model_forward(Model *m) {
    embedding_forward(m);
    tensor_store(&m->input);
    linear_forward(&m->hidden, &m->input, &m->weight[HIDDEN_WEIGHT], &m->weight[HIDDEN_BIAS]);
    tanh_forward(&m->hidden);
    tensor_store(&m->hidden);
    linear_forward(&m->logits, &m->hidden, &m->weight[OUTPUT_WEIGHT], &m->weight[OUTPUT_BIAS]);
    tensor_store(&m->logits);
}

/* From dlogits on. */
static void model_backward(Model *m) {
    linear_backward(&m->dhidden, &m->grad[OUTPUT_WEIGHT], &m->grad[OUTPUT_BIAS], &m->dlogits, &m->hidden,
                    &m->weight[OUTPUT_WEIGHT]);
    tanh_backward(&m->dhidden, &m->hidden);
    tensor_store(&m->dhidden);
    linear_backward(&m->dinput, &m->grad[HIDDEN_WEIGHT], &m->grad[HIDDEN_BIAS], &m->dhidden, &m->input,
                    &m->weight[HIDDEN_WEIGHT]);
    tensor_store(&m->dinput);
    embedding_backward(m);
    for (int p = 0; p < PARAMETERS; p++) tensor_store(&m->grad[p]);
}

/* Mean loss over all held-out tokens. */
static double model_validate(Model *m, const Data *d) {
    double loss = 0.0;
    for (size_t begin = 0; begin < d->vals; begin += BATCH) {
        size_t rows = d->vals - begin < BATCH ? d->vals - begin : BATCH;
        for (size_t b = 0; b < rows; b++) model_set_row(m, b, d, d->val[begin + b]);
        model_forward(m);
        loss += cross_entropy(m, rows, NULL, 1);
    }
    return loss / (double)d->vals;
}

/* Generates text, token by token, after the first CONTEXT bytes of the data. */
static void model_sample(Model *m, const Data *d, unsigned char *text) {
    const float temperature = 0.8f;
    uint64_t random = SEED;
    float probability[VOCAB];
    model_set_row(m, 0, d, CONTEXT);
    for (size_t i = 0; i < SAMPLE; i++) {
        model_forward(m);
        for (size_t v = 0; v < VOCAB; v++) m->logits.value[v] /= temperature;
        softmax(probability, m->logits.value);
        float left = random_uniform(&random);
        size_t token = 0;
        while (token < VOCAB - 1 && (left -= probability[token]) >= 0.0f) token++;
        text[i] = (unsigned char)token;
        memmove(m->context[0], m->context[0] + 1, CONTEXT - 1);
        m->context[0][CONTEXT - 1] = (unsigned char)token;
    }
}

/* ---- Training --------------------------------------------------------------------------------------------------- */

/* One line that is overwritten on a terminal; plain lines, one for each tenth of the run, elsewhere. */
static void show_progress(const Setup *setup, int arm, int step, double loss, double start) {
    int done = arm * STEPS + step, all = setup->arms * STEPS, terminal = isatty(STDERR_FILENO);
    if (terminal ? step % 50 != 0 : done % (all / 10) != 0) return;
    double elapsed = wall_clock() - start;
    fprintf(stderr, "%s%-10s  step %5d of %d  %3d %%  loss %.3f  %6.0f tokens/s  %3.0f s left%s", terminal ? "\r" : "",
            setup->arm[arm].name, step, STEPS, 100 * done / all, loss, done * BATCH / elapsed,
            elapsed * (all - done) / done, terminal ? "\033[K" : "\n");
    if (terminal && done == all) fputs("\r\033[K", stderr);
}

/* An fp32 step beside a step, from the same full weights, moments and gradients, says which update is intended. The
   share of it that arrives is the projection of what happens to the weights which the model reads. */
typedef struct {
    kopt_tensor tensor[PARAMETERS];
    float *full, *intended, *moment, *before; /* of all tensors; moment: of one at a time */
    double arrived, length;
} Shadow;

static void shadow_make(Shadow *s, const Model *m, size_t parameters) {
    float *at = s->intended = allocate(parameters * sizeof *at);
    s->full = allocate(parameters * sizeof *at);
    s->moment = allocate(parameters * sizeof *at);
    s->before = allocate(parameters * sizeof *at);
    s->arrived = s->length = 0;
    for (int p = 0; p < PARAMETERS; at += parameter_size(p++)) {
        const size_t n = parameter_size(p);
        s->tensor[p] = kopt_tensor_of(at, KOPT_F32, m->grad[p].stored, m->grad[p].format, n, NULL, 0);
        s->tensor[p].state_size = KOPT_STATE_BYTES(n, 8); /* two fp32 moments */
        s->tensor[p].state = allocate(s->tensor[p].state_size);
    }
    check(kopt_list_set_ids(s->tensor, PARAMETERS, 0));
}

static void shadow_free(Shadow *s) {
    for (int p = 0; p < PARAMETERS; p++) free(s->tensor[p].state);
    free(s->full), free(s->intended), free(s->moment), free(s->before);
}

/* Before the step. */
static void shadow_step(Shadow *s, const kopt_optimizer *opt, const kopt_tensor *tensors, const Model *m,
                        double loss_scale) {
    kopt_optimizer fp32 = *opt;
    float *full = s->full, *before = s->before;
    fp32.first_moment_format = fp32.second_moment_format = KOPT_F32;
    fp32.grad_scale /= loss_scale;
    for (int p = 0; p < PARAMETERS; full += tensors[p].n, before += tensors[p++].n) {
        check(kopt_state_read(opt, &tensors[p], KOPT_SLOT_WEIGHT, full));
        memcpy(before, m->weight[p].value, tensors[p].n * sizeof *before);
    }
    check(kopt_state_init(&fp32, s->tensor, PARAMETERS, s->full));
    for (int p = 0; p < PARAMETERS; p++)
        for (int slot = KOPT_SLOT_FIRST_MOMENT; slot <= KOPT_SLOT_SECOND_MOMENT; slot++) {
            check(kopt_state_read(opt, &tensors[p], (kopt_slot)slot, s->moment));
            check(kopt_state_write(&fp32, &s->tensor[p], (kopt_slot)slot, s->moment));
        }
    check(kopt_optimizer_step(&fp32, s->tensor, PARAMETERS));
}

/* After it. */
static void shadow_compare(Shadow *s, const Model *m) {
    size_t k = 0;
    for (int p = 0; p < PARAMETERS; p++)
        for (size_t i = 0; i < m->weight[p].n; i++, k++) {
            const double wanted = (double)s->intended[k] - (double)s->full[k];
            s->arrived += wanted * ((double)m->weight[p].value[i] - (double)s->before[k]);
            s->length += wanted * wanted;
        }
}

/* Trains one arm. This is where the optimizer is used. */
static void train(Result *result, int index, const Setup *setup, const Data *d, double start) {
    const Arm *arm = &setup->arm[index];
    const kopt_format format = arm->format, kept = arm->master ? KOPT_F32 : format;
    double arm_start = wall_clock();

    kopt_optimizer opt = kopt_adamw(setup->learning_rate);
    const int atan2_arm = setup->atan2 != 0 && index == setup->atan2;
    const double learning_rate = setup->learning_rate * (atan2_arm ? 0.87 : 1);
    if (atan2_arm) opt.rule = KOPT_RULE_ADAM_ATAN2; /* betas and decay stay */
    opt.first_moment_format = opt.second_moment_format = kept;
    opt.rounding = arm->rounding;
    opt.moment_rounding = arm->moment_rounding;
    opt.seed = SEED;

    Model m;
    model_make(&m, format);
    kopt_tensor tensors[PARAMETERS];
    uint64_t random = SEED;
    size_t bytes = 0;
    for (int p = 0; p < PARAMETERS; p++) {
        kopt_tensor *t = &tensors[p];
        *t = kopt_tensor_of(m.weight[p].stored, kept, m.grad[p].stored, format, parameter_size(p), NULL, 0);
        if (arm->master) { /* the step changes the fp32 weights and refreshes the copy that the model sees */
            t->weight = allocate(t->n * sizeof(float));
            t->copy = m.weight[p].stored;
            t->copy_format = format;
            bytes += t->n * sizeof(float);
        }
        t->state_size = kopt_state_size(&opt, t);
        t->state = allocate(t->state_size);
        bytes += 2 * t->n * format_bytes(format) + t->state_size;
    }
    const size_t parameters = kopt_list_length(tensors, PARAMETERS);
    float *initial = allocate(parameters * sizeof *initial), *next = initial; /* one row for all tensors */
    for (int p = 0; p < PARAMETERS; next += parameter_size(p++)) parameter_init(next, p, &random);
    check(kopt_list_set_ids(tensors, PARAMETERS, 0));
    check(kopt_state_init(&opt, tensors, PARAMETERS, initial));
    for (int p = 0; p < PARAMETERS; p++) tensor_load(&m.weight[p]);
    free(initial);
    Shadow shadow;
    shadow_make(&shadow, &m, parameters);

    kopt_scaler scaler = kopt_scaler_of(); /* of the loss, for fp16 */
    scaler.interval = SCALE_GROWS;
    double sum = 0.0, final_sum = 0.0;
    for (int step = 1; step <= STEPS; step++) {
        for (size_t b = 0; b < BATCH; b++) model_set_row(&m, b, d, data_sample(d, &random));
        model_forward(&m);
        double loss = cross_entropy(&m, BATCH, &m.dlogits, format == KOPT_FP16 ? (float)scaler.scale : 1) / BATCH;
        model_backward(&m);

        opt.lr = kopt_cosine_lr((uint32_t)step - 1, 0, STEPS + 1, learning_rate, 0);
        int skipped = 0;
        const int place = step % LOG_EVERY - LOG_EVERY / 2, shadowed = place >= 0 && place < SHADOWED;
        if (shadowed) shadow_step(&shadow, &opt, tensors, &m, format == KOPT_FP16 ? scaler.scale : 1);
        if (format == KOPT_FP16)
            check(kopt_scaler_step(&scaler, &opt, tensors, PARAMETERS, 0, NULL, &skipped));
        else
            check(kopt_optimizer_step(&opt, tensors, PARAMETERS));
        for (int p = 0; p < PARAMETERS; p++) tensor_load(&m.weight[p]);
        if (shadowed && !skipped) shadow_compare(&shadow, &m);
        result->skipped += skipped;

        sum += loss;
        if (step > STEPS - STEPS / 10) final_sum += loss;
        if (step % LOG_EVERY == 0) {
            result->train_loss[step / LOG_EVERY - 1] = sum / LOG_EVERY;
            result->val_loss[step / LOG_EVERY - 1] = model_validate(&m, d);
            result->arrived[step / LOG_EVERY - 1] = shadow.arrived / shadow.length;
            sum = shadow.arrived = shadow.length = 0.0;
        }
        show_progress(setup, index, step, loss, start);
    }
    result->final_train = final_sum / (STEPS / 10);
    result->final_val = result->val_loss[LOGS - 1];
    model_sample(&m, d, result->sample);
    result->bytes_per_parameter = (double)bytes / (double)parameters;
    result->seconds = wall_clock() - arm_start;

    for (int p = 0; p < PARAMETERS; p++) {
        if (arm->master) free(tensors[p].weight);
        free(tensors[p].state);
    }
    shadow_free(&shadow);
    model_free(&m);
}

/* ---- Results ---------------------------------------------------------------------------------------------------- */

static void print_table(const Result *results, const Setup *setup) {
    int skipped = 0;
    puts("\narm          final training loss   validation loss   minus fp32   bytes per parameter   seconds");
    for (int arm = 0; arm < setup->arms; arm++) {
        const Result *r = &results[arm];
        printf("%-10s   %19.4f   %15.4f   %+10.4f   %19.1f   %7.1f\n", setup->arm[arm].name, r->final_train,
               r->final_val, r->final_val - results[FP32].final_val, r->bytes_per_parameter, r->seconds);
        skipped += r->skipped;
    }
    if (skipped) {
        printf("steps skipped because a gradient overflowed fp16:");
        for (int arm = 0; arm < setup->arms; arm++)
            if (setup->arm[arm].format == KOPT_FP16) printf(" %s %d", setup->arm[arm].name, results[arm].skipped);
        putchar('\n');
    }
}

/* The losses the plots show: from the lowest to where the slowest arm is after a tenth of the run. */
static void plot_range(const Result *results, int arms, double *low, double *high) {
    *low = *high = results[FP32].val_loss[LOGS - 1];
    for (int arm = 0; arm < arms; arm++) {
        *high = fmax(*high, results[arm].val_loss[LOGS / 10 - 1]);
        for (int i = 0; i < LOGS; i++) *low = fmin(*low, results[arm].val_loss[i]);
    }
    double margin = 0.04 * (*high - *low) + 1e-3;
    *low -= margin;
    *high += margin;
}

/* Four dots down and two across in each character, as Unicode braille. */
static void plot_terminal(const Result *results, const Setup *setup) {
    enum { COLUMNS = 70, ROWS = 18, WIDTH = 2 * COLUMNS, HEIGHT = 4 * ROWS };
    static const unsigned char dot_bit[4][2] = {{0x01, 0x08}, {0x02, 0x10}, {0x04, 0x20}, {0x40, 0x80}};
    unsigned char dots[ROWS][COLUMNS] = {{0}}, owner[ROWS][COLUMNS] = {{0}};
    int end_row[MAX_ARMS], colours = isatty(STDOUT_FILENO);
    double low, high;
    plot_range(results, setup->arms, &low, &high);

    for (int arm = 0; arm < setup->arms; arm++) {
        int last = -1;
        const double *loss = results[arm].val_loss;
        for (int x = 0; x < WIDTH; x++) {
            double at = (double)x * (LOGS - 1) / (WIDTH - 1);
            int left = (int)at < LOGS - 1 ? (int)at : LOGS - 2;
            double value = loss[left] + (at - left) * (loss[left + 1] - loss[left]);
            if (!(value < high)) continue;
            int y = (int)((high - value) / (high - low) * HEIGHT);
            int from = last < 0 ? y : last < y ? last + 1 : y, to = last > y ? last - 1 : y;
            for (int dot = from; dot <= to; dot++) {
                dots[dot / 4][x / 2] |= dot_bit[dot % 4][x % 2];
                owner[dot / 4][x / 2] = (unsigned char)arm;
            }
            last = y;
        }
        end_row[arm] = last < 0 ? 0 : last / 4;
    }

    puts("\nvalidation loss, nats per byte");
    for (int row = 0; row < ROWS; row++) {
        if (row % 4 == 0)
            printf("%7.3f ", high - (row + 0.5) / ROWS * (high - low));
        else
            printf("        ");
        fputs("\xE2\x94\x82", stdout); /* U+2502, a vertical line */
        for (int column = 0; column < COLUMNS; column++) {
            int bits = dots[row][column];
            if (colours && bits) fputs(setup->arm[owner[row][column]].terminal, stdout);
            if (bits)
                printf("\xE2%c%c", 0xA0 | bits >> 6, 0x80 | (bits & 0x3F)); /* U+2800 + bits */
            else
                putchar(' ');
            if (colours && bits) fputs("\033[0m", stdout);
        }
        for (int arm = 0; arm < setup->arms; arm++)
            if (end_row[arm] == row)
                printf(" %s%s%s", colours ? setup->arm[arm].terminal : "", setup->arm[arm].name,
                       colours ? "\033[0m" : "");
        putchar('\n');
    }
    printf("%8s\xE2\x94\x94", "");
    for (int column = 0; column < COLUMNS; column++) fputs("\xE2\x94\x80", stdout);
    printf("\n%9s%-*d%d steps\n", "", COLUMNS - 5, LOG_EVERY, STEPS);
}

/* Opens an output file before the training, so that no run is lost because it cannot be written. */
static FILE *open_output(const char *path) {
    mkdir("build", 0777); /* if it cannot be made, nor can the file */
    mkdir("build/demo", 0777);
    FILE *file = fopen(path, "w");
    if (!file) fail("cannot write %s: %s", path, strerror(errno));
    return file;
}

static void close_output(FILE *file, const char *path) {
    int failed = ferror(file);
    if (fclose(file) != 0 || failed) fail("cannot write %s", path);
}

static void write_csv(FILE *file, const Result *results, const Setup *setup) {
    fputs("arm,step,train_loss,val_loss,arrived\n", file);
    for (int arm = 0; arm < setup->arms; arm++)
        for (int i = 0; i < LOGS; i++)
            fprintf(file, "%s,%d,%.6f,%.6f,%.3f\n", setup->arm[arm].name, (i + 1) * LOG_EVERY,
                    results[arm].train_loss[i], results[arm].val_loss[i], results[arm].arrived[i]);
}

/* The losses, or what arrives of the updates. Curves that lie on one another are drawn from wide to narrow, so that all
   of them can be seen. */
static void write_svg(FILE *file, const Result *results, const Setup *setup, int arrived) {
    const double left = 70, right = 700, top = 80, bottom = 410;
    double low = -0.1, high = 1.3, tick = 0.01;
    if (!arrived) plot_range(results, setup->arms, &low, &high);
    const double scale = (bottom - top) / (high - low);
    for (int i = 0; (high - low) / tick > 8; i++) tick *= i % 3 == 1 ? 2.5 : 2.0; /* 0.01, 0.02, 0.05, 0.1 ... */

    fputs("<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 860 470\" width=\"860\" height=\"470\"\n"
          "     font-family=\"Helvetica, Arial, sans-serif\" font-size=\"14\" fill=\"#24292f\">\n"
          "<rect width=\"860\" height=\"470\" fill=\"#ffffff\"/>\n"
          "<clipPath id=\"plot\"><rect x=\"70\" y=\"80\" width=\"640\" height=\"330\"/></clipPath>\n",
          file);
    fprintf(file, "<text x=\"%g\" y=\"34\" font-size=\"19\" font-weight=\"bold\">Training in %s, %s</text>\n", left,
            setup->name, setup->title);
    fprintf(file, "<text x=\"%g\" y=\"58\" fill=\"#57606a\">%s</text>\n", left,
            arrived ? "Share of an update that arrives in the weights which the model reads"
                    : "Validation loss, nats per byte. Beside the names: bytes per parameter with gradient and AdamW "
                      "state");

    fprintf(file, "<path d=\"M%g %gV%gH%g\" fill=\"none\" stroke=\"#57606a\"/>\n", left, top, bottom, right);
    fprintf(file, "<text x=\"%g\" y=\"%g\" text-anchor=\"middle\">training step</text>\n", (left + right) / 2,
            bottom + 46);
    for (double value = ceil(low / tick) * tick; value <= high; value += tick) {
        double y = bottom - (value - low) * scale;
        fprintf(file, "<path d=\"M%g %.1fH%g\" stroke=\"#e4e7eb\"/>", left + 1, y, right);
        fprintf(file, "<text x=\"%g\" y=\"%.1f\" text-anchor=\"end\">%.2f</text>\n", left - 10, y + 5,
                value + 0.0); /* no -0 */
    }
    for (int i = 0; i <= 4; i++) {
        double x = left + (right - left) * i / 4;
        fprintf(file, "<path d=\"M%g %gv6\" stroke=\"#57606a\"/>", x, bottom);
        fprintf(file, "<text x=\"%g\" y=\"%g\" text-anchor=\"middle\">%d</text>\n", x, bottom + 24, STEPS * i / 4);
    }

    /* Each label is at the end of its curve, or above the one before where that leaves no room. */
    double end[MAX_ARMS], label[MAX_ARMS], before = bottom + 20;
    for (int i = 0; i < setup->arms; i++) {
        const int arm = setup->drawn[arrived ? setup->arms - 1 - i : i]; /* nearest is below, or above */
        const double *value = arrived ? results[arm].arrived : results[arm].val_loss;
        end[arm] = bottom - (fmin(value[LOGS - 1], high) - low) * scale;
        before = label[arm] = fmin(end[arm], before - 20);
    }
    for (int i = 0; i < setup->arms; i++) {
        const Result *r = &results[setup->drawn[i]];
        const double *value = arrived ? r->arrived : r->val_loss, middle = arrived ? 0.5 : 1;
        const Arm *arm = &setup->arm[setup->drawn[i]];
        fprintf(file,
                "<polyline clip-path=\"url(#plot)\" fill=\"none\" stroke=\"%s\" stroke-width=\"%g\" "
                "stroke-dasharray=\"%s\" points=\"",
                arm->colour, arm->width, arm->dash);
        for (int point = 0; point < LOGS; point++)
            if (isfinite(value[point]))
                fprintf(file, "%.1f,%.1f ", left + (right - left) * (point + middle) / LOGS,
                        bottom - (value[point] - low) * scale);
        fprintf(file, "\"/>\n<path d=\"M%g %.1fL%g %.1f\" stroke=\"%s\" stroke-width=\"1.5\"/>", right + 2,
                end[setup->drawn[i]], right + 16, label[setup->drawn[i]], arm->colour);
        fprintf(file, "<text x=\"%g\" y=\"%.1f\">%s, %.0f bytes</text>\n", right + 21, label[setup->drawn[i]] + 5,
                arm->name, r->bytes_per_parameter);
    }
    fputs("</svg>\n", file);
}

/* What is not printable is escaped. */
static void print_sample(const Result *r, const char *name) {
    printf("\nText generated by the %s arm:\n\n    ", name);
    for (int i = 0; i < SAMPLE; i++) {
        unsigned char byte = r->sample[i];
        if (byte == '\n')
            fputs("\n    ", stdout);
        else if (byte == '\t')
            fputs("    ", stdout);
        else if (byte >= ' ' && byte <= '~')
            putchar(byte);
        else
            printf("\\x%02X", byte);
    }
    puts("\n");
}

/* Says whether the run shows what it should and returns the exit status. A loss that is not a number is not close. */
static int verdict_roundings(const Result *results, const Setup *setup) {
    double kahan = results[KAHAN].final_val - results[FP32].final_val;
    double exact = results[EXACT].final_val - results[FP32].final_val;
    double nearest = results[NEAREST].final_val - results[FP32].final_val;
    int close = fabs(kahan) <= setup->close && fabs(exact) <= setup->close, apart = !(nearest < setup->apart);
    printf("%s: next to fp32, kahan ends %+.4f and exact %+.4f nats per byte (%s %.2f), nearest %+.4f (%s %.2f).\n",
           close && apart ? "PASS" : "FAIL", kahan, exact, close ? "both within" : "NOT both within", setup->close,
           nearest, apart ? "worse by at least" : "NOT worse by", setup->apart);
    return close && apart ? 0 : 1;
}

/* The same for --precision: all must be close to fp32. */
static int verdict_precisions(const Result *results, const Setup *setup) {
    int close = isfinite(results[FP32].final_val);
    for (int arm = 1; arm < setup->arms; arm++)
        close &= fabs(results[arm].final_val - results[FP32].final_val) <= setup->close;
    printf("%s: fp32 ends at %.4f nats per byte", close ? "PASS" : "FAIL", results[FP32].final_val);
    for (int arm = 1; arm < setup->arms; arm++)
        printf("%s %s %+.4f", arm == 1 ? ", and next to it" : ",", setup->arm[arm].name,
               results[arm].final_val - results[FP32].final_val);
    if (setup->arms > 1) printf(" (%s %.2f)", close ? "within" : "NOT all within", setup->close);
    puts(".");
    return close ? 0 : 1;
}

/* 0 if there is no precision of that name. */
static int want_precision(int *wanted, const char *name) {
    int known = 0;
    for (int p = 0; p < MAX_ARMS; p++)
        if (strcmp(name, "all") == 0 || strcmp(name, precisions[p].name) == 0) known = wanted[p] = 1;
    return known;
}

int main(int argc, char **argv) {
    static const char usage[] =
        "usage: demo [--fp16 | --precision fp32|amp_bf16|amp_fp16|bf16|fp16|all | --rule adam_atan2] [FILE]\n";
    const char *path = NULL;
    int fp16 = 0, wanted[MAX_ARMS] = {0}, by_precision = 0, atan2_rule = 0;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--help") == 0) {
            printf("%sTrains a small language model on the bytes of FILE (default: kahan_opt.h), in fp32 and in pure\n"
                   "bf16 (--fp16: pure fp16) with four roundings of the weights, or in fp32 and the named precisions\n"
                   "(one option for each, or all), or by Adam-atan2 (--rule), compares the losses, and writes "
                   "build/demo/loss.csv and\n"
                   "build/demo/loss.svg.\n",
                   usage);
            return 0;
        }
        if (strcmp(argv[i], "--fp16") == 0 && !by_precision && !atan2_rule)
            fp16 = 1;
        else if (strcmp(argv[i], "--precision") == 0 && i + 1 < argc && !fp16 && !atan2_rule &&
                 want_precision(wanted, argv[i + 1])) {
            by_precision = 1;
            i++;
        } else if (strcmp(argv[i], "--rule") == 0 && i + 1 < argc && !fp16 && !by_precision &&
                   strcmp(argv[i + 1], "adam_atan2") == 0) {
            atan2_rule = 1;
            i++;
        } else if (argv[i][0] != '-' && !path)
            path = argv[i];
        else {
            fputs(usage, stderr);
            return 2;
        }
    }
    if (!path) path = "kahan_opt.h";
    const Setup setup = atan2_rule ? setup_atan2() : by_precision ? setup_precisions(wanted) : setup_roundings(fp16);

    static const char csv_path[] = "build/demo/loss.csv", svg_path[] = "build/demo/loss.svg";
    static const char arrived_path[] = "build/demo/arrived.svg";
    Data data = data_load(path);
    FILE *csv = open_output(csv_path), *svg = open_output(svg_path), *arrived = open_output(arrived_path);

    size_t parameters = 0;
    for (int p = 0; p < PARAMETERS; p++) parameters += parameter_size(p);
    printf("%s: %zu bytes%s, %zu of them held out; %zu parameters; fp32 against %s; instruction set %s\n", path, data.n,
           data.truncated ? " (the first 8 MB of it)" : "", data.vals, parameters, setup.name,
           kopt_isa_name(kopt_isa_current()));
    fflush(stdout);

    static Result results[MAX_ARMS];
    double start = wall_clock();
    for (int arm = 0; arm < setup.arms; arm++) train(&results[arm], arm, &setup, &data, start);
    free(data.bytes);
    free(data.val);

    write_csv(csv, results, &setup);
    write_svg(svg, results, &setup, 0);
    write_svg(arrived, results, &setup, 1);
    close_output(csv, csv_path);
    close_output(svg, svg_path);
    close_output(arrived, arrived_path);
    print_table(results, &setup);
    plot_terminal(results, &setup);
    printf("\nThe curves are in %s and %s, what arrives of the updates in %s.\n", csv_path, svg_path, arrived_path);
    print_sample(&results[setup.sampled], setup.arm[setup.sampled].name);
    return by_precision || atan2_rule ? verdict_precisions(results, &setup) : verdict_roundings(results, &setup);
}
