#!/bin/sh
# secrets.sh FOLDER DATABASE_HOST RUNTIME... or secrets.sh FOLDER DATABASE_HOST --join
# Makes the secrets of an installation in FOLDER: FOLDER/platform for gateways, ledger and migration, FOLDER/nats for the
# users of the bus and certificates. What is there stays. DATABASE_HOST is where PostgreSQL is found; each RUNTIME is the id
# of one, or NODE:8 for NODE-r1 to NODE-r8. With --join runtimes join by proof, and are not named here.
# In the environment: RELEASE=NAME names the chart's release, which is known without where a runtime is the chart's;
# NATS_HOSTS="NAME ..." by what further names the NATS server is reached, besides `nats`.
set -eu
if [ $# -lt 3 ]; then
    echo "usage: $0 FOLDER DATABASE_HOST RUNTIME... (NODE:8 for eight of a node), or --join" >&2
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

release=${RELEASE:-}
for runtime; do
    case $runtime in
        --join) set -- "$@" --join;;
        *:*) number=0
            while [ "$number" -lt "${runtime#*:}" ]; do
                number=$((number + 1))
                set -- "$@" --runtime "${runtime%:*}-r$number"
            done;;
        *) set -- "$@" --runtime "$runtime";;
    esac
    case $runtime in *-runtime-*) release=${release:-${runtime%%-runtime-*}};; esac
    shift
done
if [ -n "$release" ]; then # the chart's service, and its servers
    set -- "$@" --host "$release-nats"
    for number in 0 1 2 3 4; do set -- "$@" --host "$release-nats-$number.$release-nats"; done
fi
for host in nats ${NATS_HOSTS:-}; do
    set -- "$@" --host "$host"
done
staccato nats-users "$folder/nats" "$@"

# A container reads them as a user of its own; the folder lets nobody else come as far. nats/authority stays closed.
chmod 700 "$folder"
chmod 755 "$folder"/*/
chmod 644 "$folder"/platform/* "$folder"/nats/*.*
