/* test_misuse.c - what a careless program does: structs that are zero, counts inside the weights, a copy that nothing
   filled, compensations inside the weights, a checkpoint under another optimizer, a loss scale in the wrong order, a
   closure that leaves by longjmp. Each is done right or refused in words, and nothing is written then. The words are
   those of kopt_explain(), which must name the field. */
#define KAHAN_OPT_IMPLEMENTATION
#include "../../kahan_opt.h"

#include "tap.h"
#include "../bits/begun.h"
#include "reference.h"
#include "inputs.h"

#include <math.h>
#include <setjmp.h>

enum { N = 300, ROOM = 64 + 24 * N };

static union room { /* of any alignment */
    double align;
    unsigned char byte[ROOM];
} weight, grad, copy, state, floats, before[5];
static unsigned char image[ROOM + 4 * N + 256]; /* a checkpoint */
static union room *const rooms[5] = {&weight, &grad, &copy, &state, &floats};
static kopt_optimizer opt;
static kopt_tensor t;

static void photograph(void) {
    int i;
    for (i = 0; i < 5; ++i) before[i] = *rooms[i];
}

static int unchanged(void) {
    int i, same = 1;
    for (i = 0; i < 5; ++i) same &= !memcmp(&before[i], rooms[i], sizeof before[i]);
    return same;
}

static void build(kopt_optimizer o) {
    size_t i;
    opt = o;
    memset(&weight, 0, sizeof weight), memset(&state, 0, sizeof state), memset(&copy, 0x77, sizeof copy);
    t = kopt_tensor_of(weight.byte, KOPT_BF16, grad.byte, KOPT_BF16, N, state.byte, sizeof state.byte);
    for (i = 0; i < N; ++i) ref_set(grad.byte, 2, i, 0x3c00 + (uint32_t)(i * 37 % 500));
    for (i = 0; i < N; ++i) ref_set(floats.byte, 4, i, 0x3f800000 + (uint32_t)(i * 2654435761u >> 10));
}

static const float *initial(void) { return (const float *)(const void *)floats.byte; }

static void refuses(kopt_result got, kopt_result want, const char *what) {
    if (!ok(got == want && unchanged(), "%s: refused", what)) note("%s", kopt_result_string(got));
}

/* ---- structs that are zero --------------------------------------------------------------------------------------- */

/* Changes bits of the first 8 bytes of a step, which say what began it: 32 bits that are the same in all versions, and
   below them the version. */
static void flip(kopt_step *step, uint64_t bits) {
    uint64_t word;
    memcpy(&word, step, sizeof word);
    word ^= bits;
    memcpy(step, &word, sizeof word);
}

static void check_zero_structs(void) {
    static const kopt_optimizer none; /* static: all zero */
    static const kopt_accumulator no_accumulator;
    static const kopt_compressor no_compressor;
    static const kopt_scaler no_scaler;
    static const kopt_tensor zero;
    kopt_accumulator a = no_accumulator;
    kopt_compressor c = no_compressor;
    kopt_scaler scaler = no_scaler;
    kopt_step step, began;
    static union room stepped;
    kopt_norm norm = {0};
    int k;

    for (k = 0; k < 2; ++k) { /* by the function, and by fields of a zeroed struct */
        build(kopt_adamw(1e-2));
        if (k == 1) {
            t = zero;
            t.weight = weight.byte, t.grad = grad.byte, t.weight_format = t.grad_format = KOPT_BF16, t.n = N;
            t.state = state.byte, t.state_size = sizeof state.byte;
        }
        ok(kopt_state_init(&opt, &t, 1, initial()) == KOPT_OK && kopt_optimizer_step(&opt, &t, 1) == KOPT_OK,
           "a tensor %s is stepped", k ? "of a zeroed struct" : "of kopt_tensor_of()");
        if (k == 0) stepped = weight;
    }
    ok(!memcmp(&stepped, &weight, sizeof weight), "... and both end in the same bits");

    build(kopt_adamw(1e-2)); /* all fields of a tensor that are zero: fp32 */
    t = zero;
    t.weight = weight.byte, t.grad = grad.byte, t.n = N / 2, t.state = state.byte, t.state_size = sizeof state.byte;
    ok(kopt_state_size(&opt, &t) == 64 + 2 * 304 && kopt_state_init(&opt, &t, 1, initial()) == KOPT_OK &&
           !memcmp(weight.byte, floats.byte, 4 * (N / 2)) && kopt_optimizer_step(&opt, &t, 1) == KOPT_OK,
       "the weights of a zeroed tensor are fp32");
    ok(kopt_state_size(&opt, &zero) == 0 && kopt_state_init(&opt, &zero, 1, NULL) == KOPT_OK &&
           kopt_state_dither(&opt, &zero, 1) == KOPT_OK && kopt_optimizer_step(&opt, &zero, 1) == KOPT_OK &&
           kopt_list_length(&zero, 1) == 0 && strstr(kopt_explain(&opt, &zero, 1), "all fields") != NULL,
       "a tensor of zeros has no elements");

    build(none);
    opt.lr = 1e-2, opt.grad_scale = opt.clip = 1, opt.eps = 1e-8;
    memset(&step, 0, sizeof step);
    photograph();
    refuses(kopt_state_init(&opt, &t, 1, NULL), KOPT_ERROR_UNINITIALIZED,
            "state_init by an optimizer that nothing made");
    refuses(kopt_step_begin(&step, &opt), KOPT_ERROR_UNINITIALIZED, "step_begin by an optimizer that nothing made");
    refuses(kopt_optimizer_step(&opt, &t, 1), KOPT_ERROR_UNINITIALIZED,
            "optimizer_step by an optimizer that nothing made");
    ok(opt.step == 0 && kopt_state_size(&opt, &t) == 0, "... and no step is counted, no size is given");
    refuses(kopt_step_run(&step, &t, 1), KOPT_ERROR_STEP, "a step that was not begun");
    ok(strstr(kopt_result_string(KOPT_ERROR_UNINITIALIZED), "kopt_adamw()") != NULL, "the words say what to call");

    opt = kopt_adamw(1e-2);
    refuses(kopt_scaler_step(&scaler, &opt, &t, 1, 0, NULL, NULL), KOPT_ERROR_RANGE, "a zeroed scaler");
    a.sum = weight.byte, a.format = KOPT_BF16, a.n = N;
    refuses(kopt_accumulator_add(&a, grad.byte, KOPT_BF16, 1), KOPT_ERROR_UNINITIALIZED, "a zeroed accumulator");
    refuses(kopt_accumulator_read(&a, (float *)(void *)floats.byte), KOPT_ERROR_UNINITIALIZED,
            "... is not read either");
    c.code = KOPT_BF16, c.n = N;
    refuses(kopt_compress(&c, copy.byte, sizeof copy.byte, grad.byte, KOPT_BF16), KOPT_ERROR_UNINITIALIZED,
            "a zeroed compressor");
    ok(a.count == 0 && a.step == 0 && c.step == 0, "... and nothing is counted");
    memset(&a, 0xCC, sizeof a); /* what a debugger fills memory with */
    refuses(kopt_accumulator_add(&a, grad.byte, KOPT_BF16, 1), KOPT_ERROR_UNINITIALIZED, "an accumulator of 0xCC");

    build(kopt_adamw(1e-2));
    kopt_state_init(&opt, &t, 1, initial());
    t.rate_scale = -0.0;
    photograph();
    ok(kopt_step_begin(&began, &opt) == KOPT_OK, "begun");
    refuses(kopt_step_run(&began, &t, 1), KOPT_ERROR_RANGE, "a rate_scale of -0");
    t.rate_scale = 0, t.stable_scale = -0.0;
    photograph();
    refuses(kopt_step_run(&began, &t, 1), KOPT_ERROR_RANGE, "a stable_scale of -0");

    build(kopt_stable_adamw(1e-2));
    kopt_state_init(&opt, &t, 1, initial());
    ok(kopt_step_begin(&began, &opt) == KOPT_OK, "StableAdamW begins");
    photograph();
    flip(&began, (uint64_t)1 << 32);
    refuses(kopt_step_run(&began, &t, 1), KOPT_ERROR_STEP, "a step of whatever was in memory");
    flip(&began, (uint64_t)1 << 32 | 1);
    refuses(kopt_step_run(&began, &t, 1), KOPT_ERROR_VERSION, "a step that another version began");
    refuses(kopt_step_range(&began, &t, 1, 0, N), KOPT_ERROR_VERSION, "... or all of its elements");
    refuses(kopt_norm_add_stable(&norm, &began, &t, 0, N), KOPT_ERROR_VERSION, "... or what StableAdamW measures");
    flip(&began, 1);
    refuses(kopt_step_range(&began, &t, 1, 0, N / 2), KOPT_ERROR_STEP, "a part of a tensor that nothing has measured");
    ok(kopt_step_range(&began, &t, 1, N, N) == KOPT_OK, "... but an empty part is stepped");
    ok(kopt_step_range(&began, &t, 1, 0, N) == KOPT_OK, "... and the whole, which measures itself");
}

