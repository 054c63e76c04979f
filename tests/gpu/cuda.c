/* cuda.c - kahan_opt_cuda.cuh gives the bits of kahan_opt.h, for every rule, format and rounding, over ragged lists of
   tensors at any alignment, with state blocks and with arrays of the caller; plans, options, statistics, graphs and
   refusals are tested as well. Linked with the object that nvcc made, and with NVIDIA's library for a GPU, or without
   one with tests/gpu/cuda_fake.c (then PTX_ON_CPU is defined, and faults of the runtime are tested, too). Or linked
   with the object of a C++ compiler (then PTX_DRIVER is defined, and the variable PTX_TEXTS names the file of its PTX).

   Arguments: how many lists (default 400), and "no-errors" to leave out the call that fails on purpose, which
   compute-sanitizer stops at without --report-api-errors no. */
#define _DEFAULT_SOURCE /* mmap() */
#define KAHAN_OPT_IMPLEMENTATION
#include "../../kahan_opt.h"
#include "../../kahan_opt_cuda.cuh"
#include <cuda_runtime_api.h>

#include "../unit/tap.h"
#include "../unit/inputs.h"
#include "../unit/reference.h"
#ifdef PTX_ON_CPU
#include "cuda_fake.h"
#include <sys/mman.h>
#endif

#include <stdlib.h>
#include <string.h>

static cudaStream_t stream; /* all work is here, and waits for no other stream */

/* Memory of exactly this size that CPU and GPU read and write at the same address. It is page-locked host memory: every
   GPU with 64-bit addresses maps it, compute-sanitizer knows its end, and the CPU may use it beside a kernel. Managed
   memory is none of these everywhere. */
static void *device_new(size_t size) {
    void *p = NULL;
    cudaError_t error = cudaHostAlloc(&p, size + !size, cudaHostAllocMapped);
    if (error != cudaSuccess) printf("Bail out! cudaHostAlloc: %s\n", cudaGetErrorString(error)), exit(1);
    return p;
}

static void device_free(void *p) { cudaFreeHost(p); }

/* The end of all launches so far. */
static void finish(void) {
    cudaError_t error = cudaStreamSynchronize(stream);
    if (error != cudaSuccess) printf("Bail out! on the GPU: %s\n", cudaGetErrorString(error)), exit(1);
}

static kopt_result made(kopt_result result) {
    finish();
    return result;
}

static uint64_t noise_state = 1;
static uint32_t noise(void) { return upper64(&noise_state); }
static uint32_t below(uint32_t n) { return scaled_to(noise(), n); }

/* A number of format f: one in `rare` of any bits, the others with magnitudes from 2^low on. */
static uint32_t draw(kopt_format f, int low, int high, int positive, uint32_t rare) {
    uint32_t exponent = below((uint32_t)(high - low)), bits = noise(), sign = positive ? 0 : bits & 0x80000000u;
    if (below(rare) == 0) return f == KOPT_F32 ? (positive ? bits & 0x7fffffff : bits) : bits >> (positive ? 17 : 16);
    if (f == KOPT_FP16)
        return sign >> 16 | (uint32_t)(15 + (low < -14 ? -14 : low) + (int)exponent % 14) << 10 | (bits & 0x3ff);
    bits = sign | (uint32_t)(127 + low + (int)exponent) << 23 | (bits & 0x7fffff);
    return f == KOPT_F32 ? bits : bits >> 16;
}

static size_t width(kopt_format f) { return f == KOPT_F32 ? 4 : 2; }

static void fill(unsigned char *p, kopt_format f, size_t n, int low, int high, int positive, uint32_t rare) {
    for (; n; --n, p += width(f)) {
        uint32_t u = draw(f, low, high, positive, rare);
        uint16_t h = (uint16_t)u;
        if (f == KOPT_F32)
            memcpy(p, &u, 4);
        else
            memcpy(p, &h, 2);
    }
}

/* ---- Lists of tensors, twice: for the CPU and for the kernels ---------------------------------------------------- */

enum { GROUPS = 4, TENSORS = 40, STATE = 4, ARRAYS = STATE + 12 }; /* weight, grad, state, copy; a state in arrays */
typedef struct list {
    kopt_optimizer opt[GROUPS];
    kopt_tensor tensors[2][GROUPS][TENSORS];
    kopt_state_arrays own[2][GROUPS][TENSORS];
    kopt_cuda_group groups[GROUPS];
    size_t group_count, counts[GROUPS];
    void *blocks[2][GROUPS][TENSORS][ARRAYS],
        *base[GROUPS][TENSORS][ARRAYS]; /* base: what the device memory is freed by */
    size_t sizes[GROUPS][TENSORS][ARRAYS];
    kopt_cuda_plan plan;
    void *bytes, *device;
} list;

#ifdef KAHAN_OPT_VMATH
enum { VARIETY = 19 };
#else
enum { VARIETY = 16 };
#endif

/* The address of array a of a tensor, whose state, if it is in arrays, is in those of *own. */
static void **address(kopt_tensor *t, kopt_state_arrays *own, int a) {
    switch (a) {
    case 0: return &t->weight;
    case 1: return &t->grad;
    case 2: return &t->state;
    case 3: return &t->copy;
    case STATE: return &own->residual;
    case STATE + 1: return &own->slow;
    case STATE + 2: return &own->slow_residual;
    case STATE + 11: return &own->rates;
    default: return a < STATE + 7 ? &own->moment[a - STATE - 3] : &own->scale[a - STATE - 7];
    }
}

/* The bytes of such an array of a state. */
static size_t bytes_of(const kopt_optimizer *o, kopt_format weights, size_t n, int a) {
    const ref_layout l = ref_layout_of(o, weights, n);
    switch (a) {
    case STATE: return n * l.residual_width;
    case STATE + 1: return n * l.slow_width;
    case STATE + 2: return n * l.slow_residual_width;
    case STATE + 11: return o->rounding == KOPT_FEEDBACK && weights != KOPT_F32 && n > 0 ? 16 : 0;
    default:
        if (a < STATE + 7) return n * l.moment_width[a - STATE - 3];
        return (ref_coded(o) >> (a - STATE - 7) & 1) * ((n + 63) / 64);
    }
}

static int coded; /* all have 8-bit moments */

/* May this optimizer have KOPT_FEEDBACK? */
static int pays_back(const kopt_optimizer *o) {
    const int rule = o->rule == KOPT_RULE_SGD
                         ? o->momentum > 0
                         : o->rule == KOPT_RULE_ADAM || o->rule == KOPT_RULE_RADAM || o->rule == KOPT_RULE_ADAN;
    if (o->first_moment_format == KOPT_FP16) return 0;
    return rule && (o->first_moment_format == KOPT_F32 || o->moment_rounding == KOPT_STOCHASTIC);
}

static kopt_optimizer any_optimizer(kopt_format *weights) {
    kopt_optimizer o;
    switch (coded && below(2) ? 8 : below(VARIETY)) { /* the moment of SGD is as large as gradients are */
#ifdef KAHAN_OPT_VMATH
    case 16:
    case 17:
        o = kopt_adam_atan2(0.01), o.atan2_outside = (int)below(2);
        o.atan2_a = below(2) ? 1.27 : 1, o.atan2_b = below(2) ? 1 : 0.5;
        break;
    case 18: /* gradients from 2^-14 to 1: both forms of tanh */
        o = kopt_smooth_lion(0.01, below(2) ? 100 : 1e-3);
        break;
#endif
    case 0: o = kopt_lion(0.01); break;
    case 1: o = kopt_adan(0.01); break;
    case 2: o = kopt_radam(0.01); break;
    case 3: o = kopt_ranger(0.02), o.lookahead = 1 + (int)below(3); break;
    case 4: o = kopt_adam(0.02), o.amsgrad = 1; break;
    case 5: o = kopt_ema(0.9); break;
    case 6: o = kopt_adam(0.02); break;
    case 7: o = kopt_sgd(0.05, 0); break;
    case 8:
    case 9: o = kopt_sgd(0.05, 0.9); break;
    case 10:
    case 11: o = kopt_stable_adamw(0.01), o.amsgrad = !below(4); break;
    default: o = kopt_adamw(0.01);
    }
    *weights = (kopt_format)below(3);
    o.first_moment_format = o.second_moment_format = (kopt_format)below(3);
    if (below(2)) o.first_moment_format = o.second_moment_format = *weights;
    if (coded || !below(3)) {
        o.first_moment_format = o.second_moment_format = KOPT_Q8;
        if (below(2)) *weights = KOPT_BF16;
    }
    if (!below(3)) o.second_moment_format = (kopt_format)below(4);
    o.rounding = (kopt_rounding)below(6);
    o.moment_rounding = below(3) ? KOPT_STOCHASTIC : KOPT_NEAREST;
    o.residual_rounding = below(3) ? o.moment_rounding : KOPT_NEAREST;
    if (o.rounding == KOPT_FEEDBACK && !pays_back(&o)) o.rounding = KOPT_STOCHASTIC;
    o.decay_mode = (kopt_decay_mode)below(3);
    o.grad_scale = below(2) ? 1 : 0.25;
    if (o.rule != KOPT_RULE_EMA) {
        if (coded && below(2)) o.lr = 1e-38; /* then large moments leave weights ordinary */
        o.weight_decay = below(2) ? 0 : 0.1;
        o.nesterov = o.rule == KOPT_RULE_SGD && o.momentum > 0 && below(2);
        o.maximize = (int)below(2);
        o.zero_grad = !below(4);
        o.moments_only = !below(8);
    }
    o.seed = (uint64_t)noise() << 32 | noise();
    o.step = below(2) ? 0 : below(100000);
    return o;
}

/* An array of exactly `size` bytes, `shift` bytes from an aligned address. */
static unsigned char *array(list *l, size_t g, size_t i, int a, int side, size_t size, size_t shift) {
    unsigned char *p = side ? device_new(size + shift) : malloc(size + shift + (size + shift == 0));
    l->blocks[side][g][i][a] = p;
    if (side) l->base[g][i][a] = p;
    l->sizes[g][i][a] = size + shift;
    memset(p, 0x5a, size + shift);
    return p + shift;
}

static void make(list *l, size_t groups, size_t tensors, size_t longest, uint32_t rare) {
    size_t g, i, size;
    memset(l, 0, sizeof *l);
    l->group_count = groups;
    for (g = 0; g < groups; ++g) {
        kopt_optimizer *o = &l->opt[g];
        kopt_format most; /* of its weights; some are others */
        *o = any_optimizer(&most);
        l->counts[g] = tensors;
        for (i = 0; i < tensors; ++i) {
            const kopt_format weights = below(8) ? most : (kopt_format)below(3);
            kopt_tensor t = kopt_tensor_of(NULL, weights, NULL, below(3) ? weights : (kopt_format)below(3), 0, NULL, 0);
            size_t unit = below(3) ? 8 : 1, shift[ARRAYS];
            const int own = !below(4); /* its state is in arrays */
            int side, a;
            t.n = below(20) ? below((uint32_t)longest) / unit * unit : 0;
            t.id = (uint32_t)i << 20 | noise() >> 12; /* they increase */
            t.rate_scale = below(3) ? below(2) ? 1 : 0 : 0.5f;
            t.first_index = below(2) ? 0 : ((uint64_t)noise() << below(30)) / unit * unit;
            t.copy_format = (kopt_format)below(3);
            t.no_decay = !below(4);
            t.state_size = kopt_state_size(o, &t);
            for (a = 0; a < ARRAYS; ++a) shift[a] = below(3) ? 0 : below(4) ? 2 * below(8) : below(16);
            if (!below(4)) /* all alike, as in a shard of a buffer */
                for (a = 1; a < ARRAYS; ++a) shift[a] = shift[0];
            for (side = 0; side < 2; ++side) {
                kopt_tensor *u = &l->tensors[side][g][i];
                uint64_t saved = noise_state;
                *u = t;
                u->weight = array(l, g, i, 0, side, t.n * width(weights), shift[0]);
                u->grad = array(l, g, i, 1, side, t.n * width(t.grad_format), shift[1]);
                if (own)
                    u->arrays = &l->own[side][g][i], l->own[side][g][i].size = sizeof l->own[side][g][i];
                else
                    u->state = array(l, g, i, 2, side, t.state_size, shift[2]);
                for (a = STATE; own && a < ARRAYS; ++a)
                    if ((size = bytes_of(o, weights, t.n, a)) != 0)
                        *address(u, &l->own[side][g][i], a) = array(l, g, i, a, side, size, shift[a]);
                u->copy = t.id % 3 ? NULL : array(l, g, i, 3, side, t.n * width(t.copy_format), shift[3]);
                if (kopt_state_init(o, u, 1, NULL) != KOPT_OK) abort();
                fill(u->weight, weights, t.n, -8, 1, 0, rare);
                fill(u->grad, t.grad_format, t.n, -14, 0, 0, rare);
                noise_state = saved;
            }
        }
        l->groups[g].opt = o;
        l->groups[g].tensors = l->tensors[1][g];
        l->groups[g].count = tensors;
    }
    size = kopt_cuda_plan_size(l->groups, groups);
    l->bytes = malloc(size);
    l->device = device_new(size);
    if (kopt_cuda_plan_build(&l->plan, l->bytes, size, l->groups, groups) != KOPT_OK) abort();
    if (made(kopt_cuda_plan_upload(&l->plan, l->device, stream)) != KOPT_OK) abort();
}

