/* test_arrays.c - a state in arrays of the caller is, byte for byte, that of a block: every rule, format, rounding and
   instruction set; whole steps, ranges, lists that mix both forms, reading, writing, checkpoints from one form to the
   other. Where the arrays of a state are, and which of them are refused. Argument "quick": a part of the cases. */
#define KAHAN_OPT_VMATH
#define KAHAN_OPT_IMPLEMENTATION
#include "../../kahan_opt.h"

#include "tap.h"
#include "reference.h"
#include "inputs.h"

enum { TENSORS = 3, LARGEST = 519, LENGTH = LARGEST + 260 + 37, GAP = 5, ROOM = LENGTH * 24 + 64 * 60 };
static const size_t length_of[TENSORS] = {LARGEST, 260, 37};

/* A model whose states are blocks, or arrays at odd addresses with GAP bytes between them that nothing may change. */
typedef struct model {
    kopt_optimizer opt;
    kopt_tensor t[TENSORS];
    kopt_state_arrays arrays[TENSORS];
    kopt_counts counts;
    unsigned char weight[TENSORS][4 * LARGEST], grad[TENSORS][4 * LARGEST], copy[TENSORS][2 * LARGEST], room[ROOM];
} model;
static model blocks, own, kept;
static unsigned char image[2][176 + TENSORS * 64 + LENGTH * 32];
static float fp32[2][LENGTH], *const start = fp32[0];
static uint32_t noise = 1;
static int complaints;

static size_t scale_bytes(const kopt_optimizer *o, int k, size_t n) {
    return ref_coded(o) >> k & 1 ? (n + 63) / 64 : 0;
}

/* The arrays of a state that the options need: 12 at most, in the order of kopt_state_arrays; 0 bytes: not needed. */
enum { STATE_ARRAYS = 12 };
static void needed(const kopt_optimizer *o, const kopt_tensor *t, size_t bytes[STATE_ARRAYS]) {
    const ref_layout l = ref_layout_of(o, t->weight_format, t->n);
    int k;
    bytes[0] = t->n * l.residual_width;
    for (k = 0; k < 4; ++k) bytes[1 + k] = t->n * l.moment_width[k], bytes[5 + k] = scale_bytes(o, k, t->n);
    bytes[9] = t->n * l.slow_width, bytes[10] = t->n * l.slow_residual_width;
    bytes[11] = ref_pays(o, t->weight_format) ? 16 : 0;
}

static void **array_of(kopt_state_arrays *a, int i) {
    return i == 0   ? &a->residual
           : i < 5  ? &a->moment[i - 1]
           : i < 9  ? &a->scale[i - 5]
           : i == 9 ? &a->slow
           : i < 11 ? &a->slow_residual
                    : &a->rates;
}

/* Where the same array is in a block. */
static size_t offset_of(const ref_layout *l, int i) {
    return i == 0   ? l->residual
           : i < 5  ? l->moment[i - 1]
           : i < 9  ? l->scale[i - 5]
           : i == 9 ? l->slow
           : i < 11 ? l->slow_residual
                    : 32; /* in the header */
}

/* Gives the tensors of m weights and gradients, and a state: in arrays where `form` has a bit, elsewhere in a block. An
   array that is not needed is NULL or, with `wild`, an address that nobody may use. */
static void build(model *m, const kopt_optimizer *o, kopt_format f, kopt_format grad, int form, int wild) {
    unsigned char *at = m->room;
    size_t bytes[STATE_ARRAYS], n;
    int i, k;
    memset(m, 0, sizeof *m);
    memset(m->room, 0xcd, ROOM);
    m->opt = *o;
    for (i = 0; i < TENSORS; ++i) {
        kopt_tensor *t = &m->t[i];
        const kopt_format format = i == 1 ? (kopt_format)((f + 1) % 3) : f; /* a list may mix them */
        n = length_of[i];
        *t = kopt_tensor_of(m->weight[i] + 1, format, m->grad[i] + 1, grad, n, NULL, 0);
        t->id = (uint32_t)(2 * i), t->first_index = i == 1 ? 777 : 0;
        if (i == 0) t->copy = m->copy[i] + 1, t->copy_format = KOPT_BF16;
        if (i == 2) t->counts = &m->counts;
        if (i == 1) t->no_decay = 1;
        if (!(form >> i & 1)) {
            at += -(at - m->room) & 15;
            t->state = at, t->state_size = ref_layout_of(o, format, n).size;
            at += t->state_size;
            continue;
        }
        m->arrays[i].size = sizeof m->arrays[i];
        t->arrays = &m->arrays[i];
        needed(o, t, bytes);
        for (k = 0; k < STATE_ARRAYS; ++k) {
            if (bytes[k] == 0 && wild) *array_of(&m->arrays[i], k) = (void *)(uintptr_t)(16 + k);
            if (bytes[k] == 0) continue;
            at += GAP, at += (at - m->room) % 2 == 0;
            if (k == 11) at += -(uintptr_t)at % sizeof(uint32_t);
            *array_of(&m->arrays[i], k) = at;
            at += bytes[k];
        }
        at += GAP;
    }
    if (at > m->room + ROOM) note("ROOM is too small"), tap_failed++;
}

