/* checkpoint_faults.c - a library for LD_PRELOAD that makes the disk of a program fail. It counts the calls of open,
   read, write, fsync, rename, unlink and close that the program makes ("boundaries"), and does what the environment
   variable FAULT says, in two words and a number or two:

       none              nothing; FAULT_LOG: a file that gets a line with the name of each call
       error K ERRNO     call K fails with this errno
       full K            the write K has room for half of its bytes; all writes after it fail with ENOSPC
       short K           call K, if it reads or writes, moves half of its bytes; with K = 0 each does
       signal K          call K fails with EINTR, once; with K = 0 each does, once
       before K          kill -9 before call K
       within K          kill -9 when call K, a write, has half of its bytes written
       power K VARIANT   the power fails before call K: the folder FAULT_FOLDER becomes one that a disk may then hold,
                         and kill -9. Status 77 if there is no such VARIANT
       timer NS          kill -9 after so many nanoseconds, wherever the program is

   After a power cut a disk surely holds what was synced. Of the names, any subset of the creations and renames since
   the last fsync of the folder may be there, and of the bytes since the last fsync of a file none, half or all.
   fsync() writes nothing to the real disk: the test does not need it, and it would take most of the time. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

int open64(const char *path, int flags, ...);
ssize_t pread64(int fd, void *data, size_t size, off64_t offset);

static int (*real_open)(const char *, int, ...);
static ssize_t (*real_read)(int, void *, size_t);
static ssize_t (*real_pread)(int, void *, size_t, off64_t);
static ssize_t (*real_write)(int, const void *, size_t);
static int (*real_rename)(const char *, const char *);
static int (*real_unlink)(const char *);
static int (*real_close)(int);

static struct {
    char kind[16];
    long at, value;
    const char *folder;
    FILE *log;
} fault;
static long calls;

static void *real(const char *name) {
    void *function = dlsym(RTLD_NEXT, name);
    if (function == NULL) abort();
    return function;
}

static int is(const char *kind) { return strcmp(fault.kind, kind) == 0; }

/* ---- the disk: what it surely holds, and what may have been written since ---------------------------------------- */

enum { FILES = 1024, NAMES = 16, CHANGES = 4096, MOST = 1 << 16 };
typedef struct file { /* by inode */
    ino_t inode;
    size_t size;
    char *bytes; /* as of the last fsync */
} file;
typedef struct name {
    char text[NAME_MAX + 1]; /* "": none */
    ino_t inode;
} name;
typedef struct change { /* of names since the last fsync of the folder: to is new, from goes */
    char from[NAME_MAX + 1], to[NAME_MAX + 1];
    ino_t inode;
} change;
static file files[FILES];
static name durable[NAMES];
static change pending[CHANGES];
static int file_count, pending_count;

static const char *base(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash == NULL ? path : slash + 1;
}

static const char *in_folder(const char *text) {
    static char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/%s", fault.folder, text);
    return path;
}

static ino_t inode_of(const char *path) {
    struct stat status;
    return stat(path, &status) == 0 ? status.st_ino : 0;
}

static size_t contents(const char *path, char *bytes) { /* of the file as it is now */
    const int fd = real_open(path, O_RDONLY);
    const ssize_t size = fd < 0 ? 0 : real_read(fd, bytes, MOST);
    if (fd >= 0) real_close(fd);
    return size < 0 ? 0 : (size_t)size;
}

static file *new_file(ino_t inode) {
    if (file_count == FILES) abort();
    files[file_count].inode = inode;
    return &files[file_count++];
}

static file *find(ino_t inode) { /* the newest of this number: the system may use one again */
    int i;
    for (i = file_count; i-- > 0;)
        if (files[i].inode == inode) return &files[i];
    return new_file(inode);
}

static void make_durable(const char *path) {
    static char bytes[MOST];
    file *f = find(inode_of(path));
    f->size = contents(path, bytes);
    f->bytes = realloc(f->bytes, f->size + 1);
    memcpy(f->bytes, bytes, f->size);
}

static void change_name(name *names, const change *c) {
    int i;
    for (i = 0; i < NAMES; ++i)
        if (strcmp(names[i].text, c->from) == 0 || strcmp(names[i].text, c->to) == 0) names[i].text[0] = 0;
    for (i = 0; i < NAMES && names[i].text[0] != 0;) ++i;
    if (i == NAMES) abort();
    strcpy(names[i].text, c->to);
    names[i].inode = c->inode;
}

