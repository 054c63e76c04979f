/* cuda_state.c - states on a GPU, blocks and arrays, equal those of kahan_opt.h: made, saved, loaded, and refused.
   Linked with the object that nvcc makes of kahan_opt_cuda.cuh. Argument: how many tensors (default 400). */
#define KAHAN_OPT_IMPLEMENTATION
#include "../../kahan_opt.h"
#include "../../kahan_opt_cuda.cuh"
#include <cuda_runtime_api.h>

#include "../unit/tap.h"
#include "../unit/inputs.h"
#include "../unit/reference.h"

#include <stdlib.h>
#include <string.h>

static cudaStream_t stream;
static uint64_t noise_state = 1;
static uint32_t noise(void) { return upper64(&noise_state); }
static uint32_t below(uint32_t n) { return scaled_to(noise(), n); }

static void finish(void) {
    const cudaError_t error = cudaStreamSynchronize(stream);
    if (error != cudaSuccess) printf("Bail out! on the GPU: %s\n", cudaGetErrorString(error)), exit(1);
}

static void *device_new(size_t size) {
    void *p = NULL;
    if (cudaMalloc(&p, size) != cudaSuccess) printf("Bail out! no memory on the GPU\n"), exit(1);
    return p;
}

static void to_device(void *to, const void *from, size_t size) {
    cudaMemcpyAsync(to, from, size, cudaMemcpyHostToDevice, stream);
    finish();
}

static void to_host(void *to, const void *from, size_t size) {
    cudaMemcpyAsync(to, from, size, cudaMemcpyDeviceToHost, stream);
    finish();
}

/* ---- A tensor, twice: on the host and on the GPU ----------------------------------------------------------------- */

/* Each array has its offset from an aligned address, and a margin on both sides that nothing may write. */
enum { WEIGHT, GRAD, STATE, COPY, VALUES, OWN, ARRAYS = OWN + 12 }; /* from OWN on: a state in arrays of the caller */
enum { MARGIN = 32, LARGEST = 1000 };
enum { WITH_COPY = 1, IN_ARRAYS = 2 };
typedef struct twins {
    kopt_optimizer opt;
    kopt_tensor host, gpu;
    kopt_state_arrays own[2];
    size_t size[ARRAYS];
    unsigned char *base[2][ARRAYS], *array[2][ARRAYS]; /* 0: on the host, 1: on the GPU */
    kopt_cuda_plan plan;
    void *bytes, *device;
} twins;

static size_t width(kopt_format f) { return f == KOPT_F32 ? 4 : 2; }

/* fp32 values of every magnitude that matters here: some of any bits (NaN, infinity, subnormal), others near 1. */
static void draw_values(unsigned char *p, size_t n, int ordinary) {
    for (; n > 0; n--, p += 4) {
        uint32_t u = noise();
        if (ordinary || below(4) != 0) u = (u & 0x807fffffu) | (117 + below(12)) << 23;
        memcpy(p, &u, 4);
    }
}

/* 16-bit values near 1, in both formats. */
static void draw_halves(unsigned char *p, size_t n) {
    for (; n > 0; n--, p += 2) {
        const uint16_t u = (uint16_t)((noise() & 0x83ff) | 0x3c00);
        memcpy(p, &u, 2);
    }
}

/* Array a of a state, from OWN on. */
static void **own_array(kopt_state_arrays *own, size_t a) {
    switch (a) {
    case OWN: return &own->residual;
    case OWN + 1: return &own->slow;
    case OWN + 2: return &own->slow_residual;
    case OWN + 11: return &own->rates;
    default: return a < OWN + 7 ? &own->moment[a - OWN - 3] : &own->scale[a - OWN - 7];
    }
}

/* Sets the pointers of a state to the arrays of array[] that have elements. */
static void set_own(kopt_tensor *t, kopt_state_arrays *own, unsigned char *const array[], const size_t size[]) {
    size_t a;
    memset(own, 0, sizeof *own);
    own->size = sizeof *own;
    for (a = OWN; a < ARRAYS; a++)
        if (size[a] != 0) *own_array(own, a) = array[a];
    t->arrays = own;
}

