#!/bin/sh
# Installs an interception: this node's connections to an address go to jackstay's transparent listener.
#
#   install.sh [--watch] VARIANT [NAME=VALUE]...
#
#   VARIANT   lb-redirect, lb-tproxy, service-redirect or service-tproxy
#   NAME      a `define` of VARIANT.nft that VALUE replaces: lb4, lb6, lb_port, service4, service6,
#             service_port, listener_port, own_mark, divert_mark; or `table`, the routing table of
#             the TPROXY variants (default: the number of their divert_mark)
#
#   install.sh lb-redirect lb4=10.0.0.5 lb_port=6443
#
# With --watch it does not end, and installs the rules again within 2 s when another program has removed them:
# `nft flush ruleset`, a restart of nftables.service or firewalld, a network manager that resets routing rules.
#
# After an error nothing is installed. A second run replaces the rules. Start jackstay first, because new
# connections to the address need it once the rules are installed.
set -eu
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
watch=
if [ "${1:-}" = --watch ]; then
    watch=yes
    shift
fi
variant=${1:-}
case $variant in
lb-redirect | lb-tproxy | service-redirect | service-tproxy) ;;
*)
    echo "usage: install.sh [--watch] lb-redirect|lb-tproxy|service-redirect|service-tproxy [NAME=VALUE]..." >&2
    exit 2
    ;;
esac
shift
table=
rules=$(cat "$here/$variant.nft")
for pair in "$@"; do
    name=${pair%%=*} value=${pair#*=}
    if [ "$name" = table ] && [ "$name" != "$pair" ]; then
        table=$value
        continue
    fi
    # The names are letters, digits and underscores, so they are safe in the expression below.
    case $name in
    *[!a-z0-9_]* | '' | "$pair")
        echo "install.sh: \`$pair\` is not NAME=VALUE" >&2
        exit 2
        ;;
    esac
    if ! printf '%s\n' "$rules" | grep -q "^define $name = "; then
        echo "install.sh: $variant.nft has no \`$name\`" >&2
        exit 2
    fi
    case $value in
    *[!0-9a-fA-Fx.:]* | '')
        echo "install.sh: \`$value\` is neither an address nor a number" >&2
        exit 2
        ;;
    esac
    rules=$(printf '%s\n' "$rules" | sed "s/^define $name = .*/define $name = $value/")
done
divert_mark=$(printf '%s\n' "$rules" | sed -n 's/^define divert_mark = //p')
table=${table:-$((${divert_mark:-0}))}
remove() {
    "$here/remove.sh" "$variant" ${divert_mark:+"divert_mark=$divert_mark" "table=$table"}
}
install_rules() {
    remove
    case $variant in
    *-tproxy)
        # Marked packets are delivered locally, whatever their destination.
        trap remove EXIT
        ip rule add fwmark "$divert_mark" lookup "$table" priority 100
        ip route add local 0.0.0.0/0 dev lo table "$table"
        # The host may have no IPv6.
        if [ -e /proc/net/if_inet6 ]; then
            ip -6 rule add fwmark "$divert_mark" lookup "$table" priority 100
            ip -6 route add local ::/0 dev lo table "$table"
        fi
        ;;
    esac
    printf '%s\n' "$rules" | nft -f -
    trap - EXIT
}
# Whether all of it is there. A command that fails for another reason counts as present: rules are not replaced without need.
installed() {
    tables=$(nft list tables 2>/dev/null) || return 0
    printf '%s\n' "$tables" | grep -qx "table inet jackstay_${variant%-*}" || return 1
    case $variant in
    *-tproxy)
        for family in -4 -6; do
            [ "$family" = -4 ] || [ -e /proc/net/if_inet6 ] || continue
            all=$(ip "$family" rule list 2>/dev/null) || continue
            printf '%s\n' "$all" | grep -q "fwmark $(printf '0x%x' "$divert_mark") " || return 1
            ip "$family" route show table "$table" 2>/dev/null | grep -q '^local default' || return 1
        done
        ;;
    esac
}

if [ -z "$watch" ]; then
    install_rules
    exit
fi
trap 'exit 0' TERM INT
installed || install_rules
while :; do
    sleep 2 &
    wait $!
    if ! installed; then
        echo "another program has removed the interception: installed again" >&2
        "$here/install.sh" "$variant" "$@" || echo "cannot install the interception; tried again in 2 s" >&2
    fi
done
