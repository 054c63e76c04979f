/* bare.c - the probe where there is no operating system and no libc: Cortex-M under qemu-system-arm, WebAssembly. Built
   and run by matrix.sh. */
#define PROBE_NO_MAIN
#include "probe.c"

/* Compilers call these where structs are assigned and set. */
void *memcpy(void *to, const void *from, size_t size);
void *memcpy(void *to, const void *from, size_t size) {
    volatile byte *p = (byte *)to; /* or the loop becomes a call of memcpy */
    size_t i;
    for (i = 0; i < size; i++) p[i] = ((const byte *)from)[i];
    return to;
}

void *memset(void *to, int value, size_t size);
void *memset(void *to, int value, size_t size) {
    volatile byte *p = (byte *)to;
    size_t i;
    for (i = 0; i < size; i++) p[i] = (byte)value;
    return to;
}

#if defined(__ARM_ARCH_PROFILE) && __ARM_ARCH_PROFILE == 'M'

/* What clang calls instead: the names end in the alignment that it knows of. */
#define COPIES(name)                                    \
    void name(void *to, const void *from, size_t size); \
    void name(void *to, const void *from, size_t size) { memcpy(to, from, size); }
#define CLEARS(name)                  \
    void name(void *to, size_t size); \
    void name(void *to, size_t size) { memset(to, 0, size); }
COPIES(__aeabi_memcpy)
COPIES(__aeabi_memcpy4)
COPIES(__aeabi_memcpy8)
CLEARS(__aeabi_memclr)
CLEARS(__aeabi_memclr4)
CLEARS(__aeabi_memclr8)

/* Semihosting: the debugger, here qemu, does the input and output. */
static void semihost(uint32_t operation, const void *argument) {
    register uint32_t r0 __asm__("r0") = operation;
    register const void *r1 __asm__("r1") = argument;
    __asm__ __volatile__("bkpt 0xab" : "+r"(r0) : "r"(r1) : "memory");
}

static void put(const char *line) { semihost(0x04, line); }

__attribute__((used, noreturn)) static void run(void) {
#if defined(HOSTILE) && \
    defined(__ARM_FP) /* the caller's environment: toward plus infinity, flush to zero, default NaN */
    uint32_t fpscr = UINT32_C(0x03400000);
    __asm__ __volatile__("vmsr fpscr, %0" : : "r"(fpscr));
#endif
    probe(put);
    semihost(0x18, (const void *)UINT32_C(0x20026)); /* the application ended */
    for (;;) {
    }
}

__attribute__((used, noreturn)) static void fault(void) {
    put("fault\n");
    semihost(0x18, (const void *)UINT32_C(0x20023)); /* a run-time error: exit status 1 */
    for (;;) {
    }
}

/* Before any C: a prologue may save floating-point registers, and the unit is off (CPACR). */
__attribute__((naked, used)) static void reset(void) {
#ifdef __ARM_FP
    __asm__("movw r0, #0xED88\n\tmovt r0, #0xE000\n\tldr r1, [r0]\n\torr r1, r1, #0x00F00000\n\tstr r1, "
            "[r0]\n\tdsb\n\tisb");
#endif
    __asm__("bl run");
}

extern uint32_t stack_top[]; /* from the linker script */
/* clang-format off */
__attribute__((used, section(".vectors"))) static void (*const vectors[16])(void) = {
    (void (*)(void))stack_top, reset, fault, fault, fault, fault, fault, fault,
    fault, fault, fault, fault, fault, fault, fault, fault};
/* clang-format on */

#elif defined(__wasm__)

__attribute__((import_module("env"), import_name("put"))) void put(const char *line);
/* The name of an instruction set of this build, an empty string for another one, and NULL after the last. */
__attribute__((export_name("usable"))) const char *usable(int isa);
const char *usable(int isa) {
    if (!is_isa(isa)) return NULL;
    return kopt_isa_usable((kopt_isa)isa) ? kopt_isa_name((kopt_isa)isa) : "";
}

__attribute__((export_name("run"))) void run(int isa);
void run(int isa) {
    if (kopt_isa_force((kopt_isa)isa) == KOPT_OK) probe(put);
}

#endif
