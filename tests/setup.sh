# `./build.sh setup`, a part of build.sh: installs what the tests use. Checks every step, reports a failure at once, and
# lists all failures at the end.
# shellcheck shell=sh disable=SC2086

failures='' absences='' # one line each
setup_log=build/setup.log
setup_failed() { echo "setup: FAILED: $1" >&2 && failures="$failures    $1
"; }
setup_absent() { echo "setup: optional, left out: $1" && absences="$absences    $1
"; }
reason() { # the first error of the last step, or its last line if there is none
    { grep -m 1 '^E: \|^ERROR: ' $setup_log || tail -n 1 $setup_log; } | grep . || echo "without a message"
}
locked() { grep -q '^E: Could not get lock\|^E: Unable to acquire the dpkg' $setup_log; }

# Runs apt-get and waits, about four minutes at most, for locks that another program holds. DPkg::Lock::Timeout is for
# dpkg's lock. The loop is for the locks of the lists and archives, for which apt does not wait.
apt() {
    for try in 1 2 3 4 5 6 7 8; do
        LC_ALL=C DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=15 "$@" >$setup_log 2>&1 && return 0
        locked || return 1
        [ $try = 8 ] || { echo "setup: waiting: $(reason)"; sleep 15; }
    done
    return 1
}
apt_install() { apt install -y --no-install-recommends "$@"; }
pip_install() { /usr/bin/python3 -m pip install -q --no-deps --upgrade --target "$@" >$setup_log 2>&1; }
optional() { # optional WHAT CONSEQUENCE: the last step, which is optional, failed
    if locked; then setup_failed "$1: $(reason)"; else setup_absent "$1; $2 ($(reason))"; fi
}

# Installs all packages at once. If that fails, installs those that this system has and names the others.
install_packages() {
    apt_install "$@" && return
    why=$(reason)
    locked && { setup_failed "apt-get install: $why"; return; }
    there='' missing=''
    for package; do
        if LC_ALL=C apt-get -qq -s install --no-install-recommends "$package" >/dev/null 2>&1; then
            there="$there $package"
        else
            missing="$missing $package"
        fi
    done
    [ -n "$missing" ] || { setup_failed "apt-get install: $why"; return; }
    setup_failed "packages that this system's sources do not have:$missing"
    [ -z "$there" ] || apt_install $there || setup_failed "apt-get install of the others: $(reason)"
}

arm64_apt() {
    env LC_ALL=C apt-get -qq -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o APT::Sandbox::User=root \
        -o "Dir::Cache=$PWD" -o "Dir::State::lists=$PWD/lists" -o "Dir::State::status=$PWD/status" \
        -o "Dir::Etc::sourcelist=$sources" -o "Dir::Etc::sourceparts=$PWD/none" "$@"
}

# Installs Debian's SLEEF for AArch64 into build/sleef-arm64, with package lists of its own, so that the system needs no
# second architecture.
sleef_arm64() {
    if [ -e build/sleef-arm64/usr ] || [ "$(dpkg --print-architecture)" = arm64 ]; then return; fi
    mkdir -p build/sleef-arm64/lists/partial build/sleef-arm64/archives/partial
    (
        cd build/sleef-arm64
        : >status
        for sources in /etc/apt/sources.list.d/debian.sources /etc/apt/sources.list; do [ -f $sources ] && break; done
        arm64_apt update && arm64_apt download libsleef3 && dpkg -x libsleef3_*_arm64.deb . && rm -rf lists
    ) >$setup_log 2>&1 || optional "SLEEF for AArch64" "its test stays out"
}

# Unpacks a kernel for tests/bits/avx512.sh into build/bochs. Without a status, apt names the package even if the system
# has it.
bochs_linux() {
    [ ! -e build/bochs/boot ] || return 0
    mkdir -p build/bochs
    apt -s -o Dir::State::status=/dev/null install linux-image-cloud-amd64 || return
    package=$(sed -n 's/^Inst \(linux-image-[0-9][^ ]*\) .*/\1/p' $setup_log)
    (cd build/bochs && apt-get -qq -o APT::Sandbox::User=root download $package && dpkg -x linux-image-*.deb .) \
        >$setup_log 2>&1 && rm -rf build/bochs/*.deb build/bochs/lib
}

setup() {
    knows setup '' "$@"
    if ! have apt-get; then
        { printf 'setup: this needs apt (Debian or Ubuntu); install clang, tcc, perl, qemu-user and the '
            echo 'cross compilers in this file by hand'; } >&2
        exit 2
    fi
    mkdir -p build
    if ! apt update; then
        setup_failed "apt-get update: $(reason)"
    elif grep -q '^W: ' $setup_log; then
        sed -n 's/^W: /setup: apt-get update warns: /p' $setup_log >&2
    fi
    # without gcc-multilib, which conflicts with the cross compilers
    install_packages gcc g++ libc6-dev perl clang clang-19 llvm \
        openmpi-bin libopenmpi-dev cmake pkg-config \
        qemu-system-misc python3-cffi swig \
        lld lld-19 tcc musl-tools gcc-12-multilib libc6-dev-i386 python3-numpy nodejs cppcheck clang-tidy valgrind \
        wasi-libc libclang-rt-14-dev-wasm32 libclang-rt-19-dev-wasm32 \
        libclang-rt-14-dev qemu-user qemu-system-arm gcc-arm-none-eabi gcc-avr avr-libc simavr luajit \
        gcc-mingw-w64-x86-64-win32 wine64 gcc-aarch64-linux-gnu libc6-dev-arm64-cross gcc-s390x-linux-gnu \
        libc6-dev-s390x-cross gcc-riscv64-linux-gnu libc6-dev-riscv64-cross gcc-arm-linux-gnueabihf \
        libc6-dev-armhf-cross gcc-powerpc-linux-gnu libc6-dev-powerpc-cross gcc-powerpc64le-linux-gnu \
        libc6-dev-ppc64el-cross gcc-mips-linux-gnu libc6-dev-mips-cross libsleef-dev python3-gmpy2 python3-mpmath
    sleef_arm64
    if [ "$(uname -m)" = x86_64 ]; then # a PC with AVX-512, for tests/bits/avx512.sh
        { apt_install bochs bochs-term bochsbios vgabios isolinux syslinux-common xorriso cpio && bochs_linux; } ||
            optional "Bochs" "AVX-512 is tested only where it is"
    fi
    # PyTorch and optimi, for tests/examples/peers.py; with safetensors, for the converters
    { apt_install python3-torch python3-packaging python3-pip &&
        pip_install build/python torch-optimi==0.3.3 safetensors==0.8.0; } ||
        optional "PyTorch and optimi" "the comparison with them stays out"
    # for the wheel
    apt_install python3-pip python3-venv mypy twine || optional "mypy and twine" "the test of the wheel stays out"
    # for bench fidelity
    apt_install python3-sklearn python3-matplotlib ||
        optional "scikit-learn and matplotlib" "the evidence with error bars stays out"
    # the browser for the playground
    apt_install chromium chromium-driver python3-selenium python3-pil fonts-dejavu-core ||
        optional "Chromium and Selenium" "the test of the playground stays out"
    # clang-format for tests/repo/style.py: other versions format differently with the same settings
    { apt_install python3-pip && pip_install build/python clang-format==19.1.7; } ||
        optional "clang-format" "the check of the format stays out"
    # zig cc (380 MB): clang with a C library for each target
    { apt_install python3-pip && pip_install build/zig ziglang==0.15.2; } ||
        optional "zig cc" "its builds stay out"
    # nvcc for the GPU part: the compiler and linker of NVIDIA's toolkit, without a driver (280 MB)
    if ! have nvcc && ! have /usr/local/cuda/bin/nvcc; then
        if [ "$(uname -m)" != x86_64 ]; then
            setup_absent "nvcc; its parts stay out (here it is installed on x86-64 only)"
        else
            { apt_install python3-pip && pip_install build/cuda nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 \
                nvidia-cuda-crt==13.0.88 nvidia-cuda-runtime==13.0.96; } || optional "nvcc" "its parts stay out"
        fi
    fi
    if [ "$(uname -m)" = x86_64 ] && ! have nvdisasm; then # the instructions of GPUs, for tests/gpu/sass.py
        { apt_install python3-pip && pip_install build/nvdisasm nvidia-cuda-nvdisasm==13.5.37; } ||
            optional "nvdisasm" "the count of the GPU's instructions stays out"
    fi
    [ -z "$absences" ] || printf 'setup: optional and left out:\n%s' "$absences"
    [ -z "$failures" ] || { printf 'setup: INCOMPLETE; what failed:\n%s' "$failures" >&2; exit 1; }
    echo "setup: done"
}

setup "$@"
