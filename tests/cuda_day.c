/* cuda_day.c - what takes a GPU minutes: every number through conversions and functions, and arrays of more than 2^31
   elements. The results are hashed and compared with tests/cuda_day.txt, which the CPU's functions made.

       cuda_day hashes               prints that table: on the CPU, in all its threads
       cuda_day convert [BITS]       fp32 to bf16 and fp16, nearest and stochastic, and back
       cuda_day functions [BITS]     exp, log, tanh, erf, erfc of fp32
       cuda_day maps [BITS]          kopt_map and kopt_map_backward of bf16 and fp16
       cuda_day large [N]            N elements, by default 2^31 + 17
   With BITS (below 32) only so many numbers, whose hashes the CPU makes on the spot. All but `hashes` need -DGPU and
   the object that nvcc made of kahan_opt_cuda.cuh. */
#define _DEFAULT_SOURCE /* sysconf() */
#define KAHAN_OPT_IMPLEMENTATION
#define KAHAN_OPT_VMATH
#include "../kahan_opt.h"
#ifdef GPU
#include "../kahan_opt_cuda.cuh"

#include "cuda_device.h"
#endif
#include "tap.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { PIECE = 1 << 16 }; /* numbers that are hashed together */

/* ---- Threads: each takes every so-manieth piece ------------------------------------------------------------------ */

typedef void piece_work(void *context, uint64_t piece);
typedef struct share {
    piece_work *work;
    void *context;
    uint64_t first, step, end;
} share;

static void *take_share(void *argument) {
    const share *const s = argument;
    uint64_t piece;
    for (piece = s->first; piece < s->end; piece += s->step) s->work(s->context, piece);
    return NULL;
}

enum { THREADS_AT_MOST = 64 };

static void in_threads(piece_work *work, void *context, uint64_t pieces) {
    const long processors = sysconf(_SC_NPROCESSORS_ONLN);
    const size_t threads = processors < 1 ? 1 : processors > THREADS_AT_MOST ? THREADS_AT_MOST : (size_t)processors;
    pthread_t ids[THREADS_AT_MOST];
    share shares[THREADS_AT_MOST];
    size_t i;
    for (i = 0; i < threads; ++i) {
        shares[i].work = work, shares[i].context = context;
        shares[i].first = i, shares[i].step = threads, shares[i].end = pieces;
        if (pthread_create(&ids[i], NULL, take_share, &shares[i]) != 0) abort();
    }
    for (i = 0; i < threads; ++i) pthread_join(ids[i], NULL);
}

/* ---- What is hashed ---------------------------------------------------------------------------------------------- */

typedef enum kind { NEAREST, STOCHASTIC, FUNCTION, MAP, BACKWARD } kind;
typedef struct item {
    char name[40];
    kind kind;
    int function;
    kopt_format from, to;
} item;

static size_t width(kopt_format f) { return f == KOPT_F32 ? 4 : 2; }

static const char *const format_names[] = {"fp32", "bf16", "fp16"};
static const char *const function_names[] = {"exp", "log", "tanh", "erf", "erfc"};
static const char *const map_names[] = {"exp",        "log",        "tanh",           "sigmoid",    "silu",
                                        "gelu",       "gelu-tanh",  "softplus",       "tanh-slope", "sigmoid-slope",
                                        "silu-slope", "gelu-slope", "gelu-tanh-slope"};

