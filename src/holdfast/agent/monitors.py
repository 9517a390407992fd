"""The agent's monitors: which of its ranks hang, what they are doing, and what scripts say through the client."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable

import msgspec

from holdfast.agent.doorbell import Answer, Doorbell, Handed, Job, Now, Pace, Request, Stacks
from holdfast.agent.evidence import Evidence
from holdfast.agent.options import Options
from holdfast.agent.records import Records
from holdfast.agent.sampling import Sampler
from holdfast.agent.vault import Vault
from holdfast.agent.watching import Watching
from holdfast.agent.world import RunningWorld, program_name
from holdfast.control import acts, protocol
from holdfast.control.hangs import Busy, Hang, Watch
from holdfast.observe import record
from holdfast.wire import messages
from holdfast.wire.snapshots import Attach


class Monitors:
    """Kept over worlds. What is found becomes events of the node."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        options: Options,
        records: Records,
        post: Callable[[acts.Event], None],
        complain: Callable[[str], None],
        nproc: int,
        vault: Vault,
    ) -> None:
        self._options = options
        self._events = records.events
        self._run_dir = records.run_dir.path
        self._post = post
        self._complain = complain
        self._nproc = nproc
        self._vault = vault
        self._running: RunningWorld | None = None
        self._watch = Watch(options.rules)
        self._watching = Watching(loop, self._watch, self._hung, self._corrupt)
        self._sampler = Sampler(loop, records.events, lambda generation, window: post(acts.Paced(generation, window)))
        self._evidence = Evidence(records.run_dir, post)
        self._doorbell = Doorbell(loop, self._answer)
        self._doorbell.start()

    def begin(self, running: RunningWorld) -> None:
        self._running = running
        cold = isinstance(self._options.program, messages.Command)
        self._watching.begin(running.world.generation, running.world.first_rank, running.pages, cold)
        self._sampler.begin(running.world.generation, running.world.first_rank, running.pages)

    def end(self) -> None:
        self._running = None
        self._watching.end()
        self._sampler.end()

    def close(self) -> None:
        self._doorbell.close()

    def exited(self, rank: int) -> None:
        self._watching.exited(rank)

    def agree(self, heard: protocol.Heard) -> None:
        now_s = time.monotonic()
        self._watch.agree(heard.gaps_s, heard.trained)
        self._watching.say_limits()
        done_s = now_s - heard.calm_for_s if heard.calm_for_s >= 0 else 0.0
        self._watch.others(Busy(saving_s=now_s + heard.busy_for_s, done_s=done_s, stepped=heard.stepped))

    def filled(self, beat: protocol.Beat) -> protocol.Beat:
        """The beat, with what was learned here, and whom other nodes' ranks may be waiting for."""
        now_s = time.monotonic()
        busy = self._watching.busy()
        return msgspec.structs.replace(
            beat,
            gaps_s=self._watch.gaps_s,
            trained=self._watch.learned,
            busy_for_s=max(0.0, busy.evaluating_s - now_s, busy.saving_s - now_s),
            calm_for_s=now_s - busy.done_s if busy.done_s else -1.0,
        )

    def dump(self, wanted: acts.DumpStacks) -> None:
        self._evidence.dump(self._running, wanted)

    def shown(self, shown: protocol.Shown) -> None:
        self._evidence.shown(shown)

    def reported(self, report: messages.Report | None) -> None:
        """What ranks say of themselves, and do not leave in their beacons. None: some may have wanted to poke."""
        match report:
            case None:
                self._watching.look_at_all()
            case messages.Poke(rank=rank):
                self._watching.poked(rank)
            case messages.Sections(rank=rank, slot=slot, names=names):
                self._watching.name(rank, slot, names)
            case messages.Learned(rank=rank, state=state):
                self._events.emit(record.TimeoutsLearned(rank, state[:10_000]))
                self._post(acts.Learned(state))
            case messages.Control(rank=rank, generation=generation, action=action, description=description):
                self._events.emit(record.RankAsked(rank, action, description))
                self._post(acts.Asked(generation, rank, action, description))

    def _hung(self, hang: Hang, headline: str) -> None:
        assert self._running is not None
        generation = self._running.world.generation
        self._events.emit(record.RankHung(generation, hang.rank, headline, hang.limit_s))
        self._post(acts.Hung(generation, hang, headline))

    def _corrupt(self, rank: int, why: str) -> None:
        self._events.emit(record.BeaconCorrupt(rank, why))
        self._complain(f"the beacon of rank {rank} is corrupt ({why}); whether it hangs cannot be seen any more")

    @property
    def doorbell(self) -> str:
        """Where ranks can ask; '' if they cannot."""
        return self._doorbell.name

    async def _answer(self, request: Request, pid: int) -> Answer | Handed:
        """Somebody on this machine asks."""
        if isinstance(request, Attach):
            return await self._vault.attach(self._running, pid, request)
        if isinstance(request, Stacks):
            return await self._evidence.peek()
        if isinstance(request, Now):
            return Pace(self._sampler.now(), self._watching.signs())
        return Job(
            run_id=self._options.settings.run_id,
            pid=os.getpid(),
            nproc=self._nproc,
            program=program_name(self._options.program),
            generation=self._running.world.generation if self._running is not None else -1,
            run_dir=self._run_dir or "",
        )