static void new_twins(twins *t, const kopt_optimizer *opt, kopt_format weights, size_t n, int with) {
    const ref_layout l = ref_layout_of(opt, weights, n);
    size_t a, i;
    memset(t, 0, sizeof *t);
    t->opt = *opt;
    t->host.n = n;
    t->host.grad_format = (kopt_format)below(3);
    t->host.copy_format = (kopt_format)below(3);
    t->host.id = noise();
    t->host.first_index = below(3) ? 0 : (uint64_t)noise() << 20;
    t->host.weight_format = weights;
    t->host.state_size = kopt_state_size(opt, &t->host);
    t->size[WEIGHT] = n * width(weights);
    t->size[GRAD] = n * width(t->host.grad_format);
    if (with & IN_ARRAYS) {
        t->host.state_size = 0;
        t->size[OWN] = n * l.residual_width;
        t->size[OWN + 1] = n * l.slow_width, t->size[OWN + 2] = n * l.slow_residual_width;
        t->size[OWN + 11] = opt->rounding == KOPT_FEEDBACK && weights != KOPT_F32 ? 16 : 0;
        for (i = 0; i < 4; i++) {
            t->size[OWN + 3 + i] = n * l.moment_width[i];
            t->size[OWN + 7 + i] = (size_t)(ref_coded(opt) >> i & 1) * ((n + 63) / 64);
        }
    }
    t->size[STATE] = t->host.state_size;
    t->size[COPY] = with & WITH_COPY ? n * width(t->host.copy_format) : 0;
    t->size[VALUES] = 4 * n;
    for (a = 0; a < ARRAYS; a++) {
        const size_t size = t->size[a] + 2 * MARGIN, unit = a == VALUES ? 4 : 1 + below(2);
        const size_t at = MARGIN - unit * below(4);
        t->base[0][a] = malloc(size);
        t->base[1][a] = device_new(size);
        for (i = 0; i < 2; i++) t->array[i][a] = t->base[i][a] + at;
        for (i = 0; i < size; i++) t->base[0][a][i] = (unsigned char)noise();
    }
    draw_values(t->array[0][VALUES], n, below(2) == 0);
    if (weights == KOPT_F32)
        draw_values(t->array[0][WEIGHT], n, 1);
    else
        draw_halves(t->array[0][WEIGHT], n);
    if (t->host.grad_format == KOPT_F32)
        draw_values(t->array[0][GRAD], n, 1);
    else
        draw_halves(t->array[0][GRAD], n);
    for (a = 0; a < ARRAYS; a++) to_device(t->base[1][a], t->base[0][a], t->size[a] + 2 * MARGIN);
    t->gpu = t->host;
    t->host.weight = t->array[0][WEIGHT], t->gpu.weight = t->array[1][WEIGHT];
    t->host.grad = t->array[0][GRAD], t->gpu.grad = t->array[1][GRAD];
    if (t->host.state_size != 0) t->host.state = t->array[0][STATE], t->gpu.state = t->array[1][STATE];
    if (with & WITH_COPY) t->host.copy = t->array[0][COPY], t->gpu.copy = t->array[1][COPY];
    if (with & IN_ARRAYS) {
        set_own(&t->host, &t->own[0], t->array[0], t->size);
        set_own(&t->gpu, &t->own[1], t->array[1], t->size);
    }
}

static void new_plan(twins *t) {
    const kopt_cuda_group group = {&t->opt, &t->gpu, 1};
    const size_t size = kopt_cuda_plan_size(&group, 1);
    t->bytes = malloc(size);
    t->device = device_new(size);
    if (kopt_cuda_plan_build(&t->plan, t->bytes, size, &group, 1) != KOPT_OK ||
        kopt_cuda_plan_upload(&t->plan, t->device, stream) != KOPT_OK)
        printf("Bail out! no plan\n"), exit(1);
}

static void free_twins(twins *t) {
    int a;
    finish();
    for (a = 0; a < ARRAYS; a++) free(t->base[0][a]), cudaFree(t->base[1][a]);
    free(t->bytes);
    if (t->device != NULL) cudaFree(t->device);
}

/* Are a and b the same number, or both NaN? The bits of a NaN that is converted are not specified. */
static int same_number(const unsigned char *a, const unsigned char *b, kopt_format f) {
    const uint32_t infinity = f == KOPT_F32 ? 0x7f800000u : f == KOPT_BF16 ? 0x7f80u : 0x7c00u;
    const uint32_t mask = f == KOPT_F32 ? 0x7fffffffu : 0x7fffu;
    uint32_t u = 0, v = 0;
    memcpy(&u, a, width(f));
    memcpy(&v, b, width(f));
    return u == v || ((u & mask) > infinity && (v & mask) > infinity);
}

/* The first array that differs, margins included, or ARRAYS. */
static int difference(const twins *t) {
    static unsigned char from[LARGEST * 40 + 200];
    int a;
    for (a = 0; a < ARRAYS; a++) {
        const size_t size = t->size[a] + 2 * MARGIN;
        unsigned char *const at = from + (t->array[0][a] - t->base[0][a]);
        size_t i;
        to_host(from, t->base[1][a], size);
        if (a == COPY) { /* compares the numbers, then the margins */
            for (i = 0; i < t->size[COPY]; i += width(t->host.copy_format))
                if (!same_number(at + i, t->array[0][a] + i, t->host.copy_format)) return a;
            memcpy(at, t->array[0][a], t->size[a]);
        }
        if (memcmp(from, t->base[0][a], size) != 0) return a;
    }
    return ARRAYS;
}

