/* board_host.c - a PC as the board: board.h with stdio. */
#ifdef SAVE_EVERY
#define _XOPEN_SOURCE 700 /* mmap */
#include "chip.h"
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>
#endif
#include "board.h"
#include <stdio.h>
#include <stdlib.h>

void board_print(const char *text) { fputs(text, stdout), fflush(stdout); }
void board_end(int status) { exit(status); }
size_t board_stack(void) { return 0; }
uint32_t board_count(void) { return 0; }

#ifdef SAVE_EVERY
/* The flash chip is a file: kill the program and start it again. */
volatile chip *board_chip(void) {
    static void *map;
    if (map == NULL) {
        const char *name = getenv("CHIP");
        const int file = open(name != NULL ? name : "chip.bin", O_RDWR | O_CREAT, 0666);
        if (file < 0 || ftruncate(file, sizeof(chip)) != 0) perror("chip"), exit(2);
        map = mmap(NULL, sizeof(chip), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        if (map == MAP_FAILED) perror("chip"), exit(2);
    }
    return (volatile chip *)map;
}
#endif
