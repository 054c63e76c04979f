# docs/examples/lockstep.c: two clients are equal in every frame, on any instruction set, machine and number of threads,
# and equal to one process without network; a difference is seen; what is cut off is an error. Prints TAP. Prints no
# times: docs/places.md has them.
#
# Only lists of words are unquoted: flags, words of a client.
# shellcheck disable=SC2086
out=build/tests/lockstep
rm -rf $out
mkdir -p $out
flags='-O2 -ffp-contract=off -pthread'
. tests/tap.sh

${CC:-cc} -std=c99 $warnings $flags -o $out/lockstep docs/examples/lockstep.c >$out/log 2>&1
report $? "lockstep.c compiles without a warning"
$out/lockstep alone 400 >$out/alone 2>$out/log
report $? "one process without network has a hash"
hash=$(cat $out/alone)

timeout 60 $out/lockstep 400 0 >$out/said 2>$out/log && grep -q '^PASS' $out/said &&
    [ "$(grep -c "hash $hash\$" $out/log)" = 2 ]
report $? "two clients with 4 threads and 1 end with its hash"
grep -q '^client 0: .*, 4 threads: \(39[0-9]\|400\) frames equal, .* rollbacks of up to 8 frames' $out/log &&
    grep -q '^client 1: .*, 1 thread: 39[0-9] frames equal, ' $out/log
report $? "every frame was compared, but for those around the loss; inputs came up to 8 frames late"
grep -q '^client 1: lost its memory in frame 200, goes on from the snapshot of frame 192' $out/log
report $? "one lost its memory in the middle, and went on from the other one's snapshot"
sed -n 's/.* frames: \([0-9]*\) at first, \([0-9]*\) at last; .*/\1 \2/p' $out/log |
    awk '$1 + 20 < $2 { good++ } END { exit good != 2 }'
report $? "the agent learns: its last forecasts are better than its first ones"

pair() { # pair "PROGRAM client 0 ..." "PROGRAM client 1 ...": two clients, connected by pipes; both must succeed
    rm -f $out/to0 $out/to1
    mkfifo $out/to0 $out/to1
    { timeout 100 $1 <$out/to0 >$out/to1 2>$out/log0; echo $? >$out/status0; } &
    timeout 100 $2 >$out/to0 <$out/to1 2>$out/log1 # in this order: opening a pipe waits for its other end
    status=$?
    wait
    cat $out/log0 $out/log1 >$out/log
    [ $status = 0 ] && [ "$(cat $out/status0)" = 0 ]
}
same() { # same DESCRIPTION CLIENT0 CLIENT1
    pair "$2 400 0" "$3 400 0" && [ "$(grep -c "hash $hash\$" $out/log)" = 2 ]
    report $? "$1"
}
for threads in 1 3 16; do
    same "1 thread of plain C, and $threads of the best instruction set" "$out/lockstep client 0 1 scalar" \
        "$out/lockstep client 1 $threads best"
done
for machine in aarch64:aarch64-linux-gnu:NEON arm:arm-linux-gnueabihf:'32 bits' s390x:s390x-linux-gnu:big-endian; do
    turn 3 || continue
    emulator=qemu-${machine%%:*} what=${machine##*:} compiler=${machine#*:}
    compiler=${compiler%:*}-gcc
    if command -v $compiler >/dev/null && command -v $emulator >/dev/null; then
        $compiler $flags -static -o $out/lockstep.$emulator docs/examples/lockstep.c >$out/log 2>&1
        same "this machine and ${machine%%:*} ($what)" "$out/lockstep client 0 4 best" \
            "$emulator $out/lockstep.$emulator client 1 2 best"
    else
        missing "no $compiler or $emulator"
    fi
done

# ---- mistakes that the clients must see: each is a change of one client's program ------------------------------------

differs() { # differs DESCRIPTION SED: client 1 with a mistake; a client says which frame differs
    turn 3 || return 0
    sed "$2" docs/examples/lockstep.c | sed "s,../../kahan_opt.h,$PWD/kahan_opt.h," >$out/broken.c
    ! cmp -s $out/broken.c docs/examples/lockstep.c &&
        ${CC:-cc} -w -DKAHAN_OPT_NO_SIMD $flags -o $out/broken $out/broken.c 2>$out/log &&
        ! pair "$out/lockstep client 0 1 best 200 0" "$out/broken client 1 3 best 200 0" &&
        grep -q 'frame [0-9]* DIFFERS' $out/log
    report $? "a difference is seen: $1"
}
differs "a piece of the norm is lost" 's/    result = t->stepping ?/    result = k == 5 ? KOPT_OK : t->stepping ?/'
differs "a slice ends one element too early" \
    's|t->end = SIZE \* (k + 1) / count;|t->end = SIZE * (k + 1) / count - (k == 3);|'
differs "wrong guesses stay" 's/^    if (f >= known) return;/    return;/'
differs "back to a frame too late" 's/me.w = me.past\[f % RING\];/me.w = me.past[(f + (f + 1 < now)) % RING];/'
differs "a skipped step leaves its gradient" \
    's/if (w->skipped) memset.*//; s/kopt_scaler_of();/&w->scaler.scale = 3e38f;/'
differs "the agent acts with a step that is not complete" \
    '/if (!w->skipped) slice/s/$/ kopt_convert(w->acting, KOPT_F32, w->weight, KOPT_FP16, SIZE);/'
differs "a snapshot without the loss scale" \
    's/memcpy(&w->scaler.scale, &bits.*/(void)bits;/; s/^    w->scaler.interval = 20;/&w->scaler.scale = 1024;/'

# ---- what is cut off -------------------------------------------------------------------------------------------------

for size in 0 5 1000; do
    head -c $size /dev/zero | timeout 20 $out/lockstep client 1 1 best 400 0 >/dev/null 2>$out/log
    [ $? = 1 ] && grep -q 'the other client is gone\|out of order' $out/log
    report $? "a network that ends after $size bytes is an error"
done
hears() { # hears WHAT BYTES DESCRIPTION: a client that receives BYTES ends with the message WHAT
    printf %b "$2" | timeout 20 $out/lockstep client 1 1 best 400 0 >/dev/null 2>$out/log
    [ $? = 1 ] && grep -q "$1" $out/log
    report $? "a message of frame 0 with $3: $1"
}
hears 'the other client is gone' '\0\0\0\0\0\0\0\0\01\0\0\0' "a hash, which is of no frame"
hears 'a move does not exist' '\0\0\0\0\04\0\0\0\0\0\0\0' "a fifth move"
refused() { # refused WHAT ARGUMENT...: it says WHAT, and does nothing
    what=$1
    shift
    ! timeout 20 $out/lockstep "$@" </dev/null >$out/said 2>$out/log && grep -q "$what" $out/log && [ ! -s $out/said ]
    report $? "refused: lockstep $*"
}
for frames in 5 100001 600x --help ''; do refused 'FRAMES is 16 to 100000' "$frames"; done
for hz in 0.5 -1 nan fast; do refused 'HZ is 0, or 1 to 1000' 16 $hz; done
refused 'ID is 0 or 1' client 2 1 best 16 0
refused 'THREADS is 1 to 16' client 0 17 best 16 0
refused 'ISA is an instruction set, or best' client 0 1 sse5 16 0
refused usage 16 0 0
echo "1..$count"
