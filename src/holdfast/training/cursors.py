"""Where a training stands in its data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.data.sampler import ElasticSampler
from holdfast.training.streams import Stream


class Cursors:
    """Where the data of a training stands: a few numbers for each dataset, in the order in which they are asked for."""

    def __init__(self) -> None:
        self.step = 0
        self.world_size = 0  # that the learning rate is meant for; 0 where that does not matter
        self.progress = _Progress(self)
        # An epoch that the last step has ended, and its metrics: to be saved again by ranks of the next world, if this
        # one ends before all have handed it over.
        self.owed: dict[str, Any] | None = None
        self.streams: list[Stream] = []
        self._own: list[Any] = []
        self._epochs_of_streams: list[int] = []
        self._epoch = 0
        self._samplers: list[ElasticSampler] = []
        self._saved: list[Mapping[str, Any]] = []

    def begin(self, step: int, epoch: int | None, own: Any = None) -> None:
        """Where a checkpoint was saved. One that others made says nothing of data, but perhaps how many epochs are
        done. `own`: what this rank had for itself."""
        self.step = step
        self._epoch = epoch or 0
        self._own = own if isinstance(own, list) else []

    def begin_again(self) -> None:
        """Whoever asks next for a sampler is the first to do so, and goes on from where that was."""
        self._own = self.own_state()
        state, self._samplers, self.streams = self.state_dict(), [], []
        self.load_state_dict(state)

    def own_state(self) -> list[Any]:
        return [stream.state_dict() for stream in self.streams] + self._own[len(self.streams) :]

    def stream_state(self) -> Any:
        """Of the next stream, if there was one. With another number of ranks only its epoch is known."""
        at = len(self.streams)
        if at < len(self._own):
            return self._own[at]
        if at < len(self._epochs_of_streams):
            return Stream.begins(self._epochs_of_streams[at])
        return Stream.begins(self._epoch) if self._epoch and not self._saved else None

    @property
    def epochs(self) -> int:
        if self._samplers:
            return self._samplers[0].epoch
        if self.streams or self._epochs_of_streams:
            return self.streams[0].epoch if self.streams else self._epochs_of_streams[0]
        return int(self._saved[0]["epoch"]) if self._saved else self._epoch

    def adopt(self, sampler: ElasticSampler) -> None:
        """The next one. It goes on from what was saved of it."""
        if len(self._samplers) < len(self._saved):
            sampler.load_state_dict(self._saved[len(self._samplers)])
        elif self._epoch and not self._saved:
            sampler.load_state_dict({**sampler.state_dict(), "epoch": self._epoch})
        self._samplers.append(sampler)

    def state_dict(self) -> dict[str, Any]:
        states: list[Mapping[str, Any]] = [sampler.state_dict() for sampler in self._samplers]
        streams = [stream.epoch for stream in self.streams]
        return {
            "samplers": states + list(self._saved[len(states) :]),
            "streams": streams + self._epochs_of_streams[len(streams) :],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._saved, self._epochs_of_streams = list(state["samplers"]), list(state.get("streams", ()))
        for sampler, saved in zip(self._samplers, self._saved, strict=False):
            sampler.load_state_dict(saved)


class _Progress:
    def __init__(self, cursors: Cursors) -> None:
        self._cursors = cursors

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._cursors.step, "world_size": self._cursors.world_size, "owed": self._cursors.owed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._cursors.step, self._cursors.world_size = state["step"], state["world_size"]
        self._cursors.owed = state.get("owed")
