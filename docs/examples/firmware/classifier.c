/* classifier.c - trains a small net on the board itself: gestures from the windows of an accelerometer. Weights,
   gradients and optimizer state are bf16 numbers in static memory. No libc, no libm, no malloc.

       cc -std=c99 -O2 -ffp-contract=off -o classifier classifier.c board_host.c && ./classifier

   `sh run.sh` builds and runs it here and on the boards that are emulated: all print the same lines. docs/firmware.md
   explains it. Macros (-D) choose the way to train, and the rest:

       (none)        AdamW: each layer is stepped as soon as its gradient exists, so one buffer serves all layers
       BY_WEIGHT     SGD: each weight is updated as soon as its gradient exists, so there is no buffer
       STOCHASTIC    with BY_WEIGHT: no residual, so that a weight takes 2 bytes instead of 4; noisier
       SAVE_EVERY=n  saves all to flash every n steps and resumes from there (with flash.c; on a PC and Cortex-M)
       EPOCHS=n      how often it sees each window: 4 if not set

   The same bits on every machine: the sums and products below are + - * of floats in the order in which they are
   written, without libm, and -ffp-contract=off keeps the compiler from fusing two of them. Do not use -ffast-math.
   kahan_opt.h itself needs no flag. */
#include "board.h"

#include "../../../kahan_opt.h"
#if defined STOCHASTIC && !defined BY_WEIGHT
#error "STOCHASTIC goes with BY_WEIGHT"
#endif
#ifdef SAVE_EVERY
#include "flash.h"
#endif

#ifndef EPOCHS
#define EPOCHS 4
#endif
enum { SAMPLES = 12, AXES = 3, INPUTS = SAMPLES * AXES, HIDDEN = 8, CLASSES = 4 };
enum { N1 = (INPUTS + 1) * HIDDEN, N2 = (HIDDEN + 1) * CLASSES }; /* weights of a layer; + 1: the bias of a row */
enum { WINDOWS = 150, TESTS = 100, STEPS = EPOCHS * WINDOWS };

/* ---- Memory ------------------------------------------------------------------------------------------------------ */

#if !defined BY_WEIGHT
#define STATE 3 /* numbers beside each weight: residual (what the weight cannot hold) and two moments */
#elif !defined STOCHASTIC
#define STATE 1 /* the residual */
#endif

/* All that the training has to remember, in one struct: this is what a checkpoint saves. */
static struct {
    uint32_t step;   /* steps done; the next window follows from it */
    uint32_t random; /* BY_WEIGHT: the generator of the rounding */
    kopt_bf16 weight1[N1], weight2[N2];
#ifdef STATE
    kopt_bf16 state1[STATE * N1], state2[STATE * N2];
#endif
} run;

/* What lives for one window only. */
static float window[INPUTS], hidden[HIDDEN], output[CLASSES];
static float d_hidden[HIDDEN], d_output[CLASSES]; /* derivatives of the loss */

/* ---- Sensor: replace this by yours ------------------------------------------------------------------------------- */

static uint32_t draw(uint32_t *generator) {
    *generator = *generator * 1664525u + 1013904223u;
    return *generator >> 16;
}

static int32_t wave(uint32_t t) { /* a triangle: period 64, -256 to 256 */
    t &= 63;
    return t < 32 ? (int32_t)t * 16 - 256 : 768 - (int32_t)t * 16;
}

/* Fills window[] with the accelerations of gesture number `index`, in units of g; a motion begins with the window.
   Returns its class: 0 at rest, 1 shaken along x, 2 turned in a circle of x and y, 3 tapped along z. */
