/* zero1.c - training on several ranks of MPI, each of which keeps its share of the optimizer's state (ZeRO stage 1).

       mpicc -O2 -o zero1 docs/examples/zero1.c && mpirun -n 4 ./zero1 --checkpoint zero1.state

   Every number of ranks gives the same bits, and the same checkpoint. Kill a rank, start again with another number of
   ranks: the run goes on from the checkpoint as if nothing had happened. docs/distributed.md says how it works.

       --steps N          stop after N batches (60)
       --checkpoint FILE  go on from FILE if it is there; save there at the start, every --every batches, and at the end
       --every N          (20)
       --fp16             weights and gradients in fp16 with a loss scale, instead of bf16
       --small            weights with an 8-bit compensation and moments of 8 bits: KOPT_COMPACT and KOPT_Q8
       --compress CODE    gradients go from rank to rank in 8 bits (q8) or 1 bit (sign), with error feedback, or those
                          of --fp16 in bf16 */
#define _POSIX_C_SOURCE 200809L
#define KAHAN_OPT_IMPLEMENTATION
#include "../../kahan_opt.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* A batch is MICRO_BATCHES micro-batches, whatever the number of ranks: so the gradient is always the same sum. Tensors
   are cut into chunks, whatever the number of ranks: a rank owns whole chunks, and the checkpoint consists of chunks.
   CHUNK is a multiple of 256, a block of signs, and so of the blocks of 8-bit codes, 64. Make it larger for a larger
   model: 1 << 20. */
enum { MICRO_BATCHES = 12, SAMPLES = 8, CHUNK = 512, SEED = 1 };
static const double RATE = 0.002, MAX_NORM = 1.0;

static int fp16, small;
static kopt_format format = KOPT_BF16; /* of weights and gradients */
static kopt_format code = KOPT_F32;    /* of gradients on the wire; F32: no --compress */

static kopt_optimizer make_optimizer(void) {
    kopt_optimizer opt = kopt_adamw(RATE);
    opt.seed = SEED;
    opt.grad_scale = 1.0 / MICRO_BATCHES; /* the mean of the micro-batches */
    if (small) opt.rounding = KOPT_COMPACT, opt.first_moment_format = opt.second_moment_format = KOPT_Q8;
    return opt;
}

static kopt_scaler make_scaler(void) {
    kopt_scaler scaler = kopt_scaler_of();
    scaler.interval = 10;                                                       /* soon: the run is short */
    if (!fp16) scaler.scale = scaler.minimum = 1, scaler.interval = UINT32_MAX; /* only skips what is not finite */
    return scaler;
}

/* ---- The model -------------------------------------------------------------------------------------------------- */

/* Three layers learn a function of random points. Tensor k: the weights of layer k, with the bias as last column. */

enum { LAYERS = 3, INPUTS = 40, HIDDEN = 70, OUTPUTS = 10 };
static const size_t width[LAYERS + 1] = {INPUTS, HIDDEN, HIDDEN, OUTPUTS};
static float output[LAYERS + 1][SAMPLES][HIDDEN + 1], slope[LAYERS + 1][SAMPLES][HIDDEN + 1];

static size_t tensor_size(int k) { return width[k + 1] * (width[k] + 1); }
static float wide(uint16_t x) { return fp16 ? kopt_f32_from_fp16(x) : kopt_f32_from_bf16(x); }
static uint16_t narrow(float x) { return fp16 ? kopt_fp16_from_f32(x) : kopt_bf16_from_f32(x); }

static float uniform(uint32_t id, uint32_t stream, uint64_t i) { /* from -1 to 1 */
    const kopt_random_key key = {SEED, 0, id, 0};
    return (float)(kopt_random(key, stream, i) & 0xFFFF) / 32768 - 1;
}

static float initial_weight(int k, uint64_t i) { return 0.2f * uniform((uint32_t)k, 8, i); }

/* Forward pass of a micro-batch. Sample i of the run is a function of i alone, so any rank can make it. Returns the
   loss. */
