/* task.h - 512 samples, a target that is linear in their 64 inputs up to noise, and the model */
#include <stdint.h>

#ifndef READ /* step 4 defines the type of weights and gradients, and its conversions */
typedef float number;
#define READ(value) (value)
#define ROUND(value) (value)
#endif
enum { N = 64, SAMPLES = 512, BATCH = 16, STEPS = 8000 };
static float x[SAMPLES][N], y[SAMPLES];
static number weight[N], grad[N];

static float noise(void) /* in [-1, 1) */
{
    static uint32_t state = 1;
    state = state * 1664525u + 1013904223u;
    return (float)(state >> 8) / 8388608 - 1;
}

static void make_data(void) {
    float truth[N];
    int s, j;
    for (j = 0; j < N; ++j) truth[j] = 2 * noise();
    for (s = 0; s < SAMPLES; ++s) {
        y[s] = 0.1f * noise();
        for (j = 0; j < N; ++j) {
            x[s][j] = noise();
            y[s] += truth[j] * x[s][j];
        }
    }
}

static float error(int s) /* prediction minus target of sample s */
{
    float sum = -y[s];
    int j;
    for (j = 0; j < N; ++j) sum += READ(weight[j]) * x[s][j];
    return sum;
}

static float loss(void) {
    float sum = 0;
    int s;
    for (s = 0; s < SAMPLES; ++s) sum += error(s) * error(s);
    return sum / SAMPLES;
}

static void backward(int step) /* grad = the gradient of one batch's mean squared error */
{
    float sum[N] = {0};
    int b, j;
    for (b = 0; b < BATCH; ++b) {
        const int s = (step * BATCH + b) % SAMPLES;
        const float e = error(s) * 2 / BATCH;
        for (j = 0; j < N; ++j) sum[j] += e * x[s][j];
    }
    for (j = 0; j < N; ++j) grad[j] = ROUND(sum[j]);
}
