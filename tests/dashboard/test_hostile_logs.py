"""Hostile log folders: other runs are still shown, memory is bounded, and pages report the problem."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from benchmarks.attacks.files import CONTENTS, KINDS, LINES, attack_dashboard, plant

from manyhands.core import EventLog, event
from manyhands.dashboard import Dashboard
from manyhands.dashboard.log import Log
from manyhands.dashboard.log_source import dump
from manyhands.dashboard.log_tail import LINE_LIMIT, Tail
from manyhands.dashboard.metrics import Metrics
from manyhands.dashboard.run import RunFolder
from manyhands.dashboard.run_curves import MOST_CURVES
from manyhands.dashboard.run_library import Library
from manyhands.dashboard.study import StudyFolder

from .logs import Written, a_run
from .test_reading import read_all


def test_hostile_run_does_not_affect_other_runs(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    with Dashboard([tmp_path / "runs"]) as dashboard:
        outcomes = attack_dashboard(tmp_path / "runs", dashboard.url)
        assert dashboard.library.error == ""
    assert len(outcomes) > 40
    assert [outcome for outcome in outcomes if not outcome.is_refused_with_reason] == []


def test_unreadable_lines_are_counted_on_the_run_page(tmp_path: Path) -> None:
    run = Written(tmp_path / "runs" / "first")
    run.start()
    with (run.path / "events.jsonl").open("ab") as file:
        file.write(b"".join(line + b"\n" for line in LINES.values()))
    run.steps({1: 2.0})
    run.close()
    library = Library([tmp_path / "runs"])
    read_all(library)
    told = library.detail("runs/first", "run")
    assert told is not None
    assert told["loss"] == 2.0
    assert told["unreadable"] == f"{len(LINES)} lines could not be read"


def test_overlong_line_uses_bounded_memory_and_next_line_is_read(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"a": 1}\n' + b"x" * (5 * LINE_LIMIT) + b'\n{"a": 2}\n' + b"[" * (2 * LINE_LIMIT))
    tail, found, largest = Tail(path), [], 0
    for _ in range(100):
        before = tail.num_read
        found += tail.read()
        largest = max(largest, tail.num_read - before)
    assert found == [{"a": 1}, {"a": 2}]
    assert tail.num_damaged == 2
    assert largest < 2 * LINE_LIMIT
    with path.open("ab") as file:
        file.write(b'\n{"a": 3}\n')
    assert [tail.read() for _ in range(3)][-1] in ([], [{"a": 3}])
    assert tail.num_damaged == 2


def test_replaced_or_truncated_log_file_is_followed(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    a_run(runs / "first", {1: 3.0})
    library = Library([runs])
    read_all(library)
    log = runs / "first" / "events.jsonl"
    whole = log.read_bytes()
    for kind in KINDS:
        log.unlink()
        plant(log, kind)
        read_all(library)
        assert "must be a regular file" in library.sources["runs/first"].summary()["unreadable"]
        log.rmdir() if kind == "folder" else log.unlink()
        log.write_bytes(whole)
        read_all(library)
        read_all(library)
        assert library.sources["runs/first"].summary()["unreadable"] == ""
    os.truncate(log, 10)
    read_all(library)
    log.write_bytes(whole)
    for _ in range(3):
        read_all(library)
    assert library.sources["runs/first"].summary()["loss"] == 3.0


def test_number_of_metric_curves_is_bounded(tmp_path: Path) -> None:
    run = Written(tmp_path / "runs" / "first")
    run.start()
    for number in range(3 * MOST_CURVES // 100):
        run.say("epoch", epoch=0, step=1, metrics={f"metric-{number}-{i}": 1.0 for i in range(100)})
        run.say("log", step=1, values={f"{'x' * 1000}{number}": 1.0, "text": "no number"})
    run.close()
    library = Library([tmp_path / "runs"])
    read_all(library)
    source = library.sources["runs/first"]
    assert isinstance(source, RunFolder)
    assert (len(source.curves.metrics), len(source.curves.logged)) == (MOST_CURVES, 0)
    assert f"curves beyond {MOST_CURVES}" in source.unreadable


def test_event_with_future_timestamp_does_not_keep_a_run_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Written(tmp_path / "runs" / "first")
    run.t = 9e10
    run.start()
    run.close()
    library = Library([tmp_path / "runs"])
    read_all(library)
    now = library.sources["runs/first"].changed
    assert now < 9e10
    monkeypatch.setattr("manyhands.dashboard.log_source.time.time", lambda: now + 1000)
    assert library.sources["runs/first"].state == "interrupted"


def test_access_log_lines_are_counted_or_reported_unreadable(tmp_path: Path) -> None:
    folder = tmp_path / "logs" / "first"
    folder.mkdir(parents=True)
    (folder / "events.jsonl").write_text("")
    times = [1.0, 2.0**36, 7e10, *[float(2**n) for n in range(30)]]
    lines = [{"t": t, "status": 200, "ms": 1.0} for t in times]
    bad = [b'{"t": 1e300, "status": 200, "ms": 1}', b'{"t": 1, "status": "200", "ms": 1}', b'{"t": 1, "status": 200}']
    bad += [b'{"t": 1, "status": 200, "ms": Infinity}', b'{"t": NaN, "status": 200, "ms": 1}']
    (folder / "access.jsonl").write_bytes(b"\n".join([*bad, *(json.dumps(one).encode() for one in lines), b""]))
    library = Library([tmp_path / "logs"])
    read_all(library)
    log = library.sources["logs/first"]
    assert isinstance(log, Log)
    assert sum(bucket.num for bucket in log.buckets.values()) == len(lines)
    assert log.unreadable == f"{len(bad)} lines could not be read"


def test_readable_part_of_a_damaged_journal_is_shown(tmp_path: Path) -> None:
    journal = tmp_path / "studies" / "first" / "journal.log"
    journal.parent.mkdir(parents=True)
    good = b'{"op_code": 4, "study_id": 0, "distributions": {}, "given": {"lr": 0.1}}'
    bad = [
        b'{"op_code": 2, "user_attr": {"manyhands": {"objectives": "none"}}}',
        b'{"op_code": 6, "trial_id": -1, "state": 1}',
        b'{"op_code": 7, "trial_id": 10000000000, "step": 1, "intermediate_value": 1, "seconds": 1}',
        b'{"op_code": [], "trial_id": 0}',
        *CONTENTS.values(),
    ]
    journal.write_bytes(b"\n".join([good, *bad, good, b""]))
    library = Library([tmp_path / "studies"])
    read_all(library)
    study = library.sources["studies/first"]
    assert isinstance(study, StudyFolder)
    assert study.counts["running"] == 2
    assert study.unreadable == f"{len(bad)} lines could not be read"
    assert json.loads(dump(study.detail()))["num_trials"] == 2


def test_failing_source_is_replaced_and_shows_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("first", "second"):
        a_run(tmp_path / "runs" / name)
    library = Library([tmp_path / "runs"])
    real = RunFolder.summary

    def summary(run: RunFolder) -> dict[str, object]:
        if run.id == "runs/first" and not run.failure:
            raise RecursionError("too deep")
        return real(run)

    monkeypatch.setattr(RunFolder, "summary", summary)
    read_all(library)
    told = {run["id"]: run["unreadable"] for run in library.overview()["runs"]}
    assert told == {"runs/first": "it could not be read: RecursionError: too deep", "runs/second": ""}


def test_run_names_with_control_characters_are_escaped_and_found(tmp_path: Path) -> None:
    for name in ("a\nb", "<b>", "a\x1b[31m", os.fsdecode(b"\xff\xfe")):
        a_run(tmp_path / "runs" / name)
    library = Library([tmp_path / "runs"])
    read_all(library)
    assert len(library.sources) == 4
    assert all(name.isprintable() for name in library.sources)
    assert all(library.detail(name, "run") for name in library.sources)


def test_thousands_of_runs_are_listed(tmp_path: Path) -> None:
    for number in range(2000):
        folder = tmp_path / "runs" / f"{number:04d}"
        folder.mkdir(parents=True)
        (folder / "run.json").write_text('{"spec": {}, "devices": []}')
    library = Library([tmp_path / "runs"])
    read_all(library)
    assert len(library.overview()["runs"]) == 2000


def test_invalid_metrics_response_is_shown_as_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import http.server
    import threading

    class Hostile(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.wfile.write(b"manyhands\r\n" if self.server.is_raw else b"HTTP/1.0 200 OK\r\n\r\n" + LINE)  # type: ignore[attr-defined]

        def log_message(self, format: str, *args: object) -> None:
            pass

    LINE = b'manyhands_request_seconds_bucket{model="m"} 1\nmanyhands_queue_rows{model="m"} x\n'
    with http.server.HTTPServer(("127.0.0.1", 0), Hostile) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        metrics = Metrics(f"http://127.0.0.1:{server.server_address[1]}")
        for is_raw in (True, False):
            server.is_raw = is_raw  # type: ignore[attr-defined]
            metrics.look()
            assert "does not answer" in metrics.error
        server.shutdown()
        thread.join()


class HostileMetrics(BaseHTTPRequestHandler):
    """A server whose metrics trickle in, or have very many values."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        with contextlib.suppress(OSError):
            if self.path.startswith("/slow"):
                for _ in range(100):
                    self.wfile.write(b"#")
                    time.sleep(0.05)
            else:
                lines = (f'manyhands_requests_total{{model="m{number}",version="1"}} 1' for number in range(1000))
                self.wfile.write("\n".join(lines).encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hostile_server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), HostileMetrics) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_metrics_that_trickle_in_do_not_hold_up_other_servers(
    hostile_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("manyhands.dashboard.metrics.TIMEOUT", 0.3)
    metrics, start = Metrics(f"{hostile_server}/slow"), time.monotonic()
    metrics.look()
    assert time.monotonic() - start < 3
    assert "not complete in time" in metrics.error


def test_values_of_a_server_that_are_kept_are_bounded(hostile_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyhands.dashboard.metrics.MOST_VALUES", 3500)
    metrics = Metrics(hostile_server)
    for _ in range(6):
        metrics.look()
    assert metrics.error == ""
    assert len(metrics.to_dict()["versions"]) == 1000
    assert [len(version["series"]["x"]) for version in metrics.to_dict()["versions"]] == [2] * 1000


def test_event_log_refuses_to_write_through_a_symbolic_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("")
    (tmp_path / "events.jsonl").symlink_to("elsewhere")
    with pytest.raises(ValueError, match="a symbolic link"):
        EventLog(tmp_path / "events.jsonl").write(event("start"))
    assert (tmp_path / "elsewhere").read_text() == ""