/* The items of a command, or all of them for "hashes"; their number. */
static size_t list_items(const char *command, item *items) {
    const int all = strcmp(command, "hashes") == 0;
    size_t n = 0;
    int f, k;
    if (all || strcmp(command, "convert") == 0)
        for (k = NEAREST; k <= STOCHASTIC; ++k)
            for (f = KOPT_BF16; f <= KOPT_FP16; ++f) {
                const item there = {"", (kind)k, 0, KOPT_F32, (kopt_format)f};
                items[n] = there;
                snprintf(items[n++].name, sizeof items->name, "fp32-%s-%s", format_names[f],
                         k == NEAREST ? "nearest" : "stochastic");
                if (k == NEAREST) {
                    const item back = {"", NEAREST, 0, (kopt_format)f, KOPT_F32};
                    items[n] = back;
                    snprintf(items[n++].name, sizeof items->name, "%s-fp32", format_names[f]);
                }
            }
    if (all || strcmp(command, "functions") == 0)
        for (k = 0; k < 5; ++k) {
            const item function = {"", FUNCTION, k, KOPT_F32, KOPT_F32};
            items[n] = function;
            snprintf(items[n++].name, sizeof items->name, "%s-fp32", function_names[k]);
        }
    if (all || strcmp(command, "maps") == 0)
        for (f = KOPT_BF16; f <= KOPT_FP16; ++f)
            for (k = KOPT_EXP; k <= KOPT_GELU_TANH_SLOPE; ++k) {
                const item map = {"", MAP, k, (kopt_format)f, (kopt_format)f};
                items[n] = map;
                snprintf(items[n++].name, sizeof items->name, "map-%s-%s", map_names[k], format_names[f]);
                if (k > KOPT_SOFTPLUS || k == KOPT_LOG) continue;
                items[n] = map, items[n].kind = BACKWARD;
                snprintf(items[n++].name, sizeof items->name, "backward-%s-%s", map_names[k], format_names[f]);
            }
    return n;
}

enum { ITEMS_AT_MOST = 64 };

static uint64_t numbers_of(const item *t, int bits) {
    const int most = t->from == KOPT_F32 ? 32 : 16;
    return UINT64_C(1) << (bits < most ? bits : most);
}

/* Number i of `count`: all words in order, or a sample. */
static uint32_t number(const item *t, uint64_t i, uint64_t count) {
    const uint64_t all = t->from == KOPT_F32 ? UINT64_C(1) << 32 : 65536;
    return (uint32_t)((count == all ? i : i * 2654435769u) & (all - 1));
}

static void fill(void *to, const item *t, uint64_t first, uint64_t count, size_t n) {
    uint32_t *const words = to;
    uint16_t *const halves = to;
    size_t i;
    if (t->from == KOPT_F32)
        for (i = 0; i < n; ++i) words[i] = number(t, first + i, count);
    else
        for (i = 0; i < n; ++i) halves[i] = (uint16_t)number(t, first + i, count);
}

/* The second input of kopt_map_backward: any bits. */
static void fill_slopes(uint16_t *to, uint64_t first, size_t n) {
    size_t i;
    for (i = 0; i < n; ++i) to[i] = (uint16_t)((first + i) * 40503u + 12345u);
}

static kopt_random_key key_of(uint64_t first) {
    kopt_random_key key;
    key.seed = 1, key.step = 2, key.id = 3, key.first_index = first;
    return key;
}

static kopt_result on_cpu(const item *t, void *out, const void *x, const void *dy, uint64_t first, size_t n) {
    typedef kopt_result function(const kopt_vmath *, float *, const float *, size_t);
    static function *const functions[] = {kopt_vmath_exp, kopt_vmath_log, kopt_vmath_tanh, kopt_vmath_erf,
                                          kopt_vmath_erfc};
    switch (t->kind) {
    case NEAREST: return kopt_convert(out, t->to, x, t->from, n);
    case STOCHASTIC: return kopt_convert_stochastic(out, t->to, x, t->from, n, key_of(first));
    case FUNCTION: return functions[t->function](kopt_vmath_builtin(), out, x, n);
    case MAP: return kopt_map(NULL, (kopt_function)t->function, out, x, t->from, n);
    default: return kopt_map_backward(NULL, (kopt_function)t->function, out, dy, x, t->from, n);
    }
}

/* ---- Hashes: of pieces, sums of products of neighbours, each with a word of its place added; of an item, the sum of
        its pieces' hashes, mixed with their places. The order of the work does not matter. A NaN counts as a NaN,
        because its other bits are not specified. ------------------------------------------------------------------- */

static uint64_t mixed(uint64_t x) { /* splitmix64 (Steele, Lea, Flood 2014) */
    x += UINT64_C(0x9e3779b97f4a7c15);
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return x ^ x >> 31;
}

