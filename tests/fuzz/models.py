"""What the makers of model directories write: configurations, weights' headers, tokenizers, chat templates."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import safetensors
from tokenizers import Tokenizer

from penstock.chat.model import ChatModelError, load_chat_model
from penstock.chat.template import ChatTemplate
from penstock.checkpoint import CheckpointError, inspect, inspect_adapter, inspect_head
from penstock.checkpoint.files import read_object
from penstock.checkpoint.model_config import parse_config, text_values
from penstock.checkpoint.tensors import declared_tensors, weight_files
from penstock.checkpoint.tokenizer_file import converted
from penstock.errors import InvalidRequest
from penstock.testing.adapters import write_adapter
from penstock.testing.checkpoints import TinyModel, write_checkpoint

from .contract import Check, Contract, Opened, Stopped, plain, stopped_after
from .corpus import CORPUS

SMALL = TinyModel(layers=1, hidden_size=32, intermediate_size=32, heads=2, kv_heads=1)
FAMILY_WORDS = tuple(
    f'"{word}"'.encode()
    for word in (
        "LlamaForCausalLM", "Qwen3MoeForCausalLM", "MixtralForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM",
        "Phi3ForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "rope_scaling", "rope_parameters", "rope_type",
        "factor", "longrope", "yarn", "llama3", "linear", "layer_types", "sliding_window", "sliding_attention",
        "full_attention", "text_config", "num_experts", "mlp_only_layers", "eos_token_id", "partial_rotary_factor",
        "short_factor", "long_factor", "use_sliding_window", "max_window_layers", "head_dim", "original_max_positions",
        "DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration", "Llama4ForCausalLM", "q_lora_rank", "kv_lora_rank",
        "n_group", "topk_group", "first_k_dense_replace", "n_routed_experts", "mscale_all_dim", "no_rope_layers",
        "chunked_attention", "attention_chunk_size", "moe_layers", "interleave_moe_layer_step", "quantization_config",
        "fp8", "compressed-tensors", "config_groups", "group_size", "weight_block_size", "num_nextn_predict_layers",
    )
)  # fmt: skip
TEMPLATE_WORDS = (
    b"{% for message in messages %}", b"{% endfor %}", b"{{ message.content }}", b"{% if tools %}", b"{% else %}",
    b"{% endif %}", b"{% set x = 1 %}", b"{{", b"}}", b"{%", b"%}", b"{#", b"#}", b"|tojson", b"|trim", b"| length",
    b"raise_exception('no')", b"namespace(a=1)", b"loop.index0", b"{% macro m(a) %}", b"{% endmacro %}", b"messages[0]",
    b"~", b"is defined", b"{% generation %}", b"{% endgeneration %}", b"{% break %}", b"range(9)", b"not ", b"(", b")",
    b"|center(1000000000)", b"* 1000000000", b"** 1000000", b"'%1000000000d' % 1", b"'{:>1000000000}'.format(1)",
    b"|indent(100000000)", b"[1:-1]", b"strftime_now('%Y')", b"{% include 'a' %}", b"{% extends 'a' %}", b"'",
    b"{% for a in range(99999) %}", b"|batch(2)", b"|wordwrap(0)", b"|join", b"|list", b"{% filter upper %}",
    b"{% endfilter %}", b"{% call m(1) %}", b"{% endcall %}", b"{% raw %}", b"{% endraw %}", b"__class__", b"'a'",
)  # fmt: skip
ADAPTER_WORDS = tuple(
    f'"{word}"'.encode()
    for word in (
        "r", "lora_alpha", "target_modules", "exclude_modules", "rank_pattern", "alpha_pattern", "use_rslora", "bias",
        "layers_to_transform", "all-linear", "q_proj", "down_proj", r".*\\.(q|v)_proj", "use_dora", "modules_to_save",
    )
)  # fmt: skip
SETTINGS_WORDS = (b'"chat_template"', b'"eos_token"', b'"content"', b'"name"', b'"default"', b'"template"')
TOKENIZER_WORDS = tuple(
    f'"{word}"'.encode()
    for word in (
        "model", "vocab", "merges", "type", "BPE", "WordLevel", "Unigram", "added_tokens", "content", "special", "id",
        "pre_tokenizer", "ByteLevel", "normalizer", "decoder", "post_processor", "TemplateProcessing", "unk_id",
        "truncation", "padding", "Split", "Regex", "pattern", "byte_fallback", "unk_token", "Sequence", "Replace",
    )
)  # fmt: skip
RENDER_S = 0.2
"""What a rendering may take here; in a mesh a process of its own is stopped at more."""
OWN = re.compile(r"<(class|function|bound|built-in|[\w. ]+ at 0x)|<Namespace")
"""What Python shows of an object, which need not be the same twice."""
LARGE = re.compile(rb"\d{6}")
"""In a template: one operation may take all the memory that a process has, so it is only made here."""
MESSAGES = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}]},
    {"role": "tool", "content": "42", "tool_call_id": "c"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


@contextmanager
def _directory(file: str) -> Iterator[Check]:
    """A sound model directory, in which one file is replaced."""
    with tempfile.TemporaryDirectory() as root:
        model = write_checkpoint(Path(root) / "model", SMALL)

        def check(data: bytes) -> None:
            (model / file).write_bytes(data)
            _inspected(model)

        yield check


def _inspected(model: Path) -> None:
    found = inspect(model)
    assert found.parameters > 0 and all(0 <= token < found.config.vocab_size for token in found.eos_token_ids)


@contextmanager
def _config() -> Iterator[Check]:
    with tempfile.TemporaryDirectory() as root:
        model = write_checkpoint(Path(root) / "model", SMALL)
        file = model / "config.json"

        def check(data: bytes) -> None:
            file.write_bytes(data)
            for context in (None, 1 << 20):
                parsed = parse_config(file, text_values(file, read_object(file)), context)
                assert len(parsed.windows) == parsed.n_layers and parsed.n_heads % parsed.n_kv_heads == 0
                assert 0 < parsed.rotary_dim <= parsed.head_dim and parsed.max_positions > 0
            _inspected(model)

        yield check


@contextmanager
def _head() -> Iterator[Check]:
    with tempfile.TemporaryDirectory() as root:
        target = inspect(write_checkpoint(Path(root) / "model", TinyModel()))
        head = Path(root) / "head"
        head.mkdir()
        shutil.copy(target.weight_files[0], head)

        def check(data: bytes) -> None:
            (head / "config.json").write_bytes(data)
            inspect_head(head, target)

        yield check


@contextmanager
def _adapter() -> Iterator[Check]:
    with tempfile.TemporaryDirectory() as root:
        target = write_checkpoint(Path(root) / "model", SMALL)
        adapter, config = write_adapter(Path(root) / "adapter", target), inspect(target).config

        def check(data: bytes) -> None:
            (adapter / "adapter_config.json").write_bytes(data)
            found = inspect_adapter(adapter, config)
            assert found.parts and all(part.rank > 0 and part.scale > 0 for part in found.parts)

        yield check


@contextmanager
def _safetensors() -> Iterator[Check]:
    with tempfile.TemporaryDirectory() as root:
        file = Path(root) / "model.safetensors"

        def check(data: bytes) -> None:
            file.write_bytes(data)
            found = declared_tensors((file,))
            ends = [info.offset + info.nbytes for info in found.values()]
            assert max(ends, default=len(data)) == len(data), "the tensors are the file"
            with suppress(safetensors.SafetensorError):  # who is stricter than we are, as with names that come twice
                theirs = {name: (info["dtype"], info["shape"]) for name, info in safetensors.deserialize(data)}
                assert theirs == {name: (info.dtype, [*info.shape]) for name, info in found.items()}

        yield check


@contextmanager
def _index() -> Iterator[Check]:
    with tempfile.TemporaryDirectory() as root:
        model = Path(root)

        def check(data: bytes) -> None:
            (model / "model.safetensors.index.json").write_bytes(data)
            files = weight_files(model)
            assert files and all(file.parent == model for file in files)
            declared_tensors(files)

        yield check


@contextmanager
def _chat_model(file: str) -> Iterator[Check]:
    with tempfile.TemporaryDirectory() as root:
        model = write_checkpoint(Path(root) / "model", SMALL)
        (model / "chat_template.jinja").unlink()

        def check(data: bytes) -> None:
            (model / file).write_bytes(data)
            load_chat_model(model)

        yield check


@contextmanager
def _tiktoken(file: str) -> Iterator[Check]:
    """A model directory with a tokenizer of tiktoken's, in which one file is replaced."""
    with tempfile.TemporaryDirectory() as root:
        model = Path(root)
        for name, seed in (
            ("tiktoken.model", "tiktoken/bytes.tiktoken"),
            ("tokenization_a.py", "tokenizer_code/plain.txt"),
        ):
            shutil.copy(CORPUS / seed, model / name)

        def check(data: bytes) -> None:
            (model / file).write_bytes(data)
            read = Tokenizer.from_str(converted(model))
            ids = read.encode("the thin 漢字", add_special_tokens=False).ids
            assert all(0 <= token < read.get_vocab_size() for token in ids)

        yield check


