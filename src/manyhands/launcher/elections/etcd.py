"""Election by etcd: the coordinator is the host whose key exists, and the key lives as long as the host's lease.

Uses etcd's JSON gateway (`/v3/…`), which every etcd from version 3.4 has.
"""

from __future__ import annotations

import base64
import http.client
import json
import threading
from collections.abc import Sequence
from typing import Any

from ...core import RunError, parse_json
from ...distributed import parse_endpoint
from .election import Election, ElectionUnreachable, Leader, Voter, clock

LEASE_SECONDS = 6
"""Seconds without a renewal after which etcd removes the coordinator's key."""
MARGIN_SECONDS = 1.0
"""Seconds before the end of its lease at which a coordinator stops: clocks differ in speed, and stopping takes time."""
RENEW_SECONDS = 1.0
REQUEST_SECONDS = 1.5
OVER_SECONDS = 600
"""Seconds for which etcd remembers that a job is over, for hosts that were disconnected when it ended."""
MAX_ANSWER = 64 << 10


class EtcdElection(Election):
    """Elects the coordinator by a transaction that creates a key with a lease, if the key does not exist.

    The entry is signed with the job's token, so that hosts connect only to an address that a host of the job has
    written. Terms are etcd's revisions, which only grow.
    """

    def __init__(self, endpoints: Sequence[tuple[str, int]], voter: Voter) -> None:
        self._endpoints, self._voter = list(endpoints), voter
        name = f"manyhands/{voter.prove('election')[:32]}"
        self._key, self._over_key = _encoded(name), _encoded(f"{name}/over")
        self._term = 0
        self._lease = ""
        self._valid_until = 0.0
        self._ended = threading.Event()
        self._requesting = threading.Lock()

    @classmethod
    def at(cls, endpoints: str, voter: Voter) -> EtcdElection:
        """Return the election at HOST:PORT, or at several members of one etcd cluster, separated by commas."""
        return cls([parse_endpoint(one) for one in endpoints.rstrip("/").split(",")], voter)

    def leader(self) -> Leader | None:
        found = self._call("/v3/kv/range", key=self._key).get("kvs", [])
        if not found:
            return None
        try:
            term = int(found[0]["create_revision"])
            entry = parse_json(base64.b64decode(found[0]["value"]))
            host, address, port = str(entry["host"]), str(entry["address"]), int(entry["port"])
            is_ours = self._voter.accepts(str(entry["proof"]), "leader", host, address, str(port))
        except (ValueError, KeyError, TypeError, RunError):
            is_ours = False
        if not is_ours:
            raise RunError(
                "the entry of this job in etcd is not signed with its token: use an etcd that only your hosts reach"
            )
        return Leader(host, address, port, term)

    def campaign(self, candidate: Leader) -> Leader | None:
        began = clock()
        lease = str(self._call("/v3/lease/grant", TTL=LEASE_SECONDS)["ID"])
        host, address, port = candidate.where
        proof = self._voter.prove("leader", host, address, str(port))
        value = {"host": host, "address": address, "port": port, "proof": proof}
        answer = self._call(
            "/v3/kv/txn",
            compare=[{"key": self._key, "target": "CREATE", "create_revision": "0", "result": "EQUAL"}],
            success=[{"request_put": {"key": self._key, "value": _encoded(json.dumps(value)), "lease": lease}}],
        )
        if not answer.get("succeeded"):
            self._revoke(lease)
            return None
        self._lease, self._valid_until = lease, began + LEASE_SECONDS - MARGIN_SECONDS
        self._ended = threading.Event()
        threading.Thread(target=self._keep, args=(self._ended,), name="manyhands-lease", daemon=True).start()
        self._term = int(answer["header"]["revision"])
        return Leader(*candidate.where, term=self._term)

    @property
    def holds(self) -> bool:
        return bool(self._lease) and clock() < self._valid_until

    def renew(self) -> bool:
        lease, began = self._lease, clock()
        if not self.holds:
            # Once the lease may have ended, this host must be elected again.
            return False
        try:
            answer = self._call("/v3/lease/keepalive", ID=lease).get("result", {})
        except ElectionUnreachable:
            return False
        if int(answer.get("TTL", 0)) < LEASE_SECONDS:
            self._valid_until = 0.0
            return False
        if self._lease == lease and self.holds:
            self._valid_until = max(self._valid_until, began + LEASE_SECONDS - MARGIN_SECONDS)
        return self.holds

    def is_over(self, term: int) -> bool:
        found = self._call("/v3/kv/range", key=self._over_key).get("kvs", [])
        return bool(found) and int(found[0]["mod_revision"]) > term

    def resign(self, *, is_over: bool) -> None:
        self._ended.set()
        lease, self._lease = self._lease, ""
        if not lease:
            return
        try:
            if is_over:
                note = str(self._call("/v3/lease/grant", TTL=OVER_SECONDS)["ID"])
                self._call("/v3/kv/put", key=self._over_key, value=_encoded(str(self._term)), lease=note)
        except ElectionUnreachable:
            # The other hosts learn it from their connections.
            pass
        self._revoke(lease)

    def _keep(self, ended: threading.Event) -> None:
        while not ended.wait(RENEW_SECONDS) and self.holds:
            self.renew()

    def _revoke(self, lease: str) -> None:
        try:
            self._call("/v3/lease/revoke", ID=lease)
        except ElectionUnreachable:
            # It ends by itself.
            return

    def _call(self, path: str, **values: Any) -> dict[str, Any]:
        """Return etcd's answer; try every member, beginning with the one that answered last."""
        errors = []
        for endpoint in list(self._endpoints):
            try:
                answer = _request(endpoint, path, values)
            except (OSError, http.client.HTTPException, ValueError) as error:
                errors.append(f"{endpoint[0]}:{endpoint[1]}: {error or type(error).__name__}")
                continue
            with self._requesting:
                self._endpoints.remove(endpoint)
                self._endpoints.insert(0, endpoint)
            return answer
        raise ElectionUnreachable(f"etcd does not answer ({'; '.join(errors)})")


def _request(endpoint: tuple[str, int], path: str, values: dict[str, Any]) -> dict[str, Any]:
    connection = http.client.HTTPConnection(*endpoint, timeout=REQUEST_SECONDS)
    try:
        connection.request("POST", path, json.dumps(values), {"Content-Type": "application/json"})
        response = connection.getresponse()
        data = response.read(MAX_ANSWER)
        if response.status != http.client.OK:
            raise OSError(f"status {response.status}: {data[:200].decode(errors='replace').strip()}")
    finally:
        connection.close()
    answer = parse_json(data)
    if not isinstance(answer, dict):
        raise ValueError("the answer is not a JSON object")
    return answer


def _encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()
