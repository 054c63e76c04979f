/* bare.h - between bare.c and the start-up code of a board (board_arm.c, board_riscv.c). */
#ifndef BARE_H
#define BARE_H
#include <stdint.h>

extern uint32_t bss_begin[], bss_end[], stack_top[]; /* from the linker script */
int main(void);

void semihost(uint32_t operation, const void *argument); /* by the start-up code: asks the debugger for something */
void bare_clear(void); /* sets .bss to zero and paints the stack: fills what is unused of it with a pattern */

#endif