static kopt_optimizer any_optimizer(void) {
    kopt_optimizer o;
    switch (below(8)) {
    case 0: o = kopt_ranger(0.02); break;
    case 1: o = kopt_ranger(0.02); break;
    case 2: o = kopt_sgd(0.05, 0); break;
    case 3: o = kopt_sgd(0.05, 0.9); break;
    case 4: o = kopt_adan(0.01); break;
    case 5: o = kopt_adam(0.01), o.amsgrad = 1; break;
    default: o = kopt_adamw(0.01);
    }
    o.rounding = (kopt_rounding)below(6);
    o.first_moment_format = (kopt_format)below(4);
    o.second_moment_format = below(2) ? o.first_moment_format : (kopt_format)below(4);
    o.moment_rounding = (kopt_rounding)below(2);
    o.residual_rounding = (kopt_rounding)below(2);
    if (o.rounding == KOPT_FEEDBACK && (o.rule == KOPT_RULE_RANGER || (o.rule == KOPT_RULE_SGD && o.momentum <= 0)))
        o.rounding = KOPT_STOCHASTIC;
    if (o.rounding == KOPT_FEEDBACK && o.first_moment_format == KOPT_FP16) o.first_moment_format = KOPT_BF16;
    if (o.rounding == KOPT_FEEDBACK) o.moment_rounding = KOPT_STOCHASTIC;
    o.seed = (uint64_t)noise() << 32 | noise();
    o.step = below(1000);
    return o;
}

/* ---- kopt_cuda_state_init() -------------------------------------------------------------------------------------- */

static void inits(int count) {
    static const char *const name[] = {"weight", "gradient", "state", "copy", "fp32 weights"};
    int bad = 0, kept = 0, own = 0, sizes[3] = {0, 0, 0}, k;
    for (k = 0; k < count; k++) {
        const kopt_optimizer o = any_optimizer();
        const int from_values = below(3) != 0;
        twins t;
        kopt_result host, gpu;
        new_twins(&t, &o, (kopt_format)below(3), below(8) ? 1 + below(700) : 1 + below(10), (int)below(4));
        host = kopt_state_init(&o, &t.host, 1, from_values ? (void *)t.array[0][VALUES] : NULL);
        gpu = kopt_cuda_state_init(&o, &t.gpu, 1, from_values ? (void *)t.array[1][VALUES] : NULL, stream);
        if (host != KOPT_OK || gpu != KOPT_OK || difference(&t) != ARRAYS) {
            if (bad++ == 0)
                note("rule %d, weights %d, rounding %d, moments %d and %d, n %d, results %d and %d: %s", (int)o.rule,
                     (int)t.host.weight_format, (int)o.rounding, (int)o.first_moment_format,
                     (int)o.second_moment_format, (int)t.host.n, (int)host, (int)gpu,
                     difference(&t) < OWN ? name[difference(&t)] : "an array of the state");
        }
        kept += !from_values;
        own += t.host.arrays != NULL;
        sizes[kopt_state_size(&o, &t.host) == 0 ? 0 : o.rule == KOPT_RULE_RANGER ? 2 : 1]++;
        free_twins(&t);
    }
    ok(bad == 0, "%d states are made on the GPU as on the host, with weights and copy", count);
    ok(count < 100 || (kept > 0 && own > 0 && sizes[0] > 0 && sizes[1] > 0 && sizes[2] > 0),
       "of these %d from the weights as they are, %d in arrays, %d without a state, %d with slow weights", kept, own,
       sizes[0], sizes[2]);
}

/* The fp32 weights may be the copy itself. */
static void init_from_copy(void) {
    kopt_optimizer o = kopt_adamw(1e-3);
    twins t;
    int bad;
    do {
        new_twins(&t, &o, KOPT_BF16, 333, 1);
    } while (t.host.copy_format != KOPT_F32 && (free_twins(&t), 1));
    draw_values(t.host.copy, t.host.n, 1);
    to_device(t.gpu.copy, t.host.copy, 4 * t.host.n);
    while ((uintptr_t)t.host.copy % 4 != 0) { /* a float has to be aligned */
        t.host.copy = (char *)t.host.copy + 1, t.gpu.copy = (char *)t.gpu.copy + 1;
        t.host.n = t.gpu.n = 332;
        t.host.state_size = t.gpu.state_size = t.size[STATE];
    }
    bad = kopt_state_init(&o, &t.host, 1, t.host.copy) != KOPT_OK ||
          kopt_cuda_state_init(&o, &t.gpu, 1, t.gpu.copy, stream) != KOPT_OK;
    ok(!bad && difference(&t) == ARRAYS, "the fp32 weights may be the copy itself");
    free_twins(&t);
}

