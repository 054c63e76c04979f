/* test_save.c - checkpoints of lists, also of several formats: kopt_save, kopt_load, both in pieces, and
   kopt_inspect. The layout is read here byte by byte, by the tables in docs/numerics.md sections 8a and 8c, with a
   CRC-32 of its own. The checkpoints of save_v1.h stay as they are: every version reads them. `test_save fixtures`
   prints them again, if no bit of a step has changed. */
#define KAHAN_OPT_VMATH
#define KAHAN_OPT_IMPLEMENTATION
#include "../../kahan_opt.h"

#include "tap.h"
#include "inputs.h"
#include "save_v1.h"

/* ---- A model: three tensors, one of them empty, two shards of the same id --------------------------------------- */

enum { LIST = 4, MOST = 300, STATE = 64 + 32 * MOST, SPACE = 65536 };
static const size_t size_of[LIST] = {MOST, 7, 0, 258};

/* What the weights of a list are: one format, or several, with 16-bit or fp32 weights first. */
typedef enum weights {
    IN_F32 = KOPT_F32,
    IN_BF16 = KOPT_BF16,
    IN_FP16 = KOPT_FP16,
    MIXED,
    MIXED_FROM_F32,
    MIXED_ONLY_EMPTY, /* the only 16-bit tensor has no elements */
    WEIGHTS
} weights;
static kopt_format format_in(weights which, int i) {
    static const kopt_format mixed[][LIST] = {{KOPT_FP16, KOPT_F32, KOPT_F32, KOPT_BF16},
                                              {KOPT_F32, KOPT_BF16, KOPT_BF16, KOPT_FP16},
                                              {KOPT_F32, KOPT_F32, KOPT_FP16, KOPT_F32}};
    return which >= MIXED ? mixed[which - MIXED][i] : (kopt_format)which;
}
/* ... and in byte 6 of the checkpoint. */
static const unsigned char byte_of[WEIGHTS] = {KOPT_F32, KOPT_BF16, KOPT_FP16, KOPT_FP16, KOPT_BF16, KOPT_FP16};

typedef struct model {
    kopt_optimizer opt;
    weights which;
    kopt_tensor list[LIST];
    unsigned char weight[LIST][4 * MOST], grad[LIST][2 * MOST], copy[LIST][4 * MOST], state[LIST][STATE];
} model;
static model m, whole, other, before;
static unsigned char bytes[SPACE], again[SPACE];

/* Points the tensors of *to to the arrays of *to. */
static void connect(model *to) {
    int i;
    for (i = 0; i < LIST; ++i) {
        kopt_tensor *t = &to->list[i];
        t->weight = to->weight[i], t->grad = to->grad[i], t->state = to->state[i];
        t->weight_format = format_in(to->which, i), t->grad_format = KOPT_BF16, t->state_size = STATE,
        t->n = size_of[i];
        t->copy = i == 0 ? to->copy[0] : NULL, t->copy_format = KOPT_F32;
        t->id = i < 3 ? 4 + (uint32_t)i : 9;
        t->first_index = i == 3 ? 512 : 0;
    }
}

static void copy_model(model *to, const model *from) {
    memcpy(to, from, sizeof *to);
    connect(to);
}

static void build(model *to, const kopt_optimizer *opt, weights which) {
    static float values[MOST];
    uint32_t seed = 1;
    int i, k;
    memset(to, 0, sizeof *to);
    to->which = which;
    connect(to);
    to->opt = *opt;
    to->opt.seed = UINT64_C(0x123456789abcdef0);
    for (i = 0; i < LIST; ++i) {
        for (k = 0; k < MOST; ++k) values[k] = normal32(&seed);
        if (kopt_state_init(&to->opt, &to->list[i], 1, values) != KOPT_OK) ok(0, "init");
    }
}

static int steps(model *to, int from, int end) {
    int bad = 0, i, k, s;
    for (s = from; s < end; ++s) {
        uint32_t seed = 100 + (uint32_t)s;
        for (i = 0; i < LIST; ++i)
            for (k = 0; k < MOST; ++k) {
                const kopt_bf16 g = kopt_bf16_from_f32(normal32(&seed) * 0.01f);
                memcpy(to->grad[i] + 2 * k, &g, 2);
            }
        bad += kopt_optimizer_step(&to->opt, to->list, LIST) != KOPT_OK;
    }
    return bad;
}

/* Are weights, copies and states equal, to the last byte? */
static int same(const model *a, const model *b) {
    return a->opt.step == b->opt.step && a->opt.seed == b->opt.seed && !memcmp(a->state, b->state, sizeof a->state) &&
           !memcmp(a->weight, b->weight, sizeof a->weight) && !memcmp(a->copy, b->copy, sizeof a->copy);
}

/* A process that starts again: the same calls, but no memory of the run. */
static void restart(model *to, const kopt_optimizer *opt, weights which) {
    memset(to, 0, sizeof *to);
    to->which = which;
    connect(to);
    to->opt = *opt;
}

/* ---- Files in memory that fail when asked to -------------------------------------------------------------------- */

typedef struct tape {
    unsigned char at[SPACE];
    size_t size, largest;          /* bytes written; the largest piece */
    int calls, fail_at, change_at; /* fails in this call, changes a byte before this one; 0: never */
    uint64_t next;                 /* where a reading in order goes on */
    const unsigned char *instead;  /* how it changes then; NULL: in one bit */
    int jumps, second;             /* the call that begins the second reading */
} tape;
static tape file_tape;

static int tape_write(void *user, const void *data, size_t size) {
    tape *f = (tape *)user;
    if (++f->calls == f->fail_at) return -1;
    memcpy(f->at + f->size, data, size);
    f->size += size;
    if (size > f->largest) f->largest = size;
    return 0;
}

static int tape_read(void *user, uint64_t offset, void *data, size_t size) {
    tape *f = (tape *)user;
    if (++f->calls > 1 && offset == 0) f->second = f->calls;
    if (f->calls == f->fail_at) return 5;
    if (f->calls == f->change_at && f->instead == NULL) f->at[200] ^= 4;
    if (f->calls == f->change_at && f->instead != NULL) memcpy(f->at, f->instead, f->size);
    if (offset != f->next && offset != 0) f->jumps++;
    f->next = offset + size;
    if (offset > f->size || size > f->size - (size_t)offset) return 1;
    memcpy(data, f->at + (size_t)offset, size);
    return 0;
}

static kopt_file tape_file(void) {
    kopt_file file;
    file.write = tape_write, file.read = tape_read, file.user = &file_tape;
    file_tape.size = file_tape.largest = 0, file_tape.calls = file_tape.fail_at = file_tape.change_at = 0;
    file_tape.next = 0, file_tape.instead = NULL, file_tape.jumps = file_tape.second = 0;
    return file;
}

/* ---- Every combination ------------------------------------------------------------------------------------------- */

static kopt_optimizer rule_of(int rule) {
    switch (rule) {
    case 0: return kopt_sgd(0.01, 0);
    case 1: return kopt_sgd(0.01, 0.9);
    case 2: return kopt_adamw(0.01);
    case 3: return kopt_stable_adamw(0.01);
    case 4: return kopt_lion(0.01);
    case 5: return kopt_adan(0.01);
    case 6: return kopt_radam(0.01);
    case 7: return kopt_ranger(0.01);
    case 8: return kopt_adam_atan2(0.01);
    default: return kopt_smooth_lion(0.01, 3);
    }
}

/* FEEDBACK for the rules that take it. */
static int takes_feedback(int rule) { return rule == 1 || rule == 2 || rule == 3 || rule == 5 || rule == 6; }
static kopt_rounding rounding_of(int rule, int k) {
    return k % ROUNDINGS == KOPT_FEEDBACK && !takes_feedback(rule) ? KOPT_KAHAN : (kopt_rounding)(k % ROUNDINGS);
}

static int quick;                        /* fewer combinations, fewer bits */
static uint64_t checkpoints = FNV_START; /* a hash of all of them */
static int combinations, bad_run, bad_size, bad_live, bad_pieces, bad_end;
static void check_combination(const kopt_optimizer *opt, weights which) {
    size_t size;
    kopt_file file = tape_file();
    kopt_optimizer fresh = *opt;
    combinations++;
    build(&m, opt, which);
    bad_run += steps(&m, 0, 4);
    size = kopt_save_size(&m.opt, m.list, LIST);
    copy_model(&whole, &m);
    memcpy(&before, &m, sizeof m);
    memset(bytes, 0xEE, sizeof bytes);
    bad_size += size == 0 || size > SPACE - 8 || kopt_save(&m.opt, m.list, LIST, bytes, size - 1) != KOPT_ERROR_SIZE;
    bad_size += bytes[0] != 0xEE || kopt_save(&m.opt, m.list, LIST, bytes, size) != KOPT_OK;
    bad_end += bytes[size] != 0xEE || bytes[size + 7] != 0xEE;
    bad_pieces += kopt_save_to(&m.opt, m.list, LIST, &file) != KOPT_OK || file_tape.size != size ||
                  memcmp(file_tape.at, bytes, size) != 0 || file_tape.largest > 32768;
    checkpoints = fnv_bytes(checkpoints, bytes, size);
    bad_live += memcmp(&m, &before, sizeof m) != 0;
    bad_run += steps(&whole, 4, 9);
    fresh.lr = 77, fresh.weight_decay = 5, fresh.seed = 3; /* what the checkpoint sets */
    restart(&other, &fresh, which);
    bad_run += kopt_load(&other.opt, other.list, LIST, bytes, size) != KOPT_OK || other.opt.lr != opt->lr;
    bad_run += !same(&other, &m) || steps(&other, 4, 9) || !same(&other, &whole);
    restart(&other, &fresh, which);
    bad_pieces += kopt_load_from(&other.opt, other.list, LIST, &file) != KOPT_OK || file_tape.jumps != 0;
    bad_pieces += !same(&other, &m) || other.opt.lr != opt->lr || other.opt.weight_decay != opt->weight_decay;
}

static void report_combinations(const char *of) {
    ok(!bad_run && !bad_size && !bad_end,
       "%d combinations of %s resume with the bits of the run that went on: %d differ, %d of another size, %d overrun",
       combinations, of, bad_run, bad_size, bad_end);
    ok(!bad_live, "saving touches nothing: %d", bad_live);
    ok(!bad_pieces, "in pieces, in order and of at most 32 KiB: the same bytes, the same model: %d differ", bad_pieces);
}

