"""One smoke test with the npm `openai` client."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "node"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


async def run(*command: str, timeout_s: float) -> tuple[int, bytes, bytes]:
    child = await asyncio.create_subprocess_exec(
        *command, cwd=HERE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(timeout_s):
            out, err = await child.communicate()
    except TimeoutError:
        child.kill()
        await child.communicate()
        return -1, b"", b"timed out"
    return child.returncode or 0, out, err


@pytest.fixture(scope="module")
async def installed() -> None:
    """node_modules beside the script; git ignores it, and it is installed once."""
    if not shutil.which("node") or not shutil.which("npm"):
        pytest.skip("node and npm are not on this machine")
    if (HERE / "node_modules" / "openai" / "package.json").is_file():
        return
    code, _, err = await run("npm", "install", "--no-audit", "--no-fund", "--no-package-lock", timeout_s=60)
    if code:
        pytest.skip(f"the npm registry can't be reached: {err.decode(errors='replace').strip().splitlines()[-1:]}")


async def test_the_npm_client(setup, installed):
    setup.says(CALL)
    code, out, err = await run("node", "smoke.mjs", f"{setup.url}/v1", "tiny", timeout_s=30)
    assert code == 0, err.decode()
    found = json.loads(out)
    for calls in (found["whole"], found["streamed"]):
        functions = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
        assert functions == [("get_weather", '{"city": "Oslo"}')]
    assert found["finish"] == ["tool_calls", "tool_calls"]
    assert found["usage"][0] == found["usage"][1] > 0
    assert found["pieces"] > 3
    assert found["refused"] == {"status": 404, "code": "model_not_found", "param": "model"}
    assert found["models"] == ["tiny"]
