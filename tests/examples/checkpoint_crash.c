/* checkpoint_crash.c - kills docs/examples/checkpoint.c, makes its disk fail, and cuts its power, at every boundary.
   Whatever happens: started again, it finds a good checkpoint, loses nothing that it said was saved, and ends with the
   bits of the run that nothing happened to. Prints TAP.

       checkpoint_crash PROGRAM FAULTS.so FOLDER      FAULTS.so: checkpoint_faults.c. FOLDER: empty, or absent  */
#define _XOPEN_SOURCE 700
#include "../unit/tap.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { KILLS = 200, SHOWN = 5, ENOUGH = 50 }; /* failures that are shown, and after which it ends */
static const char *program, *faults, *folder;
static char path[4096]; /* of the checkpoint */

/* ---- files ------------------------------------------------------------------------------------------------------- */

typedef struct bytes {
    size_t size;
    char at[1 << 15];
} bytes;

static const char *beside(const char *suffix) {
    static char name[4200];
    snprintf(name, sizeof name, "%s%s", path, suffix);
    return name;
}

static const bytes *get(const char *name) { /* all of a file; size 0 if there is none */
    static bytes b;
    FILE *file = fopen(name, "rb");
    b.size = file == NULL ? 0 : fread(b.at, 1, sizeof b.at, file);
    if (file != NULL) fclose(file);
    return &b;
}

static void put(const char *name, const bytes *b) {
    FILE *file = fopen(name, "wb");
    if (file == NULL || fwrite(b->at, 1, b->size, file) != b->size || fclose(file) != 0) exit(2);
}

static void clear(void) {
    DIR *names = opendir(folder);
    struct dirent *entry;
    if (names == NULL) exit(2);
    while ((entry = readdir(names)) != NULL) {
        char name[4352];
        snprintf(name, sizeof name, "%s/%s", folder, entry->d_name);
        if (entry->d_name[0] != '.') unlink(name);
    }
    closedir(names);
}

/* ---- a run of the program ---------------------------------------------------------------------------------------- */

typedef struct outcome {
    int status, killed;
    double seconds;
    char out[1 << 15], err[1 << 13];
} outcome;

static void drain(int fd, char *text, size_t size) {
    size_t used = 0;
    ssize_t n;
    while ((n = read(fd, text + used, size - 1 - used)) > 0) used += (size_t)n;
    text[used] = 0;
    close(fd);
}

/* Its output has room in the pipes. fault NULL: without the library. */
static const outcome *run(const char *fault, const char *batches, const char *every) {
    static outcome o;
    struct timespec a, b;
    int out[2], err[2], status;
    pid_t child;
    if (pipe(out) != 0 || pipe(err) != 0) exit(2);
    clock_gettime(CLOCK_MONOTONIC, &a);
    child = fork();
    if (child == 0) {
        dup2(out[1], 1), dup2(err[1], 2);
        if (fault != NULL) setenv("FAULT", fault, 1), setenv("LD_PRELOAD", faults, 1);
        execl(program, program, path, batches, every, (char *)NULL);
        _exit(126);
    }
    if (child < 0) exit(2);
    close(out[1]), close(err[1]);
    drain(out[0], o.out, sizeof o.out);
    drain(err[0], o.err, sizeof o.err);
    waitpid(child, &status, 0);
    clock_gettime(CLOCK_MONOTONIC, &b);
    o.seconds = (double)(b.tv_sec - a.tv_sec) + 1e-9 * (double)(b.tv_nsec - a.tv_nsec);
    o.killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
    o.status = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    return &o;
}

static const char *last_line(const char *text) {
    const size_t length = strlen(text);
    const char *line = text + length;
    if (length == 0 || line[-1] != '\n') return "";
    for (--line; line > text && line[-1] != '\n';) --line;
    return line;
}

static long number_after(const char *text,
                         const char *words) { /* behind the last of these words; -1 if there is none */
    long number = -1;
    const char *p;
    for (p = text; (p = strstr(p, words)) != NULL; p += strlen(words)) number = strtol(p + strlen(words), NULL, 10);
    return number;
}

static int count_of(const char *text, const char *words) {
    int count = 0;
    for (; words[0] != 0 && (text = strstr(text, words)) != NULL; ++text) ++count;
    return count;
}

static int failures;
static int good(int yes, const char *fault, const char *what, const outcome *o) {
    if (!yes && ++failures <= SHOWN) note("%s: %s [%.200s|%.300s]", fault, what, last_line(o->out), o->err);
    return yes;
}

/* ---- what must come out ------------------------------------------------------------------------------------------ */

typedef struct reference {
    const char *batches, *every;
    char final[256];
    bytes file;
    int saves;
    double seconds;
} reference;

