/* cuda_fake.c - a small CUDA runtime that runs kernels on the CPU, from the C that ptx.py writes. It goes below the
   object that nvcc makes, in place of NVIDIA's library; as libcuda.so.1 it is the driver, too. The threads of a block
   are coroutines: a barrier or shuffle stops a thread until the others are there.

   It ends the program with "Bail out!" and the kernel, block and thread at:
     - an access that is not aligned, or not inside one live allocation, block's shared memory, frame or parameter;
     - a barrier that some threads miss; lanes that ended, or are outside of the mask, at a warp's operation;
     - a race: two threads access the same byte, one writes, not both are atomic, and no barrier lies between. Two
       blocks are ordered only if one has a fence and then an atomic operation, and the other then one at the same place
       and a fence: the pattern of the last block. At most two readers of a byte are remembered.
   New memory is full of noise: cudaMalloc's, and the shared memory of each block. Work waits in its stream until
   something synchronizes; streams that nothing orders run the newest first. During a capture, what allocates, frees,
   copies at once or synchronizes is refused and ends the capture. A kernel is loaded by cudaFuncGetAttributes() or by
   its first launch, which a capture refuses, too. Copies from pageable memory are recorded with their address, and are
   done at once outside of a capture.

   Not modelled: ptxas and what it makes of the PTX, memory order beyond the above, speed, more than one device or host
   thread, dynamic shared memory, grids of more than one dimension. Results hold for one order of threads and blocks. */
#define _GNU_SOURCE
#undef _FORTIFY_SOURCE /* it forbids _longjmp to another stack */
#include "cuda_fake.h"

#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <ucontext.h>
#include <unistd.h>

enum { PARAMS = 8, THREADS = 1024, STACK = 1 << 18, FRAMES = 1 << 14, SHARED = 1 << 16, FREED = 1000 };
typedef struct kernel {
    const char *name;
    void (*run)(thread_ *);
    int params, waits, loaded;
    uint32_t sizes[PARAMS], shared;
    const void *host;
    uint64_t longest;
} kernel;

static kernel kernels[1000];
static int kernel_count;
static uint64_t all_instructions;

uint64_t ptx_instructions(void) { return all_instructions; }

void kernel_(const char *name, void (*run)(thread_ *), int params, const uint32_t *sizes, uint32_t shared, int waits) {
    kernel *k = kernels;
    while (k < kernels + kernel_count && strcmp(k->name, name) != 0) ++k; /* a later one takes the place */
    if (k == kernels + kernel_count) ++kernel_count;
    if (kernel_count > 1000 || params > PARAMS || shared > SHARED) printf("Bail out! too large: %s\n", name), exit(1);
    k->name = name, k->run = run, k->params = params, k->waits = waits, k->shared = shared, k->loaded = 0;
    memcpy(k->sizes, sizes, (size_t)params * sizeof *sizes);
}

enum { PROFILES = 8 };
static struct profile {
    uint64_t *counts;
    const uint32_t (*lines)[2];
    size_t n;
} profiles[PROFILES];

void profile_of_(uint64_t *counts, const uint32_t (*lines)[2], size_t n) {
    struct profile *p = profiles;
    while (p < profiles + PROFILES && p->counts) ++p;
    if (p == profiles + PROFILES) printf("Bail out! too many files of kernels\n"), exit(1);
    p->counts = counts, p->lines = lines, p->n = n;
}

void ptx_profile(FILE *file) {
    for (struct profile *p = profiles; p < profiles + PROFILES; ++p)
        for (size_t i = 0; i < p->n; ++i) {
            if (file && p->counts[i])
                fprintf(file, "%u %u %llu\n", (unsigned)p->lines[i][0], (unsigned)p->lines[i][1],
                        (unsigned long long)p->counts[i]);
            p->counts[i] = 0;
        }
}

uint64_t ptx_longest_thread(const char *name) {
    uint64_t longest = 0;
    for (int i = 0; i < kernel_count; ++i)
        if (strstr(kernels[i].name, name) && kernels[i].longest > longest) longest = kernels[i].longest;
    return longest;
}

/* ---- The launch that runs ---------------------------------------------------------------------------------------- */

static struct launch {
    const kernel *k;
    uint32_t ntid, block_epoch, warp_epoch[THREADS / 32]; /* barriers of this block so far */
    uint8_t *released;                                    /* blocks that had a fence and then an atomic operation */
} now;

static void fail(const thread_ *t, const char *what, uint64_t address) {
    printf("Bail out! %s in %s, block %u, thread %u, address %#llx\n", what, now.k ? now.k->name : "?",
           t ? t->ctaid : 0, t ? t->tid : 0, (unsigned long long)address);
    fflush(stdout);
    _exit(1);
}

static uint32_t noise_state = 1;
static void noise(unsigned char *p, size_t n) {
    for (; n; --n) *p++ = (unsigned char)((noise_state = noise_state * 1664525u + 1013904223u) >> 24);
}