static double forward(uint16_t *const *weight, uint64_t micro_batch, float loss_scale) {
    double loss = 0;
    for (size_t s = 0; s < SAMPLES; ++s) {
        float *x = output[0][s];
        for (size_t i = 0; i < INPUTS; ++i) x[i] = uniform(0, 9, (micro_batch * SAMPLES + s) * INPUTS + i);
        for (int k = 0; k < LAYERS; ++k) {
            const uint16_t *w = weight[k];
            output[k][s][width[k]] = 1; /* times the bias */
            for (size_t o = 0; o < width[k + 1]; ++o) {
                float sum = 0;
                for (size_t i = 0; i <= width[k]; ++i) sum += wide(*w++) * output[k][s][i];
                output[k + 1][s][o] = sum > 0 || k == LAYERS - 1 ? sum : 0;
            }
        }
        for (size_t o = 0; o < OUTPUTS; ++o) {
            const float wanted = x[o] * x[o + 10] + (x[o + 20] > 0 ? x[o + 20] : x[o + 30]);
            const float error = output[LAYERS][s][o] - wanted;
            slope[LAYERS][s][o] = loss_scale * error / SAMPLES;
            loss += 0.5 * (double)error * (double)error / SAMPLES;
        }
    }
    return loss;
}

/* Backward pass of layer k: its 16-bit gradient, and the slopes for layer k - 1. */
static void backward(int k, const uint16_t *weight, uint16_t *grad) {
    const size_t columns = width[k] + 1;
    for (size_t o = 0; o < width[k + 1]; ++o)
        for (size_t i = 0; i < columns; ++i) {
            float sum = 0;
            for (size_t s = 0; s < SAMPLES; ++s) sum += slope[k + 1][s][o] * output[k][s][i];
            grad[o * columns + i] = narrow(sum);
        }
    for (size_t s = 0; s < SAMPLES; ++s)
        for (size_t i = 0; i < width[k]; ++i) {
            float sum = 0;
            for (size_t o = 0; o < width[k + 1]; ++o) sum += wide(weight[o * columns + i]) * slope[k + 1][s][o];
            slope[k][s][i] = output[k][s][i] > 0 ? sum : 0;
        }
}

#ifndef ZERO1_MODEL_ONLY
#include <mpi.h>

static int rank, ranks;

/* Bytes on this rank: of whole tensors, of its share, of residuals, and of what is on its way. */
enum { WHOLE, SHARE, RESIDUAL, ON_ITS_WAY, KINDS };
static double allocated[KINDS];

static void fail(const char *text, ...) { /* ends all ranks */
    char line[1000];
    va_list arguments;
    va_start(arguments, text);
    vsnprintf(line, sizeof line, text, arguments);
    va_end(arguments);
    fprintf(stderr, "zero1: rank %d of %d: %s\n", rank, ranks, line);
    MPI_Abort(MPI_COMM_WORLD, 1);
    exit(1);
}

static void check(kopt_result result, const char *what) {
    if (result != KOPT_OK) fail("%s: %s", what, kopt_result_string(result));
}

static void *allocate(int kind, size_t bytes) {
    void *p = calloc(bytes + 1, 1); /* + 1: never NULL for 0 bytes */
    if (p == NULL) fail("no memory for %zu bytes", bytes);
    allocated[kind] += (double)bytes;
    return p;
}

/* ---- Chunks and shards ------------------------------------------------------------------------------------------ */

static size_t chunk_count(int k) { return (tensor_size(k) + CHUNK - 1) / CHUNK; }

static kopt_tensor chunk_of(int k, size_t c) {
    const size_t first = c * CHUNK, left = tensor_size(k) - first;
    kopt_tensor t = kopt_tensor_of(NULL, format, NULL, KOPT_F32, left < CHUNK ? left : CHUNK, NULL, 0);
    t.id = (uint32_t)k;
    t.first_index = first;
    return t;
}

/* Where the shard of rank r begins in tensor k; place = 1: where it ends. The shards of tensor k begin at rank -k, so
   that small tensors do not all go to the same rank. */
