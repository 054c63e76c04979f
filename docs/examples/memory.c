/* memory.c - what a training takes besides its activations, in bytes per parameter and in GB, as a table in Markdown.
   The library itself is asked: kopt_state_size().

       cc -O2 -o memory docs/examples/memory.c && ./memory 7e9

   A run keeps weights and state, and, one column after the other:
       released     no gradient: each tensor is stepped as soon as its gradient exists
       gradient     the gradient of all weights
       sum          and a sum of the gradients of several micro-batches
       all-reduce   and what goes over the network, if it is a copy                                                   */
#define KAHAN_OPT_IMPLEMENTATION
#include "../../kahan_opt.h"

#include <stdio.h>
#include <stdlib.h>

enum { N = 1 << 20 }; /* of one tensor: its header and the gaps between its arrays are in the state */

static double parameters = 7e9;

/* What the weights and the state take, and each of gradient, sum and message. */
static void row(const char *name, double kept, double grad, double sum, double message) {
    const double most = kept + grad + sum + message;
    printf("| %s | %.4g | %.4g | %.4g | %.4g | %.3g to %.3g |\n", name, kept, kept + grad, kept + grad + sum, most,
           kept * parameters * 1e-9, most * parameters * 1e-9);
}

/* 16-bit weights and gradients, and a 16-bit sum; or fp32 weights with a bf16 copy, and an fp32 sum. */
static void ours(const char *name, kopt_optimizer opt, kopt_format weights, kopt_rounding rounding, kopt_format first,
                 kopt_format second) {
    const kopt_tensor t = kopt_tensor_of(NULL, weights, NULL, KOPT_BF16, N, NULL, 0);
    const int wide = weights == KOPT_F32;
    size_t state;
    opt.rounding = rounding;
    opt.first_moment_format = first, opt.second_moment_format = second;
    state = kopt_state_size(&opt, &t);
    if (state == 0) exit(1); /* not an optimizer */
    row(name, (double)state / N + (wide ? 4 + 2 : 2), 2, wide ? 4 : 2, 2);
}

int main(int argc, char **argv) {
    const kopt_optimizer adamw = kopt_adamw(1e-3), lion = kopt_lion(1e-4);
    char *end = NULL;
    if (argc > 1) parameters = strtod(argv[1], &end);
    if (argc > 2 || (end != NULL && *end != 0) || !(parameters >= 1 && parameters <= 1e15)) {
        fputs("usage: memory [PARAMETERS]     7e9 by default\n", stderr);
        return 2;
    }
    printf("| AdamW | released | gradient | + sum | + all-reduce | GB of %g parameters |\n", parameters);
    printf("|---|---|---|---|---|---|\n");
    row("all in fp32", 4 + 8, 4, 4, 4);
    ours("mixed precision: fp32 weights, a bf16 copy, bf16 gradients", adamw, KOPT_F32, KOPT_KAHAN, KOPT_F32, KOPT_F32);
    row("... with fp32 gradients", 4 + 8 + 2, 4, 4, 4);
    ours("`KOPT_KAHAN` or `KOPT_EXACT`, fp32 moments", adamw, KOPT_BF16, KOPT_KAHAN, KOPT_F32, KOPT_F32);
    ours("**`KOPT_KAHAN` or `KOPT_EXACT`**", adamw, KOPT_BF16, KOPT_KAHAN, KOPT_BF16, KOPT_BF16);
    ours("`KOPT_COMPACT`", adamw, KOPT_BF16, KOPT_COMPACT, KOPT_BF16, KOPT_BF16);
    ours("`KOPT_FEEDBACK` or `KOPT_STOCHASTIC`", adamw, KOPT_BF16, KOPT_STOCHASTIC, KOPT_BF16, KOPT_BF16);
    ours("`KOPT_KAHAN`, 8-bit second moments", adamw, KOPT_BF16, KOPT_KAHAN, KOPT_BF16, KOPT_Q8);
    ours("`KOPT_COMPACT`, 8-bit second moments", adamw, KOPT_BF16, KOPT_COMPACT, KOPT_BF16, KOPT_Q8);
    ours("`KOPT_COMPACT`, 8-bit moments", adamw, KOPT_BF16, KOPT_COMPACT, KOPT_Q8, KOPT_Q8);
    ours("`KOPT_FEEDBACK` or `KOPT_STOCHASTIC`, 8-bit moments", adamw, KOPT_BF16, KOPT_STOCHASTIC, KOPT_Q8, KOPT_Q8);
    ours("Lion: `KOPT_KAHAN`", lion, KOPT_BF16, KOPT_KAHAN, KOPT_BF16, KOPT_BF16);
    ours("Lion: `KOPT_COMPACT`, 8-bit moments", lion, KOPT_BF16, KOPT_COMPACT, KOPT_Q8, KOPT_Q8);
    return 0;
}
