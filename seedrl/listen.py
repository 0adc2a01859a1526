"""The gateway as the supervisor sees it: where it may listen, started, and started again when it dies."""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seedrl.children import Child, Children
from seedrl.errors import AddressError, SeedrlError, from_wire
from seedrl.transport import wire
from seedrl.transport.channel import Channel

_RESTARTS, _WINDOW_S = 5, 60.0


@dataclass(frozen=True)
class Listen:
    """Where remote workers attach. Raises: AddressError for an address of another form, or one that strangers reach unasked.

    address: tcp://HOST:PORT, or ipc://PATH. keys: the folder that `seedrl keys` made, or None for no encryption.
    """

    address: str
    keys: Path | None = None
    insecure: bool = False

    def __post_init__(self) -> None:
        if not wire.is_remote(self.address, listen=True):
            raise AddressError(what=f"'{self.address}' is no address to listen at", where="--listen", do="use tcp://HOST:PORT; --bind takes unix://PATH")  # fmt: skip
        if self.keys is not None:
            wire.load_key(self.keys / "server.key")
            wire.load_allowed(self.keys / "allowed.txt")
        elif self.address.startswith("tcp://") and not self.insecure:
            host, _ = wire.parse_tcp(self.address, listen=True)
            if not wire.is_loopback(host):
                raise AddressError(
                    what=f"{self.address} can be reached from other machines, and there are no keys", where="--listen",
                    do="make keys (seedrl keys DIR) and give --keys DIR, or say --insecure",
                )  # fmt: skip


class Listener:
    """The gateway's process.

    Args: start: starts a process on a channel's end. message, fds: what it is told. say, fail: called with a line, with an error.
    """

    def __init__(
        self, listen: Listen, children: Children, selector: selectors.BaseSelector, message: dict[str, Any], fds: list[int], log: Path,
        say: Callable[[str], None], fail: Callable[[SeedrlError], None],
    ) -> None:  # fmt: skip
        self._message = {
            **message,
            "listen": listen.address,
            "keys": str(listen.keys.absolute()) if listen.keys else None,
        }
        self._children, self._selector, self._fds, self._log = children, selector, fds, log
        self._say, self._fail = say, fail
        self._deaths: list[float] = []
        self.address = ""  # as bound: the port that was free, where 0 was asked for
        self._begin()

    def _begin(self) -> None:
        self._channel, end = Channel.pair()
        arguments = ["--channel", str(end.fileno()), "--parent", str(os.getpid())]
        self.child: Child = self._children.start("gateway", "seedrl.transport.gateway", arguments, fds=[end.fileno()], log=self._log)  # fmt: skip
        end.close()
        self._channel.send(self._message, self._fds)
        self._selector.register(self._channel, selectors.EVENT_READ, self._heard)
        self._selector.register(self.child.pidfd, selectors.EVENT_READ, self._ended)

    def close(self) -> None:
        self._channel.close()

    def _heard(self, channel: Channel) -> None:
        received = channel.receive()
        if received is None:
            self._selector.unregister(channel)
            channel.close()
            return
        message, _ = received
        if message["type"] == "ready":
            self.address = message["address"]
            self._message["listen"] = (
                self.address
            )  # the same port again, if it has to be started anew
        else:
            self._fail(from_wire(message))

    def _ended(self, _: int) -> None:
        self._selector.unregister(self.child.pidfd)
        self.child.process.wait()
        how = self.child.how_it_ended()
        self._children.bury(self.child)
        now = time.monotonic()
        self._deaths = [*(at for at in self._deaths if now - at < _WINDOW_S), now]
        if self.address and len(self._deaths) <= _RESTARTS:
            self._say(f"the gateway ended ({how}); started again")
            self._begin()
            return
        for key in list(self._selector.get_map().values()):
            if key.fileobj is self._channel:  # its last words
                self._heard(self._channel)
        self._fail(
            AddressError(what=f"the gateway ended ({how})", where=str(self._log), do="see that log")
        )