static size_t cut(int k, int r, int place) {
    const size_t turn = (size_t)((r + k) % ranks + place), at = chunk_count(k) * turn / (size_t)ranks * CHUNK;
    return at < tensor_size(k) ? at : tensor_size(k);
}
static size_t shard_size(int k, int r) { return cut(k, r, 1) - cut(k, r, 0); }

/* Whole tensors, on every rank. */
static uint16_t *weight[LAYERS], *grad[LAYERS];
/* This rank's share: the sum of the micro-batches, and its chunks, in the order of the tensors, with their state. */
static float *sum[LAYERS];
static kopt_tensor *chunks;
static size_t chunks_here;
/* Error feedback: what the code of a micro-batch lost of tensor k, on the rank that computes this micro-batch. */
static kopt_bf16 *residual[MICRO_BATCHES][LAYERS];

static kopt_optimizer opt;
static kopt_scaler scaler;
static uint32_t batch, skips; /* batches so far, and those of them that were skipped */

static void make_chunks(void) {
    size_t i = 0;
    for (int k = 0; k < LAYERS; ++k) chunks_here += (shard_size(k, rank) + CHUNK - 1) / CHUNK;
    chunks = allocate(SHARE, chunks_here * sizeof *chunks);
    for (int k = 0; k < LAYERS; ++k) {
        const size_t begin = cut(k, rank, 0), end = cut(k, rank, 1);
        weight[k] = allocate(WHOLE, tensor_size(k) * sizeof *weight[k]);
        grad[k] = allocate(WHOLE, tensor_size(k) * sizeof *grad[k]);
        sum[k] = allocate(SHARE, (end - begin) * sizeof *sum[k]);
        for (size_t at = begin; at < end; at += CHUNK) {
            kopt_tensor *t = &chunks[i++];
            *t = chunk_of(k, at / CHUNK);
            t->weight = weight[k] + at;
            t->grad = sum[k] + (at - begin);
            t->state_size = kopt_state_size(&opt, t);
            t->state = allocate(SHARE, t->state_size);
        }
        for (int m = rank; m < MICRO_BATCHES && code != format; m += ranks)
            residual[m][k] = allocate(RESIDUAL, tensor_size(k) * sizeof(kopt_bf16));
    }
}

static void initialize_weights(void) {
    float initial[CHUNK];
    for (size_t i = 0; i < chunks_here; ++i) {
        const kopt_tensor *t = &chunks[i];
        for (size_t j = 0; j < t->n; ++j) initial[j] = initial_weight((int)t->id, t->first_index + j);
        check(kopt_state_init(&opt, t, 1, initial), "kopt_state_init");
    }
}

/* ---- Reduce-scatter in a fixed order ---------------------------------------------------------------------------- */

/* An all-to-all of the 16-bit or compressed gradients of one tensor: each rank gets its shard of the gradients of all
   ranks. In round i the ranks have the micro-batches i, i + 1, ..., and add them in this order. Over all rounds this is
   the order 0, 1, 2, ..., for any number of ranks. Two exchanges are under way at a time: that of tensor k uses
   exchange[k % 2]. */
static struct {
    unsigned char *code, *received;
    int *send_count, *send_place, *receive_count, *receive_place;
    MPI_Request request;
} exchange[2];
static double bytes_received; /* from other ranks */

static void make_exchange(void) {
    size_t largest = 0, share = 0;
    for (int k = 0; k < LAYERS; ++k) {
        const size_t whole = kopt_format_size(code, tensor_size(k));
        const size_t mine = kopt_format_size(code, shard_size(k, rank));
        if (whole > INT_MAX || tensor_size(k) > INT_MAX || mine > INT_MAX / (size_t)ranks)
            fail("tensor %d is too large for one call of MPI", k);
        if (whole > largest) largest = whole;
        if (mine > share) share = mine;
    }
    for (int i = 0; i < 2; ++i) {
        exchange[i].code = allocate(ON_ITS_WAY, code == format ? 0 : largest);
        exchange[i].received = allocate(ON_ITS_WAY, (size_t)ranks * share);
        exchange[i].send_count = allocate(ON_ITS_WAY, (size_t)ranks * sizeof(int));
        exchange[i].send_place = allocate(ON_ITS_WAY, (size_t)ranks * sizeof(int));
        exchange[i].receive_count = allocate(ON_ITS_WAY, (size_t)ranks * sizeof(int));
        exchange[i].receive_place = allocate(ON_ITS_WAY, (size_t)ranks * sizeof(int));
    }
}

