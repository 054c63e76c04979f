/* lockstep.c - two game clients train the same agent inside their 60 Hz loops, and stay equal bit for bit.

       cc -O2 -ffp-contract=off -pthread -o lockstep docs/examples/lockstep.c && ./lockstep [FRAMES [HZ]]

   One client uses four threads and the best instruction set, the other one thread and SSE2 (AArch64: plain C). Only the
   players' inputs and hashes of the world go over the network, which is a pair of pipes. Inputs come up to 8 frames
   late: each client guesses them, and when a guess was wrong it goes back to that frame and simulates again. The worlds
   of both clients are compared frame by frame. In the middle one client loses all its memory, loads a snapshot of the
   other and goes on; its comparisons resume a few frames later. docs/places.md explains it.

   FRAMES is 600 and HZ 60 if they are left out. With an HZ of 0 no client waits between frames. `lockstep client ID
   THREADS ISA FRAMES HZ` is one client, which talks over stdin and stdout; `lockstep alone FRAMES` computes the last
   hash without network, threads or guesses. */
#define _POSIX_C_SOURCE 200809L
#define KAHAN_OPT_IMPLEMENTATION
#include "../../kahan_opt.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static void check(int good, const char *what) {
    if (good) return;
    fprintf(stderr, "lockstep: %s\n", what);
    exit(1);
}

/* ---- The world: all that the clients have to agree on, as plain values, so that `a = b` is a snapshot ------------ */

enum { INPUTS = 16, HIDDEN = 192, MOVES = 4, TENSORS = 6 };
enum { SIZE = HIDDEN * (INPUTS + 1) + HIDDEN * (HIDDEN + 1) + MOVES * (HIDDEN + 1) };
static const size_t size_of[TENSORS] = {HIDDEN * INPUTS, HIDDEN, HIDDEN *HIDDEN, HIDDEN, MOVES *HIDDEN, MOVES};

typedef struct world {
    uint32_t frame;
    int32_t x[3], y[3];   /* two players and the agent, on a torus of 256 x 256 */
    uint32_t last[3];     /* the last three moves of player 0 */
    uint32_t early, late; /* right forecasts of the first and of the last 128 frames */
    kopt_optimizer opt;   /* fp16 weights with Kahan compensation, bf16 moments */
    kopt_scaler scaler;
    kopt_norm norm; /* of the step that is under way, and the step itself */
    kopt_step step;
    int skipped;
    kopt_fp16 weight[SIZE], grad[SIZE];
    unsigned char state[KOPT_STATE_BYTES(SIZE, 6) + (TENSORS - 1) * KOPT_STATE_BYTES(0, 6)];
    float acting[SIZE]; /* the weights after the last complete step: with these the agent thinks */
} world;

static void list_of(world *w, kopt_tensor *list) {
    size_t i, element = 0, byte = 0;
    for (i = 0; i < TENSORS; i++) {
        list[i] = KOPT_TENSOR(KOPT_FP16, w->weight + element, w->grad + element, size_of[i], w->state + byte, 0);
        list[i].state_size = kopt_state_size(&w->opt, &list[i]);
        list[i].id = (uint32_t)i;
        element += size_of[i];
        byte += list[i].state_size;
    }
}

static uint32_t mix(uint32_t x) {
    x = (x ^ x >> 16) * 0x7feb352du;
    x = (x ^ x >> 15) * 0x846ca68bu;
    return x ^ x >> 16;
}

static void new_world(world *w) {
    kopt_tensor list[TENSORS];
    size_t i, k, element = 0;
    memset(w, 0, sizeof *w);
    w->x[1] = 100, w->y[2] = 50;
    w->opt = kopt_adamw(2e-3);
    w->opt.zero_grad = 1;
    w->scaler = kopt_scaler_of();
    w->scaler.interval = 20;
    for (i = 0; i < TENSORS; i++) { /* uniform in +-1 / sqrt(inputs), roughly: powers of two are exact */
        const float scale = i == 0 ? 0.25f : 0.0625f;
        for (k = 0; k < size_of[i]; k++, element++)
            w->acting[element] = scale * ((float)(mix((uint32_t)element + 1) >> 8) / 8388608.0f - 1);
    }
    list_of(w, list);
    check(kopt_state_init(&w->opt, list, TENSORS, w->acting) == KOPT_OK, "kopt_state_init");
    check(kopt_convert(w->acting, KOPT_F32, w->weight, KOPT_FP16, SIZE) == KOPT_OK, "kopt_convert");
}