/* ---- memory that overlaps ---------------------------------------------------------------------------------------- */

static void check_counts_inside(void) {
    static const char *const name[] = {"weights", "gradient", "copy", "state"};
    kopt_step step;
    kopt_tensor two[2];
    kopt_counts counts = {0, 0, 0};
    static union room second[3];
    int i, at;
    build(kopt_adamw(1e-2));
    t.copy = copy.byte, t.copy_format = KOPT_BF16;
    kopt_state_init(&opt, &t, 1, initial());
    kopt_step_begin(&step, &opt);
    photograph();
    for (i = 0; i < 4; ++i)
        for (at = 0; at < 2; ++at) { /* at the first byte, and where only the first word of the counts is inside */
            size_t size = i == 3 ? kopt_state_size(&opt, &t) : 2 * N;
            t.counts = (kopt_counts *)(void *)(rooms[i]->byte + (at ? (size - 1) / 8 * 8 : 0));
            if (i == 1) { /* kopt_state_init() does not read the gradient */
                refuses(kopt_step_run(&step, &t, 1), KOPT_ERROR_OVERLAP, "counts in the gradient");
                continue;
            }
            if (kopt_step_run(&step, &t, 1) != KOPT_ERROR_OVERLAP ||
                kopt_state_init(&opt, &t, 1, NULL) != KOPT_ERROR_OVERLAP || !unchanged())
                ok(0, "counts in the %s", name[i]);
            else
                ok(1, "counts in the %s: refused", name[i]);
        }
    t.counts = (kopt_counts *)(void *)floats.byte;
    refuses(kopt_state_init(&opt, &t, 1, initial()), KOPT_ERROR_OVERLAP, "counts in the initial weights");

    two[0] = t, two[1] = t;
    two[0].counts = two[1].counts = &counts;
    two[1].weight = second[0].byte, two[1].state = second[1].byte, two[1].copy = second[2].byte, two[1].id = 1;
    kopt_state_init(&opt, &two[1], 1, initial());
    ok(kopt_optimizer_step(&opt, two, 2) == KOPT_OK && counts.wanted == 2 * N, "two tensors may have one kopt_counts");
    two[0].counts = (kopt_counts *)(void *)second[0].byte;
    ok(kopt_optimizer_step(&opt, two, 2) == KOPT_ERROR_OVERLAP, "counts in the weights of a neighbour: refused");
}

/* ---- the copy ---------------------------------------------------------------------------------------------------- */

static int copy_differs(void) {
    size_t i;
    int bad = 0;
    for (i = 0; i < N; ++i)
        bad +=
            ref_get(t.copy, ref_width(t.copy_format), i) !=
            ref_narrow(t.copy_format, ref_widen(t.weight_format, ref_get(weight.byte, ref_width(t.weight_format), i)));
    return bad;
}

