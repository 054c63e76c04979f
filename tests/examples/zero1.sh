# docs/examples/zero1.c: the same checkpoint, bit for bit, from 1 to 4 ranks of MPI, without mpirun, from one process
# with whole tensors (zero1_whole.c), and after ranks were killed at any place; damaged files are refused in
# words. And docs/distributed.md has the tables that docs/distributed.py prints. Prints TAP.
#
# Only lists of words are unquoted: flags, options, arguments.
# shellcheck disable=SC2086
out=build/tests/zero1
rm -rf $out
mkdir -p $out
warnings='-std=c99 -Wall -Wextra -Wpedantic -Wconversion -Wsign-conversion -Wshadow -Wundef -Wcast-qual'
warnings="$warnings -Wmissing-prototypes -Werror"
. tests/tap.sh

# Open MPI: run as root in a container, more ranks than cores, without other machines.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
export OMPI_MCA_mpi_yield_when_idle=1 OMPI_MCA_plm=isolated OMPI_MCA_btl=self,vader
export OMPI_MCA_btl_vader_single_copy_mechanism=none OMPI_MCA_hwloc_base_binding_policy=none
export OMPI_MCA_pml=ob1 OMPI_MCA_osc=^ucx # do not look for fast networks
export PMIX_MCA_gds=hash                  # the start of ranks without a store in shared memory, which may fail
TMPDIR=$(mktemp -d) # a short path: Open MPI keeps its sockets there
export TMPDIR
trap 'rm -rf "$TMPDIR"' EXIT

# The implementation once, for both programs; its scalar code, which compiles soonest.
printf '#define KAHAN_OPT_IMPLEMENTATION\n#include "kahan_opt.h"\n' >$out/kahan_opt.c
${CC:-cc} -std=c99 -O2 -DKAHAN_OPT_NO_SIMD -I. -c -o $out/kahan_opt.o $out/kahan_opt.c &&
    OMPI_CC=${CC:-cc} mpicc $warnings -O2 -DKOPT_IMPLEMENTED_ -o $out/zero1 docs/examples/zero1.c $out/kahan_opt.o \
        >$out/log 2>&1
report $? "zero1.c compiles without a warning"
${CC:-cc} $warnings -O2 -DKOPT_IMPLEMENTED_ -o $out/whole tests/examples/zero1_whole.c $out/kahan_opt.o >$out/log 2>&1
report $? "its reference compiles, without MPI"
OMPI_CC=${CC:-cc} mpicc -std=c99 -Wall -Wextra -Werror -shared -fPIC -o $out/kill.so tests/examples/zero1_kill.c -ldl \
    >$out/log 2>&1
report $? "the library that kills ranks compiles"

mpi() { timeout 60 mpirun -n "$n" $out/zero1 "$@" 2>$out/words; } # the minute ends a deadlock
ranks() { # ranks N ARGUMENT...: zero1 on N ranks; 0: without mpirun
    n=$1
    shift
    if [ "$n" = 0 ]; then
        timeout 60 $out/zero1 "$@"
        return
    fi
    mpi "$@"
    status=$?
    if [ $status != 0 ] && ! grep -q '^zero1: \|^usage' $out/words; then # mpirun failed, not zero1: once more
        sed "s/^/# mpirun, status $status: /" $out/words >>$out/failures
        mpi "$@"
        status=$?
    fi
    cat $out/words >&2
    return $status
}

# ---- the same bits on any number of ranks ----------------------------------------------------------------------------

