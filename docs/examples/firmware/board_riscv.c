/* board_riscv.c - start-up code for 32-bit RISC-V, for the board virt of qemu; linker script: riscv.ld. The rest of
   board.h is in bare.c. Your board has start-up code of its own. */
#include "bare.h"
#include "board.h"

void semihost(uint32_t operation, const void *argument) {
    register uint32_t a0 __asm__("a0") = operation;
    register const void *a1 __asm__("a1") = argument;
    __asm__ __volatile__(".option push\n\t.option norvc\n\t.balign 16\n\t" /* three words in one page */
                         "slli zero, zero, 0x1f\n\tebreak\n\tsrai zero, zero, 7\n\t.option pop"
                         : "+r"(a0)
                         : "r"(a1)
                         : "memory");
}

/* With `qemu -icount shift=6`, the cycle counter counts 64 per instruction. */
uint32_t board_count(void) {
    uint32_t high, low, again;
    do
        __asm__ __volatile__("csrr %0, mcycleh\n\tcsrr %1, mcycle\n\tcsrr %2, mcycleh"
                             : "=r"(high), "=r"(low), "=r"(again));
    while (high != again);
    return (high << 26 | low >> 6) % BOARD_WRAP;
}

/* ---- Start ------------------------------------------------------------------------------------------------------- */

__attribute__((used, noreturn)) static void start(void) {
    bare_clear();
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
