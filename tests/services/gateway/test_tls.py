"""HTTPS and gRPC over TLS with a certificate that is followed when it changes."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path

import grpc
import httpx2
import openai
import pytest

from penstock.gateway.door.tls import Certificate
from penstock.runtime.config import ConfigError
from penstock.v1 import gateway_pb2, gateway_pb2_grpc

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made with openssl")
HELLO = [{"role": "user", "content": "hi"}]


def make(directory: Path, name: str) -> tuple[Path, Path]:
    """A certificate of 127.0.0.1 that signs itself, and its key."""
    cert, key = directory / f"{name}.pem", directory / f"{name}.key"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost", "-days", "2"),
            *("-keyout", str(key), "-out", str(cert)),
        ],
        check=True,
        capture_output=True,
    )
    return cert, key


async def test_both_doors_speak_tls(opened, tmp_path):
    cert, key = make(tmp_path, "one")
    async with opened(tls_cert=cert, tls_key=key) as setup:
        trust = ssl.create_default_context(cafile=str(cert))
        address = setup.gateway.address
        async with httpx2.AsyncClient(verify=trust) as http:
            client = openai.AsyncOpenAI(base_url=f"https://{address}/v1", api_key="none", http_client=http)
            answer = await client.chat.completions.create(model="tiny", messages=HELLO)
            assert answer.choices[0].message.content == "The quick brown fox."
            stream = await client.chat.completions.create(model="tiny", messages=HELLO, stream=True)
            assert [chunk async for chunk in stream][-1].choices[0].finish_reason == "stop"
            long = [{"role": "user", "content": "many reads " * 30_000}]
            with pytest.raises(openai.BadRequestError, match="maximum context length"):
                await client.chat.completions.create(model="tiny", messages=long)
        async with httpx2.AsyncClient() as plain:
            with pytest.raises(httpx2.HTTPError):
                await plain.get(f"http://{address}/healthz")
        credentials = grpc.ssl_channel_credentials(cert.read_bytes())
        async with grpc.aio.secure_channel(setup.gateway.grpc_address, credentials) as channel:
            models = await gateway_pb2_grpc.GatewayStub(channel).ListModels(gateway_pb2.ListModelsRequest())
            assert models.models[0].id == "tiny"


async def test_a_changed_certificate_is_used_without_a_restart(opened, tmp_path):
    cert, key = make(tmp_path, "one")
    other_cert, other_key = make(tmp_path, "two")
    old, new = (ssl.create_default_context(cafile=str(path)) for path in (cert, other_cert))
    own = tmp_path / "own.pem", tmp_path / "own.key"
    shutil.copy(cert, own[0]), shutil.copy(key, own[1])
    async with opened(tls_cert=own[0], tls_key=own[1]) as setup:
        url = f"https://{setup.gateway.address}/healthz"
        async with httpx2.AsyncClient(verify=old) as before:
            assert (await before.get(url)).status_code == 200
            shutil.copy(other_cert, own[0]), shutil.copy(other_key, own[1])
            while True:  # until the gateway has looked
                async with httpx2.AsyncClient(verify=new) as after:
                    try:
                        assert (await after.get(url)).status_code == 200
                        break
                    except httpx2.ConnectError:
                        pass
            assert (await before.get(url)).status_code == 200, "an open connection goes on"
        credentials = grpc.ssl_channel_credentials(other_cert.read_bytes())
        async with grpc.aio.secure_channel(setup.gateway.grpc_address, credentials) as channel:
            await gateway_pb2_grpc.GatewayStub(channel).ListModels(gateway_pb2.ListModelsRequest())


def test_a_pair_that_does_not_fit_changes_nothing(tmp_path):
    cert, key = make(tmp_path, "one")
    other_cert, _ = make(tmp_path, "two")
    found = Certificate(cert, key)
    shutil.copy(other_cert, cert)
    assert not found.reload()
    cert.unlink()
    assert not found.reload()


@pytest.mark.parametrize("broken", ["cert", "key", "missing"])
async def test_what_is_no_certificate_is_named_at_the_start(opened, tmp_path, broken):
    cert, key = make(tmp_path, "one")
    if broken == "missing":
        cert.unlink()
    else:
        (cert if broken == "cert" else key).write_text("nothing")
    with pytest.raises(ConfigError, match="tls_cert"):
        async with opened(tls_cert=cert, tls_key=key):
            pass
    with pytest.raises(ConfigError, match="tls_key"):
        async with opened(tls_cert=cert):
            pass