def _template(data: bytes) -> None:
    """Made or refused at once; rendered or refused in what is given to a rendering; the same when it is watched."""
    template = ChatTemplate(data.decode(errors="replace"), {"bos_token": "<s>"})
    assert isinstance(template.variables, frozenset)
    if LARGE.search(data):
        return
    with suppress(InvalidRequest, Stopped), stopped_after(RENDER_S):
        text = template.render(MESSAGES, TOOLS)
        resumed = template.resume(MESSAGES, TOOLS, None)
        assert resumed is not None
        assert resumed.text == text or OWN.search(text)


def _of_models(name: str, opened: Opened, words: tuple[bytes, ...] = FAMILY_WORDS) -> Contract:
    return Contract(name=name, opened=opened, refusals=(CheckpointError,), words=words)


CONTRACTS = (
    _of_models("config", _config),
    _of_models("generation_config", partial(_directory, "generation_config.json")),
    _of_models("head_config", _head),
    _of_models("adapter", _adapter, ADAPTER_WORDS),
    _of_models("safetensors", _safetensors, (b'"F32"', b'"BF16"', b'"shape"', b'"data_offsets"', b'"dtype"', b"[0,4]")),
    _of_models("index", _index, (b'"weight_map"', b'"a.safetensors"', b'".."', b'"a\\u0000b"', b'"\\ud800"', b'"/"')),
    _of_models("vocabulary", partial(_directory, "tokenizer.json"), TOKENIZER_WORDS),
    _of_models("tiktoken", partial(_tiktoken, "tiktoken.model"), (b"AA== 0", b"dGg= ", b"\n", b"=")),
    _of_models("tokenizer_code", partial(_tiktoken, "tokenization_a.py"), (b"pat_str", b".join(", b"[", b'r"""', b"(")),
    Contract(
        name="tokenizer",
        opened=partial(_chat_model, "tokenizer.json"),
        refusals=(ChatModelError,),
        words=TOKENIZER_WORDS,
    ),
    Contract(
        name="tokenizer_config",
        opened=partial(_chat_model, "tokenizer_config.json"),
        refusals=(ChatModelError,),
        words=SETTINGS_WORDS,
    ),
    Contract(
        name="template",
        opened=plain(_template),
        refusals=(ValueError,),
        words=TEMPLATE_WORDS,
        seconds=2.0,
    ),
)
