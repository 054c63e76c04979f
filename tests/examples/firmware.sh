# firmware.sh [PART...]: does docs/examples/firmware do what docs/firmware.md says? Prints TAP. The parts:
#     bits       every way to train gives the same lines on the host, Cortex-M4F, Cortex-M0+, RISC-V and AVR, and the
#                inline steps the same bits
#     careless   flags, numbers and words that are wrong are refused
#     power      the power fails at 100 random instructions, and at the points of the flash chip
#     figures    the tables of docs/firmware.md are those of `table`, and its sizes those of the programs
#     broken     mistakes put into the example: the other parts see each. Not one of those of ./build.sh test
#     table      no TAP: prints the tables of docs/firmware.md
#
# Only lists of words are unquoted: compilers, flags and machines.
# shellcheck disable=SC2086
out=build/tests/firmware.${1:-all} # two of the parts run at the same time
rm -rf $out
mkdir -p $out
example=docs/examples/firmware
CC=${CC:-cc}
warnings='-Wall -Wextra -Wpedantic -Wsign-conversion -Wshadow -Wdouble-promotion -Wundef -Wcast-qual'
warnings="$warnings -Wmissing-prototypes -Werror"
boards='cortex-m4f cortex-m0plus rv32imafc atmega1284p'
. tests/tap.sh
have() { command -v "$1" >/dev/null 2>&1; }
lacks() { # lacks MACHINE: prints the first tool that it lacks
    case $1 in
    cortex-*) tools='arm-none-eabi-gcc qemu-system-arm' ;;
    rv32imafc) tools='riscv64-linux-gnu-gcc qemu-system-riscv32' ;;
    atmega*) tools='avr-gcc simavr' ;;
    esac
    for tool in $tools; do have $tool || { echo $tool; return; }; done
}
run() { sh $example/run.sh "$@"; }

# ---- the same bits ---------------------------------------------------------------------------------------------------

hosts() { # other compilers and flags on this machine
    run build host $out/host $warnings -Wconversion >$out/log 2>&1 && $out/host >$out/host.txt 2>>$out/log
    report $? "the classifier compiles without a warning and runs"
    cp $out/host.txt $out/log
    awk '{ loss[NR] = $4 + 0; right = $6 } END { exit !(NR == 5 && loss[5] < loss[1] / 4 && right >= 90) }' \
        $out/host.txt
    report $? "it learns: a loss below a quarter of the first, 90 of 100 windows right"
    for compiler in "gcc -O0" "gcc -O3 -march=native" "gcc -m32 -msse2 -mfpmath=sse" "clang -O3"; do
        name="the same lines with $compiler"
        echo 'int main(void) { return 0; }' >$out/empty.c
        $compiler -o $out/empty $out/empty.c 2>/dev/null || { skip "$name" "no $compiler"; continue; }
        CC=$compiler run build host $out/other $warnings >$out/log 2>&1 && $out/other >$out/other.txt 2>>$out/log &&
            cmp $out/host.txt $out/other.txt >>$out/log
        report $? "$name"
    done
}

ways() { # each way to train: TITLE|NAME|FLAGS
    cat <<'TEXT'
AdamW, layer by layer|adamw|
SGD, weight by weight|sgd|-DBY_WEIGHT
SGD, weight by weight, stochastic|stochastic|-DBY_WEIGHT -DSTOCHASTIC
TEXT
}

# make_way MACHINE NAME FLAGS: builds and runs it for two epochs, once: $out/NAME.MACHINE and $out/NAME.MACHINE.txt
make_way() {
    program=$out/$2.$1
    [ ! -s $program.txt ] || return 0
    run build $1 $program $warnings -Wconversion -DEPOCHS=2 $3 </dev/null &&
        run start $1 $program </dev/null >$program.txt
}

