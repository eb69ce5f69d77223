#!/bin/sh
# Runs `sluice`. What a variable SLUICE_<NAME>_FILE names is read from that file, so that secrets need not be in the
# description of a container: SLUICE_PEPPER_FILE=/run/secrets/pepper sets SLUICE_PEPPER.
set -eu

for variable in $(env | sed -n 's/^\(SLUICE_[A-Z_]*\)_FILE=.*/\1/p'); do
    case $variable in SLUICE_TLS_CERT | SLUICE_TLS_KEY) continue ;; esac # settings that name files themselves
    eval "file=\$${variable}_FILE"
    value=$(cat "$file")
    export "$variable=$value"
    unset "${variable}_FILE"
done

exec sluice "$@"
