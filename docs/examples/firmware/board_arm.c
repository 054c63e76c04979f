/* board_arm.c - start-up code and board.h for Cortex-M0 to M7, for the boards mps2 of qemu; linker script: arm.ld.
   Output goes through semihosting: the debugger, here qemu, prints it. Your board has start-up code of its own. */
#include "board.h"
#ifdef SAVE_EVERY
#include "chip.h"
#endif

extern uint32_t data_begin[], data_end[], data_source[], bss_begin[], bss_end[], stack_top[]; /* from arm.ld */
int main(void);

/* ---- Output ------------------------------------------------------------------------------------------------------ */

static void semihost(uint32_t operation, const void *argument) {
    register uint32_t r0 __asm__("r0") = operation;
    register const void *r1 __asm__("r1") = argument;
    __asm__ __volatile__("bkpt 0xab" : "+r"(r0) : "r"(r1) : "memory");
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

/* SysTick counts 25 MHz down. With `qemu -icount shift=6` an instruction takes 64 ns, that is 1.6 ticks. */
#define SYSTICK ((volatile uint32_t *)0xE000E010u) /* control, reload, value */
uint32_t board_instructions(void) { return (0xFFFFFFu - SYSTICK[2]) * 5 / 8; }

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
    const uint32_t *from = data_source;
    for (p = data_begin; p < data_end; ++p) *p = *from++;
    for (p = bss_begin; p < bss_end; ++p) *p = 0;
    for (; p < here; ++p) *p = PAINT;
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