static uint64_t piece_hash(const void *p, kopt_format f, uint64_t piece, size_t n) { /* n is even */
    const uint32_t infinity = f == KOPT_F32 ? 0x7f800000u : f == KOPT_BF16 ? 0x7f80u : 0x7c00u;
    const uint32_t magnitude = f == KOPT_F32 ? 0x7fffffffu : 0x7fffu;
    const uint32_t *const words = p;
    const uint16_t *const halves = p;
    uint64_t sum = 0;
    uint32_t i;
    for (i = 0; i < n; i += 2) {
        uint32_t a = f == KOPT_F32 ? words[i] : halves[i], b = f == KOPT_F32 ? words[i + 1] : halves[i + 1];
        a = (a & magnitude) > infinity ? magnitude : a;
        b = (b & magnitude) > infinity ? magnitude : b;
        a += (i + 1) * 2654435761u, b += (i + 2) * 2654435761u;
        sum += (uint64_t)a * b;
    }
    return mixed(sum ^ mixed(piece));
}

typedef struct hashing {
    const item *item;
    const unsigned char *results; /* NULL: they are made here */
    uint64_t count, first_piece;
    uint64_t *hashes; /* of the pieces */
} hashing;

static void hash_piece(void *context, uint64_t k) {
    const hashing *const h = context;
    const item *const t = h->item;
    const uint64_t piece = h->first_piece + k, first = piece * PIECE;
    const size_t n = h->count < PIECE ? (size_t)h->count : PIECE;
    uint32_t x[PIECE], out[PIECE];
    uint16_t dy[PIECE];
    const void *results = out;
    if (h->results) {
        results = h->results + k * PIECE * width(t->to);
    } else {
        fill(x, t, first, h->count, n), fill_slopes(dy, first, n);
        if (on_cpu(t, out, x, dy, first, n) != KOPT_OK) abort();
    }
    h->hashes[k] = piece_hash(results, t->to, piece, n);
}

static uint64_t hash_pieces(const item *t, const void *results, uint64_t count, uint64_t first, uint64_t n) {
    const uint64_t pieces = (n + PIECE - 1) / PIECE;
    hashing h;
    uint64_t sum = 0, k;
    h.item = t, h.results = results, h.count = count, h.first_piece = first / PIECE;
    h.hashes = malloc(pieces * sizeof *h.hashes);
    if (!h.hashes) abort();
    in_threads(hash_piece, &h, pieces);
    for (k = 0; k < pieces; ++k) sum += h.hashes[k];
    free(h.hashes);
    return sum;
}

static int print_hashes(void) {
    static item items[ITEMS_AT_MOST];
    const size_t n = list_items("hashes", items);
    size_t k;
    puts("# Hashes of what the CPU makes of every number, NaNs being equal. tests/cuda_day.c prints this file:");
    puts("#     cc -std=c99 -O2 -o build/cuda_day tests/cuda_day.c -lm -lpthread && build/cuda_day hashes");
    for (k = 0; k < n; ++k) {
        const uint64_t count = numbers_of(&items[k], 32);
        printf("%s %016llx\n", items[k].name, (unsigned long long)hash_pieces(&items[k], NULL, count, 0, count));
        fflush(stdout);
    }
    return 0;
}

#ifdef GPU
/* ---- Every number on the GPU ------------------------------------------------------------------------------------- */

static kopt_result on_gpu(const item *t, void *out, const void *x, const void *dy, uint64_t first, size_t n) {
    typedef kopt_result function(float *, const float *, size_t, void *);
    static function *const functions[] = {kopt_cuda_vmath_exp, kopt_cuda_vmath_log, kopt_cuda_vmath_tanh,
                                          kopt_cuda_vmath_erf, kopt_cuda_vmath_erfc};
    switch (t->kind) {
    case NEAREST: return kopt_cuda_convert(out, t->to, x, t->from, n, stream);
    case STOCHASTIC: return kopt_cuda_convert_stochastic(out, t->to, x, t->from, n, key_of(first), stream);
    case FUNCTION: return functions[t->function](out, x, n, stream);
    case MAP: return kopt_cuda_map((kopt_function)t->function, out, x, t->from, n, stream);
    default: return kopt_cuda_map_backward((kopt_function)t->function, out, dy, x, t->from, n, stream);
    }
}