/* ---- refusals: the results are those of the host, and nothing is written ----------------------------------------- */

static void refusals(void) {
    enum { BLOCKS = 12, CASES = 20 };
    kopt_optimizer o = kopt_adamw(1e-3);
    int i, bad = 0, refused = 0;
    twins t, u;
    o.second_moment_format = KOPT_Q8;
    new_twins(&t, &o, KOPT_BF16, 100, WITH_COPY);
    new_twins(&u, &o, KOPT_BF16, 100, WITH_COPY | IN_ARRAYS);
    for (i = 0; i < CASES; i++) {
        twins *const v = i < BLOCKS ? &t : &u;
        kopt_optimizer opt = o;
        kopt_tensor pair[2];
        kopt_state_arrays own[2];
        const void *values[2] = {v->array[0][VALUES], v->array[1][VALUES]};
        kopt_result host, gpu;
        int k;
        pair[0] = v->host, pair[1] = v->gpu;
        own[0] = v->own[0], own[1] = v->own[1];
        for (k = 0; k < 2; k++) {
            kopt_tensor *const p = &pair[k];
            if (i >= BLOCKS) p->arrays = &own[k];
            switch (i) {
            case BLOCKS: p->state = v->array[k][VALUES]; break;
            case BLOCKS + 1: own[k].size++; break;
            case BLOCKS + 2: own[k].moment[0] = NULL; break;
            case BLOCKS + 3: own[k].residual = NULL; break;
            case BLOCKS + 4: own[k].scale[1] = NULL; break;
            case BLOCKS + 5: own[k].moment[0] = (char *)own[k].residual + 199; break;
            case BLOCKS + 6: own[k].scale[1] = (char *)own[k].moment[1] + 99; break;
            case BLOCKS + 7: own[k].moment[1] = p->copy; break;
            case 0: opt.made_ = 0; break;
            case 1: opt.lr = -1; break;
            case 2: pair[0].weight_format = pair[1].weight_format = (kopt_format)9; break;
            case 3: p->weight = NULL; break;
            case 4: p->state = NULL; break;
            case 5: p->state_size--; break;
            case 6: p->state = p->weight; break;
            case 7: p->copy = (char *)p->state + 70; break;
            case 8: p->copy_format = (kopt_format)5; break;
            case 9: p->first_index = (uint64_t)1 << 63; break;
            case 10: values[k] = (char *)p->weight - 4; break;
            default: values[k] = (char *)p->copy - (p->copy_format == KOPT_F32 ? 4 : 0); break;
            }
        }
        host = kopt_state_init(&opt, &pair[0], 1, values[0]);
        gpu = kopt_cuda_state_init(&opt, &pair[1], 1, values[1], stream);
        if (host == KOPT_OK || host != gpu) note("case %d: %d and %d", i, (int)host, (int)gpu), bad++;
        refused |= 1 << host;
    }
    {
        kopt_tensor host[2], gpu[2];
        host[0] = host[1] = t.host, gpu[0] = gpu[1] = t.gpu;
        host[1].id++, gpu[1].id++;
        bad += kopt_state_init(&o, host, 2, NULL) != KOPT_ERROR_OVERLAP;
        bad += kopt_cuda_state_init(&o, gpu, 2, NULL, stream) != KOPT_ERROR_OVERLAP;
    }
    bad += kopt_cuda_state_init(&o, NULL, 1, NULL, stream) != KOPT_ERROR_NULL;
    bad += kopt_cuda_state_init(NULL, &t.gpu, 1, NULL, stream) != kopt_state_init(NULL, &t.host, 1, NULL);
    ok(bad == 0 && difference(&t) == ARRAYS && difference(&u) == ARRAYS,
       "init refuses what the host refuses, and writes nothing");
    t.gpu.n = 0;
    ok(kopt_cuda_state_init(&o, &t.gpu, 1, NULL, stream) == KOPT_OK && difference(&t) == ARRAYS,
       "no elements, no work");
    free_twins(&t), free_twins(&u);
}

/* ---- save and load ----------------------------------------------------------------------------------------------- */

static void host_steps(twins *t, int count) {
    while (count-- > 0)
        if (kopt_optimizer_step(&t->opt, &t->host, 1) != KOPT_OK) printf("Bail out! a step on the host\n"), exit(1);
}
static void gpu_steps(twins *t, int count) {
    while (count-- > 0)
        if (kopt_cuda_plan_step(&t->plan, stream) != KOPT_OK) printf("Bail out! a step on the GPU\n"), exit(1);
}

