/* test_list.c - ranges of a list of tensors: kopt_list_size, kopt_step_list_range, kopt_norm_add_grads_range. The
   reference is one call per tensor: kopt_step_range() and kopt_norm_add(), over parts that this file cuts itself. */
#define KAHAN_OPT_IMPLEMENTATION
#include "../../kahan_opt.h"

#include "tap.h"
#include "inputs.h"

enum { LIST = 7, MOST = 700, STATE = 64 + 32 * MOST };
static const size_t size_of[LIST] = {0, 5, 700, 0, 256, 1, 0};
enum { SIZE = 5 + 700 + 256 + 1 };

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
        if (i == 2) t->rate_scale = 0.5f, t->counts = &to->counts;
        if (i == 4) t->first_index = 768;
    }
}

static void copy_model(model *to, const model *from) {
    memcpy(to, from, sizeof *to);
    connect(to);
}

/* A model with two steps behind it, and gradients for the next one. */
static void build(model *m, const kopt_optimizer *opt, kopt_format grad_format) {
    static float values[MOST];
    uint32_t seed = 3;
    int i, k, s, bad = 0;
    memset(m, 0, sizeof *m);
    connect(m);
    m->opt = *opt;
    m->opt.seed = 99;
    for (i = 0; i < LIST; ++i) {
        m->list[i].grad_format = grad_format;
        for (k = 0; k < MOST; ++k) values[k] = normal32(&seed);
        bad += kopt_state_init(&m->opt, &m->list[i], values) != KOPT_OK;
    }
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
    int bad = kopt_step_begin(&m->opt, &step) != KOPT_OK;
    for (i = 0; i < count; ++i) {
        const size_t k = i * 7919 % count, end = (k + 1) * slice; /* a prime above every count */
        bad += kopt_step_list_range(&step, m->list, LIST, k * slice, end < SIZE ? end : SIZE) != KOPT_OK;
    }
    return bad;
}

static void slices_are_the_whole(const char *name, kopt_optimizer opt, kopt_format grad_format) {
    static const size_t slices[] = {1, 3, 5, 64, 100, 255, 256, 257, 705, 706, SIZE - 1, SIZE, 2 * SIZE};
    size_t i;
    int bad = 0;
    build(&before, &opt, grad_format);
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
    slices_are_the_whole("bf16 Kahan AdamW", o, KOPT_BF16);
    o.zero_grad = 1;
    slices_are_the_whole("... that sets the gradient to zero", o, KOPT_F32);
    o = kopt_adamw(1e-2), o.moment_format = KOPT_Q8, o.rounding = KOPT_COMPACT;
    slices_are_the_whole("compact AdamW with 8-bit moments", o, KOPT_BF16);
    o = kopt_sgd(1e-2, 0), o.moment_format = KOPT_Q8, o.rounding = KOPT_STOCHASTIC, o.weight_format = KOPT_FP16;
    slices_are_the_whole("fp16 SGD without moments", o, KOPT_FP16);
    o = kopt_adan(1e-2), o.moment_format = KOPT_Q8, o.weight_format = KOPT_F32;
    slices_are_the_whole("fp32 Adan with 8-bit moments", o, KOPT_F32);
    o = kopt_ranger(1e-2), o.lookahead = 3;
    slices_are_the_whole("Ranger that synchronizes", o, KOPT_BF16);
    o = kopt_stable_adamw(1e-2), o.moments_only = 1;
    slices_are_the_whole("StableAdamW that updates moments only", o, KOPT_BF16);
}

/* Elements [from, to) of tensor i are in [begin, end) of the list; as whole blocks of 256 if the moments are 8-bit
   blocks. A block that the end of the range cuts belongs to the range that has the block's last element. */
