/* test_state.c - what writing and reading of state stores, subnormals included; fp32 arrays at any address; lists whose
   tensors share memory; where the arrays of a block begin; blocks that do not exist; memory that never was a step. */
#define KAHAN_OPT_IMPLEMENTATION
#include "../../kahan_opt.h"

#include "tap.h"
#include "reference.h"
#include "inputs.h"

#include <fenv.h>
#include <stddef.h>

enum { N = 600 };
static kopt_optimizer opt;
static kopt_tensor t;
static unsigned char weight[4 * N], weight_before[4 * N], state[64 + 10 * N], state_before[64 + 10 * N];
static unsigned char values[4 * N + 1], result[4 * N + 1]; /* fp32, at an odd address */

/* ---- Weights that the caller stores directly --------------------------------------------------------------------- */

/* Masks and clamps write t->weight and leave the residual. With COMPACT and EXACT a zero beside a negative residual
   makes no number: such a weight stands alone, as if its residual were 0. The twin has that 0. Returns what differs
   after 7 steps, and every value that is not finite. */
static int stored_weights_differ(kopt_optimizer o, kopt_format f, size_t n, int counted) {
    static unsigned char w[2][2 * N], block[2][64 + 24 * N];
    static float start[N], grad[N], full[N];
    static kopt_counts counts[2];
    const ref_layout l = ref_layout_of(&o, f, n);
    kopt_tensor twin[2];
    uint32_t word = 1;
    int k, step, bad = 0, alone = 0;
    size_t i;
    for (i = 0; i < n; ++i) start[i] = (uniform32(&word) - 0.5f) * 0.1f;
    for (k = 0; k < 2; ++k) {
        memset(block[k], 0, sizeof block[k]), memset(&counts[k], 0, sizeof counts[k]);
        twin[k] = kopt_tensor_of(w[k], f, grad, KOPT_F32, n, block[k], sizeof block[k]);
        twin[k].counts = counted ? &counts[k] : NULL;
        bad += kopt_state_init(&o, &twin[k], 1, start) != KOPT_OK;
        for (i = 0; i < n; ++i) {
            const uint32_t residual = ref_get(block[k] + l.residual, l.residual_width, i);
            if (i % 3 != 0) continue;
            ref_set(w[k], 2, i, i % 2 == 0 ? 0 : 0x8000);
            if (residual >> (8 * l.residual_width - 1) == 0) continue;
            ++alone;
            if (k == 1) ref_set(block[k] + l.residual, l.residual_width, i, 0);
        }
    }
    bad += kopt_state_read(&o, &twin[0], KOPT_SLOT_WEIGHT, full) != KOPT_OK;
    for (i = 0; i < n; ++i) bad += !(fabsf(full[i]) < 0.06f); /* also if it is NaN */
    for (step = 0; step < 7; ++step) {
        kopt_optimizer other = o;
        for (i = 0; i < n; ++i) grad[i] = uniform32(&word) - 0.5f;
        bad += kopt_optimizer_step(&other, &twin[1], 1) != KOPT_OK;
        bad += kopt_optimizer_step(&o, &twin[0], 1) != KOPT_OK;
    }
    for (i = 0; i < n; ++i) bad += !ref_is_finite(f, ref_get(w[0], 2, i));
    bad += memcmp(w[0], w[1], 2 * n) != 0;
    bad += memcmp(block[0], block[1], kopt_state_size(&o, &twin[0])) != 0;
    bad += counts[0].wanted != counts[1].wanted;
    return bad + (n > 100 && alone < 20);
}

