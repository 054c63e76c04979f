/* The settings of AdamW by their bytes per parameter, beside fp32. */
#ifndef BYTES_H
#define BYTES_H

typedef struct arm {
    const char *name, *bytes;
    kopt_format weight, first, second;
    kopt_rounding rounding;
} arm;
static const arm arms[] = {{"fp32", "16", KOPT_F32, KOPT_F32, KOPT_F32, KOPT_NEAREST},
                           {"KAHAN", "10", KOPT_BF16, KOPT_BF16, KOPT_BF16, KOPT_KAHAN},
                           {"KAHAN, 8-bit second moments", "9.02", KOPT_BF16, KOPT_BF16, KOPT_Q8, KOPT_KAHAN},
                           {"COMPACT", "9", KOPT_BF16, KOPT_BF16, KOPT_BF16, KOPT_COMPACT},
                           {"COMPACT, 8-bit second moments", "8.02", KOPT_BF16, KOPT_BF16, KOPT_Q8, KOPT_COMPACT},
                           {"FEEDBACK", "8", KOPT_BF16, KOPT_BF16, KOPT_BF16, KOPT_FEEDBACK},
                           {"STOCHASTIC", "8", KOPT_BF16, KOPT_BF16, KOPT_BF16, KOPT_STOCHASTIC},
                           {"COMPACT, 8-bit moments", "7.03", KOPT_BF16, KOPT_Q8, KOPT_Q8, KOPT_COMPACT},
                           {"FEEDBACK, 8-bit second moments", "7.02", KOPT_BF16, KOPT_BF16, KOPT_Q8, KOPT_FEEDBACK},
                           {"STOCHASTIC, 8-bit second moments", "7.02", KOPT_BF16, KOPT_BF16, KOPT_Q8, KOPT_STOCHASTIC},
                           {"FEEDBACK, 8-bit moments", "6.03", KOPT_BF16, KOPT_Q8, KOPT_Q8, KOPT_FEEDBACK},
                           {"STOCHASTIC, 8-bit moments", "6.03", KOPT_BF16, KOPT_Q8, KOPT_Q8, KOPT_STOCHASTIC}};
enum { ARMS = sizeof arms / sizeof *arms };

#endif
