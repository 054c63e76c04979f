# checkpoint.sh [PART...]: does docs/examples/checkpoint.c survive what its text says? Prints TAP. The parts:
#     crash      kill -9 at 200 instants; calls that fail, short writes, full disks, kill -9, power cuts at every call
#     damage     every bit of a file flipped, every length
#     files      as its first comment says; files that it must refuse
#     machines   a run that goes from machine to machine, one of them big-endian, one of 32 bits
#     broken     the example with mistakes put in: the other parts see each of them. Not one of those of ./build.sh test
#
# Only lists of words are unquoted: CC, flags and names of machines.
# shellcheck disable=SC2086
out=build/tests/checkpoint
mkdir -p $out
CC=${CC:-cc}
warnings='-std=c99 -Wall -Wextra -Wpedantic -Wconversion -Wsign-conversion -Wshadow -Wcast-qual -Werror'
quick='-O1 -DKAHAN_OPT_NO_SIMD -DPIECE=512 -ffp-contract=off' # PIECE: so that a save takes several writes
rooms= # memory is faster than a disk, and thousands of files are written
[ ! -w /dev/shm ] || rooms=/dev/shm
room=$(mktemp -d "${rooms:-$out}/checkpoint.XXXXXX") || exit 2
trap 'rm -rf "$room"' EXIT
trap 'exit 1' INT TERM HUP
. tests/tap.sh
skip() { # skip WHAT REASON
    count=$((count + 1))
    echo "ok $count - $1 # SKIP $2"
}
have() { command -v "$1" >/dev/null 2>&1; }

results() { # results COMMAND...: a program that prints TAP: its lines, numbered on
    "$@" >$out/tap 2>$out/log
    status=$?
    while IFS= read -r line; do
        case $line in
        ok\ * | not\ ok\ *)
            count=$((count + 1))
            echo "$line" | sed "s/ok [0-9]*/ok $count/"
            ;;
        1..*) ;;
        *) echo "$line" ;;
        esac
    done <$out/tap
    [ $status -le 1 ] && grep -q '^1\.\.' $out/tap && return
    report 1 "$1 ends with status $status"
}

# ---- the parts; each builds what it runs from the source in $example -------------------------------------------------

example=docs/examples/checkpoint.c
changed() { # changed SED-SCRIPT FILE: writes a changed copy of the example
    sed "s,../../kahan_opt.h,$PWD/kahan_opt.h,; $1" $example >"$2"
}

crash() {
    $CC $warnings $quick -o $out/example $example >$out/log 2>&1 &&
        $CC $warnings -O1 -o $out/crash tests/examples/checkpoint_crash.c >>$out/log 2>&1
    report $? "the example compiles, and the program that kills it"
    if $CC $warnings -O1 -fPIC -shared -o $out/faults.so tests/examples/checkpoint_faults.c -ldl >$out/log 2>&1; then
        results $out/crash $out/example "$PWD/$out/faults.so" "$room/crash"
    else
        skip "kill -9, failing calls and power cuts" "no LD_PRELOAD: $(head -n 1 $out/log)"
    fi
}

damage() {
    sed "s,../../docs/examples/checkpoint.c,$PWD/$example," tests/examples/checkpoint_damage.c >$out/damage.c
    $CC $warnings $quick -Itests/unit -o $out/damage $out/damage.c >$out/log 2>&1
    report $? "the program that damages files compiles"
    results $out/damage "$room/damage"
}

refuses() { # refuses WORDS PROGRAM ARGUMENT...: ends with status 1 and says so, and the file $room/run is as it was
    said=$1
    shift
    cp "$room/run" $out/before
    "$@" >$out/log 2>&1
    [ $? = 1 ] && grep -q "$said" $out/log && cmp -s "$room/run" $out/before && [ ! -e "$room/run.temporary" ]
}