/* Equal, where every NaN is equal to every other: nothing is promised of payloads in copies and conversions. */
static int same(const unsigned char *a, const unsigned char *b, kopt_format f, size_t n) {
    const uint32_t infinity = f == KOPT_F32 ? 0x7f800000 : f == KOPT_BF16 ? 0x7f80 : 0x7c00;
    const uint32_t magnitude = f == KOPT_F32 ? 0x7fffffff : 0x7fff;
    for (; n; --n, a += width(f), b += width(f)) {
        uint32_t u = 0, v = 0;
        memcpy(&u, a, width(f)), memcpy(&v, b, width(f));
        if (u != v && !((u & magnitude) > infinity && (v & magnitude) > infinity)) return 0;
    }
    return 1;
}

static void new_gradients(list *l, uint32_t rare) {
    size_t g, i;
    for (g = 0; g < l->group_count; ++g)
        for (i = 0; i < l->counts[g]; ++i) {
            kopt_tensor *t = l->tensors[0][g], *u = l->tensors[1][g];
            fill(t[i].grad, t[i].grad_format, t[i].n, -14, 0, 0, rare);
            memcpy(u[i].grad, t[i].grad, t[i].n * width(t[i].grad_format));
        }
}

/* Arrays (with the bytes before them) that differ between the two sides. */
static int differences(const list *l, int say) {
    size_t g, i;
    int a, found = 0;
    for (g = 0; g < l->group_count; ++g)
        for (i = 0; i < l->counts[g]; ++i)
            for (a = 0; a < ARRAYS; ++a) {
                void *const *p = &l->blocks[0][g][i][a], *const *q = &l->blocks[1][g][i][a];
                const kopt_tensor *t = &l->tensors[0][g][i];
                if (*p == NULL || memcmp(*p, *q, l->sizes[g][i][a]) == 0) continue;
                if (a == 3 && same(t->copy, l->tensors[1][g][i].copy, t->copy_format, t->n)) continue;
                if (say && found < 5)
                    note("array %d of tensor %d: rule %d, weights %d, gradients %d, moments %d and %d, rounding %d", a,
                         (int)i, l->opt[g].rule, t->weight_format, t->grad_format, l->opt[g].first_moment_format,
                         l->opt[g].second_moment_format, l->opt[g].rounding);
                ++found;
            }
    return found;
}

static void discard(list *l) {
    size_t g, i;
    int a;
    for (g = 0; g < l->group_count; ++g)
        for (i = 0; i < l->counts[g]; ++i)
            for (a = 0; a < ARRAYS; ++a) {
                free(l->blocks[0][g][i][a]);
                if (l->base[g][i][a]) device_free(l->base[g][i][a]);
            }
    free(l->bytes), device_free(l->device);
}

static void cpu_step(list *l) {
    size_t g;
    for (g = 0; g < l->group_count; ++g)
        if (kopt_optimizer_step(&l->opt[g], l->tensors[0][g], l->counts[g]) != KOPT_OK) abort();
}

static int used[KOPT_CUDA_KERNELS_];

static int use(const kopt_cuda_plan *plan) { /* how many kernels does a plan use that no other did before? */
    int kernel, fresh = 0;
    for (kernel = 0; kernel < KOPT_CUDA_KERNELS_; ++kernel)
        if (plan->first_[kernel + 1] > plan->first_[kernel]) fresh += used[kernel]++ == 0;
    return fresh;
}

enum { MIXES = 24 }; /* two formats of moments, with and without StableAdamW */
static int mixes[2][4][4];

static int mix(const list *l) { /* the same with mixes */
    size_t g;
    int fresh = 0;
    for (g = 0; g < l->group_count; ++g) {
        const kopt_optimizer *const o = &l->opt[g];
        if (ref_moments(o) < 2 || o->first_moment_format == o->second_moment_format) continue;
        fresh += mixes[o->rule == KOPT_RULE_ADAM && o->stable][o->first_moment_format][o->second_moment_format]++ == 0;
    }
    return fresh;
}

static int three_steps(list *l, uint32_t rare) {
    int step, bad = 0;
    for (step = 0; step < 3; ++step) {
        l->plan.blocks = below(3);
        cpu_step(l);
        bad += made(kopt_cuda_plan_step(&l->plan, stream)) != KOPT_OK || differences(l, 1) != 0;
        new_gradients(l, rare);
    }
    bad += kopt_cuda_plan_status(&l->plan)->steps != 3 || kopt_cuda_plan_status(&l->plan)->result != KOPT_OK;
    return bad;
}

static void steps_equal(int lists) {
    static list l;
    int bad = 0, k, kernels = 0, mixed = 0, more = 0;
    for (k = 0; k < lists; ++k) {
        const uint32_t rare = k % 3 ? 200 : 5;
        make(&l, 1 + below(GROUPS), 1 + below(12), k % 10 ? 600 : 4000, rare);
        kernels += use(&l.plan), mixed += mix(&l);
        bad += three_steps(&l, rare);
        discard(&l);
    }
    ok(bad == 0, "%d ragged lists of tensors, three steps, any number of blocks: %d differ from the CPU", lists, bad);
    for (bad = k = 0; k < 100000 && kernels + mixed < KOPT_CUDA_KERNELS_ + MIXES; ++k) { /* the others */
        int fresh, fresh_mix;
        make(&l, 1, 3, 600, 200);
        fresh = use(&l.plan), fresh_mix = mix(&l);
        if (fresh + fresh_mix) bad += three_steps(&l, 200), kernels += fresh, mixed += fresh_mix, ++more;
        discard(&l);
    }
    ok(bad == 0 && kernels == KOPT_CUDA_KERNELS_ && mixed == MIXES,
       "%d of %d kernels ran, and %d of %d mixes of moments, with %d more lists", kernels, KOPT_CUDA_KERNELS_, mixed,
       MIXES, more);
}

/* Before each step, arrays move: the gradients, or all arrays, to any alignment. */
static void moves(int lists) {
    static list l;
    static unsigned char copy[40000];
    int bad = 0, k, step;
    for (k = 0; k < lists; ++k) {
        make(&l, 1 + below(GROUPS), 1 + below(k % 8 ? 12 : TENSORS), 600, 200);
        for (step = 0; step < 3; ++step) {
            size_t g, i, first = 0;
            cpu_step(&l);
            for (g = 0; g < l.group_count; first += l.counts[g], ++g) {
                for (i = 0; i < l.counts[g]; ++i) {
                    int a;
                    for (a = 0; a < ARRAYS; ++a) {
                        unsigned char *const old = l.blocks[1][g][i][a], *fresh;
                        void **const at = address(&l.tensors[1][g][i], &l.own[1][g][i], a);
                        const size_t shift = old ? (size_t)((unsigned char *)*at - old) : 0, size = l.sizes[g][i][a];
                        if (!old || (k % 2 && a != 1)) continue;
                        memcpy(copy, old, size); /* the margins move, too */
                        memset(old, 0xee, size), device_free(l.base[g][i][a]);
                        l.base[g][i][a] = device_new(size + 16);
                        fresh = (unsigned char *)l.base[g][i][a] + (below(2) ? 0 : below(17));
                        memcpy(fresh, copy, size);
                        l.blocks[1][g][i][a] = fresh, *at = fresh + shift;
                    }
                }
                bad += kopt_cuda_plan_set_arrays(&l.plan, first, l.counts[g], l.tensors[1][g], stream) != KOPT_OK;
            }
            bad += made(kopt_cuda_plan_step(&l.plan, stream)) != KOPT_OK || differences(&l, 1) != 0;
            new_gradients(&l, 200);
        }
        discard(&l);
    }
    ok(bad == 0, "%d lists whose arrays move before each step: %d differ from the CPU", lists, bad);
}

/* Gradients of bf16 and fp32, in blocks of 64 with scales of their own: from subnormal to beyond the largest scale. */
static void extreme_gradients(list *l) {
    enum { ZEROS, USUAL, OUTLIER, SUBNORMAL, SMALL, SMALLEST, LARGE, LARGER, LARGEST, KINDS };
    static const int low[KINDS] = {-14, -14, -14, -126, -126, -126, 100, 126, 127};
    size_t g, i, k, q;
    for (g = 0; g < l->group_count; ++g)
        for (i = 0; i < l->counts[g]; ++i) {
            const kopt_tensor *const t = &l->tensors[0][g][i];
            const size_t size = width(t->grad_format);
            for (k = 0; k < t->n && t->grad_format != KOPT_FP16; k += 64) {
                const size_t n = t->n - k < 64 ? t->n - k : 64;
                const uint32_t kind = below(KINDS);
                unsigned char *const p = (unsigned char *)t->grad + k * size;
                fill(p, t->grad_format, n, low[kind], low[kind] + (kind == SMALL ? 26 : 1), 0, 1000);
                if (kind == ZEROS) memset(p, 0, n * size);
                if (kind == OUTLIER) fill(p + below((uint32_t)n) * size, t->grad_format, 1, 8, 20, 0, 1000);
                for (q = 1; kind == SUBNORMAL && q <= n; ++q) p[q * size - 1] &= 0x80, p[q * size - 2] &= 0x7f;
            }
            memcpy(l->tensors[1][g][i].grad, t->grad, t->n * size);
        }
}

static void extremes(int lists) {
    static list l;
    int bad = 0, k, step;
    coded = 1;
    for (k = 0; k < lists; ++k) {
        make(&l, 1, 8, 600, 200);
        for (step = 0; step < 3; ++step) {
            extreme_gradients(&l);
            cpu_step(&l);
            bad += made(kopt_cuda_plan_step(&l.plan, stream)) != KOPT_OK || differences(&l, 1) != 0;
        }
        discard(&l);
    }
    coded = 0;
    ok(bad == 0, "%d lists with 8-bit moments of any size: %d steps differ from the CPU", lists, bad);
}

static void shards_equal(const char *name, kopt_format moments, const size_t cuts[11], uint64_t first_index) {
    enum { N = 5000 };
    static uint16_t whole[N];
    static unsigned char state[KOPT_STATE_BYTES(N, 6)];
    uint16_t *part = device_new(sizeof whole), *grad = device_new(sizeof whole);
    unsigned char *states = device_new(10 * sizeof state);
    kopt_optimizer o = kopt_adamw(0.01);
    kopt_tensor t, shards[10];
    kopt_cuda_group group = {NULL, NULL, 10};
    kopt_cuda_plan plan;
    unsigned char *bytes;
    size_t i, size, bad = 0;
    for (i = 0; i < N; ++i) {
        whole[i] = part[i] = (uint16_t)draw(KOPT_BF16, -6, 0, 0, 1000);
        grad[i] = (uint16_t)draw(KOPT_BF16, -6, 0, 0, 1000);
    }
    t = kopt_tensor_of(whole, KOPT_BF16, grad, KOPT_BF16, N, state, sizeof state);
    t.first_index = first_index;
    o.first_moment_format = o.second_moment_format = moments;
    kopt_state_init(&o, &t, 1, NULL);
    for (i = 0; i < 10; ++i) {
        shards[i] = kopt_tensor_of(part + cuts[i], KOPT_BF16, grad + cuts[i], KOPT_BF16, cuts[i + 1] - cuts[i],
                                   states + i * sizeof state, sizeof state);
        shards[i].first_index = first_index + cuts[i];
        kopt_state_init(&o, &shards[i], 1, NULL);
    }
    group.opt = &o, group.tensors = shards;
    size = kopt_cuda_plan_size(&group, 1);
    bytes = device_new(2 * size); /* of the host and of the GPU */
    bad += kopt_cuda_plan_build(&plan, bytes, size, &group, 1) != KOPT_OK;
    bad += kopt_cuda_plan_upload(&plan, bytes + size, stream) != KOPT_OK;
    for (i = 0; i < 5; ++i) {
        bad += made(kopt_cuda_plan_step(&plan, stream)) != KOPT_OK;
        bad += kopt_optimizer_step(&o, &t, 1) != KOPT_OK;
        bad += memcmp(whole, part, sizeof whole) != 0;
    }
    device_free(bytes), device_free(part), device_free(grad), device_free(states);
    ok(bad == 0, "ten shards, each with its own state, equal the whole: %s", name);
}

/* ---- Statistics (the norm itself is tested with the training-loop tools) ---------------------------------------- */

