/* What a step is made of, for bench/cliffs.c and bench/compare.c: a rule, the formats and the roundings. The numbers of
   formats, roundings and instruction sets are those of kahan_opt.h, so that a program that does not include it can name
   them. Where it is included before this file, a combination becomes an optimizer and a tensor: of 0.8, or of 0.2. */
#ifndef COMBINATION_H
#define COMBINATION_H
#include "room.h"

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

enum { F32, BF16, FP16, Q8, FORMATS, NO_COPY = -1 };
enum { NEAREST, STOCHASTIC, KAHAN, COMPACT, EXACT, ROUNDINGS };
enum { ISAS = 6 };
enum {
    SGD,
    MOMENTUM,
    ADAMW,
    LION,
    ADAM_L2,
    FULLY_DECOUPLED,
    AMSGRAD,
    STABLE_ADAMW,
    ADAN,
    RADAM,
    RANGER,
    RANGER_SYNCS,
    EMA,
    ADAM_ATAN2,
    RULES
};

typedef struct combination {
    int rule, weight, copy, rounding, moment, grad;
    int nearest_stores; /* 1: moments and compensations are rounded to nearest, not stochastically */
} combination;

typedef struct arrays { /* room for n weights of the widest combination */
    void *weight, *grad, *copy, *state;
    size_t n, state_room;
} arrays;

static const char *const format_name[FORMATS] = {"fp32", "bf16", "fp16", "8-bit"};
static const char *const rounding_name[ROUNDINGS] = {"nearest", "stochastic", "kahan", "compact", "exact"};
static const char *const rule_name[RULES] = {"SGD",     "momentum",    "AdamW", "Lion",  "Adam L2", "fully decoupled",
                                             "AMSGrad", "StableAdamW", "Adan",  "RAdam", "Ranger",  "Ranger syncs",
                                             "EMA",     "Adam-atan2"};

#ifdef KAHAN_OPT_H
#if KOPT_VERSION < 900 /* the interface of 0.9, in that of 0.8 */
#define first_moment_format moment_format
#define second_moment_format moment_format
#endif
#if KOPT_VERSION < 800 /* the interface of 0.8, in that of 0.2 */
#define KOPT_DECAY_FULLY_DECOUPLED KOPT_FULLY_DECOUPLED
#define residual_rounding compensation_rounding
#define kopt_tensor_of(weight, weight_format_, grad, grad_format, n, state, state_size) \
    (opt->weight_format = (weight_format_), kopt_tensor_of(weight, grad, grad_format, n, state, state_size))
#define kopt_state_size(opt, t) kopt_state_size(opt, (t)->n)
#define kopt_state_init(opt, t, count, weights) kopt_state_init(opt, t, weights)
#define kopt_step_begin(step, opt) kopt_step_begin(opt, step)
#define kopt_step_run(step, t, count) kopt_step_run(step, t)
#endif

/* An optimizer at step 1,000, which has the scalars of a long run (RAdam and Ranger are rectified), and a tensor. */
static inline void make(const combination *c, const arrays *a, kopt_optimizer *opt, kopt_tensor *t) {
    kopt_optimizer o = kopt_adamw(1e-3);
    switch (c->rule) {
    case SGD: o = kopt_sgd(1e-3, 0); break;
    case MOMENTUM: o = kopt_sgd(1e-3, 0.9); break;
    case LION: o = kopt_lion(1e-3); break;
    case ADAM_L2: o = kopt_adam(1e-3), o.weight_decay = 0.01; break;
    case FULLY_DECOUPLED: o.decay_mode = KOPT_DECAY_FULLY_DECOUPLED, o.weight_decay = 1e-5; break;
    case AMSGRAD: o.amsgrad = 1; break;
    case STABLE_ADAMW: o = kopt_stable_adamw(1e-3); break;
    case ADAN: o = kopt_adan(1e-3); break;
    case RADAM: o = kopt_radam(1e-3); break;
    case RANGER: o = kopt_ranger(1e-3), o.lookahead = 2000000000; break; /* no step of a bench is one that syncs */
    case RANGER_SYNCS: o = kopt_ranger(1e-3); break;
    case EMA: o = kopt_ema(0.999); break;
#ifdef KAHAN_OPT_VMATH
    case ADAM_ATAN2: o = kopt_adam_atan2(1e-3); break;
#endif
    default: break;
    }
    o.first_moment_format = o.second_moment_format = (kopt_format)c->moment;
    o.rounding = (kopt_rounding)c->rounding;
    o.moment_rounding = o.residual_rounding = c->nearest_stores ? KOPT_NEAREST : KOPT_STOCHASTIC;
    o.step = 1000;
    *opt = o;
    *t =
        kopt_tensor_of(a->weight, (kopt_format)c->weight, a->grad, (kopt_format)c->grad, a->n, a->state, a->state_room);
    if (c->copy != NO_COPY) t->copy = a->copy, t->copy_format = (kopt_format)c->copy;
}

/* Weights in +-1, gradients in +-0.5, a fresh state. Returns 0 if the header refuses the combination. */
static inline int begin(const combination *c, const arrays *a, kopt_optimizer *opt, kopt_tensor *t) {
    static float w[1024], g[1024];
    static const size_t size[] = {4, 2, 2};
    size_t i;
#ifndef KAHAN_OPT_VMATH
    if (c->rule == ADAM_ATAN2) return 0;
#endif
    make(c, a, opt, t);
    for (i = 0; i < 1024; i++) {
        w[i] = (float)((i * 2654435761u) % 1999) / 1000 - 1;
        g[i] = (float)((i * 40503u) % 977) / 977 - 0.5f;
    }
    for (i = 0; i < a->n; i += 1024) {
        const size_t some = a->n - i < 1024 ? a->n - i : 1024;
        unsigned char *const weight = (unsigned char *)a->weight + i * size[c->weight];
        unsigned char *const grad = (unsigned char *)a->grad + i * size[c->grad];
        if (kopt_convert(weight, (kopt_format)c->weight, w, KOPT_F32, some) != KOPT_OK) return 0;
        if (kopt_convert(grad, (kopt_format)c->grad, g, KOPT_F32, some) != KOPT_OK) return 0;
    }
    return kopt_state_init(opt, t, 1, NULL) == KOPT_OK;
}
#endif

#endif