static void start_exchange(int k, int round) {
    const int micro_batch = round + rank, sends = micro_batch < MICRO_BATCHES;
    const void *from = grad[k];
    if (sends && code != format) {
        kopt_compressor c = kopt_compressor_of(code, residual[micro_batch][k], tensor_size(k));
        c.seed = SEED;
        c.id = (uint32_t)(micro_batch * LAYERS + k);
        c.step = batch; /* it has been called once per batch */
        from = exchange[k % 2].code;
        check(kopt_compress(&c, exchange[k % 2].code, kopt_format_size(code, c.n), grad[k], format), "kopt_compress");
    }
    for (int r = 0; r < ranks; ++r) {
        const size_t mine = kopt_format_size(code, shard_size(k, rank));
        exchange[k % 2].send_count[r] = sends ? (int)kopt_format_size(code, shard_size(k, r)) : 0;
        exchange[k % 2].send_place[r] = (int)kopt_format_size(code, cut(k, r, 0));
        exchange[k % 2].receive_count[r] = round + r < MICRO_BATCHES ? (int)mine : 0;
        exchange[k % 2].receive_place[r] = (int)mine * r;
        if (r != rank) bytes_received += exchange[k % 2].receive_count[r];
    }
    MPI_Ialltoallv(from, exchange[k % 2].send_count, exchange[k % 2].send_place, MPI_BYTE, exchange[k % 2].received,
                   exchange[k % 2].receive_count, exchange[k % 2].receive_place, MPI_BYTE, MPI_COMM_WORLD,
                   &exchange[k % 2].request);
}

static void finish_exchange(int k, int round) {
    const size_t n = shard_size(k, rank), bytes = kopt_format_size(code, n);
    MPI_Wait(&exchange[k % 2].request, MPI_STATUS_IGNORE);
    for (int r = 0; r < ranks && round + r < MICRO_BATCHES; ++r)
        check(kopt_decompress_add(sum[k], KOPT_F32, exchange[k % 2].received + bytes * (size_t)r, bytes, code, n, 1),
              "kopt_decompress_add");
}

/* The gradients of a batch, summed in the shards. Tensor k is on its way while k - 1 is computed. Returns the loss. */
static double compute_gradients(void) {
    double loss[MICRO_BATCHES] = {0}, mean = 0;
    for (int k = 0; k < LAYERS; ++k) memset(sum[k], 0, shard_size(k, rank) * sizeof *sum[k]);
    for (int round = 0; round < MICRO_BATCHES; round += ranks) {
        const int m = round + rank, computes = m < MICRO_BATCHES;
        if (computes) loss[m] = forward(weight, (uint64_t)batch * MICRO_BATCHES + (uint64_t)m, (float)scaler.scale);
        for (int k = LAYERS; k-- > 0;) {
            if (computes) backward(k, weight[k], grad[k]);
            start_exchange(k, round);
            if (k + 1 < LAYERS) finish_exchange(k + 1, round);
        }
        finish_exchange(0, round);
    }
    MPI_Allreduce(MPI_IN_PLACE, loss, MICRO_BATCHES, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD); /* each plus zeros: exact */
    for (int m = 0; m < MICRO_BATCHES; ++m) mean += loss[m] / MICRO_BATCHES;
    return mean;
}

/* ---- Step and all-gather ---------------------------------------------------------------------------------------- */

static int *gather_count[LAYERS], *gather_place[LAYERS];
static MPI_Request gathering[LAYERS];

static void make_gather(void) {
    for (int k = 0; k < LAYERS; ++k) {
        gather_count[k] = allocate(ON_ITS_WAY, (size_t)ranks * sizeof(int));
        gather_place[k] = allocate(ON_ITS_WAY, (size_t)ranks * sizeof(int));
        for (int r = 0; r < ranks; ++r) {
            gather_count[k][r] = (int)shard_size(k, r);
            gather_place[k][r] = (int)cut(k, r, 0);
        }
    }
}

