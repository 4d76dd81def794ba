#!/bin/sh
# secrets.sh FOLDER DATABASE_HOST RUNTIME...
# Makes the secrets of an installation in FOLDER: FOLDER/platform for gateways, ledger and migration, FOLDER/nats for the
# users of the bus and certificates. What is there stays. DATABASE_HOST is where PostgreSQL is found; each RUNTIME is the id
# of one. NATS_HOSTS="NAME ..." in the environment: by what names the NATS server is reached, besides `nats` and the chart's.
set -eu
if [ $# -lt 3 ]; then
    echo "usage: $0 FOLDER DATABASE_HOST RUNTIME..." >&2
    exit 2
fi
folder=$1 host=$2
shift 2
umask 077
mkdir -p "$folder/platform"

random() { od -An -N32 -tx1 /dev/urandom | tr -d ' \n'; }
fresh() { [ -s "$folder/platform/$1" ] || printf '%s\n' "$2" > "$folder/platform/$1"; }

fresh STACCATO_ADMIN_KEY "sk-st-admin-$(random)"
fresh STACCATO_METRICS_KEY "sk-st-metrics-$(random)"
fresh grafana_password "$(random)"
fresh pepper "$(random)"
fresh postgres_password "$(random)"
fresh STACCATO_DATABASE_URL "postgresql://staccato:$(cat "$folder/platform/postgres_password")@$host/staccato"

for runtime; do
    set -- "$@" --runtime "$runtime"
    case $runtime in *-runtime-*) chart="${runtime%-runtime-*}-nats" # the chart's service, and its servers
        set -- "$@" --host "$chart"
        for number in 0 1 2 3 4; do set -- "$@" --host "$chart-$number.$chart"; done;; esac
    shift
done
for host in nats ${NATS_HOSTS:-}; do
    set -- "$@" --host "$host"
done
staccato nats-users "$folder/nats" "$@"

# A container reads them as a user of its own; the folder lets nobody else come as far. nats/authority stays closed.
chmod 700 "$folder"
chmod 755 "$folder"/*/
chmod 644 "$folder"/platform/* "$folder"/nats/*.*
