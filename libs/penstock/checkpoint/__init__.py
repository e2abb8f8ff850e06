"""Reads and checks a Hugging Face model directory, without torch.

`inspect` answers in well under a second, reads no weight bytes, and either returns a `Checkpoint` that the engine
can load or raises `CheckpointError` with the file and the reason.
"""

from penstock.checkpoint.adapter import AdaptedPart, AdapterCheckpoint, adapter_of_rank, inspect_adapter
from penstock.checkpoint.attention import KvForm, Latent, Temperature
from penstock.checkpoint.directory import Checkpoint, ExpertCopies, Rank, RankPart, inspect
from penstock.checkpoint.draft_head import HEAD_EMBEDDING, HeadCheckpoint, inspect_head
from penstock.checkpoint.errors import CheckpointError
from penstock.checkpoint.experts import Experts, HeldExpert
from penstock.checkpoint.families import SUPPORTED
from penstock.checkpoint.fingerprint import fingerprint, tokenizer_fingerprint
from penstock.checkpoint.model_config import ModelConfig
from penstock.checkpoint.naming import LayerNames, layer_names, layer_of
from penstock.checkpoint.pictures.form import PictureForm, PicturePart
from penstock.checkpoint.pictures.padded import PaddedForm
from penstock.checkpoint.pictures.part import picture_form
from penstock.checkpoint.pictures.patches import PatchForm
from penstock.checkpoint.pictures.tiles import TileForm
from penstock.checkpoint.remembered import remembered_fingerprint
from penstock.checkpoint.rope import Rope
from penstock.checkpoint.split import TensorCut, check_expert_groups, check_split, part_of
from penstock.checkpoint.tensors import EMBEDDING, HEAD, TensorInfo
from penstock.checkpoint.tokenizer_file import tokenizer_file

__all__ = [
    "EMBEDDING",
    "HEAD",
    "HEAD_EMBEDDING",
    "SUPPORTED",
    "AdaptedPart",
    "AdapterCheckpoint",
    "Checkpoint",
    "CheckpointError",
    "ExpertCopies",
    "Experts",
    "HeadCheckpoint",
    "HeldExpert",
    "KvForm",
    "Latent",
    "LayerNames",
    "ModelConfig",
    "PaddedForm",
    "PatchForm",
    "PictureForm",
    "PicturePart",
    "Rank",
    "RankPart",
    "Rope",
    "Temperature",
    "TensorCut",
    "TensorInfo",
    "TileForm",
    "adapter_of_rank",
    "check_expert_groups",
    "check_split",
    "fingerprint",
    "inspect",
    "inspect_adapter",
    "inspect_head",
    "layer_names",
    "layer_of",
    "part_of",
    "picture_form",
    "remembered_fingerprint",
    "tokenizer_file",
    "tokenizer_fingerprint",
]
