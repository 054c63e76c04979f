/* test_api.c - every refusal, with nothing written; structs of other versions, and reserved fields; state blocks with
   other headers; the caller's floating-point environment; the one-element updates. */
#define KAHAN_OPT_IMPLEMENTATION
#include "../../kahan_opt.h"

#include "tap.h"
#include "../bits/begun.h"
#include "reference.h"
#include "inputs.h"

#include <fenv.h>
#include <stddef.h>
#include <stdlib.h>
#if defined(__x86_64__) || defined(__SSE2__)
#include <xmmintrin.h>
#endif

/* ---- One optimizer with one tensor, and a photograph of everything ---------------------------------------------- */

enum { N = 100, ROOM = 64 + 12 * N + 64 };

typedef struct world {
    kopt_optimizer opt;
    kopt_tensor t;
    kopt_step step;
    float initial[N], out[N]; /* from here on, only arrays */
    unsigned char weight[4 * N], grad[4 * N], copy[4 * N], state[ROOM];
} world;

static world w, photograph;
static unsigned char image[sizeof(world)]; /* a checkpoint */

static void remember(void) { memcpy(&photograph, &w, sizeof w); }

static int unchanged(void) { return !memcmp(&w, &photograph, sizeof w); }

static void fill_gradient(unsigned turn) {
    int i;
    for (i = 0; i < N; ++i) {
        uint32_t word = (uint32_t)(i + 1) * (turn + 3) * 2654435761u;
        ref_set(w.grad, 2, (size_t)i, (word & 0x80000000u ? 0xbc00u : 0x3c00u) + (word >> 8 & 0x3ff));
    }
}

/* AdamW in bf16 with Kahan, three steps done, a fourth begun. */
static void build(void) {
    int i;
    memset(&w, 0, sizeof w);
    w.opt = kopt_adamw(1e-3);
    w.opt.seed = UINT64_C(0x123456789abcdef);
    w.t = kopt_tensor_of(w.weight, KOPT_BF16, w.grad, KOPT_BF16, N, w.state, 0);
    w.t.state_size = kopt_state_size(&w.opt, &w.t);
    for (i = 0; i < N; ++i) w.initial[i] = (float)(2 * i - 101) / 64; /* exact in any rounding direction */
    kopt_state_init(&w.opt, &w.t, 1, w.initial);
    for (i = 0; i < 3; ++i) fill_gradient((unsigned)i), kopt_optimizer_step(&w.opt, &w.t, 1);
    kopt_step_begin(&w.step, &w.opt);
    remember();
}

static const char *const result_name[] = {"OK",     "NULL",          "OPTION",   "RANGE",   "BOUNDS", "SIZE",
                                          "STATE",  "MISMATCH",      "CHECKSUM", "OVERLAP", "STEP",   "ISA",
                                          "DEVICE", "UNINITIALIZED", "ID",       "CAPTURE", "FILE",   "VERSION"};

/* The call must give `want` and must not have changed a byte of the world since the last photograph. */
static void refuses(kopt_result got, kopt_result want, const char *what) {
    int same = unchanged();
    if (!ok(got == want && same, "%s: %s", result_name[want], what))
        note("got %s%s", result_name[got], same ? "" : ", and something was written");
    memcpy(&w, &photograph, sizeof w);
}

static int file_calls;
static int file_write(void *user, const void *data, size_t size) { return ++file_calls, (void)user, !data || !size; }
static int file_read(void *user, uint64_t offset, void *data, size_t size) {
    return ++file_calls, (void)user, offset || !data || !size;
}

/* Every function that takes an optimizer must refuse this one, and write nothing, neither to the world (where the
   optimizer may be) nor elsewhere. Returns how many do not. */
static int accepted(kopt_optimizer *o, kopt_result want) {
    const kopt_file file = {file_write, file_read, NULL};
    const kopt_closure closure = {NULL, NULL, NULL};
    const kopt_norm norm = {0};
    kopt_scaler scaler = kopt_scaler_of(), was = scaler;
    kopt_result r[14];
    int k, bad, skipped = 7;
    remember();
    file_calls = 0;
    memset(image, 0x55, sizeof image);
    r[0] = kopt_step_begin(&w.step, o);
    r[1] = kopt_optimizer_step(o, &w.t, 1);
    r[2] = kopt_optimizer_step(o, NULL, 0);
    r[3] = kopt_state_init(o, &w.t, 1, w.initial);
    r[4] = kopt_state_dither(o, &w.t, 1);
    r[5] = kopt_state_read(o, &w.t, KOPT_SLOT_WEIGHT, w.out);
    r[6] = kopt_state_write(o, &w.t, KOPT_SLOT_WEIGHT, w.initial);
    r[7] = kopt_save(o, &w.t, 1, image, sizeof image);
    r[8] = kopt_load(o, &w.t, 1, image, sizeof image);
    r[9] = kopt_save_to(o, &w.t, 1, &file);
    r[10] = kopt_load_from(o, &w.t, 1, &file);
    r[11] = kopt_scaler_begin(&scaler, &w.step, o, 1, &norm, 0, &skipped);
    r[12] = kopt_scaler_step(&scaler, o, &w.t, 1, 0, &closure, &skipped);
    r[13] = kopt_state_init(o, NULL, 0, NULL);
    bad = kopt_state_size(o, &w.t) != 0 || kopt_save_size(o, &w.t, 1) != 0 || file_calls != 0 || skipped != 7;
    bad += !unchanged() || memcmp(&scaler, &was, sizeof scaler);
    bad += image[0] != 0x55 || memcmp(image, image + 1, sizeof image - 1) != 0;
    for (k = 0; k < 14; ++k) {
        if (r[k] != want) note("call %d: %s", k, result_name[r[k]]);
        bad += r[k] != want;
    }
    return bad;
}

/* ... and must say why. The optimizer is restored after it. */
static void refuses_optimizer(kopt_result want, const char *what) {
    const int bad = accepted(&w.opt, want);
    ok(!bad && !strstr(kopt_explain(&w.opt, NULL, 0), "all fields"), "%s: %s: %d wrong", result_name[want], what, bad);
    build();
}

/* ---- Optimizers that are refused -------------------------------------------------------------------------------- */