static void will_change(const char *from, const char *to, ino_t inode) {
    change *c = &pending[pending_count++];
    if (pending_count > CHANGES) abort();
    strcpy(c->from, from), strcpy(c->to, to);
    c->inode = inode;
}

static void make_names_durable(void) {
    int i;
    for (i = 0; i < pending_count; ++i) change_name(durable, &pending[i]);
    pending_count = 0;
}

static void die(void) {
    raise(SIGKILL);
    abort();
}

static void power_cut(long variant) {
    static char bytes[NAMES][MOST], now[MOST];
    size_t size[NAMES];
    name names[NAMES];
    DIR *folder = opendir(fault.folder);
    struct dirent *entry;
    const int vary = pending_count < 5 ? pending_count : 5; /* of more, those before are lost */
    int i;
    if (variant >= 3L << vary) _exit(77);
    memcpy(names, durable, sizeof names);
    for (i = 0; i < vary; ++i)
        if (variant >> i & 1) change_name(names, &pending[pending_count - vary + i]);
    variant >>= vary; /* of the bytes that were not synced: none, half, all */
    for (i = 0; i < NAMES; ++i) {
        const file *f = find(names[i].inode);
        size[i] = f->size;
        memcpy(bytes[i], f->bytes == NULL ? "" : f->bytes, f->size);
    }
    while ((entry = readdir(folder)) != NULL) {
        const size_t whole = contents(in_folder(entry->d_name), now);
        if (variant == 0 || entry->d_name[0] == '.') continue;
        for (i = 0; i < NAMES; ++i) {
            if (names[i].text[0] == 0 || names[i].inode != entry->d_ino) continue;
            if (whole == size[i] && memcmp(now, bytes[i], whole) == 0) continue; /* it was synced */
            size[i] = variant == 1 ? whole / 2 : whole;
            memcpy(bytes[i], now, size[i]);
        }
    }
    rewinddir(folder);
    while ((entry = readdir(folder)) != NULL)
        if (entry->d_name[0] != '.') real_unlink(in_folder(entry->d_name));
    for (i = 0; i < NAMES; ++i) {
        int fd;
        if (names[i].text[0] == 0) continue;
        fd = real_open(in_folder(names[i].text), O_WRONLY | O_CREAT, 0666);
        if (real_write(fd, bytes[i], size[i]) != (ssize_t)size[i]) abort();
        real_close(fd);
    }
    die();
}

/* ---- the calls --------------------------------------------------------------------------------------------------- */

static int signalled; /* the last call was interrupted: this is the same one again */

/* Is this call's turn: at = 0 is each of them. */
static int now(void) { return fault.at == 0 || calls == fault.at; }

/* Counts a call. Returns nonzero, with errno, if it fails. waits: a signal can interrupt it. */
static int begin(const char *what, int waits) {
    if (signalled) return signalled = 0;
    ++calls;
    if (fault.log != NULL) fprintf(fault.log, "%s\n", what);
    if (waits && is("signal") && now()) {
        errno = EINTR;
        return signalled = 1;
    }
    if (is("full") && calls > fault.at && strcmp(what, "write") == 0) {
        errno = ENOSPC;
        return 1;
    }
    if (!now()) return 0;
    if (is("before")) die();
    if (is("power")) power_cut(fault.value);
    if (!is("error")) return 0;
    errno = (int)fault.value;
    return 1;
}

static size_t part(size_t size) { /* of a read or write */
    return now() && size > 1 && (is("short") || is("within") || is("full")) ? size / 2 : size;
}

static int opened(const char *path, int flags, va_list arguments) {
    const mode_t mode = flags & O_CREAT ? va_arg(arguments, mode_t) : 0;
    const int new = flags &O_CREAT &&inode_of(path) == 0;
    int fd;
    if (begin("open", 1)) return -1;
    fd = real_open(path, flags, mode);
    if (fd >= 0 && new) {
        new_file(inode_of(path)); /* nothing of it is on the disk */
        will_change("", base(path), inode_of(path));
    }
    return fd;
}