static void fill_grads(void) {
    int i;
    size_t k;
    for (i = 0; i < TENSORS; ++i)
        for (k = 0; k < length_of[i]; ++k) {
            const kopt_format f = blocks.t[i].grad_format;
            const uint32_t u = ref_narrow(f, ref_bits((uniform32(&noise) - 0.5f) * (k % 7 ? 1 : 1e-3f)));
            ref_set(blocks.t[i].grad, ref_width(f), k, u), ref_set(own.t[i].grad, ref_width(f), k, u);
        }
}

/* What differs between the models: 0 if nothing does, and the gaps of `own` are as they were. */
static int differ(void) {
    unsigned char *gap = own.room;
    int i, k, bad = 0;
    size_t bytes[STATE_ARRAYS];
    for (i = 0; i < TENSORS; ++i) {
        const kopt_tensor *a = &blocks.t[i], *b = &own.t[i];
        const ref_layout l = ref_layout_of(&blocks.opt, a->weight_format, a->n);
        const unsigned char *block = (const unsigned char *)a->state;
        needed(&blocks.opt, a, bytes);
        if (b->arrays == NULL) { /* a block, too */
            for (; gap < (unsigned char *)b->state; ++gap) bad += *gap != 0xcd;
            bad += l.size != 0 && memcmp(a->state, b->state, l.size) != 0;
            gap += l.size;
            continue;
        }
        for (k = 0; k < STATE_ARRAYS; ++k) {
            unsigned char *const p = bytes[k] ? *array_of(&own.arrays[i], k) : gap;
            for (; gap < p; ++gap) bad += *gap != 0xcd;
            bad += bytes[k] != 0 && memcmp(p, block + offset_of(&l, k), bytes[k]) != 0;
            gap += bytes[k];
        }
    }
    for (; gap < own.room + ROOM; ++gap) bad += *gap != 0xcd;
    return bad + (memcmp(blocks.weight, own.weight, sizeof own.weight) != 0) +
           (memcmp(blocks.grad, own.grad, sizeof own.grad) != 0) +
           (memcmp(blocks.copy, own.copy, sizeof own.copy) != 0) +
           (memcmp(&blocks.counts, &own.counts, sizeof own.counts) != 0) +
           (memcmp(&blocks.opt, &own.opt, sizeof own.opt) != 0);
}

/* A step of the list in three ranges; StableAdamW measured in other ones before. */
static int ranges_fail(model *m, size_t a, size_t b) {
    kopt_step step;
    int bad = kopt_step_begin(&step, &m->opt) != KOPT_OK, i;
    for (i = 0; i < TENSORS && m->opt.rule == KOPT_RULE_ADAM && m->opt.stable; ++i) {
        kopt_norm norm = {0};
        const size_t n = length_of[i], cut = n / 3;
        bad += kopt_norm_add_stable(&norm, &step, &m->t[i], cut, n) != KOPT_OK;
        bad += kopt_norm_add_stable(&norm, &step, &m->t[i], 0, cut) != KOPT_OK;
        m->t[i].stable_scale = kopt_norm_stable_scale(&norm, n);
    }
    bad += kopt_step_range(&step, m->t, TENSORS, b, LENGTH) != KOPT_OK;
    bad += kopt_step_range(&step, m->t, TENSORS, 0, a) != KOPT_OK;
    bad += kopt_step_range(&step, m->t, TENSORS, a, b) != KOPT_OK;
    for (i = 0; i < TENSORS; ++i) m->t[i].stable_scale = 0;
    return bad;
}

/* Reads every slot of both, and writes every second one. */
static int slots_differ(void) {
    int i, slot, bad = 0;
    for (i = 0; i < TENSORS; ++i)
        for (slot = 0; slot <= ref_moments(&own.opt); ++slot) {
            bad += kopt_state_read(&blocks.opt, &blocks.t[i], (kopt_slot)slot, fp32[0]) != KOPT_OK;
            bad += kopt_state_read(&own.opt, &own.t[i], (kopt_slot)slot, fp32[1]) != KOPT_OK;
            bad += memcmp(fp32[0], fp32[1], 4 * length_of[i]) != 0;
            if ((slot + i) % 2) continue;
            fp32[0][length_of[i] / 2] = 0.4375f;
            bad += kopt_state_write(&blocks.opt, &blocks.t[i], (kopt_slot)slot, fp32[0]) != KOPT_OK;
            bad += kopt_state_write(&own.opt, &own.t[i], (kopt_slot)slot, fp32[0]) != KOPT_OK;
        }
    return bad;
}

