/* checkpoint.c - a training program that survives a crash at any instant. Kill it and start it again: it goes on where
   its last checkpoint was, and ends with the bits of a run that was never killed.

       cc -O2 -ffp-contract=off -o checkpoint docs/examples/checkpoint.c && ./checkpoint [FILE [BATCHES [SAVE_EVERY]]]

   One file holds all that the training has to remember: weights, states and optimizer (kopt_save_to), the loss scale,
   gradient sums of a step that is not complete, and the position in the data. It is replaced as a whole or not at all,
   and the one before it is kept as FILE.previous. docs/checkpoints.md explains each step. The net is small: 4 inputs,
   16 hidden units (ReLU), 1 output; bf16 weights, fp16 gradients. -ffp-contract=off gives its sums the same bits on
   every machine. */
#define _XOPEN_SOURCE 700    /* POSIX of 2008 */
#define _FILE_OFFSET_BITS 64 /* files above 2 GB on 32-bit machines */
#define KAHAN_OPT_IMPLEMENTATION
#include "../../kahan_opt.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- Files: copy this part as it is ------------------------------------------------------------------------------ */

enum { NAME_SIZE = 4096 }; /* main() checks that the names fit */
#ifndef PIECE
#define PIECE 65536 /* bytes of a write; the tests take fewer */
#endif

static int write_all(int fd, const void *data, size_t size) {
    const unsigned char *p = data;
    while (size > 0) {
        const ssize_t n = write(fd, p, size);
        if (n < 0 && errno == EINTR) continue; /* a signal came: try again */
        if (n == 0) errno = EIO;
        if (n <= 0) return -1;
        p += n, size -= (size_t)n; /* if not all was written, go on with the rest */
    }
    return 0;
}

static int read_all(int fd, uint64_t offset, void *data, size_t size) {
    unsigned char *p = data;
    while (size > 0) {
        const ssize_t n = pread(fd, p, size, (off_t)offset);
        if (n < 0 && errno == EINTR) continue;
        if (n == 0) errno = EIO; /* the file ends too early */
        if (n <= 0) return -1;
        p += n, size -= (size_t)n, offset += (uint64_t)n;
    }
    return 0;
}

static int open_file(const char *path, int flags) {
    int fd;
    do fd = open(path, flags, 0666);
    while (fd < 0 && errno == EINTR);
    return fd;
}

/* Returns when the bytes of the file are on the disk. Do not call it again after an error: the system may have dropped
   what it could not write, and would then report success. On macOS, fcntl(fd, F_FULLFSYNC) also empties the cache of
   the disk. */
static int sync_file(int fd) {
    int result;
    do result = fsync(fd);
    while (result < 0 && errno == EINTR);
    return result;
}

/* Returns when the names in the folder of `path` are on the disk. */
static int sync_folder(const char *path) {
    char folder[NAME_SIZE];
    char *slash;
    int fd, result, error;
    strcpy(folder, path);
    slash = strrchr(folder, '/');
    if (slash == NULL)
        strcpy(folder, ".");
    else
        slash[slash == folder] = 0; /* of "/file": "/" */
    fd = open_file(folder, O_RDONLY);
    if (fd < 0) return -1;
    result = sync_file(fd);
    error = errno;
    close(fd);
    errno = error;
    return result < 0 && errno != EINVAL ? -1 : 0; /* EINVAL: a file system that cannot sync folders */
}

/* Replaces the file `path` by what content() writes to fd, as a whole or not at all. With keep, the old file becomes
   PATH.previous. At every instant, also if the power fails, one of the two is complete. Returns 0, or -1 with errno.

   Windows: CreateFile with FILE_SHARE_READ, FlushFileBuffers() for fsync(), and MoveFileEx() with
   MOVEFILE_REPLACE_EXISTING | MOVEFILE_WRITE_THROUGH for rename(), which then needs no fsync of the folder. */