/* ---- Slices of a step, on a team of threads ---------------------------------------------------------------------- */

/* A slice is the share of the norm or of the step that one frame computes. It is cut into pieces, and a thread that is
   free takes the next one. The frame waits for no thread that has not woken up yet: the others do its work. Which
   thread takes which piece does not matter for the bits. */
enum { MOST_THREADS = 16, PIECES = 8, BUDGET = 200 /* microseconds per frame */ };
typedef struct workers {
    int threads;
    pthread_mutex_t lock;
    pthread_cond_t go, done;
    int next, finished; /* pieces of this slice that are taken, and finished */
    int stepping;       /* 1: a slice of the step, 0: of the norm */
    world *w;
    size_t begin, end;
    kopt_norm norm[MOST_THREADS];
    kopt_result result[MOST_THREADS];
    double *times; /* of each slice, with what the frame does besides for the step, in microseconds */
    size_t slices, room;
} workers;

static void do_piece(workers *t, int me, int k) {
    const size_t n = t->end - t->begin, piece = (size_t)k;
    const size_t begin = t->begin + n * piece / PIECES, end = t->begin + n * (piece + 1) / PIECES;
    kopt_tensor list[TENSORS];
    kopt_result result;
    list_of(t->w, list);
    result = t->stepping ? kopt_step_range(&t->w->step, list, TENSORS, begin, end)
                         : kopt_norm_add_range(&t->norm[me], list, TENSORS, begin, end);
    if (result != KOPT_OK) t->result[me] = result;
}

static void do_pieces(workers *t, int me) { /* with the lock held */
    while (t->next < PIECES) {
        const int k = t->next++;
        pthread_mutex_unlock(&t->lock);
        do_piece(t, me, k);
        pthread_mutex_lock(&t->lock);
        if (++t->finished == PIECES) pthread_cond_signal(&t->done);
    }
}

typedef struct member {
    workers *team;
    int me;
} member;

static void *worker(void *argument) {
    member *m = argument;
    workers *t = m->team;
    pthread_mutex_lock(&t->lock);
    for (;;) {
        do_pieces(t, m->me);
        pthread_cond_wait(&t->go, &t->lock);
    }
    return NULL;
}

static void new_team(workers *t, int threads) {
    static member members[MOST_THREADS];
    int i;
    memset(t, 0, sizeof *t);
    t->threads = threads;
    t->next = t->finished = PIECES; /* nothing to do yet */
    pthread_mutex_init(&t->lock, NULL);
    pthread_cond_init(&t->go, NULL);
    pthread_cond_init(&t->done, NULL);
    for (i = 1; i < threads; i++) {
        pthread_t thread;
        members[i].team = t, members[i].me = i;
        check(pthread_create(&thread, NULL, worker, &members[i]) == 0, "no thread");
    }
}

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Slice k of `count` of the list: of the norm or of the step. */
static void slice(workers *t, world *w, int stepping, size_t k, size_t count) {
    int i;
    pthread_mutex_lock(&t->lock);
    t->w = w, t->stepping = stepping, t->begin = SIZE * k / count, t->end = SIZE * (k + 1) / count;
    for (i = 0; i < t->threads; i++) t->norm[i] = (kopt_norm){0}, t->result[i] = KOPT_OK;
    t->next = t->finished = 0;
    if (t->threads > 1) pthread_cond_broadcast(&t->go);
    do_pieces(t, 0);
    while (t->finished < PIECES) pthread_cond_wait(&t->done, &t->lock);
    pthread_mutex_unlock(&t->lock);
    for (i = 0; i < t->threads; i++) {
        check(t->result[i] == KOPT_OK, kopt_result_string(t->result[i]));
        if (!stepping) check(kopt_norm_merge(&w->norm, &t->norm[i]) == KOPT_OK, "kopt_norm_merge");
    }
}

static void record_time(workers *t, double start) {
    if (t->slices == t->room) {
        t->room = 2 * t->room + 1024;
        t->times = realloc(t->times, t->room * sizeof *t->times);
        check(t->times != NULL, "no memory");
    }
    t->times[t->slices++] = 1e6 * (seconds() - start);
}

/* ---- The agent: it forecasts the next move of player 0 ----------------------------------------------------------- */

