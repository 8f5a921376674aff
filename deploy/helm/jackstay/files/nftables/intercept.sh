#!/bin/sh
# Intercepts connections while jackstay listens on a port of this network namespace, as jackstay-intercept@.service does
# on a host. When jackstay or this script stops, the rules are removed within a second.
#
#   intercept.sh VARIANT PORT [NAME=VALUE]...    variant and values as for install.sh
set -eu
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
variant=$1 port=$2
shift 2
case ${KUBERNETES_SERVICE_HOST:-} in
'') ;;
*:*) set -- "service6=$KUBERNETES_SERVICE_HOST" "service_port=$KUBERNETES_SERVICE_PORT" "$@" ;;
*) set -- "service4=$KUBERNETES_SERVICE_HOST" "service_port=$KUBERNETES_SERVICE_PORT" "$@" ;;
esac
# State 0A is LISTEN. A connection to the port would be refused and logged by jackstay.
socket=$(printf ': [0-9A-F]*:%04X [0-9A-F]*:0000 0A ' "$port")
listens() {
    grep -qs "$socket" /proc/net/tcp /proc/net/tcp6
}
# Packets of a bridge pass the hooks before they are received (br_netfilter), and the kernel then forgets the socket that
# TPROXY has chosen (skb_orphan in ip_rcv_core): the connections would be refused.
check_bridges() {
    [ "$variant" = service-tproxy ] && grep -qs 1 /proc/sys/net/bridge/bridge-nf-call-iptables || return 0
    for member in /sys/class/net/*/brif/*; do
        if [ -e "$member" ]; then
            bridge=${member%/brif/*}
            echo "service-tproxy breaks connections of pods on a bridge (${bridge##*/}) while net.bridge.bridge-nf-call-iptables is 1: use service-redirect" >&2
            exit 1
        fi
    done
}
installed() {
    nft list table inet jackstay_service >/dev/null 2>&1
}
remove() {
    "$here/remove.sh" "$variant" && echo "interception removed"
}
trap remove EXIT
trap 'exit 0' TERM INT
# Rules of an earlier container may have other values.
"$here/remove.sh" "$variant"
while :; do
    check_bridges
    if listens; then
        if ! installed; then
            "$here/install.sh" "$variant" "listener_port=$port" "$@"
            echo "interception installed: $variant listener_port=$port $*"
        fi
    elif installed; then
        remove
    fi
    sleep 1 &
    wait $!
done