static void make_reference(reference *r, const char *batches, const char *every) {
    const outcome *o;
    clear();
    o = run(NULL, batches, every);
    r->batches = batches, r->every = every;
    snprintf(r->final, sizeof r->final, "%s", last_line(o->out));
    r->file = *get(path);
    r->saves = count_of(o->out, "saved: batch ");
    ok(o->status == 0 && r->saves > 3 && r->file.size > 1000, "a run of %s batches to which nothing happens", batches);
    note("%.*s", (int)strcspn(r->final, "\n"), r->final);
    clear();
    r->seconds = run("none", batches, every)->seconds; /* says how long to wait for kills; no test depends on it */
}

/* Starts again after a fault that let `saved` batches be saved. */
static void finish(const reference *r, const char *fault, long saved) {
    const outcome *o = run("none", r->batches, r->every);
    const bytes *now;
    good(o->status == 0 && strcmp(last_line(o->out), r->final) == 0, fault, "started again, other bits", o);
    good(o->err[0] == 0, fault, "started again, complaints", o);
    good(saved <= 0 || number_after(o->out, ", batch ") >= saved, fault, "a checkpoint is lost", o);
    now = get(path);
    good(now->size == r->file.size && memcmp(now->at, r->file.at, now->size) == 0, fault, "another file", o);
    good(access(beside(".temporary"), F_OK) != 0, fault, "the temporary file is still there", o);
}

/* A state of the folder from which runs begin. */
typedef struct start {
    const char *name;
    bytes newest, previous, temporary;
    char calls[4000][8]; /* which the program makes from here on */
    int count;
} start;

static void lay_out(const start *s) {
    clear();
    if (s->newest.size > 0) put(path, &s->newest);
    if (s->previous.size > 0) put(beside(".previous"), &s->previous);
    if (s->temporary.size > 0) put(beside(".temporary"), &s->temporary);
}

static void count_calls(start *s, const reference *r) {
    char name[4200];
    FILE *log;
    lay_out(s);
    snprintf(name, sizeof name, "%s.log", folder);
    setenv("FAULT_LOG", name, 1);
    run("none", r->batches, r->every);
    log = fopen(name, "r");
    for (s->count = 0; log != NULL && s->count < 4000 && fscanf(log, "%7s", s->calls[s->count]) == 1;) ++s->count;
    if (log != NULL) fclose(log);
    unsetenv("FAULT_LOG");
}

/* words: of what it says about the fault, at least so many times. Returns 0 if there is no such fault. */
static int try_one(const start *s, const reference *r, const char *fault, int deadly, const char *words, int least) {
    const outcome *o;
    long saved;
    if (failures > ENOUGH) return 0;
    lay_out(s);
    o = run(fault, r->batches, r->every);
    if (o->status == 77) return 0;
    saved = number_after(o->out, "saved: batch ");
    if (deadly)
        good(o->killed, fault, "it was not killed", o);
    else {
        const int finished = strcmp(last_line(o->out), r->final) == 0;
        const int told = count_of(o->err, words), last = o->status == 0;
        good(finished || o->status == 1, fault, "it neither ends nor stops", o);
        good(told >= least, fault, "it does not say so", o);
        good(!finished || last == (saved == strtol(r->batches, NULL, 10)), fault, "the wrong exit status", o);
        good(saved < 0 || get(path)->size > 0, fault, "a save that failed has removed the file", o);
        good(s->newest.size > 0 || access(beside(".temporary"), F_OK) != 0, fault, "a temporary file is left", o);
        good(least > 0 || (finished && o->err[0] == 0 && o->status == 0), fault, "it minds", o);
    }
    finish(r, fault, saved);
    return 1;
}

