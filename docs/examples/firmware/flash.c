/* flash.c - saves an array of bytes in NOR flash so that the power may fail at any instruction: after it, the last save
   that was complete is loaded again.

   There are three slots. A save goes to the slot after that of the newest save, so that the last two saves stay whole
   all the time. A slot has a sequence number, the bytes, and the CRC-32 of both, which is programmed last. It counts
   only if its CRC is right: what an interrupted erase or program leaves passes with a probability of 2^-32. Of the good
   slots, the one with the largest sequence number counts. */
#include "flash.h"

enum {
    UNIT_FITS = FLASH_UNIT >= 4 && FLASH_UNIT % 4 == 0,
    SLOTS_FIT = FLASH_SLOTS >= 2 && FLASH_SLOT % FLASH_SECTOR == 0 && FLASH_SECTOR % FLASH_UNIT == 0
};
typedef char check_flash_h[UNIT_FITS && SLOTS_FIT ? 1 : -1]; /* an error: the numbers of flash.h do not fit */

enum { PIECE = 32 }; /* bytes that are read at once */

enum { UNKNOWN = -2, NONE = -1 };
static int newest = UNKNOWN; /* the slot of the newest save */
static uint32_t sequence;    /* its number */

static uint32_t crc_of(uint32_t crc, const void *data, size_t size) {
    const unsigned char *p = (const unsigned char *)data;
    int bit;
    for (crc = ~crc; size > 0; --size)
        for (crc ^= *p++, bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? 0xEDB88320u : 0);
    return ~crc;
}

/* Is the slot good? Sets *number to its sequence number. */
static int is_good(int slot, size_t size, uint32_t *number) {
    unsigned char piece[PIECE];
    uint32_t address = (uint32_t)slot * FLASH_SLOT, crc = 0, stored;
    chip_read(address, number, 4);
    for (size += FLASH_UNIT; size > 0;) {
        const size_t n = size < PIECE ? size : PIECE;
        chip_read(address, piece, n);
        crc = crc_of(crc, piece, n);
        address += (uint32_t)n, size -= n;
    }
    chip_read(address, &stored, 4);
    return stored == crc;
}

static int fits(size_t size) { return size % FLASH_UNIT == 0 && size <= FLASH_SLOT - 2 * FLASH_UNIT; }

static void find(size_t size) {
    uint32_t number;
    int slot;
    if (newest != UNKNOWN) return;
    for (newest = NONE, slot = 0; slot < FLASH_SLOTS; ++slot)
        if (is_good(slot, size, &number) && (newest == NONE || number > sequence)) newest = slot, sequence = number;
}

int flash_load(void *data, size_t size) {
    if (!fits(size)) return 0;
    find(size);
    if (newest == NONE) return 0;
    chip_read((uint32_t)newest * FLASH_SLOT + FLASH_UNIT, data, size);
    return 1;
}

int flash_save(const void *data, size_t size) {
    uint32_t head[FLASH_UNIT / 4] = {0}, tail[FLASH_UNIT / 4] = {0}, address, erased, number;
    int slot;
    if (!fits(size)) return 0;
    find(size);
    slot = (newest + 1) % FLASH_SLOTS;
    address = (uint32_t)slot * FLASH_SLOT;
    head[0] = sequence + 1;
    tail[0] = crc_of(crc_of(0, head, sizeof head), data, size);
    for (erased = 0; erased < size + 2 * FLASH_UNIT; erased += FLASH_SECTOR) chip_erase(address + erased);
    chip_program(address, head, sizeof head);
    chip_program(address + FLASH_UNIT, data, size);
    chip_program(address + FLASH_UNIT + (uint32_t)size, tail, sizeof tail);
    if (!is_good(slot, size, &number)) return 0; /* the sector is worn out, or the driver is wrong */
    newest = slot, sequence = head[0];
    return 1;
}
