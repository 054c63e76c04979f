# golden.sh COMMAND...: the command must print the lines of tests/bits/golden.txt. Prints TAP.
# golden.sh build/PROBE...: each probe must do so with every instruction set of this machine and in every floating-point
# environment of its caller.
out=build/tests/golden
mkdir -p $out
count=0
check() { # check COMMAND...
    count=$((count + 1))
    if "$@" >$out/lines 2>$out/errors && diff tests/bits/golden.txt $out/lines >$out/differences; then
        echo "ok $count - $*"
    else
        echo "not ok $count - $*"
        sed -n 's/^> /# prints /p; s/^< /# golden /p' $out/differences | sort -k 3,3 -s | head -12
        sed 's/^/# /' $out/errors
    fi
}

case $1 in
build/*)
    for probe; do
        for isa in $("$probe" isas); do check "$probe" "$isa"; done
        for change in up down zero ftz; do
            "$probe" $change >/dev/null 2>&1
            [ $? = 77 ] || check "$probe" $change
        done
    done
    ;;
*) check "$@" ;;
esac
echo "1..$count"
