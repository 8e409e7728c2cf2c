"""Public function `remote_ensemble`: an ensemble whose members run in processes or on servers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from .. import ensembles
from ..core import SettingsError, Signature
from ..ensembles import Ensemble, RemoteEnsemble
from .ensemble import pairs
from .runtime import On, runtime


def remote_ensemble(
    ensemble: Ensemble | Sequence[str],
    *,
    on: On = None,
    deadline: float = 1.0,
    quorum: int | None = None,
    combine: str = "mean",
    data: Any = None,
    token: str | None = None,
) -> RemoteEnsemble:
    """Return an ensemble whose members run in separate processes, or are models on servers.

    Args:
        ensemble: An Ensemble, or the addresses of served models such as "http://host:8501/digits".
        on: Devices to which the processes of an Ensemble's members are assigned in turn.
        deadline: Seconds within which members must answer a query.
        quorum: Number of members that must have answered by the deadline; by default more than half of them.
        combine: How predictions of served models are combined, as for `mh.ensemble`; for an Ensemble its own
            combination is used.
        data: A pair (inputs, labels), for served models only. The labels decide whether outputs are class scores, and
            the combinations "weighted" and "stacked" are fitted to them.
        token: Access token of the servers of served models.

    Example:
        with mh.remote_ensemble(ensemble, on="cpu*2", deadline=0.5, quorum=3) as remote:
            answer = remote.ask(images)
            answer.outputs, answer.members, answer.missing
    """
    if isinstance(ensemble, Ensemble):
        engine, devices, _ = runtime.find_devices(on)
        handles: list[ensembles.ProcessMember] = []
        try:
            for number, member in enumerate(ensemble.members):
                handles.append(ensembles.ProcessMember(engine, member, devices[number % len(devices)]))
            for handle in handles:
                handle.ready()
            return RemoteEnsemble(
                handles, ensemble.rule, ensemble.members[0].signature, deadline=deadline, quorum=quorum
            )
        except BaseException:
            for handle in handles:
                handle.close()
            raise
    return _served(list(ensemble), deadline, quorum, combine, data, token)


def _served(
    urls: Sequence[str], deadline: float, quorum: int | None, combine: str, data: Any, token: str | None
) -> RemoteEnsemble:
    """Return an ensemble of the models at the given addresses, such as "http://host:8501/digits"."""
    from ..serving import Client

    if not urls or not all(isinstance(url, str) for url in urls):
        raise SettingsError(
            "remote_ensemble needs an Ensemble, or a list of addresses",
            got=repr(urls)[:80],
            remedy='pass the result of mh.ensemble, or for example ["http://host:8501/digits"]',
        )
    signatures, asking = [], []
    for url in urls:
        parts = urlsplit(url)
        model = parts.path.strip("/")
        if not model:
            rule = "an address must name a model, as in http://host:8501/digits"
            raise SettingsError(rule, got=repr(url), remedy="add the name of the model")
        client = Client(f"{parts.scheme}://{parts.netloc}", token=token, timeout=deadline)
        signatures.append(client.signature(model))
        asking.append(_Asking(client, model))
    ensembles.require_alike(list(urls), signatures)
    inputs, labels = pairs(signatures[0], data)[0] if data is not None else (_zeros(signatures[0]), None)
    answers = [ask(inputs) for ask in asking]
    together = {name: torch.stack([answer[name] for answer in answers]) for name in answers[0]}
    rule_of = ensembles.CombinationRule.of(combine, together, labels, False)
    handles = [ensembles.CalledMember(ask, ask.model) for ask in asking]
    return RemoteEnsemble(handles, rule_of, signatures[0], deadline=deadline, quorum=quorum)


def _zeros(signature: Signature) -> dict[str, Tensor]:
    """Return two rows of zeros for each input, to find out the shapes and types of a model's outputs."""
    return {
        name: torch.zeros([2 if size is None else size for size in spec.shape], dtype=getattr(torch, spec.dtype))
        for name, spec in signature.inputs.items()
    }


class _Asking:
    """Function that sends inputs to one model on a server and returns its outputs by name."""

    def __init__(self, client: Any, model: str) -> None:
        self._client, self.model = client, model

    def __call__(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        found = self._client(self.model, inputs)
        answers = found if isinstance(found, dict) else {"output": found}
        return {name: torch.as_tensor(value) for name, value in answers.items()}
