"""Which addresses a link may lead to: public ones, and private networks that the operator of the server has named.

The blocks are those of IANA's special-purpose address registries (RFC 6890), written out: the answers of Python's
`ipaddress` differ from version to version.
"""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

IPAddress = IPv4Address | IPv6Address
IPNetwork = IPv4Network | IPv6Network

NEVER_V4 = tuple(
    map(
        IPv4Network,
        (
            "0.0.0.0/8",  # this host
            "100.100.100.200/32",  # a cloud's metadata
            "168.63.129.16/32",  # a cloud's platform, in a public block
            "169.254.0.0/16",  # link-local: most clouds' metadata
            "192.0.0.192/32",  # a cloud's metadata
            "224.0.0.0/4",  # multicast
            "240.0.0.0/4",  # reserved, broadcast
        ),
    )
)
"""Not even where a listed network holds them."""
NEVER_V6 = tuple(
    map(
        IPv6Network,
        (
            "::/128",
            "::ffff:0:0/96",  # IPv4-mapped
            "64:ff9b:1::/48",  # a translator's, with an IPv4 address anywhere inside
            "2001::/32",  # Teredo
            "2002::/16",  # 6to4
            "fd00:ec2::/32",  # a cloud's metadata
            "fd20:ce::254/128",  # a cloud's metadata
            "fe80::/10",  # link-local
            "fec0::/10",  # site-local
            "ff00::/8",  # multicast
        ),
    )
)
NOT_PUBLIC_V4 = tuple(
    map(
        IPv4Network,
        (
            "10.0.0.0/8",
            "100.64.0.0/10",  # carriers' own (CGNAT)
            "127.0.0.0/8",
            "172.16.0.0/12",
            "192.0.0.0/24",
            "192.0.2.0/24",
            "192.88.99.0/24",  # 6to4 relays
            "192.168.0.0/16",
            "198.18.0.0/15",
            "198.51.100.0/24",
            "203.0.113.0/24",
        ),
    )
)
PUBLIC_V6 = IPv6Network("2000::/3")
NOT_PUBLIC_V6 = tuple(map(IPv6Network, ("2001::/23", "2001:db8::/32", "3fff::/20")))
NAT64 = IPv6Network("64:ff9b::/96")
"""RFC 6052: the last 32 bits are the IPv4 address that is reached. Name servers of IPv6-only clusters answer so."""


def may_fetch_from(address: IPAddress, private_networks: Sequence[IPNetwork] = ()) -> bool:
    """Whether a link may lead to `address`: it is public, or in one of `private_networks`.

    Link-local, metadata, multicast and unspecified addresses never are, nor is IPv4 in an IPv6 spelling; a NAT64
    address counts as the IPv4 address in it.
    """
    if isinstance(address, IPv6Address) and address in NAT64:
        return may_fetch_from(IPv4Address(int(address) & 0xFFFF_FFFF), private_networks)
    if _is_in(address, NEVER_V4 if isinstance(address, IPv4Address) else NEVER_V6):
        return False
    if _is_in(address, private_networks):
        return True
    if isinstance(address, IPv4Address):
        return not _is_in(address, NOT_PUBLIC_V4)
    return address in PUBLIC_V6 and not _is_in(address, NOT_PUBLIC_V6)


def _is_in(address: IPAddress, networks: Sequence[IPNetwork]) -> bool:
    return any(address in network for network in networks)  # of the other family: never