static int write_file_atomically(const char *path, int keep, int (*content)(void *user, int fd), void *user) {
    char temporary[NAME_SIZE], previous[NAME_SIZE];
    int fd, good, error;
    strcat(strcpy(temporary, path), ".temporary"); /* in the same folder: rename() does not cross file systems */
    strcat(strcpy(previous, path), ".previous");
    fd = open_file(temporary, O_WRONLY | O_CREAT | O_TRUNC); /* what a crash left there goes */
    if (fd < 0) return -1;
    good = content(user, fd) == 0 && sync_file(fd) == 0; /* first the bytes, then the names */
    error = errno;
    if (close(fd) != 0 && errno != EINTR && good) good = 0, error = errno;
    if (good && keep && rename(path, previous) != 0 && errno != ENOENT) good = 0, error = errno;
    if (good && rename(temporary, path) != 0) {
        good = 0, error = errno;
        if (keep) rename(previous, path); /* back; if this fails, too, PATH.previous is the checkpoint */
    }
    if (good) return sync_folder(path);
    unlink(temporary); /* on a full disk it would take space */
    errno = error;
    return -1;
}

/* CRC-32C, a byte at a time: of several pieces, pass the result of one to the next, beginning with 0. */
static uint32_t checksum(uint32_t crc, const void *data, size_t size) {
    static uint32_t table[256];
    const unsigned char *p = data;
    uint32_t i, bit;
    if (table[1] == 0)
        for (i = 0; i < 256; ++i)
            for (table[i] = i, bit = 0; bit < 8; ++bit) table[i] = table[i] >> 1 ^ (table[i] & 1 ? 0x82F63B78u : 0);
    for (crc = ~crc; size > 0; --size) crc = crc >> 8 ^ table[(crc ^ *p++) & 255];
    return ~crc;
}

/* What a checkpoint is written to or read from, from its first byte to its last. */
typedef struct stream {
    int fd;          /* -1: nowhere; only the checksum is made */
    int saving;      /* 1: writes, 0: reads */
    uint64_t offset; /* reading: of the next byte */
    uint32_t crc;    /* writing: of all bytes that were flushed; reading: of the whole file */
    size_t used;     /* writing: bytes that wait in `piece` */
    unsigned char piece[PIECE];
} stream;

static int flush(stream *s) {
    if (s->fd >= 0 && write_all(s->fd, s->piece, s->used) != 0) return -1;
    s->crc = checksum(s->crc, s->piece, s->used);
    s->used = 0;
    return 0;
}

/* The two functions of a kopt_file: any stream can be one. */
static int write_bytes(void *user, const void *data, size_t size) {
    stream *s = user;
    const unsigned char *p = data;
    while (size > 0) {
        const size_t n = size < PIECE - s->used ? size : PIECE - s->used;
        memcpy(s->piece + s->used, p, n);
        s->used += n, p += n, size -= n;
        if (s->used == PIECE && flush(s) != 0) return -1;
    }
    return 0;
}

static int read_bytes(void *user, uint64_t offset, void *data, size_t size) {
    const stream *s = user;
    return read_all(s->fd, s->offset + offset, data, size);
}

/* Copies numbers of `size` bytes; on big-endian machines it reverses the bytes of each. */
static void copy_little_endian(unsigned char *to, const unsigned char *from, size_t size, size_t count) {
    const uint16_t one = 1;
    const size_t flip = *(const unsigned char *)&one == 1 ? 0 : size - 1; /* sizes are powers of two */
    size_t i;
    for (i = 0; i < size * count; ++i) to[i ^ flip] = from[i];
}

/* Saves or loads an array of numbers of `size` bytes. The file has them in little-endian order. */
static int move(stream *s, void *numbers, size_t size, size_t count) {
    unsigned char piece[4096], *p = numbers;
    while (count > 0) {
        const size_t n = count < sizeof piece / size ? count : sizeof piece / size;
        if (s->saving) {
            copy_little_endian(piece, p, size, n);
            if (write_bytes(s, piece, size * n) != 0) return -1;
        } else {
            if (read_bytes(s, 0, piece, size * n) != 0) return -1;
            copy_little_endian(p, piece, size, n);
            s->offset += size * n;
        }
        p += size * n, count -= n;
    }
    return 0;
}