/* ---- Races ------------------------------------------------------------------------------------------------------- */

/* What a thread does between two barriers is a segment. Segments have numbers, which grow over all launches. */
typedef struct segment {
    uint32_t thread, block_epoch, warp_epoch; /* thread: of the whole grid */
} segment;
typedef struct cell { /* for one byte */
    uint32_t write;   /* the segment times 4, and 1 if it was atomic, and 2 if that after a fence */
    uint32_t read[2]; /* the last segment, and one of another thread, if possible of another warp */
} cell;
static segment *segments; /* of this launch */
static cell shared_cells[SHARED];
static uint32_t segment_base = 1, segment_count, segment_room;

static uint32_t segment_of(thread_ *t) {
    if (t->segment == 0) {
        if (segment_count == segment_room)
            segments = realloc(segments, (segment_room = 2 * segment_room + 1024) * sizeof *segments);
        segments[segment_count] = (segment){t->ctaid * t->ntid + t->tid, now.block_epoch, now.warp_epoch[t->tid / 32]};
        t->segment = segment_base + segment_count++;
    }
    return t->segment;
}

static const segment *of_launch(uint32_t s) { return s < segment_base ? NULL : &segments[s - segment_base]; }
static uint32_t warp_of(const segment *s) { return s->thread / now.ntid * 32 + s->thread % now.ntid / 32; }

/* Can a thread's access come before or after what it does now? Blocks have shared memory of their own. */
static int concurrent(uint32_t number, const thread_ *t, int shared) {
    const segment *s = of_launch(number);
    if (s == NULL || s->thread == t->ctaid * t->ntid + t->tid) return 0;
    if (s->thread / t->ntid != t->ctaid) return !shared && !(t->acquired && now.released[s->thread / t->ntid]);
    if (s->block_epoch != now.block_epoch) return 0;
    return s->thread % t->ntid / 32 != t->tid / 32 || s->warp_epoch == now.warp_epoch[t->tid / 32];
}

static void mark(cell *c, uint32_t size, thread_ *t, int what, int shared, uint64_t address) {
    const uint32_t me = segment_of(t);
    for (; size; --size, ++c, ++address) {
        const uint32_t writer = c->write >> 2;
        if (writer != me && !(what == ATOMIC_ && c->write & 1) && concurrent(writer, t, shared))
            fail(t, shared ? "a race in shared memory" : "a race in global memory", address);
        if (what == LOAD_) {
            const segment *last = of_launch(c->read[0]), *other = of_launch(c->read[1]), *mine = of_launch(me);
            if (c->read[0] == me) continue;
            if (last && last->thread != mine->thread &&
                (warp_of(last) != warp_of(mine) || !other || warp_of(other) == warp_of(mine) ||
                 !concurrent(c->read[1], t, shared)))
                c->read[1] = c->read[0];
            c->read[0] = me;
        } else {
            if (concurrent(c->read[0], t, shared) || concurrent(c->read[1], t, shared))
                fail(t, shared ? "a race in shared memory" : "a race in global memory", address);
            if (what == ATOMIC_ && c->write & 2 && of_launch(writer)) t->saw_release = 1;
            c->write = me << 2 | (what == ATOMIC_ ? 1 | t->fenced << 1 : 0);
        }
    }
}

void fence_(thread_ *t) {
    t->acquired |= t->saw_release;
    t->fenced = 1;
}

/* ---- Memory ------------------------------------------------------------------------------------------------------ */

typedef struct allocation {
    unsigned char *start;
    size_t size;
    cell *cells;
    uint64_t freed; /* when; 0: it lives */
} allocation;
static allocation *allocations; /* in the order of their addresses; freed ones stay for a while */
static size_t allocation_count, allocation_room, last_found, freed_now;
static uint64_t frees;