static void start_gather(int k) {
    MPI_Iallgatherv(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, weight[k], gather_count[k], gather_place[k], MPI_UINT16_T,
                    MPI_COMM_WORLD, &gathering[k]);
    bytes_received += (double)((tensor_size(k) - shard_size(k, rank)) * sizeof *weight[k]);
}

/* The norm needs the gradients of all tensors, so no step begins before the last exchange. It is an exact sum: its
   words are the same in any order. Then the weights of tensor k are on their way while k + 1 is stepped. */
static void step_shards(void) {
    kopt_norm norm = {0};
    kopt_step step;
    int skipped;
    for (int k = 0; k < LAYERS; ++k) check(kopt_norm_add(&norm, sum[k], KOPT_F32, shard_size(k, rank)), "kopt_norm");
    MPI_Allreduce(MPI_IN_PLACE, &norm, sizeof norm / sizeof(uint64_t), MPI_UINT64_T, MPI_SUM, MPI_COMM_WORLD);
    check(kopt_scaler_begin(&scaler, &step, &opt, 1, &norm, MAX_NORM, &skipped), "kopt_scaler_begin");
    skips += (uint32_t)skipped;
    if (skipped) return; /* on all ranks: all have the same norm */
    size_t first = 0, end = 0;
    for (int k = 0; k < LAYERS; ++k, first = end) {
        while (end < chunks_here && chunks[end].id == (uint32_t)k) ++end;
        check(kopt_step_run(&step, chunks + first, end - first), "a step");
        start_gather(k);
    }
    MPI_Waitall(LAYERS, gathering, MPI_STATUSES_IGNORE);
}

/* ---- The checkpoint: one file, in which everything has the same place for any number of ranks ------------------- */

/* The header, then a kopt_save() image of each chunk and, with --compress, of each chunk of each residual. Each rank
   writes and reads the images of what it has. */
enum { HEADER = 512 };
static const char *file_name;

/* A residual is saved like the weights of an optimizer without state that has made `batch` steps. */
static kopt_optimizer residual_optimizer(void) {
    kopt_optimizer o = kopt_sgd(0, 0);
    o.rounding = KOPT_NEAREST;
    o.seed = SEED;
    o.step = batch;
    return o;
}

typedef void image_function(int file, const kopt_optimizer *o, const kopt_tensor *t, off_t place);

/* Calls the function for each image of this rank, and returns the size of the file. */
static off_t for_each_image(int file, image_function *function) {
    const kopt_optimizer o = residual_optimizer();
    size_t i = 0;
    off_t place = HEADER;
    for (int k = 0; k < LAYERS; ++k)
        for (size_t c = 0; c < chunk_count(k); ++c) {
            const kopt_tensor t = chunk_of(k, c);
            if (i < chunks_here && chunks[i].id == t.id && chunks[i].first_index == t.first_index)
                function(file, &opt, &chunks[i++], place);
            place += (off_t)kopt_save_size(&opt, &t, 1);
        }
    for (int m = 0; m < MICRO_BATCHES && code != format; ++m)
        for (int k = 0; k < LAYERS; ++k)
            for (size_t c = 0; c < chunk_count(k); ++c) {
                kopt_tensor t = chunk_of(k, c);
                t.weight_format = KOPT_BF16;
                t.id = (uint32_t)(m * LAYERS + k);
                if (m % ranks == rank) {
                    t.weight = residual[m][k] + t.first_index;
                    function(file, &o, &t, place);
                }
                place += (off_t)kopt_save_size(&o, &t, 1);
            }
    return place;
}

static void no_function(int file, const kopt_optimizer *o, const kopt_tensor *t, off_t place) {
    (void)file, (void)o, (void)t, (void)place;
}

