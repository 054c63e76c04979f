#ifndef COMPANDED_H
#define COMPANDED_H
#include <math.h>

/* What FlashOptim 0.1.4 stores of moments, to nearest: groups of 32 with an fp16 scale; codes of the root of a square,
   and of the softsign of a first moment. */
static void store_companded(float *x, int n, int is_square) {
    int i, k, exponent;
    for (i = 0; i < n; i += 32) {
        const int end = n < i + 32 ? n : i + 32;
        float largest = 1e-12f, quantum, scale;
        for (k = i; k < end; k++) largest = fmaxf(largest, is_square ? sqrtf(x[k]) : fabsf(x[k]));
        frexpf(largest, &exponent);
        quantum = ldexpf(1, exponent < -13 ? -24 : exponent - 11); /* of fp16 */
        scale = rintf(largest / quantum) * quantum;
        for (k = i; k < end; k++) {
            if (is_square) {
                const float root = rintf(sqrtf(x[k]) / largest * 255) / 255 * scale;
                x[k] = root * root;
            } else {
                const float y = x[k] / largest, code = floorf(2 * y / (1 + fabsf(y)) * 127 + 0.5f) / 127;
                x[k] = code / (2 - fabsf(code)) * scale;
            }
        }
    }
}

#endif
