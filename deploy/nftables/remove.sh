#!/bin/sh
# Takes an interception away: new connections go where they are meant to go. Does nothing where
# nothing is installed.
#
#   remove.sh VARIANT [divert_mark=MARK] [table=TABLE]
#
#   VARIANT       lb-redirect, lb-tproxy, service-redirect or service-tproxy
#   divert_mark   as given to install.sh
#   table         as given to install.sh
#
# After a REDIRECT the connections that pass through jackstay go on until they end. After a TPROXY
# their packets go past it: it notices within 3 s and resets them, and the clients connect anew.
set -eu
variant=${1:-}
divert_mark=
table=
[ $# -eq 0 ] || shift
for pair in "$@"; do
    case $pair in
    divert_mark=?*) divert_mark=${pair#*=} ;;
    table=?*) table=${pair#*=} ;;
    *)
        echo "remove.sh: \`$pair\` is neither divert_mark=MARK nor table=TABLE" >&2
        exit 2
        ;;
    esac
done
case $variant in
lb-redirect | lb-tproxy) name=jackstay_lb default=0x306b ;;
service-redirect | service-tproxy) name=jackstay_service default=0x306c ;;
*)
    echo "usage: remove.sh lb-redirect|lb-tproxy|service-redirect|service-tproxy [divert_mark=MARK] [table=TABLE]" >&2
    exit 2
    ;;
esac
divert_mark=${divert_mark:-$default}
table=${table:-$((divert_mark))}
# Declared first, so that it exists.
nft "table inet $name; delete table inet $name"
case $variant in
*-tproxy)
    for family in -4 -6; do
        while ip "$family" rule del fwmark "$divert_mark" lookup "$table" 2>/dev/null; do :; done
        ip "$family" route flush table "$table" 2>/dev/null || :
    done
    ;;
esac