static void check_combinations(void) {
    int rule, format, rounding, moment;
    for (rule = 0; rule < 8; ++rule)
        for (format = KOPT_F32; format <= KOPT_FP16; ++format)
            for (rounding = KOPT_NEAREST; rounding <= (format == KOPT_F32 ? KOPT_NEAREST : KOPT_EXACT); ++rounding)
                for (moment = KOPT_F32; moment <= KOPT_Q8; ++moment) {
                    kopt_optimizer opt = rule_of(rule);
                    if (quick && ((rule != 2 && rule != 7) || (moment != KOPT_BF16 && moment != KOPT_Q8))) continue;
                    opt.rounding = (kopt_rounding)rounding,
                    opt.first_moment_format = opt.second_moment_format = (kopt_format)moment;
                    check_combination(&opt, (weights)format);
                    if (rule == 2) opt.amsgrad = 1, check_combination(&opt, (weights)format);
                }
    report_combinations("lists of one format");
    ok(checkpoints == (quick ? UINT64_C(0xaffa9ed52a32400f) : UINT64_C(0xa35f4b672d873d65)),
       "their checkpoints are what they always were: %016llx", (unsigned long long)checkpoints);
    combinations = 0, checkpoints = FNV_START;
    for (rule = 0; rule < 10; ++rule)
        for (format = rule < 8 ? MIXED : IN_F32; format < WEIGHTS; ++format)
            for (rounding = KOPT_NEAREST; rounding <= KOPT_EXACT; ++rounding)
                for (moment = KOPT_F32; moment <= KOPT_Q8; ++moment) {
                    kopt_optimizer opt = rule_of(rule);
                    if (quick && (rule * 3 + format * 5 + rounding + moment) % 16 != 0) continue;
                    opt.rounding = (kopt_rounding)rounding,
                    opt.first_moment_format = opt.second_moment_format = (kopt_format)moment;
                    check_combination(&opt, (weights)format);
                }
    report_combinations("lists of several formats, and of vector mathematics");
    ok(checkpoints == (quick ? UINT64_C(0x826e6cf7dd86be1d) : UINT64_C(0x4ebc510f173c5941)),
       "their checkpoints are what they always were: %016llx", (unsigned long long)checkpoints);
    combinations = 0, checkpoints = FNV_START;
    for (rule = 0; rule < 8; ++rule)
        for (format = IN_F32; format < WEIGHTS; ++format)
            for (moment = KOPT_F32; moment <= KOPT_Q8; ++moment) {
                kopt_optimizer opt = rule_of(rule);
                if (!takes_feedback(rule) || (quick && (rule + format + moment) % 3 != 0)) continue;
                opt.rounding = KOPT_FEEDBACK, opt.second_moment_format = (kopt_format)moment;
                if (moment != KOPT_FP16) opt.first_moment_format = (kopt_format)moment;
                check_combination(&opt, (weights)format);
            }
    report_combinations("FEEDBACK");
    ok(checkpoints == (quick ? UINT64_C(0xf088f8d1ec8e6785) : UINT64_C(0xf97ddd755597f969)),
       "their checkpoints are what they always were: %016llx", (unsigned long long)checkpoints);
}

/* The checkpoint of a list has the bytes of those of its tensors, each in a list of its own; its header is that of the
   first tensor whose weights have 16 bits, but for the number of tensors and the size. */
static void check_mixed(void) {
    int rule, which, moment, i, bad = 0, lists = 0;
    for (rule = 0; rule < 10; ++rule)
        for (which = 0; which < WEIGHTS; ++which)
            for (moment = KOPT_F32; moment <= KOPT_Q8; ++moment, ++lists) {
                kopt_optimizer opt = rule_of(rule);
                size_t size, part, at = 176;
                int first = -1;
                opt.first_moment_format = opt.second_moment_format = (kopt_format)moment,
                opt.rounding = rounding_of(rule, rule + moment);
                if (opt.rounding == KOPT_FEEDBACK && moment == KOPT_FP16) opt.first_moment_format = KOPT_BF16;
                build(&m, &opt, (weights)which);
                bad += steps(&m, 0, 3);
                size = kopt_save_size(&m.opt, m.list, LIST);
                bad += kopt_save(&m.opt, m.list, LIST, bytes, size) != KOPT_OK || bytes[6] != byte_of[which];
                for (i = 0; i < LIST; ++i, at += part - 180) {
                    part = kopt_save_size(&m.opt, &m.list[i], 1);
                    bad += kopt_save(&m.opt, &m.list[i], 1, again, part) != KOPT_OK;
                    bad += memcmp(bytes + at, again + 176, part - 180) != 0;
                    bad += again[6] != m.list[i].weight_format || bytes[at + 6] != m.list[i].weight_format;
                    if (first >= 0 || (which != IN_F32 && m.list[i].weight_format == KOPT_F32)) continue;
                    first = i;
                    bad += memcmp(bytes, again, 16) != 0 || memcmp(bytes + 32, again + 32, 144) != 0;
                }
                bad += at + 4 != size || first < 0;
            }
    ok(!bad, "the checkpoints of %d lists are those of their tensors: %d wrong", lists, bad);
}

/* ---- Equal runs have equal bytes --------------------------------------------------------------------------------- */

/* What may change between two steps. turn 0: nothing. */
static void change_options(kopt_optimizer *o, int turn) {
    if (turn == 0) return;
    o->lr *= 0.5, o->seed += 77, o->weight_decay = 0.125 * turn, o->beta1 *= 0.75, o->grad_scale = 2;
    o->decay_mode = (kopt_decay_mode)(turn % 3), o->max_lr = 1;
    o->moment_rounding = turn & 1 && o->rounding != KOPT_FEEDBACK ? KOPT_NEAREST : KOPT_STOCHASTIC;
    o->residual_rounding = turn & 1 ? KOPT_NEAREST : KOPT_STOCHASTIC;
    if (o->rule == KOPT_RULE_SGD && o->momentum > 0) o->nesterov = turn & 1, o->momentum = turn & 1 ? 0.5 : 0.7;
    if (o->rule == KOPT_RULE_ADAM) o->stable = turn & 1;
}

/* A run that goes on, one that is saved and loaded in the middle, one whose blocks were made with other options. */
static void check_equal_runs(void) {
    int rule, form, k, loaded = 0, begun = 0, runs = 0;
    for (rule = 0; rule < 8; ++rule)
        for (form = 0; form < 30; ++form) {
            const weights which = (weights)(form < 15 ? form % 3 : MIXED + form % 3);
            kopt_optimizer opt = rule_of(rule), other_opt = opt;
            opt.rounding = rounding_of(rule, form);
            opt.first_moment_format = opt.second_moment_format = (kopt_format)((form + rule) % 4);
            if (opt.rounding == KOPT_FEEDBACK && (form + rule) % 4 == KOPT_FP16) opt.first_moment_format = KOPT_F32;
            build(&m, &opt, which);
            build(&whole, &opt, which);
            other_opt = opt, change_options(&other_opt, 1), other_opt.step = 5;
            build(&other, &other_opt, which);
            other.opt = m.opt;
            for (k = 0; k < 4; ++k, ++runs) {
                change_options(&m.opt, k), change_options(&whole.opt, k), change_options(&other.opt, k);
                if (steps(&m, 2 * k, 2 * k + 1) || steps(&whole, 2 * k, 2 * k + 1) || steps(&other, 2 * k, 2 * k + 1) ||
                    kopt_save(&m.opt, m.list, LIST, bytes, sizeof bytes) != KOPT_OK)
                    ok(0, "a step, or saved");
                opt = m.opt, opt.lr = opt.weight_decay = 0.25, opt.seed = 1, opt.step = 99;
                restart(&m, &opt, which);
                if (kopt_load(&m.opt, m.list, LIST, bytes, sizeof bytes) != KOPT_OK) ok(0, "loaded");
                if (steps(&m, 2 * k + 1, 2 * k + 2) || steps(&whole, 2 * k + 1, 2 * k + 2) ||
                    steps(&other, 2 * k + 1, 2 * k + 2))
                    ok(0, "a step");
                loaded += !same(&m, &whole);
                begun += !same(&other, &whole);
            }
        }
    ok(!loaded,
       "saved and loaded in the middle of %d runs: the bytes of the run that went on, headers included: %d "
       "differ",
       runs, loaded);
    ok(!begun, "blocks that were made with other numbers, or with another step: %d differ", begun);
}

/* ---- The layout -------------------------------------------------------------------------------------------------- */

static uint64_t number(const unsigned char *p, int size) {
    uint64_t x = 0;
    while (size-- > 0) x = x << 8 | p[size];
    return x;
}

static void put_number(unsigned char *p, uint64_t x, int size) {
    for (; size > 0; --size, x >>= 8) *p++ = (unsigned char)x;
}

static uint32_t crc32_of(const unsigned char *p, size_t n) { /* one bit at a time */
    uint32_t crc = 0xFFFFFFFF;
    int k;
    for (; n > 0; --n)
        for (crc ^= *p++, k = 0; k < 8; ++k) crc = crc & 1 ? crc >> 1 ^ 0xEDB88320 : crc >> 1;
    return ~crc;
}

/* The checksum at p, of the n bytes before it and a zero. */
static int is_checksum(const unsigned char *p, size_t n) {
    static unsigned char all[SPACE + 1];
    memcpy(all, p - n, n), all[n] = 0;
    return number(p, 4) == crc32_of(all, n + 1) && crc32_of(p - n, n + 4) != 0x2144DF1C;
}

/* The n numbers of `size` bytes at `stored`, little-endian, are those of the array; zeros follow to 4 bytes. */
static const unsigned char *holds(const unsigned char *stored, const void *array, size_t n, size_t size, int *bad) {
    const unsigned char *a = (const unsigned char *)array;
    const uint16_t one = 1;
    const int little = *(const unsigned char *)&one;
    size_t i, k;
    for (i = 0; i < n; ++i)
        for (k = 0; k < size; ++k) *bad += stored[i * size + k] != a[i * size + (little ? k : size - 1 - k)];
    for (i = n * size; i % 4 != 0; ++i) *bad += stored[i] != 0;
    return stored + i;
}

