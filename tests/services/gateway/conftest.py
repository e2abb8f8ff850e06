"""One mesh of fakes and one gateway per test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from openai import AsyncOpenAI
from tokenizers import Tokenizer

from penstock.gateway.config import GatewayConfig
from penstock.gateway.service import Gateway, open_gateway

from . import fakes


@dataclass
class Setup:
    """A gateway before a mesh of fakes."""

    gateway: Gateway
    mesh: fakes.FakeMesh
    client: AsyncOpenAI
    tokenizer: Tokenizer

    @property
    def script(self) -> fakes.Script:
        return self.mesh.script

    @property
    def url(self) -> str:
        return f"http://{self.gateway.address}"

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def says(self, text: str) -> None:
        """From now on every answer is `text`."""
        ids = self.ids(text)
        self.script.say = lambda request: ids


def plain_script(tokenizer: Tokenizer) -> fakes.Script:
    """Every answer is the same sentence."""
    ids = tokenizer.encode("The quick brown fox.").ids
    return fakes.Script(say=lambda request: ids, eos=tokenizer.token_to_id("<|im_end|>"))


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("models") / fakes.MODEL
    fakes.make_model(directory)
    return directory


@pytest.fixture(scope="session")
def opened(model_dir) -> Callable[..., AbstractAsyncContextManager[Setup]]:
    """Opens a gateway with other settings than the default ones."""

    @asynccontextmanager
    async def make(*, api_key: str = "none", **settings: object) -> AsyncIterator[Setup]:
        tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        async with fakes.open_mesh(plain_script(tokenizer), model_dir / "tokenizer.json") as mesh:
            defaults = {"model_dir": model_dir, "http_address": "127.0.0.1:0", "drain_s": 0.2}
            config = GatewayConfig(router=mesh.address, **{**defaults, **settings})
            async with open_gateway(config) as gateway:
                await gateway.ready()
                client = AsyncOpenAI(base_url=f"http://{gateway.address}/v1", api_key=api_key, max_retries=0)
                async with client:
                    yield Setup(gateway, mesh, client, tokenizer)

    return make


@pytest.fixture(scope="package", autouse=True)
def _listeners_leave_soon() -> Iterator[None]:
    """A test begins when the one before has left nothing open, so a gateway here has listeners that do not linger."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.gateway.mesh.workers._LINGER_S", 0.01)
        yield


@pytest.fixture(scope="session")
async def shared(opened) -> AsyncIterator[Setup]:
    async with opened() as made:
        yield made


@pytest.fixture
async def setup(shared) -> AsyncIterator[Setup]:
    """The gateway that most tests share, before a mesh as new. What a test leaves hanging goes on after it, so that the
    next one finds nothing open."""
    script = plain_script(shared.tokenizer)
    gate = script.gate
    await shared.mesh.reset(script)
    yield shared
    gate.set()
