# Checks KAHAN_OPT_ONLY: a build without any one bit compiles without a warning, refuses at run time what it lacks, and
# changes no other result. Checks what the guards of KOPT_TINY refuse. Measures flash on Cortex-M4F, Cortex-M0+, RISC-V
# and AVR, stack on Cortex-M4F, and lists calls of libraries. Prints TAP and, as comments, the table of docs/size.md.
out=build/tests/size
mkdir -p $out
warnings='-Wall -Wextra -Wpedantic -Wconversion -Wsign-conversion -Wshadow -Wdouble-promotion -Wundef -Wcast-qual'
warnings="$warnings -Werror"
. tests/tap.sh
try() { # try NAME SET FLAGS...: each line of a build equals that of the full build, or is a refusal
    name=$1 set=$2
    shift 2
    ${CC:-cc} -std=c99 -O1 $warnings "$@" "-DONLY=($set)" -o $out/$name tests/only.c >$out/log 2>&1 &&
        timeout 120 $out/$name >$out/$name.txt 2>$out/log &&
        ! grep -v refused $out/$name.txt | grep -vxFf $out/full.txt >$out/log
    report $? "$set $*: the same bits, or refused"
}

${CC:-cc} -std=c99 -O1 $warnings -DKAHAN_OPT_NO_SIMD -o $out/full tests/only.c >$out/log 2>&1 &&
    $out/full >$out/full.txt
report $? "the full build"
! grep refused $out/full.txt >$out/log && [ "$(wc -l <$out/full.txt)" -gt 800 ]
report $? "... refuses nothing"
bits='F32 BF16 FP16 Q8 NEAREST STOCHASTIC KAHAN COMPACT EXACT NEAREST_STATE STOCHASTIC_STATE L2 DECOUPLED
    FULLY_DECOUPLED MOMENTUM SGD ADAM LION ADAN RADAM RANGER EMA EXTRAS CHECKS COMPRESSION'
printf '#define KAHAN_OPT_IMPLEMENTATION\n#include "kahan_opt.h"\n' >$out/impl.c
for bit in $bits; do
    try without_$bit "KOPT_WITH_ALL & ~KOPT_WITH_$bit" -DKAHAN_OPT_NO_SIMD
    [ $bit = CHECKS ] || grep -q 'refused: an option .* is not in this build' $out/without_$bit.txt
    report $? "... and it is refused"
    for compiler in "clang -std=c99" "g++ -x c++ -std=c++11"; do
        command -v ${compiler%% *} >/dev/null || { missing "no ${compiler%% *}"; continue; }
        $compiler $warnings -O0 -DKAHAN_OPT_NO_SIMD "-DKAHAN_OPT_ONLY=KOPT_WITH_ALL & ~KOPT_WITH_$bit" \
            -I. -c $out/impl.c \
            -o $out/impl.o >$out/log 2>&1
        report $? "without $bit: ${compiler%% *} has no warning"
    done
done
# Adam-atan2 has no bit of its own: it needs those of Adam, SGD and fp32.
cat >$out/atan2.c <<'C'
#define KAHAN_OPT_IMPLEMENTATION
#include "kahan_opt.h"
int main(void) {
    kopt_optimizer opt = kopt_adam_atan2(1e-3);
    kopt_step step;
    return kopt_step_begin(&opt, &step) != EXPECTED;
}
C
for bit in LION ADAM SGD F32; do
    expected=KOPT_ERROR_OPTION
    [ $bit != LION ] || expected=KOPT_OK
    ${CC:-cc} -std=c99 -O1 $warnings -DKAHAN_OPT_NO_SIMD -DKAHAN_OPT_VMATH -DEXPECTED=$expected \
        "-DKAHAN_OPT_ONLY=KOPT_WITH_ALL & ~KOPT_WITH_$bit" -I. -o $out/atan2 $out/atan2.c >$out/log 2>&1 &&
        $out/atan2
    report $? "Adam-atan2 without $bit: kopt_step_begin returns $expected"
done

try tiny KOPT_TINY -DKAHAN_OPT_NO_SIMD
[ "$(wc -l <$out/tiny.txt)" -gt 20 ]
report $? "... of more than 20 optimizers"
try tiny_soft KOPT_TINY -DKAHAN_OPT_NO_SIMD -DKOPT_SOFT64_=1
echo 'int main(void) { return 0; }' >$out/empty.c
if ${CC:-cc} -m32 -o $out/empty $out/empty.c 2>$out/log && $out/empty; then
    try tiny_32 KOPT_TINY -DKAHAN_OPT_NO_SIMD -m32 -msse2 -mfpmath=sse
else
    missing "the compiler makes no programs of 32 bits: KOPT_TINY"