/* The first tensors at p are those of the model, with 8-bit moments or moments of 2 or 4 bytes. Returns their end. */
static const unsigned char *holds_tensors(const unsigned char *p, const unsigned char *header, const model *of,
                                          int count, int *bad) {
    const size_t q8 = of->opt.first_moment_format == KOPT_Q8, moment = q8                                        ? 1
                                                                       : of->opt.first_moment_format == KOPT_F32 ? 4
                                                                                                                 : 2;
    int i, k;
    for (i = 0; i < count; ++i) {
        const size_t n = of->list[i].n, blocks = (n + 63) / 64, weight = of->list[i].weight_format == KOPT_F32 ? 4 : 2;
        const int feedback = weight == 2 && of->opt.rounding == KOPT_FEEDBACK;
        const size_t residual = weight == 4 || feedback || of->opt.rounding < KOPT_KAHAN ? 0
                                : of->opt.rounding == KOPT_COMPACT                       ? 1
                                                                                         : 2;
        const unsigned char *state = of->state[i] + 64;
        *bad += memcmp(p, "KOPT\2", 5) != 0 || p[5] != header[5] || memcmp(p + 8, header + 8, 2) != 0;
        *bad += p[6] != of->list[i].weight_format || p[7] != (header[7] & (weight == 4 ? 0x10 : 0xff));
        *bad += number(p + 10, 2) != 1;
        *bad += number(p + 12, 4) != of->list[i].id || number(p + 16, 8) != n;
        *bad += number(p + 24, 8) != of->list[i].first_index || memcmp(p + 32, header + 32, 16) != 0;
        p = holds(p + 64, of->weight[i], n, weight, bad);
        if (n == 0) continue;
        p = holds(p, state, n, residual, bad), state += (n * residual + 15) / 16 * 16;
        for (k = 0; k < (header[9] & 7); ++k) {
            p = holds(p, state, n, moment, bad), state += (n * moment + 15) / 16 * 16;
            if (q8) p = holds(p, state, blocks, 1, bad), state += (blocks + 15) / 16 * 16;
        }
        if (feedback) p = holds(p, of->state[i] + 32, 4, 4, bad);
        if (of->opt.rule != KOPT_RULE_RANGER) continue;
        p = holds(p, state, n, weight, bad), state += (n * weight + 15) / 16 * 16;
        p = holds(p, state, n, residual, bad);
    }
    return p;
}

/* Is t what a walk tells of a tensor? */
static int told_as(const kopt_tensor *t, const kopt_tensor *of) {
    kopt_tensor want;
    memset(&want, 0, sizeof want);
    want.weight_format = of->weight_format, want.n = of->n, want.id = of->id, want.first_index = of->first_index;
    return memcmp(t, &want, sizeof want) == 0; /* there is no padding */
}

/* A walk over the checkpoint of m in bytes[]: whole, from no more bytes than it may read, and in a file. */
static void check_walk(size_t size) {
    static unsigned char piece[256];
    uint64_t at = 0, start = 0, end = 176, count = 0, length;
    kopt_tensor t, untouched;
    kopt_result r;
    int i, walked = 0, pieces = 0, hostile = 0, k;
    memset(&untouched, 0xA5, sizeof untouched);
    for (i = 0; i < LIST; ++i, start = at) {
        const uint64_t h = end, was = at; /* its header */
        end += kopt_save_size(&m.opt, &m.list[i], 1) - 180;
        t = untouched;
        walked += kopt_inspect_tensor(bytes, (size_t)h + 63, &at, &t) != KOPT_ERROR_SIZE || at != was;
        walked += memcmp(&t, &untouched, sizeof t) != 0;
        walked +=
            kopt_inspect_tensor(bytes, (size_t)h + 64, &at, &t) != KOPT_OK || at != end || !told_as(&t, &m.list[i]);
        at = was;
        walked += kopt_inspect_tensor(bytes, size, &at, NULL) != KOPT_OK || at != end;
        for (k = 0; k < 256; ++k) piece[k] = start + (uint64_t)k < size ? bytes[start + (uint64_t)k] : 0xA5;
        length = 0;
        pieces += kopt_inspect_tensor(piece, i == 0 ? 240 : 64, &length, &t) != KOPT_OK || start + length != end;
        pieces += !told_as(&t, &m.list[i]);
        pieces += i != 0 && (kopt_inspect(piece, 64, NULL, NULL, &count) != KOPT_OK || count != length);
        pieces += i != 0 && kopt_inspect_tensor(piece, 256, &length, &t) != KOPT_ERROR_BOUNDS;
    }
    r = kopt_inspect_tensor(bytes, size, &at, &t);
    walked += r != KOPT_ERROR_BOUNDS || at != end || end + 4 != size;
    ok(!walked && !pieces, "a walk over the tensors: %d wrong; over a file, by pieces: %d wrong", walked, pieces);
    for (at = 1; at < size + 70; ++at) { /* nothing is read beyond the end, whatever the offset */
        end = at;
        r = kopt_inspect_tensor(bytes, size, &end, &t);
        hostile +=
            at + 4 >= size ? r != KOPT_ERROR_BOUNDS || end != at : r == KOPT_OK && (end > size - 4 || end < at + 64);
        hostile += r == KOPT_OK && memcmp(bytes + at, "KOPT", 4) != 0;
        hostile += at + 68 > size && at + 4 < size && r != KOPT_ERROR_STATE; /* no room for a header */
    }
    for (k = 0; k < 64; ++k) {
        end = at = (UINT64_C(1) << k) - 1 + (UINT64_C(3) << 62);
        r = kopt_inspect_tensor(bytes, size, &end, &t);
        hostile += r != KOPT_ERROR_BOUNDS || end != at;
    }
    memcpy(again, bytes, size);
    put_number(again + 24, UINT64_C(0x7ffffffffffffffc), 8); /* it says that it is much longer than what is there */
    for (k = 8; k < 62; ++k) {
        end = at = (UINT64_C(1) << k) + size;
        hostile += kopt_inspect_tensor(again, size, &end, &t) != KOPT_ERROR_SIZE || end != at;
    }
    memcpy(again, bytes, size);
    for (k = 0; k < 64; ++k) { /* a tensor of any length; the sum of the lengths must not overflow */
        const uint64_t n = UINT64_C(0xffffffffffffffff) >> k;
        put_number(again + 176 + 16, n, 8);
        end = 0;
        r = kopt_inspect_tensor(again, size, &end, &t);
        hostile += n > (SIZE_MAX - 256) / 32 ? r != KOPT_ERROR_BOUNDS : n > size && (r != KOPT_ERROR_STATE || end != 0);
        r = kopt_inspect_tensor(again + 176, 64, &end, &t);
        hostile += r == KOPT_OK && (t.n != n || end / 2 < n || end / 32 > n + 12);
    }
    memcpy(again, bytes, size);
    again[176 + 10] = 0, again[176 + 7] &= 15, again[176 + 9] &= 7; /* the header of a state block in a checkpoint */
    end = 0;
    hostile += kopt_inspect_tensor(again, size, &end, &t) != KOPT_ERROR_STATE;
    hostile += kopt_inspect_tensor(again + 176, 64, &end, &t) != KOPT_OK;
    memcpy(again, bytes, size);
    for (k = 0; k < 64; ++k) { /* any number of tensors */
        const uint64_t n = UINT64_C(0xffffffffffffffff) >> k;
        put_number(again + 16, n, 8);
        r = kopt_inspect(again, 176, NULL, &count, NULL);
        hostile += n == 0 || n > size / 64 ? r != KOPT_ERROR_STATE : n <= LIST && (r != KOPT_OK || count != n);
    }
    ok(!hostile, "... and hostile offsets, lengths and counts: %d wrong", hostile);
}

static void check_layout(weights which, kopt_rounding rounding) {
    static const int at[] = {48, 56, 64, 72, 80, 88, 96, 104, 112, 120, 128, 136, 144, 152, 160};
    kopt_optimizer opt = kopt_adamw(0.1), seen;
    double value[15];
    const unsigned char *p;
    size_t size;
    int i, bad = 0, header = 0, tensor = 0;
    uint64_t count = 0, in_all = 0;
    opt.first_moment_format = opt.second_moment_format = KOPT_Q8, opt.rounding = rounding, opt.zero_grad = 1,
    opt.beta1 = 0.95, opt.max_lr = 0.75;
    opt.lookahead = 9, opt.lookahead_rate = 0.1, opt.beta3 = 0.3, opt.momentum = 0.01, opt.dampening = 0.02;
    opt.grad_scale = 1 / 3.0, opt.clip = 0.7, opt.atan2_a = 1.1, opt.atan2_b = 1.2, opt.sharpness = 0;
    build(&m, &opt, which);
    bad += steps(&m, 0, 3);
    size = kopt_save_size(&m.opt, m.list, LIST);
    bad += kopt_save(&m.opt, m.list, LIST, bytes, size) != KOPT_OK;
    value[0] = 0.1, value[1] = 0.75, value[2] = 0.01, value[3] = 0.1, value[4] = 0.95, value[5] = 0.999;
    value[6] = 0.3, value[7] = 1e-8, value[8] = 0.01, value[9] = 0.02, value[10] = 1 / 3.0, value[11] = 0.7;
    value[12] = 1.1, value[13] = 1.2, value[14] = 0;
    header += memcmp(bytes, "KSAV\1\1", 6) != 0 || bytes[6] != byte_of[which] || bytes[8] != 5;
    header += bytes[7] != (which == IN_F32 ? 16 : rounding == KOPT_COMPACT ? KOPT_COMPACT + 16 + 32 : rounding + 16);
    header += bytes[9] != 2 + 16 * KOPT_DECAY_DECOUPLED || number(bytes + 10, 6) != 0;
    header += number(bytes + 16, 8) != LIST || number(bytes + 24, 8) != size;
    header += number(bytes + 32, 8) != UINT64_C(0x123456789abcdef0) || number(bytes + 40, 8) != 3;
    for (i = 0; i < 15; ++i) header += number(bytes + at[i], 8) != bits_of(value[i]);
    header += number(bytes + 168, 4) != 9 || number(bytes + 172, 4) != 2;
    p = holds_tensors(bytes + 176, bytes, &m, LIST, &tensor);
    ok(!bad && !header, "the header of a checkpoint: %d wrong", header);
    ok(!tensor && (size_t)(p - bytes) + 4 == size && is_checksum(p, size - 4),
       "its tensors, its size and its checksum: %d wrong", tensor);
    memset(&seen, 0, sizeof seen);
    ok(kopt_inspect(bytes, 176, &seen, &count, &in_all) == KOPT_OK && count == LIST && in_all == size &&
           bits_of(seen.beta1) == bits_of(opt.beta1) && bits_of(seen.max_lr) == bits_of(opt.max_lr) &&
           seen.lookahead == 9 && seen.zero_grad == 1 && seen.step == 3 && bits_of(seen.lr) == bits_of(opt.lr) &&
           seen.rounding == (which == IN_F32 ? KOPT_NEAREST : rounding) && seen.first_moment_format == KOPT_Q8 &&
           seen.decay_mode == KOPT_DECAY_DECOUPLED && seen.sharpness == 0 && seen.seed == m.opt.seed &&
           bits_of(seen.grad_scale) == bits_of(opt.grad_scale) &&
           kopt_inspect(bytes, 175, &seen, &count, &in_all) == KOPT_ERROR_SIZE &&
           kopt_inspect(NULL, 176, &seen, &count, &in_all) == KOPT_ERROR_NULL &&
           kopt_inspect(bytes, 176, NULL, NULL, NULL) == KOPT_OK,
       "inspected: the options, the number of tensors and the size");
    ok(kopt_save_size(&seen, m.list, LIST) == size, "what was inspected is an optimizer");
    for (bad = 0, i = 0; i < 12; ++i) {
        memcpy(again, bytes, 176);
        again[i] ^= 0x80;          /* in bytes 7 and 9, the high bit is a reserved one or that of Adam-atan2 */
        bad += i != 7 && i != 9 && /* byte 4 is the version of the layout */
               kopt_inspect(again, 176, NULL, NULL, NULL) != (i == 4 ? KOPT_ERROR_VERSION : KOPT_ERROR_STATE);
    }
    ok(!bad, "what is no checkpoint is not inspected: %d are", bad);
    check_walk(size);
}

