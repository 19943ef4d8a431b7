"""A card of a simulated clock in the place of `torch.cuda`, as far as `helpers.timing` asks it: what kernels take and
what launching them takes on the host is told, and nothing is computed."""

import contextlib
import time
from dataclasses import replace

import torch

from helpers import locks, machine


class Card:
    """`host` and `device`: seconds, until which each is busy. launch_s, event_s: of the host, and of the device."""

    def __init__(self, launch_s: float = 8e-6, event_s: float = 0.5e-6):
        self.launch_s, self.event_s = launch_s, event_s
        self.host = self.device = 0.0
        self.graph, self.graphs, self.slept = None, [], []

    def work(self, seconds: float) -> None:
        """A kernel."""
        self.host += self.launch_s
        if self.graph is not None:
            self.graph.append(seconds)
        else:
            self.device = max(self.device, self.host) + seconds

    def wait(self) -> None:
        self.host = max(self.host, self.device)

    def sleep(self, seconds: float) -> None:
        self.slept.append((self.host, seconds))
        self.host += seconds

    def put_in(self, patch) -> None:
        """In the place of the real one, until `patch` (pytest's) is undone."""
        card = self

        class Stream:
            def wait_stream(self, other):
                pass

            def synchronize(self):
                card.wait()

        class Event:
            def __init__(self, enable_timing):
                pass

            def record(self):
                card.work(card.event_s)
                self.at = card.device

            def synchronize(self):
                card.wait()

            def elapsed_time(self, other):
                return (other.at - self.at) * 1e3

        class Graph(list):
            def replay(self):
                card.host += 3 * card.launch_s
                card.device = max(card.device, card.host) + sum(self)

        @contextlib.contextmanager
        def capture(graph):
            card.graph = graph
            yield
            card.graph = None
            card.graphs.append(graph)

        for name, value in {
            "Stream": Stream,
            "Event": Event,
            "CUDAGraph": Graph,
            "graph": capture,
            "stream": lambda stream: contextlib.nullcontext(),
            "current_stream": Stream,
            "synchronize": card.wait,
            "_sleep": lambda cycles: card.work(cycles / 1.98e9),
        }.items():
            patch.setattr(torch.cuda, name, value, raising=False)
        here = replace(machine.here(), l2_bytes=60 << 20, uuid="GPU-simulated")
        patch.setattr(machine, "gpu", lambda: True)
        patch.setattr(machine, "here", lambda: here)
        patch.setattr(time, "perf_counter", lambda: self.host)
        patch.setattr(time, "sleep", self.sleep)


@contextlib.contextmanager
def held(log: list, what: str):
    """In the place of a lock: notes when it is taken and given back."""
    log.append(f"{what} taken")
    yield
    log.append(f"{what} given back")


def watched(patch, log: list) -> None:
    """Locks that only note in `log`."""
    patch.setattr(locks, "exclusive", lambda what: held(log, "exclusive"))
    patch.setattr(locks, "shared", lambda: held(log, "shared"))
