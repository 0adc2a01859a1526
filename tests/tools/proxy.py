"""A bad network between DEALERs and a ROUTER: drops, delays, doubles and reorders messages, cuts connections, and falls silent."""

from __future__ import annotations

import heapq
import itertools
import random
import threading
import time
from collections import Counter

import zmq


class Proxy(threading.Thread):
    """Args: server: the gateway's address. drop, double, delay: shares of messages; delays are up to `longest_s`.
    cut_every_s, hush_every_s: mean seconds between cuts of one connection, and between silences of `hush_s` of one.
    """

    def __init__(
        self, server: str, *, drop: float = 0.01, double: float = 0.01, delay: float = 0.02, longest_s: float = 0.05,
        cut_every_s: float = 2.0, hush_every_s: float = 1e9, hush_s: float = 4.0, bytes_per_s: float = 1e12, seed: int = 1,
    ) -> None:  # fmt: skip
        super().__init__(daemon=True)
        self.server, self.rng, self.counts = server, random.Random(seed), Counter[str]()
        self.drop, self.double, self.delay, self.longest_s = drop, double, delay, longest_s
        self.bytes_per_s = bytes_per_s
        self.cut_every_s, self.hush_every_s, self.hush_s = cut_every_s, hush_every_s, hush_s
        self.context = zmq.Context()
        self.front = self.context.socket(zmq.ROUTER)
        self.front.linger = 0
        port = self.front.bind_to_random_port("tcp://127.0.0.1")
        self.address = f"tcp://127.0.0.1:{port}"
        self.back: dict[bytes, zmq.Socket] = {}
        self.hushed: dict[bytes, float] = {}
        self.later: list[tuple[float, int, bytes, bool, list[bytes]]] = []
        self.number = itertools.count()
        self.over = threading.Event()

    def run(self) -> None:
        next_cut = time.monotonic() + self.rng.expovariate(1 / self.cut_every_s)
        next_hush = time.monotonic() + self.rng.expovariate(1 / self.hush_every_s)
        poller = zmq.Poller()
        poller.register(self.front, zmq.POLLIN)
        while not self.over.is_set():
            events = dict(poller.poll(2))
            if self.front in events:
                for _ in range(100):
                    try:
                        identity, *frames = self.front.recv_multipart(zmq.NOBLOCK)
                    except zmq.Again:
                        break
                    if identity not in self.back:
                        self.back[identity] = self.connect(poller)
                    self.fate(identity, True, frames)
            for identity, socket in list(self.back.items()):
                if socket in events:
                    for _ in range(100):
                        try:
                            self.fate(identity, False, socket.recv_multipart(zmq.NOBLOCK))
                        except zmq.Again:
                            break
            now = time.monotonic()
            while self.later and self.later[0][0] <= now:
                _, _, identity, up, frames = heapq.heappop(self.later)
                self.pass_on(identity, up, frames)
            if now >= next_cut and self.back:
                next_cut = now + self.rng.expovariate(1 / self.cut_every_s)
                identity = self.rng.choice(list(self.back))
                poller.unregister(self.back[identity])
                self.back[identity].close(0)
                self.back[identity] = self.connect(poller)
                self.counts["cut"] += 1
            if now >= next_hush and self.back:
                next_hush = now + self.rng.expovariate(1 / self.hush_every_s)
                self.hushed[self.rng.choice(list(self.back))] = now + self.hush_s
                self.counts["hushed"] += 1
        for socket in [self.front, *self.back.values()]:
            socket.close(0)
        self.context.term()

    def connect(self, poller: zmq.Poller) -> zmq.Socket:
        socket = self.context.socket(zmq.DEALER)
        socket.linger = 0
        socket.connect(self.server)
        poller.register(socket, zmq.POLLIN)
        return socket

    def fate(self, identity: bytes, up: bool, frames: list[bytes]) -> None:
        chance = self.rng.random()
        if self.hushed.get(identity, 0) > time.monotonic() or chance < self.drop:
            self.counts["dropped"] += 1
        elif chance < self.drop + self.double:
            self.counts["doubled"] += 1
            self.pass_on(identity, up, frames)
            self.pass_on(identity, up, frames)
        elif chance < self.drop + self.double + self.delay:
            self.counts["delayed"] += 1
            due = time.monotonic() + self.rng.uniform(0, self.longest_s)
            heapq.heappush(self.later, (due, next(self.number), identity, up, frames))
        else:
            self.counts["passed"] += 1
            self.pass_on(identity, up, frames)

    def pass_on(self, identity: bytes, up: bool, frames: list[bytes]) -> None:
        time.sleep(sum(map(len, frames)) / self.bytes_per_s)
        try:
            if up:
                self.back[identity].send_multipart(frames, zmq.NOBLOCK)
            else:
                self.front.send_multipart([identity, *frames], zmq.NOBLOCK)
        except zmq.ZMQError:
            self.counts["lost"] += 1

    def __enter__(self) -> Proxy:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.over.set()
        self.join(5)