static int sense(uint32_t index) {
    uint32_t generator = index * 2654435761u + 1;
    const int gesture = (int)(draw(&generator) % CLASSES);
    const uint32_t speed = 8 + draw(&generator) % 6, phase = draw(&generator) % 16, tap = draw(&generator) % 4;
    const int32_t force = 3 + (int32_t)(draw(&generator) % 3);
    uint32_t t;
    int axis;
    for (t = 0; t < SAMPLES; ++t) {
        int32_t a[AXES] = {0, 0, 1024}; /* units of 1/1024 g */
        if (gesture == 1 || gesture == 2) a[0] += force * wave(speed * t + phase);
        if (gesture == 2) a[1] += force * wave(speed * t + phase + 16);
        if (gesture == 3 && t >= tap && t < tap + 3) a[2] += force * 512 >> (t - tap);
        for (axis = 0; axis < AXES; ++axis) {
            a[axis] += (int32_t)(draw(&generator) % 512) - 256; /* noise */
            window[t * AXES + (uint32_t)axis] = (float)a[axis] * (1.0f / 1024);
        }
    }
    return gesture;
}

/* ---- Net: INPUTS, HIDDEN units (ReLU), CLASSES ------------------------------------------------------------------- */

static void layer(const kopt_bf16 *w, const float *in, int inputs, float *out, int outputs) {
    int i, o;
    for (o = 0; o < outputs; ++o, w += inputs + 1) {
        float sum = kopt_f32_from_bf16(w[inputs]);
        for (i = 0; i < inputs; ++i) sum += kopt_f32_from_bf16(w[i]) * in[i];
        out[o] = sum;
    }
}

static void forward(void) {
    int i;
    layer(run.weight1, window, INPUTS, hidden, HIDDEN);
    for (i = 0; i < HIDDEN; ++i)
        if (hidden[i] < 0) hidden[i] = 0;
    layer(run.weight2, hidden, HIDDEN, output, CLASSES);
}

/* The squared hinge loss wants output[label] to be at least 1 and the others at most -1. It needs no exp(). */
static float loss(int label) {
    float sum = 0;
    int o;
    for (o = 0; o < CLASSES; ++o) {
        const float sign = o == label ? 1.0f : -1.0f, missing = 1 - sign * output[o];
        d_output[o] = missing > 0 ? -2 * sign * missing : 0;
        if (missing > 0) sum += missing * missing;
    }
    return sum;
}

static void backward(void) { /* d_hidden from d_output */
    int h, o;
    for (h = 0; h < HIDDEN; ++h) {
        float sum = 0;
        for (o = 0; o < CLASSES; ++o) sum += kopt_f32_from_bf16(run.weight2[o * (HIDDEN + 1) + h]) * d_output[o];
        d_hidden[h] = hidden[h] > 0 ? sum : 0;
    }
}

/* ---- Training ---------------------------------------------------------------------------------------------------- */

#ifdef BY_WEIGHT /* no gradient buffer */

/* Updates a layer's weights. d: derivatives of the loss with respect to the layer's outputs. */
static void update(kopt_bf16 *w, kopt_bf16 *state, const float *in, int inputs, const float *d, int outputs) {
    int i, o;
    for (o = 0; o < outputs; ++o)
        for (i = 0; i <= inputs; ++i, ++w) {
            const float delta = -0.02f * d[o] * (i < inputs ? in[i] : 1);
#ifdef STOCHASTIC
            *w = kopt_bf16_from_f32_stochastic(kopt_f32_from_bf16(*w) + delta, draw(&run.random));
#else
            kopt_kahan_add_bf16(w, state++, delta, draw(&run.random));
#endif
        }
    (void)state;
}

#else /* a gradient buffer for one layer */

static void update(kopt_bf16 *w, kopt_bf16 *state, const float *in, int inputs, const float *d, int outputs) {
    static kopt_bf16 grad[N1];                                                            /* the larger layer */
    kopt_inline_optimizer opt = kopt_inline_optimizer_of(4e-3f, 0.01f, w == run.weight2); /* each its own id */
    kopt_bf16 *g = grad;
    int i, o;
    for (o = 0; o < outputs; ++o) {
        for (i = 0; i < inputs; ++i) *g++ = kopt_bf16_from_f32(d[o] * in[i]);
        *g++ = kopt_bf16_from_f32(d[o]);
    }
    opt.step = run.step;
    kopt_inline_adamw(&opt, w, state, grad, (size_t)(g - grad));
}

