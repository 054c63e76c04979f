/* inline_board.c - the inline steps on a board (board.h of docs/examples/firmware) with gradients and weights that are
   ordinary, tiny, any bits, or zero: prints a hash of weights and state for each. firmware.sh compares the lines
   of the boards with those of this machine, where unit/test_inline.c compares the steps with the library. Small enough
   for 16 KB of RAM; SGD crosses a span of random numbers, of 2048 elements. */
#include "../../kahan_opt.h"

#include "../../docs/examples/firmware/board.h"

enum { N = 2100, FEW = 301 };
static kopt_bf16 weight[N], state[N], grad[N]; /* AdamW: FEW weights, and 3 * FEW numbers of state */

static uint32_t generator;
static uint32_t draw(void) {
    generator = generator * 1664525u + 1013904223u;
    return generator >> 8;
}

static kopt_bf16 number(int kind) {
    const uint32_t bits = draw();
    switch (kind) {
    case 0: return (kopt_bf16)(0x3A00u + (bits & 0x83FFu));
    case 1: return (kopt_bf16)(bits & 0x81FFu);
    case 2: return (kopt_bf16)(bits & 0xFFFFu);
    default: return (kopt_bf16)(bits & 0x8000u);
    }
}

static uint32_t hash(uint32_t h, const kopt_bf16 *a, size_t n) { /* FNV-1a, of words */
    for (; n > 0; --n) h = (h ^ *a++) * 16777619u;
    return h;
}

static void print_hash(uint32_t h) {
    char digits[10];
    int i;
    for (i = 7; i >= 0; --i, h >>= 4) digits[i] = "0123456789abcdef"[h & 15u];
    digits[8] = '\n', digits[9] = 0;
    board_print(digits);
}

static void train(int adam, int weights, int gradients) {
    const size_t n = adam ? FEW : N;
    kopt_inline_optimizer opt = kopt_inline_optimizer_of(0.02f, weights == gradients ? 0 : 0.05f, 0x12345678u);
    size_t i;
    int step;
    opt.seed = (uint64_t)0x9ABCDEF0u << 32 | 0x0FEDCBA9u;
    opt.step = 0x00FFFFFEu; /* and 0x01000000 next, so that bias corrections see most bits of it */
    for (i = 0; i < N; ++i) weight[i] = number(weights), state[i] = 0;
    for (step = 0; step < 4; ++step) {
        if (step == 2 && adam) opt.step = 0;
        for (i = 0; i < n; ++i) grad[i] = number(step == 3 ? 0 : gradients);
        if (adam)
            kopt_inline_adamw(&opt, weight, state, grad, n);
        else
            kopt_inline_sgd(&opt, weight, state, grad, n);
    }
    print_hash(hash(hash(2166136261u, weight, n), state, adam ? 3 * n : n));
}

int main(void) {
    int adam, weights, gradients;
    for (adam = 0; adam < 2; ++adam)
        for (weights = 0; weights < 4; ++weights)
            for (gradients = 0; gradients < 4; ++gradients) train(adam, weights, gradients);
    board_end(0);
    return 0;
}
