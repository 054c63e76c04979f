/* step1.c */
#include "task.h"
#include <math.h>
#include <stdio.h>

static float m[N], v[N];

static void adam(int t) /* t counts from 1 */
{
    const float rate = 1e-3f / (1 - powf(0.9f, (float)t)), root = 1 / sqrtf(1 - powf(0.999f, (float)t));
    int j;
    for (j = 0; j < N; ++j) {
        m[j] = 0.9f * m[j] + 0.1f * grad[j];
        v[j] = 0.999f * v[j] + 0.001f * grad[j] * grad[j];
        weight[j] -= rate * m[j] / (sqrtf(v[j]) * root + 1e-8f);
    }
}

int main(void) {
    int step;
    make_data();
    for (step = 0; step < STEPS; ++step) {
        backward(step);
        adam(step + 1);
    }
    printf("by hand, fp32: loss %.3f\n", (double)loss());
    return 0;
}