static void check_stored_weights(void) {
    static const kopt_format moment[] = {KOPT_BF16, KOPT_F32, KOPT_Q8};
    const kopt_optimizer rules[] = {kopt_adamw(1e-3), kopt_sgd(1e-2, 0), kopt_sgd(1e-2, 0.9),
                                    kopt_lion(1e-4),  kopt_adan(1e-3),   kopt_ranger(1e-3),
                                    kopt_ema(0.9),    kopt_radam(1e-3),  kopt_stable_adamw(1e-3)};
    size_t r, f, size;
    int isa, mode, rounding;
    for (rounding = KOPT_COMPACT; rounding <= KOPT_EXACT; ++rounding) {
        int bad = 0;
        FOR_EACH_ISA(isa)
        for (r = 0; r < sizeof rules / sizeof *rules; ++r)
            for (mode = 0; mode < 8; ++mode)
                for (f = 0; f < 3; ++f)
                    for (size = 1; size <= 300; size += 299) {
                        kopt_optimizer o = rules[r];
                        o.rounding = (kopt_rounding)rounding,
                        o.first_moment_format = o.second_moment_format = moment[f];
                        if (o.rule != KOPT_RULE_EMA)
                            o.decay_mode = mode & 2 ? KOPT_DECAY_L2 : KOPT_DECAY_DECOUPLED, o.weight_decay = 0.1;
                        bad += stored_weights_differ(o, mode & 1 ? KOPT_FP16 : KOPT_BF16, size, mode & 4);
                    }
        ok(!bad, "%s: a zero stored beside a negative residual stands alone, in %d rules: %d differ",
           rounding_name[rounding], (int)(sizeof rules / sizeof *rules), bad);
    }
}

/* ---- Writing and reading: docs/numerics.md section 8b ----------------------------------------------------------- */

/* Ends, ties and specials of all formats and everything below the normal range; then numbers of any exponent. */
static uint32_t input(size_t i) {
    if (i < SPECIAL_WORDS) return special_words[i];
    return (uint32_t)(i * 2654435761u) ^ (uint32_t)(i << 7);
}

static uint32_t same_nan(uint32_t u) { return ref_is_nan(KOPT_F32, u) ? 0x7fc00000 : u; }

static int writing_differs(int what) {
    const kopt_format f = t.weight_format;
    ref_layout l = ref_layout_of(&opt, f, N);
    size_t i, moment = ref_width(opt.first_moment_format), width = ref_width(f);
    int bad = 0, k = what - KOPT_SLOT_FIRST_MOMENT;
    for (i = 0; i < N; ++i)
        ref_set(values + 1, 4, i, what == KOPT_SLOT_SECOND_MOMENT ? input(i) & 0x7fffffff : input(i));
    bad += kopt_state_write(&opt, &t, (kopt_slot)what, (const float *)(const void *)(values + 1)) != KOPT_OK;
    bad += kopt_state_read(&opt, &t, (kopt_slot)what, (float *)(void *)(result + 1)) != KOPT_OK;
    for (i = 0; i < N; ++i) {
        float x = ref_float(ref_get(values + 1, 4, i)), y = ref_float(ref_get(result + 1, 4, i)), read;
        if (what == KOPT_SLOT_WEIGHT) {
            ref_element want, got;
            uint32_t mask = l.residual_width == 1 ? 0xff : 0xffff;
            ref_write_weight(&opt, f, x, &want);
            got.weight = ref_get(weight, width, i);
            got.residual = l.residual_width ? ref_get(state + l.residual, l.residual_width, i) : 0;
            if (f == KOPT_F32) want.weight = same_nan(want.weight), got.weight = same_nan(got.weight);
            bad += got.weight != want.weight || got.residual != (want.residual & mask);
            read = ref_read_weight(&opt, f, &got);
        } else {
            uint32_t want = ref_write_moment(&opt, k, x), got = ref_get(state + l.moment[k], moment, i);
            if (opt.first_moment_format == KOPT_F32) want = same_nan(want), got = same_nan(got);
            bad += got != want;
            read = ref_read_moment(&opt, k, got);
        }
        bad += same_nan(ref_bits(y)) != same_nan(ref_bits(read));
    }
    return bad;
}