/* Saves both; then each loads what the other saved, over memory that holds anything. */
static int checkpoints_differ(void) {
    int i, k, bad = 0;
    size_t bytes[STATE_ARRAYS];
    const size_t size = kopt_save_size(&blocks.opt, blocks.t, TENSORS);
    bad += size == 0 || size > sizeof image[0] || kopt_save_size(&own.opt, own.t, TENSORS) != size;
    if (bad) return bad;
    bad += kopt_save(&blocks.opt, blocks.t, TENSORS, image[0], size) != KOPT_OK;
    bad += kopt_save(&own.opt, own.t, TENSORS, image[1], size) != KOPT_OK;
    bad += memcmp(image[0], image[1], size) != 0;
    for (i = 0; i < TENSORS; ++i) {
        memset(own.t[i].weight, 0x5a, length_of[i]);
        memset(blocks.t[i].weight, 0xa5, length_of[i]);
        if (blocks.t[i].state_size) memset(blocks.t[i].state, 0x5a, blocks.t[i].state_size);
        if (own.t[i].state_size) memset(own.t[i].state, 0x5a, own.t[i].state_size);
        needed(&own.opt, &own.t[i], bytes);
        for (k = 0; k < STATE_ARRAYS && own.t[i].arrays != NULL; ++k)
            if (bytes[k]) memset(*array_of(&own.arrays[i], k), 0xa5, bytes[k]);
    }
    bad += kopt_load(&blocks.opt, blocks.t, TENSORS, image[1], size) != KOPT_OK;
    bad += kopt_load(&own.opt, own.t, TENSORS, image[0], size) != KOPT_OK;
    return bad;
}

/* Where the arrays of both states are. */
static int places_differ(void) {
    int i, k, bad = 0;
    size_t bytes[STATE_ARRAYS];
    for (i = 0; i < TENSORS; ++i) {
        const kopt_tensor *const both[2] = {&blocks.t[i], &own.t[i]};
        int which;
        needed(&own.opt, &own.t[i], bytes);
        for (which = 0; which < 2; ++which) {
            const kopt_tensor *t = both[which];
            const ref_layout l = ref_layout_of(&own.opt, t->weight_format, t->n);
            kopt_state_arrays found;
            memset(&found, 0xee, sizeof found);
            bad += kopt_state_arrays_of(&own.opt, t, &found) != KOPT_OK;
            bad += found.size != sizeof found;
            for (k = 0; k < STATE_ARRAYS; ++k) {
                const void *want =
                    t->arrays ? *array_of(&own.arrays[i], k) : (const unsigned char *)t->state + offset_of(&l, k);
                bad += *array_of(&found, k) != (bytes[k] ? want : NULL);
            }
        }
    }
    return bad;
}

/* The arrays of a block, as those of a tensor, are a view of it: a step by it steps the block. */
static int views_differ(void) {
    int i, bad = 0;
    kopt_state_arrays view[TENSORS];
    kopt_tensor seen[TENSORS];
    for (i = 0; i < TENSORS; ++i) {
        seen[i] = blocks.t[i];
        bad += kopt_state_arrays_of(&blocks.opt, &blocks.t[i], &view[i]) != KOPT_OK;
        seen[i].arrays = &view[i], seen[i].state = NULL, seen[i].state_size = 0;
    }
    bad += kopt_optimizer_step(&blocks.opt, seen, TENSORS) != KOPT_OK;
    bad += kopt_optimizer_step(&own.opt, own.t, TENSORS) != KOPT_OK;
    return bad;
}

static int run_differs(const kopt_optimizer *o, kopt_format f, kopt_format grad, int number) {
    const int dither = number % 3 == 0 && o->rule != KOPT_RULE_EMA && o->rounding != KOPT_NEAREST;
    const size_t a = (size_t)number * 37 % LENGTH, b = a + (size_t)number * 11 % (LENGTH - a);
    int bad = 0;
    size_t i;
    build(&blocks, o, f, grad, 0, 0), build(&own, o, f, grad, 1 + number % 7, number & 1);
    for (i = 0; i < LENGTH; ++i) start[i] = (uniform32(&noise) - 0.5f) * 0.1f;
    bad += kopt_state_init(&blocks.opt, blocks.t, TENSORS, start) != KOPT_OK;
    bad += kopt_state_init(&own.opt, own.t, TENSORS, start) != KOPT_OK;
    if (dither) {
        bad += kopt_state_init(&blocks.opt, blocks.t, TENSORS, NULL) != KOPT_OK;
        bad += kopt_state_init(&own.opt, own.t, TENSORS, NULL) != KOPT_OK;
        bad += kopt_state_dither(&blocks.opt, blocks.t, TENSORS) != KOPT_OK;
        bad += kopt_state_dither(&own.opt, own.t, TENSORS) != KOPT_OK;
    }
    bad += differ() + places_differ();
    fill_grads();
    bad += kopt_optimizer_step(&blocks.opt, blocks.t, TENSORS) != KOPT_OK;
    bad += kopt_optimizer_step(&own.opt, own.t, TENSORS) != KOPT_OK;
    bad += differ() + slots_differ() + differ();
    fill_grads();
    bad += ranges_fail(&blocks, a, b) + ranges_fail(&own, a, b) + differ();
    fill_grads();
    bad += checkpoints_differ() + differ() + views_differ() + differ();
    if (bad && complaints++ < 10)
        note("rule %d, weights %d, rounding %d, moments %d and %d, number %d, %s: %d differ", (int)o->rule, (int)f,
             (int)o->rounding, (int)o->first_moment_format, (int)o->second_moment_format, number,
             kopt_isa_name(kopt_isa_current()), bad);
    return bad != 0;
}

