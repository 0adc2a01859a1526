"""Every error that a user meets says what was wrong, where, and what to do."""

from __future__ import annotations

from typing import Any, ClassVar


class SeedrlError(Exception):
    """An error of one to three lines: `what` was wrong, `where`, and what to `do`."""

    exit_code: ClassVar[int] = 1

    def __init__(
        self, *, what: str, where: str = "", do: str = "", traceback_text: str = ""
    ) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.do = do
        self.traceback_text = traceback_text

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"  at: {self.where}")
        if self.do:
            lines.append(f"  do: {self.do}")
        return "\n".join(lines)

    def to_wire(self) -> dict[str, str]:
        """The error as plain strings, for another process; the inverse of `from_wire`."""
        return {
            "kind": type(self).__name__,
            "what": self.what,
            "where": self.where,
            "do": self.do,
            "traceback": self.traceback_text,
        }


class ConfigError(SeedrlError):
    """The configuration or the command line asks for something wrong; nothing was started."""

    exit_code = 2


class SpecError(SeedrlError):
    """A space that cannot be served, or two that ought to be equal and are not."""

    exit_code = 2


class AddressError(SeedrlError):
    """An address of the wrong form, in use, or not permitted."""

    exit_code = 2


class CheckpointError(SeedrlError):
    """A checkpoint that is torn, missing, or of another architecture."""

    exit_code = 2


class LeaseRefused(SeedrlError):
    """The server refuses the seats asked for."""

    exit_code = 2


class EnvError(SeedrlError):
    """An environment raised, or broke its word; `traceback_text` holds its own traceback."""


class RunError(SeedrlError):
    """A run that had begun failed."""


class ProtocolError(SeedrlError):
    """A peer that does not speak our protocol, or another version of it."""


class ShapeError(SeedrlError):
    """A tensor of the wrong shape or dtype at a public function."""


_KINDS: dict[str, type[SeedrlError]] = {
    kind.__name__: kind
    for kind in (
        SeedrlError, ConfigError, SpecError, AddressError, CheckpointError, LeaseRefused, EnvError,
        RunError, ProtocolError, ShapeError,
    )
}  # fmt: skip


def from_wire(fields: dict[str, Any]) -> SeedrlError:
    """The error that another process sent with `to_wire`; an unknown kind becomes a SeedrlError."""
    kind = _KINDS.get(str(fields.get("kind")), SeedrlError)
    return kind(
        what=str(fields.get("what", "an unnamed error")),
        where=str(fields.get("where", "")),
        do=str(fields.get("do", "")),
        traceback_text=str(fields.get("traceback", "")),
    )
