/* test_list.c - lists of tensors, also of several formats: kopt_list_length, kopt_state_init, kopt_state_dither,
   kopt_step_run, kopt_step_range, kopt_norm_add_range. The reference is one call per tensor, over parts that this file
   cuts itself. What is wrong with the last tensor is refused before anything is written to the first. */
#define KAHAN_OPT_IMPLEMENTATION
#include "../../kahan_opt.h"

#include "tap.h"
#include "inputs.h"

enum { LIST = 7, MOST = 700, STATE = 64 + 32 * MOST };
static const size_t size_of[LIST] = {0, 5, 700, 0, 256, 1, 0};
enum { SIZE = 5 + 700 + 256 + 1 };

/* What the weights of a list are: one format, or several. */
typedef enum weights { IN_F32 = KOPT_F32, IN_BF16 = KOPT_BF16, IN_FP16 = KOPT_FP16, MIXED, WEIGHTS } weights;
static kopt_format format_in(weights which, int i) {
    static const kopt_format mixed[LIST] = {KOPT_FP16, KOPT_F32, KOPT_BF16, KOPT_F32, KOPT_FP16, KOPT_BF16, KOPT_F32};
    return which == MIXED ? mixed[i] : (kopt_format)which;
}
static const char *const weights_name[] = {"fp32", "bf16", "fp16", "all three formats"};

typedef struct model {
    kopt_optimizer opt;
    kopt_tensor list[LIST];
    unsigned char weight[LIST][4 * MOST], grad[LIST][4 * MOST], state[LIST][STATE], copy[LIST][2 * MOST];
    kopt_counts counts;
} model;
static model whole, parts, before;

static void connect(model *to) {
    int i;
    for (i = 0; i < LIST; ++i) {
        kopt_tensor *t = &to->list[i];
        t->weight = to->weight[i], t->grad = to->grad[i], t->state = to->state[i];
        t->state_size = STATE, t->n = size_of[i], t->id = (uint32_t)i;
        t->copy = to->copy[i], t->copy_format = KOPT_FP16;
        if (i == 2) t->rate_scale = 0.5, t->counts = &to->counts;
        if (i == 4) t->first_index = 768;
    }
}

static void copy_model(model *to, const model *from) {
    memcpy(to, from, sizeof *to);
    connect(to);
}

/* A model with two steps behind it, and gradients for the next one. */
static void build(model *m, const kopt_optimizer *opt, weights which, kopt_format grad_format) {
    static float row[SIZE], values[MOST];
    uint32_t seed = 3;
    int i, k, s, bad = 0;
    memset(m, 0, sizeof *m);
    connect(m);
    m->opt = *opt;
    m->opt.seed = 99;
    for (k = 0; k < SIZE; ++k) row[k] = normal32(&seed);
    for (i = 0; i < LIST; ++i) m->list[i].weight_format = format_in(which, i), m->list[i].grad_format = grad_format;
    bad += kopt_state_init(&m->opt, m->list, LIST, row) != KOPT_OK;
    for (s = 0; s < 3; ++s) {
        for (i = 0; i < LIST; ++i) {
            for (k = 0; k < MOST; ++k) values[k] = normal32(&seed) * 0.01f;
            bad += kopt_convert(m->grad[i], grad_format, values, KOPT_F32, MOST) != KOPT_OK;
        }
        if (s < 2) bad += kopt_optimizer_step(&m->opt, m->list, LIST) != KOPT_OK;
    }
    if (bad) ok(0, "a model is built");
}

static int same(const model *a, const model *b) {
    return a->opt.step == b->opt.step && !memcmp(a->weight, b->weight, sizeof a->weight) &&
           !memcmp(a->grad, b->grad, sizeof a->grad) && !memcmp(a->state, b->state, sizeof a->state) &&
           !memcmp(a->copy, b->copy, sizeof a->copy) && !memcmp(&a->counts, &b->counts, sizeof a->counts);
}

/* The list in ranges of `slice` elements, in a shuffled order. */
static int step_in_slices(model *m, size_t slice) {
    const size_t count = (SIZE + slice - 1) / slice;
    kopt_step step;
    size_t i;
    int bad = kopt_step_begin(&step, &m->opt) != KOPT_OK;
    for (i = 0; i < count; ++i) {
        const size_t k = i * 7919 % count, end = (k + 1) * slice; /* a prime above every count */
        bad += kopt_step_range(&step, m->list, LIST, k * slice, end < SIZE ? end : SIZE) != KOPT_OK;
    }
    return bad;
}