/* A tensor in host memory with the description of t and its own weights and state, full of noise. */
typedef struct backup {
    kopt_optimizer opt;
    kopt_tensor tensor;
    kopt_state_arrays own;
    unsigned char *array[ARRAYS]; /* NULL: gradient, copy and fp32 weights */
} backup;

static void spoil(backup *b, const twins *t) {
    int a;
    for (a = 0; a < ARRAYS; a++)
        if (b->array[a] != NULL) memset(b->array[a], 0x5a, t->size[a] + 1);
}

static void new_backup(backup *b, const twins *t) {
    int a;
    memset(b, 0, sizeof *b);
    b->opt = t->opt, b->tensor = t->host;
    for (a = 0; a < ARRAYS; a++)
        if (a == WEIGHT || a == STATE || a >= OWN)
            cudaHostAlloc((void **)&b->array[a], t->size[a] + 1, cudaHostAllocDefault);
    spoil(b, t);
    b->tensor.weight = b->array[WEIGHT];
    if (t->size[STATE] != 0) b->tensor.state = b->array[STATE];
    if (t->host.arrays != NULL) set_own(&b->tensor, &b->own, b->array, t->size);
    b->tensor.copy = b->tensor.grad = NULL;
}

static void free_backup(backup *b) {
    int a;
    for (a = 0; a < ARRAYS; a++)
        if (b->array[a] != NULL) cudaFreeHost(b->array[a]);
}

/* Is it what the host has, and nothing behind it? */
static int backup_differs(const backup *b, const twins *t) {
    int a, bad = 0;
    for (a = 0; a < ARRAYS; a++)
        if (b->array[a] != NULL)
            bad += memcmp(b->array[a], t->array[0][a], t->size[a]) != 0 || b->array[a][t->size[a]] != 0x5a;
    return bad;
}

/* Steps, save, kopt_save, kopt_load, load into other memory, steps: each time the bits of the host, which goes on
   without a break. */
static void checkpoints(int count) {
    int bad_save = 0, bad_list = 0, bad_load = 0, bad_steps = 0, blocks = 0, own = 0, k, a;
    for (k = 0; k < count; k++) {
        const kopt_optimizer o = any_optimizer();
        const int steps = 1 + (int)below(4);
        unsigned char *ours, *theirs;
        uint32_t begun = 0;
        size_t size;
        backup b;
        twins t;
        new_twins(&t, &o, KOPT_BF16, 1 + below(600), (int)below(4));
        bad_save += kopt_state_init(&o, &t.host, 1, NULL) != KOPT_OK;
        bad_save += kopt_cuda_state_init(&o, &t.gpu, 1, NULL, stream) != KOPT_OK;
        new_plan(&t);
        new_backup(&b, &t);
        host_steps(&t, steps);
        gpu_steps(&t, steps);
        b.opt.step = 12345;
        bad_save += kopt_cuda_state_save(&t.plan, 0, &b.opt, &t.gpu, &b.tensor, stream) != KOPT_OK;
        finish();
        to_host(&begun, kopt_cuda_plan_steps(&t.plan, 0), 4);
        bad_save += begun != o.step + (uint32_t)steps || begun != t.opt.step || b.opt.step != begun;
        bad_save += difference(&t) != ARRAYS || backup_differs(&b, &t);
        blocks += t.size[STATE] != 0, own += t.host.arrays != NULL;
        size = kopt_save_size(&t.opt, &t.host, 1);
        ours = malloc(size), theirs = malloc(size);
        bad_list += kopt_save(&t.opt, &t.host, 1, ours, size) != KOPT_OK;
        bad_list += kopt_save(&b.opt, &b.tensor, 1, theirs, size) != KOPT_OK || memcmp(ours, theirs, size) != 0;
        /* a new program: nothing is left but the checkpoint */
        spoil(&b, &t);
        for (a = 0; a < ARRAYS; a++)
            if (a != GRAD && a != VALUES && t.size[a] != 0) cudaMemsetAsync(t.array[1][a], 0xee, t.size[a], stream);
        b.opt = o;
        bad_load += kopt_load(&b.opt, &b.tensor, 1, theirs, size) != KOPT_OK || b.opt.step != begun;
        bad_load += kopt_cuda_state_load(&b.opt, &t.gpu, &b.tensor, stream) != KOPT_OK;
        finish();
        if (difference(&t) != ARRAYS) {
            if (bad_load++ == 0) note("loaded: array %d, n %d", difference(&t), (int)t.host.n);
        }
        if (below(2)) { /* a new plan, or the old one */
            free(t.bytes), cudaFree(t.device);
            t.opt = b.opt;
            new_plan(&t);
        } else {
            bad_load += kopt_cuda_plan_set_step(&t.plan, 7, stream) != KOPT_OK;
            bad_load += kopt_cuda_plan_set_optimizer(&t.plan, 0, &b.opt, stream) != KOPT_OK;
            bad_load += kopt_cuda_plan_set_step(&t.plan, b.opt.step, stream) != KOPT_OK;
        }
        host_steps(&t, steps);
        gpu_steps(&t, steps);
        if (difference(&t) != ARRAYS) {
            if (bad_steps++ == 0) note("steps after loading: array %d, n %d", difference(&t), (int)t.host.n);
        }
        free(ours), free(theirs);
        free_backup(&b);
        free_twins(&t);
    }
    ok(bad_save == 0 && (count < 20 || own > 0),
       "%d saved blocks, and %d states in arrays, are those of the host, with the step that the GPU counted", blocks,
       own);
    ok(bad_list == 0, "... and kopt_save makes the same checkpoint of them");
    ok(bad_load == 0, "loaded into other memory they are the host's states");
    ok(bad_steps == 0, "and the run goes on with the same bits");
}

