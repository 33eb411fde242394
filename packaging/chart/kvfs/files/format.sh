# Makes this node's pool where there is none: format.sh NODES NODE POOL MOUNT [more of kvfs format].
# NODES has a file for each node that has devices of its own, and "_" for all others: a word of kvfs format on each line.
nodes=$1 node=$2 pool=$3 mount=$4
shift 4
# A mount that a killed daemon left there answers nothing, and kvfs mount clears it.
mkdir "$mount" 2>/dev/null || true
[ ! -e "$pool/pool.toml" ] || exit 0
own=$nodes/$node
[ -e "$own" ] || own=$nodes/_
[ -e "$own" ] || { echo "node $node: neither pool.nodes has devices for it nor pool.devices any" >&2; exit 1; }
while IFS= read -r word; do
    set -- "$@" "$word"
done <"$own"
exec kvfs format "$pool" "$@"