static void check_twins(int quick) {
    static const char *const name[] = {"SGD",         "momentum", "Nesterov",    "AdamW",     "AMSGrad",
                                       "StableAdamW", "Lion",     "Adan",        "RAdam",     "Ranger",
                                       "the average", "Adam",     "smooth Lion", "Adam-atan2"};
    kopt_optimizer rule[] = {kopt_sgd(0.1, 0),           kopt_sgd(0.1, 0.9),      kopt_sgd(0.1, 0.9), kopt_adamw(0.01),
                             kopt_adamw(0.01),           kopt_stable_adamw(0.01), kopt_lion(0.001),   kopt_adan(0.01),
                             kopt_radam(0.01),           kopt_ranger(0.01),       kopt_ema(0.9),      kopt_adam(0.01),
                             kopt_smooth_lion(1e-3, 20), kopt_adam_atan2(0.01)};
    int isa, r, f, rounding, moments, number = 0;
    rule[2].nesterov = 1, rule[4].amsgrad = 1, rule[9].lookahead = 2, rule[9].lookahead_rate = 0.3;
    rule[11].weight_decay = 0.1; /* L2 */
    for (r = 0; r < (int)(sizeof rule / sizeof *rule); ++r) {
        const int of_rule = ref_moments(&rule[r]), pairs = of_rule == 0 ? 1 : of_rule == 1 ? 4 : 16;
        int bad = 0, cases = 0;
        FOR_EACH_ISA(isa)
        for (f = 0; f < 3; ++f)
            for (rounding = 0; rounding < ROUNDINGS; ++rounding)
                for (moments = 0; moments < pairs; ++moments) {
                    kopt_optimizer o = rule[r];
                    ++number;
                    if (quick && number % 5) continue;
                    o.rounding = (kopt_rounding)rounding;
                    o.first_moment_format = (kopt_format)(moments % 4);
                    o.second_moment_format = (kopt_format)(of_rule < 2 ? number % 4 : moments / 4);
                    o.moment_rounding = (kopt_rounding)(number / 5 % 3 != 0);
                    o.residual_rounding = (kopt_rounding)(number / 7 % 2);
                    if (o.rounding == KOPT_FEEDBACK) o.moment_rounding = KOPT_STOCHASTIC;
                    if (!ref_accepts(&o)) continue;
                    o.seed = (uint64_t)number * 12345, o.step = number % 11 == 0 ? 40 : 0;
                    if (o.rule != KOPT_RULE_EMA) o.zero_grad = number % 4 == 0;
                    bad += run_differs(&o, (kopt_format)f, (kopt_format)(number / 3 % 3), number), ++cases;
                }
        ok(!bad && cases, "%s: %d runs with the state in arrays are those with a block: %d differ", name[r], cases,
           bad);
    }
}

/* Numbers that vectors leave to scalar code, each alone in its vectors, in one moment or in the gradient: a step on
   arrays is the reference's on a block. */