/* y = W x + b. Sums in one order and without contraction: the same bits on every machine. */
static const float *layer(const float *p, const float *x, int n, float *y, int rows, int relu) {
    int i, k;
    for (i = 0; i < rows; i++) {
        float sum = p[rows * n + i];
        for (k = 0; k < n; k++) sum += p[i * n + k] * x[k];
        y[i] = relu && sum < 0 ? 0 : sum;
    }
    return p + rows * (n + 1);
}

/* Adds the gradient of a layer to g, and writes that of its inputs to dx. */
static void layer_backward(const float *p, kopt_fp16 *g, const float *x, int n, const float *dy, int rows, float *dx) {
    int i, k;
    for (k = 0; k < n; k++) dx[k] = 0;
    for (i = 0; i < rows; i++) {
        if (dy[i] == 0) continue;
        for (k = 0; k < n; k++) {
            kopt_fp16 *sum = &g[i * n + k];
            dx[k] += p[i * n + k] * dy[i];
            if (x[k] != 0) *sum = kopt_fp16_from_f32(kopt_f32_from_fp16(*sum) + dy[i] * x[k]);
        }
        g[rows * n + i] = kopt_fp16_from_f32(kopt_f32_from_fp16(g[rows * n + i]) + dy[i]);
    }
    for (k = 0; k < n; k++) dx[k] = x[k] > 0 ? dx[k] : 0; /* ReLU */
}

typedef struct thought {
    float x[INPUTS], first[HIDDEN], second[HIDDEN], y[MOVES];
} thought;

static float offset(int32_t from, int32_t to) { return (float)(((to - from + 128) & 255) - 128) / 128; }

static uint32_t forecast(const world *w, thought *t) {
    const float *p = w->acting;
    uint32_t best = 0, i;
    for (i = 0; i < INPUTS; i++) t->x[i] = 0;
    for (i = 0; i < 3; i++) t->x[4 * i + w->last[i]] = 1;
    for (i = 0; i < 2; i++) t->x[12 + 2 * i] = offset(w->x[2], w->x[i]), t->x[13 + 2 * i] = offset(w->y[2], w->y[i]);
    p = layer(p, t->x, INPUTS, t->first, HIDDEN, 1);
    p = layer(p, t->first, HIDDEN, t->second, HIDDEN, 1);
    layer(p, t->second, HIDDEN, t->y, MOVES, 0);
    for (i = 1; i < MOVES; i++)
        if (t->y[i] > t->y[best]) best = i;
    return best;
}

/* Squared error against the move that the player made, times `scale`. */
static void learn(world *w, const thought *t, uint32_t move, float scale) {
    const size_t second = HIDDEN * (INPUTS + 1), third = second + HIDDEN * (HIDDEN + 1);
    float dy[MOVES], d2[HIDDEN], d1[HIDDEN], d0[INPUTS];
    uint32_t i;
    for (i = 0; i < MOVES; i++) dy[i] = (t->y[i] - (i == move ? 1.0f : 0.0f)) * scale;
    layer_backward(w->acting + third, w->grad + third, t->second, HIDDEN, dy, MOVES, d2);
    layer_backward(w->acting + second, w->grad + second, t->first, HIDDEN, d2, HIDDEN, d1);
    layer_backward(w->acting, w->grad, t->x, INPUTS, d1, HIDDEN, d0);
}

/* ---- One frame --------------------------------------------------------------------------------------------------- */

/* A cycle of 16 frames is one step: 8 frames each add the gradient of one forecast, 2 compute the norm, 5 step, and the
   last one copies the new weights to those with which the agent acts. These change only between two cycles, so it does
   not matter how far a step has come. */
enum { LEARN = 8, NORM = 2, STEP = 5, COPY = 1, CYCLE = LEARN + NORM + STEP + COPY };

static void move(world *w, int who, uint32_t direction) {
    static const int dx[MOVES] = {1, 0, -1, 0}, dy[MOVES] = {0, 1, 0, -1};
    w->x[who] = (w->x[who] + dx[direction]) & 255;
    w->y[who] = (w->y[who] + dy[direction]) & 255;
}

