"""The network to which a limit by address applies: a client may use all addresses of its own."""

from ipaddress import IPv6Address, ip_network

SITE_BITS = 64  # leading bits that all addresses of an IPv6 subscriber share


def network_of(address: str) -> str:
    """The address itself of IPv4, also written as IPv6 (RFC 4291, 2.5.5.2), and the subscriber's network of any other
    IPv6 address.
    """
    if ":" not in address:
        return address
    parsed = IPv6Address(address.partition("%")[0])
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ip_network((parsed.packed, SITE_BITS), strict=False))