static size_t place_of(uint64_t address) { /* the number of allocations that begin at or before an address */
    size_t low = 0, high = allocation_count;
    while (low < high) {
        const size_t middle = (low + high) / 2;
        if ((uint64_t)(uintptr_t)allocations[middle].start <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static allocation *find(uint64_t address, size_t size) {
    allocation *a = allocations + last_found;
    if (last_found >= allocation_count || address - (uint64_t)(uintptr_t)a->start >= a->size) {
        const size_t place = place_of(address);
        if (place == 0) return NULL;
        a = allocations + (last_found = place - 1);
    }
    address -= (uint64_t)(uintptr_t)a->start;
    return address <= a->size && size <= a->size - address ? a : NULL;
}

void variable_(void *start, size_t size) {
    const size_t place = place_of((uint64_t)(uintptr_t)start);
    if (allocation_count == allocation_room)
        allocations = realloc(allocations, (allocation_room = 2 * allocation_room + 64) * sizeof *allocations);
    memmove(allocations + place + 1, allocations + place, (allocation_count++ - place) * sizeof *allocations);
    allocations[place] = (allocation){start, size, NULL, 0};
}

static void *allocate(size_t size) {
    unsigned char *p = aligned_alloc(512, (size + 1023) & ~(size_t)511); /* no two touch */
    if (p == NULL) return NULL;
    noise(p, size < 1 << 20 ? size : 1 << 20);
    variable_(p, size);
    return p;
}

static int release(void *p) { /* it stays for a while, so that a use of it is noticed */
    allocation *a = find((uint64_t)(uintptr_t)p, 0);
    if (a == NULL || a->start != p || a->freed) return 0;
    free(a->cells), a->cells = NULL, a->freed = ++frees, ++freed_now;
    if (freed_now > FREED || a->size > 1 << 20) { /* now the oldest, or this one if it is large, goes */
        if (a->size <= 1 << 20)
            for (size_t i = 0; i < allocation_count; ++i)
                if (allocations[i].freed && allocations[i].freed < a->freed) a = &allocations[i];
        free(a->start), --freed_now, --allocation_count;
        memmove(a, a + 1, (size_t)(allocations + allocation_count - a) * sizeof *a);
    }
    return 1;
}

static void aligned(const thread_ *t, uint64_t address, uint32_t size) {
    if (address % size) fail(t, "a misaligned access", address);
}

static allocation *owner(const thread_ *t, uint64_t address, uint32_t size) {
    allocation *a = find(address, size);
    aligned(t, address, size);
    if (a == NULL) fail(t, "an access outside of every allocation", address);
    if (a->freed) fail(t, "an access of freed memory", address);
    return a;
}

unsigned char *global_(thread_ *t, uint64_t address, uint32_t size, int what) {
    allocation *a = owner(t, address, size);
    if (a->cells == NULL) a->cells = calloc(a->size, sizeof *a->cells);
    mark(a->cells + (address - (uint64_t)(uintptr_t)a->start), size, t, what, 0, address);
    if (what == ATOMIC_) now.released[t->ctaid] |= t->fenced;
    return (unsigned char *)(uintptr_t)address;
}

unsigned char *const_(thread_ *t, uint64_t address, uint32_t size, int what) {
    (void)what, (void)owner(t, address, size);
    return (unsigned char *)(uintptr_t)address;
}

unsigned char *shared_(thread_ *t, uint64_t address, uint32_t size, int what) {
    address = (uint32_t)address;
    aligned(t, address, size);
    if (address + size > now.k->shared) fail(t, "an access outside of shared memory", address);
    mark(shared_cells + address, size, t, what, 1, address);
    return t->shared + address;
}

unsigned char *frame_(thread_ *t, uint32_t size) {
    unsigned char *frame = t->local + t->local_size;
    t->local_size += (size + 15) & ~15u;
    if (t->local_size > FRAMES) fail(t, "no room for local memory", size);
    memset(frame, 0xa5, size);
    return frame;
}

unsigned char *local_(thread_ *t, uint64_t address, uint32_t size, int what) {
    const uint64_t offset = address - (uint64_t)(uintptr_t)t->local;
    (void)what, aligned(t, address, size);
    if (offset >= t->local_size || size > t->local_size - offset) fail(t, "an access outside of local memory", address);
    return (unsigned char *)(uintptr_t)address;
}

static int in_param(const thread_ *t, uint64_t address, uint32_t size) {
    for (int i = 0; i < now.k->params; ++i) {
        const uint64_t offset = address - (uint64_t)(uintptr_t)t->param[i];
        if (offset < now.k->sizes[i] && size <= now.k->sizes[i] - offset) return 1;
    }
    return 0;
}

unsigned char *param_(thread_ *t, uint64_t address, uint32_t size, int what) {
    aligned(t, address, size);
    if (what != LOAD_ || !in_param(t, address, size)) fail(t, "an access outside of a parameter", address);
    return (unsigned char *)(uintptr_t)address;
}

unsigned char *generic_(thread_ *t, uint64_t address, uint32_t size, int what) {
    if (address - (uint64_t)(uintptr_t)t->shared < SHARED)
        return shared_(t, address - (uint64_t)(uintptr_t)t->shared, size, what);
    if (address - (uint64_t)(uintptr_t)t->local < FRAMES) return local_(t, address, size, what);
    return in_param(t, address, size) ? param_(t, address, size, what) : global_(t, address, size, what);
}

/* ---- Threads of a block ------------------------------------------------------------------------------------------ */

static struct fiber {
    jmp_buf at;
    ucontext_t context;
    int started;
} fibers[THREADS];
static thread_ threads[THREADS];
static jmp_buf scheduler;
static uint32_t current;

static void fiber_main(void) { /* block after block */
    for (;;) {
        const uint32_t i = current;
        now.k->run(&threads[i]);
        threads[i].state = ENDED_;
        if (_setjmp(fibers[i].at) == 0) _longjmp(scheduler, 1);
    }
}

static void resume(uint32_t i) {
    current = i;
    if (_setjmp(scheduler) != 0) return;
    if (fibers[i].started) _longjmp(fibers[i].at, 1);
    fibers[i].started = 1;
    getcontext(&fibers[i].context);
    fibers[i].context.uc_stack.ss_sp = malloc(STACK), fibers[i].context.uc_stack.ss_size = STACK;
    makecontext(&fibers[i].context, fiber_main, 0);
    setcontext(&fibers[i].context);
}

uint64_t wait_(thread_ *t, int what, uint32_t mask, uint64_t x, uint32_t b, uint32_t c) {
    t->state = what, t->mask = mask, t->x = x, t->b = b, t->c = c;
    if (_setjmp(fibers[t->tid].at) == 0) _longjmp(scheduler, 1);
    return t->result;
}

/* Threads passed a barrier: what they did is done, and what one knows of other blocks, all know. */
static void passed(thread_ *t, uint32_t count) {
    uint8_t fenced = 0, acquired = 0;
    for (uint32_t i = 0; i < count; ++i) fenced |= t[i].fenced, acquired |= t[i].acquired;
    for (uint32_t i = 0; i < count; ++i) t[i].segment = 0, t[i].fenced = fenced, t[i].acquired = acquired;
}

static int release_block(void) {
    uint64_t set = 0;
    for (uint32_t i = 0; i < now.ntid; ++i) {
        if (threads[i].state != threads[0].state || threads[i].state < BLOCK_ || threads[i].state >= WARP_) return 0;
        set += threads[i].x != 0;
    }
    for (uint32_t i = 0; i < now.ntid; ++i) {
        const int what = threads[i].state;
        threads[i].result = what == BLOCK_AND_ ? set == now.ntid : what == BLOCK_OR_ ? set != 0 : set;
        threads[i].state = RUNNING_;
    }
    ++now.block_epoch;
    passed(threads, now.ntid);
    return 1;
}

/* Which lane a shuffle reads, as the PTX manual says. */
static uint32_t source_lane(thread_ *t) {
    const uint32_t lane = t->tid & 31, b = t->b & 31, fixed = t->c >> 8 & 31;
    const uint32_t lowest = lane & fixed, highest = lowest | (t->c & 31 & ~fixed);
    uint32_t from = t->state == SHUFFLE_UP_     ? lane - b
                    : t->state == SHUFFLE_DOWN_ ? lane + b
                    : t->state == SHUFFLE_BFLY_ ? lane ^ b
                                                : lowest | (b & ~fixed);
    t->valid = t->state == SHUFFLE_UP_ ? (int32_t)from >= (int32_t)highest : from <= highest;
    return t->valid ? from : lane;
}

static uint64_t reduced(int what, int is_signed, uint64_t a, uint64_t b) {
    const int less = is_signed ? (int32_t)a < (int32_t)b : a < b;
    switch (what) {
    case REDUCE_ADD_: return (uint32_t)(a + b);
    case REDUCE_MIN_: return less ? a : b;
    case REDUCE_MAX_: return less ? b : a;
    case REDUCE_AND_: return a & b;
    case REDUCE_OR_: return a | b;
    default: return a ^ b;
    }
}

static void warp_results(thread_ *warp, uint32_t mask, int what) {
    for (uint32_t i = 0; i < 32; ++i) {
        thread_ *t = warp + i;
        uint32_t set = 0, same = 0, k;
        uint64_t sum = t->x;
        if (!(mask >> i & 1)) continue;
        for (k = 0; k < 32; ++k) {
            if (!(mask >> k & 1)) continue;
            set |= (uint32_t)(warp[k].x != 0) << k, same |= (uint32_t)(warp[k].x == t->x) << k;
            if (k != i && what >= REDUCE_ADD_) sum = reduced(what, (int)t->b, sum, warp[k].x);
        }
        if (what >= SHUFFLE_UP_ && what <= SHUFFLE_IDX_) {
            k = source_lane(t);
            if (!(mask >> k & 1)) fail(t, "a shuffle reads a lane outside of its mask", k);
            t->result = warp[k].x;
        } else if (what >= REDUCE_ADD_) {
            t->result = sum;
        } else if (what == MATCH_ANY_) {
            t->result = same;
        } else if (what == MATCH_ALL_) {
            t->valid = same == mask, t->result = t->valid ? mask : 0;
        } else {
            t->result = what == VOTE_BALLOT_ ? set
                        : what == VOTE_ANY_  ? set != 0
                        : what == VOTE_ALL_  ? set == mask
                                             : set == 0 || set == mask;
        }
    }
    for (uint32_t i = 0; i < 32; ++i)
        if (mask >> i & 1) warp[i].state = RUNNING_;
}

static int release_warp(uint32_t w) {
    thread_ *warp = threads + 32 * w;
    const uint32_t lanes = now.ntid - 32 * w < 32 ? now.ntid - 32 * w : 32;
    const uint32_t all = 0xffffffff >> (32 - lanes);
    int released = 0;
    for (uint32_t i = 0; i < lanes; ++i) {
        const uint32_t mask = warp[i].mask;
        const int what = warp[i].state;
        uint32_t there = 0;
        if (what < WARP_) continue;
        if (!(mask >> i & 1) || mask & ~all)
            fail(warp + i, "a mask without its own lane, or of lanes that are not", mask);
        for (uint32_t k = 0; k < lanes; ++k) {
            if (mask >> k & 1 && warp[k].state == ENDED_)
                fail(warp + k, "a lane ended before its warp's barrier", mask);
            there |= (uint32_t)(warp[k].state == what && warp[k].mask == mask) << k;
        }
        if ((there & mask) != mask) continue;
        warp_results(warp, mask, what);
        released = 1;
        if (what == WARP_ && mask == all) ++now.warp_epoch[w], passed(warp, lanes);
    }
    return released;
}

static void run_block(void) {
    for (;;) {
        uint32_t ended = 0, i;
        int released;
        for (i = 0; i < now.ntid; ++i)
            if (threads[i].state == RUNNING_) resume(i);
        for (i = 0; i < now.ntid; ++i) ended += threads[i].state == ENDED_;
        if (ended == now.ntid) return;
        released = release_block();
        for (i = 0; i < now.ntid; i += 32) released |= release_warp(i / 32);
        for (i = 0; !released; ++i)
            if (threads[i].state > ENDED_) fail(&threads[i], "a barrier that some threads miss", threads[i].mask);
    }
}

static uint32_t last_blocks = UINT32_MAX;

void ptx_last_blocks(uint32_t n) { last_blocks = n; }

static void launch(kernel *k, uint32_t blocks, uint32_t ntid, unsigned char **params) {
    static unsigned char shared[SHARED] __attribute__((aligned(256)));
    static unsigned char *frames;
    if (frames == NULL) frames = malloc((size_t)THREADS * FRAMES);
    segment_base += segment_count, segment_count = 0;
    if (segment_base > 1u << 29) { /* begin again */
        for (size_t i = 0; i < allocation_count; ++i) free(allocations[i].cells), allocations[i].cells = NULL;
        memset(shared_cells, 0, sizeof shared_cells), segment_base = 1;
    }
    now.k = k, now.ntid = ntid, now.released = calloc(blocks, 1);
    k->longest = 0;
    for (uint32_t block = blocks < last_blocks ? 0 : blocks - last_blocks; block < blocks; ++block) {
        now.block_epoch = 0, memset(now.warp_epoch, 0, sizeof now.warp_epoch);
        noise(shared, k->shared);
        for (uint32_t i = 0; i < ntid; ++i) {
            thread_ t = {.tid = i, .ctaid = block, .ntid = ntid, .nctaid = blocks, .shared = shared, .param = params};
            t.local = frames + (k->waits ? (size_t)i * FRAMES : 0);
            threads[i] = t;
            if (!k->waits) k->run(&threads[i]);
        }
        if (k->waits) run_block();
        for (uint32_t i = 0; i < ntid; ++i) {
            all_instructions += threads[i].instructions;
            if (threads[i].instructions > k->longest) k->longest = threads[i].instructions;
        }
    }
    free(now.released);
    now.k = NULL;
}

/* ---- Streams and graphs ------------------------------------------------------------------------------------------ */

enum { INVALID_VALUE = 1, NO_MEMORY = 2, INVALID_CONFIGURATION = 9, INVALID_FUNCTION = 98, INVALID_HANDLE = 400 };
enum { CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901, CAPTURE_IMPLICIT = 906 };
typedef struct node {
    enum { LAUNCH, SET, COPY, GRAPH } kind;
    kernel *k;
    uint32_t blocks, ntid;
    unsigned char *params[PARAMS];
    void *to, *staged;
    const void *from;
    size_t size;
    int value;
    struct graph *graph;
    struct node *next;
} node;
typedef struct graph {
    node *first;
    int users;
} graph;
typedef struct stream {
    node *first, **last;
    int blocking, capturing, invalid, mode;
    struct stream *next;
} stream;
static stream legacy = {.last = &legacy.first}, *streams; /* the newest first */
static int last_error;

static int error(int code) { return code ? last_error = code : 0; }

static void discard(node *n) {
    for (int i = 0; n->kind == LAUNCH && i < n->k->params; ++i) free(n->params[i]);
    free(n->staged), free(n);
}

static void drop(graph *g) {
    if (--g->users > 0) return;
    for (node *n = g->first, *next; n; n = next) next = n->next, discard(n);
    free(g);
}

static int in_allocation(const void *p, size_t size) { /* 1: yes; 0: the host's; -1: beyond the end of one, or freed */
    allocation *a = find((uint64_t)(uintptr_t)p, 0);
    if (a == NULL) return 0;
    return a->freed || !find((uint64_t)(uintptr_t)p, size) ? -1 : 1;
}

static void play(node *n) {
    if (n->kind == GRAPH) {
        for (node *m = n->graph->first; m; m = m->next) play(m);
        drop(n->graph);
    } else if (n->kind == LAUNCH) {
        launch(n->k, n->blocks, n->ntid, n->params);
    } else if (in_allocation(n->to, n->size) < 0 || (n->from && in_allocation(n->from, n->size) < 0)) {
        fail(NULL, "a copy or memset of freed memory", (uint64_t)(uintptr_t)n->to);
    } else if (n->kind == SET) {
        memset(n->to, n->value, n->size);
    } else {
        memcpy(n->to, n->staged ? n->staged : n->from, n->size);
    }
}

static void run_stream(stream *s) {
    while (s->first) {
        node *n = s->first;
        s->first = n->next;
        play(n), discard(n);
    }
    s->last = &s->first;
}

static void run_blocking(void) {
    for (stream *s = streams; s; s = s->next)
        if (s->blocking && !s->capturing) run_stream(s);
    run_stream(&legacy);
}

static void run_all(void) {
    for (stream *s = streams; s; s = s->next)
        if (!s->capturing) run_stream(s);
    run_blocking();
}

static stream *stream_of(void *handle) { return handle == NULL || handle == (void *)1 ? &legacy : handle; }

static int put(void *handle, node n) {
    stream *s = stream_of(handle);
    node *copy = malloc(sizeof n);
    for (stream *other = streams; other && s == &legacy; other = other->next)
        if (other->blocking && other->capturing) return other->invalid = 1, error(CAPTURE_IMPLICIT);
    if (!s->capturing && (s == &legacy || s->blocking)) { /* these wait for each other */
        if (s == &legacy)
            for (stream *other = streams; other; other = other->next) other->blocking ? run_stream(other) : (void)0;
        else
            run_stream(&legacy);
    }
    *copy = n, copy->next = NULL;
    *s->last = copy, s->last = &copy->next;
    return 0;
}

/* What no capture allows: it ends all of them. */
static int refused(void) {
    int found = 0;
    for (stream *s = streams; s; s = s->next)
        if (s->capturing && s->mode != 2) s->invalid = found = 1; /* 2: relaxed */
    return found;
}

/* ---- The functions of the runtime -------------------------------------------------------------------------------- */

typedef struct {
    unsigned x, y, z;
} dim3;

void **__cudaRegisterFatBinary(void *binary) { return binary; }
void __cudaRegisterFatBinaryEnd(void **h) { (void)h; }
void __cudaUnregisterFatBinary(void **h) { (void)h; }
void __cudaRegisterFunction(void **h, const char *host, char *device, const char *name, int limit, void *tid, void *bid,
                            void *block, void *grid, int *size) {
    (void)h, (void)device, (void)limit, (void)tid, (void)bid, (void)block, (void)grid, (void)size;
    for (int i = 0; i < kernel_count; ++i)
        if (strcmp(kernels[i].name, name) == 0) {
            kernels[i].host = host;
            return;
        }
    printf("Bail out! no PTX of %s\n", name), exit(1);
}
int __cudaPopCallConfiguration(void) { abort(); } /* these are for <<<...>>> */
int __cudaPushCallConfiguration(void) { abort(); }
int __cudaGetKernel(void) { abort(); }
int __cudaLaunchKernel(void) { abort(); }

static int load_error, launches_left;

void ptx_unload(void) {
    for (int i = 0; i < kernel_count; ++i) kernels[i].loaded = 0;
}
void ptx_fail_loads(int code) { load_error = code; }
void ptx_fail_launch(int n) { launches_left = n; }

/* Loads a kernel. */
static int load(kernel *k) {
    if (k == NULL) return INVALID_FUNCTION;
    if (k->loaded) return 0;
    if (load_error) return load_error;
    if (refused()) return CAPTURE_UNSUPPORTED;
    k->loaded = 1;
    return 0;
}

static kernel *kernel_of(const void *host) {
    for (int i = 0; i < kernel_count; ++i)
        if (kernels[i].host == host) return &kernels[i];
    return NULL;
}

int cudaFuncGetAttributes(void *attributes, const void *host) { /* nobody reads the attributes */
    return (void)attributes, error(load(kernel_of(host)));
}

static int launch_kernel(kernel *k, dim3 grid, dim3 block, void **arguments, size_t dynamic, void *handle) {
    node n = {.kind = LAUNCH, .k = k, .blocks = grid.x, .ntid = block.x};
    const int code = load(k);
    if (code) return code;
    if (launches_left && --launches_left == 0) return NO_MEMORY;
    if (grid.y != 1 || grid.z != 1 || block.y != 1 || block.z != 1 || dynamic)
        fail(NULL, "not modelled: dimensions or dynamic shared memory", 0);
    if (grid.x == 0 || grid.x >> 31 || block.x == 0 || block.x > THREADS) return INVALID_CONFIGURATION;
    for (int i = 0; i < k->params; ++i) {
        n.params[i] = aligned_alloc(16, (k->sizes[i] + 15) & ~15u);
        memcpy(n.params[i], arguments[i], k->sizes[i]);
    }
    return put(handle, n);
}

int cudaLaunchKernel(const void *host, dim3 grid, dim3 block, void **arguments, size_t dynamic, void *handle) {
    return error(launch_kernel(kernel_of(host), grid, block, arguments, dynamic, handle));
}

int cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, void *handle) {
    node n = {.kind = COPY, .to = to, .from = from, .size = size};
    const int to_device = in_allocation(to, size), from_device = in_allocation(from, size);
    if (kind < 0 || kind > 4 || to_device < 0 || from_device < 0 || ((kind == 1 || kind == 3) && !to_device) ||
        ((kind == 2 || kind == 3) && !from_device))
        return error(INVALID_VALUE);
    if (!stream_of(handle)->capturing && !from_device) /* pageable: read now */
        n.staged = memcpy(malloc(size + 1), from, size);
    put(handle, n);
    if (!stream_of(handle)->capturing && !to_device) run_stream(stream_of(handle));
    return 0;
}

int cudaMemsetAsync(void *to, int value, size_t size, void *handle) {
    const node n = {.kind = SET, .to = to, .value = value, .size = size};
    return in_allocation(to, size) != 1 ? error(INVALID_VALUE) : put(handle, n);
}

int cudaMemset(void *to, int value, size_t size) {
    return refused() ? error(CAPTURE_UNSUPPORTED) : cudaMemsetAsync(to, value, size, NULL);
}

int cudaMemcpy(void *to, const void *from, size_t size, int kind) {
    const int code = refused() ? error(CAPTURE_UNSUPPORTED) : cudaMemcpyAsync(to, from, size, kind, NULL);
    if (code == 0) run_blocking();
    return code;
}

int cudaMalloc(void **p, size_t size) {
    if (refused()) return error(CAPTURE_UNSUPPORTED);
    *p = size ? allocate(size) : NULL;
    return size && *p == NULL ? error(NO_MEMORY) : 0;
}
int cudaMallocHost(void **p, size_t size) { return cudaMalloc(p, size); }
int cudaHostAlloc(void **p, size_t size, unsigned flags) { return (void)flags, cudaMalloc(p, size); }
int cudaHostGetDevicePointer(void **p, void *host, unsigned flags) { return (void)flags, *p = host, 0; }
int cudaFree(void *p) {
    if (refused()) return error(CAPTURE_UNSUPPORTED);
    run_all();
    return p == NULL || release(p) ? 0 : error(INVALID_VALUE);
}
int cudaFreeHost(void *p) { return cudaFree(p); }
int cudaMemGetInfo(size_t *left, size_t *all) { return *left = *all = (size_t)1 << 30, 0; }

int cudaStreamCreateWithFlags(void **p, unsigned flags) {
    stream *s = calloc(1, sizeof *s);
    s->last = &s->first, s->blocking = !(flags & 1), s->next = streams;
    *p = streams = s;
    return 0;
}
int cudaStreamCreate(void **p) { return cudaStreamCreateWithFlags(p, 0); }
int cudaStreamDestroy(void *handle) {
    stream **s = &streams;
    run_all();
    while (*s != handle) s = &(*s)->next;
    *s = (*s)->next;
    return free(handle), 0;
}
int cudaStreamSynchronize(void *handle) {
    stream *s = stream_of(handle);
    if (s->capturing) return s->invalid = 1, error(CAPTURE_UNSUPPORTED);
    s == &legacy ? run_blocking() : run_stream(s);
    return 0;
}
int cudaDeviceSynchronize(void) { return refused() ? error(CAPTURE_UNSUPPORTED) : (run_all(), 0); }

int cudaStreamBeginCapture(void *handle, int mode) {
    stream *s = stream_of(handle);
    if (s == &legacy) return error(CAPTURE_UNSUPPORTED);
    if (s->capturing) return error(INVALID_VALUE);
    run_stream(s);
    s->capturing = 1, s->invalid = 0, s->mode = mode;
    return 0;
}
int cudaStreamEndCapture(void *handle, void **result) {
    stream *s = stream_of(handle);
    graph *g = calloc(1, sizeof *g);
    g->first = s->first, g->users = 1;
    s->first = NULL, s->last = &s->first, s->capturing = 0;
    *result = g;
    if (!s->invalid) return 0;
    drop(g), *result = NULL;
    return error(CAPTURE_INVALIDATED);
}
int cudaStreamIsCapturing(void *handle, int *status) { /* 0: no; 1: yes; 2: yes, but it is invalid */
    const stream *s = stream_of(handle);
    for (stream *other = streams; other && s == &legacy; other = other->next)
        if (other->blocking && other->capturing) return error(CAPTURE_IMPLICIT);
    return *status = s->capturing ? 1 + s->invalid : 0, 0;
}
int cudaGraphInstantiate(void **exec, void *g, unsigned long long flags) {
    (void)flags;
    if (g == NULL) return error(INVALID_VALUE);
    ++((graph *)g)->users, *exec = g;
    return 0;
}
int cudaGraphLaunch(void *exec, void *handle) {
    const node n = {.kind = GRAPH, .graph = exec};
    if (exec == NULL || stream_of(handle)->capturing) return error(INVALID_HANDLE);
    ++n.graph->users;
    return put(handle, n);
}
int cudaGraphExecDestroy(void *g) { return drop(g), 0; }
int cudaGraphDestroy(void *g) { return drop(g), 0; }

int cudaGetDeviceCount(int *n) { return *n = 1, 0; }
int cudaGetDevice(int *n) { return *n = 0, 0; }
int cudaDeviceGetAttribute(int *value, int attribute, int device) { /* two multiprocessors of 7.5; of others nothing */
    (void)device;
    *value = attribute == 16 ? 2 : attribute == 75 ? 7 : attribute == 76 ? 5 : 0;
    return 0;
}
int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *host, int threads, size_t dynamic) {
    return (void)host, (void)threads, (void)dynamic, *n = 2, 0;
}
int cudaPeekAtLastError(void) { return last_error; }
int cudaGetLastError(void) {
    const int code = last_error;
    last_error = 0;
    return code;
}
const char *cudaGetErrorString(int code) {
    static char text[20];
    return snprintf(text, sizeof text, "error %d", code), text;
}

/* ---- The functions of the driver --------------------------------------------------------------------------------- */

/* A library is its text, and a kernel of it is found if the text has it. Each thread needs a context; there is one. */
enum { NOT_INITIALIZED = 3, INVALID_PTX = 218, INVALID_CONTEXT = 201, NOT_FOUND = 500 };
static int begun, loads;
static __thread void *context;
static char the_context;

int ptx_loads(void) { return loads; }

static int driver(void) { return !begun ? NOT_INITIALIZED : context == NULL ? INVALID_CONTEXT : 0; }
#define IN_DRIVER(call) /* which keeps no last error */ \
    do {                                                \
        const int before = last_error;                  \
        int code = driver();                            \
        if (code == 0) code = call;                     \
        last_error = before;                            \
        return code;                                    \
    } while (0)

int cuInit(unsigned flags) { return begun = 1, flags != 0; }
int cuCtxGetCurrent(void **p) { return *p = context, begun ? 0 : NOT_INITIALIZED; }
int cuCtxSetCurrent(void *p) { return context = p, begun ? 0 : NOT_INITIALIZED; }
int cuDevicePrimaryCtxRetain(void **p, int device) {
    *p = &the_context;
    return !begun ? NOT_INITIALIZED : device != 0 ? 101 : 0;
}
int cuLibraryLoadData(void **library, const char *text, void *a, void *b, unsigned m, void *c, void *d, unsigned n) {
    const char *const version = text == NULL ? NULL : strstr(text, ".version ");
    if (driver()) return driver();
    if (a || b || m || c || d || n) return INVALID_VALUE;
    if (version == NULL || strstr(text, ".entry ") < version) return INVALID_PTX;
    *(const char **)library = text;
    return ++loads, 0;
}
int cuLibraryGetKernel(void **handle, void *library, const char *name) {
    const size_t length = strlen(name);
    const char *p = library;
    if (driver()) return driver();
    while ((p = strstr(p, ".entry ")) != NULL && (strncmp(p += 7, name, length) != 0 || p[length] != '(')) {
    }
    for (int i = 0; i < kernel_count && p; ++i)
        if (strcmp(kernels[i].name, name) == 0) return *handle = &kernels[i], 0;
    return NOT_FOUND;
}
int cuKernelGetFunction(void **function, void *handle) {
    *function = handle;
    IN_DRIVER(load(handle));
}
int cuLaunchKernel(void *handle, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz,
                   unsigned dynamic, void *stream, void **arguments, void **more) {
    const dim3 grid = {x, y, z}, block = {bx, by, bz};
    IN_DRIVER(more ? INVALID_VALUE : launch_kernel(handle, grid, block, arguments, dynamic, stream));
}
int cuMemsetD8Async(uint64_t to, unsigned char value, size_t size, void *stream) {
    IN_DRIVER(cudaMemsetAsync((void *)(uintptr_t)to, value, size, stream));
}
int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t size, void *stream) {
    IN_DRIVER(cudaMemcpyAsync((void *)(uintptr_t)to, from, size, 1, stream));
}
int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t size, void *stream) {
    IN_DRIVER(cudaMemcpyAsync(to, (void *)(uintptr_t)from, size, 2, stream));
}
int cuStreamIsCapturing(void *stream, int *status) { IN_DRIVER(cudaStreamIsCapturing(stream, status)); }