/* ---- The training ------------------------------------------------------------------------------------------------ */

enum { INPUTS = 4, HIDDEN = 16, TENSORS = 4, MOST = INPUTS * HIDDEN, SAMPLES = 1024, BATCH = 8, BATCHES_PER_STEP = 4 };
static const size_t size_of[TENSORS] = {INPUTS * HIDDEN, HIDDEN, HIDDEN, 1}; /* weights, biases, weights, bias */
static const double RATE = 3e-3;

static kopt_bf16 weight[TENSORS][MOST];
static kopt_fp16 grad[TENSORS][MOST];                     /* of one batch, times the loss scale */
static kopt_bf16 sum[TENSORS][MOST], rest[TENSORS][MOST]; /* of the batches of a step, with residual */
static unsigned char state[TENSORS][KOPT_STATE_BYTES(MOST, 6)];

/* All that the training has to remember is here and in the arrays above, except grad, which each batch makes anew. */
typedef struct run {
    kopt_optimizer opt;
    kopt_tensor tensors[TENSORS];
    kopt_accumulator sums[TENSORS];
    kopt_scaler scaler;
    uint64_t batches; /* done so far: the position in the data */
} run;

static void check(kopt_result result) {
    if (result == KOPT_OK) return;
    fprintf(stderr, "%s\n", kopt_result_string(result));
    exit(2);
}

static float uniform(uint32_t seed, uint64_t i) { /* in [-1, 1) */
    kopt_random_key key = {0, 0, 0, 0};
    key.seed = seed;
    return (float)(kopt_random(key, 8, i) & 0xFFFFu) / 32768 - 1;
}

static void get_sample(uint64_t number, float *x, float *y) {
    int i;
    for (i = 0; i < INPUTS; ++i) x[i] = uniform(1, number * INPUTS + (uint64_t)i);
    *y = x[0] * x[1] + 0.5f * x[2];
}

/* The number of the sample at a position of the data. Every epoch has all samples in an order of its own. This is a
   function of the position alone, so the position is all that has to be saved. */
static uint64_t sample_at(uint64_t position) {
    kopt_random_key key = {2, 0, 0, 0};
    key.step = (uint32_t)(position / SAMPLES);
    return ((kopt_random(key, 8, 0) | 1) * (position % SAMPLES) + kopt_random(key, 8, 1)) % SAMPLES;
}

static float forward(const float *x, float *hidden) {
    float y = kopt_f32_from_bf16(weight[3][0]);
    int i, j;
    for (j = 0; j < HIDDEN; ++j) {
        hidden[j] = kopt_f32_from_bf16(weight[1][j]);
        for (i = 0; i < INPUTS; ++i) hidden[j] += kopt_f32_from_bf16(weight[0][j * INPUTS + i]) * x[i];
        if (hidden[j] < 0) hidden[j] = 0;
        y += kopt_f32_from_bf16(weight[2][j]) * hidden[j];
    }
    return y;
}

static double mean_loss(void) {
    double loss = 0;
    uint64_t s;
    for (s = 0; s < SAMPLES; ++s) {
        float x[INPUTS], hidden[HIDDEN], y, error;
        get_sample(s, x, &y);
        error = forward(x, hidden) - y;
        loss += (double)error * (double)error / (double)SAMPLES;
    }
    return loss;
}

/* Gradients of scale * (mean loss of the next batch), in fp16. */
static void backward(uint64_t batch, float scale) {
    float g[TENSORS][MOST] = {{0}};
    uint64_t s;
    size_t k, i, j;
    for (s = 0; s < BATCH; ++s) {
        float x[INPUTS], hidden[HIDDEN], y, dy;
        get_sample(sample_at(batch * BATCH + s), x, &y);
        dy = (forward(x, hidden) - y) * 2 / (float)BATCH * scale;
        for (j = 0; j < HIDDEN; ++j) {
            const float dh = hidden[j] > 0 ? dy * kopt_f32_from_bf16(weight[2][j]) : 0;
            for (i = 0; i < INPUTS; ++i) g[0][j * INPUTS + i] += dh * x[i];
            g[1][j] += dh;
            g[2][j] += dy * hidden[j];
        }
        g[3][0] += dy;
    }
    for (k = 0; k < TENSORS; ++k)
        for (i = 0; i < size_of[k]; ++i) grad[k][i] = kopt_fp16_from_f32(g[k][i]);
}