/* The hash of an item in the table; 0: it has none. */
static uint64_t from_table(const char *name) {
    FILE *const table = fopen("tests/cuda_day.txt", "r");
    char line[200], found[100];
    unsigned long long hash, result = 0;
    if (!table) return 0;
    while (fgets(line, sizeof line, table))
        if (sscanf(line, "%99s %llx", found, &hash) == 2 && strcmp(found, name) == 0) result = hash;
    fclose(table);
    return result;
}

typedef struct filling {
    const item *item;
    void *to;
    uint64_t first, count;
    size_t n;
} filling;

static void fill_piece(void *context, uint64_t k) {
    const filling *const f = context;
    const size_t n = f->n < PIECE ? f->n : PIECE;
    fill((unsigned char *)f->to + k * PIECE * width(f->item->from), f->item, f->first + k * PIECE, f->count, n);
}

/* The first number of which the GPU makes something else, as a comment. */
static void say_difference(const item *t, const unsigned char *results, uint64_t first, uint64_t count, size_t n) {
    static uint32_t x[PIECE], out[PIECE];
    static uint16_t dy[PIECE];
    size_t k, i;
    for (k = 0; k < n; k += PIECE) {
        const size_t m = n < PIECE ? n : PIECE, w = width(t->to);
        const unsigned char *const seen = results + k * w;
        fill(x, t, first + k, count, m), fill_slopes(dy, first + k, m);
        if (on_cpu(t, out, x, dy, first + k, m) != KOPT_OK) abort();
        if (piece_hash(seen, t->to, 0, m) == piece_hash(out, t->to, 0, m)) continue;
        for (i = 0; i < m; i += 2) {
            const unsigned char *const expected = (const unsigned char *)out + i * w;
            uint32_t a[2] = {0, 0}, b[2] = {0, 0};
            int j;
            if (memcmp(expected, seen + i * w, 2 * w) == 0) continue;
            for (j = 0; j < 2; ++j) { /* numbers of 2 bytes are printed as such */
                uint16_t c, d;
                memcpy(&c, expected + (size_t)j * w, 2), memcpy(&d, seen + (i + (size_t)j) * w, 2);
                a[j] = c, b[j] = d;
                if (w == 4) memcpy(&a[j], expected + (size_t)j * w, 4), memcpy(&b[j], seen + (i + (size_t)j) * w, 4);
            }
            note("%s: number %llu (%08x) and its neighbour: CPU %08x %08x, GPU %08x %08x", t->name,
                 (unsigned long long)(first + k + i), (unsigned)number(t, first + k + i, count), (unsigned)a[0],
                 (unsigned)a[1], (unsigned)b[0], (unsigned)b[1]);
            return;
        }
    }
}

/* All items of a command over one chunk of numbers after another; the items of a command may differ in their formats.
   A wrong hash is followed by a second pass, which compares with the CPU to name a number. */
static void every_number(const char *command, int bits) {
    enum { CHUNK = 1 << 26 };
    static item items[ITEMS_AT_MOST];
    static uint64_t seen[ITEMS_AT_MOST], expected[ITEMS_AT_MOST];
    const size_t n = list_items(command, items), most = bits < 26 ? (size_t)1 << (bits < 16 ? 16 : bits) : CHUNK;
    unsigned char *const host = host_new(4 * most), *const x = device_new(4 * most), *const out = device_new(4 * most);
    uint16_t *const dy = device_new(2 * 65536), *const slopes = malloc(2 * 65536);
    int pass, wrong = 0;
    size_t k;
    fill_slopes(slopes, 0, 65536), to_device(dy, slopes, 2 * 65536);
    for (pass = 0; pass < 2; ++pass) {
        uint64_t first;
        for (first = 0; first < UINT64_C(1) << bits; first += most) {
            const item *filled = NULL;
            for (k = 0; k < n; ++k) {
                const item *const t = &items[k];
                const uint64_t count = numbers_of(t, bits);
                const size_t m = count < most ? (size_t)count : most;
                if (first >= count || (pass == 1 && seen[k] == expected[k])) continue;
                if (!filled || filled->from != t->from) { /* items with the same input follow each other */
                    filling f;
                    f.item = t, f.to = host, f.first = first, f.count = count, f.n = m;
                    in_threads(fill_piece, &f, (m + PIECE - 1) / PIECE);
                    to_device(x, host, m * width(t->from));
                    filled = t;
                }
                CHECK(cudaMemsetAsync(out, 0x5a, m * width(t->to), stream));
                DONE(on_gpu(t, out, x, dy, first, m));
                from_device(host, out, m * width(t->to));
                if (pass == 0)
                    seen[k] += hash_pieces(t, host, count, first, m);
                else
                    say_difference(t, host, first, count, m);
            }
        }
        if (pass == 1) break;
        for (k = 0; k < n; ++k) {
            const uint64_t count = numbers_of(&items[k], bits);
            expected[k] = bits < 32 ? hash_pieces(&items[k], NULL, count, 0, count) : from_table(items[k].name);
            wrong += seen[k] != expected[k];
            ok(seen[k] == expected[k], "%s, %llu numbers: hash %016llx, the CPU's %016llx", items[k].name,
               (unsigned long long)count, (unsigned long long)seen[k], (unsigned long long)expected[k]);
            row(items[k].name, (double)count, "numbers", seen[k] == expected[k] ? "pass" : "fail");
        }
        if (wrong == 0) break;
    }
    device_free(x), device_free(out), device_free(dy), free(slopes);
}