static void slices_are_the_whole(const char *name, kopt_optimizer opt, weights which, kopt_format grad_format) {
    static const size_t slices[] = {1, 3, 5, 64, 100, 255, 256, 257, 705, 706, SIZE - 1, SIZE, 2 * SIZE};
    size_t i;
    int bad = 0;
    build(&before, &opt, which, grad_format);
    copy_model(&whole, &before);
    bad += kopt_optimizer_step(&whole.opt, whole.list, LIST) != KOPT_OK;
    for (i = 0; i < sizeof slices / sizeof *slices; ++i) {
        copy_model(&parts, &before);
        if (step_in_slices(&parts, slices[i]) || !same(&parts, &whole)) {
            note("slices of %d", (int)slices[i]);
            ++bad;
        }
    }
    ok(!bad && !same(&before, &whole), "a step in slices of 1 to %d elements has the bits of the whole: %s", SIZE,
       name);
}

static void rules(void) {
    kopt_optimizer o = kopt_adamw(1e-2);
    slices_are_the_whole("bf16 Kahan AdamW", o, IN_BF16, KOPT_BF16);
    slices_are_the_whole("AdamW on all three formats", o, MIXED, KOPT_BF16);
    o.zero_grad = 1;
    slices_are_the_whole("... that sets the gradient to zero", o, IN_BF16, KOPT_F32);
    o = kopt_adamw(1e-2), o.first_moment_format = o.second_moment_format = KOPT_Q8, o.rounding = KOPT_COMPACT;
    slices_are_the_whole("compact AdamW with 8-bit moments", o, IN_BF16, KOPT_BF16);
    slices_are_the_whole("... on all three formats", o, MIXED, KOPT_FP16);
    o = kopt_sgd(1e-2, 0), o.first_moment_format = o.second_moment_format = KOPT_Q8, o.rounding = KOPT_STOCHASTIC;
    slices_are_the_whole("fp16 SGD without moments", o, IN_FP16, KOPT_FP16);
    o = kopt_adan(1e-2), o.first_moment_format = o.second_moment_format = KOPT_Q8;
    slices_are_the_whole("fp32 Adan with 8-bit moments", o, IN_F32, KOPT_F32);
    o = kopt_ranger(1e-2), o.lookahead = 3;
    slices_are_the_whole("Ranger that synchronizes", o, IN_BF16, KOPT_BF16);
    o.rounding = KOPT_EXACT;
    slices_are_the_whole("... on all three formats", o, MIXED, KOPT_F32);
    o = kopt_stable_adamw(1e-2), o.moments_only = 1;
    slices_are_the_whole("StableAdamW that updates moments only", o, IN_BF16, KOPT_BF16);
}

/* Elements [from, to) of tensor i are in [begin, end) of the list; as whole blocks of 64 if the moments are 8-bit
   blocks. A block that the end of the range cuts belongs to the range that has the block's last element. */
static int cut(int i, size_t begin, size_t end, int blocks, size_t *from, size_t *to) {
    size_t first = 0;
    int j;
    for (j = 0; j < i; ++j) first += size_of[j];
    *from = begin > first ? begin - first : 0, *to = end > first ? end - first : 0;
    if (*from > size_of[i]) *from = size_of[i];
    if (*to > size_of[i]) *to = size_of[i];
    if (blocks && *from != size_of[i]) *from = *from / 64 * 64;
    if (blocks && *to != size_of[i]) *to = *to / 64 * 64;
    return *from < *to;
}

/* What one call steps, tensor by tensor. */
static void each_range(void) {
    kopt_optimizer opt = kopt_adamw(1e-2);
    kopt_step step;
    int pair, bad, format;
    for (format = 0; format < 3; ++format) { /* 2: without moments, so without blocks */
        static const size_t ends[] = {0, 1, 4, 5, 6, 200, 261, 262, 704, 705, 706, 900, 960, 961, 962};
        const int count = (int)(sizeof ends / sizeof *ends);
        if (format == 2) opt = kopt_sgd(1e-2, 0);
        if (format) opt.first_moment_format = opt.second_moment_format = KOPT_Q8;
        build(&before, &opt, IN_BF16, KOPT_BF16);
        bad = kopt_step_begin(&step, &before.opt) != KOPT_OK;
        for (pair = 0; pair < count * count; ++pair) {
            const size_t begin = ends[pair / count], end = ends[pair % count];
            size_t from, to;
            int i;
            if (begin > end) continue;
            copy_model(&parts, &before);
            copy_model(&whole, &before);
            bad += kopt_step_range(&step, parts.list, LIST, begin, end) != KOPT_OK;
            for (i = 0; i < LIST; ++i) {
                if (cut(i, begin, end, format == 1, &from, &to))
                    bad += kopt_step_range(&step, &whole.list[i], 1, from, to) != KOPT_OK;
            }
            if (!same(&parts, &whole)) {
                note("[%d, %d)", (int)begin, (int)end);
                ++bad;
            }
        }
        ok(!bad, "each range steps its elements and no others%s",
           format == 1   ? ": whole blocks of 8-bit moments"
           : format == 2 ? ": SGD has no blocks"
                         : "");
    }
}