static void train_batch(run *r) {
    int k;
    backward(r->batches, (float)r->scaler.scale);
    for (k = 0; k < TENSORS; ++k)
        check(kopt_accumulator_add(&r->sums[k], grad[k], KOPT_FP16, 1.0 / (double)BATCHES_PER_STEP));
    if (r->sums[0].count == BATCHES_PER_STEP) {
        r->opt.lr = r->opt.step < 100 ? RATE * (r->opt.step + 1) / 100 : RATE; /* a function of the step: not saved */
        check(kopt_scaler_step(&r->scaler, &r->opt, r->tensors, TENSORS, 0, NULL, NULL));
        for (k = 0; k < TENSORS; ++k) r->sums[k].count = 0;
    }
    r->batches++;
}

/* All but the contents of weights and states, which come from a checkpoint or from start_afresh(). */
static void make(run *r) {
    int k;
    r->opt = kopt_adamw(RATE);
    r->scaler = kopt_scaler_of();
    r->scaler.interval = 50; /* a short training: look for a larger scale often */
    r->batches = 0;
    for (k = 0; k < TENSORS; ++k) {
        r->sums[k] = kopt_accumulator_of(sum[k], KOPT_BF16, rest[k], size_of[k]);
        r->sums[k].id = (uint32_t)k;
        r->tensors[k] = KOPT_TENSOR(KOPT_BF16, weight[k], sum[k], size_of[k], state[k], sizeof state[k]);
        r->tensors[k].no_decay = k % 2; /* of biases */
    }
    check(kopt_list_set_ids(r->tensors, TENSORS, 0));
}

static void start_afresh(const run *r) {
    float initial[TENSORS * MOST], *next = initial; /* one row, tensor after tensor */
    size_t k, i;
    for (k = 0; k < TENSORS; ++k)
        for (i = 0; i < size_of[k]; ++i) *next++ = (k % 2 == 0 ? 0.5f : 0) * uniform(3, k * MOST + i);
    check(kopt_state_init(&r->opt, r->tensors, TENSORS, initial));
}

/* ---- The checkpoint: MAGIC, what the program keeps, what kopt_save_to() writes, checksum of all before ----------- */

static const char MAGIC[8] = "my net 1"; /* of your own; another one when move_own() changes */

/* What kopt_save_to() does not have. One list of fields serves both directions, so that they cannot differ. */
static kopt_result move_own(stream *s, run *r) {
    kopt_scaler *c = &r->scaler;
    int k;
    if (move(s, &r->batches, 8, 1) != 0 || move(s, &c->scale, 8, 1) != 0 || move(s, &c->minimum, 8, 1) != 0 ||
        move(s, &c->growth, 8, 1) != 0 || move(s, &c->backoff, 8, 1) != 0 || move(s, &c->interval, 4, 1) != 0 ||
        move(s, &c->hysteresis, 4, 1) != 0 || move(s, &c->good, 4, 1) != 0 || move(s, &c->bad, 4, 1) != 0)
        return KOPT_ERROR_FILE;
    for (k = 0; k < TENSORS; ++k) {
        kopt_accumulator *a = &r->sums[k];
        uint64_t n = a->n;
        if (move(s, &n, 8, 1) != 0 || move(s, &a->count, 4, 1) != 0 || move(s, &a->step, 4, 1) != 0)
            return KOPT_ERROR_FILE;
        if (n != a->n) return KOPT_ERROR_MISMATCH;
        if (move(s, a->sum, 2, a->n) != 0 || move(s, a->residual, 2, a->n) != 0) return KOPT_ERROR_FILE;
    }
    return KOPT_OK;
}

