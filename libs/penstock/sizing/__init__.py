"""What a model takes and gives on devices that are not there: sizes of weights and KV on each rank, and decode rates.

Arithmetic over config.json and, where they are there, the index and the headers of a checkpoint; no weights, no torch.
"""

from penstock.sizing.choosing import Sized, Sizing, enough, size
from penstock.sizing.devices import DeviceKind, PlannedSplit, Workload
from penstock.sizing.ranks import StageRank
from penstock.sizing.rates import DecodeRate
from penstock.sizing.source import Described, describe

__all__ = [
    "DecodeRate",
    "Described",
    "DeviceKind",
    "PlannedSplit",
    "Sized",
    "Sizing",
    "StageRank",
    "Workload",
    "describe",
    "enough",
    "size",
]