#define OPEN(name)                               \
    int name(const char *path, int flags, ...) { \
        va_list arguments;                       \
        int fd;                                  \
        va_start(arguments, flags);              \
        fd = opened(path, flags, arguments);     \
        va_end(arguments);                       \
        return fd;                               \
    }
OPEN(open)
OPEN(open64)

ssize_t read(int fd, void *data, size_t size) { return begin("read", 1) ? -1 : real_read(fd, data, part(size)); }

ssize_t pread64(int fd, void *data, size_t size, off64_t offset) {
    return begin("read", 1) ? -1 : real_pread(fd, data, part(size), offset);
}

ssize_t pread(int fd, void *data, size_t size, off_t offset) { return pread64(fd, data, size, offset); }

ssize_t write(int fd, const void *data, size_t size) {
    ssize_t done;
    if (begin("write", 1)) return -1;
    done = real_write(fd, data, part(size));
    if (is("within") && now()) die();
    return done;
}

int fsync(int fd) {
    char link[64], path[PATH_MAX];
    ssize_t length;
    struct stat status;
    if (begin("fsync", 1)) return -1;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    length = readlink(link, path, sizeof path - 1);
    if (length < 0 || fstat(fd, &status) != 0) abort();
    path[length] = 0;
    if (S_ISDIR(status.st_mode))
        make_names_durable();
    else
        make_durable(path);
    return 0;
}

int rename(const char *from, const char *to) {
    const ino_t inode = inode_of(from);
    int result;
    if (begin("rename", 0)) return -1;
    result = real_rename(from, to);
    if (result == 0) will_change(base(from), base(to), inode);
    return result;
}

int unlink(const char *path) {
    int result;
    if (begin("unlink", 0)) return -1;
    result = real_unlink(path);
    if (result == 0) will_change(base(path), "", 0);
    return result;
}

int close(int fd) {
    int result;
    const int writing = (fcntl(fd, F_GETFL) & O_ACCMODE) != O_RDONLY;
    if (signalled) return signalled = 0; /* it was closed */
    if (begin(writing ? "close" : "leave", 1)) {
        const int error = errno;
        signalled = 0;
        real_close(fd);
        errno = error;
        return -1;
    }
    result = real_close(fd);
    return result;
}

static void stop_soon(long nanoseconds) {
    struct sigevent event;
    struct itimerspec when;
    timer_t timer;
    memset(&event, 0, sizeof event);
    memset(&when, 0, sizeof when);
    event.sigev_notify = SIGEV_SIGNAL;
    event.sigev_signo = SIGKILL;
    when.it_value.tv_sec = nanoseconds / 1000000000;
    when.it_value.tv_nsec = nanoseconds % 1000000000;
    if (timer_create(CLOCK_MONOTONIC, &event, &timer) != 0 || timer_settime(timer, 0, &when, NULL) != 0) abort();
}

__attribute__((constructor)) static void begin_all(void) {
    const char *text = getenv("FAULT"), *log = getenv("FAULT_LOG");
    DIR *folder;
    struct dirent *entry;
    *(void **)&real_open = real("open64");
    *(void **)&real_read = real("read");
    *(void **)&real_pread = real("pread64");
    *(void **)&real_write = real("write");
    *(void **)&real_rename = real("rename");
    *(void **)&real_unlink = real("unlink");
    *(void **)&real_close = real("close");
    fault.folder = getenv("FAULT_FOLDER");
    if (text == NULL || fault.folder == NULL || sscanf(text, "%15s %ld %ld", fault.kind, &fault.at, &fault.value) < 1)
        abort();
    folder = opendir(fault.folder);
    if (folder == NULL) abort();
    while ((entry = readdir(folder)) != NULL) { /* what is there when the program begins is on the disk */
        if (entry->d_name[0] == '.') continue;
        make_durable(in_folder(entry->d_name));
        will_change("", entry->d_name, entry->d_ino);
    }
    closedir(folder);
    make_names_durable();
    if (log != NULL && is("none")) fault.log = fopen(log, "w");
    if (is("timer")) stop_soon(fault.at);
    calls = 0;
}

__attribute__((destructor)) static void end_all(void) {
    if (fault.log != NULL) fclose(fault.log);
}
