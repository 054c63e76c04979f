/* flash.h - two functions that keep an array of bytes over a power cut (flash.c), and the three that they need of a
   flash chip (chip.c, or the driver of your chip). */
#ifndef FLASH_H
#define FLASH_H
#include <stddef.h>
#include <stdint.h>

/* Saves the bytes. Returns 1 when they are safe, 0 if the chip did not take them; the save before it is still there.
   The size is a multiple of FLASH_UNIT, at most FLASH_SLOT - 2 * FLASH_UNIT, and always the same. */
int flash_save(const void *data, size_t size);

/* Loads the bytes of the last save that was complete. Returns 0 and changes nothing if there is none of this size. */
int flash_load(void *data, size_t size);

/* ---- The chip: set these numbers to yours ------------------------------------------------------------------------ */

enum {
    FLASH_UNIT = 4,      /* bytes that are programmed at once, at least 4 */
    FLASH_SECTOR = 2048, /* bytes that are erased at once */
    FLASH_SLOT = 3 * FLASH_SECTOR,
    FLASH_SLOTS = 3, /* at least 2; why 3: docs/firmware.md */
    FLASH_BYTES = FLASH_SLOTS * FLASH_SLOT
};

void chip_erase(uint32_t address);                                  /* makes all bits of a sector 1 */
void chip_program(uint32_t address, const void *data, size_t size); /* clears bits; cannot set one */
void chip_read(uint32_t address, void *data, size_t size);

#endif
