/* inspect.c - says in words what the checkpoints of kopt_save() in a file hold, and whether they are whole.

       cc -O2 -o inspect docs/examples/inspect.c -lm && ./inspect FILE...

   A checkpoint may stand anywhere in a file, as in those of checkpoint.c, and may be followed by others. Of a damaged
   one it says where, if a single flipped bit explains the damage. Exit status 0: each file has a checkpoint, and all
   are whole; 1: not so; 2: a file cannot be read. */
#define KAHAN_OPT_VMATH /* knows all rules */
#define KAHAN_OPT_IMPLEMENTATION
#include "../../kahan_opt.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { CHECKSUM = 4, LISTED = 20 }; /* bytes of a CRC-32, which locate() computes; tensors that are listed */

typedef const unsigned char *bytes;

static uint64_t number(bytes p, int size) { return size == 0 ? 0 : p[0] | number(p + 1, size - 1) << 8; }

static const char *const formats[] = {"fp32", "bf16", "fp16", "8-bit"};

/* rounds: there are 16-bit weights. */
static void describe(const kopt_optimizer *o, int rounds) {
    static const char *const rules[] = {"SGD", "Adam", "Lion", "Adan", "RAdam", "Ranger", "EMA", "Adam-atan2"};
    static const char *const roundings[] = {"nearest", "stochastic", "Kahan", "compact", "exact", "feedback"};
    static const char *const decays[] = {"L2", "decoupled", "fully decoupled"};
    const char *const name = (size_t)o->rule < sizeof rules / sizeof *rules ? rules[o->rule] : "unknown rule";
    const char *const rule = o->rule == KOPT_RULE_ADAM && o->decay_mode != KOPT_DECAY_L2 ? "AdamW" : name;
    const int moments = o->rule == KOPT_RULE_EMA || (o->rule == KOPT_RULE_SGD && o->momentum <= 0) ? 0 : 1;
    const int two = moments && o->rule != KOPT_RULE_SGD && o->rule != KOPT_RULE_LION;
    printf("  optimizer  %s%s%s%s, step %lu, seed %llu\n", o->stable ? "Stable" : "", rule,
           o->amsgrad ? " with AMSGrad" : "", o->nesterov ? " with Nesterov momentum" : "", (unsigned long)o->step,
           (unsigned long long)o->seed);
    printf("  settings   lr %g, weight decay %g (%s)", o->lr, o->weight_decay, decays[o->decay_mode]);
    if (o->rule == KOPT_RULE_SGD)
        printf(", momentum %g, dampening %g\n", o->momentum, o->dampening);
    else if (o->rule == KOPT_RULE_ADAN)
        printf(", beta %g %g %g, eps %g\n", o->beta1, o->beta2, o->beta3, o->eps);
    else
        printf(", beta %g %g, eps %g\n", o->beta1, o->beta2, o->eps);
    if (rounds) {
        printf("  rounding   %s", roundings[o->rounding]);
        if (o->rounding == KOPT_KAHAN || o->rounding == KOPT_COMPACT)
            printf(", its residual %s", roundings[o->residual_rounding]);
        puts("");
    }
    printf("  moments    %s", moments ? formats[o->first_moment_format] : "none");
    if (two && o->second_moment_format != o->first_moment_format) printf(" and %s", formats[o->second_moment_format]);
    if (moments && (o->first_moment_format != KOPT_F32 || (two && o->second_moment_format != KOPT_F32)))
        printf(", rounding %s", roundings[o->moment_rounding]);
    puts("");
}

/* The bit whose flip makes a checksum differ from the stored one by `difference`, counted from the first of n bytes;
   8 * n, the first of the checksum, and so on. -1: no single bit does. */
static int64_t flipped_bit(uint32_t difference, uint64_t n) {
    uint32_t v = 1;
    int64_t bit;
    for (bit = 0; bit < 32; ++bit)
        if (difference == (uint32_t)1 << bit) return (int64_t)n * 8 + bit;
    for (bit = (int64_t)n * 8 + 7; bit >= 0; --bit) { /* a zero byte follows the n */
        v = v >> 1 ^ (v & 1 ? 0xEDB88320u : 0);
        if (v == difference && bit < (int64_t)n * 8) return bit;
    }
    return -1;
}

/* Says where a checkpoint is damaged. start[i]: the byte at which tensor i begins. */
static void locate(bytes p, uint64_t size, const uint64_t *start, size_t count) {
    const uint64_t n = size - CHECKSUM;
    uint32_t crc = 0xFFFFFFFFu;
    uint64_t i, byte;
    int64_t at;
    size_t tensor = 0;
    int k;
    for (i = 0; i <= n; ++i) {
        crc ^= i < n ? p[i] : 0;
        for (k = 0; k < 8; ++k) crc = crc >> 1 ^ (crc & 1 ? 0xEDB88320u : 0);
    }
    crc = ~crc ^ (uint32_t)number(p + n, CHECKSUM);
    at = flipped_bit(crc, n);
    byte = (uint64_t)at / 8;
    if (at < 0) {
        puts(crc == 0 ? "  the checksum is right: it was written so"
                      : "  more than one bit is not as it was; the checksum does not tell where");
        return;
    }
    while (tensor < count && start[tensor] <= byte) ++tensor;
    printf("  one flipped bit would explain it: bit %d of byte %llu, in ", (int)(at % 8), (unsigned long long)byte);
    if (byte >= n)
        puts("the checksum itself");
    else if (tensor == 0)
        puts("the header");
    else
        printf("tensor %lu\n", (unsigned long)tensor);
}

