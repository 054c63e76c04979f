/* Room for the arrays of a bench. */
#ifndef ROOM_H
#define ROOM_H
#include <stddef.h>
#include <stdint.h>

/* Room for an array behind those before: it begins with a line of the cache, and elsewhere in its page than they do.
   Arrays that begin alike collide in the first cache, and a load waits for a store with the same lower address bits. */
static inline unsigned char *take(unsigned char **next, size_t bytes) {
    unsigned char *const p = *next + (64 - (uintptr_t)*next % 64) % 64;
    *next = p + (bytes / 4096 + 1) * 4096 + 1088;
    return p;
}
enum { SPARE = 4 * (4096 + 1088) + 64 }; /* what four of them take beside their bytes */

#endif