/* ---- Damage ------------------------------------------------------------------------------------------------------ */

static int unchanged(void) { return !memcmp(&other, &before, sizeof other); }

static void check_damage(weights which) {
    kopt_optimizer opt = kopt_adamw(0.01);
    size_t size, i;
    int k, taken = 0, written = 0, plain = 0;
    unsigned tried = 0;
    opt.first_moment_format = opt.second_moment_format = KOPT_Q8;
    build(&m, &opt, which);
    steps(&m, 0, 2);
    m.list[0].n = 21, m.list[3].n = 10; /* small, so that every bit can be tried */
    kopt_state_init(&m.opt, m.list, LIST, NULL);
    size = kopt_save_size(&m.opt, m.list, LIST);
    ok(kopt_save(&m.opt, m.list, LIST, bytes, size) == KOPT_OK, "a small checkpoint: %u bytes", (unsigned)size);
    build(&other, &opt, which);
    steps(&other, 0, 1);
    other.list[0].n = 21, other.list[3].n = 10;
    memcpy(&before, &other, sizeof other);
    for (i = 0; i < size; i += quick && i >= 64 ? 5 : 1)
        for (k = 0; k < 8; ++k, ++tried) {
            kopt_result r;
            bytes[i] ^= (unsigned char)(1 << k);
            r = kopt_load(&other.opt, other.list, LIST, bytes, size);
            bytes[i] ^= (unsigned char)(1 << k);
            taken += r == KOPT_OK;
            written += !unchanged();
            plain += i >= 32 && r != KOPT_ERROR_CHECKSUM;
        }
    ok(!taken && !written && !plain,
       "each of %u bits flipped: %d taken, %d times written, %d times, after byte 32, not CHECKSUM", tried, taken,
       written, plain);
    for (taken = written = plain = 0, i = 0; i < size; i += quick ? 7 : 1) {
        const kopt_result r = kopt_load(&other.opt, other.list, LIST, bytes, i);
        taken += r == KOPT_OK;
        plain += r != KOPT_ERROR_SIZE;
        written += !unchanged();
    }
    ok(!taken && !written && !plain, "cut off at each byte: %d taken, %d times written, %d times not SIZE", taken,
       written, plain);
    ok(kopt_load(&other.opt, other.list, LIST, bytes, size + 100) == KOPT_OK && other.opt.step == 2,
       "... and whole, with bytes after it, it is taken");
}

/* ---- Contradictions: what kopt_save never wrote, with a checksum that is right ----------------------------------- */

typedef struct place {
    size_t at;
    int size;
} place;
enum { OPTIMIZERS = 16, MOST_PLACES = 160, SMALL_FILE = 4096 };
static place places[MOST_PLACES];
static int place_count;
static uint32_t dice;
static uint32_t below(uint32_t n) { return lcg32(&dice) / 2 % n; }

/* Every field of a header: of a checkpoint (which has lookahead and flags) or of a state block at `at`. */
static void add_fields(size_t at, int block) {
    static const int size[] = {4, 1, 1, 1, 1, 1, 1, 1, 4, 8, 8, 8, 4, 4};
    size_t i;
    for (i = 0; i < sizeof size / sizeof *size; ++i, ++place_count)
        places[place_count].at = at, places[place_count].size = size[i], at += (size_t)size[i];
    for (i = 0; i < (block ? 4 : 17); ++i, ++place_count) {
        places[place_count].at = at, places[place_count].size = block || i > 14 ? 4 : 8;
        at += (size_t)places[place_count].size;
    }
}

/* A value that contradicts something: an edge of a number, another option, one bit, or one more or less. */
static uint64_t bad_value(const place *p, uint64_t was, uint32_t k) {
    static const double number[] = {0,     1,    -1,   0.5,  0.9, 0.999999, 1e-45,  1e-300,
                                    1e300, 3e38, 4e38, -0.9, 2,   1e-8,     5e-324, -1e-300};
    const double x = number[k % 16];
    const float y = (float)x;
    uint64_t bits = bits_of(x);
    uint32_t half;
    memcpy(&half, &y, 4);
    if (p->size == 4) bits = half;
    if (p->size == 1 || k >= 42)
        return k % 16 < 8 || p->size > 1 ? was ^ UINT64_C(1) << k % (8 * (uint32_t)p->size) : k % 11;
    if (k < 16) return bits;
    switch (k) {
    case 16: return was + 1;
    case 17: return was - 1;
    case 18: return p->size == 4 ? 0x7f800000 : UINT64_C(0x7ff) << 52;
    case 19: return p->size == 4 ? 0x7fc00000 : UINT64_C(0x7ff8) << 48;
    case 20: return p->size == 4 ? 0x7f800001 : (UINT64_C(0x7ff) << 52) + 1;
    case 21: return p->size == 4 ? 0x80000000 : UINT64_C(1) << 63;
    case 22: return was << 1;
    case 23: return was >> 1;
    case 24: return UINT64_MAX;
    case 25: return UINT32_MAX;
    default: return k - 25; /* 1 to 16 */
    }
}
enum { VALUES = 42 + 64 };

static weights weights_of(int which) {
    return which == 4 || which == 10 ? IN_F32
           : which == 7              ? IN_FP16
           : which < 12              ? IN_BF16
           : which == 15             ? MIXED
                                     : (weights)(MIXED + which - 12);
}

static kopt_optimizer optimizer_of(int which) {
    kopt_optimizer o = which < 8     ? rule_of(which)
                       : which == 8  ? kopt_ema(0.9)
                       : which == 9  ? kopt_adam(0.01)
                       : which == 10 ? kopt_sgd(0.01, 0.9)
                       : which == 12 ? kopt_adamw(0.01)
                       : which == 13 ? kopt_ranger(0.01)
                       : which == 14 ? kopt_adam_atan2(0.01)
                       : which == 15 ? kopt_adan(0.01)
                                     : kopt_lion(0.01);
    if (which == 0) o.rounding = KOPT_STOCHASTIC; /* no state blocks at all */
    if (which == 2) o.first_moment_format = o.second_moment_format = KOPT_Q8, o.rounding = KOPT_COMPACT;
    if (which == 4) o.first_moment_format = o.second_moment_format = KOPT_F32;
    if (which == 7 || which == 13) o.rounding = KOPT_EXACT;
    if (which == 9) o.amsgrad = 1, o.decay_mode = KOPT_DECAY_FULLY_DECOUPLED, o.maximize = 1, o.rounding = KOPT_NEAREST;
    if (which == 10) o.nesterov = 1, o.first_moment_format = o.second_moment_format = KOPT_Q8, o.zero_grad = 1;
    if (which == 11) o.rounding = KOPT_STOCHASTIC, o.moments_only = 1, o.moment_rounding = KOPT_NEAREST;
    if (which == 12) o.rounding = KOPT_COMPACT, o.first_moment_format = o.second_moment_format = KOPT_Q8;
    if (which == 14) o.atan2_outside = 1, o.residual_rounding = KOPT_NEAREST;
    if (which == 15) o.rounding = KOPT_FEEDBACK, o.second_moment_format = KOPT_Q8;
    return o;
}

static int read_again(void *user, uint64_t offset, void *data, size_t size) {
    if (offset > *(size_t *)user || size > *(size_t *)user - (size_t)offset) return 1;
    memcpy(data, again + (size_t)offset, size);
    return 0;
}

static unsigned taken, refused, told;
static int bad_written, bad_taken, bad_told;

/* A checkpoint has 1 - decay of an average, from which the decay is rounded: is it as before? */
static int decay_returns(const unsigned char *h) {
    const uint64_t word = number(h + 48, 8);
    volatile double decay;
    double rate;
    memcpy(&rate, &word, 8);
    decay = 1 - rate, decay = 1 - decay;
    return h[5] != KOPT_RULE_EMA || (!(decay < rate) && !(decay > rate));
}

/* Where the headers of the tensors begin; is the layout of one, or of the checkpoint, a later one in again[]? */
static size_t tensor_at[LIST];
static int is_later(void) {
    int k, later = again[4] > 1;
    for (k = 0; k < LIST; ++k) later |= again[tensor_at[k] + 4] > 2;
    return later;
}

/* again[] holds such a file. *pristine is what it is loaded into, and `other` equals it. */
static void try_contradiction(const model *pristine, size_t size) {
    static unsigned char saved[SMALL_FILE];
    const size_t end = size - 4;
    kopt_file file;
    kopt_result r;
    kopt_optimizer seen;
    kopt_tensor empty;
    uint64_t count = 0;
    unsigned char was = again[end];
    int i;
    again[end] = 0, put_number(again + end, crc32_of(again, end + 1), 4);
    file.write = NULL, file.read = read_again, file.user = &size;
    r = was & 1 ? kopt_load(&other.opt, other.list, LIST, again, size)
                : kopt_load_from(&other.opt, other.list, LIST, &file);
    if (r != KOPT_OK) {
        refused++;
        bad_written += memcmp(&other, pristine, sizeof other) != 0;
        bad_taken += r != KOPT_ERROR_STATE && r != KOPT_ERROR_MISMATCH && !(r == KOPT_ERROR_VERSION && is_later());
    } else {
        taken++;
        bad_taken += kopt_save(&other.opt, other.list, LIST, saved, sizeof saved) != KOPT_OK ||
                     (decay_returns(again) && memcmp(saved, again, size) != 0);
        for (i = 0; i < LIST; ++i) {
            const size_t used = other.list[i].state_size;
            bad_written += memcmp(other.state[i] + used, pristine->state[i] + used, STATE - used) != 0;
        }
        memcpy(&other, pristine, sizeof other);
    }
    /* What the header tells is an optimizer whose own header has the same bytes. */
    memset(&seen, 0xA5, sizeof seen);
    if (kopt_inspect(again, 176, &seen, &count, NULL) != KOPT_OK) {
        bad_told += r == KOPT_OK;
        return;
    }
    told++;
    if (!decay_returns(again)) return;
    empty = kopt_tensor_of(NULL, (kopt_format)again[6], NULL, KOPT_F32, 0, NULL, 0);
    bad_told += kopt_save(&seen, &empty, 1, saved, sizeof saved) != KOPT_OK || memcmp(saved, again, 16) != 0 ||
                memcmp(saved + 32, again + 32, 144) != 0 || count != number(again + 16, 8);
}