static void *room(size_t size) {
    void *p = calloc(1, size + 1);
    if (p == NULL) fprintf(stderr, "no memory for %lu bytes\n", (unsigned long)size), exit(2);
    return p;
}

/* What kopt_load() says of a checkpoint, into memory for these tensors. *finite: are all weights? */
static kopt_result load(kopt_optimizer *opt, kopt_tensor *t, size_t count, bytes p, size_t size, int *finite) {
    kopt_result result;
    size_t i;
    for (i = 0; i < count; ++i) {
        t[i].state_size = kopt_state_size(opt, &t[i]);
        t[i].weight = room(kopt_format_size(t[i].weight_format, t[i].n));
        t[i].state = room(t[i].state_size);
    }
    result = kopt_load(opt, t, count, p, size);
    for (*finite = 1, i = 0; i < count; ++i) {
        *finite &= kopt_all_finite(t[i].weight, t[i].weight_format, t[i].n);
        free(t[i].weight), free(t[i].state);
    }
    return result;
}

/* Describes the checkpoint that begins at p. Returns 1 if it is whole. *size: the bytes that there are; then those
   that belong to it. */
static int inspect(bytes p, uint64_t *size) {
    const size_t there = (size_t)*size;
    uint64_t tensors, need, at, weights = 0, *start;
    kopt_optimizer opt;
    kopt_tensor *t, one;
    size_t found, complete = 0, i;
    int finite, rounds = 0;
    kopt_result result = kopt_inspect(p, there, &opt, &tensors, &need);
    *size = 4; /* until it is known */
    if (result != KOPT_OK) {
        printf("  DAMAGED or CUT OFF within its head: %s\n", kopt_result_string(result));
        return 0;
    }
    for (at = 0, found = 0; kopt_inspect_tensor(p, there, &at, &one) == KOPT_OK; ++found)
        rounds |= one.weight_format != KOPT_F32;
    describe(&opt, rounds);
    t = room((found + 1) * sizeof *t), start = room((found + 1) * sizeof *start);
    start[0] = kopt_save_size(&opt, NULL, 0) - CHECKSUM;
    for (at = 0, i = 0; (result = kopt_inspect_tensor(p, there, &at, &t[i])) == KOPT_OK; ++i) {
        start[i + 1] = at;
        complete += at <= there;
        weights += t[i].n;
        if (i >= LISTED) continue;
        printf("  tensor %-4lu id %lu, %lu weights in %s", (unsigned long)i + 1, (unsigned long)t[i].id,
               (unsigned long)t[i].n, formats[t[i].weight_format]);
        if (t[i].first_index != 0) printf(" from element %llu on", (unsigned long long)t[i].first_index); /* a shard */
        printf(", bytes %llu to %llu\n", (unsigned long long)start[i], (unsigned long long)at - 1);
    }
    if (found > LISTED) printf("  ... and %lu more\n", (unsigned long)found - LISTED);
    if (there < need) {
        printf("  CUT OFF: %llu of %llu bytes are there, of which tensor %llu of %llu is the last\n",
               (unsigned long long)there, (unsigned long long)need,
               (unsigned long long)(complete < tensors ? complete + 1 : tensors), (unsigned long long)tensors);
        *size = there;
        result = KOPT_ERROR_SIZE;
    } else {
        *size = need;
        /* do the tensors end where the head says? */
        result = result == KOPT_ERROR_BOUNDS && found == tensors ? load(&opt, t, found, p, (size_t)need, &finite)
                                                                 : KOPT_ERROR_CHECKSUM;
        if (result == KOPT_OK) {
            printf("  whole: %llu tensor%s, %llu weights, %llu bytes, the right checksum; ",
                   (unsigned long long)tensors, tensors == 1 ? "" : "s", (unsigned long long)weights,
                   (unsigned long long)need);
            puts(finite ? "all weights are finite" : "but WEIGHTS ARE INFINITE OR NaN");
        } else {
            printf("  DAMAGED: %s\n", kopt_result_string(result));
            locate(p, need, start, found < tensors ? found + 1 : found);
        }
    }
    free(t), free(start);
    return result == KOPT_OK;
}

static int inspect_file(const char *name) {
    FILE *file = fopen(name, "rb");
    unsigned char *p = NULL;
    size_t size = 0, capacity = 0, got, i;
    int checkpoints = 0, whole = 0;
    if (file == NULL) return fprintf(stderr, "%s: %s\n", name, strerror(errno)), 2;
    do {
        if (size == capacity && (p = realloc(p, capacity = 2 * capacity + 65536)) == NULL) return perror(name), 2;
        size += got = fread(p + size, 1, capacity - size, file);
    } while (got > 0);
    if (ferror(file)) return fprintf(stderr, "%s: %s\n", name, strerror(errno)), 2;
    fclose(file);
    for (i = 0; i + 4 <= size; ++i) {
        uint64_t length = size - i;
        if (memcmp(p + i, "KSAV", 4) != 0) continue;
        printf("%s: a checkpoint at byte %lu\n", name, (unsigned long)i);
        whole += inspect(p + i, &length);
        ++checkpoints;
        i += (size_t)length - 1;
    }
    if (checkpoints == 0) printf("%s: no checkpoint of kopt_save() in its %lu bytes\n", name, (unsigned long)size);
    free(p);
    return checkpoints == 0 || whole < checkpoints;
}

int main(int argc, char **argv) {
    int i, worst = 0, status;
    if (argc < 2) return fputs("usage: inspect FILE...\n", stderr), 2;
    for (i = 1; i < argc; ++i) {
        status = inspect_file(argv[i]);
        if (status > worst) worst = status;
    }
    return worst;
}