fi
try tiny_checked 'KOPT_TINY | KOPT_WITH_CHECKS' -DKAHAN_OPT_NO_SIMD
try tiny_momentum 'KOPT_TINY | KOPT_WITH_MOMENTUM' -DKAHAN_OPT_NO_SIMD -DKOPT_SOFT64_=1
try simd_f32 'KOPT_WITH_ALL & ~KOPT_WITH_BF16'
try simd_bf16 'KOPT_WITH_ALL & ~KOPT_WITH_F32'

try bare KOPT_BARE -DKAHAN_OPT_NO_SIMD

# ---- what the guards of KOPT_TINY refuse: the README's quick start and variants of it ----

cat >$out/guards.c <<'C'
#define KAHAN_OPT_ONLY KOPT_TINY
#define KAHAN_OPT_IMPLEMENTATION
#include "kahan_opt.h"
#include <stdio.h>
enum { N = 100 };
static kopt_bf16 weight[N], grad[N];
static float initial[N], grad32[N];
static unsigned char state[KOPT_STATE_BYTES(N, 6)];
static void expect(kopt_result got, kopt_result want, const char *what) {
    printf("%s %s: %s\n", got == want ? "good" : "WRONG", what, kopt_result_string(got));
}
int main(void) {
    kopt_optimizer opt = kopt_adamw(1e-3), none = opt, momentum = kopt_sgd(1e-3, 0.9), exact = opt, clipped = opt;
    kopt_tensor t = kopt_tensor_of(weight, grad, KOPT_BF16, N, state, sizeof state), other;
    kopt_step step;
    none.made_ = 0;
    exact.rounding = KOPT_EXACT;
    clipped.clip = 0.5;
    expect(kopt_state_init(&opt, &t, initial), KOPT_ERROR_OPTION, "fp32 initial weights");
    other = t, other.grad = grad32, other.grad_format = KOPT_F32;
    expect(kopt_state_init(&opt, &other, 0), KOPT_ERROR_OPTION, "an fp32 gradient");
    other = t, other.state_size = KOPT_STATE_BYTES(N, 6) - 13;
    expect(kopt_state_init(&opt, &other, 0), KOPT_ERROR_SIZE, "a block that is too small");
    other = t, other.copy = grad32;
    expect(kopt_state_init(&opt, &other, 0), KOPT_ERROR_OPTION, "a copy");
    other = t, other.rate_scale = 0.5f;
    expect(kopt_state_init(&opt, &other, 0), KOPT_ERROR_OPTION, "a rate_scale");
    expect(kopt_state_init(&none, &t, 0), KOPT_ERROR_UNINITIALIZED, "no constructor");
    expect(kopt_state_init(&momentum, &t, 0), KOPT_ERROR_OPTION, "momentum");
    expect(kopt_state_init(&exact, &t, 0), KOPT_ERROR_OPTION, "another rounding");
    expect(kopt_step_begin(&none, &step), KOPT_ERROR_UNINITIALIZED, "begin: no constructor");
    expect(kopt_step_begin(&momentum, &step), KOPT_ERROR_OPTION, "begin: momentum");
    expect(kopt_step_begin(&clipped, &step), KOPT_ERROR_OPTION, "begin: clip");
    expect(kopt_optimizer_step(&exact, &t, 1), KOPT_ERROR_OPTION, "another rounding");
    expect(kopt_state_init(&opt, &t, 0), KOPT_OK, "bf16 weights");
    expect(kopt_optimizer_step(&opt, &t, 1), KOPT_OK, "a step");
    other = kopt_tensor_of(weight, grad, KOPT_BF16, N, state, sizeof state), other.rate_scale = 0;
    expect(kopt_state_init(&opt, &other, 0), KOPT_OK, "a rate_scale of 0");
    return 0;
}
C
${CC:-cc} -std=c99 -O1 $warnings -I. -o $out/guards $out/guards.c >$out/log 2>&1 && $out/guards >$out/log
[ "$(grep -c '^good' $out/log)" = 15 ] && ! grep -q WRONG $out/log
report $? "KOPT_TINY refuses what it leaves out"
cat >$out/no_vmath.c <<'C'
#define KAHAN_OPT_ONLY (KOPT_TINY | KOPT_WITH_LION)
#define KAHAN_OPT_IMPLEMENTATION
#include "kahan_opt.h"
int main(void) {
    kopt_optimizer opt = kopt_adamw(1e-3);
    kopt_step step;
    opt.rule = KOPT_ADAM_ATAN2;
    return kopt_step_begin(&opt, &step) != KOPT_ERROR_OPTION;
}
C
${CC:-cc} -std=c99 -O1 $warnings -I. -o $out/no_vmath $out/no_vmath.c >$out/log 2>&1 && $out/no_vmath
report $? "guards refuse Adam-atan2 in a build of three rules without KAHAN_OPT_VMATH"