static void check_writing(void) {
    static const char *const name[] = {"fp32", "bf16", "fp16"};
    int format, rounding, what, isa;
    for (format = KOPT_F32; format <= KOPT_FP16; ++format) {
        int bad[3] = {0, 0, 0}, init = 0;
        FOR_EACH_ISA(isa)
        for (rounding = 0; rounding < ROUNDINGS; ++rounding) {
            size_t i;
            opt = kopt_adamw(1e-3);
            opt.first_moment_format = opt.second_moment_format = (kopt_format)format,
            opt.rounding = (kopt_rounding)rounding;
            if (!ref_accepts(&opt)) continue;
            t = kopt_tensor_of(weight, (kopt_format)format, NULL, KOPT_BF16, N, state, sizeof state);
            for (i = 0; i < N; ++i) ref_set(values + 1, 4, i, input(i));
            init += kopt_state_init(&opt, &t, 1, (const float *)(const void *)(values + 1)) != KOPT_OK;
            memcpy(state_before, state, sizeof state), memcpy(weight_before, weight, sizeof weight);
            bad[KOPT_SLOT_WEIGHT] += writing_differs(KOPT_SLOT_WEIGHT);
            init += memcmp(state_before, state, sizeof state) || memcmp(weight_before, weight, sizeof weight);
            for (what = KOPT_SLOT_FIRST_MOMENT; what <= KOPT_SLOT_SECOND_MOMENT; ++what)
                bad[what] += writing_differs(what);
        }
        ok(!bad[0] && !bad[1] && !bad[2] && !init,
           "%s written and read, subnormals kept: weights %d, first moments %d, second moments %d differ; init %d",
           name[format], bad[0], bad[1], bad[2], init);
    }
}

/* All 8-bit codes with any scale, in more blocks than are decoded at a time. */
static void check_codes_read(void) {
    static unsigned char block[64 + 2 * (N + 64)];
    int isa, what, bad = 0;
    uint32_t word = 5;
    size_t i;
    opt = kopt_adamw(1e-3), opt.first_moment_format = opt.second_moment_format = KOPT_Q8;
    t = kopt_tensor_of(weight, KOPT_F32, NULL, KOPT_F32, N, block, sizeof block);
    FOR_EACH_ISA(isa) {
        bad += kopt_state_init(&opt, &t, 1, NULL) != KOPT_OK;
        for (what = KOPT_SLOT_FIRST_MOMENT; what <= KOPT_SLOT_SECOND_MOMENT; ++what) {
            const int square = what == KOPT_SLOT_SECOND_MOMENT;
            unsigned char *const code = block + ref_layout_of(&opt, KOPT_F32, N).moment[square];
            unsigned char *const scale = block + ref_layout_of(&opt, KOPT_F32, N).scale[square];
            for (i = 0; i < N; ++i) code[i] = (unsigned char)(256 * uniform32(&word));
            for (i = 0; i < (N + 63) / 64; ++i) scale[i] = (unsigned char)(i == 0 ? 255 : 256 * uniform32(&word));
            bad += kopt_state_read(&opt, &t, (kopt_slot)what, (float *)(void *)(result + 1)) != KOPT_OK;
            for (i = 0; i < N; ++i) {
                const float x = ref_decoded(code[i], scale[i / 64], square);
                bad += same_nan(ref_get(result + 1, 4, i)) != same_nan(ref_bits(x));
            }
        }
    }
    ok(!bad, "8-bit moments read: any code and scale, on every instruction set: %d differ", bad);
}

/* 8-bit moments, sections 6b and 8b: first moments up to 15/16 * 2^-126 are zero, second ones have roots down to the
   smallest subnormal. */
