# exhaustive.sh REFERENCE COMMAND...: COMMAND makes all 2^32 conversions to bf16 and fp16 on an emulated machine, a
# sixteenth in each turn. Their hash must be that of the integer reference, which REFERENCE computes on this machine.
# Both are builds of test_convert.c. Prints TAP.
. tests/tap.sh
share="$((commit % 16)) 16"
[ -z "${KOPT_ALL:-}" ] || share='0 1'
expected=$("$1" reference $share)
shift
actual=$("$@" hash $share)
if [ -n "$actual" ] && [ "$actual" = "$expected" ]; then printf 'ok'; else printf 'not ok'; fi
echo " 1 - fp32 to bf16 and fp16, share $share of 2^32: hash $actual, reference $expected"
echo "1..1"