static void check_copies(void) {
    kopt_tensor two[2];
    int format, to, rounding, with, bad = 0, cases = 0;
    for (format = KOPT_F32; format <= KOPT_FP16; ++format)
        for (to = KOPT_F32; to <= KOPT_FP16; ++to)
            for (rounding = 0; rounding < ROUNDINGS; ++rounding)
                for (with = 0; with < 2; ++with, ++cases) {
                    build(kopt_adamw(1e-2));
                    t.weight_format = (kopt_format)format, opt.rounding = (kopt_rounding)rounding;
                    memcpy(weight.byte, grad.byte, 4 * N);
                    t.copy = copy.byte, t.copy_format = (kopt_format)to;
                    bad += kopt_state_init(&opt, &t, 1, with ? initial() : NULL) != KOPT_OK || copy_differs();
                    ref_set(floats.byte, 4, 3, 0x40490fdb);
                    bad += kopt_state_write(&opt, &t, KOPT_SLOT_WEIGHT, initial()) != KOPT_OK || copy_differs();
                    memset(copy.byte, 0x77, sizeof copy.byte);
                    bad += kopt_save(&opt, &t, 1, image, sizeof image) != KOPT_OK;
                    bad += kopt_load(&opt, &t, 1, image, sizeof image) != KOPT_OK || copy_differs();
                }
    ok(!bad, "the copy is filled by init, writing weights and load: %d of %d are not", bad, cases);

    build(kopt_adamw(1e-2));
    opt.rounding = KOPT_NEAREST;
    t.copy = floats.byte, t.copy_format = KOPT_F32;
    before[0] = floats;
    ok(kopt_state_init(&opt, &t, 1, initial()) == KOPT_OK && !copy_differs(),
       "the initial weights may be the fp32 copy");
    for (with = 0; with < N; ++with)
        bad += ref_get(weight.byte, 2, (size_t)with) != ref_narrow(KOPT_BF16, ref_get(before[0].byte, 4, (size_t)with));
    ok(!bad, "... and all of them are read before it is written");
    photograph();
    two[0] = two[1] = t, two[1].n = 0;
    refuses(kopt_state_init(&opt, two, 2, initial()), KOPT_ERROR_OVERLAP, "initial weights of two, the copy of one");
    t.copy_format = KOPT_BF16;
    refuses(kopt_state_init(&opt, &t, 1, initial()), KOPT_ERROR_OVERLAP, "initial weights that are a 16-bit copy");
    t.copy = floats.byte + 4, t.copy_format = KOPT_F32;
    refuses(kopt_state_init(&opt, &t, 1, initial()), KOPT_ERROR_OVERLAP, "initial weights partly over the copy");
    t.copy = floats.byte + 4 * N - 1;
    refuses(kopt_state_init(&opt, &t, 1, initial()), KOPT_ERROR_OVERLAP, "... by one byte");

    build(kopt_ranger(1e-2));
    t.copy = floats.byte, t.copy_format = KOPT_F32;
    bad = kopt_state_init(&opt, &t, 1, initial()) != KOPT_OK;
    for (with = 0; with < N; ++with) ref_set(floats.byte, 4, (size_t)with, 0x3f812345u + 0x10001u * (unsigned)with);
    before[0] = floats;
    bad += kopt_state_write(&opt, &t, KOPT_SLOT_WEIGHT, initial()) != KOPT_OK || copy_differs();
    ok(!bad, "what the program stored in the fp32 copy may be written as the weights");
    bad = kopt_state_read(&opt, &t, KOPT_SLOT_WEIGHT, (float *)(void *)copy.byte) != KOPT_OK;
    for (with = 0; with < N; ++with)
        bad += ref_get(copy.byte, 4, (size_t)with) - ref_get(before[0].byte, 4, (size_t)with) + 64 > 128; /* 2^-17 */
    ok(!bad, "... and all of it is read before the copy is written: %d differ", bad);
    photograph();
    refuses(kopt_state_write(&opt, &t, KOPT_SLOT_FIRST_MOMENT, initial()), KOPT_ERROR_OVERLAP, "moments from the copy");
    refuses(kopt_state_read(&opt, &t, KOPT_SLOT_WEIGHT, (float *)(void *)floats.byte), KOPT_ERROR_OVERLAP,
            "weights read into the copy");
    t.copy_format = KOPT_BF16;
    refuses(kopt_state_write(&opt, &t, KOPT_SLOT_WEIGHT, initial()), KOPT_ERROR_OVERLAP, "weights from a 16-bit copy");
    t.copy = floats.byte + 4, t.copy_format = KOPT_F32;
    refuses(kopt_state_write(&opt, &t, KOPT_SLOT_WEIGHT, initial()), KOPT_ERROR_OVERLAP,
            "weights partly over the copy");
}

/* ---- an addition to an array ------------------------------------------------------------------------------------- */

static void check_kahan_add(void) {
    static const kopt_random_key zero;
    const float *const delta = initial();
    kopt_random_key far = zero;
    int f;
    far.first_index = (uint64_t)0 - 1;
    for (f = KOPT_BF16; f <= KOPT_FP16; ++f) {
        const kopt_format format = (kopt_format)f;
        build(kopt_sgd(1, 0));
        photograph();
        refuses(kopt_kahan_add(NULL, state.byte, format, delta, N, zero), KOPT_ERROR_NULL,
                "an addition without weights");
        refuses(kopt_kahan_add(weight.byte, NULL, format, delta, N, zero), KOPT_ERROR_NULL,
                "... without compensations");
        refuses(kopt_kahan_add(weight.byte, state.byte, format, NULL, N, zero), KOPT_ERROR_NULL, "... without a delta");
        refuses(kopt_kahan_add(weight.byte, weight.byte, format, delta, N, zero), KOPT_ERROR_OVERLAP,
                "compensations that are the weights");
        refuses(kopt_kahan_add(weight.byte, weight.byte + N, format, delta, N, zero), KOPT_ERROR_OVERLAP,
                "compensations n bytes behind the weights, not n numbers");
        refuses(kopt_kahan_add(floats.byte, state.byte, format, delta, N, zero), KOPT_ERROR_OVERLAP,
                "16-bit weights over their delta");
        refuses(kopt_kahan_add(weight.byte, floats.byte + 4 * N - 1, format, delta, N, zero), KOPT_ERROR_OVERLAP,
                "compensations over the last byte of the delta");
        refuses(kopt_kahan_add(weight.byte, state.byte, format, delta, (size_t)0 - N, zero), KOPT_ERROR_BOUNDS,
                "a length below zero");
        refuses(kopt_kahan_add(weight.byte, state.byte, format, delta, N, far), KOPT_ERROR_BOUNDS,
                "an index below zero");
        ok(kopt_kahan_add(NULL, NULL, format, NULL, 0, zero) == KOPT_OK && unchanged(),
           "an empty array has no pointers");
        ok(kopt_kahan_add(weight.byte, weight.byte + 2 * N, format, delta, N, zero) == KOPT_OK,
           "compensations right behind the weights are no overlap");
        ok(memcmp(before[0].byte, weight.byte, 2 * N) && !memcmp(before[4].byte, floats.byte, sizeof floats.byte) &&
               !memcmp(before[0].byte + 4 * N, weight.byte + 4 * N, ROOM - 4 * N),
           "... and the delta stays as it was");
    }
    photograph();
    refuses(kopt_kahan_add(weight.byte, state.byte, KOPT_F32, delta, N, zero), KOPT_ERROR_OPTION, "fp32 weights");
    refuses(kopt_kahan_add(weight.byte, state.byte, KOPT_Q8, delta, N, zero), KOPT_ERROR_OPTION, "weights of 8 bits");
    refuses(kopt_kahan_add(weight.byte, state.byte, (kopt_format)-1, delta, N, zero), KOPT_ERROR_OPTION, "no format");
}

/* ---- ranges within a block of 8-bit moments ---------------------------------------------------------------------- */

static void check_ranges(void) {
    const kopt_optimizer made[] = {kopt_sgd(0.01, 0), kopt_ema(0.99), kopt_adamw(0.01), kopt_sgd(0.01, 0.9)};
    int i, bad = 0;
    for (i = 0; i < 4; ++i) {
        kopt_step step;
        int moved;
        build(made[i]);
        opt.first_moment_format = opt.second_moment_format = KOPT_Q8;
        bad += kopt_state_init(&opt, &t, 1, NULL) != KOPT_OK || kopt_step_begin(&step, &opt) != KOPT_OK;
        photograph();
        bad += kopt_step_range(&step, &t, 1, 3, 17) != KOPT_OK;
        moved = !unchanged();
        ok(!bad && moved == (i < 2), "a range within a block, KOPT_Q8, rule %d: %s", (int)opt.rule,
           i < 2 ? "it keeps no moments, so stepped" : "rounded down to nothing");
        photograph();
        bad += kopt_step_range(&step, &t, 1, 290, N) != KOPT_OK; /* the last block has 44 elements */
        for (moved = 0;
             moved < N && ref_get(weight.byte, 2, (size_t)moved) == ref_get(before[0].byte, 2, (size_t)moved);)
            ++moved;
        ok(!bad && moved == (i < 2 ? 290 : 256), "... to the end of the tensor: from element %d on", moved);
    }
}

/* ---- a checkpoint under another optimizer ------------------------------------------------------------------------ */