/* A header of a state block, or of a tensor in a checkpoint: what it tells is an optimizer and a tensor that have the
   same bytes 4 to 31 there. */
static void try_header(const unsigned char *h) {
    static float row[MOST];
    static unsigned char block[STATE], saved[STATE + 4 * MOST + 180];
    kopt_optimizer seen;
    kopt_tensor t;
    uint64_t count = 0, size = 0, end = 0;
    memset(&seen, 0xA5, sizeof seen);
    if (kopt_inspect(h, 64, &seen, &count, &size) != KOPT_OK) {
        bad_told += kopt_inspect_tensor(h, 64, &end, &t) == KOPT_OK;
        return;
    }
    told++;
    bad_told += count != 1 || kopt_inspect_tensor(h, 64, &end, &t) != KOPT_OK || end != size;
    bad_told += t.n > (SIZE_MAX - 256) / 32 || t.first_index >> 63 != 0;
    if (t.n > MOST || t.n == 0) return;
    t.weight = row, t.state = block, t.state_size = sizeof block;
    seen.lr = seen.max_lr = 0.1, seen.beta1 = seen.beta2 = 0.5, seen.weight_decay = seen.dampening = 0;
    if (seen.rule == KOPT_RULE_SGD && h[9] & 7) seen.momentum = 0.5;
    bad_told += kopt_state_init(&seen, &t, 1, NULL) != KOPT_OK;
    bad_told += kopt_save(&seen, &t, 1, saved, sizeof saved) != KOPT_OK;
    bad_told += size != (h[10] ? kopt_save_size(&seen, &t, 1) - 180 : kopt_state_size(&seen, &t));
    bad_told += memcmp(h[10] ? saved + 176 + 4 : block + 4, h + 4, 28) != 0;
}

/* No struct has padding: copied or compared as bytes, all of them have been set. Here each field, and nothing else, is
   copied from a struct of zeros over one of ones. */
static void check_no_padding(void) {
    static const kopt_optimizer no_optimizer;
    static const kopt_tensor no_tensor;
    static const kopt_scaler no_scaler;
    static const kopt_accumulator no_accumulator;
    static const kopt_compressor no_compressor;
    int bad = 0;
#define PADDED(type, zero, fields)            \
    do {                                      \
        type a = zero, b;                     \
        memset(&b, 0xFF, sizeof b);           \
        fields;                               \
        bad += memcmp(&a, &b, sizeof a) != 0; \
    } while (0)
#define SET(field) memcpy(&b.field, &a.field, sizeof a.field)
    PADDED(kopt_optimizer, no_optimizer,
           (SET(made_), SET(rule), SET(rounding), SET(residual_rounding), SET(first_moment_format),
            SET(second_moment_format), SET(moment_rounding), SET(decay_mode), SET(nesterov), SET(amsgrad), SET(stable),
            SET(maximize), SET(zero_grad), SET(moments_only), SET(lookahead), SET(atan2_outside), SET(step),
            SET(reserved32_), SET(lr), SET(max_lr), SET(weight_decay), SET(beta1), SET(beta2), SET(beta3), SET(eps),
            SET(momentum), SET(dampening), SET(grad_scale), SET(clip), SET(lookahead_rate), SET(atan2_a), SET(atan2_b),
            SET(sharpness), SET(seed), SET(reserved_)));
    PADDED(kopt_tensor, no_tensor,
           (SET(weight), SET(grad), SET(copy), SET(state), SET(state_size), SET(n), SET(arrays), SET(counts),
            SET(weight_format), SET(grad_format), SET(copy_format), SET(id), SET(no_decay), SET(reserved32_),
            SET(first_index), SET(rate_scale), SET(stable_scale), SET(reserved_)));
    PADDED(kopt_scaler, no_scaler,
           (SET(scale), SET(minimum), SET(growth), SET(backoff), SET(interval), SET(hysteresis), SET(good), SET(bad),
            SET(steps_), SET(reserved_)));
    PADDED(kopt_accumulator, no_accumulator,
           (SET(made_), SET(format), SET(rounding), SET(residual_rounding), SET(sum), SET(residual), SET(n),
            SET(reserved_n_), SET(count), SET(step), SET(id), SET(reserved32_), SET(seed), SET(first_index)));
    PADDED(kopt_compressor, no_compressor,
           (SET(made_), SET(code), SET(rounding), SET(residual_rounding), SET(residual_format), SET(step), SET(id),
            SET(reserved32_), SET(residual), SET(n), SET(seed), SET(first_index)));
#undef SET
#undef PADDED
    bad += sizeof(kopt_step) != 256 || sizeof(kopt_norm) != 168;
    ok(!bad, "no struct has padding: %d have", bad);
}

static void check_contradictions(void) {
    static model pristine;
    const int pairs = quick ? 1500 : 60000, every = quick ? 7 : 1;
    int which, k, j, bad_later = 0;
    for (which = 0; which < OPTIMIZERS; ++which) {
        const kopt_optimizer opt = optimizer_of(which);
        size_t size, i, at = 176;
        build(&m, &opt, weights_of(which));
        for (k = 0; k < LIST; ++k) {
            m.list[k].n = k == 0 ? 21 : k == 1 ? 7 : k == 2 ? 0 : 10;
            m.list[k].state_size = kopt_state_size(&opt, &m.list[k]);
        }
        if (kopt_state_init(&m.opt, m.list, LIST, NULL) != KOPT_OK) ok(0, "init");
        if (steps(&m, 0, 3)) ok(0, "steps");
        size = kopt_save_size(&m.opt, m.list, LIST);
        if (size > SMALL_FILE || kopt_save(&m.opt, m.list, LIST, bytes, size) != KOPT_OK) ok(0, "saved");
        memcpy(&other, &m, sizeof m), connect(&other);
        for (k = 0; k < LIST; ++k) other.list[k].n = m.list[k].n, other.list[k].state_size = m.list[k].state_size;
        if (steps(&other, 3, 4)) ok(0, "steps");
        memcpy(&pristine, &other, sizeof other);
        place_count = 0, dice = (uint32_t)which + 1;
        add_fields(0, 0);
        for (k = 0; k < LIST; ++k) {
            add_fields(tensor_at[k] = at, 1);
            at += kopt_save_size(&m.opt, &m.list[k], 1) - 180;
        }
        for (k = -1; k < LIST; ++k) { /* a later layout, of the checkpoint or of tensor k */
            unsigned char *const head = again + (k < 0 ? 0 : tensor_at[k]);
            const kopt_file file = {NULL, read_again, &size};
            memcpy(again, bytes, size), ++head[4], again[size - 4] = 0;
            put_number(again + size - 4, crc32_of(again, size - 3), 4);
            bad_later += kopt_inspect(head, k < 0 ? 176 : 64, NULL, NULL, NULL) != KOPT_ERROR_VERSION;
            bad_later += kopt_load(&other.opt, other.list, LIST, again, size) != KOPT_ERROR_VERSION;
            bad_later += kopt_load_from(&other.opt, other.list, LIST, &file) != KOPT_ERROR_VERSION;
            bad_later += memcmp(&other, &pristine, sizeof other) != 0;
        }
        for (k = 0; k < place_count; ++k)
            for (j = 0; j < VALUES; j += k < 31 || !quick ? 1 : 5) {
                memcpy(again, bytes, size);
                put_number(again + places[k].at,
                           bad_value(&places[k], number(bytes + places[k].at, places[k].size), (uint32_t)j),
                           places[k].size);
                try_contradiction(&pristine, size);
            }
        for (i = 0; i < size - 4; i += (size_t)every) /* padding and arrays, too */
            for (k = 0; k < 8; k += quick ? 3 : 1) {
                memcpy(again, bytes, size);
                again[i] ^= (unsigned char)(1 << k);
                try_contradiction(&pristine, size);
            }
        for (k = 0; k < pairs; ++k) {
            memcpy(again, bytes, size);
            for (j = 0; j < 2; ++j) { /* mostly of the same header */
                const place *p = &places[below(k % 4 ? 31 : (uint32_t)place_count)];
                put_number(again + p->at, bad_value(p, number(bytes + p->at, p->size), below(VALUES)), p->size);
            }
            try_contradiction(&pristine, size);
        }
    }
    ok(!bad_later, "files of a later layout are refused as such, and nothing is written: %d are not", bad_later);
    ok(taken > 500 && refused > 2 * taken && !bad_taken && !bad_written,
       "%u files that contradict themselves, with the right checksum: %u taken, of which %d not as they would be "
       "saved; "
       "%d wrote where they must not",
       taken + refused, taken, bad_taken, bad_written);
    ok(told > taken && !bad_told, "%u headers of them are told of: %d not as they would be saved", told, bad_told);
}