/* With 8-bit moments begin and end are rounded down to blocks of 64, but the end of a tensor stays. */
static void range_of_blocks(void) {
    static const size_t place[] = {0, 1, 60, 63, 64, 65, 100, 255, 256, 257, 639, 699, 700};
    const int count = (int)(sizeof place / sizeof *place);
    kopt_optimizer opt = kopt_adamw(1e-2);
    kopt_step step;
    int i, k, bad = 0, nothing = 0;
    opt.first_moment_format = opt.second_moment_format = KOPT_Q8;
    build(&before, &opt, MIXED, KOPT_BF16);
    bad += kopt_step_begin(&step, &before.opt) != KOPT_OK;
    for (i = 0; i < count; ++i)
        for (k = i; k < count; ++k) {
            const size_t begin = place[i] / 64 * 64, end = place[k] == MOST ? MOST : place[k] / 64 * 64;
            copy_model(&parts, &before), copy_model(&whole, &before);
            bad += kopt_step_range(&step, &parts.list[2], 1, place[i], place[k]) != KOPT_OK;
            if (begin < end && place[i] < place[k])
                bad += kopt_step_range(&step, &whole.list[2], 1, begin, end) != KOPT_OK;
            else
                ++nothing;
            bad += !same(&parts, &whole);
        }
    ok(!bad && nothing > 20, "ranges of one tensor are rounded down to blocks: %d wrong, %d of them empty", bad,
       nothing);
    copy_model(&parts, &before), copy_model(&whole, &before);
    bad = kopt_step_range(&step, &whole.list[2], 1, 0, MOST) != KOPT_OK;
    for (i = count - 1; i > 0; --i) bad += kopt_step_range(&step, &parts.list[2], 1, place[i - 1], place[i]) != KOPT_OK;
    ok(!bad && same(&parts, &whole) && !same(&parts, &before), "... so that ranges that cover it step it once");
    opt = kopt_lion(1e-2), opt.weight_decay = 0.5; /* no gradient makes a step of 0 */
    opt.second_moment_format = KOPT_Q8;            /* there is none */
    build(&parts, &opt, IN_F32, KOPT_F32);
    memcpy(before.weight[2], parts.weight[2], sizeof before.weight[2]);
    bad = kopt_step_begin(&step, &parts.opt) != KOPT_OK;
    bad += kopt_step_range(&step, &parts.list[2], 1, 3, 7) != KOPT_OK;
    for (i = 0; i < 10; ++i) bad += !memcmp(parts.weight[2] + 4 * i, before.weight[2] + 4 * i, 4) != (i < 3 || i >= 7);
    ok(!bad, "the format of a moment that a rule does not have rounds no range: %d wrong", bad);
}

static void stable(void) {
    kopt_optimizer opt = kopt_stable_adamw(1e-1);
    kopt_step step;
    int i, bad;
    build(&before, &opt, IN_BF16, KOPT_BF16);
    copy_model(&whole, &before), copy_model(&parts, &before);
    bad = kopt_optimizer_step(&whole.opt, whole.list, LIST) != KOPT_OK;
    bad += kopt_step_begin(&step, &parts.opt) != KOPT_OK;
    copy_model(&before, &parts);
    ok(kopt_step_range(&step, parts.list, LIST, 0, 5 + 699) == KOPT_ERROR_STEP &&
           kopt_step_range(&step, parts.list, LIST, 6, SIZE) == KOPT_ERROR_STEP && same(&parts, &before),
       "StableAdamW: a range with a part of a tensor that is not measured is refused, and nothing is written");
    bad += kopt_step_range(&step, parts.list, LIST, 0, 5) != KOPT_OK;
    bad += kopt_step_range(&step, parts.list, LIST, 705, SIZE) != KOPT_OK;
    bad += kopt_step_range(&step, parts.list, LIST, 5, 705) != KOPT_OK;
    ok(!bad && same(&parts, &whole), "StableAdamW: ranges of whole tensors measure them");
    copy_model(&parts, &before);
    for (i = 0; i < LIST; ++i) {
        kopt_norm norm = {0};
        bad += kopt_norm_add_stable(&norm, &step, &parts.list[i], 0, size_of[i]) != KOPT_OK;
        parts.list[i].stable_scale = kopt_norm_stable_scale(&norm, size_of[i]);
    }
    bad += kopt_step_range(&step, parts.list, LIST, 300, SIZE) != KOPT_OK;
    bad += kopt_step_range(&step, parts.list, LIST, 0, 300) != KOPT_OK;
    ok(!bad && same(&parts, &whole), "StableAdamW: with stable_scale any ranges give the bits of the whole");
    opt.first_moment_format = opt.second_moment_format = KOPT_Q8;
    build(&parts, &opt, IN_BF16, KOPT_BF16);
    bad = kopt_step_begin(&step, &parts.opt) != KOPT_OK;
    copy_model(&before, &parts);
    bad += kopt_step_range(&step, parts.list, LIST, 10, 60) != KOPT_OK;
    ok(!bad && same(&parts, &before), "StableAdamW: a range inside a block of 8-bit moments does nothing");
}

