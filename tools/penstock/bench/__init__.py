"""`penstock bench NAME`: measurements that stand beside a peer or a limit of the same run."""

from penstock.bench.commands import app

__all__ = ["app"]