files() {
    $CC $warnings -O2 -DKAHAN_OPT_NO_SIMD -ffp-contract=off -o $out/shown $example >$out/log 2>&1
    report $? "the example compiles as its first comment says, without SIMD to save time"
    for batches in 400 1000; do $out/shown "$room/run" $batches 300; done >$out/log 2>&1
    [ "$(sed 's/, step.*//; s,'"$room"'/,,' $out/log)" = "saved: batch 300
saved: batch 400
batch 400
resumed: run, batch 400
saved: batch 600
saved: batch 900
saved: batch 1000
batch 1000" ]
    report $? "it saves, and resumes with more batches"
    sed "s,$room/,,; s/^/# /" $out/log
    (cd "$room" && "$OLDPWD/$out/shown") >$out/log 2>&1 && [ -s "$room/run.checkpoint" ] &&
        [ "$(sed -n 's/^batch.*loss \(0\.000\)[0-9]*,.*/\1/p' $out/log)" = 0.000 ]
    report $? "without arguments: it learns, and the loss ends below 0.001"

    for change in 's/HIDDEN = 16/HIDDEN = 12/:model.*to another optimizer, tensor:of a net of another size' \
        's/kopt_adamw(/kopt_lion(/:model.*to another optimizer:of another optimizer' \
        's/"my net 1"/"my net 2"/:program$:of another program'; do
        changed "${change%%:*}" $out/other.c
        words=${change#*:}
        $CC $warnings $quick -o $out/other $out/other.c >$out/log 2>&1 &&
            $out/other "$room/other" 20 10 >$out/log 2>&1 &&
            cp "$room/other" "$room/run" && # in front of a file that would be good
            refuses "of another ${words%:*}" $out/shown "$room/run" 2000 300
        report $? "a file ${words#*:} is refused and stays as it is"
        sed "s,$room/,,g; s/^/# /" $out/log
        rm -f "$room"/other*
    done
    rm -f "$room"/run*
    cp README.md "$room/run"
    refuses 'is damaged' $out/shown "$room/run" 600 300
    report $? "a file that is no checkpoint is not overwritten"
    rm "$room/run"
    $out/shown "$room/missing/run" 600 300 >$out/log 2>&1
    [ $? = 1 ] && grep -q 'nothing can be saved there: No such file' $out/log
    report $? "a folder that is missing is noticed before the training"
}

# on NAME BATCHES: trains on the machine NAME up to so many batches, with the file $room/run; its last line in $out/line
on() {
    run=
    case $1 in
    x86) ;;
    arm) run='qemu-arm' ;;
    *) run=qemu-$1 ;;
    esac
    $run $out/on_"$1" "$room/run" "$2" 7 >$out/log 2>&1 || return
    tail -n 1 $out/log >$out/line
}