static void write_all(int file, const void *from, size_t size, off_t place) {
    const unsigned char *p = from;
    while (size > 0) {
        const ssize_t done = pwrite(file, p, size, place);
        if (done < 0 && errno == EINTR) continue;
        if (done <= 0) fail("cannot write %s.new: %s", file_name, done < 0 ? strerror(errno) : "no room");
        p += done, size -= (size_t)done, place += done;
    }
}

static void read_all(int file, void *to, size_t size, off_t place) {
    unsigned char *p = to;
    while (size > 0) {
        const ssize_t done = pread(file, p, size, place);
        if (done < 0 && errno == EINTR) continue;
        if (done <= 0)
            fail("cannot read %s: %s (%s.previous is the one before)", file_name,
                 done < 0 ? strerror(errno) : "it ends too early", file_name);
        p += done, size -= (size_t)done, place += done;
    }
}

static void save_image(int file, const kopt_optimizer *o, const kopt_tensor *t, off_t place) {
    const size_t size = kopt_save_size(o, t, 1);
    void *bytes = malloc(size);
    if (bytes == NULL) fail("no memory for %zu bytes", size);
    check(kopt_save(o, t, 1, bytes, size), "kopt_save");
    write_all(file, bytes, size, place);
    free(bytes);
}

static void load_image(int file, const kopt_optimizer *o, const kopt_tensor *t, off_t place) {
    const size_t size = kopt_save_size(o, t, 1);
    kopt_optimizer loaded = *o;
    void *bytes = malloc(size);
    if (bytes == NULL) fail("no memory for %zu bytes", size);
    read_all(file, bytes, size, place);
    const kopt_result result = kopt_load(&loaded, t, 1, bytes, size);
    free(bytes);
    if (result != KOPT_OK)
        fail("%s: the image at byte %jd, tensor %u from element %" PRIu64 ": %s (%s.previous is the one before)",
             file_name, (intmax_t)place, (unsigned)t->id, t->first_index, kopt_result_string(result), file_name);
    if (loaded.step != o->step || loaded.seed != o->seed)
        fail("%s: the image at byte %jd is of step %u, the header of step %u: it is from another checkpoint", file_name,
             (intmax_t)place, (unsigned)loaded.step, (unsigned)o->step);
}

static uint64_t hash(uint64_t h, const void *bytes, size_t size) { /* FNV-1a */
    for (const unsigned char *p = bytes; size > 0; --size) h = (h ^ *p++) * UINT64_C(1099511628211);
    return h;
}
#define HASH_OF_NOTHING UINT64_C(14695981039346656037)

/* Everything that is not in a tensor, as text, with its hash in the last 17 bytes. */
static void write_options(char *text, size_t size) {
    snprintf(text, size, "zero1 1\n%s %s %d micro-batches, chunks of %d, code %d\n", fp16 ? "fp16" : "bf16",
             small ? "compact q8" : "kahan bf16", MICRO_BATCHES, CHUNK, (int)code);
}

static void write_header(char *text) {
    memset(text, '\n', HEADER);
    write_options(text, HEADER);
    const size_t at = strlen(text);
    text[at + (size_t)snprintf(text + at, HEADER - at,
                               "batch %u skips %u step %u scale %.17g good %u bad %u size %jd\n", (unsigned)batch,
                               (unsigned)skips, (unsigned)opt.step, scaler.scale, (unsigned)scaler.good,
                               (unsigned)scaler.bad, (intmax_t)for_each_image(-1, no_function))] = '\n';
    snprintf(text + HEADER - 17, 17, "%016" PRIx64, hash(HASH_OF_NOTHING, text, HEADER - 17));
    text[HEADER - 1] = '\n';
}