static kopt_result save(void) { return kopt_save(&opt, &t, 1, image, sizeof image); }
static kopt_result load(kopt_optimizer *o) { return kopt_load(o, &t, 1, image, sizeof image); }

/* Both of a head: its options, and its first tensor. *end: where that ends. */
static kopt_result inspect(const void *h, size_t size, kopt_optimizer *o, kopt_tensor *first, uint64_t *end) {
    const kopt_result result = kopt_inspect(h, size, o, NULL, NULL);
    *end = 0;
    return result != KOPT_OK ? result : kopt_inspect_tensor(h, size, end, first);
}

/* What a state block does not say is the default of its rule; all numbers that it has are 0. */
static void check_inspected_defaults(void) {
    const kopt_optimizer made[] = {kopt_ema(0), kopt_lion(1e-3), kopt_adan(1e-3), kopt_ranger(1e-3)};
    kopt_optimizer seen;
    kopt_tensor shape;
    uint64_t end;
    int i, bad = 0;
    for (i = 0; i < 4; i++) {
        build(made[i]);
        bad += kopt_state_init(&opt, &t, 1, initial()) != KOPT_OK;
        bad += inspect(state.byte, 64, &seen, &shape, &end) != KOPT_OK || ref_bits((float)seen.lr) != 0;
        bad += ref_bits((float)seen.max_lr) != 0 || seen.decay_mode != made[i].decay_mode;
        bad += ref_bits((float)seen.weight_decay) != ref_bits((float)made[i].weight_decay);
        bad += ref_bits((float)seen.beta1) != ref_bits((float)made[i].beta1);
    }
    ok(!bad, "inspect: a state block of any rule: no rate, and the defaults of the rule: %d wrong", bad);
}

