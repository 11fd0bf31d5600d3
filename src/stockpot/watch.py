"""Each of several ranks learns within seconds that another one has ended, whatever it is doing.

An exchange notices that a rank has ended, but a rank that learns a fold alone exchanges nothing for a long time, and
NCCL waits. So every rank has a connection to rank 0, and a thread that listens. The system closes the connection when
the process ends, however it ends, and when its host is gone (keepalive). Rank 0 tells the others.

What is common work is a *region*, numbered. Who leaves the last one and ends has done its part; who ends without having
left what others are still in is missed there.
"""

from __future__ import annotations

import _thread
import contextlib
import json
import os
import secrets
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from stockpot.errors import RunError

GRACE = 20.0  # seconds to finish a step and save; one that hangs in an exchange meanwhile ends without
STOPPED = "it was told to stop"  # by a signal of its own: the least of the reasons why a rank ended
_CONNECT = 60.0  # seconds to meet
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}  # a host that is gone is missed after 20 s
_GREETING = 100  # bytes at most


class Watch:
    """Made on every rank at once. `exchange` gives what every rank has, by rank."""

    def __init__(self, rank: int, exchange: Callable[[Any], list[Any]]) -> None:
        self.ended: dict[int, str] = {}  # rank -> its last words, empty if it could not say any
        self._rank = rank
        self.inside, self._entered = False, 0  # whether this rank is in a region, and the number of the last one
        self._left: dict[int, int] = {}  # by rank: the last region that it has left
        self.interrupted = self._closing = False
        self._told: set[int] = set()  # what rank 0 has told the others
        self._news = threading.Condition()
        found = exchange(socket.gethostname())
        self._hosts: list[str] = found
        self._peers = self._first(exchange) if rank == 0 else self._other(exchange)
        for peer in self._peers.values():
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEPALIVE.items():
                if hasattr(socket, name):
                    peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        threading.Thread(target=self._listen, name="stockpot-watch", daemon=True).start()

    # ---- meeting

    def _first(self, exchange: Callable[[Any], list[Any]]) -> dict[int, socket.socket]:
        token = secrets.token_hex(16)
        here = "127.0.0.1" if len(set(self._hosts)) == 1 else ""
        with socket.create_server((here, 0), backlog=len(self._hosts)) as server:
            exchange((server.getsockname()[1], token))
            server.settimeout(_CONNECT)
            peers: dict[int, socket.socket] = {}
            while len(peers) < len(self._hosts) - 1:
                try:
                    peer, _ = server.accept()
                    peer.settimeout(_CONNECT)
                    said = peer.makefile("rb").readline(_GREETING).split()
                except OSError as error:
                    missing = sorted(set(range(1, len(self._hosts))) - peers.keys())
                    raise _unmet(f"ranks {missing} at rank 0", error) from error
                if len(said) == 2 and secrets.compare_digest(said[0].decode(errors="replace"), token):
                    peers[int(said[1])] = peer
                else:
                    peer.close()  # a stranger
        return peers

    def _other(self, exchange: Callable[[Any], list[Any]]) -> dict[int, socket.socket]:
        port, token = exchange(None)[0]
        here = len(set(self._hosts)) == 1
        address = "127.0.0.1" if here else os.environ.get("MASTER_ADDR", self._hosts[0])
        try:
            peer = socket.create_connection((address, port), timeout=_CONNECT)
            peer.sendall(f"{token} {self._rank}\n".encode())
        except OSError as error:
            raise _unmet(f"rank 0 at {address} from rank {self._rank} ({self._hosts[self._rank]})", error) from error
        return {0: peer}

    # ---- what is told

    def _send(self, **message: Any) -> None:
        line = json.dumps(message).encode() + b"\n"
        for peer in self._peers.values():
            with contextlib.suppress(OSError):  # whoever listens there notices it
                peer.sendall(line)

    def enter(self) -> None:
        """Begin a region."""
        self.interrupted = False
        self.inside, self._entered = True, self._entered + 1
        self._look()

    def leave(self, *, done: bool) -> None:
        """End a region; `done`: this rank has nothing more to do in it."""
        self.inside = False
        if done:
            self._send(rank=self._rank, left=self._entered)

    def say(self, words: str) -> None:
        """Why this rank is about to end."""
        self._send(rank=self._rank, ended=words[:500])

    def close(self) -> None:
        """Nobody is missed any more."""
        self._closing = True
        for peer in self._peers.values():
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)
            peer.close()

    # ---- what is heard

    def _listen(self) -> None:
        rests = dict.fromkeys(self._peers, b"")
        with selectors.DefaultSelector() as selector:
            for rank, peer in self._peers.items():
                peer.setblocking(True)
                selector.register(peer, selectors.EVENT_READ, rank)
            while selector.get_map():
                for key, _ in selector.select():
                    rank = key.data
                    try:
                        data = self._peers[rank].recv(65536)
                    except OSError:
                        data = b""
                    if self._closing:
                        return
                    *lines, rests[rank] = (rests[rank] + data).split(b"\n")
                    for line in lines:
                        self._hear(json.loads(line))
                    if not data:
                        selector.unregister(key.fileobj)
                        self._hear({"rank": rank, "ended": ""})

    def _hear(self, message: dict[str, Any]) -> None:
        rank = message["rank"]
        if "left" in message:
            self._left[rank] = message["left"]
            return
        with self._news:
            if rank not in self.ended or not self.ended[rank]:
                self.ended[rank] = message["ended"]
            self._news.notify_all()
        self._look()

    def _missed(self, rank: int) -> bool:
        return self._left.get(rank, 0) < self._entered

    def _look(self) -> None:
        """Stop this rank where another one is missed."""
        missed = {rank for rank in list(self.ended) if self._missed(rank)}
        if self._rank == 0:
            for rank in missed - self._told:
                self._told.add(rank)
                self._send(rank=rank, ended=self.ended[rank])
        if self.inside and not self.interrupted and missed:
            self.interrupted = True
            _thread.interrupt_main(signal.SIGTERM)
            threading.Thread(target=self._end, args=(self._entered,), daemon=True).start()

    def _end(self, region: int) -> None:
        """The last resort for a rank that hangs in an exchange: nobody will ever answer."""
        time.sleep(GRACE)
        if self.inside and self._entered == region:
            if self.speaks():
                os.write(2, f"stopped, because {self.why()}\n".encode())
            os._exit(1)

    def why(self, wait: float = 0.0) -> str | None:
        """Which rank is missed, and its last words; after so many seconds at most."""
        last = time.monotonic() + wait
        with self._news:
            while not (missed := self._worst()) and (left := last - time.monotonic()) > 0:
                self._news.wait(left)
        if not missed:
            return None
        rank, words = missed
        return f"rank {rank} on {self._hosts[rank]} has ended{': ' if words else ''}{words}"

    def _worst(self) -> tuple[int, str] | None:
        """One that failed or was killed rather than one that was told to stop, as all are in the end."""
        missed = [(rank, words) for rank, words in self.ended.items() if self._missed(rank)]
        return min(missed, key=lambda one: (one[1] == STOPPED, not one[1], one[0]), default=None)

    def speaks(self) -> bool:
        """Whether this is the first of the ranks that are left."""
        return all(self.ended.get(rank, STOPPED) != STOPPED for rank in range(self._rank))


def _unmet(what: str, error: OSError) -> RunError:
    return RunError.of(
        "the connections between ranks",
        expected=f"a connection with {what}",
        found=f"{type(error).__name__}: {error}",
        fix="let the hosts of one run reach each other on all ports, as torch's own exchange needs it too",
    )