/* The headers of blocks, and of tensors in checkpoints; and what a step does with a block that has such a header. */
static void check_contradicting_blocks(void) {
    static unsigned char block[STATE], kept[STATE], right[32];
    const int pairs = quick ? 3000 : 60000;
    int which, saved, k, j, written = 0, taken_blocks = 0;
    told = 0, bad_told = 0;
    for (which = 0; which < OPTIMIZERS; ++which)
        for (saved = 0; saved < 2; ++saved) {
            const kopt_optimizer opt = optimizer_of(which);
            kopt_tensor t;
            build(&m, &opt, weights_of(which));
            t = m.list[1], t.state_size = kopt_state_size(&opt, &t);
            if (t.state_size == 0) continue;
            memcpy(block, t.state, t.state_size), memcpy(right, block, 32);
            if (kopt_save(&m.opt, &t, 1, bytes, sizeof bytes) != KOPT_OK) ok(0, "saved");
            if (saved) memcpy(block, bytes + 176, 64);
            place_count = 0, dice = 1;
            add_fields(0, 1);
            for (k = 0; k < place_count * VALUES + pairs; ++k) {
                kopt_optimizer o = m.opt;
                memcpy(t.state, block, t.state_size);
                for (j = 0; j < (k < place_count * VALUES ? 1 : 2); ++j) {
                    const place *p = &places[k < place_count * VALUES ? k / VALUES : (int)below((uint32_t)place_count)];
                    const uint32_t v = k < place_count * VALUES ? (uint32_t)(k % VALUES) : below(VALUES);
                    put_number(m.state[1] + p->at, bad_value(p, number(block + p->at, p->size), v), p->size);
                }
                try_header(m.state[1]);
                memcpy(kept, m.state[1], sizeof kept);
                if (kopt_optimizer_step(&o, &t, 1) == KOPT_OK)
                    taken_blocks += memcmp(kept, right, 32) != 0;
                else
                    written += memcmp(kept, m.state[1], sizeof kept) != 0 || memcmp(&o, &m.opt, sizeof o) != 0;
            }
        }
    ok(told > 1000 && !bad_told, "%u headers of tensors are told of: %d not as they would be made", told, bad_told);
    ok(!written && !taken_blocks, "stepped with such a header: %d refused but written, %d of another tensor taken",
       written, taken_blocks);
}

/* ---- Files that fail --------------------------------------------------------------------------------------------- */

static void check_failing_files(void) {
    kopt_optimizer opt = kopt_adamw(0.01);
    kopt_file file = tape_file();
    int calls, reads, half, k, bad = 0, written = 0, wrong = 0, stepped = 0;
    build(&m, &opt, IN_BF16);
    steps(&m, 0, 3);
    bad += kopt_save_to(&m.opt, m.list, LIST, &file) != KOPT_OK;
    calls = file_tape.calls;
    copy_model(&whole, &m);
    for (k = 1; k <= calls; ++k) {
        file = tape_file(), file_tape.fail_at = k;
        bad +=
            kopt_save_to(&m.opt, m.list, LIST, &file) != KOPT_ERROR_FILE || file_tape.calls != k || !same(&m, &whole);
    }
    ok(!bad && calls > 10, "each of %d writes fails: FILE, nothing more is written, the model goes on: %d wrong", calls,
       bad);
    file = tape_file();
    kopt_save_to(&m.opt, m.list, LIST, &file);
    file_tape.calls = 0;
    build(&other, &opt, IN_BF16);
    bad = kopt_load_from(&other.opt, other.list, LIST, &file) != KOPT_OK;
    reads = file_tape.calls, half = file_tape.second;
    for (k = 1; k <= reads; ++k) {
        kopt_result r;
        int second;
        build(&other, &opt, IN_BF16);
        memcpy(&before, &other, sizeof other);
        file_tape.calls = 0, file_tape.fail_at = k;
        r = kopt_load_from(&other.opt, other.list, LIST, &file);
        second = k >= half;
        wrong += r != KOPT_ERROR_FILE || other.opt.step != 0;
        written += !second && !unchanged();
        if (second) stepped += kopt_optimizer_step(&other.opt, other.list, LIST) != KOPT_ERROR_STATE;
    }
    ok(!bad && !wrong && !written && !stepped,
       "each of %d reads fails: %d not FILE, %d times written in the first reading, %d times stepped after the second",
       reads, wrong, written, stepped);
    build(&other, &opt, IN_BF16);
    file_tape.calls = 0, file_tape.fail_at = 0, file_tape.change_at = half;
    ok(kopt_load_from(&other.opt, other.list, LIST, &file) == KOPT_ERROR_CHECKSUM && other.opt.step == 0 &&
           kopt_optimizer_step(&other.opt, other.list, LIST) == KOPT_ERROR_STATE,
       "a file that changes between the readings: CHECKSUM, and no step");
    file_tape.at[200] ^= 4;
    steps(&m, 3, 4); /* a later checkpoint takes its place */
    bad = kopt_save(&m.opt, m.list, LIST, bytes, sizeof bytes) != KOPT_OK;
    build(&other, &opt, IN_BF16);
    file_tape.calls = 0, file_tape.instead = bytes;
    ok(!bad && kopt_load_from(&other.opt, other.list, LIST, &file) == KOPT_ERROR_CHECKSUM && other.opt.step == 0 &&
           kopt_optimizer_step(&other.opt, other.list, LIST) == KOPT_ERROR_STATE,
       "... or becomes another checkpoint: the same");
    file_tape.change_at = 0, file_tape.size -= 1;
    build(&other, &opt, IN_BF16);
    memcpy(&before, &other, sizeof other);
    ok(kopt_load_from(&other.opt, other.list, LIST, &file) == KOPT_ERROR_FILE && unchanged(), "a file cut off: FILE");
    file.read = NULL, file.write = NULL;
    ok(kopt_load_from(&other.opt, other.list, LIST, &file) == KOPT_ERROR_NULL &&
           kopt_save_to(&other.opt, other.list, LIST, &file) == KOPT_ERROR_NULL &&
           kopt_load_from(&other.opt, other.list, LIST, NULL) == KOPT_ERROR_NULL &&
           kopt_save_to(&other.opt, other.list, LIST, NULL) == KOPT_ERROR_NULL && unchanged(),
       "without the function it needs: NULL");
}

/* ---- Wrong calls ------------------------------------------------------------------------------------------------- */

static size_t saved_size;
static void loads(kopt_result expected, const char *what) {
    kopt_result r;
    memcpy(&before, &other, sizeof other);
    r = kopt_load(&other.opt, other.list, LIST, bytes, saved_size);
    ok(r == expected && unchanged(), "load: %s: %s", what, kopt_result_string(r));
}

static void saves(kopt_result expected, const char *what) {
    kopt_result r;
    memcpy(&before, &other, sizeof other);
    memset(again, 0xEE, sizeof again);
    r = kopt_save(&other.opt, other.list, LIST, again, sizeof again);
    ok(r == expected && unchanged() && again[0] == 0xEE, "save: %s: %s", what, kopt_result_string(r));
}

static void check_wrong_calls(void) {
    kopt_optimizer opt = kopt_adamw(0.01);
    int i;
    build(&m, &opt, IN_BF16);
    steps(&m, 0, 3);
    saved_size = kopt_save_size(&m.opt, m.list, LIST);
    kopt_save(&m.opt, m.list, LIST, bytes, saved_size);
#define FRESH build(&other, &opt, IN_BF16)
    FRESH, other.list[1].n = 6, loads(KOPT_ERROR_MISMATCH, "another n");
    FRESH, other.list[1].id = 3, loads(KOPT_ERROR_ID, "ids that decrease");
    FRESH, other.list[0].id = 3, loads(KOPT_ERROR_MISMATCH, "another id");
    FRESH, other.list[3].first_index = 0, loads(KOPT_ERROR_MISMATCH, "another shard");
    FRESH, other.list[2].id = 8, loads(KOPT_ERROR_MISMATCH, "another id of an empty tensor");
    FRESH, other.opt.rounding = KOPT_EXACT, loads(KOPT_ERROR_MISMATCH, "another rounding of the same size");
    for (i = 0; i < LIST; ++i) { /* also of an empty tensor */
        FRESH, other.list[i].weight_format = KOPT_FP16, loads(KOPT_ERROR_MISMATCH, "another weight format");
        FRESH, other.list[i].weight_format = KOPT_F32, loads(KOPT_ERROR_MISMATCH, "... of 32 bits");
    }
    FRESH, other.opt.first_moment_format = other.opt.second_moment_format = KOPT_FP16,
           loads(KOPT_ERROR_MISMATCH, "another moment format");
    FRESH, other.opt.moment_rounding = KOPT_NEAREST, loads(KOPT_ERROR_MISMATCH, "another rounding of moments");
    FRESH, other.opt.residual_rounding = KOPT_NEAREST, loads(KOPT_ERROR_MISMATCH, "... of compensations");
    FRESH, other.opt.decay_mode = KOPT_DECAY_L2, loads(KOPT_ERROR_MISMATCH, "another decay mode");
    FRESH, other.opt.amsgrad = 1, loads(KOPT_ERROR_MISMATCH, "another number of moments");
    FRESH, other.opt.stable = 1, loads(KOPT_ERROR_MISMATCH, "StableAdamW");
    FRESH, other.opt = kopt_radam(0.01), other.opt.decay_mode = KOPT_DECAY_DECOUPLED;
    loads(KOPT_ERROR_MISMATCH, "another rule of the same size");
    FRESH, memset(&other.opt, 0, sizeof other.opt), loads(KOPT_ERROR_UNINITIALIZED, "an optimizer of zeros");
    FRESH, other.opt.lr = -1, loads(KOPT_ERROR_RANGE, "a negative rate");
    FRESH, other.list[0].state_size = 100, loads(KOPT_ERROR_SIZE, "a state that is too small");
    FRESH, other.list[0].state = NULL, loads(KOPT_ERROR_NULL, "no state");
    FRESH, other.list[0].weight = NULL, loads(KOPT_ERROR_NULL, "no weights");
    FRESH, other.list[0].weight = other.state[0] + 64, loads(KOPT_ERROR_OVERLAP, "weights in the state");
    FRESH, other.list[1].weight = other.list[0].weight, loads(KOPT_ERROR_OVERLAP, "weights of the neighbour");
    FRESH, other.list[1].state = other.list[0].state, loads(KOPT_ERROR_OVERLAP, "the state of the neighbour");
    FRESH, other.list[0].weight = bytes + 100, loads(KOPT_ERROR_OVERLAP, "weights in the checkpoint");
    FRESH, other.list[3].weight = bytes + 100, loads(KOPT_ERROR_OVERLAP, "the last weights in the checkpoint");
    FRESH, other.list[0].rate_scale = -1, loads(KOPT_ERROR_RANGE, "a negative rate_scale");
    FRESH, memset(other.state, 0x5A, sizeof other.state), memcpy(&before, &other, sizeof other);
    ok(kopt_load(&other.opt, other.list, 3, bytes, saved_size) == KOPT_ERROR_MISMATCH && unchanged(), "fewer tensors");
    ok(kopt_load(&other.opt, NULL, LIST, bytes, saved_size) == KOPT_ERROR_NULL && unchanged(), "load: no list");
    ok(kopt_load(NULL, other.list, LIST, bytes, saved_size) == KOPT_ERROR_NULL && unchanged(), "load: no optimizer");
    ok(kopt_load(&other.opt, other.list, LIST, NULL, saved_size) == KOPT_ERROR_NULL && unchanged(), "load: no bytes");
    ok(kopt_load(&other.opt, other.list, LIST, m.state[0], STATE) == KOPT_ERROR_STATE && unchanged(), "a state block");
    for (i = 0; i < 1000; ++i) again[i] = (unsigned char)(i * 37);
    ok(kopt_load(&other.opt, other.list, LIST, again, 1000) == KOPT_ERROR_STATE && unchanged(), "any bytes");
    ok(kopt_load(&other.opt, other.list, LIST, bytes, saved_size) == KOPT_OK && other.opt.step == 3 &&
           kopt_optimizer_step(&other.opt, other.list, LIST) == KOPT_OK,
       "states of any content are loaded, and step");

    FRESH, other.list[1].id = 1, saves(KOPT_ERROR_MISMATCH, "an id that is not the block's");
    FRESH, memset(other.state[1], 0, 64), saves(KOPT_ERROR_STATE, "a state that was not initialized");
    FRESH, memcpy(other.state[0], bytes + 176, 64), saves(KOPT_ERROR_STATE, "a state with the header of a checkpoint");
    FRESH, other.opt.rounding = KOPT_EXACT, saves(KOPT_ERROR_MISMATCH, "another optimizer");
    FRESH, other.list[3].weight_format = KOPT_FP16, saves(KOPT_ERROR_MISMATCH, "another weight format");
    FRESH, other.list[3].weight_format = KOPT_F32, saves(KOPT_ERROR_MISMATCH, "... of 32 bits");
    FRESH, other.list[3].weight_format = KOPT_Q8, saves(KOPT_ERROR_OPTION, "... that is none");
    FRESH, other.list[0].state_size = 100, saves(KOPT_ERROR_SIZE, "a state that is too small");
    FRESH, other.list[0].state_size = 10, saves(KOPT_ERROR_SIZE, "a state without room for a header");
    FRESH, other.list[1].weight = other.list[0].weight, saves(KOPT_ERROR_OVERLAP, "weights of the neighbour");
    FRESH, memset(&other.opt, 0, sizeof other.opt), saves(KOPT_ERROR_UNINITIALIZED, "an optimizer of zeros");
    FRESH, memcpy(&before, &other, sizeof other);
    ok(kopt_save(&other.opt, other.list, LIST, other.weight, sizeof other.weight) == KOPT_ERROR_SIZE &&
           kopt_save(&other.opt, other.list, LIST, other.weight, SPACE) == KOPT_ERROR_OVERLAP &&
           kopt_save(&other.opt, other.list, LIST, other.grad[3], SPACE) == KOPT_ERROR_OVERLAP && unchanged(),
       "save: into the model's own memory");
    ok(kopt_save(NULL, other.list, LIST, again, SPACE) == KOPT_ERROR_NULL &&
           kopt_save(&other.opt, NULL, LIST, again, SPACE) == KOPT_ERROR_NULL &&
           kopt_save(&other.opt, other.list, LIST, NULL, SPACE) == KOPT_ERROR_NULL,
       "save: NULL");
    ok(kopt_save_size(NULL, other.list, LIST) == 0 && kopt_save_size(&other.opt, NULL, LIST) == 0 &&
           kopt_save_size(&other.opt, NULL, 0) == 180,
       "the size without a list");
    ok(kopt_save(&other.opt, NULL, 0, again, 180) == KOPT_OK && kopt_load(&other.opt, NULL, 0, again, 180) == KOPT_OK,
       "an empty list has a checkpoint");
    other.list[1].n = (SIZE_MAX - 256) / 32, other.list[3].n = (SIZE_MAX - 256) / 32;
    ok(kopt_save_size(&other.opt, other.list + 1, 1) > other.list[1].n &&
           kopt_save_size(&other.opt, other.list, LIST) != 0,
       "the size needs no memory");
    other.opt.first_moment_format = other.opt.second_moment_format = KOPT_F32, other.opt.amsgrad = 1;
    for (i = 0; i < LIST; ++i) {
        other.list[i].n = (SIZE_MAX - 256) / 32, other.list[i].id = (uint32_t)i;
        other.list[i].weight_format = KOPT_F32;
    }
    ok(kopt_save_size(&other.opt, other.list, LIST) == 0, "a size above SIZE_MAX is 0");
}

