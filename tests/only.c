/* only.c - what a build with KAHAN_OPT_ONLY does: one line for each optimizer of a list and each code of a gradient,
   with a hash of all that 3 steps leave, or "refused". tests/size.sh compares the lines of builds. Built with the set
   of bits as ONLY (default: all); without checks nothing is refused, so what is left out is not tried. Exit 1: refused
   or accepted against that set. */
#ifndef ONLY
#define ONLY KOPT_WITH_ALL
#else
#define KAHAN_OPT_ONLY ONLY
#endif
#define KAHAN_OPT_STATIC
#define KAHAN_OPT_IMPLEMENTATION
#include "../kahan_opt.h"

#include "inputs.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { N = 301, ROOM = 64 + 24 * N + 512 };

static unsigned char weight[4 * N], grad[4 * N], copy[4 * N], state[ROOM];
static uint32_t noise_state;
static int wrong;

static uint32_t noise(void) { return lcg32(&noise_state) >> 8; }

/* The bits of format f of a number around 1, rarely of 0, infinity or NaN; written as bytes of this machine. */
static void put(unsigned char *array, kopt_format f, size_t i) {
    uint32_t lot = noise() % 97, sign = (noise() & 1u) << 31, u = (110u + noise() % 20u) << 23 | (noise() & 0x7fff00u);
    uint16_t half;
    if (lot == 0) u = 0;
    if (lot == 1) u = 0x7f800000u;
    if (lot == 2) u = 0x7fc00000u;
    u |= sign;
    half = (uint16_t)(f == KOPT_BF16 ? u >> 16 : (u >> 16 & 0x8000u) | (8u + noise() % 10u) << 10 | (noise() & 0x3ffu));
    if (f == KOPT_F32)
        memcpy(array + 4 * i, &u, 4);
    else
        memcpy(array + 2 * i, &half, 2);
}

/* The bits of KAHAN_OPT_ONLY that these need. */
static uint32_t needs(const kopt_optimizer *o, kopt_format grad_format, const kopt_tensor *t) {
    static const uint32_t formats[] = {KOPT_WITH_F32, KOPT_WITH_BF16, KOPT_WITH_FP16, KOPT_WITH_Q8};
    static const uint32_t roundings[] = {KOPT_WITH_NEAREST, KOPT_WITH_STOCHASTIC, KOPT_WITH_KAHAN, KOPT_WITH_COMPACT,
                                         KOPT_WITH_EXACT};
    static const uint32_t states[] = {KOPT_WITH_NEAREST_STATE, KOPT_WITH_STOCHASTIC_STATE};
    static const uint32_t decays[] = {KOPT_WITH_L2, KOPT_WITH_DECOUPLED, KOPT_WITH_FULLY_DECOUPLED};
    static const uint32_t rules[] = {KOPT_WITH_SGD,   KOPT_WITH_ADAM,   KOPT_WITH_LION, KOPT_WITH_ADAN,
                                     KOPT_WITH_RADAM, KOPT_WITH_RANGER, KOPT_WITH_EMA};
    uint32_t need = rules[o->rule] | formats[o->weight_format] | formats[grad_format];
    int moments = o->rule != KOPT_EMA && (o->rule != KOPT_SGD || o->momentum > 0);
    if (o->weight_format != KOPT_F32) need |= roundings[o->rounding];
    if (o->weight_format != KOPT_F32 && (o->rounding == KOPT_KAHAN || o->rounding == KOPT_COMPACT))
        need |= states[o->compensation_rounding];
    if (moments) need |= formats[o->moment_format];
    if (moments && o->moment_format != KOPT_F32) need |= states[o->moment_rounding];
    if (o->weight_decay > 0) need |= decays[o->decay_mode];
    if (o->rule == KOPT_SGD && o->momentum > 0) need |= KOPT_WITH_MOMENTUM;
    if (o->zero_grad || o->maximize || t->copy || t->first_index || o->clip < 1 || o->clip > 1 || o->amsgrad)
        need |= KOPT_WITH_EXTRAS;
    if (t->copy) need |= formats[t->copy_format];
    return need;
}