static void check_least_scale(void) {
    static float in[128], out[128];
    static unsigned char block[64 + 2 * (128 + 16)];
    int what, i, bad = 0;
    opt = kopt_adamw(1e-3), opt.first_moment_format = opt.second_moment_format = KOPT_Q8;
    t = kopt_tensor_of(weight, KOPT_F32, NULL, KOPT_F32, 128, block, sizeof block);
    bad += kopt_state_init(&opt, &t, 1, NULL) != KOPT_OK;
    for (what = KOPT_SLOT_FIRST_MOMENT; what <= KOPT_SLOT_SECOND_MOMENT; ++what) {
        const int first = what == KOPT_SLOT_FIRST_MOMENT;
        const uint32_t word[2] = {first ? 0x00780001 : 0x00800000, first ? 0x00780000 : 0x00000001};
        const uint32_t read[2] = {first ? 0x00780000 : 0x00800000, first ? 0 : 0x00000001};
        const unsigned char *code = block + 64 + (what - KOPT_SLOT_FIRST_MOMENT) * (128 + 16);
        for (i = 0; i < 128; ++i) in[i] = ref_float(i % 2 ? 0 : word[i / 64]);
        bad += kopt_state_write(&opt, &t, (kopt_slot)what, in) != KOPT_OK;
        bad += kopt_state_read(&opt, &t, (kopt_slot)what, out) != KOPT_OK;
        bad += code[128] != (first ? 1 : 127 - 63);
        bad += code[129] != (first ? 0 : 127 - 74); /* of 2^-74.5 */
        for (i = 0; i < 128; ++i)
            bad += code[i] != (i % 2 ? 0 : first ? i < 64 ? 110 : 0 : i < 64 ? 255 : 236); /* 2^-0.5: 45/64 */
        for (i = 0; i < 128; ++i) bad += ref_bits(out[i]) != (i % 2 ? 0 : read[i / 64]);
    }
    ok(!bad, "8-bit moments written: the smallest scales, %d wrong", bad);
}

/* A step makes +0 of what was written below 2^-126, though its gradient is zero. */
static void check_flushing(void) {
    static uint16_t grad[N];
    int rounding, bad = 0, kept = 0;
    for (rounding = 0; rounding < ROUNDINGS; ++rounding) {
        size_t i;
        opt = kopt_sgd(0.5, 0.9), opt.rounding = (kopt_rounding)rounding;
        if (rounding != KOPT_FEEDBACK) opt.moment_rounding = KOPT_NEAREST;
        t = kopt_tensor_of(weight, KOPT_BF16, grad, KOPT_BF16, N, state, sizeof state);
        for (i = 0; i < N; ++i) ref_set(values + 1, 4, i, (uint32_t)(i * 13007 & 0x7fffff) | (uint32_t)(i & 1) << 31);
        kopt_state_init(&opt, &t, 1, (const float *)(const void *)(values + 1));
        for (i = 0; i < N; ++i) kept += ref_get(weight, 2, i) != 0;
        opt.step = 1;
        bad += kopt_optimizer_step(&opt, &t, 1) != KOPT_OK;
        for (i = 0; i < N; ++i) bad += ref_get(weight, 2, i) != 0 && !(ref_get(weight, 2, i) & 0x7f80);
    }
    ok(!bad && kept > 4 * N, "%d written subnormals are kept until a step flushes them: %d are not", kept, bad);
}

/* ---- Lists ------------------------------------------------------------------------------------------------------ */

enum { LIST = 5, SMALL = 40 };
typedef struct model {
    kopt_optimizer opt;
    kopt_tensor list[LIST];
    uint16_t weight[LIST][SMALL], grad[LIST][SMALL], copy[LIST][SMALL];
    unsigned char state[LIST][64 + 8 * SMALL];
} model;
static model m, before;

static void build(kopt_rounding rounding, int moments) {
    int i, k;
    memset(&m, 0, sizeof m);
    m.opt = moments == 2 ? kopt_adamw(0.01) : kopt_sgd(0.01, 0);
    m.opt.rounding = rounding;
    for (i = 0; i < LIST; ++i) {
        m.list[i] = kopt_tensor_of(m.weight[i], KOPT_BF16, m.grad[i], KOPT_BF16, SMALL, m.state[i], sizeof m.state[i]);
        m.list[i].id = (uint32_t)i;
        for (k = 0; k < SMALL; ++k) m.weight[i][k] = 0x3f80, m.grad[i][k] = 0x3f81;
    }
    kopt_state_init(&m.opt, m.list, LIST, NULL);
}