static void statistics(int lists) {
    static list l;
    int k, bad = 0, infinite = 0, halves = 0; /* some that are not finite, among those of one 16-bit format */
    for (k = 0; k < lists || !halves; ++k) {
        kopt_norm norm;
        size_t g, i;
        memset(&norm, 0, sizeof norm);
        make(&l, k % 8 ? 1 + below(3) : 1, k % 8 ? 1 + below(6) : 1, 1500, k % 4 == 0 ? 5 : 1u << 31);
        for (g = 0; g < l.group_count; ++g)
            for (i = 0; i < l.counts[g]; ++i) {
                const kopt_tensor *t = &l.tensors[1][g][i];
                if (k % 8 == 1) fill(t->grad, t->grad_format, t->n, -126, 127, 0, 1u << 31);
                if (k % 8 == 2) memset(t->grad, 0x11, t->n * width(t->grad_format)); /* all in one bin */
            }
        for (g = 0; g < l.group_count; ++g) kopt_norm_add_grads(&norm, l.tensors[1][g], l.counts[g]);
        infinite += norm.nonfinite != 0;
        halves += norm.nonfinite > 9 && k % 8 == 0 && l.tensors[1][0][0].grad_format != KOPT_F32;
        l.plan.blocks = below(4);
        bad += made(kopt_cuda_plan_measure(&l.plan, stream)) != KOPT_OK ||
               memcmp(&norm, kopt_cuda_plan_norm(&l.plan, NULL), sizeof norm) != 0;
        discard(&l);
    }
    ok(bad == 0 && infinite > 0,
       "the norm is that of kopt_norm_add, word for word, in any number of blocks (%d with values that are not finite)",
       infinite);
}

/* A tensor of 2^22 elements without memory, which makes all tasks of a plan 1,024 wide. Its tasks, the last ones of the
   last kernel, must be cut off. */
static kopt_tensor wide_tensor(kopt_optimizer *o, kopt_format grads) {
    *o = kopt_adamw(0.01);
    o->first_moment_format = KOPT_F32;
    return kopt_tensor_of((void *)((uintptr_t)1 << 44), KOPT_BF16, (void *)((uintptr_t)2 << 44), grads, 1 << 22,
                          (void *)((uintptr_t)4 << 44), 1 << 30);
}

static void cut_off(kopt_cuda_plan *plan) { plan->first_[KOPT_CUDA_KERNELS_] -= (1u << 22) / plan->width_; }

/* The plan of a tensor, in memory that is returned; one thread block does all. */
static void *plan_of_one_block(kopt_cuda_plan *plan, const kopt_optimizer *o, const kopt_tensor *t, int wide) {
    kopt_optimizer other;
    const kopt_tensor more = wide_tensor(&other, t->grad_format);
    const kopt_cuda_group g[2] = {{o, t, 1}, {&other, &more, 1}};
    const size_t size = kopt_cuda_plan_size(g, 1 + (size_t)wide);
    unsigned char *const bytes = device_new(2 * size); /* of the host and of the GPU */
    if (kopt_cuda_plan_build(plan, bytes, size, g, 1 + (size_t)wide) != KOPT_OK) abort();
    if (kopt_cuda_plan_upload(plan, bytes + size, stream) != KOPT_OK) abort();
    if (wide) cut_off(plan);
    plan->blocks = 1;
    return bytes;
}

/* More than fits into one slot, which is read before: the largest significands, all in one bin, in whole blocks. */
static void full_slots(void) {
    enum { N = (1 << 22) + 5000 };
    static const uint32_t most[] = {0x41fffffe, 0x3fff3fff, 0x3bff3bff}; /* fp32: the last that a window holds */
    static const size_t numbers[] = {N / 3, N, N / 32};                  /* two such readings and more */
    kopt_optimizer o = kopt_sgd(0.1, 0);
    int f, bad = 0;
    o.rounding = KOPT_NEAREST;
    for (f = KOPT_F32; f <= KOPT_FP16; ++f) {
        const size_t n = numbers[f];
        uint16_t *const weight = device_new(2 * n);
        uint32_t *const grad = device_new(4 * n);
        kopt_tensor t = kopt_tensor_of(weight, KOPT_BF16, grad, (kopt_format)f, n, NULL, 0);
        kopt_cuda_plan plan;
        void *const bytes = plan_of_one_block(&plan, &o, &t, 1);
        kopt_norm norm;
        size_t i;
        memset(&norm, 0, sizeof norm), memset(weight, 0, 2 * n);
        for (i = 0; i < n; ++i) grad[i] = most[f];
        bad += made(kopt_cuda_plan_measure(&plan, stream)) != KOPT_OK || plan.width_ != (f ? 1024 : 512);
        kopt_norm_add(&norm, grad, (kopt_format)f, n);
        bad += memcmp(&norm, kopt_cuda_plan_norm(&plan, NULL), sizeof norm) != 0;
        device_free(weight), device_free(grad), device_free(bytes);
    }
    ok(bad == 0, "no counter overflows: %d elements with the largest significand in one block", N);
}

/* Gradients of fp32 or bf16 around the ends of what a lane adds in registers: blocks of 512 have exponents of their
   own. Some have few digits, some are as small as the last bits of others, 0, infinite or NaN. */
static void fill_windows(unsigned char *p, kopt_format f, size_t n) {
    size_t i;
    int top = 0, spread = 1;
    for (i = 0; i < n; ++i, p += width(f)) {
        static const uint32_t digits[] = {0x7fffff, 0x7ffffe, 0x7f0000, 0x400000, 0, 1};
        const uint32_t bits = noise(), kind = below(12);
        int exponent;
        uint32_t u;
        if (i % 512 == 0) top = (int)below(270) - 8, spread = 1 + (int)below(below(3) ? 24 : 60);
        exponent = top - (int)below((uint32_t)spread);
        if (below(3000) == 0) exponent = 255;
        exponent = exponent < 0 ? 0 : exponent > 255 ? 255 : exponent;
        if (exponent == 255 && below(20)) exponent = 254;
        u = (bits & 0x80000000u) | (uint32_t)exponent << 23 | (kind < 6 ? digits[kind] : bits & 0x7fffff);
        if (kind == 11) u &= 0x80000000u;
        if (f == KOPT_F32)
            memcpy(p, &u, 4);
        else
            memcpy(p, (uint16_t[]){(uint16_t)(u >> 16)}, 2);
    }
}

static void windows(int lists) {
    enum { N = 20000 };
    int k, bad = 0, infinite = 0;
    for (k = 0; k < lists; ++k) {
        kopt_optimizer o = kopt_sgd(0.1, 0);
        const size_t n = N + below(600), off = k % 4 == 3 ? 4 : 0; /* of octets, or of elements */
        float *const weight = device_new(4 * n);
        unsigned char *const grad = device_new(4 * n + 4);
        kopt_tensor t = kopt_tensor_of(weight, KOPT_F32, grad + off, KOPT_F32, n, NULL, 0);
        kopt_cuda_plan plan;
        void *const bytes = plan_of_one_block(&plan, &o, &t, 0);
        kopt_norm norm;
        memset(&norm, 0, sizeof norm), memset(weight, 0, 4 * n);
        fill_windows(grad + off, KOPT_F32, n);
        bad += made(kopt_cuda_plan_measure(&plan, stream)) != KOPT_OK;
        kopt_norm_add(&norm, grad + off, KOPT_F32, n);
        bad += memcmp(&norm, kopt_cuda_plan_norm(&plan, NULL), sizeof norm) != 0;
        infinite += norm.nonfinite != 0;
        device_free(weight), device_free(grad), device_free(bytes);
    }
    ok(bad == 0 && infinite > 0, "the norm of fp32 with windows that move, and with numbers outside: %d of %d differ",
       bad, lists);
}

/* The squares of StableAdamW's ratios, of any magnitude, are those of kopt_norm_add_stable(). */
static void ratios(int lists) {
    enum { N = 5000 };
    float *const v = malloc(N * sizeof *v);
    int k, bad = 0;
    for (k = 0; k < lists; ++k) {
        const kopt_format f = k & 1 ? KOPT_BF16 : KOPT_F32;
        uint16_t *const weight = device_new(2 * N);
        unsigned char *const grad = device_new(4 * N);
        kopt_optimizer o = kopt_stable_adamw(0.1), other;
        kopt_tensor t = kopt_tensor_of(weight, KOPT_BF16, grad, f, N, NULL, 0);
        kopt_norm norm, sum;
        kopt_cuda_plan plan;
        kopt_step step;
        size_t i;
        void *bytes;
        o.rounding = KOPT_NEAREST, o.step = 1000, o.beta2 = k & 2 ? 0.99999 : 0.999;
        o.first_moment_format = o.second_moment_format = f, other = o;
        t.state_size = kopt_state_size(&o, &t), t.state = device_new(t.state_size);
        memset(&norm, 0, sizeof norm), memset(&sum, 0, sizeof sum), memset(weight, 0, 2 * N);
        fill_windows(grad, f, N);
        for (i = 0; i < N; ++i) v[i] = kopt_as_f32_((127 + (i / 512 % 3 ? below(4) : below(100)) - 50) << 23);
        bad += kopt_state_init(&o, &t, 1, NULL) != KOPT_OK;
        bad += kopt_state_write(&o, &t, KOPT_SLOT_SECOND_MOMENT, v) != KOPT_OK;
        bytes = plan_of_one_block(&plan, &o, &t, 0);
        bad += kopt_step_begin(&step, &other) != KOPT_OK || kopt_norm_add_stable(&norm, &step, &t, 0, N) != KOPT_OK;
        bad += made(kopt_cuda_plan_step(&plan, stream)) != KOPT_OK;
        bad += kopt_norm_merge(&sum, (kopt_norm *)((unsigned char *)plan.device + plan.at_ratios_)) != KOPT_OK;
        bad += memcmp(&norm, &sum, sizeof norm) != 0;
        device_free(weight), device_free(grad), device_free(t.state), device_free(bytes);
    }
    ok(bad == 0, "the sums of StableAdamW are those of kopt_norm_add_stable(): %d of %d differ", bad, lists);
    free(v);
}

/* No counter overflows with the ratios of StableAdamW: all are 3.72, which is 3.984 / sqrt(0.99 + 0.01 * 3.984^2). */
static void full_ratios(void) {
    enum { N = (1 << 20) + 5000 };
    kopt_optimizer o[2];
    kopt_tensor t[2];
    kopt_cuda_plan plan;
    float *const v = malloc(N * sizeof *v);
    size_t i, side;
    void *bytes;
    int bad = 0;
    o[0] = kopt_stable_adamw(0.1);
    o[0].rounding = KOPT_NEAREST, o[0].step = 100000;
    o[1] = o[0];
    for (i = 0; i < N; ++i) v[i] = 1;
    for (side = 0; side < 2; ++side) {
        uint16_t *const weight = device_new(2 * N), *const grad = device_new(2 * N);
        size_t size;
        t[side] = kopt_tensor_of(weight, KOPT_BF16, grad, KOPT_BF16, N, NULL, 0);
        size = kopt_state_size(&o[0], &t[side]);
        t[side].state = device_new(size), t[side].state_size = size;
        memset(weight, 0, 2 * N);
        for (i = 0; i < N; ++i) grad[i] = 0x407F; /* 3.984 */
        bad += kopt_state_init(&o[0], &t[side], 1, NULL) != KOPT_OK;
        bad += kopt_state_write(&o[0], &t[side], KOPT_SLOT_SECOND_MOMENT, v) != KOPT_OK;
    }
    bytes = plan_of_one_block(&plan, &o[1], &t[1], 0);
    bad += made(kopt_cuda_plan_step(&plan, stream)) != KOPT_OK;
    bad += kopt_optimizer_step(&o[0], &t[0], 1) != KOPT_OK;
    bad += memcmp(t[0].weight, t[1].weight, 2 * N) != 0;
    ok(bad == 0, "no counter overflows: %d ratios of StableAdamW in one block", N);
    for (side = 0; side < 2; ++side)
        device_free(t[side].weight), device_free((void *)t[side].grad), device_free(t[side].state);
    device_free(bytes), free(v);
}

/* ---- Options, setters ------------------------------------------------------------------------------------------- */

