"""What an interruption of training goes through until the next step, and when."""

from dataclasses import dataclass, field

from eagleray.platform.clock import steady_time

PHASES = ("gathered", "seated", "met", "restored", "stepped")


@dataclass
class Interruption:
    """From the moment at which a rank was missed, or all were asked to pause.

    Attributes:
        event: Under which it is recorded.
    """

    event: str
    begun_s: float = field(default_factory=steady_time)
    _reached: dict[str, float] = field(default_factory=dict)

    def reach(self, phase: str) -> None:
        """Note that a phase is over; the first time counts."""
        self._reached.setdefault(phase, steady_time())

    def seconds(self) -> dict[str, float]:
        """Phase -> seconds since the one before it."""
        found, before = {}, self.begun_s
        for phase in PHASES:
            if phase in self._reached:
                found[f"{phase}_s"] = round(self._reached[phase] - before, 3)
                before = self._reached[phase]
        return found