static void read_header(char *text) {
    char options[HEADER], sum_of_text[17];
    unsigned batches, skipped, steps, good, bad;
    intmax_t size;
    text[HEADER - 1] = 0;
    write_options(options, sizeof options);
    snprintf(sum_of_text, sizeof sum_of_text, "%016" PRIx64, hash(HASH_OF_NOTHING, text, HEADER - 17));
    if (strncmp(text, "zero1 1\n", 8) != 0) fail("%s is not a checkpoint of zero1", file_name);
    if (strcmp(text + HEADER - 17, sum_of_text) != 0)
        fail("%s: its header is damaged (%s.previous is the one before)", file_name, file_name);
    if (strncmp(text, options, strlen(options)) != 0)
        fail("%s was made with other options:\n%.*sthis run:\n%s", file_name, (int)strcspn(text + 8, "\n") + 1,
             text + 8, options + 8);
    if (sscanf(text + strlen(options), "batch %u skips %u step %u scale %lf good %u bad %u size %jd", &batches,
               &skipped, &steps, &scaler.scale, &good, &bad, &size) != 7 ||
        size != (intmax_t)for_each_image(-1, no_function))
        fail("%s: its header is of another version of zero1", file_name);
    batch = batches, skips = skipped, opt.step = steps, scaler.good = good, scaler.bad = bad;
}

static int open_file(const char *name, int flags) {
    const int file = open(name, flags, 0666);
    if (file < 0) fail("cannot open %s: %s (all ranks need the same folder)", name, strerror(errno));
    return file;
}

static void close_file(int file, const char *name) {
    if (fsync(file) != 0 || close(file) != 0) fail("cannot write %s: %s", name, strerror(errno));
}

/* FILE.new becomes FILE only after all ranks have written their images and these are on the disk. So FILE is always a
   whole checkpoint, and FILE.previous the one before. */
static void save(void) {
    char header[HEADER], fresh[4096], previous[4096], folder[4096];
    snprintf(fresh, sizeof fresh, "%s.new", file_name);
    snprintf(previous, sizeof previous, "%s.previous", file_name);
    snprintf(folder, sizeof folder, "%s", file_name);
    char *slash = strrchr(folder, '/');
    strcpy(slash == NULL ? folder : slash + 1, ".");
    write_header(header);
    if (rank == 0) {
        const int file = open_file(fresh, O_WRONLY | O_CREAT | O_TRUNC);
        write_all(file, header, HEADER, 0);
        close_file(file, fresh);
    }
    MPI_Barrier(MPI_COMM_WORLD);
    const int file = open_file(fresh, O_WRONLY);
    for_each_image(file, save_image);
    close_file(file, fresh);
    MPI_Barrier(MPI_COMM_WORLD); /* a rank that fails does not come here: then nobody does */
    if (rank == 0) {
        unlink(previous);
        if (link(file_name, previous) != 0 && errno != ENOENT) /* ENOENT: the first checkpoint */
            fail("cannot keep %s as %s: %s", file_name, previous, strerror(errno));
        if (rename(fresh, file_name) != 0) fail("cannot rename %s to %s: %s", fresh, file_name, strerror(errno));
        const int directory = open_file(folder, O_RDONLY);
        close_file(directory, folder);
    }
}

/* Is there a checkpoint? If only the one before is, a new run would soon replace it. */
static int find(void) {
    char previous[4096];
    if (access(file_name, F_OK) == 0) return 1;
    if (errno != ENOENT) fail("cannot read %s: %s", file_name, strerror(errno));
    snprintf(previous, sizeof previous, "%s.previous", file_name);
    if (access(previous, F_OK) == 0)
        fail("%s is missing, but %s is there: rename it to go on, remove it to begin anew", file_name, previous);
    return 0;
}

/* All ranks take the header from rank 0, and refuse images of another step. */
static int load(void) {
    char header[HEADER];
    int there = rank == 0 && find();
    MPI_Bcast(&there, 1, MPI_INT, 0, MPI_COMM_WORLD);
    if (!there) return 0;
    const int file = open_file(file_name, O_RDONLY);
    if (rank == 0) read_all(file, header, HEADER, 0);
    MPI_Bcast(header, HEADER, MPI_CHAR, 0, MPI_COMM_WORLD);
    read_header(header);
    for_each_image(file, load_image);
    close(file);
    return 1;
}

/* ---- main ------------------------------------------------------------------------------------------------------- */

static int usage(void) {
    if (rank == 0)
        fputs("usage: zero1 [--steps N] [--checkpoint FILE [--every N]] [--fp16] [--small] [--compress q8|sign|bf16]\n",
              stderr);
    MPI_Finalize();
    return 2;
}