static void check_extremes(void) {
    static const uint32_t special[3][8] = {
        {0x7fffffff, 0x7f7fffff, 0x7f800001, 0x7f800000, 0xff7fffff, 0xffffffff, 0x7f7f8000, 0x00000001}, /* fp32 */
        {0x7f7f, 0xff7f, 0x7f7e, 0x7f80, 0x7fc1, 0xffff, 0x0001, 0x7f81},                                 /* bf16 */
        {0x7bff, 0x7c00, 0x7e01, 0x7bfe, 0x7fff, 0x0001, 0x7800, 0x7c01}};                                /* fp16 */
    kopt_optimizer rule[] = {kopt_adamw(0.01), kopt_adamw(0.01), kopt_adan(0.01), kopt_lion(0.01)};
    int isa, r, pair, f, rounding, bad = 0, cases = 0;
    rule[1].amsgrad = 1;
    FOR_EACH_ISA(isa)
    for (r = 0; r < 4; ++r)
        for (pair = 0; pair < 16; ++pair)
            for (f = 0; f < 3; ++f)
                for (rounding = 0; rounding < 3; ++rounding) {
                    kopt_optimizer o = rule[r];
                    const int moments = ref_moments(&o);
                    int i, k;
                    size_t at;
                    o.first_moment_format = (kopt_format)(pair % 4), o.second_moment_format = (kopt_format)(pair / 4);
                    o.rounding = (kopt_rounding)rounding, o.beta1 = o.beta2 = o.beta3 = 0.99999, o.step = 5,
                    o.grad_scale = 1.002;
                    build(&blocks, &o, (kopt_format)f, KOPT_BF16, 0, 0);
                    build(&own, &o, (kopt_format)f, KOPT_BF16, 7, 0);
                    for (at = 0; at < LENGTH; ++at) start[at] = (uniform32(&noise) - 0.5f) * 0.1f;
                    bad += kopt_state_init(&own.opt, own.t, TENSORS, start) != KOPT_OK;
                    fill_grads();
                    memcpy(blocks.weight, own.weight, sizeof own.weight),
                        memcpy(blocks.copy, own.copy, sizeof own.copy);
                    for (i = 0; i < TENSORS; ++i) {
                        const ref_layout l = ref_layout_of(&o, own.t[i].weight_format, own.t[i].n);
                        size_t bytes[STATE_ARRAYS];
                        for (k = 0; k < moments; ++k) {
                            const kopt_format format = ref_format(&o, k);
                            for (at = 0; at < own.t[i].n; ++at) start[at] = 0.001f + uniform32(&noise);
                            bad += kopt_state_write(&own.opt, &own.t[i], (kopt_slot)(k + 1), start) != KOPT_OK;
                            for (at = 17; at < own.t[i].n; at += 64)
                                if (format != KOPT_Q8 && (at / 64 + (size_t)pair) % (size_t)moments == (size_t)k)
                                    ref_set(own.arrays[i].moment[k], ref_width(format), at,
                                            special[format][lcg32(&noise) >> 29]);
                        }
                        for (at = 33; at < own.t[i].n && (pair + rounding) % 3 == 0; at += 64)
                            ref_set(own.t[i].grad, 2, at, special[1][lcg32(&noise) >> 29]);
                        needed(&o, &own.t[i], bytes);
                        for (k = 0; k < STATE_ARRAYS; ++k)
                            if (bytes[k])
                                memcpy((unsigned char *)blocks.t[i].state + offset_of(&l, k),
                                       *array_of(&own.arrays[i], k), bytes[k]);
                    }
                    memcpy(blocks.grad, own.grad, sizeof own.grad);
                    for (i = 0; i < TENSORS; ++i) ref_step_tensor(&o, &blocks.t[i]);
                    bad += kopt_optimizer_step(&own.opt, own.t, TENSORS) != KOPT_OK;
                    blocks.opt.step++, blocks.counts = own.counts; /* the reference does not count */
                    bad += differ() != 0, ++cases;
                }
    ok(!bad && cases, "%d steps with the ends of each format in one of the moments: %d are not the reference's", cases,
       bad);
}

/* ---- Refusals --------------------------------------------------------------------------------------------------- */

enum { CALLS = 11 };
static const char *const call_name[CALLS] = {"optimizer_step", "step_run",    "step_range",   "norm_add_stable",
                                             "state_read",     "state_write", "state_dither", "state_arrays_of",
                                             "save",           "load",        "state_init"};

static kopt_result call(int which, const kopt_step *step, size_t image_size) {
    kopt_norm norm = {0};
    kopt_state_arrays found;
    const kopt_tensor *t = own.t;
    switch (which) {
    case 0: return kopt_optimizer_step(&own.opt, t, TENSORS);
    case 1: return kopt_step_run(step, t, TENSORS);
    case 2: return kopt_step_range(step, t, TENSORS, 0, LENGTH);
    case 3: return kopt_norm_add_stable(&norm, step, &t[1], 0, t[1].n);
    case 4: return kopt_state_read(&own.opt, &t[1], KOPT_SLOT_FIRST_MOMENT, fp32[1]);
    case 5: return kopt_state_write(&own.opt, &t[1], KOPT_SLOT_FIRST_MOMENT, fp32[1]);
    case 6: return kopt_state_dither(&own.opt, t, TENSORS);
    case 7: return kopt_state_arrays_of(&own.opt, &t[1], &found);
    case 8: return kopt_save(&own.opt, t, TENSORS, image[1], sizeof image[1]);
    case 9: return kopt_load(&own.opt, t, TENSORS, image[0], image_size);
    default: return kopt_state_init(&own.opt, t, TENSORS, NULL);
    }
}

static kopt_step begun;
static size_t image_size;