edit() { # edit FOLDER FILE SED-SCRIPT: a copy of the example with a change; fails if the script finds nothing
    rm -rf $1
    mkdir -p $1
    cp docs/examples/firmware/* $1
    sed "s,../../../kahan_opt.h,$PWD/kahan_opt.h," docs/examples/firmware/classifier.c >$1/classifier.c
    cp $1/"$2" $out/whole
    sed "$3" $out/whole >$1/"$2"
    ! cmp -s $out/whole $1/"$2"
}

careless() { # what goes wrong is said, by the compiler, the program or run.sh
    : >$out/wrong
    ! run build host $out/no -DSTOCHASTIC >$out/log 2>&1 && grep -q '#error' $out/log ||
        echo "STOCHASTIC alone: not refused" >>$out/wrong
    for change in 's/UNIT = 4/UNIT = 2/' 's/UNIT = 4/UNIT = 6/' 's/3 . FLASH_SECTOR/3000/' 's/SLOTS = 3/SLOTS = 1/'; do
        edit $out/edited flash.h "$change"
        ! sh $out/edited/run.sh build host $out/no -DSAVE_EVERY=50 >$out/log 2>&1 && grep -q check_flash_h $out/log ||
            echo "flash.h, $change: not refused"
    done >>$out/wrong
    edit $out/edited flash.h 's/3 . FLASH_SECTOR/FLASH_SECTOR/'
    sed 's,uint32_t word = c->,if (address >= FLASH_BYTES) board_end(3); &,' $example/chip.c >$out/edited/chip.c
    sh $out/edited/run.sh build host $out/small -DSAVE_EVERY=50 >>$out/wrong 2>&1
    ! CHIP=$out/chip $out/small >$out/log && grep -q '^flash_save failed$' $out/log ||
        echo 'a small slot: not refused, or read beyond the chip' >>$out/wrong
    for words in BY_WEIGHT 'build nothing no' 'start nothing no'; do
        ! run $words >$out/log 2>&1 && grep -q 'Machines: host\|no machine nothing' $out/log ||
            echo "run.sh $words: not refused"
    done >>$out/wrong
    cp $out/wrong $out/log
    [ ! -s $out/log ]
    report $? "a flag without the other, numbers of flash.h that do not fit, unknown words: refused"
    { run -DSAVE_EVERY=50 -DEPOCHS=1; run -DSAVE_EVERY=50 -DEPOCHS=1; } >$out/log 2>&1
    ! grep -q resumed $out/log && [ "$(grep -c '^the same lines on' $out/log)" = 2 ]
    report $? "run.sh starts the training anew each time"
}

bits() {
    hosts
    for machine in $boards; do
        tool=$(lacks $machine)
        [ -z "$tool" ] || skip "$machine" "no $tool"
    done
    run >$out/side_by_side 2>$out/log && grep -q '^the same lines on' $out/side_by_side
    report $? "the host and the boards print the same lines"
    sed 's/^/# /' $out/side_by_side
    ways | while IFS='|' read -r title name flags; do
        for machine in host $boards; do
            [ -z "$(lacks $machine)" ] || continue
            make_way $machine $name "$flags" || echo "$name on $machine: it fails"
            grep -v '^#' $out/$name.$machine.txt | diff $out/$name.host.txt - || echo "$name on $machine: other lines"
        done
    done >$out/log 2>&1
    [ ! -s $out/log ]
    report $? "each way to train: the same lines on all machines"
    name="SGD on an ATmega328P, which has 2 KB of RAM: the same lines"
    if [ -z "$(lacks atmega328p)" ]; then
        make_way atmega328p sgd -DBY_WEIGHT >$out/log 2>&1 &&
            grep -v '^#' $out/sgd.atmega328p.txt | diff $out/sgd.host.txt - >>$out/log
        report $? "$name"
    else
        skip "$name" "no $(lacks atmega328p)"
    fi
    for machine in host $boards; do
        [ -z "$(lacks $machine)" ] || continue
        SOURCE=tests/examples/inline_board.c run build $machine $out/inline $warnings -Wconversion >$out/log 2>&1 &&
            run start $machine $out/inline >$out/inline.$machine.txt 2>>$out/log &&
            [ "$(sort -u $out/inline.$machine.txt | wc -l)" = 32 ] &&
            diff $out/inline.host.txt $out/inline.$machine.txt >>$out/log
        report $? "inline steps with tiny, infinite and NaN numbers: $machine has the bits of the host"
    done
    counter
}

counter() { # do the boards count instructions as they say? A loop of two instructions, 10,000 times
    cat >$out/loop.c <<'C'
#include "../../../docs/examples/firmware/board.h"
int main(void) {
    const uint32_t before = board_count();
    uint32_t n = 10000;
#ifdef __arm__
    __asm__ __volatile__(".syntax unified\n\t1: subs %0, #1\n\tbne 1b" : "+l"(n) : : "cc");
#else
    __asm__ __volatile__("1: addi %0, %0, -1\n\tbnez %0, 1b" : "+r"(n));
#endif
    n = (board_count() - before + BOARD_WRAP) % BOARD_WRAP;
    return n < 20000 || n > 20060;
}
C
    for machine in ${boards% atmega*}; do
        tool=$(lacks $machine)
        [ -z "$tool" ] || { skip "$machine counts instructions" "no $tool"; continue; }
        SOURCE=$out/loop.c run build $machine $out/loop $warnings >$out/log 2>&1 &&
            run start $machine $out/loop >>$out/log 2>&1
        report $? "$machine counts instructions"
    done
}

# ---- the power fails -------------------------------------------------------------------------------------------------

cut() { # cut MACHINE DESCRIPTION ARGUMENT...
    machine=$1 name=$2
    shift 2
    if [ $machine != host ]; then
        tool=$(lacks $machine)
        [ -z "$tool" ] || { skip "$name" "no $tool"; return; }
    fi
    run build $machine $out/saving $warnings -DSAVE_EVERY=1 >$out/log 2>&1 &&
        SAVED=$((0x$(nm -S $out/saving | awk '$4 == "run" { print $2 }'))) \
            python3 tests/examples/firmware_power.py $machine $out/saving "$@" >$out/log 2>&1
    status=$?
    report $status "$name"
    [ $status != 0 ] || sed 's/^/# /' $out/log
}

power() {
    have python3 || { skip "power cuts" "no python3"; return; }
    cut cortex-m4f 'Cortex-M4F: 100 power cuts at random instructions' instructions 100 4
    cut cortex-m4f 'Cortex-M4F: power cuts before, within and after erases and words' points 400
    cut host 'host: the same at more words' points 20
    cut host 'host: a last word that is read as good after the power cut, and as bad after the next' weak
}

mistake() { # mistake DESCRIPTION FILE SED-SCRIPT
    if ! edit $out/broken "$2" "$3"; then
        echo "no such place" >$out/log
        report 1 "$1"
        return
    fi
    before=$count
    example=$out/broken
    power >$out/seen 2>&1
    example=docs/examples/firmware
    count=$before
    cp $out/seen $out/log
    ! grep -q 'error:' $out/seen && grep -q '^not ok' $out/seen
    report $? "seen: $1"
    grep -A 1 '^not ok' $out/seen | sed 's/^/# /'
}

broken() {
    ! run -ffp-contract=fast >$out/log 2>&1 && grep -q '^DIFFERENT' $out/log
    report $? "seen: products and sums that are fused"
    mistake 'two slots' flash.h 's/FLASH_SLOTS = 3,/FLASH_SLOTS = 2,/'
    mistake 'the newest slot is overwritten' flash.c \
        's/slot = (newest + 1) % FLASH_SLOTS;/slot = newest == NONE ? 0 : newest;/'
    mistake 'a mark that is programmed first, and no check of the bytes' flash.c \
        's/return stored == crc;/return stored != 0xFFFFFFFFu;/
        /chip_program(address + .*tail/d
        s/^ *chip_program(address, head, .*/chip_program(address + FLASH_UNIT + (uint32_t)size, tail, sizeof tail);\n&/'
    mistake 'the CRC does not cover the bytes' flash.c \
        's/size += FLASH_UNIT; size > 0;/address += FLASH_UNIT + (uint32_t)size, size = 0; size > 0;/
        s/crc_of(crc_of(0, head, sizeof head), data, size)/0/'
    mistake 'the older slot counts' flash.c 's/number > sequence/number < sequence/'
    mistake 'no erase' flash.c 's/chip_erase(address + erased)/(void)erased/'
    mistake 'only the first sector is erased' flash.c 's/erased < size + 2 \* FLASH_UNIT/erased < FLASH_SECTOR/'
    mistake 'a save is reported before it is done' classifier.c \
        's/^ *if (!flash_save.*//
        s/^\( *\)print_number("saved: step.*/&\n\1flash_save(\&run, sizeof run);/'
    mistake 'the step count of the optimizer is forgotten' classifier.c \
        's/opt.step = run.step;/static uint32_t steps; opt.step = steps++ \/ 2;/'
    mistake 'the state is not saved' classifier.c \
        '/flash_/s/sizeof run/offsetof(struct run, state1)/; s/static struct {/static struct run {/'
}

# ---- figures ---------------------------------------------------------------------------------------------------------

m4f='-mcpu=cortex-m4 -mthumb -mfloat-abi=hard -mfpu=fpv4-sp-d16'
size_of() { # size_of PROGRAM: its bytes of flash and RAM
    arm-none-eabi-size -A "$1" 2>/dev/null |
        awk '/^\.(text|rodata|data)/ { flash += $2 } /^\.(data|bss)/ { ram += $2 } END { print flash + 0, ram + 0 }'
}
with_commas() { echo "$1" | sed ':a; s/\([0-9]\)\([0-9]\{3\}\)\($\|,\)/\1,\2\3/; ta'; }

table() {
    [ -s $out/side_by_side ] || run >$out/side_by_side
    sed 's/^\(.\)/    \1/' $out/side_by_side
    echo
    for machine in $boards; do
        unit=instructions
        case $machine in
        cortex-m4f) title='Cortex-M4F' ;;
        cortex-m0plus) title='Cortex-M0+, without FPU' ;;
        rv32imafc) title='RISC-V rv32imafc' ;;
        atmega*) title='AVR ATmega1284P' unit=cycles ;;
        esac
        echo "| $title | flash | static RAM | stack | $unit of a step |"
        echo '|---|---|---|---|---|'
        ways | while IFS='|' read -r way name flags; do
            make_way $machine $name "$flags" || exit
            set -- $(size_of $out/$name.$machine) $(sed -n 's/^# stack \([0-9]*\) .* \([0-9]*\)$/\1 \2/p' \
                $out/$name.$machine.txt)
            echo "| $way | $(with_commas $1) | $(with_commas $2) | $3 | $(with_commas $4) |"
        done
        echo
    done
    calls
}