static void options(void) {
    static list l;
    const kopt_cuda_options none = {0, 0, 0, NULL, NULL, NULL, {0, 0, 0, 0}};
    int k, bad = 0, clips = 0, skips = 0;
    for (k = 0; k < 60; ++k) {
        kopt_cuda_options options = none;
        float *const lr = device_new(3 * sizeof *lr), *const scale = lr + 1, *const found = lr + 2;
        const int before = skips;
        kopt_norm norm;
        size_t g, i;
        memset(&norm, 0, sizeof norm);
        *lr = 0.003f, *scale = 1024, *found = 0;
        make(&l, 2, 3, 700, 1u << 31);
        for (g = 0; g < 2; ++g) {
            kopt_norm_add_grads(&norm, l.tensors[0][g], 3);
            if (k & 1) options.lr = lr, l.opt[g].lr = (double)*lr;
            if (k & 2) options.loss_scale = scale, l.opt[g].grad_scale /= 1024;
        }
        if (k & 4) options.found_inf = found;
        if (k & 8) {
            options.max_norm = 0.01;
            for (g = 0; g < 2; ++g) {
                l.opt[g].clip = kopt_norm_clip(&norm, 0.01, l.opt[g].grad_scale);
                clips += l.opt[g].clip < 1;
            }
        }
        options.check_finite = (k & 16) != 0;
        bad += made(kopt_cuda_plan_set_options(&l.plan, &options, stream)) != KOPT_OK;
        if (k & 24) bad += made(kopt_cuda_plan_measure(&l.plan, stream)) != KOPT_OK;
        cpu_step(&l);
        bad += made(kopt_cuda_plan_step(&l.plan, stream)) != KOPT_OK || differences(&l, 1) != 0;
        if (k & 8) {
            const double value = kopt_norm_value(&norm);
            bad += memcmp(&kopt_cuda_plan_status(&l.plan)->norm, &value, sizeof value) != 0;
        }

        /* now steps that must change nothing: not even their number */
        if (k & 4) {
            *found = 1;
            bad += (k & 24 && made(kopt_cuda_plan_measure(&l.plan, stream)) != KOPT_OK) ||
                   made(kopt_cuda_plan_step(&l.plan, stream)) != KOPT_OK;
            bad += differences(&l, 1) != 0 || kopt_cuda_plan_status(&l.plan)->skipped != 1;
            *found = 0, ++skips;
        } else if (k & 24) {
            uint32_t *grad = NULL, kept, infinity = 0x7f800000, half;
            uint16_t kept16, infinity16;
            for (g = 0; g < 2; ++g)
                for (i = 0; i < 3; ++i)
                    if (l.tensors[1][g][i].n && !grad) {
                        kopt_tensor *t = &l.tensors[1][g][i];
                        grad = (void *)((unsigned char *)t->grad + below((uint32_t)t->n) * width(t->grad_format));
                        half = t->grad_format;
                    }
            if (grad) {
                infinity16 = half == KOPT_FP16 ? 0xfc00 : 0x7fc1; /* infinite, NaN */
                memcpy(&kept, grad, half ? 2 : 4), memcpy(&kept16, grad, 2);
                memcpy(grad, half ? (void *)&infinity16 : (void *)&infinity, half ? 2 : 4);
                bad += made(kopt_cuda_plan_measure(&l.plan, stream)) != KOPT_OK ||
                       made(kopt_cuda_plan_step(&l.plan, stream)) != KOPT_OK;
                memcpy(grad, half ? (void *)&kept16 : (void *)&kept, half ? 2 : 4);
                bad += differences(&l, 1) != 0 || kopt_cuda_plan_status(&l.plan)->skipped != 1, ++skips;
            }
            bad += made(kopt_cuda_plan_step(&l.plan, stream)) != KOPT_OK ||
                   differences(&l, 1) != 0; /* no new statistics: refused */
            bad += kopt_cuda_plan_status(&l.plan)->result != KOPT_ERROR_STEP, ++skips;
        }
        /* a schedule, and a step back in time */
        bad += made(kopt_cuda_plan_set_options(&l.plan, &none, stream)) != KOPT_OK;
        bad += made(kopt_cuda_plan_set_step(&l.plan, 41, stream)) != KOPT_OK;
        for (g = 0; g < 2; ++g) {
            l.opt[g].step = 41;
            l.opt[g].lr = 0.5, l.opt[g].clip = 1;
            l.opt[g].seed ^= 12345;
            bad += made(kopt_cuda_plan_set_optimizer(&l.plan, g, &l.opt[g], stream)) != KOPT_OK;
        }
        cpu_step(&l);
        bad += made(kopt_cuda_plan_step(&l.plan, stream)) != KOPT_OK || differences(&l, 1) != 0;
        bad += kopt_cuda_plan_status(&l.plan)->steps != 2 ||
               kopt_cuda_plan_status(&l.plan)->skips != (uint64_t)(skips - before);
        discard(&l);
        device_free(lr);
    }
    ok(bad == 0,
       "learning rate, loss scale, clipping (%d groups), skipped steps (%d), new hyper-parameters: as on the CPU",
       clips, skips);
}

/* Is a step skipped, with this result, and does it change nothing? */
static int skips(list *l, kopt_result result) {
    const kopt_cuda_status *const status = kopt_cuda_plan_status(&l->plan);
    const kopt_cuda_status before = *status;
    size_t g;
    int bad = made(kopt_cuda_plan_step(&l->plan, stream)) != KOPT_OK;
    bad += status->result != (uint32_t)result || status->skipped != 1;
    bad += status->skips != before.skips + 1 || status->steps != before.steps;
    for (g = 0; g < l->group_count; ++g) bad += *kopt_cuda_plan_steps(&l->plan, g) != l->opt[g].step;
    return bad == 0 && differences(l, 1) == 0;
}

/* Is a step made, as on the CPU? */
static int steps(list *l) {
    const kopt_cuda_status *const status = kopt_cuda_plan_status(&l->plan);
    cpu_step(l);
    return made(kopt_cuda_plan_step(&l->plan, stream)) == KOPT_OK && status->result == KOPT_OK &&
           status->skipped == 0 && differences(l, 1) == 0;
}

/* Numbers in GPU memory that no step can be made with, and that a flag may have. */
static void bad_numbers(void) {
    static const struct {
        float lr, loss_scale, found_inf;
        kopt_result result; /* of a step that is skipped */
    } cases[] = {
        {-1, 1, 0, KOPT_ERROR_RANGE},
        {-1e-30f, 1, 0, KOPT_ERROR_RANGE},
        {3.2e38f, 1, 0, KOPT_ERROR_RANGE},
        {INFINITY, 1, 0, KOPT_ERROR_RANGE},
        {-INFINITY, 1, 0, KOPT_ERROR_RANGE},
        {NAN, 1, 0, KOPT_ERROR_RANGE},
        {-NAN, 1, 0, KOPT_ERROR_RANGE},
        {0.01f, 0, 0, KOPT_ERROR_RANGE},
        {0.01f, NAN, 0, KOPT_ERROR_RANGE},
        {0.01f, 1, 1, KOPT_OK},
        {0.01f, 1, 2, KOPT_OK},
        {0.01f, 1, -2, KOPT_OK},
        {0.01f, 1, 1e-45f, KOPT_OK},
        {0.01f, 1, INFINITY, KOPT_OK},
        {0.01f, 1, NAN, KOPT_OK},
    };
    static list l;
    size_t i, g;
    int bad = 0;
    float *const lr = device_new(3 * sizeof *lr);
    const kopt_cuda_options options = {0, 0, 0, lr, lr + 1, lr + 2, {0, 0, 0, 0}},
                            clips = {0, 0, 1e300, lr, NULL, NULL, {0, 0, 0, 0}};
    kopt_optimizer large;
    make(&l, 3, 3, 300, UINT32_MAX); /* finite gradients */
    bad += made(kopt_cuda_plan_set_options(&l.plan, &options, stream)) != KOPT_OK;
    for (i = 0; i < sizeof cases / sizeof *cases; ++i) {
        lr[0] = cases[i].lr, lr[1] = cases[i].loss_scale, lr[2] = cases[i].found_inf;
        if (!skips(&l, cases[i].result)) note("bad number %d", (int)i), ++bad;
        lr[0] = 0.0625f, lr[1] = 1, lr[2] = i & 1 ? -0.0f : 0; /* the next step is made */
        for (g = 0; g < l.group_count; ++g) l.opt[g].lr = 0.0625;
        bad += !steps(&l);
    }
    /* factors whose product overflows; with max_norm it is known only when the norm is */
    large = l.opt[1], large.grad_scale = large.clip = 1e30;
    bad += made(kopt_cuda_plan_set_options(&l.plan, &clips, stream)) != KOPT_OK;
    bad += made(kopt_cuda_plan_set_optimizer(&l.plan, 1, &large, stream)) != KOPT_OK;
    bad += made(kopt_cuda_plan_measure(&l.plan, stream)) != KOPT_OK || !skips(&l, KOPT_ERROR_RANGE);
    bad += made(kopt_cuda_plan_set_optimizer(&l.plan, 1, &l.opt[1], stream)) != KOPT_OK;
    bad += made(kopt_cuda_plan_measure(&l.plan, stream)) != KOPT_OK || !steps(&l);
    discard(&l), device_free(lr);
    ok(bad == 0, "NaN, infinite and negative rates, a loss scale of 0, a flag that is neither 0 nor 1, a product that "
                 "overflows: skipped");
}

/* ---- Errors stop a plan ------------------------------------------------------------------------------------------ */

/* Does a call that returned `result` stop the plan with this error, until it is acknowledged? */
static int stops(list *l, kopt_result returned, kopt_result result) {
    const kopt_cuda_status *const status = kopt_cuda_plan_status(&l->plan);
    int good = made(returned) == result && status->result == (uint32_t)result;
    good = skips(l, result) && skips(l, result) && good;
    good = made(kopt_cuda_plan_acknowledge(&l->plan, stream)) == KOPT_OK && status->result == KOPT_OK && good;
    return steps(l) && good;
}

static void refused_arrays(int lists) {
    static list l;
    static uint64_t nothing[2]; /* no array of the GPU: a step must not use it */
    int bad = 0, k, what, tried = 0, of_arrays = 0, of_blocks = 0;
    for (k = 0; k < lists || of_arrays == 0 || of_blocks == 0; ++k) {
        make(&l, 2, 3, 300, 100);
        for (what = 0; what < 15; ++what) {
            kopt_tensor moved[6], *const t = &moved[2 + below(2)]; /* the first two tensors are right */
            kopt_state_arrays own[6], *const o = &own[t - moved];
            size_t i, first = 0, count = 6;
            kopt_result expected = KOPT_ERROR_MISMATCH;
            int a, needed = -1; /* an array of *t that the options need */
            for (i = 0; i < 6; ++i) {
                moved[i] = l.tensors[1][i / 3][i % 3];
                own[i] = l.own[1][i / 3][i % 3];
                if (moved[i].arrays) moved[i].arrays = &own[i];
                moved[i].grad = nothing;
                for (a = 0; a < ARRAYS; ++a) {
                    void **const at = address(&moved[i], &own[i], a);
                    if (*at == NULL) continue;
                    *at = nothing;
                    if (&moved[i] == t && a >= STATE && (needed < 0 || below(2))) needed = a;
                }
            }
            switch (what) {
            case 0: t->n++; break;
            case 1: t->n--; break;
            case 2: t->copy = t->copy ? NULL : nothing; break;
            case 3:
                if (t->arrays) expected = KOPT_ERROR_OPTION;
                t->state = t->state ? NULL : nothing;
                break;
            case 4: t->weight = NULL, expected = KOPT_ERROR_NULL; break;
            case 5: t->grad = NULL, expected = KOPT_ERROR_NULL; break;
            case 6: first = 1, expected = KOPT_ERROR_BOUNDS; break;
            case 7: first = 7, count = 0, expected = KOPT_ERROR_BOUNDS; break;
            case 8: expected = KOPT_ERROR_NULL; break;
            case 9: /* the other form */
                t->state = t->arrays ? nothing : NULL;
                t->arrays = t->arrays ? NULL : o;
                expected = KOPT_ERROR_OPTION;
                break;
            case 10: o->size--, expected = KOPT_ERROR_SIZE; break;
            case 11: t->state = nothing, expected = KOPT_ERROR_OPTION; break;
            case 12:
                if (needed >= 0) *address(t, o, needed) = NULL;
                expected = KOPT_ERROR_NULL;
                break;
            case 13: t->grad_format = (kopt_format)((t->grad_format + 1) % 3); break;
            default: t->copy_format = (kopt_format)((t->copy_format + 1) % 3);
            }
            if (what < 6 && t->n == 0 && what != 1) continue; /* its pointers do not matter */
            if ((what > 9 && what < 13 && !t->arrays) || (what == 12 && needed < 0)) continue;
            if (what == 14 && !t->copy) continue;
            bad += !stops(&l, kopt_cuda_plan_set_arrays(&l.plan, first, count, what == 8 ? NULL : moved, stream),
                          expected);
            ++tried, of_arrays += what == 12, of_blocks += what == 3 && !t->arrays;
        }
        discard(&l);
    }
    ok(bad == 0 && tried > 0, "%d moves are refused at once, and each stops the plan", tried);
}

