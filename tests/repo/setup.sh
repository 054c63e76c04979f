# `./build.sh setup` says what it did. Runs with fake versions of apt-get, dpkg and pip, in a copy of the project and
# without the system's paths. Prints TAP.
out=$PWD/build/tests/setup
rm -rf "$out"
mkdir -p "$out/bin" "$out/tests"
for name in build.sh tests/setup.sh; do
    sed 's,/usr/bin/python3,python3,g; s,/usr/local/,none/,g; s,/etc/,none/,g' $name >"$out/$name"
done
for tool in cat dirname env grep mkdir rm sed tail; do ln -s "$(command -v $tool)" "$out/bin/$tool"; done
pretend() { # pretend NAME: makes a fake program of the lines on stdin
    { echo '#!/bin/sh' && cat; } >"$out/bin/$1"
    chmod +x "$out/bin/$1"
}
pretend sleep <<'SH'
echo "sleep $*" >>"$LOG"
SH
pretend uname <<'SH'
echo x86_64
SH
pretend dpkg <<'SH'
case $1 in --print-architecture) echo amd64 ;; -x) mkdir usr ;; esac
SH
pretend python3 <<'SH'
echo "python3 $*" >>"$LOG"
case "$FAULT:$*" in pip:*) echo "ERROR: No matching distribution found"; exit 1 ;; esac
SH
# $FAULT: what is wrong with this system
pretend apt-get <<'SH'
echo "apt-get $*" >>"$LOG"
fail() { echo "$1" >&2; exit 100; }
no_lock='E: Could not get lock /var/lib/apt/lists/lock. It is held by process 7 (apt-get)'
case "$FAULT: $* " in
locked:*) fail "$no_lock" ;;
locked_once:*update*)
    [ -e "$LOG.once" ] && exit 0
    : >"$LOG.once"
    fail "$no_lock"
    ;;
dpkg_locked:*' clang '* | optional_locked:*python3-torch*)
    case "$*" in *' -s '*) ;; *) fail 'E: Unable to acquire the dpkg frontend lock' ;; esac
    ;;
network:*update*) fail 'E: Failed to fetch http://x/InRelease' ;;
stale:*update*) echo 'W: Some index files failed to download. They have been ignored, or old ones used instead.' >&2 ;;
broken:*' -s '*) ;;
broken:*' install '*) fail 'E: Sub-process /usr/bin/dpkg returned an error code (1)' ;;
silent:*' install '*' clang '*) exit 100 ;;
missing:*' clang-19 '*) fail 'E: Unable to locate package clang-19' ;;
missing_broken:*' clang-19 '*) fail 'E: Unable to locate package clang-19' ;;
missing_broken:*' -s '*) ;;
missing_broken:*' clang '*) fail 'E: You do not have enough free space' ;;
no_torch:*python3-torch*) fail 'E: Unable to locate package python3-torch' ;;
no_arm64:*arm64*) case "$*" in *download*) fail 'E: Unable to locate package libsleef3' ;; esac ;;
esac
exit 0
SH

count=0
report() { # report STATUS DESCRIPTION
    count=$((count + 1))
    if [ "$1" = 0 ]; then echo "ok $count - $2"; else echo "not ok $count - $2"; sed 's/^/# /' "$out/said"; fi
}
system() { # system FAULT: sets up a clean system with this fault
    rm -rf "$out/build" "$out/log" "$out/log.once"
    LOG="$out/log" FAULT="$1" PATH="$out/bin" /bin/sh "$out/build.sh" setup >"$out/said" 2>&1 </dev/null
    status=$?
}
says() { grep -q -e "$1" "$out/said"; }
asked() { grep -q -e "$1" "$out/log"; }
fails_by() { # fails_by WORDS DESCRIPTION: exit status 1, FAILED with these words, again at the end, no "done"
    [ $status = 1 ] && says "^setup: FAILED: .*$1" && ! says done &&
        sed -n '/INCOMPLETE/,$p' "$out/said" | grep -q -e "$1"
    report $? "$2"
}

