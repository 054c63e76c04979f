/* begun.h - what is behind a kopt_step, for tests whose implementation is in another file. test_scalars.c, which has
   its own, compares it with kopt_begun_. As probe.c, it needs no library. */
#ifndef BEGUN_H
#define BEGUN_H

typedef struct step_scalars {
    uint64_t made;
    kopt_rule rule;
    kopt_format first_moment_format, second_moment_format;
    kopt_rounding rounding, moment_rounding, residual_rounding;
    int nesterov, zero_grad, moment_count, moments_only, unrectified, sync, stable;
    float grad_scale, l2, weight_decay, beta1, gain1, beta2, gain2, beta3, gain3, extrapolation, third_scale, rate;
    float undecayed_rate, root_scale, eps;
    uint32_t step;
    float feedback;
    uint64_t seed;
    float sharpness, slow_scale;
} step_scalars;

static inline step_scalars scalars_of(const kopt_step *step) {
    step_scalars s;
    const volatile unsigned char *from = (const volatile unsigned char *)step;
    volatile unsigned char *to = (volatile unsigned char *)&s; /* volatile: or compilers call memcpy() */
    size_t i;
    for (i = 0; i < sizeof s; i++) to[i] = from[i];
    return s;
}

#endif