/* An optimizer that may not take the place of `mine`, and why. KOPT_OK: this one may, or is the same. */
enum { OTHERS = 20 };
static kopt_result other_optimizer(kopt_optimizer *o, const kopt_optimizer *mine, int which) {
    const kopt_optimizer rules[] = {kopt_sgd(0.01, 0), kopt_sgd(0.01, 0.9), kopt_lion(0.01),  kopt_ema(0.9),
                                    kopt_adamw(0.01),  kopt_adan(0.01),     kopt_radam(0.01), kopt_ranger(0.01)};
    *o = *mine;
    if (o->rule != KOPT_RULE_EMA) o->lr = 0.5;
    switch (which) {
    case 8: o->reserved_[6] = 1; return KOPT_ERROR_OPTION;
    case 9: o->rounding = (kopt_rounding)((o->rounding + 1 + below(4)) % 5); break;
    case 10:
        o->first_moment_format = o->second_moment_format = (kopt_format)((o->first_moment_format + 1 + below(3)) % 4);
        break;
    case 11: o->moment_rounding = o->moment_rounding ? KOPT_NEAREST : KOPT_STOCHASTIC; break;
    case 12: o->residual_rounding = o->residual_rounding ? KOPT_NEAREST : KOPT_STOCHASTIC; break;
    case 13: o->amsgrad = !o->amsgrad; return o->rule == KOPT_RULE_ADAM ? KOPT_ERROR_MISMATCH : KOPT_OK;
    case 14: o->stable = !o->stable; return o->rule == KOPT_RULE_ADAM ? KOPT_ERROR_MISMATCH : KOPT_OK;
    case 15:
        o->momentum = o->momentum > 0 ? 0 : 0.9, o->nesterov = 0;
        return o->rule == KOPT_RULE_SGD ? KOPT_ERROR_MISMATCH : KOPT_OK;
    case 16: o->lr = -1; return KOPT_ERROR_RANGE;
    case 17: o->lr = NAN; return KOPT_ERROR_RANGE;
    case 18: memset(o, 0, sizeof *o); return KOPT_ERROR_UNINITIALIZED;
    case 19:
        o->second_moment_format = (kopt_format)((o->second_moment_format + 1 + below(3)) % 4);
        return ref_moments(o) > 1 ? KOPT_ERROR_MISMATCH : KOPT_OK;
    default:
        *o = rules[which];
        o->rounding = mine->rounding;
        o->first_moment_format = mine->first_moment_format, o->second_moment_format = mine->second_moment_format;
        o->moment_rounding = mine->moment_rounding;
        o->residual_rounding = mine->residual_rounding;
        return o->rule == mine->rule ? KOPT_OK : KOPT_ERROR_MISMATCH;
    }
    return KOPT_ERROR_MISMATCH;
}

static void refused_settings(int lists) {
    static const kopt_cuda_options negative = {0, 0, -1, NULL, NULL, NULL, {0, 0, 0, 0}},
                                   nan = {0, 0, NAN, NULL, NULL, NULL, {0, 0, 0, 0}};
    static list l;
    kopt_cuda_options later;
    int bad = 0, k, which, tried = 0, mismatches[OTHERS] = {0};
    for (k = 0; k < lists || !mismatches[13] || !mismatches[14] || !mismatches[15]; ++k) {
        make(&l, 2, 2, 300, 100);
        for (which = 0; which < OTHERS; ++which) {
            kopt_optimizer o;
            kopt_result why = other_optimizer(&o, &l.opt[1], which);
            if (why == KOPT_OK) continue;
            if (why == KOPT_ERROR_MISMATCH && o.rounding == KOPT_FEEDBACK && !pays_back(&o)) why = KOPT_ERROR_OPTION;
            if (!stops(&l, kopt_cuda_plan_set_optimizer(&l.plan, 1, &o, stream), why))
                note("optimizer %d in place of rule %d", which, (int)l.opt[1].rule), ++bad;
            ++tried, mismatches[which] += why == KOPT_ERROR_MISMATCH;
        }
        bad += !stops(&l, kopt_cuda_plan_set_optimizer(&l.plan, 2, &l.opt[1], stream), KOPT_ERROR_BOUNDS);
        bad += !stops(&l, kopt_cuda_plan_set_optimizer(&l.plan, 0, NULL, stream), KOPT_ERROR_NULL);
        bad += !stops(&l, kopt_cuda_plan_set_options(&l.plan, NULL, stream), KOPT_ERROR_NULL);
        bad += !stops(&l, kopt_cuda_plan_set_options(&l.plan, &negative, stream), KOPT_ERROR_RANGE);
        bad += !stops(&l, kopt_cuda_plan_set_options(&l.plan, &nan, stream), KOPT_ERROR_RANGE);
        memset(&later, 0, sizeof later), later.reserved_[k % 4] = 1;
        bad += !stops(&l, kopt_cuda_plan_set_options(&l.plan, &later, stream), KOPT_ERROR_OPTION);
        memset(&later, 0, sizeof later), later.reserved32_ = 1;
        bad += !stops(&l, kopt_cuda_plan_set_options(&l.plan, &later, stream), KOPT_ERROR_OPTION);
        discard(&l);
    }
    ok(bad == 0 && tried > 0, "%d optimizers, and options, are refused at once, and each stops the plan", tried);
}

static void stopped_plans(void) {
    static list l;
    int bad = 0;
    float *const lr = device_new(sizeof *lr);
    uint32_t *const counts = device_new(8);
    float *const sum = device_new(40), *const grad = device_new(40);
    kopt_accumulator a = kopt_accumulator_of(sum, KOPT_F32, NULL, 10);
    kopt_cuda_options options = {1, 0, 0, lr, NULL, NULL, {0, 0, 0, 0}};
    cudaGraph_t graph[2];
    cudaGraphExec_t replay[2];
    const kopt_cuda_status *status;
    kopt_optimizer other;
    size_t i;
    make(&l, 2, 3, 300, 1u << 31);
    status = kopt_cuda_plan_status(&l.plan);
    other = l.opt[1], other.rounding = (kopt_rounding)((other.rounding + 1) % 5);

    /* the first error stays, whatever comes then */
    bad += made(kopt_cuda_plan_set_optimizer(&l.plan, 1, &other, stream)) != KOPT_ERROR_MISMATCH;
    bad += made(kopt_cuda_plan_set_optimizer(&l.plan, 2, &other, stream)) != KOPT_ERROR_BOUNDS;
    bad += made(kopt_cuda_plan_set_optimizer(&l.plan, 1, &l.opt[1], stream)) != KOPT_OK;
    *lr = -1; /* steps that would be refused otherwise, too: no measure, a bad rate */
    bad += made(kopt_cuda_plan_set_options(&l.plan, &options, stream)) != KOPT_OK || !skips(&l, KOPT_ERROR_MISMATCH);
    bad += made(kopt_cuda_plan_measure(&l.plan, stream)) != KOPT_OK || !skips(&l, KOPT_ERROR_MISMATCH);
    options.check_finite = 0, options.lr = NULL;
    bad += made(kopt_cuda_plan_set_options(&l.plan, &options, stream)) != KOPT_OK || !skips(&l, KOPT_ERROR_MISMATCH);
    bad += made(kopt_cuda_plan_set_step(&l.plan, 7, stream)) != KOPT_OK;
    l.opt[0].step = l.opt[1].step = 7;
    bad += !skips(&l, KOPT_ERROR_MISMATCH);
    bad += made(kopt_cuda_plan_acknowledge(&l.plan, stream)) != KOPT_OK || !steps(&l) || !steps(&l);
    ok(bad == 0, "the first error stays until it is acknowledged, through settings and other errors");

    /* upload ends it, too, and begins again with what plan_build() was given */
    bad = made(kopt_cuda_plan_set_optimizer(&l.plan, 1, &other, stream)) != KOPT_ERROR_MISMATCH;
    bad += !skips(&l, KOPT_ERROR_MISMATCH);
    bad += made(kopt_cuda_plan_upload(&l.plan, l.device, stream)) != KOPT_OK || status->skips != 0;
    bad += made(kopt_cuda_plan_set_step(&l.plan, l.opt[0].step, stream)) != KOPT_OK || !steps(&l);
    ok(bad == 0, "an upload ends an error");

    /* sums that are counted on the GPU */
    for (bad = 0, i = 0; i < 10; ++i) sum[i] = grad[i] = (float)i;
    for (i = 0; i < 2; ++i) {
        counts[i] = 0xffffffff, counts[1 - i] = 5;
        bad += made(kopt_cuda_accumulator_add(&a, grad, KOPT_F32, 1, counts, &l.plan, stream)) != KOPT_OK;
        bad += counts[i] != 0xffffffff || counts[1 - i] != 5 || sum[9] != 9;
        bad += !stops(&l, (kopt_result)status->result, KOPT_ERROR_STEP);
    }
    bad += kopt_cuda_accumulator_add(&a, grad, KOPT_F32, 1, counts, NULL, stream) != KOPT_ERROR_NULL;
    ok(bad == 0, "an addition that the GPU cannot count stops the plan");

    /* in a graph: the capture of a call that is refused says so at once, and each replay stops the plan */
    for (bad = 0, i = 0; i < 2; ++i) {
        bad += cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal) != cudaSuccess;
        if (i == 0)
            bad += kopt_cuda_plan_set_optimizer(&l.plan, 1, &other, stream) != KOPT_ERROR_MISMATCH;
        else
            bad += kopt_cuda_plan_acknowledge(&l.plan, stream) != KOPT_OK;
        bad += kopt_cuda_plan_step(&l.plan, stream) != KOPT_OK;
        bad += cudaStreamEndCapture(stream, &graph[i]) != cudaSuccess;
        bad += cudaGraphInstantiate(&replay[i], graph[i], 0) != cudaSuccess;
    }
    bad += !steps(&l);
    for (i = 0; i < 4; ++i) {
        const uint64_t skipped = status->skips;
        bad += cudaGraphLaunch(replay[i & 1], stream) != cudaSuccess;
        if (i & 1) cpu_step(&l);
        finish();
        bad += status->skips != skipped + !(i & 1) || differences(&l, 1) != 0;
    }
    for (i = 0; i < 2; ++i) cudaGraphExecDestroy(replay[i]), cudaGraphDestroy(graph[i]);

    bad += made(kopt_cuda_plan_set_step(&l.plan, 0xfffffffe, stream)) != KOPT_OK;
    l.opt[0].step = l.opt[1].step = 0xfffffffe;
    bad += !steps(&l) || !skips(&l, KOPT_ERROR_STEP) || !skips(&l, KOPT_ERROR_STEP);
    ok(bad == 0, "graphs stop a plan and let it go on; the last step number is the last");
    discard(&l), device_free(lr), device_free(counts), device_free(sum), device_free(grad);
}

#ifdef PTX_ON_CPU
/* After an upload nothing is loaded: not by calls with the plan, not in a capture. */
static void loads(int lists) {
    static list l;
    enum { NO_MEMORY = 2, NO_IMAGE = 209 };
    int bad = 0, k, f, kernels = 0, plans = 0;
    memset(used, 0, sizeof used);
    for (k = 0; k < lists || (kernels < KOPT_CUDA_KERNELS_ && k < 10000); ++k) {
        const kopt_cuda_options options = {1, 0, 1e9, NULL, NULL, NULL, {0, 0, 0, 0}};
        uint32_t *counts;
        uint16_t *sum, *rest;
        float *out;
        cudaGraph_t graph;
        cudaGraphExec_t replay;
        size_t g, first = 0;
        int fresh;
        ptx_unload();
        make(&l, 1 + below(GROUPS), 1 + below(3), 200, 1u << 31);
        fresh = use(&l.plan), kernels += fresh;
        if (fresh == 0 && k >= lists) {
            discard(&l);
            continue;
        }
        ++plans;
        counts = device_new(8), sum = device_new(80), rest = device_new(40), out = device_new(80);
        counts[0] = counts[1] = 0, memset(sum, 0, 80);
        ptx_fail_loads(NO_MEMORY);
        bad += cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal) != cudaSuccess;
        bad += kopt_cuda_plan_set_options(&l.plan, &options, stream) != KOPT_OK;
        bad += kopt_cuda_plan_acknowledge(&l.plan, stream) != KOPT_OK;
        for (g = 0; g < l.group_count; first += l.counts[g], ++g) {
            bad += kopt_cuda_plan_set_optimizer(&l.plan, g, &l.opt[g], stream) != KOPT_OK;
            bad += kopt_cuda_plan_set_arrays(&l.plan, first, l.counts[g], l.tensors[1][g], stream) != KOPT_OK;
        }
        for (f = 0; f < 4; ++f) {
            kopt_accumulator a = kopt_accumulator_of(sum, f == 3 ? KOPT_BF16 : (kopt_format)f, rest, 20);
            if (f == 3) a.rounding = KOPT_EXACT;
            bad += kopt_cuda_accumulator_add(&a, sum, a.format, 1, counts, &l.plan, stream) != KOPT_ERROR_OVERLAP;
            bad += kopt_cuda_accumulator_add(&a, out, a.format, 1, counts, &l.plan, stream) != KOPT_OK;
            bad += kopt_cuda_accumulator_read(&a, out, counts, stream) != KOPT_OK;
            memset(&a, 0xCC, sizeof a);
            bad += kopt_cuda_accumulator_add(&a, sum, KOPT_F32, 1, counts, &l.plan, stream) != KOPT_ERROR_UNINITIALIZED;
        }
        bad += kopt_cuda_plan_measure(&l.plan, stream) != KOPT_OK || kopt_cuda_plan_step(&l.plan, stream) != KOPT_OK;
        bad += cudaStreamEndCapture(stream, &graph) != cudaSuccess;
        bad += cudaGraphInstantiate(&replay, graph, 0) != cudaSuccess || cudaGraphLaunch(replay, stream) != cudaSuccess;
        cpu_step(&l), finish();
        bad += differences(&l, 1) != 0 || kopt_cuda_plan_status(&l.plan)->result != KOPT_OK;
        cudaGraphExecDestroy(replay), cudaGraphDestroy(graph);

        /* the errors of loading are those of the upload */
        l.plan.device = NULL;
        ptx_unload(), ptx_fail_loads(k % 2 ? NO_MEMORY : NO_IMAGE);
        bad += made(kopt_cuda_plan_upload(&l.plan, l.device, stream)) != (k % 2 ? KOPT_ERROR_DEVICE : KOPT_ERROR_ISA);
        bad += l.plan.device != NULL || differences(&l, 1) != 0;
        ptx_fail_loads(0);
        discard(&l), device_free(counts), device_free(sum), device_free(rest), device_free(out);
    }
    ok(bad == 0 && kernels == KOPT_CUDA_KERNELS_,
       "an upload loads what calls with the plan launch (%d plans, %d kernels of steps), or says why not", plans,
       kernels);
}

