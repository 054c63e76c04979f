# What the shell scripts of the tests share: `. tests/tap.sh`. They print the Test Anything Protocol, as `prove` reads
# it. A script writes what its last command said to $out/log, and ends with `echo "1..$count"`.
count=0
failed=0
report() { # report STATUS DESCRIPTION: a failure is followed by what was said, without lines that are ok
    count=$((count + 1))
    if [ "$1" = 0 ]; then echo "ok $count - $2"; return; fi
    failed=$((failed + 1))
    echo "not ok $count - $2"
    cat ${said:-"$out/log"} | grep -v '^ok' | head -n 40 | sed 's/^/# /' >&2 # where prove shows it, too
}
skip() { # skip DESCRIPTION REASON: a test that this machine cannot run
    count=$((count + 1))
    echo "ok $count - $1 # SKIP $2"
}
missing() { skip "a part of this script" "$1"; } # missing REASON

cxx_warnings='-Wall -Wextra -Wpedantic -Wconversion -Wsign-conversion -Wshadow -Wdouble-promotion -Wundef -Wcast-qual'
cxx_warnings="$cxx_warnings -Werror"
warnings="$cxx_warnings -Wmissing-prototypes"

# The strict lists: all that gcc has and a header can promise, in C and in C++.
gcc_list='-Wall -Wextra -Wpedantic -Wconversion -Wsign-conversion -Wshadow -Wdouble-promotion -Wundef
    -Wcast-align=strict -Wcast-qual -Wfloat-equal -Wformat=2 -Wswitch-default -Wswitch-enum -Wlogical-op
    -Wduplicated-cond -Wduplicated-branches -Wnull-dereference -Wunused-macros -Wredundant-decls
    -Wmissing-declarations -Wvla -Werror'
gcc_c="$gcc_list -Wmissing-prototypes -Wstrict-prototypes -Wold-style-definition -Wc++-compat"
gcc_cpp="$gcc_list -Wold-style-cast -Wuseless-cast -Wzero-as-null-pointer-constant -Wextra-semi"
# All warnings of clang except: padding (the fields are in a readable order), raw pointers (this is C), and from C++11
# on incompatibility with C++98, which has no nullptr.
everything='-Weverything -Werror -Wno-padded -Wno-unknown-warning-option -Wno-unsafe-buffer-usage'

# Does a test change the implementation, so that it must contain it?
has_implementation() { grep -q 'define KAHAN_OPT_STATIC\|define KOPT_' "$1"; } # has_implementation SOURCE

# What is much like something else runs by turns: one of N, the next one with the next commit. `test --all`: all.
turn() { # turn N: is it this one's turn? A script asks for one after the other
    turns=$((${turns:--1} + 1))
    [ -n "${KOPT_ALL:-}" ] || [ $((turns % $1)) = $((commit % $1)) ]
}
# changed FILE...: did the last 50 commits change one? Then what runs by turns runs at once. Without a history: no.
changed() { git rev-parse -q --verify HEAD~50 >/dev/null 2>&1 && ! git diff --quiet HEAD~50 -- "$@"; }
case ${KOPT_TURN:-$(git rev-parse --is-shallow-repository 2>/dev/null)} in
false) commit=$(git rev-list --count --first-parent HEAD) ;;
[0-9]*) commit=$KOPT_TURN ;;
*) commit=$({ git rev-parse HEAD 2>/dev/null || cat kahan_opt.h; } | cksum | cut -d ' ' -f 1) ;;
esac