/* With KAHAN, or FEEDBACK. */
static void ready(kopt_optimizer o) {
    if (o.rounding != KOPT_FEEDBACK) o.rounding = KOPT_KAHAN;
    o.first_moment_format = KOPT_BF16, o.second_moment_format = KOPT_Q8;
    build(&own, &o, KOPT_BF16, KOPT_F32, 7, 0);
    kopt_state_init(&own.opt, own.t, TENSORS, NULL);
    own.opt.step = 3;
    image_size = kopt_save_size(&own.opt, own.t, TENSORS);
    kopt_save(&own.opt, own.t, TENSORS, image[0], sizeof image[0]);
    kopt_step_begin(&begun, &own.opt);
}

/* Each call, of the model as it was changed, is refused, and nothing is written. list: only those of lists. */
static void refused(kopt_result want, int list, const char *what) {
    int which, bad = 0;
    memcpy(&kept, &own, sizeof own);
    for (which = 0; which < CALLS; ++which) {
        kopt_result got;
        if (which == 3 && !own.opt.stable) continue;
        if (list && (which == 3 || which == 4 || which == 5 || which == 7)) continue;
        got = call(which, &begun, image_size);
        if (got != want) note("kopt_%s: %s", call_name[which], kopt_result_string(got));
        bad += got != want || memcmp(&kept, &own, sizeof own) != 0;
        memcpy(&own, &kept, sizeof own);
    }
    ok(!bad, "refused with \"%s\", and nothing is written: %s", kopt_result_string(want), what);
}

static void check_refusals(void) {
    kopt_state_arrays *const a = &own.arrays[1];
    kopt_optimizer feedback = kopt_stable_adamw(0.01);
    int which, bad = 0;
    feedback.rounding = KOPT_FEEDBACK;
    ready(feedback);
    memcpy(&kept, &own, sizeof own);
    for (which = 0; which < CALLS; ++which) {
        own.opt.step = 3;
        bad += call(which, &begun, image_size) != KOPT_OK;
        memcpy(&own, &kept, sizeof own);
    }
    ready(kopt_stable_adamw(0.01));
    memcpy(&kept, &own, sizeof own);
    for (which = 0; which < CALLS; ++which) {
        own.opt.step = 3;
        bad += call(which, &begun, image_size) != KOPT_OK;
        memcpy(&own, &kept, sizeof own);
    }
    ok(!bad, "what is refused below, is accepted as it is");
#define REFUSED(change, want, list) (ready(kopt_stable_adamw(0.01)), change, refused(want, list, #change))
#define REFUSED_OF_FEEDBACK(change, want) (ready(feedback), change, refused(want, 0, "FEEDBACK: " #change))
#define REFUSED_OF_RANGER(change, want) (ready(kopt_ranger(0.01)), change, refused(want, 0, "Ranger: " #change))
    REFUSED(own.arrays[0].residual = NULL, KOPT_ERROR_NULL, 1);
    REFUSED(a->moment[0] = NULL, KOPT_ERROR_NULL, 0);
    REFUSED(a->moment[1] = NULL, KOPT_ERROR_NULL, 0);
    REFUSED(a->scale[1] = NULL, KOPT_ERROR_NULL, 0);
    REFUSED_OF_RANGER(a->slow = NULL, KOPT_ERROR_NULL);
    ready(kopt_ranger(0.01)), own.arrays[0].slow_residual = NULL,
                              refused(KOPT_ERROR_NULL, 1, "Ranger: no slow_residual");
    REFUSED(a->size = sizeof *a - 1, KOPT_ERROR_SIZE, 0);
    REFUSED(a->size = sizeof *a + sizeof(void *), KOPT_ERROR_SIZE, 0);
    REFUSED(a->size = 0, KOPT_ERROR_SIZE, 0);
    REFUSED(own.t[1].state = own.room + ROOM - 64, KOPT_ERROR_OPTION, 0);
    REFUSED((own.t[1].state = own.room + ROOM - 64, a->size = 0), KOPT_ERROR_SIZE,
            0); /* first: its layout is unknown */
    REFUSED(a->moment[1] = a->moment[0], KOPT_ERROR_OVERLAP, 0);
    REFUSED(a->moment[0] = (unsigned char *)a->moment[1] - 1, KOPT_ERROR_OVERLAP, 0);
    REFUSED(a->scale[1] = (unsigned char *)a->moment[1] + 259, KOPT_ERROR_OVERLAP, 0);
    REFUSED(a->moment[0] = own.weight[1], KOPT_ERROR_OVERLAP, 0);
    REFUSED(own.t[1].copy = (unsigned char *)a->scale[1] + 4, KOPT_ERROR_OVERLAP, 0);
    REFUSED(a->moment[0] = (unsigned char *)own.arrays[0].moment[0] + 2 * LARGEST - 1, KOPT_ERROR_OVERLAP, 1);
    REFUSED(a->residual = own.weight[0], KOPT_ERROR_OVERLAP, 1);
    REFUSED(own.arrays[2].scale[1] = a->scale[1], KOPT_ERROR_OVERLAP, 1);
    REFUSED_OF_RANGER(a->slow = own.weight[1] + 2 * 260, KOPT_ERROR_OVERLAP);
    REFUSED_OF_RANGER(a->slow_residual = a->residual, KOPT_ERROR_OVERLAP);
    REFUSED_OF_FEEDBACK(a->rates = NULL, KOPT_ERROR_NULL);
    REFUSED_OF_FEEDBACK(a->rates = a->scale[1], KOPT_ERROR_OVERLAP);
    REFUSED_OF_FEEDBACK(a->rates = (unsigned char *)a->moment[1] - 8, KOPT_ERROR_OVERLAP);
    REFUSED_OF_FEEDBACK(own.t[1].copy = (unsigned char *)a->rates + 15, KOPT_ERROR_OVERLAP);
#undef REFUSED
#undef REFUSED_OF_FEEDBACK
#undef REFUSED_OF_RANGER
}