machines() {
    $CC $warnings $quick -o $out/on_x86 $example >$out/log 2>&1 && on x86 200
    report $? "a run of 200 batches on this machine"
    cp $out/line $out/expected
    cp "$room/run" $out/whole
    sed 's/^/# /' $out/line
    rm -f "$room"/run*
    on x86 30
    done=30
    for machine in s390x:s390x-linux-gnu aarch64:aarch64-linux-gnu arm:arm-linux-gnueabihf x86; do
        name=${machine%%:*} compiler=${machine#*:}-gcc
        if [ $name != x86 ] && ! { have $compiler && have qemu-$name; }; then
            skip "on $name" "no $compiler or qemu-$name"
            continue
        fi
        from=$done
        done=$((done + 42))
        [ $name != x86 ] || done=200
        { [ $name = x86 ] || $compiler $warnings $quick -static -o $out/on_$name $example >$out/log 2>&1; } &&
            on $name $done && grep -q "^resumed: .*, batch $from\$" $out/log
        report $? "on $name from batch $from to $done"
        sed 's/^/# /' $out/line
    done
    cmp $out/line $out/expected >$out/log && cmp "$room/run" $out/whole >>$out/log
    report $? "after all machines: the loss, the hash and the file are those of the run on one machine"
    rm -f "$room"/run*
}

# ---- mistakes: a part, its description, and a sed script that makes it -----------------------------------------------

mistake() { # mistake PART DESCRIPTION SED-SCRIPT
    changed '' $out/whole.c
    changed "$3" $out/broken.c
    if cmp -s $out/whole.c $out/broken.c; then
        echo "no such place" >$out/log
        report 1 "$2"
        return
    fi
    example=$out/broken.c
    now=$count
    rm -rf "${room:?}"/*
    $1 >$out/seen 2>&1
    count=$now
    cp $out/seen $out/log
    ! grep -q 'not ok.*compile' $out/seen && grep -q '^not ok' $out/seen
    report $? "$1 sees: $2"
    grep -A 1 '^not ok' $out/seen | head -n 2 | sed 's/^/# /'
    example=docs/examples/checkpoint.c
}

broken() {
    mistake crash 'no fsync of the file' 's/ && sync_file(fd) == 0;/;/'
    mistake crash 'the fsync of the file comes after the rename' \
        's/ && sync_file(fd) == 0;/;/; s/if (good) return sync_folder(path);/if (good) {\
        fd = open_file(path, O_RDONLY), sync_file(fd), close(fd);\
        return sync_folder(path);\
    }/'
    mistake crash 'no fsync of the folder' 's/return sync_folder(path);/return (void)sync_folder, 0;/'
    mistake crash 'the file is written in its place' \
        's/strcpy(temporary, path), ".temporary"/strcpy(temporary, path), ""/'
    mistake crash 'the previous file is copied to its name by deleting it first' \
        's/rename(path, previous) != 0 \&\& errno != ENOENT/unlink(path) != 0 \&\& errno != ENOENT/'
    mistake crash 'a short write counts as a whole one' 's/p += n, size -= (size_t)n; .*/size = 0;/'
    mistake crash 'a signal ends a write' '0,/if (n < 0 && errno == EINTR) continue;.*/s///'
    mistake crash 'a signal ends a read' 's/if (n < 0 && errno == EINTR) continue;$//'
    mistake crash 'a signal ends open' 's/while (fd < 0 && errno == EINTR);/while (0);/'
    mistake crash 'a signal ends fsync' 's/while (result < 0 && errno == EINTR);/while (0);/'
    mistake crash 'a signal ends close' 's/if (close(fd) != 0 && errno != EINTR && good)/if (close(fd) != 0 \&\& good)/'
    mistake crash 'an error of close is ignored' 's/if (close(fd) != 0 .* = errno;/close(fd);/'
    mistake crash 'a temporary file stays on a full disk' 's/^    unlink(temporary);.*//'
    mistake crash 'a rename that fails is not taken back' 's/if (keep) rename(previous, path);.*//'
    mistake crash 'the scale of the loss is forgotten' \
        's/kopt_scaler \*c = &r->scaler;/kopt_scaler none = r->scaler, *c = \&none;/'
    mistake crash 'the position in the data is forgotten' \
        's/move(s, &r->batches, 8, 1)/move(s, \&(uint64_t){r->batches}, 8, 1)/'
    mistake crash 'the sums of gradients are forgotten' \
        's/move(s, a->sum, 2, a->n) != 0/move(s, (kopt_bf16[MOST]){0}, 2, a->n) != 0/'
    mistake crash 'their residuals are forgotten' \
        's/move(s, a->residual, 2, a->n)/move(s, (kopt_bf16[MOST]){0}, 2, a->n)/'
    mistake crash 'the number of their batches is forgotten' \
        's/move(s, &a->count, 4, 1)/move(s, \&(uint32_t){0}, 4, 1)/'
    mistake crash 'the count of their random bits is forgotten' \
        's/move(s, &a->step, 4, 1)/move(s, \&(uint32_t){0}, 4, 1)/'
    mistake crash 'it never resumes' \
        's/newest = load(r, path), older/newest = access(path, F_OK) ? load(r, path) : ABSENT, older/
         s/: load(r, previous)/: ABSENT/'
    mistake crash 'no lock' 's/lockf(fd, F_TLOCK, 0) != 0/0/'
    mistake damage 'no check of the checksum' 's/return stored == crc;/return 1;/'
    mistake damage 'a damaged file becomes the previous one' 's/\*keep = newest != DAMAGED;/*keep = 1;/'
    mistake damage 'a damaged file and no other: it starts afresh' \
        's/newest == ABSENT && older == ABSENT/older != LOADED/'
    mistake damage 'fields that contradict each other are taken' 's/!is_possible(r) || //'
    mistake damage 'what was loaded is not compared with the file' 's/ || crc != s.crc//'
    mistake files 'the size of the net is not compared' 's/if (n != a->n) return KOPT_ERROR_MISMATCH;//'
    mistake files 'a file of another program is taken' 's/memcmp(magic, MAGIC, 8) != 0/0/'
    mistake files 'a file of another model counts as damaged' 's/return damaged ? DAMAGED : STOP;/return DAMAGED;/'
    mistake machines 'the order of bytes is that of the machine' 's/== 1 ? 0 : size - 1;/== 1 ? 0 : 0;/'
}

for part in "${@:-all}"; do
    case $part in
    all) crash; damage; files; machines ;;
    crash | damage | files | machines | broken) $part ;;
    *) echo "checkpoint.sh: there is no part $part" >&2; exit 2 ;;
    esac
done
echo "1..$count"