added() { # added CALL COMPILER FLAG...: bytes of code and constants of a program that only makes this call
    call=$1
    shift
    cat >$out/calls.c <<C
#include "kahan_opt.h"
enum { N = 100 };
static kopt_bf16 weight[N], grad[N], state[3 * N];
static volatile float update;
void start(void);
void start(void) {
    kopt_inline_optimizer opt = kopt_inline_optimizer_of(1e-3f, 0.01f, 0);
    for (;;) $call;
    (void)opt, (void)weight, (void)grad, (void)state, (void)update;
}
C
    "$@" -std=c99 -Os -ffunction-sections -fdata-sections -I. -nostdlib -Wl,--gc-sections,-e,start,--build-id=none \
        -o $out/calls $out/calls.c $libraries || return
    set -- $(size_of $out/calls)
    with_commas $1
}
adamw='kopt_inline_adamw(&opt, weight, state, grad, N)'
calls() { # what one call adds to a firmware
    echo '| what is called | Cortex-M4F | Cortex-M0+ | RISC-V rv32imafc | AVR |'
    echo '|---|---|---|---|---|'
    for call in "$adamw" 'kopt_inline_sgd(&opt, weight, state, grad, N)' \
        'kopt_kahan_add_bf16(weight, state, update, 0x8000)'; do
        set -- $(libraries=-lgcc added "$call" arm-none-eabi-gcc $m4f) \
            $(libraries=-lgcc added "$call" arm-none-eabi-gcc -mcpu=cortex-m0plus -mthumb) \
            $(libraries='' added "$call" riscv64-linux-gnu-gcc -march=rv32imafc -mabi=ilp32f -ffreestanding -fno-pic \
                -static -Wl,--no-warn-rwx-segments) \
            $(libraries='-lm -lgcc' added "$call" avr-gcc -mmcu=atmega1284p)
        echo "| ${call%%(*} | $1 | $2 | $3 | $4 |"
    done
    arm-none-eabi-gcc -std=c99 $m4f -Os -c -o $out/flash.o $example/flash.c
    set -- $(size_of $out/flash.o)
    echo "| flash_save and flash_load | $1 | | | |"
}