/* The fp32 values, the norm and the bytes of a checkpoint that a call reads or writes, on an array of the state. */
static void check_arguments(void) {
    const kopt_optimizer o = kopt_stable_adamw(0.01);
    unsigned char *code;
    int bad = 0;
    ready(o);
    code = own.arrays[1].moment[1];
    memcpy(&kept, &own, sizeof own);
    bad += kopt_state_read(&own.opt, &own.t[1], KOPT_SLOT_WEIGHT, (float *)(void *)(code + 259)) != KOPT_ERROR_OVERLAP;
    bad += kopt_state_write(&own.opt, &own.t[1], KOPT_SLOT_WEIGHT, (float *)(void *)(code + 1)) != KOPT_ERROR_OVERLAP;
    bad += kopt_state_init(&own.opt, own.t, TENSORS, (const float *)(const void *)code) != KOPT_ERROR_OVERLAP;
    bad += kopt_save(&own.opt, own.t, TENSORS, code - image_size + 1, image_size) != KOPT_ERROR_OVERLAP;
    bad += memcmp(&kept, &own, sizeof own) != 0;
    {
        unsigned char *const p = own.arrays[1].moment[0];
        kopt_norm *const norm = (kopt_norm *)(void *)(p + (8 - (uintptr_t)p % 8));
        bad += kopt_norm_add_stable(norm, &begun, &own.t[1], 0, 260) != KOPT_ERROR_OVERLAP;
        bad += memcmp(&kept, &own, sizeof own) != 0;
    }
    ok(!bad, "values, a norm and a checkpoint on an array of the state are refused: %d are not", bad);
}

/* What kopt_explain() says, and that it agrees with the calls. */
static void check_words(void) {
    kopt_state_arrays *const a = &own.arrays[1];
#define SAYS(change, words)                                                                                 \
    (ready(kopt_adamw(0.01)), change,                                                                       \
     ok(strstr(kopt_explain(&own.opt, own.t, TENSORS), words) != NULL, "kopt_explain: %s: \"%s\"", #change, \
        kopt_explain(&own.opt, own.t, TENSORS)))
    SAYS((void)0, "all fields");
    SAYS(a->size = 8, "sizeof(kopt_state_arrays)");
    SAYS(own.t[1].state = own.room, "state must be NULL");
    SAYS(a->reserved_[0] = own.room, "reserved_, too");
    SAYS(a->reserved_[3] = own.room, "reserved_, too");
    ok(kopt_optimizer_step(&own.opt, own.t, TENSORS) == KOPT_ERROR_OPTION, "an array of a later version is refused");
    SAYS(a->moment[1] = NULL,
         "arrays: the options need one that is NULL: residual, moment, scale, slow, slow_residual or rates");
    SAYS(a->moment[1] = a->moment[0], "overlap");
    SAYS(a->residual = own.weight[0], "the tensor before");
#undef SAYS
}

/* ---- What is not needed; nothing at all; a microcontroller ------------------------------------------------------- */

static void check_not_needed(void) {
    static unsigned char w[8], g[16];
    static const kopt_state_arrays zeros;
    kopt_state_arrays none = zeros;
    kopt_state_arrays found;
    kopt_optimizer o = kopt_sgd(0.5, 0);
    kopt_tensor t = kopt_tensor_of(w, KOPT_BF16, g, KOPT_F32, 4, NULL, 0);
    static unsigned char room[400];
    int bad = 0;
    none.size = sizeof none, o.rounding = KOPT_NEAREST, t.arrays = &none;
    bad += kopt_state_size(&o, &t) != 0 || kopt_state_init(&o, &t, 1, NULL) != KOPT_OK;
    bad += kopt_optimizer_step(&o, &t, 1) != KOPT_OK || kopt_state_arrays_of(&o, &t, &found) != KOPT_OK;
    bad += memcmp(&found, &none, sizeof found) != 0;
    bad += kopt_save(&o, &t, 1, room, sizeof room) != KOPT_OK || kopt_load(&o, &t, 1, room, sizeof room) != KOPT_OK;
    t.arrays = NULL; /* a block of no bytes has no arrays, either */
    bad += kopt_state_arrays_of(&o, &t, &found) != KOPT_OK || memcmp(&found, &none, sizeof found) != 0;
    o = kopt_ranger(0.01), t.n = 0, t.arrays = &none;
    bad += kopt_state_init(&o, &t, 1, NULL) != KOPT_OK || kopt_optimizer_step(&o, &t, 1) != KOPT_OK;
    bad += kopt_save(&o, &t, 1, room, sizeof room) != KOPT_OK || kopt_load(&o, &t, 1, room, sizeof room) != KOPT_OK;
    bad += kopt_state_arrays_of(&o, &t, NULL) != KOPT_ERROR_NULL || kopt_state_arrays_of(&o, NULL, &found) == KOPT_OK;
    ok(!bad, "no state and no elements need no arrays, and a tensor of n = 0 none of its rule: %d wrong", bad);
}