/* Steps that the GPU skips are not counted. */
static void skipped(void) {
    kopt_optimizer o = kopt_adamw(1e-3);
    kopt_cuda_options options = {0, 0, 0, NULL, NULL, NULL, {0, 0, 0, 0}};
    float yes = 1, *flag = device_new(4);
    backup b;
    twins t;
    int bad = 0;
    o.seed = 12345, o.step = 10;
    new_twins(&t, &o, KOPT_BF16, 50, 0);
    new_backup(&b, &t);
    to_device(flag, &yes, 4);
    options.found_inf = flag;
    bad += kopt_cuda_state_init(&o, &t.gpu, 1, NULL, stream) != KOPT_OK;
    new_plan(&t);
    gpu_steps(&t, 2);
    bad += kopt_cuda_plan_set_options(&t.plan, &options, stream) != KOPT_OK;
    gpu_steps(&t, 3);
    bad += kopt_cuda_state_save(&t.plan, 0, &b.opt, &t.gpu, &b.tensor, stream) != KOPT_OK;
    finish();
    ok(bad == 0 && b.opt.step == 12, "skipped steps are not counted in what is saved");
    cudaFree(flag), free_backup(&b), free_twins(&t);
}

/* Foreign blocks and wrong arguments: nothing is written. */
static void bad_blocks(void) {
    kopt_optimizer o = kopt_adamw(1e-3), other = kopt_adam(1e-3);
    kopt_tensor wrong;
    backup b, before;
    size_t size;
    twins t;
    int bad = 0;
    new_twins(&t, &o, KOPT_BF16, 300, 1);
    size = t.host.state_size;
    bad += kopt_state_init(&o, &t.host, 1, NULL) != KOPT_OK;
    bad += kopt_cuda_state_init(&o, &t.gpu, 1, NULL, stream) != KOPT_OK;
    new_plan(&t);
    new_backup(&b, &t);
    before = b;
    bad += kopt_cuda_state_save(NULL, 0, &b.opt, &t.gpu, &b.tensor, stream) != KOPT_ERROR_NULL;
    bad += kopt_cuda_state_save(&t.plan, 0, NULL, &t.gpu, &b.tensor, stream) != KOPT_ERROR_NULL;
    bad += kopt_cuda_state_save(&t.plan, 0, &b.opt, NULL, &b.tensor, stream) != KOPT_ERROR_NULL;
    bad += kopt_cuda_state_save(&t.plan, 0, &b.opt, &t.gpu, NULL, stream) != KOPT_ERROR_NULL;
    bad += kopt_cuda_state_save(&t.plan, 1, &b.opt, &t.gpu, &b.tensor, stream) != KOPT_ERROR_BOUNDS;
    wrong = b.tensor, wrong.weight = NULL;
    bad += kopt_cuda_state_save(&t.plan, 0, &b.opt, &t.gpu, &wrong, stream) != KOPT_ERROR_NULL;
    wrong = b.tensor, wrong.state_size = size - 1;
    bad += kopt_cuda_state_save(&t.plan, 0, &b.opt, &t.gpu, &wrong, stream) != KOPT_ERROR_SIZE;
    wrong = b.tensor, wrong.n = 299;
    bad += kopt_cuda_state_save(&t.plan, 0, &b.opt, &t.gpu, &wrong, stream) != KOPT_ERROR_MISMATCH;
    wrong = b.tensor, wrong.id++;
    bad += kopt_cuda_state_save(&t.plan, 0, &b.opt, &t.gpu, &wrong, stream) != KOPT_ERROR_MISMATCH;
    wrong = b.tensor, wrong.first_index++;
    bad += kopt_cuda_state_save(&t.plan, 0, &b.opt, &t.gpu, &wrong, stream) != KOPT_ERROR_MISMATCH;
    bad += kopt_cuda_state_save(&t.plan, 0, &b.opt, &t.gpu, &t.gpu, stream) != KOPT_ERROR_OVERLAP;
    wrong = b.tensor, wrong.state = (char *)t.gpu.state + 8;
    bad += kopt_cuda_state_save(&t.plan, 0, &b.opt, &t.gpu, &wrong, stream) != KOPT_ERROR_OVERLAP;
    bad += kopt_cuda_plan_steps(&t.plan, 1) != NULL || kopt_cuda_plan_steps(NULL, 0) != NULL;
    finish();
    bad += b.array[WEIGHT][0] != 0x5a || b.array[STATE][0] != 0x5a || memcmp(&before, &b, sizeof b) != 0;
    ok(bad == 0 && difference(&t) == ARRAYS, "save refuses wrong arguments");

    bad = kopt_cuda_state_load(&o, &t.gpu, &b.tensor, stream) != KOPT_ERROR_STATE; /* noise */
    bad += kopt_cuda_state_save(&t.plan, 0, &b.opt, &t.gpu, &b.tensor, stream) != KOPT_OK;
    finish();
    bad += kopt_cuda_state_load(NULL, &t.gpu, &b.tensor, stream) != KOPT_ERROR_NULL;
    bad += kopt_cuda_state_load(&o, NULL, &b.tensor, stream) != KOPT_ERROR_NULL;
    bad += kopt_cuda_state_load(&o, &t.gpu, NULL, stream) != KOPT_ERROR_NULL;
    other.rounding = KOPT_EXACT;
    bad += kopt_cuda_state_load(&other, &t.gpu, &b.tensor, stream) != KOPT_ERROR_MISMATCH;
    wrong = t.gpu, wrong.id++;
    bad += kopt_cuda_state_load(&o, &wrong, &b.tensor, stream) != KOPT_ERROR_MISMATCH;
    wrong = t.gpu, wrong.state_size--;
    bad += kopt_cuda_state_load(&o, &wrong, &b.tensor, stream) != KOPT_ERROR_SIZE;
    bad += kopt_cuda_state_load(&o, &t.gpu, &t.gpu, stream) != KOPT_ERROR_OVERLAP;
    b.array[STATE][12] ^= 1; /* the id in the block */
    bad += kopt_cuda_state_load(&o, &t.gpu, &b.tensor, stream) != KOPT_ERROR_MISMATCH;
    finish();
    ok(bad == 0 && difference(&t) == ARRAYS, "load refuses noise and foreign blocks before it writes");
    free_backup(&b), free_twins(&t);
}

