# avx512.sh: the code for AVX-512 prints the golden lines and passes tests. On a machine without AVX-512, they run in
# Bochs, which emulates a PC that has it: a kernel of Debian starts a program that runs them. Prints TAP.
#     sh tests/bits/avx512.sh        the golden lines, and tests by turns; KOPT_ALL=yes: all
#     sh tests/bits/avx512.sh bochs  ... in Bochs also where AVX-512 is
#     sh tests/bits/avx512.sh lacks  the tools that are missing here
#
# Only lists of words are unquoted: CC, flags, a program with its arguments.
# shellcheck disable=SC2086
. tests/tap.sh
out=build/tests/avx512
seconds=1200 # at most, in Bochs
[ -z "${KOPT_ALL:-}" ] || seconds=3000

has_avx512() { grep -q 'avx512bw.*avx512vl' /proc/cpuinfo; }
find_linux() { for linux in build/bochs/boot/vmlinuz-*; do [ -e "$linux" ] && return; done; }

if [ "${1:-}" = lacks ]; then
    [ "$(uname -m)" = x86_64 ] || { echo x86-64; exit; }
    if has_avx512; then exit; fi
    for tool in bochs cpio xorriso; do command -v $tool >/dev/null || echo $tool; done
    for file in bochs/BIOS-bochs-latest ISOLINUX/isolinux.bin syslinux/modules/bios/ldlinux.c32; do
        [ -e /usr/share/$file ] || [ -e /usr/lib/$file ] || echo "${file##*/}"
    done
    ls /usr/lib/*/bochs/plugins/libbx_term_gui.so >/dev/null 2>&1 || echo bochs-term
    find_linux || echo build/bochs
    exit
fi

# ---- programs: `all` has all instruction sets, `only` is for AVX-512 and leaves AVX2 and SSE2 out --------------------

rm -rf $out
mkdir -p $out/tree $out/disk
{
    printf '%s avx512\n' all only
    for tests in 'step_bits brief' 'tools quick inline quick' 'vmath quick api quick' 'codes quick state quick' \
        'arrays quick'; do
        ! turn 5 || printf '%s %s\n' $tests
    done
} >$out/runs
bochs='-include tests/bits/bochs.h'
if has_avx512 && [ "${1:-}" != bochs ]; then bochs=; fi
compile() { # compile FILE FLAG...
    file=$1
    shift
    ${CC:-cc} -std=c99 -O2 -static $bochs -o $out/tree/$file "$@" -lm
}
while read -r name rest; do
    only='-mavx512f -mavx512bw -mavx512dq -mavx512vl -mf16c'
    source=tests/unit/test_$name.c
    case $name in all) only='' source=tests/bits/probe.c ;; only) source=tests/bits/probe.c ;; esac
    compile $name $only $source || echo "$name $rest: not built"
done <$out/runs >$out/log 2>&1
[ ! -s $out/log ]
report $? "the programs are built"

# ---- runs: $out/said has `begin PROGRAM`, what it says, and `end PROGRAM STATUS` for each ----------------------------

direct() {
    while read -r name rest; do
        echo "begin $name"
        timeout 100 $out/tree/$name $rest
        echo "end $name $?"
    done <$out/runs
}

emulated() {
    cp $out/runs $out/tree/runs
    cat >$out/init.c <<'TEXT'
#include <stdio.h>
#include <string.h>
#include <sys/reboot.h>
#include <sys/wait.h>
#include <unistd.h>
int main(void) {
    char name[100], argument[100];
    FILE *runs = fopen("/runs", "r");
    while (fscanf(runs, "%99s %99s", name, argument) == 2) {
        int status = 0;
        printf("begin %s\n", name), fflush(stdout);
        if (fork() == 0) execl(name, name, argument, (char *)0), _exit(127);
        wait(&status);
        printf("end %s %d\n", name, status), fflush(stdout);
    }
    sleep(1); /* the serial port */
    return reboot(RB_POWER_OFF);
}
TEXT
    ${CC:-cc} -O1 -static -o $out/tree/init $out/init.c || return
    (cd $out/tree && find . | cpio --quiet -o -H newc) >$out/disk/programs || return
    find_linux && cp $linux $out/disk/linux
    cp /usr/lib/ISOLINUX/isolinux.bin /usr/lib/syslinux/modules/bios/ldlinux.c32 $out/disk
    # Of Bochs 2.7: XSAVEC does not have the size that it says. The tests of Linux take long.
    cat >$out/disk/isolinux.cfg <<'TEXT'
default linux
label linux
kernel /linux
append initrd=/programs console=ttyS0 quiet noxsaves clearcpuid=xsavec cryptomgr.notests lpj=1000000 tsc=reliable
TEXT
    xorriso -as mkisofs -quiet -b isolinux.bin -c boot.cat -no-emul-boot -boot-load-size 4 -boot-info-table \
        -o $out/disk.iso $out/disk 2>&1 || return
    cat >$out/bochsrc <<TEXT
config_interface: textconfig
display_library: term
plugin_ctrl: biosdev=0, gameport=0, speaker=0, extfpuirq=0, parallel=0
sound: waveoutdrv=dummy, waveindrv=dummy, midioutdrv=dummy
romimage: file=/usr/share/bochs/BIOS-bochs-latest
vgaromimage: file=/usr/share/bochs/VGABIOS-lgpl-latest
cpu: model=corei7_skylake_x, ips=50000000
memory: guest=256, host=256
ata0-master: type=cdrom, path=$out/disk.iso, status=inserted
boot: cdrom
com1: enabled=1, mode=file, dev=$out/serial
clock: sync=none
log: $out/bochs.log
panic: action=fatal
TEXT
    printf 'continue\nquit\n' >$out/commands
    TERM=vt100 timeout $seconds bochs -q -f $out/bochsrc -rc $out/commands </dev/null >$out/screen 2>&1
    tr -d '\r' <$out/serial
}

if [ -n "$bochs" ]; then emulated; else direct; fi >$out/said 2>&1

while read -r name rest; do
    sed -n "/^begin $name\$/,/^end $name /p" $out/said >$out/lines
    case $name in
    all | only) sed '1d; $d' $out/lines | diff - tests/bits/golden.txt >$out/log ;;
    *) cp $out/lines $out/log ;;
    esac && grep -q "^end $name 0\$" $out/lines
    status=$?
    [ -s $out/lines ] || tail -n 20 $out/said >$out/log
    report $status "$name $rest${bochs:+, in Bochs}"
done <$out/runs
echo "1..$count"
[ $failed = 0 ]
