"""A simulator of its own (a cart and a pole) joins `seedrl serve cartpole --listen tcp://...` without this package.

python examples/client.py tcp://127.0.0.1:5555 [environments] [steps]        needs pyzmq, msgpack and numpy; docs/protocol.md says the rest
"""

import os
import socket
import sys

import msgpack
import numpy as np
import zmq

ADDRESS, E, STEPS = sys.argv[1], int((sys.argv[2:] or [8])[0]), int((sys.argv[3:] or [10**9])[0])


class Poles:
    """E carts at once; `rows` is what the protocol calls a step: the row after an episode's last is the next one's first."""

    def __init__(self):
        self.rng, self.state, self.length = np.random.default_rng(), np.zeros((E, 4), np.float32), np.zeros(E, np.int64)
        self.over, self.total = np.ones(E, bool), np.zeros(E)

    def rows(self, action):
        x, v, angle, spin = self.state.T
        push, cos, sin = np.where(action == 1, 10.0, -10.0), np.cos(angle), np.sin(angle)
        pull = (push + 0.05 * spin**2 * sin) / 1.1
        turn = (9.8 * sin - cos * pull) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
        after = self.state + 0.02 * np.stack([v, pull - 0.05 * turn * cos / 1.1, spin, turn], 1)
        first = self.over.copy()
        self.state = np.where(first[:, None], self.rng.uniform(-0.05, 0.05, (E, 4)), after).astype(np.float32)
        reward = np.where(first, 0, 1).astype(np.float32)
        self.length, self.total = np.where(first, 0, self.length + 1), np.where(first, 0, self.total + reward)
        fell = ~first & ((abs(self.state[:, 0]) > 2.4) | (abs(self.state[:, 2]) > 0.2095))
        late = ~first & ~fell & (self.length >= 500)
        self.over = fell | late
        flags = np.stack([fell, late, first, np.zeros(E, bool)], 1).astype(np.uint8)
        ended = [self.total, self.length] if self.over.any() else []
        return bool(ended), [self.state, reward, flags, *ended]


def say(kind, *frames, **fields):
    dealer.send_multipart([msgpack.packb({"t": kind, **fields}), *frames])


def hello():
    say("hello", v=1, token=token, spec=None, groups=[E], env="poles", host=socket.gethostname(), pid=os.getpid(), evaluation=False)


dealer, token, poles, n, answered = zmq.Context().socket(zmq.DEALER), os.urandom(16), Poles(), 0, 0
sent, frames_sent = {}, []
dealer.connect(ADDRESS)
hello()
while True:
    if not dealer.poll(1000):  # nothing for a second: what was it that is missing?
        say("ping", waits=[n if n != answered else 0]) if n else hello()
        continue
    header, *frames = dealer.recv_multipart()
    header = msgpack.unpackb(header)
    if header["t"] == "refused" and not header["retry"]:
        sys.exit(header["error"]["what"])
    if header["t"] in ("stop", "ended") or n >= STEPS:
        break
    if header["t"] == "unknown":
        hello()
    elif header["t"] == "pong" and header["taken"][0] < n:
        say("step", *frames_sent, **sent)
    elif (header["t"] == "welcome" and not n) or (header["t"] == "answer" and header["n"] == n != answered):
        answered, n = n, n + 1
        ended, frames_sent = poles.rows(np.frombuffer(frames[0], "<i8") if frames else np.zeros(E))
        sent = {"g": 0, "n": n, "rtt_ns": 0, "env_ns": 0, "ended": ended}
        say("step", *frames_sent, **sent)
say("bye")
print(f"{n} steps of {E} carts")
