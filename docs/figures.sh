#!/bin/sh
# docs/figures.sh [bench | bytes | firmware | stack | fidelity | finetuning [bandit | policy] | scale | tasks [draw]]:
# figures of README.md and of docs, from the programs that measure them.
# A table stands between the lines `<!-- figures: NAME -->` and `<!-- end -->`; what is around it is written by hand.
# `bench`: times instead, on an idle machine. The text beside those names the machine and counts what is over a limit:
# change it, too. `bytes`, `fidelity`, `scale`, `tasks`: docs/evidence.md. `finetuning`: docs/fine-tuning.md.
set -eu
cd "$(dirname "$0")/.."
out=build/figures
mkdir -p $out

fail() {
    echo "figures: $1" >&2
    exit 1
}

fill() { # fill FILE NAME: its block becomes the lines of stdin
    cat >$out/block
    [ -s $out/block ] || fail "nothing for the block \`$2\` of $1"
    awk -v name="<!-- figures: $2 -->" -v block=$out/block '
        $0 == name {
            print $0 "\n"
            while ((getline line <block) > 0) { # without empty lines at its end
                if (line == "") { empty = empty "\n"; continue }
                print empty line
                empty = ""
            }
            print ""
            found++
            inside = 1
        }
        inside && $0 == "<!-- end -->" { inside = 0 }
        !inside
        END { exit found != 1 || inside }' "$1" >$out/file || fail "$1 has no block \`$2\`, or no end of it"
    cat $out/file >"$1"
    echo "figures: $1, $2"
}

copy() { # copy FROM TO
    cp "$1" "$2"
    echo "figures: $2"
}

demo_table() { # the demo's table and verdict: two decimals, and no seconds
    awk '
        function rounded(x) {
            x = sprintf(x ~ /^[+-]/ ? "%+.2f" : "%.2f", x)
            return x ~ /^[+-]0\.00$/ ? "0.00" : x
        }
        function round_all(line, aligned,    done, x) {
            while (match(line, /[+-]?[0-9]+\.[0-9][0-9][0-9][0-9]/)) {
                x = rounded(substr(line, RSTART, RLENGTH))
                while (aligned && length(x) < RLENGTH) x = " " x
                done = done substr(line, 1, RSTART - 1) x
                line = substr(line, RSTART + RLENGTH)
            }
            return done line
        }
        /^arm / { table = 1 }
        !NF { table = 0 }
        table { sub(/ +[^ ]+$/, ""); print "    " round_all($0, 1) }
        /^PASS/ { print ""; print "    " round_all($0, 0) }' "$1"
}

case "${1:-}" in
'')
    ./build.sh demo >$out/demo || { tail -n 1 $out/demo >&2 && fail "the demo fails"; }
    demo_table $out/demo | fill README.md demo
    losses=$(demo_table $out/demo | awk '$1 == "fp32" { fp32 = $3 } $1 == "kahan" { print $3 " " fp32 }')
    sed "s/\*\*[0-9.]* beside fp32's [0-9.]*/**${losses% *} beside fp32's ${losses#* }/" README.md >$out/file
    cat $out/file >README.md
    copy build/demo/loss.svg docs/loss.svg
    copy build/demo/arrived.svg docs/arrived.svg
    ./build.sh bench theorem1 >$out/theorem1
    copy build/bench/theorem1.svg docs/theorem1.svg
    ;;
bench)
    ./build.sh bench cliffs --markdown >$out/cliffs
    sed -n '/^AdamW on .*, in cache/,$p' $out/cliffs | sed '/, DRAM:/,$d' |
        awk '/^Every rule/ { exit } { print }' | fill docs/benchmarks.md 'cliffs in cache'
    if [ -d build/peers/torch ]; then
        ./build.sh bench torch >$out/torch && fill docs/pytorch.md torch <$out/torch
    else # Debian's is years old
        echo "figures: docs/pytorch.md stays: ./build.sh bench --peers installs the PyTorch that it compares with" >&2
    fi
    ./build.sh bench --sizes >$out/sizes
    copy build/bench/cost.svg docs/cost.svg
    ;;
bytes)
    ./build.sh bench bytes >$out/bytes || fail "bench bytes fails"
    fill docs/evidence.md bytes <$out/bytes
    copy build/bench/bytes.svg docs/bytes.svg
    ;;
firmware) # with the compilers of Debian 12: other versions make other sizes
    sh tests/examples/firmware.sh table >$out/firmware
    fill docs/firmware.md firmware <$out/firmware
    ;;
stack) # with Debian's compilers, and AVX-512
    sh tests/robust/stack.sh table >$out/stack
    fill docs/vendoring.md stack <$out/stack
    ;;
fidelity) # draw: from the last run
    shift
    ./build.sh bench fidelity "$@" >$out/fidelity || { cat $out/fidelity >&2 && fail "bench fidelity fails"; }
    ! grep '^SKIPPED' $out/fidelity || fail "the figures of docs/evidence.md are with all packages"
    for name in loss stall moment versions; do
        fill docs/evidence.md "fidelity $name" <build/bench/fidelity_$name.md
    done
    for name in loss stall decay moment bytes; do
        copy build/bench/fidelity_$name.svg docs/fidelity_$name.svg
    done
    ;;
finetuning) # bandit, policy: this alone; draw: from the last run
    shift
    ./build.sh bench finetuning "$@" >$out/finetuning || { cat $out/finetuning >&2 && fail "bench finetuning fails"; }
    names='finetuning finetuning_bandit finetuning_policy'
    case " $* " in *' bandit '*) names=finetuning_bandit ;; *' policy '*) names=finetuning_policy ;; esac
    for name in $names; do
        fill docs/fine-tuning.md "$(echo $name | tr _ ' ')" <build/bench/$name.md
        [ $name = finetuning_bandit ] || copy build/bench/$name.svg docs/$name.svg
    done
    ;;
scale) # goes on with the last run; draw: from it as it is
    shift
    ./build.sh bench scale "$@" >$out/scale || { cat $out/scale >&2 && fail "bench scale fails"; }
    fill docs/evidence.md scale <build/bench/scale.md
    ;;
tasks) # draw: from the last run
    shift
    ./build.sh bench tasks "$@" >$out/tasks || { cat $out/tasks >&2 && fail "bench tasks fails"; }
    fill docs/evidence.md tasks <build/bench/tasks.md
    ;;
esac