/* ---- More than 2^31 elements: windows of them are what the CPU makes of the same windows as shards --------------- */

enum { WINDOW = 8192 }; /* and fewer at the end */

/* NULL, and a skipped test, if the GPU has too little. */
static unsigned char *memory_for(const char *name, uint64_t n, size_t size) {
    if (device_room() >= size + size / 16) return device_new(size);
    skip("the GPU's memory is too small for it");
    row(name, (double)n, "elements", "skip");
    return NULL;
}

static void large_step(const char *name, kopt_format moment_format, uint64_t n) {
    const uint64_t middle = n > UINT64_C(1) << 31 ? UINT64_C(1) << 31 : n / 2;
    const uint64_t windows[] = {0, (n / 3) & ~UINT64_C(255), (middle - 4096) & ~UINT64_C(255),
                                (n - 4096) & ~UINT64_C(255)}; /* blocks of 8-bit moments begin there */
    kopt_optimizer o = kopt_adamw(0.01);
    const size_t room = (size_t)((n * 2 + 255) & ~UINT64_C(255));
    kopt_tensor t;
    kopt_cuda_group group;
    kopt_cuda_plan plan;
    kopt_norm norm, sum;
    unsigned char *memory, *device, *bytes;
    static uint16_t grads[1 << 16];
    size_t size, state_size, k, a, bad = 0;
    uint64_t i;
    o.moment_format = moment_format;
    state_size = kopt_state_size(&o, (size_t)n);
    memory = memory_for(name, n, 2 * room + state_size);
    if (!memory) return;
    t = kopt_tensor_of(memory, memory + room, KOPT_BF16, (size_t)n, memory + 2 * room, state_size);
    group.opt = &o, group.tensors = &t, group.count = 1;
    CHECK(cudaMemsetAsync(t.weight, 0x3c, (size_t)n * 2, stream));
    CHECK(cudaMemsetAsync(t.grad, 0x3d, (size_t)n * 2, stream));
    CHECK(cudaMemsetAsync(t.state, 0, state_size, stream));
    size = kopt_cuda_plan_size(&group, 1);
    bytes = malloc(size), device = device_new(size);
    DONE(kopt_cuda_plan_build(&plan, bytes, size, &group, 1));
    DONE(kopt_cuda_plan_upload(&plan, device, bytes, stream));
    DONE(kopt_cuda_plan_measure(&plan, stream));
    from_device(&norm, kopt_cuda_plan_norm(&plan, NULL), sizeof norm);
    for (k = 0; k < 3; ++k) DONE(kopt_cuda_plan_step(&plan, stream));
    finish();
    for (k = 0; k < sizeof windows / sizeof windows[0]; ++k) {
        static uint16_t weight[WINDOW], grad[WINDOW], seen[WINDOW];
        static unsigned char state[KOPT_STATE_BYTES(WINDOW, 6)];
        const size_t m = n - windows[k] < WINDOW ? (size_t)(n - windows[k]) : WINDOW;
        kopt_optimizer p = kopt_adamw(0.01);
        kopt_tensor w = kopt_tensor_of(weight, grad, KOPT_BF16, m, state, sizeof state);
        p.moment_format = moment_format;
        w.state_size = kopt_state_size(&p, m);
        memset(weight, 0x3c, sizeof weight), memset(grad, 0x3d, sizeof grad);
        w.first_index = windows[k];
        DONE(kopt_state_init(&p, &w, NULL));
        for (a = 0; a < 3; ++a) DONE(kopt_optimizer_step(&p, &w, 1));
        from_device(seen, (uint16_t *)t.weight + windows[k], 2 * m);
        bad += memcmp(seen, weight, 2 * m) != 0;
        from_device(seen, (unsigned char *)t.state + 64 + windows[k] * 2, 2 * m); /* the compensation */
        bad += memcmp(seen, state + 64, 2 * m) != 0;
    }
    memset(&sum, 0, sizeof sum), memset(grads, 0x3d, sizeof grads);
    for (i = 0; i < n; i += 1 << 16)
        DONE(kopt_norm_add(&sum, grads, KOPT_BF16, n - i < 1 << 16 ? (size_t)(n - i) : 1 << 16));
    bad += memcmp(&sum, &norm, sizeof sum) != 0;
    free(bytes), device_free(device), device_free(memory);
    ok(bad == 0, "%s, %llu elements: three steps and the norm; %d parts differ from the CPU", name,
       (unsigned long long)n, (int)bad);
    row(name, (double)n, "elements", bad == 0 ? "pass" : "fail");
}

