/* AdamW, and Lion, as other projects make them, written anew from their papers and sources: none is run as its
   package. Arrays of floats have what the codes of a project mean, after each step. Gradients are fp32, steps are
   computed in fp32 and stored as the project does; Collage computes in bf16, PyTorch in fp16, where an eps of 1e-8 is
   0. Moments and weights are rounded to nearest, but for torchao's weights. 8-bit moments are so at any size, though
   torchao and bitsandbytes begin at 4,096 elements. */
#ifndef BYTES_PEERS_H
#define BYTES_PEERS_H
#include "companded.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

enum { PEER_ROOM = 4096 };

typedef enum moment_store {
    FP32_MOMENT,
    BF16_MOMENT,
    FP16_MOMENT,
    PAIR_MOMENT,
    DYNAMIC_MOMENT,
    COMPANDED_MOMENT
} moment_store;
typedef enum weight_store {
    MASTER_WEIGHT,
    KAHAN_WEIGHT,
    KAHAN_FP16_WEIGHT,
    FP16_WEIGHT,
    PAIR_WEIGHT,
    STOCHASTIC_WEIGHT,
    CORRECTED_WEIGHT
} weight_store;

typedef struct peer {
    const char *name, *bytes; /* with a gradient in bf16 */
    weight_store weight;
    moment_store first, second;
    int debiased; /* moments are stored after the correction of their bias */
    int has_lion;
    double eps;
} peer;
static const peer peers[] = {
    {"Collage-plus", "12", PAIR_WEIGHT, BF16_MOMENT, PAIR_MOMENT, 0, 0, 1e-8},
    {"bitsandbytes, fp32 weights and a bf16 copy", "10.03", MASTER_WEIGHT, DYNAMIC_MOMENT, DYNAMIC_MOMENT, 0, 1, 1e-8},
    {"Collage-light", "10", PAIR_WEIGHT, BF16_MOMENT, BF16_MOMENT, 0, 0, 1e-8},
    {"optimi, Kahan", "10", KAHAN_WEIGHT, BF16_MOMENT, BF16_MOMENT, 1, 1, 1e-8},
    {"optimi, Kahan, fp16, eps 1e-6", "10", KAHAN_FP16_WEIGHT, FP16_MOMENT, FP16_MOMENT, 1, 0, 1e-6},
    {"torchao, stochastic", "8", STOCHASTIC_WEIGHT, BF16_MOMENT, BF16_MOMENT, 0, 0, 1e-8},
    {"PyTorch, fp16, eps 1e-6", "8", FP16_WEIGHT, FP16_MOMENT, FP16_MOMENT, 0, 0, 1e-6},
    {"FlashOptim", "7.13", CORRECTED_WEIGHT, COMPANDED_MOMENT, COMPANDED_MOMENT, 0, 1, 1e-8},
    {"torchao, stochastic, 8-bit moments", "6.03", STOCHASTIC_WEIGHT, DYNAMIC_MOMENT, DYNAMIC_MOMENT, 0, 0, 1e-8}};
enum { PEERS = sizeof peers / sizeof *peers };

typedef struct peer_state {
    float weight[PEER_ROOM], rest[PEER_ROOM];                          /* that a forward pass reads; what it lacks */
    float first[PEER_ROOM], second[PEER_ROOM], second_rest[PEER_ROOM]; /* the moments */
    uint64_t random;
} peer_state;

static float to_bf16(float x) { return kopt_f32_from_bf16(kopt_bf16_from_f32(x)); }
static float to_fp16(float x) { return kopt_f32_from_fp16(kopt_fp16_from_f32(x)); }

/* The sum of a pair of bf16 numbers and a third, as a pair (Grow), in bf16: two times Dekker's Fast2Sum. */
static void pair_add(float *high, float *low, float x) {
    const float sum = to_bf16(*high + x), rest = to_bf16(to_bf16(x - to_bf16(sum - *high)) + *low);
    *high = to_bf16(sum + rest);
    *low = to_bf16(rest - to_bf16(*high - sum));
}