/* Arrays on one side only, and arrays that are not two: nothing is written. */
static void bad_arrays(void) {
    kopt_optimizer o = kopt_adamw(1e-3);
    kopt_tensor wrong;
    kopt_state_arrays own;
    backup b, block;
    twins t, u;
    int bad = 0;
    new_twins(&t, &o, KOPT_BF16, 300, IN_ARRAYS);
    new_twins(&u, &o, KOPT_BF16, 300, 0);
    u.host.id = u.gpu.id = t.gpu.id, u.host.first_index = u.gpu.first_index = t.gpu.first_index;
    bad += kopt_state_init(&o, &t.host, 1, NULL) != KOPT_OK || kopt_state_init(&o, &u.host, 1, NULL) != KOPT_OK;
    bad += kopt_cuda_state_init(&o, &t.gpu, 1, NULL, stream) != KOPT_OK;
    bad += kopt_cuda_state_init(&o, &u.gpu, 1, NULL, stream) != KOPT_OK;
    new_plan(&t);
    new_backup(&b, &t), new_backup(&block, &u);
    bad += kopt_cuda_state_save(&t.plan, 0, &b.opt, &t.gpu, &block.tensor, stream) != KOPT_ERROR_OPTION;
    bad += kopt_cuda_state_save(&t.plan, 0, &b.opt, &u.gpu, &b.tensor, stream) != KOPT_ERROR_OPTION;
    bad += kopt_cuda_state_load(&o, &t.gpu, &u.host, stream) != KOPT_ERROR_OPTION;
    bad += kopt_cuda_state_load(&o, &u.gpu, &t.host, stream) != KOPT_ERROR_OPTION;
    own = b.own, own.moment[1] = (char *)t.own[1].residual + 599;
    wrong = b.tensor, wrong.arrays = &own;
    bad += kopt_cuda_state_save(&t.plan, 0, &b.opt, &t.gpu, &wrong, stream) != KOPT_ERROR_OVERLAP;
    bad += kopt_cuda_state_load(&o, &t.gpu, &wrong, stream) != KOPT_ERROR_OVERLAP;
    own = b.own, own.moment[1] = NULL;
    bad += kopt_cuda_state_save(&t.plan, 0, &b.opt, &t.gpu, &wrong, stream) != KOPT_ERROR_NULL;
    bad += kopt_cuda_state_load(&o, &t.gpu, &wrong, stream) != KOPT_ERROR_NULL;
    finish();
    bad += b.array[WEIGHT][0] != 0x5a || b.array[OWN][0] != 0x5a || block.array[STATE][0] != 0x5a;
    ok(bad == 0 && difference(&t) == ARRAYS && difference(&u) == ARRAYS,
       "save and load refuse a block for arrays, arrays for a block, and arrays in two places");
    free_backup(&b), free_backup(&block), free_twins(&t), free_twins(&u);
}

