# golden.sh COMMAND...: each prints the lines of tests/golden.txt; a probe built here does so with every instruction set
# of this machine and in any floating-point environment of its caller. Prints TAP.
out=build/tests/golden
mkdir -p $out
count=0
check() { # check COMMAND
    count=$((count + 1))
    if $1 >$out/lines 2>$out/errors && diff tests/golden.txt $out/lines >$out/differences; then
        echo "ok $count - $1"
    else
        echo "not ok $count - $1"
        sed -n 's/^> /# prints /p; s/^< /# golden /p' $out/differences | sort -k 3,3 -s | head -12
        sed 's/^/# /' $out/errors
    fi
}

for command in "$@"; do
    case $command in
    build/*)
        for isa in $($command isas); do check "$command $isa"; done
        for change in up down zero ftz; do
            $command $change >/dev/null 2>&1
            [ $? = 77 ] || check "$command $change"
        done
        ;;
    *) check "$command" ;;
    esac
done
echo "1..$count"
