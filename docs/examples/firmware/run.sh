#!/bin/sh
# run.sh - trains a small net on emulated microcontrollers and here, and shows that all get the same bits.
#
#     sh run.sh [FLAG...]                          all machines whose tools are here; -DBY_WEIGHT and
#                                                  other flags: see classifier.c
#     sh run.sh build MACHINE PROGRAM [FLAG...]    builds the classifier; with -DSAVE_EVERY=n also flash.c and chip.c.
#                                                  SOURCE=FILE builds another program that calls board.h
#     sh run.sh start MACHINE PROGRAM [OPTION...]  starts it, with more options of qemu
#
# Machines: host, cortex-m4f, cortex-m0plus, rv32imafc, atmega1284p; and atmega328p, which has room for -DBY_WEIGHT. For
# a board of yours, take its compiler with -ffp-contract=off, its start-up code in place of board_*.c, and its linker
# script.
#
# Only lists of words are unquoted: CC and flags.
# shellcheck disable=SC2086
set -eu
here=$(cd "$(dirname "$0")" && pwd)

compiler_of() {
    case $1 in
    host) echo "${CC:-cc}" ;;
    cortex-*) echo arm-none-eabi-gcc ;;
    rv32imafc) echo riscv64-linux-gnu-gcc ;;
    atmega*) echo avr-gcc ;;
    *) echo "run.sh: there is no machine $1" >&2; return 2 ;;
    esac
}

build() { # build MACHINE PROGRAM [FLAG...]
    machine=$1 program=$2
    shift 2
    set -- -std=c99 -ffp-contract=off "$@" "${SOURCE:-$here/classifier.c}"
    case " $*" in *' -DSAVE_EVERY='*) set -- "$@" "$here/flash.c" "$here/chip.c" ;; esac
    small='-Os -ffreestanding -ffunction-sections -fdata-sections -nostdlib -Wl,--gc-sections'
    case $machine in
    host) set -- -O2 "$@" "$here/board_host.c" ;;
    cortex-m4f)
        set -- -mcpu=cortex-m4 -mthumb -mfloat-abi=hard -mfpu=fpv4-sp-d16 $small -T "$here/arm.ld" "$@" \
            "$here/board_arm.c" "$here/bare.c" -lgcc
        ;;
    cortex-m0plus)
        set -- -mcpu=cortex-m0plus -mthumb $small -T "$here/arm.ld" "$@" "$here/board_arm.c" "$here/bare.c" -lgcc
        ;;
    rv32imafc) # Debian's compiler for 64-bit Linux can do this, too, but has no 32-bit libgcc; none is needed
        set -- -march=rv32imafc -mabi=ilp32f $small -fno-pic -static -Wl,--no-warn-rwx-segments,--build-id=none \
            -T "$here/riscv.ld" "$@" "$here/board_riscv.c" "$here/bare.c"
        ;;
    atmega*) set -- -mmcu=$machine -Os "$@" "$here/board_avr.c" -lm ;;
    esac
    compiler=$(compiler_of $machine)
    $compiler "$@" -o "$program"
}

start() { # start MACHINE PROGRAM [OPTION...]; with -icount, qemu counts instructions, and time follows from them
    machine=$1 program=$2
    shift 2
    set -- -icount shift=6 -nographic -monitor none -serial none -chardev stdio,id=out \
        -semihosting-config enable=on,target=native,chardev=out -kernel "$program" "$@"
    case $machine in
    host) "$(dirname "$program")/$(basename "$program")" ;;
    cortex-m4f) qemu-system-arm -M mps2-an386 "$@" ;;
    cortex-m0plus) qemu-system-arm -M mps2-an385 "$@" ;; # a Cortex-M3, which executes this code, too
    rv32imafc) qemu-system-riscv32 -M virt -bios none "$@" ;;
    atmega*) # prints each line of the UART in green, with a dot for its end
        simavr -m $machine -f 16000000 "$program" 2>&1 | sed -n 's/^.*32m\(.*\)\.$/\1/p'
        ;;
    *) compiler_of "$machine" ;; # says that there is no such machine
    esac
}

missing() { # missing MACHINE: the tools it lacks
    case $1 in
    cortex-*) emulator=qemu-system-arm ;;
    rv32*) emulator=qemu-system-riscv32 ;;
    atmega*) emulator=simavr ;;
    *) emulator=sh ;;
    esac
    for tool in "$(compiler_of "$1")" $emulator; do command -v ${tool%% *} >/dev/null || echo "$tool"; done
}

all() { # all [FLAG...]
    out=$(mktemp -d)
    trap 'rm -rf "$out"' EXIT
    export CHIP="$out/chip" # not one that an earlier training has saved to
    machines=
    for machine in host cortex-m4f cortex-m0plus rv32imafc atmega1284p; do
        lacks=$(missing $machine)
        [ -z "$lacks" ] || { echo "$machine is left out: no" $lacks; continue; }
        case "$machine $*" in
        rv32*-DSAVE_EVERY=* | atmega*-DSAVE_EVERY=*) echo "$machine is left out: no simulated flash"; continue ;;
        esac
        build $machine "$out/program" "$@"
        start $machine "$out/program" >"$out/$machine"
        machines="$machines $machine"
    done
    (cd "$out" && awk -v machines="$machines" '
        BEGIN { count = split(machines, name, " ") }
        /^#/ { notes = notes "\n" FILENAME ": " substr($0, 3); next }
        { line[FILENAME, FNR] = $0; if (FNR > most) most = FNR }
        END {
            hash = "[0-9a-f]+$"
            printf "%-45s", "hash of weights and state:"
            for (m = 1; m <= count; ++m) printf " %13s", name[m]
            for (i = 1; i <= most; ++i) {
                text = line[name[1], i]
                sub(/, weights and state .*/, "", text)
                printf "\n%-45s", text
                for (m = 1; m <= count; ++m) {
                    if (line[name[m], i] != line[name[1], i]) differ = 1
                    match(line[name[m], i], hash)
                    printf " %13s", index(line[name[m], i], text) == 1 ? substr(line[name[m], i], RSTART) : "DIFFERS"
                }
            }
            print "\n" notes
            print differ ? "\nDIFFERENT" : "\nthe same lines on " count (count == 1 ? " machine" : " machines")
            exit differ
        }' $machines)
}

case "${1:-}" in
build | start) "$@" ;;
'' | -[!h-]*) all "$@" ;;
*) sed -n '2,13s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