/* ---- capture ----------------------------------------------------------------------------------------------------- */

static void captures(void) {
    kopt_optimizer o = kopt_adamw(1e-3);
    cudaGraph_t graph;
    cudaGraphExec_t replay;
    cudaStream_t captured;
    backup b;
    void *other;
    twins t;
    int bad = 0, i;
    new_twins(&t, &o, KOPT_BF16, 100, 0);
    new_backup(&b, &t);
    bad += kopt_state_init(&o, &t.host, 1, NULL) != KOPT_OK;
    bad += kopt_cuda_state_init(&o, &t.gpu, 1, NULL, stream) != KOPT_OK;
    new_plan(&t);
    other = device_new(t.plan.size);
    finish();
    captured = stream;
    bad += cudaStreamBeginCapture(captured, cudaStreamCaptureModeRelaxed) != cudaSuccess;
    bad += kopt_cuda_plan_upload(&t.plan, other, captured) != KOPT_ERROR_CAPTURE;
    bad += t.plan.device != t.device;
    bad += kopt_cuda_state_init(&o, &t.gpu, 1, NULL, captured) != KOPT_ERROR_CAPTURE;
    bad += kopt_cuda_state_load(&o, &t.gpu, &t.host, captured) != KOPT_ERROR_CAPTURE;
    bad += kopt_cuda_plan_step(&t.plan, captured) != KOPT_OK;
    bad += kopt_cuda_state_save(&t.plan, 0, &b.opt, &t.gpu, &b.tensor, captured) != KOPT_OK;
    bad += cudaStreamEndCapture(captured, &graph) != cudaSuccess;
    bad += cudaGraphInstantiate(&replay, graph, 0) != cudaSuccess;
    for (i = 0; i < 3; i++) bad += cudaGraphLaunch(replay, stream) != cudaSuccess;
    ok(bad == 0, "a capture refuses upload, init and load, and goes on");
    host_steps(&t, 3);
    finish();
    ok(b.opt.step == 3 && !backup_differs(&b, &t), "each replay steps and saves: step %d", (int)b.opt.step);
    ok(strstr(kopt_result_string(KOPT_ERROR_CAPTURE), "captured") != NULL, "the result says why");
    cudaGraphExecDestroy(replay), cudaGraphDestroy(graph);
    cudaFree(other), free_backup(&b), free_twins(&t);
}

/* ---- what is summed over GPUs ------------------------------------------------------------------------------------ */

static void words(void) {
    kopt_optimizer o = kopt_stable_adamw(1e-3);
    size_t norm = 9;
    kopt_norm sum, host = {0};
    twins t;
    int bad = 0;
    new_twins(&t, &o, KOPT_BF16, 200, 0);
    bad += kopt_cuda_state_init(&o, &t.gpu, 1, NULL, stream) != KOPT_OK;
    bad += kopt_cuda_plan_norm(&t.plan, &norm) != NULL || norm != 0;
    new_plan(&t);
    bad += kopt_cuda_plan_norm(&t.plan, &norm) == NULL || norm * sizeof(uint64_t) != sizeof(kopt_norm);
    bad += kopt_cuda_plan_norm(&t.plan, NULL) != kopt_cuda_plan_norm(&t.plan, &norm);
    bad += kopt_cuda_plan_measure(&t.plan, stream) != KOPT_OK;
    finish();
    to_host(&sum, kopt_cuda_plan_norm(&t.plan, NULL), norm * 8);
    bad += kopt_norm_add(&host, t.host.grad, t.host.grad_format, t.host.n) != KOPT_OK;
    ok(bad == 0 && memcmp(&sum, &host, sizeof sum) == 0, "the words of the norm");
    free_twins(&t);
}

int main(int argc, char **argv) {
    const int count = argc > 1 ? atoi(argv[1]) : 400;
    int devices = 0;
    const cudaError_t error = cudaGetDeviceCount(&devices);
    if (error != cudaSuccess || devices == 0) {
        printf("1..0 # SKIP no usable CUDA device (code %d)\n", (int)error);
        return 0;
    }
    cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    inits(count);
    init_from_copy();
    refusals();
    checkpoints(count / 2);
    skipped();
    bad_blocks();
    bad_arrays();
    captures();
    words();
    return done();
}