static void norms(void) {
    static const kopt_format formats[] = {KOPT_F32, KOPT_BF16, KOPT_FP16};
    int f, bad = 0;
    for (f = 0; f < 3; ++f) {
        const kopt_optimizer opt = kopt_adamw(1e-2);
        const size_t width = f == 0 ? 4 : 2;
        size_t begin, end, from, to;
        build(&parts, &opt, IN_BF16, formats[f]);
        for (begin = 0; begin <= SIZE; begin += 37)
            for (end = begin; end <= SIZE; end += 41) {
                kopt_norm one = {0, {1, 0, 7}}, other = {0, {1, 0, 7}};
                int i;
                bad += kopt_norm_add_range(&one, parts.list, LIST, begin, end) != KOPT_OK;
                for (i = 0; i < LIST; ++i)
                    if (cut(i, begin, end, 0, &from, &to))
                        bad += kopt_norm_add(&other, parts.grad[i] + from * width, formats[f], to - from) != KOPT_OK;
                bad += kopt_norm_value(&one) != kopt_norm_value(&other) || memcmp(&one, &other, sizeof one) != 0;
            }
    }
    ok(!bad, "the norm of a range is that of its elements");
    parts.list[2].grad_format = KOPT_BF16;
    memset(parts.grad[2] + 2 * 699, 0xff, 2); /* a NaN at element 704 of the list */
    {
        kopt_norm low = {0}, high = {0};
        bad = kopt_norm_add_range(&low, parts.list, LIST, 0, 704) != KOPT_OK;
        bad += kopt_norm_add_range(&high, parts.list, LIST, 704, SIZE) != KOPT_OK;
        ok(!bad && low.nonfinite == 0 && high.nonfinite == 1, "a NaN counts in the range that has it");
    }
}

/* ---- State blocks of a list -------------------------------------------------------------------------------------- */

/* One call is one call for each tensor, whose weights are the next in the row; ids and shards keep their bits. */
static void init_and_dither(void) {
    static float row[SIZE];
    uint32_t seed = 5;
    int which, rounding, turn, i, k, bad_init = 0, bad_dither = 0, moved = 0;
    for (k = 0; k < SIZE; ++k) row[k] = normal32(&seed);
    for (which = 0; which < WEIGHTS; ++which)
        for (rounding = 0; rounding < ROUNDINGS; ++rounding)
            for (turn = 0; turn < 4; ++turn) {
                kopt_optimizer opt = turn & 1 ? kopt_ranger(1e-2) : kopt_adamw(1e-2);
                size_t at = 0;
                opt.rounding = (kopt_rounding)rounding,
                opt.first_moment_format = opt.second_moment_format = turn & 2 ? KOPT_Q8 : KOPT_BF16;
                if (rounding == KOPT_FEEDBACK && turn & 1) continue; /* Ranger */
                build(&before, &opt, (weights)which, KOPT_BF16);
                copy_model(&whole, &before), copy_model(&parts, &before);
                bad_init += kopt_state_init(&whole.opt, whole.list, LIST, row) != KOPT_OK;
                for (i = 0; i < LIST; at += size_of[i++])
                    bad_init += kopt_state_init(&parts.opt, &parts.list[i], 1, row + at) != KOPT_OK;
                bad_init += !same(&whole, &parts) || same(&whole, &before);
                bad_init += kopt_state_init(&whole.opt, whole.list, LIST, NULL) != KOPT_OK;
                for (i = 0; i < LIST; ++i) bad_init += kopt_state_init(&parts.opt, &parts.list[i], 1, NULL) != KOPT_OK;
                bad_init += !same(&whole, &parts);
                copy_model(&before, &whole);
                if (rounding == KOPT_NEAREST && which != IN_F32) { /* 16-bit weights without a residual */
                    bad_dither += kopt_state_dither(&whole.opt, whole.list, LIST) != KOPT_ERROR_OPTION;
                    bad_dither += !same(&whole, &before);
                    continue;
                }
                bad_dither += kopt_state_dither(&whole.opt, whole.list, LIST) != KOPT_OK;
                for (i = 0; i < LIST; ++i) bad_dither += kopt_state_dither(&parts.opt, &parts.list[i], 1) != KOPT_OK;
                bad_dither += !same(&whole, &parts) || memcmp(whole.weight, before.weight, sizeof before.weight) != 0;
                moved += !same(&whole, &before);
            }
    ok(!bad_init, "kopt_state_init() of a list, from one row or from the weights, is one call for each: %d wrong",
       bad_init);
    ok(!bad_dither && moved == 3 * 3 * 4, "kopt_state_dither() of a list is one call for each: %d wrong, %d drawn",
       bad_dither, moved);
    ok(kopt_state_init(&whole.opt, NULL, 0, NULL) == KOPT_OK && kopt_state_init(&whole.opt, NULL, 0, row) == KOPT_OK &&
           kopt_state_dither(&whole.opt, NULL, 0) == KOPT_OK &&
           kopt_state_init(&whole.opt, whole.list, 1, NULL) == KOPT_OK,
       "a list without tensors or elements");
}

