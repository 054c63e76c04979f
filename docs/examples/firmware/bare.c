/* bare.c - what the boards without an operating system share: output, stack and exit of board.h, and the functions that
   compilers call also without libc. Output goes through semihosting: the debugger, here qemu, prints it. */
#include "bare.h"
#include "board.h"

/* ---- Output ------------------------------------------------------------------------------------------------------ */

void board_print(const char *text) { semihost(0x04, text); }

void board_end(int status) {
    semihost(0x18, (const void *)(status == 0 ? 0x20026u : 0x20023u)); /* success, or a run-time error */
    for (;;) {
    }
}

/* ---- Memory ------------------------------------------------------------------------------------------------------ */

enum { PAINT = 0x5A5A5A5A };

void bare_clear(void) {
    uint32_t *p, *here = (uint32_t *)__builtin_frame_address(0) - 16; /* paint ends a little below this function */
    for (p = bss_begin; p < bss_end; ++p) *p = 0;
    for (; p < here; ++p) *p = PAINT;
}

/* The stack grows down from stack_top to the end of .bss. What is below the deepest call still has the paint. */
size_t board_stack(void) {
    const uint32_t *p = bss_end;
    while (*p == PAINT) ++p;
    return (size_t)(stack_top - p) * sizeof *p;
}

void *memcpy(void *to, const void *from, size_t size);
void *memcpy(void *to, const void *from, size_t size) {
    volatile unsigned char *p = (unsigned char *)to; /* volatile: or the loop becomes a call of memcpy */
    size_t i;
    for (i = 0; i < size; ++i) p[i] = ((const unsigned char *)from)[i];
    return to;
}

void *memset(void *to, int value, size_t size);
void *memset(void *to, int value, size_t size) {
    volatile unsigned char *p = (unsigned char *)to;
    size_t i;
    for (i = 0; i < size; ++i) p[i] = (unsigned char)value;
    return to;
}
