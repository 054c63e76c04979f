/* checkpoint_damage.c - docs/examples/checkpoint.c with a checkpoint that is damaged: every bit of the file flipped,
   every shorter length, longer ones. Each is refused, and FILE.previous is used. Then with one that contradicts itself
   under checksums that are right. Prints TAP.

       checkpoint_damage FOLDER */
int checkpoint_main(int argc, char **argv);
#define main checkpoint_main
#include "../../docs/examples/checkpoint.c"
#undef main

#include "../unit/tap.h"

enum { ROOM = 1 << 16, PARTS = 8 };
static run r;
static char path[NAME_SIZE];
static unsigned char newest[ROOM], previous[ROOM], file[ROOM];

static char *beside(const char *suffix) {
    static char name[NAME_SIZE];
    strcat(strcpy(name, path), suffix);
    return name;
}

static size_t get(const char *name, unsigned char *bytes) {
    const int fd = open(name, O_RDONLY);
    const ssize_t size = fd < 0 ? 0 : read(fd, bytes, ROOM);
    if (fd >= 0) close(fd);
    return (size_t)size;
}

static void put(const char *name, const unsigned char *bytes, size_t size) {
    const int fd = open(name, O_WRONLY | O_CREAT, 0666);
    if (fd < 0 || write_all(fd, bytes, size) != 0 || ftruncate(fd, (off_t)size) != 0 || close(fd) != 0) exit(2);
}

static void train_to(uint64_t batches) {
    while (r.batches < batches) train_batch(&r);
}

/* Is the newest file, with these bytes, refused, and the previous one, of batch 12, used? */
static int refused(const unsigned char *bytes, size_t size) {
    int keep = 1;
    put(path, bytes, size);
    memset(weight, 0xFF, sizeof weight); /* as a new process finds them, or worse */
    memset(state, 0xFF, sizeof state);
    make(&r);
    return load(&r, path) == DAMAGED && resume(&r, path, &keep) && keep == 0 && r.batches == 12;
}

/* The CRC of n bytes, one bit at a time. */
static uint32_t crc_by(uint32_t polynomial, const unsigned char *p, size_t n) {
    uint32_t c = ~0u;
    int bit;
    for (; n > 0; --n)
        for (c ^= *p++, bit = 0; bit < 8; ++bit) c = c & 1 ? c >> 1 ^ polynomial : c >> 1;
    return ~c;
}

static void put_number(unsigned char *p, uint64_t x, int bytes) {
    for (; bytes > 0; --bytes, x >>= 8) *p++ = (unsigned char)x;
}

/* Makes both checksums right: that of kopt_save(), of the bytes from `inner` on and a zero, and that of the file. */
static void make_whole(unsigned char *bytes, size_t inner, size_t end) {
    bytes[end - 8] = 0;
    put_number(bytes + end - 8, crc_by(0xEDB88320u, bytes + inner, end - 7 - inner), 4);
    put_number(bytes + end - 4, crc_by(0x82F63B78u, bytes, end - 4), 4);
}

/* 1: a file with these bytes is loaded, but would not be saved so, or the training then comes to no step: neither one
   that is done, nor one that is skipped because the gradients overflow. */
static int misleads(const unsigned char *bytes, size_t size) {
    const uint64_t end = r.batches;
    uint32_t crc = 0;
    uint64_t stored = 0, step;
    double scale;
    int i;
    put(path, bytes, size);
    memset(weight, 0xFF, sizeof weight);
    memset(state, 0xFF, sizeof state);
    make(&r);
    if (load(&r, path) != LOADED) return r.batches = end, 0;
    for (i = 3; i >= 0; --i) stored = stored << 8 | bytes[size - 4 + (size_t)i];
    if (write_run(&r, -1, &crc) != KOPT_OK || crc != stored) return 1;
    step = r.opt.step, scale = r.scaler.scale;
    for (i = 0; i < BATCHES_PER_STEP; ++i) train_batch(&r);
    return r.opt.step != step + 1 && !(r.scaler.scale < scale);
}

static int out; /* stdout for TAP. What the example says, thousands of lines, goes to a file */

static void say(int condition, const char *format, size_t of, int wrong) {
    fflush(stdout);
    dup2(out, 1);
    ok(condition, format, (int)of, wrong);
    dup2(2, 1);
}

