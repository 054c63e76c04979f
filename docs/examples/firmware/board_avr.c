/* board_avr.c - board.h on an ATmega, for the emulator simavr: avr-libc has start-up code, memcpy and memset. */
#include "board.h"
#include <avr/interrupt.h>
#include <avr/io.h>
#include <avr/sleep.h>

void board_print(const char *text) {
    UCSR0B = 1 << TXEN0;
    for (; *text != 0; ++text) {
        while ((UCSR0A & (1 << UDRE0)) == 0) {
        }
        UDR0 = (uint8_t)*text;
    }
}

void board_end(int status) {
    (void)status;
    while ((UCSR0A & (1 << TXC0)) == 0) {
    }
    cli();
    sleep_mode(); /* asleep without interrupts: simavr ends */
    for (;;) {
    }
}

enum { PAINT = 0x5A };
extern uint8_t _end[]; /* of .bss, from the linker script. The stack grows down to it from RAMEND */

/* Runs in the midst of the start-up code: paints the stack, and starts timer 1, which counts every 256 cycles. */
__attribute__((naked, used, section(".init3"))) static void start(void) {
    uint8_t *p = _end;
    do *p = PAINT;
    while (++p <= (uint8_t *)RAMEND);
    TCCR1B = 1 << CS12;
}

size_t board_stack(void) {
    const uint8_t *p = _end;
    while (*p == PAINT) ++p;
    return RAMEND + 1u - (size_t)p;
}

uint32_t board_count(void) { return (uint32_t)TCNT1 << 8; }
