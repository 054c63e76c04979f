/* one_element.c - learns on an ATmega, without arrays of gradients, without an optimizer and without the implementation
   of kahan_opt.h: a filter of 8 weights predicts the next sample of a sensor from the last 8 (LMS). Each weight is a
   bf16 number with a bf16 residual, 4 bytes. kopt_kahan_add_bf16(), an inline function, updates both.

       avr-gcc -mmcu=atmega328p -Os -o one_element one_element.c -lm && simavr -m atmega328p -f 16000000 one_element
       cc -std=c99 -O2 -ffp-contract=off -o one_element one_element.c && ./one_element

   Both print the same lines: after each 1000 samples, 1000 times the sum of the squared errors, and a hash of the
   weights. With -DFP32, the weights are fp32; with -DNEAREST, they are bf16 without residual and lose most updates. */
#include "../../../kahan_opt.h"

#ifdef __AVR__
#include <avr/interrupt.h>
#include <avr/io.h>
#include <avr/sleep.h>

static void put(char c) {
    while ((UCSR0A & (1 << UDRE0)) == 0) {
    }
    UDR0 = (uint8_t)c;
}
#else
#include <stdio.h>
static void put(char c) { putchar(c); }
#endif

enum { TAPS = 8, SAMPLES = 4000 };

#ifdef FP32
static float weight[TAPS];
#else
static kopt_bf16 weight[TAPS];
#endif
#if !defined FP32 && !defined NEAREST
static kopt_bf16 residual[TAPS];
static uint32_t rounding = 1; /* a generator for the residuals */
#endif
static float last[TAPS]; /* samples, the newest first */
static uint32_t noise = 1;

static uint32_t draw(uint32_t *generator) {
    *generator = *generator * 1664525u + 1013904223u;
    return *generator >> 16;
}

/* Replace it with your sensor: two triangles and noise, between -1 and 1. */
static float sense(uint16_t t) {
    const int16_t slow = (int16_t)(t % 50), fast = (int16_t)(t % 14);
    const int16_t a = slow < 25 ? slow : 50 - slow, b = fast < 7 ? fast : 14 - fast; /* 0 to 25, 0 to 7 */
    return (float)(24 * a - 300 + 40 * b - 140 + (int16_t)(draw(&noise) % 64) - 32) * (1.0f / 512);
}

static float value(uint8_t i) {
#ifdef FP32
    return weight[i];
#else
    return kopt_f32_from_bf16(weight[i]);
#endif
}

static void update(uint8_t i, float delta) {
#if defined FP32
    weight[i] += delta;
#elif defined NEAREST
    weight[i] = kopt_bf16_from_f32(value(i) + delta);
#else
    kopt_kahan_add_bf16(&weight[i], &residual[i], delta, draw(&rounding));
#endif
}

/* Learns from one sample. Returns 1000 times the square of the error that its prediction had. */
static float learn(float sample) {
    float sum = 0, error;
    uint8_t i;
    for (i = 0; i < TAPS; ++i) sum += value(i) * last[i];
    error = sample - sum;
    for (i = 0; i < TAPS; ++i) update(i, 0.001f * error * last[i]);
    for (i = TAPS - 1; i > 0; --i) last[i] = last[i - 1];
    last[0] = sample;
    return 1000 * error * error;
}

static void put_number(uint32_t x, uint8_t base) {
    char digits[10];
    uint8_t n = 0;
    do digits[n++] = "0123456789abcdef"[x % base];
    while ((x /= base) != 0);
    while (n > 0) put(digits[--n]);
}

int main(void) {
    uint32_t hash;
    uint16_t t;
    uint8_t i;
    float sum = 0;
#ifdef __AVR__
    UCSR0B = 1 << TXEN0;
#endif
    for (t = 1; t <= SAMPLES; ++t) {
        sum += learn(sense(t));
        if (t % 1000 != 0) continue;
        for (hash = 2166136261u, i = 0; i < TAPS; ++i) { /* FNV-1a, of words */
#if defined FP32 || defined NEAREST
            hash = (hash ^ kopt_bf16_from_f32(value(i))) * 16777619u;
#else
            hash = (hash ^ weight[i] ^ (uint32_t)residual[i] << 16) * 16777619u;
#endif
        }
        put_number((uint32_t)(sum + 0.5f), 10), put(' '), put_number(hash, 16), put('\n');
        sum = 0;
    }
#ifdef __AVR__
    while ((UCSR0A & (1 << TXC0)) == 0) {
    }
    cli();
    sleep_mode(); /* asleep without interrupts: simavr ends */
#endif
    return 0;
}