/* A launch that fails stops the plan: what was begun does not go on. */
static void failing_launches(void) {
    static list l;
    static kopt_tensor all[GROUPS * TENSORS];
    int bad = 0, n, failed = 1, halves = 0;
    size_t i;
    for (n = 1; failed; ++n) {
        const kopt_cuda_status *status;
        uint64_t skipped, k;
        noise_state = 6;
        make(&l, 3, 2, 300, 1u << 31);
        status = kopt_cuda_plan_status(&l.plan);
        ptx_fail_launch(n);
        failed = made(kopt_cuda_plan_step(&l.plan, stream)) != KOPT_OK;
        ptx_fail_launch(0);
        if (failed) {
            bad += status->result != KOPT_ERROR_DEVICE;
            halves += differences(&l, 0) != 0;
            for (k = 0, skipped = status->skips; k < 2; ++k)
                bad += made(kopt_cuda_plan_step(&l.plan, stream)) != KOPT_OK;
            bad += status->result != KOPT_ERROR_DEVICE || status->skips != skipped + 2;
        }
        discard(&l);
    }
    make(&l, GROUPS, TENSORS, 20, 100);
    for (i = 0; i < GROUPS * TENSORS; ++i) all[i] = l.tensors[1][i / TENSORS][i % TENSORS];
    ptx_fail_launch(2);
    bad += !stops(&l, kopt_cuda_plan_set_arrays(&l.plan, 0, GROUPS * TENSORS, all, stream), KOPT_ERROR_DEVICE);
    ptx_fail_launch(1);
    bad += !stops(&l, kopt_cuda_plan_set_step(&l.plan, 3, stream), KOPT_ERROR_DEVICE);
    ptx_fail_launch(1);
    bad += !stops(&l, kopt_cuda_plan_measure(&l.plan, stream), KOPT_ERROR_DEVICE);
    discard(&l);
    ok(bad == 0 && halves > 0, "a failed launch, %d of a step (%d left half of it), stops the plan", n - 2, halves);
}
#endif

/* ---- Refusals, conversions -------------------------------------------------------------------------------------- */

static void refusals(void) {
    static uint16_t weight[100], grad[100];
    static unsigned char state[KOPT_STATE_BYTES(100, 6)];
    unsigned char *bytes = device_new(32000), *copy = malloc(32000);
    kopt_optimizer o = kopt_adamw(0.01), wrong = o;
    kopt_tensor t = kopt_tensor_of(weight, KOPT_BF16, grad, KOPT_BF16, 100, state, sizeof state), bad_tensor = t;
    kopt_cuda_group g = {&o, &t, 1}, bad = g;
    kopt_cuda_plan plan, before;
    kopt_counts counts = {0, 0, 0};
    size_t size = kopt_cuda_plan_size(&g, 1), i;
    int fails = 0;
    memset(bytes, 0x77, size + 64);
    memset(&plan, 0x33, sizeof plan);
    memcpy(copy, bytes, size + 64);
    before = plan;
    fails += kopt_cuda_plan_build(NULL, bytes, size, &g, 1) != KOPT_ERROR_NULL;
    fails += kopt_cuda_plan_build(&plan, NULL, size, &g, 1) != KOPT_ERROR_NULL;
    fails += kopt_cuda_plan_build(&plan, bytes, size, NULL, 1) != KOPT_ERROR_NULL;
    fails += kopt_cuda_plan_build(&plan, bytes, size - 1, &g, 1) != KOPT_ERROR_SIZE;
    fails += kopt_cuda_plan_build(&plan, bytes + 8, size, &g, 1) != KOPT_ERROR_OPTION;
    bad.opt = NULL;
    fails += kopt_cuda_plan_build(&plan, bytes, size, &bad, 1) != KOPT_ERROR_NULL || kopt_cuda_plan_size(&bad, 1) != 0;
    bad = g, bad.tensors = NULL;
    fails += kopt_cuda_plan_build(&plan, bytes, size, &bad, 1) != KOPT_ERROR_NULL;
    wrong.lr = -1, bad = g, bad.opt = &wrong;
    fails += kopt_cuda_plan_build(&plan, bytes, size, &bad, 1) != KOPT_ERROR_RANGE;
    bad = g, bad.tensors = &bad_tensor;
    bad_tensor.state = weight + 3;
    fails += kopt_cuda_plan_build(&plan, bytes, size, &bad, 1) != KOPT_ERROR_OVERLAP;
    bad_tensor = t, bad_tensor.grad = NULL;
    fails += kopt_cuda_plan_build(&plan, bytes, size, &bad, 1) != KOPT_ERROR_NULL;
    bad_tensor = t, bad_tensor.state_size = 10;
    fails += kopt_cuda_plan_build(&plan, bytes, size, &bad, 1) != KOPT_ERROR_SIZE;
#ifdef KAHAN_OPT_VMATH
    wrong = o, wrong.rule = (kopt_rule)8, bad_tensor = t, bad.opt = &wrong;
    fails += kopt_cuda_plan_build(&plan, bytes, size, &bad, 1) != KOPT_ERROR_OPTION;
#endif
    bad.opt = &o, bad_tensor = t, bad_tensor.counts = &counts;
    fails += kopt_cuda_plan_build(&plan, bytes, size, &bad, 1) != KOPT_ERROR_OPTION;
    bad_tensor = t, bad_tensor.grad_format = (kopt_format)7;
    fails += kopt_cuda_plan_build(&plan, bytes, size, &bad, 1) != KOPT_ERROR_OPTION;
    bad_tensor = t, bad_tensor.stable_scale = 1;
    fails += kopt_cuda_plan_build(&plan, bytes, size, &bad, 1) != KOPT_ERROR_OPTION;
    for (i = 0; i < 6; ++i) { /* a state in arrays */
        static const kopt_state_arrays zeros;
        kopt_state_arrays own = zeros;
        static const kopt_result why[] = {KOPT_OK,         KOPT_ERROR_OPTION,  KOPT_ERROR_NULL,
                                          KOPT_ERROR_NULL, KOPT_ERROR_OVERLAP, KOPT_ERROR_SIZE};
        wrong = o, wrong.second_moment_format = KOPT_Q8, bad.opt = &wrong, own.size = sizeof own;
        own.residual = state, own.moment[0] = state + 200, own.moment[1] = state + 400, own.scale[1] = state + 500;
        bad_tensor = t, bad_tensor.arrays = &own;
        if (i != 1) bad_tensor.state = NULL; /* a block, too */
        if (i == 2) own.moment[0] = NULL;
        if (i == 3) own.scale[1] = NULL;
        if (i == 4) own.moment[0] = state + 199;
        if (i == 5) own.size = 0;
        fails += (kopt_cuda_plan_size(&bad, 1) == 0) != (i != 0);
        if (i != 0) fails += kopt_cuda_plan_build(&plan, bytes, size, &bad, 1) != why[i];
    }
    for (i = 0; i < 12; ++i) { /* neighbours that share memory, of one group or of two */
        static uint16_t weight2[100], grad2[100];
        static unsigned char state2[KOPT_STATE_BYTES(100, 6)];
        const int shared = (int)i / 2; /* weights, states, a weight, gradients that are read or cleared, nothing */
        kopt_tensor two[2];
        kopt_cuda_group three[3];
        wrong = o, wrong.zero_grad = shared == 4, two[0] = t;
        two[1] = kopt_tensor_of(weight2, KOPT_BF16, grad2, KOPT_BF16, 100, state2, sizeof state2);
        if (shared == 0) two[1].weight = weight;
        if (shared == 1) two[1].state = state;
        if (shared == 2) two[1].weight = weight + 99, two[1].n = 1;
        if (shared == 3 || shared == 4) two[1].grad = grad;
        two[1].id = i % 2 == 0;
        three[0].opt = &wrong, three[0].tensors = two, three[0].count = 2 - i % 2;
        three[1] = three[2] = g, three[1].count = 0, three[2].tensors = two + 1;
        fails += kopt_cuda_plan_build(&plan, bytes, 0, three, i % 2 ? 3 : 1) !=
                 (shared == 3 || shared == 5 ? KOPT_ERROR_SIZE : KOPT_ERROR_OVERLAP);
    }
    bad.opt = &o;
    for (i = 0; i < 4 && sizeof i == 8; ++i) { /* too many elements, or one less; the addresses are not read */
        const uint64_t limit = (uint64_t)1 << (i < 2 ? 40 : 36), base = (uint64_t)1 << 44;
        wrong = o, wrong.stable = i >= 2, bad.opt = &wrong, bad_tensor = t;
        bad_tensor.n = (size_t)(limit - i % 2), bad_tensor.state_size = kopt_state_size(&wrong, &bad_tensor);
        bad_tensor.weight = (void *)(uintptr_t)base, bad_tensor.grad = (void *)(uintptr_t)(2 * base);
        bad_tensor.state = (void *)(uintptr_t)(4 * base);
        if (i % 2 == 0)
            fails += kopt_cuda_plan_build(&plan, bytes, size, &bad, 1) != KOPT_ERROR_BOUNDS;
        else
            fails += kopt_cuda_plan_size(&bad, 1) == 0;
    }
    fails += memcmp(&plan, &before, sizeof plan) != 0 || memcmp(copy, bytes, size + 64) != 0;
    ok(fails == 0, "bad arguments are refused before anything is written");

    fails = kopt_cuda_plan_build(&plan, bytes, size, &g, 1) != KOPT_OK || plan.size != size || plan.groups_ != 1;
    for (i = size; i < size + 64; ++i) fails += bytes[i] != 0x77;
    fails += kopt_cuda_plan_set_arrays(&plan, 0, 1, &t, NULL) != KOPT_ERROR_NULL;
    fails +=
        kopt_cuda_plan_step(&plan, NULL) != KOPT_ERROR_NULL || kopt_cuda_plan_measure(&plan, NULL) != KOPT_ERROR_NULL;
    fails += kopt_cuda_plan_norm(&plan, NULL) != NULL || kopt_cuda_plan_status(&plan) != NULL ||
             kopt_cuda_plan_step(NULL, NULL) != KOPT_ERROR_NULL;
    fails += kopt_cuda_plan_set_step(&plan, 1, NULL) != KOPT_ERROR_NULL ||
             kopt_cuda_plan_acknowledge(&plan, NULL) != KOPT_ERROR_NULL ||
             kopt_cuda_plan_acknowledge(NULL, NULL) != KOPT_ERROR_NULL;
    fails += kopt_cuda_plan_set_optimizer(&plan, 0, &o, NULL) != KOPT_ERROR_NULL ||
             kopt_cuda_plan_set_options(&plan, NULL, NULL) != KOPT_ERROR_NULL;
    fails += kopt_cuda_plan_upload(&plan, NULL, NULL) != KOPT_ERROR_NULL || plan.bytes != bytes;
    fails += kopt_cuda_plan_upload(&plan, copy + 1, NULL) != KOPT_ERROR_OPTION || plan.device != NULL;
    ok(fails == 0, "a plan writes its bytes and no others, and nothing runs before it is on the device");

    fails = kopt_cuda_plan_size(NULL, 0) == 0 || kopt_cuda_plan_build(&plan, bytes, size, NULL, 0) != KOPT_OK;
    fails += kopt_cuda_plan_upload(&plan, bytes + 16000, stream) != KOPT_OK;
    fails +=
        made(kopt_cuda_plan_step(&plan, stream)) != KOPT_OK || made(kopt_cuda_plan_measure(&plan, stream)) != KOPT_OK;
    t.n = 0, t.weight = t.grad = t.state = NULL;
    fails += kopt_cuda_plan_build(&plan, bytes, size, &g, 1) != KOPT_OK;
    fails += kopt_cuda_plan_upload(&plan, bytes + 16000, stream) != KOPT_OK;
    fails +=
        made(kopt_cuda_plan_step(&plan, stream)) != KOPT_OK || made(kopt_cuda_plan_measure(&plan, stream)) != KOPT_OK;
    ok(fails == 0, "no tensors, and a tensor without elements, are fine");
    free(copy), device_free(bytes);
}

/* ---- The sizes of models ----------------------------------------------------------------------------------------- */

/* A plan of 200 groups and 2,000 tensors whose tasks are 1,024 wide: two steps, between them one that the settings of
   one group forbid, and a move of all arrays. */