static void check_identity(void) {
    unsigned char *const saved = image + 176; /* the header of the tensor */
    kopt_optimizer o, was;
    kopt_tensor shape;
    uint64_t count = 9, whole = 9, end = 9;
    size_t size;
    memset(&shape, 0xA5, sizeof shape);
#define OTHER(make, change)                                                                           \
    do {                                                                                              \
        build(make);                                                                                  \
        opt.step = 5;                                                                                 \
        ok(kopt_state_init(&opt, &t, 1, initial()) == KOPT_OK && save() == KOPT_OK, "saved: " #make); \
        o = opt;                                                                                      \
        o.step = 0;                                                                                   \
        change;                                                                                       \
        photograph();                                                                                 \
        refuses(load(&o), KOPT_ERROR_MISMATCH, "loaded after " #change);                              \
        ok(o.step == 0 && load(&opt) == KOPT_OK, "... and loaded as it was");                         \
    } while (0)
    OTHER(kopt_adamw(1e-3), o = kopt_stable_adamw(1e-3));
    OTHER(kopt_stable_adamw(1e-3), o.stable = 0);
    OTHER(kopt_adamw(1e-3), o = kopt_adam(1e-3));
    OTHER(kopt_adamw(1e-3), o.decay_mode = KOPT_DECAY_FULLY_DECOUPLED);
    OTHER(kopt_adamw(1e-3), o.amsgrad = 1);
    OTHER(kopt_adamw(1e-3), o.moment_rounding = KOPT_NEAREST);
    OTHER(kopt_adamw(1e-3), o.residual_rounding = KOPT_NEAREST);
    OTHER(kopt_adamw(1e-3), o.rounding = KOPT_EXACT);
    OTHER(kopt_adamw(1e-3), o.rounding = KOPT_FEEDBACK);
    OTHER(kopt_adamw(1e-3), o.first_moment_format = o.second_moment_format = KOPT_FP16);
    OTHER(kopt_adamw(1e-3), o = kopt_radam(1e-3));
    OTHER(kopt_sgd(1e-3, 0.9), o.nesterov = 1);
#undef OTHER

    build(kopt_adamw(1e-3));
    ok(kopt_state_init(&opt, &t, 1, initial()) == KOPT_OK && save() == KOPT_OK, "saved: bf16");
    photograph();
    t.weight_format = KOPT_FP16;
    refuses(load(&opt), KOPT_ERROR_MISMATCH, "loaded as fp16");
    t.weight_format = KOPT_F32;
    refuses(load(&opt), KOPT_ERROR_MISMATCH, "loaded as fp32");
    t.weight_format = KOPT_BF16;
    ok(load(&opt) == KOPT_OK, "... and loaded as it was");

    build(kopt_adamw(1e-3));
    opt.rounding = KOPT_EXACT;
    kopt_state_init(&opt, &t, 1, NULL);
    o = opt, o.residual_rounding = KOPT_NEAREST;
    ok(save() == KOPT_OK && load(&o) == KOPT_OK, "a rounding that does not apply may differ");

    build(kopt_adamw(0.1));
    opt.weight_decay = 0.3, opt.beta1 = 0.7, opt.beta2 = 0.9, opt.seed = 11;
    t.id = 3, t.first_index = 256;
    kopt_state_init(&opt, &t, 1, NULL);
    opt.step = 9;
    size = kopt_state_size(&opt, &t);
    was = kopt_sgd(0, 0);
    ok(save() == KOPT_OK && inspect(saved, 64, &was, &shape, &end) == KOPT_OK &&
           end == kopt_save_size(&opt, &t, 1) - 180,
       "inspect: a tensor in a checkpoint");
    ok(was.rule == KOPT_RULE_ADAM && was.decay_mode == KOPT_DECAY_DECOUPLED && !was.stable && !was.amsgrad &&
           was.rounding == KOPT_KAHAN && shape.weight_format == KOPT_BF16 && was.first_moment_format == KOPT_BF16 &&
           was.moment_rounding == KOPT_STOCHASTIC && was.residual_rounding == KOPT_STOCHASTIC,
       "inspect: rule, formats and roundings");
    ok(ref_bits((float)was.lr) == ref_bits(0.1f) && ref_bits((float)was.weight_decay) == ref_bits(0.3f) &&
           ref_bits((float)was.beta1) == ref_bits(0.7f) && ref_bits((float)was.beta2) == ref_bits(0.9f),
       "inspect: lr, weight_decay, beta1, beta2");
    ok(was.seed == 11 && was.step == 9 && shape.n == N && shape.id == 3 && shape.first_index == 256,
       "inspect: seed, step, n, id, first_index");
    ok(shape.weight == NULL && shape.copy == NULL && shape.state == NULL && shape.state_size == 0 &&
           shape.grad_format == KOPT_F32 && !(shape.rate_scale > 0) && shape.no_decay == 0 && shape.counts == NULL,
       "inspect: the other fields of a tensor are 0");
    ok(kopt_state_size(&was, &shape) == size && kopt_inspect(saved, 64, NULL, NULL, NULL) == KOPT_OK &&
           kopt_inspect(saved, 64, NULL, &count, &whole) == KOPT_OK && count == 1 && whole == end,
       "inspect: an optimizer that works; one tensor of so many bytes");
    o = kopt_adamw(0.2);
    ok(load(&o) == KOPT_OK && o.step == 9 && o.seed == 11 && fabs(o.lr - 0.1) < 1e-12,
       "other numbers may differ: loaded, they are those of the checkpoint");
    memset(&shape, 0xA5, sizeof shape);
    ok(inspect(state.byte, 64, &was, &shape, &end) == KOPT_OK && was.rule == KOPT_RULE_ADAM && !was.amsgrad &&
           was.rounding == KOPT_KAHAN && shape.weight_format == KOPT_BF16 && was.first_moment_format == KOPT_BF16 &&
           shape.n == N && shape.id == 3 && shape.first_index == 256 && kopt_state_size(&was, &shape) == size,
       "inspect: a state block: what lays it out, and whose it is");
    count = whole = 9;
    ok(end == size && kopt_inspect(state.byte, size, NULL, &count, &whole) == KOPT_OK && count == 1 && whole == size &&
           kopt_inspect_tensor(state.byte, size, &end, &shape) == KOPT_ERROR_BOUNDS && end == size,
       "... and how long it is: there is one tensor in it");
    ok(was.seed == 0 && was.step == 0 && ref_bits((float)was.lr) == 0 && was.decay_mode == KOPT_DECAY_L2 &&
           ref_bits((float)was.beta2) == ref_bits(0.999f),
       "... and nothing else");
    saved[48] = saved[49] = 0, saved[50] = 0x80, saved[51] = 0x7f;
    ok(kopt_inspect(saved, 64, &was, NULL, NULL) == KOPT_OK && was.lr > 1e300, "inspect: an infinite lr");
    end = 0;
    ok(kopt_inspect(NULL, 64, &was, NULL, NULL) == KOPT_ERROR_NULL &&
           kopt_inspect(saved, 63, &was, NULL, NULL) == KOPT_ERROR_SIZE &&
           kopt_inspect_tensor(NULL, 64, &end, &shape) == KOPT_ERROR_NULL &&
           kopt_inspect_tensor(saved, 64, NULL, &shape) == KOPT_ERROR_NULL &&
           kopt_inspect_tensor(saved, 63, &end, &shape) == KOPT_ERROR_SIZE && end == 0,
       "inspect: no header, half a header");
    saved[10] = 2;
    ok(kopt_inspect(saved, 64, &was, NULL, NULL) == KOPT_ERROR_STATE, "inspect: neither a block nor a checkpoint");
    saved[10] = 1, saved[4] = 1;
    ok(kopt_inspect(saved, 64, &was, NULL, NULL) == KOPT_ERROR_STATE, "inspect: a block of version 0.1");
    saved[4] = 2, saved[8] = 3;
    ok(kopt_inspect(saved, 64, &was, NULL, NULL) == KOPT_ERROR_STATE, "inspect: 8-bit codes of version 0.1");
    saved[8] = 1, saved[5] = 8;
    ok(kopt_inspect(saved, 64, &was, NULL, NULL) == KOPT_ERROR_STATE, "inspect: a rule that does not exist");
    saved[5] = KOPT_RULE_ADAM_ATAN2, saved[9] = 2 + 16;
#ifndef KAHAN_OPT_VMATH
    ok(kopt_inspect(saved, 64, &was, NULL, NULL) == KOPT_ERROR_OPTION, "inspect: a rule that this build leaves out");
#endif
    saved[5] = KOPT_RULE_LION;
    ok(kopt_inspect(saved, 64, &was, NULL, NULL) == KOPT_ERROR_STATE, "inspect: Lion with two moments");
    build(kopt_adamw(1e-3));
    kopt_state_init(&opt, &t, 1, NULL);
    state.byte[9] = 0, state.byte[5] = KOPT_RULE_EMA; /* with compensations, an average has a block */
    ok(kopt_inspect(state.byte, 64, &was, NULL, NULL) == KOPT_OK, "inspect: a block of kopt_ema()");
    state.byte[7] = KOPT_STOCHASTIC;
    ok(kopt_inspect(state.byte, 64, &was, NULL, NULL) == KOPT_ERROR_STATE, "inspect: a block that stores nothing");
#ifndef KAHAN_OPT_VMATH
    {
        const double sharpness = 2;
        const uint16_t one = 1;
        build(kopt_adamw(1e-3));
        kopt_state_init(&opt, &t, 1, NULL), save();
        image[5] = KOPT_RULE_ADAM_ATAN2;
        photograph();
        ok(kopt_inspect(image, sizeof image, &was, NULL, NULL) == KOPT_ERROR_OPTION,
           "inspect: a checkpoint of Adam-atan2");
        refuses(load(&opt), KOPT_ERROR_MISMATCH, "... loaded as AdamW");
        build(kopt_lion(1e-3));
        kopt_state_init(&opt, &t, 1, NULL), save();
        for (size = 0; size < 8; ++size)
            image[160 + (*(const unsigned char *)&one ? size : 7 - size)] = ((const unsigned char *)&sharpness)[size];
        photograph();
        ok(kopt_inspect(image, sizeof image, &was, NULL, NULL) == KOPT_ERROR_OPTION, "inspect: one of smooth Lion");
        refuses(load(&opt), KOPT_ERROR_CHECKSUM, "... loaded as Lion");
    }
#endif
    build(kopt_sgd(0.5, 0.9));
    opt.nesterov = 1;
    kopt_state_init(&opt, &t, 1, NULL);
    ok(kopt_inspect(state.byte, ROOM, &was, NULL, NULL) == KOPT_OK && was.momentum > 0 && was.momentum < 1e-44 &&
           !was.nesterov && kopt_state_size(&was, &t) == kopt_state_size(&opt, &t),
       "inspect: a state block with a momentum, whatever it is");
    save();
    ok(kopt_inspect(saved, 64, &was, NULL, NULL) == KOPT_OK && was.rule == KOPT_RULE_SGD && was.nesterov &&
           ref_bits((float)was.momentum) == ref_bits(0.9f) && ref_bits((float)was.dampening) == 0,
       "inspect: SGD's momentum, no dampening");
    build(kopt_sgd(0.5, 0.9));
    opt.dampening = 0.25;
    kopt_state_init(&opt, &t, 1, NULL), save();
    ok(kopt_inspect(saved, 64, &was, NULL, NULL) == KOPT_OK && ref_bits((float)was.momentum) == ref_bits(0.9f) &&
           was.dampening > 0.24 && was.dampening < 0.26,
       "inspect: SGD's momentum and dampening");
    build(kopt_sgd(0.5, 1e-300)); /* 0 as fp32 */
    kopt_state_init(&opt, &t, 1, NULL), save();
    ok(kopt_inspect(saved, 64, &was, NULL, NULL) == KOPT_OK && was.momentum > 0 && was.momentum < 1e-44 &&
           kopt_state_size(&was, &t) == kopt_state_size(&opt, &t),
       "inspect: a momentum that fp32 does not have still keeps a moment");
    build(kopt_sgd(0.5, 0));
    kopt_state_init(&opt, &t, 1, NULL), save();
    saved[59] = 0x3f; /* damaged: 0.5, and no moment */
    ok(kopt_inspect(saved, 64, &was, NULL, NULL) == KOPT_OK && !(was.momentum > 0) &&
           kopt_state_size(&was, &t) == kopt_state_size(&opt, &t),
       "inspect: no momentum where there is no moment");
    build(kopt_adamw(0.5));
    opt.rounding = KOPT_COMPACT, opt.moment_rounding = KOPT_NEAREST;
    kopt_state_init(&opt, &t, 1, NULL), save();
    ok(kopt_inspect(saved, 64, &was, NULL, NULL) == KOPT_OK && was.rounding == KOPT_COMPACT &&
           was.moment_rounding == KOPT_NEAREST && was.residual_rounding == KOPT_STOCHASTIC,
       "inspect: moments rounded to nearest");
    build(kopt_adamw(0.5));
    opt.residual_rounding = KOPT_NEAREST;
    kopt_state_init(&opt, &t, 1, NULL), save();
    ok(kopt_inspect(saved, 64, &was, NULL, NULL) == KOPT_OK && was.moment_rounding == KOPT_STOCHASTIC &&
           was.residual_rounding == KOPT_NEAREST,
       "inspect: compensation rounded to nearest");

    build(kopt_adamw(1e-3));
    kopt_state_init(&opt, &t, 1, NULL);
    t.weight_format = KOPT_F32, t.n = N / 2;
    photograph();
    refuses(kopt_optimizer_step(&opt, &t, 1), KOPT_ERROR_MISMATCH, "fp32 weights on a bf16 block");
    t.n = N;
    refuses(kopt_optimizer_step(&opt, &t, 1), KOPT_ERROR_MISMATCH, "... of as many elements");
    refuses(save(), KOPT_ERROR_MISMATCH, "... saving it");
    t.weight_format = KOPT_BF16, t.state_size = 63;
    refuses(kopt_optimizer_step(&opt, &t, 1), KOPT_ERROR_SIZE, "a block smaller than a header");
    *(unsigned char *)t.state ^= 1;
    photograph();
    refuses(kopt_optimizer_step(&opt, &t, 1), KOPT_ERROR_SIZE, "... whatever is in it");
}

/* ---- arrays of another type -------------------------------------------------------------------------------------- */

/* KOPT_TENSOR() takes arrays whose elements have the right size; others do not compile. */
static void check_typed(void) {
    static kopt_bf16 w16[4], g16[4];
    static float w32[4], g32[4];
    static unsigned char block[KOPT_STATE_BYTES(4, 8)];
    kopt_tensor typed[5], x;
    static const kopt_format format[5] = {KOPT_BF16, KOPT_BF16, KOPT_FP16, KOPT_FP16, KOPT_F32};
    static const kopt_format grads[5] = {KOPT_BF16, KOPT_F32, KOPT_FP16, KOPT_F32, KOPT_F32};
    kopt_optimizer o = kopt_adamw(1e-3);
    kopt_step step;
    size_t evaluated[2] = {0, 0};
    int k, other, bad = 0;
    typed[0] = KOPT_TENSOR(KOPT_BF16, w16, g16, 4, block, sizeof block);
    typed[1] = KOPT_TENSOR(KOPT_BF16, w16, g32, 4, block, sizeof block);
    typed[2] = KOPT_TENSOR(KOPT_FP16, &w16[0], g16, 4, block, sizeof block);
    typed[3] = KOPT_TENSOR(KOPT_FP16, w16 + 0, g32, 2 + 2, block, sizeof block - 0);
    typed[4] = KOPT_TENSOR(KOPT_F32, w32, g32, 4, block, sizeof block);
    for (k = 0; k < 5; ++k) {
        x = kopt_tensor_of(k < 4 ? (void *)w16 : (void *)w32, format[k], k % 2 || k == 4 ? (void *)g32 : (void *)g16,
                           grads[k], 4, block, sizeof block);
        bad += memcmp(&x, &typed[k], sizeof x) != 0;
        bad += kopt_state_init(&o, &typed[k], 1, NULL) != KOPT_OK || kopt_optimizer_step(&o, &typed[k], 1) != KOPT_OK;
        for (other = KOPT_F32; other <= KOPT_FP16; ++other) { /* another format after the block was made */
            const kopt_result want = other == (int)format[k] ? KOPT_OK : KOPT_ERROR_MISMATCH;
            x = typed[k], x.weight_format = (kopt_format)other;
            if (other == KOPT_F32) x.weight = w32;
            bad += kopt_step_begin(&step, &o) != KOPT_OK || kopt_step_run(&step, &x, 1) != want;
            bad += kopt_optimizer_step(&o, &x, 1) != want || kopt_save_size(&o, &x, 1) == 0;
        }
    }
    ok(!bad, "KOPT_TENSOR() is kopt_tensor_of() with the formats of the arrays: %d wrong", bad);
    x = KOPT_TENSOR(KOPT_BF16, w16, g16, ++evaluated[0], block, ++evaluated[1]);
    ok(evaluated[0] == 1 && evaluated[1] == 1 && x.n == 1 && x.state_size == 1, "... which evaluates them once");
    x = kopt_tensor_of(w16, KOPT_BF16, g32, KOPT_BF16, 4, block, sizeof block);
    ok(x.reserved32_ == 0 && x.grad == g32 && x.grad_format == KOPT_BF16 && KOPT_STATE_BYTES(4, 8) == 64 + 32 + 75,
       "kopt_tensor_of() takes any pointers");
}

/* Words for humans: NULL, no constructor, and what no field of the optimizer is to blame for. */
static void check_words(void) {
    static const kopt_optimizer none;
    kopt_optimizer o = kopt_ema(0.9);
    ok(!strcmp(kopt_explain(NULL, NULL, 0), "the optimizer is NULL"), "NULL");
    ok(!strcmp(kopt_explain(&none, NULL, 0), kopt_result_string(KOPT_ERROR_UNINITIALIZED)), "zeros");
    ok(strstr(kopt_explain(&o, NULL, 0), "other arguments") != NULL, "a valid one");
    o.zero_grad = 1;
    ok(strstr(kopt_explain(&o, NULL, 0), "zero_grad") != NULL, "%s", kopt_explain(&o, NULL, 0));
    o = kopt_ema(-1);
    ok(!strncmp(kopt_explain(&o, NULL, 0), "beta1, the decay:", 17), "%s", kopt_explain(&o, NULL, 0));
    o = kopt_lion(1e-3);
    o.sharpness = -1, o.lr = -1; /* the first of two */
    ok(!strncmp(kopt_explain(&o, NULL, 0), "lr:", 3), "%s", kopt_explain(&o, NULL, 0));
    o.sharpness = 1, o.lr = 1; /* a function that is not here */
    ok(!strncmp(kopt_explain(&o, NULL, 0), "sharpness: smooth Lion needs", 28), "%s", kopt_explain(&o, NULL, 0));
    o = kopt_adamw(1e-3);
    o.rule = (kopt_rule)9;
    ok(!strncmp(kopt_explain(&o, NULL, 0), "rule:", 5), "%s", kopt_explain(&o, NULL, 0));
    o.made_ = 0x12345678;
    ok(!strcmp(kopt_explain(&o, &t, 1), kopt_result_string(KOPT_ERROR_UNINITIALIZED)), "no constructor");
    o = kopt_adamw(1e-3);
    ++o.made_; /* the next version: a plug-in that was reloaded */
    ok(!strcmp(kopt_explain(&o, &t, 1), kopt_result_string(KOPT_ERROR_VERSION)), "the constructor of another version");
}

/* The same of tensors: of two whose second is wrong, with the first words that must come. Without an optimizer only
   the fields are judged. */
static void check_tensor_words(void) {
    enum { CASES = 24 };
    static const char *const words[CASES] = {"weight_format",
                                             "grad_format",
                                             "copy_format",
                                             "reserved_ of a tensor",
                                             "n:",
                                             "first_index:",
                                             "rate_scale or stable_scale",
                                             "weight: NULL",
                                             "state: NULL",
                                             "state_size: less than kopt_state_size()",
                                             "weight, state, copy or counts: two of them overlap",
                                             "weight, state, copy or counts: two of them overlap",
                                             "id:",
                                             "state: not initialized",
                                             "state: not initialized",
                                             "state: it was made under another rule",
                                             "state: it was made under another rule",
                                             "weight_format: another",
                                             "rounding or the format of a moment: another",
                                             "rounding or the format of a moment: another",
                                             "id: another",
                                             "n: another",
                                             "first_index: another",
                                             "weight, grad, state, copy or counts: one overlaps the tensor before"};
    static union room second[2];
    kopt_tensor two[2];
    int i, bad = 0;
    for (i = 0; i < CASES; ++i) {
        const char *explained, *alone;
        kopt_tensor *const x = &two[1];
        kopt_optimizer o;
        build(kopt_adamw(1e-3));
        two[0] = two[1] = t;
        two[1].weight = second[0].byte, two[1].state = second[1].byte;
        two[1].id = 1, two[1].n = N - 7, two[1].first_index = 16;
        if (kopt_state_init(&opt, two, 2, NULL) != KOPT_OK || !strstr(kopt_explain(&opt, two, 2), "all fields"))
            ok(0, "a valid list");
        o = opt;
        if (i == 0) x->weight_format = KOPT_Q8;
        if (i == 1) x->grad_format = (kopt_format)9;
        if (i == 2) x->copy = copy.byte, x->copy_format = KOPT_Q1;
        if (i == 3) x->reserved32_ = 4;
        if (i == 4) x->n = SIZE_MAX / 32;
        if (i == 5) x->first_index = UINT64_MAX;
        if (i == 6) x->stable_scale = -1;
        if (i == 7) x->weight = NULL;
        if (i == 8) x->state = NULL;
        if (i == 9) x->state_size = kopt_state_size(&o, x) - 1;
        if (i == 10) x->weight = second[1].byte + 100;
        if (i == 11) x->counts = (kopt_counts *)(void *)second[0].byte;
        if (i == 12) x->id = 0;
        if (i == 13) second[1].byte[0] ^= 1;
        if (i == 14) second[1].byte[4] = 1; /* of version 0.1 */
        if (i == 15) o = kopt_sgd(0.1, 0.9), two[0].n = 0;
        if (i == 16) o.amsgrad = 1, two[0].n = 0;
        if (i == 17) x->weight_format = KOPT_FP16;
        if (i == 18) o.rounding = KOPT_EXACT, two[0].n = 0;
        if (i == 19) o.first_moment_format = o.second_moment_format = KOPT_FP16, two[0].n = 0;
        if (i == 20) x->id = 2;
        if (i == 21) x->n = N - 8;
        if (i == 22) x->first_index = 17;
        if (i == 23) x->weight = t.weight;
        explained = kopt_explain(&o, two, 2), alone = kopt_explain(NULL, two, 2);
        if (!ok(!strncmp(explained, words[i], strlen(words[i])), "of a list: %s", words[i])) note("%s", explained);
        bad += i < 7 ? strcmp(alone, explained) != 0 : !strstr(alone, "all fields");
        bad += kopt_optimizer_step(&o, two, 2) == KOPT_OK;
        o.lr = -1; /* the optimizer comes first */
        bad += strncmp(kopt_explain(&o, two, 2), "lr:", 3) != 0;
    }
    ok(!bad, "... each is refused by a step; a field also without an optimizer, and after the optimizer: %d wrong",
       bad);
    ok(strstr(kopt_explain(&opt, NULL, 2), "all fields") && strstr(kopt_explain(NULL, two, 0), "NULL") &&
           strstr(kopt_explain(&opt, two, 0), "all fields"),
       "no list, or no length of it");
    build(kopt_sgd(0.1, 0)), opt.rounding = KOPT_NEAREST;
    t.state = NULL, t.state_size = 0, t.grad = NULL;
    ok(strstr(kopt_explain(&opt, &t, 1), "other arguments") != NULL, "a gradient that is missing is another argument");
    opt.lr = 3e38, opt.weight_decay = 10, opt.decay_mode = KOPT_DECAY_DECOUPLED, t.weight = NULL;
    ok(!strncmp(kopt_explain(&opt, &t, 1), "lr * weight_decay", 17), "a product comes before a tensor");
}

/* The same of fresh blocks, as kopt_state_init() refuses them: their mark is not there yet, so it is not the reason. */
static void check_fresh_words(void) {
    static const char *const words[] = {"id:",
                                        "state_size: less than kopt_state_size()",
                                        "weight_format",
                                        "state: NULL",
                                        "weight, grad, state, copy or counts: one overlaps the tensor before",
                                        "weight, state, copy or counts: two of them overlap",
                                        "state: not initialized"};
    static union room second[2];
    int i;
    for (i = 0; i < 7; ++i) {
        kopt_tensor two[2];
        const char *explained;
        build(kopt_adamw(1e-3));
        memset(t.state, 0, 64);
        memset(second[1].byte, 0, 64);
        two[0] = two[1] = t;
        two[1].weight = second[0].byte, two[1].state = second[1].byte, two[1].id = 1;
        if (i == 0) two[1].id = 0;
        if (i == 1) two[0].state_size = (size_t)N * 4 + 139;
        if (i == 2) two[1].weight_format = KOPT_Q8;
        if (i == 3) two[1].state = NULL;
        if (i == 4) two[1].state = t.state;
        if (i == 5) two[0].copy = two[0].weight, two[0].copy_format = KOPT_BF16;
        explained = kopt_explain(&opt, two, 2);
        if (!ok(!strncmp(explained, words[i], strlen(words[i])), "of fresh blocks: %s", words[i]))
            note("%s", explained);
        if (!ok((kopt_state_init(&opt, two, 2, NULL) == KOPT_OK) == (i == 6),
                "... for which a call is refused, or not"))
            note("%s", explained);
    }
}

/* kopt_explain() names what a refused kopt_step_begin() could not compute, and nothing before and after it. */
static void names_product(kopt_optimizer o, const char *first, const char *words) {
    kopt_step s;
    const kopt_result result = kopt_step_begin(&s, &o);
    ok(result == KOPT_ERROR_RANGE && !strncmp(kopt_explain(&o, NULL, 0), first, strlen(first)) &&
           strstr(kopt_explain(&o, NULL, 0), words) != NULL,
       "a step is refused: %s", kopt_explain(&o, NULL, 0));
}

static void check_products(void) {
    kopt_optimizer o = kopt_adamw(3e38);
    kopt_step s;
    names_product(o, "lr:", "corrections");
    o.step = 100000; /* where the correction of beta1 is 1 */
    ok(kopt_step_begin(&s, &o) == KOPT_OK && strstr(kopt_explain(&o, NULL, 0), "all fields"), "the same lr, later");
    o = kopt_adamw(1), o.grad_scale = 3e38, o.clip = 2;
    names_product(o, "grad_scale * clip:", "overflows");
    o = kopt_adamw(1e20), o.weight_decay = 1e20;
    names_product(o, "lr * weight_decay", "max_lr");
    o = kopt_adan(1e20), o.weight_decay = 1e20;
    names_product(o, "lr * weight_decay", "max_lr");
    o = kopt_lion(1), o.decay_mode = KOPT_DECAY_FULLY_DECOUPLED, o.max_lr = 1e-30, o.weight_decay = 1e10;
    names_product(o, "lr * weight_decay", "max_lr");
    o = kopt_sgd(0.1, 0.9), o.grad_scale = -3e38, o.clip = 3e38, o.maximize = 1;
    names_product(o, "grad_scale * clip:", "overflows");
    o = kopt_sgd(0.1, 0.9), o.step = UINT32_MAX;
    ok(kopt_step_begin(&s, &o) == KOPT_ERROR_STEP && strstr(kopt_explain(&o, NULL, 0), "all fields"),
       "no step is left");
}

/* ---- loss scale -------------------------------------------------------------------------------------------------- */

static jmp_buf out_of_here;
static int leave(void *user, double scale) {
    (void)user, (void)scale;
    longjmp(out_of_here, 1);
}

static void check_scaler_begin(void) {
    static union room by_list, by_ranges;
    kopt_scaler scaler, one, other;
    kopt_norm norm;
    kopt_step step, was;
    step_scalars begun;
    kopt_optimizer same;
    kopt_closure closure = {leave, NULL, NULL};
    int k, skipped = 7;
    for (k = 0; k < 2; ++k) {
        build(kopt_adamw(1e-2));
        opt.grad_scale = 0.5, opt.clip = 1e-9; /* which is not read */
        scaler = kopt_scaler_of();
        scaler.scale = 1024, scaler.interval = 1;
        kopt_state_init(&opt, &t, 1, initial());
        memset(&norm, 0, sizeof norm);
        kopt_norm_add_grads(&norm, &t, 1);
        if (k == 0) {
            ok(kopt_scaler_step(&scaler, &opt, &t, 1, 1e-4, NULL, NULL) == KOPT_OK, "scaler_step");
            by_list = weight, one = scaler;
        } else {
            ok(kopt_scaler_begin(&scaler, &step, &opt, 1, &norm, 1e-4, &skipped) == KOPT_OK && !skipped,
               "scaler_begin");
            ok(kopt_step_range(&step, &t, 1, 100, N) == KOPT_OK && kopt_step_range(&step, &t, 1, 0, 100) == KOPT_OK,
               "... in two ranges");
            by_ranges = weight, other = scaler;
        }
        ok(opt.step == 1 && ref_bits((float)opt.grad_scale) == ref_bits(0.5f) && opt.clip < 1e-8 && opt.clip > 0,
           "... counts the step and leaves opt alone");
    }
    ok(!memcmp(&by_list, &by_ranges, sizeof by_list) && !memcmp(&one, &other, sizeof one) && one.scale > 2047 &&
           one.scale < 2049,
       "both have the same bits, and the scale grows");
    begun = scalars_of(&step);
    ok(ref_bits(begun.grad_scale) ==
           ref_bits((float)(0.5 / 1024) * (float)fmin(1, 1e-4 / (kopt_norm_value(&norm) * (0.5 / 1024) + 1e-6))),
       "the gradients are divided by the scale they were made with, and clipped");

    norm.nonfinite = 1;
    same = opt;
    photograph();
    ok(kopt_scaler_begin(&scaler, &step, &opt, 1, &norm, 0, &skipped) == KOPT_OK && skipped == 1 &&
           opt.step == same.step && scaler.scale > 1023 && scaler.scale < 1025,
       "a gradient that is not finite: skipped, the scale halved");
    refuses(kopt_step_run(&step, &t, 1), KOPT_ERROR_STEP, "... and its step runs nothing");
    memset(&step, 0x55, sizeof step), was = step, other = scaler;
    for (k = 0; k < 2; ++k) {
        norm.nonfinite = (uint64_t)k;
        opt.lr = -1;
        ok(kopt_scaler_begin(&scaler, &step, &opt, 1, &norm, 0, &skipped) == KOPT_ERROR_RANGE, "a bad lr, %s",
           k ? "skipped" : "taken");
        opt.lr = 1e-2;
        ok(kopt_scaler_begin(&scaler, &step, &opt, 1, &norm, -1, NULL) == KOPT_ERROR_RANGE &&
               kopt_scaler_begin(&scaler, &step, &opt, 1, &norm, (double)NAN, NULL) == KOPT_ERROR_RANGE,
           "a bad max_norm");
        opt.step = 0xffffffff;
        ok(kopt_scaler_begin(&scaler, &step, &opt, 1, &norm, 0, NULL) == KOPT_ERROR_STEP, "no steps left");
        opt.step = same.step;
    }
    ok(kopt_scaler_begin(NULL, &step, &opt, 1, &norm, 0, NULL) == KOPT_ERROR_NULL &&
           kopt_scaler_begin(&scaler, &step, NULL, 1, &norm, 0, NULL) == KOPT_ERROR_NULL &&
           kopt_scaler_begin(&scaler, &step, &opt, 1, NULL, 0, NULL) == KOPT_ERROR_NULL &&
           kopt_scaler_begin(&scaler, NULL, &opt, 1, &norm, 0, NULL) == KOPT_ERROR_NULL,
       "NULL");
    ok(!memcmp(&step, &was, sizeof step) && !memcmp(&scaler, &other, sizeof scaler) && opt.step == same.step,
       "... and nothing has changed");

    build(kopt_adamw(1e-2));
    opt.grad_scale = 0.3, opt.clip = 0.7;
    kopt_state_init(&opt, &t, 1, NULL);
    scaler = kopt_scaler_of();
    same = opt, other = scaler;
    photograph();
    if (setjmp(out_of_here) == 0) {
        kopt_scaler_step(&scaler, &opt, &t, 1, 1, &closure, NULL);
        ok(0, "the closure leaves");
    }
    ok(unchanged() && !memcmp(&same, &opt, sizeof opt) && !memcmp(&other, &scaler, sizeof scaler),
       "a closure that leaves by longjmp: optimizer, scaler and tensor are as before");
}

int main(void) {
    check_zero_structs();
    check_counts_inside();
    check_copies();
    check_kahan_add();
    check_ranges();
    check_inspected_defaults();
    check_identity();
    check_typed();
    check_words();
    check_tensor_words();
    check_fresh_words();
    check_products();
    check_scaler_begin();
    return done();
}
