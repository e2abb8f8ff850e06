"""One mesh of fakes and one gateway per test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from openai import AsyncOpenAI
from penstock.gateway.config import GatewayConfig
from penstock.gateway.service import Gateway, open_gateway
from tokenizers import Tokenizer

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


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("models") / fakes.MODEL
    fakes.make_model(directory)
    return directory


@pytest.fixture
def opened(model_dir) -> Callable[..., AbstractAsyncContextManager[Setup]]:
    """Opens a gateway with other settings than the default ones."""

    @asynccontextmanager
    async def make(*, api_key: str = "none", **settings: object) -> AsyncIterator[Setup]:
        tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        eos = tokenizer.token_to_id("<|im_end|>")
        ids = tokenizer.encode("The quick brown fox.").ids
        script = fakes.Script(say=lambda request: ids, eos=eos)
        async with fakes.open_mesh(script, model_dir / "tokenizer.json") as mesh:
            config = GatewayConfig(
                router=mesh.address, model_dir=model_dir, http_address="127.0.0.1:0", drain_s=0.2, **settings
            )
            async with open_gateway(config) as gateway:
                async with gateway.mesh.changed:
                    await gateway.mesh.changed.wait_for(lambda: gateway.mesh.ready)
                client = AsyncOpenAI(base_url=f"http://{gateway.address}/v1", api_key=api_key, max_retries=0)
                async with client:
                    yield Setup(gateway, mesh, client, tokenizer)

    return make


@pytest.fixture
async def setup(opened) -> AsyncIterator[Setup]:
    async with opened() as made:
        yield made
