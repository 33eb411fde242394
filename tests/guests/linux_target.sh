#!/bin/bash
# In a guest: Linux's NVMe/TCP target serves block devices and files, a namespace each. linux_target.sh NQN PORT PATH...
set -euo pipefail
nqn=$1 port=$2
shift 2
target=/sys/kernel/config/nvmet
subsystem=$target/subsystems/$nqn
mkdir "$subsystem"
echo 1 > "$subsystem/attr_allow_any_host"
number=0
for path in "$@"; do
    number=$((number + 1))
    namespace=$subsystem/namespaces/$number
    mkdir "$namespace"
    echo "$path" > "$namespace/device_path"
    [ -b "$path" ] || echo 1 > "$namespace/buffered_io" # tmpfs has no direct I/O
    echo 1 > "$namespace/enable"
done
if [ ! -d $target/ports/1 ]; then
    mkdir $target/ports/1
    echo tcp > $target/ports/1/addr_trtype
    echo ipv4 > $target/ports/1/addr_adrfam
    echo 0.0.0.0 > $target/ports/1/addr_traddr
    echo "$port" > $target/ports/1/addr_trsvcid
fi
ln -s "$subsystem" $target/ports/1/subsystems/ # with the first it listens