/* A row of weights at each byte of an arena where the arrays lie apart: refused where it shares a byte with weights,
   states, copies or counts. Gradients are not read. A single tensor's fp32 copy may be its weights. */
static void rows(void) {
    enum { TENSORS = 3, ARENA = 2048, GAP = 72 };
    static const size_t n[TENSORS] = {5, 3, 4};
    static const kopt_format format[TENSORS] = {KOPT_BF16, KOPT_F32, KOPT_FP16};
    static union {
        kopt_counts align;
        unsigned char byte[ARENA];
    } arena, kept;
    static unsigned char taken[ARENA];
    const kopt_optimizer opt = kopt_adamw(1e-2);
    kopt_tensor t[TENSORS];
    int count, i, bad = 0, written = 0, refused = 0, fine = 0;
    size_t at, k;
    for (count = 1; count <= TENSORS; ++count) {
        size_t row = 0, end = GAP;
        memset(taken, 0, sizeof taken);
#define PLACE(pointer, size, marked)            \
    do {                                        \
        (pointer) = (void *)(arena.byte + end); \
        memset(taken + end, marked, size);      \
        end += ((size) + GAP) / 8 * 8;          \
    } while (0)
        for (i = 0; i < count; ++i) {
            void *counts;
            t[i] = kopt_tensor_of(NULL, format[i], NULL, KOPT_BF16, n[i], NULL, 0);
            t[i].id = (uint32_t)i, t[i].copy_format = i == 0 ? KOPT_F32 : KOPT_BF16;
            t[i].state_size = kopt_state_size(&opt, &t[i]);
            PLACE(t[i].copy, n[i] * (i == 0 ? 4 : 2), 1);
            PLACE(t[i].weight, n[i] * (format[i] == KOPT_F32 ? 4 : 2), 1);
            PLACE(t[i].grad, n[i] * 2, 0);
            PLACE(t[i].state, t[i].state_size, 1);
            PLACE(counts, sizeof(kopt_counts), 1);
            t[i].counts = (kopt_counts *)counts;
            row += 4 * n[i];
        }
#undef PLACE
        for (at = 0; at + row <= end; ++at) {
            const float *const values = (const float *)(const void *)(arena.byte + at);
            int overlaps = 0;
            kopt_result result;
            for (k = at; k < at + row; ++k) overlaps |= taken[k];
            if (count == 1 && values == t[0].copy) overlaps = 0;
            memset(arena.byte, 0x3c, sizeof arena);
            kept = arena;
            result = kopt_state_init(&opt, t, (size_t)count, values);
            bad += result != (overlaps ? KOPT_ERROR_OVERLAP : KOPT_OK);
            written += (memcmp(&arena, &kept, sizeof arena) != 0) == overlaps;
            refused += overlaps, fine += !overlaps;
        }
        bad += end > ARENA;
    }
    ok(!bad && !written && refused > 1000 && fine > 500,
       "weights in one row, at each byte beside and on the arrays: %d wrong; of %d refused and %d taken, %d written or "
       "not",
       bad, refused, fine, written);
}

/* ---- What is refused, with nothing written ----------------------------------------------------------------------- */

static void refuses(kopt_result result, kopt_result expected, const char *what) {
    ok(result == expected && same(&parts, &before), "%s: %s", what, kopt_result_string(expected));
    copy_model(&parts, &before);
}

