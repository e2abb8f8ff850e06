"""When a worker is going to have the blocks of a prompt that it lacks, by its own prediction."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.v1 import kvstore_pb2

HARDLY = 1.25
"""Waiting for another worker may take this many times as long as computing: it saves the computation all the same."""
LONGEST_WAIT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Seconds from now on, for blocks that follow each other."""

    queue_s: float
    """Until it begins to compute them: the tokens of others come first."""
    block_s: float
    """For the first block."""
    growth_s: float = 0.0
    """How much longer each block takes than the one before it, whose tokens it attends to as well."""
    step_blocks: int = 1
    """Blocks of one step, which come together."""

    def seconds(self, blocks: int) -> float:
        """Until the first `blocks` are computed, as if nothing came after them."""
        return self.queue_s + blocks * self.block_s + self.growth_s * blocks * (blocks - 1) / 2

    def ready_s(self, blocks: int, of: int) -> float:
        """Until the first `blocks` of a run of `of` are there: at the end of the step that computes them."""
        steps = -(-blocks // self.step_blocks)
        return self.seconds(min(of, steps * self.step_blocks))

    def patience_s(self, blocks: int) -> float:
        """The longest wait for the first `blocks`: after that the worker itself would have computed them."""
        return min(HARDLY * self.seconds(blocks), LONGEST_WAIT_S)

    def later(self, seconds: float, blocks: int) -> Pace:
        """The pace after `seconds`, for the blocks behind the first `blocks`."""
        return Pace(
            queue_s=max(0.0, self.queue_s - seconds),
            block_s=self.block_s + self.growth_s * blocks,
            growth_s=self.growth_s,
            step_blocks=self.step_blocks,
        )


def pace_to_message(pace: Pace) -> kvstore_pb2.Pace:
    """A Pace for a store."""
    return kvstore_pb2.Pace(
        queue_s=pace.queue_s, block_s=pace.block_s, growth_s=pace.growth_s, step_blocks=pace.step_blocks
    )