static void model(void) {
    enum { MANY = 200, EACH = 10, ALL = MANY * EACH, ROOM = 1 << 22 };
    const kopt_cuda_options clipping = {1, 0, 0.5, NULL, NULL, NULL, {0, 0, 0, 0}},
                            none = {0, 0, 0, NULL, NULL, NULL, {0, 0, 0, 0}};
    kopt_optimizer *const o = calloc(MANY + 1, sizeof *o);
    kopt_tensor *const t = calloc(2 * (ALL + 1), sizeof *t), *const u = t + ALL + 1;
    kopt_state_arrays *const own = calloc(2 * ALL, sizeof *own);
    kopt_cuda_group *const groups = calloc(MANY + 1, sizeof *groups);
    unsigned char *const cpu = calloc(ROOM, 1), *const gpu = device_new(ROOM), *const moved = device_new(ROOM), *bytes;
    const kopt_cuda_status *status;
    kopt_cuda_plan plan;
    kopt_norm norm;
    size_t i, g, size, at = 0;
    const uint64_t before = noise_state;
    int a, step, bad = 0;
    memset(&norm, 0, sizeof norm);
    for (i = 0; i < ALL; ++i) {
        kopt_tensor *const x = &t[i];
        kopt_format weights = KOPT_BF16;
        g = i / EACH;
        if (i % EACH == 0) o[g] = g == 150 ? kopt_adamw(0.01) : any_optimizer(&weights), o[g].step = 10;
        if (i % EACH != 0) weights = t[i - 1].weight_format;
        *x = kopt_tensor_of(NULL, weights, NULL, KOPT_BF16, below(below(8) ? 60 : 2100), NULL, 0);
        x->id = (uint32_t)i, x->no_decay = !below(4), x->copy_format = (kopt_format)below(3);
        x->first_index = below(2) ? 0 : (uint64_t)noise() * (below(3) ? 8 : 1);
        if (g % 2) x->arrays = &own[i], own[i].size = sizeof own[i];
        x->state_size = x->arrays ? 0 : kopt_state_size(&o[g], x);
        for (a = 0; a < ARRAYS; ++a) {
            size = a == 0   ? x->n * width(weights)
                   : a == 1 ? x->n * 2
                   : a == 2 ? x->state_size
                   : a == 3 ? (i % 8 ? 0 : x->n * width(x->copy_format))
                            : (x->arrays ? bytes_of(&o[g], weights, x->n, a) : 0);
            at = (at + 15) / 16 * 16 + (below(4) ? 0 : 2 * below(8));
            if (at + size > ROOM) abort();
            if (size) *address(x, &own[i], a) = cpu + at;
            at += size;
        }
        fill(x->weight, weights, x->n, -8, 1, 0, 1u << 31);
        fill((void *)x->grad, KOPT_BF16, x->n, -14, 0, 0, 1u << 31);
        if (kopt_state_init(&o[g], x, 1, NULL) != KOPT_OK) abort();
        u[i] = *x, own[ALL + i] = own[i];
        if (x->arrays) u[i].arrays = &own[ALL + i];
        for (a = 0; a < ARRAYS; ++a) {
            void **const p = address(&u[i], &own[ALL + i], a);
            if (*p) *p = gpu + ((unsigned char *)*p - cpu);
        }
        groups[g].opt = &o[g], groups[g].tensors = u + g * EACH, groups[g].count = EACH;
    }
    u[ALL] = wide_tensor(&o[MANY], KOPT_BF16);
    groups[MANY].opt = &o[MANY], groups[MANY].tensors = &u[ALL], groups[MANY].count = 1;
    memcpy(gpu, cpu, ROOM);
    size = kopt_cuda_plan_size(groups, MANY + 1), bytes = device_new(2 * size);
    if (kopt_cuda_plan_build(&plan, bytes, size, groups, MANY + 1) != KOPT_OK) abort();
    if (made(kopt_cuda_plan_upload(&plan, bytes + size, stream)) != KOPT_OK) abort();
    cut_off(&plan);
    status = kopt_cuda_plan_status(&plan);
    for (step = 0; step < 2; ++step) {
        for (g = 0; g < MANY && step; ++g) kopt_norm_add_grads(&norm, t + g * EACH, EACH);
        for (g = 0; g < MANY; ++g) {
            if (step) o[g].clip = kopt_norm_clip(&norm, 0.5, o[g].grad_scale);
            bad += kopt_optimizer_step(&o[g], t + g * EACH, EACH) != KOPT_OK;
            o[g].clip = 1;
        }
        bad += made(kopt_cuda_plan_set_options(&plan, step ? &clipping : &none, stream)) != KOPT_OK;
        bad += made(kopt_cuda_plan_measure(&plan, stream)) != KOPT_OK;
        bad += made(kopt_cuda_plan_step(&plan, stream)) != KOPT_OK || status->result != KOPT_OK;
        bad += memcmp(cpu, step ? moved : gpu, ROOM) != 0;
        for (g = 0; g < MANY; ++g) bad += *kopt_cuda_plan_steps(&plan, g) != o[g].step;
        if (step) break;

        o[150].lr = 3e38; /* divided by 1 - beta1^step it is too large */
        bad += made(kopt_cuda_plan_set_optimizer(&plan, 150, &o[150], stream)) != KOPT_OK;
        bad += made(kopt_cuda_plan_step(&plan, stream)) != KOPT_OK || status->result != KOPT_ERROR_RANGE;
        bad += memcmp(cpu, gpu, ROOM) != 0 || status->skips != 1;
        o[150].lr = 0.02;
        bad += made(kopt_cuda_plan_set_optimizer(&plan, 150, &o[150], stream)) != KOPT_OK;
        memcpy(moved, gpu, ROOM), memset(gpu, 0xee, ROOM);
        for (i = 0; i < ALL; ++i)
            for (a = 0; a < ARRAYS; ++a) {
                void **const p = address(&u[i], &own[ALL + i], a);
                if (*p) *p = moved + ((unsigned char *)*p - gpu);
            }
        for (g = 0; g < MANY; g += 20) /* of 200 tensors, then of 50 and 150 with states in arrays */
            bad += made(kopt_cuda_plan_set_arrays(&plan, g * EACH, 20 * EACH, u + g * EACH, stream)) != KOPT_OK;
    }
    ok(bad == 0, "%d tensors in %d groups, tasks of %d positions: %d differ from the CPU", ALL, MANY, (int)plan.width_,
       bad);
    noise_state = before; /* the lists that follow are the same without this test */
    free(o), free(t), free(own), free(groups), free(cpu), device_free(gpu), device_free(moved), device_free(bytes);
}

#ifdef PTX_ON_CPU
/* The end of a tensor and of a sum of 2^32 + 10,007 elements. The arrays have memory only there, and only the last
   thread blocks run. All is as with a shard that begins there. */
enum { SHARD = 8192 + 10007 };
static const uint64_t before_shard = (UINT64_C(1) << 32) - 8192;

/* Memory of the shard of array number a, far from that of others. */
static void *shard_new(int a) {
    void *const at = (void *)(((uintptr_t)1 << 44) + ((uintptr_t)a << 36));
    if (mmap(at, 4 * SHARD, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != at) abort();
    variable_(at, 4 * SHARD);
    return at;
}

/* Where an array begins that has a value of `size` bytes for `each` elements. */
static void *begin(void *shard, size_t each, size_t size) { return (char *)shard - before_shard / each * size; }

static void far_positions(void) {
    static uint16_t weight[SHARD], residual[SHARD];
    static float sum[SHARD];
    static unsigned char moment[2][4 * SHARD], scale[2][SHARD / 64 + 1];
    void *at[8];
    int mode, k, step, bad = 0;
    for (k = 0; k < 8; ++k) at[k] = shard_new(k);
    for (mode = 0; mode < 3; ++mode) { /* moments: bf16; 8 bits; fp32 and 8 bits */
        kopt_optimizer o = kopt_adamw(0.01), p;
        kopt_tensor t = kopt_tensor_of(weight, KOPT_BF16, at[1], KOPT_BF16, SHARD, NULL, 0), u = t;
        kopt_state_arrays own[2];
        kopt_cuda_plan plan;
        void *bytes;
        size_t size[2];
        if (mode > 0) o.second_moment_format = KOPT_Q8;
        if (mode > 0) o.first_moment_format = mode == 1 ? KOPT_Q8 : KOPT_F32;
        memset(own, 0, sizeof own);
        own[0].size = own[1].size = sizeof own[0];
        own[0].residual = residual, own[1].residual = begin(at[2], 1, 2);
        for (k = 0; k < 2; ++k) {
            const kopt_format f = k == 0 ? o.first_moment_format : o.second_moment_format;
            size[k] = f == KOPT_Q8 ? 1 : width(f);
            own[0].moment[k] = moment[k], own[1].moment[k] = begin(at[3 + k], 1, size[k]);
            if (f == KOPT_Q8) own[0].scale[k] = scale[k], own[1].scale[k] = begin(at[5 + k], 64, 1);
        }
        t.arrays = &own[0], t.first_index = before_shard;
        u.arrays = &own[1], u.weight = begin(at[0], 1, 2), u.grad = begin(at[1], 1, 2), u.n += before_shard;
        if (mode == 1) t.first_index += UINT64_C(3) << 40, u.first_index += UINT64_C(3) << 40;
        fill(at[0], KOPT_BF16, SHARD, -8, 1, 0, 1u << 31);
        memcpy(weight, at[0], sizeof weight);
        if (kopt_state_init(&o, &t, 1, NULL) != KOPT_OK) abort();
        for (k = 2; k < 7; ++k) memset(at[k], 0, 4 * SHARD);
        p = o, bytes = plan_of_one_block(&plan, &p, &u, 0), plan.blocks = 0;
        for (step = 0; step < 2; ++step) {
            fill(at[1], KOPT_BF16, SHARD, -14, 0, 0, 200);
            ptx_last_blocks(mode > 0 ? 5 : 3); /* of 4 and of 8 warps: from the same task on */
            bad += made(kopt_cuda_plan_step(&plan, stream)) != KOPT_OK;
            bad += kopt_optimizer_step(&o, &t, 1) != KOPT_OK;
            bad += memcmp(weight, at[0], sizeof weight) != 0 || memcmp(residual, at[2], sizeof residual) != 0;
            for (k = 0; k < 2; ++k) {
                bad += memcmp(moment[k], at[3 + k], SHARD * size[k]) != 0;
                if (size[k] == 1) bad += memcmp(scale[k], at[5 + k], (SHARD + 63) / 64) != 0;
            }
        }
        device_free(bytes);
    }
    for (step = 0; step < 2; ++step) {
        kopt_accumulator a = kopt_accumulator_of(weight, KOPT_BF16, residual, SHARD), b = a;
        a.first_index = before_shard, a.step = b.step = a.count = b.count = (uint32_t)step;
        b.sum = begin(at[0], 1, 2), b.residual = begin(at[2], 1, 2), b.n += before_shard;
        bad += kopt_accumulator_add(&a, at[1], KOPT_BF16, 0.3) != KOPT_OK;
        ptx_last_blocks(9);
        bad += made(kopt_cuda_accumulator_add(&b, begin(at[1], 1, 2), KOPT_BF16, 0.3, NULL, NULL, stream)) != KOPT_OK;
        bad += memcmp(weight, at[0], sizeof weight) != 0 || memcmp(residual, at[2], sizeof residual) != 0;
        bad += kopt_accumulator_read(&a, sum) != KOPT_OK;
        ptx_last_blocks(72);
        bad += made(kopt_cuda_accumulator_read(&b, begin(at[7], 1, 4), NULL, stream)) != KOPT_OK;
        bad += !same((void *)sum, at[7], KOPT_F32, SHARD);
    }
    ptx_last_blocks(UINT32_MAX);
    ok(bad == 0, "the end of 2^32 + 10007 elements, steps and sums: %d differ from a shard on the CPU", bad);
}
#endif

/* ---- Accumulation ------------------------------------------------------------------------------------------------ */

/* Sums of several micro-batches, twice, of any format, rounding and alignment; counted on the host or on the device. */
static void accumulations(int lists) {
    const size_t size_of_plan = kopt_cuda_plan_size(NULL, 0);
    unsigned char *const memory = device_new(2 * size_of_plan);
    kopt_cuda_plan plan;
    int k, step,
        bad = kopt_cuda_plan_build(&plan, memory, size_of_plan, NULL, 0) != KOPT_OK ||
              kopt_cuda_plan_upload(&plan, memory + size_of_plan, stream) != KOPT_OK;
    for (k = 0; k < lists; ++k) {
        const kopt_format f = (kopt_format)below(3), g = (kopt_format)below(3);
        const size_t n = below(8) ? below(900) : below(9), shift = below(2) ? 0 : below(16),
                     grad_shift = below(3) ? shift : below(16);
        const size_t size = n * width(f);
        const uint32_t rare = below(3) ? 1000 : 20;
        unsigned char *const sum = malloc(size + 1), *const sum2 = device_new(size + shift),
                             *const grad = device_new(n * width(g) + grad_shift);
        unsigned char *const rest = malloc(2 * n + 1), *const rest2 = device_new(2 * n + shift);
        float *const out = malloc(4 * n + 1), *const out2 = device_new(4 * n);
        uint32_t *const counts = device_new(8), *const there = below(2) ? counts : NULL;
        kopt_accumulator a = kopt_accumulator_of(sum, f, rest, n), b;
        a.rounding = (kopt_rounding)below(5), a.residual_rounding = below(3) ? KOPT_STOCHASTIC : KOPT_NEAREST;
        a.seed = noise(), a.id = noise(), a.first_index = ((uint64_t)noise() << below(30)) + below(3);
        if (a.rounding == KOPT_NEAREST || a.rounding == KOPT_STOCHASTIC) a.residual = NULL;
        memset(sum, 0x7f, size), memset(sum2, 0x7f, size + shift); /* not read before the first addition */
        memset(rest, 0x7f, 2 * n), memset(rest2, 0x7f, 2 * n + shift);
        counts[0] = counts[1] = 0;
        b = a, b.sum = sum2 + shift;
        if (a.residual) b.residual = rest2 + shift;
        for (step = 0; step < 6; ++step) {
            const double scale = below(2) ? 1 : 0.3;
            if (step == 3) a.count = b.count = counts[0] = 0;
            bad += kopt_accumulator_read(&a, out) != KOPT_OK ||
                   made(kopt_cuda_accumulator_read(&b, out2, there, stream)) != KOPT_OK;
            bad += !same((void *)out, (void *)out2, KOPT_F32, n);
            fill(grad + grad_shift, g, n, -10, 2, 0, rare);
            bad += kopt_accumulator_add(&a, grad + grad_shift, g, scale) != KOPT_OK;
            bad += made(kopt_cuda_accumulator_add(&b, grad + grad_shift, g, scale, there, &plan, stream)) != KOPT_OK;
            bad += memcmp(sum, sum2 + shift, size) != 0;
            if (a.residual) bad += memcmp(rest, rest2 + shift, 2 * n) != 0;
            bad += there ? counts[0] != a.count || counts[1] != a.step || b.count != 0 || b.step != 0
                         : a.count != b.count || a.step != b.step;
        }
        bad += kopt_cuda_plan_status(&plan)->result != KOPT_OK;
        counts[0] = 1, counts[1] = 0xffffffff; /* the end of a count: nothing moves */
        bad += made(kopt_cuda_accumulator_add(&b, grad + grad_shift, g, 1, counts, &plan, stream)) != KOPT_OK;
        bad += kopt_cuda_plan_status(&plan)->result != KOPT_ERROR_STEP;
        bad += made(kopt_cuda_plan_acknowledge(&plan, stream)) != KOPT_OK;
        bad += memcmp(sum, sum2 + shift, size) != 0 || counts[0] != 1 || counts[1] != 0xffffffff;
        free(sum), free(rest), free(out), device_free(sum2), device_free(rest2), device_free(grad), device_free(out2),
            device_free(counts);
    }
    device_free(memory);
    ok(bad == 0, "%d accumulators, two sums of three gradients each: sums, residuals and what is read are the CPU's",
       lists);
}

/* ---- Graphs, and the program's own errors ------------------------------------------------------------------------ */

/* Statistics and steps that are replayed from two graphs in turn, with a schedule between them. Each graph has its own
   place for the gradient of the first tensor, which it sets. */
static void graphs(int lists) {
    static list l;
    int bad = 0, k, step, place;
    for (k = 0; k < lists; ++k) {
        const kopt_cuda_options options = {1, 0, 0.05, NULL, NULL, NULL, {0, 0, 0, 0}};
        cudaGraph_t graph[2];
        cudaGraphExec_t replay[2];
        kopt_tensor *t, moved;
        size_t size;
        void *grad;
        make(&l, 2, 5, 3000, 1u << 31);
        t = l.tensors[1][0], moved = *t, size = t->n * width(t->grad_format);
        moved.grad = grad = device_new(size + 1);
        bad += made(kopt_cuda_plan_set_options(&l.plan, &options, stream)) != KOPT_OK;
        for (place = 0; place < 2; ++place) {
            bad += cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal) != cudaSuccess;
            bad += kopt_cuda_plan_set_arrays(&l.plan, 0, 1, place ? &moved : t, stream) != KOPT_OK ||
                   kopt_cuda_plan_measure(&l.plan, stream) != KOPT_OK ||
                   kopt_cuda_plan_step(&l.plan, stream) != KOPT_OK;
            bad += cudaStreamEndCapture(stream, &graph[place]) != cudaSuccess;
            bad += cudaGraphInstantiate(&replay[place], graph[place], 0) != cudaSuccess;
        }
        for (step = 0; step < 5; ++step) {
            kopt_norm norm;
            size_t g;
            memset(&norm, 0, sizeof norm);
            for (g = 0; g < 2; ++g) kopt_norm_add_grads(&norm, l.tensors[0][g], l.counts[g]);
            for (g = 0; g < 2; ++g) {
                l.opt[g].lr *= 0.75;
                bad += kopt_cuda_plan_set_optimizer(&l.plan, g, &l.opt[g], stream) != KOPT_OK;
                l.opt[g].clip = kopt_norm_clip(&norm, 0.05, l.opt[g].grad_scale);
            }
            cpu_step(&l);
            for (g = 0; g < 2; ++g) l.opt[g].clip = 1;
            place = step & 1;
            if (place) memcpy(grad, t->grad, size), memset((void *)t->grad, 0x55, size);
            bad += cudaGraphLaunch(replay[place], stream) != cudaSuccess;
            finish();
            if (place) memcpy((void *)t->grad, grad, size);
            bad += differences(&l, 1) != 0;
            new_gradients(&l, 1u << 31);
        }
        for (place = 0; place < 2; ++place) cudaGraphExecDestroy(replay[place]), cudaGraphDestroy(graph[place]);
        device_free(grad);
        discard(&l);
    }
    ok(bad == 0, "captured graphs of new addresses, statistics and step, with a schedule: %d differ from the CPU", bad);
}