/* What is wrong with the last tensor that has elements, in each call that takes a list. */
static void late(void) {
    enum { WRONG = 14, CALLS = 8, LAST = 5 };
    static const struct {
        const char *what;
        kopt_result stepped, made; /* by calls that need a block, and by those that make one */
    } wrong[WRONG] = {{"no weights", KOPT_ERROR_NULL, KOPT_ERROR_NULL},
                      {"no state", KOPT_ERROR_NULL, KOPT_ERROR_NULL},
                      {"a small state", KOPT_ERROR_SIZE, KOPT_ERROR_SIZE},
                      {"weight_format", KOPT_ERROR_OPTION, KOPT_ERROR_OPTION},
                      {"grad_format", KOPT_ERROR_OPTION, KOPT_ERROR_OPTION},
                      {"copy_format", KOPT_ERROR_OPTION, KOPT_ERROR_OPTION},
                      {"a reserved field", KOPT_ERROR_OPTION, KOPT_ERROR_OPTION},
                      {"first_index", KOPT_ERROR_BOUNDS, KOPT_ERROR_BOUNDS},
                      {"rate_scale", KOPT_ERROR_RANGE, KOPT_ERROR_RANGE},
                      {"stable_scale", KOPT_ERROR_RANGE, KOPT_ERROR_RANGE},
                      {"the weights of its neighbour", KOPT_ERROR_OVERLAP, KOPT_ERROR_OVERLAP},
                      {"its weights as copy", KOPT_ERROR_OVERLAP, KOPT_ERROR_OVERLAP},
                      {"the id of its neighbour", KOPT_ERROR_MISMATCH, KOPT_ERROR_ID},
                      {"a block of zeros", KOPT_ERROR_STATE, KOPT_OK}};
    static float row[SIZE];
    static unsigned char image[LIST * (STATE + 4 * MOST)];
    kopt_optimizer opt = kopt_adamw(1e-2);
    int i, call, bad = 0, written = 0;
    build(&before, &opt, MIXED, KOPT_BF16);
    opt = before.opt;
    if (kopt_state_init(&opt, before.list, LIST, NULL) != KOPT_OK) ok(0, "blocks without residuals");
    if (kopt_save(&opt, before.list, LIST, image, sizeof image) != KOPT_OK) ok(0, "saved");
    for (i = 0; i < WRONG; ++i)
        for (call = 0; call < CALLS; ++call) {
            static unsigned char other_image[sizeof image];
            const kopt_result want = call < 6 ? wrong[i].stepped : wrong[i].made;
            kopt_result result = KOPT_OK;
            kopt_scaler scaler = kopt_scaler_of();
            kopt_step step;
            kopt_tensor *const last = &parts.list[LAST];
            copy_model(&parts, &before);
            if (kopt_step_begin(&step, &parts.opt) != KOPT_OK) ok(0, "begun");
            copy_model(&parts, &before);
            if (i == 0) last->weight = NULL;
            if (i == 1) last->state = NULL;
            if (i == 2) last->state_size = 64 + 16;
            if (i == 3) last->weight_format = KOPT_Q8;
            if (i == 4) last->grad_format = KOPT_Q1;
            if (i == 5) last->copy_format = KOPT_Q8;
            if (i == 6) last->reserved_[1] = 1;
            if (i == 7) last->first_index = (uint64_t)1 << 63;
            if (i == 8) last->rate_scale = -1;
            if (i == 9) last->stable_scale = 1e39;
            if (i == 10) last->weight = parts.weight[LAST - 1];
            if (i == 11) last->copy = last->weight, last->copy_format = last->weight_format;
            if (i == 12) last->id = LAST - 1;
            if (i == 13) memset(parts.state[LAST], 0, 64);
            memcpy(&whole, &parts, sizeof parts);
            switch (call) {
            case 0: result = kopt_optimizer_step(&parts.opt, parts.list, LIST); break;
            case 1: result = kopt_step_run(&step, parts.list, LIST); break;
            case 2: result = kopt_step_range(&step, parts.list, LIST, 3, SIZE); break;
            case 3: result = kopt_state_dither(&parts.opt, parts.list, LIST); break;
            case 4: result = kopt_save(&parts.opt, parts.list, LIST, other_image, sizeof other_image); break;
            case 5: result = kopt_scaler_step(&scaler, &parts.opt, parts.list, LIST, 0, NULL, NULL); break;
            case 6: result = kopt_state_init(&parts.opt, parts.list, LIST, row); break;
            case 7: result = kopt_load(&parts.opt, parts.list, LIST, image, sizeof image); break;
            }
            if (result != want) note("%s, call %d: %s", wrong[i].what, call, kopt_result_string(result));
            bad += result != want;
            written += want != KOPT_OK && memcmp(&whole, &parts, sizeof parts) != 0;
        }
    ok(!bad && !written, "a list whose last tensor is wrong, in %d ways and %d calls: %d wrong, %d times written",
       WRONG, CALLS, bad, written);
    for (i = 0; i < 3; ++i) { /* a residual that is not 0, in the last tensor: the first is not drawn either */
        copy_model(&parts, &before);
        opt.rounding = i == 0 ? KOPT_KAHAN : i == 1 ? KOPT_COMPACT : KOPT_EXACT;
        bad += kopt_state_init(&opt, parts.list, LIST, NULL) != KOPT_OK;
        parts.state[LAST][64] = 1;
        copy_model(&whole, &parts);
        bad += kopt_state_dither(&opt, parts.list, LIST) != KOPT_ERROR_STEP || !same(&parts, &whole);
        parts.state[LAST][64] = 0;
        bad += kopt_state_dither(&opt, parts.list, LIST) != KOPT_OK || same(&parts, &whole);
    }
    ok(!bad, "kopt_state_dither(): a residual in the last tensor: %d wrong", bad);
}

