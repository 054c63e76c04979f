/* abi.c - a caller of the library: abi.sh compiles it with another header than that of the implementation, or with
   other flags. `abi works`: each call with its optimizer succeeds. `abi version`, `option`, `uninitialized`: each
   returns this error and changes nothing. What is around the optimizer never changes. C or C++.
       -DZEROS               no constructor makes the optimizer
       -DOPTIMIZER_FIELD=x   sets this field of the optimizer, a later header's
       -DTENSOR_FIELD=x      sets this field of the tensor */
#include "kahan_opt.h"

#include <stdio.h>
#include <string.h>

enum { N = 40, AROUND = 512 };

static struct guarded {
    unsigned char before[AROUND];
    kopt_optimizer opt;
    unsigned char after[AROUND];
} g;

/* All that a call may write. */
static struct memory {
    kopt_bf16 weight[N], grad[N];
    unsigned char state[KOPT_STATE_BYTES(N, 6)], image[2048];
    float values[N];
    kopt_step step;
    kopt_scaler scaler;
} m, untouched;

static kopt_result expected;
static int failures;

static void fail(const char *what) {
    printf("%s\n", what);
    failures++;
}

static void check(const char *call, kopt_result result) {
    if (result == expected) return;
    printf("%s: %s\n", call, kopt_result_string(result));
    failures++;
}

static void call_all(void) {
    kopt_tensor t = kopt_tensor_of(m.weight, KOPT_BF16, m.grad, KOPT_BF16, N, m.state, sizeof m.state);
    kopt_norm norm;
    int skipped;
    memset(&norm, 0, sizeof norm);
#ifdef TENSOR_FIELD
    t.TENSOR_FIELD = 1;
#else
    check("kopt_step_begin", kopt_step_begin(&m.step, &g.opt));
    check("kopt_scaler_begin", kopt_scaler_begin(&m.scaler, &m.step, &g.opt, 1, &norm, 0, &skipped));
#endif
    check("kopt_state_init", kopt_state_init(&g.opt, &t, 1, NULL));
    check("kopt_state_dither", kopt_state_dither(&g.opt, &t, 1));
    check("kopt_optimizer_step", kopt_optimizer_step(&g.opt, &t, 1));
    check("kopt_scaler_step", kopt_scaler_step(&m.scaler, &g.opt, &t, 1, 0, NULL, &skipped));
    check("kopt_state_read", kopt_state_read(&g.opt, &t, KOPT_SLOT_WEIGHT, m.values));
    check("kopt_state_write", kopt_state_write(&g.opt, &t, KOPT_SLOT_WEIGHT, m.values));
    check("kopt_save", kopt_save(&g.opt, &t, 1, m.image, sizeof m.image));
    check("kopt_load", kopt_load(&g.opt, &t, 1, m.image, sizeof m.image));
    if ((kopt_state_size(&g.opt, &t) == 0) != (expected != KOPT_OK)) fail("kopt_state_size");
    if ((kopt_save_size(&g.opt, &t, 1) == 0) != (expected != KOPT_OK)) fail("kopt_save_size");
    if (strstr(kopt_explain(&g.opt, &t, 1), expected == KOPT_OK             ? "all fields"
                                            : expected == KOPT_ERROR_OPTION ? "reserved_"
                                                                            : kopt_result_string(expected)) == NULL)
        fail(kopt_explain(&g.opt, &t, 1));
}

int main(int count, char **arguments) {
    const char *const words[] = {"works", "version", "option", "uninitialized"};
    const kopt_result results[] = {KOPT_OK, KOPT_ERROR_VERSION, KOPT_ERROR_OPTION, KOPT_ERROR_UNINITIALIZED};
    int i, known = 0;
    for (i = 0; i < 4 && count > 1; i++)
        if (strcmp(arguments[1], words[i]) == 0) expected = results[i], known = 1;
    if (!known) return 2;
    memset(&g, 0x5A, sizeof g);
    memset(&m, 0, sizeof m);
    for (i = 0; i < N; i++) m.weight[i] = 0x3F80, m.grad[i] = 0xBF80;
    m.scaler = kopt_scaler_of();
#ifdef ZEROS
    memset(&g.opt, 0, sizeof g.opt);
#else
    g.opt = kopt_adamw(1e-3);
#endif
#ifdef OPTIMIZER_FIELD
    g.opt.OPTIMIZER_FIELD = 1;
#endif
    memcpy(&untouched, &m, sizeof m);
    call_all();
    if ((memcmp(&untouched, &m, sizeof m) == 0) != (expected != KOPT_OK)) fail("memory changed, or weights did not");
    for (i = 0; i < AROUND; i++)
        if (g.before[i] != 0x5A || g.after[i] != 0x5A) return fail("memory beside the optimizer changed"), 1;
    return failures != 0;
}