/* ... times a number that is a pair, too: .999 is 1 - .001. */
static void pair_multiply(float *high, float *low, double factor) {
    const float a = to_bf16((float)factor), b = to_bf16((float)(factor - a)), product = to_bf16(*high * a);
    const float rest = to_bf16(*high * a - product);
    const float all = to_bf16(rest + to_bf16(to_bf16(*high * b) + to_bf16(*low * a)));
    *high = to_bf16(product + all);
    *low = to_bf16(all - to_bf16(*high - product));
}

/* The dynamic maps of 8 bits (Dettmers et al. 2022): the magnitudes in ascending order, from 0. */
static int dynamic_map(float *value, int first) {
    int n = 0, decade, i;
    value[n++] = 0;
    for (decade = 0; decade < 7; decade++)
        for (i = 0; i < first << decade; i++)
            value[n++] = (float)(pow(10, decade - 6) * (0.1 + 0.9 * (i + 0.5) / (first << decade)));
    value[n++] = 1;
    return n;
}

/* In blocks of 256 with an fp32 scale. The signed map has no -1. */
static void store_dynamic(float *x, int n, int is_square) {
    static float maps[2][257]; /* the last is above all */
    static int counts[2];
    float *const map = maps[is_square];
    int i, k;
    if (counts[is_square] == 0) counts[is_square] = dynamic_map(map, is_square ? 2 : 1), map[counts[is_square]] = 3;
    for (i = 0; i < n; i += 256) {
        const int end = n < i + 256 ? n : i + 256;
        float largest = 0;
        for (k = i; k < end; k++) largest = fmaxf(largest, fabsf(x[k]));
        for (k = i; k < end && largest > 0; k++) {
            const float y = fabsf(x[k]) / largest;
            int code = 0, half;
            for (half = is_square ? 128 : 64; half > 0; half /= 2) code += map[code + half] <= y ? half : 0;
            code += y - map[code] >= map[code + 1] - y && (code < 127 || is_square || x[k] > 0);
            x[k] = copysignf(map[code] * largest, x[k]);
        }
    }
}

static void store_moments(moment_store store, float *x, int n, int is_square) {
    int i;
    if (store == DYNAMIC_MOMENT) store_dynamic(x, n, is_square);
    if (store == COMPANDED_MOMENT) store_companded(x, n, is_square);
    for (i = 0; i < n && store == BF16_MOMENT; i++) x[i] = to_bf16(x[i]);
    for (i = 0; i < n && store == FP16_MOMENT; i++) x[i] = to_fp16(x[i]);
}

/* The weight minus an update. */
static void store_weight(const peer *p, peer_state *s, int i, float update) {
    float *const w = &s->weight[i], *const rest = &s->rest[i];
    const float old = *w, full = old + *rest - update;
    uint32_t bits;
    switch (p->weight) {
    case MASTER_WEIGHT: /* the rest makes the weight fp32 */
        *w = to_bf16(full);
        *rest = full - *w;
        break;
    case KAHAN_WEIGHT:
    case KAHAN_FP16_WEIGHT: { /* optimi's kernel: the compensated update in 16 bits, its error from fp32 */
        float (*const nearest)(float) = p->weight == KAHAN_WEIGHT ? to_bf16 : to_fp16;
        const float compensated = *rest - update;
        *w = nearest(old + nearest(compensated));
        *rest = nearest(compensated + old - *w);
        break;
    }
    case FP16_WEIGHT: *w = to_fp16(old - update); break;
    case PAIR_WEIGHT: pair_add(w, rest, -update); break;
    case STOCHASTIC_WEIGHT:
        s->random ^= s->random << 13;
        s->random ^= s->random >> 7;
        s->random ^= s->random << 17;
        memcpy(&bits, &full, 4);
        bits = (bits + (uint32_t)((s->random * 0x2545F4914F6CDD1Du) >> 48)) & 0xFFFF0000u;
        memcpy(w, &bits, 4);
        break;
    case CORRECTED_WEIGHT: { /* the rest in 127ths of half an ulp */
        int exponent;
        float half;
        *w = to_bf16(full);
        frexpf(*w, &exponent);
        half = ldexpf(1, *w == 0 || exponent < -125 ? -134 : exponent - 9);
        *rest = rintf(fminf(fmaxf((full - *w) / half, -1), 1) * 127) / 127 * half;
        break;
    }
    }
}

