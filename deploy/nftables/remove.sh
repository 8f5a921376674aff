#!/bin/sh
# Takes an interception away: new connections go where they are meant to go. Does nothing where
# nothing is installed.
#
#   remove.sh VARIANT [NAME=VALUE]...
#
#   VARIANT   lb-redirect, lb-tproxy, service-redirect or service-tproxy
#   NAME      as given to install.sh, of which `divert_mark` and `table` matter: what is installed is
#             known, these are for what is left of it when the rules are gone already
#
# The two variants for the same address are one: whichever is installed goes.
#
# After a REDIRECT the connections that pass through jackstay go on until they end. After a TPROXY
# their packets go past it, to whoever has the address. If that is somebody, what a client sends next is
# answered by a reset, and it connects anew; one that says nothing answers jackstay's keepalive within
# 30 s. If it is nobody, jackstay ends the connection after two minutes.
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
# Declared first, so that it exists.
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
