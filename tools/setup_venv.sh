#!/usr/bin/env bash
# Makes the virtual environment VENV with eagleray, its test extras and an embedded Redis in it.
# Usage: setup_venv.sh PYTHON VENV
set -euo pipefail
python=$1 venv=$2

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
  echo "setup: $python is missing or older than Python 3.11. Install Python 3.11+, or name one: make PYTHON=python3.12 …" >&2
  exit 2
fi

if [ ! -x "$venv/bin/python" ]; then
  # Debian ships venv apart from python3; install it where we may, say how where we may not.
  if ! "$python" -c 'import ensurepip' 2>/dev/null; then
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
      apt-get update -qq && apt-get install -y -qq "python$version-venv" >/dev/null
    else
      echo "setup: this Python has no venv module. Run: sudo apt-get install python$version-venv" >&2
      exit 2
    fi
  fi
  trap 'echo "setup: interrupted; run it again" >&2; exit 130' INT
  echo "setup: making $venv: some 2 GB are fetched and unpacked (a few minutes, once)"
  rm -rf "$venv"
  "$python" -m venv "$venv"
fi
if ! command -v c++ >/dev/null; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    apt-get update -qq && apt-get install -y -qq g++ >/dev/null
  else
    echo "setup: no C++ compiler: serving's kernels are left out (sudo apt-get install g++ adds them)" >&2
  fi
fi
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check -e '.[dev]'
touch "$venv/.installed"