/* What kopt_optimizer_step(), kopt_state_init() and kopt_state_dither() say of a list. */
static void made_is(kopt_result want, kopt_result made, kopt_result drawn, const char *what) {
    kopt_result got, init, dither;
    int same, written = 0;
    memcpy(&before, &m, sizeof m);
    init = kopt_state_init(&m.opt, m.list, LIST, NULL);
    written += init != KOPT_OK && memcmp(&before, &m, sizeof m) != 0;
    memcpy(&m, &before, sizeof m);
    dither = kopt_state_dither(&m.opt, m.list, LIST);
    written += dither != KOPT_OK && memcmp(&before, &m, sizeof m) != 0;
    memcpy(&m, &before, sizeof m);
    got = kopt_optimizer_step(&m.opt, m.list, LIST);
    same = !memcmp(&before, &m, sizeof m);
    if (!ok(got == want && init == made && dither == drawn && same == (want != KOPT_OK) && !written, "list: %s", what))
        note("%s; init: %s; dither: %s; %d written", kopt_result_string(got), kopt_result_string(init),
             kopt_result_string(dither), written + (got != KOPT_OK && !same));
}
static void list_is(kopt_result want, const char *what) { made_is(want, want, want, what); }

static void check_lists(void) {
    kopt_tensor two;
    int i;
    build(KOPT_KAHAN, 2);
    list_is(KOPT_OK, "five tensors");
    made_is(KOPT_OK, KOPT_OK, KOPT_ERROR_STEP, "five tensors again");
    m.list[4] = m.list[3];
    list_is(KOPT_ERROR_OVERLAP, "one tensor twice, neighbours");
    build(KOPT_KAHAN, 2);
    m.list[4] = m.list[0];
    list_is(KOPT_ERROR_ID, "one tensor twice, far apart");
    m.list[4].n = 0;
    list_is(KOPT_OK, "... but it has no elements");
    build(KOPT_STOCHASTIC, 0);
    m.list[2] = m.list[1];
    list_is(KOPT_ERROR_OVERLAP, "one tensor twice, no state, neighbours");
    build(KOPT_KAHAN, 2);
    m.list[1].weight = m.weight[0] + SMALL - 1;
    list_is(KOPT_ERROR_OVERLAP, "the last weight of a neighbour");
    build(KOPT_STOCHASTIC, 0);
    m.list[0].n = 2 * SMALL;
    list_is(KOPT_ERROR_OVERLAP, "n is the number of bytes");
    build(KOPT_KAHAN, 2);
    m.list[1].copy = m.weight[2], m.list[1].copy_format = KOPT_BF16;
    list_is(KOPT_ERROR_OVERLAP, "the copy is the neighbour's weight");
    build(KOPT_KAHAN, 2);
    m.list[1].grad = m.weight[2];
    made_is(KOPT_ERROR_OVERLAP, KOPT_ERROR_OVERLAP, KOPT_ERROR_OVERLAP, "the gradient is the neighbour's weight");
    build(KOPT_KAHAN, 2);
    for (i = 0; i < LIST; ++i) m.list[i].grad = m.grad[0];
    list_is(KOPT_OK, "one gradient for all");
    m.opt.zero_grad = 1;
    made_is(KOPT_ERROR_OVERLAP, KOPT_OK, KOPT_ERROR_STEP, "one gradient for all, but it is set to zero");
    build(KOPT_KAHAN, 2);
    m.list[3].n--;
    made_is(KOPT_ERROR_MISMATCH, KOPT_OK, KOPT_ERROR_MISMATCH, "another error after three good tensors");
    build(KOPT_KAHAN, 2);
    two = m.list[1], m.list[1] = m.list[3], m.list[3] = two;
    list_is(KOPT_ERROR_ID, "ids that do not increase");
    build(KOPT_KAHAN, 2);
    m.list[3].id = 2;
    kopt_state_init(&m.opt, &m.list[3], 1, NULL);
    list_is(KOPT_ERROR_ID, "one id twice: the same random bits");
    m.list[3].first_index = SMALL - 1;
    kopt_state_init(&m.opt, &m.list[3], 1, NULL);
    list_is(KOPT_ERROR_ID, "two shards of one tensor that share an element");
    m.list[3].first_index = SMALL;
    kopt_state_init(&m.opt, &m.list[3], 1, NULL);
    list_is(KOPT_OK, "two shards of one tensor");
    build(KOPT_STOCHASTIC, 0);
    for (i = 0; i < LIST; ++i) m.list[i].id = 0;
    list_is(KOPT_ERROR_ID, "ids left at 0, no state");
    ok(kopt_list_set_ids(m.list, LIST, 7) == KOPT_OK && m.list[0].id == 7 && m.list[4].id == 11, "numbered from 7 on");
    list_is(KOPT_OK, "... and stepped");
    ok(kopt_list_set_ids(m.list, LIST, 0xfffffffb) == KOPT_OK && m.list[4].id == 0xffffffff &&
           kopt_list_set_ids(m.list, LIST, 0xfffffffc) == KOPT_ERROR_BOUNDS && m.list[0].id == 0xfffffffb,
       "the last id is 2^32 - 1");
    ok(kopt_list_set_ids(NULL, 1, 0) == KOPT_ERROR_NULL && kopt_list_set_ids(NULL, 0, 0) == KOPT_OK, "no list");
}

