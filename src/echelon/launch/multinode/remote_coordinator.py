"""The coordinator on another machine: opens connections to it, and explains why one cannot be opened."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, final

from echelon.base.errors import LaunchError
from echelon.base.messages.terminal import say
from echelon.base.messages.translation import gettext as _
from echelon.launch.multinode.channel import START_S, ChannelError, OnMessage, OnRequest, Peer, Receiver
from echelon.launch.multinode.connections import NODE, STORE, ConnectionRefused, connect
from echelon.launch.multinode.network import is_loopback

if TYPE_CHECKING:
    from echelon.launch.multinode.machines import MultinodePlan

_CONNECT_S = 5.0
_RETRY_S = 0.5
_WARN_AFTER_S = 20.0
_MAX_REFUSALS = 3


@final
class RemoteCoordinator:
    """The coordinator at the address of ``plan``."""

    def __init__(self, plan: MultinodePlan) -> None:
        self._plan = plan
        self.times = plan.times

    def connect(
        self,
        *,
        on_message: OnMessage,
        on_request: OnRequest,
        on_lost: Callable[[str], None],
        check: Callable[[], None],
        started: float,
    ) -> Peer:
        """Connect as a node, retrying until ``join_timeout`` after ``started``.

        Raises:
            LaunchError: the coordinator cannot be reached, or has another token.
        """
        plan = self._plan
        warned_s = 0.0
        num_refused = 0
        while True:
            check()
            try:
                sock = connect(plan.host, plan.port, plan.token, purpose=NODE, timeout_s=_CONNECT_S)
                break
            except (OSError, ChannelError) as error:
                waited_s = time.monotonic() - started
                # One refusal is not final, because a coordinator that is shutting down also closes connections.
                num_refused += isinstance(error, ConnectionRefused)
                if num_refused >= _MAX_REFUSALS or waited_s > self.times.join_timeout.total_seconds():
                    raise self._explained(error, waited_s) from error
                if waited_s > warned_s + _WARN_AFTER_S:
                    warned_s = waited_s
                    say(_("{error}\n  still retrying", error=self._explained(error, waited_s)), kind="warning")
            time.sleep(_RETRY_S)
        sock.settimeout(START_S)
        peer = Peer(
            sock,
            on_message=on_message,
            on_request=on_request,
            on_lost=lambda reason: on_lost(
                _("lost contact with {host}:{port}: {reason}", host=plan.host, port=plan.port, reason=reason)
            ),
        )
        receiver = Receiver(self.times.heartbeat.total_seconds())
        receiver.add(peer)
        receiver.close()  # with the connection
        return peer

    def open_store(self, number: int) -> socket.socket:
        """Open a connection to the store of generation ``number``.

        Raises:
            OSError, ChannelError: the store cannot be reached.
        """
        plan = self._plan
        return connect(plan.host, plan.port, plan.token, purpose=STORE, number=number, timeout_s=_CONNECT_S)

    def _explained(self, error: Exception, waited_s: float) -> LaunchError:
        plan = self._plan
        text = error.strerror if isinstance(error, OSError) and error.strerror else str(error) or type(error).__name__
        do = _("check that the launcher with machine rank 0 is running and that no firewall blocks its port")
        if isinstance(error, ConnectionRefused):
            do = _(
                "use the same token on all machines: ECHELON_TOKEN, ECHELON_TOKEN_FILE, or the file that `echelon "
                "token` writes"
            )
        elif is_loopback(plan.host):
            do = _(
                "use the address at which the other machines reach the machine with rank 0; a loopback address "
                "always refers to the local machine"
            )
        return LaunchError(
            _("cannot connect to {host}:{port}: {text}", host=plan.host, port=plan.port, text=text)
            + (_(" (retried for {waited_s:.0f} s)", waited_s=waited_s) if waited_s > 1 else ""),
            where=f"{plan.info.host} ({plan.info.address}); {plan.where}",
            do=do,
        )
