/* chip.h - the flash chip of chip.c, and how a test makes its power fail. You do not need this file. */
#ifndef CHIP_H
#define CHIP_H
#include "flash.h"

/* What survives a power cut: the cells, and before them what a test wants. */
typedef struct chip {
    uint32_t ticks, repeats; /* the power fails when the timer has counted `ticks` so many times; 0: it does not */
    uint32_t points;         /* the power fails at this point of chip.c, counted from 1; 0: at none */
    uint32_t weak_good;      /* 1: a word that was not programmed to the end reads as if it were; 0: as before */
    uint32_t garbage;        /* random numbers for what an interruption leaves */
    uint32_t busy;           /* 1: a sector is being erased, 2: bytes are being programmed */
    uint32_t weak;           /* 4 + the address of the word that is being programmed, or was when the power failed */
    uint32_t weak_old, weak_new;
    uint32_t cell[FLASH_BYTES / 4];
} chip;

volatile chip *board_chip(void);

#endif