# ---- flash: the calls of the README's quick start, and the fewest calls that train ----

cat >$out/start.c <<'C'
#include "kahan_opt.h"
enum { N = 100 };
static kopt_bf16 weight[N], grad[N];
static unsigned char state[KOPT_STATE_BYTES(N, 6)];
__attribute__((section(".firmware"))) void firmware(void);
void firmware(void) {
    kopt_optimizer opt = OPTIMIZER;
    kopt_tensor t = kopt_tensor_of(weight, grad, KOPT_BF16, N, state, sizeof state);
    if (kopt_state_init(&opt, &t, 0) != KOPT_OK) return;
    while (kopt_optimizer_step(&opt, &t, 1) == KOPT_OK) {}
}
C
cat >$out/fewest.c <<'C'
#include "kahan_opt.h"
enum { N = 100 };
static kopt_bf16 weight[N], grad[N];
static unsigned char state[KOPT_STATE_BYTES(N, 6)];
kopt_optimizer optimizer;
kopt_tensor tensor;
__attribute__((section(".firmware"))) void firmware(void);
void firmware(void) {
    kopt_step s;
    tensor.weight = weight;
    tensor.grad = grad;
    tensor.n = N;
    tensor.state = state;
    kopt_state_init(&optimizer, &tensor, 0);
    for (;;)
        if (kopt_step_begin(&optimizer, &s) == KOPT_OK) kopt_step_run(&s, &tensor);
}
C
cat >$out/one.c <<'C'
#include "kahan_opt.h"
static kopt_bf16 weight, compensation;
static volatile float update;
void firmware(void);
void firmware(void) { /* counted, too: the update is inlined */
    for (;;) kopt_kahan_add_bf16(&weight, &compensation, update, 0x8000);
}
C
size_of() { # size_of PROGRAM SET COMPILER FLAGS...: bytes of the library in it; prints nothing if it does not link
    program=$1 set=$2 compiler=$3
    shift 3
    tool=${compiler%gcc}
    $compiler "$@" -Os -DKAHAN_OPT_NO_SIMD "-DKAHAN_OPT_ONLY=$set" -ffunction-sections -fdata-sections -fstack-usage \
        -I. -c $out/impl.c -o $out/impl.o >$out/log 2>&1 &&
        $compiler "$@" -Os -ffunction-sections -fdata-sections "-DOPTIMIZER=$optimizer" -I. -c $out/$program.c \
            -o $out/firmware.o >$out/log 2>&1 &&
        $compiler "$@" -nostdlib -Wl,--gc-sections,-e,firmware,--build-id=none $out/firmware.o $out/impl.o $library \
            -o $out/firmware.elf >>$out/log 2>&1 &&
        ${tool}size -A $out/firmware.elf | awk '/^\.(text|rodata|srodata)/ {n += $2} END {print n}'
}
stack_of() { awk -F'\t' -v name="$1" '$1 ~ ":" name "(\\.|$)" {print $2}' $out/impl.su | sort -n | tail -1; }
optimizer='kopt_adamw(1e-3)' library=-lgcc
m4='-mcpu=cortex-m4 -mthumb -mfloat-abi=hard -mfpu=fpv4-sp-d16'
flash() { # flash LIMIT MACHINE SET COMPILER FLAGS...: a row of the table
    limit=$1 machine=$2 set=$3
    shift 3
    command -v $1 >/dev/null || { missing "no $1"; return; }
    size=$(size_of start "$set" "$@")
    echo "# $machine -Os, $optimizer, ${set}: ${size:-?} bytes"
    [ "${size:-99999}" -le $limit ]
    report $? "$machine, $optimizer, ${set}: at most $limit bytes"
}
rv32='riscv64-linux-gnu-gcc -ffreestanding -fno-pic -static -Wl,--no-warn-rwx-segments -march=rv32imafc -mabi=ilp32f'
flash 1600 Cortex-M4F KOPT_TINY arm-none-eabi-gcc $m4
flash 1344 Cortex-M4F KOPT_BARE arm-none-eabi-gcc $m4
flash 1504 Cortex-M4F 'KOPT_TINY & ~KOPT_WITH_SGD' arm-none-eabi-gcc $m4
flash 5120 Cortex-M0+ KOPT_TINY arm-none-eabi-gcc -mcpu=cortex-m0plus -mthumb
library= flash 2112 'RISC-V rv32imafc' KOPT_TINY $rv32
library='-lm -lgcc' flash 8192 'AVR atmega1284p' KOPT_TINY avr-gcc -mmcu=atmega1284p
one() { # one LIMIT MACHINE COMPILER FLAGS...: a one-element update, without the implementation
    limit=$1 machine=$2
    shift 2
    command -v $1 >/dev/null || { missing "no $1"; return; }
    size=$(size_of one KOPT_TINY "$@")
    echo "# $machine -Os, kopt_kahan_add_bf16: ${size:-?} bytes"
    [ "${size:-99999}" -le $limit ]
    report $? "$machine, kopt_kahan_add_bf16: at most $limit bytes"
}
one 176 Cortex-M4F arm-none-eabi-gcc $m4
one 1920 Cortex-M0+ arm-none-eabi-gcc -mcpu=cortex-m0plus -mthumb
library= one 192 'RISC-V rv32imafc' $rv32
library='-lm -lgcc' one 768 'AVR atmega1284p' avr-gcc -mmcu=atmega1284p
optimizer='kopt_sgd(1e-3,0)'
flash 1120 Cortex-M4F 'KOPT_TINY & ~KOPT_WITH_ADAM' arm-none-eabi-gcc $m4
flash 896 Cortex-M4F 'KOPT_BARE & ~KOPT_WITH_ADAM' arm-none-eabi-gcc $m4
library= flash 1440 'RISC-V rv32imafc' 'KOPT_TINY & ~KOPT_WITH_ADAM' $rv32
library='-lm -lgcc' flash 6144 'AVR atmega1284p' 'KOPT_TINY & ~KOPT_WITH_ADAM' avr-gcc -mmcu=atmega1284p
optimizer='kopt_sgd(1e-3,0.9)'
flash 2304 Cortex-M4F 'KOPT_TINY | KOPT_WITH_MOMENTUM' arm-none-eabi-gcc $m4
optimizer='kopt_adamw(1e-3)'
if command -v arm-none-eabi-gcc >/dev/null; then
    for case in "1024:KOPT_BARE" "640:KOPT_BARE & ~KOPT_WITH_ADAM" "1024:KOPT_BARE & ~KOPT_WITH_SGD" \
        "896:(KOPT_BARE & ~KOPT_WITH_STOCHASTIC_STATE) | KOPT_WITH_NEAREST_STATE" \
        "1792:KOPT_BARE | KOPT_WITH_MOMENTUM"; do
        limit=${case%%:*} set=${case#*:}
        size=$(size_of fewest "$set" arm-none-eabi-gcc $m4)
        echo "# Cortex-M4F -Os, the fewest calls, ${set}: ${size:-?} bytes"
        [ "${size:-99999}" -le $limit ]
        report $? "Cortex-M4F, the fewest calls, ${set}: at most $limit bytes"
    done
    size=$(size_of start KOPT_TINY arm-none-eabi-gcc $m4)
    ! arm-none-eabi-nm $out/firmware.elf | grep -i ' t ' | grep -v ' kopt_\| firmware\|__data_start\|_edata' >$out/log
    report $? "Cortex-M4F: nothing of libc, libm or the compiler's library"
    run=$(($(stack_of kopt_step_run) + $(stack_of kopt_round16_bits_scalar_)))
    begin=$(($(stack_of kopt_step_begin) + $(stack_of kopt_beta_) + $(stack_of kopt_to_float_)))
    echo "# stack: $run bytes of kopt_step_run, $begin of kopt_step_begin" | tee $out/log
    [ $run -le 128 ] && [ $begin -le 128 ]
    report $? "Cortex-M4F: at most 128 bytes of stack below kopt_step_run and kopt_step_begin"
    size=$(size_of start KOPT_TINY arm-none-eabi-gcc -mcpu=cortex-m0plus -mthumb)
    arm-none-eabi-nm $out/firmware.elf | grep -i ' t ' | grep -v ' kopt_\| firmware\| __aeabi_\| __gnu_thumb1' >$out/log
    [ -n "$size" ]
    report $? "Cortex-M0+: links with the compiler's library alone"
    arithmetic='__aeabi_\(f\|i2f\|ui2f\|lmul\|llsl\|llsr\|mem\)\|__gnu_thumb1'
    ! arm-none-eabi-nm -u $out/impl.o | grep -v "$arithmetic\|memset\|memcpy" >$out/log
    report $? "Cortex-M0+: no routine for doubles"
    for flags in -Os -O2 -Ofast; do # compilers turn copies of structs and loops over arrays into calls
        arm-none-eabi-gcc $m4 $flags -I. -c $out/impl.c -o $out/impl.o >$out/log 2>&1 &&
            ! arm-none-eabi-nm -u $out/impl.o | grep -i 'mem' >$out/log
        report $? "Cortex-M4F $flags, all of the header: no call of memcpy, memset or memmove"
    done
else
    missing "no arm-none-eabi-gcc"
fi
echo "1..$count"
