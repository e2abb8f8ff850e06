"""What moves between host and device: weights, pages, and page memory that another process opens."""

from __future__ import annotations

import hashlib
import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tests.libs.engine.cuda.test_arena import seen_elsewhere
from tests.libs.kv.device_contract import noise

from penstock.checkpoint import inspect
from penstock.engine.kernels.cuda.chunks import in_order
from penstock.engine.kernels.cuda.memory import CudaMemory
from penstock.engine.kernels.cuda.upload import Upload
from penstock.engine.models.loading import load_weights
from penstock.engine.step.memory import PageMemory
from penstock.testing.checkpoints import TinyModel, write_checkpoint

CUDA = torch.device("cuda", 0)


@pytest.fixture
def checkpoint(tmp_path):
    return inspect(write_checkpoint(tmp_path / "model", TinyModel(hidden_size=256, intermediate_size=512, shards=2)))


def test_weights_arrive(checkpoint):
    for ahead in (0, 1 << 20, 1 << 30):
        with Upload(checkpoint, CUDA, lanes=3, chunk_bytes=50_000, ahead_bytes=ahead) as upload:
            brought = load_weights(checkpoint, torch.bfloat16, CUDA, source=upload.take)
        plain = load_weights(checkpoint, torch.bfloat16, CUDA)
        for mine, right in zip(brought.layers, plain.layers, strict=True):
            for name in ("qkv", "out", "input_norm"):
                assert torch.equal(getattr(mine, name), getattr(right, name)), name
        assert torch.equal(brought.head, plain.head)


def test_each_tensor_is_whole_while_others_are_freed(checkpoint):
    """Memory of tensors that went away is given to those that arrive."""
    for _ in range(5):
        with Upload(checkpoint, CUDA, lanes=4, chunk_bytes=10_000, ahead_bytes=200_000) as upload:
            for info in in_order(checkpoint):
                taken = upload.take(info).double().sum()
                right = load_one(info).double().sum()
                assert float(taken) == pytest.approx(float(right), rel=1e-9)


def load_one(info):
    from safetensors import safe_open

    with safe_open(info.file, framework="pt") as stored:
        return stored.get_tensor(info.name).to(CUDA)


def test_pages_come_and_go_beside_steps(checkpoint):
    memory = PageMemory(checkpoint.config, 40, 16, torch.bfloat16, CUDA, memory=CudaMemory(CUDA))
    size = memory.block_bytes
    blocks = [noise(number, size) for number in range(1, 9)]
    busy = torch.randn(2048, 2048, device=CUDA)

    def beside() -> None:
        for _ in range(50):
            busy.mul_(1.0).matmul(busy)

    with ThreadPoolExecutor(4) as threads:
        beside()
        written = list(threads.map(lambda at: memory.write([at + 1], [blocks[at]]), range(8)))
        assert written == [1] * 8
        seen = list(threads.map(lambda at: bytes(memory.view(at + 1)), range(8)))
    assert seen == [bytes(block) for block in blocks]
    back = memoryview(bytearray(size))
    memory.read_into(3, back)
    assert back == blocks[2]
    assert memory.write([20, 21], blocks[:2], lambda index, copy: index == 0) == 1
    assert bytes(memory.view(20)) == bytes(blocks[0]) and not any(memory.view(21))


def test_a_page_is_read_after_the_step_that_computed_it(checkpoint):
    """Without `computed` the copy would overtake the step: the step is long."""
    memory = PageMemory(checkpoint.config, 4, 16, torch.float32, CUDA, memory=CudaMemory(CUDA))
    long = torch.randn(4096, 4096, device=CUDA)
    for value in (1.0, 2.0, 3.0):
        for _ in range(20):
            long = (long @ long).clamp_(-1, 1)
        memory.data[2].fill_(value)
        memory.computed(wait=False)
        assert memoryview(memory.view(2)).cast("f")[0] == value


def test_rows_of_a_page_are_copied_behind_the_step_that_computed_them(checkpoint):
    """And looked at behind the copy, all on the stream of steps."""
    memory = PageMemory(checkpoint.config, 4, 16, torch.bfloat16, CUDA, memory=CudaMemory(CUDA))
    long = torch.randn(4096, 4096, device=CUDA)
    for value in (1.0, 2.0, float("nan")):
        for _ in range(20):
            long = (long @ long).clamp_(-1, 1)
        memory.data[3].fill_(9.0)
        memory.data[2].fill_(value)
        memory.copy_rows(2, 3, 5)
        assert memory.sound_rows(3, 5) == math.isfinite(value)
        assert torch.equal(memory.data[3, :, :, :5].isnan(), memory.data[2, :, :, :5].isnan())
        assert torch.equal(memory.data[3, :, :, :5].nan_to_num(), memory.data[2, :, :, :5].nan_to_num())
        assert not memory.data[3, :, :, 5:].any() and not memory.data[1].any()


def test_another_process_reads_a_page_on_the_device(checkpoint):
    pytest.importorskip("cupy")
    memory = PageMemory(checkpoint.config, 10, 16, torch.bfloat16, CUDA, memory=CudaMemory(CUDA))
    assert memory.lease is not None, "cupy is here, so the page memory is an arena"
    block = noise(7, memory.block_bytes)
    assert memory.write([6], [block]) == 1
    seen = seen_elsewhere(
        memory.lease,
        6,
        "import torch\nfrom penstock.kv.device.cuda import open_cuda",
        "open_cuda()",
        "torch.from_dlpack(pool.page({page})).cpu().numpy()",
    )
    assert seen == hashlib.sha256(block).hexdigest()
    assert bytes(memory.view(6)) == bytes(block)
