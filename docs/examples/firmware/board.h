/* board.h - what the programs of this folder need from a board. board_host.c has it for a PC, board_avr.c for an
   ATmega, board_arm.c and board_riscv.c, each with bare.c, for boards that qemu emulates. On your board, board_print()
   writes to a UART and board_end() loops forever; the rest is for tests and measurements. */
#ifndef BOARD_H
#define BOARD_H
#include <stddef.h>
#include <stdint.h>

void board_print(const char *text);
void board_end(int status); /* does not return; 0: success */

/* The most bytes of stack that were in use so far; 0 if it is not known. */
size_t board_stack(void);

/* Counts executed instructions or cycles; the count wraps around at BOARD_WRAP. Always 0 where nothing counts. */
#ifdef __AVR__
#define BOARD_COUNTS "cycles"
#define BOARD_WRAP 16777216u
#else
#define BOARD_COUNTS "instructions"
#define BOARD_WRAP 10485760u
#endif
uint32_t board_count(void);

#endif