/* ---- Places of the arrays ---------------------------------------------------------------------------------------- */

/* The size of a block, KOPT_STATE_BYTES as its bound, and zeros between the arrays: all of them begin at multiples of
   16 bytes. After an init, after steps, and after a load into other bytes. */
static void check_places(void) {
    static const size_t lengths[] = {1, 3, 7, 8, 16, 17, 255, 256, 257, N};
    static unsigned char block[64 + 24 * N + 16 * 12], image[64 + 32 * N + 512], grads[4 * N];
    int rule, format, rounding, moment, when, k, sizes = 0, cases = 0, filled = 0, odd = 0;
    size_t i, at, length;
    for (rule = 0; rule < 6; ++rule)
        for (format = KOPT_F32; format <= KOPT_FP16; ++format)
            for (rounding = 0; rounding < ROUNDINGS; ++rounding)
                for (moment = KOPT_F32; moment <= KOPT_Q8; ++moment)
                    for (length = 0; length < sizeof lengths / sizeof *lengths; ++length) {
                        const size_t n = lengths[length];
                        size_t place[10], end[10], arrays = 0, bytes = 0;
                        ref_layout l;
                        opt = rule == 0   ? kopt_sgd(0.1, 0)
                              : rule == 1 ? kopt_lion(0.1)
                              : rule == 4 ? kopt_adan(0.1)
                              : rule == 5 ? kopt_ranger(0.1)
                                          : kopt_adamw(0.1);
                        opt.amsgrad = rule == 3;
                        opt.rounding = (kopt_rounding)rounding,
                        opt.first_moment_format = opt.second_moment_format = (kopt_format)moment;
                        if (!ref_accepts(&opt)) continue;
                        l = ref_layout_of(&opt, (kopt_format)format, n);
                        t = kopt_tensor_of(weight, (kopt_format)format, grads, KOPT_BF16, n, block, l.size);
#define ARRAY(at, size) (place[arrays] = (at), end[arrays] = (at) + (size), bytes += (size), arrays += (size) != 0)
                        ARRAY(l.residual, n * l.residual_width);
                        for (k = 0; k < ref_moments(&opt); ++k) {
                            ARRAY(l.moment[k], n * l.moment_width[k]);
                            ARRAY(l.scale[k], moment == KOPT_Q8 ? (n + 63) / 64 : 0);
                        }
                        ARRAY(l.slow, n * l.slow_width);
                        ARRAY(l.slow_residual, n * l.slow_residual_width);
#undef ARRAY
                        ++cases;
                        sizes += kopt_state_size(&opt, &t) != l.size;
                        sizes += moment != KOPT_Q8 && l.size > KOPT_STATE_BYTES(n, bytes / n);
                        for (i = 0; i < arrays; ++i) odd += place[i] % 16 != 0;
                        memset(block, 0xcd, sizeof block), memset(grads, 0x3c, sizeof grads);
                        for (when = 0; when < 3; ++when) {
                            if (when == 0) sizes += kopt_state_init(&opt, &t, 1, NULL) != KOPT_OK;
                            if (when == 1) sizes += kopt_optimizer_step(&opt, &t, 1) != KOPT_OK;
                            if (when == 2) {
                                sizes += kopt_save(&opt, &t, 1, image, sizeof image) != KOPT_OK;
                                memset(block, 0xcd, sizeof block);
                                sizes += kopt_load(&opt, &t, 1, image, sizeof image) != KOPT_OK;
                            }
                            for (i = 0; i < arrays; ++i)
                                for (at = end[i]; at < (i + 1 < arrays ? place[i + 1] : l.size); ++at)
                                    filled += block[at] != 0;
                            for (at = l.size; at < sizeof block; ++at) filled += block[at] != 0xcd;
                        }
                    }
    ok(!sizes && !odd && !filled && cases > 3000,
       "arrays of %d blocks begin at multiples of 16 bytes: %d sizes wrong, %d begin elsewhere, %d bytes of padding "
       "set",
       cases, sizes, odd, filled);
}

