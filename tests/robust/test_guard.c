/* test_guard.c - memory that must not be touched cannot be: arrays flush against pages without access, before and after
   them, and pages that can only be read up to the first element of a range and from its end on. For every instruction
   set, format, rounding and rule; steps, ranges, conversions, checks and state. Argument "quick": a part of it. */
#define _DEFAULT_SOURCE 1 /* MAP_ANONYMOUS */
#define KAHAN_OPT_IMPLEMENTATION
#include "../../kahan_opt.h"

#include "../unit/tap.h"

#if defined(__unix__) || defined(__APPLE__)
#include "../unit/reference.h"
#include "../unit/inputs.h"

#include <setjmp.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

/* ---- Memory between two pages without access -------------------------------------------------------------------- */

enum { WEIGHT, GRAD, STATE, COPY, FLOATS, OWN, STATE_ARRAYS = 11, REGIONS = OWN + STATE_ARRAYS }; /* OWN: arrays */
enum { PAGES = 80, CANARY = 0x5a, MARGIN = 96 };

static size_t page;
static unsigned char *room[REGIONS]; /* PAGES pages */

static int reserve(void) {
    int r;
    page = (size_t)sysconf(_SC_PAGESIZE);
    for (r = 0; r < REGIONS; ++r) {
        unsigned char *p = mmap(NULL, (PAGES + 2) * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (p == MAP_FAILED || mprotect(p + page, PAGES * page, PROT_READ | PROT_WRITE)) return 0;
        room[r] = p + page;
        memset(room[r], CANARY, PAGES * page);
    }
    return 1;
}

static void protect(int r, size_t first, size_t pages, int access) {
    if (mprotect(room[r] + first * page, pages * page, access)) abort();
}

static void protect_all(int access) {
    int r;
    for (r = 0; r < REGIONS; ++r) protect(r, 0, PAGES, access);
}

/* A state: its block, or its arrays. */
static void protect_region(int r, int access) {
    int i;
    protect(r, 0, PAGES, access);
    for (i = OWN; r == STATE && i < REGIONS; ++i) protect(i, 0, PAGES, access);
}

/* size bytes that begin (side 0) or end (side 1) where access does. */
static unsigned char *flush_with(int r, int side, size_t size) { return room[r] + (side ? PAGES * page - size : 0); }

/* Fills what lies on the free side of them, or tells whether it was changed. */
static void set_margin(int r, int side, size_t size) {
    memset(side ? flush_with(r, 1, size) - MARGIN : room[r] + size, CANARY, MARGIN);
}

static int margin_changed(int r, int side, size_t size) {
    const unsigned char *p = side ? flush_with(r, 1, size) - MARGIN : room[r] + size;
    int i;
    for (i = 0; i < MARGIN && p[i] == CANARY; ++i) {
    }
    return i < MARGIN;
}

/* ---- A call that may not fault ---------------------------------------------------------------------------------- */

static sigjmp_buf jump;
static volatile sig_atomic_t expected;

static void on_fault(int number) {
    if (expected) siglongjmp(jump, 1);
    signal(number, SIG_DFL); /* the same again, and the end */
}

static int faults(void (*call)(void)) {
    int fault = sigsetjmp(jump, 0);
    expected = !fault;
    if (!fault) call();
    expected = 0;
    return fault;
}

/* What the calls work on. */
static kopt_optimizer opt;
static kopt_tensor t;
static kopt_step step;
static kopt_result result;
static size_t range_begin, range_end;
static struct {
    void *dst;
    const void *src;
    kopt_format to, from;
    size_t n;
} bulk;
static kopt_slot stream;
static float *floats;
static kopt_norm norm;

static void run_step(void) { result = kopt_step_run(&step, &t, 1); }
static void run_range(void) { result = kopt_step_range(&step, &t, 1, range_begin, range_end); }
static void run_convert(void) { result = kopt_convert(bulk.dst, bulk.to, bulk.src, bulk.from, bulk.n); }
static void run_stochastic(void) {
    result = kopt_convert_stochastic(bulk.dst, bulk.to, bulk.src, bulk.from, bulk.n,
                                     (kopt_random_key){7, 3, 1, bulk.n % 50});
}
static void run_all_finite(void) { result = kopt_all_finite(bulk.src, bulk.from, bulk.n) ? KOPT_OK : KOPT_ERROR_RANGE; }
static void run_init(void) { result = kopt_state_init(&opt, &t, 1, floats); }
static void run_read(void) { result = kopt_state_read(&opt, &t, stream, floats); }
static void run_write(void) { result = kopt_state_write(&opt, &t, stream, floats); }
static unsigned char image[PAGES * 4096 * 2]; /* a checkpoint */
static void run_save(void) { result = kopt_save(&opt, &t, 1, image, sizeof image); }
static void run_load(void) { result = kopt_load(&opt, &t, 1, image, sizeof image); }
static void run_norm(void) { result = kopt_norm_add(&norm, bulk.src, bulk.from, bulk.n); }
static void run_clip(void) { result = kopt_clip_value(bulk.dst, bulk.to, bulk.n, 0.25); }
static void run_measure(void) { result = kopt_norm_add_stable(&norm, &step, &t, range_begin, range_end); }
static void run_list(void) { result = kopt_optimizer_step(&opt, &t, 1); }

/* ---- Cases ------------------------------------------------------------------------------------------------------ */

static uint32_t noise_state = 1;
static uint32_t below(uint32_t n) { return scaled_to(lcg32(&noise_state), n); }

enum { IN_WEIGHT, IN_COPY, IN_GRAD, IN_RESIDUAL, IN_MOMENT, IN_SCALE = IN_MOMENT + 4, IN_SLOW = IN_SCALE + 4 };
enum { IN_SLOW_RESIDUAL = IN_SLOW + 1, ARRAYS };
static const char *const array_name[ARRAYS] = {"weight",       "copy",          "gradient",     "residual",
                                               "first moment", "second moment", "third moment", "fourth moment",
                                               "first scales", "second scales", "third scales", "fourth scales",
                                               "slow weight",  "slow residual"};
static int complaints;

static void complain(const char *what, int fault) {
    if (complaints++ < 20)
        note("%s: %s, %s: rule %d, weights %d, rounding %d, moments %d and %d%s, gradient %d, copy %d, n %lu, [%lu, "
             "%lu)",
             kopt_isa_name(kopt_isa_current()), what, fault ? "FAULT" : kopt_result_string(result), (int)opt.rule,
             (int)t.weight_format, (int)opt.rounding, (int)opt.first_moment_format, (int)opt.second_moment_format,
             t.arrays ? " in arrays" : "", (int)t.grad_format, t.copy ? (int)t.copy_format : -1, (unsigned long)t.n,
             (unsigned long)range_begin, (unsigned long)range_end);
}

enum { RULES = 11, KINDS = RULES * 5 * 3 * 4 * 3 * 4 };
static int with_copy, with_arrays;
static kopt_state_arrays arrays;

/* The arrays of a state, in the order of kopt_state_arrays; their bytes, 0 if the options need none. */
static void **array_of(int i) {
    return i == 0   ? &arrays.residual
           : i < 5  ? &arrays.moment[i - 1]
           : i < 9  ? &arrays.scale[i - 5]
           : i == 9 ? &arrays.slow
                    : &arrays.slow_residual;
}

static size_t width_of(int i) {
    const ref_layout l = ref_layout_of(&opt, t.weight_format, t.n);
    if (i >= 5 && i < 9) return ref_coded(&opt) >> (i - 5) & 1 ? 1 : 0; /* for 64 elements */
    return i == 0 ? l.residual_width : i < 5 ? l.moment_width[i - 1] : i == 9 ? l.slow_width : l.slow_residual_width;
}

static size_t bytes_of(int i) { return width_of(i) * (i >= 5 && i < 9 ? (t.n + 63) / 64 : t.n); }

/* Kind number k of KINDS: rule, rounding, the three formats, copy. */
static void set_kind(int k) {
    const int rule = k % RULES;
    kopt_format weight;
    k /= RULES;
    opt = rule == 0               ? kopt_sgd(1e-3, 0)
          : rule == 1             ? kopt_sgd(1e-3, 0.9)
          : rule == 4             ? kopt_stable_adamw(1e-3)
          : rule == 5             ? kopt_lion(1e-3)
          : rule == 6             ? kopt_adan(1e-3)
          : rule == 7             ? kopt_radam(1e-3)
          : rule < 10 && rule > 7 ? kopt_ranger(1e-3)
          : rule == 10            ? kopt_ema(0.999)
                                  : kopt_adamw(1e-3);
    opt.amsgrad = rule == 3;
    opt.lookahead = rule == 8 ? 1 : 1000; /* the slow weights are written, or not */
    opt.rounding = (kopt_rounding)(k % 5), k /= 5;
    weight = (kopt_format)(k % 3), k /= 3;
    opt.first_moment_format = opt.second_moment_format = (kopt_format)(k % 4), k /= 4;
    if (below(2)) opt.second_moment_format = (kopt_format)below(4);
    opt.step = 4;
    t = kopt_tensor_of(NULL, weight, NULL, (kopt_format)(k % 3), 0, NULL, 0);
    t.copy_format = (kopt_format)(k / 3 % 3);
    t.first_index = below(300);
    with_copy = k / 3 < 3;
}

static size_t a_length(void) {
    static const size_t table[] = {127, 128, 129, 255, 256, 257, 259, 385};
    return below(2) ? 1 + below(80) : below(2) ? 80 + below(320) : table[below(8)];
}

/* Numbers from 2^-9 to 2^-1, now and then an infinity: vectors then hand a turn over to one lane. */
static void fill(void *array, kopt_format f, size_t n) {
    size_t i;
    for (i = 0; i < n; ++i) {
        uint32_t u = (118 + below(8)) << 23 | below(1u << 23) | below(2) << 31;
        ref_set(array, ref_width(f), i, ref_narrow(f, below(500) ? u : 0x7f800000));
    }
}

/* The arrays of one tensor, each flush with its side of its region. */
static void lay(size_t n, const int side[REGIONS], size_t size[REGIONS]) {
    int r;
    t.n = n, t.state_size = ref_layout_of(&opt, t.weight_format, n).size;
    size[WEIGHT] = n * ref_width(t.weight_format), size[GRAD] = n * ref_width(t.grad_format);
    size[STATE] = t.state_size, size[COPY] = n * ref_width(t.copy_format), size[FLOATS] = 4 * n;
    t.weight = flush_with(WEIGHT, side[WEIGHT], size[WEIGHT]);
    t.grad = flush_with(GRAD, side[GRAD], size[GRAD]);
    t.state = flush_with(STATE, side[STATE], size[STATE]), t.arrays = NULL;
    memset(&arrays, 0, sizeof arrays), arrays.size = sizeof arrays;
    for (r = 0; r < STATE_ARRAYS; ++r) {
        size[OWN + r] = with_arrays ? bytes_of(r) : 0;
        *array_of(r) = size[OWN + r] ? flush_with(OWN + r, side[OWN + r], size[OWN + r]) : room[OWN + r] - 1;
    }
    if (with_arrays) t.arrays = &arrays, t.state = NULL, t.state_size = size[STATE] = 0;
    t.copy = with_copy ? flush_with(COPY, side[COPY], size[COPY]) : NULL;
    for (r = 0; r < REGIONS; ++r) set_margin(r, side[r], size[r]);
    fill(t.weight, t.weight_format, n);
}

/* ---- Steps: no access outside any array; a gradient that is not set to zero is only read ------------------------- */

static void check_steps(kopt_isa isa, int quick) {
    int k, bad = 0, runs = 0;
    for (k = 0; k < KINDS; k += quick ? 19 : 2) {
        int turn, read_only = k / RULES % 4 != 0 || k % RULES == 10; /* the average of weights reads */
        if (read_only) protect(GRAD, 0, PAGES, PROT_READ | PROT_WRITE);
        for (turn = 0; turn < 3; ++turn, ++runs) {
            size_t size[REGIONS];
            int side[REGIONS], r, fault;
            for (r = 0; r < REGIONS; ++r) side[r] = (int)below(2);
            set_kind(k);
            opt.zero_grad = !read_only, with_arrays = turn == 2;
            lay(a_length(), side, size);
            fill(t.grad, t.grad_format, t.n);
            if (kopt_state_init(&opt, &t, 1, NULL) != KOPT_OK || kopt_step_begin(&step, &opt) != KOPT_OK) {
                result = KOPT_ERROR_STATE, complain("not ready", 0), ++bad;
                continue;
            }
            if (read_only) protect(GRAD, 0, PAGES, PROT_READ);
            fault = faults(run_step);
            if (read_only) protect(GRAD, 0, PAGES, PROT_READ | PROT_WRITE);
            for (r = 0; r < REGIONS; ++r) fault |= margin_changed(r, side[r], size[r]);
            if (fault || result != KOPT_OK) complain("step", fault), ++bad;
        }
    }
    ok(!bad, "%s: %d steps between pages without access: %d fail", kopt_isa_name(isa), runs, bad);
}

/* ---- Ranges: what lies outside is not even rewritten with the value that it has ---------------------------------- */

/* One range, with the page before its first element of an array, or after its last, read-only. */
static int range_faults(int array, int after) {
    const ref_layout l = ref_layout_of(&opt, t.weight_format, t.n);
    const size_t offset[STATE_ARRAYS] = {l.residual, l.moment[0], l.moment[1], l.moment[2], l.moment[3],    l.scale[0],
                                         l.scale[1], l.scale[2],  l.scale[3],  l.slow,      l.slow_residual};
    const int of_state = array >= IN_RESIDUAL, scale = array >= IN_SCALE && array < IN_SLOW;
    const int region = array == IN_WEIGHT ? WEIGHT
                       : array == IN_COPY ? COPY
                       : array == IN_GRAD ? GRAD
                       : with_arrays      ? OWN + array - IN_RESIDUAL
                                          : STATE;
    const size_t width = array == IN_WEIGHT ? ref_width(t.weight_format)
                         : array == IN_COPY ? ref_width(t.copy_format)
                         : array == IN_GRAD ? ref_width(t.grad_format)
                                            : width_of(array - IN_RESIDUAL);
    const size_t at = (after ? range_end : range_begin) / (scale ? 64 : 1) * width;
    const size_t edge = of_state && !with_arrays ? offset[array - IN_RESIDUAL] + at : at, shift = page - edge % page;
    const size_t first = (edge + shift) / page - (after ? 0 : 1);
    int fault, i;
    if (width == 0 || (scale && !with_arrays)) return 0; /* there is none, or it has others near */
    t.weight = room[WEIGHT], t.grad = room[GRAD], t.state = room[STATE], t.state_size = l.size, t.arrays = NULL;
    memset(&arrays, 0, sizeof arrays), arrays.size = sizeof arrays;
    for (i = 0; i < STATE_ARRAYS; ++i) *array_of(i) = room[OWN + i] + (region == OWN + i ? shift : 0);
    if (with_arrays) t.arrays = &arrays, t.state = NULL, t.state_size = 0;
    if (t.copy || array == IN_COPY) t.copy = room[COPY];
    if (region == WEIGHT) t.weight = room[WEIGHT] + shift;
    if (region == GRAD) t.grad = room[GRAD] + shift;
    if (region == STATE && !with_arrays) t.state = room[STATE] + shift;
    if (region == COPY) t.copy = room[COPY] + shift;
    if (kopt_state_init(&opt, &t, 1, NULL) != KOPT_OK || kopt_step_begin(&step, &opt) != KOPT_OK) return 1;
    protect(region, first, 1, PROT_READ);
    t.stable_scale = opt.stable ? 0.5f : 0;
    fault = faults(run_range);
    t.stable_scale = 0;
    protect(region, first, 1, PROT_READ | PROT_WRITE);
    if (fault || result != KOPT_OK) complain(array_name[array], fault);
    return fault || result != KOPT_OK;
}

static void check_ranges(kopt_isa isa, int quick) {
    int turn, bad = 0, runs = 0, r;
    for (r = 0; r < REGIONS; ++r) memset(room[r], 0x3c, PAGES * page); /* a small number in each format */
    for (turn = 0; turn < (quick ? 30 : 120); ++turn) {
        int array, after, hot = turn % 3 == 0; /* a third in kernels of their own: all in bf16, no copy */
        set_kind((int)below(KINDS));
        with_arrays = turn % 2;
        if (hot) t.weight_format = opt.first_moment_format = opt.second_moment_format = t.grad_format = KOPT_BF16;
        opt.zero_grad = opt.rule != KOPT_RULE_EMA;
        t.n = 4 * page + 77; /* so that only one array of a state block has its range near the page */
        for (array = 0; array < ARRAYS; ++array) {
            if (array == IN_COPY && hot) continue;
            for (after = 0; after < 2; ++after, ++runs) {
                size_t length = a_length();
                range_begin = 2 * page + 1 + below((uint32_t)page / 2);
                if (ref_coded(&opt)) /* whole blocks */
                    range_begin -= range_begin % 64, length += 63 - (length + 63) % 64;
                range_end = range_begin + length;
                bad += range_faults(array, after);
            }
        }
    }
    ok(!bad, "%s: %d ranges beside pages that can only be read: %d fail", kopt_isa_name(isa), runs, bad);
}

/* ---- Conversions and checks -------------------------------------------------------------------------------------- */

static void check_bulk(kopt_isa isa, int quick) {
    int k, bad = 0, runs = 0;
    for (k = 0; k < 9 * 5; ++k) {
        static void (*const calls[])(void) = {run_convert, run_stochastic, run_all_finite, run_norm, run_clip};
        kopt_format to = (kopt_format)(k % 3), from = (kopt_format)(k / 3 % 3);
        void (*call)(void) = calls[k / 9];
        size_t n;
        for (n = 1; n < 300; n += n < 70 && !quick ? 1 : 7) {
            int sides;
            for (sides = 0; sides < 4; ++sides, ++runs) {
                size_t to_size = n * ref_width(to), from_size = n * ref_width(from);
                unsigned char *src = flush_with(GRAD, sides & 1, from_size);
                int fault;
                bulk.dst = flush_with(WEIGHT, sides >> 1, to_size), bulk.src = src;
                bulk.to = to, bulk.from = from, bulk.n = n;
                memset(src, 0x3c, from_size), memset(bulk.dst, 0x3c, to_size);
                set_margin(WEIGHT, sides >> 1, to_size);
                protect(GRAD, 0, PAGES, PROT_READ);
                fault = faults(call);
                protect(GRAD, 0, PAGES, PROT_READ | PROT_WRITE);
                fault |= margin_changed(WEIGHT, sides >> 1, to_size);
                if (fault || result != KOPT_OK) complain("conversion or check", fault), ++bad;
            }
        }
    }
    ok(!bad,
       "%s: %d conversions, checks, norms, clippings between pages without access, the source only readable: %d "
       "fail",
       kopt_isa_name(isa), runs, bad);
}

/* ---- State ------------------------------------------------------------------------------------------------------- */

static int state_faults(const char *what, void (*call)(void), int read_only_a, int read_only_b) {
    int fault;
    if (read_only_a >= 0) protect_region(read_only_a, PROT_READ);
    if (read_only_b >= 0) protect_region(read_only_b, PROT_READ);
    fault = faults(call);
    if (read_only_a >= 0) protect_region(read_only_a, PROT_READ | PROT_WRITE);
    if (read_only_b >= 0) protect_region(read_only_b, PROT_READ | PROT_WRITE);
    if (fault || result != KOPT_OK) complain(what, fault);
    return fault || result != KOPT_OK;
}

static void check_state(int quick) {
    int k, bad = 0, runs = 0;
    for (k = 0; k < KINDS; k += quick ? 19 : 3) {
        size_t size[REGIONS];
        int side[REGIONS], r, moments;
        for (r = 0; r < REGIONS; ++r) side[r] = (int)below(2);
        set_kind(k);
        with_copy = 0, with_arrays = (int)below(2);
        lay(a_length(), side, size);
        floats = (float *)(void *)flush_with(FLOATS, side[FLOATS], size[FLOATS]);
        fill(floats, KOPT_F32, t.n);
        moments = ref_moments(&opt);
        bad += state_faults("init", run_init, FLOATS, -1);
        for (stream = KOPT_SLOT_WEIGHT; (int)stream <= moments; stream = (kopt_slot)(stream + 1)) {
            bad += state_faults("write", run_write, FLOATS, stream == KOPT_SLOT_WEIGHT ? -1 : WEIGHT);
            bad += state_faults("read", run_read, WEIGHT, STATE);
            runs += 2;
        }
        fill(t.grad, t.grad_format, t.n);
        if (opt.stable && kopt_step_begin(&step, &opt) == KOPT_OK) {
            range_begin = t.n / 3 / 64 * 64, range_end = t.n;
            bad += state_faults("measure", run_measure, GRAD, STATE);
        }
        bad += state_faults("save", run_save, WEIGHT, STATE);
        bad += state_faults("load", run_load, GRAD, FLOATS);
        for (r = 0; r < REGIONS; ++r) bad += margin_changed(r, side[r], size[r]);
        runs += 3;
    }
    ok(!bad, "%d calls of init, read, write, save and load, only their targets writable: %d fail", runs, bad);
}

/* ---- Refusals: all memory is read-only, so nothing can have been written, not even for a moment ------------------ */

static int refusals, refusals_bad;

static void refused(const char *what, void (*call)(void), kopt_result want) {
    int fault;
    protect_all(PROT_READ);
    fault = faults(call);
    protect_all(PROT_READ | PROT_WRITE);
    ++refusals;
    if (!fault && result == want) return;
    complain(what, fault), ++refusals_bad;
}

static void check_refusals(void) {
    const int side[REGIONS] = {1, 1, 1, 1, 1};
    size_t size[REGIONS];
    kopt_state_arrays good_arrays;
    kopt_tensor good;
    kopt_optimizer good_opt;
    size_t i;
    set_kind(2 + RULES * (KOPT_KAHAN + 5 * (KOPT_BF16 + 3 * (KOPT_BF16 + 4 * KOPT_BF16))));
    with_copy = with_arrays = 0, opt.second_moment_format = KOPT_BF16;
    lay(101, side, size);
    floats = (float *)(void *)flush_with(FLOATS, 1, size[FLOATS]);
    fill(t.grad, t.grad_format, t.n), fill(floats, KOPT_F32, t.n);
    kopt_state_init(&opt, &t, 1, floats);
    kopt_step_begin(&step, &opt);
    good = t, good_opt = opt, stream = KOPT_SLOT_FIRST_MOMENT;
#define REFUSED(change, call, want) (change, refused(#change ", " #call, call, want), t = good, opt = good_opt)
    REFUSED(t.n = 103, run_step, KOPT_ERROR_MISMATCH); /* what the block says comes before its size */
    REFUSED(t.n = 100, run_step, KOPT_ERROR_MISMATCH);
    REFUSED(t.id = 9, run_list, KOPT_ERROR_MISMATCH);
    REFUSED(t.state_size = 63, run_list, KOPT_ERROR_SIZE);
    REFUSED(t.grad = NULL, run_list, KOPT_ERROR_NULL);
    REFUSED(t.grad = t.weight, run_list, KOPT_ERROR_OVERLAP);
    REFUSED(t.copy = t.state, run_list, KOPT_ERROR_OVERLAP);
    REFUSED(t.grad_format = (kopt_format)3, run_list, KOPT_ERROR_OPTION);
    REFUSED(t.weight_format = (kopt_format)3, run_list, KOPT_ERROR_OPTION);
    REFUSED(t.weight_format = KOPT_FP16, run_list, KOPT_ERROR_MISMATCH);
    REFUSED(t.reserved32_ = 1, run_init, KOPT_ERROR_OPTION);
    REFUSED(t.reserved_[1] = 1, run_list, KOPT_ERROR_OPTION);
    REFUSED(opt.reserved_[6] = 1, run_init, KOPT_ERROR_OPTION);
    REFUSED(t.first_index = UINT64_C(1) << 63, run_list, KOPT_ERROR_BOUNDS);
    REFUSED(opt.lr = -1, run_list, KOPT_ERROR_RANGE);
    REFUSED(opt.lr = -1, run_init, KOPT_ERROR_RANGE);
    REFUSED(t.n = SIZE_MAX, run_init, KOPT_ERROR_BOUNDS);
    REFUSED(floats = t.weight, run_init, KOPT_ERROR_OVERLAP);
    REFUSED(opt.rounding = KOPT_EXACT, run_read, KOPT_ERROR_MISMATCH);
    REFUSED(floats = t.weight, run_write, KOPT_ERROR_OVERLAP);
    REFUSED(opt.first_moment_format = opt.second_moment_format = KOPT_F32, run_save, KOPT_ERROR_MISMATCH);
    REFUSED(t.id = 1, run_save, KOPT_ERROR_MISMATCH);
    REFUSED(memset(image, 0, sizeof image), run_load, KOPT_ERROR_STATE);
    REFUSED((range_begin = 3, range_end = 102), run_range, KOPT_ERROR_BOUNDS);
    REFUSED((range_begin = 3, range_end = 2), run_range, KOPT_ERROR_BOUNDS);
    bulk.dst = t.weight, bulk.src = (unsigned char *)t.weight + 1;
    bulk.to = KOPT_BF16, bulk.from = KOPT_F32, bulk.n = 9;
    REFUSED((void)0, run_convert, KOPT_ERROR_OVERLAP);
    REFUSED((void)0, run_stochastic, KOPT_ERROR_OVERLAP);
    run_save();
    for (i = 0; i < kopt_save_size(&opt, &t, 1); ++i) { /* damage is found before anything is written */
        image[i] ^= 0x10;
        protect_all(PROT_READ);
        refusals++, refusals_bad += faults(run_load) || result == KOPT_OK;
        protect_all(PROT_READ | PROT_WRITE);
        image[i] ^= 0x10;
    }
    with_arrays = 1, opt.second_moment_format = KOPT_Q8;
    lay(101, side, size);
    kopt_state_init(&opt, &t, 1, NULL);
    kopt_step_begin(&step, &opt);
    good = t, good_opt = opt, good_arrays = arrays;
#define REFUSED_ARRAYS(change, call, want) (REFUSED(change, call, want), arrays = good_arrays)
    REFUSED_ARRAYS(arrays.size--, run_step, KOPT_ERROR_SIZE);
    REFUSED_ARRAYS(arrays.size--, run_init, KOPT_ERROR_SIZE);
    REFUSED_ARRAYS((opt.rounding = KOPT_FEEDBACK, arrays.rates = NULL), run_list, KOPT_ERROR_NULL);
    REFUSED_ARRAYS(t.state = room[STATE], run_load, KOPT_ERROR_OPTION);
    REFUSED_ARRAYS(arrays.residual = NULL, run_list, KOPT_ERROR_NULL);
    REFUSED_ARRAYS(arrays.moment[0] = NULL, run_read, KOPT_ERROR_NULL);
    range_begin = 0, range_end = t.n;
    REFUSED_ARRAYS(arrays.scale[1] = NULL, run_range, KOPT_ERROR_NULL);
    REFUSED_ARRAYS(arrays.scale[1] = NULL, run_init, KOPT_ERROR_NULL);
    REFUSED_ARRAYS(arrays.moment[1] = t.weight, run_list, KOPT_ERROR_OVERLAP);
    REFUSED_ARRAYS(arrays.moment[1] = arrays.scale[1], run_save, KOPT_ERROR_OVERLAP);
    REFUSED_ARRAYS(floats = arrays.moment[0], run_write, KOPT_ERROR_OVERLAP);
    ok(!refusals_bad, "%d refusals in memory that can only be read: %d fail", refusals, refusals_bad);
}

/* NULL is no array: one at a low address does not overlap it, however large the tensor is. */
static void check_low_address(void) {
    enum { MANY = 1 << 20 };
    char *const low = (char *)(uintptr_t)MANY;
    kopt_counts *const counts = mmap(low, page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    kopt_bf16 *const weight = calloc(MANY, sizeof *weight);
    kopt_optimizer o = kopt_sgd(1, 0);
    kopt_tensor tensor = kopt_tensor_of(weight, KOPT_BF16, NULL, KOPT_BF16, MANY, NULL, 0);
    o.rounding = KOPT_NEAREST, tensor.counts = counts;
    if ((char *)counts != low || weight == NULL)
        skip("no memory at a low address");
    else
        ok(kopt_state_init(&o, &tensor, 1, NULL) == KOPT_OK, "counts at a low address, and no initial weights");
    if (counts != MAP_FAILED) munmap(counts, page);
    free(weight);
}

static volatile unsigned char *forbidden;
static void touch(void) { *forbidden = 1; }

int main(int count, char **arguments) {
    const int quick = count > 1 && !strcmp(arguments[1], "quick");
    struct sigaction action;
    int isa, r;
    memset(&action, 0, sizeof action);
    action.sa_handler = on_fault, action.sa_flags = SA_NODEFER;
    if (sigaction(SIGSEGV, &action, NULL) || sigaction(SIGBUS, &action, NULL) || !reserve()) {
        skip("no memory to guard");
        return done();
    }
    forbidden = room[WEIGHT] + PAGES * page, r = faults(touch);
    forbidden = room[WEIGHT] - 1, r += faults(touch);
    protect(GRAD, 3, 1, PROT_READ), forbidden = room[GRAD] + 3 * page, r += faults(touch);
    protect(GRAD, 3, 1, PROT_READ | PROT_WRITE), r += !faults(touch);
    ok(r == 4, "a write before, behind or to a page that can only be read is caught");
    check_low_address();
    FOR_EACH_ISA(isa) {
        check_steps((kopt_isa)isa, quick);
        check_ranges((kopt_isa)isa, quick);
        check_bulk((kopt_isa)isa, quick);
    }
    check_state(quick);
    check_refusals();
    return done();
}

#else
int main(void) {
    skip("no mmap on this system");
    return done();
}
#endif
