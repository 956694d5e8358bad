#!/bin/sh
# Makes the virtual environment in $1 with the Python in $2, by whatever means this machine has. An environment that works is kept.
# Needs no pip, no ensurepip and no virtualenv in particular, only one of them. Installs nothing outside $1.
set -eu
venv=$1
python=$2

say() { printf '%s\n' "$*" >&2; }
new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }
works() { new_enough "$venv/bin/python" && "$venv/bin/python" -m pip --version >/dev/null 2>&1; }

if works; then exit 0; fi

if ! new_enough "$python"; then
    for candidate in python3.11 python3.12 python3.13 python3.14; do
        if new_enough "$candidate"; then
            say "$python is not Python 3.11 or newer; using $candidate"
            python=$candidate
            break
        fi
    done
fi
if ! new_enough "$python"; then
    say "Shoal needs Python 3.11 or newer; '$python' is not. Name one: make PYTHON=/path/to/python3.11 ..."
    exit 1
fi

# 1. The standard library's way. Debian leaves ensurepip out unless python3-venv is installed.
rm -rf "$venv"
if "$python" -c 'import ensurepip, venv' 2>/dev/null && "$python" -m venv "$venv" >/dev/null && works; then exit 0; fi

# 2. virtualenv, if it is here, or if pip can bring it into a folder that is thrown away again.
rm -rf "$venv"
if "$python" -m virtualenv --version >/dev/null 2>&1; then
    if "$python" -m virtualenv --quiet "$venv" && works; then exit 0; fi
elif "$python" -m pip --version >/dev/null 2>&1; then
    tools=$(mktemp -d)
    trap 'rm -rf "$tools"' EXIT
    if "$python" -m pip install --quiet --target "$tools" virtualenv \
        && PYTHONPATH="$tools" "$python" -m virtualenv --quiet "$venv" && works; then exit 0; fi
fi

# 3. uv, which needs neither.
rm -rf "$venv"
if command -v uv >/dev/null 2>&1 && uv venv --quiet --seed --python "$python" "$venv" && works; then exit 0; fi

rm -rf "$venv"
say "Cannot make a virtual environment: '$python' has neither a working venv module (ensurepip is missing), nor virtualenv, nor pip."
say "On Debian or Ubuntu: apt-get install python3-venv     Then run make again."
exit 1