batches=22
same() { # same WHOLE ARGUMENT...: WHOLE are the arguments of zero1_whole
    whole=$1
    shift
    wrong=
    : >$out/log
    for n in 0 1 2 3 4; do
        if [ $n = 1 ] && [ $# != 0 ]; then continue; fi
        rm -f $out/state.$n $out/state.$n.previous
        ranks $n --steps $batches --checkpoint $out/state.$n --every 1000 "$@" >$out/said.$n 2>>$out/log ||
            wrong="$wrong $n"
        cmp $out/state.0 $out/state.$n >>$out/log 2>&1 || wrong="$wrong $n"
    done
    [ -z "$wrong" ]
    report $? "the same checkpoint without mpirun and on 2, 3 and 4 ranks: ${*:-bf16}${wrong:+; wrong:$wrong}"
    $out/whole $batches $whole $out/state.3 >$out/whole.said 2>$out/log &&
        grep -q -x -F -e "$(head -n 1 $out/whole.said)" $out/said.3
    report $? "it holds the weights, residuals and moments of one process with whole tensors: ${*:-bf16}"
}
measured() { # measured STATE CODE: the last runs counted the bytes that docs/distributed.py computes
    for n in 2 3 4; do
        python3 docs/distributed.py $n "$1" "$2" 12
        sed -n 's/.*weights and gradients \(.*\), share \(.*\), resid.*received in a step /\1 \2 /p' $out/said.$n
    done >$out/log 2>&1
    # structs, headers, and the ends of arrays are 3 to 7 % of so small a model
    awk 'NR % 2 { whole = $1; share = $2; received = $3; next }
        { good += $1 == whole && $2 > share && $2 < 1.07 * share && $3 > 0.995 * received && $3 < 1.005 * received }
        END { exit !(NR == 6 && good == 3) }' $out/log
    report $? "memory and bytes on the wire are those of docs/distributed.py: $1, $2"
}
same 'bf16 0 none'
have_python=
if python3 -c '' 2>/dev/null; then
    have_python=1
    python3 docs/distributed.py >$out/tables 2>$out/log
    sed -n '/^<!-- docs.distributed.py -->$/,/^<!-- end -->$/p' docs/distributed.md | sed '1,2d;$d' | sed '$d' |
        diff - $out/tables >$out/log
    report $? "docs/distributed.md has the tables that docs/distributed.py prints"
    measured 'KAHAN`' bf16
else
    skip "the tables of docs/distributed.md" "no python3"
fi
same 'fp16 0 none' --fp16
! grep -q ' 0 skipped' $out/said.3
report $? "with --fp16 some steps overflow and are skipped, on all ranks"
same 'bf16 1 none' --small
[ -z $have_python ] || measured '8-bit moments' bf16
same 'bf16 0 sign' --compress sign
[ -z $have_python ] || measured 'KAHAN`' sign
same 'fp16 0 bf16' --fp16 --compress bf16
same 'fp16 1 q8' --fp16 --small --compress q8

# ---- ranks die, disks are full ---------------------------------------------------------------------------------------

cp $out/state.0 $out/wanted # of these last options
options='--fp16 --small --compress q8 --every 8'
saves() { # saves N PLAN: runs on N ranks by PLAN, which may be empty
    rm -f $out/state*
    ZERO1_KILL=$2 timeout 60 mpirun -x LD_PRELOAD="$PWD/$out/kill.so" -n "$1" $out/zero1 --steps $batches $options \
        --checkpoint $out/state >$out/log 2>&1
}
goes_on() { # goes_on M: on M ranks to the end, and to the bits of the run that was never killed
    ranks "$1" --steps $batches $options --checkpoint $out/state >$out/said 2>>$out/log &&
        cmp $out/state $out/wanted >>$out/log 2>&1
}
killed() { # killed N PLAN M BATCH: dies by PLAN on N ranks; M go on after BATCH, or begin anew (new)
    call=${2#* } who="rank ${2%% *}"
    [ "$who" != 'rank -1' ] || who='every rank'
    saves "$1" "$2"
    status=$?
    [ $status != 0 ] && [ $status != 124 ] && goes_on "$3" &&
        if [ "$4" = new ]; then ! grep -q 'goes on' $out/said; else grep -q "goes on after batch $4\$" $out/said; fi
    report $? "$who of $1 dies at ${call% kill}; $3 ranks go on after batch $4 and end with the same bits"
}
killed 4 '2 MPI_Ialltoallv 100 kill' 3 8
killed 2 '1 MPI_Iallgatherv 40 kill' 4 8
killed 3 '0 MPI_Iallgatherv 5 kill' 1 0
killed 4 '-1 MPI_Ialltoallv 160 kill' 2 16
killed 2 '1 pwrite 3 kill' 3 new
killed 4 '3 pwrite 80 kill' 2 0
killed 2 '0 link 2 kill' 3 0
killed 3 '0 rename 3 kill' 0 8
killed 1 '0 fsync 6 kill' 4 8

saves 2 '1 pwrite 200 full'
[ $? = 1 ] && grep -q 'rank 1 of 2: cannot write .*: No space left on device' $out/log && goes_on 3
report $? "a full disk ends all ranks with a sentence; the checkpoint before it goes on"
saves 2 '0 fsync 4 full'
[ $? = 1 ] && grep -q 'rank 0 of 2: cannot write .*: No space left on device' $out/log && goes_on 1
report $? "so does a failing fsync"
saves 3 '1 pwrite 1 short' && cmp $out/state $out/wanted >>$out/log
report $? "writes that are cut short are continued"

# ---- damaged and other files ----------------------------------------------------------------------------------------

refused() { # refused N TEXT WHAT ARGUMENT...: N ranks refuse $out/state with this text, and leave it as it is
    n=$1 text=$2 what=$3
    shift 3
    cp $out/state $out/before
    ranks "$n" --steps $((batches + 1)) --checkpoint $out/state "$@" >$out/log 2>&1
    [ $? = 1 ] && grep -q -e "$text" $out/log && cmp $out/state $out/before >>$out/log 2>&1
    report $? "refused: $what"
}
flip() { # flip PLACE: the lowest bit of this byte of the file
    cp $out/wanted $out/state
    byte=$(od -An -tu1 -j "$1" -N 1 $out/state)
    byte=$((byte ^ 1))
    # shellcheck disable=SC2059 # the byte in octal
    printf "\\$(printf %03o $byte)" | dd of=$out/state bs=1 seek="$1" conv=notrunc 2>/dev/null
}
set -- --fp16 --small --compress q8
size=$(wc -c <$out/wanted)
image=$(sed -n 's/^image //p' $out/whole.said)
flip 70
refused 3 'header is damaged' 'a bit of the header' "$@"
for place in 512 $((512 + 9 * image + image / 2)) $((size - 1)); do
    flip $place
    refused 0 'image at byte [0-9]*, tensor [0-9]* from element [0-9]*: ' "a bit of an image, byte $place of $size" "$@"
done
cp $out/wanted $out/state
dd if=$out/wanted bs=1 count=$((size - 1)) of=$out/state 2>/dev/null
refused 0 'cannot read .*: it ends too early' 'a file that lacks its last byte' "$@"
saves 2 ''
dd if=$out/state.previous of=$out/state bs=1 skip=512 seek=512 count="$image" conv=notrunc 2>/dev/null
refused 3 'image at byte 512 is of step .*another checkpoint' 'a chunk of the checkpoint before' "$@"
cp $out/wanted $out/state
refused 2 'was made with other options:' 'the checkpoint of another format' --compress q8
cp docs/examples/zero1.c $out/state
refused 0 'is not a checkpoint' 'a file of another kind' "$@"
./build.sh examples inspect $out/wanted >$out/log && grep -q 'id 0, 512 weights in fp16 from element 1536 on, ' $out/log
report $? "inspect.c says which chunk of which tensor each image is"
cp $out/wanted $out/state
mv $out/state $out/state.previous
cp $out/state.previous $out/before
ranks 2 --checkpoint $out/state "$@" >$out/log 2>&1
[ $? = 1 ] && grep -q 'state is missing, but .*state.previous is there' $out/log &&
    cmp $out/state.previous $out/before >>$out/log 2>&1 && [ ! -e $out/state ]
report $? "refused at the start: a file that was removed, beside the one before, which stays"
ranks 2 --checkpoint $out/before/state >$out/log 2>&1
[ $? = 1 ] && grep -q 'cannot read .*/before/state: Not a directory' $out/log
report $? "refused at the start: a file that cannot be looked for"
ranks 2 --checkpoint $out/none/state >$out/log 2>&1
[ $? = 1 ] && grep -q 'cannot open .*/none/state.new: No such file .* (all ranks need the same folder)' $out/log
report $? "refused at the start: a folder that does not exist"
sed 's/INT_MAX/1000/g' docs/examples/zero1.c >$out/short.c # as signs every tensor takes less
OMPI_CC=${CC:-cc} mpicc -O2 -DKOPT_IMPLEMENTED_ -Idocs/examples -o $out/short $out/short.c $out/kahan_opt.o \
    >$out/log 2>&1 &&
    timeout 60 $out/short --steps 1 --compress sign >$out/log 2>&1
[ $? = 1 ] && grep -q 'tensor 0 is too large' $out/log
report $? "refused at the start: a tensor with more elements than an int can count"
RANKS=2 ./build.sh examples zero1 --steps 2 >$out/log 2>&1
report $? "./build.sh examples zero1 runs it"
for arguments in '--steps 0' '--compress q4' 'state'; do
    ranks 0 $arguments >$out/log 2>&1
    [ $? = 2 ] && grep -q '^usage' $out/log
    report $? "refused: zero1 $arguments"
done
[ ! -s $out/failures ] || head -n 20 $out/failures # tried once more
echo "1..$count"