static uint32_t number(const char *text) { /* 0: none */
    char *end;
    const unsigned long n = strtoul(text, &end, 10);
    return *text >= '0' && *text <= '9' && *end == 0 && n <= 1000000000 ? (uint32_t)n : 0;
}

int main(int argc, char **argv) {
    uint32_t steps = 60, every = 20;
    size_t parameters = 0;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    for (int i = 1; i < argc; ++i) {
        const char *value = i + 1 < argc ? argv[i + 1] : "";
        if (strcmp(argv[i], "--fp16") == 0)
            fp16 = 1;
        else if (strcmp(argv[i], "--small") == 0)
            small = 1;
        else if (strcmp(argv[i], "--steps") == 0 && number(value) > 0)
            steps = number(argv[++i]);
        else if (strcmp(argv[i], "--every") == 0 && number(value) > 0)
            every = number(argv[++i]);
        else if (strcmp(argv[i], "--checkpoint") == 0 && *value != 0 && strlen(value) < 4000)
            file_name = argv[++i];
        else if (strcmp(argv[i], "--compress") == 0 && strcmp(value, "q8") == 0)
            code = KOPT_Q8, ++i;
        else if (strcmp(argv[i], "--compress") == 0 && strcmp(value, "sign") == 0)
            code = KOPT_Q1, ++i;
        else if (strcmp(argv[i], "--compress") == 0 && strcmp(value, "bf16") == 0)
            code = KOPT_BF16, ++i;
        else
            return usage();
    }
    format = fp16 ? KOPT_FP16 : KOPT_BF16;
    if (code == KOPT_F32) code = format;
    opt = make_optimizer();
    scaler = make_scaler();
    make_chunks();
    make_exchange();
    make_gather();
    initialize_weights();

    if (file_name != NULL && load()) {
        if (rank == 0) printf("%s: goes on after batch %u\n", file_name, (unsigned)batch);
    } else if (file_name != NULL) {
        save(); /* a folder that cannot be written is noticed now, not after hours */
    }
    for (int k = 0; k < LAYERS; ++k) start_gather(k), parameters += tensor_size(k);
    MPI_Waitall(LAYERS, gathering, MPI_STATUSES_IGNORE);
    bytes_received = 0;

    const uint32_t first = batch;
    while (batch < steps) {
        const double loss = compute_gradients();
        step_shards();
        ++batch;
        if (rank == 0 && (batch % 10 == 0 || batch == steps)) printf("batch %u: loss %.6f\n", (unsigned)batch, loss);
        if (file_name != NULL && (batch % every == 0 || batch == steps)) save();
    }

    uint64_t mine = HASH_OF_NOTHING, least, most;
    double bytes[KINDS + 1], scale = 1.0 / ranks / (double)parameters; /* the mean of the ranks */
    memcpy(bytes, allocated, sizeof allocated);
    bytes[KINDS] = batch > first ? bytes_received / (batch - first) : 0;
    for (int k = 0; k < LAYERS; ++k) mine = hash(mine, weight[k], tensor_size(k) * sizeof *weight[k]);
    MPI_Allreduce(&mine, &least, 1, MPI_UINT64_T, MPI_MIN, MPI_COMM_WORLD);
    MPI_Allreduce(&mine, &most, 1, MPI_UINT64_T, MPI_MAX, MPI_COMM_WORLD);
    if (least != most) fail("the ranks have different weights");
    MPI_Allreduce(MPI_IN_PLACE, bytes, KINDS + 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
    if (rank == 0)
        printf(
            "bytes per parameter on each of %d ranks: weights and gradients %.2f, share %.2f, residuals %.2f, on its "
            "way %.2f; received in a step %.3f\n"
            "%u steps, %u skipped; weights %016" PRIx64 "\n",
            ranks, bytes[WHOLE] * scale, bytes[SHARE] * scale, bytes[RESIDUAL] * scale, bytes[ON_ITS_WAY] * scale,
            bytes[KINDS] * scale, (unsigned)opt.step, (unsigned)skips, mine);
    MPI_Finalize();
    return 0;
}
#endif