static void check_options(void) {
    int k;
    build();
#define REFUSED(code, field, value)                                                                                    \
    (w.opt.field = (value),                                                                                            \
     ok(strstr(kopt_explain(&w.opt, NULL, 0), #field) != NULL, #field " is named: %s", kopt_explain(&w.opt, NULL, 0)), \
     refuses_optimizer(code, #field " = " #value))
    REFUSED(KOPT_ERROR_OPTION, rule, (kopt_rule)7);
    REFUSED(KOPT_ERROR_OPTION, rule, KOPT_RULE_ADAMW); /* for kopt_optimizer_init() only */
    REFUSED(KOPT_ERROR_OPTION, rounding, (kopt_rounding)6);
    REFUSED(KOPT_ERROR_OPTION, first_moment_format, (kopt_format)4);
    REFUSED(KOPT_ERROR_OPTION, second_moment_format, (kopt_format)4);
    REFUSED(KOPT_ERROR_OPTION, moment_rounding, KOPT_KAHAN);
    REFUSED(KOPT_ERROR_OPTION, moment_rounding, (kopt_rounding)99);
    REFUSED(KOPT_ERROR_OPTION, residual_rounding, KOPT_EXACT);
    REFUSED(KOPT_ERROR_OPTION, decay_mode, (kopt_decay_mode)3);
    for (k = 0; k < 3; ++k) { /* Nesterov with neither, without momentum, with dampening */
        static const char *const what[] = {"Nesterov without momentum", "Nesterov with dampening",
                                           "Nesterov with negative dampening"};
        w.opt = kopt_sgd(0.1, k ? 0.9 : 0);
        w.opt.nesterov = 1, w.opt.dampening = k == 1 ? 0.1 : k == 2 ? -0.1 : 0;
        ok(!strncmp(kopt_explain(&w.opt, NULL, 0), "nesterov:", 9), "%s, in words", what[k]);
        refuses_optimizer(KOPT_ERROR_OPTION, what[k]);
    }
}

/* ---- Structs of other versions ---------------------------------------------------------------------------------- */

/* A reserved field that is not 0 is one of a later version. */
static void check_reserved(void) {
    static const unsigned char bits[] = {1, 0x80, 0xff};
    const size_t opt_at = offsetof(kopt_optimizer, reserved_);
    size_t i, k;
    int bad = 0, fields = 0;
    build();
    ok(opt_at + sizeof w.opt.reserved_ == sizeof w.opt, "reserved fields are the end of an optimizer");
    for (i = 0; i < sizeof w.opt; ++i) {
        const int reserved = i - offsetof(kopt_optimizer, reserved32_) < 4 || i >= opt_at;
        fields += reserved;
        for (k = 0; reserved && k < 3; ++k) {
            ((unsigned char *)&w.opt)[i] = bits[k];
            bad += accepted(&w.opt, KOPT_ERROR_OPTION);
            bad += strncmp(kopt_explain(&w.opt, NULL, 0), "reserved_:", 10) != 0;
            build();
        }
    }
    ok(!bad && fields == 60, "OPTION: each of %d reserved bytes of an optimizer: %d wrong", fields, bad);
    for (bad = fields = 0, i = 0; i < sizeof w.t; ++i) {
        const int reserved = (i >= offsetof(kopt_tensor, reserved32_) && i < offsetof(kopt_tensor, reserved32_) + 4) ||
                             i >= offsetof(kopt_tensor, reserved_);
        fields += reserved;
        for (k = 0; reserved && k < 3; ++k) {
            const kopt_file file = {file_write, file_read, NULL};
            kopt_norm norm = {0};
            kopt_scaler scaler = kopt_scaler_of(), was = scaler;
            ((unsigned char *)&w.t)[i] = bits[k];
            remember();
            bad += strncmp(kopt_explain(&w.opt, &w.t, 1), "reserved_ of a tensor", 21) != 0;
            bad += strncmp(kopt_explain(NULL, &w.t, 1), "reserved_ of a tensor", 21) != 0;
            bad += kopt_state_size(&w.opt, &w.t) != 0 || kopt_save_size(&w.opt, &w.t, 1) != 0;
            bad += kopt_state_init(&w.opt, &w.t, 1, w.initial) != KOPT_ERROR_OPTION;
            bad += kopt_state_dither(&w.opt, &w.t, 1) != KOPT_ERROR_OPTION;
            bad += kopt_state_read(&w.opt, &w.t, KOPT_SLOT_WEIGHT, w.out) != KOPT_ERROR_OPTION;
            bad += kopt_state_write(&w.opt, &w.t, KOPT_SLOT_WEIGHT, w.initial) != KOPT_ERROR_OPTION;
            bad += kopt_optimizer_step(&w.opt, &w.t, 1) != KOPT_ERROR_OPTION;
            bad += kopt_step_run(&w.step, &w.t, 1) != KOPT_ERROR_OPTION;
            bad += kopt_step_range(&w.step, &w.t, 1, 0, N) != KOPT_ERROR_OPTION;
            bad += kopt_norm_add_stable(&norm, &w.step, &w.t, 0, N) != KOPT_ERROR_OPTION;
            bad += kopt_save(&w.opt, &w.t, 1, image, sizeof image) != KOPT_ERROR_OPTION;
            bad += kopt_save_to(&w.opt, &w.t, 1, &file) != KOPT_ERROR_OPTION;
            bad += kopt_load(&w.opt, &w.t, 1, image, sizeof image) != KOPT_ERROR_OPTION;
            bad += kopt_load_from(&w.opt, &w.t, 1, &file) != KOPT_ERROR_OPTION;
            bad += kopt_scaler_step(&scaler, &w.opt, &w.t, 1, 0, NULL, NULL) != KOPT_ERROR_OPTION;
            bad += memcmp(&scaler, &was, sizeof scaler) != 0 || !unchanged();
            build();
        }
    }
    ok(!bad && fields == 20, "OPTION: each of %d reserved bytes of a tensor: %d wrong", fields, bad);
}

/* Constructors and kopt_optimizer_init(), which other languages call. */
static void check_init(void) {
    static const kopt_rule rule[] = {KOPT_RULE_SGD,          KOPT_RULE_ADAM,   KOPT_RULE_ADAMW,
                                     KOPT_RULE_STABLE_ADAMW, KOPT_RULE_LION,   KOPT_RULE_ADAN,
                                     KOPT_RULE_RADAM,        KOPT_RULE_RANGER, KOPT_RULE_EMA};
    const kopt_optimizer made[] = {kopt_sgd(0.3, 0.9),     kopt_adam(0.3),   kopt_adamw(0.3),
                                   kopt_stable_adamw(0.3), kopt_lion(0.3),   kopt_adan(0.3),
                                   kopt_radam(0.3),        kopt_ranger(0.3), kopt_ema(0.3)};
    const int unknown[] = {KOPT_RULE_ADAM_ATAN2, KOPT_RULE_SMOOTH_LION, 8, 63, 67, 255, 1000, -1}; /* no VMATH here */
    const int version[] = {0,   1,    -1,    KOPT_VERSION - 1,  KOPT_VERSION + 1, KOPT_VERSION - 100,
                           700, -800, 10800, KOPT_VERSION * 100};
    static kopt_optimizer two[2];
    static unsigned char zeros[sizeof(kopt_optimizer)];
    unsigned char *const room = (unsigned char *)two;
    kopt_optimizer o;
    size_t size, i;
    int k, bad = 0, other = 0;
    for (k = 0; k < 9; ++k) {
        memset(&o, 0xa5, sizeof o);
        bad += kopt_optimizer_init(&o, rule[k], 0.3, KOPT_VERSION, sizeof o, sizeof(kopt_tensor)) != KOPT_OK;
        if (k == 0) o.momentum = 0.9;
        bad += memcmp(&o, &made[k], sizeof o) != 0;
        for (i = 0; i < 7; ++i) bad += made[k].reserved_[i] != 0;
        bad += kopt_step_begin(&w.step, &o) != KOPT_OK || o.step != 1;
    }
    ok(!bad, "kopt_optimizer_init() is what the constructors do: %d wrong", bad);
    build();
    for (bad = 0, k = 0; k < 8; ++k) {
        memset(&o, 0xa5, sizeof o);
        bad += kopt_optimizer_init(&o, (kopt_rule)unknown[k], 0.3, KOPT_VERSION, sizeof o, sizeof(kopt_tensor)) !=
               KOPT_ERROR_OPTION;
        bad += memcmp(&o, zeros, sizeof o) != 0 || accepted(&o, KOPT_ERROR_UNINITIALIZED);
    }
    ok(!bad, "OPTION: rules without a constructor leave zeros, which are refused: %d wrong", bad);
    ok(kopt_optimizer_init(NULL, KOPT_RULE_SGD, 0.3, KOPT_VERSION, sizeof o, sizeof(kopt_tensor)) == KOPT_ERROR_NULL &&
           kopt_optimizer_init(NULL, KOPT_RULE_SGD, 0.3, 0, 0, 0) == KOPT_ERROR_NULL,
       "NULL: no optimizer");
    for (bad = 0, k = 0; k < 10; ++k) { /* before 1.0, any digit */
        memset(&o, 0xa5, sizeof o);
        bad += kopt_optimizer_init(&o, KOPT_RULE_ADAMW, 0.3, version[k], sizeof o, sizeof(kopt_tensor)) !=
               KOPT_ERROR_VERSION;
        bad += accepted(&o, KOPT_ERROR_VERSION);
        bad += strcmp(kopt_explain(&o, &w.t, 1), kopt_result_string(KOPT_ERROR_VERSION)) != 0;
        bad += memcmp((unsigned char *)&o + sizeof o.made_, zeros, sizeof o - sizeof o.made_) != 0;
    }
    ok(!bad, "VERSION: headers of other versions: %d wrong", bad);
    for (bad = 0, size = 0; size <= sizeof two; ++size) { /* the struct of another header has another size */
        kopt_optimizer *small;
        kopt_result result;
        for (other = 0; other < 3; ++other) { /* 1, 2: also another tensor */
            const size_t tensor = sizeof(kopt_tensor) + (other == 1 ? 8 : other == 2 ? (size_t)-8 : 0);
            const kopt_result want = size == sizeof o && !other ? KOPT_OK : KOPT_ERROR_VERSION;
            memset(two, 0xa5, sizeof two);
            result = kopt_optimizer_init(two, KOPT_RULE_ADAMW, 0.3, KOPT_VERSION, size, tensor);
            bad += result != want;
            for (i = size; i < sizeof two; ++i) bad += room[i] != 0xa5;
            for (i = 4; i < size && want != KOPT_OK; ++i) bad += room[i] != 0;
        }
        if (size < sizeof o.made_ || size % 8 != 4) continue;
        small = (kopt_optimizer *)malloc(size); /* not a byte more: with AddressSanitizer a read beyond it ends this */
        if (small == NULL) continue;
        result = kopt_optimizer_init(small, KOPT_RULE_SGD, 0.3, KOPT_VERSION, size, sizeof(kopt_tensor));
        bad += result != KOPT_ERROR_VERSION || accepted(small, KOPT_ERROR_VERSION);
        free(small);
    }
    ok(!bad, "VERSION: structs of other sizes, of which only their own bytes are written: %d wrong", bad);
    build();
}

static void check_ranges(void) {
    const double nan = double_of(UINT64_C(0x7ff8) << 48), infinity = double_of(UINT64_C(0x7ff0) << 48);
    const double bad[] = {-1e-3, nan, infinity, double_of(UINT64_C(0xfff0) << 48)};
    static const char *const name[] = {"lr", "weight_decay", "beta1", "beta2", "eps", "max_lr"};
    static const char *const text[] = {"-0.001", "NaN", "infinity", "-infinity"};
    char what[100];
    int field, k;
    for (field = 0; field < 6; ++field)
        for (k = 0; k < 4; ++k) {
            double *at[6];
            build();
            at[0] = &w.opt.lr, at[1] = &w.opt.weight_decay, at[2] = &w.opt.beta1, at[3] = &w.opt.beta2;
            at[4] = &w.opt.eps, at[5] = &w.opt.max_lr;
            if (field == 5) w.opt.decay_mode = KOPT_DECAY_FULLY_DECOUPLED;
            *at[field] = bad[k];
            snprintf(what, sizeof what, "%s = %s", name[field], text[k]);
            refuses_optimizer(KOPT_ERROR_RANGE, what);
        }
    REFUSED(KOPT_ERROR_RANGE, beta1, 1);
    REFUSED(KOPT_ERROR_RANGE, beta1, 2); /* of its bits only one is not 0 */
    REFUSED(KOPT_ERROR_RANGE, beta2, 1);
    REFUSED(KOPT_ERROR_RANGE, eps, 0);
    REFUSED(KOPT_ERROR_RANGE, eps, 1e-40);
    REFUSED(KOPT_ERROR_RANGE, eps, 1e39);
    REFUSED(KOPT_ERROR_RANGE, grad_scale, nan);
    REFUSED(KOPT_ERROR_RANGE, clip, infinity);
    w.opt.decay_mode = KOPT_DECAY_FULLY_DECOUPLED;
    REFUSED(KOPT_ERROR_RANGE, max_lr, 0);
    for (k = 0; k < 5; ++k) {
        static const char *const sgd[] = {"momentum = -0.1", "momentum = NaN", "momentum = infinity", "dampening = NaN",
                                          "dampening = infinity"};
        w.opt = kopt_sgd(0.1, 0.9);
        if (k < 3)
            w.opt.momentum = k == 0 ? -0.1 : bad[k];
        else
            w.opt.dampening = bad[k - 2];
        refuses_optimizer(KOPT_ERROR_RANGE, sgd[k]);
    }
}

/* The next double above x, or below it. */
static double beside(double x, int above) {
    const uint64_t top = UINT64_C(1) << 63;
    const uint64_t bits = bits_of(x);
    if (x == 0) return double_of(above ? 1 : top + 1);
    return double_of((x > 0) == above ? bits + 1 : bits - 1);
}

/* Each number at both ends of its range, and right beyond them. */
static void check_limits(void) {
    const double smallest = double_of(1), normal = double_of(UINT64_C(0x3810) << 48); /* 2^-126 */
    const double largest = 3e38, below_one = beside(1, 0);
    const struct {
        const char *name;
        kopt_rule rule;
        double *at, least, most;
    } field[] = {{"lr", KOPT_RULE_ADAM, &w.opt.lr, 0, largest},
                 {"lr", KOPT_RULE_SGD, &w.opt.lr, 0, largest},
                 {"max_lr", KOPT_RULE_ADAM, &w.opt.max_lr, smallest, largest},
                 {"weight_decay", KOPT_RULE_ADAM, &w.opt.weight_decay, 0, largest},
                 {"grad_scale", KOPT_RULE_ADAM, &w.opt.grad_scale, -largest, largest},
                 {"clip", KOPT_RULE_SGD, &w.opt.clip, -largest, largest},
                 {"beta1", KOPT_RULE_ADAM, &w.opt.beta1, 0, below_one},
                 {"beta2", KOPT_RULE_LION, &w.opt.beta2, 0, below_one},
                 {"beta3", KOPT_RULE_ADAN, &w.opt.beta3, 0, below_one},
                 {"beta1", KOPT_RULE_LION, &w.opt.beta1, 0, below_one},
                 {"beta2", KOPT_RULE_ADAM, &w.opt.beta2, 0, below_one},
                 {"beta1", KOPT_RULE_EMA, &w.opt.beta1, 0, 1},
                 {"weight_decay", KOPT_RULE_EMA, &w.opt.weight_decay, 0, 0},
                 {"eps", KOPT_RULE_RANGER, &w.opt.eps, normal, largest},
                 {"eps", KOPT_RULE_ADAM, &w.opt.eps, normal, largest},
                 {"lookahead_rate", KOPT_RULE_RANGER, &w.opt.lookahead_rate, 0, 1},
                 {"momentum", KOPT_RULE_SGD, &w.opt.momentum, 0, largest},
                 {"dampening", KOPT_RULE_SGD, &w.opt.dampening, -largest, largest}};
    const kopt_tensor three = kopt_tensor_of(NULL, KOPT_BF16, NULL, KOPT_BF16, 3, NULL, 0);
    size_t i;
    int k;
    for (i = 0; i < sizeof field / sizeof field[0]; ++i) {
        const double least = field[i].least, most = field[i].most;
        const double value[] = {least, most, -0.0, beside(least, 0), beside(most, 1)};
        int bad = 0;
        for (k = 0; k < 5; ++k) {
            const int inside = k < 2 || (k == 2 && least <= 0);
            w.opt = field[i].rule == KOPT_RULE_SGD ? kopt_sgd(0.1, 0.9) : kopt_adamw(0.1);
            if (field[i].rule == KOPT_RULE_EMA) w.opt = kopt_ema(0.9);
            w.opt.rule = field[i].rule;
            w.opt.decay_mode = KOPT_DECAY_FULLY_DECOUPLED;
            *field[i].at = value[k];
            bad += (kopt_state_size(&w.opt, &three) != 0) != inside;
            if (!inside || !strstr(kopt_explain(&w.opt, NULL, 0), "overflows")) /* valid, but too large for a step */
                bad += !strstr(kopt_explain(&w.opt, NULL, 0), inside ? "all fields" : field[i].name);
        }
        ok(bad == 0, "%s from %.17g to %.17g, and no other", field[i].name, least, most);
    }
}

/* Fields of single rules, at the ends of their ranges. */
static void check_ends(void) {
    const double above = double_of((UINT64_C(0x3ff0) << 48) + 1); /* 1 + 2^-52 */
    const double nan = double_of(UINT64_C(0x7ff8) << 48);
    int k, bad = 0;
    build();
    for (k = 0; k < 9; ++k) {
        const double decay[] = {-0x1p-52, -1, above, 2, nan, -nan, -1e-300, -double_of(1), -HUGE_VAL};
        static const char *const what[] = {"-2^-52", "-1",      "1 + 2^-52", "2",        "NaN",
                                           "-NaN",   "-1e-300", "-2^-1074",  "-infinity"};
        w.opt = kopt_ema(decay[k]);
        if (kopt_state_size(&w.opt, &w.t) != 0) ok(0, "an EMA has a state");
        refuses_optimizer(KOPT_ERROR_RANGE, what[k]);
    }
    w.opt = kopt_ema(-0.0);
    ok(kopt_step_begin(&w.step, &w.opt) == KOPT_OK && ref_bits(scalars_of(&w.step).rate) == 0x3f800000,
       "EMA with decay -0 is 0");
    for (k = 0; k < 2; ++k) { /* the average becomes the weights, or stays */
        float average[3] = {1, 2, 3}, weights[3] = {-4, 5, 0.125f};
        kopt_optimizer o = kopt_ema(k);
        kopt_tensor t = kopt_tensor_of(average, KOPT_F32, weights, KOPT_F32, 3, NULL, 0);
        bad += kopt_optimizer_step(&o, &t, 1) != KOPT_OK;
        bad += ref_bits(average[0]) != ref_bits(k ? 1.0f : -4.0f);
        bad += ref_bits(average[1]) != ref_bits(k ? 2.0f : 5.0f);
        bad += ref_bits(average[2]) != ref_bits(k ? 3.0f : 0.125f);
    }
    ok(!bad, "EMA with decay 0 is its weights, with decay 1 what it was");
#define REFUSED_OF(make, field, value) \
    (w.opt = make(1e-3), w.opt.field = (value), refuses_optimizer(KOPT_ERROR_RANGE, #make ", " #field " = " #value))
    REFUSED_OF(kopt_ranger, lookahead, 0);
    REFUSED_OF(kopt_ranger, lookahead, -1);
    REFUSED_OF(kopt_ranger, lookahead, -2147483647);
    REFUSED_OF(kopt_ranger, lookahead_rate, -0x1p-1022);
    REFUSED_OF(kopt_ranger, lookahead_rate, above);
    REFUSED_OF(kopt_ranger, lookahead_rate, nan);
    REFUSED_OF(kopt_adan, beta3, 1);
    REFUSED_OF(kopt_adan, beta3, -0x1p-1022);
    REFUSED_OF(kopt_adan, beta3, nan);
    for (k = bad = 0; k < 4; ++k) {
        kopt_optimizer o = k < 3 ? kopt_ranger(1e-3) : kopt_adan(1e-3);
        o.lookahead = 1, o.lookahead_rate = k % 2, o.beta3 = 0;
        if (k == 2) o.lookahead = 2147483647;
        bad += kopt_step_begin(&w.step, &o) != KOPT_OK;
    }
    ok(!bad, "lookahead 1 and 2^31 - 1, lookahead_rate 0 and 1, beta3 0 are fine");
    build();
}

/* ---- Calls that are refused ------------------------------------------------------------------------------------- */

/* rate_scale and stable_scale are doubles: from 0 to 3e38, without -0. */
static void check_scales(void) {
    const uint64_t negative = UINT64_C(1) << 63;
    const uint64_t wrong[] = {bits_of(-1),
                              negative, /* -0 */
                              negative + 1,
                              bits_of(beside(3e38, 1)),
                              bits_of(1e300),
                              UINT64_C(0x7ff0) << 48,
                              UINT64_C(0xfff0) << 48,
                              UINT64_C(0x7ff8) << 48,
                              (UINT64_C(0x7ff0) << 48) + 1};
    static const char *const name[] = {"-1",       "-0",        "-2^-1074", "above 3e38",     "1e300",
                                       "infinity", "-infinity", "NaN",      "a signaling NaN"};
    static const double right[] = {0, 0x1p-1074, 1e-300, 0.1, 1, 3e38};
    char what[80];
    int k, stable;
    for (stable = 0; stable < 2; ++stable) {
        for (k = 0; k < 9; ++k) {
            double *const at = stable ? &w.t.stable_scale : &w.t.rate_scale;
            int bad = 0;
            build();
            memcpy(at, &wrong[k], sizeof *at), remember();
            bad += strncmp(kopt_explain(&w.opt, &w.t, 1), "rate_scale or stable_scale", 26) != 0;
            bad += kopt_state_size(&w.opt, &w.t) != 0 || kopt_save_size(&w.opt, &w.t, 1) != 0;
            bad += kopt_optimizer_step(&w.opt, &w.t, 1) != KOPT_ERROR_RANGE;
            bad += kopt_state_init(&w.opt, &w.t, 1, NULL) != KOPT_ERROR_RANGE;
            bad += kopt_state_dither(&w.opt, &w.t, 1) != KOPT_ERROR_RANGE;
            bad += kopt_step_range(&w.step, &w.t, 1, 3, 4) != KOPT_ERROR_RANGE;
            snprintf(what, sizeof what, "%s %s, by 7 functions: %d wrong", stable ? "stable_scale" : "rate_scale",
                     name[k], bad);
            refuses(bad ? KOPT_OK : kopt_step_run(&w.step, &w.t, 1), KOPT_ERROR_RANGE, what);
        }
        for (k = 0; k < 6; ++k) {
            build();
            if (stable)
                w.t.stable_scale = right[k];
            else
                w.t.rate_scale = right[k];
            ok(kopt_step_run(&w.step, &w.t, 1) == KOPT_OK && strstr(kopt_explain(&w.opt, &w.t, 1), "all fields"),
               "%s = %g", stable ? "stable_scale" : "rate_scale", right[k]);
        }
    }
    for (k = 0; k < 2; ++k) { /* both are rounded to float, then multiply: lr 0.7 by 0.1, by 0.3, by both */
        static const double scale[] = {0.1, 0.3};
        int which, bad = 0;
        for (which = 1; which < 4; ++which) {
            float weight = 2, grad = -1;
            kopt_optimizer o = kopt_sgd(0.7, 0);
            kopt_tensor t = kopt_tensor_of(&weight, KOPT_F32, &grad, KOPT_F32, 1, NULL, 0);
            volatile float rate = 1;
            if (k) { /* StableAdamW: w -= rate * 1 / (1 + eps), for eps far below an ulp of 1 */
                o = kopt_stable_adamw(0.7);
                o.first_moment_format = o.second_moment_format = KOPT_F32, o.eps = 1e-30, o.weight_decay = 0;
                t.state = w.state, t.state_size = sizeof w.state;
            }
            if (kopt_state_init(&o, &t, 1, NULL) != KOPT_OK) ok(0, "init");
            if (which & 1) t.rate_scale = scale[0], rate = (float)scale[0];
            if (which & 2) t.stable_scale = scale[1];
            if ((which & 2) && k) rate = ref_mul(rate, (float)scale[1]); /* other optimizers ignore it */
            bad += kopt_optimizer_step(&o, &t, 1) != KOPT_OK;
            bad += fabs((double)weight - 2 - 0.7 * (double)rate) > 1e-6;
        }
        ok(!bad, "rate_scale and stable_scale multiply the rate%s: %d wrong", k ? " of StableAdamW" : "", bad);
    }
    build();
}

static void check_pointers_and_bounds(void) {
    kopt_tensor none = kopt_tensor_of(NULL, KOPT_BF16, NULL, KOPT_BF16, 0, NULL, 0), large = none;
    kopt_optimizer plain = kopt_sgd(0.1, 0);
    build();
    refuses(kopt_step_begin(&w.step, NULL), KOPT_ERROR_NULL, "begin without optimizer");
    refuses(kopt_step_begin(NULL, &w.opt), KOPT_ERROR_NULL, "begin without step");
    refuses(kopt_step_run(NULL, &w.t, 1), KOPT_ERROR_NULL, "run without step");
    refuses(kopt_step_run(&w.step, NULL, 1), KOPT_ERROR_NULL, "run without tensor");
    refuses(kopt_step_range(NULL, &w.t, 1, 0, N), KOPT_ERROR_NULL, "range without step");
    refuses(kopt_step_range(&w.step, NULL, 1, 0, 0), KOPT_ERROR_NULL, "range without tensor");
    refuses(kopt_optimizer_step(NULL, &w.t, 1), KOPT_ERROR_NULL, "step without optimizer");
    refuses(kopt_optimizer_step(&w.opt, NULL, 1), KOPT_ERROR_NULL, "step without tensors");
    refuses(kopt_state_init(NULL, &w.t, 1, w.initial), KOPT_ERROR_NULL, "init without optimizer");
    refuses(kopt_state_init(&w.opt, NULL, 1, w.initial), KOPT_ERROR_NULL, "init without tensor");
    refuses(kopt_state_read(NULL, &w.t, KOPT_SLOT_WEIGHT, w.out), KOPT_ERROR_NULL, "read without optimizer");
    refuses(kopt_state_read(&w.opt, NULL, KOPT_SLOT_WEIGHT, w.out), KOPT_ERROR_NULL, "read without tensor");
    refuses(kopt_state_read(&w.opt, &w.t, KOPT_SLOT_WEIGHT, NULL), KOPT_ERROR_NULL, "read into nothing");
    refuses(kopt_state_write(&w.opt, &w.t, KOPT_SLOT_WEIGHT, NULL), KOPT_ERROR_NULL, "write from nothing");
    refuses(kopt_convert(NULL, KOPT_BF16, w.initial, KOPT_F32, N), KOPT_ERROR_NULL, "convert to nothing");
    refuses(kopt_convert(w.copy, KOPT_BF16, NULL, KOPT_F32, N), KOPT_ERROR_NULL, "convert from nothing");
    refuses(kopt_convert_stochastic(NULL, KOPT_BF16, w.initial, KOPT_F32, N, (kopt_random_key){0, 1, 0, 0}),
            KOPT_ERROR_NULL, "convert_stochastic to nothing");
#define REFUSED_TENSOR(code, field, value, what)                            \
    do {                                                                    \
        w.t.field = (value), remember();                                    \
        refuses(kopt_optimizer_step(&w.opt, &w.t, 1), code, "step, " what); \
        refuses(kopt_step_run(&w.step, &w.t, 1), code, "run, " what);       \
        build();                                                            \
    } while (0)
    REFUSED_TENSOR(KOPT_ERROR_NULL, weight, NULL, "no weights");
    REFUSED_TENSOR(KOPT_ERROR_NULL, grad, NULL, "no gradient");
    REFUSED_TENSOR(KOPT_ERROR_NULL, state, NULL, "no state");
    REFUSED_TENSOR(KOPT_ERROR_OPTION, weight_format, (kopt_format)3, "weight format 3");
    REFUSED_TENSOR(KOPT_ERROR_OPTION, weight_format, (kopt_format)-1, "weight format -1");
    REFUSED_TENSOR(KOPT_ERROR_OPTION, grad_format, (kopt_format)3, "gradient format 3");
    w.t.copy = w.copy;
    REFUSED_TENSOR(KOPT_ERROR_OPTION, copy_format, (kopt_format)7, "copy format 7");
    REFUSED_TENSOR(KOPT_ERROR_SIZE, state_size, w.t.state_size - 1, "state one byte short");
    REFUSED_TENSOR(KOPT_ERROR_SIZE, state_size, 63, "state of 63 bytes");
    REFUSED_TENSOR(KOPT_ERROR_BOUNDS, n, SIZE_MAX, "n = SIZE_MAX");
    REFUSED_TENSOR(KOPT_ERROR_BOUNDS, n, SIZE_MAX / 4, "n = SIZE_MAX / 4");
    REFUSED_TENSOR(KOPT_ERROR_BOUNDS, first_index, (uint64_t)1 << 63, "first_index = 2^63");
    check_scales();
    w.t.rate_scale = 0;
    ok(kopt_step_run(&w.step, &w.t, 1) == KOPT_OK && memcmp(w.weight, photograph.weight, sizeof w.weight) != 0,
       "with rate_scale 0, the default, weights move");
    build();
    w.t.state_size--, remember();
    refuses(kopt_state_init(&w.opt, &w.t, 1, w.initial), KOPT_ERROR_SIZE, "init, state one byte short");
    build();
    refuses(kopt_step_range(&w.step, &w.t, 1, 2, 1), KOPT_ERROR_BOUNDS, "begin > end");
    refuses(kopt_step_range(&w.step, &w.t, 1, 0, N + 1), KOPT_ERROR_BOUNDS, "end > n");
    refuses(kopt_step_range(&w.step, &w.t, 1, N + 1, N + 1), KOPT_ERROR_BOUNDS, "begin and end > n");
    refuses(kopt_convert(w.copy, KOPT_BF16, w.initial, KOPT_F32, SIZE_MAX / 2), KOPT_ERROR_BOUNDS, "convert, too many");
    refuses(kopt_convert_stochastic(w.copy, KOPT_BF16, w.initial, KOPT_F32, N,
                                    (kopt_random_key){0, 1, 0, (uint64_t)1 << 63}),
            KOPT_ERROR_BOUNDS, "convert_stochastic, first_index 2^63");
    refuses(kopt_convert(w.copy, (kopt_format)3, w.initial, KOPT_F32, N), KOPT_ERROR_OPTION, "convert to format 3");
    refuses(kopt_convert(w.copy, KOPT_BF16, w.initial, (kopt_format)9, N), KOPT_ERROR_OPTION, "convert from format 9");
    refuses(kopt_state_read(&w.opt, &w.t, (kopt_slot)3, w.out), KOPT_ERROR_OPTION, "read stream 3");
    large.n = SIZE_MAX / 2;
    ok(!kopt_state_size(&w.opt, &large) && !kopt_state_size(NULL, &w.t) && !kopt_state_size(&w.opt, NULL) &&
           !kopt_state_size(&w.opt, &none),
       "state_size is 0 for what cannot be");

    refuses(kopt_state_read(&plain, &none, KOPT_SLOT_FIRST_MOMENT, w.out), KOPT_ERROR_OPTION, "read what is not kept");
    ok(kopt_optimizer_step(&plain, &none, 1) == KOPT_OK && plain.step == 1, "NULL with n = 0 is fine: step");
    ok(kopt_state_init(&plain, &none, 1, NULL) == KOPT_OK, "NULL with n = 0 is fine: init");
    ok(kopt_state_read(&plain, &none, KOPT_SLOT_WEIGHT, NULL) == KOPT_OK, "NULL with n = 0 is fine: read");
    ok(kopt_convert(NULL, KOPT_BF16, NULL, KOPT_F32, 0) == KOPT_OK, "NULL with n = 0 is fine: convert");
    ok(kopt_convert_stochastic(NULL, KOPT_BF16, NULL, KOPT_F32, 0, (kopt_random_key){0, 0, 0, 0}) == KOPT_OK,
       "... convert_stochastic");
    ok(kopt_all_finite(NULL, KOPT_F32, 0) == 1, "NULL with n = 0 is fine: all_finite");
    ok(kopt_optimizer_step(&plain, NULL, 0) == KOPT_OK && plain.step == 2, "a step of no tensors counts");
}

static void check_overlap(void) {
    unsigned char *base[4];
    static const char *const name[] = {"weight", "gradient", "state", "copy"};
    char what[64];
    int a, b, k;
    for (a = 0; a < 4; ++a)
        for (b = 0; b < 4; ++b)
            for (k = 0; k < 2 && a != b; ++k) {
                build();
                w.t.copy = w.copy, w.t.copy_format = KOPT_F32;
                base[0] = w.weight, base[1] = w.grad, base[2] = w.state, base[3] = w.copy;
                /* b is laid onto a: the same start, or a's last byte */
                size_t size = a == 2 ? w.t.state_size : a == 3 ? 4 * N : 2 * N;
                unsigned char *onto = base[a] + (k ? size - 1 : 0);
                if (b == 2) {
                    if (k) continue; /* a state block there would not be one */
                    memcpy(onto, w.state, sizeof w.state < sizeof w.weight ? sizeof w.state : sizeof w.weight);
                }
                if (b == 0) w.t.weight = onto;
                if (b == 1) w.t.grad = onto;
                if (b == 2) w.t.state = onto;
                if (b == 3) w.t.copy = onto;
                remember();
                snprintf(what, sizeof what, "%s on the %s byte of %s", name[b], k ? "last" : "first", name[a]);
                refuses(kopt_step_run(&w.step, &w.t, 1), KOPT_ERROR_OVERLAP, what);
            }
    build();
    refuses(kopt_convert(w.copy, KOPT_BF16, w.copy + 2 * N - 1, KOPT_F32, N), KOPT_ERROR_OVERLAP, "convert, one byte");
    refuses(kopt_convert(w.copy, KOPT_F32, w.copy, KOPT_BF16, N), KOPT_ERROR_OVERLAP, "convert in place");
    refuses(kopt_state_init(&w.opt, &w.t, 1, (const float *)(const void *)w.weight), KOPT_ERROR_OVERLAP,
            "init from the weights themselves");
    refuses(kopt_state_read(&w.opt, &w.t, KOPT_SLOT_WEIGHT, (float *)(void *)w.weight), KOPT_ERROR_OVERLAP,
            "read into the weights");
    w.t.copy = w.weight + 2 * N, w.t.copy_format = KOPT_BF16;
    ok(kopt_step_run(&w.step, &w.t, 1) == KOPT_OK, "neighbours that touch do not overlap");
}

/* fp32 values beside the weights and the state block, and one byte into them. */
static void check_values_overlap(void) {
    enum { WEIGHTS = 4 * N, STATE = WEIGHTS + 2 * N + 4 * N, ALL = STATE + ROOM + 4 * N };
    static unsigned char arena[ALL], before[ALL];
    const size_t size = kopt_state_size(&w.opt, &w.t);
    int place, in, call, bad = 0, refused = 0;
    for (place = 0; place < 4; ++place) /* before and behind the weights, before and behind the block */
        for (in = 0; in < 2; ++in)
            for (call = 0; call < 3; ++call) {
                const size_t at = place == 0   ? (size_t)in
                                  : place == 1 ? WEIGHTS + 2 * N - (size_t)in
                                  : place == 2 ? STATE - 4 * N + (size_t)in
                                               : STATE + size - (size_t)in;
                void *const values = arena + at;
                kopt_tensor t = kopt_tensor_of(arena + WEIGHTS, KOPT_BF16, NULL, KOPT_BF16, N, arena + STATE, size);
                kopt_result r;
                build();
                memset(arena, 0, sizeof arena);
                kopt_state_init(&w.opt, &t, 1, w.initial);
                memcpy(before, arena, sizeof arena);
                r = call == 0   ? kopt_state_init(&w.opt, &t, 1, (const float *)values)
                    : call == 1 ? kopt_state_read(&w.opt, &t, KOPT_SLOT_WEIGHT, (float *)values)
                                : kopt_state_write(&w.opt, &t, KOPT_SLOT_FIRST_MOMENT, (const float *)values);
                bad += r != (in ? KOPT_ERROR_OVERLAP : KOPT_OK);
                if (in) ++refused, bad += memcmp(before, arena, sizeof arena) != 0;
            }
    ok(!bad && refused == 12,
       "OVERLAP: init, read, write with values on the first or last byte of weights and block: "
       "%d wrong",
       bad);
}

static void check_list(void) {
    static uint16_t weight[N], grad[N];
    static unsigned char other[ROOM];
    kopt_tensor list[2];
    build();
    list[0] = w.t, list[1] = kopt_tensor_of(weight, KOPT_BF16, grad, KOPT_BF16, N, other, sizeof other);
    list[1].id = list[0].id + 1;
    refuses(kopt_optimizer_step(&w.opt, list, 2), KOPT_ERROR_STATE, "second tensor's state never initialised");
    kopt_state_init(&w.opt, &list[1], 1, NULL);
    list[1].grad = NULL;
    refuses(kopt_optimizer_step(&w.opt, list, 2), KOPT_ERROR_NULL, "second tensor without gradient");
    list[1].grad = grad;
    ok(kopt_optimizer_step(&w.opt, list, 2) == KOPT_OK && w.opt.step == photograph.opt.step + 1, "a list is one step");
}

/* ---- State blocks ----------------------------------------------------------------------------------------------- */

static void check_blocks(void) {
    kopt_step zero;
    build();
    memset(&zero, 0, sizeof zero);
    refuses(kopt_step_run(&zero, &w.t, 1), KOPT_ERROR_STEP, "a step that was not begun");
    w.opt.step = UINT32_MAX, remember();
    refuses(kopt_step_begin(&w.step, &w.opt), KOPT_ERROR_STEP, "2^32 - 1 steps are used up: begin");
    refuses(kopt_optimizer_step(&w.opt, &w.t, 1), KOPT_ERROR_STEP, "2^32 - 1 steps are used up: step");
    build();
    w.opt.step = UINT32_MAX - 1;
    ok(kopt_step_begin(&w.step, &w.opt) == KOPT_OK && w.opt.step == UINT32_MAX, "the last step is number 2^32 - 1");
    build();
    memset(w.state, 0, 64), remember();
    refuses(kopt_step_run(&w.step, &w.t, 1), KOPT_ERROR_STATE, "a header of zeros");
    memset(w.state, 0xff, 64), remember();
    refuses(kopt_optimizer_step(&w.opt, &w.t, 1), KOPT_ERROR_STATE, "a header of ones");
    refuses(kopt_save(&w.opt, &w.t, 1, image, sizeof image), KOPT_ERROR_STATE, "save, a header of ones");
#define ANOTHER(change, what)                                                                                \
    do {                                                                                                     \
        build(), change, remember();                                                                         \
        refuses(kopt_optimizer_step(&w.opt, &w.t, 1), KOPT_ERROR_MISMATCH, what);                            \
        refuses(kopt_state_read(&w.opt, &w.t, KOPT_SLOT_WEIGHT, w.out), KOPT_ERROR_MISMATCH, "read, " what); \
        refuses(kopt_save(&w.opt, &w.t, 1, image, sizeof image), KOPT_ERROR_MISMATCH, "save, " what);        \
    } while (0)
    ANOTHER(w.t.n = N - 1, "a block for another n");
    ANOTHER(w.t.id = 1, "a block for another tensor");
    ANOTHER(w.t.first_index = 8, "a block for another shard");
    ANOTHER(w.opt.rounding = KOPT_EXACT, "a block for another rounding");
    ANOTHER(w.t.weight_format = KOPT_FP16, "a block for another weight format");
    ANOTHER(w.t.weight_format = KOPT_F32, "a block for weights of 32 bits");
    ANOTHER(w.opt.first_moment_format = w.opt.second_moment_format = KOPT_FP16, "a block for another moment format");
    ANOTHER((w.opt = kopt_sgd(0.1, 0.9)), "a block for another rule");
}

/* Each byte of the header that says whose block it is. Byte 10 is 1 in a checkpoint. */
static void check_header(void) {
    int i, k, call, bad[32] = {0}, all = 0;
    for (i = 0; i < 32; ++i)
        for (k = 0; k < 2; ++k) {
            const kopt_result want = i <= 4 || i == 10 ? KOPT_ERROR_STATE : KOPT_ERROR_MISMATCH;
            kopt_result r[6];
            build();
            if (i == 4)
                w.state[i] = k ? 1 : 0x55;
            else
                w.state[i] ^= k && i != 9 ? 0x80 : 1;
            remember();
            r[0] = kopt_step_run(&w.step, &w.t, 1);
            r[1] = kopt_step_range(&w.step, &w.t, 1, 1, 2);
            r[2] = kopt_optimizer_step(&w.opt, &w.t, 1);
            r[3] = kopt_state_read(&w.opt, &w.t, KOPT_SLOT_WEIGHT, w.out);
            r[4] = kopt_state_write(&w.opt, &w.t, KOPT_SLOT_WEIGHT, w.initial);
            r[5] = kopt_save(&w.opt, &w.t, 1, image, sizeof image);
            for (call = 0; call < 6; ++call) bad[i] += r[call] != want;
            bad[i] += !unchanged();
            if (bad[i] && !all++) note("byte %d of a block: %s", i, result_name[r[0]]);
        }
    for (i = all = 0; i < 32; ++i) all += bad[i];
    ok(!all, "STATE, MISMATCH: each of 32 bytes of a header changed: %d wrong", all);
}

/* What is written as fp32 is read back rounded to nearest, for each format and rounding. */
static void check_read_write(void) {
    int format, rounding, what, i, bad = 0;
    for (format = KOPT_F32; format <= KOPT_FP16; ++format)
        for (rounding = 0; rounding < ROUNDINGS; ++rounding) {
            static float in[N], out[N];
            build();
            w.t.weight_format = w.opt.first_moment_format = w.opt.second_moment_format = (kopt_format)format,
            w.opt.rounding = (kopt_rounding)rounding;
            if (!ref_accepts(&w.opt)) continue;
            w.t.state_size = kopt_state_size(&w.opt, &w.t);
            bad += kopt_state_init(&w.opt, &w.t, 1, w.initial) != KOPT_OK;
            for (what = KOPT_SLOT_WEIGHT; what <= KOPT_SLOT_SECOND_MOMENT; ++what) {
                /* the relative error: half an ulp, 2^-8 of it with a residual, twice that of a root when squared */
                int carries = what == KOPT_SLOT_WEIGHT && ref_carries(&w.opt, KOPT_BF16),
                    digits = format == KOPT_BF16 ? 8 : 11;
                double error = ldexp(1, -digits - (carries ? 7 : 0) + (what == KOPT_SLOT_SECOND_MOMENT));
                if (format == KOPT_F32 || (carries && rounding == KOPT_EXACT)) error = 0;
                for (i = 0; i < N; ++i) in[i] = (float)(i + 1) / (what == KOPT_SLOT_WEIGHT ? -91.0f : 91.0f);
                bad += kopt_state_write(&w.opt, &w.t, (kopt_slot)what, in) != KOPT_OK;
                bad += kopt_state_read(&w.opt, &w.t, (kopt_slot)what, out) != KOPT_OK;
                for (i = 0; i < N; ++i) bad += fabs((double)out[i] - (double)in[i]) > error * fabs((double)in[i]);
                bad += kopt_state_write(&w.opt, &w.t, (kopt_slot)what, out) != KOPT_OK;
                memcpy(in, out, sizeof in);
                bad += kopt_state_read(&w.opt, &w.t, (kopt_slot)what, out) != KOPT_OK;
                bad += memcmp(in, out, sizeof in) != 0;
            }
        }
    ok(!bad, "weights and moments written as fp32 are read back; again, and nothing changes: %d wrong", bad);
}

/* ---- Floating-point environment --------------------------------------------------------------------------------- */

#if defined(__x86_64__) || defined(__SSE2__)
#define HAVE_CONTROL 1
static uint64_t get_control(void) { return _mm_getcsr(); }
static void set_control(uint64_t c) { _mm_setcsr((unsigned)c); }
enum { FLUSH = 0x8040, CONTROL = 0xffc0 }; /* FTZ and DAZ; all but the exception flags */
#elif defined(__aarch64__)
#define HAVE_CONTROL 1
static uint64_t get_control(void) {
    uint64_t c;
    __asm__ volatile("mrs %0, fpcr" : "=r"(c));
    return c;
}
static void set_control(uint64_t c) { __asm__ volatile("msr fpcr, %0" : : "r"(c)); }
enum { FLUSH = 0x1000000, CONTROL = 0x7ffffff };
#endif

#ifdef HAVE_CONTROL
/* Everything that computes, on inputs with subnormals. The results are in the arrays of the world. */
static void compute_everything(int rule) {
    int k, i;
    build();
    if (rule) w.opt = kopt_sgd(0.3, 0.9);
    w.opt.rounding = (kopt_rounding)(KOPT_NEAREST + rule % ROUNDINGS);
    w.t.state_size = kopt_state_size(&w.opt, &w.t);
    for (i = 0; i < N; i += 2) w.initial[i] = ref_float((uint32_t)i * 0x12345u);
    kopt_state_init(&w.opt, &w.t, 1, w.initial);
    for (k = 0; k < 3; ++k) {
        fill_gradient((unsigned)k);
        for (i = 0; i < N; i += 3) ref_set(w.grad, 2, (size_t)i, (uint32_t)(i * 37) & 0x81ff);
        kopt_optimizer_step(&w.opt, &w.t, 1);
    }
    kopt_step_begin(&w.step, &w.opt);
    kopt_step_range(&w.step, &w.t, 1, 0, N);
    kopt_state_read(&w.opt, &w.t, KOPT_SLOT_WEIGHT, w.out);
    kopt_state_write(&w.opt, &w.t, KOPT_SLOT_WEIGHT, w.out);
    kopt_convert(w.copy, KOPT_FP16, w.initial, KOPT_F32, N);
    kopt_convert_stochastic(w.copy + 2 * N, KOPT_BF16, w.initial, KOPT_F32, N, (kopt_random_key){1, 2, 3, 4});
}

static void check_environment(void) {
    static world plain;
    const size_t arrays = offsetof(world, initial);
    static const int direction[] = ROUNDING_DIRECTIONS;
    int isa, k, rule, flush, differ = 0, changed = 0, cases = 0;
    FOR_EACH_ISA(isa)
    for (rule = 0; rule < 6; ++rule) {
        compute_everything(rule);
        plain = w;
        for (k = 0; k < 4; ++k)
            for (flush = 0; flush < 2; ++flush, ++cases) {
                uint64_t control;
                fesetround(direction[k]);
                set_control(get_control() | (flush ? FLUSH : 0));
                control = get_control() & CONTROL;
                compute_everything(rule);
                changed += (get_control() & CONTROL) != control;
                fesetenv(FE_DFL_ENV);
                differ += memcmp(plain.initial, w.initial, offsetof(world, state) + ROOM - arrays) != 0;
            }
    }
    ok(!differ && !changed, "the caller's rounding direction and flushing: %d cases, %d of other bits, %d not restored",
       cases, differ, changed);
    fesetround(FE_UPWARD); /* a call that is refused, and one that runs, each by itself */
    set_control(get_control() | FLUSH);
    {
        uint64_t control = get_control();
        build();
        changed = (get_control() & CONTROL) != (control & CONTROL);
        kopt_step_range(&w.step, &w.t, 1, 3, 2), changed += (get_control() & CONTROL) != (control & CONTROL);
        kopt_step_range(&w.step, &w.t, 1, 3, 4), changed += (get_control() & CONTROL) != (control & CONTROL);
        kopt_save(&w.opt, &w.t, 1, image, sizeof image), changed += (get_control() & CONTROL) != (control & CONTROL);
        kopt_step_run(&w.step, &w.t, 1), changed += (get_control() & CONTROL) != (control & CONTROL);
    }
    fesetenv(FE_DFL_ENV);
    ok(!changed, "restored after single calls too: %d were not", changed);
    for (flush = 0, differ = 0; flush < 2; ++flush) { /* subnormal doubles are numbers before the environment is set */
        static const unsigned char one_bit = 1;
        const uint16_t order = 1;
        kopt_optimizer o = kopt_sgd(0.1, 0);
        size_t last = memcmp(&order, &one_bit, 1) == 0 ? 0 : sizeof o.momentum - 1;
        set_control(get_control() | (flush ? FLUSH : 0));
        memcpy((unsigned char *)&o.momentum + last, &one_bit, 1); /* 4.9e-324 */
        differ += kopt_state_size(&o, &w.t) != 64 + 416;          /* residual and one moment */
        o.nesterov = 1;
        differ += kopt_step_begin(&w.step, &o) != KOPT_OK || scalars_of(&w.step).moment_count != 1;
        o = kopt_adamw(0);
        o.decay_mode = KOPT_DECAY_FULLY_DECOUPLED;
        o.max_lr = 0;
        differ += kopt_step_begin(&w.step, &o) != KOPT_ERROR_RANGE;
        memcpy((unsigned char *)&o.max_lr + last, &one_bit, 1); /* 0 as a float */
        differ += kopt_step_begin(&w.step, &o) != KOPT_ERROR_RANGE;
        o.max_lr = 1e-40; /* a subnormal float */
        differ += kopt_step_begin(&w.step, &o) != KOPT_OK;
        fesetenv(FE_DFL_ENV);
    }
    ok(!differ, "subnormal hyper-parameters under the caller's flushing: %d wrong", differ);
}
#else
static void check_environment(void) { skip("no control register known on this machine"); }
#endif

/* ---- The rest --------------------------------------------------------------------------------------------------- */

static void check_infinite_weight(void) {
    int format, rounding, bad = 0, i, k;
    for (format = KOPT_BF16; format <= KOPT_FP16; ++format)
        for (rounding = KOPT_KAHAN; rounding <= KOPT_EXACT; ++rounding) {
            uint32_t infinite = format == KOPT_BF16 ? 0x7f80 : 0x7c00;
            uint32_t little = format == KOPT_BF16 ? 0xfb400000 : 0xc1c00000;
            build();
            w.opt = kopt_sgd(1, 0);
            w.t.weight_format = (kopt_format)format, w.opt.rounding = (kopt_rounding)rounding;
            w.t.grad_format = KOPT_F32, w.t.state_size = kopt_state_size(&w.opt, &w.t);
            kopt_state_init(&w.opt, &w.t, 1, w.initial);
            for (i = 0; i < N; ++i) {
                ref_set(w.weight, 2, (size_t)i, i % 3 ? infinite - 1 : infinite);
                ref_set(w.state + 64, rounding == KOPT_COMPACT ? 1 : 2, (size_t)i, i % 3 ? 0x1111 : 0);
                ref_set(w.grad, 4, (size_t)i, i % 2 ? 0xff7fffff : little); /* up, by the largest fp32 or by 3/4 ulp */
            }
            for (k = 0; k < 2; ++k) {
                kopt_optimizer_step(&w.opt, &w.t, 1);
                for (i = 0; i < N; ++i) {
                    size_t width = rounding == KOPT_COMPACT ? 1 : 2;
                    bad += ref_get(w.weight, 2, (size_t)i) != infinite || ref_get(w.state + 64, width, (size_t)i) != 0;
                }
            }
        }
    ok(!bad, "a weight that becomes infinite stays so, and its residual is zero: %d are not", bad);
}

/* Array steps of SGD with KAHAN against the one-element functions, any bits in weight, compensation and gradient. */
static void check_one_element(void) {
    enum { MANY = 20000 };
    static uint16_t weight[MANY], start[MANY], before[MANY];
    static uint32_t grad[MANY];
    static unsigned char state[64 + 2 * MANY];
    uint32_t noise = 1;
    int format, i;
    for (format = KOPT_BF16; format <= KOPT_FP16; ++format) {
        int bad = 0;
        kopt_optimizer o = kopt_sgd(1, 0);
        kopt_tensor t = kopt_tensor_of(weight, (kopt_format)format, grad, KOPT_F32, MANY, state, sizeof state);
        o.seed = 5, t.id = 6, t.first_index = 7;
        kopt_state_init(&o, &t, 1, NULL);
        for (i = 0; i < MANY; ++i) {
            uint32_t exponent, fine = (uint32_t)i % 4;
            weight[i] = (uint16_t)(lcg32(&noise) >> 16);
            exponent = ref_widen((kopt_format)format, weight[i]) & 0x7f800000;
            before[i] = (uint16_t)(lcg32(&noise) >> 16);
            if (fine) before[i] = 0;
            lcg32(&noise);
            grad[i] = noise ^ noise << 13;
            if (fine && exponent > 0x0c000000) /* 2^-6, 2^-12 or 2^-18 of the weight */
                grad[i] = (grad[i] & 0x807fffff) | (exponent - fine * 0x03000000);
        }
        memcpy(start, weight, sizeof start);
        memcpy(state + 64, before, sizeof before);
        kopt_optimizer_step(&o, &t, 1);
        for (i = 0; i < MANY; ++i) {
            uint32_t r =
                kopt_random((kopt_random_key){5, 1, 6, 0}, 0, 7 + (uint64_t)i); /* number 0 is its lower half */
            kopt_bf16 one = start[i], c = before[i];
            if (format == KOPT_BF16)
                kopt_kahan_add_bf16(&one, &c, -ref_float(grad[i]), r);
            else
                kopt_kahan_add_fp16(&one, &c, -ref_float(grad[i]), r);
            bad += one != weight[i] || c != ref_get(state + 64, 2, (size_t)i);
        }
        ok(!bad, "one-element update in %s is the array step, bit for bit: %d of %d differ",
           format == KOPT_BF16 ? "bf16" : "fp16", bad, MANY);
    }
}

/* kopt_kahan_add() against a loop over one-element functions, and its errors. Any bits in weights, compensations and
   deltas; every length up to a few vectors, odd addresses, parts of a group of random numbers. */
static void check_kahan_add(void) {
    enum { MOST = 700 };
    static unsigned char weight[2 * MOST + 8], c[2 * MOST + 8], delta[4 * MOST + 8];
    static uint16_t loop_w[MOST], loop_c[MOST];
    uint32_t noise = 3;
    int isa, f;
    size_t n, i;
    FOR_EACH_ISA(isa)
    for (f = KOPT_BF16; f <= KOPT_FP16; ++f) {
        unsigned bad = 0, outside = 0;
        for (n = 0; n <= MOST; n += n < 70 ? 1 : 63) {
            const kopt_random_key key = {5 + n, 6, 7, n % 3 ? n * 37 : ((uint64_t)1 << 63) - 400};
            unsigned char *const pw = weight + n % 5, *const pc = c + n % 7, *const pd = delta + n % 8;
            memset(weight, 0xa5, sizeof weight), memset(c, 0xa5, sizeof c);
            for (i = 0; i < n; ++i) {
                const uint32_t bits = lcg32(&noise) >> 16, exponent = ref_widen((kopt_format)f, bits) & 0x7f800000;
                uint32_t d = lcg32(&noise), kind = noise >> 8 & 15;
                if (kind > 3 && exponent > 0x0c000000) d = (d & 0x807fffff) | (exponent - (kind % 4) * 0x03000000);
                if (kind == 1) d = (d & 0x80000000) | 0x7f800000; /* infinity */
                if (kind == 2) d &= 0x807fffff;                   /* subnormal */
                loop_w[i] = (uint16_t)bits, loop_c[i] = kind > 7 ? 0 : (uint16_t)(lcg32(&noise) >> 16);
                ref_set(pw, 2, i, loop_w[i]), ref_set(pc, 2, i, loop_c[i]), ref_set(pd, 4, i, d);
                if (f == KOPT_BF16)
                    kopt_kahan_add_bf16(&loop_w[i], &loop_c[i], ref_float(d), kopt_random(key, 0, i));
                else
                    kopt_kahan_add_fp16(&loop_w[i], &loop_c[i], ref_float(d), kopt_random(key, 0, i));
            }
            bad += kopt_kahan_add(pw, pc, (kopt_format)f, (const float *)(void *)pd, n, key) != KOPT_OK;
            for (i = 0; i < n; ++i) bad += ref_get(pw, 2, i) != loop_w[i] || ref_get(pc, 2, i) != loop_c[i];
            for (i = 0; i < sizeof weight; ++i) {
                if (weight + i < pw || weight + i >= pw + 2 * n) outside += weight[i] != 0xa5;
                if (c + i < pc || c + i >= pc + 2 * n) outside += c[i] != 0xa5;
            }
        }
        ok(!bad && !outside, "kopt_kahan_add() in %s is a loop over elements, %s: %u differ, %u written outside",
           f == KOPT_BF16 ? "bf16" : "fp16", kopt_isa_name((kopt_isa)isa), bad, outside);
    }
    {
        const kopt_random_key key = {0, 0, 0, 0}, far = {0, 0, 0, (uint64_t)1 << 63};
        const float *const d = (const float *)(void *)delta;
        unsigned bad = 0;
        memcpy(loop_w, weight, sizeof loop_w), memcpy(loop_c, c, sizeof loop_c);
        bad += kopt_kahan_add(NULL, c, KOPT_BF16, d, 9, key) != KOPT_ERROR_NULL;
        bad += kopt_kahan_add(weight, NULL, KOPT_BF16, d, 9, key) != KOPT_ERROR_NULL;
        bad += kopt_kahan_add(weight, c, KOPT_BF16, NULL, 9, key) != KOPT_ERROR_NULL;
        bad += kopt_kahan_add(weight, c, KOPT_F32, d, 9, key) != KOPT_ERROR_OPTION;
        bad += kopt_kahan_add(weight, c, KOPT_Q8, d, 9, key) != KOPT_ERROR_OPTION;
        bad += kopt_kahan_add(weight, c, (kopt_format)-1, d, 9, key) != KOPT_ERROR_OPTION;
        bad += kopt_kahan_add(weight, c, KOPT_BF16, d, SIZE_MAX / 32 - 7, key) != KOPT_ERROR_BOUNDS;
        bad += kopt_kahan_add(weight, c, KOPT_BF16, d, 9, far) != KOPT_ERROR_BOUNDS;
        bad += kopt_kahan_add(weight, weight + 17, KOPT_BF16, d, 9, key) != KOPT_ERROR_OVERLAP;
        bad += kopt_kahan_add(weight, c, KOPT_FP16, (const float *)(void *)(weight + 17), 9, key) != KOPT_ERROR_OVERLAP;
        bad += kopt_kahan_add(delta + 35, c, KOPT_FP16, d, 9, key) != KOPT_ERROR_OVERLAP;
        bad += kopt_kahan_add(weight, delta + 35, KOPT_FP16, d, 9, key) != KOPT_ERROR_OVERLAP;
        bad += memcmp(loop_w, weight, sizeof loop_w) != 0 || memcmp(loop_c, c, sizeof loop_c) != 0;
        bad += kopt_kahan_add(NULL, NULL, KOPT_BF16, NULL, 0, key) != KOPT_OK;
        bad += kopt_kahan_add(weight, weight + 18, KOPT_BF16, d, 9, key) != KOPT_OK;
        ok(!bad, "kopt_kahan_add() refuses bad arguments and writes nothing: %u wrong", bad);
    }
}

static void check_all_finite(void) {
    static unsigned char x[4 * 300 + 8];
    int isa, format, bad = 0;
    size_t n, at;
    FOR_EACH_ISA(isa)
    for (format = KOPT_F32; format <= KOPT_FP16; ++format) {
        static const uint32_t largest[] = {0x7f7fffff, 0x7f7f, 0x7bff}, infinite[] = {0x7f800000, 0x7f80, 0x7c00};
        size_t width = ref_width((kopt_format)format);
        for (n = 0; n < 300; n += 7) {
            unsigned char *p = x + n % 8;
            for (at = 0; at < n; ++at) ref_set(p, width, at, largest[format] | (uint32_t)(at & 1) << (8 * width - 1));
            bad += kopt_all_finite(p, (kopt_format)format, n) != 1;
            for (at = 0; at < n; ++at) {
                uint32_t kept = ref_get(p, width, at);
                ref_set(p, width, at, infinite[format] + (uint32_t)at % 2);
                bad += kopt_all_finite(p, (kopt_format)format, n) != 0;
                ref_set(p, width, at, kept);
            }
        }
    }
    ok(!bad, "all_finite finds one infinity or NaN at any place: %d wrong", bad);
}

static void check_names(void) {
    static char sentence[KOPT_ERROR_VERSION + 1][200];
    kopt_isa isas[ISAS];
    int a, b, bad = 0, usable = 0, visited = 0;
    for (a = KOPT_OK; a <= KOPT_ERROR_VERSION; ++a) {
        bad += snprintf(sentence[a], sizeof sentence[a], "%s", kopt_result_string((kopt_result)a)) < 2;
        for (b = KOPT_OK; b < a; ++b) bad += !strcmp(sentence[a], sentence[b]);
    }
    ok(!bad, "each result has a sentence of its own");
    ok(kopt_result_string((kopt_result)99) && kopt_result_string((kopt_result)-1), "an unknown result has one too");
    ok(kopt_version() == KOPT_VERSION, "version");
    for (a = 0; strcmp(kopt_isa_name((kopt_isa)a), "unknown") != 0; ++a) { /* so a program finds all */
        kopt_isa before = kopt_isa_current();
        kopt_result r = kopt_isa_force((kopt_isa)a);
        bad += !kopt_isa_name((kopt_isa)a);
        if (kopt_isa_usable((kopt_isa)a))
            ++usable, bad += r != KOPT_OK || kopt_isa_current() != (kopt_isa)a;
        else
            bad += r != KOPT_ERROR_ISA || kopt_isa_current() != before;
    }
    bad += a != KOPT_ISA_SIMD128 + 1;
    FOR_EACH_ISA(a)++ visited, bad += kopt_isa_current() != (kopt_isa)a; /* as the tests go through them */
    bad += visited != usable || usable_isas(isas) != usable;
    ok(!bad && kopt_isa_usable(KOPT_ISA_SCALAR), "%d instruction sets usable, the others refused (ISA)", usable);
    ok(!strcmp(kopt_isa_name(KOPT_ISA_SCALAR), "scalar") && !strcmp(kopt_isa_name(KOPT_ISA_SSE2), "sse2") &&
           !strcmp(kopt_isa_name(KOPT_ISA_AVX2), "avx2") && !strcmp(kopt_isa_name(KOPT_ISA_AVX512), "avx512") &&
           !strcmp(kopt_isa_name(KOPT_ISA_NEON), "neon") && !strcmp(kopt_isa_name(KOPT_ISA_SIMD128), "simd128"),
       "each instruction set has its own name");
    ok(kopt_isa_force((kopt_isa)99) == KOPT_ERROR_ISA && !kopt_isa_usable((kopt_isa)99) && kopt_isa_name((kopt_isa)99),
       "ISA: number 99");
    ok(kopt_isa_force(KOPT_ISA_AUTO) == KOPT_OK && kopt_isa_usable(kopt_isa_current()), "automatic choice");
}

/* A tensor of one element is no exception: its block on its weight, its copy on its weight. */
static void check_one_element_overlap(void) {
    unsigned char place[176] = {0}, before[176];
    kopt_optimizer o = kopt_adamw(1e-3);
    kopt_tensor t = kopt_tensor_of(place + 120, KOPT_BF16, place + 140, KOPT_BF16, 1, place, 112);
    int at, bad = kopt_state_init(&o, &t, 1, NULL) != KOPT_OK || kopt_state_size(&o, &t) != 112;
    memcpy(before, place, sizeof place);
    for (at = 0; at < 120; ++at) { /* the weight is two bytes */
        t.weight = place + at;
        bad += kopt_optimizer_step(&o, &t, 1) != (at < 112 ? KOPT_ERROR_OVERLAP : KOPT_OK);
        memcpy(place, before, sizeof place);
    }
    t.weight = place + 120, t.copy = place + 121, t.copy_format = KOPT_BF16;
    bad += kopt_optimizer_step(&o, &t, 1) != KOPT_ERROR_OVERLAP;
    ok(!bad, "OVERLAP: a tensor of one element, its weight on each byte of its block: %d wrong", bad);
}

/* A decay of 2 is one, although its word is a power of two: w - 1 * 2 w by decoupled decay, w - 0.5 * (2 w) by L2. */
static void check_decay_of_two(void) {
    int isa, decay, power, i, bad = 0;
    FOR_EACH_ISA(isa)
    for (decay = KOPT_DECAY_L2; decay <= KOPT_DECAY_DECOUPLED; ++decay)
        for (power = -20; power <= 20; ++power) { /* 2^power in the place of 2 */
            const double two = ldexp(1, power);
            float weight[37], grad[37] = {0};
            kopt_optimizer o = kopt_sgd(decay == KOPT_DECAY_L2 ? 1 / two : 1, 0);
            kopt_tensor t = kopt_tensor_of(weight, KOPT_F32, grad, KOPT_F32, 37, NULL, 0);
            o.decay_mode = (kopt_decay_mode)decay, o.weight_decay = two;
            for (i = 0; i < 37; ++i) weight[i] = 1;
            bad += kopt_optimizer_step(&o, &t, 1) != KOPT_OK;
            for (i = 0; i < 37; ++i)
                bad += ref_bits(weight[i]) != ref_bits(decay == KOPT_DECAY_L2 ? 0 : (float)(1 - two));
        }
    ok(!bad, "decay by powers of two: %d wrong", bad);
}

/* What the papers, torch.optim and optimi have as defaults; all other fields are as the manual says. */
static int is_default(kopt_optimizer o, kopt_rule rule, kopt_decay_mode decay, double weight_decay, double beta1,
                      double beta2, double eps) {
    const int formats = o.rounding == KOPT_KAHAN && o.first_moment_format == KOPT_BF16 &&
                        o.moment_rounding == KOPT_STOCHASTIC && o.residual_rounding == KOPT_STOCHASTIC;
    const int rates = o.lr == (rule == KOPT_RULE_EMA ? 1 : 0.125) && o.max_lr == o.lr && o.grad_scale == 1 &&
                      o.clip == 1 && o.dampening == 0;
    const int off = !o.nesterov && !o.maximize && !o.zero_grad && !o.amsgrad && !o.moments_only;
    return formats && rates && off && o.seed == 0 && o.step == 0 && o.rule == rule && o.decay_mode == decay &&
           o.weight_decay == weight_decay && o.beta1 == beta1 && o.beta2 == beta2 && o.beta3 == 0.99 && o.eps == eps &&
           o.lookahead == 6 && o.lookahead_rate == 0.5;
}

static void check_defaults(void) {
    unsigned char a[4], b[4];
    kopt_optimizer sgd = kopt_sgd(0.125, 0.75), stable = kopt_stable_adamw(0.125), ema = kopt_ema(0.875);
    kopt_optimizer lion = kopt_lion(0.125);
    kopt_tensor t = kopt_tensor_of(a, KOPT_BF16, b, KOPT_FP16, 2, w.state, 7);
    kopt_scaler s = kopt_scaler_of();
    int k, bad = 0;
    ok(is_default(sgd, KOPT_RULE_SGD, KOPT_DECAY_L2, 0, 0.9, 0.999, 1e-8) && sgd.momentum == 0.75 && !sgd.stable &&
           is_default(kopt_adam(0.125), KOPT_RULE_ADAM, KOPT_DECAY_L2, 0, 0.9, 0.999, 1e-8) &&
           is_default(kopt_adamw(0.125), KOPT_RULE_ADAM, KOPT_DECAY_DECOUPLED, 0.01, 0.9, 0.999, 1e-8) &&
           !kopt_adamw(1).stable && is_default(stable, KOPT_RULE_ADAM, KOPT_DECAY_DECOUPLED, 0.01, 0.9, 0.99, 1e-6) &&
           stable.stable == 1 && is_default(lion, KOPT_RULE_LION, KOPT_DECAY_DECOUPLED, 0, 0.9, 0.99, 1e-8) &&
           lion.momentum == 0 &&
           is_default(kopt_adan(0.125), KOPT_RULE_ADAN, KOPT_DECAY_DECOUPLED, 0.02, 0.98, 0.92, 1e-6) &&
           is_default(kopt_radam(0.125), KOPT_RULE_RADAM, KOPT_DECAY_L2, 0, 0.9, 0.999, 1e-8) &&
           is_default(kopt_ranger(0.125), KOPT_RULE_RANGER, KOPT_DECAY_DECOUPLED, 0, 0.9, 0.99, 1e-6) &&
           is_default(ema, KOPT_RULE_EMA, KOPT_DECAY_L2, 0, 0.875, 0.999, 1e-8),
       "the defaults of each rule");
    ok(t.weight == a && t.weight_format == KOPT_BF16 && t.grad == b && t.grad_format == KOPT_FP16 && t.n == 2 &&
           t.state == w.state && t.state_size == 7 && t.copy == NULL && t.copy_format == KOPT_F32 && t.id == 0 &&
           t.first_index == 0 && t.rate_scale == 1 && bits_of(t.stable_scale) == 0 && t.counts == NULL && !t.no_decay &&
           t.arrays == NULL && t.reserved32_ == 0 && t.reserved_[0] == 0 && t.reserved_[1] == 0,
       "... of a tensor");
    ok(s.scale == 65536 && bits_of(s.minimum) == 0 && s.reserved_ == 0 && s.growth == 2 && s.backoff == 0.5 &&
           s.interval == 2000 && s.hysteresis == 1 && s.good == 0 && s.bad == 0,
       "... of a scaler");
    for (k = 0; k < 6; ++k) {
        const kopt_format format = (kopt_format)(k / 2);
        kopt_accumulator x = kopt_accumulator_of(a, format, k % 2 ? b : NULL, 2);
        kopt_compressor c = kopt_compressor_of(format, k % 2 ? b : NULL, 2);
        bad += x.sum != a || x.residual != (k % 2 ? b : NULL) || x.format != format || x.n != 2;
        bad += x.rounding != (k % 2 ? KOPT_KAHAN : KOPT_STOCHASTIC) || x.residual_rounding != KOPT_STOCHASTIC;
        bad += x.count != 0 || x.step != 0 || x.id != 0 || x.seed != 0 || x.first_index != 0;
        bad += c.code != format || c.residual != (k % 2 ? b : NULL) || c.residual_format != KOPT_BF16 || c.n != 2;
        bad += c.rounding != (k % 2 ? KOPT_NEAREST : KOPT_STOCHASTIC) || c.residual_rounding != KOPT_STOCHASTIC;
        bad += c.step != 0 || c.id != 0 || c.seed != 0 || c.first_index != 0;
    }
    ok(!bad, "... of accumulators and compressors: %d wrong", bad);
    lion.step = 0;
    ok(kopt_step_begin(&w.step, &lion) == KOPT_OK && ref_bits(scalars_of(&w.step).sharpness) == 0,
       "the step of Lion takes the sign");
}

/* What falls below 2^-126 is +0, the compensation too. */
static void check_one_element_flush(void) {
    kopt_bf16 w1 = 0x0080, c1 = 0, w2 = 0x8080, c2 = 0, w3 = 0x0080, c3 = 0;
    kopt_kahan_add_bf16(&w1, &c1, -0x1p-127f, 0);
    kopt_kahan_add_bf16(&w2, &c2, 0x1p-127f, 0);
    kopt_kahan_add_bf16(&w3, &c3, 0x1p-140f, 0); /* what c3 would hold */
    ok(w1 == 0 && c1 == 0 && w2 == 0 && c2 == 0 && w3 == 0x0080 && c3 == 0,
       "one-element updates store no subnormals in bf16");
}

int main(void) {
    fesetenv(FE_DFL_ENV);
    check_names();
    check_options();
    check_reserved();
    check_init();
    check_ranges();
    check_limits();
    check_ends();
    check_pointers_and_bounds();
    check_overlap();
    check_values_overlap();
    check_list();
    check_blocks();
    check_header();
    check_read_write();
    check_environment();
    check_infinite_weight();
    check_one_element();
    check_kahan_add();
    check_one_element_flush();
    check_defaults();
    check_one_element_overlap();
    check_decay_of_two();
    check_all_finite();
    return done();
}
