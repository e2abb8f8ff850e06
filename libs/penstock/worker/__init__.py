"""The common part of prefill and decode workers: an engine connected to the KV store and to the router.

The engine does not use gRPC, and the services do not see pages. This package connects them.
"""