static void run(kopt_optimizer o, kopt_format grad_format, int extras) {
    kopt_tensor t = kopt_tensor_of(weight, grad, grad_format, N, state, sizeof state);
    kopt_result result = KOPT_OK;
    uint64_t hash = FNV_START;
    uint32_t need, without = ~(uint32_t)(ONLY);
    kopt_step s;
    size_t i;
    int k;
    noise_state = 1;
    o.seed = 7;
    t.id = 3;
    if (extras) t.first_index = 1000, t.copy = copy, t.copy_format = grad_format;
    need = needs(&o, grad_format, &t);
    if (!((ONLY)&KOPT_WITH_CHECKS) && (need & without)) return;
    memset(state, 0, sizeof state);
    memset(copy, 0, sizeof copy);
    memset(weight, 0, sizeof weight);
    memset(grad, 0, sizeof grad);
    for (i = 0; i < N; ++i) put(weight, o.weight_format, i);
    if (kopt_state_size(&o, N) > sizeof state) exit(2);
    result = kopt_state_init(&o, &t, NULL);
    for (k = 0; k < 3 && result == KOPT_OK; ++k) {
        for (i = 0; i < N; ++i) put(grad, grad_format, i);
        result = kopt_step_begin(&o, &s);
        if (result == KOPT_OK) result = kopt_step_range(&s, &t, 0, k == 1 ? 256 : N);
        if (result == KOPT_OK && k == 1) result = kopt_step_range(&s, &t, 256, N);
        hash = fnv_bytes(hash, grad, sizeof grad);
    }
    printf("%d %d/%d/%d %d %d%d %d%d%d %d ", (int)o.rule, (int)o.weight_format, (int)grad_format, (int)o.moment_format,
           (int)o.rounding, (int)o.moment_rounding, (int)o.compensation_rounding, (int)o.decay_mode, o.weight_decay > 0,
           o.momentum > 0, extras);
    if (result == KOPT_OK) { /* the block without its header: a build without checks writes none */
        hash = fnv_bytes(fnv_bytes(hash, weight, sizeof weight), state + 64, sizeof state - 64);
        printf("%08lx%08lx\n", (unsigned long)(hash >> 32), (unsigned long)(hash & 0xffffffffu));
    } else {
        printf("refused: %s\n", kopt_result_string(result));
    }
    wrong |= (result != KOPT_OK) != ((need & without & ~(uint32_t)KOPT_WITH_CHECKS) != 0);
    wrong |= result != KOPT_OK && result != KOPT_ERROR_OPTION;
}

static void compress(kopt_format code, kopt_rounding rounding) {
    static const uint32_t formats[] = {0, KOPT_WITH_BF16, KOPT_WITH_FP16, KOPT_WITH_Q8, 0};
    const uint32_t without = ~(uint32_t)(ONLY), need = KOPT_WITH_COMPRESSION | formats[code];
    kopt_compressor c = kopt_compressor_of(code, rounding == KOPT_NEAREST ? weight : NULL, N);
    uint64_t hash = FNV_START;
    kopt_result result = KOPT_OK;
    size_t i;
    int k;
    if (!((ONLY)&KOPT_WITH_CHECKS) && (need & without)) return;
    c.rounding = rounding;
    noise_state = 3;
    memset(copy, 0, sizeof copy);
    for (k = 0; k < 3 && result == KOPT_OK; ++k) {
        for (i = 0; i < N; ++i) put(grad, KOPT_F32, i);
        result = kopt_compress(&c, state, sizeof state, grad, KOPT_F32);
        if (result == KOPT_OK) result = kopt_decompress_add(copy, KOPT_F32, state, sizeof state, code, N, 1);
        hash = fnv_bytes(hash, copy, sizeof copy);
        hash = fnv_bytes(hash, state, kopt_compressed_size(code, N));
    }
    if (result == KOPT_OK)
        printf("code %d/%d %08lx%08lx\n", (int)code, (int)rounding, (unsigned long)(hash >> 32),
               (unsigned long)(hash & 0xffffffffu));
    else
        printf("code %d/%d refused: %s\n", (int)code, (int)rounding, kopt_result_string(result));
    wrong |= (result != KOPT_OK) != ((need & without) != 0) || (result != KOPT_OK && result != KOPT_ERROR_OPTION);
}

