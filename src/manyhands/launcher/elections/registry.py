"""The kinds of elections, by the scheme of their address."""

from __future__ import annotations

from ...core import SettingsError
from .election import Election, Voter
from .etcd import EtcdElection

ELECTIONS = {"etcd": EtcdElection.at}


def election_at(address: str, voter: Voter) -> Election:
    """Return the election at an address such as "etcd://host1:2379,host2:2379"; connect to nothing yet."""
    scheme, separator, endpoints = address.partition("://")
    if not separator or scheme not in ELECTIONS:
        known = ", ".join(f"{name}://HOST:PORT" for name in ELECTIONS)
        raise SettingsError(
            f"coordination must be the address of a service that elects the coordinator: {known}",
            got=repr(address),
            remedy="pass for example etcd://host1:2379,host2:2379,host3:2379",
        )
    return ELECTIONS[scheme](endpoints, voter)
