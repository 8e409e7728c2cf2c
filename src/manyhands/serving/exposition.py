"""Metrics in Prometheus' text format, under manyhands' and under TensorFlow Serving's names."""

from __future__ import annotations

from collections.abc import Iterator

from .catalogue import Catalogue
from .metrics import Histogram
from .version import Version

KIND = b"text/plain; version=0.0.4; charset=utf-8"
_EVERY = 9
"""Export every ninth of the fine latency bounds, so that each is twice the previous one."""


def exposition(catalogue: Catalogue) -> bytes:
    """Return the text of all metrics."""
    versions = [v for model in catalogue.models.values() for v in model.versions.values()]
    return "\n".join([*_lines(versions), *_choices(catalogue), ""]).encode()


def _choices(catalogue: Catalogue) -> Iterator[str]:
    """Yield which version of each model is current, its labels, the traffic splits, and why versions are not served."""
    models = list(catalogue.models.values())
    yield "# TYPE manyhands_current gauge"
    yield from (f"manyhands_current{{{_labels(model.current)}}} 1" for model in models if model.current is not None)
    yield "# TYPE manyhands_label gauge"
    for model in models:
        for label, number in model.labels.items():
            yield f'manyhands_label{{model="{model.name}",version="{number}",label="{label}"}} 1'
    yield "# TYPE manyhands_split_share gauge"
    for name, shares in catalogue.splits.items():
        total = sum(share.weight for share in shares)
        for share in shares:
            version = "" if share.version is None else share.version
            labels = f'model="{share.model}",version="{version}",name="{name}"'
            yield f"manyhands_split_share{{{labels}}} {share.weight / total:.6g}"
    yield "# TYPE manyhands_failed gauge"
    for v in (v for model in models for v in model.versions.values() if v.error):
        reason = v.error.replace("\\", "/").replace('"', "'")
        yield f'manyhands_failed{{{_labels(v)},reason="{reason}"}} 1'


def _lines(versions: list[Version]) -> Iterator[str]:
    yield "# TYPE manyhands_requests_total counter"
    for v in versions:
        for code, num in v.metrics.codes.items():
            yield f'manyhands_requests_total{{{_labels(v)},code="{code}"}} {num}'
    yield "# TYPE manyhands_request_seconds histogram"
    for v in versions:
        yield from _histogram("manyhands_request_seconds", _labels(v), v.metrics.latency, _EVERY)
    yield "# TYPE manyhands_batch_rows histogram"
    for v in versions:
        yield from _histogram("manyhands_batch_rows", _labels(v), v.metrics.batches)
    yield "# TYPE manyhands_compute_seconds_total counter"
    yield from (f"manyhands_compute_seconds_total{{{_labels(v)}}} {v.metrics.compute:.6f}" for v in versions)
    yield "# TYPE manyhands_queue_rows gauge"
    yield from (f"manyhands_queue_rows{{{_labels(v)}}} {v.num_queued}" for v in versions)
    yield "# TYPE manyhands_replicas gauge"
    yield from (f"manyhands_replicas{{{_labels(v)}}} {len(v.replicas)}" for v in versions)
    yield "# TYPE manyhands_available gauge"
    yield from (f"manyhands_available{{{_labels(v)}}} {int(v.is_available)}" for v in versions)
    yield "# TYPE :tensorflow:serving:request_count counter"
    for v in versions:
        for code, num in v.metrics.codes.items():
            labels = f'model_name="{v.model}",version="{v.number}",status="{code}"'
            yield f":tensorflow:serving:request_count{{{labels}}} {num}"
    yield "# TYPE :tensorflow:serving:request_latency histogram"
    for v in versions:
        labels = f'model_name="{v.model}",version="{v.number}",API="Predict",entrypoint="REST"'
        yield from _histogram(":tensorflow:serving:request_latency", labels, v.metrics.latency, _EVERY, scale=1e6)


def _labels(version: Version) -> str:
    return f'model="{version.model}",version="{version.number}"'


def _histogram(name: str, labels: str, histogram: Histogram, every: int = 1, scale: float = 1.0) -> Iterator[str]:
    for bound, num in histogram.cumulated(every):
        shown = "+Inf" if bound == float("inf") else f"{bound * scale:.6g}"
        yield f'{name}_bucket{{{labels},le="{shown}"}} {num}'
    yield f"{name}_sum{{{labels}}} {histogram.total * scale:.9g}"
    yield f"{name}_count{{{labels}}} {histogram.num}"