#endif

static void train(void) {
#ifdef STATE
    kopt_bf16 *const state1 = run.state1, *const state2 = run.state2;
#else
    kopt_bf16 *const state1 = NULL, *const state2 = NULL;
#endif
    backward(); /* before layer 2 changes */
    update(run.weight2, state2, hidden, HIDDEN, d_output, CLASSES);
    update(run.weight1, state1, window, INPUTS, d_hidden, HIDDEN);
}

/* ---- Output ------------------------------------------------------------------------------------------------------ */

static void print_number(const char *before, uint32_t x, uint32_t base) {
    char digits[12], *p = digits + sizeof digits;
    *--p = 0;
    do *--p = "0123456789abcdef"[x % base];
    while ((x /= base) != 0);
    board_print(before);
    board_print(p);
}

static uint32_t hash(const void *data, size_t size) { /* CRC-32 */
    const unsigned char *p = (const unsigned char *)data;
    uint32_t crc = 0xFFFFFFFFu;
    int bit;
    for (; size > 0; --size)
        for (crc ^= *p++, bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? 0xEDB88320u : 0);
    return ~crc;
}

/* Mean loss and hits on windows that the training never sees. */
static void test(void) {
    uint32_t t, thousandths, hits = 0;
    float sum = 0;
    int o, best;
    for (t = 0; t < TESTS; ++t) {
        const int label = sense(WINDOWS + t);
        forward();
        sum += loss(label);
        for (best = 0, o = 1; o < CLASSES; ++o)
            if (output[o] > output[best]) best = o;
        hits += best == label;
    }
    thousandths = sum < 4e8f ? (uint32_t)(sum * (1000.0f / (float)TESTS)) : 0xFFFFFFFFu; /* also of a NaN */
    print_number("step ", run.step, 10);
    print_number(": loss ", thousandths / 1000, 10);
    print_number(".", thousandths / 100 % 10, 10), print_number("", thousandths / 10 % 10, 10);
    print_number("", thousandths % 10, 10);
    print_number(", right ", hits, 10);
    print_number(" of ", TESTS, 10);
    print_number(", weights and state ", hash(&run, sizeof run), 16);
    board_print("\n");
}

/* ---- Program ----------------------------------------------------------------------------------------------------- */

static void initial_weights(kopt_bf16 *w, size_t n, float scale) {
    uint32_t generator = (uint32_t)n;
    for (; n > 0; --n) *w++ = kopt_bf16_from_f32(((float)draw(&generator) - 32768) * scale);
}

int main(void) {
    uint32_t before, first, counted = 0; /* of the steps since the step `first`, where the last epoch began */
    int label;
    initial_weights(run.weight1, N1, 0.25f / 32768);
    initial_weights(run.weight2, N2, 0.5f / 32768);
    run.random = 1;
#ifdef SAVE_EVERY
    if (flash_load(&run, sizeof run)) print_number("resumed: step ", run.step, 10), board_print("\n");
#endif
    first = run.step;
    while (run.step < STEPS) {
        if (run.step % WINDOWS == 0) test(), first = run.step, counted = 0;
        label = sense(run.step % WINDOWS);
        before = board_count();
        forward();
        loss(label);
        train();
        ++run.step;
        counted += (board_count() - before + BOARD_WRAP) % BOARD_WRAP;
#ifdef SAVE_EVERY
        if (run.step % SAVE_EVERY == 0) {
            if (!flash_save(&run, sizeof run)) board_print("flash_save failed\n"), board_end(1);
            print_number("saved: step ", run.step, 10), board_print("\n");
        }
#endif
    }
    test();
    if (board_stack() != 0 && run.step != first) { /* lines of one board only begin with # */
        print_number("# stack ", (uint32_t)board_stack(), 10);
        print_number(" bytes, " BOARD_COUNTS " of a step ", counted / (run.step - first), 10);
        board_print("\n");
    }
    board_end(0);
    return 0;
}
