#!/usr/bin/env bash
# Make one environment for each peer, so that none changes another's libraries: ./install.sh [folder]
# torch comes through the project's constraints in every one of them: the peers are compared, not their torch.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
folder="${1:-$here/.environments}"
constraints="$folder/constraints.txt"
mkdir -p "$folder"
grep -E '^torch==' "$here/../../constraints.txt" >"$constraints"

environment() { # name, packages...
  local name="$1"
  shift
  if [ -f "$folder/$name/.installed" ]; then return; fi
  "${PYTHON:-python3}" -m venv "$folder/$name"
  "$folder/$name/bin/python" -m pip install --quiet --disable-pip-version-check -c "$constraints" "$@"
  touch "$folder/$name/.installed"
}

environment pfl "pfl[pytorch]==0.6.0"
environment fluke "fluke-fl==0.8.1"
environment fedjax "fedjax==0.0.17" "jax==0.10.2" "jaxlib==0.10.2"
environment flower "flwr==1.41.0" "ray" torch
