# What KAHAN_OPT_ONLY gives: each bit left out compiles without a warning, is refused at run time and changes no other
# result; flash and stack of KOPT_TINY on Cortex-M4F and M0+, and what it calls of a library. Prints TAP and, as comments,
# the table of docs/size.md.
out=build/tests/size
mkdir -p $out
warnings='-Wall -Wextra -Wpedantic -Wconversion -Wsign-conversion -Wshadow -Wdouble-promotion -Wundef -Wcast-qual -Werror'
count=0
report() { # report STATUS DESCRIPTION
    count=$((count + 1))
    if [ "$1" = 0 ]; then echo "ok $count - $2"; else echo "not ok $count - $2"; sed 's/^/# /' $out/log; fi
}
missing() { count=$((count + 1)); echo "ok $count # SKIP $1"; }
try() { # try NAME SET FLAGS...: the lines of a build are those of the full build, or refusals where it lacks something
    name=$1 set=$2
    shift 2
    ${CC:-cc} -std=c99 -O1 $warnings "$@" "-DONLY=($set)" -o $out/$name tests/only.c >$out/log 2>&1 &&
        timeout 120 $out/$name >$out/$name.txt 2>$out/log && ! grep -v refused $out/$name.txt | grep -vxFf $out/full.txt >$out/log
    report $? "$set $*: the same bits, or refused"
}

${CC:-cc} -std=c99 -O1 $warnings -DKAHAN_OPT_NO_SIMD -o $out/full tests/only.c >$out/log 2>&1 && $out/full >$out/full.txt
report $? "the full build"
! grep refused $out/full.txt >$out/log && [ "$(wc -l <$out/full.txt)" -gt 800 ]
report $? "... does it all"
bits='F32 BF16 FP16 Q8 NEAREST STOCHASTIC KAHAN COMPACT EXACT NEAREST_STATE STOCHASTIC_STATE L2 DECOUPLED FULLY_DECOUPLED
    MOMENTUM SGD ADAM LION ADAN RADAM RANGER EMA EXTRAS CHECKS COMPRESSION'
printf '#define KAHAN_OPT_IMPLEMENTATION\n#include "kahan_opt.h"\n' >$out/impl.c
for bit in $bits; do
    try without_$bit "KOPT_WITH_ALL & ~KOPT_WITH_$bit" -DKAHAN_OPT_NO_SIMD
    [ $bit = CHECKS ] || grep -q 'refused: an option .* is not in this build' $out/without_$bit.txt
    report $? "... and it is refused"
    for compiler in "clang -std=c99" "g++ -x c++ -std=c++11"; do
        command -v ${compiler%% *} >/dev/null || { missing "no ${compiler%% *}"; continue; }
        $compiler $warnings -O0 -DKAHAN_OPT_NO_SIMD "-DKAHAN_OPT_ONLY=KOPT_WITH_ALL & ~KOPT_WITH_$bit" -I. -c $out/impl.c \
            -o $out/impl.o >$out/log 2>&1
        report $? "without $bit: ${compiler%% *} has no warning"
    done
done
try tiny KOPT_TINY -DKAHAN_OPT_NO_SIMD
[ "$(wc -l <$out/tiny.txt)" -gt 20 ]
report $? "... of more than 20 optimizers"
try tiny_soft KOPT_TINY -DKAHAN_OPT_NO_SIMD -DKOPT_SOFT64_=1
try tiny_checked 'KOPT_TINY | KOPT_WITH_CHECKS' -DKAHAN_OPT_NO_SIMD
try tiny_momentum 'KOPT_TINY | KOPT_WITH_MOMENTUM' -DKAHAN_OPT_NO_SIMD -DKOPT_SOFT64_=1
try simd_f32 'KOPT_WITH_ALL & ~KOPT_WITH_BF16'
try simd_bf16 'KOPT_WITH_ALL & ~KOPT_WITH_F32'

# ---- on Cortex-M ----