limits() { # they hold for other versions of the compiler, too
    tool=$(lacks cortex-m4f)
    [ -z "$tool" ] || { skip "bytes on a Cortex-M4F" "no $tool"; return; }
    bytes=$(libraries= added "$adamw" arm-none-eabi-gcc $m4f 2>$out/log)
    [ "${bytes:-9999}" -le 664 ]
    report $? "a Cortex-M4F: the inline AdamW takes at most 664 bytes and no library: ${bytes:-?}"
    cat >$out/whole.c <<'C'
#define KAHAN_OPT_NO_SIMD
#define KAHAN_OPT_IMPLEMENTATION
#include "../../../kahan_opt.h"
enum { N = 100 };
static kopt_bf16 weight[N], grad[N];
static unsigned char state[KOPT_STATE_BYTES(N, 6)];
int main(void) {
    kopt_optimizer opt = kopt_adamw(1e-3);
    kopt_tensor t = KOPT_TENSOR(KOPT_BF16, weight, grad, N, state, sizeof state);
    if (kopt_state_init(&opt, &t, 1, NULL) != KOPT_OK) return 1;
    while (opt.step < 10)
        if (kopt_optimizer_step(&opt, &t, 1) != KOPT_OK) return 1;
    return 0;
}
C
    whole=
    for limit in cortex-m4f:22000 cortex-m0plus:31000; do
        SOURCE=$out/whole.c run build ${limit%:*} $out/whole >$out/log 2>&1 &&
            run start ${limit%:*} $out/whole >>$out/log 2>&1
        status=$?
        set -- $(size_of $out/whole)
        [ $status = 0 ] && [ $1 -le ${limit#*:} ]
        report $? "${limit%:*}: AdamW by the whole library without vectors runs and takes at most ${limit#*:} bytes: $1"
        whole="$whole $((($1 + 500) / 1000))"
    done
}

figures() {
    limits
    for machine in $boards; do
        tool=$(lacks $machine)
        [ -z "$tool" ] || { skip "the tables of docs/firmware.md" "no $tool"; return; }
    done
    for compiler in arm-none-eabi-gcc:12.2.1 riscv64-linux-gnu-gcc:12 avr-gcc:5.4.0; do
        version=$(${compiler%:*} -dumpversion)
        [ "$version" = ${compiler#*:} ] ||
            { skip "the tables of docs/firmware.md" "they are of another ${compiler%:*} than $version"; return; }
    done
    table >$out/table 2>$out/log && sed -n '/^<!-- figures: firmware -->$/,/^<!-- end -->$/p' docs/firmware.md |
        sed '1,2d; $d' | sed '$d' | diff - $out/table >>$out/log
    report $? "the tables of docs/firmware.md are those of the programs (./build.sh figures firmware writes them)"
    m0plus=$(sed -n 's/^| kopt_inline_adamw | [^|]*| \([^ ]*\) .*/\1/p' $out/table)
    tr -s '\n ' ' ' <docs/firmware.md |
        grep -q "no libm, and adds $bytes bytes of flash on a Cortex-M4F, and $m0plus on a Cortex-M0+" &&
        tr -s '\n ' ' ' <README.md | grep -q "AdamW for firmware takes $bytes bytes on a Cortex-M4F" &&
        tr -s '\n ' ' ' <kahan_opt.h | grep -q "made for firmware: $bytes bytes of code on a Cortex-M4F" &&
        grep -q "\[inline step\](firmware.md#the-step) $bytes bytes" docs/vendoring.md
    report $? "the pages and the header have the size of the inline AdamW: $bytes, and $m0plus"
    set -- $whole
    tr '\n' ' ' <docs/firmware.md | grep -q "take $1 KB on a Cortex-M4F and $2 KB on a Cortex-M0+"
    report $? "docs/firmware.md has the size of AdamW by the whole library: $1 and $2 KB"
}

case "${1:-all}" in
table) table; exit ;;
esac
for part in "${@:-all}"; do
    case $part in
    all) bits; careless; power; figures ;;
    bits | careless | power | figures | broken) $part ;;
    *) echo "firmware.sh: there is no part $part" >&2; exit 2 ;;
    esac
done
echo "1..$count"