/* kopt_step_run() on a list is kopt_optimizer_step(). */
static void run(void) {
    int which, moment;
    for (which = 0; which < WEIGHTS; ++which) {
        int bad = 0;
        for (moment = KOPT_F32; moment <= KOPT_Q8; ++moment) {
            kopt_optimizer opt = kopt_stable_adamw(1e-2);
            kopt_step step;
            int i;
            opt.first_moment_format = opt.second_moment_format = (kopt_format)moment;
            build(&before, &opt, (weights)which, KOPT_F32);
            copy_model(&whole, &before), copy_model(&parts, &before);
            bad += kopt_optimizer_step(&whole.opt, whole.list, LIST) != KOPT_OK;
            bad += kopt_step_begin(&step, &parts.opt) != KOPT_OK;
            bad += kopt_step_run(&step, parts.list, LIST) != KOPT_OK || !same(&parts, &whole);
            copy_model(&parts, &before);
            bad += kopt_step_begin(&step, &parts.opt) != KOPT_OK;
            for (i = LIST - 1; i >= 0; --i) bad += kopt_step_run(&step, &parts.list[i], 1) != KOPT_OK;
            bad += !same(&parts, &whole) || same(&parts, &before);
            bad += kopt_step_run(&step, NULL, 0) != KOPT_OK || kopt_step_run(&step, NULL, 1) != KOPT_ERROR_NULL;
        }
        ok(!bad, "kopt_step_run() of a list in %s is a step: %d wrong", weights_name[which], bad);
    }
}