/* All zeros are a fresh state; Ranger's slow weights are the weights. */
static void check_fresh(void) {
    const kopt_optimizer rules[] = {kopt_adamw(0.01), kopt_adan(0.01), kopt_lion(0.01), kopt_sgd(0.1, 0.9)};
    size_t r;
    int format, bad = 0;
    for (r = 0; r < 4; ++r)
        for (format = 0; format < 4; ++format) {
            kopt_optimizer o = rules[r];
            int i, k;
            size_t bytes[STATE_ARRAYS];
            o.first_moment_format = o.second_moment_format = (kopt_format)format;
            build(&blocks, &o, KOPT_BF16, KOPT_BF16, 0, 0), build(&own, &o, KOPT_BF16, KOPT_BF16, 7, 0);
            bad += kopt_state_init(&blocks.opt, blocks.t, TENSORS, NULL) != KOPT_OK;
            memcpy(own.copy, blocks.copy, sizeof own.copy);
            for (i = 0; i < TENSORS; ++i) {
                needed(&o, &own.t[i], bytes);
                for (k = 0; k < STATE_ARRAYS; ++k)
                    if (bytes[k]) memset(*array_of(&own.arrays[i], k), 0, bytes[k]);
            }
            bad += differ();
        }
    ok(!bad, "arrays of zeros are a fresh state: %d differ", bad);
}

/* A program that has m and v keeps them, and adds one array. Textbook AdamW with fp32 weights is its own reference. */
static void check_sample(void) {
    enum { n = 5 };
    static float w[n], g[n], m[n], v[n], weight[n], mean[n], square[n];
    static kopt_bf16 low[n], c[n];
    static const kopt_state_arrays zeros;
    kopt_state_arrays a = zeros;
    kopt_tensor t = kopt_tensor_of(low, KOPT_BF16, g, KOPT_F32, n, NULL, 0);
    kopt_optimizer o = kopt_adamw(0.01);
    int i, step, bad = 0;
    o.first_moment_format = o.second_moment_format = KOPT_F32;
    a.size = sizeof a, a.residual = c, a.moment[0] = m, a.moment[1] = v;
    t.arrays = &a;
    for (i = 0; i < n; ++i) w[i] = weight[i] = 0.3f * (float)(i - 2);
    bad += kopt_state_init(&o, &t, 1, w) != KOPT_OK;
    for (step = 1; step <= 20; ++step) {
        for (i = 0; i < n; ++i) {
            double first, second;
            g[i] = 0.25f * (float)((i + step) % 3) - 0.125f;
            mean[i] = 0.9f * mean[i] + 0.1f * g[i], square[i] = 0.999f * square[i] + 0.001f * g[i] * g[i];
            first = (double)mean[i] / (1 - pow(0.9, step)), second = (double)square[i] / (1 - pow(0.999, step));
            weight[i] -= (float)(0.01 * (first / (sqrt(second) + 1e-8) + 0.01 * (double)weight[i]));
        }
        bad += kopt_optimizer_step(&o, &t, 1) != KOPT_OK;
    }
    for (i = 0; i < n; ++i) {
        const float full = ref_float((uint32_t)low[i] << 16) + ref_float((uint32_t)c[i] << 16);
        bad += !(fabsf(full - weight[i]) < 2e-4f) || !(fabsf(m[i] - mean[i]) < 1e-6f);
        bad += !(fabsf(v[i] - square[i]) < 1e-7f) || low[i] != kopt_bf16_from_f32(full);
    }
    ok(!bad, "the m and v of a program, and one array more: 20 steps of AdamW, %d wrong", bad);
}

int main(int count, char **arguments) {
    const int quick = count > 1 && !strcmp(arguments[1], "quick");
    check_twins(quick);
    check_extremes();
    check_fresh();
    check_refusals();
    check_arguments();
    check_words();
    check_not_needed();
    check_sample();
    return done();
}