static void large_conversion(const char *name, uint64_t n) {
    const size_t room = (size_t)((n * 4 + 255) & ~UINT64_C(255));
    const uint64_t windows[] = {0, n / 3, (n > UINT64_C(1) << 31 ? UINT64_C(1) << 31 : n / 2) - 4096, n - 4097};
    unsigned char *memory;
    size_t k, bad = 0;
    memory = memory_for(name, n, room + room / 2);
    if (!memory) return;
    CHECK(cudaMemsetAsync(memory, 0x3d, (size_t)n * 4, stream)); /* 0.046203..., half a bf16 unit and some */
    DONE(kopt_cuda_convert_stochastic(memory + room, KOPT_BF16, memory, KOPT_F32, (size_t)n, key_of(0), stream));
    for (k = 0; k < sizeof windows / sizeof windows[0]; ++k) {
        static uint32_t x[WINDOW];
        static uint16_t expected[WINDOW], seen[WINDOW];
        const size_t m = n - windows[k] < WINDOW ? (size_t)(n - windows[k]) : WINDOW;
        memset(x, 0x3d, sizeof x);
        DONE(kopt_convert_stochastic(expected, KOPT_BF16, x, KOPT_F32, m, key_of(windows[k])));
        from_device(seen, memory + room + windows[k] * 2, 2 * m);
        bad += memcmp(seen, expected, 2 * m) != 0;
    }
    device_free(memory);
    ok(bad == 0, "%s, %llu elements: %d windows differ from the CPU", name, (unsigned long long)n, (int)bad);
    row(name, (double)n, "elements", bad == 0 ? "pass" : "fail");
}
#endif

int main(int argc, char **argv) {
    const char *const command = argc > 1 ? argv[1] : "";
    if (strcmp(command, "hashes") == 0) return print_hashes();
#ifdef GPU
    if (!device_begin()) return 77;
    if (strcmp(command, "large") == 0) {
        const uint64_t n = argc > 2 ? strtoull(argv[2], NULL, 10) : (UINT64_C(1) << 31) + 17;
        if (n < 2 * WINDOW) return 2;
        large_step("AdamW bf16 KAHAN", KOPT_BF16, n);
        large_step("AdamW bf16 KAHAN 8-bit moments", KOPT_Q8, n);
        large_conversion("fp32 to bf16 stochastic", n);
        return done();
    }
    if (strcmp(command, "convert") == 0 || strcmp(command, "functions") == 0 || strcmp(command, "maps") == 0) {
        const int bits = argc > 2 ? atoi(argv[2]) : 32;
        if (bits < 1 || bits > 32) return 2;
        every_number(command, bits);
        return done();
    }
#endif
    fputs("usage: cuda_day hashes | convert [BITS] | functions [BITS] | maps [BITS] | large [N]\n", stderr);
    return 2;
}
