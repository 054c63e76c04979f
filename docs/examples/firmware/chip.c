/* chip.c - a simulated flash chip, for tests; its cells are a file, which survives a power cut. Replace it with the
   driver of your chip. It has the rules of NOR flash: a sector is erased as a whole, to ones; programming clears bits
   and cannot set one; an operation that is cut off leaves garbage. It may leave worse: a word that reads as programmed
   today and as erased tomorrow. */
#include "chip.h"
#include "board.h"

static void point(volatile chip *c) { /* a test can make the power fail here */
    if (c->points != 0 && --c->points == 0) board_end(0);
}

static uint32_t garbage(volatile chip *c) {
    c->garbage = c->garbage * 1664525u + 1013904223u;
    return (c->garbage >> 16) * 0x9E3779B1u;
}

void chip_erase(uint32_t address) {
    volatile chip *const c = board_chip();
    volatile uint32_t *const cell = c->cell + address / 4;
    int i;
    if (c->weak - 4 - address < FLASH_SECTOR) c->weak = 0;
    c->busy = 1;
    point(c);
    for (i = 0; i < FLASH_SECTOR / 4; ++i) cell[i] = garbage(c);
    point(c);
    for (i = 0; i < FLASH_SECTOR / 4; ++i) cell[i] = 0xFFFFFFFFu;
    point(c);
    c->busy = 0;
}

void chip_program(uint32_t address, const void *data, size_t size) {
    volatile chip *const c = board_chip();
    const unsigned char *byte = (const unsigned char *)data;
    c->busy = 2;
    for (; size > 0; address += 4, byte += 4, size -= 4) {
        const uint32_t old = c->cell[address / 4];
        const uint32_t word = byte[0] | (uint32_t)byte[1] << 8 | (uint32_t)byte[2] << 16 | (uint32_t)byte[3] << 24;
        c->weak_old = old, c->weak_new = word;
        c->weak = address + 4;
        point(c);
        c->cell[address / 4] = old & (word | garbage(c)); /* some of the bits are cleared */
        point(c);
        c->cell[address / 4] = old & word;
        c->weak = 0;
        point(c);
    }
    c->busy = 0;
}

void chip_read(uint32_t address, void *data, size_t size) {
    const volatile chip *const c = board_chip();
    unsigned char *byte = (unsigned char *)data;
    for (; size > 0; ++address, --size) {
        uint32_t word = c->cell[address / 4];
        if (c->weak == address / 4 * 4 + 4 && c->weak_good) word = c->weak_new;
        *byte++ = (unsigned char)(word >> address % 4 * 8);
    }
}