int main(void) {
    int rule, format, rounding, state_rounding, moment, count = 0;
    for (rule = 0; rule <= KOPT_EMA; ++rule)
        for (format = KOPT_F32; format <= KOPT_FP16; ++format)
            for (rounding = KOPT_NEAREST; rounding <= KOPT_EXACT; ++rounding)
                for (state_rounding = KOPT_NEAREST; state_rounding <= KOPT_STOCHASTIC; ++state_rounding)
                    for (moment = KOPT_F32; moment <= KOPT_Q8; ++moment, ++count) {
                        kopt_optimizer o = rule == KOPT_SGD      ? kopt_sgd(0.01, 0)
                                           : rule == KOPT_ADAM   ? kopt_adamw(0.01)
                                           : rule == KOPT_LION   ? kopt_lion(0.01)
                                           : rule == KOPT_ADAN   ? kopt_adan(0.01)
                                           : rule == KOPT_RADAM  ? kopt_radam(0.01)
                                           : rule == KOPT_RANGER ? kopt_ranger(0.01)
                                                                 : kopt_ema(0.99);
                        int plain = count % 4 < 2; /* half of them without what a small build leaves out */
                        o.weight_format = (kopt_format)format;
                        o.rounding = (kopt_rounding)rounding;
                        o.moment_format = (kopt_format)moment;
                        o.moment_rounding = (kopt_rounding)state_rounding;
                        o.compensation_rounding = (kopt_rounding)(count % 3 ? state_rounding : !state_rounding);
                        if (rule == KOPT_RANGER) o.lookahead = 2;
                        if (rule != KOPT_EMA) {
                            o.weight_decay = count % 5 ? 0.01 : 0;
                            o.decay_mode = plain ? KOPT_DECOUPLED : (kopt_decay_mode)(count % 3);
                            o.zero_grad = !plain && count % 7 == 0;
                        }
                        if (rule == KOPT_SGD && !plain) o.momentum = 0.9;
                        run(o, plain ? o.weight_format : (kopt_format)(count % 3), !plain && count % 2);
                    }
    for (count = 0; count < 24; ++count) { /* KOPT_TINY has all of these */
        kopt_optimizer o = count % 3 ? kopt_adamw(0.001 * (1 + count)) : kopt_sgd(0.001 * (1 + count), 0);
        o.beta1 = count % 3 ? 0.8 + 0.01 * (count % 7) : 2; /* which SGD does not read */
        o.beta2 = count % 2 ? 0.999 : 0.95;
        o.eps = count % 5 ? 1e-8 : 1e-3;
        o.decay_mode = KOPT_DECOUPLED;
        o.weight_decay = count % 4 ? 0.01 * count : 0;
        o.grad_scale = count % 6 ? 1 : 0.125;
        o.step = (uint32_t)count * (uint32_t)count * 1000u;
        run(o, KOPT_BF16, 0);
    }
    for (count = 0; count < 60; ++count) { /* all 64 bits of an index count */
        const uint64_t i = (UINT64_C(1) << count) + (uint64_t)count * 37;
        printf("random number %d %08lx\n", count, (unsigned long)kopt_random((kopt_random_key){7, 2, 3, 5}, 8, i));
    }
    for (count = 0; count < 8; ++count) compress((kopt_format)(1 + count / 2), (kopt_rounding)(count % 2));
    return wrong;
}
