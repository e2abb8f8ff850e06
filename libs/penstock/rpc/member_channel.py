"""A channel that shows a certificate, and outlives it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import grpc

from penstock.rpc.identity import MemberIdentity, MemberRole, role_host

Options = Sequence[tuple[str, int | str]]


class MemberChannel(grpc.aio.Channel):
    """As any channel, over TLS with certificates on both sides. Once the member has a new certificate, new calls go
    over a new connection, also those of stubs that were made before; streams go on over the old one."""

    def __init__(self, address: str, role: MemberRole, member: MemberIdentity, options: Options) -> None:
        """What listens at `address` has to show a certificate of `role`."""
        self._address = address
        self._member = member
        self._options = (*options, ("grpc.ssl_target_name_override", role_host(role)))
        self._version = member.look()
        self._now = self._made()
        self._before: list[grpc.aio.Channel] = []

    @property
    def current(self) -> grpc.aio.Channel:
        """The one with the newest certificate."""
        if (version := self._member.look()) != self._version:
            self._before.append(self._now)
            self._now, self._version = self._made(), version
        return self._now

    def _made(self) -> grpc.aio.Channel:
        return grpc.aio.secure_channel(self._address, self._member.channel(), options=self._options)

    async def close(self, grace: float | None = None) -> None:
        """Closes all connections."""
        for channel in (*self._before, self._now):
            await channel.close(grace)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """Of the newest connection."""
        return self.current.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Of the newest connection."""
        await self.current.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Of the newest connection."""
        await self.current.channel_ready()

    def unary_unary(self, *method: Any, **more: Any) -> Any:
        """As of any channel, and so are those below."""
        return _Method(self, "unary_unary", method, more)

    def unary_stream(self, *method: Any, **more: Any) -> Any:
        return _Method(self, "unary_stream", method, more)

    def stream_unary(self, *method: Any, **more: Any) -> Any:
        return _Method(self, "stream_unary", method, more)

    def stream_stream(self, *method: Any, **more: Any) -> Any:
        return _Method(self, "stream_stream", method, more)


class _Method:
    """Calls one method, over the newest connection."""

    def __init__(self, channel: MemberChannel, shape: str, method: tuple[Any, ...], more: dict[str, Any]) -> None:
        self._channel = channel
        self._shape, self._method, self._more = shape, method, more
        self._made_of: grpc.aio.Channel | None = None
        self._call: Any = None

    def __call__(self, *arguments: Any, **more: Any) -> Any:
        if (current := self._channel.current) is not self._made_of:
            self._made_of = current
            self._call = getattr(current, self._shape)(*self._method, **self._more)
        return self._call(*arguments, **more)