static void refusals(void) {
    const kopt_optimizer opt = kopt_adamw(1e-2);
    const kopt_norm zero = {0};
    kopt_norm norm = zero;
    kopt_step step, none;
    kopt_tensor list[40], many[68];
    size_t i;
    build(&parts, &opt, IN_BF16, KOPT_BF16);
    kopt_step_begin(&step, &parts.opt);
    copy_model(&before, &parts);
    memset(&none, 0, sizeof none);
    refuses(kopt_step_range(NULL, parts.list, LIST, 0, 0), KOPT_ERROR_NULL, "no step");
    refuses(kopt_step_range(&none, parts.list, LIST, 0, 0), KOPT_ERROR_STEP, "a step that has not begun");
    refuses(kopt_step_range(&step, NULL, LIST, 0, 0), KOPT_ERROR_NULL, "no list");
    ok(kopt_step_range(&step, NULL, 0, 0, 0) == KOPT_OK, "an empty list needs no pointer");
    refuses(kopt_step_range(&step, NULL, 0, 0, 1), KOPT_ERROR_BOUNDS, "an element of an empty list");
    refuses(kopt_step_range(&step, parts.list, LIST, 2, 1), KOPT_ERROR_BOUNDS, "begin > end");
    refuses(kopt_step_range(&step, parts.list, LIST, 0, SIZE + 1), KOPT_ERROR_BOUNDS, "end > size");
    refuses(kopt_step_range(&step, parts.list, LIST, SIZE + 1, SIZE + 1), KOPT_ERROR_BOUNDS, "begin > size");
    refuses(kopt_step_range(&step, parts.list, LIST, 0, ~(size_t)0), KOPT_ERROR_BOUNDS, "end of SIZE_MAX");
    for (i = 0; i <= SIZE; i += SIZE / 2)
        if (kopt_step_range(&step, parts.list, LIST, i, i) != KOPT_OK) break;
    ok(i > SIZE && same(&parts, &before), "an empty range does nothing");

    parts.list[4].weight = NULL;
    refuses(kopt_step_range(&step, parts.list, LIST, 0, 706), KOPT_ERROR_NULL, "the last tensor of a range has none");
    parts.list[4].weight = NULL;
    ok(kopt_step_range(&step, parts.list, LIST, 5, 705) == KOPT_OK, "what no element is of is not checked");
    copy_model(&parts, &before);
    parts.list[4].id = 2;
    parts.list[4].first_index = 0;
    refuses(kopt_step_range(&step, parts.list, LIST, 0, SIZE), KOPT_ERROR_MISMATCH, "a block of another id");
    parts.list[4].n = 255;
    refuses(kopt_step_range(&step, parts.list, LIST, 0, 706), KOPT_ERROR_MISMATCH, "a block of another n");
    parts.list[2].state_size = 64;
    refuses(kopt_step_range(&step, parts.list, LIST, 700, SIZE), KOPT_ERROR_SIZE, "a block that is too small");
    parts.list[2].n = ~(size_t)0;
    refuses(kopt_step_range(&step, parts.list, LIST, 0, SIZE), KOPT_ERROR_BOUNDS, "an n that is too large");
    parts.list[1].n = ~(size_t)0 / 32;
    refuses(kopt_step_range(&step, parts.list, LIST, ~(size_t)0 / 32, ~(size_t)0 / 32 + 1), KOPT_ERROR_BOUNDS,
            "an n that is too large, before the range");
    list[0] = parts.list[1];
    list[1] = parts.list[1];
    ok(kopt_step_range(&step, list, 2, 4, 6) == KOPT_ERROR_OVERLAP && same(&parts, &before),
       "a tensor that is listed twice is refused");

    ok(kopt_norm_add_range(NULL, parts.list, LIST, 0, 1) == KOPT_ERROR_NULL &&
           kopt_norm_add_range(&norm, NULL, LIST, 0, 0) == KOPT_ERROR_NULL &&
           kopt_norm_add_range(&norm, parts.list, LIST, 2, 1) == KOPT_ERROR_BOUNDS &&
           kopt_norm_add_range(&norm, parts.list, LIST, 0, SIZE + 1) == KOPT_ERROR_BOUNDS &&
           kopt_norm_add_range(&norm, NULL, 0, 0, 0) == KOPT_OK && !memcmp(&norm, &zero, sizeof zero),
       "a norm without memory or out of bounds is refused");
    parts.list[4].grad = &norm;
    ok(kopt_norm_add_range(&norm, parts.list, LIST, 0, 706) == KOPT_ERROR_OVERLAP &&
           !memcmp(&norm, &zero, sizeof zero) && kopt_norm_add_range(&norm, parts.list, LIST, 0, 705) == KOPT_OK,
       "a norm that overlaps a gradient of its range is refused before anything is added");
    copy_model(&parts, &before);

    ok(kopt_list_length(NULL, 3) == 0 && kopt_list_length(parts.list, 0) == 0 &&
           kopt_list_length(parts.list, LIST) == SIZE,
       "kopt_list_length is the sum of all n");
    for (i = 0; i < 40; ++i) list[i] = parts.list[1], list[i].n = ~(size_t)0 / 33;
    ok(kopt_list_length(list, 33) == ~(size_t)0 / 33 * 33 && kopt_list_length(list, 34) == 0 &&
           kopt_list_length(list, 40) == 0,
       "kopt_list_length is 0 if the sum does not fit");
    list[33].n = ~(size_t)0 - ~(size_t)0 / 33 * 33;
    ok(kopt_list_length(list, 34) == ~(size_t)0, "... but SIZE_MAX does");
    ok(kopt_step_range(&step, list, 34, ~(size_t)0, ~(size_t)0) == KOPT_OK,
       "... and its empty range at the end is none");
    list[33].n = ~(size_t)0 / 33;
    ok(kopt_step_range(&step, list, 40, ~(size_t)0 - 1, ~(size_t)0) == KOPT_ERROR_BOUNDS,
       "... and no range of such a list is stepped");
    for (i = 0; i < 68; ++i) { /* their sum wraps around in 64 bits, to SIZE_MAX */
        many[i] = parts.list[1];
        many[i].n = i == 33 ? 16 : i == 67 ? 15 : ~(size_t)0 / 33;
    }
    ok(sizeof(size_t) != 8 || kopt_step_range(&step, many, 68, 0, ~(size_t)0) == KOPT_ERROR_BOUNDS,
       "... nor of one whose sum wraps around");
}

int main(void) {
    rules();
    each_range();
    range_of_blocks();
    run();
    init_and_dither();
    rows();
    late();
    stable();
    norms();
    refusals();
    return done();
}