/* A captured addition counts on the GPU, and a cleared count begins a new sum. */
static void accumulation_graph(void) {
    enum { N = 5000 };
    unsigned char *const grad = device_new(2 * N), *const sum = device_new(2 * N), *const rest = device_new(2 * N);
    uint32_t *const counts = device_new(8);
    kopt_accumulator a = kopt_accumulator_of(malloc(2 * N), KOPT_BF16, malloc(2 * N), N), b = a;
    const size_t size = kopt_cuda_plan_size(NULL, 0);
    unsigned char *const memory = device_new(2 * size);
    kopt_cuda_plan plan;
    cudaGraph_t graph;
    cudaGraphExec_t replay;
    int k, bad = 0;
    b.sum = sum, b.residual = rest;
    counts[0] = counts[1] = 0;
    bad += kopt_cuda_plan_build(&plan, memory, size, NULL, 0) != KOPT_OK ||
           kopt_cuda_plan_upload(&plan, memory + size, stream) != KOPT_OK;
    bad += cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal) != cudaSuccess;
    bad += kopt_cuda_accumulator_add(&b, grad, KOPT_BF16, 0.5, counts, &plan, stream) != KOPT_OK;
    bad += cudaStreamEndCapture(stream, &graph) != cudaSuccess;
    bad += cudaGraphInstantiate(&replay, graph, 0) != cudaSuccess;
    for (k = 0; k < 6; ++k) {
        if (k == 3) bad += cudaMemsetAsync(counts, 0, 4, stream) != cudaSuccess, a.count = 0;
        fill(grad, KOPT_BF16, N, -12, 3, 0, 1u << 31);
        bad += kopt_accumulator_add(&a, grad, KOPT_BF16, 0.5) != KOPT_OK;
        bad += cudaGraphLaunch(replay, stream) != cudaSuccess;
        finish();
        bad += memcmp(a.sum, sum, 2 * N) != 0 || memcmp(a.residual, rest, 2 * N) != 0 || counts[0] != a.count ||
               counts[1] != a.step;
    }
    cudaGraphExecDestroy(replay), cudaGraphDestroy(graph);
    free(a.sum), free(a.residual), device_free(grad), device_free(sum), device_free(rest), device_free(counts);
    device_free(memory);
    ok(bad == 0, "a captured accumulation, replayed: %d differ from the CPU", bad);
}

/* An error of the program's own stays where it is. */
static void foreign_errors(void) {
    static list l;
    int bad;
    make(&l, 1, 3, 1000, 1000);
    cudaMemset(NULL, 0, (size_t)1 << 40);
    bad = cudaPeekAtLastError() == cudaSuccess;
    bad += kopt_cuda_plan_measure(&l.plan, stream) != KOPT_OK || kopt_cuda_plan_step(&l.plan, stream) != KOPT_OK;
    bad += cudaGetLastError() == cudaSuccess;
    finish();
    discard(&l);
    ok(bad == 0, "an earlier CUDA error of the program is neither returned nor cleared");
}

#ifdef PTX_DRIVER
int cuCtxSetCurrent(void *context);

/* An object without kernels takes them from texts, which the driver compiles one by one. */
static void driver(const char *path) {
    static char texts[1 << 24];
    FILE *const file = path ? fopen(path, "rb") : NULL;
    const size_t size = file ? fread(texts, 1, sizeof texts, file) : 0, room = kopt_cuda_plan_size(NULL, 0);
    unsigned char *const memory = device_new(2 * room);
    kopt_accumulator a = kopt_accumulator_of(memory, KOPT_BF16, NULL, 1);
    kopt_cuda_plan plan;
    size_t i, count = 0;
    int bad = kopt_cuda_plan_build(&plan, memory, room, NULL, 0) != KOPT_OK;
    for (i = 0; i < size; ++i) count += texts[i] == 0;
    bad += kopt_cuda_plan_upload(&plan, memory + room, stream) != KOPT_ERROR_ISA || plan.device != NULL;
    bad += kopt_cuda_accumulator_read(&a, (float *)memory + 4, NULL, stream) != KOPT_ERROR_ISA;
    bad += kopt_cuda_use_ptx(NULL, 1) != KOPT_ERROR_NULL || kopt_cuda_use_ptx(texts, 0) != KOPT_ERROR_NULL;
    bad += kopt_cuda_use_ptx(texts, size - 1) != KOPT_ERROR_BOUNDS;
    bad += kopt_cuda_use_ptx("", 1) != KOPT_OK; /* no kernel */
    bad += kopt_cuda_plan_upload(&plan, memory + room, stream) != KOPT_ERROR_ISA || ptx_loads() != 0;
    bad += kopt_cuda_use_ptx(texts, size) != KOPT_OK;
    ptx_fail_loads(222);
    bad += kopt_cuda_plan_upload(&plan, memory + room, stream) != KOPT_ERROR_ISA;
    ptx_fail_loads(0);
    bad += made(kopt_cuda_plan_upload(&plan, memory + room, stream)) != KOPT_OK;
    bad += ptx_loads() != (count == 1 ? 1 : 9); /* those of settings, moves, norm, scalars and sums */
    bad += made(kopt_cuda_plan_upload(&plan, memory + room, stream)) != KOPT_OK || ptx_loads() > 9;
    cuCtxSetCurrent(NULL); /* a thread that has not used the GPU */
    bad += made(kopt_cuda_plan_step(&plan, stream)) != KOPT_OK || kopt_cuda_plan_status(&plan)->steps != 1;
    cuCtxSetCurrent(NULL);
    bad += made(kopt_cuda_plan_set_step(&plan, 1, stream)) != KOPT_OK;
    device_free(memory);
    ok(bad == 0 && count > 0, "the driver: %d texts of PTX, of which those that are needed are loaded", (int)count);
}
#endif

int main(int argc, char **argv) {
    static const size_t anywhere[] = {0, 1, 8, 136, 137, 1003, 1024, 1537, 3000, 4999, 5000};
    static const size_t blocks[] = {0, 64, 128, 320, 384, 960, 1024, 1536, 3008, 4992, 5000};
    const int lists = argc > 1 ? atoi(argv[1]) : 400;
    int devices = 0;
    cudaError_t error = cudaGetDeviceCount(&devices);
    if (error != cudaSuccess || devices == 0) {
        printf("1..0 # SKIP no usable CUDA device (code %d)\n", (int)error);
        return 0;
    }
    cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
#ifdef PTX_DRIVER
    driver(getenv("PTX_TEXTS"));
#endif
    model();
    steps_equal(lists);
    extremes(lists < 80 ? 20 : (lists + 3) / 4); /* one in six has a number beyond the largest code */
    moves(lists / 4);
    shards_equal("bf16 moments", KOPT_BF16, anywhere, 77);
    shards_equal("8-bit moments", KOPT_Q8, blocks, 192);
    statistics(lists / 2);
    full_slots();
    full_ratios();
    windows(lists / 10 + 4);
    ratios(lists / 10 + 4);
    options();
    bad_numbers();
    refused_arrays((lists + 24) / 25);
    refused_settings((lists + 24) / 25);
    stopped_plans();
    refusals();
    accumulations(lists);
    graphs(lists < 10 ? 3 : 20);
    accumulation_graph();
#ifdef PTX_ON_CPU
    far_positions();
    loads(lists / 25);
    failing_launches();
#endif
    if (argc <= 2 || strcmp(argv[2], "no-errors") != 0) foreign_errors();
    return done();
}