static int cut(int i, size_t begin, size_t end, int blocks, size_t *from, size_t *to) {
    size_t first = 0;
    int j;
    for (j = 0; j < i; ++j) first += size_of[j];
    *from = begin > first ? begin - first : 0, *to = end > first ? end - first : 0;
    if (*from > size_of[i]) *from = size_of[i];
    if (*to > size_of[i]) *to = size_of[i];
    if (blocks && *from != size_of[i]) *from = *from / 256 * 256;
    if (blocks && *to != size_of[i]) *to = *to / 256 * 256;
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
        if (format) opt.moment_format = KOPT_Q8;
        build(&before, &opt, KOPT_BF16);
        bad = kopt_step_begin(&before.opt, &step) != KOPT_OK;
        for (pair = 0; pair < count * count; ++pair) {
            const size_t begin = ends[pair / count], end = ends[pair % count];
            size_t from, to;
            int i;
            if (begin > end) continue;
            copy_model(&parts, &before);
            copy_model(&whole, &before);
            bad += kopt_step_list_range(&step, parts.list, LIST, begin, end) != KOPT_OK;
            for (i = 0; i < LIST; ++i) {
                if (cut(i, begin, end, format == 1, &from, &to))
                    bad += kopt_step_range(&step, &whole.list[i], from, to) != KOPT_OK;
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

static void stable(void) {
    kopt_optimizer opt = kopt_stable_adamw(1e-1);
    kopt_step step;
    int i, bad;
    build(&before, &opt, KOPT_BF16);
    copy_model(&whole, &before), copy_model(&parts, &before);
    bad = kopt_optimizer_step(&whole.opt, whole.list, LIST) != KOPT_OK;
    bad += kopt_step_begin(&parts.opt, &step) != KOPT_OK;
    copy_model(&before, &parts);
    ok(kopt_step_list_range(&step, parts.list, LIST, 0, 5 + 699) == KOPT_ERROR_STEP &&
           kopt_step_list_range(&step, parts.list, LIST, 6, SIZE) == KOPT_ERROR_STEP && same(&parts, &before),
       "StableAdamW: a range with a part of a tensor that is not measured is refused, and nothing is written");
    bad += kopt_step_list_range(&step, parts.list, LIST, 0, 5) != KOPT_OK;
    bad += kopt_step_list_range(&step, parts.list, LIST, 705, SIZE) != KOPT_OK;
    bad += kopt_step_list_range(&step, parts.list, LIST, 5, 705) != KOPT_OK;
    ok(!bad && same(&parts, &whole), "StableAdamW: ranges of whole tensors measure them");
    copy_model(&parts, &before);
    for (i = 0; i < LIST; ++i) {
        kopt_norm norm = {{0}, 0};
        bad += kopt_stable_measure(&step, &parts.list[i], 0, size_of[i], &norm) != KOPT_OK;
        parts.list[i].stable_scale = kopt_stable_scale(&norm, size_of[i]);
    }
    bad += kopt_step_list_range(&step, parts.list, LIST, 300, SIZE) != KOPT_OK;
    bad += kopt_step_list_range(&step, parts.list, LIST, 0, 300) != KOPT_OK;
    ok(!bad && same(&parts, &whole), "StableAdamW: with stable_scale any ranges give the bits of the whole");
    opt.moment_format = KOPT_Q8;
    build(&parts, &opt, KOPT_BF16);
    bad = kopt_step_begin(&parts.opt, &step) != KOPT_OK;
    copy_model(&before, &parts);
    bad += kopt_step_list_range(&step, parts.list, LIST, 10, 200) != KOPT_OK;
    ok(!bad && same(&parts, &before), "StableAdamW: a range inside a block of 8-bit moments does nothing");
}

static void norms(void) {
    static const kopt_format formats[] = {KOPT_F32, KOPT_BF16, KOPT_FP16};
    int f, bad = 0;
    for (f = 0; f < 3; ++f) {
        const kopt_optimizer opt = kopt_adamw(1e-2);
        const size_t width = f == 0 ? 4 : 2;
        size_t begin, end, from, to;
        build(&parts, &opt, formats[f]);
        for (begin = 0; begin <= SIZE; begin += 37)
            for (end = begin; end <= SIZE; end += 41) {
                kopt_norm one = {{1, 0, 7}, 0}, other = {{1, 0, 7}, 0};
                int i;
                bad += kopt_norm_add_grads_range(&one, parts.list, LIST, begin, end) != KOPT_OK;
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
        kopt_norm low = {{0}, 0}, high = {{0}, 0};
        bad = kopt_norm_add_grads_range(&low, parts.list, LIST, 0, 704) != KOPT_OK;
        bad += kopt_norm_add_grads_range(&high, parts.list, LIST, 704, SIZE) != KOPT_OK;
        ok(!bad && low.nonfinite == 0 && high.nonfinite == 1, "a NaN counts in the range that has it");
    }
}

/* ---- What is refused, with nothing written ----------------------------------------------------------------------- */

static void refuses(kopt_result result, kopt_result expected, const char *what) {
    ok(result == expected && same(&parts, &before), "%s: %s", what, kopt_result_string(expected));
    copy_model(&parts, &before);
}

static void refusals(void) {
    const kopt_optimizer opt = kopt_adamw(1e-2);
    const kopt_norm zero = {{0}, 0};
    kopt_norm norm = zero;
    kopt_step step, none;
    kopt_tensor list[40], many[68];
    size_t i;
    build(&parts, &opt, KOPT_BF16);
    kopt_step_begin(&parts.opt, &step);
    copy_model(&before, &parts);
    memset(&none, 0, sizeof none);
    refuses(kopt_step_list_range(NULL, parts.list, LIST, 0, 0), KOPT_ERROR_NULL, "no step");
    refuses(kopt_step_list_range(&none, parts.list, LIST, 0, 0), KOPT_ERROR_STEP, "a step that has not begun");
    refuses(kopt_step_list_range(&step, NULL, LIST, 0, 0), KOPT_ERROR_NULL, "no list");
    ok(kopt_step_list_range(&step, NULL, 0, 0, 0) == KOPT_OK, "an empty list needs no pointer");
    refuses(kopt_step_list_range(&step, NULL, 0, 0, 1), KOPT_ERROR_BOUNDS, "an element of an empty list");
    refuses(kopt_step_list_range(&step, parts.list, LIST, 2, 1), KOPT_ERROR_BOUNDS, "begin > end");
    refuses(kopt_step_list_range(&step, parts.list, LIST, 0, SIZE + 1), KOPT_ERROR_BOUNDS, "end > size");
    refuses(kopt_step_list_range(&step, parts.list, LIST, SIZE + 1, SIZE + 1), KOPT_ERROR_BOUNDS, "begin > size");
    refuses(kopt_step_list_range(&step, parts.list, LIST, 0, ~(size_t)0), KOPT_ERROR_BOUNDS, "end of SIZE_MAX");
    for (i = 0; i <= SIZE; i += SIZE / 2)
        if (kopt_step_list_range(&step, parts.list, LIST, i, i) != KOPT_OK) break;
    ok(i > SIZE && same(&parts, &before), "an empty range does nothing");

    parts.list[4].weight = NULL;
    refuses(kopt_step_list_range(&step, parts.list, LIST, 0, 706), KOPT_ERROR_NULL,
            "the last tensor of a range has none");
    parts.list[4].weight = NULL;
    ok(kopt_step_list_range(&step, parts.list, LIST, 5, 705) == KOPT_OK, "what no element is of is not checked");
    copy_model(&parts, &before);
    parts.list[4].id = 2;
    parts.list[4].first_index = 0;
    refuses(kopt_step_list_range(&step, parts.list, LIST, 0, SIZE), KOPT_ERROR_MISMATCH, "a block of another id");
    parts.list[4].n = 255;
    refuses(kopt_step_list_range(&step, parts.list, LIST, 0, 706), KOPT_ERROR_MISMATCH, "a block of another n");
    parts.list[2].state_size = 64;
    refuses(kopt_step_list_range(&step, parts.list, LIST, 700, SIZE), KOPT_ERROR_SIZE, "a block that is too small");
    parts.list[2].n = ~(size_t)0;
    refuses(kopt_step_list_range(&step, parts.list, LIST, 0, SIZE), KOPT_ERROR_BOUNDS, "an n that is too large");
    parts.list[1].n = ~(size_t)0 / 32;
    refuses(kopt_step_list_range(&step, parts.list, LIST, ~(size_t)0 / 32, ~(size_t)0 / 32 + 1), KOPT_ERROR_BOUNDS,
            "an n that is too large, before the range");
    list[0] = parts.list[1];
    list[1] = parts.list[1];
    ok(kopt_step_list_range(&step, list, 2, 4, 6) == KOPT_ERROR_OVERLAP && same(&parts, &before),
       "a tensor that is listed twice is refused");

    ok(kopt_norm_add_grads_range(NULL, parts.list, LIST, 0, 1) == KOPT_ERROR_NULL &&
           kopt_norm_add_grads_range(&norm, NULL, LIST, 0, 0) == KOPT_ERROR_NULL &&
           kopt_norm_add_grads_range(&norm, parts.list, LIST, 2, 1) == KOPT_ERROR_BOUNDS &&
           kopt_norm_add_grads_range(&norm, parts.list, LIST, 0, SIZE + 1) == KOPT_ERROR_BOUNDS &&
           kopt_norm_add_grads_range(&norm, NULL, 0, 0, 0) == KOPT_OK && !memcmp(&norm, &zero, sizeof zero),
       "a norm without memory or out of bounds is refused");
    parts.list[4].grad = &norm;
    ok(kopt_norm_add_grads_range(&norm, parts.list, LIST, 0, 706) == KOPT_ERROR_OVERLAP &&
           !memcmp(&norm, &zero, sizeof zero) && kopt_norm_add_grads_range(&norm, parts.list, LIST, 0, 705) == KOPT_OK,
       "a norm that overlaps a gradient of its range is refused before anything is added");
    copy_model(&parts, &before);

    ok(kopt_list_size(NULL, 3) == 0 && kopt_list_size(parts.list, 0) == 0 && kopt_list_size(parts.list, LIST) == SIZE,
       "kopt_list_size is the sum of all n");
    for (i = 0; i < 40; ++i) list[i] = parts.list[1], list[i].n = ~(size_t)0 / 33;
    ok(kopt_list_size(list, 33) == ~(size_t)0 / 33 * 33 && kopt_list_size(list, 40) == ~(size_t)0,
       "kopt_list_size saturates");
    ok(kopt_step_list_range(&step, list, 40, ~(size_t)0 - 1, ~(size_t)0) == KOPT_ERROR_BOUNDS,
       "... and no range of such a list is stepped");
    for (i = 0; i < 68; ++i) { /* their sum wraps around in 64 bits, to SIZE_MAX */
        many[i] = parts.list[1];
        many[i].n = i == 33 ? 16 : i == 67 ? 15 : ~(size_t)0 / 33;
    }
    ok(sizeof(size_t) != 8 || kopt_step_list_range(&step, many, 68, 0, ~(size_t)0) == KOPT_ERROR_BOUNDS,
       "... nor of one whose sum wraps around");
}

int main(void) {
    rules();
    each_range();
    stable();
    norms();
    refusals();
    return done();
}