int main(int argc, char **argv) {
    int keep, good, wrong;
    size_t size, previous_size, i;
    uint32_t crc, again;
    if (argc < 2) return 2;
    mkdir(argv[1], 0777);
    snprintf(path, sizeof path - 32, "%s/run", argv[1]);
    remove(path), remove(beside(".previous"));
    out = dup(1);
    if (freopen(beside(".said"), "w", stderr) == NULL || dup2(fileno(stderr), 2) < 0 || dup2(2, 1) < 0) return 2;

    make(&r);
    if (!resume(&r, path, &keep)) return 2;
    train_to(12);
    save(&r, path, 1);
    train_to(18);
    save(&r, path, 1);
    train_to(30);
    if (write_run(&r, -1, &crc) != KOPT_OK) return 2;
    size = get(path, newest), previous_size = get(beside(".previous"), previous);

    make(&r);
    good = size > 1000 && resume(&r, path, &keep) && keep && r.batches == 18;
    say(good, "the whole file, of %d bytes, is taken", size, 0);
    for (wrong = 0, i = 0; i < 8 * size; ++i) {
        memcpy(file, newest, size);
        file[i / 8] ^= (unsigned char)(1 << i % 8);
        wrong += !refused(file, size);
    }
    say(wrong == 0, "each of its %d bits, flipped, is noticed, and the file before is used (%d are not)", 8 * size,
        wrong);
    for (wrong = 0, i = 0; i < size; ++i) wrong += !refused(newest, i);
    say(wrong == 0, "each length below %d is noticed, too (%d are not)", size, wrong);
    memset(file, 0, sizeof file);
    wrong = !refused(file, size); /* as some file systems leave it after a power cut */
    memcpy(file, newest, size);
    for (i = 1; i <= 4096; i += i < 16 ? 1 : 16) wrong += !refused(file, size + i);
    say(wrong == 0, "so are %d zeros, and bytes behind the end (%d are not)", size, wrong);

    memcpy(file, newest, size);
    file[size / 2] ^= 1;
    good = refused(file, size);
    train_to(15);
    good &= save(&r, path, 0) == 0 && get(beside(".previous"), file) == previous_size &&
            memcmp(file, previous, previous_size) == 0;
    say(good, "the next save replaces a damaged file; the good one before it stays", 0, 0);
    make(&r);
    good = resume(&r, path, &keep) && keep && r.batches == 15;
    train_to(30);
    good &= write_run(&r, -1, &again) == KOPT_OK && again == crc;
    say(good, "from there it ends with the bits of a run without damage", 0, 0);

    for (wrong = 0, i = 0; i < PARTS; ++i) {
        unsigned char *const part[PARTS] = {(unsigned char *)weight[0],   (unsigned char *)&state[3][64],
                                            (unsigned char *)&sum[1][2],  (unsigned char *)&rest[2][3],
                                            (unsigned char *)&r.batches,  (unsigned char *)&r.scaler.bad,
                                            (unsigned char *)&r.opt.seed, (unsigned char *)&r.opt.step};
        *part[i] ^= 1;
        wrong += write_run(&r, -1, &again) != KOPT_OK || again == crc;
        *part[i] ^= 1;
    }
    good = write_run(&r, -1, &again) == KOPT_OK && again == crc;
    say(good && wrong == 0, "the hash of all changes with a bit of any of %d parts (%d are not in it)", PARTS, wrong);

    {
        static const uint64_t values[] = {0,
                                          1,
                                          2,
                                          3,
                                          4,
                                          5,
                                          16,
                                          255,
                                          0x7f800000,
                                          0xffffffff,
                                          UINT64_C(0x380) << 52,
                                          UINT64_C(0x7e3) << 52,
                                          UINT64_C(0x7ff) << 52,
                                          UINT64_C(0x3ff) << 52,
                                          UINT64_C(1) << 63,
                                          UINT64_MAX};
        static const unsigned char own[] = {8, 8, 8, 8, 8, 8, 4, 4, 4, 4}; /* the magic to scaler.bad */
        size_t at = 0, inner = 0, field, v, tried = 0;
        for (i = 0; i + 4 < size; ++i)
            if (memcmp(newest + i, "KSAV", 4) == 0) inner = i;
        for (wrong = 0, field = 0; field < sizeof own + 3 * TENSORS + 1; ++field) {
            const size_t part_of = field - sizeof own, k = part_of / 3;
            const int bytes = field < sizeof own                                      ? own[field]
                              : field == sizeof own + 3 * TENSORS || part_of % 3 == 0 ? 8
                                                                                      : 4;
            for (v = 0; v < 16 + 8; ++v, ++tried) { /* contradicts, or one bit */
                memcpy(file, newest, size);
                if (v < 16)
                    put_number(file + at, values[v], bytes);
                else
                    file[at + v % (size_t)bytes] ^= (unsigned char)(1 << v % 7);
                make_whole(file, inner, size);
                wrong += misleads(file, size);
            }
            at += (size_t)bytes;
            if (field >= sizeof own && part_of % 3 == 2) at += 4 * size_of[k]; /* sum and residual */
        }
        for (i = inner; i < inner + 240; ++i, ++tried) { /* what kopt_load_from() reads */
            memcpy(file, newest, size);
            file[i] ^= (unsigned char)(1 << i % 8);
            make_whole(file, inner, size);
            wrong += misleads(file, size);
        }
        for (i = 4; i < 64; i += 4, ++tried) {
            memcpy(file, newest, size - 4);
            memset(file + size - 4, 0, i);
            put_number(file + size - 4 + i, crc_by(0x82F63B78u, file, size - 4 + i), 4);
            wrong += misleads(file, size + i);
        }
        say(wrong == 0 && inner > 0,
            "%d files with contradictions and the right checksums: refused, or good (%d are not)", tried, wrong);
    }

    memcpy(file, newest, size);
    file[100] ^= 1;
    put(path, file, size);
    put(beside(".previous"), file, size - 1);
    make(&r);
    good = !resume(&r, path, &keep) && get(path, previous) == size && memcmp(file, previous, size) == 0 &&
           get(beside(".previous"), previous) == size - 1;
    say(good, "both damaged: it does not begin, and changes nothing", 0, 0);
    remove(path);
    make(&r);
    good = !resume(&r, path, &keep);
    say(good, "the same if there is only a damaged one before", 0, 0);
    fflush(stdout);
    dup2(out, 1);
    return done();
}