/* ---- Checkpoints of this layout, as a version of the library once wrote them ------------------------------------- */

static kopt_optimizer fixture_of(int which) {
    kopt_optimizer opt = which == 0 ? kopt_adamw(0.01) : which == 1 ? kopt_ranger(0.01) : kopt_sgd(0.01, 0.9);
    if (which == 1) opt.rounding = KOPT_EXACT, opt.first_moment_format = opt.second_moment_format = KOPT_Q8;
    if (which == 2) opt.first_moment_format = opt.second_moment_format = KOPT_FP16;
    return opt;
}

static weights fixture_in(int which) { return which == 0 ? IN_BF16 : which == 1 ? IN_FP16 : IN_F32; }

static void small(model *to) { to->list[0].n = 9, to->list[1].n = 2, to->list[3].n = 3; }

/* Fixture k: each format of weights with each rounding has each format of moments, and each rule has three or four of
   them. The last one has 8-bit moments of two blocks. */
enum { OLD = 45, OLD_RULES = 14, OLD_LIST = 2 };

static weights old_weights(int k) { return k % 11 == 0 ? IN_F32 : k % 11 < 6 ? IN_BF16 : IN_FP16; }

static kopt_optimizer old_optimizer(int k) {
    kopt_optimizer o;
    switch (k % OLD_RULES) {
    case 0: o = kopt_sgd(0.01, 0); break;
    case 1: o = kopt_sgd(0.01, 0.9), o.dampening = 0.25; break;
    case 2: o = kopt_sgd(0.01, 0.9), o.nesterov = 1; break;
    case 3: o = kopt_adam(0.01), o.maximize = k & 1; break;
    case 4: o = kopt_adam(0.01), o.amsgrad = 1; break;
    case 5: o = kopt_stable_adamw(0.01); break;
    case 6: o = kopt_lion(0.01), o.beta1 = 0.8; break;
    case 7: o = kopt_adan(0.01), o.beta3 = 0.7; break;
    case 8: o = kopt_radam(0.01), o.eps = 1e-5; break;
    case 9: o = kopt_ranger(0.01), o.lookahead = 2, o.lookahead_rate = 0.25; break;
    case 10: o = kopt_ema(0.9), o.lr = 0.9, o.max_lr = 1 - o.beta1; break; /* not read, and saved as 0.2 did */
    case 11: o = kopt_adam_atan2(0.01), o.atan2_outside = k & 1, o.atan2_b = 0.5; break;
    case 12: o = kopt_smooth_lion(0.01, 3); break;
    default: o = kopt_adamw(0.01), o.grad_scale = 0.5, o.clip = 0.7; break;
    }
    o.rounding = (kopt_rounding)((k % 11 + 4) % 5); /* all five of each 16-bit format */
    o.first_moment_format = o.second_moment_format = (kopt_format)(k % 4),
    o.moment_rounding = (kopt_rounding)(k / 4 % 2);
    o.residual_rounding = (kopt_rounding)(k / 8 % 2);
    if (k == OLD - 1)
        o = kopt_adamw(0.01), o.rounding = KOPT_COMPACT, o.first_moment_format = o.second_moment_format = KOPT_Q8;
    if (o.rule != KOPT_RULE_EMA) {
        o.decay_mode = (kopt_decay_mode)(k % 3), o.max_lr = 0.02, o.weight_decay = 0.1;
        o.zero_grad = k % 5 == 0, o.moments_only = k % 19 == 18;
    }
    return o;
}

static size_t old_length(int k, int i) { return i == 1 ? 3 : k == OLD - 1 ? 258 : 5; }

/* Makes the first two tensors of a model those of fixture k: lengths, id and place. */
static void old_list(model *to, int k) {
    to->list[0].n = old_length(k, 0), to->list[1].n = old_length(k, 1);
    to->list[1].id = 9, to->list[1].first_index = 512;
}

/* Makes the checkpoint again: after three steps. Returns its size. */
static size_t old_run(model *to, int k) {
    static float row[2 * MOST];
    const kopt_optimizer opt = old_optimizer(k);
    uint32_t seed = 1 + (uint32_t)k;
    size_t i, length;
    int s, j;
    restart(to, &opt, old_weights(k));
    old_list(to, k);
    to->opt.seed = UINT64_C(0x123456789abcdef0) + (uint64_t)k;
    length = kopt_list_length(to->list, OLD_LIST);
    for (i = 0; i < length; ++i) row[i] = normal32(&seed);
    if (kopt_state_init(&to->opt, to->list, OLD_LIST, row) != KOPT_OK) ok(0, "init");
    for (s = 0; s < 3; ++s) {
        for (j = 0; j < OLD_LIST; ++j)
            for (i = 0; i < to->list[j].n; ++i) {
                const kopt_bf16 g = kopt_bf16_from_f32(normal32(&seed) * 0.01f);
                memcpy(to->grad[j] + 2 * i, &g, 2);
            }
        if (kopt_optimizer_step(&to->opt, to->list, OLD_LIST) != KOPT_OK) ok(0, "a step");
    }
    length = kopt_save_size(&to->opt, to->list, OLD_LIST);
    if (kopt_save(&to->opt, to->list, OLD_LIST, bytes, sizeof bytes) != KOPT_OK) ok(0, "saved");
    return length;
}

static void print_old(void) {
    int k;
    size_t i, size;
    printf("static const char *const save_v1_hex[] = {");
    for (k = 0; k < OLD; ++k) {
        size = old_run(&m, k);
        printf("\n    /* %d */", k);
        for (i = 0; i < size; ++i) printf("%s%02x", i % 56 ? "" : i ? "\"\n    \"" : "\n    \"", bytes[i]);
        printf("\",");
    }
    printf("\n};\n");
}

static size_t bytes_of_hex(unsigned char *to, const char *hex) {
    size_t n = 0;
    for (; hex[2 * n] != 0; ++n) {
        int k;
        for (to[n] = 0, k = 0; k < 2; ++k) {
            const char c = hex[2 * n + (size_t)k];
            to[n] = (unsigned char)(to[n] << 4 | (c <= '9' ? c - '0' : c - 'a' + 10));
        }
    }
    return n;
}

/* A checkpoint with 8-bit moments of version 0.9 or before, whose codes were others: refused in words, whatever the
   optimizer is, and nothing is written. */