static void simulate(workers *team, world *w, const uint32_t input[2], uint32_t frames) {
    const uint32_t phase = w->frame % CYCLE;
    thought t;
    const uint32_t guess = forecast(w, &t);
    double start;
    if (w->frame < 128) w->early += guess == input[0];
    if (w->frame + 128 >= frames) w->late += guess == input[0];

    start = seconds();
    if (phase < LEARN) {
        learn(w, &t, input[0], (float)w->scaler.scale / (float)LEARN);
    } else if (phase < LEARN + NORM) {
        if (phase == LEARN) memset(&w->norm, 0, sizeof w->norm);
        slice(team, w, 0, phase - LEARN, NORM);
        if (phase + 1 == LEARN + NORM) {
            check(kopt_scaler_begin(&w->scaler, &w->step, &w->opt, 1, &w->norm, 1, &w->skipped) == KOPT_OK,
                  "kopt_scaler_begin");
            if (w->skipped) memset(w->grad, 0, sizeof w->grad); /* a step sets it to zero by itself */
        }
    } else if (phase < LEARN + NORM + STEP) {
        if (!w->skipped) slice(team, w, 1, phase - LEARN - NORM, STEP);
    } else {
        check(kopt_convert(w->acting, KOPT_F32, w->weight, KOPT_FP16, SIZE) == KOPT_OK, "kopt_convert");
    }
    if (phase >= LEARN) record_time(team, start);

    w->last[2] = w->last[1], w->last[1] = w->last[0], w->last[0] = input[0];
    move(w, 0, input[0]);
    move(w, 1, input[1]);
    move(w, 2, guess);
    w->frame++;
}

/* The players: three steps in a direction, then a turn; now and then a surprise. */
static uint32_t script(int player, uint32_t frame) {
    const uint32_t noise = mix(frame * 2 + (uint32_t)player + 77);
    return (noise & 15) == 0 ? noise >> 30 : (frame / 3 + (uint32_t)player * (frame / 64)) & 3;
}

/* ---- Hashes and snapshots, the same bytes on every machine ------------------------------------------------------- */

static unsigned char *image; /* a checkpoint */
static size_t image_size;

static void take_image(world *w) {
    kopt_tensor list[TENSORS];
    list_of(w, list);
    if (image == NULL) {
        image_size = kopt_save_size(&w->opt, list, TENSORS);
        image = malloc(image_size);
        check(image != NULL, "no memory");
    }
    check(kopt_save(&w->opt, list, TENSORS, image, image_size) == KOPT_OK, "kopt_save");
}

