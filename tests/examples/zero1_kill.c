/* zero1_kill.c - makes the k-th call of a function fail on a rank of MPI (LD_PRELOAD).

       ZERO1_KILL="RANK FUNCTION K WHAT"

   RANK -1 is every rank. WHAT is kill (kill -9 instead of the call), full (ENOSPC) or short (from then on, write only
   the first byte). Functions: MPI_Ialltoallv, MPI_Iallgatherv, pwrite, fsync, link, rename. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <mpi.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int link(const char *from, const char *to);
int rename(const char *from, const char *to);

/* NULL, or what is to be done instead of this call. */
static const char *now(const char *function) {
    static char wanted[32], what[32];
    static int calls;
    const char *plan = getenv("ZERO1_KILL"), *me = getenv("OMPI_COMM_WORLD_RANK");
    int rank, number;
    if (plan == NULL || me == NULL || sscanf(plan, "%d %31s %d %31s", &rank, wanted, &number, what) != 4) return NULL;
    if ((rank != -1 && atoi(me) != rank) || strcmp(function, wanted) != 0) return NULL;
    ++calls;
    if (strcmp(what, "short") == 0) return calls >= number ? what : NULL;
    if (calls != number) return NULL;
    if (strcmp(what, "kill") == 0) raise(SIGKILL);
    return what;
}

static void *real(const char *function) {
    void *f = dlsym(RTLD_NEXT, function);
    if (f == NULL) abort();
    return f;
}

ssize_t pwrite(int file, const void *from, size_t size, off_t place) {
    ssize_t (*f)(int, const void *, size_t, off_t);
    const char *what = now("pwrite");
    *(void **)&f = real("pwrite");
    if (what != NULL && strcmp(what, "full") == 0) return errno = ENOSPC, -1;
    return f(file, from, what != NULL && size > 1 ? 1 : size, place);
}

int fsync(int file) {
    int (*f)(int);
    *(void **)&f = real("fsync");
    if (now("fsync") != NULL) return errno = ENOSPC, -1;
    return f(file);
}

int link(const char *from, const char *to) {
    int (*f)(const char *, const char *);
    *(void **)&f = real("link");
    if (strstr(to, ".previous") != NULL) now("link"); /* MPI has links of its own */
    return f(from, to);
}

int rename(const char *from, const char *to) {
    int (*f)(const char *, const char *);
    *(void **)&f = real("rename");
    if (strstr(from, ".new") != NULL) now("rename");
    return f(from, to);
}

int MPI_Ialltoallv(const void *from, const int send_counts[], const int send_places[], MPI_Datatype send_type, void *to,
                   const int receive_counts[], const int receive_places[], MPI_Datatype receive_type, MPI_Comm comm,
                   MPI_Request *request) {
    now("MPI_Ialltoallv");
    return PMPI_Ialltoallv(from, send_counts, send_places, send_type, to, receive_counts, receive_places, receive_type,
                           comm, request);
}

int MPI_Iallgatherv(const void *from, int count, MPI_Datatype send_type, void *to, const int counts[],
                    const int places[], MPI_Datatype type, MPI_Comm comm, MPI_Request *request) {
    now("MPI_Iallgatherv");
    return PMPI_Iallgatherv(from, count, send_type, to, counts, places, type, comm, request);
}