/* Writes all to a file, or with fd -1 nowhere. *crc: the checksum of all. */
static kopt_result write_run(run *r, int fd, uint32_t *crc) {
    static stream s;
    kopt_file file = {write_bytes, NULL, &s};
    char magic[8];
    kopt_result result;
    s.fd = fd, s.saving = 1, s.crc = 0, s.used = 0;
    memcpy(magic, MAGIC, 8);
    if (move(&s, magic, 1, 8) != 0) return KOPT_ERROR_FILE;
    result = move_own(&s, r);
    if (result == KOPT_OK) result = kopt_save_to(&r->opt, r->tensors, TENSORS, &file);
    if (result == KOPT_OK && flush(&s) != 0) result = KOPT_ERROR_FILE;
    *crc = s.crc;
    return result == KOPT_OK && (move(&s, &s.crc, 4, 1) != 0 || flush(&s) != 0) ? KOPT_ERROR_FILE : result;
}

static int write_content(void *user, int fd) {
    uint32_t crc;
    const kopt_result result = write_run(user, fd, &crc);
    if (result == KOPT_ERROR_FILE) return -1; /* errno says why */
    check(result);
    return 0;
}

static int save(run *r, const char *path, int keep) {
    if (write_file_atomically(path, keep, write_content, r) == 0) {
        printf("saved: batch %llu\n", (unsigned long long)r->batches);
        return 0;
    }
    fprintf(stderr, "%s: batch %llu could not be saved: %s\n", path, (unsigned long long)r->batches, strerror(errno));
    return -1;
}

/* STOP: the file is good, but not for this program, or it cannot be opened. */
typedef enum outcome { LOADED, ABSENT, DAMAGED, STOP } outcome;

/* Is the last number of the file the checksum of all before it? -1 if the file cannot be read. */
static int is_whole(stream *s) {
    struct stat status;
    uint64_t end;
    uint32_t crc = 0, stored;
    if (fstat(s->fd, &status) != 0) return -1;
    if (status.st_size < 4) return 0;
    for (end = (uint64_t)status.st_size - 4; s->offset < end;) {
        const size_t size = end - s->offset < PIECE ? (size_t)(end - s->offset) : PIECE;
        if (read_bytes(s, 0, s->piece, size) != 0) return -1;
        crc = checksum(crc, s->piece, size);
        s->offset += size;
    }
    if (move(s, &stored, 4, 1) != 0) return -1;
    s->offset = 0;
    s->crc = crc;
    return stored == crc;
}

/* Could this training have come to these numbers? A checksum finds damage; it does not find what was made wrong and
   then got a checksum. Each field that the training relies on, and that could contradict another one, has its line
   here. */
static int is_possible(const run *r) {
    kopt_scaler c = r->scaler;
    int k;
    if (c.good >= c.interval || (c.good != 0 && c.bad != 0)) return 0;
    if (kopt_scaler_update(&c, 0) != KOPT_OK) return 0; /* of a copy: refuses numbers that are out of range */
    if (r->opt.step > r->batches / BATCHES_PER_STEP) return 0;
    for (k = 0; k < TENSORS; ++k)
        if (r->sums[k].count != r->batches % BATCHES_PER_STEP || r->sums[k].step != (uint32_t)r->batches) return 0;
    return 1;
}