static uint64_t bits_of(double x) {
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static uint32_t hash(uint32_t h, uint64_t x) {
    h = (h ^ (uint32_t)x) * 0x01000193u;
    h = (h ^ (uint32_t)(x >> 32)) * 0x01000193u;
    return h ^ h >> 15;
}

/* All of a world; never 0. The checksum of a checkpoint, its last four bytes, stands for weights and moments. */
static uint32_t hash_world(world *w) {
    uint32_t h = 0x811c9dc5u;
    int i;
    take_image(w);
    for (i = 1; i <= 4; i++) h = hash(h, image[image_size - (size_t)i]);
    h = hash(h, w->frame);
    for (i = 0; i < 3; i++) h = hash(h, w->last[i] + 256 * ((uint64_t)w->x[i] + 256 * (uint64_t)w->y[i]));
    h = hash(h, w->early + ((uint64_t)w->late << 32));
    h = hash(hash(h, bits_of(w->scaler.scale)), w->scaler.good);
    h = hash(h, w->norm.nonfinite);
    for (i = 0; i < 20; i++) h = hash(h, w->norm.digit[i]);
    for (i = 0; i < SIZE; i++) h = hash(h, w->grad[i]);
    return h != 0 ? h : 1;
}

static FILE *in, *out;

static void put32(uint32_t x) {
    int i;
    for (i = 0; i < 4; i++) check(putc((int)(x >> 8 * i & 255), out) != EOF, "the other client is gone");
}

static uint32_t get32(void) {
    uint32_t x = 0;
    int i;
    for (i = 0; i < 4; i++) {
        const int c = getc(in);
        check(c != EOF, "the other client is gone");
        x |= (uint32_t)c << 8 * i;
    }
    return x;
}

static void put64(uint64_t x) { put32((uint32_t)x), put32((uint32_t)(x >> 32)); }

static uint64_t get64(void) {
    const uint64_t low = get32();
    return low | (uint64_t)get32() << 32;
}

static unsigned char get_move(void) {
    const uint32_t x = get32();
    check(x < MOVES, "a move does not exist");
    return (unsigned char)x;
}

/* A world at the start of a cycle: no step is under way, the gradient is zero, the agent acts with the weights. */
static void put_world(world *w) {
    int i;
    put32(w->frame);
    for (i = 0; i < 3; i++) put32((uint32_t)w->x[i]), put32((uint32_t)w->y[i]), put32(w->last[i]);
    put32(w->early), put32(w->late);
    put64(bits_of(w->scaler.scale)), put32(w->scaler.good), put32(w->scaler.bad);
    put64(w->norm.nonfinite);
    for (i = 0; i < 20; i++) put64(w->norm.digit[i]);
    take_image(w);
    check(fwrite(image, 1, image_size, out) == image_size, "the other client is gone");
}

static void get_world(world *w) {
    kopt_tensor list[TENSORS];
    uint64_t bits;
    int i;
    new_world(w);
    w->frame = get32();
    for (i = 0; i < 3; i++)
        w->x[i] = (int32_t)(get32() & 255), w->y[i] = (int32_t)(get32() & 255), w->last[i] = get_move();
    w->early = get32(), w->late = get32();
    bits = get64();
    memcpy(&w->scaler.scale, &bits, sizeof bits);
    w->scaler.good = get32(), w->scaler.bad = get32();
    w->norm.nonfinite = get64();
    for (i = 0; i < 20; i++) w->norm.digit[i] = get64();
    take_image(w); /* for its size */
    check(fread(image, 1, image_size, in) == image_size, "a snapshot is cut off");
    list_of(w, list);
    check(kopt_load(&w->opt, list, TENSORS, image, image_size) == KOPT_OK, "a snapshot is damaged");
    check(kopt_convert(w->acting, KOPT_F32, w->weight, KOPT_FP16, SIZE) == KOPT_OK, "kopt_convert");
}

/* ---- A client ---------------------------------------------------------------------------------------------------- */

enum { DELAY = 8, RING = DELAY + 1, MOST_FRAMES = 100000 };
static const uint32_t REQUEST = 0xfffffff0u, SNAPSHOT = 0xfffffff1u; /* in place of a frame's number */

static struct {
    int id;
    uint32_t frames, received; /* inputs of the other one that are known: those of frames below this */
    uint32_t compared, rollbacks, deepest, wrong;
    unsigned char input[2][MOST_FRAMES], guess[MOST_FRAMES];
    uint32_t hash_at[MOST_FRAMES + 1]; /* of the world before a frame, once all inputs are known; 0: not yet */
    uint32_t hashed;                   /* the last of them */
    world w, past[RING], base;         /* now; the last frames; the last start of a cycle that is certain */
    workers team;
} me;

/* Simulates frame w.frame. If the input of the other player is not known, the guess is that it goes on as before. */
static void advance(void) {
    const uint32_t f = me.w.frame, known = me.received;
    const int other = !me.id;
    uint32_t input[2];
    me.past[f % RING] = me.w;
    me.guess[f] = f < known ? me.input[other][f] : known > 0 ? me.input[other][known - 1] : 0;
    input[me.id] = me.input[me.id][f];
    input[other] = me.guess[f];
    simulate(&me.team, &me.w, input, me.frames);
}

/* Hashes the worlds whose inputs are all known by now. */
static void settle(void) {
    const uint32_t certain = me.received < me.w.frame ? me.received : me.w.frame;
    while (me.hashed < certain) {
        const uint32_t f = ++me.hashed;
        world *w = f == me.w.frame ? &me.w : &me.past[f % RING];
        me.hash_at[f] = hash_world(w);
        if (f % CYCLE == 0) me.base = *w;
    }
}

static void send_frame(uint32_t f) { /* the input of this frame, and the hash of 8 frames before, which is certain */
    put32(f);
    put32(f < me.frames ? me.input[me.id][f] : 0);
    put32(f >= DELAY ? me.hash_at[f - DELAY] : 0);
    check(fflush(out) == 0, "the other client is gone");
}

static void send_snapshot(uint32_t mine) { /* mine: how many inputs of this client were sent */
    const uint32_t first = me.base.frame > 0 ? me.base.frame - 1 : 0; /* one more: guesses go on as before */
    uint32_t f;
    put32(SNAPSHOT);
    put_world(&me.base);
    put32(mine), put32(me.received);
    for (f = first; f < mine; f++) put32(me.input[me.id][f]);
    for (f = first; f < me.received; f++) put32(me.input[!me.id][f]);
    check(fflush(out) == 0, "the other client is gone");
}

/* This client has lost everything: it asks for a snapshot, and simulates from there on. Returns its next frame. */
static uint32_t recover(void) {
    uint32_t f, first, mine;
    memset(&me.w, 0xaa, sizeof me.w);
    memset(me.past, 0xaa, sizeof me.past);
    memset(me.input, 0xaa, sizeof me.input);
    memset(me.guess, 0xaa, sizeof me.guess);
    memset(me.hash_at, 0, sizeof me.hash_at);
    put32(REQUEST), put32(0), put32(0);
    check(fflush(out) == 0, "the other client is gone");
    while (get32() != SNAPSHOT) get32(), get32(); /* what was on its way */
    get_world(&me.w);
    me.base = me.w;
    me.received = get32(), mine = get32();
    check(me.w.frame <= me.received && me.received <= me.frames && me.w.frame <= mine && mine <= me.frames,
          "a snapshot is damaged");
    first = me.w.frame > 0 ? me.w.frame - 1 : 0;
    for (f = first; f < me.received; f++) me.input[!me.id][f] = get_move();
    for (f = first; f < mine; f++) me.input[me.id][f] = get_move();
    me.hashed = me.w.frame;
    me.hash_at[me.hashed] = hash_world(&me.w);
    fprintf(stderr, "client %d: lost its memory in frame %u, goes on from the snapshot of frame %u\n", me.id,
            (unsigned)mine, (unsigned)me.w.frame);
    while (me.w.frame < mine) {
        advance();
        settle();
    }
    return mine;
}

static void receive(uint32_t now) {
    const uint32_t late = now == me.frames + DELAY ? 0 : mix(now * 2 + (uint32_t)me.id) % (DELAY + 1);
    const uint32_t need = now < late ? 0 : now - late; /* the network delivers the messages up to this frame */
    while (me.received <= need) {
        const uint32_t f = get32();
        const unsigned char input = get_move();
        const uint32_t h = get32();
        if (f == REQUEST) {
            send_snapshot(now < me.frames ? now + 1 : me.frames);
            continue;
        }
        check(f == me.received, "a message is out of order");
        if (f < me.frames) me.input[!me.id][f] = input;
        if (f >= DELAY && h != 0 && me.hash_at[f - DELAY] != 0) {
            me.compared++;
            if (h != me.hash_at[f - DELAY]) {
                fprintf(stderr, "client %d: frame %u DIFFERS\n", me.id, (unsigned)(f - DELAY));
                exit(1);
            }
        }
        me.received++;
    }
}

/* If an input was not as guessed: goes back to that frame, and simulates up to the present again. */
static void correct(void) {
    const uint32_t now = me.w.frame, known = me.received < now ? me.received : now;
    uint32_t f = me.hashed;
    while (f < known && me.guess[f] == me.input[!me.id][f]) f++;
    if (f >= known) return;
    me.rollbacks++;
    if (now - f > me.deepest) me.deepest = now - f;
    me.w = me.past[f % RING];
    while (me.w.frame < now) advance();
}

static int ascending(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static int client(int id, int threads, kopt_isa isa, uint32_t frames, double hz) {
    const uint32_t drop = id == 1 ? frames / 2 : UINT32_MAX; /* where client 1 loses its memory */
    size_t late = 0;
    uint32_t f;
    double start;
    in = stdin, out = stdout;
    check(kopt_isa_force(isa) == KOPT_OK, "this machine does not have the instruction set");
    new_team(&me.team, threads);
    me.id = id, me.frames = frames;
    new_world(&me.w);
    me.base = me.w;
    start = seconds();
    for (f = 0; f <= frames + DELAY; f++) { /* 8 frames more, to compare the last ones */
        if (hz > 0) {
            const double wait = start + f / hz - seconds();
            struct timespec t;
            t.tv_sec = 0, t.tv_nsec = (long)(wait * 1e9);
            if (wait > 0 && wait < 1) nanosleep(&t, NULL);
        }
        if (f == drop) f = recover();
        if (f < frames) me.input[id][f] = (unsigned char)script(id, f);
        send_frame(f);
        receive(f);
        correct();
        if (f < frames) advance();
        settle();
    }
    qsort(me.team.times, me.team.slices, sizeof *me.team.times, ascending);
    fprintf(stderr, "client %d: %s, %d thread%s: %u frames equal, %u rollbacks of up to %u frames, %u steps\n", id,
            kopt_isa_name(kopt_isa_current()), threads, threads > 1 ? "s" : "", (unsigned)me.compared,
            (unsigned)me.rollbacks, (unsigned)me.deepest, (unsigned)me.w.opt.step);
    while (late < me.team.slices && me.team.times[me.team.slices - 1 - late] > (double)BUDGET) late++;
    fprintf(stderr, "client %d: a slice takes %.0f us, 99 %% of them at most %.0f, the worst %.0f; %d of %d above %d\n",
            id, me.team.times[me.team.slices / 2], me.team.times[me.team.slices * 99 / 100],
            me.team.times[me.team.slices - 1], (int)late, (int)me.team.slices, BUDGET);
    fprintf(stderr, "client %d: right forecasts in 128 frames: %u at first, %u at last; hash %08x\n", id,
            (unsigned)me.w.early, (unsigned)me.w.late, (unsigned)me.hash_at[frames]);
    return 0;
}

static int alone(uint32_t frames) {
    world *w = &me.w;
    new_team(&me.team, 1);
    new_world(w);
    while (w->frame < frames) {
        uint32_t input[2];
        input[0] = script(0, w->frame), input[1] = script(1, w->frame);
        simulate(&me.team, w, input, frames);
    }
    printf("%08x\n", (unsigned)hash_world(w));
    return 0;
}

/* Two processes; each reads the pipe that the other one writes to. */
static int both(uint32_t frames, double hz) {
    const kopt_isa slow = kopt_isa_usable(KOPT_ISA_SSE2) ? KOPT_ISA_SSE2 : KOPT_ISA_SCALAR;
    int pipes[2][2], id, failed = 0, status;
    check(pipe(pipes[0]) == 0 && pipe(pipes[1]) == 0, "no pipe");
    for (id = 0; id < 2; id++) {
        const pid_t child = fork();
        check(child >= 0, "no process");
        if (child > 0) continue;
        check(dup2(pipes[id][0], 0) == 0 && dup2(pipes[!id][1], 1) == 1, "no pipe");
        close(pipes[0][0]), close(pipes[0][1]), close(pipes[1][0]), close(pipes[1][1]);
        exit(client(id, id == 0 ? 4 : 1, id == 0 ? KOPT_ISA_AUTO : slow, frames, hz));
    }
    close(pipes[0][0]), close(pipes[0][1]), close(pipes[1][0]), close(pipes[1][1]);
    for (id = 0; id < 2; id++) failed |= wait(&status) < 0 || status != 0;
    printf(failed ? "FAIL: the clients differ, or one has failed\n"
                  : "PASS: the clients are equal in every frame that they compared\n");
    return failed;
}

static double number(const char *text, double least, double most, const char *what) {
    char *end;
    const double x = strtod(text, &end);
    check(end != text && *end == 0 && x >= least && x <= most, what);
    return x;
}

static uint32_t frames_of(const char *text) {
    return (uint32_t)number(text, 2 * DELAY, MOST_FRAMES, "FRAMES is 16 to 100000");
}

static double hz_of(const char *text) {
    const double hz = number(text, 0, 1000, "HZ is 0, or 1 to 1000");
    check(hz == 0 || hz >= 1, "HZ is 0, or 1 to 1000");
    return hz;
}

static kopt_isa isa_of(const char *name) { /* a name of kopt_isa_name(), or "best" */
    int isa;
    if (strcmp(name, "best") == 0) return KOPT_ISA_AUTO;
    for (isa = 0; strcmp(kopt_isa_name((kopt_isa)isa), "unknown") != 0; isa++)
        if (strcmp(name, kopt_isa_name((kopt_isa)isa)) == 0) return (kopt_isa)isa;
    check(0, "ISA is an instruction set, or best");
    return KOPT_ISA_AUTO;
}

int main(int count, char **words) {
    if (count == 7 && strcmp(words[1], "client") == 0)
        return client(number(words[2], 0, 1, "ID is 0 or 1") > 0,
                      (int)number(words[3], 1, MOST_THREADS, "THREADS is 1 to 16"), isa_of(words[4]),
                      frames_of(words[5]), hz_of(words[6]));
    if (count == 3 && strcmp(words[1], "alone") == 0) return alone(frames_of(words[2]));
    check(count <= 3, "usage: lockstep [FRAMES [HZ]]");
    return both(frames_of(count > 1 ? words[1] : "600"), count > 2 ? hz_of(words[2]) : 60);
}
