#!/bin/sh
# Removes an interception: new connections go to their original destination. Does nothing if none is
# installed.
#
#   remove.sh VARIANT [NAME=VALUE]...
#
#   VARIANT   lb-redirect, lb-tproxy, service-redirect or service-tproxy
#   NAME      as given to install.sh; only `divert_mark` and `table` have an effect: they select the routes to
#             remove if the rules do not exist any more
#
# Either of the two variants for an address (lb-redirect and lb-tproxy) removes whichever is installed.
#
# Connections that REDIRECT has redirected continue until they end. The packets of connections that TPROXY has
# redirected go to the host that has the address. That host resets the connection at the client's next packet,
# or at the client's reply to jackstay's keepalive within 30 s, and the client reconnects. If no host has the
# address, jackstay closes the connection after two minutes.
set -eu
variant=${1:-}
divert_mark=
table=
[ $# -eq 0 ] || shift
for pair in "$@"; do
    case $pair in
    divert_mark=?*) divert_mark=${pair#*=} ;;
    table=?*) table=${pair#*=} ;;
    lb4=?* | lb6=?* | lb_port=?* | service4=?* | service6=?* | service_port=?*) ;;
    listener_port=?* | own_mark=?*) ;;
    *)
        echo "remove.sh: \`$pair\` is not NAME=VALUE of install.sh" >&2
        exit 2
        ;;
    esac
done
case $variant in
lb-redirect | lb-tproxy) name=jackstay_lb default=0x306b ;;
service-redirect | service-tproxy) name=jackstay_service default=0x306c ;;
*)
    echo "usage: remove.sh lb-redirect|lb-tproxy|service-redirect|service-tproxy [NAME=VALUE]..." >&2
    exit 2
    ;;
esac
divert_mark=${divert_mark:-$default}
table=${table:-$((divert_mark))}
installed=$(nft list table inet "$name" 2>/dev/null |
    sed -n 's/.*meta mark \(0x[0-9a-f]*\) jump hand_over.*/\1/p')
# Declared first: deleting a table that does not exist would fail.
nft "table inet $name; delete table inet $name"
clear_table() {
    while ip "$1" rule del fwmark "$2" lookup "$3" 2>/dev/null; do :; done
    ip "$1" route flush table "$3" 2>/dev/null || :
}
for family in -4 -6; do
    clear_table "$family" "$divert_mark" "$table"
    for mark in $installed; do
        for found in $(ip "$family" rule list 2>/dev/null |
            sed -n "s/^100:.* fwmark $(printf '0x%x' "$mark") lookup \([^ ]*\).*/\1/p"); do
            clear_table "$family" "$mark" "$found"
        done
    done
done