cat >$out/firmware.c <<'C'
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
size_of() { # size_of SET FLAGS...: bytes of code and constants that the firmware links; nothing if it does not link
    set=$1
    shift
    arm-none-eabi-gcc "$@" -Os -DKAHAN_OPT_NO_SIMD "-DKAHAN_OPT_ONLY=$set" -ffunction-sections -fdata-sections -fstack-usage \
        -I. -c $out/impl.c -o $out/impl.o >$out/log 2>&1 &&
        arm-none-eabi-gcc "$@" -Os -I. -c $out/firmware.c -o $out/firmware.o >>$out/log 2>&1 &&
        arm-none-eabi-gcc "$@" -nostdlib -Wl,--gc-sections,-e,firmware,--build-id=none $out/firmware.o $out/impl.o -lgcc \
            -o $out/firmware.elf >>$out/log 2>&1 &&
        arm-none-eabi-size -A $out/firmware.elf | awk '/^\.(text|rodata)/ {n += $2} END {print n}'
}
stack_of() { awk -F'\t' -v name="$1" '$1 ~ ":" name "(\\.|$)" {print $2}' $out/impl.su | sort -n | tail -1; }
if command -v arm-none-eabi-gcc >/dev/null; then
    m4='-mcpu=cortex-m4 -mthumb -mfloat-abi=hard -mfpu=fpv4-sp-d16'
    for case in "1024:KOPT_TINY" "640:KOPT_TINY & ~KOPT_WITH_ADAM" "1024:KOPT_TINY & ~KOPT_WITH_SGD" \
        "896:(KOPT_TINY & ~KOPT_WITH_STOCHASTIC_STATE) | KOPT_WITH_NEAREST_STATE" "1792:KOPT_TINY | KOPT_WITH_MOMENTUM"; do
        limit=${case%%:*} set=${case#*:}
        size=$(size_of "$set" $m4)
        echo "# Cortex-M4F -Os, ${set}: ${size:-?} bytes"
        [ "${size:-99999}" -le $limit ]
        report $? "Cortex-M4F, ${set}: at most $limit bytes"
    done
    size=$(size_of KOPT_TINY $m4)
    ! arm-none-eabi-nm $out/firmware.elf | grep -i ' t ' | grep -v ' kopt_\| firmware\|__data_start\|_edata' >$out/log
    report $? "Cortex-M4F: nothing of libc, libm or the compiler's library"
    run=$(($(stack_of kopt_step_run) + $(stack_of kopt_round16_scalar_)))
    begin=$(($(stack_of kopt_step_begin) + $(stack_of kopt_beta_) + $(stack_of kopt_to_float_)))
    echo "# stack: $run bytes of kopt_step_run, $begin of kopt_step_begin" | tee $out/log
    [ $run -le 128 ] && [ $begin -le 128 ]
    report $? "Cortex-M4F: at most 128 bytes of stack below kopt_step_run and kopt_step_begin"
    size=$(size_of KOPT_TINY -mcpu=cortex-m0plus -mthumb)
    echo "# Cortex-M0+ -Os, KOPT_TINY: ${size:-?} bytes, the compiler's float routines among them"
    arm-none-eabi-nm $out/firmware.elf | grep -i ' t ' | grep -v ' kopt_\| firmware\| __aeabi_\| __gnu_thumb1' >$out/log
    [ -n "$size" ]
    report $? "Cortex-M0+: links with the compiler's library alone"
    ! arm-none-eabi-nm -u $out/impl.o | grep -v '__aeabi_\(f\|i2f\|ui2f\|lmul\|llsl\|llsr\|mem\)\|__gnu_thumb1\|memset\|memcpy' >$out/log
    report $? "Cortex-M0+: no routine for doubles"
    for flags in -Os -O2 -Ofast; do # a struct that is copied, an array that is cleared
        arm-none-eabi-gcc $m4 $flags -I. -c $out/impl.c -o $out/impl.o >$out/log 2>&1 &&
            ! arm-none-eabi-nm -u $out/impl.o | grep -i 'mem' >$out/log
        report $? "Cortex-M4F $flags, all of the header: no call of memcpy, memset or memmove"
    done
else
    missing "no arm-none-eabi-gcc"
fi
echo "1..$count"
