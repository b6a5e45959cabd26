#!/bin/bash
# Installs what kiln is built and tested with: Debian packages, and a virtual environment in .venv. What is there already
# is left alone, so a second run takes a moment. Asks nothing. KILN_SKIP_APT=1 leaves the system's packages alone.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf 'setup: %s\n' "$*"; }

# --- Python 3.11 ------------------------------------------------------------------------------------------------------
is_311() { "$1" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' >/dev/null 2>&1; }
find_python() {
  local candidate
  for candidate in ${PYTHON:-} .venv/bin/python python3.11 python3 /usr/bin/python3.11; do
    if is_311 "$candidate"; then echo "$candidate"; return; fi
  done
}
python=$(find_python)

# --- Debian packages -----------------------------------------------------------------------------------------------------
packages=(g++ cmake ninja-build ccache mold llvm-19-dev libzstd-dev libboost-graph-dev libgtest-dev libsqlite3-dev
          graphviz clang-format-19)
# A Python of Debian's own keeps its headers and venv in packages of their own.
prefix=$([ -n "$python" ] && "$python" -c 'import sys; print(sys.base_prefix)' || echo /usr)
if [ "$prefix" = /usr ]; then packages+=(python3.11 python3.11-dev python3.11-venv); fi
missing=()
if [ -z "${KILN_SKIP_APT:-}" ] && command -v dpkg-query >/dev/null; then
  for package in "${packages[@]}"; do
    [ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null)" = installed ] || missing+=("$package")
  done
fi
if [ ${#missing[@]} -gt 0 ]; then
  say "installing Debian packages: ${missing[*]}"
  sudo=$([ "$(id -u)" = 0 ] || echo sudo)
  export DEBIAN_FRONTEND=noninteractive
  $sudo apt-get update -q </dev/null
  $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${missing[@]}" </dev/null
  hash -r
fi
[ -n "$python" ] || python=$(find_python)
[ -n "$python" ] || { say "no Python 3.11 was found; install one, or set PYTHON to it"; exit 1; }

# --- the virtual environment ---------------------------------------------------------------------------------------------
if ! [ -x .venv/bin/python ]; then
  say "making .venv with $python"
  "$python" -m venv .venv
fi
is_311 .venv/bin/python || { say ".venv holds another Python than 3.11; remove it and run again"; exit 1; }
if ! .venv/bin/python tools/check_env.py requirements-torch.txt; then
  .venv/bin/python -m pip install -q --disable-pip-version-check -r requirements-torch.txt </dev/null
fi
if ! .venv/bin/python tools/check_env.py requirements-dev.txt; then
  # The constraint keeps the torch that was chosen above.
  .venv/bin/python -m pip install -q --disable-pip-version-check -c requirements-torch.txt -r requirements-dev.txt </dev/null
fi
.venv/bin/python tools/check_env.py requirements-torch.txt requirements-dev.txt --verbose
