/* board_riscv.c - start-up code and board.h for 32-bit RISC-V, for the board virt of qemu; linker script: riscv.ld.
   Output goes through semihosting: the debugger, here qemu, prints it. Your board has start-up code of its own. */
#include "board.h"

extern uint32_t bss_begin[], bss_end[], stack_top[]; /* from riscv.ld */
int main(void);

/* ---- Output ------------------------------------------------------------------------------------------------------ */

static void semihost(uint32_t operation, const void *argument) {
    register uint32_t a0 __asm__("a0") = operation;
    register const void *a1 __asm__("a1") = argument;
    __asm__ __volatile__(".option push\n\t.option norvc\n\t.balign 16\n\t" /* three words in one page */
                         "slli zero, zero, 0x1f\n\tebreak\n\tsrai zero, zero, 7\n\t.option pop"
                         : "+r"(a0)
                         : "r"(a1)
                         : "memory");
}

void board_print(const char *text) { semihost(0x04, text); }

void board_end(int status) {
    semihost(0x18, (const void *)(status == 0 ? 0x20026u : 0x20023u)); /* success, or a run-time error */
    for (;;) {
    }
}

/* ---- Measurements ------------------------------------------------------------------------------------------------ */

enum { PAINT = 0x5A5A5A5A };

/* The stack grows down from stack_top to the end of .bss. What is below the deepest call still has the paint. */
size_t board_stack(void) {
    const uint32_t *p = bss_end;
    while (*p == PAINT) ++p;
    return (size_t)(stack_top - p) * sizeof *p;
}

/* With `qemu -icount shift=6`, the cycle counter counts 64 per instruction. */
uint32_t board_instructions(void) {
    uint32_t high, low, again;
    do
        __asm__ __volatile__("csrr %0, mcycleh\n\tcsrr %1, mcycle\n\tcsrr %2, mcycleh"
                             : "=r"(high), "=r"(low), "=r"(again));
    while (high != again);
    return (high << 26 | low >> 6) % BOARD_WRAP;
}

/* ---- What compilers call, also without libc ---------------------------------------------------------------------- */

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

/* ---- Start ------------------------------------------------------------------------------------------------------- */

__attribute__((used, noreturn)) static void start(void) {
    uint32_t *p, *here = (uint32_t *)__builtin_frame_address(0) - 16; /* paint ends a little below this function */
    for (p = bss_begin; p < bss_end; ++p) *p = 0;
    for (; p < here; ++p) *p = PAINT;
    board_end(main());
    for (;;) {
    }
}

__attribute__((used, noreturn, aligned(4))) static void fault(void) {
    board_print("fault\n");
    board_end(1);
    for (;;) {
    }
}

/* Before any C: the stack, where exceptions go, and the FPU, which is off (mstatus.FS). */
__attribute__((naked, used, section(".start"))) void reset(void);
void reset(void) {
    __asm__("la sp, stack_top\n\tla t0, fault\n\tcsrw mtvec, t0\n\tli t0, 0x2000\n\tcsrs mstatus, t0\n\tj start");
}