static int is_not_refused(const unsigned char *fixture, size_t size, const kopt_optimizer *opt) {
    kopt_optimizer seen = *opt;
    kopt_file file = tape_file();
    kopt_tensor shape;
    uint64_t count = 0, in_all = 0, end = 0;
    int bad = 0, i;
    memcpy(file_tape.at, fixture, size), file_tape.size = size;
    for (i = 0; i < 2; ++i) {
        memcpy(&before, &other, sizeof other);
        bad += kopt_load(&other.opt, other.list, OLD_LIST, fixture, size) != KOPT_ERROR_STATE || !unchanged();
        bad += kopt_load_from(&other.opt, other.list, OLD_LIST, &file) != KOPT_ERROR_STATE || !unchanged();
        other.opt.first_moment_format = other.opt.second_moment_format = KOPT_BF16;
    }
    bad += kopt_inspect(fixture, size, &seen, &count, &in_all) != KOPT_ERROR_STATE;
    bad += kopt_inspect(fixture + 176, 64, &seen, &count, &in_all) != KOPT_ERROR_STATE;
    bad += kopt_inspect_tensor(fixture, size, &end, &shape) != KOPT_ERROR_STATE;
    bad += strstr(kopt_result_string(KOPT_ERROR_STATE), "8-bit moments of 0.9 and before") == NULL;
    return bad;
}

/* The same of state blocks: byte 8 of the header was 4 for the first moment, byte 11 was 5 for the second. */
static void check_old_blocks(void) {
    int k, bad = 0;
    for (k = 0; k < 2; ++k) {
        kopt_optimizer opt = kopt_adamw(0.01), seen;
        kopt_step step;
        unsigned char *header;
        opt.first_moment_format = k ? KOPT_BF16 : KOPT_Q8, opt.second_moment_format = KOPT_Q8;
        build(&other, &opt, IN_BF16);
        header = other.state[0];
        bad += header[8] != (k ? 1 : 5) || header[11] != (k ? 6 : 0) || kopt_step_begin(&step, &other.opt) != KOPT_OK;
        header[k ? 11 : 8] = (unsigned char)(k ? 5 : 4);
        memcpy(&before, &other, sizeof other);
        bad += kopt_optimizer_step(&other.opt, other.list, 1) != KOPT_ERROR_STATE;
        bad += kopt_step_run(&step, other.list, 1) != KOPT_ERROR_STATE;
        bad += kopt_save(&other.opt, other.list, 1, bytes, sizeof bytes) != KOPT_ERROR_STATE || !unchanged();
        bad += kopt_inspect(header, 64, &seen, NULL, NULL) != KOPT_ERROR_STATE;
        bad += strstr(kopt_explain(&other.opt, other.list, 1), "8-bit moments of version 0.9 or before") == NULL;
    }
    ok(!bad, "state blocks with 8-bit moments of version 0.9 or before are refused in words: %d wrong", bad);
}

/* Each rule, format and rounding, as the header of version 0.2 wrote them. */
static void check_old(void) {
    static unsigned char fixture[4096];
    int k, bad_load = 0, bad_save = 0, told_wrong = 0, bad_step = 0, changed = 0, old = 0, bad_refused = 0;
    for (k = 0; k < OLD; ++k) {
        const kopt_optimizer opt = old_optimizer(k);
        const size_t size = bytes_of_hex(fixture, save_v1_hex[k]);
        kopt_optimizer fresh = opt, seen, told_of;
        kopt_file file = tape_file();
        kopt_tensor shape;
        const unsigned char *p;
        uint64_t count = 0, in_all = 0, end;
        int i;
        fresh.lr = 0.5, fresh.seed = 1, fresh.step = 99, fresh.grad_scale = 7, fresh.clip = 7, fresh.lookahead = 77;
        restart(&other, &fresh, old_weights(k));
        old_list(&other, k);
        if (opt.first_moment_format == KOPT_Q8 || opt.second_moment_format == KOPT_Q8) {
            bad_refused += is_not_refused(fixture, size, &opt), ++old;
            continue;
        }
        bad_load += kopt_load(&other.opt, other.list, OLD_LIST, fixture, size) != KOPT_OK;
        bad_load += other.opt.step != 3 || other.opt.seed != UINT64_C(0x123456789abcdef0) + (uint64_t)k;
        told_of = other.opt, told_of.step = 0, told_of.seed = opt.seed;
        bad_load += memcmp(&told_of, &opt, sizeof opt) != 0; /* every field, but flags that are not 0 or 1 */
        p = holds_tensors(fixture + 176, fixture, &other, OLD_LIST, &bad_load);
        bad_load += (size_t)(p - fixture) + 4 != size || !is_checksum(fixture + size - 4, size - 4);
        bad_save += kopt_save_size(&other.opt, other.list, OLD_LIST) != size;
        bad_save += kopt_save(&other.opt, other.list, OLD_LIST, bytes, sizeof bytes) != KOPT_OK;
        bad_save += memcmp(bytes, fixture, size) != 0;
        memcpy(&whole, &other, sizeof other);
        connect(&whole), old_list(&whole, k);
        memcpy(file_tape.at, fixture, size), file_tape.size = size; /* the same from a file */
        restart(&other, &fresh, old_weights(k));
        old_list(&other, k);
        bad_load += kopt_load_from(&other.opt, other.list, OLD_LIST, &file) != KOPT_OK || !same(&other, &whole);
        told_wrong +=
            kopt_inspect(fixture, size, &seen, &count, &in_all) != KOPT_OK || count != OLD_LIST || in_all != size;
        told_wrong += kopt_save_size(&seen, other.list, OLD_LIST) != size || seen.step != 3;
        for (p = fixture + 176, end = 0, i = 0; i < OLD_LIST; ++i) {
            told_wrong += kopt_inspect(p, 64, &seen, NULL, &in_all) != KOPT_OK;
            told_wrong += kopt_inspect_tensor(fixture, size, &end, &shape) != KOPT_OK;
            told_wrong += end != (uint64_t)(p - fixture) + in_all;
            told_wrong += shape.weight_format != other.list[i].weight_format || shape.n != other.list[i].n;
            told_wrong += shape.id != other.list[i].id || shape.first_index != other.list[i].first_index;
            told_wrong += seen.rule != opt.rule || seen.decay_mode != opt.decay_mode;
            p += kopt_save_size(&other.opt, &other.list[i], 1) - 180;
        }
        told_wrong += kopt_inspect_tensor(fixture, size, &end, &shape) != KOPT_ERROR_BOUNDS || end + 4 != size;
        bad_step += kopt_optimizer_step(&other.opt, other.list, OLD_LIST) != KOPT_OK || other.opt.step != 4;
        bad_step += kopt_optimizer_step(&whole.opt, whole.list, OLD_LIST) != KOPT_OK || !same(&other, &whole);
        changed += old_run(&m, k) != size || memcmp(bytes, fixture, size) != 0;
    }
    ok(!bad_load && !bad_save && !told_wrong && !bad_step,
       "%d checkpoints of version 0.2: %d not loaded, %d saved with other bytes, %d told of as others, %d stepped "
       "as others",
       OLD - old, bad_load, bad_save, told_wrong, bad_step);
    ok(!bad_refused && old == 12, "%d with 8-bit moments are refused: %d wrong", old, bad_refused);
    ok(!changed, "... and made again by the same steps: %d are others", changed); /* not if a step gets other bits */
}

static void print_fixtures(void) {
    static const char *const name[] = {"adamw_kahan", "ranger_fp16_exact_q8", "momentum_fp32"};
    int which;
    for (which = 0; which < 3; ++which) {
        const kopt_optimizer opt = fixture_of(which);
        size_t size, i;
        build(&m, &opt, fixture_in(which));
        small(&m);
        kopt_state_init(&m.opt, m.list, LIST, NULL);
        steps(&m, 0, 7);
        size = kopt_save_size(&m.opt, m.list, LIST);
        kopt_save(&m.opt, m.list, LIST, bytes, size);
        printf("static const unsigned char save_v1_%s[] = {", name[which]);
        for (i = 0; i < size; ++i) printf("%s0x%02x,", i % 19 ? " " : "\n    ", bytes[i]);
        printf("\n};\n");
    }
    print_old();
}

static void check_fixtures(void) {
    static const unsigned char *const fixture[] = {save_v1_adamw_kahan, save_v1_ranger_fp16_exact_q8,
                                                   save_v1_momentum_fp32};
    static const size_t size[] = {sizeof save_v1_adamw_kahan, sizeof save_v1_ranger_fp16_exact_q8,
                                  sizeof save_v1_momentum_fp32};
    int which;
    for (which = 0; which < 3; ++which) {
        const kopt_optimizer opt = fixture_of(which);
        const unsigned char *p;
        int bad = 0;
        restart(&other, &opt, fixture_in(which));
        small(&other);
        if (opt.first_moment_format == KOPT_Q8) {
            ok(!is_not_refused(fixture[which], size[which], &opt), "one of 0.2 with 8-bit moments is refused");
            continue;
        }
        bad += kopt_load(&other.opt, other.list, LIST, fixture[which], size[which]) != KOPT_OK;
        bad += other.opt.step != 7 || other.opt.seed != UINT64_C(0x123456789abcdef0);
        p = holds_tensors(fixture[which] + 176, fixture[which], &other, LIST, &bad);
        bad += (size_t)(p - fixture[which]) + 4 != size[which];
        bad += kopt_save_size(&other.opt, other.list, LIST) != size[which];
        bad += kopt_save(&other.opt, other.list, LIST, bytes, sizeof bytes) != KOPT_OK;
        ok(!bad && !memcmp(bytes, fixture[which], size[which]) && !steps(&other, 7, 9),
           "a checkpoint of layout 1, of %u bytes, is loaded, saved again and stepped: %d wrong", (unsigned)size[which],
           bad);
    }
}

int main(int argc, char **argv) {
    int which;
    if (argc > 1 && !strcmp(argv[1], "fixtures")) return print_fixtures(), 0;
    quick = argc > 1 && !strcmp(argv[1], "quick");
    check_combinations();
    check_mixed();
    check_equal_runs();
    for (which = 0; which < WEIGHTS; ++which) {
        check_layout((weights)which, KOPT_COMPACT);
        check_layout((weights)which, KOPT_FEEDBACK);
    }
    check_fixtures();
    check_old();
    check_old_blocks();
    check_damage(IN_BF16);
    check_damage(MIXED_FROM_F32);
    check_no_padding();
    check_contradictions();
    check_contradicting_blocks();
    check_failing_files();
    check_wrong_calls();
    return done();
}