static void boundaries(const start *s, const reference *r) {
    char fault[64];
    int k, variant, tried = 0, before;
    before = failures;
    for (k = 1; k <= s->count; ++k) {
        const char *call = s->calls[k - 1];
        snprintf(fault, sizeof fault, "error %d %d", k, EIO);
        tried += try_one(s, r, fault, 0, strerror(EIO), strcmp(call, "leave") != 0);
        if (strcmp(call, "read") == 0 || strcmp(call, "leave") == 0) continue; /* leave: close after reading */
        snprintf(fault, sizeof fault, "error %d %d", k, ENOSPC);
        tried += try_one(s, r, fault, 0, strerror(ENOSPC), 1);
        if (strcmp(call, "write") != 0) continue;
        snprintf(fault, sizeof fault, "full %d", k);
        tried += try_one(s, r, fault, 0, strerror(ENOSPC), 1);
    }
    ok(failures == before, "%s: %d failures of single calls and full disks: told, and nothing is lost", s->name, tried);

    before = failures, tried = 0;
    for (k = 0; k <= s->count; ++k) {
        if (k > 0 && strcmp(s->calls[k - 1], "read") != 0 && strcmp(s->calls[k - 1], "write") != 0) continue;
        snprintf(fault, sizeof fault, "short %d", k);
        tried += try_one(s, r, fault, 0, "", 0);
    }
    for (k = 0; k <= s->count; ++k) {
        if (k > 0 && strcmp(s->calls[k - 1], "rename") == 0) continue;
        snprintf(fault, sizeof fault, "signal %d", k);
        tried += try_one(s, r, fault, 0, "", 0);
    }
    ok(failures == before, "%s: %d runs with short reads and writes and signals: as if nothing happened", s->name,
       tried);

    before = failures, tried = 0;
    for (k = 1; k <= s->count; ++k) {
        snprintf(fault, sizeof fault, "before %d", k);
        tried += try_one(s, r, fault, 1, "", 0);
        if (strcmp(s->calls[k - 1], "write") != 0) continue;
        snprintf(fault, sizeof fault, "within %d", k);
        tried += try_one(s, r, fault, 1, "", 0);
    }
    ok(failures == before, "%s: killed before and within each of its %d calls: it resumes", s->name, s->count);

    before = failures, tried = 0;
    for (k = 1; k <= s->count; ++k) {
        if (strcmp(s->calls[k - 1], "read") == 0) continue; /* the disk is as before */
        for (variant = 0;; ++variant) {
            snprintf(fault, sizeof fault, "power %d %d", k, variant);
            if (!try_one(s, r, fault, 1, "", 0)) break;
            ++tried;
        }
    }
    ok(failures == before, "%s: %d power cuts: it resumes, and keeps what it said was saved", s->name, tried);
}

/* ---- kill -9 at any instant -------------------------------------------------------------------------------------- */

static uint32_t random_below(uint32_t n) { /* xorshift */
    static uint32_t x = 2463534242u;
    x ^= x << 13, x ^= x >> 17, x ^= x << 5;
    return x % n;
}

static void kills(const reference *r) {
    const uint32_t microseconds = (uint32_t)(r->seconds * 1e6) + 1;
    int kill = 0, runs = 0, resumed = 0;
    long saved = 0;
    const int before = failures;
    clear();
    while (kill < KILLS && failures <= ENOUGH) {
        char fault[64];
        const outcome *o;
        snprintf(fault, sizeof fault, "timer %lu", (unsigned long)random_below(microseconds) * 1000 + 1);
        o = run(fault, r->batches, r->every);
        good(o->err[0] == 0, fault, "complaints", o);
        good(saved == 0 || number_after(o->out, ", batch ") >= saved || o->out[0] == 0, fault, "a checkpoint is lost",
             o);
        resumed += strncmp(o->out, "resumed: ", 9) == 0;
        if (number_after(o->out, "saved: batch ") > saved) saved = number_after(o->out, "saved: batch ");
        kill += o->killed;
        if (o->killed) continue;
        good(o->status == 0 && strcmp(last_line(o->out), r->final) == 0, fault, "other bits", o);
        ++runs, saved = 0;
        clear();
    }
    finish(r, "the last of the killed runs", saved);
    ok(failures == before,
       "kill -9 at %d instants: it resumed %d times, and %d runs ended with the bits of one that was "
       "never killed",
       kill, resumed, runs + 1);
    ok(resumed > KILLS / 4, "... in more than a fourth of them there was something to resume");
}

int main(int argc, char **argv) {
    static reference few, many;
    static start empty, midway;
    const outcome *o;
    int fd;
    if (argc < 4) return 2;
    program = argv[1], faults = argv[2], folder = argv[3];
    mkdir(folder, 0777);
    snprintf(path, 2048, "%s/run", folder);
    setenv("FAULT_FOLDER", folder, 1);

    make_reference(&few, "24", "6");
    clear();
    run(NULL, "12", "6");
    midway.newest = *get(path);
    midway.previous = *get(beside(".previous"));
    midway.temporary = midway.newest, midway.temporary.size /= 2; /* of a crash */
    empty.name = "from nothing", midway.name = "from a checkpoint";
    count_calls(&empty, &few);
    count_calls(&midway, &few);
    if (empty.count == 0)
        skip("no LD_PRELOAD here");
    else {
        ok(midway.count > 50, "the calls of a run that fail, one after the other: %d and %d", empty.count,
           midway.count);
        boundaries(&empty, &few);
        boundaries(&midway, &few);
        make_reference(&many, "4000", "40");
        kills(&many);
    }

    clear();
    fd = open(beside(".lock"), O_RDWR | O_CREAT, 0666);
    if (fd < 0 || lockf(fd, F_TLOCK, 0) != 0) return 2;
    o = run(NULL, "24", "6");
    ok(o->status == 1 && strstr(o->err, "in use by another program") != NULL && get(path)->size == 0,
       "a second program with the same file is refused");
    clear();
    rmdir(folder);
    return done();
}
