"""What a run leaves behind and what it says: events, incidents, and the words for both."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

import msgspec

from holdfast.agent.rundir import RunDirectory
from holdfast.control import protocol
from holdfast.control.causes import Kind
from holdfast.control.incidents import Incident
from holdfast.observe import explain, record
from holdfast.observe.events import EventLog, Sink, iso
from holdfast.observe.record import IncidentClosed, IncidentNoted, IncidentOpened, JobEnded, NodeExamined

Say = Callable[..., None]


class Records:
    def __init__(
        self,
        run_dir: RunDirectory,
        sinks: list[Sink],
        say: Say,
        complain: Say,
        host: str = "",
        soon: Callable[[Callable[[], None]], object] = lambda call: call(),
    ) -> None:
        self.run_dir = run_dir
        self._soon = soon  # what need not be done before the next world begins
        self.events = EventLog(run_dir.join(record.NAME), sinks, complain, host)
        self.incidents: list[Incident] = []  # the closed ones
        self._stays_out = False  # why is worth to be kept
        self._say, self._complain = say, complain
        self._started_s = time.monotonic()

    def merge(self, message: protocol.Recorded) -> None:
        """What another node has recorded."""
        self.events.merge(message.lines, time.monotonic() - self.events.start_s - message.now_s)

    def examined(self, found: NodeExamined) -> bytes:
        """The line of it."""
        self._stays_out = not found.fit
        return self.events.emit(found)

    def opened(self, incident: Incident) -> None:
        self._note(incident, IncidentOpened, explain.opened(incident) if incident.restarted else ())

    def closed(self, incident: Incident) -> None:
        self.incidents.append(incident)
        self._note(incident, IncidentClosed, explain.closed(incident))

    def conclude(self, kind: Kind | None, reason: str, steps: int) -> Incident | None:
        """Tell how the job went; returns the incident that ended it, if one did."""
        wall_s = time.monotonic() - self._started_s
        lost_s = sum(incident.lost_s for incident in self.incidents)
        outcome = kind.value if kind is not None else "succeeded"
        self.events.emit(JobEnded(outcome, reason, steps, wall_s, lost_s))
        self.events.close()
        failed = kind is not None and self.incidents and not self.incidents[-1].restarted
        last = self.incidents[-1] if failed else None
        if last is not None:
            self._say(*explain.given_up(last, self.run_dir.path))
        elif kind is not None:
            self._say(reason)
        if any(incident.restarted for incident in self.incidents):
            self._say(*explain.summary(steps, self.incidents, wall_s, self.run_dir.path if last is None else None))
        if not self.incidents and not steps and not self._stays_out:
            self.run_dir.discard_if_temporary()
        elif not self.incidents:
            self.run_dir.keep_for_now()
        if self.run_dir.path is not None:
            self._say(explain.next_commands(self.run_dir.path, failed=kind is not None))
        return last

    def _note(self, incident: Incident, kind: type[IncidentNoted], said: Sequence[str]) -> None:
        noted = kind(
            **msgspec.structs.asdict(incident),
            failed_at=iso(time.time() - (time.monotonic() - incident.failed_at_s)),
            phases=incident.phases_s(),
            cost_s=incident.lost_s,
        )
        self.events.emit(noted)

        def tell() -> None:
            self.events.sync()
            self._write(noted)
            if said:
                self._say(*said)

        self._soon(tell)

    def _write(self, noted: IncidentNoted) -> None:
        """One file per incident, rewritten when what it cost is known."""
        if (path := self.run_dir.join("incidents", f"{noted.number:04}.json")) is not None:
            try:
                with open(path + ".part", "wb") as file:
                    file.write(msgspec.json.format(msgspec.json.encode(noted), indent=2) + b"\n")
                os.replace(path + ".part", path)
            except OSError as failure:
                self._complain(f"cannot write {path}: {failure.strerror}; training goes on")
