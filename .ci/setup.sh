#!/bin/sh
# Sets up .venv for development: checks first what is missing, then installs exact versions, then builds Horovod.
#
#   .ci/setup.sh check      only look for what is missing
#   .ci/setup.sh packages   virtual environment and packages
#   .ci/setup.sh horovod    Horovod, built for the installed frameworks (or from the user's cache)
#
# PYTHON       the interpreter to use (default: the first of python3.11 ... python3 that is new enough)
# TORCH_INDEX  package index with PyTorch's CPU builds; "none" takes whatever pip's own settings give. By default PyTorch's
#              own CPU index is used if it answers: the build on PyPI is for CUDA and brings 5 GB along.
set -eu
cd "$(dirname "$0")/.."

VENV=.venv
CONSTRAINTS=.ci/constraints.txt
CPU_INDEX=https://download.pytorch.org/whl/cpu
NEED_MB=6000

say() { printf '%s\n' "$*"; }

find_python() {
    for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3}; do
        if command -v "$candidate" >/dev/null 2>&1 &&
            "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
}

# Everything that is missing, together, each with how to get it.
check() {
    missing=""
    add() { missing="$missing
  * $1
      $2"; }

    python=$(find_python)
    if [ -z "$python" ]; then
        add "Python 3.11 or later${PYTHON:+ (PYTHON=$PYTHON is none)}" \
            "Debian/Ubuntu: apt-get install python3 python3-venv python3-dev; Fedora: dnf install python3-devel; or set PYTHON"
    else
        "$python" -c 'import ensurepip, venv' 2>/dev/null ||
            add "Python's venv and ensurepip modules ($python)" "Debian/Ubuntu: apt-get install python3-venv"
        header=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["include"] + "/Python.h")')
        [ -f "$header" ] ||
            add "Python's C headers ($header)" "Debian/Ubuntu: apt-get install python3-dev; Fedora: dnf install python3-devel"
    fi
    if ! command -v "${CXX:-c++}" >/dev/null 2>&1 && ! command -v g++ >/dev/null 2>&1 && ! command -v clang++ >/dev/null 2>&1; then
        add "a C++ compiler (c++, g++ or clang++ on PATH, or CXX)" \
            "Debian/Ubuntu: apt-get install g++; Fedora: dnf install gcc-c++; conda: conda install -c conda-forge gxx"
    elif ! probe_compiler; then
        add "a C++ compiler that compiles C++17 programs" "Debian/Ubuntu: apt-get install g++ (9 or later), or set CXX"
    fi
    command -v make >/dev/null 2>&1 || add "make" "Debian/Ubuntu: apt-get install make"
    free_mb=$(df -Pm . | awk 'NR == 2 { print $4 }')
    if [ ! -d "$VENV" ] && [ "$free_mb" -lt "$NEED_MB" ]; then
        add "disk space: $free_mb MB are free in $(pwd), $NEED_MB are needed" "make room, or clone to a larger disk"
    fi
    if [ -n "$missing" ]; then
        say "This is missing on this machine:$missing" >&2
        exit 1
    fi
}

probe_compiler() {
    folder=$(mktemp -d)
    printf '#include <optional>\nint main() { std::optional<int> x; return x.has_value(); }\n' >"$folder/probe.cc"
    for compiler in ${CXX:-c++ g++ clang++}; do
        if "$compiler" -std=c++17 "$folder/probe.cc" -o "$folder/probe" >/dev/null 2>&1; then
            rm -rf "$folder"
            return 0
        fi
    done
    rm -rf "$folder"
    return 1
}

# pip's options for PyTorch: its CPU index where that answers and the user has not arranged for anything else.
torch_options() {
    case "${TORCH_INDEX:-}" in
    none) ;;
    "")
        if [ -z "${PIP_FIND_LINKS:-}${PIP_INDEX_URL:-}${PIP_EXTRA_INDEX_URL:-}" ] && answers "$CPU_INDEX/torch/"; then
            say "--extra-index-url $CPU_INDEX"
        fi
        ;;
    *) say "--extra-index-url $TORCH_INDEX" ;;
    esac
}

answers() {
    "$VENV/bin/python" - "$1" <<'PYTHON' 2>/dev/null
import sys, urllib.request
urllib.request.urlopen(sys.argv[1], timeout=5).close()
PYTHON
}

packages() {
    check
    python=$(find_python)
    # also where an earlier attempt was interrupted before it had pip
    "$VENV/bin/python" -m pip --version >/dev/null 2>&1 || "$python" -m venv --clear "$VENV"
    say "Installing packages into $VENV (PyTorch and TensorFlow are large: some minutes the first time)"
    pip="$VENV/bin/python -m pip --disable-pip-version-check --no-input"
    $pip install --quiet --quiet --constraint "$CONSTRAINTS" --upgrade pip
    # shellcheck disable=SC2046
    $pip install --quiet --quiet --constraint "$CONSTRAINTS" $(torch_options) --editable '.[torch,tensorflow,tensorboard,data,dev]' tensorflow-cpu
}

horovod() {
    PIP_CONSTRAINT="$(pwd)/$CONSTRAINTS" "$VENV/bin/hvdtrain" horovod install
}

case "${1:-}" in
check | packages | horovod) "$1" ;;
*)
    say "usage: .ci/setup.sh check | packages | horovod" >&2
    exit 2
    ;;
esac