/* ---- Blocks that do not exist; bytes that are no block ----------------------------------------------------------- */

static void check_nothing_kept(void) {
    kopt_step step;
    static unsigned char image[1024];
    build(KOPT_STOCHASTIC, 0);
    m.list[0].state = NULL, m.list[0].state_size = 0;
    ok(kopt_state_size(&m.opt, m.list) == 0 && kopt_state_init(&m.opt, m.list, 1, NULL) == KOPT_OK &&
           kopt_optimizer_step(&m.opt, m.list, 1) == KOPT_OK &&
           kopt_save(&m.opt, m.list, 1, image, sizeof image) == KOPT_OK &&
           kopt_load(&m.opt, m.list, 1, image, sizeof image) == KOPT_OK,
       "nothing is kept: no memory is needed");
    build(KOPT_KAHAN, 2);
    m.list[0].n = 0;
    memcpy(&before, &m, sizeof m);
    ok(kopt_state_init(&m.opt, m.list, 1, NULL) == KOPT_OK && kopt_step_begin(&step, &m.opt) == KOPT_OK &&
           kopt_step_run(&step, m.list, 1) == KOPT_OK && kopt_save(&m.opt, m.list, 1, image, sizeof image) == KOPT_OK &&
           kopt_load(&m.opt, m.list, 1, image, sizeof image) == KOPT_OK && m.opt.step == 1 &&
           !memcmp(&before.weight, &m.weight, sizeof m - offsetof(model, weight)),
       "no elements: the block is neither written nor read");
}

static void check_reserved(void) {
    build(KOPT_KAHAN, 2);
    m.state[2][10] = 1;
    made_is(KOPT_ERROR_STATE, KOPT_OK, KOPT_ERROR_STATE, "a block that claims to be of a checkpoint");
    build(KOPT_KAHAN, 2);
    m.state[2][11] = 1;
    made_is(KOPT_ERROR_MISMATCH, KOPT_OK, KOPT_ERROR_MISMATCH, "a block with another format of the second moment");
}