static outcome load_from(run *r, int fd, const char *path) {
    static stream s;
    kopt_file file = {NULL, read_bytes, &s};
    char magic[8];
    uint32_t crc;
    int whole, damaged;
    kopt_result result = KOPT_ERROR_FILE;
    s.fd = fd, s.saving = 0, s.offset = 0;
    whole = is_whole(&s);
    if (whole == 0) return fprintf(stderr, "%s is damaged: its checksum is wrong\n", path), DAMAGED;
    if (whole > 0 && move(&s, magic, 1, 8) == 0) {
        if (memcmp(magic, MAGIC, 8) != 0) return fprintf(stderr, "%s is of another program\n", path), STOP;
        result = move_own(&s, r);
        if (result == KOPT_OK) result = kopt_load_from(&r->opt, r->tensors, TENSORS, &file);
    }
    /* What was loaded would be saved as this file: no field was missed, and nothing follows. */
    if (result == KOPT_OK && (!is_possible(r) || write_run(r, -1, &crc) != KOPT_OK || crc != s.crc))
        result = KOPT_ERROR_STATE;
    if (result == KOPT_OK) return LOADED;
    damaged = result == KOPT_ERROR_FILE || result == KOPT_ERROR_CHECKSUM; /* it was good when is_whole() read it */
    fprintf(stderr, "%s %s: %s\n", path, damaged ? "cannot be read" : "is of another model or version",
            result == KOPT_ERROR_FILE ? strerror(errno) : kopt_result_string(result));
    return damaged ? DAMAGED : STOP;
}

static outcome load(run *r, const char *path) {
    const int fd = open_file(path, O_RDONLY);
    outcome result;
    if (fd < 0 && errno == ENOENT) return ABSENT;
    if (fd < 0) return fprintf(stderr, "%s cannot be opened: %s\n", path, strerror(errno)), STOP;
    result = load_from(r, fd, path);
    close(fd);
    if (result == LOADED) printf("resumed: %s, batch %llu\n", path, (unsigned long long)r->batches);
    return result;
}

/* Loads the newest checkpoint that is good, or starts afresh if there is none at all. *keep: PATH itself is good, so
   that the next save may make it PATH.previous. Returns 0 if the training must not begin. */
static int resume(run *r, const char *path, int *keep) {
    char previous[NAME_SIZE];
    outcome newest = load(r, path), older;
    *keep = newest != DAMAGED;
    if (newest == LOADED) return 1;
    strcat(strcpy(previous, path), ".previous");
    older = newest == STOP ? STOP : load(r, previous);
    if (older == LOADED) return 1;
    if (newest == ABSENT && older == ABSENT) return start_afresh(r), 1;
    fprintf(stderr, "nothing was changed; to start afresh, move %s and %s away or name another file\n", path, previous);
    return 0;
}

/* Two programs that save to one file would destroy it. The system drops the lock when the program ends, in any way. */
static int lock(const char *path) {
    char name[NAME_SIZE];
    int fd;
    strcat(strcpy(name, path), ".lock");
    fd = open_file(name, O_RDWR | O_CREAT);
    if (fd < 0) return fprintf(stderr, "%s: nothing can be saved there: %s\n", path, strerror(errno)), 0;
    if (lockf(fd, F_TLOCK, 0) != 0 && (errno == EACCES || errno == EAGAIN))
        return fprintf(stderr, "%s is in use by another program\n", path), 0;
    return 1; /* fd stays open, and with it the lock */
}

int main(int argc, char **argv) {
    const char *path = argc > 1 ? argv[1] : "run.checkpoint";
    const uint64_t batches = argc > 2 ? strtoull(argv[2], NULL, 10) : 200000;
    const uint64_t every = argc > 3 ? strtoull(argv[3], NULL, 10) : 10000;
    static run r;
    uint32_t crc;
    int keep, saved = 1;
    setvbuf(stdout, NULL, _IOLBF, 4096); /* so that each line is seen at once, also in a pipe */
    if (strlen(path) > NAME_SIZE - 16 || every == 0) return fputs("FILE is too long, or SAVE_EVERY is 0\n", stderr), 2;
    if (!lock(path)) return 1;
    make(&r);
    if (!resume(&r, path, &keep)) return 1;
    while (r.batches < batches) {
        train_batch(&r);
        if (r.batches % every != 0 && r.batches < batches) continue;
        saved = save(&r, path, keep) == 0; /* if it fails, the training goes on and saves the next time */
        keep |= saved;
    }
    check(write_run(&r, -1, &crc));
    printf("batch %llu, step %lu, loss %.6f, all weights and states %08lx\n", (unsigned long long)r.batches,
           (unsigned long)r.opt.step, mean_loss(), (unsigned long)crc);
    return !saved;
}
