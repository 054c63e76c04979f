/* board_arm.c - start-up code for Cortex-M0 to M7, for the boards mps2 of qemu; linker script: arm.ld. The rest of
   board.h is in bare.c. Your board has start-up code of its own. */
#include "bare.h"
#include "board.h"
#ifdef SAVE_EVERY
#include "chip.h"
#endif

extern uint32_t data_begin[], data_end[], data_source[]; /* from arm.ld */

void semihost(uint32_t operation, const void *argument) {
    register uint32_t r0 __asm__("r0") = operation;
    register const void *r1 __asm__("r1") = argument;
    __asm__ __volatile__("bkpt 0xab" : "+r"(r0) : "r"(r1) : "memory");
}

/* SysTick counts 25 MHz down. With `qemu -icount shift=6` an instruction takes 64 ns, that is 1.6 ticks. */
#define SYSTICK ((volatile uint32_t *)0xE000E010u) /* control, reload, value */
uint32_t board_count(void) { return (0xFFFFFFu - SYSTICK[2]) * 5 / 8; }

/* ---- Start ------------------------------------------------------------------------------------------------------- */

__attribute__((used, noreturn)) static void start(void) {
    const uint32_t *from = data_source;
    uint32_t *p;
    for (p = data_begin; p < data_end; ++p) *p = *from++;
    bare_clear();
    SYSTICK[1] = 0xFFFFFF;
    SYSTICK[2] = 0;
    SYSTICK[0] = 5; /* on, processor clock, no interrupt */
#ifdef SAVE_EVERY
    if (board_chip()->repeats != 0) { /* a test makes the power fail */
        SYSTICK[1] = board_chip()->ticks - 1;
        SYSTICK[2] = 0;
        SYSTICK[0] = 7; /* with interrupt */
    }
#endif
    board_end(main());
    for (;;) {
    }
}

static void fault(void) {
    board_print("fault\n");
    board_end(1);
}

#ifdef SAVE_EVERY
/* The other RAM of the board: qemu can map a file there. It plays the flash chip. */
volatile chip *board_chip(void) { return (volatile chip *)0x21000000u; }

static void systick(void) {
    if (--board_chip()->repeats == 0) board_end(0);
}
#else
#define systick fault
#endif

/* Before any C: a function may begin by saving registers of the FPU, which is off (CPACR). */
__attribute__((naked, used)) static void reset(void) {
#ifdef __ARM_FP
    __asm__("movw r0, #0xED88\n\tmovt r0, #0xE000\n\tldr r1, [r0]\n\torr r1, r1, #0x00F00000\n\tstr r1, [r0]\n\t"
            "dsb\n\tisb");
#endif
    __asm__("bl start");
}

__attribute__((used, section(".vectors"))) static const struct {
    uint32_t *stack;
    void (*handler[15])(void); /* 1: reset, 15: SysTick */
} vectors = {
    stack_top,
    {reset, fault, fault, fault, fault, fault, fault, fault, fault, fault, fault, fault, fault, fault, systick}};