/* Collage: each operation is rounded to bf16. */
static void collage_step(const peer *p, peer_state *s, const float *grad, int n, const kopt_optimizer *o, double c1,
                         double c2) {
    const float b1 = (float)o->beta1, b2 = (float)o->beta2, a1 = (float)(1 - o->beta1), a2 = (float)(1 - o->beta2);
    int i;
    for (i = 0; i < n; i++) {
        const float g = to_bf16(grad[i]);
        float *const m = &s->first[i], *const v = &s->second[i], root;
        *m = to_bf16(to_bf16(b1 * *m) + a1 * g);
        if (p->second == PAIR_MOMENT) {
            pair_multiply(v, &s->second_rest[i], o->beta2);
            pair_add(v, &s->second_rest[i], to_bf16(a2 * g * g));
        } else
            *v = to_bf16(to_bf16(b2 * *v) + a2 * g * g);
        root = to_bf16(to_bf16(sqrtf(to_bf16(*v / (float)c2))) + (float)o->eps);
        store_weight(p, s, i, to_bf16((float)o->lr * to_bf16(to_bf16(*m / (float)c1) / root)));
    }
}

/* PyTorch, where it is not fused: each operation is rounded to fp16. */
static void fp16_step(const peer *p, peer_state *s, const float *grad, int n, const kopt_optimizer *o, double c1,
                      double c2) {
    const float a1 = (float)(1 - o->beta1), b2 = (float)o->beta2, a2 = (float)(1 - o->beta2), eps = (float)p->eps;
    int i;
    for (i = 0; i < n; i++) {
        const float g = to_fp16(grad[i]);
        float *const m = &s->first[i], *const v = &s->second[i], root;
        *m = to_fp16(*m + a1 * (g - *m));
        *v = to_fp16(to_fp16(b2 * *v) + a2 * g * g);
        root = to_fp16(to_fp16(to_fp16(sqrtf(*v)) / (float)sqrt(c2)) + eps);
        store_weight(p, s, i, (float)(o->lr / c1) * (*m / root));
    }
}

/* Step number `step`, from 1. */
static void peer_step(const peer *p, peer_state *s, const float *g, int n, const kopt_optimizer *o, int step,
                      int is_lion) {
    const double c1 = 1 - pow(o->beta1, step), c2 = 1 - pow(o->beta2, step);
    float a1 = (float)(1 - o->beta1), a2 = (float)(1 - o->beta2), to_m = (float)(1 / c1), to_v = (float)(1 / c2);
    int i;
    if (p->weight == PAIR_WEIGHT) {
        collage_step(p, s, g, n, o, c1, c2);
        return;
    }
    if (p->weight == FP16_WEIGHT) {
        fp16_step(p, s, g, n, o, c1, c2);
        return;
    }
    if (p->debiased) a1 = (float)((1 - o->beta1) / c1), a2 = (float)((1 - o->beta2) / c2), to_m = to_v = 1;
    if (is_lion) a1 = (float)(1 - o->beta1), a2 = (float)(1 - o->beta2);
    for (i = 0; i < n; i++) {
        float *const m = &s->first[i], *const v = &s->second[i];
        float update;
        if (is_lion) {
            const float between = *m + a1 * (g[i] - *m);
            update = (float)o->lr * (float)((between > 0) - (between < 0));
            *m += a2 * (g[i] - *m);
        } else {
            *m += a1 * (g[i] - *m);
            *v += a2 * (g[i] * g[i] - *v);
            update = (float)o->lr * (*m * to_m) / (sqrtf(*v * to_v) + (float)p->eps);
        }
        store_weight(p, s, i, update);
    }
    store_moments(p->first, s->first, n, 0);
    if (!is_lion) store_moments(p->second, s->second, n, 1);
}

#endif
