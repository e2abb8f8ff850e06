"""`penstock up` and `penstock demo` as a person runs them: real processes, the embedded models, the official client."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from pathlib import Path

import psutil
from openai import AsyncOpenAI

from penstock.testing.checkpoints import write_checkpoint

from .support import until, up

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the current weather for a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]


def left_behind() -> set[str]:
    """Names that a process could leave: shared memory, and temporary files of ours, but for the sockets of meshes that
    other tests have."""
    ours = {path.name for path in Path("/tmp").glob("*penstock*")}
    return {*os.listdir("/dev/shm"), *(name for name in ours if not re.fullmatch(r"penstock-\w{8}", name))}


def sockets(children: list[psutil.Process]) -> Path:
    """The directory of a mesh's own."""
    [router] = [child.cmdline() for child in children if "penstock.router" in child.cmdline()]
    return Path(router[router.index("--address") + 1].removeprefix("unix:")).parent


def gone(children: list[psutil.Process]) -> bool:
    return not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)


async def test_a_session_through_the_official_client_and_a_clean_end():
    before = left_behind()
    async with up("--prefill", "1") as (process, children, url):
        services = [child for child in children if child.ppid() == process.pid]
        assert len(services) == 4, "gateway, router, kvstore, and what forks prefill, decode and draft"
        workers = [
            child for child in children for service in services if child.ppid() == service.pid and _is_worker(child)
        ]
        assert len(workers) == 3
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
            messages = [{"role": "user", "content": "What is the weather in Bergen?"}]
            usages = []
            for _ in range(2):
                stream = await client.chat.completions.create(
                    model="penstock-mini",
                    messages=messages,
                    tools=TOOLS,
                    temperature=0,
                    max_tokens=60,
                    stream=True,
                    stream_options={"include_usage": True},
                    extra_headers={"x-session-affinity": "test"},
                )
                content = ""
                async for chunk in stream:
                    content += (chunk.choices[0].delta.content or "") if chunk.choices else ""
                    usages += [chunk.usage] if chunk.usage else []
                messages += [
                    {"role": "assistant", "content": content},
                    {"role": "user", "content": "And in Lisbon? " * 6},
                ]
            assert usages[0].prompt_tokens_details.cached_tokens == 0
            assert usages[1].prompt_tokens_details.cached_tokens > 0.5 * usages[0].prompt_tokens
        children = psutil.Process(process.pid).children(recursive=True)
        listening = [one for child in children for one in child.net_connections("inet") if one.status == "LISTEN"]
        doors = [one.laddr.ip.removeprefix("::ffff:") for one in listening]
        assert ({*doors}, len(doors)) == ({"127.0.0.1"}, 2), "clients' doors, and no other"
        directory = sockets(children)
        assert directory.is_dir()
        assert len(children) > 6, "what renders templates and tries grammars ends too"
        process.send_signal(signal.SIGINT)
        async with asyncio.timeout(30):
            assert await process.wait() == 0
        assert gone(children)
    assert left_behind() == before and not directory.exists()


async def test_an_old_session_goes_on_after_a_restart(tmp_path):
    """With a directory on disk; the promise to keep the session goes on, too."""
    disk = ("--kv-nvme-dir", str(tmp_path / "kv"), "--kv-nvme-bytes", "256MiB")
    messages = [{"role": "user", "content": "What is the weather in Bergen? " * 6}]
    answers = []
    for _ in range(2):
        async with up("--aggregated", *disk) as (process, _, url):
            async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
                answer = await client.chat.completions.create(
                    model="penstock-mini",
                    messages=messages,
                    temperature=0,
                    max_tokens=20,
                    extra_headers={"x-session-affinity": "test"},
                    extra_body={"penstock": {"retain": "10m"}},
                )
            answers.append((answer.choices[0].message.content, answer.usage.model_extra["penstock"]))
            process.send_signal(signal.SIGINT)
            assert await process.wait() == 0
    (text, cold), (again, warm) = answers
    assert text == again
    assert cold["cached_tokens"]["nvme"] == 0
    assert warm["cached_tokens"]["nvme"] > 0.5 * cold["computed_tokens"]
    assert cold["retained_s"] == warm["retained_s"] == 600.0


async def test_workers_are_forked_from_one_process():
    """They share memory that none of them has written to since: some of what torch's import made."""
    async with up("--prefill", "1", "--draft", "none") as (_, children, _):
        workers = [child for child in children if _is_worker(child)]
        assert len({worker.ppid() for worker in workers}) == 1
        assert all(_shared_anonymous(worker.pid) > 16 << 20 for worker in workers)


def _is_worker(process: psutil.Process) -> bool:
    return any(f"-m penstock.{name} " in " ".join(process.cmdline()) for name in ("prefill", "decode", "draft"))


def _shared_anonymous(pid: int) -> int:
    """Bytes of anonymous memory that it shares with others."""
    lines = [line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]]
    sizes = {name.rstrip(":"): int(size) * 1024 for name, size, *_ in lines}
    return sizes["Anonymous"] - sizes["Private_Dirty"]


async def test_nothing_outlives_a_killed_supervisor():
    before = left_behind()
    async with up("--aggregated") as (process, children, _):
        directory = sockets(children)
        process.kill()
        await process.wait()
        await until(lambda: gone(children), "all services have ended", 20)
    assert left_behind() == before and not directory.exists()


async def test_a_supervisor_that_stands_still_holds_up_nobody():
    """Nobody reads what the services log meanwhile, which is more than a pipe takes."""
    async with up("--aggregated", "--draft", "none", "--log-level", "info") as (process, _, url):
        process.send_signal(signal.SIGSTOP)
        try:
            async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=20) as client:
                for number in range(400):
                    await client.completions.create(model="penstock-mini", prompt=f"{number}", max_tokens=1)
        finally:
            process.send_signal(signal.SIGCONT)


async def test_the_demo_is_served_from_the_cache():
    command = (sys.executable, "-m", "penstock.cli", "demo", "--seed", "3")
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    async with asyncio.timeout(150):
        output, _ = await process.communicate()
    text = output.decode()
    assert process.returncode == 0, text
    assert re.search(r"prompt tokens \(\d\d%\) were reused", text)
    assert "prefill and decode have workers of their own, to show the hand-off" in text, "whatever cores there are"
    drawn = re.search(r"held-out sessions \(seed 3\): (\d+) of (\d+) calls right", text)
    assert drawn and 0 <= int(drawn[1]) <= int(drawn[2]) and int(drawn[2]) > 5


async def test_a_draft_with_other_tokens_is_refused_before_anything_starts(tmp_path):
    """With the first difference."""
    draft = str(write_checkpoint(tmp_path / "draft"))
    command = (sys.executable, "-m", "penstock.cli", "up", "--port", "0", "--draft", draft)
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    async with asyncio.timeout(30):
        _, errors = await process.communicate()
    assert process.returncode == 2
    assert b"has other tokens than the model" in errors and b"of the draft and" in errors


async def test_a_wrong_model_is_refused_before_anything_starts(tmp_path):
    command = (sys.executable, "-m", "penstock.cli", "up", "--port", "0", "--model", str(tmp_path))
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    async with asyncio.timeout(30):
        _, errors = await process.communicate()
    assert process.returncode == 2
    assert b"config.json" in errors
