# The Test Anything Protocol for the shell scripts, as `prove` reads it: `. tests/tap.sh`. A script writes what its last
# command said to $out/log, and ends with `echo "1..$count"`.
count=0
failed=0
report() { # report STATUS DESCRIPTION: a failure is followed by what was said, without lines that are ok
    count=$((count + 1))
    if [ "$1" = 0 ]; then echo "ok $count - $2"; return; fi
    failed=$((failed + 1))
    echo "not ok $count - $2"
    grep -v '^ok' "$out/log" | head -n 40 | sed 's/^/# /'
}
skip() { # skip DESCRIPTION REASON: a test that this machine cannot run
    count=$((count + 1))
    echo "ok $count - $1 # SKIP $2"
}
missing() { skip "a part of this script" "$1"; } # missing REASON