system none
[ $status = 0 ] && [ "$(cat "$out/said")" = 'setup: done' ]
report $? "without a fault it ends with: setup: done"
asked 'install .* clang .* python3-mpmath$' && asked 'install .* python3-torch' && asked 'pip .*optimi' &&
    asked 'install .* chromium ' && asked 'pip .*clang-format==' && asked 'pip .*zig' && asked 'pip .*nvcc' &&
    asked 'download libsleef3' && [ -d "$out/build/sleef-arm64/usr" ]
report $? "... and has requested all packages"
! grep '^apt-get.* \(install\|update\)' "$out/log" | grep -v 'arm64 .*update' | grep -v 'DPkg::Lock::Timeout=[1-9]'
report $? "... and would have waited for dpkg's lock each time"

system locked
fails_by 'apt-get update: E: Could not get lock' "a lock that stays: update has failed"
fails_by 'apt-get install: E: Could not get lock' "... and so has the installation"
says 'waiting: E: Could not get lock' && [ "$(grep -c '^sleep' "$out/log")" -ge 7 ]
report $? "... after it waited"
! asked ' -s '
report $? "... and did not look for missing packages"
system locked_once
[ $status = 0 ] && says 'setup: done' && says waiting && [ "$(grep -c '^sleep' "$out/log")" = 1 ]
report $? "a lock that is released: waits, then all is done"
system dpkg_locked
fails_by 'apt-get install: E: Unable to acquire the dpkg' "dpkg's lock: the installation has failed"
system optional_locked
fails_by 'PyTorch and optimi: E: Unable to acquire' "a lock is a failure for optional parts, too"

system network
fails_by 'apt-get update: E: Failed to fetch' "no network: update has failed"
asked 'install .* clang '
report $? "... the packages in the cache are installed"
system stale
[ $status = 0 ] && says 'setup: apt-get update warns: Some index files'
report $? "the warnings of apt-get update are shown"
system broken
fails_by 'apt-get install: E: Sub-process' "a package that cannot be unpacked: the installation has failed"
system silent
fails_by 'packages that this system.s sources do not have:.* clang' "an apt-get that fails without a word is a failure"

system missing
fails_by 'packages that this system.s sources do not have: clang-19$' "a package that is not there is named"
grep -v -e ' -s ' "$out/log" | grep 'install .* clang ' | grep 'python3-mpmath$' | grep -qv 'clang-19'
report $? "... all others are installed"
system missing_broken
fails_by 'do not have: clang-19$' "a package that is not there"
fails_by 'apt-get install of the others: E: You do not have enough free space' "... and others that cannot be installed"

system no_torch
[ $status = 0 ] && says 'setup: done' &&
    says '^setup: optional, left out: PyTorch and optimi; .*Unable to locate package python3-torch'
report $? "no PyTorch: one line, and done"
[ "$(sed -n '/^setup: optional and left out:$/,$p' "$out/said" | grep -c PyTorch)" = 1 ]
report $? "... and again in the summary"
system no_arm64
[ $status = 0 ] && says '^setup: optional, left out: SLEEF for AArch64; .*libsleef3' && says 'setup: done'
report $? "no SLEEF for AArch64: the same"
system pip
[ $status = 0 ] && says '^setup: optional, left out: PyTorch and optimi; .*No matching' &&
    says '^setup: optional, left out: clang-format; .*No matching' &&
    says '^setup: optional, left out: zig cc; .*No matching' &&
    says '^setup: optional, left out: nvcc; .*No matching' &&
    says '^setup: optional, left out: nvdisasm; .*No matching'
report $? "pip finds nothing: the same for optimi, clang-format, zig cc, nvcc and nvdisasm"
[ "$(grep -c 'left out: ' "$out/said")" = 5 ] && [ "$(sed -n '/left out:$/,/^setup: done/p' "$out/said" | wc -l)" = 7 ]
report $? "... four lines, and four in the summary"

rm "$out/bin/apt-get"
system none
[ $status = 2 ] && says 'needs apt'
report $? "a system without apt is refused"
echo "1..$count"