/* Never a crash, whatever was in the memory of a step. */
static void check_garbage_steps(void) {
    static kopt_step step;
    int turn, i, bad = 0, refused = 0;
    uint32_t x = 1;
    for (turn = 0; turn < 20000; ++turn) {
        unsigned char *p = (unsigned char *)&step;
        build(turn & 1 ? KOPT_KAHAN : KOPT_STOCHASTIC, turn & 2);
        if (turn & 8) {
            m.list[0].weight_format = m.opt.first_moment_format = m.opt.second_moment_format = m.list[0].grad_format =
                KOPT_F32;
            m.list[0].n = SMALL / 2;
        }
        kopt_step_begin(&step, &m.opt);
        kopt_state_init(&m.opt, m.list, 1, NULL);
        memcpy(&before, &m, sizeof m);
        for (i = 0; turn & 4 && i < (int)sizeof step; ++i) p[i] = (unsigned char)(lcg32(&x) >> 24);
        if (!(turn & 4)) { /* one enum or count to a small other value */
            int field = turn / 16 % 12, value = (int)(lcg32(&x) >> 28);
            memcpy(p + sizeof(int) * (size_t)field, &value, sizeof value);
        }
        if (kopt_step_run(&step, m.list, 1) == KOPT_OK) continue;
        ++refused;
        bad += memcmp(&before, &m, sizeof m) != 0;
    }
    ok(!bad && refused > 10000, "20000 steps that never were: %d refused, %d of them with something written", refused,
       bad);
}

/* StableAdamW with a rate_scale: the caller's rounding direction is in none of the products. */
static void check_stable_environment(void) {
    static const int direction[] = ROUNDING_DIRECTIONS;
    static uint16_t weights[LIST][SMALL];
    int turn, i, k, bad = 0;
    for (turn = 0; turn < 4 * 50; ++turn) {
        build(KOPT_KAHAN, 2);
        m.opt = kopt_stable_adamw(0.01), m.opt.step = 3, m.opt.rounding = KOPT_EXACT;
        for (i = 0; i < LIST; ++i) {
            m.list[i].rate_scale = 1.0 / (3 + turn / 4);
            kopt_state_init(&m.opt, &m.list[i], 1, NULL);
            memset(m.weight[i], 0, sizeof m.weight[i]); /* the update is stored to its last bit */
            for (k = 0; k < SMALL; ++k) m.grad[i][k] = (uint16_t)(0x3f81 + 7 * k + 3 * i + turn / 4);
        }
        fesetround(direction[turn % 4]);
        bad += kopt_optimizer_step(&m.opt, m.list, LIST) != KOPT_OK;
        fesetround(FE_TONEAREST);
        if (turn % 4 == 0) memcpy(weights, m.weight, sizeof weights);
        bad +=
            memcmp(weights, m.weight, sizeof weights) || memcmp(m.state, before.state, turn % 4 ? sizeof m.state : 0);
        if (turn % 4 == 0) memcpy(&before, &m, sizeof m);
    }
    ok(!bad, "StableAdamW with a rate_scale, 200 steps in four rounding directions: %d differ", bad);
}

/* A coefficient of -0 is no weight decay: it does not make NaN of an infinite weight. */
static void check_negative_zero(void) {
    int decay, isa, bad = 0;
    FOR_EACH_ISA(isa)
    for (decay = KOPT_DECAY_L2; decay <= KOPT_DECAY_FULLY_DECOUPLED; ++decay) {
        uint32_t minus = 0x80000000;
        build(KOPT_KAHAN, 2);
        m.opt.decay_mode = (kopt_decay_mode)decay, m.opt.weight_decay = (double)ref_float(minus),
        m.weight[0][3] = 0x7f80;
        bad += kopt_optimizer_step(&m.opt, m.list, LIST) != KOPT_OK || m.weight[0][3] != 0x7f80;
    }
    ok(!bad, "weight_decay = -0 is none");
}

int main(void) {
    fesetenv(FE_DFL_ENV); /* -Ofast starts with subnormals flushed, and the reference computes here */
    check_writing();
    check_stored_weights();
    check_codes_read();
    check_least_scale();
    check_flushing();
    check_lists();
    check_places();
    check_nothing_kept();
    check_reserved();
    check_garbage_steps();
    check_negative_zero();
    check_stable_environment();
    ok(!kopt_all_finite(values, KOPT_F32, SIZE_MAX / 2), "all_finite of more than memory can hold is 0");
    return done();
}
